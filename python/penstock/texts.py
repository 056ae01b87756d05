"""Texts from outside, such as files and other processes, and names that are to differ. Pure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Container
from typing import Any

__all__ = ["apart", "checked", "harmless", "of_exception"]


def apart(name: str, taken: Container[str]) -> str:
    """The name, or if it is taken, the first of ``name (2)``, ``name (3)`` and so on that is not."""
    names = itertools.chain([name], (f"{name} ({number})" for number in itertools.count(2)))
    return next(each for each in names if each not in taken)


def harmless(text: str) -> str:
    """The text as a terminal, a page and a UTF-8 file may have it: each control character but tab and line feed, each mark that
    changes the direction of writing, and each lone surrogate is U+FFFD instead."""
    return _HARMFUL.sub("\ufffd", text)


def checked(value: Any) -> str:
    """A text of a file or an event, harmless.

    Raises: ValueError, if it is none.
    """
    if not isinstance(value, str):
        raise ValueError("no text")
    return harmless(value)


def of_exception(error: BaseException) -> str:
    """Type and text of an exception of any code. What makes the text may raise itself."""
    name = type(error).__name__
    try:
        return f"{name}: {error}"
    except Exception as other:
        return f"{name}: (its __str__ raised {type(other).__name__})"


_HARMFUL = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
