"""The deployment: the file that says which servers and aggregators reduce which ranks' tensors (docs/reference/deployment.md).

Version 2 names servers, aggregators and hosts of a cluster file; version 1 has their addresses instead. Rank 0 reads the files
once and passes on a text with addresses. An error has the place in the file, and the key.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import yaml  # type: ignore[import-untyped]

from penstock import renamed
from penstock.cluster import file, places, routes
from penstock.cluster.network import Aggregator as AggregatorOfCluster
from penstock.cluster.network import Cluster, Job
from penstock.cluster.network import Server as ServerOfCluster
from penstock.cluster.places import Entry
from penstock.errors import Config as ConfigError

log = logging.getLogger("penstock")

__all__ = ["Aggregator", "Deployment", "Server", "chosen", "cluster_path", "init", "job_in", "load", "parse", "use"]


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
    routes: tuple[tuple[int | str, tuple[str, ...]], ...] = ()
    """Links of the cluster file by rank, or by an aggregator's address: the way to what it pushes to. Ranks do not need them:
    who runs the network sets them up."""

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
        above = self._above(worker)
        return above.address if above else None

    def place(self, worker: int, world: int) -> int:
        """A worker's place among the children of the node that it pushes to, in a job of ``world`` workers."""
        above = self._above(worker)
        return (above.children if above else self.children(world)).index(worker)

    def _above(self, worker: int) -> Aggregator | None:
        return next((one for one in self.aggregators if worker in one.children), None)


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
            penstock.errors.Config: a worker that the job does not have; too many workers; a server with too many children.
        """
        if world > MOST_WORKERS:
            raise ConfigError(f"{self.name}: a job of {world} ranks; servers and aggregators take up to {MOST_WORKERS}")
        for switch in self.switches[:1]:
            if world > SWITCH_WORKERS:
                raise ConfigError(
                    f"{self.name}: a job of {world} ranks; with a switch ({switch.address}) at most {SWITCH_WORKERS} are "
                    "possible: make it an aggregator's daemon"
                )
        for server in self.servers:
            count = len(server.children(world))
            if count > MOST_CHILDREN:
                straight = count - len(server.tree)
                raise ConfigError(
                    f"{self.name}: server {server.address} has {count} children in a job of {world} ranks ({straight} ranks "
                    f"that are below no aggregator); at most {MOST_CHILDREN} are possible: put aggregators between"
                )
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
        _given = (_resolved(text, name, os.curdir), name)
    elif not isinstance(deployment, str | os.PathLike):
        raise ConfigError(f"penstock.init(deployment={deployment!r}): a deployment is a file's path, or a dict")
    else:
        path = os.fspath(deployment)
        _given = (load(path, f"penstock.init(deployment={path!r})"), path)


def use(text: str | None, name: str | None) -> None:
    """As `init`, of a deployment that `load` has read; None: the setting counts again."""
    global _given
    _given = None if text is None or name is None else (text, name)


def chosen(setting: str) -> tuple[str, str] | None:
    """The text and the name of the deployment that `init` was given, or else of the file that PENSTOCK_DEPLOYMENT names.

    Raises:
        penstock.errors.Config: as `load`.
    """
    return _given or ((load(setting, f"PENSTOCK_DEPLOYMENT={setting}"), setting) if setting else None)


def load(path: str, asked: str) -> str:
    """The text of a deployment file, validated, with the addresses of all that it names in a cluster file; ``asked`` says in
    errors where the file was named.

    Raises:
        penstock.errors.Config: it or its cluster file cannot be read, or is none.
    """
    return _resolved(places.read_text(path, asked), path, os.path.dirname(path))


def _resolved(text: str, name: str, folder: str) -> str:
    found, version = _parse(text, name, folder)
    if version == 2:
        return _with_addresses(found)
    if name not in _warned:
        _warned.add(name)
        log.warning(
            "%s: version 1 of the deployment file works until release %s: name servers and aggregators of a cluster file in "
            "version 2 (docs/reference/deployment.md)",
            name,
            renamed.UNTIL,
        )
    return text


def parse(text: str, name: str, folder: str = os.curdir) -> Deployment:
    """Parse and validate the text of a deployment.

    Args:
        name: its name in errors.
        folder: where the path of its cluster file begins.

    Raises:
        penstock.errors.Config: it is no deployment, or its cluster file cannot be read. The message has the place in the file,
            the key, and what is allowed.
    """
    return _parse(text, name, folder)[0]


def cluster_path(text: str, path: str) -> str:
    """The path of the cluster file that the deployment at ``path`` names.

    Raises:
        penstock.errors.Config: it is no deployment, or names none.
    """
    fields = _top(text, path)
    if "cluster" not in fields:
        raise ConfigError(f"{path}: version 1 has no cluster file, so nothing is known of its network: write version 2")
    return os.path.join(os.path.dirname(path), fields["cluster"].text("the path of a cluster file"))


def job_in(cluster: Cluster, text: str, path: str) -> Job:
    """The job of a cluster that the deployment at ``path`` is for.

    Raises:
        penstock.errors.Config: it is no deployment, or the cluster has no such job, or several and none is chosen.
    """
    fields = _top(text, path)
    if "job" not in fields:
        if len(cluster.jobs) != 1:
            raise ConfigError(
                f"{path}: choose with `job:` whose workers these are, from {', '.join(cluster.job) or 'none'}"
            )
        return cluster.jobs[0]
    name = fields["job"].name_of()
    if name not in cluster.job:
        raise ConfigError(f"{path}: the cluster has no job {name}: {places.nearest(name, cluster.job)}")
    return cluster.job[name]


def _top(text: str, path: str) -> Mapping[str, Entry]:
    return places.compose(text, path, "the deployment").mapping(("version", "aggregated"), ("cluster", "job"))


def _parse(text: str, name: str, folder: str) -> tuple[Deployment, int]:
    top = places.compose(text, name, "the deployment")
    fields = top.mapping(required=("version", "aggregated"), optional=("cluster", "job"))
    version = fields["version"].number("1 or 2: it is the version of the format", lambda value: value in (1, 2))
    section = fields["aggregated"]
    names = _Names(None, None)
    if version == 1:
        for key in ("cluster", "job"):
            if key in fields:
                raise fields[key].wrong(
                    f"{key!r} needs `version: 2`, in which servers, aggregators and hosts have names"
                )
    elif "cluster" not in fields:
        raise top.wrong(
            "'cluster' is missing: the path of the cluster file whose names stand here (version 1 has addresses)"
        )
    else:
        names = _read_names(fields, folder)
    keys = ("format", "window", "block_bytes", "min_bytes", "key", "offloads")
    entries = section.mapping(required=("servers",), optional=keys)

    def given(key: str, default: Any, read: Callable[[Entry], Any]) -> Any:
        return read(entries[key]) if key in entries else default

    servers = tuple(_server(entry, names) for entry in entries["servers"].sequence())
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
        min_bytes=given("min_bytes", 65536, lambda entry: entry.integer("a number of bytes, 0 or more", 0, 1 << 62)),
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
    return made, version


def _with_addresses(found: Deployment) -> str:
    """The text of version 1, for ranks that have no cluster file."""

    def node(aggregator: Aggregator) -> dict[str, Any]:
        workers = [child for child in aggregator.children if isinstance(child, int)]
        below = [node(child) for child in aggregator.children if not isinstance(child, int)]
        return {
            "aggregator": aggregator.address,
            **({"workers": workers} if workers else {}),
            **({"children": below} if below else {}),
            **({"switch": list(aggregator.switch)} if aggregator.switch else {}),
        }

    servers = [
        {
            "address": server.address,
            "fraction": server.fraction,
            **({"tree": [node(aggregator) for aggregator in server.tree]} if server.tree else {}),
        }
        for server in found.servers
    ]
    section = {
        "format": found.format,
        "window": found.window,
        "block_bytes": "auto" if found.block_bytes is None else found.block_bytes,
        "min_bytes": found.min_bytes,
        "key": "auto" if found.key else "none",
        "offloads": found.offloads,
        "servers": servers,
    }
    return json.dumps({"version": 1, "aggregated": section})


@dataclass(frozen=True)
class _Names:
    """Finds what a deployment names: in version 2 in a cluster, in version 1 by address and rank."""

    cluster: Cluster | None
    job: tuple[str, ...] | None
    """The host of each rank."""

    @property
    def server_key(self) -> str:
        return "address" if self.cluster is None else "server"

    def server(self, entry: Entry) -> str:
        """The address of a server."""
        return _address(entry) if self.cluster is None else self._found(entry, "server", self.cluster.server)

    def aggregator(self, entry: Entry) -> str:
        """The address of an aggregator."""
        return _address(entry) if self.cluster is None else self._found(entry, "aggregator", self.cluster.aggregator)

    def workers(self, entry: Entry) -> list[int]:
        """A rank, or all ranks of the job on a host."""
        most = MOST_WORKERS if self.job is None else min(MOST_WORKERS, len(self.job))
        allowed = f"a worker's number, its rank, from 0 to {most - 1}"
        if self.cluster is None or not places.is_name(entry.shown_raw if entry.is_scalar else ""):
            return [entry.integer(allowed, 0, most - 1)]
        if self.job is None:
            jobs = ", ".join(self.cluster.job)
            cure = f"choose one with `job:` from {jobs}" if jobs else "give the cluster file a job, or write ranks"
            raise entry.wrong(f"must be {allowed}; a host's name stands for ranks of a job: {cure}")
        host = entry.name_of()
        found = [rank for rank, at in enumerate(self.job[:most]) if at == host]
        if not found:
            raise entry.wrong(
                f"the job has no worker on a host {host}: {places.nearest(host, dict.fromkeys(self.job))}"
            )
        return found

    def _found(
        self, entry: Entry, kind: str, known: Mapping[str, AggregatorOfCluster] | Mapping[str, ServerOfCluster]
    ) -> str:
        assert self.cluster is not None
        name = entry.name_of()
        if name not in known:
            raise entry.wrong(f"the cluster has no {kind} {name}: {places.nearest(name, known)}")
        address = self.cluster.address(known[name])
        if address is None:
            raise entry.wrong(
                f"{kind} {name} has no address in the cluster file: give {known[name].at} an `address:` there"
            )
        return address


def _read_names(fields: dict[str, Entry], folder: str) -> _Names:
    entry = fields["cluster"]
    path = entry.text("the path of a cluster file")
    cluster = file.load(os.path.join(folder, path), f"{entry.place}: cluster: {path}")
    if "job" in fields:
        name = fields["job"].name_of()
        if name not in cluster.job:
            raise fields["job"].wrong(f"the cluster has no job {name}: {places.nearest(name, cluster.job)}")
        return _Names(cluster, cluster.job[name].workers)
    return _Names(cluster, cluster.jobs[0].workers if len(cluster.jobs) == 1 else None)


def _server(entry: Entry, names: _Names) -> Server:
    of_names = () if names.cluster is None else ("routes",)
    fields = entry.mapping(required=(names.server_key,), optional=("fraction", "tree", *of_names))
    fraction = 1.0
    if "fraction" in fields:
        fraction = float(
            fields["fraction"].number("a number above 0, at most 1", lambda value: MIN_FRACTION <= value <= 1)
        )
    seen: set[int | str] = set()
    tree = tuple(_aggregator(child, seen, names) for child in fields["tree"].sequence()) if "tree" in fields else ()
    server = Server(names.server(fields[names.server_key]), fraction, tree)
    if "routes" in fields:
        server = replace(server, routes=_routes(fields["routes"], server, names))
    if any(one.switch is not None for one in server.aggregators):
        for address in (server.address, *(one.address for one in server.aggregators)):
            if address.startswith("["):
                raise entry.wrong(
                    f"{address}: a switch reads IPv4 only, so its server and all aggregators need such an address"
                )
    return server


def _routes(entry: Entry, server: Server, names: _Names) -> tuple[tuple[int | str, tuple[str, ...]], ...]:
    """The links of each way that a deployment names."""
    cluster = names.cluster
    assert cluster is not None
    at = {cluster.address(each): each.at for each in cluster.aggregators}
    at |= {cluster.address(each): each.at for each in cluster.servers}
    if names.job is None and not cluster.jobs:
        raise entry.wrong("needs a job in the cluster file, whose ranks take the routes")
    if names.job is None:
        raise entry.wrong(f"choose with `job:` from {', '.join(cluster.job)} whose ranks take the routes")
    nodes: tuple[Server | Aggregator, ...] = (server, *server.aggregators)
    parents = {one.address: above for above in nodes for one in _aggregators_below(above)}
    found: dict[int | str, tuple[str, ...]] = {}
    for each in entry.sequence("- {workers: [h0], through: [leaf0, spine1]}"):
        fields = each.mapping(required=("through",), optional=("workers", "aggregators"))
        allowed = "the name of a switch or a link"
        through = [name.text(allowed) for name in fields["through"].sequence("- leaf0")]
        children: list[tuple[int | str, Entry, str, str]] = []
        for one in fields["workers"].sequence("- h0") if "workers" in fields else ():
            for rank in names.workers(one):
                children.append((rank, one, names.job[rank], server.parent(rank) or server.address))
        for one in fields["aggregators"].sequence("- a0") if "aggregators" in fields else ():
            address = names.aggregator(one)
            if address not in parents:
                raise one.wrong("is not in the tree of this server")
            children.append((address, one, at[address], parents[address].address))
        if not children:
            raise each.wrong("needs `workers: [...]` or `aggregators: [...]`, whose way it is")
        for child, one, start, above in children:
            if child in found:
                raise one.wrong("has a route already for this server")
            try:
                found[child] = routes.through(cluster, start, at[above], through)
            except LookupError as error:
                raise fields["through"].wrong(f"is no way from {start} to {at[above]}: {error}") from None
    return tuple(found.items())


def _aggregators_below(above: Server | Aggregator) -> tuple[Aggregator, ...]:
    if isinstance(above, Server):
        return above.tree
    return tuple(child for child in above.children if not isinstance(child, int))


def _aggregator(entry: Entry, seen: set[int | str], names: _Names) -> Aggregator:
    fields = entry.mapping(required=("aggregator",), optional=("workers", "children", "switch"))
    children: list[Child] = []
    if "workers" in fields:
        for worker in fields["workers"].sequence():
            for number in names.workers(worker):
                if number in seen:
                    raise worker.wrong(f"worker {number} stands twice in the tree of this server")
                seen.add(number)
                children.append(number)
    if "children" in fields:
        children += [_aggregator(child, seen, names) for child in fields["children"].sequence()]
    if len(children) > MOST_CHILDREN:
        raise entry.wrong(
            f"an aggregator has at most {MOST_CHILDREN} children, here are {len(children)}: put aggregators below it"
        )
    if not children:
        raise entry.wrong("an aggregator needs `workers: [...]`, or aggregators as `children:`, or both")
    switch = None
    if "switch" in fields:
        words = fields["switch"].sequence()
        switch = tuple(word.text("a word of the command that opens jobs on the switch") for word in words)
        if len(children) > SWITCH_CHILDREN:
            raise entry.wrong(
                f"a switch has at most {SWITCH_CHILDREN} children, here are {len(children)}: put aggregators below it"
            )
    address = names.aggregator(fields["aggregator"])
    if address in seen:
        raise fields["aggregator"].wrong(f"aggregator {address} stands twice in the tree of this server")
    seen.add(address)
    return Aggregator(address, tuple(children), switch)


def _address(entry: Entry) -> str:
    """The address in the form of the engine and the daemons, so that equal addresses are equal texts."""
    value = str(entry.node.value) if entry.is_scalar else ""
    host, _, port = value.rpartition(":")
    try:
        six = host.startswith("[") and host.endswith("]")
        ip: Any = ipaddress.IPv6Address(host[1:-1]) if six else ipaddress.IPv4Address(host)
        if not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
            raise ValueError
    except ValueError:
        raise entry.wrong(f"must be IP:PORT, such as 10.77.2.1:7471 or [fd00::1]:7471, not {entry.shown}") from None
    # A link-local address needs an interface, which differs from rank to rank.
    if ip.is_unspecified or ip.is_multicast or (six and (ip.is_link_local or ip.scope_id)):
        raise entry.wrong(f"not all ranks can reach one daemon at {entry.shown}: give an address of its host's")
    return f"[{ip}]:{int(port)}" if six else f"{ip}:{int(port)}"


def _workers(child: Child) -> tuple[int, ...]:
    return (child,) if isinstance(child, int) else child.workers


def _block_bytes(entry: Entry) -> int | None:
    if entry.is_scalar and entry.shown_raw == "auto":
        return None
    allowed = f"auto, or a multiple of 64 up to {MOST_BLOCK_BYTES}"
    value = entry.number(
        allowed, lambda value: isinstance(value, int) and 64 <= value <= MOST_BLOCK_BYTES and value % 64 == 0
    )
    return int(value)


def _is_window(value: Any) -> bool:
    return isinstance(value, int) and 2 <= value <= 65536 and value & (value - 1) == 0


FORMATS = ("int32", "int16", "float32")
# As in crates/penstock-aggregation/src/tree.rs.
MOST_WORKERS = 4096
MOST_CHILDREN = 64
# The longest block of a packet: docs/reference/packets.md.
MOST_BLOCK_BYTES = 8896
# The limits of p4/penstock.p4: docs/design/p4.md.
SWITCH_BLOCK_BYTES = (64, 256, 1024)
SWITCH_CHILDREN = 16
SWITCH_WORKERS = 64
SWITCH_SLOTS = 4096
# Weights are counted in millionths.
MIN_FRACTION = 1e-6
# The files of version 1 that a warning has named.
_warned: set[str] = set()
# `init`'s: text and name.
_given: tuple[str, str] | None = None
