"""The bound that no scheme can pass: the paper's phases 1 (its Eq. 2) and 2 (Eq. 5) as one linear program.

With g = r_s y, h = r_s z and flows along routes everything is linear. docs/design/planner.md has the formulas, the Lagrangian,
and why the multipliers of the paper's Eq. 3 are this program's shadow prices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.extras import installed
from penstock.planning.problem import Problem
from penstock.planning.solver import linear

__all__ = ["Duals", "Program", "Relaxed", "relax"]


@dataclass(frozen=True)
class Relaxed:
    """The solution of the relaxed problem."""

    bound: float
    """What no scheme's rate passes, in bits a second: of several jobs, what the slowest one's does not."""
    rates: np.ndarray
    """By part."""
    sent: list[np.ndarray]
    """By part: by class and way, the rate of that class's workers together."""
    forwarded: np.ndarray
    """By part and aggregator: the rate that it sends straight to the server."""
    nested: dict[tuple[int, int, int], float]
    """By part, aggregator and aggregator above it: the rate."""
    shares: dict[tuple[str, str], np.ndarray]
    """By pair of nodes between which there are several routes: what flows on each."""
    duals: Duals
    """The shadow prices."""
    is_solved: bool = True
    """False: the time ended first, or there is no solver; the bound is infinite, and all parts have one rate."""

    @property
    def prices(self) -> np.ndarray:
        """By resource: how much faster a worker could send for each bit a second more of it."""
        return self.duals.resources


@dataclass(frozen=True)
class Duals:
    """The multipliers of the relaxed problem's constraints: the paper's Eq. 3."""

    resources: np.ndarray
    """By resource (the paper's rho of switches, theta of servers; links have none there)."""
    most: np.ndarray
    """By job: of the links that only one host's workers use; 0 where they have no limit."""
    jobs: np.ndarray
    """By job: how much its rate counts; of one job 1."""
    classes: list[np.ndarray]
    """By part and class: what a unit of rate of one worker costs (lambda)."""
    children: np.ndarray
    """By part and aggregator, the last for the server: of its number of children."""
    nested: dict[tuple[int, int, int], float]
    """By part, aggregator and aggregator above it: of the rule that the latter pushes to the server."""


class Program:
    """The rows and columns of the relaxed problem.

    More than 16 fields: a matrix is made of lists that grow together, and each kind of row keeps its numbers for the prices.
    """

    def __init__(self, problem: Problem, fractions: np.ndarray | None = None) -> None:
        """``fractions``, by part: the split of each job's model stays as it is."""
        self.problem = problem
        self.columns = len(problem.servers)
        self.rows: list[int] = []
        self.of: list[int] = []
        self.values: list[float] = []
        self.limits: list[float] = list(problem.room / problem.scale)
        self.equal: tuple[list[int], list[int], list[float], list[float]] = ([], [], [], [])
        self.sent: list[dict[tuple[int, int], int]] = []
        self.forwarded = np.zeros((len(problem.servers), problem.straight), dtype=int)
        self.nested: dict[tuple[int, int, int], int] = {}
        self._routed: dict[tuple[str, str], list[int]] = {}
        self.shares: dict[tuple[str, str], list[int]] = {}
        self.slowest: int | None = None
        # The numbers of rows whose multipliers are wanted.
        self.rows_of_nested: dict[tuple[int, int, int], int] = {}
        self.rows_of_children = np.zeros((len(problem.servers), problem.straight + 1), dtype=int)
        self.rows_of_classes: list[list[int]] = []
        self.rows_of_most: dict[int, int] = {}
        self.rows_of_jobs: list[int] = []
        for s in range(len(problem.servers)):
            self._part(s)
        self._routes()
        self._jobs(fractions)

    def column(self) -> int:
        self.columns += 1
        return self.columns - 1

    def most(self, limit: float, *entries: tuple[int, float]) -> int:
        """A row: what the entries add up to is at most the limit. Returns its number."""
        self.limits.append(limit)
        for column, value in entries:
            self._add(len(self.limits) - 1, column, value)
        return len(self.limits) - 1

    def _add(self, row: int, column: int, value: float) -> None:
        self.rows.append(row)
        self.of.append(column)
        self.values.append(value)

    def equals(self, limit: float, *entries: tuple[int, float]) -> int:
        """A row: the entries add up to the limit. Returns its number among those."""
        rows, of, values, limits = self.equal
        limits.append(limit)
        for column, value in entries:
            rows.append(len(limits) - 1)
            of.append(column)
            values.append(value)
        return len(limits) - 1

    def _part(self, s: int) -> None:
        problem, straight = self.problem, self.problem.straight
        count = problem.count(s)
        sent: dict[tuple[int, int], int] = {}
        below: list[list[tuple[int, float]]] = [[] for _ in range(straight + 1)]
        ups: list[list[int]] = []
        for v in range(straight):
            self.forwarded[s, v] = self.column()
            self._flow(self.forwarded[s, v], problem.node(s, v), s, straight)
            below[straight].append((self.forwarded[s, v], 1.0))
            ups.append([int(self.forwarded[s, v])])
        for v in range(straight):
            for u in problem.parents[s][v]:
                column = self.nested[s, v, u] = self.column()
                self._flow(column, problem.node(s, v), s, u)
                below[u].append((column, 1.0))
                ups[v].append(column)
                # Only what pushes to the server itself has aggregators below: so there are two levels, and no cycle.
                self.rows_of_nested[s, v, u] = self.most(0.0, (column, 1.0), (int(self.forwarded[s, u]), -1.0))
        self.rows_of_classes.append([])
        for c, near in enumerate(problem.near[s]):
            of_class = []
            for v in (*near, straight):
                column = sent[c, v] = self.column()
                of_class.append((column, 1.0))
                self._flow(column, problem.places[problem.job_of[s]][c], s, v)
                below[v].append((column, 1.0))
                if v < straight:
                    self.most(0.0, (column, 1.0 / count[c]), *((up, -1.0) for up in ups[v]))
            self.rows_of_classes[s].append(self.equals(0.0, (s, -float(count[c])), *of_class))
        for v in range(straight):
            self.most(0.0, (s, -1.0), *((up, 1.0) for up in ups[v]))
            most = float(problem.most_children[v])
            self.rows_of_children[s, v] = self.most(0.0, *below[v], *((up, -most) for up in ups[v]))
        most = float(problem.most_children_of_server)
        self.rows_of_children[s, straight] = self.most(0.0, *below[straight], (s, -most))
        self.sent.append(sent)

    def _flow(self, column: int, start: str, s: int, way: int) -> None:
        """Loads what a flow loads wherever it goes; its route is chosen in `_routes`."""
        problem = self.problem
        intake = problem.intake_at(s, way)
        if intake is not None:
            self._add(intake, column, 1.0)
        end = problem.node(s, way)
        legs = problem.legs(start, end)
        if len(legs) == 1:
            for resource in legs[0]:
                self._add(resource, column, 1.0)
        else:
            self._routed.setdefault((start, end), []).append(column)

    def _routes(self) -> None:
        """All flows between two nodes share their routes: what is loaded does not depend on whose they are."""
        for (start, end), columns in self._routed.items():
            legs = self.problem.legs(start, end)
            shares = self.shares[start, end] = [self.column() for _ in legs]
            for share, route in zip(shares, legs, strict=True):
                for resource in route:
                    self._add(resource, share, 1.0)
            self.equals(0.0, *((share, 1.0) for share in shares), *((column, -1.0) for column in columns))

    def _jobs(self, fractions: np.ndarray | None) -> None:
        problem = self.problem
        parts = [np.flatnonzero(problem.job_of == job) for job in range(len(problem.jobs))]
        for job, most in enumerate(problem.most):
            if np.isfinite(most):
                self.rows_of_most[job] = self.most(most / problem.scale, *((int(s), 1.0) for s in parts[job]))
            if fractions is not None:
                largest = int(max(parts[job], key=lambda s: fractions[s]))
                for s in map(int, parts[job]):
                    if s != largest:
                        self.equals(0.0, (largest, float(fractions[s])), (s, -float(fractions[largest])))
        self.aim: dict[int, float] = {int(s): 1.0 for s in parts[0]}
        if len(parts) > 1:
            self.slowest = self.column()
            self.aim = {self.slowest: 1.0}
            for each in parts:
                self.rows_of_jobs.append(self.most(0.0, (self.slowest, 1.0), *((int(s), -1.0) for s in each)))

    def solve(self, seconds: float | None = None) -> Any:
        """scipy's result; None if the time ended first."""
        from scipy.sparse import coo_array

        aim = np.zeros(self.columns)
        for column, value in self.aim.items():
            aim[column] = -value
        rows, of, values, limits = self.equal
        program = {
            "c": aim,
            "A_ub": coo_array((self.values, (self.rows, self.of)), shape=(len(self.limits), self.columns)).tocsr(),
            "b_ub": np.array(self.limits),
            "A_eq": coo_array((values, (rows, of)), shape=(len(limits), self.columns)).tocsr(),
            "b_eq": np.array(limits),
            "method": "highs-ipm" if self.columns > _LARGE else "highs",
        }
        return linear(program, self.columns, seconds)


def relax(problem: Problem, *, fractions: np.ndarray | None = None, seconds: float | None = None) -> Relaxed:
    """Solve the relaxed problem exactly; with ``fractions``, by part, for a split of the models that stays. ``seconds``: at most.
    Without scipy it is not solved.

    Raises:
        penstock.errors.Config: nothing limits a rate.
    """
    program = Program(problem, fractions)
    found = program.solve(seconds) if installed("scipy") else None
    if found is None:
        return _unsolved(problem)
    if found.status == _UNBOUNDED:
        raise problem.unlimited()
    if not found.success:
        raise RuntimeError(f"the relaxed problem has a solution, all zeros, and HiGHS says: {found.message}")
    x = found.x.clip(0) * problem.scale
    sent = []
    for s, columns in enumerate(program.sent):
        each = np.zeros((len(problem.count(s)), problem.straight + 1))
        for (c, v), column in columns.items():
            each[c, v] = x[column]
        sent.append(each)
    return Relaxed(
        bound=-found.fun * problem.scale,
        rates=x[: len(problem.servers)],
        sent=sent,
        forwarded=x[program.forwarded] if program.forwarded.size else np.zeros(program.forwarded.shape),
        nested={key: float(x[column]) for key, column in program.nested.items() if x[column] > _NOISE * problem.scale},
        shares={pair: x[columns] for pair, columns in program.shares.items()},
        duals=_duals(program, -found.ineqlin.marginals, found.eqlin.marginals),
    )


def _unsolved(problem: Problem) -> Relaxed:
    parts, straight = len(problem.servers), problem.straight
    counts = [problem.count(s) for s in range(parts)]
    return Relaxed(
        bound=float("inf"),
        rates=np.ones(parts),
        sent=[np.zeros((len(count), straight + 1)) for count in counts],
        forwarded=np.zeros((parts, straight)),
        nested={},
        shares={},
        duals=Duals(
            np.zeros(len(problem.resources)),
            np.zeros(len(problem.jobs)),
            np.ones(len(problem.jobs)),
            [np.zeros(len(count)) for count in counts],
            np.zeros((parts, straight + 1)),
            {},
        ),
        is_solved=False,
    )


def _duals(program: Program, upper: np.ndarray, equal: np.ndarray) -> Duals:
    problem = program.problem
    most = np.zeros(len(problem.jobs))
    for job, row in program.rows_of_most.items():
        most[job] = upper[row]
    return Duals(
        resources=upper[: len(problem.resources)].clip(0),
        most=most.clip(0),
        jobs=upper[program.rows_of_jobs].clip(0) if program.rows_of_jobs else np.ones(1),
        classes=[equal[rows] for rows in program.rows_of_classes],
        children=upper[program.rows_of_children].clip(0),
        nested={key: max(float(upper[row]), 0.0) for key, row in program.rows_of_nested.items()},
    )


# Beyond so many columns the interior-point method is faster: with 7,600, a fat-tree of 54 hosts, 0.5 s in place of 9.
_LARGE = 1000
# scipy's number.
_UNBOUNDED = 3
# Flows below this share of the problem's scale are the solver's noise.
_NOISE = 1e-9
