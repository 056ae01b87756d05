"""Fully sharded data parallel training, both generations, and clipping on sharded gradients.

The exact checks use models and inputs of small whole numbers, for which every sum, half and quarter is exact in f32, bf16 and
f16 alike: a wrong divisor or a wrong byte cannot hide behind a tolerance.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from torch_uses import (
    batch,
    bits,
    close,
    close_parameters,
    integers,
    perceptron,
    regression,
    same,
    trained_alone,
    use,
    world,
)


@use()
def training(backend: str) -> object:
    """FSDP2 in f32, three steps of Adam: equals one process on the joined batch."""
    with world(backend) as (rank, size):
        model = _shard(perceptron(), mesh=init_device_mesh("cpu", (size,)))
        return _train_and_compare(model, rank, size)


@use()
def training_without_mesh(backend: str) -> object:
    """FSDP2 makes its own mesh of the default group."""
    with world(backend) as (rank, size):
        return _train_and_compare(_shard(perceptron()), rank, size)


@use(ranks=4)
def hybrid_training(backend: str) -> object:
    """HSDP on a 2 x 2 mesh: sharded inside a row, replicated over rows."""
    with world(backend) as (rank, size):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        return _train_and_compare(_shard(perceptron(), mesh=mesh), rank, size)


@use(ranks=4)
def gradients_f32(backend: str) -> object:
    """The reduced gradient in f32 is exactly the mean."""
    return _exact_gradients(backend, torch.float32)


@use(ranks=4)
def gradients_bf16(backend: str) -> object:
    """The same with parameters and reduction in bf16 (ReduceOp.AVG on bf16)."""
    return _exact_gradients(backend, torch.bfloat16)


@use(ranks=4)
def gradients_f16(backend: str) -> object:
    """The same in f16, for which FSDP2 divides before and after a SUM."""
    return _exact_gradients(backend, torch.float16)


@use(ranks=4, without={"gloo": "it has no PREMUL_SUM"})
def gradients_with_a_divisor(backend: str) -> object:
    """A custom divide factor travels as PREMUL_SUM."""
    return _exact_gradients(backend, torch.float32, divisor=8.0)


@use(ranks=4)
def gradients_by_sum(backend: str) -> object:
    """set_force_sum_reduction_for_comms: SUM, and FSDP2 divides."""
    return _exact_gradients(backend, torch.float32, force_sum=True)


@use(ranks=4)
def gradients_hybrid_bf16(backend: str) -> object:
    """HSDP in bf16: reduce-scatter, then all-reduce, each with AVG."""
    return _exact_gradients(backend, torch.bfloat16, hybrid=True)


@use()
def uneven_shards(backend: str) -> object:
    """Parameters whose first dimension is not a multiple of the ranks are padded on the wire and come back whole."""
    with world(backend) as (rank, size):
        layer = torch.nn.Linear(5, 3)
        with torch.no_grad():
            layer.weight.copy_(integers(3, 5, seed=1))
            layer.bias.copy_(integers(3, seed=2))
        fully_shard(layer)
        inputs = [integers(4, 5, seed=r + 20) for r in range(size)]
        output = layer(inputs[rank])
        same(output.detach(), inputs[rank] @ integers(3, 5, seed=1).T + integers(3, seed=2))
        output.sum().backward()
        gradient = layer.weight.grad.full_tensor()
        same(gradient, (sum(one.sum(0) for one in inputs) / size).expand(3, 5).contiguous())
        return bits(gradient)


@use()
def clip_gradients(backend: str) -> object:
    """clip_grad_norm_ on sharded gradients computes the norm of the whole model's gradient."""
    with world(backend) as (rank, size):
        model = _shard(perceptron())
        regression(model, *batch(0, rank)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.01)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        alone = perceptron()
        for r in range(size):
            (regression(alone, *batch(0, r)) / size).backward()
        expected = torch.nn.utils.clip_grad_norm_(alone.parameters(), max_norm=0.01)
        close(norm, expected)
        for got, reference in zip(model.parameters(), alone.parameters(), strict=True):
            close(got.grad.full_tensor(), reference.grad)
        return bits(norm)


@use()
def first_generation(backend: str) -> object:
    """FSDP1 on the CPU, three steps, full state at the end."""
    with world(backend) as (rank, size):
        model = FullyShardedDataParallel(perceptron(), device_id=torch.device("cpu"), use_orig_params=True)
        stepper = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            stepper.zero_grad()
            regression(model, *batch(step, rank)).backward()
            stepper.step()
        with FullyShardedDataParallel.summon_full_params(model):
            whole = {name: parameter.detach().clone() for name, parameter in model.module.named_parameters()}
        close_parameters(whole, trained_alone(3, size))
        return bits(*whole.values())


def _shard(model: torch.nn.Sequential, **options: object) -> torch.nn.Module:
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, **options)
    return fully_shard(model, **options)


def _train_and_compare(model: torch.nn.Module, rank: int, size: int) -> str:
    stepper = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        stepper.zero_grad()
        regression(model, *batch(step, rank)).backward()
        stepper.step()
    whole = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    close_parameters(whole, trained_alone(3, size, lr=0.01, optimizer=torch.optim.AdamW), rtol=1e-3, atol=1e-4)
    return bits(*whole.values())


def _exact_gradients(
    backend: str,
    dtype: torch.dtype,
    *,
    divisor: float | None = None,
    force_sum: bool = False,
    hybrid: bool = False,
) -> str:
    with world(backend) as (rank, size):
        model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False))
        with torch.no_grad():
            for i, layer in enumerate(model):
                layer.weight.copy_(integers(8, 8, seed=60 + i, low=-1, high=1))
        weights = [layer.weight.detach().clone() for layer in model]
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
        mesh = init_device_mesh(
            "cpu", (2, 2) if hybrid else (size,), mesh_dim_names=("replicate", "shard") if hybrid else ("shard",)
        )
        _shard(model, mesh=mesh, mp_policy=policy)
        for module in (*model, model):
            if divisor is not None:
                module.set_gradient_divide_factor(divisor)
            if force_sum:
                module.set_force_sum_reduction_for_comms(True)
        inputs = [integers(2, 8, seed=r, low=-1, high=1) for r in range(size)]
        model(inputs[rank]).sum().backward()
        # The loss is the sum of all outputs, so the gradients are plain products of whole numbers.
        hidden = [one @ weights[0].T for one in inputs]
        expected = [
            sum(weights[1].sum(0).outer(one.sum(0)) for one in inputs) / (divisor or size),
            sum(torch.ones(8).outer(one.sum(0)) for one in hidden) / (divisor or size),
        ]
        gradients = [layer.weight.grad.full_tensor() for layer in model]
        for i in range(2):
            same(gradients[i], expected[i], f"layer {i}")
        assert dist.get_backend() == backend
        return bits(*gradients)
