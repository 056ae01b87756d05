"""A cluster as a value: hosts, switches, links, and what runs where. docs/reference/cluster-file.md is its file.

Values are whole numbers of small units, so that a cluster that is written to a file and read again is equal. `Cluster` checks
itself when it is made, whether a file, a generator or a program makes it.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.addresses import joined
from penstock.cluster.places import nearest
from penstock.errors import Config as ConfigError

__all__ = ["Aggregator", "Cluster", "End", "Host", "Job", "Link", "Nic", "Server", "Switch"]


@dataclass(frozen=True, kw_only=True)
class Nic:
    """A network interface of a host."""

    name: str = "eth0"
    addresses: tuple[str, ...] = ()
    """IPv4 and IPv6 addresses, the main one first."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """A machine with memory and processors, which forwards nothing."""

    name: str
    nics: tuple[Nic, ...] = (Nic(),)

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(address for nic in self.nics for address in nic.addresses)


@dataclass(frozen=True, kw_only=True)
class Switch:
    """What forwards between links."""

    name: str


@dataclass(frozen=True)
class End:
    """An end of a link: a switch, or a host's NIC. Without ``nic`` it is the only one of the host."""

    node: str
    nic: str | None = None

    def __str__(self) -> str:
        return self.node if self.nic is None else f"{self.node}:{self.nic}"


@dataclass(frozen=True, kw_only=True)
class Link:
    """A cable. What it says holds in each direction."""

    name: str
    ends: tuple[End, End]
    rate_bit_s: int | None = None
    """Bits of Ethernet frames a second; None: no limit."""
    delay_ns: int = 0
    """The time from one end to the other."""
    queue_bytes: int | None = None
    """What waits at a switch's port in front of it; more is lost. None: the user of the cluster decides."""
    flow_caps_bit_s: tuple[int, ...] = ()
    """The most that one flow gets; several are dealt to flows by turns."""
    loss: float = 0.0
    """The share of packets that it loses, 0 <= loss < 1."""
    mtu: int = 1500
    """The largest IP packet in bytes."""
    background_bit_s: int = 0
    """What others send over it."""


@dataclass(frozen=True, kw_only=True)
class Aggregator:
    """What adds gradients on their way: a daemon on a host, or a switch."""

    name: str
    at: str
    """The host or the switch."""
    port: int = 7471
    address: str | None = None
    """Of a switch, or one of several of a host; None: the host's main address."""
    capacity_bit_s: int | None = None
    """What it can take in."""
    used_bit_s: int = 0
    """What others send to it."""


@dataclass(frozen=True, kw_only=True)
class Server:
    """What commits sums and returns them: a daemon on a host."""

    name: str
    at: str
    port: int = 7471
    address: str | None = None
    ingress_bit_s: int | None = None
    """What it can take in; None: what its link carries."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training job."""

    name: str
    workers: tuple[str, ...]
    """The host of each rank, by rank."""
    gradient_bytes: int | None = None
    """What each worker sends in a step."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A cluster, checked.

    Names are unique: of hosts and switches together, and of links, aggregators, servers and jobs each. With links, all hosts and
    switches are connected. Without any, nothing is known of the network.

    Raises:
        penstock.errors.Config: it contradicts itself; the error has the place in the file, if it is from one.
    """

    hosts: tuple[Host, ...]
    switches: tuple[Switch, ...] = ()
    links: tuple[Link, ...] = ()
    aggregators: tuple[Aggregator, ...] = ()
    servers: tuple[Server, ...] = ()
    jobs: tuple[Job, ...] = ()
    places: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    """Where paths such as ``links[3].rate`` are in the file, as ``file:line:column``."""

    def __post_init__(self) -> None:
        for path, what in _contradictions(self):
            raise self.wrong(path, what)

    def wrong(self, path: str, what: str) -> ConfigError:
        """The error to raise for a part of the cluster, with its place."""
        found = path
        while found and found not in self.places:
            found = found[: max(found.rfind("."), found.rfind("["), 0)]
        place = self.places.get(found)
        return ConfigError(f"{place}: {path}: {what}" if place else f"{path}: {what}")

    @functools.cached_property
    def host(self) -> dict[str, Host]:
        """Hosts by name."""
        return _by_name(self.hosts)

    @functools.cached_property
    def switch(self) -> dict[str, Switch]:
        """Switches by name."""
        return _by_name(self.switches)

    @functools.cached_property
    def link(self) -> dict[str, Link]:
        """Links by name."""
        return _by_name(self.links)

    @functools.cached_property
    def aggregator(self) -> dict[str, Aggregator]:
        """Aggregators by name."""
        return _by_name(self.aggregators)

    @functools.cached_property
    def server(self) -> dict[str, Server]:
        """Servers by name."""
        return _by_name(self.servers)

    @functools.cached_property
    def job(self) -> dict[str, Job]:
        """Jobs by name."""
        return _by_name(self.jobs)

    @functools.cached_property
    def links_of(self) -> dict[str, tuple[Link, ...]]:
        """The links at each host and switch."""
        found: dict[str, list[Link]] = {name: [] for name in (*self.host, *self.switch)}
        for link in self.links:
            for end in link.ends:
                found[end.node].append(link)
        return {name: tuple(links) for name, links in found.items()}

    def address(self, daemon: Aggregator | Server) -> str | None:
        """The address on which a daemon listens, "IP:PORT"; None if the cluster does not say it."""
        main = self.host[daemon.at].addresses[:1] if daemon.at in self.host else ()
        ip = daemon.address or (main[0] if main else None)
        return None if ip is None else joined(ip, daemon.port)

    def path(self, start: str, end: str) -> tuple[Link, ...]:
        """The links from a node to another, as few as possible; among equals, those that stand first in the file.

        Hosts forward nothing, so only switches are between. Raises: LookupError, if there is no way.
        """
        back: dict[str, tuple[str, Link]] = {}
        waiting = collections.deque([start])
        while waiting and end not in back and start != end:
            node = waiting.popleft()
            if node != start and node in self.host:
                continue
            for link in self.links_of[node]:
                other = _other(link, node)
                if other != start and other not in back:
                    back[other] = node, link
                    waiting.append(other)
        found: list[Link] = []
        at = end
        while at != start:
            if at not in back:
                raise LookupError(f"there is no way from {start} to {end}")
            at, link = back[at]
            found.append(link)
        return tuple(reversed(found))

    def with_link(self, name: str, **changes: object) -> Cluster:
        """This cluster with another rate, loss or such of one link. Raises: LookupError, which names the links."""
        if name not in self.link:
            raise LookupError(f"there is no link {name}: {nearest(name, self.link)}")
        links = tuple(
            dataclasses.replace(link, **changes) if link.name == name else link  # type: ignore[arg-type]
            for link in self.links
        )
        return dataclasses.replace(self, links=links)


Named = TypeVar("Named", Host, Switch, Link, Aggregator, Server, Job)


def _by_name(values: tuple[Named, ...]) -> dict[str, Named]:
    return {value.name: value for value in values}


def _other(link: Link, node: str) -> str:
    return link.ends[1].node if link.ends[0].node == node else link.ends[0].node


def _contradictions(cluster: Cluster) -> Iterator[tuple[str, str]]:
    """What is wrong with a cluster, as (path, what); the first one decides."""
    yield from _nodes(cluster)
    yield from _ends(cluster)
    for number, link in enumerate(cluster.links):
        yield from _link(f"links[{number}]", link)
    yield from _pieces(cluster)
    for kind, daemons in (("aggregators", cluster.aggregators), ("servers", cluster.servers)):
        yield from _daemons(cluster, kind, daemons)
    for aggregator in cluster.aggregators:
        path = f"aggregators.{aggregator.name}"
        if aggregator.capacity_bit_s is not None:
            if aggregator.capacity_bit_s <= 0:
                yield f"{path}.capacity", "must be above 0; leave it out where nothing is known"
            if aggregator.used_bit_s >= aggregator.capacity_bit_s:
                yield f"{path}.used", "must be below `capacity`: others leave nothing of it"
    for server in cluster.servers:
        if server.ingress_bit_s is not None and server.ingress_bit_s <= 0:
            yield f"servers.{server.name}.ingress", "must be above 0; leave it out where its link decides"
    for job in cluster.jobs:
        yield from _job(cluster, job)


def _nodes(cluster: Cluster) -> Iterator[tuple[str, str]]:
    if not cluster.hosts:
        yield "hosts", "there is none"
    sections: list[tuple[str, Sequence[Any]]] = [
        ("hosts", cluster.hosts),
        ("switches", cluster.switches),
        ("links", cluster.links),
        ("aggregators", cluster.aggregators),
        ("servers", cluster.servers),
        ("jobs", cluster.jobs),
    ]
    for kind, values in sections:
        counted = collections.Counter(value.name for value in values)
        for number, value in enumerate(values):
            if counted[value.name] > 1:
                if kind == "links":
                    yield f"links[{number}]", f"two links are called {value.name}: give each a `name:` of its own"
                yield f"{kind}.{value.name}", f"two of them are called {value.name}"
    for switch in cluster.switches:
        if switch.name in cluster.host:
            yield f"switches.{switch.name}", f"there is a host {switch.name} too: links could mean either"
    owners: dict[str, str] = {}
    for host in cluster.hosts:
        path = f"hosts.{host.name}"
        names = [nic.name for nic in host.nics]
        if len(set(names)) != len(names):
            yield f"{path}.nics", "two NICs have one name"
        for address in host.addresses:
            wrong = _is_no_address(address)
            if wrong:
                yield path, f"the address {address} {wrong}"
            if address in owners:
                yield path, f"the address {address} is also that of {owners[address]}"
            owners[address] = host.name


def _is_no_address(text: str) -> str | None:
    try:
        ip = ipaddress.ip_address(text)
    except ValueError:
        return "is neither IPv4 nor IPv6: give one such as 10.77.0.1 or fd77::1"
    if ip.is_unspecified or ip.is_multicast or (ip.version == 6 and ip.is_link_local):
        return "cannot be reached from all hosts: give one of the host's own, and no link-local one"
    return None


def _ends(cluster: Cluster) -> Iterator[tuple[str, str]]:
    used: dict[tuple[str, str], str] = {}
    for number, link in enumerate(cluster.links):
        for place, end in enumerate(link.ends):
            path = f"links[{number}].between[{place}]"
            if end.node in cluster.switch:
                if end.nic is not None:
                    yield path, f"{end.node} is a switch: leave `:{end.nic}` out"
                continue
            if end.node not in cluster.host:
                yield (
                    path,
                    f"there is no host or switch {end.node}: {nearest(end.node, (*cluster.host, *cluster.switch))}",
                )
                return
            nics = [nic.name for nic in cluster.host[end.node].nics]
            if end.nic is None and len(nics) != 1:
                yield path, f"host {end.node} has the NICs {', '.join(nics)}: say which, such as {end.node}:{nics[0]}"
            nic = end.nic or nics[0]
            if nic not in nics:
                yield path, f"host {end.node} has no NIC {nic}: {nearest(nic, nics)}"
            if (end.node, nic) in used:
                yield (
                    path,
                    f"the NIC {nic} of host {end.node} is at link {used[end.node, nic]} already: give the host another NIC",
                )
            used[end.node, nic] = link.name
        if link.ends[0].node == link.ends[1].node:
            yield f"links[{number}].between", f"both ends are {link.ends[0].node}"


def _link(path: str, link: Link) -> Iterator[tuple[str, str]]:
    if link.rate_bit_s is not None and link.rate_bit_s <= 0:
        yield f"{path}.rate", "must be above 0; `unlimited`, or no `rate:` at all, is a link without a limit"
    if link.queue_bytes is not None and link.queue_bytes <= 0:
        yield f"{path}.queue", "must be above 0; leave it out for a queue of the usual length"
    if link.delay_ns < 0:
        yield f"{path}.delay", "must be 0 or more"
    if not 0 <= link.loss < 1:
        yield f"{path}.loss", "must be below 100 %"
    if not LEAST_MTU <= link.mtu <= MOST_MTU:
        yield f"{path}.mtu", f"must be {LEAST_MTU} to {MOST_MTU}"
    for cap in link.flow_caps_bit_s:
        if cap <= 0:
            yield f"{path}.flow_cap", "must be above 0; leave it out where a flow gets what it can"
        if link.rate_bit_s is not None and cap > link.rate_bit_s:
            yield f"{path}.flow_cap", "must not be above the `rate` of the link"
    if link.background_bit_s:
        if link.rate_bit_s is None:
            yield f"{path}.background", "needs a `rate:` of which it is a part"
        elif not 0 <= link.background_bit_s < link.rate_bit_s:
            yield f"{path}.background", "must be below the `rate` of the link: it leaves nothing of it"


def _pieces(cluster: Cluster) -> Iterator[tuple[str, str]]:
    """Whether the network is in one piece. Hosts forward nothing."""
    if not cluster.links:
        return
    for name, links in cluster.links_of.items():
        if not links:
            kind = "hosts" if name in cluster.host else "switches"
            yield f"{kind}.{name}", "is at no link: add one to `links:`"
    start = cluster.switches[0].name if cluster.switches else cluster.hosts[0].name
    reached, waiting = {start}, [start]
    while waiting:
        node = waiting.pop()
        if node in cluster.host and node != start:
            continue
        for link in cluster.links_of[node]:
            other = _other(link, node)
            if other not in reached:
                reached.add(other)
                waiting.append(other)
    for name in (*cluster.host, *cluster.switch):
        if name not in reached:
            kind = "hosts" if name in cluster.host else "switches"
            yield f"{kind}.{name}", f"no way leads to it from {start}: add a link, hosts forward nothing"


def _daemons(
    cluster: Cluster, kind: str, daemons: tuple[Aggregator, ...] | tuple[Server, ...]
) -> Iterator[tuple[str, str]]:
    for daemon in daemons:
        path = f"{kind}.{daemon.name}"
        if kind == "aggregators" and daemon.at in cluster.switch:
            if daemon.address is not None and _is_no_address(daemon.address):
                yield f"{path}.address", f"the address {daemon.address} {_is_no_address(daemon.address)}"
            continue
        if daemon.at not in cluster.host:
            if daemon.at in cluster.switch:
                yield f"{path}.at", f"{daemon.at} is a switch: a server runs on a host"
            may = (*cluster.host, *(cluster.switch if kind == "aggregators" else ()))
            what = "host or switch" if kind == "aggregators" else "host"
            yield f"{path}.at", f"there is no {what} {daemon.at}: {nearest(daemon.at, may)}"
            return
        own = cluster.host[daemon.at].addresses
        if daemon.address is not None and daemon.address not in own:
            yield f"{path}.address", f"host {daemon.at} has {', '.join(own) or 'no address'}, and not {daemon.address}"
    # A server and an aggregator may not share a port either.
    listening: dict[str, str] = {}
    for other, values in (("aggregators", cluster.aggregators), ("servers", cluster.servers)):
        for daemon in values:
            there = cluster.address(daemon) or f"{daemon.at}:{daemon.port}"
            if there in listening:
                yield (
                    f"{other}.{daemon.name}",
                    f"{listening[there]} has the same address, {there}: give one another `port:`",
                )
            listening[there] = daemon.name
        if other == kind:
            return


def _job(cluster: Cluster, job: Job) -> Iterator[tuple[str, str]]:
    path = f"jobs.{job.name}"
    if not job.workers:
        yield f"{path}.workers", "there is none"
    for number, worker in enumerate(job.workers):
        if worker in cluster.switch:
            yield f"{path}.workers[{number}]", f"{worker} is a switch: a worker runs on a host"
        if worker not in cluster.host:
            yield f"{path}.workers[{number}]", f"there is no host {worker}: {nearest(worker, cluster.host)}"
    if job.gradient_bytes is not None and job.gradient_bytes <= 0:
        yield f"{path}.gradient", "must be above 0"


LEAST_MTU, MOST_MTU = 1280, 65_000
"""What IPv6 takes at least; the longest packet of IPv4, but for some headers."""
