"""``penstock bench aggregated --accuracy``: how accurate models become through aggregators, which add integers, beside gloo.

InArt's appendix B.4 quotes what integers in the network cost: 1.54, 1.60 and 1.05 % of accuracy for an LSTM, VGG19 and ResNet-50.
Here small models of the three kinds are trained (`accuracy_rank`) from several seeds, once with gloo's float32 sums and once
with each format of blocks, on the same batches, and judged on examples that they have not seen.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.tools.bench.aggregated.cluster import Cluster

MODELS = ("lstm", "vgg", "resnet")
WAYS = ("gloo", "int32", "int16")
IN_THE_PAPER = {"lstm": 0.0154, "vgg": 0.0160, "resnet": 0.0105}


@dataclass(frozen=True)
class Outcome:
    """One model."""

    model: str
    workers: int
    steps: int
    examples: int
    """That accuracy is measured on."""
    accuracies: Mapping[str, Sequence[float]]
    """By way, for each seed: the share of examples that are predicted right."""

    def lost(self, way: str) -> list[float]:
        """By how much the accuracy is lower than gloo's, for each seed."""
        return [gloo - one for gloo, one in zip(self.accuracies["gloo"], self.accuracies[way], strict=True)]

    @property
    def noise(self) -> float:
        """The standard deviation of gloo's own accuracies over seeds; 0 with one."""
        known = self.accuracies["gloo"]
        return statistics.stdev(known) if len(known) > 1 else 0.0

    def lines(self) -> list[str]:
        """For people."""
        seeds = len(self.accuracies["gloo"])
        head = f"{self.model}, {self.workers} workers, {self.steps} steps, {seeds} seeds, {self.examples} examples"
        lines = [f"{head}; the paper's loss of accuracy: {IN_THE_PAPER[self.model]:.2%}"]
        for way, found in self.accuracies.items():
            line = f"  {way:6} accuracy {statistics.fmean(found):.2%}"
            if way == "gloo":
                line += f", standard deviation {self.noise:.2%}"
            else:
                lost = self.lost(way)
                line += f", lost {statistics.fmean(lost):+.2%} (each: {', '.join(f'{one:+.2%}' for one in lost)})"
            lines.append(line)
        return lines

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**vars(self), "lost": {way: self.lost(way) for way in WAYS}, "paper": IN_THE_PAPER[self.model]}


def measure(
    *,
    workers: int,
    model: str,
    steps: int,
    seeds: Sequence[int],
    images: str | None,
    rate_mbit: float,
    window: int,
    timeout_s: float,
) -> Outcome:
    """Make a cluster, start its daemons, train.

    Raises:
        BenchError: a daemon or a rank failed or hung, with the end of what it said.
        TestbedUnavailable: no emulated cluster here.
    """
    with Cluster(workers, rate_mbit=rate_mbit) as cluster:
        formats = {way: cluster.deployment(way, window, name=way) for way in WAYS if way != "gloo"}
        options = {"model": model, "steps": steps, "seeds": list(seeds), "images": images, "deployments": formats}
        records = cluster.run("accuracy_rank", options, what=f"accuracy of {model}", timeout_s=timeout_s)
    return summarise(records[0], model, workers, steps)


def summarise(said: Sequence[Mapping[str, Any]], model: str, workers: int, steps: int) -> Outcome:
    """What the first rank said, in numbers. Pure."""
    found = [one for one in said if "accuracy" in one]
    return Outcome(
        model,
        workers,
        steps,
        found[0]["examples"],
        {way: [one["accuracy"] for one in found if one["way"] == way] for way in WAYS},
    )
