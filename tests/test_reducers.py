"""Proves how reducers of gradients begin and end: with an error, they leave nothing behind."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ranks
from penstock.errors import Config as ConfigError
from penstock.errors import PeerLost
from penstock.torch import GradientReducer, backend


def test_a_constructor_that_raises_on_one_rank() -> None:
    """It closes the channels that it has opened: the reducer of the other rank fails at once, and not after the time-out."""
    waited_s = ranks.run(_raises_on_one, count=2)[1]
    assert waited_s < 20


def test_a_constructor_that_raises_again_and_again() -> None:
    """Its channels and hooks do not pile up."""
    ranks.run(_raises_often, count=2)


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
