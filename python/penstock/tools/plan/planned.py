"""A plan beside other ways, and what is said of it."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.cluster.network import Cluster, Job
from penstock.errors import Config as ConfigError
from penstock.planning.scheme import Scheme

__all__ = ["Plan", "Row", "candidates_for", "describe", "describe_jobs", "plan", "plan_jobs", "rate_text"]


@dataclass(frozen=True)
class Row:
    """A way to reduce a job's gradients, and what it is worth."""

    way: str
    rate_bit_s: float
    """What every worker sends; a step's gradient takes its bits over this. Infinite where nothing limits it."""
    of_bound: float | None
    """None: the bound is not about it."""
    binding: str


@dataclass(frozen=True)
class Plan:
    """A job's plan."""

    job: Job
    scheme: Scheme
    rows: list[Row]
    """The plan first; other ways behind it."""
    bound: float
    levels: int
    is_out_of_time: bool
    """Whether the time ended the search."""

    def told(self) -> str:
        first = self.rows[0]
        share = "" if first.of_bound is None else f", {first.of_bound:.1%} of the bound"
        return f"{rate_text(first.rate_bit_s)} a worker{share}; full: {first.binding}"


def candidates_for(cluster: Cluster, job: Job) -> int | None:
    """How many aggregators are considered for each rack: all, but where there are many of everything few."""
    racks = len({tuple(link.ends[-1].node for link in cluster.links_of[host]) for host in job.workers})
    size = len(cluster.servers) * racks * len(cluster.aggregators)
    return None if size <= _MANY else max(4, _MANY // (len(cluster.servers) * racks))


def plan(
    cluster: Cluster, job: Job, *, seed: int, seconds: float, levels: int | None = None, at_least: float | None = None
) -> Plan:
    """The plan and the other ways.

    Raises:
        penstock.errors.Config: there is nothing to plan, no scheme is possible, or none so fast.
    """
    import numpy as np

    from penstock.planning import baselines
    from penstock.planning.bound import bound_of_all
    from penstock.planning.conflict import conflict
    from penstock.planning.evaluate import evaluate
    from penstock.planning.problem import Problem
    from penstock.planning.relax import relax
    from penstock.planning.solve import scheme_of, search

    until = time.monotonic() + seconds
    problem = Problem(cluster, job, levels=levels, candidates=candidates_for(cluster, job))
    relaxed = relax(problem, seconds=seconds / 2)
    bound = bound_of_all(problem, relaxed)
    if bound <= 0 or (at_least is not None and bound < at_least):
        wanted = "any" if at_least is None else f"{rate_text(at_least)} a worker"
        raise ConfigError(f"no plan reaches {wanted}, since together {'; '.join(conflict(problem, at_least or 0.0))}")
    try:
        found = search(problem, seed=seed, seconds=max(until - time.monotonic(), 0.1), relaxed=relaxed)
    except ConfigError as error:
        against = conflict(problem, 0.0)
        raise ConfigError(f"{error}" + (f" (together: {'; '.join(against)})" if against else "")) from None
    scheme = scheme_of(problem, found.rates, found.trees)
    ways = {"planned": scheme}
    rng = np.random.default_rng(seed)
    for way, make in {
        "InArt: one random rounding": lambda: baselines.inart(problem, rng, relaxed) if relaxed.is_solved else None,
        "nearest aggregators, best parts": lambda: baselines.hierarchical(problem),
        "ATP: equal parts, nearest aggregators": lambda: baselines.atp(problem),
        "LBMM: equal parts, no aggregators": lambda: baselines.lbmm(problem),
    }.items():
        try:
            made = make()
        except ConfigError:
            # A server cannot have so many children.
            continue
        if made is not None:
            ways[way] = made
    rows = []
    for way, each in ways.items():
        worth = evaluate(cluster, job, each)
        rows.append(Row(way, worth.rate, worth.rate / bound if math.isfinite(bound) else None, worth.binding))
    if at_least is not None and rows[0].rate_bit_s < at_least:
        raise ConfigError(
            f"the best plan found lets a worker send {rate_text(rows[0].rate_bit_s)}, below {rate_text(at_least)}, which the "
            f"bound of {rate_text(bound)} does not forbid: give it more --seconds; full is {rows[0].binding}"
        )
    rate, binding = baselines.ring(cluster, job)
    rows.append(Row("ring of ranks, no servers", rate, None, binding))
    return Plan(job, scheme, rows, bound, problem.levels, found.is_out_of_time)


def plan_jobs(cluster: Cluster, *, is_joint: bool, seed: int, seconds: float, levels: int | None) -> list[Plan]:
    """Plans of all jobs of a cluster, beside each other.

    Raises:
        penstock.errors.Config: as `plan`.
    """
    from penstock.planning.evaluate import evaluate_all
    from penstock.planning.several import in_turn, joint

    if not cluster.jobs:
        raise cluster.wrong("jobs", "are 0: a plan is for one")
    found = (joint if is_joint else in_turn)(cluster, cluster.jobs, seed=seed, seconds=seconds, levels=levels)
    together = evaluate_all(cluster, [(each.job, each.scheme, each.rate) for each in found])
    assert together.rate >= 1 - 1e-6, "plans that fit each other overload nothing"
    plans = []
    for each in found:
        row = Row("planned", each.rate, each.rate / each.bound if is_joint else None, together.binding)
        plans.append(Plan(each.job, each.scheme, [row], each.bound, levels or 1, False))
    return plans


def describe(made: Plan) -> str:
    """The figures, as a text."""
    first, ring = made.rows[0], made.rows[-1]
    lines = []
    if ring.rate_bit_s > first.rate_bit_s:
        is_faster = f"is {ring.rate_bit_s / first.rate_bit_s:.2f} times as fast"
        is_free = "loads nothing that has a limit"
        lines.append(f"Do not aggregate: a ring of ranks {is_faster if math.isfinite(ring.rate_bit_s) else is_free}.")
    share = "no bound was found in time" if first.of_bound is None else f"{first.of_bound:.1%} of the bound"
    lines.append(f"{rate_text(first.rate_bit_s)} a worker, {share}. Full: {first.binding}.")
    if made.is_out_of_time:
        lines.append("The time ended the search; with more --seconds it may find a better plan.")
    if made.job.gradient_bytes is not None and math.isfinite(first.rate_bit_s):
        took = 8 * made.job.gradient_bytes / first.rate_bit_s
        lines.append(f"A step's gradients take {took:.3g} s on their way, if nothing else waits.")
    lines += ["", *_table(made.rows)]
    return "\n".join(lines)


def describe_jobs(plans: Sequence[Plan]) -> str:
    """Several jobs', as a text."""
    rows = [Row(each.job.name, each.rows[0].rate_bit_s, each.rows[0].of_bound, each.rows[0].binding) for each in plans]
    slowest = min(rows, key=lambda row: row.rate_bit_s)
    return "\n".join(
        [f"All at once: {slowest.way} is the slowest with {rate_text(slowest.rate_bit_s)} a worker.", "", *_table(rows)]
    )


def _table(rows: Sequence[Row]) -> list[str]:
    width = max(len(row.way) for row in rows)
    lines = [f"{'':{width}}  {'a worker':>13}  of bound  full"]
    for row in rows:
        share = "" if row.of_bound is None else f"{row.of_bound:.1%}"
        lines.append(f"{row.way:{width}}  {rate_text(row.rate_bit_s):>13}  {share:>8}  {row.binding}")
    return lines


def rate_text(bit_s: float) -> str:
    return "unlimited" if not math.isfinite(bit_s) else f"{bit_s / 1e6:.4g} Mbit/s"


# Servers x racks x aggregators of a program that takes a second or two: a fat-tree of 54 hosts has 3,240.
_MANY = 8000
