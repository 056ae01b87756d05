"""Which step of an optimizer ends an iteration."""

from __future__ import annotations

import weakref
from typing import Any

__all__ = ["Iterations"]

_PATIENCE = 16
"""Steps of another optimizer without one of the first, after which the other is the first."""


class Iterations:
    """An iteration ends with the step of the optimizer that stepped first in it: of several, such as a GAN's two or one a layer,
    each belongs to the iteration around it. All ranks call optimizers in the same order, so they count alike."""

    def __init__(self) -> None:
        self._first: Any = None
        self._others = 0

    def stepped(self, optimizer: Any) -> bool:
        """Whether this step ends the iteration."""
        is_first = self._first is not None and self._first() is optimizer
        if not is_first:
            self._others += 1
            # A script may go on with another optimizer. Whether the old one is gone by then says the garbage collector of
            # each rank for itself, so that does not count.
            if self._first is not None and self._others < _PATIENCE:
                return False
            self._first = weakref.ref(optimizer)
        self._others = 0
        return True
