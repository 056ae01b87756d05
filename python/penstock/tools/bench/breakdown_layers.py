"""Tensor, expert and embedding parallel ranks whose times are known, for `penstock bench breakdown --layers`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypedDict

from penstock.profiling.breakdown import EMBEDDING

__all__ = ["EXPERT", "TENSOR", "Layers", "Notes", "Waited", "drawn", "rows"]

TENSOR, EXPERT = "tensor", "expert"


@dataclass(frozen=True)
class Layers:
    """A training: each layer computes, sums a tensor and deals another one out, forward and back; at its end the ranks
    sum the gradient of an embedding. Times in ms."""

    seed: int
    backend: str
    rate_mbit: float
    tensor_mebibytes: float
    expert_mebibytes: float
    embedding_mebibytes: float
    layers: int
    forward: tuple[float, float]
    """Of a layer, by rank."""
    backward: tuple[float, float]
    optimizer: float
    other: float
    steps: int = 120


class Waited(NamedTuple):
    """An operation that a rank stood in, on the machine's monotonic clock."""

    purpose: str
    issued_ns: int
    ended_ns: int


class Notes(TypedDict):
    """Of a step: how long phases took in ns, with the operations in them; and these, in order."""

    forward: int
    backward: int
    optimizer: int
    step: int
    in_forward: list[Waited]
    in_backward: list[Waited]
    in_other: list[Waited]


def drawn(seed: int) -> Layers:
    """The training of a seed."""
    draw = random.Random(f"layers {seed}")

    def both(least: float, most: float) -> tuple[float, float]:
        return draw.uniform(least, most), draw.uniform(least, most)

    return Layers(
        seed,
        draw.choice(["penstock", "gloo"]),
        draw.choice([200.0, 400.0, 800.0]),
        draw.uniform(0.1, 0.5),
        draw.uniform(0.1, 0.5),
        draw.uniform(0.5, 1),
        draw.randint(2, 4),
        both(8, 20),
        both(10, 30),
        draw.uniform(5, 15),
        draw.uniform(5, 15),
    )


def rows(noted: Sequence[Sequence[Notes]], rank: int) -> list[dict[str, float]]:
    """By step, what a rank noted of each category, and of each purpose in all, in ns. An operation waits until both have issued
    it."""
    found = []
    for own, other in zip(noted[rank], noted[1 - rank], strict=True):
        row = {category: float(own[category]) for category in ("forward", "backward", "optimizer", "step")}
        row |= dict.fromkeys(("loading", "clip", "evaluation", "checkpoint", "hidden wire", "hidden wait"), 0.0)
        row |= dict.fromkeys(("exposed wire", "exposed wait", TENSOR, EXPERT, EMBEDDING), 0.0)
        for phase, mine, theirs in (
            ("forward", own["in_forward"], other["in_forward"]),
            ("backward", own["in_backward"], other["in_backward"]),
            ("", own["in_other"], other["in_other"]),
        ):
            for (purpose, issued_ns, ended_ns), (_, other_ns, _) in zip(mine, theirs, strict=True):
                moves_ns = min(max(issued_ns, other_ns), ended_ns)
                row["exposed wait"] += moves_ns - issued_ns
                row["exposed wire"] += ended_ns - moves_ns
                row[purpose] += ended_ns - issued_ns
                if phase:
                    row[phase] -= ended_ns - issued_ns
        used = ("forward", "backward", "optimizer", "exposed wire", "exposed wait")
        row["other"] = row["step"] - sum(row[category] for category in used)
        found.append(row)
    return found
