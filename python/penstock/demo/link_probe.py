"""What the link carries when raw sockets do nothing but move bytes, both ways at once: the rate that predictions use."""

from __future__ import annotations

import functools
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

from penstock.bench.mesh import Mesh
from penstock.demo.training import RANKS, Bed


def exchange_rate(bed: Bed, flows: int, nbytes: int) -> float:
    """Bytes per second that each of two hosts sends to the other over ``flows`` TCP connections.

    The median of `REPEATS` exchanges of ``nbytes`` each way, after one that lets the connections find their speed.
    Every connection is kept busy until the last byte is in, so this is what the flows can carry and not how well
    somebody divides the work among them.

    Raises: OSError, when a connection fails or stalls. Blocks; everything is closed on return.
    """
    meshes = [bed.inside(rank, functools.partial(Mesh, rank, RANKS, bed.address(rank))) for rank in range(RANKS)]
    addresses = [mesh.address for mesh in meshes]
    traffic = {(0, 1): nbytes, (1, 0): nbytes}

    def connect(rank: int) -> None:
        bed.inside(rank, lambda: meshes[rank].connect(addresses, flows))

    def exchange(rank: int) -> float:
        transfer = meshes[rank].transfer(traffic, flows, "saturate")
        meshes[rank].barrier()
        began = time.perf_counter()
        transfer.run()
        seconds = time.perf_counter() - began
        transfer.drain()
        return seconds

    try:
        with ThreadPoolExecutor(RANKS) as pool:
            list(pool.map(connect, range(RANKS)))
            rates = [nbytes / max(pool.map(exchange, range(RANKS))) for _ in range(1 + REPEATS)]
    finally:
        for mesh in meshes:
            mesh.close()
    return statistics.median(rates[1:])


REPEATS = 3
