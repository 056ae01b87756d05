"""``penstock convert``."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
from rich.console import Console
from rich.syntax import Syntax

from penstock.extras import need

if TYPE_CHECKING:
    from penstock.tools.convert.base import Finding, Options
    from penstock.tools.convert.core import Converted


def conversion_options(function: Any) -> Any:
    """The options that say how to convert, the same for every command that does."""
    options = [
        click.option(
            "--batch",
            type=click.Choice(["global", "per-rank"]),
            default="global",
            show_default=True,
            help="What the script's batch size means: that of all ranks together, so that each takes a part of it, or "
            "that of each rank.",
        ),
        click.option("--scale-lr", is_flag=True, help="Multiply learning rates by the number of ranks."),
    ]
    for option in reversed(options):
        function = option(function)
    return function


@click.command("convert")
@click.argument("script", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write the new script here.")
@click.option("--force", is_flag=True, help="Overwrite the file that -o names.")
@click.option("--quiet", is_flag=True, help="Do not show the difference.")
@conversion_options
def command(script: Path, output: Path | None, force: bool, quiet: bool, batch: Any, scale_lr: bool) -> None:
    """Turn a training script for one device into one for several ranks.

    Shows the difference, and lists what was left alone with file and line. Without -o nothing is written.

    \b
    Exit codes: 0 converted, 1 a file cannot be read or written, or is no Python,
    2 wrong usage, 3 nothing in it trains, 4 it is distributed already,
    5 a parameter cannot be covered.

    Example: penstock convert train.py -o train_dist.py
    """
    need("penstock convert", "libcst")
    from penstock.tools.convert.base import Options

    if output is not None and output.exists() and not force:
        fail(f"{output} is there already: --force overwrites it", CANNOT)
    source = read(script)
    converted = convert_or_fail(source, script, Options(batch=batch, scale_lr=scale_lr))
    if not quiet:
        show(difference(source, converted.text, str(script), str(output or script)))
    report(script, converted)
    if output is not None:
        try:
            output.write_text(converted.text, encoding="utf-8")
        except OSError as error:
            fail(f"cannot write {output}: {error.strerror}", CANNOT)
        click.echo(f"written to {output}: start it with `torchrun --nproc-per-node N {output}`", err=True)


def read(script: Path, verb: str = "convert") -> str:
    try:
        return script.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        fail(f"cannot read {script}: {error}", CANNOT, verb)


def beside(script: Path) -> Callable[[str], str | None]:
    """Reads modules of the folder of `script`, by name."""

    def text(name: str) -> str | None:
        base = script.parent.joinpath(*name.split("."))
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            try:
                return path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
        return None

    return text


def convert_or_fail(source: str, script: Path, options: Options) -> Converted:
    from penstock.tools.convert.base import Refused
    from penstock.tools.convert.core import convert

    try:
        return convert(source, options, beside(script))
    except Refused as refusal:
        where = f"{script}:{refusal.line}" if refusal.line else str(script)
        fail(f"{where}: {refusal}", EXIT_CODES[refusal.reason])


def report(script: Path, converted: Converted) -> None:
    """What was changed, in numbers, and what was left alone, a line each; to standard error."""
    click.echo(f"{script}: {len(converted.edits)} changes, {len(converted.findings)} left alone", err=True)
    for finding in converted.findings:
        click.echo(describe(script, finding), err=True)


def describe(script: Path, finding: Finding) -> str:
    return f"{script}:{finding.line}: {finding.what}: {finding.why}; {finding.todo}"


def difference(before: str, after: str, name_before: str, name_after: str) -> str:
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), name_before, name_after
    )
    # A last line without its end would run into the next one.
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def show(diff: str) -> None:
    """To standard output: in colours on a terminal, as plain text otherwise, so that `patch` can read it."""
    if sys.stdout.isatty():
        Console().print(Syntax(diff, "diff", theme="ansi_dark", background_color="default", word_wrap=False))
    else:
        click.echo(diff, nl=False)


def fail(message: str, code: int, verb: str = "convert") -> NoReturn:
    """End ``penstock VERB``; `run` shares what is here."""
    click.echo(f"penstock {verb}: {message}", err=True)
    sys.exit(code)


# Exit codes, as docs/reference/convert.md lists them. 2 is click's own for wrong usage.
CANNOT = 1
EXIT_CODES = {"syntax": CANNOT, "nothing": 3, "distributed": 4, "model": 5}
