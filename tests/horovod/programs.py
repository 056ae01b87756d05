"""What ranks run in tests/test_horovod.py. Each program checks its results itself; what it returns must be alike on all ranks."""

from __future__ import annotations

import gc
import logging
import os
import pathlib
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

import ranks
from raising import calls_back, half_way


def permuted_order() -> list[float]:
    """Sixty operations of all kinds in another order on every rank, more than a round can announce."""
    import penstock.horovod.torch as hvd

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    total = size * (size - 1) / 2
    names = [f"{kind}{number}" for kind in ("sum", "mean", "max", "gather", "cast", "half") for number in range(10)]
    random.Random(rank).shuffle(names)
    handles = {}
    for name in names:
        value = torch.full((3, int(name[-1])), rank + int(name[-1]), dtype=torch.float32)
        if name.startswith("sum"):
            handles[name] = hvd.allreduce_async(value, name=name, op=hvd.Sum)
        elif name.startswith("mean"):
            handles[name] = hvd.allreduce_async(value, name=name)
        elif name.startswith("max"):
            handles[name] = hvd.allreduce_async(value.int(), name=name, op=hvd.Max)
        elif name.startswith("half"):
            handles[name] = hvd.allreduce_async_(value.half(), name=name, op=hvd.Sum, postscale_factor=0.5)
        elif name.startswith("gather"):
            handles[name] = hvd.allgather_async(value[: rank + 1], name=name)
        else:
            handles[name] = hvd.broadcast_async(value, size - 1, name=name)
    results = {name: hvd.synchronize(handle) for name, handle in handles.items()}
    for name, result in results.items():
        number = int(name[-1])
        if name.startswith("gather"):
            expected = torch.cat([torch.full((other + 1, number), other + number) for other in range(size)])[
                : result.shape[0]
            ]
            assert result.shape[0] == sum(min(other + 1, 3) for other in range(size))
            expected = torch.cat(
                [torch.full((min(other + 1, 3), number), float(other + number)) for other in range(size)]
            )
        else:
            value = {
                "sum": total + size * number,
                "mean": (total + size * number) / size,
                "max": size - 1 + number,
                "half": (total + size * number) / 2,
                "cast": size - 1 + number,
            }[name[:-1]]
            expected = torch.full((3, number), value, dtype=result.dtype)
        assert torch.equal(result, expected), (name, result, expected)
    return [float(results[name].double().sum()) for name in sorted(results)]


def every_call() -> list[Any]:
    """Each function of the API once, with values that show where they come from."""
    import penstock.horovod.torch as hvd

    hvd.init(process_sets="dynamic")
    rank, size = hvd.rank(), hvd.size()
    total = size * (size - 1) // 2
    own = torch.arange(4.0) + 10 * rank
    summed = torch.arange(4.0) * size + 10 * total

    assert torch.equal(hvd.allreduce(own, op=hvd.Sum), summed)
    assert torch.allclose(hvd.allreduce(own), summed / size)
    assert torch.equal(hvd.allreduce_(own.clone(), op=hvd.Sum), summed)
    assert torch.equal(hvd.synchronize(hvd.allreduce_async_(own.clone(), op=hvd.Min)), torch.arange(4.0))
    assert torch.equal(hvd.allreduce(own.long(), op=hvd.Average), torch.arange(4) + 10 * total // size)
    assert torch.equal(hvd.allreduce(torch.full((2,), 2), op=hvd.Product), torch.full((2,), 2**size))
    assert torch.equal(hvd.allreduce(own, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0), summed * 2)
    for result in (
        *hvd.grouped_allreduce([own, own], op=hvd.Sum),
        *hvd.grouped_allreduce_([own.clone(), own.clone()], op=hvd.Sum),
        *hvd.synchronize(hvd.grouped_allreduce_async([own, own], op=hvd.Sum)),
        *hvd.synchronize(hvd.grouped_allreduce_async_([own.clone(), own.clone()], op=hvd.Sum)),
    ):
        assert torch.equal(result, summed)

    rows = [torch.full((other, 2), other) for other in range(size)]
    assert torch.equal(hvd.allgather(rows[rank]), torch.cat(rows))
    for result in hvd.grouped_allgather([rows[rank], rows[rank]]):
        assert torch.equal(result, torch.cat(rows))
    assert torch.equal(hvd.synchronize(hvd.grouped_allgather_async([rows[rank]]))[0], torch.cat(rows))

    root = size - 1
    assert torch.equal(hvd.broadcast(own, root), torch.arange(4.0) + 10 * root)
    assert torch.equal(hvd.broadcast_(own.clone(), root), torch.arange(4.0) + 10 * root)
    assert torch.equal(hvd.synchronize(hvd.broadcast_async_(own.clone(), 0)), torch.arange(4.0))

    sent = torch.repeat_interleave(torch.arange(size) + 100 * rank, 2)
    assert hvd.alltoall(sent).tolist() == [rank + 100 * other for other in range(size) for _ in range(2)]
    received, splits = hvd.alltoall(sent, splits=[2] * size)
    assert splits.tolist() == [2] * size and received.numel() == 2 * size
    assert hvd.synchronize(hvd.alltoall_async(torch.arange(size)))[0].tolist() == [rank] * size

    matrix = torch.arange(size * 2 + 1).float().unsqueeze(1)
    scattered = hvd.reducescatter(matrix, op=hvd.Sum)
    sizes = [int(part) for part in hvd.allgather(torch.tensor([scattered.shape[0]]))]
    assert sizes == [3] + [2] * (size - 1)
    assert torch.equal(hvd.allgather(scattered), matrix * size)
    assert torch.equal(hvd.allgather(hvd.reducescatter(matrix)), matrix)
    assert torch.equal(hvd.allgather(hvd.grouped_reducescatter([matrix], op=hvd.Sum)[0]), matrix * size)
    hvd.synchronize(hvd.grouped_reducescatter_async([matrix]))
    hvd.synchronize(hvd.reducescatter_async(matrix))

    sparse = torch.sparse_coo_tensor([[rank, size]], [1.0, 2.0], (size + 1,), check_invariants=True)
    dense = hvd.sparse_allreduce_async(sparse, name="sparse", op=hvd.Sum)().to_dense()
    assert dense.tolist() == [1.0] * size + [2.0 * size]

    for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16):
        result = hvd.allreduce(own, op=hvd.Sum, compression=compression)
        assert result.dtype == torch.float32 and torch.allclose(result, summed)

    assert hvd.broadcast_object({"rank": rank} if rank == root else None, root) == {"rank": root}
    assert hvd.allgather_object(rank * "x") == [other * "x" for other in range(size)]

    handle = hvd.allreduce_async(own, name="polled")
    hvd.barrier()
    deadline = time.monotonic() + 20
    while not hvd.poll(handle):
        assert time.monotonic() < deadline
    hvd.synchronize(handle)
    assert hvd.synchronize(handle) is None

    if size > 1:
        process_sets(own)
    assert not hvd.remove_process_set(hvd.global_process_set)

    assert hvd.join() in range(size)
    answers = [
        *(hvd.size(), hvd.local_size(), hvd.cross_size(), hvd.cross_rank(), hvd.is_homogeneous()),
        *(hvd.mpi_enabled(), hvd.mpi_built(), hvd.gloo_enabled(), hvd.gloo_built(), hvd.nccl_built()),
        *(hvd.ddl_built(), hvd.ccl_built(), hvd.rocm_built(), hvd.is_initialized()),
    ]
    assert hvd.rank() == rank == hvd.local_rank()
    with_error(ValueError, "MPI is not enabled", hvd.mpi_threads_supported)
    hvd.shutdown()
    assert not hvd.is_initialized()
    with_error(ValueError, "use hvd.init()", hvd.rank)
    with_error(hvd.HorovodInternalError, "use hvd.init()", lambda: hvd.allreduce(own))
    hvd.init()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
    return answers


def process_sets(own: torch.Tensor) -> None:
    """Some ranks among themselves, while the others are refused."""
    import penstock.horovod.torch as hvd

    rank, size = hvd.rank(), hvd.size()
    evens = hvd.add_process_set(range(0, size, 2))
    assert (evens.included(), evens.size()) == (rank % 2 == 0, (size + 1) // 2)
    if evens.included():
        assert evens.rank() == rank // 2
        expected = float(sum(range(0, size, 2)))
        assert hvd.allreduce(torch.tensor(float(rank)), op=hvd.Sum, process_set=evens) == expected
        assert hvd.broadcast(torch.tensor(rank), 0, process_set=evens) == 0
    else:
        with_error(ValueError, "is not a member", lambda: hvd.allreduce(own, process_set=evens))
    assert hvd.remove_process_set(evens) and not hvd.remove_process_set(evens)
    with_error(ValueError, "does not exist", lambda: hvd.allreduce(own, process_set=evens))


def mismatches() -> list[str]:
    """What ranks do differently under one name fails on all of them with Horovod's words, and what follows works."""
    import penstock.horovod.torch as hvd

    hvd.init()
    rank = hvd.rank()
    odd = rank % 2
    tries = [
        lambda: hvd.allreduce(torch.ones(3 + odd), name="a"),
        lambda: hvd.allreduce(torch.ones(3, dtype=(torch.float32, torch.int32)[odd]), name="a"),
        lambda: hvd.allreduce(torch.ones(3), name="a", op=(hvd.Sum, hvd.Max)[odd]),
        lambda: hvd.allreduce(torch.ones(3), name="a", prescale_factor=1.0 + odd),
        lambda: hvd.broadcast(torch.ones(3), root_rank=odd, name="a"),
        lambda: hvd.allgather(torch.ones(2, 3 + odd), name="a"),
        lambda: hvd.allgather(torch.ones((2,) * (1 + odd)), name="a"),
        lambda: hvd.allgather(torch.ones(()), name="a"),
        lambda: hvd.alltoall(torch.ones(6, 3 + odd), name="a"),
        lambda: hvd.reducescatter(torch.ones(6 + odd), name="a"),
    ]
    texts = []
    for one in tries:
        try:
            one()
        except hvd.HorovodInternalError as error:
            texts.append(str(error))
        else:
            raise AssertionError("it did not fail")
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
    return texts


def in_inference_mode(who: str) -> list[Any]:
    """Metrics are reduced and gathered in ``torch.inference_mode()``, on all ranks or on the first alone."""
    import penstock.horovod.torch as hvd

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    total = size * (size - 1) / 2
    with torch.inference_mode(who == "all" or rank == 0):
        own = torch.full((size, 2), float(rank))
        assert torch.equal(hvd.allreduce(own, op=hvd.Sum), torch.full((size, 2), total))
        assert torch.equal(hvd.allreduce(own), torch.full((size, 2), total / size))
        assert torch.equal(
            hvd.allreduce(own.long(), op=hvd.Sum, postscale_factor=2.0), torch.full((size, 2), int(total) * 2)
        )
        assert torch.equal(hvd.allreduce_(own.clone(), op=hvd.Sum), torch.full((size, 2), total))
        for result in hvd.grouped_allreduce([own, own.clone()], op=hvd.Sum):
            assert torch.equal(result, torch.full((size, 2), total))
        assert torch.allclose(hvd.allreduce(torch.ones(3), op=hvd.Adasum), torch.ones(3))
        rows = [torch.full((other + 1, 2), float(other)) for other in range(size)]
        assert torch.equal(hvd.allgather(rows[rank]), torch.cat(rows))
        assert torch.equal(hvd.allgather(rows[0]), torch.cat([rows[0]] * size))
        assert hvd.allgather_object({"rank": rank}) == [{"rank": other} for other in range(size)]
        assert hvd.broadcast_object(rank, size - 1) == size - 1
        assert torch.equal(hvd.broadcast(own, size - 1), torch.full((size, 2), size - 1.0))
        assert torch.equal(hvd.reducescatter(own, op=hvd.Sum), torch.full((1, 2), total))
        assert torch.equal(hvd.reducescatter(own.long(), op=hvd.Average), torch.full((1, 2), int(total) // size))
        assert hvd.alltoall(own)[:, 0].tolist() == [float(other) for other in range(size)]
        received, splits = hvd.alltoall(own, splits=[1] * size)
        assert received[:, 0].tolist() == [float(other) for other in range(size)] and splits.tolist() == [1] * size
    model = torch.nn.Linear(2, 1)
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model(hvd.allreduce(torch.ones(1, 2, requires_grad=True))).sum().backward()
    optimizer.step()
    return [model.weight.tolist()]


def with_error(kind: type[BaseException], text: str, call: Any) -> None:
    try:
        call()
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"no {kind.__name__} was raised")


def wrong_arguments() -> None:
    """What is wrong on one rank alone is refused there at once; nothing is sent, and what follows works."""
    import penstock.horovod.torch as hvd

    hvd.init()
    ones, size = torch.ones(4), hvd.size()
    if hvd.rank() == 0:
        with_error(ValueError, "contiguous", lambda: hvd.allreduce(torch.ones(4, 4).t()))
        with_error(ValueError, "is not supported", lambda: hvd.allreduce(torch.ones(2, dtype=torch.bool)))
        with_error(ValueError, "is not supported", lambda: hvd.allreduce(torch.ones(2).to_sparse()))
        with_error(ValueError, "supersedes average", lambda: hvd.allreduce(ones, average=True, op=hvd.Sum))
        with_error(ValueError, "invalid root rank", lambda: hvd.broadcast(ones, size))
        with_error(ValueError, "32-bit integer", lambda: hvd.alltoall(ones, torch.ones(size)))
        with_error(ValueError, "Number of entries", lambda: hvd.alltoall(ones, [1] * (size + 1)))
        with_error(ValueError, "0 or more", lambda: hvd.alltoall(ones, [-1] + [1] * (size - 1)))
        with_error(ValueError, "Sum of splits", lambda: hvd.alltoall(ones, [5] * size))
        with_error(ValueError, "HOROVOD_DYNAMIC_PROCESS_SETS", lambda: hvd.add_process_set([0]))
        with_error(ValueError, "was not created", lambda: hvd.poll(-1))
        with_error(ValueError, "DYNAMIC", lambda: hvd.start_timeline("nowhere"))
        with_error(ValueError, "invalid params", lambda: hvd.broadcast_parameters(3, 0))
        odd = {"a": ones, "b": torch.ones(2).to(torch.float8_e5m2)}
        with_error(ValueError, "is not supported", lambda: hvd.broadcast_parameters(odd, 0))
        model = torch.nn.Linear(1, 1)
        lbfgs = torch.optim.LBFGS(model.parameters())
        with_error(ValueError, "LBFGS", lambda: hvd.broadcast_optimizer_state(lbfgs, 0))
        sgd = torch.optim.SGD(model.parameters())
        for text, arguments in (
            ("must be > 0", {"backward_passes_per_step": 0}),
            ("op != Average", {"gradient_predivide_factor": 2.0, "op": hvd.Sum}),
            ("non-negative integer", {"groups": 0}),
            ("only appear once", {"groups": [[model.weight, model.weight]]}),
            ("unique", {"named_parameters": [("a", model.weight), ("a", model.bias)]}),
            ("were not named", {"named_parameters": [("a", model.weight)]}),
            ("sequence of tuples", {"named_parameters": [model.weight]}),
        ):
            with_error(ValueError, text, lambda kw=arguments: hvd.DistributedOptimizer(sgd, **kw))
    if hvd.rank() == 0 and size > 1:
        # The others do not have it before the barrier, so it is pending.
        hvd.allreduce_async(ones, name="twice")
        with_error(ValueError, "same name", lambda: hvd.allreduce_async(ones, name="twice"))
    hvd.barrier()
    hvd.broadcast_parameters({"a": ones}, 0)
    if hvd.rank() > 0:
        hvd.allreduce_async(ones, name="twice")
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size


def gradients() -> None:
    """Gradients of operations are those of the mathematics: what a loss over all ranks' outputs gives."""
    import penstock.horovod.torch as hvd

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    x = torch.ones(size * 2, requires_grad=True)
    cases = [
        (lambda: hvd.allreduce(x, op=hvd.Sum), torch.full((size * 2,), float(size))),
        (lambda: hvd.allreduce(x), torch.ones(size * 2)),
        (lambda: hvd.grouped_allreduce([x], op=hvd.Sum)[0], torch.full((size * 2,), float(size))),
        (lambda: hvd.allgather(x), torch.ones(size * 2)),
        (lambda: hvd.grouped_allgather([x])[0], torch.ones(size * 2)),
        (lambda: hvd.broadcast(x, 0), torch.full((size * 2,), float(rank == 0))),
        (lambda: hvd.alltoall(x), torch.ones(size * 2)),
        (lambda: hvd.reducescatter(x, op=hvd.Sum), torch.full((size * 2,), float(size))),
        (lambda: hvd.grouped_reducescatter([x])[0], torch.ones(size * 2)),
    ]
    for call, expected in cases:
        x.grad = None
        call().sum().backward()
        assert torch.equal(x.grad, expected), (x.grad, expected)


class Net(torch.nn.Module):
    """Small, with a layer that is not always used and, if wanted, sparse gradients."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(12, 6, sparse=sparse)
        self.first = torch.nn.Linear(6, 16)
        self.side = torch.nn.Linear(16, 16)
        self.last = torch.nn.Linear(16, 3)

    def forward(self, words: torch.Tensor, side: bool = False) -> torch.Tensor:
        hidden = torch.tanh(self.first(self.embedding(words).mean(1)))
        return self.last(torch.tanh(self.side(hidden)) if side else hidden)


def training(options: dict[str, Any], passes: int, steps: int = 4) -> list[float]:
    """A distributed training takes the same way as one process that sees all batches."""
    import penstock.horovod.torch as hvd

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    options = dict(options)
    compression = options.pop("compression", "none")
    sparse = options.pop("sparse", False)
    op = {"Average": hvd.Average, "Sum": hvd.Sum}[options.pop("op", "Average")]
    torch.manual_seed(rank)
    model = Net(sparse)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    torch.manual_seed(0)
    reference = Net(sparse)
    assert torch.equal(reference.first.weight, model.first.weight)
    options.setdefault("named_parameters", model.named_parameters())
    if options.get("groups") == "lists":
        options["groups"] = [[model.first.weight, model.first.bias], [model.last.weight]]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.0 if sparse else 0.9),
        compression=getattr(hvd.Compression, compression),
        backward_passes_per_step=passes,
        op=op,
        **options,
    )
    assert isinstance(optimizer, torch.optim.SGD) and type(optimizer).__name__ == "SGD"
    alone = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.0 if sparse else 0.9)
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        words = torch.randint(0, 12, (passes, size, 5, 4), generator=generator)
        targets = torch.randint(0, 3, (passes, size, 5), generator=generator)
        optimizer.zero_grad()
        alone.zero_grad()
        # A layer that only some ranks use, and in some steps none.
        uses = [step % 2 == 0 and other % 2 == 0 for other in range(size)]
        for one in range(passes):
            loss = torch.nn.functional.cross_entropy(model(words[one, rank], uses[rank]), targets[one, rank])
            loss.backward()
            for other in range(size):
                share = torch.nn.functional.cross_entropy(
                    reference(words[one, other], uses[other]), targets[one, other]
                )
                (share if op == hvd.Sum else share / size).backward()
        if step == 1:
            optimizer.synchronize()
            for one in (model, reference):
                dense = [part for part in one.parameters() if part.grad is not None and not part.grad.is_sparse]
                torch.nn.utils.clip_grad_norm_(dense, 0.1)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        for parameter in reference.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        alone.step()
    tolerance = {"none": 1e-5, "fp16": 2e-3, "bf16": 2e-2}[compression]
    for name, parameter in model.named_parameters():
        expected = reference.get_parameter(name)
        assert torch.allclose(parameter, expected, atol=tolerance, rtol=tolerance), (name, parameter - expected)
    return [float(value) for parameter in model.parameters() for value in parameter.detach().double().flatten()]


def closures() -> list[float]:
    """``step(closure)`` applies what the closure makes, reduced, however often it is called, and whoever reduces it."""
    import penstock.horovod.torch as hvd

    hvd.init()
    data = torch.full((1, 3), hvd.rank() + 1.0)
    mean = (hvd.size() + 1) / 2

    def made(kind: Any, op: Any = hvd.Average, **options: Any) -> tuple[torch.nn.Parameter, Any]:
        weight = torch.nn.Parameter(torch.zeros(1, 3))
        optimizer = kind([weight], **options)
        return weight, hvd.DistributedOptimizer(optimizer, [(f"{kind.__name__}{op}", weight)], op=op)

    weight, optimizer = made(torch.optim.SGD, lr=1.0)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (weight * data).sum()
        loss.backward()
        return loss

    for step in range(3):
        optimizer.step(closure)
        assert weight.eq(-(step + 1) * mean).all(), (step, weight)

    def reduces_by_itself() -> torch.Tensor:
        loss = closure()
        optimizer.synchronize()
        return loss

    with optimizer.skip_synchronize():
        optimizer.step(reduces_by_itself)
    assert weight.eq(-4 * mean).all(), weight
    # A closure that makes no gradients: those that are there are applied once.
    weight, optimizer = made(torch.optim.SGD, hvd.Sum, lr=1.0)
    loss = closure()
    optimizer.step(lambda: loss)
    assert weight.eq(-mean * hvd.size()).all(), weight
    weight, optimizer = made(torch.optim.LBFGS, lr=0.1, max_iter=4)

    def squares() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (weight - data).square().sum()
        loss.backward()
        return loss

    optimizer.step(squares)
    assert not weight.eq(0).any()
    return weight.flatten().tolist()


def late_parameters() -> None:
    """What is unfrozen, or added to the optimizer, behind `DistributedOptimizer` is not applied by each rank on its own."""
    import penstock.horovod.torch as hvd

    hvd.init()
    for op in (hvd.Average, hvd.Adasum):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        model[0].weight.requires_grad_(False)
        named = [(f"{op} {name}", one) for name, one in model.named_parameters()]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), named, op=op)
        model[0].weight.requires_grad_(True)
        before = model[0].weight.detach().clone()
        model(torch.ones(1, 2)).sum().backward()
        with_error(ValueError, "0.weight is this rank's own", optimizer.step)
        assert torch.equal(model[0].weight, before)
    weight, late = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("weight", weight)])
    optimizer.add_param_group({"params": [late]})
    (weight + late).sum().backward()
    with_error(ValueError, "a parameter of group 1 is this rank's own", optimizer.step)
    assert weight.eq(0).all() and late.eq(0).all()
    hvd.barrier()
    hvd.shutdown()


def passes_are_counted() -> None:
    """Too many backward passes, and zero_grad before the step, are refused as Horovod refuses them."""
    import penstock.horovod.torch as hvd

    hvd.init()
    model = torch.nn.Linear(2, 1)
    for options in ({}, {"groups": 1}):
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)
        model(torch.ones(1, 2)).sum().backward()
        with_error(AssertionError, "prohibited", optimizer.zero_grad)
        with_error(AssertionError, "Increase backward_passes_per_step", model(torch.ones(1, 2)).sum().backward)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.set_backward_passes_per_step(2)
        model(torch.ones(1, 2)).sum().backward()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert model.weight.grad.tolist() == [[2.0, 2.0]]
        model = torch.nn.Linear(2, 1)
    with_error(
        AssertionError,
        "Adasum",
        lambda: hvd.DistributedOptimizer(torch.optim.SGD(model.parameters()), op=hvd.Adasum).skip_synchronize(),
    )


def uneven_data(through_buckets: bool) -> list[Any]:
    """Ranks with fewer batches join; the others go on, with zeros from them, and all end with the same model."""
    import penstock.horovod.torch as hvd

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    torch.manual_seed(0)
    models = [torch.nn.Linear(3, 1) for _ in range(2)]
    optimizers = [
        hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.5),
            named_parameters=[(f"{index}.{name}", one) for name, one in model.named_parameters()],
            **({} if through_buckets else {"groups": 1}),
        )
        for index, model in enumerate(models)
    ]
    # Rank 0 has no batch at all, and each rank one more than the last; the second model is trained on the last rank only.
    for batch in range(rank):
        for model, optimizer in list(zip(models, optimizers, strict=True))[: 2 if rank == size - 1 else 1]:
            if optimizer is optimizers[1] and batch < size - 2:
                continue
            optimizer.zero_grad()
            model(torch.full((1, 3), 1.0)).sum().backward()
            optimizer.step()
            present = sum(other > batch for other in range(size)) if model is models[0] else 1
            assert torch.allclose(model.weight.grad, torch.full((1, 3), present / size))
        average = hvd.allreduce(torch.tensor([6.0]))
        assert torch.allclose(average, torch.tensor([6.0]) * sum(other > batch for other in range(size)) / size)
    last = hvd.join()
    assert last == size - 1
    # Unnamed operations count alike again, and optimizers work again.
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
    for index, model in enumerate(models):
        hvd.broadcast_parameters(model.state_dict(), size - 1)
        optimizers[index].zero_grad()
        model(torch.full((1, 3), float(rank))).sum().backward()
        optimizers[index].step()
    second = hvd.join()
    weights = [value for model in models for value in model.weight.flatten().tolist()]
    return [second, *weights]


def joined_refuses() -> list[str]:
    """While a rank has joined, what has no zeros fails on the others with Horovod's words."""
    import penstock.horovod.torch as hvd

    hvd.init()
    texts = []
    if hvd.rank() > 0:
        for call in (
            lambda: hvd.allgather(torch.ones(2)),
            lambda: hvd.broadcast(torch.ones(2), 1),
            lambda: hvd.alltoall(torch.ones(6)),
            lambda: hvd.reducescatter(torch.ones(6)),
            *(lambda op=op: hvd.allreduce(torch.tensor([-3.0, 5.0]), op=op) for op in (hvd.Min, hvd.Max, hvd.Product)),
        ):
            try:
                call()
            except hvd.HorovodInternalError as error:
                texts.append(str(error))
            else:
                texts.append("no error")
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size() - 1
    hvd.join()
    return hvd.broadcast_object(texts, root_rank=hvd.size() - 1)


def leave_first() -> float:
    """Rank 0 shuts down while the others do something else; how long that took, in seconds."""
    import penstock.horovod.torch as hvd

    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    hvd.init(
        process_sets=[hvd.ProcessSet(ranks) for ranks in ([0, 1], [0, 2], [0, 3], [0, 1, 2], [0, 1, 3], [0, 2, 3])]
    )
    rank = hvd.rank()
    if rank > 0:
        store.wait(["rank 0 has left"], timedelta(seconds=60))
    began_s = time.monotonic()
    hvd.shutdown()
    took_s = time.monotonic() - began_s
    if rank == 0:
        store.set("rank 0 has left", "")
    return took_s


def optimizer_state() -> list[float]:
    """State and options go from the root to all, types kept, whether other ranks have a state or not; parameters stay."""
    import penstock.horovod.torch as hvd

    hvd.init()
    rank = hvd.rank()
    seen: list[float] = []
    for make in (
        lambda parameters: torch.optim.SGD(parameters, lr=0.1 * (rank + 1), momentum=0.9, weight_decay=0.5),
        lambda parameters: torch.optim.Adam(parameters, lr=0.1 * (rank + 1), betas=(0.5, 0.6 + rank / 10)),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1 * (rank + 1)),
    ):
        for distributed in (False, True):
            torch.manual_seed(0)
            model = torch.nn.Linear(3, 2)
            optimizer = make(model.parameters())
            if rank == 0:
                # As after loading a checkpoint: only the root has a state.
                for _ in range(3):
                    model(torch.ones(1, 3)).sum().backward()
                    optimizer.step()
            if distributed:
                state = optimizer.state_dict()
                optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
                optimizer.load_state_dict(state)
            hvd.broadcast_parameters(model.state_dict(), 0)
            before = model.weight.detach().clone()
            hvd.broadcast_optimizer_state(optimizer, 0)
            assert torch.equal(model.weight, before)
            group = optimizer.param_groups[0]
            assert group["lr"] == 0.1 and type(group["lr"]) is float
            assert isinstance(group.get("betas", ()), tuple)
            seen += [float(value) for value in model.weight.detach().flatten()]
            for state in optimizer.state.values():
                seen += [float(torch.as_tensor(value).double().sum()) for value in state.values()]
    return seen


def state_of_some_parameters(case: str) -> list[Any]:
    """The root's state covers other parameters than another rank's would: that of a run whose first layer was frozen, or is now.
    All ranks end with the root's, and step alike."""
    import penstock.horovod.torch as hvd

    hvd.init()
    rank = hvd.rank()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    optimizer = torch.optim.Adam(model.parameters(), amsgrad=case == "others have more" and rank > 0)
    if rank == 0 or case == "others have more":
        model[0].requires_grad_(case == "frozen now" or rank > 0)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        optimizer.zero_grad()
    model[0].requires_grad_(case != "frozen now")
    hvd.broadcast_parameters(model.state_dict(), 0)
    hvd.broadcast_optimizer_state(optimizer, 0)
    seen = [
        (number, name, torch.as_tensor(value).tolist())
        for number, state in sorted(optimizer.state_dict()["state"].items())
        for name, value in state.items()
    ]
    assert {number for number, *_ in seen} == ({0, 1, 2, 3} if case == "frozen now" else {2, 3}), seen
    assert {name for _, name, _ in seen} == {"step", "exp_avg", "exp_avg_sq"}, seen
    model.requires_grad_(True)
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return [seen, [one.tolist() for one in model.parameters()]]


def sync_batch_norm() -> None:
    """Outputs, running statistics and gradients are those of one BatchNorm over all ranks' batches, of different sizes."""
    import penstock.horovod.torch as hvd

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    for shape, momentum, affine in (((5,), 0.1, True), ((5, 4), None, True), ((5, 2, 3), 0.3, False)):
        torch.manual_seed(0)
        batches = [torch.randn(2 + other, *shape, dtype=torch.float64) * 3 + 100 for other in range(size)]
        sync = hvd.SyncBatchNorm(5, momentum=momentum, affine=affine).double()
        kind = {1: torch.nn.BatchNorm1d, 2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm2d}[len(shape)]
        alone = kind(5, momentum=momentum, affine=affine).double()
        for _ in range(2):
            own = batches[rank].clone().requires_grad_()
            whole = torch.cat(batches).requires_grad_()
            output, expected = sync(own), alone(whole)
            weights = torch.linspace(0, 1, expected.numel(), dtype=torch.float64).view_as(expected)
            rows = [batch.shape[0] for batch in batches]
            assert torch.allclose(output, expected.split(rows)[rank])
            (output * weights.split(rows)[rank]).sum().backward()
            (expected * weights).sum().backward()
            assert torch.allclose(own.grad, whole.grad.split(rows)[rank], atol=1e-7)
        assert torch.allclose(sync.running_mean, alone.running_mean)
        assert torch.allclose(sync.running_var, alone.running_var)
        assert sync.num_batches_tracked == alone.num_batches_tracked == 2
        if affine:
            assert torch.allclose(hvd.allreduce(sync.weight.grad, op=hvd.Sum), alone.weight.grad)
            assert torch.allclose(hvd.allreduce(sync.bias.grad, op=hvd.Sum), alone.bias.grad)
        sync.eval()
        alone.eval()
        assert torch.allclose(sync(batches[0]), alone(batches[0]))


def adasum() -> list[float]:
    """The published formula in a tree, orthogonal gradients summed, parallel ones averaged, for any number of ranks."""
    import penstock.horovod.torch as hvd

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    seen: list[float] = []
    for length in (1, 7, 1000):
        for dtype in (torch.float64, torch.float32, torch.float16):
            torch.manual_seed(length)
            all_of_them = torch.randn(size, length, dtype=torch.float64)
            result = hvd.allreduce(all_of_them[rank].to(dtype), op=hvd.Adasum)
            expected = tree([one.to(dtype).double() for one in all_of_them])
            tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3}[dtype]
            assert result.dtype == dtype
            assert torch.allclose(result.double(), expected, atol=tolerance, rtol=tolerance), (result, expected)
            seen += result.double().tolist()
    orthogonal = torch.zeros(size)
    orthogonal[rank] = rank + 1
    assert torch.allclose(hvd.allreduce(orthogonal, op=hvd.Adasum), torch.arange(1.0, size + 1))
    if size & (size - 1) == 0:
        assert torch.allclose(hvd.allreduce(torch.full((3,), rank + 1.0), op=hvd.Adasum), torch.tensor((size + 1) / 2))
    assert hvd.allreduce(torch.zeros(3), op=hvd.Adasum).tolist() == [0.0] * 3
    return seen


def tree(vectors: list[torch.Tensor]) -> torch.Tensor:
    """Adasum of all vectors as ranks compute it: those beyond a power of two first, then neighbours, then pairs of pairs."""
    power = 1 << (len(vectors).bit_length() - 1)
    level = [
        pair(one, vectors[i + power]) if i + power < len(vectors) else one for i, one in enumerate(vectors[:power])
    ]
    while len(level) > 1:
        level = [pair(left, right) for left, right in zip(level[::2], level[1::2], strict=True)]
    return level[0]


def pair(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    product = left @ right
    return (1 - product / (2 * left @ left)) * left + (1 - product / (2 * right @ right)) * right


def adasum_training() -> list[float]:
    """With Adasum each step adds the combined changes; all ranks stay alike."""
    import penstock.horovod.torch as hvd

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1, bias=False).double()
    start = model.weight.detach().clone()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters(), op=hvd.Adasum
    )
    inputs = [torch.randn(4, dtype=torch.float64) for _ in range(size)]
    for _ in range(2):
        optimizer.zero_grad()
        model(inputs[rank]).sum().backward()
        optimizer.step()
    combined = tree([-0.1 * one for one in inputs]) if size > 1 else -0.1 * inputs[0]
    assert torch.allclose(model.weight, start + 2 * combined)
    return model.weight.flatten().tolist()


def dropped_optimizers() -> list[float]:
    """An optimizer that is dropped is gone, and with it the model; until then another one of the same model takes its place."""
    import gc
    import weakref

    import penstock.horovod.torch as hvd

    hvd.init()
    dropped, seen = [], []
    for how in ({}, {"groups": 1}, {"op": hvd.Adasum}):
        model = torch.nn.Linear(3, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        for _ in range(2):
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.5), named_parameters=model.named_parameters(), **how
            )
            model(torch.full((1, 3), 2.0)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            dropped.append(weakref.ref(optimizer))
            del optimizer
            gc.collect()
        assert torch.allclose(model.weight, torch.tensor(-2.0)), (how, model.weight)
        seen += model.weight.flatten().tolist()
        dropped.append(weakref.ref(model.weight))
        del model
        gc.collect()
    alive = [one() for one in dropped if one() is not None]
    assert not alive, alive
    return seen


def steps_in_another_order(sparse: bool) -> list[float]:
    """Two optimizers over parts of one model, which each rank steps in an order of its own, or one of them not at all: Horovod's
    agree on gradients while ``backward()`` runs."""
    import penstock.horovod.torch as hvd

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    torch.manual_seed(0)
    parts = [torch.nn.Linear(2, 1, bias=False) for _ in range(2)]
    if sparse:
        parts.append(torch.nn.Embedding(3, 1, sparse=True))
    parts = [torch.nn.ModuleList(parts[:1]), torch.nn.ModuleList(parts[1:])]
    optimizers = [
        hvd.DistributedOptimizer(
            torch.optim.SGD(part.parameters(), lr=0.1),
            named_parameters=[(f"{number}.{name}", one) for name, one in part.named_parameters()],
        )
        for number, part in enumerate(parts)
    ]
    for step in range(6):
        for optimizer in optimizers:
            optimizer.zero_grad()
        outputs = [
            module(torch.full((1, 2), rank + 1.0))
            for part in parts
            for module in part
            if isinstance(module, torch.nn.Linear)
        ]
        if sparse:
            outputs.append(parts[1][1](torch.tensor([1])) * (rank + 1))
        sum(outputs).sum().backward()
        for optimizer in optimizers if (rank + step) % 2 else optimizers[::-1]:
            if step == 2:
                optimizer.synchronize()
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
        for part in parts:
            assert part[0].weight.grad.tolist() == [[(size + 1) / 2] * 2], part[0].weight.grad
    return [float(one.detach().sum()) for part in parts for one in part.parameters()]


def interrupted_steps(how: str) -> list[float]:
    """A signal's handler raises on rank 0 while its step waits for the others. Until step() is called again, which completes it,
    the optimizer says so; all ranks make the same steps."""
    import penstock.horovod.torch as hvd

    class Late(RuntimeError):
        pass

    def late(*_: Any) -> None:
        raise Late

    hvd.init()
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    rank = hvd.rank()
    signal.signal(signal.SIGALRM, late)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(3, 2, sparse=how == "sparse"), torch.nn.Linear(2, 1))
    options: dict[str, Any] = {"names": {"groups": 2}, "adasum": {"op": hvd.Adasum}}.get(how, {})
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters(), **options
    )
    evaluated = []

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        found = model(torch.tensor([rank])).sum() * (step + 1)
        found.backward()
        evaluated.append(step)
        if is_late and rank == 0:
            signal.setitimer(signal.ITIMER_REAL, 1)
        return found

    for step in range(4):
        is_late = step in (1, 2)
        if is_late and rank > 0:
            store.wait([f"interrupted {step}"], timedelta(seconds=30))
        closure = loss if how == "closure" else None
        if closure is None:
            loss()
        if is_late and rank == 0:
            with pytest.raises(Late):
                optimizer.step(closure)
            with_error(AssertionError, "call optimizer.step() once more", optimizer.zero_grad)
            if step == 2:
                signal.setitimer(signal.ITIMER_REAL, 0.5)
                with pytest.raises(Late):
                    optimizer.step(closure)
            if how != "adasum":
                with_error(AssertionError, "call optimizer.step() once more", model(torch.tensor([2])).sum().backward)
            store.set(f"interrupted {step}", "")
        optimizer.step(closure)
    assert evaluated == [0, 1, 2, 3]
    return [float(one.detach().double().sum()) for one in model.parameters()]


def optimizers_of_another_life() -> list[float]:
    """A rank that has made other optimizers in an earlier life of Horovod, as in an elastic job that was smaller then, goes on
    with one that has not."""
    import penstock.horovod.torch as hvd

    def make() -> tuple[torch.nn.Linear, Any]:
        model = torch.nn.Linear(2, 1, bias=False).double()
        torch.nn.init.zeros_(model.weight)
        return model, hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))

    hvd.init()
    earlier = [make() for _ in range(hvd.rank())]
    earlier.clear()
    hvd.shutdown()
    hvd.init()
    seen: list[float] = []
    for _ in range(2):
        model, optimizer = make()
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
            optimizer.step()
        seen += model.weight.flatten().tolist()
    return seen


def timeline(path: str) -> None:
    """The timeline is JSON that says what was negotiated and executed."""
    import json

    os.environ["HOROVOD_TIMELINE"] = path
    import penstock.horovod.torch as hvd

    hvd.init()
    hvd.allreduce(torch.ones(3), name="shown")
    hvd.shutdown()
    if int(os.environ["RANK"]) == 0:
        with open(path) as file:
            events = json.load(file)
        assert {"NEGOTIATE_ALLREDUCE", "ALLREDUCE"} <= {event.get("name") for event in events}
        assert any(event.get("args", {}).get("name") == "allreduce.shown" for event in events)


def stalled() -> None:
    """A rank that does not come is named, with what it lacks, and the job ends if that is wanted."""
    os.environ["HOROVOD_STALL_CHECK_TIME_SECONDS"] = "1"
    os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = "2"
    import penstock.horovod.torch as hvd

    hvd.init()
    if hvd.rank() == 0:
        ranks.note("waits")
        time.sleep(60)
    with_error(hvd.HorovodInternalError, "shut down", lambda: hvd.allreduce(torch.ones(3), name="lonely"))


def a_step_stalls() -> str:
    """A rank that does not make a step is named, with gradients of it, and the job ends if that is wanted."""
    os.environ["HOROVOD_STALL_CHECK_TIME_SECONDS"] = "1"
    os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = "3"
    import penstock.horovod.torch as hvd

    hvd.init()
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    model = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if hvd.rank() == 0:
        store.wait(["told 1", "told 2"], timedelta(seconds=30))
    with pytest.raises(hvd.HorovodInternalError) as caught:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    store.set(f"told {hvd.rank()}", "")
    hvd.shutdown()
    return str(caught.value)


def waits_for_death() -> str:
    """Operations without end, until one fails."""
    import penstock.horovod.torch as hvd

    hvd.init()
    model = torch.nn.Linear(4, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    hvd.allreduce(torch.ones(1))
    ranks.note("running")
    try:
        while True:
            optimizer.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            hvd.allreduce(torch.ones(1 << 14), name="many")
    except hvd.HorovodInternalError as error:
        ranks.note("failed", time.monotonic())
        with_error(hvd.HorovodInternalError, "", lambda: hvd.allreduce(torch.ones(1)))
        hvd.shutdown()
        return str(error)


def lets_go_after_a_death() -> list[str]:
    """Operations that a death has failed, one of them synchronized: `shutdown` lets their tensors go, and the group."""
    import penstock.horovod.torch as hvd

    hvd.init()
    kept = []

    def life() -> None:
        handles = []
        for number in range(6):
            value = torch.ones(1000 + number)
            kept.append(StorageWeakRef(value.untyped_storage()))
            # Only rank 0 submits the last ones, so that they never begin.
            if number < 2 or hvd.rank() == 0:
                handles.append(hvd.allreduce_async(value, name=f"of {number}"))
        for handle in handles[:2]:
            hvd.synchronize(handle)
        ranks.note("running")
        if hvd.rank() == 1:
            signal.pause()  # until it is killed
        with_error(hvd.HorovodInternalError, "", lambda: hvd.synchronize(handles[2]))

    try:
        life()
    finally:
        hvd.shutdown()
    gc.collect()
    alive = [f"tensor {number}" for number, one in enumerate(kept) if not one.expired()]
    held = [type(one).__name__ for one in gc.get_objects()]
    return [*alive, *(name for name in held if name == "PenstockBackend")]


def cannot_execute(waits_for: str) -> list[str]:
    """Rank 1 has no memory for the result of an all-gather. From there on everything fails on all ranks, while all of them live:
    that operation, and ones that rank 1 has not submitted."""
    import penstock.horovod.torch as hvd
    from penstock.fronts.horovod import operations
    from penstock.fronts.horovod.negotiation import Kind

    hvd.init()
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    hvd.barrier()
    handles = []
    if hvd.rank() == 1:

        def fails(*_: Any) -> Any:
            raise MemoryError("no room for 4 EB")

        operations._START[Kind.ALLGATHER] = fails
    elif waits_for == "another":
        handles.append(hvd.allreduce_async(torch.ones(3), name="another"))
    handles.append(hvd.allgather_async(torch.ones(3), name="large"))
    texts = []
    for attempt in (
        *(lambda handle=handle: hvd.synchronize(handle) for handle in handles),
        lambda: hvd.allreduce(torch.ones(3), name="later"),
    ):
        try:
            attempt()
        except (hvd.HorovodInternalError, MemoryError) as error:
            texts.append(str(error))
        else:
            texts.append("has succeeded")
    # All of them live until all know.
    store.set(f"knows {hvd.rank()}", "")
    store.wait([f"knows {rank}" for rank in range(hvd.size())], timedelta(seconds=30))
    hvd.shutdown()
    return texts


def dies_before_it_starts() -> list[str]:
    """Three operations are agreed on in one round. Rank 1 dies when the first of them starts: all three fail on rank 0."""
    import penstock.horovod.torch as hvd
    from penstock.fronts.horovod import job, operations

    hvd.init()
    store = job.current().controller(0, "a test").group.backend._member.store
    begin = operations._START[operations.Kind.ALLTOALL]

    def begin_or_die(*given: Any) -> Any:
        if hvd.rank() == 0:
            store.set("rank 0 begins", "")
            return begin(*given)
        # Rank 0 has left the round behind, which would fail otherwise.
        store.wait(["rank 0 begins"], timedelta(seconds=30))
        os.kill(os.getpid(), signal.SIGKILL)

    operations._START[operations.Kind.ALLTOALL] = begin_or_die
    handles = [
        hvd.alltoall_async(torch.ones(2), name="first"),
        hvd.allreduce_async(torch.ones(3), name="second"),
        hvd.allgather_async(torch.ones(1), name="third"),
    ]
    told = []
    for handle in handles:
        try:
            hvd.synchronize(handle)
        except hvd.HorovodInternalError as error:
            told.append(str(error))
    hvd.shutdown()
    return told


def leaves_early(in_a_step: bool) -> str:
    """A rank that shuts down fails the operations, and the steps, in which others wait for it."""
    import penstock.horovod.torch as hvd

    hvd.init()
    model = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    step()
    if hvd.rank() == 0:
        hvd.shutdown()
        return "left"
    if in_a_step:
        with_error(hvd.HorovodInternalError, "rank 0", step)
    with_error(hvd.HorovodInternalError, "Horovod has been shut down", lambda: hvd.allreduce(torch.ones(1)))
    hvd.shutdown()
    return "told"


def leaves_a_slow_rank() -> float:
    """Rank 0 shuts down when all ranks have agreed on a sum. Rank 2 executes it when rank 0 has given up waiting for answers."""
    import penstock.horovod.torch as hvd
    from penstock.fronts.horovod import job

    hvd.init()
    controller = job.current().controller(0, "a test")
    store = controller.group.backend._member.store
    execute = controller._execute

    def late(outcome: Any) -> None:
        if outcome.agreed:
            store.wait(["rank 0 has given up"], timedelta(seconds=30))
        execute(outcome)

    if hvd.rank() == 2:
        controller._execute = late
    value = torch.full((1000,), hvd.rank() + 1.0)
    handle = hvd.allreduce_async_(value, name="agreed", op=hvd.Sum)
    if hvd.rank() == 0:
        _await(lambda: bool(controller._flights))

        def tell() -> None:
            _await(lambda: controller._failure is not None)
            store.set("rank 0 has given up", "")

        telling = threading.Thread(target=tell)
        telling.start()
        hvd.shutdown()
        telling.join()
        return value.unique().item()
    hvd.synchronize(handle)
    for name in ("first", "second"):
        with_error(
            hvd.HorovodInternalError, "rank 0 has shut Horovod down", lambda name=name: hvd.allreduce(value, name=name)
        )
    hvd.shutdown()
    return value.unique().item()


def _await(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.001)


def elastic() -> list[Any]:
    """After a failure all ranks go back to the last commit and go on; after news of hosts they go on from where they are."""
    import penstock.horovod.torch as hvd
    from penstock.horovod.common.elastic import HostUpdateResult, notification_manager

    hvd.init()
    rank = hvd.rank()
    torch.manual_seed(rank)
    model = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    sampler = hvd.elastic.ElasticSampler(list(range(24)), shuffle=False)
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, batch=rank, tried=[])
    resets = []
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])
    log = []

    @hvd.elastic.run
    def train(state: Any, extra: str) -> str:
        log.append(("called", state.batch, round(float(state.model.weight.sum()), 6)))
        while state.batch < 6:
            state.optimizer.zero_grad()
            state.model(torch.full((1, 2), float(state.batch))).sum().backward()
            state.optimizer.step()
            state.batch += 1
            if state.batch == 2 and len(resets) == 0:
                state.commit()
            if state.batch == 4 and len(resets) == 0:
                # Under one name each rank wants something else: a failure on all of them.
                hvd.allreduce(torch.ones(1 + rank), name="fails")
            if state.batch == 5 and len(resets) == 1:
                if rank == 0:
                    notification_manager.handle_hosts_updated(update_res=HostUpdateResult.added)
                state.commit()
        return extra

    assert train(state, extra="done") == "done"
    assert [one[:2] for one in log] == [("called", 0), ("called", 2), ("called", 5)], log
    assert resets == [hvd.size()] * 2
    return [log, model.weight.flatten().tolist()]


def elastic_objects() -> list[Any]:
    """Objects that change in place, and a schedule, go back to the last commit. Nothing goes back for news of hosts."""
    import penstock.horovod.torch as hvd
    from penstock.horovod.common.elastic import notification_manager

    hvd.init()
    model = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    state = hvd.elastic.TorchState(model, optimizer, schedule=schedule, done=[], batch=0)
    resets, called = [], []
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])

    @hvd.elastic.run
    def train(state: Any) -> None:
        called.append((state.batch, list(state.done)))
        while state.batch < 4:
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            state.schedule.step()
            state.done.append(state.batch)
            state.batch += 1
            if state.batch == 2:
                state.commit()
            if state.batch == 3 and not resets:
                hvd.allreduce(torch.ones(1 + hvd.rank()), name="fails")
            if state.batch == 3 and len(resets) == 1:
                notification_manager.handle_hosts_updated()
                state.check_host_updates()

    train(state)
    assert called == [(0, []), (2, [0, 1]), (3, [0, 1, 2])], called
    assert state.done == [0, 1, 2, 3] and state.schedule is schedule
    assert schedule.last_epoch == 4 and optimizer.param_groups[0]["lr"] == 1 / 16
    return [called, model.weight.flatten().tolist()]


def not_finite() -> list[str]:
    """A gradient that is not finite ends elastic.run on all ranks, which would meet it again; idle settings are told."""
    import penstock.horovod.torch as hvd
    from penstock.errors import NotFinite

    hvd.init()
    model = torch.nn.Linear(2, 1)
    told = Told()
    logging.getLogger("penstock").addHandler(told)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    calls = []

    @hvd.elastic.run
    def train(state: Any) -> None:
        calls.append(state.batch)
        for state.batch in range(3):
            optimizer.zero_grad()
            model(torch.full((1, 2), torch.inf if state.batch == 1 and hvd.rank() == 1 else 1.0)).sum().backward()
            optimizer.step()

    try:
        train(hvd.elastic.TorchState(model, optimizer, batch=0))
    except NotFinite as error:
        assert "the gradient of weight on rank 1 holds NaN or infinity in step 2" in str(error), str(error)
        assert calls == [0]
        return told.lines
    raise AssertionError("it went through")


def passes_that_raise() -> list[float]:
    """A pass that raises on all ranks is skipped, and training goes on; a tied weight, also where it is listed twice, is one;
    a gradient of another dtype is refused by its name."""
    import penstock.horovod.torch as hvd
    from penstock.errors import Config as ConfigError

    hvd.init()
    told = Told()
    logging.getLogger("penstock").addHandler(told)
    torch.manual_seed(0)
    first, last = torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False)
    last.weight = first.weight
    head = torch.nn.Linear(3, 1)
    parameters = [first.weight, *head.parameters()]
    alone = [one.detach().clone().requires_grad_() for one in parameters]

    def loss(weights: list[torch.Tensor], scale: float, raises: bool) -> torch.Tensor:
        inner = calls_back(
            torch.nn.functional.linear(torch.full((1, 3), scale), weights[0]), half_way if raises else None
        )
        return torch.nn.functional.linear(torch.nn.functional.linear(inner, weights[0]), *weights[1:]).sum()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of the weight that is there twice
        inner = torch.optim.SGD([first.weight, last.weight, *head.parameters()], lr=0.01)
    optimizer = hvd.DistributedOptimizer(inner, zip(["tied", "head.weight", "head.bias"], parameters, strict=True))
    oracle = torch.optim.SGD(alone, lr=0.01)
    mean = sum(range(1, hvd.size() + 1)) / hvd.size()
    for batch in range(5):
        optimizer.zero_grad()
        oracle.zero_grad()
        raises = batch in (1, 2)
        try:
            loss(parameters, hvd.rank() + 1.0, raises).backward()
        except ArithmeticError:
            assert raises
            continue
        optimizer.synchronize()
        # The loss is linear in the data.
        loss(alone, mean, False).backward()
        for ours, theirs in zip(parameters, alone, strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
        with optimizer.skip_synchronize(), torch.no_grad():
            for ours, theirs in zip(parameters, alone, strict=True):
                ours.sub_(0.01 * ours.grad)
                theirs.copy_(ours)
        optimizer.zero_grad()
    assert len([line for line in told.lines if "a backward pass raised after 2 of 3 gradients" in line]) == 1, (
        told.lines
    )

    head.double()
    optimizer.zero_grad()
    try:
        head(last(first(torch.ones(1, 3))).double()).sum().backward()
    except ConfigError as error:
        assert "the gradient of head." in str(error) and "torch.float64 on cpu" in str(error), error
    else:
        raise AssertionError("it went through")
    hvd.shutdown()
    return [float(one.detach().double().sum()) for one in alone]


class Told(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def beside_a_group_of_the_script(backend: str) -> float:
    """A script that has made its own process group keeps it, whatever its backend, and both work at the same time."""
    import penstock.horovod.torch as hvd

    dist.init_process_group(backend)
    hvd.init()
    assert (hvd.rank(), hvd.size()) == (dist.get_rank(), dist.get_world_size())
    tensor = torch.ones(4)
    handle = hvd.allreduce_async(torch.ones(4), op=hvd.Sum)
    dist.all_reduce(tensor)
    assert torch.equal(hvd.synchronize(handle), tensor)
    hvd.shutdown()
    dist.all_reduce(tensor)
    hvd.init()
    hvd.barrier()
    hvd.shutdown()
    dist.destroy_process_group()
    return tensor[0].item()


def some_of_the_ranks() -> list[int]:
    """``init(comm=[...])`` makes a job of some ranks; the others do not take part."""
    import penstock.horovod.torch as hvd

    rank = int(os.environ["RANK"])
    if rank == 1:
        with_error(ValueError, "is not in it", lambda: hvd.init(comm=[0, 2]))
        return []
    hvd.init(comm=[0, 2])
    return hvd.allgather_object((hvd.rank(), rank))


def some_then_all() -> list[Any]:
    """Ranks that were in a job of some are in the next one of all, whose other ranks start their first."""
    import penstock.horovod.torch as hvd

    rank = int(os.environ["RANK"])
    seen = []
    for some in ([1, 2], [0, 2], [1, 2]):
        if rank in some:
            hvd.init(comm=some)
            hvd.init()
            hvd.init(comm=some)
            with_error(ValueError, f"runs with ranks {some}", lambda: hvd.init(comm=[0, 1, 2]))
            assert hvd.size() == 2 and hvd.allgather_object(rank) == some
            hvd.shutdown()
        hvd.init()
        hvd.init(comm=[0, 1, 2])
        seen.append(hvd.allgather_object(hvd.rank()))
        hvd.shutdown()
    return seen


def static_process_sets() -> list[Any]:
    """Process sets that ``init`` makes; a duplicate is refused."""
    import penstock.horovod.torch as hvd

    sets = [hvd.ProcessSet([0]), hvd.ProcessSet([2, 0])]
    hvd.init(process_sets=sets)
    answers = [str(one) for one in (hvd.global_process_set, *sets)]
    with_error(ValueError, "HOROVOD_DYNAMIC_PROCESS_SETS", lambda: hvd.remove_process_set(sets[1]))
    if sets[1].included():
        assert hvd.allreduce(torch.tensor(1.0), op=hvd.Sum, process_set=sets[1]) == 2
        model = torch.nn.Linear(1, 1)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), process_set=sets[1])
        model(torch.full((1, 1), float(hvd.rank()))).sum().backward()
        optimizer.step()
        assert model.weight.grad.item() == 1.0
    hvd.shutdown()
    twice = [hvd.ProcessSet([0, 1]), hvd.ProcessSet([1]), hvd.ProcessSet([1])]
    with_error(ValueError, "duplicate", lambda: hvd.init(process_sets=twice))
    # Nothing is left of it: another init makes its sets.
    assert [one.process_set_id for one in twice] == [None, None, None]
    assert not hvd.is_initialized() and "penstock-horovod" not in {one.name for one in threading.enumerate()}
    hvd.init(process_sets=[pair := hvd.ProcessSet([1, 2])])
    if pair.included():
        assert hvd.allreduce(torch.tensor(1.0), op=hvd.Sum, process_set=pair) == 2
    # A set of an earlier life, whose number is another one's now, is none.
    assert sets[0].process_set_id == pair.process_set_id
    with_error(ValueError, "has not been registered", lambda: hvd.allreduce(torch.tensor(1.0), process_set=sets[0]))
    with_error(ValueError, "has not been registered", sets[0].size)
    hvd.shutdown()
    return answers


def started_by_mpirun() -> list[int]:
    """Where mpirun says who this is, and nothing says where the job meets, ranks of one host find each other."""
    import penstock.horovod.torch as hvd

    hvd.init()
    return hvd.allgather_object(hvd.local_rank())


def example(path: str, arguments: list[str], folder: str) -> str:
    """Run a script, with stand-ins for data sets and models that would be downloaded, where no Horovod can be imported; returns
    what it has printed."""
    import contextlib
    import io
    import runpy

    sys.path.insert(0, os.path.dirname(__file__))
    import torchvision_stand_in

    sys.modules["horovod"] = None  # an import of it fails, whatever is installed
    torchvision_stand_in.install()
    os.environ["HOME"] = folder
    os.chdir(folder)
    sys.argv = [path, *arguments]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()


def leaves_a_record(folder: str) -> dict[str, Any]:
    """Ranks that want different things under one name write what they were doing before they learn of it; the group lives."""
    import json

    import penstock.horovod.torch as hvd

    hvd.init()
    path = pathlib.Path(folder) / f"rank-{hvd.rank()}.json"
    hvd.allreduce(torch.ones(3), name="fine")
    assert not path.exists()
    with_error(
        hvd.HorovodInternalError, "tensor shapes", lambda: hvd.allreduce(torch.ones(3 + hvd.rank()), name="other")
    )
    # The engine's thread writes it, soon.
    until_s = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < until_s, "nothing was written within 20 s"
        os.sched_yield()
    assert torch.equal(hvd.allreduce(torch.ones(3), name="fine"), torch.ones(3))
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def sum_of_ranks(first: int, second: int) -> int:
    """Arguments, the sum of all ranks, and 100 for each rank before this one."""
    import penstock.horovod.torch as hvd

    hvd.init()
    print(f"this is {hvd.rank()}")
    return first + second + int(hvd.allreduce(torch.tensor(hvd.rank()), op=hvd.Sum)) + 100 * hvd.rank()


def rank_one_is_done(how: str) -> None:
    """Rank 0 waits for it."""
    import penstock.horovod.torch as hvd

    hvd.init()
    if hvd.rank() == 0:
        hvd.allreduce(torch.ones(1))
    elif how == "exits":
        sys.exit(0)


def rank_one_fails() -> None:
    """Rank 0 waits for it."""
    import penstock.horovod.torch as hvd

    hvd.init()
    if hvd.rank() == 1:
        raise ValueError("only rank 0 can")
    hvd.barrier()
