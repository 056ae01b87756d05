"""What changes would bring, against drawn worlds whose rules are known: shared wires, hosts with several ranks, pipelines."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence

import pytest

from penstock.profiling.advice import advise
from penstock.profiling.breakdown import Share
from penstock.profiling.divide import divide
from penstock.profiling.predict import BACKEND_UNSURE, INTERLEAVED_UNSURE, Network, Prediction, predict
from penstock.profiling.record import Event, Header, Operation, Record, Sample, Span, Step, Wait
from penstock.profiling.replay import Wire, merged, models, run, wires
from penstock.profiling.schedules import gpipe, interleaved, one_forward_one_backward
from profiles import data_parallel

SYNC = "data-parallel sync"


# ------------------------------------------------------------------------------------------------- what shares the wire


def shared(ends: Sequence[int], *, step_ns: int, nbytes: int = 1_000_000) -> list[Record]:
    """Two ranks that issue a bucket each ms, then wait, without a mark, until all have ended."""
    records = []
    for rank in range(2):
        issued = [1_000_000 * (at + 1) for at in range(len(ends))]
        operations = tuple(
            Operation("all_reduce", "world", at, issued[at], end, nbytes, 2, None, SYNC) for at, end in enumerate(ends)
        )
        until = issued[-1] + 100_000
        spans = (Span("forward", 0, 500_000), Span("backward", 500_000, max(ends)))
        steps = [Step(0, 0, 1), Step(1, 1, 2), Step(2, 0, step_ns, spans)]
        busy = ((0, until), (max(ends), step_ns))
        records.append(Record(Header(rank, 2, f"h{rank}", rank, 0, 10**18), steps, [Sample(2, busy, operations)]))
    return records


@pytest.mark.parametrize("seed", range(20))
def test_a_wait_is_for_all_that_ended_in_it(seed: int) -> None:
    """Streams carry several buckets at a time, which end in any order: whichever was the last, the step ends when all bytes are
    there, now and with another link."""
    draw = random.Random(f"shared {seed}")
    count = draw.randint(3, 12)
    per_byte_ns = draw.uniform(5, 50)
    # The wire carries from the first issue on, without a pause.
    last = round(1_000_000 + count * 1_000_000 * per_byte_ns)
    ends = [last - draw.randrange(round(0.5 * (last - 1_000_000 * count))) for _ in range(count)]
    ends[draw.randrange(count)] = last
    print(seed, ends)
    [model] = models(shared(ends, step_ns=last + 300_000))
    for factor in (1.0, 0.5):
        finished = max(1_000_000 + count * 1_000_000 * per_byte_ns * factor, 1_000_000.0 * count + 100_000)
        assert run(model, Wire(0.0, per_byte_ns * factor).takes) == pytest.approx(finished + 300_000, rel=5e-3)
    one = run(merged(model, 1e9, lambda move: True), Wire(0.0, per_byte_ns).takes)
    assert one == pytest.approx(count * 1_000_000 * (1 + per_byte_ns) + 300_000, rel=5e-3)


def test_what_the_profiler_takes_is_left_out() -> None:
    """Steps in which torch's profiler stops are longer by that, which is no part of what is predicted."""
    ends = [round(2e6 + 40e6)]
    records = shared(ends, step_ns=ends[0] + 1_000_000, nbytes=4_000_000)
    for record in records:
        last = record.steps[-1]
        stop = Step(
            3, last.end_ns, last.end_ns + 30_000_000, (Span("profiler", last.end_ns, last.end_ns + 30_000_000),)
        )
        record.steps.append(stop)
    breakdown = divide(records)
    found = {each.change: each for each in advise(records, breakdown, everything=True).predictions}["twice the link"]
    step_ns = breakdown.shares[0].step_ns - 15_000_000
    assert breakdown.shares[0].work["profiler"] == pytest.approx(15_000_000)
    told = {each.change: each for each in predict(records)}["twice the link"]
    assert found.before_ns == pytest.approx(step_ns)
    assert found.after_ns == pytest.approx(step_ns / told.gain)


def alike(
    lengths: Sequence[int], *, thread_ns: int = 0, sampled_thread_ns: int = 0, compute_ns: int = 10_000_000
) -> list[Record]:
    """Two ranks: a sampled step that computes, waits 40 ms for a bucket of 4 MB, and has 1 ms of optimizer behind it; and plain
    steps of these lengths."""
    records = []
    for rank in range(2):
        end = compute_ns + 40_000_000
        operation = Operation("all_reduce", "world", 0, compute_ns, end, 4_000_000, 2, None, SYNC)
        spans = (Span("backward", 0, end), Span("optimizer", end, end + 1_000_000))
        at = end + 1_000_000
        steps = [Step(0, 0, 1), Step(1, 1, 2), Step(2, 0, at, spans, thread_ns=sampled_thread_ns)]
        steps.append(Step(3, at, at + 60_000_000, thread_ns=10**9))  # in which the profiler stops
        at += 60_000_000
        for length in lengths:
            steps.append(Step(len(steps), at, at + length, thread_ns=thread_ns))
            at += length
        busy = ((0, compute_ns), (end, end + 1_000_000))
        records.append(Record(Header(rank, 2, f"h{rank}", rank, 0, 10**18), steps, [Sample(2, busy, (operation,))]))
    return records


def test_computing_is_as_long_as_without_the_profiler() -> None:
    """Which takes processor time in a sampled step: 11 ms of computing there are 8 in a plain one, with twice the link, too."""
    records = alike([48_000_000] * 6, thread_ns=8_000_000, sampled_thread_ns=11_000_000)
    found = told(records, Network(flow_bytes_s=1.0))
    assert found["twice the link"].before_ns == pytest.approx(48_000_000)
    assert found["twice the link"].after_ns == pytest.approx(28_000_000, rel=1e-3)
    assert found["twice the link"].error < 0.01


def test_what_chance_explains_is_not_carried_over() -> None:
    """Steps of 51 ms, in the model, are 56 in the mean: if they differ by much, that is chance; if all are, it is not."""
    even = told(alike([56_000_000] * 8), Network(flow_bytes_s=1.0))["twice the link"]
    assert even.after_ns == pytest.approx(31_000_000 * 56 / 51, rel=1e-3)
    wild = told(alike([36_000_000, 76_000_000] * 4), Network(flow_bytes_s=1.0))["twice the link"]
    assert wild.before_ns == pytest.approx(56_000_000)
    assert wild.after_ns == pytest.approx(31_000_000, rel=1e-3)
    assert wild.error > even.error + 0.1


@pytest.mark.parametrize("phase", ["evaluation", "checkpoint", ""])
def test_what_few_steps_have_stays(phase: str) -> None:
    """A step of 51 ms in twenty has 1 s more: an evaluation of one rank, which the other waits for, or something unknown. The
    mean step is 101 ms, and with twice the link 81; none of those 50 is chance, or gone without stragglers."""
    records = alike([51_000_000] * 19 + [1_051_000_000])
    if phase:
        last = records[0].steps[-1]
        records[0].steps[-1] = last._replace(spans=(Span(phase, last.start_ns, last.start_ns + 1_000_000_000),))
    found = told(records, Network(flow_bytes_s=1.0))
    twice = found["twice the link"]
    assert twice.before_ns == pytest.approx(101_000_000)
    assert twice.after_ns == pytest.approx(81_000_000, rel=1e-3)
    assert twice.error < 0.01
    assert found["no straggler"].gain == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("lengths", [[36_000_000, 76_000_000], [46_000_000], [56_000_000], [20_000_000, 70_000_000]])
def test_what_changes_nothing_gains_nothing(lengths: list[int]) -> None:
    """However far the model, of 51 ms, is from the mean step, by chance or not: gradients of two bytes stay as they are."""
    records = alike(lengths * 4)
    for record in records:
        [sample] = record.samples
        halves = tuple(dataclasses.replace(one, element_bytes=2) for one in sample.operations)
        record.samples[0] = dataclasses.replace(sample, operations=halves)
    found = told(records, Network(flow_bytes_s=1.0))["gradients as float16 on the wire"]
    assert found.gain == pytest.approx(1) and found.error > abs(51_000_000 / found.before_ns - 1) / 2
    assert "float16" not in " ".join(each.change for each in advise(records, divide(records)).predictions)


def test_without_ddp_no_setting_of_it_is_told() -> None:
    """A script that reduces by hand has no place for buckets or a hook; and of sizes that hold all gradients one is told."""
    records = launching(10)
    ours = [each for each in predict(records) if {"bucket_cap_mb", "comm_hook"} & each.settings.keys()]
    assert len(ours) > 1
    shown = [each.change for each in advise(records, divide(records)).predictions if "buckets" in each.change]
    assert shown == ["buckets of 4 MiB and more", "buckets of 25 MiB and more"]
    records[0].events.append(Event(0, "no ddp"))
    assert not any(each.settings for each in predict(records) if each.change in [one.change for one in ours])


def launching(count: int) -> list[Record]:
    """Two ranks that compute a ms before each bucket, and need half a ms to launch it, while the others move; then they wait."""
    records = []
    for rank in range(2):
        busy, issued, at = [], [], 0
        for _ in range(count):
            busy.append((at, at + 1_000_000))
            issued.append(at + 1_000_000)
            at += 1_500_000
        end = issued[0] + count * 8_000_000
        operations = tuple(
            Operation("all_reduce", "world", number, start, end - number, 1_000_000, 2, None, SYNC)
            for number, start in enumerate(issued)
        )
        spans = (Span("backward", 0, end), Span("optimizer", end, end + 1_000_000))
        steps = [Step(0, 0, 1), Step(1, 1, 2), Step(2, 0, end + 1_000_000, spans)]
        sample = Sample(2, (*busy, (end, end + 1_000_000)), operations)
        records.append(Record(Header(rank, 2, f"h{rank}", rank, 0, 10**18), steps, [sample]))
    return records


def test_one_bucket_is_launched_once() -> None:
    """What ten launches take goes with nine of them; and no launch is a wait, though an operation may end in it."""
    [model] = models(launching(10))
    assert sum(act.compute_ns for act in model.acts[0]) == pytest.approx(10 * 1_000_000 + 9 * 500_000 + 1_000_000)
    one = run(merged(model, 1e9, lambda move: True), Wire(0.0, 8.0).takes)
    assert one == pytest.approx(10 * 1_000_000 + 80_000_000 + 1_000_000)
    records = launching(10)
    for record in records:
        [sample] = record.samples
        early = dataclasses.replace(sample.operations[0], ended_ns=4_200_000)  # in the third launch
        record.samples[0] = dataclasses.replace(sample, operations=(early, *sample.operations[1:]))
    [model] = models(records)
    acts = model.acts[0]
    assert [act.is_issue for act in acts if act.move is not None][:10] == [True] * 10


def test_a_pass_waits_for_what_it_has_launched() -> None:
    """A send of before that ends while the thread has lost its processor in a backward pass is not what it waits for."""
    records = launching(3)
    for rank, record in enumerate(records):
        [sample] = record.samples
        step = record.steps[-1]
        # A pass of its own before, with a pause of 2 ms in which the send ends.
        spans = (Span("forward", 0, 5_000_000), Span("backward", 5_000_000, 12_000_000))
        busy = ((0, 8_000_000), (10_000_000, 12_000_000), (20_000_000, step.end_ns))
        name, peer = ("send", 1) if rank == 0 else ("recv", 0)
        send = Operation(name, "pp", 0, 1_000_000, 9_000_000, 1000, 2, peer, "pipeline send")
        record.steps[-1] = step._replace(spans=spans)
        record.samples[0] = dataclasses.replace(sample, busy=busy, operations=(send,))
    [model] = models(records)
    assert [act.is_issue for act in model.acts[0] if act.move is not None] == [True]


def test_converting_gradients_costs_what_was_measured() -> None:
    """Before a bucket is sent, and after it has come; of the slowest rank. On a device, what the host needs says nothing."""
    records = alike([], compute_ns=10_000_000)
    [plain] = [each for each in predict(records, Network(flow_bytes_s=1.0)) if "float16" in each.change]
    assert plain.after_ns == pytest.approx(31_000_000, rel=1e-3)
    for rank, record in enumerate(records):
        text = f"{0.25 * (rank + 1):.3f} ns a byte before it is sent, {0.125 * (rank + 1):.3f} after"
        record.events.append(Event(0, "float16", text))
    [found] = [each for each in predict(records, Network(flow_bytes_s=1.0)) if "float16" in each.change]
    assert found.after_ns == pytest.approx(31_000_000 + 0.75 * 4_000_000, rel=1e-3)
    assert "converting takes 0.75 ns a byte" in found.because
    for record in records:
        record.header.about["device"] = "cuda"
    [on_device] = [each for each in predict(records, Network(flow_bytes_s=1.0)) if "float16" in each.change]
    assert on_device.after_ns == plain.after_ns


# ------------------------------------------------------------------------------------------------------------- hosts


def grouped(
    hosts: Sequence[str], *, across_ns: float, within_ns: float | None, nbytes: int = 8_000_000, buckets: int = 4
) -> list[Record]:
    """Ranks that reduce within their host (unless that is None) and then among all, one operation at a time, each waited for.
    Times are per byte that a rank sends by the usual algorithms."""
    world = len(hosts)
    records = [Record(Header(rank, world, hosts[rank], rank, 0, 10**18)) for rank in range(world)]
    now = 1_000_000
    waits: list[list[Wait]] = [[] for _ in hosts]
    operations: list[list[Operation]] = [[] for _ in hosts]
    for at in range(buckets):
        size = nbytes * (at + 1)
        for group, per_byte_ns in ((True, within_ns), (False, across_ns)):
            if per_byte_ns is None:
                continue
            ends = now
            for rank, host in enumerate(hosts):
                ranks = hosts.count(host) if group else world
                if ranks < 2:
                    continue
                end = round(now + 2 * (ranks - 1) / ranks * size * per_byte_ns)
                name = host if group else "world"
                operations[rank].append(Operation("all_reduce", name, at, now, end, size, ranks, None, SYNC))
                waits[rank].append(Wait(now, end, "all_reduce", name))
                ends = max(ends, end)
            now = ends + 1_000_000
    for rank, record in enumerate(records):
        record.steps += [Step(0, 0, 1), Step(1, 1, 2), Step(2, 0, now, (), tuple(waits[rank]))]
        record.samples.append(Sample(2, (), tuple(operations[rank])))
    return records


def told(records: list[Record], network: Network) -> dict[str, Prediction]:
    return {each.change: each for each in predict(records, network)}


def test_ranks_of_one_host_have_no_link_to_double() -> None:
    """Neither is there anything for an aggregator to save; with a second host there is."""
    records = grouped(["a"] * 4, across_ns=1.0, within_ns=1.0)
    one = told(records, Network(hosts=dict.fromkeys(range(4), "a")))
    assert "gradients as float16 on the wire" in one
    assert not {"twice the link", "gradients summed by an aggregator"} & one.keys()
    two = told(records, Network(hosts={0: "a", 1: "a", 2: "b", 3: "b"}, link_bytes_s=1e9))
    assert {"twice the link", "gradients summed by an aggregator"} <= two.keys()
    advice = advise(records, divide(records), everything=True)
    assert "twice the link" not in [each.change for each in advice.predictions]


@pytest.mark.parametrize("seed", range(20))
def test_a_link_leaves_what_stays_within_hosts(seed: int) -> None:
    """The two have rates of their own, and twice the link halves one of them."""
    draw = random.Random(f"hosts {seed}")
    across, within = draw.uniform(1, 20), draw.uniform(0.1, 20)
    hosts = draw.choice([["a", "a", "b", "b"], ["a", "b", "b"], ["a", "a", "b", "b", "c"]])
    print(seed, hosts, across, within)
    records = grouped(hosts, across_ns=across, within_ns=within)
    named = dict(enumerate(hosts))
    [wire] = wires(models(records, named))
    assert wire.per_byte_ns == pytest.approx(across, rel=1e-3) and wire.inside is not None
    assert wire.inside[1] == pytest.approx(within, rel=1e-3)
    faster = grouped(hosts, across_ns=across / 2, within_ns=within)
    want = sum(record.steps[-1].end_ns for record in faster) / len(faster)
    assert told(records, Network(hosts=named))["twice the link"].after_ns == pytest.approx(want, rel=2e-3)


def test_host_by_host_is_told_from_what_both_take() -> None:
    """Four ranks on two hosts in a ring send 1.5 B over each host's link; host by host that is B over the link and B within. What
    a host sends is counted, not guessed: where it sends B already, nothing is told; nor where nothing tells what hosts take
    within."""
    hosts = dict(enumerate(["a", "a", "b", "b"]))
    sizes = [8_000_000 * (at + 1) for at in range(4)]
    records = grouped(list(hosts.values()), across_ns=8.0, within_ns=0.5)
    network = Network(hosts=hosts, link_bytes_s=125e6, crossing_bytes=1.5 * sum(sizes), backend="penstock")
    found = told(records, network)["gradients summed host by host"]
    # Of a bucket of B the sum took 1.5 B x 8 ns, and takes B x 8 ns and B x 0.5 ns.
    want = records[0].steps[-1].end_ns - sum(1.5 * each * 8.0 - each * 8.5 for each in sizes)
    assert found.after_ns == pytest.approx(want, rel=5e-3)
    assert found.settings == {"PENSTOCK_ALGORITHM": "hierarchical"}
    done = dataclasses.replace(network, crossing_bytes=1.0 * sum(sizes))
    assert "gradients summed host by host" not in told(records, done)
    mixed = grouped(list(hosts.values()), across_ns=8.0, within_ns=0.5)
    for record in mixed:
        [sample] = record.samples
        gathered = dataclasses.replace(sample.operations[-1], name="all_gather")
        record.samples[0] = dataclasses.replace(sample, operations=(*sample.operations[:-1], gathered))
    assert "gradients summed host by host" not in told(mixed, network)
    for record in records:
        [sample] = record.samples
        kept = tuple(one for one in sample.operations if one.group == "world")
        record.samples[0] = dataclasses.replace(sample, operations=kept)
    assert "gradients summed host by host" not in told(records, network)


@pytest.mark.parametrize("share", [0.25, 0.9])
def test_host_by_host_instead_of_gloo_is_told_where_nothing_within_hosts_was_seen(share: float) -> None:
    """A byte within hosts then takes two passes over memory; penstock uses 0.95 of the link; and it is one change, told once."""
    hosts = dict(enumerate(["a", "a", "b", "b"]))
    sizes = [8_000_000 * (at + 1) for at in range(4)]
    records = grouped(list(hosts.values()), across_ns=8.0, within_ns=None)
    for record in records:
        record.events.append(Event(0, "float16", "0.40 ns a byte before it is sent, 0.25 after"))
    network = Network(
        hosts=hosts, link_bytes_s=125e6 / share, crossing_bytes=1.5 * sum(sizes), backend="gloo", streams=1
    )
    found = told(records, network)
    assert "the penstock backend" not in found
    by_host = found["gradients summed host by host"]
    faster = 0.95 / share
    want = records[0].steps[-1].end_ns - sum(1.5 * each * 8.0 - each * (8.0 / faster + 2 * 0.25) for each in sizes)
    assert by_host.after_ns == pytest.approx(want, rel=5e-3)
    assert by_host.settings == {"backend": "penstock"}
    assert BACKEND_UNSURE < by_host.error < BACKEND_UNSURE + 0.25  # what memory may take beyond that


def test_an_aggregator_takes_what_the_planner_says() -> None:
    """Each rank pushes B once over its host's link, which ranks share; where they do and nobody knows it, nothing is told."""
    hosts = dict(enumerate(["a", "a", "b", "b"]))
    records = grouped(list(hosts.values()), across_ns=8.0, within_ns=0.5)
    sizes = [8_000_000 * (at + 1) for at in range(4)]
    # On a link of 250 MB/s, which a host's two ranks share.
    found = told(records, Network(hosts=hosts, link_bytes_s=250e6))["gradients summed by an aggregator"]
    want = records[0].steps[-1].end_ns - sum(1.5 * each * 8.0 - each * 8.0 for each in sizes)
    assert found.after_ns == pytest.approx(want, rel=5e-3)
    assert "carries 10 Gbit/s" in found.because and "would be 400 Mbit/s" in found.because
    assert "gradients summed by an aggregator" not in told(records, Network(hosts=hosts))
    alone = told(records, Network())["gradients summed by an aggregator"]
    assert alone.gain > 1.1


# ----------------------------------------------------------------------------------------------------------- pipelines


@dataclasses.dataclass(frozen=True)
class Stages:
    """A pipeline that is played by its dependences alone."""

    forward_ns: tuple[int, ...]
    backward_ns: tuple[int, ...]
    batches: int
    wire_ns: int
    optimizer_ns: int = 2_000_000

    def records(self, order: str) -> list[Record]:
        """The last of some steps, which ranks begin as soon as they can."""
        count = len(self.forward_ns)
        now = [1_000_000] * count
        for _ in range(4):
            began = list(now)
            spans, waits, operations = self._step(order, now)
        records = []
        for rank in range(count):
            steps = [Step(0, 0, 1), Step(1, 1, 2), Step(2, began[rank], now[rank], spans[rank], waits[rank])]
            records.append(Record(Header(rank, count, "h", rank, 0, 10**18), steps, [Sample(2, (), operations[rank])]))
        return records

    def _step(
        self, order: str, now: list[int]
    ) -> tuple[list[tuple[Span, ...]], list[tuple[Wait, ...]], list[tuple[Operation, ...]]]:
        count = len(self.forward_ns)
        program = [list(self.program(order, at)) for at in range(count)]
        done: dict[tuple[bool, int, int], int] = {}
        spans: list[list[Span]] = [[] for _ in range(count)]
        waits: list[list[Wait]] = [[] for _ in range(count)]
        operations: list[list[Operation]] = [[] for _ in range(count)]
        at = [0] * count
        while any(at[rank] < len(program[rank]) for rank in range(count)):
            for rank in range(count):
                while at[rank] < len(program[rank]):
                    is_forward, batch = program[rank][at[rank]]
                    source = rank - 1 if is_forward else rank + 1
                    if 0 <= source < count:
                        sent = done.get((is_forward, batch, source))
                        if sent is None:
                            break
                        # The bytes go once both are there; the sender does not wait.
                        end = max(sent, now[rank]) + self.wire_ns
                        towards = "pipeline forward recv" if is_forward else "pipeline backward recv"
                        number = sum(one.name == "recv" and one.peer == source for one in operations[rank])
                        receive = Operation("recv", "pp", number, now[rank], end, 1000, 2, source, towards)
                        send = Operation("send", "pp", number, sent, end, 1000, 2, rank, "pipeline send")
                        operations[rank].append(receive)
                        operations[source].append(send)
                        waits[rank].append(Wait(now[rank], end, "recv", "pp"))
                        now[rank] = end
                    took = (self.forward_ns if is_forward else self.backward_ns)[rank]
                    phase, began = "forward" if is_forward else "backward", now[rank]
                    if is_forward and spans[rank] and spans[rank][-1].phase == "forward":
                        # As the marks have it: nothing but waits lies between.
                        began = spans[rank].pop().start_ns
                    now[rank] += took
                    spans[rank].append(Span(phase, began, now[rank]))
                    done[is_forward, batch, rank] = now[rank]
                    at[rank] += 1
        for rank in range(count):
            spans[rank].append(Span("optimizer", now[rank], now[rank] + self.optimizer_ns))
            now[rank] += self.optimizer_ns
        return [tuple(each) for each in spans], [tuple(each) for each in waits], [tuple(each) for each in operations]

    def program(self, order: str, at: int) -> Iterator[tuple[bool, int]]:
        m, ahead = self.batches, min(len(self.forward_ns) - at - 1, self.batches)
        if order == "gpipe":
            ahead = m
        if order == "eager":
            ahead = min(ahead + 1, m)
        for batch in range(ahead):
            yield True, batch
        for batch in range(m - ahead):
            yield True, batch + ahead
            yield False, batch
        for batch in range(m - ahead, m):
            yield False, batch

    def step_ns(self, order: str) -> float:
        records = self.records(order)
        return sum(record.steps[-1].end_ns - record.steps[-1].start_ns for record in records) / len(records)


@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [2, 4])
def test_schedules_have_the_bubble_that_theory_says(order: str, stages: int) -> None:
    """Of equal stages and a wire that takes nothing: (m + (p - 1) / v) (f + b) with v stages a rank."""
    m, f, b = 2 * stages, 3_000_000, 5_000_000
    made = Stages((f,) * stages, (b,) * stages, m, 1, optimizer_ns=0)
    found = told(made.records(order), Network())
    now = (m + stages - 1) * (f + b)
    assert made.step_ns(order) == pytest.approx(now, rel=1e-3)
    assert ("one forward, one backward" in found) == (order == "gpipe")
    assert found["no straggler"].gain == pytest.approx(1.0, abs=1e-3)
    shorter = found["an interleaved schedule"]
    assert shorter.after_ns == pytest.approx((m + (stages - 1) / 2) * (f + b), rel=0.01)
    assert 0 <= shorter.error - INTERLEAVED_UNSURE < 0.01


@pytest.mark.parametrize("seed", range(20))
def test_other_schedules_of_unequal_stages(seed: int) -> None:
    """From GPipe to one forward, one backward, as the same stages take with it."""
    draw = random.Random(f"stages {seed}")
    count = draw.randint(2, 5)
    made = Stages(
        tuple(draw.randrange(10**6, 10**7) for _ in range(count)),
        tuple(draw.randrange(10**6, 2 * 10**7) for _ in range(count)),
        draw.randint(2, 9),
        draw.choice([1, 10**5, 10**6]),
    )
    print(seed, made)
    found = told(made.records("gpipe"), Network())
    assert found["one forward, one backward"].after_ns == pytest.approx(made.step_ns("1f1b"), rel=0.02)
    assert ("an interleaved schedule" in found) == (made.batches % count == 0)


def test_of_a_schedule_that_is_not_known_nothing_is_told() -> None:
    """Such as one that is a micro-batch further ahead; nor of ranks that are no pipeline."""
    made = Stages((3_000_000,) * 3, (4_000_000,) * 3, 6, 100_000)
    assert "an interleaved schedule" in told(made.records("gpipe"), Network())
    assert "an interleaved schedule" not in told(made.records("eager"), Network())
    plain = shared([50_000_000], step_ns=60_000_000)
    assert "an interleaved schedule" not in told(plain, Network())


@pytest.mark.parametrize(("ranks", "stages", "batches"), [(2, 2, 4), (4, 2, 8), (3, 3, 6)])
def test_interleaved_passes_come_once_and_in_order(ranks: int, stages: int, batches: int) -> None:
    """Each rank takes each micro-batch through each of its stages once in each direction, forward first."""
    for at in range(ranks):
        turns = list(interleaved(stages)(at, ranks, batches))
        assert len(turns) == len(set(turns)) == 2 * batches * stages
        where = {turn: number for number, turn in enumerate(turns)}
        for turn in turns:
            assert where[turn._replace(is_forward=True)] <= where[turn._replace(is_forward=False)]
    for order in (gpipe, one_forward_one_backward):
        assert sorted(order(0, ranks, batches)) == sorted(turn for turn in interleaved(1)(0, ranks, batches))


@pytest.mark.parametrize("waited_ms", [0.5, 2.0, 200.0])
def test_without_a_straggler_no_more_is_gained_than_is_waited(waited_ms: float) -> None:
    """A rank is 30 ms late in the samples, by chance, and in the mean of all steps the other waits for less."""
    records = data_parallel(2, 12, late_ns={1: 30_000_000})
    breakdown = divide(records)

    def waiting(share: Share) -> Share:
        moving = {
            purpose: dataclasses.replace(one, waited_for=dict.fromkeys(one.waited_for, waited_ms * 1000000.0))
            for purpose, one in share.communication.items()
        }
        return dataclasses.replace(share, communication=moving)

    fewer = dataclasses.replace(breakdown, shares=tuple(map(waiting, breakdown.shares)))
    [found] = [each for each in advise(records, fewer, everything=True).predictions if each.against == "straggler"]
    assert found.before_ns - found.after_ns == pytest.approx(min(waited_ms, 30) * 1e6, rel=0.02)
