"""Horovod's all-reduces of dense torch tensors, and the operations that they reduce with.

`penstock.fronts.horovod.torch.mpi_ops` offers these under the name of the module where Horovod keeps them, and says what
all of its operations raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from penstock.fronts.horovod.common.process_sets import ProcessSet, global_process_set
from penstock.fronts.horovod.common.util import chosen_op
from penstock.fronts.horovod.negotiation import Kind, Op
from penstock.fronts.horovod.operations import Entry
from penstock.fronts.horovod.torch import handles
from penstock.fronts.horovod.torch.compression import Compression, Compressor
from penstock.fronts.horovod.torch.handles import synchronize

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
]

Average = Op.AVERAGE
Sum = Op.SUM
Adasum = Op.ADASUM
Min = Op.MIN
Max = Op.MAX
Product = Op.PRODUCT


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
        [handles.like(tensor)],
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
        [handles.like(tensor) for tensor in tensors],
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
    controller = handles.controller_of(process_set, "Allreduce")
    kind = Kind.ADASUM if op is Op.ADASUM else Kind.ALLREDUCE
    for tensor in tensors:
        handles.check_tensor(tensor, reduced=True)
        if op is Op.ADASUM and not tensor.is_floating_point():
            raise ValueError(f"Adasum is for floating point tensors, not for {tensor.dtype}.")
    entries = [
        Entry(
            own,
            handles.request(kind, tensor, op=op, prescale=prescale, postscale=postscale),
            tensor=tensor,
            output=output,
            ready=handles.ready(tensor),
        )
        for own, tensor, output in zip(
            handles.names(controller, "allreduce", name, tensors, grouped), tensors, outputs, strict=True
        )
    ]
    return handles.submit(controller, entries, tuple(outputs) if grouped else outputs[0])
