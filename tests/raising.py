"""Backward passes that raise in the middle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["calls_back", "half_way"]


def calls_back(data: torch.Tensor, call: Callable[[], Any] | None) -> torch.Tensor:
    """The same values; on the way back, ``call`` is called before the gradient goes on."""
    return _CallsBack.apply(data, call)  # type: ignore[no-any-return]


def half_way() -> None:
    """Raise ArithmeticError."""
    raise ArithmeticError("half-way")


class _CallsBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, data: torch.Tensor, call: Callable[[], Any] | None) -> torch.Tensor:
        ctx.call = call
        return data.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.call is not None:
            ctx.call()
        return gradient, None
