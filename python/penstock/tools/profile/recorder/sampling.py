"""Samples: torch's profiler in some steps, the same on all ranks. Between them it runs without operators (`watching.py`)."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import statistics
import threading
import time
from collections.abc import Callable

from penstock.profiling.phases import phases
from penstock.profiling.record import Event, Sample, Step, Watch
from penstock.tools.profile.recorder import slots
from penstock.tools.profile.recorder.collectives import Calls
from penstock.tools.profile.recorder.errors import is_of_script
from penstock.tools.profile.recorder.kineto import Call, Window, sample
from penstock.tools.profile.recorder.profiler import Profiler, goes_on, is_used_by_script, skip_destructors
from penstock.tools.profile.recorder.settling import settled
from penstock.tools.profile.recorder.slots import LEAD, SLOT, Distance
from penstock.tools.profile.recorder.watching import Watching

__all__ = ["Sampling"]

SHARE = 0.01
"""Of the time that samples may cost."""

_PROBE = 2
"""A step before the first sample, whose events are counted if it is long."""

_PATIENCE_S, _LATE_PATIENCE_S, _LAST_PATIENCE_S = 0.2, 0.02, 2.0
"""For operations that were issued while the profiler ran: at the end of the sampled step, of later ones, where it must stop."""
_SAID = 128
"""Steps for which the profiler waits, and then that is told."""
_LONG, _LEAST_NS, _NEVER = 5, 200_000_000, 1 << 63

_MANY = 100_000
"""Events of a step. With the shapes of tensors torch's profiler takes 5 KB for each when it stops, and there are two steps."""
_MOST, _EVENT_BYTES, _MEMORY_SHARE = 2_000_000, 1800, 4
"""Without shapes: 10^6 took 1.75 GB when they had been read. They may take a fourth of the memory that is free."""
_EVENT_NS = 20_000
"""An event makes a step longer by less. What else makes it longer, as an evaluation, is none of the profiler's."""
_PROBED_NS = 300_000_000
"""A step that is shorter has no more than about 150,000 events: 10^6 take 2 s."""
_WAITS = (
    "an operation that began while torch's profiler ran did not end, as a receive that nobody sends for, or a send that nobody "
    "waits for: there are no samples until it has"
)
_LOST = "a backward pass failed in which DistributedDataParallel may have sums in flight: there are no more samples"
_YIELDS = "the script runs torch's profiler itself: there are no samples while it does"


@dataclasses.dataclass
class _Over:
    """A step that was sampled."""

    step: Step
    log: list[Call]
    hints: list[Call]


class Sampling:
    """Decides which steps are samples, and runs the profiler in them, and in watches.

    The distance between samples is a power of two. Each rank finds its own from what samples cost it. Where ranks differ, the
    rank with the longer distance samples some of the steps of the other, so that nothing need be agreed. So it is with watches.
    """

    def __init__(self, put: Callable[[Sample | Watch | Event], object]) -> None:
        self._put = put
        self.distance = Distance()
        self._watching = Watching(put)
        self._told = 0
        self._profiler: Profiler | None = None
        self._target = 0
        """The step that is the sample, or is to be, or the last of a watch: at its end the profiler stops."""
        self._over: _Over | None = None
        """The step that was sampled, while the profiler waits for what is in flight."""
        self._cost = self._longer = 0
        """Of the sample that runs, so far: what was measured, and by how much its steps are longer than usual."""
        self._plain: collections.deque[int] = collections.deque(maxlen=16)
        """Durations of the last steps without a profiler."""
        self._is_plain = False
        self._said: set[str] = set()
        self._is_off = False
        self._lead = LEAD
        """Steps for which the profiler runs: one, and without shapes, where a step has many events."""
        self._was_probed = False
        self.until_ns = _NEVER
        """A sample that runs for longer is given up: an evaluation in it would fill the memory with events."""

    @property
    def is_running(self) -> bool:
        return self._profiler is not None

    def wants(self, number: int) -> bool:
        """Whether there is something to do at the end of that step."""
        if self._profiler is not None:
            return self._profiler.is_paused or number >= self._target
        begins = number == _PROBE - 1 or self._begins(number) is not None or self._watching.begins(number) is not None
        return begins and not self._is_off

    def step_ended(self, step: Step, calls: Calls) -> None:
        """Start or stop what is due. Whatever is wrong with the profiler, or with us, the training goes on."""
        self.passed(step.end_ns - step.start_ns)
        try:
            # One that has stopped is followed by none at once: what it has seen begin, as the optimizer's step around this call,
            # notes its end in memory that is gone, if any profiler runs by then.
            if self._profiler is not None:
                if self._profiler.is_paused:
                    self._paused_step(self._profiler, calls)
                elif step.number >= self._target:
                    self._step_ended(self._profiler, step, calls)
            elif step.number == _PROBE - 1 and step.end_ns - step.start_ns >= _PROBED_NS:
                self._start(_PROBE, calls)
            elif (target := self._begins(step.number)) is not None:
                self._start(target, calls)
            elif (target := self._watching.begins(step.number)) is not None:
                self._start(target, calls, before=step)
        except Exception as error:
            self.abandon(calls)
            self._failed(error)

    def passed(self, duration_ns: int) -> None:
        """A step of that length has ended."""
        if self._profiler is not None and not self._profiler.is_paused and not self._watching.is_running:
            usual = statistics.median(self._plain) if self._plain else duration_ns
            self._longer += max(0, round(duration_ns - usual))
        elif self._is_plain:
            self._plain.append(duration_ns)
        self._is_plain = True

    def abandon(self, calls: Calls) -> None:
        """Make nothing of what the profiler has seen. It stops once nothing is in flight, which may be later."""
        self._over, self._watching.is_over = None, False
        try:
            if self._profiler is not None:
                self._pause(self._profiler, calls)
                self._finish(calls, _PATIENCE_S)
        except Exception as error:
            self._failed(error)

    def yields(self, calls: Calls) -> None:
        """There can be one profiler, and the script starts its own."""
        if self._profiler is not None:
            self._say(_YIELDS)
            if self._watching.is_running and not self._profiler.is_paused:
                self._cut_off(self._profiler, calls)
            else:
                self.abandon(calls)
        try:
            if self._profiler is not None:
                settled(calls.in_flight, _LAST_PATIENCE_S)
                self._read_watch(self._stop(calls), time.monotonic_ns())
        except Exception as error:
            self._failed(error)

    def forks(self, calls: Calls) -> None:
        """The child would have a profiler that never ends, such as a DataLoader's worker for all its life. One that is paused it
        can stop itself."""
        if self._profiler is None or self._profiler.is_paused:
            return
        if self._watching.is_running:
            self._cut_off(self._profiler, calls)
        else:
            self.give_up("the script forked in a sampled step, so that there is no sample of it", calls)

    def born(self, calls: Calls) -> None:
        """In a fork, where nothing is in flight."""
        own, self._profiler = self._profiler, None
        self._watching.is_running = False
        if own is not None:
            calls.in_flight.clear()
            with contextlib.suppress(Exception):
                own.drop()

    def end(self, calls: Calls) -> None:
        """The script ends. A sample that waits for nothing but functional collectives is made: most often they have ended long
        ago, and were not waited for."""
        try:
            if self._profiler is not None:
                if self._profiler.thread is not threading.current_thread():
                    self._profiler = None  # the thread that trained has ended: nobody else can stop it
                    skip_destructors()
                    return
                if self._watching.is_running and not self._profiler.is_paused:
                    self._watch_ended(self._profiler, time.monotonic_ns(), calls)
                self._pause(self._profiler, calls)
                self._finish(calls, _PATIENCE_S, is_last=True)
                if self._profiler is not None:
                    skip_destructors()
                    if not calls.in_flight.are_lost:
                        self._say(_WAITS)
        except Exception as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        """Raises what is the script's own."""
        self._is_plain = False
        if is_of_script(error):
            raise error
        self._is_off = True
        self._say(f"torch's profiler failed, so there are no more samples: {type(error).__name__}: {error}")

    def give_up(self, why: str, calls: Calls) -> None:
        self.abandon(calls)
        self._is_plain = False
        self.distance.double()
        self._say(why)

    def lost(self, calls: Calls) -> None:
        """A backward pass has failed in which DDP may have launched sums, within C++: nobody knows when these have ended."""
        calls.in_flight.are_lost = True
        self.abandon(calls)
        self._say(_LOST)

    def too_long(self, calls: Calls) -> None:
        if self._watching.is_running and self._profiler is not None:
            self._cut_off(self._profiler, calls)
            return
        self.give_up(f"a sampled step took more than {_LONG} times the usual, so that there is no sample of it", calls)

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._put(Event(time.monotonic_ns(), "profiler", text))

    def _begins(self, number: int) -> int | None:
        """The sample for which the profiler starts at the end of that step."""
        target = number + (1 if self._was_probed and number < slots.EARLY[0] else self._lead)
        return target if self._is_sample(target) else None

    def _is_sample(self, number: int) -> bool:
        slot, place = divmod(number, SLOT)
        is_late = slot > 0 and self.distance.has(slot) and place == slots.place(slot)
        return is_late or number in slots.EARLY

    def _start(self, target: int, calls: Calls, *, before: Step | None = None) -> None:
        """
        Args:
            target: the last step in which the profiler runs.
            before: of a watch: the step that has just ended.
        """
        if is_used_by_script():
            self._say(_YIELDS)
            return
        if goes_on():
            self._say("a record_function goes on that began in a sample: there are no samples until it has ended")
            return
        began_ns = time.monotonic_ns()
        usual_ns = round(statistics.median(self._plain)) if self._plain else 0
        if before is not None:
            self._is_plain = False
            self._profiler = Profiler(operators=False)
            self._watching.started(before.end_ns)
            self.until_ns = began_ns + max(_LEAST_NS, (target - before.number) * _LONG * usual_ns)
        else:
            self._profiler = Profiler(shapes=target != _PROBE and self._lead == LEAD)
            self.until_ns = began_ns + max(_LEAST_NS, LEAD * _LONG * usual_ns)
        self._target = target
        calls.start(keep=before is None)
        self._cost, self._longer = time.monotonic_ns() - began_ns, 0

    def _step_ended(self, profiler: Profiler, step: Step, calls: Calls) -> None:
        """The sampled one, or the last of a watch."""
        if self._watching.is_running:
            self._watch_ended(profiler, step.end_ns, calls)
            self._finish(calls, _LATE_PATIENCE_S)
            return
        began_ns = time.monotonic_ns()
        profiler.step_ended()
        self._over, self.until_ns = _Over(step, *calls.stop()), _NEVER
        self._cost += time.monotonic_ns() - began_ns
        self._finish(calls, _PATIENCE_S)

    def _watch_ended(self, profiler: Profiler, until_ns: int, calls: Calls) -> None:
        began_ns = time.monotonic_ns()
        profiler.step_ended()
        calls.stop()
        self._watching.ended(until_ns)
        self.until_ns = _NEVER
        self._cost += time.monotonic_ns() - began_ns

    def _cut_off(self, profiler: Profiler, calls: Calls) -> None:
        """End the watch that runs here. What it has seen counts."""
        try:
            self._watch_ended(profiler, time.monotonic_ns(), calls)
            self._finish(calls, _PATIENCE_S)
        except Exception as error:
            self._failed(error)

    def _paused_step(self, profiler: Profiler, calls: Calls) -> None:
        """The profiler waits for operations of an earlier step: look ever less often whether a backend's threads are calm."""
        profiler.paused_steps += 1
        if profiler.paused_steps == _SAID and not calls.in_flight.is_empty() and not calls.in_flight.are_lost:
            self._say(_WAITS)
        if calls.in_flight.is_empty() and profiler.paused_steps >= profiler.try_at:
            profiler.try_at = 2 * profiler.paused_steps
            self._finish(calls, _LATE_PATIENCE_S)

    def _pause(self, profiler: Profiler, calls: Calls) -> None:
        if not profiler.is_paused:
            calls.stop()
            profiler.pause()
            self.until_ns = _NEVER

    def _finish(self, calls: Calls, patience_s: float, *, is_last: bool = False) -> None:
        """Stop the profiler, and read what it saw, unless something of it is in flight for longer: then at the end of a later
        step."""
        began_ns = time.monotonic_ns()
        self._is_plain = False  # the next step holds what this takes
        if not settled(calls.in_flight, patience_s, is_last=is_last):
            self._cost += time.monotonic_ns() - began_ns
            return
        profiler, over = self._stop(calls), self._over
        self._over = None
        self._read_watch(profiler, began_ns)
        if over is None:
            return
        if over.step.number == _PROBE:
            self._count(len(profiler.events()))
            return
        events = self._read(profiler, over, calls)
        self._cost += time.monotonic_ns() - began_ns + min(self._longer, events * _EVENT_NS)
        cost = self.distance.costs(self._cost, self._plain, SHARE)
        if over.step.number >= slots.EARLY[-1] and self.distance.steps != self._told and self._plain:
            self._told = self.distance.steps
            usual = statistics.median(self._plain)
            text = f"every {self._told} steps from here on: a sample costs {cost / 1e6:.1f} ms, a step takes {usual / 1e6:.1f}"
            self._put(Event(time.monotonic_ns(), "samples", text))

    def _read_watch(self, profiler: Profiler, began_ns: int) -> None:
        """If the profiler that has stopped was one.

        Args:
            began_ns: since when this costs time.
        """
        if self._watching.is_over:
            self._watching.is_over = False
            self._watching.read(profiler, lambda: self._cost + time.monotonic_ns() - began_ns, self._plain)

    def _stop(self, calls: Calls) -> Profiler:
        """The profiler that ran."""
        assert self._profiler is not None
        profiler, self._profiler = self._profiler, None
        self._watching.is_running = False
        calls.in_flight.clear()
        try:
            profiler.stop()
        except BaseException:
            skip_destructors()
            raise
        return profiler

    def _read(self, profiler: Profiler, over: _Over, calls: Calls) -> int:
        """Write down what the profiler saw. Returns the number of its events."""
        step, events = over.step, profiler.events()
        clock, thread = profiler.clock(events)
        if clock is None:
            text = f"the clocks differ by another time at the end of step {step.number} than at its start: no sample"
            self._put(Event(time.monotonic_ns(), "clock", text))
        else:
            backward = [(span.start_ns, span.end_ns) for span in step.spans if span.phase == "backward"]
            log = over.log + calls.reductions(step.start_ns)
            known = calls.reducers(), over.hints, calls.default()
            window = Window(step.number, step.start_ns, step.end_ns, log, backward, *known, phases(step))
            shown = sample(events, window, clock, thread)
            self._put(shown)
            if shown.operations:
                self._watching.sampled(profiler, events, clock, step)
        return len(events)

    def _count(self, events: int) -> None:
        """Before the first sample of long steps: how many events a step has. If it can be sampled in part only, or not at all,
        that is said."""
        self._was_probed = True
        most = min(_MOST, _free_bytes() // (_MEMORY_SHARE * _EVENT_BYTES))
        if events > most:
            self._is_off = True
            self._say(
                f"a step has {events:,} events of torch's profiler, and there is memory for {most:,}: there are no samples"
            )
        elif events > _MANY:
            self._lead = 1
            self._say(
                f"a step has {events:,} events of torch's profiler: samples are few, and without the sizes of what DDP sends"
            )


def _free_bytes() -> int:
    """Memory for one rank of this host, as far as that is known."""
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return (int(line.split()[1]) << 10) // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return _NEVER
