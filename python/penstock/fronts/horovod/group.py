"""A process set's group, as operations use it: torch's tensors in, works of the backend out.

It calls the backend itself, not ``torch.distributed``: on the way through C++ a work forgets how to say that it has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from penstock.torch import backend
from penstock.torch.work import Work

__all__ = ["Group"]


class Group:
    """A group that nothing else uses: its operations are in one order on all ranks. No call of it blocks.

    Args:
        process_group: of the penstock backend.
    """

    def __init__(self, process_group: Any) -> None:
        self.process_group = process_group
        self.backend = backend.of(process_group)
        self.rank = dist.get_rank(process_group)
        self.size = dist.get_world_size(process_group)

    def all_reduce(self, tensor: torch.Tensor, op: Any) -> Work:
        """In place."""
        options = c10d.AllreduceOptions()
        options.reduceOp = op
        return self.backend.allreduce([tensor], options)

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        """Inputs of one size, one after the other."""
        return self.backend.all_gather_single(output, input, c10d.AllgatherOptions())

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        options = c10d.BroadcastOptions()
        options.rootRank = root
        return self.backend.broadcast([tensor], options)

    def all_to_all(
        self, output: torch.Tensor, input: torch.Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Work:
        """So many rows from and to each rank."""
        return self.backend.all_to_all_single(output, input, list(received), list(sent), c10d.AllToAllOptions())

    def reduce_scatter(self, output: torch.Tensor, parts: Sequence[torch.Tensor], op: Any) -> Work:
        """A part for each rank; parts may differ in size."""
        options = c10d.ReduceScatterOptions()
        options.reduceOp = op
        return self.backend.reduce_scatter([output], [list(parts)], options)

    def send(self, tensor: torch.Tensor, peer: int) -> Work:
        return self.backend.send([tensor], peer)

    def receive(self, tensor: torch.Tensor, peer: int) -> Work:
        return self.backend.recv([tensor], peer)
