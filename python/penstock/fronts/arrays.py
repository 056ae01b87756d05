"""Collectives of lists of NumPy arrays: what the fronts for JAX and for TensorFlow share.

```text
  pytree / tensors ──front──> arrays ──buckets──> operations of the engine, all in flight ──> arrays ──front──> pytree / tensors
```
A process has one `Job`, which is a group of its own over the process's engine; where the script also has process groups of
torch's, they share its streams. torch's store is what ranks meet at, under the environment variables of torchrun. No tensor
of torch's takes part in the data path.

Arrays of these frameworks are immutable, and the engine reduces in place: so every array is copied once, into the buffer of
its **bucket**, and the results are views of that buffer. Small arrays of one dtype share a bucket; a large one has its own. A
bucket's operation starts as soon as it is filled, while the next one is being filled. *Why not the gradients' `Reducer`?* It lets
ranks agree on gradients that become ready in an unknown order; here the caller has the whole list already.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import numpy as np

from penstock import _core
from penstock.errors import Closed, Mismatch, PenstockError
from penstock.errors import Config as ConfigError
from penstock.runtime import urgency

__all__ = ["Array", "Job", "init", "is_initialized", "job", "own_errors", "recorded", "shutdown"]

Array = np.ndarray[Any, Any]


def init(*, timeout_s: float = 1800.0) -> Job:
    """Join the job; does nothing where this process has joined already.

    Rank, size and the address of the store come from the environment, as torchrun sets it (RANK, WORLD_SIZE, MASTER_ADDR,
    MASTER_PORT). Where neither RANK nor WORLD_SIZE is set, the job is this process alone.

    Args:
        timeout_s: for joining, and for every operation after it.

    Raises:
        penstock.errors.Config: the environment is incomplete, or a setting is wrong.
        penstock.errors.Timeout: not all ranks came.
        penstock.errors.Refused: secrets or versions differ.

    Blocks until all ranks have called it.
    """
    global _job
    with _job_lock:
        if _job is None:
            _job = Job(_join(timeout_s), timeout_s)
        return _job


def shutdown() -> None:
    """Leave the job; does nothing where this process has not joined. Operations that still run fail."""
    global _job
    with _job_lock:
        ended, _job = _job, None
    if ended is not None:
        ended.leave()


def is_initialized() -> bool:
    """Whether this process has joined, and not left."""
    return _job is not None


def job() -> Job:
    """This process's part in the job.

    Raises:
        penstock.errors.Closed: it has not joined, or it has left.
    """
    if _job is None:
        raise Closed("this process has not joined a job: call init() first")
    return _job


@contextlib.contextmanager
def own_errors() -> Iterator[None]:
    """In this block a framework's error that stands for one of Penstock's is raised as Penstock's own.

    A compiled function that calls back into Python reports what was raised there as text in an error of the framework.
    """
    _last_failure.clear()
    try:
        yield
    except PenstockError:
        raise
    except Exception as error:
        if not _last_failure:
            raise
        raise _last_failure.pop() from error


def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, for a framework to call back; what it raises is remembered for `own_errors`."""

    def call(*args: Any) -> Any:
        try:
            return function(*args)
        except PenstockError as error:
            _last_failure[:] = [error]
            raise

    return call


class Job:
    """This process's part in the job: collectives of lists of arrays.

    Every call blocks, without the GIL, until the results are there; ranks make the same calls in the same order, from one
    thread. Arrays are read only; they need not be contiguous, and may be empty or scalars. Their bytes may be in any order,
    results are in the machine's. ``names`` is whatever says how
    the caller's structure looks; it must be the same on all ranks, as must dtypes and shapes. That is compared when a
    structure is first seen, for 16 bytes a rank, and remembered.

    Raises (every call):
        penstock.errors.Mismatch: ranks have different structures, or made different calls.
        penstock.errors.Config: a dtype that cannot be reduced in that way, or holds Python objects. Nothing was sent.
        penstock.errors.PeerLost: a rank went away; shut down, and start again.
    """

    def __init__(self, membership: Any, timeout_s: float) -> None:
        self.rank: int = membership.rank
        self.size: int = membership.world
        self._member = membership
        self._timeout_s = timeout_s
        # Callbacks of compiled functions come on threads of the framework's.
        self._lock = threading.RLock()
        self._agreed: set[Hashable] = set()

    def leave(self) -> None:
        """Leave the group."""
        self._member.leave()

    def all_reduce(self, arrays: Sequence[Array], *, op: str, names: str = "") -> list[Array]:
        """Reduce every array over all ranks, element by element.

        Args:
            arrays: of floats, integers, bools or complex numbers; half precision is summed in float32 and rounded once a hop.
            op: "sum", "mean", "min", "max" or "product". "mean" is for floats and complex numbers, min and max not for
                complex numbers, and unsigned integers of more than one byte can only be summed.
            names: see the class.

        Returns: new arrays, aligned to 64 bytes; those that shared a bucket keep its memory alive together.

        Cost: one copy of each array, and 2(n-1)/n times its bytes on the wire a rank.
        """
        if op not in _OPS:
            raise ConfigError(f"all_reduce: op is to be one of {', '.join(_OPS)}, not {op!r}")
        arrays = _sendable("all_reduce", arrays)
        for array in arrays:
            _carried(array.dtype, op)

        def start(bucket: Array, dtype: np.dtype[Any], single: Array | None) -> _core.Ticket:
            return self._start("all_reduce", bucket, _carried(dtype, op), op=_OPS[op])

        with self._lock:
            self._agree(("all_reduce", op, names), arrays)
            return self._in_buckets(arrays, start, copies=True)

    def broadcast(self, arrays: Sequence[Array], *, root: int, names: str = "") -> list[Array]:
        """Give all ranks the arrays of rank ``root``. Any dtype.

        Returns: on the root the arrays themselves; elsewhere new ones, as from `all_reduce`.

        Cost: one copy of small arrays on the root, none of large ones.
        """
        if not 0 <= root < self.size:
            raise ConfigError(f"broadcast: there is no rank {root} among {self.size}")
        own = root == self.rank
        given, arrays = arrays, _sendable("broadcast", arrays)

        def start(bucket: Array, dtype: np.dtype[Any], single: Array | None) -> _core.Ticket:
            return self._start("broadcast", single if own and single is not None else bucket, "byte", rank=root)

        with self._lock:
            self._agree(("broadcast", root, names), arrays)
            results = self._in_buckets(arrays, start, copies=own)
            return list(given) if own else results

    def all_gather(self, arrays: Sequence[Array], *, names: str = "") -> list[Array]:
        """Collect every array of every rank. Any dtype.

        Returns: for each array a new one, with an axis of ranks before its own.

        Cost: no copy of a contiguous array, and (n-1) times its bytes into a rank.
        """
        arrays = _sendable("all_gather", arrays)
        with self._lock:
            self._agree(("all_gather", names), arrays)
            results: list[Array] = []
            tickets = []
            for array in arrays:
                whole = _room(array.nbytes * self.size)
                results.append(whole.view(array.dtype).reshape(self.size, *array.shape))
                if array.nbytes:
                    tickets.append(self._start("all_gather", whole, "byte", source=np.ascontiguousarray(array)))
            for ticket in tickets:
                ticket.wait()
            return results

    def barrier(self) -> None:
        """Block until every rank has come here."""
        with self._lock:
            self._start("barrier", None, "byte").wait()

    # ------------------------------------------------------------------ helpers

    def _in_buckets(
        self,
        arrays: Sequence[Array],
        start: Callable[[Array, np.dtype[Any], Array | None], _core.Ticket],
        copies: bool,
    ) -> list[Array]:
        """Start an operation for every bucket, filled with its arrays if ``copies``; returns views of the buckets.

        ``start`` gets the bucket's bytes, its dtype and, where it is one contiguous array, that as well.
        """
        # An array in no bucket has no bytes, and is returned unchanged.
        results = list(arrays)
        tickets = []
        for bucket in _buckets(arrays):
            places, length = [], 0
            for index in bucket:
                places.append(length)
                length += -(-arrays[index].nbytes // _ALIGNMENT) * _ALIGNMENT
            # The last array needs nothing behind it.
            length = places[-1] + arrays[bucket[-1]].nbytes
            flat = _room(length)
            single = arrays[bucket[0]] if len(bucket) == 1 and arrays[bucket[0]].flags.c_contiguous else None
            if len(bucket) > 1:
                # What lies between the arrays travels with them.
                flat[...] = 0
            for index, place in zip(bucket, places, strict=True):
                array = arrays[index]
                view = flat[place : place + array.nbytes].view(array.dtype).reshape(array.shape)
                if copies:
                    np.copyto(view, array)
                results[index] = view
            tickets.append(start(flat, arrays[bucket[0]].dtype, single))
        for ticket in tickets:
            ticket.wait()
        return results

    def _start(
        self,
        collective: str,
        output: Array | None,
        dtype: str,
        *,
        source: Array | None = None,
        op: str | None = None,
        rank: int = 0,
    ) -> _core.Ticket:
        nbytes = 0 if output is None else output.nbytes
        urgent = urgency.current()
        number = urgency.USUAL if urgent is None else urgent.number
        ticket = self._member.group.start(
            collective,
            dtype=dtype,
            elements=nbytes // _SIZES.get(dtype, 1),
            bytes=nbytes,
            input=0 if source is None else source.ctypes.data,
            output=0 if output is None else output.ctypes.data,
            op=op,
            rank=rank,
            priority=urgency.engine_priority(number),
            coflow=0 if urgent is None else urgent.coflow,
            timeout_s=self._timeout_s,
            keep=(source, output),
        )
        if urgent is not None:
            urgent.add(self._member.group, ticket, number)
        return ticket

    def _agree(self, call: tuple[Hashable, ...], arrays: Sequence[Array]) -> None:
        """Compare what all ranks are about to do, unless they have done it before.

        A rank that has not, while another has, meets an operation that is not its own: no caller can ask for this one.
        """
        structure = (*call, *((array.dtype.name, array.shape) for array in arrays))
        if self.size == 1 or structure in self._agreed:
            return
        own = np.frombuffer(hashlib.sha256(repr(structure).encode()).digest()[:_DIGEST_BYTES], np.uint8)
        digests = np.empty((self.size, _DIGEST_BYTES), np.uint8)
        self._start("all_gather", digests, "uint8", source=own, op="band").wait()
        others = [rank for rank in range(self.size) if not np.array_equal(digests[rank], digests[0])]
        if others:
            error = Mismatch(
                f"{call[0]}: rank(s) {', '.join(map(str, others))} pass another structure than rank 0; rank {self.rank} "
                f"passes {_summary(structure, len(call))}. Nothing was sent. Pass the same names, shapes and dtypes on "
                "every rank."
            )
            error.group_lives = True
            raise error
        if len(self._agreed) >= _AGREED_MOST:
            # All ranks have seen the same structures, and forget them at the same call.
            self._agreed.clear()
        self._agreed.add(structure)


def _join(timeout_s: float) -> Any:
    # torch takes a second to import, which `import penstock.jax` need not wait for.
    import torch.distributed as dist

    from penstock.runtime import groups

    timeout = timedelta(seconds=timeout_s)
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        store, rank, world = dist.HashStore(), 0, 1
    else:
        missing = [name for name in _ENVIRONMENT if name not in os.environ]
        if missing:
            raise ConfigError(
                f"{', '.join(missing)} is not set: start the ranks with torchrun, or set it as torchrun does"
            )
        try:
            store, rank, world = _found_store(timeout)
        except (dist.DistError, ValueError) as error:
            raise ConfigError(f"the job's store cannot be reached: {str(error).splitlines()[0]}") from error
        store.set_timeout(timeout)
    return groups.join(dist.PrefixStore("penstock/arrays", store), rank, range(world), timeout, "arrays")


def _found_store(timeout: timedelta) -> tuple[Any, int, int]:
    """The job's store, this process's rank, and the number of ranks. The store outlives `shutdown`: where rank 0 serves it, the
    other ranks may be back before rank 0 is, and would take one that ends for the next one."""
    global _found
    from torch.distributed import DistError
    from torch.distributed.rendezvous import rendezvous

    place = (os.getpid(), *(os.environ[name] for name in _ENVIRONMENT))
    if _found is not None and _found[0] == place:
        with contextlib.suppress(DistError):
            _found[1][0].check(["penstock"])
            return _found[1]
    _found = None  # of another process, or rank 0 is a new one
    _found = place, next(iter(rendezvous("env://", timeout=timeout)))
    return _found[1]


def _buckets(arrays: Sequence[Array]) -> list[list[int]]:
    """Which arrays travel together, by index: those of one dtype, in their order, until a bucket is full. Empty ones stay."""
    sent = [index for index, array in enumerate(arrays) if array.nbytes]
    classes: dict[str, int] = {}
    entries = [(arrays[index].nbytes, classes.setdefault(arrays[index].dtype.name, len(classes))) for index in sent]
    return [[sent[at] for at in bucket] for bucket in _core.merge(entries, _BUCKET_BYTES)]


def _room(nbytes: int) -> Array:
    """New memory, aligned so that JAX and TensorFlow take it without a copy."""
    whole = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -whole.ctypes.data % _ALIGNMENT
    return whole[start : start + nbytes]


def _sendable(call: str, arrays: Sequence[Array]) -> list[Array]:
    """The arrays in the machine's byte order, which is what ranks compare and the engine adds."""
    for array in arrays:
        if array.dtype.hasobject:
            raise ConfigError(f"{call}: an array of {array.dtype} holds addresses of Python objects. Nothing was sent.")
    return [one if one.dtype.isnative else one.astype(one.dtype.newbyteorder("=")) for one in arrays]


def _carried(dtype: np.dtype[Any], op: str) -> str:
    """The engine's dtype that reduces ``dtype`` in the same way."""
    name = dtype.name
    if name in _COMPLEX and op in ("sum", "mean"):
        # Real and imaginary parts are added by themselves.
        return _COMPLEX[name]
    if name in _UNSIGNED and op == "sum":
        # Sums that wrap have the same bits with a sign and without.
        return _UNSIGNED[name]
    if name not in _SIZES or (op == "mean" and name not in _FLOATS):
        raise ConfigError(f"all_reduce: {name} cannot be reduced with {op!r}. Nothing was sent.")
    return name


def _summary(structure: tuple[Any, ...], skipped: int) -> str:
    arrays = [f"{name}{list(shape)}" for name, shape in structure[skipped:]]
    shown = ", ".join(arrays[:_SHOWN]) + (", ..." if len(arrays) > _SHOWN else "")
    return f"{len(arrays)} arrays ({shown})" if arrays else "no array"


_OPS = {"sum": "sum", "mean": "avg", "min": "min", "max": "max", "product": "product"}
_FLOATS = ("float16", "bfloat16", "float32", "float64")
_COMPLEX = {"complex64": "float32", "complex128": "float64"}
_UNSIGNED = {"uint16": "int16", "uint32": "int32", "uint64": "int64"}
# The dtypes that the engine's kernels reduce, and the bytes of an element.
_SIZES = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
}
_ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# The alignment that JAX and TensorFlow (Eigen) need to use memory without a copy.
_ALIGNMENT = 64
# As of gradients of torch's (docs/design/gradients.md).
_BUCKET_BYTES = 4 << 20
# Half of SHA-256: enough against accidents; this is no defence against attackers.
_DIGEST_BYTES = 16
# A guess: far more structures than a program has, and little memory.
_AGREED_MOST = 1024
# Enough to recognise one's own call in a line.
_SHOWN = 4

_job: Job | None = None
_found: tuple[Any, tuple[Any, int, int]] | None = None
_job_lock = threading.Lock()
_last_failure: list[PenstockError] = []
