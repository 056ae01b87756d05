"""Operations of steps without a sample, as Penstock's engine remembers them, or as torch's profiler sees gloo's without
their calls (docs/design/profile-division.md, "From steps to the mean")."""

from __future__ import annotations

import bisect
import collections
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from penstock.profiling.clocks import Clock
from penstock.profiling.intervals import union
from penstock.profiling.matching import Kind, Meeting, canonical, kind
from penstock.profiling.record import Ended, Operation, Record
from penstock.profiling.turns import Course, turns
from penstock.profiling.watched import watched

__all__ = ["remembered"]


def remembered(
    records: Sequence[Record], met: Iterable[Meeting], clock_of: Mapping[str, Clock]
) -> dict[int, dict[int, list[Course]]]:
    """By rank, then by step: the courses of all operations of a step that no sample shows, in order of issue. O(n log n).

    Only steps of which that is known to be all, and of ranks whose samples show the same operations as the engine: so none with
    operations that the engine splits, for instance, or with receives from any source, whose samples do not say from which.

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
    together: dict[tuple[str, int, tuple[int, int] | None], list[tuple[int, int, Operation]]] = {}
    for rank, memory in memories.items():
        for step, found in memory.steps.items():
            for channel, operation in found:
                key = channel, operation.number, _way(rank, operation)
                together.setdefault(key, []).append((rank, step, operation))
    made, torn = [], set()
    for (_, _, way), parts in together.items():
        ranks = {rank for rank, _, _ in parts}
        group, step = parts[0][2].group, parts[0][1]
        expected = members.get(group, len(ranks)) if way is None else 2
        if len(parts) == len(ranks) == expected and all(each[1] == step for each in parts):
            # Of a message the sender comes first.
            order = sorted(parts, key=lambda part: part[0] if way is None else way.index(part[0]))
            both = tuple((rank, operation) for rank, _, operation in order)
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


def _way(rank: int, operation: Operation) -> tuple[int, int] | None:
    """Of a rank's send or receive: from which rank to which."""
    if operation.peer is None:
        return None
    return (rank, operation.peer) if kind(operation.name) is Kind.SEND else (operation.peer, rank)


@dataclass
class _Memory:
    """Of a rank's engine, or of its watches."""

    steps: dict[int, list[tuple[str, Operation]]]
    """Operations with their channels, by the step in which they were issued."""
    whole: list[int]
    """Steps without a sample whose operations are all known."""

    @classmethod
    def of(cls, record: Record) -> _Memory | None:
        """None: nothing is told, or other operations than those of the samples."""
        if not record.samples:
            return None
        steps = sorted(record.steps, key=lambda step: step.start_ns)
        if record.endings:
            told, untold = [one for line in record.endings for one in line.operations], _untold(record)
        elif record.watches:
            told, untold = watched(record, steps)
        else:
            return None
        starts = [step.start_ns for step in steps]
        ended: dict[int, list[Ended]] = {}
        others: set[int] = set()
        for one in told:
            at = bisect.bisect_right(starts, one.issued_ns) - 1
            if at >= 0 and one.issued_ns < steps[at].end_ns:
                if _is_known(one):
                    ended.setdefault(steps[at].number, []).append(one)
                else:
                    others.add(steps[at].number)
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
        shown = _Shown(examples.values(), is_of_engine=bool(record.endings))
        operations = {number: list(shown.as_shown(found)) for number, found in ended.items()}
        samples = {sample.step for sample in record.samples}
        return cls(operations, sorted(is_whole - samples))


_FOREVER = 1 << 63


def _is_known(one: Operation | Ended) -> bool:
    """Whether it is told with which of other ranks it is one operation."""
    found = kind(one.name)
    return found is not Kind.OTHER and (one.peer is not None) == (found in (Kind.SEND, Kind.RECEIVE))


def _untold(record: Record) -> list[tuple[int, int, None]]:
    """When operations may have been issued of which nothing is told: in order, without overlap."""
    before = earlier = 0
    holes: list[tuple[int, int, None]] = []
    for line in record.endings:
        if line.missing:
            holes.append((min(earlier, line.since_ns or earlier), line.until_ns, None))
        if line.until_ns > before:
            earlier, before = before, line.until_ns
    return union([*holes, (before, _FOREVER, None)])


_Key = tuple[str, str, int | None]
"""Operations that are alike, by group, name and peer."""


def _key(one: Operation | Ended) -> _Key:
    return one.group, canonical(one.name), one.peer


def _pairs(sampled: Iterable[Operation], ended: Iterable[Ended]) -> list[tuple[Operation, Ended]] | None:
    """The operations of a sample with what the engine tells of them. None: they are not the same, or not of all ranks."""
    shown: dict[_Key, list[Operation]] = {}
    for operation in sampled:
        if not _is_known(operation):
            return None
        shown.setdefault(_key(operation), []).append(operation)
    told: dict[_Key, list[Ended]] = {}
    for one in ended:
        told.setdefault(_key(one), []).append(one)
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
    """How samples show operations of the engine: by how much earlier they are issued and later they end, of operations that are
    alike; and for what they are, by their place among as many of a step."""

    def __init__(self, steps: Iterable[Sequence[tuple[Operation, Ended]]], *, is_of_engine: bool) -> None:
        issued: dict[_Key, list[int]] = {}
        ended: dict[_Key, list[int]] = {}
        self._purposes: dict[tuple[_Key, tuple[int, int]], collections.Counter[str]] = {}
        self._ranks: dict[str, int] = {}
        for pairs in steps:
            counts = collections.Counter(_key(one) for _, one in pairs)
            for operation, one in pairs:
                key = _key(one)
                if is_of_engine:  # watches tell times as samples do
                    issued.setdefault(key, []).append(operation.issued_ns - one.issued_ns)
                    ended.setdefault(key, []).append(operation.ended_ns - one.ended_ns)
                for place in ((counts[key], operation.number), _ANY):
                    self._purposes.setdefault((key, place), collections.Counter())[operation.purpose] += 1
                self._ranks[operation.group] = operation.ranks
        self._issued = {key: round(statistics.median(each)) for key, each in issued.items()}
        # Some are noted later than that, by up to the 5 ms for which another of Python's threads keeps the interpreter. And a
        # sample shows all operations of a batch as one.
        self._ended = {key: max(-NOTED_NS, min(*each, NOTED_NS)) for key, each in ended.items()}

    def as_shown(self, of_step: Sequence[Ended]) -> Iterator[tuple[str, Operation]]:
        """All operations of a step, with their channels."""
        counts = collections.Counter(map(_key, of_step))
        places: collections.Counter[_Key] = collections.Counter()
        for one in sorted(of_step, key=lambda one: one.issued_ns):
            key = _key(one)
            issued_ns = max(0, one.issued_ns + self._issued.get(key, 0))
            ended_ns = max(issued_ns, one.ended_ns + self._ended.get(key, 0))
            known = self._purposes.get((key, (counts[key], places[key]))) or self._purposes.get((key, _ANY)) or {"": 1}
            purpose = max(known, key=known.__getitem__)
            places[key] += 1
            ranks = self._ranks.get(one.group, 0)
            shown = Operation(key[1], one.group, one.number, issued_ns, ended_ns, 0, ranks, one.peer, purpose)
            yield one.channel, shown


_ANY = (0, 0)
NOTED_NS = 1_000_000
"""The engine notes an end earlier than the sample does by less: torch and Python lie between."""
