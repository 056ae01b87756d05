"""Logs of Megatron-LM with timers: the breakdown of the last stage's iteration, from the log alone.

Megatron writes every so many iterations, from its last rank:

    iteration 20/ 1000 | ... | elapsed time per iteration (ms): 2711.1 | ... | global batch size: 4 | ...
    time (ms) | forward-compute: 148.22 | forward-recv: 508.65 | backward-compute: 416.86 | ...

Newer releases write a table of the least and the most of all ranks in place of the second line (``--timing-log-level 2``):

    (min, max) time across ranks (ms):
        forward-compute ................................: (146.02, 148.22)
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from penstock.errors import Config
from penstock.profiling.breakdown import OTHER, Breakdown, Moving, Share
from penstock.profiling.readers.source import WHAT_WE_READ, opened

__all__ = ["Bubble", "Log", "breakdown", "read"]


@dataclass(frozen=True)
class Bubble:
    """What fills and drains a pipeline, in ms of an iteration: ``(stages - 1)`` times what one micro-batch takes."""

    fill_ms: float
    """(p - 1) t_f: until the first micro-batch has come to the last stage."""
    drain_ms: float
    """(p - 1) t_b: until the last one's gradients have come to the first stage."""
    received_ms: float
    """The timer forward-recv."""
    embedding_ms: float
    """The timer of the embeddings' all-reduce, which waits for the first stage."""
    step_ms: float

    @property
    def explained(self) -> float:
        """The share of an iteration that the bubble takes, as far as the timers hold it."""
        return (min(self.fill_ms, self.received_ms) + min(self.drain_ms, self.embedding_ms)) / self.step_ms

    @property
    def measured(self) -> float:
        """The share of the two timers."""
        return (self.received_ms + self.embedding_ms) / self.step_ms


@dataclass(frozen=True)
class Log:
    """What a log says."""

    path: Path
    arguments: Mapping[str, int]
    """Of Megatron's dump, those of `ARGUMENTS` that are numbers."""
    iterations: int
    """Of which there are timers; the first report is left out if there are others."""
    step_ms: float
    """The median."""
    timers_ms: Mapping[str, float]
    """Medians, by name."""
    is_of_all_ranks: bool = False
    """Each timer is the most of all ranks."""
    problems: tuple[str, ...] = field(default=())

    def stages(self, given: int | None = None) -> int | None:
        return given or self.arguments.get("pipeline_model_parallel_size")

    @property
    def micro_batches(self) -> int | None:
        """Of one iteration, on each data-parallel rank."""
        batch, micro = self.arguments.get("global_batch_size"), self.arguments.get("micro_batch_size")
        if not batch or not micro:
            return None
        return max(1, batch // (micro * (self.arguments.get("data_parallel_size") or 1)))

    def bubble(self, pipeline_stages: int | None = None) -> Bubble | None:
        """None if the log does not say enough."""
        stages, batches = self.stages(pipeline_stages), self.micro_batches
        forward, backward = self.timers_ms.get("forward-compute"), self.timers_ms.get("backward-compute")
        if not stages or stages < 2 or not batches or not forward or not backward or not self.step_ms:
            return None
        interleaved = self.arguments.get("virtual_pipeline_model_parallel_size") or 1
        share = (stages - 1) / (batches * interleaved)
        return Bubble(
            share * forward,
            share * backward,
            self.timers_ms.get("forward-recv", 0.0),
            sum(self.timers_ms.get(name, 0.0) for name in EMBEDDING),
            self.step_ms,
        )


def read(path: Path) -> Log:
    """
    Raises:
        Config: there are no iterations or no timers of Megatron in it.
    """
    arguments: dict[str, int] = {}
    elapsed: list[float] = []
    reports: list[tuple[float, dict[str, float]]] = []
    is_of_all_ranks = False
    table: dict[str, float] | None = None
    problems = []
    bad = 0
    with opened(path) as text:
        for line in text.lines():
            if len(line) > LONGEST_LINE:
                continue
            if found := ARGUMENT.search(line):
                arguments[found[1]] = int(found[2])
                continue
            if found := ITERATION.search(line):
                if table and elapsed:
                    reports.append((elapsed[-1], table))
                table = None
                if (time := _time(found[1])) is None:
                    bad += 1
                else:
                    elapsed.append(time)
                continue
            if (at := line.find("time (ms) |")) >= 0:
                timers, wrong = _timers(ONE_TIMER.findall(line[at:]))
                bad += wrong
                if elapsed and timers:
                    reports.append((elapsed[-1], timers))
                continue
            if TABLE.search(line):
                table = {}
                is_of_all_ranks = True
            elif table is not None:
                if found := ROW.match(line):
                    timers, wrong = _timers([(found[1], found[2])])
                    bad += wrong
                    table |= timers
                elif line.strip():
                    if table and elapsed:
                        reports.append((elapsed[-1], table))
                    table = None
            if len(reports) > MOST_REPORTS:
                problems.append(f"{path.name} has more than {MOST_REPORTS} reports: the rest is left out")
                break
        if table and elapsed:
            reports.append((elapsed[-1], table))
        if text.problem:
            problems.append(text.problem)
    if not elapsed:
        raise Config(
            f"{path} is a text, and no log of Megatron-LM: it has no line with 'elapsed time per iteration (ms):'. {WHAT_WE_READ}"
        )
    if not reports:
        raise Config(f"{path} is a log of Megatron-LM without timers: run it with --timing-log-level 2")
    if bad:
        problems.append(f"{path.name}: {bad} times make no sense and are left out")
    kept = reports[1:] or reports
    names = dict.fromkeys(name for _, timers in kept for name in timers)
    medians = {name: statistics.median(timers.get(name, 0.0) for _, timers in kept) for name in names}
    return Log(
        path,
        arguments,
        len(kept),
        statistics.median(time for time, _ in kept),
        medians,
        is_of_all_ranks,
        tuple(problems),
    )


def breakdown(log: Log, pipeline_stages: int | None = None) -> Breakdown:
    """The last stage's iteration.

    What it receives, it waits for as far as the pipeline's filling explains it; the embeddings' all-reduce, as far as its
    draining does. The rest of both, and all other communication, counts as wire: a log does not tell.
    """
    timers = dict(log.timers_ms)
    problems = list(log.problems)
    notes = [f"Medians of {log.iterations} reports of {log.path.name}; a log of timers has no samples."]
    if log.is_of_all_ranks:
        notes.append("Timers are the most of all ranks; those of other stages than the last one are left out.")
        for name in OTHER_STAGES:
            timers.pop(name, None)
    bubble = log.bubble(pipeline_stages)
    loading = timers.get("batch-generator", 0.0)
    unscale, clip = timers.get("optimizer-unscale-and-check-inf", 0.0), timers.get("optimizer-clip-main-grad", 0.0)
    work = {
        "loading": loading,
        "forward": max(0.0, timers.get("forward-compute", 0.0) - loading),
        "backward": timers.get("backward-compute", 0.0),
        "inf check": unscale,
        "clip": clip,
        "optimizer": max(0.0, timers.get("optimizer", 0.0) - unscale - clip),
    }
    moving: dict[str, list[float]] = {}
    for name, time_ms in timers.items():
        if (purpose := PURPOSE.get(name)) is None:
            continue
        waits = 0.0
        if bubble is not None and name == "forward-recv":
            waits = min(time_ms, bubble.fill_ms)
        elif bubble is not None and name in EMBEDDING:
            waits = min(time_ms, bubble.drain_ms)
        both = moving.setdefault(purpose, [0.0, 0.0])
        both[0] += time_ms - waits
        both[1] += waits
    known = sum(work.values()) + sum(map(sum, moving.values()))
    if known > 1.01 * log.step_ms:  # medians of parts need not sum to the median of the whole
        problems.append(
            f"the timers take {known:.0f} ms together, and an iteration {log.step_ms:.0f}: some overlap, or hold each other"
        )
    work[OTHER] = max(0.0, log.step_ms - known)
    if not timers.get("forward-compute"):
        notes.append("The log does not tell forward from backward: Megatron does with --timing-log-level 2.")
    if bubble is not None:
        notes.append(
            f"{_model(log)}Pipeline of {log.stages(pipeline_stages)} stages, {log.micro_batches} micro-batches: filling takes "
            f"(p-1) t_f = {bubble.fill_ms:.0f} ms (forward-recv: {bubble.received_ms:.0f}), draining (p-1) t_b = "
            f"{bubble.drain_ms:.0f} ms (the embeddings' all-reduce: {bubble.embedding_ms:.0f}). The bubble is "
            f"{bubble.explained:.1%} of an iteration."
        )
    elif log.stages(pipeline_stages) is None:
        notes.append(
            "The log does not hold Megatron's arguments: give --pipeline-stages to tell the bubble from the wire."
        )
    rank = max(0, log.arguments.get("world_size", 1) - 1)
    share = Share(
        rank,
        log.iterations,
        0,
        max(log.step_ms, known) * 1e6,
        {name: time_ms * 1e6 for name, time_ms in work.items()},
        {purpose: Moving(wire * 1e6, waits * 1e6) for purpose, (wire, waits) in moving.items()},
    )
    return Breakdown((share,), problems=tuple(problems), notes=tuple(notes))


def _model(log: Log) -> str:
    layers, width = log.arguments.get("num_layers"), log.arguments.get("hidden_size")
    return f"{layers} layers of width {width}. " if layers and width else ""


def _timers(pairs: list[tuple[str, str]]) -> tuple[dict[str, float], int]:
    found, wrong = {}, 0
    for name, text in pairs[:MOST_TIMERS]:
        if (time := _time(text)) is None:
            wrong += 1
        else:
            found[name[:100]] = time
    return found, wrong


def _time(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and 0 <= value < 1e12 else None


PURPOSE = {
    "forward-recv": "pipeline forward recv",
    "backward-send-forward-recv": "pipeline forward recv",
    "backward-recv": "pipeline backward recv",
    "forward-send-backward-recv": "pipeline backward recv",
    "forward-send": "pipeline send",
    "backward-send": "pipeline send",
    "forward-backward-send-forward-backward-recv": "pipeline send",
    "backward-params-all-reduce": "data-parallel sync",
    "grads-all-reduce": "data-parallel sync",
    "grads-reduce-scatter": "data-parallel sync",
    "params-all-gather": "data-parallel sync",
    "all-grads-sync": "data-parallel sync",
    "backward-embedding-all-reduce": "embedding sync",
    "embedding-grads-all-reduce": "embedding sync",
    "backward-layernorm-all-reduce": "tensor",
    "layernorm-grads-all-reduce": "tensor",
    "non-tensor-parallel-grads-all-reduce": "tensor",
}
"""Of timers. One that sends and receives is told by what it waits for."""

EMBEDDING = ("backward-embedding-all-reduce", "embedding-grads-all-reduce")
OTHER_STAGES = (
    "backward-recv",
    "forward-send",
    "forward-send-backward-recv",
    "forward-backward-send-forward-backward-recv",
)

ARGUMENTS = (
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "tensor_model_parallel_size",
    "data_parallel_size",
    "world_size",
    "num_layers",
    "hidden_size",
    "micro_batch_size",
    "global_batch_size",
    "seq_length",
)
ARGUMENT = re.compile(rf"(?:^|[\s:])({'|'.join(ARGUMENTS)}) ?\.{{2,}} ?(\d{{1,15}})\s*$")
ITERATION = re.compile(r"iteration\s+\d+\s*/.*elapsed time per iteration \(ms\):\s*([^\s|]{1,40})")
ONE_TIMER = re.compile(r"\|\s*([\w/-]{1,100}):\s*([^\s|]{1,40})")
TABLE = re.compile(r"(?:\(min, max\)|max|maximum) time across ranks \(ms\):")
# No two repetitions that may follow each other match the same character: else a line of spaces takes the square of its length.
ROW = re.compile(r"\W*(?:\w+\]?:\s+)?(\w[\w/-]{0,99}) ?\.{2,}: ?(?:\([^,()]{1,40},\s*)?([^\s()]{1,40})\)?\s*$")
MOST_REPORTS, MOST_TIMERS, LONGEST_LINE = 100_000, 1000, 4096
