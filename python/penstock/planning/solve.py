"""The search for a scheme that comes near the bound of `relax`.

It rounds the relaxed solution at random, as the paper does (appendix B.3), and then repairs: for given ways the best rates are a
small linear program (`split`); its shadow prices say which worker, sent another way, would relieve what is full.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.errors import Config as ConfigError
from penstock.planning.bound import bound_of_all
from penstock.planning.moves import Move, moves
from penstock.planning.problem import Problem
from penstock.planning.relax import Relaxed, relax
from penstock.planning.scheme import Child, Places, Scheme
from penstock.planning.split import Split, split
from penstock.planning.starts import Ways, filled, nearest, routed, starts, within_limits
from penstock.planning.tree import Tree

__all__ = ["Solved", "best_rates", "improved", "scheme_of", "schemes_of", "search", "worth_writing"]


@dataclass(frozen=True)
class Solved:
    """A scheme, in numbers of a `Problem`."""

    rate: float
    """Of the slowest job."""
    rates: np.ndarray
    """By part."""
    trees: list[Tree]
    """By part."""
    is_out_of_time: bool
    """Whether the time ended the search, and not that nothing better was found for long."""


def search(
    problem: Problem, *, seed: int = 0, roundings: int = 16, seconds: float = 5.0, relaxed: Relaxed | None = None
) -> Solved:
    """The best scheme that roundings of the relaxed solution, each repaired, and some simple ones lead to. The same for the same
    seed, unless the time runs out; then it is the best so far.

    Raises:
        penstock.errors.Config: more workers than the nodes have places for.
    """
    start = time.monotonic()
    until = start + seconds
    relaxed = relaxed or relax(problem)
    if not relaxed.is_solved:
        # At some rate the starts have to be filled.
        guess = bound_of_all(problem, relaxed) / (len(problem.servers) / len(problem.jobs))
        relaxed = replace(relaxed, rates=np.full(len(problem.servers), guess if np.isfinite(guess) else problem.scale))
    rng = np.random.default_rng(seed)
    search = _Search(problem, until, None)

    def is_over() -> bool:
        best = search.best
        return best is not None and (best.split.rate >= relaxed.bound * (1 - _NOISE) or time.monotonic() > until)

    found: list[list[Tree]] = []
    for trees in starts(problem, relaxed, rng, roundings):
        if not is_over():
            search.note(trees)
            found.append(trees)
    if not found:
        # It says why there is none.
        within_limits(problem, nearest(problem))
        raise problem.no_place(0)
    found.sort(key=lambda trees: -best_rates(problem, trees).rate)
    for trees in found:
        if not is_over() and (time.monotonic() - start < seconds / 2):
            search.repair(trees)
    kicks = 0
    while kicks < _KICKS and not is_over():
        kicks = 0 if search.kick(rng) else kicks + 1
    return search.solved()


def improved(
    problem: Problem,
    trees: Sequence[Tree],
    *,
    fractions: np.ndarray | None = None,
    seed: int = 0,
    seconds: float = 1.0,
    kicks: int = 30,
) -> Solved:
    """The best scheme that changes of a given one lead to. With ``fractions``, by part, the models' split stays."""
    until = time.monotonic() + seconds
    rng = np.random.default_rng(seed)
    search = _Search(problem, until, fractions)
    search.note(list(trees))
    search.repair(list(trees))
    for share in (1.0, 1.1, 1.25):
        assert search.best is not None
        anew = filled(problem, share * search.best.split.rates, rng)
        if anew is not None and time.monotonic() < until:
            search.repair(anew)
    failed = 0
    while failed < kicks and time.monotonic() < until:
        failed = 0 if search.kick(rng) else failed + 1
    return search.solved()


def best_rates(problem: Problem, trees: Sequence[Tree], fractions: np.ndarray | None = None) -> Split:
    """The best rates for these ways.

    Raises:
        penstock.errors.Config: nothing limits a rate.
    """
    loads = np.array([tree.loads for tree in trees])
    try:
        return split(loads, problem.room, problem.job_of, problem.most, fractions)
    except OverflowError:
        raise problem.unlimited() from None


def worth_writing(problem: Problem, trees: Sequence[Tree], found: Split) -> Split:
    """The best rates for these ways without the parts that a `Scheme` leaves out for being small: so that what is written sends
    at these rates, and not the others' parts at somewhat more than was planned for them."""
    loads = np.array([tree.loads for tree in trees])
    kept = np.ones(len(trees), dtype=bool)
    while True:
        totals = np.bincount(problem.job_of, weights=found.rates, minlength=len(problem.jobs))[problem.job_of]
        small = kept & (totals > 0) & (found.rates <= LEAST_FRACTION * totals)
        if not small.any():
            return found
        kept &= ~small
        again = split(loads[kept], problem.room, problem.job_of[kept], problem.most)
        rates = np.zeros(len(trees))
        rates[kept] = again.rates
        found = replace(again, rates=rates)


def scheme_of(problem: Problem, rates: np.ndarray, trees: Sequence[Tree], *, every_route: bool = False) -> Scheme:
    """What trees and rates mean, by names and ranks, for the only job. With ``every_route`` also routes are named that have no
    alternative in this problem's cluster."""
    (scheme,) = schemes_of(problem, rates, trees, every_route=every_route)
    return scheme


def schemes_of(
    problem: Problem, rates: np.ndarray, trees: Sequence[Tree], *, every_route: bool = False
) -> list[Scheme]:
    """The same for every job."""
    found = []
    for job in range(len(problem.jobs)):
        parts = np.flatnonzero(problem.job_of == job)
        total = rates[parts].sum()
        kept = [int(s) for s in parts if total <= 0 or rates[s] > LEAST_FRACTION * total]
        weights = np.array([rates[s] if total > 0 else 1.0 for s in kept])
        via: dict[str, Places] = {}
        above: dict[str, dict[str, str]] = {}
        routes: dict[str, dict[Child, tuple[str, ...]]] = {}
        for s in kept:
            server = problem.servers[s]
            via[server], above[server], routes[server] = _of_part(problem, s, trees[s], 0 if every_route else 1)
        fractions = {problem.servers[s]: float(w / weights.sum()) for s, w in zip(kept, weights, strict=True)}
        found.append(
            Scheme(fractions, via, {k: v for k, v in above.items() if v}, {k: v for k, v in routes.items() if v})
        )
    return found


def _of_part(
    problem: Problem, s: int, tree: Tree, least: int
) -> tuple[Places, dict[str, str], dict[Child, tuple[str, ...]]]:
    job, names = problem.job_of[s], problem.aggregators
    workers = problem.jobs[job].workers
    places: list[str | None] = [None] * len(workers)
    routes: dict[Child, tuple[str, ...]] = {}
    left = [list(ranks) for ranks in problem.classes[job]]
    for c, v, route, many in sorted(tree.ways()):
        start, end = problem.places[job][c], problem.node(s, v)
        taken, left[c] = left[c][:many], left[c][many:]
        choices = problem.routes.between(start, end)
        for rank in taken:
            places[rank] = names[v] if v < problem.straight else None
            if len(choices) > least:
                own = () if workers[rank] == start else (problem.cluster.links_of[workers[rank]][0].name,)
                routes[rank] = (*own, *choices[route].links)
    above = {}
    for v in map(int, tree.used()):
        to = int(tree.above[v])
        if to < problem.straight:
            above[names[v]] = names[to]
        choices = problem.routes.between(problem.node(s, v), problem.node(s, to))
        if len(choices) > least:
            routes[names[v]] = choices[tree.route[v]].links
    return tuple(places), above, routes


@dataclass(frozen=True)
class _State:
    trees: list[Tree]
    split: Split
    crowding: float
    """How full things are, the fullest counting most: of two schemes with one rate the better has less."""


class _Search:
    """Ways that change one step at a time, and what they load."""

    def __init__(self, problem: Problem, until: float, fractions: np.ndarray | None) -> None:
        self.problem, self.until, self.fractions = problem, until, fractions
        self.best: _State | None = None
        self.seen: set[tuple[bytes, ...]] = set()
        self.rows: np.ndarray = np.zeros(0)

    def solved(self) -> Solved:
        assert self.best is not None
        trees, is_over = self.best.trees, time.monotonic() > self.until
        found = self.best.split if self.fractions is not None else worth_writing(self.problem, trees, self.best.split)
        return Solved(found.rate, found.rates, trees, is_over)

    def kick(self, rng: np.random.Generator) -> bool:
        """Draws some ways of the best scheme anew, out of a place where no single change helps; whether that led to a better
        one."""
        assert self.best is not None
        problem = self.problem
        if rng.random() < _REFILLED:
            return self._refill(rng)
        trees = [tree.copy() for tree in self.best.trees]
        ways = [Ways(tree.counts.copy(), tree.above.copy()) for tree in trees]
        touched = set()
        for _ in range(rng.integers(2, 5)):
            s = int(rng.integers(len(ways)))
            c = int(rng.integers(len(ways[s].counts)))
            choices = [*problem.near[s][c], problem.straight]
            ways[s].counts[c] = 0
            ways[s].counts[c, choices] = rng.multinomial(problem.count(s)[c], rng.dirichlet(np.full(len(choices), 0.5)))
            touched.add(s)
            if problem.levels > 1 and problem.straight and rng.random() < 0.5:
                v = int(rng.integers(problem.straight))
                ways[s].above[v] = rng.choice([*problem.parents[s][v], problem.straight])
                nested = ways[s].above[ways[s].above < problem.straight]
                ways[s].above[nested] = problem.straight
        try:
            ways = within_limits(problem, ways)
        except ConfigError:
            return False
        anew = routed(problem, ways, self.best.split.rates)
        for s in touched:
            trees[s] = anew[s]
        return self.repair(trees)

    def _refill(self, rng: np.random.Generator) -> bool:
        """Places some classes anew, one by one, at somewhat higher rates than now."""
        assert self.best is not None
        problem = self.problem
        pairs = [(s, c) for s in range(len(problem.servers)) for c in range(len(problem.count(s)))]
        if rng.random() < 0.5:
            # Those of one part, or of one class in all.
            s, c = pairs[int(rng.integers(len(pairs)))]
            by_part = rng.random() < 0.5
            pairs = [each for each in pairs if (each[0] == s if by_part else each[1] == c)]
        many = int(rng.integers(1, max(2, len(pairs) // 2 + 1)))
        chosen = [pairs[i] for i in rng.permutation(len(pairs))[:many]]
        rates = np.maximum(self.best.split.rates, self.best.split.rates.mean() / 4) * rng.uniform(0.95, 1.2)
        trees = filled(problem, rates, rng, self.best.trees, chosen)
        return trees is not None and self.repair(trees)

    def note(self, trees: list[Tree]) -> None:
        """Takes a start as the best so far, if it is."""
        state = self._state(trees)
        if self.best is None or self._is_better(state, self.best):
            self.best = state

    def repair(self, trees: list[Tree]) -> bool:
        """Changes ways while that helps, but to none that have been seen; whether that led to the best scheme so far."""
        key = tuple(tree.key() for tree in trees)
        if key in self.seen:
            return False
        self.seen.add(key)
        keys = list(key)
        state = self._state(trees)
        while time.monotonic() < self.until:
            for move in self._moves(state):
                s = move.part
                changed = state.trees[s].copy()
                move.do(changed)
                after_key = (*keys[:s], changed.key(), *keys[s + 1 :])
                if after_key in self.seen or not changed.fits():
                    continue
                self.seen.add(after_key)
                after = self._state([*state.trees[:s], changed, *state.trees[s + 1 :]])
                if self._is_better(after, state):
                    state, keys = after, list(after_key)
                    break
                if time.monotonic() > self.until:
                    break
            else:
                break
        if self.best is None or self._is_better(state, self.best):
            is_faster = self.best is None or state.split.rate > self.best.split.rate * (1 + _NOISE)
            self.best = state
            return is_faster
        return False

    def _state(self, trees: list[Tree]) -> _State:
        found = best_rates(self.problem, trees, self.fractions)
        loads = np.array([tree.loads for tree in trees])
        share = (found.rates @ loads) / np.maximum(self.problem.room, 1e-12 * self.problem.scale)
        return _State(trees, found, float((np.minimum(share, 2.0) ** _SHARP).sum()))

    def _is_better(self, one: _State, other: _State) -> bool:
        if one.split.rate > other.split.rate * (1 + _NOISE):
            return True
        if one.split.rate < other.split.rate * (1 - _NOISE / 10):
            return False
        if one.split.total > other.split.total * (1 + 1e-5):
            return True
        return one.split.total >= other.split.total * (1 - 1e-6) and one.crowding < other.crowding * (1 - 1e-3)

    def _moves(self, state: _State) -> list[Move]:
        """The most promising changes of one part's ways, by what the prices say that they save; the best first."""
        problem, rates = self.problem, state.split.rates
        room = np.maximum(problem.room, 1e-12 * problem.scale)
        share = np.minimum((rates @ np.array([tree.loads for tree in state.trees])) / room, 2.0)
        prices = state.split.prices
        soft = share ** (_SHARP - 1) / room
        worth, of_soft = float(prices @ room), float(soft @ room)
        if of_soft > 0:
            prices = prices + soft * (_SOFT * (worth or 1.0) / of_soft)
        found: list[Move] = []
        for s, tree in enumerate(state.trees):
            weight = max(rates[s], rates.sum() / (4 * len(rates)), 1e-9 * problem.scale)
            found += moves(problem, s, tree, prices, weight)
        found.sort(key=lambda move: -move.saved)
        return found[:_TRIED]


# Differences below this share are the solver's.
_NOISE = 1e-7
# So many kicks in a row that lead to nothing better end the search.
_KICKS = 100
# The share of kicks that place some classes anew one by one; the others draw ways at random.
_REFILLED = 0.6
# How many changes are tried before the ways count as repaired.
_TRIED = 40
# What is nearly full has a price, too, a share of what the full things' prices are worth: so flows leave it before it is.
_SOFT, _SHARP = 0.05, 8
# A smaller part of a model is not worth a server's memory and packets.
LEAST_FRACTION = 1e-4
