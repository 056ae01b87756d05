"""Charts to SVG, by matplotlib.

A picture is laid out in CSS pixels: at 72 dots an inch a point of matplotlib is one. Texts are measured in DejaVu Sans, which
matplotlib brings and which is wider than what browsers take for ``system-ui``: what fits here fits there.
"""

from __future__ import annotations

import functools
import io
import itertools
import math
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Literal

import matplotlib
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

from penstock.reports import ticks
from penstock.reports.charts import Axis, Bar, Bars, Curve, Lines, Panel
from penstock.reports.svg import FONT_PX, LINE_PX, WIDTHS_PX

Paint = Callable[[str], str]
"""The colour that matplotlib draws in, by the name of a variable of the stylesheet."""


def both_widths(chart: Bars | Lines, name: str, label: str) -> str:
    """A chart as markup for a page: for wide screens, and for narrow ones. The stylesheet shows one of them.

    ``name`` keeps the identifiers of a page's pictures apart; ``label`` is what screen readers say.
    """
    return "\n".join(_inline(chart, name, label, form) for form in ("wide", "narrow"))


def file(chart: Bars | Lines, suffix: str, title: str) -> bytes:
    """A chart as a file of its own, ``.svg``, ``.png`` or ``.pdf``, in the light colours."""
    palette = light_colours()
    frame = {"facecolor": palette["paper"], "bbox_inches": "tight", "pad_inches": 0.15}
    return _drawn(chart, "wide", palette.__getitem__, suffix, "penstock", title, **frame)


def picture(chart: Bars | Lines, label: str) -> str:
    """A chart as an SVG file that follows the reader's light or dark mode, for pages without the stylesheet. ``label`` is what
    screen readers say."""
    markup = _inline(chart, "penstock", label, "wide")
    used = dict.fromkeys(re.findall(r"var\(--([a-z0-9-]+)\)", markup))
    light, dark = (
        ":root{" + ";".join(f"--{name}:{colours[name]}" for name in used) + "}"
        for colours in (light_colours(), dark_colours())
    )
    style = (
        f"<style>text{{font-family:system-ui,sans-serif}}{light}@media (prefers-color-scheme:dark){{{dark}}}</style>"
    )
    spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    size = r'viewBox="0 0 ([\d.]+) ([\d.]+)"'
    markup = re.sub(f"{size}>", rf'viewBox="0 0 \1 \2" width="\1" height="\2">\n{style}', markup, count=1)
    return markup.replace('<svg class="wide"', f"<svg {spaces}", 1) + "\n"


def light_colours() -> dict[str, str]:
    """The variables of the stylesheet's first block."""
    first, _, _ = STYLE.read_text(encoding="utf-8").partition("@media")
    return _variables(first)


def dark_colours() -> dict[str, str]:
    """The same in dark mode."""
    _, _, rest = STYLE.read_text(encoding="utf-8").partition("@media")
    return _variables(rest.partition("@media")[0])


def _variables(text: str) -> dict[str, str]:
    return dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6});", text))


# Bars


def _bars(chart: Bars, form: str, paint: Paint) -> Figure:
    """Laid out by hand: every height is known, and the room for labels and values is measured."""
    width = WIDTHS_PX[form]
    # Browsers round each letter's width: a label of 30 letters was 6 pixels longer than measured.
    widest = 1.03 * max(text_px(bar.label) for bar in chart.bars) + 1.5 * GAP_PX
    # Labels stand above their bars where there is no room beside them.
    above = form == "narrow" or widest > width * 0.33
    left = 1.0 if above else widest
    plot = width - left - MARGIN_PX
    rows, height = _rows(chart.bars, plot if above else None)
    key = _key([each.text for each in chart.key], width)
    top = key.height + 6 + (LINE_PX if chart.level else 0)
    total = top + height + AXIS_PX
    figure = Figure(figsize=(width / 72, total / 72), dpi=72)
    axes = figure.add_axes((left / width, AXIS_PX / total, plot / width, height / total))
    axes.set_ylim(height, 0)  # a row's place is its distance from the top
    reach = _reach(chart, plot, above)
    axes.set_xlim(0, reach)
    for bar, row in zip(chart.bars, rows, strict=True):
        _bar(axes, bar, row, left, paint)
    if chart.level:
        if above:  # only over the bars, not through the texts between them
            tops = [row.middle - row.thick / 2 - 3 for row in rows]
            bottoms = [row.middle + row.thick / 2 + 3 for row in rows]
            axes.vlines([chart.level.value] * len(rows), bottoms, tops, color=paint("ink"), linewidth=2)
        else:
            axes.axvline(chart.level.value, color=paint("ink"), linewidth=1, linestyle=(0, (4, 3)))
        at, side = (chart.level.value, 0), "right" if chart.level.value > 0.8 * reach else "center"
        axes.annotate(chart.level.text, at, (0, 4), textcoords="offset points", ha=side, va="bottom")
    places = ticks.linear(0, reach, most=max(2, int(plot / 90)))
    axes.set_xticks(places, [chart.axis.text(place) for place in places])
    for place, label in zip(places, axes.get_xticklabels(), strict=True):
        # What would be cut off stands on the inner side of its tick.
        middle, half = plot * place / reach, text_px(label.get_text()) / 2
        inner: Literal["left", "center", "right"]
        inner = "left" if middle - half < -left else "right" if middle + half > plot + MARGIN_PX else "center"
        label.set_horizontalalignment(inner)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(chart.axis.label, loc="left")
    axes.grid(True, axis="x")
    handles = [
        Patch(facecolor=paint("paper" if each.is_hollow else each.colour), edgecolor=paint(each.colour), linewidth=1.5)
        for each in chart.key
    ]
    _draw_key(figure, key, handles)
    return figure


@dataclass(frozen=True)
class Row:
    """Where a bar and its texts stand: distances from the top in pixels."""

    middle: float
    thick: float
    heading: float
    texts: Sequence[tuple[str, float, str]]
    """Above the bar: a text, its middle, and its side. Empty where label and value stand beside the bar."""


def _rows(bars: Sequence[Bar], plot: float | None) -> tuple[list[Row], float]:
    """The rows, and the height of all. With a width, that of the plot, labels and values stand above the bars."""
    rows, y = [], 0.0
    for bar in bars:
        heading = y + (LINE_PX + 8) / 2
        y += LINE_PX + 8 if bar.heading else 0
        texts = []
        if plot is not None:
            lines = _broken(bar.label, plot)
            fits = len(lines) == 1 and text_px(bar.label) + text_px(bar.told) + 2 * GAP_PX <= plot
            texts = [(line, y + (i + 0.5) * LINE_PX, "left") for i, line in enumerate(lines)]
            texts.append(
                (bar.told, texts[0][1], "right") if fits else (bar.told, y + (len(lines) + 0.5) * LINE_PX, "left")
            )
            y += LINE_PX * (len(lines) + (not fits))
        thick = 9.0 if bar.is_hollow else 18.0
        rows.append(Row(y + thick / 2 + 2, thick, heading, texts))
        y += thick + (10 if plot is not None else 9)
    return rows, y + 2


def _reach(chart: Bars, plot: float, above: bool) -> float:
    """Where the axis ends, so that every bar has its text beside it."""
    ends = [max(bar.value, *(bar.spread or (0.0,))) for bar in chart.bars]
    needed = (
        []
        if above
        else [
            end * plot / max(plot - text_px(bar.told) - 2 * GAP_PX, plot / 3)
            for end, bar in zip(ends, chart.bars, strict=True)
        ]
    )
    level = [chart.level.value * 1.02] if chart.level else []
    return max([*ends, *needed, *level]) or 1.0


def _bar(axes: Axes, bar: Bar, row: Row, left: float, paint: Paint) -> None:
    """``left`` is the width of the labels' column."""
    end = 0.0
    for part in bar.parts:
        face, edge = (paint("paper"), paint(part.colour)) if bar.is_hollow else (paint(part.colour), paint("paper"))
        line = 1.5 if bar.is_hollow else 1
        axes.barh(row.middle, part.value, row.thick, end, color=face, edgecolor=edge, linewidth=line)
        end += part.value
    if bar.spread:
        both = (row.middle, row.middle)
        outlined = [withStroke(linewidth=4, foreground=paint("paper"))]  # whatever the bar's colour
        axes.plot(bar.spread, both, color=paint("ink"), linewidth=1.4, marker="|", markersize=9, path_effects=outlined)
        end = max(end, bar.spread[1])
    offset: dict[str, Any] = {"textcoords": "offset points", "va": "center"}
    if not row.texts:
        axes.annotate(bar.label, (0, row.middle), (-GAP_PX, 0), ha="right", **offset)
        axes.annotate(bar.told, (end, row.middle), (GAP_PX - 2, 0), **offset)
    for text, place, side in row.texts:
        axes.text(side == "right", place, text, transform=axes.get_yaxis_transform(), ha=side, va="center")
    if bar.heading:
        axes.annotate(bar.heading, (0, row.heading), (0 if row.texts else -left, 0), weight="bold", **offset)


# Lines


def _lines(chart: Lines, form: str, paint: Paint) -> Figure:
    width = WIDTHS_PX[form]
    across = 1 if form == "narrow" else min(len(chart.panels), 3)
    down = -(-len(chart.panels) // across)
    entries = {curve.label: curve for panel in chart.panels for curve in panel.curves}
    key = _key(list(entries), width)
    total = down * PANEL_PX[form] + key.height
    below_key = (0, 0, 1, 1 - key.height / total)
    layout = ConstrainedLayoutEngine(rect=below_key, w_pad=0.06, h_pad=0.12)
    figure = Figure(figsize=(width / 72, total / 72), dpi=72, layout=layout)
    grid = figure.subplots(down, across, squeeze=False)
    shared = all(panel.y == chart.panels[0].y for panel in chart.panels)
    for index, (axes, panel) in enumerate(itertools.zip_longest(grid.flat, chart.panels)):
        if panel is None:
            axes.remove()
            continue
        beside = chart.panels if shared else [panel]
        values = [y for each in beside for curve in each.curves for y in curve.y]
        values += [level.value for each in beside for level in each.levels]
        depth = max(max(_depths(each, width / across - AXES_PX), default=-1) + 1 for each in beside)
        _panel(axes, panel, values, depth, width / across - AXES_PX, form, paint)
        if shared and index % across:
            axes.tick_params(labelleft=False)
    _draw_key(figure, key, [_line(curve, paint) for curve in entries.values()])
    return figure


def _depths(panel: Panel, plot: float) -> list[int]:
    """Of each text below the end of a curve: how many others it has to stand below, because they are near."""
    ends = [(curve.x[-1], text_px(curve.end)) for curve in panel.curves if curve.end]
    span = max((x for curve in panel.curves for x in curve.x), default=1) or 1
    depths: list[int] = []
    for index, (x, wide) in enumerate(ends):
        near = [
            depth
            for depth, (other, its) in zip(depths, ends[:index], strict=False)
            if abs(x - other) / span * plot < (wide + its) / 2 + GAP_PX
        ]
        depths.append(max(near, default=-1) + 1)
    return depths


def _panel(axes: Axes, panel: Panel, values: Sequence[float], depth: int, plot: float, form: str, paint: Paint) -> None:
    """``values`` and ``depth`` are of all panels that share the y axis; ``plot`` is the width of the plot."""
    height = PANEL_PX[form] - AXES_PX
    _scale(axes, "x", panel.x, [x for curve in panel.curves for x in curve.x], plot, 0)
    _scale(axes, "y", panel.y, values, height, (GAP_PX + depth * LINE_PX) if depth else 0)
    axes.set_title(f"{panel.title}: {panel.y.label}" if panel.title else panel.y.label, loc="left")
    axes.set_xlabel(panel.x.label, loc="left")
    axes.grid(True)
    depths = iter(_depths(panel, plot))
    lowest = min((curve.y[-1] for curve in panel.curves if curve.end), default=0.0)
    for index, curve in enumerate(panel.curves):
        colour = paint(curve.look.colour)
        axes.add_line(_line(curve, paint, _marked(len(curve.x), index, len(panel.curves))))
        if curve.is_steps:
            axes.fill_between(curve.x, curve.y, step="pre", color=colour, alpha=0.15, linewidth=0)
        if curve.end:
            at = (curve.x[-1], curve.y[-1])
            axes.plot(*at, marker="o", color=colour, markersize=6)
            # Below all ends, and one below the other: curves may end in the same place.
            below, down = (at[0], lowest), GAP_PX + next(depths) * LINE_PX
            axes.annotate(curve.end, below, (0, -down), textcoords="offset points", ha="center", va="top")
    for level in panel.levels:
        axes.axhline(level.value, color=paint("ink"), linewidth=1, linestyle=(0, (4, 3)))
        at = (1, level.value)
        across = axes.get_yaxis_transform()
        axes.annotate(level.text, at, (-4, 3), xycoords=across, textcoords="offset points", ha="right", va="bottom")


def _line(curve: Curve, paint: Paint, marked: tuple[int, int] | None = None) -> Line2D:
    return Line2D(
        curve.x if marked else [],
        curve.y if marked else [],
        color=paint(curve.look.colour),
        linewidth=curve.width_px if marked else 2,
        # Steps have their shades; dashes would break up what is broken up already.
        linestyle=(0, curve.look.dashes) if curve.look.dashes and not curve.is_steps else "solid",
        drawstyle="steps-pre" if curve.is_steps else "default",
        marker=curve.look.marker or "none",
        markersize=7,
        markeredgecolor=paint("paper"),
        markevery=marked,
        solid_capstyle="round",
    )


def _marked(points: int, index: int, curves: int) -> tuple[int, int]:
    """Which points of a curve have markers: all of a few; of many some, at other places than the next curve's, so that curves
    that lie on each other are seen."""
    if points <= MARKED_POINTS:
        return 0, 1
    stride = points // 6
    return index * stride // curves, stride


def _scale(axes: Axes, name: str, axis: Axis, values: Sequence[float], pixels: float, below: float) -> None:
    """Scale, limits and ticks. ``below`` are the pixels that texts need under the lowest value."""
    low, high = min(values), max(values)
    if axis.is_log:
        axes.set(**{f"{name}scale": "log"})
        low, high = low / 1.3, high * 1.3
    else:
        # From zero on, so that what is always the same does not lie on the upper edge.
        low = 0.0 if axis.from_zero else low
        span = (high - low) or abs(high) or 1.0
        room = 1.15 * below / (pixels - below)
        low, high = (low if axis.from_zero else low - (0.05 + room) * span), high + 0.1 * span
    axes.set(**{f"{name}lim": (low, high)})
    most = max(2, int(pixels / (70 if name == "x" else 40)))
    if axis.ticks is not None:
        inside = sorted(place for place in set(axis.ticks) if low <= place <= high)
        even = math.log if axis.is_log else float
        spread = [pixels * (even(place) - even(low)) / (even(high) - even(low)) for place in inside]
        gap = max(text_px(axis.text(place)) for place in inside) + 2 * GAP_PX if name == "x" else 2 * LINE_PX
        places = ticks.apart(inside, spread, gap)
    else:
        places = (ticks.logarithmic if axis.is_log else ticks.linear)(low, high, most)
    axes.set(**{f"{name}ticks": places, f"{name}ticklabels": [axis.text(place) for place in places]})
    axes.minorticks_off()


# The key


@dataclass(frozen=True)
class KeyLayout:
    """The entries of a key, in columns above the chart."""

    texts: Sequence[str]
    columns: int
    height: float


def _key(texts: Sequence[str], width: float) -> KeyLayout:
    """As many columns as there is room for: matplotlib makes each as wide as its own widest entry."""
    if not texts:
        return KeyLayout((), 1, 0)
    broken = ["\n".join(_broken(text, width - KEY_HANDLE_PX - GAP_PX)) for text in texts]
    widths = [max(map(text_px, text.split("\n"))) + KEY_HANDLE_PX + 2 * GAP_PX for text in broken]
    columns = len(texts)
    while columns > 1 and sum(max(widths[column::columns]) for column in range(columns)) > width:
        columns -= 1
    rows = -(-len(texts) // columns)
    more = max(text.count("\n") for text in broken)
    return KeyLayout(broken, columns, KEY_TOP_PX + rows * (KEY_ROW_PX + more * LINE_PX))


def _draw_key(figure: Figure, key: KeyLayout, handles: Sequence[Any]) -> None:
    if not key.texts:
        return
    # matplotlib fills column after column; people read row by row.
    order = [index for column in range(key.columns) for index in range(column, len(key.texts), key.columns)]
    figure.legend(
        [handles[index] for index in order],
        [key.texts[index] for index in order],
        loc="upper left",
        bbox_to_anchor=(0, 1 - KEY_TOP_PX / (72 * figure.get_figheight())),
        ncols=key.columns,
        borderaxespad=0,
        borderpad=0,
        handlelength=KEY_HANDLE_PX / FONT_PX - 0.7,
        handletextpad=0.5,
        columnspacing=1.4,
        labelspacing=(KEY_ROW_PX - 16) / FONT_PX,
        frameon=False,
    )


def _broken(text: str, width: float) -> list[str]:
    """A text in lines that are no wider than ``width``."""
    characters = len(text)
    while characters > 1 and any(text_px(line) > width for line in textwrap.wrap(text, characters)):
        characters -= 1
    return textwrap.wrap(text, characters) or [""]


# Markup


def _inline(chart: Bars | Lines, name: str, label: str, form: str) -> str:
    """One drawing as markup for inside a page: text stays text, and colours are the page's."""
    markup = _drawn(chart, form, SENTINELS.__getitem__, ".svg", f"{name}-{form}", transparent=True).decode()
    for colour, sentinel in SENTINELS.items():
        markup = markup.replace(sentinel, f"var(--{colour})")
    markup = markup[markup.index("<svg") :].strip()
    head = f'<svg class="{form}" role="img" aria-label="{escape(label, quote=True)}" '
    markup = re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', lambda match: f"{head}{match[1]}>", markup, count=1)
    markup = re.sub(r"font-family: [^;\"]*;? ?", "", markup)
    markup = re.sub(r"\s*<metadata>.*?</metadata>", "", markup, flags=re.DOTALL)
    # matplotlib names every group; only what is referred to needs its name, and those names are salted.
    used = set(re.findall(r'(?:url\(|href=")#([^)"]+)', markup))
    return re.sub(r' id="([^"]*)"', lambda match: match[0] if match[1] in used else "", markup)


def _drawn(
    chart: Bars | Lines, form: str, paint: Paint, suffix: str, salt: str, title: str = "", **options: Any
) -> bytes:
    """A file's content. Identifiers of an SVG follow from ``salt``: they must differ between the drawings of one page, and not
    between two runs."""
    buffer = io.BytesIO()
    if suffix == ".svg":
        options["metadata"] = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context(_style(paint, salt)):
        figure = _bars(chart, form, paint) if isinstance(chart, Bars) else _lines(chart, form, paint)
        if title:
            figure.text(0, 1, title, weight="bold", va="bottom")  # above the figure, to which `options` make room
        figure.savefig(buffer, format=suffix.lstrip("."), dpi=144 if suffix == ".png" else 72, **options)
    return buffer.getvalue()


def _style(paint: Paint, salt: str) -> Any:
    """Parameters of matplotlib, whose own annotation lists all of their names."""
    ink = paint("ink")
    return {
        "font.family": "DejaVu Sans",
        "font.size": FONT_PX,
        "axes.titlesize": FONT_PX,
        "axes.labelsize": FONT_PX,
        "xtick.labelsize": FONT_PX,
        "ytick.labelsize": FONT_PX,
        "legend.fontsize": FONT_PX,
        "axes.titlepad": 8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "axes.facecolor": "none",
        "axes.edgecolor": paint("soft"),
        "axes.labelcolor": ink,
        "axes.titlecolor": ink,
        "grid.color": paint("line"),
        "grid.linewidth": 1,
        "text.color": ink,
        "svg.fonttype": "none",
        "svg.hashsalt": salt,
        "text.parse_math": False,  # names may have dollar signs
        "xtick.color": paint("soft"),
        "xtick.labelcolor": ink,
        "ytick.color": paint("soft"),
        "ytick.labelcolor": ink,
    }


@functools.cache
def text_px(text: str) -> float:
    """How wide a text is."""
    font = font_manager.get_font(font_manager.findfont("DejaVu Sans"))
    font.set_size(FONT_PX, 72)
    font.set_text(text)
    return float(font.get_width_height()[0] / 64)


STYLE = Path(__file__).with_name("style.css")

SENTINELS = {name: f"#0102{index:02x}" for index, name in enumerate(light_colours(), start=3)}
"""What matplotlib draws in instead of a variable of the stylesheet, until `_inline` puts that in."""

PANEL_PX = {"wide": 300, "narrow": 270}
AXES_PX = 75
"""What ticks, labels and a title take of a panel, about."""

KEY_ROW_PX, AXIS_PX, GAP_PX, MARGIN_PX, KEY_HANDLE_PX, KEY_TOP_PX = 24, 46, 10, 12, 36, 4

MARKED_POINTS = 14
