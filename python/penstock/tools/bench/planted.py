"""Faults on purpose: small trainings on emulated hosts, each with one thing wrong, for `penstock profile` to find.

    penstock profile -o FOLDER -- python -m penstock.tools.bench.planted PLAN

makes the hosts of a plan (JSON), starts what disturbs them, and runs the ranks (`planted_rank`). `profiled` does that and finds
the causes. The ranks have a core each, as far as there are enough. A machine that is busy otherwise is a fault of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import random
import subprocess
import sys
from collections.abc import Iterator

from penstock.profiling import causes
from penstock.profiling.causes import Cause
from penstock.profiling.divide import divide
from penstock.tools.bench.recorded import recorded
from penstock.tools.testbed import LinkSpec, Testbed

__all__ = ["FAULTS", "Found", "Plan", "conduct", "core_of", "drawn", "is_found", "profiled"]


@dataclasses.dataclass
class Plan:
    """What is run. Rates in Mbit/s.

    More than 16 fields: each fault has some of its own, and a plan is one line of JSON.
    """

    fault: str
    seed: int
    ranks: int = 2
    steps: int = 32
    width: int = 256
    layers: int = 8
    batch: int = 256
    bucket_mb: float = 25.0
    streams: int = 16
    rate: float = 400.0
    flow: float | None = None
    rates: dict[str, float] = dataclasses.field(default_factory=dict)
    loss: dict[str, float] = dataclasses.field(default_factory=dict)
    rank: int | None = None
    """Whose fault it is."""
    burn_ms: float = 0.0
    stall_ms: float = 0.0
    foreign_flows: int = 0
    is_crowded: bool = False
    expected: tuple[str, ...] = ()
    hosts: tuple[int, ...] = ()
    """On one of these is the link."""


def drawn(fault: str, seed: int) -> Plan:
    """A training with that fault, of drawn size."""
    given = random.Random(f"{fault}-{seed}")
    plan = Plan(fault, seed, rate=given.choice([300.0, 400.0, 600.0]), batch=given.choice([192, 256, 384]))
    plan.layers = given.choice([6, 8, 10])
    rank = given.randrange(plan.ranks)
    if fault in ("slow rank", "disk stall", "contention"):
        # Else a step waits longer for the link than for the fault.
        plan.width, plan.batch = 128, 4 * plan.batch
    if fault == "slow rank":
        plan.rank, plan.burn_ms, plan.expected = rank, given.uniform(25, 80), ("straggler",)
    elif fault == "capped link":
        plan.rates, plan.expected, plan.hosts = {f"h{rank}": given.uniform(25, 60)}, ("link",), (rank,)
    elif fault == "one-flow cap":
        plan.streams, plan.flow, plan.expected, plan.hosts = 1, given.uniform(25, 60), ("flow cap",), (0, 1)
    elif fault == "small buckets":
        plan.layers, plan.width, plan.bucket_mb = given.choice([60, 80, 100]), 32, 0.001
        # A short pass, which hides little of them.
        plan.rate, plan.batch, plan.steps, plan.expected = 1000.0, 32, 150, ("small buckets",)
    elif fault == "disk stall":
        plan.rank, plan.stall_ms, plan.expected = rank, given.uniform(40, 100), ("loader",)
    elif fault == "retransmissions":
        plan.loss, plan.expected, plan.hosts = {f"h{rank}": given.uniform(0.02, 0.05)}, ("retransmissions",), (0, 1)
    elif fault == "second job":
        plan.rate, plan.foreign_flows = given.choice([100.0, 150.0]), given.choice([8, 16, 24])
        plan.expected, plan.hosts = ("second job",), (0, 1)
    elif fault == "contention":
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
    command = [sys.executable, "-m", "penstock.tools.bench.planted", json.dumps(dataclasses.asdict(plan))]
    ranks = recorded(command, folder, f"{plan.fault}, seed {plan.seed},")
    return Found(causes.find(ranks, divide(ranks)), {each.header.rank: each.header.host for each in ranks})


def is_found(plan: Plan, found: Found) -> bool:
    """The right cause first, with the right rank, or a link of the right host."""
    if not found.causes or found.causes[0].kind not in plan.expected:
        return False
    first = found.causes[0]
    is_there = not plan.hosts or (first.host in {found.hosts[rank] for rank in plan.hosts} and first.link == "eth0")
    return is_there and (plan.rank is None or first.rank == plan.rank)


def conduct(plan: Plan) -> int:
    """Make the hosts and what disturbs them, and run the ranks."""
    link = LinkSpec(rate_mbit=plan.rate, flow_mbit=plan.flow)
    with contextlib.ExitStack() as stack:
        bed = stack.enter_context(Testbed(hosts=plan.ranks, racks=1, link=link, rates=plan.rates, losses=plan.loss))
        if plan.fault == "retransmissions":
            for host in range(plan.ranks):
                # bbr, which this machine may have, sends on through losses; this one every namespace may use.
                bed.inside(host, lambda: pathlib.Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text("reno"))
        if plan.foreign_flows:
            address = bed.address(0)
            stack.enter_context(_ended(bed.popen(0, [sys.executable, "-c", SINK, address])))
            stack.enter_context(_ended(bed.popen(1, [sys.executable, "-c", SOURCE, address, str(plan.foreign_flows)])))
        if plan.is_crowded:
            stack.enter_context(_ended(subprocess.Popen([sys.executable, "-c", CROWD, str(core_of(plan.rank or 0))])))
        done = bed.run(
            [sys.executable, "-m", "penstock.tools.bench.planted_rank", json.dumps(dataclasses.asdict(plan))],
            ranks=plan.ranks,
            env={"PENSTOCK_STREAMS": str(plan.streams), "OMP_NUM_THREADS": "1"},
            timeout_s=150,
        )
        for rank, text in enumerate(done.outputs):
            sys.stdout.write(f"--- rank {rank}\n{text}")
    return done.returncode


SINK = """
import socket, sys, threading
server = socket.create_server((sys.argv[1], 5999), backlog=64)
def drain(one):
    while one.recv(1 << 20):
        pass
while True:
    threading.Thread(target=drain, args=(server.accept()[0],), daemon=True).start()
"""
SOURCE = """
import socket, sys, threading, time
def fill(one):
    while True:
        one.sendall(bytes(1 << 18))
for _ in range(int(sys.argv[2])):
    while True:
        try:
            one = socket.create_connection((sys.argv[1], 5999))
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    threading.Thread(target=fill, args=(one,), daemon=True).start()
threading.Event().wait()
"""
CROWD = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
parent = os.getppid()
while os.getppid() == parent:
    pass
"""


def core_of(rank: int) -> int:
    cores = sorted(os.sched_getaffinity(0))
    return cores[rank % len(cores)]


@contextlib.contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    sys.exit(conduct(Plan(**json.loads(sys.argv[1]))))
