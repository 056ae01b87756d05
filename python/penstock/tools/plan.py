"""``penstock plan``: which server sums which part of a model, and where each worker's gradients are summed on the way."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from penstock.cluster import deployment as deployments
from penstock.cluster import file
from penstock.cluster.network import Cluster, Job
from penstock.errors import Config as ConfigError
from penstock.extras import need
from penstock.planning.scheme import Scheme

__all__ = ["command"]


@dataclass(frozen=True)
class Row:
    """A way to reduce a job's gradients, and what it is worth."""

    way: str
    rate_bit_s: float
    """What every worker sends; a step's gradient takes its bits over this. Infinite where nothing limits it."""
    of_bound: float | None
    """None: the bound is not about it."""
    binding: str


@click.command()
@click.argument("cluster_path", metavar="CLUSTER", type=click.Path(dir_okay=False))
@click.option("--job", "job_name", help="Of several jobs of the file.")
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="Write the deployment to this file.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the random roundings.")
@click.option(
    "--seconds",
    type=click.FloatRange(0.1, 1e6),
    default=5.0,
    show_default=True,
    help="For the search, at most; the bound comes first.",
)
@click.option("--json", "json_path", type=click.Path(dir_okay=False), help="Write the figures to this file.")
def command(
    cluster_path: str, job_name: str | None, output: str | None, seed: int, seconds: float, json_path: str | None
) -> None:
    """Plan a job of a cluster file: servers' parts of the model, and workers' aggregators.

    Says how fast the plan's gradients are summed at best, what is full then, how far that is from a bound,
    and what other ways are worth. See docs/guide/plan.md.

    \b
    penstock plan cluster.yaml
    penstock plan cluster.yaml -o deployment.yaml
    """
    need("penstock plan", "scipy")
    from penstock.planning.deploy import deployment

    for path in (output, json_path):
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise click.UsageError(f"there is no folder for {path}")
        if path is not None and Path(path).resolve() == Path(cluster_path).resolve():
            raise click.UsageError(f"{path} is the cluster file: name another one to write to")
    try:
        cluster = file.load(cluster_path)
        job = _job(cluster, job_name)
        click.echo(f"planning {job.name}: the bound, then up to {seconds:g} s of search ...", err=True)
        if any(link.flow_caps_bit_s for link in cluster.links):
            click.echo("flow_cap is left out: a plan counts what links carry", err=True)
        rows, scheme = plan(cluster, job, seed=seed, seconds=seconds)
        click.echo(describe(rows, job))
        if output is not None:
            folder = Path(output).resolve().parent
            where = os.path.relpath(Path(cluster_path).resolve(), folder)
            first = rows[0]
            said = {
                "A plan": f"{_rate(first.rate_bit_s)} a worker, {first.of_bound:.1%} of the bound; full: {first.binding}"
            }
            text = deployment(cluster, job, scheme, where, said)
            # What the ranks would say of it later.
            deployments.parse(text, output, str(folder)).check_world(len(job.workers))
            Path(output).write_text(text)
            click.echo(f"\n{output} is the deployment: PENSTOCK_DEPLOYMENT={output}")
        if json_path is not None:
            figures = [
                {key: None if value == math.inf else value for key, value in asdict(row).items()} for row in rows
            ]
            Path(json_path).write_text(json.dumps(figures, indent=2) + "\n")
    except (ConfigError, OSError) as error:
        raise click.ClickException(str(error)) from None


def plan(cluster: Cluster, job: Job, *, seed: int, seconds: float) -> tuple[list[Row], Scheme]:
    """The plan and the other ways, the plan first; and its scheme.

    Raises:
        penstock.errors.Config: there is nothing to plan, or no scheme is possible.
    """
    import numpy as np

    from penstock.planning import baselines
    from penstock.planning.evaluate import evaluate
    from penstock.planning.problem import Problem
    from penstock.planning.relax import relax
    from penstock.planning.solve import scheme_of, search

    problem = Problem(cluster, job)
    relaxed = relax(problem)
    found = search(problem, seed=seed, seconds=seconds, relaxed=relaxed)
    scheme = scheme_of(problem, found.rates, found.trees)
    ways = {
        "planned": scheme,
        "InArt: one random rounding": baselines.inart(problem, np.random.default_rng(seed), relaxed),
        "ATP: equal parts, nearest aggregators": baselines.atp(problem),
        "LBMM: equal parts, no aggregators": baselines.lbmm(problem),
    }
    rows = []
    for way, each in ways.items():
        worth = evaluate(cluster, job, each)
        rows.append(Row(way, worth.rate, worth.rate / relaxed.bound, worth.binding))
    rate, binding = baselines.ring(cluster, job)
    return [*rows, Row("ring of ranks, no servers", rate, None, binding)], scheme


def describe(rows: list[Row], job: Job) -> str:
    """The figures, as a text."""
    first, ring = rows[0], rows[-1]
    lines = []
    if ring.rate_bit_s > first.rate_bit_s:
        is_faster = f"is {ring.rate_bit_s / first.rate_bit_s:.2f} times as fast"
        is_free = "loads nothing that has a limit"
        lines.append(f"Do not aggregate: a ring of ranks {is_faster if math.isfinite(ring.rate_bit_s) else is_free}.")
    lines.append(f"{_rate(first.rate_bit_s)} a worker, {first.of_bound:.1%} of the bound. Full: {first.binding}.")
    if job.gradient_bytes is not None and math.isfinite(first.rate_bit_s):
        lines.append(
            f"A step's gradients take {8 * job.gradient_bytes / first.rate_bit_s:.3g} s on their way, if nothing else waits."
        )
    width = max(len(row.way) for row in rows)
    lines += ["", f"{'':{width}}  {'a worker':>13}  of bound  full"]
    for row in rows:
        share = "" if row.of_bound is None else f"{row.of_bound:.1%}"
        lines.append(f"{row.way:{width}}  {_rate(row.rate_bit_s):>13}  {share:>8}  {row.binding}")
    return "\n".join(lines)


def _job(cluster: Cluster, name: str | None) -> Job:
    if name is not None:
        if name not in cluster.job:
            raise ConfigError(f"--job {name}: the file has {', '.join(cluster.job) or 'no job'}")
        return cluster.job[name]
    if len(cluster.jobs) != 1:
        raise cluster.wrong(
            "jobs", f"are {len(cluster.jobs)}: " + ("choose with --job" if cluster.jobs else "a plan is for one")
        )
    return cluster.jobs[0]


def _rate(bit_s: float) -> str:
    return "unlimited" if not math.isfinite(bit_s) else f"{bit_s / 1e6:.4g} Mbit/s"
