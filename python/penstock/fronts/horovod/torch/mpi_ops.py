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

from collections.abc import Callable, Sequence
from typing import Any

import torch

from penstock.fronts.horovod import buckets
from penstock.fronts.horovod.common.exceptions import HorovodInternalError
from penstock.fronts.horovod.common.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from penstock.fronts.horovod.controller import Controller
from penstock.fronts.horovod.negotiation import Kind, Op, Request
from penstock.fronts.horovod.operations import Entry
from penstock.fronts.horovod.torch import handles, objects
from penstock.fronts.horovod.torch.all_reduce import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from penstock.fronts.horovod.torch.basics import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from penstock.fronts.horovod.torch.compression import Compression, Compressor
from penstock.fronts.horovod.torch.handles import poll, synchronize

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


# ---------------------------------------------------------------------------------------------------- sparse all-reduce


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Any:
    """Sum or average a sparse tensor: indices and values of all ranks are gathered.

    Returns: a function that blocks and returns the sparse result. It is not coalesced: an index may appear several times.
    """
    indices = tensor._indices().transpose(0, 1).contiguous()
    indices_handle = allgather_async(indices, name=f"{name}.indices", process_set=process_set)
    values_handle = allgather_async(tensor._values().contiguous(), name=f"{name}.values", process_set=process_set)

    gathered: dict[int, torch.Tensor] = {}

    def handle() -> torch.Tensor:
        for one in (values_handle, indices_handle):
            if one not in gathered:
                gathered[one] = synchronize(one)
        values, indices = gathered[values_handle], gathered[indices_handle]
        if op == Average:
            values = values / process_set.size()
        return torch.sparse_coo_tensor(indices.transpose(0, 1), values, tensor.size(), check_invariants=False)

    return handle


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
    return _broadcast(tensor, handles.like(tensor), root_rank, name, process_set)


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
    controller = handles.controller_of(process_set, "Alltoall")
    handles.check_tensor(tensor)
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
        if rows % controller.group.size:
            raise ValueError(
                "splits not provided, but first dimension of tensor is not an even multiple of the number of workers."
            )
        counts = [rows // controller.group.size] * controller.group.size
    if len(counts) != controller.group.size:
        raise ValueError("Number of entries in splits does not equal number of workers.")
    if min(counts) < 0:
        raise ValueError(f"Splits entries must be 0 or more; {counts} are not.")
    if sum(counts) > rows:
        raise ValueError("Sum of splits entries is greater than the first dimension of tensor.")
    entry = Entry(
        controller.name("alltoall", name),
        handles.request(Kind.ALLTOALL, tensor),
        tensor=tensor,
        output=handles.empty(tensor),
        splits=counts,
        received_splits=given.new_empty(0),
        ready=handles.ready(tensor),
    )
    return handles.submit(controller, [entry], (entry.output, entry.received_splits))


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


# ---------------------------------------------------------------------------------------------------- join and barrier


def join(device: int = -1) -> int:
    """This rank has no more data: block until all ranks say so, and meanwhile take part in their all-reduces with zeros.
    What zeros would change (Min, Max, Product), and every other kind of operation, fails on the ranks that go on.

    Args:
        device: ignored; zeros are made on the CPU.
    Returns: the rank that joined last, the same on all ranks.
    """
    controller = handles.controller_of(global_process_set, "Join")
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
    controller = handles.controller_of(process_set, "Barrier")
    synchronize(handles.submit(controller, [Entry("barrier.noname", Request(Kind.BARRIER))], None))


# ---------------------------------------------------------------------------------------------------- helpers


def _all_gather(tensors: Sequence[torch.Tensor], name: str | None, process_set: ProcessSet, *, grouped: bool) -> int:
    controller = handles.controller_of(process_set, "Allgather")
    for tensor in tensors:
        handles.check_tensor(tensor)
    names = handles.names(controller, "allgather", name, tensors, grouped)
    return _submitted(controller, names, tensors, grouped, lambda tensor: handles.request(Kind.ALLGATHER, tensor))


def _broadcast(
    tensor: torch.Tensor, output: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
) -> int:
    controller = handles.controller_of(process_set, "Broadcast")
    handles.check_tensor(tensor)
    if root_rank not in controller.ranks:
        raise ValueError(f"broadcast received invalid root rank {root_rank} for provided process set")
    entry = Entry(
        controller.name("broadcast", name),
        handles.request(Kind.BROADCAST, tensor, root=controller.ranks.index(root_rank)),
        tensor=tensor,
        output=output,
        ready=handles.ready(tensor),
    )
    return handles.submit(controller, [entry], output)


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
    controller = handles.controller_of(process_set, "Reducescatter")
    if op == Op.ADASUM:
        raise HorovodInternalError("AdasumReducescatter is not implemented.")
    for tensor in tensors:
        handles.check_tensor(tensor, reduced=True)

    def request(tensor: torch.Tensor) -> Request:
        return handles.request(Kind.REDUCESCATTER, tensor, op=Op(op), prescale=prescale, postscale=postscale)

    names = handles.names(controller, "reducescatter", name, tensors, grouped)
    return _submitted(controller, names, tensors, grouped, request)


def _submitted(
    controller: Controller,
    names: Sequence[str],
    tensors: Sequence[torch.Tensor],
    grouped: bool,
    request: Callable[[torch.Tensor], Request],
) -> int:
    """A handle for operations whose results have sizes of their own: of the list of them, or of the only one."""
    entries = [
        Entry(own, request(tensor), tensor=tensor, output=handles.empty(tensor), ready=handles.ready(tensor))
        for own, tensor in zip(names, tensors, strict=True)
    ]
    outputs = tuple(entry.output for entry in entries)
    return handles.submit(controller, entries, outputs if grouped else outputs[0])
