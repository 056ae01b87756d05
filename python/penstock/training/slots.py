"""Descriptions of gradients for the engine's reducer, and the check that a gradient still matches its description.

Only addresses cross to the engine, in every step. Between two steps a script may do to a model whatever torch lets it do
(``model.double()``, ``model.cuda()``, ``parameter.grad = ...``), so every gradient is checked before its address is handed
over.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from penstock import _core
from penstock.errors import Config as ConfigError
from penstock.torch.layout import Layout, layout

__all__ = ["Slots"]


class Slots:
    """A slot a parameter, by index; its gradients have the parameter's dtype, shape and layout, or are copied into it.

    Args:
        parameters: on the CPU. One that is not dense has contiguous gradients, as autograd makes them.
        names: their names in errors.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        self._names = names
        self._slots = [_slot(one) for one in parameters]

    def described(self) -> list[tuple[str, int, str, int]]:
        """The gradients for `_core.Reducer`, which compares them between ranks: name, elements, dtype, and a checksum of shape
        and layout."""
        return [
            (name, shape.numel(), str(dtype).removeprefix("torch."), _checksum(shape, lies))
            for name, (dtype, shape, _, lies, *_) in zip(self._names, self._slots, strict=True)
        ]

    def submit(self, reducer: _core.Reducer, index: int, gradient: torch.Tensor, absent: bool = False) -> torch.Tensor:
        """Hand a gradient over, which is reduced in place; returns it, or the copy that is reduced instead, where it has another
        layout than its slot.

        Raises:
            penstock.errors.Config: it is not what the reducer was made for; it shares memory with another one. Nothing was sent.
            penstock.errors.PenstockError: the reducer has failed, or other ranks have dropped the step.
        """
        # In the order of the cheapest: this runs for every gradient of every step.
        dtype, shape, strides, lies, is_contiguous, nbytes, itemsize = self._slots[index]
        if (
            gradient.dtype is not dtype
            or not gradient.is_cpu
            or gradient.shape != shape
            or gradient.layout is not _STRIDED
        ):
            raise self._changed(index, gradient)
        if gradient.is_neg() or (
            not (is_contiguous and gradient.is_contiguous())
            and gradient.stride() != strides
            and layout(gradient) != lies
        ):
            with torch.no_grad():
                gradient = torch.empty_strided(shape, strides, dtype=dtype).copy_(gradient)
        keep = gradient.untyped_storage()
        if keep.nbytes() < nbytes + gradient.storage_offset() * itemsize:
            raise ConfigError(f"the gradient of {self._names[index]} has lost its memory: its storage was resized")
        if absent:
            reducer.submit(index, gradient.data_ptr(), nbytes, absent=True, keep=keep)
        else:
            reducer.submit(index, gradient.data_ptr(), nbytes, keep=keep)
        return gradient

    def zeros(self, index: int) -> torch.Tensor:
        """Zeros in place of a gradient that this rank does not have."""
        dtype, shape, strides, *_ = self._slots[index]
        return torch.empty_strided(shape, strides, dtype=dtype).zero_()

    def _changed(self, index: int, gradient: torch.Tensor) -> ConfigError:
        dtype, shape, *_ = self._slots[index]
        if gradient.layout is not torch.strided:
            what = (
                f"is {gradient.layout}. Sparse gradients are reduced where the model is given as a module and they come from its "
                "nn.Embedding or nn.EmbeddingBag with sparse=True; make others dense"
            )
        else:
            what = (
                f"has shape {tuple(gradient.shape)} and dtype {gradient.dtype} on {gradient.device}, not {tuple(shape)} and "
                f"{dtype} on cpu: the model was changed (.double(), .bfloat16(), .to(), .cuda(), ...) after its gradients "
                "were hooked. Change it before, on all ranks alike"
            )
        return ConfigError(f"the gradient of {self._names[index]} {what}. Nothing was sent.")


_STRIDED = torch.strided


def _checksum(shape: torch.Size, lies: Layout) -> int:
    return zlib.crc32(repr((tuple(shape), lies)).encode())


def _slot(
    parameter: torch.Tensor,
) -> tuple[torch.dtype, torch.Size, tuple[int, ...], Layout, bool, int, int]:
    """A parameter's slot: dtype, shape, strides, layout, whether that is a contiguous tensor's, bytes, and bytes of an element of
    its gradients."""
    lies = layout(parameter)
    strides = parameter.stride()
    if lies is None:
        contiguous = torch.empty(parameter.shape, device="meta")
        strides, lies = contiguous.stride(), layout(contiguous) or ()
    is_contiguous = len(lies) < 2
    return parameter.dtype, parameter.shape, strides, lies, is_contiguous, parameter.nbytes, parameter.itemsize
