"""Several jobs on one cluster: one after the other, or all at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.cluster.network import Cluster, Job
from penstock.planning.bound import bound_of_all
from penstock.planning.evaluate import loads_of
from penstock.planning.problem import Problem
from penstock.planning.relax import Relaxed, relax
from penstock.planning.scheme import Scheme
from penstock.planning.solve import scheme_of, schemes_of, search

__all__ = ["Planned", "in_turn", "joint"]


@dataclass(frozen=True)
class Planned:
    """A job among others."""

    job: Job
    scheme: Scheme
    rate: float
    """What each of its workers sends while the others send at theirs; bits a second."""
    bound: float
    """In turn: its share of what it could have at most beside those before it. Jointly: what the slowest job could have."""
    levels: int
    is_out_of_time: bool
    """Whether the time ended the search."""
    is_relaxed: bool
    """Whether the linear program was solved: else the bound is from prices alone."""


def in_turn(
    cluster: Cluster, jobs: Sequence[Job], *, seed: int = 0, seconds: float = 5.0, levels: int | None = None
) -> list[Planned]:
    """Each job beside those before it, whose loads are background to it (the paper's appendix B.1). Of n jobs the first one
    takes an n-th of the rate that it could have, the next one of what is left a part for n - 1, the last one all: otherwise the
    first would fill what all need.

    Raises:
        penstock.errors.Config: a job cannot be planned.
    """
    background: dict[str, float] = {}
    found = []
    for number, job in enumerate(jobs):
        problem = Problem(cluster, job, levels=levels, background=background)
        relaxed = relax(problem, seconds=seconds / len(jobs) / 2)
        best = search(problem, seed=seed, seconds=seconds / len(jobs), relaxed=relaxed)
        scheme = scheme_of(problem, best.rates, best.trees)
        left = len(jobs) - number
        rate = best.rate / left
        bound = bound_of_all(problem, relaxed) / left
        found.append(Planned(job, scheme, rate, bound, problem.levels, best.is_out_of_time, relaxed.is_solved))
        for name, load in loads_of(cluster, job, scheme).items():
            background[name] = background.get(name, 0.0) + load * rate
    return found


def joint(
    cluster: Cluster, jobs: Sequence[Job], *, seed: int = 0, seconds: float = 5.0, levels: int | None = None
) -> list[Planned]:
    """All jobs at once: the slowest one as fast as possible, and of equals those whose rates add up to more (max-min).

    Raises:
        penstock.errors.Config: a job cannot be planned.
    """
    problem = Problem(cluster, jobs, levels=levels)
    relaxed: Relaxed = relax(problem, seconds=seconds / 2)
    best = search(problem, seed=seed, seconds=seconds, relaxed=relaxed)
    bound = bound_of_all(problem, relaxed)
    rates = np.bincount(problem.job_of, weights=best.rates, minlength=len(jobs))
    return [
        Planned(job, scheme, float(rate), bound, problem.levels, best.is_out_of_time, relaxed.is_solved)
        for job, scheme, rate in zip(jobs, schemes_of(problem, best.rates, best.trees), rates, strict=True)
    ]
