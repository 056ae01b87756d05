"""Arithmetic on intervals of time. A *timeline* is a list of (start, end, value), in order, without overlap or empty pieces."""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

__all__ = ["clipped", "innermost", "overlaps", "union", "without"]

A = TypeVar("A")
B = TypeVar("B")

Piece = tuple[int, int, A]


def clipped(pieces: Iterable[Piece[A]], start: int, end: int) -> list[Piece[A]]:
    """What of the pieces lies between two moments."""
    return [(max(a, start), min(b, end), value) for a, b, value in pieces if max(a, start) < min(b, end)]


def innermost(pieces: Sequence[Piece[A]]) -> list[Piece[A]]:
    """The timeline of pieces that lie in each other: at each moment the value of the one that began last.

    Of those that began together it is the one that ends first, and of equal ones the last. O(n log n).
    """
    ordered = sorted(range(len(pieces)), key=lambda at: (pieces[at][0], -pieces[at][1], at))
    if all(pieces[a][1] <= pieces[b][0] for a, b in itertools.pairwise(ordered)):
        return [pieces[at] for at in ordered if pieces[at][0] < pieces[at][1]]
    moments = sorted({moment for a, b, _ in pieces for moment in (a, b)})
    active: list[tuple[int, int, int]] = []
    found: list[Piece[A]] = []
    source = -1
    coming = 0
    for start, end in itertools.pairwise(moments):
        while coming < len(ordered) and pieces[ordered[coming]][0] <= start:
            at = ordered[coming]
            heapq.heappush(active, (-pieces[at][0], pieces[at][1], -at))
            coming += 1
        while active and active[0][1] <= start:
            heapq.heappop(active)
        if not active:
            continue
        at = -active[0][2]
        if found and source == at and found[-1][1] == start:
            found[-1] = (found[-1][0], end, pieces[at][2])
        else:
            found.append((start, end, pieces[at][2]))
        source = at
    return found


def overlaps(first: Sequence[Piece[A]], second: Sequence[Piece[B]]) -> Iterator[tuple[int, int, A, B]]:
    """Where two timelines both have a value. O(n) in the first and in what of the second lies beside it."""
    i = 0
    j = max(0, bisect.bisect_right(second, first[0][0], key=lambda piece: piece[0]) - 1) if first else 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            yield start, end, first[i][2], second[j][2]
        if first[i][1] <= second[j][1]:
            i += 1
        else:
            j += 1


def union(pieces: Iterable[Piece[A]]) -> list[Piece[None]]:
    """All that lies in any of the pieces; those that touch are joined."""
    joined: list[Piece[None]] = []
    for start, end, _ in sorted(pieces, key=lambda piece: piece[:2]):
        if start >= end:
            continue
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end), None)
        else:
            joined.append((start, end, None))
    return joined


def without(first: Sequence[Piece[A]], second: Sequence[Piece[B]]) -> list[Piece[A]]:
    """What of a timeline lies outside another one. O(n) as `overlaps`."""
    left: list[Piece[A]] = []
    j = max(0, bisect.bisect_right(second, first[0][0], key=lambda piece: piece[0]) - 1) if first else 0
    for start, end, value in first:
        while j < len(second) and second[j][1] <= start:
            j += 1
        at = j
        while at < len(second) and second[at][0] < end:
            if start < second[at][0]:
                left.append((start, second[at][0], value))
            start = max(start, second[at][1])
            at += 1
        if start < end:
            left.append((start, end, value))
    return left
