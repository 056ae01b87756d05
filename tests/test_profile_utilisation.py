"""Counters as rates: on one clock, beside their limits; drops, and what explains them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import planted_records
from penstock.profiling import utilisation
from penstock.profiling.breakdown import Breakdown
from penstock.profiling.readers import load
from penstock.profiling.record import Header, Readings, Record, Span, Step, line
from penstock.profiling.utilisation import Host

SECOND = 1_000_000_000


@pytest.mark.parametrize("seed", range(20))
def test_what_is_inside_an_interval_is_found_by_halves(seed: int) -> None:
    """As one finds it by looking at every piece."""
    given = random.Random(seed)
    moments = sorted(given.sample(range(1000), 2 * given.randint(0, 40)))
    pieces = [(a, b, None) for a, b in zip(moments[::2], moments[1::2], strict=True)]
    for _ in range(50):
        start, end = sorted(given.sample(range(-50, 1050), 2))
        expected = sum(max(0, min(b, end) - max(a, start)) for a, b, _ in pieces)
        assert utilisation._inside(pieces, (start, end)) == expected


def test_a_counter_grows_between_any_two_moments() -> None:
    """Evenly between readings, not at all outside; one that was set back goes on; a clock that stands still is left out."""
    host = counted({0: 100, 10: 200, 20: 50, 30: 150})
    counter = host.counters["nic.eth0.tx_bytes"]
    assert counter.totals == (0, 100, 150, 250)
    assert counter.grown(0, 5 * SECOND) == 50
    assert counter.grown(-5 * SECOND, 100 * SECOND) == 250
    assert counter.grown(5 * SECOND, 15 * SECOND) == 75
    host.record.readings.insert(2, Readings(10 * SECOND, {"nic.eth0.tx_bytes": 999}))
    assert Host(host.record).counters["nic.eth0.tx_bytes"].totals == (0, 100, 150, 250)
    assert "nic.eth0.tx_bytes" not in counted({0: 1}).counters
    assert counted({0: 1}).grown("nic.eth0.tx_bytes", 0, SECOND) == 0


def test_the_tightest_limit_counts_and_its_source_is_named() -> None:
    """A shaper below the interface's speed; the speed below a shaper; the highest rate where nothing is known."""
    assert counted({0: 0, 10: 1000, 20: 1500}).limit("eth0", "tx") == utilisation.Limit(100, "highest")
    host = counted({0: 0, 10: 1000}, **{"nic.eth0.speed_bytes_per_s": 500, "nic.eth0.shaped_bytes_per_s": 200})
    assert host.limit("eth0", "tx") == utilisation.Limit(200, "shaper")
    host = counted({0: 0, 10: 1000}, **{"nic.eth0.speed_bytes_per_s": 500, "nic.eth0.shaped_bytes_per_s": 900})
    assert host.limit("eth0", "rx") == utilisation.Limit(500, "speed")
    assert host.limit("eth1", "tx") is None


def test_what_somebody_knows_of_the_links_is_a_limit_as_others() -> None:
    """Of each interface, of names with dots as well, and only where it is the tightest."""
    for name, speed, want in [
        ("eth0", None, utilisation.Limit(300, "given")),
        ("eth0.100", 500, utilisation.Limit(300, "given")),
        ("eth0", 200, utilisation.Limit(200, "speed")),
    ]:
        record = Record(Header(0, 1, "b", 1, 0, 0, {"counters": True}))
        for number in range(4):
            values = {f"nic.{name}.tx_bytes": 10.0 * number, f"nic.{name}.rx_bytes": 10.0 * number}
            if number == 0 and speed is not None:  # is read once
                values[f"nic.{name}.speed_bytes_per_s"] = speed
            record.readings.append(Readings(number * SECOND, values))
        of_rank = Record(Header(0, 1, "b", 1, 0, 0))
        same, host = utilisation.with_links([of_rank, record], 300)
        assert same is of_rank and Host(host).limit(name, "tx") == Host(host).limit(name, "rx") == want
        assert Host(record).limit(name, "tx") != utilisation.Limit(300, "given")


def test_what_somebody_knows_of_the_links_counts_in_what_readers_give(tmp_path: Path) -> None:
    """They give a host's readings to its ranks."""
    rank, host = Header(0, 1, "b", 1, 0, 0), Header(0, 1, "b", 2, 0, 0, {"counters": True})
    readings = [Readings(number * SECOND, {"nic.eth0.tx_bytes": 10.0 * number}) for number in range(4)]
    (tmp_path / "rank-0.jsonl").write_text("".join(map(line, [rank, Step(0, 0, SECOND)])))
    (tmp_path / "host-b.jsonl").write_text("".join(map(line, [host, *readings])))
    [found] = utilisation.hosts(utilisation.with_links(load(tmp_path), 300))
    assert found.limit("eth0", "tx") == utilisation.Limit(300, "given")


def test_series_are_on_the_first_host_s_clock_and_have_shares() -> None:
    """Names of interfaces may have dots; only what grows is a rate; the loopback is no link."""
    values = {"nic.eth0.100.tx_bytes": 0.0, "nic.lo.tx_bytes": 0.0, "pid.7.cpu_s": 0.0, "memory.available_bytes": 5.0}
    record = Record(Header(0, 1, "b", 1, 0, 0, {"counters": True}))
    for number in range(4):
        grown = {name: value + 10 * number for name, value in values.items()}
        record.readings.append(Readings(number * SECOND, {**grown, "nic.eth0.100.speed_bytes_per_s": 40.0}))
    found = {each.name: each for each in utilisation.series([record], Breakdown((), {"b": (7.0, 1.0)}))}
    assert set(found) == {"nic.eth0.100.tx_bytes", "nic.lo.tx_bytes", "pid.7.cpu_s"}
    assert found["nic.eth0.100.tx_bytes"].points[0] == ((7, SECOND + 7), 10.0)
    limit = found["nic.eth0.100.tx_bytes"].limit
    assert limit is not None and limit.is_known and limit.bytes_per_s == 40.0
    assert found["pid.7.cpu_s"].limit is None
    assert Host(record).interfaces() == ["eth0.100"]


@pytest.mark.parametrize(
    ("phase", "cause"),
    [("checkpoint", "checkpoint"), ("evaluation", "evaluation"), ("loading", "loading"), ("forward", "slow rank")],
)
@pytest.mark.parametrize("is_marked", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_a_pause_is_a_drop_with_its_cause(phase: str, cause: str, seed: int, is_marked: bool) -> None:
    """One rank is in a phase for two seconds, the others wait, in a call of theirs or, as under DDP, in a backward pass without a
    mark: the traffic of all hosts drops for that long, and only then."""
    given = random.Random(f"{phase}-{seed}")
    job = planted_records.Job(seed, given, ranks=given.choice([2, 3]), steps=60, gradient_bytes=8e6)
    rank, number = given.randrange(job.ranks), given.randrange(15, 45)
    job.pauses = {number: (rank, phase, 2.0)}
    records, breakdown = planted_records.played(job)
    if not is_marked:
        for record in records:
            record.steps[:] = [_in_the_pass(step) for step in record.steps]
    paused = next(record for record in records if not record.is_of_host).steps[number]
    found = utilisation.drops(records, breakdown)
    assert len(found) == job.ranks, f"seed {seed}"
    for drop in found:
        assert (drop.cause, drop.rank) == (cause, rank), f"seed {seed}: {drop}"
        assert drop.share < 0.5 and (drop.interface, drop.ways) == ("eth0", ("rx", "tx"))
        assert abs(drop.interval[0] - paused.start_ns) < 0.7 * SECOND
        assert abs(drop.interval[1] - paused.end_ns) < 0.7 * SECOND
    job.pauses = {1: (rank, phase, 2.0)}
    assert utilisation.drops(*planted_records.played(job)) == [], "the first two steps do not count"


def _in_the_pass(step: Step) -> Step:
    """All that comes after the beginning of the backward pass is in it."""
    begun = next(span.start_ns for span in step.spans if span.phase == "backward")
    kept = tuple(span for span in step.spans if span.end_ns <= begun or span.phase in ("checkpoint", "evaluation"))
    return step._replace(spans=(Span("backward", begun, step.end_ns), *kept), waits=())


def test_steps_that_are_alike_have_no_drops() -> None:
    """What goes up and down within each step is none, nor is a step that is a little longer."""
    for seed in range(5):
        job = planted_records.Job(seed, random.Random(seed), compute_s=0.4, steps=40, gradient_bytes=8e6)
        assert utilisation.drops(*planted_records.played(job)) == [], f"seed {seed}"
    assert utilisation.drops([], Breakdown(())) == []


def test_a_direction_alone_may_fall() -> None:
    """What is received does, and sending goes on, or the other way round; not one that carries acknowledgements alone."""
    for falls, other, rate in (("rx", "tx", 90.0), ("tx", "rx", 90.0), ("rx", "tx", 3000.0)):
        host = Record(Header(0, 1, "a", 1, 0, 0, {"counters": True}))
        totals = {f"nic.eth0.{way}_bytes": 0.0 for way in (falls, other)}
        for second in range(60):
            host.readings.append(Readings(second * SECOND, dict(totals)))
            totals[f"nic.eth0.{falls}_bytes"] += 20.0 if 30 <= second < 40 else 100.0
            totals[f"nic.eth0.{other}_bytes"] += rate
        spans = [(n * SECOND, (n + 1) * SECOND) for n in range(59)]
        steps = [Step(n, *span, (Span("forward", *span),)) for n, span in enumerate(spans)]
        found = utilisation.drops([host, Record(Header(0, 1, "a", 2, 0, 0), steps=steps)], Breakdown(()))
        if rate > 100:
            assert not found
            continue
        [drop] = found
        assert (drop.interface, drop.ways, drop.interval) == ("eth0", (falls,), (30 * SECOND, 40 * SECOND))
        assert drop.share == pytest.approx(0.2)


def test_retransmissions_explain_a_drop() -> None:
    """Twice the usual share of bytes that were sent again, while nobody did anything else."""
    names = ("nic.eth0.tx_bytes", "streams.eth0.tx_bytes", "streams.eth0.resent_bytes")
    host = Record(Header(0, 1, "a", 1, 0, 0, {"counters": True}))
    totals = dict.fromkeys(names, 0.0)
    for second in range(60):
        host.readings.append(Readings(second * SECOND, dict(totals)))
        is_lossy = 30 <= second < 40
        for name, rate in zip(names, (10, 10, 2) if is_lossy else (100, 100, 0), strict=True):
            totals[name] += rate
    steps = [Step(n, n * SECOND, (n + 1) * SECOND, (Span("forward", n * SECOND, (n + 1) * SECOND),)) for n in range(59)]
    [drop] = utilisation.drops([host, Record(Header(0, 1, "a", 2, 0, 0), steps=steps)], Breakdown(()))
    assert (
        drop.cause == "retransmission"
        and drop.interval == (30 * SECOND, 40 * SECOND)
        and drop.share == pytest.approx(0.1)
    )


def test_reads_of_memory_are_added_up_by_host() -> None:
    """Of ranks that look at other times: the rate over the times of the one that looked most often. None where none was read."""
    records = [Record(Header(rank, 3, "ab"[rank // 2], 7 + rank, 0, 0)) for rank in range(3)]
    for rank, seconds in enumerate(((0, 1, 2, 3), (0, 2, 3), (0, 1))):
        for second in seconds:
            values = {
                f"pid.{7 + rank}.memory_read_bytes": (1000.0 * second if rank < 2 else 0.0),
                "nic.eth0.tx_bytes": 0.0,
            }
            records[0 if rank < 2 else 2].readings.append(Readings(second * SECOND, values))
    records[0].readings.sort(key=lambda reading: reading.time_ns)
    [found] = utilisation.memory_reads(records, Breakdown((), {"a": (5.0, 1.0)}))
    assert found.host == "a" and found.points[0][0] == (5, SECOND + 5)
    assert [rate for _, rate in found.points] == pytest.approx([2000.0] * 3)


def counted(totals: dict[int, float], **others: float) -> Host:
    record = Record(Header(0, 1, "a", 1, 0, 0, {"counters": True}))
    for second, total in totals.items():
        record.readings.append(Readings(second * SECOND, {"nic.eth0.tx_bytes": total, **others}))
    return Host(record)
