"""Texts from outside, such as files and other processes. Pure."""

from __future__ import annotations

import re

__all__ = ["harmless"]


def harmless(text: str) -> str:
    """The text as a terminal, a page and a UTF-8 file may have it: each control character but tab and line feed, each mark that
    changes the direction of writing, and each lone surrogate is U+FFFD instead."""
    return _HARMFUL.sub("\ufffd", text)


_HARMFUL = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
