"""Which optimizers step at present, and which have stepped unseen. No torch, no clock."""

from __future__ import annotations

import contextlib
import threading
import types
import weakref
from collections.abc import Iterator
from typing import Any

__all__ = ["Optimizers", "Unseen", "is_within"]


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
        self.is_pass_last = False
        """Whether the step ends where that pass ends: one has stepped in a hook of it."""

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


class Unseen:
    """Steps whose calls nobody sees: Dynamo compiles an optimizer's hooks away. The version of its first parameter with a
    gradient tells, which each change in place counts up.

    Others change parameters, too, such as SAM between its two passes. So this looks only once something was compiled that may
    step, at optimizers that share no parameter with one whose steps were seen, and counts from their second step on: by then a
    step of the other one has been seen. Nothing raises, whatever a script's own optimizers are.
    """

    def __init__(self) -> None:
        self.is_possible = False
        """Whether something but a module was compiled."""
        self._built: dict[int, weakref.ref[Any]] = {}
        self._seen: set[int] = set()
        self._suspected: set[int] = set()
        """Those of which one step may have been unseen."""
        self._before: list[tuple[weakref.ref[Any], weakref.ref[Any], int]] = []
        """Optimizers, the parameter of each, and its version at the end of the last backward pass."""

    def built(self, optimizer: Any) -> None:
        """There is one more."""
        key = id(optimizer)

        def gone(_: Any) -> None:
            self._built.pop(key, None)
            self._seen.discard(key)
            self._suspected.discard(key)

        with contextlib.suppress(Exception):
            self._built[key] = weakref.ref(optimizer, gone)
            if self._seen and self._shares(optimizer, list(self._seen)):
                self._seen.add(key)

    def seen(self, optimizer: Any) -> None:
        """Its step was."""
        if not self.is_possible or id(optimizer) in self._seen:
            return
        with contextlib.suppress(Exception):
            own = {id(parameter) for parameter in _parameters(optimizer)}
            for key, reference in list(self._built.items()):
                other = reference()
                if other is not None and any(id(parameter) in own for parameter in _parameters(other)):
                    self._seen.add(key)

    def pass_ends(self) -> None:
        self._before = []
        if not self.is_possible:
            return
        with contextlib.suppress(Exception):
            for key, reference in list(self._built.items()):
                optimizer = None if key in self._seen else reference()
                for parameter in () if optimizer is None else _parameters(optimizer):
                    if parameter.grad is not None:
                        self._before.append((reference, weakref.ref(parameter), parameter._version))
                        break

    def stepped(self) -> list[Any]:
        """The optimizers that have, since the end of the last backward pass or the last call of this."""
        found, left = [], []
        for each in self._before:
            optimizer, parameter = each[0](), each[1]()
            if optimizer is None or parameter is None or id(optimizer) in self._seen:
                continue
            if parameter._version == each[2]:
                left.append(each)
                continue
            if id(optimizer) in self._suspected:
                found.append(optimizer)
            self._suspected.add(id(optimizer))
        self._before = left
        return found

    def _shares(self, optimizer: Any, others: list[int]) -> bool:
        """Whether a parameter is also one of these."""
        own = {id(parameter) for parameter in _parameters(optimizer)}
        alive = [reference() for key in others if (reference := self._built.get(key)) is not None]
        return any(id(parameter) in own for other in alive if other is not None for parameter in _parameters(other))


def _parameters(optimizer: Any) -> Iterator[Any]:
    for group in getattr(optimizer, "param_groups", ()):  # a wrapper's may be those of another, or come later
        yield from group["params"]


def is_within(frame: types.FrameType | None, outer: types.FrameType) -> bool:
    while frame is not None:
        if frame is outer:
            return True
        frame = frame.f_back
    return False
