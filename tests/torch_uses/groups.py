"""Several groups: subgroups, other backends beside, splits, meshes, mixed backend strings."""

from __future__ import annotations

import threading

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from torch_uses import TIMEOUT, bits, integers, know, same, use, world


@use(ranks=4)
def new_group(backend: str) -> object:
    """Subgroups that overlap, with ranks outside; each numbers its ranks anew."""
    with world(backend) as (rank, _):
        memberships = [[0, 2], [1, 2, 3], [3, 1], [2]]
        groups = [dist.new_group(members) for members in memberships]
        for members, group in zip(memberships, groups, strict=True):
            if rank not in members:
                assert dist.get_rank(group) == -1
                continue
            assert dist.get_world_size(group) == len(members)
            tensor = integers(3000, seed=rank)
            dist.all_reduce(tensor, group=group)
            same(tensor, sum(integers(3000, seed=r) for r in members), f"group {members}")
            copy = integers(10, seed=members[-1]) if rank == members[-1] else torch.empty(10)
            dist.broadcast(copy, src=members[-1], group=group)
            same(copy, integers(10, seed=members[-1]), f"group {members}")
        return None


@use(ranks=4)
def subgroups_in_flight(backend: str) -> object:
    """Operations of several groups in flight at once, issued in different orders by different ranks of the world."""
    with world(backend) as (rank, size):
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        half, pair = halves[rank // 2], pairs[rank % 2]
        tensors = {name: integers(200_000, seed=rank + 10 * i) for i, name in enumerate(("world", "half", "pair"))}
        groups = {"world": dist.group.WORLD, "half": half, "pair": pair}
        order = ["world", "half", "pair"] if rank in (0, 3) else ["pair", "world", "half"]
        works = [dist.all_reduce(tensors[name], group=groups[name], async_op=True) for name in order]
        for work in works:
            work.wait()
        members = {"world": range(size), "half": [rank // 2 * 2, rank // 2 * 2 + 1], "pair": [rank % 2, rank % 2 + 2]}
        for i, name in enumerate(("world", "half", "pair")):
            same(tensors[name], sum(integers(200_000, seed=r + 10 * i) for r in members[name]), name)
        return bits(tensors["world"])


@use()
def two_groups_from_two_threads(backend: str) -> object:
    """Two threads of a process each use a group of their own."""
    with world(backend) as (rank, size):
        groups = [dist.new_group(), dist.new_group()]
        failures: list[BaseException] = []

        def work(index: int) -> None:
            try:
                for turn in range(50):
                    tensor = integers(1000 + 37 * turn, seed=1000 * index + 10 * turn + rank)
                    dist.all_reduce(tensor, group=groups[index])
                    expected = sum(integers(1000 + 37 * turn, seed=1000 * index + 10 * turn + r) for r in range(size))
                    same(tensor, expected, f"thread {index}, turn {turn}")
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return None


@use()
def gloo_inside(backend: str) -> object:
    """A gloo group beside the backend's own, as FSDP and checkpointing code makes for objects."""
    with world(backend) as (_, size):
        group = dist.new_group(backend="gloo")
        assert dist.get_backend(group) == "gloo"
        tensor, other = torch.ones(100), torch.full((100,), 2.0)
        dist.all_reduce(tensor, group=group)
        dist.all_reduce(other)
        same(tensor, float(size))
        same(other, 2.0 * size)
        return bits(tensor, other)


@use()
def inside_gloo(backend: str) -> object:
    """The backend's group inside a world of gloo."""
    know(backend)
    with world("gloo") as (_, size):
        group = dist.new_group(backend=backend)
        assert dist.get_backend(group) == backend
        tensor, other = torch.ones(100), torch.full((100,), 2.0)
        dist.all_reduce(tensor, group=group)
        dist.all_reduce(other)
        same(tensor, float(size))
        same(other, 2.0 * size)
        return bits(tensor, other)


@use(ranks=4, since=(2, 15))
def split_group(backend: str) -> object:
    """split_group cuts the world in two halves."""
    with world(backend) as (rank, _):
        half = dist.split_group(split_ranks=[[0, 1], [2, 3]])
        tensor = integers(1000, seed=rank)
        dist.all_reduce(tensor, group=half)
        mates = [0, 1] if rank < 2 else [2, 3]
        same(tensor, sum(integers(1000, seed=r) for r in mates))
        assert dist.get_world_size(half) == 2
        return None


@use(ranks=3, since=(2, 15))
def split_group_without_a_rank(backend: str) -> object:
    """A rank that is in no part of a split is told so, as every rank outside of a new group is."""
    with world(backend) as (rank, _):
        part = dist.split_group(split_ranks=[[0, 2]])
        if rank == 1:
            assert part is dist.GroupMember.NON_GROUP_MEMBER
        else:
            tensor = torch.full((100,), float(rank))
            dist.all_reduce(tensor, group=part)
            same(tensor, 2.0)
        dist.barrier()
        return None


@use()
def mesh_of_one_dimension(backend: str) -> object:
    """DeviceMesh over all ranks."""
    with world(backend) as (rank, size):
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("data",))
        tensor = integers(100, seed=rank)
        dist.all_reduce(tensor, group=mesh.get_group("data"))
        same(tensor, sum(integers(100, seed=r) for r in range(size)))
        assert mesh.get_local_rank() == rank
        return bits(tensor)


@use(ranks=4)
def mesh_of_two_dimensions(backend: str) -> object:
    """DeviceMesh 2 x 2: rows, columns, a flattened mesh."""
    with world(backend) as (rank, size):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        row, column = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
        along_row, along_column = integers(100, seed=rank), integers(100, seed=rank)
        dist.all_reduce(along_row, group=mesh.get_group("shard"))
        dist.all_reduce(along_column, group=mesh["replicate"].get_group())
        same(along_row, sum(integers(100, seed=r) for r in row))
        same(along_column, sum(integers(100, seed=r) for r in column))
        flat = mesh["replicate", "shard"]._flatten("all")
        everywhere = integers(100, seed=rank)
        dist.all_reduce(everywhere, group=flat.get_group())
        same(everywhere, sum(integers(100, seed=r) for r in range(size)))
        return bits(everywhere)


@use()
def mixed_backends(backend: str) -> object:
    """ "cpu:...,cuda:..." gives each device its backend; the CPU side works where there is no GPU."""
    with world(f"cpu:{backend},cuda:gloo") as (rank, size):
        tensor = integers(1000, seed=rank)
        dist.all_reduce(tensor)
        same(tensor, sum(integers(1000, seed=r) for r in range(size)))
        dist.barrier()
        return bits(tensor)


@use()
def uneven_lifetimes(backend: str) -> object:
    """A group made late joins ranks that have long been talking."""
    with world(backend) as (_, size):
        total = torch.ones(10)
        for i in range(20):
            dist.all_reduce(total)
            total /= size
            if i == 10:
                late = dist.new_group(timeout=TIMEOUT)
        dist.all_reduce(total, group=late)
        same(total, float(size))
        return bits(total)
