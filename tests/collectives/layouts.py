"""Tensors that lie in memory in any way: taken where that is right, refused before anything is sent where it is not.

The oracle for what is right looks at the place of every single element, and knows nothing of the backend's rules.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from collectives.programs import Report
from penstock.errors import Config as ConfigError
from penstock.errors import Mismatch
from penstock.fronts import arrays
from penstock.torch.backend import of
from torch_uses import world


def any_layout(backend: str, seed: int, cases: int) -> object:
    """Random shapes and layouts, the same on all ranks, through every collective."""
    with world(backend) as (rank, size):
        report, rng = Report(rank), random.Random(seed)
        for case in range(cases):
            name = rng.choice(sorted(CASES))
            one = CASES[name](rng, rank, size)
            what = f"seed {seed}, case {case}, {name} of {one.looks}"
            if one.is_right:
                with report.during(what):
                    one.call()
                for got, expected in one.results():
                    report.equal(what, _plain(got), _plain(expected))
            else:
                before = [tensor.clone() for tensor, _ in one.results()]
                with report.refused(what):
                    one.call()
                for (tensor, _), unchanged in zip(one.results(), before, strict=True):
                    report.equal(f"{what}, refused", _plain(tensor), _plain(unchanged))
        dist.barrier()
        return report.finish()


def different_layouts(backend: str, seed: int, cases: int) -> object:
    """Tensors of as many elements whose shapes and layouts may differ between the ranks, through every operation that sends
    memory as it lies: right results where each element lies at the same place on all ranks, else a mismatch on all ranks."""
    with world(backend) as (rank, size):
        report, rng = Report(rank), random.Random(seed)
        for case in range(cases):
            tensors = _of_one_size(rng, size)
            kind, root = rng.choice(KINDS_AS_MEMORY), rng.randrange(size)
            is_right = all(_places(tensor) == _places(tensors[0]) for tensor in tensors)
            what = f"seed {seed}, case {case}, {kind} of {', '.join(map(_looks, tensors))}, root {root}"
            group = dist.new_group(backend=backend)
            dist.barrier()  # A mismatch of two ranks ends the third one's new_group, if that has not returned.
            mine = tensors[rank]
            values = [torch.arange(mine.numel()) * 7 % 97 + 100 * one for one in range(size)]
            mine.copy_(values[rank].view(mine.shape))
            try:
                with report.during(what) if is_right else contextlib.nullcontext():
                    got = _as_memory(kind, mine, rank, size, root, group)
                    # A rank whose part is sent at once ends before the others have compared it.
                    dist.barrier(group)
            except Mismatch as error:
                assert not is_right and "memory" in str(error), f"{what}: {error}"
            else:
                assert is_right, f"{what}: no mismatch"
                total = torch.stack(values).sum(0).float()
                expected = {
                    "all_reduce": total,
                    "reduce": total if rank == root else values[rank],
                    "broadcast": values[root],
                    "send": values[root],
                    "all_gather": torch.cat(values),
                    "reduce_scatter": size * values[rank],
                    "all_to_all": torch.cat([one + 1000 * rank for one in values]),
                }[kind]
                report.equal(what, _plain(got).view(-1), expected.float())
            dist.destroy_process_group(group)
        dist.barrier()
        return report.finish()


def lazy_views(backend: str) -> object:
    """Tensors that stand for the conjugate or the negative of what lies in memory are read and written as what they stand for, or
    refused on all ranks before anything is sent; in inference mode too, where torch does not call them views.

    The calls go to the backend itself: from torch 2.14 on, torch's own layers resolve such tensors or refuse them before."""
    with world(backend) as (rank, size):
        report, own = Report(rank), of()

        def conjugate(which: int = rank) -> torch.Tensor:
            found = torch.complex(torch.full((4,), 1.0 + which), torch.arange(4.0) + which).conj()
            assert found.is_conj() and found.is_contiguous()
            return found

        def negative(which: int = rank) -> torch.Tensor:
            # One element: the strides of more are not dense.
            found = torch.full((1,), complex(1, 2 + which)).conj().imag
            assert found.is_neg() and found.is_contiguous()
            return found

        for make, mode in itertools.product((conjugate, negative), (contextlib.nullcontext, torch.inference_mode)):
            with mode():
                values = [_plain(make(one), make(one).dtype) for one in range(size)]

                def plain(which: int = rank, values: list[torch.Tensor] = values) -> torch.Tensor:
                    return values[which].clone()

                for given, into in ((make, plain), (plain, make), (make, make)):
                    calls = _lazy_calls(own, given, into, values)
                    for name, (call, expected, got) in calls.items():
                        what = f"{name} of a {given.__name__} into a {into.__name__}, {mode.__name__}"
                        try:
                            call().wait()  # type: ignore[attr-defined]
                        except ConfigError as error:
                            assert "Nothing was sent" in str(error), f"{what}: {error}"
                        else:
                            assert name not in ("send", "recv", "recv_anysource"), f"{what} is not refused"
                            if expected is not None:
                                report.equal(what, torch.cat([_plain(one, one.dtype) for one in got]), expected)
        dist.barrier()
        return report.finish()


def refused_together(backend: str) -> object:
    """A call with several tensors of which the last cannot be sent sends none: what is tried again is right."""
    with world(backend) as (rank, size):
        report = Report(rank)
        ones, bad = torch.ones(4), torch.ones(4, 4)[:, ::2]
        group = dist.group.WORLD
        peer, other = (rank + 1) % size, (rank - 1) % size
        received = torch.zeros(4)

        def batch(into: torch.Tensor) -> None:
            ops = [dist.P2POp(dist.isend, ones, peer), dist.P2POp(dist.irecv, into, other)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()

        def coalesced(tensors: list[torch.Tensor]) -> None:
            with dist._coalescing_manager(group, torch.device("cpu")):
                for tensor in tensors:
                    dist.all_reduce(tensor)

        counts, whole = torch.ones(4, dtype=torch.uint32), torch.arange(4)

        def combined(tensors: list[torch.Tensor], op: dist.ReduceOp.RedOpType) -> None:
            with dist._coalescing_manager(group, torch.device("cpu")):
                for tensor in tensors:
                    dist.all_reduce(tensor, op)

        uneven = [torch.zeros(rank + 1) for rank in range(size)]
        wrong = [*uneven[:-1], torch.zeros(1).expand(size)]
        calls: list[tuple[str, Callable[[], object], Callable[[], object]]] = [
            (
                "all_reduce_coalesced",
                lambda: dist.all_reduce_coalesced([ones, bad]),
                lambda: dist.all_reduce_coalesced([ones, bad.contiguous()]),
            ),
            ("coalescing manager", lambda: coalesced([ones, bad]), lambda: coalesced([ones, ones.clone()])),
            (
                "a sum of what has none",
                lambda: combined([ones, counts], dist.ReduceOp.SUM),
                lambda: combined([ones, ones.clone()], dist.ReduceOp.SUM),
            ),
            (
                "bits of floats",
                lambda: combined([whole, ones], dist.ReduceOp.BXOR),
                lambda: combined([whole, whole.clone()], dist.ReduceOp.BXOR),
            ),
            ("batch_isend_irecv", lambda: batch(bad), lambda: batch(received)),
            (
                "uneven all_gather",
                lambda: dist.all_gather(wrong, torch.full((rank + 1,), 7.0)),
                lambda: dist.all_gather(uneven, torch.full((rank + 1,), 7.0)),
            ),
            (
                "uneven reduce_scatter",
                lambda: dist.reduce_scatter(torch.zeros(1).expand(rank + 2), [torch.ones(r + 2) for r in range(size)]),
                lambda: dist.reduce_scatter(torch.zeros(rank + 2), [torch.ones(r + 2) for r in range(size)]),
            ),
            (
                "all_to_all",
                lambda: dist.all_to_all([torch.zeros(1).expand(3)] * size, [torch.ones(3)] * size),
                lambda: dist.all_to_all([torch.zeros(3) for _ in range(size)], [torch.ones(3)] * size),
            ),
        ]
        # Rows of other lengths, which only the elements' number says.
        rows, flat = torch.arange(4.0 * size).view(-1, 2) + rank, torch.zeros(4 * size)
        dist.all_to_all_single(flat, rows)
        report.equal("rows of another length", flat[:4] - flat[0], torch.arange(4.0))
        for what, refused, right in calls:
            ones.fill_(1)
            with report.refused(what):
                refused()
            report.equal(f"{what}, refused", ones, torch.ones(4))
            if what == "bits of floats":
                report.equal(f"{what}, refused", whole, torch.arange(4))
            if what == "uneven all_gather":
                report.equal(f"{what}, refused", uneven[0], torch.zeros(1))
            with report.during(f"{what}, again"):
                right()
            if what == "bits of floats":
                report.equal(f"{what}, again", whole, torch.zeros(4, dtype=torch.int64))
            if what in ("all_reduce_coalesced", "coalescing manager", "a sum of what has none"):
                report.equal(f"{what}, again", ones, torch.full((4,), float(size)))
            ones.fill_(1)
            with report.during(f"all_reduce after {what}"):
                dist.all_reduce(ones)
            report.equal(f"all_reduce after {what}", ones, torch.full((4,), float(size)))
        ones.fill_(1)
        report.equal("received", received, torch.ones(4))
        report.equal("gathered", torch.cat(uneven), torch.full((size * (size + 1) // 2,), 7.0))
        return report.finish()


def shared_memory(backend: str, seed: int, cases: int) -> object:
    """Calls whose tensors are views of one: the results of tensors that share nothing."""
    with world(backend) as (rank, size):
        report, rng = Report(rank), random.Random(seed)
        for case in range(cases):
            part = rng.choice([1, 3, 50, 3000, 40_000])
            whole = part * size
            # Other places on each rank; now and then a whole number of parts apart.
            places = [
                [rng.choice([rng.randrange(2 * whole), rng.randrange(2 * size) * part]) for _ in range(2)]
                for _ in range(size)
            ]
            bases = [torch.arange(3 * whole) % 1013 + 2000 * one for one in range(size)]
            own, (first, second) = bases[rank].clone(), places[rank]
            kind = rng.choice(["all_gather", "reduce_scatter", "all_to_all", "all_reduce", "uneven all_gather"])
            what = f"seed {seed}, case {case}, {kind} of {part}, places {places}"
            if kind == "all_gather":
                output = own[second : second + whole]
                dist.all_gather_into_tensor(output, own[first : first + part])
                right = [(output, torch.cat([one[at : at + part] for one, (at, _) in zip(bases, places, strict=True)]))]
            elif kind == "reduce_scatter":
                output = own[second : second + part]
                dist.reduce_scatter_tensor(output, own[first : first + whole])
                mine = [
                    one[at + rank * part : at + (rank + 1) * part] for one, (at, _) in zip(bases, places, strict=True)
                ]
                right = [(output, sum(mine[1:], mine[0]))]
            elif kind == "all_to_all":
                output = own[second : second + whole]
                dist.all_to_all_single(output, own[first : first + whole])
                sent = [
                    one[at + rank * part : at + (rank + 1) * part] for one, (at, _) in zip(bases, places, strict=True)
                ]
                right = [(output, torch.cat(sent))]
            elif kind == "all_reduce":
                views = [own[at : at + part] for at in (first, second, first)]
                dist.group.WORLD.allreduce_coalesced(views, c10d.AllreduceCoalescedOptions()).wait()  # type: ignore[union-attr]
                sums = [
                    sum(one[at[which] : at[which] + part] for one, at in zip(bases, places, strict=True))
                    for which in (0, 1)
                ]
                # What both views hold is the sum of one of them.
                both = max(first, second), min(first, second) + part
                apart = torch.tensor([not both[0] <= at < both[1] for at in range(first, first + part)])
                right = [(views[0][apart], sums[0][apart])]
                if both[0] >= both[1]:
                    right.append((views[1], sums[1]))
                elif first == second and all(at[0] == at[1] for at in places):
                    right.append((views[0], sums[0]))
            else:
                lengths = [part + one for one in range(size)]
                starts = list(itertools.accumulate(lengths, initial=0))
                outputs = [own[at : at + length] for at, length in zip(starts, lengths, strict=False)]
                dist.all_gather(outputs, own[first : first + lengths[rank]])
                right = [(output, bases[one][places[one][0] :][: lengths[one]]) for one, output in enumerate(outputs)]
            for got, expected in right:
                report.equal(what, got, expected)
        return report.finish()


def memory_of_the_call(backend: str) -> object:
    """A batch uses the memory that its calls were given and have checked, also where a tensor gets another, smaller one before
    the batch starts."""
    with world(backend) as (rank, size):
        report, group = Report(rank), dist.group.WORLD
        sent, place = torch.full((4,), float(rank + 1)), torch.zeros(4)
        sent_memory, place_memory = sent.detach(), place.detach()
        # Its neighbours in memory hold what must not be overwritten.
        small = torch.zeros(3)
        with dist._coalescing_manager(group, torch.device("cpu")):
            dist.isend(sent, (rank + 1) % size)
            dist.irecv(place, (rank - 1) % size)
            sent.data, place.data = small[:1], small[1:2]
        dist.barrier()
        report.equal("received where the call said", place_memory, torch.full((4,), float((rank - 1) % size + 1)))
        report.equal("not changed", sent_memory, torch.full((4,), float(rank + 1)))
        report.equal("memory that no call was given", small, torch.zeros(3))
        return report.finish()


def arrays_in_any_order() -> None:
    """NumPy arrays whose bytes are in the other order are added as numbers; addresses of objects never leave the process."""
    job = arrays.init(timeout_s=60)
    try:
        mine = np.arange(5) + job.rank
        for dtype in (">f4", "<f8", ">i8"):
            inputs = [mine.astype(dtype), mine.astype(dtype)[::-1]]
            total = sum((np.arange(5) + rank) for rank in range(job.size))
            for got, expected in zip(job.all_reduce(inputs, op="sum"), (total, total[::-1]), strict=True):
                assert np.array_equal(got, expected), (dtype, got, expected)
            (sent,) = job.broadcast([mine.astype(dtype)], root=1)
            assert np.array_equal(sent, np.arange(5) + 1), (dtype, sent)
            (gathered,) = job.all_gather([mine.astype(dtype)])
            assert np.array_equal(gathered, [np.arange(5) + rank for rank in range(job.size)]), (dtype, gathered)
        objects = np.array([None, "text"], dtype=object)
        for call in (
            lambda: job.broadcast([objects], root=0),
            lambda: job.all_gather([objects]),
            lambda: job.all_reduce([objects], op="sum"),
        ):
            try:
                call()
            except ConfigError as error:
                assert "Nothing was sent" in str(error)
            else:
                raise AssertionError("it went through")
        job.barrier()
    finally:
        arrays.shutdown()


# ------------------------------------------------------------------------------------------------------------- cases


@dataclass
class Case:
    """One call: whether it is right, and what it is to give."""

    looks: str
    is_right: bool
    call: Callable[[], object]
    results: Callable[[], list[tuple[torch.Tensor, torch.Tensor]]]


def _element_wise(rng: random.Random, rank: int, size: int) -> Case:
    tensor = _any(rng, rng.choice(KINDS))
    inputs = _fill(tensor, rank, size)
    kind, root = rng.choice(["all_reduce", "reduce", "broadcast", "send"]), rng.randrange(size)

    def call() -> None:
        if kind == "all_reduce":
            dist.all_reduce(tensor)
        elif kind == "reduce":
            dist.reduce(tensor, root)
        elif kind == "broadcast":
            dist.broadcast(tensor, root)
        elif rank == root:
            works = [dist.isend(tensor, peer) for peer in range(size) if peer != root]
            for work in works:
                work.wait()
        else:
            dist.recv(tensor, root)

    total = torch.stack(inputs).sum(0)
    expected = {"all_reduce": total, "reduce": total if rank == root else inputs[rank]}.get(kind, inputs[root])
    return Case(f"{kind} {_looks(tensor)}", _is_dense(tensor), call, lambda: [(tensor, expected)])


def _joined(rng: random.Random, rank: int, size: int) -> Case:
    """all_gather_single and reduce_scatter_single, joined along the first dimension or stacked."""
    part = _any(rng, rng.choice(KINDS))
    shape = [size * part.shape[0], *part.shape[1:]] if part.dim() and rng.random() < 0.6 else [size, *part.shape]
    if rng.random() < 0.6:
        # Mostly as the parts lie, so that it can be right.
        whole = torch.empty_strided(shape, [part.numel(), *part.stride()][len(shape) == part.dim() :])
    else:
        whole = _any(rng, rng.choice(KINDS), shape)
    places = [index + rank * part.numel() for rank in range(size) for index in _places(part)]
    is_right = _is_dense(part) and _is_dense(whole) and places == _places(whole)
    if rng.random() < 0.5:
        inputs = _fill(part, rank, size)
        _fill(whole, 0, 1)
        expected = torch.stack(inputs).reshape(shape)
        return Case(
            f"all_gather_single {_looks(part)} into {_looks(whole)}",
            is_right,
            lambda: dist.all_gather_into_tensor(whole, part),
            lambda: [(whole, expected)],
        )
    inputs = _fill(whole, rank, size)
    _fill(part, 0, 1)
    expected = torch.stack(inputs).sum(0).reshape(size, -1)[rank].reshape(part.shape)
    return Case(
        f"reduce_scatter_single {_looks(whole)} into {_looks(part)}",
        is_right,
        lambda: dist.reduce_scatter_tensor(part, whole),
        lambda: [(part, expected)],
    )


_GATHER, _SCATTER = c10d.AllgatherOptions(), c10d.ReduceScatterOptions()
KINDS_AS_MEMORY = ["all_reduce", "reduce", "broadcast", "send", "all_gather", "reduce_scatter", "all_to_all"]


def _of_one_size(rng: random.Random, size: int) -> list[torch.Tensor]:
    """Dense tensors for all ranks, of as many elements; some ranks have the same shape and the same layout as others."""
    primes = rng.choice([[2, 2, 3], [2, 2, 2, 2], [2, 3, 5], [2, 2, 3, 3], [2, 2, 2, 3, 5]])
    made: list[tuple[list[int], list[int]]] = []
    for _ in range(rng.choice([1, 2, 2, size])):
        factors = rng.sample(primes, len(primes))
        shape = [1]
        for factor in factors:
            if rng.random() < 0.6:
                shape.append(factor)
            else:
                shape[-1] *= factor
        shape = [*shape, 1] if rng.random() < 0.2 else shape
        dims = list(range(len(shape)))
        if rng.random() < 0.75:
            rng.shuffle(dims)
        made.append((shape, dims))
    tensors = []
    for _ in range(size):
        shape, dims = rng.choice(made)
        tensors.append(torch.zeros([shape[dim] for dim in dims]).permute([dims.index(dim) for dim in range(len(dims))]))
    return tensors


def _as_memory(
    kind: str, mine: torch.Tensor, rank: int, size: int, root: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """Run one operation on a tensor that lies like ``mine`` and, for those that cut or join, on one of ``size`` such parts."""
    whole = torch.empty_strided([size, *mine.shape], [mine.numel(), *mine.stride()])
    if kind == "all_reduce":
        dist.all_reduce(mine, group=group)
    elif kind == "reduce":
        dist.reduce(mine, root, group=group)
    elif kind == "broadcast":
        dist.broadcast(mine, root, group=group)
    elif kind == "send":
        peers = [peer for peer in range(size) if peer != root]
        for work in [dist.isend(mine, peer, group) for peer in peers] if rank == root else []:
            work.wait()
        if rank != root:
            dist.recv(mine, root, group)
    elif kind == "all_gather":
        dist.all_gather_into_tensor(whole, mine, group)
        return whole
    elif kind == "reduce_scatter":
        for part, one in enumerate(whole):
            one.copy_(mine - 100 * rank + 100 * part)
        dist.reduce_scatter_tensor(mine, whole, group=group)
    else:
        for part, one in enumerate(whole):
            one.copy_(mine + 1000 * part)
        received = torch.empty_strided(whole.shape, whole.stride())
        dist.all_to_all_single(received, whole, group=group)
        return received
    return mine


def _lazy_calls(
    own: Any, given: Callable[[int], torch.Tensor], into: Callable[[int], torch.Tensor], values: list[torch.Tensor]
) -> dict[str, tuple[Callable[[], object], torch.Tensor | None, list[torch.Tensor]]]:
    """Every call of the backend on what ``given`` makes for a rank and into what ``into`` makes: the call, what it is to give,
    and the tensors that hold it. ``values`` are the plain values of all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    peer, total = (rank + 1) % size, torch.stack(values).sum(0)
    mine, part = given(rank), into(rank)
    summed, at_root, sent = given(rank), given(rank), given(rank)
    many, outputs = [given(rank) for _ in range(size)], [into(rank) for _ in range(size)]
    whole = torch.zeros(size * mine.numel(), dtype=mine.dtype)
    every = torch.cat(values)
    calls: dict[str, tuple[Callable[[], object], torch.Tensor | None, list[torch.Tensor]]] = {
        "allgather": (lambda: own.allgather([outputs], [mine], _GATHER), every, outputs),
        "all_gather_single": (lambda: own.all_gather_single(whole, mine, _GATHER), every, [whole]),
        "reduce_scatter": (lambda: own.reduce_scatter([part], [many], _SCATTER), total, [part]),
        "gather": (
            lambda: own.gather([outputs] if rank == 0 else [], [mine], c10d.GatherOptions()),
            every if rank == 0 else None,
            outputs,
        ),
        "scatter": (
            lambda: own.scatter([part], [many] if rank == 0 else [], c10d.ScatterOptions()),
            values[0],
            [part],
        ),
        "alltoall": (lambda: own.alltoall(outputs, many, c10d.AllToAllOptions()), every, outputs),
        "allreduce": (lambda: own.allreduce([summed], c10d.AllreduceOptions()), total, [summed]),
        "reduce": (
            lambda: own.reduce([at_root], c10d.ReduceOptions()),
            total if rank == 0 else None,
            [at_root],
        ),
        "broadcast": (lambda: own.broadcast([sent], c10d.BroadcastOptions()), values[0], [sent]),
    }
    # What the other side of a message would give or take does not matter: these are refused.
    if given(rank).is_conj() or given(rank).is_neg():
        calls["send"] = (lambda: own.send([mine], peer, 0), None, [])
    if into(rank).is_conj() or into(rank).is_neg():
        calls["recv"] = (lambda: own.recv([part], peer, 0), None, [])
        calls["recv_anysource"] = (lambda: own.recv_anysource([part], 0), None, [])
    if mine.numel() > 1:
        rows = torch.cat(many * size)[: size * len(mine)]
        rows = rows.conj().resolve_conj().conj() if given(rank).is_conj() else rows
        calls["all_to_all_single"] = (
            lambda: own.all_to_all_single(whole, rows, [], [], c10d.AllToAllOptions()),
            every,
            [whole],
        )
    return calls


def _rows(rng: random.Random, rank: int, size: int) -> Case:
    """all_to_all_single with as many rows for each."""
    rows = size * rng.randrange(3)
    shape = [rows, *(rng.choice([1, 2, 3]) for _ in range(rng.randrange(3)))]
    input, output = (_any(rng, rng.choice(KINDS), shape) for _ in range(2))
    if rng.random() < 0.6:
        output = torch.empty_strided(shape, input.stride())
    inputs = _fill(input, rank, size)
    _fill(output, 0, 1)

    def row_places(tensor: torch.Tensor) -> list[int] | None:
        each = tensor.numel() // rows if rows else 0
        places = _places(tensor)
        first = places[:each]
        follows = places == [place + row * each for row in range(rows) for place in first]
        return first if _is_dense(tensor) and follows else None

    is_right = row_places(input) is not None and row_places(input) == row_places(output)
    cut = rows // size
    expected = torch.cat([one[rank * cut : (rank + 1) * cut] for one in inputs])
    return Case(
        f"all_to_all_single {_looks(input)} into {_looks(output)}",
        is_right,
        lambda: dist.all_to_all_single(output, input),
        lambda: [(output, expected)],
    )


def _lists(rng: random.Random, rank: int, size: int) -> Case:
    """Everything with lists: what is read may lie in any way, what is written may not overlap itself."""
    shape = _shape(rng)
    one = _any(rng, rng.choice(KINDS), shape)
    many = [_any(rng, rng.choice(KINDS), shape) for _ in range(size)]
    kind, root = rng.choice(["all_gather", "reduce_scatter", "gather", "scatter", "all_to_all"]), rng.randrange(size)
    all_ones = _fill(one, rank, size)
    all_many = [_fill(tensor, rank * size + index, size * size, size, index) for index, tensor in enumerate(many)]
    looks = f"{kind} {_looks(one)} and {', '.join(map(_looks, many))}"
    is_root = rank == root
    if kind in ("all_gather", "gather"):
        written = many
        expected = all_ones if kind == "all_gather" or is_root else [tensor.clone() for tensor in many]
        calls: dict[str, Callable[[], object]] = {
            "all_gather": lambda: dist.all_gather(many, one),
            "gather": lambda: dist.gather(one, many if is_root else None, root),
        }
    elif kind == "all_to_all":
        written = [_any(rng, rng.choice(KINDS), shape) for _ in range(size)]
        for tensor in written:
            _fill(tensor, 0, 1)
        looks += f" into {', '.join(map(_looks, written))}"
        expected = [all_many[rank][other] for other in range(size)]
        calls = {"all_to_all": lambda: dist.all_to_all(written, many)}
    else:
        written = [one]
        mine = all_many[rank]
        expected = [torch.stack(mine).sum(0) if kind == "reduce_scatter" else mine[root]]
        calls = {
            "reduce_scatter": lambda: dist.reduce_scatter(one, many),
            "scatter": lambda: dist.scatter(one, many if is_root else None, root),
        }
    # On ranks other than the root a gather writes nothing, so what lies there does not matter; the cases are alike on all
    # ranks, so that all of them refuse or none.
    is_right = all(len(set(_places(tensor))) == tensor.numel() for tensor in written)
    if kind == "gather" and not is_right:
        return _lists(rng, rank, size)
    return Case(looks, is_right, calls[kind], lambda: list(zip(written, expected, strict=True)))


CASES = {"element-wise": _element_wise, "joined": _joined, "rows": _rows, "lists": _lists}
KINDS = ["contiguous", "permuted", "permuted", "permuted", "slice", "expanded", "odd strides"]


def _shape(rng: random.Random) -> list[int]:
    return [rng.choice([0, 1, 1, 2, 2, 3, 4]) for _ in range(rng.randrange(5))]


def _any(rng: random.Random, kind: str, shape: list[int] | None = None) -> torch.Tensor:
    """A tensor of a shape, on memory of its own."""
    shape = _shape(rng) if shape is None else list(shape)
    dims = list(range(len(shape)))
    if kind == "permuted":
        rng.shuffle(dims)
        return torch.zeros([shape[dim] for dim in dims]).permute([dims.index(dim) for dim in range(len(dims))])
    if kind == "slice" and shape:
        dim = rng.randrange(len(shape))
        larger = [2 * length if at == dim else length for at, length in enumerate(shape)]
        return torch.zeros(larger)[tuple(slice(None, None, 2) if at == dim else slice(None) for at in dims)]
    if kind == "expanded" and shape:
        dim = rng.randrange(len(shape))
        return torch.zeros([1 if at == dim else length for at, length in enumerate(shape)]).expand(shape)
    if kind == "odd strides":
        # The strides of dimensions of size 1 mean nothing.
        dense = torch.zeros(shape)
        strides = [rng.randrange(50) if length == 1 else s for length, s in zip(shape, dense.stride(), strict=True)]
        return dense.as_strided(shape, strides)
    return torch.zeros(shape)


def _fill(tensor: torch.Tensor, which: int, count: int, by: int = 1, offset: int = 0) -> list[torch.Tensor]:
    """Give the tensor the ``which``-th of so many values, and return every ``by``-th of them from the offset on: what all ranks
    have in theirs. Small integers, of which all sums are exact; where elements share their memory, the same ones."""
    places = torch.tensor(_places(tensor), dtype=torch.float32).reshape(tensor.shape)
    values = [places % 97 + 100 * index for index in range(count)]
    tensor.as_strided((max([0, *_places(tensor)]) + 1 if tensor.numel() else 0,), (1,)).copy_(
        torch.arange(max([0, *_places(tensor)]) + 1 if tensor.numel() else 0) % 97 + 100 * which
    )
    return values[offset::by]


def _places(tensor: torch.Tensor) -> list[int]:
    """Where each element lies, in the order of the elements."""
    indices = np.indices(tensor.shape).reshape(tensor.dim(), math.prod(tensor.shape))
    return list(map(int, (np.array(tensor.stride(), dtype=int).reshape(-1, 1) * indices).sum(0)))


def _plain(tensor: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(tensor.shape, dtype=dtype).copy_(tensor)


def _is_dense(tensor: torch.Tensor) -> bool:
    return sorted(_places(tensor)) == list(range(tensor.numel()))


def _looks(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.stride()}"
