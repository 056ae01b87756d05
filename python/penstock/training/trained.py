"""Which parameters of a model a reducer averages."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Set
from typing import Any

import torch

from penstock.errors import Config as ConfigError
from penstock.torch.arguments import DTYPES, is_reduced, is_wrapper, no_memory

__all__ = ["Trained"]


class Trained:
    """The parameters that require a gradient, each once, in the order in which autograd nearly makes their gradients: from the
    last layer to the first.

    Args:
        model: a module, or its parameters. Only a module's sparse weights are known as such.
        ignored: parameters that are not to be averaged.
        with_sparse: whether sparse gradients are averaged. Otherwise they are known and left alone.

    Raises:
        penstock.errors.Config: there is none, or one is not on the CPU, of other tensors, or of a dtype that cannot be averaged.
    """

    dense: list[torch.nn.Parameter]
    """Those with dense gradients. A gradient's index is the place in this list."""
    names: list[str]
    """Of the dense ones."""
    index: dict[torch.nn.Parameter, int]
    sparse: list[torch.nn.Parameter]
    sparse_names: list[str]
    all: Set[torch.nn.Parameter]
    """Dense and sparse ones."""
    ids: frozenset[int]
    """Of all of them: quicker than the hashes of tensors."""
    frozen: list[torch.nn.Parameter]
    """Those that required no gradient."""
    listed: list[tuple[str, torch.nn.Parameter]]
    """All of the model's that are not ignored, in its order; "" is the name of one without."""

    def __init__(
        self,
        model: torch.nn.Module | Iterable[torch.nn.Parameter],
        ignored: Set[torch.nn.Parameter],
        *,
        with_sparse: bool,
    ) -> None:
        module = model if isinstance(model, torch.nn.Module) else None
        parameters = list(dict.fromkeys(model.parameters() if isinstance(model, torch.nn.Module) else model))
        named = _names(module)
        sparse = set() if module is None else _sparse_weights(module)
        trained = [one for one in reversed(parameters) if one.requires_grad and one not in ignored]
        if not trained:
            raise ConfigError("there is no parameter that requires a gradient")
        for parameter in trained:
            if parameter.device.type != "cpu":
                raise ConfigError(
                    f"a parameter lies on {parameter.device}; gradients are reduced on the CPU only. Use "
                    'DistributedDataParallel over init_process_group("penstock"), which stages CUDA tensors.'
                )
            if is_wrapper(parameter):
                raise ConfigError(f"a parameter {no_memory(parameter)}")
        self.dense = [one for one in trained if one not in sparse]
        self.names = [named.get(one, f"parameter {index}") for index, one in enumerate(self.dense)]
        for name, one in zip(self.names, self.dense, strict=True):
            if one.dtype not in DTYPES or not is_reduced("avg", DTYPES[one.dtype]):
                raise ConfigError(f"{name} is {str(one.dtype).removeprefix('torch.')}, which cannot be averaged")
        self.index = {one: index for index, one in enumerate(self.dense)}
        self.sparse = [one for one in trained if one in sparse and with_sparse]
        self.sparse_names = [named[one] for one in self.sparse]
        self.all = set(trained)
        self.ids = frozenset(map(id, trained))
        self.frozen = [one for one in parameters if not one.requires_grad]
        self._module = None if module is None else weakref.ref(module)
        self._joined: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[Any, list[torch.nn.Parameter]]]
        self._joined = weakref.WeakKeyDictionary()
        self.listed = [(named.get(one, ""), one) for one in parameters if one not in ignored]

    def owners(self) -> list[torch.nn.Parameter | torch.nn.Module]:
        """All of these parameters, and the module that they are parts of."""
        module = None if self._module is None else self._module()
        return [*self.all, *([] if module is None else [module])]

    def joined(self, optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
        """What an optimizer steps that is a part of the model, though not averaged: a new head, or parameters that have replaced
        others. Looks at the model only when the optimizer has other parameters than before."""
        ids = [tuple(map(id, group["params"])) for group in optimizer.param_groups]
        known = self._joined.get(optimizer)
        if known is None or known[0] != ids:
            parts = {id(one) for one in (*self._parts(), *self.frozen)} - self.ids
            found = [one for group in optimizer.param_groups for one in group["params"] if id(one) in parts]
            known = self._joined[optimizer] = ids, found
        return known[1]

    def check_apart(self, others: Callable[[], Iterable[Trained]]) -> None:
        """Raise if one of the parameters is also of another reducer: both would average its gradient at the same time, where it
        lies."""
        if self._name_in(others()) is not None:
            gc.collect()  # a reducer that nobody refers to any more, though Python has not noticed
        name = self._name_in(others())
        if name is not None:
            raise ConfigError(
                f"the gradient of {name} is averaged by another reducer, which was not closed: call its close() before another "
                "one is made, on all ranks"
            )

    def _name_in(self, others: Iterable[Trained]) -> str | None:
        taken = set().union(*(other.all for other in others))
        names = zip(self.dense + self.sparse, self.names + self.sparse_names, strict=True)
        return next((name for one, name in names if one in taken), None)

    def name_of_part(self, parameters: Iterable[torch.nn.Parameter]) -> str | None:
        """The name of the first of these that is a part of the model now, though it is not averaged; None if none is."""
        names = self._parts()
        for one in parameters:
            if one in names or any(one is other for other in self.frozen):
                return names.get(one, "a parameter")
        return None

    def _parts(self) -> dict[torch.nn.Parameter, str]:
        """The parameters that the model has now."""
        return _names(None if self._module is None else self._module())


def _names(module: torch.nn.Module | None) -> dict[torch.nn.Parameter, str]:
    return {} if module is None else {one: name for name, one in module.named_parameters()}


def _sparse_weights(model: torch.nn.Module) -> set[torch.nn.Parameter]:
    """The parameters whose gradients are sparse, as DistributedDataParallel finds them."""
    embeddings = (one for one in model.modules() if isinstance(one, torch.nn.Embedding | torch.nn.EmbeddingBag))
    return {parameter for one in embeddings if one.sparse for parameter in one.parameters(recurse=False)}
