"""The commands: `penstock plan CLUSTER` and `penstock plan explain FILE`."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.cluster import deployment as deployments
from penstock.cluster import file, places, units
from penstock.cluster.network import Cluster, Job
from penstock.errors import Config as ConfigError
from penstock.extras import installed, need
from penstock.files import write_whole
from penstock.numbers import bit_rate
from penstock.tools.commands import Group
from penstock.tools.plan.planned import Proposal, describe, describe_jobs, plan, plan_jobs

if TYPE_CHECKING:
    from penstock.planning.replan import Decision

__all__ = ["command"]


class _Command(Group):
    """`penstock plan FILE` is `penstock plan for FILE`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0].startswith("-") and args[0] not in ("-h", "--help"):
            args = ["for", *args]
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.commands:
            return "for", self.commands["for"], args
        return super().resolve_command(ctx, args)


@click.group(name="plan", cls=_Command)
def command() -> None:
    """Plan a job of a cluster file: servers' parts of the model, workers' aggregators, and routes.

    Says how fast the deployment sums gradients at best, what is full then, how far that is from a bound,
    and what other ways are worth. See docs/guide/plan.md.

    \b
    penstock plan cluster.yaml
    penstock plan cluster.yaml -o deployment.yaml
    penstock plan explain deployment.yaml --report plan.html
    """


_search_options = [
    click.option("--job", "job_name", help="Of several jobs of the file."),
    click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the random roundings."),
    click.option(
        "--seconds",
        type=click.FloatRange(0.1, 1e6),
        default=5.0,
        show_default=True,
        help="For the bound and the search. To read the network, fill it once and compute other ways comes on top: 4 s with "
        "4,096 workers.",
    ),
    click.option(
        "--levels", type=click.IntRange(1, 2), help="Of aggregators; by default one, and two where one is too few."
    ),
    click.option("--gradient", metavar="SIZE", help="What a worker sends in a step, such as '97 MB': not the file's."),
]


def _searching(function: click.decorators.FC) -> click.decorators.FC:
    for option in reversed(_search_options):
        function = option(function)
    return function


@command.command("for", hidden=True)
@click.argument("cluster_path", metavar="CLUSTER", type=click.Path(dir_okay=False))
@click.option("-o", "--output", type=click.Path(), help="Write the deployment to this file.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False), help="Write the figures to this file.")
@click.option(
    "--at-least",
    metavar="RATE",
    help="Fail where no deployment lets a worker send so fast, and say what stands against it.",
)
@click.option(
    "--all-jobs",
    type=click.Choice(["joint", "in-turn"]),
    help="All jobs of the file: the slowest as fast as possible, or each beside those before it. -o is then a folder.",
)
@_searching
def _for(
    cluster_path: str,
    output: str | None,
    json_path: str | None,
    at_least: str | None,
    all_jobs: str | None,
    job_name: str | None,
    seed: int,
    seconds: float,
    levels: int | None,
    gradient: str | None,
) -> None:
    """Plan a job of a cluster file. `penstock plan CLUSTER` is the same."""
    if all_jobs is not None and (at_least is not None or job_name is not None or gradient is not None):
        raise click.UsageError("--at-least, --job and --gradient are for one job, and --all-jobs plans all of the file")
    if output is not None and all_jobs is None and Path(output).is_dir():
        raise click.UsageError(f"{output} is a folder: a deployment is a file")
    if output is not None and all_jobs is not None and Path(output).exists() and not Path(output).is_dir():
        raise click.UsageError(f"{output} is a file: with --all-jobs -o is a folder for the jobs' deployments")
    for path in (output, json_path):
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise click.UsageError(f"there is no folder for {path}")
        if path is not None and Path(path).resolve() == Path(cluster_path).resolve():
            raise click.UsageError(f"{path} is the cluster file: name another one to write to")
    wanted = None if at_least is None else _quantity(units.RATE, at_least, "--at-least")
    with _reporting():
        if not installed("scipy"):
            click.echo(
                "without scipy there is no solver, and bounds are far off: pip install 'penstock[tune]'", err=True
            )
        cluster = file.load(cluster_path)
        if any(link.flow_caps_bit_s for link in cluster.links):
            click.echo("flow_cap is left out: the planner counts what links carry", err=True)
        if all_jobs is not None:
            click.echo(f"planning {', '.join(cluster.job)}: up to {seconds:g} s ...", err=True)
            found = plan_jobs(cluster, is_joint=all_jobs == "joint", seed=seed, seconds=seconds, levels=levels)
            click.echo(describe_jobs(found))
            if output is not None:
                Path(output).mkdir(exist_ok=True)
                for each in found:
                    _write(each, cluster, cluster_path, os.path.join(output, f"{each.job.name}.yaml"))
            if json_path is not None:
                Path(json_path).write_text(json.dumps([each.to_dict() for each in found], indent=2) + "\n")
            return
        job = _job(cluster, job_name, gradient)
        click.echo(f"planning {job.name}: the bound and the search, up to {seconds:g} s ...", err=True)
        made = plan(
            cluster,
            job,
            seed=seed,
            seconds=seconds,
            levels=levels,
            at_least=wanted,
            progress=lambda text: click.echo(text, err=True),
        )
        click.echo(describe(made))
        if output is not None:
            _write(made, cluster, cluster_path, output)
        if json_path is not None:
            figures = [
                {key: None if value == math.inf else value for key, value in dataclasses.asdict(row).items()}
                for row in made.rows
            ]
            Path(json_path).write_text(json.dumps(figures, indent=2) + "\n")


@command.command()
@click.argument("path", metavar="FILE", type=click.Path(dir_okay=False))
@click.option(
    "--report", "report_path", type=click.Path(dir_okay=False), help="Write a page with a picture of the network."
)
@_searching
def explain(
    path: str,
    report_path: str | None,
    job_name: str | None,
    seed: int,
    seconds: float,
    levels: int | None,
    gradient: str | None,
) -> None:
    """Say where a deployment's gradients flow, what that loads, and what is full. For a cluster file, plan one."""
    from penstock.tools.plan import explained

    if report_path is not None:
        need("penstock plan explain --report", "matplotlib")
    with _reporting():
        text = places.read_text(path, path)
        if explained.is_deployment(text, path):
            if job_name is not None:
                raise click.UsageError("--job is for a cluster file: a deployment is of one job")
            size = None if gradient is None else _size(gradient)
            found = explained.of_deployment(text, path, seconds=seconds, levels=levels, gradient_bytes=size)
        else:
            cluster = file.load(path)
            job = _job(cluster, job_name, gradient)
            found = explained.of_proposal(cluster, plan(cluster, job, seed=seed, seconds=seconds, levels=levels))
        click.echo(explained.describe(found))
        if report_path is not None:
            from penstock.reports import render

            write_whole(Path(report_path), render(explained.page(found, path)))
            click.echo(f"\nReport: {Path(report_path).resolve()}")


@command.command()
@click.argument("path", metavar="DEPLOYMENT", type=click.Path(dir_okay=False))
@click.option(
    "--name", help="The testbed on which the job runs: its links are measured, and routes changed while the job runs."
)
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="Write what is to run from now on to this file.")
@click.option(
    "--every", type=click.FloatRange(0.1), default=5.0, show_default=True, help="Seconds between measurements."
)
@click.option(
    "--gain",
    type=click.FloatRange(0.0),
    default=10.0,
    show_default=True,
    help="By so many % others are faster.",
)
@click.option(
    "--patience", type=click.IntRange(1), default=3, show_default=True, help="... in so many measurements in a row."
)
@click.option("--looks", type=click.IntRange(1), help="End after so many measurements.")
def watch(
    path: str, name: str | None, output: str | None, every: float, gain: float, patience: int, looks: int | None
) -> None:
    """Plan a running job anew when its network changes, with the same parts of the model.

    Events come as lines of JSON on the standard input, such as {"gone": "link r0"}, or with --name from a testbed: loads of
    others on its links, and aggregators that the job's workers bypass. See docs/guide/plan.md.
    """
    from penstock.planning.replan import Patience
    from penstock.tools.plan import watched
    from penstock.tools.testbed import carry
    from penstock.tools.testbed.cluster import Testbed

    if name is None and output is None:
        raise click.UsageError("without --name and -o FILE nothing comes of what is decided: give one of them")
    with _reporting(), ExitStack() as stack:
        cluster_path = deployments.cluster_path(places.read_text(path, path), path)
        cluster = file.load(cluster_path)
        job, scheme = carry.scheme_of_file(cluster, path)
        kept = watched.Watched(cluster, job, scheme, Patience(gain / 100, patience), output, cluster_path)
        if name is None:
            for number, line in enumerate(iter(sys.stdin.readline, ""), start=1):
                if line.strip():
                    with _going_on():
                        click.echo(_told(kept.take(watched.event_of(line, number)), output))
            return
        try:
            bed = stack.enter_context(Testbed.attach(name))
            if bed.topology.is_routed:
                carry.carry(bed, job, scheme)
            meter = watched.Meter(bed, job)
            for _ in itertools.count() if looks is None else range(looks):
                time.sleep(every)
                for event in meter.events(kept.state.scheme):
                    with _going_on():
                        decision = kept.take(event)
                        if decision.is_changed and bed.topology.is_routed:
                            carry.carry(bed, job, decision.scheme)
                        click.echo(_told(decision, output))
        except (LookupError, PermissionError) as error:
            raise click.ClickException(str(error)) from None
        except KeyboardInterrupt:
            click.echo("ended: the routes that were set last hold", err=True)


@contextmanager
def _going_on() -> Iterator[None]:
    """Says what is wrong with an event; the old scheme holds, and the next event may be right."""
    try:
        yield
    except ConfigError as error:
        click.echo(f"nothing changes: {error}", err=True)


def _told(decision: Decision, output: str | None) -> str:
    told = f"{bit_rate(decision.rate)} a worker: {decision.reason}"
    if not decision.is_changed:
        return f"{told}; nothing changes"
    ways = f"{decision.moved} pairs of server and worker have another aggregator" if decision.moved else "other routes"
    return f"{told}; changed: {ways}" + (f", in {output}" if output else "")


def _write(made: Proposal, cluster: Cluster, cluster_path: str, output: str) -> None:
    """The deployment, after the parser of the ranks has read it."""
    from penstock.planning.deploy import deployment

    folder = Path(output).resolve().parent
    where = os.path.relpath(Path(cluster_path).resolve(), folder)
    text = deployment(cluster, made.job, made.scheme, where, made.told())
    deployments.parse(text, output, str(folder)).check_world(len(made.job.workers))
    Path(output).write_text(text)
    click.echo(f"\n{output} is the deployment: PENSTOCK_DEPLOYMENT={output}")


@contextmanager
def _reporting() -> Iterator[None]:
    try:
        yield
    except (ConfigError, OSError) as error:
        raise click.ClickException(str(error)) from None


def _quantity(kind: units.Quantity, text: str, option: str) -> float:
    try:
        return float(kind.read(places.compose(json.dumps(text), option, kind.what)))
    except ConfigError as error:
        raise click.UsageError(str(error)) from None


def _size(text: str) -> int:
    found = round(_quantity(units.SIZE, text, "--gradient"))
    if found < 1:
        raise click.UsageError(f"--gradient {text}: give at least one byte")
    return found


def _job(cluster: Cluster, name: str | None, gradient: str | None) -> Job:
    if name is not None and name not in cluster.job:
        raise ConfigError(f"--job {name}: the file has {', '.join(cluster.job) or 'no job'}")
    if name is None and len(cluster.jobs) != 1:
        raise cluster.wrong(
            "jobs",
            f"are {len(cluster.jobs)}: "
            + ("choose with --job, or plan them with --all-jobs" if cluster.jobs else "name one to plan for"),
        )
    job = cluster.jobs[0] if name is None else cluster.job[name]
    return job if gradient is None else dataclasses.replace(job, gradient_bytes=_size(gradient))
