"""Training jobs whose weights are known beforehand, bit for bit, whoever takes part: on one rank of a program.

A parameter's gradient is what the loss multiplies it with. Those of the ranks differ, and every rank's counts, but their
average does not depend on how many ranks there are: all numbers are multiples of 12, and sums and thirds of them are exact.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from penstock import elastic
from penstock.torch import GradientReducer, ddp_hook
from penstock.training.elastic import membership

Spec = dict[str, Any]
At = Callable[..., None]


def train(spec: Spec, at: At) -> dict[str, torch.Tensor]:
    """Train in the default group; the weights at the end."""
    model = Model(spec)
    optimizer = _optimizer(model)
    with _front(spec, model, optimizer) as step:
        for number in range(1, spec["steps"] + 1):
            _step(spec, model, optimizer, step, number, at)
            at("phase", number, "committed")
    return model.state_dict()


def train_elastically(
    spec: Spec, at: At, store: Any, options: dict[str, Any], failed: Callable[[Exception], None]
) -> dict[str, torch.Tensor] | None:
    """The same as a job of `penstock.elastic`; None where the others have come to the end without this rank. ``failed`` is called
    with whatever ends a generation."""
    model = Model(spec)
    optimizer = _optimizer(model)
    state = elastic.State(model=model, optimizer=optimizer)

    def generation(state: elastic.State) -> bool:
        try:
            with _front(spec, model, optimizer) as step:
                while state.step < spec["steps"]:
                    number = state.step + 1
                    _step(spec, model, optimizer, step, number, at)
                    state.commit()
                    at("phase", number, "committed")
        except Exception as error:
            failed(error)
            raise
        return True

    with mock.patch.object(membership, "_ANSWER_S", _ANSWER_S):
        return model.state_dict() if elastic.run(generation, state, store=store, job="job", **options) else None


def expected(spec: Spec) -> dict[str, torch.Tensor]:
    """The weights at the end."""
    model = Model(spec)
    optimizer = _optimizer(model)
    for number in range(1, spec["steps"] + 1):
        for index, parameter in enumerate(model.weights):
            parameter.grad = _gradient(spec, number, index, rank=0, world=1)
        optimizer.step()
    return model.state_dict()


class Model(torch.nn.Module):
    """Vectors of whole numbers."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        kind = getattr(torch, spec["dtype"])
        self.weights = torch.nn.ParameterList(
            torch.nn.Parameter(torch.arange(count).remainder(17).to(kind)) for count in spec["counts"]
        )

    def forward(self, factors: list[torch.Tensor]) -> torch.Tensor:
        return sum((one * factor).sum() for one, factor in zip(self.weights, factors, strict=True))  # type: ignore[return-value]


def _gradient(spec: Spec, number: int, index: int, *, rank: int, world: int) -> torch.Tensor:
    generator = np.random.default_rng(zlib.crc32(f"{spec['key']} {number} {index}".encode()))
    count = spec["counts"][index]
    average, apart = 12 * generator.integers(-5, 6, count), 12 * generator.integers(1, 4, count)
    return torch.from_numpy(average + apart * (2 * rank - (world - 1))).to(getattr(torch, spec["dtype"]))


def _optimizer(model: Model) -> torch.optim.Optimizer:
    # Powers of two: every sum is exact.
    return torch.optim.SGD(model.parameters(), lr=2**-4, momentum=0.5)


def _step(
    spec: Spec, model: Model, optimizer: torch.optim.Optimizer, step: Callable[..., None], number: int, at: At
) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    factors = [_gradient(spec, number, index, rank=rank, world=world) for index in range(len(spec["counts"]))]
    at("phase", number, "forward")
    hooks = [
        one.register_hook(lambda gradient, index=index: at("phase", number, f"backward {index}"))
        for index, one in enumerate(model.weights)
    ]
    try:
        optimizer.zero_grad()
        step(factors)
    finally:
        for hook in hooks:
            hook.remove()
    at("phase", number, "between")
    optimizer.step()
    at("phase", number, "optimizer")


@contextlib.contextmanager
def _front(
    spec: Spec, model: Model, optimizer: torch.optim.Optimizer
) -> Iterator[Callable[[list[torch.Tensor]], None]]:
    """A forward and a backward pass, after which the optimizer steps by averages over the ranks: at once, or where steps overlap,
    when they have come."""
    with contextlib.ExitStack() as stack:
        called: Any = model
        if spec["front"].startswith("ddp"):
            # Every parameter in a bucket of its own, as far as torch allows.
            called = DistributedDataParallel(model, bucket_cap_mb=max(1e-3, spec["bucket_bytes"] / 2**20))
        if spec["front"] == "ddp hook":
            stack.callback(ddp_hook(called, bucket_bytes=spec["bucket_bytes"]).close)
        reducer = None
        if spec["front"] in ("reducer", "overlap"):
            overlaps = optimizer if spec["front"] == "overlap" else None
            reducer = GradientReducer(model, optimizer=overlaps, bucket_bytes=spec["bucket_bytes"])
            stack.callback(reducer.close)

        def step(factors: list[torch.Tensor]) -> None:
            called(factors).backward()
            if spec["front"] == "all_reduce":
                works = [dist.all_reduce(one.grad, op=dist.ReduceOp.AVG, async_op=True) for one in model.weights]
                for work in works:
                    work.wait()

        yield step
        if reducer is not None:
            reducer.wait()  # close() would log that the last step is not whole


# How long an elastic store may take to answer: longer than the others need to go on without a rank that is cut off.
_ANSWER_S = 8.0
