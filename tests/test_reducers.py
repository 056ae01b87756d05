"""Proves how reducers of gradients begin and end: an error leaves nothing behind, and two of them share no parameter."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map

import ranks
from penstock.errors import Config as ConfigError
from penstock.errors import NotFinite, PeerLost
from penstock.torch import GradientReducer, backend, ddp_hook
from penstock.torch.life import Life
from penstock.training.trained import Trained


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


def _fails_alone(way: str) -> None:
    dist.init_process_group("penstock")
    model = nn.Linear(4, 4)
    reducer = GradientReducer(model)
    is_odd = dist.get_rank() == 0
    if is_odd and way == "closed on one rank":
        reducer.close()
        model(torch.ones(1, 4)).sum().backward()
    else:
        value = float("nan") if is_odd and way == "not finite" else 1.0
        with pytest.raises(NotFinite if way == "not finite" else PeerLost, match="The group is still usable"):
            model(torch.full((1, 4), value)).sum().backward()
    everybody = torch.ones(1000)
    dist.all_reduce(everybody)
    assert (everybody == 2).all()
    reducer.close()
    model.zero_grad()
    again = GradientReducer(model)
    model(torch.full((1, 4), float(dist.get_rank()))).sum().backward()
    assert (model.weight.grad == 0.5).all()
    again.close()
    dist.destroy_process_group()


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
    # What the exception keeps averages nothing beside DDP.
    once = DistributedDataParallel(nn.Linear(1500, 1500))
    ddp_hook(once).close()
    with pytest.raises(RuntimeError, match="only be called once") as kept:
        ddp_hook(once)
    assert not once.module.weight._post_accumulate_grad_hooks, kept

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


@pytest.mark.parametrize("zeroes", [False, True])
def test_optimizers_that_step_in_hooks_before_the_reducers(zeroes: bool) -> None:
    """A hook that was there before the reducer steps by this rank's own gradient: an error, and no step. A step by averages, in
    the midst of another pass, is one."""
    ranks.run(_steps_in_hooks, count=2, args=(zeroes,))


def test_gradients_in_one_buffer() -> None:
    """Views of one buffer have one version, which changes with each gradient that is added: no hook has changed those before."""
    ranks.run(_in_one_buffer, count=2)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn], ids=str)
def test_dtypes_that_have_no_average(dtype: torch.dtype) -> None:
    """They are refused before anything is sent, with the parameter's name."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(3).to(dtype))
    with pytest.raises(ConfigError, match=r"weight is \w+, which cannot be averaged"):
        Trained(model, set(), with_sparse=True)


@pytest.mark.parametrize("way", ["not finite", "closed on one rank"])
def test_a_reducer_that_fails_alone(way: str) -> None:
    """A gradient that is not finite, or a rank that has closed its reducer, ends the reducer on all ranks. The group goes on, as
    the error says: the script reduces in it, and makes another reducer."""
    env = {"PENSTOCK_CHECK": "nan"} if way == "not finite" else {}
    ranks.run(_fails_alone, count=2, args=(way,), env=env)


def test_channels_that_are_closed_while_they_are_closed() -> None:
    """By Python's collector, which may find a reducer in the midst of the group's end: each is closed once, and the group is
    left."""
    life, left = Life(), []

    class Channel:
        compared = 0

        def __eq__(self, other: object) -> bool:
            Channel.compared += 1
            if Channel.compared == 2:
                life.close_channels([other])  # type: ignore[list-item]
            return self is other

        __hash__ = None  # type: ignore[assignment]

        def leave(self, *, leaves_group: bool = False) -> None:
            left.append(id(self))

    life._setup(SimpleNamespace(leave=lambda: left.append(0)), timedelta(seconds=1))  # type: ignore[arg-type]
    channels: Any = [Channel(), Channel()]
    for channel in channels:
        life.keep_channel(channel)
    life.close_channels(channels[1:])
    life.shutdown()
    assert left == [id(channels[1]), id(channels[0]), 0]


@pytest.mark.parametrize("kind", ["shrunk", "negated", "wrapper", "opaque"])
def test_gradients_without_plain_memory(kind: str) -> None:
    """A gradient whose storage ends before it, that is a lazy negative on one rank only, or that consists of other tensors: an
    error or the average, and nothing outside of tensors is read or written."""
    ranks.run(_no_plain_memory, count=2, args=(kind,))


def test_parameters_that_wrap_other_tensors() -> None:
    """Such as DTensors: refused before anything is sent. Their address is 0, and the process died."""
    ranks.run(_wrapped, count=2)


def _steps_in_hooks(zeroes: bool) -> None:
    dist.init_process_group("penstock")
    scale = 1.0 + dist.get_rank()
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], 0.5)

    def step(_: torch.Tensor) -> None:
        optimizer.step()
        if zeroes:
            optimizer.zero_grad()

    hook = weight.register_post_accumulate_grad_hook(step)
    reducer = GradientReducer([weight])
    with pytest.raises(ConfigError, match="an optimizer steps parameter 0 within the backward pass"):
        (scale * weight).sum().backward()
    assert weight.eq(1.0).all()
    with reducer.no_sync():
        (scale * weight).sum().backward()
    hook.remove()
    optimizer.zero_grad()

    other = nn.Parameter(torch.ones(1))

    def trains(_: torch.Tensor) -> None:
        weight.data.fill_(1.0)
        with torch.enable_grad():
            (scale * weight).sum().backward()
        optimizer.step()

    other.register_post_accumulate_grad_hook(trains)
    other.sum().backward()
    assert weight.eq(0.25).all()
    dist.destroy_process_group()


def _in_one_buffer() -> None:
    dist.init_process_group("penstock")
    scale = 1.0 + dist.get_rank()
    weights = [nn.Parameter(torch.ones(5)) for _ in range(3)]
    flat = torch.zeros(15)
    for weight, place in zip(weights, flat.split(5), strict=True):
        weight.grad = place
    reducer = GradientReducer(weights)
    optimizer = torch.optim.SGD(weights, 0.5)
    for step in range(3):
        optimizer.zero_grad(set_to_none=False)
        with reducer.no_sync() if step else contextlib.nullcontext():
            torch.stack([scale * weight.sum() for weight in weights]).sum().backward()
        if step == 1:
            torch.stack([scale * weight.sum() for weight in weights]).sum().backward()
        optimizer.step()  # averages what the last pass has left
        assert flat.eq([1.5, 3.0, 1.5][step]).all(), flat
    assert all(weight.eq(-2.0).all() for weight in weights)
    dist.destroy_process_group()


class _Opaque(torch.Tensor):
    """Has its values in another tensor, and does not say in which (``__tensor_flatten__``)."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> _Opaque:
        outer = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        outer.inner = inner
        return outer

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = tree_map(lambda one: one.inner if isinstance(one, _Opaque) else one, (args, kwargs or {}))
        return tree_map(lambda one: cls(one) if isinstance(one, torch.Tensor) else one, function(*plain[0], **plain[1]))


class _Replaced(torch.autograd.Function):
    """Has the gradient that it is given."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        ctx.make = make
        return weight.sum()

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        return ctx.make(), None


def _no_plain_memory(kind: str) -> None:
    dist.init_process_group("penstock")
    scale = 1.0 + dist.get_rank()
    weight = nn.Parameter(torch.zeros(4))
    GradientReducer([weight])

    def shrunk() -> torch.Tensor:
        whole = torch.full((8,), scale)
        half = whole[4:]
        whole.untyped_storage().resize_(16)
        return half

    def negated() -> torch.Tensor:
        plain = torch.full((4,), scale)
        return plain if scale == 1.0 else torch._neg_view(-plain)

    def wrapper() -> torch.Tensor:
        return TwoTensor(torch.full((4,), scale), torch.full((4,), scale))

    def opaque() -> torch.Tensor:
        return _Opaque(torch.full((4,), scale))

    make = {"shrunk": shrunk, "negated": negated, "wrapper": wrapper, "opaque": opaque}[kind]
    errors = {
        "shrunk": "has lost its memory",
        "wrapper": "is a TwoTensor, which has no memory of its own",
        "opaque": "is a _Opaque, which has no memory of its own",
    }
    error = errors.get(kind)
    with contextlib.nullcontext() if error is None else pytest.raises(ConfigError, match=error):
        _Replaced.apply(weight, make).backward()
    if error is None:
        assert weight.grad is not None and weight.grad.tolist() == [1.5] * 4


def _wrapped() -> None:
    dist.init_process_group("penstock")
    weight = nn.Parameter(DTensor.from_local(torch.ones(4), init_device_mesh("cpu", (2,)), [Replicate()]))
    for broadcast in (True, False):
        with pytest.raises(ConfigError, match="is a DTensor, which has no memory of its own"):
            GradientReducer([weight], broadcast=broadcast)
    with pytest.raises(ConfigError, match="all_reduce: the tensor is a DTensor"):
        backend.of().allreduce([weight.detach()], dist.AllreduceOptions())
    opaque = _Opaque(torch.ones(4))
    with pytest.raises(ConfigError, match="is a _Opaque, which has no memory of its own"):
        GradientReducer([nn.Parameter(opaque)])
    with pytest.raises(ConfigError, match="all_reduce: the tensor is a _Opaque"):
        backend.of().allreduce([opaque], dist.AllreduceOptions())
    dist.barrier()
    dist.destroy_process_group()
