"""A scheme, as a value: where gradients are summed, and which way they go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.cluster.network import Cluster

__all__ = ["MOST_CHILDREN", "MOST_CHILDREN_OF_SWITCH", "MOST_LEVELS", "Child", "Places", "Scheme", "children"]

Places = tuple["str | None", ...]
"""By rank: the aggregator that a worker pushes to, for one server; None: the server itself."""

Child = int | str
"""What pushes to an aggregator or a server: a rank, or an aggregator's name."""


@dataclass(frozen=True)
class Scheme:
    """What a deployment says: the part of the model of each server, and where each worker's part for it is summed."""

    fractions: Mapping[str, float]
    """By server; they add up to 1. A server without a part is not there."""
    via: Mapping[str, Places]
    """By the same servers."""
    above: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """By server: the aggregators that push to another aggregator, and to which; the others push to the server."""
    routes: Mapping[str, Mapping[Child, tuple[str, ...]]] = field(default_factory=dict)
    """By server and child: the links on its way to what it pushes to. Those that are not here go the shortest way, of several the
    first in the file."""


def children(cluster: Cluster, name: str | None) -> int:
    """How many children an aggregator, or with None a server, can have in a job."""
    return (
        MOST_CHILDREN_OF_SWITCH if name is not None and cluster.aggregator[name].at in cluster.switch else MOST_CHILDREN
    )


# What the runtime's packets and a switch's program allow (docs/reference/deployment.md).
MOST_CHILDREN, MOST_CHILDREN_OF_SWITCH = 64, 16
MOST_LEVELS = 2
"""Two levels of 64 children below a server reach more than the 4,096 ranks that a job can have."""
