"""Collects a vector from all ranks of a group of the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Gather", "gatherer"]

Gather = Callable[[torch.Tensor], torch.Tensor]
"""Turns a vector into those of all ranks, a row a rank; blocks until all ranks have called it."""


def gatherer(member: Any, timeout_s: float) -> Gather:
    """A `Gather` for a group of the engine (`penstock.runtime.groups.Membership`) that nothing else uses at the time."""

    def gather(mine_N: torch.Tensor) -> torch.Tensor:
        all_WN = mine_N.new_empty(member.world, len(mine_N))
        member.group.start(
            "all_gather",
            dtype=str(mine_N.dtype).removeprefix("torch."),
            elements=all_WN.numel(),
            bytes=all_WN.nbytes,
            input=mine_N.data_ptr(),
            output=all_WN.data_ptr(),
            timeout_s=timeout_s,
            keep=(mine_N, all_WN),
        ).wait()
        return all_WN

    return gather
