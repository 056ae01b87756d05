"""Which operations do all ranks have? Decided alike on all of them, without a master.

Horovod matches asynchronous operations by name, and ranks issue them in different orders. Underneath, a group wants its
operations in one order on all ranks. Between the two stand rounds:

```text
  submit(name, request) ──> fresh ──block()──> all-gather ──handle_round()──> agreed, in one order for all ranks
```

A round is an all-gather of one block of fixed size a rank: what is *fresh* there, that is not announced yet. All ranks read
the same blocks in the same order, so all of them hold the same table of who has what. A name that all ranks have, or all but
those that have joined, is agreed on and leaves the table; it may then be submitted again.

A rank takes part in a round while it has something that is not agreed on (`engaged`), and need not otherwise: nothing can be
agreed on without it. So a job whose ranks have nothing to say sends nothing.

Requests travel whole, not as a hash: a mismatch is to be explained on every rank in Horovod's words, a rank that has joined
makes zeros from the others' requests, and an all-gather needs all first dimensions.

A block (little endian):

```text
  0        2       3            16
  | count  | flags | padding     | count x entry, room for 16 |

  an entry:
  0         16     17   18      19       20     24     28         29        32         40          48          112
  | key     | kind | op | dtype | device | root | dims | priority | padding | prescale | postscale | 8 x extent |
```
The key is a hash of the name, with 128 bits because a collision would corrupt results. Of a shape with more than 8 dimensions
the last extent is the product of what is left out.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.runtime import urgency

__all__ = [
    "BLOCK_BYTES",
    "DTYPES",
    "Agreed",
    "Kind",
    "Negotiation",
    "Op",
    "Request",
    "Round",
]


class Kind(enum.IntEnum):
    """What an operation does; the names are those of Horovod's messages."""

    ALLREDUCE = 0
    ALLGATHER = 1
    BROADCAST = 2
    ADASUM = 4
    ALLTOALL = 5
    BARRIER = 6
    REDUCESCATTER = 7


class Op(enum.IntEnum):
    """How an operation reduces; the numbers are Horovod's."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


@dataclass(frozen=True)
class Request:
    """The operation that a rank requests under a name."""

    kind: Kind
    op: Op = Op.SUM
    dtype: str = "uint8"
    """As torch names it, without the prefix."""
    shape: tuple[int, ...] = ()
    root: int = 0
    """The rank in the process set that broadcasts."""
    on_cpu: bool = True
    prescale: float = 1.0
    postscale: float = 1.0
    priority: int = urgency.USUAL
    """Of `penstock.priority`. Ranks' may differ: each sends by its own, and what is fused follows the first rank's."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Agreed:
    """An operation that every rank executes now, or fails now with ``error``."""

    key: bytes
    requests: tuple[Request | None, ...]
    """By rank; None where it has joined."""
    error: str | None

    @property
    def request(self) -> Request:
        """One of the requests, the same one on all ranks."""
        return next(request for request in self.requests if request is not None)


@dataclass(frozen=True)
class Round:
    """The result of a round."""

    agreed: list[Agreed]
    quiet: bool
    """No rank had anything fresh: the next round is as likely to bring nothing."""
    last_joined: int | None
    """Set when all ranks have joined: the one that did so last. Nobody is joined any more."""
    stopped: list[int]
    """Ranks that take part in no further round."""


class Negotiation:
    """One rank's view of what all ranks of a process set have submitted. Thread safety is the caller's affair.

    Args:
        rank: this rank's number in the set.
        world: the set's size.
        names: turns a rank of the set into the number that messages give it.
    """

    def __init__(self, rank: int, world: int, names: Sequence[int] | None = None) -> None:
        self.rank = rank
        self.world = world
        self._names = list(range(world)) if names is None else list(names)
        # Submitted here and not agreed on: the key, and whether it was announced.
        self._pending: dict[bytes, str] = {}
        self._fresh: list[tuple[bytes, Request]] = []
        self._table: dict[bytes, dict[int, Request]] = {}
        self._joined: set[int] = set()
        self._last_joined = -1
        self._joining = False
        self._stopping = False
        self._watching = 0

    # ------------------------------------------------------------------ this rank

    def submit(self, name: str, request: Request) -> bytes:
        """Put an operation forward; its key comes back in `Round.agreed` when all ranks have it. Its name must not be pending
        (`has`)."""
        key = _key(name)
        assert key not in self._pending, f"{name} is pending; `has` tells"
        self._pending[key] = name
        self._fresh.append((key, request))
        return key

    def has(self, name: str) -> bool:
        """Whether an operation of this name was submitted here and is not agreed on."""
        return _key(name) in self._pending

    def join(self) -> None:
        """This rank has no more data: it takes part in what the others reduce, with zeros, until all have joined."""
        self._joining = True

    def stop(self) -> None:
        """This rank leaves: the others learn that in the next round."""
        self._stopping = True

    def watch(self, change: int) -> None:
        """Take part in rounds without anything to say, +1, or not any more, -1: a round fails when a rank is lost."""
        self._watching += change

    @property
    def engaged(self) -> bool:
        """Whether this rank has to take part in rounds."""
        return bool(self._pending or self._joining or self._stopping or self._watching)

    @property
    def fresh(self) -> bool:
        """Whether this rank has something that the others do not know."""
        return bool(self._fresh or self._stopping or (self._joining and self.rank not in self._joined))

    @property
    def full(self) -> bool:
        """Whether the next block has room for nothing more."""
        return self._stopping or len(self._fresh) >= _ENTRIES

    def waiting(self) -> dict[str, list[int]]:
        """The operations that are not agreed on: their names, and the ranks that are known to have them."""
        return {name: sorted(self._table.get(key, {})) for key, name in self._pending.items()}

    # ------------------------------------------------------------------ rounds

    def block(self) -> bytes:
        """What this rank says in the next round; its fresh operations are announced by it."""
        now, self._fresh = self._fresh[:_ENTRIES], self._fresh[_ENTRIES:]
        flags = _JOINED * self._joining | _STOPPING * self._stopping
        entries = b"".join(key + _encode(request) for key, request in now)
        return (_HEADER.pack(len(now), flags) + entries).ljust(BLOCK_BYTES, b"\0")

    def handle_round(self, blocks: bytes) -> Round:
        """Read all ranks' blocks, by rank."""
        quiet, stopped, newly_joined = True, [], []
        for rank in range(self.world):
            start = rank * BLOCK_BYTES
            count, flags = _HEADER.unpack_from(blocks, start)
            for index in range(count):
                at = start + _HEADER.size + index * _ENTRY_BYTES
                key, body = blocks[at : at + _KEY_BYTES], blocks[at + _KEY_BYTES : at + _ENTRY_BYTES]
                self._table.setdefault(key, {})[rank] = _decode(body)
            if flags & _STOPPING:
                stopped.append(rank)
            if flags & _JOINED and rank not in self._joined:
                newly_joined.append(rank)
            quiet = quiet and not count and not flags & _STOPPING
        self._joined.update(newly_joined)
        self._last_joined = max(newly_joined, default=self._last_joined)
        agreed = []
        for key in [key for key, have in self._table.items() if len(have.keys() | self._joined) == self.world]:
            have = self._table.pop(key)
            self._pending.pop(key, None)
            agreed.append(
                Agreed(
                    key, tuple(have.get(rank) for rank in range(self.world)), mismatch(have, self._joined, self._names)
                )
            )
        last_joined = None
        if len(self._joined) == self.world:
            last_joined, self._last_joined = self._last_joined, -1
            self._joined.clear()
            self._joining = False
        return Round(agreed, quiet and not newly_joined, last_joined, stopped)


def mismatch(have: dict[int, Request], joined: set[int], names: Sequence[int]) -> str | None:
    """Why ranks' requests of one name do not go together, in the words and the order of Horovod; None if they do."""
    requests = [have[rank] for rank in sorted(have)]
    first, others = requests[0], requests[1:]
    kind = first.kind.name
    for other in others:
        if other.dtype != first.dtype:
            return f"Mismatched data types: One rank had type {first.dtype}, but another rank had type {other.dtype}."
    for other in others:
        if other.kind != first.kind:
            return f"Mismatched operations: One rank did an {kind}, but another rank did an {other.kind.name}."
    if first.kind in (Kind.ALLREDUCE, Kind.ADASUM, Kind.BROADCAST, Kind.REDUCESCATTER):
        for other in others:
            if other.shape != first.shape:
                return (
                    f"Mismatched {kind} tensor shapes: One rank sent a tensor of shape {list(first.shape)}, but another "
                    f"rank sent a tensor of shape {list(other.shape)}."
                )
    if first.kind in (Kind.ALLREDUCE, Kind.ADASUM, Kind.REDUCESCATTER):
        for other in others:
            if (other.prescale, other.postscale) != (first.prescale, first.postscale):
                return (
                    f"Mismatched prescale and/or postscale factors: One rank sent factors ({first.prescale:g}, "
                    f"{first.postscale:g}), but another rank sent factors ({other.prescale:g}, {other.postscale:g})."
                )
    if first.kind in (Kind.ALLREDUCE, Kind.REDUCESCATTER):
        for other in others:
            if other.op != first.op:
                return (
                    f"Mismatched reduction operation: One rank sent reduction op {int(first.op)}, but another rank sent "
                    f"reduction op {int(other.op)}."
                )
    if first.kind is Kind.ALLREDUCE and first.op not in (Op.AVERAGE, Op.SUM) and joined:
        # Zeros would count.
        return f"Allreduce with op={first.op.name.capitalize()} is not supported with Join at this time."
    if first.kind in _NOT_WITH_JOIN and joined:
        more = "Specify sparse_to_dense=True if using DistributedOptimizer" if first.kind is Kind.ALLGATHER else ""
        return f"{kind.capitalize()} is not supported with Join at this time. {more}".rstrip()
    if first.kind in (Kind.ALLGATHER, Kind.ALLTOALL, Kind.REDUCESCATTER) and not first.shape:
        return f"Process-set rank zero tried to {kind} a rank-zero tensor."
    if first.kind in (Kind.ALLGATHER, Kind.ALLTOALL):
        for other in others:
            if len(other.shape) != len(first.shape):
                return (
                    f"Mismatched {kind} tensor shapes: One rank sent a tensor of rank {len(first.shape)}, but another "
                    f"rank sent a tensor of rank {len(other.shape)}."
                )
            for dim in range(1, len(first.shape)):
                if other.shape[dim] != first.shape[dim]:
                    return (
                        f"Mismatched {kind} tensor shapes: One rank sent a tensor with dimension {dim} equal to "
                        f"{first.shape[dim]}, but another rank sent a tensor with dimension {dim} equal to "
                        f"{other.shape[dim]}."
                    )
    if first.kind is Kind.BROADCAST:
        for other in others:
            if other.root != first.root:
                return (
                    f"Mismatched {kind} root ranks: One rank specified root rank {names[first.root]}, but another rank "
                    f"specified root rank {names[other.root]}."
                )
    for other in others:
        if other.on_cpu != first.on_cpu:
            devices = [("GPU", "CPU")[one.on_cpu] for one in (first, other)]
            return (
                f"Mismatched {kind} CPU/GPU device selection: One rank specified device {devices[0]}, but another rank "
                f"specified device {devices[1]}."
            )
    return None


@functools.lru_cache(maxsize=4096)
def _key(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=_KEY_BYTES).digest()


# Scripts repeat their operations; most requests are read and written once.
@functools.lru_cache(maxsize=4096)
def _encode(request: Request) -> bytes:
    extents = list(request.shape)
    if len(extents) > _DIMS:
        extents = [*extents[: _DIMS - 1], math.prod(extents[_DIMS - 1 :])]
    return _REQUEST.pack(
        request.kind,
        request.op,
        DTYPES.index(request.dtype),
        request.on_cpu,
        request.root,
        len(extents),
        request.priority,
        request.prescale,
        request.postscale,
        *extents,
        *(0 for _ in range(_DIMS - len(extents))),
    )


@functools.lru_cache(maxsize=4096)
def _decode(body: bytes) -> Request:
    kind, op, dtype, on_cpu, root, dims, priority, prescale, postscale, *extents = _REQUEST.unpack(body)
    return Request(
        Kind(kind), Op(op), DTYPES[dtype], tuple(extents[:dims]), root, bool(on_cpu), prescale, postscale, priority
    )


# What can be sent, by its number on the wire.
DTYPES = (
    *("uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "bool", "bfloat16"),
    *("uint16", "uint32", "uint64", "complex64", "complex128"),
)
_NOT_WITH_JOIN = frozenset((Kind.ALLGATHER, Kind.ALLTOALL, Kind.BROADCAST, Kind.REDUCESCATTER))
_DIMS = 8
# As many as make a block that still is a small message (1.8 KB): a round costs its latency, not its bytes.
_ENTRIES = 16
_HEADER = struct.Struct("<HB13x")
_REQUEST = struct.Struct("<BBBBiIB3xdd8q")
_KEY_BYTES = 16
_ENTRY_BYTES = _KEY_BYTES + _REQUEST.size
BLOCK_BYTES = _HEADER.size + _ENTRIES * _ENTRY_BYTES
_JOINED, _STOPPING = 1, 2
