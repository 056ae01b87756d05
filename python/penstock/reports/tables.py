"""A table for the terminal and for the page: the same texts in both."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Literal

from rich import box
from rich import table as rich_table
from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text


@dataclass(frozen=True)
class Column:
    """A column. Its head may have line breaks, which the terminal keeps."""

    head: str
    is_text: bool = False
    """Aligned to the left, as words are; numbers are aligned to the right."""
    meaning: str = ""
    """Listed below the table of a page."""


@dataclass(frozen=True)
class Line:
    """A line: its cells, and the values that it shares with its neighbours."""

    cells: Sequence[str]
    group: tuple[str, ...] = ()
    kind: Literal["plain", "best", "aside"] = "plain"
    """``best`` stands out; ``aside`` is a limit or a control."""
    meaning: str = ""
    """How to read this line."""


@dataclass(frozen=True)
class Table:
    """Lines under columns, the first of which names the line."""

    title: str
    columns: Sequence[Column]
    lines: Sequence[Line]
    groups: Sequence[Column] = ()
    """What `Line.group` holds: columns on the terminal, headings between the lines of a page."""
    note: str = ""

    def for_terminal(self, *, with_meanings: bool = False) -> rich_table.Table:
        """For `rich`. A value of a group is shown once; meanings make a last column, dimmed."""
        shown = rich_table.Table(
            title=Text(self.title, style="bold") if self.title else None,
            title_justify="left",
            caption=self.note or None,
            caption_justify="left",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
            collapse_padding=True,
        )
        for column in (*self.groups, *self.columns):
            justify: Literal["left", "right"] = "left" if column.is_text else "right"
            # Of a narrow terminal's lack of room only long texts suffer.
            no_wrap = column is self.columns[0] or not column.is_text
            shown.add_column(column.head, justify=justify, no_wrap=no_wrap)
        if with_meanings:
            shown.add_column("", style="dim")
        previous: tuple[str, ...] | None = None
        for line in self.lines:
            is_new = line.group != previous
            if previous is not None and is_new:
                shown.add_section()
            group = line.group if is_new else ("",) * len(self.groups)
            meaning = [line.meaning] if with_meanings else []
            # Names may come from files: what looks like markup in them is none.
            shown.add_row(*map(Text, (*group, *line.cells, *meaning)), style=STYLES[line.kind])
            previous = line.group
        return shown

    def fitted(self, width: int) -> RenderableType:
        """For a terminal of ``width`` columns, with nothing cut: as `for_terminal`; or a table for each group, without columns
        for groups; or as lines of text."""
        if self._least_width(self.groups) <= width:
            return self.for_terminal()
        if self.groups and self._least_width(()) <= width:
            return Group(*self._by_group())
        return Group(*self._as_text(width))

    def _least_width(self, groups: Sequence[Column]) -> int:
        """Columns of a terminal below which `for_terminal` cuts numbers, or breaks texts into slivers."""
        cells = [[*line.group[: len(groups)], *line.cells] for line in self.lines]
        total = 2
        for at, column in enumerate((*groups, *self.columns)):
            texts = [*column.head.split("\n"), *(each[at] for each in cells)]
            longest = max(map(cell_len, texts))
            if column.is_text and column is not self.columns[0] and at >= len(groups):
                words = max((cell_len(word) for text in texts for word in text.split()), default=0)
                longest = max(words, min(longest, LEAST_TEXT))
            total += longest + 2
        return total

    def _by_group(self) -> Iterator[RenderableType]:
        yield Text(f"\n{self.title}", style="bold")
        for group, lines in itertools.groupby(self.lines, key=lambda line: line.group):
            alone = [replace(line, group=()) for line in lines]
            yield replace(self, title=", ".join(group), lines=alone, groups=(), note="").for_terminal()
        if self.note:
            yield Text(self.note)

    def _as_text(self, width: int) -> Iterator[RenderableType]:
        yield Text(f"\n{self.title}", style="bold")
        heads = [" ".join(column.head.split()) for column in self.columns]
        for group, lines in itertools.groupby(self.lines, key=lambda line: line.group):
            if group:
                yield Text(f"\n{', '.join(group)}", style="bold")
            for line in lines:
                told = [each for each in zip(self.columns, heads, line.cells, strict=True) if each[2]][1:]
                numbers = [f"{head} {cell}" for column, head, cell in told if not column.is_text]
                texts = [f"{head}: {cell}" for column, head, cell in told if column.is_text]
                yield Text(line.cells[0], style=STYLES[line.kind])
                for text in (*texts, *in_lines(numbers, width - 2, " · ")):
                    yield Padding(Text(text, style=STYLES[line.kind], overflow="fold"), (0, 0, 0, 2))
        if self.note:
            yield Text(self.note)

    def html(self) -> str:
        """For a page. It scrolls sideways within itself, and its first column stays in sight."""
        heads = "".join(
            f'<th scope="col"{_is_text(column)}>{_breakable(" ".join(column.head.split()))}</th>'
            for column in self.columns
        )
        kinds = [
            ' class="text long"'
            if column.is_text and any(len(line.cells[at]) > LONG_TEXT for line in self.lines)
            else _is_text(column)
            for at, column in enumerate(self.columns)
        ]
        body: list[str] = []
        previous: tuple[str, ...] = ()
        for line in self.lines:
            if line.group != previous:
                told = ", ".join(f"{each.head} {value}" for each, value in zip(self.groups, line.group, strict=True))
                heading = f'<th colspan="{len(self.columns)}" scope="rowgroup"><span>{escape(told)}</span></th>'
                body.append(f'<tr class="group">{heading}</tr>')
                previous = line.group
            name, *cells = line.cells
            part = " part" if name.startswith(" ") else ""
            meaning = f"<small>{escape(line.meaning)}</small>" if line.meaning else ""
            shown = "".join(f"<td{kind}>{escape(cell)}</td>" for kind, cell in zip(kinds[1:], cells, strict=True))
            head = f'<th scope="row">{escape(name.strip())}{meaning}</th>'
            body.append(f'<tr class="{line.kind}{part}">{head}{shown}</tr>')
        label = escape(self.title or "Table", quote=True)
        parts = [
            f'<div class="scroll" role="region" aria-label="{label}" tabindex="0"><table>',
            f"<thead><tr>{heads}</tr></thead>",
            f"<tbody>{''.join(body)}</tbody></table></div>",
        ]
        if self.note:
            parts.append(f"<p>{escape(self.note)}</p>")
        meanings = [(" ".join(each.head.split()), each.meaning) for each in self.columns if each.meaning]
        if meanings:
            listed = "".join(f"<dt>{escape(head)}</dt><dd>{escape(meaning)}</dd>" for head, meaning in meanings)
            parts.append(f"<dl>{listed}</dl>")
        return "\n".join(parts)


def in_lines(parts: Sequence[str], width: int, between: str) -> Iterator[str]:
    """Parts one after the other, in lines that are no longer than ``width`` unless one part is."""
    line = ""
    for part in parts:
        longer = f"{line}{between}{part}" if line else part
        if line and cell_len(longer) > width:
            yield line
            longer = part
        line = longer
    if line:
        yield line


def _breakable(name: str) -> str:
    """A name that may be broken behind the signs within it."""
    return re.sub(r"(?<=\w)([-+])(?=\w)", r"\1<wbr>", escape(name))


def _is_text(column: Column) -> str:
    return ' class="text"' if column.is_text else ""


LEAST_TEXT = 16
"""Columns of a terminal that a text may be wrapped into; narrower ones are hard to read."""

LONG_TEXT = 40
"""Characters above which texts of a column are broken on a page."""

STYLES = {"plain": "", "best": "bold", "aside": "dim"}
