"""Operations of watched steps (`record.Watch`), named as samples show them."""

from __future__ import annotations

import bisect
import collections
from collections.abc import Sequence

from penstock.profiling.intervals import union
from penstock.profiling.matching import canonical
from penstock.profiling.record import Ended, Operation, Ran, Record, Step

__all__ = ["watched"]

_Counts = frozenset[tuple[str, int]]
"""How many operations of each name a step has."""


def watched(record: Record, steps: Sequence[Step]) -> tuple[list[Ended], list[tuple[int, int, None]]]:
    """What a rank's watches tell, as Penstock's engine would. O(n log n).

    An operation is shown by name alone. Its group is that of the one in its place of a sample with as many operations of each
    name. Where such samples differ, or there is none, the operations of a step have no name either.

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
            found.setdefault(steps[at].number, []).append(one)
    shown: dict[_Counts, dict[str, list[Operation]] | None] = {}
    for sample in record.samples:
        names: dict[str, list[Operation]] = {}
        for operation in sorted(sample.operations, key=lambda each: each.issued_ns):
            names.setdefault(canonical(operation.name), []).append(operation)
        counts = frozenset((name, len(each)) for name, each in names.items())
        known = shown.setdefault(counts, names)
        if known is not None and _named(known) != _named(names):
            shown[counts] = None
    ended = []
    for number, each in sorted(found.items()):
        each.sort(key=lambda one: one.began_ns)
        counts = frozenset(collections.Counter(canonical(one.name) for one in each).items())
        ended += _ended(number, each, shown.get(counts) or {})
    return ended, _holes(record)


_Named = dict[str, list[tuple[str, int | None, int]]]


def _named(shown: dict[str, list[Operation]]) -> _Named:
    return {name: [(one.group, one.peer, one.tag) for one in each] for name, each in shown.items()}


def _ended(step: int, ran: Sequence[Ran], shown: dict[str, list[Operation]]) -> list[Ended]:
    places: collections.Counter[str] = collections.Counter()
    numbers: collections.Counter[tuple[str, str, int | None]] = collections.Counter()
    found = []
    for one in ran:
        name = canonical(one.name)
        if name not in shown:
            found.append(Ended("", 0, "", "", one.began_ns, one.ended_ns))
            continue
        like = shown[name][places[name]]
        # A send and a receive are one operation.
        channel = f"{step} {like.group} {name if like.peer is None else like.tag}"
        key = name, channel, like.peer
        found.append(Ended(channel, numbers[key], like.group, one.name, one.began_ns, one.ended_ns, like.peer))
        places[name] += 1
        numbers[key] += 1
    return found


def _holes(record: Record) -> list[tuple[int, int, None]]:
    before, holes = 0, []
    for start, end, _ in union((watch.since_ns, watch.until_ns, None) for watch in record.watches):
        holes.append((before, start, None))
        before = end
    return [*holes, (before, 1 << 63, None)]
