"""Which nodes there are, and which switches they hang on. Nothing here touches the system."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

from penstock.tools.testbed.link import LinkSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
    """Hosts on one switch; or, with racks, a tree of two levels:

        h0  h1  a0      h2  h3  a1
          \\  |  /          \\  |  /
            r0              r1        s0  s1  a2
             \\______________ | ________|___|__/
                            core

    A node is a host (``h0``, which is also called 0), an aggregator's place (``a0`` on the switch of rack 0, and so on;
    one more on the core switch, if asked for) or a server's (``s0``, on the core switch). They differ in their names and
    addresses only: what runs on a node makes it what it is. A link is named after its lower end: ``h0`` is the link of
    that host, ``r0`` that of rack 0 to the core switch.

    Args:
        hosts: 1 to `MOST_NODES`. With racks they are dealt to them in blocks, as ranks to hosts.
        racks: 0 for the one switch, and then neither of the next two.
        servers: places on the core switch.
        core_aggregator: whether the core switch has an aggregator's place too.
        uplink_mbit: rate of the links between racks and core in Mbit/s; None for that of the other links, 0 for no limit.
        rates: Mbit/s by link, where it is neither that of all links nor of those between racks and core; 0 for no limit.
        losses: share of packets lost by link, where it is not that of all links.
    """

    hosts: int
    racks: int = 0
    servers: int = 0
    core_aggregator: bool = False
    uplink_mbit: float | None = None
    rates: dict[str, float] = dataclasses.field(default_factory=dict)
    losses: dict[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= MOST_NODES:
            raise ValueError(f"hosts={self.hosts}: give 1 to {MOST_NODES}")
        if not 0 <= self.racks <= self.hosts:
            raise ValueError(f"racks={self.racks}: at most one a host, of which there are {self.hosts}")
        if not 0 <= self.servers <= MOST_NODES:
            raise ValueError(f"servers={self.servers}: give 0 to {MOST_NODES}")
        for argument in ("servers", "core_aggregator", "uplink_mbit", "rates", "losses"):
            if self.racks == 0 and getattr(self, argument):
                raise ValueError(f"{argument}={getattr(self, argument)}: only with racks=1 or more")
        for argument in ("rates", "losses"):
            for name, value in getattr(self, argument).items():
                given = f"{argument}={getattr(self, argument)}"
                if name not in self.links:
                    raise ValueError(f"{given}: there is no link {name}, but {', '.join(self.links)}")
                if argument == "rates" and not 0 <= value < math.inf:
                    raise ValueError(f"{given}: Mbit/s, or 0 for no limit")
                if argument == "losses" and not 0 <= value < 1:
                    raise ValueError(f"{given}: a share of packets, 0 <= loss < 1")

    @property
    def nodes(self) -> list[str]:
        """Hosts, aggregators' places, servers' places: the order of their numbers."""
        aggregators = self.racks + self.core_aggregator
        counts = (("h", self.hosts), ("a", aggregators), ("s", self.servers))
        return [f"{kind}{number}" for kind, count in counts for number in range(count)]

    @property
    def switches(self) -> list[str]:
        return [*(f"r{rack}" for rack in range(self.racks)), CORE]

    @property
    def links(self) -> dict[str, str]:
        """Each link's lower end, which is its name, and the switch at its upper end."""
        racks = [f"r{rack}" for rack, hosts in enumerate(blocks(self.hosts, max(1, self.racks))) for _ in hosts]
        upper = {f"h{host}": rack if self.racks else CORE for host, rack in enumerate(racks)}
        upper.update({f"a{rack}": f"r{rack}" for rack in range(self.racks)})
        upper.update({node: CORE for node in self.nodes if node not in upper})
        upper.update({f"r{rack}": CORE for rack in range(self.racks)})
        return upper

    def number(self, node: int | str) -> int:
        """A node's place in `nodes`. Raises: ValueError, when there is none of that name."""
        if isinstance(node, int):
            if not 0 <= node < self.hosts:
                raise ValueError(f"host {node}: there are hosts 0 to {self.hosts - 1}")
            return node
        if node not in self.nodes:
            raise ValueError(f"there is no node {node}, but {', '.join(self.nodes)}")
        return self.nodes.index(node)

    def address(self, node: int | str, family: int = 4) -> str:
        """IPv4, or with ``family=6`` IPv6. Hosts, aggregators and servers differ in the byte before the last."""
        kind, number = self._kind_and_number(node)
        if family == 4:
            return f"10.77.{kind}.{number + 1}"
        return f"fd77::{kind:x}:{number + 1:x}" if kind else f"fd77::{number + 1:x}"

    def mac(self, node: int | str) -> str:
        kind, number = self._kind_and_number(node)
        return f"02:00:00:00:{kind:02x}:{number + 1:02x}"

    @property
    def prefix(self) -> int:
        """Bits of IPv4 addresses that all nodes share."""
        return 16 if self.racks else 24

    def link(self, name: str, spec: LinkSpec) -> LinkSpec:
        """The properties of the link of that name; ``spec`` has those that all links share."""
        loss = self.losses.get(name, spec.loss)
        rate_mbit, flow_mbit = spec.rate_mbit, spec.flow_mbit
        if name not in self.nodes:
            rate_mbit = spec.rate_mbit if self.uplink_mbit is None else self.uplink_mbit or None
            flow_mbit = None
        if name in self.rates:
            rate_mbit = self.rates[name] or None
        return dataclasses.replace(spec, rate_mbit=rate_mbit, flow_mbit=flow_mbit, loss=loss)

    def to_dict(self) -> dict[str, Any]:
        """The arguments that make this again."""
        return dataclasses.asdict(self)

    def _kind_and_number(self, node: int | str) -> tuple[int, int]:
        name = self.nodes[self.number(node)]
        return "has".index(name[0]), int(name[1:])


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkTraffic:
    """What crossed a link so far, or during a run, from its lower end's interface. ``up`` is away from the hosts.

    Bytes are those of Ethernet frames. Without offloads that is what crosses a wire, but for preamble and checksum. A
    packet that is lost by the link's loss has crossed it.
    """

    name: str
    upper: str
    """The switch at the upper end; the lower end is `name`."""
    up_bytes: int
    up_packets: int
    down_bytes: int
    down_packets: int
    dropped: int
    """Packets that found a queue full, in either direction."""

    def since(self, before: LinkTraffic) -> LinkTraffic:
        counted = [field.name for field in dataclasses.fields(self) if field.type == "int"]
        return dataclasses.replace(self, **{name: getattr(self, name) - getattr(before, name) for name in counted})


def blocks(count: int, parts: int) -> list[range]:
    """0 to ``count`` - 1 in blocks, the first ones one longer where it does not come out even; none is empty."""
    each, more = divmod(count, parts)
    starts = [part * each + min(part, more) for part in range(parts + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(starts) if stop > start]


CORE = "core"
"""The core switch, or the only one."""

MOST_NODES = 64
"""Of a kind. A guess at where one machine's hosts stop being of use. The addresses would do for 254."""
