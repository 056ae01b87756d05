"""``penstock bench predictions``: how far off what `penstock profile` says that a change would bring is.

Each pair profiles a training on emulated hosts, notes what is predicted of one change, makes the change, and profiles again.
Models, batches, rates and changes are drawn from a seed. The target: half of the pairs within 5 %, 95 of 100 within 15 %.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click

from penstock.profiling.record import Record
from penstock.reports import Column, Line, Table
from penstock.tools.bench import machine
from penstock.tools.bench.emulated import names_of
from penstock.tools.bench.launcher import BenchError
from penstock.tools.bench.options import check_files
from penstock.tools.bench.output import reporting_errors, result_console, say, write_json
from penstock.tools.bench.recorded import recorded

CHANGES = ("twice the link", "float16", "larger buckets", "penstock")
"""The default of --changes."""
MORE = ("more streams", "another schedule", "an aggregator", "host by host")
SCHEDULES = {"1f1b": "one forward, one backward", "interleaved": "an interleaved schedule"}
"""Of a pipeline: how the workload calls it, and the prediction."""
TARGET_MEDIAN, TARGET_MOST = 0.05, 0.15


@dataclass(frozen=True)
class Pair:
    """A training, and what changes."""

    seed: int
    change: str
    """One of `CHANGES` and `MORE`."""
    model: str
    batch: int
    rate_mbit: float
    flow_mbit: float
    """0: no cap."""
    bucket_mb: float
    backend: str
    streams: int = 0
    """Between two ranks; 0: penstock's default."""
    schedule: str = ""
    """Of a pipeline; empty: data parallel."""
    micro_batches: int = 1
    becomes: str = ""
    """Of `SCHEDULES`: what the schedule is changed to."""
    ranks: int = 2
    """On two hosts, but of an aggregator each on one of its own, behind switches with aggregators."""
    number: str = "none"
    """What gradients travel as through these."""


@dataclass(frozen=True)
class Outcome:
    """Of a pair. Times are means over steps and ranks, in ms."""

    pair: Pair
    before_ms: float
    predicted_ms: float
    stated_error: float
    after_ms: float

    @property
    def miss(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_ms / self.after_ms - 1


def drawn(seed: int, changes: Sequence[str] = CHANGES) -> Pair:
    """The pair of a seed: of one of these changes, by turns."""
    draw = random.Random(f"prediction {seed}")
    change = changes[seed % len(changes)]
    rate = draw.choice([100.0, 200.0, 400.0, 800.0])
    # A step of gpt2-small takes 8 s at 25 Mbit/s; at half of that a training would not end in time.
    flow = max(25.0, rate / draw.choice([2, 4, 8])) if change in ("penstock", "more streams") else 0.0
    pair = Pair(
        seed,
        change,
        draw.choice(["gpt2-tiny", "gpt2-small"]),
        draw.choice([4, 8, 16]),
        rate,
        flow,
        draw.choice([0.25, 0.5]) if change == "larger buckets" else draw.choice([1.0, 5.0, 25.0]),
        "gloo" if change == "penstock" else draw.choice(["penstock", "penstock", "gloo"]),
    )
    if change == "more streams":
        return replace(pair, backend="penstock", streams=draw.randrange(1, round(rate / flow)))
    if change == "another schedule":
        before, after = draw.choice([("gpipe", "1f1b"), ("gpipe", "interleaved"), ("1f1b", "interleaved")])
        micro = draw.choice([each for each in (2, 4, 8) if each <= pair.batch])
        return replace(pair, schedule=before, micro_batches=micro, becomes=after)
    if change == "an aggregator":
        # Aggregators in software, on the processors that compute, carry little more.
        return replace(pair, backend="penstock", ranks=4, rate_mbit=draw.choice([50.0, 100.0, 200.0]))
    if change == "host by host":
        # Penstock is told to sum in one ring before.
        return replace(pair, ranks=4, backend=draw.choice(["penstock", "gloo"]))
    return pair


@click.command()
@click.option("--pairs", type=click.IntRange(1), default=60, show_default=True)
@click.option("--first", type=click.IntRange(0), default=0, show_default=True, help="The first pair's seed.")
@click.option(
    "--changes", default=",".join(CHANGES), show_default=True, help=f"By turns, one a pair. Also {', '.join(MORE)}."
)
@click.option("--steps", type=click.IntRange(12), default=20, show_default=True, help="Of each training.")
@click.option("--timeout", type=float, default=300.0, show_default=True, help="Seconds of one training.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False), help="Write the figures to this file.")
def command(pairs: int, first: int, changes: str, steps: int, timeout: float, json_path: str | None) -> None:
    """Measure how far off predictions of `penstock profile` are: each is made before the run that it is about.

    Needs root, for emulated hosts. A pair takes 20 s or so.
    """
    check_files(json_path=json_path, report_path=None)
    chosen = names_of("change", changes, (*CHANGES, *MORE))
    outcomes: list[Outcome] = []
    failed = 0
    with reporting_errors():
        description = machine.describe()
        for seed in range(first, first + pairs):
            pair = drawn(seed, chosen)
            try:
                found = measure(pair, steps=steps, timeout_s=timeout)
            except BenchError as error:
                # The others count still: a run takes an hour.
                failed += 1
                say(f"{seed}: {pair.change}: {error}")
                continue
            if found is None:
                say(f"{seed}: {pair.change}: nothing was predicted")
                continue
            outcomes.append(found)
            say(f"{seed}: {pair.change}, {pair.model}, {pair.rate_mbit:g} Mbit/s: {found.miss:+.1%}")
            write_json(json_path, description, [{**asdict(each), "miss": each.miss} for each in outcomes])
    if not outcomes:
        raise click.ClickException("nothing was predicted of any pair")
    result_console().print(table(outcomes).for_terminal())
    if failed:
        raise click.ClickException(f"{failed} of {pairs} pairs failed, and are not in the table")


def measure(pair: Pair, *, steps: int, timeout_s: float) -> Outcome | None:
    """Run a pair; None if the profile says nothing of its change.

    Raises:
        BenchError: a training failed.
    """
    from penstock.profiling.advice import advise
    from penstock.profiling.divide import divide

    changed, named, settings = _change(pair)
    before = _profiled(pair, {}, steps, timeout_s)
    breakdown = divide(before)
    advice = advise(before, breakdown, everything=True)
    told = next((each for each in advice.predictions if named(each.change)), None)
    if told is None:
        return None
    after = divide(_profiled(changed, settings or told.settings, steps, timeout_s))
    step_ms = [statistics.fmean(share.unprofiled_ns for share in each.shares) / 1e6 for each in (breakdown, after)]
    return Outcome(pair, step_ms[0], step_ms[0] * told.after_ns / told.before_ns, told.error, step_ms[1])


def _change(pair: Pair) -> tuple[Pair, Callable[[str], bool], dict[str, str | float]]:
    """The changed training, which prediction is about it, and its settings; without any the prediction's own hold."""
    if pair.change == "twice the link":
        return replace(pair, rate_mbit=2 * pair.rate_mbit), lambda change: change == pair.change, {}
    if pair.change == "float16":
        return pair, lambda change: "float16" in change, {"comm_hook": "float16"}
    if pair.change == "larger buckets":
        return pair, lambda change: change.startswith("buckets of 4 MiB"), {"bucket_cap_mb": 4}
    if pair.change == "more streams":
        return pair, lambda change: change.endswith(" streams"), {}
    if pair.change == "another schedule":
        return replace(pair, schedule=pair.becomes), lambda change: change == SCHEDULES[pair.becomes], {}
    if pair.change == "an aggregator":
        return replace(pair, number="int32"), lambda change: change == "gradients summed by an aggregator", {}
    if pair.change == "host by host":
        return pair, lambda change: change == "gradients summed host by host", {}
    return replace(pair, backend="penstock"), lambda change: change == "the penstock backend", {}


def _profiled(pair: Pair, settings: Mapping[str, str | float], steps: int, timeout_s: float) -> list[Record]:
    usual: dict[str, str | float] = {"bucket_cap_mb": pair.bucket_mb}
    if pair.streams:
        usual["PENSTOCK_STREAMS"] = str(pair.streams)
    if pair.change == "host by host" and pair.backend == "penstock":
        usual["PENSTOCK_ALGORITHM"] = "ring"
    if pair.change == "an aggregator":
        bed = [sys.executable, "-m", "penstock.tools.bench.aggregated.through"]
        bed += [str(pair.ranks), f"{pair.rate_mbit:g}", pair.number, f"{timeout_s:g}"]
    else:
        bed = [sys.executable, "-m", "penstock", "testbed", "run", "--quiet"]
        bed += ["--hosts", "2", "--ranks", str(pair.ranks)]
        bed += ["--rate", f"{pair.rate_mbit:g}", *(["--flow", f"{pair.flow_mbit:g}"] if pair.flow_mbit else [])]
        bed += ["--timeout", f"{timeout_s:g}", "--"]
    train = [sys.executable, "-m", "penstock.workloads.transformer", pair.model, "--batch", str(pair.batch)]
    train += ["--steps", str(steps), "--backend", pair.backend, "--seed", str(pair.seed)]
    if pair.schedule:
        train += ["--parallel", "pipeline", "--schedule", pair.schedule]
        train += ["--micro-batch", str(pair.batch // pair.micro_batches)]
    with tempfile.TemporaryDirectory() as folder:
        return recorded([*bed, *train], Path(folder), f"pair {pair.seed}", {**usual, **settings})


def table(outcomes: Sequence[Outcome]) -> Table:
    """By change, and all."""
    lines = [_line(change, [one for one in outcomes if one.pair.change == change]) for change in (*CHANGES, *MORE)]
    lines.append(_line("all", outcomes))
    columns = [
        Column("change", is_text=True),
        Column("pairs"),
        Column("median miss"),
        Column("95 of 100 within"),
        Column("largest"),
        Column("within what was stated"),
    ]
    note = f"Targets: {TARGET_MEDIAN:.0%} and {TARGET_MOST:.0%}."
    return Table("Predicted beside measured", columns, [line for line in lines if line], note=note)


def _line(name: str, outcomes: Sequence[Outcome]) -> Line | None:
    if not outcomes:
        return None
    misses = sorted(abs(one.miss) for one in outcomes)
    most = misses[min(len(misses) - 1, int(0.95 * len(misses)))]
    stated = sum(abs(one.miss) <= one.stated_error for one in outcomes)
    cells = [f"{statistics.median(misses):.1%}", f"{most:.1%}", f"{misses[-1]:.1%}", f"{stated} of {len(outcomes)}"]
    return Line([name, str(len(outcomes)), *cells], kind="best" if name == "all" else "plain")
