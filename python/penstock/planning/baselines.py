"""What the papers compare with, and all-reduces without servers."""

from __future__ import annotations

import math

import numpy as np

from penstock.cluster.network import Cluster, Job
from penstock.cluster.routes import walk
from penstock.errors import Config as ConfigError
from penstock.planning.evaluate import evaluate
from penstock.planning.problem import Problem
from penstock.planning.relax import Relaxed, relax
from penstock.planning.scheme import Scheme
from penstock.planning.solve import best_rates, scheme_of
from penstock.planning.starts import Ways, nearest, one_way, rounded, routed, within_limits

__all__ = ["atp", "atp_best_effort", "equal_inart", "hierarchical", "inart", "lbmm", "ring"]


def lbmm(problem: Problem) -> Scheme:
    """LBMM of the paper's section 5.1: every server sums an equal part, and every worker sends straight to it, on the route
    that is emptiest when its turn comes.

    Raises:
        penstock.errors.Config: more workers than a server can have children.
    """
    return _equal(problem, within_limits(problem, one_way(problem, None)))


def atp(problem: Problem) -> Scheme:
    """ATP (NSDI '21) as the paper has it: equal parts, each worker by the aggregator of its rack, and from there on the
    emptiest route. Those for which it has no place go straight on."""
    ways = nearest(problem)
    straight = problem.straight
    for each in ways:
        for v in range(straight):
            over = int(each.counts[:, v].sum() - problem.most_children[v])
            for c in np.flatnonzero(each.counts[:, v])[::-1] if over > 0 else ():
                step = min(over, int(each.counts[c, v]))
                each.counts[c, v] -= step
                each.counts[c, straight] += step
                over -= step
    return _equal(problem, within_limits(problem, ways))


def atp_best_effort(problem: Problem) -> Scheme:
    """ATP where a switch sums only as many flows as it has room for, and the others go on to the servers unsummed: of all such
    numbers the best, the same for all switches. More than ATP does, which learns of no rate beforehand."""
    ways, straight = nearest(problem), problem.straight
    most = max(int(sum(each.counts[:, v].sum() for each in ways)) for v in range(straight)) if straight else 0
    best = atp(problem)
    best_rate = evaluate(problem.cluster, problem.jobs[0], best, problem.background).rate
    for summed in sorted({round(most * i / _TRIED) for i in range(_TRIED + 1)}, reverse=True):
        tried = [Ways(each.counts.copy(), each.above) for each in ways]
        for v in range(straight):
            over = sum(int(each.counts[:, v].sum()) for each in tried) - summed
            for turn in range(max(over, 0)):
                # By turns of another server for each switch.
                each = tried[(turn + v) % len(tried)]
                classes = np.flatnonzero(each.counts[:, v])
                if len(classes):
                    each.counts[classes[-1], v] -= 1
                    each.counts[classes[-1], straight] += 1
        try:
            scheme = _equal(problem, within_limits(problem, tried))
        except ConfigError:
            continue
        rate = evaluate(problem.cluster, problem.jobs[0], scheme, problem.background).rate
        if rate > best_rate:
            best, best_rate = scheme, rate
    return best


def inart(problem: Problem, rng: np.random.Generator, relaxed: Relaxed | None = None) -> Scheme:
    """The paper's own: the relaxed problem's parts of the model, and one random rounding of its ways and routes."""
    relaxed = relaxed or relax(problem)
    ways = within_limits(problem, rounded(problem, relaxed, rng))
    return scheme_of(problem, relaxed.rates, routed(problem, ways, relaxed.rates, (relaxed, rng)))


def equal_inart(problem: Problem, rng: np.random.Generator) -> Scheme:
    """The paper's R-InArt: equal parts, and one random rounding of the ways that are best for them."""
    relaxed = relax(problem, fractions=np.ones(len(problem.servers)))
    ways = within_limits(problem, rounded(problem, relaxed, rng))
    return scheme_of(problem, np.ones(len(problem.servers)), routed(problem, ways, relaxed.rates, (relaxed, rng)))


def hierarchical(problem: Problem) -> Scheme:
    """Every worker by the nearest aggregator, and the best parts for that."""
    trees = routed(problem, within_limits(problem, nearest(problem)), np.ones(len(problem.servers)))
    return scheme_of(problem, best_rates(problem, trees).rates, trees)


def ring(cluster: Cluster, job: Job) -> tuple[float, str]:
    """A ring all-reduce of the ranks in their order: the rate at which a gradient is reduced, in bits a second as for `evaluate`,
    and what is full then. Every rank sends 2 (n - 1) / n of a gradient to the next one, each on the first shortest way."""
    world = len(job.workers)
    if world < 2:
        return math.inf, "nothing"
    loads: dict[tuple[str, str, str], int] = {}
    for rank, host in enumerate(job.workers):
        after = job.workers[(rank + 1) % world]
        links = [link.name for link in cluster.path(host, after)]
        for link, start, end in walk(cluster, host, after, links):
            loads[link.name, start, end] = loads.get((link.name, start, end), 0) + 1
    rate, name = math.inf, "nothing"
    for (of, start, end), count in loads.items():
        link = cluster.link[of]
        if link.rate_bit_s is not None and (each := (link.rate_bit_s - link.background_bit_s) / count) < rate:
            rate, name = each, f"link {of} from {start} to {end}"
    return max(rate, 0.0) * world / (2 * (world - 1)), name


def _equal(problem: Problem, ways: list[Ways]) -> Scheme:
    equal = np.ones(len(problem.servers))
    return scheme_of(problem, equal, routed(problem, ways, equal))


# So many numbers of flows are tried.
_TRIED = 16
