"""How many bytes links carry where gradients are summed another way: host by host, or by an aggregator."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from penstock.cluster.generate import racks
from penstock.cluster.network import Job
from penstock.planning.evaluate import evaluate
from penstock.planning.scheme import Scheme
from penstock.profiling.replay import Move
from penstock.runtime.wire import sent_bytes

__all__ = ["aggregated_bytes_s", "by_host", "sizes"]


def sizes(hosts: Mapping[int, str], ranks: Sequence[int]) -> list[int]:
    """How many of these ranks each of their hosts has; a rank of which nothing is known has a host of its own."""
    where = [hosts.get(rank, f"rank {rank}") for rank in ranks]
    return [where.count(host) for host in dict.fromkeys(where)]


def by_host(move: Move, hosts: Mapping[int, str]) -> tuple[float, float]:
    """Of an all-reduce of which each host sends one sum: what a host sends to others, and a rank to those of its host."""
    each = sizes(hosts, move.ranks)
    nbytes = move.bytes / sent_bytes(1, len(move.ranks))
    return sent_bytes(1, len(each)) * nbytes, sent_bytes(1, max(each)) * nbytes


def aggregated_bytes_s(hosts: Mapping[int, str], ranks: Sequence[int], link_bytes_s: float, *, wide: float) -> float:
    """The rate at which each rank can push its gradients and pull the sums, through one aggregator to one server, by the
    planner's cost model (docs/design/planner.md).

    Args:
        link_bytes_s: what the link of each host carries, the server's too.
        wide: by how much more the aggregator's link carries.
    """
    each = sizes(hosts, ranks)
    rate = max(1, round(8 * link_bytes_s))
    cluster = racks(len(each), 1, servers=1, rate_bit_s=rate).with_link("a0", rate_bit_s=max(1, round(wide * rate)))
    workers = tuple(f"h{at}" for at, count in enumerate(each) for _ in range(count))
    job = Job(name="train", workers=workers)
    cluster = dataclasses.replace(cluster, jobs=(job,))
    return evaluate(cluster, job, Scheme({"s0": 1.0}, {"s0": ("a0",) * len(workers)})).rate / 8
