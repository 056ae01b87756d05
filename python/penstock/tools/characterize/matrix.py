"""The matrix file: which models run on how many ranks over what. A file is a product of lists, or several of them."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from penstock.errors import Config

__all__ = ["Cell", "Matrix", "read"]

SCALINGS = ("strong", "weak")
PARALLEL = ("data", "pipeline")


@dataclass(frozen=True)
class Cell:
    """One run."""

    model: str
    parallel: str
    ranks: int
    batch: int
    """Sequences a step, of all ranks together."""
    micro_batch: int
    """Sequences at a time; 0: all that a rank has of a step."""
    transport: str
    """``gloo``, ``shm``, ``aggregated``, or ``tcp-N``: penstock with N streams; ``tcp`` with as many as it chooses."""
    link_mbit: float
    """Of each rank's host; 0: all ranks on this host."""
    flow_mbit: float
    """That one flow gets at most; 0: no cap."""
    scaling: str
    """In which way the batch follows the ranks."""
    sequence: int
    """Tokens; 0: all that the model sees."""

    @property
    def key(self) -> str:
        """A file name: readable, and different for different cells."""
        told = f"{self.model}-{self.parallel}-{self.ranks}-{self.batch}-{self.transport}-{self.link_mbit:g}"
        digest = hashlib.sha256(json.dumps(dataclasses.asdict(self), sort_keys=True).encode()).hexdigest()
        return f"{told}-{digest[:8]}"

    def refusal(self) -> str:
        """Why it cannot run, or nothing."""
        replicas = 1 if self.parallel == "pipeline" else self.ranks
        micro = self.micro_batch or self.batch // replicas
        if micro < 1 or self.batch % (micro * replicas):
            return f"a batch of {self.batch} is no multiple of {max(micro, 1)} sequences on each of {replicas} replicas"
        if self.parallel == "pipeline" and self.ranks < 2:
            return "a pipeline needs two ranks or more"
        if self.transport == "shm" and self.link_mbit:
            return "ranks on hosts of their own share no memory: give shm the link 0"
        if self.transport == "aggregated" and not self.link_mbit:
            return "aggregators stand in a network: give aggregated a link"
        if self.transport == "aggregated" and self.flow_mbit:
            return "through aggregators go datagrams: give aggregated no flow_mbit"
        if self.transport == "aggregated" and self.parallel == "pipeline":
            return "a pipeline has hardly anything to sum: aggregated is for data parallel"
        return ""


@dataclass(frozen=True)
class Matrix:
    """What to run."""

    cells: tuple[Cell, ...]
    steps: int
    repeats: int
    seed: int
    left_out: tuple[tuple[Cell, str], ...]
    """Cells that cannot run, and why."""


_FIELDS: dict[str, tuple[type | tuple[type, ...], Any]] = {
    "models": (str, None),
    "parallel": (str, ["data"]),
    "ranks": (int, [2]),
    "batches": (int, [8]),
    "micro_batch": (int, [0]),
    "transports": (str, ["gloo", "tcp"]),
    "links_mbit": ((int, float), [0]),
    "flow_mbit": ((int, float), [0]),
    "scaling": (str, ["strong"]),
    "sequence": (int, [0]),
}
"""Of a product: what its lists hold, and what they are when they are not given."""
_WHOLE: dict[str, int] = {"steps": 30, "repeats": 3, "seed": 1}


def read(path: Path, models: Sequence[str]) -> Matrix:
    """The matrix of a file.

    Args:
        models: the known ones.

    Raises:
        Config: it cannot be read, or says something that makes no sense, with the place.
    """
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Config(f"cannot read {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise Config(f"{path} is no YAML: {error}") from error
    if not isinstance(given, dict):
        raise Config(f"{path}: a matrix has keys, at least `models`, or `runs` with a list of products")
    unknown = set(given) - set(_FIELDS) - set(_WHOLE) - {"runs"}
    if unknown:
        raise Config(f"{path}: nobody knows {', '.join(sorted(map(str, unknown)))}; keys are {_keys()}")
    whole = {}
    for name, usual in _WHOLE.items():
        value = given.get(name, usual)
        if isinstance(value, bool) or not isinstance(value, int) or value < (name != "seed"):
            raise Config(f"{path}: {name} is a whole number{' above 0' if name != 'seed' else ''}, and not {value!r}")
        whole[name] = value
    products = given.get("runs", [{}])
    if not isinstance(products, list) or not products:
        raise Config(f"{path}: runs is a list of products, each with keys of {_keys()}")
    cells: dict[Cell, None] = {}
    for number, product in enumerate(products, 1):
        where = f"{path}: run {number}" if "runs" in given else str(path)
        if not isinstance(product, dict) or set(product) - set(_FIELDS):
            raise Config(f"{where}: a product has keys of {', '.join(_FIELDS)}")
        common = {name: value for name, value in given.items() if name in _FIELDS}
        for cell in _cells({**common, **product}, where, models):
            cells.setdefault(cell)
    left_out = tuple((cell, cell.refusal()) for cell in cells if cell.refusal())
    return Matrix(tuple(cell for cell in cells if not cell.refusal()), **whole, left_out=left_out)


def _cells(given: dict[str, Any], where: str, models: Sequence[str]) -> list[Cell]:
    lists: dict[str, list[Any]] = {}
    for name, (kind, usual) in _FIELDS.items():
        value = given.get(name, usual)
        values = value if isinstance(value, list) else [value]
        if value is None or not values:
            raise Config(f"{where}: {name} is missing: a value or a list")
        for each in values:
            if isinstance(each, bool) or not isinstance(each, kind):
                raise Config(f"{where}: {name} has {each!r}, which is no {'number' if kind is not str else 'word'}")
            if isinstance(each, (int, float)) and (each < 0 or (each == 0 and name in ("ranks", "batches"))):
                raise Config(f"{where}: {name} has {each!r}")
        lists[name] = values
    for name, known in (("models", models), ("parallel", PARALLEL), ("scaling", SCALINGS)):
        if unknown := [each for each in lists[name] if each not in known]:
            raise Config(f"{where}: {name} has {unknown[0]!r}; there are {', '.join(known)}")
    for transport in lists["transports"]:
        if transport == "rdma":
            raise Config(f"{where}: there is no transport over RDMA (UCX) here; leave rdma out")
        name, dash, streams = transport.partition("-")
        if name not in ("gloo", "shm", "aggregated", "tcp") or (dash and (name != "tcp" or not _is_streams(streams))):
            raise Config(
                f"{where}: transports has {transport!r}; there are gloo, tcp, tcp-1 to tcp-64, shm, aggregated"
            )
    made = []
    for product in itertools.product(*lists.values()):
        one = dict(zip(lists, product, strict=True))
        scale = one["ranks"] if one["scaling"] == "weak" else 1
        made.append(
            Cell(
                model=one["models"],
                parallel=one["parallel"],
                ranks=one["ranks"],
                batch=one["batches"] * scale,
                micro_batch=one["micro_batch"],
                transport=one["transports"],
                link_mbit=float(one["links_mbit"]),
                flow_mbit=float(one["flow_mbit"]),
                scaling=one["scaling"],
                sequence=one["sequence"],
            )
        )
    return made


def _is_streams(text: str) -> bool:
    return text.isdigit() and 1 <= int(text) <= 64


def _keys() -> str:
    return ", ".join([*_FIELDS, *_WHOLE, "runs"])
