"""A bound for all schemes from the shadow prices of a problem that considers only some of them (`Problem`'s ``candidates``).

Any prices that are not negative give a bound: what the resources are worth, over what a unit of a worker's rate costs at least.
That cost is bounded for each part on its own, over all aggregators and all routes, by Lagrange's method once more.
docs/design/planner.md has the derivation.
"""

from __future__ import annotations

import numpy as np

from penstock.extras import installed
from penstock.planning.problem import Problem
from penstock.planning.relax import Relaxed

__all__ = ["bound_of_all"]


def bound_of_all(problem: Problem, relaxed: Relaxed) -> float:
    """What no scheme's rate passes, in bits a second, whatever aggregators and routes it uses, within the problem's levels."""
    if relaxed.is_solved and problem.candidates is None and not problem.routes_left_out():
        return relaxed.bound
    jobs = len(problem.jobs)
    rate = min(min(problem.most), _of_servers(problem))
    if not installed("scipy"):
        return rate
    equal = np.full(jobs, 1 / jobs) if jobs > 1 else np.ones(1)
    if relaxed.is_solved:
        duals = relaxed.duals
        rate = min(rate, _bound(problem, duals.resources, duals.most, duals.jobs, relaxed))
    # Prices that know of no scheme: all that aggregators and servers take in is worth the same, with or without the links to
    # them.
    for with_links in (False, True):
        prices = np.zeros(len(problem.resources))
        for number, resource in enumerate(problem.resources):
            if resource.room > 0 and (
                not resource.name.startswith("link ") or (with_links and _is_of_daemon(problem, resource.name))
            ):
                prices[number] = 1 / resource.room
        for of_servers in (1.0, 4.0, 16.0):
            weighed = prices.copy()
            for name in problem.servers:
                for number in _at_server(problem, name):
                    weighed[number] = prices[number] * of_servers
            rate = min(rate, _bound(problem, weighed, np.zeros(jobs), equal, None))
    return rate


def _of_servers(problem: Problem) -> float:
    """What servers take in at all, and their links carry, shared out among the jobs."""
    found = 0.0
    for name in dict.fromkeys(problem.servers):
        server = problem.cluster.server[name]
        ingress = problem.intake_of_server[problem.servers.index(name)]
        rooms = [np.inf if ingress is None else float(problem.room[ingress])]
        if all(server.at not in job.workers for job in problem.jobs) and not any(
            each.at == server.at for each in problem.cluster.aggregators
        ):
            # What comes from the host itself crosses none of its links.
            links = problem.cluster.links_of[server.at]
            rooms.append(
                sum(
                    np.inf
                    if link.rate_bit_s is None
                    else max(
                        link.rate_bit_s - link.background_bit_s - problem.background.get(f"link {link.name}", 0.0), 0.0
                    )
                    for link in links
                )
            )
        found += min(rooms)
    return found / len(problem.jobs)


def _bound(
    problem: Problem, prices: np.ndarray, of_most: np.ndarray, of_jobs: np.ndarray, relaxed: Relaxed | None
) -> float:
    """The bound that these prices give."""
    ways = _Distances(problem, prices)
    most = np.array([each if np.isfinite(each) else 0.0 for each in problem.most])
    worth = float(prices @ problem.room + of_most @ most)
    least = np.inf
    for s in range(len(problem.servers)):
        job = problem.job_of[s]
        if of_jobs[job] > 0:
            least = min(least, (_cost(problem, prices, relaxed, s, ways) + of_most[job]) / of_jobs[job])
    return float(worth / least * (1 + 1e-9)) if 0 < least < np.inf else float("inf")


def _is_of_daemon(problem: Problem, name: str) -> bool:
    cluster = problem.cluster
    hosts = {each.at for each in cluster.aggregators} | {each.at for each in cluster.servers}
    return any(end.node in hosts for end in cluster.link[name.removeprefix("link ")].ends)


def _at_server(problem: Problem, name: str) -> list[int]:
    host = problem.cluster.server[name].at
    own = {f"server {name}", *(f"link {link.name}" for link in problem.cluster.links_of[host])}
    return [number for number, resource in enumerate(problem.resources) if resource.name in own]


def _cost(problem: Problem, prices: np.ndarray, relaxed: Relaxed | None, s: int, ways: _Distances) -> float:
    """What a unit of a part's rate costs at least at these prices."""
    straight = problem.straight
    job = problem.job_of[s]
    server = problem.node(s, straight)
    at = [problem.node(s, v) for v in range(straight)]
    of_children = np.zeros(straight + 1) if relaxed is None else relaxed.duals.children[s]
    intake = np.array([_price(problem, prices, s, v) for v in range(straight + 1)]) + of_children
    to_ways = ways.between(problem.places[job], [*at, server]) + intake
    up = ways.between(at, [server])[:, 0] + intake[straight] if straight else np.zeros(0)
    if problem.levels > 1 and straight:
        above = ways.between(at, at) + intake[:-1]
        np.fill_diagonal(above, np.inf)
        for (t, v, u), price in relaxed.duals.nested.items() if relaxed is not None else ():
            if t == s:
                above[v, u] += price
                up[u] -= price
        up = np.minimum(up, above.min(axis=1))
    up = up - problem.most_children * of_children[:-1]
    count = problem.count(s)
    fixed = -problem.most_children_of_server * of_children[straight]
    nearest = to_ways.min(axis=1)
    tried = [] if relaxed is None else [relaxed.duals.classes[s].clip(0) * share for share in _SHARES]
    tried += [
        nearest + extra / count for extra in np.outer(up.max(initial=0.0) * np.array(_EXTRA), np.ones(len(count)))
    ]
    best = -np.inf
    for each in tried:
        # What a class pays: any that are at most what it costs straight to the server will do.
        paid = np.minimum(each, to_ways[:, straight])
        spared = (count[:, None] * (paid[:, None] - to_ways[:, :-1]).clip(0)).sum(axis=0)
        best = max(best, float(count @ paid + np.minimum(up - spared, 0.0).sum() + fixed))
    return best


def _price(problem: Problem, prices: np.ndarray, s: int, v: int) -> float:
    number = problem.intake_at(s, v)
    return 0.0 if number is None else float(prices[number])


class _Distances:
    """The least prices of ways between nodes, whichever routes they take."""

    def __init__(self, problem: Problem, prices: np.ndarray) -> None:
        from scipy.sparse import coo_array

        cluster = problem.cluster
        self._number = {name: i for i, name in enumerate((*cluster.host, *cluster.switch))}
        of = {resource.name: price for resource, price in zip(problem.resources, prices, strict=True)}
        cheapest: dict[tuple[int, int], float] = {}
        for link in cluster.links:
            one, other = (self._number[end.node] for end in link.ends)
            # A price of 0 would be no link for scipy.
            price = max(of.get(f"link {link.name}", 0.0), 1e-13)
            for pair in ((one, other), (other, one)):
                cheapest[pair] = min(price, cheapest.get(pair, np.inf))
        starts, ends = zip(*cheapest, strict=True)
        size = len(self._number)
        self._to: dict[str, np.ndarray] = {}
        self._graph = coo_array((list(cheapest.values()), (starts, ends)), shape=(size, size)).tocsr()

    def between(self, starts: list[str], ends: list[str]) -> np.ndarray:
        from scipy.sparse.csgraph import dijkstra

        new = [name for name in dict.fromkeys(ends) if name not in self._to]
        if new:
            found = dijkstra(self._graph, indices=[self._number[name] for name in new])
            self._to |= dict(zip(new, found, strict=True))
        columns = [self._number[name] for name in starts]
        # scipy's distances are a hair above the prices, for what costs nothing.
        return np.asarray(np.array([self._to[name][columns] for name in ends]).T - 1e-11).clip(0)


# Of what the relaxed solution's classes pay: those that considered few ways may pay less where there are more.
_SHARES = (1.0, 0.99, 0.97, 0.94, 0.9, 0.8, 0.7)
# What a class pays beyond the cheapest way, as shares of what an aggregator's sum costs.
_EXTRA = (0.0, 0.1, 0.2, 0.4, 0.7, 1.0)
