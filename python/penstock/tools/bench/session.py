"""The coordinator: rank processes of every backend alive at once, taking turns, so that noise hits all alike.

For each number of ranks, every backend and every probe gets a set of rank processes (`RankGroup`). For each size all of
them prepare; then rounds follow, in which each has one turn (A B C, A B C, ...) while the others sleep. Whatever else the
machine does in that minute falls on all of them, and the ratios stay right where the absolute figures do not.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock import numbers
from penstock.tools.bench import machine
from penstock.tools.bench.collectives import COLLECTIVES, Collective
from penstock.tools.bench.launcher import BenchError, Launcher
from penstock.tools.bench.task import Task
from penstock.tools.testbed.bed import Bed
from penstock.tools.testbed.cluster import Testbed
from penstock.tools.testbed.link import CLASSES, FlowClass, flow_class


@dataclass(frozen=True)
class Series:
    """One line of the result: a backend, a limit or a control."""

    label: str
    role: str
    """What its rank processes are (`worker`). Series with the same role and environment share them."""
    env: Mapping[str, str] = field(default_factory=dict)
    limit: str | None = None
    """The role of the probes that bound this series, ``sockets`` or ``copy``: the fastest of them is its limit."""
    flows: int = 0
    split: str = ""
    smallest: int = 0
    """No turn for sizes below this many bytes."""

    @property
    def group(self) -> tuple[str, tuple[tuple[str, str], ...]]:
        return self.role, tuple(sorted(self.env.items()))

    @property
    def is_backend(self) -> bool:
        return self.role not in ("sockets", "copy")


@dataclass(frozen=True)
class Settings:
    """What to measure, and for how long."""

    collective: str
    sizes: Sequence[int]
    ranks: Sequence[int]
    dtype: str = "float32"
    rounds: int = 5
    turn_s: float = 0.25
    """A turn runs as many operations as fit into this, at least one block."""
    joins: int = 1
    """How many fresh jobs are measured: how often all groups are formed anew, each time for all rounds. Their connections
    then get other ports, which decide their classes on a testbed with capped flows, and windows and rates are learnt anew."""
    timeout_s: float = 300.0
    """For one turn of one backend. A rank that dies is noticed at once."""
    by_turns: bool = False
    """Rank i runs on host i mod hosts; else ranks fill the hosts in blocks, as launchers have it."""


@dataclass
class Point:
    """One series at one size and number of ranks."""

    collective: str
    label: str
    ranks: int
    nbytes: int
    seconds: list[float] = field(default_factory=list)
    """Of one operation, by block: from the first rank's entry to the last rank's exit, over the operations of the block."""
    jobs: list[list[float]] = field(default_factory=list)
    """The same, a list for each fresh job (`Settings.joins`)."""
    slots: int = 1
    cpu_share: float | None = None
    """Of all processors of the box, while the operations ran; None where they took too little time to tell."""
    sent: dict[int, float] | None = None
    """Testbed: bytes per operation that each host's interface counted as sent, headers and acknowledgements included."""
    planned: dict[int, int] | None = None
    """Testbed: bytes that the plan has each host send to others."""
    class_flows: list[dict[int, list[int]]] = field(default_factory=list)
    """Testbed with capped flows: each time that the group was formed, by host, connections of this series in each class."""
    class_shares: list[dict[int, list[float]]] = field(default_factory=list)
    """The same for the share of the bytes that went through each class, in the last turn."""
    grown_bytes: int | None = None
    """The rank with the most: resident memory since before the group was joined, beyond the bench's tensors."""
    engine_bytes: int | None = None
    """The rank with the most: what the backend says that it holds."""
    _ticks: list[int] = field(default_factory=lambda: [0, 0])
    _operations: int = 0


def measure(
    bed: Bed, series: Sequence[Series], settings: Settings, on_progress: Callable[[str, int, int], None]
) -> list[Point]:
    """Measures every series at every number of ranks and size. Blocks; raises BenchError.

    Args:
        on_progress: called with what is being done, how many turns are done and how many there will be.
    """
    turns = sum(len(_at_size(series, nbytes)) for nbytes in settings.sizes) * (settings.rounds + 1)
    turns *= len(settings.ranks) * settings.joins
    done = 0

    def progress(text: str, turn: int = 0) -> None:
        nonlocal done
        done += turn
        on_progress(text, done, turns)

    largest = max(settings.sizes)
    _check_memory(_at_size(series, largest), max(settings.ranks), largest * _slots(largest))
    points: dict[tuple[int, int, str], Point] = {}
    progress("starting · importing torch")
    with launching(bed) as launcher:
        for ranks, _ in itertools.product(settings.ranks, range(settings.joins)):
            progress(f"{ranks} ranks · starting processes")
            with _groups(bed, launcher, series, ranks, settings) as groups:
                for nbytes in settings.sizes:
                    _measure_size(bed, groups, _at_size(series, nbytes), ranks, nbytes, settings, progress, points)
    for point in points.values():
        busy, total = point._ticks
        if total >= LEAST_TICKS:
            point.cpu_share = busy / total
    return list(points.values())


@contextlib.contextmanager
def launching(bed: Bed) -> Iterator[Launcher]:
    """A launcher, and an end to it."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as directory:
        with contextlib.closing(Launcher(bed, Path(directory) / "launcher.txt")) as launcher:
            yield launcher


def _at_size(series: Sequence[Series], nbytes: int) -> list[Series]:
    return [each for each in series if nbytes >= each.smallest]


def _slots(nbytes: int) -> int:
    return max(1, min(MOST_SLOTS, BLOCK_BYTES // max(nbytes, 1)))


@contextlib.contextmanager
def _groups(
    bed: Bed, launcher: Launcher, series: Sequence[Series], ranks: int, settings: Settings
) -> Iterator[dict[Any, RankGroup]]:
    """The rank processes of all series by `Series.group`: started together, joined one group after the other."""
    groups: dict[Any, RankGroup] = {}
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as directory:
        try:
            for each in series:
                if each.group not in groups:
                    flows = max(other.flows for other in series if other.group == each.group)
                    path = Path(directory) / str(len(groups))
                    groups[each.group] = RankGroup(bed, launcher, each, ranks, flows, path, settings)
            for group in groups.values():
                group.join()
            yield groups
            for group in groups.values():
                group.leave()
        finally:
            for group in groups.values():
                group.close()


def _measure_size(
    bed: Bed,
    groups: Mapping[Any, RankGroup],
    series: Sequence[Series],
    ranks: int,
    nbytes: int,
    settings: Settings,
    progress: Callable[..., None],
    points: dict[tuple[int, int, str], Point],
) -> None:
    """All rounds at one size; adds to ``points``."""
    collective = COLLECTIVES[settings.collective]
    element_bytes = ELEMENT_BYTES[settings.dtype]
    nbytes = collective.elements(nbytes, ranks, element_bytes) * element_bytes
    slots = _slots(nbytes)
    for each in series:
        fresh = Point(settings.collective, each.label, ranks, nbytes, slots=slots)
        point = points.setdefault((ranks, nbytes, each.label), fresh)
        point.jobs.append([])
        if isinstance(bed, Testbed) and bed.link.flow_mbit is not None:
            point.class_flows.append(groups[each.group].class_flows)
            point.class_shares.append({})
    blocks = {}
    at = f"{ranks} ranks · {numbers.size(nbytes)}"

    def turn(each: Series, order: dict[str, Any]) -> float:
        """One turn; returns what one block took, in seconds."""
        group, point = groups[each.group], points[ranks, nbytes, each.label]
        before = bed.counters() if isinstance(bed, Testbed) else {}
        classes_before = bed.flows() if isinstance(bed, Testbed) else {}
        answers = group.order(order, f"{settings.collective} of {numbers.size(nbytes)}")
        spans = list(zip(*(answer["spans"] for answer in answers), strict=True))
        took = [(max(end for _, end in span) - min(begin for begin, _ in span)) / 1e9 for span in spans]
        if order["do"] == "measure":
            point.seconds += [seconds / slots for seconds in took]
            point.jobs[-1] += [seconds / slots for seconds in took]
            point._ticks = [sum(pair) for pair in zip(point._ticks, answers[0]["ticks"], strict=True)]
            _note_memory(point, [answer["memory"] for answer in answers])
            if isinstance(bed, Testbed):
                operations = len(took) * slots
                _note_wire(point, each, collective, bed, before, bed.counters(), operations, group)
                _note_classes(point, bed, classes_before)
        return min(took)

    # Probes that share processes prepare anew for each turn; all others keep their tensors through the rounds.
    shared = {each.group for each in series if sum(other.group == each.group for other in series) > 1}
    tasks = {
        each.label: Task(settings.collective, nbytes, settings.dtype, slots, each.flows, each.split) for each in series
    }
    for each in series:
        progress(f"{at} · {each.label} · warm-up")
        took = turn(each, tasks[each.label].order())
        blocks[each.label] = max(1, min(MOST_BLOCKS, int(settings.turn_s / max(took, 1e-6))))
        progress(f"{at} · {each.label} · warm-up", 1)
    for round_ in range(settings.rounds):
        for each in series:
            progress(f"{at} · {each.label} · round {round_ + 1} of {settings.rounds}")
            if each.group in shared:
                turn(each, tasks[each.label].order())
            turn(each, {"do": "measure", "blocks": blocks[each.label]})
            progress(f"{at} · {each.label} · round {round_ + 1} of {settings.rounds}", 1)
    for group in {each.group for each in series}:
        groups[group].order({"do": "release"}, "releasing tensors")


class RankGroup:
    """The rank processes of one backend or probe, and the sockets that they are ordered through."""

    def __init__(
        self,
        bed: Bed,
        launcher: Launcher,
        series: Series,
        ranks: int,
        flows: int,
        path: Path,
        settings: Settings,
    ):
        """Starts the processes. Their control socket, and files of what they print, lie at ``path`` and beside it."""
        self.series = series
        self.ranks = ranks
        self.class_flows: dict[int, list[int]] = {}
        self._bed = bed
        self._launcher = launcher
        self._path = path
        self._timeout_s = timeout_s = settings.timeout_s
        self._by_turns = settings.by_turns
        self._members: dict[int, _Member] = {}
        self._pids: dict[int, int] = {}
        self._mpirun: subprocess.Popen[Any] | None = None
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(ranks)
        common = ["--control", str(path), "--role", series.role, "--ranks", str(ranks), "--timeout", str(timeout_s)]
        if series.role == "mpi":
            argv = [*MPIRUN, "-n", str(ranks), sys.executable, "-m", "penstock.tools.bench.worker", *common]
            env = {"OMP_NUM_THREADS": "1", **series.env}
            with open(self._output(0), "wb") as file:
                nothing = subprocess.DEVNULL
                options = {"stdin": nothing, "stdout": file, "stderr": subprocess.STDOUT}
                self._mpirun = bed.popen(0, [*argv, "--host", bed.address(0)], env, **options)
            return
        for rank in range(ranks):
            host = self.host(rank)
            argv = [*common, "--rank", str(rank), "--host", bed.address(host), "--flows", str(flows)]
            self._pids[rank] = launcher.start(host, argv, series.env, self._output(rank))

    def host(self, rank: int) -> int:
        """Where a rank runs: `Settings.by_turns`."""
        return rank % self._bed.hosts if self._by_turns else rank * self._bed.hosts // self.ranks

    def join(self) -> None:
        """Waits for all processes and has them form their group."""
        before = self._connections()
        self._accept()
        hellos = [self._members[rank].hello for rank in range(self.ranks)]
        self.order({"do": "connect", "peers": hellos}, "joining the group")
        for host, connections in self._connections().items():
            classes = [flow_class(*ports) for ports in connections - before[host]]
            self.class_flows[host] = [classes.count(index) for index in range(CLASSES)]

    def order(self, order: dict[str, Any], doing: str) -> list[dict[str, Any]]:
        """Gives all ranks an order and returns their answers by rank. Raises BenchError when one fails or none comes."""
        line = (json.dumps(order) + "\n").encode()
        for member in self._members.values():
            try:
                member.connection.sendall(line)
            except OSError:
                pass  # it has died; reading says so
        answers: dict[int, dict[str, Any]] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + self._timeout_s + GRACE_S
        with selectors.DefaultSelector() as selector:
            for rank, member in self._members.items():
                selector.register(member.connection, selectors.EVENT_READ, rank)
            while selector.get_map() and time.monotonic() < deadline:
                for key, _ in selector.select(max(deadline - time.monotonic(), 0)):
                    rank = key.data
                    text = self._members[rank].read_line()
                    if text is None:
                        continue
                    selector.unregister(key.fileobj)
                    if text == "":
                        failures[rank] = self._died(rank)
                    else:
                        answers[rank] = json.loads(text)
                        if "error" in answers[rank]:
                            failures[rank] = answers[rank]["error"]
                    if failures:
                        # The others fail in consequence, or hang: hear those that speak soon, the first cause may be theirs.
                        deadline = min(deadline, time.monotonic() + GRACE_S)
        if failures:
            self._fail(failures, answers, doing)
        missing = sorted(set(self._members) - set(answers))
        if missing:
            reason = f"no answer within {self._timeout_s + GRACE_S:.0f} s"
            self._fail(dict.fromkeys(missing, reason), answers, doing)
        return [answers[rank] for rank in range(self.ranks)]

    def leave(self) -> None:
        """Has all ranks leave their group."""
        self.order({"do": "leave"}, "leaving the group")

    def close(self) -> None:
        """Ends the processes, whatever they are doing."""
        self._listener.close()
        for member in self._members.values():
            member.connection.close()
        if self._mpirun is not None:
            self._mpirun.terminate()  # which has it end its ranks
            try:
                self._mpirun.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                self._mpirun.kill()
                self._mpirun.wait()
        for pid in self._pids.values():
            # The launcher reaps it, so that until it says so the number is this rank's.
            if self._launcher.exit_code(pid, 0) is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                self._launcher.exit_code(pid, GRACE_S)

    def _accept(self) -> None:
        """Accepts the connections of all ranks; each sends its rank."""
        deadline = time.monotonic() + self._timeout_s
        self._listener.settimeout(0.2)
        while len(self._members) < self.ranks:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                for rank in set(range(self.ranks)) - set(self._members):
                    if self._exit_code(rank, 0) is not None:
                        self._fail({rank: self._died(rank)}, {}, "starting")
                if time.monotonic() > deadline:
                    silent = sorted(set(range(self.ranks)) - set(self._members))
                    self._fail({silent[0]: f"it did not start within {self._timeout_s:.0f} s"}, {}, "starting")
                continue
            member = _Member(connection)
            greeting = json.loads(member.wait_line(deadline) or '{"error": "it ended before it said who it is"}')
            if "error" in greeting:
                self._fail({greeting.get("rank") or 0: greeting["error"]}, {}, "starting")
            member.hello = greeting["hello"]
            self._members[greeting["rank"]] = member

    def _connections(self) -> dict[int, set[tuple[int, int]]]:
        return {host: self._bed.connections(host) for host in range(self._bed.hosts)}

    def _output(self, rank: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{rank}.txt")

    def _died(self, rank: int) -> str:
        code = self._exit_code(rank, GRACE_S)
        if code is None:
            return "it closed its connection to the bench"
        return f"it was killed by {signal.Signals(-code).name}" if code < 0 else f"it exited with code {code}"

    def _exit_code(self, rank: int, timeout_s: float) -> int | None:
        if self._mpirun is None:
            return self._launcher.exit_code(self._pids[rank], timeout_s)
        try:
            return self._mpirun.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def _fail(self, failures: dict[int, str], answers: dict[int, dict[str, Any]], doing: str) -> None:
        wrong = [rank for rank in failures if answers.get(rank, {}).get("wrong")]
        # A rank that was the first to fail often takes others with it: one that died says more than one that lost a peer.
        died = [rank for rank in failures if rank not in answers]
        rank = (wrong or died or list(failures))[0]
        text = f"{self.series.label}, rank {rank} of {self.ranks}, {doing}: {failures[rank]}"
        others = [f"\n  rank {other}: {reason}" for other, reason in sorted(failures.items()) if other != rank]
        if others:
            text += "\nThe others then said:" + "".join(others)
        output = self._output(0 if self.series.role == "mpi" else rank)
        last = output.read_text(errors="replace").strip().splitlines()[-LAST_LINES:] if output.exists() else []
        if last:
            text += f"\nIts last output ({len(last)} lines):\n  " + "\n  ".join(last)
        if wrong:
            text += "\nThe backend delivers wrong bytes: do not train with it. Please report this with the lines above."
        elif self.series.role == "mpi":
            text += "\nTo go on without it, leave mpi out of --backends."
        elif self.series.is_backend:
            text += f"\nTo go on without it, leave {self.series.label} out of --backends; `penstock doctor` checks the network."
        raise BenchError(text)


class _Member:
    """The coordinator's connection to one rank."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self.hello: dict[str, Any] = {}
        self._buffer = b""

    def read_line(self) -> str | None:
        """The next line; "" when the rank has gone; None when the line is not whole yet. Call when readable."""
        try:
            data = self.connection.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            return ""
        self._buffer += data
        line, newline, rest = self._buffer.partition(b"\n")
        if not newline:
            return None
        self._buffer = rest
        return line.decode()

    def wait_line(self, deadline: float) -> str | None:
        """Blocks for a line; None when it does not come in time, or the rank has gone."""
        while (left := deadline - time.monotonic()) > 0:
            self.connection.settimeout(left)
            line = self.read_line()
            if line is not None:
                self.connection.settimeout(None)
                return line or None
        return None


def least_sent(collective: Collective, ranks: int, nbytes: int, host: Callable[[int], int]) -> dict[int, int]:
    """The bytes that each host must send to others, whatever the algorithm: what ranks elsewhere must find in their results and
    ranks here contribute to, each (position, set of contributing ranks) once."""
    layouts = [collective.layout(rank, ranks, nbytes) for rank in range(ranks)]
    least = {}
    for here in {host(rank) for rank in range(ranks)}:
        ours = sum(1 << rank for rank in range(ranks) if host(rank) == here)
        needed = {
            (run.origin, run.count, run.weight & ours)
            for rank, layout in enumerate(layouts)
            if host(rank) != here
            for run in layout.result or ()
            if run.weight & ours
        }
        least[here] = sum(count for _, count, _ in needed)
    return least


def unavailable(series: Series, on_testbed: bool) -> str | None:
    """Why this series cannot run here, with what to do; None when nothing is known against it."""
    if series.role == "mpi":
        if on_testbed:
            return "mpirun starts its ranks on this machine, not on the testbed's hosts"
        if shutil.which("mpirun") is None:
            return "mpirun is not on PATH: install Open MPI or MPICH"
        if machine.version("mpi4py") is None:
            return "mpi4py is not installed: pip install mpi4py"
    if series.role.startswith("cuda:"):
        import torch

        if not torch.cuda.is_available():
            return "torch finds no CUDA device (python -c 'import torch; print(torch.cuda.is_available())' tells more)"
    if series.role.endswith(":penstock"):
        try:
            importlib.import_module("penstock._core")
        except ImportError as error:
            return f"its native module cannot be imported ({error}): install Penstock from its wheel, or build it"
    return None


def _check_memory(series: Sequence[Series], ranks: int, nbytes: int) -> None:
    """Refuses what would not fit: the tensors of all backends are alive at once."""
    backends = sum(each.is_backend for each in series)
    copies = any(each.role == "copy" for each in series)
    need = ranks * nbytes * (MEMORY_PER_BACKEND * backends + 3 * copies)
    have = machine.available_memory()
    if need > have:
        raise BenchError(
            f"{numbers.size(nbytes)} with {ranks} ranks of {backends} backends needs about {numbers.size(int(need))} of"
            f" memory, and {numbers.size(have)} are available: use smaller --sizes, fewer --ranks or fewer --backends"
        )


def _note_memory(point: Point, memories: Sequence[dict[str, int]]) -> None:
    for name, attribute in (("grown", "grown_bytes"), ("engine", "engine_bytes")):
        seen = [memory[name] for memory in memories if name in memory]
        if seen:
            setattr(point, attribute, max([*seen, getattr(point, attribute) or 0]))


def _note_wire(
    point: Point,
    series: Series,
    collective: Collective,
    bed: Bed,
    before: Mapping[int, Mapping[str, int]],
    after: Mapping[int, Mapping[str, int]],
    operations: int,
    group: RankGroup,
) -> None:
    """Holds what the interfaces counted against what had to cross. Raises BenchError when less crossed: a detour."""
    least = least_sent(collective, point.ranks, point.nbytes, group.host)
    planned = dict.fromkeys(range(bed.hosts), 0)
    for (src, dst), nbytes in collective.traffic(point.ranks, point.nbytes).items():
        if group.host(src) != group.host(dst):
            planned[group.host(src)] += nbytes
    sent = {host: (after[host]["tx_bytes"] - before[host]["tx_bytes"]) / operations for host in range(bed.hosts)}
    for host, must in least.items():
        if sent[host] < must:
            raise BenchError(
                f"{series.label}: host {host} sent {sent[host]:.0f} bytes through its interface for each {point.collective}"
                f" of {numbers.size(point.nbytes)}, and at least {must} bytes had to cross: the run bypassed the link"
                " (shared memory?), so it says nothing about it. Is PENSTOCK_SHM or a like setting at work?"
            )
    earlier, point._operations = point._operations, point._operations + operations
    mean = point.sent or dict.fromkeys(sent, 0.0)
    point.sent = {host: (mean[host] * earlier + sent[host] * operations) / point._operations for host in sent}
    point.planned = planned


def _note_classes(point: Point, bed: Testbed, before: Mapping[int, Sequence[FlowClass]]) -> None:
    if not point.class_shares:
        return
    for host, after in bed.flows().items():
        moved = [now.bytes - then.bytes for now, then in zip(after, before[host], strict=True)]
        point.class_shares[-1][host] = [count / max(sum(moved), 1) for count in moved]


MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe")

ELEMENT_BYTES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int32": 4, "int64": 8}

BLOCK_BYTES = 4 << 20
MOST_SLOTS = 64
"""Small operations run back to back until they have moved BLOCK_BYTES, at most MOST_SLOTS: the spread with which ranks leave the
barrier (tens of microseconds) is then small against what is measured."""

MOST_BLOCKS = 200
"""A bound on the samples of a turn; the tails of a distribution need no more."""

LEAST_TICKS = 20
"""Below 0.1 s on two processors, ticks of 10 ms say nothing."""

MEMORY_PER_BACKEND = 2.5
"""A collective's tensors are up to two vectors; a backend may hold part of a third."""

GRACE_S = 5.0
"""How long others are heard after a first failure, and a process may take to end by itself."""

LAST_LINES = 15
