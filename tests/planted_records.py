"""Records of jobs with one fault each, as the recorder, the division and the sampler would leave them, drawn from a seed.

A model of a data-parallel step, in which each rank loads, computes and then exchanges gradients, with counters that follow from
it, and with noise in everything: other steps, a few retransmissions, headers, some other traffic, some waits for a processor.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

from penstock.profiling.breakdown import Breakdown, Moving, Share
from penstock.profiling.record import Event, Header, Readings, Record, Span, Step, Wait


@dataclasses.dataclass
class Job:
    """What is drawn. Times in seconds, rates in bytes per second."""

    seed: int
    random: random.Random
    ranks: int = 2
    steps: int = 30
    compute_s: float = 0.1
    loading_s: float = 0.001
    link: float = 125e6
    is_limit_known: bool = True
    links: dict[int, float] = dataclasses.field(default_factory=dict)
    streams: int = 16
    flow_cap: float = 1e12
    gradient_bytes: float = 4e6
    operations: int = 4
    latency_s: float = 0.0003
    efficiency: float = 0.9
    is_overrun: bool = False
    """All is sent at the link's rate, and then senders wait."""
    hidden: float = 0.2
    more: dict[tuple[int, str], float] = dataclasses.field(default_factory=dict)
    """By rank and phase: seconds more a step."""
    queued: dict[int, float] = dataclasses.field(default_factory=dict)
    """By rank: seconds a step that its training thread waits for a processor."""
    idle: set[tuple[int, str]] = dataclasses.field(default_factory=set)
    """Of `more`: by rank and phase, what needs no processor."""
    resent: dict[int, float] = dataclasses.field(default_factory=dict)
    foreign: dict[int, float] = dataclasses.field(default_factory=dict)
    disk: dict[int, float] = dataclasses.field(default_factory=dict)
    """By rank: bytes a step."""
    pauses: dict[int, tuple[int, str, float]] = dataclasses.field(default_factory=dict)
    """By number of a step: a rank, a phase, and how long it is in it."""


@dataclasses.dataclass(frozen=True)
class Expected:
    kind: str
    rank: int | None = None
    host: str = ""
    """Any of several, with spaces; nothing if it is not one's."""


def drawn(fault: str, seed: int) -> tuple[Job, Expected]:
    """A job with that fault, of drawn size, and what should be found first."""
    given = random.Random(f"{fault}-{seed}")
    compute_s = given.uniform(0.03, 0.25)
    job = Job(seed, given, ranks=given.choice([2, 2, 3, 4]), compute_s=compute_s, loading_s=given.uniform(0.0, 0.002))
    job.link = given.choice([125e6, 125e6, 1.25e9])
    job.hidden = given.uniform(0.0, 0.5)
    job.efficiency = given.uniform(0.85, 0.95)
    job.latency_s = given.uniform(0.0001, 0.0006)
    for rank in range(job.ranks):
        job.queued[rank] = compute_s * given.uniform(0, 0.03)
        job.resent[rank] = given.uniform(0, 0.002)
        job.foreign[rank] = job.link * given.uniform(0, 0.01)
    # A healthy job has 3 to 20 % of its computing on the wire.
    job.gradient_bytes = compute_s * given.uniform(0.03, 0.2) * job.link
    return job, FAULTS[fault](job, given)


def _slow_rank(job: Job, given: random.Random) -> Expected:
    rank = given.randrange(job.ranks)
    job.more[rank, given.choice(["forward", "backward", "other"])] = job.compute_s * given.uniform(0.3, 1.5)
    return Expected("straggler", rank)


def _capped_link(job: Job, given: random.Random) -> Expected:
    host = given.randrange(job.ranks)
    job.links[host] = job.link / given.uniform(4, 12)
    job.foreign[host] = job.links[host] * given.uniform(0, 0.01)
    job.gradient_bytes = job.compute_s * given.uniform(0.5, 2) * job.links[host]
    # A full queue drops: where senders do not notice soon, many times.
    is_overrun = given.random() < 0.5
    job.resent = dict.fromkeys(job.resent, given.uniform(0.05, 0.3) if is_overrun else given.uniform(0, 0.02))
    if is_overrun:
        job.efficiency, job.is_overrun = given.uniform(0.45, 0.7), True
    return Expected("link", host=f"h{host}")


def _flow_cap(job: Job, given: random.Random) -> Expected:
    job.streams = given.choice([1, 1, 2, 4])
    job.flow_cap = job.link / job.streams * given.uniform(0.05, 0.5)
    job.gradient_bytes = job.compute_s * given.uniform(0.5, 2) * job.flow_cap * job.streams
    return Expected("flow cap", host=" ".join(f"h{host}" for host in range(job.ranks)))


def _small_buckets(job: Job, given: random.Random) -> Expected:
    job.latency_s = given.uniform(0.0004, 0.002)
    job.operations = round(job.compute_s * given.uniform(0.4, 1.5) / job.latency_s)
    most = min(200e3, job.latency_s * job.link / 3)
    job.gradient_bytes = job.operations * given.uniform(0.1, 1) * most
    job.hidden = given.uniform(0.0, 0.3)
    return Expected("small buckets")


def _disk_stall(job: Job, given: random.Random) -> Expected:
    stall_s = job.compute_s * given.uniform(0.3, 1.5)
    if given.random() < 0.5:
        rank = given.randrange(job.ranks)
        job.more[rank, "loading"] = stall_s
        job.disk = {rank: given.uniform(0, 2e6)}
        return Expected("loader", rank)
    job.loading_s = stall_s
    job.disk = {rank: given.uniform(0, 2e6) for rank in range(job.ranks)}
    return Expected("loader")


def _retransmissions(job: Job, given: random.Random) -> Expected:
    host = given.randrange(job.ranks)
    loss = given.uniform(0.01, 0.05)
    job.resent[host] = loss * given.uniform(0.8, 1.2)
    job.resent[(host - 1) % job.ranks] = loss * given.uniform(0.5, 1.0)
    job.efficiency = given.uniform(0.1, 0.5)
    job.gradient_bytes = job.compute_s * given.uniform(0.5, 2) * job.link * job.efficiency
    hosts = range(job.ranks) if job.ranks == 2 else [host]
    return Expected("retransmissions", host=" ".join(f"h{each}" for each in hosts))


def _second_job(job: Job, given: random.Random) -> Expected:
    host = given.randrange(job.ranks)
    job.foreign[host] = job.link * given.uniform(0.3, 0.7)
    if job.ranks == 2:
        job.foreign[1 - host] = job.foreign[host]
    job.gradient_bytes = job.compute_s * given.uniform(0.5, 1.5) * (job.link - job.foreign[host])
    hosts = range(job.ranks) if job.ranks == 2 else [host]
    return Expected("second job", host=" ".join(f"h{each}" for each in hosts))


def _contention(job: Job, given: random.Random) -> Expected:
    rank = given.randrange(job.ranks)
    lost_s = job.compute_s * given.uniform(0.4, 1.5)
    job.more[rank, given.choice(["forward", "backward"])] = lost_s
    job.queued[rank] += lost_s * given.uniform(0.8, 1.0)
    return Expected("contention", rank)


FAULTS: dict[str, Callable[[Job, random.Random], Expected]] = {
    "slow rank": _slow_rank,
    "capped link": _capped_link,
    "one-flow cap": _flow_cap,
    "small buckets": _small_buckets,
    "disk stall": _disk_stall,
    "retransmissions": _retransmissions,
    "second job": _second_job,
    "contention": _contention,
}


def played(job: Job) -> tuple[list[Record], Breakdown]:
    """The records and the breakdown of a job, one rank a host."""
    given, ranks = job.random, range(job.ranks)
    # In a ring each rank sends 2 (n - 1) / n of the bytes, on the slowest link at its rate.
    sent = 2 * (job.ranks - 1) / job.ranks * job.gradient_bytes
    free = min(job.links.get(host, job.link) - job.foreign.get(host, 0.0) for host in ranks)
    rate = min(free, job.flow_cap * job.streams) * job.efficiency
    wire_s = sent / rate + job.operations * job.latency_s
    hosts = [_Counters(job, host, sent, wire_s) for host in ranks]
    steps: dict[int, list[Step]] = {rank: [] for rank in ranks}
    sums: list[dict[str, float]] = [{} for _ in ranks]
    waited: list[dict[int, float]] = [{} for _ in ranks]
    now_s = 100.0
    for number in range(job.steps):
        parts = {rank: _parts(job, rank, number) for rank in ranks}
        ready_s = {rank: sum(parts[rank].values()) for rank in ranks}
        last = max(ready_s, key=lambda rank: ready_s[rank])
        exposed_s = wire_s * (1 - job.hidden) * given.uniform(0.97, 1.03)
        end_s = now_s + ready_s[last] + exposed_s
        for rank in ranks:
            at_s, spans = now_s, []
            for phase, length_s in parts[rank].items():
                spans.append(Span(phase, _ns(at_s), _ns(at_s + length_s)))
                sums[rank][phase] = sums[rank].get(phase, 0.0) + length_s
                at_s += length_s
            if rank != last:
                waited[rank][last] = waited[rank].get(last, 0.0) + ready_s[last] - ready_s[rank]
            sums[rank]["exposed"] = sums[rank].get("exposed", 0.0) + exposed_s
            steps[rank].append(
                Step(number, _ns(now_s), _ns(end_s), tuple(spans), (Wait(_ns(at_s), _ns(end_s), "all_reduce"),))
            )
            hosts[rank].play(now_s, end_s - min(end_s - now_s, wire_s), end_s)
        now_s = end_s
    step_ns = (now_s - 100.0) / job.steps * 1e9
    shares, records = [], []
    for rank in ranks:
        mean = {name: value / job.steps * 1e9 for name, value in sums[rank].items()}
        wait = {other: value / job.steps * 1e9 for other, value in waited[rank].items()}
        moving = Moving(
            exposed_wire_ns=mean.pop("exposed"),
            exposed_wait_ns=sum(wait.values()),
            hidden_wire_ns=wire_s * job.hidden * 1e9,
            bytes=job.gradient_bytes,
            operations=job.operations,
            waited_for=wait,
        )
        shares.append(Share(rank, job.steps, 3, step_ns, mean, {"data-parallel sync": moving}))
        header = Header(rank, job.ranks, f"h{rank}", 1000 + rank, _ns(100), 0)
        records += [Record(header, steps=steps[rank]), hosts[rank].record()]
    return records, Breakdown(tuple(shares), {f"h{rank}": (0.0, 0.0) for rank in ranks})


def _parts(job: Job, rank: int, number: int) -> dict[str, float]:
    """What a rank does before it exchanges gradients: seconds by phase."""
    usual = {
        "loading": job.loading_s,
        "forward": 0.3 * job.compute_s,
        "backward": 0.6 * job.compute_s,
        "optimizer": 0.05 * job.compute_s,
        "other": 0.05 * job.compute_s,
    }
    found = {
        phase: (length_s + job.more.get((rank, phase), 0.0)) * job.random.uniform(0.97, 1.03)
        for phase, length_s in usual.items()
    }
    if number in job.pauses and job.pauses[number][0] == rank:
        _, phase, length_s = job.pauses[number]
        found[phase] = found.get(phase, 0.0) + length_s
    return found


class _Counters:
    """The sampler of a host with one rank."""

    def __init__(self, job: Job, host: int, sent: float, wire_s: float) -> None:
        self.job, self.host, self.sent, self.wire_s = job, host, sent, wire_s
        self.totals: dict[str, float] = {}
        self.readings: list[Readings] = []
        self.next_s, self.ticks = 99.9, 0
        self.pid = 1000 + host

    def play(self, start_s: float, wire_start_s: float, end_s: float) -> None:
        """A step: nothing on the wire, then all of it."""
        job, steady = self.job, {}
        step_s = end_s - start_s
        key = f"pid.{self.pid}."
        steady[f"{key}thread.{self.pid}.python.queued_s"] = job.queued.get(self.host, 0.0) / step_s
        ran_s = job.compute_s + sum(
            more
            for (rank, phase), more in job.more.items()
            if rank == self.host and phase != "loading" and (rank, phase) not in job.idle
        )
        steady[f"{key}thread.{self.pid}.python.cpu_s"] = (ran_s - job.queued.get(self.host, 0.0)) / step_s
        steady[f"{key}disk_read_bytes"] = job.disk.get(self.host, 0.0) / step_s
        steady["disk.vda.busy_s"] = 0.8 * (job.loading_s / step_s) if job.disk.get(self.host) else 0.001
        steady["pressure.io_s"] = steady["disk.vda.busy_s"]
        foreign = job.foreign.get(self.host, 0.0)
        steady["nic.eth0.tx_bytes"] = steady["nic.eth0.rx_bytes"] = foreign
        resent = job.resent.get(self.host, 0.0)
        wire = {
            "streams.eth0.tx_bytes": self.sent * (1 + resent),
            "streams.eth0.rx_bytes": self.sent,
            "streams.eth0.resent_bytes": self.sent * resent,
            "nic.eth0.tx_bytes": self.sent * (1 + resent) * 1.045,
            "nic.eth0.rx_bytes": self.sent * 1.045,
            f"{key}thread.{self.pid + 500}.penstock.cpu_s": self.sent / 2e9,
        }
        busy_s = min(self.wire_s, self.sent / min(job.flow_cap * job.streams, job.link) / job.efficiency)
        for number in range(job.streams):
            wire[f"stream.{number}.tx_bytes"] = self.sent * (1 + resent) / job.streams
            wire[f"stream.{number}.busy_us"] = busy_s * 1e6
            wire[f"stream.{number}.retransmits"] = self.sent * resent / 1448 / job.streams
        self._go(start_s, wire_start_s, steady, {})
        length_s = (end_s - wire_start_s) * (job.efficiency if job.is_overrun else 1.0)
        self._go(
            wire_start_s, wire_start_s + length_s, steady, {name: value / length_s for name, value in wire.items()}
        )
        self._go(wire_start_s + length_s, end_s, steady, {})

    def _go(self, start_s: float, end_s: float, *rates: dict[str, float]) -> None:
        at_s = start_s
        while at_s < end_s:
            until_s = min(end_s, max(at_s, self.next_s))
            for each in rates:
                for name, rate in each.items():
                    self.totals[name] = self.totals.get(name, 0.0) + rate * (until_s - at_s)
            at_s = until_s
            if at_s >= self.next_s:
                self._read(at_s)

    def _read(self, now_s: float) -> None:
        """Interfaces always, streams' sums every half second, and the rest as well at first, later every two seconds."""
        names = [name for name in self.totals if name.startswith("nic.")]
        # A full queue, or acknowledgements that are late for want of a processor.
        is_capped = self.host in self.job.links
        rtt_us = 1000 * (self.job.random.uniform(25, 60) if is_capped else self.job.random.uniform(0.1, 10))
        if self.ticks % 5 == 0:
            names += [name for name in self.totals if name.startswith("streams.")]
        if self.ticks % (10 if self.ticks < 100 else 20) == 0:
            names = list(self.totals)
        values = {name: self.totals[name] for name in names}
        for number in range(self.job.streams if len(names) == len(self.totals) else 0):
            values |= {f"stream.{number}.rtt_us": rtt_us, f"stream.{number}.least_rtt_us": 100.0}
        if self.ticks == 0 and self.job.is_limit_known:
            values["nic.eth0.shaped_bytes_per_s"] = self.job.links.get(self.host, self.job.link)
        self.readings.append(Readings(_ns(now_s), values))
        self.ticks += 1
        self.next_s = now_s + 0.1

    def record(self) -> Record:
        header = Header(self.host, self.job.ranks, f"h{self.host}", 1, _ns(99), 0, {"counters": True})
        after = (self.host + 1) % self.job.ranks
        events = [
            Event(
                _ns(99), "stream", f"{number} {self.pid} eth0 10.0.0.{self.host}:{4000 + number} 10.0.0.{after}:29500"
            )
            for number in range(self.job.streams)
        ]
        self._read(self.next_s)
        self.readings[-1] = Readings(self.readings[-1].time_ns, dict(self.totals))
        return Record(header, readings=self.readings, events=events)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
