"""``penstock bench pauses``: how long an all-reduce takes after some time without traffic, and the first ones of a group.

Estimates of rates and round trips get old, the kernel forgets what a connection could carry, token buckets fill up. The target
is 2 % beyond the time without a pause.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click

from penstock.numbers import milliseconds
from penstock.reports import Axis, Bar, Bars, Column, Line, Next, Part, Picture, Table, series
from penstock.tools.bench import machine
from penstock.tools.bench.emulated import Story, link_of, link_options, names_of, publish
from penstock.tools.bench.options import EVERYTHING, check_files, files, parse_size
from penstock.tools.bench.output import reporting_errors, say
from penstock.tools.bench.program import run_program
from penstock.tools.testbed.bed import Loopback
from penstock.tools.testbed.cluster import Testbed


@click.command()
@click.option("--size", default="64M", show_default=True, help="Of an all-reduce.")
@click.option("--pauses", default="0,0.3,1,3", show_default=True, help="Seconds without traffic.")
@click.option("--backends", default="penstock,gloo", show_default=True)
@link_options
@click.option("--turns", type=click.IntRange(1), default=11, show_default=True, help="All-reduces after each pause.")
@click.option("--groups", type=click.IntRange(0), default=5, show_default=True, help="Fresh groups.")
@click.option("--timeout", type=float, default=300.0, show_default=True, help="Seconds for each backend.")
@files(EVERYTHING)
def command(
    size: str,
    pauses: str,
    backends: str,
    rate: float,
    flow: str,
    turns: int,
    groups: int,
    timeout: float,
    json_path: str | None,
    report_path: str | None,
) -> None:
    """Measure what a pause costs the next all-reduce, and what the first ones of a group take.

    Needs root, for emulated hosts.
    """
    check_files(json_path=json_path, report_path=report_path)
    chosen = names_of("backend", backends, _BACKENDS)
    lengths = _parse_pauses(pauses)
    nbytes = parse_size(size)
    if nbytes % 4:
        raise click.UsageError(f"{nbytes} bytes are no whole number of float32 elements")
    link = link_of(rate, flow)
    rows: list[Row] = []
    with reporting_errors():
        description = machine.describe()
        for backend in chosen:
            say(f"{backend}, {nbytes} bytes after {pauses} s ...")
            with Testbed(hosts=2, link=link) as bed:
                rows += measure(
                    bed, backend=backend, nbytes=nbytes, pauses=lengths, turns=turns, groups=groups, timeout_s=timeout
                )
        publish(
            rows,
            table=table,
            story=story,
            link=link,
            description=description,
            json_path=json_path,
            report_path=report_path,
        )


@dataclass(frozen=True)
class Row:
    """All-reduces of one backend that began in the same situation; times in seconds, of the slower rank."""

    backend: str
    nbytes: int
    after: str
    samples: int
    median_s: float
    worst_s: float
    steady_s: float
    """The median without a pause."""

    @property
    def ratio(self) -> float:
        """How much longer it takes than without a pause."""
        return self.median_s / self.steady_s


def measure(
    bed: Testbed | Loopback,
    *,
    backend: str,
    nbytes: int,
    pauses: Sequence[float],
    turns: int,
    groups: int,
    timeout_s: float,
) -> list[Row]:
    """One backend on the hosts of ``bed``, a rank on each.

    Raises:
        BenchError: a rank failed or hung, with the end of what it said.
    """
    options = {
        "backend": backend,
        "bytes": nbytes,
        "pauses": list(pauses),
        "turns": turns,
        "groups": groups,
        "seed": _SEED,
    }
    records = run_program(bed, "pauses_rank", options, what=f"pauses, {backend}", ranks=2, timeout_s=timeout_s)
    return summarise(records, backend, nbytes)


def summarise(records: Sequence[Sequence[dict[str, Any]]], backend: str, nbytes: int) -> list[Row]:
    """What the ranks said, in numbers. Pure."""
    samples: dict[str, list[float]] = {}
    for of_ranks in zip(*records, strict=True):
        if "pause_s" in of_ranks[0]:
            pause = of_ranks[0]["pause_s"]
            samples.setdefault(_after(pause), []).append(max(one["seconds"] for one in of_ranks))
            if pause:
                samples.setdefault(_NEXT, []).append(max(one["next_s"] for one in of_ranks))
        else:
            for number, taken in enumerate(zip(*(one["first_s"] for one in of_ranks), strict=True), 1):
                samples.setdefault(f"number {number} of {of_ranks[0]['of']}", []).append(max(taken))
    steady = statistics.median(samples[_after(0.0)])
    lengths = sorted({record["pause_s"] for record in records[0] if "pause_s" in record})
    rest = sorted(samples.keys() - map(_after, lengths), key=lambda after: (after != _NEXT, after))
    return [
        Row(backend, nbytes, after, len(samples[after]), statistics.median(samples[after]), max(samples[after]), steady)
        for after in [*map(_after, lengths), *rest]
    ]


def table(rows: Sequence[Row]) -> Table:
    """One line a situation."""
    columns = [
        Column("after", is_text=True),
        Column("median"),
        Column("ratio", meaning="over the median without a pause"),
        Column("worst"),
        Column("samples"),
    ]
    lines = [
        Line(
            [row.after, milliseconds(row.median_s), f"{row.ratio:.3f}", milliseconds(row.worst_s), str(row.samples)],
            (row.backend,),
        )
        for row in rows
    ]
    return Table("All-reduces after pauses", columns, lines, [Column("backend", is_text=True)])


def story(rows: Sequence[Row]) -> Story:
    """What the report says."""
    ours = [row for row in rows if row.backend == rows[0].backend]
    worst = max(ours, key=lambda row: row.ratio)
    # The first screen has no room for each of a group's first operations.
    bars = [
        Bar(row.after, [Part(1e3 * row.median_s, series(0).colour)], f"{row.median_s * 1e3:.0f} ms, {row.ratio:.2f}")
        for row in ours
        if not re.match(r"number ([2-9]|\d\d)", row.after)
    ]
    return Story(
        kind="Penstock bench: pauses",
        answer=f"{rows[0].backend} takes {worst.ratio:.2f} times as long as in use at most ({worst.after})",
        picture=Picture(
            "pauses",
            Bars(Axis("time of an all-reduce", "ms"), bars),
            f"All-reduces of {rows[0].nbytes >> 20} MiB after pauses, and the first ones of groups: {rows[0].backend}.",
            "Medians, and over that without a pause; of each pair of ranks the slower one.",
        ),
        next=Next("Choose the number of streams.", "docs/guide/tune.md"),
    )


def _parse_pauses(text: str) -> list[float]:
    """Seconds, with 0 among them, which the others are compared with. Raises click.BadParameter."""
    try:
        found = sorted({float(part) for part in text.split(",")} | {0.0})
    except ValueError:
        raise click.BadParameter(f"--pauses {text}: give seconds, such as 0.3,1") from None
    if not all(0 <= pause_s <= _LONGEST_S for pause_s in found):
        raise click.BadParameter(f"--pauses {text}: give seconds between 0 and {_LONGEST_S}")
    return found


def _after(pause_s: float) -> str:
    return f"a pause of {pause_s:g} s" if pause_s else "no pause"


_BACKENDS = ("penstock", "gloo")
_NEXT = "the one after that"
_LONGEST_S = 60
_SEED = 1
