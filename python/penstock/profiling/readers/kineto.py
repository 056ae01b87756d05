"""Traces of torch.profiler (Kineto) as records.

What is taken of a trace, by its category: operators of the host's threads (``cpu_op``), annotations, kernels and copies of a
device, and which call on the host launched each of them (``correlation``). Times are microseconds as floats behind
``baseTimeNanoseconds``; records have nanoseconds since 1970, so the ranks of a host share a clock.

Without kernels, the training thread's timeline is divided: it is blocked where it runs no operator while a collective runs. With
kernels, the device's timeline is divided (docs/design/profile-files.md, "Traces of torch.profiler"): `timeline.py` does both.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from penstock.errors import Config
from penstock.profiling.readers import collectives, timeline
from penstock.profiling.readers.chrome import Chrome
from penstock.profiling.readers.source import WHAT_WE_READ, Text, opened
from penstock.profiling.readers.timeline import Called, Host, Kernel, Named
from penstock.profiling.record import Header, Record

__all__ = ["read", "records"]


def records(paths: Sequence[Path]) -> list[Record]:
    """One for each rank. Files of one process that hold different steps are one record: a profiler with a schedule that repeats
    writes several."""
    found: dict[int, Record] = {}
    nameless: list[Record] = []
    for path in paths:
        record, rank = read(path)
        if rank is None:
            nameless.append(record)
            continue
        before = found.get(rank)
        if before is None:
            found[rank] = record
        elif not _joined(before, record):
            before.problems.append(f"{path.name} says that it is of rank {rank}, as another file does: it is left out")
    if nameless:
        free = (rank for rank in range(1 << 20) if rank not in found)
        for record in nameless:
            found[next(free)] = record
            if len(paths) > 1:
                record.problems.append(
                    f"{record.header.about['file']} does not say its rank: files count in their order"
                )
    world = max([max(found) + 1, *(record.header.world for record in found.values())])
    for rank, record in found.items():
        about = record.header.about
        host = record.header.host or (f"host of rank {rank}" if len(found) > 1 else "host")
        record.header = Header(
            rank, world, host, record.header.pid, record.header.start_ns, record.header.wall_ns, about
        )
    return [found[rank] for rank in sorted(found)]


def read(path: Path) -> tuple[Record, int | None]:
    """The record of one file, and its rank if it says one.

    Raises:
        Config: there is nothing of torch.profiler in it.
    """
    until_us, cut = math.inf, ""
    while True:
        with opened(path) as text:
            chrome = Chrome(text)
            gathered = _Gathered(until_us)
            for event in chrome.events():
                gathered.add(event)
            if gathered.dropped and (shorter := gathered.first_steps()) is not None:
                # The file is read again, for as many of its steps as can be kept.
                until_us = shorter
                cut = cut or f"{path.name} has {gathered.kept + gathered.dropped:,} events, more than {MOST_EVENTS:,}"
                continue
            return _read(text, chrome, gathered, cut)


def _read(text: Text, chrome: Chrome, gathered: _Gathered, cut: str) -> tuple[Record, int | None]:
    """``cut`` says why not all of its steps are there, if they are not."""
    name = text.path.name
    about = chrome.about
    if not chrome.has_events:
        raise Config(f"{text.path} is JSON, but no trace: it has no list traceEvents. {WHAT_WE_READ}")
    if about.get("writer") == "penstock":
        raise Config(
            f"{text.path} is a trace that penstock profile has written, which has less than its records: read the folder of those"
        )
    gathered.settle(_base_ns(about))
    if not gathered.host and not gathered.kernels:
        why = f" ({'; '.join(chrome.problems)})" if chrome.problems else ""
        raise Config(f"{text.path} is a Chrome trace without operators or kernels: it is not of torch.profiler{why}")
    problems = chrome.problems
    if gathered.bad:
        problems.append(f"{name}: {gathered.bad} events have no sensible time and are left out")
    if gathered.dropped:
        problems.append(f"{name} has more than {MOST_EVENTS} events: {gathered.dropped} are left out")
    info = about.get("distributedInfo")
    rank = _rank(info)
    groups = collectives.groups(info)
    host = Host(gathered.host, gathered.launches, rank)
    steps, samples, how = timeline.steps(host, gathered.kernels, groups, problems, name)
    if cut:
        if gathered.kernels and len(steps) > 1:
            # A device is behind the host: of the last step it has run a part only.
            steps, samples = steps[:-1], samples[:-1]
        problems.append(f"{cut}: its first {len(steps)} of {len(gathered.marks)} steps are read")
    start_ns = steps[0].start_ns
    backend = info.get("backend") if isinstance(info, dict) else None
    said = {
        "reader": "torch.profiler",
        "file": name,
        "device": "gpu" if gathered.kernels else "cpu",
        "backend": str(backend or "")[:64],
        "steps": how,
    }
    host_name = about.get("host_name")
    header = Header(
        0,
        max(1, _count(info, "world_size")),
        host_name[:256] if isinstance(host_name, str) else "",
        gathered.pid,
        start_ns,
        start_ns,
        said,
    )
    return Record(header, steps, samples, problems=problems), rank


def _joined(before: Record, record: Record) -> bool:
    """Whether two files are of one process and hold different steps; then the first has those of both."""
    is_same = (before.header.host, before.header.pid) == (record.header.host, record.header.pid)
    if not is_same or {step.number for step in before.steps} & {step.number for step in record.steps}:
        return False
    before.steps = sorted(before.steps + record.steps, key=lambda step: step.number)
    before.samples = sorted(before.samples + record.samples, key=lambda sample: sample.step)
    before.problems += record.problems
    return True


@dataclass
class _Gathered:
    """What of a trace counts; the rest of it is not kept. Times are microseconds as they stand until `settle`."""

    until_us: float = math.inf
    """What begins later does not count."""
    host: list[Named] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    launches: dict[int, Called] = field(default_factory=dict)
    pid: int = 0
    bad: int = 0
    dropped: int = 0
    marks: list[tuple[float, float]] = field(default_factory=list)
    """When the profiler's steps began and ended."""
    _raw: list[tuple[str, str, float, float, Any, dict[str, Any]]] = field(default_factory=list)

    @property
    def kept(self) -> int:
        return len(self._raw)

    def first_steps(self) -> float | None:
        """Until when to read, so that whole steps are kept. None if there is no such time: a single step has too many events, or
        the file marks no steps."""
        within = [mark for mark in sorted(self.marks) if mark[1] <= self.until_us]
        fit = int(len(within) * ROOM * MOST_EVENTS / (self.kept + self.dropped))
        count = min(max(1, fit), len(within) - 1)
        return within[count - 1][1] if count > 0 else None

    def add(self, event: dict[str, Any]) -> None:
        if event.get("ph") != "X":
            return
        category = KINDS.get(str(event.get("cat", "")).lower())
        if category is None:
            return
        start, length = event.get("ts"), event.get("dur")
        if not _is_time(start) or not _is_time(length):
            self.bad += 1
            return
        if category == "host" and timeline.STEP.match(str(event.get("name", ""))):
            self.marks.append((start, start + length))
        if start >= self.until_us:
            return
        if len(self._raw) >= MOST_EVENTS:
            self.dropped += 1
            return
        given = event.get("args")
        args = given if isinstance(given, dict) else {}
        name = sys.intern(str(event.get("name", ""))[:256])
        tid = event.get("tid")
        thread = tid if isinstance(tid, int) else str(tid)[:64]
        if category == "host":
            kept = collectives.kept(args) if _may_communicate(name) else {}
            pid = event.get("pid")
            self.pid = self.pid or (pid if isinstance(pid, int) and 0 <= pid < 1 << 32 else 0)
        else:
            correlation = args.get("correlation")
            kept = {"correlation": correlation} if isinstance(correlation, int) else {}
            if category == "device" and collectives.is_kernel(name):
                kept |= collectives.kept(args)
        self._raw.append((category, name, start, length, thread, kept))

    def settle(self, base_ns: int) -> None:
        """With the base known, which may stand behind the events, times are nanoseconds."""
        for category, name, start_us, length_us, thread, args in self._raw:
            start_ns = base_ns + round(start_us * 1e3)
            end_ns = start_ns + round(length_us * 1e3)
            if not 0 <= start_ns <= end_ns < LAST_NS:
                self.bad += 1
            elif category == "host":
                self.host.append(Named(start_ns, end_ns, thread, name, args or NOTHING))
            elif category == "device":
                self.kernels.append(Kernel(start_ns, end_ns, name, args.get("correlation", -1), args))
            elif "correlation" in args:
                self.launches[args["correlation"]] = Called(thread, start_ns)
        self._raw.clear()
        self.host.sort(key=lambda each: (each.start_ns, -each.end_ns))
        self.kernels.sort(key=lambda each: (each.start_ns, each.end_ns))


def _may_communicate(name: str) -> bool:
    return ":" in name or name == "record_param_comms"


def _is_time(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e16 and math.isfinite(value)


def _base_ns(about: Mapping[str, Any]) -> int:
    base = about.get("baseTimeNanoseconds", 0)
    return base if isinstance(base, int) and not isinstance(base, bool) and 0 <= base < LAST_NS else 0


def _rank(info: Any) -> int | None:
    rank = info.get("rank") if isinstance(info, dict) else None
    return rank if isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < 1 << 20 else None


def _count(info: Any, key: str) -> int:
    value = info.get(key) if isinstance(info, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= 1 << 20 else 0


KINDS = {
    "cpu_op": "host",
    "operator": "host",
    "user_annotation": "host",
    "kernel": "device",
    "gpu_memcpy": "device",
    "gpu_memset": "device",
    "memcpy": "device",
    "memset": "device",
    "cuda_runtime": "launch",
    "cuda_driver": "launch",
    "hip_runtime": "launch",
    "hip_driver": "launch",
    "runtime": "launch",
}
NOTHING: Mapping[str, Any] = {}
LAST_NS = 1 << 62
MOST_EVENTS = 2_000_000
"""Of those that count, of one file: about 1 GiB of memory."""
ROOM = 0.9
"""Of these events steps are to fill so much, since they are not alike."""
