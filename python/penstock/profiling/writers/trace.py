"""Records as Chrome's trace format, which Perfetto, chrome://tracing and HolisticTraceAnalysis open (docs/reference/profile.md).

Times are microseconds since the job's first event, on the first host's clock. Names of arguments are those that torch's profiler
(Kineto) writes.
"""

from __future__ import annotations

import heapq
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.numbers import byte_rate
from penstock.profiling import streams
from penstock.profiling.clocks import Clock, clocks
from penstock.profiling.intervals import clipped, union
from penstock.profiling.matching import Kind, Meeting, by_rank, kind, meetings
from penstock.profiling.phases import marked_waits, phases
from penstock.profiling.record import Operation, Record, Step
from penstock.profiling.standing import flight, standing
from penstock.profiling.turns import Course, Turns, turns
from penstock.profiling.utilisation import only_grows
from penstock.profiling.writers.whole import whole

__all__ = ["kineto", "perfetto"]

Event = dict[str, Any]


def perfetto(records: Sequence[Record], path: Path) -> None:
    """Write one trace of the whole job: a process a rank, tracks for its training thread, its waits, its operators and each
    group's operations, arrows between ranks; and a process a host, with a track for each interface and stream, and its counters.

    Memory: some 1.5 KB for each sampled operation beside the records; events are written one by one.

    Raises:
        Config: the file cannot be written.
    """
    job = _Job(records)
    with whole(path) as file:
        _write(file.write, job, None, job.events(_Names()))


def kineto(records: Sequence[Record], folder: Path) -> list[Path]:
    """Write a trace a rank, ``rank-N.json``, as HolisticTraceAnalysis takes them: what it counts is called a kernel.

    Returns: the files.

    Raises:
        Config: a file cannot be written.
    """
    job = _Job(records)
    paths = []
    for record in job.ranks:
        paths.append(folder / f"rank-{record.header.rank}.json")
        with whole(paths[-1]) as file:
            _write(file.write, job, record, job.of_rank(record, _Names(is_for_hta=True)))
    return paths


@dataclass
class _Names:
    """How operations are called, and the arrows between them."""

    is_for_hta: bool = False
    count: int = 0
    """Of arrows, or of operations that are tied to their issue."""

    def of(self, operation: Operation) -> str:
        # HolisticTraceAnalysis takes for communication what begins with ncclKernel, whatever the backend.
        return f"ncclKernel_{operation.name}" if self.is_for_hta else operation.name


@dataclass
class _Job:
    """All that the traces of a job need to know of it."""

    records: Sequence[Record]
    ranks: list[Record] = field(init=False)
    met: list[Meeting] = field(init=False)
    clock_of: dict[str, Clock] = field(init=False)
    judged: Turns = field(init=False)
    origin_ns: int = field(init=False)
    tracks: dict[int, _Tracks] = field(init=False)
    members: dict[str, list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.ranks, _ = by_rank(self.records)
        self.met = meetings(self.ranks)
        self.clock_of, _ = clocks(self.ranks, self.met)
        self.judged = turns(self.ranks, self.met, self.clock_of)
        self.origin_ns = min((self._first(record) for record in self.records), default=0)
        self.tracks = {
            record.header.rank: _Tracks(self.judged.courses.get(record.header.rank, {})) for record in self.ranks
        }
        groups: dict[str, set[int]] = {}
        for meeting in self.met:
            for rank, operation in meeting.parts:
                groups.setdefault(operation.group, set()).add(rank)
        self.members = {group: sorted(ranks) for group, ranks in groups.items()}

    def us(self, host: str, time_ns: int) -> float:
        """A time of a host's clock as the trace has it."""
        clock = self.clock_of.get(host)
        return ((time_ns if clock is None else clock.on_first(time_ns)) - self.origin_ns) / 1000

    def _first(self, record: Record) -> int:
        moments = [record.header.start_ns]
        moments += [step.start_ns for step in record.steps]
        moments += [op.issued_ns for sample in record.samples for op in sample.operations]
        moments += [sample.busy[0][0] for sample in record.samples if sample.busy]
        moments += [each.time_ns for each in record.readings] + [each.time_ns for each in record.events]
        clock = self.clock_of.get(record.header.host)
        return min(moments) if clock is None else clock.on_first(min(moments))

    def events(self, names: _Names) -> Iterator[Event]:
        for record in self.ranks:
            yield from self.of_rank(record, names)
        hosts = list(dict.fromkeys(record.header.host for record in self.records))
        # All ranks of a host have its readings.
        counted = {record.header.host: record for record in reversed(self.records) if record.readings}
        named = streams.names(self.records)
        told = {(record.header.host, each.number): each for record in self.records for each in streams.ends(record)}
        for number, host in enumerate(hosts):
            if host in counted:
                links = {f"nic.{name}": name for name in _interfaces(counted[host])}
                for (its_host, stream), each in told.items():
                    if its_host == host:
                        name = f"{named[host, stream]}, {each.interface}, {each.here} to {each.there}"
                        links[f"stream.{stream}"] = name
                yield from self._of_host(counted[host], HOST_PIDS + number, links)
        yield from self._arrows(names)

    def of_rank(self, record: Record, names: _Names) -> Iterator[Event]:
        rank, host = record.header.rank, record.header.host
        tracks = self.tracks[rank]
        yield _meta("process_name", rank, 0, {"name": f"rank {rank} on {host}"})
        yield _meta("process_labels", rank, 0, {"labels": host})
        yield _meta("process_sort_index", rank, 0, {"sort_index": rank})
        names_of = {THREAD: "training thread", WAITS: "waits of the training thread", OPERATORS: "operators"}
        if names.is_for_hta:
            names_of[ISSUES] = "issues of operations"
        for tid, name in {**names_of, **tracks.names}.items():
            yield _meta("thread_name", rank, tid, {"name": name})
            yield _meta("thread_sort_index", rank, tid, {"sort_index": tid})
        samples = {sample.step: sample for sample in record.samples}
        free = 0
        for step in sorted(record.steps, key=lambda step: (step.start_ns, step.number)):
            # Steps of one thread do not overlap; those of a broken file may.
            start, end = max(step.start_ns, free), step.end_ns
            if start >= end:
                continue
            free = end

            yield self._mark(record, THREAD, f"ProfilerStep#{step.number}", start, end, _about(step))
            for a, b, phase in clipped(phases(step), start, end):
                yield self._mark(record, THREAD, phase, a, b, {"step": step.number})
            waits = marked_waits(step)
            if step.number in samples:
                courses = self.judged.courses.get(rank, {}).get(step.number, [])
                moving = flight(courses, step.start_ns, step.end_ns)
                unmarked = standing(step, samples[step.number], waits, moving)
                waits = sorted(waits + [(a, b, ("no operator in the backward pass", "")) for a, b, _ in unmarked])
            for a, b, (name, group) in clipped(waits, start, end):
                yield self._mark(
                    record, WAITS, name or "wait", a, b, {"Process Group Name": group, "step": step.number}
                )
        for a, b, _ in union((a, b, None) for sample in record.samples for a, b in sample.busy):
            ts = self.us(host, a)
            # HolisticTraceAnalysis looks at streams alone: what the processor computes is a stream, too.
            yield _span(
                rank, OPERATORS, "operators", "kernel", ts, self.us(host, b) - ts, {"device": rank, "stream": OPERATORS}
            )
        for step_number, courses in self.judged.courses.get(rank, {}).items():
            for at, course in enumerate(courses):
                yield from self._operation(record, step_number, course, tracks.of[step_number, at], names)
        for event in record.events:
            if event.kind == "stream" and not names.is_for_hta:
                # It has a track of its host. A trace of one rank has no hosts.
                continue
            ts = self.us(host, event.time_ns)
            args = {"text": event.text}
            yield {"ph": "i", "s": "p", "name": event.kind, "pid": rank, "tid": THREAD, "ts": ts, "args": args}

    def _mark(self, record: Record, tid: int, name: str, start_ns: int, end_ns: int, args: Event) -> Event:
        ts = self.us(record.header.host, start_ns)
        until = self.us(record.header.host, end_ns)
        return _span(record.header.rank, tid, name, "user_annotation", ts, until - ts, args)

    def _operation(self, record: Record, step: int, course: Course, track: int, names: _Names) -> Iterator[Event]:
        rank, host = record.header.rank, record.header.host
        operation = course.operation
        ts, turn, end = (self.us(host, at) for at in (operation.issued_ns, course.turn_ns, operation.ended_ns))
        args = {"device": rank, "stream": track, **_arguments(operation, self.members.get(operation.group, []), rank)}
        args |= {"purpose": course.purpose, "step": step}
        if course.is_known:
            args |= {"wait (us)": round(turn - ts, 3), "wire (us)": round(end - turn, 3)}
        if course.last is not None:
            args["waits for rank"] = course.last
        if names.is_for_hta:
            # It finds a kernel's step by what the processor did at its launch. Its columns have as many bits as their numbers
            # need, and this one's are overwritten with others.
            names.count += 1
            args["correlation"] = (1 << 32) + names.count
            yield _span(rank, ISSUES, "record_param_comms", "cpu_op", ts, 0, args | {"stream": -1})
        yield _span(rank, track, names.of(operation), "kernel", ts, end - ts, args)
        if course.last is not None and not names.is_for_hta:
            name = f"wait for rank {course.last}"
            yield _span(rank, track, name, "user_annotation", ts, turn - ts, {})

    def _arrows(self, names: _Names) -> Iterator[Event]:
        """From each send to its receive; from the last rank's issue of a collective to where the others' wait for it ends."""
        host_of = {record.header.rank: record.header.host for record in self.ranks}
        starts = {}
        for rank, tracks in self.tracks.items():
            for (step, at), track in tracks.of.items():
                course = self.judged.courses[rank][step][at]
                starts[rank, id(course.operation)] = (course, track)
        for meeting in self.met:
            if not meeting.is_whole or len(meeting.parts) < 2:
                continue
            ends = [(rank, *starts[rank, id(operation)]) for rank, operation in meeting.parts]
            is_pair = meeting.kind is Kind.SEND
            for rank, course, track in ends[1:] if is_pair else ends:
                if not course.is_known or (course.last is None and not is_pair):
                    continue
                source = ends[0] if is_pair else next(each for each in ends if each[0] == course.last)
                # An arrow is tied to the event around its end, so it must end before that.
                moment = min(course.turn_ns, max(course.operation.issued_ns, course.operation.ended_ns - 1))
                begin = self.us(host_of[source[0]], source[1].operation.issued_ns)
                until = self.us(host_of[rank], moment)
                if until < begin:
                    # As far as clocks can tell it ended before it began; viewers know no arrow back in time.
                    continue
                names.count += 1
                both = {"name": "sent" if is_pair else "last rank", "cat": "communication", "id": names.count}
                yield {"ph": "s", **both, "pid": source[0], "tid": source[2], "ts": begin}
                yield {"ph": "f", "bp": "e", **both, "pid": rank, "tid": track, "ts": until}

    def _of_host(self, record: Record, pid: int, links: Mapping[str, str]) -> Iterator[Event]:
        """Readings as counters: what only grows as its rate a second, the rest as it was read. Links have tracks beside, with
        what each carried from reading to reading.

        Args:
            links: interfaces and streams: by the beginning of their counters' names, what their tracks are called.
        """
        host = record.header.host
        yield _meta("process_name", pid, 0, {"name": f"links and counters of {host}"})
        yield _meta("process_sort_index", pid, 0, {"sort_index": pid})
        tracks = {link: tid for tid, link in enumerate(links, 1)}
        for link, tid in tracks.items():
            yield _meta("thread_name", pid, tid, {"name": links[link]})
            yield _meta("thread_sort_index", pid, tid, {"sort_index": tid})
        before: dict[str, tuple[int, float]] = {}
        free: dict[str, int] = {}
        """By link: until when its track has something."""
        for reading in sorted(record.readings, key=lambda reading: reading.time_ns):
            moved: dict[str, tuple[int, Event]] = {}
            ts = self.us(host, reading.time_ns)
            for name, value in reading.values.items():
                shown, unit, since_ns = value, name, 0
                if only_grows(name):
                    then = before.get(name)
                    before[name] = reading.time_ns, value
                    # A counter that falls was set back.
                    if then is None or then[0] >= reading.time_ns or value < then[1]:
                        continue
                    since_ns, unit = then[0], f"{name}_per_s"
                    shown = (value - then[1]) * 1e9 / (reading.time_ns - since_ns)
                link, _, what = unit.rpartition(".")
                args = {what: shown}
                if link in tracks:
                    latest_ns, all_args = moved.get(link, (0, {}))
                    moved[link] = max(latest_ns, since_ns), all_args | args
                yield {"ph": "C", "name": unit, "pid": pid, "ts": ts, "args": args}
            for link, (since_ns, all_args) in moved.items():
                sent, received = all_args.get("tx_bytes_per_s", 0.0), all_args.get("rx_bytes_per_s", 0.0)
                if sent or received:
                    start = self.us(host, max(since_ns, free.get(link, 0)))
                    free[link] = reading.time_ns
                    name = f"{byte_rate(sent)} sent, {byte_rate(received)} received"
                    yield _span(pid, tracks[link], name, "link", start, ts - start, all_args)


def _interfaces(record: Record) -> list[str]:
    names = (name for reading in record.readings for name in reading.values)
    carried = dict.fromkeys(
        name for name in names if name.startswith("nic.") and name.endswith(("rx_bytes", "tx_bytes"))
    )
    return list(dict.fromkeys(name.removeprefix("nic.").rpartition(".")[0] for name in carried))


class _Tracks:
    """Tracks of a rank's operations: in one group as many as it takes for none to overlap, the first that is free for each."""

    def __init__(self, courses: Mapping[int, list[Course]]) -> None:
        self.of: dict[tuple[int, int], int] = {}
        """By step, and place in its courses: the track."""
        self.names: dict[int, str] = {}
        ordered = sorted(
            (course.operation.group, course.operation.issued_ns, course.operation.ended_ns, step, at)
            for step, each in courses.items()
            for at, course in enumerate(each)
        )
        track = GROUPS - 1
        for group, operations in itertools.groupby(ordered, key=lambda each: each[0]):
            first = track + 1
            busy: list[tuple[int, int]] = []
            free: list[int] = []
            for _, issued, ended, step, at in operations:
                while busy and busy[0][0] <= issued:
                    heapq.heappush(free, heapq.heappop(busy)[1])
                if not free:
                    track += 1
                    heapq.heappush(free, track)
                    self.names[track] = f"group {group or 'without a name'}" + (
                        f", {track - first + 1}" if track > first else ""
                    )
                taken = heapq.heappop(free)
                # An event without length would lie on its neighbour.
                heapq.heappush(busy, (max(ended, issued + 1), taken))
                self.of[step, at] = taken


def _write(write: Callable[[str], Any], job: _Job, record: Record | None, events: Iterable[Event]) -> None:
    """The file: a header in lines, which HolisticTraceAnalysis searches for the rank, then an event a line."""
    some = record or (job.ranks[0] if job.ranks else None)
    world = some.header.world if some else 0
    write('{\n "schemaVersion": 1,\n "writer": "penstock",\n "displayTimeUnit": "ms",\n')
    if some is not None:
        clock = job.clock_of[job.ranks[0].header.host]
        header = job.ranks[0].header
        base_ns = header.wall_ns - clock.on_first(header.start_ns) + job.origin_ns
        write(f' "baseTimeNanoseconds": {base_ns},\n')
        backend = json.dumps(str(some.header.about.get("backend", "")))
        rank = some.header.rank
        write(f' "distributedInfo": {{"backend": {backend}, "rank": {rank}, "world_size": {world}}},\n')
    write(' "traceEvents": [\n')
    separator = ""
    for event in events:
        write(separator + json.dumps(event, separators=(",", ":")))
        separator = ",\n"
    write("\n ]\n}\n")


def _span(pid: int, tid: int, name: str, cat: str, ts: float, dur: float, args: Event) -> Event:
    # Three digits: nanoseconds.
    head = {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid}
    return {**head, "ts": round(ts, 3), "dur": round(max(dur, 0.0), 3), "args": args}


def _meta(name: str, pid: int, tid: int, args: Event) -> Event:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _about(step: Step) -> Event:
    return {
        "thread_ms": step.thread_ns / 1e6,
        "examples": step.examples,
    }


def _arguments(operation: Operation, members: list[int], rank: int) -> Event:
    """As Kineto calls them. Elements are bytes: dtypes are not recorded."""
    strides = {b - a for a, b in itertools.pairwise(members)}
    size = operation.ranks or len(members)
    plain = operation.name.replace("_", "")
    grows = {"allgather": float(size), "reducescatter": 1 / max(size, 1)}
    factor = next((grow for starts, grow in grows.items() if plain.startswith(starts)), 1.0)
    peers = {}
    if operation.peer is not None:
        is_send = kind(operation.name) is Kind.SEND
        peers = {"Src Rank": rank if is_send else operation.peer, "Dst Rank": operation.peer if is_send else rank}
    return {
        "Collective name": operation.name,
        "dtype": "Byte",
        "In msg nelems": operation.bytes,
        "Out msg nelems": round(operation.bytes * factor),
        "In split size": "[]",
        "Out split size": "[]",
        "Global rank start": members[0] if members else rank,
        "Global rank stride": strides.pop() if len(strides) == 1 else 0,
        "Group size": size,
        "Process Group Name": operation.group,
        "Process Group Description": operation.purpose,
        "Process Group Ranks": json.dumps(members),
        "Rank": rank,
        "Seq": operation.number,
        **peers,
    }


THREAD, WAITS, OPERATORS, ISSUES = 1, 2, 3, 4
GROUPS = 16
"""Tracks by number: the training thread's, then one or several a group."""
HOST_PIDS = 1 << 21
"""Above all ranks (`record.py` allows 2^20)."""
