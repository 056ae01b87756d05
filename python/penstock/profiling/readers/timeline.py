"""From events of a trace to steps and samples: whose timeline is divided, where steps begin, which phase a moment is in."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from penstock.profiling.between import GAP_NS
from penstock.profiling.breakdown import OTHER
from penstock.profiling.intervals import Piece, innermost, overlaps, union, without
from penstock.profiling.matching import canonical
from penstock.profiling.readers import collectives
from penstock.profiling.readers.collectives import Group
from penstock.profiling.record import Operation, Sample, Span, Step, Wait

__all__ = ["Called", "Host", "Kernel", "Named", "device_spans", "steps"]

Thread = int | str


class Named(NamedTuple):
    """An operator or an annotation on a thread of the host."""

    start_ns: int
    end_ns: int
    thread: Thread
    name: str
    args: Mapping[str, Any]


class Kernel(NamedTuple):
    """What a device ran: a kernel, a copy or a fill."""

    start_ns: int
    end_ns: int
    name: str
    correlation: int
    args: Mapping[str, Any]


class Called(NamedTuple):
    """A call on the host that launched a kernel."""

    thread: Thread
    at_ns: int


class Flight(NamedTuple):
    """A collective before it has its number."""

    start_ns: int
    end_ns: int
    what: collectives.Described
    purpose: str


def steps(
    host: Host, kernels: Sequence[Kernel], groups: Mapping[str, Group], problems: list[str], name: str
) -> tuple[list[Step], list[Sample], str]:
    """Steps and what is known of each, and how steps were told apart. There is at least one."""
    bounds, how = host.steps(kernels)
    if how == "whole":
        problems.append(f"{name} has neither ProfilerStep nor Optimizer.step annotations: all of it is one step")
    phases = host.phases(bounds)
    moving = list(host.collectives(groups, phases))
    if kernels:
        return *_of_device(host, kernels, bounds, phases, moving, groups), how
    if any(each.name.startswith("nccl:") for each in host.communications):
        problems.append(f"{name} has no kernels: of NCCL's operations only their launches are known")
    return *_of_thread(host, bounds, phases, moving), how


class Host:
    """The host's side of a trace."""

    def __init__(self, events: list[Named], launches: dict[int, Called], rank: int | None) -> None:
        """``events`` are in order; those that begin together, the longest first."""
        self.launches = launches
        self.rank = rank
        self.communications = [each for each in events if COMMUNICATION.match(each.name)]
        self._records = [each for each in events if each.name == "record_param_comms"]
        self._calls = [each for each in events if each.name.startswith("c10d::")]
        self._events = [each for each in events if not COMMUNICATION.match(each.name)]
        self.thread = self._training_thread()
        self._top = [each for each in self._events if not STEP.match(each.name)]
        self._backward = [each for each in self._top if each.name.startswith(BACKWARD)]

    def _training_thread(self) -> Thread | None:
        for sign in (STEP, OPTIMIZER):
            for each in self._events:
                if sign.match(each.name):
                    return each.thread
        busy: dict[Thread, int] = {}
        for each in self._events:
            busy[each.thread] = busy.get(each.thread, 0) + each.end_ns - each.start_ns
        return max(busy, key=busy.__getitem__, default=None)

    def steps(self, kernels: Sequence[Kernel]) -> tuple[list[tuple[int, int, int]], str]:
        """Number, start and end of each, on the host's clock, in order and without overlap; and by what sign they are told."""
        marked = [(each, STEP.match(each.name)) for each in self._events if each.thread == self.thread]
        found = [(int(sign[1]), each.start_ns, each.end_ns) for each, sign in marked if sign]
        if apart := list(_apart(found)):
            return apart, "ProfilerStep"
        everything = [
            (each.start_ns, each.end_ns) for some in (self._events, self.communications, kernels) for each in some
        ]
        first = min(start for start, _ in everything)
        last = max(end for _, end in everything)
        ends = [each.end_ns for each, _ in marked if OPTIMIZER.match(each.name)]
        # Several optimizers that step one after the other, with nothing run backward between them, end one step.
        backward = [each.start_ns for each in self._backward]
        ends = [
            end
            for index, end in enumerate(ends)
            if index == 0 or not backward or bisect_right(backward, ends[index - 1]) < bisect_right(backward, end)
        ]
        if ends:
            starts = [first, *ends[:-1]]
            numbered = [(i, start, end) for i, (start, end) in enumerate(zip(starts, ends, strict=True))]
            if apart := list(_apart(numbered)):
                return apart, "Optimizer.step"
        return [(0, first, last)], "whole"

    def phases(self, bounds: Sequence[tuple[int, int, int]]) -> Phases:
        """What the training thread did, and the passes of the autograd engine on whatever thread."""
        items = list(_outermost(self._top, self.thread))
        others = [each for each in self._backward if each.thread != self.thread]
        items = sorted([*items, *others], key=lambda each: each.start_ns)
        is_forward_marked = any(_phase(each.name) == "forward" for each in items)
        edges = sorted({edge for _, start, end in bounds for edge in (start, end)})
        spans: list[Span] = []
        for each in items:
            phase = _phase(each.name)
            if phase is None:
                if is_forward_marked or each.name.startswith("c10d::"):
                    continue
                phase = "forward"  # if the next that has a phase runs backward: see below
            goes_on = phase in ("forward", "backward") and spans and spans[-1].phase == phase
            if goes_on and not _has_edge(edges, spans[-1].end_ns, each.start_ns):
                spans[-1] = Span(phase, spans[-1].start_ns, max(spans[-1].end_ns, each.end_ns))
                continue
            spans.append(Span(phase, each.start_ns, each.end_ns))
        return Phases(_settled(spans, edges, is_forward_marked), others[0].thread if others else None, others)

    def collectives(self, groups: Mapping[str, Group], phases: Phases) -> Iterator[Flight]:
        """Of the backends that run on the host."""
        operations = [each for each in self.communications if not each.name.startswith("nccl:")]
        if not operations and not self.communications:
            operations = [each for each in self._calls if each.thread == self.thread]
        for each, call in zip(operations, self._called(operations), strict=True):
            # gloo's events begin when a thread of its own gets to them; the rank was there when it called.
            start_ns = each.start_ns if call is None else call.start_ns
            args = each.args if call is None or "peer" not in call.args else {**each.args, "peer": call.args["peer"]}
            what = collectives.described(each.name, args, groups)
            yield Flight(start_ns, each.end_ns, what, collectives.purpose(what, self.rank, phases.at(start_ns)))

    def _called(self, operations: Sequence[Named]) -> list[Named | None]:
        """The call of c10d that each operation comes from: of a kind there are as many of both, in the same order; otherwise an
        operation is within its call, on its thread."""
        calls: dict[str, list[Named]] = {}
        for each in self._calls:
            calls.setdefault(canonical(each.name.removeprefix("c10d::")), []).append(each)
        kinds = [canonical(each.name.rpartition(":")[2]) for each in operations]
        counts = {kind: kinds.count(kind) for kind in set(kinds)}
        found: list[Named | None] = []
        seen = dict.fromkeys(counts, 0)
        for each, kind in zip(operations, kinds, strict=True):
            its = calls.get(kind, [])
            call: Named | None = None
            if len(its) == counts[kind]:
                call = its[seen[kind]]
            elif its:
                call = _around(its, Called(each.thread, each.start_ns))
            seen[kind] += 1
            found.append(call if call is not None and call.start_ns <= each.start_ns else None)
        return found

    def explained(self, kernel: Kernel) -> tuple[str, Mapping[str, Any]]:
        """The name and arguments of a kernel's collective: its own, or those of the annotation that launched it."""
        if "Collective name" in kernel.args:
            return "", kernel.args
        called = self.launches.get(kernel.correlation)
        if called is not None:
            for events in (self._records, self.communications):
                found = _around(events, called)
                if found is not None and (found.name != "record_param_comms" or "Collective name" in found.args):
                    return found.name, found.args
        return f"kernel:{collectives.from_kernel(kernel.name)}", kernel.args

    def operators(self) -> list[Piece[None]]:
        """When the training thread ran operators, but for those that hand a collective over, or wait for one."""
        return union(
            (each.start_ns, each.end_ns, None)
            for each in self._top
            if each.thread == self.thread and not ANNOTATION.match(each.name) and not each.name.startswith("c10d::")
        )


class Phases:
    """The phase at each moment of the training thread."""

    def __init__(self, spans: list[Span], backward_thread: Thread | None, passes: Sequence[Named]) -> None:
        self.spans = spans
        self.backward_thread = backward_thread
        self._starts = [span.start_ns for span in spans]
        self._passes = passes

    def at(self, at_ns: int) -> str:
        index = bisect_right(self._starts, at_ns) - 1
        span = self.spans[index] if index >= 0 else None
        return span.phase if span is not None and at_ns < span.end_ns else ""

    def of_launch(self, called: Called | None, training: Thread | None) -> str:
        if called is None:
            return ""
        if self.backward_thread is not None and called.thread == self.backward_thread:
            return "backward"
        return self.at(called.at_ns) if called.thread == training else ""


def _of_thread(
    host: Host, bounds: Sequence[tuple[int, int, int]], phases: Phases, moving: Sequence[Flight]
) -> tuple[list[Step], list[Sample]]:
    """The training thread's timeline: blocked is where it runs no operator for a while, up to the end of an operation."""
    busy = host.operators()
    running = union((each.start_ns, each.end_ns, None) for each in moving)
    ends = sorted(each.end_ns for each in moving)
    blocking = sorted(
        (each for each in moving if each.what.name in ("recv", "barrier")), key=lambda each: each.start_ns
    )
    blocking_starts = [each.start_ns for each in blocking]
    marked = [_until_reduced(span, busy, running, bounds) for span in phases.spans]
    flat = innermost([(each.start_ns, each.end_ns, each.phase) for each in marked])
    spans = [Span(phase, start, end) for start, end, phase in flat]
    loading = [(span.start_ns, span.end_ns, None) for span in spans if span.phase == "loading"]
    backward = [(span.start_ns, span.end_ns, None) for span in spans if span.phase == "backward"]
    whole = [(start, end, None) for _, start, end in bounds]
    waits: list[Piece[None]] = []
    for start, end, _ in without(without(whole, busy), loading):
        if end - start < GAP_NS:
            continue
        index = bisect_right(ends, end) - 1
        last = ends[index] if index >= 0 else 0
        # Beside a backward pass a script may compute with other libraries: it waits if it goes on when an operation has ended.
        until = end if _within(backward, start) else last if last > start and end - last <= MOST_LATE_NS else start
        # The call of what blocks until a peer comes stands in such a gap, since it is no work.
        first, last = (bisect_left(blocking_starts, edge) for edge in (start, end))
        until = max([until, *(min(each.end_ns, end) for each in blocking[first:last])])
        waits += [(a, b, None) for a, b, *_ in overlaps([(start, until, None)], running) if b - a >= GAP_NS]
    return _put_together(bounds, spans, waits, busy, moving)


def _of_device(
    host: Host,
    kernels: Sequence[Kernel],
    bounds: Sequence[tuple[int, int, int]],
    phases: Phases,
    moving: list[Flight],
    groups: Mapping[str, Group],
) -> tuple[list[Step], list[Sample]]:
    """The device's timeline. A step begins with the first kernel that was launched in it. Work has the phase of its launch; time
    without any is of no phase, or loading where the training thread loads; blocked is where collectives run and nothing else."""
    starts = [start for _, start, _ in bounds]
    firsts: dict[int, int] = {}
    lasts: dict[int, int] = {}
    work: list[tuple[int, int, str]] = []
    for each in kernels:
        called = host.launches.get(each.correlation)
        index = bisect_right(starts, called.at_ns if called else each.start_ns) - 1
        phase = phases.of_launch(called, host.thread)
        if index >= 0 and (called.at_ns if called else each.start_ns) < bounds[index][2]:
            firsts[index] = min(firsts.get(index, each.start_ns), each.start_ns)
            lasts[index] = max(lasts.get(index, each.end_ns), each.end_ns)
        if collectives.is_kernel(each.name):
            name, args = host.explained(each)
            what = collectives.described(name, args, groups)
            moving.append(Flight(each.start_ns, each.end_ns, what, collectives.purpose(what, host.rank, phase)))
        else:
            work.append((each.start_ns, each.end_ns, phase))
    on_device = []
    used = sorted(firsts)
    for position, index in enumerate(used):
        # After the last step no kernel tells; the next one would have been launched after its end on the host.
        is_last = position + 1 == len(used)
        following = max(lasts[index], bounds[index][2]) if is_last else firsts[used[position + 1]]
        on_device.append((bounds[index][0], firsts[index], max(following, firsts[index])))
    bounds = list(_apart(on_device)) or bounds
    loading = [(span.start_ns, span.end_ns, None) for span in phases.spans if span.phase == "loading"]
    flights = [(each.start_ns, each.end_ns, None) for each in moving]
    spans, waits, busy = device_spans(work, flights, loading, [(start, end, None) for _, start, end in bounds])
    return _put_together(bounds, spans, waits, busy, moving)


def device_spans(
    work: Sequence[Piece[str]],
    moving: Sequence[Piece[None]],
    loading: Sequence[Piece[None]],
    whole: Sequence[Piece[None]],
) -> tuple[list[Span], list[Piece[None]], list[Piece[None]]]:
    """A device's timeline: its spans, its waits, and when it worked.

    Args:
        work: kernels and copies that do not communicate, each with the phase of its launch, in order.
        moving: collectives.
        loading: when the training thread loaded.
        whole: the steps.
    """
    busy = union((start, end, None) for start, end, _ in work)
    waits = without(union(moving), busy)
    spans: list[Span] = []
    until = 0
    for start, end, phase in work:
        if end > until and phase:
            begin = max(start, until)
            if spans and spans[-1].phase == phase and spans[-1].end_ns == begin:
                spans[-1] = Span(phase, spans[-1].start_ns, end)
            else:
                spans.append(Span(phase, begin, end))
        until = max(until, end)
    spans += [Span("loading", start, end) for start, end, _ in without(without(loading, busy), waits)]
    # What has no phase is said to have none: the division would give gaps between two forward parts to the forward pass.
    known = union((span.start_ns, span.end_ns, None) for span in spans)
    spans += [Span(OTHER, *each[:2]) for each in without(whole, known)]
    return sorted(spans, key=lambda span: span.start_ns), waits, busy


def _put_together(
    bounds: Sequence[tuple[int, int, int]],
    spans: Sequence[Span],
    waits: Sequence[Piece[None]],
    busy: Sequence[Piece[None]],
    moving: Iterable[Flight],
) -> tuple[list[Step], list[Sample]]:
    moved = sorted(moving, key=lambda each: (each.start_ns, each.end_ns))
    issued = [each.start_ns for each in moved]
    found_steps, found_samples = [], []
    marked = [(span.start_ns, span.end_ns, span.phase) for span in spans]
    for number, start, end in bounds:
        here = [(start, end, None)]
        within = tuple(Span(phase, first, last) for first, last, _, phase in overlaps(here, marked))
        found_steps.append(
            Step(number, start, end, within, tuple(Wait(first, last) for first, last, *_ in overlaps(here, waits)))
        )
        operations = []
        counts: dict[tuple[str, str, int | None], int] = {}
        for each in moved[bisect_right(issued, start - 1) : bisect_right(issued, end - 1)]:
            what = each.what
            key = (what.name, what.group, what.peer)
            counts[key] = counts.get(key, -1) + 1
            operations.append(
                Operation(
                    what.name,
                    what.group,
                    counts[key],
                    each.start_ns,
                    each.end_ns,
                    what.bytes,
                    what.ranks,
                    what.peer,
                    each.purpose,
                )
            )
        ran = tuple((first, last) for first, last, *_ in overlaps(here, busy))
        found_samples.append(Sample(number, ran, tuple(operations)))
    return found_steps, found_samples


# Phases


def _phase(name: str) -> str | None:
    """Of an annotation or an operator; None if it has none."""
    if name.startswith(BACKWARD):
        return "backward"
    if sign := ANNOTATION.match(name):
        return PHASE_OF.get(sign[0].lower().strip("# "), "")
    return None


def _settled(spans: Sequence[Span], edges: Sequence[int], is_marked: bool) -> list[Span]:
    """Without those that have no phase. A forward pass lasts until the backward pass that follows it: the loss is in it; one that
    nobody marked, only operators before a backward pass, is none without."""
    found: list[Span] = []
    for index, span in enumerate(spans):
        after = spans[index + 1] if index + 1 < len(spans) else None
        end_ns = span.end_ns
        if span.phase == "forward":
            if after is not None and after.phase == "backward" and not _has_edge(edges, span.end_ns, after.start_ns):
                end_ns = after.start_ns
            elif not is_marked:
                continue
        if span.phase:
            start_ns = max(span.start_ns, found[-1].end_ns if found else 0)
            if end_ns > start_ns:
                found.append(Span(span.phase, start_ns, end_ns))
    return found


def _until_reduced(
    span: Span, busy: Sequence[Piece[None]], running: Sequence[Piece[None]], bounds: Sequence[tuple[int, int, int]]
) -> Span:
    """A backward pass ends when what it reduces is reduced: the engine returns no earlier, and runs no operator meanwhile."""
    if span.phase != "backward":
        return span
    index = bisect_right(running, span.end_ns, key=_start) - 1
    if index < 0 or running[index][1] <= span.end_ns:
        return span
    following = bisect_right(busy, span.end_ns, key=_start)
    until = busy[following][0] if following < len(busy) else 1 << 62
    step = next((end for _, start, end in bounds if start <= span.start_ns < end), until)
    return Span("backward", span.start_ns, max(span.end_ns, min(until, step, running[index][1])))


def _outermost(events: Iterable[Named], thread: Thread | None) -> Iterator[Named]:
    """Of one thread, those that do not lie within another. What floats have made overlap a little counts as behind."""
    until = -1
    for each in events:
        if each.thread == thread and (each.start_ns >= until or each.end_ns > until):
            yield each
            until = max(until, each.end_ns)


def _around(events: Sequence[Named], called: Called) -> Named | None:
    """The last event on a call's thread that began before it and has not ended."""
    index = bisect_right(events, called.at_ns, key=lambda each: each.start_ns) - 1
    for each in events[max(0, index - MOST_LOOKED_AT) : index + 1][::-1]:
        if each.thread == called.thread and each.end_ns >= called.at_ns:
            return each
    return None


# Looking up


def _within(timeline: Sequence[Piece[None]], at_ns: int) -> bool:
    return any(overlaps([(at_ns, at_ns + 1, None)], timeline))


def _start(piece: Piece[None]) -> int:
    return piece[0]


def _apart(steps: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    """In order, without overlap, each number once."""
    until, seen = 0, set()
    for number, start, end in sorted(steps, key=lambda step: step[1]):
        if number not in seen and end > max(start, until):
            seen.add(number)
            yield number, max(start, until), end
            until = end


def _has_edge(edges: Sequence[int], first: int, last: int) -> bool:
    """Whether a step begins or ends from ``first`` to ``last``."""
    return bisect_right(edges, last) > bisect_right(edges, first - 1)


COMMUNICATION = re.compile(r"(gloo|nccl|penstock|mpi|ucc|xccl|hccl|cncl):(?!:)\w")
STEP = re.compile(r"ProfilerStep#(\d{1,18})$")
OPTIMIZER = re.compile(r"Optimizer\.step#")
BACKWARD = "autograd::engine::evaluate_function"
ANNOTATION = re.compile(
    r"Optimizer\.step(?=#)|Optimizer\.zero_grad|DistributedDataParallel\.forward|enumerate\(DataLoader\)"
    r"|FSDP::root_pre_forward|FullyShardedDataParallel\.forward|## ?(?:forward|backward|optimizer) ?##$"
)
PHASE_OF = {
    "optimizer.step": "optimizer",
    "optimizer": "optimizer",
    "distributeddataparallel.forward": "forward",
    "fullyshardeddataparallel.forward": "forward",
    "forward": "forward",
    "backward": "backward",
    "enumerate(dataloader)": "loading",
}

MOST_LATE_NS = 1_000_000
"""From an operation's end until the thread that waited for it runs again: threads of a busy machine take up to a time slice."""

MOST_LOOKED_AT = 64
"""Annotations of other threads that may begin between a collective's and its launch."""
