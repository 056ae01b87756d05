"""How switches route, where several ways lead through a testbed: tables, and rules for single flows. Pure.

A switch has a table a port, and its main table leads to each node the shortest way, of several the first in the cluster's file.
What a flow's packets are marked with chooses another port's table.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock.addresses import split
from penstock.cluster.network import Cluster, Job
from penstock.cluster.routes import walk
from penstock.planning.scheme import Scheme
from penstock.tools.testbed.wiring import Wiring

__all__ = ["Flow", "ambiguous", "family_lines", "flow_rules", "flows_of", "host_lines"]


@dataclass(frozen=True)
class Flow:
    """Datagrams between two nodes, in both directions, and the way that they take."""

    start: str
    """An IP address."""
    end: str
    links: tuple[str, ...]
    """From the start to the end; the other direction crosses them backwards."""
    nodes: tuple[str, ...]
    """The node in front of each link, and the end."""
    start_port: int | None = None
    end_port: int | None = None
    """With a port, only what leaves it or is for it. Of the two at most one is given."""


def host_lines(wiring: Wiring, node: str, device: str, family: int) -> list[str]:
    """``ip -batch`` lines of a host: all goes to its switch."""
    gateway, link = GATEWAYS[family], wiring.link_name(node)
    return [
        f"neigh add {gateway} lladdr {wiring.port_mac(link, wiring.links[link])} nud permanent dev {device}",
        f"route add default via {gateway} dev {device} onlink",
    ]


def family_lines(wiring: Wiring, switch: str, family: int) -> list[str]:
    """``ip -batch`` lines of a switch: its ports' neighbours and tables, and the shortest way to each node."""
    gateway, lines = GATEWAYS[family], []
    for number, link in enumerate(wiring.cluster.links_of[switch], start=1):
        device, other = wiring.port(link.name), next(end.node for end in link.ends if end.node != switch)
        mac = wiring.mac(other) if other in wiring.nodes else wiring.port_mac(link.name, other)
        lines += [
            f"neigh add {gateway} lladdr {mac} nud permanent dev {device}",
            f"route add default via {gateway} dev {device} onlink table {FIRST_TABLE + number}",
            f"rule add fwmark {number} lookup {FIRST_TABLE + number}",
        ]
    for node in wiring.nodes:
        device = wiring.port(wiring.cluster.path(switch, node)[0].name)
        lines.append(f"route add {wiring.address(node, family)} via {gateway} dev {device} onlink")
    return lines


def flow_rules(wiring: Wiring, switch: str, flows: Iterable[Flow]) -> str:
    """The ``nft`` rules of a switch, in place of those before: which port each flow's packets leave by."""
    ports = {link.name: number for number, link in enumerate(wiring.cluster.links_of[switch], start=1)}
    marks: dict[tuple[int, str], dict[str, int]] = {(family, kind): {} for family in GATEWAYS for kind in _KEYS}
    for flow in flows:
        if switch not in flow.nodes:
            continue
        at = flow.nodes.index(switch)
        family = ipaddress.ip_address(flow.start).version
        # The next link, and the link before it for the way back. Ends are hosts.
        for source, port, target, other, link in (
            (flow.start, flow.start_port, flow.end, flow.end_port, flow.links[at]),
            (flow.end, flow.end_port, flow.start, flow.start_port, flow.links[at - 1]),
        ):
            if port is not None:
                marks[family, "leaves"][f"{source} . {port} . {target}"] = ports[link]
            elif other is not None:
                marks[family, "is for"][f"{source} . {target} . {other}"] = ports[link]
            else:
                marks[family, "pair"][f"{source} . {target}"] = ports[link]
    lines = []
    for family, word in ((4, "ip"), (6, "ip6")):
        table = f"{word} {TABLE}"
        lines += [f"add table {table}", f"delete table {table}", f"add table {table}"]
        lines.append(f"add chain {table} flows {{ type filter hook prerouting priority mangle; }}")
        # Those with a port come last, so that they win.
        for kind, (types, key) in _KEYS.items():
            found = marks[family, kind]
            if found:
                name = kind.replace(" ", "_")
                elements = ", ".join(f"{each} : {mark}" for each, mark in found.items())
                of_types = types.replace("ADDRESS", f"ipv{family}_addr")
                lines.append(f"add map {table} {name} {{ type {of_types} : mark; elements = {{ {elements} }}; }}")
                said = key.replace("IP", word)
                lines.append(f"add rule {table} flows meta l4proto udp meta mark set {said} map @{name}")
    return "\n".join(lines) + "\n"


def flows_of(
    wiring: Wiring, job: Job, scheme: Scheme, ports: Mapping[tuple[str, int], Sequence[int]] | None = None
) -> list[Flow]:
    """A deployment's flows and their ways. Where one pair of hosts has several ways, flows need their ports: without those all
    take the first.

    Args:
        ports: by server and rank, the UDP ports from which the rank sends what is for this server.
    """
    cluster, found, of_pairs = wiring.cluster, [], set()
    several = ambiguous(cluster, job, scheme)
    for server, parts in _edges(cluster, job, scheme).items():
        for child, start, parent, links in parts:
            daemon = cluster.server[server] if parent is None else cluster.aggregator[parent]
            end = _ip(cluster, daemon)
            own = wiring.address(start, ipaddress.ip_address(end).version)
            if isinstance(child, str):
                own = _ip(cluster, cluster.aggregator[child])
            if not links:
                continue
            nodes = (*(before for _, before, _ in walk(cluster, start, daemon.at, links)), daemon.at)
            flow = Flow(own, end, links, nodes)
            if isinstance(child, int) and (start, daemon.at) in several:
                found += [
                    Flow(own, end, links, nodes, start_port=port) for port in (ports or {}).get((server, child), ())
                ]
            elif parent is None and (start, daemon.at) in several:
                found.append(Flow(own, end, links, nodes, end_port=daemon.port))
            if (own, end) not in of_pairs:
                of_pairs.add((own, end))
                found.append(flow)
    return found


def ambiguous(cluster: Cluster, job: Job, scheme: Scheme) -> set[tuple[str, str]]:
    """Pairs of hosts between which flows take several ways."""
    ways: dict[tuple[str, str], set[tuple[str, ...]]] = {}
    for server, parts in _edges(cluster, job, scheme).items():
        for _, start, parent, links in parts:
            end = cluster.server[server].at if parent is None else cluster.aggregator[parent].at
            ways.setdefault((start, end), set()).add(links)
    return {pair for pair, each in ways.items() if len(each) > 1}


def _edges(
    cluster: Cluster, job: Job, scheme: Scheme
) -> dict[str, list[tuple[int | str, str, str | None, tuple[str, ...]]]]:
    """By server, all that push: a rank or an aggregator, its host, the aggregator that it pushes to or None, and the way."""
    found = {}
    for server, places in scheme.via.items():
        above, routes = scheme.above.get(server, {}), scheme.routes.get(server, {})
        used = dict.fromkeys([*(place for place in places if place is not None), *above.values()])
        children: list[tuple[int | str, str, str | None]] = [
            (rank, job.workers[rank], place) for rank, place in enumerate(places)
        ]
        children += [(name, cluster.aggregator[name].at, above.get(name)) for name in used]
        found[server] = [
            (child, start, parent, routes[child])
            if child in routes
            else (child, start, parent, tuple(link.name for link in cluster.path(start, end)))
            for child, start, parent in children
            for end in [cluster.server[server].at if parent is None else cluster.aggregator[parent].at]
        ]
    return found


def _ip(cluster: Cluster, daemon: object) -> str:
    address = cluster.address(daemon)  # type: ignore[arg-type]
    assert address is not None, "a deployment names what has addresses"
    return split(address)[0]


GATEWAYS = {4: "169.254.0.1", 6: "fe80::1"}
"""What every port calls its other end: each has one neighbour."""
FIRST_TABLE = 100
"""Of a switch's ports. The kernel's own are from 253 on, and beyond 255 again free."""
TABLE = "routes"

_KEYS = {
    "pair": ("ADDRESS . ADDRESS", "IP saddr . IP daddr"),
    "leaves": ("ADDRESS . inet_service . ADDRESS", "IP saddr . udp sport . IP daddr"),
    "is for": ("ADDRESS . ADDRESS . inet_service", "IP saddr . IP daddr . udp dport"),
}
