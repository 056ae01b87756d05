"""What a scheme is worth, flow by flow. Of what the solvers use only `uses` is used here, so that it can judge them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.cluster.network import Aggregator, Cluster, Job, Server
from penstock.errors import Config as ConfigError
from penstock.planning.scheme import Scheme, children, uses

__all__ = ["Evaluation", "Load", "evaluate"]


@dataclass(frozen=True)
class Load:
    """What a scheme puts on a link's direction, an aggregator or a server at its highest rate; bits a second."""

    name: str
    load: float
    room: float

    @property
    def share(self) -> float:
        return self.load / self.room if self.room > 0 else math.inf


@dataclass(frozen=True)
class Evaluation:
    """A scheme's worth."""

    rate: float
    """The highest rate at which every worker can send, in bits a second; a step's gradient takes its bits over this."""
    binding: str
    """What is full then: "link r0 from r0 to core", "server s0"."""
    loads: tuple[Load, ...]
    """Everything that has a limit and is used, the fullest first."""


def evaluate(cluster: Cluster, job: Job, scheme: Scheme) -> Evaluation:
    """Walks every flow, results on their way down included.

    Raises:
        penstock.errors.Config: the scheme's parts do not add up to 1, it names what the cluster lacks, or gives a node more
            children than it can have.
    """
    if scheme.via.keys() != scheme.fractions.keys() or abs(math.fsum(scheme.fractions.values()) - 1) > 1e-9:
        raise ConfigError(f"the parts of a scheme add up to 1, not {math.fsum(scheme.fractions.values())}")
    loads: dict[str, float] = {}
    rooms: dict[str, float] = {}

    def flow(start: str | Aggregator, end: Aggregator | Server, part: float) -> None:
        for resource in uses(cluster, start, end):
            loads[resource.name] = loads.get(resource.name, 0.0) + part
            rooms[resource.name] = resource.room

    for server, part in scheme.fractions.items():
        places = scheme.via[server]
        if server not in cluster.server or len(places) != len(job.workers) or part <= 0:
            raise ConfigError(
                f"server {server} needs a part of the model and a place for each of {len(job.workers)} workers"
            )
        used = dict.fromkeys(place for place in places if place is not None)
        for name in used:
            if name not in cluster.aggregator:
                raise ConfigError(f"there is no aggregator {name}")
        counts = {name: places.count(name) for name in used}
        over = [name for name, count in counts.items() if count > children(cluster, name)]
        if over or len(used) + places.count(None) > children(cluster, None):
            raise ConfigError(f"{over[0] if over else server} has more children than a node can have")
        for host, place in zip(job.workers, places, strict=True):
            flow(host, cluster.server[server] if place is None else cluster.aggregator[place], part)
        for name in used:
            flow(cluster.aggregator[name], cluster.server[server], part)
    rate, binding = min(
        ((rooms[name] / load, name) for name, load in loads.items() if math.isfinite(rooms[name])),
        key=lambda one: one[0],
        default=(math.inf, "nothing"),
    )
    rate = max(rate, 0.0)
    at_rate = [Load(name, load * rate, rooms[name]) for name, load in loads.items() if math.isfinite(rooms[name])]
    return Evaluation(rate, binding, tuple(sorted(at_rate, key=lambda one: -one.share)))
