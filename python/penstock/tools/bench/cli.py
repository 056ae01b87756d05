"""``penstock bench COLLECTIVE`` and ``penstock bench figures``."""

from __future__ import annotations

import math
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click
from click.core import ParameterSource
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from penstock import renamed
from penstock.cli import Group
from penstock.errors import Config as ConfigError
from penstock.extras import need
from penstock.runtime import config
from penstock.tools.bench import machine, readiness, report, training, tuner
from penstock.tools.bench.aggregated import faults, times
from penstock.tools.bench.aggregated import training as aggregated_training
from penstock.tools.bench.collectives import COLLECTIVES, most_ranks
from penstock.tools.bench.figures import FIGURES, AggregatedFigure, Figure, Finding
from penstock.tools.bench.figures import table as figures_table
from penstock.tools.bench.launcher import BenchError
from penstock.tools.bench.session import ELEMENT_BYTES, Series, Settings, measure, unavailable
from penstock.tools.testbed.cluster import Loopback, Testbed, TestbedUnavailable
from penstock.tools.testbed.link import LinkSpec

Function = TypeVar("Function", bound=Callable[..., Any])

MIN_TRAINING_STEPS = 20
"""Of `aggregated --training`: an aggregator dies half-way and comes back before the end; and in the first steps curves
differ by no more than what float32 can tell of a loss, which is no basis for a verdict."""

MOST_RANKS = 64
"""As many as a testbed has hosts. Each is a process that imports torch: a few hundred megabytes."""


@click.group(name="bench", cls=Group)
def command() -> None:
    """Measure collectives: time, bandwidth, share of the limit, beside other backends.

    Backends take turns in one run, so their ratios hold on a noisy machine. Results are checked. Examples:

    \b
    penstock bench all-reduce
    penstock bench all-reduce --sizes 64M --ranks 2 --backends penstock-tcp,gloo
    penstock bench all-reduce --hosts 2 --rate 1000 --flow 200 --sizes 64M
    penstock bench training cnn
    penstock bench tuner
    penstock bench aggregated
    penstock bench figures
    """


def parse_sizes(text: str) -> list[int]:
    """``1K,64M`` lists sizes; ``1K..256M`` takes every fourth power of two from the first to the last. K, M, G are KiB, MiB, GiB.

    Raises click.BadParameter.
    """
    sizes: list[int] = []
    for part in text.split(","):
        first, dots, last = part.partition("..")
        begin = _parse_size(first)
        end = _parse_size(last) if dots else begin
        if end < begin:
            raise click.BadParameter(f"{part}: the last size is below the first")
        while begin <= end:
            sizes.append(begin)
            begin *= 4
    return sizes


def parse_ranks(text: str) -> list[int]:
    """``2,4`` or ``2..4``. Raises click.BadParameter."""
    ranks: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("..")
        if not first.isdigit() or (last and not last.isdigit()):
            raise click.BadParameter(f"{part}: give numbers of ranks such as 2,4 or 2..4")
        ranks += range(int(first), int(last or first) + 1)
    if not ranks or min(ranks) < 2:
        raise click.BadParameter(f"{text}: a collective is measured between 2 ranks or more")
    return ranks


def parse_variant(text: str) -> Series:
    """``NAME=BACKEND[,KEY=VALUE...]``: a backend under a name of its own, with environment variables.

    The backend is one of `KNOWN`, whose variables these extend, or one by torch's name for it.

    Raises click.BadParameter.
    """
    name, backend, env = _variant_parts(text)
    if backend in KNOWN:
        base = KNOWN[backend]
    else:
        _check_torch_knows(text, backend)
        base = Series(name, f"torch:{backend}", limit="sockets")
    variant = replace(base, label=name, env={**base.env, **env})
    if variant.role.endswith(":penstock"):
        shared = variant.env.get("PENSTOCK_SHM") != "0"
        variant = replace(variant, limit="copy" if shared else "sockets")
    return variant


def options(function: Function) -> Function:
    """The options of every collective."""
    every = [
        click.option(
            "--sizes", default="1K..256M", show_default=True, help="Sizes of the whole vector: 1K,64M or 1K..256M."
        ),
        click.option(
            "--ranks", default=None, help="Numbers of ranks: 2,4 or 2..4.  [default: 2..4; on a testbed, one a host]"
        ),
        click.option(
            "--backends",
            default=None,
            help=f"Of {', '.join(KNOWN)}.  [default: all that are here, without engine-*]",
        ),
        click.option(
            "--variant",
            "variants",
            multiple=True,
            metavar="NAME=BACKEND,KEY=VALUE",
            help="One more backend: of these or by torch's name, with settings of its own.",
        ),
        click.option("--dtype", type=click.Choice(list(ELEMENT_BYTES)), default="float32", show_default=True),
        click.option(
            "--rounds",
            type=click.IntRange(1),
            default=None,
            help="Turns of each backend at each size, in each job.  [default: 5; on a testbed 2]",
        ),
        click.option(
            "--joins",
            type=click.IntRange(1),
            default=None,
            help="Fresh jobs, each with other ports and nothing learnt.  [default: 1; on a testbed 10]",
        ),
        click.option(
            "--turn", type=float, default=0.25, show_default=True, help="Seconds that a turn may measure for."
        ),
        click.option(
            "--timeout",
            type=float,
            default=300.0,
            show_default=True,
            help="Seconds until a silent backend counts as hung.",
        ),
        click.option(
            "--limit/--no-limit",
            default=True,
            show_default=True,
            help="Measure the limit as well: raw sockets, memory.",
        ),
        click.option(
            "--limit-flows", default=None, help="Connections of the raw sockets.  [default: 1,4,8; on a testbed 8,16]"
        ),
        click.option(
            "--hosts",
            type=click.IntRange(2, 64),
            default=None,
            help="Run on an emulated cluster of so many hosts (root).",
        ),
        click.option("--rate", type=float, default=1000.0, show_default=True, help="Testbed: Mbit/s of a link."),
        click.option(
            "--flow", default="", help="Testbed: Mbit/s that one flow gets at most; several, by turns: 60,300."
        ),
        click.option("--delay", type=float, default=0.0, help="Testbed: milliseconds from host to host, one way."),
        click.option("--loss", type=float, default=0.0, help="Testbed: share of packets lost, such as 0.001."),
        click.option(
            "--mtu", type=click.IntRange(1280, 65_000), default=1500, show_default=True, help="Testbed: bytes."
        ),
        click.option("--by-turns", is_flag=True, help="Testbed: deal ranks to the hosts by turns, not in blocks."),
        click.option(
            "--json",
            "json_path",
            type=click.Path(dir_okay=False),
            help="Write everything, every sample too, to this file.",
        ),
        click.option(
            "--plot",
            "plot_path",
            type=click.Path(dir_okay=False),
            help="Draw busbw over size to this file (.svg, .png).",
        ),
    ]
    for option in reversed(every):
        function = option(function)
    return function


@click.command()
@click.argument("names", nargs=-1, metavar="[FIGURE]...")
@click.option("--rounds", type=click.IntRange(1), default=6, show_default=True, help="Turns of each backend.")
@click.option(
    "--timeout", type=float, default=300.0, show_default=True, help="Seconds until a silent backend counts as hung."
)
@click.option(
    "--json", "json_path", type=click.Path(dir_okay=False), help="Write everything, every sample too, to this file."
)
def figures(names: Sequence[str], rounds: int, timeout: float, json_path: str | None) -> None:
    """Measure the published figures again, and print each beside its target.

    Without a name, all of them; those on emulated hosts need root. Targets are printed, not enforced: machines are noisy.
    """
    _check_folders(json_path)
    by_name = {figure.name: figure for figure in FIGURES}
    if unknown := [name for name in names if name not in by_name]:
        raise click.UsageError(f"no figure {', '.join(unknown)}: there are {', '.join(by_name)}")
    console = result_console()
    findings, documents = [], []
    with reporting_errors():
        description = machine.describe()
        for figure in [by_name[name] for name in names] or FIGURES:
            if isinstance(figure, AggregatedFigure):
                found, document = _aggregated_again(figure, rounds, timeout, console)
            else:
                found, document = _again(figure, rounds, timeout, console)
            findings += found
            documents.append({"figure": figure.name} | document)
    console.print(figures_table(findings))
    console.print("The figures of the training demo are those of `penstock demo`.", highlight=False)
    if json_path:
        report.write_json(json_path, description, documents, findings=[vars(finding) for finding in findings])


def _again(figure: Figure, rounds: int, timeout: float, console: Console) -> tuple[list[Finding], dict[str, Any]]:
    on_testbed = figure.link is not None
    series, _ = choose(",".join(figure.backends), (), on_testbed)
    series += limits(series, on_testbed, DEFAULT_FLOWS[on_testbed])
    joins = min(rounds, TESTBED_JOINS) if on_testbed else 1
    turns = math.ceil(rounds / joins)
    settings = Settings("all-reduce", [figure.nbytes], [figure.ranks], rounds=turns, joins=joins, timeout_s=timeout)
    outcome = run(settings, series, figure.ranks if on_testbed else None, figure.link, f"{figure.name}: {figure.on}")
    show(console, outcome)
    return figure.findings(outcome.rows), outcome.document


def _aggregated_again(
    figure: AggregatedFigure, rounds: int, timeout: float, console: Console
) -> tuple[list[Finding], dict[str, Any]]:
    rows = times.measure(
        workers=figure.workers,
        loss=0.0,
        ways=figure.WAYS,
        rate_mbit=figure.rate_mbit,
        nbytes=figure.nbytes,
        window=figure.window,
        turns=rounds,
        operations=1,
        offloads=False,
        timeout_s=timeout,
    )
    console.print(times.table(rows, f"{figure.name}: {figure.on}"))
    return figure.findings(rows), {"rows": [row.to_dict() for row in rows]}


def _bucket_option(what: str) -> Callable[[Any], Any]:
    """The option ``--bucket`` with that text, also under its old name ``--unit``, which --help does not show."""

    def take(context: click.Context, _: click.Parameter, value: str | None) -> None:
        if value is not None:
            print(renamed.message("--unit", "--bucket"), file=sys.stderr, flush=True)
            context.default_map = {**(context.default_map or {}), "bucket": value}

    def add(command: Any) -> Any:
        command = click.option("--unit", hidden=True, is_eager=True, expose_value=False, callback=take)(command)
        return click.option("--bucket", default="1M", show_default=True, help=what)(command)

    return add


@click.command()
@click.argument("model", type=click.Choice(["char-gpt", "cnn"]))
@click.option("--ways", default=",".join(training.WAYS), show_default=True, help="Also hook-float16 and the like.")
@click.option("--ranks", type=click.IntRange(1, MOST_RANKS), default=4, show_default=True)
@click.option("--hosts", type=click.IntRange(1, 64), default=2, show_default=True, help="More than one needs root.")
@click.option("--rate", type=float, default=1000.0, show_default=True, help="Testbed: Mbit/s of a link.")
@click.option("--flow", default="200", show_default=True, help="Testbed: Mbit/s that one flow gets at most.")
@click.option("--delay", type=float, default=0.0, help="Testbed: milliseconds from host to host, one way.")
@click.option("--batch", type=click.IntRange(1), default=2, show_default=True, help="Samples a rank and step.")
@_bucket_option("What one all-reduce of the hooks carries.")
@click.option("--turns", type=click.IntRange(1), default=6, show_default=True, help="Turns of each way.")
@click.option("--steps", type=click.IntRange(1), default=5, show_default=True, help="Steps in a turn.")
@click.option(
    "--losses",
    type=click.IntRange(1),
    metavar="STEPS",
    help="Instead of times: train char-gpt on the demo's text for STEPS steps and compare final losses.",
)
@click.option("--timeout", type=float, default=300.0, show_default=True, help="Seconds for all of it.")
@click.option(
    "--json", "json_path", type=click.Path(dir_okay=False), help="Write everything, every sample too, to this file."
)
def train(
    model: str,
    ways: str,
    ranks: int,
    hosts: int,
    rate: float,
    flow: str,
    delay: float,
    batch: int,
    bucket: str,
    turns: int,
    steps: int,
    losses: int | None,
    timeout: float,
    json_path: str | None,
) -> None:
    """Measure training steps: DDP, gradient hooks and gloo beside what the link allows.

    All ways train the same model on the same data by turns, in one run. See docs/design/gradients.md for the bound, and
    docs/guide/compression.md for ways that send fewer bytes:

    \b
    penstock bench training char-gpt --ways hook,hook-float16 --ranks 2 --rate 25 --flow 25 --batch 1
    penstock bench training char-gpt --ways hook,hook-float16 --ranks 2 --hosts 1 --losses 200
    """
    _check_folders(json_path)
    names = ways.split(",")
    if unknown := [name for name in names if name not in training.KNOWN]:
        raise click.UsageError(f"no way {', '.join(unknown)}: there are {', '.join(sorted(training.KNOWN))}")
    if losses is not None and model != "char-gpt":
        raise click.UsageError("--losses trains char-gpt: the cnn has no data here to learn from")
    _check_link_is_there(hosts > 1, "--hosts 2")
    link = LinkSpec(rate_mbit=rate, flow_mbit=_parse_flow(flow), delay_ms=delay) if hosts > 1 else None
    with reporting_errors():
        print(f"training {model} on {link.describe() if link else 'one host'} ...", file=sys.stderr, flush=True)
        with Testbed(hosts=hosts, link=link) if hosts > 1 else Loopback(hosts=1) as bed:
            outcome: training.Outcome | training.Lesson
            if losses is not None:
                outcome = training.learn(
                    bed,
                    ways=names,
                    ranks=ranks,
                    batch=batch,
                    steps=losses,
                    bucket_bytes=_parse_size(bucket),
                    timeout_s=timeout,
                )
            else:
                outcome = training.measure(
                    bed,
                    model=model,
                    ways=names,
                    ranks=ranks,
                    batch=batch,
                    turns=turns,
                    steps=steps,
                    bucket_bytes=_parse_size(bucket),
                    timeout_s=timeout,
                )
        result_console().print(outcome.table())
        if json_path:
            report.write_json(json_path, machine.describe(), [outcome.to_dict()])


@click.command()
@click.option("--ranks", type=click.IntRange(2, MOST_RANKS), default=8, show_default=True)
@click.option("--hosts", type=click.IntRange(1, 64), default=2, show_default=True, help="More than one needs root.")
@click.option("--tensors", type=click.IntRange(2), default=500, show_default=True, help="Gradients of the model.")
@click.option("--width", type=click.IntRange(1), default=64, show_default=True, help="Of its layers.")
@click.option("--batch", type=click.IntRange(1), default=256, show_default=True, help="Samples a rank and step.")
@_bucket_option("What one all-reduce carries.")
@click.option("--turns", type=click.IntRange(1), default=4, show_default=True)
@click.option("--steps", type=click.IntRange(1), default=10, show_default=True, help="Steps in a turn.")
@click.option("--timeout", type=float, default=300.0, show_default=True, help="Seconds for all of it.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False), help="Write the figures to this file.")
def ready(hosts: int, bucket: str, timeout: float, json_path: str | None, **shape: int) -> None:
    """Measure what agreeing on ready gradients costs, and whether any rank does more than others.

    See docs/design/gradients.md. The hosts have links of 1 Gbit/s, of which one flow gets 200 Mbit/s.
    """
    _check_folders(json_path)
    with reporting_errors():
        print(f"readiness of {shape['tensors']} gradients ...", file=sys.stderr, flush=True)
        link = LinkSpec(rate_mbit=1000, flow_mbit=200)
        with Testbed(hosts=hosts, link=link) if hosts > 1 else Loopback(hosts=1) as bed:
            outcome = readiness.measure(bed, bucket_bytes=_parse_size(bucket), timeout_s=timeout, **shape)
        for line in outcome.lines():
            result_console().print(line, highlight=False)
        if json_path:
            report.write_json(json_path, machine.describe(), [outcome.to_dict()])


@click.command()
@click.option(
    "--link", "links", multiple=True, type=click.Choice(list(tuner.LINKS)), help="One or more.  [default: all]"
)
@click.option("--model", type=click.Choice(["linear", "char-gpt", "cnn"]), default="linear", show_default=True)
@click.option("--layers", type=click.IntRange(2), default=12, show_default=True, help="Of linear; 1 MiB each.")
@click.option("--batch", type=click.IntRange(1), default=2, show_default=True, help="Samples a rank and step.")
@click.option("--ranks", type=click.IntRange(2, MOST_RANKS), default=4, show_default=True)
@click.option("--hosts", type=click.IntRange(1, 64), default=4, show_default=True, help="More than one needs root.")
@click.option("--budget", type=click.IntRange(8), default=100, show_default=True, help="Steps to tune in.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the tuner.")
@click.option(
    "--stride",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="The grid has every so many values of an axis.",
)
@click.option("--grid-steps", type=click.IntRange(1), default=3, show_default=True, help="Steps a setting of the grid.")
@click.option(
    "--pairs", type=click.IntRange(1), default=20, show_default=True, help="Turns of the choices and the best."
)
@click.option("--pair-steps", type=click.IntRange(1), default=3, show_default=True, help="Steps in a turn.")
@click.option("--timeout", type=float, default=1800.0, show_default=True, help="Seconds for a link.")
@click.option(
    "--json", "json_path", type=click.Path(dir_okay=False), help="Write everything, every sample too, to this file."
)
def tune(links: Sequence[str], ranks: int, hosts: int, timeout: float, json_path: str | None, **options: Any) -> None:
    """Hold what the tuner chooses against the best of a grid, on different links.

    A model is tuned from the default, and from what a like model was tuned to; then the grid is measured, and at last the
    choices and the grid's best by turns. See docs/design/tuner.md.
    """
    need("penstock bench tuner", "scipy")
    _check_folders(json_path)
    outcomes = []
    console = result_console()
    with reporting_errors():
        for name in (links or tuner.LINKS) if hosts > 1 else ["loopback"]:
            print(f"tuning on {name} ...", file=sys.stderr, flush=True)
            with Testbed(hosts=hosts, link=tuner.LINKS[name]) if hosts > 1 else Loopback(hosts=1) as bed:
                outcomes.append(tuner.measure(bed, options, ranks=ranks, timeout_s=timeout))
            if json_path:
                report.write_json(json_path, machine.describe(), [outcome.to_dict() for outcome in outcomes])
        console.print(tuner.table(outcomes))


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
@click.option("--json", "json_path", type=click.Path(dir_okay=False), help="Write the figures to this file.")
def aggregate(
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
    **options: Any,
) -> None:
    """Measure all-reduces through aggregators, beside our ring, gloo, and a server without aggregators (root).

    Bytes are read from the workers' interfaces. Choose a rate that leaves the processors idle for a third of the time:
    the column says. See docs/design/bench.md.
    """
    _check_folders(json_path)
    names = ways.split(",")
    known = (*times.WAYS, times.STORM)
    if unknown := [name for name in names if name not in known]:
        raise click.UsageError(f"no way {', '.join(unknown)}: there are {', '.join(known)}")
    shares = _parse_shares(losses)
    if runs is not None and steps is not None:
        raise click.UsageError("--faults or --training: one at a time")
    common: dict[str, Any] = {"seed": seed, "rate_mbit": rate, "window": window, "timeout_s": timeout}
    if runs is not None:
        common |= {"runs": runs, "nbytes": _parse_size(size)}
        if any(one.wrong for one in _with_kills(faults.measure, parse_ranks(workers), shares, json_path, **common)):
            raise click.ClickException("aggregators that were killed have left other bits than an undisturbed run")
        return
    if steps is not None:
        common |= {"steps": steps, "batch": batch}
        outcomes = _with_kills(aggregated_training.measure, parse_ranks(workers), shares, json_path, **common)
        if not all(one.is_within for one in outcomes):
            raise click.ClickException("a training through aggregators is further from gloo's than rounding explains")
        return
    rows: list[times.Row] = []
    with reporting_errors():
        for count in parse_ranks(workers):
            for loss in shares:
                print(f"{count} workers, loss {loss:g} ...", file=sys.stderr, flush=True)
                rows += times.measure(
                    workers=count,
                    loss=loss,
                    ways=names,
                    rate_mbit=rate,
                    nbytes=_parse_size(size),
                    window=window,
                    timeout_s=timeout,
                    **options,
                )
                if json_path:
                    report.write_json(json_path, machine.describe(), [row.to_dict() for row in rows])
    result_console().print(times.table(rows))


def _with_kills(
    measure: Callable[..., Any], counts: Sequence[int], losses: Sequence[float], json_path: str | None, **options: Any
) -> list[Any]:
    """Every number of workers with every loss: printed as they come, and all in the file after each."""
    outcomes: list[Any] = []
    with reporting_errors():
        for count in counts:
            for loss in losses:
                print(f"{count} workers, loss {loss:g} ...", file=sys.stderr, flush=True)
                outcomes.append(measure(workers=count, loss=loss, **options))
                for line in outcomes[-1].lines():
                    result_console().print(line, highlight=False)
                if json_path:
                    report.write_json(json_path, machine.describe(), [outcome.to_dict() for outcome in outcomes])
    return outcomes


def _parse_shares(text: str) -> list[float]:
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = [-1.0]
    if not all(0 <= share < 1 for share in shares):
        raise click.BadParameter(f"{text}: give shares of packets, such as 0,0.01")
    return shares


def _collective_command(name: str) -> click.Command:
    @options
    def callback(**given: Any) -> None:
        run_collective(name, **given)

    return click.command(name, help=f"Measure {name}: {COLLECTIVES[name].summary}.")(callback)


def run_collective(
    collective: str,
    *,
    sizes: str,
    ranks: str | None,
    backends: str | None,
    variants: Sequence[str],
    dtype: str,
    rounds: int | None,
    joins: int | None,
    turn: float,
    timeout: float,
    limit: bool,
    limit_flows: str | None,
    hosts: int | None,
    rate: float,
    flow: str,
    delay: float,
    loss: float,
    mtu: int,
    by_turns: bool,
    json_path: str | None,
    plot_path: str | None,
) -> None:
    """One collective over sizes and ranks, from the command line's strings to what is printed and written."""
    _check_folders(json_path, plot_path)
    _check_plot(plot_path)
    _check_link_is_there(hosts is not None, "--hosts 2")
    if by_turns and not hosts:
        raise click.UsageError("--by-turns deals ranks to hosts: give --hosts too")
    counts = parse_ranks(ranks or (str(hosts) if hosts else "2..4"))
    if max(counts) > most_ranks(dtype):
        raise click.BadParameter(
            f"{max(counts)}: {dtype} holds the sums of at most {most_ranks(dtype)} ranks exactly, as the check needs: use fewer "
            f"ranks, or --dtype int64, for up to {most_ranks('int64')}",
            param_hint="--ranks",
        )
    settings = Settings(
        collective,
        [0] if collective == "barrier" else parse_sizes(sizes),
        counts,
        dtype,
        rounds or (2 if hosts else 5),
        turn,
        joins or (TESTBED_JOINS if hosts else 1),
        timeout,
        by_turns,
    )
    with reporting_errors():
        link = (
            LinkSpec(rate_mbit=rate, flow_mbit=_parse_flow(flow), delay_ms=delay, loss=loss, mtu=mtu) if hosts else None
        )
        chosen, skipped = choose(backends, variants, link is not None)
        flows = _parse_counts(limit_flows) if limit_flows else DEFAULT_FLOWS[link is not None]
        bounds = limits(chosen, link is not None, flows) if limit and collective != "barrier" else []
        description = machine.describe()
        console = result_console()
        outcome = run(settings, [*chosen, *bounds], hosts, link)
    show(console, outcome)
    for name, reason in skipped.items():
        console.print(f"skipped {name}: {reason}", highlight=False, style="yellow")
    console.print(report.does_not_show(link), style="dim", highlight=False)
    if json_path:
        report.write_json(json_path, description, [outcome.document], skipped=skipped)
    if plot_path:
        report.plot(plot_path, outcome.rows, outcome.series, link, outcome.title)


@dataclass
class Outcome:
    """A finished run."""

    title: str
    series: Sequence[Series]
    rows: list[report.Row]
    document: dict[str, Any]


def run(
    settings: Settings, series: Sequence[Series], hosts: int | None, link: LinkSpec | None, title: str = ""
) -> Outcome:
    """Makes the testbed if there is to be one, measures, and ends all it started. Raises BenchError, TestbedUnavailable."""
    title = title or f"{settings.collective}, {settings.dtype}, " + (
        f"{hosts} hosts{', ranks by turns' if settings.by_turns else ''}: {link.describe()}" if link else "one host"
    )
    with Testbed(hosts=hosts, link=link) if hosts else Loopback(hosts=1) as bed, progress_bar() as on_progress:
        points = measure(bed, series, settings, on_progress)
    rows = report.rows(points, series, link)
    return Outcome(title, series, rows, report.to_json(rows, series, settings, hosts or 1, link))


def show(console: Console, outcome: Outcome) -> None:
    """Prints the tables of a run."""
    console.print(report.table(outcome.rows, outcome.series, outcome.title))
    if (by_class := report.flow_table(outcome.rows)) is not None:
        console.print(by_class)
    for line in report.memory_lines(outcome.rows):
        console.print(line, highlight=False)


def choose(backends: str | None, variants: Sequence[str], on_testbed: bool) -> tuple[list[Series], dict[str, str]]:
    """The backends to run, and those left out with the reason. One that was asked for by name must be there.

    Raises click.UsageError.
    """
    asked = backends.split(",") if backends else list(BACKENDS)
    unknown = [name for name in asked if name not in KNOWN]
    if unknown:
        raise click.UsageError(f"no backend {', '.join(unknown)}: there are {', '.join(KNOWN)}; --variant makes others")
    chosen, skipped = [], {}
    candidates = [(name, KNOWN[name]) for name in asked]
    candidates += [(_variant_parts(text)[1], parse_variant(text)) for text in variants]
    for base, each in candidates:
        reason = unavailable(each, on_testbed)
        if reason is None and on_testbed and base in NOT_OVER_LINKS:
            reason = "the testbed's hosts share no memory: over links it is penstock-tcp"
        if reason is None:
            chosen.append(each)
        elif backends or each.label not in BACKENDS:
            raise click.UsageError(f"{each.label} cannot run here: {reason}")
        else:
            skipped[each.label] = reason
    if len({each.label for each in chosen}) < len(chosen):
        raise click.UsageError("two backends have the same name")
    return chosen, skipped


def limits(chosen: Sequence[Series], on_testbed: bool, flows: Sequence[int]) -> list[Series]:
    """The probes that bound the chosen backends, and on a testbed the control."""
    bounds = []
    if on_testbed or any(each.limit == "sockets" for each in chosen):
        bounds += [_sockets("sockets", "pull", count) for count in flows]
    if on_testbed:
        bounds += [_sockets("saturated", "saturate", count) for count in flows]
        bounds.append(_sockets("equal split", "equal", flows[0]))
    elif any(each.limit == "copy" for each in chosen):
        bounds.append(Series("copy", "copy", smallest=LIMIT_FROM_BYTES))
    return bounds


def result_console() -> Console:
    """Standard output; as wide as the tables need where it is a file or a pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on standard error, or, where that is no terminal, a line for each size.

    Call what it yields with (text, done, total), where text is " · " between its parts: ranks, size, series, round.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        told: set[str] = set()

        def tell(text: str, done: int, total: int) -> None:
            head = " · ".join(text.split(" · ")[:2])
            if head not in told:
                told.add(head)
                print(f"{head}  ({done} of {total} turns done)", file=sys.stderr, flush=True)

        yield tell
        return
    columns = (
        SpinnerColumn(),
        BarColumn(20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("")

        def show(text: str, done: int, total: int) -> None:
            bar.update(task, description=text, completed=done, total=total)

        yield show


@contextmanager
def reporting_errors() -> Iterator[None]:
    """Turns what the bench raises into one message and an exit code; SIGTERM into the same orderly end as Ctrl-C."""

    def terminate(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except (BenchError, TestbedUnavailable, ValueError) as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        click.echo("interrupted: every process of the bench has ended", err=True)
        sys.exit(130)
    finally:
        signal.signal(signal.SIGTERM, before)


def _sockets(name: str, split: str, flows: int) -> Series:
    return Series(f"{name} x{flows}", "sockets", flows=flows, split=split, smallest=LIMIT_FROM_BYTES)


def _check_folders(*paths: str | None) -> None:
    """Refuses before the run what would fail after it. Raises click.BadParameter."""
    for path in paths:
        if path and not Path(path).absolute().parent.is_dir():
            raise click.BadParameter(f"{path}: there is no such folder")


def _check_plot(path: str | None) -> None:
    """Raises click.BadParameter, or penstock.errors.MissingExtra."""
    if path and Path(path).suffix.lower() not in (".png", ".pdf", ".svg"):
        raise click.BadParameter(f"{path}: plots are .svg, .pdf or .png files")
    if path:
        need("penstock bench --plot", "matplotlib")


def _check_link_is_there(is_there: bool, how: str) -> None:
    """Options of a link that nobody makes must not look as if they counted. Raises click.UsageError."""
    context = click.get_current_context()
    names = [name for name in ("rate", "flow", "delay", "loss") if name in context.params]
    given = [name for name in names if context.get_parameter_source(name) is not ParameterSource.DEFAULT]
    if given and not is_there:
        raise click.UsageError(f"--{given[0]} is of an emulated link, and there is none: add {how}, or leave it out")


def _parse_counts(text: str) -> list[int]:
    counts = [int(part) if part.isdigit() else 0 for part in text.split(",")]
    if min(counts) < 1:
        raise click.BadParameter(f"--limit-flows {text}: give numbers of connections such as 1,8")
    return counts


def _variant_parts(text: str) -> tuple[str, str, dict[str, str]]:
    """The name, the backend and the environment variables of a variant. Raises click.BadParameter."""
    name, _, rest = text.partition("=")
    backend, *pairs = rest.split(",")
    if not name or not backend or not all("=" in pair for pair in pairs):
        raise click.BadParameter(
            f"{text}: give NAME=BACKEND[,KEY=VALUE...], such as 16-streams=penstock-tcp,PENSTOCK_STREAMS=16"
        )
    env = dict(pair.split("=", 1) for pair in pairs)
    try:
        config.read(env)
    except ConfigError as error:
        raise click.BadParameter(f"{text}: {error}") from None
    if wrong := config.unknown_variables(env):
        raise click.BadParameter(f"{text}: {'; '.join(wrong.values())}")
    return name, backend, env


def _check_torch_knows(text: str, backend: str) -> None:
    """Raises click.BadParameter where the ranks would fail, each with a traceback."""
    import torch.distributed as dist

    names = [name for name in dist.Backend.backend_list if name != "undefined"]
    # torch also takes "cpu:gloo".
    if backend.rpartition(":")[2].lower() not in names:
        raise click.BadParameter(
            f"{text}: no backend {backend}: the bench has {', '.join(KNOWN)}; torch has {', '.join(names)}"
        )


def _parse_size(text: str) -> int:
    number, unit = text.strip().rstrip("iB"), 1
    if number and number[-1].upper() in UNITS:
        number, unit = number[:-1], UNITS[number[-1].upper()]
    if not number.isdigit() or int(number) == 0:
        raise click.BadParameter(f"{text}: give sizes such as 1K, 64M or 1K..256M")
    return int(number) * unit


def _parse_flow(text: str) -> list[float] | None:
    try:
        return [float(part) for part in text.split(",")] if text else None
    except ValueError:
        raise click.BadParameter(f"--flow {text}: give Mbit/s, such as 200 or 60,300") from None


WIDTH = 120

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

BACKENDS = {
    each.label: each
    for each in (
        Series("penstock-tcp", "torch:penstock", {"PENSTOCK_SHM": "0"}, limit="sockets"),
        Series("penstock-shm", "torch:penstock", {"PENSTOCK_SHM": "1"}, limit="copy"),
        Series("penstock-empty", "shared:penstock", {"PENSTOCK_SHM": "1"}, limit="copy"),
        Series("gloo", "torch:gloo", limit="sockets"),
        Series("mpi", "mpi", limit="copy"),
    )
}
"""What runs when --backends names none. Each has a limit: over TCP it is raw sockets; in one memory it is copying."""

NOT_OVER_LINKS = ("penstock-shm", "penstock-empty", "engine-shm")
"""The testbed's hosts share no memory."""

ENGINES = {
    each.label: each
    for each in (
        Series("engine-tcp", "engine:penstock", {"PENSTOCK_SHM": "0"}, limit="sockets"),
        Series("engine-shm", "engine:penstock", {"PENSTOCK_SHM": "1"}, limit="copy"),
    )
}
"""What --backends can name as well: the engine without torch, for all-reduce."""

KNOWN = {**BACKENDS, **ENGINES}
"""All that --backends can name, and --variant extend."""

DEFAULT_FLOWS = {False: [1, 4, 8], True: [8, 16]}
"""Connections of the raw sockets, by whether they run on a testbed. On loopback the processor decides, and no one number
is the fastest everywhere; over a link with capped flows it takes enough of them to fill it."""

TESTBED_JOINS = 10
"""Fresh jobs. Which classes a backend's connections meet is chance, and what a job has learnt about its streams in its
first operation can keep it slow for its life: once a third of all jobs carried 65 % of the link, behind a good median."""

LIMIT_FROM_BYTES = 256 << 10
"""Below this a collective is bound by steps x latency, and the probes would show what Python's calls cost."""

for _name in COLLECTIVES:
    command.add_command(_collective_command(_name))
command.add_command(figures)
command.add_command(train, "training")
command.add_command(ready, "readiness")
command.add_command(tune, "tuner")
command.add_command(aggregate, "aggregated")
