"""Steps of optimizers while the next forward pass runs: each parameter is stepped when its average is there, at the latest when
something uses it (ByteScheduler, Peng et al. 2019, section 3; Jayarajan et al. 2019).

A parameter's states, and what moves it on (docs/design/gradients.md says more):

```text
  ordinary ──end of backward()──> averaging ──optimizer.step()──> due ──average there, and used or convenient──> ordinary
                                      └──grad used, or any other step──> ordinary, as after backward() without an optimizer
```
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import sys
import threading
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeAlias

import torch

from penstock import _core
from penstock.errors import Config as ConfigError
from penstock.errors import PenstockError
from penstock.torch.life import Life
from penstock.training import awaited, parts
from penstock.training.optimizer_steps import parameters
from penstock.training.passes import BackwardPass
from penstock.training.steps import States, state
from penstock.training.trained import Trained

__all__ = ["Overlap", "check"]

log = logging.getLogger("penstock")

Optimizers: TypeAlias = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]


def check(optimizers: Optimizers, trained: Trained, model: object) -> list[torch.optim.Optimizer]:
    """The optimizers whose steps are to overlap.

    Raises:
        penstock.errors.Config: one of them cannot step in parts, or two step one parameter; none steps one of these parameters; a
            parameter is of a class of its own; the model has sparse gradients or scripted modules.
    """
    found = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    taken: set[torch.nn.Parameter] = set()
    for one in found:
        parts.check(one)
        own = set(parameters(one))
        if own & taken:
            raise ConfigError("optimizer=: two of the optimizers step the same parameter")
        taken |= own
    if taken.isdisjoint(trained.dense):
        raise ConfigError("optimizer=: the optimizer has none of the parameters whose gradients are averaged")
    if trained.sparse:
        raise ConfigError(
            f"optimizer=: gradients of {trained.sparse_names[0]} are sparse, and averaged at the end of the pass: leave "
            "optimizer= out, or make the embedding with sparse=False"
        )
    for name, parameter in zip(trained.names, trained.dense, strict=True):
        if type(parameter) is not torch.nn.Parameter:
            raise ConfigError(
                f"optimizer=: {name} is of the class {type(parameter).__name__}, whose use cannot be noticed: leave "
                "optimizer= out"
            )
    if isinstance(model, torch.nn.Module) and any(isinstance(one, torch.jit.ScriptModule) for one in model.modules()):
        raise ConfigError("optimizer=: the model has scripted modules, whose use of a parameter cannot be noticed")
    return found


class _Pending:
    """A pass of which some averages are not delivered yet."""

    def __init__(self, current: BackwardPass, flushed: _core.Ticket, averages: States) -> None:
        self.current = current
        self.flushed = flushed
        self.averages = averages
        self.taken: dict[int, torch.Tensor | None] = {}
        """What parameters had as ``grad`` when the pass ended."""
        self.open: set[int] = set()
        """The parameters that are averaging or due, by index."""
        self.due: dict[int, parts.RecordedStep] = {}
        self.called: parts.RecordedStep | None = None
        """The step whose ``step()`` was called and has not come to its own code: hooks of the optimizer run, which may still
        change what it steps by."""
        self.zeroed: set[int] = set()
        """Those of them whose gradients the script has set to None since."""
        self.stepped = 0
        self.failed: PenstockError | None = None
        """Some parameters are stepped, and those that are open never will be."""


class Overlap:
    """The parameters of a reducer between a backward pass and the next forward pass. Any thread may use them.

    Args:
        reducer: made with ``last_first``.
        ended: called when the last parameter of a pass is ordinary again, before the next pass begins.
    """

    def __init__(
        self,
        reducer: _core.Reducer,
        trained: Trained,
        optimizers: Sequence[torch.optim.Optimizer],
        rank: int,
        ended: Callable[[], None] | None,
    ) -> None:
        self._reducer, self._trained, self._rank, self._ended = reducer, trained, rank, ended
        self._optimizers = weakref.WeakSet(optimizers)
        self._pending: _Pending | None = None
        # A step of an optimizer uses parameters.
        self._lock = threading.RLock()
        self._has_reported = False
        _overlaps.add(self)

    def watch(self, model: object, life: Life, ends: contextlib.ExitStack) -> None:
        """Register hooks where torch does not notice that a parameter, or what belongs to its step, is used; and one that
        runs before the group is left."""
        this = weakref.ref(self)
        ends.callback(_close, this)

        def settle(*_: object) -> None:
            found = this()
            if found is not None:
                found.settle()

        def give_up(*_: object) -> None:
            found = this()
            if found is not None:
                found.settle_or_report()

        def called(*_: object) -> None:
            found = this()
            if found is not None and found._pending is not None:
                found._pending.called = None

        ends.callback(life.before_leaving(give_up))
        for one in self._optimizers:
            ends.callback(one.register_step_post_hook(called).remove)
            ends.callback(one.register_state_dict_pre_hook(settle).remove)
            ends.callback(one.register_load_state_dict_pre_hook(give_up).remove)
        for module in model.modules() if isinstance(model, torch.nn.Module) else ():
            if not type(module).__module__.startswith("torch.nn."):  # these may call native code on their parameters
                own = [
                    self._trained.index[each]
                    for each in module.parameters(recurse=False)
                    if each in self._trained.index
                ]
                if own:
                    ends.callback(module.register_forward_pre_hook(_settles(this, own)).remove)

    def hand_over(self, current: BackwardPass, averages: States) -> None:
        """A backward pass has ended and is flushed: its parameters are averaging. Does not block.

        Args:
            averages: gets what is delivered.
        """
        assert current.flushed is not None
        _watch_compilers()
        pending = _Pending(current, current.flushed, averages)
        this = weakref.ref(self)
        with self._lock:
            self._pending = pending
            for index, parameter in enumerate(self._trained.dense):
                # Not there for anything that does not ask: it would find a half of an average.
                pending.taken[index], parameter.grad = parameter.grad, None
                pending.open.add(index)
                awaited.await_value(parameter, this, index)

    def record(self, optimizer: torch.optim.Optimizer) -> bool:
        """An optimizer is about to step. If it is one of those that step in parts, and averages of its parameters are still under
        way, record the step: these parameters are due, and ``step()`` finds no gradients of them. Otherwise wait for the
        averages of its parameters: ``step()`` does it all.

        Returns: whether a step was recorded.
        """
        with self._lock:
            pending = self._pending
            if pending is None:
                return False
            index = self._trained.index
            own = {at for one in parameters(optimizer) if (at := index.get(one, -1)) in pending.open}
            if not own:
                return False
            is_recorded = optimizer in self._optimizers and own.isdisjoint(pending.due) and not _has_compiled()
            if not is_recorded or pending.failed or self._is_whole(pending):
                self.settle()
                return False
            step = parts.RecordedStep(optimizer, index, own)
            pending.due.update(dict.fromkeys(own, step))
            pending.called = step
            return True

    def settle(self, indices: Collection[int] | None = None) -> None:
        """Make parameters ordinary: wait for their averages, and step those that are due. While it waits, it steps others that
        are due.

        Args:
            indices: None: all.

        Raises:
            penstock.errors.PenstockError: the averages will never be there. If no parameter is stepped, all are ordinary, as
                before the pass. Otherwise those that are not stepped raise again when they are used, until they get another
                value.
            penstock.errors.Config: a gradient was changed while it was averaged.
        """
        with self._lock:
            pending = self._pending
            wanted = (
                set() if pending is None else pending.open if indices is None else pending.open.intersection(indices)
            )
            if pending is None or not wanted:
                return
            if pending.failed is not None:
                raise pending.failed
            self._settle(pending, wanted)

    def settle_or_report(self) -> None:
        """`settle` where an exception would stop what mends things: a state is loaded, or the group is being left.
        Parameters whose step was called for and not made raise when they are used, until they get another value."""
        with self._lock:
            pending = self._pending
            if pending is not None and pending.failed is None:
                try:
                    self._settle(pending, pending.open, is_last=True)
                except PenstockError as error:
                    log.error("rank %d: a step of an optimizer was not made: %s", self._rank, error)

    def use(self, index: int, *, of_gradient: bool, overwrites: bool) -> None:
        """As `awaited.Owner` has it."""
        with self._lock:
            pending = self._pending
            if pending is None or index not in pending.open:
                return  # another thread was first
            if pending.called is not None:
                _take_back(pending, pending.called)
            if overwrites:
                with contextlib.suppress(PenstockError):
                    self.settle([index])
                if pending.failed is not None:
                    self._give_back(pending, [index])
            elif of_gradient or index in pending.due:
                if of_gradient and index not in pending.due:
                    self._report_reader()
                self.settle([index])

    def hides_gradient(self, index: int, reader: types.FrameType) -> bool:
        """As `awaited.Owner` has it: for the optimizer's ``step()``, and ``zero_grad()`` after it."""
        pending = self._pending
        if pending is None or pending.failed is not None or index not in pending.due:
            return False
        if reader.f_code in _ZERO_GRADS:
            if pending.called is not None or not reader.f_locals.get("set_to_none", True):
                return False
            pending.zeroed.add(index)
            return True
        is_making = pending.due[index].is_making(reader)
        if is_making:
            pending.called = None
        return is_making

    def close(self) -> None:
        """Make all parameters ordinary, stepped or not."""
        with self._lock:
            if self._pending is not None:
                self._give_back(self._pending, list(self._pending.open))

    def _settle(self, pending: _Pending, wanted: set[int], *, is_last: bool = False) -> None:
        if pending.called is not None:
            _take_back(pending, pending.called)
        if not pending.due.keys() >= wanted:
            # Whoever looks at one gradient looks at all (clip_grad_norm_), and a pass that begins may add to any.
            wanted = wanted | (pending.open - pending.due.keys())
        wanted = set(wanted)
        try:
            # What is there already is stepped while the rest travels.
            self._take(pending, wanted)
            if left := wanted & pending.open:
                self._reducer.averaged(sorted(left)).wait()
                self._take(pending, wanted)
            if not pending.open:
                pending.flushed.wait()
        except PenstockError as error:
            self._fail(pending, error, is_last=is_last)
            raise
        if not pending.open:
            self._pending = None
            if self._ended is not None:
                self._ended()

    def _is_whole(self, pending: _Pending) -> bool:
        """Whether all averages are there, or never will be: nothing is left to overlap."""
        return pending.flushed.done() or len(self._reducer.which_averaged(list(pending.open))) == len(pending.open)

    def _take(self, pending: _Pending, wanted: set[int]) -> None:
        """Deliver what is averaged of what is due or wanted, and step what is due."""
        there = self._reducer.which_averaged(list(pending.open))
        chosen = [index for index in there if index in pending.due or index in wanted]
        steps: dict[parts.RecordedStep, set[int]] = {}
        newer: dict[int, torch.Tensor | None] = {}
        for index in chosen:
            self._check_unchanged(pending, index)
            average = self._average(pending, index)
            if average is None:  # no rank had one
                continue
            parameter = self._trained.dense[index]
            with torch._C.DisableTorchFunctionSubclass():
                # What a pass has made that went on without waiting for this one: it comes on top.
                newer[index], parameter.grad = parameter.grad, average
            if index in pending.due:
                steps.setdefault(pending.due[index], set()).add(index)
        try:
            for step, indices in steps.items():
                pending.stepped += len(indices)
                step.make(indices)
        finally:
            for index in chosen:
                self._is_ordinary(pending, index, newer.get(index))

    def _is_ordinary(self, pending: _Pending, index: int, newer: torch.Tensor | None) -> None:
        parameter = self._trained.dense[index]
        awaited.end(parameter)
        pending.open.discard(index)
        if index in pending.zeroed:
            parameter.grad = newer
        elif newer is not None and parameter.grad is not None and newer is not parameter.grad:
            with torch.no_grad():
                parameter.grad.add_(newer)
        elif parameter.grad is not None:
            pending.averages[index] = state(parameter.grad)

    def _average(self, pending: _Pending, index: int) -> torch.Tensor | None:
        """The average, where the gradient was; None if no rank had one."""
        handed, place = pending.current.handed[index], pending.taken[index]
        if index in pending.current.absent and self._reducer.was_absent(index):
            return None
        if place is None or place is handed:
            return handed
        if place.data_ptr() != handed.data_ptr():
            with torch.no_grad():
                place.copy_(handed)
        return place

    def _check_unchanged(self, pending: _Pending, index: int) -> None:
        version = pending.current.states.versions.get(index, -1)
        if version >= 0 and pending.current.handed[index]._version != version:
            raise ConfigError(
                f"rank {self._rank}: the gradient of {self._trained.names[index]} was changed after backward() had returned, "
                "while it was being averaged, by code that had kept it from before. Read gradients from .grad, which waits "
                "for the averages, or leave optimizer= out"
            )

    def _fail(self, pending: _Pending, error: PenstockError, *, is_last: bool) -> None:
        """Averages will never be there."""
        with contextlib.suppress(PenstockError):
            pending.flushed.wait()  # until then the engine writes to gradients
        self._give_back(pending, list(pending.open - pending.due.keys()))
        if not pending.stepped and not is_last:
            self._give_back(pending, list(pending.open))
        elif pending.open:
            pending.failed = error
            log.error(
                "rank %d: in the last step %d parameters were stepped and %d were not, since their gradients could not be "
                "averaged. Load a state before you use these, or close() the reducer to keep them as they are",
                self._rank,
                pending.stepped,
                len(pending.open),
            )

    def _give_back(self, pending: _Pending, indices: Sequence[int]) -> None:
        """Parameters become ordinary without a step, with what their gradients' memory holds now."""
        for index in indices:
            parameter = self._trained.dense[index]
            awaited.end(parameter)
            pending.open.discard(index)
            if parameter.grad is None and index not in pending.zeroed:
                parameter.grad = pending.taken[index]
        if not pending.open and self._pending is pending:
            self._pending = None

    def _report_reader(self) -> None:
        if not self._has_reported:
            self._has_reported = True
            log.warning(
                "rank %d: gradients are used between backward() and step() (by clip_grad_norm_ or a GradScaler, for one), which "
                "waits for all averages: optimizer= saves nothing here. (Reported once.)",
                self._rank,
            )


def _take_back(pending: _Pending, step: parts.RecordedStep) -> None:
    """A hook of an optimizer uses what the optimizer is about to step: let it find that as it is before the step. ``step()`` then
    finds gradients, and does it all."""
    for index in [index for index, due in pending.due.items() if due is step]:
        del pending.due[index]
    pending.called = None


def _close(this: weakref.ref[Overlap]) -> None:
    found = this()
    if found is not None:
        found.close()


def _settles(this: weakref.ref[Overlap], indices: list[int]) -> Callable[..., None]:
    def before_forward(*_: object) -> None:
        found = this()
        if found is not None:
            found.settle(indices)

    return before_forward


def _watch_compilers() -> None:
    """Make parameters ordinary before torch.compile looks at the code that uses them: what it makes of them does not wait."""
    compiler = sys.modules.get("torch._dynamo.callback")
    handler = getattr(compiler, "callback_handler", None)
    # torch._dynamo.reset() forgets callbacks.
    if handler is not None and _before_compiling not in handler.start_callbacks:
        handler.register_start_callback(_before_compiling)


def _before_compiling(_: object) -> None:
    for one in list(_overlaps):
        one.settle()


def _has_compiled() -> bool:
    """Whether torch.compile has compiled anything in this process: what it has made uses parameters unseen."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    return bool(getattr(frames, "FRAME_COUNTER", 0))


_overlaps: weakref.WeakSet[Overlap] = weakref.WeakSet()
_ZERO_GRADS = {inspect.unwrap(one.zero_grad).__code__ for one in (torch.optim.Optimizer, torch.nn.Module)}
