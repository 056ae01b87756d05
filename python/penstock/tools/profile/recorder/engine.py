"""What Penstock's engine knows of this rank's operations, if there is one. It remembers the last ones (`penstock flight`),
whoever issued them. Of Penstock's own reducers (`GradientReducer`, the hook of DDP, the Horovod front) no call of
torch.distributed tells."""

from __future__ import annotations

import collections
import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from penstock.profiling.record import Ended, Endings, Event, Readings
from penstock.tools.profile.recorder.collectives import ALIKE
from penstock.tools.profile.recorder.kineto import Call

__all__ = ["AT_ONCE", "MOST", "Memory", "readings"]

_CHANNEL = re.compile(r"^(.*)/(rounds|buckets|sparse)\d*$")
"""Of a group: in which a reducer agrees on what is ready, and sums it."""

MOST = 200_000
"""Operations that are written of a run: 16 MB. Later ones are known in samples alone."""
_RECENT = 1024
"""Sums of reducers that a sample may ask for: as many as the engine remembers."""
AT_ONCE = 64
"""In a line. What makes lines into text holds the interpreter's lock meanwhile."""
_LATE = "the engine's operations from here on, but for those in samples: a record keeps {:,}"


def _engine() -> Any:
    # It may be just being imported.
    kind = getattr(sys.modules.get("penstock.runtime.process"), "Engine", None)
    return None if kind is None else kind.current


def readings() -> Readings | None:
    """What only this process can count: the bytes that its engine, if there is one, has read from other ranks' memory."""
    engine = _engine()
    if engine is None:
        return None
    values = {f"pid.{os.getpid()}.memory_read_bytes": float(engine.core.memory_read_bytes())}
    return Readings(time.monotonic_ns(), values)


_Label = Callable[[str], tuple[str, Sequence[int]]]
"""The name in records of a group, from its name, and its ranks in the job, in order; none if they are not known."""


class Memory:
    """Writes down what the engine remembers, of all steps. It is asked again and again, beside the training."""

    def __init__(self, put: Callable[[Endings | Event], bool], label: _Label) -> None:
        """
        Args:
            put: returns whether there was room.
        """
        self._put = put
        self._label = label
        self._lock = threading.RLock()  # a signal's handler may end the engine while this thread looks
        self._core: Any = None
        self._is_watching = False
        self._known: dict[str, tuple[str, Sequence[int]]] = {}
        """Groups by channel. When an engine stops, torch has forgotten their names."""
        self._reductions = collections.deque[Call](maxlen=_RECENT)
        self._until_ns = 0
        self._written = self._missing = self._since_ns = 0

    def watch(self) -> None:
        """See from now on which engine the process has, and take its memory before it stops."""
        process: Any = sys.modules.get("penstock.runtime.process")
        observe = getattr(process, "observe", None)  # it may be just being imported
        if observe is not None and not self._is_watching:
            self._is_watching = True
            observe(self._observed)

    def _observed(self, core: Any) -> None:
        # Nothing of this may break the script's group.
        with contextlib.suppress(Exception):
            self.look()
        if core is not None:
            self._known.clear()  # groups of another job may have the same names
        self._core = core

    def look(self) -> None:
        """Write what has ended since the last call."""
        self.watch()
        core = self._core
        if core is None:
            return
        with self._lock:
            now_ns = time.monotonic_ns()
            found, missing, since_ns = core.take_ended()
            if missing:
                self._since_ns = min(self._since_ns or since_ns, since_ns)
            self._missing += missing + len(found)  # until all are told, whatever happens
            ended = [self._ended(one) for one in found if one[1] is not None and (one[3] or one[2] not in ALIKE)]
            self._missing -= len(found)
            if self._written >= MOST:
                return
            for at in range(0, max(len(ended), 1), AT_ONCE):
                some = tuple(ended[at : at + AT_ONCE])
                # Only the last line says that all are told until now, and how many are not.
                is_last = at + AT_ONCE >= len(ended)
                line = Endings(self._until_ns, 0, some)
                if is_last:
                    line = Endings(now_ns, self._missing, some, self._since_ns)
                if not self._put(line):
                    self._missing += len(some)
                    self._since_ns = min([self._since_ns or now_ns, *(one.issued_ns for one in some)])
                elif is_last:
                    self._until_ns, self._missing, self._since_ns = now_ns, 0, 0
            self._written += len(ended)
            if self._written >= MOST:
                self._put(Event(now_ns, "left out", _LATE.format(MOST)))

    def reductions(self, start_ns: int) -> list[Call]:
        """What Penstock's own reducers have sent since then, as far as it has ended."""
        self.look()
        with self._lock:
            return [call for call in self._reductions if call.start_ns >= start_ns]

    def _ended(self, one: Any) -> Ended:
        channel, number, operation, length, issued_ns, ended_ns, message = one
        of_reducer = _CHANNEL.match(channel)
        if channel in self._known:
            group, ranks = self._known[channel]
        else:
            group, ranks = self._label(of_reducer[1] if of_reducer else channel)
            if of_reducer:
                group = f"{group}/{of_reducer[2]}"
            if ranks:  # else torch is still making it
                self._known[channel] = group, ranks
        if of_reducer:
            call = Call(operation, group, issued_ns, issued_ns, len(ranks), purpose="data-parallel sync", bytes=length)
            call.waited_ns = max(issued_ns, ended_ns)
            self._reductions.append(call)
        peer = None
        if message is not None and message[0] < len(ranks):
            peer, channel = ranks[message[0]], f"{channel}, tag {message[1]}"
        return Ended(channel, number, group, operation, issued_ns, ended_ns, peer)
