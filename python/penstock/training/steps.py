"""What optimizers step by: averages, and gradients that are not averaged yet."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping

import torch

__all__ = ["SHARED", "State", "States", "Steps", "state"]

State = tuple[int, int]
"""A value that changes when a gradient is replaced, or changed in place: its address and version."""
SHARED = -1
"""In the place of a version, while a pass makes other gradients: views of one buffer have one version, which each one changes."""


def state(gradient: torch.Tensor) -> State:
    return (gradient.data_ptr() if gradient.layout is torch.strided else 0), gradient._version


def _own_state(gradient: torch.Tensor) -> State:
    address, version = state(gradient)
    is_shared = address and gradient.untyped_storage().nbytes() != gradient.nbytes
    return address, SHARED if is_shared else version


class States:
    """States of gradients, by index. (A pair for each would be one more object that Python's collector follows.)"""

    __slots__ = ("addresses", "versions")

    def __init__(self) -> None:
        self.addresses: dict[int, int] = {}
        self.versions: dict[int, int] = {}

    def __setitem__(self, index: int, state: State) -> None:
        self.addresses[index], self.versions[index] = state

    def __contains__(self, index: int) -> bool:
        return index in self.addresses

    def __len__(self) -> int:
        return len(self.addresses)

    def get(self, index: int) -> State | None:
        address = self.addresses.get(index)
        return None if address is None else (address, self.versions[index])


class Steps:
    """The passes of a reducer, the averages that they have left, and the optimizers that have stepped by these."""

    def __init__(self) -> None:
        self.passes = 0
        """How many passes have made gradients that are to be averaged."""
        self.asked = -1
        """How many of them there had been after the last `GradientReducer.average`. (A script may step without an optimizer.)"""
        self.kept: dict[torch.nn.Parameter, State] = {}
        """Gradients that passes under no_sync have made and that are not averaged yet."""
        self.averages = States()
        """Averages, as they were delivered."""
        self.was_changed = False
        """Averages were changed between the last pass and its step."""
        self.was_late = False
        """The last average came within a step."""
        self.has_warned = False
        """A pass has raised, and that was reported."""
        self.stepped: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        """How many passes there had been at an optimizer's last step."""

    def keep(self, parameter: torch.nn.Parameter) -> None:
        """A pass has made a gradient that is not averaged now."""
        if parameter.grad is not None:  # an earlier hook may have used it up
            self.kept[parameter] = _own_state(parameter.grad)

    def is_stepped(self) -> bool:
        """Whether there was no pass since some optimizer's last step."""
        return not self.passes or self.passes in self.stepped.values()

    def changed_since_kept(self) -> torch.nn.Parameter | None:
        """The first parameter whose kept gradient was changed since. zero_grad() is no change."""
        for parameter, kept in self.kept.items():
            gradient = parameter.grad
            if gradient is not None and _own_state(gradient) != kept and gradient.count_nonzero():
                return parameter
        return None

    def are_delivered(
        self, parameters: Iterable[torch.nn.Parameter], index: Mapping[torch.nn.Parameter, int]
    ) -> bool | None:
        """Whether the averages of parameters are what was delivered; None if none was. The first stands for all: clipping changes
        all, and looking at 500 takes 0.3 ms."""
        averages = self.averages
        for one in parameters:
            delivered = averages.get(index.get(one, -1))
            if delivered is not None:
                return one.grad is not None and state(one.grad) == delivered
        return None
