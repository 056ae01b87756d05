"""``penstock bench urgency``: how long a small all-reduce takes while bulk is on its way, with and without `penstock.priority`.

Four cases: the bulk is of the same ranks; of neighbours, on the same two hosts; comes from a third host to one of both ranks; or
it is of the same ranks, and both go through an aggregator, on links where nothing caps a flow. The target is the time alone and
5 ms, or 10 ms where the bulk is another rank's or goes through aggregators.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click

from penstock.numbers import milliseconds, size
from penstock.reports import Axis, Bar, Bars, Column, Line, Next, Part, Picture, Table, series
from penstock.tools.bench import machine
from penstock.tools.bench.aggregated.cluster import Cluster
from penstock.tools.bench.emulated import Story, link_of, link_options, names_of, publish
from penstock.tools.bench.options import EVERYTHING, check_files, files, parse_size, parse_sizes
from penstock.tools.bench.output import reporting_errors, say
from penstock.tools.bench.program import run_program
from penstock.tools.testbed.bed import Loopback
from penstock.tools.testbed.cluster import Testbed

_AGGREGATED = "aggregated"
# By case: the ranks that sum small tensors, and those between which the bulk goes. Ranks are dealt to hosts in blocks.
CASES = {
    "same rank": ((0, 1), (0, 1)),
    "neighbour": ((0, 2), (1, 3)),
    "other host": ((0, 1), (2, 0)),
    _AGGREGATED: ((0, 1), (0, 1)),
}


@click.command()
@click.option("--sizes", default="64K,8M", show_default=True, help="Of the small all-reduces.")
@click.option("--bulk", default="256M", show_default=True, help="Of the tensor that is on its way.")
@click.option("--cases", default=",".join(CASES), show_default=True, help="Whose the bulk is.")
@click.option("--backends", default="penstock,gloo", show_default=True)
@link_options
@click.option("--turns", type=click.IntRange(1), default=3, show_default=True, help="Bulks of each way.")
@click.option(
    "--first", is_flag=True, help="Also the first urgent one after 11 s without; a turn takes so much longer."
)
@click.option("--timeout", type=float, default=300.0, show_default=True, help="Seconds for each case.")
@files(EVERYTHING)
def command(
    sizes: str,
    bulk: str,
    cases: str,
    backends: str,
    rate: float,
    flow: str,
    turns: int,
    first: bool,
    timeout: float,
    json_path: str | None,
    report_path: str | None,
) -> None:
    """Measure how long a small all-reduce waits behind bulk, and what `penstock.priority` changes.

    See docs/guide/priority.md. Needs root, for emulated hosts.
    """
    check_files(json_path=json_path, report_path=report_path)
    chosen_cases = names_of("case", cases, list(CASES))
    chosen = names_of("backend", backends, _BACKENDS)
    if odd := [nbytes for nbytes in [*parse_sizes(sizes), parse_size(bulk)] if nbytes % 4]:
        raise click.UsageError(f"{odd[0]} bytes are no whole number of float32 elements")
    link = link_of(rate, flow)
    rows: list[Row] = []
    with reporting_errors():
        description = machine.describe()
        for case in chosen_cases:
            for backend in chosen:
                if case == _AGGREGATED and backend != "penstock":
                    continue
                for nbytes in parse_sizes(sizes):
                    say(f"{case}: {backend}, {nbytes} bytes ...")
                    with contextlib.ExitStack() as stack:
                        deployment, on = None, None
                        if case == _AGGREGATED:
                            cluster = stack.enter_context(Cluster(2, rate_mbit=rate))
                            deployment, bed, on = cluster.deployment("int32", _WINDOW), cluster.bed, ["h0", "h1"]
                        else:
                            bed = stack.enter_context(Testbed(hosts=3 if case == "other host" else 2, link=link))
                        rows += measure(
                            bed,
                            case=case,
                            backend=backend,
                            nbytes=nbytes,
                            bulk_bytes=parse_size(bulk),
                            turns=turns,
                            first=first,
                            timeout_s=timeout,
                            deployment=deployment,
                            on=on,
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
    """One case, backend, size and way; times in seconds, of the slower of the two ranks."""

    case: str
    backend: str
    nbytes: int
    way: str
    """``alone``, ``usual``, ``urgent``; ``first``: urgent, and nothing was for 11 s."""
    samples: int
    median_s: float
    worst_s: float
    alone_s: float
    """The median alone."""
    rate: float | None
    """Bytes of bulk and small sums together a second, over the bulk's alone; None without bulk."""

    @property
    def target_s(self) -> float | None:
        """What an urgent one may take at most."""
        if self.way not in ("urgent", "first"):
            return None
        if self.case == _AGGREGATED:
            return self.alone_s + 0.010
        if self.nbytes <= _SMALL:
            return self.alone_s + (0.005 if self.case == "same rank" else 0.010)
        return self.alone_s * {"same rank": 1.3, "neighbour": 1.5, "other host": 2.0}[self.case]


def measure(
    bed: Testbed | Loopback,
    *,
    case: str,
    backend: str,
    nbytes: int,
    bulk_bytes: int,
    turns: int,
    timeout_s: float,
    first: bool = False,
    deployment: str | None = None,
    on: Sequence[str] | None = None,
) -> list[Row]:
    """One case on the hosts of ``bed``, or on those named; through the aggregators of a deployment's file where there is one.

    Raises:
        BenchError: a rank failed or hung, with the end of what it said.
    """
    urgent, bulk = CASES[case]
    options = {
        "urgent": urgent,
        "bulk": bulk,
        "one_way": case == "other host",
        "deployment": deployment,
        "backend": backend,
        "bytes": nbytes,
        "bulk_bytes": bulk_bytes,
        "turns": turns,
        "first": first,
    }
    ranks = 1 + max(*urgent, *bulk)
    what = f"urgency, {case}"
    records = run_program(bed, "urgency_rank", options, what=what, ranks=ranks, timeout_s=timeout_s, on=on)
    return summarise(records, case, backend, nbytes, bulk_bytes)


def summarise(
    records: Sequence[Sequence[dict[str, Any]]], case: str, backend: str, nbytes: int, bulk_bytes: int
) -> list[Row]:
    """What the ranks said, in numbers. Pure."""
    urgent, bulk = CASES[case]
    bulk_alone_s = statistics.median(
        max(each) for each in zip(*(records[rank][0]["bulk_s"] for rank in bulk), strict=True)
    )
    rows: list[Row] = []
    alone_s = 0.0
    for way in ("alone", "usual", "urgent", "first"):
        of_ranks = [[record for record in of_rank if record.get("way") == way] for of_rank in records]
        if not of_ranks[0]:
            continue
        of_turns = list(zip(*of_ranks, strict=True))
        samples = [
            max(both) for turn in of_turns for both in zip(*(turn[rank]["seconds"] for rank in urgent), strict=True)
        ]
        median = statistics.median(samples)
        alone_s = median if way == "alone" else alone_s
        rates = [
            (bulk_bytes + nbytes * (1 + len(turn[urgent[0]]["seconds"]))) / max(turn[rank]["whole_s"] for rank in bulk)
            for turn in of_turns
        ]
        rate = None if way == "alone" else statistics.median(rates) * bulk_alone_s / bulk_bytes
        rows.append(Row(case, backend, nbytes, way, len(samples), median, max(samples), alone_s, rate))
    return rows


def table(rows: Sequence[Row]) -> Table:
    """One line a case, size and way."""
    columns = [
        Column("way", is_text=True),
        Column("median"),
        Column("worst"),
        Column("target", meaning="the time alone and what it may take longer"),
        Column("samples"),
        Column("all bytes", meaning="bytes of bulk and small sums together a second, over the bulk's alone"),
    ]
    lines = [
        Line(
            [
                row.way,
                milliseconds(row.median_s),
                milliseconds(row.worst_s),
                "" if row.target_s is None else f"<= {milliseconds(row.target_s)}",
                str(row.samples),
                "" if row.rate is None else f"{row.rate:.1%}",
            ],
            (row.case, row.backend, size(row.nbytes)),
        )
        for row in rows
    ]
    parts = [Column("bulk of", is_text=True), Column("backend", is_text=True), Column("size")]
    return Table("All-reduces behind bulk", columns, lines, parts)


def story(rows: Sequence[Row]) -> Story:
    """What the report says."""
    least = min(row.nbytes for row in rows)
    shown = [row for row in rows if row.nbytes == least and row.rate is not None]
    cases = list(dict.fromkeys((row.case, row.backend) for row in shown))
    several = len({backend for _, backend in cases}) > 1
    bars = [
        Bar(
            row.way,
            [Part(1e3 * row.median_s, series(index).colour)],
            milliseconds(row.median_s),
            heading="" if index else f"bulk of: {case}{f', {backend}' if several else ''}",
        )
        for case, backend in cases
        for index, row in enumerate(row for row in shown if (row.case, row.backend) == (case, backend))
    ]
    times = sorted(row.alone_s for row in shown)
    alone = (
        milliseconds(times[0]) if times[0] == times[-1] else f"{milliseconds(times[0])} to {milliseconds(times[-1])}"
    )
    told = [row for row in rows if row.target_s is not None]
    reached = sum(row.median_s <= (row.target_s or 0.0) for row in told)
    return Story(
        kind="Penstock bench: urgency",
        answer=f"{reached} of {len(told)} urgent sizes are within their target behind bulk",
        picture=Picture(
            "urgency",
            Bars(Axis("time of an all-reduce", "ms"), bars),
            f"All-reduces of {size(least)} behind bulk, as usual and with a priority; alone {alone}.",
            "Medians; of each pair of ranks the slower one.",
        ),
        next=Next("Say what is urgent in a script.", "docs/guide/priority.md"),
    )


_BACKENDS = ("penstock", "gloo")
# Blocks in flight to the server.
_WINDOW = 256
# Up to this size the target is a time, above it a ratio.
_SMALL = 1 << 20
