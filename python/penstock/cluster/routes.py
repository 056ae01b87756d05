"""The routes that a flow can take from one node of a cluster to another."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.cluster.network import Cluster, Link
from penstock.errors import Config as ConfigError

__all__ = ["MOST_ROUTES", "Route", "Routes", "other", "through", "walk", "written"]


@dataclass(frozen=True)
class Route:
    """A way through the network."""

    links: tuple[str, ...]
    """Their names, in the order in which they are crossed."""
    switches: tuple[str, ...]
    """Those between the ends."""


class Routes:
    """Finds the shortest routes between nodes, and those that are one link longer, `most` of them at most, and remembers them.

    Hosts forward nothing, so only switches are between. A fat-tree of many ports has more equal routes than are worth a look: of
    those some are taken evenly.
    """

    def __init__(self, cluster: Cluster, most: int | None = None) -> None:
        self.cluster, self.most = cluster, most or MOST_ROUTES
        self._found: dict[tuple[str, str], tuple[Route, ...]] = {}
        self._hops: dict[str, dict[str, int]] = {}
        self._next: dict[str, list[tuple[str, str]]] = {
            node: [(link.name, other(link, node)) for link in links] for node, links in cluster.links_of.items()
        }

    def between(self, start: str, end: str) -> tuple[Route, ...]:
        """The shortest first; none where there is no way."""
        if (start, end) not in self._found:
            self._found[start, end] = self._find(start, end)
        return self._found[start, end]

    def hops(self, start: str, end: str) -> int | None:
        """How many links the shortest route has; None where there is none."""
        if end not in self._hops:
            self._hops[end] = self._distances(end)
        return self._hops[end].get(start)

    def _distances(self, end: str) -> dict[str, int]:
        """Of every node to the end."""
        found, waiting = {end: 0}, collections.deque([end])
        while waiting:
            node = waiting.popleft()
            if node != end and node in self.cluster.host:
                continue
            for _, before in self._next[node]:
                if before not in found:
                    found[before] = found[node] + 1
                    waiting.append(before)
        return found

    def _find(self, start: str, end: str) -> tuple[Route, ...]:
        shortest = self.hops(start, end)
        if shortest is None:
            return ()
        if start == end:
            return (Route((), ()),)
        away = self._hops[end]
        found: list[Route] = []
        for length in (shortest, shortest + LONGER):
            enough = _LOOKED_AT * self.most
            fitting: list[Route] = []
            self._extend(start, end, length, away, [], [start], fitting, enough)
            room = self.most - len(found)
            found += fitting if len(fitting) <= room else [fitting[i * len(fitting) // room] for i in range(room)]
        return tuple(found)

    def _extend(
        self,
        node: str,
        end: str,
        left: int,
        away: dict[str, int],
        links: list[str],
        nodes: list[str],
        found: list[Route],
        enough: int,
    ) -> None:
        """Adds all routes of exactly so many links more."""
        for link, after in self._next[node]:
            if after == end and left == 1:
                found.append(Route((*links, link), tuple(nodes[1:])))
            elif (
                after != end
                and left > 1
                and away.get(after, left) < left
                and after not in nodes
                and after not in self.cluster.host
            ):
                self._extend(after, end, left - 1, away, [*links, link], [*nodes, after], found, enough)
            if len(found) >= enough:
                return


def walk(cluster: Cluster, start: str, end: str, links: Sequence[str]) -> list[tuple[Link, str, str]]:
    """The links of a route with the nodes before and behind each.

    Raises:
        LookupError: it is no way from the start to the end; the error says why.
    """
    at, seen, found = start, {start}, []
    for name in links:
        if name not in cluster.link:
            raise LookupError(f"there is no link {name}")
        link = cluster.link[name]
        if at not in (each.node for each in link.ends):
            raise LookupError(f"link {name} does not begin at {at}")
        if at != start and at in cluster.host:
            raise LookupError(f"{at} is a host, and hosts forward nothing")
        after = other(link, at)
        if after in seen:
            raise LookupError(f"it comes to {after} twice")
        found.append((link, at, after))
        seen.add(after)
        at = after
    if at != end:
        raise LookupError(f"it ends at {at}, and not at {end}")
    return found


def through(cluster: Cluster, start: str, end: str, names: Sequence[str]) -> tuple[str, ...]:
    """The links of the way through the named switches; where several links join two nodes, the name of one of them may stand
    for the switch behind it, and otherwise the first in the file is taken.

    Raises:
        LookupError: it is no way from the start to the end; the error says why.
    """
    at, links = start, []
    for name in (*names, end):
        if name == at and name == end:
            break
        if name not in cluster.switch and name != end and name in cluster.link:
            link = cluster.link[name]
            if at not in (each.node for each in link.ends):
                raise LookupError(f"link {name} does not begin at {at}")
        else:
            if name != end and name not in cluster.switch:
                raise LookupError(f"there is no switch or link {name}")
            found = next((each for each in cluster.links_of[at] if other(each, at) == name), None)
            if found is None:
                raise LookupError(f"no link leads from {at} to {name}")
            link = found
        links.append(link.name)
        at = other(link, at)
        if at == end:
            if name != end and name != names[-1]:
                raise LookupError(f"it comes to {end} before its end")
            break
    walk(cluster, start, end, links)
    return tuple(links)


def written(cluster: Cluster, start: str, links: Sequence[str]) -> tuple[str, ...]:
    """What `through` reads as these links."""
    at, names = start, []
    for place, name in enumerate(links):
        after = other(cluster.link[name], at)
        first = next(each.name for each in cluster.links_of[at] if other(each, at) == after)
        if first != name:
            if name in cluster.switch:
                raise ConfigError(
                    f"link {name} has the name of a switch, and a route needs to name it: give it another `name:`"
                )
            names.append(name)
        elif place < len(links) - 1:
            names.append(after)
        at = after
    return tuple(names)


def other(link: Link, node: str) -> str:
    return link.ends[1].node if link.ends[0].node == node else link.ends[0].node


MOST_ROUTES = 16
"""Routes between two nodes that are considered. A fat-tree of 8 ports has as many shortest ones between its pods."""
LONGER = 1
"""A detour of one link helps where the ways to a node differ by one, as in a ring of three switches; in a tree, a leaf-spine
network or a fat-tree there is none."""
# So many times as many routes are looked at as are taken.
_LOOKED_AT = 4
