"""The solvers: a bound that no scheme can pass, and a search for a scheme that comes near.

With g = r_s y and h = r_s z the paper's phase 1 (its Eq. 2) and phase 2 (Eq. 5) are one linear program (`relax`), whose value is
the bound. The search rounds its solution at random, as the paper does (appendix B.3), and then repairs: for given ways the best
rates are a small linear program (`split`); its shadow prices say which worker, sent another way, would relieve what is full.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from penstock.errors import Config as ConfigError
from penstock.planning.problem import Problem

__all__ = ["Relaxed", "Solved", "relax", "search", "split"]


@dataclass(frozen=True)
class Relaxed:
    """The solution of the relaxed problem."""

    bound: float
    """What no `Scheme`'s rate passes, in bits a second."""
    rates: np.ndarray
    """By server."""
    sent: np.ndarray
    """By server, class and way: the rate of that class's workers together."""


@dataclass(frozen=True)
class Solved:
    """A scheme, in numbers of a `Problem`."""

    rate: float
    rates: np.ndarray
    """By server."""
    counts: np.ndarray
    """By server, class and way: how many workers."""


def relax(problem: Problem) -> Relaxed:
    """Solve the relaxed problem exactly.

    Raises:
        penstock.errors.Config: nothing limits a rate.
    """
    from scipy.optimize import linprog
    from scipy.sparse import coo_array

    servers, classes, ways = len(problem.servers), len(problem.classes), len(problem.aggregators) + 1
    aggregators = ways - 1
    # The variables: rates; what each class sends each way; what each aggregator forwards.
    sent_at = servers + np.arange(servers * classes * ways).reshape(servers, classes, ways)
    forwarded_at = servers + sent_at.size + np.arange(servers * aggregators).reshape(servers, aggregators)
    columns = servers + sent_at.size + forwarded_at.size
    upper = _Rows()
    for resource in range(len(problem.resources)):
        upper.limit(problem.room[resource])
    for s in range(servers):
        for v in range(aggregators):
            for resource in problem.forwards[s][v]:
                upper.add(resource, forwarded_at[s, v], 1.0)
            upper.begin(0.0)
            upper.more(forwarded_at[s, v], 1.0)
            upper.more(s, -1.0)
            upper.begin(0.0)
            for c in range(classes):
                upper.more(sent_at[s, c, v], 1.0)
            upper.more(s, -problem.most_children[v])
        upper.begin(0.0)
        for c in range(classes):
            for v in range(ways):
                for resource in problem.sends[s][c][v]:
                    upper.add(resource, sent_at[s, c, v], 1.0)
                if v < aggregators:
                    upper.begin(0.0)
                    upper.more(sent_at[s, c, v], 1.0 / problem.count[c])
                    upper.more(forwarded_at[s, v], -1.0)
        upper.begin(0.0)
        upper.more(s, -float(problem.most_children_of_server))
        for v in range(aggregators):
            upper.more(forwarded_at[s, v], 1.0)
        for c in range(classes):
            upper.more(sent_at[s, c, ways - 1], 1.0)
    if np.isfinite(problem.most):
        upper.begin(problem.most)
        for s in range(servers):
            upper.more(s, 1.0)
    equal = _Rows()
    for s in range(servers):
        for c in range(classes):
            equal.begin(0.0)
            equal.more(s, -float(problem.count[c]))
            for v in range(ways):
                equal.more(sent_at[s, c, v], 1.0)
    aim = np.zeros(columns)
    aim[:servers] = -1.0
    # Rates near 1 suit the solver's tolerances.
    scale = problem.scale
    found = linprog(
        aim,
        A_ub=coo_array((upper.values, (upper.rows, upper.columns)), shape=(len(upper.limits), columns)).tocsr(),
        b_ub=np.array(upper.limits) / scale,
        A_eq=coo_array((equal.values, (equal.rows, equal.columns)), shape=(len(equal.limits), columns)).tocsr(),
        b_eq=np.array(equal.limits),
        method="highs",
    )
    if found.status == _UNBOUNDED:
        raise ConfigError(
            f"nothing limits a way that {problem.job.name} can take: give its links a rate, or its server an ingress"
        )
    if not found.success:
        raise RuntimeError(f"the relaxed problem has a solution, all zeros, and HiGHS says: {found.message}")
    sent = found.x[sent_at].clip(0) * scale if sent_at.size else np.zeros(sent_at.shape)
    return Relaxed(-found.fun * scale, found.x[:servers] * scale, sent)


def split(problem: Problem, loads: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
    """The best rates for given ways: ``loads[s]`` is what a unit of server s's rate loads, by resource. Returns the rate of a
    worker, the servers' rates and the shadow prices of the resources."""
    from scipy.optimize import linprog

    used = np.flatnonzero(loads.any(axis=0))
    rows, limits = loads[:, used].T, problem.room[used] / problem.scale
    if np.isfinite(problem.most):
        rows = np.vstack([rows, np.ones(len(loads))])
        limits = np.append(limits, problem.most / problem.scale)
    found = linprog(-np.ones(len(loads)), A_ub=rows, b_ub=limits, method="highs")
    if not found.success:
        raise RuntimeError(f"the best rates exist, and HiGHS says: {found.message}")
    prices = np.zeros(len(problem.resources))
    prices[used] = -found.ineqlin.marginals[: len(used)]
    return -found.fun * problem.scale, found.x * problem.scale, prices


def search(
    problem: Problem, *, seed: int = 0, roundings: int = 16, seconds: float = 5.0, relaxed: Relaxed | None = None
) -> Solved:
    """The best scheme that roundings of the relaxed solution, each repaired, and some simple ones lead to. The same for the same
    seed, unless the time runs out; then it is the best so far.

    Raises:
        penstock.errors.Config: more workers than the nodes have places for.
    """
    relaxed = relaxed or relax(problem)
    until = time.monotonic() + seconds
    rng = np.random.default_rng(seed)
    best: Solved | None = None
    seen: set[bytes] = set()

    def is_over() -> bool:
        return best is not None and (best.rate >= relaxed.bound * (1 - _NOISE) or time.monotonic() > until)

    def improve(counts: np.ndarray) -> bool:
        nonlocal best
        start = _Search(problem, counts)
        if start.counts.tobytes() in seen:
            return False
        found = start.repair(until, seen)
        if best is None or found.rate > best.rate * (1 + _NOISE):
            best = found
            return True
        return False

    for counts in _starts(problem, relaxed, rng, roundings):
        if not is_over():
            improve(counts)
    assert best is not None
    kicks = 0
    while kicks < _KICKS and not is_over():
        kicks = 0 if improve(_kicked(problem, best.counts, rng)) else kicks + 1
    return best


def _starts(problem: Problem, relaxed: Relaxed, rng: np.random.Generator, roundings: int) -> Iterator[np.ndarray]:
    yield problem.nearest()
    for _ in range(roundings):
        yield rounded(problem, relaxed, rng)
    yield problem.all_one_way(None)
    for v in range(len(problem.aggregators)):
        yield problem.all_one_way(v)


def _kicked(problem: Problem, counts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """These ways, with those of some workers' classes drawn anew: out of a place where no single change helps."""
    counts = counts.copy()
    servers, classes, ways = counts.shape
    for _ in range(rng.integers(2, 5)):
        s, c = rng.integers(servers), rng.integers(classes)
        counts[s, c] = rng.multinomial(problem.count[c], rng.dirichlet(np.full(ways, 0.5)))
    return counts


def rounded(problem: Problem, relaxed: Relaxed, rng: np.random.Generator) -> np.ndarray:
    """One random rounding: each worker goes each way with the share of its rate that the relaxed solution sends there."""
    servers, classes, ways = relaxed.sent.shape
    counts = np.zeros(relaxed.sent.shape, dtype=int)
    for s in range(servers):
        for c in range(classes):
            total = relaxed.sent[s, c].sum()
            # A server without a part of the model: its workers' ways follow the other servers'.
            shares = relaxed.sent[s, c] if total > 0 else relaxed.sent[:, c].sum(axis=0)
            shares = shares / shares.sum() if shares.sum() > 0 else np.full(ways, 1 / ways)
            counts[s, c] = rng.multinomial(problem.count[c], shares)
    return counts


class _Search:
    """Ways that change one step at a time, and what they load."""

    def __init__(self, problem: Problem, counts: np.ndarray) -> None:
        self.problem, self.counts = problem, problem.within_limits(counts)
        self.loads = problem.loads(self.counts)

    def repair(self, until: float, seen: set[bytes]) -> Solved:
        """Change ways while that helps, but to none that were ``seen``, which grows."""
        rate, rates, prices = split(self.problem, self.loads)
        while time.monotonic() < until:
            for s, moved in self._moves(rates, prices):
                counts, loads = self.counts[s].copy(), self.loads[s].copy()
                self.counts[s] = moved
                if (key := self.counts.tobytes()) in seen:
                    self.counts[s] = counts
                    continue
                seen.add(key)
                self.loads[s] = self.problem.loads_of(s, moved)
                after = split(self.problem, self.loads)
                if after[0] > rate * (1 + _NOISE):
                    rate, rates, prices = after
                    break
                self.counts[s], self.loads[s] = counts, loads
            else:
                break
        return Solved(rate, rates, self.counts)

    def _moves(self, rates: np.ndarray, prices: np.ndarray) -> Iterable[tuple[int, np.ndarray]]:
        """The most promising changes of one server's ways, by what the prices say that they save; the best first."""
        found: list[tuple[float, int, np.ndarray]] = []
        for s in range(len(rates)):
            weight = max(rates[s], rates.sum() / (4 * len(rates)))
            sends, forwards = self.problem.prices(s, prices)

            def price(counts: np.ndarray, sends: np.ndarray = sends, forwards: np.ndarray = forwards) -> float:
                return float((counts * sends).sum() + forwards[counts.sum(axis=0)[:-1] > 0].sum())

            now = price(self.counts[s])
            for moved in self._neighbours(s):
                saved = now - price(moved)
                if saved > 1e-12:
                    found.append((saved * weight, s, moved))
        found.sort(key=lambda one: -one[0])
        return [(s, moved) for _, s, moved in found[:_TRIED]]

    def _neighbours(self, s: int) -> Iterator[np.ndarray]:
        counts = self.counts[s]
        ways = counts.shape[1]
        for c, v in zip(*np.nonzero(counts), strict=True):
            for to in range(ways):
                for many in {1, counts[c, v]} if to != v else ():
                    moved = counts.copy()
                    moved[c, v] -= many
                    moved[c, to] += many
                    if self.problem.fits(moved):
                        yield moved
        # An aggregator is given up, or takes over another one's workers.
        for v in np.flatnonzero(counts.sum(axis=0)):
            for to in range(ways):
                if to != v and np.count_nonzero(counts[:, v]) > 1:
                    moved = counts.copy()
                    moved[:, to] += moved[:, v]
                    moved[:, v] = 0
                    if self.problem.fits(moved):
                        yield moved


class _Rows:
    """The rows of a sparse matrix and their limits."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.columns: list[int] = []
        self.values: list[float] = []
        self.limits: list[float] = []

    def limit(self, limit: float) -> None:
        self.limits.append(limit)

    begin = limit

    def more(self, column: int, value: float) -> None:
        self.add(len(self.limits) - 1, column, value)

    def add(self, row: int, column: int, value: float) -> None:
        self.rows.append(row)
        self.columns.append(int(column))
        self.values.append(value)


# scipy's number for it.
_UNBOUNDED = 3
# Differences below this share are the solver's.
_NOISE = 1e-7
# So many kicks in a row that lead to nothing better end the search.
_KICKS = 100
# How many changes are tried before the ways count as repaired.
_TRIED = 40
