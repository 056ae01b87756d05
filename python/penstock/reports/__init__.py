"""One design for all reports: the pages that `penstock demo` and `penstock bench` write, and the tables that they print.

A report is a `Page`: on its first screen the answer in one line, one picture and one next step; below that the rest. It is one
HTML file that needs nothing else: no script, no font, no image of its own. A tool says *what* to show; how it looks is decided
here, once:

- `charts`: what a chart shows, as data: `Bars` and `Lines`, with a unit on every axis. Pure.
- `ticks`: where ticks stand. Pure. Numbers are written by `penstock.numbers`.
- `drawing`: charts to SVG, by matplotlib. Each chart is drawn twice, for wide screens and for narrow ones, so that its text keeps
  its size; a media query of the stylesheet chooses. This is the only module that imports matplotlib (the extra ``report``).
- `network`: a network with what its links carry, as data and as SVG. Pure.
- `timeline`: what ran when, row by row, as data and as SVG. Pure.
- `svg`: the frame, texts and keys of these two. Pure.
- `tables`: a table for the terminal and for the page, from the same texts.
- `page`: the skeleton, and what stands in it.
- `terminal`: the first screen of a page on a terminal, with its bars.
- ``style.css``: the only place that names colours. Charts refer to its variables, so that they follow light and dark mode.

Why not a chart library in JavaScript? A page would carry megabytes of it, and show nothing where scripts are off or the page is
printed.
"""

from penstock.reports.charts import Axis, Bar, Bars, Curve, Key, Level, Lines, Panel, Part, aside, series
from penstock.reports.network import Edge, Network, Node
from penstock.reports.page import Card, Next, Page, Picture, Section, render
from penstock.reports.tables import Column, Line, Table
from penstock.reports.timeline import Row, Stretch, Timeline

__all__ = [
    "Axis",
    "Bar",
    "Bars",
    "Card",
    "Column",
    "Curve",
    "Edge",
    "Key",
    "Level",
    "Line",
    "Lines",
    "Network",
    "Next",
    "Node",
    "Page",
    "Panel",
    "Part",
    "Picture",
    "Row",
    "Section",
    "Stretch",
    "Table",
    "Timeline",
    "aside",
    "render",
    "series",
]
