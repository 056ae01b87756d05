"""Faults on purpose: small trainings on emulated hosts, each with one thing wrong, for `penstock profile` to find.

    penstock profile -o FOLDER -- python -m penstock.tools.bench.planted_job PLAN

runs a plan (JSON) on hosts of its own; `profiled` does that and finds the causes. The ranks have a core each, as far as there are
enough. A machine that is busy otherwise is a fault of its own.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import random
import sys

from penstock.profiling import causes
from penstock.profiling.cause import Cause
from penstock.profiling.divide import divide
from penstock.tools.bench.recorded import recorded

__all__ = ["FAULTS", "Found", "Plan", "core_of", "drawn", "is_found", "profiled"]


@dataclasses.dataclass
class Plan:
    """What is run. Rates in Mbit/s.

    More than 16 fields: each fault has some of its own, and a plan is one line of JSON.
    """

    fault: str
    seed: int
    ranks: int = 2
    hosts: int = 2
    """That ranks are on, in equal parts."""
    backend: str = "penstock"
    steps: int = 32
    width: int = 256
    layers: int = 8
    batch: int = 256
    bucket_mb: float = 25.0
    streams: int = 16
    rate: float = 400.0
    flow: float | None = None
    rates: dict[str, float] = dataclasses.field(default_factory=dict)
    loss: float = 0.0
    """Of the packets that the host with the link sends."""
    rank: int | None = None
    """Whose fault it is."""
    burn_ms: float = 0.0
    stall_ms: float = 0.0
    reads_disk: bool = False
    """The loader stalls because it reads from a disk that another process writes to; else it sleeps."""
    scratch: str = ""
    """The file that it reads; known when the hosts are made."""
    foreign_flows: int = 0
    is_foreign_sent: bool = False
    """By the host with the link; else it receives them."""
    is_crowded: bool = False
    expected: tuple[str, ...] = ()
    links: tuple[int, ...] = ()
    """On one of these hosts is the link; several where the fault is on all of them."""


def drawn(fault: str, seed: int) -> Plan:
    """A training with that fault, of drawn size."""
    given = random.Random(f"{fault}-{seed}")
    plan = Plan(fault, seed, rate=given.choice([300.0, 400.0, 600.0]), batch=given.choice([192, 256, 384]))
    plan.layers = given.choice([6, 8, 10])
    plan.backend = given.choice(["penstock", "penstock", "gloo"])
    if fault in OF_LINKS:
        # Of all trainings a third. The other faults are of processors or hide behind them, and are planted where each rank has a
        # core: where four ranks share two, these are a fault of their own.
        plan.ranks = given.choice([2, 4, 4])
    rank, host = given.randrange(plan.ranks), given.randrange(plan.hosts)
    if fault in ("slow rank", "disk stall", "contention"):
        # Else a step waits longer for the link than for the fault.
        plan.width, plan.batch = 128, 4 * plan.batch
    if fault == "slow rank":
        plan.rank, plan.burn_ms, plan.expected = rank, given.uniform(25, 80), ("straggler",)
    elif fault == "capped link":
        plan.rates, plan.expected, plan.links = {f"h{host}": given.uniform(25, 60)}, ("link",), (host,)
    elif fault == "one-flow cap":
        # Every host has it.
        plan.streams, plan.flow, plan.expected, plan.links = 1, given.uniform(25, 60), ("flow cap",), (0, 1)
    elif fault == "small buckets":
        plan.layers, plan.width, plan.bucket_mb = given.choice([60, 80, 100]), 32, 0.001
        # A short pass, which hides little of them.
        plan.rate, plan.batch, plan.steps, plan.expected = 1000.0, 32, 150, ("small buckets",)
    elif fault == "disk stall":
        plan.rank, plan.stall_ms, plan.expected = rank, given.uniform(40, 100), ("loader",)
        plan.reads_disk = given.random() < 0.5
    elif fault == "retransmissions":
        # One way, as a dirty fibre loses: of two hosts whose link loses both ways, both resend alike.
        plan.loss, plan.expected, plan.links = given.uniform(0.02, 0.05), ("retransmissions",), (host,)
    elif fault == "second job":
        # About half as many flows to one and a half times as many as the job has: gloo has one to each peer.
        plan.rate, plan.foreign_flows = given.choice([100.0, 150.0]), given.choice([8, 16, 24])
        if plan.backend == "gloo":
            plan.foreign_flows //= 8
        plan.is_foreign_sent = given.random() < 0.5
        plan.expected, plan.links = ("second job",), (host,)
    elif fault == "contention":
        # Once more: a crowd takes a part of the computing, which is to be longer than the wire on fast machines, too.
        plan.batch *= 4
        plan.rank, plan.is_crowded, plan.expected = rank, True, ("contention",)
    else:
        raise ValueError(f"there is no fault {fault!r}")
    return plan


FAULTS = (
    "slow rank",
    "capped link",
    "one-flow cap",
    "small buckets",
    "disk stall",
    "retransmissions",
    "second job",
    "contention",
)


OF_LINKS = ("capped link", "one-flow cap", "retransmissions", "second job")


@dataclasses.dataclass
class Found:
    """What a profile tells."""

    causes: list[Cause]
    hosts: dict[int, str]
    """By rank."""


def profiled(plan: Plan, folder: pathlib.Path) -> Found:
    """Run it, recorded in this folder, and find the causes.

    Raises:
        BenchError: the training failed.
    """
    command = [sys.executable, "-m", "penstock.tools.bench.planted_job", json.dumps(dataclasses.asdict(plan))]
    ranks = recorded(command, folder, f"{plan.fault}, seed {plan.seed},")
    return Found(causes.find(ranks, divide(ranks)), {each.header.rank: each.header.host for each in ranks})


def is_found(plan: Plan, found: Found) -> bool:
    """The right cause first, with the right rank, or a link of the right host; and with a disk if one is read."""
    if not found.causes or found.causes[0].kind not in plan.expected:
        return False
    first = found.causes[0]
    names = {found.hosts[host * plan.ranks // plan.hosts] for host in plan.links}
    if plan.links and not (first.host in names and first.link == "eth0"):
        return False
    return (plan.rank is None or first.rank == plan.rank) and bool(first.disk) == plan.reads_disk


def core_of(rank: int) -> int:
    cores = sorted(os.sched_getaffinity(0))
    return cores[rank % len(cores)]
