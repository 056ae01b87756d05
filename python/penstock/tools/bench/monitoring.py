"""``penstock bench monitoring``: what the live view and the counters of `penstock profile` take of a processor.

A training with the live view, a viewer of its events, and the process that reads counters beside it. Time is the kernel's count
of each thread. The targets are 0.5 % of a core for the live view, and little beside a step for the counters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import click

from penstock.reports import Column, Line, Table
from penstock.tools.bench import machine
from penstock.tools.bench.emulated import names_of
from penstock.tools.bench.launcher import BenchError
from penstock.tools.bench.options import check_files
from penstock.tools.bench.output import reporting_errors, result_console, say, write_json
from penstock.tools.bench.program import run_program
from penstock.tools.testbed.bed import Loopback

MODELS = ("char-gpt", "cnn")


@click.command()
@click.option("--model", default="char-gpt", show_default=True, help=f"One of {', '.join(MODELS)}.")
@click.option("--ranks", type=click.IntRange(2, 64), default=2, show_default=True)
@click.option("--seconds", type=click.IntRange(1), default=30, show_default=True, help="How long to measure.")
@click.option("--period-ms", type=click.IntRange(10, 1000), default=100, show_default=True, help="Of the counters.")
@click.option("--timeout", type=float, default=300.0, show_default=True, help="Seconds for all of it.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False), help="Write the figures to this file.")
def command(model: str, ranks: int, seconds: int, period_ms: int, timeout: float, json_path: str | None) -> None:
    """Measure what the live view (PENSTOCK_LIVE) and the counters of `penstock profile` take of a processor."""
    check_files(json_path=json_path, report_path=None)
    [chosen] = names_of("model", model, MODELS)
    with reporting_errors():
        say(f"{chosen}, {ranks} ranks, a viewer, counters every {period_ms} ms, {seconds} s ...")
        description = machine.describe()
        rows = measure(chosen, ranks=ranks, seconds=seconds, period_ms=period_ms, timeout_s=timeout)
        result_console().print(table(rows).for_terminal())
        write_json(json_path, description, [asdict(row) for row in rows])


@dataclass(frozen=True)
class Row:
    """A thread that watches."""

    what: str
    rank: int | None
    """None: of a process of its own."""
    share: float
    """Of a core."""
    steps_per_s: float
    """Of the training meanwhile."""


def measure(
    model: str, *, ranks: int, seconds: float, period_ms: int, timeout_s: float, warm_up_s: float = 10.0
) -> list[Row]:
    """Train for so long, and before for the 10 seconds in which counters are read more often (`sampler.EARLY_NS`).

    Raises:
        BenchError: a rank failed or hung, with the end of what it said, or nothing watched it.
    """
    options = {"model": model, "seconds": seconds, "warm_up_s": warm_up_s, "period_ms": period_ms}
    with Loopback(hosts=1) as bed:
        env = {"PENSTOCK_LIVE": "0"}
        said = run_program(bed, "monitoring_rank", options, what=model, ranks=ranks, timeout_s=timeout_s, env=env)
    return summarise([each for own in said for each in own])


def summarise(said: Sequence[Mapping[str, Any]]) -> list[Row]:
    """What the ranks said, in rows. Pure."""
    rows = [
        Row(
            MONITORS[name],
            each["rank"] if name != COUNTERS else None,
            ns / each["ns"],
            each["steps"] / each["ns"] * 1e9,
        )
        for each in said
        for name, ns in each["watchers"].items()
    ]
    missing = [what for name, what in MONITORS.items() if not any(row.what == what for row in rows)]
    if missing:
        raise BenchError(f"nothing was measured of: {', '.join(missing)}")
    return rows


def table(rows: Sequence[Row]) -> Table:
    columns = [
        Column("what", is_text=True),
        Column("rank", is_text=True),
        Column("of a core"),
        Column("steps a second", meaning="of the training meanwhile"),
    ]
    lines = [
        Line([row.what, "" if row.rank is None else str(row.rank), f"{row.share:.2%}", f"{row.steps_per_s:.1f}"])
        for row in rows
    ]
    return Table("What monitoring takes", columns, lines, note="Target of the live view: 0.5 %.")


COUNTERS = "counters"
MONITORS = {
    "penstock-live": "live view: looks",
    "penstock-live-http": "live view: serves",
    COUNTERS: "counters of a host",
}
"""What is measured, by the name of its thread."""
