"""The largest batch that fits into memory, by bisection. What was tried is kept beside the runs: a search is made once, and goes
on where it stopped."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from penstock.errors import Config
from penstock.files import write_whole
from penstock.tools.characterize import checked
from penstock.tools.characterize.matrix import Cell

__all__ = ["Kind", "Limit", "Tries", "kind_of", "largest"]

FORMAT = "penstock-characterization-memory/1"
NAME = "memory.jsonl"
"""Of the file: a line with its format, then one for each try."""

MOST = 1 << 16
"""Sequences: a batch that nobody asks for."""


@dataclass(frozen=True)
class Kind:
    """What of a cell says how much memory it takes, but for its batch."""

    model: str
    parallel: str
    ranks: int
    micro_batch: int
    sequence: int

    @property
    def unit(self) -> int:
        """Batches are multiples of it."""
        return (self.micro_batch or 1) * (1 if self.parallel == "pipeline" else self.ranks)


@dataclass(frozen=True)
class Limit:
    """The largest batch with so much memory a rank; 0: not even one sequence a rank fits."""

    batch: int
    mib: int


def kind_of(cell: Cell) -> Kind:
    return Kind(cell.model, cell.parallel, cell.ranks, cell.micro_batch, cell.sequence)


class Tries:
    """What was tried, in a folder of runs. A line that makes no sense, as a full disk leaves one, is tried again."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._known: dict[tuple[Kind, int], dict[int, bool]] = {}
        try:
            lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return
        except OSError as error:
            raise Config(f"cannot read {self._path}: {error.strerror}") from error
        if lines and (_object(lines[0]) or {}).get("format") != FORMAT:
            raise Config(f"{self._path} is no {FORMAT}: remove it, and the largest batches are looked for again")
        for line in lines[1:]:
            given = _object(line) or {}
            try:
                kind = checked.made(Kind, _KIND, given["kind"])
                tried, mib, batch = given["fits"], checked.count(given["mib"]), checked.count(given["batch"])
            except (KeyError, TypeError, ValueError):
                continue
            if isinstance(tried, bool) and kind.ranks:
                self._known.setdefault((kind, mib), {})[batch] = tried

    def largest(self, cell: Cell, mib: int, fits: Callable[[Cell], bool]) -> int:
        """The largest batch of a cell whose ranks have so much memory each; 0 if none fits. Only what was not tried is."""
        kind = kind_of(cell)
        known = self._known.setdefault((kind, mib), {})

        def does_fit(batch: int) -> bool:
            if batch not in known:
                known[batch] = fits(replace(cell, batch=batch))
                self._write()
            return known[batch]

        return largest(does_fit, kind.unit, MOST)

    def limits(self) -> Mapping[Kind, Limit]:
        """What searches found that came to their end; of several for one kind the one with the most memory."""
        found: dict[Kind, Limit] = {}
        for (kind, mib), tried in sorted(self._known.items(), key=lambda item: item[0][1]):
            most = max((batch for batch, fits in tried.items() if fits), default=0)
            if tried.get(most + kind.unit) is False:
                found[kind] = Limit(most, mib)
        return found

    def _write(self) -> None:
        lines = [json.dumps({"format": FORMAT})]
        for (kind, mib), tried in self._known.items():
            about = {"kind": asdict(kind), "mib": mib}
            lines += [json.dumps({**about, "batch": batch, "fits": fits}) for batch, fits in tried.items()]
        try:
            write_whole(self._path, "\n".join(lines) + "\n")
        except OSError as error:
            raise Config(f"cannot write {self._path}: {error.strerror}") from error


def largest(fits: Callable[[int], bool], unit: int, most: int) -> int:
    """The largest multiple of ``unit`` that fits, up to ``most``; 0 if not even one does. O(log) sizes are tried: they double
    until one does not fit, and then the interval is halved."""
    low, high = 0, unit
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most // unit * unit + unit)
    while high - low > unit:
        middle = (low + high) // 2 // unit * unit
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def _object(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


_KIND: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("model", "parallel"), checked.text),
    **dict.fromkeys(("ranks", "micro_batch", "sequence"), checked.count),
}
