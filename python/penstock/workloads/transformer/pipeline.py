"""A pipeline of stages, one a rank: one forward, one backward (PipeDream-Flush; Megatron-LM, SC '21, section 2.2).

Stage s of p first runs p - s - 1 micro-batches forward, then by turns one forward and one backward, then what is left backward.
The schedule is data (`schedule`), which tests check without ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.workloads.transformer.model import Stage

__all__ = ["Pipeline", "Turn", "schedule"]


class Turn(NamedTuple):
    """Forward or backward of a micro-batch."""

    is_forward: bool
    batch: int


def schedule(at: int, stages: int, batches: int) -> Iterator[Turn]:
    """What stage ``at`` does, in order."""
    ahead = min(stages - at - 1, batches)
    for batch in range(ahead):
        yield Turn(True, batch)
    for batch in range(batches - ahead):
        yield Turn(True, batch + ahead)
        yield Turn(False, batch)
    for batch in range(batches - ahead, batches):
        yield Turn(False, batch)


class Pipeline:
    """Runs the stage of this rank; ranks are stages, in order.

    Args:
        stage: of this rank.
        widths: how many tensors leave each stage but the last (`model.widths`).
        shape: of each of these tensors, (B, T, D), for a micro-batch.
    """

    def __init__(self, stage: Stage, widths: Sequence[int], shape: tuple[int, int, int]) -> None:
        self._stage, self._shape = stage, shape
        self._at, self._stages = dist.get_rank(), dist.get_world_size()
        self._in = widths[self._at - 1] if self._at > 0 else 0
        # First and last: the weight that both have a copy of.
        ends = [0, self._stages - 1]
        self._embedding = dist.new_group(ends, group_desc="EMBEDDING_GROUP")
        shared = stage.shared_embedding() if self._stages > 1 else None
        if shared is not None:
            with torch.no_grad():
                dist.broadcast(shared, 0, group=self._embedding)
        self._shared = shared

    def step(self, tokens: Sequence[Tensor], targets: Sequence[Tensor]) -> float:
        """Forward and backward of all micro-batches, each (B, T) on every rank; gradients are those of their mean loss.

        Returns: the mean loss on the last stage, 0 on others. Blocking.
        """
        held: list[tuple[list[Tensor], Tensor | list[Tensor]]] = []
        pending: list[dist.Work] = []
        sent: list[Tensor] = []
        total = 0.0
        for turn in schedule(self._at, self._stages, len(tokens)):
            if turn.is_forward:
                given = [tokens[turn.batch]] if self._at == 0 else self._receive(self._at - 1, self._in)
                made = self._stage(given, targets[turn.batch])
                held.append((given, made))
                if isinstance(made, Tensor):
                    total += made.item()
                else:
                    pending += self._send(made, self._at + 1, sent)
                continue
            given, made = held.pop(0)
            if isinstance(made, Tensor):
                (made / len(tokens)).backward()
            else:
                torch.autograd.backward(made, self._receive(self._at + 1, len(made), is_gradient=True))
            if self._at > 0:
                gradients = [each.grad if each.grad is not None else torch.zeros_like(each) for each in given]
                pending += self._send(gradients, self._at - 1, sent)
        for work in pending:
            work.wait()
        if self._shared is not None:
            dist.all_reduce(self._shared.grad, group=self._embedding)
        return total / len(tokens)

    def _receive(self, peer: int, count: int, *, is_gradient: bool = False) -> list[Tensor]:
        found = [torch.empty(self._shape, requires_grad=not is_gradient) for _ in range(count)]
        for each in found:
            dist.recv(each.detach(), peer)
        return found

    def _send(self, tensors: Sequence[Tensor], peer: int, sent: list[Tensor]) -> list[dist.Work]:
        """``sent`` keeps what is on its way."""
        leaving = [each.detach().contiguous() for each in tensors]
        sent += leaving
        works = [dist.isend(each, peer) for each in leaving]
        return [work for work in works if work is not None]
