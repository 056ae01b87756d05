"""Support for DDP communication hooks that are not Penstock's (docs/guide/compression.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

__all__ = ["in_turn"]

State = TypeVar("State")
Hook = Callable[[State, dist.GradBucket], torch.futures.Future[torch.Tensor]]


def in_turn(hook: Hook[State]) -> Hook[State]:
    """Make a DDP communication hook that ends one bucket before it begins the next.

    A hook such as torch's PowerSGD issues collectives from the callbacks of others. With several buckets in flight they come
    in another order on each rank, and collectives that come in another order are a `penstock.errors.Mismatch`, or, where
    sizes happen to agree, sums of things that do not belong together. (PowerSGD without warm start also deletes what the
    other buckets still use.) Hooks with one collective a bucket, such as the float16 ones, need none of this.

    Args:
        hook: any DDP communication hook.

    Returns: a hook with the same state, for ``register_comm_hook``.
    Blocking: the backward pass, for each bucket until its last collective has ended: computing and communication do not
        overlap, so have few buckets (``bucket_cap_mb``).
    """

    def each_in_turn(state: State, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future = hook(state, bucket)
        future.wait()
        return future

    # DDP compares the annotations with types, and here they are texts.
    each_in_turn.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
    each_in_turn.__qualname__ = f"in_turn({getattr(hook, '__qualname__', hook)})"  # for DDP's log
    return each_in_turn
