"""When the profiler may stop: once nothing runs that it has seen begin. Until then it is paused (`profiler.py`).

A backend's thread notes the end of an operation in the profiler's memory, which is free once the profiler has stopped: an
operation that ends later writes into what is another's by then, and the process dies of it (torch 2.15). DDP goes on as soon as
the result is there, some microseconds before that note.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["InFlight", "settled"]

_PRUNE = 16
_PAUSE_S = 0.001
_CALM = 3
"""Looks in a row that find no thread of a backend at work."""
_BACKENDS = ("pt_gloo",)
"""How the names of threads begin that note ends. penstock's callbacks do, which can be asked."""
_UNWAITED_S, _UNWAITED_LAST_S = 30.0, 2.0
"""After which a functional collective that nobody has waited for counts as ended: torch forgets it with the wait only. The second
where the script ends."""


def _none() -> int:
    return 0


_unwaited: Callable[[], int] = getattr(getattr(torch._C, "_distributed_c10d", None), "_get_work_registry_size", _none)
"""Functional collectives that nobody has waited for. They are launched in C++, where no `Work` is seen."""


class InFlight:
    """The operations that were issued while the profiler ran, and have not ended."""

    def __init__(self) -> None:
        self._works: dict[int, Any] = {}
        self._most = _PRUNE
        self._paused_s = 0.0
        self.are_lost = False
        """Whether there may be some that nobody can ask: a backward pass of DDP's has failed in their midst."""

    def add(self, work: Any) -> None:
        self._works[id(work)] = work
        if len(self._works) >= self._most:
            self.prune()
            self._most = _PRUNE + 2 * len(self._works)

    def waited(self, work: Any) -> None:
        """The script has waited for it. gloo's reduce_scatter, as of FSDP, never says itself that it is complete."""
        self._works.pop(id(work), None)

    def pause(self) -> None:
        """Operations issued from now on do not count."""
        self._paused_s = time.monotonic()

    def is_empty(self, *, is_last: bool = False) -> bool:
        """Whether all have ended, as far as that can be known. To be asked after `pause`.

        Args:
            is_last: whether the script ends.
        """
        self.prune()
        if self._works or self.are_lost:
            return False
        unwaited_s = _UNWAITED_LAST_S if is_last else _UNWAITED_S
        return _unwaited() == 0 or time.monotonic() > self._paused_s + unwaited_s

    def clear(self) -> None:
        self._works, self.are_lost = {}, False

    def prune(self) -> None:
        """Those that have ended must not keep their tensors."""
        self._works = {key: work for key, work in self._works.items() if not _has_ended(work)}


def _has_ended(work: Any) -> bool:
    try:
        return bool(work.is_completed())
    except Exception:  # failed, or of a kind that cannot tell
        return True


def settled(in_flight: InFlight, patience_s: float, *, is_last: bool = False) -> bool:
    """Wait until nothing is in flight, and no thread of a backend is at work. Whether that is so."""
    until_s, calm = time.monotonic() + patience_s, 0
    while True:
        time.sleep(_PAUSE_S)
        calm = calm + 1 if in_flight.is_empty(is_last=is_last) and not _is_at_work() else 0
        left_s = until_s - time.monotonic()
        if calm >= _CALM and _have_returned(max(0.0, left_s)):
            return True
        if left_s < 0:
            return False


def _have_returned(patience_s: float) -> bool:
    """Wait until penstock's callbacks have returned, which note ends: a thread that waits for the GIL does not look as if it
    were at work."""
    core = sys.modules.get("penstock._core")
    return core is None or core.settle_callbacks(patience_s)


def _is_at_work() -> bool:
    """Whether a thread of a backend runs, or could if it had a processor, or waits in the kernel, as for a page."""
    with contextlib.suppress(OSError):
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/stat", "rb") as file:
                name, _, rest = file.read().partition(b"(")[2].rpartition(b")")
                if rest[1:2] in (b"R", b"D") and name.decode(errors="replace").startswith(_BACKENDS):
                    return True
    return False
