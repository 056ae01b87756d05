"""The matrix file: which models run on how many ranks over what. A file is a product of lists, or several of them."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from penstock.errors import Config
from penstock.numbers import plural
from penstock.texts import harmless

__all__ = ["Cell", "Matrix", "read"]

SCALINGS = ("strong", "weak")
PARALLEL = ("data", "pipeline")
DEVICES = ("cpu", "cuda")


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
    """``gloo``, ``nccl``, ``shm``, ``aggregated``, or ``tcp-N``: penstock with N streams; ``tcp`` with as many as it chooses."""
    link_mbit: float
    """Of each rank's host, which is emulated; 0: none is."""
    flow_mbit: float
    """That one flow gets at most; 0: no cap."""
    scaling: str
    """In which way the batch follows the ranks."""
    sequence: int
    """Tokens; 0: all that the model sees."""
    checkpoint_every: int = 0
    """Steps from one checkpoint to the next; 0: never."""
    evaluate_every: int = 0
    """The same of evaluations."""
    launch: str = ""
    """The command that starts the ranks, before ``-m`` and the module; empty: torchrun, on this host."""
    device: str = "cpu"
    """Or ``cuda``: of each rank the GPU of its LOCAL_RANK."""

    @property
    def key(self) -> str:
        """A file name: readable, and different for different cells."""
        told = f"{self.model}-{self.parallel}-{self.ranks}-{self.batch}-{self.transport}-{self.link_mbit:g}"
        # Not what a cell of an earlier matrix does not have, so that its records are found.
        usual = {field.name: field.default for field in dataclasses.fields(self)}
        fields = {name: value for name, value in dataclasses.asdict(self).items() if value != usual[name]}
        digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
        return f"{told}-{digest[:8]}"

    def refusal(self) -> str:
        """Why it cannot run, or nothing."""
        replicas = 1 if self.parallel == "pipeline" else self.ranks
        micro = self.micro_batch or self.batch // replicas
        if micro < 1 or self.batch % (micro * replicas):
            each = f"in micro-batches of {self.micro_batch}" if self.micro_batch else "equally"
            return f"a batch of {self.batch} cannot be shared {each} by {plural(replicas, 'replica')}"
        if self.parallel == "pipeline" and self.ranks < 2:
            return "a pipeline needs two ranks or more"
        if self.transport == "shm" and self.link_mbit:
            return "ranks on hosts of their own share no memory: give shm the link 0"
        if self.transport == "aggregated" and not self.link_mbit and not self.launch:
            return "aggregators stand in a network: give aggregated a link"
        if self.transport == "aggregated" and self.flow_mbit:
            return "through aggregators go datagrams: give aggregated no flow_mbit"
        if self.transport == "aggregated" and self.parallel == "pipeline":
            return "a pipeline has hardly anything to sum: aggregated is for data parallel"
        if self.launch and (self.link_mbit or self.flow_mbit):
            return "ranks of a launch have the links of their hosts: give it links_mbit 0 and flow_mbit 0"
        if self.launch and self.transport == "aggregated":
            return "aggregators stand in an emulated network: give aggregated no launch"
        if self.transport == "nccl" and self.device != "cuda":
            return "nccl needs GPUs: give it the device cuda"
        if self.transport == "nccl" and self.link_mbit:
            return "nccl needs a GPU for each rank, and ranks on emulated hosts share one: give it the link 0"
        if self.transport == "gloo" and self.device == "cuda" and self.parallel == "pipeline":
            return "gloo does not send tensors of GPUs: give a pipeline on cuda nccl or tcp"
        if self.evaluate_every and self.parallel == "pipeline":
            return "the models evaluate in data parallel only: give a pipeline no evaluate_every"
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
    "checkpoint_every": (int, [0]),
    "evaluate_every": (int, [0]),
    "launch": (str, [""]),
    "device": (str, ["cpu"]),
}
"""Of a product: what its lists hold, and what they are when they are not given."""
MOST_LAUNCH = 200
"""It is a part of labels."""
MOST = 10**9
"""Of numbers in it."""
MOST_BYTES = 64 << 10
MOST_RUNS = 10_000
"""At ten seconds each more than a day."""
_WHOLE: dict[str, int] = {"steps": 30, "repeats": 3, "seed": 1}
_LEAST = {"steps": 6, "repeats": 1, "seed": 0}
"""The first step that the profile looks into is the fifth."""


def read(path: Path, models: Sequence[str]) -> Matrix:
    """The matrix of a file.

    Args:
        models: the known ones.

    Raises:
        Config: it cannot be read, or says something that makes no sense, with the place.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES + 1)
        if len(text) > MOST_BYTES:
            raise Config(f"{path} has more than {MOST_BYTES >> 10} KiB: that is no matrix")
        given = yaml.safe_load(text.decode("utf-8"))
    except OSError as error:
        raise Config(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise Config(f"{path} is no YAML: {error}") from error
    if not isinstance(given, dict):
        raise Config(f"{path}: a matrix has keys, at least `models`, or `runs` with a list of products")
    unknown = set(given) - set(_FIELDS) - set(_WHOLE) - {"runs"}
    if unknown:
        raise Config(f"{path}: unknown {', '.join(sorted(map(_name, unknown)))}; keys are {_keys()}")
    whole = {}
    for name, usual in _WHOLE.items():
        value = given.get(name, usual)
        if isinstance(value, bool) or not isinstance(value, int) or not _LEAST[name] <= value <= MOST:
            raise Config(f"{path}: {name} is a whole number from {_LEAST[name]} to {MOST:,}, and not {_told(value)}")
        whole[name] = value
    products = given.get("runs", [{}])
    if not isinstance(products, list) or not products:
        raise Config(f"{path}: runs is a list of products, each with keys of {_keys()}")
    cells: dict[Cell, None] = {}
    runs = 0
    for number, product in enumerate(products, 1):
        where = f"{path}: run {number}" if "runs" in given else str(path)
        unknown = set(product) - set(_FIELDS) if isinstance(product, dict) else set()
        if not isinstance(product, dict) or unknown:
            what = f"unknown {', '.join(sorted(map(_name, unknown)))}" if unknown else "no keys"
            raise Config(f"{where}: {what}; keys are {', '.join(_FIELDS)}")
        common = {name: value for name, value in given.items() if name in _FIELDS}
        lists = _lists({**common, **product}, where)
        # Before anything is made of them: a short file can be the product of long lists.
        runs += math.prod(map(len, lists.values())) * whole["repeats"]
        if runs > MOST_RUNS:
            raise Config(f"{where}: the matrix has more than {MOST_RUNS:,} runs")
        for cell in _cells(lists, where, models):
            cells.setdefault(cell)
    left_out = tuple((cell, cell.refusal()) for cell in cells if cell.refusal())
    return Matrix(tuple(cell for cell in cells if not cell.refusal()), **whole, left_out=left_out)


def _lists(given: dict[str, Any], where: str) -> dict[str, list[Any]]:
    lists: dict[str, list[Any]] = {}
    for name, (_, usual) in _FIELDS.items():
        value = given.get(name, usual)
        lists[name] = value if isinstance(value, list) else [value]
        if value is None or not lists[name]:
            raise Config(f"{where}: {name} is missing: a value or a list")
    return lists


def _cells(lists: dict[str, list[Any]], where: str, models: Sequence[str]) -> list[Cell]:
    for name, (kind, _) in _FIELDS.items():
        for each in lists[name]:
            if isinstance(each, bool) or not isinstance(each, kind):
                is_word = kind is str
                raise Config(f"{where}: {name} has {_told(each)}, which is no {'word' if is_word else 'number'}")
            # Not so of what is no number, either.
            if isinstance(each, (int, float)) and not (name in ("ranks", "batches")) <= each <= MOST:
                raise Config(f"{where}: {name} has {_told(each)}")
    for name, known in (("models", models), ("parallel", PARALLEL), ("scaling", SCALINGS), ("device", DEVICES)):
        if unknown := [each for each in lists[name] if each not in known]:
            raise Config(f"{where}: {name} has {_told(unknown[0])}; there are {', '.join(known)}")
    for transport in lists["transports"]:
        if transport == "rdma":
            raise Config(f"{where}: there is no transport over RDMA (UCX) here; leave rdma out")
        name, dash, streams = transport.partition("-")
        known = ("gloo", "nccl", "shm", "aggregated", "tcp")
        if name not in known or (dash and (name != "tcp" or not _is_streams(streams))):
            raise Config(
                f"{where}: transports has {_told(transport)}; there are gloo, tcp, tcp-1 to tcp-64, shm, aggregated, nccl"
            )
    for launch in lists["launch"]:
        wrong = _wrong_launch(launch)
        if launch and not wrong and "{ranks}" not in launch and len(lists["ranks"]) > 1:
            wrong = "without {ranks}, which several numbers of ranks need"
        if wrong:
            raise Config(f"{where}: launch has {_told(launch)}, {wrong}")
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
                checkpoint_every=one["checkpoint_every"],
                evaluate_every=one["evaluate_every"],
                launch=one["launch"],
                device=one["device"],
            )
        )
    return made


def _wrong_launch(text: str) -> str:
    """What is wrong with a command that starts ranks; nothing if it is empty or may be right."""
    if len(text) > MOST_LAUNCH or harmless(text) != text or "\n" in text:
        return f"which is no command in one line of {MOST_LAUNCH} characters at most: put it into a script"
    if re.search("[{}]", text.replace("{ranks}", "")):
        return "with other braces than {ranks}, the number of ranks: put the command into a script, and its name here"
    try:
        return "" if shlex.split(text) or not text else "which is no command"
    except ValueError as error:
        return f"which is no command: {error}"


def _is_streams(text: str) -> bool:
    return re.fullmatch("[1-9][0-9]?", text) is not None and int(text) <= 64


def _told(value: object) -> str:
    """A value of the file in some characters: aliases can make it as large as they like."""
    if isinstance(value, str):
        return repr(value[:64])
    if isinstance(value, (int, float)):
        return repr(value) if not abs(value) > MOST else "a number that is too large"
    return f"a {type(value).__name__}"


def _name(key: object) -> str:
    return key[:64] if isinstance(key, str) else _told(key)


def _keys() -> str:
    return ", ".join([*_FIELDS, *_WHOLE, "runs"])
