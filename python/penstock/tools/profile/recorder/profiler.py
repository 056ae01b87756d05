"""torch's profiler: ours, for one sample, and the script's own. There can be one at a time, and the script's goes first."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._C._profiler import RecordScope
from torch.autograd import profiler, profiler_legacy
from torch.profiler import ExecutionTraceObserver, ProfilerActivity

__all__ = ["Profiler", "goes_on", "is_used_by_script", "patch", "skip_destructors"]

_MOST_DRIFT_NS = 1_000_000
_MARK = "penstock.profile"
_MARKS = 3
"""At each end of a sample. The narrowest tells the difference of the clocks best."""


class Profiler:
    """Runs from its making until `stop`, on the thread that made it.

    A stop frees the memory in which operations note their ends, also those that end later. `pause` is harmless at any time.
    """

    has_run = False
    """Any, in this process or in one that it is a fork of."""
    _deaf: threading.Thread | None = None
    """The thread of one that is to see no spans of the script: while one goes on that it has seen begin, no other may run."""

    def __init__(self, *, shapes: bool = False, operators: bool = True) -> None:
        """
        Args:
            shapes: record the sizes of what operators get.
            operators: record them, and not only what backends and `record_function` tell.
        """
        # To ask for CUDA must not start it. What stops the profiler waits for the device first.
        self._device = "cuda" if operators and torch.cuda.is_initialized() else None
        self.thread = threading.current_thread()
        self._own = profiler.profile(use_kineto=True, record_shapes=shapes, use_device=self._device)
        self.is_paused = False
        self.paused_steps = self.try_at = 0
        """Steps that have ended since, and how many have to before whoever made it tries to stop it again."""
        _ours.add(self._own)
        Profiler.has_run = True
        with contextlib.nullcontext() if operators else _without_operators():
            self._own.__enter__()
        try:
            self._began = _marks()
            Profiler._deaf = None if operators else self.thread
        except BaseException:  # a signal's handler raised
            self._own.__exit__(None, None, None)
            raise
        self._ended: list[tuple[int, int]] = []

    @property
    def has_device(self) -> bool:
        return self._device is not None

    def step_ended(self) -> None:
        """The sampled one: what begins from here on is none of the sample."""
        Profiler._deaf = None
        self._ended = _marks()
        self.pause()

    def pause(self) -> None:
        """See nothing that begins from here on."""
        if not self.is_paused:
            self.is_paused, Profiler._deaf = True, None
            torch.autograd._enable_record_function(False)
            if self._device is not None:
                self._own.toggle_collection_dynamic(False, [ProfilerActivity.CUDA])

    def stop(self) -> None:
        """Nothing may be in flight that began while the profiler ran and was not paused."""
        if self.is_paused:
            torch.autograd._enable_record_function(True)
        self._own.__exit__(None, None, None)

    def drop(self) -> None:
        """Stop in a fork, where nothing is in flight, and the device cannot be asked."""
        Profiler._deaf = None
        profiler._is_profiler_enabled = False  # also where stopping fails, on another thread than the profiler's
        self._own.use_device = None
        self._own.__exit__(None, None, None)
        # Not where that has failed: it would see the child's operators, and keep them.
        torch.autograd._enable_record_function(True)

    def events(self) -> Sequence[Any]:
        """Kineto's. After `stop`."""
        found: Sequence[Any] = self._own.kineto_results.events()
        return found

    def clock(self, events: Sequence[Any]) -> tuple[Callable[[int], int] | None, int | None]:
        """From the profiler's time to the monotonic clock, None if one of them has jumped; and its number of this thread."""
        times, thread = _times(events)
        return _clock(times, self._began, self._ended), thread


@contextlib.contextmanager
def _without_operators() -> Iterator[None]:
    """A profiler that starts here sees the user's scope alone, in which operations of backends are: these cost 5 to 10 us each,
    and operators nothing. torch's class has no argument for that."""
    original: Any = profiler._enable_profiler
    setattr(profiler, "_enable_profiler", lambda *args: original(*args, {RecordScope.USER_SCOPE}))  # noqa: B010
    try:
        yield
    finally:
        setattr(profiler, "_enable_profiler", original)  # noqa: B010


def skip_destructors() -> None:
    """Let this process end without the destructors of C++, with its exit code, and what the C library has buffered written.

    For a process whose profiler cannot stop: the destructor of one that runs still uses memory that is free by then, and the
    process dies of it. And for a fork of a process that had one: a thread of Kineto's, which forks do not have, never answers.
    """
    with contextlib.suppress(OSError, AttributeError):  # no glibc
        library = ctypes.CDLL(None)
        # The last that is registered is called first. `_exit` gets the exit code, `fflush` a null pointer: all files.
        library.on_exit(library._exit, None)
        library.__cxa_atexit(library.fflush, None, None)


def _marks() -> list[tuple[int, int]]:
    return [_mark() for _ in range(_MARKS)]


def _mark() -> tuple[int, int]:
    before_ns = time.monotonic_ns()
    with profiler.record_function(_MARK):
        pass
    return before_ns, time.monotonic_ns()


def _times(events: Sequence[Any]) -> tuple[list[int], int | None]:
    """When the profiler saw the marks, by its clock, and what number it gives this thread."""
    marks = [event for event in events if event.name() == _MARK]
    return sorted(mark.start_ns() for mark in marks), marks[0].start_thread_id() if marks else None


def _clock(
    times: Sequence[int], began: Sequence[tuple[int, int]], ended: Sequence[tuple[int, int]]
) -> Callable[[int], int] | None:
    """From the profiler's time to the monotonic clock; None if one of the two has jumped."""
    if len(times) != len(began) + len(ended):
        return None
    first, last = _difference(times[: len(began)], began), _difference(times[len(began) :], ended)
    length = max(1, last[0] - first[0])
    if abs(last[1] - first[1]) > _MOST_DRIFT_NS + length // 1000:
        return None
    return lambda at_ns: at_ns - first[1] - (last[1] - first[1]) * (at_ns - first[0]) // length


def _difference(times: Sequence[int], marks: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The profiler's time at one mark, and by how much it is ahead of the monotonic clock."""
    at, (before_ns, _) = min(zip(times, marks, strict=True), key=lambda pair: pair[1][1] - pair[1][0])
    return at, at - before_ns


# ------------------------------------------------------------------------------------------- the script's own profiler

_ours: weakref.WeakSet[Any] = weakref.WeakSet()
_scripts: weakref.WeakSet[Any] = weakref.WeakSet()
_spans: weakref.WeakSet[Any] = weakref.WeakSet()
"""Those of `record_function` that began under a profiler and go on."""


def is_used_by_script() -> bool:
    """Also before it starts, and while it only warms up. To be asked while ours does not run."""
    return bool(_scripts) or profiler._is_profiler_enabled or bool(torch.autograd._profiler_enabled())


def goes_on() -> bool:
    """Whether a `record_function` of the script does that began in a sample. It notes its end in the memory of the profiler under
    which it began, if any profiler runs then."""
    return bool(_spans)


def patch(running: Callable[[], Iterator[Callable[[], None]]]) -> None:
    """Let a profiler of the script end the sample that runs.

    Args:
        running: gives what ends the sample of this process, if one runs.
    """
    for kind, begins, ends in (
        (profiler.profile, "_prepare_trace", "__exit__"),
        (profiler_legacy.profile, "_start_trace", "__exit__"),
        (profiler.emit_nvtx, "__enter__", "__exit__"),
        (profiler.emit_itt, "__enter__", "__exit__"),
        # Another one may run beside it. But a pause of ours would be one of its, too.
        (ExecutionTraceObserver, "start", "stop"),
    ):
        _patch_kind(kind, begins, ends, running)
    enter_span, leave_span = profiler.record_function.__enter__, profiler.record_function.__exit__

    # Wrapped, so that TorchScript finds the sources of what it compiles.
    @functools.wraps(enter_span)
    def enter(self: Any) -> Any:
        if Profiler._deaf is not None and Profiler._deaf is threading.current_thread():
            torch.autograd._enable_record_function(False)
            try:
                return enter_span(self)
            finally:
                torch.autograd._enable_record_function(True)
        entered = enter_span(self)
        if profiler._is_profiler_enabled:
            _spans.add(self)
        return entered

    @functools.wraps(leave_span)
    def leave_with(self: Any, *args: Any) -> Any:
        _spans.discard(self)
        return leave_span(self, *args)

    profiler.record_function.__enter__ = enter
    profiler.record_function.__exit__ = leave_with


def _patch_kind(kind: Any, begins: str, ends: str, running: Callable[[], Iterator[Callable[[], None]]]) -> None:
    begin, leave = getattr(kind, begins), getattr(kind, ends)

    @functools.wraps(begin)
    def begin_ours(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self not in _ours and getattr(self, "enabled", True):
            _scripts.add(self)
            for yields in running():
                yields()
        return begin(self, *args, **kwargs)

    @functools.wraps(leave)
    def leave_ours(self: Any, *args: Any, **kwargs: Any) -> Any:
        _scripts.discard(self)
        return leave(self, *args, **kwargs)

    setattr(kind, begins, begin_ours)
    setattr(kind, ends, leave_ours)
