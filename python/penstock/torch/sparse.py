"""All-reduces of sparse tensors (COO), as gloo does them: the ranks gather their indices and values, and each adds them up.

Sizes differ between ranks, so an all-reduce takes three all-gathers: of shapes and counts, of indices, of values. The caller's
thread cannot issue them, since it must not wait; issued by another thread they would have no place in the group's order. So a
group's sparse all-reduces run one after the other on a thread of their own, in a channel of the group.
"""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Callable

import torch

from penstock import _core
from penstock.errors import Closed, Mismatch
from penstock.runtime.groups import Membership, Opening
from penstock.torch.gather import Gather, gatherer

__all__ = ["SparseReductions", "SparseTicket", "add_up"]


class SparseReductions:
    """One group's all-reduces of sparse tensors.

    Args:
        opening: the channel (`penstock.runtime.groups.Opening`). All ranks open it with their first sparse all-reduce, on the
            thread that starts that: so it has its place among the group's channels.
        keep: called with the open channel (`penstock.runtime.groups.Membership`), whose owner closes it.
        fail: called with the error of an all-reduce that failed, unless its group lives.
    """

    def __init__(
        self, opening: Opening, keep: Callable[[Membership], object], fail: Callable[[BaseException], object]
    ) -> None:
        self._opening, self._keep = opening, keep
        self._fail = fail
        self._queue: queue.SimpleQueue[tuple[SparseTicket, torch.Tensor, bool, float] | None] = queue.SimpleQueue()
        self._member: Membership | None = None
        self._closed = False
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="penstock-sparse", daemon=True).start()

    def start(self, tensor: torch.Tensor, *, average: bool, timeout_s: float) -> SparseTicket:
        """Add up ``tensor``, on the CPU, over all ranks. Does not block; the tensor must not change before the end."""
        _core.check_fork()  # The thread is the parent's.
        ticket = SparseTicket()
        with self._lock:
            if not self._closed:
                self._queue.put((ticket, tensor, average, timeout_s))
                return ticket
        ticket.end(_destroyed())
        return ticket

    def expire(self, waited_s: float) -> None:
        """Fail running all-reduces, and the opening: a caller has waited for this many seconds, and waits no longer."""
        self._opening.member.group.expire(waited_s)

    def close(self) -> None:
        """End the thread. Waiting all-reduces fail. Does not block; the owner of the channel closes it."""
        with self._lock:
            self._closed = True
            self._queue.put(None)

    def _run(self) -> None:
        failure: BaseException | None = None
        while (job := self._queue.get()) is not None:
            ticket, tensor, average, timeout_s = job
            try:
                if failure is not None:
                    raise failure
                if self._closed:
                    raise _destroyed()
                if self._member is None:
                    self._member = self._opening.wait()
                    self._keep(self._member)
                gather = gatherer(self._member, timeout_s)
                ticket.end(add_up(tensor, gather, average=average))
            except BaseException as error:
                ticket.end(error)
                if failure is None and not getattr(error, "group_lives", False):
                    failure = error
                    self._fail(error)


class SparseTicket:
    """The pending sum."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], object]] = []
        self._outcome: torch.Tensor | BaseException | None = None

    @property
    def sum(self) -> torch.Tensor:
        """The coalesced sum; the all-reduce must have succeeded."""
        assert isinstance(self._outcome, torch.Tensor)
        return self._outcome

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until it has ended; raise what it failed with. With a time-out: whether it has ended."""
        if not self.done():
            _core.check_fork()  # the thread that would end it is the parent's
        if not self._ended.wait(None if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX)):
            return False
        if isinstance(self._outcome, BaseException):
            # A copy: its traceback names the frames of this caller, which often hold the work that holds this ticket. Torch's
            # part of that circle is invisible to Python's collector, so a kept traceback would keep the engine and the tensors.
            raise copy.copy(self._outcome)
        return True

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def source(self) -> None:
        """None: a sparse all-reduce has no source."""

    def on_done(self, callback: Callable[[], object]) -> None:
        """Call ``callback()`` once it has ended: on the thread of the reductions, or at once on this one."""
        with self._lock:
            if not self._ended.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def end(self, outcome: torch.Tensor | BaseException) -> None:
        """Set the result or the error, and call the callbacks."""
        self._outcome = outcome.with_traceback(None) if isinstance(outcome, BaseException) else outcome
        with self._lock:
            self._ended.set()
            callbacks, self._callbacks = self._callbacks, []
        # Not on this thread, which the callbacks' own sparse all-reduces need.
        if callbacks:
            threading.Thread(target=lambda: [callback() for callback in callbacks], name="penstock-sparse-done").start()


def _destroyed() -> Closed:
    return Closed("all_reduce of a sparse tensor: the group was destroyed. The group is unusable: build a new one.")


def add_up(tensor: torch.Tensor, gather: Gather, *, average: bool) -> torch.Tensor:
    """The coalesced sum (or mean) of the ranks' tensors, the same bits on all of them. Blocks.

    Args:
        tensor: coalesced.
        gather: nothing else may need its group meanwhile.

    Raises:
        penstock.errors.Mismatch: shapes or numbers of sparse dimensions differ, on all ranks. The group lives.

    Memory: indices and values of all ranks, each padded to the longest.
    """
    head = torch.zeros(_HEAD, dtype=torch.int64)
    head[: tensor.dim() + 4] = torch.tensor([tensor._nnz(), average, tensor.sparse_dim(), tensor.dim(), *tensor.shape])
    heads = gather(head)
    if not (heads[:, 1:] == heads[0, 1:]).all():
        raise _mismatch(heads)
    counts = heads[:, 0].tolist()
    most = max(counts)
    values = tensor.values()
    padded_indices = torch.zeros(most, tensor.sparse_dim(), dtype=torch.int64)
    padded_indices[: tensor._nnz()] = tensor.indices().t()
    padded_values = values.new_zeros(most, *values.shape[1:])
    padded_values[: tensor._nnz()] = values
    all_indices = _gathered(padded_indices, gather, len(counts))
    all_values = _gathered(padded_values, gather, len(counts))
    indices = torch.cat([part[:count] for part, count in zip(all_indices, counts, strict=True)])
    values = torch.cat([part[:count] for part, count in zip(all_values, counts, strict=True)])
    total = torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=False).coalesce()
    return _divided(total, len(counts)) if average else total


def _divided(total: torch.Tensor, ranks: int) -> torch.Tensor:
    """The average. Integers truncate towards zero, as those of dense tensors do."""
    values = total.values()
    if values.is_floating_point() or values.is_complex():
        divided = values / ranks
    else:
        # The number of ranks may be none of the dtype's.
        divided = torch.div(values.long(), ranks, rounding_mode="trunc").to(values.dtype)
    return torch.sparse_coo_tensor(total.indices(), divided, total.shape, is_coalesced=True, check_invariants=False)


def _gathered(mine: torch.Tensor, gather: Gather, world: int) -> torch.Tensor:
    if mine.numel() == 0:
        return mine.new_empty(world, *mine.shape)
    return gather(mine.reshape(-1)).view(world, *mine.shape)


def _mismatch(heads: torch.Tensor) -> Mismatch:
    told = []
    for rank, (_, average, sparse, dims, *shape) in enumerate(heads.tolist()):
        op = "avg" if average else "sum"
        told.append(f"rank {rank} {op} of {tuple(shape[:dims])} with {sparse} sparse dimension(s)")
    error = Mismatch(
        f"all_reduce of a sparse tensor: the ranks' calls differ: {'; '.join(told)}. The group is still usable."
    )
    error.group_lives = True
    return error


_HEAD = 68
"""Four numbers, and a size for each dimension; torch allows 64."""
