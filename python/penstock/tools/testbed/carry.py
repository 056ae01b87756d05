"""Carries a deployment's routes out on a testbed."""

from __future__ import annotations

import functools
import json
import os
import urllib.request
from dataclasses import dataclass

from penstock.cluster import deployment as deployments
from penstock.cluster import places
from penstock.cluster.network import Job
from penstock.errors import Config as ConfigError
from penstock.planning.deploy import scheme_in
from penstock.planning.scheme import Scheme
from penstock.tools.testbed import routing
from penstock.tools.testbed.cluster import Testbed

__all__ = ["Carried", "carry", "carry_deployment"]


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
        penstock.errors.Config: it is none, or is for another cluster, or has no job. ValueError, as `carry`.
    """
    text = places.read_text(path, path)
    parsed = deployments.parse(text, path, os.path.dirname(path))
    cluster = bed.topology.cluster
    _, name = deployments.named_in(text, path)
    if name is None and len(cluster.jobs) != 1:
        raise ConfigError(
            f"{path}: choose with `job:` whose workers these are, from {', '.join(cluster.job) or 'none'}"
        )
    if name is not None and name not in cluster.job:
        raise ConfigError(f"{path}: the testbed's cluster has no job {name}: {places.nearest(name, cluster.job)}")
    job = cluster.jobs[0] if name is None else cluster.job[name]
    scheme = scheme_in(cluster, job, parsed)
    for routes in scheme.routes.values():
        for links in routes.values():
            for link in links:
                if link not in cluster.link:
                    raise ConfigError(f"{path}: a route crosses link {link}, which the testbed does not have")
    return carry(bed, job, scheme)


def _ports(bed: Testbed, job: Job, scheme: Scheme) -> dict[tuple[str, int], list[int]]:
    """By server and rank, the UDP ports of the rank in jobs that run, as the servers know them."""
    cluster = bed.topology.cluster
    found: dict[tuple[str, int], list[int]] = {}
    for name in scheme.via:
        server = cluster.server[name]
        address = cluster.address(server)
        assert address is not None, "a deployment names what has addresses"
        for workers in bed.inside(server.at, functools.partial(_workers_at, address)):
            family = 6 if address.startswith("[") else 4
            wanted = [bed.address(host, family) for host in job.workers]
            ends = [workers.get(str(rank), "").rpartition(":") for rank in range(len(wanted))]
            if len(workers) != len(wanted) or [end[0].strip("[]") for end in ends] != wanted:
                continue
            for rank, (_, _, port) in enumerate(ends):
                found.setdefault((name, rank), []).append(int(port))
    return found


def _workers_at(address: str) -> list[dict[str, str]]:
    """By job that is open at a server: its workers' addresses by rank. None where no server answers."""
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"http://{address}/jobs", timeout=_ANSWER_WITHIN_S) as answer:
            jobs = json.load(answer)["jobs"]
    except OSError:
        return []
    return [{node["workers"]: node["address"] for node in job["nodes"] if node["node"] == "worker"} for job in jobs]


_ANSWER_WITHIN_S = 5.0
