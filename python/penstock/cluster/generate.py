"""Makes clusters of the usual shapes: `star`, `racks`, `leaf_spine`, `fat_tree`, `rails`; `uneven` draws their links' rates.

Names are the same in all: hosts ``h0``, ``h1``, ...; hosts of aggregators ``a0``, ... and of servers ``s0``, ..., with a daemon
of that name on each. A link has the name of its end that is further from the core. Hosts have addresses from 10.77.0.1 and
fd77::1 upwards, hosts of aggregators from 10.77.1.1 and fd77::1:1, of servers from 10.77.2.1 and fd77::2:1. A job, ``train``, has
a worker on each host that is neither.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.cluster.network import Aggregator, Cluster, End, Host, Job, Link, Nic, Server, Switch

__all__ = ["CORE", "MOST_HOSTS", "blocks", "fat_tree", "leaf_spine", "racks", "rails", "star", "uneven"]


def star(hosts: int, **link: Any) -> Cluster:
    """Hosts on one switch.

    Args:
        link: what each link has besides its name and ends: arguments of `penstock.cluster.network.Link`.

    Raises:
        ValueError: a count out of bounds; penstock.errors.Config, which is one: ``link`` contradicts itself.
    """
    _check(hosts=(hosts, 1, MOST_HOSTS))
    return _cluster({f"h{host}": CORE for host in range(hosts)}, [CORE], link=link, uplink={})


def racks(
    hosts: int,
    racks: int,
    *,
    servers: int = 0,
    core_aggregator: bool = False,
    uplink: Mapping[str, Any] | None = None,
    **link: Any,
) -> Cluster:
    """A tree of two levels: hosts are dealt in blocks to racks, whose switches have a place for an aggregator each; a core switch
    joins the racks, and has the places of servers and, with ``core_aggregator``, that of one more aggregator.

        h0  h1  a0      h2  h3  a1
          \\  |  /          \\  |  /
            r0              r1        s0  s1  a2
             \\______________ | ________|___|__/
                            core

    Args:
        uplink: what the links between racks and core have instead of ``link``.
        link: as in `star`.

    Raises:
        ValueError: a count out of bounds; penstock.errors.Config, which is one: ``link`` contradicts itself.
    """
    _check(hosts=(hosts, 1, MOST_HOSTS), racks=(racks, 1, hosts), servers=(servers, 0, MOST_NODES))
    at = {f"h{host}": f"r{rack}" for rack, block in enumerate(blocks(hosts, racks)) for host in block}
    at |= {f"a{rack}": f"r{rack}" for rack in range(racks)} | ({f"a{racks}": CORE} if core_aggregator else {})
    at |= {f"s{server}": CORE for server in range(servers)}
    switches = [*(f"r{rack}" for rack in range(racks)), CORE]
    at |= {f"r{rack}": CORE for rack in range(racks)}
    return _cluster(at, switches, link=link, uplink=uplink or {})


def leaf_spine(
    leaves: int,
    spines: int,
    hosts_per_leaf: int,
    *,
    servers: int = 0,
    aggregators: bool = True,
    uplink: Mapping[str, Any] | None = None,
    **link: Any,
) -> Cluster:
    """Leaf switches ``leaf0``, ..., each linked to every one of the spine switches ``spine0``, ...; hosts are on leaves.

    A link between them is called ``leaf0-spine1``. Servers are dealt to the leaves by turns.

    Args:
        aggregators: whether each leaf has a place for one.
        uplink: what the links between leaves and spines have instead of ``link``.
        link: as in `star`.

    Raises:
        ValueError: a count out of bounds; penstock.errors.Config, which is one: ``link`` contradicts itself.
    """
    _check(
        leaves=(leaves, 1, MOST_NODES),
        spines=(spines, 1, MOST_NODES),
        hosts_per_leaf=(hosts_per_leaf, 1, MOST_HOSTS // leaves),
        servers=(servers, 0, MOST_NODES),
    )
    hosts = leaves * hosts_per_leaf
    at = {f"h{host}": f"leaf{host // hosts_per_leaf}" for host in range(hosts)}
    at |= {f"a{leaf}": f"leaf{leaf}" for leaf in range(leaves)} if aggregators else {}
    at |= {f"s{server}": f"leaf{server % leaves}" for server in range(servers)}
    switches = [f"leaf{leaf}" for leaf in range(leaves)] + [f"spine{spine}" for spine in range(spines)]
    pairs = [(f"leaf{leaf}", f"spine{spine}") for leaf in range(leaves) for spine in range(spines)]
    return _cluster(at, switches, link=link, uplink=uplink or {}, more=pairs)


def fat_tree(
    ports: int,
    *,
    servers: int = 0,
    aggregators: bool = True,
    seed: int | None = None,
    uplink: Mapping[str, Any] | None = None,
    **link: Any,
) -> Cluster:
    """The fat-tree of switches with so many ports (Al-Fares, SIGCOMM '08): ``ports`` pods of as many edge and aggregation
    switches, half of ``ports`` each, and (ports / 2)^2 core switches. With 6 ports 54 hosts, 18 edge, 18 aggregation and 9 core
    switches.

    Switches are ``edge0-1`` (pod, number), ``agg0-1`` and ``core0-1`` (that every ``aggP-0`` is linked to, number). Servers run
    on hosts' places: spread evenly, or with a ``seed`` drawn at random.

    Args:
        aggregators: whether each switch has one: ``a0``, ... at the switches in the order edge, aggregation, core.
        uplink: what links between switches have instead of ``link``.
        link: as in `star`.

    Raises:
        ValueError: a count out of bounds; penstock.errors.Config, which is one: ``link`` contradicts itself.
    """
    _check(ports=(ports, 2, 24))
    if ports % 2:
        raise ValueError(f"ports={ports}: give an even number")
    half = ports // 2
    edges = [f"edge{pod}-{i}" for pod in range(ports) for i in range(half)]
    aggs = [f"agg{pod}-{i}" for pod in range(ports) for i in range(half)]
    cores = [f"core{group}-{i}" for group in range(half) for i in range(half)]
    places = len(edges) * half
    _check(servers=(servers, 0, min(places - 1, MOST_NODES)))
    if seed is None:
        chosen = {place * places // max(servers, 1) for place in range(servers)}
    else:
        chosen = set(random.Random(seed).sample(range(places), servers))
    hosts, daemons = iter(range(places)), iter(range(servers))
    at = {
        f"s{next(daemons)}" if place in chosen else f"h{next(hosts)}": edges[place // half] for place in range(places)
    }
    pairs = [(f"edge{pod}-{i}", f"agg{pod}-{j}") for pod in range(ports) for i in range(half) for j in range(half)]
    pairs += [(f"agg{pod}-{i}", f"core{i}-{j}") for pod in range(ports) for i in range(half) for j in range(half)]
    made = _cluster(at, [*edges, *aggs, *cores], link=link, uplink=uplink or {}, more=pairs)
    return _with_switches(made) if aggregators else made


def rails(
    hosts: int, nics: int, *, spines: int = 1, servers: int = 0, uplink: Mapping[str, Any] | None = None, **link: Any
) -> Cluster:
    """Hosts with several NICs, of which each is at a switch of its own, its *rail*: ``eth0`` of every host at ``rail0`` and so
    on. Spine switches join the rails, and have the places of servers, dealt to the rails by turns. The job has a rank for every
    NIC.

    Args:
        uplink: what the links between rails and spines have instead of ``link``.
        link: as in `star`.

    Raises:
        ValueError: a count out of bounds; penstock.errors.Config, which is one: ``link`` contradicts itself.
    """
    _check(
        hosts=(hosts, 1, MOST_NODES),
        nics=(nics, 1, 16),
        spines=(spines, 1, MOST_NODES),
        servers=(servers, 0, MOST_NODES),
    )
    switches = [f"rail{rail}" for rail in range(nics)] + [f"spine{spine}" for spine in range(spines)]
    pairs = [(f"rail{rail}", f"spine{spine}") for rail in range(nics) for spine in range(spines)]
    names = [f"h{host}" for host in range(hosts)]
    at = dict.fromkeys(names, "rail0") | {f"a{rail}": f"rail{rail}" for rail in range(nics)}
    at |= {f"s{server}": f"rail{server % nics}" for server in range(servers)}
    plain = _cluster(at, switches, link=link, uplink=uplink or {}, more=pairs)

    def nic(name: str, rail: int) -> Nic:
        return Nic(name=f"eth{rail}", addresses=_addresses(name) if rail == 0 else ())

    with_rails = {name: Host(name=name, nics=tuple(nic(name, rail) for rail in range(nics))) for name in names}
    own = tuple(
        Link(name=f"{name}:eth{rail}-rail{rail}", ends=(End(name, f"eth{rail}"), End(f"rail{rail}")), **link)
        for name in names
        for rail in range(nics)
    )
    return dataclasses.replace(
        plain,
        hosts=tuple(with_rails.get(host.name, host) for host in plain.hosts),
        links=(*own, *(each for each in plain.links if each.name not in with_rails)),
        jobs=(Job(name="train", workers=tuple(name for name in names for _ in range(nics))),),
    )


def uneven(cluster: Cluster, low_bit_s: int, high_bit_s: int, *, seed: int) -> Cluster:
    """This cluster with a rate of each link that is drawn at random, evenly from ``low_bit_s`` to ``high_bit_s``."""
    rng = random.Random(seed)
    links = tuple(dataclasses.replace(link, rate_bit_s=rng.randint(low_bit_s, high_bit_s)) for link in cluster.links)
    return dataclasses.replace(cluster, links=links)


def _with_switches(cluster: Cluster) -> Cluster:
    """With an aggregator at each switch."""
    made = tuple(
        Aggregator(name=f"a{i}", at=switch.name, address=f"10.{77 + i // 254}.3.{i % 254 + 1}")
        for i, switch in enumerate(cluster.switches)
    )
    return dataclasses.replace(cluster, aggregators=made)


def blocks(count: int, parts: int) -> list[range]:
    """0 to ``count`` - 1 in blocks, the first ones one longer where it does not come out even; none is empty."""
    each, more = divmod(count, parts)
    starts = [part * each + min(part, more) for part in range(parts + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(starts) if stop > start]


def _cluster(
    at: Mapping[str, str],
    switches: Sequence[str],
    *,
    link: Mapping[str, Any],
    uplink: Mapping[str, Any],
    more: Sequence[tuple[str, str]] = (),
) -> Cluster:
    """``at``: the upper end of each link by its lower end. ``more``: links between switches that have several upper ends."""
    hosts = [name for name in at if name not in switches]
    links = [
        Link(name=lower, ends=(End(lower), End(upper)), **{**link, **(uplink if lower in switches else {})})
        for lower, upper in at.items()
    ]
    links += [Link(name="-".join(pair), ends=(End(pair[0]), End(pair[1])), **{**link, **uplink}) for pair in more]
    return Cluster(
        hosts=tuple(Host(name=name, nics=(Nic(addresses=_addresses(name)),)) for name in hosts),
        switches=tuple(Switch(name=name) for name in switches),
        links=tuple(links),
        aggregators=tuple(Aggregator(name=name, at=name) for name in hosts if name.startswith("a")),
        servers=tuple(Server(name=name, at=name) for name in hosts if name.startswith("s")),
        jobs=(Job(name="train", workers=tuple(name for name in hosts if name.startswith("h"))),),
    )


def _addresses(name: str) -> tuple[str, str]:
    """Hosts, aggregators and servers differ in the byte before the last; of more than 254 hosts, in the one before that."""
    kind, number = "has".index(name[0]), int(name[1:])
    high, low = divmod(number, 254)
    return f"10.{77 + high}.{kind}.{low + 1}", f"fd77::{kind:x}:{number + 1:x}" if kind else f"fd77::{number + 1:x}"


def _check(**counts: tuple[int, int, int]) -> None:
    for name, (count, low, high) in counts.items():
        if not low <= count <= high:
            raise ValueError(f"{name}={count}: give {low} to {high}")


CORE = "core"
"""The core switch, or the only one."""

MOST_HOSTS, MOST_NODES = 4096, 254
"""What the largest training jobs have; what the addresses do for."""
