"""Faults on purpose: small trainings on emulated hosts, each with one thing wrong, for `penstock profile` to find.

    penstock profile -o FOLDER -- python -m penstock.tools.bench.planted PLAN

makes the hosts of a plan (JSON), starts what disturbs them, and runs the ranks (`planted_rank`). `profiled` does that and finds
the causes. The ranks have a core each, as far as there are enough. A machine that is busy otherwise is a fault of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
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
    command = [sys.executable, "-m", "penstock.tools.bench.planted", json.dumps(dataclasses.asdict(plan))]
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


def conduct(plan: Plan) -> int:
    """Make the hosts and what disturbs them, and run the ranks."""
    # Offloaded packets would be lost by up to 64 KiB.
    link = LinkSpec(rate_mbit=plan.rate, flow_mbit=plan.flow, offloads=False if plan.loss else None)
    with contextlib.ExitStack() as stack:
        # The other job's other end has a host of its own, so that it shares one link with the ranks.
        hosts = plan.hosts + bool(plan.foreign_flows)
        bed = stack.enter_context(Testbed(hosts=hosts, racks=1, link=link, rates=plan.rates))
        if plan.loss:
            rules = LOSS.format(bed.interface, round(plan.loss * 1e6))
            for other in set(range(hosts)) - set(plan.links):
                bed.inside(
                    other, functools.partial(subprocess.run, ["nft", "-f", "-"], input=rules, text=True, check=True)
                )
        if plan.fault == "retransmissions":
            for host in range(hosts):
                # bbr, which this machine may have, sends on through losses; this one every namespace may use.
                bed.inside(host, lambda: pathlib.Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text("reno"))
        if plan.foreign_flows:
            sender, receiver = plan.links[0], plan.hosts
            if not plan.is_foreign_sent:
                sender, receiver = receiver, sender
            address, flows = bed.address(receiver), str(plan.foreign_flows)
            stack.enter_context(_ended(bed.popen(receiver, [sys.executable, "-c", SINK, address])))
            stack.enter_context(_ended(bed.popen(sender, [sys.executable, "-c", SOURCE, address, flows])))
        if plan.reads_disk:
            # A folder that outlives a restart is on a disk.
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir="/var/tmp"))
            plan = dataclasses.replace(plan, scratch=f"{folder}/read")
            with open(plan.scratch, "wb") as file:
                for _ in range(SCRATCH_MIB):
                    file.write(os.urandom(1 << 20))
                file.flush()
                os.fsync(file.fileno())
            stack.enter_context(_ended(subprocess.Popen([sys.executable, "-c", WRITER, f"{folder}/written"])))
        if plan.is_crowded:
            stack.enter_context(_ended(subprocess.Popen([sys.executable, "-c", CROWD, str(core_of(plan.rank or 0))])))
        done = bed.run(
            [sys.executable, "-m", "penstock.tools.bench.planted_rank", json.dumps(dataclasses.asdict(plan))],
            ranks=plan.ranks,
            on=range(plan.hosts),
            env={"PENSTOCK_STREAMS": str(plan.streams), "OMP_NUM_THREADS": "1"},
            timeout_s=300,
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
WRITER = """
import os, sys
parent, block = os.getppid(), os.urandom(1 << 20)
with open(sys.argv[1], "wb", buffering=0) as file:
    while os.getppid() == parent:
        file.seek(file.tell() % (64 << 20))
        file.write(block)
        os.fsync(file.fileno())
"""
LOSS = """
add table netdev planted
add chain netdev planted lost {{ type filter hook ingress device {} priority 0; }}
add rule netdev planted lost numgen random mod 1000000 < {} drop
"""
SCRATCH_MIB = 64
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
