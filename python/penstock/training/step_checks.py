"""What a reducer does when an optimizer is about to step: gradients that are not averaged yet are averaged first, or refused."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Set
from typing import Any

import torch

from penstock.errors import Config as ConfigError
from penstock.runtime.groups import Membership
from penstock.training import optimizer_steps
from penstock.training.checks import PassChecks
from penstock.training.deferral import Deferral
from penstock.training.passes import BackwardPass
from penstock.training.steps import Steps, state
from penstock.training.trained import Trained

__all__ = ["CALL_AVERAGE", "StepChecks"]


class StepChecks(abc.ABC):
    """The part of `penstock.training.gradients.GradientReducer` that `penstock.training.optimizer_steps` calls."""

    _trained: Trained
    _steps: Steps
    _pass: BackwardPass | None
    _checks: PassChecks
    _deferral: Deferral | None
    _buckets: Membership

    @abc.abstractmethod
    def _synchronises(self) -> bool:
        """Whether gradients that are made now are to be averaged."""

    @abc.abstractmethod
    def _average_rest(self) -> bool:
        """Average what is left; whether some rank had a gradient."""

    @abc.abstractmethod
    def _all_averaged(self) -> list[Set[torch.nn.Parameter]]:
        """What each reducer of this process averages."""

    def _check_in_pass(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if an optimizer steps in the middle of a pass (in a hook) by gradients that are being averaged."""
        submitted = self._pass.handed if self._pass is not None else {}
        for one in optimizer_steps.parameters(optimizer):
            index = self._trained.index.get(one)
            if index is not None and (index in submitted or self._is_to_come(index, one.grad)):
                raise ConfigError(
                    f"rank {self._buckets.rank}: an optimizer steps {self._trained.names[index]} within the backward pass, "
                    "when its gradient is not averaged yet. Step after backward()"
                )

    def _is_to_come(self, index: int, gradient: torch.Tensor | None) -> bool:
        """Whether a gradient is not what the last pass has delivered: a hook that was registered before this reducer's sees it
        first."""
        if gradient is None or not self._synchronises():
            return False
        delivered = self._steps.averages.get(index)
        return delivered is None or delivered[0] != state(gradient)[0]

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step. If it steps parameters of this reducer outside of no_sync, average what is not averaged
        yet."""
        steps, trained = self._steps, self._trained
        stepped = steps.stepped.get(optimizer)
        if stepped is None and trained.ids.isdisjoint(map(id, optimizer_steps.parameters(optimizer))):
            if self._synchronises():
                self._check_left_out(trained.joined(optimizer))
            return
        if self._synchronises():
            for group in optimizer.param_groups:
                if not trained.ids.issuperset(map(id, group["params"])):
                    self._check_left_out(one for one in group["params"] if one not in trained.all)
            is_pending = self._deferral is not None and self._deferral.is_pending()
            are_delivered = is_pending or steps.are_delivered(optimizer_steps.parameters(optimizer), trained.index)
            if self._lacks_average(
                (stepped or 0) == steps.passes, optimizer_steps.parameters(optimizer), bool(are_delivered)
            ):
                if optimizer_steps.is_scaled():
                    raise ConfigError(
                        f"rank {self._buckets.rank}: GradScaler.step() makes a step whose gradients are not averaged, and has "
                        f"unscaled and checked this rank's own: other ranks may skip the step. {CALL_AVERAGE}"
                    )
                is_late = steps.was_late = self._average_rest()
            else:
                is_late, steps.was_late = steps.was_late, False
                steps.was_changed = are_delivered is False
            if is_late and steps.was_changed:
                raise ConfigError(
                    f"rank {self._buckets.rank}: gradients were averaged within optimizer.step() in this step or the one before, "
                    "because no backward pass outside no_sync reached a parameter, and this script changes averages before it "
                    f"steps (by clip_grad_norm_, for one): other ranks did. {CALL_AVERAGE}"
                )
        steps.stepped[optimizer] = steps.passes
        if self._deferral is not None and self._deferral.optimizer is optimizer:
            self._deferral.step()

    def _after_closure(self, optimizer: torch.optim.Optimizer, loss: Any) -> None:
        """An optimizer's closure has made the passes of its step."""
        if self._synchronises():
            self._check_left_out(self._trained.joined(optimizer))
            kept = self._steps.kept
            if kept and any(one in kept and one.grad is not None for one in optimizer_steps.parameters(optimizer)):
                raise ConfigError(
                    f"rank {self._buckets.rank}: after the closure of optimizer.step(), gradients of passes under no_sync are "
                    f"not averaged. Make the closure's last pass outside no_sync. {CALL_AVERAGE}"
                )
            # Other ranks need not step an optimizer that has none of these parameters.
            is_ours = not self._trained.ids.isdisjoint(map(id, optimizer_steps.parameters(optimizer)))
            if is_ours and optimizer_steps.searches_line(optimizer) and self._checks.differ(float(loss)):
                raise ConfigError(
                    f"{type(optimizer).__name__} with line_search_fn takes steps by the loss, and ranks have different ones "
                    f"(rank {self._buckets.rank}: {float(loss)}): they would part. Let the closure return the ranks' average"
                )

    def _lacks_average(
        self, has_stepped: bool, parameters: Iterable[torch.nn.Parameter], are_delivered: bool = False
    ) -> bool:
        """Whether gradients must be averaged before these parameters are stepped.

        Args:
            has_stepped: no pass was averaged since the last step: this step's passes have reached no parameter, though other
                ranks' may have, and wait for this rank.
            are_delivered: there are averages.
        """
        kept = self._steps.kept
        if has_stepped or (kept and any(one in kept for one in parameters)):
            return True
        # Also where a step was left out: its averages were dropped, and no pass has made others.
        return not are_delivered and all(one.grad is None for one in self._trained.all)

    def _check_left_out(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Raise if one of these, which this reducer does not average, has a gradient: the model was unfrozen, or it grew, and
        each rank would step it by a gradient of its own."""
        found = [one for one in parameters if one.requires_grad and one.grad is not None]
        averaged = self._all_averaged() if found else []
        found = [one for one in found if not any(one in theirs for theirs in averaged)]
        name = self._trained.name_of_part(found) if found else None
        if name is not None:
            raise ConfigError(
                f"rank {self._buckets.rank}: the gradient of {name} is not averaged: the parameter "
                "required no gradient, or was no part of the model, when the reducer was made. After a model is unfrozen or "
                "grows, close() its reducer and make another one, on all ranks"
            )


CALL_AVERAGE = (
    "Call GradientReducer.average() on all ranks, after the last backward pass of a step and before what changes gradients "
    "(docs/guide/gradients.md)."
)
