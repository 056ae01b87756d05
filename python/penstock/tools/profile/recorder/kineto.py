"""What torch's profiler saw of a step: when the training thread ran operators, and which operations ran from when to when.

An operation has two events: its *launch* ``c10d::allreduce_``, short, on the thread that called, and its *course*, such as
``gloo:all_reduce`` and ``penstock:all_reduce``, from when the backend took it until it ended. gloo's begins when a thread of
gloo's takes the operation from its queue, so an operation is issued when its launch begins. Launches and courses of the same name
are matched in their order. gloo makes some operations of others, whose courses alone it shows: a reduce_scatter is an all_reduce,
or one for each rank or tensor of a list, and a monitored_barrier sends and receives.
"""

from __future__ import annotations

import bisect
import collections
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from penstock.profiling.intervals import Piece
from penstock.profiling.matching import canonical
from penstock.profiling.record import Interval, Operation, Ran, Sample
from penstock.tools.profile.recorder.device import Launches, is_on_device, ran

__all__ = ["MOST_EVENTS", "Call", "Window", "sample", "spans", "watched"]

MOST_EVENTS = 100_000
"""Intervals of operators, and operations, that a sample keeps. Lines of a record have 10^7 characters then."""

_JOIN_NS = 10_000
"""Operators with less between them count as one interval: a pause counts from 100 us on (docs/design/profile-division.md)."""

_COURSE = re.compile(r"^(gloo|penstock|mpi|ucc|xccl):(\w+)$")
_WAITS = ("c10d::", "_c10d_functional::", "_c10d_functional_autograd::", "autograd::engine::evaluate_function")
"""Operators that launch communication, wait for it, or hold others that are seen themselves."""

_USER_SCOPE = 7  # RecordScope::USER_SCOPE, a record_function: it holds others, and pauses
_BACKWARD_SCOPE = 1


@dataclass
class Call:
    """A call of a process group from Python."""

    operation: str
    group: str
    start_ns: int
    end_ns: int = 0
    ranks: int = 0
    peer: int | None = None
    purpose: str = ""
    bytes: int = 0
    is_batched: bool = False
    """Whether it is one of several that run as one."""
    waited_ns: int = 0
    """When the wait for it ended, if it was waited for."""
    tag: int = 0
    """Of a send or receive."""
    parts: int = 1
    """Of a reduce_scatter: how many sums it is to a backend that has none of its own."""
    is_empty: bool = False
    """No rank has anything in it: backends end it at once, whoever has not come."""


@dataclass(frozen=True)
class Window:
    """The step, and what Python knows of it."""

    step: int
    start_ns: int
    end_ns: int
    calls: Sequence[Call] = ()
    backward: Sequence[Interval] = ()
    """Backward passes, in order."""
    reducers: Call | None = None
    """What DDP's own operations are: their group. None without DDP."""
    hints: Sequence[Call] = ()
    """Groups that functional collectives looked up, in order; what they launch, no method of a group shows."""
    default: Call = field(default_factory=lambda: Call("", "", 0))
    timeline: Sequence[Piece[str]] = ()
    """The training thread's phases."""


@dataclass
class _Launch:
    name: str
    start_ns: int
    end_ns: int = 0


class _Course(NamedTuple):
    name: str
    issued_ns: int
    """At first: when it began."""
    ended_ns: int
    bytes: int
    element_bytes: int = 0
    launched_ns: int = 0
    """Of a kernel of a GPU, which was issued when it began: it holds the device until all ranks are there."""


def sample(events: Iterable[Any], window: Window, clock: Callable[[int], int], thread: int | None) -> Sample:
    """From Kineto's events (``kineto_results.events()``).

    Args:
        clock: from Kineto's time to the monotonic clock.
        thread: the profiler's number of the training thread.
    """
    operators = _Operators(window)
    threads = {thread}
    launches: list[_Launch] = []
    functional: list[Interval] = []
    courses: list[_Course] = []
    launched, of_device = Launches(window.timeline), []
    for event in events:
        name, start_ns = event.name(), clock(event.start_ns())
        if is_on_device(event):
            of_device.append((event, start_ns))
            continue
        launched.called(event, start_ns)
        course = _COURSE.match(name) if name[:1].islower() else None
        if course is not None:
            end_ns = start_ns + event.duration_ns()
            courses.append(_Course(canonical(course[2]), start_ns, end_ns, _bytes(event), _element(event)))
        elif name.startswith("nccl:"):
            launched.issued(start_ns, _bytes(event), _element(event))
        elif name.startswith("c10d::"):
            launches.append(_Launch(canonical(name[6:]), start_ns, start_ns + event.duration_ns()))
        elif start_ns < window.start_ns:
            continue  # of the step before, which the profiler ran in, too
        elif event.is_async() or name.startswith(_WAITS):
            if name.startswith("_c10d_functional::"):
                functional.append((start_ns, start_ns + event.duration_ns()))
        else:
            scope = event.scope()
            if scope != _USER_SCOPE:
                of = event.start_thread_id()
                if scope == _BACKWARD_SCOPE:
                    threads.add(of)  # with a device, autograd has threads of its own
                operators.add(of, start_ns, start_ns + event.duration_ns())
    window = replace(window, calls=[*window.calls, *_hinted(window, functional)])
    found = (launched.kernel(event, start_ns, threads) for event, start_ns in of_device)
    kernels = [each for each in found if each is not None and window.start_ns <= each.launched_ns < window.end_ns]
    for each in kernels:
        if each.operation:
            size = launched.size(each.launched_ns)
            courses.append(_Course(each.operation, each.start_ns, each.end_ns, *size, each.launched_ns))
    operations = tuple(_operations(window, launches, courses))
    dropped = max(0, len(operations) - MOST_EVENTS)
    operations = operations[:MOST_EVENTS]
    moving = [(one.issued_ns, one.ended_ns, None) for one in operations]
    on_device = ran(kernels, moving, window.timeline, (window.step, window.start_ns, window.end_ns))
    if on_device is None:
        return Sample(window.step, operators.busy(threads), operations, dropped)
    step, worked = on_device
    return Sample(window.step, tuple((start, end) for start, end, _ in worked), operations, dropped, step)


def watched(events: Iterable[Any], clock: Callable[[int], int]) -> list[Ran] | None:
    """gloo's operations, in the order in which its threads took them; None if there are those of another backend. Of Penstock's
    its engine tells, and when others' threads are calm is not known (`settling.py`)."""
    found = []
    for event in events:
        name = event.name()
        course = _COURSE.match(name) if name[:1].islower() else None
        if course is not None:
            if course[1] != "gloo":
                return None
            began_ns = clock(event.start_ns())
            found.append(Ran(canonical(course[2]), began_ns, began_ns + event.duration_ns()))
    return sorted(found, key=lambda one: one.began_ns)


def spans(events: Iterable[Any]) -> int:
    """How many there are that a profiler without operators would see, too."""
    return sum(event.scope() == _USER_SCOPE for event in events)


class _Operators:
    """When threads ran operators. Of any number of them no more than `MOST_EVENTS` intervals are kept: those that are near each
    other become one, in the order in which they come, so that none of a step of 10^6 is missing."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._parts: dict[int, list[Interval]] = {}
        self._count = 0
        self._apart_ns = _JOIN_NS

    def add(self, thread: int, start_ns: int, end_ns: int) -> None:
        self._parts.setdefault(thread, []).append((start_ns, end_ns))
        self._count += 1
        if self._count > MOST_EVENTS:
            self._join()

    def busy(self, threads: set[int | None]) -> tuple[Interval, ...]:
        """Of these threads together."""
        found = (each for thread, parts in self._parts.items() if thread in threads for each in parts)
        return tuple(_merged(found, self._window, self._apart_ns))

    def _join(self) -> None:
        """To half of what may be kept, so that not every operator sorts them anew. If it takes that, pauses are closed, the
        shortest ones first."""
        while True:
            self._parts = {
                thread: _merged(parts, self._window, self._apart_ns) for thread, parts in self._parts.items()
            }
            self._count = sum(map(len, self._parts.values()))
            if self._count <= MOST_EVENTS // 2 or self._apart_ns > self._window.end_ns - self._window.start_ns:
                return
            self._apart_ns *= 2


def _hinted(window: Window, functional: list[Interval]) -> Iterable[Call]:
    """What functional collectives launched, as calls of the group that was looked up before."""
    starts = [hint.start_ns for hint in window.hints]
    for start, end in functional:
        index = bisect.bisect_right(starts, start) - 1
        if index >= 0:
            yield replace(window.hints[index], start_ns=start, end_ns=end)


def _merged(intervals: Iterable[Interval], window: Window, apart_ns: int) -> list[Interval]:
    found: list[Interval] = []
    for start, end in sorted(intervals):
        start, end = max(start, window.start_ns), min(end, window.end_ns)
        if start >= end:
            continue
        if found and start <= found[-1][1] + apart_ns:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def _operations(window: Window, launches: list[_Launch], courses: list[_Course]) -> Iterable[Operation]:
    found: list[tuple[_Course, Call]] = []
    calls = sorted(window.calls, key=lambda call: call.start_ns)
    starts = [call.start_ns for call in calls]

    def called(name: str, at_ns: int) -> Call | None:
        """The last call of that name that began before."""
        index = bisect.bisect_right(starts, at_ns) - 1
        for call in reversed(calls[max(0, index - 8) : index + 1]):
            if call.operation in (name, "") and at_ns <= call.end_ns:
                return call
        return None

    def launching(at_ns: int) -> Call | None:
        """The call that runs at a moment, whatever its name: NCCL sends, receives, gathers and scatters with one kernel."""
        index = bisect.bisect_right(starts, at_ns) - 1
        return next((call for call in reversed(calls[max(0, index - 8) : index + 1]) if at_ns <= call.end_ns), None)

    launches.sort(key=lambda each: each.start_ns)
    waiting: dict[str, collections.deque[_Launch]] = collections.defaultdict(collections.deque)
    for launch in launches:
        launcher = called(launch.name, launch.start_ns)
        if launcher is None or not launcher.is_batched:  # a batch has one course, of another name
            waiting[launch.name].append(launch)
    batches: list[tuple[int, int]] = []
    parts = _Parts(courses, waiting["reduce_scatter"])
    for course in sorted(courses, key=lambda course: course.issued_ns):
        name, issued_ns, end_ns, length, element, launched_ns = course
        if launched_ns:
            launcher = launching(launched_ns)
            if launcher is None and name == "all_to_all" and any(call.is_batched for call in calls):
                batches.append((issued_ns, end_ns))
                continue
            call = launcher or _unnamed(window, name, launched_ns)
            found.append((course._replace(name=call.operation or name, bytes=length or call.bytes), call))
            continue
        start_ns = issued_ns
        if name == "coalesced":
            batches.append((start_ns, end_ns))
            continue
        queue = waiting[name]
        is_launched = bool(queue) and queue[0].start_ns <= start_ns
        if name in ("send", "recv") and not is_launched and called("barrier", start_ns) is not None:
            continue  # of a monitored_barrier
        whole = parts.launch(name, queue[0].start_ns if is_launched else start_ns)
        if whole is not None:
            name, issued_ns = whole.name, whole.start_ns
        elif is_launched:
            issued_ns = queue.popleft().start_ns
        call = called(name, issued_ns) or _unnamed(window, name, issued_ns)
        # A course's end is written by the backend's thread, which may come after whoever waited for the operation.
        ended_ns = min(end_ns, call.waited_ns) if call.waited_ns > issued_ns else end_ns
        operation = _Course(name, issued_ns, ended_ns, length or call.bytes, element)
        if whole is not None:
            parts.add(operation, call, found)
        else:
            found.append((operation, call))
    # A backend that shows no courses: what Python waited for, from the call to the end of the wait.
    seen = {id(call) for _, call in found}
    for call in calls:
        if id(call) in seen or not call.operation:
            continue
        # Of a batch, the calls come first, and then one course for all.
        batch = next(((start, end) for start, end in batches if call.end_ns <= start), None)
        if call.is_batched and batch is not None:
            found.append((_Course(call.operation, *batch, call.bytes), call))
        elif call.waited_ns:
            found.append((_Course(call.operation, call.start_ns, call.waited_ns, call.bytes), call))
    found.sort(key=lambda each: each[0].issued_ns)
    numbers: collections.Counter[tuple[str, str, int | None]] = collections.Counter()
    for (name, issued_ns, ended_ns, length, element, launched_ns), call in found:
        if not call.is_empty and (launched_ns or window.start_ns <= issued_ns < window.end_ns):
            key = (name, call.group, call.peer)
            of = (call.ranks, call.peer, call.purpose, element, call.tag)
            yield Operation(name, call.group, numbers[key], issued_ns, ended_ns, length, *of)
            numbers[key] += 1


class _Parts:
    """A reduce_scatter of a backend that makes it of all_reduces, as gloo does."""

    def __init__(self, courses: Iterable[_Course], launches: collections.deque[_Launch]) -> None:
        has_own = any(course.name == "reduce_scatter" for course in courses)
        self._launches = collections.deque[_Launch]() if has_own else launches
        self._place = -1
        """Of the operation that lacks parts yet."""
        self._left = 0

    def launch(self, name: str, before_ns: int) -> _Launch | None:
        """Of which a course is a part: the first that lacks some, if it was launched before.

        Args:
            before_ns: when the course began, or what has its own name was launched.
        """
        if name != "all_reduce" or not self._launches or self._launches[0].start_ns > before_ns:
            return None
        return self._launches[0]

    def add(self, part: _Course, call: Call, found: list[tuple[_Course, Call]]) -> None:
        """A part, to what was found."""
        if not self._left:
            self._place, self._left = len(found), call.parts
            found.append((part, call))
        else:
            before, _ = found[self._place]
            ended_ns = max(before.ended_ns, part.ended_ns)
            found[self._place] = (before._replace(ended_ns=ended_ns, bytes=before.bytes + part.bytes), call)
        self._left -= 1
        if not self._left:
            self._launches.popleft()


def _unnamed(window: Window, name: str, at_ns: int) -> Call:
    """What was launched within C++ in a backward pass is DDP's, if there is one."""
    if window.reducers is not None and any(start <= at_ns < end for start, end in window.backward):
        return window.reducers
    return window.default


def _bytes(event: Any) -> int:
    total = 0
    for shape, dtype in zip(event.shapes(), event.dtypes(), strict=False):
        size = _SIZES.get(dtype, 0)
        for length in shape:
            if not isinstance(length, int):
                return 0  # a list of tensors
            size *= length
        total += size
    return total


def _element(event: Any) -> int:
    return next((_SIZES[dtype] for dtype in event.dtypes() if dtype in _SIZES), 0)


_SIZES = {
    "bool": 1,
    "unsigned char": 1,
    "signed char": 1,
    "short int": 2,
    "short": 2,
    "int": 4,
    "long int": 8,
    "long": 8,
    "float": 4,
    "double": 8,
    "c10::Half": 2,
    "c10::BFloat16": 2,
    "c10::complex<float>": 8,
    "c10::complex<double>": 16,
    "c10::Float8_e4m3fn": 1,
    "c10::Float8_e5m2": 1,
}
