"""The best rates for given ways: a linear program with a variable a part, solved by the simplex method on a dense tableau. The
search solves thousands of them; a call of scipy's solver costs 20 times as much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Split", "maximum", "split"]


@dataclass(frozen=True)
class Split:
    """The best rates for given ways."""

    rate: float
    """What a worker of the slowest job sends."""
    rates: np.ndarray
    """By part."""
    prices: np.ndarray
    """By resource: the shadow prices."""
    total: float
    """What a worker of each job sends, added up: of two splits with one `rate` the better has more."""


def split(
    loads: np.ndarray, room: np.ndarray, job_of: np.ndarray, most: Sequence[float], fractions: np.ndarray | None = None
) -> Split:
    """``loads[s]`` is what a unit of part s's rate loads, by resource; ``room`` what the resources have, ``most[j]`` what a
    worker of job j can send at all. With ``fractions``, by part, the split of each model stays as it is."""
    parts, jobs = len(loads), len(most)
    if fractions is not None:
        return _fixed(loads, room, job_of, most, fractions)
    used = np.flatnonzero(loads.any(axis=0))
    finite = [j for j in range(jobs) if np.isfinite(most[j])]
    several = jobs > 1
    rows = np.zeros((len(used) + len(finite) + (jobs if several else 0), parts + several))
    limits = np.zeros(len(rows))
    rows[: len(used), :parts], limits[: len(used)] = loads[:, used].T, room[used]
    for at, j in enumerate(finite, len(used)):
        rows[at, :parts], limits[at] = job_of == j, most[j]
    aim = np.ones(parts + several)
    if several:
        # The slowest job counts; the others' rates decide between equals.
        aim[:parts] = _OTHERS
        for j in range(jobs):
            at = len(used) + len(finite) + j
            rows[at, :parts], rows[at, parts] = np.where(job_of == j, -1.0, 0.0), 1.0
    x, duals = maximum(aim, rows, limits)
    prices = np.zeros(len(room))
    prices[used] = duals[: len(used)]
    by_job = np.bincount(job_of, weights=x[:parts], minlength=jobs)
    return Split(float(by_job.min()), x[:parts], prices, float(by_job.sum()))


def _fixed(
    loads: np.ndarray, room: np.ndarray, job_of: np.ndarray, most: Sequence[float], fractions: np.ndarray
) -> Split:
    """All jobs at one rate, as high as what is fullest lets them."""
    by_rate = fractions @ loads
    used = np.flatnonzero(by_rate > 0)
    rates = room[used] / by_rate[used]
    at = int(np.argmin(rates)) if len(used) else -1
    rate = float(min(*most, rates[at] if len(used) else np.inf)) if len(most) > 1 or len(used) else float(min(most))
    prices = np.zeros(len(room))
    if len(used) and rates[at] <= rate:
        prices[used[at]] = 1 / by_rate[used[at]]
    return Split(rate, fractions * rate, prices, rate * len(most))


def maximum(aim: np.ndarray, rows: np.ndarray, limits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The x >= 0 with ``rows @ x <= limits`` (``limits`` >= 0) whose ``aim @ x`` is highest, and the rows' shadow prices.

    Raises:
        OverflowError: there is no highest.
    """
    count, width = rows.shape
    scale = float(limits.max(initial=0.0)) or 1.0
    table = np.zeros((count + 1, width + 1))
    table[:count, :width], table[:count, width] = rows, limits / scale
    table[count, :width] = -aim
    # What stands in each column and row: x are 0 to width - 1, slacks the others.
    across, down = np.arange(width), np.arange(width, width + count)
    for step in range(_MOST_STEPS):
        costs = table[count, :width]
        better = np.flatnonzero(costs < -_NOISE)
        if not len(better):
            break
        # Bland's rule ends cycles, which take long.
        column = int(better[np.argmin(across[better])] if step > _LONG else better[np.argmin(costs[better])])
        upward = np.flatnonzero(table[:count, column] > _NOISE)
        if not len(upward):
            raise OverflowError("nothing limits a rate")
        ratios = table[upward, width] / table[upward, column]
        least = upward[ratios <= ratios.min() + 1e-15]
        row = int(least[np.argmin(down[least])] if step > _LONG else least[np.argmax(table[least, column])])
        _pivot(table, row, column)
        across[column], down[row] = down[row], across[column]
    else:
        raise RuntimeError("the simplex method did not end")
    found = np.zeros(width + count)
    found[down] = table[:count, width] * scale
    duals = np.zeros(width + count)
    duals[across] = table[count, :width]
    return found[:width].clip(0), duals[width:].clip(0)


def _pivot(table: np.ndarray, row: int, column: int) -> None:
    at = table[row, column]
    line = table[row] / at
    of = table[:, column].copy()
    table -= np.outer(of, line)
    table[row] = line
    table[:, column] = -of / at
    table[row, column] = 1 / at


_NOISE = 1e-11
_LONG, _MOST_STEPS = 200, 5000
# So much that it decides between equals and between nothing else that matters.
_OTHERS = 1e-4
