"""The division of steps: records of ranks become a `Breakdown` (docs/design/profile-division.md, "The division")."""

from __future__ import annotations

import heapq
import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from penstock.numbers import plural
from penstock.profiling.breakdown import OTHER, PHASES, PURPOSES, Breakdown, Moving, Share
from penstock.profiling.clocks import WALL_AGREES_NS, Clock, clocks
from penstock.profiling.intervals import Piece, clipped, overlaps, union, without
from penstock.profiling.lateness import Beginnings, Key, Lateness
from penstock.profiling.matching import by_rank, meetings
from penstock.profiling.phases import marked_waits, phases
from penstock.profiling.record import Record, Sample, Step
from penstock.profiling.turns import Course, Turns, turns

__all__ = ["GAP_NS", "OUTLIER", "WARM_UP_STEPS", "divide", "flight", "standing"]

Kind = tuple[str, str, int | None]
"""Purpose; ``wire``, ``wait`` or ``unknown``; for a wait the rank that came last."""


_K = TypeVar("_K")


def divide(records: Sequence[Record]) -> Breakdown:
    """Where the mean step of each rank goes. O(n log n) in what was recorded.

    Nothing raises: what is missing or does not fit is left out or guessed as the design page says, and stands in
    `Breakdown.problems`.
    """
    ranks, problems = by_rank(records)
    if not ranks:
        return Breakdown((), {}, ("there are no records: did the command record into this folder?",))
    met = meetings(ranks)
    clock_of, said = clocks(ranks, met)
    judged = turns(ranks, met, clock_of)
    problems += said + _about_ranks(ranks)
    shares = []
    beginnings = Beginnings(ranks, met, clock_of)
    for record in ranks:
        share = _share(record, judged, beginnings, problems)
        if share is not None:
            shares.append(share)
    problems += _about_operations(ranks, judged) + _about_clocks(clock_of, shares)
    for record in ranks:
        problems += record.problems
    return Breakdown(
        tuple(shares), {host: clock.offset for host, clock in clock_of.items()}, tuple(dict.fromkeys(problems))
    )


def flight(courses: Iterable[Course], start_ns: int, end_ns: int) -> list[Piece[Kind]]:
    """The timeline of a rank's communication: at each moment with operations, the one that counts. O(n log n).

    Wire before wait, wait before operations without partners; of several the oldest.
    """
    # Each operation is one or two pieces; at each moment the piece of the best rank counts.
    pieces: list[tuple[int, int, tuple[int, int, int], Kind]] = []
    for at, course in enumerate(courses):
        issued, ended, turn = course.operation.issued_ns, course.operation.ended_ns, course.turn_ns
        if not course.is_known:
            pieces.append((issued, ended, (2, issued, at), (course.purpose, "unknown", None)))
            continue
        pieces.append((issued, turn, (1, issued, at), (course.purpose, "wait", course.last)))
        pieces.append((turn, ended, (0, issued, at), (course.purpose, "wire", None)))
    pieces = [(max(a, start_ns), min(b, end_ns), c, d) for a, b, c, d in pieces if max(a, start_ns) < min(b, end_ns)]
    pieces.sort(key=lambda piece: piece[0])
    moments = sorted({moment for piece in pieces for moment in piece[:2]})
    active: list[tuple[tuple[int, int, int], int, Kind]] = []
    found: list[Piece[Kind]] = []
    coming = 0
    for start, end in itertools.pairwise(moments):
        while coming < len(pieces) and pieces[coming][0] <= start:
            heapq.heappush(active, (pieces[coming][2], pieces[coming][1], pieces[coming][3]))
            coming += 1
        while active and active[0][1] <= start:
            heapq.heappop(active)
        if not active:
            continue
        kind = active[0][2]
        if found and found[-1][1] == start and found[-1][2] == kind:
            found[-1] = (found[-1][0], end, kind)
        else:
            found.append((start, end, kind))
    return found


def standing(
    step: Step, sample: Sample, waits: list[Piece[tuple[str, str]]], moving: list[Piece[Kind]]
) -> list[Piece[None]]:
    """When the thread stood still in a backward pass without a mark, as DDP does in C++: no operator runs, but communication
    does, for `GAP_NS` and longer.

    A pass without any operator of this thread tells nothing: autograd works on CUDA tensors in a thread of its own.
    """
    if not sample.busy or not moving:
        return []
    busy = [(start, end, None) for start, end in sample.busy]
    spans = ((span.start_ns, span.end_ns, None) for span in step.spans if span.phase == "backward")
    backward = union(clipped(spans, step.start_ns, step.end_ns))
    ran = {piece for *_, piece, _ in overlaps([(a, b, (a, b, None)) for a, b, _ in backward], busy)}
    idle = without([piece for piece in backward if piece in ran], busy)
    still = union((start, end, None) for start, end, _, _ in overlaps(idle, union(moving)))
    return without([piece for piece in still if piece[1] - piece[0] >= GAP_NS], waits)


@dataclass
class _Sums:
    """Of one rank over its steps, in ns."""

    marked: dict[str, float] = field(default_factory=dict)
    """By phase, without marked waits, in all steps."""
    marked_sampled: dict[str, float] = field(default_factory=dict)
    """The same in sampled steps."""
    unmarked: dict[str, float] = field(default_factory=dict)
    """Of that, when the thread stood still for communication without a mark."""
    waits: dict[tuple[str, str], float] = field(default_factory=dict)
    """Marked waits by operation and group, in all steps."""
    exposed: dict[Key, dict[Kind, float]] = field(default_factory=dict)
    """What they were in sampled steps; without a key, what `unmarked` was."""
    unusual: dict[Key, dict[Kind, float]] = field(default_factory=dict)
    """Of that, while another rank came later than usual: nothing follows from it for steps without a sample."""
    unusual_phases: dict[str, float] = field(default_factory=dict)
    """The same of `unmarked`."""
    late: dict[Kind, float] = field(default_factory=dict)
    """In steps without a sample: waits for a rank that came later than usual. In no other sum."""
    hidden: dict[Kind, float] = field(default_factory=dict)
    bytes: dict[str, float] = field(default_factory=dict)
    operations: dict[str, float] = field(default_factory=dict)
    running_on: int = 0
    """How long operations went on after the end of their step."""


def _share(record: Record, judged: Turns, beginnings: Beginnings, problems: list[str]) -> Share | None:
    rank = record.header.rank
    steps = _counted(record, problems)
    if not steps:
        problems.append(f"rank {rank} recorded no whole step: it is left out")
        return None
    samples = {sample.step: sample for sample in record.samples}
    courses = judged.courses.get(rank, {})
    sums = _Sums()
    sampled = 0
    previous: list[Course] = []
    usual = _usual_lateness(rank, steps, beginnings)
    lengths: list[_Length] = []
    for step in steps:
        sample = samples.get(step.number)
        timeline, waits = phases(step), marked_waits(step)
        worked = _by_value(without(timeline, waits))
        waited = _by_value(waits)
        _add(sums.marked, worked)
        _add(sums.waits, waited)
        unused_ns = step.end_ns - step.start_ns - sum(waited.values()) - step.thread_ns
        by_key = {None: worked.get("backward", 0.0), **dict[Key, float](waited.items())}
        lengths.append(_Length(step, sample is not None, by_key, unused_ns))
        if sample is not None:
            sampled += 1
            own = courses.get(step.number, [])
            here = [course for course in previous if course.operation.ended_ns > step.start_ns] + own
            _add(sums.marked_sampled, worked)
            excess = {}
            for key, ns in usual.items():
                late = beginnings.lateness(rank, step.number, key, without_profiler=True)
                excess[key] = late.ns - ns if late is not None else 0.0
            for key, ns in _look(sums, step, sample, timeline, waits, here, excess).items():
                lengths[-1].by_key[key] -= ns
                lengths[-1].unused_ns -= ns
            for course in own:
                _add(sums.bytes, {course.purpose: course.operation.bytes})
                _add(sums.operations, {course.purpose: 1})
            previous = own
    can_stand = not any(sample.device is not None or not sample.busy for sample in samples.values())
    _take_late(sums, rank, lengths, beginnings, usual, can_stand)
    if sampled == 0:
        problems.append(
            f"rank {rank} has no sampled step after its first {_warm_up(record)}: its communication is not told apart, exposed "
            "time is counted as wire, and what is hidden is unknown; let it run for more steps"
        )
    elif sums.running_on > 0.01 * sum(step.end_ns - step.start_ns for step in steps if step.number in samples):
        problems.append(
            f"operations of rank {rank} run on after their step for {sums.running_on / sampled / 1e6:.3f} ms a step, where "
            "only the next sample could see them: hidden communication is more than shown"
        )
    dropped = sum(sample.dropped for sample in record.samples)
    if dropped:
        problems.append(
            f"samples of rank {rank} lack {dropped} operations that were too many: its communication is more than shown"
        )
    return _mean(rank, steps, sampled, sums)


@dataclass
class _Length:
    """Of a step, in ns. Of a sampled one without what makes it longer than usual ones (`_look`)."""

    step: Step
    is_sampled: bool
    by_key: dict[Key, float]
    """Of marked waits, and of the backward pass without them."""
    unused_ns: float
    """In which the thread used no processor, without marked waits."""


def _take_late(
    sums: _Sums,
    rank: int,
    lengths: list[_Length],
    beginnings: Beginnings,
    usual: Mapping[Key, float],
    can_stand: bool,
) -> None:
    """Move to `_Sums.late`, or to the profiler, what unusual lateness of another rank explains in steps without a sample.

    That is no more than what a backward pass or a wait lasts beyond the longest of a sampled step. Of a backward pass it is no
    more than what the thread used no processor for beyond that, either.

    Args:
        can_stand: whether a backward pass can stand still: autograd does not work in another thread.
    """
    longest: dict[Key, float] = {}
    idle_ns = 0.0
    for one in lengths:
        if one.is_sampled:
            idle_ns = max(idle_ns, one.unused_ns)
            for key, ns in one.by_key.items():
                longest[key] = max(longest.get(key, 0.0), ns)
    for one in lengths:
        if one.is_sampled:
            continue
        step = one.step
        for key, ns in one.by_key.items():
            beyond = ns - longest.get(key, ns)
            if key is None:
                beyond = min(beyond, one.unused_ns - idle_ns) if can_stand and step.thread_ns else 0.0
            if beyond < GAP_NS:
                continue
            late = beginnings.lateness(rank, step.number, key)
            moved_ns = min(late.ns - usual.get(key, 0.0), beyond) if late is not None else 0.0
            if late is None or moved_ns < GAP_NS:
                continue
            if key is None:
                sums.marked["backward"] -= moved_ns
            else:
                sums.waits[key] -= moved_ns
            without_it = beginnings.lateness(rank, step.number, key, without_profiler=True) or Lateness(0.0, None)
            profiler_ns = min(moved_ns, max(0.0, late.ns - without_it.ns)) if without_it.last is not None else moved_ns
            _add(sums.marked, {"profiler": profiler_ns})
            if without_it.last is not None:
                kind: Kind = (_purpose(sums, key), "wait", without_it.last)
                _add(sums.late, {kind: moved_ns - profiler_ns})


def _usual_lateness(rank: int, steps: list[Step], beginnings: Beginnings) -> dict[Key, float]:
    """How much later than this rank the last one begins a backward pass, and each marked wait: medians, in ns."""
    found: dict[Key, list[float]] = {}
    for step in steps:
        keys: set[Key] = {(wait.operation, wait.group) for wait in step.waits}
        if any(span.phase == "backward" for span in step.spans):
            keys.add(None)
        for key in keys:
            late = beginnings.lateness(rank, step.number, key, without_profiler=True)
            if late is not None:
                found.setdefault(key, []).append(late.ns)
    return {key: statistics.median(each) for key, each in found.items()}


def _purpose(sums: _Sums, key: Key) -> str:
    """What a wait is mostly for: as in sampled steps, else what moves most bytes there."""
    by_purpose: dict[str, float] = {}
    for (purpose, _, _), ns in sums.exposed.get(key, {}).items():
        _add(by_purpose, {purpose: ns})
    choices = by_purpose or sums.bytes
    return max(choices, key=lambda purpose: choices[purpose], default=OTHER)


def _look(
    sums: _Sums,
    step: Step,
    sample: Sample,
    timeline: list[Piece[str]],
    waits: list[Piece[tuple[str, str]]],
    courses: list[Course],
    excess: Mapping[Key, float],
) -> dict[Key, float]:
    """Add what a sample tells of its step. Returns by how much a backward pass, and marked waits, are longer than in usual steps:
    torch's profiler has held up another rank, which counts as the profiler's and as nothing else; or another was late.

    Args:
        excess: by how much the last rank began a backward pass, and each marked wait, later than usual.
    """
    moving = flight(courses, step.start_ns, step.end_ns)
    unmarked = standing(step, sample, waits, moving)
    longer: dict[Key, float] = {}
    since_ns = min((one.operation.issued_ns for one in courses if one.profiler_ns), default=step.end_ns)
    stood = clipped(sorted([(a, b, None) for a, b, _ in waits] + unmarked), since_ns, step.end_ns)
    made = _first(stood, max((one.profiler_ns for one in courses), default=0))
    # An operation that waits for nobody waits for the profiler alone.
    made = union([*made, *((a, b, None) for a, b, kind, _ in overlaps(moving, stood) if kind[1:] == ("wait", None))])
    if made:
        for start, end, phase, _ in overlaps(timeline, _both(unmarked, made)):
            _add(sums.marked, {phase: start - end})
            _add(sums.marked_sampled, {phase: start - end})
            longer[None] = longer.get(None, 0.0) + end - start
        for start, end, marked, _ in overlaps(waits, made):
            _add(sums.waits, {marked: start - end})
            longer[marked] = longer.get(marked, 0.0) + end - start
        _add(sums.marked, {"profiler": sum(end - start for start, end, _ in made)})
        # What is on the wire meanwhile would have been while this rank computed.
        _add(sums.hidden, _by_value((a, b, kind) for a, b, kind, _ in overlaps(moving, made) if kind[1] == "wire"))
        moving, unmarked, waits = without(moving, made), without(unmarked, made), without(waits, made)
    for start, end, phase, _ in overlaps(timeline, unmarked):
        sums.unmarked[phase] = sums.unmarked.get(phase, 0) + end - start
    blocked = sorted(
        [(a, b, key) for a, b, key in waits] + [(a, b, None) for a, b, _ in unmarked], key=lambda each: each[0]
    )
    if blocked and excess.get(blocked[0][2], 0.0) >= GAP_NS:
        # Until it has waited for them, this rank is earlier than the others.
        unusual = _first([(a, b, None) for a, b, _ in blocked], excess[blocked[0][2]])
        for start, end, phase, _ in overlaps(timeline, _both(unmarked, unusual)):
            _add(sums.unusual_phases, {phase: end - start})
        for start, end, key, _ in overlaps(blocked, unusual):
            longer[key] = longer.get(key, 0.0) + end - start
            _add(sums.unusual.setdefault(key, {}), _by_value(clipped(moving, start, end)))
    purpose_of = {(course.operation.name, course.operation.group): course.purpose for course in courses}
    exposed = sums.exposed.setdefault(None, {})
    for start, end, kind, _ in overlaps(moving, unmarked):
        exposed[kind] = exposed.get(kind, 0) + end - start
    for piece, inside in _grouped(waits, moving):
        _add(sums.exposed.setdefault(piece[2], {}), _within(piece, inside, purpose_of))
    still = union([*((a, b, None) for a, b, _ in waits), *unmarked])
    _add(sums.hidden, _by_value(piece for piece in without(moving, still) if piece[2][1:] != ("wait", None)))
    late = [(course.operation.issued_ns, course.operation.ended_ns, None) for course in courses]
    sums.running_on += sum(b - a for a, b, _ in union(clipped(late, step.end_ns, 1 << 63)))
    return longer


def _first(pieces: list[Piece[None]], most_ns: float) -> list[Piece[None]]:
    """As much of a timeline, from its start on."""
    found = []
    for start, end, _ in pieces:
        if most_ns <= 0:
            break
        found.append((start, min(end, start + round(most_ns)), None))
        most_ns -= end - start
    return found


def _both(first: list[Piece[None]], second: list[Piece[None]]) -> list[Piece[None]]:
    return [(start, end, None) for start, end, _, _ in overlaps(first, second)]


def _grouped(
    waits: list[Piece[tuple[str, str]]], moving: list[Piece[Kind]]
) -> Iterable[tuple[Piece[tuple[str, str]], list[Piece[Kind]]]]:
    """Each wait with the communication within it. O(n)."""
    at = 0
    for wait in waits:
        while at < len(moving) and moving[at][1] <= wait[0]:
            at += 1
        until = at
        inside = []
        while until < len(moving) and moving[until][0] < wait[1]:
            inside.append((max(moving[until][0], wait[0]), min(moving[until][1], wait[1]), moving[until][2]))
            until += 1
        yield wait, inside


def _within(
    wait: Piece[tuple[str, str]], inside: list[Piece[Kind]], purpose_of: Mapping[tuple[str, str], str]
) -> dict[Kind, float]:
    """What a marked wait was. Moments in it without communication are the call's own, before and after its operation: their
    purpose is the neighbour's, whether they are wire is unknown."""
    start, end, key = wait
    purpose = inside[0][2][0] if inside else purpose_of.get(key, OTHER)
    pieces = list(inside)
    for a, b, kind in [*inside, (end, end, None)]:
        if start < a:
            pieces.append((start, a, (purpose, "unknown", None)))
        start, purpose = b, kind[0] if kind else purpose
    return _by_value(pieces)


def _mean(rank: int, steps: list[Step], sampled: int, sums: _Sums) -> Share:
    """The mean step: phases from all steps; what marks do not see, in the proportion of the sampled ones."""
    count = len(steps)
    still = 0.0
    work = {}
    for phase in PHASES:
        marked = sums.marked.get(phase, 0.0)
        seen = sums.marked_sampled.get(phase, 0.0)
        unmarked = sums.unmarked.get(phase, 0.0)
        unusual = sums.unusual_phases.get(phase, 0.0)
        if seen - unusual > 0:
            # In steps without a sample the same part of the phase.
            as_usual = max(0.0, unmarked - unusual) / (seen - unusual) * (marked - seen)
            unmarked += as_usual
            still += as_usual
        if marked - unmarked > 0:
            work[phase] = (marked - unmarked) / count
    exposed: dict[Kind, float] = {kind: late / count for kind, late in sums.late.items()}
    amounts: dict[Key, float] = {**dict[Key, float](sums.waits.items()), None: still}
    for key, seen_in in sums.exposed.items():
        _add(exposed, {kind: part / count for kind, part in seen_in.items()})
        if key is not None:
            amounts[key] -= sum(seen_in.values())
    for key, amount in amounts.items():
        # Of steps without a sample.
        if amount <= 0:
            continue
        unusual_kinds = sums.unusual.get(key, {})
        seen_in = sums.exposed.get(key, {})
        as_sampled = {
            kind: part - unusual_kinds.get(kind, 0.0)
            for kind, part in seen_in.items()
            if part > unusual_kinds.get(kind, 0.0)
        }
        as_sampled = as_sampled or seen_in
        total = sum(as_sampled.values())
        for kind, part in (as_sampled if total else {(OTHER, "unknown", None): 1.0}).items():
            _add(exposed, {kind: amount / count * (part / total if total else 1.0)})
    hidden = {kind: part / sampled for kind, part in sums.hidden.items()}
    exposed, hidden = _resolved(exposed, exposed, hidden), _resolved(hidden, hidden, exposed)
    communication = {}
    for purpose in PURPOSES:
        waited_for: dict[int, float] = {}
        for kind, part in [*exposed.items(), *hidden.items()]:
            if kind[0] == purpose and kind[1] == "wait" and kind[2] is not None:
                _add(waited_for, {kind[2]: part})
        moving = Moving(
            _sum(exposed, purpose, "wire"),
            _sum(exposed, purpose, "wait"),
            _sum(hidden, purpose, "wire"),
            _sum(hidden, purpose, "wait"),
            sums.bytes.get(purpose, 0) / max(sampled, 1),
            sums.operations.get(purpose, 0) / max(sampled, 1),
            dict(sorted(waited_for.items())),
        )
        if moving != Moving():
            communication[purpose] = moving
    step_ns = sum(step.end_ns - step.start_ns for step in steps) / count
    return Share(rank, count, sampled, step_ns, work, communication)


def _resolved(parts: dict[Kind, float], *examples: dict[Kind, float]) -> dict[Kind, float]:
    """With what is unknown told apart in the proportion of what is known: of the same purpose, else of all, else as wire."""
    found = {kind: part for kind, part in parts.items() if kind[1] != "unknown"}
    for (purpose, is_what, _), part in parts.items():
        if is_what != "unknown":
            continue
        choices = [(example, wanted) for wanted in (purpose, None) for example in examples]
        known: dict[tuple[str, int | None], float] = {}
        for example, wanted in choices:
            if known:
                break
            for (other, how, last), size in example.items():
                if how != "unknown" and wanted in (None, other):
                    _add(known, {(how, last): size})
        total = sum(known.values())
        for (how, last), size in known.items() if total else [(("wire", None), 1.0)]:
            _add(found, {(purpose, how, last): part * (size / total if total else 1.0)})
    return found


def _counted(record: Record, problems: list[str]) -> list[Step]:
    """The steps that count: all but the first, in which connections are made and code is compiled."""
    rank = record.header.rank
    steps = sorted({step.number: step for step in record.steps}.values(), key=lambda step: step.number)
    if len(steps) < len(record.steps):
        problems.append(f"rank {rank} recorded some steps twice, of which the last counts")
    warm_up = _warm_up(record)
    if len(steps) <= warm_up:
        if steps:
            problems.append(
                f"rank {rank} recorded {plural(len(steps), 'step')} only: the last one is shown, and what is done "
                "once (connecting, compiling) may be in it"
            )
        return steps[-1:]
    steps = steps[warm_up:]
    median = statistics.median(step.end_ns - step.start_ns for step in steps)
    long = [step for step in steps if step.end_ns - step.start_ns > OUTLIER * median]
    if long:
        longest = max(long, key=lambda step: step.end_ns - step.start_ns)
        part = sum(step.end_ns - step.start_ns for step in long) / sum(step.end_ns - step.start_ns for step in steps)
        problems.append(
            f"{len(long)} of {len(steps)} steps of rank {rank} took more than {OUTLIER} times the median of "
            f"{median / 1e6:.3f} ms, {100 * part:.1f} % of all time; the longest is step {longest.number} with "
            f"{(longest.end_ns - longest.start_ns) / 1e6:.3f} ms. The means include them"
        )
    return steps


def _warm_up(record: Record) -> int:
    """How many steps are left out. Who recorded with another tool has chosen the steps."""
    return 0 if "reader" in record.header.about else WARM_UP_STEPS


def _about_ranks(ranks: list[Record]) -> list[str]:
    """What is wrong with the records beside each other."""
    problems = []
    world = max(record.header.world for record in ranks)
    missing = [rank for rank in range(world) if rank not in {record.header.rank for record in ranks}][:9]
    if missing:
        problems.append(
            f"{len(ranks)} of {world} ranks have a record (rank {missing[0]} has none): operations with the "
            "others are not told apart"
        )
    if len({record.header.world for record in ranks}) > 1:
        problems.append("the records are of jobs of several sizes: are they of one run?")
    if len({str(record.header.about.get("job", "")) for record in ranks} - {""}) > 1:
        problems.append(
            "the records are of several jobs, which wrote into one folder at the same time: ranks do not belong together. "
            "Give each job an --output of its own"
        )
    numbers = {record.header.rank: {step.number for step in record.steps} for record in ranks if record.steps}
    most = max((len(each) for each in numbers.values()), default=0)
    short = {rank: len(each) for rank, each in numbers.items() if len(each) < most}
    if short:
        least = min(short, key=lambda rank: (short[rank], rank))
        problems.append(
            f"{len(short)} ranks recorded fewer steps than the {most} of others (rank {least} {short[least]}): each "
            "one's means are over its own"
        )
    if len(numbers) > 1 and not set.intersection(*numbers.values()):
        problems.append(
            "ranks have no step number in common: they do not step alike, or the records are of several runs"
        )
    return problems


def _about_operations(ranks: list[Record], judged: Turns) -> list[str]:
    problems = []
    for record in ranks:
        rank = record.header.rank
        total = sum(len(each) for each in judged.courses.get(rank, {}).values())
        if rank in judged.alone:
            problems.append(
                f"{judged.alone[rank]} of {total} sampled operations of rank {rank} have no partners in other records (a "
                "rank or a sample is missing): their wire and wait are told apart in the proportion of the others"
            )
        if rank in judged.impossible:
            problems.append(
                f"{judged.impossible[rank]} of {total} sampled operations of rank {rank} ended before another rank began them: "
                "ranks do not count steps or operations alike; their wire and wait are told apart in the proportion of the others"
            )
    return problems


def _about_clocks(clock_of: Mapping[str, Clock], shares: list[Share]) -> list[str]:
    """Where clocks are too uncertain for the waits that are shown."""
    problems = []
    shortest = min((share.step_ns for share in shares), default=0.0)
    for host, clock in clock_of.items():
        # What is less matters little; of what is more `clocks` has told.
        if 0.01 * shortest < clock.likely_wrong_ns <= WALL_AGREES_NS:
            problems.append(
                f"the clock of {host} is known to ±{clock.likely_wrong_ns / 1e6:.3f} ms: shorter waits of its ranks, or for "
                "them, cannot be told from wire"
            )
    return problems


def _by_value(timeline: Iterable[tuple[int, int, _K]]) -> dict[_K, float]:
    found: dict[_K, float] = {}
    for start, end, value in timeline:
        found[value] = found.get(value, 0) + end - start
    return found


def _add(sums: dict[_K, float], more: Mapping[_K, float | int]) -> None:
    for key, value in more.items():
        sums[key] = sums.get(key, 0) + value


def _sum(parts: Mapping[Kind, float], purpose: str, what: str) -> float:
    return sum(part for kind, part in parts.items() if kind[0] == purpose and kind[1] == what)


WARM_UP_STEPS = 2
"""Connections are made and buckets are built anew in the first two (DDP rebuilds its buckets after the first)."""

OUTLIER = 5
"""So many times the median is worth a word: a checkpoint, an evaluation, a stall."""

GAP_NS = 100_000
"""Between two operators of a backward pass lie some microseconds; the autograd engine's locks and the profiler make some tens."""
