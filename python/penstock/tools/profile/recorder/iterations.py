"""Which step of an optimizer ends an iteration."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

__all__ = ["PATIENCE", "Iterations"]

PATIENCE = 16
"""Steps of another optimizer without one of the first, after which the other is the first."""
_MOST_OTHERS = 1024
"""The same of all others together."""


class Iterations:
    """An iteration ends with the step of the optimizer that stepped first in it: of several, such as a GAN's two or one a layer,
    each belongs to the iteration around it. All ranks call optimizers in the same order, so they count alike."""

    def __init__(self) -> None:
        self._first: Any = None
        self._others: dict[int, tuple[Callable[[], Any], int]] = {}
        """By identity: the others, and how often each has stepped since the first one did."""
        self._since = self._usual = 0
        """Steps of others since the last that ended an iteration, and at most between two of those."""
        self.steps = 0
        """Of all optimizers."""

    def stepped(self, optimizer: Any) -> bool:
        """Whether this step ends the iteration."""
        self.steps += 1
        is_first = self._first is not None and self._first() is optimizer
        if not is_first:
            # A script may go on with another optimizer. Whether the old one is gone by then says the garbage collector of
            # each rank for itself, so that does not count. Where each is new, as those of inner loops are, none steps often.
            known, count = self._others.get(id(optimizer), (None, 0))
            self._others[id(optimizer)] = _reference(optimizer), 1 + (count if known and known() is optimizer else 0)
            self._since += 1
            if self._first is not None and self._others[id(optimizer)][1] < PATIENCE and self._since < _MOST_OTHERS:
                return False
            self._first = _reference(optimizer)
        self._usual = max(self._usual, self._since) if is_first else 0
        self._others.clear()
        self._since = 0
        return True

    @property
    def left(self) -> int:
        """Steps that ended no iteration, at the end, if they are more than an iteration has."""
        return self._since if self._since >= PATIENCE and self._since > 2 * self._usual else 0


def _reference(optimizer: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(optimizer)
    except TypeError:  # a wrapper of somebody's, with slots
        return lambda: optimizer
