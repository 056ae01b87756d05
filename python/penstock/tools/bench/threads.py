"""``penstock bench threads``: how much faster several I/O threads are, and the processor cycles that a byte costs each.

Two ranks on this machine send over TCP, with each number of I/O threads in turn. What a network card does is missing: over
loopback the sender's system call also does the kernel's part of receiving.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from penstock.numbers import duration, plural
from penstock.reports import Axis, Bar, Bars, Column, Line, Next, Page, Part, Picture, Section, Table, series
from penstock.tools.bench import machine
from penstock.tools.bench.launcher import BenchError
from penstock.tools.bench.options import check_files, files, parse_size
from penstock.tools.bench.output import reporting_errors, result_console, say, write_json, write_report
from penstock.tools.bench.program import run_program
from penstock.tools.bench.report import does_not_show
from penstock.tools.testbed.bed import Loopback


@click.command()
@click.option("--size", default="64M", show_default=True, help="Of a message and of an all-reduce.")
@click.option("--threads", default="1,2,4", show_default=True, help="Values of PENSTOCK_IO_THREADS.")
@click.option("--streams", type=click.IntRange(1, 64), default=4, show_default=True, help="PENSTOCK_STREAMS.")
@click.option("--turns", type=click.IntRange(1), default=5, show_default=True, help="Jobs with each number, by turns.")
@click.option("--operations", type=click.IntRange(1, 100), default=20, show_default=True, help="Of each kind in a job.")
@click.option("--timeout", type=float, default=120.0, show_default=True, help="Seconds for each job.")
@files("Write the figures to this file.")
def command(
    size: str,
    threads: str,
    streams: int,
    turns: int,
    operations: int,
    timeout: float,
    json_path: str | None,
    report_path: str | None,
) -> None:
    """Measure what a byte costs each I/O thread (PENSTOCK_IO_THREADS), and what share of it is under their lock."""
    check_files(json_path=json_path, report_path=report_path)
    counts = _parse_threads(threads)
    nbytes = parse_size(size)
    if nbytes % 4 or not nbytes:
        raise click.UsageError(f"{nbytes} bytes are no whole number of float32 elements")
    with reporting_errors():
        say(f"{nbytes} bytes with {threads} threads, {turns} jobs of each ...")
        description = machine.describe()
        with Loopback(hosts=1) as bed:
            rows = measure(
                bed,
                nbytes=nbytes,
                threads=counts,
                streams=streams,
                turns=turns,
                operations=operations,
                timeout_s=timeout,
            )
        result_console().print(table(rows).for_terminal())
        for line in lines(rows):
            result_console().print(line, highlight=False)
        write_json(json_path, description, [row.to_dict() for row in rows])
        write_report(report_path, lambda: page(rows, description))


@dataclass(frozen=True)
class Row:
    """What one rank does with one number of threads. Medians over jobs."""

    what: str
    """`send`, `receive` or `all-reduce`."""
    threads: int
    seconds: float
    """Of an operation."""
    cycles: list[float]
    """By thread, busiest first: a byte's, of those that the rank sends, or receives, or (all-reduce) does both with."""
    locked: float | None
    """Of the threads' processor time, the share in which they have the lock; None with one thread, which counts nothing."""
    waited: float | None
    """Of the threads' time, the share in which they wait for the lock."""
    hertz: float

    @property
    def all_cycles(self) -> float:
        """Of all threads."""
        return sum(self.cycles)

    @property
    def bits_per_core(self) -> float:
        """Bits a second that one whole core carries."""
        return 8 * self.hertz / self.all_cycles

    def cores(self, bits_per_s: float) -> float:
        """How many cores that rate takes."""
        return bits_per_s / self.bits_per_core

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        cores = {f"cores_{gigabits}_gbit": self.cores(1e9 * gigabits) for gigabits in LINKS}
        return {**asdict(self), "all_cycles": self.all_cycles, **cores}


def measure(
    bed: Loopback,
    *,
    nbytes: int,
    threads: Sequence[int],
    streams: int,
    turns: int,
    operations: int,
    timeout_s: float,
) -> list[Row]:
    """Jobs of two ranks by turns.

    Raises:
        BenchError: a rank failed or hung, with the end of what it said.
    """
    options = {"bytes": nbytes, "operations": operations}
    records: dict[int, list[list[list[dict[str, Any]]]]] = {count: [] for count in threads}
    for _ in range(turns):
        for count in threads:
            env = {"PENSTOCK_IO_THREADS": str(count), "PENSTOCK_STREAMS": str(streams), "PENSTOCK_SHM": "0"}
            what = f"threads, {count} of them"
            said = run_program(bed, "threads_rank", options, what=what, ranks=2, timeout_s=timeout_s, env=env)
            records[count].append(said)
    hertz = _hertz()
    return [
        summarise(what, count, [job[rank] for job in records[count]], nbytes, hertz)
        for what, rank in (("send", 0), ("receive", 1), ("all-reduce", 0))
        for count in threads
    ]


def summarise(what: str, threads: int, jobs: Sequence[Sequence[dict[str, Any]]], nbytes: int, hertz: float) -> Row:
    """What one rank said in each job, in numbers. Pure."""
    of_jobs = [next(record for record in records if record["what"] == what) for records in jobs]
    cycles = [
        sorted((hertz * cpu_s / record["operations"] / nbytes for cpu_s in record["cpu_s"]), reverse=True)
        for record in of_jobs
    ]
    if any(len(one) != threads for one in cycles):
        raise BenchError(f"{threads} I/O threads were asked for, and {[len(one) for one in cycles]} found")

    def share(of: str, over: str) -> float | None:
        shares = [sum(record[of]) / max(sum(record[over]), 1e-9) for record in of_jobs]
        return statistics.median(shares) if threads > 1 else None

    return Row(
        what=what,
        threads=threads,
        seconds=statistics.median(record["seconds"] for record in of_jobs),
        cycles=[statistics.median(of_thread) for of_thread in zip(*cycles, strict=True)],
        locked=share("locked_s", "cpu_s"),
        waited=share("waited_s", "busy_s"),
        hertz=hertz,
    )


def table(rows: Sequence[Row]) -> Table:
    """One line a number of threads."""
    columns = [
        Column("threads"),
        Column("time"),
        Column("cycles a byte", meaning="of processor time, all threads"),
        Column("by thread", is_text=True),
        Column("locked", meaning="share of the processor time under the lock"),
        Column("waited", meaning="share of the threads' time in which they wait for the lock"),
        Column("Gbit/s a core"),
    ]
    found = [
        Line(
            [
                str(row.threads),
                duration(row.seconds),
                f"{row.all_cycles:.2f}",
                " ".join(f"{one:.2f}" for one in row.cycles),
                "" if row.locked is None else f"{row.locked:.1%}",
                "" if row.waited is None else f"{row.waited:.1%}",
                f"{row.bits_per_core / 1e9:.1f}",
            ],
            (row.what,),
        )
        for row in rows
    ]
    return Table("What a byte costs", columns, found, [Column("", is_text=True)])


def lines(rows: Sequence[Row]) -> list[str]:
    """What follows, for people."""
    found = []
    for what in dict.fromkeys(row.what for row in rows):
        first, *others = [row for row in rows if row.what == what]
        cores = ", ".join(f"{first.cores(1e9 * rate):.2f} for {rate}" for rate in LINKS)
        found.append(f"{what}: cores that Gbit/s take: {cores}")
        if others:
            faster = ", ".join(f"{first.seconds / row.seconds:.1f} times with {row.threads}" for row in others)
            found.append(f"{what}: {plural(first.threads, 'thread')} to several: {faster}")
    return found


def page(rows: Sequence[Row], description: dict[str, Any]) -> Page:
    """The report."""
    whats = list(dict.fromkeys(row.what for row in rows))
    bars = [
        Bar(
            f"{row.what}, {row.threads}",
            [Part(row.all_cycles, series(whats.index(row.what)).colour)],
            f"{row.all_cycles:.2f}",
        )
        for row in rows
    ]
    first = rows[0]
    return Page(
        kind="Penstock bench: threads",
        answer=f"A byte takes {first.all_cycles:.2f} cycles to send: {first.bits_per_core / 1e9:.0f} Gbit/s a core",
        picture=Picture(
            "threads",
            Bars(Axis("processor time of a byte", "cycles"), bars),
            "Processor cycles that a byte costs, by what is done and the number of I/O threads.",
            "Processor time at the clock rate that the kernel names.",
        ),
        next=Next("See whether your ranks are bound by a core.", "penstock top"),
        setting="Two ranks on one machine, over TCP.",
        sections=[
            Section("In numbers", [table(rows), lines(rows)]),
            Section("What this does not show", [does_not_show(None)]),
            Section("Conditions", [machine.lines(description)]),
        ],
    )


def _parse_threads(text: str) -> list[int]:
    """Raises click.BadParameter."""
    parts = text.split(",")
    if not all(part.isdigit() and 1 <= int(part) <= 16 for part in parts):
        raise click.BadParameter(f"--threads {text}: give numbers from 1 to 16, such as 1,2,4")
    return sorted({int(part) for part in parts})


def _hertz() -> float:
    """The clock rate that the kernel names.

    Raises:
        BenchError: it names none.
    """
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("cpu MHz"):
            return 1e6 * float(line.partition(":")[2])
    raise BenchError("/proc/cpuinfo names no clock rate: cycles are not known here")


LINKS = (25, 100, 400)
"""Gbit/s of usual network cards."""
