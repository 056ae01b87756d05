"""Starting and ending Horovod, what it was built with, and where this process stands in the job.

`penstock.fronts.horovod.torch.mpi_ops` offers these under the name of the module where Horovod keeps them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import torch

from penstock.fronts.horovod import job
from penstock.fronts.horovod.common.process_sets import ProcessSet, _init_process_sets
from penstock.fronts.horovod.torch import handles

__all__ = [
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]


def init(comm: Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Start Horovod: find this process's rank and connect to the others. Blocks until all ranks have called it.

    Args:
        comm: the ranks that take part, as their launcher numbers them; None or empty for all. Where Horovod runs already, it goes
            on with the ranks that it has.
        process_sets: sets to make now, in the same order on all ranks; or "dynamic", to allow `add_process_set` later, as
            HOROVOD_DYNAMIC_PROCESS_SETS=1 does.

    Raises:
        ValueError: ``comm`` is no list of ranks, this rank is not in it, Horovod runs with other ranks, a process set is a
            duplicate, or the launcher does not say where the job meets.
        penstock.errors.PenstockError: the ranks could not be connected.
    """
    if comm is not None and not isinstance(comm, Iterable):
        raise ValueError(
            "Horovod has not been built with MPI support: comm must be a list of ranks. This is Penstock, which needs no MPI."
        )
    wanted: list[ProcessSet] = []
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise ValueError(f'process_sets must be a list of process sets, or "dynamic", not "{process_sets}"')
        os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    elif process_sets is not None:
        wanted = list(process_sets)
    ranks = list(comm) if comm else None
    if not job.is_initialized():
        handles.forget_all()
        job.init(ranks)
        try:
            _init_process_sets(wanted)
        except BaseException:
            for process_set in wanted:
                process_set._invalidate()
            shutdown()
            raise
    else:
        job.init(ranks)


def shutdown() -> None:
    """End Horovod. Pending operations fail, here and, at their next operation, on other ranks. `init` may follow."""
    job.shutdown()
    handles.release()


def is_initialized() -> bool:
    """Whether `init` was called, and `shutdown` was not since."""
    return job.is_initialized()


def rank() -> int:
    """This process's number in the job. Raises ValueError before `init`, as all of these do."""
    return job.current().rank


def size() -> int:
    """The number of processes in the job."""
    return job.current().size


def local_rank() -> int:
    """This process's number on its host."""
    return job.current().topology.local_rank


def local_size() -> int:
    """The number of the job's processes on this host."""
    return job.current().topology.local_size


def cross_rank() -> int:
    """This host's number among those that have a process of this local rank."""
    return job.current().topology.cross_rank


def cross_size() -> int:
    """The number of hosts that have a process of this local rank."""
    return job.current().topology.cross_size


def is_homogeneous() -> bool:
    """Whether all hosts run equally many processes."""
    return job.current().topology.homogeneous


def mpi_threads_supported() -> bool:
    """Raises ValueError, as Horovod does without MPI."""
    raise ValueError("Horovod MPI is not enabled; Please make sure it's installed and enabled.")


def mpi_enabled() -> bool:
    """False: Penstock needs no MPI."""
    return False


def mpi_built() -> bool:
    """False: Penstock needs no MPI."""
    return False


def gloo_enabled() -> bool:
    """True: what scripts mean by it is that Horovod runs without MPI, and may be initialised again."""
    return True


def gloo_built() -> bool:
    """True; see `gloo_enabled`."""
    return True


def nccl_built() -> int:
    """0: CUDA tensors are staged through the host."""
    return 0


def ddl_built() -> bool:
    """False."""
    return False


def ccl_built() -> bool:
    """False."""
    return False


def cuda_built() -> bool:
    """Whether CUDA tensors can be given, which depends on torch alone."""
    return torch.backends.cuda.is_built()


def rocm_built() -> bool:
    """False."""
    return False


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Record what happens to each operation into a file for chrome://tracing, on rank 0.

    Raises:
        ValueError: Horovod is not initialised, or was without HOROVOD_TIMELINE=DYNAMIC.
    """
    running = job.current()
    if not running.dynamic_timeline:
        raise ValueError("Set HOROVOD_TIMELINE=DYNAMIC to enable dynamic timeline usage.")
    if running.rank == 0:
        running.timeline.start(file_path, mark_cycles)


def stop_timeline() -> None:
    """Finish the timeline's file. Raises ValueError if Horovod is not initialised."""
    job.current().timeline.stop()
