"""What a chart shows, as data. `drawing` turns it into a picture. Pure.

Colours are names of the stylesheet's variables: ``series-1`` and so on for what is compared, ``grey-1`` to ``grey-3`` for what is
not. Nothing is told by colour alone: bars have their names beside them, curves have markers and dashes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.numbers import number


@dataclass(frozen=True)
class Axis:
    """One axis. Its label says what is measured and in which unit."""

    what: str
    unit: str = ""
    """Empty only where the tick labels carry units, such as ``64 MiB``."""
    is_log: bool = False
    from_zero: bool = False
    ticks: Sequence[float] | None = None
    """The only places where ticks may stand, such as the sizes that were measured. None: round numbers."""
    text: Callable[[float], str] = number
    """A tick's label."""

    @property
    def label(self) -> str:
        return f"{self.what}, {self.unit}" if self.unit else self.what


@dataclass(frozen=True)
class Look:
    """How a curve looks, so that it can be told from others without its colour."""

    colour: str
    marker: str
    """matplotlib's; empty for none."""
    dashes: tuple[float, ...]
    """Lengths of strokes and gaps in line widths; empty for a solid line."""


@dataclass(frozen=True)
class Curve:
    """One curve of a panel. Curves with the same label look alike and have one entry in the key."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    look: Look
    is_steps: bool = False
    """Each value holds from the point before up to its own; the area below is shaded, and the line has no dashes."""
    width_px: float = 2.0
    end: str = ""
    """A text below the last point."""


@dataclass(frozen=True)
class Level:
    """A dashed line at one value of an axis, with a text."""

    value: float
    text: str


@dataclass(frozen=True)
class Panel:
    """Curves over a pair of axes."""

    title: str
    x: Axis
    y: Axis
    curves: Sequence[Curve]
    levels: Sequence[Level] = ()
    """Values of the y axis."""


@dataclass(frozen=True)
class Lines:
    """Panels side by side, on narrow screens one below the other. All have the same range of y where their y axes are equal."""

    panels: Sequence[Panel]


@dataclass(frozen=True)
class Part:
    """One part of a bar."""

    value: float
    colour: str


@dataclass(frozen=True)
class Bar:
    """One bar, of parts one behind the other."""

    label: str
    parts: Sequence[Part]
    told: str
    """What stands beside the bar: its value as the text and the tables have it."""
    is_hollow: bool = False
    """Drawn thin and as an outline: what was computed and not measured."""
    heading: str = ""
    """Stands above this bar and those that follow."""
    spread: tuple[float, float] | None = None
    """The range of the samples behind the value."""

    @property
    def value(self) -> float:
        return sum(part.value for part in self.parts)


@dataclass(frozen=True)
class Key:
    """An entry of the key of a bar chart: what a colour means."""

    text: str
    colour: str
    is_hollow: bool = False


@dataclass(frozen=True)
class Bars:
    """Horizontal bars from zero on one axis."""

    axis: Axis
    bars: Sequence[Bar]
    key: Sequence[Key] = ()
    level: Level | None = None


def series(index: int) -> Look:
    """The look of the ``index``-th of what a report compares, the same in all of its charts. Colours repeat after `COLOURS`,
    markers after `MARKERS`."""
    return Look(f"series-{index % COLOURS + 1}", MARKERS[index % len(MARKERS)], DASHES[index % COLOURS])


def aside(index: int) -> Look:
    """The look of the ``index``-th limit or control, which is no contestant."""
    return Look("grey-2", "", ASIDE_DASHES[index % len(ASIDE_DASHES)])


COLOURS = 5
"""Variables ``series-N`` of the stylesheet. Of more than five colours some look alike to some people."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X")

DASHES: tuple[tuple[float, ...], ...] = ((), (5, 2), (2, 1.2), (6, 2, 1.5, 2), (8, 3))

ASIDE_DASHES: tuple[tuple[float, ...], ...] = ((4, 3), (1, 2), (7, 2, 1, 2))
