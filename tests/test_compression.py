"""Proves that gradients which are sent in fewer bytes still train: error feedback for 16 bits, torch's PowerSGD, torch's 16-bit
hooks."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import penstock
import ranks
from backends import ALL
from penstock.errors import Config as ConfigError
from penstock.torch import GradientReducer, ddp_hook, in_turn

TCP = ALL["penstock-tcp"]
STEPS = (10, 100, 300)


@pytest.mark.parametrize("hooked", ["ddp", "plain"])
@pytest.mark.parametrize("count", [2, 3])
def test_error_feedback(count: int, hooked: str) -> None:
    """Gradients that float16 rounds to nothing: their running mean converges to the truth with feedback, and stays at nothing
    without; all ranks have the same bits in every step."""
    for feedback in (True, False):
        values = ranks.run(_tiny_gradients, count=count, args=(hooked, feedback))
        assert all(bits == values[0][1] for _, bits in values), "ranks hold other bits"
        errors = values[0][0]
        if feedback:
            # A rank keeps at most half of float16's smallest number, 2^-24; sums of these numbers are exact.
            truth = 1.1e-8 * (count + 1) / 2
            bounds = [1.01 * count * 2**-25 / truth / steps for steps in STEPS]
            assert all(error <= bound for error, bound in zip(errors, bounds, strict=True)), (errors, bounds)
            assert bounds[-1] < 0.02
        else:
            assert errors == [1.0] * len(errors), errors


def test_error_feedback_waits_while_gradients_go_as_they_are() -> None:
    """A tuner may send float16, then gradients as they are, then float16: what rounding has taken off is added to the next
    gradient that is rounded, and to none in between."""
    for rounded, plain, again in ranks.run(_feedback_waits, count=2, env=TCP.env):
        # Each rank sends half of 4e-8, which is nothing in float16; twice that is its smallest number.
        assert rounded == 0.0
        assert plain == pytest.approx([4e-8] * 3, rel=1e-6)
        assert again == 2 * 2**-24


def test_error_feedback_needs_a_wire_dtype() -> None:
    """Nothing is rounded without a wire dtype: asking for feedback then is an error that says so."""
    ranks.run(_feedback_alone, count=1)


@pytest.mark.parametrize(("count", "start"), [(2, "warm"), (2, "cold"), (2, "batched"), (4, "warm")])
def test_power_sgd(count: int, start: str) -> None:
    """torch's PowerSGD over several buckets: near the uncompressed loss with a seventh of the bytes, with and without warm start,
    with and without an epsilon (torch orthogonalises in two ways), and under torch's float16 wrapper; all ranks end alike."""
    values = ranks.run(_power_sgd, count=count, args=(start,), env=TCP.env, timeout_s=180)
    for value in values:
        assert value["weights"] == values[0]["weights"]
        began, plain, compressed = value["losses"]
        assert plain < 0.1 * began, "the model learns"
        assert compressed < plain + 0.02 * began, value["losses"]
        assert value["buckets"] > 1
        assert value["sent_bytes"][1] < value["sent_bytes"][0] / 7, value["sent_bytes"]


@pytest.mark.parametrize("hook", ["fp16_compress_hook", "bf16_compress_hook"])
def test_hooks_of_torch(hook: str) -> None:
    """torch's own 16-bit hooks train over several buckets, with half the bytes."""
    values = ranks.run(_sixteen_bits, count=2, args=(hook,), env=TCP.env, timeout_s=120)
    for value in values:
        assert value["weights"] == values[0]["weights"]
        began, plain, compressed = value["losses"]
        assert plain < 0.1 * began and compressed < plain + 0.02 * began, value["losses"]
        assert value["buckets"] > 1
        assert 0.45 < value["sent_bytes"][1] / value["sent_bytes"][0] < 0.55, value["sent_bytes"]


def test_the_examples_of_the_documentation(root: pathlib.Path) -> None:
    """The programs in docs/guide/compression.md run on 2 ranks."""
    programs = re.findall(r"```python\n(.*?)```", (root / "docs" / "guide" / "compression.md").read_text(), re.DOTALL)
    assert len(programs) == 2
    for program in programs:
        ranks.run(_example, count=2, args=(program,), timeout_s=120)


# ------------------------------------------------------------------------------------------------------------ programs


def _example(program: str) -> None:
    exec(compile(program, "docs/guide/compression.md", "exec"), {"__name__": "__main__"})
    assert not dist.is_initialized()


def _tiny_gradients(hooked: str, feedback: bool) -> tuple[list[float], list[float]]:
    """Relative errors of the running means after some numbers of steps, and what this rank got in the last ones."""
    dist.init_process_group("penstock")
    rank, world = dist.get_rank(), dist.get_world_size()
    net = nn.Linear(33, 5, bias=False)
    model: nn.Module = net
    if hooked == "ddp":
        model = DistributedDataParallel(net)
        ddp_hook(model, wire=torch.float16, error_feedback=feedback)
    else:
        GradientReducer(net, wire=torch.float16, error_feedback=feedback)
    # Half of float16's smallest number is 3e-8; what a rank sends is divided by the number of ranks.
    mine = 1.1e-8 * (rank + 1)
    truth = 1.1e-8 * sum(range(1, world + 1)) / world
    total = torch.zeros_like(net.weight, dtype=torch.float64)
    errors: list[float] = []
    bits: list[float] = []
    for step in range(1, STEPS[-1] + 1):
        model.zero_grad()
        model(torch.full((1, 33), mine)).sum().backward()
        assert net.weight.grad is not None
        total += net.weight.grad
        bits.append(float(net.weight.grad.double().sum()))
        if step in STEPS:
            errors.append(float((total / step - truth).abs().max()) / truth)
    dist.destroy_process_group()
    return errors, bits


def _feedback_waits() -> tuple[float, list[float], float]:
    dist.init_process_group("penstock")
    net = nn.Linear(33, 5, bias=False)
    reducer = GradientReducer(net, wire=torch.float16, error_feedback=True)

    def step() -> float:
        net.zero_grad()
        net(torch.full((1, 33), 4e-8)).sum().backward()
        assert net.weight.grad is not None
        return float(net.weight.grad[0, 0])

    half = reducer.setting
    rounded = step()
    reducer.apply(dataclasses.replace(half, compression="off"))
    plain = [step() for _ in range(3)]
    reducer.apply(half)
    again = step()
    dist.destroy_process_group()
    return rounded, plain, again


def _feedback_alone() -> None:
    dist.init_process_group("penstock")
    with pytest.raises(ConfigError, match="name a wire dtype too"):
        GradientReducer(nn.Linear(1, 1), error_feedback=True)
    dist.destroy_process_group()


def _power_sgd(start: str) -> dict[str, Any]:
    dist.init_process_group("penstock")
    state = powerSGD_hook.PowerSGDState(
        None,
        matrix_approximation_rank=4,
        start_powerSGD_iter=3,
        warm_start=start != "cold",
        orthogonalization_epsilon=1e-8 if start == "cold" else 0,
        batch_tensors_with_same_shape=start == "batched",
    )
    hook = powerSGD_hook.powerSGD_hook
    if start == "batched":
        hook = default_hooks.fp16_compress_wrapper(hook)
    value = _train_both_ways(state, in_turn(hook))
    assert state.compression_stats()[0] > 8
    dist.destroy_process_group()
    return value


def _sixteen_bits(hook: str) -> dict[str, Any]:
    dist.init_process_group("penstock")
    value = _train_both_ways(None, getattr(default_hooks, hook))
    dist.destroy_process_group()
    return value


def _train_both_ways(state: Any, hook: Any) -> dict[str, Any]:
    """Learn a function without the hook and with it, each for 120 steps: first and last losses, bytes that this rank sent, and
    a number for the weights."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(128, 32), nn.Tanh(), nn.Linear(32, 8))
    sent: list[int] = []
    losses: list[float] = []
    for compressed in (False, True):
        torch.manual_seed(1)
        width = 320
        model = DistributedDataParallel(
            nn.Sequential(nn.Linear(128, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 8)),
            bucket_cap_mb=0.2,
        )
        if compressed:
            model.register_comm_hook(state, hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with _counting(sent):
            for step in range(120):
                data = torch.randn(32, 128, generator=torch.Generator().manual_seed(1000 * step + rank))
                loss = nn.functional.mse_loss(model(data), teacher(data).detach())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if step == 0 and not compressed:
                    losses.append(_mean(loss))
        losses.append(_mean(nn.functional.mse_loss(model(data), teacher(data).detach())))
    buckets = model._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    weights = sum(float(parameter.detach().double().sum()) for parameter in model.parameters())
    return {"losses": losses, "sent_bytes": sent, "weights": weights, "buckets": len(str(buckets).split(","))}


@contextlib.contextmanager
def _counting(sent: list[int]) -> Iterator[None]:
    """Append the bytes of payload that this rank's streams have carried meanwhile."""

    def count() -> int:
        return sum(stream["sent_bytes"] for peer in penstock.stats()["peers"] for stream in peer["streams"])

    before = count()
    yield
    sent.append(count() - before)


def _mean(loss: torch.Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total, op=dist.ReduceOp.AVG)
    return float(total)
