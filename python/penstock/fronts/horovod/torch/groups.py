"""Names of a distributed optimizer's parameters, and the groups in which they are reduced."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from penstock.fronts.horovod.common.process_sets import ProcessSet
from penstock.fronts.horovod.common.util import split_list
from penstock.fronts.horovod.torch.functions import broadcast_object

__all__ = ["check_groups", "group_parameters", "name_parameters"]


def name_parameters(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> dict[torch.Tensor, str]:
    """The name of each of the optimizer's parameters.

    Raises:
        ValueError: names are no names, twice there, or missing.
    """
    if named_parameters is None:
        named = [
            (f"allreduce.noname.{i}.{j}", parameter)
            for i, group in enumerate(optimizer.param_groups)
            for j, parameter in enumerate(group["params"])
        ]
    else:
        named = list(named_parameters)
    if any(not isinstance(one, tuple) for one in named):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    names = [name for name, _ in named]
    duplicates = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if duplicates:
        raise ValueError(
            f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(duplicates)}"
        )
    known = {id(parameter) for _, parameter in named}
    unnamed = [id(one) for group in optimizer.param_groups for one in group["params"] if id(one) not in known]
    if unnamed:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named. Python object ids: "
            + ", ".join(map(str, unnamed))
        )
    return {parameter: name for name, parameter in sorted(named, key=lambda one: one[0])}


def check_groups(groups: int | list[list[torch.Tensor]] | None) -> None:
    if groups is None:
        return
    if not (isinstance(groups, list) or groups > 0):
        raise ValueError("groups should be a non-negative integer or a list of list of torch.Tensor.")
    if isinstance(groups, list):
        seen = set()
        for parameter in (one for group in groups for one in group):
            if not isinstance(parameter, torch.Tensor):
                raise ValueError("groups must consist of torch.Tensor.")
            if id(parameter) in seen:
                raise ValueError("A parameter can only appear once in groups.")
            seen.add(id(parameter))


def group_parameters(
    parameters: list[torch.Tensor],
    groups: int | list[list[torch.Tensor]],
    names: dict[torch.Tensor, str],
    process_set: ProcessSet,
) -> list[tuple[torch.Tensor, ...]]:
    """The groups, in an order that is the first rank's on all ranks."""
    assert process_set.ranks is not None, "it is included, so it is known"
    order = broadcast_object(
        [names[one] for one in parameters], process_set.ranks[0], name="groups", process_set=process_set
    )
    ordered = sorted(parameters, key=lambda one: order.index(names[one]))
    if isinstance(groups, int):
        return [tuple(group) for group in split_list(ordered, groups) if group]
    wanted = {id(one) for one in parameters}
    made = [tuple(one for one in group if id(one) in wanted) for group in groups]
    grouped = {id(one) for group in made for one in group}
    return [group for group in made if group] + [(one,) for one in ordered if id(one) not in grouped]
