"""What the papers compare with, and all-reduces without servers."""

from __future__ import annotations

import math

import numpy as np

from penstock.cluster.network import Cluster, Job
from penstock.planning.problem import Problem
from penstock.planning.scheme import Resource, Scheme, children, uses
from penstock.planning.solve import Relaxed, relax, rounded

__all__ = ["atp", "direct", "inart", "ring"]


def direct(problem: Problem) -> Scheme:
    """LBMM of the paper's section 5.1: every server sums an equal part, and every worker sends straight to it."""
    return problem.scheme(np.ones(len(problem.servers)), problem.within_limits(problem.all_one_way(None)))


def atp(problem: Problem) -> Scheme:
    """ATP (NSDI '21) as the paper has it: equal parts, each worker by the aggregator that fewest links join it to."""
    cluster = problem.cluster
    nearest: dict[str, str] = {}
    for host in dict.fromkeys(problem.job.workers) if problem.aggregators else ():
        nearest[host] = min(problem.aggregators, key=lambda name: len(cluster.path(host, cluster.aggregator[name].at)))
    places: list[str | None] = [nearest.get(host) for host in problem.job.workers]
    for name in problem.aggregators:
        # Those for which it has no place go straight on.
        ranks = [rank for rank, place in enumerate(places) if place == name]
        for rank in ranks[children(cluster, name) :]:
            places[rank] = None
    part = 1 / len(problem.servers)
    return Scheme(dict.fromkeys(problem.servers, part), dict.fromkeys(problem.servers, tuple(places)))


def inart(problem: Problem, rng: np.random.Generator, relaxed: Relaxed | None = None) -> Scheme:
    """The paper's own: the relaxed problem's parts of the model, and one random rounding of its ways."""
    relaxed = relaxed or relax(problem)
    return problem.scheme(relaxed.rates, problem.within_limits(rounded(problem, relaxed, rng)))


def ring(cluster: Cluster, job: Job) -> tuple[float, str]:
    """A ring all-reduce of the ranks in their order: the rate at which a gradient is reduced, in bits a second as for `evaluate`,
    and what is full then. Every rank sends 2 (n - 1) / n of a gradient to the next one."""
    world = len(job.workers)
    if world < 2:
        return math.inf, "nothing"
    loads: dict[Resource, int] = {}
    for rank, host in enumerate(job.workers):
        for resource in uses(cluster, host, job.workers[(rank + 1) % world], both=False):
            loads[resource] = loads.get(resource, 0) + 1
    rate, name = min(
        ((resource.room / count, resource.name) for resource, count in loads.items() if math.isfinite(resource.room)),
        default=(math.inf, "nothing"),
    )
    return max(rate, 0.0) * world / (2 * (world - 1)), name
