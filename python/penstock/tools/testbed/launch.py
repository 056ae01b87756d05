"""Ranks spread over the hosts of a testbed: how they start, what they print, how they end."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar

from penstock.cluster.generate import blocks
from penstock.tools.testbed import keeper, link, rank
from penstock.tools.testbed.link import FlowClass
from penstock.tools.testbed.topology import LinkTraffic

Result = TypeVar("Result")


class Bed(Protocol):
    """The interface of a run's hosts; `penstock.tools.testbed.cluster.Bed` documents its methods."""

    @property
    def hosts(self) -> int: ...
    def address(self, host: int | str, family: int = 4) -> str: ...
    def inside(self, host: int | str, function: Callable[[], Result]) -> Result: ...
    def network(self, host: int | str) -> str | None: ...
    def popen(
        self, host: int | str, argv: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]: ...
    def counters(self) -> dict[int, dict[str, int]]: ...
    def flows(self) -> dict[int, list[FlowClass]]: ...
    def links(self) -> list[LinkTraffic]: ...
    def remembered(self) -> dict[int, set[tuple[int, int]]]: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletedRun:
    """The result of a run."""

    returncode: int
    """That of the first rank to fail, as subprocess gives it (negative: killed by that signal); 0 when none did."""
    failed_rank: int | None
    returncodes: dict[int, int]
    """By rank, as far as they are known: a rank that was killed with its launcher has none."""
    outputs: list[str]
    """Standard output and error of each rank, in the order in which they came."""
    wall_s: float
    cpu_share: float
    """How busy the machine's processors were, 0 to 1, including other programs."""
    counters: dict[int, dict[str, int]]
    """As `Bed.counters`, for the time of the run."""
    flows: dict[int, list[FlowClass]]
    """As `Bed.flows`, for the time of the run; ``flows`` counts the connections that were seen, twice a second and at its end."""
    links: list[LinkTraffic] = dataclasses.field(default_factory=list)
    """As `Bed.links`, for the time of the run."""


def run(
    bed: Bed,
    command: Sequence[str],
    *,
    ranks: int,
    on: Sequence[int | str] | None = None,
    env: Mapping[str, str] | None = None,
    launcher: Literal["direct", "fork", "torchrun"] = "direct",
    on_line: Callable[[int, str], None] | None = None,
    timeout_s: float | None = None,
    grace_s: float = 10.0,
) -> CompletedRun:
    """Run ``command`` once for each rank, spread over the hosts, and wait until all have ended.

    Rank 0 to ``ranks`` - 1 are dealt to the hosts in blocks, as torchrun does, the first hosts getting one more where
    it does not come out even. Each finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR and
    MASTER_PORT (free when it was looked for) in its environment, so that ``init_process_group`` needs no arguments;
    and OMP_NUM_THREADS, when unset, as the processors of this machine divided by all ranks.

    Args:
        on: the nodes to deal the ranks to, such as ``["a0", "s0"]``; None for all hosts. Rank 0's is the master's.
        env: added to the environment of every rank.
        launcher: "direct" starts the ranks itself. "fork" starts one process that imports torch and forks all ranks
            (`forks`), which saves seconds of processor time a rank; ``command`` must then be ``[sys.executable, ...]``
            with a script or ``-m`` and a module. "torchrun" starts one torchrun a host, which starts the host's
            ranks: the same environment as on a real cluster, for 3 s more of processor time a host.
        on_line: called as ``on_line(rank, line)`` for each line of output, on the calling thread; rank -1 - host is
            the torchrun of a host.
        timeout_s: for all of it.
        grace_s: once a rank has failed, how long the others may take to end by themselves (and to say what they
            noticed) before SIGTERM; SIGKILL comes 5 s later.

    Raises:
        TimeoutError: ``timeout_s`` passed. Every process of the run is dead.
        KeyboardInterrupt: as it came. The ranks got SIGINT, 5 s to end, then SIGKILL.

    Whatever happens, no process of this run is left, daemons and grandchildren included. Blocks until then.
    """
    if ranks < 1:
        raise ValueError(f"ranks={ranks}: give at least 1")
    before = bed.counters(), bed.flows(), _processor_ticks(), bed.links()
    started = time.monotonic()
    the_run = _Run(bed, ranks, list(range(bed.hosts)) if on is None else list(on), on_line, grace_s)
    try:
        the_run.start(list(command), dict(env or {}), launcher)
        the_run.wait(timeout_s)
    finally:
        the_run.end()
    wall_s = time.monotonic() - started
    now = _processor_ticks()
    busy, total = now[0] - before[2][0], now[1] - before[2][1]
    failed = next((each for each, code in the_run.codes.items() if code != 0), None)
    returncode = 0 if failed is None else the_run.codes[failed]
    if failed is None:
        returncode = next((code for code in the_run.other_codes if code != 0), 0)
    return CompletedRun(
        returncode=returncode,
        failed_rank=failed,
        returncodes=dict(sorted(the_run.codes.items())),
        outputs=["".join(the_run.outputs[each]) for each in range(ranks)],
        wall_s=wall_s,
        cpu_share=busy / total if total else 0.0,
        counters={
            host: {key: value - before[0][host][key] for key, value in counters.items()}
            for host, counters in bed.counters().items()
        },
        flows=_flows_since(before[1], bed.flows(), the_run.connections),
        links=[now.since(then) for now, then in zip(bed.links(), before[3], strict=True)],
    )


class _Run:
    """One run. All that happens arrives through one selector: output, ends of processes, and the clock."""

    def __init__(
        self,
        bed: Bed,
        ranks: int,
        nodes: list[int | str],
        on_line: Callable[[int, str], None] | None,
        grace_s: float,
    ) -> None:
        self.codes: dict[int, int] = {}  # of ranks, in the order in which they ended
        self.other_codes: list[int] = []  # of torchruns
        self.outputs: dict[int, list[str]] = collections.defaultdict(list)
        self.connections: dict[int, set[tuple[int, int]]] = collections.defaultdict(set)
        self._earlier = bed.remembered()
        self._bed = bed
        self._ranks = ranks
        self._nodes = nodes
        self._on_line = on_line
        self._id = secrets.token_hex(8)
        self._alive: dict[int, tuple[subprocess.Popen[bytes], int]] = {}  # by pidfd: process, rank or -1 - host
        self._streams: dict[int, tuple[int, bytearray]] = {}  # by descriptor: rank or -1 - host, part of a line
        self._ends: list[int] = []  # ends of pipes that others write to, held open so that they can be opened again
        self._reports = -1  # the pipe on which `rank` and `forks` report ends
        self._poll = select.poll()
        self._termination = _Termination(grace_s)

    def start(self, command: list[str], env: dict[str, str], launcher: str) -> None:
        bed, ranks = self._bed, self._ranks
        nodes = self._nodes
        dealt = blocks(ranks, len(nodes))
        master = bed.address(nodes[0])
        master_port = bed.inside(nodes[0], lambda: _free_port(master))
        # On a real cluster each host has its own processors. Here all share these.
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, len(os.sched_getaffinity(0)) // ranks))
        common = {"OMP_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1", **env, RUN_MARK: self._id}
        if launcher == "torchrun":
            self._start_torchrun(command, common, dealt, master_port)
            return
        places = [
            (
                host,
                {
                    "RANK": str(global_rank),
                    "WORLD_SIZE": str(ranks),
                    "LOCAL_RANK": str(local_rank),
                    "LOCAL_WORLD_SIZE": str(len(block)),
                    "GROUP_RANK": str(host),
                    "GROUP_WORLD_SIZE": str(len(dealt)),
                    "MASTER_ADDR": master,
                    "MASTER_PORT": str(master_port),
                },
            )
            for host, block in enumerate(dealt)
            for local_rank, global_rank in enumerate(block)
        ]
        if launcher == "fork":
            self._start_forks(command, common, places)
            return
        if launcher != "direct":
            raise ValueError(f"launcher='{launcher}': 'direct', 'fork' or 'torchrun'")
        for each, (host, own) in enumerate(places):
            self._spawn(host, each, command, {**common, **own}, said_by=each)

    def _start_forks(self, command: list[str], env: dict[str, str], places: list[tuple[int, dict[str, str]]]) -> None:
        """One process, on the first host, forks the ranks. What it says itself counts as said by rank 0."""
        reports, *outputs = self._open_pipes()
        forked = []
        for output, (host, own) in zip(outputs, places, strict=True):
            forked.append({"env": own, "output": output, "network": self._bed.network(self._nodes[host])})
        job = json.dumps({"command": command, "ranks": forked})
        # A process that forks must have no threads; OpenBLAS starts some when it is imported.
        env = {"OPENBLAS_NUM_THREADS": "1", **env}
        self._spawn(0, -1, [sys.executable, "-m", "penstock.tools.testbed.forks", reports, job], env, said_by=0)

    def _start_torchrun(self, command: list[str], env: dict[str, str], dealt: list[range], port: int) -> None:
        """One torchrun a host. Between it and each rank stands `rank`, which brings us the output and the exit code."""
        reports, *outputs = self._open_pipes()
        for host, block in enumerate(dealt):
            options = {
                "nnodes": len(dealt),
                "nproc-per-node": len(block),
                "node-rank": host,
                "master-addr": self._bed.address(self._nodes[0]),
                "master-port": port,
                "local-addr": self._bed.address(self._nodes[host]),
            }
            argv = [sys.executable, "-m", "torch.distributed.run"]
            argv += [f"--{key}={value}" for key, value in options.items()]
            argv += ["--no-python", sys.executable, "-I", "-S", rank.__file__, reports, *outputs, "--", *command]
            self._spawn(host, -1 - host, argv, env, said_by=-1 - host)

    def _open_pipes(self) -> list[str]:
        """Paths to write to: one for reports of ranks that end, and one for each rank's output."""
        self._reports, write_end = os.pipe()
        self._ends.append(write_end)
        self._listen(self._reports, 0)
        for each in range(self._ranks):
            read_end, write_end = os.pipe()
            self._ends.append(write_end)
            self._listen(read_end, each)
        return [f"/proc/{os.getpid()}/fd/{write_end}" for write_end in self._ends]

    def _spawn(self, host: int, who: int, argv: list[str], env: dict[str, str], said_by: int) -> None:
        """Start a process: rank ``who``, or -1 - host. What it prints is that of ``said_by``."""
        read_end, write_end = os.pipe()
        try:
            process = self._bed.popen(
                self._nodes[host], argv, env, stdin=subprocess.DEVNULL, stdout=write_end, stderr=write_end
            )
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        self._listen(read_end, said_by)
        handle = os.pidfd_open(process.pid)
        self._alive[handle] = process, who
        self._poll.register(handle, select.POLLIN)

    def _listen(self, read_end: int, who: int) -> None:
        os.set_blocking(read_end, False)
        self._streams[read_end] = who, bytearray()
        self._poll.register(read_end, select.POLLIN)

    def wait(self, timeout_s: float | None) -> None:
        end = time.monotonic() + (float("inf") if timeout_s is None else timeout_s)
        next_look = time.monotonic()
        interrupted = False
        while self._alive:
            try:
                now = time.monotonic()
                if now >= end:
                    raise TimeoutError(self._describe_timeout(timeout_s))
                if now >= self._termination.deadline:
                    self._signal(self._termination.next_signal)
                    self._termination.signalled()
                if now >= next_look:
                    self._note_connections()
                    next_look = now + LOOK_EVERY_S
                wait_s = min(end, self._termination.deadline, next_look) - time.monotonic()
                for descriptor, _ in self._poll.poll(max(0, wait_s * 1000)):
                    if descriptor in self._streams:
                        self._read(descriptor)
                    else:
                        self._reap(descriptor)
            except KeyboardInterrupt:
                if interrupted:
                    raise  # a second Ctrl-C: do not wait for anybody
                interrupted = True
                self._signal(signal.SIGINT)
                self._termination.signalled()
        if interrupted:
            raise KeyboardInterrupt

    def end(self) -> None:
        """Kill what is left, read what is left to read, and free everything."""
        keeper.sweep(f"{RUN_MARK}={self._id}".encode(), set())
        self._note_connections()
        for process, _ in self._alive.values():
            process.wait()
        for descriptor in list(self._streams):
            self._read(descriptor)
            who, rest = self._streams.get(descriptor, (0, bytearray()))
            if rest:
                self._line(who, bytes(rest))
        for descriptor in (*self._alive, *self._streams, *self._ends):
            os.close(descriptor)

    def _reap(self, handle: int) -> None:
        process, who = self._alive.pop(handle)
        self._poll.unregister(handle)
        os.close(handle)
        self._ended(who, process.wait())

    def _ended(self, who: int, code: int) -> None:
        if who >= 0:
            self.codes.setdefault(who, code)
        else:
            self.other_codes.append(code)
        if code != 0:
            self._termination.rank_failed()

    def _read(self, descriptor: int) -> None:
        """Take what a pipe holds, and pass on its whole lines."""
        who, rest = self._streams[descriptor]
        while True:
            try:
                chunk = os.read(descriptor, 1 << 16)
            except BlockingIOError:
                return
            if not chunk:
                self._poll.unregister(descriptor)
                del self._streams[descriptor]
                os.close(descriptor)
                if rest:
                    self._line(who, bytes(rest))
                return
            *lines, tail = (bytes(rest) + chunk).split(b"\n")
            rest[:] = tail
            for line in lines:
                if descriptor == self._reports:
                    ended, code = map(int, line.split())
                    self._ended(ended, code)
                else:
                    self._line(who, line + b"\n")

    def _line(self, who: int, line: bytes) -> None:
        # Emulated hosts have no name service, and torch's store says so of each of its connections.
        if NAMELESS in line:
            return
        text = line.decode(errors="replace")
        if who >= 0:
            self.outputs[who].append(text)
        if self._on_line is not None:
            self._on_line(who, text.rstrip("\n"))

    def _signal(self, number: signal.Signals) -> None:
        """To each process that we started and the process group that it leads."""
        for process, _ in self._alive.values():
            try:
                os.killpg(process.pid, number)
            except (ProcessLookupError, PermissionError):
                pass

    def _note_connections(self) -> None:
        for host, seen in self._bed.remembered().items():
            self.connections[host] |= seen - self._earlier[host]

    def _describe_timeout(self, timeout_s: float | None) -> str:
        tails = []
        for each in sorted(set(range(self._ranks)) - set(self.codes)):
            last = "".join(self.outputs[each])[-400:].rstrip()
            tails.append(f"rank {each} still ran; the end of its output:\n{last or '(none)'}")
        return "\n".join([f"the run did not end within {timeout_s:g} s", *tails])


class _Termination:
    """When the processes that are left get the next signal, and which: they are given time, then SIGTERM, then SIGKILL."""

    def __init__(self, grace_s: float) -> None:
        self.deadline = float("inf")
        self.next_signal = signal.SIGTERM
        self._grace_s = grace_s

    def rank_failed(self) -> None:
        """The first failure, of a rank or of its launcher, begins the time in which the others may end by themselves."""
        if self.deadline == float("inf"):
            self.deadline = time.monotonic() + self._grace_s

    def signalled(self) -> None:
        self.next_signal, self.deadline = signal.SIGKILL, time.monotonic() + KILL_AFTER_S


def _free_port(address: str) -> int:
    with socket.socket() as listener:
        listener.bind((address, 0))
        return int(listener.getsockname()[1])


def _flows_since(
    before: dict[int, list[FlowClass]], after: dict[int, list[FlowClass]], connections: dict[int, set[tuple[int, int]]]
) -> dict[int, list[FlowClass]]:
    result = {}
    for host, classes in after.items():
        seen = [link.flow_class(*ports) for ports in connections[host]]
        result[host] = [
            dataclasses.replace(
                each, bytes=each.bytes - old.bytes, packets=each.packets - old.packets, flows=seen.count(each.index)
            )
            for each, old in zip(classes, before[host], strict=True)
        ]
    return result


def _processor_ticks() -> tuple[int, int]:
    """Ticks (busy, all) of all processors together."""
    with open("/proc/stat") as file:
        user, nice, system, idle, iowait, irq, softirq, steal, *_ = map(int, file.readline().split()[1:])
    busy = user + nice + system + irq + softirq + steal
    return busy, busy + idle + iowait


NAMELESS = b"[c10d] The hostname of the client socket cannot be retrieved"

RUN_MARK = "PENSTOCK_TESTBED_RUN"

KILL_AFTER_S = 5.0
"""From SIGINT or SIGTERM to SIGKILL. A guess: Python with torch takes about a second to end."""

LOOK_EVERY_S = 0.5
"""How often open connections are listed, to count flows by class. 0.2 ms a host."""
