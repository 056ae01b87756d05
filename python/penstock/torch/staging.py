"""CUDA tensors: through pinned host memory, on streams of our own.

```text
  caller's stream   ...gradient ready ──┐
  side stream                           └─ device → pinned ─ event        ┌─ pinned → device ─ event
  staging thread                                  event.synchronize() ─ release
  engine                 takes its place in the order ─────────────────── runs ┘
  caller's stream                                                  wait(): waits for the event, not the host
```
The operation takes its place in the group's order at the call, so that operations on CPU and CUDA tensors stay in the
same order on all ranks; the engine touches the pinned buffer only after `release`.

Why pinned copies and not GPUDirect? It needs a network card and a driver that share memory with the GPU; ordinary
networks do not have them. NCCL is the better choice inside a host with several GPUs ("cpu:penstock,cuda:nccl").
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["Staged", "StagedTicket"]


class Staged:
    """Host twins of the CUDA tensors of one operation.

    Args:
        inputs: tensors that are read; their twins are filled before the engine starts.
        outputs: tensors that are written; their twins are copied back after it has ended. A tensor in both lists has
            one twin.
    """

    def __init__(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        self.device = (*inputs, *outputs)[0].device
        self._outputs = outputs
        self._side = _side_stream(self.device)
        self._twins: dict[int, torch.Tensor] = {}
        self.filled = torch.cuda.Event()
        # The side stream starts after what the caller has queued so far, the gradient's computation.
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side):
            for tensor in inputs:
                self.twin(tensor).copy_(tensor, non_blocking=True)
                # The caching allocator must not hand the memory out again before the side stream is done with it.
                tensor.record_stream(self._side)
            self.filled.record(self._side)

    def twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """The pinned host tensor that stands in for ``tensor`` (torch keeps a cache of pinned memory)."""
        found = self._twins.get(id(tensor))
        if found is None:
            found = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            self._twins[id(tensor)] = found
        return found

    def copy_back(self) -> None:
        """Queue the copies to the device; the current stream waits for them, the host does not."""
        with torch.cuda.stream(self._side):
            for tensor in self._outputs:
                tensor.detach().copy_(self.twin(tensor), non_blocking=True)
                tensor.record_stream(self._side)
        torch.cuda.current_stream(self.device).wait_stream(self._side)


class StagedTicket:
    """A ticket whose results come back to the device when it is first waited for.

    Args:
        ticket: of the engine, started with ``hold``; it is released once the device has filled the twins.
    """

    def __init__(self, staged: Staged, group: Any, ticket: Any) -> None:
        self._staged: Staged | None = staged
        self._ticket = ticket
        _Waiter.get().queue.put((staged.filled, group, ticket))

    def wait(self, timeout_s: float | None = None) -> bool:
        """Like the engine's ticket; then the current stream waits for the copy to the device."""
        if not self._ticket.wait(timeout_s):
            return False
        staged, self._staged = self._staged, None
        if staged is not None:
            staged.copy_back()
        return True

    def done(self) -> bool:
        """Whether the operation has ended on the host."""
        return bool(self._ticket.done())

    def on_done(self, callback: Callable[[], object]) -> None:
        """Like the engine's ticket."""
        self._ticket.on_done(callback)


class _Waiter:
    """A thread that waits for devices: the caller goes on computing, the engine goes on communicating."""

    _instance: _Waiter | None = None
    _lock = threading.Lock()

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="penstock-staging", daemon=True).start()

    @classmethod
    def get(cls) -> _Waiter:
        with cls._lock:
            if cls._instance is None:
                cls._instance = cls()
            return cls._instance

    def _run(self) -> None:
        while True:
            event, group, ticket = self.queue.get()
            try:
                event.synchronize()
            except Exception as error:  # the device is lost; the operation must not hang
                group.abort(f"the CUDA device failed: {error}")
                continue
            group.release(ticket)


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    stream = _side_streams.get(device)
    if stream is None:
        stream = _side_streams[device] = torch.cuda.Stream(device)
    return stream


_side_streams: dict[torch.device, torch.cuda.Stream] = {}
