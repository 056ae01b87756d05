"""What ran when, row by row, as data and as SVG. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.reports import svg, ticks
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
    return svg.both_widths(lambda width: _drawn(timeline, width), label)


def _drawn(timeline: Timeline, width: int) -> tuple[float, list[str]]:
    """Its height and its parts."""
    widest = max((svg.text_px(row.label) for row in timeline.rows), default=0.0) + 12
    above = widest > width * 0.25
    left = 2.0 if above else widest
    plot = width - left - _MARGIN_PX
    # A sample is as low as what it stands for.
    key, y = svg.key(((each.text, each.colour, 5 if each.is_hollow else 10) for each in timeline.key), width)
    y = y + 14 if timeline.key else 4.0
    top = y
    boxes: list[str] = []
    texts: list[str] = []
    for row in timeline.rows:
        if row.heading:
            y += 8 if row is not timeline.rows[0] else 0
            texts.append(svg.text(0, y + 14, row.heading, "start", weight=650))
            y += svg.LINE_PX + 2
        if above:
            texts.append(svg.text(left, y + 13, row.label, "start"))
            y += svg.LINE_PX - 1
        else:
            texts.append(svg.text(left - 8, y + _ROW_PX / 2 + 4.5, row.label, "end"))
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
        half = svg.text_px(told) / 2
        side = "start" if x - half < 0 else "end" if x + half > width else "middle"
        texts.append(svg.text(x, y + 15, told, side))
    texts.append(svg.text(left, y + 15 + svg.LINE_PX, timeline.axis.label, "start"))
    height = y + 15 + svg.LINE_PX + 8
    return height, [*key, *grid, *boxes, *texts]


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


_ROW_PX, _MARGIN_PX = 16, 12
_LEAST_PX = 0.35
