"""Proves that what is urgent leaves first, and that priorities change nothing else."""

from __future__ import annotations

import functools
import json
import pathlib
import re
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

import forked
import penstock
import ranks
from penstock.errors import Config
from penstock.fronts import arrays
from penstock.runtime import urgency
from penstock.tools import testbed
from penstock.tools.bench import urgency as bench


@pytest.mark.parametrize("number", [-1, 256, 1.5, "0", None, True])
def test_a_priority_is_a_whole_number(number: Any) -> None:
    """What it may be is told; nothing has changed."""
    with pytest.raises(Config, match=r"from 0 .* to 255, not"), penstock.priority(number):
        pass
    assert urgency.current() is None


def test_a_priority_holds_in_its_block_and_thread() -> None:
    """The innermost counts, an exception ends it, and other threads have theirs."""
    found: list[int | None] = []
    with penstock.priority(200) as outer:
        with pytest.raises(KeyError), penstock.priority(0):
            assert _number() == 0
            raise KeyError
        thread = threading.Thread(target=lambda: found.append(_number()))
        thread.start()
        thread.join()
        assert _number() == outer.number == 200
        outer.change(3)
        assert _number() == 3
        with pytest.raises(Config):
            outer.change(256)
    assert (_number(), found) == (None, [None])


@pytest.mark.parametrize("coflow", [-1, 1 << 32, 1.5, "0", None, True])
def test_a_coflow_is_a_whole_number(coflow: Any) -> None:
    with (
        pytest.raises(Config, match=r"a coflow is a whole number from 1 to 4294967295, or 0"),
        penstock.priority(128, coflow=coflow),
    ):
        pass
    assert urgency.current() is None


def test_operations_of_a_block_belong_to_its_coflow() -> None:
    """The flight record shows which; operations elsewhere, and in a block without one, belong to none."""
    largest = (1 << 32) - 1
    for found, text in ranks.run(_coflows, count=2):
        assert found == [0, 7, largest, 0, 7, 0] and "coflow 7" in text and text.count("coflow") == 3


def _coflows() -> tuple[list[int], str]:
    from penstock.tools.flight import describe

    dist.init_process_group("penstock")
    tensor = torch.ones(8)
    dist.all_reduce(tensor)
    with penstock.priority(128, coflow=7):
        dist.all_reduce(tensor)
        with penstock.priority(3, coflow=(1 << 32) - 1):
            dist.broadcast(tensor, 0)
        with penstock.priority(3):
            dist.all_reduce(tensor)
        dist.all_reduce(tensor)
    dist.all_reduce(tensor)
    record = penstock.flight_record()
    found = [one["coflow"] for one in record["operations"] if one["number"] is not None][-6:]
    dist.destroy_process_group()
    return found, describe([record])


def _number() -> int | None:
    current = urgency.current()
    return None if current is None else current.number


@pytest.mark.parametrize("threads", [1, 2])
def test_urgent_operations_overtake_on_a_link(threads: int) -> None:
    """Behind two seconds of bytes an urgent all-reduce, message and batch end before those; one that is less urgent does not.
    So where I/O threads share the streams."""
    with testbed.Testbed(hosts=2, link=testbed.LinkSpec(rate_mbit=100)) as bed:
        for ended in ranks.run(_overtake, count=2, bed=bed, env={"PENSTOCK_IO_THREADS": str(threads)}):
            assert ended == ["urgent", "message", "batch", "bulk", "less urgent"]


def _overtake() -> list[str]:
    dist.init_process_group("penstock")
    rank, ended = dist.get_rank(), []
    bulk, small = torch.full((6 << 20,), 1.0), [torch.full((16384,), float(rank)) for _ in range(4)]
    group = dist.new_group([0, 1])
    dist.barrier()
    first = dist.all_reduce(bulk, async_op=True)
    with penstock.priority(255):
        last = dist.all_reduce(small[3], group=group, async_op=True)
    with penstock.priority(0):
        dist.all_reduce(small[0], group=group)
        ended += ["urgent"] * (not first.is_completed())
        (dist.send if rank else dist.recv)(small[1], 1 - rank)
        ended += ["message"] * (not first.is_completed())
        (work,) = dist.batch_isend_irecv([dist.P2POp(dist.isend if rank else dist.irecv, small[2], 1 - rank)])
    work.wait()
    ended += ["batch"] * (not first.is_completed())
    for name, work in (("bulk", first), ("less urgent", last)):
        ended += [name] * (name == "bulk" or first.is_completed())
        work.wait()
    assert bool((bulk == 2).all()) and [float(one[0]) for one in small] == [1, 1, 1, 1]
    dist.destroy_process_group()
    return ended


def test_a_priority_changes_while_an_operation_waits() -> None:
    """What was less urgent than two seconds of bytes overtakes them when it becomes urgent."""
    with testbed.Testbed(hosts=2, link=testbed.LinkSpec(rate_mbit=100)) as bed:
        for ended in ranks.run(_change, count=2, bed=bed):
            assert ended == [False, True]


def _change() -> list[bool]:
    dist.init_process_group("penstock")
    bulk, small = torch.full((6 << 20,), 1.0), torch.full((65536,), 1.0)
    group = dist.new_group([0, 1])
    dist.barrier()
    first = dist.all_reduce(bulk, async_op=True)
    with penstock.priority(255) as block:
        second = dist.all_reduce(small, group=group, async_op=True)
    block.change(0)
    second.wait()
    ended = [first.is_completed()]
    first.wait()
    block.change(7)
    ended.append(bool((bulk == 2).all()) and bool((small == 2).all()))
    dist.destroy_process_group()
    return ended


# By whose the bulk is: the pairs between which something urgent and the bulk go, and the hosts of the ranks.
_SHARED = {
    "to another rank": ((0, 1), (0, 2), [0, 1, 2]),
    "of a neighbour": ((0, 3), (1, 2), [0, 0, 1, 1]),
    "of another host to the same rank": ((0, 2), (1, 2), [0, 1, 2]),
}


@pytest.mark.parametrize(("bulk", "threads"), [*((each, 1) for each in _SHARED), ("to another rank", 2)])
def test_bulk_that_shares_a_link_gives_way(bulk: str, threads: int) -> None:
    """An urgent message of 10 MiB ends before bulk of 8 MiB that was there first; it would be last if each had half of the link.
    Messages before them have shown how fast that is."""
    urgent, other, placement = _SHARED[bulk]
    with testbed.Testbed(hosts=placement[-1] + 1, link=testbed.LinkSpec(rate_mbit=100)) as bed:
        work = functools.partial(_share, urgent, other)
        env = {"PENSTOCK_IO_THREADS": str(threads)}
        ended = ranks.run(work, count=len(placement), bed=bed, placement=placement, env=env)
    assert ended[urgent[1]]["urgent"] < ended[other[1]]["bulk"]


def _share(urgent: tuple[int, int], bulk: tuple[int, int]) -> dict[str, float]:
    dist.init_process_group("penstock")
    rank, ended = dist.get_rank(), dict[str, float]()

    def pass_on(tensor: torch.Tensor, pair: tuple[int, int]) -> dist.Work | None:
        if rank not in pair:
            return None
        return (dist.isend if rank == pair[0] else dist.irecv)(tensor, pair[rank == pair[0]])

    for pair in (urgent, bulk):
        if (first := pass_on(torch.ones(8 << 18), pair)) is not None:
            first.wait()
    with penstock.priority(0):
        dist.barrier()
    works = {"bulk": pass_on(torch.ones(8 << 18), bulk)}
    with penstock.priority(0):
        dist.barrier()
        works["urgent"] = pass_on(torch.ones(10 << 18), urgent)

    def wait(name: str, work: dist.Work) -> None:
        work.wait()
        ended[name] = time.monotonic()

    threads = [threading.Thread(target=wait, args=(name, work)) for name, work in works.items() if work is not None]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    dist.destroy_process_group()
    return ended


@pytest.mark.parametrize("with_ddp", [False, True])
def test_urgent_gradients_overtake_on_a_link(with_ddp: bool) -> None:
    """Behind two seconds of bytes, those of an urgent model arrive before them, those of one that is less urgent afterwards."""
    with testbed.Testbed(hosts=2, link=testbed.LinkSpec(rate_mbit=100)) as bed:
        for ended in ranks.run(functools.partial(_train, with_ddp), count=2, bed=bed):
            assert ended == ["urgent", "bulk"]


def _train(with_ddp: bool) -> list[str]:
    dist.init_process_group("penstock")
    with pytest.raises(Config, match="from 0"):
        penstock.torch.GradientReducer(torch.nn.Linear(1, 1), priority=-1)
    ended = []

    def model(priority: int) -> torch.nn.Module:
        made = torch.nn.Linear(16384, 2)
        if not with_ddp:
            penstock.torch.GradientReducer(made, priority=priority)
            return made
        wrapped = torch.nn.parallel.DistributedDataParallel(made)
        penstock.torch.ddp_hook(wrapped, priority=priority)
        return wrapped

    urgent, later = model(0), model(255)
    bulk, values = torch.full((6 << 20,), 1.0), torch.full((1, 16384), float(dist.get_rank()))
    dist.barrier()
    first = dist.all_reduce(bulk, async_op=True)
    urgent(values).sum().backward()
    ended += ["urgent"] * (not first.is_completed())
    later(values).sum().backward()
    ended += ["bulk"] * first.is_completed()
    first.wait()
    for each in (urgent, later):
        assert all(bool((one.grad == (0.5 if one.ndim == 2 else 1.0)).all()) for one in each.parameters())
    dist.destroy_process_group()
    return ended


def test_urgent_operations_of_horovod_overtake_on_a_link() -> None:
    """Those that are submitted behind two seconds of bytes, and those that come to be agreed on in one round with them."""
    with testbed.Testbed(hosts=2, link=testbed.LinkSpec(rate_mbit=100)) as bed:
        for ended in ranks.run(_horovod, count=2, bed=bed, env={"HOROVOD_CYCLE_TIME": "300"}):
            assert ended == ["urgent", "fused with none", "bulk"]


def _horovod() -> list[str]:
    import penstock.horovod.torch as hvd

    hvd.init()
    ended, bulk = [], torch.full((6 << 20,), 1.0)
    first = hvd.allreduce_async(bulk, op=hvd.Sum, name="bulk")
    with penstock.priority(0):
        assert hvd.allreduce(torch.ones(5), op=hvd.Sum, name="small").tolist() == [2.0] * 5
    ended += ["urgent"] * (not hvd.poll(first))
    hvd.synchronize(first)
    # Both within the cycle that a round waits for.
    again = hvd.allreduce_async(bulk, op=hvd.Sum, name="bulk")
    with penstock.priority(3) as block:
        small = hvd.allreduce_async(torch.ones(5), op=hvd.Sum, name="small")
    assert hvd.synchronize(small).tolist() == [2.0] * 5
    ended += ["fused with none"] * (not hvd.poll(again))
    block.change(200)
    if bool((hvd.synchronize(again) == 2).all()):
        ended.append("bulk")
    hvd.shutdown()
    return ended


def test_what_arrays_ask_for_overtakes_on_a_link() -> None:
    """All-reduces of JAX and TensorFlow have the priority of the block that they are called in."""
    with testbed.Testbed(hosts=2, link=testbed.LinkSpec(rate_mbit=100)) as bed:
        for ended in ranks.run(_arrays, count=2, bed=bed):
            assert ended == ["urgent", "bulk", "less urgent"]


def _arrays() -> list[str]:
    dist.init_process_group("penstock")
    arrays.init()
    bulk, small, ended = torch.full((6 << 20,), 1.0), [np.ones(100_000, np.float32)], []
    first = dist.all_reduce(bulk, async_op=True)
    with penstock.priority(0):
        assert arrays.job().all_reduce(small, op="sum")[0].min() == 2
    ended += ["urgent"] * (not first.is_completed())
    with penstock.priority(255):
        arrays.job().all_reduce(small, op="sum")
    ended += ["bulk", "less urgent"] * first.is_completed()
    first.wait()
    arrays.shutdown()
    dist.destroy_process_group()
    return ended


@pytest.mark.parametrize("medium", [{"PENSTOCK_SHM": "0"}, {}], ids=["tcp", "memory"])
def test_ranks_may_differ(medium: dict[str, str]) -> None:
    """Each sends by its own priority, and results are the same. Some rank says so, and each once at most, with the operation,
    both ranks and both numbers."""
    with ranks.Ranks(_differ, count=3, env=medium) as job:
        outcomes = job.outcomes(timeout_s=60)
    assert all(outcome.ok for outcome in outcomes), "\n".join(map(str, outcomes))
    assert [outcome.value for outcome in outcomes] == [[3.0, 3.0, 3.0]] * 3
    told = [line for outcome in outcomes for line in _differences(outcome)]
    assert told and all(len(_differences(outcome)) <= 1 for outcome in outcomes), told
    for line in told:
        found = re.search(
            r"all_reduce.* #(\d) of group .* has priority (\d+) on rank (\d).* and (\d+) on rank (\d)", line
        )
        assert found is not None, line
        number, ours, own, theirs, other = map(int, found.groups())
        assert (ours, theirs) == tuple((rank * 100 + (number - 1) * 77) % 256 for rank in (own, other)), line


def _differences(outcome: ranks.Outcome) -> list[str]:
    return [line for line in outcome.output.splitlines() if "has priority" in line]


def test_what_need_not_be_alike_is_not_told() -> None:
    """Nothing is said of operations that ranks change later, of messages, whose senders decide, nor of Horovod's rounds and of
    ranks that have joined."""
    for program in (_alike, _alike_in_horovod):
        with ranks.Ranks(program, count=2) as job:
            outcomes = job.outcomes(timeout_s=60)
        assert all(outcome.ok for outcome in outcomes), "\n".join(map(str, outcomes))
        assert not [line for outcome in outcomes for line in _differences(outcome)]


def _alike() -> None:
    dist.init_process_group("penstock")
    rank = dist.get_rank()
    for number in (0, 200, 255):
        with penstock.priority(number) as block:
            works = [dist.all_reduce(torch.ones(size), async_op=True) for size in (3, 1 << 20, 100_000)]
            block.change(40 * rank)
        for work in works:
            work.wait()
    with penstock.priority(rank):
        peer = torch.ones(100_000)
        dist.send(peer, 1) if rank == 0 else dist.recv(peer, 0)
    # On one of them steps overlap, and so gradients have other priorities there.
    model = torch.nn.Sequential(*(torch.nn.Linear(200, 200) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reducer = penstock.torch.GradientReducer(model, optimizer=optimizer if rank else None, bucket_bytes=100_000)
    for _ in range(3):
        model(torch.ones(1, 200)).sum().backward()
        optimizer.step()
    reducer.close()
    dist.destroy_process_group()


def _alike_in_horovod() -> None:
    import penstock.horovod.torch as hvd

    hvd.init()
    if hvd.rank() == 0:
        # Rank 1 has submitted nothing urgent when this is told.
        with penstock.priority(0):
            first = hvd.allreduce_async(torch.ones(5), op=hvd.Sum, name="first")
    hvd.allreduce(torch.ones(5), op=hvd.Sum, name="second")
    if hvd.rank() == 1:
        with penstock.priority(0):
            first = hvd.allreduce_async(torch.ones(5), op=hvd.Sum, name="first")
    hvd.synchronize(first)
    if hvd.rank() == 0:
        with penstock.priority(9):
            assert hvd.allreduce(torch.ones(5), op=hvd.Sum, name="alone").tolist() == [1.0] * 5
    hvd.join()
    hvd.shutdown()


def _differ() -> list[float]:
    dist.init_process_group("penstock")
    rank = dist.get_rank()
    tensors = [torch.ones(size) for size in (100_000, 3, 20_000)]
    works = []
    for at, tensor in enumerate(tensors):
        with penstock.priority((rank * 100 + at * 77) % 256):
            works.append(dist.all_reduce(tensor, async_op=True))
    for work in works:
        work.wait()
    assert all(bool((tensor == tensor[0]).all()) for tensor in tensors)
    dist.destroy_process_group()
    return [float(tensor[0]) for tensor in tensors]


def test_the_program_of_the_page_runs(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """With a smaller tensor, and with the operation that changes its priority."""
    page = (root / "docs" / "guide" / "priority.md").read_text(encoding="utf-8")
    program, change = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    program = program.replace("64 << 20", "1 << 20").replace("dist.destroy", change + "work.wait()\ndist.destroy")
    (tmp_path / "program.py").write_text(program, encoding="utf-8")
    command = [*forked.TORCHRUN, "--nproc-per-node=2", "program.py"]
    done = forked.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_the_bench_makes_of_what_ranks_say() -> None:
    """The slower rank of each small sum counts; all bytes are held against the bulk's own rate."""

    def said(factor: float) -> list[dict[str, Any]]:
        ways = {"alone": ([0.001, 0.003], 0.5), "usual": ([0.2], 2.0), "urgent": ([0.004, 0.002, 0.006], 2.0)}
        ways["first"] = ([0.012], 2.0)
        records: list[dict[str, Any]] = [{"bulk_s": [2.0, 1.8, 2.2]}]
        for way, (seconds, whole) in ways.items():
            records.append({"way": way, "seconds": [factor * each for each in seconds], "whole_s": whole})
        return records

    alone, usual, urgent, first = bench.summarise([said(1.0), said(1.5)], "same rank", "penstock", 65536, 1 << 28)
    assert (alone.samples, alone.median_s, alone.worst_s, alone.rate) == (2, 0.003, pytest.approx(0.0045), None)
    assert (usual.median_s, usual.target_s) == (pytest.approx(0.3), None)
    assert (urgent.median_s, urgent.target_s) == (pytest.approx(0.006), pytest.approx(0.008))
    assert urgent.rate == pytest.approx(1 + 4 * 65536 / (1 << 28))
    assert (first.way, first.median_s, first.target_s) == ("first", pytest.approx(0.018), pytest.approx(0.008))
    json.dumps([vars(row) for row in (alone, usual, urgent)])
    assert "<= 8.0 ms" in map(str, bench.table([alone, usual, urgent]).for_terminal().columns[6]._cells)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--cases", "same rank,mine"], "no case mine: there are same rank, neighbour, other host, aggregated"),
        (["--backends", "penstock,nccl"], "no backend nccl: there are penstock, gloo"),
        (["--sizes", "2"], "2 bytes are no whole number of float32 elements"),
        (["--rate", "-5"], "rate_mbit=-5.0: give 0.1 to 400000 Mbit/s"),
        (["--flow", "x"], "--flow x: give Mbit/s"),
        (["--turns", "0"], "0 is not in the range"),
    ],
)
def test_the_bench_refuses_before_it_makes_a_host(arguments: list[str], says: str) -> None:
    """In one line, without a traceback."""
    done = CliRunner().invoke(bench.command, arguments)
    assert done.exit_code == 2 and says in done.output, done.output
