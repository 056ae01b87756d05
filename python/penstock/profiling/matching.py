"""Which operations that several ranks recorded are one and the same."""

from __future__ import annotations

import enum
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from penstock.profiling.record import Operation, Record

__all__ = ["Kind", "Meeting", "by_rank", "canonical", "kind", "meetings"]


class Kind(enum.Enum):
    """Who needs whose data."""

    ALL = "all_reduce, all_gather, reduce_scatter, barrier: no rank can end before each has begun"
    EXCHANGE = "all_to_all: the same, unless two ranks have nothing for each other"
    ROOTED = "broadcast, reduce, scatter, gather: the root is not recorded"
    SEND = "to one rank"
    RECEIVE = "from one rank"
    OTHER = "unknown"


@lru_cache(maxsize=1024)
def canonical(name: str) -> str:
    """The name that an operation has in records, of those that torch, NCCL, gloo and their methods, operators and kernels use."""
    plain = re.sub(r"[^a-z]", "", name.lower())
    for part, known in _NAMES:
        if part in plain:
            return known
    return re.sub(r"\W", "_", name.strip("_ ").lower())[:64] or "collective"


@lru_cache(maxsize=1024)
def kind(name: str) -> Kind:
    """Of an operation by its name: torch's, Kineto's with a backend before it, or in one word."""
    plain = name.rpartition(":")[2].lower().replace("_", "").replace("-", "").replace(" ", "")
    for starts, found in _KINDS:
        if plain.startswith(starts):
            return found
    return Kind.OTHER


@dataclass(frozen=True)
class Meeting:
    """One operation, with what each rank recorded of it."""

    step: int
    kind: Kind
    """Of a pair of a send and a receive: `Kind.SEND`; then the sender's part comes first."""
    parts: tuple[tuple[int, Operation], ...]
    """By rank."""
    is_whole: bool
    """Every rank that took part recorded it, once."""


def by_rank(records: Sequence[Record]) -> tuple[list[Record], list[str]]:
    """The records by rank, one of each, and what is wrong with the choice. A host's record, which has readings only, is no
    rank's."""
    chosen: dict[int, Record] = {}
    problems = []
    for record in sorted(records, key=_fullest_first):
        rank = record.header.rank
        if record.readings and not record.steps and not record.samples:
            continue
        if rank in chosen:
            problems.append(f"rank {rank} has several records, of which the one with the most steps counts")
        else:
            chosen[rank] = record
    return [chosen[rank] for rank in sorted(chosen)], sorted(set(problems))


def meetings(records: Sequence[Record]) -> list[Meeting]:
    """All sampled operations of the ranks (one record each), in no order that means anything. O(operations)."""
    collectives: dict[tuple[int, str, str, int], list[tuple[int, Operation]]] = {}
    pairs: dict[tuple[int, str, int | None, int | None, int], tuple[list[Operation], list[Operation]]] = {}
    groups: dict[str, set[int]] = {}
    for record in records:
        rank = record.header.rank
        for sample in record.samples:
            for operation in sample.operations:
                found = kind(operation.name)
                if found is Kind.SEND or found is Kind.RECEIVE:
                    is_send = found is Kind.SEND
                    ends = (rank, operation.peer) if is_send else (operation.peer, rank)
                    pair = pairs.setdefault((sample.step, operation.group, *ends, operation.tag), ([], []))
                    pair[0 if is_send else 1].append(operation)
                else:
                    groups.setdefault(operation.group, set()).add(rank)
                    key = (sample.step, operation.group, operation.name, operation.number)
                    collectives.setdefault(key, []).append((rank, operation))
    made = []
    for (step, group, name, _), parts in collectives.items():
        expected = max(part.ranks for _, part in parts) or len(groups[group])
        is_whole = len(parts) == expected == len({rank for rank, _ in parts})
        made.append(Meeting(step, kind(name), tuple(parts), is_whole))
    for (step, _, sender, receiver, _), both in pairs.items():
        # The first that is sent is the first that is received.
        sends, receives = (sorted(each, key=lambda one: one.issued_ns) for each in both)
        for send, receive in itertools.zip_longest(sends, receives):
            known = [(end, one) for end, one in ((sender, send), (receiver, receive)) if end is not None and one]
            made.append(Meeting(step, Kind.SEND, tuple(known), len(known) == 2))
    return made


def _fullest_first(record: Record) -> tuple[int, int, int, int]:
    header = record.header
    return header.rank, -len(record.steps), -header.wall_ns, header.pid


# Longer names before those that they begin with.
_KINDS = (
    ("allreduce", Kind.ALL),
    ("allgather", Kind.ALL),
    ("reducescatter", Kind.ALL),
    ("barrier", Kind.ALL),
    ("monitoredbarrier", Kind.ALL),
    ("alltoall", Kind.EXCHANGE),
    ("broadcast", Kind.ROOTED),
    ("reduce", Kind.ROOTED),
    ("scatter", Kind.ROOTED),
    ("gather", Kind.ROOTED),
    ("send", Kind.SEND),
    ("isend", Kind.SEND),
    ("recv", Kind.RECEIVE),
    ("irecv", Kind.RECEIVE),
)

_NAMES = (
    ("allreduce", "all_reduce"),
    ("allgather", "all_gather"),
    ("reducescatter", "reduce_scatter"),
    ("alltoall", "all_to_all"),
    ("sendrecv", "all_to_all"),  # of a kernel that no annotation explains
    ("broadcast", "broadcast"),
    ("barrier", "barrier"),
    ("gather", "gather"),
    ("scatter", "scatter"),
    ("reduce", "reduce"),
    ("send", "send"),
    ("recv", "recv"),
)
"""The first that fits."""
