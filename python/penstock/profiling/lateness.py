"""How much later than one rank another began what both do in a step: a backward pass, or a marked wait."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from penstock.profiling.breakdown import SYNC
from penstock.profiling.clocks import Clock
from penstock.profiling.matching import Kind, Meeting, kind
from penstock.profiling.phases import backward_passes, held_up
from penstock.profiling.record import Record

__all__ = ["Beginnings", "Key", "Lateness"]

Key = tuple[str, str] | None
"""Operation and group of a marked wait; None for the backward pass."""


class Lateness(NamedTuple):
    """Of those that began last, in all that a step has of one kind, as if torch's profiler had held up nobody (`held_up`)."""

    ns: float
    """After this rank; 0 where this one was the last."""
    by: dict[int, float]
    """Of that, by the rank that was the last."""
    with_profiler_ns: float
    """As it was."""


_Begun = dict[str, list[tuple[int, int]]]
"""Of one occurrence, by host: when ranks began it, on the first host's clock, and the ranks. Of each host the last two."""


class Beginnings:
    """When ranks began what they do together, by their marks."""

    def __init__(self, records: Sequence[Record], met: Iterable[Meeting], clock_of: Mapping[str, Clock]) -> None:
        """
        Args:
            records: one a rank.
            met: their sampled operations, which tell who waits for whom.
            clock_of: by host.
        """
        self._steps = {record.header.rank: {step.number: step for step in record.steps} for record in records}
        self._host = {record.header.rank: record.header.host for record in records}
        self._held_up = {step.number for record in records for step in record.steps if held_up(step)[0]}
        self._clock_of = clock_of
        self._occurrences: dict[tuple[int, int], dict[Key, list[tuple[int, int]]]] = {}
        partners: dict[tuple[int, str | None], set[int]] = {}
        self._waiting: dict[tuple[int, int], set[int]] = {}
        """By rank and number of passes: those in which gradients were summed. In others, which accumulate them, nobody waits."""
        for meeting in met:
            if meeting.kind not in _OF_ALL:
                continue
            ranks = {rank for rank, _ in meeting.parts}
            for rank, one in meeting.parts:
                partners.setdefault((rank, one.group), set()).update(ranks)
                # A backward pass waits for those that gradients are summed with.
                if one.purpose == SYNC:
                    partners.setdefault((rank, None), set()).update(ranks)
                    passes = self._spans(rank, meeting.step).get(None, [])
                    at = bisect.bisect_right(passes, one.issued_ns, key=lambda span: span[0]) - 1
                    # What is issued between two passes, as in a forward pass, is of neither.
                    if at >= 0 and (one.issued_ns < passes[at][1] or at == len(passes) - 1):
                        self._waiting.setdefault((rank, len(passes)), set()).add(at)
        self._partners = {key: tuple(sorted(ranks)) for key, ranks in partners.items()}
        self._known: dict[tuple[tuple[int, ...], int, Key, bool], dict[int, list[_Begun]]] = {}

    def lateness(self, rank: int, number: int, key: Key) -> Lateness | None:
        """How long after this rank the last one began it in this step: in sum where a step has several, of backward passes those
        in which gradients are summed. None if no rank that this one waits for in it began it as often. O(hosts), once O(ranks).

        Ranks wait for those that they have met in the group, in operations of all ranks; not in what has a root, nor in sends
        and receives. What is less than the clocks of two hosts may be wrong by is not counted.
        """
        if key is not None and kind(key[0]) not in _OF_ALL:
            return None
        by = self._by(rank, number, key, without_profiler=True)
        if by is None:
            return None
        ns = with_profiler_ns = sum(by.values())
        if number in self._held_up:
            with_profiler_ns = sum((self._by(rank, number, key, without_profiler=False) or {}).values())
        return Lateness(ns, by, with_profiler_ns)

    def _by(self, rank: int, number: int, key: Key, *, without_profiler: bool) -> dict[int, float] | None:
        partners = self._partners.get((rank, None if key is None else key[1]), ())
        own = self._began(rank, number, key, without_profiler)
        alike = self._all(partners, number, key, without_profiler).get(len(own), [])
        waiting = self._waiting.get((rank, len(own))) if key is None else None
        by: dict[int, float] = {}
        is_known = False
        for at, (mine, begun) in enumerate(zip(own, alike, strict=False)):
            if waiting is not None and at not in waiting:
                continue
            here_ns, last = 0.0, rank
            for host, lasts in begun.items():
                unsure = 0.0
                if host != self._host[rank]:
                    unsure = self._clock_of[host].likely_wrong_ns + self._clock_of[self._host[rank]].likely_wrong_ns
                for its, other in lasts:
                    if other == rank:
                        continue
                    is_known = True
                    if its - mine > max(here_ns, unsure):
                        here_ns, last = its - mine, other
            if here_ns:
                by[last] = by.get(last, 0.0) + here_ns
        return by if is_known else None

    def _all(self, ranks: tuple[int, ...], number: int, key: Key, without_profiler: bool) -> dict[int, list[_Begun]]:
        """By how often ranks began it."""
        at = ranks, number, key, without_profiler
        known = self._known.get(at)
        if known is None:
            known = self._known[at] = {}
            for rank in ranks:
                host = self._host[rank]
                times = self._began(rank, number, key, without_profiler)
                if not times:
                    continue
                begun: list[_Begun] = known.setdefault(len(times), [{} for _ in times])
                for one, time_ns in zip(begun, times, strict=True):
                    one[host] = sorted([*one.get(host, []), (time_ns, rank)])[-2:]
        return known

    def _began(self, rank: int, number: int, key: Key, without_profiler: bool) -> list[int]:
        """On the first host's clock."""
        step = self._steps[rank].get(number)
        if step is None:
            return []
        clock = self._clock_of[self._host[rank]]
        late_ns, until_ns = held_up(step) if without_profiler and number in self._held_up else (0, 0)
        starts = [start for start, _ in self._spans(rank, number).get(key, [])]
        return [clock.on_first(time_ns) - (late_ns if time_ns < until_ns else 0) for time_ns in starts]

    def _spans(self, rank: int, number: int) -> dict[Key, list[tuple[int, int]]]:
        """Of a step's backward passes and marked waits, by key and in order."""
        found = self._occurrences.get((rank, number))
        if found is None:
            step = self._steps[rank].get(number)
            found = self._occurrences[rank, number] = {}
            if step is not None:
                found[None] = [(start, end) for start, end, _ in backward_passes(step)]
                for wait in sorted(step.waits, key=lambda wait: wait.start_ns):
                    found.setdefault((wait.operation, wait.group), []).append((wait.start_ns, wait.end_ns))
        return found


_OF_ALL = (Kind.ALL, Kind.EXCHANGE)
