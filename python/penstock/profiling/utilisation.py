"""How much of what there is was used: counters as rates on one clock, beside what limits them, and what explains their drops."""

from __future__ import annotations

import bisect
import itertools
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.profiling.breakdown import Breakdown
from penstock.profiling.intervals import Piece, clipped, union
from penstock.profiling.record import Interval, Readings, Record

__all__ = [
    "Counter",
    "Drop",
    "Host",
    "Limit",
    "Series",
    "drops",
    "hosts",
    "memory_reads",
    "only_grows",
    "series",
    "steady",
    "thinned",
    "with_links",
]


@dataclass(frozen=True)
class Counter:
    """A counter of a host that only grows, at the moments when it was read, on the host's clock."""

    times_ns: tuple[int, ...]
    totals: tuple[float, ...]
    """Since the first reading. Where the counter was set back, as a driver does at its restart, it goes on from there."""

    def grown(self, start_ns: int, end_ns: int) -> float:
        """By how much between two moments; between readings it is taken to grow evenly, before and after them not at all."""
        return self._total(end_ns) - self._total(start_ns)

    def _total(self, time_ns: int) -> float:
        after = bisect.bisect_left(self.times_ns, time_ns)
        if after == 0:
            return 0.0
        if after == len(self.times_ns):
            return self.totals[-1]
        first, last = self.times_ns[after - 1], self.times_ns[after]
        part = (time_ns - first) / (last - first)
        return self.totals[after - 1] + part * (self.totals[after] - self.totals[after - 1])


@dataclass(frozen=True)
class Limit:
    """The most that an interface can carry in a direction."""

    bytes_per_s: float
    source: str
    """``speed``: what the hardware says; ``shaper``: the host's own queue sends no faster; ``given``: somebody knew
    (`with_links`); ``highest``: the most that was seen, which may be far from what is possible."""

    @property
    def is_known(self) -> bool:
        return self.source != "highest"


class Host:
    """The sampler's record of a host, by counter. Cost: one pass over the record."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.name = record.header.host
        columns: dict[str, tuple[list[int], list[float], list[float]]] = {}
        self.last: dict[str, float] = {}
        """Of every value, the last that was read."""
        self.levels: dict[str, tuple[list[int], list[float]]] = {}
        """Of every value that does not only grow: when it was read, and what it was."""
        for reading in record.readings:
            for name, value in reading.values.items():
                self.last[name] = value
                if not only_grows(name):
                    moments, levels = self.levels.setdefault(name, ([], []))
                    if not moments or reading.time_ns > moments[-1]:
                        moments.append(reading.time_ns)
                        levels.append(value)
                    continue
                times, values, totals = columns.setdefault(name, ([], [], []))
                if times and reading.time_ns <= times[-1]:
                    continue
                total = 0.0
                if times:
                    total = totals[-1] + (value - values[-1] if value >= values[-1] else value)
                times.append(reading.time_ns)
                values.append(value)
                totals.append(total)
        self.counters = {
            name: Counter(tuple(times), tuple(totals)) for name, (times, _, totals) in columns.items() if len(times) > 1
        }

    def grown(self, name: str, start_ns: int, end_ns: int) -> float:
        """By how much a counter grew; one that was not read did not grow."""
        counted = self.counters.get(name)
        return counted.grown(start_ns, end_ns) if counted is not None else 0.0

    def points(self, name: str) -> Iterator[tuple[Interval, float]]:
        """On the host's clock: a counter as its rate from reading to reading, another value as what it is at the end of each."""
        if name in self.counters:
            return _rates(self.counters[name])
        moments, levels = self.levels.get(name, ([], []))
        return zip(itertools.pairwise(moments), levels[1:], strict=True) if len(moments) > 1 else iter(())

    def limit(self, interface: str, direction: str) -> Limit | None:
        """Of ``tx`` or ``rx`` of an interface. A shaper limits what is sent; what is received is taken to be limited alike, since
        who shapes one direction has rented that much in both."""
        names = (("speed", "speed_bytes_per_s"), ("shaper", "shaped_bytes_per_s"), ("given", "given_bytes_per_s"))
        given = [(self.last.get(f"nic.{interface}.{name}", 0.0), source) for source, name in names]
        if known := [each for each in given if each[0] > 0]:
            return Limit(*min(known))
        found = self.counters.get(f"nic.{interface}.{direction}_bytes")
        most = max((rate for _, rate in _rates(found)), default=0.0) if found is not None else 0.0
        return Limit(most, "highest") if most > 0 else None

    def interfaces(self) -> list[str]:
        """Those that carried something, but for the loopback, the busiest first."""
        carried: dict[str, float] = {}
        for name, counted in self.counters.items():
            kind, interface, _ = _parts(name)
            if kind == "nic" and name.endswith("x_bytes") and interface != "lo":
                carried[interface] = carried.get(interface, 0.0) + counted.totals[-1]
        return sorted(carried, key=lambda interface: (-carried[interface], interface))


@dataclass(frozen=True)
class Series:
    """A rate or a level over time."""

    host: str
    name: str
    """Of its counter, such as ``nic.eth0.tx_bytes``: the rate of what only grows is per second."""
    points: tuple[tuple[Interval, float], ...]
    """On the first host's clock."""
    limit: Limit | None = None


def with_links(records: Sequence[Record], bytes_per_s: float) -> list[Record]:
    """The records, in which each interface of a host carries at most so much in each direction."""
    found = []
    for record in records:
        if record.readings:  # a host's, which readers give to its ranks
            names = {name for reading in record.readings for name in reading.values if _parts(name)[0] == "nic"}
            given = dict.fromkeys(
                (f"{name.rpartition('.')[0]}.given_bytes_per_s" for name in sorted(names)), bytes_per_s
            )
            last_ns = record.readings[-1].time_ns
            record = replace(record, readings=[*record.readings, Readings(last_ns, given)])
        found.append(record)
    return found


def series(records: Iterable[Record], breakdown: Breakdown) -> Iterator[Series]:
    """Every counter of every host as rates, on the clock of the first host as `breakdown` has it."""
    for host in hosts(records):
        shift = round(breakdown.offsets_ns.get(host.name, (0.0, 0.0))[0])
        for name, counted in host.counters.items():
            points = tuple(((start + shift, end + shift), rate) for (start, end), rate in _rates(counted))
            kind, interface, direction = _parts(name)
            is_limited = kind == "nic" and name.endswith("x_bytes")
            yield Series(host.name, name, points, host.limit(interface, direction) if is_limited else None)


def thinned(points: Sequence[tuple[Interval, float]], most: int) -> list[tuple[Interval, float]]:
    """At most so many of a series, each the mean of those that it stands for."""
    stride = -(-len(points) // most) or 1
    found = []
    for at in range(0, len(points), stride):
        joined = points[at : at + stride]
        moved = sum(rate * (end - start) for (start, end), rate in joined)
        start, end = joined[0][0][0], joined[-1][0][1]
        found.append(((start, end), moved / (end - start)))
    return found


def memory_reads(records: Iterable[Record], breakdown: Breakdown) -> list[Series]:
    """What the ranks of each host read from one another's memory, all together; of hosts where they read anything."""
    found = []
    for host in hosts(records):
        each = [
            host.counters[name]
            for name in host.counters
            if name.endswith(MEMORY_READ) and host.counters[name].totals[-1]
        ]
        if not each:
            continue
        shift = round(breakdown.offsets_ns.get(host.name, (0.0, 0.0))[0])
        times = sorted({time for counted in each for time in counted.times_ns})
        points = tuple(
            ((start + shift, end + shift), sum(counted.grown(start, end) for counted in each) / (end - start) * 1e9)
            for start, end in itertools.pairwise(times)
        )
        found.append(Series(host.name, MEMORY_READ.lstrip("."), points))
    return found


def hosts(records: Iterable[Record]) -> list[Host]:
    """One for each host with readings: the sampler's record, or that of a rank which was given the host's readings."""
    found: dict[str, Record] = {}
    for record in records:
        if record.readings and (record.is_of_host or record.header.host not in found):
            found[record.header.host] = record
    return [Host(record) for record in found.values()]


@dataclass(frozen=True)
class Drop:
    """Some time in which an interface carried less than half of what it mostly does, in a direction or both."""

    host: str
    interface: str
    interval: Interval
    """On the first host's clock."""
    share: float
    """What it carried, of what it mostly does."""
    cause: str
    """``checkpoint``, ``evaluation``, ``loading``, ``retransmission``, ``slow rank``, or nothing that is known."""
    rank: int | None = None
    """Who did that, for the longest."""
    ways: tuple[str, ...] = ("rx", "tx")
    """The directions in which it carried less."""


def drops(records: Sequence[Record], breakdown: Breakdown) -> list[Drop]:
    """Where the traffic of the job's interfaces falls, and what happened then.

    Rates are means over a step's length, or a reading's if that is longer: what goes up and down within each step is no drop.
    """
    ranks = [record for record in records if not record.is_of_host and record.steps]
    if not ranks:
        return []
    shifts = {host: round(offset) for host, (offset, _) in breakdown.offsets_ns.items()}
    step_ns = statistics.median(step.end_ns - step.start_ns for record in ranks for step in record.steps)
    late = _late(ranks, shifts)
    found = []
    for host in hosts(records):
        shift = shifts.get(host.name, 0)
        for interface in host.interfaces():
            counters = {
                way: each for way in WAYS if (each := host.counters.get(f"nic.{interface}.{way}_bytes")) is not None
            }
            if not counters:
                continue
            times = next(iter(counters.values())).times_ns
            first = max(times[0] + shift, *(_on_one_clock(rank, shifts)[0] for rank in ranks))
            last = min(times[-1] + shift, *(_on_one_clock(rank, shifts)[1] for rank in ranks))
            width = round(max(2 * step_ns, 2 * (times[-1] - times[0]) / (len(times) - 1)))
            bins = [(start, start + width) for start in range(first, last - width + 1, width)]
            if len(bins) < FEWEST_BINS:
                continue
            carried = {way: [each.grown(a - shift, b - shift) for a, b in bins] for way, each in counters.items()}
            for here, share, ways in _low(carried):
                interval = (bins[here[0]][0], bins[here[-1]][1])
                cause, rank = _cause(ranks, host, interface, interval, shifts, late)
                found.append(Drop(host.name, interface, interval, share, cause, rank, ways))
    return found


def _low(carried: Mapping[str, Sequence[float]]) -> Iterator[tuple[list[int], float, tuple[str, ...]]]:
    """Runs of bins in which a direction carries less than half of its median: their places, the part of it that it carries, and
    which directions do. What carries acknowledgements alone, or noise, does not count."""
    usual = {way: statistics.median(each) for way, each in carried.items()}
    most = max(usual.values())
    low = [
        [way for way in carried if usual[way] > OF_OTHER_WAY * most and carried[way][at] < usual[way] / 2]
        for at in range(min(map(len, carried.values())))
    ]
    for is_low, group in itertools.groupby(range(len(low)), key=lambda at: bool(low[at])):
        if is_low:
            here = list(group)
            pairs = [(way, at) for at in here for way in low[at]]
            share = sum(carried[way][at] for way, at in pairs) / sum(usual[way] for way, _ in pairs)
            yield here, share, tuple(way for way in WAYS if any(way in low[at] for at in here))


def _cause(
    ranks: Sequence[Record],
    host: Host,
    interface: str,
    interval: Interval,
    shifts: dict[str, int],
    late: dict[int, list[Piece[None]]],
) -> tuple[str, int | None]:
    """What happened for at least `EXPLAINS` of an interval, the rarest first."""
    length = interval[1] - interval[0]
    for phase in ("checkpoint", "evaluation", "loading"):
        longest = max(ranks, key=lambda rank: _time_in(rank, phase, interval, shifts))
        if _time_in(longest, phase, interval, shifts) >= EXPLAINS * length:
            return phase, longest.header.rank
    shift = shifts.get(host.name, 0)
    whole = host.record.readings[0].time_ns, host.record.readings[-1].time_ns
    now, usual = (
        host.grown(f"streams.{interface}.resent_bytes", *span)
        / max(1.0, host.grown(f"streams.{interface}.tx_bytes", *span))
        for span in ((interval[0] - shift, interval[1] - shift), whole)
    )
    if now > RESENT and now > 2 * usual:
        return "retransmission", None
    waits = {rank.header.rank: _time_in(rank, None, interval, shifts) / length for rank in ranks}
    least = min(waits, key=lambda rank: waits[rank])
    others = [share for rank, share in waits.items() if rank != least]
    if others and min(others) >= EXPLAINS and waits[least] < min(others) / 2:
        return "slow rank", least
    # DDP waits without a mark.
    held = {rank: _inside(own, interval) for rank, own in late.items()}
    last = max(held, key=lambda rank: held[rank], default=None)
    if last is not None and held[last] >= EXPLAINS * length:
        return "slow rank", last
    return "", None


def _inside(pieces: Sequence[Piece[None]], interval: Interval) -> int:
    """Of pieces in order, how much is in an interval."""
    first = bisect.bisect_right(pieces, interval[0], key=lambda piece: piece[1])
    until = bisect.bisect_left(pieces, interval[1], key=lambda piece: piece[0])
    return sum(end - start for start, end, _ in clipped(pieces[first:until], *interval))


def _late(ranks: Sequence[Record], shifts: dict[str, int]) -> dict[int, list[Piece[None]]]:
    """By rank, on one clock: from when all others had begun their first backward pass of a step until this one did."""
    begun: dict[int, list[tuple[int, int]]] = {}
    for record in ranks:
        shift = shifts.get(record.header.host, 0)
        for step in record.steps:
            starts = [span.start_ns for span in step.spans if span.phase == "backward"]
            if starts:
                begun.setdefault(step.number, []).append((min(starts) + shift, record.header.rank))
    found: dict[int, list[Piece[None]]] = {}
    for each in begun.values():
        if len(each) == len(ranks) > 1:
            before, last = sorted(each)[-2:]
            found.setdefault(last[1], []).append((before[0], last[0], None))
    return {rank: union(own) for rank, own in found.items()}


def _time_in(record: Record, phase: str | None, interval: Interval, shifts: dict[str, int]) -> int:
    """Nanoseconds of an interval that a rank spent in a phase, or without one in waits."""
    shift = shifts.get(record.header.host, 0)
    total = 0
    first = bisect.bisect_right(record.steps, interval[0] - shift, key=lambda step: step.end_ns)
    for step in itertools.islice(record.steps, first, None):
        if step.start_ns + shift >= interval[1]:
            break
        parts = step.waits if phase is None else [span for span in step.spans if span.phase == phase]
        for part in parts:
            total += max(0, min(part.end_ns + shift, interval[1]) - max(part.start_ns + shift, interval[0]))
    return total


def _on_one_clock(record: Record, shifts: dict[str, int]) -> Interval:
    shift = shifts.get(record.header.host, 0)
    start, end = steady(record)
    return start + shift, end + shift


def steady(record: Record) -> Interval:
    """A rank's steps without the first two, which are unlike the others (`divide.py` leaves them out as well)."""
    first = min(2, (len(record.steps) - 1) // 2)
    return record.steps[first].start_ns, record.steps[-1].end_ns


def _rates(counted: Counter) -> Iterator[tuple[Interval, float]]:
    for (start, before), (end, after) in itertools.pairwise(zip(counted.times_ns, counted.totals, strict=True)):
        yield (start, end), (after - before) / (end - start) * 1e9


def _parts(name: str) -> tuple[str, str, str]:
    """``nic.eth0.100.tx_bytes`` is ``nic``, ``eth0.100``, ``tx``: names of interfaces may have dots."""
    kind, _, rest = name.partition(".")
    middle, _, last = rest.rpartition(".")
    return kind, middle, last.partition("_")[0]


def only_grows(name: str) -> bool:
    """Whether a value counts from some start, so that its differences say something (docs/reference/profile-counters.md)."""
    return _GROWS.search(name) is not None


_GROWS = re.compile(r"(rx|tx|resent|read|written)_bytes$|_packets$|(?<!_per)_s$|(busy|limited)_us$|retransmits$")

MEMORY_READ = ".memory_read_bytes"
"""How the names of the counters end that each rank has of its own engine."""

WAYS = ("rx", "tx")
FEWEST_BINS = 5
OF_OTHER_WAY = 0.05
"""Of the bytes of a direction: acknowledgements of TCP take 1 to 3 %."""
EXPLAINS = 0.3
"""Of a drop's time. A drop is cut at whole bins, so its cause may fill less than all of it."""
RESENT = 0.01
"""Of the bytes sent: less costs TCP little."""
