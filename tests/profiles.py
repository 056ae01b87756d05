"""Records that tests make, of jobs whose times are known."""

from __future__ import annotations

import collections
import itertools
import pathlib
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from penstock.profiling.breakdown import PHASES, Breakdown, Moving
from penstock.profiling.divide import divide
from penstock.profiling.intervals import union
from penstock.profiling.record import (
    Ended,
    Endings,
    Event,
    Header,
    Operation,
    Ran,
    Record,
    Sample,
    Span,
    Step,
    Wait,
    Watch,
)
from penstock.tools.profile import cli, run


def header(rank: int, world: int, host: str = "a", start_ns: int = 0, wall_ns: int = 0) -> Header:
    return Header(rank, world, host, 1000 + rank, start_ns, wall_ns)


def shifted(record: Record, by_ns: int) -> Record:
    """The record that the same rank makes on a host whose monotonic clock shows so much more."""
    return Record(
        replace(record.header, start_ns=record.header.start_ns + by_ns),
        [_step(step, by_ns) for step in record.steps],
        [_sample(sample, by_ns) for sample in record.samples],
        [replace(each, time_ns=each.time_ns + by_ns) for each in record.readings],
        [replace(each, time_ns=each.time_ns + by_ns) for each in record.events],
        endings=[
            replace(
                line,
                until_ns=line.until_ns + by_ns,
                operations=tuple(
                    one._replace(issued_ns=one.issued_ns + by_ns, ended_ns=one.ended_ns + by_ns)
                    for one in line.operations
                ),
            )
            for line in record.endings
        ],
        watches=[
            Watch(
                watch.since_ns + by_ns,
                watch.until_ns + by_ns,
                tuple(Ran(one.name, one.began_ns + by_ns, one.ended_ns + by_ns) for one in watch.operations),
            )
            for watch in record.watches
        ],
    )


def _step(step: Step, by_ns: int) -> Step:
    return step._replace(
        start_ns=step.start_ns + by_ns,
        end_ns=step.end_ns + by_ns,
        spans=tuple(Span(each.phase, each.start_ns + by_ns, each.end_ns + by_ns) for each in step.spans),
        waits=tuple(
            Wait(each.start_ns + by_ns, each.end_ns + by_ns, each.operation, each.group) for each in step.waits
        ),
    )


def _sample(sample: Sample, by_ns: int) -> Sample:
    return replace(
        sample,
        busy=tuple((start + by_ns, end + by_ns) for start, end in sample.busy),
        operations=tuple(
            replace(each, issued_ns=each.issued_ns + by_ns, ended_ns=each.ended_ns + by_ns)
            for each in sample.operations
        ),
    )


def data_parallel(
    world: int = 2,
    steps: int = 12,
    sampled: Sequence[int] = (3, 6, 9),
    *,
    hosts: Sequence[str] = ("a",),
    loading_ns: int = 5_000_000,
    forward_ns: int = 20_000_000,
    backward_ns: int = 40_000_000,
    optimizer_ns: int = 3_000_000,
    wire_ns: int = 10_000_000,
    late_ns: dict[int, int] | None = None,
    evaluation_ns: dict[tuple[int, int], int] | None = None,
    profiler_ns: dict[tuple[int, int], int] | None = None,
    buckets: int = 3,
    bucket_bytes: int = 25_000_000,
) -> list[Record]:
    """DDP on ``world`` ranks, all in step: buckets are issued evenly over the backward pass, the last at its end, and go over
    a wire that takes one at a time, each for ``wire_ns`` from when all have issued it and the one before is done. Ranks of
    ``late_ns`` compute so much longer in the forward pass. Those of ``evaluation_ns``, by rank and step, evaluate before it,
    and those of ``profiler_ns`` are held up by torch's profiler at the start of the step.

    Each rank's means are then: loading, forward (and its delay), backward and optimizer as given; exposed is from the end of the
    backward's operators to the end of the last bucket.
    """
    late = late_ns or {}
    records = [Record(header(rank, world, hosts[rank % len(hosts)])) for rank in range(world)]
    now = [1_000_000] * world
    for number in range(steps):
        begun = list(now)
        profiled = [begun[rank] + (profiler_ns or {}).get((rank, number), 0) for rank in range(world)]
        evaluated = [profiled[rank] + (evaluation_ns or {}).get((rank, number), 0) for rank in range(world)]
        forward = [evaluated[rank] + loading_ns for rank in range(world)]
        backward = [forward[rank] + forward_ns + late.get(rank, 0) for rank in range(world)]
        issued = [
            [backward[rank] + backward_ns * (at + 1) // buckets for at in range(buckets)] for rank in range(world)
        ]
        ended = []
        free = 0
        for at in range(buckets):
            free = max(free, *(issued[rank][at] for rank in range(world))) + wire_ns
            ended.append(free)
        for rank in range(world):
            done = ended[-1] + optimizer_ns
            spans = (
                Span("profiler", begun[rank], profiled[rank]),
                Span("evaluation", profiled[rank], evaluated[rank]),
                Span("loading", evaluated[rank], forward[rank]),
                # What is between the call and the backward pass, the loss, is forward.
                Span("forward", forward[rank], backward[rank] - forward_ns // 10),
                Span("backward", backward[rank], ended[-1]),
                Span("optimizer", ended[-1], done),
            )
            worked = done - begun[rank] - (ended[-1] - backward[rank] - backward_ns)
            records[rank].steps.append(Step(number, begun[rank], done, spans, thread_ns=worked))
            if number in sampled:
                operations = tuple(
                    Operation(
                        "all_reduce",
                        "0",
                        at,
                        issued[rank][at],
                        ended[at],
                        bucket_bytes,
                        world,
                        None,
                        "data-parallel sync",
                    )
                    for at in range(buckets)
                )
                busy = (
                    (forward[rank], backward[rank] - 1000),
                    (backward[rank], backward[rank] + backward_ns),
                    (ended[-1], done),
                )
                records[rank].samples.append(Sample(number, busy, operations))
            now[rank] = done
    return [_ended(record) for record in records]


def pipeline(stages: int, ranks: int, steps: int, draw: random.Random, micro_batches: int = 3) -> list[Record]:
    """All micro-batches go forward through the stages, which ranks have by turns, and then back. How long passes and messages
    take is drawn anew for each. Receives are marked; sends move while their rank computes."""
    records = [Record(header(rank, ranks)) for rank in range(ranks)]
    now = [1_000_000] * ranks

    def ns() -> int:
        return draw.randrange(2, 9) * 1_000_000

    for number in range(steps):
        made = [Step(number, now[rank], 0, ()) for rank in range(ranks)]
        found = [list[Operation]() for _ in range(ranks)]
        for phase, order in (("forward", range(stages)), ("backward", range(stages - 1, -1, -1))):
            sent: dict[tuple[int, int], int] = {}
            for at, stage in itertools.product(range(micro_batches), order):
                rank, before = stage % ranks, stage - order.step
                other = before % ranks
                if (before, at) in sent:
                    issued_ns, called_ns = sent[before, at], now[rank]
                    now[rank] = max(called_ns, issued_ns) + ns()
                    wait = Wait(called_ns, now[rank], "recv", "0")
                    made[rank] = made[rank]._replace(waits=(*made[rank].waits, wait))
                    send = Operation("send", "0", 0, issued_ns, now[rank], 8, ranks, rank, "pipeline send")
                    receive = Operation("recv", "0", 0, *wait[:2], 8, ranks, other, f"pipeline {phase} recv")
                    found[other].append(send)
                    found[rank].append(receive)
                span = Span(phase, now[rank], now[rank] + ns())
                made[rank] = made[rank]._replace(spans=(*made[rank].spans, span))
                sent[stage, at] = span.end_ns
                now[rank] = span.end_ns + 500_000
        for rank in range(ranks):
            span = Span("optimizer", now[rank], now[rank] + ns())
            spans = (*made[rank].spans, span)
            numbers = collections.Counter[tuple[str, int | None]]()
            operations = []
            for one in sorted(found[rank], key=lambda one: one.issued_ns):
                operations.append(replace(one, number=numbers[one.name, one.peer]))
                numbers[one.name, one.peer] += 1
            thread_ns = sum(one.end_ns - one.start_ns for one in spans)
            records[rank].steps.append(made[rank]._replace(end_ns=span.end_ns, spans=spans, thread_ns=thread_ns))
            busy = tuple((one.start_ns, one.end_ns) for one in spans)
            records[rank].samples.append(Sample(number, busy, tuple(operations)))
            now[rank] = span.end_ns
    return [_ended(record) for record in records]


def said(folder: pathlib.Path) -> str:
    """What the command says of the run that it recorded there: once, since that takes the recorder's marks away."""
    records = cli._load(folder)
    found = divide(records) if records else Breakdown(())
    return "\n".join([*found.failures, *run.complaints(folder, records), *found.problems])


def _ended(record: Record) -> Record:
    """As a rank leaves it that was not killed."""
    return replace(record, events=[Event(max((step.end_ns for step in record.steps), default=0), "end")])


def uneven(seed: int, world: int = 2, steps: int = 40, buckets: int = 0) -> list[Record]:
    """Data parallel: in each step some ranks begin later, and others wait for them, hidden and then exposed."""
    draw = random.Random(f"uneven {seed}")
    late = {(rank, step): draw.randrange(40) * 1_000_000 for rank in range(world) for step in range(steps)}
    return data_parallel(world, steps, range(steps), evaluation_ns=late, buckets=buckets or draw.randint(2, 4))


def parts(moving: Moving) -> list[float]:
    return [moving.exposed_wire_ns, moving.exposed_wait_ns, moving.hidden_wire_ns, moving.hidden_wait_ns]


def agree(one: Breakdown, other: Breakdown, near: float = 1e-6) -> bool:
    """Work by phase, and communication by purpose, of all ranks."""
    return all(
        a.work == pytest.approx(b.work, rel=near)
        and a.communication.keys() == b.communication.keys()
        and all(
            parts(a.communication[purpose]) == pytest.approx(parts(b.communication[purpose]), rel=near, abs=1000)
            for purpose in b.communication
        )
        for a, b in zip(one.shares, other.shares, strict=True)
    )


def wild(seed: int, most: int | None = None) -> list[Record]:
    """Records that `record.read` would let pass and no recorder writes, with times up to ``most``."""
    draw = random.Random(seed)
    most = most or draw.choice([30, 10**9, (1 << 63) - 1])

    def interval() -> tuple[int, int]:
        first, second = sorted(draw.choice([0, most, draw.randrange(most), draw.randrange(30)]) for _ in range(2))
        return first, second

    def operation() -> Operation:
        name = draw.choice(["all_reduce", "send", "recv", "isend", "broadcast", "all_to_all", "", "\x00"])
        ranks, peer = draw.choice([0, 1, 2, most]), draw.choice([None, 0, 1, 1 << 40])
        purpose = draw.choice(["", "tensor", "dance"])
        return Operation(name, draw.choice("ab"), draw.randrange(3), *interval(), most, ranks, peer, purpose)

    records = []
    for rank in range(draw.randrange(1, 4)):
        record = Record(header(draw.choice([rank, 0]), 5, draw.choice("ab"), *interval()))
        for _ in range(draw.randrange(6)):
            spans = tuple(Span(draw.choice([*PHASES, "x"]), *interval()) for _ in range(3))
            waits = tuple(Wait(*interval(), draw.choice(["", "send"]), "a") for _ in range(2))
            record.steps.append(Step(draw.randrange(6), *interval(), spans, waits))
        for _ in range(draw.randrange(4)):
            busy = tuple((a, b) for a, b, _ in union([(*interval(), None) for _ in range(3)]))
            record.samples.append(Sample(draw.randrange(6), busy, tuple(operation() for _ in range(draw.randrange(5)))))
        for _ in range(draw.randrange(3)):
            # What samples show, and anything.
            shown = [one for sample in record.samples for one in sample.operations if draw.randrange(3)]
            ended = [
                Ended(draw.choice("cd"), draw.randrange(3), one.group, one.name, one.issued_ns, one.ended_ns, one.peer)
                for one in [*shown, *(operation() for _ in range(draw.randrange(3)))]
            ]
            record.endings.append(Endings(interval()[1], draw.choice([0, 0, 1, most]), tuple(ended)))
        for _ in range(draw.randrange(3)):
            shown = [one for sample in record.samples for one in sample.operations if draw.randrange(5)]
            ran = [Ran(one.name, one.issued_ns, one.ended_ns) for one in [*shown, operation()]]
            record.watches.append(Watch(*interval(), tuple(ran)))
        records.append(record)
    return records
