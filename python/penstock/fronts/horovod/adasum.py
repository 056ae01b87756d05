"""Adasum: adds gradients as far as they are orthogonal and averages them as far as they are parallel.

Maleki et al., "Scaling Distributed Training with Adaptive Summation" (arXiv 2006.02924): for two gradients

    Adasum(a, b) = (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b

and for more of them a binary tree of such pairs. The tree is walked by vector halving and distance doubling (section 4.2
there): in each step a pair of ranks swaps halves, every rank combines the half that it keeps, and the dot products, which need
whole vectors, are summed over the ranks that hold parts of the same two. Then the parts are gathered back.

```text
  ranks     0     1     2     3          each holds a whole gradient
  step 1    0 <-> 1     2 <-> 3          halves of Adasum(g0, g1) and Adasum(g2, g3)
  step 2    0 <-> 2     1 <-> 3          quarters of the result; dot products over 0..3
  back      the same pairs, in reverse
```
Every element of the result is computed by one rank and copied, so all ranks get the same bits. Ranks beyond a power of two
are combined with the first ones before, and get the result after.
"""

from __future__ import annotations

import torch

from penstock.fronts.horovod.group import Group

__all__ = ["combine", "reduce"]


def reduce(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Adasum of one tensor over all ranks of a group; blocks.

    Args:
        tensor: floating point, any shape, the same on all ranks. Halves are computed in float32.
    Returns: a new tensor, the same bits on all ranks.
    Raises:
        penstock.errors.PenstockError: the group failed.
    Cost: as an all-reduce by halving and doubling, and 2 log2(n) small messages for the dot products.
    """
    rank, world = group.rank, group.size
    dtype = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype
    whole = tensor.detach().reshape(-1).to(dtype, copy=True)
    power = 1 << (world.bit_length() - 1)
    extra = rank + power if rank + power < world else None
    if rank >= power:
        _send(whole, rank - power, group)
        _receive(whole, rank - power, group)
        return whole.view(tensor.shape).to(tensor.dtype)
    if extra is not None:
        other = torch.empty_like(whole)
        _receive(other, extra, group)
        whole = combine(whole, other, dots(whole, other))
    _halve(whole, rank, power, group)
    if extra is not None:
        _send(whole, extra, group)
    return whole.view(tensor.shape).to(tensor.dtype)


def combine(left: torch.Tensor, right: torch.Tensor, dot: torch.Tensor) -> torch.Tensor:
    """The pair's sum; ``dot`` holds left.right, left.left and right.right of the whole vectors, in float64."""
    product, left_square, right_square = dot.tolist()
    # A vector of zeros, or one whose square is lost, is just added (as in Horovod's adasum.h).
    left_factor = 1.0 - product / left_square / 2 if left_square >= _TINY else 1.0
    right_factor = 1.0 - product / right_square / 2 if right_square >= _TINY else 1.0
    return left * left_factor + right * right_factor


def dots(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    left, right = left.double().cpu(), right.double().cpu()
    return torch.stack([left @ right, left @ left, right @ right])


def _halve(whole: torch.Tensor, rank: int, world: int, group: Group) -> None:
    """Reduce ``whole`` in place over ranks 0 to ``world`` - 1, a power of two."""
    start, end = 0, whole.numel()
    steps = []
    distance = 1
    while distance < world:
        peer = rank ^ distance
        middle = start + (end - start) // 2
        low, high = (start, middle), (middle, end)
        kept, given = (low, high) if rank < peer else (high, low)
        other = torch.empty_like(whole[slice(*kept)])
        _swap(whole[slice(*given)], other, peer, group)
        own = whole[slice(*kept)]
        left, right = (own, other) if rank < peer else (other, own)
        dot = dots(left, right)
        # Over the ranks that hold parts of these two vectors; pairs add in either order to the same bits.
        across = 1
        while across <= distance:
            theirs = torch.empty_like(dot)
            _swap(dot, theirs, rank ^ across, group)
            dot = dot + theirs
            across *= 2
        own.copy_(combine(left, right, dot))
        steps.append((peer, kept, given))
        start, end = kept
        distance *= 2
    for peer, kept, given in reversed(steps):
        theirs = torch.empty_like(whole[slice(*given)])
        _swap(whole[slice(*kept)], theirs, peer, group)
        whole[slice(*given)].copy_(theirs)


def _swap(ours: torch.Tensor, theirs: torch.Tensor, peer: int, group: Group) -> None:
    sent = group.send(ours.contiguous(), peer)
    _receive(theirs, peer, group)
    sent.wait()


def _send(tensor: torch.Tensor, peer: int, group: Group) -> None:
    group.send(tensor, peer).wait()


def _receive(tensor: torch.Tensor, peer: int, group: Group) -> None:
    group.receive(tensor, peer).wait()


# The square root of the smallest normal float64, below which Horovod takes a square for nothing (adasum.h).
_TINY = 2.0**-511
