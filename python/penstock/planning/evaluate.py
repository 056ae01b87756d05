"""What a scheme is worth, flow by flow and by rank. Nothing of what the solvers compute is used here, so that it can judge
them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.cluster.network import Cluster, Job
from penstock.cluster.routes import walk
from penstock.errors import Config as ConfigError
from penstock.planning.scheme import MOST_LEVELS, Child, Scheme, children

__all__ = ["Evaluation", "Load", "evaluate", "evaluate_all", "loads_of"]


@dataclass(frozen=True)
class Load:
    """What schemes put on a link, an aggregator or a server; bits a second. Of a link's directions the fuller one."""

    name: str
    """As in a sentence: "link r0", "aggregator a0", "server s0"."""
    load: float
    room: float
    """What others leave of it; infinite where it has no limit."""

    @property
    def share(self) -> float:
        if not math.isfinite(self.room):
            return 0.0
        return self.load / self.room if self.room > 0 else math.inf


@dataclass(frozen=True)
class Evaluation:
    """A scheme's worth."""

    rate: float
    """The highest rate at which every worker can send, in bits a second; a step's gradient takes its bits over this."""
    binding: str
    """What is full then: "link r0", "server s0"."""
    loads: tuple[Load, ...]
    """Everything that has a limit and is used, at that rate, the fullest first."""


def evaluate(cluster: Cluster, job: Job, scheme: Scheme, background: Mapping[str, float] | None = None) -> Evaluation:
    """Walks every flow, results on their way down included. ``background``: what others send, as for
    `penstock.planning.problem.Problem`.

    Raises:
        penstock.errors.Config: the scheme's parts do not add up to 1, it names what the cluster lacks, gives a node more
        children than
            it can have, or a route is none.
    """
    return evaluate_all(cluster, [(job, scheme, 1.0)], background)


def evaluate_all(
    cluster: Cluster, jobs: Sequence[tuple[Job, Scheme, float]], background: Mapping[str, float] | None = None
) -> Evaluation:
    """Several jobs at once, whose workers send at rates of a given proportion to each other: the rate is that of a job of
    weight 1.

    Raises:
        penstock.errors.Config: as `evaluate`.
    """
    loads: dict[str, float] = {}
    for job, scheme, weight in jobs:
        for name, load in loads_of(cluster, job, scheme).items():
            loads[name] = loads.get(name, 0.0) + load * weight
    rooms = {name: _room(cluster, name) - (background or {}).get(name, 0.0) for name in loads}
    limited = {name: load for name, load in loads.items() if math.isfinite(rooms[name]) and load > 0}
    rate, binding = min(
        ((max(rooms[name], 0.0) / load, name) for name, load in limited.items()), default=(math.inf, "nothing")
    )
    at_rate = [Load(name, load * rate, max(rooms[name], 0.0)) for name, load in limited.items()]
    return Evaluation(rate, binding, tuple(sorted(at_rate, key=lambda one: (-one.share, one.name != binding))))


def loads_of(cluster: Cluster, job: Job, scheme: Scheme) -> dict[str, float]:
    """What a scheme loads by name, for a unit of the rate at which every worker sends.

    Raises:
        penstock.errors.Config: as `evaluate`.
    """
    if scheme.via.keys() != scheme.fractions.keys() or abs(math.fsum(scheme.fractions.values()) - 1) > 1e-9:
        raise ConfigError(f"the parts of a scheme add up to 1, not {math.fsum(scheme.fractions.values())}")
    of_nodes: dict[str, float] = {}
    of_directions: dict[tuple[str, str], float] = {}
    for server, part in scheme.fractions.items():
        for child, start, parent in _tree(cluster, job, scheme, server, part):
            end = cluster.server[server].at if parent is None else cluster.aggregator[parent].at
            links = scheme.routes.get(server, {}).get(child)
            if links is None:
                links = tuple(link.name for link in cluster.path(start, end))
            try:
                way = walk(cluster, start, end, links)
            except LookupError as error:
                raise ConfigError(f"the route of {_child(child)} for server {server}: {error}") from None
            for link, before, after in way:
                # The gradients up, and the sums down.
                for direction in ((link.name, before), (link.name, after)):
                    of_directions[direction] = of_directions.get(direction, 0.0) + part
            node = f"server {server}" if parent is None else f"aggregator {parent}"
            of_nodes[node] = of_nodes.get(node, 0.0) + part
    for (name, _), load in of_directions.items():
        of_nodes[f"link {name}"] = max(of_nodes.get(f"link {name}", 0.0), load)
    return of_nodes


def _tree(cluster: Cluster, job: Job, scheme: Scheme, server: str, part: float) -> list[tuple[Child, str, str | None]]:
    """Each child of a server's tree, where it is, and the aggregator that it pushes to, or None for the server."""
    places, above = scheme.via[server], scheme.above.get(server, {})
    if server not in cluster.server or len(places) != len(job.workers) or part <= 0:
        raise ConfigError(
            f"server {server} needs a part of the model and a place for each of {len(job.workers)} workers"
        )
    edges: list[tuple[Child, str, str | None]] = [
        (rank, host, place) for rank, (host, place) in enumerate(zip(job.workers, places, strict=True))
    ]
    for name in dict.fromkeys(place for place in places if place is not None):
        at: str | None = name
        seen: list[str] = []
        while at is not None:
            if at not in cluster.aggregator:
                raise ConfigError(f"there is no aggregator {at}")
            if at in seen:
                raise ConfigError(f"aggregator {at} is above itself for server {server}")
            seen.append(at)
            edge = (at, cluster.aggregator[at].at, above.get(at))
            if edge not in edges:
                edges.append(edge)
            at = above.get(at)
        if len(seen) > MOST_LEVELS:
            raise ConfigError(
                f"server {server} has {len(seen)} levels of aggregators; {MOST_LEVELS} are enough for all ranks"
            )
    counts: dict[str | None, int] = {}
    for _, _, parent in edges:
        counts[parent] = counts.get(parent, 0) + 1
    for parent, count in counts.items():
        if count > children(cluster, parent):
            raise ConfigError(
                f"{parent or server} has {count} children, more than the {children(cluster, parent)} that it can have"
            )
    return edges


def _room(cluster: Cluster, name: str) -> float:
    kind, _, of = name.partition(" ")
    if kind == "link":
        link = cluster.link[of]
        return math.inf if link.rate_bit_s is None else float(link.rate_bit_s - link.background_bit_s)
    if kind == "server":
        ingress = cluster.server[of].ingress_bit_s
        return math.inf if ingress is None else float(ingress)
    aggregator = cluster.aggregator[of]
    return math.inf if aggregator.capacity_bit_s is None else float(aggregator.capacity_bit_s - aggregator.used_bit_s)


def _child(child: Child) -> str:
    return f"rank {child}" if isinstance(child, int) else f"aggregator {child}"
