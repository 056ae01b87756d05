"""A pipeline of two stages whose times are known, for `penstock bench breakdown --pipeline`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from penstock.profiling.intervals import overlaps, union, without

__all__ = ["Notes", "Stages", "drawn", "rows"]


@dataclass(frozen=True)
class Stages:
    """A training: in each step all micro-batches go forward, and then back. Times in ms."""

    seed: int
    backend: str
    rate_mbit: float
    mebibytes: float
    """That a micro-batch sends each way."""
    micro_batches: int
    forward: tuple[float, float]
    """Of a micro-batch, by stage."""
    backward: tuple[float, float]
    optimizer: float
    other: float
    steps: int = 120


class Notes(TypedDict):
    """Of a step: how long phases took in ns; and moments on the machine's monotonic clock. The forward part is all from its first
    call to the first backward pass, without receives: what lies between calls is the loss, as far as the profile can tell."""

    forward: int
    backward: int
    optimizer: int
    step: int
    received: list[tuple[int, int, int]]
    """When each receive was issued, when the thread began to wait for it, and when that ended."""
    sent: list[int]
    """When each send was issued."""
    waited: list[tuple[int, int]]
    """When it stood in a wait for its sends."""


def drawn(seed: int) -> Stages:
    """The training of a seed."""
    draw = random.Random(f"stages {seed}")

    def both(least: float, most: float) -> tuple[float, float]:
        return draw.uniform(least, most), draw.uniform(least, most)

    return Stages(
        seed,
        draw.choice(["penstock", "gloo"]),
        draw.choice([200.0, 400.0, 800.0]),
        draw.uniform(0.1, 0.6),
        draw.randint(2, 4),
        both(8, 25),
        both(10, 40),
        draw.uniform(5, 15),
        draw.uniform(5, 15),
    )


def rows(noted: Sequence[Sequence[Notes]], rank: int) -> list[dict[str, float]]:
    """By step, what a stage noted of each category, in ns. A receive waits until its send is issued, and is on the wire then; a
    send is on the wire until it has been received, or the thread has waited for it."""
    found = []
    for own, other in zip(noted[rank], noted[1 - rank], strict=True):
        waits, wires = [], []
        for (issued, _, end), sent in zip(own["received"], other["sent"], strict=True):
            moves = min(max(issued, sent), end)
            waits.append((issued, moves, None))
            wires.append((moves, end, None))
        receives = union((start, end, None) for _, start, end in own["received"])
        blocked = union([*receives, *((start, end, None) for start, end in own["waited"])])
        # What still moves when the thread has waited for a send is the kernel's alone (gloo).
        until = max((end for _, end in own["waited"]), default=1 << 63)
        sends = [
            (sent, max(sent, min(end, until)), None)
            for sent, (_, _, end) in zip(own["sent"], other["received"], strict=True)
        ]
        moving = union([*wires, *sends])

        def length(pieces: Sequence[tuple[int, int, None]]) -> float:
            return float(sum(end - start for start, end, _ in pieces))

        def both(first: Sequence[tuple[int, int, None]], second: Sequence[tuple[int, int, None]]) -> float:
            return float(sum(end - start for start, end, _, _ in overlaps(first, second)))

        row = {category: float(own[category]) for category in ("forward", "backward", "optimizer", "step")}
        row |= dict.fromkeys(("loading", "clip", "evaluation", "checkpoint"), 0.0)
        row["exposed wait"] = both(union(waits), receives)
        row["exposed wire"] = both(union(wires), receives) + length(without(blocked, receives))
        row["other"] = 2 * row["step"] - sum(row.values())
        row["hidden wire"] = length(without(moving, blocked))
        row["hidden wait"] = length(without(without(union(waits), moving), blocked))
        found.append(row)
    return found
