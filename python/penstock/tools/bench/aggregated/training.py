"""``penstock bench aggregated --training``: what the demo's model learns through aggregators, beside what it learns with gloo.

Three trainings from the same start with the same batches, one after the other: DDP over gloo; DDP over gloo with each element of
the averaged gradients moved, up or down at random, by the most that the other two may lie apart in it; and DDP through
aggregators, on links that lose packets, one of which is killed (SIGKILL) in the middle of a backward pass and started again
later. Loss and kill change no bit of a sum (`faults`), so what is left is rounding: the first two curves show
how far the third may be from gloo's.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.cluster.deployment import MOST_BLOCK_BYTES
from penstock.tools.bench.aggregated.cluster import Cluster

WAYS = ("gloo", "bound", "int32")
"""``bound``: gloo's averages, moved by the bound."""


@dataclass(frozen=True)
class Outcome:
    """Three curves."""

    workers: int
    loss: float
    losses: dict[str, list[float]]
    """By way, each step's training loss in nats: the mean over the ranks."""
    struck: dict[str, Any]
    """The step in which an aggregator was killed, which one, and how often a rank began to pass it by, all ranks together."""

    def distance(self, way: str) -> float:
        """The largest distance from gloo's loss in any step, in nats."""
        return max(abs(one - gloo) for one, gloo in zip(self.losses[way], self.losses["gloo"], strict=True))

    @property
    def is_within(self) -> bool:
        """Whether the curve through aggregators is no further from gloo's than the one that was moved by the bound."""
        return self.distance("int32") <= self.distance("bound")

    def lines(self) -> list[str]:
        """For people."""
        steps = len(self.losses["gloo"])
        tenth = max(1, steps // 10)
        killed = (
            f"{self.struck['node']} killed in step {self.struck['step']}, passed by {self.struck['bypasses']} times"
        )
        verdict = "within" if self.is_within else "NOT within"
        return [
            f"char-gpt, {self.workers} workers, {steps} steps; int32: loss {self.loss:g} on every link, {killed}",
            *(
                f"  {way:6} first loss {losses[0]:.6f}, mean of the last {tenth} {statistics.fmean(losses[-tenth:]):.6f}, "
                f"largest distance from gloo {self.distance(way):.2g}"
                for way, losses in self.losses.items()
            ),
            f"  through aggregators is {verdict} the bound of gloo's",
        ]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**vars(self), "is_within": self.is_within, "distance": {way: self.distance(way) for way in WAYS}}


def measure(
    *, workers: int, loss: float, steps: int, batch: int, seed: int, rate_mbit: float, window: int, timeout_s: float
) -> Outcome:
    """Make a cluster, start its daemons, train.

    Raises:
        BenchError: a daemon or a rank failed or hung, with the end of what it said.
        TestbedUnavailable: no emulated cluster here.
    """
    with Cluster(workers, rate_mbit=rate_mbit) as cluster:
        # The bound is that of a block, whose length the deployment so names.
        options = {
            "deployment": cluster.deployment("int32", window, block_bytes=MOST_BLOCK_BYTES),
            "ways": WAYS,
            "steps": steps,
            "batch": batch,
            "seed": seed,
            "loss": loss,
            "block": MOST_BLOCK_BYTES // 4,
            # The aggregator of rank 0's rack.
            "node": "a0",
        }
        records = cluster.run("training_rank", options, what=f"training, {workers} workers", timeout_s=timeout_s)
    return summarise(records, workers, loss)


def summarise(records: Sequence[Sequence[dict[str, Any]]], workers: int, loss: float) -> Outcome:
    """What the ranks said, in numbers. Pure."""
    said = [{one["way"]: one for one in each if "way" in one} for each in records]
    losses = {
        way: [statistics.fmean(step) for step in zip(*(each[way]["losses"] for each in said), strict=True)]
        for way in WAYS
    }
    through = [each["int32"] for each in said]
    struck = {**through[0]["struck"], "bypasses": sum(one["bypasses"] for one in through)}
    return Outcome(workers, loss, losses, struck)
