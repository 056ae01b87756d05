"""How urgent what a thread sends is."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Iterator
from typing import Any, Protocol

from penstock.errors import Config

__all__ = ["Urgency", "current", "priority", "within"]


class Started(Protocol):
    """What has started an operation: a group of the engine's, or a client of an endpoint."""

    def reprioritise(self, operation: Any, priority: int, /) -> None: ...


class Operation(Protocol):
    """An operation of one."""

    def done(self) -> bool: ...


class Urgency:
    """The operations that a thread has started in a block of `priority`, and how urgent they are."""

    def __init__(self, number: int, coflow: int = 0) -> None:
        self._number = checked(number)
        if not isinstance(coflow, int) or isinstance(coflow, bool) or not 0 <= coflow <= _LAST_COFLOW:
            raise Config(f"a coflow is a whole number from 1 to {_LAST_COFLOW}, or 0 for none, not {coflow!r}")
        self.coflow = coflow
        """Which coflow they belong to; 0: none."""
        # A signal handler may change what its thread is about to add.
        self._lock = threading.RLock()
        self._running: list[tuple[Started, Operation]] = []
        self._looked_at = 0

    @property
    def number(self) -> int:
        """0 is the most urgent, 255 the least."""
        return self._number

    def change(self, number: int) -> None:
        """Give another priority to the operations of the block that have not ended, for what this rank has not sent of them yet,
        and to those that the block starts from now on. Messages that count as sent, since they were copied (up to 32 KiB), keep
        their place, and so does what the server of an endpoint sends. Returns at once. Any thread may call it, also after the
        block.

        Raises:
            penstock.errors.Config: it is no whole number from 0 to 255.
        """
        number = checked(number)
        with self._lock:
            self._number = number
            for started, operation in self._running:
                # A signal handler may change it meanwhile.
                started.reprioritise(operation, engine_priority(self._number))

    def add(self, started: Started, operation: Operation, number: int) -> None:
        """This operation has started in the block, with this number."""
        with self._lock:
            if number != self._number:
                started.reprioritise(operation, engine_priority(self._number))
            if len(self._running) >= 2 * self._looked_at + _MANY:
                self._running = [each for each in self._running if not each[1].done()]
                self._looked_at = len(self._running)
            self._running.append((started, operation))


@contextlib.contextmanager
def priority(number: int, *, coflow: int = 0) -> Iterator[Urgency]:
    """Operations that this thread starts in here have this priority: 0 is the most urgent, 255 the least, and 128 what they have
    elsewhere.

    They also belong to this coflow: operations that are of use only together, such as those of one step, have one number; 0 is
    none. Their frames carry it, and the flight record shows it; packets of aggregators and messages of endpoints have no place
    for it. It is for schedulers of coflows: nothing orders frames by it yet.

    Of all frames that can leave this rank now, those of the most urgent operation leave first; to one rank and of one priority,
    those that were queued first. Between hosts, operations with less than 128 have a stream that the others leave free.
    Priorities change when bytes travel, never what they become. Each rank sends by its own, so ranks should agree. A batch
    (`torch.distributed.batch_isend_irecv`) takes each call's. What goes through aggregators keeps its order within a group. A
    `GradientReducer` has a priority of its own. Of Horovod's operations those of one priority are fused.

    The block's value changes the priority of what the block has started (`Urgency.change`).

    Raises:
        penstock.errors.Config: the priority is no whole number from 0 to 255, or the coflow none from 0 to 2**32 - 1.
    """
    block = Urgency(number, coflow)
    with within(block):
        yield block


@contextlib.contextmanager
def within(block: Urgency | None) -> Iterator[None]:
    """This thread starts operations for one that was in ``block``, or in none."""
    before = _current.set(block)
    try:
        yield
    finally:
        _current.reset(before)


def current() -> Urgency | None:
    """The innermost block of `priority` that this thread is in."""
    return _current.get()


def engine_priority(number: int) -> int:
    """A priority as the engine counts: 0 is the usual one, and less is more urgent."""
    return number - USUAL


def checked(number: int) -> int:
    """The number, if it is a priority.

    Raises:
        penstock.errors.Config: it is no whole number from 0 to 255.
    """
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= _LEAST:
        raise Config(f"a priority is a whole number from 0 (the most urgent) to {_LEAST}, not {number!r}")
    return number


USUAL, _LEAST = 128, 255
_LAST_COFLOW = (1 << 32) - 1
# Operations that have ended are forgotten when there are this many, and when their number has doubled since.
_MANY = 64
_current: contextvars.ContextVar[Urgency | None] = contextvars.ContextVar("penstock.priority", default=None)
