"""Gradients that arrive late on purpose, for tests of steps that wait for them."""

from __future__ import annotations

import random
from typing import Any

from penstock.torch import GradientReducer

__all__ = ["Late"]


class Late:
    """A reducer of whose gradients some arrive only when somebody waits for them, or for another one."""

    def __init__(self, reducer: GradientReducer, rng: random.Random) -> None:
        assert reducer._deferral is not None
        self._reducer = reducer._reducer
        self._rng = rng
        self._late: set[int] = set()
        reducer._deferral._reducer = self  # type: ignore[assignment]

    def begin(self, count: int) -> None:
        """A step begins, in which some are late."""
        share = self._rng.choice([0.2, 0.6, 1.0])
        self._late = {index for index in range(count) if self._rng.random() < share}

    def late(self) -> list[int]:
        return sorted(self._late.union(self._reducer.late()))

    def arrival(self, index: int) -> Any:
        return _Arrival(self, index) if index in self._late else self._reducer.arrival(index)

    def wait(self, index: int) -> None:
        arrival = self._reducer.arrival(index)
        if arrival is not None:
            arrival.wait()
        self._late.discard(index)
        if self._late and self._rng.random() < 0.3:
            self._late.pop()


class _Arrival:
    def __init__(self, late: Late, index: int) -> None:
        self._late = late
        self._index = index

    def wait(self) -> None:
        self._late.wait(self._index)
