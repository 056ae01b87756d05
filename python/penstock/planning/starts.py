"""Where a search begins: ways for all workers, within what the nodes take, and routes for them."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from penstock.errors import Config as ConfigError
from penstock.planning.problem import Problem
from penstock.planning.relax import Relaxed
from penstock.planning.tree import Tree

__all__ = ["Ways", "filled", "nearest", "one_way", "rounded", "routed", "starts", "within_limits"]


@dataclass
class Ways:
    """The ways of one part, without routes."""

    counts: np.ndarray
    """By class and way: workers."""
    above: np.ndarray
    """By aggregator: where it pushes to."""


def starts(problem: Problem, relaxed: Relaxed, rng: np.random.Generator, roundings: int) -> Iterator[list[Tree]]:
    """Some simple ways, random roundings, and what fills up at several rates."""
    makers: list[Callable[[], list[Ways]]] = [lambda: nearest(problem), lambda: one_way(problem, None)]
    makers += [lambda: rounded(problem, relaxed, rng)] * (roundings if relaxed.is_solved else 0)
    if problem.straight <= _FEW:
        makers += [functools.partial(one_way, problem, v) for v in range(problem.straight)]
    for make in makers[:1]:
        yield from _limited(problem, make(), relaxed)
    equal = np.array([relaxed.rates[problem.job_of == job].mean() for job in problem.job_of])
    for share in _SHARES:
        for rates in (relaxed.rates, equal):
            made = filled(problem, share * rates, rng)
            if made is not None:
                yield made
    for make in makers[1:]:
        yield from _limited(problem, make(), relaxed)


def _limited(problem: Problem, ways: list[Ways], relaxed: Relaxed) -> Iterator[list[Tree]]:
    with contextlib.suppress(ConfigError):
        yield routed(problem, within_limits(problem, ways), relaxed.rates)


def one_way(problem: Problem, way: int | None) -> list[Ways]:
    """All workers go straight to the servers, or all by one aggregator."""
    found = []
    for s in range(len(problem.servers)):
        counts = np.zeros((len(problem.count(s)), problem.straight + 1), dtype=int)
        counts[:, problem.straight if way is None else way] = problem.count(s)
        found.append(Ways(counts, np.full(problem.straight, problem.straight)))
    return found


def nearest(problem: Problem) -> list[Ways]:
    """Each worker goes to the aggregator that fewest links lead to, of several to the one with the most room for it."""
    found = one_way(problem, None)
    routes, cluster = problem.routes, problem.cluster
    for s, ways in enumerate(found):
        for c, place in enumerate(problem.places[problem.job_of[s]]):
            near = problem.near[s][c]
            if near:
                at = [cluster.aggregators[v].at for v in near]
                v = near[min(range(len(near)), key=lambda i: routes.hops(place, at[i]) or 0)]
                ways.counts[c, v], ways.counts[c, problem.straight] = ways.counts[c, problem.straight], 0
    return found


def rounded(problem: Problem, relaxed: Relaxed, rng: np.random.Generator) -> list[Ways]:
    """One random rounding (the paper's appendix B.3): each worker goes each way with the share of its rate that the relaxed
    solution sends there; an aggregator likewise."""
    found = []
    straight = problem.straight
    for s, sent in enumerate(relaxed.sent):
        counts = np.zeros(sent.shape, dtype=int)
        job = [t for t in range(len(problem.servers)) if problem.job_of[t] == problem.job_of[s]]
        for c in range(len(sent)):
            total = sent[c].sum()
            # A server without a part of the model: its workers' ways follow the other servers'.
            shares = sent[c] if total > 0 else np.sum([relaxed.sent[t][c] for t in job], axis=0)
            if shares.sum() <= 0:
                shares = np.zeros(straight + 1)
                shares[[*problem.near[s][c], straight]] = 1
            counts[c] = rng.multinomial(problem.count(s)[c], shares / shares.sum())
        above = np.full(straight, straight)
        for v in range(straight):
            nested = (
                {u: rate for (t, w, u), rate in relaxed.nested.items() if (t, w) == (s, v)} if relaxed.nested else {}
            )
            rates = np.array([relaxed.forwarded[s, v], *nested.values()])
            if rates.sum() > 0:
                above[v] = [straight, *nested][int(rng.choice(len(rates), p=rates / rates.sum()))]
        found.append(Ways(counts, _two_levels(above, counts, straight)))
    return found


def filled(
    problem: Problem,
    rates: np.ndarray,
    rng: np.random.Generator,
    trees: list[Tree] | None = None,
    anew: list[tuple[int, int]] | None = None,
) -> list[Tree] | None:
    """Trees made class by class, in a random order, at given rates of the parts. Each worker takes the way that is cheapest
    where a thing's price grows exponentially with how full it is: the online rule of Aspnes and others (JACM '97).

    With ``trees`` only the classes ``anew``, (part, class), are placed, and the others stay. None: some worker finds no place.
    """
    filling = _Filling(problem, np.maximum(rates, 1e-3 * rates.max(initial=0.0) or 1e-9 * problem.scale), trees)
    order = (
        [(s, c) for s in range(len(problem.servers)) for c in range(len(problem.count(s)))] if anew is None else anew
    )
    for s, c in order if anew is not None else ():
        filling.take_out(s, c)
    for at in rng.permutation(len(order)):
        if not filling.place(*order[at]):
            return None
    return filling.trees


class _Filling:
    """What is full so far, and the prices that follow."""

    def __init__(self, problem: Problem, rates: np.ndarray, trees: list[Tree] | None) -> None:
        self.problem, self.rates = problem, rates
        self.trees = (
            [Tree(problem, s) for s in range(len(problem.servers))]
            if trees is None
            else [each.copy() for each in trees]
        )
        self.room = np.maximum(problem.room, 1e-9 * problem.scale)
        self.full = rates @ np.array([each.loads for each in self.trees])
        self.prices = np.zeros(len(self.room) + 1)
        self.left = [int(problem.count(s).sum() - each.counts.sum()) for s, each in enumerate(self.trees)]
        self._price(np.arange(len(self.room)), float(rates.max(initial=0.0)))

    def take_out(self, s: int, c: int) -> None:
        tree = self.trees[s]
        before = tree.loads.copy()
        for class_of, v, route, many in list(tree.ways()):
            if class_of == c:
                tree.put(c, v, route, -many)
                self.left[s] += many
        self._loaded(s, before)

    def place(self, s: int, c: int) -> bool:
        """Whether all workers of the class found a place."""
        problem, tree, straight = self.problem, self.trees[s], self.problem.straight
        most = np.append(problem.most_children, problem.most_children_of_server)
        left = int(problem.count(s)[c] - tree.counts[c].sum())
        step = -(-left // _STEPS) if left else 1
        while left > 0:
            many = min(step, left)
            ways, costs = problem.row_prices(s, c, self.prices)
            closed = ways[:-1][tree.below[ways[:-1]] == 0]
            opening = np.zeros(straight + 1)
            room_of = most - tree.below
            if len(closed):
                if room_of[-1] < 1 and problem.levels < 2:
                    opening[closed] = np.inf
                else:
                    # Others will share it: as many as it has room for.
                    takers = np.minimum(self._takers(s, closed), self.left[s]).clip(many)
                    opening[closed] = problem.server_prices(s, self.prices[:-1])[closed] * many / takers
            costs = np.where(room_of[ways] > 0, many * costs + opening[ways], np.inf)
            at = int(np.argmin(costs))
            if not np.isfinite(costs[at]):
                return False
            v = int(ways[at])
            many = min(many, int(room_of[v]))
            before = tree.loads.copy()
            if v < straight and not tree.below[v] and not self._open(s, v):
                return False
            tree.put(c, v, self._cheapest(problem.legs_of(s, c, v)), many)
            self._loaded(s, before)
            left -= many
            self.left[s] -= many
        return True

    def _takers(self, s: int, ways: np.ndarray) -> np.ndarray:
        """How many workers an aggregator has room for, at the part's rate."""
        intakes = [self.problem.intake[v] for v in ways]
        rooms = np.array([math.inf if number is None else self.room[number] for number in intakes])
        return np.minimum(np.floor(rooms / self.rates[s] + 1e-9).clip(1), self.problem.most_children[ways])

    def _open(self, s: int, v: int) -> bool:
        """Chooses where an aggregator pushes to; whether there is a place."""
        problem, tree, straight = self.problem, self.trees[s], self.problem.straight
        options = [straight] if tree.below[straight] < problem.most_children_of_server else []
        options += [
            u
            for u in problem.parents[s][v]
            if 0 < tree.below[u] < problem.most_children[u] and tree.above[u] == straight
        ]
        if not options:
            return False

        def price(u: int) -> float:
            number = problem.intake_at(s, u)
            legs = problem.legs_above(s, v, u)
            return sum(self.prices[e] for e in legs[self._cheapest(legs)]) + (
                0.0 if number is None else float(self.prices[number])
            )

        to = min(options, key=price) if len(options) > 1 else options[0]
        tree.rest(v, to, self._cheapest(problem.legs_above(s, v, to)))
        return True

    def _cheapest(self, legs: tuple[tuple[int, ...], ...]) -> int:
        if len(legs) == 1:
            return 0
        return min(range(len(legs)), key=lambda i: sum(self.prices[e] for e in legs[i]))

    def _loaded(self, s: int, before: np.ndarray) -> None:
        changed = np.flatnonzero(self.trees[s].loads != before)
        self.full[changed] += self.rates[s] * (self.trees[s].loads - before)[changed]
        self._price(changed, float(self.rates[s]))

    def _price(self, which: np.ndarray, more: float) -> None:
        share = (self.full[which] + more) / self.room[which]
        # What would be over-full costs much more.
        self.prices[which] = (
            np.exp(np.minimum(_STEEP * share, 60.0) + np.where(share > 1 + 1e-9, 8.0, 0.0)) / self.room[which]
        )


def _two_levels(above: np.ndarray, counts: np.ndarray, straight: int) -> np.ndarray:
    """Whatever has aggregators below pushes to the server."""
    used = counts.sum(axis=0)[:-1] > 0
    for v in np.flatnonzero(used):
        if above[v] < straight:
            above[above[v]] = straight
    # One that is not used pushes nowhere; a hub that was nested itself, and came later, is put right.
    above[~used] = straight
    for v in np.flatnonzero(used):
        if above[v] < straight and above[above[v]] != straight:
            above[v] = straight
    return above


def within_limits(problem: Problem, ways: list[Ways]) -> list[Ways]:
    """These ways, with workers and aggregators moved from nodes that have more children than they can have.

    Raises:
        penstock.errors.Config: no node has a place for a worker.
    """
    found = []
    for s, each in enumerate(ways):
        one = Ways(each.counts.copy(), each.above.copy())
        for v in np.flatnonzero(below(problem, one)[:-1] > problem.most_children):
            over = int(below(problem, one)[v] - problem.most_children[v])
            _spread(problem, s, one, int(v), over)
        for _ in range(4 * problem.straight + 4):
            over = int(below(problem, one)[-1] - problem.most_children_of_server)
            if over <= 0 or not _relieved(problem, s, one, over):
                break
        if not fits(problem, one):
            raise problem.no_place(s)
        found.append(one)
    return found


def below(problem: Problem, ways: Ways) -> np.ndarray:
    """The number of children of each aggregator, and of the server."""
    straight = problem.straight
    found = ways.counts.sum(axis=0)
    used = found[:-1] > 0
    np.add.at(used, ways.above[used & (ways.above < straight)], True)
    for v in np.flatnonzero(used):
        found[ways.above[v]] += 1
    return np.asarray(found)


def fits(problem: Problem, ways: Ways) -> bool:
    counted = below(problem, ways)
    return bool((counted[:-1] <= problem.most_children).all() and counted[-1] <= problem.most_children_of_server)


def _relieved(problem: Problem, s: int, ways: Ways, over: int) -> bool:
    """Takes children from the server: workers to aggregators that are used, or that take several; then aggregators below
    others, or the least one's workers to the others. Whether that did something."""
    straight = problem.straight
    counted = below(problem, ways)
    before = (int(counted[-1]), int(np.count_nonzero(counted[:-1])))
    if ways.counts[:, straight].any():
        _spread(problem, s, ways, straight, over)
    elif problem.levels > 1 and _nested(problem, s, ways):
        return True
    else:
        used = np.flatnonzero(counted[:-1])
        own = np.array([ways.counts[:, v].sum() if not (ways.above[used] == v).any() else 1 << 30 for v in used])
        least = int(used[np.argmin(own)])
        _spread(problem, s, ways, least, int(ways.counts[:, least].sum()))
    counted = below(problem, ways)
    return (int(counted[-1]), int(np.count_nonzero(counted[:-1]))) < before


def _nested(problem: Problem, s: int, ways: Ways) -> bool:
    """Puts the aggregator with the fewest children below the one that has the most room; which ones differs from part to part,
    so that none has aggregators below in all."""
    straight = problem.straight
    counted = below(problem, ways)
    used = np.flatnonzero(counted[:-1])
    hubs = [v for v in used if ways.above[v] == straight]
    leaves = [v for v in hubs if not (ways.above[used] == v).any()]
    for v in sorted(leaves, key=lambda v: (counted[v], (v + s) % straight)):
        room = [u for u in problem.parents[s][v] if u in hubs and u != v and counted[u] < problem.most_children[u]]
        # What has aggregators below already comes first: then few have, and many are left to be put below them.
        shares = len(problem.servers)
        room.sort(key=lambda u: ((u + s) % shares != 0, counted[u]))
        if room:
            ways.above[v] = room[0]
            return True
    return False


def _spread(problem: Problem, s: int, ways: Ways, start: int, many: int) -> None:
    """Move so many workers from a way to the aggregators with the most room, or straight to the server if there is none. Those
    that went straight go to aggregators that are used, if there is room."""
    counts, straight = ways.counts, problem.straight
    while many > 0:
        counted = below(problem, ways)
        room = np.append(problem.most_children - counted[:-1], 0.0 if start == straight else np.inf).clip(0)
        room[start] = 0.0
        candidates = np.flatnonzero(room)
        c = int(np.flatnonzero(counts[:, start])[0]) if counts[:, start].any() else -1
        if c < 0 or not len(candidates):
            return
        near = np.isin(candidates, [*problem.near[s][c], straight])
        opens = (counted[candidates] == 0) & (start == straight)
        order = np.lexsort((-room[candidates], opens, candidates == straight, ~near))
        way = int(candidates[order[0]])
        step = int(min(many, counts[c, start], room[way]))
        counts[c, start] -= step
        counts[c, way] += step
        many -= step


def routed(
    problem: Problem, ways: list[Ways], rates: np.ndarray, drawn: tuple[Relaxed, np.random.Generator] | None = None
) -> list[Tree]:
    """Trees of these ways. Each flow takes the route that is emptiest when its turn comes, or with ``drawn`` one at random, as
    the relaxed solution has them."""
    room = np.maximum(problem.room, 1e-9 * problem.scale)
    # What the flows so far load, with a place for no resource at all.
    full = np.zeros(len(room))
    weights = np.maximum(rates, rates.sum() / (8 * len(rates)) if rates.sum() > 0 else 1.0)

    def best(s: int, legs: tuple[tuple[int, ...], ...], pair: tuple[str, str], many: int) -> int:
        if len(legs) == 1:
            chosen = 0
        elif drawn is not None:
            shares = drawn[0].shares.get(pair, np.ones(len(legs)))
            shares = shares if shares.sum() > 0 else np.ones(len(legs))
            chosen = int(drawn[1].choice(len(legs), p=shares / shares.sum()))
        else:
            add = many * weights[s]
            chosen = min(
                range(len(legs)),
                key=lambda i: (max(((full[e] + add) / room[e] for e in legs[i]), default=0.0), len(legs[i])),
            )
        for e in legs[chosen]:
            full[e] += many * weights[s]
        return chosen

    trees = []
    for s, each in enumerate(ways):
        tree = Tree(problem, s)
        for v in np.flatnonzero(below(problem, each)[:-1]):
            to = int(each.above[v])
            pair = (problem.node(s, int(v)), problem.node(s, to))
            tree.above[v], tree.route[v] = to, best(s, problem.legs_above(s, int(v), to), pair, 1)
        for c, v in zip(*np.nonzero(each.counts), strict=True):
            legs = problem.legs_of(s, int(c), int(v))
            pair = (problem.places[problem.job_of[s]][c], problem.node(s, int(v)))
            left = int(each.counts[c, v])
            step = left if len(legs) == 1 else 1 if drawn is not None else -(-left // _STEPS)
            while left > 0:
                many = min(step, left)
                tree.put(int(c), int(v), best(s, legs, pair, many), many)
                left -= many
        trees.append(tree)
    return trees


# The rates at which a start is filled, as shares of the relaxed solution's.
_SHARES = (1.0, 0.85, 0.7, 0.55, 0.4)
# With more aggregators, that all go to one of them is no promising start.
_FEW = 8
# How much dearer what is full is than what is empty: e to the power of so much. Measured: 4 and 8 fill a fat-tree of 54 hosts 2
# to 10 % worse.
_STEEP = 16.0
# A class's workers choose routes in so many groups at most.
_STEPS = 16
