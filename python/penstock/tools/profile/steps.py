"""From records to what the page draws: rates of interfaces, how long steps take, and one step as a timeline. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from penstock.numbers import duration
from penstock.profiling.breakdown import OTHER, Breakdown
from penstock.profiling.clocks import Clock, clocks
from penstock.profiling.divide import lengths as lengths_of
from penstock.profiling.intervals import overlaps, union, without
from penstock.profiling.matching import by_rank, meetings
from penstock.profiling.phases import marked_waits, phases
from penstock.profiling.record import Record
from penstock.profiling.standing import flight, standing
from penstock.profiling.turns import turns
from penstock.profiling.utilisation import Series, series
from penstock.reports import Axis, Curve, Key, Lines, Panel, Picture, Row, Stretch, Timeline
from penstock.reports import series as look
from penstock.tools.profile.shown import unit

__all__ = ["Rates", "lengths", "rates", "timeline"]


class Rates(NamedTuple):
    """Of one interface, on the first host's clock."""

    host: str
    interface: str
    rx: Series
    tx: Series

    @property
    def total(self) -> float:
        """Bytes, both ways."""
        return sum(rate * (end - start) for way in (self.rx, self.tx) for (start, end), rate in way.points) / 1e9

    @property
    def highest(self) -> float:
        """Bytes per second, of both ways."""
        return max(rate for way in (self.rx, self.tx) for _, rate in way.points)


def rates(records: Sequence[Record], breakdown: Breakdown) -> list[Rates]:
    """Of all interfaces that carried anything, the busiest first."""
    ways: dict[tuple[str, str], dict[str, Series]] = {}
    for one in series(records, breakdown):
        name, _, counter = one.name.rpartition(".")
        if name.startswith("nic.") and counter in ("rx_bytes", "tx_bytes"):
            ways.setdefault((one.host, name.removeprefix("nic.")), {})[counter] = one
    found = [Rates(*key, way["rx_bytes"], way["tx_bytes"]) for key, way in ways.items() if len(way) == 2]
    return sorted((each for each in found if each.total > 0), key=lambda each: -each.total)


def lengths(records: Sequence[Record]) -> Picture | None:
    """How long each step takes, by its number; None for fewer than two steps."""
    every, _ = by_rank(records)
    found: dict[int, list[tuple[int, int]]] = {}
    left_out = 0
    of = lengths_of(every)
    for record in every:
        own = of[record.header.rank]
        sampled = {sample.step for sample in record.samples}
        plain = [each for each in own if each[0] not in sampled]
        if 2 * len(plain) >= len(own):  # a trace of another tool may have nothing but samples
            left_out += len(own) - len(plain)
            own = plain
        if len(own) > 1:
            found[record.header.rank] = own
    if not found:
        return None
    order = sorted(found, key=lambda rank: (-max(ns for _, ns in found[rank]), rank))
    shown = sorted(order[:MOST_RANKS])
    most = MOST_LENGTHS // len(shown)
    usual = statistics.median(ns for own in found.values() for _, ns in own)
    in_unit = unit(usual)
    curves = []
    for index, rank in enumerate(shown):
        points = _extremes(found[rank], most)
        numbers, times = [number for number, _ in points], [ns / in_unit.ns for _, ns in points]
        curves.append(Curve(f"rank {rank}", numbers, times, look(index), width_px=1.4))
    number, longest = max(found[order[0]], key=lambda each: each[1])
    see = (
        f"The median step takes {duration(usual / 1e9)}; the longest, step {number} of rank {order[0]}, "
        f"{duration(longest / 1e9)}."
    )
    first, last = (
        statistics.median(ns for own in found.values() for _, ns in own[a * len(own) // 4 : b * len(own) // 4] or own)
        for a, b in ((0, 1), (3, 4))
    )
    if abs(last - first) > CHANGED * first:
        see += f" The median is {duration(first / 1e9)} in the first quarter of them, and {duration(last / 1e9)} in the last."
    how = ["Without what torch's profiler takes, on the rank that it holds up most."]
    if left_out:
        how.append("Sampled steps, which it makes longer, are left out.")
    if any(len(own) > most for own in found.values()):
        stride = max(_stride(len(own), most) for own in found.values())
        how.append(f"Of each {stride} steps the shortest and the longest are shown.")
    if len(found) > len(shown):
        how.append(f"Of {len(found)} ranks those {len(shown)} are shown that have the longest steps.")
    panel = Panel("", Axis("step", "number"), Axis("time of a step", in_unit.name, from_zero=True), curves)
    return Picture("steps", Lines([panel]), see, " ".join(how))


def _extremes(points: Sequence[tuple[int, int]], most: int) -> list[tuple[int, int]]:
    """At most so many of them: of each so many that follow each other the lowest and the highest."""
    stride = _stride(len(points), most)
    found: list[tuple[int, int]] = []
    for at in range(0, len(points), stride):
        group = points[at : at + stride]
        found += sorted({pick(group, key=lambda each: each[1]) for pick in (min, max)})
    return found


def _stride(count: int, most: int) -> int:
    return 1 if count <= most else -(-count // (most // 2))


def timeline(
    records: Sequence[Record],
    breakdown: Breakdown,
    ranks: Sequence[int],
    colours: Mapping[str, str],
    key: Sequence[tuple[str, str]],
) -> Picture | None:
    """The sampled step that most ranks have, of middling length: for each rank what its thread does and what is in flight, and
    for each interface what it carries. As the division has them (docs/design/profile-division.md)."""
    every, _ = by_rank(records)
    number = _number([record for record in every if record.header.rank in ranks])
    if number is None:
        return None
    met = meetings(every)
    clock_of, _ = clocks(every, met)
    courses = turns(every, [one for one in met if one.step == number], clock_of).courses
    drawn = []
    for record in every:
        sample = next((each for each in record.samples if each.step == number), None)
        step = next((each for each in record.steps if each.number == number), None)
        if record.header.rank in ranks and sample is not None and step is not None:
            drawn.append((record.header.rank, clock_of[record.header.host], step, sample))
    if not drawn:
        return None
    first = min(clock.on_first(step.start_ns) for _, clock, step, _ in drawn)
    last = max(clock.on_first(step.end_ns) for _, clock, step, _ in drawn)
    in_unit = unit(last - first)

    def at(time_ns: int, clock: Clock | None = None) -> float:
        return ((time_ns if clock is None else clock.on_first(time_ns)) - first) / in_unit.ns

    rows = []
    for rank, clock, step, sample in drawn:
        own = courses.get(rank, {}).get(number, [])
        moving = flight(own, 0, LAST_NS)
        marked = marked_waits(step)
        still = union([*((a, b, None) for a, b, _ in marked), *standing(step, sample, marked, moving)])
        waiting = [(a, b, None) for a, b, _, kind in overlaps(still, moving) if kind[1] == "wait"]
        stretches = [
            Stretch(at(a, clock), at(b, clock), colours.get(what, colours[OTHER])) for a, b, what in phases(step)
        ]
        # Behind a wait, which is half as high, is nothing. A thread that stands still for what no sample has counts as wire.
        stretches += [Stretch(at(a, clock), at(b, clock), "paper") for a, b, _ in waiting]
        stretches += [Stretch(at(a, clock), at(b, clock), WAIT, HALF) for a, b, _ in waiting]
        stretches += [Stretch(at(a, clock), at(b, clock), WIRE) for a, b, _ in without(still, waiting)]
        rows.append(Row("thread", stretches, heading=f"rank {rank}"))
        if moving:
            flying = [
                Stretch(at(a, clock), at(b, clock), *((WAIT, HALF) if kind[1] == "wait" else (WIRE,)))
                for a, b, kind in moving
            ]
            rows.append(Row("network", flying))
    rows += _links(records, breakdown, first, last, in_unit.ns)
    used = {stretch.colour for row in rows for stretch in row.stretches}
    shown = [Key(text, colour, is_hollow=colour == WAIT) for text, colour in key if colour in used]
    see = f"Step {number} takes {duration((last - first) / 1e9)} from the first rank's start to the last one's end."
    how = (
        "Thread: what the rank does, and in colour what it stands still for. Network: what is in flight for it; until the last "
        "rank is there it waits, and is half as high."
    )
    if any(row.heading == "links" for row in rows):
        how += " Links: the height is the rate, as a share of the highest."
    return Picture("moments", Timeline(Axis("since the step began", in_unit.name), at(last), rows, shown), see, how)


def _number(records: Sequence[Record]) -> int | None:
    lengths: dict[int, list[int]] = {}
    for record in records:
        sampled = {sample.step for sample in record.samples}
        for step in record.steps:
            if step.number in sampled:
                lengths.setdefault(step.number, []).append(step.end_ns - step.start_ns)
    if not lengths:
        return None
    most = max(map(len, lengths.values()))
    common_to_most = {number: sum(each) for number, each in lengths.items() if len(each) == most}
    return sorted(common_to_most, key=common_to_most.__getitem__)[(len(common_to_most) - 1) // 2]


def _links(records: Sequence[Record], breakdown: Breakdown, first: int, last: int, scale: float) -> list[Row]:
    """What each host's interfaces carry during the step."""
    rows: list[Row] = []
    found = rates(records, breakdown)[:MOST_LINKS]
    several = len({each.host for each in found}) > 1
    for each in found:
        for way, one in (("in", each.rx), ("out", each.tx)):
            highest = max(rate for _, rate in one.points)
            stretches = []
            for (start, end), rate in one.points:
                if end > first and start < last and rate > 0:
                    level = max(0.05, round(20 * rate / highest) / 20)
                    begin, until = max(start, first) - first, min(end, last) - first
                    stretches.append(Stretch(begin / scale, until / scale, LINK, level))
            if stretches:
                label = f"{each.host} {each.interface} {way}" if several else f"{each.interface} {way}"
                rows.append(Row(label, stretches, heading="" if rows else "links"))
    return rows


LAST_NS = 1 << 63
MOST_LINKS = 4
MOST_RANKS, MOST_LENGTHS = 5, 1000
"""Of more than five colours some look alike to some people (`reports.charts`). Points are of all ranks together."""
CHANGED = 0.1
WIRE, WAIT, LINK, HALF = "series-1", "series-2", "series-5", 0.5
