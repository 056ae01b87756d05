"""The emulated clusters that aggregators are measured in: racks, daemons, deployments, ranks, and what ranks do outside of their
hosts."""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from penstock.cluster import file
from penstock.cluster.generate import blocks
from penstock.tools.bench.launcher import BenchError
from penstock.tools.bench.program import run_program
from penstock.tools.testbed.cluster import Testbed
from penstock.tools.testbed.link import LinkSpec
from penstock.tools.testbed.topology import Topology

PORT = 7471


class Cluster:
    """One worker a host, racks with an aggregator each, a core with another if there is more than one rack, and a server; their
    daemons answer when ``with`` has entered it, and all of it ends with the block.

    An aggregator's link to its switch has no limit, as if it were the switch; the server's is as fast as a worker's.

    Args:
        rate_mbit: of a worker's link; racks' links carry what their workers' do together.
        loss: on the workers' links, in each direction.
        unauthenticated: one more host in the last rack. Its link has no limit, and no deployment names it.

    Entering raises:
        BenchError: a daemon did not come up, with what it said.
        TestbedUnavailable: no emulated cluster here.
    """

    def __init__(
        self,
        workers: int,
        *,
        rate_mbit: float,
        loss: float = 0.0,
        offloads: bool = False,
        unauthenticated: bool = False,
    ) -> None:
        self.workers = workers
        self.topology = topology(workers, rate_mbit, loss, unauthenticated=unauthenticated)
        self._link = LinkSpec(rate_mbit=rate_mbit, mtu=9000, offloads=offloads)
        self._stack = ExitStack()

    def __enter__(self) -> Cluster:
        with self._stack as stack:
            self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            self.bed = stack.enter_context(Testbed(link=self._link, **self.topology.to_dict()))
            (self.folder / "cluster.yaml").write_text(file.dump(self.bed.topology.cluster))
            self._daemons = stack.enter_context(Daemons(self.bed))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def deployment(
        self, number: str, window: int, *, name: str = "deployment", direct: bool = False, **more: Any
    ) -> str:
        """Write the `deployment` of these workers, with ``more`` in it, to a file of that name; return its path."""
        found = deployment(self.topology, number, window, self.workers, direct=direct)
        found["aggregated"] |= more
        path = self.folder / f"{name}.yaml"
        path.write_text(json.dumps(found))
        return str(path)

    def run(
        self, program: str, options: Mapping[str, Any], *, what: str, timeout_s: float
    ) -> list[list[dict[str, Any]]]:
        """Run a program of this package on all workers, as `run_program` does; its orders are obeyed (`striker.order`).

        The options gain the name of a host's ``interface``, and the file that orders and daemons are told of in, ``state``.
        """
        orders = Orders(self.folder / "state.json", self._obey, self._daemons)
        return run_program(
            self.bed,
            f"aggregated.{program}",
            {**options, "interface": Testbed.interface, "state": str(orders.path)},
            what=what,
            ranks=self.workers,
            timeout_s=timeout_s,
            on=[f"h{host}" for host in range(self.workers)],
            on_line=orders.on_line,
        )

    def _obey(self, order: dict[str, Any]) -> None:
        """``{"order": "loss", "share": 0.01}``, on every link, or ``{"order": "restart", "node": "a0"}``."""
        if order["order"] == "loss":
            for link in self.bed.topology.links:
                self.bed.set_loss(link, order["share"])
        else:
            self._daemons.restart(order["node"])


def topology(workers: int, rate_mbit: float, loss: float, *, unauthenticated: bool = False) -> Topology:
    """Of a `Cluster`: up to 3 workers on one switch, more on two."""
    racks = 1 if workers < 4 else 2
    hosts = workers + unauthenticated
    below = [len([host for host in block if host < workers]) for block in blocks(hosts, racks)]
    rates = {f"r{rack}": rate_mbit * count for rack, count in enumerate(below)}
    rates |= {f"a{number}": 0.0 for number in range(racks + (racks > 1))}
    rates |= {f"h{workers}": 0.0} if unauthenticated else {}
    losses = {f"h{host}": loss for host in range(workers)} if loss else {}
    return Topology(hosts=hosts, racks=racks, servers=1, core_aggregator=racks > 1, rates=rates, losses=losses)


def deployment(shape: Topology, number: str, window: int, workers: int, *, direct: bool = False) -> dict[str, Any]:
    """A deployment for the first so many hosts, as a file beside that of the cluster has it: blocks travel in the format
    ``number``, and with ``direct`` straight to the server."""
    server: dict[str, Any] = {"server": "s0", "fraction": 1.0}
    below = ([host for host in block if host < workers] for block in blocks(shape.hosts, shape.racks))
    racks = [{"aggregator": f"a{rack}", "workers": block} for rack, block in enumerate(below)]
    if not direct and shape.core_aggregator:
        server["tree"] = [{"aggregator": f"a{shape.racks}", "children": racks}]
    elif not direct:
        server["tree"] = racks
    section = {"format": number, "window": window, "servers": [server]}
    return {"version": 2, "cluster": "cluster.yaml", "aggregated": section}


class Daemons:
    """An aggregator or a server on each node that has a place for one; they end with the ``with`` block.

    Raises: BenchError, when one does not come up, with what it said.
    """

    def __init__(self, bed: Testbed) -> None:
        self._bed = bed
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 -- closed in `__exit__`

    def __enter__(self) -> Daemons:
        nodes = [node for node in self._bed.topology.nodes if not node.startswith("h")]
        try:
            for node in nodes:
                self._start(node)
            for node in nodes:
                self._await(node)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()
        self._said.close()

    @property
    def pids(self) -> dict[str, int]:
        """By node."""
        return {node: process.pid for node, process in self._processes.items()}

    def restart(self, node: str) -> None:
        """Start the one that was killed there again; it answers when this returns."""
        process = self._processes[node]
        if process.wait(timeout=10) != -signal.SIGKILL:
            raise BenchError(
                f"the daemon on {node} ended with {process.returncode} before it was killed: {self._end()}"
            )
        self._start(node)
        self._await(node)

    def _start(self, node: str) -> None:
        verb = "server" if node.startswith("s") else "aggregator"
        command = [sys.executable, "-m", "penstock", verb, "--listen", f"{self._bed.address(node)}:{PORT}"]
        if not self._bed.topology.offloads:
            command.append("--no-offloads")
        self._processes[node] = self._bed.popen(node, command, stdout=self._said, stderr=self._said)

    def _await(self, node: str) -> None:
        if not self._bed.inside(node, functools.partial(_answers, self._bed.address(node), self._processes[node])):
            raise BenchError(f"the daemon on {node} did not come up; it said:\n  {self._end()}")

    def _end(self) -> str:
        self._said.seek(0)
        return self._said.read().decode()[-2000:]


def _answers(address: str, process: subprocess.Popen[bytes]) -> bool:
    """Waits until something listens there, as long as the process lives, half a minute at most."""
    until = time.monotonic() + 30
    while time.monotonic() < until and process.poll() is None:
        try:
            socket.create_connection((address, PORT), timeout=1).close()
            return True
        except OSError:
            time.sleep(0.05)
    return False


class Orders:
    """Executes orders that ranks cannot execute from within their hosts, and reports to them in a file: the orders that are done,
    and the daemons' processes.

    A rank prints an order as a JSON object whose first key is ``order`` (`striker.order`); ``obey`` carries it out.
    """

    def __init__(self, path: Path, obey: Callable[[dict[str, Any]], None], daemons: Daemons) -> None:
        self.path = path
        self._obey, self._daemons = obey, daemons
        self._done = 0
        self._publish()

    def on_line(self, rank: int, line: str) -> None:
        """For `run_program`."""
        if not line.startswith('{"order"'):
            return
        self._obey(json.loads(line))
        self._done += 1
        self._publish()

    def _publish(self) -> None:
        fresh = self.path.with_suffix(".new")
        fresh.write_text(json.dumps({"done": self._done, "pids": self._daemons.pids}))
        os.replace(fresh, self.path)
