"""A network with what its links carry, as data and as SVG. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from penstock.reports import svg

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
    return svg.both_widths(lambda width: _drawn(network, width), label)


def _drawn(network: Network, width: int) -> tuple[float, list[str]]:
    """Its height and its parts."""
    tiers = max((node.tier for node in network.nodes), default=0) + 1
    rows = [[node for node in network.nodes if node.tier == tier] for tier in range(tiers)]
    places: dict[str, tuple[float, float]] = {}
    neighbours: dict[str, list[str]] = {node.name: [] for node in network.nodes}
    for edge in network.edges:
        neighbours[edge.ends[0]].append(edge.ends[1])
        neighbours[edge.ends[1]].append(edge.ends[0])
    # Labels of a row stand upright where there is no room for them side by side.
    upright = [bool(row) and max(map(svg.text_px, (node.label for node in row))) > width / len(row) - 6 for row in rows]
    room = [
        _clipped_px(row) + 14 if is_upright else svg.LINE_PX + 8 for row, is_upright in zip(rows, upright, strict=True)
    ]
    parts, y = svg.key(((told, colour, 10) for told, colour in network.key), width)
    top = y + 6 + (12 if upright[-1] else svg.LINE_PX + 10)
    height = top + _TIER_PX * (tiers - 1) + (room[0] if tiers > 1 else 10) + 8
    for tier, row in enumerate(rows):
        if tier:
            # Above the middle of what hangs below.
            row.sort(key=lambda node: _mean(places[name][0] for name in neighbours[node.name] if name in places))
        for index, node in enumerate(row):
            places[node.name] = (index + 0.5) * width / len(row), top + _TIER_PX * (tiers - 1 - tier)
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
    return height, parts


def _labels(row: Sequence[Node], places: dict[str, tuple[float, float]], is_upright: bool, tier: int) -> list[str]:
    """Below the lowest row, above the others; those in the middle only where they stand side by side."""
    found = []
    for node in row:
        x, y = places[node.name]
        if not is_upright:
            found.append(svg.text(x, y + 20 if tier == 0 else y - 10, node.label, "middle"))
        elif tier == 0:
            found.append(svg.text(x + 4, y + 11, _clipped(node.label), "end", is_turned=True))
    return found


def _clipped(text: str) -> str:
    return text if len(text) <= _MOST_LETTERS else f"{text[: _MOST_LETTERS - 1]}…"


def _clipped_px(row: Sequence[Node]) -> float:
    return max((svg.text_px(_clipped(node.label)) for node in row), default=0)


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0


_TIER_PX = 110
_WIDEST_PX = 8.0
# Nodes that are closer have no labels, which would cover each other.
_LEAST_PX = 15.0
_MOST_LETTERS = 14
