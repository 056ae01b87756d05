"""Batches: calls between torch's ``start_coalescing`` and ``end_coalescing``, which start together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from penstock.errors import Config as ConfigError
from penstock.torch.work import Ticket, Work

__all__ = ["Batch", "Start", "batched"]

Start: TypeAlias = "Callable[[], Ticket]"
"""A function that starts an operation whose arguments were checked."""


def batched(call: Callable[..., Work]) -> Callable[..., Work]:
    """Lets a call be part of a batch: its refusal is raised at the batch's end. (After an error in the middle, torch would
    collect calls forever, and run none of them.)"""

    @functools.wraps(call)
    def in_batch(self: Any, *args: Any, **kwargs: Any) -> Work:
        if self._coalesced is not None and self._coalesced.has_raised:
            # A wait inside the batch has raised the refusal, so torch has not reached the batch's end.
            self._coalesced = None
        if self._coalesced is None:
            return call(self, *args, **kwargs)
        try:
            return call(self, *args, **kwargs)
        except ConfigError as error:
            return self._coalesced.refuse(error)

    return in_batch


class Batch:
    """Calls that start together, or not at all if one of them is refused."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.works: list[Work] = []
        self._waiting: list[tuple[Work, Sequence[Start]]] = []
        self._refused: ConfigError | None = None
        self.has_raised = False
        """Whether the refusal was raised, which ends the batch."""

    def add(self, work: Work, starts: Sequence[Start]) -> None:
        """Take a call's Work into the batch, with the functions that start its operations."""
        work.tickets = [_InBatch(self, work)]
        self.works.append(work)
        self._waiting.append((work, starts))

    def refuse(self, error: ConfigError) -> Work:
        """Record the refusal of one of the calls, which `start` raises."""
        self._refused = self._refused or error
        work = Work(self._group, [], [])
        work.tickets = [_InBatch(self, work)]
        return work

    def start(self) -> None:
        """Start all operations; raise the first refusal instead if there was one."""
        if self._refused is not None:
            self.has_raised = True
            raise self._refused
        while self._waiting:
            work, starts = self._waiting.pop(0)
            work.tickets = [start() for start in starts]


class _InBatch:
    """The ticket of a call in a batch. A request for its result before the batch's end starts the calls so far."""

    def __init__(self, batch: Batch, work: Work) -> None:
        self._batch = batch
        self._work = work

    def wait(self, timeout_s: float | None = None) -> bool:
        """Like the engine's ticket, for all operations of the call."""
        self._batch.start()
        return all(ticket.wait(timeout_s) for ticket in self._work.tickets)

    def done(self) -> bool:
        """Whether all operations of the call have ended."""
        self._batch.start()
        return all(ticket.done() for ticket in self._work.tickets)

    def source(self) -> int | None:
        """Like the engine's ticket."""
        self._batch.start()
        return self._work.tickets[0].source()

    def on_done(self, callback: Callable[[], object]) -> None:
        """Call ``callback()`` at the end of each operation of the call."""
        self._batch.start()
        for ticket in self._work.tickets:
            ticket.on_done(callback)
