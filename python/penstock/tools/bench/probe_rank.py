"""A rank of a probe: what raw sockets, or memory, could do in the place of a collective (docs/design/bench.md, "The limit")."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.tools.bench.collectives import COLLECTIVES, MemoryShare
from penstock.tools.bench.mesh import Mesh
from penstock.tools.bench.task import Task


class SocketRunner:
    """Moves the bytes that the collective's plan puts between ranks over raw sockets, all directions at once."""

    def __init__(self, rank: int, ranks: int, host: str, flows: int):
        self._mesh = Mesh(rank, ranks, host)
        self._flows = flows
        self._ranks = ranks

    def hello(self) -> dict[str, Any]:
        return {"address": self._mesh.address}

    def connect(self, peers: list[dict[str, Any]]) -> None:
        self._mesh.connect([peer["address"] for peer in peers], self._flows)

    def prepare(self, task: Task) -> None:
        self._task = task
        traffic = COLLECTIVES[task.collective].traffic(self._ranks, task.nbytes)
        # All operations of a block as one transfer: a bound does not wait between them.
        self._traffic = {pair: nbytes * task.slots for pair, nbytes in traffic.items()}

    def fill(self) -> None:
        self._transfer = self._mesh.transfer(self._traffic, self._task.flows, self._task.split)

    def barrier(self) -> None:
        self._mesh.barrier()

    def operate(self) -> None:
        self._transfer.run()

    def finish(self) -> None:
        self._transfer.drain()

    def release(self) -> None:
        pass

    def leave(self) -> None:
        self._mesh.close()

    def memory(self) -> dict[str, int]:
        return {}


class CopyRunner:
    """Touches the memory that the collective must touch if all tensors lay in one memory, and does nothing else.

    For each piece that the rank must reduce, every source is copied onto one destination that stays in cache: the sources
    are read from memory once and the result is written once, as a reduction would, without the arithmetic. Then comes what
    the rank must collect, copied once. All of it is the rank's own memory: a bound knows no sharing, no waiting.
    """

    def __init__(self, rank: int, ranks: int, host: str):
        self._mesh = Mesh(rank, ranks, host)
        self._rank = rank
        self._ranks = ranks

    def hello(self) -> dict[str, Any]:
        return {"address": self._mesh.address}

    def connect(self, peers: list[dict[str, Any]]) -> None:
        self._mesh.connect([peer["address"] for peer in peers], 0)

    def prepare(self, task: Task) -> None:
        share = COLLECTIVES[task.collective].memory(self._ranks, task.nbytes)[self._rank]
        self._slots = [_Slot(share) for _ in range(task.slots)]

    def fill(self) -> None:
        pass

    def barrier(self) -> None:
        self._mesh.barrier()

    def operate(self) -> None:
        for slot in self._slots:
            slot.copy()

    def finish(self) -> None:
        pass

    def release(self) -> None:
        self._slots = []

    def leave(self) -> None:
        self._mesh.close()

    def memory(self) -> dict[str, int]:
        return {}


class _Slot:
    """The memory of one operation on one rank."""

    def __init__(self, share: MemoryShare):
        # Written once here, or all pages would be the kernel's one page of zeros.
        self.sources = [np.ones(share.reduced, np.uint8) for _ in range(share.sources)]
        self.elsewhere = np.ones(share.collected, np.uint8)
        self.result = np.ones(share.reduced + share.collected, np.uint8)

    def copy(self) -> None:
        reduced = len(self.result) - len(self.elsewhere)
        for begin in range(0, reduced, PIECE_BYTES):
            end = min(begin + PIECE_BYTES, reduced)
            for source in self.sources:
                np.copyto(self.result[begin:end], source[begin:end])
        np.copyto(self.result[reduced:], self.elsewhere)


PIECE_BYTES = 256 << 10
"""A destination of this size stays in the second-level cache while its sources pass. A numpy call costs 1 µs, copying 20."""
