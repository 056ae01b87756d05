"""Descriptions of gradients for the engine's reducer, and the check that a gradient still matches its description.

Only addresses cross to the engine, in every step. Between two steps a script may do to a model whatever torch lets it do
(``model.double()``, ``model.cuda()``, ``parameter.grad = ...``), so every gradient is checked before its address is handed
over.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import torch

from penstock import _core
from penstock.errors import Config as ConfigError
from penstock.torch.arguments import is_wrapper, no_memory
from penstock.torch.layout import Layout, layout
from penstock.training.passes import BackwardPass

__all__ = ["Slots"]


class Slots:
    """A slot a parameter, by index; its gradients have the parameter's dtype, shape and layout, or are copied into it.

    Args:
        parameters: on the CPU. One that is not dense has contiguous gradients, as autograd makes them.
        names: their names in errors.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        self._names = names
        self._current = _core.CurrentPass(torch._C._current_graph_task_id)
        self._slots = [_slot(one) for one in parameters]
        self._quick = [
            (_core.TensorCheck(torch.empty_strided(shape, strides, dtype=dtype)), one.nbytes, one.itemsize)
            for one, (dtype, shape, strides, _) in zip(parameters, self._slots, strict=True)
        ]

    def described(self) -> list[tuple[str, int, str, int]]:
        """The gradients for `_core.Reducer`, which compares them between ranks: name, elements, dtype, and a checksum of shape
        and layout."""
        return [
            (name, shape.numel(), str(dtype).removeprefix("torch."), _checksum(shape, lies))
            for name, (dtype, shape, _, lies) in zip(self._names, self._slots, strict=True)
        ]

    def submit(
        self, reducer: _core.Reducer, index: int, gradient: torch.Tensor, absent: bool = False
    ) -> tuple[torch.Tensor, int, bool]:
        """Hand a gradient over, which is reduced in place.

        Returns: the gradient, or the copy that is reduced instead, where it has another layout than its slot; its address; and
        whether it lies in memory of its own.

        Raises:
            penstock.errors.Config: it is not what the reducer was made for; it shares memory with another one. Nothing was sent.
            penstock.errors.PenstockError: the reducer has failed, or other ranks have dropped the step.
        """
        # This runs for every gradient of every step.
        check, nbytes, itemsize = self._quick[index]
        address = check.address(gradient)
        if address is None or gradient.is_neg():
            gradient = self._fitting(index, gradient)
            address = gradient.data_ptr()
        keep = gradient.untyped_storage()
        size = keep.nbytes()
        if size < nbytes + gradient.storage_offset() * itemsize:
            raise ConfigError(f"the gradient of {self._names[index]} has lost its memory: its storage was resized")
        if absent:
            reducer.submit(index, address, nbytes, keep, absent=True)
        else:
            reducer.submit(index, address, nbytes, keep)
        return gradient, address, size == nbytes

    def hook(
        self, reducer: _core.Reducer, index: int, otherwise: Callable[[torch.nn.Parameter], None]
    ) -> _core.ReadyHook:
        """The hook of a parameter: submits a gradient of the pass that is followed, if it is reduced where it lies; or else calls
        ``otherwise`` with the parameter."""
        return _core.ReadyHook(self._current, reducer, index, *self._quick[index], otherwise)

    def follow(self, one: BackwardPass) -> None:
        """From now on, hooks hand over the gradients of this pass."""
        self._current.follow(one.task, one.handed, one.states.addresses, one.states.versions, one.shared)

    def end(self) -> None:
        """The pass has ended, or was dropped."""
        self._current.end()

    def zeros(self, index: int) -> torch.Tensor:
        """Zeros in place of a gradient that this rank does not have."""
        dtype, shape, strides, _ = self._slots[index]
        return torch.empty_strided(shape, strides, dtype=dtype).zero_()

    def _fitting(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient that is not exactly as its slot, or a copy that is."""
        dtype, shape, strides, lies = self._slots[index]
        if (
            gradient.dtype is not dtype
            or not gradient.is_cpu
            or gradient.shape != shape
            or gradient.layout is not torch.strided
        ):
            raise self._changed(index, gradient)
        if is_wrapper(gradient):
            raise ConfigError(f"the gradient of {self._names[index]} {no_memory(gradient)}. Nothing was sent")
        if gradient.is_neg() or layout(gradient) != lies:
            with torch.no_grad():
                return torch.empty_strided(shape, strides, dtype=dtype).copy_(gradient)
        return gradient

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


def _checksum(shape: torch.Size, lies: Layout) -> int:
    return zlib.crc32(repr((tuple(shape), lies)).encode())


def _slot(parameter: torch.Tensor) -> tuple[torch.dtype, torch.Size, tuple[int, ...], Layout]:
    """A parameter's slot: dtype, shape, strides and layout of its gradients."""
    lies = layout(parameter)
    strides = parameter.stride()
    if lies is None:
        contiguous = torch.empty(parameter.shape, device="meta")
        strides, lies = contiguous.stride(), layout(contiguous) or ()
    return parameter.dtype, parameter.shape, strides, lies
