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

from penstock import _core
from penstock.runtime.endpoints import Whole
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
    side = _Server(options, world) if rank == 0 else _Worker(options["bytes"], rank, world)
    # The first turn warms everything up: connections, the kernel's estimates, memory.
    for turn in range(-1, options["turns"]):
        for way in options["ways"]:
            for carrier in options["carriers"]:
                if way == "sums" and carrier == "kept full":
                    continue  # bytes of the way up would come with those of the way down
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
    """Serves every worker's push and pull, and sums; its own part of a turn takes no time."""

    def __init__(self, options: dict[str, Any], world: int) -> None:
        self._pattern = _Pattern(options["bytes"])
        self._way, self._turn = "", 0
        self._taken: queue.SimpleQueue[tuple[int, npt.NDArray[np.uint8]]] = queue.SimpleQueue()
        self._workers = range(1, world)
        self._server = endpoint.serve(
            "bench",
            pushes={str(rank): self._take for rank in self._workers},
            pulls={"data": lambda call: self._pattern.of(0, self._turn)},
        )
        self._daemon: _core.Daemon | None = None
        if "sums" in options["ways"]:
            self._daemon = _summing(options["addresses"][0], options["bytes"], world - 1)
            self._server.on_push("sums/", Whole(self._daemon.stream))
            self._server.on_pull("sums/", Whole(self._daemon.stream))

    def _take(self, call: endpoint.Incoming) -> None:
        self._taken.put((int(call.name), call.data))

    def prepare(self, way: str, turn: int) -> None:
        self._way, self._turn = way, turn

    def run(self) -> None:
        pass

    def check(self) -> None:
        """What has come in this turn: every worker's, once."""
        expected = set(self._workers) if self._way in ("push", "both") else set()
        while expected:
            rank, data = self._taken.get_nowait()
            expected.remove(rank)
            self._pattern.check(data, rank, self._turn, f"the push of worker {rank}")
        assert self._taken.empty(), "a push has come twice"

    def close(self) -> None:
        self._server.close()
        self._daemon = None


class _Worker:
    """Pushes its own bytes, and pulls the server's, or the sum of all workers', into the same memory in each turn."""

    def __init__(self, nbytes: int, rank: int, world: int) -> None:
        self._pattern, self._rank, self._world = _Pattern(nbytes), rank, world
        self._client = endpoint.connect("bench")
        self._place = np.zeros(nbytes, np.uint8)
        self._way, self._turn = "", 0
        self._buffers = 0
        """How many this worker has pushed to be summed."""

    def prepare(self, way: str, turn: int) -> None:
        self._way, self._turn = way, turn
        if way == "sums":
            self._numbers = _numbers(self._place.nbytes, self._rank, turn)
        else:
            self._data = self._pattern.of(self._rank, turn)

    def run(self) -> None:
        works: list[endpoint.Work] = []
        if self._way == "sums":
            name = f"sums/1/1/{self._rank - 1}/{self._buffers}"
            works.append(self._client.push(f"{name}/f32", self._numbers))
            # All sums before this one are here.
            works.append(
                self._client.pull(f"{name}/{self._buffers}", into=self._place[: self._numbers.nbytes].view(np.float32))
            )
            self._buffers += 1
            for work in works:
                work.wait()
            return
        if self._way != "pull":
            works.append(self._client.push(str(self._rank), self._data))
        if self._way != "push":
            works.append(self._client.pull("data", into=self._place))
        for work in works:
            work.wait()

    def check(self) -> None:
        if self._way == "sums":
            total = sum(_numbers(self._place.nbytes, rank, self._turn) for rank in range(1, self._world))
            found = self._place[: self._numbers.nbytes].view(np.float32)
            assert np.array_equal(found, total), f"worker {self._rank} has a wrong sum in turn {self._turn}"
        elif self._way != "push":
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
    up = {(rank, 0): nbytes for rank in range(1, mesh.ranks)}
    down = {(0, rank): nbytes for rank in range(1, mesh.ranks)}
    # A sum comes back when all of it is there.
    parts = {"push": [up], "pull": [down], "both": [{**up, **down}], "sums": [up, down]}[way]
    transfers = [mesh.transfer(part, streams, "saturate" if is_kept_full else "pull") for part in parts]

    def run() -> None:
        for transfer in transfers:
            transfer.run()

    def done() -> None:
        for transfer in transfers:
            transfer.drain()

    return run, done


def _summing(address: str, nbytes: int, workers: int) -> _core.Daemon:
    """A server of sums, with job 1 open for workers behind streams."""
    listen = f"[{address}]:0" if ":" in address else f"{address}:0"
    pending = _KEPT * max(nbytes, _WINDOW * _BLOCK_BYTES)
    memory = 4 * (workers + 2) * pending
    daemon = _core.Daemon("server", {"listen": listen, "memory": str(memory)}, secret=None)
    body = {
        "epoch": 1,
        "key": None,
        "window": _WINDOW,
        "block_bytes": _BLOCK_BYTES,
        "floats": True,
        "start": 0,
        "names": "children",
        "done": "buffer",
        "pending_bytes": pending,
        "tree": [{"worker": worker} for worker in range(workers)],
        "workers": ["stream"] * workers,
    }
    status, told = daemon.answer("PUT", "/jobs/1", json.dumps(body).encode())
    assert status == 201, told
    return daemon


def _numbers(nbytes: int, rank: int, turn: int) -> npt.NDArray[np.float32]:
    """What a worker pushes to be summed: whole numbers, whose sums are exact."""
    return np.arange(nbytes // 4, dtype=np.float32) % 1000 + np.float32(7 * rank + turn)


_SEED = 1
# As jobs of ranks have them.
_WINDOW, _BLOCK_BYTES = 256, 8896
# How many buffers the server of sums has room for: that of this turn, and that of the turn before, which nobody has acknowledged.
_KEPT = 4
# Bytes between the first and the last pattern of a run at most.
_PERIOD = 1 << 20

if __name__ == "__main__":
    main()
