"""``penstock characterize``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from penstock.errors import PenstockError
from penstock.tools.characterize.matrix import Cell, Matrix

__all__ = ["command"]


@click.command("characterize")
@click.argument("matrix", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("-o", "--output", type=click.Path(file_okay=False, path_type=Path), help="Folder of the runs.")
@click.option(
    "--show", "shown", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Run nothing: this folder."
)
@click.option(
    "--compare",
    nargs=2,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Run nothing: two folders, which steps have changed.",
)
@click.option("--html", "html_path", type=click.Path(dir_okay=False, path_type=Path), help="Write a report.")
@click.option(
    "--memory", type=click.IntRange(64), metavar="MIB", help="Also the largest batch of ranks with so much memory."
)
@click.option("--timeout", type=float, default=900.0, show_default=True, help="Seconds of one run.")
def command(
    matrix: Path | None,
    output: Path | None,
    shown: Path | None,
    compare: tuple[Path, Path] | None,
    html_path: Path | None,
    memory: int | None,
    timeout: float,
) -> None:
    """Where steps of known models go, over a matrix of ranks, batches, networks and transports.

    MATRIX is a YAML file (docs/guide/characterize.md). Each of its runs is made under `penstock profile`, and kept in the
    folder of --output [default: beside MATRIX, under its name]; the command goes on where it stopped.

    \b
    Examples: penstock characterize matrix.yaml --html report.html
              penstock characterize --show matrix.runs
              penstock characterize --compare before.runs after.runs
    """
    if sum((matrix is not None, shown is not None, bool(compare))) != 1:
        raise click.UsageError("name a matrix, a folder to --show, or two to --compare")
    from penstock.tools.bench.output import result_console, write_file
    from penstock.tools.characterize import results, tables

    try:
        if compare:
            before, after = (results.read(folder) for folder in compare)
            table = tables.comparison(before, after)
            if not table.lines:
                raise click.ClickException("the two folders have no cell in common")
            result_console().print(table.for_terminal(with_meanings=False))
            return
        folder = shown or output or (matrix or Path()).with_suffix(".runs")
        if matrix is not None:
            _run(matrix, folder, memory, timeout)
        outcomes = results.read(folder)
    except PenstockError as error:
        raise click.ClickException(str(error)) from error
    if not outcomes:
        raise click.ClickException(f"{folder} has no run that has ended")
    from penstock.tools.characterize.findings import findings

    console = result_console()
    console.print(tables.times(outcomes).for_terminal())
    console.print(tables.judged(findings(outcomes)).for_terminal())
    if html_path:
        from penstock.reports import render

        write_file(str(html_path), render(tables.page(outcomes, str(folder))))


def _run(path: Path, folder: Path, memory: int | None, timeout_s: float) -> None:
    from penstock.tools.bench.output import say
    from penstock.tools.characterize import matrix, results, running
    from penstock.workloads.transformer.shapes import MODELS

    given = matrix.read(path, sorted(MODELS))
    for cell, why in given.left_out:
        say(f"{cell.key}: left out, {why}")
    if not given.cells:
        raise click.ClickException(f"{path} has no cell that can run")
    folder.mkdir(parents=True, exist_ok=True)
    kept = {(outcome.cell, outcome.repeat) for outcome in results.read(folder)}
    wanted = [(cell, repeat) for repeat in range(given.repeats) for cell in given.cells]
    if memory is not None:
        wanted += [(cell, 0) for cell in _largest(given, memory, timeout_s)]
    missing = [each for each in wanted if each not in kept]
    if len(missing) < len(wanted):
        say(f"{len(wanted) - len(missing)} of {len(wanted)} runs are in {folder}")
    for number, (cell, repeat) in enumerate(missing, 1):
        say(f"{number} of {len(missing)}: {cell.key}, run {repeat + 1} of {given.repeats}")
        outcome = running.run(cell, repeat, steps=given.steps, seed=given.seed, folder=folder, timeout_s=timeout_s)
        results.write(folder, outcome)


def _largest(given: Matrix, memory: int, timeout_s: float) -> list[Cell]:
    """Cells with the largest batch that fits, for each kind of cell."""
    from penstock.tools.bench.output import say
    from penstock.tools.characterize import running

    found: list[Cell] = []
    known: dict[Any, int] = {}
    for cell in given.cells:
        key = (cell.model, cell.parallel, cell.ranks, cell.micro_batch, cell.sequence)
        if key not in known:
            say(f"looking for the largest batch of {cell.model} with {cell.ranks} ranks of {memory} MiB ...")
            known[key] = running.largest_batch(cell, memory << 20, seed=given.seed, timeout_s=timeout_s)
            say(f"it is {known[key]}" if known[key] else "not even one sequence a rank fits")
        if known[key]:
            larger = replace(cell, batch=known[key])
            if larger not in found and larger not in given.cells:
                found.append(larger)
    return found
