"""Proves how reducers of gradients begin and end: an error leaves nothing behind, and two of them share no parameter."""

from __future__ import annotations

import gc
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ranks
from penstock.errors import Config as ConfigError
from penstock.errors import PeerLost
from penstock.torch import GradientReducer, backend, ddp_hook


def test_a_constructor_that_raises_on_one_rank() -> None:
    """It closes the channels that it has opened: the reducer of the other rank fails at once, and not after the time-out."""
    waited_s = ranks.run(_raises_on_one, count=2)[1]
    assert waited_s < 20


def test_a_constructor_that_raises_again_and_again() -> None:
    """Its channels and hooks do not pile up."""
    ranks.run(_raises_often, count=2)


def test_two_reducers_of_one_parameter() -> None:
    """Both would average the same memory at the same time, with wrong sums: the second is refused until the first is closed, or
    collected. So is a reducer beside DDP's own averages."""
    ranks.run(_two_reducers, count=2)


def _raises_on_one() -> float:
    dist.init_process_group("penstock", timeout=timedelta(seconds=40))
    model = nn.Linear(3, 3)
    rank = dist.get_rank()
    if rank == 0:
        with pytest.raises(ConfigError, match="float16 or bfloat16") as kept:
            GradientReducer(model, wire=torch.float64)
        assert not backend.of()._channels, kept  # which holds the frames of the constructor
        dist.distributed_c10d._get_default_store().wait(["failed"])
        return 0.0
    reducer = GradientReducer(model)
    began = time.monotonic()
    with pytest.raises(PeerLost, match="has closed channel 0/rounds"):
        model(torch.ones(2, 3)).sum().backward()
    waited_s = time.monotonic() - began
    dist.distributed_c10d._get_default_store().set("failed", "")
    reducer.close()
    return waited_s


def _raises_often() -> None:
    dist.init_process_group("penstock")
    model = nn.Linear(3, 3)
    errors = []
    for _ in range(600):
        with pytest.raises(ConfigError, match="float16 or bfloat16") as error:
            GradientReducer(model, wire=torch.float64)
        errors.append(error)
    GradientReducer(model)
    model(torch.full((1, 3), 1.0 + dist.get_rank())).sum().backward()
    assert model.weight.grad is not None and model.weight.grad.eq(1.5).all()
    dist.destroy_process_group()


def _two_reducers() -> None:
    dist.init_process_group("penstock")
    scale = 1.0 + dist.get_rank()
    weights = nn.ParameterList([torch.ones(1500, 1500) for _ in range(3)])
    first = GradientReducer(weights)
    with pytest.raises(ConfigError, match="is averaged by another reducer"):
        GradientReducer([weights[2]])
    first.close()
    GradientReducer(weights)
    for _ in range(5):
        weights.zero_grad()
        torch.stack([(scale * one).sum() for one in weights]).sum().backward()
        assert all(one.grad is not None and one.grad.eq(1.5).all() for one in weights)

    model = nn.Linear(3, 3)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    with pytest.raises(ConfigError, match="ddp_hook"):
        GradientReducer(wrapped)
    ddp_hook(wrapped)
    with pytest.raises(ConfigError, match="averaged by another reducer"):
        ddp_hook(wrapped)
    # Nobody refers to it any more, but Python's collector has not found it yet.
    circle = [wrapped]
    circle.append(circle)  # type: ignore[arg-type]
    gc.disable()
    del circle, wrapped
    wrapped = DistributedDataParallel(model)
    ddp_hook(wrapped)
    wrapped(torch.full((1, 3), scale)).sum().backward()
    assert model.weight.grad is not None and model.weight.grad.eq(1.5).all()
    dist.destroy_process_group()
