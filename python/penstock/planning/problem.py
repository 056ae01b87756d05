"""The problem of InArt (WWW '24, section 3) for a job of a cluster file: which ways there are, and what each of them loads.

```text
  worker ──r_s──> server                    directly, or
  worker ──r_s──> aggregator ──r_s──> server    where all workers that push there cost the server one flow
```
Server s sums its part of the model at the rate r_s; every worker sends it that much, so all of it at f = sum of r_s, which is to
be as high as possible. Ways are the shortest paths of the cluster, of several the first in the file; results take the same way
back.

Workers that differ in nothing but a link of their own are one *class* with a count: a problem grows with racks, not with workers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from penstock.cluster.network import Cluster, Job
from penstock.errors import Config as ConfigError
from penstock.planning.scheme import (
    MOST_CHILDREN,
    MOST_CHILDREN_OF_SWITCH,
    Places,
    Resource,
    Scheme,
    children,
    direction,
    uses,
)

__all__ = ["Problem"]


class Problem:
    """A job on a cluster, in numbers. Indices: server s, class c, way v (the number of an aggregator, or their count for none).

    Raises:
        penstock.errors.Config: the cluster has no network, no server, or one rank.
    """

    def __init__(self, cluster: Cluster, job: Job) -> None:
        if not cluster.links:
            raise cluster.wrong("links", "are needed for a plan: without them nothing is known of the network")
        if not cluster.servers:
            raise cluster.wrong("servers", "are needed for a plan: name a host that runs one")
        if len(job.workers) < 2:
            raise cluster.wrong(f"jobs.{job.name}.workers", "is one rank, which has nothing to sum with others")
        self.cluster, self.job = cluster, job
        self.servers = tuple(server.name for server in cluster.servers)
        self.aggregators = tuple(aggregator.name for aggregator in cluster.aggregators)
        self.most_children_of_server = children(cluster, None)
        self.most_children = np.array([children(cluster, name) for name in self.aggregators], dtype=float)
        self._resources: dict[str, int] = {}
        self.resources: list[Resource] = []
        alone = dict(_alone(cluster, job))
        self.most = min(alone.values(), default=math.inf)
        """What the links that only one host's workers use leave each of them, in bits a second."""
        by_uses: dict[tuple[tuple[_Used, ...], tuple[_Used, ...]], list[int]] = {}
        for rank, host in enumerate(job.workers):
            spared = host if host in alone else None
            above = [self._indices(uses(cluster, host, each, alone=spared)) for each in cluster.aggregators]
            straight = [self._indices(uses(cluster, host, each, alone=spared)) for each in cluster.servers]
            by_uses.setdefault((tuple(above), tuple(straight)), []).append(rank)
        self.classes = [tuple(ranks) for ranks in by_uses.values()]
        self.count = np.array([len(ranks) for ranks in self.classes])
        self.sends = [[(*above, straight[s]) for above, straight in by_uses] for s in range(len(self.servers))]
        """By server, class and way: the resources that one worker loads with each bit that it sends."""
        self.forwards = [
            [self._indices(uses(cluster, each, server)) for each in cluster.aggregators] for server in cluster.servers
        ]
        """By server and aggregator: the same for the sum."""
        self.room = np.array([max(resource.room, 0.0) for resource in self.resources])
        self.scale = float(max(self.room.max(initial=0.0), self.most if math.isfinite(self.most) else 0.0)) or 1.0
        """A rate of the problem's size, in bits a second."""

    def _indices(self, used: Iterator[Resource]) -> tuple[int, ...]:
        found = []
        for resource in used:
            if not math.isfinite(resource.room):
                continue
            if resource.name not in self._resources:
                self._resources[resource.name] = len(self.resources)
                self.resources.append(resource)
            found.append(self._resources[resource.name])
        return tuple(found)

    def all_one_way(self, way: int | None) -> np.ndarray:
        """``counts`` where all workers go straight to the servers, or all by one aggregator."""
        counts = np.zeros((len(self.servers), len(self.classes), len(self.aggregators) + 1), dtype=int)
        counts[:, :, len(self.aggregators) if way is None else way] = self.count
        return counts

    def nearest(self) -> np.ndarray:
        """``counts`` where each worker goes to the aggregator on whose way it shares least with others."""
        counts = self.all_one_way(None)
        for s in range(len(self.servers)):
            for c, ways in enumerate(self.sends[s] if self.aggregators else []):
                counts[s, c] = 0
                counts[s, c, min(range(len(self.aggregators)), key=[len(used) for used in ways[:-1]].__getitem__)] = (
                    self.count[c]
                )
        return counts

    def within_limits(self, counts: np.ndarray) -> np.ndarray:
        """These counts, with workers moved from nodes that have more children than they can have.

        Raises:
            penstock.errors.Config: no node has a place for a worker.
        """
        counts = counts.copy()
        for s, name in enumerate(self.servers):
            for v in np.flatnonzero(counts[s].sum(axis=0)[:-1] > self.most_children):
                self._move(counts[s], int(v), int(counts[s, :, v].sum() - self.most_children[v]))
            # A worker that goes to an aggregator which is used takes a child from the server; one that opens another does not.
            while not self.fits(counts[s]):
                by_way = counts[s].sum(axis=0)
                if by_way[-1]:
                    self._move(counts[s], len(self.aggregators), 1)
                else:
                    least = int(np.argmin(np.where(by_way[:-1] > 0, by_way[:-1], np.inf)))
                    self._move(counts[s], least, int(by_way[least]))
                after = counts[s].sum(axis=0)
                if (after[-1], np.count_nonzero(after)) >= (by_way[-1], np.count_nonzero(by_way)):
                    break
            if not self.fits(counts[s]):
                raise ConfigError(
                    f"{len(self.job.workers)} workers of {self.job.name} find no place below server {name}: a server or an "
                    f"aggregator has at most {MOST_CHILDREN} children, a switch {MOST_CHILDREN_OF_SWITCH}; the file needs more "
                    "aggregators"
                )
        return counts

    def _move(self, counts: np.ndarray, start: int, many: int) -> None:
        """Move so many workers of one server from a way to the aggregators with the most room, or straight to the server if there
        is none. Those that went straight go to aggregators that are used, if there is room."""
        straight = len(self.aggregators)
        while many > 0:
            by_way = counts.sum(axis=0)
            room = np.append(self.most_children - by_way[:-1], 0.0 if start == straight else np.inf).clip(0)
            room[start] = 0.0
            ways = np.flatnonzero(room)
            if not len(ways):
                return
            opens = (by_way[ways] == 0) & (start == straight)
            way = int(ways[np.lexsort((-room[ways], opens, ways == straight))[0]])
            c = int(np.flatnonzero(counts[:, start])[0])
            step = int(min(many, counts[c, start], room[way]))
            counts[c, start] -= step
            counts[c, way] += step
            many -= step

    def fits(self, counts: np.ndarray) -> bool:
        """Whether no node has more children than it can have, with these counts of one server."""
        by_way = counts.sum(axis=0)
        below = by_way[-1] + np.count_nonzero(by_way[:-1])
        return bool((by_way[:-1] <= self.most_children).all() and below <= self.most_children_of_server)

    def loads(self, counts: np.ndarray) -> np.ndarray:
        """What a unit of each server's rate loads, by server and resource."""
        return np.array([self.loads_of(s, each) for s, each in enumerate(counts)])

    def loads_of(self, server: int, counts: np.ndarray) -> np.ndarray:
        """The same of one server, with its counts."""
        loads = np.zeros(len(self.resources))
        for c, v in zip(*np.nonzero(counts), strict=True):
            for resource in self.sends[server][c][v]:
                loads[resource] += counts[c, v]
        for v in np.flatnonzero(counts.sum(axis=0)[:-1]):
            for resource in self.forwards[server][v]:
                loads[resource] += 1
        return loads

    def prices(self, server: int, of_resources: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What a unit of rate costs: by class and way for what one worker sends, by aggregator for what it forwards."""
        sends = np.array([[of_resources[list(used)].sum() for used in ways] for ways in self.sends[server]])
        forwards = np.array([of_resources[list(used)].sum() for used in self.forwards[server]])
        return sends, forwards

    def scheme(self, rates: np.ndarray, counts: np.ndarray) -> Scheme:
        """What ``counts[s, c, v]`` workers of each class and these rates mean, by names and ranks."""
        total = rates.sum()
        kept = [s for s, rate in enumerate(rates) if rate > LEAST_FRACTION * total]
        rest = sum(rates[s] for s in kept)
        via: dict[str, Places] = {}
        for s in kept:
            places: list[str | None] = [None] * len(self.job.workers)
            for c, ranks in enumerate(self.classes):
                ways = np.repeat(np.arange(len(self.aggregators) + 1), counts[s, c])
                for rank, way in zip(ranks, ways, strict=True):
                    places[rank] = self.aggregators[way] if way < len(self.aggregators) else None
            via[self.servers[s]] = tuple(places)
        return Scheme({self.servers[s]: float(rates[s] / rest) for s in kept}, via)


def _alone(cluster: Cluster, job: Job) -> Iterator[tuple[str, float]]:
    """The hosts whose only link carries nothing but what their own workers send, the same whichever way they send it: what that
    leaves each worker."""
    daemons = {server.at for server in cluster.servers} | {aggregator.at for aggregator in cluster.aggregators}
    for host in dict.fromkeys(job.workers):
        if host not in daemons and len(cluster.links_of[host]) == 1:
            (link,) = cluster.links_of[host]
            yield host, direction(link, host, "").room / job.workers.count(host)


# Numbers of resources.
_Used = tuple[int, ...]
# A smaller part of a model is not worth a server's memory and packets.
LEAST_FRACTION = 1e-4
