"""The memory of earlier jobs: their best settings by model graph and topology graph, in one file of the user's cache.

The file is JSON, written whole or not at all. One that cannot be read is a warning and counts as empty: a job must not
fail for what it could have remembered. Two jobs that end at the same moment may each keep the other's entry from being
written; neither damages the file. Every host has a file of its own: rank 0 reads, and tells the others (docs/design/tuner.md).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.files import write_whole
from penstock.training.tune.graphs import Graph, distance, least_distance
from penstock.training.tune.space import Setting, with_new_names

__all__ = ["Entry", "Match", "Memory", "default_path"]

log = logging.getLogger("penstock.tune")


@dataclass(frozen=True)
class Entry:
    """The setting of one model on one topology."""

    model: Graph
    topology: Graph
    setting: Setting
    seconds: float
    """Median time of a step under the setting, as it was tuned."""

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model.to_json(),
            "topology": self.topology.to_json(),
            "setting": self.setting.to_json(),
            "seconds": self.seconds,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Entry:
        return cls(
            Graph.from_json(document["model"]),
            Graph.from_json(document["topology"]),
            Setting.from_json(document["setting"]),
            float(document["seconds"]),
        )


@dataclass(frozen=True)
class Match:
    """The entry nearest to a job."""

    entry: Entry
    model_distance: float
    topology_distance: float

    @property
    def distance(self) -> float:
        """The sum of both, 0 to 2."""
        return self.model_distance + self.topology_distance

    @property
    def near(self) -> bool:
        """Whether a short tuning from this entry suffices; otherwise it is only the start of a full one."""
        return self.distance <= NEAR


class Memory:
    """Remembers settings in a file.

    Args:
        path: the file; `default_path()` where none is given. It need not exist, nor its folder.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = Path(path) if path is not None else default_path()

    def entries(self) -> list[Entry]:
        """All entries, the one that was used last at the end. A file that cannot be read gives none, and a warning."""
        try:
            document = with_new_names(json.loads(self.path.read_text(encoding="utf-8")))
            if document["format"] != MEMORY_FORMAT:
                raise ValueError(f"its format is {document['format']!r}, not {MEMORY_FORMAT}")
            return [Entry.from_json(entry) for entry in document["entries"]]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            log.warning(
                "the tuner's memory %s cannot be read (%s: %s): going on without; the next tuning writes it anew",
                self.path,
                type(error).__name__,
                error,
            )
            return []

    def nearest(self, model: Graph, topology: Graph) -> Match | None:
        """The entry with the least sum of both distances; of equals the one that was used last. None where there is none.

        Cost: an assignment for each entry that the linear bound does not rule out; a second or so at `MAX_ENTRIES`.
        """
        best: Match | None = None
        bounded = [
            (least_distance(model, entry.model) + least_distance(topology, entry.topology), -position, entry)
            for position, entry in enumerate(self.entries())
        ]
        for bound, _, entry in sorted(bounded, key=lambda each: each[:2]):
            if best is not None and bound >= best.distance:
                break
            match = Match(entry, distance(model, entry.model), distance(topology, entry.topology))
            if best is None or match.distance < best.distance:
                best = match
        return best

    def remember(self, entry: Entry) -> bool:
        """Keep an entry, in the place of one for the same graphs, and forget the one that was used longest ago where there
        are more than `MAX_ENTRIES`. False, and a warning, where the file cannot be written."""
        kept = [each for each in self.entries() if (each.model, each.topology) != (entry.model, entry.topology)]
        kept = [*kept, entry][-MAX_ENTRIES:]
        document = {"format": MEMORY_FORMAT, "entries": [each.to_json() for each in kept]}
        try:
            write_whole(self.path, json.dumps(document) + "\n")
        except OSError as error:
            log.warning("the tuner's memory %s cannot be written: %s", self.path, error)
            return False
        return True

    def clear(self) -> int:
        """Forget everything; returns how many entries there were. Raises OSError where the file cannot be removed."""
        count = len(self.entries())
        self.path.unlink(missing_ok=True)
        return count


def default_path(environ: Mapping[str, str] = os.environ) -> Path:
    """``$XDG_CACHE_HOME/penstock/tune.json``; as the XDG base directory specification has it, a relative path there does not
    count, and ``~/.cache`` takes its place."""
    cache = Path(environ.get("XDG_CACHE_HOME", ""))
    return (cache if cache.is_absolute() else Path.home() / ".cache") / "penstock" / "tune.json"


MEMORY_FORMAT = "penstock-tune-memory/1"

# A file of 64 entries at the most nodes is some MiB; typical ones are a tenth of that.
MAX_ENTRIES = 64

# A sum of distances: say, one in ten modules another and a tenth of the topology. A guess.
NEAR = 0.2
