"""Proves that operations on CUDA tensors are right, in the order of streams, and leave nobody's memory in use.

Two ranks share one GPU. Where there is none, those tests are skipped and say so, and what is left runs on fakes of the CUDA
objects (`tests/fake_cuda.py`): it shows that the code around the device is right, and nothing about the device.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as _c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import fake_cuda
import ranks
from backends import ALL, Backend
from torch_uses import batch, close_parameters, integers, perceptron, regression, same, trained_alone

MEDIA = [backend for backend in ALL.values() if backend.name == "penstock"]

with_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device here: the staging of CUDA tensors is tested on fakes only"
)
on_each_medium = pytest.mark.parametrize("medium", MEDIA, ids=str)


# ---------------------------------------------------------------------------------------------------------- on a GPU


@with_gpu
@on_each_medium
def test_collectives(medium: Backend) -> None:
    """Every collective on CUDA tensors, on sizes around every limit."""
    _run(_collectives, medium, False)


@with_gpu
@on_each_medium
def test_ddp(medium: Backend) -> None:
    """DDP on the GPU comes to the parameters that the same training gives on the CPU, on one process."""
    _run(_ddp, medium)


@with_gpu
@on_each_medium
def test_fsdp2(medium: Backend) -> None:
    """A step of FSDP2 on the GPU comes to the parameters that the same step gives on the CPU, on one process."""
    _run(_fsdp2, medium)


@with_gpu
@on_each_medium
def test_producer_on_a_side_stream(medium: Backend) -> None:
    """What a slow kernel on the caller's stream, which is not the default one, has yet to write is what is reduced."""
    _run(_side_stream, medium)


@with_gpu
@on_each_medium
def test_waited_for_on_several_streams(medium: Backend) -> None:
    """Each stream under which `wait` is called sees the result, the second as well as the first, from any thread."""
    _run(_several_streams, medium)


@with_gpu
@on_each_medium
def test_a_future(medium: Backend) -> None:
    """What is chained to the future computes with the result, and its readers with what it computes."""
    _run(_future, medium)


@with_gpu
@on_each_medium
@pytest.mark.parametrize("how", ["tensor", "tensor and work"])
def test_freed_early(how: str, medium: Backend) -> None:
    """A tensor that is dropped in flight gives its memory to others only when no copy uses it any more."""
    _run(_free_early, medium, how)


@with_gpu
@on_each_medium
def test_completed_means_there(medium: Backend) -> None:
    """When `is_completed` says so the result is on the device, without any `wait`, also in the form of lists."""
    _run(_completed, medium, False)


@with_gpu
@on_each_medium
def test_while_a_graph_is_captured(medium: Backend) -> None:
    """What is called while a CUDA graph is captured is refused, and the group goes on."""
    _run(_capturing, medium, False)


@with_gpu
def test_device_that_takes_too_long() -> None:
    """A kernel that outlasts the time-out fails the operation on both ranks: its own says so, the other waited for that rank or
    was told."""
    with ranks.Ranks(_busy_device, count=2, env=_ONE_GPU) as job:
        busy, waiting = job.outcomes(timeout_s=60, grace_s=30)
        for outcome in (busy, waiting):
            assert outcome.raised is not None and outcome.raised.is_a("penstock.errors.Timeout"), str(outcome)
        assert "its tensor was not ready" in busy.raised.text, busy.raised.text
        assert "waiting for rank 0" in waiting.raised.text or "not ready" in waiting.raised.text, waiting.raised.text


# ---------------------------------------------------------------------------------------------------------- on fakes


@on_each_medium
def test_collectives_on_fakes(medium: Backend) -> None:
    """The programs above and the way through the twins are right, as far as fakes of the device can tell."""
    _run(_collectives, medium, True)


def test_completed_means_there_on_fakes() -> None:
    """`is_completed` holds back until the device has the result."""
    _run(_completed, ALL["penstock"], True)


def test_what_is_copied_on_fakes() -> None:
    """A broadcast copies from the root's device and to the others'; a reduce from all of them, and to the root's."""
    root, other = ranks.run(_copies, count=2, env=_ONE_GPU)
    assert root == {"broadcast": ["out"], "reduce": ["out", "back"], "all_reduce": ["out", "back"]}
    assert other == {"broadcast": ["back"], "reduce": ["out"], "all_reduce": ["out", "back"]}


def test_while_a_graph_is_captured_on_fakes() -> None:
    """Every call on CUDA tensors is refused while the current stream captures a graph, and the group goes on."""
    _run(_capturing, ALL["penstock"], True)


def test_transposed_on_fakes() -> None:
    """Tensors on a device that are dense, but not contiguous, are reduced as they lie."""
    _run(_transposed, ALL["penstock"])


@pytest.mark.parametrize("asked", ["penstock", "cpu:penstock,cuda:penstock", "cpu:penstock,cuda:gloo"])
def test_tensors_meant_for_another_backend(asked: str) -> None:
    """Where torch drops the backend that CUDA tensors are to have, they are refused; nothing was sent. (Fakes.)"""
    _run(_meant_for_another, ALL["penstock"], asked)


@pytest.mark.parametrize("whole", [True, False], ids=["whole group", "one device's"])
def test_only_a_whole_group_refuses(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of torch's two base classes only the one that is the whole group can have taken another backend's place."""
    from penstock.torch import backend

    if not whole and issubclass(backend._CLASS, dist.ProcessGroup):
        pytest.skip(f"torch {torch.__version__} offers whole groups only")
    monkeypatch.setattr(backend, "_can_be_made", lambda base: not whole)
    # Without a membership: the check needs none.
    cls = backend._class()
    group = cls.__new__(cls, 0, 1)
    expected = {"cpu:penstock,cuda:nccl": whole, "cpu:penstock,cuda:penstock": False, "penstock": False}
    for asked, refused in expected.items():
        monkeypatch.setitem(dist.distributed_c10d._world.pg_backend_config, group, asked)
        with pytest.raises(ValueError, match=r"cuda:nccl.* 2\.14") if refused else contextlib.nullcontext():
            group._check_cuda()


def test_two_threads_wait_at_once(fakes: None) -> None:
    """Both threads' streams wait for the copies, which are queued once. (Fakes.)"""
    staged, _, ticket, output = _staged()
    entered, leave = threading.Event(), threading.Event()
    copy_back = fake_cuda.use

    def slow(stream: fake_cuda.Stream) -> Any:
        if stream is staged.side.back:
            entered.set()
            assert leave.wait(30)
        return copy_back(stream)

    torch.cuda.stream = slow
    streams = [fake_cuda.Stream(), fake_cuda.Stream()]
    threads = [threading.Thread(target=_wait_under, args=(stream, ticket)) for stream in streams]
    threads[0].start()
    assert entered.wait(30)
    threads[1].start()
    # Time for a wait that would not wait.
    threads[1].join(0.2)
    leave.set()
    for thread in threads:
        thread.join()
    returned = staged.returned()
    recorded = fake_cuda.log.index("record", staged.side.back, returned)
    for stream in streams:
        assert fake_cuda.log.index("wait", stream, returned) > recorded
    assert fake_cuda.log.entries.count(("enter", staged.side.back)) == 1
    same(output.detach().cpu(), 2.0)


def test_waited_for_again(fakes: None) -> None:
    """A wait that times out copies nothing; a later one does, and each stream that waits waits for the copies. (Fakes.)"""
    staged, engine, ticket, output = _staged()
    engine.ended.clear()
    assert ticket.wait(0.01) is False and not ticket.done()
    same(output.detach().cpu(), 1.0)
    assert ("enter", staged.side.back) not in fake_cuda.log.entries
    engine.ended.set()
    streams = [fake_cuda.Stream(), fake_cuda.Stream()]
    for stream in streams:
        _wait_under(stream, ticket)
        assert ("wait", stream, staged.returned()) in fake_cuda.log.entries
    same(output.detach().cpu(), 2.0)
    assert fake_cuda.log.entries.count(("enter", staged.side.back)) == 1


def test_order_of_streams(fakes: None) -> None:
    """Copies out come after what the caller has queued, copies back after those; both are noted in the allocator. (Fakes.)"""
    caller = fake_cuda.Stream()
    with fake_cuda.use(caller):
        staged, engine, ticket, output = _staged()
    side, log = staged.side, fake_cuda.log
    assert engine.released.wait(30)
    _wait_under(caller, ticket)
    order = [
        log.index("wait_stream", side.out, caller),
        log.index("enter", side.out),
        log.index("record_stream", output.data_ptr(), side.out),
        log.index("record", side.out, staged.filled),
        log.index("wait", side.back, staged.filled),
        log.index("enter", side.back),
        log.index("record_stream", output.data_ptr(), side.back),
        log.index("record", side.back, staged.returned()),
        log.index("wait", caller, staged.returned()),
    ]
    assert order == sorted(order), order


def test_changes_that_autograd_does_not_see(fakes: None) -> None:
    """A result that comes back is no operation of the graph, and no change that a backward pass complains of. (Fakes.)"""
    staged, _, ticket, output = _staged()
    parameter = torch.nn.Parameter(torch.full((4,), 3.0))
    squared = (parameter * output).sum()
    version = output._version
    assert ticket.wait()
    assert output._version == version and output.is_leaf and output.requires_grad
    squared.backward()
    assert not staged._twins


def test_a_device_that_fails(fakes: None) -> None:
    """A CUDA error aborts the group with its text; the thread goes on, and ends when the group does. (Fakes.)"""
    staged, engine, _, _ = _staged()
    assert engine.released.wait(30)
    broken = fake_cuda.Event()
    broken.error = RuntimeError("an illegal memory access")
    staged.side.release_when(broken, None)
    assert engine.aborted.wait(30) and "illegal memory access" in engine.reason
    engine.released.clear()
    staged.side.release_when(fake_cuda.Event(), None)
    assert engine.released.wait(30)
    staged.side.close()
    staging = [thread for thread in threading.enumerate() if thread.name == "penstock-staging"]
    for thread in staging[-1:]:
        thread.join(30)
        assert not thread.is_alive()


# ---------------------------------------------------------------------------------------------------------- programs


def _start(timeout_s: float = 60.0) -> tuple[int, int]:
    dist.init_process_group("penstock", timeout=datetime.timedelta(seconds=timeout_s))
    return dist.get_rank(), dist.get_world_size()


def _place(on_fakes: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    if on_fakes:
        fake_cuda.install()
        return fake_cuda.place
    return lambda tensor: tensor.to("cuda")


def _collectives(on_fakes: bool) -> None:
    place = _place(on_fakes)
    rank, world = _start()
    everyone = range(world)
    for length, dtype in itertools.product(
        (0, 1, 1000, 100_003, 1 << 20), (torch.float32, torch.bfloat16, torch.int64)
    ):
        what = f"{length} x {dtype}"
        own = [integers(length, seed=r, dtype=dtype) for r in everyone]
        total, joined = sum(own), torch.cat(own)

        tensor = place(own[rank])
        dist.all_reduce(tensor)
        same(tensor.cpu(), total, f"all_reduce {what}")

        tensor = place(own[rank])
        dist.broadcast(tensor, 1)
        same(tensor.cpu(), own[1], f"broadcast {what}")

        tensor = place(own[rank])
        dist.reduce(tensor, 1)
        same(tensor.cpu(), total if rank == 1 else own[rank], f"reduce {what}")

        tensor = place(torch.zeros(world * length, dtype=dtype))
        dist.all_gather_into_tensor(tensor, place(own[rank]))
        same(tensor.cpu(), joined, f"all_gather_into_tensor {what}")

        # In place, as FSDP does.
        tensor = place(torch.cat([own[r] if r == rank else torch.zeros_like(own[r]) for r in everyone]))
        dist.all_gather_into_tensor(tensor, tensor[rank * length : (rank + 1) * length])
        same(tensor.cpu(), joined, f"all_gather_into_tensor in place {what}")

        parts = [place(torch.zeros(length, dtype=dtype)) for _ in everyone]
        dist.all_gather(parts, place(own[rank]))
        for r in everyone:
            same(parts[r].cpu(), own[r], f"all_gather {what}")

        parts = [place(torch.zeros(length + r, dtype=dtype)) for r in everyone]
        dist.all_gather(parts, place(torch.full((length + rank,), rank + 3, dtype=dtype)))
        for r in everyone:
            same(parts[r].cpu(), float(r + 3), f"uneven all_gather {what}")

        tensor = place(torch.zeros(length, dtype=dtype))
        dist.reduce_scatter_tensor(tensor, place(joined * (rank + 1)))
        same(tensor.cpu(), own[rank] * sum(r + 1 for r in everyone), f"reduce_scatter_tensor {what}")

        tensor = place(torch.zeros(length, dtype=dtype))
        dist.reduce_scatter(tensor, [place(part) for part in own])
        same(tensor.cpu(), own[rank] * world, f"reduce_scatter {what}")

        parts = [place(torch.zeros(length, dtype=dtype)) for _ in everyone] if rank == 0 else None
        dist.gather(place(own[rank]), parts, dst=0)
        for r in everyone if parts else ():
            same(parts[r].cpu(), own[r], f"gather {what}")

        tensor = place(torch.zeros(length, dtype=dtype))
        dist.scatter(tensor, [place(part) for part in own] if rank == 0 else None, src=0)
        same(tensor.cpu(), own[rank], f"scatter {what}")

        tensor = place(torch.zeros(world * length, dtype=dtype))
        dist.all_to_all_single(tensor, place(joined))
        same(tensor.cpu(), own[rank].repeat(world), f"all_to_all_single {what}")

        to, of = (rank + 1) % world, (rank - 1) % world
        tensor = place(torch.zeros(length, dtype=dtype))
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, place(own[rank]), to), dist.P2POp(dist.irecv, tensor, of)]
        )
        for work in works:
            work.wait()
        same(tensor.cpu(), own[of], f"send and recv {what}")

        tensor = place(torch.zeros(length, dtype=dtype))
        sent = dist.isend(place(own[rank]), to, tag=1)
        assert dist.recv(tensor, tag=1) == of
        sent.wait()
        same(tensor.cpu(), own[of], f"recv from any source {what}")

        # Operations on CPU and CUDA tensors keep one order, whichever is ready first.
        tensors = [place(own[rank]) if turn % 2 else own[rank].clone() for turn in range(6)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work in reversed(works):
            work.wait()
        for tensor in tensors:
            same(tensor.cpu(), total, f"mixed {what}")
    with pytest.raises(ValueError, match="one device"):
        dist.all_gather_into_tensor(place(torch.zeros(2 * world)), torch.zeros(2))
    dist.destroy_process_group()


def _ddp() -> None:
    rank, world = _start()
    model = DistributedDataParallel(perceptron().cuda(), bucket_cap_mb=0.002)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        x_BF, y_BO = batch(step, rank)
        regression(model, x_BF.cuda(), y_BO.cuda()).backward()
        optimizer.step()
    parameters = {name: parameter.cpu() for name, parameter in model.module.named_parameters()}
    close_parameters(parameters, trained_alone(5, world))
    dist.destroy_process_group()


def _fsdp2() -> None:
    from torch.distributed.fsdp import fully_shard

    rank, world = _start()
    torch.cuda.set_device(0)
    model = perceptron().cuda()
    mesh = init_device_mesh("cuda", (world,))
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x_BF, y_BO = batch(0, rank)
    regression(model, x_BF.cuda(), y_BO.cuda()).backward()
    optimizer.step()
    parameters = {name: parameter.full_tensor().cpu() for name, parameter in model.named_parameters()}
    close_parameters(parameters, trained_alone(1, world))
    dist.destroy_process_group()


def _side_stream() -> None:
    rank, world = _start()
    stream = torch.cuda.Stream()
    for turn in range(5):
        with torch.cuda.stream(stream):
            tensor = torch.zeros(1 << 20, device="cuda")
            torch.cuda._sleep(_A_WHILE)
            tensor.fill_(float(rank + turn))
            work = dist.all_reduce(tensor, async_op=True)
            work.wait()
            # On the same stream: nobody has waited on the host.
            copy = tensor * 2
        torch.cuda.current_stream().wait_stream(stream)
        same(copy.cpu(), 2.0 * sum(r + turn for r in range(world)))
    dist.destroy_process_group()


def _several_streams() -> None:
    rank, world = _start()
    streams = [torch.cuda.Stream() for _ in range(4)]
    for turn in range(5):
        tensor = torch.full((1 << 24,), float(rank + turn), device="cuda")
        parts = [torch.zeros(1 << 22, device="cuda") for _ in range(world)]
        works = [
            dist.all_reduce(tensor, async_op=True),
            dist.all_gather(parts, tensor[: 1 << 22].clone(), async_op=True),
        ]
        copies: dict[int, list[torch.Tensor]] = {}

        def use(index: int, works: Any = works, tensor: Any = tensor, parts: Any = parts, copies: Any = copies) -> None:
            with torch.cuda.stream(streams[index]):
                for work in works:
                    work.wait()
                copies[index] = [tensor.clone(), *(part.clone() for part in parts)]

        threads = [threading.Thread(target=use, args=(index,)) for index in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        use(3)
        for stream in streams:
            stream.synchronize()
        for index in range(4):
            got, *rest = copies[index]
            same(got, float(sum(r + turn for r in range(world))), f"stream {index}")
            for r, part in enumerate(rest):
                same(part, float(r + turn), f"stream {index}, part {r}")
    dist.destroy_process_group()


def _future() -> None:
    rank, world = _start()
    for turn in range(5):
        tensor = torch.full((1 << 22,), float(rank + turn), device="cuda")
        future = dist.all_reduce(tensor, async_op=True).get_future().then(lambda done: done.value()[0] * 2)
        same(future.wait().cpu(), 2.0 * sum(r + turn for r in range(world)))
    dist.destroy_process_group()


def _free_early(how: str) -> None:
    rank, world = _start()
    for turn in range(20):
        for length in (16, 5000, 1 << 22):
            torch.cuda._sleep(_A_WHILE // 10)
            tensor = torch.full((length,), float(rank), device="cuda")
            work = dist.all_reduce(tensor, async_op=True)
            del tensor
            if how == "tensor and work":
                del work
            squatters = [torch.full((length,), 7.0, device="cuda") for _ in range(4)]
            check = torch.full((length,), float(rank + turn), device="cuda")
            dist.all_reduce(check)
            same(check.cpu(), float(sum(r + turn for r in range(world))))
            if how == "tensor":
                work.wait()
            torch.cuda.synchronize()
            for squatter in squatters:
                same(squatter.cpu(), 7.0, "memory that was not the operation's any more was written to")
    dist.destroy_process_group()


def _copies() -> dict[str, list[str]]:
    """The streams on which each operation with root 0 has copied its tensor."""
    place = _place(True)
    rank, _ = _start()
    copies = {}
    for name, program, result in [
        ("broadcast", lambda tensor: dist.broadcast(tensor, 0), 1.0),
        ("reduce", lambda tensor: dist.reduce(tensor, 0), 3.0 if rank == 0 else 2.0),
        ("all_reduce", dist.all_reduce, 3.0),
    ]:
        tensor = place(torch.full((1000,), rank + 1.0))
        program(tensor)
        same(tensor.cpu(), result, name)
        (side,) = dist.group.WORLD._get_backend(torch.device("cpu"))._sides.values()
        names = {side.out: "out", side.back: "back"}
        recorded = [entry for entry in fake_cuda.log.entries if entry[:2] == ("record_stream", tensor.data_ptr())]
        copies[name] = [names[stream] for _, _, stream in recorded]
        fake_cuda.log.entries.clear()
    dist.destroy_process_group()
    return copies


def _meant_for_another(asked: str) -> None:
    place = _place(True)
    dist.init_process_group(asked, timeout=datetime.timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    # A fake lies on the CPU, and there torch 2.14 and newer look for its backend: it is Penstock's in every case.
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    dropped = isinstance(backend, dist.ProcessGroup) and "gloo" in asked
    tensor = place(torch.full((1000,), float(rank)))
    if dropped:
        with pytest.raises(ValueError, match=r"cuda:gloo.* 2\.14"):
            backend.allreduce([tensor], dist.AllreduceOptions())
        same(tensor.cpu(), float(rank))
    else:
        backend.allreduce([tensor], dist.AllreduceOptions()).wait()
        same(tensor.cpu(), float(sum(range(world))))
    # The group is as good as before.
    tensor = torch.full((1000,), float(rank))
    dist.all_reduce(tensor)
    same(tensor, float(sum(range(world))))
    dist.destroy_process_group()


def _capturing(on_fakes: bool) -> None:
    place = _place(on_fakes)
    rank, world = _start()
    total = float(sum(range(world)))
    tensor, parts = place(torch.full((100,), float(rank))), [place(torch.zeros(100)) for _ in range(world)]
    whole = place(torch.zeros(100 * world))
    dist.all_reduce(tensor)
    same(tensor.cpu(), total)
    calls = [
        lambda: dist.all_reduce(tensor, async_op=True),
        lambda: dist.broadcast(tensor, 0, async_op=True),
        lambda: dist.all_gather(parts, tensor, async_op=True),
        lambda: dist.all_gather_into_tensor(whole, tensor, async_op=True),
        lambda: dist.reduce_scatter(tensor, parts, async_op=True),
        lambda: dist.all_to_all(parts, list(parts), async_op=True),
        lambda: dist.all_to_all_single(whole, whole.clone(), async_op=True),
        lambda: dist.gather(tensor, parts if rank == 0 else None, 0, async_op=True),
        lambda: dist.scatter(tensor, parts if rank == 0 else None, 0, async_op=True),
        lambda: dist.isend(tensor, 1 - rank),
        lambda: dist.irecv(tensor, 1 - rank),
        lambda: dist.irecv(tensor),
    ]
    with fake_cuda.capture() if on_fakes else torch.cuda.graph(torch.cuda.CUDAGraph()):
        for call in calls:
            with pytest.raises(ValueError, match=r"capturing a CUDA graph.* The group is still usable"):
                call()
    same(tensor.cpu(), total)
    tensor.fill_(rank)
    dist.all_reduce(tensor)
    same(tensor.cpu(), total)
    dist.destroy_process_group()


def _transposed() -> None:
    place = _place(True)
    rank, world = _start()
    values = torch.arange(12.0).view(3, 4).t()
    tensor = place(values * rank)
    assert not tensor.is_contiguous()
    dist.all_reduce(tensor)
    assert tensor.cpu().equal(values * sum(range(world)))
    dist.destroy_process_group()


def _completed(on_fakes: bool) -> None:
    place = _place(on_fakes)
    rank, world = _start()
    tensor, parts = place(torch.full((5000,), float(rank))), [place(torch.zeros(5000)) for _ in range(world)]
    # From the backend itself, for its tickets.
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    works = [
        backend.allreduce([tensor], dist.AllreduceOptions()),
        backend.allgather([parts], [place(torch.full((5000,), float(rank)))], _c10d.AllgatherOptions()),
    ]
    if on_fakes:
        held = works[0].tickets[0]._staged.returned
        works[0].tickets[0]._staged.returned = lambda: _hold_back(held())
        for ticket in works[0].tickets:
            ticket.wait()
        assert not works[0].is_completed(), "the copy back had not come to its end"
        works[0].tickets[0]._staged.returned = held
        held().has_come.set()
    for work in works:
        while not work.is_completed():
            threading.Event().wait(0.001)
        assert work.is_success()
    # A stream that has never waited for any of it.
    with torch.cuda.stream(torch.cuda.Stream()):
        same(tensor.cpu(), float(sum(range(world))))
        for r in range(world):
            same(parts[r].cpu(), float(r))
    dist.destroy_process_group()


def _busy_device() -> None:
    rank, _ = _start(2.0)
    dist.all_reduce(torch.ones(10, device="cuda"))
    if rank == 0:
        torch.cuda._sleep(100 * _A_WHILE)
    dist.all_reduce(torch.ones(10, device="cuda"))


# ----------------------------------------------------------------------------------------------------------- helpers


class _Engine:
    """A group and its only operation, which doubles the twin."""

    def __init__(self) -> None:
        self.ended, self.released, self.aborted = threading.Event(), threading.Event(), threading.Event()
        self.ended.set()
        self.reason = ""

    def release(self, _: object) -> None:
        self.released.set()

    def abort(self, reason: str) -> None:
        self.reason = reason
        self.aborted.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        return self.ended.wait(30 if timeout_s is None else timeout_s)

    def done(self) -> bool:
        return self.ended.is_set()


def _staged() -> tuple[Any, _Engine, Any, torch.Tensor]:
    from penstock.torch.staging import Side, Staged, StagedTicket

    engine = _Engine()
    output = fake_cuda.place(torch.ones(4)).requires_grad_()
    staged = Staged(Side(engine, fake_cuda.DEVICE), [output], [output])
    with torch.inference_mode():
        staged.twin(output).mul_(2)
    return staged, engine, StagedTicket(staged, engine), output


def _wait_under(stream: fake_cuda.Stream, ticket: Any) -> None:
    with fake_cuda.use(stream):
        assert ticket.wait()


def _hold_back(event: fake_cuda.Event) -> fake_cuda.Event:
    event.has_come.clear()
    return event


def _run(program: Callable[..., object], medium: Backend, *args: object) -> None:
    ranks.run(program, count=2, args=args, env={**medium.env, **_ONE_GPU}, timeout_s=180)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in [
        (torch, "empty_strided"),
        (torch, "cat"),
        *(
            (torch.cuda, name)
            for name in (
                "Event",
                "Stream",
                "current_stream",
                "stream",
                "get_device_capability",
                "is_available",
                "is_current_stream_capturing",
            )
        ),
    ]:
        monkeypatch.setattr(owner, name, getattr(owner, name))
    fake_cuda.log.entries.clear()
    fake_cuda.install()


# Both ranks use the first device: torch's device meshes choose one by this.
_ONE_GPU = {"LOCAL_RANK": "0"}
# Clock cycles of a GPU: some 20 to 60 ms.
_A_WHILE = 50_000_000
