"""The state of a training in torch."""

from __future__ import annotations

import copy
from typing import Any

import torch

from penstock.fronts.horovod.common.elastic import ObjectState
from penstock.fronts.horovod.torch.elastic.sampler import ElasticSampler
from penstock.fronts.horovod.torch.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from penstock.fronts.horovod.torch.mpi_ops import rank

__all__ = [
    "ModelStateHandler",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "set_handler_registry",
]


class TorchState(ObjectState):
    """Models, optimizers, samplers and other objects, as attributes.

    Args:
        model: a module, if there is one.
        optimizer: an optimizer, distributed or not, if there is one.
        kwargs: more of either, samplers, learning rate schedules and whatever else has a ``state_dict``, and anything that can
            be copied and pickled.
    """

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        kwargs.update(model=model, optimizer=optimizer)
        handlers = {name: _handler(value) for name, value in kwargs.items()}
        self._handlers: dict[str, StateHandler] = {name: one for name, one in handlers.items() if one is not None}
        for name, handler in self._handlers.items():
            setattr(self, name, handler.value)
        others = {name: value for name, value in kwargs.items() if name not in self._handlers}
        super().__init__(bcast_object=broadcast_object, get_rank=rank, **others)

    def save(self) -> None:
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(self, name) and name in self._handlers:
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)


class StateHandler:
    """Saves, restores and synchronises one attribute; derive from it for a type of your own."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Keep a copy in memory."""
        raise NotImplementedError(f"{type(self).__name__} must say how to save")

    def restore(self) -> None:
        """Go back to the last copy."""
        raise NotImplementedError(f"{type(self).__name__} must say how to restore")

    def sync(self) -> None:
        """Give rank 0's value to all ranks."""
        raise NotImplementedError(f"{type(self).__name__} must say how to synchronise")

    def set_value(self, value: Any) -> None:
        self.value = value
        self.save()


class _CopyOfStateDict(StateHandler):
    """For what has ``state_dict`` and ``load_state_dict``."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(copy.deepcopy(self._saved))


class ModelStateHandler(_CopyOfStateDict):
    """Parameters and buffers of a module."""

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)
        # What all ranks have now is what a failure before the first commit goes back to.
        self.save()


class OptimizerStateHandler(_CopyOfStateDict):
    """State and options of an optimizer."""

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)
        self.save()


class SamplerStateHandler(_CopyOfStateDict):
    """How far an `ElasticSampler`, a learning rate schedule or a gradient scaler has come."""

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), name=type(self.value).__name__))
        self.save()


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Which handler serves which type, the first that fits."""
    return _registry


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Replace it."""
    global _registry
    _registry = registry


def _handler(value: Any) -> StateHandler | None:
    for kind, handler in _registry:
        if isinstance(value, kind):
            return handler(value)
    # A copy of the object itself would refer to copies of what it drives: a schedule to an optimizer that steps nothing.
    return SamplerStateHandler(value) if hasattr(value, "load_state_dict") and hasattr(value, "state_dict") else None


_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]
