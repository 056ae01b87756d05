"""What torch holds while an operation runs."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from penstock.errors import PenstockError
from penstock.torch.staging import StagedTicket

__all__ = ["Expires", "Ticket", "Work", "answer_for_wrappers"]


class Ticket(Protocol):
    """What a Work waits for: the engine's ticket, or one that stages CUDA tensors."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the operation has ended, or for ``timeout_s``: whether it has. Raises its failure."""

    def done(self) -> bool:
        """Whether the operation has ended, successfully or not."""

    def source(self) -> int | None:
        """The rank whose message a receive from any source takes, once it is known."""

    def on_done(self, callback: Callable[[], object]) -> None:
        """Call ``callback()`` once the operation has ended, on another thread."""


class Expires(Protocol):
    """The engine's group."""

    def expire(self, waited_s: float) -> None:
        """Fail the group on all ranks: a caller has waited for ``waited_s`` seconds, and waits no longer."""


class Work(dist.Work):
    """The pending result of one call to the backend.

    torch's C++ side forwards only `wait` and `get_future` of a Python Work. The future is made when it is asked for:
    DDP asks for one a bucket, everybody else waits, and making it costs more than a small operation.

    Torch 2.14 and newer hand out a Work of their own around this one, which answers the other questions by itself and wrongly;
    `answer_for_wrappers` mends that.

    Args:
        group: what the operation fails with when a caller waits no longer.
        tickets: what must have ended; empty means that there was nothing to do.
        outputs: the tensors that hold the result, in the form that DDP expects of a future.
        finish: called once, after the tickets and before anybody sees the result, on the thread that asks first:
            copies results to where the user wants them.
        source: the rank that a receive names.
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
        self._span: Any = None
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
        if timeout and not self.settle(max(0.0, timeout.total_seconds())):
            self._group.expire(timeout.total_seconds())
        failure: PenstockError | None = None
        for ticket in self.tickets:
            # The others may still run: nothing is raised before nothing touches a tensor of this call.
            try:
                ticket.wait()
            except PenstockError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        self._finished()
        self._complete_future()
        if self._span is not None:
            self._span.wait()
        for part in self._parts:
            if part._span is not None:
                part._span.wait()
        return True

    def end_span(self, span: Any) -> None:
        """Let a span of torch's profiler end with the operation, well or not. `wait` does not return before it has."""
        # Python can end a span on another thread only as a callback of a future; and only a span that ends on another thread
        # counts as asynchronous, also where the operation has ended by now. Callbacks of tickets have threads of their own.
        ended: torch.futures.Future[None] = torch.futures.Future()
        self._span = torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction(span, ended)

        def end() -> None:
            with self._lock:
                if self._has_ended() and not ended.done():
                    ended.set_result(None)

        for ticket in self.tickets:
            ticket.on_done(end)
        if not self.tickets:
            threading.Thread(target=end, name="penstock-span").start()

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
        """The sending rank of a receive, in its group; -1 as long as one from any source has no message."""
        found = self.tickets[0].source() if self._source < 0 and self.tickets else None
        return self._source if found is None else found

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of the output tensors.

        A failure must reach C++ as a real error. ``Future.set_exception`` stores a Python object that DDP's C++ code
        reads as tensors, and crashes; a callback of ``then`` that raises becomes a C++ error. So the base future only
        says "ended", and what is handed out is its ``then``.
        """
        if (asking := getattr(_asking, "found", None)) is not None:
            asking.append(self)
            return _NO_FUTURE
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
        # `get_future` comes here after it has made one.
        if self._ended is None or not self._has_ended():
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
        # Cleared last: without the lock, None means that nothing is left to do, and that `_copied` is complete.
        if self._finish is not None:
            with self._lock:
                if self._finish is not None:
                    self._finish()
                    self._copied = [(device, _mark(device)) for device in _cuda_devices(self.outputs)]
                    self._finish = None
        for device, event in self._copied:
            torch.cuda.current_stream(device).wait_event(event)
        for part in self._parts:
            part._finished()


def answer_for_wrappers() -> None:
    """Make the object that torch 2.14 and newer wrap around a `Work` answer as the `Work` does.

    The wrapper, ``PyProcessGroup::PyWorkHolder`` (torch/csrc/distributed/c10d/py/PyProcessGroup.hpp), forwards ``wait`` and
    ``getFuture`` alone. What else it is asked it answers from fields of its own that nobody sets: a loop of ``while not
    work.is_completed()`` would never end, a failure would count as success, and a receive would not know its source. Nothing
    that a backend can return changes that, a work that torch makes of a future neither: ``WORK_OVERRIDE`` wraps it as well.

    So the questions are asked of `Work` by replacing their methods in torch's class, from the first group of this backend on.
    Works of other backends answer as before: theirs know which operation they are, and the wrapper does not.
    """
    if hasattr(dist.Work, "_penstock_answers"):
        return
    for name in ("is_completed", "is_success", "exception", "result", "source_rank", "_source_rank"):
        setattr(dist.Work, name, _answering(name, getattr(dist.Work, name)))
    dist.Work._penstock_answers = True  # type: ignore[attr-defined]


def _answering(name: str, original: Any) -> Any:
    @functools.wraps(original)
    def answer(self: Any) -> Any:
        inner = _wrapped(self)
        return original(self) if inner is None else getattr(inner, name)()

    return answer


def _wrapped(work: Any) -> Work | None:
    """The `Work` that torch's object stands for, if it is one of ours."""
    if work._get_op_type() != _UNKNOWN:
        return None
    # The wrapper asks the `get_future` of what it stands for, on this thread.
    found: list[Work] = []
    _asking.found = found
    try:
        work.get_future()
    except RuntimeError:  # the work of another backend that has no futures
        return None
    finally:
        del _asking.found
    return found[0] if found else None


_asking = threading.local()
_NO_FUTURE: Any = torch.futures.Future()
"""What `get_future` returns to somebody who only wants to know whom it asks."""
_UNKNOWN = 100
"""c10d's OpType::UNKNOWN (torch/csrc/distributed/c10d/Work.hpp)."""


def _cuda_devices(tensors: Sequence[torch.Tensor]) -> list[torch.device]:
    return list({tensor.device for tensor in tensors if tensor.is_cuda})


def _mark(device: torch.device) -> Any:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event
