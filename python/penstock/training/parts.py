"""Steps of optimizers in parts: some parameters at a time, with the hyper-parameters of one moment and the same bits."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Mapping, Set
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from penstock.errors import Config as ConfigError
from penstock.training.optim import AdamSGD
from penstock.training.optimizer_steps import makes_part

__all__ = ["RecordedStep", "check"]


def check(optimizer: torch.optim.Optimizer) -> None:
    """Raise if an optimizer's step cannot be made in parts.

    Raises:
        penstock.errors.Config: it may compute with several parameters together, or it is differentiable.
    """
    kind = type(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer= takes optimizers of torch, not {kind.__name__}")
    if kind not in _BY_PARAMETER and not getattr(optimizer, "steps_by_parameter", False):
        known = ", ".join(sorted(one.__name__ for one in _BY_PARAMETER))
        raise ConfigError(
            f"optimizer=: {kind.__name__} may compute a parameter's step from others than its own gradient and state, and then "
            f"cannot step a few parameters at a time. These can: {known}. If this one can, set steps_by_parameter = True "
            "in its class; otherwise leave optimizer= out"
        )
    if optimizer.defaults.get("differentiable"):
        raise ConfigError("optimizer=: a differentiable step belongs to the graph of the script: leave optimizer= out")


class RecordedStep:
    """A call of an optimizer's ``step()`` that is still to be made: its parameters, and its hyper-parameters as they were."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, index: Mapping[torch.nn.Parameter, int], chosen: Set[int]
    ) -> None:
        """Record the step of the parameters whose indices are chosen."""
        self.optimizer = optimizer
        self._groups: list[tuple[dict[str, Any], list[tuple[int, torch.nn.Parameter]]]] = []
        for group in optimizer.param_groups:
            found = [(at, one) for one in group["params"] if (at := index.get(one, -1)) in chosen]
            if found:
                options = {name: _frozen(value) for name, value in group.items() if name != "params"}
                self._groups.append((options, found))
        self._step, self._codes = _step_of(type(optimizer))

    def make(self, indices: Set[int]) -> None:
        """Step these parameters by their ``grad``, outside of whatever context the calling thread is in: autocast, inference
        mode, modes of torch."""
        groups = [
            {**options, "params": [one for index, one in found if index in indices]} for options, found in self._groups
        ]
        before = self.optimizer.param_groups
        self.optimizer.param_groups = [group for group in groups if group["params"]]
        try:
            with makes_part(self.optimizer), _outside():
                self._step(self.optimizer)
        finally:
            self.optimizer.param_groups = before

    def is_making(self, frame: types.FrameType | None) -> bool:
        """Whether this code runs in ``step()`` of the optimizer itself, not in a hook of it."""
        for _ in range(_DEPTH):
            if frame is None:
                break
            if frame.f_code in self._codes and frame.f_locals.get("self") is self.optimizer:
                return True
            frame = frame.f_back
        return False


@contextlib.contextmanager
def _outside() -> Any:
    with contextlib.ExitStack() as ends:
        ends.enter_context(torch._C.DisableTorchFunction())
        ends.enter_context(torch.no_grad())
        if torch.is_inference_mode_enabled():
            ends.enter_context(torch.inference_mode(False))
        if torch.is_autocast_enabled("cpu"):
            ends.enter_context(torch.autocast("cpu", enabled=False))
        if torch._C._len_torch_dispatch_stack():
            ends.enter_context(_disable_current_modes())
        if torch.compiler.is_compiling():  # optimizers then compute in another way
            torch.compiler._is_compiling_flag = False
            ends.callback(setattr, torch.compiler, "_is_compiling_flag", True)
        yield


def _frozen(value: Any) -> Any:
    """A hyper-parameter, so that it stays as it is now."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _step_of(kind: type[torch.optim.Optimizer]) -> tuple[Callable[[Any], Any], set[types.CodeType]]:
    """``step`` of a class without torch's hooks around it, and the code that it consists of."""
    step: Any = kind.step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    codes, inner = {step.__code__}, step
    while hasattr(inner, "__wrapped__"):
        inner = inner.__wrapped__
        codes.add(inner.__code__)
    return step, codes


_NAMES = (
    *("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD"),
    *("Adafactor", "Muon"),
)
_BY_PARAMETER: set[type] = {AdamSGD, *(getattr(torch.optim, name) for name in _NAMES if hasattr(torch.optim, name))}
"""Exactly these classes: one that is derived from them may do something else. Each parameter's step depends on its own gradient
and state alone, also with ``foreach`` and ``fused``, which only make fewer calls."""
# Frames between the step and the code that reads a gradient: one or two in torch's optimizers.
_DEPTH = 8
