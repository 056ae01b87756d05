"""Tensors in memory that the ranks of this host read without the kernel's help.

A tensor of torch's own lies in private memory: a rank that reduces or collects from it has the kernel copy it first,
page by page. What `empty` makes lies in a sealed memory file, which the engine passes to the peers on this host when an
operation first uses it; they map it, and reduce straight from it.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import math
import mmap
import os
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from penstock import _core
from penstock.errors import Config as ConfigError
from penstock.errors import PenstockError
from penstock.runtime import process

__all__ = ["empty"]

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
    flat = torch.frombuffer(_make(nbytes), dtype=dtype, count=max(count, 1), offset=_PAGE)
    return flat[:count].view(shape)


def _use(engine: _core.Engine | None) -> None:
    """Observer of the process's engine: it has started, or (None) is about to stop."""
    global _engine
    with _lock:
        _engine = engine
        # A copy: a tensor may be collected, and withdrawn, meanwhile.
        for buffer in list(_buffers.values()):
            _take_back(buffer)
            _share(buffer)


@dataclass
class _Buffer:
    """A mapped memory file. It does not keep the mapping alive, the tensor does.

    One descriptor a tensor, since a process may have few: the engine has it while it shares the memory, otherwise this object.
    """

    base: int
    nbytes: int
    file: int | None
    """The descriptor; None if it was lost with an engine."""
    identity: tuple[int, int]
    number: int | None = None
    """The engine's number for the memory, while the engine has the descriptor."""


def _make(nbytes: int) -> Any:
    """A buffer over a new memory file; the file goes with the buffer's last user."""
    total = _PAGE + nbytes
    try:
        file = os.memfd_create("penstock", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(file, total)
            # Peers rely on the size: to touch bytes beyond the end of a shorter file would kill them.
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            # Python's own mmap would keep a second descriptor open.
            base = _libc.mmap(None, total, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, file, 0)
            if base == _MAP_FAILED:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        except BaseException:
            os.close(file)
            raise
    except OSError as error:
        raise ConfigError(
            f"cannot make {nbytes / 2**20:.1f} MiB of shared memory: {error.strerror}. Use torch.empty instead, or make "
            "room: what is shared counts against the memory of the machine and of its container."
        ) from error
    memory = (ctypes.c_char * total).from_address(base)
    # At exit tensors may outlive this module; the memory goes with the process.
    weakref.finalize(memory, _release, base).atexit = False
    with _lock:
        buffer = _buffers[base] = _Buffer(base, nbytes, file, _identity(file))
        _share(buffer)
    return memory


def _share(buffer: _Buffer) -> None:
    """Give the descriptor to the engine, if there is one."""
    if _engine is None or buffer.file is None:
        return
    file, buffer.file = buffer.file, None
    try:
        buffer.number = _engine.share(file, buffer.base + _PAGE, buffer.nbytes)
        buffer.file = file
    except (OSError, PenstockError) as error:
        log.warning("a tensor of penstock.empty cannot be shared (%s): peers read it as any other", error)


def _take_back(buffer: _Buffer) -> None:
    """Duplicate the engine's descriptor, while it is open."""
    if buffer.number is None or buffer.file is None:
        return
    file, buffer.file, buffer.number = buffer.file, None, None
    try:
        own = os.dup(file)
    except OSError as error:
        log.warning("a tensor of penstock.empty cannot be shared any more (%s): peers read it as any other", error)
        return
    # An engine that has died has closed it, and the number may be another file's.
    if _identity(own) == buffer.identity:
        buffer.file = own
    else:
        os.close(own)


def _release(base: int) -> None:
    with _lock:
        buffer = _buffers.pop(base)
        if buffer.number is not None:
            # Before the memory is released, since its address may be reused at once.
            if _engine is not None:
                _engine.unshare(buffer.number)
        elif buffer.file is not None:
            os.close(buffer.file)
        _libc.munmap(base, _PAGE + buffer.nbytes)


def _forget_engine() -> None:
    """In a forked child: the engine is the parent's, its descriptors are closed here, and nothing releases a lock that was
    held."""
    global _engine, _lock
    _engine, _lock = None, threading.RLock()
    for buffer in _buffers.values():
        if buffer.number is not None:
            buffer.file = buffer.number = None


def _identity(file: int) -> tuple[int, int]:
    status = os.fstat(file)
    return status.st_dev, status.st_ino


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED = ctypes.c_void_p(-1).value
# The first page of the file is the engine's.
_PAGE = mmap.PAGESIZE
_lock = threading.RLock()
_buffers: dict[int, _Buffer] = {}
_engine: _core.Engine | None = None
os.register_at_fork(after_in_child=_forget_engine)
process.observe(_use)
