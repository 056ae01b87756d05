"""Operations of gloo's that torch's profiler sees without their calls, in steps without a sample: the division is then as if
those steps had samples too; and where they are not what samples show, as if nobody had watched."""

from __future__ import annotations

import heapq
import itertools
import pathlib
import random
import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any

import pytest

import forked
from penstock.profiling.breakdown import Breakdown
from penstock.profiling.clocks import clocks
from penstock.profiling.divide import divide
from penstock.profiling.matching import meetings
from penstock.profiling.record import Operation, Ran, Record, Sample, Step, Wait, Watch, read
from penstock.profiling.remembered import remembered
from penstock.profiling.watched import watched as as_of_engine
from penstock.tools.profile import run
from penstock.tools.profile.recorder.sampling import Sampling
from penstock.tools.profile.recorder.slots import SLOT
from penstock.tools.profile.recorder.watching import Watching
from profiles import agree, data_parallel, header, pipeline, shifted, uneven

MS = 1_000_000
SYNC = "data-parallel sync"
STEPS, SAMPLED = 40, (4, 9, 15)
TAKEN_NS = 60_000
"""After an operation is issued its backend takes it."""


def watched(
    records: list[Record], sampled: Collection[int] = SAMPLED, steps: Iterable[int] = range(STEPS)
) -> list[Record]:
    """Records of which all steps were sampled, with few samples, and these steps watched."""
    return [_watched(record, sampled, steps) for record in records]


def _watched(record: Record, sampled: Collection[int], steps: Iterable[int]) -> Record:
    watches = []
    for step in (record.steps[number] for number in steps):
        [operations] = [sample.operations for sample in record.samples if sample.step == step.number]
        watches.append(Watch(step.start_ns, step.end_ns, tuple(taken(operations))))
    samples = [sample for sample in record.samples if sample.step in sampled]
    return replace(record, samples=samples, watches=watches)


def taken(operations: Iterable[Operation]) -> list[Ran]:
    """What a group's two threads take of these, in the order of their issue; messages take no thread."""
    busy: dict[str, list[int]] = {}
    found = []
    for one in sorted(operations, key=lambda one: one.issued_ns):
        ends = busy.setdefault(one.group, [])
        began_ns = one.issued_ns + TAKEN_NS
        if one.peer is None:
            if len(ends) == 2:
                began_ns = max(began_ns, heapq.heappop(ends) + 20_000)
            heapq.heappush(ends, one.ended_ns)
        found.append(Ran(one.name, began_ns, max(one.ended_ns, began_ns)))
    return sorted(found, key=lambda one: one.began_ns)


def unwatched(records: list[Record]) -> Breakdown:
    return divide([replace(each, watches=[]) for each in records])


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("world", [2, 3])
def test_it_is_as_if_watched_steps_had_samples(seed: int, world: int) -> None:
    records = uneven(seed, world)
    found = divide(watched(records))
    assert found.problems == () and [share.sampled for share in found.shares] == [3] * world
    assert agree(found, divide(records)) and not agree(unwatched(watched(records)), divide(records), near=0.02)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("wire_ms", [12, 25, 60])
@pytest.mark.parametrize("late_ms", [7, 29])
def test_operations_that_queue_were_issued_earlier(late_ms: int, wire_ms: int, seed: int) -> None:
    """Many of DDP's buckets are in flight, and gloo has two threads. When each was issued is told by those of samples."""
    draw = random.Random(f"queues {seed}")
    late = {(rank, step): draw.randrange(late_ms * MS) for rank in range(2) for step in range(STEPS)}
    records = data_parallel(2, STEPS, range(STEPS), evaluation_ns=late, buckets=4, wire_ns=wire_ms * MS)
    assert agree(divide(watched(records)), divide(records), near=0.003)


@pytest.mark.parametrize("samples", [SAMPLED, SAMPLED[:2]])
@pytest.mark.parametrize("seed", range(4))
def test_a_first_sum_that_is_taken_late_was_issued_when_it_is_in_samples(seed: int, samples: Collection[int]) -> None:
    """The backend's thread gets the processor up to 4 ms later. Two samples do not show by how much that varies."""
    draw = random.Random(f"taken late {seed}")
    late = {(rank, step): draw.randrange(15 * MS) for rank in range(2) for step in range(STEPS)}
    records = data_parallel(2, STEPS, range(STEPS), evaluation_ns=late, buckets=2, wire_ns=30 * MS)

    def taken_late(record: Record) -> Record:
        watches = []
        for watch in record.watches:
            first, *others = watch.operations
            began_ns = min(first.began_ns + draw.randrange(4 * MS), first.ended_ns)
            watches.append(replace(watch, operations=(first._replace(began_ns=began_ns), *others)))
        return replace(record, watches=watches)

    found = divide([taken_late(each) for each in watched(records, samples)])
    assert agree(found, divide(records), near=0.003) == (samples == SAMPLED)


def test_messages_both_ways_are_numbered_alike_on_both_ranks() -> None:
    """One forward, one backward by turns: what one rank sends before it receives, the other receives before it sends."""
    told = []
    for rank, order in enumerate(("ssrsrr", "rsrsrs")):
        names = ["send" if each == "s" else "recv" for each in order]
        operations = tuple(
            Operation(name, "g", 0, 10 + at, 20 + at, 8, 2, 1 - rank, "pipeline send") for at, name in enumerate(names)
        )
        steps = [Step(number, 100 * number, 100 * number + 100) for number in range(4)]
        ran = [Ran(name, 310 + at, 320 + at) for at, name in enumerate(names)]
        sampled = [Ran(name, 10 + at, 20 + at) for at, name in enumerate(names)]
        record = Record(header(rank, 2), steps, [Sample(0, (), operations)])
        record.watches = [Watch(0, 100, tuple(sampled)), Watch(300, 400, tuple(ran))]
        ended = [one for one in as_of_engine(record, steps)[0] if one.issued_ns >= 300]
        ways = [(rank, one.peer) if one.name == "send" else (one.peer, rank) for one in ended]
        told.append({(one.channel, one.number, way) for one, way in zip(ended, ways, strict=True)})
    assert told[0] == told[1] and len(told[0]) == 6


@pytest.mark.parametrize("work_ms", [0, 3])
@pytest.mark.parametrize("count", [4, 8, 40])
def test_sums_after_the_pass_that_queue(count: int, work_ms: int) -> None:
    """All issued at once when the backward pass has ended, and waited for one by one, with work between: most are taken later,
    during the wait for another."""
    records = []
    for record in data_parallel(2, STEPS, range(STEPS), buckets=1, wire_ns=count * 5 * MS):
        steps, samples = [], []
        for step, sample in zip(record.steps, record.samples, strict=True):
            [whole] = sample.operations
            operations = [
                replace(
                    one,
                    issued_ns=whole.issued_ns + 1 + at,
                    ended_ns=whole.issued_ns + 1000 + (at + 1) * 5 * MS,
                    number=at,
                )
                for at, one in enumerate([whole] * count)
            ]
            spans = [span._replace(end_ns=whole.issued_ns) if span.phase == "backward" else span for span in step.spans]
            ends = [whole.issued_ns + 1000 + at * 5 * MS for at in range(count + 1)]
            waits = [Wait(a + work_ms * MS, b, "all_reduce", "0") for a, b in itertools.pairwise(ends)]
            steps.append(step._replace(spans=tuple(spans), waits=tuple(waits)))
            samples.append(replace(sample, operations=tuple(operations)))
        records.append(replace(record, steps=steps, samples=samples))
    assert agree(divide(watched(records)), divide(records), near=0.01)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("groups", "runs_on", "is_told"),
    [
        ("baaaa", False, True),
        ("abaaa", False, True),
        ("aabaaa", False, True),
        ("aaabbb", False, False),
        ("aaab", False, False),
        ("aaabaab", False, False),
        ("baaaa", True, False),
        ("aaaaa", True, True),
    ],
)
def test_sums_of_two_groups_that_queue(groups: str, runs_on: bool, is_told: bool, seed: int) -> None:
    """Each group has threads of its own. Where a sum of one comes after the other's third, it may be taken before that, and the
    marks alone tell of such a step. So where some run on into the next step, and those of that one may queue."""

    def of_two(record: Record) -> Record:
        samples = []
        for step, sample in zip(record.steps, record.samples, strict=True):
            operations = [
                replace(one, group=group, number=groups[:at].count(group))
                for at, (one, group) in enumerate(zip(sample.operations, groups, strict=True))
            ]
            if runs_on:
                operations[0] = replace(operations[0], ended_ns=step.end_ns + MS)
            samples.append(replace(sample, operations=tuple(operations)))
        return replace(record, samples=samples)

    plain = data_parallel(2, STEPS, range(STEPS), evaluation_ns=_late(seed), buckets=len(groups), wire_ns=40 * MS)
    records = [of_two(each) for each in plain]
    found = divide(watched(records))
    if is_told:
        assert agree(found, divide(records), near=0.003)
    else:
        assert found == unwatched(watched(records))


_Shown = Collection[tuple[str, str, float]]
"""Names, groups, and ms of the step in which they were issued."""
_Taken = Collection[tuple[str, float, float]]
"""Names, and from when to when they ran, in ms of the step."""


def test_sums_of_two_groups_are_told_between_samples() -> None:
    """As the recorder watches them: nothing is known of the steps just before a sample, nor of those after it."""
    told = [*SAMPLED, *range(18, STEPS)]
    records = []
    for record in data_parallel(2, STEPS, range(STEPS), evaluation_ns=_late(0), buckets=5, wire_ns=40 * MS):
        samples = []
        for sample in record.samples:
            operations = (
                replace(one, group="b", number=0) if at == 0 else replace(one, group="a", number=at - 1)
                for at, one in enumerate(sample.operations)
            )
            samples.append(replace(sample, operations=tuple(operations)))
        records.append(replace(record, samples=samples))
    whole = [replace(one, samples=[each for each in one.samples if each.step in told]) for one in records]
    found = divide(watched(records, steps=[*SAMPLED, *range(17, STEPS)]))
    assert agree(found, divide(whole), near=0.01) and not agree(unwatched(watched(records)), divide(whole), near=0.01)


def _late(seed: int) -> dict[tuple[int, int], int]:
    draw = random.Random(f"two groups {seed}")
    return {(rank, step): draw.randrange(29 * MS) for rank in range(2) for step in range(STEPS)}


def _groups(samples: dict[int, _Shown], ran: dict[int, _Taken], waits: Collection[Wait] = ()) -> dict[int, str]:
    """By step, of 100 ms each: the groups that a rank's operations are told to have, in order of their ends; '-' for none."""
    steps = [Step(number, 100 * MS * number, 100 * MS * (number + 1)) for number in range(12)]
    steps = [
        step._replace(waits=tuple(one for one in waits if 0 <= one.start_ns - step.start_ns < 100 * MS))
        for step in steps
    ]

    def at(step: int, ms: float) -> int:
        return steps[step].start_ns + round(ms * MS)

    def operations(step: int, shown: _Shown) -> tuple[Operation, ...]:
        return tuple(Operation(name, group, 0, at(step, ms), at(step, ms + 5), 8, 2) for name, group, ms in shown)

    record = Record(header(0, 2), steps, [Sample(step, (), operations(step, shown)) for step, shown in samples.items()])
    record.watches = [
        Watch(at(step, 0), at(step, 100), tuple(Ran(name, at(step, a), at(step, b)) for name, a, b in taken))
        for step, taken in sorted({**{step: _at_once(shown) for step, shown in samples.items()}, **ran}.items())
    ]
    told = sorted(as_of_engine(record, steps)[0], key=lambda one: one.ended_ns)
    return {
        step: "".join(one.group or "-" for one in told if at(step, 0) <= one.issued_ns < at(step, 100)) for step in ran
    }


def _at_once(shown: _Shown) -> _Taken:
    return [(name, ms + 0.06, ms + 5) for name, _, ms in shown]


def _sums(groups: str) -> _Shown:
    return [("all_reduce", group, 10 + 10 * at) for at, group in enumerate(groups)]


_SUM = "all_reduce"
_QUEUED = [(_SUM, 10.1, 45), (_SUM, 20.1, 25), (_SUM, 30.1, 60), (_SUM, 45, 70), (_SUM, 60, 80)]
"""Of abaaa: the fourth and fifth wait for a thread. By their ends these are b, a, a, a, a."""
_RUNS_ON = [*_at_once(_sums("abaa")), (_SUM, 50.1, 112)]


def test_what_runs_on_into_a_step_may_have_let_its_sums_queue() -> None:
    """Then those of another group may have been taken before them, whatever pattern the steps before have."""
    longer = [*_sums("abaaa"), (_SUM, "a", 70)]
    found = _groups(
        {2: _sums("abaaa"), 3: longer},
        {
            5: _QUEUED,
            6: _RUNS_ON,
            7: _QUEUED,
            8: [*_at_once(_sums("abaaa")), (_SUM, 70.1, 112)],
            9: _QUEUED,
            11: _QUEUED,  # what ran before it is unknown
        },
    )
    assert found == {5: "-----", 6: "abaaa", 7: "-----", 8: "abaaaa", 9: "-----", 11: "-----"}, "4 was not watched"
    found = _groups({2: _sums("abaaa")}, {4: _at_once(_sums("abaaa")), 5: _QUEUED, 6: _QUEUED})
    assert found == {4: "abaaa", 5: "baaaa", 6: "baaaa"}


def test_each_samples_order_counts() -> None:
    """In the second, other sums of the first group come before: its next one queues, and another group's overtakes it."""
    pair = [("broadcast", "a", 1), ("broadcast", "a", 2)]
    late = [("broadcast", "a", 80), ("broadcast", "a", 90)]
    sums = _sums("abaaa")
    ran = [("broadcast", 1.1, 7), ("broadcast", 2.1, 8), *_QUEUED]
    assert _groups({2: [*pair, *sums], 3: [*sums, *late]}, {5: ran, 6: ran})[6] == "-" * 7
    assert _groups({2: [*sums, *late], 3: [*pair, *sums]}, {5: ran, 6: ran})[6] == "-" * 7
    ran = [*_QUEUED, ("broadcast", 80.1, 85), ("broadcast", 90.1, 95)]
    assert _groups({2: [*sums, *late], 3: [*sums, *late]}, {5: ran, 6: ran})[6] == "baaaaaa"


def test_sums_of_two_groups_that_are_taken_at_once() -> None:
    """One's thread may wake up later than the other's: which is whose nobody knows."""
    near, apart = ([(_SUM, 10.1, 45), (_SUM, 10.1 + gap, 25), (_SUM, 30.1, 60)] for gap in (0.3, 0.6))
    found = _groups({2: _sums("aba")}, {4: near, 5: apart, 6: near})
    assert found == {4: "---", 5: "baa", 6: "---"}
    # What a function that blocks issues has ended before the next is.
    blocks = Wait(100 * MS * 2 + 10 * MS, 100 * MS * 2 + 15 * MS, _SUM, "a")
    short = [(_SUM, 10.1, 10.2), (_SUM, 10.4, 25), (_SUM, 30.1, 60)]
    assert _groups({2: _sums("aba")}, {5: short, 6: short}, [blocks])[6] == "aba"
    assert _groups({2: _sums("aba")}, {5: short, 6: short})[6] == "---"


def test_an_operation_that_is_taken_in_the_next_step_is_not_that_ones() -> None:
    """Each step's last one is: there are as many in a step, and they are others."""

    def shifted_by_one(record: Record) -> Record:
        late = []
        for before, watch, step in zip([None, *record.watches], record.watches, record.steps, strict=False):
            [*first, _] = watch.operations
            last = (
                []
                if before is None
                else [before.operations[-1]._replace(began_ns=step.start_ns, ended_ns=step.start_ns + MS)]
            )
            late.append(replace(watch, operations=(*last, *first)))
        return replace(record, watches=late)

    changed = [shifted_by_one(each) for each in watched(uneven(6))]
    assert divide(changed) == unwatched(changed)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("stages", "world"), [(2, 2), (3, 3), (4, 2)])
def test_messages_have_the_peers_of_those_in_their_places(stages: int, world: int, seed: int) -> None:
    records = pipeline(stages, world, STEPS, random.Random(f"watched stages {seed}"))
    # Passes take other times in each step, so receives and sends come in another order on some.
    assert agree(divide(watched(records)), divide(records)) and not agree(
        unwatched(watched(records)), divide(records), near=0.02
    )


def test_two_hosts_with_clocks_of_their_own() -> None:
    first, second = data_parallel(2, STEPS, range(STEPS), hosts=("a", "b"), late_ns={1: 7 * MS})
    both = [first, shifted(second, 10**12)]
    assert agree(divide(watched(both)), divide(both))


def test_steps_that_were_not_watched_are_left_to_the_marks() -> None:
    """By one rank, or by none."""
    records = uneven(1)
    first, second = watched(records, steps=range(20))[0], watched(records, steps=[*range(10), *range(15, 40)])[1]
    found = divide([first, second])
    assert found.problems == ()
    for share, truly in zip(found.shares, divide(records).shares, strict=True):
        assert share.work == pytest.approx(truly.work, rel=0.03)
        assert share.communication[SYNC].exposed_ns == pytest.approx(truly.communication[SYNC].exposed_ns, rel=0.03)
    assert not agree(found, divide(watched(records)), near=1e-6)


def _with_a_barrier(record: Record, step: Step) -> list[Ran]:
    return [Ran("barrier", step.start_ns + 1000, step.start_ns + 2000)]


def _with_a_sum(record: Record, step: Step) -> list[Ran]:
    return [Ran("all_reduce", step.start_ns + 1000, step.start_ns + 2000)]


@pytest.mark.parametrize("more", [_with_a_barrier, _with_a_sum])
def test_a_step_with_other_operations_than_samples_is_left_to_the_marks(
    more: Callable[[Record, Step], list[Ran]],
) -> None:
    """As where it ends with a checkpoint: which of its sums is whose, nobody knows."""
    records = uneven(2)
    step = 20

    def changed(record: Record) -> Record:
        watches = list(record.watches)
        operations = (*more(record, record.steps[step]), *watches[step].operations)
        watches[step] = replace(watches[step], operations=operations)
        return replace(record, watches=watches)

    found = divide([changed(each) for each in watched(records)])
    assert agree(found, divide(watched(records, steps=[at for at in range(STEPS) if at != step])))


def test_samples_that_differ_name_nothing() -> None:
    """Two groups' sums in another order: which is first in a step that nobody sampled?"""
    records = uneven(3, buckets=2)

    def of_two(record: Record) -> Record:
        samples = []
        for sample in record.samples:
            first, second = sample.operations
            swapped = sample.step % 2
            given = (replace(first, group="b" if swapped else "a"), replace(second, group="a" if swapped else "b"))
            samples.append(replace(sample, operations=tuple(replace(one, number=0) for one in given)))
        return replace(record, samples=samples)

    changed = watched([of_two(each) for each in records])
    assert divide(changed) == unwatched(changed)
    # Of those with one order all is known: a step has the first sums of two groups.
    in_order = [replace(each, samples=[sample for sample in each.samples if sample.step % 2 == 0]) for each in records]
    same = watched([of_two(each) for each in in_order], sampled=(4, 8, 14), steps=range(0, STEPS, 2))
    found = remembered(same, meetings(same), clocks(same, meetings(same))[0])
    assert [len(steps) for steps in found.values()] == [STEPS // 2 - 3] * 2


def test_nothing_of_what_samples_show_otherwise_is_believed() -> None:
    """gloo's reduce_scatter is several sums: the samples have it as one."""

    def scattered(record: Record) -> Record:
        samples = [
            replace(sample, operations=tuple(replace(one, name="reduce_scatter") for one in sample.operations))
            for sample in record.samples
        ]
        return replace(record, samples=samples)

    changed = [scattered(each) for each in watched(uneven(4))]
    assert divide(changed) == unwatched(changed)


# -------------------------------------------------------------------------------------------------------- the recorder


def test_watches_lie_between_samples() -> None:
    """Whatever distances ranks find: a profiler has stopped a step before the next one starts, and what a rank watches that does
    so less often, one that does so more often watches, too."""
    one = Watching(lambda entry: None)
    one._is_wanted = True

    def found(distance: int) -> dict[int, int]:
        one.distance.steps = distance
        return {number: last for number in range(9_000) if (last := one.begins(number)) is not None}

    sampling = Sampling(lambda entry: None)
    samples = [number for number in range(9_100) if sampling._is_sample(number)]
    all_ = found(SLOT)
    assert sum(last - number for number, last in all_.items()) > 0.75 * 9_000
    for number, last in all_.items():
        before = max(each for each in samples if each < number)
        after = min(each for each in samples if each > number)
        assert before + 1 == number < last == after - 6
    for distance in (64, 1024):
        some = found(distance)
        assert some.items() < all_.items() and 0 in (number // SLOT for number in some)
    one._is_wanted = False
    assert not found(SLOT)


HEAD = """
import os, time, torch, torch.distributed as dist
from torch import nn
from penstock.tools.profile.recorder import watching
watching.SHARE = 1000  # steps are short here
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

def train(steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()

"""


FORKS = """
child = os.fork()
if child == 0:
    nn.Linear(8, 8)(torch.ones(2, 8)).sum().backward()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
PROFILES = """
with torch.profiler.profile() as own:
    train(1)
assert any(one.key == "aten::linear" for one in own.key_averages())
"""


SPAN = """
torch.autograd.profiler.record_function("the rest").__enter__()
"""


@pytest.mark.parametrize(
    "interruption",
    ["", FORKS, PROFILES, SPAN],
    ids=["nothing", "a fork", "a profiler of the script", "a span that never ends"],
)
def test_a_watch_ends_where_the_script_forks_or_profiles(
    interruption: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, forks: None
) -> None:
    """The script does not notice; what was watched counts, and later steps are watched again."""
    text = f"train(25)\n{interruption}train(175)\ndist.destroy_process_group()\n"
    folder = _ended(tmp_path, monkeypatch, text, 0)
    [record] = [read(path) for path in folder.glob("rank-*.jsonl")]
    assert not record.problems and record.events[-1].kind == "end"
    assert not any("failed" in event.text for event in record.events)
    shown = {sample.step: len(sample.operations) for sample in record.samples}
    assert sorted(shown)[:3] == [4, 9, 15] and set(shown.values()) == {1}
    seen = {
        step.number: sum(
            step.start_ns <= one.began_ns < step.end_ns for watch in record.watches for one in watch.operations
        )
        for step in record.steps
        if any(watch.since_ns <= step.start_ns and step.end_ns <= watch.until_ns for watch in record.watches)
    }
    assert set(seen.values()) == {1} and shown.keys() <= seen.keys()
    assert set(range(17, 25)) <= seen.keys() and max(seen) > 190 and len(seen) > 120


def test_a_watch_ends_where_steps_do(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, forks: None) -> None:
    """The script serves its model, with an operation each time: these would fill the memory."""
    text = (
        "train(25)\n"
        "from penstock.tools.profile.recorder import install\n"
        "sampling, ends = install._state.recording.sampling, time.monotonic() + 30\n"
        "assert sampling.is_running\n"
        "while sampling.is_running:\n"
        "    assert time.monotonic() < ends\n"
        "    dist.barrier()\n"
    )
    folder = _ended(tmp_path, monkeypatch, text, 0)
    [record] = [read(path) for path in folder.glob("rank-*.jsonl")]
    assert not record.problems and record.events[-1].kind == "end"
    assert record.steps[-1].end_ns < record.watches[-1].until_ns < record.events[-1].time_ns


@pytest.mark.parametrize("is_caught", [False, True])
def test_a_backward_pass_that_fails_while_it_is_watched(
    is_caught: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, forks: None
) -> None:
    """What DDP has launched in it may go on, and then nobody may stop the profiler: the script's exit code is its own."""
    fails = "hook = next(model.parameters()).register_hook(lambda gradient: 1 / 0)\n"
    tries = "try:\n    train(1)\nexcept ZeroDivisionError:\n    print('failed')\nhook.remove()\n"
    text = f"train(20)\n{fails}{tries if is_caught else 'train(1)'}"
    folder = _ended(tmp_path, monkeypatch, text, 0 if is_caught else 1)
    [record] = [read(path) for path in folder.glob("rank-*.jsonl")]
    assert not record.problems and len(record.steps) >= 20 and record.events[-1].kind == "end"
    assert any("a backward pass failed" in event.text for event in record.events)
    assert not any("did not end" in event.text for event in record.events)


def test_a_training_in_a_thread_that_has_ended_is_no_failure(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, forks: None
) -> None:
    """Only the thread that has started torch's profiler can stop it."""
    text = "import threading\none = threading.Thread(target=train, args=(20,))\none.start()\none.join()\n"
    folder = _ended(tmp_path, monkeypatch, text, 0)
    [record] = [read(path) for path in folder.glob("rank-*.jsonl")]
    assert len(record.steps) == 20 and not [event for event in record.events if event.kind in ("profiler", "exception")]


def _ended(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, text: str, code: int) -> pathlib.Path:
    """Where a script was recorded that ends with this code."""
    monkeypatch.chdir(folder)
    output, script = folder / "profile", folder / "script.py"
    output.mkdir()
    script.write_text(f"{HEAD}{text}")
    assert run.run([sys.executable, str(script)], output) == code
    return output


@pytest.mark.parametrize("seed", range(20))
def test_a_line_that_is_lost_is_a_hole(seed: int) -> None:
    """A watch is written in several lines: each tells of the time that is its own."""
    draw = random.Random(f"lines {seed}")
    lines: list[Any] = []
    writing = Watching(lambda line: lines.append(line) if draw.random() < 0.7 else None)
    ran = [Ran("all_reduce", at, at + 50) for at in sorted(draw.sample(range(2_000), draw.randrange(400)))]
    writing._write(100, 1_900, ran)
    for line in lines:
        assert line.operations == tuple(one for one in ran if line.since_ns <= one.began_ns < line.until_ns)
    assert all(a.until_ns <= b.since_ns for a, b in itertools.pairwise(lines))
    assert not lines or (lines[0].since_ns >= 100 and lines[-1].until_ns <= 1_900)


@pytest.mark.parametrize("backend", ["gloo", "penstock"])
def test_two_ranks_watch_what_no_engine_tells(
    backend: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, forks: None
) -> None:
    """Of steps between samples the division knows the operations, over either."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folder, script = tmp_path / "profile", tmp_path / "script.py"
    folder.mkdir()
    script.write_text(
        HEAD.replace('"gloo", store=dist.HashStore(), rank=0, world_size=1', f'"{backend}"')
        + "train(60)\ndist.destroy_process_group()\n"
    )
    assert run.run([*forked.TORCHRUN, "--nproc-per-node=2", str(script)], folder) == 0
    records = [read(path) for path in sorted(folder.glob("rank-*.jsonl"))]
    assert [bool(record.watches) for record in records] == [backend == "gloo"] * 2
    found = remembered(records, meetings(records), clocks(records, meetings(records))[0])
    for rank, record in enumerate(records):
        known = found[rank]
        assert len(known) > 25 and not known.keys() & {sample.step for sample in record.samples}
        [names] = {tuple(one.operation.name for one in courses) for step, courses in known.items() if step >= 2}
        assert names == ("all_reduce",)
