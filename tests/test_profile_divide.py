"""The division of steps into work, exposed wire and exposed wait, on records whose times are known and against a slow oracle."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from penstock.profiling import standing as module
from penstock.profiling import turns
from penstock.profiling.breakdown import OTHER, PHASES, PURPOSES, SYNC, Moving, Share
from penstock.profiling.divide import divide, each_step, lengths
from penstock.profiling.intervals import innermost, overlaps, union, without
from penstock.profiling.phases import marked_waits, phases
from penstock.profiling.record import Operation, Record, Sample, Span, Step, Wait
from profiles import data_parallel, header, parts, shifted, wild

MS = 1_000_000


def exposed(share: Share) -> float:
    return sum(moving.exposed_ns for moving in share.communication.values())


def sums_up(share: Share) -> bool:
    return sum(share.work.values()) + exposed(share) == pytest.approx(share.step_ns, rel=1e-9)


# ------------------------------------------------------------------------------------------------------- planted workloads


@pytest.mark.parametrize("world", [1, 2, 3, 7])
@pytest.mark.parametrize("sampled", [(3, 6, 9), tuple(range(12))])
def test_every_category_of_a_planted_job_is_exact(world: int, sampled: tuple[int, ...]) -> None:
    """DDP with known compute, bytes and wire: phases, exposed, hidden, bytes and operations are as planted, on every rank."""
    breakdown = divide(data_parallel(world, sampled=sampled))
    assert breakdown.problems == ()
    for share in breakdown.shares:
        assert share.work == pytest.approx(
            {"loading": 5 * MS, "forward": 20 * MS, "backward": 40 * MS, "optimizer": 3 * MS}
        )
        # Two of three buckets are hidden in the backward pass; the last is exposed.
        assert share.communication == {SYNC: Moving(10 * MS, 0, pytest.approx(20 * MS), 0, 75e6, 3)}
        assert share.step_ns == 78 * MS and sums_up(share)
        assert share.steps == 10 and share.sampled == len([number for number in sampled if number >= 2])


def test_a_late_rank_is_waited_for_and_named() -> None:
    """Rank 1 of three computes 7 ms longer: the others wait for it, exposed in the end and hidden before; it never waits."""
    breakdown = divide(data_parallel(3, late_ns={1: 7 * MS}))
    for share in breakdown.shares:
        moving = share.communication[SYNC]
        assert sums_up(share)
        if share.rank == 1:
            assert share.work["forward"] == 27 * MS
            assert moving == Moving(10 * MS, 0, pytest.approx(20 * MS), 0, 75e6, 3)
        else:
            assert share.work["forward"] == 20 * MS
            # Buckets are issued at 38 1/3, 51 2/3 and 65 ms, on rank 1 7 ms later; no operators run after 65 ms. So the
            # second bucket is on the wire for 3 2/3 ms more, and the third waits for what is left until 72 ms.
            near = {"abs": 2}
            assert moving.exposed_wire_ns == pytest.approx((10 + 11 / 3) * MS, **near)
            assert moving.exposed_wait_ns == pytest.approx(10 / 3 * MS, **near)
            assert moving.hidden_wire_ns == pytest.approx((10 + 19 / 3) * MS, **near)
            assert moving.hidden_wait_ns == pytest.approx((7 + 10 / 3) * MS, **near)
            assert moving.waited_for == {1: pytest.approx((7 + 20 / 3) * MS, **near)}


def test_unsampled_steps_are_told_apart_as_the_sampled() -> None:
    """One step is sampled, and DDP's wait in C++ is taken out of the backward passes of all; the sum holds."""
    few, all_ = divide(data_parallel(2, sampled=(5,))), divide(data_parallel(2, sampled=range(12)))
    assert [share.sampled for share in few.shares] == [1, 1]
    for one, other in zip(few.shares, all_.shares, strict=True):
        assert one.work == pytest.approx(other.work) and one.communication == other.communication and sums_up(one)


@pytest.mark.parametrize("where", [5, 7])
def test_a_rare_evaluation_is_waited_for_in_its_step_alone(where: int) -> None:
    """Rank 0 evaluates for 100 ms in a step with a sample, or without: rank 1 waits for it in its backward pass, and does not
    compute; in no other step it waits."""
    breakdown = divide(data_parallel(2, sampled=(3, 5), evaluation_ns={(0, where): 100 * MS}))
    first, second = breakdown.shares
    assert sums_up(first) and sums_up(second) and first.step_ns == second.step_ns == 88 * MS
    assert first.work["evaluation"] == 10 * MS and first.work["backward"] == pytest.approx(40 * MS)
    # In a sampled step it is seen that the first two buckets, which usually are hidden, move after the wait: its 30 ms of wire
    # beside 10 of the other make it less sure what steps without a sample have.
    near = 0.01 if where == 5 else 1e-6
    assert second.work["backward"] == pytest.approx(40 * MS, rel=near)
    moving = second.communication[SYNC]
    assert moving.exposed_ns == pytest.approx(20 * MS, rel=2 * near) and set(moving.waited_for) == {0}
    assert moving.exposed_wire_ns == pytest.approx((12 if where == 5 else 10) * MS, rel=5 * near)


@pytest.mark.parametrize("seed", range(12))
def test_waits_differ_from_step_to_step_and_few_are_sampled(seed: int) -> None:
    """In each step some rank begins its passes later, by up to 30 ms, and the wire of each step takes longer or shorter. Three
    samples of 60 steps tell by the marks of the others what samples of all steps tell."""
    draw = random.Random(f"lateness {seed}")
    late = {(draw.randrange(2), step): draw.randrange(30) * MS for step in range(60)}
    sampled = draw.sample(range(2, 60), 3)
    few, all_ = (divide(data_parallel(2, 60, which, evaluation_ns=late, buckets=1)) for which in (sampled, range(60)))
    for one, other in zip(few.shares, all_.shares, strict=True):
        moving, truly = one.communication[SYNC], other.communication[SYNC]
        assert sums_up(one) and one.work["backward"] == pytest.approx(other.work["backward"], rel=0.03)
        assert moving.exposed_wire_ns == pytest.approx(truly.exposed_wire_ns, rel=0.03)
        assert moving.exposed_wait_ns == pytest.approx(truly.exposed_wait_ns, rel=0.03)
        assert moving.waited_for.keys() == truly.waited_for.keys()


@pytest.mark.parametrize(
    ("late", "held"),
    [
        ({}, {(0, 5): 90, (1, 5): 20, (2, 5): 90}),
        ({}, {(2, 6): 70, (1, 6): 5}),
        ({}, {(0, 3): 200, (1, 7): 100}),
        # Who is late anyway is held up longest; else the profiler would take the place of some of the usual wait.
        ({1: 7 * MS}, {(0, 5): 20, (1, 5): 90, (2, 5): 90}),
        ({1: 7 * MS}, {(1, 6): 70, (2, 6): 5, (1, 3): 50}),
    ],
)
def test_who_waits_since_the_profiler_held_another_up_waits_for_the_profiler(
    late: dict[int, int], held: dict[tuple[int, int], int]
) -> None:
    """Longer in one rank than in another: in a sampled step and in one without a sample. All else is as without the profiler."""
    usual = divide(data_parallel(3, sampled=(3, 5), late_ns=late))
    times = {key: ms * MS for key, ms in held.items()}
    breakdown = divide(data_parallel(3, sampled=(3, 5), late_ns=late, profiler_ns=times))
    for share, without_it in zip(breakdown.shares, usual.shares, strict=True):
        longest = sum(
            max(ms for (_, step), ms in times.items() if step == number) for number in {step for _, step in times}
        )
        assert share.work.get("profiler", 0.0) == pytest.approx(longest / 10, abs=2000), share
        assert {**share.work, "profiler": 0.0} == pytest.approx({**without_it.work, "profiler": 0.0}, abs=2000)
        for what in ("exposed_wire_ns", "exposed_wait_ns", "hidden_wire_ns"):
            moving, moving_without = share.communication[SYNC], without_it.communication[SYNC]
            assert getattr(moving, what) == pytest.approx(getattr(moving_without, what), abs=2000), what
        # The first sum moves later, and hides less of the others' waits.
        assert -2000 <= moving.hidden_wait_ns - moving_without.hidden_wait_ns <= (2 * MS if late else 2000)
        assert sums_up(share) and set(moving.waited_for) == set(moving_without.waited_for)


@pytest.mark.parametrize("why", ["it computes", "nobody is late", "autograd has its own thread"])
def test_a_long_pass_without_a_sample_is_no_wait_by_itself(why: str) -> None:
    records = data_parallel(2, sampled=(3, 5), evaluation_ns={(0, 7): 100 * MS})
    second = records[1]
    for at, step in enumerate(second.steps):
        if step.number == 7 and why == "it computes":
            second.steps[at] = step._replace(thread_ns=step.end_ns - step.start_ns)
    if why == "nobody is late":
        records[0].steps = [
            step._replace(
                spans=tuple(
                    span._replace(start_ns=step.start_ns + 25 * MS) if span.phase == "backward" else span
                    for span in step.spans
                )
            )
            for step in records[0].steps
        ]
    if why == "autograd has its own thread":
        second.samples = [replace(sample, busy=()) for sample in second.samples]
    share = divide(records).shares[1]
    assert share.communication[SYNC].exposed_wait_ns == 0 and sums_up(share)
    assert share.work["backward"] + share.communication[SYNC].exposed_wire_ns == pytest.approx(60 * MS)


@pytest.mark.parametrize("is_summed", [True, False])
def test_of_two_passes_a_step_those_count_in_which_gradients_are_summed(is_summed: bool) -> None:
    """In step 8 rank 1 begins the first pass 20 ms later, and the second 10 ms. If the first gradients are summed, too, rank 0
    has waited for both. If they are accumulated it has waited for the second alone: rank 1 has caught up by then."""
    records = [Record(header(rank, 2)) for rank in range(2)]
    for number in range(12):
        at, (first, second) = 1000 * MS * number, (20 * MS, 10 * MS) if number == 8 else (0, 0)
        for rank, record in enumerate(records):
            waits = [first * is_summed, second]
            begin = at + 100 * MS + first * rank
            end = begin + 60 * MS + waits[0] * (1 - rank) if is_summed else at + 160 * MS
            then = max(at + 200 * MS + waits[0], end) + second * rank
            last = then + 60 * MS + second * (1 - rank)
            spans = (Span("forward", at, begin), Span("backward", begin, end), Span("backward", then, last))
            used = last - at - 20 * MS - sum(waits) * (1 - rank)
            record.steps.append(Step(number, at, last + 10 * MS, spans, (), used))
            if number in (3, 6, 9):
                ends = [(end, 0), (last, 1)] if is_summed else [(last, 0)]
                own = [Operation("all_reduce", "0", k, at - 10 * MS, at, 8, 2, None, SYNC) for at, k in ends]
                busy = ((at, end - 10 * MS), (then, last - 10 * MS))
                record.samples.append(Sample(number, busy, tuple(own)))
    waited = [share.communication[SYNC].waited_for for share in divide(records).shares]
    assert waited == [{1: pytest.approx((3 if is_summed else 1) * MS)}, {}]


def test_of_several_waits_each_is_for_who_was_late_there() -> None:
    """Ten blocking sums a step: rank 1 is 5 ms late at the first, rank 2 4 ms at each of the others."""
    records = [Record(header(rank, 3)) for rank in range(3)]
    for number in range(20):
        at = 1000 * MS * number
        now = at
        waits: list[list[Wait]] = [[], [], []]
        operations: list[list[Operation]] = [[], [], []]
        for k in range(10):
            late = (0, 5 * MS * (k == 0), 4 * MS * (k > 0))
            end = now + 11 * MS + max(late)
            for rank in range(3):
                begin = now + 10 * MS + late[rank]
                waits[rank].append(Wait(begin, end, "all_reduce", "tp"))
                operations[rank].append(Operation("all_reduce", "tp", k, begin, end, 8, 3, None, "tensor"))
            now = end
        for rank, record in enumerate(records):
            spans = (Span("forward", at, now),)
            record.steps.append(Step(number, at, now + 10 * MS, spans, tuple(waits[rank]), 100 * MS))
            if number in (4, 9, 15):
                record.samples.append(Sample(number, ((at, at + MS),), tuple(operations[rank])))
    waited = [share.communication["tensor"].waited_for for share in divide(records).shares]
    five, others = pytest.approx(5 * MS), pytest.approx(36 * MS)
    assert waited == [{1: five, 2: others}, {2: others}, {1: five}]


def test_a_pass_that_lies_below_other_marks_is_not_lost() -> None:
    """All of the pass is in marks within it, as of a hook that clips: what it stood still is exposed."""
    records = []
    for rank in range(2):
        record = Record(header(rank, 2))
        for number in range(12):
            at = 1000 * MS * number
            spans = (Span("backward", at, at + 100 * MS), Span("clip", at, at + 100 * MS))
            record.steps.append(Step(number, at, at + 110 * MS, spans, (), 60 * MS))
            if number in (4, 9):
                own = Operation("all_reduce", "0", 0, at + 50 * MS, at + 100 * MS, 8, 2, None, SYNC)
                record.samples.append(Sample(number, ((at, at + 50 * MS),), (own,)))
        records.append(record)
    for share in divide(records).shares:
        assert sums_up(share) and share.communication[SYNC].exposed_wire_ns == pytest.approx(50 * MS * 2 / 10)


def test_who_waits_later_for_what_was_issued_early_is_waited_for_by_nobody() -> None:
    """Tensors are gathered two layers ahead over a wire that is always busy. After the last sample rank 1 computes 2 ms a layer
    longer: it comes later to its waits, but has issued its gathers in time."""
    records, now = [Record(header(rank, 2)) for rank in range(2)], 0
    for number in range(30):
        start, free, times = now, now, [now, now]
        issued = [[now + 1000, now + 2000] for _ in range(2)]
        waits: list[list[Wait]] = [[], []]
        operations: list[list[Operation]] = [[], []]
        for layer in range(20):
            free = max(free, issued[0][layer], issued[1][layer]) + 12 * MS
            for rank in range(2):
                wait = Wait(times[rank] + 3000, max(times[rank] + 3000, free), "all_gather", "fsdp")
                waits[rank].append(wait)
                operations[rank].append(
                    Operation("all_gather", "fsdp", layer, issued[rank][layer], free, 8, 2, None, SYNC)
                )
                issued[rank].append(wait.end_ns)
                times[rank] = wait.end_ns + (10 if rank == 1 and number > 15 else 8) * MS
        now = max(times) + 5 * MS
        for rank, record in enumerate(records):
            used = now - start - sum(wait.end_ns - wait.start_ns for wait in waits[rank])
            record.steps.append(Step(number, start, now, (Span("forward", start, now),), tuple(waits[rank]), used))
            if number in (4, 9, 15):
                record.samples.append(Sample(number, ((start, now),), tuple(operations[rank])))
    for share in divide(records).shares:
        assert share.communication[SYNC].waited_for == {} and sums_up(share)


@pytest.mark.parametrize("why", ["computing", "wire"])
def test_what_changes_after_the_last_sample_is_told_by_the_processor_time(why: str) -> None:
    """A pass computes twice as long from step 16 on, or stands still for 40 ms more."""
    more_ns = {(0, number): 0 for number in range(40)}
    records = data_parallel(2, 40, (4, 9, 15), buckets=1, evaluation_ns=more_ns)
    longer = [replace(record, steps=[], samples=record.samples) for record in records]
    for record, made in zip(records, longer, strict=True):
        moved = 0
        for step in record.steps:
            grown = 40 * MS if step.number > 15 else 0
            spans = tuple(
                Span(
                    each.phase,
                    each.start_ns + moved + (grown if each.phase == "optimizer" else 0),
                    each.end_ns + moved + (grown if each.phase in ("backward", "optimizer") else 0),
                )
                for each in step.spans
            )
            used = step.thread_ns + (grown if why == "computing" else 0)
            start, end = step.start_ns + moved, step.end_ns + moved + grown
            made.steps.append(step._replace(start_ns=start, end_ns=end, spans=spans, thread_ns=used))
            moved += grown
    for share in divide(longer).shares:
        grown_ns = 40 * MS * 24 / 38
        backward, wire = (40 * MS + grown_ns, 10 * MS) if why == "computing" else (40 * MS, 10 * MS + grown_ns)
        assert share.work["backward"] == pytest.approx(backward, rel=0.05)
        assert share.communication[SYNC].exposed_wire_ns == pytest.approx(wire, rel=0.2) and sums_up(share)


def test_a_wait_without_a_sample_is_for_a_rank_of_the_same_sum() -> None:
    """Two groups of two ranks: the first begins its passes 100 ms later, as another pipeline stage does, and nobody of the second
    waits for it. In step 8 rank 3 is 30 ms late for rank 2."""
    records = [Record(header(rank, 4)) for rank in range(4)]
    for number in range(12):
        at = 1000 * MS * number
        for rank, record in enumerate(records):
            late = 30 * MS if number == 8 and rank == 3 else 0
            begin = at + (300 if rank < 2 else 200) * MS + late
            last = begin - late + (30 * MS if number == 8 and rank >= 2 else 0) + 50 * MS
            spans = (Span("forward", at, begin), Span("backward", begin, last + 10 * MS))
            used = (370 if number == 8 and rank == 2 else 400) * MS
            record.steps.append(Step(number, at, at + 1000 * MS, spans, (), used))
            if number in (3, 6, 9):
                own = Operation("all_reduce", str(rank // 2), 0, begin + 50 * MS, last + 10 * MS, 1000, 2, None, SYNC)
                record.samples.append(Sample(number, ((at, begin + 50 * MS),), (own,)))
    waited = [share.communication[SYNC].waited_for for share in divide(records).shares]
    assert waited == [{}, {}, {3: pytest.approx(3 * MS)}, {}]


def test_idle_time_that_all_steps_have_is_no_wait() -> None:
    """Loading stands still for 60 ms in each step. Where rank 0 computes 40 ms more in its pass, and rank 1 as much before its
    own, neither waits for the other."""
    records = [Record(header(rank, 2)) for rank in range(2)]
    for number in range(12):
        at, more = 1000 * MS * number, 40 * MS if number % 4 == 3 else 0
        end = at + 130 * MS + more
        for rank, record in enumerate(records):
            begin = at + 80 * MS + more * rank
            spans = (
                Span("loading", at, at + 60 * MS),
                Span("forward", at + 60 * MS, begin),
                Span("backward", begin, end),
            )
            record.steps.append(Step(number, at, end, spans, (), 60 * MS + more))
            if number in (4, 6, 9):
                own = Operation("all_reduce", "0", 0, end - 10 * MS, end, 1000, 2, None, SYNC)
                record.samples.append(Sample(number, ((at + 60 * MS, end - 10 * MS),), (own,)))
    for share in divide(records).shares:
        assert share.communication[SYNC].waited_for == {}, share


def test_a_marked_wait_without_a_sample_is_for_who_came_later_than_ever() -> None:
    """A barrier is wire in sampled steps; where rank 1 comes to it 30 ms later, those are a wait for it, by whichever clock."""
    records = []
    for rank in range(2):
        record = Record(header(rank, 2, "ab"[rank]))
        for number in range(12):
            at = 1000 * MS * number
            begin = at + 10 * MS + (30 * MS if (rank, number) == (1, 8) else 0)
            end = at + (42 if number == 8 else 12) * MS
            span = Span("forward", at, at + 60 * MS)
            record.steps.append(Step(number, at, at + 100 * MS, (span,), (Wait(begin, end, "barrier", "0"),), 50 * MS))
            if number in (3, 6, 9):
                operation = Operation("barrier", "0", 0, begin, end, 0, 2)
                record.samples.append(Sample(number, ((at, begin),), (operation,)))
        records.append(shifted(record, 777 * MS) if rank else record)
    first, second = divide(records).shares
    assert sums_up(first) and sums_up(second)
    assert first.communication[OTHER].waited_for == {1: pytest.approx(3 * MS, abs=0.3 * MS)}
    assert first.communication[OTHER].exposed_wire_ns == pytest.approx(2 * MS, abs=0.3 * MS)
    assert second.communication[OTHER].waited_for == {}


def test_a_marked_wait_keeps_its_purpose_in_steps_without_a_sample() -> None:
    """Waits by operation and group: those of unsampled steps are what the sampled ones with the same name were."""
    records = []
    for rank in range(2):
        record = Record(header(rank, 2))
        for number in range(6):
            at = 1000 * MS * number
            # Rank 1 issues the tensor-parallel sum 2 ms later; the barrier of the group "9" is in unsampled steps only.
            begin = at + 10 * MS + 2 * MS * rank
            waits = [Wait(begin, at + 20 * MS, "all_reduce", "7")]
            if number == 4:
                waits.append(Wait(at + 50 * MS, at + 56 * MS, "barrier", "9"))
            record.steps.append(Step(number, at, at + 100 * MS, (Span("forward", at, at + 60 * MS),), tuple(waits)))
            if number in (2, 5):
                tensor = Operation("all_reduce", "7", 0, begin, at + 20 * MS, 10, 2, None, "tensor")
                record.samples.append(Sample(number, ((at, begin),), (tensor,)))
        records.append(record)
    first, second = divide(records).shares
    assert sums_up(first) and sums_up(second)
    assert first.communication["tensor"] == Moving(8 * MS, 2 * MS, 0, 0, 10, 1, {1: 2 * MS})
    assert second.communication["tensor"] == Moving(8 * MS, 0, 0, 0, 10, 1)
    # The barrier, 6 ms in one of four steps, is of no known purpose and told apart as the rest is.
    assert first.communication[OTHER].exposed_ns == pytest.approx(1.5 * MS)
    assert first.communication[OTHER].exposed_wait_ns == pytest.approx(0.3 * MS)
    assert first.work == pytest.approx({"forward": 48.5 * MS, OTHER: 40 * MS})


def test_a_backward_pass_in_another_thread_is_not_taken_for_a_wait() -> None:
    """CUDA: autograd runs in a thread of its own, so this one shows no operators in the whole pass, and only marks count."""
    records = data_parallel(2)
    for record in records:
        record.samples = [replace(sample, busy=(sample.busy[0], sample.busy[2])) for sample in record.samples]
    for share in divide(records).shares:
        assert share.work["backward"] == 50 * MS and share.communication[SYNC].exposed_ns == 0 and sums_up(share)
        assert share.communication[SYNC].hidden_wire_ns == pytest.approx(30 * MS)


def test_a_pipeline_waits_in_recv_and_never_in_send() -> None:
    """A receive waits until its send is issued; sends wait for nobody; pairs are matched in order, also isend with recv."""
    first, second = Record(header(0, 2)), Record(header(1, 2))
    for number in range(4):
        at = 1000 * MS * number
        sends = tuple(
            Operation(
                ("send", "isend")[k],
                "pp",
                0,
                at + 10 * MS * (k + 1),
                at + 10 * MS * (k + 1) + 3 * MS,
                8,
                2,
                1,
                "pipeline send",
            )
            for k in range(2)
        )
        receives = tuple(
            Operation(
                "recv", "pp", k, at + 5 * MS + 20 * MS * k, at + 13 * MS + 20 * MS * k, 8, 2, 0, "pipeline forward recv"
            )
            for k in range(2)
        )
        waits = tuple(Wait(each.issued_ns, each.ended_ns, "recv", "pp") for each in receives)
        first.steps.append(Step(number, at, at + 50 * MS))
        first.samples.append(Sample(number, (), sends))
        second.steps.append(Step(number, at, at + 50 * MS, (), waits))
        second.samples.append(Sample(number, (), receives))
    sender, receiver = divide([first, second]).shares
    assert sender.communication == {"pipeline send": Moving(0, 0, 6 * MS, 0, 16, 2)}
    # The first: issued at 5, sent at 10, done at 13. The second was sent at 20, before it was asked for at 25.
    assert receiver.communication == {"pipeline forward recv": Moving(11 * MS, 5 * MS, 0, 0, 16, 2, {0: 5 * MS})}
    assert receiver.work == {OTHER: 34 * MS}


def test_messages_of_a_pair_are_matched_by_their_tags() -> None:
    """The first receive is of the message that is sent last: it waits for that until 30, and the other one for nobody."""
    first, second = Record(header(0, 2)), Record(header(1, 2))
    for number in range(4):
        at = 1000 * MS * number

        def one(name: str, count: int, issued: int, ended: int, tag: int, at: int = at) -> Operation:
            return Operation(
                name, "g", count, at + issued * MS, at + ended * MS, 8, 2, int(name == "send"), OTHER, 4, tag
            )

        receives = (one("recv", 0, 5, 33, 2), one("recv", 1, 34, 36, 1))
        waits = tuple(Wait(each.issued_ns, each.ended_ns, "recv", "g") for each in receives)
        sends = (one("send", 0, 10, 36, 1), one("send", 1, 30, 33, 2))
        for record, operations, stood in ((first, sends, ()), (second, receives, waits)):
            record.steps.append(Step(number, at, at + 50 * MS, (), stood))
            record.samples.append(Sample(number, (), operations))
    _, receiver = divide([first, second]).shares
    moving = receiver.communication[OTHER]
    assert (moving.exposed_wait_ns, moving.exposed_wire_ns, moving.waited_for) == (25 * MS, 5 * MS, {0: 25 * MS})


@pytest.mark.parametrize("ends_ms", [13, 80])
def test_a_stage_that_stands_in_a_receive_waits_whatever_it_has_sent_itself(ends_ms: int) -> None:
    """The first stage of a pipeline sends its states and waits for the gradients: a bubble. What it has sent still counts as on
    its way, in gloo until the script waits for that; but its bytes have moved once the other stage has them."""
    first, second = Record(header(0, 2)), Record(header(1, 2))
    for number in range(4):
        at = 1000 * MS * number

        def one(name: str, issued: int, ended: int, peer: int, purpose: str, at: int = at) -> Operation:
            return Operation(name, "pp", 0, at + issued * MS, at + ended * MS, 8, 2, peer, f"pipeline {purpose}")

        waits = (
            Wait(at + 12 * MS, at + 60 * MS, "recv", "pp"),
            Wait(at + ends_ms * MS, at + ends_ms * MS, "send", "pp"),
        )
        first.steps.append(Step(number, at, at + 100 * MS, (), waits))
        sends = one("send", 10, ends_ms, 1, "send"), one("recv", 12, 60, 1, "backward recv")
        first.samples.append(Sample(number, (), sends))
        second.steps.append(Step(number, at, at + 100 * MS, (), (Wait(at + 5 * MS, at + 13 * MS, "recv", "pp"),)))
        receives = one("recv", 5, 13, 0, "forward recv"), one("send", 57, 60, 0, "send")
        second.samples.append(Sample(number, (), receives))
    share, other = divide([first, second]).shares
    assert share.communication == {
        "pipeline backward recv": Moving(3 * MS, 45 * MS, 0, 0, 8, 1, {1: 45 * MS}),
        "pipeline send": Moving(0, 0, 2 * MS, 0, 8, 1),
    }
    assert other.communication == {
        "pipeline forward recv": Moving(3 * MS, 5 * MS, 0, 0, 8, 1, {0: 5 * MS}),
        "pipeline send": Moving(0, 0, 3 * MS, 0, 8, 1),
    }


def test_a_wait_is_for_what_its_mark_names() -> None:
    """A rank waits for metrics that another has not issued, while both sum gradients: it waits, though bytes move."""
    records = [Record(header(rank, 2)) for rank in range(2)]
    for number in range(4):
        at = 1000 * MS * number
        for rank, issued in enumerate((20, 50)):
            operations = (
                Operation("all_reduce", "0", 0, at + 10 * MS, at + 90 * MS, 8, 2, None, SYNC),
                Operation("all_gather", "1", 0, at + issued * MS, at + 55 * MS, 8, 2, None, "tensor"),
            )
            waits = (Wait(at + issued * MS, at + 60 * MS, "all_gather", "1"),)
            records[rank].steps.append(Step(number, at, at + 100 * MS, (), waits))
            records[rank].samples.append(Sample(number, (), operations))
    first, second = divide(records).shares
    # Of the wait's last 5 ms its operation has ended: what moves then counts.
    assert first.communication["tensor"] == Moving(5 * MS, 30 * MS, 0, 0, 8, 1, {1: 30 * MS})
    assert first.communication[SYNC] == Moving(5 * MS, 0, 40 * MS, 0, 8, 1)
    assert second.communication["tensor"] == Moving(5 * MS, 0, 0, 0, 8, 1)


def test_a_broadcast_waits_for_nobody_who_came_after_its_end() -> None:
    """The root is not recorded: a rank that has its data before the last rank asks for them did not wait for that rank."""
    records = [Record(header(rank, 3)) for rank in range(3)]
    times = {0: (10, 20), 1: (5, 22), 2: (40, 45)}
    for rank, (issued, ended) in times.items():
        for number in range(3):
            at = 100 * number
            records[rank].steps.append(Step(number, at, at + 100))
            operation = Operation("broadcast", "0", 0, at + issued, at + ended, 1, 3)
            records[rank].samples.append(Sample(number, (), (operation,)))
    shares = divide(records).shares
    assert [share.communication[OTHER].hidden_wait_ns for share in shares] == [0, 5, 0]
    assert [share.communication[OTHER].hidden_wire_ns for share in shares] == [10, 12, 5]
    assert shares[1].communication[OTHER].waited_for == {0: 5}


# ------------------------------------------------------------------------------------------------------------------ phases


def timeline(step: Step) -> str:
    """A letter a tick."""
    letters = {
        "forward": "f",
        "backward": "b",
        "evaluation": "e",
        "loading": "l",
        "optimizer": "o",
        OTHER: ".",
        "clip": "c",
    }
    return "".join(letters[phase] * (end - start) for start, end, phase in phases(step))


def of_letters(*spans: tuple[str, int, int]) -> Step:
    names = {
        "f": "forward",
        "b": "backward",
        "e": "evaluation",
        "l": "loading",
        "o": "optimizer",
        "c": "clip",
        "x": "checkpoint",
    }
    return Step(0, 0, 20, tuple(Span(names[phase], start, end) for phase, start, end in spans))


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([("f", 2, 4), ("b", 6, 8), ("o", 9, 20)], "..ffffbb.ooooooooooo"),  # the loss is forward
        ([("f", 2, 4), ("f", 5, 6), ("b", 8, 9)], "..ffffffb..........."),  # a criterion is a module, too
        ([("f", 2, 4), ("l", 5, 6), ("b", 8, 9)], "..ff.l..b..........."),  # another mark lies between
        ([("f", 2, 4), ("f", 5, 6), ("o", 8, 9)], "..ff.f..o..........."),  # no backward pass comes
        ([("b", 0, 20), ("c", 5, 6)], "bbbbbcbbbbbbbbbbbbbb"),  # the innermost wins
        ([("l", 0, 2), ("e", 3, 4), ("l", 5, 7), ("e", 7, 9), ("l", 10, 11)], "eeeeeeeeeee........."),  # a validation
        (
            [("l", 0, 2), ("e", 3, 4), ("l", 5, 7), ("f", 8, 9), ("b", 9, 20)],
            "ee.e.ll.fbbbbbbbbbbb".replace("ee.e", "eeee"),
        ),
        ([("l", 0, 2), ("e", 3, 4), ("f", 5, 9), ("b", 9, 20)], "ll.e.ffffbbbbbbbbbbb"),  # a teacher without gradients
        ([("l", 0, 1), ("l", 1, 2), ("f", 2, 3), ("b", 3, 20)], "llfbbbbbbbbbbbbbbbbb"),  # an epoch ends
        ([("f", 5, 50)], ".....fffffffffffffff"),  # what is beyond the step is cut off
        ([], "...................."),
    ],
)
def test_marks_give_each_moment_a_phase(spans: list[tuple[str, int, int]], expected: str) -> None:
    """The innermost mark, what belongs to no mark, the loss, and loading for evaluation."""
    assert timeline(of_letters(*spans)) == expected


def test_an_unknown_phase_is_other() -> None:
    """A file of another tool may name what it likes: it is not lost, and nothing is made up."""
    step = Step(0, 0, 10, (Span("dancing", 0, 10),))
    assert phases(step) == [(0, 10, OTHER)]


def test_of_waits_in_each_other_the_named_one_counts() -> None:
    """A blocking all_reduce marks itself, and `Work.wait` in it without a name."""
    step = Step(0, 0, 20, (), (Wait(2, 10, "all_reduce", "0"), Wait(4, 12), Wait(15, 30)))
    assert marked_waits(step) == [(2, 10, ("all_reduce", "0")), (10, 12, ("", "")), (15, 20, ("", ""))]


# -------------------------------------------------------------------------------------------------------------- the oracle

PIECES = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)).map(lambda pair: tuple(sorted(pair))), max_size=6)


@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(PIECES, PIECES)
def test_intervals_agree_with_sets_of_ticks(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> None:
    """`innermost`, `union`, `overlaps` and `without` say of every tick what a search through all pieces says."""
    pieces = [(start, end, number) for number, (start, end) in enumerate(left)]
    flat = innermost(pieces)
    for tick in range(13):
        over = [piece for piece in pieces if piece[0] <= tick < piece[1]]
        best = [min(over, key=lambda piece: (-piece[0], piece[1], -piece[2]))[2]] if over else []
        assert [value for start, end, value in flat if start <= tick < end] == best
        other = union([(start, end, None) for start, end in right])
        in_other = any(start <= tick < end for start, end in right)
        assert [None for start, end, _ in other if start <= tick < end] == [None] * in_other
        both = [value for start, end, value, _ in overlaps(flat, other) if start <= tick < end]
        assert both == (best if in_other else [])
        assert [value for start, end, value in without(flat, other) if start <= tick < end] == (
            [] if in_other else best
        )
    assert all(start < end for start, end, _ in flat) and flat == sorted(flat)


def a_job(seed: int, steps: int = 5, length: int = 40) -> list[Record]:
    """A job of small numbers in which anything may happen: nested and overlapping marks, missing parts, no samples."""
    draw = random.Random(seed)
    world = draw.choice([1, 2, 3])
    records = [Record(header(rank, world)) for rank in range(world)]
    chance = draw.choice([0.0, 0.0, 0.2])
    for number in range(steps):
        starts = [length * number + draw.randrange(0, 4) for _ in range(world)]
        operations: list[list[Operation]] = [[] for _ in range(world)]
        is_sampled = draw.random() < 0.7
        for at in range(draw.randrange(5)):
            issues = [start + draw.randrange(0, length - 4) for start in starts]
            if draw.random() < 0.3 and world > 1:
                sender, receiver = draw.sample(range(world), 2)
                for name, rank, peer in (("send", sender, receiver), ("recv", receiver, sender)):
                    end = max(issues[rank], issues[sender]) + draw.randrange(0, 8)
                    operations[rank].append(Operation(name, f"p{at}", 0, issues[rank], end, 1, 2, peer, PURPOSES[at]))
                continue
            for rank in range(world):
                end = max(issues) + draw.randrange(0, 8)
                if draw.random() >= chance:
                    made = Operation("all_reduce", "g", at, issues[rank], end, 1, world, None, PURPOSES[at % 2])
                    operations[rank].append(made)
        for rank in range(world):
            start, end = starts[rank], length * (number + 1) + draw.randrange(0, 4)

            def some(start: int = start, end: int = end) -> tuple[int, int]:
                first, second = sorted(draw.randrange(start - 2, end + 2) for _ in range(2))
                return max(first, 0), max(second, 0)

            spans = tuple(Span(draw.choice(PHASES[:9]), *some()) for _ in range(draw.randrange(6)))
            waits = tuple(
                Wait(*some(), *draw.choice([("", ""), ("all_reduce", "g"), ("recv", "p1")]))
                for _ in range(draw.randrange(3))
            )
            records[rank].steps.append(Step(number, start, end, spans, waits))
            if is_sampled and draw.random() > chance:
                busy = tuple((a, b) for a, b, _ in union([(*some(), None) for _ in range(5)]))
                records[rank].samples.append(Sample(number, busy, tuple(operations[rank])))
    return records


def slowly(records: list[Record], rank: int) -> tuple[dict[str, float], dict[tuple[str, str, str], float]]:
    """Work by phase, and communication by purpose, exposed or hidden, and wire, wait or unknown: summed over the counted steps of
    a rank, all of which are sampled; tick by tick, from the definitions."""
    work: dict[str, float] = {}
    moved: dict[tuple[str, str, str], float] = {}
    of_rank = {record.header.rank: record for record in records}
    record = of_rank[rank]
    before: list[tuple[Operation, int]] = []
    for step in record.steps[2:]:
        sample = next(sample for sample in record.samples if sample.step == step.number)
        own = [(operation, step.number) for operation in sample.operations]
        operations = [each for each in before if each[0].ended_ns > step.start_ns] + own
        before = own
        state = {}
        for tick in range(step.start_ns, step.end_ns):
            state[tick] = min(
                (_state(records, record, operation, number, tick) for operation, number in operations),
                default=(3, (), ""),
            )
        in_wait = {tick: any(wait.start_ns <= tick < wait.end_ns for wait in step.waits) for tick in state}
        # A thread in a marked wait waits for what the mark names.
        named = {}
        for start, end, key in marked_waits(step):
            for tick in range(start, end):
                found = [
                    _state(records, record, one, at, tick) for one, at in operations if (one.name, one.group) == key
                ]
                named[tick] = min([each for each in found if each[0] < 3], default=state[tick])
        in_backward = {
            tick: any(span.phase == "backward" and span.start_ns <= tick < span.end_ns for span in step.spans)
            for tick in state
        }
        is_busy = {tick: any(start <= tick < end for start, end in sample.busy) for tick in state}
        # In a pass in which this thread ran no operator at all, nothing can be said.
        is_idle = {
            tick: in_backward[tick] and not is_busy[tick] and any(is_busy[other] for other in around(in_backward, tick))
            for tick in state
        }
        still = {tick: is_idle[tick] and not in_wait[tick] and state[tick][0] < 3 for tick in state}
        long = [tick for tick in state if still[tick] and len(around(still, tick)) >= module.GAP_NS]
        # What is idle after that has not got its processor yet.
        awaking = {tick + more for tick in long for more in range(module.WAKE_NS + 1)}
        for tick in state:
            is_blocked = in_wait[tick] or (is_idle[tick] and tick in awaking)
            what = named.get(tick, state[tick])
            kind = ("wire", "wait", "unknown", "unknown")[what[0] if is_blocked else state[tick][0]]
            if is_blocked:
                key = ("exposed", kind, what[2] if what[0] < 3 else "?")
                moved[key] = moved.get(key, 0) + 1
            else:
                phase = next(phase for start, end, phase in phases(step) if start <= tick < end)
                work[phase] = work.get(phase, 0) + 1
                if state[tick][0] < 3:
                    moved["hidden", kind, state[tick][2]] = moved.get(("hidden", kind, state[tick][2]), 0) + 1
    return work, moved


def _whole_pass(record: Record, number: int, span: Span) -> int:
    """The end of a backward pass with those that begin within it, or where it ends."""
    end, [step] = span.end_ns, [step for step in record.steps if step.number == number]
    for _ in step.spans:
        inner = [
            each.end_ns for each in step.spans if each.phase == "backward" and span.start_ns <= each.start_ns <= end
        ]
        end = max(end, *inner)
    return min(end, step.end_ns)


def around(is_true: dict[int, bool], tick: int) -> range:
    """The ticks around one for which it is true without a gap."""
    first = last = tick
    while is_true.get(first - 1):
        first -= 1
    while is_true.get(last + 1):
        last += 1
    return range(first, last + 1)


def _state(
    records: list[Record], record: Record, operation: Operation, number: int, tick: int
) -> tuple[int, tuple[int, int, str] | tuple[()], str]:
    """What an operation of a record is at a moment: 0 wire, 1 wait, 2 without partners, 3 nothing; its age; its purpose."""
    purpose = operation.purpose
    age = (operation.issued_ns, operation.ended_ns, operation.name)
    if not operation.issued_ns <= tick < operation.ended_ns:
        return 3, (), ""
    if operation.name == "send" or operation.name == "recv":
        wanted = "recv" if operation.name == "send" else "send"
        partners = [
            other
            for record in records
            for sample in record.samples
            if sample.step == number
            for other in sample.operations
            if other.name == wanted and other.group == operation.group
        ]
        if not partners:
            return 2, age, purpose
        # Bytes have moved when they are there.
        if operation.name == "send" and tick >= partners[0].ended_ns:
            return 3, (), ""
        is_wait = operation.name == "recv" and tick < partners[0].issued_ns
        return int(is_wait), age, purpose
    partners = [
        other.issued_ns
        for record in records
        for sample in record.samples
        if sample.step == number
        for other in sample.operations
        if (other.name, other.group, other.number) == (operation.name, operation.group, operation.number)
    ]
    if len(partners) < operation.ranks:
        return 2, age, purpose
    # DDP has waited for its sums by the end of the pass.
    for span in (span for step in record.steps if step.number == number for span in step.spans):
        is_pass = span.phase == "backward" and purpose == SYNC
        if is_pass and span.start_ns <= operation.issued_ns < span.end_ns:
            end = _whole_pass(record, number, span)
            if end <= tick and operation.ended_ns - end <= turns.LOCK_NS:
                return 3, (), ""
    return int(tick < max(partners)), age, purpose


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_the_division_agrees_with_an_oracle_that_looks_at_every_tick(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On random small jobs the phases, what is exposed and what is hidden are those that a search tick by tick finds."""
    monkeypatch.setattr(module, "GAP_NS", 3)
    monkeypatch.setattr(module, "WAKE_NS", 2)
    monkeypatch.setattr(turns, "LOCK_NS", 3)
    compared = 0
    for seed in range(first, first + 50):
        records = a_job(seed)
        for share in divide(records).shares:
            if share.sampled < share.steps:
                continue
            compared += 1
            work, moved = slowly(records, share.rank)
            told = {phase: ns * share.steps for phase, ns in share.work.items()}
            assert told == pytest.approx(work), f"seed {seed}"
            for side in ("exposed", "hidden"):
                unknown = sum(ns for key, ns in moved.items() if key[:2] == (side, "unknown"))
                for kind in ("wire", "wait"):
                    known = sum(ns for key, ns in moved.items() if key[:2] == (side, kind))
                    shown = share.steps * sum(getattr(m, f"{side}_{kind}_ns") for m in share.communication.values())
                    assert known - 1e-6 <= shown <= known + unknown + 1e-6, f"seed {seed}"
                    if not unknown:
                        for purpose in PURPOSES:
                            at_purpose = share.communication.get(purpose, Moving())
                            shown = share.steps * getattr(at_purpose, f"{side}_{kind}_ns")
                            assert shown == pytest.approx(moved.get((side, kind, purpose), 0)), f"seed {seed}"
    assert compared > 20


def held_up_at_random(records: list[Record], seed: int) -> None:
    """As torch's profiler starts and stops, in any step; and with processor time, of which some threads use little."""
    draw = random.Random(f"profiler {seed}")
    for record in records:
        for at, step in enumerate(record.steps):
            length = step.end_ns - step.start_ns
            spans = step.spans
            if draw.random() < 0.4:
                spans += (Span("profiler", step.start_ns, step.start_ns + draw.randrange(0, length + 1)),)
            record.steps[at] = step._replace(spans=spans, thread_ns=draw.randrange(0, length + 1))


def stretched(record: Record, by: int) -> Record:
    """All times so many times as long."""

    def longer(each: Any) -> Any:
        times = {name: getattr(each, name) * by for name in each._fields if name.endswith("_ns")}
        return each._replace(**times)

    def operation(each: Operation) -> Operation:
        return replace(each, issued_ns=each.issued_ns * by, ended_ns=each.ended_ns * by)

    steps = [
        longer(step)._replace(spans=tuple(map(longer, step.spans)), waits=tuple(map(longer, step.waits)))
        for step in record.steps
    ]
    samples = [
        replace(
            sample,
            busy=tuple((start * by, end * by) for start, end in sample.busy),
            operations=tuple(map(operation, sample.operations)),
        )
        for sample in record.samples
    ]
    return Record(record.header, steps, samples)


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(st.integers(0, 10**9), st.booleans())
def test_work_and_exposed_are_the_step_whatever_was_recorded(seed: int, is_held_up: bool) -> None:
    """The sum holds with samples of some steps, of none and of some ranks; no part is negative; waits name who was waited for;
    the order of the records does not matter."""
    records = a_job(seed)
    if is_held_up:
        held_up_at_random(records, seed)
    if seed % 2:  # gaps and lateness count from 0.1 ms on
        records = [stretched(record, MS) for record in records]
    breakdown = divide(records)
    random.Random(seed).shuffle(records)
    assert divide(records) == breakdown
    for one in each_step(records):
        assert sum(one.work.values()) + one.exposed_ns == pytest.approx(one.step_ns)
        assert all(value >= 0 for value in one.work.values())
        if one.moving is not None:
            assert one.moving.exposed_ns == pytest.approx(one.exposed_ns) and min(parts(one.moving)) >= 0
    for share in breakdown.shares:
        assert sums_up(share)
        assert all(value >= 0 for value in share.work.values())
        for moving in share.communication.values():
            times = (moving.exposed_wire_ns, moving.exposed_wait_ns, moving.hidden_wire_ns, moving.hidden_wait_ns)
            assert min(times) >= 0
            assert sum(moving.waited_for.values()) == pytest.approx(moving.exposed_wait_ns + moving.hidden_wait_ns)
            assert share.rank not in moving.waited_for


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(st.integers(0, 10**9), st.integers(-(10**12), 10**15))
def test_another_zero_of_a_hosts_clock_changes_nothing(seed: int, by_ns: int) -> None:
    """A host that was booted earlier shows more on its monotonic clock: breakdown and shares stay as they are."""
    records = data_parallel(3, hosts=["a", "b"], late_ns={seed % 3: seed % 9_000_000})
    by_ns = max(by_ns, 0)
    moved = [shifted(record, by_ns) if record.header.host == "b" else record for record in records]
    one, other = divide(records), divide(moved)
    assert one.shares == other.shares and one.problems == other.problems
    assert other.offsets_ns["b"][0] == pytest.approx(one.offsets_ns["b"][0] - by_ns, abs=1)


# ------------------------------------------------------------------------------------------------------ unusual records


def test_a_script_that_never_steps_is_one_step() -> None:
    """One step, no marks: all of it is other, and the breakdown says that it is only one."""
    record = Record(header(0, 1), [Step(0, 5, 105)])
    breakdown = divide([record])
    (share,) = breakdown.shares
    assert (share.steps, share.sampled, share.work, share.communication) == (1, 0, {OTHER: 100}, {})
    assert any("1 step only" in problem for problem in breakdown.problems)


def test_of_two_steps_the_last_counts() -> None:
    """The first has connections and compilation in it."""
    (share,) = divide([Record(header(0, 1), [Step(0, 0, 900), Step(1, 900, 1000)])]).shares
    assert (share.steps, share.step_ns) == (1, 100)


def test_an_unknown_operation_waits_at_most_until_its_end() -> None:
    """If it ends before the last rank begins it, which may be right for all that its name says, it has waited until then."""
    records = [Record(header(rank, 2)) for rank in range(2)]
    for number in range(3):
        for rank, (issued, ended) in enumerate([(10, 20), (40, 45)]):
            records[rank].steps.append(Step(number, 100 * number, 100 * number + 100))
            operation = Operation("coalesced", "0", 0, 100 * number + issued, 100 * number + ended, 1, 2)
            records[rank].samples.append(Sample(number, (), (operation,)))
    shares = divide(records).shares
    assert [share.communication[OTHER].hidden_wait_ns for share in shares] == [10, 0]
    assert [share.communication[OTHER].hidden_wire_ns for share in shares] == [0, 5]


def test_no_records_and_no_steps_are_said() -> None:
    """Nothing to divide is a breakdown with problems, no exception."""
    assert divide([]).shares == () and divide([]).problems
    empty = divide([Record(header(0, 2)), Record(header(1, 2), [Step(0, 0, 10)])])
    assert [share.rank for share in empty.shares] == [1]
    assert any("rank 0 recorded no whole step" in problem for problem in empty.problems)


def test_without_samples_exposed_time_is_wire_and_the_breakdown_says_so() -> None:
    """Marks alone do not tell wire from wait."""
    records = [
        Record(header(0, 1), [Step(n, n * 100, n * 100 + 100, (), (Wait(n * 100, n * 100 + 30),)) for n in range(5)])
    ]
    breakdown = divide(records)
    assert breakdown.shares[0].communication == {OTHER: Moving(exposed_wire_ns=30)}
    assert any("no sampled step" in problem for problem in breakdown.problems)


def test_a_rank_that_died_early_leaves_operations_without_partners() -> None:
    """The others' later operations are counted apart; they are told apart as those before, and not all taken for wire."""
    records = data_parallel(2, steps=12, sampled=(3, 6, 9), late_ns={1: 7 * MS})
    records[1].steps = [step for step in records[1].steps if step.number < 5]
    records[1].samples = [sample for sample in records[1].samples if sample.step < 5]
    breakdown = divide(records)
    alive, dead = breakdown.shares
    assert (alive.steps, dead.steps) == (10, 3) and sums_up(alive) and sums_up(dead)
    assert any("6 of 9 sampled operations of rank 0 have no partners" in problem for problem in breakdown.problems)
    assert any("rank 1 recorded 5 steps, others 12" in problem for problem in breakdown.problems)
    moving = alive.communication[SYNC]
    assert moving.exposed_wait_ns == pytest.approx(10 / 3 * MS, abs=2)
    assert moving.exposed_ns == pytest.approx(17 * MS)


def test_what_cannot_be_told_apart_is_split_as_its_own_purpose_is() -> None:
    """Tensor-parallel sums wait for 1 of 10 ms, gradients for 8 of 10. One more of each lacks its partner and is split like
    those of its purpose; an expert's exchange without any example is split like all that is known."""
    records = [Record(header(rank, 2)) for rank in range(2)]
    for rank in range(2):
        for number in range(3):
            at = 1000 * MS * number
            operations = [
                Operation("all_reduce", "t", 0, at + 1 * MS * rank, at + 10 * MS, 1, 2, None, "tensor"),
                Operation("all_reduce", "d", 0, at + 20 * MS + 8 * MS * rank, at + 30 * MS, 1, 2, None, SYNC),
            ]
            if rank == 0:
                operations += [
                    Operation("all_reduce", "t", 1, at + 40 * MS, at + 50 * MS, 1, 2, None, "tensor"),
                    Operation("all_reduce", "d", 1, at + 60 * MS, at + 70 * MS, 1, 2, None, SYNC),
                    Operation("all_to_all", "e", 0, at + 80 * MS, at + 90 * MS, 1, 2, None, "expert"),
                ]
            records[rank].steps.append(Step(number, at, at + 100 * MS))
            records[rank].samples.append(Sample(number, (), tuple(operations)))
    moved = divide(records).shares[0].communication
    assert moved["tensor"].hidden_wait_ns == pytest.approx(2 * MS)
    assert moved[SYNC].hidden_wait_ns == pytest.approx(16 * MS)
    assert moved["expert"].hidden_wait_ns == pytest.approx(4.5 * MS)
    assert moved["expert"].waited_for == {1: pytest.approx(4.5 * MS)}


def test_one_record_of_a_larger_job_is_divided_and_said_to_be_one() -> None:
    """Its phases and exposed time stand; wire and wait do not."""
    breakdown = divide(data_parallel(4)[2:3])
    (share,) = breakdown.shares
    assert share.rank == 2 and sums_up(share) and share.communication[SYNC].exposed_ns == pytest.approx(10 * MS)
    assert any("1 of 4 ranks has a record" in problem for problem in breakdown.problems)
    assert any("9 of 9" in problem for problem in breakdown.problems)


def test_ranks_that_count_steps_differently_are_found() -> None:
    """An all-reduce that ends before another rank begins it is not the same one: no wait is made of it."""
    records = data_parallel(2, sampled=range(12))
    records[1].steps = [step._replace(number=step.number - 1) for step in records[1].steps[1:]]
    records[1].samples = [replace(sample, step=sample.step - 1) for sample in records[1].samples[1:]]
    breakdown = divide(records)
    assert any("ended before another rank began them" in problem for problem in breakdown.problems)
    assert breakdown.shares[0].communication[SYNC].exposed_wait_ns < 10 * MS


def test_a_long_step_counts_and_is_named() -> None:
    """A checkpoint of a minute is real time: it is in the mean and in the problems; the first steps are neither."""
    record = Record(header(0, 1))
    for number in range(50):
        end = number * 10**6 + (10 * 10**6 if number == 1 else 10**6)
        record.steps.append(Step(number, number * 10**6, end))
    record.steps[30] = record.steps[30]._replace(end_ns=record.steps[30].start_ns + 60 * 10**6)
    breakdown = divide([record])
    (share,) = breakdown.shares
    assert share.steps == 48 and share.step_ns == pytest.approx((47 + 60) * 10**6 / 48)
    assert any("step 30" in problem and "1 of 48" in problem for problem in breakdown.problems)


@pytest.mark.parametrize("does_wait", [True, False])
def test_a_step_that_another_ranks_profiler_makes_long_is_not_a_long_one(does_wait: bool) -> None:
    """Rank 1 waits for rank 0, whose profiler takes 600 ms in step 7. Where it does not wait, its step is as long as it is."""
    records = [Record(header(rank, 2)) for rank in range(2)]
    now = 0
    for number in range(20):
        held_ns = 600 * MS if number == 7 else 0
        spans = (Span("profiler", now, now + held_ns),) if held_ns else ()
        records[0].steps.append(Step(number, now, now + held_ns + 78 * MS, spans))
        records[1].steps.append(Step(number, now, now + held_ns * does_wait + 78 * MS))
        now += held_ns + 78 * MS
    assert all(set(own) == {(number, 78 * MS) for number in range(2, 20)} for own in lengths(records).values())
    assert not any("times the median" in problem for problem in divide(records).problems)


def test_a_step_that_the_profiler_makes_long_is_not_a_long_one() -> None:
    """In short steps a sample takes longer than a step, and is in no figure: a user has nothing to look for."""
    record = Record(header(0, 1))
    for number in range(50):
        record.steps.append(Step(number, number * 10**6, (number + 1) * 10**6))
    start_ns = record.steps[30].start_ns
    spans = [Span("profiler", start_ns + 10**5, start_ns + 59 * 10**6)]
    record.steps[30] = record.steps[30]._replace(end_ns=start_ns + 60 * 10**6, spans=spans)
    breakdown = divide([record])
    assert breakdown.shares[0].work["profiler"] == pytest.approx(58.9 * 10**6 / 48)
    assert not any("times the median" in problem for problem in breakdown.problems)


def test_an_operation_that_runs_into_the_next_step_is_seen_there_if_that_is_sampled() -> None:
    """Deferred gradients: what was issued in step 3 is hidden in step 4. Without a sample of step 4, the breakdown says so."""
    for sampled, hidden in (((3, 4), 40.0), ((3,), 20.0)):
        record = Record(header(0, 1), [Step(number, number * 100, number * 100 + 100) for number in range(5)])
        for number in sampled:
            issued = number * 100 + 80
            operations = (Operation("all_reduce", "0", 0, issued, issued + 60, 1, 1),) if number == 3 else ()
            record.samples.append(Sample(number, ((0, 1),), operations))
        breakdown = divide([record])
        assert breakdown.shares[0].communication[OTHER].hidden_wire_ns * len(sampled) == (
            60 if 4 in sampled else hidden
        )
        assert any("run on" in problem for problem in breakdown.problems) == (4 not in sampled)


def test_two_records_of_a_rank_and_a_step_twice() -> None:
    """A rank that was started again has two files: the one with more steps counts, whatever their order."""
    long, short = data_parallel(1)[0], data_parallel(1, steps=4)[0]
    long.steps.append(long.steps[-1])
    breakdown = divide([short, long])
    assert breakdown.shares == divide([long, short]).shares and breakdown.shares[0].steps == 10
    assert any("several records" in problem for problem in breakdown.problems)
    assert any("twice" in problem for problem in breakdown.problems)


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(st.integers(0, 10**9))
def test_no_record_that_can_be_read_makes_it_fail(seed: int) -> None:
    """Whatever a file may hold: times of any size, names and peers that do not exist, parts out of order and twice, several
    hosts. Nothing is raised, and the sum holds."""
    for share in divide(wild(seed)).shares:
        assert sums_up(share)
    for one in each_step(wild(seed)):
        assert sum(one.work.values()) + one.exposed_ns == pytest.approx(one.step_ns)


def test_two_jobs_in_one_folder_are_told() -> None:
    """Ranks that were started by different launchers at the same time do not belong together."""
    records = data_parallel(2)
    for record, job in zip(records, ("a:29500", "b:29501"), strict=True):
        record.header.about["job"] = job
    assert any("of several jobs" in text for text in divide(records).problems)
    records[1].header.about["job"] = "a:29500"
    assert not any("of several jobs" in text for text in divide(records).problems)
