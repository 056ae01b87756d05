"""Horovod's operations on torch tensors, under the name of the module where Horovod keeps them.

Every operation is submitted under a name and started when all ranks of its process set have it, whatever their order
(`penstock.fronts.horovod.negotiation`). An asynchronous one returns a handle for `poll` and `synchronize`; until then its
tensors must not be touched. Those without a name are matched by their count.

All of them raise:
    ValueError: the tensor or an argument is not as needed, the process set does not exist or this rank is not in it, or an
        operation of this name is still pending. Nothing was submitted.
    HorovodInternalError: ranks have submitted something else under the same name (the process set lives on); a rank was lost or
        has shut Horovod down, or Horovod is not initialised (nothing works until ``shutdown()`` and ``init()``).
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from penstock.fronts.horovod import buckets, job
from penstock.fronts.horovod.common.exceptions import HorovodInternalError
from penstock.fronts.horovod.common.process_sets import (
    ProcessSet,
    _init_process_sets,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from penstock.fronts.horovod.common.util import chosen_op
from penstock.fronts.horovod.controller import Controller
from penstock.fronts.horovod.negotiation import DTYPES, Kind, Op, Request
from penstock.fronts.horovod.operations import Entry, Result
from penstock.fronts.horovod.torch import objects
from penstock.fronts.horovod.torch.compression import Compression, Compressor

__all__ = [
    "Adasum",
    "Average",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]

Average = Op.AVERAGE
Sum = Op.SUM
Adasum = Op.ADASUM
Min = Op.MIN
Max = Op.MAX
Product = Op.PRODUCT

# ---------------------------------------------------------------------------------------------------- life and place


def init(comm: Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Start Horovod: find this process's rank and connect to the others. Blocks until all ranks have called it.

    Args:
        comm: the ranks that take part, as their launcher numbers them; None or empty for all.
        process_sets: sets to make now, in the same order on all ranks; or "dynamic", to allow `add_process_set` later, as
            HOROVOD_DYNAMIC_PROCESS_SETS=1 does.

    Raises:
        ValueError: ``comm`` is no list of ranks, this rank is not in it, a process set is a duplicate, or the launcher does not
            say where the job meets.
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
    if not job.is_initialized():
        with _handles_lock:
            _handles.clear()
        job.init(list(comm) if comm else None)
        _init_process_sets(wanted)


def shutdown() -> None:
    """End Horovod. Pending operations fail, here and, at their next operation, on other ranks. `init` may follow."""
    job.shutdown()


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
    return job.current().local_rank


def local_size() -> int:
    """The number of the job's processes on this host."""
    return job.current().local_size


def cross_rank() -> int:
    """This host's number among those that have a process of this local rank."""
    return job.current().cross_rank


def cross_size() -> int:
    """The number of hosts that have a process of this local rank."""
    return job.current().cross_size


def is_homogeneous() -> bool:
    """Whether all hosts run equally many processes."""
    return job.current().homogeneous


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


# ---------------------------------------------------------------------------------------------------- all-reduce


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Reduce a tensor over the ranks of a process set, into a new one.

    Args:
        tensor: dense and contiguous; any shape, the same on all ranks.
        average: deprecated, use ``op``.
        name: matches the operation between ranks.
        op: Average (the default), Sum, Adasum, Min, Max or Product.
        prescale_factor: multiplies the tensor before it is reduced.
        postscale_factor: multiplies the result.
        process_set: whose ranks take part.
    Returns: a handle; `synchronize` returns the result.
    """
    return _all_reduce(
        [tensor],
        [_like(tensor)],
        name,
        chosen_op(op, average),
        prescale_factor,
        postscale_factor,
        process_set,
        grouped=False,
    )


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """`allreduce_async` in place."""
    return _all_reduce(
        [tensor],
        [tensor],
        name,
        chosen_op(op, average),
        prescale_factor,
        postscale_factor,
        process_set,
        grouped=False,
    )


class HorovodAllreduce(torch.autograd.Function):
    """An all-reduce whose gradient is the all-reduce of the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        average: bool | None,
        name: str | None,
        op: int | None,
        prescale_factor: float,
        postscale_factor: float,
        process_set: ProcessSet,
    ) -> torch.Tensor:
        ctx.how = {
            "average": average,
            "op": op,
            "prescale_factor": prescale_factor,
            "postscale_factor": postscale_factor,
            "process_set": process_set,
        }
        return synchronize(allreduce_async(tensor, name=name, **ctx.how))

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        return allreduce(grad_output.contiguous(), **ctx.how), None, None, None, None, None, None


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce a tensor over the ranks and return the result, with a gradient if the tensor has one. Blocks.

    Args: those of `allreduce_async`, and
        compression: how the tensor is sent.
    """
    compressed, ctx = compression.compress(tensor)
    reduced = HorovodAllreduce.apply(compressed, average, name, op, prescale_factor, postscale_factor, process_set)
    return compression.decompress(reduced, ctx)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """`allreduce` in place; returns the tensor. Blocks."""
    return synchronize(allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set))


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """`allreduce_async` of a list of tensors under one handle, and one base name; `synchronize` returns the results."""
    return _all_reduce(
        tensors,
        [_like(tensor) for tensor in tensors],
        name,
        chosen_op(op, average),
        prescale_factor,
        postscale_factor,
        process_set,
        grouped=True,
    )


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """`grouped_allreduce_async` in place."""
    return _all_reduce(
        tensors,
        list(tensors),
        name,
        chosen_op(op, average),
        prescale_factor,
        postscale_factor,
        process_set,
        grouped=True,
    )


class HorovodGroupedAllreduce(torch.autograd.Function):
    """`HorovodAllreduce` of several tensors."""

    @staticmethod
    def forward(
        ctx: Any,
        average: bool | None,
        name: str | None,
        op: int | None,
        prescale_factor: float,
        postscale_factor: float,
        process_set: ProcessSet,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.how = {
            "average": average,
            "op": op,
            "prescale_factor": prescale_factor,
            "postscale_factor": postscale_factor,
            "process_set": process_set,
        }
        return synchronize(grouped_allreduce_async(tensors, name=name, **ctx.how))

    @staticmethod
    def backward(ctx: Any, *grad_output: torch.Tensor) -> Any:
        reduced = grouped_allreduce([grad.contiguous() for grad in grad_output], **ctx.how)
        return None, None, None, None, None, None, *reduced


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """`allreduce` of a list of tensors. Blocks."""
    compressed, ctxs = zip(*(compression.compress(tensor) for tensor in tensors), strict=True)
    reduced = HorovodGroupedAllreduce.apply(
        average, name, op, prescale_factor, postscale_factor, process_set, *compressed
    )
    return [compression.decompress(tensor, ctx) for tensor, ctx in zip(reduced, ctxs, strict=True)]


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Sequence[torch.Tensor]:
    """`grouped_allreduce` in place. Blocks."""
    return synchronize(
        grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    )


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Any:
    """Sum or average a sparse tensor: indices and values of all ranks are gathered.

    Returns: a function that blocks and returns the sparse result. It is not coalesced: an index may appear several times.
    """
    indices = tensor._indices().transpose(0, 1).contiguous()
    indices_handle = allgather_async(indices, name=f"{name}.indices", process_set=process_set)
    values_handle = allgather_async(tensor._values().contiguous(), name=f"{name}.values", process_set=process_set)

    def handle() -> torch.Tensor:
        values, indices = synchronize(values_handle), synchronize(indices_handle)
        if op == Average:
            values = values / process_set.size()
        return torch.sparse_coo_tensor(indices.transpose(0, 1), values, tensor.size(), check_invariants=False)

    return handle


# ---------------------------------------------------------------------------------------------------- all-gather


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Concatenate the ranks' tensors, which may differ in their first dimension only. Returns a handle."""
    return _all_gather([tensor], name, process_set, grouped=False)


class HorovodAllgather(torch.autograd.Function):
    """An all-gather; its gradient is this rank's part of the averaged gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, process_set: ProcessSet) -> torch.Tensor:
        ctx.rows, ctx.process_set = tensor.shape[0] if tensor.dim() else 0, process_set
        return synchronize(allgather_async(tensor, name, process_set))

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        averaged = allreduce(grad_output.contiguous(), op=Average, process_set=ctx.process_set)
        rows = allgather(torch.tensor([ctx.rows]), process_set=ctx.process_set)
        return averaged.narrow(0, int(rows[: ctx.process_set.rank()].sum()), ctx.rows), None, None


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """`allgather_async`, with a gradient. Blocks."""
    return HorovodAllgather.apply(tensor, name, process_set)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the objects of all ranks, by rank. Blocks.

    Args:
        obj: anything that can be pickled.
        name: matches the operation between ranks. None: its count.
        process_set: whose ranks take part. Horovod has no such argument.
    """
    content = objects.pickled(obj)
    sizes = allgather(torch.tensor([content.numel()]), objects.part(name, "sz"), process_set).tolist()
    gathered = allgather(content, objects.part(name, "t"), process_set)
    return [objects.unpickled(part) for part in gathered.split(sizes)]


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """`allgather_async` of a list of tensors under one handle."""
    return _all_gather(tensors, name, process_set, grouped=True)


class HorovodGroupedAllgather(torch.autograd.Function):
    """`HorovodAllgather` of several tensors."""

    @staticmethod
    def forward(
        ctx: Any, name: str | None, process_set: ProcessSet, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.rows, ctx.process_set = [tensor.shape[0] for tensor in tensors], process_set
        return synchronize(grouped_allgather_async(tensors, name, process_set))

    @staticmethod
    def backward(ctx: Any, *grad_output: torch.Tensor) -> Any:
        gradients = [grad.contiguous() for grad in grad_output]
        averaged = grouped_allreduce(gradients, op=Average, process_set=ctx.process_set)
        rows = grouped_allgather([torch.tensor([own]) for own in ctx.rows], process_set=ctx.process_set)
        before = ctx.process_set.rank()
        parts = [
            gradient.narrow(0, int(theirs[:before].sum()), own)
            for gradient, theirs, own in zip(averaged, rows, ctx.rows, strict=True)
        ]
        return None, None, *parts


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[torch.Tensor, ...]:
    """`allgather` of a list of tensors. Blocks."""
    return HorovodGroupedAllgather.apply(name, process_set, *tensors)


# ---------------------------------------------------------------------------------------------------- broadcast


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Copy the root's tensor to all ranks, into a new one. Returns a handle.

    Args:
        tensor: dense and contiguous; the same shape and dtype on all ranks.
        root_rank: the root's number in the job, also where ``process_set`` is another set.
        name: matches the operation between ranks.
        process_set: whose ranks take part.
    """
    return _broadcast(tensor, _like(tensor), root_rank, name, process_set)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """`broadcast_async` in place."""
    return _broadcast(tensor, tensor, root_rank, name, process_set)


class HorovodBroadcast(torch.autograd.Function):
    """A broadcast; its gradient is the averaged gradient on the root, and zeros elsewhere."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> torch.Tensor:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return synchronize(broadcast_async(tensor, root_rank, name, process_set))

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        averaged = allreduce(grad_output.contiguous(), op=Average, process_set=ctx.process_set)
        return averaged if rank() == ctx.root_rank else averaged * 0, None, None, None


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """`broadcast_async`, with a gradient. Blocks."""
    return HorovodBroadcast.apply(tensor, root_rank, name, process_set)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """`broadcast` in place. Blocks."""
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))


# ---------------------------------------------------------------------------------------------------- all-to-all


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Send rows of a tensor to each rank.

    Args:
        tensor: dense and contiguous; ranks' tensors may differ in their first dimension only.
        splits: how many rows go to each rank, in order: int32, on any device. None: equally many.
        name: matches the operation between ranks.
        process_set: whose ranks take part.
    Returns: a handle; `synchronize` returns what was received, and the rows from each rank.
    """
    controller = _controller(process_set, "Alltoall")
    _check_tensor(tensor)
    given = torch.tensor([], dtype=torch.int32) if splits is None else torch.as_tensor(splits)
    if not isinstance(splits, torch.Tensor):
        given = given.to(torch.int32)
    if given.dim() > 1:
        raise ValueError("alltoall expects a 1D splits tensor")
    if given.dtype != torch.int32:
        raise ValueError("alltoall expects splits to contain 32-bit integer elements.")
    rows = tensor.shape[0] if tensor.dim() else 0
    counts = given.tolist()
    if not counts:
        if rows % controller.size:
            raise ValueError(
                "splits not provided, but first dimension of tensor is not an even multiple of the number of workers."
            )
        counts = [rows // controller.size] * controller.size
    if len(counts) != controller.size:
        raise ValueError("Number of entries in splits does not equal number of workers.")
    if sum(counts) > rows:
        raise ValueError("Sum of splits entries is greater than the first dimension of tensor.")
    entry = Entry(
        controller.name("alltoall", name),
        _request(Kind.ALLTOALL, tensor),
        tensor=tensor,
        output=_empty(tensor),
        splits=counts,
        received_splits=given.new_empty(0),
        ready=_ready(tensor),
    )
    return _submit(controller, [entry], (entry.output, entry.received_splits))


class HorovodAlltoall(torch.autograd.Function):
    """An all-to-all; its gradient goes back the way that the rows came."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet) -> Any:
        output, received_splits = synchronize(alltoall_async(tensor, splits, name, process_set))
        ctx.process_set, ctx.received_splits = process_set, received_splits
        if splits is None:
            return output
        ctx.mark_non_differentiable(received_splits)
        return output, received_splits

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor, *_: Any) -> Any:
        gradient, _ = alltoall(grad_output.contiguous(), splits=ctx.received_splits, process_set=ctx.process_set)
        return gradient, None, None, None


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """`alltoall_async`, with a gradient. Blocks. Returns what was received and, if ``splits`` were given, the rows from each
    rank."""
    return HorovodAlltoall.apply(tensor, splits, name, process_set)


# ---------------------------------------------------------------------------------------------------- reduce-scatter


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Reduce a tensor over the ranks and give each its share of the rows, the first ones one more where they cannot share
    equally. Returns a handle. See `allreduce_async` for the arguments; Adasum is not possible."""
    return _reduce_scatter([tensor], name, op, process_set, prescale_factor, postscale_factor, grouped=False)


class HorovodReducescatter(torch.autograd.Function):
    """A reduce-scatter; its gradient is gathered from all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        name: str | None,
        op: int,
        process_set: ProcessSet,
        prescale_factor: float,
        postscale_factor: float,
    ) -> torch.Tensor:
        ctx.process_set = process_set
        ctx.factor = prescale_factor * postscale_factor * ((process_set.size() or 1) if op == Sum else 1)
        return synchronize(reducescatter_async(tensor, name, op, process_set, prescale_factor, postscale_factor))

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        gathered = allgather((grad_output * ctx.factor).contiguous(), process_set=ctx.process_set)
        return gathered, None, None, None, None, None


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """`reducescatter_async`, with a gradient and compression. Blocks."""
    compressed, ctx = compression.compress(tensor)
    reduced = HorovodReducescatter.apply(compressed, name, op, process_set, prescale_factor, postscale_factor)
    return compression.decompress(reduced, ctx)


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """`reducescatter_async` of a list of tensors under one handle."""
    return _reduce_scatter(tensors, name, op, process_set, prescale_factor, postscale_factor, grouped=True)


class HorovodGroupedReducescatter(torch.autograd.Function):
    """`HorovodReducescatter` of several tensors."""

    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        op: int,
        process_set: ProcessSet,
        prescale_factor: float,
        postscale_factor: float,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.process_set = process_set
        ctx.factor = prescale_factor * postscale_factor * ((process_set.size() or 1) if op == Sum else 1)
        return synchronize(
            grouped_reducescatter_async(tensors, name, op, process_set, prescale_factor, postscale_factor)
        )

    @staticmethod
    def backward(ctx: Any, *grad_output: torch.Tensor) -> Any:
        gradients = [(gradient * ctx.factor).contiguous() for gradient in grad_output]
        return None, None, None, None, None, *grouped_allgather(gradients, process_set=ctx.process_set)


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """`reducescatter` of a list of tensors. Blocks."""
    compressed, ctxs = zip(*(compression.compress(tensor) for tensor in tensors), strict=True)
    reduced = HorovodGroupedReducescatter.apply(name, op, process_set, prescale_factor, postscale_factor, *compressed)
    return [compression.decompress(tensor, ctx) for tensor, ctx in zip(reduced, ctxs, strict=True)]


# ---------------------------------------------------------------------------------------------------- waiting


def poll(handle: int) -> bool:
    """Whether `synchronize` would not block.

    Raises:
        ValueError: there is no such handle, or it was synchronised already.
    """
    with _handles_lock:
        if handle not in _handles:
            raise ValueError(f"Handle {handle} was not created or has been cleared.")
        results, _ = _handles[handle]
    return all(result.done() for result in results)


def synchronize(handle: int) -> Any:
    """Block until an operation has ended and return its result; None if it was returned before.

    Raises:
        HorovodInternalError: the operation failed; its tensors are undefined and will not be touched.
    """
    with _handles_lock:
        if handle not in _handles:
            return None
        results, output = _handles.pop(handle)
    try:
        for result in results:
            result.wait()
    except HorovodInternalError:
        raise
    except RuntimeError as error:
        raise HorovodInternalError(str(error)) from error
    return output


def join(device: int = -1) -> int:
    """This rank has no more data: block until all ranks say so, and meanwhile take part in their all-reduces with zeros.

    Args:
        device: ignored; zeros are made on the CPU.
    Returns: the rank that joined last, the same on all ranks.
    """
    controller = _controller(global_process_set, "Join")
    result = controller.join()
    ghosts = buckets.Ghosts()
    try:
        result.wait()
        last = controller.last_joined
        ghosts.finish(lambda own: allgather_object(own, name="join.optimizers"))
    except HorovodInternalError:
        raise
    except RuntimeError as error:
        raise HorovodInternalError(str(error)) from error
    return last


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Block until all ranks of the process set have called it."""
    controller = _controller(process_set, "Barrier")
    synchronize(_submit(controller, [Entry("barrier.noname", Request(Kind.BARRIER))], None))


# ---------------------------------------------------------------------------------------------------- helpers


def _all_reduce(
    tensors: Sequence[torch.Tensor],
    outputs: list[torch.Tensor],
    name: str | None,
    op: Op,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    *,
    grouped: bool,
) -> int:
    controller = _controller(process_set, "Allreduce")
    kind = Kind.ADASUM if op is Op.ADASUM else Kind.ALLREDUCE
    for tensor in tensors:
        _check_tensor(tensor, reduced=True)
        if op is Op.ADASUM and not tensor.is_floating_point():
            raise ValueError(f"Adasum is for floating point tensors, not for {tensor.dtype}.")
    entries = [
        Entry(
            own,
            _request(kind, tensor, op=op, prescale=prescale, postscale=postscale),
            tensor=tensor,
            output=output,
            ready=_ready(tensor),
        )
        for own, tensor, output in zip(
            _names(controller, "allreduce", name, tensors, grouped), tensors, outputs, strict=True
        )
    ]
    return _submit(controller, entries, tuple(outputs) if grouped else outputs[0])


def _all_gather(tensors: Sequence[torch.Tensor], name: str | None, process_set: ProcessSet, *, grouped: bool) -> int:
    controller = _controller(process_set, "Allgather")
    for tensor in tensors:
        _check_tensor(tensor)
    entries = [
        Entry(own, _request(Kind.ALLGATHER, tensor), tensor=tensor, output=_empty(tensor), ready=_ready(tensor))
        for own, tensor in zip(_names(controller, "allgather", name, tensors, grouped), tensors, strict=True)
    ]
    outputs = tuple(entry.output for entry in entries)
    return _submit(controller, entries, outputs if grouped else outputs[0])


def _broadcast(
    tensor: torch.Tensor, output: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
) -> int:
    controller = _controller(process_set, "Broadcast")
    _check_tensor(tensor)
    if root_rank not in controller.ranks:
        raise ValueError(f"broadcast received invalid root rank {root_rank} for provided process set")
    entry = Entry(
        controller.name("broadcast", name),
        _request(Kind.BROADCAST, tensor, root=controller.ranks.index(root_rank)),
        tensor=tensor,
        output=output,
        ready=_ready(tensor),
    )
    return _submit(controller, [entry], output)


def _reduce_scatter(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    op: int,
    process_set: ProcessSet,
    prescale: float,
    postscale: float,
    *,
    grouped: bool,
) -> int:
    controller = _controller(process_set, "Reducescatter")
    if op == Op.ADASUM:
        raise HorovodInternalError("AdasumReducescatter is not implemented.")
    for tensor in tensors:
        _check_tensor(tensor, reduced=True)
    entries = [
        Entry(
            own,
            _request(Kind.REDUCESCATTER, tensor, op=Op(op), prescale=prescale, postscale=postscale),
            tensor=tensor,
            output=_empty(tensor),
            ready=_ready(tensor),
        )
        for own, tensor in zip(_names(controller, "reducescatter", name, tensors, grouped), tensors, strict=True)
    ]
    outputs = tuple(entry.output for entry in entries)
    return _submit(controller, entries, outputs if grouped else outputs[0])


def _controller(process_set: ProcessSet, what: str) -> Controller:
    try:
        running = job.current()
    except ValueError as error:
        raise HorovodInternalError(str(error)) from error
    return running.controller(process_set.process_set_id, what)


def _names(
    controller: Controller, kind: str, name: str | None, tensors: Sequence[torch.Tensor], grouped: bool
) -> list[str]:
    if not grouped:
        return [controller.name(kind, name)]
    base = controller.name(f"grouped_{kind}", name)
    return [f"{base}_{index}of{len(tensors)}" for index in range(1, len(tensors) + 1)]


def _submit(controller: Controller, entries: list[Entry], output: Any) -> int:
    controller.submit(entries)
    with _handles_lock:
        handle = next(_numbers)
        _handles[handle] = [entry.result for entry in entries], output
    return handle


def _request(kind: Kind, tensor: torch.Tensor, **more: Any) -> Request:
    return Request(
        kind,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        on_cpu=not tensor.is_cuda,
        **more,
    )


def _check_tensor(tensor: torch.Tensor, *, reduced: bool = False) -> None:
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in DTYPES or tensor.layout is not torch.strided or (reduced and name in _NOT_REDUCED):
        raise ValueError(f"Tensor type {tensor.type()} is not supported.")
    if not tensor.is_contiguous():
        raise ValueError("Tensor is required to be contiguous.")


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device)


def _ready(tensor: torch.Tensor) -> Any:
    """The event for which other readers of a CUDA tensor have to wait."""
    if not tensor.is_cuda:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))
    return tensor.device, event


_NOT_REDUCED = frozenset(("bool", "complex64", "complex128", "uint16", "uint32", "uint64"))
# Operations that were submitted and not synchronised: what they wait for, and what they return.
_handles: dict[int, tuple[list[Result], Any]] = {}
_handles_lock = threading.Lock()
_numbers = itertools.count(1)
