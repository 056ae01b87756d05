"""What a script may be in when it uses a parameter, but not when it steps its optimizer: autocast, inference mode, modes that
watch or replace operations, transforms of `torch.func`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
import torch._functorch.pyfunctorch as functorch
import torch._ops as ops
import torch.utils._python_dispatch as dispatch

__all__ = ["in_force", "left"]


def in_force(device_types: Iterable[str]) -> list[str]:
    """Those of this thread, in words."""
    found = [f"autocast for {kind}" for kind in device_types if torch.is_autocast_enabled(kind)]
    if torch.is_inference_mode_enabled():
        found.append("inference mode")
    if torch._C._len_torch_dispatch_stack() + ops._len_torch_dispatch_stack_pre_dispatch():
        found.append("a dispatch mode")
    if torch._C._functorch.peek_interpreter_stack() is not None:
        found.append("a transform of torch.func")
    return found


@contextlib.contextmanager
def left(device_types: Iterable[str]) -> Iterator[None]:
    """A block in which none of them is in force on this thread."""
    with contextlib.ExitStack() as stack:
        if in_force(device_types):
            for kind in device_types:
                stack.enter_context(torch.autocast(kind, enabled=False))
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(dispatch._disable_current_modes())
            stack.enter_context(functorch.temporarily_clear_interpreter_stack())
        yield
