"""Gradients in fewer bits on the wire."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class Compressor:
    """What ``DistributedOptimizer(compression=...)`` takes. Derive from it for one of your own."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return what is to be sent, and what `decompress` needs to know."""
        raise TypeError("derive from Compressor and say how to compress")

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return what was compressed, reduced."""
        raise TypeError("derive from Compressor and say how to decompress")


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class _Halves(Compressor):
    """Sends floating point tensors in 16 bits, and others as they are."""

    wire: ClassVar[torch.dtype]

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return (tensor.to(cls.wire) if tensor.dtype.is_floating_point else tensor), tensor.dtype

    @classmethod
    def decompress(cls, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx) if ctx.is_floating_point else tensor


class FP16Compressor(_Halves):
    """float16: 11 bits of precision, up to 65504."""

    wire = torch.float16


class BF16Compressor(_Halves):
    """bfloat16: 8 bits of precision, the range of float32. Horovod does not have it."""

    wire = torch.bfloat16


class Compression:
    """The compressors by name."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
