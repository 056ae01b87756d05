"""What the trainings say beside each other: the numbers of the table and of the report, and their rounding. Pure."""

from __future__ import annotations

import math
import statistics
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.numbers import change, milliseconds, share, size, times
from penstock.reports import Column, Line, Table
from penstock.runtime.wire import sent_bytes
from penstock.tools.demo.prediction import Prediction
from penstock.tools.demo.training import Phases, Training
from penstock.tools.testbed import LinkSpec


@dataclass(frozen=True)
class Result:
    """One training in numbers. Times are medians over the steps after the warm-up."""

    training: Training
    prediction: Prediction | None
    step_s: float
    compute: Phases
    tokens_per_s: float
    sent_bytes_per_step: float  # what a rank put on its link, as the interface counts
    planned_bytes_per_step: float  # what an all-reduce of the gradient must put there
    sent_bytes_per_s: float  # over all of the steps, computation included
    link_share: float | None  # of what TCP can carry on that link
    flow_classes: int | None  # of the testbed's, that carried a hundredth of the bytes or more
    final_loss: float  # mean of the last steps, on the training text
    validation_loss: float

    @property
    def label(self) -> str:
        return self.training.label

    @property
    def communication_s(self) -> float:
        """What of the step is not computation."""
        return max(0.0, self.step_s - self.compute.total_s)

    @property
    def communication_share(self) -> float:
        return self.communication_s / self.step_s


@dataclass(frozen=True)
class Comparison:
    """All trainings of a demo; the first is what the others are held against."""

    results: tuple[Result, ...]
    link: LinkSpec | None  # None: loopback
    rates: dict[int, float]  # of the link in bytes per second, by number of flows; empty on loopback
    machine: dict[str, Any]
    disagreements: tuple[str, ...]  # empty: all trainings are the same to the bit
    quick: bool

    @property
    def problems(self) -> tuple[str, ...]:
        """What makes the figures worthless; empty when all is well."""
        return self.disagreements + (bypasses(self.results) if self.link else ())

    def speed_up(self, result: Result) -> float:
        return self.results[0].step_s / result.step_s

    @property
    def featured(self) -> Result:
        """What headline and cards speak of: the fastest of those that are held against the first, trials of a tuner aside."""
        _, *others = self.results
        tuned = [each for each in others if each.training.tuned_in_time]
        return max(tuned or others or self.results, key=self.speed_up)

    @property
    def plain(self) -> Result | None:
        """Penstock without its hook, if another training has the hook: what that one's gain is held against."""
        found = next((each for each in self.results if str(each.training.way) == "penstock"), None)
        return found if found and any(each.training.way.front for each in self.results) else None

    def over_plain(self, result: Result) -> float | None:
        """The speed-up of a hook over the same backend without; None for trainings that have none."""
        if self.plain is None or not result.training.way.front:
            return None
        return self.plain.step_s / result.step_s

    def predicted_speed_up(self, result: Result) -> float | None:
        base = self.results[0].prediction
        return base.step_s / result.prediction.step_s if base and result.prediction else None


@dataclass(frozen=True)
class Row:
    """One line of the table: a text for each result, and how to read it."""

    name: str
    texts: list[str]
    meaning: str


def summarise(training: Training, prediction: Prediction | None, link: LinkSpec | None) -> Result:
    seconds = training.step_seconds()
    step_s = statistics.median(seconds)
    sent = training.settled_sent_bytes()
    payload = payload_rate(link)
    return Result(
        training=training,
        prediction=prediction,
        step_s=step_s,
        compute=training.compute(),
        tokens_per_s=training.steps[0][0].tokens / step_s,
        sent_bytes_per_step=sent / len(seconds),
        planned_bytes_per_step=sent_bytes(training.facts["gradient_bytes"], training.ranks),
        sent_bytes_per_s=sent / sum(seconds),
        link_share=sent / sum(seconds) / payload if payload else None,
        flow_classes=busy_classes(training) if link and link.flow_mbit else None,
        final_loss=statistics.fmean(training.losses()[-FINAL_STEPS:]),
        validation_loss=training.ends[0]["validation_loss"],
    )


def payload_rate(link: LinkSpec | None) -> float | None:
    """Bytes per second that TCP can carry on the link in each direction."""
    return link.payload_mbit * 1e6 / 8 if link and link.payload_mbit else None


def busy_classes(training: Training) -> int:
    """How many classes of flows carried a hundredth of what the first host sent, or more."""
    assert training.completed is not None
    sent = [each.bytes for each in training.completed.flows[0]]
    return sum(nbytes >= sum(sent) / 100 for nbytes in sent if nbytes)


def disagreements(trainings: Sequence[Training]) -> tuple[str, ...]:
    """Where trainings part, bit by bit; empty when they are one and the same.

    Compares each rank's loss of each step with the first training's, and the weights that all ranks end with.
    """
    first, *others = trainings
    found = []
    for other in others:
        for rank in range(first.ranks):
            pairs = zip(first.steps[rank], other.steps[rank], strict=True)
            parted = next(((a, b) for a, b in pairs if bits(a.loss) != bits(b.loss)), None)
            if parted:
                a, b = parted
                found.append(
                    f"at step {a.number}, rank {rank} has a loss of {a.loss!r} with {first.label} "
                    f"and of {b.loss!r} with {other.label}"
                )
    weights = {
        f"{each.label}, rank {rank}": end["weights_sha256"] for each in trainings for rank, end in enumerate(each.ends)
    }
    if len(set(weights.values())) > 1:
        digests = "; ".join(f"{digest[:12]} ({who})" for who, digest in weights.items())
        found.append(f"the final weights have different digests: {digests}")
    return tuple(found)


def bypasses(results: Sequence[Result]) -> tuple[str, ...]:
    """Trainings whose gradients cannot all have crossed the link: the emulated hosts do share memory and files."""
    # Over all steps: where a reading in their midst comes late, because the machine is busy, it is too large.
    crossed = [each.training.sent_bytes[-1] / len(each.training.sent_bytes) for each in results]
    return tuple(
        f"with {each.label} a rank sent {sent / 1e6:.2f} MB a step over its link, but an all-reduce must "
        f"send {each.planned_bytes_per_step / 1e6:.2f} MB: some of it took another way"
        for each, sent in zip(results, crossed, strict=True)
        if sent < CROSSED_SHARE * each.planned_bytes_per_step
    )


def bits(value: float) -> bytes:
    """Tells -0 from 0, and holds a NaN equal to itself, which == does not."""
    return struct.pack("<d", value)


def verdict(comparison: Comparison) -> str:
    """One sentence on whether the trainings are the same."""
    *names, last = (result.label for result in comparison.results)
    together = f"{', '.join(names)} and {last}" if names else last
    if comparison.disagreements:
        return (
            f"The trainings with {together} are NOT the same: {comparison.disagreements[0]}. "
            "With two ranks a sum has only one order, so one of the backends is wrong."
        )
    first = comparison.results[0].training
    if len(comparison.results) == 1:
        return "Both ranks end with the same weights, to the bit."
    return (
        f"The loss curves of {together} are bit-identical: all {len(first.steps[0])} steps, both ranks; "
        "and so are the final weights."
    )


def tuning_sentences(comparison: Comparison) -> list[str]:
    """What each tuner has cost and gained, and whether the tuned training was slower than one without the tuner."""
    found = []
    for result in comparison.results:
        if "tuning" not in result.training.ends[0]:
            continue
        found.append(f"{result.label}: {tuning_sentence(result)}")
        for other in comparison.results:
            is_rival = other.training.way.backend == "penstock" and not other.training.way.tunes
            if is_rival and other.step_s < result.step_s:
                found.append(
                    f"{result.label} was slower than {other.label}, which has no tuner: {milliseconds(result.step_s)} against "
                    f"{milliseconds(other.step_s)} a step. Use {other.label} here, or run it again to see how far both move."
                )
    return found


def tuning_sentence(result: Result) -> str:
    tuning, setting = result.training.ends[0]["tuning"], result.training.ends[0]["setting"]
    if not result.training.tuned_in_time:
        return (
            f"the tuner was still trying settings when the training ended. It needs {tuning['budget']} steps; the figures here "
            "are those of its trials."
        )
    tried = [step.phases.total_s for step in result.training.steps[0] if step.tuning]
    lost_s = sum(tried) - len(tried) * result.step_s
    more = "more" if lost_s > 0 else "less"
    cost = f"{len(tried)} steps of trials took {abs(lost_s):.1f} s {more} than as many after them"
    if setting == tuning["default"] or not tuning["chosen_s"] or not tuning["default_s"]:
        return f"{cost}; it kept its default, {setting_text(setting)}: nothing was faster beyond the noise of its own contest."
    gain_s = tuning["default_s"] - tuning["chosen_s"]
    text = (
        f"{cost}; in its own measurements its choice, {setting_text(setting)}, takes {milliseconds(tuning['chosen_s'])} from "
        f"step to step, and its default, {setting_text(tuning['default'])}, {milliseconds(tuning['default_s'])}"
    )
    return text + (
        f": paid back {math.ceil(lost_s / gain_s)} steps after the choice." if lost_s > 0 and gain_s > 0 else "."
    )


def shortfall_sentences(comparison: Comparison) -> list[str]:
    """Which trainings with Penstock took much longer than the computation and raw sockets on the same link allow."""
    found = []
    for result in comparison.results:
        if result.training.way.backend != "penstock" or result.prediction is None:
            continue
        if result.step_s > SHORTFALL * result.prediction.step_s:
            found.append(
                f"{result.label} took {milliseconds(result.step_s)} a step where raw sockets on this link allow "
                f"{milliseconds(result.prediction.step_s)}. Run it again: if it stays, its streams carry less than they should "
                "here (PENSTOCK_STREAMS, PENSTOCK_SOCKET_BUFFER), or the processors have too much else to do."
            )
    return found


def rows(comparison: Comparison) -> list[Row]:
    """The table, the same on the terminal and in the report."""
    results = comparison.results
    base, others = results[0], results[1:]
    planned = f"an all-reduce must send {base.planned_bytes_per_step / 1e6:.2f} MB"
    table = [
        Row("step time", [milliseconds(r.step_s) for r in results], "median"),
        Row("  compute-only", [milliseconds(r.compute.total_s) for r in results], "the same step, nothing sent"),
        Row("  communication share", [share(r.communication_share) for r in results], "the rest of the step"),
    ]
    if comparison.link:
        texts = [milliseconds(r.prediction.step_s) if r.prediction else "–" for r in results]
        table.append(Row("predicted step time", texts, "from compute-only, bytes and raw sockets"))
        texts = [change(r.step_s / r.prediction.step_s - 1) if r.prediction else "–" for r in results]
        table.append(Row("  measured is off by", texts, ""))
    if others:
        texts = ["1", *(times(comparison.speed_up(r)) for r in others)]
        table.append(Row("speed-up, measured", texts, f"of the step time, over {base.label}"))
        plain = comparison.plain
        if plain is not None and plain is not base:
            gained = [comparison.over_plain(r) for r in results]
            texts = [
                "1" if r is plain else times(each) if each else "–" for r, each in zip(results, gained, strict=True)
            ]
            table.append(Row(f"  over {plain.label}", texts, "what the hook, or it and its tuner, gained"))
        foreseen = [comparison.predicted_speed_up(r) for r in others]
        if all(foreseen):
            texts = ["1", *(times(each) for each in foreseen if each)]
            table.append(Row("speed-up, predicted", texts, f"before {others[-1].label} ran"))
    table += [
        Row("tokens per second", [f"{r.tokens_per_s:,.0f}" for r in results], "characters, both ranks together"),
        Row("sent per rank and step", [f"{r.sent_bytes_per_step / 1e6:.2f} MB" for r in results], planned),
        Row("link use", [link_text(r, comparison.link) for r in results], "per rank, over whole steps"),
    ]
    if comparison.link:
        payload = payload_rate(comparison.link)
        assert payload is not None
        texts = [share(r.link_share) for r in results if r.link_share is not None]
        table.append(Row("  share of the link", texts, f"TCP can carry {payload / 1e6:.1f} MB/s on it"))
        texts = [str(r.flow_classes) for r in results]
        table.append(Row("  flow classes used", texts, "of 16, each with its own cap"))
    if any("setting" in r.training.ends[0] for r in results):
        texts = [setting_text(r.training.ends[0].get("setting")) for r in results]
        table.append(Row("streams × bucket", texts, "of the hook, in the end"))
    table += [
        Row("processors busy", [cpu_text(r) for r in results], "whole machine, start of the ranks included"),
        Row(
            "final training loss",
            [f"{r.final_loss:.4f}" for r in results],
            f"nats, mean of the last {FINAL_STEPS} steps",
        ),
        Row("validation loss", [f"{r.validation_loss:.4f}" for r in results], "nats, on text not trained on"),
    ]
    return table


def table(comparison: Comparison) -> Table:
    """`rows` for the terminal and the report."""
    columns = [Column("", is_text=True), *(Column(result.label) for result in comparison.results)]
    lines = [Line([row.name, *row.texts], meaning=row.meaning) for row in rows(comparison)]
    return Table("", columns, lines)


def link_text(result: Result, link: LinkSpec | None) -> str:
    """What a rank puts on its link; ranks of one host may read each other's memory instead."""
    if is_through_memory(result.sent_bytes_per_step, result.planned_bytes_per_step, link):
        return "shared memory"
    return f"{result.sent_bytes_per_s / 1e6:.1f} MB/s"


def is_through_memory(sent_per_step: float, planned_per_step: float, link: LinkSpec | None) -> bool:
    """Whether ranks of one host read each other's memory: what crosses loopback then is a few frames about it, and no rate."""
    return link is None and sent_per_step < planned_per_step / 2


def setting_text(setting: dict[str, Any] | None) -> str:
    """A hook's setting, or a dash."""
    return f"{setting['streams']} × {size(setting['bucket_bytes'])}" if setting else "–"


def cpu_text(result: Result) -> str:
    assert result.training.completed is not None
    return share(result.training.completed.cpu_share)


FINAL_STEPS = 10

CROSSED_SHARE = 0.98
"""The counters are read when rank 0 ends a step, and the last of what it sent may then still be in a queue."""

SHORTFALL = 1.25
"""Predictions are off by up to 14 % where nothing is wrong; a job whose streams were stuck at two thirds of the
link took 1.45 times what raw sockets did."""
