"""Parameters, optimizer states and objects, sent from one rank to all or from all to all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from penstock.fronts.horovod.common.process_sets import ProcessSet, global_process_set
from penstock.fronts.horovod.torch import objects
from penstock.fronts.horovod.torch.mpi_ops import allgather_object, broadcast_, broadcast_async_, rank, synchronize

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Give all ranks the root's parameters, in place. Blocks.

    Args:
        params: ``model.state_dict()``, a list of tensors, or a list or iterator of names and tensors. Ranks' dicts may be in
            different orders; unnamed tensors must not be.
        root_rank: the rank that has them.

    Raises:
        ValueError: none of these.
    """
    if isinstance(params, Mapping):
        named = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, (str, torch.Tensor)):
        named = [one if isinstance(one, tuple) else (None, one) for one in params]
    else:
        raise ValueError(f"invalid params of type: {type(params)}")
    late = []
    handles = []
    for name, tensor in named:
        if not isinstance(tensor, torch.Tensor):
            # A state dict's extra state.
            continue
        sent = tensor.detach()
        if not sent.is_contiguous():
            sent = sent.contiguous()
            late.append((tensor, sent))
        handles.append(broadcast_async_(sent, root_rank, name))
    for handle in handles:
        synchronize(handle)
    with torch.no_grad():
        for tensor, sent in late:
            tensor.copy_(sent)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Give all ranks the root's optimizer state and options, as learning rates. Blocks.

    An optimizer without state, on another rank than the root, gets its tensors from a step with gradients of zeros; parameters
    stay as they are. Horovod makes a state on the root as well, whose first step then counts as its second.

    Args:
        optimizer: any but LBFGS, distributed or not.
        root_rank: the rank that has the state.
        model: tells which parameters have sparse gradients, for optimizers that make their state from them.

    Raises:
        ValueError: the optimizer is LBFGS, whose state is nested.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    filled = broadcast_object(bool(optimizer.state_dict()["state"]), root_rank, name="optimizer.filled")
    if not filled:
        # There is nothing to send, so there is to be nothing: state that a rank has is of another life.
        optimizer.state.clear()
        _give_gradients(optimizer, model)
    elif not optimizer.state_dict()["state"]:
        _make_state(optimizer, model)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    tensors: list[tuple[str, torch.Tensor]] = []
    others: dict[tuple[int, str], Any] = {}
    for number, parameter in enumerate(parameters):
        for name, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                tensors.append((f"optimizer.{number}.{name}", value))
            else:
                others[number, name] = value
    broadcast_parameters(tensors, root_rank)
    for (number, name), value in broadcast_object(others, root_rank, name="optimizer.state").items():
        optimizer.state[parameters[number]][name] = value
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


def _make_state(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> None:
    """Make the tensors of the state, for the root's to be copied into. The parameters stay as they are."""
    _give_gradients(optimizer, model)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    before = [parameter.detach().clone() for parameter in parameters]
    # A distributed optimizer's step would wait for all ranks, and not all of them have to make a state.
    getattr(optimizer, "_local_step", optimizer.step)()
    with torch.no_grad():
        for parameter, value in zip(parameters, before, strict=True):
            # Weight decay moves parameters even without gradients.
            parameter.copy_(value)


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
