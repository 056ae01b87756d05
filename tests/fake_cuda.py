"""Stand-ins for the CUDA objects that staging uses, for machines without a GPU.

They run nothing later than it is called and know no device: with them the code around the device can be driven, the
bookkeeping and who waits for whom, but they prove nothing about the device itself. `tests/test_cuda.py` does that where
there is one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

DEVICE = torch.device("cuda", 0)


class Log:
    """What was done to streams and events, in order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.entries: list[tuple[Any, ...]] = []

    def add(self, *entry: Any) -> None:
        with self._lock:
            self.entries.append(entry)

    def index(self, *entry: Any) -> int:
        return self.entries.index(entry)


class Event:
    """An event that has come as soon as it is recorded, unless somebody holds it back."""

    def __init__(self, **_: Any) -> None:
        self.has_come = threading.Event()
        self.has_come.set()
        self.error: Exception | None = None

    def record(self, stream: Stream) -> None:
        log.add("record", stream, self)

    def query(self) -> bool:
        return self.has_come.is_set()

    def synchronize(self) -> None:
        assert self.has_come.wait(30)
        if self.error is not None:
            raise self.error


class Stream:
    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device
        self.capturing = False

    def wait_stream(self, other: Stream) -> None:
        log.add("wait_stream", self, other)

    def wait_event(self, event: Event) -> None:
        log.add("wait", self, event)


class Placed(torch.Tensor):
    """A CPU tensor that says that it lies on a device, and so do those that the backend makes of it."""

    # torch.distributed would switch subclasses off for the whole call.
    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: DEVICE)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def record_stream(self, stream: Stream) -> None:
        log.add("record_stream", self.data_ptr(), stream)

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name not in _MAKERS:
            return value
        return lambda *args, **kwargs: value(*args, **kwargs).as_subclass(Placed)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return super().__getitem__(index).as_subclass(Placed)

    def cpu(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def place(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone().as_subclass(Placed)


def install() -> None:
    """Put them where staging looks for them, for the rest of the process."""
    empty, cat = torch.empty_strided, torch.cat
    current.stream = Stream(DEVICE)
    torch.empty_strided = lambda *args, pin_memory=False, **kwargs: empty(*args, **kwargs)
    torch.cat = lambda tensors: cat(tensors).as_subclass(type(tensors[0]))
    torch.cuda.Event, torch.cuda.Stream = Event, Stream
    torch.cuda.current_stream = lambda device=None: _current()
    torch.cuda.stream = use
    torch.cuda.is_available = lambda: True
    torch.cuda.is_current_stream_capturing = lambda: _current().capturing
    torch.cuda.get_device_capability = lambda device=None: (0, 0)


@contextlib.contextmanager
def use(stream: Stream) -> Iterator[None]:
    """Make it this thread's current stream."""
    before, current.stream = _current(), stream
    try:
        log.add("enter", stream)
        yield
    finally:
        current.stream = before


@contextlib.contextmanager
def capture() -> Iterator[None]:
    """A stream that captures a graph, as `torch.cuda.graph` makes current."""
    stream = Stream(DEVICE)
    stream.capturing = True
    with use(stream):
        yield


def _current() -> Stream:
    if not hasattr(current, "stream"):
        current.stream = Stream(DEVICE)
    return current.stream


_MAKERS = {"new_empty", "detach", "clone", "view", "view_as", "reshape"}
current = threading.local()
log = Log()
