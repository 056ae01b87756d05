"""Pairs of ranks, one at a time: what Penstock and raw sockets carry between them."""

from __future__ import annotations

import itertools
import socket
import statistics
import time
from collections.abc import Iterator
from typing import Any

from penstock.addresses import split
from penstock.runtime import config
from penstock.tools.bench.mesh import STALL_S, Mesh

__all__ = ["REPEATS", "WARM_UP", "exchange", "host_of", "partners", "raw_rate"]


def partners(dist: Any) -> Iterator[int]:
    """The ranks that make a pair with this one, one pair of the group at a time: so a pair's rate is its own. Collective."""
    rank = dist.get_rank()
    for pair in itertools.combinations(range(dist.get_world_size()), 2):
        dist.barrier()
        if rank in pair:
            yield pair[0] if rank == pair[1] else pair[1]


def host_of(peer: dict[str, Any]) -> str:
    """A peer's address without its port."""
    return split(peer["address"])[0]


def exchange(dist: Any, sent: Any, received: Any, other: int) -> float:
    """Both directions at once; the seconds that it took."""
    started = time.perf_counter()
    sending = dist.isend(sent, other)
    receiving = dist.irecv(received, other)
    sending.wait()
    receiving.wait()
    return time.perf_counter() - started


def raw_rate(dist: Any, size: int, other: int, host: str, streams: int) -> tuple[float, int]:
    """Bytes per second each way that plain TCP sockets carry to another rank, and how many sockets: ``streams``, or the other
    rank's number if that is lower.

    Raises: OSError, where they cannot connect (only the ports of PENSTOCK_PORT_RANGE may be open) or stall. The other rank then
    has the same.
    """
    rank = dist.get_rank()
    mesh, trouble = None, "the other rank cannot listen"
    try:
        # The route to the other rank's address says which of our own addresses it reaches.
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            mesh = Mesh(int(rank > other), 2, probe.getsockname()[0], config.read().port_range)
    except OSError as error:
        trouble = str(error)
    try:
        own: list[Any] = [mesh and mesh.address, streams]
        theirs: list[Any] = [None, None]
        if rank < other:
            dist.send_object_list(own, other)
            dist.recv_object_list(theirs, other)
        else:
            dist.recv_object_list(theirs, other)
            dist.send_object_list(own, other)
        if mesh is None or theirs[0] is None:
            raise OSError(trouble)
        flows = min(own[1], theirs[1])
        mesh.connect([own[0], theirs[0]] if rank < other else [theirs[0], own[0]], flows)
        # A host that vanishes says nothing.
        mesh.pairs[int(rank < other)].control.settimeout(STALL_S)
        seconds = []
        for _ in range(WARM_UP + REPEATS):
            transfer = mesh.transfer({(0, 1): size, (1, 0): size}, flows, "pull")
            mesh.barrier()
            started = time.perf_counter()
            transfer.run()
            seconds.append(time.perf_counter() - started)
        mesh.barrier()
        return size / statistics.median(seconds[WARM_UP:]), flows
    finally:
        if mesh is not None:
            mesh.close()


# The first exchange touches fresh pages and finds the streams' rates; a single one may meet whatever else the machine does.
WARM_UP, REPEATS = 2, 7
