"""Process sets: ranks that run operations among themselves, at the same time as others do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from penstock.fronts.horovod import job

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]


class ProcessSet:
    """Some of a job's ranks. Give it to ``hvd.init(process_sets=[...])`` or `add_process_set` before its first use.

    Args:
        ranks_or_comm: ranks, in any order; they are sorted.

    Raises:
        ValueError: something else than ranks. MPI communicators need MPI, which Penstock does without.
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: Any = None

    def __init__(self, ranks_or_comm: Sequence[int] | Any) -> None:
        if not isinstance(ranks_or_comm, Iterable):
            raise ValueError(
                "Apparently you tried to build a ProcessSet from an MPI communicator, but Horovod has not been built with "
                "MPI support. Name the ranks instead: this is Penstock, which needs no MPI."
            )
        ranks = sorted(ranks_or_comm)
        if any(not isinstance(rank, int) for rank in ranks):
            raise ValueError("ProcessSet should be initialized with a list of process ranks or an mpi4py Comm object")
        self.ranks = ranks

    def _invalidate(self) -> None:
        self.process_set_id = None

    def size(self) -> int | None:
        """The number of its ranks; None if it is not initialised."""
        if self.process_set_id is None:
            return None
        return len(self._registered())

    def rank(self) -> int | None:
        """This process's number in the set; None if it is not initialised. Operations such as ``hvd.broadcast`` want the
        number in the job.

        Raises:
            ValueError: this process is not in the set.
        """
        if self.process_set_id is None:
            return None
        ranks, rank = self._registered(), job.current().rank
        if rank not in ranks:
            raise ValueError("Process is not part of provided process set.")
        return ranks.index(rank)

    def included(self) -> bool | None:
        """Whether this process is in the set; None if its ranks are not known yet."""
        if self.ranks is None:
            return None
        return job.current().rank in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"

    def _number(self) -> int | None:
        """Its number in this life of Horovod; None if it is from an earlier one: another set may have that number now."""
        ranks = None if self.process_set_id is None else job.current().sets().get(self.process_set_id)
        return self.process_set_id if ranks == self.ranks else None

    def _registered(self) -> list[int]:
        if self.ranks is None or self._number() is None:
            raise ValueError("Process set does not exist or has not been registered.")
        return self.ranks


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Add a process set after ``init`` and return it, ready for use. All ranks call it, in the same order, and wait for each
    other.

    Raises:
        ValueError: Horovod is not initialised, HOROVOD_DYNAMIC_PROCESS_SETS is not set, or a set of these ranks exists.
    """
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    running = job.current()
    if not running.dynamic:
        raise ValueError(
            "Set HOROVOD_DYNAMIC_PROCESS_SETS=1 to allow adding process sets after Horovod initialization."
        )
    assert added.ranks is not None, "a process set is made of ranks"
    number = running.add(list(added.ranks))
    if number is None:
        raise ValueError(f"Attempted to add a duplicate process set: {added}")
    added.process_set_id = number
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Take a process set away; returns whether there was one. The global set stays. All ranks call it, in the same order.

    Raises:
        ValueError: Horovod is not initialised, or HOROVOD_DYNAMIC_PROCESS_SETS is not set.
    """
    number = process_set.process_set_id
    if number is None or number == 0:
        return False
    running = job.current()
    if not running.dynamic:
        raise ValueError(
            "Set HOROVOD_DYNAMIC_PROCESS_SETS=1 to allow removing process sets after Horovod initialization."
        )
    process_set._invalidate()
    return running.remove(number)


def _init_process_sets(process_sets: Sequence[ProcessSet]) -> None:
    """Register the sets that ``init`` was given, and tell the global one its ranks."""
    running = job.current()
    global_process_set.ranks = running.sets()[0]
    for index, process_set in enumerate(process_sets):
        assert process_set.ranks is not None, "a process set is made of ranks"
        process_set.process_set_id = running.add(list(process_set.ranks))
        if process_set.process_set_id is None:
            raise ValueError(
                f"Horovod could not be initialized because process_sets entry number {index} is a duplicate: {process_set}"
            )


global_process_set = ProcessSet([])
global_process_set.process_set_id = 0
