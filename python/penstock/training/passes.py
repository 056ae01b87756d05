"""A backward pass, and callbacks for its end, whether it raised or not."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["BackwardPass", "at_end"]


class BackwardPass:
    """What one backward pass has handed over to the engine, by a gradient's index."""

    __slots__ = ("absent", "handed", "shared", "states", "task")

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
