"""Inputs that show where a wrong byte came from, and what a reduction of them must give, in numpy.

Integers wrap as two's complement; AVG is the (wrapped) sum divided by the number of ranks, truncated towards zero; bool adds
as "or" and multiplies as "and". Floating-point results may differ from the exact ones by the rounding of n - 1 operations in
the dtype, whatever the order of the operands.
"""

from __future__ import annotations

import functools
import math
import zlib

import numpy as np
import torch

FLOATS = ["float32", "float64", "float16", "bfloat16"]
INTEGERS = ["int8", "int16", "int32", "int64", "uint8"]
REDUCIBLE = [*FLOATS, *INTEGERS, "bool"]
MOVED_ONLY = ["uint16", "uint32", "uint64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"]
ALL_DTYPES = [*REDUCIBLE, *MOVED_ONLY]

OPERATIONS = ["SUM", "AVG", "PREMUL_SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]
PREMUL_FACTOR = 0.37


def is_defined(operation: str, dtype: str) -> bool:
    if operation == "AVG":
        return dtype in FLOATS + INTEGERS
    if operation == "PREMUL_SUM":
        return dtype in FLOATS
    if operation in ("BAND", "BOR", "BXOR"):
        return dtype in [*INTEGERS, "bool"]
    return dtype in REDUCIBLE


def fill(rank: int, count: int, dtype: str, *, key: str = "") -> torch.Tensor:
    """`count` elements that depend on the rank, the position and `key`; the same in every process."""
    generator = np.random.default_rng([rank, count, zlib.crc32(f"{dtype} {key}".encode())])
    if dtype == "bool":
        return torch.from_numpy(generator.integers(0, 2, count, dtype=bool))
    if dtype in FLOATS:
        # Near 1 in size, so that a product of a few stays in range, with both signs.
        numbers = generator.uniform(-1.0, 1.0, count)
        numbers += np.copysign(0.5, numbers)
        return torch.from_numpy(numbers).to(getattr(torch, dtype))
    # Every bit pattern is a legal integer, complex number or 8-bit float for an operation that only moves it.
    tensor = torch.empty(count, dtype=getattr(torch, dtype))
    raw(tensor).copy_(torch.from_numpy(generator.integers(0, 256, tensor.nbytes, dtype=np.uint8)))
    return tensor


def special_pairs(dtype: str, ranks: int) -> list[torch.Tensor]:
    """Pairs of special values, in both orders: rank 0 has one of the pair, all other ranks the other.

    Left out is the pair whose sum depends on the order of addition: -inf + max + max, where max + max overflows to inf.
    """
    kind = getattr(torch, dtype)
    denormal = torch.finfo(kind).smallest_normal / 4
    largest = torch.finfo(kind).max
    special = [math.nan, math.inf, -math.inf, 0.0, -0.0, denormal, -denormal, 1.0, largest]
    pairs = [[a, b] for a in special for b in special if {a, b} != {-math.inf, largest}]
    pairs = torch.tensor(pairs, dtype=torch.float64).to(kind)
    return [pairs[:, min(rank, 1)].repeat(5) for rank in range(ranks)]


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, in one dimension, sharing its memory."""
    return tensor.view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


def reduced(operation: str, inputs: list[torch.Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """What reducing `inputs` must give, and how far off each element may be."""
    dtype = str(inputs[0].dtype).removeprefix("torch.")
    if dtype in FLOATS:
        return _reduced_floats(operation, np.stack([one.double().numpy() for one in inputs]), dtype)
    arrays = [one.numpy() for one in inputs]
    with np.errstate(over="ignore"):
        if operation == "AVG":
            total = functools.reduce(np.add, arrays)
            # Truncated towards zero, where NumPy's division rounds down.
            result = total // len(arrays) + ((total % len(arrays) != 0) & (total < 0))
        elif dtype == "bool":
            result = functools.reduce(_BOOL[operation], arrays)
        else:
            result = functools.reduce(_INTEGER[operation], arrays)
    return result, np.zeros(result.shape)


def _reduced_floats(operation: str, inputs_RN: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    ranks = len(inputs_RN)
    rounding = torch.finfo(getattr(torch, dtype)).eps
    if operation in ("MIN", "MAX"):
        result = inputs_RN.min(0) if operation == "MIN" else inputs_RN.max(0)
        return result, np.zeros(result.shape)
    if operation == "PRODUCT":
        result = inputs_RN.prod(0)
        return result, ranks * rounding * np.abs(result)
    factor = {"SUM": 1.0, "AVG": 1.0 / ranks, "PREMUL_SUM": PREMUL_FACTOR}[operation]
    # One more rounding for the factor on each operand, or for the division of the sum; one for storing the result.
    steps = ranks - 1 if operation == "SUM" else ranks + 2
    return factor * inputs_RN.sum(0), steps * rounding * factor * np.abs(inputs_RN).sum(0)


_INTEGER = {
    "SUM": np.add,
    "PRODUCT": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}
_BOOL = {
    "SUM": np.logical_or,
    "PRODUCT": np.logical_and,
    "MIN": np.logical_and,
    "MAX": np.logical_or,
    "BAND": np.logical_and,
    "BOR": np.logical_or,
    "BXOR": np.logical_xor,
}
