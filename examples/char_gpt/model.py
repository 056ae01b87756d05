"""A character GPT: a decoder-only transformer in plain PyTorch modules, small enough to read in one sitting.

Shapes, as suffixes of tensor names:
    B  sequences in a batch          T  positions in a sequence       V  characters in the vocabulary
    D  width of the model            H  attention heads               K  width of one head, D / H
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """The shape of the model; the defaults make 2.7 million parameters."""

    vocabulary: int
    context: int = 64  # T, the longest sequence that the model can see
    layers: int = 6
    heads: int = 6
    width: int = 192  # D


class CharGPT(nn.Module):
    """Predicts the next character at every position of a sequence."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.token_embedding = nn.Embedding(config.vocabulary, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self._initialise(config)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of the next character (B, T, V) and their mean cross entropy in nats (a scalar)."""
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.token_embedding(tokens_BT) + self.position_embedding(positions_T)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV = self.head(self.final_norm(x_BTD))
        loss = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())
        return logits_BTV, loss

    def _initialise(self, config: GPTConfig) -> None:
        # As in GPT-2 (Radford et al. 2019, section 2.3): normal with 0.02, and the two layers of a block that write
        # into the residual stream are scaled down by the number of such writes, so that the stream's variance at
        # the last layer does not grow with depth.
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue  # Biases and layer norms keep PyTorch's own start.
            writes_residual = name.endswith(("attention.output.weight", "mlp.2.weight"))
            std = 0.02 / math.sqrt(2 * config.layers) if writes_residual else 0.02
            nn.init.normal_(parameter, std=std)


class Block(nn.Module):
    """Attention, then a two-layer perceptron; each reads a normalised copy of the residual stream and adds to it."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = CausalSelfAttention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
        )

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class CausalSelfAttention(nn.Module):
    """Every position mixes what it and the positions before it say; H heads do so side by side."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        if config.width % config.heads:
            raise ValueError(f"width {config.width} is not a multiple of heads {config.heads}")
        self.heads = config.heads
        self.query_key_value = nn.Linear(config.width, 3 * config.width)
        self.output = nn.Linear(config.width, config.width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        query_BHTK, key_BHTK, value_BHTK = (
            part_BTD.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part_BTD in self.query_key_value(x_BTD).chunk(3, dim=-1)
        )
        mixed_BHTK = F.scaled_dot_product_attention(query_BHTK, key_BHTK, value_BHTK, is_causal=True)
        return self.output(mixed_BHTK.transpose(1, 2).flatten(2))
