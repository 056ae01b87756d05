"""Parameters, optimizer states and objects, sent from one rank to all or from all to all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from penstock.fronts.horovod.common.process_sets import ProcessSet, global_process_set
from penstock.fronts.horovod.torch import handles, objects
from penstock.fronts.horovod.torch.mpi_ops import allgather_object, broadcast_, broadcast_async_, rank, synchronize

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Give all ranks the root's parameters, in place. Blocks.

    Args:
        params: ``model.state_dict()``, a list of tensors, or a list or iterator of names and tensors. Ranks' dicts may be in
            different orders; unnamed tensors must not be.
        root_rank: the rank that has them.

    Raises:
        ValueError: none of these, or a tensor that cannot be sent. Nothing was sent.
    """
    if isinstance(params, Mapping):
        named = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, (str, torch.Tensor)):
        named = [one if isinstance(one, tuple) else (None, one) for one in params]
    else:
        raise ValueError(f"invalid params of type: {type(params)}")
    late = []
    sent_as: list[tuple[str | None, torch.Tensor]] = []
    for name, tensor in named:
        if not isinstance(tensor, torch.Tensor):
            # A state dict's extra state.
            continue
        sent = tensor.detach()
        if not sent.is_contiguous():
            sent = sent.contiguous()
            late.append((tensor, sent))
        # All are checked before the first is sent.
        handles.check_tensor(sent)
        sent_as.append((name, sent))
    submitted: list[int] = []
    try:
        for name, sent in sent_as:
            submitted.append(broadcast_async_(sent, root_rank, name))
        for handle in submitted:
            synchronize(handle)
    except BaseException:
        handles.drop(submitted)
        raise
    with torch.no_grad():
        for tensor, sent in late:
            tensor.copy_(sent)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Give all ranks the root's optimizer state and options, as learning rates. Blocks.

    Other ranks then have state for the same parameters as the root, under the same names: what they lack is made, what the root
    does not have is dropped. Where the root has none at all, parameters get gradients of zeros. Horovod makes a state on the
    root as well, whose first step then counts as its second.

    Args:
        optimizer: any but LBFGS, distributed or not.
        root_rank: the rank that has the state.
        model: tells which parameters have sparse gradients, for optimizers that make their state from them.

    Raises:
        ValueError: the optimizer is LBFGS, whose state is nested.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    tensors, others = broadcast_object(_described(optimizer), root_rank, name="optimizer.state")
    if not tensors and not others:
        # There is nothing to send, so there is to be nothing: state that a rank has is of another life.
        optimizer.state.clear()
        _give_gradients(optimizer, model)
    elif rank() != root_rank:
        _shape_state(optimizer, tensors, others)
    parameters = _parameters(optimizer)
    broadcast_parameters(
        [(f"optimizer.{number}.{name}", optimizer.state[parameters[number]][name]) for number, name in tensors],
        root_rank,
    )
    _broadcast_options(optimizer, root_rank)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Send an object of the root to all ranks and return it. Blocks.

    Args:
        obj: anything that can be pickled; it counts on the root only.
        root_rank: the rank that has it.
        name: matches the operation between ranks. None: its count; Horovod takes the name of the object's type, and waits for
            ever where that differs between ranks.
        process_set: whose ranks take part.
    """
    own = rank() == root_rank
    content = objects.pickled(obj) if own else None
    length = torch.tensor([0 if content is None else content.numel()])
    broadcast_(length, root_rank, objects.part(name, "sz"), process_set)
    sent = torch.empty(int(length), dtype=torch.uint8) if content is None else content
    broadcast_(sent, root_rank, objects.part(name, "t"), process_set)
    return obj if own else objects.unpickled(sent)


@dataclass(frozen=True)
class _Tensor:
    """A tensor of an optimizer's state."""

    shape: torch.Size
    dtype: torch.dtype
    on_cpu: bool
    """Or where its parameter is."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Tensor:
        return cls(tensor.shape, tensor.dtype, tensor.device.type == "cpu")

    def make(self, parameter: torch.Tensor) -> torch.Tensor:
        """One like it, of zeros."""
        device = torch.device("cpu") if self.on_cpu else parameter.device
        if self.shape == parameter.shape:
            return torch.zeros_like(parameter, dtype=self.dtype, device=device, requires_grad=False)
        return torch.zeros(self.shape, dtype=self.dtype, device=device)


_Named = tuple[int, str]
"""A parameter's number, and the name of a part of its state."""


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _described(optimizer: torch.optim.Optimizer) -> tuple[dict[_Named, _Tensor], dict[_Named, Any]]:
    """The state: what its tensors are like, and everything else."""
    tensors: dict[_Named, _Tensor] = {}
    others: dict[_Named, Any] = {}
    for number, parameter in enumerate(_parameters(optimizer)):
        for name, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                tensors[number, name] = _Tensor.of(value)
            else:
                others[number, name] = value
    return tensors, others


def _shape_state(optimizer: torch.optim.Optimizer, tensors: dict[_Named, _Tensor], others: dict[_Named, Any]) -> None:
    """Make this the optimizer's state, but for what is in the tensors. Those that fit stay."""
    parameters = _parameters(optimizer)
    own = {parameter: optimizer.state.pop(parameter, {}) for parameter in parameters}
    for (number, name), wanted in tensors.items():
        parameter = parameters[number]
        tensor = own[parameter].get(name)
        fits = isinstance(tensor, torch.Tensor) and _Tensor.of(tensor) == wanted
        optimizer.state[parameter][name] = tensor if fits else wanted.make(parameter)
    for (number, name), value in others.items():
        optimizer.state[parameters[number]][name] = value


def _give_gradients(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> None:
    """Gradients of zeros, which Horovod leaves behind as well."""
    sparse = {
        id(parameter)
        for module in (model.modules() if model is not None else ())
        if isinstance(module, torch.nn.Embedding) and module.sparse
        for parameter in module.parameters()
    }
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                gradient = torch.zeros_like(parameter)
                is_sparse = isinstance(optimizer, torch.optim.SparseAdam) or (
                    isinstance(optimizer, torch.optim.SGD) and id(parameter) in sparse
                )
                parameter.grad = gradient.to_sparse() if is_sparse else gradient


def _broadcast_options(optimizer: torch.optim.Optimizer, root_rank: int) -> None:
    own = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    roots = broadcast_object(own, root_rank, name="optimizer.options")
    for group, options in zip(optimizer.param_groups, roots, strict=True):
        for key, value in options.items():
            mine = group.get(key)
            if isinstance(mine, torch.Tensor) and isinstance(value, torch.Tensor):
                mine.copy_(value)
            else:
                group[key] = value
