"""How much later than one rank another began what both do in a step without a sample: a backward pass, or a marked wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.profiling.clocks import Clock
from penstock.profiling.intervals import union
from penstock.profiling.phases import held_up
from penstock.profiling.record import Record, Step

__all__ = ["Beginnings", "Key"]

Key = tuple[str, str] | None
"""Operation and group of a marked wait; None for the backward pass."""


class Beginnings:
    """When ranks began what they do together, by their marks."""

    def __init__(self, records: Sequence[Record], clock_of: Mapping[str, Clock]) -> None:
        """
        Args:
            records: one a rank.
            clock_of: by host.
        """
        self._steps = {record.header.rank: {step.number: step for step in record.steps} for record in records}
        self._host = {record.header.rank: record.header.host for record in records}
        self._clock_of = clock_of

    def lateness(self, rank: int, number: int, key: Key, *, without_profiler: bool = False) -> tuple[float, int | None]:
        """How long after this rank the last one began it in this step, in ns, and which one that was. Where a step has several,
        the one for which this rank was first by most. O(ranks).

        What clocks of two hosts may be wrong by is not counted. A rank that began it more or fewer times is left out.

        Args:
            without_profiler: as if torch's profiler had held up nobody (`held_up`).
        """
        own = self._began(rank, number, key, without_profiler)
        found: tuple[float, int | None] = (0.0, None)
        for other, host in self._host.items():
            theirs = self._began(other, number, key, without_profiler) if other != rank else []
            if len(theirs) != len(own):
                continue
            unsure = 0.0
            if host != self._host[rank]:
                unsure = self._clock_of[host].likely_wrong_ns + self._clock_of[self._host[rank]].likely_wrong_ns
            for mine, its in zip(own, theirs, strict=True):
                found = max(found, (its - mine - unsure, other), key=lambda each: each[0])
        return found

    def _began(self, rank: int, number: int, key: Key, without_profiler: bool) -> list[int]:
        """On the first host's clock."""
        step = self._steps[rank].get(number)
        if step is None:
            return []
        clock, (late_ns, until_ns) = self._clock_of[self._host[rank]], held_up(step) if without_profiler else (0, 0)
        return [clock.on_first(time_ns) - (late_ns if time_ns < until_ns else 0) for time_ns in _starts(step, key)]


def _starts(step: Step, key: Key) -> list[int]:
    if key is None:
        passes = union((span.start_ns, span.end_ns, None) for span in step.spans if span.phase == "backward")
        return [start for start, _, _ in passes]
    return sorted(wait.start_ns for wait in step.waits if (wait.operation, wait.group) == key)
