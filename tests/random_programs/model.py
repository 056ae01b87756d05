"""What every tensor of a call must hold after it, in NumPy, without a network.

A call of a program is a dict (see `generate`). `slots` lists the tensors that one rank passes to it, each with what it holds
before the call and what it must hold after it. `run` makes the tensors; `pool` and `judge` never see them.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from typing import Any

import numpy as np
import torch

from collectives import reference

Spec = dict[str, Any]


@dataclasses.dataclass
class Slot:
    """One tensor of a call on one rank."""

    before: torch.Tensor
    """One-dimensional; its dtype and length are the tensor's."""
    after: torch.Tensor | None
    """None: undefined after the call."""
    bound: Any = None
    """None: the bits of ``after``. 0: its values, which a reduction gives exactly. An array: values so near to it."""
    layout: str = "flat"
    label: str = ""
    listed: bool = False
    """One of a list that goes through a flat copy, so that it need not be contiguous."""
    part: slice | None = None
    """What ``after`` speaks of, if not of all; the rest is undefined after the call."""


def values(spec: Spec, rank: int, part: int, count: int, of: slice | None = None) -> torch.Tensor:
    """What group rank ``rank`` gives as its tensor number ``part`` of ``count`` elements, or only the elements ``of`` it. Not to
    be changed, because most are views of one pool.

    With ``exact`` values are small integers, so that sums, products of four and averages over 1, 2 and 4 ranks are exact in
    every dtype and in every order.
    """
    dtype, scale = spec["dtype"], 0
    if spec.get("exact") and dtype in reference.FLOATS:
        scale = {"AVG": 4, "PRODUCT": 1}.get(spec.get("reduce", ""), 3)
    pool = _pool(dtype, scale)
    start = zlib.crc32(f"{rank} {count} {spec['key']} {part}".encode()) % _POOL
    if of is not None:
        start, count = (start + of.start) % _POOL, of.stop - of.start
    if count <= _POOL:
        return pool[start : start + count]
    return pool[start : start + _POOL].repeat(-(-count // _POOL))[:count]


@functools.cache
def _pool(dtype: str, scale: int) -> torch.Tensor:
    """Twice the same `_POOL` random elements; where in it a tensor begins is random. To draw the elements of each tensor anew
    was a third of what a program cost. Scale 0: any values."""
    if scale == 0:
        once = reference.fill(0, _POOL, dtype, key="pool")
    else:
        generator = np.random.default_rng(scale)
        # Products of four stay below what bfloat16 holds.
        numbers = generator.integers(1, 4 if scale == 1 else 6, _POOL) * generator.choice([-1, 1], _POOL)
        once = torch.from_numpy((numbers * scale).astype(np.float64)).to(getattr(torch, dtype))
    return torch.cat([once, once])


def poison(count: int, dtype: str) -> torch.Tensor:
    """What an output holds before the call: no value that a call gives."""
    kind = getattr(torch, dtype)
    if dtype == "bool":
        return torch.zeros(count, dtype=kind)
    tensor = torch.empty(count, dtype=kind)
    reference.raw(tensor).fill_(0x6B)
    return tensor


def reduced(spec: Spec, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, Any]:
    """The reduction of ``inputs`` and how far off each element may be: 0 where it is exact."""
    operation, kind = spec["reduce"], inputs[0].dtype
    if spec.get("exact") and kind.is_floating_point:
        # Every partial result is exact in the dtype itself.
        if operation in _EXACT:
            return functools.reduce(_EXACT[operation], inputs), 0
        if operation == "AVG" and len(inputs) in (1, 2, 4):
            return functools.reduce(torch.add, inputs) / len(inputs), 0
    parts = [
        reference.reduced(operation, list(part)) for part in zip(*(one.split(PART) for one in inputs), strict=True)
    ]
    expected, bound = (np.concatenate(column) for column in zip(*parts, strict=True))
    return (torch.from_numpy(expected), bound) if bound.any() else (torch.from_numpy(expected).to(kind), 0)


def slots(spec: Spec, size: int, rank: int) -> list[Slot]:
    """The tensors that group rank ``rank`` of ``size`` passes to a call, in the order in which `run` takes them."""
    found = _SLOTS[spec["call"]](spec, size, rank)
    layouts = spec.get("layouts", ["flat"])
    for index, slot in enumerate(found):
        slot.layout = layouts[(index + rank) % len(layouts)]
        if slot.layout == "strided" and not slot.listed:
            slot.layout = "flat"
        slot.label = slot.label or f"tensor {index}"
    return found


def objects(spec: Spec, rank: int) -> Any:
    """The Python object that group rank ``rank`` gives to an object collective."""
    generator = np.random.default_rng([rank, zlib.crc32(spec["key"].encode())])
    return {
        "from": rank,
        "key": spec["key"],
        "text": "x" * int(generator.integers(0, spec["count"] + 1)),
        "numbers": generator.integers(0, 100, 3).tolist(),
    }


def expected_objects(spec: Spec, size: int, rank: int) -> Any:
    """What an object collective leaves on group rank ``rank``; None where that is undefined."""
    root = spec.get("root", 0)
    everything = [objects(spec, other) for other in range(size)]
    return {
        "all_gather_object": everything,
        "broadcast_object_list": [everything[root]],
        "gather_object": everything if rank == root else None,
        "scatter_object_list": [{"to": rank, **everything[root]}],
        "message objects": [everything[spec["src"]], None] if spec["call"] == "message objects" else None,
    }[spec["call"]]


# ------------------------------------------------------------------------------------------------ one function a call


def of_part(spec: Spec, part: int) -> Spec:
    """The call for its tensor ``part``, whose dtype may be its own."""
    dtypes = spec.get("dtypes")
    return {**spec, "dtype": dtypes[part % len(dtypes)]} if dtypes else spec


def sparse(spec: Spec, rank: int) -> torch.Tensor:
    """What group rank ``rank`` gives to an all-reduce of sparse tensors: some rows twice, which counts as their sum."""
    shape = (spec["rows"], spec["width"]) if spec["width"] else (spec["rows"],)
    generator = np.random.default_rng([rank, zlib.crc32(spec["key"].encode())])
    entries = int(generator.integers(0, spec["entries"] + 1))
    where = torch.from_numpy(generator.integers(0, spec["rows"], (1, entries)))
    given = values({**spec, "exact": True}, rank, 0, entries * max(1, spec["width"])).clone()
    return torch.sparse_coo_tensor(where, given.view(entries, *shape[1:]), shape)


def _all_reduce(spec: Spec, size: int, rank: int) -> list[Slot]:
    found = []
    for part, count in enumerate(spec["counts"]):
        spec = of_part(spec, part)
        inputs = [values(spec, other, part, count) for other in range(size)]
        expected, bound = reduced(spec, inputs)
        found.append(Slot(inputs[rank], expected, bound))
    return found


def _reduce(spec: Spec, size: int, rank: int) -> list[Slot]:
    found = _all_reduce(spec, size, rank)
    if rank != spec["root"]:
        for slot in found:
            slot.after = None
    return found


def _broadcast(spec: Spec, size: int, rank: int) -> list[Slot]:
    (count,) = spec["counts"]
    given = values(spec, spec["root"], 0, count)
    before = given.clone() if rank == spec["root"] else poison(count, spec["dtype"])
    return [Slot(before, given)]


def _all_gather(spec: Spec, size: int, rank: int) -> list[Slot]:
    """The input, then an output for each rank; ``counts`` has one number, or one for each rank."""
    counts = spec["counts"] * size if len(spec["counts"]) == 1 else spec["counts"]
    given = [values(spec, other, 0, counts[other]) for other in range(size)]
    listed = len(spec["counts"]) == 1
    outputs = [Slot(poison(counts[r], spec["dtype"]), given[r], listed=listed) for r in range(size)]
    return [Slot(given[rank], given[rank]), *outputs]


def _all_gather_into_tensor(spec: Spec, size: int, rank: int) -> list[Slot]:
    """Pairs of input and output; in place the input is a part of the output and no slot of its own."""
    found = []
    for part, count in enumerate(spec["counts"]):
        spec = of_part(spec, part)
        given = [values(spec, other, part, count) for other in range(size)]
        before = poison(size * count, spec["dtype"])
        if spec.get("in_place"):
            before[rank * count : (rank + 1) * count] = given[rank]
        else:
            found.append(Slot(given[rank], given[rank]))
        found.append(Slot(before, torch.cat(given)))
    return found


def _gather(spec: Spec, size: int, rank: int) -> list[Slot]:
    found = _all_gather(spec, size, rank)
    return found if rank == spec["root"] else found[:1]


def _scatter(spec: Spec, size: int, rank: int) -> list[Slot]:
    """The output, then on the root an input for each rank."""
    (count,) = spec["counts"]
    given = [values(spec, spec["root"], part, count) for part in range(size)]
    inputs = [Slot(one, one, listed=True) for one in given] if rank == spec["root"] else []
    return [Slot(poison(count, spec["dtype"]), given[rank]), *inputs]


def _reduce_scatter(spec: Spec, size: int, rank: int) -> list[Slot]:
    """The output, then an input for each rank; ``counts`` has one number, or one for each rank."""
    counts = spec["counts"] * size if len(spec["counts"]) == 1 else spec["counts"]
    expected, bound = reduced(spec, [values(spec, other, rank, counts[rank]) for other in range(size)])
    inputs = [values(spec, rank, part, counts[part]) for part in range(size)]
    parts = [Slot(one, one, listed=len(spec["counts"]) == 1) for one in inputs]
    return [Slot(poison(counts[rank], spec["dtype"]), expected, bound), *parts]


def _reduce_scatter_tensor(spec: Spec, size: int, rank: int) -> list[Slot]:
    """Pairs of input and output; in place the output is a part of the input, whose other parts are then undefined."""
    found = []
    for part, count in enumerate(spec["counts"]):
        spec = of_part(spec, part)
        given = values(spec, rank, part, count * size)
        mine = slice(rank * count, (rank + 1) * count)
        expected, bound = reduced(spec, [values(spec, other, part, count * size, mine) for other in range(size)])
        if spec.get("in_place"):
            found.append(Slot(given, expected, bound, part=mine))
        else:
            found += [Slot(given, given), Slot(poison(count, spec["dtype"]), expected, bound)]
    return found


def _all_to_all(spec: Spec, size: int, rank: int) -> list[Slot]:
    """An output from each rank, then an input for each rank; ``splits[s][d]`` rows of ``width`` go from s to d."""
    rows, width = spec["splits"], spec["width"]
    sent = [[values(spec, s, d, rows[s][d] * width) for d in range(size)] for s in range(size)]
    outputs = [Slot(poison(rows[s][rank] * width, spec["dtype"]), sent[s][rank], listed=True) for s in range(size)]
    return outputs + [Slot(one, one, listed=True) for one in sent[rank]]


def _all_to_all_single(spec: Spec, size: int, rank: int) -> list[Slot]:
    parts = _all_to_all(spec, size, rank)
    received = torch.cat([one.after for one in parts[:size] if isinstance(one.after, torch.Tensor)])
    output = Slot(torch.cat([one.before for one in parts[:size]]), received)
    joined = torch.cat([one.before for one in parts[size:]])
    return [output, Slot(joined, joined)]


def _message(spec: Spec, size: int, rank: int) -> list[Slot]:
    (count,) = spec["counts"]
    given = values(spec, spec["src"], 0, count)
    return [Slot(given, given) if rank == spec["src"] else Slot(poison(count, spec["dtype"]), given)]


def _exchange(spec: Spec, size: int, rank: int) -> list[Slot]:
    """A tensor for each of the batch's messages that this rank sends or receives, in their order."""
    found = []
    for number, (src, dst, count) in enumerate(spec["messages"]):
        given = values(spec, src, number, count)
        if rank == src:
            found.append(Slot(given, given))
        elif rank == dst:
            found.append(Slot(poison(count, spec["dtype"]), given))
    return found


def _nothing(spec: Spec, size: int, rank: int) -> list[Slot]:
    return []


_EXACT = {"SUM": torch.add, "PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum}
# Elements that NumPy works on at a time: what it makes on the way stays in the processor's cache.
PART = 1 << 14
# A prime, so that what is taken a number of frames too early or too late differs. 17 dtypes and 3 scales are 11 MB.
_POOL = 131_071

_SLOTS = {
    "barrier": _nothing,
    "monitored_barrier": _nothing,
    "all_reduce": _all_reduce,
    "all_reduce_coalesced": _all_reduce,
    "coalesced all_reduce": _all_reduce,
    "functional all_reduce": _all_reduce,
    "hvd allreduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "all_gather_coalesced": _all_gather_into_tensor,
    "coalesced all_gather_into_tensor": _all_gather_into_tensor,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "coalesced reduce_scatter_tensor": _reduce_scatter_tensor,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "message": _message,
    "exchange": _exchange,
    "all_gather_object": _nothing,
    "broadcast_object_list": _nothing,
    "gather_object": _nothing,
    "scatter_object_list": _nothing,
    "message objects": _nothing,
    "sparse all_reduce": _nothing,
    "reducer": _nothing,
    "ddp": _nothing,
    "hvd": _nothing,
}
