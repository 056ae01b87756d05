"""The rate of the link when raw sockets do nothing but move bytes, both ways at once: the basis of predictions."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from penstock.tools.bench import machine
from penstock.tools.bench.mesh import Mesh
from penstock.tools.demo.training import RANKS, Bed


@dataclass(frozen=True)
class Carriage:
    """What moving bytes over the link gives and takes."""

    bytes_per_s: float  # that each of two hosts sends to the other, both at once
    processor_s_per_byte: float  # of this machine's processors together, for each byte that each host sends


def exchange(bed: Bed, flows: int, nbytes: int) -> Carriage:
    """Exchange bytes between two hosts over ``flows`` TCP connections.

    The median of `REPEATS` exchanges of ``nbytes`` each way, after some that let the connections find their speed. A
    connection that has room takes the next bytes, and the exchange ends with the last of them. The processors' time is
    that of the whole machine meanwhile: sockets, kernel, and what emulates the link.

    Raises: OSError, when a connection fails or stalls. Blocks; everything is closed on return.
    """
    meshes = [bed.inside(rank, functools.partial(Mesh, rank, RANKS, bed.address(rank))) for rank in range(RANKS)]
    addresses = [mesh.address for mesh in meshes]

    def run(rank: int, result: Connection) -> None:
        # A Ctrl-C at a terminal comes here as well; the demo says what there is to say.
        for number in _ENDING:
            signal.signal(number, signal.SIG_DFL)
        seconds = []
        try:
            bed.inside(rank, lambda: meshes[rank].connect(addresses, flows))
            for repeat in range(WARM_UP + REPEATS):
                transfer = meshes[rank].transfer({(0, 1): nbytes, (1, 0): nbytes}, flows, "pull")
                meshes[rank].barrier()
                if repeat == WARM_UP:
                    busy_before = machine.processor_ticks()[0]
                began = time.perf_counter()
                transfer.run()
                seconds.append(time.perf_counter() - began)
            meshes[rank].barrier()
            result.send((seconds[WARM_UP:], machine.processor_ticks()[0] - busy_before))
        except OSError as error:
            result.send(error)

    # A process a rank: two threads would wait for each other's interpreter. Forked, to inherit the listening sockets.
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(RANKS)]
    processes = [context.Process(target=run, args=(rank, pipes[rank][1]), daemon=True) for rank in range(RANKS)]
    try:
        for process, (_, result) in zip(processes, pipes, strict=True):
            with _deferred_signals():
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
    seconds, ticks = zip(*answers, strict=True)
    return carriage(seconds, ticks[0] / os.sysconf("SC_CLK_TCK"), nbytes)


@contextlib.contextmanager
def _deferred_signals() -> Iterator[None]:
    """Signals that would end the demo count when the block is over. What their handlers raise in Python's own hooks of a fork is
    printed and lost (`os.register_at_fork`), and the demo would go on."""
    came: list[int] = []
    handlers = {number: signal.signal(number, lambda number, _: came.append(number)) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for one in came:
            signal.raise_signal(one)


_ENDING = (signal.SIGINT, signal.SIGTERM)


def carriage(seconds: Sequence[Sequence[float]], processor_s: float, nbytes: int) -> Carriage:
    """What exchanges of ``nbytes`` each way came to. Pure.

    Args:
        seconds: of each host, how long each exchange took it; one is over when both have ended it.
        processor_s: of all processors, for all of these exchanges.
    """
    exchanges = list(zip(*seconds, strict=True))
    return Carriage(
        bytes_per_s=statistics.median(nbytes / max(both) for both in exchanges),
        processor_s_per_byte=processor_s / (len(exchanges) * nbytes),
    )


WARM_UP = 3
"""Measured on the demo's link: new connections carry up to a fifth less in their first exchange, and no less from the
second on. Two more are a margin."""

REPEATS = 11
"""Single exchanges are held up by what else the processors do; the median of 11 passes over 5 of them. Over one flow, the
slowest case, they take 5 s (measured)."""
