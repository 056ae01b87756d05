"""A process of `penstock bench endpoints`: rank 0 is the server, the others are its clients. All have raw sockets, too.

Standard output takes one JSON object a line.
"""

from __future__ import annotations

import json
import queue
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from penstock.tools.bench.mesh import Mesh
from penstock.tools.bench.program import say
from penstock.torch import endpoint


def main() -> None:
    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    # Only to find each other: what is measured goes over endpoints and over sockets of this program's own.
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = Mesh(rank, world, options["addresses"][rank])
    addresses: list[Any] = [None] * world
    dist.all_gather_object(addresses, mesh.address)
    mesh.connect(addresses, options["streams"])
    side = _Server(options["bytes"], world) if rank == 0 else _Worker(options["bytes"], rank)
    # The first turn warms everything up: connections, the kernel's estimates, memory.
    for turn in range(-1, options["turns"]):
        for way in options["ways"]:
            for carrier in options["carriers"]:
                if carrier == "penstock":
                    side.prepare(way, turn)
                    run, done = side.run, side.check
                else:
                    run, done = _sockets(mesh, way, options["bytes"], options["streams"], carrier == "kept full")
                mesh.barrier()
                began = time.perf_counter()
                run()
                seconds = time.perf_counter() - began
                mesh.barrier()
                done()
                if turn >= 0:
                    say(way=way, carrier=carrier, turn=turn, seconds=seconds)
    mesh.barrier()
    side.close()
    mesh.close()
    dist.destroy_process_group()


class _Server:
    """Serves every worker's push and pull; its own part of a turn takes no time."""

    def __init__(self, nbytes: int, world: int) -> None:
        self._pattern = _Pattern(nbytes)
        self._way, self._turn = "", 0
        self._taken: queue.SimpleQueue[tuple[int, npt.NDArray[np.uint8]]] = queue.SimpleQueue()
        self._workers = range(1, world)
        self._server = endpoint.serve(
            "bench",
            pushes={str(rank): self._take for rank in self._workers},
            pulls={"data": lambda call: self._pattern.of(0, self._turn)},
        )

    def _take(self, call: endpoint.Incoming) -> None:
        self._taken.put((int(call.name), call.data))

    def prepare(self, way: str, turn: int) -> None:
        self._way, self._turn = way, turn

    def run(self) -> None:
        pass

    def check(self) -> None:
        """What has come in this turn: every worker's, once."""
        expected = set(self._workers) if self._way != "pull" else set()
        while expected:
            rank, data = self._taken.get_nowait()
            expected.remove(rank)
            self._pattern.check(data, rank, self._turn, f"the push of worker {rank}")
        assert self._taken.empty(), "a push has come twice"

    def close(self) -> None:
        self._server.close()


class _Worker:
    """Pushes its own bytes, and pulls the server's into the same memory in each turn."""

    def __init__(self, nbytes: int, rank: int) -> None:
        self._pattern, self._rank = _Pattern(nbytes), rank
        self._client = endpoint.connect("bench")
        self._place = np.zeros(nbytes, np.uint8)
        self._way, self._turn = "", 0

    def prepare(self, way: str, turn: int) -> None:
        self._way, self._turn = way, turn
        self._data = self._pattern.of(self._rank, turn)

    def run(self) -> None:
        works = []
        if self._way != "pull":
            works.append(self._client.push(str(self._rank), self._data))
        if self._way != "push":
            works.append(self._client.pull("data", into=self._place))
        for work in works:
            work.wait()

    def check(self) -> None:
        if self._way != "push":
            self._pattern.check(self._place, 0, self._turn, f"what worker {self._rank} has pulled")

    def close(self) -> None:
        self._client.close()


class _Pattern:
    """Bytes that differ from rank to rank and from turn to turn, without a pass over memory to make them."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._bytes = np.random.default_rng(_SEED).integers(0, 256, nbytes + _PERIOD, np.uint8)

    def of(self, rank: int, turn: int) -> npt.NDArray[np.uint8]:
        begin = (rank * 10_007 + turn) % _PERIOD
        return self._bytes[begin : begin + self._nbytes]

    def check(self, found: npt.NDArray[np.uint8], rank: int, turn: int, what: str) -> None:
        assert np.array_equal(found, self.of(rank, turn)), f"{what} in turn {turn} has wrong bytes"


def _sockets(
    mesh: Mesh, way: str, nbytes: int, streams: int, is_kept_full: bool
) -> tuple[Callable[[], None], Callable[[], None]]:
    """The same bytes over raw sockets: what to run, and what to do after it."""
    traffic = {}
    for rank in range(1, mesh.ranks):
        if way != "pull":
            traffic[rank, 0] = nbytes
        if way != "push":
            traffic[0, rank] = nbytes
    transfer = mesh.transfer(traffic, streams, "saturate" if is_kept_full else "pull")
    return transfer.run, transfer.drain


_SEED = 1
# Bytes between the first and the last pattern of a run at most.
_PERIOD = 1 << 20

if __name__ == "__main__":
    main()
