"""Where results go: the terminal, a JSON document, a report. And how a command of the bench ends."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from penstock.files import write_whole
from penstock.reports import Page, render
from penstock.tools.bench.launcher import BenchError
from penstock.tools.testbed.system import TestbedUnavailable


def write_json(path: str | None, machine: Mapping[str, Any], runs: Sequence[Mapping[str, Any]], **more: Any) -> None:
    """Everything that a published number must name: hardware, kernel, versions and date, then the runs.

    Nothing without a path.
    """
    if path:
        document = {"format": "penstock-bench/1", **machine, **more, "runs": list(runs)}
        write_file(path, json.dumps(document, indent=1) + "\n")


def write_report(path: str | None, page: Callable[[], Page]) -> None:
    """A page, and where it lies. Nothing without a path."""
    if path:
        write_file(path, render(page()))
        result_console().print(f"Report: {Path(path).resolve()}", highlight=False, soft_wrap=True)


def write_file(path: str, content: str | bytes) -> None:
    """Whole or not at all. Raises click.ClickException."""
    try:
        write_whole(Path(path), content)
    except OSError as error:
        raise click.ClickException(f"{path} could not be written: {error.strerror}") from error


def result_console() -> Console:
    """Standard output; as wide as the tables need where it is a file or a pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on standard error, or, where that is no terminal, a line for each size.

    Call what it yields with (text, done, total), where text is " · " between its parts: ranks, size, series, round.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        told: set[str] = set()

        def tell(text: str, done: int, total: int) -> None:
            head = " · ".join(text.split(" · ")[:2])
            if head not in told:
                told.add(head)
                say(f"{head}  ({done} of {total} turns done)")

        yield tell
        return
    columns = (
        SpinnerColumn(),
        BarColumn(20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("")

        def show(text: str, done: int, total: int) -> None:
            bar.update(task, description=text, completed=done, total=total)

        yield show


def say(text: str) -> None:
    """What is going on, on standard error."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def reporting_errors() -> Iterator[None]:
    """Turns what the bench raises into one message and an exit code; SIGTERM into the same orderly end as Ctrl-C."""

    def terminate(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except (BenchError, TestbedUnavailable, ValueError) as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        click.echo("interrupted: every process of the bench has ended", err=True)
        sys.exit(130)
    finally:
        signal.signal(signal.SIGTERM, before)


WIDTH = 120
