"""Collectives, waiting, objects, the life of a group, and tensors that are out of the ordinary."""

from __future__ import annotations

import atexit
import datetime
import os
import random
import re
import threading
import time

import pytest
import torch
import torch.distributed as dist

from penstock.torch.backend import of as backend_of
from torch_uses import TIMEOUT, bits, close, integers, know, noise, same, shared_folder, use, world


@use()
def all_reduce(backend: str) -> object:
    """all_reduce sums in place, and max, min and product do what they say."""
    with world(backend) as (rank, size):
        inputs = [noise(1000, seed=r) for r in range(size)]
        total = inputs[rank].clone()
        dist.all_reduce(total)
        close(total, sum(inputs))
        largest, smallest, product = (inputs[rank].clone() for _ in range(3))
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
        dist.all_reduce(product, op=dist.ReduceOp.PRODUCT)
        same(largest, torch.stack(inputs).amax(0))
        same(smallest, torch.stack(inputs).amin(0))
        close(product, torch.stack(inputs).prod(0))
        return bits(total, largest, smallest, product)


@use(without={"gloo": "it has no AVG for all_reduce in every release, and no PREMUL_SUM"})
def all_reduce_mean(backend: str) -> object:
    """AVG divides by the number of ranks; PREMUL_SUM multiplies each rank's tensor first."""
    with world(backend) as (rank, size):
        inputs = [integers(257, seed=r) for r in range(size)]
        mean, scaled = inputs[rank].clone(), inputs[rank].clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        dist.all_reduce(scaled, op=dist._make_nccl_premul_sum(0.25))
        same(mean, sum(inputs) / size)
        same(scaled, sum(inputs) * 0.25)
        return bits(mean, scaled)


@use(ranks=4)
def in_flight_out_of_order(backend: str) -> object:
    """Many operations in flight at once, waited for in an order that differs from rank to rank."""
    with world(backend) as (rank, size):
        sizes = [1, 3, 70_000, 12, 1 << 20, 999, 0, 65_536, 17, 300_000]
        tensors = [integers(n, seed=10 * i + rank) for i, n in enumerate(sizes)]
        broadcast = integers(5000, seed=77) if rank == 1 else torch.zeros(5000)
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        works.insert(4, dist.broadcast(broadcast, src=1, async_op=True))
        random.Random(rank).shuffle(works)
        for work in works:
            work.wait()
        for i, (n, tensor) in enumerate(zip(sizes, tensors, strict=True)):
            same(tensor, sum(integers(n, seed=10 * i + r) for r in range(size)), f"operation {i}")
        same(broadcast, integers(5000, seed=77))
        return bits(*tensors, broadcast)


@use()
def futures(backend: str) -> object:
    """A Work's future completes, holds the reduced tensors, and runs callbacks."""
    with world(backend) as (_, size):
        tensor = torch.full((1000,), 3.0)
        called = threading.Event()
        work = dist.all_reduce(tensor, async_op=True)
        future = work.get_future()
        doubled = future.then(lambda done: (done.value()[0] * 2, called.set())[0])
        result = doubled.wait()
        assert future.done() and called.is_set()
        same(tensor, 3.0 * size)
        same(result, 6.0 * size)
        work.wait()
        return bits(tensor)


@use(without={"gloo": "its sends and receives have no futures"})
def polling(backend: str) -> object:
    """A Work's future becomes done without a wait, and then the result is there, also one that is copied to a list."""
    with world(backend) as (rank, size):
        inputs = [integers(70_000, seed=r) for r in range(size)]
        total, largest = inputs[rank].clone(), inputs[rank].clone()
        parts = [torch.zeros(70_000) for _ in range(size)]
        received = torch.zeros(70_000)
        works = [
            dist.all_reduce(total, async_op=True),
            dist.all_gather(parts, inputs[rank], async_op=True),
            dist.isend(inputs[rank], (rank + 1) % size),
            dist.irecv(received, (rank - 1) % size),
            dist.barrier(async_op=True),
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, async_op=True),
        ]
        # Each is asked for once, as asking again would look for its end.
        futures = [work.get_future() for work in works]
        deadline_s = time.monotonic() + TIMEOUT.total_seconds()
        while not all(future.done() for future in futures):
            assert time.monotonic() < deadline_s, [future.done() for future in futures]
            threading.Event().wait(0.001)
        same(total, sum(inputs))
        same(largest, torch.stack(inputs).amax(0))
        for part, input in zip(parts, inputs, strict=True):
            same(part, input)
        same(received, inputs[(rank - 1) % size])
        return bits(total, largest, *parts)


@use()
def wait_with_timeout(backend: str) -> object:
    """wait(timeout) returns True in time."""
    with world(backend) as (_, size):
        tensor = torch.ones(100)
        assert dist.all_reduce(tensor, async_op=True).wait(TIMEOUT)
        same(tensor, float(size))
        return bits(tensor)


@use(ranks=4)
def barrier(backend: str) -> object:
    """Nobody leaves a barrier before everybody has come."""
    with world(backend) as (rank, size):
        store = dist.distributed_c10d._get_default_store()
        for turn in range(size):
            # Rank `turn` comes only after the others have said that they are at the barrier, so they have to wait for it.
            if rank == turn:
                store.wait([f"{turn}/at/{r}" for r in range(size) if r != turn], TIMEOUT)
                store.add(f"{turn}/last comes", 1)  # not set(), which returns before the store has heard of it
                dist.barrier()
            else:
                work = dist.barrier(async_op=True)
                store.set(f"{turn}/at/{rank}", "yes")
                work.wait()
                assert store.check([f"{turn}/last comes"]), f"the barrier opened before rank {turn} had come"
        return None


@use(ranks=4)
def objects(backend: str) -> object:
    """Python objects of different sizes: all_gather, broadcast, gather, scatter."""
    with world(backend) as (rank, size):
        mine = {"rank": rank, "text": "x" * (1000 * rank), "tensor": torch.arange(rank)}
        everything: list = [None] * size
        dist.all_gather_object(everything, mine)
        assert [one["rank"] for one in everything] == list(range(size))
        assert [len(one["text"]) for one in everything] == [1000 * r for r in range(size)]
        for r, one in enumerate(everything):
            same(one["tensor"], torch.arange(r))

        pair = ["from two", {2: (3, 4)}] if rank == 2 else [None, None]
        dist.broadcast_object_list(pair, src=2)
        assert pair == ["from two", {2: (3, 4)}]

        gathered = [None] * size if rank == 1 else None
        dist.gather_object(("rank", rank), gathered, dst=1)
        if rank == 1:
            assert gathered == [("rank", r) for r in range(size)]

        received = [None]
        dist.scatter_object_list(received, [f"for {r}" * r for r in range(size)] if rank == 0 else None, src=0)
        assert received == [f"for {rank}" * rank]
        return pair


@use(ranks=4)
def objects_of_point_to_point(backend: str) -> object:
    """send_object_list and recv_object_list."""
    with world(backend) as (rank, _):
        if rank % 2 == 0:
            dist.send_object_list([rank, "tail" * rank], dst=rank + 1)
        else:
            received = [None, None]
            dist.recv_object_list(received, src=rank - 1)
            assert received == [rank - 1, "tail" * (rank - 1)]
        return None


@use(ranks=4)
def gather_and_scatter_to_any_root(backend: str) -> object:
    """reduce, gather, scatter and broadcast with every rank as the root by turns."""
    with world(backend) as (rank, size):
        for root in range(size):
            inputs = [integers(101, seed=100 * root + r) for r in range(size)]
            reduced = inputs[rank].clone()
            dist.reduce(reduced, dst=root)
            if rank == root:
                same(reduced, sum(inputs), f"reduce to {root}")
            outputs = [torch.empty(101) for _ in range(size)] if rank == root else None
            dist.gather(inputs[rank], outputs, dst=root)
            if rank == root:
                same(torch.stack(outputs), torch.stack(inputs), f"gather to {root}")
            part = torch.empty(101)
            dist.scatter(part, [one * 2 for one in inputs] if rank == root else None, src=root)
            same(part, inputs[rank] * 2, f"scatter from {root}")
            copy = inputs[root].clone() if rank == root else torch.empty(101)
            dist.broadcast(copy, src=root)
            same(copy, inputs[root], f"broadcast from {root}")
        return None


@use(since=(2, 14))
def monitored_barrier(backend: str) -> object:
    """monitored_barrier returns on all ranks when all have come, with and without wait_all_ranks."""
    with world(backend):
        dist.monitored_barrier(timeout=TIMEOUT)
        dist.monitored_barrier(timeout=TIMEOUT, wait_all_ranks=True)
        return None


@use(ranks=4, since=(2, 14))
def monitored_barrier_times_out(backend: str) -> object:
    """Its time-out names the first missing rank, or all of them with wait_all_ranks, and a time-out of zero is no time."""
    with world(backend) as (rank, size):
        cases = [(0.3, True, "Ranks 2, 3 failed"), (0.3, False, "Rank 2 failed")]
        if backend != "gloo":  # where zero is zero on rank 0 only
            cases.append((0.0, True, "Rank 0 timed out"))
        for seconds, wait_all, expected in cases:
            group = dist.new_group(backend=backend)
            if rank < 2:
                began_s = time.monotonic()
                with pytest.raises(RuntimeError) as raised:
                    dist.monitored_barrier(group, datetime.timedelta(seconds=seconds), wait_all)
                assert time.monotonic() - began_s < 10, "it did not wait for the group's time-out"
                text = str(raised.value)
                if rank == 0:
                    assert re.search(f"{expected}.* (to pass|in) monitoredBarrier", text), text
                if backend != "gloo":
                    assert isinstance(raised.value, TimeoutError) and "Timed out" in text, text
                    assert "Missing are rank(s) 2, 3 of the group" in text or "rank(s) 1, 2, 3" in text, text
            dist.barrier()
        return size


@use()
def polling_works(backend: str) -> object:
    """is_completed, is_success, exception, result: what a program that polls is told of works that run, and of ended ones."""
    with world(backend) as (rank, size):
        tensor = torch.full((100,), float(rank))
        if rank == 0:
            work = dist.all_reduce(tensor, async_op=True)
            assert not work.is_completed(), "rank 1 begins after this"
        dist.barrier(dist.new_group(backend=backend))
        if rank == 1:
            work = dist.all_reduce(tensor, async_op=True)
        until_s = time.monotonic() + TIMEOUT.total_seconds()
        while not work.is_completed():
            assert time.monotonic() < until_s, "the work has not ended"
        assert work.is_success() and work.exception() is None
        same(tensor, float(sum(range(size))))
        work.wait()
        assert work.is_completed()
        work = dist.barrier(async_op=True)
        work.wait()
        assert work.is_completed() and work.is_success()
        return bits(tensor)


@use(without={"gloo": "its works have other errors"})
def polling_a_failure(backend: str) -> object:
    """A work that fails has completed, has no success, and its exception is the one that wait raises."""
    with world(backend) as (rank, _):
        group = dist.new_group(backend=backend, timeout=datetime.timedelta(seconds=0.2))
        if rank == 0:
            work = dist.all_reduce(torch.zeros(100), group=group, async_op=True)
            until_s = time.monotonic() + TIMEOUT.total_seconds()
            while not work.is_completed():
                assert time.monotonic() < until_s, "the work has not ended"
            assert not work.is_success()
            assert isinstance(work.exception(), TimeoutError) and "Timed out" in str(work.exception())
            with pytest.raises(TimeoutError, match="Timed out"):
                work.wait()
        dist.barrier()
        return None


def _sparse(rank: int, rows: int = 50) -> torch.Tensor:
    """A COO tensor that is not coalesced; ranks have different numbers of entries, and rank 1 has none."""
    count = 0 if rank == 1 else 20 + 10 * rank
    index = torch.randint(rows, (1, count), generator=torch.Generator().manual_seed(rank))
    return torch.sparse_coo_tensor(index, integers(count, 3, seed=rank), (rows, 3))


@use(ranks=3)
def sparse_all_reduce(backend: str) -> object:
    """Sparse tensors are added up, coalesced, with dense operations in flight around them in any order of waits."""
    with world(backend) as (rank, size):
        expected = sum(_sparse(r).to_dense() for r in range(size))
        dense = [torch.full((1000,), float(rank)) for _ in range(2)]
        tensors = [_sparse(rank), _sparse(rank).coalesce()]
        works = []
        for tensor, beside in zip(tensors, dense, strict=True):
            works += [dist.all_reduce(tensor, async_op=True), dist.all_reduce(beside, async_op=True)]
        for work in reversed(works):
            work.wait()
        for tensor in tensors:
            assert tensor.is_coalesced()
            same(tensor.to_dense(), expected)
        same(dense[1], float(sum(range(size))))
        nothing = torch.sparse_coo_tensor(torch.zeros(2, 0, dtype=torch.int64), torch.zeros(0), (4, 5))
        # Longer than Python can wait for an event.
        forever = [datetime.timedelta(days=365 * 400)] if backend == "penstock" else []
        dist.all_reduce(nothing, async_op=True).wait(*forever)
        same(nothing.to_dense(), torch.zeros(4, 5))
        return bits(tensors[0].indices(), tensors[0].values())


@use(ranks=3, without={"gloo": "it waits for the time-out where sizes differ, and has no AVG"})
def sparse_all_reduce_refuses(backend: str) -> object:
    """Ranks whose sparse tensors differ in shape, or whose operations do, all hear so and can go on; AVG is known, MAX is
    refused."""
    with world(backend) as (rank, size):
        with pytest.raises(RuntimeError, match=r"rank 2 sum of \(52, 3\)") as raised:
            dist.all_reduce(_sparse(rank, rows=50 + rank // 2 * 2))
        assert raised.value.group_lives
        with pytest.raises(RuntimeError, match=r"rank 0 avg of .*rank 1 sum of") as raised:
            dist.all_reduce(_sparse(rank), op=dist.ReduceOp.SUM if rank else dist.ReduceOp.AVG)
        assert raised.value.group_lives
        with pytest.raises(ValueError, match="knows SUM and AVG, not MAX"):
            dist.all_reduce(_sparse(rank), op=dist.ReduceOp.MAX)
        tensor = _sparse(rank)
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
        close(tensor.to_dense(), sum(_sparse(r).to_dense() for r in range(size)) / size)
        # Integers truncate, as dense ones do, and none goes through a float, which has not all of their digits.
        where, given = torch.tensor([[0, 2]]), torch.tensor([(1 << 60) + 1, -5 - rank])
        tensor, alike = torch.sparse_coo_tensor(where, given, (4,)), given.clone()
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
        dist.all_reduce(alike, op=dist.ReduceOp.AVG)
        same(tensor.to_dense(), torch.tensor([(1 << 60) + 1, 0, -6, 0]))
        same(tensor.coalesce().values(), alike)
        narrow = torch.tensor([100, -3], dtype=torch.int8)
        tensor = torch.sparse_coo_tensor(where, narrow if rank == 0 else narrow.clone().zero_(), (4,))
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
        same(tensor.to_dense(), torch.tensor([33, 0, -1, 0], dtype=torch.int8))
        with pytest.raises(ValueError, match="avg is not defined on bool"):
            dist.all_reduce(torch.sparse_coo_tensor(where, given > 0, (4,)), op=dist.ReduceOp.AVG)
        return bits(tensor.values())


@use(without={"gloo": "a rank that waits alone ends in other words"})
def sparse_all_reduce_alone(backend: str) -> object:
    """A sparse all-reduce that the other rank never joins ends at its time-out, and with it the group."""
    with world(backend) as (rank, _):
        group = dist.new_group(backend=backend, timeout=datetime.timedelta(seconds=1))
        if rank == 0:
            with pytest.raises(TimeoutError, match="Timed out"):
                dist.all_reduce(_sparse(0), group=group)
            with pytest.raises(RuntimeError):
                dist.all_reduce(torch.ones(1), group=group)
        dist.barrier()
        if backend == "penstock":
            left = dist.new_group(backend=backend)
            dist.all_reduce(_sparse(0), group=left)
            gone = backend_of(left)
            dist.destroy_process_group(left)
            with pytest.raises(RuntimeError, match="the group was destroyed"):
                gone.allreduce([_sparse(0)], dist.AllreduceOptions()).wait()
        return None


@use()
def spans(backend: str) -> object:
    """torch.profiler shows an operation from its issue to its end, with its shapes, once a call, and as asynchronous."""
    with world(backend) as (rank, _):
        store = dist.distributed_c10d._get_default_store()
        tensors = [torch.ones(3, 5), torch.ones(7)]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
            if rank == 0:
                work = dist.all_reduce(tensors[0], async_op=True)
                issued_s = time.perf_counter()
                store.set("issued", "")
                store.wait(["late"])
                late_s = time.perf_counter() - issued_s
                store.set("measured", "")
                work.wait()
            else:
                store.wait(["issued"])
                store.set("late", "")
                store.wait(["measured"])
                dist.all_reduce(tensors[0])
            dist.all_reduce_coalesced(tensors)
            dist.broadcast(tensors[1], src=0)
            dist.barrier()
            if backend != "gloo":  # which knows no coalescing
                neighbour, got = (rank + 1) % 2, torch.zeros(2)
                sent = dist.P2POp(dist.isend, torch.full((2,), float(rank)), neighbour)
                for work in dist.batch_isend_irecv([sent, dist.P2POp(dist.irecv, got, neighbour)]):
                    work.wait()
        spans = [event for event in profile.events() if event.name.startswith(f"{backend}:")]
        found = [(span.name.partition(":")[2], span.input_shapes, span.is_async) for span in spans]
        assert found[:4] == [
            ("all_reduce", [[3, 5]], True),
            ("all_reduce", [[3, 5], [7]], True),
            ("broadcast", [[7]], True),
            ("barrier", [], True),
        ], found
        # Up to 2.13 torch makes a batch of single calls on the CPU.
        single = [("send", [[2]], True), ("recv", [[2]], True)]
        assert found[4:] in ([] if backend == "gloo" else [("coalesced", [], True)], single), found
        if rank == 0:
            assert spans[0].time_range.elapsed_us() >= 1e6 * late_s, "the span ends before the operation does"
        return bits(*tensors)


@use()
def group_facts(backend: str) -> object:
    """The group knows its backend's name, its size, its ranks, its sequence number, and lets its time-out be set."""
    with world(backend) as (rank, size):
        group = dist.group.WORLD
        assert dist.get_backend() == backend
        assert (group.rank(), group.size(), group.name()) == (rank, size, group.name())
        assert dist.get_process_group_ranks(group) == list(range(size))
        assert dist.get_group_rank(group, 1) == 1 and dist.get_global_rank(group, 1) == 1
        before = group._get_sequence_number_for_group()
        for _ in range(3):
            dist.all_reduce(torch.ones(2))
        after = group._get_sequence_number_for_group()
        assert after - before == 3, f"three collectives moved the sequence number from {before} to {after}"
        dist.distributed_c10d._set_pg_timeout(TIMEOUT, group)
        return after


@use(since=(2, 15))
def backend_object(backend: str) -> object:
    """get_backend_impl hands out the backend object behind a group."""
    with world(backend) as (rank, size):
        implementation = dist.get_backend_impl(device=torch.device("cpu"))
        assert (implementation.rank(), implementation.size()) == (rank, size)
        assert implementation.name() == backend
        return None


@use()
def destroy_and_start_again(backend: str) -> object:
    """A group can be destroyed and a new one made, many times, in one process."""
    know(backend)
    results = []
    for attempt in range(4):
        store = dist.PrefixStore(f"attempt {attempt}", _agent_store())
        rank, size = _rank_and_size()
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
        tensor = integers(1000, seed=rank + 50 * attempt)
        dist.all_reduce(tensor)
        same(tensor, sum(integers(1000, seed=r + 50 * attempt) for r in range(size)))
        results.append(bits(tensor))
        dist.destroy_process_group()
        assert not dist.is_initialized()
    return results


@use()
def two_worlds_at_once(backend: str) -> object:
    """A subgroup can be destroyed while the default group works on."""
    with world(backend) as (_, size):
        tensor = torch.ones(10)
        for _ in range(3):
            group = dist.new_group([0, 1])
            dist.all_reduce(tensor, group=group)
            dist.destroy_process_group(group)
            dist.all_reduce(tensor)
        same(tensor, float((size * size) ** 3))
        return bits(tensor)


@use()
def start_by_file(backend: str) -> object:
    """init_method="file://..." needs no TCP store."""
    rank, size = _rank_and_size()
    with world(backend, init_method=f"file://{shared_folder()}/store", rank=rank, world_size=size):
        tensor = torch.ones(10)
        dist.all_reduce(tensor)
        same(tensor, float(size))
        return bits(tensor)


@use()
def start_by_store(backend: str) -> object:
    """A store that the user made."""
    rank, size = _rank_and_size()
    with world(backend, store=_agent_store(), rank=rank, world_size=size):
        tensor = torch.ones(10)
        dist.all_reduce(tensor)
        same(tensor, float(size))
        return bits(tensor)


@use()
def leave_without_goodbye(backend: str) -> object:
    """A script may end without destroy_process_group, as many do: no crash and no hang on the way out."""
    know(backend)
    dist.init_process_group(backend, timeout=TIMEOUT)
    tensor = torch.ones(10)
    dist.all_reduce(tensor)
    same(tensor, 2.0)
    dist.barrier()
    return bits(tensor)


@use()
def leave_abruptly(backend: str) -> object:
    """The same without atexit handlers, which torch.multiprocessing.spawn does not run: all ranks have their result."""
    know(backend)
    dist.init_process_group(backend, timeout=TIMEOUT)
    tensor = integers(1_000_000, seed=dist.get_rank())
    dist.all_reduce(tensor)
    same(tensor, integers(1_000_000, seed=0) + integers(1_000_000, seed=1))
    atexit._clear()
    return bits(tensor)


@use(ranks=1)
def alone(backend: str) -> object:
    """A world of one rank: every collective is a copy."""
    with world(backend):
        tensor = integers(100, seed=1)
        dist.all_reduce(tensor)
        dist.broadcast(tensor, src=0)
        dist.reduce(tensor, dst=0)
        same(tensor, integers(100, seed=1))
        output = torch.empty(100)
        dist.all_gather_into_tensor(output, tensor)
        same(output, tensor)
        outputs = [torch.empty(100)]
        dist.all_gather(outputs, tensor)
        same(outputs[0], tensor)
        dist.barrier()
        return bits(tensor)


@use()
def zero_size(backend: str) -> object:
    """Tensors without elements pass through every collective, and the next operation is right."""
    with world(backend) as (_, size):
        nothing = torch.empty(0)
        dist.all_reduce(nothing)
        dist.broadcast(nothing, src=0)
        dist.all_gather([torch.empty(0) for _ in range(size)], nothing)
        dist.all_gather_into_tensor(torch.empty(0), nothing)
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        same(tensor, float(size))
        return bits(tensor)


@use()
def zero_dimensional(backend: str) -> object:
    """A scalar tensor keeps its shape."""
    with world(backend) as (rank, size):
        scalar = torch.tensor(float(rank + 1))
        dist.all_reduce(scalar)
        same(scalar, torch.tensor(float(sum(range(1, size + 1)))))
        return bits(scalar)


@use(without={"gloo": "it reduces the wrong elements in silence (torch 2.11 and 2.15)"})
def not_contiguous(backend: str) -> object:
    """A tensor that is not contiguous is refused with an error that says so, or reduced rightly; never wrongly.

    nccl refuses. After the refusal, which every rank sees, the group works on.
    """
    with world(backend) as (rank, size):
        base = integers(6, 8, seed=rank)
        untouched = base.clone()
        column = base[:, 3]
        try:
            dist.all_reduce(column)
        except (ValueError, RuntimeError) as error:
            assert "contiguous" in str(error), error
            assert backend != "penstock" or (error.group_lives and "still usable" in str(error)), error
            same(base, untouched, "a refused operation must not touch the tensor")
        else:
            same(column, sum(integers(6, 8, seed=r)[:, 3] for r in range(size)))
            same(base[:, :3], untouched[:, :3], "what lies beside the column")
        tensor = torch.ones(5)
        dist.all_reduce(tensor)
        same(tensor, float(size))
        return bits(tensor)


@use()
def storage_offset(backend: str) -> object:
    """A contiguous slice in the middle of a storage is reduced, and its neighbours stay as they were."""
    with world(backend) as (rank, size):
        base = integers(1000, seed=rank)
        before = base.clone()
        dist.all_reduce(base[301:707])
        same(base[301:707], sum(integers(1000, seed=r)[301:707] for r in range(size)))
        same(base[:301], before[:301])
        same(base[707:], before[707:])
        return bits(base[301:707])


@use()
def unsupported_dtype(backend: str) -> object:
    """A dtype that cannot be summed is refused with an error that names it, on all ranks, and the group works on."""
    with world(backend) as (_, size):
        eight_bits = torch.ones(16).to(torch.float8_e4m3fn)
        with pytest.raises((TypeError, ValueError, RuntimeError), match=r"(?i)float8|type") as caught:
            dist.all_reduce(eight_bits)
        assert backend != "penstock" or (caught.value.group_lives and "still usable" in str(caught.value)), caught.value
        same(eight_bits.float(), 1.0)
        tensor = torch.ones(5)
        dist.all_reduce(tensor)
        same(tensor, float(size))
        return bits(tensor)


@use(without={"gloo": "it carries only a part of the dtypes"})
def moved_dtypes(backend: str) -> object:
    """Operations that only move data take every dtype, also those that nobody can add."""
    with world(backend) as (rank, size):
        seen = []
        for dtype in _MOVED_DTYPES:
            width = torch.empty(0, dtype=dtype).element_size()
            raw = [integers(33 * width, seed=r, low=0, high=255, dtype=torch.uint8) for r in range(size)]
            if dtype == torch.bool:
                raw = [one & 1 for one in raw]
            tensors = [one.view(dtype) for one in raw]
            outputs = [torch.empty_like(tensors[0]) for _ in range(size)]
            dist.all_gather(outputs, tensors[rank])
            for r in range(size):
                same(outputs[r].view(torch.uint8), raw[r], f"all_gather of {dtype}")
            copy = tensors[1].clone() if rank == 1 else torch.empty_like(tensors[0])
            dist.broadcast(copy, src=1)
            same(copy.view(torch.uint8), raw[1], f"broadcast of {dtype}")
            seen.append(bits(copy.view(torch.uint8)))
        return seen


@use()
def complex_numbers(backend: str) -> object:
    """Complex tensors are summed (torch hands the backend a view of real numbers)."""
    with world(backend) as (rank, size):
        inputs = [torch.complex(integers(50, seed=r), integers(50, seed=r + 10)) for r in range(size)]
        tensor = inputs[rank].clone()
        dist.all_reduce(tensor)
        same(tensor, sum(inputs))
        return bits(torch.view_as_real(tensor))


@use()
def gradients_are_left_alone(backend: str) -> object:
    """A collective on a leaf that requires grad works under no_grad and leaves autograd in order."""
    with world(backend) as (rank, size):
        weight = torch.full((4,), float(rank + 1), requires_grad=True)
        with torch.no_grad():
            dist.all_reduce(weight)
        (weight * 2).sum().backward()
        same(weight.detach(), float(sum(range(1, size + 1))))
        same(weight.grad, 2.0)
        return bits(weight)


@use()
def profiled(backend: str) -> object:
    """torch.profiler shows the collective as a range of its own."""
    with world(backend) as (_, size):
        tensor = torch.ones(1000)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            dist.all_reduce(tensor)
        names = {event.name for event in profile.events()}
        wanted = f"{backend}:all_reduce"
        assert wanted in names, f"no range {wanted!r} among {sorted(names)}"
        same(tensor, float(size))
        return bits(tensor)


def _rank_and_size() -> tuple[int, int]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def _agent_store() -> dist.Store:
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=TIMEOUT)


_MOVED_DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
