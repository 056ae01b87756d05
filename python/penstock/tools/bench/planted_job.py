"""A training with something wrong in it (`planted`): its hosts, what disturbs them, and its ranks (`planted_rank`)."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from penstock.tools.bench.planted import Plan, core_of
from penstock.tools.testbed import LinkSpec, Testbed


def run(plan: Plan) -> int:
    """Returns the exit status of the ranks."""
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


@contextlib.contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    sys.exit(run(Plan(**json.loads(sys.argv[1]))))
