"""YAML whose values know their places in the file: the reader below cluster files and deployments.

An error has the form ``file:line:column: path: what is wrong; what would be right``. Only `read_text` opens a file. Hostile text
is safe to read: it builds no objects, and its size, its depth and what its aliases expand to are limited.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from yaml.composer import Composer  # type: ignore[import-untyped]
from yaml.reader import Reader  # type: ignore[import-untyped]

from penstock.errors import Config as ConfigError

__all__ = ["NAME", "Entry", "compose", "is_name", "nearest", "read_text"]


def read_text(path: str, asked: str) -> str:
    """The text of a file; ``asked`` says in errors where the file was named.

    Raises:
        penstock.errors.Config: it cannot be read, is longer than `MOST_BYTES`, or is not UTF-8.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        text = None if len(data) > MOST_BYTES else data.decode("utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not text in UTF-8"
        raise ConfigError(f"{asked}: the file cannot be read: {reason}") from error
    if text is None:
        raise ConfigError(f"{asked}: the file is longer than {MOST_BYTES} bytes")
    return text


def compose(text: str, name: str, what: str) -> Entry:
    """The content of a file as an `Entry`.

    Args:
        name: the file's name, for errors.
        what: what the whole file is, such as "the cluster".

    Raises:
        penstock.errors.Config: it is not YAML, or too large, too deep, or several documents.
    """
    text = text.removeprefix("\ufeff")
    if len(text) > MOST_BYTES:
        raise ConfigError(f"{name}: {what} is longer than {MOST_BYTES} characters")
    odd = _ODD.search(text)
    if odd:
        line, column = text.count("\n", 0, odd.start()) + 1, odd.start() - text.rfind("\n", 0, odd.start())
        raise ConfigError(f"{name}:{line}:{column}: this is not YAML: a character {odd.group()!a}; leave it out")
    try:
        root = _Composer(text).get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise ConfigError(f"{name}{at}: this is not YAML that can be read here: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: this is not YAML: {error}") from None
    return Entry(name, what, root, is_top=True)


def nearest(word: str, words: Iterable[str]) -> str:
    """A hint for a user who wrote ``word`` where ``words`` are possible: the nearest, or all if they are few."""
    words = list(words)
    near = difflib.get_close_matches(word, words, n=1)
    if not near:
        near = [each for each in words if each.lower() == word.lower()]
    if near:
        return f"did you mean {near[0]!r}?"
    return f"there {'is' if len(words) == 1 else 'are'} {_some(words)}" if words else "there is none"


def is_name(word: str) -> bool:
    """Whether a user may call something so in a file."""
    return re.fullmatch(NAME, word) is not None


class Entry:
    """A node of a YAML file: its value, its path in the file, and its place."""

    def __init__(self, name: str, path: str, node: Any, *, is_top: bool = False) -> None:
        self.name, self.path, self.node, self._is_top = name, path, node, is_top

    @property
    def place(self) -> str:
        """``file:line:column``, counted from 1."""
        if self.node is None:
            return self.name
        return f"{self.name}:{self.node.start_mark.line + 1}:{self.node.start_mark.column + 1}"

    def wrong(self, what: str) -> ConfigError:
        """The error to raise for this entry."""
        return ConfigError(f"{self.place}: {self.path}: {what}")

    @property
    def is_empty(self) -> bool:
        """Whether a key has no value, or null."""
        return self.node is None or (isinstance(self.node, yaml.ScalarNode) and self.node.tag == _NULL)

    @property
    def is_scalar(self) -> bool:
        return isinstance(self.node, yaml.ScalarNode)

    @property
    def is_sequence(self) -> bool:
        return isinstance(self.node, yaml.SequenceNode)

    def mapping(self, required: tuple[str, ...] = (), optional: tuple[str, ...] = ()) -> dict[str, Entry]:
        """The entries of a mapping with fixed keys. Raises for another kind of value, an unknown, duplicate or missing key."""
        keys = (*required, *optional)
        allowed = f"the keys {', '.join(keys)}" if keys else "no keys: leave the value away"
        if not required and self.is_empty:
            return {}
        if not isinstance(self.node, yaml.MappingNode):
            raise self.wrong(f"takes {allowed}, one a line, as `key: value`, not {self.shown}")
        entries: dict[str, Entry] = {}
        for key, entry in self._items():
            word = key.shown_raw
            if word not in keys:
                hint = nearest(word, keys)
                hint = f"{hint} It takes" if hint.startswith("did") else "it takes"
                raise key.wrong(f"there is no key {word!r} here; {hint} {allowed}")
            entries[word] = entry
        for word in required:
            if word not in entries:
                raise self.wrong(f"{word!r} is missing; it takes {allowed}")
        return entries

    def named(self, example: str) -> dict[str, Entry]:
        """The entries of a mapping whose keys are the user's names. ``example`` is one line as it may stand there."""
        if not isinstance(self.node, yaml.MappingNode):
            raise self.wrong(f"takes a name a line, such as `{example}`, not {self.shown}")
        entries = {}
        for key, entry in self._items():
            entries[key.name_of()] = entry
        return entries

    def _items(self) -> Iterator[tuple[Entry, Entry]]:
        seen: dict[str, Entry] = {}
        for key, value in self.node.value:
            at = Entry(self.name, self.path, key)
            if not isinstance(key, yaml.ScalarNode):
                raise at.wrong("a key is a word here, not a list or a mapping")
            word = str(key.value)
            if word in seen:
                raise at.wrong(f"{_cut(word)!r} stands here twice; the first is at {seen[word].place}")
            seen[word] = at
            path = _cut(word) if self._is_top else f"{self.path}.{_cut(word)}"
            yield at, Entry(self.name, path, value)

    def sequence(self, example: str = "- ...") -> list[Entry]:
        """The entries of a list that is not empty."""
        if not isinstance(self.node, yaml.SequenceNode) or not self.node.value:
            raise self.wrong(f"must be a list that is not empty: one `{example}` for each")
        return [Entry(self.name, f"{self.path}[{i}]", node) for i, node in enumerate(self.node.value)]

    def text(self, allowed: str) -> str:
        """A scalar that YAML takes for text."""
        if not isinstance(self.node, yaml.ScalarNode) or self.node.tag != _STR:
            raise self.wrong(f"must be {allowed}, not {self.shown}")
        return str(self.node.value)

    def name_of(self) -> str:
        """A name that the user has chosen."""
        allowed = "a name: a letter, and then letters, digits, '.', '_' and '-', at most 63"
        word = self.text(allowed)
        if not is_name(word):
            raise self.wrong(f"must be {allowed}, not {self.shown}")
        return word

    def number(self, allowed: str, test: Callable[[Any], bool]) -> Any:
        """A number, an int where it is whole, for which ``test`` holds."""
        value = _number(self.node) if isinstance(self.node, yaml.ScalarNode) else None
        if value is None or not test(value):
            raise self.wrong(f"must be {allowed}, not {self.shown}")
        return value

    def integer(self, allowed: str, low: int, high: int) -> int:
        """A whole number from ``low`` to ``high``."""
        return int(self.number(allowed, lambda value: isinstance(value, int) and low <= value <= high))

    def flag(self) -> bool:
        value = self.node.value.lower() if isinstance(self.node, yaml.ScalarNode) else None
        if value not in _FLAGS:
            raise self.wrong(f"must be true or false, not {self.shown}")
        return _FLAGS[value]

    def word(self, words: tuple[str, ...]) -> str:
        """One of some words."""
        value = self.node.value if isinstance(self.node, yaml.ScalarNode) else None
        if value not in words:
            raise self.wrong(f"must be one of {', '.join(words)}, not {self.shown}")
        return str(value)

    @property
    def shown_raw(self) -> str:
        return _cut(str(self.node.value))

    @property
    def shown(self) -> str:
        """The value, as an error shows it."""
        if isinstance(self.node, yaml.ScalarNode):
            return repr(self.shown_raw) if self.node.value else "nothing"
        if self.node is None:
            return "nothing"
        return "a list" if self.is_sequence else "a mapping"


def _number(node: Any) -> int | float | None:
    """A scalar as a number, None if it is none."""
    text = node.value
    # Python itself refuses to read thousands of digits.
    if node.tag == _INT and len(text) <= 30:
        sign, digits = (-1 if text.startswith("-") else 1), text.lstrip("+-")
        return sign * int(digits, {"0x": 16, "0o": 8}.get(digits[:2], 10))
    if node.tag == _FLOAT and len(text) <= 100:
        value = float(text)
        return int(value) if value.is_integer() else value
    return None


def _some(words: list[str]) -> str:
    more = f", ... ({len(words)} in all)" if len(words) > 8 else ""
    return ", ".join(words[:8]) + more


def _cut(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


class _Limits(Composer):  # type: ignore[misc]
    """PyYAML's composer with limits, and with the scalar types of YAML 1.2 (which are JSON's): `no` is a word, not false, and
    `1:30` no number. An anchor may be used again, but not within itself."""

    def __init__(self) -> None:
        Composer.__init__(self)
        self._depth = 0
        self._nodes = 0
        self._weights: dict[str, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        self._nodes += 1
        if isinstance(event, yaml.AliasEvent):
            if event.anchor in self.anchors and event.anchor not in self._weights:
                raise _problem(f"*{event.anchor} is used within itself", event)
            self._nodes += self._weights.get(event.anchor, 0)
        elif event.tag is not None and event.tag not in (_STR, _INT, _FLOAT, _BOOL, _NULL, _MAP, _SEQ):
            raise _problem(f"the tag {_cut(event.tag)}: leave it out", event)
        if self._nodes > MOST_NODES:
            raise _problem(f"more than {MOST_NODES} values, those that aliases repeat counted each time", event)
        if self._depth == MOST_DEPTH:
            raise _problem(f"more than {MOST_DEPTH} levels", event)
        before = self._nodes
        self._depth += 1
        node = Composer.compose_node(self, parent, index)
        self._depth -= 1
        if event.anchor is not None and not isinstance(event, yaml.AliasEvent):
            self._weights[event.anchor] = self._nodes - before
        return node

    def resolve(self, kind: Any, value: Any, implicit: Any) -> str:
        if kind is not yaml.ScalarNode:
            return _MAP if kind is yaml.MappingNode else _SEQ
        if not implicit[0]:
            return _STR
        return next((tag for tag, pattern in _SCALARS if pattern.fullmatch(value)), _STR)

    def descend_resolver(self, parent: Any, index: Any) -> None: ...
    def ascend_resolver(self) -> None: ...


def _problem(what: str, event: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=what, problem_mark=event.start_mark)


if yaml.__with_libyaml__:

    class _Composer(_Limits, yaml.cyaml.CParser):  # type: ignore[misc]
        """libyaml finds the tokens: 4,096 hosts take 0.5 s, and 2.5 s without it."""

        def __init__(self, text: str) -> None:
            yaml.cyaml.CParser.__init__(self, text)
            _Limits.__init__(self)

else:
    from yaml.parser import Parser  # type: ignore[import-untyped]
    from yaml.scanner import Scanner  # type: ignore[import-untyped]

    class _Composer(_Limits, Reader, Scanner, Parser):  # type: ignore[misc, no-redef]
        def __init__(self, text: str) -> None:
            Reader.__init__(self, text)
            Scanner.__init__(self)
            Parser.__init__(self)
            _Limits.__init__(self)


NAME = r"(?!(?:true|True|TRUE|false|False|FALSE|null|Null|NULL)$)[A-Za-z][A-Za-z0-9_.-]{0,62}"
"""A name in a file, as a regular expression: what YAML takes for something else than text is none."""

MOST_BYTES = 4 << 20
"""A cluster of 4,096 hosts takes 400 kB."""
MOST_DEPTH = 100
"""Clusters need 5, deployments 4 and two for each level of their trees."""
MOST_NODES = 500_000

# What YAML does not take, and the separators at which libyaml breaks lines and editors do not, so that places would be others.
_ODD = re.compile(rf"{Reader.NON_PRINTABLE.pattern}|[\x85\u2028\u2029]")
_TAG = "tag:yaml.org,2002:"
_STR, _INT, _FLOAT, _BOOL, _NULL, _MAP, _SEQ = (
    _TAG + kind for kind in ("str", "int", "float", "bool", "null", "map", "seq")
)
# YAML 1.2.2, section 10.3.2, but for infinity and not-a-number, which no key takes.
_SCALARS = [
    (_NULL, re.compile(r"null|Null|NULL|~|")),
    (_BOOL, re.compile(r"true|True|TRUE|false|False|FALSE")),
    (_INT, re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")),
    (_FLOAT, re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]{1,3})?")),
]
# Files of before followed YAML 1.1.
_FLAGS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
