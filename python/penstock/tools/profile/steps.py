"""From records to what the page draws: rates of interfaces, and one step as a timeline. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from penstock.profiling.breakdown import OTHER
from penstock.profiling.readers.timeline import common, minus, union
from penstock.profiling.record import Interval, Operation, Record, Sample, Step
from penstock.reports import Axis, Key, Picture, Row, Stretch, Timeline
from penstock.reports.numbers import duration
from penstock.tools.profile.shown import unit

__all__ = ["Rates", "rates", "timeline"]


class Rates(NamedTuple):
    """Of one interface, in bytes per second up to each moment."""

    host: str
    interface: str
    start_ns: int
    """The first reading, on the host's clock."""
    seconds: list[float]
    rx: list[float]
    tx: list[float]


def rates(records: Sequence[Record]) -> list[Rates]:
    """Of all interfaces that carried anything, on one axis for each host; `MOST_POINTS` of each at most."""
    hosts: dict[str, Record] = {}
    for record in records:
        if len(record.readings) > len(hosts[record.header.host].readings if record.header.host in hosts else ()):
            hosts[record.header.host] = record
    found = []
    for host, record in hosts.items():
        names = {
            name.rpartition(".")[0] for reading in record.readings for name in reading.values if name.endswith(ENDS)
        }
        for name in sorted(names):
            points = [
                (reading.time_ns, reading.values[f"{name}.rx_bytes"], reading.values[f"{name}.tx_bytes"])
                for reading in record.readings
                if f"{name}.rx_bytes" in reading.values and f"{name}.tx_bytes" in reading.values
            ]
            stride = -(-len(points) // MOST_POINTS) or 1
            kept = points[::stride]
            if len(kept) < 2:
                continue
            first = record.readings[0].time_ns
            seconds, rx, tx = [], [], []
            for (before, rx_before, tx_before), (at, rx_at, tx_at) in itertools.pairwise(kept):
                if at <= before:
                    continue
                seconds.append((at - first) / 1e9)
                # A counter that falls has been reset.
                rx.append(max(0.0, rx_at - rx_before) / (at - before) * 1e9)
                tx.append(max(0.0, tx_at - tx_before) / (at - before) * 1e9)
            if any(rx) or any(tx):
                found.append(Rates(host, name.removeprefix("nic."), first, seconds, rx, tx))
    return found


def timeline(
    records: Sequence[Record],
    offsets_ns: Mapping[str, tuple[float, float]],
    ranks: Sequence[int],
    colours: Mapping[str, str],
    key: Sequence[tuple[str, str]],
) -> Picture | None:
    """The sampled step that most ranks have, of middling length: for each rank what its thread does and what is in flight, and
    for each interface what it carries."""
    chosen = {record.header.rank: record for record in records}
    here = [chosen[rank] for rank in ranks if rank in chosen]
    number = _number(here)
    if number is None:
        return None
    moved = {record.header.rank: round(offsets_ns.get(record.header.host, (0.0, 0.0))[0]) for record in records}
    turns = _turns(records, number, moved)
    parts = []
    for record in here:
        sample = next((each for each in record.samples if each.step == number), None)
        step = next((each for each in record.steps if each.number == number), None)
        if sample is not None and step is not None:
            parts.append((record, step, sample, moved[record.header.rank]))
    if not parts:
        return None
    first = min(step.start_ns + shift for _, step, _, shift in parts)
    last = max(step.end_ns + shift for _, step, _, shift in parts)
    in_unit = unit(last - first)

    def at(time_ns: float) -> float:
        return (time_ns - first) / in_unit.ns

    rows = []
    for record, step, sample, shift in parts:
        rank = record.header.rank
        wire, waits = _flight(rank, sample, turns, shift)
        thread, still = _thread(step, sample, colours)
        stretches = [Stretch(at(a + shift), at(b + shift), colour) for a, b, colour in thread]
        standing = [(a + shift, b + shift) for a, b in still]
        waiting = common(standing, waits)
        # Behind a wait, which is half as high, is nothing. A thread that stands still for what no sample has counts as wire.
        stretches += [Stretch(at(a), at(b), "paper") for a, b in waiting]
        stretches += [Stretch(at(a), at(b), WAIT, HALF) for a, b in waiting]
        stretches += [Stretch(at(a), at(b), WIRE) for a, b in minus(standing, waiting)]
        rows.append(Row("thread", stretches, heading=f"rank {rank}"))
        if wire or waits:
            flying = [Stretch(at(a), at(b), WAIT, HALF) for a, b in waits]
            flying += [Stretch(at(a), at(b), WIRE) for a, b in wire]
            rows.append(Row("network", flying))
    rows += _links(records, offsets_ns, first, last, in_unit.ns)
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


Meeting = tuple[str, str, int, int | None, int | None]
"""Name, group, number and, of a send and its receive, from and to."""


def _meeting(rank: int, operation: Operation) -> Meeting:
    ends = {"send": (rank, operation.peer), "recv": (operation.peer, rank)}.get(operation.name, (None, None))
    name = "send" if operation.name == "recv" else operation.name
    return name, operation.group, operation.number, *ends


def _turns(records: Sequence[Record], number: int, moved: Mapping[int, int]) -> dict[Meeting, int]:
    """When the last rank of an operation issued it, on the first host's clock."""
    found: dict[Meeting, int] = {}
    for record in records:
        rank = record.header.rank
        for sample in record.samples:
            if sample.step == number:
                for each in sample.operations:
                    meeting = _meeting(rank, each)
                    found[meeting] = max(found.get(meeting, 0), each.issued_ns + moved[rank])
    return found


def _flight(
    rank: int, sample: Sample, turns: Mapping[Meeting, int], shift: int
) -> tuple[list[Interval], list[Interval]]:
    """Wire and wait of a rank on the first host's clock, wire before wait."""
    wire, waits = [], []
    for each in sample.operations:
        start, end = each.issued_ns + shift, each.ended_ns + shift
        turn = min(end, max(start, turns[_meeting(rank, each)]))
        waits.append((start, turn))
        wire.append((turn, end))
    on_wire = union(wire)
    return on_wire, minus(union(waits), on_wire)


def _thread(
    step: Step, sample: Sample, colours: Mapping[str, str]
) -> tuple[list[tuple[int, int, str]], list[Interval]]:
    """What the thread does, by colour; and when it stands still: in marked waits, and in a backward pass that runs no operator
    for a while."""
    other = colours[OTHER]
    pieces = [(step.start_ns, step.end_ns, other)]
    pieces += [(span.start_ns, span.end_ns, colours.get(span.phase, other)) for span in step.spans]
    still = [(each.start_ns, each.end_ns) for each in step.waits]
    if sample.busy and sample.operations:
        backward = union((span.start_ns, span.end_ns) for span in step.spans if span.phase == "backward")
        still += [each for each in minus(backward, sample.busy) if each[1] - each[0] >= LEAST_NS]
    return pieces, union(still)


def _links(
    records: Sequence[Record], offsets_ns: Mapping[str, tuple[float, float]], first: int, last: int, scale: float
) -> list[Row]:
    """What each host's interfaces carry during the step."""
    rows: list[Row] = []
    found = sorted(rates(records), key=lambda one: -(sum(one.rx) + sum(one.tx)))[:MOST_LINKS]
    several = len({each.host for each in found}) > 1
    for each in found:
        zero = each.start_ns + offsets_ns.get(each.host, (0.0, 0.0))[0]
        for way, values in (("in", each.rx), ("out", each.tx)):
            highest = max(values)
            stretches = []
            for index, value in enumerate(values):
                start = zero + (each.seconds[index - 1] if index else 0.0) * 1e9
                end = zero + each.seconds[index] * 1e9
                if end > first and start < last and value > 0:
                    level = max(0.05, round(20 * value / highest) / 20)
                    begin, until = max(start, first) - first, min(end, last) - first
                    stretches.append(Stretch(begin / scale, until / scale, LINK, level))
            if stretches:
                label = f"{each.host} {each.interface} {way}" if several else f"{each.interface} {way}"
                rows.append(Row(label, stretches, heading="" if rows else "links"))
    return rows


ENDS = ".rx_bytes"
MOST_POINTS, MOST_LINKS = 300, 4
WIRE, WAIT, LINK, HALF = "series-1", "series-2", "series-5", 0.5
LEAST_NS = 100_000
"""As in docs/design/profile.md, "The division"."""
