"""What ran when, row by row, as data and as SVG. Pure: no chart library, since rectangles are all there is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from penstock.reports import ticks
from penstock.reports.charts import Axis, Key

__all__ = ["Row", "Stretch", "Timeline", "both_widths"]


@dataclass(frozen=True)
class Stretch:
    """From when to when."""

    start: float
    end: float
    colour: str
    """A variable of the stylesheet."""
    level: float = 1.0
    """Its height, as a share of the row's: what is not told by colour alone."""


@dataclass(frozen=True)
class Row:
    """One line of the picture."""

    label: str
    stretches: Sequence[Stretch]
    """Later ones are drawn over earlier ones."""
    heading: str = ""
    """Stands above this row and those that follow."""


@dataclass(frozen=True)
class Timeline:
    """Rows over one axis of time, from 0 to ``length``."""

    axis: Axis
    length: float
    rows: Sequence[Row]
    key: Sequence[Key] = ()


def both_widths(timeline: Timeline, label: str) -> str:
    """Markup for a page: for wide screens, and for narrow ones. The stylesheet shows one of them. ``label`` is what screen
    readers say."""
    return "\n".join(_drawn(timeline, label, form, width) for form, width in _WIDTHS_PX.items())


def _drawn(timeline: Timeline, label: str, form: str, width: int) -> str:
    widest = max((_text_px(row.label) for row in timeline.rows), default=0.0) + 12
    above = widest > width * 0.25
    left = 2.0 if above else widest
    plot = width - left - _MARGIN_PX
    key, y = _key(timeline.key, width)
    top = y
    boxes: list[str] = []
    texts: list[str] = []
    for row in timeline.rows:
        if row.heading:
            y += 8 if row is not timeline.rows[0] else 0
            texts.append(_text(0, y + 14, row.heading, "start", weight=650))
            y += _LINE_PX + 2
        if above:
            texts.append(_text(left, y + 13, row.label, "start"))
            y += _LINE_PX - 1
        else:
            texts.append(_text(left - 8, y + _ROW_PX / 2 + 4.5, row.label, "end"))
        boxes += _boxes(row, timeline.length, left, plot, y)
        y += _ROW_PX + 6
    places = ticks.linear(0, timeline.length or 1.0, most=max(2, int(plot / 90)))
    grid = []
    for place in places:
        x = left + plot * place / (timeline.length or 1.0)
        grid.append(
            f'<line x1="{x:.1f}" y1="{top:.1f}" x2="{x:.1f}" y2="{y:.1f}" style="stroke:var(--line);stroke-width:1"/>'
        )
        told = timeline.axis.text(place)
        half = _text_px(told) / 2
        side = "start" if x - half < 0 else "end" if x + half > width else "middle"
        texts.append(_text(x, y + 15, told, side))
    texts.append(_text(left, y + 15 + _LINE_PX, timeline.axis.label, "start"))
    height = y + 15 + _LINE_PX + 8
    head = (
        f'<svg class="{form}" role="img" aria-label="{escape(label, quote=True)}" viewBox="0 0 {width} {height:.0f}">'
    )
    return "\n".join([head, *key, *grid, *boxes, *texts, "</svg>"])


def _boxes(row: Row, length: float, left: float, plot: float, y: float) -> list[str]:
    """One path for each run of stretches that look alike: a step may have thousands. What is narrower than a third of a pixel
    joins its neighbour, or is drawn that wide."""
    base = f'<rect x="{left:.1f}" y="{y + _ROW_PX - 1:.1f}" width="{plot:.1f}" height="1" style="fill:var(--line)"/>'
    found = [base]
    looks: list[tuple[str, float]] = []
    paths: dict[tuple[str, float], list[list[float]]] = {}
    for each in row.stretches:
        start = left + plot * max(0.0, each.start) / (length or 1.0)
        end = left + plot * min(length, each.end) / (length or 1.0)
        if end < start:
            continue
        look = (each.colour, round(min(1.0, max(0.0, each.level)), 2))
        if look not in paths:
            looks.append(look)
        spans = paths.setdefault(look, [])
        if spans and start - spans[-1][1] < _LEAST_PX and start >= spans[-1][0]:
            spans[-1][1] = max(spans[-1][1], end)
        else:
            spans.append([start, max(end, start + _LEAST_PX)])
    for colour, level in looks:
        high = max(1.0, level * _ROW_PX)
        at = y + _ROW_PX - high
        path = "".join(f"M{a:.2f} {at:.2f}h{b - a:.2f}v{high:.2f}h{a - b:.2f}z" for a, b in paths[colour, level])
        found.append(f'<path d="{path}" style="fill:var(--{colour})"/>')
    return found


def _key(entries: Sequence[Key], width: int) -> tuple[list[str], float]:
    """Its parts, in lines, and its height."""
    parts, x, y = [], 2.0, 13.0
    for each in entries:
        wide = 22 + _text_px(each.text) + 14
        if x + wide > width and x > 2:
            x, y = 2.0, y + _LINE_PX
        high = 5 if each.is_hollow else 10  # as low as what it stands for
        parts.append(
            f'<rect x="{x:.1f}" y="{y + 1 - high:.1f}" width="14" height="{high}" style="fill:var(--{each.colour})"/>'
        )
        parts.append(_text(x + 20, y, each.text, "start"))
        x += wide
    return parts, y + 14 if entries else 4.0


def _text(x: float, y: float, text: str, anchor: str, *, weight: int = 400) -> str:
    style = f"font-size:{_FONT_PX}px;font-weight:{weight};fill:var(--ink);text-anchor:{anchor}"
    return f'<text x="{x:.1f}" y="{y:.1f}" style="{style}">{escape(text)}</text>'


def _text_px(text: str) -> float:
    """About: letters of 13 pixels are 7.6 wide in the widest of the usual fonts."""
    return 7.6 * len(text)


_WIDTHS_PX = {"wide": 820, "narrow": 390}
_FONT_PX, _LINE_PX, _ROW_PX, _MARGIN_PX = 13, 19, 16, 12
_LEAST_PX = 0.35
