"""A backward pass, and its end, whether it raised or not."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.autograd.function
import torch.autograd.graph

from penstock import _core
from penstock.errors import PenstockError
from penstock.training.steps import States, state

__all__ = ["BackwardPass", "TakesPart", "at_end", "end", "is_nested"]


class BackwardPass:
    """What one backward pass has handed over to the engine, by a gradient's index."""

    __slots__ = ("absent", "flushed", "handed", "nested", "shared", "states", "task")

    def __init__(self) -> None:
        self.task = -1
        """Autograd's number of the outermost pass; -1 while only passes nested in it have made gradients."""
        self.nested: set[int] = set()
        """The numbers of passes nested in it (reentrant checkpoints)."""
        self.handed: dict[int, torch.Tensor] = {}
        """The tensors that are averaged in place: gradients, or copies of those that lie otherwise."""
        self.states = States()
        """Of gradients that autograd has completed in this pass and that are averaged where they are."""
        self.shared: list[int] = []
        """Those of them that share their memory with other tensors, and so have no version of their own."""
        self.absent: set[int] = set()
        """The gradients that this rank does not have."""
        self.flushed: _core.Ticket | None = None
        """Completes when all gradients are averaged; None before the pass has ended."""

    def deliver(self, parameters: Sequence[torch.nn.Parameter], was_absent: Callable[[int], bool]) -> States:
        """Put the averages, which are in the tensors that were handed over, into the parameters' gradients.

        Args:
            parameters: by a gradient's index.
            was_absent: whether no rank had a gradient.

        Returns: the states of the averages.
        """
        averages = self.states  # these gradients were averaged where they are
        for index in self.shared:
            averages[index] = state(self.handed[index])
        if len(averages) == len(self.handed):
            return averages
        for index, gradient in self.handed.items():
            if index in averages or (index in self.absent and was_absent(index)):
                continue  # Where no rank has one of this pass, what an earlier one left stays.
            place = parameters[index].grad
            if place is not gradient:
                if place is None:
                    parameters[index].grad = place = gradient
                elif place.data_ptr() != gradient.data_ptr():
                    place.copy_(gradient)
            averages[index] = state(place)
        return averages


class TakesPart(Protocol):
    """What averages gradients of a pass."""

    def _prepare(self) -> None: ...

    def _flush(self) -> _core.Ticket: ...

    def _finish(self) -> None: ...

    def _abandon(self, grace_s: float = 0) -> None: ...


def end(reducers: Sequence[TakesPart]) -> None:
    """The pass has ended for all that take part in it. Each waits for the other ranks, which may have reached the reducers in
    another order, or only some: all flush before the first one waits. If one raises, those that have not finished are abandoned.

    Args:
        reducers: in an order that is the same on all ranks.
    """
    try:
        for one in reducers:
            one._prepare()
        tickets = [one._flush() for one in reducers]
        for at, one in enumerate(reducers):
            _wait(tickets[at], tickets[at + 1 :])
            one._finish()
    except BaseException as error:
        for one in reducers:
            one._abandon(grace_s=_DROP_S if isinstance(error, PenstockError) else 0)
        raise


def _wait(ticket: _core.Ticket, others: Sequence[_core.Ticket]) -> None:
    """Wait for a step, and raise if one of the others has failed: a rank whose pass has raised drops a step of one reducer, and
    another one's, on which no rank has agreed yet, would wait for that rank's next pass."""
    while others and not ticket.wait(_LOOK_S):
        for other in others:
            other.wait(0)
    ticket.wait()
    for other in others:
        other.wait(0)


def is_nested(*, after: int = 0) -> bool:
    """In a hook of a backward pass: whether that is a part of another one, begun by a ``torch.autograd.Function`` as reentrant
    checkpoints are. (One that a hook has begun is not: it may belong to a whole training step.) Takes microseconds.

    Args:
        after: so many passes that were parts of it have just ended, and are still on the stack.
    """
    passes = 0
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _RUN_BACKWARD:
            passes += 1
            if passes > after + 1:
                break
        elif frame.f_code is _FUNCTION_BACKWARD and passes > after:
            return True
        frame = frame.f_back
    return False


def at_end(
    ended: Callable[[], None], raised: Callable[[], None], *, outer_goes_on: Callable[[], None] | None = None
) -> None:
    """In a hook of a backward pass: call one of these when the pass has ended, on the thread that called ``backward``.

    Args:
        ended: called before ``backward`` returns; what it raises, ``backward`` raises.
        raised: the pass has raised, or ``ended`` has. It must not block, nor raise.
        outer_goes_on: for a nested pass, after ``ended``, where `at_end` takes callbacks for the outer one. It must not raise.
    """
    torch.autograd.Variable._execution_engine.queue_callback(_End(ended, raised, outer_goes_on))


class _End:
    """Autograd calls this object when the pass has ended. If the pass raises, autograd drops it without a call."""

    def __init__(
        self, ended: Callable[[], None], raised: Callable[[], None], outer_goes_on: Callable[[], None] | None
    ) -> None:
        self._ended = ended
        self._raised: Callable[[], None] | None = raised
        self._outer_goes_on = outer_goes_on

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
        # In a nested pass autograd drops this object on the thread that goes on with the outer one.
        if self._raised is not None:
            self._raised()
        elif self._outer_goes_on is not None:
            self._outer_goes_on()


# A failure of another reducer may be noticed so late. A guess.
_LOOK_S = 0.02
# Where another rank's pass has raised, it drops its steps with all reducers at once: a guess for the time until all have heard.
_DROP_S = 1.0
_RUN_BACKWARD = torch.autograd.graph._engine_run_backward.__code__
_FUNCTION_BACKWARD = torch.autograd.function.BackwardCFunction.apply.__code__
