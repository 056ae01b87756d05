"""``penstock bench aggregated``: all-reduces through aggregators beside our ring, gloo, and a server without aggregators.

Each number of workers gets an emulated cluster: one worker a host, racks with an aggregator each, a core with another if there is
more than one rack, and a server. An aggregator's link to its switch has no limit, as if it were the switch; the server's is as
fast as a worker's. All ways take turns in one run of the same processes, and each reads what its interface counted.
"""

from __future__ import annotations

import functools
import json
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from rich import box
from rich.table import Table

from penstock.bench.launcher import BenchError
from penstock.bench.program import run_program
from penstock.testbed.cluster import Testbed
from penstock.testbed.link import LinkSpec
from penstock.testbed.topology import Topology, blocks

PORT = 7471
WAYS = ("ring", "gloo", "server", "int32", "int16", "float32")
"""``server``: int32 straight to the server, without aggregators. int16 carries float16 tensors; all others float32."""
STORM = "storm"
"""int32 while a stranger sends the last rack's aggregator as many packets of a job as its workers do, without the key."""


@dataclass(frozen=True)
class Row:
    """One way with so many workers and so much loss. Seconds are medians over all-reduces of the slowest rank."""

    workers: int
    loss: float
    way: str
    seconds: float
    tensor_bytes: int
    sent: float
    """Bytes that a worker's interface sent for one byte of the tensor; the mean over workers."""
    received: float
    busy: float
    """Of the machine's processors."""
    rate_mbit: float
    strangers: float = 0.0
    """Packets of a stranger that the last rack's aggregator refused in a second."""

    @property
    def share(self) -> float:
        """Of the link: bytes of the tensor over what the link carries meanwhile, headers included."""
        return self.tensor_bytes * 8e-6 / self.seconds / self.rate_mbit

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**vars(self), "share": self.share}


def topology(workers: int, rate_mbit: float, loss: float, *, stranger: bool = False) -> Topology:
    """Up to 3 workers on one switch, more on two. Loss is on the workers' links, in each direction. A stranger is one more host
    in the last rack, whose link has no limit."""
    racks = 1 if workers < 4 else 2
    hosts = workers + stranger
    below = [len([host for host in block if host < workers]) for block in blocks(hosts, racks)]
    rates = {f"r{rack}": rate_mbit * count for rack, count in enumerate(below)}
    rates |= {f"a{number}": 0.0 for number in range(racks + (racks > 1))}
    rates |= {f"h{workers}": 0.0} if stranger else {}
    losses = {f"h{host}": loss for host in range(workers)} if loss else {}
    return Topology(hosts=hosts, racks=racks, servers=1, core_aggregator=racks > 1, rates=rates, losses=losses)


def plan(shape: Topology, way: str, window: int, workers: int | None = None) -> dict[str, Any]:
    """The plan of a way, as its file has it; ``workers`` where not every host is one."""
    server: dict[str, Any] = {"address": f"{shape.address('s0')}:{PORT}", "fraction": 1.0}
    below = (
        [host for host in block if workers is None or host < workers] for block in blocks(shape.hosts, shape.racks)
    )
    racks = [
        {"aggregator": f"{shape.address(f'a{rack}')}:{PORT}", "workers": block} for rack, block in enumerate(below)
    ]
    if way != "server" and shape.core_aggregator:
        server["tree"] = [{"aggregator": f"{shape.address(f'a{shape.racks}')}:{PORT}", "children": racks}]
    elif way != "server":
        server["tree"] = racks
    number = "int32" if way in ("server", STORM) else way
    return {"version": 1, "aggregated": {"format": number, "window": window, "servers": [server]}}


def measure(
    *,
    workers: int,
    loss: float,
    ways: Sequence[str],
    rate_mbit: float,
    nbytes: int,
    window: int,
    turns: int,
    operations: int,
    offloads: bool,
    timeout_s: float,
) -> list[Row]:
    """Make a cluster, start its daemons, run all ways by turns.

    Raises:
        BenchError: a daemon or a rank failed or hung, with the end of what it said.
        TestbedUnavailable: no emulated cluster here.
    """
    shape = topology(workers, rate_mbit, loss, stranger=STORM in ways)
    link = LinkSpec(rate_mbit=rate_mbit, mtu=9000, offloads=offloads)
    arguments = {key: value for key, value in shape.to_dict().items() if key != "hosts"}
    with ExitStack() as stack:
        bed = stack.enter_context(Testbed(hosts=shape.hosts, link=link, **arguments))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(Daemons(bed))
        storm = None
        if STORM in ways:
            storm = str(folder / "storm")
            below = sum(host < workers for host in blocks(shape.hosts, shape.racks)[-1])
            target = f"{shape.address(f'a{shape.racks - 1}')}:{PORT}"
            command = [sys.executable, "-m", "penstock.bench.stranger", target, str(below * rate_mbit), storm]
            said = stack.enter_context(tempfile.TemporaryFile())
            stranger = bed.popen(f"h{workers}", command, stdout=said, stderr=said)
            stack.callback(stranger.wait)
            stack.callback(stranger.kill)
        plans = {}
        for way in ways:
            if way not in ("ring", "gloo"):
                plans[way] = str(folder / f"{way}.yaml")
                Path(plans[way]).write_text(json.dumps(plan(shape, way, window, workers)))
        options = {
            "ways": list(ways),
            "storm": storm,
            "plans": plans,
            "elements": nbytes // 4,
            "turns": turns,
            "operations": operations,
            "interface": Testbed.interface,
        }
        what = f"aggregated, {workers} workers"
        hosts = [f"h{host}" for host in range(workers)]
        records = run_program(bed, "aggregated_rank", options, what=what, ranks=workers, timeout_s=timeout_s, on=hosts)
        refused = _refused(said) if storm else 0.0
    rows = summarise(records, loss=loss, rate_mbit=rate_mbit)
    return [replace(row, strangers=refused) if row.way == STORM else row for row in rows]


def _refused(said: IO[bytes]) -> float:
    """What a stranger told of its storms: packets that were refused in a second. All that it sent should be."""
    said.seek(0)
    text = said.read().decode()
    storms = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    sent, refused, seconds = (sum(storm[key] for storm in storms) for key in ("sent", "refused", "seconds"))
    if refused < 0.9 * sent or not sent:
        raise BenchError(
            f"the stranger sent {sent} packets, of which {refused} were refused; it said:\n  {text[-2000:]}"
        )
    return float(refused / seconds)


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
        if not self._bed.link.uses_offloads:
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


def summarise(records: Sequence[Sequence[dict[str, Any]]], *, loss: float, rate_mbit: float) -> list[Row]:
    """What the ranks said, in numbers. Pure."""
    rows = []
    turns = [[record for record in each if record["turn"] >= 0] for each in records]
    for way in dict.fromkeys(record["way"] for record in turns[0]):
        mine = [[record for record in each if record["way"] == way] for each in turns]
        slowest = [
            max(each)
            for records in zip(*mine, strict=True)
            for each in zip(*(r["seconds"] for r in records), strict=True)
        ]
        moved = [record for each in mine for record in each]
        carried = sum(record["tensor_bytes"] * len(record["seconds"]) for record in moved)
        rows.append(
            Row(
                workers=len(records),
                loss=loss,
                way=way,
                seconds=statistics.median(slowest),
                tensor_bytes=mine[0][0]["tensor_bytes"],
                sent=sum(record["sent"] for record in moved) / carried,
                received=sum(record["received"] for record in moved) / carried,
                busy=statistics.median(record["busy"] for record in mine[0]),
                rate_mbit=rate_mbit,
            )
        )
    return rows


def table(rows: Sequence[Row]) -> Table:
    """A line for each way."""
    shown = Table(title="all-reduce through aggregators", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("N", "loss", "way"):
        shown.add_column(column, no_wrap=True)
    for column in (
        "ms",
        "of the link",
        "over ring",
        "over gloo",
        "sent/S",
        "received/S",
        "of lossless",
        "busy",
    ):
        shown.add_column(column, justify="right", no_wrap=True)
    by_key = {(row.workers, row.loss, row.way): row for row in rows}
    for row in rows:
        ring, gloo = (by_key.get((row.workers, row.loss, way)) for way in ("ring", "gloo"))
        lossless = by_key.get((row.workers, 0.0, row.way))
        shown.add_row(
            f"{row.workers}",
            f"{row.loss:g}",
            row.way,
            f"{1e3 * row.seconds:.1f}",
            f"{row.share:.0%}",
            *(_ratio(other, row) for other in (ring, gloo)),
            f"{row.sent:.3f}",
            f"{row.received:.3f}",
            f"{lossless.seconds / row.seconds:.0%}" if lossless and row.loss else "",
            f"{row.busy:.0%}",
        )
    storms = [f"{row.strangers:.0f} ({row.workers} workers)" for row in rows if row.strangers]
    if storms:
        shown.caption = f"storm: packets of the stranger that were refused in a second: {', '.join(storms)}"
    return shown


def _ratio(other: Row | None, row: Row) -> str:
    """How much faster than another way, for as many bytes of a tensor."""
    if other is None:
        return ""
    return f"{other.seconds / other.tensor_bytes / (row.seconds / row.tensor_bytes):.2f}x"
