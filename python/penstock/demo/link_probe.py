"""What the link carries when raw sockets do nothing but move bytes, both ways at once: the rate that predictions use."""

from __future__ import annotations

import functools
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection

from penstock.bench.mesh import Mesh
from penstock.demo.training import RANKS, Bed


def exchange_rate(bed: Bed, flows: int, nbytes: int) -> float:
    """Bytes per second that each of two hosts sends to the other over ``flows`` TCP connections.

    The median of `REPEATS` exchanges of ``nbytes`` each way, after some that let the connections find their speed, with
    `PAUSE_S` of silence before each, as a step's computation leaves it: what TCP needs to get going again counts. A
    connection that has room takes the next bytes, and the exchange ends with the last of them.

    Raises: OSError, when a connection fails or stalls. Blocks; everything is closed on return.
    """
    meshes = [bed.inside(rank, functools.partial(Mesh, rank, RANKS, bed.address(rank))) for rank in range(RANKS)]
    addresses = [mesh.address for mesh in meshes]

    def exchange(rank: int, result: Connection) -> None:
        seconds = []
        try:
            bed.inside(rank, lambda: meshes[rank].connect(addresses, flows))
            for _ in range(WARM_UP + REPEATS):
                transfer = meshes[rank].transfer({(0, 1): nbytes, (1, 0): nbytes}, flows, "pull")
                time.sleep(PAUSE_S)
                meshes[rank].barrier()
                began = time.perf_counter()
                transfer.run()
                seconds.append(time.perf_counter() - began)
            meshes[rank].barrier()
            result.send(seconds)
        except OSError as error:
            result.send(error)

    # A process a rank: two threads would wait for each other's interpreter. Forked, to inherit the listening sockets.
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(RANKS)]
    processes = [context.Process(target=exchange, args=(rank, pipes[rank][1]), daemon=True) for rank in range(RANKS)]
    try:
        for process, (_, result) in zip(processes, pipes, strict=True):
            process.start()
            result.close()
        answers = [answer.recv() for answer, _ in pipes]
    except EOFError:
        raise OSError("a process that probed the link has died") from None
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
        for mesh in meshes:
            mesh.close()
    for answer in answers:
        if isinstance(answer, OSError):
            raise answer
    return statistics.median(nbytes / max(both) for both in list(zip(*answers, strict=True))[WARM_UP:])


WARM_UP = 3
REPEATS = 11
PAUSE_S = 0.05
