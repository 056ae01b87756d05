"""A scheme, as a value, and what a flow of it loads."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from penstock.cluster.network import Aggregator, Cluster, Link, Server

__all__ = ["Places", "Resource", "Scheme", "children", "direction", "uses"]

Places = tuple["str | None", ...]
"""By rank: the aggregator that a worker pushes to, for one server; None: the server itself."""


@dataclass(frozen=True)
class Scheme:
    """What a deployment says: the part of the model of each server, and where each worker's part for it is summed."""

    fractions: Mapping[str, float]
    """By server; they add up to 1. A server without a part is not there."""
    via: Mapping[str, Places]
    """By the same servers."""


@dataclass(frozen=True)
class Resource:
    """What several flows share."""

    name: str
    """As in a sentence: "link r0 from r0 to core", "aggregator a0", "server s0"."""
    room: float
    """Bits a second that others leave of it."""


def uses(
    cluster: Cluster,
    start: str | Aggregator,
    end: str | Aggregator | Server,
    *,
    both: bool = True,
    alone: str | None = None,
) -> Iterator[Resource]:
    """What a flow loads from a host or an aggregator to a host, an aggregator or a server: the links, with ``both`` also the
    other way, as the sum comes back, and the node that takes it in. ``alone``: the links of this host are left out."""
    from_node = start if isinstance(start, str) else start.at
    to_node = end if isinstance(end, str) else end.at
    if isinstance(end, Server) and end.ingress_bit_s is not None:
        yield Resource(f"server {end.name}", float(end.ingress_bit_s))
    if isinstance(end, Aggregator) and end.capacity_bit_s is not None:
        yield Resource(f"aggregator {end.name}", float(end.capacity_bit_s - end.used_bit_s))
    at = from_node
    for link in cluster.path(from_node, to_node):
        first, second = (each.node for each in link.ends)
        after = second if first == at else first
        if alone not in (at, after):
            yield direction(link, at, after)
            if both:
                yield direction(link, after, at)
        at = after


def children(cluster: Cluster, name: str | None) -> int:
    """How many children a node can have in a job."""
    return (
        MOST_CHILDREN_OF_SWITCH if name is not None and cluster.aggregator[name].at in cluster.switch else MOST_CHILDREN
    )


def direction(link: Link, start: str, end: str) -> Resource:
    room = math.inf if link.rate_bit_s is None else float(link.rate_bit_s - link.background_bit_s)
    return Resource(f"link {link.name} from {start} to {end}", room)


# What the runtime's packets and a switch's program allow (docs/reference/deployment.md).
MOST_CHILDREN, MOST_CHILDREN_OF_SWITCH = 64, 16
