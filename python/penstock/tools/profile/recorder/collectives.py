"""Calls of torch.distributed: which wait, for what, in which group and for what purpose."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
import types
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.distributed as dist

from penstock.profiling import purposes
from penstock.profiling.matching import canonical
from penstock.tools.profile.recorder.journal import Journal
from penstock.tools.profile.recorder.kineto import Call
from penstock.tools.profile.recorder.settling import InFlight

__all__ = ["ALIKE", "Calls", "patch", "patch_functional", "rebind"]

_METHODS = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "gather", "scatter", "barrier", "send", "recv"),
    *("allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced", "all_gather_single"),
    *("all_gather_single_coalesced", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced", "alltoall", "alltoall_base", "all_to_all_single"),
    *("gather_single", "gather_into_tensor", "recv_anysource", "monitored_barrier"),
)
"""Of ``ProcessGroup``, as far as this torch has them: what functions of torch.distributed call, whoever calls those."""


ALIKE = ("all_reduce", "all_gather", "broadcast", "reduce", "reduce_scatter", "gather", "scatter")
"""What is empty on one rank of these is so on all: backends end it at once, whoever has not come."""

_MOST = 100_000
"""Calls that are kept of a step."""
_BLOCKING = "torch.distributed.distributed_c10d"
"""Whose functions wait for what they have just issued, unless they are asked for its work; but for `_CoalescingManager.wait`."""


class Recording(Protocol):
    """As in `recording`, as far as a call needs it."""

    calls: Calls
    marks: Journal
    phase: str

    def passed(self, now_ns: int) -> None:
        """Some time has, in which no step may have ended."""


class Calls:
    """The calls of a rank's process groups in this step, and what is known of its groups."""

    def __init__(self) -> None:
        self.log: list[Call] | None = None
        """Those of a sample. None outside."""
        self.in_flight = InFlight()
        """Of what was issued while `is_profiled`."""
        self.is_profiled = False
        """Whether torch's profiler runs, and sees what is issued."""
        self.hints: list[Call] = []
        """Groups that functional collectives looked up in a sample."""
        self.last: Call | None = None
        self.is_batching = False
        self.is_waiting = self.is_issuing = False
        self.reductions: Callable[[int], list[Call]] = lambda start_ns: []
        """What Penstock's own reducers have sent since then (`engine.Memory`)."""
        self._works: dict[int, Call] = {}
        self._receives: list[Call] = []

    def describe(self, group: Any, operation: str, phase: str, is_within: bool) -> Call:
        """A call that begins now, as for `purposes.of_operation`."""
        name, purpose = _label(group)
        if operation == "send":
            purpose = "pipeline send"
        elif operation != "recv":
            purpose = purpose or purposes.of_operation(operation, phase, is_within=is_within)
        return Call(operation, name, time.monotonic_ns(), ranks=group.size(), purpose=purpose)

    def looked_up(self, group: Any) -> None:
        """By a functional collective."""
        name, purpose = _label(group)
        self.hints.append(Call("", name, time.monotonic_ns(), ranks=group.size(), purpose=purpose))

    def batched(self, work: Any) -> None:
        """The work of several calls at once."""
        if self.last is not None:
            self._works[id(work)] = replace(self.last)
        if self.is_profiled:
            self.in_flight.add(work)

    def issued(self, call: Call, work: Any) -> None:
        call.end_ns = time.monotonic_ns()
        call.is_batched = self.is_batching
        self.last = call
        # A step that never ends must not fill the memory.
        if len(self._works) >= _MOST:
            self._works.clear()
        if work is not None:
            self._works[id(work)] = call
            if self.is_profiled:
                self.in_flight.add(work)
        if call.operation == "recv" and len(self._receives) < _MOST:
            self._receives.append(call)
        if self.log is not None and len(self.log) < _MOST:
            self.log.append(call)

    def waited(self, work: Any) -> Call | None:
        return self._works.pop(id(work), None)

    def comes(self, phase: str) -> None:
        """What was received before a forward or a backward pass is for that."""
        if self._receives:
            for call in self._receives:
                call.purpose = f"pipeline {phase} recv"
            self._receives.clear()

    def start(self, *, keep: bool) -> None:
        """The profiler starts.

        Args:
            keep: the calls, for a sample.
        """
        self.is_profiled = True
        self.log, self.hints = [] if keep else None, []

    def stop(self) -> tuple[list[Call], list[Call]]:
        """Calls, and looked up groups."""
        found = self.log or [], self.hints
        self.log, self.hints, self.is_profiled = None, [], False
        self.in_flight.pause()
        return found

    def step_ended(self) -> None:
        if self.is_profiled:
            self.in_flight.prune()
        self._works.clear()
        self.last = None
        self.is_batching = False  # the end of a batch that raised is not told

    @staticmethod
    def reducers() -> Call | None:
        """What DDP's own operations are. Of several that are alive, the last that was built is the model most often."""
        for reference in reversed(_reducers):
            group = getattr(reference(), "process_group", None)
            if group is not None:
                name, _ = _label(group)
                return Call("", name, 0, ranks=group.size(), purpose="data-parallel sync")
        return None

    @staticmethod
    def sums_in_passes() -> bool:
        """Whether a DDP may launch sums in a backward pass."""
        models = [reference() for reference in _reducers]
        return any(getattr(model, "require_backward_grad_sync", False) for model in models)

    @staticmethod
    def label(name: str) -> tuple[str, Sequence[int]]:
        """Of a group, from torch's name: its name in records, and its ranks in the job, in order; none if it is gone."""
        for group, given in list(dist.distributed_c10d._world.pg_names.items()):  # asked by another thread, too
            if given == name:
                return _label(group)[0], tuple(dist.distributed_c10d._world.pg_group_ranks.get(group, ()))
        return name, ()

    @staticmethod
    def default() -> Call:
        if not dist.is_initialized():
            return Call("", "", 0)
        group = dist.group.WORLD
        return Call("", _label(group)[0], 0, ranks=group.size())


def _label(group: Any) -> tuple[str, str]:
    """A name that is the same on all ranks of the group and another one for each other group, and its purpose by its name."""
    description, name = _attribute(group, "group_desc"), _attribute(group, "group_name")
    if description in ("default_pg", "undefined"):
        description = ""
    if name in ("0", "default_pg") and not description:
        return "default", ""
    return f"{description}:{name}" if description else name, purposes.of_group(description or name)


def _attribute(group: Any, name: str) -> str:
    try:
        return str(getattr(group, name, "") or "")
    except RuntimeError:  # a group of no backend has no name
        return ""


def patch(active: Callable[[], Recording | None], joined: Callable[[int, int, str], None]) -> None:
    """Let torch.distributed tell of its calls."""
    for name in _METHODS:
        method = getattr(dist.ProcessGroup, name, None)
        if method is not None:
            setattr(dist.ProcessGroup, name, _issuing(method, name, active))
    _patch_batches(dist.ProcessGroup, active)
    _patch_groups(active)
    _patch_wait(dist.Work, active)
    _patch_wait(torch.futures.Future, active)
    _patch_init(joined)
    _patch_ddp()
    _patch_buffers(active)


def rebind(name: str, original: Any, changed: Any) -> None:
    """Wherever torch.distributed has a function by that name: parts of it have imported others' by name."""
    for key, module in list(sys.modules.items()):
        if key.startswith("torch.distributed") and getattr(module, "__dict__", {}).get(name) is original:
            setattr(module, name, changed)


def _issuing(method: Any, name: str, active: Callable[[], Recording | None]) -> Any:
    operation, blocks = canonical(name), name == "monitored_barrier"

    @functools.wraps(method)
    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        recording = active()
        if recording is None or recording.calls.is_issuing:
            return method(group, *args, **kwargs)
        calls = recording.calls
        known = calls.describe(group, operation, recording.phase, recording.marks.is_in("backward"))
        if calls.log is not None:
            known.bytes = _length(args, operation)
            known.is_empty = operation in ALIKE and _is_empty(args[:2])
            if operation == "reduce_scatter":
                known.parts = _parts(group, args, name)
            if name in ("send", "recv"):
                known.peer, known.tag = _peer(group, args, kwargs), _tag(args, kwargs)
        work = None
        try:
            calls.is_issuing = True
            work = method(group, *args, **kwargs)
        finally:
            calls.is_issuing = False
            calls.issued(known, work)
            recording.passed(known.end_ns)
            if blocks:
                known.waited_ns = known.end_ns
                recording.marks.wait(known.start_ns, known.end_ns, operation, known.group)
        _patch_wait(type(work), active)
        return work

    return call


_groups: set[type] = set()


def _patch_groups(active: Callable[[], Recording | None]) -> None:
    """Up to torch 2.13 a backend in Python is the group itself, of a class with methods of its own."""
    c10d = dist.distributed_c10d
    original = c10d._new_process_group_helper

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        kind = type(made[0] if isinstance(made, tuple) else made)
        if kind not in _groups and issubclass(kind, dist.ProcessGroup) and kind is not dist.ProcessGroup:
            _groups.add(kind)
            own = {name for each in kind.__mro__ if each not in dist.ProcessGroup.__mro__ for name in vars(each)}
            for name in own.intersection(_METHODS):
                setattr(kind, name, _issuing(getattr(kind, name), name, active))
            if "_start_coalescing" in own:
                _patch_batches(kind, active)
        return made

    c10d._new_process_group_helper = make


def _patch_batches(kind: Any, active: Callable[[], Recording | None]) -> None:
    before, after = kind._start_coalescing, kind._end_coalescing

    @functools.wraps(before)
    def start(*args: Any, **kwargs: Any) -> Any:
        recording = active()
        if recording is not None:
            recording.calls.is_batching = True
        return before(*args, **kwargs)

    @functools.wraps(after)
    def end(*args: Any, **kwargs: Any) -> Any:
        recording = active()
        if recording is not None:
            recording.calls.is_batching = False
        work = after(*args, **kwargs)
        if recording is not None and work is not None:
            recording.calls.batched(work)
            _patch_wait(type(work), active)
        return work

    kind._start_coalescing, kind._end_coalescing = start, end


def patch_functional(module: types.ModuleType, active: Callable[[], Recording | None]) -> None:
    """``torch.distributed._functional_collectives``: see which group each looks up, and where the thread waits in C++, as
    DTensor does."""
    for name in ("_resolve_group", "_resolve_group_name"):
        original = getattr(module, name, None)
        if original is not None:
            setattr(module, name, _looking_up(original, active))
    for name in ("wait_tensor", "wait_tensors"):
        original = getattr(module, name, None)
        if original is not None:
            setattr(module, name, _waiting_within(original, active))


def _looking_up(original: Any, active: Callable[[], Recording | None]) -> Any:
    @functools.wraps(original)
    def look_up(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        recording = None if torch.compiler.is_compiling() else active()
        if recording is not None and recording.calls.log is not None:
            group = dist.distributed_c10d._resolve_process_group(found) if isinstance(found, str) else found
            if isinstance(group, dist.ProcessGroup):
                recording.calls.looked_up(group)
        return found

    return look_up


def _waiting_within(original: Any, active: Callable[[], Recording | None]) -> Any:
    @functools.wraps(original)
    def wait(*args: Any, **kwargs: Any) -> Any:
        recording = None if torch.compiler.is_compiling() else active()
        if recording is None or recording.calls.is_waiting:
            return original(*args, **kwargs)
        start_ns = time.monotonic_ns()
        try:
            return original(*args, **kwargs)
        finally:
            recording.marks.wait(start_ns, time.monotonic_ns())

    return wait


_waiting: set[type] = set()


def _patch_wait(kind: type, active: Callable[[], Recording | None]) -> None:
    """A backend in Python has a class of its own, whose ``wait`` is not that of torch."""
    if kind in _waiting:
        return
    _waiting.add(kind)
    original = kind.__dict__.get("wait")
    if original is None:
        return

    @functools.wraps(original)
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        recording = active()
        if recording is None or recording.calls.is_waiting:
            return original(self, *args, **kwargs)
        calls = recording.calls
        calls.is_waiting = True
        start_ns = time.monotonic_ns()
        try:
            result = original(self, *args, **kwargs)
            calls.in_flight.waited(self)
            return result
        finally:
            end_ns = time.monotonic_ns()
            calls.is_waiting = False
            known = calls.waited(self)
            if known is None:
                recording.marks.wait(start_ns, end_ns)
            else:
                known.waited_ns = end_ns
                # A blocking function stands in the operation since it began: 0.3 to 0.7 ms of that send the first bytes.
                caller = sys._getframe(1)
                is_c10d = caller.f_globals.get("__name__") == _BLOCKING and caller.f_code.co_name != "wait"
                is_blocking = is_c10d and calls.last is known
                recording.marks.wait(known.start_ns if is_blocking else start_ns, end_ns, known.operation, known.group)

    with contextlib.suppress(TypeError):  # not all types of a backend in C can be changed
        setattr(kind, "wait", wait)  # noqa: B010  (mypy knows that it is a method)


def _patch_init(joined: Callable[[int, int, str], None]) -> None:
    from torch.distributed import distributed_c10d as c10d

    original = c10d.init_process_group

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        backend = str(dist.get_backend())
        if backend == dist.Backend.UNDEFINED or ":" in backend:  # one for each kind of device
            backend = dist.get_backend_config()
        joined(dist.get_rank(), dist.get_world_size(), backend)
        return result

    rebind("init_process_group", original, init_process_group)


_reducers: list[weakref.ref[Any]] = []
"""Every DistributedDataParallel that is alive, in the order in which they were built: the same on all ranks."""


def _patch_ddp() -> None:
    from torch.nn.parallel import DistributedDataParallel

    original = DistributedDataParallel.__init__

    @functools.wraps(original)
    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _reducers[:] = [each for each in _reducers if each() is not None] + [weakref.ref(self)]

    DistributedDataParallel.__init__ = build


def _patch_buffers(active: Callable[[], Recording | None]) -> None:
    """DDP sends a model's buffers, such as those of BatchNorm, before a forward pass, and waits for them, all in C++."""
    original = getattr(dist, "_broadcast_coalesced", None)
    if original is None:
        return

    @functools.wraps(original)
    def broadcast(*args: Any, **kwargs: Any) -> Any:
        recording = active()
        group = kwargs.get("process_group", args[0] if args else None)
        if recording is None or group is None:
            return original(*args, **kwargs)
        known = recording.calls.describe(group, "broadcast", recording.phase, is_within=False)
        known.purpose = "data-parallel sync"
        try:
            return original(*args, **kwargs)
        finally:
            recording.calls.issued(known, None)
            known.waited_ns = known.end_ns
            recording.marks.wait(known.start_ns, known.end_ns, known.operation, known.group)

    dist._broadcast_coalesced = broadcast


def _length(args: tuple[Any, ...], operation: str) -> int:
    """Bytes of a call's input: its second argument if it has an output first."""
    at = 1 if operation in ("all_gather", "reduce_scatter", "gather", "scatter", "all_to_all") and len(args) > 1 else 0
    return _size(args[at]) if args else 0


def _is_empty(value: Any) -> bool:
    """Tensors without elements, or lists of such."""
    if isinstance(value, torch.Tensor):
        return value.layout == torch.strided and not value.numel()
    return isinstance(value, list | tuple) and any(map(_is_empty, value)) and not _size(value)


def _size(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return 0 if value.layout != torch.strided else value.numel() * value.element_size()
    return sum(map(_size, value)) if isinstance(value, list | tuple) else 0


def _parts(group: Any, args: tuple[Any, ...], name: str) -> int:
    """How many sums a backend without a reduce_scatter of its own makes of one: of a list one for each rank, of several tensors
    one for each."""
    of_ranks = group.size() if name == "reduce_scatter" else 1
    return of_ranks * max(1, len(args[0]) if args and isinstance(args[0], list | tuple) else 1)


def _tag(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    tag = kwargs.get("tag", args[2] if len(args) > 2 else 0)
    return tag if isinstance(tag, int) and tag >= 0 else 0


def _peer(group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """The other rank, in the whole job. A receive from any rank has none."""
    named = [kwargs[name] for name in ("dstRank", "srcRank", "dst", "src") if name in kwargs]
    peer = named[0] if named else args[1] if len(args) > 1 else None
    if not isinstance(peer, int):
        return None
    try:
        return int(dist.get_global_rank(group, peer))
    except (ValueError, RuntimeError, KeyError):
        return None
