"""What each collective is, as the bench sees it: pure functions of (ranks, bytes), no I/O, no torch.

From one description come the tensors that a rank needs, the values that it must find in them afterwards, the bytes that
the plan puts between ranks (which the raw sockets move, and the interface counters are held against), the memory that
shared memory must touch, and the factor from algbw to busbw.

Sizes follow nccl-tests (its ``doc/PERFORMANCE.md``): S is the whole vector, so a rank of an all-gather gives S/n bytes and
receives S. GB means 1e9 bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock import _core

ROOT = 0
"""The root of broadcast, reduce, gather and scatter."""

PERIOD = 13
"""Values repeat after this many elements. A prime beyond the usual numbers of ranks divides neither frames and segments, which
are powers of two, nor chunks, which are such powers over the ranks: bytes at a wrong multiple of one of them are seen."""


@dataclass(frozen=True)
class Run:
    """``count`` neighbouring elements; element j is ``(origin + j) % PERIOD + 1`` times ``weight``.

    Rank r puts in the weight 2**r, so that a wrong sum names the ranks that are missing from it or counted twice.
    """

    origin: int
    count: int
    weight: int


@dataclass(frozen=True)
class Layout:
    """One rank's tensors: what it puts in, and what it must find afterwards.

    ``source`` is None for a rank that gives nothing. ``result`` is None where nothing is promised (a reduce leaves the
    tensors of all but the root undefined). With ``in_place`` the result replaces the source.
    """

    source: Run | None
    result: tuple[Run, ...] | None
    in_place: bool = False


@dataclass(frozen=True)
class MemoryShare:
    """What one rank must touch when all tensors lie in one memory: it reads ``sources`` pieces of ``reduced`` bytes and
    writes their sum once; it reads and writes ``collected`` bytes that are ready elsewhere."""

    sources: int
    reduced: int
    collected: int


@dataclass(frozen=True)
class Collective:
    """A collective by its name on the command line."""

    name: str
    summary: str
    bus_factor: Callable[[int], float]
    """busbw = algbw * bus_factor(ranks); zero where bytes mean nothing (barrier)."""
    layout: Callable[[int, int, int], Layout]
    """(rank, ranks, elements) -> Layout"""
    traffic: Callable[[int, int], dict[tuple[int, int], int]]
    """(ranks, bytes) -> bytes from rank to rank, by the engine's plan for large messages between hosts"""
    memory: Callable[[int, int], list[MemoryShare]]
    """(ranks, bytes) -> what each rank must touch"""
    by_rank: bool = False
    """The vector falls into one equal part a rank, so its length is a multiple of the ranks."""

    def elements(self, nbytes: int, ranks: int, element_bytes: int) -> int:
        """The number of elements that stands for a size of ``nbytes``: rounded down to what divides, never below one."""
        unit = ranks if self.by_rank else 1
        return max(nbytes // element_bytes // unit, 1) * unit


def largest_value(ranks: int) -> int:
    """The largest number in any tensor; a dtype must hold every whole number up to it for the check to be exact."""
    return PERIOD * _all(ranks)


def most_ranks(dtype: str) -> int:
    """Of so many ranks the check of sums is exact."""
    ranks = 1
    while largest_value(ranks + 1) <= 1 << EXACT_BITS[dtype]:
        ranks += 1
    return ranks


EXACT_BITS = {"float32": 24, "float64": 53, "float16": 11, "bfloat16": 8, "int32": 31, "int64": 63}
"""All whole numbers of so many bits are exact in a dtype."""


def _all(ranks: int) -> int:
    """The weight of a sum over all ranks."""
    return (1 << ranks) - 1


def _all_reduce_layout(rank: int, ranks: int, elements: int) -> Layout:
    return Layout(Run(0, elements, 1 << rank), (Run(0, elements, _all(ranks)),), in_place=True)


def _reduce_scatter_layout(rank: int, ranks: int, elements: int) -> Layout:
    part = elements // ranks
    return Layout(Run(0, elements, 1 << rank), (Run(rank * part, part, _all(ranks)),))


def _all_gather_layout(rank: int, ranks: int, elements: int) -> Layout:
    part = elements // ranks
    return Layout(Run(rank * part, part, 1 << rank), tuple(Run(r * part, part, 1 << r) for r in range(ranks)))


def _broadcast_layout(rank: int, ranks: int, elements: int) -> Layout:
    # A rank that only receives starts from its own values, so that bytes which never arrived are seen.
    return Layout(Run(0, elements, 1 << rank), (Run(0, elements, 1 << ROOT),), in_place=True)


def _reduce_layout(rank: int, ranks: int, elements: int) -> Layout:
    result = (Run(0, elements, _all(ranks)),) if rank == ROOT else None
    return Layout(Run(0, elements, 1 << rank), result, in_place=True)


def _gather_layout(rank: int, ranks: int, elements: int) -> Layout:
    everyone = _all_gather_layout(rank, ranks, elements)
    return Layout(everyone.source, everyone.result if rank == ROOT else None)


def _scatter_layout(rank: int, ranks: int, elements: int) -> Layout:
    part = elements // ranks
    source = Run(0, elements, 1 << ROOT) if rank == ROOT else None
    return Layout(source, (Run(rank * part, part, 1 << ROOT),))


def _all_to_all_layout(rank: int, ranks: int, elements: int) -> Layout:
    part = elements // ranks
    return Layout(Run(0, elements, 1 << rank), tuple(Run(rank * part, part, 1 << r) for r in range(ranks)))


def _send_recv_layout(rank: int, ranks: int, elements: int) -> Layout:
    return Layout(Run(0, elements, 1 << rank), (Run(0, elements, 1 << ((rank - 1) % ranks)),))


def _barrier_layout(rank: int, ranks: int, elements: int) -> Layout:
    return Layout(None, None)


COLLECTIVES: dict[str, Collective] = {
    collective.name: collective
    for collective in (
        Collective(
            "all-reduce",
            "every rank ends with the sum of all vectors",
            bus_factor=lambda n: 2 * (n - 1) / n,
            layout=_all_reduce_layout,
            traffic=lambda n, s: _core.traffic("all_reduce", n, s),
            memory=lambda n, s: [MemoryShare(n, s // n, s - s // n)] * n,
        ),
        Collective(
            "reduce-scatter",
            "every rank ends with its part of the sum",
            bus_factor=lambda n: (n - 1) / n,
            layout=_reduce_scatter_layout,
            traffic=lambda n, s: _core.traffic("reduce_scatter", n, s),
            memory=lambda n, s: [MemoryShare(n, s // n, 0)] * n,
            by_rank=True,
        ),
        Collective(
            "all-gather",
            "every rank ends with the parts of all",
            bus_factor=lambda n: (n - 1) / n,
            layout=_all_gather_layout,
            traffic=lambda n, s: _core.traffic("all_gather", n, s),
            memory=lambda n, s: [MemoryShare(0, 0, s)] * n,
            by_rank=True,
        ),
        Collective(
            "broadcast",
            "every rank ends with the root's vector",
            bus_factor=lambda n: 1.0,
            layout=_broadcast_layout,
            traffic=lambda n, s: _core.traffic("broadcast", n, s),
            memory=lambda n, s: [MemoryShare(0, 0, 0 if rank == ROOT else s) for rank in range(n)],
        ),
        Collective(
            "reduce",
            "the root ends with the sum of all vectors",
            bus_factor=lambda n: 1.0,
            layout=_reduce_layout,
            traffic=lambda n, s: _core.traffic("reduce", n, s),
            memory=lambda n, s: [MemoryShare(n, s // n, s - s // n if rank == ROOT else 0) for rank in range(n)],
        ),
        Collective(
            "gather",
            "the root ends with the parts of all",
            bus_factor=lambda n: (n - 1) / n,
            layout=_gather_layout,
            traffic=lambda n, s: _core.traffic("gather", n, s // n),
            memory=lambda n, s: [MemoryShare(0, 0, s if rank == ROOT else 0) for rank in range(n)],
            by_rank=True,
        ),
        Collective(
            "scatter",
            "every rank ends with its part of the root's vector",
            bus_factor=lambda n: (n - 1) / n,
            layout=_scatter_layout,
            traffic=lambda n, s: _core.traffic("scatter", n, s // n),
            memory=lambda n, s: [MemoryShare(0, 0, s // n)] * n,
            by_rank=True,
        ),
        Collective(
            "all-to-all",
            "every rank ends with one part of each rank's vector",
            bus_factor=lambda n: (n - 1) / n,
            layout=_all_to_all_layout,
            traffic=lambda n, s: _core.traffic("all_to_all", n, s),
            memory=lambda n, s: [MemoryShare(0, 0, s)] * n,
            by_rank=True,
        ),
        Collective(
            "send-recv",
            "every rank sends its vector to the next and receives the one before",
            bus_factor=lambda n: 1.0,
            layout=_send_recv_layout,
            traffic=lambda n, s: {(rank, (rank + 1) % n): s for rank in range(n)} if n > 1 else {},
            memory=lambda n, s: [MemoryShare(0, 0, s)] * n,
        ),
        Collective(
            "barrier",
            "no rank leaves before all have come (time only: it has no bytes)",
            bus_factor=lambda n: 0.0,
            layout=_barrier_layout,
            traffic=lambda n, s: {},
            memory=lambda n, s: [MemoryShare(0, 0, 0)] * n,
        ),
    )
}
