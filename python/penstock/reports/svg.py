"""Pieces of pictures that are drawn by hand: their frame, texts and keys. Pure.

*Why not matplotlib, which draws the charts?* A network is lines between points, and a timeline thousands of rectangles: one path
for each colour, and titles where a pointer rests. matplotlib would make an element of each, or none with a title.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from html import escape

__all__ = ["FONT_PX", "LINE_PX", "WIDTHS_PX", "both_widths", "key", "text", "text_px"]


def both_widths(draw: Callable[[int], tuple[float, list[str]]], label: str) -> str:
    """Markup for a page: for wide screens, and for narrow ones. The stylesheet shows one of them.

    Args:
        draw: from a width to the picture's height and its parts.
        label: what screen readers say.
    """
    found = []
    for form, width in WIDTHS_PX.items():
        height, parts = draw(width)
        told = escape(label, quote=True)
        head = f'<svg class="{form}" role="img" aria-label="{told}" viewBox="0 0 {width} {height:.0f}">'
        found += [head, *parts, "</svg>"]
    return "\n".join(found)


def key(entries: Iterable[tuple[str, str, float]], width: int) -> tuple[list[str], float]:
    """What colours mean: its parts, in as many lines as it takes, and where the last one stands.

    Args:
        entries: each a text, a colour, and how high its sample is.
    """
    parts, x, y = [], 2.0, 13.0
    for told, colour, high in entries:
        wide = 22 + text_px(told) + 14
        if x + wide > width and x > 2:
            x, y = 2.0, y + LINE_PX
        place = f'x="{x:.1f}" y="{y + 1 - high:.1f}" width="14" height="{high:g}"'
        parts.append(f'<rect {place} style="fill:var(--{colour})"/>')
        parts.append(text(x + 20, y, told, "start"))
        x += wide
    return parts, y


def text(x: float, y: float, told: str, anchor: str, *, weight: int = 400, is_turned: bool = False) -> str:
    turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if is_turned else ""
    style = f"font-size:{FONT_PX}px;font-weight:{weight};fill:var(--ink);text-anchor:{anchor}"
    return f'<text x="{x:.1f}" y="{y:.1f}" style="{style}"{turn}>{escape(told)}</text>'


def text_px(told: str) -> float:
    """About: letters of 13 pixels are 7.6 wide in the widest of the usual fonts."""
    return 7.6 * len(told)


WIDTHS_PX = {"wide": 820, "narrow": 390}
"""A page's column; and what a screen of 420 pixels leaves of it."""
FONT_PX = 13
"""Pictures shrink to 0.85 of their width before the stylesheet takes the other form, or the screen has 360 pixels: texts then
have 11 pixels."""
LINE_PX = 19
