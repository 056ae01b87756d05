"""Values from files, which may come from anywhere: each function returns what it is given if that makes sense, texts harmless.

Raises:
    ValueError, TypeError: it makes none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from penstock.texts import checked as text

__all__ = ["MOST", "count", "made", "number", "parts", "positive", "text", "texts"]

MOST = 10**9
"""Of counts in cells, and of times in ms: more than anybody runs, and products of a few are no overflow."""


def made(kind: Callable[..., _Made], fields: Mapping[str, Callable[[Any], Any]], given: Mapping[str, Any]) -> _Made:
    """An object from its fields, each checked by its function; those that have a default may be missing."""
    if unknown := set(given) - set(fields):
        raise ValueError(f"nobody knows {min(unknown)[:64]}")
    checked = {}
    for name, value in given.items():
        try:
            checked[name] = fields[name](value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    return kind(**checked)


def texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError("no list")
    return tuple(map(text, value))


def count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST:
        raise ValueError(f"no whole number from 0 to {MOST:,}")
    return value


def number(value: Any, least: float = 0, most: float = MOST) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise ValueError(f"no number from {least:,.0f} to {most:,.0f}")
    return float(value)


def positive(value: Any) -> float:
    """That others are divided by."""
    if not number(value) > 1 / MOST:
        raise ValueError("not above 0")
    return float(value)


def parts(value: Any) -> dict[str, float]:
    """Numbers by name. What is left over of a difference may be below 0."""
    if not isinstance(value, dict):
        raise ValueError("no object")
    return {text(name): number(each, -MOST) for name, each in value.items()}


_Made = TypeVar("_Made")
