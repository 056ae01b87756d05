"""A backward pass, and its end, whether it raised or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from penstock import _core

__all__ = ["BackwardPass", "TakesPart", "at_end", "end"]


class BackwardPass:
    """What one backward pass has handed over to the engine, by a gradient's index."""

    __slots__ = ("absent", "flushed", "handed", "shared", "states", "task")

    def __init__(self) -> None:
        self.task = -1
        """Autograd's number of the pass, or of the innermost nested one."""
        self.handed: dict[int, torch.Tensor] = {}
        """The tensors that are averaged in place: gradients, or copies of those that lie otherwise."""
        self.states: dict[int, tuple[int, int]] = {}
        """Of gradients that autograd has completed in this pass and that are averaged where they are: address, version."""
        self.shared: list[int] = []
        """Those of them that share their memory with other tensors, and so have no version of their own."""
        self.absent: set[int] = set()
        """The gradients that this rank does not have."""
        self.flushed: _core.Ticket | None = None
        """Completes when all gradients are averaged; None before the pass has ended."""


class TakesPart(Protocol):
    """What averages gradients of a pass."""

    def _prepare(self) -> None: ...

    def _flush(self) -> None: ...

    def _finish(self) -> None: ...

    def _abandon(self) -> None: ...


def end(reducers: Sequence[TakesPart]) -> None:
    """The pass has ended for all that take part in it. Each waits for the other ranks, which may have reached the reducers in
    another order, or only some: all flush before the first one waits.

    Args:
        reducers: in an order that is the same on all ranks.
    """
    try:
        for one in reducers:
            one._prepare()
        for one in reducers:
            one._flush()
        for one in reducers:
            one._finish()
    except BaseException:
        for one in reducers:
            one._abandon()
        raise


def at_end(ended: Callable[[], None], raised: Callable[[], None]) -> None:
    """In a hook of a backward pass: call one of these when the pass has ended, on the thread that called ``backward``.

    Args:
        ended: called before ``backward`` returns; what it raises, ``backward`` raises.
        raised: the pass has raised, or ``ended`` has. It must not block, nor raise.
    """
    torch.autograd.Variable._execution_engine.queue_callback(_End(ended, raised))


class _End:
    """Autograd calls this object when the pass has ended. If the pass raises, autograd drops it without a call."""

    def __init__(self, ended: Callable[[], None], raised: Callable[[], None]) -> None:
        self._ended = ended
        self._raised: Callable[[], None] | None = raised

    def __call__(self) -> None:
        raised, self._raised = self._raised, None
        try:
            self._ended()
        except BaseException:
            # Here, not when this object goes: the traceback keeps it, for as long as the script keeps the exception.
            if raised is not None:
                raised()
            raise

    def __del__(self) -> None:
        if self._raised is not None:
            self._raised()
