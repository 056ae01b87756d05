"""Operations that Penstock's engine tells of in all steps: the division is then as if all steps had samples; and where the engine
does not tell all, or something else than the samples, as if it told nothing."""

from __future__ import annotations

import collections
import itertools
import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

import pytest

from penstock.profiling.divide import divide
from penstock.profiling.intervals import without
from penstock.profiling.record import Ended, Endings, Record
from penstock.profiling.remembered import _Memory
from penstock.tools.profile.recorder.engine import Memory
from profiles import agree, data_parallel, parts, pipeline, shifted, uneven

MS = 1_000_000
SYNC = "data-parallel sync"
STEPS, SAMPLED = 40, (4, 9, 15)


def told(records: list[Record], sampled: Collection[int] = SAMPLED, lines: int = 7) -> list[Record]:
    """Records of which all steps were sampled, with few samples, and with an engine's memory in so many lines. The engine takes
    operations 0.3 ms after the sample shows their issue, and notes their ends 0.2 ms before."""
    found = []
    for record in records:
        numbers = collections.defaultdict[tuple[int | None, bool], Iterator[int]](itertools.count)
        operations = []
        for one in (one for sample in record.samples for one in sample.operations):
            number = next(numbers[one.peer, one.name == "send"]) + 1
            ended_ns = one.ended_ns - 200_000
            operations.append(Ended("c", number, one.group, one.name, one.issued_ns + 300_000, ended_ns, one.peer))
        ends = [record.steps[len(record.steps) * (at + 1) // lines - 1].end_ns for at in range(lines)]
        ends[-1] = max(ends[-1], *(one.ended_ns for one in operations))
        endings, before = [], 0
        for until_ns in ends:
            endings.append(Endings(until_ns, 0, tuple(one for one in operations if before < one.ended_ns <= until_ns)))
            before = until_ns
        samples = [sample for sample in record.samples if sample.step in sampled]
        found.append(replace(record, samples=samples, endings=endings))
    return found


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("world", [2, 3])
def test_it_is_as_if_all_steps_had_samples(seed: int, world: int) -> None:
    records = uneven(seed, world)
    remembered = divide(told(records))
    assert remembered.problems == () and [share.sampled for share in remembered.shares] == [3] * world
    assert agree(remembered, divide(records))
    assert not agree(divide([replace(each, endings=[]) for each in told(records)]), divide(records), near=0.02)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("stages", "world"), [(2, 2), (3, 3), (4, 2)])
def test_messages_are_told_as_collectives_are(stages: int, world: int, seed: int) -> None:
    """Of pipelines: also where two ranks have several stages each, and receive from each other forward and back."""
    records = pipeline(stages, world, STEPS, random.Random(f"stages {seed}"))
    few = told(records)
    for share, truly in zip(divide(few).shares, divide(records).shares, strict=True):
        assert share.work == pytest.approx(truly.work, rel=1e-6) and len(truly.communication) >= 2
        for purpose, moving in truly.communication.items():
            assert parts(share.communication[purpose]) == pytest.approx(parts(moving), rel=1e-6, abs=1000), purpose
    without = divide([replace(each, endings=[]) for each in few])
    hidden = [
        [each.communication["pipeline send"].hidden_wire_ns for each in one.shares]
        for one in (without, divide(records))
    ]
    assert hidden[0] != pytest.approx(hidden[1], rel=0.02)


def test_short_pauses_between_operators_are_no_waits() -> None:
    """0.2 ms in the midst of each backward pass, while a send moves: the engine is believed all the same."""

    def paused(record: Record) -> Record:
        samples = []
        for sample, step in zip(record.samples, record.steps, strict=True):
            middles = [(one.start_ns + one.end_ns) // 2 for one in step.spans if one.phase == "backward"]
            gaps = [(at - 100_000, at + 100_000, None) for at in middles]
            busy = tuple((a, b) for a, b, _ in without([(a, b, None) for a, b in sample.busy], gaps))
            samples.append(replace(sample, busy=busy))
        return replace(record, samples=samples)

    whole = [paused(each) for each in pipeline(2, 2, STEPS, random.Random("pauses"))]
    for share, truly in zip(divide(told(whole)).shares, divide(whole).shares, strict=True):
        hidden, of_all = (one.communication["pipeline send"].hidden_wire_ns for one in (share, truly))
        assert hidden == pytest.approx(of_all, rel=0.05)
        assert share.work["backward"] == pytest.approx(truly.work["backward"], rel=0.03)


def test_the_torn_end_of_a_record_counts_by_its_marks() -> None:
    """What ended after the last line is unknown: those steps are told as others without a sample are."""
    all_ = told(uneven(1))
    whole, cut = divide(all_), divide([replace(each, endings=each.endings[:4]) for each in all_])
    for share, truly in zip(cut.shares, whole.shares, strict=True):
        assert share.work == pytest.approx(truly.work, rel=0.02)
        moving, of_all = share.communication[SYNC], truly.communication[SYNC]
        assert moving.exposed_ns == pytest.approx(of_all.exposed_ns, rel=0.02)
        assert moving.hidden_wire_ns == pytest.approx(of_all.hidden_wire_ns, rel=0.2)
        assert moving.hidden_wait_ns != pytest.approx(of_all.hidden_wait_ns, rel=0.01)  # a mean over half of the steps


def _missing(record: Record) -> Record:
    """A line lacks three operations, and says so."""
    lines = list(record.endings)
    lines[3] = replace(lines[3], missing=3, operations=lines[3].operations[3:])
    return replace(record, endings=lines)


def _renumbered(record: Record) -> Record:
    """The operations of one step have numbers of their own on this rank."""
    step = record.steps[20]

    def changed(one: Ended) -> Ended:
        return one._replace(number=one.number + 1000) if step.start_ns <= one.issued_ns < step.end_ns else one

    lines = [replace(line, operations=tuple(map(changed, line.operations))) for line in record.endings]
    return replace(record, endings=lines)


@pytest.mark.parametrize("change", [_missing, _renumbered])
def test_steps_that_are_not_wholly_told_are_left_to_the_marks(change: Callable[[Record], Record]) -> None:
    """On one rank some operations of a step are missing, or do not meet the other's: those steps alone are less sure."""
    records = uneven(2)
    first, second = told(records)
    changed = divide([first, change(second)])
    assert changed.problems == ()
    assert agree(changed, divide(records), near=0.1)


def _with_a_send(record: Record) -> Record:
    """A sample shows a send, of which nobody knows from the engine when the other began."""
    samples = list(record.samples)
    send = replace(samples[0].operations[-1], name="send", peer=1 - record.header.rank, number=0)
    samples[0] = replace(samples[0], operations=(*samples[0].operations, send))
    return replace(record, samples=samples)


def _with_more(record: Record) -> Record:
    """The engine has an operation in a sampled step that the sample does not show."""
    step = record.steps[SAMPLED[1]]
    more = Ended("d", 1, "0", "all_reduce", step.start_ns + 1, step.start_ns + 2)
    lines = [replace(record.endings[0], operations=(more, *record.endings[0].operations)), *record.endings[1:]]
    return replace(record, endings=lines)


@pytest.mark.parametrize("change", [_with_a_send, _with_more])
def test_an_engine_that_tells_something_else_than_the_samples_is_not_believed(
    change: Callable[[Record], Record],
) -> None:
    changed = [change(each) for each in told(uneven(3))]
    assert divide(changed) == divide([replace(each, endings=[]) for each in changed])


def test_a_thread_that_stands_still_before_its_last_operation_is_told_by_samples() -> None:
    """In the midst of a pass, as where a hook waits: the last operation says nothing of when it stands still."""
    records = uneven(4)

    def paused(record: Record) -> Record:
        samples = []
        for sample in record.samples:
            first = sample.operations[0]
            busy = [(a, b) for a, b in sample.busy if b <= first.issued_ns or a >= first.ended_ns]
            samples.append(replace(sample, busy=tuple(busy)))
        return replace(record, samples=samples)

    changed = [paused(each) for each in told(records)]
    assert divide(changed) == divide([replace(each, endings=[]) for each in changed])


@pytest.mark.parametrize("disturbed", [1, 2])
def test_one_sample_in_which_the_thread_stands_still_elsewhere(disturbed: int) -> None:
    """Threads of the backend's had its processor for 9 ms. The other samples tell of all steps, unless one more is so."""
    records = uneven(4)

    def held_up(record: Record) -> Record:
        samples = list(record.samples)
        for at, sample in enumerate(samples[:disturbed]):
            issued_ns = sample.operations[0].issued_ns
            pause = [(issued_ns, issued_ns + 9 * MS, None)]
            busy = tuple((a, b) for a, b, _ in without([(a, b, None) for a, b in sample.busy], pause))
            samples[at] = replace(sample, busy=busy)
        return replace(record, samples=samples)

    changed = [held_up(each) for each in told(records)]
    by_samples = divide([replace(each, endings=[]) for each in changed])
    if disturbed == 2:
        assert divide(changed) == by_samples
        return
    # What is held up in that one step counts.
    for a, b, c in zip(divide(changed).shares, divide(records).shares, by_samples.shares, strict=True):
        assert a.work == pytest.approx(b.work, rel=0.01) and c.work != pytest.approx(b.work, rel=0.01)


def test_two_samples_that_stand_still_for_less_do_not_show_the_rule() -> None:
    """Only one stands as long as something moves after the last operation, and longer: the others go on 2 ms before its end."""
    records = uneven(4)

    def goes_on(record: Record) -> Record:
        samples = list(record.samples)
        for at, sample in enumerate(samples):
            ended_ns = max(one.ended_ns for one in sample.operations)
            first_ns = sample.operations[0].issued_ns
            pause = [(first_ns, first_ns + 9 * MS, None)] if at == 0 else []
            busy = [*without([(a, b, None) for a, b in sample.busy], pause)]
            busy += [] if at == 0 else [(ended_ns - 2 * MS, ended_ns, None)]
            samples[at] = replace(sample, busy=tuple((a, b) for a, b, _ in sorted(busy)))
        return replace(record, samples=samples)

    changed = [goes_on(each) for each in told(records)]
    assert divide(changed) == divide([replace(each, endings=[]) for each in changed])


def test_launches_of_many_operations_are_told_by_samples() -> None:
    """A pass of 40 ms launches 40 small ones, for most of its time, and stands still after the last for less than 1 ms."""

    def launching(record: Record) -> Record:
        samples = []
        for sample in record.samples:
            launches = [(one.issued_ns - 900_000, one.issued_ns, None) for one in sample.operations]
            busy = tuple((a, b) for a, b, _ in without([(a, b, None) for a, b in sample.busy], launches))
            samples.append(replace(sample, busy=busy))
        return replace(record, samples=samples)

    changed = [launching(each) for each in told(data_parallel(2, STEPS, range(STEPS), buckets=40, wire_ns=950_000))]
    assert divide(changed) == divide([replace(each, endings=[]) for each in changed])
    for share in divide(changed).shares:
        assert share.work["backward"] < 10 * MS < 25 * MS < share.communication[SYNC].exposed_ns


def test_an_operation_that_no_sample_shows_counts_for_other_purposes() -> None:
    """A sum of metrics now and then, hidden in the forward pass, which both ranks begin within its 8 ms."""
    first, second = told(uneven(7))

    def with_metrics(record: Record) -> Record:
        step = record.steps[20]
        [forward] = [span for span in step.spans if span.phase == "forward"]
        one = Ended("c", 5000, "0", "all_gather", forward.start_ns, forward.start_ns + 8 * MS)
        lines = [replace(line, operations=(*line.operations, one)) for line in record.endings[-1:]]
        return replace(record, endings=[*record.endings[:-1], *lines])

    with_it, without = divide(list(map(with_metrics, (first, second)))), divide([first, second])
    for share, usual in zip(with_it.shares, without.shares, strict=True):
        hidden = share.communication["other"]
        assert hidden.hidden_wire_ns + hidden.hidden_wait_ns == pytest.approx(8 * MS / (STEPS - 2), abs=1000)
        assert share.communication[SYNC] == usual.communication[SYNC]


@pytest.mark.parametrize("seed", range(50))
def test_what_is_not_written_is_missing_in_the_line_that_says_all_is_told(seed: int) -> None:
    """The engine drops operations, and the writer has no room for lines, at random: nothing is written twice, and whoever reads
    learns where something lacks, before a line claims that time."""
    draw = random.Random(f"memory {seed}")
    happened: list[Endings | tuple[int, int]] = []
    """Lines that were written; how many operations were lost, and when the first of them was issued."""
    numbers = itertools.count()

    def put(line: Any) -> bool:
        has_room = draw.random() < 0.8
        happened.append(line if has_room else (len(line.operations), 500))
        return has_room

    class Core:
        def take_ended(self) -> tuple[list[tuple[str, int, str, int, int, int, None]], int, int]:
            dropped, since_ns = draw.choice([0, 0, 3]), draw.randrange(1, 1000)
            happened.append((dropped, since_ns))
            many = range(draw.choice([0, 1, 63, 64, 65, 200]))
            return (
                [("0", next(numbers), "all_reduce", 8, 500, 2, None) for _ in many],
                dropped,
                since_ns * bool(dropped),
            )

    memory = Memory(put, lambda name: (name, (0, 1)))
    memory._is_watching, memory._core = True, Core()
    for _ in range(20):
        memory.look()
    until_ns, lost, since_ns = 0, 0, 1 << 63
    written: list[int] = []
    for each in happened:
        if isinstance(each, tuple):
            lost, since_ns = lost + each[0], min(since_ns, each[1] if each[0] else since_ns)
            continue
        written += [one.number for one in each.operations]
        assert each.missing == (lost if each.until_ns > until_ns else 0)
        assert not each.missing or each.since_ns == since_ns
        if each.until_ns > until_ns:
            until_ns, lost, since_ns = each.until_ns, 0, 1 << 63
    assert written == sorted(set(written)) and until_ns


def test_messages_have_the_ranks_of_the_job() -> None:
    """Those of one tag have a channel, and their peer is the rank in the job; in a group that torch does not know yet they have
    none. Of an engine that starts anew groups may have the same names and other ranks."""
    written: list[Any] = []
    members = {"3": (4, 7)}
    memory = Memory(lambda line: bool(written.append(line)) or True, lambda name: ("g" + name, members.get(name, ())))

    class Core:
        told: Any = ()

        def take_ended(self) -> Any:
            return self.told, 0, 0

    def ended(*told: Any) -> list[tuple[str, int | None]]:
        core.told = list(told)
        memory.look()
        return [(one.channel, one.peer) for one in written[-1].operations]

    core = Core()
    memory._is_watching = True
    memory._observed(core)
    send, receive = ("3", 1, "send", 8, 1, 2, (1, 0)), ("3", 1, "recv", 8, 1, 2, (0, 5))
    early = ("9", 1, "recv", 8, 1, 2, (1, 0))
    assert ended(send, receive, early) == [("3, tag 0", 7), ("3, tag 5", 4), ("9", None)]
    members |= {"9": (0, 2), "3": (0, 5)}
    assert ended(send, early) == [("3, tag 0", 7), ("9, tag 0", 2)]
    memory._observed(core)
    assert ended(send) == [("3, tag 0", 5)]


def test_what_cannot_be_told_counts_as_missing() -> None:
    """torch may lose a group while it is asked for its name: the next line says that something lacks."""
    written: list[Any] = []

    def label(name: str) -> tuple[str, tuple[int, ...]]:
        if not written:
            written.append(None)
            raise KeyError(name)
        return name, (0, 1)

    class Core:
        def take_ended(self) -> Any:
            return [("0", 1, "all_reduce", 8, 1, 2, None)] * 3, 0, 0

    memory = Memory(lambda line: bool(written.append(line)) or True, label)
    memory._is_watching, memory._core = True, Core()
    with pytest.raises(KeyError):
        memory.look()
    memory.look()
    assert written[-1].missing == 3 and len(written[-1].operations) == 3


def test_an_operation_that_was_dropped_long_after_its_issue_is_missing_in_its_step() -> None:
    """A receive of step 10 was dropped in step 30: both are left to the marks, and those between."""
    first, _ = told(uneven(8))
    early = first.steps[10].start_ns + 1
    lines = list(first.endings)
    at = next(at for at, line in enumerate(lines) if line.until_ns > first.steps[30].start_ns)
    lines[at] = replace(lines[at], missing=1, since_ns=early)
    whole = [_Memory.of(each) for each in (first, replace(first, endings=lines))]
    assert whole[0] is not None and whole[1] is not None
    lost = set(whole[0].whole) - set(whole[1].whole)
    assert {10, 20, 30} <= lost and min(lost) == 10


def test_places_tell_purposes_only_among_as_many() -> None:
    """Two ranks with two stages each; step 20 has two micro-batches instead of three: forward, forward, backward, backward."""
    draw = random.Random("fewer")
    records = pipeline(4, 2, STEPS, draw)
    fewer = [replace(each, steps=each.steps[:20], samples=each.samples[:20]) for each in records]
    short = [shifted(each, 10**12) for each in pipeline(4, 2, 1, draw, micro_batches=2)]
    for record, more in zip(fewer, short, strict=True):
        record.steps.append(more.steps[0]._replace(number=20))
        record.samples.append(replace(more.samples[0], step=20))
    for record in told(fewer):
        memory = _Memory.of(record)
        assert memory is not None
        purposes = [one.purpose for _, one in memory.steps[10] if one.name == "recv"]
        of_sample = [one.purpose for one in fewer[record.header.rank].samples[10].operations if one.name == "recv"]
        assert purposes == of_sample and len(set(purposes)) > 1
        assert len({one.purpose for _, one in memory.steps[20] if one.name == "recv"}) == 1


def test_each_of_a_batch_ends_when_the_engine_says() -> None:
    """A sample shows a send and a receive of one batch from the same time to the same, 20 ms after the send has ended."""

    def batched(record: Record) -> Record:
        samples = []
        for sample in record.samples:
            operations = [
                one if one.name == "recv" else replace(one, ended_ns=one.ended_ns + 20 * MS)
                for one in sample.operations
            ]
            samples.append(replace(sample, operations=tuple(operations)))
        return replace(record, samples=samples)

    for record in map(batched, told(pipeline(2, 2, STEPS, random.Random("batch")))):
        memory = _Memory.of(record)
        assert memory is not None
        ended = {one.number: one for line in record.endings for one in line.operations if one.name == "send"}
        for _, one in memory.steps[20]:
            if one.name == "send":
                assert one.ended_ns - ended[one.number].ended_ns <= 1 * MS


def test_what_runs_on_into_the_next_step_is_hidden_there() -> None:
    records = told(uneven(6))
    plain = divide(records)
    longer = []
    for record in records:
        last = max(
            (one for line in record.endings for one in line.operations if one.issued_ns < record.steps[20].end_ns),
            key=lambda one: one.issued_ns,
        )
        end_ns = record.steps[21].start_ns + 2 * MS
        lines = [
            replace(
                line, operations=tuple(one._replace(ended_ns=end_ns) if one is last else one for one in line.operations)
            )
            for line in record.endings
        ]
        longer.append(replace(record, endings=lines))
    changed = divide(longer)
    assert not any("run on" in problem for problem in changed.problems)
    for share, usual in zip(changed.shares, plain.shares, strict=True):
        more = share.communication[SYNC].hidden_wire_ns - usual.communication[SYNC].hidden_wire_ns
        assert more > 2 * MS / (STEPS - 2)
