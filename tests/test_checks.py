"""Proves that PENSTOCK_CHECK names what it looks for: the parameter that differs and on which rank, and the rank that is slow.

The decisions are pure functions, tested by themselves on tables of numbers; real ranks then show that the numbers
reach them.
"""

from __future__ import annotations

import logging
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ranks
from penstock.errors import Diverged, Mismatch
from penstock.runtime import process
from penstock.torch import GradientReducer, check_alike, ddp_hook
from penstock.training.checks import NONE, WINDOW, Pass, first_difference, straggler

# ------------------------------------------------------------------------------------------------------------- mismatch


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("hooked", ["ddp", "plain", "call"])
def test_a_flipped_bit(hooked: str, count: int, tmp_path: Path) -> None:
    """A bit of a parameter flips on rank 1 in step 3: all ranks raise before the update, name parameter, rank and step, and
    write their flight records."""
    env = {"PENSTOCK_CHECK": "" if hooked == "call" else "mismatch,nan", "PENSTOCK_FLIGHT_RECORDER": str(tmp_path)}
    for text in ranks.run(_flip_a_bit, count=count, args=(hooked,), env=env):
        name = "module.2.weight" if hooked == "ddp" else "2.weight"
        assert f"the parameter {name} is not alike on all ranks: " in text
        if count == 3:
            assert "rank 1 holds other bits than ranks 0, 2" in text, text
        else:
            assert "rank 0 and rank 1 hold different bits, and no side is the larger" in text, text
        assert ("(check_alike)" if hooked == "call" else "in step 3 (PENSTOCK_CHECK=mismatch)") in text, text
    assert {path.name for path in tmp_path.iterdir()} == {f"rank-{rank}.json" for rank in range(count)}


def test_gradients_are_compared() -> None:
    """A reduced gradient that one rank changes is found too, by check_alike; one that a rank lacks is left out."""
    ranks.run(_change_a_gradient, count=2)


def test_first_difference() -> None:
    """Parameters come before gradients, the model's order decides, and the smaller side is the odd one."""
    names = ["a", "b", "c"]
    alike = [[1, 2], [3, 4], [5, NONE]]
    assert first_difference([alike, alike], names) is None
    assert first_difference([alike], names) is None
    # Gradients of a differ, and the parameter c: that is named.
    told = first_difference([alike, [[1, 9], [3, 4], [8, NONE]], alike], names)
    assert told == "the parameter c is not alike on all ranks: rank 1 holds other bits than ranks 0, 2"
    told = first_difference([[[1, 9], [3, 0], [5, 6]], alike, alike, [[1, 7], [3, 4], [5, 6]]], names)
    assert told is not None
    assert told.startswith(
        "the reduced gradient of a is not alike on all ranks: ranks 0, 3 hold other bits than ranks 1, 2"
    )
    assert told.endswith(", and 1 more of 3 differ")
    # Where one rank has no gradient, nothing is compared.
    assert first_difference([alike, [[1, NONE], [3, 4], [5, 6]]], names) is None
    told = first_difference([[[1, 2]], [[7, 2]], [[1, 2]], [[7, 2]]], ["a"])
    assert told is not None and "ranks 0, 2 and ranks 1, 3 hold different bits, and no side is the larger" in told


# ---------------------------------------------------------------------------------------------- where nobody is looking


@pytest.mark.parametrize("ended", ["destroyed", "exit", "many"])
def test_checks_that_nothing_makes_are_told(ended: str) -> None:
    """Plain DDP under PENSTOCK_CHECK and PENSTOCK_TUNE: one warning on one rank says that they do nothing, and what to do: at
    the end of the group or of the script, or during a long training."""
    env = {"PENSTOCK_CHECK": "slow,nan", "PENSTOCK_TUNE": "1"}
    told = _warnings_of_plain_ddp(ended, env)
    assert [len(lines) for lines in told] == [1, 0], told
    assert "PENSTOCK_CHECK=nan,slow and PENSTOCK_TUNE=1: no effect" in told[0][0]
    assert "Call penstock.torch.ddp_hook(model) on a DDP model" in told[0][0]


@pytest.mark.parametrize(
    ("ended", "env"),
    [
        pytest.param("destroyed", {"PENSTOCK_CHECK": "", "PENSTOCK_TUNE": "0"}, id="nothing is asked for"),
        pytest.param("hooked", {"PENSTOCK_CHECK": "nan"}, id="a hook checks it"),
        pytest.param("untrained", {"PENSTOCK_CHECK": "nan", "PENSTOCK_TUNE": "1"}, id="nothing is reduced"),
    ],
)
def test_checks_that_are_made_are_not_told(ended: str, env: dict[str, str]) -> None:
    """No warning where the settings take effect, or nothing could."""
    assert _warnings_of_plain_ddp(ended, env) == [[], []]


def _warnings_of_plain_ddp(ended: str, env: dict[str, str]) -> list[list[str]]:
    with ranks.Ranks(_train_plainly, count=2, args=(ended,), env=env) as job:
        outcomes = job.outcomes(timeout_s=60)
    assert all(outcome.ok for outcome in outcomes), "\n".join(map(str, outcomes))
    return [[line for line in outcome.output.splitlines() if "no effect" in line] for outcome in outcomes]


# ----------------------------------------------------------------------------------------------------------------- slow


def test_a_slow_rank() -> None:
    """A rank that does much more work in its backward passes is named, with what it does; stats() says the same on all ranks."""
    told = ranks.run(_train_unevenly, count=3, args=("rank 1",), env={"PENSTOCK_CHECK": "slow"}, timeout_s=120)
    for stats, _ in told:
        slow = stats["slow"]
        assert slow["straggler"] == 1 and slow["kind"] == "computes longer", slow
        assert slow["ranks"][1]["last"] >= 15 and slow["ranks"][1]["waited_for_s"] > 0, slow
        assert slow["ranks"][1]["compute_s"] > 2 * slow["ranks"][0]["compute_s"], slow
        assert slow["ranks"][1]["cpu_s"] > 2 * slow["ranks"][0]["cpu_s"], slow
        assert slow["steps"] == WINDOW and stats["steps"] == 2 * WINDOW + 1
    # Twice in two windows, on one rank.
    assert [len(warnings) for _, warnings in told] == [2, 0, 0]
    assert told[0][1][0].startswith(f"PENSTOCK_CHECK=slow: in the last {WINDOW} steps rank 1 was last in "), told[0][1]


def test_a_rank_with_twice_the_work() -> None:
    """The thresholds in a real run: where all compute, and rank 1 twice as long, it is named."""
    for stats, _ in ranks.run(_train_unevenly, count=2, args=("twice",), env={"PENSTOCK_CHECK": "slow"}):
        slow = stats["slow"]
        assert (slow["straggler"], slow["kind"]) == (1, "computes longer"), slow
        assert slow["ranks"][0]["cpu_s"] > 0.8 * WORK_S and slow["ranks"][1]["cpu_s"] > 0.8 * 2 * WORK_S, slow


def test_ranks_with_the_same_work() -> None:
    """... and where all compute for as long, nobody is. Whom a machine that others use gives less of its processors is starved,
    and may be told so; that it has more to do, nobody is told."""
    busy = os.getloadavg()[0] > 0.5 * (os.cpu_count() or 1)
    for stats, warnings in ranks.run(_train_unevenly, count=2, args=("alike",), env={"PENSTOCK_CHECK": "slow"}):
        slow = stats["slow"]
        assert all(one["cpu_s"] > 0.8 * WORK_S for one in slow["ranks"]), slow
        assert slow["kind"] != "computes longer", slow
        assert busy or (slow["straggler"] is None and not warnings), slow


def test_nobody_is_slow() -> None:
    """Ranks that take turns at being last are not named, however long the others wait in a step."""
    for stats, warnings in ranks.run(_train_unevenly, count=3, args=("turns",), env={"PENSTOCK_CHECK": "slow"}):
        assert stats["slow"]["straggler"] is None and stats["slow"]["why"] is None, stats["slow"]
        assert not warnings
        assert stats["slow"]["steps"] == WINDOW


def test_reasons() -> None:
    """The evidence decides what is said: more processor time, a busy host, neither, or a link."""
    quick = Pass(0.020, 0.018, 0.012, 0.011, 0.4)
    for slow, kind in (
        (Pass(0.030, 0.028, 0.002, 0.001, 0.4), "computes longer"),
        (Pass(0.030, 0.018, 0.002, 0.001, 3.0), "starved of CPU"),
        (Pass(0.030, 0.018, 0.002, 0.001, 0.4), "waits"),
    ):
        for at in range(4):
            verdict = straggler([[slow if rank == at else quick for rank in range(4)]] * WINDOW)
            assert verdict is not None and (verdict.rank, verdict.kind) == (at, kind), verdict
            assert (
                f"rank {at} was last in {WINDOW} of {WINDOW}: it computes 30.0 ms a step, the others 20.0 ms"
                in verdict.why
            )
    # A rank that is last but keeps nobody waiting, or by little, or now and then, or in too few steps.
    late = Pass(0.030, 0.028, 0.012, 0.011, 0.4)
    assert straggler([[quick, late]] * WINDOW) is None
    assert straggler([[quick, Pass(0.022, 0.022, 0.010, 0.001, 0.4)]] * WINDOW) is None
    slow = Pass(0.030, 0.028, 0.002, 0.001, 0.4)
    often = [[quick, slow] if step % 3 else [slow, quick] for step in range(WINDOW)]
    assert straggler(often) is None
    assert straggler([[quick, slow]] * (WINDOW - 1)) is None
    assert straggler([[slow]] * WINDOW) is None


def test_slow_links() -> None:
    """Of a ring of four, whose pairs are fast but for those of rank 2, that one is named; of two ranks none, nor where
    the network hardly matters."""
    nan = float("nan")

    def step(exchange_s: float, rates: list[list[float]]) -> list[Pass]:
        return [Pass(0.010, 0.010, exchange_s, 0.001, 0.4, tuple(row)) for row in rates]

    ring = [
        [nan, 1.0e8, 0.0e8 + 4e5, 3e5],
        [2e5, nan, 1.1e7, 3e5],
        [3e5, 2e5, nan, 1.2e7],
        [1.0e8, 3e5, 2e5, nan],
    ]
    verdict = straggler([step(0.050, ring)] * WINDOW)
    assert verdict is not None and (verdict.rank, verdict.kind) == (2, "slow link"), verdict
    assert "deliver 12 MB/s at best, those of the others 100 MB/s" in verdict.why
    assert straggler([step(0.002, ring)] * WINDOW) is None
    assert straggler([step(0.050, [[nan, 1e8], [1e7, nan]])] * WINDOW) is None
    assert straggler([step(0.050, [[nan] * 4] * 4)] * WINDOW) is None


@pytest.mark.parametrize("seed", range(20))
def test_noise_names_nobody(seed: int) -> None:
    """Ranks that differ by less than noise does: a tenth, with an outlier of several steps' length now and then on any rank."""
    rng = random.Random(seed)
    history = []
    for _ in range(WINDOW):
        computed = [0.02 * rng.uniform(0.95, 1.1) * (5 if rng.random() < 0.05 else 1) for _ in range(4)]
        end = max(computed) + 0.004
        history.append([Pass(each, 0.9 * each, end - each, 0.9 * (end - each), 1.0) for each in computed])
    assert straggler(history) is None, f"seed {seed}"


# ------------------------------------------------------------------------------------------------------------ programs


def _train_plainly(ended: str) -> None:
    dist.init_process_group("penstock")
    model = DistributedDataParallel(nn.Linear(3, 1))
    if ended == "hooked":
        ddp_hook(model)
        dist.all_reduce(torch.ones(1))  # of a loss, say: plain ones beside a hook are nothing to speak of
    if ended != "untrained":
        model(torch.ones(1, 3)).sum().backward()
    if ended == "many":
        for _ in range(1000):
            dist.all_reduce(torch.ones(1))
        # Told by now, and not once more at the end.
        assert process.requests._is_over
    if ended != "exit":
        dist.destroy_process_group()


def _flip_a_bit(hooked: str) -> str:
    dist.init_process_group("penstock")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 30), nn.Tanh(), nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 1))
    model: nn.Module = net
    if hooked == "ddp":
        model = DistributedDataParallel(net)
        ddp_hook(model)
    elif hooked == "plain":
        GradientReducer(model)
    else:
        model = DistributedDataParallel(net)
    for step in (1, 2, 3):
        if step == 3 and dist.get_rank() == 1:
            net[2].weight.data.view(torch.int32)[7, 5] ^= 1  # the last bit of one number
        before = net[2].weight.detach().clone()
        try:
            model.zero_grad()
            model(torch.ones(1, 3) * (dist.get_rank() + 1)).sum().backward()
            if hooked == "call":
                check_alike(net)
        except Diverged as error:
            assert isinstance(error, Mismatch) and error.group_lives and step == 3
            assert net[2].weight.equal(before)
            # The group lives: rank 0's parameters mend it.
            for parameter in net.parameters():
                dist.broadcast(parameter.data, 0)
            check_alike(parameter.data for parameter in net.parameters())  # type: ignore[misc]
            dist.destroy_process_group()
            return str(error)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter -= 0.1 * parameter.grad
    raise AssertionError("it went through")


def _change_a_gradient() -> None:
    dist.init_process_group("penstock")
    model = nn.Linear(4, 4)
    GradientReducer(model)
    model(torch.ones(1, 4) * dist.get_rank()).sum().backward()
    check_alike(model)
    assert model.bias.grad is not None
    if dist.get_rank() == 1:
        model.bias.grad[2] += 1e-6
    with pytest.raises(Diverged, match="the reduced gradient of bias is not alike"):
        check_alike(model)
    if dist.get_rank() == 1:
        model.bias.grad = None
    check_alike(model)
    # The same values, laid out in another order, are alike.
    if dist.get_rank() == 1:
        model.weight.data = model.weight.data.t().contiguous().t()
    check_alike([model.weight])
    dist.destroy_process_group()


class _Work(torch.autograd.Function):
    """Passes on what it gets, and on the way back computes for as many seconds of processor time as it was told."""

    @staticmethod
    def forward(ctx: Any, data: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return data.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        until = time.thread_time() + ctx.seconds
        while time.thread_time() < until:
            pass
        return gradient, None


WORK_S = 0.02


def _train_unevenly(how: str) -> tuple[dict[str, Any], list[str]]:
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("penstock").addHandler(handler)
    dist.init_process_group("penstock")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = nn.Linear(10, 10)
    reducer = GradientReducer(model)
    for step in range(2 * WINDOW + 1):
        seconds = {
            "rank 1": 0.03 * (rank == 1),
            "turns": 0.03 * (rank == step % world),
            "twice": WORK_S * (1 + (rank == 1)),
            "alike": WORK_S,
        }[how]
        _Work.apply(model(torch.ones(1, 10)), seconds).sum().backward()
    stats = reducer.stats()
    dist.destroy_process_group()
    return stats, [warning for warning in warnings if "PENSTOCK_CHECK=slow" in warning]
