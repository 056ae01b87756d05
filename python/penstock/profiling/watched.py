"""Operations of watched steps (`record.Watch`), named as samples show them, and since when they were issued."""

from __future__ import annotations

import bisect
import collections
import heapq
import statistics
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.profiling.intervals import union
from penstock.profiling.matching import canonical
from penstock.profiling.phases import backward_passes, pass_at
from penstock.profiling.record import Ended, Operation, Ran, Record, Sample, Step, Wait
from penstock.profiling.turns import GRAIN_NS

__all__ = ["watched"]

_THREADS = 2
"""Of a group of gloo's: the third operation in flight waits in a queue until one has ended."""
_TAKES_NS = 500_000
"""Later a thread is free, and what it takes then has not waited for it."""
_SEVERAL = 3
"""Samples that tell by how much a time varies."""
_NUMBERS = 1 << 24
"""For the operations of each step."""

_Counts = frozenset[tuple[str, int]]
"""How many operations of each name a step has."""


def watched(record: Record, steps: Sequence[Step]) -> tuple[list[Ended], list[tuple[int, int, None]]]:
    """What a rank's watches tell, as Penstock's engine would. O(n log n).

    An operation is shown by name alone. Its group is that of the one in its place of a sample with as many operations of each
    name. Where such samples differ, there is none, or the order may be another one, the operations of a step have no name either.

    Args:
        steps: of the record, by their times.

    Returns:
        In order of steps; and when operations may have been taken of which nothing is told, in order, without overlap.
    """
    starts = [step.start_ns for step in steps]
    found: dict[int, list[Ran]] = {}
    for one in (one for watch in record.watches for one in watch.operations):
        at = bisect.bisect_right(starts, one.began_ns) - 1
        if at >= 0 and one.began_ns < steps[at].end_ns:
            found.setdefault(at, []).append(one._replace(name=canonical(one.name)))
    for each in found.values():
        each.sort(key=lambda one: one.began_ns)
    holes = _holes(record)
    place_of = {step.number: at for at, step in enumerate(steps)}
    alone = _alone(steps, found, holes, {place_of.get(sample.step, -1) for sample in record.samples})
    patterns: dict[_Counts, _Pattern] = {}
    for sample in record.samples:
        shown = sorted(sample.operations, key=lambda one: one.issued_ns)
        pattern = patterns.setdefault(_counts(canonical(one.name) for one in shown), _Pattern(shown))
        at = place_of.get(sample.step, -1)
        pattern.add(sample, shown, steps[at] if at in found else None, found.get(at, []), is_alone=at in alone)
    ended = []
    for at, each in sorted(found.items()):
        pattern = patterns.get(_counts(one.name for one in each), _Pattern(()))
        told = pattern.told(steps[at], each, is_alone=at in alone)
        ended += told or [Ended("", 0, "", "", one.began_ns, one.ended_ns) for one in each]
    return ended, holes


def _counts(names: Iterable[str]) -> _Counts:
    return frozenset(collections.Counter(names).items())


@dataclass
class _Pattern:
    """Samples with as many operations of each name."""

    shown: Sequence[Operation]
    """Of the first, in order of issue."""
    _is_clear: bool = True
    """Whether all have the same groups, peers and tags in the same places."""
    _delays: dict[str, int] = field(default_factory=dict)
    """By name: the least time from issue until a thread takes it."""
    _passes: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """By place among all: in which backward pass it was issued in samples, and how long after that began."""
    _takes: dict[int, list[int]] = field(default_factory=dict)
    """By place among all: in samples, how long after its issue a thread took it."""
    _awaited: dict[int, bool] = field(default_factory=dict)
    """By place among all: whether in samples it was issued in a wait for it, as by a function that blocks."""

    def __post_init__(self) -> None:
        # A send and a receive are one operation. A text for each place, not for each operation: names may be long.
        self._channels = [f"{one.group} {canonical(one.name) if one.peer is None else one.tag}" for one in self.shown]
        taking = _taking(self.shown)
        self._taking = {name for name, _ in taking}
        self._have_several = len(set(taking)) > len(self._taking)
        """Whether operations of one name are of several groups."""
        self._is_overtaken = False
        """Whether, in the order of a sample, one may be taken before another that was issued first."""

    def add(
        self, sample: Sample, shown: Sequence[Operation], step: Step | None, ran: Sequence[Ran], *, is_alone: bool
    ) -> None:
        """One more sample.

        Args:
            shown: its operations, in order of issue.
            step: that step, if it was watched, too.
            ran: what was watched of it.
            is_alone: as for `told`.
        """
        self._is_overtaken = self._is_overtaken or _may_overtake(_taking(shown))
        self._is_clear = self._is_clear and _named(shown) == _named(self.shown)
        if step is None or sample.dropped:
            return
        places = self._places(ran, is_alone=is_alone)
        if places is None:
            return
        passes, waits = backward_passes(step), _Waits(step)
        own: dict[str, collections.deque[int]] = {}
        for each in shown:
            own.setdefault(canonical(each.name), collections.deque()).append(each.issued_ns)
        for at, one in zip(places, ran, strict=True):
            issued_ns = own[one.name].popleft()
            self._is_clear = self._is_clear and one.began_ns >= issued_ns - GRAIN_NS
            self._delays[one.name] = min(self._delays.get(one.name, one.began_ns), max(0, one.began_ns - issued_ns))
            self._takes.setdefault(at, []).append(one.began_ns - issued_ns)
            is_awaited = waits.end_ns(one.name, self.shown[at].group, issued_ns) is not None
            self._awaited[at] = self._awaited.get(at, True) and is_awaited
            which = pass_at(passes, issued_ns)
            if which >= 0:
                self._passes.setdefault(at, []).append((which, issued_ns - passes[which][0]))

    def told(self, step: Step, ran: Sequence[Ran], *, is_alone: bool) -> list[Ended] | None:
        """The operations of a step; None: which is which is not known.

        Args:
            is_alone: whether none of an earlier step runs on into it (`_alone`).
        """
        places = self._places(ran, is_alone=is_alone) if self._is_clear else None
        if places is None or not self._delays or self._are_close(ran, places):
            return None
        passes = backward_passes(step)
        waits = _Waits(step)
        queued = self._have_queued(ran, places)
        anchors: dict[int, tuple[int, int]] = {}
        """By pass: when an operation was issued in it that did not queue, and how long after it began one is in samples."""
        numbers: collections.Counter[tuple[str, str, int | None]] = collections.Counter()
        found = []
        for at, one, has_queued in sorted(zip(places, ran, queued, strict=True)):
            like = self.shown[at]
            issued_ns = one.began_ns - self._delays.get(one.name, 0)
            which, after_ns = self._usual(at)
            if 0 <= which < len(passes):
                start_ns = passes[which][0]
                if one.began_ns < start_ns - GRAIN_NS:
                    return None  # of the step before
                anchor_ns, usual_ns = anchors.get(which, (start_ns, 0))
                is_late = which not in anchors and self._is_taken_irregularly(at)
                if has_queued or is_late:
                    issued_ns = max(anchor_ns, min(issued_ns, anchor_ns + after_ns - usual_ns))
                if not has_queued:
                    anchors[which] = issued_ns, after_ns
            key = self._channels[at], one.name, like.peer
            number = step.number * _NUMBERS + numbers[key]
            # gloo's thread may note its end after whoever waited for it went on.
            until_ns = waits.end_ns(one.name, like.group, issued_ns) if self._awaited.get(at) else None
            ended_ns = one.ended_ns if until_ns is None else min(one.ended_ns, until_ns)
            ended = Ended(key[0], number, like.group, one.name, max(0, issued_ns), ended_ns, like.peer)
            found.append(ended)
            numbers[key] += 1
        return found

    def _places(self, ran: Sequence[Ran], *, is_alone: bool) -> list[int] | None:
        """Of each operation: its place among those of a sample. None if there are others, or some queued, and what another group
        issued later may have been taken before them."""
        if _counts(one.name for one in ran) != _counts(canonical(one.name) for one in self.shown):
            return None
        is_in_order = not self._have_several or (is_alone and not self._is_overtaken)
        if not is_in_order and any(_queued([one for one in ran if one.name in self._taking])):
            return None
        of: dict[str, collections.deque[int]] = {}
        for at, one in enumerate(self.shown):
            of.setdefault(canonical(one.name), collections.deque()).append(at)
        return [of[one.name].popleft() for one in ran]

    def _are_close(self, ran: Sequence[Ran], places: Sequence[int]) -> bool:
        """Whether two of one name and of different groups were taken so soon after each other that they may have been issued the
        other way round. What a function that blocks issues has ended before the next is issued."""
        if not self._have_several:
            return False
        last: dict[str, tuple[int, int]] = {}
        for one, at in zip(ran, places, strict=True):
            if one.name not in self._taking:
                continue
            before, began_ns = last.get(one.name, (at, 0))
            is_other = self.shown[before].group != self.shown[at].group and not self._awaited.get(before)
            if is_other and one.began_ns < began_ns + _TAKES_NS:
                return True
            last[one.name] = at, one.began_ns
        return False

    def _have_queued(self, ran: Sequence[Ran], places: Sequence[int]) -> list[bool]:
        """Whether each operation waited for a thread of its group."""
        found = [False] * len(ran)
        groups: dict[str, list[int]] = {}
        for index, at in enumerate(places):
            if self.shown[at].peer is None:  # messages take no thread
                groups.setdefault(self.shown[at].group, []).append(index)
        for indexes in groups.values():
            for index, has_queued in zip(indexes, _queued([ran[index] for index in indexes]), strict=True):
                found[index] = has_queued
        return found

    def _is_taken_irregularly(self, at: int) -> bool:
        """Whether in samples its wait for a thread varies more than the moment of its pass at which it is issued. Where a rank
        has one processor gloo's threads wait for that, 2 to 4 ms in most steps. The 0 is of a thread that comes at once: else
        samples that are all late by the same would look steady."""
        moments = [after_ns for _, after_ns in self._passes[at]]
        return len(moments) >= _SEVERAL and _spread(moments) < _spread([0, *self._takes[at]])

    def _usual(self, at: int) -> tuple[int, int]:
        """In which backward pass an operation is issued, and how long after that began. -1: in none, or now here, now there."""
        known = self._passes.get(at, [])
        if len({which for which, _ in known}) != 1:
            return -1, 0
        return known[0][0], round(statistics.median(after_ns for _, after_ns in known))


class _Waits:
    """A step's marked waits."""

    def __init__(self, step: Step) -> None:
        self._waits: dict[tuple[str, str], list[Wait]] = {}
        for wait in sorted(step.waits):
            self._waits.setdefault((canonical(wait.operation), wait.group), []).append(wait)

    def end_ns(self, name: str, group: str, issued_ns: int) -> int | None:
        """The end of the wait for such an operation that goes on when one is issued; None: there is none."""
        waits = self._waits.get((name, group), [])
        at = bisect.bisect_right(waits, issued_ns + GRAIN_NS, key=lambda wait: wait.start_ns) - 1
        return waits[at].end_ns if at >= 0 and waits[at].end_ns > issued_ns else None


def _spread(values: Iterable[int]) -> float:
    """The median distance from the median."""
    known = [*values]
    middle = statistics.median(known)
    return statistics.median(abs(value - middle) for value in known)


def _named(shown: Iterable[Operation]) -> dict[str, list[tuple[str, int | None, int]]]:
    found: dict[str, list[tuple[str, int | None, int]]] = {}
    for one in shown:
        found.setdefault(canonical(one.name), []).append((one.group, one.peer, one.tag))
    return found


def _queued(ran: Sequence[Ran]) -> list[bool]:
    """Of each operation, in the order in which they were taken: whether all threads were at work until then. O(n log n)."""
    busy: list[int] = []
    found = []
    for one in ran:
        while busy and busy[0] <= one.began_ns - _TAKES_NS:
            heapq.heappop(busy)
        found.append(len(busy) >= _THREADS and busy[0] <= one.began_ns + GRAIN_NS)
        heapq.heappush(busy, one.ended_ns)
    return found


def _taking(shown: Iterable[Operation]) -> list[tuple[str, str]]:
    """Names and groups of what takes a thread of its group: messages take none."""
    return [(canonical(one.name), one.group) for one in shown if one.peer is None]


def _may_overtake(issued: Iterable[tuple[str, str]]) -> bool:
    """Whether, of two operations of one name and different groups, the one that was issued later may be taken first: the other
    one's group has all threads at work.

    Args:
        issued: names and groups, in order.
    """
    counts: collections.Counter[str] = collections.Counter()
    may_queue: dict[str, set[str]] = {}
    for name, group in issued:
        queue = may_queue.setdefault(name, set())
        if queue - {group}:
            return True
        if counts[group] >= _THREADS:
            queue.add(group)
        counts[group] += 1
    return False


def _alone(
    steps: Sequence[Step],
    found: Mapping[int, Sequence[Ran]],
    holes: Sequence[tuple[int, int, None]],
    sampled: Container[int],
) -> set[int]:
    """Places of watched steps into which no operation of an earlier one runs on. If the step before was not watched that is not
    known; but a sample shows its own calls, and is alone unless one is known to run on."""

    def is_known(at: int) -> bool:
        last = bisect.bisect_left(holes, steps[at].start_ns, key=lambda hole: hole[0]) - 1
        return at in sampled or (at > 0 and holes[last][1] <= steps[at - 1].start_ns)

    alone = set()
    until_ns = 0
    for at in sorted(found):
        if until_ns <= steps[at].start_ns and is_known(at):
            alone.add(at)
        until_ns = max(until_ns, *(one.ended_ns for one in found[at]))
    return alone


def _holes(record: Record) -> list[tuple[int, int, None]]:
    before, holes = 0, []
    for start, end, _ in union((watch.since_ns, watch.until_ns, None) for watch in record.watches):
        holes.append((before, start, None))
        before = end
    return [*holes, (before, 1 << 63, None)]
