"""``penstock bench causes``: how often `penstock profile` names what is wrong with a training in which something is.

Each training runs on emulated hosts with one fault, drawn from a seed, and is right if that cause comes first, with the rank or
the link that it was planted on. The target: 95 of 100.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from penstock.reports import Column, Line, Table
from penstock.tools.bench import machine, planted
from penstock.tools.bench.emulated import names_of
from penstock.tools.bench.launcher import BenchError
from penstock.tools.bench.options import check_files
from penstock.tools.bench.output import reporting_errors, result_console, say, write_json

TARGET = 0.95


@dataclass(frozen=True)
class Outcome:
    """Of one training."""

    plan: planted.Plan
    is_right: bool
    first: str
    """The first cause, in its own words."""


@click.command()
@click.option("--runs", type=click.IntRange(1), default=24, show_default=True, help="Trainings.")
@click.option("--first", type=click.IntRange(0), default=0, show_default=True, help="The first one's seed.")
@click.option("--faults", default=",".join(planted.FAULTS), show_default=True, help="By turns, one a training.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False), help="Write what was found to this file.")
def command(runs: int, first: int, faults: str, json_path: str | None) -> None:
    """Measure how often `penstock profile` names the right cause first.

    Needs root, for emulated hosts, and a machine on which nothing else computes. A training takes 20 to 60 s.
    """
    check_files(json_path=json_path, report_path=None)
    chosen = names_of("fault", faults, planted.FAULTS)
    outcomes: list[Outcome] = []
    failed = 0
    with reporting_errors():
        description = machine.describe()
        for seed in range(first, first + runs):
            plan = planted.drawn(chosen[seed % len(chosen)], seed)
            try:
                with tempfile.TemporaryDirectory() as folder:
                    found = planted.profiled(plan, Path(folder))
            except BenchError as error:
                # The others count still: 200 take an hour.
                failed += 1
                say(f"{seed}: {plan.fault}: {error}")
                continue
            told = f"{found.causes[0].kind}: {found.causes[0].text}" if found.causes else "no cause"
            outcomes.append(Outcome(plan, planted.is_found(plan, found), told))
            say(f"{seed}: {plan.fault}: {'right' if outcomes[-1].is_right else 'WRONG, ' + told}")
            write_json(json_path, description, [asdict(each) for each in outcomes])
    if outcomes:
        result_console().print(table(outcomes).for_terminal())
    if failed:
        raise click.ClickException(f"{failed} of {runs} trainings failed, and are not in the table")


def table(outcomes: Sequence[Outcome]) -> Table:
    """By fault, and all."""
    columns = [
        Column("fault", is_text=True),
        Column("trainings"),
        Column("right", meaning="this cause first, of the right rank or link"),
        Column("wrong seeds", is_text=True),
    ]
    lines = [_line(fault, [one for one in outcomes if one.plan.fault == fault]) for fault in planted.FAULTS]
    lines.append(_line("all", outcomes))
    note = f"Target: {TARGET:.0%}."
    return Table("Causes of planted faults", columns, [line for line in lines if line], note=note)


def _line(name: str, outcomes: Sequence[Outcome]) -> Line | None:
    if not outcomes:
        return None
    right = sum(one.is_right for one in outcomes)
    wrong = ", ".join(str(one.plan.seed) for one in outcomes if not one.is_right)
    cells = [name, str(len(outcomes)), f"{right}, {right / len(outcomes):.1%}", wrong]
    return Line(cells, kind="best" if name == "all" else "plain")
