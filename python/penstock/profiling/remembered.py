"""Operations of steps without a sample, as Penstock's engine remembers them (docs/design/profile-division.md, "From steps to the
mean")."""

from __future__ import annotations

import bisect
import collections
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock.profiling.clocks import Clock
from penstock.profiling.intervals import union
from penstock.profiling.matching import Kind, Meeting, canonical, kind
from penstock.profiling.record import Ended, Operation, Record
from penstock.profiling.turns import Course, turns

__all__ = ["remembered"]


def remembered(
    records: Sequence[Record], met: Iterable[Meeting], clock_of: Mapping[str, Clock]
) -> dict[int, dict[int, list[Course]]]:
    """By rank, then by step: the courses of all operations of a step that no sample shows, in order of issue. O(n log n).

    Only steps of which that is known to be all, and of ranks whose samples show the same operations as the engine: so none that
    sends or receives, for instance, and none with operations that the engine splits.

    Args:
        records: one a rank.
        met: their sampled operations.
        clock_of: by host.
    """
    members: dict[str, int] = {}
    for meeting in met:
        for _, operation in meeting.parts:
            members[operation.group] = max(members.get(operation.group, 0), operation.ranks, len(meeting.parts))
    memories = {record.header.rank: memory for record in records if (memory := _Memory.of(record)) is not None}
    together: dict[tuple[str, int], list[tuple[int, int, Operation]]] = {}
    for rank, memory in memories.items():
        for step, found in memory.steps.items():
            for channel, operation in found:
                together.setdefault((channel, operation.number), []).append((rank, step, operation))
    made, torn = [], set()
    for parts in together.values():
        ranks = {rank for rank, _, _ in parts}
        group, step = parts[0][2].group, parts[0][1]
        if len(parts) == len(ranks) == members.get(group, len(ranks)) and all(each[1] == step for each in parts):
            both = tuple((rank, operation) for rank, _, operation in sorted(parts, key=lambda part: part[0]))
            made.append(Meeting(step, kind(both[0][1].name), both, True))
        else:
            torn |= {(rank, step) for rank, step, _ in parts}
    judged = turns(records, made, clock_of).courses
    known: dict[int, dict[int, list[Course]]] = {}
    for rank, memory in memories.items():
        for step in memory.whole:
            courses = judged.get(rank, {}).get(step, [])
            if (rank, step) not in torn and all(course.is_known for course in courses):
                known.setdefault(rank, {})[step] = courses
    return known


@dataclass
class _Memory:
    """Of a rank's engine."""

    steps: dict[int, list[tuple[str, Operation]]]
    """Operations with their channels, by the step in which they were issued."""
    whole: list[int]
    """Steps without a sample whose operations are all known."""

    @classmethod
    def of(cls, record: Record) -> _Memory | None:
        """None: the engine has told nothing, or its operations are not those of the samples."""
        if not record.endings or not record.samples:
            return None
        steps = sorted(record.steps, key=lambda step: step.start_ns)
        starts = [step.start_ns for step in steps]
        ended: dict[int, list[Ended]] = {}
        others: set[int] = set()
        for one in (one for line in record.endings for one in line.operations):
            at = bisect.bisect_right(starts, one.issued_ns) - 1
            if at >= 0 and one.issued_ns < steps[at].end_ns:
                if kind(one.name) in _COLLECTIVE:
                    ended.setdefault(steps[at].number, []).append(one)
                else:
                    others.add(steps[at].number)
        untold = _untold(record)
        is_whole = set()
        for step in steps:
            at = bisect.bisect_right(untold, step.start_ns, key=lambda hole: hole[1])
            if step.number not in others and (at == len(untold) or untold[at][0] >= step.end_ns):
                is_whole.add(step.number)
        sampled = {sample.step: sample.operations for sample in record.samples if not sample.dropped}
        examples = {}
        for number in sampled.keys() & is_whole:
            pairs = _pairs(sampled[number], ended.get(number, []))
            if pairs is None:
                return None
            examples[number] = pairs
        if not examples:
            return None
        shown = _Shown(pair for pairs in examples.values() for pair in pairs)
        operations = {number: [(one.channel, shown.as_shown(one)) for one in found] for number, found in ended.items()}
        samples = {sample.step for sample in record.samples}
        return cls(operations, sorted(is_whole - samples))


_FOREVER = 1 << 63
_COLLECTIVE = (Kind.ALL, Kind.EXCHANGE, Kind.ROOTED)


def _untold(record: Record) -> list[tuple[int, int, None]]:
    """When operations may have been issued of which nothing is told: in order, without overlap."""
    before = earlier = 0
    holes: list[tuple[int, int, None]] = []
    for line in record.endings:
        if line.missing:
            holes.append((earlier, line.until_ns, None))
        if line.until_ns > before:
            earlier, before = before, line.until_ns
    return union([*holes, (before, _FOREVER, None)])


def _pairs(sampled: Iterable[Operation], ended: Iterable[Ended]) -> list[tuple[Operation, Ended]] | None:
    """The operations of a sample with what the engine tells of them. None: they are not the same, or not of all ranks."""
    shown: dict[tuple[str, str], list[Operation]] = {}
    for operation in sampled:
        if kind(operation.name) not in _COLLECTIVE:
            return None
        shown.setdefault((operation.group, operation.name), []).append(operation)
    told: dict[tuple[str, str], list[Ended]] = {}
    for one in ended:
        told.setdefault((one.group, canonical(one.name)), []).append(one)
    if {key: len(each) for key, each in shown.items()} != {key: len(each) for key, each in told.items()}:
        return None
    return [
        pair
        for key, each in shown.items()
        for pair in zip(
            sorted(each, key=lambda one: one.issued_ns), sorted(told[key], key=lambda one: one.issued_ns), strict=True
        )
    ]


class _Shown:
    """How samples show operations of the engine: by how much earlier they are issued and later they end, by group and name."""

    def __init__(self, pairs: Iterable[tuple[Operation, Ended]]) -> None:
        issued: dict[tuple[str, str], list[int]] = {}
        ended: dict[tuple[str, str], list[int]] = {}
        purposes: dict[tuple[str, str], collections.Counter[str]] = {}
        self._ranks: dict[str, int] = {}
        for operation, one in pairs:
            key = operation.group, operation.name
            issued.setdefault(key, []).append(operation.issued_ns - one.issued_ns)
            ended.setdefault(key, []).append(operation.ended_ns - one.ended_ns)
            purposes.setdefault(key, collections.Counter())[operation.purpose] += 1
            self._ranks[operation.group] = operation.ranks
        self._purpose = {key: counted.most_common(1)[0][0] for key, counted in purposes.items()}
        self._issued = {key: round(statistics.median(each)) for key, each in issued.items()}
        # Some are noted later than that, by up to the 5 ms for which another of Python's threads keeps the interpreter.
        self._ended = {key: min(each) for key, each in ended.items()}

    def as_shown(self, one: Ended) -> Operation:
        name = canonical(one.name)
        key = one.group, name
        issued_ns = max(0, one.issued_ns + self._issued.get(key, 0))
        ended_ns = max(issued_ns, one.ended_ns + self._ended.get(key, 0))
        ranks, purpose = self._ranks.get(one.group, 0), self._purpose.get(key, "")
        return Operation(name, one.group, one.number, issued_ns, ended_ns, 0, ranks, None, purpose)
