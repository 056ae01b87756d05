"""Steps of torch's optimizers, as reducers see them."""

from __future__ import annotations

import functools
import itertools
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

__all__ = ["Stepped", "hook", "is_scaled", "is_stepping", "parameters", "searches_line"]


class Stepped(Protocol):
    """What averages the gradients that an optimizer steps by."""

    def _check_in_pass(self, optimizer: torch.optim.Optimizer) -> None: ...

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None: ...

    def _after_closure(self, optimizer: torch.optim.Optimizer, loss: Any) -> None: ...


def hook(alive: Mapping[int, Stepped]) -> None:
    """Tell reducers of all optimizers' steps. Calls after the first do nothing: torch keeps the one hook for ever, and offers no
    way to take it back while an optimizer steps.

    Args:
        alive: the reducers (weakly), in the order in which they were made, the same on all ranks: each may wait for other ranks.
    """
    if _hooks:
        return

    def before_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A class whose step() calls that of its base, hooks and all: the whole step was told.
        if _is_nested(optimizer):
            return None
        # The optimizer itself is the first of the arguments.
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        is_in_pass = torch._C._current_graph_task_id() != -1
        for reducer in list(alive.values()):
            if is_in_pass:
                reducer._check_in_pass(optimizer)
            elif closure is None:
                reducer._before_step(optimizer)
        if is_in_pass or not callable(closure):
            return None

        # The closure makes passes of its own, and the step follows.
        def follow(loss: Any) -> None:
            for reducer in list(alive.values()):
                reducer._after_closure(optimizer, loss)

        followed = _followed(closure, follow)
        return ((args[0], followed, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": followed})

    _hooks.append(register_optimizer_step_pre_hook(before_step))


def parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.nn.Parameter]:
    """All that an optimizer steps."""
    return (one for group in optimizer.param_groups for one in group["params"])


def searches_line(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the length of a step depends on losses: LBFGS with ``line_search_fn``."""
    return any(group.get("line_search_fn") for group in optimizer.param_groups)


def is_stepping(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this thread is within a step of an optimizer."""
    return next(_running(optimizer), None) is not None


def is_scaled() -> bool:
    """Whether a GradScaler makes the step that is about to begin. (It unscales gradients without a change of their version.)"""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code is not torch.amp.GradScaler.step.__code__:
        frame = frame.f_back
    return frame.f_code is torch.amp.GradScaler.step.__code__


def _is_nested(optimizer: torch.optim.Optimizer) -> bool:
    """In a hook of an optimizer's step: whether that is called by another step of the same optimizer."""
    return next(itertools.islice(_running(optimizer), 1, None), None) is not None


def _running(optimizer: torch.optim.Optimizer) -> Iterator[types.FrameType]:
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _HOOKED_STEP and frame.f_locals.get("self") is optimizer:
            yield frame
        frame = frame.f_back


def _followed(closure: Callable[..., Any], follow: Callable[[Any], None]) -> Callable[..., Any]:
    @functools.wraps(closure)
    def both(*args: Any, **kwargs: Any) -> Any:
        loss = closure(*args, **kwargs)
        follow(loss)
        return loss

    return both


_HOOKED_STEP = torch.optim.Optimizer.profile_hook_step(lambda optimizer: None).__code__
_hooks: list[Any] = []
