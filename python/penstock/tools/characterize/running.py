"""Runs a cell: the model under `penstock profile`, by a command of the matrix, on emulated hosts where the cell has a link, or on
this host; and tries whether a batch fits."""

from __future__ import annotations

import glob
import itertools
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections import Counter as Counted
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from penstock.errors import PenstockError
from penstock.numbers import plural
from penstock.profiling.record import Record
from penstock.profiling.utilisation import Counter, Drop, drops, hosts
from penstock.tools.bench import machine
from penstock.tools.characterize.matrix import Cell
from penstock.tools.characterize.results import Outcome, Rates, outcome_of
from penstock.tools.profile.run import SAYS

__all__ = [
    "COURSE_S",
    "Course",
    "RunFailed",
    "carried",
    "command_of",
    "complaints_of",
    "counted_drops",
    "course_of",
    "environment_of",
    "fits",
    "lacks_gpus",
    "lacks_launcher",
    "run",
]


class RunFailed(PenstockError):
    """A run came to nothing. Others may not."""


def command_of(cell: Cell, steps: int, seed: int, *, memory: int = 0, checkpoint: str = "") -> list[str]:
    """What runs the ranks of a cell; of ``aggregated``, whose daemons come first, what stands behind ``--``.

    Args:
        checkpoint: the file name before a rank and ``.pt``, for a cell with checkpoints.
    """
    train = ["-m", "penstock.workloads.transformer", cell.model, "--parallel", cell.parallel]
    train += ["--batch", str(cell.batch), "--micro-batch", str(cell.micro_batch), "--sequence", str(cell.sequence)]
    train += ["--steps", str(steps), "--seed", str(seed), "--memory", str(memory)]
    if cell.checkpoint_every:
        train += ["--checkpoint-every", str(cell.checkpoint_every), "--checkpoint", checkpoint]
    if cell.evaluate_every:
        train += ["--evaluate-every", str(cell.evaluate_every)]
    train += ["--backend", cell.transport if cell.transport in ("gloo", "nccl") else "penstock"]
    if cell.device != "cpu":
        train += ["--device", cell.device]
    if cell.launch:
        return [*shlex.split(cell.launch.replace("{ranks}", str(cell.ranks))), *train]
    if not cell.link_mbit:
        ranks = ["--standalone", "--nproc-per-node", str(cell.ranks)]
        return [sys.executable, "-m", "torch.distributed.run", *ranks, *train]
    bed = [sys.executable, "-m", "penstock", "testbed", "run", "--quiet", "--hosts", str(cell.ranks)]
    bed += ["--rate", f"{cell.link_mbit:g}"]
    if cell.flow_mbit:
        bed += ["--flow", f"{cell.flow_mbit:g}"]
    return [*bed, "--", sys.executable, *train]


def environment_of(cell: Cell, environment: Mapping[str, str]) -> dict[str, str]:
    """Of the ranks: what the transport is, and nothing else of Penstock's that happens to be set here."""
    kept = {name: value for name, value in environment.items() if not name.startswith("PENSTOCK_")}
    kept["OMP_NUM_THREADS"] = "1"
    if cell.transport.startswith("tcp"):
        kept["PENSTOCK_SHM"] = "0"
        _, _, streams = cell.transport.partition("-")
        if streams:
            kept["PENSTOCK_STREAMS"] = streams
    return kept


def run(cell: Cell, repeat: int, *, steps: int, seed: int, folder: Path, timeout_s: float) -> Outcome:
    """Run a cell once. The records go to a folder of the run's own below ``folder``, which is overwritten.

    Blocking: until it has ended. Ctrl-C ends its processes.

    Raises:
        RunFailed: with the end of what it printed; or it took too long.
    """
    records = folder / f"{cell.key}.{repeat}"
    shutil.rmtree(records, ignore_errors=True)
    table = folder / f"{cell.key}.{repeat}.breakdown"
    checkpoint = str((folder / f"{cell.key}.{repeat}.checkpoint").absolute())
    inner = command_of(cell, steps, seed + repeat, checkpoint=checkpoint)
    if cell.transport == "aggregated":
        behind = [sys.executable, "-m", "penstock.tools.bench.aggregated.through"]
        inner = [*behind, str(cell.ranks), f"{cell.link_mbit:g}", "int32", "0", *inner[inner.index("--") + 1 :]]
    profile = [sys.executable, "-m", "penstock", "profile", "-o", str(records), "--json", str(table), "--", *inner]
    try:
        code, said = _finished(profile, environment_of(cell, os.environ), timeout_s)
    finally:
        for path in folder.glob(f"{glob.escape(cell.key)}.{repeat}.checkpoint-*.pt"):
            path.unlink()
    if code != 0:
        raise RunFailed(f"it ended with status {code}; it said:\n{said[-_MOST_SAID:]}")
    from penstock.profiling.readers import load
    from penstock.profiling.writers import from_json

    try:
        breakdown = from_json(table)
        found = load(records)
        assert isinstance(found, list), "a folder of ours has records"
        outcome = outcome_of(cell, repeat, breakdown, carried(found))
        if cell.launch and len(breakdown.shares) != cell.ranks:
            text = f"{cell.launch!r} has started or recorded {plural(len(breakdown.shares), 'rank')} instead of {cell.ranks}"
            needs = f"RANK, WORLD_SIZE and the others as torchrun sets them, and to be able to write into {folder}"
            raise RunFailed(f"{text}: each needs {needs}")
        fallen = counted_drops(drops(found, breakdown))
    except PenstockError as error:
        raise RunFailed(str(error)) from error
    finally:
        table.unlink(missing_ok=True)
    problems = tuple(dict.fromkeys([*outcome.problems, *complaints_of(said)]))
    about: dict[str, Any] = {"steps": steps, "seed": seed, "drops": fallen}
    if not cell.launch:  # which may run on other hosts than this one
        cpu = machine.describe()["hardware"]["cpu"]
        about |= {"processors": cpu["usable"], "machine": cpu["model"]}
    return replace(outcome, problems=problems, **about)


def lacks_gpus(cells: Sequence[Cell]) -> str:
    """Why cells cannot run on GPUs of this host, or nothing. What a launch starts finds out by itself."""
    needed = max(
        (1 if cell.link_mbit else cell.ranks for cell in cells if cell.device == "cuda" and not cell.launch), default=0
    )
    if not needed:
        return ""
    import torch

    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if there >= needed:
        return ""
    return f"device cuda needs {plural(needed, 'GPU')} on this host, and torch finds {there or 'none'}"


def lacks_launcher(cells: Sequence[Cell]) -> str:
    """Which launch has no command on this host, or nothing."""
    for launch in dict.fromkeys(cell.launch for cell in cells if cell.launch):
        program = shlex.split(launch)[0]
        if shutil.which(program) is None:
            return f"launch {launch!r}: there is no command {program} on this host"
    return ""


def complaints_of(said: str) -> list[str]:
    """What the profile says of a run that has ended well: what is missing in its record, and why that may be."""
    return [line.removeprefix(SAYS) for line in said.splitlines() if line.startswith(SAYS)]


def fits(cell: Cell, memory: int, *, seed: int, timeout_s: float) -> bool:
    """Whether two steps of the cell run with so many bytes of memory a rank. The network does not matter and is left out.

    Raises:
        RunFailed: for another reason than memory.
    """
    tried = replace(cell, link_mbit=0.0, flow_mbit=0.0, transport="gloo", checkpoint_every=0)
    command = command_of(tried, 2, seed, memory=memory)
    code, said = _finished(command, environment_of(tried, os.environ), timeout_s)
    if code != 0 and '"out_of_memory": true' not in said:
        raise RunFailed(f"{tried.key} with {memory >> 20} MiB ended with status {code}; it said:\n{said[-_MOST_SAID:]}")
    return code == 0


def _finished(command: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> tuple[int, str]:
    process = subprocess.Popen(
        command,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise RunFailed(f"no end after {timeout_s:g} s: {' '.join(command[-12:])}; give --timeout more") from error
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return process.returncode, said


def carried(records: Sequence[Record]) -> Rates:
    """What a host's busiest interface received and sent: means over the steps of its ranks, and the highest rate received; all
    three are means over the hosts. Nothing with one host, whose ranks send nothing over a link."""
    found = []
    for host in hosts(records) if len({each.header.host for each in records}) > 1 else []:
        steps = [each.steps for each in records if each.header.host == host.name and len(each.steps) > 2]
        if not steps or not host.interfaces():
            continue
        start, end = min(own[2].start_ns for own in steps), max(own[-1].end_ns for own in steps)
        best = Rates()
        for interface in host.interfaces():
            received, sent = (
                _mbit(host.counters.get(f"nic.{interface}.{way}_bytes"), start, end) for way in ("rx", "tx")
            )
            if received:
                best = max(best, Rates(received[0], max(received[1:]), sent[0] if sent else 0.0))
        found.append(best)
    return Rates(*(sum(each[at] for each in found) / len(found) for at in range(3))) if found else Rates()


def counted_drops(found: Sequence[Drop]) -> dict[str, float]:
    """How often what a host sends falls, by cause; of the host on which that cause is most frequent."""
    counted = Counted((drop.cause or UNEXPLAINED, drop.host) for drop in found)
    most: dict[str, float] = {}
    for (cause, _), often in counted.items():
        most[cause] = max(most.get(cause, 0.0), often)
    return most


class Course(NamedTuple):
    """What the link of a host received over time, in Mbit/s, between readings of its counters."""

    seconds: list[float]
    """The middle of each time."""
    received: list[float]


def course_of(folder: Path, cell: Cell) -> Course | None:
    """Of rank 0's host in the first run of a cell, from its records in the folder; None if they are gone or tell nothing."""
    from penstock.profiling.readers import load

    try:
        records = load(folder / f"{cell.key}.0")
    except PenstockError:
        return None
    assert isinstance(records, list), "a folder of ours has records"
    steps = [each for each in records if each.header.rank == 0 and len(each.steps) > 2]
    host = next((each for each in hosts(records) if steps and each.name == steps[0].header.host), None)
    if host is None or not host.interfaces():
        return None
    received = host.counters.get(f"nic.{host.interfaces()[0]}.rx_bytes")
    end = steps[0].steps[-1].end_ns
    start = max(steps[0].steps[2].start_ns, end - round(COURSE_S * 1e9))
    if received is None:
        return None
    times = [time_ns for time_ns in received.times_ns if start <= time_ns <= end]
    course = Course([], [])
    for first, last in itertools.pairwise(times):
        course.seconds.append(((first + last) / 2 - start) / 1e9)
        course.received.append(8e3 * received.grown(first, last) / (last - first))
    return course if len(course.seconds) > 1 else None


def _mbit(counted: Counter | None, start: int, end: int) -> list[float]:
    """The mean between two times, and the rate from each reading to the next; nothing with less than three readings."""
    times = [time_ns for time_ns in counted.times_ns if start <= time_ns <= end] if counted is not None else []
    if counted is None or len(times) < 3:
        return []
    between = [(times[0], times[-1]), *itertools.pairwise(times)]
    return [8e3 * counted.grown(first, last) / (last - first) for first, last in between]


COURSE_S = 5.0
UNEXPLAINED = "unexplained"
_MOST_SAID = 10_000
"""Characters that are told of what a failed run printed last: torchrun says some thousand below the errors of its ranks."""
