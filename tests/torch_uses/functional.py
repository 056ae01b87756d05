"""Functional collectives, coalesced forms, the coalescing manager, and torch.compile."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from torch_uses import bits, integers, same, use, world


@use(ranks=4)
def collectives(backend: str) -> object:
    """all_reduce, all_gather, reduce_scatter, all_to_all, broadcast and permute as functions without side effects."""
    with world(backend) as (rank, size):
        group = dist.group.WORLD
        inputs = [integers(8, 4, seed=r) for r in range(size)]
        mine = inputs[rank].clone()
        same(funcol.wait_tensor(funcol.all_reduce(mine, "sum", group)), sum(inputs))
        same(funcol.wait_tensor(funcol.all_reduce(mine, "max", group)), torch.stack(inputs).amax(0))
        same(funcol.wait_tensor(funcol.all_gather_tensor(mine, 0, group)), torch.cat(inputs))
        same(funcol.wait_tensor(funcol.all_gather_tensor(mine, 1, group)), torch.cat(inputs, 1))
        same(
            funcol.wait_tensor(funcol.reduce_scatter_tensor(mine, "sum", 0, group)),
            sum(inputs)[2 * rank : 2 * rank + 2],
        )
        same(funcol.wait_tensor(funcol.broadcast(mine, 2, group)), inputs[2])
        splits_in = [[1, 3, 2, 2], [4, 0, 0, 4], [2, 2, 2, 2], [0, 1, 7, 0]]
        splits_out = [splits_in[r][rank] for r in range(size)]
        moved = funcol.all_to_all_single(mine, splits_out, splits_in[rank], group)
        same(funcol.wait_tensor(moved), torch.cat([inputs[r].split(splits_in[r])[rank] for r in range(size)]))
        same(mine, inputs[rank], "the input of a functional collective stays as it was")
        return None


@use(ranks=4)
def coalesced(backend: str) -> object:
    """Several tensors in one functional call."""
    with world(backend) as (rank, size):
        group = dist.group.WORLD
        shapes = [(8, 2), (4,), (16, 3)]
        inputs = [[integers(*shape, seed=10 * r + i) for i, shape in enumerate(shapes)] for r in range(size)]
        columns = list(zip(*inputs, strict=True))
        for got, column in zip(funcol.all_reduce_coalesced(inputs[rank], "sum", group), columns, strict=True):
            same(funcol.wait_tensor(got), sum(column))
        for got, column in zip(funcol.all_gather_into_tensor_coalesced(inputs[rank], group), columns, strict=True):
            same(funcol.wait_tensor(got), torch.cat(column))
        scattered = funcol.reduce_scatter_tensor_coalesced(inputs[rank], "sum", [0, 0, 0], group)
        for got, column in zip(scattered, columns, strict=True):
            same(funcol.wait_tensor(got), sum(column).chunk(size)[rank])
        return None


@use(ranks=4)
def coalescing_manager(backend: str) -> object:
    """_coalescing_manager joins all_reduce calls into one."""
    with world(backend):
        return _coalesced_all_reduces(None)


@use(ranks=4, without={"gloo": "it does not implement startCoalescing"})
def coalescing_manager_with_device(backend: str) -> object:
    """The same with a device, as FSDP calls it: torch brackets the calls by start_coalescing and end_coalescing."""
    with world(backend):
        return _coalesced_all_reduces(torch.device("cpu"))


def _coalesced_all_reduces(device: torch.device | None) -> str:
    rank, size = dist.get_rank(), dist.get_world_size()
    inputs = [[integers(100 + i, seed=10 * r + i) for i in range(5)] for r in range(size)]
    tensors = [tensor.clone() for tensor in inputs[rank]]
    with dist._coalescing_manager(device=device):
        for tensor in tensors:
            dist.all_reduce(tensor)
    for i, tensor in enumerate(tensors):
        same(tensor, sum(inputs[r][i] for r in range(size)), f"all_reduce {i}")
    return bits(*tensors)


@use(ranks=4)
def coalescing_manager_async(backend: str) -> object:
    """The same for all_gather_into_tensor, asynchronously."""
    with world(backend) as (rank, size):
        inputs = [[integers(100 + i, seed=10 * r + i) for i in range(5)] for r in range(size)]
        outputs = [torch.empty(size * (100 + i)) for i in range(5)]
        with dist._coalescing_manager(async_ops=True) as manager:
            for output, tensor in zip(outputs, inputs[rank], strict=True):
                dist.all_gather_into_tensor(output, tensor)
        manager.wait()
        for i, output in enumerate(outputs):
            same(output, torch.cat([inputs[r][i] for r in range(size)]), f"all_gather {i}")
        return bits(*outputs)


@use(ranks=4)
def coalescing_manager_reduce_scatter(backend: str) -> object:
    """The same for reduce_scatter_tensor."""
    with world(backend) as (rank, size):
        inputs = [[integers(size * (10 + i), seed=10 * r + i) for i in range(5)] for r in range(size)]
        outputs = [torch.empty(10 + i) for i in range(5)]
        with dist._coalescing_manager():
            for output, tensor in zip(outputs, inputs[rank], strict=True):
                dist.reduce_scatter_tensor(output, tensor)
        for i, output in enumerate(outputs):
            same(output, sum(inputs[r][i] for r in range(size)).chunk(size)[rank], f"reduce_scatter {i}")
        return None


@use()
def with_gradients(backend: str) -> object:
    """Collectives that autograd differentiates."""
    with world(backend) as (rank, size):
        x = integers(8, seed=rank).requires_grad_()
        gathered = funcol.all_gather_tensor_autograd(x, 0, dist.group.WORLD)
        weights = [integers(8 * size, seed=30 + r) for r in range(size)]
        (gathered * weights[rank]).sum().backward()
        same(x.grad, sum(weights)[8 * rank : 8 * rank + 8])
        return None


@use(timeout_s=120)
def compiled(backend: str) -> object:
    """torch.compile traces a functional all_reduce inside a function (backend aot_eager)."""
    with world(backend) as (rank, size):

        def program(x: torch.Tensor) -> torch.Tensor:
            return funcol.all_reduce(x * 2, "sum", dist.group.WORLD) + 1

        result = torch.compile(program, backend="aot_eager", fullgraph=True)(integers(100, seed=rank))
        same(result, sum(integers(100, seed=r) for r in range(size)) * 2 + 1)
        return bits(result)


@use(timeout_s=120)
def compiled_in_place(backend: str) -> object:
    """torch.compile rewrites the in-place dist.all_reduce into a functional one."""
    with world(backend) as (rank, size):

        def program(x: torch.Tensor) -> torch.Tensor:
            y = x * 3
            dist.all_reduce(y)
            return y - 1

        result = torch.compile(program, backend="aot_eager", fullgraph=True)(integers(100, seed=rank))
        same(result, sum(integers(100, seed=r) for r in range(size)) * 3 - 1)
        return bits(result)
