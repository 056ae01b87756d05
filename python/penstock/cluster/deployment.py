"""The deployment: the file that says which servers and aggregators reduce which ranks' tensors (docs/reference/deployment.md).

Rank 0 reads it once and passes its text on to the others. An error names the line and the key.
"""

from __future__ import annotations

import ipaddress
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import yaml  # type: ignore[import-untyped]

from penstock import renamed
from penstock.errors import Config as ConfigError

__all__ = ["Aggregator", "Deployment", "Server", "chosen", "init", "load", "parse"]


@dataclass(frozen=True)
class Aggregator:
    """An aggregator and the nodes that push to it, in the order of addition."""

    address: str
    """The address on which it listens, "IP:PORT"."""
    children: tuple[Child, ...]
    switch: tuple[str, ...] | None = None
    """For a switch: the command that opens and closes jobs on it. None: a daemon, which takes requests over HTTP."""

    @property
    def workers(self) -> tuple[int, ...]:
        """All workers at or below it."""
        return tuple(worker for child in self.children for worker in _workers(child))

    @property
    def aggregators(self) -> tuple[Aggregator, ...]:
        """This aggregator, and all below it."""
        return (self, *(one for child in self.children if not isinstance(child, int) for one in child.aggregators))


Child: TypeAlias = "int | Aggregator"


@dataclass(frozen=True)
class Server:
    """A server, its part of every tensor, and its tree."""

    address: str
    fraction: float
    tree: tuple[Aggregator, ...]

    @property
    def aggregators(self) -> tuple[Aggregator, ...]:
        """All aggregators below this server."""
        return tuple(one for aggregator in self.tree for one in aggregator.aggregators)

    def children(self, world: int) -> tuple[Child, ...]:
        """The children of the server in a job of ``world`` workers: a worker that is below no aggregator is the server's own
        child."""
        placed = {worker for aggregator in self.tree for worker in aggregator.workers}
        return (*self.tree, *(worker for worker in range(world) if worker not in placed))

    def parent(self, worker: int) -> str | None:
        """The aggregator that a worker pushes to; None: the server itself."""

        def find(nodes: tuple[Child, ...], above: str | None) -> tuple[bool, str | None]:
            for node in nodes:
                if isinstance(node, int):
                    if node == worker:
                        return True, above
                else:
                    found = find(node.children, node.address)
                    if found[0]:
                        return found
            return False, None

        return find(self.tree, None)[1]


@dataclass(frozen=True)
class Deployment:
    """The content of a deployment file, validated."""

    name: str
    """The file's name, for errors."""
    format: str
    """"int32", "int16" or "float32"."""
    window: int
    """Blocks in flight, a power of two."""
    block_bytes: int | None
    """The longest block, a multiple of 64; None: as long as a packet allows."""
    min_bytes: int
    """Smaller all-reduces go among the ranks."""
    key: bool
    """Whether packets carry a MAC."""
    offloads: bool
    """Whether the kernel cuts and joins datagrams."""
    servers: tuple[Server, ...]

    @property
    def switches(self) -> tuple[Aggregator, ...]:
        """The aggregators that are switches. With one, every block is filled up to ``block_bytes``."""
        return tuple(one for server in self.servers for one in server.aggregators if one.switch is not None)

    def check_world(self, world: int) -> None:
        """Raise if the deployment does not fit a job of so many workers.

        Raises:
            penstock.errors.Config: a worker that the job does not have; more than 64 of them.
        """
        if world > MOST_WORKERS:
            raise ConfigError(f"{self.name}: a job of {world} ranks; servers and aggregators take up to {MOST_WORKERS}")
        for server in self.servers:
            for aggregator in server.tree:
                for worker in aggregator.workers:
                    if worker >= world:
                        raise ConfigError(
                            f"{self.name}: aggregator {aggregator.address} names worker {worker}, but the job has ranks 0 to "
                            f"{world - 1}"
                        )


@renamed.arguments(plan="deployment")
def init(*, deployment: str | os.PathLike[str] | Mapping[str, Any] | None = None) -> None:
    """Choose the deployment of the process groups that this process makes from now on, instead of the setting
    PENSTOCK_DEPLOYMENT.

    Call it before ``torch.distributed.init_process_group``. As with the setting, rank 0's deployment counts and reaches the
    other ranks.

    Args:
        deployment: a file's path, or the content of such a file as dicts and lists; None: the setting counts again.

    Raises:
        penstock.errors.Config: it cannot be read, or is no deployment; nothing has changed.

    Does not block, and contacts no daemon: that happens when the group is made.
    """
    global _given
    if deployment is None:
        _given = None
    elif isinstance(deployment, Mapping):
        name = "penstock.init(deployment=...)"
        try:
            text = yaml.safe_dump(dict(deployment))
        except yaml.YAMLError as error:
            raise ConfigError(f"{name}: {error}; a deployment is made of dicts, lists, texts and numbers") from None
        parse(text, name)
        _given = (text, name)
    elif not isinstance(deployment, str | os.PathLike):
        raise ConfigError(f"penstock.init(deployment={deployment!r}): a deployment is a file's path, or a dict")
    else:
        path = os.fspath(deployment)
        _given = (load(path, f"penstock.init(deployment={path!r})"), path)


def chosen(setting: str) -> tuple[str, str] | None:
    """The text and the name of the deployment that `init` was given, or else of the file that PENSTOCK_DEPLOYMENT names.

    Raises:
        penstock.errors.Config: as `load`.
    """
    return _given or ((load(setting, f"PENSTOCK_DEPLOYMENT={setting}"), setting) if setting else None)


def load(path: str, asked: str) -> str:
    """The text of a deployment file, validated; ``asked`` says in errors where the file was named.

    Raises:
        penstock.errors.Config: it cannot be read, or is no deployment.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(f"{asked}: the file cannot be read: {reason}") from error
    parse(text, path)
    return text


def parse(text: str, name: str) -> Deployment:
    """Parse and validate the text of a deployment; ``name`` is its name in errors.

    Raises:
        penstock.errors.Config: it is no deployment. The message has the line, the key, and what is allowed.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{name}{line}: this is not YAML: {problem}") from None
    top = _Entry(name, "the deployment", root)
    fields = top.mapping(required=("version", "aggregated"))
    version = fields["version"].number("1", lambda value: value == 1)
    assert version == 1
    section = fields["aggregated"]
    keys = ("format", "window", "block_bytes", "min_bytes", "key", "offloads")
    entries = section.mapping(required=("servers",), optional=keys)

    def given(key: str, default: Any, read: Callable[[_Entry], Any]) -> Any:
        return read(entries[key]) if key in entries else default

    servers = tuple(_server(entry) for entry in entries["servers"].sequence())
    total = math.fsum(server.fraction for server in servers)
    if not math.isclose(total, 1.0, abs_tol=1e-6):
        raise entries["servers"].wrong(f"the fractions of the servers add up to {total:g}; they must add up to 1")
    if len({server.address for server in servers}) != len(servers):
        raise entries["servers"].wrong("a server stands here twice")
    made = Deployment(
        name=name,
        format=given("format", "int32", lambda entry: entry.word(FORMATS)),
        window=given("window", 256, lambda entry: entry.number("a power of two from 2 to 65536", _is_window)),
        block_bytes=given("block_bytes", None, _block_bytes),
        min_bytes=given(
            "min_bytes", 65536, lambda entry: entry.number("a number of bytes, 0 or more", lambda value: value >= 0)
        ),
        key=given("key", "auto", lambda entry: entry.word(("auto", "none"))) == "auto",
        offloads=given("offloads", True, lambda entry: entry.flag()),
        servers=servers,
    )
    for switch in made.switches[:1]:
        for key, fits, allowed in (
            ("format", made.format == "int32", "int32: it adds integers of 32 bits"),
            (
                "block_bytes",
                made.block_bytes in SWITCH_BLOCK_BYTES,
                "64, 256 or 1024: what its program is compiled for",
            ),
            ("key", not made.key, "none: it computes no SipHash, so use it on a network that you trust"),
            ("window", made.window <= SWITCH_SLOTS, f"at most {SWITCH_SLOTS}: it has no more slots"),
        ):
            if not fits:
                at = entries.get(key, section)
                raise at.wrong(f"aggregator {switch.address} is a switch, and there `{key}` must be {allowed}")
    return made


class _Entry:
    """A node of the YAML file, and its path for errors."""

    def __init__(self, name: str, path: str, node: Any) -> None:
        self.name, self.path, self.node = name, path, node

    def wrong(self, what: str) -> ConfigError:
        line = f":{self.node.start_mark.line + 1}" if self.node is not None else ""
        return ConfigError(f"{self.name}{line}: {self.path}: {what}")

    def mapping(self, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> dict[str, _Entry]:
        allowed = f"takes the keys {', '.join((*required, *optional))}"
        if not isinstance(self.node, yaml.MappingNode):
            raise self.wrong(f"{allowed}, one a line, as `key: value`")
        entries: dict[str, _Entry] = {}
        for key, value in self.node.value:
            word = str(key.value)
            entry = _Entry(self.name, word if self.path == "the deployment" else f"{self.path}.{word}", value)
            if word not in (*required, *optional):
                raise _Entry(self.name, self.path, key).wrong(f"there is no key {word!r} here; it {allowed}")
            if word in entries:
                raise _Entry(self.name, self.path, key).wrong(f"{word!r} stands here twice")
            entries[word] = entry
        for word in required:
            if word not in entries:
                raise self.wrong(f"{word!r} is missing; it {allowed}")
        return entries

    def sequence(self) -> list[_Entry]:
        if not isinstance(self.node, yaml.SequenceNode) or not self.node.value:
            raise self.wrong("must be a list that is not empty: one `- ...` for each")
        return [_Entry(self.name, f"{self.path}[{i}]", node) for i, node in enumerate(self.node.value)]

    def scalar(self, allowed: str, wanted: type | tuple[type, ...]) -> Any:
        value = yaml.SafeLoader("").construct_object(self.node) if isinstance(self.node, yaml.ScalarNode) else None
        if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
            raise self.wrong(f"must be {allowed}, not {_shown(self.node)}")
        return value

    def number(self, allowed: str, test: Callable[[Any], bool]) -> Any:
        value = self.scalar(allowed, (int, float))
        if not test(value):
            raise self.wrong(f"must be {allowed}, not {_shown(self.node)}")
        return value

    def flag(self) -> bool:
        return bool(self.scalar("true or false", bool))

    def word(self, words: tuple[str, ...]) -> str:
        allowed = f"one of {', '.join(words)}"
        value = self.node.value if isinstance(self.node, yaml.ScalarNode) else None
        if value not in words:
            raise self.wrong(f"must be {allowed}, not {_shown(self.node)}")
        return str(value)

    def address(self) -> str:
        """The address in the form of the engine and the daemons, so that equal addresses are equal texts."""
        value = str(self.node.value) if isinstance(self.node, yaml.ScalarNode) else ""
        host, _, port = value.rpartition(":")
        try:
            six = host.startswith("[") and host.endswith("]")
            ip: Any = ipaddress.IPv6Address(host[1:-1]) if six else ipaddress.IPv4Address(host)
            if not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
                raise ValueError
        except ValueError:
            raise self.wrong(
                f"must be IP:PORT, such as 10.77.2.1:7471 or [fd00::1]:7471, not {_shown(self.node)}"
            ) from None
        # A link-local address needs an interface, which differs from rank to rank.
        if ip.is_unspecified or ip.is_multicast or (six and (ip.is_link_local or ip.scope_id)):
            raise self.wrong(
                f"not all ranks can reach one daemon at {_shown(self.node)}: give an address of its host's"
            )
        return f"[{ip}]:{int(port)}" if six else f"{ip}:{int(port)}"


def _server(entry: _Entry) -> Server:
    fields = entry.mapping(required=("address",), optional=("fraction", "tree"))
    fraction = 1.0
    if "fraction" in fields:
        fraction = float(
            fields["fraction"].number("a number above 0, at most 1", lambda value: MIN_FRACTION <= value <= 1)
        )
    seen: set[int | str] = set()
    tree = tuple(_aggregator(child, seen) for child in fields["tree"].sequence()) if "tree" in fields else ()
    server = Server(fields["address"].address(), fraction, tree)
    if any(one.switch is not None for one in server.aggregators):
        for address in (server.address, *(one.address for one in server.aggregators)):
            if address.startswith("["):
                raise entry.wrong(
                    f"{address}: a switch reads IPv4 only, so its server and all aggregators need such an address"
                )
    return server


def _aggregator(entry: _Entry, seen: set[int | str]) -> Aggregator:
    fields = entry.mapping(required=("aggregator",), optional=("workers", "children", "switch"))
    children: list[Child] = []
    if "workers" in fields:
        for worker in fields["workers"].sequence():
            allowed = f"a worker's number, its rank, from 0 to {MOST_WORKERS - 1}"
            number = worker.number(allowed, lambda value: isinstance(value, int) and 0 <= value < MOST_WORKERS)
            if number in seen:
                raise worker.wrong(f"worker {number} stands twice in the tree of this server")
            seen.add(number)
            children.append(number)
    if "children" in fields:
        children += [_aggregator(child, seen) for child in fields["children"].sequence()]
    if not children:
        raise entry.wrong("an aggregator needs `workers: [...]`, or aggregators as `children:`, or both")
    switch = None
    if "switch" in fields:
        words = fields["switch"].sequence()
        switch = tuple(word.scalar("a word of the command that opens jobs on the switch", str) for word in words)
        if len(children) > SWITCH_CHILDREN:
            raise entry.wrong(
                f"a switch has at most {SWITCH_CHILDREN} children, here are {len(children)}: put aggregators below it"
            )
    address = fields["aggregator"].address()
    if address in seen:
        raise fields["aggregator"].wrong(f"aggregator {address} stands twice in the tree of this server")
    seen.add(address)
    return Aggregator(address, tuple(children), switch)


def _workers(child: Child) -> tuple[int, ...]:
    return (child,) if isinstance(child, int) else child.workers


def _block_bytes(entry: _Entry) -> int | None:
    if isinstance(entry.node, yaml.ScalarNode) and entry.node.value == "auto":
        return None
    allowed = f"auto, or a multiple of 64 up to {MOST_BLOCK_BYTES}"
    value = entry.number(
        allowed, lambda value: isinstance(value, int) and 64 <= value <= MOST_BLOCK_BYTES and value % 64 == 0
    )
    return int(value)


def _is_window(value: Any) -> bool:
    return isinstance(value, int) and 2 <= value <= 65536 and value & (value - 1) == 0


def _shown(node: Any) -> str:
    return repr(node.value) if isinstance(node, yaml.ScalarNode) else "what stands here"


FORMATS = ("int32", "int16", "float32")
MOST_WORKERS = 64
# The longest block of a packet: docs/reference/packets.md.
MOST_BLOCK_BYTES = 8896
# The limits of p4/penstock.p4: docs/design/p4.md.
SWITCH_BLOCK_BYTES = (64, 256, 1024)
SWITCH_CHILDREN = 16
SWITCH_SLOTS = 4096
# Weights are counted in millionths.
MIN_FRACTION = 1e-6
# `init`'s: text and name.
_given: tuple[str, str] | None = None
