"""Clocks of several hosts on one axis: the true offset lies within the stated error, whatever hosts, drifts and latencies are."""

from __future__ import annotations

import random

import hypothesis
import pytest
from hypothesis import strategies as st

from penstock.profiling.clocks import DRIFT, TOLERANCE_NS, WALL_ERROR_NS, Clock, clocks
from penstock.profiling.divide import divide
from penstock.profiling.matching import Kind, by_rank, kind, meetings
from penstock.profiling.record import Operation, Record, Sample, Step
from profiles import data_parallel, header, shifted

US = 1_000
MS = 1_000_000
SECOND = 1_000_000_000


class Job:
    """A job on hosts whose clocks show ``zero + (1 + drift) * true time``."""

    def __init__(self, hosts: list[str], zeros: list[int], drifts: list[float], wall_errors: list[int]) -> None:
        self.zeros, self.drifts, self.hosts = zeros, drifts, hosts
        self.records = [
            Record(header(rank, len(hosts), host, self.reads(rank, 0), 10**18 + wall_errors[rank]))
            for rank, host in enumerate(hosts)
        ]
        self.operations: list[dict[int, list[Operation]]] = [{} for _ in hosts]

    def reads(self, rank: int, true_ns: int) -> int:
        """What the rank's clock shows."""
        return self.zeros[rank] + true_ns + round(self.drifts[rank] * true_ns)

    def operate(
        self,
        step: int,
        name: str,
        group: str,
        issued: dict[int, int],
        ended: dict[int, int],
        peers: dict[int, int] | None = None,
    ) -> None:
        """One operation, with its true times by rank."""
        for rank, start in issued.items():
            mine = self.operations[rank].setdefault(step, [])
            peer = (peers or {}).get(rank)
            number = sum((each.name, each.group, each.peer) == (name, group, peer) for each in mine)
            times = self.reads(rank, start), self.reads(rank, ended[rank])
            ranks = 2 if peers else len(issued)
            mine.append(Operation(name, group, number, *times, 8, ranks, peer))

    def done(self) -> list[Record]:
        for record, by_step in zip(self.records, self.operations, strict=True):
            for step, operations in by_step.items():
                least, most = min(op.issued_ns for op in operations), max(op.ended_ns for op in operations)
                record.steps.append(Step(step, least, most))
                record.samples.append(Sample(step, (), tuple(operations)))
        return self.records

    def true_offset(self, rank: int, true_ns: int) -> int:
        return self.reads(0, true_ns) - self.reads(rank, true_ns)


def offsets(records: list[Record]) -> dict[str, tuple[float, float]]:
    """By host: what to add to its clock, and how wrong that may be in any sampled step."""
    ranks, _ = by_rank(records)
    return {host: clock.offset for host, clock in clocks(ranks, meetings(ranks))[0].items()}


def assert_within(job: Job, records: list[Record], moments: list[int]) -> dict[str, Clock]:
    """At these true times every rank's clock is as near to rank 0's as it says."""
    found, _ = clocks(records, meetings(records))
    at_once = offsets(records)
    for rank, host in enumerate(job.hosts[: len(records)]):
        for moment in moments:
            here = job.reads(rank, moment)
            assert abs(found[host].on_first(here) - job.reads(0, moment)) <= found[host].wrong_ns(here) + 2
            add, wrong = at_once[host]
            away = min(abs(here - knot[0]) for knot in found[host].knots)
            assert abs(add - job.true_offset(rank, moment)) <= wrong + 2 * DRIFT * away + 2
    return found


@hypothesis.settings(max_examples=120, deadline=None)
@hypothesis.given(st.integers(0, 10**9))
def test_the_true_offset_lies_within_the_stated_error(seed: int) -> None:
    """Random hosts, zeros up to weeks apart, drifts up to the limit, wall clocks wrong by seconds, latencies that differ each
    way, collectives and sends of random subsets: at all sampled moments and between them the error is as stated."""
    draw = random.Random(seed)
    count = draw.randrange(2, 6)
    hosts = ["h0"] + [f"h{draw.randrange(count)}" for _ in range(count - 1)]
    zero = {host: draw.randrange(10**15) for host in hosts}
    # Relative to the first host's, which stands still.
    drift = {host: draw.uniform(-DRIFT, DRIFT) * 0.99 if host != "h0" else 0.0 for host in hosts}
    wall = {host: draw.choice([0, 3 * MS, -40 * MS, 5 * SECOND]) for host in hosts}
    job = Job(hosts, [zero[h] for h in hosts], [drift[h] for h in hosts], [wall[h] for h in hosts])
    moments = []
    for step in range(0, 40, draw.choice([5, 11, 40])):
        now = step * draw.choice([SECOND // 10, 10 * SECOND]) + SECOND
        for _ in range(draw.randrange(1, 8)):
            moments.append(now)
            if draw.random() < 0.3:
                sender, receiver = draw.sample(range(count), 2)
                asked, issued = now + draw.randrange(MS), now + draw.randrange(MS)
                arrived = max(asked, issued + draw.randrange(US, MS))
                job.operate(step, "send", "p", {sender: issued}, {sender: issued + US}, {sender: receiver})
                job.operate(step, "recv", "p", {receiver: asked}, {receiver: arrived}, {receiver: sender})
            else:
                some = list(range(count)) if draw.random() < 0.5 else draw.sample(range(count), 2)
                issues = {rank: now + draw.randrange(draw.choice([20 * US, 5 * MS])) for rank in some}
                last = max(issues.values())
                ends = {rank: last + draw.randrange(US, draw.choice([50 * US, 3 * MS])) for rank in some}
                name = draw.choice(["all_reduce", "barrier", "gloo:all_gather", "_reduce_scatter_base", "all_to_all"])
                job.operate(step, name, f"{sorted(some)}", issues, ends)
            now += draw.randrange(10 * MS)
    hypothesis.assume(all(job.operations))
    records = job.done()
    if all(abs(error) < WALL_ERROR_NS for error in wall.values()):
        assert_within(job, records, [*moments, (moments[0] + moments[-1]) // 2])
    else:
        # Where only the wall clock speaks and is wrong by more than the guess, nothing can help; elsewhere it does not matter.
        found, problems = clocks(records, meetings(records))
        if not problems:
            assert_within(job, records, moments)
        assert set(found) == set(hosts)


def test_the_error_is_half_a_round_trip() -> None:
    """Two hosts, latency 50 us there and 30 back: all-reduces in which each once is last bound the offset to half of 80 us."""
    job = Job(["a", "b"], [7 * SECOND, 99 * SECOND], [0, 0], [0, 123 * MS])
    for number in range(20):
        at = SECOND + number * MS
        first = {0: at, 1: at + 300 * US} if number % 2 else {0: at + 300 * US, 1: at}
        last = at + 300 * US
        ends = {0: last + (30 * US if number % 2 else 1 * US), 1: last + (1 * US if number % 2 else 50 * US)}
        job.operate(3, "all_reduce", "0", first, ends)
    records = job.done()
    add, wrong = offsets(records)["b"]
    assert offsets(records)["a"] == (0, 0)
    assert wrong <= 40 * US + 3 * US  # and the drift over 20 ms
    assert abs(add + 92 * SECOND) <= wrong


def test_ranks_of_a_host_have_its_clock() -> None:
    """Same host, same clock: exactly zero, although the ranks noted the wall time at different moments."""
    records = data_parallel(3)
    records[2].header = header(2, 3, "a", 5, 99)
    assert offsets(records) == {"a": (0, 0)}
    assert offsets([]) == {}


def test_hosts_that_share_no_operation_are_bound_over_others() -> None:
    """Ranks 0-1, 1-2 and 2-3 of four hosts: the offset of the last is known with the sum of the errors between."""
    job = Job(["a", "b", "c", "d"], [0, 5 * SECOND, 70 * SECOND, 3 * SECOND], [0] * 4, [0] * 4)
    for number in range(6):
        for left in range(3):
            at = SECOND + number * MS
            issues = {left: at + (number % 2) * 100 * US, left + 1: at + ((number + 1) % 2) * 100 * US}
            job.operate(0, "barrier", str(left), issues, dict.fromkeys(issues, at + 120 * US))
    records = job.done()
    found = assert_within(job, records, [SECOND + number * MS for number in range(6)])
    assert 0.8 * 60 * US < found["d"].precision_ns < 1.1 * 60 * US


def test_a_missing_record_takes_no_bounds_from_the_others() -> None:
    """Rank 2 of three left no record: the operations of the other two still bound their clocks. A send without its receive, and
    operations that a rank has twice, bind nothing."""
    job = Job(["a", "b", "c"], [0, SECOND, 0], [0] * 3, [0] * 3)
    for number in range(4):
        at = SECOND + number * MS
        issues = {0: at + (number % 2) * 100 * US, 1: at + ((number + 1) % 2) * 100 * US, 2: at}
        job.operate(0, "all_reduce", "0", issues, dict.fromkeys(issues, at + 120 * US))
    job.operate(0, "send", "p", {0: 5 * SECOND}, {0: 6 * SECOND}, {0: 1})
    records = job.done()[:2]
    assert clocks(records, meetings(records))[1] == []
    assert assert_within(job, records, [SECOND])["b"].precision_ns < 70 * US
    for record in records:
        record.samples.append(record.samples[0])
    assert any("wall clocks" in problem for problem in clocks(records, meetings(records))[1])


def test_a_send_bounds_one_side_only() -> None:
    """With sends in one direction only the wall clock decides between what they allow, and that is said."""
    job = Job(["a", "b"], [0, 50 * SECOND], [0, 0], [0, 20 * MS])
    job.operate(0, "send", "p", {0: SECOND}, {0: SECOND + US}, {0: 1})
    job.operate(0, "recv", "p", {1: SECOND - MS}, {1: SECOND + 100 * US}, {1: 0})
    records = job.done()
    found, problems = clocks(records, meetings(records))
    assert any("wall clocks are taken" in problem for problem in problems)
    assert found["b"].precision_ns >= WALL_ERROR_NS
    assert_within(job, records, [SECOND])
    # A receive cannot end before its send: what the wall clock says must not contradict that.
    assert found["b"].on_first(job.reads(1, SECOND + 100 * US)) >= job.reads(0, SECOND)
    # With one in the other direction both sides are bound.
    job.operate(0, "send", "p", {1: SECOND + MS}, {1: SECOND + MS + US}, {1: 0})
    job.operate(0, "recv", "p", {0: SECOND}, {0: SECOND + MS + 100 * US}, {0: 1})
    for record in records:
        record.steps.clear()
        record.samples.clear()
    found, problems = clocks(job.done(), meetings(records))
    assert not problems and found["b"].precision_ns <= 101 * US


def test_rooted_collectives_bound_nothing() -> None:
    """The root of a broadcast is not recorded, and a leaf's issue bounds nobody."""
    job = Job(["a", "b"], [0, SECOND], [0, 0], [0, 0])
    job.operate(0, "broadcast", "0", {0: SECOND, 1: 9 * SECOND}, {0: SECOND + US, 1: 9 * SECOND + US})
    assert any("wall clocks" in problem for problem in clocks(job.done(), meetings(job.records))[1])


def test_an_all_to_all_counts_only_where_nothing_else_does() -> None:
    """Two ranks may have nothing for each other in an all_to_all: that one ends before the other begins spoils no bound."""
    job = Job(["a", "b"], [0, SECOND], [0, 0], [0, 0])
    for number in range(4):
        at = SECOND + number * MS
        issues = {0: at + (number % 2) * 100 * US, 1: at + ((number + 1) % 2) * 100 * US}
        job.operate(0, "all_reduce", "0", issues, {0: at + 120 * US, 1: at + 120 * US})
    job.operate(0, "all_to_all", "0", {0: SECOND, 1: 2 * SECOND}, {0: SECOND + US, 1: 2 * SECOND + US})
    records = job.done()
    assert clocks(records, meetings(records))[1] == []
    assert_within(job, records, [SECOND])


@pytest.mark.parametrize("drift", [-9e-5, 2e-5, 9e-5])
def test_drift_over_a_long_run_is_followed(drift: float) -> None:
    """Two hours of samples every minute: times on one axis stay right within what a window allows; one offset for all says how
    far it can be off."""
    job = Job(["a", "b"], [0, SECOND], [0.0, drift], [0, 0])
    moments = []
    for minute in range(120):
        for number in range(4):
            at = SECOND + minute * 60 * SECOND + number * MS
            moments.append(at)
            issues = {0: at + (number % 2) * 100 * US, 1: at + ((number + 1) % 2) * 100 * US}
            job.operate(minute, "all_reduce", "0", issues, {0: at + 120 * US, 1: at + 120 * US})
    found = assert_within(job, job.done(), moments)
    assert found["b"].precision_ns < 25 * US
    _, wrong = found["b"].offset
    assert wrong == pytest.approx(abs(drift) * 3600 * SECOND, rel=0.05)
    # Order survives the change of clock.
    seen = [found["b"].on_first(job.reads(1, SECOND * second)) for second in range(0, 7200, 7)]
    assert seen == sorted(seen)


@pytest.mark.parametrize("drift", [-9e-5, 9e-5])
def test_a_long_step_is_not_contradicted_by_drift(drift: float) -> None:
    """A step of 20 s, in which clocks drift apart by 2 ms: its operations bound the middle with what they can have drifted."""
    job = Job(["a", "b"], [0, SECOND], [0.0, drift], [0, 0])
    moments = []
    for number in range(9):
        at = SECOND + number * 2500 * MS
        moments.append(at)
        issues = {0: at + (number % 2) * 100 * US, 1: at + ((number + 1) % 2) * 100 * US}
        job.operate(0, "all_reduce", "0", issues, {0: at + 120 * US, 1: at + 120 * US})
    records = job.done()
    assert clocks(records, meetings(records))[1] == []
    # The nearest operation in which the other host is last is 2.5 s from the middle.
    assert assert_within(job, records, moments)["b"].precision_ns < 60 * US + 2500 * MS * DRIFT


def test_a_precise_step_helps_those_before_and_after() -> None:
    """Of three samples the middle one has operations that bound well: the others are as precise, but for the drift between."""
    job = Job(["a", "b"], [0, SECOND], [0.0, 0.0], [0, 0])
    for step in range(3):
        for number in range(4):
            at = SECOND + step * 10 * MS + number * MS
            late = 100 * US if step == 1 else 400 * US
            issues = {0: at + (number % 2) * late, 1: at + ((number + 1) % 2) * late}
            job.operate(
                step, "all_reduce", "0", issues, dict.fromkeys(issues, at + late + (20 * US if step == 1 else 200 * US))
            )
    found = assert_within(job, job.done(), [SECOND + step * 10 * MS for step in range(3)])
    assert [round(knot[2] / US) for knot in found["b"].knots] == pytest.approx([21, 20, 21], abs=1)


@pytest.mark.parametrize("jump", [5 * MS, -80 * MS, 3 * SECOND])
def test_a_clock_that_jumps_is_said_and_costs_its_jump(jump: int) -> None:
    """A virtual machine was stopped between two samples, or within one: the breakdown says so, and the error covers both."""
    for within in (False, True):
        job = Job(["a", "b"], [0, 10 * SECOND], [0.0, 0.0], [0, 0])
        for step in range(4):
            for number in range(4):
                if step == 2 and number == (2 if within else 0):
                    job.zeros[1] += jump
                at = SECOND + step * SECOND + number * MS
                issues = {0: at + (number % 2) * 100 * US, 1: at + ((number + 1) % 2) * 100 * US}
                job.operate(step, "all_reduce", "0", issues, {0: at + 120 * US, 1: at + 120 * US})
        records = job.done()
        found, problems = clocks(records, meetings(records))
        assert any("jumped" in problem for problem in problems), problems
        add, wrong = found["b"].offset
        assert min(abs(add + 10 * SECOND), abs(add + 10 * SECOND + jump)) <= wrong <= abs(jump) + WALL_ERROR_NS
        assert all(set(share.work) for share in divide(records).shares)


def test_rounding_is_no_jump() -> None:
    """Files of other tools have microseconds: contradictions below the tolerance are not reported."""
    job = Job(["a", "b"], [0, 0], [0.0, 0.0], [0, 0])
    job.operate(0, "barrier", "0", {0: SECOND, 1: SECOND + 3 * US}, {0: SECOND + 1 * US, 1: SECOND + 4 * US})
    job.operate(0, "barrier", "0", {0: SECOND + 3 * US, 1: SECOND}, {0: SECOND + 4 * US, 1: SECOND + 1 * US})
    found, problems = clocks(job.done(), meetings(job.records))
    assert problems == [] and found["b"].precision_ns < TOLERANCE_NS


@pytest.mark.parametrize("late", [{1: 7 * MS}, {0: 3 * MS, 2: 4 * MS}, {3: 400 * MS}])
def test_a_rank_that_is_always_late_is_no_wrong_clock(late: dict[int, int]) -> None:
    """The planted job on two hosts with clocks weeks apart has the waits that it has on one. If one host is last in all
    operations, bounds alone cannot say by how much; that collectives end on all hosts at nearly the same time does."""
    one = divide(data_parallel(4, late_ns=late))
    records = [
        shifted(record, 10**15) if record.header.host == "b" else record
        for record in data_parallel(4, late_ns=late, hosts=["a", "b"])
    ]
    other = divide(records)
    for here, there in zip(one.shares, other.shares, strict=True):
        assert here.work == pytest.approx(there.work)
        for purpose, moving in here.communication.items():
            for part in ("exposed_wire_ns", "exposed_wait_ns", "hidden_wire_ns", "hidden_wait_ns"):
                assert getattr(there.communication[purpose], part) == pytest.approx(
                    getattr(moving, part), abs=0.25 * MS
                )
            assert there.communication[purpose].waited_for.keys() == moving.waited_for.keys()


@pytest.mark.parametrize(
    ("wall", "ends", "wrong"), [(0, 0, 0), (5, 0, 0), (0, 99, 0), (50_000, 0, 0), (50_000, 99, 99)]
)
def test_where_bounds_are_loose_ends_and_wall_clocks_decide(wall: int, ends: int, wrong: int) -> None:
    """Rank 1 is last in all operations, by 300 ms of each second. Wall clocks that are some ms wrong are made better by the ends
    of collectives. A host that notices each end 99 ms late, as one that lacks processor time, is no wrong clock while the wall
    clocks can be right; that the two disagree is said."""
    job = Job(["a", "b"], [0, SECOND], [0.0, 0.0], [0, wall * MS])
    for step in range(6):
        at = SECOND + step * SECOND
        ended = {0: at + 500 * MS, 1: at + (500 + ends) * MS}
        job.operate(step, "all_reduce", "0", {0: at, 1: at + 300 * MS}, ended)
    records = job.done()
    clock_of, problems = clocks(records, meetings(records))
    assert clock_of["b"].offset[0] == pytest.approx(-SECOND - wrong * MS, abs=US)
    assert any("ms apart" in problem for problem in problems) == (ends > 0 and wall == 0)


@pytest.mark.parametrize("seed", range(6))
def test_ends_that_are_noticed_late_by_chance_are_no_finer_than_wall_clocks(seed: int) -> None:
    """Rank 1 is last in all operations, so that bounds are loose. Each host notices each end up to 12 ms late, as one whose
    processors are busy does: the wall clocks, which are right, count."""
    draw = random.Random(f"ends {seed}")
    job = Job(["a", "b"], [0, SECOND], [0.0, 0.0], [0, 0])
    for step in range(3):
        for number in range(2):
            issued = (10 * step + number) * SECOND
            end = issued + 320 * MS
            issues = {0: issued, 1: issued + 300 * MS}
            job.operate(step, "all_reduce", "0", issues, {rank: end + draw.randrange(12 * MS) for rank in range(2)})
    records = job.done()
    [_, clock] = clocks(records, meetings(records))[0].values()
    assert clock.on_first(job.reads(1, 5 * SECOND)) == pytest.approx(5 * SECOND, abs=US)


def test_a_sample_without_collectives_takes_what_those_beside_it_say() -> None:
    """In step 1 there are sends only, late by much both ways; ends of the collectives in steps 0 and 2 count for it, too. Where a
    job has sends only, the wall clocks do."""
    for has_collectives in (True, False):
        job = Job(["a", "b"], [0, SECOND], [0.0, 0.0], [0, 3 * MS])
        for step in range(3):
            at = SECOND + step * SECOND
            if step != 1 and has_collectives:
                job.operate(step, "all_reduce", "0", {0: at, 1: at + 300 * MS}, {0: at + 500 * MS, 1: at + 500 * MS})
            for sender, receiver in ((0, 1), (1, 0)):
                job.operate(step, "send", "p", {sender: at}, {sender: at + US}, {sender: receiver})
                arrived = at + 200 * MS * (1 + sender)
                job.operate(step, "recv", "p", {receiver: at}, {receiver: arrived}, {receiver: sender})
        records = job.done()
        found = clocks(records, meetings(records))[0]["b"]
        wall_ns = 0 if has_collectives else 3 * MS
        assert [knot[1] + found.rough_ns for knot in found.knots] == pytest.approx([-SECOND + wall_ns] * 3, abs=US)


@pytest.mark.parametrize(
    ("wall_ms", "right_ms", "unsure_ms"), [(0.5, 0.5, 0.5), (4.0, 4.0, 4.0), (9.0, 0.0, 6.0), (50.0, 0.0, 6.0)]
)
def test_messages_both_ways_say_how_wrong_a_clock_is(wall_ms: float, right_ms: float, unsure_ms: float) -> None:
    """A job has sends only, which take 6 ms both ways. That bounds a clock to 6 ms; where the wall clocks are possible and near
    the middle, they are right to how near that is. Where they are not possible, the middle is taken."""
    wall_ns = round(wall_ms * MS)
    job = Job(["a", "b"], [0, SECOND], [0.0, 0.0], [0, wall_ns])
    for step in range(3):
        for sender, receiver in ((0, 1), (1, 0)):
            at = SECOND + step * SECOND + 20 * MS * sender
            job.operate(step, "send", "p", {sender: at}, {sender: at + US}, {sender: receiver})
            job.operate(step, "recv", "p", {receiver: at}, {receiver: at + 6 * MS}, {receiver: sender})
    records = job.done()
    found = clocks(records, meetings(records))[0]["b"]
    assert [knot[1] + found.rough_ns for knot in found.knots] == pytest.approx(
        [round(right_ms * MS) - SECOND] * 3, abs=20 * US
    )
    assert found.likely_wrong_ns == pytest.approx(unsure_ms * MS, rel=0.02)


def test_a_wall_clock_is_believed_beside_messages_of_other_sizes() -> None:
    """They take 60 ms one way and 0.05 ms back, and the wall clocks are wrong by 0.1: the nearest possible correction counts, and
    it is said how little that says."""
    job = Job(["a", "b"], [0, SECOND], [0.0, 0.0], [0, 100 * US])
    for step in range(3):
        for sender, receiver, takes in ((0, 1, 60 * MS), (1, 0, 50 * US)):
            at = SECOND + step * SECOND + 100 * MS * sender
            job.operate(step, "send", "p", {sender: at}, {sender: at + US}, {sender: receiver})
            job.operate(step, "recv", "p", {receiver: at}, {receiver: at + takes}, {receiver: sender})
    records = job.done()
    found, problems = clocks(records, meetings(records))
    assert [knot[1] + found["b"].rough_ns for knot in found["b"].knots] == pytest.approx([-SECOND] * 3, abs=150 * US)
    assert any("only sends and receives bound the clock of b" in problem for problem in problems)


def test_ends_never_overrule_a_bound() -> None:
    """Host b notices most ends 5 ms late. One operation, in which a is last and which b ends after 2 ms, allows 2 at most."""
    job = Job(["a", "b"], [0, SECOND], [0.0, 0.0], [0, 0])
    for number in range(4):
        at = SECOND + number * SECOND
        job.operate(0, "all_reduce", "0", {0: at, 1: at + 300 * MS}, {0: at + 500 * MS, 1: at + 505 * MS})
    job.operate(0, "all_reduce", "0", {0: 9 * SECOND, 1: 8 * SECOND}, {0: 9 * SECOND + 2 * MS, 1: 9 * SECOND + 2 * MS})
    records = job.done()
    add, wrong = clocks(records, meetings(records))[0]["b"].offset
    # The middle of the step is some seconds from the operation that bounds.
    assert add == pytest.approx(-SECOND - 2 * MS, abs=8 * SECOND * DRIFT) and abs(add + SECOND) <= wrong


def test_kinds_of_operations_by_name() -> None:
    """Names of torch, of Kineto and of other backends mean the same."""
    for name in (
        "all_reduce",
        "nccl:all_reduce",
        "gloo:allreduce",
        "allreduce_coalesced",
        "ALLREDUCE",
        "barrier",
        "monitored_barrier",
        "monitoredBarrier",
        "_all_gather_base",
    ):
        assert kind(name) is Kind.ALL, name
    assert kind("reduce_scatter_tensor") is Kind.ALL and kind("all_to_all_single") is Kind.EXCHANGE
    assert {kind(name) for name in ("reduce", "broadcast", "scatter", "gather_object")} == {Kind.ROOTED}
    assert kind("isend") is Kind.SEND and kind("penstock:recv_any_source") is Kind.RECEIVE
    assert kind("") is kind("dance") is Kind.OTHER
