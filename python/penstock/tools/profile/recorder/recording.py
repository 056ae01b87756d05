"""One rank, from the first mark of its training to its end."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from penstock.errors import Config
from penstock.profiling.record import Event, Header, Step, read
from penstock.texts import of_exception
from penstock.tools.profile.recorder.changes import has_gradient_reducer
from penstock.tools.profile.recorder.collectives import Calls
from penstock.tools.profile.recorder.conversion import costs
from penstock.tools.profile.recorder.counters import Counters
from penstock.tools.profile.recorder.engine import Memory, readings
from penstock.tools.profile.recorder.identity import Identity, make_room
from penstock.tools.profile.recorder.iterations import Iterations
from penstock.tools.profile.recorder.journal import Journal
from penstock.tools.profile.recorder.marks import MOST_MARKS
from penstock.tools.profile.recorder.optimizers import Optimizers, is_within
from penstock.tools.profile.recorder.sampling import Sampling
from penstock.tools.profile.recorder.slots import SLOT
from penstock.tools.profile.recorder.writer import Writer
from penstock.tools.profile.run import PERIOD_MS

__all__ = ["MAYBE", "PROFILED", "Recording", "is_recorded"]

PROFILED = "PENSTOCK_PROFILED"
"""In the environment of a rank's children: its process. They are no ranks; the process itself is one again after an `exec`."""
MAYBE = "maybe"
"""Instead, as long as it has called modules and not trained: it may be a launcher, and its children that train are the ranks."""

_UNDECIDED_S = 5.0
"""After which the host's counters are read although nothing was trained: the script only evaluates, most likely."""

_OPTIMIZERS = (
    "the last {} steps of optimizers count as one step: a step ends with the optimizer that stepped first, and where the script "
    "makes a new one each round, none of them steps 16 times. Make it once, and keep it"
)

_EXIT_PATIENCE_S = 0.5

_MOST_EVENTS = 100
"""Of a kind. A script may fork for each epoch and save for each step."""

_MOST_STEPS = 1 << 15
"""From this step on only some are recorded. Each takes a reader 5 KB and 0.12 ms a rank: 1.3 GB and 31 s for 8 ranks so far."""

_SOME_STEPS = (
    "steps from {:,} on: half of them are recorded, from {:,} on a quarter, and so on; means are over what is recorded"
)


class Recording:
    """What is recorded of this process, which is a rank. Its methods are called on the training thread."""

    def __init__(self, folder: Path, identity: Identity, period_ms: str = str(PERIOD_MS)) -> None:
        """
        Args:
            period_ms: of the host's counters.
        """
        self.folder = folder
        self.identity = identity
        self.thread = threading.get_ident()
        self.is_rank = False
        """Whether it has trained, or joined others. Until then nothing is written."""
        self.phase = ""
        """What the thread did last in this step: forward, backward or optimizer."""
        self.calls = Calls()
        self.marks = Journal(time.monotonic_ns(), time.thread_time_ns())
        self.iterations = Iterations()
        self._optimizers = Optimizers()
        self._pass: types.FrameType | None = None
        """What called the backward pass that runs."""
        self._is_over = False
        self._events: dict[str, int] = {}
        identity.describe(torch)
        self._counters = Counters(folder, identity, period_ms)
        self.writer = Writer(self._header, self._path, self._beat)
        self._memory = Memory(self.writer.put, self.calls.label)
        self.calls.reductions = self._memory.reductions
        self.sampling = Sampling(self.writer.put)
        os.environ[PROFILED] = MAYBE

    def trains(self) -> None:
        """It does, or has joined others: this is a rank."""
        if not self.is_rank:
            self.is_rank = True
            os.environ[PROFILED] = str(os.getpid())
            self._counters.announce()

    def joins(self) -> None:
        """It has joined others."""
        self.trains()
        self._memory.watch()

    def moves(self) -> None:
        """The training goes on in this thread."""
        self.thread = threading.get_ident()
        self._optimizers.moved()

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

    def leaves_out(self, text: str) -> None:
        """Say once that something is not recorded."""
        if text not in self._events:
            self._events[text] = 1
            self.event("left out", text)

    # ------------------------------------------------------------------------------------- backward passes, optimizers

    def is_in_pass(self) -> bool:
        """Whether a backward pass runs. One whose end was missed, since a signal's handler raised within its mark, does not."""
        if not self.marks.open or not self.marks.is_in("backward"):
            return False
        if threading.get_ident() != self.thread or (self._pass and is_within(sys._getframe(1), self._pass)):
            return True
        self.marks.forget("backward")
        return False

    def backward_begins(self, caller: types.FrameType) -> None:
        self._pass = caller
        self.calls.comes("backward")
        self.phase = "backward"
        self._optimizers.pass_begins()
        self.marks.enter("backward", time.monotonic_ns())

    def backward_ends(self, *, has_failed: bool = False) -> None:
        self._pass = None
        now_ns = time.monotonic_ns()
        self.marks.leave("backward", now_ns)
        self._optimizers.pass_ends()
        if has_failed and self.calls.is_profiled and self.calls.sums_in_passes():
            self.sampling.lost(self.calls)
        self.passed(now_ns)
        if self._optimizers.is_pass_last:
            self._optimizers.is_pass_last = False
            self._end_step()

    def optimizer_begins(self, caller: types.FrameType) -> None:
        if self._optimizers.begins(caller):
            self.phase = "optimizer"
            if self.marks.open and self.marks.is_in("optimizer"):  # one that raised
                self.marks.forget("optimizer")
            self.marks.enter("optimizer", time.monotonic_ns())

    def optimizer_ends(self, optimizer: Any, caller: types.FrameType) -> None:
        if self._optimizers.ends(caller):
            self.marks.leave("optimizer", time.monotonic_ns())
            self.stepped(optimizer)

    def stepped(self, optimizer: Any) -> None:
        """An optimizer has stepped, or a GradScaler has found that it must not."""
        if self.iterations.stepped(optimizer):
            if self.is_in_pass():
                self._optimizers.is_pass_last = True
            else:
                self._end_step()

    def _end_step(self) -> None:
        marks, now_ns = self.marks, time.monotonic_ns()
        number, duration_ns = marks.number, now_ns - marks.start_ns
        marks.end_step(now_ns, time.thread_time_ns())
        self.phase = ""
        # In a step that is not recorded no sample begins.
        if (self.sampling.is_running or is_recorded(number)) and self.sampling.wants(number):
            step = self._settle(now_ns)
            with self.span("profiler"):
                self.sampling.step_ended(step, self.calls)
        else:
            if marks.is_due(now_ns):
                self._settle(now_ns)
            self.sampling.passed(duration_ns)
        if number == 0:
            self.writer.hurry()
        if number == 0 and self.identity.world > 1:
            # Within the steps that count as warm-up. It is not known where there is no memory left for it, or where a mode of
            # torch's does not let it be.
            with self.span("profiler"), contextlib.suppress(Exception):
                self.event("float16", "{:.3f} ns a byte before it is sent, {:.3f} after".format(*costs()))
            if self.calls.reducers() is None and not has_gradient_reducer():
                self.event("no ddp")
        self.calls.step_ended()

    def _settle(self, now_ns: int) -> Step:
        """Keep the steps that have ended. Returns the last."""
        ended = self.marks.settle(now_ns)
        for step, left_out in ended:
            if not is_recorded(step.number):
                self.leaves_out(_SOME_STEPS.format(_MOST_STEPS, 2 * _MOST_STEPS))
                continue
            self.writer.put(step)
            if left_out:
                self.event("left out", f"{left_out} marks of step {step.number}: a step keeps {MOST_MARKS}")
        return ended[-1][0]

    def passed(self, now_ns: int) -> None:
        """Some time has, in which no step may have ended."""
        # Within a pass nobody knows what DDP has in flight.
        if now_ns > self.sampling.until_ns and not self.marks.is_in("backward"):
            self.sampling.too_long(self.calls)

    # ----------------------------------------------------------------------------------------------------------- end

    def end(self) -> None:
        """The process ends. A script that never stepped is one step."""
        try:
            self.sampling.end(self.calls)
            now_ns = time.monotonic_ns()
            if self.marks.number == 0:
                self.marks.end_step(now_ns, time.thread_time_ns())
            if self.marks.has_ended:
                self._settle(now_ns)
            self._read_engine()
            if left := self.iterations.left:
                self.leaves_out(_OPTIMIZERS.format(left))
            error = getattr(sys, "last_value", None)
            if error is not None:
                self.failed(error)
        finally:  # whatever is wrong here, what there is is written
            self.event("end")
            self._is_over = True
            if not self.is_rank and self._has_child():
                self.writer.drop()
            self.writer.close()

    def breaks_off(self) -> None:
        """The process ends without its end (``os._exit``): what there is so far is written, if no disk hangs."""
        if self.thread == threading.get_ident() and self.marks.has_ended:
            self._settle(time.monotonic_ns())
        self.writer.hurry()
        self.writer.close(_EXIT_PATIENCE_S)

    def failed(self, error: BaseException) -> None:
        """The script does, or the function of it that this process runs."""
        self.event("exception", of_exception(error))

    def _has_child(self) -> bool:
        """Whether a rank of this number has begun since."""
        try:
            path = self.folder / f"rank-{self.identity.rank}.jsonl"
            with path.open(encoding="utf-8") as file:
                return read(path, io.StringIO(file.readline())).header.start_ns > self.identity.start_ns
        except (OSError, ValueError, Config):
            return False

    def _beat(self) -> None:
        if self.is_rank or time.monotonic_ns() > self.identity.start_ns + 1e9 * _UNDECIDED_S:
            self._counters.look()
        self._read_engine()

    def _read_engine(self) -> None:
        # Before its first step a record with readings would be taken for a host's.
        if self.marks.number > 0:
            if (counted := readings()) is not None:
                self.writer.put(counted)
            self._memory.look()

    def _header(self) -> Header | None:
        return self.identity.header() if self.is_rank or self._is_over else None

    def _path(self, header: Header) -> Path:
        return make_room(self.folder / f"rank-{header.rank}.jsonl")


def is_recorded(number: int) -> bool:
    """Whether a rank writes down a step: all of the first `_MOST_STEPS`, and half as many each time that their number doubles.
    Those of a slot are written or left out together, so a sample has the steps beside it.

    The number alone decides, so all ranks keep the same steps. *Why a multiple of the square root of 2?* It spreads the slots
    evenly. Were each second or fourth one kept, what a script does every 1,024 steps would be in all that are kept, or in none.
    """
    if number < _MOST_STEPS:
        return True
    part = (number // _MOST_STEPS).bit_length()  # one of 2 ** part
    return (number // SLOT * 0x6A09E667 & 0xFFFFFFFF) >> (32 - part) == 0
