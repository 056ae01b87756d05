"""The command ``penstock bench aggregated``: times, or, with ``--faults`` and ``--training``, what kills leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click

from penstock.tools.bench import machine
from penstock.tools.bench.aggregated import faults, times, training
from penstock.tools.bench.options import check_files, files, parse_ranks, parse_size
from penstock.tools.bench.output import reporting_errors, result_console, say, write_json, write_report

MIN_TRAINING_STEPS = 20
"""Of ``--training``: an aggregator dies half-way and comes back before the end; and in the first steps curves
differ by no more than what float32 can tell of a loss, which is no basis for a verdict."""


@click.command()
@click.option("--workers", default="2,4,8", show_default=True, help="Numbers of workers: 2,4 or 2..8; one a host.")
@click.option(
    "--ways",
    default=",".join(times.WAYS),
    show_default=True,
    help="Also storm: int32, and an unauthenticated peer's packets meanwhile.",
)
@click.option(
    "--losses",
    default="0",
    show_default=True,
    help="Shares of packets lost on each worker's link, or with --faults and --training on every link: 0,0.01,0.05.",
)
@click.option("--size", default="16M", show_default=True, help="Bytes of the tensor, as float32.")
@click.option("--rate", type=float, default=250.0, show_default=True, help="Mbit/s of a worker's link.")
@click.option("--window", type=click.IntRange(1), default=256, show_default=True, help="Blocks in flight.")
@click.option("--turns", type=click.IntRange(1), default=5, show_default=True, help="Turns of each way.")
@click.option("--operations", type=click.IntRange(1), default=3, show_default=True, help="All-reduces in a turn.")
@click.option(
    "--offloads/--no-offloads", default=False, show_default=True, help="Whether packets of 64 KiB cross whole."
)
@click.option(
    "--faults",
    "runs",
    type=click.IntRange(1),
    metavar="RUNS",
    help="Instead of times: kill an aggregator in the middle of each of RUNS runs, with losses on every link, and compare bits.",
)
@click.option(
    "--training",
    "steps",
    type=click.IntRange(MIN_TRAINING_STEPS),
    metavar="STEPS",
    help="Instead of times: train char-gpt for STEPS steps with losses and a kill, and compare the losses with gloo's.",
)
@click.option(
    "--batch", type=click.IntRange(1), default=2, show_default=True, help="Sequences a rank and step of --training."
)
@click.option(
    "--seed", type=click.IntRange(0), default=1, show_default=True, help="Of the first of --faults, or of --training."
)
@click.option("--timeout", type=float, default=600.0, show_default=True, help="Seconds for one number of workers.")
@files("Write the figures to this file.")
def command(
    workers: str,
    ways: str,
    losses: str,
    size: str,
    rate: float,
    window: int,
    runs: int | None,
    steps: int | None,
    batch: int,
    seed: int,
    timeout: float,
    json_path: str | None,
    report_path: str | None,
    **options: Any,
) -> None:
    """Measure all-reduces through aggregators, beside our ring, gloo, and a server without aggregators (root).

    Bytes are read from the workers' interfaces. Choose a rate that leaves the processors idle for a third of the time:
    the column says. See docs/design/bench.md.
    """
    check_files(json_path=json_path, report_path=report_path)
    names = ways.split(",")
    known = (*times.WAYS, times.STORM)
    if unknown := [name for name in names if name not in known]:
        raise click.UsageError(f"no way {', '.join(unknown)}: there are {', '.join(known)}")
    shares = _parse_shares(losses)
    if runs is not None and steps is not None:
        raise click.UsageError("--faults or --training: one at a time")
    if report_path and (runs is not None or steps is not None):
        raise click.UsageError("--report draws times: leave it out with --faults and --training")
    common: dict[str, Any] = {"seed": seed, "rate_mbit": rate, "window": window, "timeout_s": timeout}
    if runs is not None:
        common |= {"runs": runs, "nbytes": parse_size(size)}
        if any(one.wrong for one in _with_kills(faults.measure, parse_ranks(workers), shares, json_path, **common)):
            raise click.ClickException("something is wrong after kills of aggregators: the lines with WRONG say what")
        return
    if steps is not None:
        common |= {"steps": steps, "batch": batch}
        outcomes = _with_kills(training.measure, parse_ranks(workers), shares, json_path, **common)
        if not all(one.is_within for one in outcomes):
            raise click.ClickException("a training through aggregators is further from gloo's than rounding explains")
        return
    rows: list[times.Row] = []
    with reporting_errors():
        description = machine.describe()
        for count in parse_ranks(workers):
            for loss in shares:
                say(f"{count} workers, loss {loss:g} ...")
                rows += times.measure(
                    workers=count,
                    loss=loss,
                    ways=names,
                    rate_mbit=rate,
                    nbytes=parse_size(size),
                    window=window,
                    timeout_s=timeout,
                    **options,
                )
                write_json(json_path, description, [row.to_dict() for row in rows])
    result_console().print(times.table(rows).for_terminal())
    write_report(report_path, lambda: times.page(rows, description))


def _with_kills(
    measure: Callable[..., Any], counts: Sequence[int], losses: Sequence[float], json_path: str | None, **options: Any
) -> list[Any]:
    """Every number of workers with every loss: printed as they come, and all in the file after each."""
    outcomes: list[Any] = []
    with reporting_errors():
        description = machine.describe()
        for count in counts:
            for loss in losses:
                say(f"{count} workers, loss {loss:g} ...")
                outcomes.append(measure(workers=count, loss=loss, **options))
                for line in outcomes[-1].lines():
                    result_console().print(line, highlight=False)
                write_json(json_path, description, [outcome.to_dict() for outcome in outcomes])
    return outcomes


def _parse_shares(text: str) -> list[float]:
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = [-1.0]
    if not all(0 <= share < 1 for share in shares):
        raise click.BadParameter(f"{text}: give shares of packets, such as 0,0.01")
    return shares
