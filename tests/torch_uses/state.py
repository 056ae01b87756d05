"""Sharded optimizer state, checkpoints, and full state from rank 0."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._shard.sharded_tensor as sharded_tensor_api
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from torch_uses import (
    batch,
    bits,
    close_parameters,
    integers,
    perceptron,
    regression,
    same,
    shared_folder,
    trained_alone,
    use,
    world,
)


@use()
def zero_redundancy_optimizer(backend: str) -> object:
    """ZeroRedundancyOptimizer under DDP, three steps, then its state consolidated on rank 0."""
    with world(backend) as (rank, size):
        model = DistributedDataParallel(perceptron())
        stepper = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.01)
        for step in range(3):
            stepper.zero_grad()
            regression(model, *batch(step, rank)).backward()
            stepper.step()
        expected = trained_alone(3, size, lr=0.01, optimizer=torch.optim.AdamW)
        close_parameters(dict(model.module.named_parameters()), expected, rtol=1e-3, atol=1e-4)
        stepper.consolidate_state_dict(to=0)
        if rank == 0:
            state = stepper.state_dict()["state"]
            assert len(state) == len(list(model.parameters())), "the state of every parameter has come to rank 0"
        return bits(*model.parameters())


@use()
def checkpoint(backend: str) -> object:
    """dcp.save of a sharded model with its optimizer, dcp.load into a new one: training goes on with the same bits."""
    with world(backend) as (rank, _):
        model, stepper = _sharded()
        _steps(model, stepper, range(2), rank)
        state, optimizer_state = get_state_dict(model, stepper)
        dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=str(shared_folder()))
        _steps(model, stepper, range(2, 4), rank)

        other, other_stepper = _sharded(seed=99)
        state, optimizer_state = get_state_dict(other, other_stepper)
        dcp.load({"model": state, "optimizer": optimizer_state}, checkpoint_id=str(shared_folder()))
        set_state_dict(other, other_stepper, model_state_dict=state, optim_state_dict=optimizer_state)
        _steps(other, other_stepper, range(2, 4), rank)
        for got, expected in zip(other.parameters(), model.parameters(), strict=True):
            same(got.full_tensor(), expected.full_tensor())
        return bits(*(parameter.full_tensor() for parameter in other.parameters()))


@use(ranks=4)
def checkpoint_resharded(backend: str) -> object:
    """A checkpoint of row shards is loaded as column shards."""
    with world(backend) as (_, size):
        mesh = init_device_mesh("cpu", (size,))
        whole = integers(10, 12, seed=8)
        dcp.save({"w": distribute_tensor(whole, mesh, [Shard(0)])}, checkpoint_id=str(shared_folder()))
        loaded = {"w": distribute_tensor(torch.zeros(10, 12), mesh, [Shard(1)])}
        dcp.load(loaded, checkpoint_id=str(shared_folder()))
        same(loaded["w"].full_tensor(), whole)
        return bits(loaded["w"].full_tensor())


@use()
def checkpoint_async(backend: str) -> object:
    """dcp.async_save writes what the parameters were at the call, while training goes on in the same group."""
    with world(backend) as (rank, _):
        model, stepper = _sharded()
        _steps(model, stepper, range(1), rank)
        before = [parameter.full_tensor() for parameter in model.parameters()]
        writer = dist.new_group(
            backend=backend
        )  # torch asks for a group of its own: the writer's thread communicates too
        future = dcp.async_save(
            {"model": get_model_state_dict(model)}, checkpoint_id=str(shared_folder()), process_group=writer
        )
        _steps(model, stepper, range(1, 4), rank)
        future.result()
        other, _ = _sharded(seed=99)
        state = {"model": get_model_state_dict(other)}
        dcp.load(state, checkpoint_id=str(shared_folder()))
        set_model_state_dict(other, state["model"])
        for got, expected in zip(other.parameters(), before, strict=True):
            same(got.full_tensor(), expected)
        return bits(*before)


@use()
def full_state_from_rank_0(backend: str) -> object:
    """A whole state dict that only rank 0 has is broadcast into a sharded model, and gathered back."""
    with world(backend) as (rank, _):
        model, _ = _sharded(seed=99)
        whole = perceptron().state_dict() if rank == 0 else {}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, whole, options=options)
        for got, expected in zip(model.parameters(), perceptron().parameters(), strict=True):
            same(got.full_tensor().detach(), expected.detach())
        back = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            for name, expected in perceptron().state_dict().items():
                same(back[name], expected, name)
        return bits(*(parameter.full_tensor() for parameter in model.parameters()))


@use()
def sharded_tensor(backend: str) -> object:
    """ShardedTensor.gather puts the shards together where it is asked to, on the device that the group serves."""
    with world(backend) as (rank, size):
        spec = ChunkShardingSpec(dim=0, placements=[f"rank:{r}/cpu" for r in range(size)])
        whole = integers(10, 3, seed=4)
        tensor = sharded_tensor_api.zeros(spec, 10, 3)
        (shard,) = tensor.local_shards()
        (start, _), (rows, _) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
        shard.tensor.copy_(whole[start : start + rows])
        gathered = torch.zeros(10, 3) if rank == 0 else None
        tensor.gather(0, gathered)
        if gathered is not None:
            same(gathered, whole)
        return bits(whole)


def _sharded(seed: int = 7) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = fully_shard(perceptron(seed))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def _steps(model: torch.nn.Module, stepper: torch.optim.Optimizer, steps: range, rank: int) -> None:
    for step in steps:
        stepper.zero_grad()
        regression(model, *batch(step, rank)).backward()
        stepper.step()
