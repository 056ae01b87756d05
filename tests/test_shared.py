"""Proves that tensors of `penstock.empty` are tensors like others, to torch, to collectives, and to the system."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import pathlib
import platform
import resource
import signal
import struct
import subprocess
import traceback

import pytest
import torch
import torch.distributed as dist

import penstock
import ranks
from backends import ALL, Backend
from penstock.errors import Config as ConfigError
from penstock.errors import PeerLost

MEDIA = [backend for backend in ALL.values() if backend.name == "penstock"]


def test_a_tensor_like_others() -> None:
    """Shapes, dtypes, zeros, views, and no memory file left when the last view is gone."""
    before = _memory_files()
    tensor = penstock.empty(3, 5, dtype=torch.bfloat16)
    assert tensor.shape == (3, 5) and tensor.dtype == torch.bfloat16 and tensor.is_contiguous()
    assert not tensor.any() and tensor.data_ptr() % mmap.PAGESIZE == 0
    row = tensor[1]
    row += 2
    assert tensor.sum() == 10
    assert penstock.empty((2, 3)).shape == (2, 3) and penstock.empty(torch.Size([4])).dtype == torch.get_default_dtype()
    assert penstock.empty(0).shape == (0,) and penstock.empty().shape == ()
    assert torch.nn.Parameter(penstock.empty(7)).requires_grad
    assert _memory_files() > before
    del tensor
    assert row.sum() == 10
    del row
    gc.collect()
    assert _memory_files() == before


def test_wrong_arguments() -> None:
    """What is no shape or no dtype is refused, and leaves nothing behind."""
    before = _memory_files()
    with pytest.raises(ConfigError, match=r"\(3, -1\)"):
        penstock.empty(3, -1)
    with pytest.raises(TypeError):
        penstock.empty("three")
    with pytest.raises(TypeError, match=r"torch\.dtype"):
        penstock.empty(3, dtype="float32")
    assert _memory_files() == before


def test_no_room() -> None:
    """More than the system has is an error that says so, and leaves nothing behind."""
    before = _memory_files()
    with pytest.raises(ConfigError, match=r"cannot make \d+\.\d MiB of shared memory"):
        penstock.empty(1 << 58, dtype=torch.uint8)
    assert _memory_files() == before


@pytest.mark.parametrize("medium", MEDIA, ids=str)
@pytest.mark.parametrize("count", [2, 3])
def test_collectives(medium: Backend, count: int) -> None:
    """Every collective, on sizes around every limit, gives what it gives on plain tensors, and the same on all ranks."""
    values = ranks.run(_collectives, count=count, env=medium.env, timeout_s=120)
    assert all(value == values[0] for value in values)


def test_on_some_ranks_only() -> None:
    """Ranks need not agree on where their tensors lie."""
    ranks.run(_mixed, count=3)


def test_made_before_and_kept_after() -> None:
    """A tensor may be older than the group, outlive it, and serve the next one."""
    ranks.run(_two_groups, count=2)


def test_many_come_and_go() -> None:
    """Peers let go of what is gone: neither descriptors nor mappings pile up."""
    ranks.run(_come_and_go, count=2)


def test_memory_of_a_rank_that_has_died() -> None:
    """Of a rank that has died nothing is held: no mapping of its tensors, no descriptor for it, no message and no credit."""
    with ranks.Ranks(_outlive, count=2) as job:
        job.await_note("reduced", deadline_s=60)
        job.signal(1, signal.SIGKILL)
        (survivor,) = job.outcomes(of=[0], timeout_s=60)
        assert survivor.ok, str(survivor)


def test_no_room_for_a_mapping() -> None:
    """A rank that may not map any more copies what its peer shares: the group lives, and the results are right."""
    ranks.run(_without_room, count=2)


def test_a_forked_child_keeps_no_memory_of_others() -> None:
    """A DataLoader worker that outlives an operation holds the rank's own tensors, as any child does, and no peer's."""
    ranks.run(_fork_and_look, count=2)


def test_a_peer_in_another_pid_namespace() -> None:
    """Ranks that cannot name each other's process send bytes through the socket, and share what is made to be."""
    if subprocess.run(["unshare", "--pid", "--fork", "true"], check=False, capture_output=True).returncode:
        pytest.skip("making a PID namespace needs root, CAP_SYS_ADMIN and unshare")
    ranks.run(_apart, count=2)


@pytest.mark.parametrize("blind", [(), (1,), (0, 1, 2)], ids=["no rank", "one rank", "all ranks"])
def test_where_the_kernel_forbids_reading(blind: tuple[int, ...]) -> None:
    """Ranks that may not read others' memory (a container without the right) send bytes through the socket, and say so.

    What lies in shared memory is read from there all the same. The refusal is a real one: of a seccomp filter.
    """
    with ranks.Ranks(_blind, count=3, args=(blind,), env={"PENSTOCK_LOG": "info"}) as job:
        outcomes = job.outcomes(timeout_s=120)
    if any(outcome.raised is not None and outcome.raised.is_a("NoFilter") for outcome in outcomes):
        pytest.skip("no seccomp filter here")
    for outcome in outcomes:
        assert outcome.ok and outcome.value == outcomes[0].value, str(outcome)
        said = outcome.output.count("cannot read the memory of")
        assert (said > 0) == (outcome.rank in blind), outcome.output
    (line,) = [line for line in outcomes[0].output.splitlines() if "penstock: group" in line]
    through = {(): "memory (2)", (1,): "local socket (1), memory (1)", (0, 1, 2): "local socket (2)"}[blind]
    assert f"reaches the others through {through}" in line, line


@pytest.mark.parametrize("medium", MEDIA, ids=str)
def test_fork_with_live_tensors(medium: Backend) -> None:
    """A forked child that has our tensors cannot communicate, drops them and ends; its parent works on with them."""
    for text in ranks.run(_fork, count=2, env=medium.env):
        assert "fork" in text, text


def test_one_descriptor_a_tensor() -> None:
    """A process may have a thousand descriptors: a tensor costs it one, before, in, between and after its groups."""
    ranks.run(_count_descriptors, count=2)


def test_a_file_that_cannot_be_shared() -> None:
    """What the engine cannot share is refused in words that speak of no group, and groups go on."""
    ranks.run(_refuse_file, count=2)


def test_a_tensor_that_goes_before_its_offer_has_left() -> None:
    """A rank drops a shared tensor, whose group has failed, before a busy peer has read which memory is offered: the peer gets
    the offer whole, and the other groups of the two go on. They failed with the loss of a rank that lived."""
    ranks.run(_withdrawn, count=2)


def test_a_file_that_is_gone() -> None:
    """An engine that has died has closed its descriptor, whose number is another file's now: that one stays untouched."""
    ranks.run(_lose_descriptor, count=2)


# ------------------------------------------------------------------------------------------------------------ programs


def _collectives() -> list[float]:
    dist.init_process_group("penstock")
    digests = _exercise()
    dist.destroy_process_group()
    return digests


def _exercise() -> list[float]:
    rank, world = dist.get_rank(), dist.get_world_size()
    digests = []
    for elements in (0, 1, 1000, 4097, 100_003, 1 << 20):
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            own = torch.arange(elements).remainder(97).add(rank).to(dtype)
            tensor = penstock.empty(elements, dtype=dtype).copy_(own)
            plain = own.clone()
            dist.all_reduce(tensor)
            dist.all_reduce(plain)
            assert tensor.equal(plain), (elements, dtype)
            digests.append(float(tensor.double().sum()))
            everything = penstock.empty(world * elements, dtype=dtype)
            dist.all_gather_into_tensor(everything, own)
            want = [torch.arange(elements).remainder(97).add(other).to(dtype) for other in range(world)]
            assert everything.equal(torch.cat(want)), (elements, dtype)
            part = penstock.empty(elements, dtype=dtype)
            dist.reduce_scatter_tensor(part, everything, dist.ReduceOp.MAX)
            assert part.equal(want[rank]), (elements, dtype)
            dist.broadcast(part, 1)
            assert part.equal(want[1]), (elements, dtype)
            swapped = torch.empty_like(everything)
            dist.all_to_all_single(swapped, everything)
            assert swapped.equal(want[rank].repeat(world)), (elements, dtype)
    # Offsets into a buffer, many operations at a time.
    flat = penstock.empty(1 << 20).fill_(float(rank + 1))
    works = [dist.all_reduce(part, async_op=True) for part in flat.split(100_001)]
    for work in works:
        work.wait()
    assert flat.eq(world * (world + 1) / 2).all()
    return digests


def test_reads_of_shared_memory_are_counted() -> None:
    """Mapped or not: in an all-reduce of two ranks each reads half of the other's tensor, and the half that the other summed."""
    assert ranks.run(_counted, count=2, env={"PENSTOCK_SHM": "1"}) == [[4 << 20] * 2] * 2


def _counted() -> list[int]:
    dist.init_process_group("penstock")
    read = []
    for tensor in (torch.ones(1 << 20), penstock.empty(1 << 20).fill_(1.0)):
        before = penstock.stats()["memory_read_bytes"]
        dist.all_reduce(tensor)
        assert tensor.eq(2.0).all()
        stats = penstock.stats()
        (peer,) = stats["peers"]
        assert peer["memory_read_bytes"] == stats["memory_read_bytes"]
        read.append(stats["memory_read_bytes"] - before)
    dist.destroy_process_group()
    return read


def _blind(blind: tuple[int, ...]) -> list[float]:
    rank = int(os.environ["RANK"])
    if rank in blind:
        _forbid_reading()
    dist.init_process_group("penstock")
    for peer in penstock.stats()["peers"]:
        either = rank in blind or peer["rank"] in blind
        assert peer["medium"] == ("local socket" if either else "memory"), peer
    tensor = penstock.empty(100_000).fill_(1.0)
    dist.all_reduce(tensor)
    assert tensor.eq(3.0).all()
    assert _mapped_memory_files() >= 3, "the peers' tensors were not read from shared memory"
    digests = _exercise()
    dist.all_reduce(torch.ones(1 << 20))
    (group,) = penstock.stats()["groups"]
    # Ranks 0 and 2 can read each other where rank 1 is blind: two hosts, as far as plans go.
    hosts = {0: "1 hosts: direct", 1: "2 hosts: hierarchical", 3: "3 hosts: ring"}[len(blind)]
    assert hosts in group["algorithm"], group
    dist.destroy_process_group()
    return digests


class NoFilter(Exception):
    """The kernel takes no filter of system calls."""


def _forbid_reading() -> None:
    """Let the kernel answer process_vm_readv with EPERM, to this thread and those that it starts."""
    number = {"x86_64": 310, "aarch64": 270}.get(platform.machine())
    if number is None:
        raise NoFilter(f"the number of process_vm_readv on {platform.machine()} is not known here")
    # <linux/filter.h>: load the system call's number; if it is this one, the next; else the one after that.
    program = struct.pack(
        "HBBI" * 4, 0x20, 0, 0, 0, 0x15, 0, 1, number, 0x06, 0, 0, 0x00050000 | errno.EPERM, 0x06, 0, 0, 0x7FFF0000
    )
    instructions = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 4, ctypes.addressof(instructions)), 16)
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, set_seccomp, mode_filter = 38, 22, 2
    for call in [(no_new_privileges, 1, 0, 0, 0), (set_seccomp, mode_filter, header, 0, 0)]:
        if libc.prctl(*call) != 0:
            raise NoFilter(os.strerror(ctypes.get_errno()))


def _fork() -> str:
    dist.init_process_group("penstock")
    tensors = [penstock.empty(100_000).fill_(1.0) for _ in range(3)]
    dist.all_reduce(tensors[0])
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        # Nothing but the answer may leave the child.
        text = "nothing was raised"
        try:
            try:
                dist.all_reduce(tensors[0])
            except RuntimeError as error:
                text = str(error)
            before = _memory_files()
            own = [penstock.empty(10) for _ in range(20)]
            assert sum(tensor.sum() for tensor in own) == 0
            del own, tensors
            gc.collect()
            assert _memory_files() == before, "the child keeps what it made itself"
            assert _mapped_memory_files() <= 6, "the engine's mappings, and no tensor's, are left"
        except BaseException as error:
            text = repr(error)
        finally:
            os.write(writing, text.encode())
            os._exit(0)
    os.close(writing)
    for tensor in tensors:
        dist.all_reduce(tensor)
    with open(reading) as answer:
        text = answer.read()
    assert os.waitpid(child, 0)[1] == 0
    for tensor in [*tensors, penstock.empty(100_000).fill_(1.0)]:
        dist.all_reduce(tensor)
    # Each was reduced twice by now, the first three times.
    assert [tensor[-1].item() for tensor in tensors] == [8.0, 4.0, 4.0]
    dist.destroy_process_group()
    return text


def _mixed() -> None:
    dist.init_process_group("penstock")
    rank = dist.get_rank()
    tensor = (penstock.empty if rank == 1 else torch.empty)(1 << 20).fill_(float(rank))
    for _ in range(3):
        dist.all_reduce(tensor)
    assert tensor.eq(27.0).all(), tensor
    dist.destroy_process_group()


def _two_groups() -> None:
    tensor = penstock.empty(1 << 18).fill_(1.0)
    for turn in (1, 2):
        dist.init_process_group("penstock")
        dist.all_reduce(tensor)
        dist.destroy_process_group()
        assert tensor.eq(2.0**turn).all()
    del tensor
    gc.collect()
    assert _memory_files() == 0


def _come_and_go() -> None:
    dist.init_process_group("penstock")
    counts = set()
    for turn in range(200):
        tensor = penstock.empty(100_000).fill_(1.0)
        dist.all_reduce(tensor)
        assert tensor.eq(2.0).all()
        # The tensor's own mapping, the engine's of its first page, and that of the peer's tensor.
        assert _mapped_memory_files() >= 3, "the peer's tensor was not read from shared memory"
        dist.barrier()
        del tensor
        # The offers of the turn before are withdrawn by now: the barrier came after.
        dist.barrier()
        if turn >= 100:
            counts.add(_memory_files() + _mapped_memory_files())
    # What the engine has not got round to yet; two hundred tensors would be hundreds.
    assert max(counts) <= 10, counts
    dist.destroy_process_group()


def _outlive() -> None:
    dist.init_process_group("penstock")
    tensor = penstock.empty(100_000).fill_(1.0)
    dist.all_reduce(tensor)
    held = penstock.stats()["held"]
    assert held["mappings"] == 1, held
    if dist.get_rank() == 0:
        # Copied, and in place: nobody receives them.
        dist.isend(torch.ones(10), 1)
        dist.isend(tensor, 1, tag=1)
    ranks.note("reduced")
    with pytest.raises(PeerLost):
        dist.recv(torch.empty(10), 1 - dist.get_rank(), tag=9)
    held = penstock.stats()["held"]
    del held["callback_threads"]
    # The tensor itself is shared still.
    left = {"groups": 1, "memberships": 1, "descriptors": 1}
    assert {name: count for name, count in held.items() if count} == left, held
    assert _mapped_memory_files() == 2, "the engine's mapping of the tensor's first page, and the tensor"


def _without_room() -> None:
    dist.init_process_group("penstock")
    rank = dist.get_rank()
    tensor = (penstock.empty if rank == 1 else torch.empty)(1 << 24).fill_(rank + 1.0)
    dist.barrier()
    if rank == 0:
        used = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        # Room for a mask of the tensor, not for the peer's 64 MiB.
        resource.setrlimit(resource.RLIMIT_AS, (used + (48 << 20), hard))
    # Rank 1 offers its memory only now.
    dist.barrier()
    dist.all_reduce(tensor)
    for _ in range(3):
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
    assert tensor.eq(3.0).all(), tensor
    if rank == 0:
        assert (_mapped_memory_files(), _memory_files()) == (0, 1), "the peer's tensor was to be read from its file"
        child = os.fork()
        if child == 0:
            os._exit(_memory_files())
        assert os.waitpid(child, 0) == (child, 0), "a forked child holds the peer's file"
    dist.barrier()
    del tensor
    # The offer is withdrawn by the second barrier, as in `_come_and_go`.
    dist.barrier()
    dist.barrier()
    if rank == 0:
        assert _memory_files() == 0, "the peer's file is kept after its tensor is gone"
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    dist.destroy_process_group()


def _fork_and_look() -> None:
    tensor = penstock.empty(1 << 20).fill_(1.0)
    own = (_memory_files(), _mapped_memory_files())
    dist.init_process_group("penstock")
    dist.all_reduce(tensor)
    assert _mapped_memory_files() >= own[1] + 2, "the peer's tensor was not read from shared memory"
    child = os.fork()
    if child == 0:
        # The descriptor is the engine's.
        os._exit((_memory_files(), _mapped_memory_files()) != (0, own[1]))
    assert os.waitpid(child, 0) == (child, 0), f"the child has more than the rank's own tensor, {own[1]} mapping"
    dist.barrier()
    dist.destroy_process_group()


def _apart() -> None:
    if os.environ["RANK"] == "0":
        return _reduce_apart()
    assert ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWPID) == 0, os.strerror(ctypes.get_errno())
    # This process stays where it is; its children are in the new namespace.
    child = os.fork()
    if child == 0:
        try:
            _reduce_apart()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0) == (child, 0)
    return None


def _reduce_apart() -> None:
    dist.init_process_group("penstock")
    for make in (torch.empty, penstock.empty):
        for elements in (1, 1 << 20):
            tensor = make(elements).fill_(dist.get_rank() + 1.0)
            dist.all_reduce(tensor)
            assert tensor.eq(3.0).all(), (make, tensor)
    assert _mapped_memory_files() >= 3, "the peer's tensor was not read from shared memory"
    dist.barrier()
    (peer,) = penstock.stats()["peers"]
    assert peer["medium"] == "local socket", peer
    dist.destroy_process_group()


def _withdrawn() -> None:
    dist.init_process_group("penstock")
    rank, other = dist.get_rank(), dist.new_group()
    pids = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    dist.barrier(group=other)
    small = torch.ones(1000)
    if rank == 0:
        os.kill(pids[1], signal.SIGSTOP)
        try:
            # The socket is full, and what comes next waits.
            works = [dist.isend(small, 1) for _ in range(400)]
            tensor = penstock.empty(100_000)
            failed = dist.isend(tensor, 1, group=other)
            other._get_backend(torch.device("cpu")).abort()
            with pytest.raises(RuntimeError):
                failed.wait()
            del tensor, failed
            gc.collect()
            penstock.stats()  # the engine has come by
        finally:
            os.kill(pids[1], signal.SIGCONT)
        for work in works:
            work.wait()
    else:
        for _ in range(400):
            dist.recv(small, 0)
    dist.all_reduce(small)
    assert small.eq(2).all()
    dist.destroy_process_group()


_CLONE_NEWPID = 0x20000000  # <linux/sched.h>


def _count_descriptors() -> None:
    early = penstock.empty(5000)
    assert _memory_files() == 1
    for _ in range(2):
        dist.init_process_group("penstock")
        dist.all_reduce(torch.ones(5000))
        before = len(os.listdir("/proc/self/fd"))
        tensors = [penstock.empty(5000).fill_(1.0) for _ in range(200)]
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in [early, *tensors]]:
            work.wait()
        assert all(tensor.eq(2.0).all() for tensor in tensors)
        # The peer has ours, and we its, when both have read them.
        dist.barrier()
        assert _mapped_memory_files() > 400, "the peer's tensors were not read from shared memory"
        assert _memory_files() == 201
        # Streams and the store may have come or gone meanwhile.
        assert abs(len(os.listdir("/proc/self/fd")) - before - 200) <= 3
        dist.destroy_process_group()
        assert _memory_files() == 201
        del tensors, work
        gc.collect()
        assert _memory_files() == 1
    del early
    assert _memory_files() == 0 and _mapped_memory_files() == 0


def _lose_descriptor() -> None:
    from penstock.torch import shared

    dist.init_process_group("penstock")
    tensor = penstock.empty(5000).fill_(1.0)
    dist.all_reduce(tensor)
    (buffer,) = shared._buffers.values()
    with open(os.devnull) as other:
        lost = os.dup(buffer.file)
        os.dup2(other.fileno(), buffer.file)
        dist.destroy_process_group()
        assert buffer.file is None and not other.closed
    dist.init_process_group("penstock")
    dist.all_reduce(tensor)
    assert tensor.eq(4.0).all()
    dist.destroy_process_group()
    os.close(lost)


def _refuse_file() -> None:
    from penstock.torch import shared

    dist.init_process_group("penstock")
    tensor = torch.ones(5000)
    assert shared._engine is not None
    with pytest.raises(ConfigError) as refused:
        # It is not sealed, and the engine closes it.
        shared._engine.share(os.memfd_create("unsealed"), tensor.data_ptr(), tensor.nbytes)
    assert "cannot share memory" in str(refused.value) and "group" not in str(refused.value)
    dist.all_reduce(tensor)
    assert tensor.eq(2.0).all()
    dist.destroy_process_group()


def _memory_files() -> int:
    """Memory files of ours that this process has open."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            continue
    return sum(link.startswith("/memfd:penstock") for link in links)


def _mapped_memory_files() -> int:
    with open("/proc/self/maps") as maps:
        return sum("/memfd:penstock" in line for line in maps)
