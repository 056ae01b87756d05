"""One training of the example under one backend: start the ranks, follow them step by step, keep what they said."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock import workloads
from penstock.tools.testbed import CompletedRun, Loopback, Testbed

Bed = Testbed | Loopback

FRONTS = {"": [], "hook": ["--hook"], "tuner": ["--hook", "--tune"]}
"""What may stand behind "penstock+", and the script's arguments for it: penstock.torch.ddp_hook, and the same with a tuner."""


@dataclass(frozen=True)
class Way:
    """How gradients are reduced: what ``--backends`` names."""

    backend: str  # for init_process_group
    front: str = ""  # of FRONTS: what reduces gradients under DDP

    @classmethod
    def parse(cls, text: str) -> Way:
        """``gloo``, ``penstock``, ``penstock+hook``, ``penstock+tuner``. Raises: ValueError."""
        backend, plus, front = text.partition("+")
        if not backend or (plus and (backend != "penstock" or front not in FRONTS or not front)):
            raise ValueError(f"{text!r} is neither the name of a backend nor penstock+hook or penstock+tuner")
        return cls(backend, front)

    def __str__(self) -> str:
        return f"{self.backend}+{self.front}" if self.front else self.backend

    @property
    def tunes(self) -> bool:
        return self.front == "tuner"

    @property
    def arguments(self) -> list[str]:
        """For `SCRIPT`."""
        return ["--backend", self.backend, *FRONTS[self.front]]


@dataclass(frozen=True)
class Phases:
    """Seconds of the three parts of a step. Under DDP, ``backward_s`` ends when all gradients are reduced."""

    forward_s: float
    backward_s: float
    optimizer_s: float

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s + self.optimizer_s


@dataclass(frozen=True)
class Step:
    """What one rank logged about one step."""

    number: int  # from 1
    loss: float  # of this rank's own batch, before the update
    tokens: int  # of all ranks together
    phases: Phases
    compute: Phases | None  # the same work without sending a gradient, timed after some of the steps
    tuning: bool = False  # the tuner was trying settings


@dataclass
class Training:
    """All that is known of one training. `train` fills it; `on_step` sees it grow."""

    label: str
    way: Way
    ranks: int
    facts: dict[str, Any] = field(default_factory=dict)  # rank 0's "start" record: parameters, gradient_bytes, ...
    steps: list[list[Step]] = field(default_factory=list)  # by rank
    ends: list[dict[str, Any]] = field(default_factory=list)  # by rank: validation_loss, weights_sha256, bucket_bytes
    clock_s: list[float] = field(default_factory=list)  # when rank 0 had done each step, since the ranks were started
    sent_bytes: list[float] = field(default_factory=list)  # what a rank had put on its link by then, headers included
    completed: CompletedRun | None = None

    def losses(self) -> list[float]:
        """The loss of each step, averaged over the ranks' batches."""
        return [statistics.fmean(step.loss for step in steps) for steps in zip(*self.steps, strict=True)]

    def settled(self, rank: int = 0) -> list[Step]:
        """A rank's steps without the first ones, in which connections, buckets and buffers come into being, and without those in
        which the tuner tried settings. Where it never came to an end, its trials are all there is."""
        return [self.steps[rank][i] for i in self.settled_indices]

    @property
    def settled_indices(self) -> list[int]:
        late = range(WARM_UP_STEPS, len(self.steps[0]))
        return [i for i in late if not self.steps[0][i].tuning] or list(late)

    @property
    def tuned_in_time(self) -> bool:
        """Whether there are steps after the tuner's choice. True without a tuner."""
        return not all(step.tuning for step in self.steps[0][WARM_UP_STEPS:])

    def settled_sent_bytes(self) -> float:
        """What a rank put on its link in the settled steps."""
        return sum(self.sent_bytes[i] - self.sent_bytes[i - 1] for i in self.settled_indices)

    def step_seconds(self) -> list[float]:
        return [step.phases.total_s for step in self.settled()]

    def compute(self) -> Phases:
        """The compute-only time: the median over the timed steps of the slower rank, phase by phase.

        The slower rank, because no all-reduce ends before both have come to it.
        """
        slower = [
            max((step.compute for step in steps if step.compute), key=lambda phases: phases.total_s)
            for steps in zip(*(self.settled(rank) for rank in range(self.ranks)), strict=True)
            if all(step.compute for step in steps)
        ]
        return _median(slower)

    def compute_of(self, rank: int) -> Phases:
        """The same of one rank."""
        return _median([step.compute for step in self.settled(rank) if step.compute])


def _median(phases: Sequence[Phases]) -> Phases:
    """Phase by phase."""
    return Phases(
        statistics.median(each.forward_s for each in phases),
        statistics.median(each.backward_s for each in phases),
        statistics.median(each.optimizer_s for each in phases),
    )


class TrainingFailed(Exception):
    """A rank failed or hung. Every process of the training is gone; the testbed is as good as before."""


def train(
    bed: Bed, way: Way, label: str, arguments: Sequence[str], on_step: Callable[[Training], None], timeout_s: float
) -> Training:
    """Run the example as `RANKS` ranks, spread over the hosts, and return when it has ended.

    Args:
        way: a backend that torch knows, with or without Penstock's hook.
        arguments: for `SCRIPT`, beyond the way and the log.
        on_step: called on this thread when rank 0 has finished a step, with all that has come in so far.

    Raises:
        TrainingFailed: with the end of the ranks' output, and how to run the same without the demo.
        KeyboardInterrupt: as it came; no rank is left.
    """
    training = Training(label, way, RANKS, steps=[[] for _ in range(RANKS)], ends=[{} for _ in range(RANKS)])
    started = time.monotonic()
    sent_before = sent_bytes(bed)
    talk: list[list[str]] = [[] for _ in range(RANKS)]  # what ranks print beside their log

    def on_line(rank: int, line: str) -> None:
        record = parse(line)
        if record is None:
            talk[rank].append(line)
        elif record["event"] == "start" and rank == 0:
            training.facts = record
        elif record["event"] == "end":
            training.ends[rank] = record
        elif record["event"] == "step":
            training.steps[rank].append(step_of(record))
            if rank == 0:
                training.clock_s.append(time.monotonic() - started)
                training.sent_bytes.append(sent_bytes(bed) - sent_before)
                on_step(training)

    command = [sys.executable, str(SCRIPT), *way.arguments, "--log-file=-", *arguments]
    try:
        # The tuner begins with nothing remembered, and leaves nothing for the user's own jobs.
        with tempfile.TemporaryDirectory() as cache:
            env = {"XDG_CACHE_HOME": cache}
            training.completed = bed.run(
                command, ranks=RANKS, launcher="fork", on_line=on_line, timeout_s=timeout_s, env=env
            )
    except TimeoutError as error:
        raise TrainingFailed(f"{label}: {error}") from error
    if training.completed.returncode != 0:
        raise TrainingFailed(describe_failure(training, talk, arguments))
    return training


def sent_bytes(bed: Bed) -> float:
    """What a rank has put on its link, averaged over the ranks; on loopback they share one interface."""
    counters = bed.counters()
    if isinstance(bed, Loopback):
        return counters[0]["tx_bytes"] / RANKS
    return statistics.fmean(each["tx_bytes"] for each in counters.values())


def parse(line: str) -> dict[str, Any] | None:
    """A record of the example's log, or None when the line is something else."""
    if not line.startswith('{"event": '):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def step_of(record: dict[str, Any]) -> Step:
    return Step(
        record["step"],
        record["loss"],
        record["tokens"],
        phases_of(record),
        phases_of(record["compute"]) if record["compute"] else None,
        record["tuning"],
    )


def phases_of(record: dict[str, Any]) -> Phases:
    return Phases(record["forward_seconds"], record["backward_seconds"], record["optimizer_seconds"])


def describe_failure(training: Training, talk: list[list[str]], arguments: Sequence[str]) -> str:
    completed = training.completed
    assert completed is not None
    where = f"rank {completed.failed_rank} ended with {completed.returncode}"
    parts = [f"{training.label}: {where} after {len(training.steps[0])} steps."]
    for rank, lines in enumerate(talk):
        parts.append(f"--- the end of what rank {rank} printed:")
        parts += lines[-TAIL_LINES:] or ["(nothing)"]
    parts.append("--- to see it alone:")
    parts.append(" ".join(["torchrun --nproc-per-node 2", str(SCRIPT), *training.way.arguments, *arguments]))
    if training.way.backend == "penstock":
        parts.append(
            "`python -c 'import penstock.torch'` shows whether the backend loads, `penstock doctor` what ails it."
        )
    return "\n".join(parts)


SCRIPT = Path(workloads.__file__).with_name("char_gpt") / "train.py"
"""In a checkout a link to ``examples/char_gpt/train.py``; in a wheel the file itself."""

RANKS = 2
"""One a host. With two, a sum has one order, so that all backends must agree to the bit."""

WARM_UP_STEPS = 5
"""Left out of every timing. DDP regroups its buckets after the first step; the others are a margin."""

TAIL_LINES = 25
