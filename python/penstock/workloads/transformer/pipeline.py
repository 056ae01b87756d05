"""A pipeline of stages, one or more a rank, in the order of a schedule.

Stage s of all is rank s mod p's, as in Megatron-LM's interleaved schedule (Narayanan et al., SC '21, section 2.2). Schedules are
data (`penstock.profiling.schedules`), which tests check without ranks.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.profiling.schedules import Order, one_forward_one_backward
from penstock.workloads.transformer.model import Stage, widths
from penstock.workloads.transformer.shapes import Shape

__all__ = ["Pipeline"]


class Pipeline:
    """Runs the stages of this rank.

    Args:
        model: its shape.
        stages: of this rank, in the order of the model: stages r, r + p, ... of all for rank r of p. All are on one device.
        states: the shape (B, T, D) of each tensor between stages, for a micro-batch.
        order: the schedule.
    """

    def __init__(
        self,
        model: Shape,
        stages: Sequence[Stage],
        states: tuple[int, int, int],
        order: Order = one_forward_one_backward,
    ) -> None:
        self._own, self._states, self._order = stages, states, order
        self._device = next(stages[0].parameters()).device
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._widths = widths(model, len(stages) * self._ranks)
        # First and last: the weight that both have a copy of.
        ends = [0, self._ranks - 1]
        self._embedding = dist.new_group(ends, group_desc="EMBEDDING_GROUP")
        shared = {0: stages[0], self._ranks - 1: stages[-1]}.get(self._rank)
        self._shared = shared.shared_embedding() if shared is not None and self._ranks > 1 else None
        if self._shared is not None:
            with torch.no_grad():
                dist.broadcast(self._shared, 0, group=self._embedding)

    @property
    def model(self) -> nn.Module:
        """All stages of this rank."""
        return nn.ModuleList(self._own)

    def step(self, tokens: Sequence[Tensor], targets: Sequence[Tensor]) -> float:
        """Forward and backward of all micro-batches, each (B, T) on every rank; gradients are those of their mean loss.

        Returns: the mean loss on the last stage's rank, 0 on others. Blocking.
        """
        held: dict[int, collections.deque[tuple[list[Tensor], Tensor | list[Tensor]]]] = {}
        pending: list[dist.Work] = []
        sent: list[Tensor] = []
        total = 0.0
        for turn in self._order(self._rank, self._ranks, len(tokens)):
            stage = turn.stage * self._ranks + self._rank
            if turn.is_forward:
                given = [tokens[turn.batch]] if stage == 0 else self._receive(stage)
                made = self._own[turn.stage](given, targets[turn.batch])
                held.setdefault(stage, collections.deque()).append((given, made))
                if isinstance(made, Tensor):
                    total += made.item()
                else:
                    pending += self._send(made, stage + 1, sent)
                continue
            given, made = held[stage].popleft()
            if isinstance(made, Tensor):
                (made / len(tokens)).backward()
            else:
                torch.autograd.backward(made, self._receive(stage, is_gradient=True))
            if stage > 0:
                gradients = [each.grad if each.grad is not None else torch.zeros_like(each) for each in given]
                pending += self._send(gradients, stage - 1, sent, is_gradient=True)
        for work in pending:
            work.wait()
        if self._shared is not None:
            dist.all_reduce(self._shared.grad, group=self._embedding)
        return total / len(tokens)

    def _receive(self, stage: int, *, is_gradient: bool = False) -> list[Tensor]:
        """What a stage of this rank is sent: by the stage before it, or gradients by the one after it."""
        other, count = (stage + 1, self._widths[stage]) if is_gradient else (stage - 1, self._widths[stage - 1])
        found = [torch.empty(self._states, requires_grad=not is_gradient, device=self._device) for _ in range(count)]
        for each in found:
            dist.recv(each.detach(), other % self._ranks, tag=_tag(stage, is_gradient))
        return found

    def _send(
        self, tensors: Sequence[Tensor], stage: int, sent: list[Tensor], *, is_gradient: bool = False
    ) -> list[dist.Work]:
        """To a stage. ``sent`` keeps what is on its way."""
        leaving = [each.detach().contiguous() for each in tensors]
        sent += leaving
        works = [dist.isend(each, stage % self._ranks, tag=_tag(stage, is_gradient)) for each in leaving]
        return [work for work in works if work is not None]


def _tag(stage: int, is_gradient: bool) -> int:
    """Several stages of a rank may be sent something by the same rank, in another order than they take it."""
    return 2 * stage + is_gradient
