"""What the commands of the bench share: how sizes, ranks and links are written on the command line, and the files that results go
to."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from penstock import renamed
from penstock.extras import need
from penstock.files import check_writable

Function = TypeVar("Function", bound=Callable[..., Any])


def files(what: str) -> Callable[[Function], Function]:
    """The options ``--json`` and ``--report``, as ``json_path`` and ``report_path``; `check_files` looks at them before the run.

    ``what`` is the help of ``--json``.
    """

    def add(function: Function) -> Function:
        function = click.option(
            "--report",
            "report_path",
            type=click.Path(dir_okay=False),
            help="Write a page with charts to this file (HTML).",
        )(function)
        return click.option("--json", "json_path", type=click.Path(dir_okay=False), help=what)(function)

    return add


def bucket_option(what: str) -> Callable[[Any], Any]:
    """The option ``--bucket`` with that text, also under its old name ``--unit``, which --help does not show."""

    def take(context: click.Context, _: click.Parameter, value: str | None) -> None:
        if value is not None:
            print(renamed.message("--unit", "--bucket"), file=sys.stderr, flush=True)
            context.default_map = {**(context.default_map or {}), "bucket": value}

    def add(command: Any) -> Any:
        command = click.option("--unit", hidden=True, is_eager=True, expose_value=False, callback=take)(command)
        return click.option("--bucket", default="1M", show_default=True, help=what)(command)

    return add


def check_files(*, json_path: str | None, report_path: str | None, plot_path: str | None = None) -> None:
    """Refuses before the run what would fail after it.

    Raises click.BadParameter, or penstock.errors.MissingExtra.
    """
    given = {"--json": json_path, "--report": report_path, "--plot": plot_path}
    if plot_path and Path(plot_path).suffix.lower() not in PLOTS:
        raise click.BadParameter(f"{plot_path}: plots are .svg, .pdf or .png files")
    for name in ("--report", "--plot"):
        if given[name]:
            need(f"penstock bench {name}", "matplotlib")
    for name, path in given.items():
        if not path:
            continue
        if not Path(path).absolute().parent.is_dir():
            raise click.BadParameter(f"{path}: there is no such folder")
        try:
            check_writable(Path(path))
        except OSError as error:
            raise click.BadParameter(f"{path}: {error.strerror}", param_hint=name) from None


def check_link_is_there(is_there: bool, how: str) -> None:
    """Options of a link that nobody makes must not look as if they counted. Raises click.UsageError."""
    context = click.get_current_context()
    names = [name for name in ("rate", "flow", "delay", "loss") if name in context.params]
    given = [name for name in names if context.get_parameter_source(name) is not ParameterSource.DEFAULT]
    if given and not is_there:
        raise click.UsageError(f"--{given[0]} is of an emulated link, and there is none: add {how}, or leave it out")


def parse_sizes(text: str) -> list[int]:
    """``1K,64M`` lists sizes; ``1K..256M`` takes every fourth power of two from the first to the last. K, M, G are KiB, MiB, GiB.

    Raises click.BadParameter.
    """
    sizes: list[int] = []
    for part in text.split(","):
        first, dots, last = part.partition("..")
        begin = parse_size(first)
        end = parse_size(last) if dots else begin
        if end < begin:
            raise click.BadParameter(f"{part}: the last size is below the first")
        while begin <= end:
            sizes.append(begin)
            begin *= 4
    return sizes


def parse_size(text: str) -> int:
    """Bytes. Raises click.BadParameter."""
    number, unit = text.strip().rstrip("iB"), 1
    if number and number[-1].upper() in UNITS:
        number, unit = number[:-1], UNITS[number[-1].upper()]
    if not number.isdigit() or int(number) == 0:
        raise click.BadParameter(f"{text}: give sizes such as 1K, 64M or 1K..256M")
    return int(number) * unit


def parse_ranks(text: str) -> list[int]:
    """``2,4`` or ``2..4``. Raises click.BadParameter."""
    ranks: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("..")
        if not first.isdigit() or (last and not last.isdigit()):
            raise click.BadParameter(f"{part}: give numbers of ranks such as 2,4 or 2..4")
        ranks += range(int(first), int(last or first) + 1)
    if not ranks or min(ranks) < 2:
        raise click.BadParameter(f"{text}: a collective is measured between 2 ranks or more")
    return ranks


def parse_flow(text: str) -> list[float] | None:
    """Mbit/s of single flows; None where nothing caps them. Raises click.BadParameter."""
    try:
        return [float(part) for part in text.split(",")] if text else None
    except ValueError:
        raise click.BadParameter(f"--flow {text}: give Mbit/s, such as 200 or 60,300") from None


EVERYTHING = "Write everything, every sample too, to this file."

MOST_RANKS = 64
"""As many as a testbed has hosts. Each is a process that imports torch: a few hundred megabytes."""

PLOTS = (".png", ".pdf", ".svg")

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
