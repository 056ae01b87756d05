"""A scheme as a deployment file (docs/reference/deployment.md), which runs as it is, and the way back."""

from __future__ import annotations

import json
from collections.abc import Mapping

from penstock.cluster.deployment import Aggregator as Node
from penstock.cluster.deployment import Deployment
from penstock.cluster.network import Cluster, Job
from penstock.cluster.routes import written
from penstock.errors import Config as ConfigError
from penstock.planning.scheme import Child, Places, Scheme

__all__ = ["deployment", "scheme_in"]


def deployment(cluster: Cluster, job: Job, scheme: Scheme, path: str, said: Mapping[str, str] | None = None) -> str:
    """The text of the file. ``path``: of the cluster file, from the deployment's folder on; ``said``: what a comment says of it.

    Raises:
        penstock.errors.Config: an aggregator is a switch, whose command only its owner knows.
    """
    for server, places in scheme.via.items():
        for name in dict.fromkeys([*places, *scheme.above.get(server, {}).values()]):
            if name is not None and cluster.aggregator[name].at in cluster.switch:
                raise ConfigError(
                    f"aggregator {name} is a switch, and a deployment needs the command that opens jobs on it: write the file by "
                    "hand (docs/guide/switch.md)"
                )
    lines = [f"# {key}: {value}" for key, value in (said or {}).items()]
    lines += [
        "version: 2",
        f"cluster: {json.dumps(path, ensure_ascii=False)}",
        *([f"job: {job.name}"] if len(cluster.jobs) > 1 else []),
    ]
    lines += ["aggregated:", "  servers:"]
    parts = _whole(scheme.fractions)
    for server, places in scheme.via.items():
        lines.append(f"    - server: {server}")
        lines.append(f"      fraction: {parts[server] / _PARTS:.6f}")
        above = scheme.above.get(server, {})
        used = dict.fromkeys([*(place for place in places if place is not None), *above.values()])
        if used:
            lines.append("      tree:")
        for name in used:
            if name not in above:
                lines += _node(job, places, above, name, "        ")
        routes = _grouped(cluster, job, scheme, server)
        if routes:
            lines.append("      routes:")
        for through, (ranks, names) in routes.items():
            children = [f"workers: [{', '.join(_names(job, ranks))}]"] if ranks else []
            children += [f"aggregators: [{', '.join(names)}]"] if names else []
            lines.append(f"        - {{{', '.join(children)}, through: [{', '.join(map(_quoted, through))}]}}")
    return "\n".join(lines) + "\n"


def scheme_in(cluster: Cluster, job: Job, deployment: Deployment) -> Scheme:
    """What a deployment says, by the names of its cluster file.

    Raises:
        penstock.errors.Config: it names addresses that the file does not have.
    """
    aggregators = {cluster.address(each): each.name for each in cluster.aggregators}
    servers = {cluster.address(each): each.name for each in cluster.servers}

    def name(address: str, known: Mapping[str | None, str]) -> str:
        if address not in known:
            raise ConfigError(f"{deployment.name}: nothing in the cluster file listens at {address}")
        return known[address]

    fractions: dict[str, float] = {}
    via: dict[str, Places] = {}
    above: dict[str, dict[str, str]] = {}
    routes: dict[str, dict[Child, tuple[str, ...]]] = {}
    total = sum(server.fraction for server in deployment.servers)
    for server in deployment.servers:
        own = name(server.address, servers)
        fractions[own] = server.fraction / total
        via[own] = tuple(
            None if (parent := server.parent(rank)) is None else name(parent, aggregators)
            for rank in range(len(job.workers))
        )
        above[own] = {
            name(child.address, aggregators): name(one.address, aggregators)
            for one in server.aggregators
            for child in one.children
            if isinstance(child, Node)
        }
        routes[own] = {
            child if isinstance(child, int) else name(child, aggregators): links for child, links in server.routes
        }
    return Scheme(fractions, via, above, routes)


def _node(job: Job, places: Places, above: Mapping[str, str], name: str, indent: str) -> list[str]:
    lines = [f"{indent}- aggregator: {name}"]
    ranks = [rank for rank, place in enumerate(places) if place == name]
    if ranks:
        lines.append(f"{indent}  workers: [{', '.join(_names(job, ranks))}]")
    below = [child for child, parent in above.items() if parent == name]
    if below:
        lines.append(f"{indent}  children:")
    for child in below:
        lines += _node(job, places, above, child, f"{indent}    ")
    return lines


def _grouped(
    cluster: Cluster, job: Job, scheme: Scheme, server: str
) -> dict[tuple[str, ...], tuple[list[int], list[str]]]:
    """Who takes which route, of those that have one to choose."""
    found: dict[tuple[str, ...], tuple[list[int], list[str]]] = {}
    for child, links in scheme.routes.get(server, {}).items():
        start = job.workers[child] if isinstance(child, int) else cluster.aggregator[child].at
        through = written(cluster, start, links)
        if not through:
            # A cable from host to host, the first in the file, as without a route.
            continue
        ranks, names = found.setdefault(through, ([], []))
        if isinstance(child, int):
            ranks.append(child)
        else:
            names.append(child)
    return found


def _whole(fractions: Mapping[str, float]) -> dict[str, int]:
    """Millionths that add up to a million: the largest remainders get what rounding leaves."""
    parts = {server: int(part * _PARTS) for server, part in fractions.items()}
    by_rest = sorted(fractions, key=lambda server: parts[server] - fractions[server] * _PARTS)
    for server in by_rest[: _PARTS - sum(parts.values())]:
        parts[server] += 1
    return parts


def _names(job: Job, ranks: list[int]) -> list[str]:
    """Hosts, for all of a host's ranks; other ranks by their numbers."""
    chosen, names = set(ranks), []
    of_host: dict[str, list[int]] = {}
    for rank, host in enumerate(job.workers):
        of_host.setdefault(host, []).append(rank)
    for rank in sorted(ranks):
        host = job.workers[rank]
        if not chosen.issuperset(of_host[host]):
            names.append(str(rank))
        elif rank == of_host[host][0]:
            names.append(host)
    return names


def _quoted(name: str) -> str:
    return json.dumps(name) if ":" in name else name


_PARTS = 1_000_000
