"""The changes of one part's ways that look most promising by what the shadow prices say that they save."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.planning.problem import Problem
from penstock.planning.tree import Tree

__all__ = ["Move", "moves"]


@dataclass(frozen=True)
class Move:
    """A change of a tree."""

    saved: float
    """What it saves of the price of all that is loaded; of several parts, weighed by their rates."""
    part: int
    do: Callable[[Tree], None]


def moves(problem: Problem, s: int, tree: Tree, prices: np.ndarray, weight: float) -> list[Move]:
    """Those that save something. ``prices`` are by resource."""
    priced = _Priced(problem, s, tree, prices)
    least = 1e-9 * float(prices @ problem.room) / weight
    found = [*priced.workers(), *priced.sums(), *priced.merged()]
    return [Move(float(saved) * weight, s, do) for saved, do in found if saved > least]


class _Priced:
    """A tree with what its flows cost, and what they would cost on other ways."""

    def __init__(self, problem: Problem, s: int, tree: Tree, prices: np.ndarray) -> None:
        self.problem, self.s, self.tree = problem, s, tree
        self.straight = straight = problem.straight
        self.prices = prices
        self.to_ways = problem.class_prices(s, prices)
        self.to_server = problem.server_prices(s, prices)
        self.used = [int(v) for v in tree.used()]
        # What it costs that an aggregator is used; of those that are not, what it would.
        self.forward = np.append(self.to_server, 0.0)
        for v in self.used:
            to = int(tree.above[v])
            self.forward[v] = self._along(problem.legs_above(s, v, to)[tree.route[v]], to)
        self.opening = np.append(np.where(tree.below[:-1] > 0, 0.0, self.to_server), 0.0)
        self.of_way = np.zeros(straight + 1)
        self.nested_at = {int(tree.above[v]) for v in self.used if tree.above[v] < straight}

    def workers(self) -> Iterator[tuple[float, Callable[[Tree], None]]]:
        """One worker of a class, half of those on a route or all go another way."""
        for c, v, route, many in self.tree.ways():
            now = self._along(self.problem.legs_of(self.s, c, v)[route], v)
            self.of_way[v] += many * now
            for step in {1, (many + 1) // 2, many}:
                closes = self.forward[v] if v < self.straight and step == self.tree.below[v] else 0.0
                saved = step * now + closes - (step * self.to_ways[c] + self.opening)
                saved[v] = step * (now - self.to_ways[c, v])
                for to in map(int, np.argsort(-saved)[:_TARGETS]):
                    yield float(saved[to]), self._go(c, v, route, to, step)

    def sums(self) -> Iterator[tuple[float, Callable[[Tree], None]]]:
        """An aggregator's sum takes another route, or goes by another aggregator."""
        hubs = {v for v in self.used if self.tree.above[v] == self.straight}
        for v in self.used:
            options = [(float(self.to_server[v]), self.straight)]
            for u in self.problem.parents[self.s][v] if v not in self.nested_at else ():
                if u in hubs:
                    legs = self.problem.legs_above(self.s, v, u)
                    options.append((self._along(legs[self._cheapest(legs)], u), u))
            for price, to in sorted(options)[:_TARGETS]:
                yield float(self.forward[v] - price), self._rest(v, to)

    def merged(self) -> Iterator[tuple[float, Callable[[Tree], None]]]:
        """An aggregator is given up, or another one takes over its workers. After `workers`, which counts what its way costs."""
        for v in self.used:
            classes = self.tree.counts[:, v]
            if np.count_nonzero(classes) > 1 or v in self.nested_at:
                own = classes > 0
                saved = self.of_way[v] + self.forward[v] - (classes[own] @ self.to_ways[own] + self.opening)
                saved[v] = -np.inf
                for to in map(int, np.argsort(-saved)[:_TARGETS]):
                    if np.isfinite(saved[to]):
                        yield float(saved[to]), self._merge(v, to)

    def _go(self, c: int, v: int, route: int, to: int, step: int) -> Callable[[Tree], None]:
        def do(tree: Tree) -> None:
            self._open(tree, to)
            tree.move(c, v, route, to, self._cheapest(self.problem.legs_of(self.s, c, to)), step)

        return do

    def _rest(self, v: int, to: int) -> Callable[[Tree], None]:
        def do(tree: Tree) -> None:
            tree.rest(v, to, self._cheapest(self.problem.legs_above(self.s, v, to)))

        return do

    def _merge(self, v: int, to: int) -> Callable[[Tree], None]:
        def do(tree: Tree) -> None:
            self._open(tree, to)
            best = [self._cheapest(self.problem.legs_of(self.s, c, to)) for c in range(len(tree.counts))]
            tree.replaced(v, to, np.array(best))

        return do

    def _open(self, tree: Tree, v: int) -> None:
        if v < self.straight and not tree.below[v]:
            tree.rest(v, self.straight, self._cheapest(self.problem.legs_above(self.s, v, self.straight)))

    def _along(self, leg: Sequence[int], v: int) -> float:
        intake = self.problem.intake_at(self.s, v)
        return float(sum(self.prices[e] for e in leg)) + (0.0 if intake is None else float(self.prices[intake]))

    def _cheapest(self, legs: Sequence[Sequence[int]]) -> int:
        return min(range(len(legs)), key=lambda i: sum(self.prices[e] for e in legs[i]))


# To how many other ways of each group of workers a change is tried.
_TARGETS = 4
