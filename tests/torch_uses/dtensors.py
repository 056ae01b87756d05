"""DTensor: distribution, redistribution, arithmetic, tensor parallel layers."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from torch_uses import bits, close, integers, noise, same, use, world


@use(ranks=4)
def distribute(backend: str) -> object:
    """distribute_tensor hands out rank 0's tensor, in shards (also uneven ones) and in copies."""
    with world(backend) as (rank, size):
        mesh = init_device_mesh("cpu", (size,))
        for rows in (8, 7, 3):
            whole = integers(rows, 6, seed=5) if rank == 0 else torch.zeros(rows, 6)
            sharded = distribute_tensor(whole, mesh, [Shard(0)])
            expected = integers(rows, 6, seed=5).chunk(size)
            same(sharded.to_local(), expected[rank] if rank < len(expected) else torch.empty(0, 6), f"{rows} rows")
            same(sharded.full_tensor(), integers(rows, 6, seed=5), f"{rows} rows")
            same(distribute_tensor(whole, mesh, [Replicate()]).to_local(), integers(rows, 6, seed=5))
        return None


@use(ranks=4)
def redistribute(backend: str) -> object:
    """Every move between Shard(0), Shard(1), Replicate and Partial."""
    with world(backend) as (rank, size):
        mesh = init_device_mesh("cpu", (size,))
        whole = integers(8, 12, seed=9)
        for rows, columns in ((8, 12), (5, 7)):
            whole = integers(rows, columns, seed=9)
            for start in (Shard(0), Shard(1), Replicate()):
                for end in (Shard(0), Shard(1), Replicate()):
                    moved = distribute_tensor(whole, mesh, [start]).redistribute(mesh, [end])
                    what = f"{rows} x {columns}: {start} to {end}"
                    assert moved.placements == (end,), what
                    expected = whole if end == Replicate() else _shard(whole, end.dim, rank, size)
                    same(moved.to_local(), expected, what)
        for end in (Shard(0), Shard(1), Replicate()):
            parts = [integers(8, 12, seed=20 + r) for r in range(size)]
            summed = DTensor.from_local(parts[rank], mesh, [Partial()]).redistribute(mesh, [end])
            expected = sum(parts) if end == Replicate() else _shard(sum(parts), end.dim, rank, size)
            same(summed.to_local(), expected, f"Partial to {end}")
        return None


@use(ranks=4)
def redistribute_on_two_dimensions(backend: str) -> object:
    """A 2 x 2 mesh: shards along both dimensions, moved and gathered."""
    with world(backend) as (rank, _):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
        whole = integers(8, 8, seed=4)
        tile = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
        same(tile.to_local(), whole[rank // 2 * 4 : rank // 2 * 4 + 4, rank % 2 * 4 : rank % 2 * 4 + 4].contiguous())
        same(tile.redistribute(mesh, [Replicate(), Shard(0)]).to_local(), whole[rank % 2 * 4 : rank % 2 * 4 + 4])
        same(tile.full_tensor(), whole)
        return bits(tile.full_tensor())


@use()
def arithmetic(backend: str) -> object:
    """Products and sums of DTensors give what plain tensors give, whatever the placements."""
    with world(backend) as (_, size):
        mesh = init_device_mesh("cpu", (size,))
        a, b = integers(8, 6, seed=1), integers(6, 4, seed=2)
        for place_a in (Shard(0), Shard(1), Replicate()):
            for place_b in (Shard(0), Shard(1), Replicate()):
                product = distribute_tensor(a, mesh, [place_a]) @ distribute_tensor(b, mesh, [place_b])
                same(product.full_tensor(), a @ b, f"{place_a} @ {place_b}")
        same(distribute_tensor(a, mesh, [Shard(1)]).sum().full_tensor(), a.sum())
        close(distribute_tensor(a, mesh, [Shard(0)]).norm().full_tensor(), a.norm())
        return None


@use()
def tensor_parallel(backend: str) -> object:
    """A column-wise and a row-wise layer: output and gradients equal those of the whole layers."""
    with world(backend) as (_, size):
        mesh = init_device_mesh("cpu", (size,))
        alone, parallel = _block(), _block()
        parallelize_module(parallel, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        x_BF = noise(6, 16, seed=3)
        got, expected = parallel(x_BF), alone(x_BF)
        close(got, expected)
        got.square().sum().backward()
        expected.square().sum().backward()
        for (name, parameter), reference in zip(parallel.named_parameters(), alone.parameters(), strict=True):
            close(parameter.grad.full_tensor(), reference.grad, atol=1e-4, what=name)
        return bits(got)


@use()
def sequence_parallel(backend: str) -> object:
    """Activations sharded along the sequence around tensor-parallel layers: all-gather in, reduce-scatter out."""
    with world(backend) as (rank, size):
        mesh = init_device_mesh("cpu", (size,))
        alone, parallel = _block(norm=True), _block(norm=True)
        plan = {
            "norm": SequenceParallel(sequence_dim=0),
            "up": ColwiseParallel(input_layouts=Shard(0)),
            "down": RowwiseParallel(output_layouts=Shard(0)),
        }
        parallelize_module(parallel, mesh, plan)
        x_SF = noise(8, 16, seed=3)
        local = distribute_tensor(x_SF, mesh, [Shard(0)])
        got, expected = parallel(local), alone(x_SF)
        close(got, expected.chunk(size)[rank])
        return None


class _Block(torch.nn.Module):
    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(16) if norm else torch.nn.Identity()
        self.up = torch.nn.Linear(16, 32)
        self.down = torch.nn.Linear(32, 16)

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.relu(self.up(self.norm(x_BF))))


def _block(norm: bool = False) -> _Block:
    with torch.random.fork_rng():
        torch.manual_seed(11)
        return _Block(norm)


def _shard(whole: torch.Tensor, dim: int, rank: int, size: int) -> torch.Tensor:
    chunks = whole.chunk(size, dim)
    if rank < len(chunks):
        return chunks[rank].contiguous()
    shape = list(whole.shape)
    shape[dim] = 0
    return torch.empty(shape)
