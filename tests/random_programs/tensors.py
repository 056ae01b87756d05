"""A tensor of a program: made in a layout, with guards beside it, and compared with what the model says."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch

from collectives import reference
from random_programs import model


class Made:
    """A tensor of a layout, in memory with a guard on both sides where it is a slice."""

    def __init__(self, slot: model.Slot, index: int) -> None:
        self.slot = slot
        flat, count, layout = slot.before, slot.before.numel(), slot.layout
        self.guards: list[torch.Tensor] = []
        if layout in ("slice", "shared slice"):
            edge = (1, 3, 64)[index % 3]
            self.whole = model.poison(count + 2 * edge, str(flat.dtype).removeprefix("torch."))
            if layout == "shared slice" and flat.dtype not in _NOT_SHARED:
                self.whole = shared(self.whole)
            self.tensor = self.whole[edge : edge + count]
            self.tensor.copy_(flat)
            self.guards = [self.whole[:edge], self.whole[edge + count :]]
            self.guard_bits = [bytes_of(one) for one in self.guards]
        elif layout == "strided" and count > 1:
            self.whole = model.poison(2 * count, str(flat.dtype).removeprefix("torch."))
            self.tensor = self.whole[::2]
            self.tensor.copy_(flat)
            self.guards = [self.whole[1::2]]
            self.guard_bits = [bytes_of(one) for one in self.guards]
        elif layout == "shared" and flat.dtype not in _NOT_SHARED:
            self.whole = self.tensor = shared(flat)
        else:
            self.whole = self.tensor = flat.clone()
            if layout == "matrix" and count % 2 == 0:
                self.tensor = self.whole.view(-1, 2) if count % 4 else self.whole.view(2, -1, 2)
            if layout == "channels_last" and count % 8 == 0 and count:
                self.tensor = self.whole.view(1, 2, 2, -1).permute(0, 3, 1, 2)
            if layout == "scalar" and count == 1:
                self.tensor = self.whole.view(())

    def wrong(self) -> str | None:
        """What is wrong with the tensor after its call."""
        for guard, bits in zip(self.guards, self.guard_bits if self.guards else [], strict=True):
            if bytes_of(guard) != bits:
                return f"memory beside the tensor ({self.slot.layout}) has changed"
        # In the order in memory, which is the model's.
        flat = self.whole if self.whole.numel() == self.tensor.numel() else self.tensor
        after, found = self.slot.after, flat.detach().reshape(-1)[self.slot.part or slice(None)]
        if after is None or _is_same(found, after, self.slot.bound):
            return None
        if self.slot.bound is None:
            differs = (_words(found) != _words(after)).any(-1)
        else:
            near = (found.double() - after.double()).abs() <= torch.as_tensor(self.slot.bound)
            differs = ~near.numpy() if found.is_floating_point() else (found != after).numpy()
        first = int(np.flatnonzero(differs)[0])
        return (
            f"{int(differs.sum())} of {found.numel()} elements ({found.dtype}) are wrong, the first at {first}: "
            f"{found[first].item()} instead of {after[first].item()}"
        )


def shared(tensor: torch.Tensor) -> torch.Tensor:
    """The same in memory that the ranks of a host read directly."""
    import penstock

    return penstock.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor)


def bytes_of(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().reshape(-1)
    return reference.raw(flat.contiguous()).numpy().tobytes()


def _is_same(found: torch.Tensor, after: torch.Tensor, bound: Any) -> bool:
    """Whether ``found`` is as `model.Slot` says."""
    found, after = found.contiguous(), after.contiguous()
    if isinstance(bound, np.ndarray):
        parts = zip(*(one.split(model.PART) for one in (found, after, torch.from_numpy(bound))), strict=True)
        return all(bool(((one.double() - wanted).abs_() <= near).all()) for one, wanted, near in parts)
    if found.dtype == after.dtype and _memcmp(found.data_ptr(), after.data_ptr(), found.nbytes) == 0:
        return True
    # Zeros of two signs are one value.
    return bound is not None and torch.equal(found, after.to(found.dtype))


def _words(tensor: torch.Tensor) -> np.ndarray:
    return np.frombuffer(bytes_of(tensor), dtype=np.uint8).reshape(tensor.numel(), -1)


# torch.equal compares byte by byte, at a tenth of its speed.
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_NOT_SHARED = {torch.bool}
