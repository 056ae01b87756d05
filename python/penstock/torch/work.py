"""What torch holds while an operation runs."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from penstock.errors import PenstockError
from penstock.torch.staging import StagedTicket

__all__ = ["Ticket", "Work"]


class Ticket(Protocol):
    """What a Work waits for: the engine's ticket, or one that stages CUDA tensors."""

    def wait(self, timeout_s: float | None = None) -> bool: ...
    def done(self) -> bool: ...
    def on_done(self, callback: Callable[[], object]) -> None: ...


class Expires(Protocol):
    """The engine's group."""

    def expire(self, waited_s: float) -> None: ...


class Work(dist.Work):
    """The pending result of one call to the backend.

    torch's C++ side forwards only `wait` and `get_future` of a Python Work. The future is made when it is asked for:
    DDP asks for one a bucket, everybody else waits, and making it costs more than a small operation.

    Torch 2.14 and newer hand out a Work of their own around this one, and that asks nobody for the rest: after a failure too its
    `is_success` is True, its `exception` None, `is_completed` False, and c10d's ``getError``, which is not bound, SUCCESS.
    Nothing here can mend that: the state behind them is private to C++, and Python may neither override nor set it. What
    `wait` raises and the future holds is the truth.

    Args:
        group: what the operation fails with when a caller waits no longer.
        tickets: what must have ended; empty means that there was nothing to do.
        outputs: the tensors that hold the result, in the form that DDP expects of a future.
        finish: called once, after the tickets and before anybody sees the result, on the thread that asks first:
            copies results to where the user wants them.
        source: the sending rank of a receive.
        parts: calls that this one stands for, with the same tickets.
    """

    def __init__(
        self,
        group: Expires,
        tickets: Sequence[Ticket],
        outputs: list[torch.Tensor],
        finish: Callable[[], object] | None = None,
        source: int = -1,
        parts: Sequence[Work] = (),
    ) -> None:
        super().__init__()
        self._group = group
        self.tickets = tickets
        self.outputs = outputs
        self._finish = finish
        self._lock = threading.RLock()
        self._ended: torch.futures.Future[None] | None = None
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None
        self._source = source
        self._parts = parts
        # After what `finish` has queued, on each device; other streams than the one that it ran on wait for them.
        self._copied: list[tuple[torch.device, Any]] = []

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the result is there, without the GIL; raise what the operation failed with.

        Args:
            timeout: how long to wait here; None or zero waits for the operation's own time-out. After it the group fails on
                all ranks: the operation must not touch tensors that its caller has given up waiting for.

        Raises:
            penstock.errors.PenstockError: the operation failed; its tensors are undefined and will not be touched.
        """
        if timeout and not self.settle(timeout.total_seconds()):
            self._group.expire(timeout.total_seconds())
        for ticket in self.tickets:
            ticket.wait()
        self._finished()
        self._complete_future()
        return True

    def settle(self, timeout_s: float) -> bool:
        """Block until the operation has ended, well or not, for so long at the most. Whether it has. It runs on."""
        until_s = time.monotonic() + timeout_s
        for ticket in self.tickets:
            with contextlib.suppress(PenstockError):
                if not ticket.wait(max(0.0, until_s - time.monotonic())):
                    return False
        return True

    def is_completed(self) -> bool:
        """Whether the operation has ended, well or not, and its result is there. Waits for no network and no device."""
        if not self._has_ended():
            return False
        return self.exception() is not None or self._has_arrived()

    def _has_ended(self) -> bool:
        return all(ticket.done() for ticket in self.tickets)

    def _has_arrived(self) -> bool:
        self._finished()
        staged = (ticket for ticket in self.tickets if isinstance(ticket, StagedTicket))
        return (
            all(ticket.arrived() for ticket in staged)
            and all(event.query() for _, event in self._copied)
            and all(part._has_arrived() for part in self._parts)
        )

    def is_success(self) -> bool:
        """Whether the operation has ended well. Does not block."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """What the operation failed with, if it has."""
        try:
            for ticket in self.tickets:
                ticket.wait(0)
        except Exception as error:
            return error
        return None

    def result(self) -> list[torch.Tensor]:
        """The output tensors, once waited for."""
        self.wait()
        return self.outputs

    def source_rank(self) -> int:
        """The sending rank of a receive."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of the output tensors.

        A failure must reach C++ as a real error. ``Future.set_exception`` stores a Python object that DDP's C++ code
        reads as tensors, and crashes; a callback of ``then`` that raises becomes a C++ error. So the base future only
        says "ended", and what is handed out is its ``then``.
        """
        with self._lock:
            if self._future is None:
                # A future that knows its devices makes its readers' streams wait for the copies back.
                self._ended = torch.futures.Future(devices=_cuda_devices(self.outputs) or None)
                self._future = self._ended.then(self._settle)
                for ticket in self.tickets:
                    ticket.on_done(self._complete_future)
        # C++ may read the value right after `wait`, before the engine's callback has run.
        self._complete_future()
        return self._future

    def _complete_future(self) -> None:
        """Complete the future, once, if everything has ended. Its readers' streams wait for devices by themselves."""
        if not self._has_ended():
            return
        with self._lock:
            ended, self._ended = self._ended, None
        if ended is not None:
            ended.set_result(None)

    def _settle(self, _: Any) -> list[torch.Tensor]:
        for ticket in self.tickets:
            ticket.wait()
        self._finished()
        return self.outputs

    def _finished(self) -> None:
        """See that the user's tensors have the result, as far as the current streams are concerned."""
        with self._lock:
            if self._finish is not None:
                self._finish()
                self._finish = None
                self._copied = [(device, _mark(device)) for device in _cuda_devices(self.outputs)]
        for device, event in self._copied:
            torch.cuda.current_stream(device).wait_event(event)
        for part in self._parts:
            part._finished()


def _cuda_devices(tensors: Sequence[torch.Tensor]) -> list[torch.device]:
    return list({tensor.device for tensor in tensors if tensor.is_cuda})


def _mark(device: torch.device) -> Any:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event
