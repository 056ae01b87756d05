"""Texts from outside, made fit for a terminal and a file."""

from __future__ import annotations

__all__ = ["printable"]


def printable(text: str) -> str:
    """The text, with escapes in place of control characters, which a terminal obeys, and of halves of characters (surrogates),
    which no file takes. Ends of lines stay."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each == "\n" else _escaped(each) for each in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()
