"""How far a sum through aggregators may be from the exact one: docs/design/quantisation.md, apart from the engine."""

from __future__ import annotations

import math

import torch


def bits(dtype: torch.dtype, workers: int) -> int:
    """Of a block's largest element, in the integers of a deployment with ``format: int32``."""
    significand = SIGNIFICANDS[dtype]
    narrow = significand < 24 and workers * (2**significand - 1) < 2**15
    share = (2 ** (15 if narrow else 31) - 1) // workers
    largest = {bits: 2**bits - (0 if bits < significand else 2 ** (bits - significand)) for bits in range(32)}
    return max(bits for bits, value in largest.items() if value <= share)


def bound(dtype: torch.dtype, workers: int, largest: float) -> float:
    """The most that a sum of ``workers`` elements is wrong by, before it is rounded to ``dtype``.

    Args:
        largest: magnitude of all workers' elements in the element's block; that of more elements gives a looser bound.
    """
    return workers / 2 * math.ldexp(1.0, math.frexp(largest)[1] - bits(dtype, workers)) if largest else 0.0


SIGNIFICANDS = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
