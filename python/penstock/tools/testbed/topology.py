"""The testbed's own shapes, from counts. Nothing here touches the system."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

from penstock.cluster import generate
from penstock.cluster.network import Cluster
from penstock.tools.testbed.link import LinkSpec
from penstock.tools.testbed.wiring import Wiring


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

    def cluster(self, link: LinkSpec) -> Cluster:
        """The cluster that these counts describe.

        Args:
            link: what the links have that is not said for each. Its delay is that from host to host, so a host's link has half
                of it; without racks its loss is also that from host to host.
        """
        loss = link.loss if self.racks else round(1 - math.sqrt(1 - link.loss), 9)
        made = self._made(_shared(link, loss), _own(link))
        for name in {**self.rates, **self.losses}:
            changes: dict[str, Any] = {}
            if name in self.rates:
                changes["rate_bit_s"] = _bit_s(self.rates[name])
            if name in self.losses:
                changes["loss"] = self.losses[name]
            made = made.with_link(name, **changes)
        return made

    def spread(self, link: LinkSpec, spines: int) -> Cluster:
        """As `cluster`, but racks have a link to each of ``spines`` switches instead of one to a core, and servers are dealt to
        the racks. The core has neither an aggregator nor links of its own. Raises: ValueError, where the counts do not fit."""
        if self.racks == 0 or self.hosts % self.racks:
            raise ValueError(f"spines={spines}: give a number of racks that divides the {self.hosts} hosts")
        if self.core_aggregator or self.rates or self.losses:
            raise ValueError(
                f"spines={spines}: there is no core, and no link of one name; change the file that is written"
            )
        return generate.leaf_spine(
            self.racks,
            spines,
            self.hosts // self.racks,
            servers=self.servers,
            uplink=self._uplink(),
            **_shared(link, link.loss),
            **_own(link),
        )

    def _made(self, shared: dict[str, Any], own: dict[str, Any]) -> Cluster:
        if not self.racks:
            return generate.star(self.hosts, **shared, **own)
        return generate.racks(
            self.hosts,
            self.racks,
            servers=self.servers,
            core_aggregator=self.core_aggregator,
            uplink=self._uplink(),
            **shared,
            **own,
        )

    def _uplink(self) -> dict[str, Any]:
        """What links between switches have instead of what all have."""
        rate = {} if self.uplink_mbit is None else {"rate_bit_s": _bit_s(self.uplink_mbit)}
        return {"delay_ns": 0, "flow_caps_bit_s": (), **rate}

    @functools.cached_property
    def _wiring(self) -> Wiring:
        return Wiring(self._made({}, {}))

    @property
    def nodes(self) -> list[str]:
        """Hosts, aggregators' places, servers' places: the order of their numbers."""
        return self._wiring.nodes

    @property
    def switches(self) -> list[str]:
        return self._wiring.switches

    @property
    def links(self) -> dict[str, str]:
        """Each link's lower end, which is its name, and the switch at its upper end."""
        return self._wiring.links

    def address(self, node: int | str, family: int = 4) -> str:
        """IPv4, or with ``family=6`` IPv6. Hosts, aggregators and servers differ in the byte before the last."""
        return self._wiring.address(node, family)

    def to_dict(self) -> dict[str, Any]:
        """The arguments that make this again."""
        return dataclasses.asdict(self)


def _shared(link: LinkSpec, loss: float) -> dict[str, Any]:
    return {"rate_bit_s": _bit_s(link.rate_mbit), "loss": loss, "mtu": link.mtu, "queue_bytes": link.queue_bytes}


def _own(link: LinkSpec) -> dict[str, Any]:
    """What only the links of nodes have."""
    caps = link.flow_mbit if isinstance(link.flow_mbit, list | tuple) else [link.flow_mbit] if link.flow_mbit else []
    return {"delay_ns": round(link.delay_ms * 1e6 / 2), "flow_caps_bit_s": tuple(round(cap * 1e6) for cap in caps)}


def _bit_s(rate_mbit: float | None) -> int | None:
    """0 and None are no limit."""
    return round(rate_mbit * 1e6) if rate_mbit else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkTraffic:
    """What crossed a link so far, or during a run, from its lower end's interface. ``up`` is away from the hosts.

    Bytes are those of Ethernet frames. Without offloads that is what crosses a wire, but for preamble and checksum. A
    packet that is lost by the link's loss has crossed it.
    """

    name: str
    lower: str
    upper: str
    """The switch at the upper end."""
    up_bytes: int
    up_packets: int
    down_bytes: int
    down_packets: int
    dropped: int
    """Packets that found a queue full, in either direction."""

    def since(self, before: LinkTraffic) -> LinkTraffic:
        counted = [field.name for field in dataclasses.fields(self) if field.type == "int"]
        return dataclasses.replace(self, **{name: getattr(self, name) - getattr(before, name) for name in counted})


MOST_NODES = 64
"""Of a kind. A guess at where one machine's hosts stop being of use. The addresses would do for 254."""
