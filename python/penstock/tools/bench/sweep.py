"""``penstock bench COLLECTIVE``: one collective over sizes, ranks and backends, from the command line to what is printed and
written. `collectives` says what a collective is, `session` measures, `report` reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from penstock.tools.bench import machine, report
from penstock.tools.bench.backends import KNOWN, choose, limits
from penstock.tools.bench.collectives import COLLECTIVES, most_ranks
from penstock.tools.bench.options import (
    EVERYTHING,
    Function,
    check_files,
    check_link_is_there,
    files,
    parse_flow,
    parse_ranks,
    parse_sizes,
)
from penstock.tools.bench.output import (
    progress_bar,
    reporting_errors,
    result_console,
    write_file,
    write_json,
    write_report,
)
from penstock.tools.bench.report import Outcome
from penstock.tools.bench.session import ELEMENT_BYTES, Series, Settings, measure
from penstock.tools.testbed.bed import Loopback
from penstock.tools.testbed.cluster import Testbed
from penstock.tools.testbed.link import LinkSpec


def command(name: str) -> click.Command:
    """The command of one collective."""

    @options
    def callback(**given: Any) -> None:
        run_collective(name, **given)

    return click.command(name, help=f"Measure {name}: {COLLECTIVES[name].summary}.")(callback)


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
        files(EVERYTHING),
        click.option(
            "--plot",
            "plot_path",
            type=click.Path(dir_okay=False),
            help="Draw the report's chart to this file (.svg, .png, .pdf).",
        ),
    ]
    for option in reversed(every):
        function = option(function)
    return function


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
    report_path: str | None,
    plot_path: str | None,
) -> None:
    """One collective over sizes and ranks, from the command line's strings to what is printed and written."""
    check_files(json_path=json_path, report_path=report_path, plot_path=plot_path)
    check_link_is_there(hosts is not None, "--hosts 2")
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
            LinkSpec(rate_mbit=rate, flow_mbit=parse_flow(flow), delay_ms=delay, loss=loss, mtu=mtu) if hosts else None
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
    write_json(json_path, description, [report.to_json(outcome)], skipped=skipped)
    if plot_path:
        write_file(plot_path, report.plot(outcome, Path(plot_path).suffix.lower()))
    write_report(report_path, lambda: report.page(outcome, description, skipped))


def run(
    settings: Settings, series: Sequence[Series], hosts: int | None, link: LinkSpec | None, title: str = ""
) -> Outcome:
    """Makes the testbed if there is to be one, measures, and ends all it started. Raises BenchError, TestbedUnavailable."""
    title = title or f"{settings.collective}, {settings.dtype}, " + (
        f"{hosts} hosts{', ranks by turns' if settings.by_turns else ''}: {link.describe()}" if link else "one host"
    )
    with Testbed(hosts=hosts, link=link) if hosts else Loopback(hosts=1) as bed, progress_bar() as on_progress:
        points = measure(bed, series, settings, on_progress)
    return Outcome(title, settings, series, report.rows(points, series, link), hosts or 1, link)


def show(console: Console, outcome: Outcome) -> None:
    """Prints the tables of a run."""
    console.print(report.table(outcome.rows, outcome.series, outcome.title).for_terminal())
    if (by_class := report.flow_table(outcome.rows)) is not None:
        console.print(by_class.for_terminal())
    for line in report.memory_lines(outcome.rows):
        console.print(line, highlight=False)


def _parse_counts(text: str) -> list[int]:
    counts = [int(part) if part.isdigit() else 0 for part in text.split(",")]
    if min(counts) < 1:
        raise click.BadParameter(f"--limit-flows {text}: give numbers of connections such as 1,8")
    return counts


DEFAULT_FLOWS = {False: [1, 4, 8], True: [8, 16]}
"""Connections of the raw sockets, by whether they run on a testbed. On loopback the processor decides, and no one number
is the fastest everywhere; over a link with capped flows it takes enough of them to fill it."""

TESTBED_JOINS = 10
"""Fresh jobs. Which classes a backend's connections meet is chance, and what a job has learnt about its streams in its
first operation can keep it slow for its life: once a third of all jobs carried 65 % of the link, behind a good median."""
