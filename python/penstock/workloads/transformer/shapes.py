"""What the models look like. Without torch, for whoever chooses and compares them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MODELS", "Shape", "layers_of"]


@dataclass(frozen=True)
class Shape:
    """What a model looks like."""

    kind: str
    """``decoder`` (GPT-2: causal), ``encoder`` (BERT) or ``both`` (T5: as many layers of each)."""
    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int
    source: str


MODELS = {
    "gpt2-medium": Shape("decoder", 24, 1024, 16, 50257, 1024, "table 1"),
    "gpt2-large": Shape("decoder", 36, 1280, 20, 50257, 1024, "table 1, data parallel"),
    "gpt2-large-40": Shape("decoder", 40, 1200, 24, 50257, 1024, "table 1, model parallel"),
    "bert-large": Shape("encoder", 24, 1024, 16, 30522, 512, "table 1"),
    "t5-large": Shape("both", 24, 1024, 16, 32128, 512, "table 1"),
    "gpt2-small": Shape("decoder", 8, 256, 4, 512, 64, "a sibling of 6.5 million parameters"),
    "gpt2-tiny": Shape("decoder", 4, 128, 4, 512, 64, "a sibling of 0.9 million parameters"),
    "bert-tiny": Shape("encoder", 4, 128, 4, 512, 64, "a sibling of 0.9 million parameters"),
    "t5-tiny": Shape("both", 2, 128, 4, 512, 64, "a sibling of 1.0 million parameters"),
}
"""By name. `Shape.source` says where it comes from: table 1 is the paper's."""


def layers_of(shape: Shape) -> list[str]:
    """The layers in order, by what they are; the embedding and the head stand at the ends."""
    if shape.kind == "both":
        return ["encoder"] * shape.layers + ["turn"] + ["decoder"] * shape.layers
    return [shape.kind] * shape.layers
