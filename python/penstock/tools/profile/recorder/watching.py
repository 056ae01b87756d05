"""Watches: between samples torch's profiler runs without operators, and sees operations of which nothing else tells."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from penstock.profiling.record import Event, Ran, Step, Watch
from penstock.tools.profile.recorder import slots
from penstock.tools.profile.recorder.engine import AT_ONCE, MOST
from penstock.tools.profile.recorder.kineto import spans, watched
from penstock.tools.profile.recorder.profiler import Profiler
from penstock.tools.profile.recorder.slots import LEAD, SLOT, Distance

__all__ = ["Watching"]

SHARE = 0.005
"""Of the time that watches may cost, besides samples."""

_EVENT_NS = 10_000
"""An event makes a step longer by less."""
_BEFORE = 4
"""Steps from the last one to the start of the next sample's profiler: what is in flight may have to end first."""
_MOST_SPANS = 1_000
"""A step with more operations and spans is not watched: each operation takes memory until the watch ends."""
_LEFT_OUT = "operations of steps without a sample from here on: a record keeps {:,}"


class Watching:
    """When there is a watch, and what came of it. `Sampling` runs the profiler."""

    def __init__(self, put: Callable[[Watch | Event], object]) -> None:
        self._put = put
        self.distance = Distance()
        self._is_wanted = False
        """Whether the last sample showed operations of which only samples tell."""
        self.is_running = self.is_over = False
        """Whether the profiler that runs watches; and whether it has seen all that it will."""
        self._since_ns = self._until_ns = 0
        self._written = 0

    def begins(self, number: int) -> int | None:
        """The last step of the watch for which the profiler starts at the end of that step, one after the slot's sample."""
        slot, at = divmod(number, SLOT)
        if not self._is_wanted or at != slots.place(slot) + 1 or not self.distance.has(slot):
            return None
        return (slot + 1) * SLOT + slots.place(slot + 1) - LEAD - _BEFORE

    def started(self, since_ns: int) -> None:
        self.is_running, self.is_over, self._since_ns = True, False, since_ns

    def ended(self, until_ns: int) -> None:
        self.is_over, self._until_ns = True, until_ns

    def sampled(self, profiler: Profiler, events: Sequence[Any], clock: Callable[[int], int], step: Step) -> None:
        """There was a sample, and it shows operations: tell of them as a watch does, and watch from now on."""
        found = None if profiler.has_device else watched(events, clock)
        self._is_wanted = bool(found) and self._written < MOST and spans(events) <= LEAD * _MOST_SPANS
        if found and self._is_wanted:
            self._write(step.start_ns, step.end_ns, found)

    def read(self, profiler: Profiler, cost_ns: Callable[[], int], steps: Sequence[int]) -> None:
        """The watch is over, and the profiler has stopped.

        Args:
            cost_ns: of the watch until now.
            steps: how long the last steps took.
        """
        events = profiler.events()
        clock, _ = profiler.clock(events)
        found = None if clock is None else watched(events, clock)
        if found is None:
            self._is_wanted = False  # until a sample shows something
        else:
            self._write(self._since_ns, self._until_ns, found)
        self.distance.costs(cost_ns() + len(events) * _EVENT_NS, steps, SHARE)

    def _write(self, since_ns: int, until_ns: int, found: Sequence[Ran]) -> None:
        """All that began between, in lines that each tell of a part of that time: one may be lost."""
        found = [one for one in found if since_ns <= one.began_ns < until_ns]
        for at in range(0, max(1, len(found)), AT_ONCE):
            some, later = tuple(found[at : at + AT_ONCE]), found[at + AT_ONCE : at + AT_ONCE + 1]
            end_ns = max(since_ns, later[0].began_ns if later else until_ns)
            self._put(Watch(since_ns, end_ns, some))
            since_ns = end_ns
        self._written += len(found)
        if self._written >= MOST:
            self._is_wanted = False
            self._put(Event(time.monotonic_ns(), "left out", _LEFT_OUT.format(MOST)))
