"""``penstock bench breakdown``: what `penstock profile` says of a step beside what the script's own clock says.

Each training draws from a seed how long its phases compute, how many bytes it moves over which link, and how much later one rank
is. Its script notes when each phase and each operation began and ended. Ranks share this machine's clock, so it is known
when the last of them issued an operation, and with it what of a wait was wire. The target: each category within 3 %.
"""

from __future__ import annotations

import functools
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import click

from penstock.profiling.breakdown import OTHER, PURPOSES, Moving, Share
from penstock.profiling.divide import WARM_UP_STEPS, divide
from penstock.profiling.intervals import overlaps, union, without
from penstock.reports import Column, Line, Table
from penstock.tools.bench import breakdown_layers, breakdown_stages, machine
from penstock.tools.bench.options import check_files
from penstock.tools.bench.output import reporting_errors, result_console, say, write_json
from penstock.tools.bench.recorded import recorded

__all__ = ["MOVING", "Outcome", "Plan", "command", "drawn", "judged", "rows"]

WORK = ("loading", "forward", "backward", "clip", "optimizer", "evaluation", "checkpoint", "other")
MOVING = ("exposed wire", "exposed wait", "hidden wire", "hidden wait")
NAMED = tuple(purpose for purpose in PURPOSES if purpose != OTHER)
DISTURBED = ("other", "exposed wait", "hidden wait", "step", *NAMED)
"""What holds it where torch's profiler starts or stops: in this rank, or in the other, which is waited for."""
TARGET = 0.03
LEAST = 0.02
"""Of the step: what is less is not judged by its relative error."""


@dataclass(frozen=True)
class Plan:
    """A training. Times in ms, of each step, but for evaluation and checkpoint, which each fourth step has."""

    seed: int
    backend: str
    rate_mbit: float
    mebibytes: float
    """Of gradients."""
    beside_mebibytes: float
    """Of a sum that moves while the forward pass computes."""
    loading: float
    forward: float
    backward: float
    optimizer: float
    evaluation: float
    other: float
    late: float
    late_rank: int
    late_phase: str
    """One of loading, forward and other: there this rank takes ``late`` more."""
    buckets: int = 1
    """Of the gradients: as many parts of the backward pass, each with a sum of its own."""
    steps: int = 120


Planted: TypeAlias = Plan | breakdown_stages.Stages | breakdown_layers.Layers


@dataclass(frozen=True)
class Outcome:
    """Of a category, a rank and a training: means over steps, in ms."""

    seed: int
    rank: int
    category: str
    script_ms: float
    profile_ms: float
    step_ms: float

    @property
    def miss(self) -> float:
        """What the profile says over what the script says, less one."""
        return self.profile_ms / self.script_ms - 1

    @property
    def is_judged(self) -> bool:
        return self.script_ms >= LEAST * self.step_ms


def drawn(seed: int, *, buckets: int = 1) -> Plan:
    """The training of a seed."""
    draw = random.Random(f"breakdown {seed}")
    beside = draw.uniform(0.25, 1)
    rate = draw.choice([200.0, 400.0, 800.0])
    # Two ranks move as many bytes as the tensor has; the forward pass is to hide them.
    hidden_ms = beside * 8.4e6 / rate / 1e3
    return Plan(
        seed,
        draw.choice(["penstock", "gloo"]),
        rate,
        draw.uniform(0.5, 3),
        beside,
        draw.uniform(5, 20),
        2 * hidden_ms + draw.uniform(10, 30),
        draw.uniform(20, 50),
        draw.uniform(5, 15),
        draw.uniform(20, 60),
        draw.uniform(5, 15),
        draw.choice([0.0, draw.uniform(10, 40)]),
        draw.randrange(2),
        draw.choice(["loading", "forward", "other"]),
        buckets,
    )


@click.command()
@click.option("--runs", type=click.IntRange(1), default=8, show_default=True, help="Trainings.")
@click.option("--first", type=click.IntRange(0), default=0, show_default=True, help="The first one's seed.")
@click.option("--steps", type=click.IntRange(60), default=120, show_default=True, help="Of each training.")
@click.option("--pipeline", is_flag=True, help="Two stages of a pipeline, instead of data-parallel ranks.")
@click.option("--layers", is_flag=True, help="Tensor and expert parallel ranks that share an embedding.")
@click.option(
    "--buckets", type=click.IntRange(1), default=1, show_default=True, help="Of data-parallel ranks' gradients."
)
@click.option("--timeout", type=float, default=120.0, show_default=True, help="Seconds of one training.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False), help="Write the figures to this file.")
def command(
    runs: int,
    first: int,
    steps: int,
    pipeline: bool,
    layers: bool,
    buckets: int,
    timeout: float,
    json_path: str | None,
) -> None:
    """Measure how far off the parts of a step are that `penstock profile` shows.

    Needs root, for emulated hosts. A training of 120 steps takes 30 s or so.
    """
    check_files(json_path=json_path, report_path=None)
    if pipeline and layers:
        raise click.UsageError("--pipeline and --layers are two trainings: give one of them")
    if (pipeline or layers) and buckets != 1:
        raise click.UsageError("--buckets is of data-parallel ranks: leave it, or --pipeline and --layers")
    of_data = functools.partial(drawn, buckets=buckets)
    outcomes: list[Outcome] = []
    with reporting_errors():
        description = machine.describe()
        for seed in range(first, first + runs):
            draw = breakdown_stages.drawn if pipeline else breakdown_layers.drawn if layers else of_data
            found = measure(replace(draw(seed), steps=steps), timeout_s=timeout)
            worst = max((one for one in found if one.is_judged), key=lambda one: abs(one.miss))
            say(f"{seed}: furthest off is {worst.category} of rank {worst.rank}: {worst.miss:+.1%}")
            outcomes += found
            write_json(json_path, description, [{**asdict(each), "miss": _miss(each)} for each in outcomes])
        result_console().print(table(outcomes).for_terminal())


def measure(plan: Planted, *, timeout_s: float) -> list[Outcome]:
    """Run a training, recorded.

    Raises:
        BenchError: it failed.
    """
    bed = [sys.executable, "-m", "penstock", "testbed", "run", "--quiet", "--hosts", "2"]
    bed += ["--rate", f"{plan.rate_mbit:g}", "--timeout", f"{timeout_s:g}"]
    script, of_rank = _program(plan)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as notes:
        train = [sys.executable, "-m", f"penstock.tools.bench.{script}", json.dumps(asdict(plan)), notes]
        ranks = recorded([*bed, "--", *train], Path(folder), f"seed {plan.seed}")
        noted = [json.loads(Path(notes, f"{rank}.json").read_text()) for rank in range(2)]
        # The script's step ends before the recorder's hooks, which start and stop the profiler, and the record's after them.
        disturbed = {
            number
            for each in ranks
            for step in each.steps
            if any(span.phase == "profiler" for span in step.spans)
            for number in (step.number - 1, step.number)
        }
        return judged(plan.seed, divide(ranks).shares, [of_rank(noted, rank) for rank in range(2)], disturbed)


def _program(plan: Planted) -> tuple[str, Callable[[Any, int], list[dict[str, float]]]]:
    """The ranks' program, and what it makes of their notes."""
    match plan:
        case breakdown_stages.Stages():
            return "breakdown_stage", breakdown_stages.rows
        case breakdown_layers.Layers():
            return "breakdown_layer", breakdown_layers.rows
    return "breakdown_rank", rows


def judged(
    seed: int, shares: Sequence[Share], rows: Sequence[Sequence[Mapping[str, float]]], disturbed: Collection[int] = ()
) -> list[Outcome]:
    """Each category of each rank beside the script's own. Pure.

    Args:
        rows: by rank, then by step: what the script says of each category, in ns.
        disturbed: steps in which torch's profiler started or stopped. The script cannot tell what that costs, and what the other
            rank waits for it: of `DISTURBED` it tells the other steps. The profile tells all, without what it counts as the
            profiler's.
    """
    found = []
    for share in shares:
        counted = [
            {category: ns for category, ns in row.items() if at not in disturbed or category not in DISTURBED}
            for at, row in enumerate(rows[share.rank])
            if at >= WARM_UP_STEPS
        ]
        purposes = [purpose for purpose in NAMED if any(purpose in row for row in counted)]
        means = {
            category: statistics.fmean(row[category] for row in counted if category in row) / 1e6
            for category in (*WORK, *MOVING, *purposes, "step")
        }
        means["exposed"] = means["exposed wire"] + means["exposed wait"]
        moving = share.communication.values()
        told = {
            **{category: share.work.get(category, 0.0) for category in WORK},
            "exposed": sum(one.exposed_ns for one in moving),
            "exposed wire": sum(one.exposed_wire_ns for one in moving),
            "exposed wait": sum(one.exposed_wait_ns for one in moving),
            "hidden wire": sum(one.hidden_wire_ns for one in moving),
            "hidden wait": sum(one.hidden_wait_ns for one in moving),
            "step": share.unprofiled_ns,
        }
        told |= {purpose: share.communication.get(purpose, Moving()).exposed_ns for purpose in purposes}
        found += [
            Outcome(seed, share.rank, category, means[category], told[category] / 1e6, means["step"])
            for category in (*WORK, "exposed", *MOVING, *purposes, "step")
        ]
    return found


def rows(noted: Sequence[Sequence[Mapping[str, Any]]], rank: int) -> list[dict[str, float]]:
    """By step, what a rank of a data-parallel training noted (`breakdown_rank.Notes`) of each category, in ns."""
    rows = []
    for at, own in enumerate(noted[rank]):
        issued_ns = [max(all_ranks) for all_ranks in zip(*(step[at]["issued"] for step in noted), strict=True)]
        beside_issued_ns = max(step[at]["beside_issued"] for step in noted)
        # Where this rank stood still when it ended, the other one knows.
        ended_ns = own.get("beside_ended") or noted[1 - rank][at].get("beside_ended", own["wait_ended"])
        row = {category: float(own.get(category, 0)) for category in (*WORK, "step")}
        row |= _moved({**own, "beside_ended": min(ended_ns, own["wait_ended"])}, issued_ns, beside_issued_ns)
        row["other"] += row["step"] - sum(row[category] for category in (*WORK, *MOVING[:2]))
        rows.append(row)
    return rows


def _moved(own: Mapping[str, Any], issued_ns: Sequence[int], beside_issued_ns: int) -> dict[str, float]:
    """What the sums of a step were to a rank, of which the last rank issued each then. As in the profile: exposed while the
    rank stood still, and wire before wait where both go on."""
    sums = [*zip(own["issued"], issued_ns, own["ended"], strict=True)]
    sums.append((own["beside_issued"], beside_issued_ns, own["beside_ended"]))
    # The rank stands still for gradients from the last bucket on.
    stood = max(own["issued"]), max(own["ended"])
    blocked = union((start, end, None) for start, end in (stood, (own["wait_begun"], own["wait_ended"])))
    wire = union((last_ns, ended_ns, None) for _, last_ns, ended_ns in sums)
    wait = without(union((own_ns, last_ns, None) for own_ns, last_ns, _ in sums), wire)
    return {
        f"{how} {what}": float(sum(end - start for start, end, _ in pieces))
        for what, all_pieces in (("wire", wire), ("wait", wait))
        for how, pieces in (
            ("exposed", [(a, b, None) for a, b, _, _ in overlaps(all_pieces, blocked)]),
            ("hidden", without(all_pieces, blocked)),
        )
    }


def table(outcomes: Sequence[Outcome]) -> Table:
    """By category."""
    columns = [
        Column("category", is_text=True),
        Column("ranks", meaning="ranks of trainings in which it is 2 % of the step or more"),
        Column("ms a step", meaning="the mean of what the script says"),
        Column("median miss"),
        Column("largest"),
        Column("within 3 %"),
    ]
    lines = [
        _line(category, [one for one in outcomes if one.category == category])
        for category in (*WORK, "exposed", *MOVING, *NAMED, "step")
    ]
    return Table("Parts of a step, beside the script's own clock", columns, [line for line in lines if line])


def _line(category: str, outcomes: Sequence[Outcome]) -> Line | None:
    counted = [one for one in outcomes if one.is_judged]
    if not counted:
        return None
    misses = sorted(abs(one.miss) for one in counted)
    within = sum(miss <= TARGET for miss in misses)
    cells = [category, str(len(counted)), f"{statistics.fmean(one.script_ms for one in counted):.2f}"]
    return Line([*cells, f"{statistics.median(misses):.1%}", f"{misses[-1]:.1%}", f"{within} of {len(counted)}"])


def _miss(outcome: Outcome) -> float | None:
    return outcome.miss if outcome.is_judged else None
