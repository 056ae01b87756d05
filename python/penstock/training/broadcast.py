"""Rank 0's parameters and buffers for all ranks, in whatever layout they lie."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from penstock.torch.layout import layout

__all__ = ["broadcast_values"]


def broadcast_values(tensors: Iterable[torch.Tensor], own: Any) -> None:
    """Give all ranks rank 0's values. All are checked before the first is sent. Blocks until they are there.

    Args:
        tensors: as many, of the same shapes and dtypes, on all ranks.
        own: the backend of the group.
    """
    copied: list[tuple[torch.Tensor, torch.Tensor]] = []
    sent = []
    for tensor in tensors:
        given = tensor.detach()
        if given.layout is torch.strided:
            for dim, stride in enumerate(given.stride()):
                # Along an expanded dimension there is one value.
                given = given.narrow(dim, 0, min(1, given.shape[dim])) if stride == 0 else given
            if layout(given) is None:
                copied.append((given, given.contiguous()))
                given = copied[-1][1]
        sent.append(given)
    own.broadcast(sent, c10d.BroadcastOptions()).wait()
    for given, received in copied:
        given.copy_(received)
