"""``penstock demo``: what runs, in which order, and what one sees meanwhile."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from penstock.extras import need
from penstock.files import check_writable, write_whole
from penstock.reports import render
from penstock.reports.terminal import print_first_screen
from penstock.runtime import config
from penstock.runtime.wire import sent_bytes
from penstock.tools.bench import machine
from penstock.tools.demo.comparison import (
    Comparison,
    disagreements,
    is_through_memory,
    payload_rate,
    shortfall_sentences,
    summarise,
    table,
    tuning_sentences,
    verdict,
)
from penstock.tools.demo.link_probe import Carriage, exchange
from penstock.tools.demo.prediction import Prediction, hook_buckets, predict_step
from penstock.tools.demo.report import page
from penstock.tools.demo.training import Bed, Training, TrainingFailed, Way, train
from penstock.tools.testbed import LinkSpec, Loopback, Testbed, TestbedUnavailable


@click.command()
@click.option("--steps", type=click.IntRange(min=10), help="Training steps.  [default: 200; with --quick: 20]")
@click.option(
    "--backends",
    default="gloo,penstock,penstock+tuner",
    show_default=True,
    help="In this order; the first is the baseline. +hook: with penstock.torch.ddp_hook; +tuner: that with tune=True.",
)
@click.option(
    "--report", type=click.Path(path_type=Path, dir_okay=False, writable=True), default="report.html", show_default=True
)
@click.option("--seed", type=int, default=1337, show_default=True, help="Of the weights and of the order of the text.")
@click.option("--no-testbed", is_flag=True, help="On loopback, even where hosts could be emulated.")
@click.option("--quick", is_flag=True, help="A small model and few steps: does it work? Its figures mean nothing.")
def command(steps: int | None, backends: str, report: Path, seed: int, no_testbed: bool, quick: bool) -> None:
    """Train a character GPT with gloo, with Penstock, and with Penstock's hook and tuner, and compare.

    All trainings start from the same weights and see the same text, on two hosts: emulated ones (a link of 1 Gbit/s on
    which one flow gets 200 Mbit/s) when you are root, else on loopback. Prints a table and writes a report. Takes about
    three and a half minutes on two cores. Ctrl-C stops it and leaves nothing behind.
    """
    # However the demo ends, it leaves through its context managers, which end the ranks and the hosts.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    console = Console(highlight=False)
    try:
        ways = [Way.parse(name.strip()) for name in backends.split(",") if name.strip()]
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--backends") from None
    if not ways:
        raise click.BadParameter("name at least one", param_hint="--backends")
    if unknown := unknown_backends(ways):
        raise click.BadParameter(unknown, param_hint="--backends")
    need("penstock demo", "matplotlib", *(["scipy"] if any(way.tunes for way in ways) else []))
    try:
        check_writable(report)
    except OSError as error:
        raise click.BadParameter(
            f"the report cannot be written to {report}: {error.strerror}", param_hint="--report"
        ) from None
    try:
        comparison = run(console, ways, steps or (20 if quick else 200), seed, testbed=not no_testbed, quick=quick)
    except TrainingFailed as failure:
        console.print("\n[bold red]A training failed.[/]")
        console.print(str(failure), markup=False, soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:
        console.print("\nStopped. No process and no emulated host is left.")
        sys.exit(128 + signal.SIGINT)
    print_comparison(console, comparison)
    told = page(comparison)
    console.print()
    print_first_screen(told, console)
    try:
        write_whole(report, render(told))
    except OSError as error:
        console.print(
            f"The report could not be written to {report}: {error.strerror}.", style="bold red", soft_wrap=True
        )
        sys.exit(1)
    console.print(f"Report: {report.resolve()}", soft_wrap=True)
    sys.exit(1 if comparison.problems else 0)


def unknown_backends(ways: Sequence[Way]) -> str | None:
    """What to say of backends that torch does not have, before one that it has has trained for minutes."""
    if all(way.backend in ("gloo", "penstock") for way in ways):
        return None  # and torch's import is left to the ranks: it takes seconds
    import torch.distributed as dist

    # torch also takes "cpu:gloo".
    names = [name for name in dist.Backend.backend_list if name != "undefined"]
    unknown = [way.backend for way in ways if way.backend.rpartition(":")[2].lower() not in names]
    return f"no backend {', '.join(unknown)}: torch has {', '.join(names)}" if unknown else None


def run(console: Console, ways: Sequence[Way], steps: int, seed: int, *, testbed: bool, quick: bool) -> Comparison:
    """Train once in each way, in turn. Raises what `train` raises; all processes and hosts are gone then, too."""
    options = {"steps": steps, "seed": seed, "compute-every": COMPUTE_EVERY, **(QUICK_MODEL if quick else {})}
    arguments = [f"--{name}={value}" for name, value in options.items()]
    about = machine.describe()
    trainings: list[Training] = []
    predictions: list[Prediction | None] = []
    with cluster(console, testbed) as bed:
        link = bed.link if isinstance(bed, Testbed) else None
        carriages = probe(console, bed, ways, QUICK_PROBE_BYTES if quick else PROBE_BYTES) if link else {}
        with progress_bar(console) as progress:
            for label, way in zip(labels(ways), ways, strict=True):
                if trainings:
                    # Before this training has begun: from the link, and from the computation of the first one.
                    predictions.append(foresee(trainings[0], way, carriages.get(flows_of(way))))
                row = ProgressRow(progress, label, steps, link)
                timeout_s = START_TIMEOUT_S + steps * STEP_TIMEOUT_S
                trainings.append(train(bed, way, label, arguments, row.show, timeout_s))
                if not predictions:
                    predictions.append(foresee(trainings[0], way, carriages.get(flows_of(way))))
    return Comparison(
        results=tuple(summarise(*pair, link) for pair in zip(trainings, predictions, strict=True)),
        link=link,
        rates={flows: carriage.bytes_per_s for flows, carriage in carriages.items()},
        machine=about,
        disagreements=disagreements(trainings),
        quick=quick,
    )


@contextlib.contextmanager
def cluster(console: Console, testbed: bool) -> Iterator[Bed]:
    """Two hosts: emulated where that is wanted and possible, else this machine twice. Says which."""
    bed: Bed
    why = "as you asked"
    try:
        if testbed:
            with Testbed(hosts=2, link=LINK) as bed:
                console.print(f"Two emulated hosts on this machine; the link between them: {LINK.describe()}.")
                yield bed
            return
    except TestbedUnavailable as error:
        why = str(error)
    console.print(
        f"On loopback ({why}): both ranks share this machine, nothing caps their flows, and the processors, "
        "not a link, are the limit. A comparison of backends on a network needs the emulated hosts.",
        soft_wrap=True,
    )
    with Loopback(hosts=2) as bed:
        yield bed


def probe(console: Console, bed: Bed, ways: Sequence[Way], nbytes: int) -> dict[int, Carriage]:
    """What raw sockets get over the link, by number of flows."""
    counts = sorted({flows_of(way) for way in ways})
    carriages = {flows: exchange(bed, flows, nbytes) for flows in counts}
    shown = ", ".join(
        f"{carriage.bytes_per_s / 1e6:.1f} MB/s over {flows} flow{'s'[: flows > 1]}"
        for flows, carriage in carriages.items()
    )
    console.print(f"Raw sockets carry {shown}, each way.")
    return carriages


def foresee(first: Training, way: Way, carriage: Carriage | None) -> Prediction | None:
    if carriage is None:
        return None
    # Each rank computes with one thread. Where a processor is left over, the sockets use that.
    processors = len(os.sched_getaffinity(0))
    slowdown_s_per_byte = carriage.processor_s_per_byte / processors if first.ranks >= processors else 0.0
    buckets = first.ends[0]["bucket_bytes"]
    pieces = hook_buckets(sum(buckets), BUCKET_BYTES) if way.front else buckets
    return predict_step(first.compute(), pieces, first.ranks, carriage.bytes_per_s, slowdown_s_per_byte)


def flows_of(way: Way) -> int:
    """How many connections of a pair of ranks carry a collective."""
    if way.backend != "penstock":
        return 1  # Gloo opens one connection a pair (docs/guide/demo.md), and so does MPI by default.
    return config.read().streams


def labels(ways: Sequence[Way]) -> list[str]:
    """The ways' names, numbered where one comes again."""
    seen = [ways[:i].count(way) + 1 for i, way in enumerate(ways)]
    return [str(way) if nth == 1 else f"{way} ({nth})" for way, nth in zip(ways, seen, strict=True)]


def progress_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[news]}"),
        TimeElapsedColumn(),
        console=console,
        expand=True,
    )


class ProgressRow:
    """One training's line under the progress bars."""

    def __init__(self, progress: Progress, label: str, steps: int, link: LinkSpec | None) -> None:
        self._progress = progress
        self._link, self._payload = link, payload_rate(link)
        self._task = progress.add_task(label, total=steps, news="the ranks are starting")

    def show(self, training: Training) -> None:
        """Called after each step; speaks of the last few."""
        done = len(training.clock_s)
        if done == 1:
            self._progress.console.print(f"{training.label}: first step after {training.clock_s[0]:.1f} s")
        news = f"loss {training.steps[0][-1].loss:.3f}"
        span = min(done - 1, RECENT_STEPS)
        if span > 0:
            seconds = training.clock_s[-1] - training.clock_s[-1 - span]
            tokens = sum(step.tokens for step in training.steps[0][-span:])
            sent = training.sent_bytes[-1] - training.sent_bytes[-1 - span]
            share = f" ({sent / seconds / self._payload:3.0%})" if self._payload else ""
            carried = f"link {sent / seconds / 1e6:5.1f} MB/s{share}"
            if is_through_memory(sent / span, sent_bytes(training.facts["gradient_bytes"], training.ranks), self._link):
                carried = "shared memory"
            news += f"  {tokens / seconds:6,.0f} tokens/s  {carried}"
        self._progress.update(self._task, completed=done, news=news)


def print_comparison(console: Console, comparison: Comparison) -> None:
    console.print()
    console.print(table(comparison).for_terminal(with_meanings=console.width >= MEANINGS_FROM_COLUMNS))
    console.print(verdict(comparison), style="bold", soft_wrap=True)
    for told in tuning_sentences(comparison) + shortfall_sentences(comparison):
        console.print(told, soft_wrap=True)
    for problem in comparison.problems:
        console.print(f"Problem: {problem}.", style="bold red", soft_wrap=True)


LINK = LinkSpec(rate_mbit=1000, flow_mbit=200)
"""What a rented machine often gets: one flow has a fraction of the link (docs/guide/demo.md has the sources)."""

COMPUTE_EVERY = 5
"""Steps between two that are also timed without communication: forty samples of a training of 200 steps, for 5 % of its time."""

QUICK_MODEL = {"layers": 2, "width": 96, "heads": 4, "eval-batches": 4}

PROBE_BYTES = 10_827_264
QUICK_PROBE_BYTES = 969_984
"""Each way and exchange: as much as the gradients of the example's model, and of the small one."""

BUCKET_BYTES = 4 << 20
"""What one all-reduce carries under `penstock.torch.ddp_hook` by default."""

RECENT_STEPS = 10

MEANINGS_FROM_COLUMNS = 100
"""On a narrower terminal the table shows numbers only; the report explains them."""

START_TIMEOUT_S, STEP_TIMEOUT_S = 120, 5
"""Ten times what a slow machine needs. A backend should notice its failures long before that."""
