"""Averages that arrive while a script goes on: the optimizer steps each parameter when its gradient is there.

```text
  backward()   ends when all ranks' passes have ended; many gradients are still on their way
  step()       steps what has arrived
  forward      a layer that uses a parameter waits for its gradient, and steps it
```
As in ByteScheduler (Peng et al., SOSP 2019), but no layer has a hook for it: until its gradient has arrived, a parameter has the
class `PendingParameter`, and its gradient `PendingGradient`. torch tells these of every use of them in Python, as it does for its
own parameters that have no shape yet (``torch.nn.parameter.UninitializedParameter``), and what needs values waits for them first.
So a script that clips gradients, logs norms, keeps averages of weights or saves a checkpoint sees what it would see without this.

Only the step of optimizers is deferred that treat each parameter by itself (`OPTIMIZERS`): the values are the same to the bit.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.optim.optimizer as hooks

from penstock import _core
from penstock.errors import Config as ConfigError
from penstock.errors import PenstockError
from penstock.torch.life import Life
from penstock.training import modes, optimizer_steps
from penstock.training.optim import AdamSGD
from penstock.training.passes import BackwardPass
from penstock.training.steps import SHARED

__all__ = ["Deferral", "PendingGradient", "PendingParameter", "check", "made"]

log = logging.getLogger("penstock")


def check(optimizer: torch.optim.Optimizer, trained: Iterable[torch.nn.Parameter]) -> None:
    """Whether an optimizer's step can be deferred.

    Raises:
        penstock.errors.Config: it cannot; or none of its parameters is ``trained``.
    """
    name = type(optimizer).__name__
    if type(optimizer) not in OPTIMIZERS:
        known = ", ".join(sorted(one.__name__ for one in OPTIMIZERS))
        raise ConfigError(
            f"the step of {name} may need all gradients at once: that it treats each parameter by itself is known of {known}, "
            "not of classes derived from them. Leave optimizer= out"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ConfigError(
            f"{name} with differentiable=True: its step is a part of a graph and cannot wait. Leave optimizer= out"
        )
    if set(map(id, trained)).isdisjoint(map(id, optimizer_steps.parameters(optimizer))):
        raise ConfigError(f"none of the parameters that {name} steps is averaged by this reducer")


def made(
    backend: Life,
    rank: int,
    reducer: _core.Reducer,
    parameters: Sequence[torch.nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
    ends: contextlib.ExitStack,
    needs: Mapping[str, object],
) -> Deferral | None:
    """A deferral, as `Deferral`; None without an optimizer, or where something needs all gradients at the end of a pass.

    Args:
        needs: what may need them, in words for the log, and whether it does.
    """
    if optimizer is None or _says_why_not(rank, [need for need, is_there in needs.items() if is_there]):
        return None
    deferral = Deferral(rank, reducer, parameters, optimizer, ends)
    backend.settle_before_end(deferral)
    return deferral


class Deferral:
    """The gradients of a reducer that are still on their way, and the steps that wait for them. Any thread may use the
    parameters.

    Args:
        rank: this one, for the log.
        reducer: averages them.
        parameters: by the index of their gradient, from the last layer to the first.
        optimizer: `check` has passed it.
        ends: what undoes this goes there, and refers to no part of this object.
    """

    def __init__(
        self,
        rank: int,
        reducer: _core.Reducer,
        parameters: Sequence[torch.nn.Parameter],
        optimizer: torch.optim.Optimizer,
        ends: contextlib.ExitStack,
    ) -> None:
        self.optimizer = optimizer
        self._rank = rank
        self._reducer = reducer
        self._parameters = parameters
        self._device_types = {"cpu", *(one.device.type for one in parameters)}
        self._lock = threading.RLock()
        # From the first layer to the last, as the next forward pass needs them and as they are sent.
        self._pending: dict[int, _Pending] = {}
        # Completes when the last pass's have arrived.
        self._flushed: list[_core.Ticket] = []
        # The thread on which the optimizer makes its step: it finds no gradient there where that is pending.
        self._stepping: int | None = None
        # Since that step: the hyperparameters of its groups, and the group of each parameter whose step is owed.
        self._owed: tuple[list[dict[str, Any]], dict[int, int]] | None = None
        # A channel that closes ends what is on its way, also for other ranks.
        ends.callback(_wait, self._flushed)
        this = weakref.ref(self)
        for hook in (
            optimizer.register_step_post_hook(lambda *_: Deferral._stepped(this())),
            optimizer.register_state_dict_pre_hook(lambda _: Deferral._finish(this())),
            optimizer.register_load_state_dict_pre_hook(lambda *_: Deferral._finish(this())),
        ):
            ends.callback(hook.remove)
        _alive.add(self)

    def begin(self, one: BackwardPass) -> None:
        """All ranks' passes have ended. Wait for gradients, but for those that can arrive later.

        Raises:
            penstock.errors.PenstockError: the group has failed.
        """
        handed, versions = one.handed, one.states.versions
        late = self._reducer.late()
        is_seen = late and not _says_why_not(self._rank, _compiled())
        stepped = set(map(id, optimizer_steps.parameters(self.optimizer))) if is_seen else set()
        deferred = [
            index
            for index in late
            if versions.get(index, SHARED) != SHARED and self._is_deferred(index, handed[index], stepped)
        ]
        for index in set(late).difference(deferred):
            self._await(index)
        this = weakref.ref(self)
        with self._lock:
            self._stepping, self._owed = None, None
            self._flushed[:] = filter(None, [one.flushed])
            for index in sorted(deferred, reverse=True):
                self._pending[index] = _Pending((this, index), self._parameters[index], handed[index])

    def is_pending(self) -> bool:
        """Whether gradients are on their way, or steps wait for them."""
        return bool(self._pending)

    def finish(self) -> None:
        """Wait for all gradients, and make the steps that wait for them.

        Raises:
            penstock.errors.PenstockError: the group has failed. Steps that waited are not made: parameters are of two steps.
        """
        while True:
            with self._lock:  # another thread may be making the last steps
                index = next(iter(self._pending), None)
            if index is None:
                break
            self.arrive(index)
        flushed, self._flushed[:] = list(self._flushed), []
        for one in flushed:
            one.wait()

    def settle(self) -> None:
        """Finish. If the group has failed, that is logged, since who closes and forks cannot be told otherwise."""
        is_owed = self._owed is not None
        try:
            self.finish()
        except PenstockError as error:
            if is_owed:
                log.error(
                    "rank %d: the last optimizer.step() has not stepped all parameters, since gradients did not arrive: %s. %s",
                    self._rank,
                    error,
                    _OF_TWO_STEPS,
                )
            self._drop()

    def step(self) -> None:
        """The optimizer is about to step: let it step what has arrived, now, and the rest later."""
        with self._lock:
            # The rest would be stepped otherwise, somebody looks at all gradients, or it steps by the same ones again.
            reasons = [f"the optimizer steps in {mode}" for mode in modes.in_force(self._device_types)]
            reasons += self._hooks()
            if _says_why_not(self._rank, reasons) or self._owed is not None:
                self.finish()
                return
            self._take_arrived()
            if not self._pending:
                return
            ids = {id(one.parameter): index for index, one in self._pending.items()}
            groups = self.optimizer.param_groups
            places = {
                ids[id(each)]: at for at, group in enumerate(groups) for each in group["params"] if id(each) in ids
            }
            self._owed = [_hyperparameters(group) for group in groups], places
            self._stepping = threading.get_ident()
            # A graph from before this step is told that its weights have changed.
            torch.autograd.graph.increment_version([self._pending[index].parameter for index in places])

    def arrive(self, index: int) -> None:
        """Wait for a gradient, and make the step that waits for it.

        Raises:
            penstock.errors.PenstockError: the group has failed.
        """
        if index in self._pending and self._reducer.arrival(index) is not None:
            with self._lock:
                self._take_arrived()  # other steps, in the time that this one waits
            self._await(index)
        with self._lock:  # another thread may be making this step
            if index in self._pending:
                self._take_arrived()

    def gradient(self, index: int) -> torch.Tensor | None:
        """What ``grad`` of a parameter gives: a tensor that is waited for when it is used."""
        with self._lock:
            if self._stepping is not None:
                self._end_raised_step()
            one = self._pending.get(index)
            if one is not None:
                if self._stepping is not None and self._stepping == threading.get_ident():
                    return None
                fresh = one.fresh()
                if one.is_dropped:
                    return fresh
                if fresh is None:
                    return one.gradient
        self.arrive(index)
        return _gradient_of(self._parameters[index])

    def drop_gradient(self, index: int) -> None:
        """``zero_grad()``: from now on the gradient is there for the step that waits for it, only."""
        with self._lock:
            self._end_raised_step()
            one = self._pending.get(index)
            if one is not None and self._owed is not None and index in self._owed[1]:
                one.is_dropped = True
                one.set(None)
                return
        # There is no step that waits for it.
        self.arrive(index)
        _set_gradient(self._parameters[index], None)

    def _await(self, index: int) -> None:
        # Not under the lock: other threads may use what has arrived.
        arrival = self._reducer.arrival(index)
        if arrival is not None:
            try:
                arrival.wait()
            except PenstockError:
                self._drop()
                raise

    def _drop(self) -> None:
        """The gradients do not arrive."""
        with self._lock, torch._C.DisableTorchFunctionSubclass():
            for one in self._pending.values():
                one.begin_step()
                one.end()
            self._pending.clear()
            self._flushed.clear()
            self._owed, self._stepping = None, None

    def _is_deferred(self, index: int, gradient: torch.Tensor, stepped: set[int]) -> bool:
        """Not what shares memory with other tensors, which would not wait. (A gradient that has a version here shares none.)"""
        parameter = self._parameters[index]
        return (
            id(parameter) in stepped
            and type(parameter) is torch.nn.Parameter
            and type(gradient) is torch.Tensor
            and parameter.grad is gradient
            and not gradient.requires_grad
            and parameter._base is None
            and gradient._base is None
            and parameter.untyped_storage().nbytes() == parameter.nbytes
        )

    def _hooks(self) -> list[str]:
        """Why hooks of the step may need all gradients: others than the one of all reducers, this object's, and those with
        ``only_counts``."""
        own = self.optimizer
        if sum(one.optimizer is own for one in list(_alive)) > 1:
            return ["the optimizer is another reducer's, too"]
        tables = [own._optimizer_step_pre_hooks, own._optimizer_step_post_hooks]
        tables += [hooks._global_optimizer_pre_hooks, hooks._global_optimizer_post_hooks]
        count = sum(not getattr(hook, "only_counts", False) for table in tables for hook in table.values())
        return ["the optimizer's step has hooks"] if count > 2 else []

    def _take_arrived(self) -> None:
        """Steps that are made together cost less.

        Raises:
            penstock.errors.PenstockError: the reducer has failed. What is pending may be no average, and is dropped.
        """
        if not self._pending:
            return
        try:
            late = set(self._reducer.late())
        except PenstockError:
            self._drop()
            raise
        arrived = [index for index in self._pending if index not in late]
        if arrived:
            # Whoever uses the first of them may be in any.
            with modes.left(self._device_types):
                self._take(arrived)

    def _take(self, arrived: Sequence[int]) -> None:
        self._end_raised_step()
        taken = [(index, self._pending.pop(index)) for index in arrived]
        with torch._C.DisableTorchFunctionSubclass():
            for _, one in taken:
                one.begin_step()
        try:
            if self._owed is not None:
                hyperparameters, places = self._owed
                groups: dict[int, list[torch.nn.Parameter]] = {}
                for index, one in taken:
                    if index in places:
                        groups.setdefault(places[index], []).append(one.parameter)
                self._step([{**hyperparameters[at], "params": each} for at, each in groups.items()])
        except BaseException as error:
            log.error(
                "rank %d: a part of the last optimizer.step() was cut short by %r. %s", self._rank, error, _OF_TWO_STEPS
            )
            raise
        finally:
            with torch._C.DisableTorchFunctionSubclass():
                for _, one in taken:
                    one.end()

    def _step(self, groups: list[dict[str, Any]]) -> None:
        """A part of the optimizer's step, whose hooks have been called. To other threads the parameters are pending until its
        end, and the optimizer has its groups: a schedule may change them meanwhile."""
        if not groups:
            return
        part = object.__new__(type(self.optimizer))
        part.__dict__.update(self.optimizer.__dict__, param_groups=groups)
        with torch._C.DisableTorchFunctionSubclass():
            type(part).step.__wrapped__(part)  # type: ignore[attr-defined]

    def _end_raised_step(self) -> None:
        """A step of the optimizer that has raised owes nothing."""
        if self._stepping == threading.get_ident() and not optimizer_steps.is_stepping(self.optimizer):
            self._stepping, self._owed = None, None

    @staticmethod
    def _stepped(this: Deferral | None) -> None:
        if this is not None:
            this._stepping = None

    @staticmethod
    def _finish(this: Deferral | None) -> None:
        if this is not None:
            this.finish()


class _Pending:
    """A parameter whose gradient is on its way, from now until `end`.

    Args:
        place: where it stands.
        gradient: as autograd has made it.
    """

    __slots__ = ("_made", "gradient", "is_dropped", "parameter")

    def __init__(self, place: _Place, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        self.parameter = parameter
        self.gradient = gradient
        self.is_dropped = False
        """It is there for the step that waits for it, only."""
        # A pass that uses no parameter, only what an earlier forward pass has left, would add to it.
        parameter.grad = None
        _places[id(parameter)] = _places[id(gradient)] = place
        parameter.__class__ = PendingParameter
        gradient.__class__ = PendingGradient

    def fresh(self) -> torch.Tensor | None:
        """What a pass has made meanwhile."""
        return _gradient_of(self.parameter)

    def set(self, gradient: torch.Tensor | None) -> None:
        """In place of what a pass has made."""
        _set_gradient(self.parameter, gradient)

    def begin_step(self) -> None:
        """The gradient is there, or never will be: the parameter has it, until `end`. Both are called while torch's functions see
        ordinary tensors."""
        self._made = _GET_GRAD(self.parameter)
        _SET_GRAD(self.parameter, self.gradient)

    def end(self) -> None:
        """Both are ordinary tensors again."""
        if self.is_dropped:
            _SET_GRAD(self.parameter, self._made)
        elif self._made is not None:
            # As autograd would have added it.
            self.gradient.add_(self._made)
        # The classes come last: they tell other threads that all is done.
        del _places[id(self.parameter)], _places[id(self.gradient)]
        self.gradient.__class__ = torch.Tensor
        self.parameter.__class__ = torch.nn.Parameter


def _arrived(name: str) -> Any:
    """A method that asks for the class of its tensor before it uses the tensor."""

    def method(self: torch.Tensor, argument: Any) -> Any:
        _arrive((self,))
        return getattr(self, name)(argument)

    return method


class PendingGradient(torch.Tensor):
    """A gradient that is waited for when it is used."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _use(function, args, kwargs or {})

    __deepcopy__, __reduce_ex__ = _arrived("__deepcopy__"), _arrived("__reduce_ex__")


class PendingParameter(torch.nn.Parameter):
    """A parameter that is stepped when it is used."""

    # Of all uses these two come most often: a property spares them torch's way to the method below.
    @property
    def grad(self) -> torch.Tensor | None:
        found = _place(self) if torch._C._is_torch_function_enabled() else None
        return _GET_GRAD(self) if found is None else found[0].gradient(found[1])

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        found = _place(self) if gradient is None and torch._C._is_torch_function_enabled() else None
        if found is None:
            _SET_GRAD(self, gradient)
        else:
            found[0].drop_gradient(found[1])

    @grad.deleter
    def grad(self) -> None:
        _DELETE_GRAD(self)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = _place(args[0]) if args else None
        if found is not None and isinstance(args[0], PendingParameter):
            deferral, index = found
            if function == _GET_GRAD:
                return deferral.gradient(index)
            if function == _DELETE_GRAD or (function == _SET_GRAD and args[1] is None):
                return deferral.drop_gradient(index)
        return _use(function, args, kwargs or {})

    __deepcopy__, __reduce_ex__ = _arrived("__deepcopy__"), _arrived("__reduce_ex__")


def _use(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if function in _WITHOUT_VALUES:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)
    _arrive(args)
    if kwargs:
        _arrive(kwargs)
    return function(*args, **kwargs)


def _arrive(used: Any) -> None:
    """Wait for all that is pending in these."""
    for one in used.values() if isinstance(used, dict) else used:
        if type(one) in _CLASSES:
            found = _place(one)
            if found is not None:
                found[0].arrive(found[1])
            if type(one) in _CLASSES:
                # Its reducer is gone, or an interrupt has kept it from its end.
                one.__class__ = torch.nn.Parameter if type(one) is PendingParameter else torch.Tensor
        elif isinstance(one, tuple | list | dict):
            _arrive(one)


def _gradient_of(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """What it has, pending or not."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient: torch.Tensor | None = _GET_GRAD(parameter)
        return gradient


def _set_gradient(parameter: torch.nn.Parameter, gradient: torch.Tensor | None) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        _SET_GRAD(parameter, gradient)


def _place(one: Any) -> tuple[Deferral, int] | None:
    this, index = _places.get(id(one), (_nothing, 0))
    deferral = this()
    return None if deferral is None else (deferral, index)


def _nothing() -> None:
    return None


def _wait(tickets: list[_core.Ticket]) -> None:
    for one in tickets:
        with contextlib.suppress(PenstockError):
            one.wait()


def _settle_all() -> None:
    for one in list(_alive):
        one.settle()


atexit.register(_settle_all)
# In a child nothing arrives.
os.register_at_fork(before=_settle_all)


def _says_why_not(rank: int, reasons: Sequence[str]) -> bool:
    """Whether there are reasons why a step must be complete at its end, which the log has once."""
    for reason in reasons:
        if reason not in _said:
            _said.add(reason)
            log.warning(
                "rank %d: a GradientReducer has an optimizer, but waits for all gradients in each step: %s. (Reported once; "
                "docs/guide/gradients.md, steps that overlap)",
                rank,
                reason,
            )
    return bool(reasons)


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    """Of a parameter group, as they are now: a schedule changes them after the step."""
    return {
        key: value if isinstance(value, bool | int | float | str | None) else copy.deepcopy(value)
        for key, value in group.items()
        if key != "params"
    }


def _compiled() -> list[str]:
    """What has compiled code of this process, which then uses parameters without Python."""
    utils, scripts = sys.modules.get("torch._dynamo.utils"), sys.modules.get("torch.jit._recursive")
    dynamo, script = utils and utils.counters["frames"], scripts and scripts.concrete_type_store.type_store
    used = {"torch.compile was used": dynamo, "torch.jit.script was used": script}
    return [reason for reason, holds in used.items() if holds]


# What is pending has one of these types. (isinstance() takes longer: torch's class of a parameter answers in Python.)
_CLASSES = {PendingParameter, PendingGradient}
_Place = tuple[Callable[[], Deferral | None], int]
# Of the parameters and gradients that are pending, by their ids.
_places: dict[int, _Place] = {}
_alive: weakref.WeakSet[Deferral] = weakref.WeakSet()
_OF_TWO_STEPS = "Parameters are of two steps: go on from a checkpoint"
_said: set[str] = set()

_NAMES = "ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax Muon NAdam RAdam RMSprop Rprop SGD"
OPTIMIZERS = {AdamSGD, *(getattr(torch.optim, name) for name in _NAMES.split() if hasattr(torch.optim, name))}
"""Their steps treat each parameter by itself. (Some are not in every torch.)"""

_GET_GRAD = torch.Tensor.grad.__get__
_SET_GRAD = torch.Tensor.grad.__set__
_DELETE_GRAD = torch.Tensor.grad.__delete__
# What tells nothing of a tensor's values.
_PROPERTIES = """
    device dtype grad_fn is_cpu is_cuda is_leaf is_meta is_sparse itemsize layout nbytes ndim requires_grad retains_grad shape
"""
_METHODS = (
    "__len__ dim element_size is_complex is_contiguous is_floating_point nelement numel size storage_offset stride"
)
_WITHOUT_VALUES = {
    *(getattr(torch.Tensor, name).__get__ for name in _PROPERTIES.split()),
    *(getattr(torch.Tensor, name) for name in _METHODS.split()),
}
