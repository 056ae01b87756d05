"""CUDA tensors: through pinned host memory, on streams of our own.

```text
  caller's stream   ...gradient ready ──┐
  way out                               └─ device → pinned ─ filled
  staging thread                                  filled.synchronize() ─ release
  engine                 takes its place in the order ─────────────────── runs ┐
  way back                                                        wait():      └─ pinned → device ─ returned
  caller's stream                                                 waits for the event `returned`, not the host
```
The operation takes its place in the group's order at the call, so that operations on CPU and CUDA tensors stay in the
same order on all ranks; the engine touches the pinned buffer only after `release`.

What keeps memory where it is, while copies that are queued may still use it:

- the user's tensors: `record_stream` on the stream of the copy, so that torch's allocator waits for it;
- the pinned twins: torch's cache of pinned memory notes every copy that does not block, and hands a block out again only
  after those; for the engine's own use it holds the storages (``keep``).

Streams and thread belong to one group: what one group waits for on the device must not hold up another, whose end the
first may be waiting for. Out and back are two streams, so that a result does not queue behind the next operation's input,
which is computed later.

Why not copy back as soon as the engine is done? It would need the GIL in the middle of the script's work for every
operation; whoever needs the result asks for it. DDP's futures do so at once.

Why pinned copies and not GPUDirect? It needs a network card and a driver that share memory with the GPU; ordinary
networks do not have them. NCCL is the better choice inside a host with several GPUs ("cpu:penstock,cuda:nccl").
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["Side", "Staged", "StagedTicket"]


class Side:
    """The streams and the thread that stage one group's operations on one device."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self.device = device
        self.out = torch.cuda.Stream(device)
        self.back = torch.cuda.Stream(device)
        self._group = group
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="penstock-staging", daemon=True).start()

    def release_when(self, filled: Any, ticket: Any) -> None:
        """Release an operation that was started with ``hold`` once the event has come. Does not block."""
        self._queue.put((filled, ticket))

    def close(self) -> None:
        """End the thread, after what it still waits for. Does not block."""
        self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            filled, ticket = item
            try:
                filled.synchronize()
            except Exception as error:  # the device is lost; the operation must not hang
                self._group.abort(f"the CUDA device failed: {error}")
                continue
            self._group.release(ticket)


class Staged:
    """Host twins of the CUDA tensors of one operation.

    Args:
        inputs: tensors that are read; their twins are filled before the engine starts.
        outputs: tensors that are written; their twins are copied back after it has ended. A tensor in both lists has
            one twin.
    """

    def __init__(self, side: Side, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        self.side = side
        self._outputs = outputs
        self._twins: dict[int, torch.Tensor] = {}
        self._lock = threading.Lock()
        self._returned: Any = None
        # The thread that waits for it sleeps: spinning would take a core from the engine.
        self.filled = torch.cuda.Event(blocking=True)
        # What the caller has queued so far comes first: the gradient's computation, and the last use of the outputs.
        side.out.wait_stream(torch.cuda.current_stream(side.device))
        with torch.inference_mode(), torch.cuda.stream(side.out):
            for tensor in inputs:
                self.twin(tensor).copy_(tensor, non_blocking=True)
                tensor.record_stream(side.out)
        self.filled.record(side.out)

    def twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """The pinned host tensor that stands in for ``tensor``."""
        found = self._twins.get(id(tensor))
        if found is None:
            with torch.inference_mode():
                # Dense tensors lie in it as on the device: what the engine sees is the same memory.
                found = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu", pin_memory=True
                )
            self._twins[id(tensor)] = found
        return found

    def returned(self) -> Any:
        """Queue the copies to the device, once; the event that follows them. The engine must be done with the twins.

        Any thread may call it, with any current stream; neither it nor the host waits for the copies.
        """
        with self._lock:
            if self._returned is None:
                returned = torch.cuda.Event()
                self.side.back.wait_event(self.filled)
                # torch must take the copies neither for operations of a graph nor for changes that a backward pass has
                # to complain of: a tensor on the CPU changes unseen too. In this mode nothing is recorded, and `data`
                # has a version of its own.
                with torch.inference_mode(), torch.cuda.stream(self.side.back):
                    for tensor in self._outputs:
                        tensor.data.copy_(self.twin(tensor), non_blocking=True)
                        tensor.record_stream(self.side.back)
                returned.record(self.side.back)
                self._returned = returned
                # A Work may live much longer than pinned memory should be kept.
                self._outputs = ()
                self._twins.clear()
            return self._returned


class StagedTicket:
    """A ticket whose results come back to the device when somebody asks for them.

    Args:
        ticket: of the engine, started with ``hold``; it is released once the device has filled the twins.
    """

    def __init__(self, staged: Staged, ticket: Any) -> None:
        self._staged = staged
        self._ticket = ticket
        staged.side.release_when(staged.filled, ticket)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Like the engine's ticket; then the current stream waits for the copy to the device. Any number of threads
        and streams may wait, each for itself."""
        if not self._ticket.wait(timeout_s):
            return False
        torch.cuda.current_stream(self._staged.side.device).wait_event(self._staged.returned())
        return True

    def done(self) -> bool:
        """Whether the operation has ended on the host."""
        return bool(self._ticket.done())

    def source(self) -> int | None:
        """Like the engine's ticket."""
        found: int | None = self._ticket.source()
        return found

    def arrived(self) -> bool:
        """Whether its result is on the device; the operation must have ended well. Does not block."""
        return bool(self._staged.returned().query())

    def on_done(self, callback: Any) -> None:
        """Like the engine's ticket."""
        self._ticket.on_done(callback)
