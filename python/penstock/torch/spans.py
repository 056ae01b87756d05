"""The spans that torch's profiler shows for calls to the backend, and which tensors' shapes they carry."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch.autograd import profiler

from penstock.torch.work import Work

__all__ = ["first", "lists", "nothing", "second", "span"]

_Call: TypeAlias = Callable[..., Work]


def span(name: str, shown: Callable[..., Iterable[torch.Tensor]]) -> Callable[[_Call], _Call]:
    """Show a call to torch's profiler as ``penstock:name``, from the call to the end of its operations, with the shapes of the
    tensors that ``shown`` takes from its arguments, as gloo does. Coalesced calls are one span. Without a profiler this costs a
    look at a flag."""

    def decorate(call: _Call) -> _Call:
        @functools.wraps(call)
        def with_span(self: Any, *args: Any, **kwargs: Any) -> Work:
            if not profiler._is_profiler_enabled or (self._coalesced is not None and name != "coalesced"):
                return call(self, *args, **kwargs)
            span = torch.autograd._record_function_with_args_enter(f"penstock:{name}", *shown(*args, **kwargs))
            try:
                work = call(self, *args, **kwargs)
            except BaseException:
                torch.autograd._record_function_with_args_exit(span)
                raise
            work.end_span(span)
            return work

        return with_span

    return decorate


def first(tensors: Iterable[torch.Tensor], *_: Any, **__: Any) -> Iterable[torch.Tensor]:
    """Of a call whose first argument is a list of tensors: these."""
    return tensors


def second(_output: Any, given: Any, *_: Any, **__: Any) -> Iterable[torch.Tensor]:
    """Of a call whose second argument is its input, a tensor or a list of tensors: that."""
    return [given] if isinstance(given, torch.Tensor) else given


def lists(_outputs: Any, input_lists: Sequence[list[torch.Tensor]], *_: Any, **__: Any) -> Iterable[torch.Tensor]:
    """Of a call whose second argument is a list of lists: the first list."""
    return input_lists[0] if input_lists else []


def nothing(*_: Any, **__: Any) -> Iterable[torch.Tensor]:
    """No tensors: the call has none, or its span shows none."""
    return []
