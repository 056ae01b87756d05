"""How agreed operations are executed: fused, scaled, and started on the process set's group.

Every function here runs on the controller's thread of every rank of the set, in the same order and with the same arguments
but for the tensors: what it starts, it starts everywhere. What depends on the tensors' size is read from requests, so that a
rank that has joined, and has no tensors, does the same with zeros.

Nothing here waits for the network, but for Adasum and for the splits of an all-to-all.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from penstock import _core
from penstock.fronts.horovod import adasum
from penstock.fronts.horovod.group import Group
from penstock.fronts.horovod.negotiation import Agreed, Kind, Op, Request
from penstock.runtime import urgency

__all__ = ["Entry", "Flight", "Result", "start"]


class Result:
    """What an operation ends with; one a tensor."""

    def __init__(self) -> None:
        self._known = threading.Event()
        self._flight: Flight | None = None
        self._error: BaseException | None = None
        self._seen: Callable[[], None] | None = None

    def on_seen(self, callback: Callable[[], None]) -> None:
        """Call back once, when a caller has waited for the result."""
        self._seen = callback

    def done(self) -> bool:
        """Whether `wait` would not block."""
        return self._known.is_set() and (self._flight is None or self._flight.done())

    def wait(self) -> None:
        """Block until the output is there; raise what the operation failed with."""
        self._known.wait()
        if self._error is not None:
            # Several results share the error. One that was raised would keep the frames of whoever caught it.
            raise copy.copy(self._error) from self._error
        if self._flight is not None:
            self._flight.wait()
        seen, self._seen = self._seen, None
        if seen is not None:
            seen()

    def failure(self) -> BaseException | None:
        """What it has failed with, if it has ended and has failed."""
        if self._error is not None or self._flight is None:
            return self._error
        return self._flight.failure() if self.done() else None

    def started(self, flight: Flight | None) -> None:
        self._flight = flight
        self._known.set()

    def failed(self, error: BaseException) -> None:
        """Nothing happens if it has started: its flight knows better."""
        if not self._known.is_set():
            self._error = error
            self._known.set()


@dataclass
class Entry:
    """What one rank has put forward under a name."""

    name: str
    request: Request
    tensor: torch.Tensor | None = None
    output: torch.Tensor | None = None
    """Resized where its size is the others' affair."""
    splits: list[int] | None = None
    """Of an all-to-all: rows for each rank."""
    received_splits: torch.Tensor | None = None
    ready: Any = None
    """After what has made a CUDA tensor, on the stream of the caller."""
    result: Result = field(default_factory=Result)
    submitted_s: float = 0.0
    """time.monotonic() at its submission."""
    urgent: urgency.Urgency | None = field(default_factory=urgency.current)
    """The block of `penstock.priority` that it was made in."""

    def __post_init__(self) -> None:
        if self.urgent is not None:
            self.request = replace(self.request, priority=self.urgent.number)


class Flight:
    """Operations that have started together, and what is to be done when they have ended.

    ``finish`` runs once, on the thread that asks first: mostly one that waits for the result anyway.
    """

    def __init__(self, works: Sequence[Any], finish: Callable[[], None] | None = None) -> None:
        self._works = list(works)
        self._finish = finish
        self._unfinished: BaseException | None = None
        self._lock = threading.Lock()

    def done(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def settle(self, timeout_s: float) -> None:
        """Wait until all operations have ended, successfully or not, or for ``timeout_s``."""
        until_s = time.monotonic() + timeout_s
        for work in self._works:
            work.settle(max(0.0, until_s - time.monotonic()))

    def failure(self) -> BaseException | None:
        """What one of its operations has failed with; all have ended."""
        for work in self._works:
            try:
                work.wait()
            except RuntimeError as error:
                # What the caller is in the middle of is not its reason.
                error.__context__ = error.__traceback__ = None
                return error
        return self._unfinished

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        with self._lock:
            if self._unfinished is not None:
                raise self._unfinished
            finish, self._finish = self._finish, None
            if finish is not None:
                try:
                    finish()
                except BaseException as error:
                    # Outputs are half done, and cannot be done again.
                    self._unfinished = error
                    raise


def start(
    agreed: Sequence[Agreed], entries: Sequence[Entry | None], group: Group, threshold_bytes: int
) -> list[Flight]:
    """Start what a round has agreed on; ``entries`` are this rank's, None where it has joined. Where one cannot be started, all
    that has not started fails: nobody else knows of these entries any more."""
    flights = []
    try:
        for bucket in fuse([one.request for one in agreed], threshold_bytes):
            own = [entries[index] for index in bucket]
            for entry in own:
                if entry is not None and entry.ready is not None:
                    torch.cuda.current_stream(entry.ready[0]).wait_event(entry.ready[1])
            with _inference(), urgency.within(_urgency(agreed[bucket[0]].request, own)):
                flight = _START[agreed[bucket[0]].request.kind]([agreed[index] for index in bucket], own, group)
            for entry in own:
                if entry is not None:
                    entry.result.started(flight)
            if flight is not None:
                flights.append(flight)
    except BaseException as error:
        for entry in entries:
            if entry is not None:
                entry.result.failed(error)
        raise
    return flights


def fuse(requests: Sequence[Request], threshold_bytes: int) -> list[list[int]]:
    """Which operations go together, by their index: all-reduces that reduce alike and are as urgent, up to ``threshold_bytes``
    a bucket.
    Buckets are in the order of their first operation."""
    # Only one operation is of a class of its own.
    classes: dict[Request | int, int] = {}
    entries = []
    for index, request in enumerate(requests):
        alike = replace(request, shape=(), root=0)
        key = alike if request.kind is Kind.ALLREDUCE else index
        entries.append((request.elements * dtype_of(request).itemsize, classes.setdefault(key, len(classes))))
    return _core.merge(entries, threshold_bytes)


def _urgency(request: Request, entries: Sequence[Entry | None]) -> urgency.Urgency | None:
    """The block of this rank's that is obeyed; what a rank submitted elsewhere is as urgent as usual. A rank that has joined
    takes the priority of the others."""
    numbers = [(entry.request.priority, entry.urgent) for entry in entries if entry is not None]
    if not numbers:
        return urgency.Urgency(request.priority)
    return min(numbers, key=lambda one: one[0])[1]


# ---------------------------------------------------------------------------------------------------- one kind each


def _all_reduce(agreed: list[Agreed], own: list[Entry | None], group: Group) -> Flight:
    request = agreed[0].request
    inputs = [_input(one, entry) for one, entry in zip(agreed, own, strict=True)]
    if request.prescale != 1.0:
        inputs = [scaled(tensor, request.prescale) for tensor in inputs]
    entry = own[0]
    outputs = [entry.output if entry is not None else None for entry in own]
    if len(inputs) > 1:
        whole = torch.cat([tensor.reshape(-1) for tensor in inputs])
    elif entry is None or entry.output is None:
        whole = inputs[0]
    else:
        whole = entry.output.detach()
        if whole.data_ptr() != inputs[0].data_ptr():
            whole.copy_(inputs[0])
    op, factor, divisor = _reduction(request, group.size)
    work = group.all_reduce(whole, op)

    def finish() -> None:
        with _inference():
            _rescale(whole, factor, divisor)
            if len(inputs) > 1:
                at = 0
                for tensor, output in zip(inputs, outputs, strict=True):
                    if output is not None:
                        output.detach().copy_(whole[at : at + tensor.numel()].view_as(output))
                    at += tensor.numel()

    return Flight([work], finish)


def _adasum(agreed: list[Agreed], own: list[Entry | None], group: Group) -> Flight:
    (one,), (entry,) = agreed, own
    tensor = _input(one, entry)
    if one.request.prescale != 1.0:
        tensor = scaled(tensor, one.request.prescale)
    reduced = adasum.reduce(tensor, group)
    if one.request.postscale != 1.0:
        reduced = scaled(reduced, one.request.postscale)
    if entry is not None and entry.output is not None:
        entry.output.detach().copy_(reduced.view_as(entry.output))
    return Flight([])


def _all_gather(agreed: list[Agreed], own: list[Entry | None], group: Group) -> Flight:
    (one,), (entry,) = agreed, own
    assert entry is not None and entry.tensor is not None and entry.output is not None
    tensor, output = entry.tensor.detach(), entry.output
    rows = [request.shape[0] for request in one.requests if request is not None]
    output.resize_(sum(rows), *tensor.shape[1:])
    if len(set(rows)) == 1:
        return Flight([group.all_gather(output, tensor)])
    parts = list(output.split(rows))
    parts[group.rank].copy_(tensor)
    works = [group.broadcast(part, rank) for rank, part in enumerate(parts) if part.numel()]
    return Flight(works)


def _broadcast(agreed: list[Agreed], own: list[Entry | None], group: Group) -> Flight:
    (one,), (entry,) = agreed, own
    assert entry is not None and entry.tensor is not None and entry.output is not None
    tensor, output = entry.tensor.detach(), entry.output.detach()
    if group.rank == one.request.root and output.data_ptr() != tensor.data_ptr():
        output.copy_(tensor)
    return Flight([group.broadcast(output, one.request.root)])


def _all_to_all(agreed: list[Agreed], own: list[Entry | None], group: Group) -> Flight:
    (entry,) = own
    assert entry is not None and entry.tensor is not None and entry.output is not None
    assert entry.splits is not None and entry.received_splits is not None
    tensor, output = entry.tensor.detach(), entry.output
    received = torch.empty(group.size, dtype=torch.int64)
    once_each = [1] * group.size
    group.all_to_all(received, torch.tensor(entry.splits), once_each, once_each).wait()
    entry.received_splits.resize_(group.size).copy_(received)
    rows = received.tolist()
    output.resize_(sum(rows), *tensor.shape[1:])
    work = group.all_to_all(output, tensor[: sum(entry.splits)], rows, entry.splits)
    return Flight([work])


def _barrier(agreed: list[Agreed], own: list[Entry | None], group: Group) -> None:
    # That all ranks have it is all that a barrier means.
    return None


def _reduce_scatter(agreed: list[Agreed], own: list[Entry | None], group: Group) -> Flight:
    (one,), (entry,) = agreed, own
    assert entry is not None and entry.tensor is not None and entry.output is not None
    tensor, output = entry.tensor.detach(), entry.output
    if one.request.prescale != 1.0:
        tensor = scaled(tensor, one.request.prescale)
    op, factor, divisor = _reduction(one.request, group.size)
    rows = shares(tensor.shape[0], group.size)
    output.resize_(rows[group.rank], *tensor.shape[1:])
    work = group.reduce_scatter(output, tensor.split(rows), op)

    def finish() -> None:
        with _inference():
            _rescale(output, factor, divisor)

    return Flight([work], finish)


# ---------------------------------------------------------------------------------------------------- helpers


def _inference() -> Any:
    """The mode in which tensors of callers are changed: only it may change those of a caller in ``torch.inference_mode()``, and
    it may change all others. The controller's thread does not inherit a caller's mode. Tensors that are made in it are not
    handed out."""
    return torch.inference_mode()


def shares(rows: int, world: int) -> list[int]:
    """How a reduce-scatter shares the rows: the first ranks get one more where they cannot share equally."""
    return [rows // world + (rank < rows % world) for rank in range(world)]


def dtype_of(request: Request) -> torch.dtype:
    return getattr(torch, request.dtype)


def scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """A scaled copy: halves are computed in float32, integers in float64 and cut off, as Horovod does."""
    if tensor.dtype in (torch.float16, torch.bfloat16):
        return (tensor.float() * factor).to(tensor.dtype)
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor * factor
    return (tensor.double() * factor).to(tensor.dtype)


def _input(agreed: Agreed, entry: Entry | None) -> torch.Tensor:
    if entry is not None and entry.tensor is not None:
        return entry.tensor.detach()
    return torch.zeros(agreed.request.shape, dtype=dtype_of(agreed.request))


def _reduction(request: Request, world: int) -> tuple[Any, float, int]:
    """torch's operation, and what remains to be done with its result: a factor and a divisor."""
    if request.op is not Op.AVERAGE:
        return _TORCH_OPS[request.op], request.postscale, 1
    if request.postscale == 1.0 and dtype_of(request).is_floating_point:
        return dist.ReduceOp.AVG, 1.0, 1
    return dist.ReduceOp.SUM, request.postscale, world


def _rescale(tensor: torch.Tensor, factor: float, divisor: int) -> None:
    if tensor.is_floating_point():
        if factor != 1.0 or divisor != 1:
            tensor.copy_(scaled(tensor, factor / divisor))
    else:
        if factor != 1.0:
            tensor.copy_(scaled(tensor, factor))
        if divisor != 1:
            # Horovod multiplies with 1 / size and cuts off; a division is the same where that is exact, and right elsewhere.
            tensor.div_(divisor, rounding_mode="trunc")


_TORCH_OPS = {
    Op.SUM: dist.ReduceOp.SUM,
    Op.MIN: dist.ReduceOp.MIN,
    Op.MAX: dist.ReduceOp.MAX,
    Op.PRODUCT: dist.ReduceOp.PRODUCT,
}
_START: dict[Kind, Callable[[list[Agreed], list[Entry | None], Group], Flight | None]] = {
    Kind.ALLREDUCE: _all_reduce,
    Kind.ADASUM: _adasum,
    Kind.ALLGATHER: _all_gather,
    Kind.BROADCAST: _broadcast,
    Kind.ALLTOALL: _all_to_all,
    Kind.BARRIER: _barrier,
    Kind.REDUCESCATTER: _reduce_scatter,
}
