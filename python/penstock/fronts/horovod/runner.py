"""``horovod.run``: a function on several ranks of this host, which torchrun's machinery starts and looks after."""

from __future__ import annotations

import os
import pickle
import re
import socket
import sys
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.fronts.horovod import job
from penstock.fronts.horovod.common.exceptions import HorovodInternalError

__all__ = ["run"]


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[float] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    start_timeout: int | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Call ``func(*args, **kwargs)`` on ``num_proc`` ranks, each a fresh process on this host, and wait for all of them.

    The function calls ``hvd.init()``. As with `multiprocessing`, the processes import the script first: what starts a job there
    stands under ``if __name__ == "__main__":``. Function, arguments and results are pickled; with cloudpickle installed
    functions may also be closures.

    Args:
        num_proc: also called ``np``, as Horovod once did.
        hosts, hostfile: may name this host alone, with slots for all ranks; torchrun on each host starts jobs of several.
        start_timeout: seconds until all processes are there.
        output_filename: a folder; a rank writes to ``rank.N/stdout`` and ``rank.N/stderr`` in it.

    What is said about ssh, MPI's arguments, interfaces and caches concerns how Horovod reaches other hosts, and has no effect.

    Returns: what the function returned, by rank.

    Raises:
        ValueError: other hosts, too few slots, MPI, another executable, or an elastic job are asked for; nothing was started.
        RuntimeError: a rank has failed; the others were ended.
    """
    if np is not None:
        warnings.warn("np is deprecated, use num_proc instead", DeprecationWarning, stacklevel=2)
        num_proc = np
    if hosts is not None and hostfile is not None:
        raise ValueError("Argument hosts and hostfile only allow one provided.")
    if use_gloo and use_mpi:
        raise ValueError("Argument use_gloo and use_mpi only allow one set True.")
    if use_mpi:
        raise ValueError("use_mpi: Penstock does without MPI; leave it out, or start the script with mpirun itself")
    if executable not in (None, sys.executable):
        raise ValueError(f"executable={executable!r}: ranks run on {sys.executable}, as this process does")
    if any(
        each is not None for each in (min_num_proc, max_num_proc, min_np, max_np, slots, reset_limit, cooldown_range)
    ):
        raise ValueError("horovod.run starts no elastic job here: docs/guide/elastic.md says how ranks come and go")
    if num_proc < 1:
        raise ValueError(f"num_proc={num_proc} is no number of processes")
    if hostfile is not None:
        with open(hostfile) as file:
            lines = [line.split("#", 1)[0].strip() for line in file]
        hosts = ",".join(re.sub(r"\s+slots\s*=\s*", ":", line) for line in lines if line)
    if hosts is not None:
        _check_hosts(hosts, num_proc)
    return _launch(_dumps((func, tuple(args), dict(kwargs or {}))), num_proc, start_timeout, output_filename)


def _check_hosts(hosts: str, num_proc: int) -> None:
    here = {"localhost", "127.0.0.1", socket.gethostname(), socket.getfqdn()}
    room = 0
    for each in hosts.split(","):
        name, _, count = each.strip().partition(":")
        if name not in here:
            raise ValueError(
                f"hosts={hosts!r}: horovod.run starts processes on this host alone, and {name} is another one; start the script "
                "with torchrun on each host instead"
            )
        if count and not count.isdigit():
            raise ValueError(f"hosts={hosts!r}: {count!r} is no number of slots")
        room += int(count) if count else 1
    if room < num_proc:
        raise ValueError(f"hosts={hosts!r} has {room} slots, and {num_proc} processes are asked for")


def _launch(call: bytes, num_proc: int, start_timeout: int | None, folder: str | None) -> list[Any]:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_proc,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # a free port
        rdzv_configs={} if start_timeout is None else {"timeout": start_timeout},
        local_addr="localhost",
        max_restarts=0,
    )
    with tempfile.TemporaryDirectory(prefix="penstock-horovod-run-") as causes:
        try:
            results = elastic_launch(config, _on_rank)(call, folder, causes)
        except ChildFailedError as error:
            # A rank that fails takes others along, and torch tells which it has seen end first.
            rank, failure = error.get_first_failure()
            told = [str(rank), f"exit code {failure.exitcode}: {failure.message}"]
            for path in sorted(each for each in os.listdir(causes) if not each.endswith(".part"))[:1]:
                with open(os.path.join(causes, path)) as file:
                    told = file.read().split("\n", 1)
            raise RuntimeError(
                "Horovod detected that one or more processes exited with non-zero status, thus causing the job to be terminated. "
                f"The first process to do so was rank {told[0]}: {told[1]}"
            ) from error
    return [pickle.loads(results[rank]) for rank in range(num_proc)]


def _on_rank(call: bytes, folder: str | None, causes: str) -> bytes:
    """In a fresh process, with torchrun's environment. What fails here by itself leaves a text in the folder ``causes``."""
    for name in _OF_ANOTHER_JOB:
        os.environ.pop(name, None)
    if folder is not None:
        digits = len(str(int(os.environ["WORLD_SIZE"]) - 1))
        own = os.path.join(folder, f"rank.{os.environ['RANK']:0>{digits}}")
        os.makedirs(own, exist_ok=True)
        for number, name in ((1, "stdout"), (2, "stderr")):
            opened = os.open(os.path.join(own, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(opened, number)
            os.close(opened)
    try:
        func, args, kwargs = pickle.loads(call)
        return _dumps(func(*args, **kwargs))
    except HorovodInternalError:
        raise
    except Exception as error:
        # Before Horovod is shut down here: that fails the others. Their order is that of the host's one clock.
        rank = os.environ["RANK"]
        path = os.path.join(causes, f"{time.monotonic_ns():020}-{rank}")
        with open(f"{path}.part", "w") as file:
            file.write(f"{rank}\n{type(error).__name__}: {error}")
        os.replace(f"{path}.part", path)
        raise
    finally:
        # torch keeps this process until all functions have returned. One that waits for this rank must learn that it is done.
        job.shutdown()


def _dumps(value: Any) -> bytes:
    try:
        # It also takes closures, and functions and classes of a notebook. Nothing else needs it.
        import cloudpickle  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        return pickle.dumps(value)
    content: bytes = cloudpickle.dumps(value)
    return content


# Where a job is started from a rank of another one, that one's variables would win over torchrun's (`launch`).
_OF_ANOTHER_JOB = (
    "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE", "HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE",
)  # fmt: skip
