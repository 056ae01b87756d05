"""The programs that run on the ranks. Each returns digests of what must be the same on all ranks."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.distributed as dist

from collectives.reference import (
    ALL_DTYPES,
    FLOATS,
    OPERATIONS,
    PREMUL_FACTOR,
    REDUCIBLE,
    fill,
    is_defined,
    raw,
    reduced,
    special_pairs,
)
from torch_uses import bits, world

# Elements. 0, 1, fewer than ranks, odd, one more than a page of bytes, and enough for many frames.
SIZES = [0, 1, 3, 1027, 4097]
LARGE = 1_300_003

# A plain sum, one that is scaled before and one after, and one that does not round. What the others compute, all_reduce shows.
SOME_OPERATIONS = ["SUM", "MAX", "AVG", "PREMUL_SUM"]


def all_reduce(backend: str) -> object:
    """Every dtype with every operation that is defined on it."""
    with world(backend) as (rank, size):
        report = Report(rank)
        gloo = dist.new_group(backend="gloo")
        for dtype, operation, count in _reductions(backend, sizes=[*SIZES, 70_001]):
            inputs = [fill(r, count, dtype, key=operation) for r in range(size)]
            tensor = inputs[rank].clone()
            what = f"all_reduce {operation} of {count} {dtype}"
            with report.during(what):
                dist.all_reduce(tensor, op=_op(operation))
            report.reduced(what, tensor, operation, inputs)
            if _gloo_has(operation, dtype):
                theirs = inputs[rank].clone()
                dist.all_reduce(theirs, op=_op(operation), group=gloo)
                report.agrees_with_gloo(what, tensor, theirs, operation, size)
            report.digest(tensor)
        inputs = [fill(r, LARGE, "float32") for r in range(size)]
        tensor, theirs = inputs[rank].clone(), inputs[rank].clone()
        dist.all_reduce(tensor)
        report.reduced(f"all_reduce SUM of {LARGE} float32", tensor, "SUM", inputs)
        dist.all_reduce(theirs, group=gloo)
        report.agrees_with_gloo(f"all_reduce SUM of {LARGE} float32", tensor, theirs, "SUM", size)
        report.digest(tensor)
        return report.finish()


def sums_of_special_values(backend: str) -> object:
    """NaN, infinities, signed zeros, denormals and overflow: sums as IEEE 754 has them, the same bits on every rank."""
    with world(backend) as (rank, size):
        report = Report(rank)
        for dtype in FLOATS:
            inputs = special_pairs(dtype, size)
            tensor = inputs[rank].clone()
            dist.all_reduce(tensor)
            expected = torch.stack(inputs).double().sum(0).to(tensor.dtype).double()
            got = tensor.double()
            wrong = ~((got == expected) | (got.isnan() & expected.isnan()))
            report.operands(f"SUM of special {dtype}", wrong, inputs, got, expected)
            report.digest(tensor)
        return report.finish()


def extremes_of_special_values(backend: str) -> object:
    """MIN and MAX: NaN wins over numbers, -0 is below +0, whichever rank has which; the same bits on every rank."""
    with world(backend) as (rank, size):
        report = Report(rank)
        for dtype in FLOATS:
            inputs = special_pairs(dtype, size)
            stack_RN = torch.stack(inputs).double()
            negative_RN = torch.signbit(stack_RN)
            for operation, expected, sign in (
                ("MIN", stack_RN.amin(0), negative_RN.any(0)),
                ("MAX", stack_RN.amax(0), negative_RN.all(0)),
            ):
                tensor = inputs[rank].clone()
                dist.all_reduce(tensor, op=_op(operation))
                got = tensor.double()
                wrong = ~((got == expected) | (got.isnan() & expected.isnan()))
                wrong |= (expected == 0) & (torch.signbit(got) != sign)
                report.operands(f"{operation} of special {dtype}", wrong, inputs, got, expected)
                report.digest(tensor)
        return report.finish()


def all_reduce_refuses(backend: str) -> object:
    """Operations that a dtype does not have are refused on all ranks without a word on the wire; the group works on."""
    with world(backend) as (rank, size):
        report = Report(rank)
        refused = [
            (o, d) for d in ALL_DTYPES for o in OPERATIONS if not is_defined(o, d) and not d.startswith("complex")
        ]
        for operation, dtype in refused:
            tensor = fill(rank, 8, dtype)
            before = bits(tensor)
            try:
                dist.all_reduce(tensor, op=_op(operation))
            except (TypeError, ValueError, RuntimeError) as error:
                if dtype not in str(error) and "dtype" not in str(error) and "type" not in str(error):
                    report.wrong(f"{operation} of {dtype} is refused without naming the dtype: {error}")
            else:
                report.wrong(f"{operation} of {dtype} is not refused")
            if bits(tensor) != before:
                report.wrong(f"the refused {operation} of {dtype} changed the tensor")
        tensor = torch.ones(10)
        dist.all_reduce(tensor)
        report.equal("all_reduce after refusals", tensor, torch.full((10,), float(size)))
        return report.finish()


def all_reduce_coalesced(backend: str) -> object:
    """Several tensors of different sizes in one call."""
    with world(backend) as (rank, size):
        report = Report(rank)
        for dtype in ("float32", "bfloat16", "int64"):
            counts = [1, 0, 1027, 70_001, 3]
            inputs = [[fill(r, count, dtype) for count in counts] for r in range(size)]
            tensors = [one.clone() for one in inputs[rank]]
            dist.all_reduce_coalesced(tensors)
            for i, tensor in enumerate(tensors):
                report.reduced(f"all_reduce_coalesced, tensor {i}, {dtype}", tensor, "SUM", [one[i] for one in inputs])
            report.digest(*tensors)
        return report.finish()


def reduce(backend: str) -> object:
    """Every root with every operation, every dtype and every size."""
    with world(backend) as (rank, size):
        report = Report(rank)
        for dtype, operation, count in _reductions(backend, operations=SOME_OPERATIONS):
            # In turn: any two of root, operation, dtype and size meet, if not any four.
            root = (REDUCIBLE.index(dtype) + SOME_OPERATIONS.index(operation) + SIZES.index(count)) % size
            inputs = [fill(r, count, dtype, key=f"{operation}{root}") for r in range(size)]
            tensor = inputs[rank].clone()
            what = f"reduce {operation} of {count} {dtype} to {root}"
            with report.during(what):
                dist.reduce(tensor, dst=root, op=_op(operation))
            if rank == root:
                report.reduced(what, tensor, operation, inputs)
        return report.finish()


def reduce_scatter(backend: str) -> object:
    """From one tensor and from a list, and in place: the output is a part of the input."""
    with world(backend) as (rank, size):
        report = Report(rank)
        for dtype, operation, count in _reductions(backend, operations=SOME_OPERATIONS, sizes=[*SIZES, 30_011]):
            inputs = [fill(r, count * size, dtype, key=operation) for r in range(size)]
            part = slice(rank * count, (rank + 1) * count)
            expected = [one[part] for one in inputs]
            what = f"reduce_scatter_tensor {operation} of {count} {dtype}"
            source, output = inputs[rank].clone(), torch.empty(count, dtype=inputs[0].dtype)
            with report.during(what):
                dist.reduce_scatter_tensor(output, source, op=_op(operation))
            report.reduced(what, output, operation, expected)
            report.equal(f"{what}: the input", source, inputs[rank])
            if count in (3, 1027):
                output = torch.empty(count, dtype=inputs[0].dtype)
                pieces = list(inputs[rank].clone().chunk(size))
                with report.during(f"{what} (list)"):
                    dist.reduce_scatter(output, pieces, op=_op(operation))
                report.reduced(f"{what} (list)", output, operation, expected)
                source = inputs[rank].clone()
                with report.during(f"{what} (in place)"):
                    dist.reduce_scatter_tensor(source[part], source, op=_op(operation))
                report.reduced(f"{what} (in place)", source[part], operation, expected)
        return report.finish()


def reduce_scatter_uneven(backend: str) -> object:
    """The list form with parts of different sizes, also none."""
    with world(backend) as (rank, size):
        report = Report(rank)
        counts = [7 * r if r != 1 else 0 for r in range(size)]
        inputs = [[fill(r, count, "float32", key=str(i)) for i, count in enumerate(counts)] for r in range(size)]
        output = torch.empty(counts[rank])
        dist.reduce_scatter(output, [one.clone() for one in inputs[rank]])
        report.reduced("reduce_scatter, uneven", output, "SUM", [one[rank] for one in inputs])
        return report.finish()


def all_gather(backend: str) -> object:
    """Into a list, into one tensor (joined and stacked), and in place: the input is a part of the output."""
    with world(backend) as (rank, size):
        report = Report(rank)
        for dtype in _moved(backend):
            for count in [*SIZES, 30_011]:
                inputs = [fill(r, count, dtype) for r in range(size)]
                joined = torch.cat(inputs)
                what = f"all_gather of {count} {dtype}"
                outputs = [torch.empty_like(one) for one in inputs]
                with report.during(what):
                    dist.all_gather(outputs, inputs[rank])
                report.equal(what, torch.cat(outputs), joined)
                single = torch.empty(size * count, dtype=inputs[0].dtype)
                with report.during(f"{what} (single)"):
                    dist.all_gather_into_tensor(single, inputs[rank])
                report.equal(f"{what} (single)", single, joined)
                single = torch.empty(size * count, dtype=inputs[0].dtype)
                mine = single[rank * count : (rank + 1) * count]
                mine.copy_(inputs[rank])
                with report.during(f"{what} (in place)"):
                    dist.all_gather_into_tensor(single, mine)
                report.equal(f"{what} (in place)", single, joined)
                report.digest(single)
        return report.finish()


def all_gather_stacked(backend: str) -> object:
    """all_gather_into_tensor into a tensor with one more dimension."""
    with world(backend) as (rank, size):
        report = Report(rank)
        for count in SIZES:
            inputs = [fill(r, count, "float32") for r in range(size)]
            output = torch.empty(size, count)
            with report.during(f"{count} elements"):
                dist.all_gather_into_tensor(output, inputs[rank])
            report.equal(f"{count} elements", output, torch.stack(inputs))
        return report.finish()


def all_gather_uneven(backend: str) -> object:
    """The list form with tensors of different sizes, also none."""
    with world(backend) as (rank, size):
        report = Report(rank)
        counts = [5000 * r if r != 1 else 0 for r in range(size)]
        inputs = [fill(r, count, "float32") for r, count in enumerate(counts)]
        outputs = [torch.empty(count) for count in counts]
        dist.all_gather(outputs, inputs[rank])
        for r in range(size):
            report.equal(f"all_gather, uneven, from {r}", outputs[r], inputs[r])
        return report.finish()


def broadcast(backend: str) -> object:
    """Every root."""
    with world(backend) as (rank, size):
        report = Report(rank)
        for dtype, count, root in _rooted(backend, size, [*SIZES, 70_001]):
            expected = fill(root, count, dtype)
            tensor = expected.clone() if rank == root else torch.zeros_like(expected)
            what = f"broadcast of {count} {dtype} from {root}"
            with report.during(what):
                dist.broadcast(tensor, src=root)
            report.equal(what, tensor, expected)
        for root in range(size):
            expected = fill(root, LARGE, "float32")
            tensor = expected.clone() if rank == root else torch.zeros_like(expected)
            dist.broadcast(tensor, src=root)
            report.equal(f"broadcast of {LARGE} float32 from {root}", tensor, expected)
        return report.finish()


def gather(backend: str) -> object:
    """Every root."""
    with world(backend) as (rank, size):
        report = Report(rank)
        for dtype, count, root in _rooted(backend, size, [*SIZES, 30_011]):
            inputs = [fill(r, count, dtype, key=str(root)) for r in range(size)]
            outputs = [torch.empty_like(one) for one in inputs] if rank == root else None
            what = f"gather of {count} {dtype} to {root}"
            with report.during(what):
                dist.gather(inputs[rank], outputs, dst=root)
            if outputs is not None:
                report.equal(what, torch.cat(outputs), torch.cat(inputs))
        return report.finish()


def scatter(backend: str) -> object:
    """Every root."""
    with world(backend) as (rank, size):
        report = Report(rank)
        for dtype, count, root in _rooted(backend, size, [*SIZES, 30_011]):
            parts = [fill(r, count, dtype, key=str(root)) for r in range(size)]
            output = torch.empty_like(parts[rank])
            what = f"scatter of {count} {dtype} from {root}"
            with report.during(what):
                dist.scatter(output, parts if rank == root else None, src=root)
            report.equal(what, output, parts[rank])
        return report.finish()


def all_to_all_single(backend: str) -> object:
    """Even, with splits, with splits of nothing, and rows of several elements."""
    with world(backend) as (rank, size):
        report = Report(rank)
        for dtype in _moved(backend):
            for rows, width in ((1, 1), (3, 5), (257, 16)):
                # What rank s sends to rank d, as a matrix of row counts: even, uneven, and mostly empty.
                for name, counts in (
                    ("even", [[rows] * size for _ in range(size)]),
                    ("uneven", [[rows + s + 2 * d for d in range(size)] for s in range(size)]),
                    ("sparse", [[rows if (s + d) % size == 0 else 0 for d in range(size)] for s in range(size)]),
                ):
                    sent = [fill(s, sum(counts[s]) * width, dtype, key=name).view(-1, width) for s in range(size)]
                    expected = torch.cat([sent[s].split(counts[s])[rank] for s in range(size)])
                    received = [counts[s][rank] for s in range(size)]
                    output = torch.empty(sum(received), width, dtype=sent[0].dtype)
                    what = f"all_to_all_single of {rows} x {width} {dtype}, {name}"
                    splits = (
                        {} if name == "even" else {"output_split_sizes": received, "input_split_sizes": counts[rank]}
                    )
                    with report.during(what):
                        dist.all_to_all_single(output, sent[rank], **splits)
                    report.equal(what, output, expected)
        return report.finish()


def all_to_all(backend: str) -> object:
    """Lists of tensors, of one size and of different sizes, as experts exchange tokens."""
    with world(backend) as (rank, size):
        report = Report(rank)
        uneven = [[100 * s + 7 * d for d in range(size)] for s in range(size)]
        for dtype in ("float32", "bfloat16", "int64", "uint8"):
            for counts in ([[50] * size] * size, uneven):
                sent = [[fill(s, counts[s][d], dtype, key=f"to {d}") for d in range(size)] for s in range(size)]
                outputs = [torch.empty_like(sent[s][rank]) for s in range(size)]
                what = f"all_to_all of {dtype}, counts {counts}"
                with report.during(what):
                    dist.all_to_all(outputs, sent[rank])
                for s in range(size):
                    report.equal(f"{what}, from {s}", outputs[s], sent[s][rank])
        return report.finish()


def send_and_recv(backend: str) -> object:
    """Between every pair of ranks, in both directions at once."""
    with world(backend) as (rank, size):
        report = Report(rank)
        for dtype in _moved(backend):
            for count in [*SIZES[1:], 70_001]:
                works, received = [], {}
                for peer in range(size):
                    if peer != rank:
                        received[peer] = torch.empty_like(fill(peer, count, dtype))
                        works.append(dist.irecv(received[peer], src=peer))
                        works.append(dist.isend(fill(rank, count, dtype, key=f"to {peer}"), dst=peer))
                for work in works:
                    work.wait()
                for peer, tensor in received.items():
                    expected = fill(peer, count, dtype, key=f"to {rank}")
                    report.equal(f"{count} {dtype} from {peer}", tensor, expected)
        return report.finish()


def sequence(backend: str, seed: int) -> object:
    """200 random collectives, up to 12 in flight, waited for in an order that differs from rank to rank."""
    with world(backend) as (rank, size):
        report = Report(rank)
        program, order = random.Random(seed), random.Random(f"{seed} {rank}")
        in_flight: list[tuple[dist.Work, Callable[[], None]]] = []
        for turn in range(200):
            kind = program.choice(["all_reduce", "broadcast", "all_gather", "reduce_scatter", "reduce", "barrier"])
            count = program.choice([0, 1, 5, 100, 2000, 50_000])
            dtype = program.choice(["float32", "bfloat16", "int32", "uint8"])
            root = program.randrange(size)
            in_flight.append(_issue(report, f"seed {seed}, turn {turn}: {kind}", kind, count, dtype, root, rank, size))
            while len(in_flight) > program.choice([0, 4, 12]):
                work, check = in_flight.pop(order.randrange(len(in_flight)))
                work.wait()
                check()
        for work, check in in_flight:
            work.wait()
            check()
        return report.finish()


def _issue(
    report: Report, what: str, kind: str, count: int, dtype: str, root: int, rank: int, size: int
) -> tuple[dist.Work, Callable[[], None]]:
    """Start one collective; returns its work and the check of its result."""
    inputs = [fill(r, count, dtype, key=what) for r in range(size)]
    what = f"{what} of {count} {dtype}"
    tensor = inputs[rank].clone()
    if kind == "all_reduce":
        return dist.all_reduce(tensor, async_op=True), lambda: report.reduced(what, tensor, "SUM", inputs)
    if kind == "broadcast":
        return dist.broadcast(tensor, src=root, async_op=True), lambda: report.equal(what, tensor, inputs[root])
    if kind == "all_gather":
        joined = torch.empty(size * count, dtype=tensor.dtype)
        work = dist.all_gather_into_tensor(joined, tensor, async_op=True)
        return work, lambda: report.equal(what, joined, torch.cat(inputs))
    if kind == "reduce_scatter":
        wide = [fill(r, count * size, dtype, key=what) for r in range(size)]
        work = dist.reduce_scatter_tensor(tensor, wide[rank].clone(), op=dist.ReduceOp.MAX, async_op=True)
        part = slice(rank * count, (rank + 1) * count)
        return work, lambda: report.reduced(what, tensor, "MAX", [one[part] for one in wide])
    if kind == "reduce":
        work = dist.reduce(tensor, dst=root, async_op=True)
        return work, lambda: report.reduced(what, tensor, "SUM", inputs) if rank == root else None
    return dist.barrier(async_op=True), lambda: None


class Report:
    """Collects wrong results, so that one run shows all of them, and digests of results."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._wrong: list[str] = []
        self._digests: list[str] = []

    @contextlib.contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Hold a collective that must not fail; if it does, report that and what was wrong before."""
        try:
            yield
        except (RuntimeError, TypeError, ValueError) as error:
            self.wrong(f"{what}: {type(error).__name__}: {error}")
            self.finish()

    @contextlib.contextmanager
    def refused(self, what: str) -> Iterator[None]:
        """Hold a collective that must be refused before anything is sent."""
        try:
            yield
        except (RuntimeError, TypeError, ValueError) as error:
            if "Nothing was sent. The group is still usable." not in str(error):
                self.wrong(f"{what}: {type(error).__name__}: {error}")
        else:
            self.wrong(f"{what} is not refused")

    def reduced(self, what: str, got: torch.Tensor, operation: str, inputs: list[torch.Tensor]) -> None:
        expected, tolerance = reduced(operation, inputs)
        numbers = got.double().numpy() if got.dtype.is_floating_point else got.numpy()
        with np.errstate(over="ignore"):
            off = np.abs(numbers - expected) > tolerance if got.dtype.is_floating_point else numbers != expected
        if off.any():
            at = int(off.nonzero()[0][0])
            operands = [one[at].item() for one in inputs]
            self.wrong(f"{what}: {off.sum()} wrong, first at {at}: {operands} gave {numbers[at]}, not {expected[at]}")

    def equal(self, what: str, got: torch.Tensor, expected: torch.Tensor) -> None:
        """The same shape, dtype and bits."""
        if got.shape != expected.shape or got.dtype != expected.dtype:
            self.wrong(f"{what}: {got.dtype} {tuple(got.shape)}, not {expected.dtype} {tuple(expected.shape)}")
            return
        off = (
            (raw(got) != raw(expected)).view(got.numel(), got.element_size()).any(1) if got.numel() else torch.zeros(0)
        )
        if off.any():
            at = int(off.nonzero()[0])
            values = got.reshape(-1)[at].item(), expected.reshape(-1)[at].item()
            self.wrong(f"{what}: {int(off.sum())} wrong, first at {at}: {values[0]}, not {values[1]}")

    def agrees_with_gloo(self, what: str, got: torch.Tensor, theirs: torch.Tensor, operation: str, ranks: int) -> None:
        """Two ranks leave no choice: one rounding of two operands. More may be added in another order."""
        exact = (ranks <= 2 and operation in ("SUM", "PRODUCT")) or operation in ("MIN", "MAX")
        if exact or not got.dtype.is_floating_point:
            self.equal(f"{what}, against gloo", got, theirs)
        else:
            slack = (ranks + 2) * ranks * 2 * torch.finfo(got.dtype).eps
            off = (got.double() - theirs.double()).abs() > slack * (1 + theirs.double().abs())
            if off.any():
                self.wrong(f"{what}: {int(off.sum())} differ from gloo")

    def operands(
        self, what: str, off: torch.Tensor, inputs: list[torch.Tensor], got: torch.Tensor, expected: torch.Tensor
    ) -> None:
        """Report the first element of `off` with what every rank put in."""
        if off.any():
            at = int(off.nonzero()[0])
            operands = [one[at].item() for one in inputs]
            self.wrong(f"{what}: {int(off.sum())} wrong, {operands} gave {got[at].item()}, not {expected[at].item()}")

    def digest(self, *tensors: torch.Tensor) -> None:
        self._digests.append(bits(*tensors))

    def wrong(self, text: str) -> None:
        self._wrong.append(text)
        if len(self._wrong) >= _MOST_WRONG:
            self.finish()

    def finish(self) -> list[str]:
        if self._wrong:
            wrong = "\n".join(self._wrong)
            raise AssertionError(f"rank {self._rank} found wrong results (it stops after {_MOST_WRONG}):\n{wrong}")
        return self._digests


def _reductions(
    backend: str, operations: list[str] = OPERATIONS, sizes: list[int] = SIZES
) -> Iterator[tuple[str, str, int]]:
    for dtype in REDUCIBLE:
        for operation in operations:
            if is_defined(operation, dtype) and (backend != "gloo" or _gloo_has(operation, dtype)):
                for count in sizes:
                    yield dtype, operation, count


def _rooted(backend: str, size: int, counts: list[int]) -> Iterator[tuple[str, int, int]]:
    """Every dtype with every count, and roots in turn: each root meets every dtype and every count, if not every pair."""
    for i, dtype in enumerate(_moved(backend)):
        for j, count in enumerate(counts):
            yield dtype, count, (i + j) % size


def _gloo_has(operation: str, dtype: str) -> bool:
    return dtype in _GLOO_DTYPES and (
        operation in ("SUM", "PRODUCT", "MIN", "MAX") or (dtype not in FLOATS and operation != "AVG")
    )


def _moved(backend: str) -> list[str]:
    """The dtypes that an operation which only moves data takes: all, but gloo knows only some."""
    return ALL_DTYPES if backend != "gloo" else _GLOO_DTYPES


def _op(operation: str) -> dist.ReduceOp:
    if operation == "PREMUL_SUM":
        return dist._make_nccl_premul_sum(PREMUL_FACTOR)
    return getattr(dist.ReduceOp, operation)


_GLOO_DTYPES = [*FLOATS, "int8", "int32", "int64", "uint8"]

_MOST_WRONG = 40
