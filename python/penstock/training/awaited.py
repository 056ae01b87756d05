"""Parameters that are future values: whoever uses one waits until it has its value.

While a parameter waits for the average of its gradient, or for the step by it, its class is `Awaited`. torch asks that class
before it does anything with the parameter that Python code has asked for (the "torch function" protocol). So nothing has to be
known of the order in which a model uses its parameters, or where: in the forward method of the module that owns it, as a tied
weight in another one, in a function, an average of weights, ``state_dict()``, ``clip_grad_norm_``. *Why not hooks of modules
alone?* ``nn.MultiheadAttention`` uses a weight of its part ``out_proj`` without calling it, and a script may use any parameter
outside of modules. Each would compute with the value of one step before, silently.

What torch does not ask about: native code that takes a parameter through a binding of its own, such as an extension in C++, and a
graph that ``torch.compile`` or ``torch.jit`` has made.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import torch

__all__ = ["Awaited", "Owner", "await_value", "end"]


class Owner(Protocol):
    """Who gives an awaited parameter its value."""

    def use(self, index: int, *, of_gradient: bool, overwrites: bool) -> None:
        """A parameter is about to be used. Blocks until that is right, and raises if it cannot become right.

        Args:
            of_gradient: its ``grad`` is, or all of it: where there is no way to tell.
            overwrites: it gets another value, whatever it has.
        """

    def hides_gradient(self, index: int, reader: types.FrameType) -> bool:
        """Whether the code that reads ``grad`` shall find none: an optimizer whose step is recorded, for one."""


class Awaited(torch.nn.Parameter):
    """The class of a parameter that waits for its value. `await_value` and `end` put a parameter into it and back."""

    @classmethod
    def __torch_function__(
        cls, func: Any, kinds: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _WITHOUT_VALUE:
            of_gradient = func in _OF_GRADIENT or len(kinds) > 1
            for one in list(_awaited((args, kwargs))):
                owner, index = _owner(one)
                if owner is None:
                    end(one)
                elif func == _READ_GRADIENT and owner.hides_gradient(index, sys._getframe(1)):
                    return None
                else:
                    owner.use(index, of_gradient=of_gradient, overwrites=func in _OVERWRITE and one is args[0])
            if next(_awaited((args, kwargs)), None) is None:
                return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    # These look at the class of the parameter itself.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _use_whole(self)
        return torch.nn.Parameter.__deepcopy__(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _use_whole(self)
        return torch.nn.Parameter.__reduce_ex__(self, protocol)


def await_value(parameter: torch.nn.Parameter, owner: weakref.ref[Any], index: int) -> None:
    """From now on the owner is asked before the parameter is used.

    Args:
        parameter: exactly of the class ``torch.nn.Parameter``.
        owner: an `Owner`; once it is gone, nobody is asked.
        index: by which the owner knows the parameter.
    """
    _owners[id(parameter)] = owner, index
    parameter.__class__ = Awaited


def end(parameter: torch.nn.Parameter) -> None:
    """The parameter is an ordinary one again."""
    _owners.pop(id(parameter), None)
    parameter.__class__ = torch.nn.Parameter


def _owner(parameter: torch.nn.Parameter) -> tuple[Owner | None, int]:
    found = _owners.get(id(parameter))
    return (None, -1) if found is None else (found[0](), found[1])


def _use_whole(parameter: torch.nn.Parameter) -> None:
    owner, index = _owner(parameter)
    if owner is None:
        end(parameter)
    else:
        owner.use(index, of_gradient=True, overwrites=False)


def _awaited(value: Any) -> Iterator[Awaited]:
    """Those in the arguments of a call."""
    if type(value) is Awaited:
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _awaited(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _awaited(each)


# By the parameters' ids. An entry lasts as long as its parameter is awaited.
_owners: dict[int, tuple[weakref.ref[Any], int]] = {}

_Tensor = torch.Tensor
_READ_GRADIENT = _Tensor.grad.__get__  # type: ignore[attr-defined]
_OF_GRADIENT = {
    _READ_GRADIENT,
    _Tensor.grad.__set__,  # type: ignore[attr-defined]
    _Tensor.grad.__delete__,  # type: ignore[attr-defined]
}
_OVERWRITE = {_Tensor.copy_, _Tensor.data.__set__}  # type: ignore[attr-defined]
_ATTRIBUTES = (
    "shape",
    "dtype",
    "device",
    "layout",
    "ndim",
    "requires_grad",
    "is_leaf",
    "is_sparse",
    "is_cpu",
    "is_cuda",
    "is_meta",
)
_WITHOUT_VALUE = {
    *(getattr(_Tensor, name).__get__ for name in (*_ATTRIBUTES, "grad_fn")),
    *(_Tensor.size, _Tensor.numel, _Tensor.dim, _Tensor.stride, _Tensor.element_size, _Tensor.is_floating_point),
    *(_Tensor.register_hook, _Tensor.register_post_accumulate_grad_hook),
}
"""What tells nothing of a parameter's value. Scripts ask ``next(model.parameters()).device`` before they use any."""
