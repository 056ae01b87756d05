"""What a step would take with another network, against worlds whose rules are known."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from penstock.profiling.predict import Network, Prediction, predict
from penstock.profiling.record import Header, Operation, Record, Sample, Span, Step, Wait
from penstock.profiling.replay import Move, Wire, evened, merged, models, run, wires


@dataclass(frozen=True)
class World:
    """Data parallel training: a forward pass, a backward pass that issues a bucket after each layer, and waits for all."""

    forward_ns: tuple[int, ...]
    """By rank."""
    layers: tuple[tuple[int, int], ...]
    """Computing in ns, bytes of the bucket."""
    latency_ns: int
    per_byte_ns: float
    blocking: bool = False
    """Each all-reduce is waited for where it is issued."""

    def step_ns(self) -> float:
        return sum(end - start for start, end in self._played()[0]) / len(self.forward_ns)

    def records(self) -> list[Record]:
        steps, operations, waits = self._played()
        records = []
        for rank, (start, end) in enumerate(steps):
            spans = [
                Span("forward", start, start + self.forward_ns[rank]),
                Span("backward", start + self.forward_ns[rank], end - 1000),
                Span("optimizer", end - 1000, end),
            ]
            header = Header(rank, len(steps), "host", rank, 0, 10**18)
            # Two steps to warm up.
            early = [Step(number, number, number + 1) for number in range(2)]
            step = Step(2, start, end, tuple(spans), tuple(waits[rank]))
            records.append(Record(header, [*early, step], [Sample(2, (), tuple(operations[rank]))]))
        return records

    def _played(self) -> tuple[list[tuple[int, int]], list[list[Operation]], list[list[Wait]]]:
        ranks = range(len(self.forward_ns))
        now = [1000 + forward for forward in self.forward_ns]
        issued: list[list[int]] = []
        ended: list[int] = []
        waits: list[list[Wait]] = [[] for _ in ranks]
        free = 0
        for compute, nbytes in self.layers:
            now = [each + compute for each in now]
            issued.append(list(now))
            takes = round(self.latency_ns + 2 * (len(now) - 1) / len(now) * nbytes * self.per_byte_ns)
            free = max(free, *now) + takes
            ended.append(free)
            if self.blocking:
                for rank in ranks:
                    waits[rank].append(Wait(now[rank], free, "all_reduce", "world"))
                    now[rank] = free
        for end in ended:
            for rank in ranks:
                if end > now[rank]:
                    waits[rank].append(Wait(now[rank], end, "all_reduce", "world"))
                    now[rank] = end
        operations = [
            [
                Operation(
                    "all_reduce", "world", n, issued[n][rank], ended[n], self.layers[n][1], len(now), None, PURPOSE
                )
                for n in range(len(self.layers))
            ]
            for rank in ranks
        ]
        return [(1000, each + 1000) for each in now], operations, waits


def drawn(seed: int) -> World:
    random_ = random.Random(f"world {seed}")
    layers = [(random_.randrange(10**5, 10**7), random_.randrange(10**3, 10**7)) for _ in range(random_.randint(2, 12))]
    return World(
        tuple(random_.randrange(10**6, 2 * 10**7) for _ in range(random_.randint(2, 5))),
        tuple(layers),
        random_.randrange(0, 10**6),
        random_.choice([0.05, 1.0, 8.0]),
        random_.random() < 0.3,
    )


def takes(world: World) -> Callable[[Move], float]:
    return Wire(world.latency_ns, world.per_byte_ns).takes


@pytest.mark.parametrize("seed", range(60))
def test_another_link_takes_what_the_model_says(seed: int) -> None:
    """Twice, half and ten times the rate, and no latency: exact where the world keeps the model's rules."""
    world = drawn(seed)
    print(world)
    [model] = models(world.records())
    changed = [replace(world, per_byte_ns=world.per_byte_ns / factor) for factor in (1, 2, 0.5, 10)]
    for other in (*changed, replace(world, latency_ns=0)):
        assert run(model, takes(other)) == pytest.approx(other.step_ns(), rel=2e-3)


@pytest.mark.parametrize("seed", range(60))
def test_the_wire_is_found_or_bounded(seed: int) -> None:
    """Where operations are alone on the wire: exactly. Where they share it: what another link takes lies between what the two
    possible wires say."""
    world = drawn(seed)
    alone = replace(world, blocking=True)
    print(world)
    found = wires(models(alone.records()))
    if len(found) == 1:
        assert found[0].latency_ns == pytest.approx(world.latency_ns, rel=1e-3, abs=2)
        assert found[0].per_byte_ns == pytest.approx(world.per_byte_ns, rel=1e-3)
    [model] = models(world.records())
    for factor in (2, 0.5):
        other = replace(world, per_byte_ns=world.per_byte_ns / factor)
        told = [
            run(model, Wire(wire.latency_ns, wire.per_byte_ns / factor).takes)
            / run(model, wire.takes)
            * world.step_ns()
            for wire in wires([model])
        ]
        assert min(told) * 0.99 <= other.step_ns() <= max(told) * 1.01


@pytest.mark.parametrize("seed", range(60, 90))
def test_larger_buckets(seed: int) -> None:
    """Merged as DDP would: a bucket is full when it has so many bytes, and leaves with its last gradient."""
    world = replace(drawn(seed), blocking=False)
    print(world)
    least = 4_000_000
    layers: list[tuple[int, int]] = []
    compute = nbytes = 0
    for at, (each, more) in enumerate(world.layers):
        compute, nbytes = compute + each, nbytes + more
        if nbytes >= least or at + 1 == len(world.layers):
            layers.append((compute, nbytes))
            compute = nbytes = 0
    ranks = len(world.forward_ns)
    [model] = models(world.records())
    told = run(merged(model, least * 2 * (ranks - 1) / ranks, lambda move: True), takes(world))
    assert told == pytest.approx(replace(world, layers=tuple(layers)).step_ns(), rel=2e-3)


def test_without_a_straggler_all_take_what_the_median_takes() -> None:
    world = World((5_000_000, 5_000_000, 25_000_000), ((10**6, 10**6),) * 4, 10_000, 1.0)
    [model] = models(world.records())
    even = replace(world, forward_ns=(5_000_000,) * 3)
    assert run(evened(model), takes(world)) == pytest.approx(even.step_ns(), rel=1e-2)
    assert run(model, takes(world)) == pytest.approx(world.step_ns(), rel=1e-3)


def test_a_step_with_an_operation_that_one_rank_lacks_is_left_out() -> None:
    records = World((10**6, 10**6), ((10**6, 10**6),), 0, 1.0).records()
    records[1].samples[0] = replace(records[1].samples[0], operations=())
    assert models(records) == []


def test_an_end_that_was_noted_late_is_waited_for_all_the_same() -> None:
    """Ranks wait 680 ms for an operation whose end the backend's thread notes 4.5 ms later. Twice the link halves it."""
    world = World((10**7,) * 2, ((2 * 10**7, 10**6), (2 * 10**7, 10**7)), 0, 70.0)
    records = world.records()
    for record in records:
        [sample] = record.samples
        *others, last = sample.operations
        late = replace(last, ended_ns=last.ended_ns + 4_500_000)
        record.samples = [replace(sample, operations=(*others, late))]
    [model] = models(records)
    faster = replace(world, per_byte_ns=35.0)
    assert run(model, takes(faster)) == pytest.approx(faster.step_ns(), rel=1e-2)


@pytest.mark.parametrize("is_marked", [False, True])
def test_a_wait_is_not_for_what_ended_the_one_before(is_marked: bool) -> None:
    """The end of the first operation is noted as the rank already waits for the last one, whose end is noted late, too."""
    world = World((10**7,) * 2, ((2 * 10**7, 10**6), (2 * 10**7, 10**7)), 0, 70.0)
    records = world.records()
    for record in records:
        [sample] = record.samples
        first, last = sample.operations
        step = record.steps[-1]
        # After its first wait the rank works for 0.28 ms, and waits again.
        again_ns = first.ended_ns + 280_000
        copies = (first.ended_ns, again_ns)
        waits = (
            Wait(last.issued_ns, copies[0], "all_reduce", "world"),
            Wait(again_ns, last.ended_ns, "all_reduce", "world"),
        )
        record.steps[-1] = step._replace(waits=waits if is_marked else ())
        noted = (replace(first, ended_ns=again_ns + 20_000), replace(last, ended_ns=last.ended_ns + 2_150_000))
        busy = ((step.start_ns, last.issued_ns), copies, (last.ended_ns, step.end_ns))
        record.samples = [replace(sample, operations=noted, busy=busy)]
    [model] = models(records)
    assert {rank: sum(act.compute_ns for act in acts) for rank, acts in model.acts.items()} == dict.fromkeys(
        (0, 1), 50_281_000.0
    )
    faster = replace(world, per_byte_ns=35.0)
    assert run(model, takes(faster)) == pytest.approx(faster.step_ns(), rel=1e-2)


def test_flows_at_their_cap_leave_nothing_to_latency() -> None:
    """Periods that are alike do not tell latency from bytes; flows that always had something to send do: it was bytes."""
    world = World((10**6,) * 2, (*((10**6, 10**6),) * 3, (10**6, 5 * 10**5)), 0, 40.0)
    for flow, exact in ((25e6, True), (0, False)):
        found = predict(world.records(), Network(link_bytes_s=125e6, flow_bytes_s=flow, streams=1, backend="gloo"))
        [penstock] = [each for each in found if each.change == "the penstock backend"]
        faster = replace(world, per_byte_ns=1e9 / (0.95 * 125e6))
        assert (penstock.after_ns == pytest.approx(faster.step_ns(), rel=0.02)) == exact, penstock


def test_flows_that_were_idle_leave_so_much_to_latency() -> None:
    """Where periods are alike, latency takes no more of the time than the flows had nothing to send. A flow that is idle for less
    than a tenth counts as always busy: the end of each collective does that to it."""
    world = World((10**6,) * 2, (*((10**6, 10**6),) * 3, (10**6, 5 * 10**5)), 0, 40.0)
    found = models(world.records())
    moves, ns = (sum(getattr(period, name) for model in found for period in model.periods) for name in ("moves", "ns"))
    for idle in (0.0, 0.1, 0.3):
        plain, late = wires(found, 125e6, idle)
        assert plain.latency_ns == 0 and moves * late.latency_ns == pytest.approx(idle * ns)
        assert moves * late.latency_ns + sum(move.bytes for move in found[0].moves) * late.per_byte_ns == pytest.approx(
            ns
        )

    def larger(busy: float) -> Prediction:
        given = Network(link_bytes_s=125e6, flow_bytes_s=25e6, flow_busy=busy, streams=1, backend="gloo")
        return next(each for each in predict(world.records(), given) if each.change.startswith("buckets of 4 MiB"))

    assert larger(0.93) == larger(1.0)
    assert larger(0.7).after_ns < larger(0.85).after_ns < larger(1.0).after_ns
    assert larger(0.7).error > larger(1.0).error


def test_sends_of_different_pairs_do_not_take_turns() -> None:
    """A pipeline: 0 sends to 1 while 2 sends to 3, and each pair has its own wire."""
    records = []
    for rank in range(4):
        peer, is_send = rank ^ 1, rank % 2 == 0
        operation = Operation("send" if is_send else "recv", "world", 0, 1000, 5_001_000, 5_000_000, 4, peer)
        wait = Wait(1000, 5_001_000, operation.name, "world")
        steps = [Step(0, 0, 1), Step(1, 1, 2), Step(2, 1000, 6_001_000, (), (wait,))]
        records.append(Record(Header(rank, 4, "host", rank, 0, 10**18), steps, [Sample(2, (), (operation,))]))
    [model] = models(records)
    [wire, _] = wires([model])
    assert run(model, wire.takes) == pytest.approx(6_000_000, rel=1e-3)
    assert run(model, lambda move: wire.takes(move) / 2) == pytest.approx(3_500_000, rel=1e-3)


def test_predictions_are_what_the_changed_world_does() -> None:
    """Each change by itself, the best first, with the setting that makes it."""
    layers = (*((2_000_000, 1_000_000),) * 5, (2_000_000, 500_000))
    world = World((5_000_000,) * 4, layers, 400_000, 8.0, blocking=True)
    network = Network(link_bytes_s=5e8, flow_bytes_s=125e6 / 4, streams=4, backend="penstock")
    told = {each.change: each for each in predict(world.records(), network)}
    half = replace(world, layers=tuple((compute, nbytes // 2) for compute, nbytes in world.layers))
    expected = {
        # Of 8 ns a byte the link takes 2: the flows' cap stays.
        "twice the link": replace(world, per_byte_ns=7.0),
        "gradients as float16 on the wire": half,
        "gradients summed by an aggregator": replace(world, per_byte_ns=8.0 / 1.5),
        "23 streams": replace(world, per_byte_ns=2.0 / 0.95),
        "no straggler": world,
    }
    for change, changed in expected.items():
        assert told[change].after_ns == pytest.approx(changed.step_ns(), rel=5e-3), change
        assert told[change].before_ns == pytest.approx(world.step_ns(), rel=1e-6)
        assert told[change].error < 0.01
    assert told["23 streams"].how == "PENSTOCK_STREAMS=23" and told["23 streams"].settings == {"PENSTOCK_STREAMS": "23"}
    assert "1000 Mbit/s on the wire, 400 us an operation" in told["twice the link"].because


def test_gloo_is_told_what_penstock_would_take() -> None:
    """Where it leaves most of the link unused, and only there."""
    world = World((5_000_000,) * 2, (*((2_000_000, 1_000_000),) * 5, (2_000_000, 9_000)), 0, 40.0, blocking=True)
    slow = predict(world.records(), Network(link_bytes_s=125e6, backend="gloo"))
    [told] = [each for each in slow if each.change == "the penstock backend"]
    assert told.after_ns == pytest.approx(replace(world, per_byte_ns=8.0 / 0.95).step_ns(), rel=5e-3)
    full = predict(world.records(), Network(link_bytes_s=25e6, backend="gloo"))
    assert "the penstock backend" not in [each.change for each in full]


def test_buckets_are_predicted_of_sums_alone() -> None:
    """FSDP's gathers serve data parallelism too, and no bucket size of DDP's touches them."""
    records = World((10**6,) * 2, ((10**6, 10**5),) * 4, 0, 8.0).records()
    assert any("buckets" in each.change for each in predict(records))
    for record in records:
        [sample] = record.samples
        gathers = tuple(replace(one, name="all_gather") for one in sample.operations)
        record.samples[:] = [replace(sample, operations=gathers)]
    told = {each.change: each for each in predict(records)}
    assert told["buckets of 25 MiB and more"].gain == pytest.approx(1)


def test_nothing_is_predicted_without_samples() -> None:
    records = World((10**6,) * 2, ((10**6, 10**6),), 0, 1.0).records()
    for record in records:
        record.samples.clear()
    assert predict(records) == [] and predict([]) == []


def test_larger_buckets_where_each_is_waited_for() -> None:
    """One operation a parameter, each waited for where it is issued, is one bucket then, and is waited for once."""
    world = World((5_000_000,) * 2, ((2_000_000, 10_000),) * 10, 1_000_000, 1.0, blocking=True)
    [model] = models(world.records())
    one = replace(world, layers=((20_000_000, 100_000),))
    assert run(merged(model, 1e9, lambda move: True), takes(world)) == pytest.approx(one.step_ns(), rel=2e-3)
    told = {each.change: each for each in predict(world.records())}["buckets of 4 MiB and more"]
    assert one.step_ns() * 0.99 < told.after_ns < told.before_ns


def test_a_model_in_which_ranks_wait_for_each_other_takes_for_ever() -> None:
    """It tells nothing, rather than that the step would end where they stand."""
    [model] = models(World((10**6,) * 2, ((10**6, 10**6),) * 2, 0, 1.0).records())
    first, second = (next(act for act in model.acts[0] if act.is_issue and act.move == at) for at in (0, 1))
    wait = first._replace(is_issue=False, compute_ns=0.0)
    acts = {0: (wait, first, second), 1: model.acts[1]}
    assert run(replace(model, acts=acts), lambda _: 1.0) == float("inf")


def test_ten_thousand_operations_in_a_step() -> None:
    """Take less than ten times what a thousand take, and some: no part is quadratic."""

    def took_s(count: int) -> float:
        records = World((10**6,) * 2, ((10**4, 10**4),) * count, 1000, 1.0, blocking=True).records()
        began = time.process_time()
        [model] = models(records)
        assert run(model, lambda _: 1000.0) > 0
        return time.process_time() - began

    few, many = min(took_s(1_000) for _ in range(3)), took_s(10_000)
    assert many < 30 * few, (few, many)


def test_what_cannot_be_gained_is_not_told() -> None:
    """Gradients that have two bytes already, what FSDP gathers and scatters, buckets smaller than they are, and more streams than
    there may be."""
    layers = (*((2_000_000, 9_000_000),) * 5, (2_000_000, 500_000))
    world = World((5_000_000,) * 4, layers, 400_000, 8.0, blocking=True)
    plain = {each.change: each for each in predict(world.records())}
    assert (
        plain["gradients as float16 on the wire"].gain > 1.3 and plain["gradients summed by an aggregator"].gain > 1.2
    )
    assert "buckets of 4 MiB and more" not in plain and "buckets of 25 MiB and more" in plain

    def other(**changes: Any) -> dict[str, Prediction]:
        records = world.records()
        for record in records:
            [sample] = record.samples
            operations = tuple(replace(one, **changes) for one in sample.operations)
            record.samples[0] = replace(sample, operations=operations)
        return {each.change: each for each in predict(records)}

    for changes in ({"element_bytes": 2}, {"name": "all_gather"}, {"name": "reduce_scatter"}):
        assert other(**changes)["gradients as float16 on the wire"].gain == pytest.approx(1)
    assert (
        other(element_bytes=8)["gradients as float16 on the wire"].gain > plain["gradients as float16 on the wire"].gain
    )
    assert "gradients summed by an aggregator" not in other(name="all_gather")
    many = predict(world.records(), Network(link_bytes_s=5e9, flow_bytes_s=125e6 / 4, streams=4, backend="penstock"))
    assert "64 streams" in [each.change for each in many]


PURPOSE = "data-parallel sync"
