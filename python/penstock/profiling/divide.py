"""The division of steps: records of ranks become a `Breakdown` (docs/design/profile-division.md, "The division")."""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from penstock.numbers import plural
from penstock.profiling.between import Kind, Seen, add, told
from penstock.profiling.breakdown import OTHER, PHASES, PURPOSES, Breakdown, Moving, OneStep, Share
from penstock.profiling.clocks import WALL_AGREES_NS, Clock, clocks
from penstock.profiling.complaints import complaints, failures
from penstock.profiling.intervals import Piece, clipped, overlaps, union, without
from penstock.profiling.lateness import Beginnings, Key
from penstock.profiling.matching import Meeting, by_rank, meetings
from penstock.profiling.phases import marked_waits, phases, profiler_ns
from penstock.profiling.record import Record, Step
from penstock.profiling.remembered import remembered
from penstock.profiling.standing import Last, flight, standing
from penstock.profiling.turns import Course, Turns, turns

__all__ = ["OUTLIER", "WARM_UP_STEPS", "counted", "divide", "each_step", "lengths"]

_K = TypeVar("_K")


def divide(records: Sequence[Record]) -> Breakdown:
    """Where the mean step of each rank goes. O(n log n) in what was recorded.

    Nothing raises: what is missing or does not fit is left out or guessed as the design page says, and stands in
    `Breakdown.problems`; how the job ended stands in `Breakdown.failures`.
    """
    ranks, problems = by_rank(records)
    if not ranks:
        return Breakdown((), problems=("there are no records: did the command record into this folder?",))
    job = _Job.of(ranks)
    problems += complaints(ranks) + job.said
    shares = []
    beginnings = Beginnings(ranks, job.met, job.clock_of)
    lengths_of = lengths(ranks)
    for record in ranks:
        share = _share(record, job.operations(record), beginnings, lengths_of, problems)
        if share is not None:
            shares.append(share)
    problems += _about_samples(shares) + _about_operations(ranks, job.judged) + _about_clocks(job.clock_of, shares)
    return Breakdown(
        tuple(shares),
        {host: clock.offset for host, clock in job.clock_of.items()},
        tuple(dict.fromkeys(problems)),
        failures=tuple(failures(ranks)),
    )


def each_step(records: Sequence[Record]) -> Iterator[OneStep]:
    """Every step that was recorded, rank by rank, with what is known of it alone. O(n log n), of which the first takes most."""
    ranks, _ = by_rank(records)
    if not ranks:
        return
    job = _Job.of(ranks)
    for record in ranks:
        operations, clock = job.operations(record), job.clock_of[record.header.host]
        first = len(operations.every) - len(operations.counted)
        # As the mean has it, nothing runs on from a step that does not count into one that does.
        divided = [one for steps in (operations.every[:first], operations.counted) for one in operations.divided(steps)]
        sums: tuple[dict[Kind, float], dict[Kind, float]] = {}, {}
        for one in divided[first:]:
            if one.is_known:
                add(sums[0], one.exposed)
                add(sums[1], one.hidden)
        for at, one in enumerate(divided):
            moving = None
            if one.is_known:
                exposed, hidden = _resolved(one.exposed, *sums), _resolved(one.hidden, *sums[::-1])
                wire, wait = (_sum(exposed, None, what) for what in ("wire", "wait"))
                moving = Moving(wire, wait, _sum(hidden, None, "wire"), _sum(hidden, None, "wait"))
            yield OneStep(
                record.header.rank,
                one.step.number,
                at >= first,
                one.step.number in operations.samples,
                clock.on_first(one.step.start_ns),
                one.step.end_ns - one.step.start_ns,
                one.work,
                sum(one.exposed.values()),
                moving,
                one.step.examples,
            )


@dataclass
class _Divided:
    """A step of a rank, in ns."""

    step: Step
    work: dict[str, float]
    """By phase: as marked, without marked waits. Where operations are known also without what stood still without a mark."""
    waited: Mapping[Key, float]
    """Marked waits."""
    backward_ns: float
    """As marked."""
    forward_ns: float
    is_known: bool
    """All its operations are."""
    kinds: dict[Key, dict[Kind, float]] = field(default_factory=dict)
    """If so: what marked waits were, and the backward pass while it stood still without a mark."""
    hidden: dict[Kind, float] = field(default_factory=dict)
    longer: dict[Key, float] = field(default_factory=dict)
    """By how much torch's profiler made them longer: it has held up another rank, which counts as the profiler's."""
    blocking: set[Key] = field(default_factory=set)
    running_on: int = 0
    """How long operations went on after the end of the step, if those of the next one are unknown."""

    @property
    def exposed(self) -> dict[Kind, float]:
        """What the thread stood still for; what marked waits were for is unknown where operations are."""
        found: dict[Kind, float] = {}
        for kinds in self.kinds.values() if self.is_known else ({_MARKED: sum(self.waited.values())},):
            add(found, kinds)
        return found


@dataclass
class _Sums:
    """Of one rank over its steps, in ns."""

    work: dict[str, float] = field(default_factory=dict)
    seen: dict[Key, list[Seen]] = field(default_factory=dict)
    """Backward passes as marked, and marked waits."""
    hidden: dict[Kind, float] = field(default_factory=dict)
    bytes: dict[str, float] = field(default_factory=dict)
    operations: dict[str, float] = field(default_factory=dict)
    running_on: int = 0


@dataclass
class _Job:
    """What all ranks tell together."""

    met: list[Meeting]
    clock_of: Mapping[str, Clock]
    judged: Turns
    known: Mapping[int, Mapping[int, list[Course]]]
    """By rank, then by step without a sample."""
    said: list[str]
    """What is wrong with the clocks."""

    @classmethod
    def of(cls, ranks: Sequence[Record]) -> _Job:
        met = meetings(ranks)
        clock_of, said = clocks(ranks, met)
        return cls(met, clock_of, turns(ranks, met, clock_of), remembered(ranks, met, clock_of), said)

    def operations(self, record: Record) -> _Operations:
        rank = record.header.rank
        return _Operations(record, self.judged.courses.get(rank, {}), self.known.get(rank, {}))


def _share(
    record: Record,
    operations: _Operations,
    beginnings: Beginnings,
    lengths_of: Mapping[int, Sequence[tuple[int, int]]],
    problems: list[str],
) -> Share | None:
    rank, steps = record.header.rank, operations.counted
    problems += _about_steps(record, steps, lengths_of.get(rank, []))
    if not steps:
        return None
    samples = {sample.step: sample for sample in record.samples}
    sums = _Sums()
    # Autograd may work in a thread of its own.
    can_stand = not any(sample.device is not None or not sample.busy for sample in samples.values())
    known = sampled = 0
    for one in operations.divided(steps):
        step = one.step
        known += one.is_known
        add(sums.work, one.work)
        add(sums.hidden, one.hidden)
        sums.running_on += one.running_on
        if step.number in samples:
            sampled += 1
            for course in operations.courses.get(step.number, []):
                add(sums.bytes, {course.purpose: course.operation.bytes})
                add(sums.operations, {course.purpose: 1})
        waited_ns = sum(one.waited.values())
        unused_ns = step.end_ns - step.start_ns - waited_ns - step.thread_ns - one.longer.get(None, 0.0)
        lengths: list[tuple[Key, float]] = [*one.waited.items()]
        if one.backward_ns or None in one.kinds:
            lengths.append((None, one.backward_ns))
        for key, ns in lengths:
            seen = Seen(
                ns=ns - one.longer.get(key, 0.0),
                late=beginnings.lateness(rank, step.number, key),
                unused_ns=unused_ns if can_stand and step.thread_ns else None,
                forward_ns=one.forward_ns,
                outside_ns=step.end_ns - step.start_ns - ns - waited_ns,
                kinds=one.kinds.get(key, {}) if one.is_known else None,
                is_blocking=key in one.blocking,
            )
            sums.seen.setdefault(key, []).append(seen)
    if sampled == 0:
        problems.append(
            f"rank {rank} has no sampled step after its first {_warm_up(record)}: of its communication only marked waits are "
            "known, and count as wire; what DDP waits for counts as backward, and what is hidden is unknown; let it run for more "
            "steps"
        )
    elif sums.running_on > 0.01 * operations.known_ns:
        problems.append(
            f"operations of rank {rank} run on after their step for {sums.running_on / known / 1e6:.3f} ms a step, into "
            "steps whose operations are not known: hidden communication is more than shown"
        )
    dropped = sum(sample.dropped for sample in record.samples)
    if dropped:
        problems.append(
            f"samples of rank {rank} lack {dropped} operations that were too many: its communication is more than shown"
        )
    # What is loaded for an evaluation is not trained on.
    trained = [step.examples for step in steps if not any(span.phase == "evaluation" for span in step.spans)]
    examples = sum(trained) / max(len(trained), 1)
    return replace(_mean(rank, steps, sampled, known, sums), examples=examples)


class _Operations:
    """Of a rank: those of its samples, and of other steps as far as all are known."""

    def __init__(self, record: Record, courses: Mapping[int, list[Course]], known: Mapping[int, list[Course]]) -> None:
        """
        Args:
            courses: of sampled operations, by step.
            known: of all operations, by steps without a sample.
        """
        self.courses = courses
        self.every = _every(record)
        self.counted = counted(record)
        self.samples = {sample.step: sample for sample in record.samples}
        sampled = [step for step in self.counted if step.number in self.samples]
        self._last = Last.of(sampled, self.samples, courses) if known else None
        self._of = {number: courses.get(number, []) for number in self.samples}
        if self._last is not None:
            self._of = {**known, **self._of}

    @property
    def known_ns(self) -> int:
        """How long all those counted steps take whose operations are known."""
        return sum(step.end_ns - step.start_ns for step in self.counted if step.number in self._of)

    def divided(self, steps: Sequence[Step]) -> Iterator[_Divided]:
        """Steps that follow each other, each by its marks and the operations that are known."""
        previous: list[Course] = []
        for step in steps:
            timeline, waits = phases(step), marked_waits(step)
            worked = _by_value(without(timeline, waits))
            backward_ns, forward_ns = worked.get("backward", 0.0), worked.get("forward", 0.0)
            own = self._of.get(step.number)
            one = _Divided(step, worked, _by_value(waits), backward_ns, forward_ns, own is not None)
            if own is not None:
                here = [course for course in previous if course.ended_ns > step.start_ns] + own
                moving = flight(here, step.start_ns, step.end_ns)
                if (sample := self.samples.get(step.number)) is not None:
                    unmarked = standing(step, sample, waits, moving)
                else:
                    assert self._last is not None
                    unmarked = self._last.standing(step, own, waits, moving)
                _look(one, unmarked, timeline, waits, here, moving)
                one.blocking = _blocking(waits, own)
                if step.number + 1 not in self._of:
                    late = [(each.operation.issued_ns, each.ended_ns, None) for each in here]
                    one.running_on = sum(b - a for a, b, _ in union(clipped(late, step.end_ns, 1 << 63)))
                previous = own
            yield one


def _look(
    one: _Divided,
    unmarked: list[Piece[None]],
    timeline: list[Piece[str]],
    waits: list[Piece[tuple[str, str]]],
    courses: list[Course],
    moving: list[Piece[Kind]],
) -> None:
    """Add what operations tell of their step."""
    step, longer = one.step, one.longer
    since_ns = min((one.operation.issued_ns for one in courses if one.profiler_ns), default=step.end_ns)
    stood = clipped(sorted([(a, b, None) for a, b, _ in waits] + unmarked), since_ns, step.end_ns)
    made = _first(stood, max((one.profiler_ns for one in courses), default=0))
    # An operation that waits for nobody waits for the profiler alone.
    made = union([*made, *((a, b, None) for a, b, kind, _ in overlaps(moving, stood) if kind[1:] == ("wait", None))])
    if made:
        for start, end, phase, _ in overlaps(timeline, _both(unmarked, made)):
            add(one.work, {phase: start - end})
            longer[None] = longer.get(None, 0.0) + end - start
        for start, end, marked, _ in overlaps(waits, made):
            longer[marked] = longer.get(marked, 0.0) + end - start
        add(one.work, {"profiler": sum(end - start for start, end, _ in made)})
        # What is on the wire meanwhile would have been while this rank computed.
        add(one.hidden, _by_value((a, b, kind) for a, b, kind, _ in overlaps(moving, made) if kind[1] == "wire"))
        moving, unmarked, waits = without(moving, made), without(unmarked, made), without(waits, made)
    for start, end, phase, _ in overlaps(timeline, unmarked):
        add(one.work, {phase: start - end})
    purpose_of = {(course.operation.name, course.operation.group): course.purpose for course in courses}
    for piece, inside in itertools.chain(_grouped(unmarked, moving), _named(waits, moving, courses, made)):
        add(one.kinds.setdefault(piece[2], {}), _within(piece, inside, purpose_of))
    still = union([*((a, b, None) for a, b, _ in waits), *unmarked])
    if any(course.profiler_ns for course in courses):
        moving = without(flight(courses, step.start_ns, step.end_ns, is_usual=True), made)
    add(one.hidden, _by_value(piece for piece in without(moving, still) if piece[2][1:] != ("wait", None)))


def _blocking(waits: Sequence[Piece[tuple[str, str]]], courses: Iterable[Course]) -> set[Key]:
    """Of which operations and groups some were issued in their wait. Of others the wait begins at any time after that."""
    issued: dict[tuple[str, str], list[int]] = {}
    for course in courses:
        issued.setdefault((course.operation.name, course.operation.group), []).append(course.operation.issued_ns)
    found: set[Key] = set()
    for start, end, key in waits:
        times = issued.get(key, [])  # in order
        at = bisect.bisect_left(times, start)
        if at < len(times) and times[at] < end:
            found.add(key)
    return found


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


def _named(
    waits: Sequence[Piece[tuple[str, str]]],
    moving: list[Piece[Kind]],
    courses: Sequence[Course],
    made: list[Piece[None]],
) -> Iterable[tuple[Piece[Key], list[Piece[Kind]]]]:
    """Each marked wait with the communication within it: at each moment an operation that the mark names, if one is in flight. A
    thread that stands in a receive waits for its sender, whatever it has sent itself that still moves."""
    of_name: dict[tuple[str, str], list[Course]] = {}
    for course in courses:
        of_name.setdefault((course.operation.name, course.operation.group), []).append(course)
    by_key: dict[tuple[str, str], list[Piece[tuple[str, str]]]] = {}
    for wait in waits:
        by_key.setdefault(wait[2], []).append(wait)
    for key, own in by_key.items():
        named = moving
        if len(of_name) > 1 and key in of_name:
            only = without(flight(of_name[key], own[0][0], own[-1][1]), made)
            named = sorted(only + without(moving, only), key=lambda piece: piece[:2])
        yield from _grouped(own, named)


def _grouped(waits: Sequence[Piece[Key]], moving: list[Piece[Kind]]) -> Iterable[tuple[Piece[Key], list[Piece[Kind]]]]:
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
    wait: Piece[Key], inside: list[Piece[Kind]], purpose_of: Mapping[tuple[str, str], str]
) -> dict[Kind, float]:
    """What a wait was. Moments in it without communication are the call's own, before and after its operation: their
    purpose is the neighbour's, whether they are wire is unknown."""
    start, end, key = wait
    purpose = inside[0][2][0] if inside else OTHER if key is None else purpose_of.get(key, OTHER)
    pieces = list(inside)
    for a, b, kind in [*inside, (end, end, None)]:
        if start < a:
            pieces.append((start, a, (purpose, "unknown", None)))
        start, purpose = b, kind[0] if kind else purpose
    return _by_value(pieces)


def _mean(rank: int, steps: list[Step], sampled: int, looked: int, sums: _Sums) -> Share:
    """The mean step: phases and marked waits from all steps; what marks do not see, by the ``looked`` ones, whose operations are
    known (`between.told`)."""
    count = len(steps)
    exposed: dict[Kind, float] = {}
    for key, seen in sums.seen.items():
        for one in seen:
            add(exposed, one.kinds or {})
        others = told(seen, max(sums.bytes, key=sums.bytes.__getitem__, default=OTHER), is_pass=key is None)
        add(exposed, others.exposed)
        add(sums.work, {"profiler": others.profiler_ns})
        if key is None:
            add(sums.work, {"backward": -others.profiler_ns - sum(others.exposed.values())})
    work = {phase: ns / count for phase in PHASES if (ns := sums.work.get(phase, 0.0)) > 0}
    exposed = {kind: ns / count for kind, ns in exposed.items()}
    hidden = {kind: part / looked for kind, part in sums.hidden.items()}
    exposed, hidden = _resolved(exposed, exposed, hidden), _resolved(hidden, hidden, exposed)
    communication = {}
    for purpose in PURPOSES:
        waited_for: dict[int, float] = {}
        for kind, part in [*exposed.items(), *hidden.items()]:
            if kind[0] == purpose and kind[1] == "wait" and kind[2] is not None:
                add(waited_for, {kind[2]: part})
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
    return Share(rank, count, sampled, step_ns, work, communication, looked)


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
                    add(known, {(how, last): size})
        total = sum(known.values())
        for (how, last), size in known.items() if total else [(("wire", None), 1.0)]:
            add(found, {(purpose, how, last): part * (size / total if total else 1.0)})
    return found


def _about_steps(record: Record, steps: list[Step], took: Sequence[tuple[int, int]]) -> list[str]:
    """
    Args:
        steps: those that count.
        took: their numbers, and how long they are in ns.
    """
    rank, warm_up, every = record.header.rank, _warm_up(record), len({step.number for step in record.steps})
    problems = []
    if not steps:
        problems.append(f"rank {rank} recorded no whole step: it is left out")
    if every < len(record.steps):
        problems.append(f"rank {rank} recorded some steps twice, of which the last counts")
    if 0 < every <= warm_up:
        problems.append(
            f"rank {rank} recorded {plural(every, 'step')} only: the last one is shown, and what is done "
            f"once (connecting, compiling) may be in it{_NEVER_STEPPED if every == 1 else ''}"
        )
    if every <= warm_up:
        return problems
    median = statistics.median(ns for _, ns in took)
    long = [each for each in took if each[1] > OUTLIER * median]
    if long:
        number, longest = max(long, key=lambda each: each[1])
        part = sum(ns for _, ns in long) / sum(ns for _, ns in took)
        problems.append(
            f"{len(long)} of {len(steps)} steps of rank {rank} took more than {OUTLIER} times the median of "
            f"{median / 1e6:.3f} ms, {100 * part:.1f} % of all time; the longest is step {number} with "
            f"{longest / 1e6:.3f} ms. The means include them"
        )
    return problems


def lengths(ranks: Sequence[Record]) -> dict[int, list[tuple[int, int]]]:
    """By rank: the number and the length in ns of each step that counts, without what torch's profiler takes: since who is held
    up holds up the others, on the rank where that is longest. No step becomes shorter than the rank's median by it."""
    longest: dict[int, int] = {}
    for record in ranks:
        for step in record.steps:
            longest[step.number] = max(longest.get(step.number, 0), profiler_ns(step, step.end_ns))
    found = {}
    for record in ranks:
        own = [(step.number, step.end_ns - step.start_ns - profiler_ns(step, step.end_ns)) for step in counted(record)]
        usual = statistics.median(ns for _, ns in own) if own else 0
        found[record.header.rank] = [
            (number, max(min(ns, round(usual)), step.end_ns - step.start_ns - longest[number]))
            for (number, ns), step in zip(own, counted(record), strict=True)
        ]
    return found


def counted(record: Record) -> list[Step]:
    """The steps that means are of: all but the first, in which connections are made and code is compiled."""
    every = _every(record)
    return every[_warm_up(record) :] or every[-1:]


def _every(record: Record) -> list[Step]:
    return sorted({step.number: step for step in record.steps}.values(), key=lambda step: step.number)


def _warm_up(record: Record) -> int:
    """How many steps are left out. Who recorded with another tool has chosen the steps."""
    return 0 if "reader" in record.header.about else WARM_UP_STEPS


def _about_samples(shares: Sequence[Share]) -> list[str]:
    least = min(shares, key=lambda share: (share.known, share.rank), default=None)
    if least is None or not 0 < least.known < min(FEW, least.steps):
        return []
    return [
        f"of only {least.known} of {least.steps} steps of rank {least.rank} all operations are known (torch's profiler sampled "
        f"{least.sampled}): what is wire, wait and hidden in the others is estimated from these. Run for 20 steps or more"
    ]


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


def _sum(parts: Mapping[Kind, float], purpose: str | None, what: str) -> float:
    """
    Args:
        purpose: None: of all.
    """
    return sum(part for kind, part in parts.items() if purpose in (None, kind[0]) and kind[1] == what)


WARM_UP_STEPS = 2
"""Connections are made and buckets are built anew in the first two (DDP rebuilds its buckets after the first)."""

_MARKED: Kind = (OTHER, "unknown", None)

_NEVER_STEPPED = ". Where no optimizer stepped more than once, all that the script did is one step"

FEW = 3
"""Steps whose operations are known: fewer say little of the others."""

OUTLIER = 5
"""So many times the median is worth a word: a checkpoint, an evaluation, a stall."""
