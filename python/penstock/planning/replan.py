"""What a running job does when the network changes: other ways for the same split of its model (the paper's phase 2).

Pure: an event comes in, a state and a decision come out. Who measures loads, and who carries the decision out, is elsewhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from penstock.cluster.network import Cluster, Job
from penstock.errors import Config as ConfigError
from penstock.planning.evaluate import evaluate, loads_of
from penstock.planning.problem import Problem
from penstock.planning.scheme import Scheme
from penstock.planning.solve import improved, scheme_of
from penstock.planning.starts import Ways, routed, within_limits
from penstock.planning.tree import Tree

__all__ = ["Decision", "Event", "Gone", "Loads", "Patience", "State", "decide", "left_of", "noted", "without"]


@dataclass(frozen=True)
class Loads:
    """What others send was measured: bits a second by name, "link r0", "aggregator a0"; of a link's directions the larger. All
    that was measured before is forgotten. Of what is named it takes the place of the cluster's ``background`` and ``used``."""

    background: Mapping[str, float]


@dataclass(frozen=True)
class Gone:
    """An aggregator or a link is dead, or back."""

    name: str
    """As in "link r0", "aggregator a0"."""
    is_back: bool = False


Event = Loads | Gone


@dataclass(frozen=True)
class State:
    """What is known between two events."""

    scheme: Scheme
    """The one that runs."""
    gone: frozenset[str] = frozenset()
    background: Mapping[str, float] = field(default_factory=dict)
    better_for: int = 0
    """So many measurements in a row a better scheme was there."""


@dataclass(frozen=True)
class Patience:
    """What keeps a deployment from flapping. A change costs a step's pause, and loads vary."""

    least_gain: float = 0.1
    """Other ways must be so much faster."""
    measurements: int = 3
    """... and stay so for so many measurements in a row. A death waits for none."""


@dataclass(frozen=True)
class Decision:
    """What to do after an event."""

    scheme: Scheme
    """The one to run: the old one, or other ways for the same split."""
    is_changed: bool
    reason: str
    rate: float
    """What a worker can send with it; 0 with something that is dead."""
    moved: int
    """How many pairs of server and worker have another aggregator."""


def decide(
    cluster: Cluster,
    job: Job,
    state: State,
    event: Event,
    *,
    patience: Patience | None = None,
    seed: int = 0,
    seconds: float = 0.7,
) -> tuple[State, Decision]:
    """The state after an event, and what to do.

    Raises:
        penstock.errors.Config: a worker or a server that is needed is cut off, or nothing has places for all workers; or the
            event names what the cluster lacks. The old state still holds.
    """
    patience = patience or Patience()
    state = noted(cluster, state, event)
    left = left_of(cluster, job, state)
    is_dead = _uses(cluster, job, state.scheme, state.gone)
    now = 0.0 if is_dead else evaluate(left, job, state.scheme, state.background).rate
    if isinstance(event, Gone) and not is_dead:
        told = "is back: the next measurements tell whether that helps" if event.is_back else "is not used"
        return state, Decision(state.scheme, False, f"{event.name} {told}", now, 0)
    levels = 2 if any(state.scheme.above.values()) else None
    problem = Problem(left, job, levels=levels, background=state.background)
    fractions = np.array([state.scheme.fractions.get(name, 0.0) for name in problem.servers])
    best = improved(problem, trees_of(problem, state.scheme), fractions=fractions, seed=seed, seconds=seconds)
    # Once something is gone, the first route in the file may be the dead one.
    made = scheme_of(problem, fractions, best.trees, every_route=bool(state.gone))
    found = dataclasses.replace(made, fractions=state.scheme.fractions)
    rate = evaluate(left, job, found, state.background).rate
    # Other routes alone need nothing of the job's ranks.
    same = trees_of(problem, state.scheme, keep_routes=False)
    rerouted = dataclasses.replace(
        scheme_of(problem, fractions, same, every_route=bool(state.gone)), fractions=state.scheme.fractions
    )
    rate_rerouted = evaluate(left, job, rerouted, state.background).rate
    if rate_rerouted >= rate * (1 - _AS_GOOD):
        found, rate = rerouted, rate_rerouted
    moved = sum(
        one != other
        for server in found.via
        for one, other in zip(found.via[server], state.scheme.via[server], strict=True)
    )
    if is_dead:
        return dataclasses.replace(state, scheme=found, better_for=0), Decision(
            found, True, f"{is_dead} is dead", rate, moved
        )
    if rate <= now * (1 + patience.least_gain):
        told = f"other ways are at most {max(rate / now - 1, 0.0):.0%} faster" if now > 0 else "no way is faster"
        return dataclasses.replace(state, better_for=0), Decision(state.scheme, False, told, now, 0)
    count = state.better_for + 1
    gain = "what is full now carries nothing" if now <= 0 else f"{rate / now - 1:.0%} faster"
    if count < patience.measurements:
        told = f"{gain}, for {count} of {patience.measurements} measurements"
        return dataclasses.replace(state, better_for=count), Decision(state.scheme, False, told, now, 0)
    return dataclasses.replace(state, scheme=found, better_for=0), Decision(found, True, gain, rate, moved)


def left_of(cluster: Cluster, job: Job, state: State) -> Cluster:
    """The cluster without what is dead, and without the loads that the file says of what has been measured since.

    Raises:
        penstock.errors.Config: a worker, or a server that has a part, is cut off.
    """
    measured = dataclasses.replace(
        cluster,
        links=tuple(
            dataclasses.replace(link, background_bit_s=0) if f"link {link.name}" in state.background else link
            for link in cluster.links
        ),
        aggregators=tuple(
            dataclasses.replace(each, used_bit_s=0) if f"aggregator {each.name}" in state.background else each
            for each in cluster.aggregators
        ),
    )
    return without(measured, job, state.gone, state.scheme)


def without(cluster: Cluster, job: Job, gone: frozenset[str], scheme: Scheme | None = None) -> Cluster:
    """The cluster without what is dead and what that cuts off.

    Raises:
        penstock.errors.Config: a worker, or a server that has a part, is cut off.
    """
    links = tuple(link for link in cluster.links if f"link {link.name}" not in gone)
    start = job.workers[0]
    reached, waiting = {start}, [start]
    while waiting:
        node = waiting.pop()
        if node in cluster.host and node != start:
            continue
        for link in links:
            ends = [end.node for end in link.ends]
            if node in ends:
                for after in ends:
                    if after not in reached:
                        reached.add(after)
                        waiting.append(after)
    needed = dict.fromkeys(job.workers, "worker")
    for name in cluster.server if scheme is None else scheme.fractions:
        needed[cluster.server[name].at] = f"server {name}"
    for host, what in needed.items():
        if host not in reached:
            raise ConfigError(f"{', '.join(sorted(gone))}: no way is left to {what} on {host}")
    jobs = tuple(each for each in cluster.jobs if reached.issuperset(each.workers))
    return dataclasses.replace(
        cluster,
        hosts=tuple(each for each in cluster.hosts if each.name in reached),
        switches=tuple(each for each in cluster.switches if each.name in reached),
        links=tuple(link for link in links if reached.issuperset(end.node for end in link.ends)),
        aggregators=tuple(
            each for each in cluster.aggregators if f"aggregator {each.name}" not in gone and each.at in reached
        ),
        servers=tuple(each for each in cluster.servers if each.at in reached),
        jobs=jobs,
    )


def trees_of(problem: Problem, scheme: Scheme, *, keep_routes: bool = True) -> list[Tree]:
    """A scheme's ways in a problem that may lack some of them: those whose aggregator is not there go straight to the server,
    and a route that is not there is replaced by another one. Without ``keep_routes`` all routes are the emptiest ones."""
    numbers = {name: v for v, name in enumerate(problem.aggregators)}
    straight = problem.straight
    ways = []
    for s, server in enumerate(problem.servers):
        counts = np.zeros((len(problem.count(s)), straight + 1), dtype=int)
        places = scheme.via.get(server, (None,) * len(problem.jobs[0].workers))
        for c, ranks in enumerate(problem.classes[0]):
            for rank in ranks:
                place = places[rank]
                counts[c, straight if place is None else numbers.get(place, straight)] += 1
        above = np.full(straight, straight)
        for child, parent in scheme.above.get(server, {}).items():
            if child in numbers and parent in numbers:
                above[numbers[child]] = numbers[parent]
        ways.append(Ways(counts, above))
    kept = within_limits(problem, ways)
    parts = np.array([scheme.fractions.get(name, 0.0) for name in problem.servers])
    trees = routed(problem, kept, np.ones(len(ways)) if keep_routes else parts)
    for s, server in enumerate(problem.servers):
        same = (kept[s].counts == ways[s].counts).all() and (kept[s].above == ways[s].above).all()
        if keep_routes and same and server in scheme.via:
            _reroute(problem, s, trees[s], scheme)
    return trees


def _reroute(problem: Problem, s: int, tree: Tree, scheme: Scheme) -> None:
    """Puts a tree's flows on the routes that a scheme has for them, where they are still there."""
    numbers = {name: v for v, name in enumerate(problem.aggregators)}
    routes = scheme.routes.get(problem.servers[s], {})
    places = scheme.via[problem.servers[s]]
    for v in map(int, tree.used()):
        choices = [
            route.links for route in problem.routes.between(problem.node(s, v), problem.node(s, int(tree.above[v])))
        ]
        links = routes.get(problem.aggregators[v])
        if links in choices:
            tree.rest(v, int(tree.above[v]), choices.index(links))
    for c, ranks in enumerate(problem.classes[0]):
        wanted: dict[int, dict[int, int]] = {}
        for rank in ranks:
            place = places[rank]
            v = problem.straight if place is None else numbers.get(place, problem.straight)
            start = problem.places[0][c]
            choices = [route.links for route in problem.routes.between(start, problem.node(s, v))]
            own = 0 if problem.jobs[0].workers[rank] == start else 1
            links = routes.get(rank)
            at = choices.index(links[own:]) if links is not None and links[own:] in choices else 0
            wanted.setdefault(v, {})[at] = wanted.get(v, {}).get(at, 0) + 1
        for class_of, v, route, many in list(tree.ways()):
            if class_of == c:
                tree.put(c, v, route, -many)
        for v, by_route in wanted.items():
            for route, many in by_route.items():
                tree.put(c, v, route, many)


def noted(cluster: Cluster, state: State, event: Event) -> State:
    """The state with what an event says, before anything is decided.

    Raises:
        penstock.errors.Config: it names what the cluster lacks.
    """
    for name in event.background if isinstance(event, Loads) else (event.name,):
        kind, _, of = name.partition(" ")
        known = {"link": set(cluster.link), "aggregator": set(cluster.aggregator), "server": set(cluster.server)}
        if of not in known.get(kind, set()) or (isinstance(event, Gone) and kind == "server"):
            without_it = kind == "server" and of in cluster.server
            why = "without which nothing can be summed" if without_it else "which the cluster does not have"
            raise ConfigError(f"an event names {name}, {why}")
    if isinstance(event, Loads):
        return dataclasses.replace(state, background=dict(event.background))
    gone = state.gone - {event.name} if event.is_back else state.gone | {event.name}
    return dataclasses.replace(state, gone=gone)


def _uses(cluster: Cluster, job: Job, scheme: Scheme, gone: frozenset[str]) -> str | None:
    """What a scheme uses of what is dead."""
    loads = loads_of(cluster, job, scheme) if gone else {}
    return next((name for name in sorted(gone) if loads.get(name, 0.0) > 0), None)


# So much slower may other routes be than other aggregators, and are taken instead.
_AS_GOOD = 0.02
