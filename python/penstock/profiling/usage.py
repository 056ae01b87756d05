"""What was used of a job's hosts over time, as lines to draw and to write: the sampler's counters in groups, each bounded.

A group has at most so many lines, those first that matter most, and says how many are left out; a line has at most `MOST_POINTS`
points. So neither many ranks nor a long run makes a page or a file large.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.profiling import streams
from penstock.profiling.breakdown import Breakdown
from penstock.profiling.record import Interval, Record
from penstock.profiling.utilisation import Host, hosts, thinned

__all__ = ["MOST_LINES", "MOST_POINTS", "Group", "Line", "groups"]


@dataclass(frozen=True)
class Line:
    """One counter over time."""

    label: str
    """Such as ``rank 3`` or ``eth0 of host-a``."""
    host: str
    counter: str
    """As docs/reference/profile-counters.md has it."""
    points: tuple[tuple[Interval, float], ...]
    """On the first host's clock; each the mean over its interval."""
    lowest: float
    """Of all that was recorded, as `highest`: a point may stand for several readings."""
    highest: float


@dataclass(frozen=True)
class Group:
    """Lines with the same meaning and unit."""

    what: str
    unit: str
    lines: tuple[Line, ...]
    """In the order of `order`."""
    left_out: int
    """Lines that are beyond the most that a group has."""
    order: str
    """Which lines come first."""


def groups(records: Sequence[Record], breakdown: Breakdown, most: int) -> list[Group]:
    """What was recorded, in the order of `KINDS`; of each kind at most so many lines. A kind without readings, or whose readings
    are all 0, has no group.

    Cost: one pass over the readings; points are made of the lines that are kept.
    """
    every = hosts(records)
    naming = _Naming(records, len(every) > 1)
    found: dict[Kind, list[_Candidate]] = {}
    for host in every:
        for counter in (*host.counters, *host.levels):
            for kind in KINDS:
                if match := kind.counter.fullmatch(counter):
                    weight = _weight(host, counter, match, kind)
                    if weight is not None:
                        found.setdefault(kind, []).append(_Candidate(weight, host, match))
    made = []
    for kind in KINDS:
        order = sorted(found.get(kind, ()), key=lambda each: -each.weight)
        lines = tuple(line for each in order[:most] if (line := _line(each, breakdown, naming)).points)
        if lines:
            made.append(Group(kind.what, kind.unit, lines, max(0, len(order) - most), ORDERS[kind.order]))
    return made


class Kind(NamedTuple):
    """Which counters make a group."""

    what: str
    unit: str
    counter: re.Pattern[str]
    order: str = "mean"
    """A key of `ORDERS`."""


def _of(what: str, unit: str, pattern: str, order: str = "mean") -> Kind:
    return Kind(what, unit, re.compile(pattern), order)


_RANK = r"pid\.(?P<pid>\d+)\.(?P<workers>workers\.)?"
_STREAM = r"stream\.(?P<stream>\d+)\."

KINDS = (
    _of("received", "bytes/s", r"nic\.(?P<interface>.+)\.rx_bytes"),
    _of("sent", "bytes/s", r"nic\.(?P<interface>.+)\.tx_bytes"),
    _of("read from the memory of ranks", "bytes/s", _RANK + "memory_read_bytes"),
    _of("processor time", "processors", rf"(?:{_RANK}cpu_s|(?P<all>cpu)\.busy_s)"),
    _of("processor time of threads", "processors", _RANK + r"thread\.(?P<thread>\d+\..*)\.cpu_s"),
    _of("memory of ranks", "bytes", _RANK + "memory_bytes"),
    _of("memory available", "bytes", r"memory\.available_bytes", "least"),
    _of("/dev/shm used", "bytes", r"shm\.used_bytes"),
    _of("read from disk", "bytes/s", rf"(?:{_RANK}disk_read_bytes|disk\.(?P<disk>.+)\.read_bytes)"),
    _of("written to disk", "bytes/s", rf"(?:{_RANK}disk_written_bytes|disk\.(?P<disk>.+)\.written_bytes)"),
    _of("round trip", "us", _STREAM + "rtt_us", "busiest"),
    _of("congestion window", "bytes", _STREAM + "cwnd_bytes", "busiest"),
    _of("delivery rate", "bytes/s", _STREAM + "delivery_bytes_per_s", "busiest"),
    _of("retransmissions", "segments/s", _STREAM + "retransmits"),
    _of("GPU busy", "share", r"gpu\.(?P<gpu>\d+)\.busy_share"),
    _of("GPU memory", "bytes", r"gpu\.(?P<gpu>\d+)\.memory_bytes"),
)
ORDERS = {
    "mean": "those with the highest mean first",
    "least": "those with the lowest mean first",
    "busiest": "those first that moved most bytes",
}
MOST_LINES, MOST_POINTS = 32, 200
"""Lines are of a group in a file. With all 16 groups full, a file has some 100,000 points, 5 MB."""


class _Candidate(NamedTuple):
    weight: float
    """Candidates with more come first."""
    host: Host
    match: re.Match[str]
    """Of a kind's pattern with the counter's name."""


def _weight(host: Host, counter: str, match: re.Match[str], kind: Kind) -> float | None:
    """Of a candidate; None for a counter that says nothing."""
    counted = host.counters.get(counter)
    if counted is not None:
        mean = counted.totals[-1] / (counted.times_ns[-1] - counted.times_ns[0])
    else:
        moments, levels = host.levels[counter]
        if len(moments) < 2:
            return None
        mean = sum(levels) / len(levels)
    # A GPU that does nothing is worth knowing. Of disks and streams most do nothing.
    if not math.isfinite(mean) or (mean == 0 and kind.what != "GPU busy"):
        return None
    if kind.order == "busiest":
        moved = (host.counters.get(f"stream.{match['stream']}.{way}_bytes") for way in ("tx", "rx"))
        mean = sum(each.totals[-1] for each in moved if each is not None)
    return -mean if kind.order == "least" else mean


def _line(chosen: _Candidate, breakdown: Breakdown, naming: _Naming) -> Line:
    host, counter = chosen.host, chosen.match.string
    shift = round(breakdown.offsets_ns.get(host.name, (0.0, 0.0))[0])
    # What stands in a file that makes no sense may overflow.
    points = [each for each in host.points(counter) if math.isfinite(each[1])]
    values = [value for _, value in points]
    # Six digits, as many as mean something.
    kept = tuple(
        ((start + shift, end + shift), float(f"{value:.6g}"))
        for (start, end), value in thinned(points, MOST_POINTS)
        if math.isfinite(value)
    )
    label = naming.of(host, chosen.match.groupdict())
    return Line(label, host.name, counter, kept, min(values, default=0.0), max(values, default=0.0))


class _Naming:
    """What lines are called."""

    def __init__(self, records: Sequence[Record], has_several_hosts: bool) -> None:
        self._ranks = {
            (record.header.host, str(record.header.pid)): f"rank {record.header.rank}"
            for record in records
            if not record.is_of_host
        }
        self._streams = streams.names(records)
        self._has_several_hosts = has_several_hosts

    def of(self, host: Host, parts: Mapping[str, str | None]) -> str:
        """By the named parts of a counter's pattern."""
        suffix = f" of {host.name}" if self._has_several_hosts else ""
        if (number := parts.get("stream")) is not None:
            return self._streams.get((host.name, number)) or f"stream {number}{suffix}"
        if (number := parts.get("gpu")) is not None:
            return f"GPU {number}{suffix}"
        if (pid := parts.get("pid")) is not None:
            name = self._ranks.get((host.name, pid)) or f"process {pid}{suffix}"
            if parts.get("workers"):
                return f"workers of {name}"
            number, _, thread = (parts.get("thread") or "").partition(".")
            if number:
                return f"main thread of {name}" if number == pid else f"thread {number} ({thread}) of {name}"
            return name
        if parts.get("all"):
            return f"all programs{suffix}"
        if (disk := parts.get("disk")) is not None:
            return f"disk {disk}{suffix}"
        return f"{parts['interface']}{suffix}" if parts.get("interface") else host.name
