"""Lists of tensors: they cross the network as one flat tensor that holds their elements in order.

An operation reads its input while it writes its output, and the operations of a call run side by side. So tensors of one call
that share memory are kept apart by copies (`overlap`, `apart`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

__all__ = ["alike", "apart", "flat_like", "joined", "overlap", "spread"]


def alike(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the tensors have equally many elements."""
    return all(tensor.numel() == tensors[0].numel() for tensor in tensors)


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors share memory, where both are dense."""
    starts = one.data_ptr(), other.data_ptr()
    return starts[0] < starts[1] + other.nbytes and starts[1] < starts[0] + one.nbytes


def apart(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """These dense tensors, with copies in place of those that share memory with another one. CUDA tensors stay: they are staged,
    each in memory of its own."""
    if len(tensors) < 2 or not tensors[0].is_cpu:
        return list(tensors)
    # By the address: those that share memory follow each other.
    ordered = sorted(range(len(tensors)), key=lambda at: tensors[at].data_ptr())
    found, end = list(tensors), 0
    for at in ordered:
        start = tensors[at].data_ptr()
        if start < end and tensors[at].nbytes:
            found[at] = tensors[at].detach().clone()
        end = max(end, start + tensors[at].nbytes)
    return found


def flat_like(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor of as many elements, uninitialised."""
    return tensor.detach().new_empty(tensor.numel())


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A new tensor of one dimension that holds the tensors' elements in order."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def spread(copies: Iterable[tuple[torch.Tensor, Sequence[torch.Tensor]]]) -> None:
    """Copy the parts of each flat tensor to the user's tensors."""
    for flat, outputs in copies:
        start = 0
        for output in outputs:
            # detach: torch must not record this as an operation of the graph.
            output.detach().copy_(flat[start : start + output.numel()].view_as(output))
            start += output.numel()
        for tensor in (flat, *outputs):
            if tensor.is_cuda:
                # The tensor belongs to the stream on which it was made; the current stream may be another, such as a future's.
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
