"""What a GPU did in a sampled step: kernels and copies of torch's profiler, each with the phase in which it was launched.

A kernel runs later than the call that launched it, while the training thread is in another phase, and NCCL's kernels hold the
device until the other ranks are there. So of a step on a GPU it is the device's timeline that is divided, as of a trace of
torch.profiler (`readers/timeline.py`), and operations are NCCL's kernels.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any, NamedTuple

from penstock.profiling.intervals import Piece, overlaps
from penstock.profiling.readers.collectives import from_kernel, is_kernel
from penstock.profiling.readers.timeline import device_spans
from penstock.profiling.record import Span, Step, Wait

__all__ = ["Kernel", "Launches", "is_on_device", "ran"]

_KINDS = ("kernel", "concurrent_kernel", "gpu_memcpy", "gpu_memset")
"""Kineto's activities of a device that are work. Others are annotations, and the device's own synchronisation."""


class Kernel(NamedTuple):
    """What a device ran: a kernel, a copy or a fill."""

    name: str
    start_ns: int
    end_ns: int
    launched_ns: int
    phase: str

    @property
    def operation(self) -> str:
        """The collective that it is part of, or nothing."""
        return from_kernel(self.name) if is_kernel(self.name) else ""


def is_on_device(event: Any) -> bool:
    """Whether an event of Kineto is of a device, and not of the host."""
    return getattr(event.device_type(), "name", "CPU") != "CPU"


class Launches:
    """Which call of the host each event of a device comes from."""

    def __init__(self, timeline: Sequence[Piece[str]]) -> None:
        self._timeline = timeline
        """The training thread's phases. The engine's threads run while it stands in a backward pass."""
        self._starts = [piece[0] for piece in timeline]
        self._calls: dict[int, tuple[int, int]] = {}
        self._issued: list[tuple[int, int, int]] = []
        """Operations of NCCL: when each was issued, its bytes, and those of a number in it."""

    def called(self, event: Any, start_ns: int) -> None:
        """An event of the host."""
        if event.correlation_id() and not event.linked_correlation_id():
            self._calls[event.correlation_id()] = start_ns, event.start_thread_id()

    def issued(self, start_ns: int, length: int, element: int) -> None:
        """An operation of NCCL. Its kernel is launched after that, and before the next one is issued."""
        self._issued.append((start_ns, length, element))

    def size(self, launched_ns: int) -> tuple[int, int]:
        """Of a kernel's operation: bytes, and those of a number."""
        self._issued.sort()
        index = bisect.bisect_right(self._issued, launched_ns, key=lambda each: each[0]) - 1
        return self._issued[index][1:] if index >= 0 else (0, 0)

    def kernel(self, event: Any, start_ns: int, threads: set[int | None]) -> Kernel | None:
        """An event of a device, if that is work. ``threads``: those that train."""
        kind = event.activity_type() if hasattr(event, "activity_type") else ""
        if kind not in _KINDS if kind else event.is_user_annotation():
            return None
        launched_ns, thread = self._calls.get(event.linked_correlation_id(), (start_ns, None))
        phase = self._phase(launched_ns) if thread in threads and thread is not None else ""
        return Kernel(event.name(), start_ns, start_ns + event.duration_ns(), launched_ns, phase)

    def _phase(self, at_ns: int) -> str:
        index = bisect.bisect_right(self._starts, at_ns) - 1
        return self._timeline[index][2] if index >= 0 and at_ns < self._timeline[index][1] else ""


def ran(
    kernels: Sequence[Kernel], moving: Sequence[Piece[None]], timeline: Sequence[Piece[str]], step: tuple[int, int, int]
) -> tuple[Step, list[Piece[None]]] | None:
    """The step on the device, and when it worked; None if the step launched nothing.

    It begins with its first kernel. What is launched in the next one is not known: it ends with its last kernel, or where the
    host ends it if that is later.

    Args:
        kernels: those that the step launched.
        moving: all operations.
        timeline: the training thread's phases.
        step: number, start and end on the host.
    """
    if not kernels:
        return None
    number, _, end_ns = step
    start = min(each.start_ns for each in kernels)
    end = max(end_ns, *(each.end_ns for each in kernels))
    work = sorted((each.start_ns, each.end_ns, each.phase) for each in kernels if not each.operation)
    loading = [(a, b, None) for a, b, phase in timeline if phase == "loading"]
    whole = [(start, end, None)]
    spans, waits, busy = device_spans(work, moving, loading, whole)
    within = overlaps(whole, [(span.start_ns, span.end_ns, span.phase) for span in spans])
    return (
        Step(
            number,
            start,
            end,
            tuple(Span(phase, a, b) for a, b, _, phase in within),
            tuple(Wait(a, b) for a, b, *_ in overlaps(whole, waits)),
        ),
        [(a, b, None) for a, b, *_ in overlaps(whole, busy)],
    )
