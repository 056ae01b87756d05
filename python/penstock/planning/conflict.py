"""What stands against a rate: limits that no deployment can keep at it, none of which could be left out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.numbers import bit_rate
from penstock.planning.problem import Problem
from penstock.planning.relax import Program

__all__ = ["Conflict", "conflict"]


@dataclass(frozen=True)
class Conflict:
    """Limits that together let no worker send at a rate, in words. None: the relaxed problem reaches it, or the time was too
    short to find any."""

    limits: list[str]
    is_smallest: bool
    """Whether the others would let a worker send so fast without any one of these; False: the time ended before that was seen."""


def conflict(
    problem: Problem, rate: float, *, seconds: float = 60.0, progress: Callable[[int], None] = lambda many: None
) -> Conflict:
    """What stands against a rate.

    One limit that is enough is named alone, where they are few. Otherwise: a limit with a shadow price is in the proof that
    more is impossible, so those are enough to begin with; then halves, quarters and at last single ones are left out where the
    others are enough (a deletion filter, as for irreducible infeasible systems), and after each the prices are looked at again.

    Args:
        seconds: at most; what is known then is told.
        progress: is told now and then how many limits are left.
    """
    return _Filter(problem, rate, seconds, progress).found()


class _Filter:
    """Limits that are enough, fewer and fewer."""

    def __init__(self, problem: Problem, rate: float, seconds: float, progress: Callable[[int], None]) -> None:
        self.problem, self.rate, self.progress = problem, rate, progress
        self.start = time.monotonic()
        self.until = self.start + seconds
        self.program = Program(problem)
        self.names = _names(self.program)
        # A rate above the wanted one is of no interest: with it limits that are left out need not be high, which is slow.
        self.aimed = max(rate / problem.scale, 1e-3) * 1.01
        self.program.most(self.aimed, *((column, 1.0) for column in self.program.aim))
        self.limits = list(self.program.limits)
        workers = sum(int(counts.sum()) for counts in problem.counts)
        self.no_limit = 4.0 * workers * len(problem.servers) * self.aimed

    def found(self) -> Conflict:
        whole = list(self.names)
        prices = self._against(whole)
        if prices is None:
            return Conflict([], not self._is_over())
        if len(whole) <= _FEW:
            for row in whole:
                if not self._is_over(share=_ALONE) and self._against([row]) is not None:
                    return Conflict([self.names[row]], True)
        needed, prices = self._priced(whole, prices)
        many = -(-len(needed) // 2)
        while True:
            at = 0
            while at < len(needed) and not self._is_over():
                self.progress(len(needed))
                rest = needed[:at] + needed[at + many :]
                prices = self._against(rest) if rest else None
                if prices is None:
                    at += many
                else:
                    needed, _ = self._priced(rest, prices)
            if many == 1 or self._is_over():
                break
            many = -(-many // 2)
        return Conflict([self.names[row] for row in needed], not self._is_over())

    def _priced(self, rows: Sequence[int], prices: np.ndarray) -> tuple[list[int], np.ndarray]:
        """Those of limits that are enough which have a price, if they are: prices may be within the solver's noise."""
        fewer = [row for row in rows if prices[row] > 1e-9]
        if len(fewer) < len(rows):
            again = self._against(fewer)
            if again is not None:
                return fewer, again
        return list(rows), prices

    def _against(self, rows: Sequence[int]) -> np.ndarray | None:
        """The prices, if these limits alone forbid the rate; None if they allow it, or the time is over."""
        self.program.limits = [
            max(limit, self.no_limit) if row in self.names else limit for row, limit in enumerate(self.limits)
        ]
        for row in rows:
            self.program.limits[row] = self.limits[row]
        left = self.until - time.monotonic()
        found = self.program.solve(left) if left > 0 else None
        if found is None:
            self.until = min(self.until, time.monotonic())
            return None
        if found.fun is None:
            # Nothing more is believed than was proven.
            return None
        reached = -found.fun * self.problem.scale
        if reached >= self.rate * (1 - 1e-7) and -found.fun > 1e-12:
            return None
        return np.asarray(-found.ineqlin.marginals)

    def _is_over(self, share: float = 1.0) -> bool:
        return time.monotonic() >= self.start + share * (self.until - self.start)


def _names(program: Program) -> dict[int, str]:
    """Every limit's row, in words."""
    problem = program.problem
    found = {}
    for row, resource in enumerate(problem.resources):
        kind, _, name = resource.name.partition(" ")
        takes = {"link": "carries", "aggregator": "takes in", "server": "takes in"}[kind]
        found[row] = f"{kind} {name} {takes} {_mbit(resource.room)}"
    for job, row in program.rows_of_most.items():
        found[row] = f"the own links of {problem.jobs[job].name}'s workers leave each {_mbit(problem.most[job])}"
    for s in range(len(problem.servers)):
        for v in range(problem.straight + 1):
            is_server = v == problem.straight
            name = f"server {problem.servers[s]}" if is_server else f"aggregator {problem.aggregators[v]}"
            most = problem.most_children_of_server if is_server else problem.most_children[v]
            below = "" if is_server else f" for server {problem.servers[s]}"
            found[int(program.rows_of_children[s, v])] = f"{name} has at most {most} children{below}"
    return found


def _mbit(rate: float) -> str:
    return bit_rate(max(rate, 0.0)) if np.isfinite(rate) else "any rate"


# Of more limits none is tried alone.
_FEW = 150
# So much of the time may go to that.
_ALONE = 0.3
