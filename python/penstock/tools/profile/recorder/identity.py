"""Which rank this process is, on which host, and where its file goes."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

from penstock.profiling.record import Header
from penstock.texts import harmless
from penstock.tools.profile.run import machine

__all__ = ["Identity", "host", "make_room"]

_OF_JOB = ("TORCHELASTIC_RUN_ID", "MASTER_PORT")
"""What all ranks of a job have in common, and two jobs at a time do not."""

_FROM_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
)


class Identity:
    """The rank, as its launcher says, until ``init_process_group`` says it."""

    def __init__(self) -> None:
        self.rank, self.world, self.here = _launched()
        self.start_ns = time.monotonic_ns()
        self.wall_ns = time.time_ns()
        self.host = host()
        self.about: dict[str, Any] = {}

    def joined(self, rank: int, world: int, backend: str) -> None:
        if self.world == 1:  # no launcher has said anything, so they may all be here
            self.here = world
        self.rank, self.world = rank, world
        self.about["backend"] = backend

    def header(self) -> Header:
        # To ask whether there is a device would start CUDA, after which no fork can use it, nor a script choose its devices.
        torch = sys.modules.get("torch")
        device = "cuda" if torch is not None and torch.cuda.is_initialized() else "cpu"
        about = {**self.about, "device": device}
        if "backend" in about:
            about["backend"] = _backend(about["backend"], device)
        return Header(self.rank, self.world, self.host, os.getpid(), self.start_ns, self.wall_ns, about)

    def describe(self, torch: Any) -> None:
        self.about |= {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "command": harmless(" ".join(getattr(sys, "orig_argv", sys.argv))[:2000]),
            "threads": torch.get_num_threads(),
            "cores": len(os.sched_getaffinity(0)),
            "job": ":".join(os.environ.get(name, "") for name in _OF_JOB).strip(":"),
        }


def _backend(given: str, device: str) -> str:
    """The one for this kind of device, of several such as ``cpu:gloo,cuda:nccl``."""
    of = dict(part.partition(":")[::2] for part in given.split(","))
    return of.get(device) or given


def _launched() -> tuple[int, int, int]:
    """Rank, ranks of the job, ranks on this host."""
    for rank, world, here in _FROM_LAUNCHERS:
        with contextlib.suppress(KeyError, ValueError):
            found = int(os.environ[rank]), int(os.environ[world]), int(os.environ.get(here, "1"))
            if 0 <= found[0] < found[1]:
                return found
    return 0, 1, 1


def host() -> str:
    """A name for this machine and network namespace: ranks of two namespaces share a clock, but no interfaces."""
    network = os.stat("/proc/self/ns/net").st_ino if os.path.exists("/proc/self/ns/net") else 0
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        boot = ""
    mark = hashlib.sha256(f"{boot}{network}".encode()).hexdigest()[:6]
    return f"{machine()}-{mark}"


def make_room(path: Path) -> Path:
    """Move a file of an earlier life of the rank, before torchrun started it again, to ``before-1`` beside it, or ``-2``, ...
    Each of these folders is one that `penstock profile --read` takes. Several processes may do this at once."""
    number = 1
    while path.exists():
        there = path.parent / f"before-{number}" / path.name
        there.parent.mkdir(exist_ok=True)
        try:
            there.touch(exist_ok=False)  # this place is ours
        except FileExistsError:
            number += 1
            continue
        try:
            path.rename(there)
        except FileNotFoundError:  # another process was faster
            there.unlink()
    return path
