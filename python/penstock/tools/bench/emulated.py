"""What the benches of one subject on emulated hosts share: the options of their link, and how their rows are published."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import click

from penstock.reports import Next, Page, Picture, Section, Table
from penstock.tools.bench import machine
from penstock.tools.bench.options import Function, parse_flow
from penstock.tools.bench.output import result_console, write_json, write_report
from penstock.tools.bench.report import does_not_show
from penstock.tools.testbed.link import LinkSpec

Row = TypeVar("Row")


def link_options(function: Function) -> Function:
    """The options ``--rate`` and ``--flow``, of which `link_of` makes a link."""
    flow = click.option("--flow", default="200", show_default=True, help="Mbit/s that one flow gets at most.")
    return click.option("--rate", type=float, default=1000.0, show_default=True, help="Mbit/s of a link.")(
        flow(function)
    )


def link_of(rate: float, flow: str) -> LinkSpec:
    """Raises click.UsageError or click.BadParameter."""
    try:
        return LinkSpec(rate_mbit=rate, flow_mbit=parse_flow(flow))
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def names_of(what: str, text: str, known: Sequence[str]) -> list[str]:
    """The names in ``text``, each a ``what`` that is known. Raises click.UsageError."""
    names = text.split(",")
    if unknown := [name for name in names if name not in known]:
        raise click.UsageError(f"no {what} {', '.join(unknown)}: there are {', '.join(known)}")
    return names


@dataclass(frozen=True)
class Story:
    """What a report says besides its numbers."""

    kind: str
    answer: str
    picture: Picture
    next: Next


def publish(
    rows: Sequence[Row],
    *,
    table: Callable[[Sequence[Row]], Table],
    story: Callable[[Sequence[Row]], Story],
    link: LinkSpec,
    description: dict[str, Any],
    json_path: str | None,
    report_path: str | None,
) -> None:
    """Print the table of a run's rows (dataclasses), and write what was asked for.

    Raises click.ClickException: a file cannot be written.
    """
    result_console().print(table(rows).for_terminal())
    write_json(json_path, description, [asdict(row) for row in rows])  # type: ignore[call-overload]
    write_report(report_path, lambda: page(story(rows), table(rows), link, description))


def page(story: Story, table: Table, link: LinkSpec, description: dict[str, Any]) -> Page:
    """The report of a run."""
    return Page(
        kind=story.kind,
        answer=story.answer,
        picture=story.picture,
        next=story.next,
        setting=f"Emulated hosts, each with a link of {link.describe()}.",
        sections=[
            Section("In numbers", [table]),
            Section("What this does not show", [does_not_show(link)]),
            Section("Conditions", [machine.lines(description)]),
        ],
    )
