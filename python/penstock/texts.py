"""Texts from outside, such as files and other processes. Pure."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["checked", "harmless"]


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


_HARMFUL = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
