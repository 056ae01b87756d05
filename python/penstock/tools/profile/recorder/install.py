"""The marks: what of torch is replaced, and by what. Called once torch is imported, in any process of a profiled command.

Nothing is recorded before the process trains: a launcher such as torchrun imports torch, too. Nor is a worker of a DataLoader, or
a process that a rank has forked.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.abc
import importlib.util
import multiprocessing
import multiprocessing.process
import multiprocessing.util
import os
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from penstock.texts import of_exception
from penstock.tools.profile.recorder import changes, collectives, profiler
from penstock.tools.profile.recorder.errors import is_of_script
from penstock.tools.profile.recorder.identity import Identity
from penstock.tools.profile.recorder.optimizers import Unseen
from penstock.tools.profile.recorder.recording import MAYBE, PROFILED, Recording
from penstock.tools.profile.run import MARKS, PERIOD, PERIOD_MS

__all__ = ["install"]


class _State:
    """Of this process."""

    __slots__ = ("folder", "identity", "is_patched", "marks", "must_train", "period_ms", "recording")

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.marks: Path | None = None
        """For the command (`run.MARKS`)."""
        self.period_ms = str(PERIOD_MS)
        self.identity: Identity | None = None
        """Once the process has joined others."""
        self.must_train = False
        """Whether a process that only calls modules is none: that which started it has done so, too."""
        self.recording: Recording | None = None
        self.is_patched = False


_state = _State()
_unseen = Unseen()
_beginning = threading.Lock()
_is_compiling = torch.compiler.is_compiling
_thread = threading.get_ident


def install(given: Mapping[str, str]) -> None:
    """Put the marks in place.

    Args:
        given: the environment, as the process began with it: a script may clear it.
    """
    if _state.folder is not None:
        return
    _state.folder, _state.must_train = Path(given["PENSTOCK_PROFILE"]), given.get(PROFILED) == MAYBE
    _state.marks = Path(given[MARKS]) if MARKS in given else None
    _state.period_ms = given.get(PERIOD, _state.period_ms)
    try:
        if not _state.is_patched:
            _state.is_patched = True
            _patch(given)
    except BaseException:
        _stop()
        raise
    _modules.watch()


def _patch(given: Mapping[str, str]) -> None:
    os.register_at_fork(before=_forks, after_in_parent=_forked, after_in_child=_born)
    _patch_exit()
    _modules.patch()
    _patch_backward()
    _patch_optimizers()
    _patch_functions()
    _patch_loader()
    _patch_processes()
    profiler.patch(_running_sample)
    changes.make(given)
    if torch.distributed.is_available():
        collectives.patch(_active, _joined)
    for name, then in _LATER.items():
        if name in sys.modules:
            then(sys.modules[name])
    sys.meta_path.insert(0, _Later())


# ------------------------------------------------------------------------------------------------- who is recorded


def _active() -> Recording | None:
    """The recording, on its training thread."""
    recording = _state.recording
    return recording if recording is not None and recording.thread == threading.get_ident() else None


def _ready() -> Recording | None:
    """The recording, on its training thread, if the process is known as a rank."""
    recording = _state.recording
    return recording if recording is not None and recording.is_rank and recording.thread == _thread() else None


def _begin(*, trains: bool = False) -> Recording | None:
    """The recording, on its training thread; begins it if this process may be a rank."""
    recording = _state.recording
    if recording is None:
        if _state.folder is None:
            return None
        if _state.identity is None and (
            multiprocessing.parent_process() is not None or (_state.must_train and not trains)
        ):
            return None  # a worker of a DataLoader, say; one that joins the others is a rank
        recording = _begun(_state.folder)
        if recording is None:
            return None
    return recording if recording.thread == threading.get_ident() else None


def _begun(folder: Path) -> Recording | None:
    with _beginning:  # threads may begin at the same time
        if _state.recording is None:
            try:
                _state.recording = Recording(folder, _state.identity or Identity(), _state.period_ms)
            except Exception as error:  # whatever is wrong here, such as too many threads, the script must run
                if is_of_script(error):
                    raise
                _stop()
                if _state.marks is not None:
                    with contextlib.suppress(OSError):
                        (_state.marks / f"problem-{os.getpid()}").write_text(of_exception(error))
                return None
            if multiprocessing.parent_process() is None:
                atexit.register(_end)
            else:  # what multiprocessing has started does not call what atexit has
                multiprocessing.util.Finalize(None, _end, exitpriority=100)
        return _state.recording


def _train() -> Recording | None:
    """The same, for what only the training thread does: if that is not the one that began, it is now."""
    recording = _begin(trains=True)
    if recording is None:
        recording = _state.recording
        if recording is None or recording.marks.is_in("backward"):
            return None
        if recording.marks.number > 0:
            recording.leaves_out(_OTHER_THREAD)
            return None
        recording.moves()
    recording.trains()
    return recording


def _step() -> Recording | None:
    """The same, for optimizers: in a backward pass on CUDA tensors hooks run on a thread of the autograd engine."""
    recording = _train()
    if recording is None:
        recording = _state.recording
        if recording is None or not recording.marks.is_in("backward"):
            return None
        if _is_of_script(threading.get_ident()):
            recording.leaves_out(_OTHER_THREAD)
            return None
    return recording


_OTHER_THREAD = (
    "another thread of this process trains, too, and is not recorded: steps are those of the one that stepped first"
)


def _is_of_script(thread: int) -> bool:
    """Whether a thread was started by Python, and not by torch."""
    return any(one.ident == thread and not isinstance(one, threading._DummyThread) for one in threading.enumerate())


def _joined(rank: int, world: int, backend: str) -> None:
    if _state.folder is not None:
        recording = _state.recording
        _state.identity = recording.identity if recording is not None else Identity()
        _state.identity.joined(rank, world, backend)
        _begin(trains=True)
        if _state.recording is not None:
            _state.recording.joins()


def _forks() -> None:
    recording = _active()
    if recording is not None:
        recording.sampling.forks(recording.calls)


def _forked() -> None:
    recording = _active()
    if recording is not None:
        recording.event("fork")


def _born() -> None:
    """In a fork. That of a rank is none; that of a launcher may become one."""
    recording = _state.recording
    if profiler.Profiler.has_run:
        profiler.skip_destructors()
    if recording is not None:
        recording.sampling.born(recording.calls)
    if (recording is not None and recording.is_rank) or os.environ.get(PROFILED, "").isdigit():
        _stop()
    elif recording is not None:
        _state.recording, _state.must_train = None, True
        _modules.watch()


def _stop() -> None:
    """Record nothing in this process."""
    _state.folder, _state.recording = None, None
    _modules.leave()


def _end() -> None:
    recording, _state.recording = _state.recording, None
    _state.folder = None
    _modules.leave()
    if recording is not None:
        recording.end()


def _patch_exit() -> None:
    original = os._exit

    @functools.wraps(original)
    def exit_at_once(status: int) -> Any:
        try:
            if _state.recording is not None:
                with contextlib.suppress(Exception):
                    _state.recording.breaks_off()
        finally:  # what a handler of a signal raises does not keep the process
            original(status)

    os._exit = exit_at_once


def _running_sample() -> Iterator[Callable[[], None]]:
    recording = _active()
    if recording is not None and recording.sampling.is_running:
        yield functools.partial(recording.sampling.yields, recording.calls)


# ----------------------------------------------------------------------------------------------------------- marks


class _Modules:
    """``Module.__call__``, whose code is ours while no module runs, and torch's own within one: inner modules are no marks, and a
    model has hundreds. It stays the same function, so that Dynamo, which compares it, sees that nothing was patched.

    *Why not a wrapper?* It takes 0.25 us for each inner module: 1.3 % of a step of an MLP of 50 layers.
    """

    def __init__(self) -> None:
        self._call: Any = None
        self.is_watching = False
        self.original: Any = None
        """A function with torch's own code."""

    def patch(self) -> None:
        global _patched_call
        call: Any = torch.nn.Module.__call__
        if not isinstance(call, types.FunctionType) or call.__closure__:  # somebody has patched it before us
            _patched_call, call = call, _patched
            torch.nn.Module.__call__ = call
        call.__globals__["_penstock_profile_call"] = _penstock_profile_call
        self.original = types.FunctionType(call.__code__, call.__globals__, call.__name__, call.__defaults__)
        self._call = call

    def watch(self) -> None:
        """The next call of a module is a mark."""
        self._call.__code__ = _marking.__code__
        self.is_watching = True

    def leave(self) -> None:
        if self._call is not None:
            self.is_watching = False
            self._call.__code__ = self.original.__code__


_modules = _Modules()
_patched_call: Any = None


def _patched(self: Any, *args: Any, **kwargs: Any) -> Any:
    return _patched_call(self, *args, **kwargs)


def _marking(self: Any, *args: Any, **kwargs: Any) -> Any:
    return _penstock_profile_call(self, args, kwargs)


def _penstock_profile_call(module: Any, args: Any, kwargs: Any) -> Any:
    """A call of a module that is in no other."""
    original = _modules.original
    recording = None if _is_compiling() else _ready() or _begin()
    # What runs within a backward pass is computed again for it (torch.utils.checkpoint).
    if recording is None or recording.is_in_pass():
        return original(module, *args, **kwargs)
    if _unseen.is_possible:
        _look_for_steps(recording)
    has_gradients, in_training_mode = torch.is_grad_enabled(), module.training
    is_forward = has_gradients and in_training_mode
    if has_gradients:  # a model with frozen batch norms is trained in evaluation mode
        recording.phase = "forward"
        recording.calls.comes("forward")
    start_ns, number = time.monotonic_ns(), recording.marks.number
    try:
        _modules.leave()
        return original(module, *args, **kwargs)
    finally:
        if _state.recording is recording:
            _modules.watch()
            end_ns = time.monotonic_ns()
            recording.passed(end_ns)
            if number == recording.marks.number:  # else a whole step was within
                if is_forward:
                    recording.marks.forward(start_ns, end_ns)
                else:
                    recording.marks.evaluation(
                        start_ns, end_ns, with_gradients=has_gradients, in_training_mode=in_training_mode
                    )


def _patch_backward() -> None:
    from torch.autograd import graph

    original = graph._engine_run_backward

    @functools.wraps(original)
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        recording = None if _is_compiling() else _ready() or _train()
        if recording is None or recording.is_in_pass():
            return original(*args, **kwargs)
        if _unseen.is_possible:
            _look_for_steps(recording)
        if not _modules.is_watching:  # what a handler of a signal raises may have come between
            _modules.watch()
        recording.backward_begins(sys._getframe())
        has_failed = True
        try:
            result = original(*args, **kwargs)
            has_failed = False
            return result
        finally:
            recording.backward_ends(has_failed=has_failed)
            _unseen.pass_ends()

    graph._engine_run_backward = run_backward
    torch.autograd._engine_run_backward = run_backward


def _patch_optimizers() -> None:
    from torch.optim import optimizer

    def before(one: Any, args: Any, kwargs: Any) -> None:
        recording = None if _is_compiling() else _ready() or _step()
        if recording is not None:
            recording.optimizer_begins(sys._getframe(1))

    def after(one: Any, args: Any, kwargs: Any) -> None:
        recording = None if _is_compiling() else _state.recording
        if recording is not None:
            _unseen.seen(one)
            recording.optimizer_ends(one, sys._getframe(1))

    build, clear = optimizer.Optimizer.__init__, optimizer.Optimizer.zero_grad

    @functools.wraps(build)
    def built(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        _unseen.built(self)

    @functools.wraps(clear)
    def cleared(self: Any, *args: Any, **kwargs: Any) -> None:
        recording = None if _is_compiling() else _active()
        if recording is not None and _unseen.is_possible:
            _look_for_steps(recording)
        clear(self, *args, **kwargs)

    compile_ = torch.compile

    @functools.wraps(compile_)
    def compiled(model: Any = None, *args: Any, **kwargs: Any) -> Any:
        if model is not None and not isinstance(getattr(model, "__self__", model), torch.nn.Module):
            _unseen.is_possible = True
        return compile_(model, *args, **kwargs)

    torch.compile = compiled
    optimizer.Optimizer.__init__ = built  # type: ignore[method-assign]
    optimizer.Optimizer.zero_grad = cleared  # type: ignore[method-assign]
    # They change nothing, so a GradientReducer need not have all gradients before them (training/deferral.py).
    before.only_counts = after.only_counts = True  # type: ignore[attr-defined]
    optimizer.register_optimizer_step_pre_hook(before)
    optimizer.register_optimizer_step_post_hook(after)


def _look_for_steps(recording: Recording) -> None:
    """What follows a backward pass begins."""
    if recording.phase != "backward" or recording.marks.is_in("optimizer"):  # that is a closure's
        return
    for one in _unseen.stepped():
        recording.leaves_out(
            f"the steps of {type(one).__name__} are compiled: nothing tells when they begin, and their time counts as other"
        )
        recording.stepped(one)


def _patch_functions() -> None:
    from torch.amp import GradScaler
    from torch.nn.utils import clip_grad

    for name in ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_"):
        _mark_function(name, "clip", clip_grad, torch.nn.utils)
    _mark_function("save", "checkpoint", torch.serialization, torch)
    _mark_function("unscale_", "unscale", GradScaler)
    _mark_function("update", "inf check", GradScaler)
    _mark_function("step", "inf check", GradScaler)
    inner = GradScaler._maybe_opt_step

    @functools.wraps(inner)
    def maybe_step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        recording = _active()
        if recording is None:
            return inner(self, optimizer, *args, **kwargs)
        steps = recording.iterations.steps
        result = inner(self, optimizer, *args, **kwargs)
        if recording.iterations.steps == steps:
            recording.stepped(optimizer)  # it would have
        return result

    GradScaler._maybe_opt_step = maybe_step


def _mark_function(name: str, phase: str, *homes: Any) -> None:
    """Mark a function, or a method, as a phase, wherever it can be found."""
    original = getattr(homes[0], name, None)
    if original is None:
        return

    @functools.wraps(original)
    def marked(*args: Any, **kwargs: Any) -> Any:
        recording = None if _is_compiling() else _active()
        if recording is None or recording.marks.is_in(phase):
            return original(*args, **kwargs)
        if phase == "checkpoint":
            recording.event(phase)
        with recording.span(phase):
            return original(*args, **kwargs)

    for home in homes:
        if getattr(home, name, None) is original:
            setattr(home, name, marked)


def _patch_loader() -> None:
    from torch.utils.data import DataLoader, dataloader

    def loading(original: Any, kind: type) -> None:
        @functools.wraps(original)
        def load(self: Any) -> Any:
            recording = _begin()
            if recording is None or recording.marks.is_in("loading"):
                return original(self)
            if _unseen.is_possible:
                _look_for_steps(recording)
            with recording.span("loading"):
                found = original(self)
            with contextlib.suppress(Exception):  # a batch may be of any type, such as one that lacks a shape
                recording.marks.loaded(_examples(found))
            recording.passed(time.monotonic_ns())
            return found

        setattr(kind, original.__name__, load)

    loading(dataloader._BaseDataLoaderIter.__next__, dataloader._BaseDataLoaderIter)
    loading(DataLoader.__iter__, DataLoader)


def _patch_processes() -> None:
    """What a rank raises that multiprocessing, or `torch.multiprocessing.spawn`, has started, it tells its parent and no
    `sys.excepthook`."""
    bootstrap = multiprocessing.process.BaseProcess._bootstrap  # type: ignore[attr-defined]

    @functools.wraps(bootstrap)
    def bootstrap_telling(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.run = _telling(self.run)
        return bootstrap(self, *args, **kwargs)

    multiprocessing.process.BaseProcess._bootstrap = bootstrap_telling  # type: ignore[attr-defined]
    spawn: Any = sys.modules["torch.multiprocessing.spawn"]  # a function hides it
    wrap = spawn._wrap

    @functools.wraps(wrap)
    def wrap_telling(function: Any, *args: Any, **kwargs: Any) -> Any:
        return wrap(_telling(function), *args, **kwargs)

    spawn._wrap = wrap_telling


def _telling(function: Any) -> Any:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if _state.recording is not None:
                _state.recording.failed(error)
            raise

    return run


def _examples(batch: Any, depth: int = 3) -> int:
    """How many a batch holds: the first length of its first tensor."""
    if isinstance(batch, torch.Tensor):
        return int(batch.shape[0]) if batch.dim() else 1
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, list | tuple) and depth:
        return next((count for count in (_examples(each, depth - 1) for each in batch[:8]) if count), 0)
    return 0


# ----------------------------------------------------------------------------------- modules that may come later


def _patch_checkpoint(module: types.ModuleType) -> None:
    _mark_function("save", "checkpoint", module)
    _mark_function("async_save", "checkpoint", module)


def _patch_safetensors(module: types.ModuleType) -> None:
    _mark_function("save_file", "checkpoint", module)


def _patch_passes(module: types.ModuleType) -> None:
    """A GradientReducer waits for its sums at the end of a backward pass."""
    original = module._wait

    @functools.wraps(original)
    def wait(*args: Any, **kwargs: Any) -> Any:
        recording = _active()
        if recording is None:
            return original(*args, **kwargs)
        start_ns = time.monotonic_ns()
        try:
            return original(*args, **kwargs)
        finally:
            recording.marks.wait(start_ns, time.monotonic_ns(), "all_reduce")

    module._wait = wait  # type: ignore[attr-defined]


def _patch_functional(module: types.ModuleType) -> None:
    collectives.patch_functional(module, _active)


_LATER: dict[str, Callable[[types.ModuleType], None]] = {
    "torch.distributed._functional_collectives": _patch_functional,
    "torch.distributed.checkpoint": _patch_checkpoint,
    "safetensors.torch": _patch_safetensors,
    "penstock.training.passes": _patch_passes,
    "penstock.training.gradients": changes.make_in_reducers,
}


class _Later(importlib.abc.MetaPathFinder):
    """Patches those modules when they have been imported."""

    def __init__(self) -> None:
        self._names = {name: then for name, then in _LATER.items() if name not in sys.modules}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        then = self._names.pop(name, None)
        if then is None:
            return None
        spec = importlib.util.find_spec(name)
        execute = getattr(spec and spec.loader, "exec_module", None)
        if execute is not None:

            def execute_and_patch(module: types.ModuleType) -> None:
                execute(module)
                then(module)

            spec.loader.exec_module = execute_and_patch  # type: ignore[union-attr,method-assign]
        return spec
