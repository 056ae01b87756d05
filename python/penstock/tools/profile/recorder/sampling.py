"""Samples: torch's profiler in some steps, the same on all ranks."""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import statistics
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd import profiler

from penstock.profiling.phases import phases
from penstock.profiling.record import Event, Sample, Step
from penstock.tools.profile.recorder.collectives import Calls
from penstock.tools.profile.recorder.errors import is_of_script
from penstock.tools.profile.recorder.kineto import Call, Window, sample
from penstock.tools.profile.recorder.reductions import reductions
from penstock.tools.profile.recorder.settling import InFlight, settled

__all__ = ["Sampling", "patch"]

EARLY = (4, 8, 16)
"""Steps that are sampled whatever it costs, so that a short run has three samples."""

SHARE = 0.01
"""Of the time that samples may cost."""

_PROBE = 2
"""A step before the first sample, whose events are counted if it is long."""

_LEAD = 2
"""Steps for which the profiler runs: the last is the sample, and the first has the profiler's own beginnings."""

_PATIENCE_S, _LAST_PATIENCE_S = 0.2, 2.0
"""For operations that were issued while the profiler ran."""
_LONG, _LEAST_NS, _NEVER = 5, 200_000_000, 1 << 63

_MANY = 100_000
"""Events of a step. With the shapes of tensors torch's profiler takes 5 KB for each when it stops, and there are two steps."""
_MOST, _EVENT_BYTES, _MEMORY_SHARE = 2_000_000, 1800, 4
"""Without shapes: 10^6 took 1.75 GB when they had been read. They may take a fourth of the memory that is free."""
_PROBED_NS = 300_000_000
"""A step that is shorter has no more than about 150,000 events: 10^6 take 2 s."""
_MOST_DRIFT_NS = 1_000_000
_MARK = "penstock.profile"
_MARKS = 3
"""At each end of a sample. The narrowest tells the difference of the clocks best."""


class Sampling:
    """Decides which steps are samples, and runs the profiler in them.

    The distance between samples is a power of two, and samples are its multiples. Each rank finds its own distance from what
    samples cost it. Where ranks differ, the rank with the longer distance samples some of the steps of the other, so that
    nothing need be agreed.
    """

    def __init__(self, put: Callable[[Sample | Event], None]) -> None:
        self._put = put
        self.distance = 2 * EARLY[-1]
        self._told = 0
        self._profile: Any = None
        self._target = self._wanted = 0
        """The step at whose end the profiler is to stop, and the one that is the sample."""
        self._began: list[tuple[int, int]] = []
        self._costs: collections.deque[int] = collections.deque(maxlen=3)
        self._cost = 0
        """Of the sample that runs, so far."""
        self._plain: collections.deque[int] = collections.deque(maxlen=16)
        """Durations of the last steps without a profiler."""
        self._is_plain = False
        self._said: set[str] = set()
        self._is_off = False
        self._lead = _LEAD
        """Steps for which the profiler runs: one, and without shapes, where a step has many events."""
        self._was_probed = False
        self.until_ns = _NEVER
        """A sample that runs for longer is given up: an evaluation in it would fill the memory with events."""

    @property
    def is_running(self) -> bool:
        return self._profile is not None

    def wants(self, number: int) -> bool:
        """Whether there is something to do at the end of that step."""
        if self._is_off or self._profile is not None:
            return not self._is_off
        return number == _PROBE - 1 or self._begins(number) is not None

    def step_ended(self, step: Step, calls: Calls) -> None:
        """Start or stop what is due. Whatever is wrong with the profiler, or with us, the training goes on."""
        self.passed(step.end_ns - step.start_ns)
        try:
            # One that has stopped is followed by none at once: what it has seen begin, as the optimizer's step around this call,
            # notes its end in memory that is gone, if any profiler runs by then.
            if self.is_running and self._wanted == _PROBE:
                self._count(calls)
            elif self.is_running:
                if step.number >= self._target:
                    self._stop(step, calls)
            elif step.number == _PROBE - 1 and step.end_ns - step.start_ns >= _PROBED_NS:
                self._start(_PROBE, calls)
            elif (target := self._begins(step.number)) is not None:
                self._start(target, calls)
        except Exception as error:
            self.abandon(calls)
            self._is_plain = False
            if is_of_script(error):
                raise
            self._is_off = True
            self._say(
                "profiler", f"torch's profiler failed, so there are no more samples: {type(error).__name__}: {error}"
            )

    def passed(self, duration_ns: int) -> None:
        """A step of that length has ended."""
        if self._profile is not None:
            usual = statistics.median(self._plain) if self._plain else duration_ns
            self._cost += max(0, round(duration_ns - usual))
        elif self._is_plain:
            self._plain.append(duration_ns)
        self._is_plain = True

    def abandon(self, calls: Calls | None = None) -> None:
        """The script starts torch's profiler itself, or ends."""
        own, self._profile = self._profile, None
        self.until_ns = _NEVER
        if calls is not None:
            calls.stop()
        if own is not None:
            settled(self._in_flight(calls), _LAST_PATIENCE_S)
            with contextlib.suppress(Exception):
                own.__exit__(None, None, None)
        if calls is not None:
            calls.in_flight.clear()

    @staticmethod
    def _in_flight(calls: Calls | None) -> InFlight:
        return InFlight() if calls is None else calls.in_flight

    def give_up(self, why: str, calls: Calls) -> None:
        self.abandon(calls)
        self._is_plain = False
        self.distance = min(2 * self.distance, 1 << 40)  # it has cost something, and brought nothing
        self._say("profiler", why)

    def too_long(self, calls: Calls) -> None:
        self.give_up(f"a sampled step took more than {_LONG} times the usual, so that there is no sample of it", calls)

    def yields(self) -> None:
        """There can be one profiler, and the script's goes first."""
        self._say("profiler", "the script runs torch's profiler itself: there are no samples while it does")

    def _say(self, kind: str, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._put(Event(time.monotonic_ns(), kind, text))

    def _begins(self, number: int) -> int | None:
        """The sample for which the profiler starts at the end of that step."""
        target = number + (1 if self._was_probed and number < EARLY[0] else self._lead)
        return target if self._is_sample(target) else None

    def _is_sample(self, number: int) -> bool:
        return number in EARLY or (number > EARLY[-1] and number % self.distance == 0)

    def _start(self, target: int, calls: Calls) -> None:
        if _is_used_by_script():
            self.yields()
            return
        if _spans:
            # It notes its end in the memory of the profiler under which it began, if any runs then.
            self._say(
                "profiler", "a record_function goes on that began in a sample: there are no samples until it has ended"
            )
            return
        began_ns = time.monotonic_ns()
        # To ask for CUDA must not start it. What stops the profiler waits for the device first.
        device = "cuda" if torch.cuda.is_initialized() else None
        shapes = target != _PROBE and self._lead == _LEAD
        own = profiler.profile(use_kineto=True, record_shapes=shapes, use_device=device)
        _own.add(own)
        own.__enter__()
        self._profile, self._target, self._wanted = own, target, target
        usual_ns = round(statistics.median(self._plain)) if self._plain else 0
        self.until_ns = began_ns + max(_LEAST_NS, _LEAD * _LONG * usual_ns)
        calls.start()
        self._began = [_mark() for _ in range(_MARKS)]
        self._cost = time.monotonic_ns() - began_ns

    def _stop(self, step: Step, calls: Calls) -> None:
        began_ns = time.monotonic_ns()
        ended = [_mark() for _ in range(_MARKS)]
        if not settled(calls.in_flight, _PATIENCE_S) and began_ns < self.until_ns:
            # What is in flight is waited for in a later step. This one was not sampled.
            self._say("profiler", f"operations of step {step.number} ran on after it, so that there is no sample of it")
            self._target = step.number + 1
            calls.start()
            return
        log, hints = calls.stop()
        own = self._ended(calls)
        if step.number == self._wanted:
            self._read(own, step, calls, log, hints, ended)
        self._cost += time.monotonic_ns() - began_ns
        self._costs.append(self._cost)
        self._is_plain = False  # the next step holds what this took
        self.distance = _distance(self._costs, self._plain)
        if step.number >= EARLY[-1] and self.distance != self._told and self._plain:
            self._told = self.distance
            cost, usual = statistics.median(self._costs), statistics.median(self._plain)
            text = f"every {self.distance} steps from here on: a sample costs {cost / 1e6:.1f} ms, a step takes {usual / 1e6:.1f}"
            self._put(Event(time.monotonic_ns(), "samples", text))

    def _read(
        self, own: Any, step: Step, calls: Calls, log: list[Call], hints: list[Call], ended: Sequence[tuple[int, int]]
    ) -> None:
        """Write down what the profiler saw."""
        events = own.kineto_results.events()
        times, thread = _times(events)
        clock = _clock(times, self._began, ended)
        if clock is None:
            text = f"the clocks differ by another time at the end of step {step.number} than at its start: no sample"
            self._put(Event(time.monotonic_ns(), "clock", text))
        else:
            backward = [(span.start_ns, span.end_ns) for span in step.spans if span.phase == "backward"]
            log += reductions(step.start_ns, calls.label)
            known = calls.reducers(), hints, calls.default()
            window = Window(step.number, step.start_ns, step.end_ns, log, backward, *known, phases(step))
            self._put(sample(events, window, clock, thread))

    def _ended(self, calls: Calls) -> Any:
        """The profiler that ran, whose operations have ended."""
        own, self._profile = self._profile, None
        self.until_ns = _NEVER
        own.__exit__(None, None, None)
        calls.in_flight.clear()
        return own

    def _count(self, calls: Calls) -> None:
        """Before the first sample of long steps: how many events a step has. If it can be sampled in part only, or not at all,
        that is said."""
        if not settled(calls.in_flight, _PATIENCE_S):
            return  # at the end of a later step: what is in flight writes into the profiler's memory
        calls.stop()
        count = len(self._ended(calls).kineto_results.events())
        self._is_plain, self._was_probed = False, True
        most = min(_MOST, _free_bytes() // (_MEMORY_SHARE * _EVENT_BYTES))
        if count > most:
            self._is_off = True
            text = f"a step has {count:,} events of torch's profiler, and there is memory for {most:,}: there are no samples"
            self._say("profiler", text)
        elif count > _MANY:
            self._lead = 1
            text = f"a step has {count:,} events of torch's profiler: samples are few, and without the sizes of what DDP sends"
            self._say("profiler", text)


def _free_bytes() -> int:
    """Memory for one rank of this host, as far as that is known."""
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return (int(line.split()[1]) << 10) // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return _NEVER


def _distance(costs: Sequence[int], plain: Sequence[int]) -> int:
    """The power of two at which samples cost their share."""
    usual = statistics.median(plain) if plain else 0
    wanted = statistics.median(costs) / (SHARE * usual) if usual else 0
    return max(2 * EARLY[-1], 1 << max(0, int(min(wanted, 1 << 40)) - 1).bit_length())


def _mark() -> tuple[int, int]:
    before_ns = time.monotonic_ns()
    with profiler.record_function(_MARK):
        pass
    return before_ns, time.monotonic_ns()


def _times(events: Sequence[Any]) -> tuple[list[int], int | None]:
    """When the profiler saw the marks, by its clock, and what number it gives this thread."""
    marks = [event for event in events if event.name() == _MARK]
    return sorted(mark.start_ns() for mark in marks), marks[0].start_thread_id() if marks else None


def _clock(
    times: Sequence[int], began: Sequence[tuple[int, int]], ended: Sequence[tuple[int, int]]
) -> Callable[[int], int] | None:
    """From the profiler's time to the monotonic clock; None if one of the two has jumped."""
    if len(times) != len(began) + len(ended):
        return None
    first, last = _difference(times[: len(began)], began), _difference(times[len(began) :], ended)
    length = max(1, last[0] - first[0])
    if abs(last[1] - first[1]) > _MOST_DRIFT_NS + length // 1000:
        return None
    return lambda at_ns: at_ns - first[1] - (last[1] - first[1]) * (at_ns - first[0]) // length


def _difference(times: Sequence[int], marks: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The profiler's time at one mark, and by how much it is ahead of the monotonic clock."""
    at, (before_ns, _) = min(zip(times, marks, strict=True), key=lambda pair: pair[1][1] - pair[1][0])
    return at, at - before_ns


# ------------------------------------------------------------------------------------------- the script's own profiler

_own: weakref.WeakSet[Any] = weakref.WeakSet()
_scripts: weakref.WeakSet[Any] = weakref.WeakSet()
_spans: weakref.WeakSet[Any] = weakref.WeakSet()
"""Those of `record_function` that began under a profiler and go on."""


def _is_used_by_script() -> bool:
    return bool(_scripts) or profiler._is_profiler_enabled or bool(torch.autograd._profiler_enabled())


def patch(running: Callable[[], Iterator[Callable[[], None]]]) -> None:
    """Let a profiler of the script end the sample that runs: there can be only one.

    Args:
        running: gives what ends the sample of this process, if one runs.
    """
    prepare, leave = profiler.profile._prepare_trace, profiler.profile.__exit__

    def prepare_trace(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self not in _own:
            _scripts.add(self)
            for abandon in running():
                abandon()
        return prepare(self, *args, **kwargs)

    def exit_trace(self: Any, *args: Any) -> Any:
        _scripts.discard(self)
        return leave(self, *args)

    profiler.profile._prepare_trace = prepare_trace
    profiler.profile.__exit__ = exit_trace
    enter_span, leave_span = profiler.record_function.__enter__, profiler.record_function.__exit__

    # Wrapped, so that TorchScript finds the sources of what it compiles.
    @functools.wraps(enter_span)
    def enter(self: Any) -> Any:
        entered = enter_span(self)
        if profiler._is_profiler_enabled:
            _spans.add(self)
        return entered

    @functools.wraps(leave_span)
    def leave_with(self: Any, *args: Any) -> Any:
        _spans.discard(self)
        return leave_span(self, *args)

    profiler.record_function.__enter__ = enter
    profiler.record_function.__exit__ = leave_with
