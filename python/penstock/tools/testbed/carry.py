"""Carries a deployment's routes out on a testbed."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import Any

from penstock.addresses import split
from penstock.cluster import deployment as deployments
from penstock.cluster import jobs as opened_jobs
from penstock.cluster import places
from penstock.cluster.network import Cluster, Job, Server
from penstock.errors import Config as ConfigError
from penstock.planning.deploy import scheme_in
from penstock.planning.scheme import Scheme
from penstock.tools.testbed import routing
from penstock.tools.testbed.cluster import Testbed

__all__ = ["Carried", "carry", "carry_deployment", "is_of", "jobs_at", "scheme_of_file", "workers_of"]


@dataclass(frozen=True)
class Carried:
    """What was set up."""

    flows: int
    waiting: tuple[tuple[str, str], ...]
    """Pairs of hosts between which servers' flows take several ways, and no job runs yet whose ports tell them apart."""


def carry(bed: Testbed, job: Job, scheme: Scheme) -> Carried:
    """From now on a job's datagrams take the ways of a scheme, those of jobs that run at its servers included.

    Raises: ValueError, where there is one way only.
    """
    wiring = bed.topology
    several = routing.ambiguous(wiring.cluster, job, scheme)
    ports = _ports(bed, job, scheme) if several else {}
    flows = routing.flows_of(wiring, job, scheme, ports)
    bed.route(flows)
    waiting = () if ports else tuple(sorted(several))
    return Carried(len(flows), waiting)


def carry_deployment(bed: Testbed, path: str) -> Carried:
    """`carry` of a deployment file, whose cluster has the same nodes and links as the testbed.

    Raises:
        penstock.errors.Config: as `scheme_of_file`. ValueError, as `carry`.
    """
    return carry(bed, *scheme_of_file(bed.topology.cluster, path))


def scheme_of_file(cluster: Cluster, path: str) -> tuple[Job, Scheme]:
    """What a deployment file says of a cluster.

    Raises:
        penstock.errors.Config: it is none, or is for another cluster, or has no job.
    """
    text = places.read_text(path, path)
    parsed = deployments.parse(text, path, os.path.dirname(path))
    job = deployments.job_in(cluster, text, path)
    scheme = scheme_in(cluster, job, parsed)
    for routes in scheme.routes.values():
        for links in routes.values():
            for link in links:
                if link not in cluster.link:
                    raise ConfigError(f"{path}: a route crosses link {link}, which the testbed does not have")
    return job, scheme


def jobs_at(bed: Testbed, server: Server) -> list[dict[str, Any]]:
    """The jobs that are open at a server, as `GET /jobs` tells; none where it does not answer."""
    address = bed.topology.cluster.address(server)
    assert address is not None, "a deployment names what has addresses"
    found: list[dict[str, Any]] = bed.inside(server.at, functools.partial(_jobs_at, address))
    return found


def workers_of(opened: dict[str, Any]) -> dict[str, str]:
    """By rank: the addresses of a job's workers."""
    return {node["workers"]: node["address"] for node in opened["nodes"] if node["node"] == "worker"}


def _ports(bed: Testbed, job: Job, scheme: Scheme) -> dict[tuple[str, int], list[int]]:
    """By server and rank, the UDP ports of the rank in jobs that run, as the servers know them."""
    cluster = bed.topology.cluster
    found: dict[tuple[str, int], list[int]] = {}
    for name in scheme.via:
        for opened in jobs_at(bed, cluster.server[name]):
            if is_of(bed, job, opened):
                for rank, address in workers_of(opened).items():
                    found.setdefault((name, int(rank)), []).append(int(split(address)[1]))
    return found


def is_of(bed: Testbed, job: Job, opened: dict[str, Any]) -> bool:
    """Whether what is open at a server has the workers of a job, each on its host."""
    workers = workers_of(opened)
    addresses = [split(workers.get(str(rank), ""))[0] for rank in range(len(workers))]
    family = 6 if addresses and ":" in addresses[0] else 4
    return addresses == [bed.address(host, family) for host in job.workers]


def _jobs_at(address: str) -> list[dict[str, Any]]:
    try:
        found: list[dict[str, Any]] = opened_jobs.counted(address, _ANSWER_WITHIN_S)["jobs"]
        return found
    except (OSError, ValueError):
        return []


_ANSWER_WITHIN_S = 5.0
