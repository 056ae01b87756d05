"""Averages of sparse gradients, which a reducer leaves to the end of a backward pass."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from penstock.training.trained import Trained

__all__ = ["average"]


def average(trained: Trained, group: Any) -> list[tuple[str, torch.nn.Parameter, torch.Tensor]]:
    """Put the averages over a group's ranks into the sparse gradients. All ranks call this at the end of the same pass; it blocks
    until all averages are there.

    Returns: the values of each average, with its parameter and name.
    """
    started = []
    for name, parameter in zip(trained.sparse_names, trained.sparse, strict=True):
        gradient = parameter.grad
        if gradient is None:  # not used here, but perhaps elsewhere
            mean = torch.sparse_coo_tensor(
                torch.zeros(1, 0, dtype=torch.int64), parameter.new_zeros(0, *parameter.shape[1:]), parameter.shape
            )
        else:
            mean = gradient.clone() if gradient.is_sparse else gradient.to_sparse(1)
        work = dist.all_reduce(mean, dist.ReduceOp.AVG, group, async_op=True)
        started.append((name, parameter, mean, work))
    for _, parameter, mean, work in started:
        work.wait()
        if parameter.grad is not None:
            parameter.grad.copy_(mean if parameter.grad.is_sparse else mean.to_dense())
        elif mean._nnz():
            parameter.grad = mean
    return [(name, parameter, mean.values()) for name, parameter, mean, _ in started]
