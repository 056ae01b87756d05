"""Lists of tensors: they cross the network as one flat tensor that holds their elements in order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

__all__ = ["alike", "flat_like", "joined", "spread"]


def alike(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the tensors have equally many elements."""
    return all(tensor.numel() == tensors[0].numel() for tensor in tensors)


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
