"""Searchers: each proposes settings to try, and learns from what every trial cost, whoever proposed it.

They are plug-ins: `SEARCHERS` names those that a tuner uses, and any class with the two methods of `Searcher` and the same
arguments can be added. They must be deterministic: all ranks run them on the same costs and must propose the same.
Randomness comes from a seed through `Chance`; scores that decide are rounded, for the last bits of linear algebra may
differ between processors.

*Why our own population, Hyperband and grid?* Optuna, the one library that is kept well, brings a database layer, has no
population based training, chooses Hyperband's brackets by hashing a study's name, and its samplers with a Gaussian process
import torch. Each of the three is a page from its paper. scikit-optimize is no longer maintained.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np

from penstock.training.tune.space import Point, Setting, Space

__all__ = ["SEARCHERS", "Bayesian", "Coordinate", "Grid", "Hyperband", "Nearby", "Population", "Searcher"]

Item = TypeVar("Item")
FloatArray: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"


class Searcher(Protocol):
    """The interface of a searcher. It is made with a space, a seed, and the setting to start from."""

    def propose(self) -> Setting | None:
        """The next setting to try, or None where it has none for now.

        Proposing one that was tried before asks for another measurement of it. Blocks for milliseconds at most.
        """

    def observe(self, setting: Setting, cost: float) -> None:
        """Learn what a setting costs: the median, in seconds, of all its measured steps so far, by whomever proposed."""


class Grid:
    """Grid search, coarse before fine: the middle of each ordered axis, then its ends, then what halves the gaps.

    *Why not row by row?* A run affords a tenth of the grid; row by row that is one corner of it.
    """

    def __init__(self, space: Space, seed: int, start: Setting) -> None:
        levels = [_levels(len(axis.values)) if axis.ordered else [0] * len(axis.values) for axis in space.axes]
        fineness = {
            point: sum(level[index] for level, index in zip(levels, point, strict=True)) for point in space.points()
        }
        self._space = space
        self._rest = sorted(fineness, key=lambda point: (fineness[point], point), reverse=True)
        self._known: set[Point] = set()

    def propose(self) -> Setting | None:
        while self._rest and self._rest[-1] in self._known:
            self._rest.pop()
        return self._space.setting(self._rest[-1]) if self._rest else None

    def observe(self, setting: Setting, cost: float) -> None:
        self._known.add(self._space.point(setting))


class Population:
    """Population based training (Jaderberg et al. 2017): the worst member copies one of the best, and changes it a little.

    Training goes on under every member's setting, which is what makes the method fit: no member is trained from scratch.
    *Exploit* is truncation selection and *explore* a perturbation (section 4 and appendix A of the paper); with one member
    measured at a time, the worst is replaced as soon as everybody has a cost. Trials of other searchers join as members
    where they beat the worst.
    """

    def __init__(self, space: Space, seed: int, start: Setting) -> None:
        self._space = space
        self._chance = Chance(seed)
        self._costs: dict[Point, float] = {}
        self._members: list[Point] = []
        self._asked: Point | None = None
        self._newcomers = [space.point(start)]
        points = list(space.points())
        while len(self._newcomers) < min(POPULATION, len(points)):
            point = self._chance.pick(points)
            if point not in self._newcomers:
                self._newcomers.append(point)

    def propose(self) -> Setting | None:
        if self._asked is not None and self._asked not in self._costs:
            return self._space.setting(self._asked)
        while self._newcomers:
            self._asked = self._newcomers.pop(0)
            if self._asked not in self._costs:
                return self._space.setting(self._asked)
        ranked = sorted(self._members, key=lambda point: (self._costs[point], point))
        elite = ranked[: max(1, len(ranked) // 4)]
        for _ in range(TRIES):
            child = self._perturb(self._chance.pick(elite))
            if child not in self._costs:
                self._asked = child
                return self._space.setting(child)
        return None

    def observe(self, setting: Setting, cost: float) -> None:
        point = self._space.point(setting)
        self._costs[point] = cost
        if point not in self._members:
            self._members.append(point)
        if len(self._members) > POPULATION:
            self._members.remove(max(self._members, key=lambda member: (self._costs[member], member)))

    def _perturb(self, point: Point) -> Point:
        # The paper multiplies by 0.8 or 1.2, or draws anew with some chance. On axes of doubling values that is one place
        # up or down, each axis with a chance of a half.
        for axis, values in enumerate(self._space.axes):
            if len(values.values) == 1 or self._chance.share() < 0.5:
                continue
            if values.ordered:
                point = self._space.moved(point, axis, self._chance.pick((-1, 1))) or point
            elif self._chance.share() < RESAMPLE:
                point = (*point[:axis], self._chance.below(len(values.values)), *point[axis + 1 :])
        return point


class Bayesian:
    """Bayesian optimisation: a Gaussian process over the logarithm of the cost, and the largest expected improvement.

    Ordered axes become one coordinate from 0 to 1, categories one each, a distance of 1 apart. The kernel is Matern 5/2 (Snoek,
    Larochelle, Adams 2012, section 3.1). Its length and the noise are the likeliest of a few given ones: a continuous fit
    would follow differences of the last bit between processors. Expected improvement is that over the lowest posterior
    mean, not the lowest measurement, which noise makes too low.

    Cost: 1 ms a proposal at 50 trials and 500 settings.
    """

    def __init__(self, space: Space, seed: int, start: Setting) -> None:
        self._space = space
        self._chance = Chance(seed)
        self._points = list(space.points())
        self._places = {point: place for place, point in enumerate(self._points)}
        self._x_PK = _coordinates(space, self._points)
        # N points that have a cost, in the order in which they came.
        self._costs: dict[Point, float] = {}
        # Of each of them, for each of the L lengths, the kernel with all P points: an N x N kernel is a choice of columns.
        self._kernel_NLP: list[FloatArray] = []

    def propose(self) -> Setting | None:
        rest = [point for point in self._points if point not in self._costs]
        if not rest:
            return None
        if len(self._costs) < FIRST_RANDOM:
            return self._space.setting(self._chance.pick(rest))
        if len(rest) > MOST_CANDIDATES:
            rest = [self._chance.pick(rest) for _ in range(MOST_CANDIDATES)]
        mean_P, deviation_P = self._predict([*rest, *self._costs])
        best = mean_P[len(rest) :].min()
        score_C = expected_improvement(best - mean_P[: len(rest)], deviation_P[: len(rest)])
        # Six digits of the logarithm of the cost are far below what can be measured, and far above rounding.
        return self._space.setting(max(zip(score_C.round(6).tolist(), rest, strict=True))[1])

    def observe(self, setting: Setting, cost: float) -> None:
        point = self._space.point(setting)
        if point not in self._costs:
            distance_P = np.linalg.norm(self._x_PK - self._x_PK[self._places[point]], axis=1)
            self._kernel_NLP.append(matern(distance_P / np.array(LENGTHS)[:, None]))
        self._costs[point] = cost

    def favourites(self, count: int) -> list[Setting]:
        """The settings of the lowest posterior means, measured or not: also settings that noise once made look bad."""
        if len(self._costs) < FIRST_RANDOM or len(self._points) > MOST_CANDIDATES:
            return []
        mean_P, _ = self._predict(self._points)
        ranked = sorted(zip(mean_P.round(6).tolist(), self._points, strict=True))
        return [self._space.setting(point) for _, point in ranked[:count]]

    def _predict(self, points: Sequence[Point]) -> tuple[FloatArray, FloatArray]:
        """Posterior mean and standard deviation at some points."""
        measured_N = [self._places[point] for point in self._costs]
        kernel_LNN = np.stack([kernel_LP[:, measured_N] for kernel_LP in self._kernel_NLP], axis=1)
        process = GaussianProcess(kernel_LNN, np.log(list(self._costs.values())))
        kernel_NP = np.stack([kernel_LP[process.length] for kernel_LP in self._kernel_NLP])
        return process.predict(kernel_NP[:, [self._places[point] for point in points]])


class GaussianProcess:
    """The likeliest of Gaussian processes through N values, of L kernels with each of the variances of noise in `NOISES`.

    Rasmussen and Williams 2006, algorithm 2.1, on values of mean 0 and variance 1. All are computed at once.

    *Why not scikit-learn's?* It takes 60 to 150 ms for these 16 fits, in the middle of a training step; its results are
    the oracle of the test.

    Args:
        kernel_LNN: L kernels between the points of the values; 1 on the diagonal.
        y_N: the values.
    """

    def __init__(self, kernel_LNN: FloatArray, y_N: FloatArray) -> None:
        self._mean, self._scale = float(y_N.mean()), float(y_N.std()) or 1.0
        z_N = (y_N - self._mean) / self._scale
        noise_MNN = np.array(NOISES)[:, None, None] * np.eye(len(z_N))
        cholesky_LMNN = np.linalg.cholesky(kernel_LNN[:, None] + noise_MNN)
        white_LMN = np.linalg.solve(cholesky_LMNN, z_N[:, None])[..., 0]
        log_determinant_LM = 2 * np.log(np.diagonal(cholesky_LMNN, axis1=-2, axis2=-1)).sum(-1)
        likelihoods = (-0.5 * ((white_LMN**2).sum(-1) + log_determinant_LM)).ravel().tolist()
        # max takes the first of equals, and rounding makes equals of what differs in the last bits only.
        likeliest = max(range(len(likelihoods)), key=lambda at: round(likelihoods[at], 4))
        self.length, self.noise = divmod(likeliest, len(NOISES))
        self._cholesky_NN = cholesky_LMNN[self.length, self.noise]
        self._white_N = white_LMN[self.length, self.noise]

    def predict(self, kernel_NC: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Posterior mean and standard deviation (without noise) at C places, from the likeliest kernel (`length`) between the
        points and them."""
        half_NC = np.linalg.solve(self._cholesky_NN, kernel_NC)
        variance_C = np.maximum(1 - (half_NC**2).sum(0), 0)
        return self._mean + self._scale * (self._white_N @ half_NC), self._scale * np.sqrt(variance_C)


def matern(distance: FloatArray) -> FloatArray:
    """The Matern kernel with nu = 5/2, of distances in units of its length."""
    scaled = math.sqrt(5) * distance
    return (1 + scaled + scaled**2 / 3) * np.exp(-scaled)


class Hyperband:
    """Hyperband (Li et al. 2018): many random settings measured a little, the better ones again and longer.

    The resource is visits: a setting that reaches a rung is proposed until it was measured in as many trials as the rung
    asks for. Brackets run from the one with most settings and one visit each to that with few settings and all visits,
    then anew. Visits of other searchers count.
    """

    def __init__(self, space: Space, seed: int, start: Setting) -> None:
        self._space = space
        self._chance = Chance(seed)
        self._points = list(space.points())
        self._costs: dict[Point, float] = {}
        self._visits: dict[Point, int] = {}
        self._rungs = self._brackets()
        self._open: list[Point] = []
        self._wanted = 0

    def propose(self) -> Setting | None:
        for _ in range(TRIES):
            for point in self._open:
                if self._visits.get(point, 0) < self._wanted:
                    return self._space.setting(point)
            self._open, self._wanted = next(self._rungs)
        return None

    def observe(self, setting: Setting, cost: float) -> None:
        point = self._space.point(setting)
        self._costs[point] = cost
        self._visits[point] = self._visits.get(point, 0) + 1

    def _brackets(self) -> Generator[tuple[list[Point], int], None, None]:
        """Yields (settings of a rung, visits that each needs); the costs of a rung are known when the next is asked for."""
        top = int(math.log(MOST_VISITS, REDUCTION))
        while True:
            for bracket in range(top, -1, -1):
                count = math.ceil((top + 1) / (bracket + 1) * REDUCTION**bracket)
                fresh = [point for point in self._points if point not in self._costs] or self._points
                rung = list(dict.fromkeys(self._chance.pick(fresh) for _ in range(count)))
                for round_ in range(bracket + 1):
                    yield rung, MOST_VISITS // REDUCTION ** (bracket - round_)
                    rung = sorted(rung, key=lambda point: (self._costs[point], point))
                    rung = rung[: max(1, len(rung) // REDUCTION)]


class Coordinate:
    """Our fifth: enumerate what has no order, walk along what has.

    Step time has one valley along streams and along bucket size (too few or too small waits, too many or too large overlaps
    less), and nothing is known between algorithms. So, as AutoCCL does (NSDI 2025; known to us from summaries), algorithms
    and compressions are enumerated at the best place so far, and each ordered axis is descended, first by two places
    and then by one, until no step helps; then the enumeration is repeated there. Once that ends, every other
    algorithm that came within `CLOSE` of the best is descended as well. Then there is nothing left to propose.
    """

    strides: tuple[int, ...] = (2, 1)

    def __init__(self, space: Space, seed: int, start: Setting) -> None:
        self._space = space
        self._costs: dict[Point, float] = {}
        self._walk = self._walk_from(space.point(start))
        self._asked: Point | None = next(self._walk)

    def propose(self) -> Setting | None:
        while self._asked is not None and self._asked in self._costs:
            self._asked = next(self._walk, None)
        return None if self._asked is None else self._space.setting(self._asked)

    def observe(self, setting: Setting, cost: float) -> None:
        self._costs[self._space.point(setting)] = cost

    def _walk_from(self, best: Point) -> Generator[Point, None, None]:
        """Yields points whose cost it needs, and goes on when `_costs` has it."""
        yield best
        before = None
        while best != before:
            before = best
            best = yield from self._enumerate(best)
            best = yield from self._descend(best)
            # Another searcher may have found a better place meanwhile.
            best = min(self._costs, key=lambda point: (self._costs[point], point))
        near = [other for other in self._categories(best) if self._costs[other] < CLOSE * self._costs[best]]
        for other in sorted(near, key=lambda point: (self._costs[point], point)):
            yield from self._descend(other)

    def _enumerate(self, best: Point) -> Generator[Point, None, Point]:
        for axis, values in enumerate(self._space.axes):
            if not values.ordered:
                for other in self._categories(best, axis):
                    yield other
                    best = self._cheaper(best, other)
        return best

    def _descend(self, best: Point) -> Generator[Point, None, Point]:
        before = None
        while best != before:
            before = best
            for axis, values in enumerate(self._space.axes):
                if not values.ordered:
                    continue
                for stride in self.strides:
                    for direction in (-stride, stride):
                        while (other := self._space.moved(best, axis, direction)) is not None:
                            yield other
                            if self._cheaper(best, other) != other:
                                break
                            best = other
        return best

    def _categories(self, point: Point, only: int | None = None) -> list[Point]:
        """The points that differ from this one in one axis without order."""
        return [
            (*point[:axis], index, *point[axis + 1 :])
            for axis, values in enumerate(self._space.axes)
            if not values.ordered and only in (None, axis)
            for index in range(len(values.values))
            if index != point[axis]
        ]

    def _cheaper(self, one: Point, other: Point) -> Point:
        return other if self._costs[other] < self._costs[one] else one


class Nearby(Coordinate):
    """Coordinate descent where the start is known to be nearly right: steps of one place first, other categories last."""

    strides = (1,)

    def _walk_from(self, best: Point) -> Generator[Point, None, None]:
        yield best
        best = yield from self._descend(best)
        yield from super()._walk_from(best)


# In the order in which they get their first turn: what starts at the default before what draws lots.
SEARCHERS: dict[str, Callable[[Space, int, Setting], Searcher]] = {
    "coordinate": Coordinate,
    "bayesian": Bayesian,
    "grid": Grid,
    "population": Population,
    "hyperband": Hyperband,
}
"""The ensemble."""


class Chance:
    """Random choices from a seed, the same on every machine: only `random()`, whose sequence Python promises to keep."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def share(self) -> float:
        """From 0 to below 1."""
        return self._random.random()

    def below(self, count: int) -> int:
        return int(self._random.random() * count)

    def pick(self, items: Sequence[Item]) -> Item:
        return items[self.below(len(items))]


def expected_improvement(gain_C: FloatArray, deviation_C: FloatArray) -> FloatArray:
    """The mean of max(0, X) where X is normal with mean `gain` (Jones, Schonlau, Welch 1998, equation 15)."""
    z_C = gain_C / np.maximum(deviation_C, TINY)
    cdf_C = np.array([(1 + math.erf(z)) / 2 for z in (z_C / math.sqrt(2)).tolist()])
    return gain_C * cdf_C + deviation_C * np.exp(-(z_C**2) / 2) / math.sqrt(2 * math.pi)


def _levels(count: int) -> list[int]:
    """How fine a grid must be to hold each index: 0 for the middle, 1 for the ends, then one more for each halving."""
    levels = [-1] * count
    levels[(count - 1) // 2] = 0
    for end in (0, count - 1):
        if levels[end] < 0:
            levels[end] = 1
    level = 1
    while -1 in levels:
        level += 1
        held = [index for index in range(count) if levels[index] >= 0]
        for low, high in itertools.pairwise(held):
            if high - low > 1:
                levels[(low + high) // 2] = level
    return levels


def _coordinates(space: Space, points: Sequence[Point]) -> FloatArray:
    columns = [np.zeros((len(points), 1))]
    for axis, index_P in zip(space.axes, np.array(points).T, strict=True):
        count = len(axis.values)
        if count == 1:
            continue
        if axis.ordered:
            columns.append(index_P[:, None] / (count - 1))
        else:
            columns.append(math.sqrt(0.5) * (index_P[:, None] == np.arange(count)))
    return np.concatenate(columns, axis=1)


# Jaderberg et al. use 10 to 80 members; a run of 100 steps has some 25 trials for all searchers together. A guess.
POPULATION = 6

# The chance that a perturbation draws a category anew; appendix A of the same paper has 0.25.
RESAMPLE = 0.25

# A searcher that found nothing new in so many draws leaves its turn to another.
TRIES = 32

# A process through fewer points says nothing yet.
FIRST_RANDOM = 3

# Lengths in units of an axis, and noise as a variance in units of that of all costs. From "every value its own" to
# "nearly a plane"; from costs that are exact to costs of which a third is noise.
LENGTHS = (0.15, 0.3, 0.6, 1.2)
NOISES = (1e-3, 1e-2, 1e-1, 3e-1)

# A deviation of 0 must not be divided by.
TINY = 1e-12

# Bounds a proposal's time where a user widens the space; the standard space has 567 settings at most.
MOST_CANDIDATES = 2048

# Hyperband's R and eta. The paper's eta is 3 or 4 at R = 81; with R = 4, halving gives three brackets.
MOST_VISITS = 4
REDUCTION = 2

# An algorithm that is a quarter slower at another's best place may still win at its own.
CLOSE = 1.25
