"""One rank, from the first mark of its training to its end."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from penstock.profiling.record import Event, Header, Step
from penstock.tools.profile.recorder.collectives import Calls
from penstock.tools.profile.recorder.conversion import costs
from penstock.tools.profile.recorder.counters import Counters
from penstock.tools.profile.recorder.identity import Identity, make_room
from penstock.tools.profile.recorder.iterations import Iterations
from penstock.tools.profile.recorder.marks import MOST_MARKS, Marks, Usage
from penstock.tools.profile.recorder.sampling import Sampling
from penstock.tools.profile.recorder.writer import Writer

__all__ = ["PROFILED", "Recording"]

PROFILED = "PENSTOCK_PROFILED"
"""In the environment of a rank's children: they are no ranks."""

_MOST_EVENTS = 100
"""Of a kind. A script may fork for each epoch and save for each step."""


class Recording:
    """What is recorded of this process, which is a rank. Its methods are called on the training thread."""

    def __init__(self, folder: Path, identity: Identity) -> None:
        self.folder = folder
        self.identity = identity
        self.thread = threading.get_ident()
        self.phase = ""
        """What the thread did last in this step: forward, backward or optimizer."""
        self.calls = Calls()
        self.marks = Marks(time.monotonic_ns(), _usage())
        self.iterations = Iterations()
        self.steps = 0
        """Of all optimizers."""
        self._optimizers: list[tuple[Any, types.FrameType]] = []
        """That step now, each with the frame which called."""
        self._events: dict[str, int] = {}
        identity.describe(torch)
        self._counters = Counters(folder, identity)
        self.writer = Writer(self._header, self._path, self._counters.look)
        self.sampling = Sampling(self.writer.put)
        os.environ[PROFILED] = str(os.getpid())

    # -------------------------------------------------------------------------------------------------------- phases

    @contextlib.contextmanager
    def span(self, phase: str) -> Iterator[None]:
        self.marks.enter(phase, time.monotonic_ns())
        try:
            yield
        finally:
            self.marks.leave(phase, time.monotonic_ns())

    def event(self, kind: str, text: str = "") -> None:
        count = self._events[kind] = self._events.get(kind, 0) + 1
        if count <= _MOST_EVENTS:
            self.writer.put(Event(time.monotonic_ns(), kind, text[:2000]))

    # ---------------------------------------------------------------------------------------------------- optimizers

    def optimizer_begins(self, optimizer: Any, caller: types.FrameType) -> None:
        """Of an optimizer that another one wraps, such as Horovod's, both tell. One that raised did not tell of its end."""
        while self._optimizers and not _is_within(caller, self._optimizers[-1][1]):
            self._optimizers.pop()
        self._optimizers.append((optimizer, caller))
        if len(self._optimizers) == 1:
            self.phase = "optimizer"
            self.marks.enter("optimizer", time.monotonic_ns())

    def optimizer_ends(self, optimizer: Any, caller: types.FrameType) -> None:
        while self._optimizers:
            _, frame = self._optimizers.pop()
            if frame is caller:
                break
        if not self._optimizers:
            self.marks.leave("optimizer", time.monotonic_ns())
            self.stepped(optimizer)

    def stepped(self, optimizer: Any) -> None:
        """An optimizer has stepped, or a GradScaler has found that it must not."""
        self.steps += 1
        if not self.iterations.stepped(optimizer):
            return
        step, left_out = self.marks.end_step(time.monotonic_ns(), _usage())
        self.phase = ""
        self._keep(step, left_out)
        if self.sampling.wants(step.number):
            with self.span("profiler"):
                self.sampling.step_ended(step, self.calls)
        else:
            self.sampling.passed(step)
        if step.number == 0 and self.identity.world > 1:
            # Within the steps that count as warm-up. It is not known where there is no memory left for it, or where a mode of
            # torch's does not let it be.
            with self.span("profiler"), contextlib.suppress(Exception):
                self.event("float16", "{:.3f} ns a byte before it is sent, {:.3f} after".format(*costs()))
        self.calls.step_ended()

    def _keep(self, step: Step, left_out: int) -> None:
        self.writer.put(step)
        if left_out:
            self.event("left out", f"{left_out} marks of step {step.number}: a step keeps {MOST_MARKS}")

    # ----------------------------------------------------------------------------------------------------------- end

    def end(self) -> None:
        """The process ends. A script that never stepped is one step."""
        self.sampling.abandon(self.calls)
        if self.marks.number == 0:
            self._keep(*self.marks.end_step(time.monotonic_ns(), _usage()))
        error = getattr(sys, "last_value", None)
        if error is not None:
            self.event("exception", f"{type(error).__name__}: {error}")
        self.event("end")
        self.writer.close()

    def _header(self) -> Header:
        return self.identity.header()

    def _path(self, header: Header) -> Path:
        return make_room(self.folder / f"rank-{header.rank}.jsonl")


def _usage() -> Usage:
    return Usage(time.thread_time_ns(), time.process_time_ns())


def _is_within(frame: types.FrameType | None, outer: types.FrameType) -> bool:
    while frame is not None:
        if frame is outer:
            return True
        frame = frame.f_back
    return False
