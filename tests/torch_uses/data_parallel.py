"""DistributedDataParallel: plain, with hooks, with unused parameters and buffers, with uneven inputs."""

from __future__ import annotations

import contextlib
import threading

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from torch_uses import (
    batch,
    bits,
    close,
    close_parameters,
    integers,
    joined_batch,
    noise,
    perceptron,
    regression,
    same,
    trained_alone,
    use,
    world,
)


@use(ranks=4)
def plain(backend: str) -> object:
    """Three steps equal three steps of one process on the joined batch, and all ranks hold the same bits."""
    with world(backend) as (rank, size):
        model = _train(DistributedDataParallel(perceptron()), steps=3, rank=rank)
        close_parameters(dict(model.module.named_parameters()), trained_alone(3, size))
        return bits(*model.parameters())


@use()
def many_buckets(backend: str) -> object:
    """Buckets of one parameter each: many small all-reduces in flight in each backward pass."""
    with world(backend) as (rank, size):
        model = _train(DistributedDataParallel(perceptron(), bucket_cap_mb=0.0001), steps=3, rank=rank)
        close_parameters(dict(model.module.named_parameters()), trained_alone(3, size))
        return bits(*model.parameters())


@use()
def starts_from_rank_0(backend: str) -> object:
    """The constructor makes every rank start from rank 0's parameters and buffers."""
    with world(backend) as (rank, _):
        model = torch.nn.Sequential(perceptron(seed=rank), torch.nn.BatchNorm1d(4))
        model[1].running_mean.fill_(float(rank))
        wrapped = DistributedDataParallel(model)
        for got, expected in zip(wrapped.module[0].parameters(), perceptron(seed=0).parameters(), strict=True):
            same(got.detach(), expected.detach())
        same(wrapped.module[1].running_mean, 0.0)
        return bits(*wrapped.parameters(), *wrapped.buffers())


@use()
def gradients_as_views(backend: str) -> object:
    """gradient_as_bucket_view: the gradient is the communicated buffer itself."""
    with world(backend) as (rank, size):
        model = _train(DistributedDataParallel(perceptron(), gradient_as_bucket_view=True), steps=3, rank=rank)
        close_parameters(dict(model.module.named_parameters()), trained_alone(3, size))
        return bits(*model.parameters())


@use()
def gradients_accumulated(backend: str) -> object:
    """no_sync: two micro-batches, one communication; equals one process on all four micro-batches."""
    with world(backend) as (rank, size):
        model = DistributedDataParallel(perceptron())
        for micro in range(2):
            with model.no_sync() if micro == 0 else contextlib.nullcontext():
                (regression(model, *batch(micro, rank)) / 2).backward()
        alone = perceptron()
        for micro in range(2):
            (regression(alone, *joined_batch(micro, size)) / 2).backward()
        for got, expected in zip(model.module.parameters(), alone.parameters(), strict=True):
            close(got.grad, expected.grad)
        return bits(*(parameter.grad for parameter in model.parameters()))


@use()
def fp16_hook(backend: str) -> object:
    """The fp16 compression hook: gradients travel as f16."""
    with world(backend) as (rank, size):
        model = DistributedDataParallel(perceptron())
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        _train(model, steps=3, rank=rank)
        close_parameters(dict(model.module.named_parameters()), trained_alone(3, size), rtol=2e-3, atol=2e-3)
        return bits(*model.parameters())


@use()
def bf16_hook(backend: str) -> object:
    """The bf16 compression hook: gradients travel as bf16."""
    with world(backend) as (rank, size):
        model = DistributedDataParallel(perceptron())
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
        _train(model, steps=3, rank=rank)
        close_parameters(dict(model.module.named_parameters()), trained_alone(3, size), rtol=1e-2, atol=1e-2)
        return bits(*model.parameters())


@use()
def power_sgd_hook(backend: str) -> object:
    """PowerSGD: a chain of all-reduces through futures; with full rank it is nearly exact."""
    with world(backend) as (rank, size):
        model = DistributedDataParallel(perceptron())
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=16, start_powerSGD_iter=2, min_compression_rate=0.5
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        _train(model, steps=4, rank=rank)
        close_parameters(dict(model.module.named_parameters()), trained_alone(4, size), rtol=0.1, atol=0.02)
        return bits(*model.parameters())


@use()
def custom_hook_finished_in_a_thread(backend: str) -> object:
    """A hook whose future a background thread completes, after it has waited for the collective itself."""
    with world(backend) as (rank, size):
        model = DistributedDataParallel(perceptron(), bucket_cap_mb=0.001)
        threads: list[threading.Thread] = []

        def hook(_, bucket):  # torch inspects annotations of hooks, and does not understand postponed ones
            finished: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            buffer = bucket.buffer()
            work = dist.all_reduce(buffer, async_op=True)

            def finish() -> None:
                work.wait()
                finished.set_result(buffer.div_(size))

            threads.append(threading.Thread(target=finish))
            threads[-1].start()
            return finished

        model.register_comm_hook(None, hook)
        _train(model, steps=3, rank=rank)
        for thread in threads:
            thread.join()
        assert len(threads) >= 3
        close_parameters(dict(model.module.named_parameters()), trained_alone(3, size))
        return bits(*model.parameters())


@use()
def unused_parameters_and_batch_norm(backend: str) -> object:
    """find_unused_parameters, each rank another branch, with batch norm's buffers kept equal by broadcast."""
    with world(backend) as (rank, size):
        model = DistributedDataParallel(_Branches(), find_unused_parameters=True)
        inputs = [integers(4, 8, seed=r) for r in range(size)]
        model(inputs[rank], branch=rank % 2).sum().backward()
        # Only even ranks use branch 0: its gradient is the sum of theirs over all ranks.
        alone = [_Branches() for _ in range(size)]
        for r, one in enumerate(alone):
            one(inputs[r], branch=r % 2).sum().backward()
        for name, parameter in model.module.named_parameters():
            gradients = [dict(one.named_parameters())[name].grad for one in alone]
            expected = sum(gradient for gradient in gradients if gradient is not None) / size
            close(parameter.grad, expected, what=name)
        model.eval()(inputs[0], branch=0)
        model.train()(inputs[rank], branch=0)  # this forward starts with a broadcast of rank 0's buffers
        return bits(*(parameter.grad for parameter in model.parameters()))


@use()
def static_graph(backend: str) -> object:
    """static_graph, with activation checkpointing inside."""
    with world(backend) as (rank, size):
        model = DistributedDataParallel(_Checkpointed(), static_graph=True)
        stepper = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            stepper.zero_grad()
            regression(model, *batch(step, rank)).backward()
            stepper.step()
        close_parameters(dict(model.module.inner.named_parameters()), trained_alone(3, size))
        return bits(*model.parameters())


@use()
def uneven_inputs(backend: str) -> object:
    """join: ranks have 2 and 5 batches; those that are done shadow the others' collectives."""
    with world(backend) as (rank, size):
        model = DistributedDataParallel(perceptron())
        stepper = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = [2, 5]
        with model.join(divide_by_initial_world_size=False):
            for step in range(batches[rank]):
                stepper.zero_grad()
                regression(model, *batch(step, rank)).backward()
                stepper.step()
        alone = perceptron()
        stepper = torch.optim.SGD(alone.parameters(), lr=0.1)
        for step in range(max(batches)):
            stepper.zero_grad()
            present = [r for r in range(size) if step < batches[r]]
            for r in present:
                (regression(alone, *batch(step, r)) / len(present)).backward()
            stepper.step()
        close_parameters(dict(model.module.named_parameters()), alone)
        return bits(*model.parameters())


@use()
def low_precision_model(backend: str) -> object:
    """A bf16 model: buckets of bf16, summed exactly where the numbers allow it."""
    with world(backend) as (rank, size):
        model = torch.nn.Linear(8, 4).to(torch.bfloat16)
        with torch.no_grad():
            model.weight.copy_(integers(4, 8, seed=3))
            model.bias.zero_()
        model = DistributedDataParallel(model)
        inputs = [integers(4, 8, seed=r, dtype=torch.bfloat16) for r in range(size)]
        model(inputs[rank]).sum().backward()
        expected = (sum(one.sum(0) for one in inputs) / size).expand(4, 8)
        same(model.module.weight.grad, expected.contiguous())
        return bits(model.module.weight.grad)


def _train(model: torch.nn.Module, *, steps: int, rank: int) -> torch.nn.Module:
    stepper = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        stepper.zero_grad()
        regression(model, *batch(step, rank)).backward()
        stepper.step()
    return model


class _Branches(torch.nn.Module):
    """Two branches behind a batch norm; a forward pass uses one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(8)
        self.branches = torch.nn.ModuleList(torch.nn.Linear(8, 3) for _ in range(2))
        with torch.no_grad():
            for i, linear in enumerate(self.branches):
                linear.weight.copy_(integers(3, 8, seed=40 + i))
                linear.bias.zero_()

    def forward(self, x_BF: torch.Tensor, branch: int) -> torch.Tensor:
        return self.branches[branch](self.norm(x_BF))


class _Checkpointed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = perceptron()

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(self.inner, x_BF, use_reentrant=False)


@use()
def sparse_embeddings(backend: str) -> object:
    """DDP over EmbeddingBag(sparse=True): the same weights as one process that sees all ranks' batches."""
    with world(backend) as (rank, size):
        model = DistributedDataParallel(_bag())
        alone = _bag()
        for trained, ranks in ((model, [rank]), (alone, range(size))):
            stepper = torch.optim.SGD(trained.parameters(), lr=0.5)
            for step in range(3):
                stepper.zero_grad()
                words = torch.cat([_words(step, r) for r in ranks])
                (trained(words).square().sum() * (size if trained is model else 1) / size).backward()
                stepper.step()
        close_parameters(dict(model.module.named_parameters()), alone)
        return bits(*model.parameters())


def _bag() -> torch.nn.Module:
    bag = torch.nn.Sequential(torch.nn.EmbeddingBag(40, 8, sparse=True), torch.nn.Linear(8, 2))
    with torch.no_grad():
        for seed, parameter in enumerate(bag.parameters()):
            parameter.copy_(noise(*parameter.shape, seed=seed) / 8)
    return bag


def _words(step: int, rank: int) -> torch.Tensor:
    return torch.randint(40, (4, 5), generator=torch.Generator().manual_seed(10 * step + rank))
