"""The ways of one part's gradients, as a search changes them step by step, and what they load."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from penstock.planning.problem import Problem

__all__ = ["Tree"]


class Tree:
    """Which way how many workers of each class go, on which route, and where the aggregators push to."""

    def __init__(self, problem: Problem, s: int) -> None:
        """Nobody goes any way yet."""
        self.problem, self.s = problem, s
        self.counts = np.zeros((len(problem.count(s)), problem.straight + 1), dtype=int)
        """By class and way: workers."""
        self.above = np.full(problem.straight, problem.straight)
        """By aggregator: where it pushes to, if it is used."""
        self.route = np.zeros(problem.straight, dtype=int)
        """By aggregator: the number of the route there."""
        self.routes: dict[tuple[int, int], np.ndarray] = {}
        """By class and way, where workers go it: how many on each route."""
        self.below = np.zeros(problem.straight + 1, dtype=int)
        """By way: children."""
        self.loads = np.zeros(len(problem.resources))
        """By resource, for a unit of rate."""

    def copy(self) -> Tree:
        made = Tree.__new__(Tree)
        made.problem, made.s = self.problem, self.s
        made.counts, made.above, made.route = self.counts.copy(), self.above.copy(), self.route.copy()
        made.routes = {key: each.copy() for key, each in self.routes.items()}
        made.below, made.loads = self.below.copy(), self.loads.copy()
        return made

    def key(self) -> bytes:
        """Equal for equal trees."""
        used = self.below[:-1] > 0
        routes = [each.tobytes() for _, each in sorted(self.routes.items()) if len(each) > 1]
        return b"".join([self.counts.tobytes(), (self.above * used).tobytes(), (self.route * used).tobytes(), *routes])

    def fits(self) -> bool:
        """Whether no node has more children than it can have, and no way more levels than it may."""
        problem = self.problem
        if (self.below[:-1] > problem.most_children).any() or self.below[-1] > problem.most_children_of_server:
            return False
        nested = np.flatnonzero((self.below[:-1] > 0) & (self.above < problem.straight))
        return bool((self.above[self.above[nested]] == problem.straight).all())

    def used(self) -> np.ndarray:
        """The aggregators that have children."""
        return np.flatnonzero(self.below[:-1])

    def put(self, c: int, v: int, route: int, many: int) -> None:
        """So many more workers of a class on a route; fewer, if ``many`` is negative."""
        if not many:
            return
        legs = self.problem.legs_of(self.s, c, v)
        on = self.routes.get((c, v))
        if on is None:
            on = self.routes[c, v] = np.zeros(len(legs), dtype=int)
        on[route] += many
        self.counts[c, v] += many
        if not self.counts[c, v]:
            del self.routes[c, v]
        self._load(legs[route], v, many)
        self._children(v, many)

    def move(self, c: int, v: int, route: int, to: int, to_route: int, many: int) -> None:
        """So many workers of a class go another way."""
        self.put(c, to, to_route, many)
        self.put(c, v, route, -many)

    def rest(self, v: int, to: int, route: int) -> None:
        """An aggregator pushes to another one, or to the server."""
        if self.below[v]:
            self._forward(v, -1)
        self.above[v], self.route[v] = to, route
        if self.below[v]:
            self._forward(v, 1)

    def replaced(self, v: int, to: int, best: np.ndarray) -> None:
        """All children of an aggregator go to another one, or straight to the server; ``best`` are the classes' routes there."""
        straight = self.problem.straight
        is_hub = to < straight and self.above[to] == straight
        for other in map(int, self.used()):
            if self.above[other] == v:
                self.rest(other, to if is_hub and other != to else straight, 0)
        for c in np.flatnonzero(self.counts[:, v]):
            for route, many in enumerate(self.routes[int(c), v].copy()):
                self.move(int(c), v, route, to, int(best[c]), int(many))

    def ways(self) -> Iterator[tuple[int, int, int, int]]:
        """Class, way, route and how many workers, of all that have some."""
        for (c, v), on in self.routes.items():
            for route in np.flatnonzero(on):
                yield c, v, int(route), int(on[route])

    def _children(self, v: int, many: int) -> None:
        before = self.below[v]
        self.below[v] += many
        if v < self.problem.straight and (before > 0) != (self.below[v] > 0):
            self._forward(v, 1 if self.below[v] else -1)

    def _forward(self, v: int, many: int) -> None:
        to = int(self.above[v])
        self._load(self.problem.legs_above(self.s, v, to)[self.route[v]], to, many)
        self._children(to, many)

    def _load(self, leg: tuple[int, ...], v: int, many: int) -> None:
        for resource in leg:
            self.loads[resource] += many
        intake = self.problem.intake_at(self.s, v)
        if intake is not None:
            self.loads[intake] += many
