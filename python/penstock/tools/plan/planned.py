"""What the planner proposes for a job, beside other ways, and what is said of it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.cluster.network import Cluster, Job
from penstock.errors import Config as ConfigError
from penstock.extras import installed
from penstock.numbers import bit_rate
from penstock.planning.scheme import Scheme

if TYPE_CHECKING:
    from penstock.planning.problem import Problem
    from penstock.planning.solve import Solved

__all__ = [
    "RING",
    "Proposal",
    "Row",
    "bound_told",
    "candidates_for",
    "describe",
    "describe_jobs",
    "is_provable",
    "not_relaxed",
    "plan",
    "plan_jobs",
]


@dataclass(frozen=True)
class Row:
    """A way to reduce a job's gradients, and what it is worth."""

    way: str
    rate_bit_s: float | None
    """What every worker sends; a step's gradient takes its bits over this. Infinite where nothing limits it; None:
    not computed."""
    of_bound: float | None
    """None: the bound is not about it, or none is known."""
    binding: str
    """What is full; or why there is no rate."""


@dataclass(frozen=True)
class Proposal:
    """A deployment that the planner proposes for a job."""

    job: Job
    scheme: Scheme
    rows: list[Row]
    """What is proposed first; other ways behind it."""
    bound: float
    """Infinite: none is known."""
    levels: int
    is_out_of_time: bool
    """Whether the time ended the search."""
    is_proven: bool = False
    """Whether a mixed-integer program proved that no deployment with these levels is faster."""
    is_relaxed: bool = True
    """Whether the linear program was solved: else the bound is from prices alone."""
    beside: str = ""
    """Of several jobs: what the others send, as a clause."""

    @property
    def rate_bit_s(self) -> float:
        found = self.rows[0].rate_bit_s
        assert found is not None
        return found

    def told(self) -> dict[str, str]:
        """What a deployment's comment says: objective, bound, gap, and what is full."""
        first = self.rows[0]
        return {
            "Planned": f"{bit_rate(self.rate_bit_s)} a worker{self.beside}",
            **bound_told(self.rate_bit_s, self.bound, is_proven=self.is_proven, is_relaxed=self.is_relaxed),
            "Full": first.binding,
        }

    def to_dict(self) -> dict[str, object]:
        """For JSON, of several jobs."""
        return {
            "job": self.job.name,
            "rate_bit_s": _finite(self.rate_bit_s),
            "bound_bit_s": _finite(self.bound),
            "of_bound": self.rows[0].of_bound,
            "full": self.rows[0].binding,
            "levels": self.levels,
            "is_out_of_time": self.is_out_of_time,
        }


def bound_told(rate: float, bound: float, *, is_proven: bool = False, is_relaxed: bool = True) -> dict[str, str]:
    """A bound and the gap to it, as comments."""
    if not math.isfinite(bound):
        return {"Bound": "none was found in time"}
    gap = f"{1 - rate / bound:.1%} below the bound" if bound > 0 else "none"
    return {
        "Bound": bit_rate(bound) + ("" if is_relaxed else ", from prices: the linear program was not solved"),
        "Gap": gap + (", and proven best" if is_proven else ""),
    }


def candidates_for(cluster: Cluster, job: Job) -> int | None:
    """How many aggregators are considered for each rack: all, but where there are many of everything few."""
    racks = len({tuple(link.ends[-1].node for link in cluster.links_of[host]) for host in job.workers})
    size = len(cluster.servers) * racks * len(cluster.aggregators)
    return None if size <= _MANY else max(4, _MANY // (len(cluster.servers) * racks))


def plan(
    cluster: Cluster,
    job: Job,
    *,
    seed: int,
    seconds: float,
    levels: int | None = None,
    at_least: float | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Proposal:
    """The best deployment found, and the other ways.

    Args:
        progress: is told what takes more than two seconds.

    Raises:
        penstock.errors.Config: there is nothing to plan, no scheme is possible, or none so fast.
    """
    import numpy as np

    from penstock.planning import baselines
    from penstock.planning.bound import bound_of_all
    from penstock.planning.evaluate import evaluate
    from penstock.planning.problem import Problem
    from penstock.planning.relax import relax
    from penstock.planning.solve import scheme_of, search

    until = time.monotonic() + seconds
    problem = Problem(cluster, job, levels=levels, candidates=candidates_for(cluster, job))
    relaxed = relax(problem, seconds=_OF_THE_BOUND * seconds)
    bound = bound_of_all(problem, relaxed)
    if bound <= 0 or (at_least is not None and bound < at_least):
        wanted = "any" if at_least is None else f"{bit_rate(at_least)} a worker"
        raise ConfigError(f"no deployment reaches {wanted}{_against(problem, at_least or 0.0, seconds, progress)}")
    # Of a small problem the second half of the time is for a proof.
    is_small = is_provable(problem)
    left = max(until - time.monotonic(), 0.1)
    try:
        found = search(problem, seed=seed, seconds=left / 2 if is_small else left, relaxed=relaxed)
    except ConfigError as error:
        raise ConfigError(f"{error}{_against(problem, 0.0, seconds, progress)}") from None
    is_proven = found.rate >= bound * (1 - _NOISE)
    if is_small and not is_proven:
        found, is_proven = _proven(problem, found, max(until - time.monotonic(), 0.1))
    scheme = scheme_of(problem, found.rates, found.trees)
    ways = {"planned": scheme}
    rng = np.random.default_rng(seed)
    not_made: dict[str, str] = {}
    if not relaxed.is_solved:
        not_made[_INART] = "not computed: it needs the linear program"
    for way, make in {
        _INART: lambda: baselines.inart(problem, rng, relaxed),
        "nearest aggregators, best parts": lambda: baselines.hierarchical(problem),
        "ATP: equal parts, nearest aggregators": lambda: baselines.atp(problem),
        "LBMM: equal parts, no aggregators": lambda: baselines.lbmm(problem),
    }.items():
        try:
            if way not in not_made:
                ways[way] = make()
        except ConfigError:
            not_made[way] = "impossible: a server cannot have so many children"
    rows = []
    for way, each in ways.items():
        worth = evaluate(cluster, job, each)
        rows.append(Row(way, worth.rate, worth.rate / bound if math.isfinite(bound) else None, worth.binding))
    rows += [Row(way, None, None, why) for way, why in not_made.items()]
    rate = rows[0].rate_bit_s or 0.0
    if at_least is not None and rate < at_least:
        more = "" if is_proven else ": give it more --seconds"
        forbids = "and is proven best" if is_proven else f"which the bound of {bit_rate(bound)} does not forbid"
        raise ConfigError(
            f"the best deployment found sends {bit_rate(rate)} a worker, below {bit_rate(at_least)}, {forbids}{more}; full is "
            f"{rows[0].binding}"
        )
    of_ring, binding = baselines.ring(cluster, job)
    rows.append(Row(RING, of_ring, None, binding))
    return Proposal(job, scheme, rows, bound, problem.levels, found.is_out_of_time, is_proven, relaxed.is_solved)


def is_provable(problem: Problem) -> bool:
    """Whether the problem is so small that a mixed-integer program may prove in seconds which deployment is best."""
    if len(problem.jobs) > 1 or problem.candidates is not None or not installed("scipy"):
        return False
    flows = sum(
        len(problem.legs_of(s, c, v)) * int(count)
        for s in range(len(problem.servers))
        for c, count in enumerate(problem.count(s))
        for v in (*problem.near[s][c], problem.straight)
    )
    return flows <= _PROVABLE


def _proven(problem: Problem, found: Solved, seconds: float) -> tuple[Solved, bool]:
    """The better of a deployment and what a mixed-integer program finds, and whether it is proven that none is better."""
    from penstock.planning.exact import exact

    try:
        best, is_proven = exact(problem, seconds)
    except RuntimeError:
        # The time was too short for any deployment.
        return found, False
    better = best if best.rate > found.rate * (1 + _NOISE) else found
    return replace(better, is_out_of_time=not is_proven), is_proven


def _against(problem: Problem, rate: float, seconds: float, progress: Callable[[str], None]) -> str:
    """What stands against a rate, as the end of a sentence."""
    from penstock.planning.conflict import conflict

    if not installed("scipy"):
        return "; which limits stand against it only a solver tells: pip install 'penstock[tune]'"
    left: list[int] = []
    told_at = time.monotonic() + _SILENT_S

    def tell() -> None:
        many = f": {left[-1]} limits are left" if left else ""
        progress(f"looking for what stands against it{many}, up to {seconds:g} s ...")

    def told(many: int) -> None:
        nonlocal told_at
        left.append(many)
        if time.monotonic() > told_at + _EVERY_S:
            told_at = time.monotonic()
            tell()

    # The first program alone may take long.
    first = threading.Timer(_SILENT_S, tell)
    first.daemon = True
    first.start()
    try:
        found = conflict(problem, rate, seconds=seconds, progress=told)
    finally:
        first.cancel()
    if not found.limits:
        return "" if found.is_smallest else f"; {seconds:g} s were too few to see what stands against it: --seconds"
    shown = "; ".join(found.limits[:_SHOWN])
    more = f"; and {len(found.limits) - _SHOWN} more" if len(found.limits) > _SHOWN else ""
    rest = "" if found.is_smallest else f" (out of time after {seconds:g} s: not all of these may be needed)"
    return f", since together {shown}{more}{rest}"


def plan_jobs(cluster: Cluster, *, is_joint: bool, seed: int, seconds: float, levels: int | None) -> list[Proposal]:
    """For all jobs of a cluster, beside each other.

    Raises:
        penstock.errors.Config: as `plan`.
    """
    from penstock.planning.evaluate import evaluate_all, loads_of
    from penstock.planning.several import in_turn, joint

    if not cluster.jobs:
        raise cluster.wrong("jobs", "are 0: name one to plan for")
    found = (joint if is_joint else in_turn)(cluster, cluster.jobs, seed=seed, seconds=seconds, levels=levels)
    together = evaluate_all(cluster, [(each.job, each.scheme, each.rate) for each in found])
    # What rounding in the solvers leaves: the rates are those at which nothing carries more than it can.
    shrunk = min(together.rate, 1.0)
    shares = {load.name: load.share * shrunk / together.rate for load in together.loads}
    rates = {each.job.name: each.rate * shrunk for each in found}
    proposals = []
    for each in found:
        rate = rates[each.job.name]
        fullest = max(loads_of(cluster, each.job, each.scheme).keys() & shares, key=lambda name: shares[name])
        full = fullest if shares[fullest] > _FULL else f"nothing; {fullest} at {shares[fullest]:.0%}"
        row = Row("planned", rate, rate / each.bound if math.isfinite(each.bound) else None, full)
        others = [f"{name} sends {bit_rate(of)}" for name, of in rates.items() if name != each.job.name]
        beside = f", while {', '.join(others[:_SHOWN])}" + (" and others send" if len(others) > _SHOWN else "")
        proposals.append(
            Proposal(
                each.job,
                each.scheme,
                [row],
                each.bound,
                each.levels,
                each.is_out_of_time,
                is_relaxed=each.is_relaxed,
                beside=beside if others else "",
            )
        )
    return proposals


def describe(made: Proposal) -> str:
    """The figures, as a text."""
    first, ring = made.rows[0], made.rows[-1]
    rate = made.rate_bit_s
    lines = []
    if ring.rate_bit_s is not None and ring.rate_bit_s > rate:
        is_faster = f"is {ring.rate_bit_s / rate:.2f} times as fast" if rate > 0 else "is faster"
        is_free = "loads nothing that has a limit"
        lines.append(f"Do not aggregate: a ring of ranks {is_faster if math.isfinite(ring.rate_bit_s) else is_free}.")
    share = "no bound was found in time" if first.of_bound is None else f"{first.of_bound:.1%} of the bound"
    lines.append(f"{bit_rate(rate)} a worker, {share}. Full: {first.binding}.")
    if made.is_proven:
        levels = "one level" if made.levels == 1 else f"{made.levels} levels"
        lines.append(f"Proven best: no deployment with {levels} of aggregators is faster.")
    elif made.is_out_of_time:
        lines.append("The time ended the search; with more --seconds it may find a better deployment.")
    lines += [] if made.is_relaxed else [not_relaxed()]
    if made.job.gradient_bytes is not None and math.isfinite(rate) and rate > 0:
        took = 8 * made.job.gradient_bytes / rate
        lines.append(f"A step's gradients take {took:.3g} s on their way, if nothing else waits.")
    lines += ["", *_table(made.rows)]
    return "\n".join(lines)


def describe_jobs(proposals: Sequence[Proposal]) -> str:
    """Several jobs', as a text."""
    rows = [Row(each.job.name, each.rate_bit_s, each.rows[0].of_bound, each.rows[0].binding) for each in proposals]
    slowest = min(proposals, key=lambda each: each.rate_bit_s)
    lines = [f"All at once: {slowest.job.name} is the slowest with {bit_rate(slowest.rate_bit_s)} a worker."]
    if any(each.is_out_of_time for each in proposals):
        lines.append("The time ended the search; with more --seconds it may find better deployments.")
    lines += [] if all(each.is_relaxed for each in proposals) else [not_relaxed()]
    return "\n".join([*lines, "", *_table(rows)])


def not_relaxed() -> str:
    """What is to be said where the linear program was not solved."""
    why = "did not end in time" if installed("scipy") else "needs a solver: pip install 'penstock[tune]'"
    return f"The linear program {why}. So the bound is from prices alone, and may be far off."


def _table(rows: Sequence[Row]) -> list[str]:
    width = max(len(row.way) for row in rows)
    lines = [f"{'':{width}}  {'a worker':>13}  of bound  full"]
    for row in rows:
        share = "" if row.of_bound is None else f"{row.of_bound:.1%}"
        rate = "-" if row.rate_bit_s is None else bit_rate(row.rate_bit_s)
        lines.append(f"{row.way:{width}}  {rate:>13}  {share:>8}  {row.binding}")
    return lines


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


RING = "ring of ranks, no servers"
_INART = "InArt: one random rounding"
# The linear program may take so much of the time; a search without its solution knows less.
_OF_THE_BOUND = 0.75
# Flows of a problem that a mixed-integer program solves within seconds.
_PROVABLE = 150
# Differences below this share are the solvers'.
_NOISE = 1e-6
_FULL = 1 - 1e-6
# So much is listed in a sentence.
_SHOWN = 12
# Nothing is told before that, and then so often.
_SILENT_S, _EVERY_S = 2.0, 5.0
# Servers x racks x aggregators of a program that takes a second or two: a fat-tree of 54 hosts has 3,240.
_MANY = 8000
