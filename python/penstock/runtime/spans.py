"""Memory of others: the bytes of a user's buffer, and the engine's memory as an array."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock import _core
from penstock.errors import Config

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["array", "span"]


def span(buffer: Any, what: str, *, is_written: bool = False) -> tuple[int, int, Any]:
    """Address and length of a buffer, and the object that keeps it."""
    if buffer is None:
        return 0, 0, None
    if hasattr(buffer, "data_ptr") and hasattr(buffer, "is_contiguous"):
        if buffer.device.type != "cpu" or not buffer.is_contiguous():
            raise Config(f"{what} is a tensor on {buffer.device}, or not contiguous: use .cpu() or .contiguous()")
        if buffer.is_conj() or buffer.is_neg():
            raise Config(f"{what} is a view that torch has not computed yet: use .resolve_conj() or .resolve_neg()")
        # The tensor may get other memory meanwhile (``tensor.data = ...``); its alias keeps this.
        return buffer.data_ptr(), buffer.numel() * buffer.element_size(), buffer.detach()
    try:
        view = memoryview(buffer)
    except (TypeError, ValueError):
        raise Config(
            f"{what} must be a tensor, or an array or another buffer of plain numbers (.view(numpy.uint8) makes one), and not a "
            f"{type(buffer).__name__}"
        ) from None
    if "O" in view.format:
        raise Config(f"{what} holds Python objects, which mean nothing elsewhere: pickle them")
    if not view.c_contiguous or (is_written and view.readonly):
        raise Config(f"{what} is not contiguous, or cannot be written to")
    if view.nbytes == 0:
        return 0, 0, None
    array = np.frombuffer(view, np.uint8)
    return array.ctypes.data, view.nbytes, array


def array(memory: _core.EndpointMemory | None) -> npt.NDArray[np.uint8]:
    """Memory of the engine's as an array, which keeps it."""
    if memory is None:
        return np.empty(0, np.uint8)
    view = (ctypes.c_ubyte * memory.length).from_address(memory.address)
    view.owner = memory  # type: ignore[attr-defined]
    return np.frombuffer(memoryview(view), np.uint8)
