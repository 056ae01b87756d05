"""Steps of torch's optimizers, as reducers see them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

__all__ = ["Stepped", "hook", "is_scaled", "parameters"]


class Stepped(Protocol):
    """What averages the gradients that an optimizer steps by."""

    def _check_in_pass(self, optimizer: torch.optim.Optimizer) -> None: ...

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None: ...


def hook(alive: Mapping[int, Stepped]) -> None:
    """Tell reducers of all optimizers' steps. Calls after the first do nothing: torch keeps the one hook for ever, and offers no
    way to take it back while an optimizer steps.

    Args:
        alive: the reducers (weakly), in the order in which they were made, the same on all ranks: each may wait for other ranks.
    """
    if _hooks:
        return

    def before_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # The optimizer itself is the first of the arguments.
        has_closure = (len(args) > 1 and args[1] is not None) or kwargs.get("closure") is not None
        is_in_pass = torch._C._current_graph_task_id() != -1
        for reducer in list(alive.values()):
            if is_in_pass:
                reducer._check_in_pass(optimizer)
            elif not has_closure:  # a closure makes passes of its own
                reducer._before_step(optimizer)

    _hooks.append(register_optimizer_step_pre_hook(before_step))


def parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.nn.Parameter]:
    """All that an optimizer steps."""
    return (one for group in optimizer.param_groups for one in group["params"])


def is_scaled() -> bool:
    """Whether a GradScaler makes the step that is about to begin. (It unscales gradients without a change of their version.)"""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code is not torch.amp.GradScaler.step.__code__:
        frame = frame.f_back
    return frame.f_code is torch.amp.GradScaler.step.__code__


_hooks: list[Any] = []
