"""Events of a Chrome trace, one after the other: a file of gigabytes is never in memory as a whole, and one without its end gives
what is there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from penstock.profiling.readers.source import Text

__all__ = ["Chrome"]


class Chrome:
    """A trace: ``{"traceEvents": [...], ...}``, or only the list.

    `about` has what of `WANTED` stands beside the events; all of it is there when `events` is through.
    """

    def __init__(self, text: Text) -> None:
        self.about: dict[str, Any] = {}
        self.problems: list[str] = []
        self.has_events = False
        self._text = text
        self._buffer = ""
        self._at = 0
        self._bad = 0

    def events(self) -> Iterator[dict[str, Any]]:
        first = self._next()
        if first == "[":
            yield from self._list()
        elif first == "{":
            self._at += 1
            yield from self._members()
        if self._text.problem:
            self.problems.append(self._text.problem)
        if self._bad:
            self.problems.append(f"{self._text.path.name}: {self._bad} events make no sense and are left out")

    def _members(self) -> Iterator[dict[str, Any]]:
        while (sign := self._next()) and sign != "}":
            if sign == ",":
                self._at += 1
                continue
            key = self._value()
            if not isinstance(key, str) or self._next() != ":":
                self._cut_off()
                return
            self._at += 1
            if key == "traceEvents" and self._next() == "[":
                yield from self._list()
                if self._is_lost:
                    return
            else:
                value = self._value()
                if value is _NONE:
                    self._cut_off()
                    return
                if key in WANTED:
                    self.about[key] = value
        if not sign:
            self._cut_off()

    _is_lost = False

    def _list(self) -> Iterator[dict[str, Any]]:
        self.has_events = True
        self._at += 1
        while (sign := self._next()) != "]":
            if sign == ",":
                self._at += 1
                continue
            value = self._value() if sign else _NONE
            if isinstance(value, dict):
                yield value
                continue
            if value is _NONE and not self._next():
                self._cut_off()
                return
            self._bad += 1
            if self._bad > MOST_BAD:
                self._is_lost = True
                self.problems.append(f"{self._text.path.name} is broken: what follows is left out")
                return
            if value is _NONE:  # go on at what looks like the next event
                found = self._buffer.find("{", self._at + 1)
                self._at = found if found >= 0 else len(self._buffer)
        self._at += 1

    def _cut_off(self) -> None:
        self._is_lost = True
        self.problems.append(f"{self._text.path.name} is cut off: what is there is read")

    def _next(self) -> str:
        """The next sign that is no space; it is not taken. Empty at the end."""
        while not (found := _SIGN.search(self._buffer, self._at)):
            self._at = len(self._buffer)
            if not self._more():
                return ""
        self._at = found.start()
        return found[0]

    def _more(self) -> bool:
        piece = self._text.read()
        self._buffer = self._buffer[self._at :] + piece
        self._at = 0
        return bool(piece)

    def _value(self) -> Any:
        """The value that begins here, or `_NONE` if it has no end or makes no sense."""
        self._next()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._buffer, self._at)
            except RecursionError:
                return _NONE
            except ValueError:
                needed = 2 * (len(self._buffer) - self._at)
                if needed > MOST_VALUE:
                    return _NONE
                grown = False
                while len(self._buffer) - self._at <= needed and self._more():
                    grown = True
                if not grown:
                    return _NONE
                continue
            # A number at the end of what has been read may go on.
            if end == len(self._buffer) and not isinstance(value, dict | list | str) and self._more():
                continue
            self._at = end
            return value


_DECODER = json.JSONDecoder(strict=False)
_NONE = object()
_SIGN = re.compile(r"\S")
WANTED = ("distributedInfo", "host_name", "baseTimeNanoseconds", "writer")
MOST_VALUE = 16 << 20
"""Characters of one event, or of what stands beside them: the groups of a job of thousands of ranks have millions."""
MOST_BAD = 100
