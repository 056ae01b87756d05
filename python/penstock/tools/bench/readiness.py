"""``penstock bench readiness``: the cost of agreeing on which gradients all ranks have, and how it is spread over ranks.

A round begins for good when the last rank joins it, and is over when the last one has its answer. Ranks on one machine share a
clock, so that both moments are known. Rounds run beside the backward pass: their seconds together are the most that a step can
lose to them. The last one of a step begins when the pass has ended: it is what a step loses for certain.

What a step loses in fact is measured beside that: by turns with the ordinary reducer trains one that asks no other rank
(`readiness_rank.ToldReducer`), in the same processes and on an equal model. It is right for this model alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.tools.bench.launcher import BenchError
from penstock.tools.bench.program import run_program
from penstock.tools.testbed.cluster import Loopback, Testbed


@dataclass(frozen=True)
class Outcome:
    """A finished run. Seconds are medians."""

    ranks: int
    tensors: int
    step_s: float
    """Of the slowest rank."""
    rounds: float
    """A step."""
    round_s: float
    """From the last rank's joining to the last rank's answer."""
    last_s: float
    """The same for the last round of each step."""
    told_s: float
    """A step of the slowest rank where nothing is agreed on."""
    buckets: float
    """A step."""
    told_buckets: float
    """A step, where nothing is agreed on."""
    turn_costs: list[float]
    """`cost` by turn."""
    sent: list[int]
    """Bytes by rank, for gradients of one element."""
    received: list[int]

    @property
    def share(self) -> float:
        """Of a step, if nothing of the rounds were hidden behind the backward pass."""
        return self.rounds * self.round_s / self.step_s

    @property
    def last_share(self) -> float:
        """Of a step, of the round that nothing hides."""
        return self.last_s / self.step_s

    @property
    def cost(self) -> float:
        """Of a step, what it lasts longer than one where nothing is agreed on. Below 0: less than the noise."""
        return _longer(self.step_s, self.told_s)

    @property
    def imbalance(self) -> float:
        """The bytes of the busiest rank over the mean."""
        return max(max(each) / statistics.fmean(each) for each in (self.sent, self.received))

    def lines(self) -> list[str]:
        """For people."""
        return [
            f"{self.ranks} ranks, {self.tensors} gradients: {1e3 * self.step_s:.1f} ms and {self.rounds:.1f} rounds a step",
            f"a round ends {1e3 * self.round_s:.2f} ms after the last rank has joined it",
            f"all rounds together: {self.share:.1%} of the step, if nothing of them is hidden",
            f"the one that ends the pass, which nothing hides: {1e3 * self.last_s:.2f} ms, {self.last_share:.1%} of the step",
            f"with nothing to agree on, the order being told beforehand: {1e3 * self.told_s:.1f} ms a step; agreeing takes "
            f"{1e3 * (self.step_s - self.told_s):+.1f} ms, {self.cost:+.1%} of the step (by turn {min(self.turn_costs):+.1%} to "
            f"{max(self.turn_costs):+.1%}; {self.buckets:.1f} buckets a step, and {self.told_buckets:.1f} without)",
            f"the busiest rank sends or receives {self.imbalance:.2f} times the mean",
        ]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        shares = {"share": self.share, "last_share": self.last_share, "cost": self.cost}
        return {**vars(self), **shares, "imbalance": self.imbalance}


def measure(
    bed: Testbed | Loopback,
    *,
    ranks: int,
    tensors: int,
    width: int,
    batch: int,
    bucket_bytes: int,
    turns: int,
    steps: int,
    timeout_s: float,
) -> Outcome:
    """Train a chain of linear layers with ``tensors`` parameters on the hosts of ``bed``.

    Raises:
        BenchError: a rank failed or hung, with the end of what it said.
    """
    options = {
        "tensors": tensors,
        "width": width,
        "batch": batch,
        "bucket_bytes": bucket_bytes,
        "turns": turns,
        "steps": steps,
    }
    records = run_program(bed, "readiness_rank", options, what="readiness", ranks=ranks, timeout_s=timeout_s)
    return summarise(records, tensors)


def summarise(records: Sequence[Sequence[dict[str, Any]]], tensors: int) -> Outcome:
    """What the ranks said, in numbers. Pure."""
    turns = [[record for record in each if record.get("turn", -1) >= 0] for each in records]
    spans: dict[int, list[tuple[float, float]]] = {}
    for of_rank in turns:
        for number, joined, answered in (span for record in of_rank for span in record["rounds"]):
            spans.setdefault(number, []).append((joined, answered))
    whole = {
        number: max(end for _, end in each) - max(begin for begin, _ in each)
        for number, each in spans.items()
        if len(each) == len(records)
    }
    # What a rank had heard when its pass was over: the numbers of rounds are alike on all ranks.
    last = set()
    for record in turns[0]:
        for ended in record["ends"]:
            last.add(max((number for number, _, answered in record["rounds"] if answered <= ended), default=-1))
    lasts = [whole[number] for number in last if number in whole]
    if not lasts:
        raise BenchError("readiness: there was no round that all ranks remember; take fewer steps a turn")
    told = [[record["told"] for record in of_rank] for of_rank in turns]
    by_turn = zip(zip(*turns, strict=True), zip(*told, strict=True), strict=True)
    first = [each[0] for each in records]
    return Outcome(
        ranks=len(records),
        tensors=tensors,
        step_s=_slowest(turns),
        rounds=_a_step(turns[0], "rounds"),
        round_s=statistics.median(whole.values()),
        last_s=statistics.median(lasts),
        told_s=_slowest(told),
        buckets=_a_step(turns[0], "buckets"),
        told_buckets=_a_step(told[0], "buckets"),
        turn_costs=[_longer(*(_slowest([[one] for one in of_turn]) for of_turn in both)) for both in by_turn],
        sent=[each["sent"] for each in first],
        received=[each["received"] for each in first],
    )


def _slowest(turns: Sequence[Sequence[dict[str, Any]]]) -> float:
    """The median of each rank's steps, of the slowest rank."""
    return max(statistics.median(s for turn in of_rank for s in turn["seconds"]) for of_rank in turns)


def _a_step(turns: Sequence[dict[str, Any]], what: str) -> float:
    return sum(turn["counts"][what] for turn in turns) / sum(turn["counts"]["steps"] for turn in turns)


def _longer(step_s: float, told_s: float) -> float:
    return (step_s - told_s) / step_s
