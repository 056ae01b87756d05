"""Tensors in memory that the ranks of this host read without the kernel's help.

A tensor of torch's own lies in private memory: a rank that reduces or collects from it has the kernel copy it first,
page by page. What `empty` makes lies in a sealed memory file, which the engine passes to the peers on this host when an
operation first uses it; they map it, and reduce straight from it.
"""

from __future__ import annotations

import fcntl
import logging
import math
import mmap
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from penstock import _core
from penstock.errors import Config as ConfigError
from penstock.errors import PenstockError

__all__ = ["empty", "use"]

log = logging.getLogger("penstock")


def empty(*size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Make a CPU tensor that the ranks of this host can read directly.

    Use it for what is reduced again and again: flat gradient buffers, parameters of one's own optimizer. Collectives on it
    take the same calls and give the same bits as on any other tensor; between hosts there is no difference. Views share
    its memory. It may be made before ``init_process_group``, and outlive the group.

    Args:
        *size: the shape, as `torch.empty` takes it.
        dtype: torch's default where there is none.

    Returns: a contiguous tensor of zeros, aligned to a page of the system (4096 bytes on most).

    Raises:
        penstock.errors.Config: a shape with a negative length; the system has no memory files, or cannot map so much.

    Does not block: pages come when they are touched, and where memory is short then, the system ends the process.
    In a forked child the memory is the parent's own, not a copy.
    """
    shape = torch.Size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
    if any(length < 0 for length in shape):
        raise ConfigError(f"penstock.empty: no tensor has the shape {tuple(shape)}")
    dtype = dtype or torch.get_default_dtype()
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"penstock.empty: dtype is to be a torch.dtype, such as torch.float32, not {dtype!r}")
    count = math.prod(shape)
    nbytes = -(-max(count, 1) * dtype.itemsize // _PAGE) * _PAGE
    memory = _make(nbytes)
    file = memory.file
    flat = torch.frombuffer(memory, dtype=dtype, count=max(count, 1), offset=_PAGE)
    with _lock:
        _share(_buffers.setdefault(file, _Buffer(file, flat.data_ptr(), nbytes)))
    return flat[:count].view(shape)


def use(engine: _core.Engine | None) -> None:
    """The process has an engine, or (None) has one no more."""
    global _engine
    with _lock:
        _engine = engine
        # A copy: a tensor may be collected, and withdrawn, meanwhile.
        for buffer in list(_buffers.values()):
            _share(buffer)


@dataclass
class _Buffer:
    """A memory file; it does not keep the mapping alive, the tensor does."""

    file: int
    address: int
    nbytes: int
    number: int | None = None
    """What the engine calls it."""


class _Memory(mmap.mmap):
    """A mapping that the engine forgets before it goes: a weak reference would tell it only when others may have its
    address already."""

    file = -1

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if self.file >= 0 and not is_finalizing():
            _release(self.file)


def _make(nbytes: int) -> _Memory:
    try:
        file = os.memfd_create("penstock", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(file, _PAGE + nbytes)
            # Peers must be able to rely on its size: touching what a shorter file lacks would kill them.
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            memory = _Memory(file, _PAGE + nbytes)
            memory.file = file
            return memory
        except BaseException:
            os.close(file)
            raise
    except OSError as error:
        raise ConfigError(
            f"cannot make {nbytes / 2**20:.1f} MiB of shared memory: {error.strerror}. Use torch.empty instead, or make "
            "room: what is shared counts against the memory of the machine and of its container."
        ) from error


def _share(buffer: _Buffer) -> None:
    buffer.number = None
    if _engine is not None:
        try:
            buffer.number = _engine.share(buffer.file, buffer.address, buffer.nbytes)
        except (OSError, PenstockError) as error:
            log.warning("a tensor of penstock.empty cannot be shared (%s): peers read it as any other", error)


def _release(file: int) -> None:
    with _lock:
        buffer = _buffers.pop(file, None)
        if _engine is not None and buffer is not None and buffer.number is not None:
            _engine.unshare(buffer.number)
        os.close(file)


# The first page of the file is the engine's.
_PAGE = mmap.PAGESIZE
_lock = threading.RLock()
_buffers: dict[int, _Buffer] = {}
_engine: _core.Engine | None = None
