"""A sampled step as a model that can be run again with another network: what would it take with twice the link?

The model keeps what the training threads did and in which order: computing, issues of operations, and waits for them. What
changes is how long operations take. That is the idea of Daydream (Zhu et al., USENIX ATC 2020), here with one wire for all
collectives, which carries them one after the other in the order in which they are ready: a work-conserving wire ends the last of
several at the same time in any order, and the last is what a step waits for. An operation takes ``latency + bytes x per_byte``.

The two are fitted to *busy periods*, the times in which the wire has something to carry, since what shares the wire meanwhile
makes single operations long. Where all periods are alike the two cannot be told apart, and there are two wires: one without
latency, and one with as much as the shortest operation and the link allow.

What the model does not know: computing that becomes slower while bytes move (few cores), and operations of earlier steps.
"""

from __future__ import annotations

import bisect
import heapq
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from penstock.profiling.breakdown import OTHER, PURPOSES
from penstock.profiling.clocks import Clock, clocks
from penstock.profiling.divide import OUTLIER, WARM_UP_STEPS
from penstock.profiling.intervals import Piece, clipped, overlaps, union
from penstock.profiling.matching import Kind, Meeting, by_rank, kind, meetings
from penstock.profiling.phases import backward_passes, marked_waits, pass_at
from penstock.profiling.record import Operation, Record, Sample, Step
from penstock.profiling.standing import flight, standing
from penstock.profiling.turns import turns
from penstock.runtime.wire import sent_bytes

__all__ = [
    "Act",
    "Model",
    "Move",
    "Passes",
    "Period",
    "Wire",
    "burdened",
    "evened",
    "merged",
    "models",
    "run",
    "wire_bytes",
    "wires",
]


class Move(NamedTuple):
    """An operation."""

    ranks: tuple[int, ...]
    bytes: float
    """That a rank's link carries in one direction."""
    purpose: str
    queue: tuple[int, ...]
    """Moves of one queue take turns: ``()`` for all collectives between hosts, the first rank for those within one, and sender
    and receiver for sends, since links carry both directions at a time."""
    operation: str
    group: str
    element_bytes: int = 0
    """0: unknown."""
    is_inside: bool = False
    """All its ranks share a host: nothing of it crosses a link."""
    in_pass: int = -1
    """The backward pass of the first of its ranks, from 0 on, in which that issues it; -1: in none."""


class Act(NamedTuple):
    """A rank computes, then issues or awaits a move, or, at its end, does neither."""

    compute_ns: float
    move: int | None
    is_issue: bool
    paused_ns: float = 0.0
    """Of computing: no operator ran while bytes moved, since the thread launched an operation, or its processor was taken by what
    moves them."""


class Wire(NamedTuple):
    """How long a move between hosts takes, and, if there are such, one within a host."""

    latency_ns: float
    per_byte_ns: float
    inside: tuple[float, float] | None = None
    """The same two within a host; None: as between hosts."""

    def takes(self, move: Move) -> float:
        latency_ns, per_byte_ns = self.inside if move.is_inside and self.inside else self[:2]
        return latency_ns + move.bytes * per_byte_ns


class Period(NamedTuple):
    """A time in which the wire always had something to carry."""

    moves: int
    bytes: float
    ns: float
    shortest_ns: float
    """The shortest move, from when it was ready."""
    is_inside: bool = False


class Passes(NamedTuple):
    """What a rank computes in a step, without what it stands still for."""

    before_ns: float
    """Before its first pass."""
    forward_ns: float
    """With a part of what lies between passes, as has `backward_ns`."""
    backward_ns: float
    batches: int
    """Backward passes; forward passes that follow each other are one mark."""
    after_ns: float


@dataclass(frozen=True)
class Model:
    """One step of all ranks."""

    step: int
    starts_ns: Mapping[int, float]
    """By rank, on one clock."""
    acts: Mapping[int, tuple[Act, ...]]
    """By rank, in order."""
    moves: tuple[Move, ...]
    measured_ns: float
    """The length of such a step without torch's profiler, mean over ranks and steps; of this one, if there are few others."""
    unsure_ns: float
    """How wrong that may be, since steps differ: two standard errors."""
    periods: tuple[Period, ...]
    passes: Mapping[int, Passes] = field(default_factory=dict)
    """By rank."""
    rare_ns: float = 0.0
    """More of the mean step, in none of the above: evaluations and checkpoints that few steps have, and what makes few steps many
    times as long."""


def wire_bytes(operation: Operation, ranks: int) -> float:
    """What a rank's link carries of an operation in one direction, in the usual bandwidth-optimal algorithms (nccl-tests,
    PERFORMANCE.md)."""
    name = operation.name.rpartition(":")[2].lower().replace("_", "")
    among = max(ranks, 1)
    if name.startswith("allreduce"):
        return sent_bytes(operation.bytes, among)
    if name.startswith("allgather"):
        return operation.bytes * (among - 1)
    if name.startswith(("reducescatter", "alltoall")):
        return operation.bytes * (among - 1) / among
    return float(operation.bytes)


def models(records: Sequence[Record], hosts: Mapping[int, str] | None = None) -> list[Model]:
    """A model of every sampled step that all ranks have, and in which every operation has its partners. O(n log n).

    Args:
        hosts: by rank; a rank that is not there has one of its own.
    """
    ranks, _ = by_rank(records)
    if not ranks:
        return []
    met = meetings(ranks)
    clock_of, _ = clocks(ranks, met)
    judged = turns(ranks, met, clock_of)
    by_step: dict[int, list[Meeting]] = {}
    for meeting in met:
        by_step.setdefault(meeting.step, []).append(meeting)
    samples = [{sample.step: sample for sample in record.samples} for record in ranks]
    plain = {record.header.rank: _plain(record) for record in ranks}
    steps = [{step.number: step for step in record.steps} for record in ranks]
    steps_of = {record.header.rank: own for record, own in zip(ranks, steps, strict=True)}
    seen = [set(each) for each in samples] + [set(each) for each in steps]
    whole = [
        number
        for number in sorted(set.intersection(*seen))
        if by_step.get(number) and all(meeting.is_whole for meeting in by_step[number])
    ]
    rare = _rare(steps, plain.values())
    if all(rare.get(number) for number in whole):
        rare = {}  # no sample shows a step without
    whole = [number for number in whole if not rare.get(number)]
    usual_ns, unsure_ns, rare_ns = _mean_length(list(plain.values()), rare)
    found = []
    for number in whole:
        here = by_step[number]
        passes_of = {rank: backward_passes(own[number]) for rank, own in steps_of.items()}
        moves, move_of = _moves(here, hosts or {}, passes_of)
        acts, starts, lengths, passes = {}, {}, [], {}
        for record, own_samples, own_steps in zip(ranks, samples, steps, strict=True):
            rank, step = record.header.rank, own_steps[number]
            clock = clock_of[record.header.host]
            courses = judged.courses.get(rank, {}).get(number, [])
            waits = marked_waits(step)
            still = standing(step, own_samples[number], waits, flight(courses, step.start_ns, step.end_ns))
            acts[rank] = _acts(step, own_samples[number], waits, still, move_of.get(rank, {}))
            passes[rank] = _passes(step, union([*((a, b, None) for a, b, _ in waits), *still]))
            starts[rank] = clock.on_first(step.start_ns)
            lengths.append(step.end_ns - step.start_ns)
        periods = _periods(moves, here, {record.header.rank: clock_of[record.header.host] for record in ranks})
        length = usual_ns or statistics.fmean(lengths)
        found.append(Model(number, starts, acts, moves, length, unsure_ns, periods, passes, rare_ns))
    usual = {rank: [step for step in own if not rare.get(step.number)] for rank, own in plain.items()}
    return _as_plain(found, usual, steps_of)


def _rare(steps: Iterable[Mapping[int, Step]], plain: Iterable[Sequence[Step]]) -> dict[int, int]:
    """By number of the step, how long evaluations and checkpoints are there on the rank with the most, for which others wait.
    Nothing if half of the plain steps have some."""
    found: dict[int, int] = {}
    for own in steps:
        for number, step in own.items():
            spans = ((span.start_ns, span.end_ns, None) for span in step.spans if span.phase in RARE)
            ns = sum(end - start for start, end, _ in union(clipped(spans, step.start_ns, step.end_ns)))
            if ns:
                found[number] = max(found.get(number, 0), ns)
    numbers = {step.number for own in plain for step in own}
    return found if 2 * len(numbers & set(found)) < len(numbers) else {}


def _mean_length(plain: Sequence[Sequence[Step]], rare: Mapping[int, int]) -> tuple[float, float, float]:
    """Of the plain steps of all ranks, without what is rare; two standard errors of that; and what is rare, of the mean step.
    Zeros where a rank has none."""
    if not all(plain):
        return 0.0, 0.0, 0.0
    lengths: list[float] = []
    for steps in plain:
        own = [max(0, step.end_ns - step.start_ns - rare.get(step.number, 0)) for step in steps]
        median = statistics.median(own)
        lengths += [length if length <= OUTLIER * median else median for length in own]
    whole = statistics.fmean(step.end_ns - step.start_ns for steps in plain for step in steps)
    mean = statistics.fmean(lengths)
    # Ranks that wait for each other say the same, so that of one rank counts.
    return mean, 2 * statistics.pstdev(lengths) / math.sqrt(len(lengths) / len(plain)), whole - mean


def _as_plain(
    found: Sequence[Model], plain: Mapping[int, Sequence[Step]], steps: Mapping[int, Mapping[int, Step]]
) -> list[Model]:
    """Computing as long as in plain steps: they need so much less of the processor, since no profiler runs, and get it as
    readily as in the median sample."""
    usual_ns: dict[int, float] = {}
    for rank, own in plain.items():
        used = [
            sum(act.compute_ns for act in model.acts[rank]) / steps[rank][model.step].thread_ns
            for model in found
            if steps[rank][model.step].thread_ns > 0
        ]
        if own and used:
            usual_ns[rank] = statistics.fmean(step.thread_ns for step in own) * statistics.median(used)
    made = []
    for model in found:
        acts, passes = dict(model.acts), dict(model.passes)
        for rank, own_acts in model.acts.items():
            total_ns = sum(act.compute_ns for act in own_acts)
            if not usual_ns.get(rank) or not total_ns:
                continue
            part = usual_ns[rank] / total_ns
            acts[rank] = tuple(
                act._replace(compute_ns=act.compute_ns * part, paused_ns=act.paused_ns * part) for act in own_acts
            )
            before, forward, backward, batches, after = model.passes[rank]
            passes[rank] = Passes(before * part, forward * part, backward * part, batches, after * part)
        made.append(replace(model, acts=acts, passes=passes))
    return made


def run(model: Model, takes: Callable[[Move], float]) -> float:
    """How long the step takes, mean over the ranks, in ns. O(acts x log).

    Args:
        takes: how long a move is on the wire, in ns.

    Returns: infinity where ranks would wait for each other.
    """
    now = dict(model.starts_ns)
    at = dict.fromkeys(model.acts, 0)
    issued: list[dict[int, float]] = [{} for _ in model.moves]
    ends: list[float | None] = [None] * len(model.moves)
    free: dict[tuple[int, ...], float] = {}
    going = list(model.acts)
    standing_for: dict[int, list[int]] = {}
    ready: list[tuple[float, int]] = []
    while True:
        for rank in going:
            acts = model.acts[rank]
            while at[rank] < len(acts):
                act = acts[at[rank]]
                if act.move is not None and not act.is_issue and ends[act.move] is None:
                    standing_for.setdefault(act.move, []).append(rank)
                    break
                now[rank] += act.compute_ns
                if act.move is not None and act.is_issue:
                    issued[act.move][rank] = now[rank]
                    if len(issued[act.move]) == len(model.moves[act.move].ranks):
                        heapq.heappush(ready, (max(issued[act.move].values()), act.move))
                elif act.move is not None:
                    now[rank] = max(now[rank], ends[act.move] or 0.0)
                at[rank] += 1
        # All stand still: nothing is issued before the first of what is ready has ended, so that one is the next.
        if not ready:
            break
        when, number = heapq.heappop(ready)
        move = model.moves[number]
        going = standing_for.pop(number, [])
        ends[number] = free[move.queue] = max(when, free.get(move.queue, when)) + takes(move)
    if any(at[rank] < len(acts) for rank, acts in model.acts.items()):
        return math.inf
    return statistics.fmean(now[rank] - start for rank, start in model.starts_ns.items())


def _moves(
    met: Iterable[Meeting], hosts: Mapping[int, str], passes_of: Mapping[int, Sequence[Piece[None]]]
) -> tuple[tuple[Move, ...], dict[int, dict[int, int]]]:
    """The moves of a step, and by rank for each of its operations (by identity) which one it is."""
    moves: list[Move] = []
    move_of: dict[int, dict[int, int]] = {}
    for meeting in met:
        ranks = tuple(rank for rank, _ in meeting.parts)
        operation = meeting.parts[0][1]
        # Of a send and a receive the latter's, which tells the direction in a pipeline.
        purpose = next((one.purpose for _, one in reversed(meeting.parts) if one.purpose in PURPOSES), OTHER)
        nbytes = max(wire_bytes(one, len(ranks)) for _, one in meeting.parts)
        is_inside = len({hosts.get(rank, str(rank)) for rank in ranks}) == 1
        queue = ranks if meeting.kind is Kind.SEND else (min(ranks),) if is_inside else ()
        for rank, one in meeting.parts:
            move_of.setdefault(rank, {})[id(one)] = len(moves)
        in_pass = pass_at(passes_of[ranks[0]], operation.issued_ns)
        of = (operation.name, operation.group, operation.element_bytes, is_inside, in_pass)
        moves.append(Move(ranks, nbytes, purpose, queue, *of))
    return tuple(moves), move_of


def _acts(
    step: Step,
    sample: Sample,
    waits: Sequence[Piece[tuple[str, str]]],
    still: Sequence[Piece[None]],
    move_of: Mapping[int, int],
) -> tuple[Act, ...]:
    """What the training thread did. A wait for something that is no operation of the sample counts as computing."""
    operations = sorted(sample.operations, key=lambda one: one.issued_ns)
    # Start, end, operation and group as far as they are known, and since when what is waited for may have been issued.
    waiting: list[tuple[int, int, str, str, int]] = [(start, end, *key, step.start_ns) for start, end, key in waits]
    last, paused = _after_launches(step, operations, still)
    waiting += [(start, end, "", "", since) for start, end, since in last]
    # What happens on the thread: (moment, its own duration on the thread, what).
    events: list[tuple[int, int, int, bool]] = []
    stood = union((start, end, None) for start, end, *_ in waiting)
    for one in operations:
        before = bisect.bisect_left(stood, one.issued_ns, key=lambda piece: piece[0]) - 1
        is_inside = before >= 0 and one.issued_ns <= stood[before][1]
        at = min(max(stood[before][0] if is_inside else one.issued_ns, step.start_ns), step.end_ns)
        events.append((at, at, move_of[id(one)], True))
    by_end = sorted(operations, key=lambda one: one.ended_ns)
    awaited: set[int] = set()
    for start, end, name, group, since in sorted(waiting):
        first = bisect.bisect_right(by_end, start, key=lambda one: one.ended_ns)
        # Its end may be noted late: a backend's thread may lose its processor just then.
        late_ns = max(SLACK_NS, (end - start) // LATE)
        until = bisect.bisect_right(by_end, end + late_ns, key=lambda one: one.ended_ns)
        near = [one for one in by_end[first:until] if since <= one.issued_ns < end]
        named = [one for one in near if kind(one.name) is kind(name) and one.group == group] if name else []
        for ended in named, near:
            # Not for what ended an earlier wait, the end of which was noted in this one.
            fresh = [one for one in ended if id(one) not in awaited] or ended
            # What shares the wire ends in any order, so the thread waited for all of them.
            ended = [one for one in fresh if one.ended_ns <= end + SLACK_NS] or fresh[:1]
            if ended:
                break
        events += [(start, min(one.ended_ns, end), move_of[id(one)], False) for one in ended]
        awaited.update(id(one) for one in ended)
    events.sort(key=lambda event: (event[0], not event[3]))
    acts: list[Act] = []
    done_ns = step.start_ns
    pauses = iter([*paused, (math.inf, math.inf, None)])
    pause = next(pauses)
    for start, end, move, is_issue in [*events, (step.end_ns, step.end_ns, None, False)]:
        taken_ns = 0.0
        while pause[0] < start:
            taken_ns += pause[1] - pause[0]
            pause = next(pauses)
        compute_ns = max(0, start - done_ns)
        acts.append(Act(compute_ns, move, is_issue, min(compute_ns, taken_ns)))
        done_ns = max(done_ns, end)
    return tuple(acts)


def _plain(record: Record) -> list[Step]:
    """The steps in which torch's profiler does nothing: it starts a step before a sample, and stops in the one behind. None, if
    they are few."""
    near = {sample.step + at for sample in record.samples for at in (-1, 0, 1)}
    found = [step for step in record.steps[WARM_UP_STEPS:] if step.number not in near]
    return found if len(found) >= FEW else []


def _after_launches(
    step: Step, operations: Sequence[Operation], still: Sequence[Piece[None]]
) -> tuple[list[Piece[int]], list[Piece[None]]]:
    """The unmarked pauses that may be waits, with the begin of their pass, and the others: DDP waits once all buckets of the pass
    are launched, and for these."""
    issued = [one.issued_ns for one in operations]
    backward = sorted((span.start_ns, span.end_ns) for span in step.spans if span.phase == "backward")
    waits: list[Piece[int]] = []
    others: list[Piece[None]] = []
    for piece in still:
        at = bisect.bisect_right(backward, piece[0], key=lambda span: span[0]) - 1
        since, until = backward[at] if at >= 0 else (step.start_ns, step.end_ns)
        last = bisect.bisect_left(issued, until) - 1
        if last < 0 or issued[last] <= piece[1]:
            waits.append((piece[0], piece[1], since))
        else:
            others.append(piece)
    return waits, others


def _passes(step: Step, stood: Sequence[Piece[None]]) -> Passes:
    """Of a thread that stands still in the pieces of ``stood``."""
    marks: list[tuple[int, int, bool]] = []
    for span in sorted(step.spans, key=lambda span: (span.start_ns, -span.end_ns)):
        if span.phase in ("forward", "backward") and (not marks or span.start_ns >= marks[-1][1]):
            marks.append((span.start_ns, span.end_ns, span.phase == "forward"))

    def ran(windows: Sequence[tuple[int, int]]) -> list[float]:
        left = [float(end - start) for start, end in windows]
        for start, end, at, _ in overlaps([(a, b, at) for at, (a, b) in enumerate(windows)], stood):
            left[at] -= end - start
        return left

    if not marks:
        return Passes(ran([(step.start_ns, step.end_ns)])[0], 0.0, 0.0, 0, 0.0)
    first, last = marks[0][0], marks[-1][1]
    before, inner, after = ran([(step.start_ns, first), (first, last), (last, step.end_ns)])
    took = ran([each[:2] for each in marks])
    forward = sum(ns for ns, mark in zip(took, marks, strict=True) if mark[2])
    share = inner / sum(took) if sum(took) > 0 else 1.0
    batches = sum(not mark[2] for mark in marks)
    return Passes(before, forward * share, (sum(took) - forward) * share, batches, after)


def wires(found: Sequence[Model], link_bytes_s: float = 0.0, idle: float = 1.0) -> tuple[Wire, ...]:
    """What the wire may be: one, or two where latency and time per byte cannot be told apart; none without moves.

    Args:
        link_bytes_s: what the link carries at most, if that is known.
        idle: for how much of the time there was nothing to send, at most: latency takes no more.
    """
    periods = [period for model in found for period in model.periods]
    crossing = [period for period in periods if not period.is_inside]
    within = [period for period in periods if period.is_inside]
    if not crossing:
        return _fitted(within)
    inside = next((wire[:2] for wire in _fitted(within)), None)
    return tuple(wire._replace(inside=inside) for wire in _fitted(crossing, link_bytes_s, idle))


def _fitted(periods: Sequence[Period], link_bytes_s: float = 0.0, idle: float = 1.0) -> tuple[Wire, ...]:
    if not periods:
        return ()
    # min sum ((moves a + bytes b - t) / t)^2 with a and b not below 0.
    points = [(period.moves / period.ns, period.bytes / period.ns) for period in periods]
    aa, ab, bb = (sum(u * v for u, v in pairs) for pairs in _squares(points))
    a1, b1 = sum(u for u, _ in points), sum(v for _, v in points)
    if not bb:
        return (Wire(a1 / aa, 0.0),)
    plain = Wire(0.0, b1 / bb)
    determinant = aa * bb - ab * ab
    if determinant > ALIKE * aa * bb:
        latency, per_byte = (a1 * bb - b1 * ab) / determinant, (b1 * aa - a1 * ab) / determinant
        return (Wire(a1 / aa, 0.0) if per_byte < 0 else plain if latency < 0 else Wire(latency, per_byte),)
    moves, nbytes = sum(period.moves for period in periods), sum(period.bytes for period in periods)
    # Both say the same of what was seen.
    ns = nbytes * plain.per_byte_ns
    least = 1e9 / link_bytes_s if link_bytes_s else 0.0
    latency = max(
        0.0, min((ns - nbytes * least) / moves, idle * ns / moves, *(period.shortest_ns for period in periods))
    )
    return (plain, Wire(latency, max(0.0, ns - moves * latency) / nbytes))


def _periods(moves: Sequence[Move], met: Sequence[Meeting], clock: Mapping[int, Clock]) -> tuple[Period, ...]:
    """The busy periods of a step."""
    queues: dict[tuple[int, ...], list[tuple[float, float, Move]]] = {}
    for move, meeting in zip(moves, met, strict=True):
        all_there = max(float(clock[rank].on_first(one.issued_ns)) for rank, one in meeting.parts)
        mean_end = statistics.fmean(clock[rank].on_first(one.ended_ns) for rank, one in meeting.parts)
        queues.setdefault(move.queue, []).append((all_there, max(mean_end, all_there), move))
    found: list[Period] = []
    for queue in queues.values():
        since = until = -math.inf
        for ready, ended, move in sorted(queue, key=lambda span: span[:2]):
            if ready > until:
                since, until = ready, ended
                found.append(Period(1, move.bytes, max(1.0, until - since), ended - ready, move.is_inside))
            else:
                until = max(until, ended)
                last = found[-1]
                shortest_ns = min(last.shortest_ns, ended - ready)
                length_ns = max(1.0, until - since)
                found[-1] = Period(last.moves + 1, last.bytes + move.bytes, length_ns, shortest_ns, last.is_inside)
    return tuple(found)


def _squares(points: Sequence[tuple[float, float]]) -> Iterable[list[tuple[float, float]]]:
    yield [(u, u) for u, _ in points]
    yield [(u, v) for u, v in points]
    yield [(v, v) for _, v in points]


def merged(model: Model, least_bytes: float, is_bucket: Callable[[Move], bool]) -> Model:
    """With buckets of so many bytes on the wire: buckets of a group that follow each other in a backward pass, or outside of
    those, are one, which is issued with its last part; whoever waits for a part waits for it, once it is issued."""
    into: dict[int, int] = {}
    moves: list[Move] = []
    open_at: dict[tuple[str, tuple[int, ...], int], int] = {}
    order: dict[int, int] = {}
    for rank in sorted(model.acts):
        for act in model.acts[rank]:
            if act.is_issue and act.move is not None:
                order.setdefault(act.move, len(order))
    for number in sorted(order, key=lambda each: order[each]):
        move = model.moves[number]
        key = (move.group, move.ranks, move.in_pass)
        at = open_at.get(key)
        if is_bucket(move) and at is not None and moves[at].bytes < least_bytes:
            moves[at] = moves[at]._replace(bytes=moves[at].bytes + move.bytes)
        else:
            at = len(moves)
            moves.append(move)
            if is_bucket(move):
                open_at[key] = at
        into[number] = at
    last = {at: number for number, at in into.items()}
    acts = {}
    for rank, own in model.acts.items():
        made: list[Act] = []
        carried = 0.0
        issued: set[int] = set()
        mine = {into[act.move] for act in own if act.move is not None and act.is_issue}
        for act in own:
            target = None if act.move is None else into[act.move]
            compute_ns, paused_ns = act.compute_ns, act.paused_ns
            if act.move is not None and target is not None:
                is_part = act.is_issue and last[target] != act.move
                is_early = not act.is_issue and target in mine and target not in issued
                if is_part or not issued:
                    # This launch is none, or nothing moves yet.
                    compute_ns, paused_ns = compute_ns - paused_ns, 0.0
                if is_part or is_early:
                    carried += compute_ns
                    continue
                issued.add(target)
            made.append(Act(compute_ns + carried, target, act.is_issue, paused_ns))
            carried = 0.0
        acts[rank] = tuple(made)
    return replace(model, moves=tuple(moves), acts=acts)


def burdened(model: Model, more_ns: Callable[[Move], float]) -> Model:
    """With more to compute before each move is issued."""
    acts = {
        rank: tuple(
            act._replace(compute_ns=act.compute_ns + more_ns(model.moves[act.move]))
            if act.is_issue and act.move is not None
            else act
            for act in own
        )
        for rank, own in model.acts.items()
    }
    return replace(model, acts=acts)


def evened(model: Model) -> Model:
    """Without stragglers: all ranks begin together and, where they issue the same, do what the median rank does (of two: the
    faster); else each rank computes as long as that one. Stages of a pipeline begin and send as they do."""
    total = {rank: sum(act.compute_ns for act in own) for rank, own in model.acts.items()}
    aim = statistics.median_low(total.values())
    middle = next(rank for rank in total if total[rank] == aim)
    orders = {tuple(act.move for act in own if act.is_issue) for own in model.acts.values()}
    sends = any(kind(move.operation) in (Kind.SEND, Kind.RECEIVE) for move in model.moves)
    acts: dict[int, tuple[Act, ...]] = {}
    for rank, own in model.acts.items():
        share = aim / total[rank] if total[rank] else 1.0
        scaled = tuple(act._replace(compute_ns=act.compute_ns * share) for act in own)
        acts[rank] = model.acts[middle] if len(orders) == 1 and not sends else scaled
    return replace(model, acts=acts, starts_ns=model.starts_ns if sends else dict.fromkeys(model.starts_ns, 0.0))


RARE = ("evaluation", "checkpoint")
"""Phases that only some steps have, and no change here makes shorter."""
FEW = 3
"""Fewer plain steps than this say little on the mean."""
ALIKE = 0.02
"""Periods are alike where the determinant of the fit is below this share of what it can be."""
SLACK_NS = 200_000
"""A wait may end so long before its operation's end was noted."""
LATE = 10
"""A part of the wait: of one of 650 ms the end was noted 4.5 ms late. A short pause is not a wait for what ends long after."""
