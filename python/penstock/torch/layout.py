"""Memory layouts of tensors, and whether two tensors have the same one.

Operations see memory: so many bytes from an address on. Ranks that reduce or exchange tensors element by element need not
have them contiguous, but dense, and with every element at the same place on all ranks. The *layout* says which element lies
where: the sizes and strides of a tensor's dimensions, without those of size 1, and with dimensions joined that follow each
other in memory as they do in the shape. Two dense tensors of equal size have the same layout exactly if the n-th element of
one lies where the n-th element of the other does. A contiguous tensor has one dimension then, or none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from penstock import _core

__all__ = ["Layout", "blocks", "layout", "number", "rows"]

Layout = tuple[tuple[int, int], ...]
"""(size, stride) of each dimension, in elements, the first dimension first."""


def layout(tensor: torch.Tensor) -> Layout | None:
    """A tensor's layout; None if the tensor is not dense: it has holes, or elements that share their memory. (None also for more
    than eight dimensions in another order than the shape's, for which there are no numbers.)"""
    if tensor.is_contiguous():
        return _joined([(tensor.numel(), 1)])
    return _dense(tensor.shape, tensor.stride())


def blocks(count: int, elements: int, each: Layout) -> Layout:
    """The layout of ``count`` blocks, one after the other, of ``elements`` elements each."""
    return _joined([(count, elements), *each])


def rows(tensor: torch.Tensor) -> Layout | None:
    """The layout of one row: the elements of one index of the first dimension. None if the tensor is not dense, or its rows do
    not follow each other in memory."""
    whole = layout(tensor)
    if whole is None or not tensor.dim():
        return whole
    row = _dense(tensor.shape[1:], tensor.stride()[1:])
    if not tensor.numel():
        # There is no row; any layout will do.
        return row if row is not None else _joined([(math.prod(tensor.shape[1:]), 1)])
    if row is None or blocks(tensor.shape[0], tensor.numel() // tensor.shape[0], row) != whole:
        return None
    return row


def number(of: Layout) -> int:
    """The number of a layout, which ranks compare: the sizes of its dimensions and their order in memory; 0 for contiguous
    tensors."""
    if len(of) < 2:
        return 0
    return _core.memory_layout([size for size, _ in of], sorted(range(len(of)), key=lambda dim: -of[dim][1]))


def _dense(shape: Sequence[int], strides: Sequence[int]) -> Layout | None:
    dims = [(size, stride) for size, stride in zip(shape, strides, strict=True) if size != 1]
    elements = 1
    for size, stride in sorted(dims, key=lambda dim: dim[1]):
        if stride != elements:
            return None
        elements *= size
    found = _joined(dims)
    return found if len(found) <= _MOST_DIMENSIONS else None


def _joined(dims: Iterable[tuple[int, int]]) -> Layout:
    joined: list[tuple[int, int]] = []
    for size, stride in dims:
        if size == 1:
            continue
        if joined and joined[-1][1] == size * stride:
            joined[-1] = (joined[-1][0] * size, stride)
        else:
            joined.append((size, stride))
    return tuple(joined)


# The most dimensions that `_core.memory_layout` takes.
_MOST_DIMENSIONS = 8
