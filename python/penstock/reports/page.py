"""The skeleton of a report, and what stands in it. One HTML file; nothing is fetched."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import NamedTuple

from penstock.reports import network, timeline
from penstock.reports.charts import Bars, Lines
from penstock.reports.network import Network
from penstock.reports.tables import Table
from penstock.reports.timeline import Timeline
from penstock.texts import harmless


@dataclass(frozen=True)
class Picture:
    """A chart with what it shows."""

    name: str
    """Of no other picture of the page."""
    chart: Bars | Lines | Network | Timeline
    see: str
    """A sentence: what to see in it. Its numbers come from where the chart's come from."""
    how: str = ""
    """How to read it."""


@dataclass(frozen=True)
class Next:
    """What a reader does next: a sentence, and what to type."""

    text: str
    command: str = ""


class Card(NamedTuple):
    """A number, what it is, and what stands behind it."""

    number: str
    what: str
    note: str


@dataclass(frozen=True)
class Section:
    """A heading and what stands below: strings are paragraphs, lists of strings are bullets."""

    title: str
    blocks: Sequence[str | list[str] | Picture | Table]


@dataclass(frozen=True)
class Page:
    """A report. The first four fields are its first screen."""

    kind: str
    """Which report this is, such as ``penstock demo``."""
    answer: str
    """In one line."""
    picture: Picture
    next: Next
    setting: str
    """What was measured where, in a sentence or two."""
    problems: Sequence[str] = ()
    """What makes the figures worthless. They stand above everything else."""
    cards: Sequence[Card] = ()
    sections: Sequence[Section] = ()


def render(page: Page) -> str:
    """The page as HTML. Cost: about a second, most of it matplotlib's import, and 0.3 s for each picture of curves.

    Raises:
        ImportError: matplotlib, the extra ``report``, is missing; `penstock.extras.need` says so in one line before the work.
    """
    template = string.Template((FOLDER / "page.template.html").read_text(encoding="utf-8"))
    problems = "".join(f"<li>{_prose(problem)}</li>" for problem in page.problems)
    cards = "\n".join(
        f'<div class="card"><b>{escape(card.number)}</b><span>{escape(card.what)}</span>'
        f"<small>{escape(card.note)}</small></div>"
        for card in page.cards
    )
    # Words stay whole where a line is broken, so that what is typed can be read.
    words = re.sub(r"\S+", lambda word: f"<span>{escape(word[0])}</span>", page.next.command)
    command = f'<pre tabindex="0"><code>{words}</code></pre>' if words else ""
    page_html = template.substitute(
        kind=escape(page.kind),
        title=escape(f"{page.kind}: {page.answer}"),
        answer=_prose(page.answer),
        style=(FOLDER / "style.css").read_text(encoding="utf-8"),
        problems=f'<ul class="problems" role="alert">{problems}</ul>' if problems else "",
        picture=_picture(page.picture),
        next=f'<div class="next"><p><b>Next:</b> {_prose(page.next.text)}</p>{command}</div>',
        setting=_prose(page.setting),
        cards=f'<div class="cards">\n{cards}\n</div>' if cards else "",
        sections="\n".join(_section(section) for section in page.sections),
    )
    return harmless(page_html)


def _section(section: Section) -> str:
    blocks = "\n".join(_block(block) for block in section.blocks)
    return f"<section>\n<h2>{escape(section.title)}</h2>\n{blocks}\n</section>"


def _block(block: str | list[str] | Picture | Table) -> str:
    if isinstance(block, str):
        return f"<p>{_prose(block)}</p>"
    if isinstance(block, list):
        return "<ul>" + "".join(f"<li>{_prose(line)}</li>" for line in block) + "</ul>"
    return block.html() if isinstance(block, Table) else _picture(block)


def _picture(picture: Picture) -> str:
    if isinstance(picture.chart, Network):
        drawn = network.both_widths(picture.chart, picture.see)
    elif isinstance(picture.chart, Timeline):
        drawn = timeline.both_widths(picture.chart, picture.see)
    else:
        from penstock.reports.drawing import both_widths

        drawn = both_widths(picture.chart, picture.name, picture.see)
    how = f" {_prose(picture.how)}" if picture.how else ""
    return (
        f'<figure>\n<div class="chart">\n{drawn}\n</div>\n'
        f"<figcaption><b>{_prose(picture.see)}</b>{how}</figcaption>\n</figure>"
    )


def _prose(text: str) -> str:
    """A number stays with its unit where a line is broken, and what stands between backticks is code."""
    whole = re.sub(r"(?<=\d) (?=(?:[mµ]?s|B|[KMGT]iB|[kMGT]B(?:/s)?|[MG]bit/s)\b|×)", "\u00a0", escape(text))
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", whole)


FOLDER = Path(__file__).parent
