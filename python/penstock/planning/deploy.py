"""A scheme as a deployment file (docs/reference/deployment.md), which runs as it is."""

from __future__ import annotations

import json
from collections.abc import Mapping

from penstock.cluster.network import Cluster, Job
from penstock.errors import Config as ConfigError
from penstock.planning.scheme import Scheme

__all__ = ["deployment"]


def deployment(cluster: Cluster, job: Job, scheme: Scheme, path: str, said: Mapping[str, str] | None = None) -> str:
    """The text of the file. ``path``: of the cluster file, from the deployment's folder on; ``said``: what a comment says of it.

    Raises:
        penstock.errors.Config: an aggregator is a switch, whose command only its owner knows.
    """
    for places in scheme.via.values():
        for name in dict.fromkeys(place for place in places if place is not None):
            if cluster.aggregator[name].at in cluster.switch:
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
        used = dict.fromkeys(place for place in places if place is not None)
        if used:
            lines.append("      tree:")
        for name in used:
            ranks = [rank for rank, place in enumerate(places) if place == name]
            lines.append(f"        - aggregator: {name}")
            lines.append(f"          workers: [{', '.join(_names(job, ranks))}]")
    return "\n".join(lines) + "\n"


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
    for rank in ranks:
        host = job.workers[rank]
        all_of_host = [other for other, name in enumerate(job.workers) if name == host]
        if not chosen.issuperset(all_of_host):
            names.append(str(rank))
        elif host not in names:
            names.append(host)
    return names


_PARTS = 1_000_000
