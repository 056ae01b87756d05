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

import click

from penstock.numbers import change, milliseconds
from penstock.reports import Axis, Bar, Bars, Next, Page, Part, Picture, Section, series
from penstock.tools.bench import machine
from penstock.tools.bench.launcher import BenchError
from penstock.tools.bench.options import MOST_RANKS, bucket_option, check_files, files, parse_size
from penstock.tools.bench.output import reporting_errors, result_console, say, write_json, write_report
from penstock.tools.bench.program import run_program
from penstock.tools.bench.report import does_not_show
from penstock.tools.testbed.bed import Loopback
from penstock.tools.testbed.cluster import Testbed
from penstock.tools.testbed.link import LinkSpec


@click.command()
@click.option("--ranks", type=click.IntRange(2, MOST_RANKS), default=8, show_default=True)
@click.option("--hosts", type=click.IntRange(1, 64), default=2, show_default=True, help="More than one needs root.")
@click.option("--tensors", type=click.IntRange(2), default=500, show_default=True, help="Gradients of the model.")
@click.option("--width", type=click.IntRange(1), default=64, show_default=True, help="Of its layers.")
@click.option("--batch", type=click.IntRange(1), default=256, show_default=True, help="Samples a rank and step.")
@bucket_option("What one all-reduce carries.")
@click.option("--turns", type=click.IntRange(1), default=4, show_default=True)
@click.option("--steps", type=click.IntRange(1), default=10, show_default=True, help="Steps in a turn.")
@click.option("--timeout", type=float, default=300.0, show_default=True, help="Seconds for all of it.")
@files("Write the figures to this file.")
def command(
    hosts: int, bucket: str, timeout: float, json_path: str | None, report_path: str | None, **shape: int
) -> None:
    """Measure what agreeing on ready gradients costs, and whether any rank does more than others.

    See docs/design/gradients.md. The hosts have links of 1 Gbit/s, of which one flow gets 200 Mbit/s.
    """
    check_files(json_path=json_path, report_path=report_path)
    with reporting_errors():
        say(f"readiness of {shape['tensors']} gradients ...")
        description = machine.describe()
        link = LinkSpec(rate_mbit=1000, flow_mbit=200) if hosts > 1 else None
        with Testbed(hosts=hosts, link=link) if hosts > 1 else Loopback(hosts=1) as bed:
            outcome = measure(bed, bucket_bytes=parse_size(bucket), timeout_s=timeout, **shape)
        for line in outcome.lines():
            result_console().print(line, highlight=False)
        write_json(json_path, description, [outcome.to_dict()])
        write_report(report_path, lambda: outcome.page(link, description))


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
            f"{self.ranks} ranks, {self.tensors} gradients: {milliseconds(self.step_s)} and {self.rounds:.1f} rounds a step",
            f"a round ends {1e3 * self.round_s:.2f} ms after the last rank has joined it",
            f"all rounds together: {self.share:.1%} of the step, if nothing of them is hidden",
            f"the one that ends the pass, which nothing hides: {1e3 * self.last_s:.2f} ms, {self.last_share:.1%} of the step",
            f"with nothing to agree on, the order being told beforehand: {milliseconds(self.told_s)} a step; agreeing takes "
            f"{1e3 * (self.step_s - self.told_s):+.1f} ms, {change(self.cost)} of the step (by turn "
            f"{change(min(self.turn_costs))} to {change(max(self.turn_costs))}; {self.buckets:.1f} buckets a step, and "
            f"{self.told_buckets:.1f} without)",
            f"the busiest rank sends or receives {self.imbalance:.2f} times the mean",
        ]

    def page(self, link: LinkSpec | None, description: dict[str, Any]) -> Page:
        """The report."""
        steps = {"agreed on": self.step_s, "told beforehand": self.told_s}
        bars = [
            Bar(label, [Part(1e3 * seconds, series(index).colour)], milliseconds(seconds))
            for index, (label, seconds) in enumerate(steps.items())
        ]
        return Page(
            kind="Penstock bench: readiness",
            answer=f"Agreeing on {self.tensors} gradients takes {change(self.cost)} of a step, {self.ranks} ranks",
            picture=Picture(
                "readiness",
                Bars(Axis("time of a step", "ms"), bars),
                f"A step takes {milliseconds(self.step_s)} with agreement, {milliseconds(self.told_s)} without.",
                "The second bar is a control that knows the order of this one model beforehand and asks no other rank. Below 0 "
                "the difference is less than the noise.",
            ),
            next=Next("See what the hook gains over DDP.", "sudo penstock bench training char-gpt"),
            setting=f"A chain of linear layers on {link.describe() if link else 'one host'}.",
            sections=[
                Section("In numbers", [self.lines()]),
                Section("What this does not show", [does_not_show(link)]),
                Section("Conditions", [machine.lines(description)]),
            ],
        )

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
