"""``penstock bench endpoints``: pushes and pulls of a server's clients, beside raw sockets that move the same bytes.

Worker processes, each on a host of its own, push a buffer to a server all at once, then pull one, then do both at the same time.
With ``--ways sums`` they push buffers to an aggregation server, behind streams, and pull their sum when it is done.
By turns with each of these, as many raw sockets as Penstock has streams move as many bytes between the same processes, in the
same direction. The target is 90 % of their rate.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click

from penstock.numbers import milliseconds, plural
from penstock.reports import Axis, Bar, Bars, Column, Level, Line, Next, Part, Picture, Table, series
from penstock.tools.bench import machine
from penstock.tools.bench.emulated import Story, link_of, link_options, names_of, publish
from penstock.tools.bench.options import EVERYTHING, check_files, files, parse_size
from penstock.tools.bench.output import reporting_errors, say
from penstock.tools.bench.program import run_program
from penstock.tools.testbed.bed import Loopback
from penstock.tools.testbed.cluster import Testbed

WAYS = ("push", "pull", "both", "sums")
# Who moves the bytes: ours; sockets that have done when all bytes are handed over and received; sockets that are kept full until
# the last receiver has all its bytes, which is more than the pattern needs.
CARRIERS = ("penstock", "raw sockets", "kept full")


@click.command()
@click.option("--size", default="64M", show_default=True, help="Of a push, and of a pull.")
@click.option("--workers", default="1,4", show_default=True, help="Clients of the server, each on its own host.")
@click.option("--ways", default="push,pull,both", show_default=True, help="What all workers do at once; also sums.")
@click.option(
    "--streams", type=click.IntRange(1, 64), default=16, show_default=True, help="And raw sockets, of a pair."
)
@link_options
@click.option("--turns", type=click.IntRange(1), default=7, show_default=True, help="Of everything, by turns.")
@click.option("--timeout", type=float, default=300.0, show_default=True, help="Seconds for each number of workers.")
@files(EVERYTHING)
def command(
    size: str,
    workers: str,
    ways: str,
    streams: int,
    rate: float,
    flow: str,
    turns: int,
    timeout: float,
    json_path: str | None,
    report_path: str | None,
) -> None:
    """Measure pushes to a server and pulls from it, beside raw sockets in the same pattern.

    See docs/guide/endpoints.md. Needs root, for emulated hosts.
    """
    check_files(json_path=json_path, report_path=report_path)
    counts, nbytes, chosen, link = (
        _parse_workers(workers),
        parse_size(size),
        names_of("way", ways, WAYS),
        link_of(rate, flow),
    )
    rows: list[Row] = []
    with reporting_errors():
        description = machine.describe()
        for count in counts:
            say(f"{nbytes} bytes, {count} workers ...")
            with Testbed(hosts=1 + count, link=link) as bed:
                rows += measure(
                    bed, workers=count, ways=chosen, nbytes=nbytes, streams=streams, turns=turns, timeout_s=timeout
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
    """One way of one number of workers with one carrier; times in seconds, until the last process has done."""

    workers: int
    way: str
    carrier: str
    nbytes: int
    samples: int
    median_s: float
    worst_s: float
    raw_s: float
    """The median of the raw sockets."""

    @property
    def share(self) -> float:
        """Of the rate of raw sockets."""
        return self.raw_s / self.median_s

    @property
    def rate(self) -> float:
        """Bytes a second of all workers, in one direction."""
        return self.workers * self.nbytes / self.median_s


def measure(
    bed: Testbed | Loopback,
    *,
    workers: int,
    ways: Sequence[str],
    nbytes: int,
    streams: int,
    turns: int,
    timeout_s: float,
) -> list[Row]:
    """The server on the first host of ``bed``, the workers on the others.

    Raises:
        BenchError: a process failed or hung, or got wrong bytes, with the end of what it said.
    """
    options = {
        "bytes": nbytes,
        "ways": list(ways),
        "carriers": list(CARRIERS),
        "streams": streams,
        "turns": turns,
        "addresses": [bed.address(rank * bed.hosts // (1 + workers)) for rank in range(1 + workers)],
    }
    records = run_program(
        bed,
        "endpoints_rank",
        options,
        what=f"endpoints, {workers} workers",
        ranks=1 + workers,
        timeout_s=timeout_s,
        env={"PENSTOCK_STREAMS": str(streams)},
    )
    return summarise(records, nbytes)


def summarise(records: Sequence[Sequence[dict[str, Any]]], nbytes: int) -> list[Row]:
    """What the processes said, in numbers. Pure."""
    samples: dict[tuple[str, str], list[float]] = {}
    for of_ranks in zip(*records, strict=True):
        key = of_ranks[0]["way"], of_ranks[0]["carrier"]
        samples.setdefault(key, []).append(max(one["seconds"] for one in of_ranks))
    medians = {key: statistics.median(taken) for key, taken in samples.items()}
    return [
        Row(len(records) - 1, way, carrier, nbytes, len(taken), medians[way, carrier], max(taken), medians[way, _RAW])
        for (way, carrier), taken in samples.items()
    ]


def table(rows: Sequence[Row]) -> Table:
    """One line a number of workers, way and carrier."""
    columns = [
        Column("carrier", is_text=True),
        Column("median"),
        Column("worst"),
        Column("rate", meaning="of all workers' bytes, in one direction"),
        Column("of raw", meaning=f"the median of raw sockets over this one; the target is {_TARGET:.0%}"),
        Column("samples"),
    ]
    lines = [
        Line(
            [
                row.carrier,
                milliseconds(row.median_s),
                milliseconds(row.worst_s),
                f"{row.rate / 1e6:.1f} MB/s",
                f"{row.share:.1%}",
                str(row.samples),
            ],
            (str(row.workers), row.way),
        )
        for row in rows
    ]
    return Table("Pushes and pulls", columns, lines, [Column("workers"), Column("way", is_text=True)])


def story(rows: Sequence[Row]) -> Story:
    """What the report says."""
    ours = [row for row in rows if row.carrier == CARRIERS[0]]
    worst = min(ours, key=lambda row: row.share)
    bars = [
        Bar(
            f"{row.way}, {plural(row.workers, 'worker')}", [Part(100 * row.share, series(0).colour)], f"{row.share:.0%}"
        )
        for row in ours
    ]
    return Story(
        kind="Penstock bench: endpoints",
        answer=f"Pushes and pulls have {worst.share:.0%} of raw sockets' rate at least ({worst.way}, "
        f"{plural(worst.workers, 'worker')})",
        picture=Picture(
            "endpoints",
            Bars(Axis("of the rate of raw sockets", "%"), bars, level=Level(100 * _TARGET, "target")),
            f"The lowest is {worst.share:.0%}, with {worst.nbytes / (1 << 20):g} MiB to a server, from it, or both at once.",
            "Longer is better. Medians; of each turn the slowest process.",
        ),
        next=Next("Serve something in a script.", "docs/guide/endpoints.md"),
    )


def _parse_workers(text: str) -> list[int]:
    """Raises click.BadParameter."""
    parts = text.split(",")
    if not all(part.isdigit() and 1 <= int(part) <= _MOST_WORKERS for part in parts):
        raise click.BadParameter(f"--workers {text}: give numbers from 1 to {_MOST_WORKERS}, such as 1,4")
    return [int(part) for part in parts]


_RAW = CARRIERS[1]
_TARGET = 0.9
# Each is a process that imports torch.
_MOST_WORKERS = 32
