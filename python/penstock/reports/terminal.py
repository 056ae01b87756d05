"""A page's first screen on a terminal: the answer, the picture, the next step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console

from penstock.reports.charts import Bar, Bars
from penstock.reports.page import Page
from penstock.reports.tables import in_lines

__all__ = ["bars", "print_first_screen"]


def print_first_screen(page: Page, console: Console) -> None:
    """What the page says first. Only bars are drawn; of other pictures there is what to see in them."""
    console.print(page.answer, style="bold", soft_wrap=True, markup=False, highlight=False)
    if isinstance(page.picture.chart, Bars):
        for line in bars(page.picture.chart, min(console.width, MOST_COLUMNS)):
            console.print(line, soft_wrap=True, markup=False, highlight=False)
    console.print(page.picture.see, markup=False, highlight=False)
    console.print(f"Next: {page.next.text}", style="bold", soft_wrap=True, markup=False, highlight=False)
    for line in page.next.command.splitlines():
        console.print(f"    {line}", soft_wrap=True, markup=False, highlight=False)


def bars(chart: Bars, width: int) -> Iterator[str]:
    """A chart in ``width`` columns, which its texts may exceed: labels before the bars or, in little room, above them; their
    values behind."""
    signs = _signs(chart)
    widest = max((len(bar.label) for bar in chart.bars), default=0)
    above = widest > width // 3
    told = max((len(bar.told) for bar in chart.bars), default=0)
    room = max(LEAST_COLUMNS, width - (2 if above else widest + 2) - told - 1)
    longest = max((bar.value for bar in chart.bars), default=0.0) or 1.0
    if chart.key:
        entries = [f"{_sign(each.colour, signs, each.is_hollow)} {each.text}" for each in chart.key]
        yield from in_lines(entries, width, "  ")
    for bar in chart.bars:
        if bar.heading:
            yield bar.heading
        if above:
            yield bar.label
        before = "  " if above else f"{bar.label:<{widest}}  "
        yield f"{before}{_drawn(bar, room / longest, signs)} {bar.told}"


def _signs(chart: Bars) -> dict[str, str]:
    """A sign for each colour that the key explains. What it does not explain is what is compared, each in its own colour."""
    solid = dict.fromkeys(each.colour for each in chart.key if not each.is_hollow)
    coloured = iter(COLOURED)
    return {colour: GREY.get(colour) or next(coloured, COLOURED[-1]) for colour in solid}


def _sign(colour: str, signs: dict[str, str], is_hollow: bool) -> str:
    return HOLLOW if is_hollow else signs.get(colour) or GREY.get(colour) or COLOURED[0]


def _drawn(bar: Bar, scale: float, signs: dict[str, str]) -> str:
    """Rounded at the parts' edges, so that bars of one length are as long as each other."""
    drawn, at, end = "", 0, 0.0
    for part in bar.parts:
        end += max(0.0, part.value)
        until = round(end * scale)
        drawn += _sign(part.colour, signs, bar.is_hollow) * (until - at)
        at = until
    return drawn


GREY = {"grey-1": "░", "grey-2": "▒", "grey-3": "▓"}
COLOURED: Sequence[str] = ("█", "▄", "▞", "▚", "▙")
HOLLOW = "·"

MOST_COLUMNS, LEAST_COLUMNS = 100, 12
"""Of a terminal, for a whole picture; and for the longest bar."""
