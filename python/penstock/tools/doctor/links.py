"""``penstock doctor --links``: a cluster file from what raw sockets carry between hosts."""

from __future__ import annotations

import re
import socket
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from penstock.cluster.network import Aggregator, Cluster, End, Host, Job, Link, Nic, Server, Switch
from penstock.errors import Config as ConfigError
from penstock.files import write_whole
from penstock.numbers import bit_rate
from penstock.runtime import config
from penstock.tools.bench.mesh import STALL_S, Mesh
from penstock.tools.doctor import pairs
from penstock.tools.testbed.link import ETHERNET_HEADER_BYTES, IPV4_TCP_HEADER_BYTES

__all__ = ["Seen", "cluster_of", "measure"]


@dataclass(frozen=True)
class Seen:
    """What a rank has measured."""

    name: str
    """Its host's name."""
    address: str
    """By which other ranks reach it, or its first one."""
    mtu: int
    rates: Mapping[int, float]
    """Bytes a second each way that raw sockets carry to a rank of another host, while no others send."""
    round_trips: Mapping[int, float]
    """Seconds, to the same."""


def measure(size: int, output: str, servers: Sequence[int], aggregators: Sequence[int]) -> bool:
    """Raw sockets between all pairs of hosts, and rank 0 writes the cluster file."""
    import torch.distributed as dist

    from penstock.cluster import file
    from penstock.torch import stats

    rank, world = dist.get_rank(), dist.get_world_size()
    peers = {peer["rank"]: peer for peer in stats()["peers"]}
    far = {other: peer for other, peer in peers.items() if peer["medium"] == "tcp"}
    hosts = {other: pairs.host_of(peer) for other, peer in far.items()}
    notes = []
    rates: dict[int, float] = {}
    for other in pairs.partners(dist):
        if other in far:
            try:
                rates[other], _ = pairs.raw_rate(dist, size, other, hosts[other], len(far[other]["streams"]))
            except OSError as error:
                notes.append(f"rank {rank} to rank {other}: {error}")
    address, mtu = _own_address(next(iter(hosts.values()))) if hosts else ("127.0.0.1", 1500)
    trips = {
        other: min((stream["round_trip_s"] for stream in peer["streams"] if stream["round_trip_s"]), default=0.0)
        for other, peer in far.items()
    }
    settings = config.read()
    together = _together_s(dist, address, size, settings.streams, settings.port_range)
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, (Seen(socket.gethostname(), address, mtu, rates, trips), together, notes))
    if rank != 0:
        return True
    slowest = max((one[1] for one in everyone if one[1] is not None), default=None)
    seen = [one[0] for one in everyone]
    notes = [note for one in everyone for note in one[2]]
    try:
        cluster, unexplained = cluster_of(seen, servers=servers, aggregators=aggregators, together=slowest, size=size)
        said = [f"# Measured by `penstock doctor --links`, {time.strftime('%Y-%m-%d %H:%M')}, {world} ranks"]
        said += [f"# {note}" for note in (*unexplained, *notes)]
        write_whole(Path(output), "\n".join(said) + "\n" + file.dump(cluster))
    except (ConfigError, OSError) as error:
        click.echo(f"{output} was not written: {error}", err=True)
        return False
    for link in cluster.links:
        rate = bit_rate(link.rate_bit_s or 0)
        click.echo(f"{link.name:>20}  {rate:>18}  {link.delay_ns / 1e6:.2f} ms")
    for note in (*unexplained, *notes):
        click.echo(f"! {note}")
    click.echo(f"{output} is the cluster: penstock plan {output}")
    return True


def _own_address(host: str) -> tuple[str, int]:
    """This machine's address on the route to another host, and the route's MTU."""
    six = ":" in host
    with socket.socket(socket.AF_INET6 if six else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        level, option = (socket.IPPROTO_IPV6, _IPV6_MTU) if six else (socket.IPPROTO_IP, _IP_MTU)
        return probe.getsockname()[0], probe.getsockopt(level, option)


def _together_s(dist: Any, address: str, size: int, flows: int, ports: tuple[int, int]) -> float | None:
    """Seconds that it takes when a rank of each host sends so many bytes to that of the next host, all at once. Collective.

    None where sockets could not connect, and on ranks that take no part: the first rank of each host does.
    """
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, address)
    first = [everyone.index(each) for each in dict.fromkeys(everyone)]
    if len(first) < 2:
        return None
    mesh = None
    if dist.get_rank() in first:
        try:
            mesh = Mesh(first.index(dist.get_rank()), len(first), address, ports)
        except OSError:
            mesh = None
    try:
        dist.all_gather_object(everyone, mesh and mesh.address)
        addresses = [everyone[rank] for rank in first]
        if mesh is None or None in addresses:
            return None
        mesh.connect(addresses, flows)
        for pair in mesh.pairs.values():
            pair.control.settimeout(STALL_S)
        seconds = []
        for _ in range(_TIMES):
            transfer = mesh.transfer({(at, (at + 1) % len(first)): size for at in range(len(first))}, flows, "pull")
            mesh.barrier()
            started = time.perf_counter()
            transfer.run()
            mesh.barrier()
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds)
    except OSError:
        return None
    finally:
        if mesh is not None:
            mesh.close()


def cluster_of(
    seen: Sequence[Seen],
    *,
    servers: Sequence[int] = (),
    aggregators: Sequence[int] = (),
    together: float | None = None,
    size: int = 0,
) -> tuple[Cluster, list[str]]:
    """The cluster that explains what was measured, and what it does not explain.

    A host's link carries what the fastest pair with it does. Hosts between which pairs are as fast as their links are on one
    switch; where that makes several, a switch joins them, and what a pair of them carries is what their links to it do. A host
    that is so slow that it could be on several is on the first.

    Args:
        seen: by rank.
        servers, aggregators: ranks on whose hosts these run, and no workers. Without servers every host has one.
        together: seconds that `_together_s` took with ``size`` bytes.

    Raises:
        penstock.errors.Config: all ranks are on one host, or a rank is none or left over for no worker.
    """
    for rank in (*servers, *aggregators):
        if not 0 <= rank < len(seen):
            raise ConfigError(f"rank {rank} is none of 0 to {len(seen) - 1}")
    addresses = list(dict.fromkeys(one.address for one in seen))
    if len(addresses) < 2:
        raise ConfigError(
            f"all {len(seen)} ranks are on one host, so there is no link to measure: start them with torchrun on all hosts"
        )
    at = [addresses.index(one.address) for one in seen]
    firsts = [seen[at.index(host)] for host in range(len(addresses))]
    names = _names([one.name for one in firsts])
    rates: dict[tuple[int, int], float] = {}
    for rank, one in enumerate(seen):
        for other, rate in one.rates.items():
            pair = (min(at[rank], at[other]), max(at[rank], at[other]))
            rates[pair] = max(rates.get(pair, 0.0), _bits_on_wire(rate, one.mtu))
    own = [max((rate for pair, rate in rates.items() if host in pair), default=0.0) for host in range(len(addresses))]
    unseen = [names[host] for host, rate in enumerate(own) if not rate]
    if unseen:
        raise ConfigError(
            f"no raw socket connects to {', '.join(unseen)}: are only the ports of PENSTOCK_PORT_RANGE open?"
        )
    near = {pair for pair, rate in rates.items() if rate >= _NEAR * min(own[end] for end in pair)}
    racks = _racks(own, near)
    links = [
        Link(
            name=names[host],
            ends=(End(names[host]), End(_switch(racks, racks[host]))),
            rate_bit_s=_rounded(own[host]),
            mtu=one.mtu,
            delay_ns=_delay(seen, at, host),
        )
        for host, one in enumerate(firsts)
    ]
    switches = [_switch(racks, rack) for rack in dict.fromkeys(racks)]
    if len(switches) > 1:
        for rack, switch in zip(dict.fromkeys(racks), switches, strict=True):
            between = max(rate for (a, b), rate in rates.items() if (racks[a] == rack) != (racks[b] == rack))
            mtu = min(one.mtu for one in firsts)
            links.append(Link(name=switch, ends=(End(switch), End("core")), rate_bit_s=_rounded(between), mtu=mtu))
        switches.append("core")
    apart = {at[rank] for rank in (*servers, *aggregators)}
    workers = tuple(names[host] for host in at if host not in apart)
    if not workers:
        raise ConfigError("every rank's host has a server or an aggregator, and no rank is left to work")
    serving = [at[rank] for rank in servers] or list(range(len(addresses)))
    cluster = Cluster(
        hosts=tuple(
            Host(name=name, nics=(Nic(addresses=(address,)),)) for name, address in zip(names, addresses, strict=True)
        ),
        switches=tuple(Switch(name=name) for name in switches),
        links=tuple(links),
        aggregators=tuple(
            Aggregator(name=f"a{number}", at=names[at[rank]], port=7471 if at[rank] not in serving else 7472)
            for number, rank in enumerate(aggregators)
        ),
        servers=tuple(Server(name=f"s{number}", at=names[host]) for number, host in enumerate(serving)),
        jobs=(Job(name="train", workers=workers),),
    )
    return cluster, _unexplained(cluster, names, together, size)


def _unexplained(cluster: Cluster, names: list[str], together: float | None, size: int) -> list[str]:
    """What pairs that send alone do not show."""
    if together is None:
        return ["no test of all hosts at once was possible: pairs alone do not show what they share"]
    loads: dict[tuple[str, str], int] = {}
    for start, end in zip(names, [*names[1:], names[0]], strict=True):
        node = start
        for link in cluster.path(start, end):
            loads[link.name, node] = loads.get((link.name, node), 0) + 1
            node = link.ends[1].node if link.ends[0].node == node else link.ends[0].node
    bits = _bits_on_wire(size, min(link.mtu for link in cluster.links))
    expected = max(count * bits / (cluster.link[name].rate_bit_s or 1) for (name, _), count in loads.items())
    if together <= _SLOWER * expected:
        return []
    return [
        f"all hosts at once take {together / expected:.1f} times as long as these links explain: pairs share a link that one "
        "pair alone does not fill. Add the switches that are missing, or lower the rates between them"
    ]


def _bits_on_wire(nbytes: float, mtu: int) -> float:
    """Of so many bytes in full frames, with their headers."""
    return nbytes * 8 * (mtu + ETHERNET_HEADER_BYTES) / (mtu - IPV4_TCP_HEADER_BYTES)


def _racks(own: Sequence[float], near: set[tuple[int, int]]) -> list[int]:
    """By host, the number of the first host of its rack: all in a rack are near each other. Fast hosts come first, as a slow one
    is near all that are faster than it."""
    racks: list[list[int]] = []
    for host in sorted(range(len(own)), key=lambda host: (-round(own[host] / max(own), 1), host)):
        rack = next((r for r in racks if all((min(host, o), max(host, o)) in near for o in r)), None)
        if rack is None:
            racks.append([host])
        else:
            rack.append(host)
    return [min(next(rack for rack in racks if host in rack)) for host in range(len(own))]


def _switch(racks: Sequence[int], rack: int) -> str:
    several = list(dict.fromkeys(racks))
    return "net" if len(several) == 1 else f"rack{several.index(rack)}"


def _names(given: Sequence[str]) -> list[str]:
    """Names that a cluster file takes: the hosts' own, as far as these differ."""
    short = [name.partition(".")[0] for name in given]
    taken = {"net", "core"}
    fits = all(
        re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{0,62}", name) and not re.fullmatch(r"rack\d+", name) for name in short
    )
    if fits and len(set(short)) == len(short) and not taken & set(short):
        return short
    return [f"h{host}" for host in range(len(given))]


def _delay(seen: Sequence[Seen], at: Sequence[int], host: int) -> int:
    """Of a host's link: a quarter of its shortest round trip, which crosses two links twice. What the ends take counts as 0."""
    trips = [trip for rank, one in enumerate(seen) if at[rank] == host for trip in one.round_trips.values() if trip > 0]
    shortest = min(trips, default=0.0)
    return round(shortest / 4 * 1e5) * 10_000 if shortest >= _LEAST_TRIP_S else 0


def _rounded(bit_s: float) -> int:
    """Three digits: a measurement is no better."""
    digits = max(0, len(str(int(bit_s))) - 3)
    return max(int(round(bit_s, -digits)), 1)


# A pair that carries so much of its slower link's rate has nothing slower between.
_NEAR = 0.85
# Longer than so many times the expected: a link is shared, which makes it twice as long. Beside other work 1.3 was seen.
_SLOWER = 1.5
_TIMES = 3
# Round trips of hosts on one switch take 20 to 90 us, most of it in the kernels.
_LEAST_TRIP_S = 200e-6
# linux/in.h and in6.h
_IP_MTU, _IPV6_MTU = 14, 24
