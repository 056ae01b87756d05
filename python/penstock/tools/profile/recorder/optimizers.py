"""Which optimizers step at present. No torch, no clock."""

from __future__ import annotations

import threading
import types

__all__ = ["Optimizers", "is_within"]


class Optimizers:
    """Those that step now, each by the frame that called it: of an optimizer that another one wraps, such as Horovod's, both
    tell. One that raised did not tell of its end.

    Hooks of a backward pass may step, too (``register_post_accumulate_grad_hook``), with CUDA on the autograd engine's thread of
    the device. Where threads step at the same time, one of them is told.
    """

    def __init__(self) -> None:
        self._callers: list[types.FrameType] = []
        self._thread: dict[str, int] = {}
        """On which they step."""
        self._outer = 0
        """How many began before the backward pass that runs."""

    def begins(self, caller: types.FrameType) -> bool:
        """Whether it is the outermost."""
        thread = threading.get_ident()
        if self._thread.setdefault("thread", thread) != thread:
            return False
        while self._callers and not is_within(caller, self._callers[-1]):
            self._callers.pop()
        self._callers.append(caller)
        return len(self._callers) == 1

    def ends(self, caller: types.FrameType) -> bool:
        """Whether it was the outermost."""
        if self._thread.get("thread") != threading.get_ident() or not self._callers:
            return False
        while self._callers and self._callers.pop() is not caller:
            pass
        if self._callers:
            return False
        self._thread.clear()
        return True

    def pass_begins(self) -> None:
        self._outer = len(self._callers)

    def pass_ends(self) -> None:
        if len(self._callers) > self._outer:  # one in a hook raised
            del self._callers[self._outer :]
            if not self._callers:
                self._thread.clear()

    def moved(self) -> None:
        """The training goes on in another thread."""
        self._thread.clear()


def is_within(frame: types.FrameType | None, outer: types.FrameType) -> bool:
    while frame is not None:
        if frame is outer:
            return True
        frame = frame.f_back
    return False
