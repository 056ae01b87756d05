"""The models, as a list of layers that a pipeline may cut anywhere.

Between layers there is a list of tensors: the hidden states, and, in the decoder of an encoder-decoder model, what the encoder
made.

Shapes, as suffixes of tensor names: B sequences in a batch, T positions, D width, H heads, K width of a head, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.workloads.transformer.shapes import Shape, layers_of

__all__ = ["Stage", "cut", "parameters_of", "widths"]

State: TypeAlias = list[Tensor]


class _Attention(nn.Module):
    """Multi-head attention to the same states, or to others."""

    def __init__(self, shape: Shape, *, is_causal: bool = False) -> None:
        super().__init__()
        self.heads, self.is_causal = shape.heads, is_causal
        self.query = nn.Linear(shape.width, shape.width)
        self.key_value = nn.Linear(shape.width, 2 * shape.width)
        self.output = nn.Linear(shape.width, shape.width)
        self.norm = nn.LayerNorm(shape.width)

    def forward(self, x_BTD: Tensor, memory_BTD: Tensor | None = None) -> Tensor:
        normal_BTD = self.norm(x_BTD)
        query_BHTK = self._heads(self.query(normal_BTD))
        key_BTD, value_BTD = self.key_value(normal_BTD if memory_BTD is None else memory_BTD).chunk(2, dim=-1)
        mixed_BHTK = F.scaled_dot_product_attention(
            query_BHTK, self._heads(key_BTD), self._heads(value_BTD), is_causal=self.is_causal
        )
        added: Tensor = x_BTD + self.output(mixed_BHTK.transpose(1, 2).flatten(2))
        return added

    def _heads(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class _Block(nn.Module):
    """A layer: attention, to the encoder's states too in the decoder of ``both``, and a perceptron four times as wide."""

    def __init__(self, shape: Shape, *, is_causal: bool, is_cross: bool) -> None:
        super().__init__()
        self.attention = _Attention(shape, is_causal=is_causal)
        self.cross = _Attention(shape) if is_cross else None
        self.norm = nn.LayerNorm(shape.width)
        self.mlp = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width), nn.GELU(), nn.Linear(4 * shape.width, shape.width)
        )

    def forward(self, state: State) -> State:
        x_BTD, *memory = state
        x_BTD = self.attention(x_BTD)
        if self.cross is not None:
            x_BTD = self.cross(x_BTD, memory[0])
        return [x_BTD + self.mlp(self.norm(x_BTD)), *memory]


class Embedding(nn.Module):
    """The first layer: tokens to states."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, state: State) -> State:
        tokens_BT, *memory = state
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        return [self.tokens(tokens_BT) + self.positions(positions_T), *memory]


class _Turn(Embedding):
    """Between encoder and decoder: what the encoder made becomes memory, and the decoder begins with its own tokens."""

    def forward(self, state: State) -> State:
        memory_BTD = state[0]
        # A stage far from the loader has no tokens: as many of one kind cost the same.
        tokens_BT = torch.zeros(memory_BTD.shape[:2], dtype=torch.int64, device=memory_BTD.device)
        return [*super().forward([tokens_BT]), memory_BTD]


class Head(nn.Module):
    """The last layer: states to the loss. Its weight is the embedding's, as in all three models; in a pipeline the two stages
    have a copy each, whose gradients they add (Megatron's embedding all-reduce)."""

    def __init__(self, shape: Shape, tied: nn.Embedding | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape.width)
        self.tokens = tied or nn.Embedding(shape.vocabulary, shape.width)
        if tied is None:
            nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, state: State, targets_BT: Tensor) -> Tensor:
        logits_BTV = self.norm(state[0]) @ self.tokens.weight.T
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def cut(shape: Shape, stages: int) -> list[range]:
    """Which layers each stage of a pipeline has: as many as the others, or one more.

    Raises:
        ValueError: more stages than layers.
    """
    count = len(layers_of(shape))
    if not 1 <= stages <= count:
        raise ValueError(f"{stages} stages: the model has {count} layers to be cut into")
    return [range(count * at // stages, count * (at + 1) // stages) for at in range(stages)]


def widths(shape: Shape, stages: int) -> list[int]:
    """How many tensors of (B, T, D) leave each stage but the last."""
    kinds = layers_of(shape)
    return [2 if "turn" in kinds[: part.stop] else 1 for part in cut(shape, stages)[:-1]]


class Stage(nn.Module):
    """A part of the model: stage ``at`` of ``stages``. The only stage is the whole model.

    Call it with a list of tensors, tokens of shape (B, T) for the first stage, else what the stage before returned; the last
    stage takes targets (B, T), too, and returns the loss, a scalar.
    """

    def __init__(self, shape: Shape, at: int = 0, stages: int = 1) -> None:
        super().__init__()
        kinds = layers_of(shape)
        self.embedding = Embedding(shape) if at == 0 else None
        self.blocks = nn.ModuleList(
            _Turn(shape)
            if kinds[number] == "turn"
            else _Block(shape, is_causal=kinds[number] == "decoder", is_cross="turn" in kinds[:number])
            for number in cut(shape, stages)[at]
        )
        tied = self.embedding.tokens if self.embedding is not None else None
        self.head = Head(shape, tied) if at == stages - 1 else None

    def forward(self, state: State, targets_BT: Tensor | None = None) -> State | Tensor:
        if self.embedding is not None:
            state = self.embedding(state)
        for block in self.blocks:
            state = block(state)
        if self.head is None:
            return state
        assert targets_BT is not None, "the last stage makes the loss"
        loss: Tensor = self.head(state, targets_BT)
        return loss

    def shared_embedding(self) -> nn.Parameter | None:
        """The weight that the first and the last stage share, if this is one of them."""
        for layer in (self.embedding, self.head):
            if layer is not None:
                weight: nn.Parameter = layer.tokens.weight
                return weight
        return None


def parameters_of(shape: Shape, stages: int = 1) -> Sequence[int]:
    """Parameters of each stage, without making them."""
    with torch.device("meta"):
        return [sum(each.numel() for each in Stage(shape, at, stages).parameters()) for at in range(stages)]
