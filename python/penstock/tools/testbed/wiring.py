"""How a testbed makes a cluster: a tree of bridges, or switches that route, with a namespace for each host. Nothing here touches
the system."""

from __future__ import annotations

import dataclasses
import functools
import ipaddress
import re

from penstock.cluster.network import Cluster, Link
from penstock.tools.testbed.link import LinkSpec

__all__ = ["Wiring"]


class Wiring:
    """The nodes, switches and links of a testbed, from a cluster that it can make.

    A node is a host of the cluster; those without an aggregator or a server, or with workers of a job, are called the testbed's
    hosts, and come first. Of each link the end towards the last switch of the cluster is the upper one.

    Args:
        offloads: as for `LinkSpec`: None means yes, unless some link loses packets.

    Raises:
        penstock.errors.Config: the testbed cannot make such a cluster; the error has the place in the cluster's file.
    """

    def __init__(self, cluster: Cluster, *, offloads: bool | None = None) -> None:
        self.cluster = cluster
        self.offloads_asked = offloads
        self.offloads = not any(link.loss for link in cluster.links) if offloads is None else offloads
        working = {worker for job in cluster.jobs for worker in job.workers}
        serving = {each.at for each in cluster.aggregators} | {each.at for each in cluster.servers}
        serving -= working
        hosts = [host.name for host in cluster.hosts if host.name not in serving] or [
            host.name for host in cluster.hosts
        ]
        self.hosts = len(hosts)
        self.nodes = hosts + [host.name for host in cluster.hosts if host.name not in hosts]
        """Hosts, and then the places of aggregators and servers: the order of their numbers."""
        self.switches = [switch.name for switch in cluster.switches]
        """The last one is the root of the tree."""
        _check_shape(cluster)
        self.is_routed = False
        """Whether several ways lead from a node to another, so that switches route; in a tree they are bridges."""
        self.lower = self._lower_ends()
        """Each link's lower end."""
        self.links = {
            link.name: next(end.node for end in link.ends if end.node != self.lower[link.name])
            for link in cluster.links
        }
        """Each link's upper end, which is a switch."""
        self._above: dict[str, list[tuple[str, str]]] = {}
        """By lower end: the links and the switches above it, one in a tree."""
        for name, lower in self.lower.items():
            self._above.setdefault(lower, []).append((name, self.links[name]))
        self._specs = {link.name: self._spec(number, link) for number, link in enumerate(cluster.links)}
        self.node_delay_ms = self._delay_of_nodes()
        """The delay of a node's link."""
        self._addresses = {family: self._addressed(family) for family in (4, 6)}

    def number(self, node: int | str) -> int:
        """A node's place in `nodes`. Raises: ValueError, when there is none of that name."""
        if isinstance(node, int):
            if not 0 <= node < self.hosts:
                raise ValueError(f"host {node}: there are hosts 0 to {self.hosts - 1}")
            return node
        if node not in self.nodes:
            raise ValueError(f"there is no node {node}, but {', '.join(self.nodes)}")
        return self.nodes.index(node)

    def link_name(self, name: int | str) -> str:
        """The link of that name, or else the only one below which that host or switch is. Raises: ValueError."""
        if isinstance(name, int):
            name = self.nodes[self.number(name)]
        elif name in self.links:
            return name
        if len(self._above.get(name, ())) == 1:
            return self._above[name][0][0]
        raise ValueError(f"there is no link {name}, but {', '.join(self.links)}")

    def address(self, node: int | str, family: int = 4) -> str:
        """The main address of a node, IPv4 or (``family=6``) IPv6."""
        return self._addresses[family][self.number(node)]

    def prefix(self, family: int = 4) -> int:
        """Bits of their addresses that all nodes share, so that they are in one subnet; where switches route, each is in its
        own."""
        return (32 if family == 4 else 128) if self.is_routed else _prefix(self._addresses[family])

    def mac(self, node: int | str) -> str:
        return f"02:00:00:00:00:{self.number(node) + 1:02x}"

    def spec(self, link: str) -> LinkSpec:
        """The properties of a link; its delay is that from one end to the other."""
        return self._specs[link]

    def port_mac(self, link: str, switch: str) -> str:
        """The hardware address of the port of a switch that routes."""
        number, is_upper = list(self.links).index(link), self.links[link] == switch
        return f"02:00:00:{1 + is_upper:02x}:{number >> 8:02x}:{number & 255:02x}"

    def lower_port(self, link: str) -> str:
        """The device of a link's lower end, at a switch."""
        return self.port(link) if self.is_routed else UPLINK

    def port(self, link: str) -> str:
        """The device of a link's upper end: its name, where the kernel takes it."""
        if re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{0,14}", link) and link not in ("lo", "switch", UPLINK):
            return link
        return f"port.{list(self.links).index(link)}"

    def port_towards(self, switch: str, node: str) -> str:
        """The device of ``switch`` that leads to ``node``."""
        at = node
        while at in self._above:
            [(link, upper)] = self._above[at]
            if upper == switch:
                return self.port(link)
            at = upper
        return UPLINK

    def is_limited(self, link: str) -> bool:
        """Whether a switch limits what it sends to a node. With two nodes that are alike, what one receives the other's link has
        limited already, and a second queue would cost a timer for each packet."""
        specs = [self._specs[name] for name in self.links]
        alike = len(specs) == 2 and len(self.switches) == 1 and specs[0].rate_mbit == specs[1].rate_mbit
        return not alike or self._specs[link].queue_bytes is not None

    @functools.cached_property
    def common(self) -> LinkSpec | None:
        """What lies between two hosts on one switch, where all hosts' links are alike: with the delay and the loss of both."""
        specs = [self._specs[self.link_name(host)] for host in range(self.hosts)]
        if specs.count(specs[0]) < len(specs):
            return None
        # What is lost anywhere switches offloads off everywhere.
        off = self.offloads_asked is None and not self.offloads and not specs[0].loss
        return _both(specs[0], False if off else self.offloads_asked)

    def _lower_ends(self) -> dict[str, str]:
        """Walks the network from its root. Notes whether a link closes a circle: then the end that is further from hosts is the
        upper one, and of equals the second."""
        root = self.switches[-1]
        found: dict[str, str] = {}
        waiting, reached = [root], {root}
        while waiting:
            upper = waiting.pop(0)
            for link in self.cluster.links_of[upper]:
                if link.name in found:
                    continue
                lower = next(end.node for end in link.ends if end.node != upper)
                self.is_routed |= lower in reached
                found[link.name] = lower
                if lower in self.cluster.switch and lower not in reached:
                    waiting.append(lower)
                reached.add(lower)
        if self.is_routed:
            away = self._away_from_hosts()
            found = {
                link.name: min((end.node for end in link.ends), key=away.__getitem__) for link in self.cluster.links
            }
        return {link.name: found[link.name] for link in self.cluster.links}

    def _away_from_hosts(self) -> dict[str, int]:
        """By node: how many links away the next host is."""
        found = dict.fromkeys(self.nodes, 0)
        waiting = list(found)
        for node in waiting:
            for link in self.cluster.links_of[node]:
                for end in link.ends:
                    if end.node not in found:
                        found[end.node] = found[node] + 1
                        waiting.append(end.node)
        return found

    def _spec(self, number: int, link: Link) -> LinkSpec:
        wrong = functools.partial(self.cluster.wrong, f"links[{number}]")
        if link.flow_caps_bit_s and self.lower[link.name] in self.cluster.switch:
            raise wrong("the testbed caps flows where hosts send: leave `flow_cap` out between switches")
        first = self.cluster.links[0]
        if link.mtu != first.mtu:
            raise wrong(
                f"its MTU is {link.mtu}, and that of link {first.name} {first.mtu}: in one subnet all have the same"
            )
        caps = tuple(cap / 1e6 for cap in link.flow_caps_bit_s)
        try:
            spec = LinkSpec(
                rate_mbit=None if link.rate_bit_s is None else link.rate_bit_s / 1e6,
                flow_mbit=caps if len(caps) > 1 else caps[0] if caps else None,
                loss=link.loss,
                delay_ms=link.delay_ns / 1e6,
                mtu=link.mtu,
                offloads=self.offloads,
                queue_bytes=link.queue_bytes,
            )
            _both(spec, self.offloads)
            return spec
        except ValueError as error:
            raise wrong(f"the testbed cannot make it: {error}") from None

    def _delay_of_nodes(self) -> float:
        numbers = {link.name: number for number, link in enumerate(self.cluster.links)}
        names = [self.link_name(node) for node in self.nodes]
        for name in names:
            if self._specs[name].delay_ms != self._specs[names[0]].delay_ms:
                raise self.cluster.wrong(
                    f"links[{numbers[name]}].delay",
                    f"differs from that of link {names[0]}: the testbed delays packets at the last switch, so all hosts' links "
                    "have the same delay there; those between switches may have others",
                )
        return self._specs[names[0]].delay_ms

    def _addressed(self, family: int) -> list[str]:
        """Each node's first address of a family, or addresses for all where the file has none."""
        given = {
            host.name: [ip for ip in map(ipaddress.ip_address, host.addresses) if ip.version == family]
            for host in self.cluster.hosts
        }
        if not any(given.values()):
            return [
                f"10.77.0.{number + 1}" if family == 4 else f"fd77::{number + 1:x}" for number in range(len(self.nodes))
            ]
        for host, addresses in given.items():
            path = f"hosts.{host}"
            if not addresses:
                other = next(name for name, there in given.items() if there)
                raise self.cluster.wrong(
                    path, f"has no IPv{family} address, and {other} has one: give one to all hosts, or to none"
                )
            if addresses[0].is_loopback:
                raise self.cluster.wrong(
                    path, f"the address {addresses[0]} is its own on every host: the testbed needs others"
                )
        found = [str(given[node][0]) for node in self.nodes]
        if not self.is_routed and _prefix(found) < LEAST_PREFIX:
            raise self.cluster.wrong(
                "hosts",
                f"the IPv{family} addresses are in no common subnet: the testbed is one; leave them out, or give others",
            )
        return found


def _both(spec: LinkSpec, offloads: bool | None) -> LinkSpec:
    """Two links of a kind, one after the other."""
    loss = round(1 - (1 - spec.loss) ** 2, 9)
    return dataclasses.replace(spec, delay_ms=2 * spec.delay_ms, loss=loss, offloads=offloads)


def _check_shape(cluster: Cluster) -> None:
    if not cluster.switches or not cluster.links:
        raise cluster.wrong("hosts", "the testbed joins hosts by switches: describe them in `switches:` and `links:`")
    if len(cluster.hosts) > MOST_NODES:
        raise cluster.wrong("hosts", f"there are {len(cluster.hosts)}: the testbed makes up to {MOST_NODES}")
    for host in cluster.hosts:
        if len(host.nics) > 1 or len(cluster.links_of[host.name]) > 1:
            raise cluster.wrong(f"hosts.{host.name}", "has several NICs: the testbed gives a host one")
    for number, link in enumerate(cluster.links):
        if all(end.node in cluster.host for end in link.ends):
            raise cluster.wrong(f"links[{number}]", "joins two hosts: the testbed needs a switch between them")


def _prefix(addresses: list[str]) -> int:
    """Of the smallest subnet with these addresses, none of them its first or last one, which have another meaning."""
    parsed = [ipaddress.ip_address(address) for address in addresses]
    bits = parsed[0].max_prefixlen
    for prefix in range(LARGEST_PREFIX[parsed[0].version], 0, -1):
        shift = bits - prefix
        numbers = [int(each) for each in parsed]
        if len({number >> shift for number in numbers}) == 1:
            rest = {number & ((1 << shift) - 1) for number in numbers}
            if 0 not in rest and (1 << shift) - 1 not in rest:
                return prefix
    return 0


UPLINK = "uplink"
"""The device of a switch that leads to the one above it."""

MOST_NODES = 254
"""A hardware address has a byte for the node, which the relay reads."""

LARGEST_PREFIX = {4: 24, 6: 64}
LEAST_PREFIX = 8
