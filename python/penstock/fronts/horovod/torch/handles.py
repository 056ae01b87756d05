"""Submitting operations on torch tensors, and the handles that stand for them until they are synchronised.

The helpers translate: a process set into its controller, a tensor into what ranks tell each other about it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from penstock.fronts.horovod import job
from penstock.fronts.horovod.common.exceptions import HorovodInternalError
from penstock.fronts.horovod.common.process_sets import ProcessSet
from penstock.fronts.horovod.controller import Controller
from penstock.fronts.horovod.negotiation import DTYPES, Kind, Request
from penstock.fronts.horovod.operations import Entry, Result

__all__ = [
    "check_tensor",
    "controller_of",
    "drop",
    "empty",
    "forget_all",
    "is_known",
    "like",
    "names",
    "poll",
    "ready",
    "release",
    "request",
    "submit",
    "synchronize",
]


def poll(handle: int) -> bool:
    """Whether `synchronize` would not block.

    Raises:
        ValueError: there is no such handle, or it was synchronised already.
    """
    with _handles_lock:
        if handle not in _handles:
            raise ValueError(f"Handle {handle} was not created or has been cleared.")
        results, _ = _handles[handle]
    return all(result.done() for result in results)


def synchronize(handle: int) -> Any:
    """Block until an operation has ended and return its result; None if it was returned before. Where something else ends the
    wait, as a signal's handler that raises, the handle can be synchronized again.

    Raises:
        HorovodInternalError: the operation failed; its tensors are undefined and will not be touched.
    """
    with _handles_lock:
        if handle not in _handles:
            return None
        results, output = _handles[handle]
    try:
        for result in results:
            result.wait()
    except BaseException as error:
        if all(result.failure() is None for result in results):
            raise
        drop([handle])
        if isinstance(error, RuntimeError) and not isinstance(error, HorovodInternalError):
            raise HorovodInternalError(str(error)) from error
        raise
    drop([handle])
    return output


def is_known(handle: int) -> bool:
    """Whether the handle was neither synchronized nor dropped."""
    with _handles_lock:
        return handle in _handles


def release() -> None:
    """The job has ended: what has failed keeps its error, for whoever synchronizes it, and no tensor."""
    with _handles_lock:
        for handle, (results, _) in _handles.items():
            failed = next((error for error in (result.failure() for result in results) if error is not None), None)
            if failed is not None:
                told = Result()
                told.failed(failed)
                _handles[handle] = [told], None


def forget_all() -> None:
    """Drop all handles: what they stand for ended with the job that they were submitted in."""
    with _handles_lock:
        _handles.clear()


def drop(submitted: Iterable[int]) -> None:
    """Nobody will synchronise these. Those that were synchronised already are passed over."""
    with _handles_lock:
        for handle in submitted:
            _handles.pop(handle, None)


def controller_of(process_set: ProcessSet, what: str) -> Controller:
    """What negotiates the operations of a process set; ``what`` names the operation in errors."""
    try:
        running = job.current()
    except ValueError as error:
        raise HorovodInternalError(str(error)) from error
    return running.controller(process_set._number(), what)


def names(
    controller: Controller, kind: str, name: str | None, tensors: Sequence[torch.Tensor], grouped: bool
) -> list[str]:
    """The names of the operations on these tensors: the caller's or, without one, their count."""
    if not grouped:
        return [controller.name(kind, name)]
    base = controller.name(f"grouped_{kind}", name)
    return [f"{base}_{index}of{len(tensors)}" for index in range(1, len(tensors) + 1)]


def submit(controller: Controller, entries: list[Entry], output: Any) -> int:
    """Hand operations over and return their common handle; `synchronize` returns ``output``."""
    controller.submit(entries)
    with _handles_lock:
        handle = next(_numbers)
        _handles[handle] = [entry.result for entry in entries], output
    return handle


def request(kind: Kind, tensor: torch.Tensor, **more: Any) -> Request:
    """What ranks compare of an operation on a tensor."""
    return Request(
        kind,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        on_cpu=not tensor.is_cuda,
        **more,
    )


def check_tensor(tensor: torch.Tensor, *, reduced: bool = False) -> None:
    """Raise ValueError for a tensor that cannot be sent or, with ``reduced``, reduced."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in DTYPES or tensor.layout is not torch.strided or (reduced and name in _NOT_REDUCED):
        raise ValueError(f"Tensor type {tensor.type()} is not supported.")
    if not tensor.is_contiguous():
        raise ValueError("Tensor is required to be contiguous.")


def like(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor for a result of the same shape."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def empty(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor for a result whose shape is known when the operation ends."""
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device)


def ready(tensor: torch.Tensor) -> Any:
    """The event for which other readers of a CUDA tensor have to wait."""
    if not tensor.is_cuda:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))
    return tensor.device, event


_NOT_REDUCED = frozenset(("bool", "complex64", "complex128", "uint16", "uint32", "uint64"))
# Operations that were submitted and not synchronised: what they wait for, and what they return.
_handles: dict[int, tuple[list[Result], Any]] = {}
_handles_lock = threading.Lock()
_numbers = itertools.count(1)
