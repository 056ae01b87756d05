"""The command ``penstock bench aggregated``: times, or, with ``--faults`` and ``--training``, what kills leave, or, with
``--accuracy``, what integers cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from penstock.extras import need
from penstock.tools.bench import machine
from penstock.tools.bench.aggregated import accuracy, faults, times, training
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
    "--accuracy",
    "models",
    metavar="MODELS",
    help=f"Instead of times: how accurate models become with gloo and through aggregators, of {','.join(accuracy.MODELS)}.",
)
@click.option(
    "--images",
    type=click.Path(exists=True, file_okay=False),
    help="Of --accuracy, for vgg and resnet: a folder with train/CLASS/ and test/CLASS/ full of images.",
)
@click.option(
    "--steps", "taken", type=click.IntRange(1), default=1000, show_default=True, help="Of --accuracy, a training."
)
@click.option("--seeds", type=click.IntRange(1), default=3, show_default=True, help="Trainings of --accuracy, a way.")
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
    models: str | None,
    images: str | None,
    taken: int,
    seeds: int,
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
    if sum(each is not None for each in (runs, steps, models)) > 1:
        raise click.UsageError("--faults, --training or --accuracy: one at a time")
    if report_path and (runs is not None or steps is not None or models is not None):
        raise click.UsageError("--report draws times: leave it out with --faults, --training and --accuracy")
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
    if models is not None:
        common |= {"steps": taken, "seeds": range(seed, seed + seeds), "images": _images(models, images)}
        del common["seed"]
        _accuracies(parse_ranks(workers), models.split(","), json_path, **common)
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


def _images(models: str, folder: str | None) -> str | None:
    """Where models find their images, once it is known that they do."""
    names = models.split(",")
    if unknown := [name for name in names if name not in accuracy.MODELS]:
        raise click.UsageError(f"no model {', '.join(unknown)}: there are {', '.join(accuracy.MODELS)}")
    if names == ["lstm"]:
        return None
    if folder is None:
        raise click.UsageError("vgg and resnet learn from images: name their folder with --images")
    need("bench aggregated --images", "matplotlib")  # which brings Pillow
    classes = [[each.name for each in sorted(Path(folder, part).glob("*/"))] for part in ("train", "test")]
    if not classes[0] or classes[0] != classes[1] or len(classes[0]) > 10:
        raise click.UsageError(f"{folder} needs train/CLASS/ and test/CLASS/ for the same classes, 10 at most")
    return str(Path(folder).absolute())


def _accuracies(counts: Sequence[int], models: Sequence[str], json_path: str | None, **options: Any) -> None:
    outcomes: list[accuracy.Outcome] = []
    with reporting_errors():
        description = machine.describe()
        for count in counts:
            for model in models:
                say(f"{count} workers, {model} ...")
                outcomes.append(accuracy.measure(workers=count, model=model, **options))
                for line in outcomes[-1].lines():
                    result_console().print(line, highlight=False)
                write_json(json_path, description, [outcome.to_dict() for outcome in outcomes])


def _parse_shares(text: str) -> list[float]:
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = [-1.0]
    if not all(0 <= share < 1 for share in shares):
        raise click.BadParameter(f"{text}: give shares of packets, such as 0,0.01")
    return shares
