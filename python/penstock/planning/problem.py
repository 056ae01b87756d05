"""The problem of InArt (WWW '24, section 3) for jobs of a cluster file: which ways there are, and what each of them loads.

```text
  worker ──r_s──> server                                    directly, or
  worker ──r_s──> aggregator ──r_s──> server                where all workers that push there cost the server one flow, or
  worker ──r_s──> aggregator ──r_s──> aggregator ──> server    with two levels
```
A server sums its *part* of a job's model at the rate r_s; every worker sends it that much, so all of it at f = sum of r_s,
which is to be as high as possible; of several jobs the lowest. A flow takes one of the routes of `routes.py`; results take the
same way back.

Workers that differ in nothing but a link of their own are one *class* with a count: a problem grows with racks, not with workers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.cluster.network import Cluster, Job, Link
from penstock.cluster.routes import Routes
from penstock.errors import Config as ConfigError
from penstock.planning.scheme import MOST_CHILDREN, MOST_LEVELS, children

__all__ = ["Problem", "Resource", "Table"]


@dataclass(frozen=True)
class Resource:
    """What several flows share."""

    name: str
    """As in a sentence: "link r0", "aggregator a0", "server s0"."""
    room: float
    """Bits a second that others leave of it."""


class Table:
    """Routes of many pairs of nodes, so that the prices of all are one operation."""

    def __init__(self, legs: Sequence[Sequence[tuple[int, ...]]], none: int) -> None:
        """``none`` is the number of a resource that costs nothing."""
        routes = [route or (none,) for each in legs for route in each]
        self._flat = np.array([resource for route in routes for resource in route], dtype=int)
        self._starts = np.cumsum([0, *(len(route) for route in routes)])[:-1]
        self._pairs = np.cumsum([0, *(len(each) for each in legs)])[:-1]

    def prices(self, of_resources: np.ndarray) -> np.ndarray:
        """By pair: the price of the cheapest route. ``of_resources`` has a last element, 0."""
        if not len(self._pairs):
            return np.zeros(0)
        by_route = np.add.reduceat(of_resources[self._flat], self._starts)
        return np.asarray(np.minimum.reduceat(by_route, self._pairs))


class Problem:
    """Jobs on a cluster, in numbers. Indices: part s (a server of a job), class c of that job, way v: the number of an
    aggregator, or their count for straight to the server.

    More than 16 fields: what is known of parts, classes, aggregators and resources is numbered once, and used by all solvers.

    Args:
        levels: of aggregators, 1 or 2; None: one, or two where one has no place for all workers.
        candidates: how many aggregators are considered for each class and part, those on the shortest way first; None: all.
        background: what others send over what resources, by their names, beside what the cluster says; bits a second.

    Raises:
        penstock.errors.Config: the cluster has no network, no server, or a job has one rank.
    """

    def __init__(
        self,
        cluster: Cluster,
        jobs: Job | Sequence[Job],
        *,
        levels: int | None = None,
        candidates: int | None = None,
        background: Mapping[str, float] | None = None,
        routes: Routes | None = None,
    ) -> None:
        self.jobs = (jobs,) if isinstance(jobs, Job) else tuple(jobs)
        if not cluster.links:
            raise cluster.wrong("links", "are needed to plan: without them nothing is known of the network")
        if not cluster.servers:
            raise cluster.wrong("servers", "are needed to plan: name a host that runs one")
        for job in self.jobs:
            if len(job.workers) < 2:
                raise cluster.wrong(f"jobs.{job.name}.workers", "is one rank, which has nothing to sum with others")
            if job.gradient_bytes is not None and job.gradient_bytes < len(cluster.servers):
                raise cluster.wrong(
                    f"jobs.{job.name}.gradient",
                    f"is {job.gradient_bytes} B, and each of {len(cluster.servers)} servers needs one byte for its part",
                )
        self.cluster, self.routes = cluster, routes or Routes(cluster)
        self.background = dict(background or {})
        self.job_of = np.repeat(np.arange(len(self.jobs)), len(cluster.servers))
        self.servers = [server.name for _ in self.jobs for server in cluster.servers]
        """By part."""
        self.aggregators = tuple(aggregator.name for aggregator in cluster.aggregators)
        self.straight = len(self.aggregators)
        """The way that leads straight to the server."""
        self.most_children = np.array([children(cluster, name) for name in self.aggregators], dtype=int)
        self.most_children_of_server = children(cluster, None)
        self._numbers: dict[str, int] = {}
        self.resources: list[Resource] = []
        self._classes(self._alone())
        at_aggregators = [each.at for each in cluster.aggregators]
        self.intake = [
            None
            if each.capacity_bit_s is None
            else self._resource(f"aggregator {each.name}", each.capacity_bit_s - each.used_bit_s)
            for each in cluster.aggregators
        ]
        self.intake_of_server = [
            None if (room := cluster.server[name].ingress_bit_s) is None else self._resource(f"server {name}", room)
            for name in self.servers
        ]
        self._at = [*at_aggregators]
        self._legs: dict[tuple[str, str], tuple[tuple[int, ...], ...]] = {}
        self.levels = levels or self._needed_levels()
        self.candidates = candidates
        self.near = [self._near(s) for s in range(len(self.servers))]
        """By part and class: the aggregators that are considered."""
        self.parents = [self._parents(s) for s in range(len(self.servers))]
        """By part and aggregator: the aggregators that are considered above it."""
        self._number_all()
        self.room = np.array([max(resource.room, 0.0) for resource in self.resources])
        finite = [most for most in self.most if math.isfinite(most)]
        self.scale = max([float(self.room.max(initial=0.0)), *finite]) or 1.0
        """A rate of the problem's size, in bits a second."""
        self._tables()

    def routes_left_out(self) -> bool:
        """Whether there were more routes between two nodes than are considered."""
        return any(len(legs) >= self.routes.most for legs in self._legs.values())

    def legs(self, start: str, end: str) -> tuple[tuple[int, ...], ...]:
        """The resources of each route between two nodes."""
        if (start, end) not in self._legs:
            links = self.cluster.link
            self._legs[start, end] = tuple(
                tuple(number for name in route.links if (number := self._link(links[name])) is not None)
                for route in self.routes.between(start, end)
            )
        return self._legs[start, end]

    def legs_of(self, s: int, c: int, v: int) -> tuple[tuple[int, ...], ...]:
        """The routes of a worker of a class to an aggregator, or straight to the server."""
        return self.legs(self.places[self.job_of[s]][c], self.node(s, v))

    def legs_above(self, s: int, v: int, to: int) -> tuple[tuple[int, ...], ...]:
        """The routes of an aggregator to another one, or to the server."""
        return self.legs(self._at[v], self.node(s, to))

    def node(self, s: int, v: int) -> str:
        """Where an aggregator is, or the server."""
        return self._at[v] if v < self.straight else self.cluster.server[self.servers[s]].at

    def intake_at(self, s: int, v: int) -> int | None:
        """The resource of what an aggregator takes in, or the server."""
        return self.intake[v] if v < self.straight else self.intake_of_server[s]

    def count(self, s: int) -> np.ndarray:
        """The number of workers of each class of a part's job."""
        return self.counts[self.job_of[s]]

    def no_place(self, s: int) -> ConfigError:
        job = self.jobs[self.job_of[s]]
        below = f"{len(job.workers)} workers of {job.name} find no place below server {self.servers[s]}"
        return ConfigError(
            f"{below}: a server or an aggregator has at most {MOST_CHILDREN} children, a switch 16, in {self.levels} "
            f"level{'s' if self.levels > 1 else ''} of aggregators; the file needs more aggregators"
        )

    def unlimited(self) -> ConfigError:
        names = " or ".join(job.name for job in self.jobs)
        return ConfigError(
            f"nothing limits a way that {names} can take: give its links a rate, or its server an ingress"
        )

    def class_prices(self, s: int, prices: np.ndarray) -> np.ndarray:
        """By class and way: what a unit of rate of one worker costs on the cheapest route; infinite where it is no candidate."""
        padded = np.append(prices, 0.0)
        found = np.full((len(self.count(s)), self.straight + 1), np.inf)
        rows, columns, table, intakes = self._class_tables[s]
        found[rows, columns] = table.prices(padded) + padded[intakes]
        return found

    def row_prices(self, s: int, c: int, padded: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The ways of one class, and what a unit of rate of one worker costs on each; ``padded`` has a last element, 0."""
        if (s, c) not in self._rows:
            ways = (*self.near[s][c], self.straight)
            none = len(self.resources)
            intakes = [none if (number := self.intake_at(s, v)) is None else number for v in ways]
            self._rows[s, c] = np.array(ways), Table([self.legs_of(s, c, v) for v in ways], none), np.array(intakes)
        ways_of, table, intakes_of = self._rows[s, c]
        return ways_of, table.prices(padded) + padded[intakes_of]

    def server_prices(self, s: int, prices: np.ndarray) -> np.ndarray:
        """By aggregator: what its sum costs on the cheapest route straight to the server."""
        padded = np.append(prices, 0.0)
        table, intake = self._server_tables[s]
        return np.asarray(table.prices(padded) + padded[intake])

    def _number_all(self) -> None:
        """Gives every link on a route that is considered its number."""
        for s in range(len(self.servers)):
            for v in range(self.straight):
                for to in (*self.parents[s][v], self.straight):
                    self.legs_above(s, v, to)
            for c, near in enumerate(self.near[s]):
                for v in (*near, self.straight):
                    self.legs_of(s, c, v)

    def _tables(self) -> None:
        none = len(self.resources)

        def intake(number: int | None) -> int:
            return none if number is None else number

        self._rows: dict[tuple[int, int], tuple[np.ndarray, Table, np.ndarray]] = {}
        self._class_tables, self._server_tables = [], []
        for s in range(len(self.servers)):
            pairs = [(c, v) for c, near in enumerate(self.near[s]) for v in (*near, self.straight)]
            self._class_tables.append(
                (
                    np.array([c for c, _ in pairs]),
                    np.array([v for _, v in pairs]),
                    Table([self.legs_of(s, c, v) for c, v in pairs], none),
                    np.array([intake(self.intake_at(s, v)) for _, v in pairs]),
                )
            )
            ups = [self.legs_above(s, v, self.straight) for v in range(self.straight)]
            self._server_tables.append((Table(ups, none), intake(self.intake_of_server[s])))

    def _classes(self, alone: Mapping[str, str]) -> None:
        """The classes of each job: ranks, and the node where their routes begin."""
        self.classes: list[list[tuple[int, ...]]] = []
        self.places: list[list[str]] = []
        self.most: list[float] = []
        """By job: what the links that only one host's workers use leave each of them, in bits a second."""
        for job in self.jobs:
            by_place: dict[str, list[int]] = {}
            most = math.inf
            own = {host: job.workers.count(host) for host in dict.fromkeys(job.workers) if host in alone}
            for rank, host in enumerate(job.workers):
                by_place.setdefault(alone.get(host, host), []).append(rank)
            for host, ranks in own.items():
                (link,) = self.cluster.links_of[host]
                if link.rate_bit_s is not None:
                    most = min(most, max(self._room(link), 0.0) / ranks)
            self.classes.append([tuple(ranks) for ranks in by_place.values()])
            self.places.append(list(by_place))
            self.most.append(most)
        self.counts = [np.array([len(ranks) for ranks in classes]) for classes in self.classes]

    def _alone(self) -> dict[str, str]:
        """The hosts whose only link carries nothing but what one job's workers there send, the same whichever way they send it;
        and the switch behind the link."""
        daemons = {each.at for each in self.cluster.servers} | {each.at for each in self.cluster.aggregators}
        users: dict[str, set[str]] = {}
        for job in self.jobs:
            for host in job.workers:
                users.setdefault(host, set()).add(job.name)
        found = {}
        for host, names in users.items():
            if host not in daemons and len(names) == 1 and len(self.cluster.links_of[host]) == 1:
                (link,) = self.cluster.links_of[host]
                behind = next(end.node for end in link.ends if end.node != host)
                if behind in self.cluster.switch:
                    found[host] = behind
        return found

    def _room(self, link: Link) -> float:
        assert link.rate_bit_s is not None
        return link.rate_bit_s - link.background_bit_s - self.background.get(f"link {link.name}", 0.0)

    def _link(self, link: Link) -> int | None:
        return None if link.rate_bit_s is None else self._resource(f"link {link.name}", self._room(link), counted=True)

    def _resource(self, name: str, room: float, counted: bool = False) -> int:
        if name not in self._numbers:
            self._numbers[name] = len(self.resources)
            left = room if counted else room - self.background.get(name, 0.0)
            self.resources.append(Resource(name, float(left)))
        return self._numbers[name]

    def _needed_levels(self) -> int:
        """One, unless the aggregators that are needed for all workers are more than a server takes."""
        for counts in self.counts:
            places, needed = sorted(map(int, self.most_children), reverse=True), 0
            left = int(counts.sum()) - self.most_children_of_server
            for most in places:
                if left <= 0:
                    break
                # An aggregator takes one of the server's places.
                needed, left = needed + 1, left - most + 1
            # More racks with aggregators than a server's children: some of them push to one another.
            if left > 0 or (
                len(places) >= self.most_children_of_server and len(counts) >= self.most_children_of_server
            ):
                return MOST_LEVELS
        return 1

    def _hops(self, start: str, end: str) -> float:
        hops = self.routes.hops(start, end)
        return math.inf if hops is None else hops

    def _near(self, s: int) -> list[tuple[int, ...]]:
        found = []
        server = self.node(s, self.straight)
        for place in self.places[self.job_of[s]]:
            ways = [v for v in range(self.straight) if self.routes.hops(place, self._at[v]) is not None]
            if self.candidates is not None and len(ways) > self.candidates:
                # On the shortest way first; of those the nearest to the workers, whose sum spares the most links.
                ways.sort(
                    key=lambda v: (
                        self._hops(place, self._at[v]) + self._hops(self._at[v], server),
                        self._hops(place, self._at[v]),
                        v,
                    )
                )
                ways = sorted(ways[: self.candidates])
            found.append(tuple(ways))
        return found

    def _parents(self, s: int) -> list[tuple[int, ...]]:
        straight = self.straight
        if self.levels < 2:
            return [() for _ in range(straight)]
        if self.candidates is None or straight <= 2 * _HUBS:
            return [tuple(u for u in range(straight) if u != v) for v in range(straight)]
        # The nearest to the server; of equals others for each part, so that none has aggregators below it for all.
        server = self.node(s, straight)
        hubs = sorted(range(straight), key=lambda u: (self._hops(self._at[u], server), (u - s * _HUBS) % straight))[
            :_HUBS
        ]
        return [() if v in hubs else tuple(sorted(hubs)) for v in range(straight)]


# Aggregators that are considered above others, where there are many: each has room for 32 others beside a rack of 32 workers.
_HUBS = 16
