"""When each operation's wait ends and its bytes begin to move, on the clock of the rank that recorded it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.profiling.breakdown import OTHER, PURPOSES, SYNC
from penstock.profiling.clocks import Clock
from penstock.profiling.matching import Kind, Meeting
from penstock.profiling.phases import backward_passes, held_up, pass_at
from penstock.profiling.record import Operation, Record, Step

__all__ = ["Course", "Turns", "turns"]


class Course(NamedTuple):
    """What one rank saw of an operation: it waits until `turn_ns`, then it is on the wire."""

    operation: Operation
    turn_ns: int
    """Between issue and end."""
    last: int | None
    """The rank that it waited for, if it waited and that is known."""
    is_known: bool
    """Whether its partners were found. If not, `turn_ns` means nothing."""
    profiler_ns: int = 0
    """Of the wait, what torch's profiler made: it held up the last rank for longer than this one."""
    longest_ns: int = 1 << 63
    """After its issue its bytes had moved, although it may count as in flight for longer."""

    @property
    def ended_ns(self) -> int:
        return min(self.operation.ended_ns, self.operation.issued_ns + self.longest_ns)

    @property
    def purpose(self) -> str:
        return self.operation.purpose if self.operation.purpose in PURPOSES else OTHER


@dataclass
class Turns:
    """Of all ranks."""

    courses: dict[int, dict[int, list[Course]]] = field(default_factory=dict)
    """By rank, then by step of the sample; in order of issue."""
    alone: dict[int, int] = field(default_factory=dict)
    """By rank: how many operations lack partners in other records."""
    impossible: dict[int, int] = field(default_factory=dict)
    """By rank: how many ended before the last rank had begun, so that they are not what they were taken for."""


def turns(records: Sequence[Record], met: Iterable[Meeting], clock_of: Mapping[str, Clock]) -> Turns:
    """The courses of all sampled operations. O(operations).

    Args:
        records: one a rank.
        met: their operations.
        clock_of: by host.
    """
    found = Turns()
    clock = {record.header.rank: clock_of[record.header.host] for record in records}
    unsure = {rank: each.precision_ns for rank, each in clock.items()}
    only_one_host = len(clock_of) == 1
    recorded = {(record.header.rank, step.number): step for record in records for step in record.steps}
    ends: dict[tuple[int, int], _Passes] = {}
    held = {
        (record.header.rank, step.number): held_up(step)
        for record in records
        for step in record.steps
        if any(span.phase == "profiler" for span in step.spans)
    }

    def late_ns(rank: int, step: int, issued_ns: int) -> int:
        """By how much this rank issued something later than without torch's profiler."""
        by, until_ns = held.get((rank, step), (0, 0))
        return by if issued_ns < until_ns else 0

    for meeting in met:
        if not meeting.is_whole:
            for rank, operation in meeting.parts:
                _add(found, rank, meeting.step, Course(operation, operation.issued_ns, None, False))
                found.alone[rank] = found.alone.get(rank, 0) + 1
            continue
        parts = meeting.parts
        if only_one_host:
            issues = [operation.issued_ns for _, operation in parts]
        else:
            issues = [clock[rank].on_first(operation.issued_ns) for rank, operation in parts]
        if meeting.kind is Kind.SEND:
            (sender, send), (receiver, receive) = parts
            wait = issues[0] - issues[1]
            by = [late_ns(rank, meeting.step, operation.issued_ns) for rank, operation in parts]
            allowed = unsure[sender] + unsure[receiver]
            # gloo's ends when the script waits for it, which may be long after the bytes have come.
            wrong_ns = sum(clock[rank].likely_wrong_ns for rank in (sender, receiver))
            moved_ns = max(0, receive.ended_ns - receive.issued_ns - wait + round(wrong_ns))
            _add(found, sender, meeting.step, Course(send, send.issued_ns, None, True, longest_ns=moved_ns))
            _judge(found, receiver, meeting.step, receive, wait, wait - by[0] + by[1], sender, allowed)
            continue
        # Of those that issued together the lowest rank: parts are in order of rank.
        at = max(range(len(parts)), key=issues.__getitem__)
        usual = issues
        if held:
            usual = [
                issue - late_ns(rank, meeting.step, one.issued_ns)
                for issue, (rank, one) in zip(issues, parts, strict=True)
            ]
        for each, (rank, operation) in enumerate(parts):
            here: Sequence[int] = range(len(parts))
            if meeting.kind is Kind.ROOTED:
                # Data flow from or to a root only: a rank whose end came earlier did not wait for those that issued later.
                end = issues[each] + operation.ended_ns - operation.issued_ns
                here = [other for other in here if issues[other] < end] or [each]
            last = at if meeting.kind is not Kind.ROOTED else max(here, key=issues.__getitem__)
            wait = without = issues[last] - issues[each]
            if held:
                without = max(usual[other] for other in here) - usual[each]
                if without < wait:  # else the profiler made nobody wait
                    last = max(here, key=usual.__getitem__)
            sure = unsure[rank] + unsure[parts[last][0]] if meeting.kind is Kind.ALL else None
            _judge(found, rank, meeting.step, operation, wait, without, parts[last][0], sure)
            step = recorded.get((rank, meeting.step))
            if operation.purpose == SYNC and step is not None:
                key = rank, meeting.step
                if key not in ends:
                    ends[key] = _Passes(step)
                courses = found.courses[rank][meeting.step]
                courses[-1] = ends[key].ended(courses[-1])
    for steps in found.courses.values():
        for courses in steps.values():
            courses.sort(
                key=lambda course: (course.operation.issued_ns, course.operation.ended_ns, course.operation.name)
            )
    return found


def _judge(
    found: Turns,
    rank: int,
    step: int,
    operation: Operation,
    wait_ns: int,
    usual_ns: int,
    last: int,
    unsure_ns: float | None,
) -> None:
    """Add an operation that waits so long for the last rank, and for ``usual_ns`` without torch's profiler. It must end later, if
    ``unsure_ns`` says how wrong clocks may be."""
    length = operation.ended_ns - operation.issued_ns
    if unsure_ns is not None and wait_ns > length + unsure_ns + GRAIN_NS:
        found.impossible[rank] = found.impossible.get(rank, 0) + 1
        _add(found, rank, step, Course(operation, operation.issued_ns, None, False))
        return
    wait_ns = max(0, min(wait_ns, length))
    profiler_ns = wait_ns - max(0, min(usual_ns, wait_ns))
    whom = last if wait_ns > profiler_ns else None
    _add(found, rank, step, Course(operation, operation.issued_ns + wait_ns, whom, True, profiler_ns))


class _Passes:
    """The backward passes of a step. DDP has waited for its sums when one ends."""

    def __init__(self, step: Step) -> None:
        self._passes = backward_passes(step)
        self._waited_ns: dict[tuple[str, str], int] = {}
        """By operation and group: when the last marked wait began."""
        for wait in step.waits:
            key = wait.operation, wait.group
            self._waited_ns[key] = max(self._waited_ns.get(key, 0), wait.start_ns)

    def ended(self, course: Course) -> Course:
        """With the pass, if no wait after that is for it. A backend's thread may note the end later: it first runs what a hook of
        the script makes of the result, and then waits for the interpreter's lock."""
        operation = course.operation
        which = pass_at(self._passes, operation.issued_ns)
        if which < 0 or not course.is_known or "/" in operation.group:  # of a GradientReducer, which may wait later
            return course
        end_ns = self._passes[which][1]
        keys = [(name, group) for name in (operation.name, "") for group in (operation.group, "")]
        is_waited_for_later = any(self._waited_ns.get(key, -1) >= end_ns for key in keys)
        if not 0 < operation.ended_ns - end_ns <= LOCK_NS or is_waited_for_later:
            return course
        return course._replace(turn_ns=min(course.turn_ns, end_ns), longest_ns=end_ns - operation.issued_ns)


def _add(found: Turns, rank: int, step: int, course: Course) -> None:
    found.courses.setdefault(rank, {}).setdefault(step, []).append(course)


LOCK_NS = 5_000_000
"""For so long another of Python's threads keeps the interpreter's lock."""
GRAIN_NS = 10_000
"""torch's profiler writes microseconds, and its clock is converted."""
