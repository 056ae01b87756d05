"""When a training thread stands still for what moves: communication at each moment, and waits without a mark."""

from __future__ import annotations

import bisect
import heapq
import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock.profiling.between import GAP_NS, Kind
from penstock.profiling.intervals import Piece, overlaps, union, without
from penstock.profiling.phases import backward_passes, marked_waits
from penstock.profiling.record import Sample, Step
from penstock.profiling.turns import Course

__all__ = ["WAKE_NS", "Last", "flight", "standing"]


def flight(courses: Iterable[Course], start_ns: int, end_ns: int, *, is_usual: bool = False) -> list[Piece[Kind]]:
    """The timeline of a rank's communication: at each moment with operations, the one that counts. O(n log n).

    Wire before wait, wait before operations without partners; of several the oldest.

    Args:
        is_usual: leave out the end of each wait, as much as torch's profiler made it longer.
    """
    # Each operation is one or two pieces; at each moment the piece of the best rank counts.
    pieces: list[tuple[int, int, tuple[int, int, int], Kind]] = []
    for at, course in enumerate(courses):
        issued, ended, turn = course.operation.issued_ns, course.ended_ns, course.turn_ns
        if not course.is_known:
            pieces.append((issued, ended, (2, issued, at), (course.purpose, "unknown", None)))
            continue
        waited = turn - course.profiler_ns if is_usual else turn
        pieces.append((issued, waited, (1, issued, at), (course.purpose, "wait", course.last)))
        pieces.append((turn, ended, (0, issued, at), (course.purpose, "wire", None)))
    pieces = [(max(a, start_ns), min(b, end_ns), c, d) for a, b, c, d in pieces if max(a, start_ns) < min(b, end_ns)]
    pieces.sort(key=lambda piece: piece[0])
    moments = sorted({moment for piece in pieces for moment in piece[:2]})
    active: list[tuple[tuple[int, int, int], int, Kind]] = []
    found: list[Piece[Kind]] = []
    coming = 0
    for start, end in itertools.pairwise(moments):
        while coming < len(pieces) and pieces[coming][0] <= start:
            heapq.heappush(active, (pieces[coming][2], pieces[coming][1], pieces[coming][3]))
            coming += 1
        while active and active[0][1] <= start:
            heapq.heappop(active)
        if not active:
            continue
        kind = active[0][2]
        if found and found[-1][1] == start and found[-1][2] == kind:
            found[-1] = (found[-1][0], end, kind)
        else:
            found.append((start, end, kind))
    return found


def standing(
    step: Step, sample: Sample, waits: list[Piece[tuple[str, str]]], moving: list[Piece[Kind]]
) -> list[Piece[None]]:
    """When the thread stood still in a backward pass without a mark, as DDP does in C++: no operator runs, but communication
    does, for `GAP_NS` and longer; and then, until it has its processor again, for up to `WAKE_NS`.

    A pass without any operator of this thread tells nothing: autograd works on CUDA tensors in a thread of its own.
    """
    if not sample.busy or not moving:
        return []
    busy = [(start, end, None) for start, end in sample.busy]
    backward = backward_passes(step)
    ran = {piece for *_, piece, _ in overlaps([(a, b, (a, b, None)) for a, b, _ in backward], busy)}
    idle = without([piece for piece in backward if piece in ran], busy)
    still = union((start, end, None) for start, end, _, _ in overlaps(idle, union(moving)))
    long = [piece for piece in without(still, waits) if piece[1] - piece[0] >= GAP_NS]
    awaking = union((start, end + WAKE_NS, None) for start, end, _ in long)
    return without(union((start, end, None) for start, end, _, _ in overlaps(idle, awaking)), waits)


@dataclass(frozen=True)
class Last:
    """A thread that stands still in a backward pass once it has issued the last operation there, and not before, as DDP does."""

    awake_ns: int
    """For so much longer than something moves; less than 0: it begins that much later."""

    @classmethod
    def of(
        cls, steps: Sequence[Step], samples: Mapping[int, Sample], courses: Mapping[int, list[Course]]
    ) -> Last | None:
        """None: in samples it stands still at other times, too. Of `_SEVERAL` or more it may in one: a thread of the backend's
        may have had this one's processor."""
        lengths = []
        for step in steps:
            own, waits = courses.get(step.number, []), marked_waits(step)
            moving = flight(own, step.start_ns, step.end_ns)
            shown = _length(standing(step, samples[step.number], waits, moving))
            lengths.append((shown, _length(cls(0).standing(step, own, waits, moving)), step.end_ns - step.start_ns))
        found = cls._of_lengths(lengths)
        if found is None and len(lengths) >= _SEVERAL:
            usual = statistics.median(shown - guessed for shown, guessed, _ in lengths)
            lengths.remove(max(lengths, key=lambda each: abs(each[0] - each[1] - usual)))
            found = cls._of_lengths(lengths)
            if found is not None and found.awake_ns < 0:  # the others stand still for less: that does not show the rule
                return None
        return found

    @classmethod
    def _of_lengths(cls, lengths: Sequence[tuple[int, int, int]]) -> Last | None:
        """
        Args:
            lengths: of each sample: for how long it stands still, for how long after the last operation, and of the step.
        """
        differ = [shown - guessed for shown, guessed, _ in lengths if guessed]
        awake_ns = min(round(statistics.median(differ)), WAKE_NS) if differ else 0
        off = sum(abs(shown - guessed - (awake_ns if guessed else 0)) for shown, guessed, _ in lengths)
        all_shown, _, all_steps = (sum(each) for each in zip(*lengths, strict=True)) if lengths else (0, 0, 0)
        most = _LAST * all_shown + max(GAP_NS * len(lengths), _OF_STEPS * all_steps)
        return cls(awake_ns) if off <= most else None

    def standing(
        self, step: Step, courses: Sequence[Course], waits: list[Piece[tuple[str, str]]], moving: list[Piece[Kind]]
    ) -> list[Piece[None]]:
        """As the function of that name, for a step without a sample."""
        issued = sorted(course.operation.issued_ns for course in courses)
        pieces = []
        for start, end, _ in backward_passes(step):
            at = bisect.bisect_left(issued, end) - 1
            if at >= 0 and issued[at] >= start:
                pieces.append((min(issued[at] + max(0, -self.awake_ns), end), end, None))
        longer = union((start, end + max(0, self.awake_ns), None) for start, end, _ in moving)
        return without(union((start, end, None) for start, end, _, _ in overlaps(pieces, longer)), waits)


def _length(timeline: Iterable[Piece[None]]) -> int:
    return sum(end - start for start, end, _ in timeline)


WAKE_NS = 5_000_000
"""After which a thread that has waited runs again, where processors are few: as long as Python's threads keep the interpreter."""

_LAST = 0.1
"""Of the time for which samples stand still: as much may lie elsewhere than after the last operation."""

_SEVERAL = 3
"""From so many samples on, one may differ from the rule."""

_OF_STEPS = 0.01
"""Of the time of sampled steps: as much may be pauses between operators, while something moves that nothing waits for."""
