"""``penstock profile``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.errors import PenstockError
from penstock.tools.profile import run

if TYPE_CHECKING:
    from penstock.profiling.breakdown import Breakdown
    from penstock.profiling.record import Record

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command("profile", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("-o", "--output", type=click.Path(file_okay=False, path_type=Path), help="Folder of the records.")
@click.option("--read", "read", type=click.Path(exists=True, path_type=Path), help="Run nothing: what a file tells.")
@click.option("--html", type=_FILE, help="Write a report.")
@click.option("--perfetto", type=_FILE, help="Write a trace for ui.perfetto.dev.")
@click.option("--csv", type=_FILE, help="Write the table.")
@click.option("--json", type=_FILE, help="Write the table.")
@click.argument("arguments", nargs=-1, metavar="[--] [SCRIPT.py | COMMAND] [ARGS]...", type=click.UNPROCESSED)
def command(
    arguments: tuple[str, ...],
    output: Path | None,
    read: Path | None,
    html: Path | None,
    perfetto: Path | None,
    csv: Path | None,
    json: Path | None,
) -> None:
    """Tell where the time of a training step goes, rank by rank.

    Runs a script, or any command that starts scripts, without a change to them, over any backend. It records in the folder
    of --output [default: penstock-profile-1, -2, ...], and tells afterwards; the exit code is the command's. With --read it
    tells from such a folder, or from a file of another tool.

    \b
    Examples: penstock profile train.py --epochs 3
              penstock profile -- torchrun --nproc-per-node 2 train.py
              penstock profile --read penstock-profile-1 --html report.html
    """
    if bool(arguments) == (read is not None):
        raise click.UsageError("name a script, a command behind --, or what to --read")
    wanted = {"html": html, "perfetto": perfetto, "csv": csv, "json": json}
    try:
        if read is not None:
            from penstock.profiling.readers import load

            _tell(load(read), wanted)
            return
        started = run.started(arguments)
        folder = run.fresh_folder(output)
    except PenstockError as error:
        raise click.ClickException(str(error)) from error
    code = run.run(started, folder)
    try:
        records = _load(folder)
        said = run.complaints(folder, records)
        if records:
            _tell(records, wanted)
        for text in said:
            click.echo(f"penstock profile: {text}", err=True)
        if records:
            click.echo(f"the records are in {folder} (penstock profile --read {folder})")
        elif output is None and not any(folder.iterdir()):
            folder.rmdir()
    except PenstockError as error:
        click.echo(f"penstock profile: {error}", err=True)
    sys.exit(code)


def _load(folder: Path) -> list[Record]:
    """Nothing, where there is nothing: that is told apart."""
    if not any(folder.glob("rank-*.jsonl")):
        return []
    from penstock.profiling.readers import load

    records = load(folder)
    assert isinstance(records, list), "a folder of ours has records"
    return records


def _tell(found: Sequence[Record] | Breakdown, wanted: dict[str, Path | None]) -> None:
    from penstock.profiling import writers
    from penstock.profiling.breakdown import Breakdown
    from penstock.profiling.divide import divide
    from penstock.tools.profile.report import page
    from penstock.tools.profile.shown import table

    records: list[Record] = [] if isinstance(found, Breakdown) else list(found)
    breakdown = found if isinstance(found, Breakdown) else divide(records)
    click.echo(table(breakdown), nl=False)
    for problem in breakdown.problems:
        click.echo(f"penstock profile: {problem}", err=True)
    if wanted["csv"]:
        writers.csv(breakdown, wanted["csv"])
    if wanted["json"]:
        writers.json(breakdown, wanted["json"])
    if wanted["perfetto"]:
        if not records:
            raise click.ClickException("what was read has sums only, and no moments for a trace")
        writers.perfetto(records, wanted["perfetto"])
    if wanted["html"]:
        from penstock.reports.page import render

        wanted["html"].write_text(render(page(breakdown, records)), encoding="utf-8")
