"""A network with what its links carry, as data and as SVG. Pure: no chart library, since lines between points are all there
is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Edge", "Network", "Node", "both_widths"]


@dataclass(frozen=True)
class Node:
    """A point of the picture."""

    name: str
    """Of no other node."""
    tier: int
    """0 stands at the bottom."""
    label: str
    colour: str = "ink"
    """A variable of the stylesheet."""
    is_full: bool = False


@dataclass(frozen=True)
class Edge:
    """A line between two nodes."""

    ends: tuple[str, str]
    load: float
    """Its width, as a share of the widest: 0 to 1. Without a load it is a hair."""
    told: str
    """What a pointer that rests on it is told."""
    is_full: bool = False


@dataclass(frozen=True)
class Network:
    """Nodes in rows, and lines between them: their width is what they carry, and red is what is full."""

    nodes: Sequence[Node]
    edges: Sequence[Edge]
    key: Sequence[tuple[str, str]] = ()
    """What a colour means: text and colour."""


def both_widths(network: Network, label: str) -> str:
    """Markup for a page: for wide screens, and for narrow ones. The stylesheet shows one of them. ``label`` is what screen
    readers say."""
    return "\n".join(_drawn(network, label, form, width) for form, width in _WIDTHS_PX.items())


def _drawn(network: Network, label: str, form: str, width: int) -> str:
    tiers = max((node.tier for node in network.nodes), default=0) + 1
    rows = [[node for node in network.nodes if node.tier == tier] for tier in range(tiers)]
    places: dict[str, tuple[float, float]] = {}
    neighbours: dict[str, list[str]] = {node.name: [] for node in network.nodes}
    for edge in network.edges:
        neighbours[edge.ends[0]].append(edge.ends[1])
        neighbours[edge.ends[1]].append(edge.ends[0])
    # Labels of a row stand upright where there is no room for them side by side.
    upright = [bool(row) and max(map(_text_px, (node.label for node in row))) > width / len(row) - 6 for row in rows]
    room = [
        _clipped_px(row) + 14 if is_upright else _LINE_PX + 8 for row, is_upright in zip(rows, upright, strict=True)
    ]
    key, key_px = _key(network.key, width)
    top = key_px + (12 if upright[-1] else _LINE_PX + 10)
    height = top + _TIER_PX * (tiers - 1) + (room[0] if tiers > 1 else 10) + 8
    for tier, row in enumerate(rows):
        if tier:
            # Above the middle of what hangs below.
            row.sort(key=lambda node: _mean(places[name][0] for name in neighbours[node.name] if name in places))
        for index, node in enumerate(row):
            places[node.name] = (index + 0.5) * width / len(row), top + _TIER_PX * (tiers - 1 - tier)
    parts = [
        f'<svg class="{form}" role="img" aria-label="{escape(label, quote=True)}" viewBox="0 0 {width} {height:.0f}">'
    ]
    parts += key
    # What is full is drawn last, above the others.
    for edge in sorted(network.edges, key=lambda each: (each.is_full, each.load)):
        (x, y), (to_x, to_y) = (places[name] for name in edge.ends)
        colour = "bad" if edge.is_full else "series-1" if edge.load > 0 else "line"
        thick = 0.6 + _WIDEST_PX * edge.load
        style = f"stroke:var(--{colour});stroke-width:{thick:.2f};stroke-linecap:round"
        at = f'x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}"'
        parts.append(f'<line {at} style="{style}"><title>{escape(edge.told)}</title></line>')
    for tier, row in enumerate(rows):
        for node in row:
            x, y = places[node.name]
            size = min(5.0, max(1.5, width / len(row) / 3))
            colour = "bad" if node.is_full else node.colour
            style = f"fill:var(--{colour});stroke:var(--paper);stroke-width:1"
            told = f"<title>{escape(node.label)}</title>"
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size:.1f}" style="{style}">{told}</circle>')
        if width / len(row) >= _LEAST_PX:
            parts += _labels(row, places, upright[tier], tier)
    return "\n".join([*parts, "</svg>"])


def _key(entries: Sequence[tuple[str, str]], width: int) -> tuple[list[str], float]:
    """Its parts, in lines, and its height."""
    parts, x, y = [], 2.0, 13.0
    for text, colour in entries:
        wide = 22 + _text_px(text) + 14
        if x + wide > width and x > 2:
            x, y = 2.0, y + _LINE_PX
        parts.append(f'<rect x="{x:.1f}" y="{y - 9:.1f}" width="14" height="10" rx="2" style="fill:var(--{colour})"/>')
        parts.append(_text(x + 20, y, text, "start"))
        x += wide
    return parts, y + 6


def _labels(row: Sequence[Node], places: dict[str, tuple[float, float]], is_upright: bool, tier: int) -> list[str]:
    """Below the lowest row, above the others; those in the middle only where they stand side by side."""
    found = []
    for node in row:
        x, y = places[node.name]
        if not is_upright:
            found.append(_text(x, y + 20 if tier == 0 else y - 10, node.label, "middle"))
        elif tier == 0:
            found.append(_text(x + 4, y + 11, _clipped(node.label), "end", turned=True))
    return found


def _text(x: float, y: float, text: str, anchor: str, *, turned: bool = False) -> str:
    turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
    style = f"font-size:{_FONT_PX}px;fill:var(--ink);text-anchor:{anchor}"
    return f'<text x="{x:.1f}" y="{y:.1f}" style="{style}"{turn}>{escape(text)}</text>'


def _clipped(text: str) -> str:
    return text if len(text) <= _MOST_LETTERS else f"{text[: _MOST_LETTERS - 1]}…"


def _clipped_px(row: Sequence[Node]) -> float:
    return max((_text_px(_clipped(node.label)) for node in row), default=0)


def _text_px(text: str) -> float:
    """About: letters of 13 pixels are 7.6 wide in the widest of the usual fonts."""
    return 7.6 * len(text)


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0


_WIDTHS_PX = {"wide": 820, "narrow": 390}
_FONT_PX, _LINE_PX, _TIER_PX = 13, 19, 110
_WIDEST_PX = 8.0
# Nodes that are closer have no labels, which would cover each other.
_LEAST_PX = 15.0
_MOST_LETTERS = 14
