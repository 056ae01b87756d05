"""When each operation's wait ends and its bytes begin to move, on the clock of the rank that recorded it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.profiling.breakdown import OTHER, PURPOSES
from penstock.profiling.clocks import Clock
from penstock.profiling.matching import Kind, Meeting
from penstock.profiling.record import Operation, Record

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
            _add(found, sender, meeting.step, Course(send, send.issued_ns, None, True))
            _judge(found, receiver, meeting.step, receive, wait, sender, unsure[sender] + unsure[receiver])
            continue
        at = max(range(len(parts)), key=lambda each: (issues[each], -parts[each][0]))
        for each, (rank, operation) in enumerate(parts):
            last = at
            if meeting.kind is Kind.ROOTED:
                # Data flow from or to a root only: a rank whose end came earlier did not wait for those that issued later.
                end = issues[each] + operation.ended_ns - operation.issued_ns
                here = [other for other in range(len(parts)) if issues[other] < end]
                last = max(here, key=lambda other: (issues[other], -parts[other][0]), default=each)
            is_sure = meeting.kind is Kind.ALL
            allowed = unsure[rank] + unsure[parts[last][0]] if is_sure else None
            _judge(found, rank, meeting.step, operation, issues[last] - issues[each], parts[last][0], allowed)
    for steps in found.courses.values():
        for courses in steps.values():
            courses.sort(
                key=lambda course: (course.operation.issued_ns, course.operation.ended_ns, course.operation.name)
            )
    return found


def _judge(
    found: Turns, rank: int, step: int, operation: Operation, wait_ns: int, last: int, unsure_ns: float | None
) -> None:
    """Add an operation that waits so long for the last rank. It must end later, if `unsure_ns` says how wrong clocks may be."""
    length = operation.ended_ns - operation.issued_ns
    if unsure_ns is not None and wait_ns > length + unsure_ns + GRAIN_NS:
        found.impossible[rank] = found.impossible.get(rank, 0) + 1
        _add(found, rank, step, Course(operation, operation.issued_ns, None, False))
        return
    wait_ns = max(0, min(wait_ns, length))
    _add(found, rank, step, Course(operation, operation.issued_ns + wait_ns, last if wait_ns else None, True))


def _add(found: Turns, rank: int, step: int, course: Course) -> None:
    found.courses.setdefault(rank, {}).setdefault(step, []).append(course)


GRAIN_NS = 10_000
"""torch's profiler writes microseconds, and its clock is converted."""
