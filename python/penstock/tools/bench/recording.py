"""``penstock bench recording``: what `penstock profile` adds to a step of the script that it records.

Two jobs of the same training take turns, one of them under the recorder, with all that it does: marks in every step, torch's
profiler in some, and what is written. Two processes that do the same differ by 1 or 2 % throughout, by where their memory
lies, and besides the job that is started second is slower (in eight of eight pairs by 0.1 to 3.2 % in all). So there are
several pairs of fresh jobs, the recorded one is second and first by turns, and figures are the means of both orders' medians.
The process that reads the host's counters runs in the other job's turns, too, so what it takes is in neither figure. The
target is 2 % of a step.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from penstock.numbers import milliseconds, plural
from penstock.reports import Column, Line, Table
from penstock.tools.bench import machine
from penstock.tools.bench.emulated import names_of
from penstock.tools.bench.launcher import BenchError
from penstock.tools.bench.options import check_files
from penstock.tools.bench.output import reporting_errors, result_console, say, write_json
from penstock.tools.bench.program import run_program
from penstock.tools.testbed.bed import Loopback

JOBS = ("plain", "recorded")
STEPS = {"layers": 100, "char-gpt": 10, "cnn": 6}
"""Of a block, by model: a third of a second or so."""


@click.command()
@click.option("--models", default="layers,char-gpt", show_default=True, help="Also cnn. Layers: 50 of 32, in 1.4 ms.")
@click.option("--ranks", default="1,2", show_default=True, help="Of a job. One joins no group.")
@click.option("--backends", default="gloo,penstock", show_default=True, help="Of jobs with several ranks.")
@click.option(
    "--pairs", type=click.IntRange(2), default=12, show_default=True, help="Of fresh jobs, in both orders by turns."
)
@click.option("--blocks", type=click.IntRange(2), default=10, show_default=True, help="Of each job.")
@click.option("--control", is_flag=True, help="Record neither job: how much two equal jobs differ.")
@click.option("--timeout", type=float, default=300.0, show_default=True, help="Seconds for each pair of jobs.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False), help="Write the figures to this file.")
def command(
    models: str,
    ranks: str,
    backends: str,
    pairs: int,
    blocks: int,
    control: bool,
    timeout: float,
    json_path: str | None,
) -> None:
    """Measure what `penstock profile` adds to a step.

    A job that is recorded and one that is not take turns.
    """
    check_files(json_path=json_path, report_path=None)
    chosen = names_of("model", models, tuple(STEPS))
    counts = [int(each) for each in names_of("number of ranks", ranks, [str(count) for count in range(1, 9)])]
    named = names_of("backend", backends, ("gloo", "penstock"))
    rows: list[Row] = []
    with reporting_errors():
        description = machine.describe()
        for model, count in itertools.product(chosen, counts):
            for backend in named if count > 1 else [""]:
                for number in range(pairs):
                    say(f"{_name(model, count, backend)}, pair {number + 1} of {pairs} ...")
                    kind = model, count, backend
                    rows.append(
                        measure(*kind, is_first=number % 2 == 1, blocks=blocks, control=control, timeout_s=timeout)
                    )
                    write_json(json_path, description, [asdict(row) for row in rows])
        result_console().print(table(rows).for_terminal())


@dataclass(frozen=True)
class Row:
    """A pair of jobs. Times are of rank 0's steps, in seconds; what recording adds is a part of the plain job's."""

    model: str
    ranks: int
    backend: str
    is_first: bool
    """Whether the job that is recorded is started first, and has the first turn."""
    blocks: int
    step_s: float
    """The median without the recorder."""
    median: float
    """What recording adds to the median step: the marks."""
    pairs: float
    """The median over pairs of blocks, one after the other, of what is added to their median steps."""
    mean: float
    """What it adds to all steps together: the middle half of the pairs of blocks without samples, which leaves out those that
    other work disturbed, and what samples add."""
    processor: float
    """The same of the processor time of all threads of rank 0."""
    samples: int
    """Of torch's profiler, in the blocks."""


def measure(
    model: str, ranks: int, backend: str, *, is_first: bool, blocks: int, control: bool, timeout_s: float
) -> Row:
    """Run both jobs; as a control, neither is recorded.

    Raises:
        BenchError: a rank failed or hung, with the end of what it said.
    """
    with tempfile.TemporaryDirectory() as folder, Loopback(hosts=1) as bed:
        os.mkdir(os.path.join(folder, "profile"))
        for job in JOBS:
            os.mkfifo(os.path.join(folder, job))
        options = {
            "model": model,
            "ranks": ranks,
            "backend": backend,
            "jobs": JOBS[::-1] if is_first else JOBS,
            "control": control,
            "folder": folder,
            "blocks": blocks,
            "steps": STEPS[model],
            "warmup": max(2, -(-_WARM_UP // STEPS[model])),
        }
        what = _name(model, ranks, backend)
        said = run_program(bed, "recording_start", options, what=what, ranks=2 * ranks, timeout_s=timeout_s)
        plain, recorded = (said[ranks], said[0]) if is_first else (said[0], said[ranks])
        sampled = [] if control else _samples(folder, recorded)
        return summarise(plain, recorded, sampled, model=model, ranks=ranks, backend=backend, is_first=is_first)


def _name(model: str, ranks: int, backend: str) -> str:
    return f"{model}, {plural(ranks, 'rank')}{f' over {backend}' if backend else ''}"


def _samples(folder: str, blocks: Sequence[dict[str, Any]]) -> list[int]:
    """In which blocks samples were taken, one number for each."""
    from penstock.profiling.readers import load

    records = load(Path(folder, "profile"))
    if not isinstance(records, list) or not any(record.steps for record in records):
        raise BenchError("the job that was to be recorded was not")
    first = next(record for record in records if record.header.rank == 0 and not record.is_of_host)
    # Each block has a step before the first that is measured.
    length = 1 + len(blocks[0]["ns"])
    begins = len(first.steps) - length * len(blocks)
    return [(sample.step - begins) // length for sample in first.samples if sample.step >= begins]


def summarise(
    plain: Sequence[dict[str, Any]], recorded: Sequence[dict[str, Any]], sampled: Sequence[int], **kind: Any
) -> Row:
    """What the first rank of each job said, in numbers. Pure.

    Args:
        sampled: blocks in which samples were taken. What one costs may lie in the next block, too.
        kind: of the jobs: the first fields of a row.
    """
    touched = {block + after for block in sampled for after in (0, 1) if block + after < len(plain)}
    pairs = [pair for number, pair in enumerate(zip(plain, recorded, strict=True)) if number not in touched]
    if not pairs:
        raise BenchError(f"{kind['model']}: every block has a sample: make more --blocks")

    def added(of: Callable[[dict[str, Any]], float]) -> list[float]:
        return [of(with_it) / of(without) - 1 for without, with_it in pairs]

    def whole(of: Callable[[dict[str, Any]], float]) -> float:
        """Of all blocks."""
        usual, usual_plain = (statistics.median(of(pair[at]) for pair in pairs) for at in (1, 0))
        samples = sum(of(recorded[block]) - usual for block in touched)
        return _middle(added(of)) + samples / (usual_plain * len(plain))

    steps = [
        statistics.median(itertools.chain.from_iterable(block["ns"] for block in job)) for job in (plain, recorded)
    ]
    return Row(
        **kind,
        blocks=len(plain),
        step_s=steps[0] / 1e9,
        median=steps[1] / steps[0] - 1,
        pairs=statistics.median(added(lambda block: statistics.median(block["ns"]))),
        mean=whole(lambda block: sum(block["ns"])),
        processor=whole(lambda block: block["processor_ns"]),
        samples=len(sampled),
    )


def _middle(values: Sequence[float]) -> float:
    """The mean of the middle half."""
    ordered, quarter = sorted(values), len(values) // 4
    return statistics.fmean(ordered[quarter : len(ordered) - quarter])


def table(rows: Sequence[Row]) -> Table:
    """One line for all pairs of jobs of the same kind."""
    columns = [
        Column("model", is_text=True),
        Column("ranks"),
        Column("backend", is_text=True),
        Column("jobs", meaning="pairs of them; what follows are means of both orders' medians over these"),
        Column("step", meaning="the median of the job that is not recorded"),
        Column("median", meaning="what recording adds to the median step"),
        Column("from, to", meaning="the same, of the middle half of the pairs of jobs"),
        Column("blocks", meaning="what it adds in the median pair of blocks"),
        Column(
            "mean", meaning="what it adds to all steps: the middle half of the pairs of blocks, and what samples cost"
        ),
        Column("processor", meaning="the same of processor time"),
        Column("samples", meaning="steps with torch's profiler in the blocks, of all jobs"),
    ]
    kinds: dict[tuple[str, int, str], list[Row]] = {}
    for row in rows:
        kinds.setdefault((row.model, row.ranks, row.backend), []).append(row)
    lines = []
    for (model, ranks, backend), found in kinds.items():
        medians = sorted(row.median for row in found)
        spread = medians[len(medians) // 4], medians[-1 - len(medians) // 4]
        figures = [_of_both_orders(found, name) for name in ("median", "pairs", "mean", "processor")]
        cells = [model, str(ranks), backend, str(len(found))]
        cells += [milliseconds(statistics.median(row.step_s for row in found)), f"{figures[0]:+.1%}"]
        cells += [f"{spread[0]:+.1%}, {spread[1]:+.1%}", *(f"{each:+.1%}" for each in figures[1:])]
        lines.append(Line([*cells, str(sum(row.samples for row in found))]))
    return Table("What recording adds to a step", columns, lines, note="Target: 2 %.")


def _of_both_orders(rows: Sequence[Row], name: str) -> float:
    """The mean of the medians of a figure, where the recorded job is first and where it is second."""
    orders: dict[bool, list[float]] = {}
    for row in rows:
        orders.setdefault(row.is_first, []).append(getattr(row, name))
    return statistics.fmean(map(statistics.median, orders.values()))


_WARM_UP = 24
"""Steps at least: connections, caches, and the three samples that are taken early."""
