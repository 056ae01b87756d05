"""What the training thread does in a step, by its marks alone: a phase at every moment."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from penstock.profiling.breakdown import OTHER, PHASES
from penstock.profiling.intervals import Piece, clipped, innermost, union, without
from penstock.profiling.record import Step

__all__ = ["backward_passes", "held_up", "marked_waits", "pass_at", "phases", "profiler_ns"]


def phases(step: Step) -> list[Piece[str]]:
    """The timeline of a step: every moment has one of `PHASES`. Waits are not looked at. O(n log n)."""
    marks = clipped(
        ((span.start_ns, span.end_ns, span.phase if span.phase in PHASES else OTHER) for span in step.spans),
        step.start_ns,
        step.end_ns,
    )
    marks.sort(key=lambda mark: (mark[0], -mark[1]))
    outer: list[Piece[str]] = []
    inner: list[Piece[str]] = []
    until = step.start_ns
    for mark in marks:
        (outer if mark[1] > until else inner).append(mark)
        until = max(until, mark[1])
    outer = _evaluated(outer)
    known = innermost(_spread(outer) + inner)
    if step.end_ns == step.start_ns:
        return []
    joined: list[Piece[str]] = []
    for start, end, phase in sorted(known + without([(step.start_ns, step.end_ns, OTHER)], known)):
        if joined and joined[-1][2] == phase:
            joined[-1] = (joined[-1][0], end, phase)
        else:
            joined.append((start, end, phase))
    return joined


def marked_waits(step: Step) -> list[Piece[tuple[str, str]]]:
    """The timeline of marked waits, with operation and group. Of waits in each other the innermost that names its operation."""
    waits = clipped(
        ((wait.start_ns, wait.end_ns, (wait.operation, wait.group)) for wait in step.waits), step.start_ns, step.end_ns
    )
    named = innermost([wait for wait in waits if wait[2][0]])
    rest = innermost([wait for wait in waits if not wait[2][0]])
    return sorted(named + without(rest, named)) if rest else named


def backward_passes(step: Step) -> list[Piece[None]]:
    """The timeline of a step's backward passes; those within others are part of them."""
    spans = ((span.start_ns, span.end_ns, None) for span in step.spans if span.phase == "backward")
    return union(clipped(spans, step.start_ns, step.end_ns))


def pass_at(passes: Sequence[Piece[None]], time_ns: int) -> int:
    """Which of them, from 0 on, goes on at a moment; -1: none."""
    at = bisect.bisect_right(passes, time_ns, key=lambda piece: piece[0]) - 1
    return at if at >= 0 and time_ns < passes[at][1] else -1


def held_up(step: Step) -> tuple[int, int]:
    """For how long torch's profiler, which starts and stops between steps, made this rank late in a step, and until when it was
    late by that: until it first waited for the others, in a marked wait or at the end of a backward pass."""
    ends = [wait.end_ns for wait in step.waits] + [span.end_ns for span in step.spans if span.phase == "backward"]
    until_ns = min(ends, default=step.end_ns)
    return profiler_ns(step, until_ns), until_ns


def profiler_ns(step: Step, until_ns: int) -> int:
    """For how long torch's profiler starts and stops in a step, from its begin to a moment."""
    spans = ((span.start_ns, span.end_ns, None) for span in step.spans if span.phase == "profiler")
    return sum(end - start for start, end, _ in union(clipped(spans, step.start_ns, until_ns)))


def _evaluated(outer: list[Piece[str]]) -> list[Piece[str]]:
    """Loading for evaluation is evaluation: a batch that only evaluation uses until the next batch is loaded, and the empty one
    at a loader's end if evaluation was before."""
    found = list(outer)
    uses: set[str] = set()
    # From the end on: `uses` is what comes until the next loading.
    for at in range(len(outer) - 1, -1, -1):
        phase = outer[at][2]
        if phase in _USERS:
            uses.add(phase)
        elif phase == "loading":
            if uses == {"evaluation"}:
                found[at] = (*outer[at][:2], "evaluation")
            elif not uses:
                found[at] = (*outer[at][:2], "")
            uses = set()
    before = ""
    for at, (start, end, phase) in enumerate(found):
        if phase == "":
            found[at] = (start, end, "evaluation" if before == "evaluation" else "loading")
        elif phase in _USERS:
            before = phase
    return found


def _spread(outer: list[Piece[str]]) -> list[Piece[str]]:
    """With the gaps that belong to a phase: from a forward call to the backward pass, if only forward calls lie between, and
    between two evaluations."""
    found = list(outer)
    leads_to_backward = False
    for at in range(len(outer) - 2, -1, -1):
        (_, end, phase), (start, _, after) = outer[at], outer[at + 1]
        leads_to_backward = phase == "forward" and (after == "backward" or (after == "forward" and leads_to_backward))
        if end < start and (leads_to_backward or phase == after == "evaluation"):
            found.append((end, start, phase))
    return found


_USERS = {"forward", "backward", "evaluation", "optimizer"}
"""Phases that use a batch."""
