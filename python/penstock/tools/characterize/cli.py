"""``penstock characterize``."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import click

from penstock.errors import PenstockError
from penstock.extras import need
from penstock.numbers import plural
from penstock.texts import harmless
from penstock.tools.characterize.matrix import Cell, Matrix

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.reports import Page

__all__ = ["command"]

TIMEOUT_S = 900.0


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
    help="Run nothing: two folders, which steps have changed (Welch's t-test; Holm: 5 % errors for all cells together).",
)
@click.option("--html", "html_path", type=click.Path(dir_okay=False, path_type=Path), help="Write a report.")
@click.option(
    "--memory", type=click.IntRange(64), metavar="MIB", help="Also the largest batch of ranks with so much memory."
)
@click.option("--timeout", type=float, help=f"Seconds of one run.  [default: {TIMEOUT_S:g}]")
def command(
    matrix: Path | None,
    output: Path | None,
    shown: Path | None,
    compare: tuple[Path, Path] | None,
    html_path: Path | None,
    memory: int | None,
    timeout: float | None,
) -> None:
    """Where steps of known models go, over a matrix of ranks, batches, networks and transports.

    MATRIX is a YAML file (docs/guide/characterize.md). Each of its runs is made under `penstock profile`, and kept in the
    folder of --output [default: beside MATRIX, under its name]; the command goes on where it stopped. If a run fails it goes on
    with the others, and ends with status 1; run again, it makes those that failed.

    \b
    Examples: penstock characterize matrix.yaml --html report.html
              penstock characterize --show matrix.runs
              penstock characterize --compare before.runs after.runs
    """
    if sum((matrix is not None, shown is not None, bool(compare))) != 1:
        raise click.UsageError("name a matrix, a folder to --show, or two to --compare")
    for name, value in (("--output", output), ("--memory", memory), ("--timeout", timeout)):
        if value is not None and matrix is None:
            raise click.UsageError(f"{name} is of runs, and --show and --compare run nothing: leave it out")
    if html_path is not None:
        need("penstock characterize --html", "matplotlib")
    from penstock.tools.bench.output import result_console
    from penstock.tools.characterize import memory as memory_room
    from penstock.tools.characterize import results, running, tables

    failed: list[Failed] = []
    try:
        if compare:
            _compare(compare, html_path)
            return
        folder = shown or output or (matrix or Path()).with_suffix(".runs")
        if matrix is not None:
            with _ending_well(folder):
                failed = _run(matrix, folder, memory, TIMEOUT_S if timeout is None else timeout)
        outcomes, limits = results.read(folder), memory_room.Tries(folder).limits()
    except PenstockError as error:
        raise click.ClickException(harmless(str(error))) from error
    if not outcomes:
        raise click.ClickException("\n".join([f"{folder} has no run that has ended", *_listed(failed)]))
    from penstock.reports.terminal import print_first_screen
    from penstock.tools.characterize.findings import ABSENT, findings
    from penstock.tools.characterize.report import page

    console = result_console()
    console.print(tables.times(outcomes).fitted(console.width))
    found = findings(outcomes)
    judged = [each for each in found if each.verdict != ABSENT]
    if judged:
        console.print(tables.judged(judged).fitted(console.width))
    if len(judged) < len(found):
        text = f"{len(found) - len(judged)} of {len(found)} findings of the paper need cells that this matrix does not have"
        console.print(f"{text}: the report lists them (--html)\n", highlight=False)
    if differ := tables.unlike({str(folder): outcomes}):
        console.print(f"{differ}\n", markup=False, highlight=False)
    if complained := [one for one in outcomes if one.problems]:
        text = f"The profile complains of {len(complained)} of {plural(len(outcomes), 'run')} (all: --html), first of"
        text += f" {complained[0].cell.key}: {complained[0].problems[0]}\n"
        console.print(text, markup=False, highlight=False)
    told = page(outcomes, str(folder), limits, functools.partial(running.course_of, folder))
    print_first_screen(told, console)
    _write(told, html_path, console)
    if failed:
        text = f"{plural(len(failed), 'run')} failed, and what is above is without them. The same command makes them again."
        raise click.ClickException("\n".join([text, *_listed(failed)]))


def _compare(folders: tuple[Path, Path], html_path: Path | None) -> None:
    from penstock.tools.bench.output import result_console
    from penstock.tools.characterize import report, results, tables

    before, after = (results.read(folder) for folder in folders)
    table = tables.comparison(before, after)
    if not table.lines:
        keys = [next(iter(sorted({one.cell.key for one in runs})), "none") for runs in (before, after)]
        raise click.ClickException(f"the two folders have no cell in common: one has {keys[0]}, the other {keys[1]}")
    console = result_console()
    console.print(table.fitted(console.width))
    if differ := tables.unlike({str(folder): runs for folder, runs in zip(folders, (before, after), strict=True)}):
        console.print(differ, markup=False, highlight=False)
    told = report.comparison(before, after, *map(str, folders))
    console.print(f"{told.answer}.", highlight=False)
    _write(told, html_path, console)


def _write(page: Page, path: Path | None, console: Console) -> None:
    from penstock.reports import render
    from penstock.tools.bench.output import write_file

    if path:
        write_file(str(path), render(page))
        console.print(f"Report: {path.resolve()}", highlight=False, soft_wrap=True)


class Failed(NamedTuple):
    """A run that came to nothing."""

    what: str
    error: PenstockError


def _listed(failed: Sequence[Failed]) -> list[str]:
    """Each in a line: what, and the last error that it said, or the last line."""
    told = []
    for what, error in failed:
        lines = [line.strip() for line in str(error).splitlines() if any(map(str.isalnum, line))]
        errors = [line for line in lines if _ERROR.search(line)]
        told.append(f"  {what}: {(errors or lines or [''])[-1][:300]}")
    return told


_ERROR = re.compile(r"(Error|Exception|Config|Refused|Timeout|PeerLost): \S")
"""torchrun says more below what a rank said."""


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other commands from running cells in the folder: one would overwrite the records of the other. The kernel's lock on a
    file ends with this process, however that ends; the file stays."""
    from penstock.tools.bench.output import say

    path = folder / LOCK
    try:
        file = path.open("a")
    except OSError as error:
        raise click.ClickException(f"cannot write {path}: {error.strerror}; name another --output") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = f"another penstock characterize runs its matrix in {folder}, and two would overwrite each other's records"
            raise click.ClickException(f"{text}: wait until it has ended, or name another --output") from None
        except OSError as error:  # some network file systems have no locks
            say(f"cannot lock {path} ({error.strerror}): start no other penstock characterize in this folder")
        yield


LOCK = ".lock"
"""Of a folder of runs. No reader takes it for a run: those end with .json."""


@contextlib.contextmanager
def _ending_well(folder: Path) -> Iterator[None]:
    """A Ctrl-C or SIGTERM ends the processes of the run that is going on, and says what is left."""

    def terminate(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except KeyboardInterrupt:
        click.echo(f"stopped: runs that have ended are in {folder}, and the same command goes on there", err=True)
        sys.exit(128 + signal.SIGINT)
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(path: Path, folder: Path, memory: int | None, timeout_s: float) -> list[Failed]:
    from penstock.tools.bench.output import say
    from penstock.tools.characterize import matrix, results, running
    from penstock.workloads.transformer.shapes import MODELS

    given = matrix.read(path, sorted(MODELS))
    for cell, why in given.left_out:
        say(f"{cell.key}: left out, {why}")
    if not given.cells:
        raise click.ClickException(f"{path} has no cell that can run")
    if memory is not None and any(cell.launch or cell.device != "cpu" for cell in given.cells):
        text = "--memory limits the memory of processes on this host, and not that of GPUs or of a launch"
        raise click.ClickException(f"{text}: leave it out, or launch and device")
    if lacking := running.lacks_launcher(given.cells) or running.lacks_gpus(given.cells):
        raise click.ClickException(f"{path}: {lacking}")
    folder.mkdir(parents=True, exist_ok=True)
    # Until the command has ended: what it shows at its end is drawn from the records, too.
    click.get_current_context().with_resource(_alone(folder))
    ended = results.read(folder)
    for one in ended:
        if one.steps and (one.steps, one.seed) != (given.steps, given.seed):
            there = f"{plural(one.steps, 'step')} with seed {one.seed}"
            text = f"{path} wants {plural(given.steps, 'step')} with seed {given.seed}, and runs in {folder} are of {there}"
            raise click.ClickException(f"{text}: name another --output")
    kept = {(outcome.cell, outcome.repeat) for outcome in ended}
    wanted = [(cell, repeat) for repeat in range(given.repeats) for cell in given.cells]
    failed: list[Failed] = []
    if memory is not None:
        wanted += [(cell, 0) for cell in _largest(given, memory, folder, timeout_s, failed)]
    missing = [each for each in wanted if each not in kept]
    if len(missing) < len(wanted):
        say(f"{len(wanted) - len(missing)} of {len(wanted)} runs are in {folder}")
    for number, (cell, repeat) in enumerate(missing, 1):
        say(f"{number} of {len(missing)}: {cell.key}, run {repeat + 1} of {given.repeats}")
        try:
            outcome = running.run(cell, repeat, steps=given.steps, seed=given.seed, folder=folder, timeout_s=timeout_s)
        except running.RunFailed as error:
            say(f"it failed: {error}")
            failed.append(Failed(f"{cell.key}, run {repeat + 1}", error))
        else:
            # A folder that cannot be written ends it all.
            results.write(folder, outcome)
    return failed


def _largest(given: Matrix, mib: int, folder: Path, timeout_s: float, failed: list[Failed]) -> list[Cell]:
    """Cells with the largest batch that fits, for each cell of the matrix. Searches that fail are added to ``failed``."""
    from penstock.tools.bench.output import say
    from penstock.tools.characterize import running
    from penstock.tools.characterize.memory import Kind, Tries, kind_of

    tries = Tries(folder)
    known: dict[Kind, int] = {}

    def fits(cell: Cell) -> bool:
        say(f"does a batch of {cell.batch} fit? {cell.model} with {cell.ranks} ranks of {mib} MiB ...")
        return running.fits(cell, mib << 20, seed=given.seed, timeout_s=timeout_s)

    found: dict[Cell, None] = {}
    for cell in given.cells:
        kind = kind_of(cell)
        if kind not in known:
            try:
                known[kind] = tries.largest(cell, mib, fits)
            except running.RunFailed as error:
                say(f"the search failed, and the others go on: {error}")
                failed.append(Failed(f"the largest batch of {cell.model} with {cell.ranks} ranks of {mib} MiB", error))
                known[kind] = 0
                continue
            most = f"the largest batch is {known[kind]}" if known[kind] else "not even one sequence a rank fits"
            say(f"{cell.model}, {cell.parallel} parallel, {cell.ranks} ranks of {mib} MiB: {most}")
        if known[kind]:
            found.setdefault(replace(cell, batch=known[kind]))
    return [cell for cell in found if cell not in given.cells]
