"""Proves that gradients which are reduced while the backward pass makes them end as the average over the ranks.

The oracle is arithmetic in this process's own passes: the average of what each rank's autograd gives, or DDP itself.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import gc
import io
import itertools
import logging
import math
import os
import pathlib
import random
import re
import signal
import time
import types
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import penstock
import ranks
from backends import ALL, Backend
from penstock import _core
from penstock.errors import Config as ConfigError
from penstock.errors import Mismatch, NotFinite, PenstockError
from penstock.torch import GradientReducer, backend, ddp_hook
from penstock.training.passes import BackwardPass
from penstock.training.slots import Slots
from raising import calls_back, half_way

MEDIA = [backend for backend in ALL.values() if backend.name == "penstock"]


@pytest.mark.parametrize("medium", MEDIA, ids=str)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_any_order(count: int, medium: Backend) -> None:
    """Branches that each rank walks in another order in every step, and leaves out at times: the same averages everywhere."""
    values = ranks.run(_any_order, count=count, env=medium.env, timeout_s=120)
    assert all(value == values[0] for value in values)


@pytest.mark.parametrize("wire", [torch.float16, torch.bfloat16], ids=str)
def test_half_the_bytes(wire: torch.dtype) -> None:
    """On the wire as float16 and bfloat16: the average is as near as the dtype is, and the same bits on all ranks."""
    values = ranks.run(_half, count=3, args=(wire,))
    assert all(value == values[0] for value in values)


@pytest.mark.parametrize("zeroed", [True, False], ids=["zeroed", "set to none"])
@pytest.mark.parametrize("views", [True, False], ids=["views", "copies"])
def test_ddp_hook(views: bool, zeroed: bool) -> None:
    """A DDP model with the hook learns what one without learns: unused parameters, no_sync, all ways to keep gradients."""
    values = ranks.run(_beside_ddp, count=2, args=(views, zeroed), timeout_s=120)
    assert all(value == values[0] for value in values)


@pytest.mark.parametrize("hooked", ["plain", "ddp"])
def test_hooks_wait_for_nobody(hooked: str) -> None:
    """While another rank has not begun its pass, the hooks of a rank run to the last one: a round is under way all along, and
    nothing is reduced. Then both get the averages."""
    ranks.run(_ahead, count=2, args=(hooked,))


@pytest.mark.parametrize("hooked", ["plain", "ddp", "views"])
def test_what_is_copied(hooked: str) -> None:
    """Large gradients are reduced where they lie, and so are small ones that are neighbours in DDP's buckets; others are copied
    into buckets."""
    large, small = {"plain": (4800, 10_800), "ddp": (4800, 10_800), "views": (4800, 0)}[hooked]
    for value in ranks.run(_copied, count=2, args=(hooked,)):
        assert value == [(2 * 1_440_000, large), (10_800 - small, small)]


def test_accumulation() -> None:
    """Passes under no_sync stay on the rank and are averaged with the next one outside."""
    ranks.run(_accumulate, count=2)


def test_passes_that_end_early_or_nest() -> None:
    """A pass that raises half-way on all ranks does not leave the next one without its averages; nested ones are averaged."""
    ranks.run(_early_and_nested, count=2)


@pytest.mark.parametrize("count", [2, 3])
def test_ranks_with_different_nested_passes(count: int) -> None:
    """Reentrant checkpoints that some ranks leave out in some steps, that nest, that share a layer, or outside of which there is
    no parameter: one step a pass, and in each the plain average of that step's gradients."""
    ranks.run(_nested, count=count)


def test_ddp_with_nested_passes_on_one_rank() -> None:
    """The hook under DDP: one rank checkpoints some blocks, or all, and the other none."""
    ranks.run(_nested_under_ddp, count=2)


def test_a_nested_pass_that_adds_to_a_gradient_in_flight() -> None:
    """A weight that is used in a checkpoint and behind it, whose gradient is being averaged when the checkpoint adds to it, is
    named."""
    ranks.run(_added_in_a_nested_pass, count=2)


def test_passes_that_raise() -> None:
    """Passes that raise on all ranks, or on one, before or after something was reduced: the next pass is right on all; a step
    that is lost on other ranks is an error there, which names the rank. What is dropped is reported once."""
    ranks.run(_raising, count=3, timeout_s=120)


@pytest.mark.parametrize("check", ["", "mismatch", "slow"])
@pytest.mark.parametrize("has_sparse", [False, True])
def test_passes_that_raise_behind_their_last_gradient(has_sparse: bool, check: str) -> None:
    """One rank's pass raises when nothing is missing but its end: all ranks drop the step, also where they would exchange sparse
    gradients or checks at the end of it, and hold the same weights in the end."""
    one, other = ranks.run(_raising_last, count=2, args=(has_sparse,), env={"PENSTOCK_CHECK": check})
    assert one == other and one[1] == 3


@pytest.mark.parametrize("when", ["waits", "delivers"])
def test_a_wait_that_is_interrupted(when: str) -> None:
    """A signal's handler raises at the end of rank 0's pass, before or after the other rank has its averages, and the script goes
    on: an error on both ranks in that pass or the next one. With another reducer both go on alike."""
    one, other = ranks.run(_interrupted, count=2, args=(when,))
    assert one == other


def test_a_pass_that_raises_with_two_reducers() -> None:
    """All ranks drop the step of both reducers and go on, if some gradient of each was agreed on. If only one reducer's were, the
    other one's step has gone too far to be withdrawn: it fails on all ranks, instead of mixing two passes."""
    ranks.run(_raising_with_two, count=2)


def test_passes_that_reach_no_parameter() -> None:
    """A rank whose pass reaches no parameter takes part with zeros when its optimizer steps, and gets what the others have."""
    ranks.run(_unreached, count=2)


def test_passes_that_reach_no_parameter_after_no_sync() -> None:
    """What passes under no_sync have left is averaged, also where this rank's pass outside reaches no parameter; a step under
    no_sync is the rank's own."""
    ranks.run(_unreached_after_no_sync, count=2)


@pytest.mark.parametrize("left", ["kept", "nothing", "nothing at first"])
def test_gradients_that_are_clipped_before_they_are_averaged(left: str) -> None:
    """Rank 1's pass outside no_sync reaches no parameter, so it would average in the optimizer's step, after it has clipped: an
    error that says what to do, in this step or the next, instead of weights that differ."""
    with ranks.Ranks(_clip_late, count=2, args=(left,)) as job:
        outcome = job.outcomes(timeout_s=60)[1]
    assert outcome.raised is not None and outcome.raised.is_a("penstock.errors.Config"), str(outcome)
    assert "GradientReducer.average()" in outcome.raised.text and "rank 1" in outcome.raised.text
    assert ("gradient of weight was changed" in outcome.raised.text) == (left == "kept")


def test_average_before_clipping() -> None:
    """After `average` all ranks clip the same, whatever their passes have reached."""
    ranks.run(_average_and_clip, count=2)


def test_average_without_an_optimizer() -> None:
    """A script that steps by itself, and sets gradients to zero in place: a rank whose pass reaches no parameter takes part in
    `average`."""
    ranks.run(_average_without_an_optimizer, count=2)


def test_a_step_that_calls_that_of_its_base() -> None:
    """It is one step, though torch calls hooks for both once the base was used by itself."""
    assert ranks.run(_nested_steps, count=2) == [3, 3]


class _Nested(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def _nested_steps() -> int:
    dist.init_process_group("penstock")
    model = nn.Linear(4, 4)
    torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer, reducer = _Nested(model.parameters(), lr=0.1), GradientReducer(model)
    for _ in range(3):
        model(torch.ones(4)).sum().backward()
        optimizer.step()
    dist.destroy_process_group()
    return int(reducer.stats()["steps"])


def test_closures_that_leave_gradients_unaveraged() -> None:
    """A step with a closure that makes no pass, or only such under no_sync, is refused if it would be taken by this rank's own
    gradients; one whose last pass is outside is averaged."""
    ranks.run(_closures, count=2)


def test_line_searches() -> None:
    """LBFGS with a line search would take steps of other lengths on ranks whose losses differ: refused on all ranks. With the
    average of the losses, or without a search, ranks stay alike."""
    ranks.run(_search_lines, count=2)


def test_a_line_search_of_one_rank() -> None:
    """A rank that fits something else by LBFGS with a line search, while a reducer is alive, waits for no other rank."""
    ranks.run(_search_alone, count=2)


def test_a_scaler_that_skips_steps() -> None:
    """All passes under no_sync, and one rank's are infinite: after `average` all ranks skip the step alike; without it the others
    get an error and do not wait for the rank that skips."""
    ranks.run(_scale, count=2)


def test_no_sync_after_an_average() -> None:
    """What a pass under no_sync adds to averages is averaged in the step, also where the averages' own step was left out."""
    ranks.run(_kept_after_an_average, count=2)


def test_models_that_change() -> None:
    """A gradient that is not what the reducer was made for is refused by its name, before its address is used; the model works
    again once it is as it was."""
    ranks.run(_changed, count=2)


def test_models_that_grow() -> None:
    """What is unfrozen, or added to the model, after the reducer was made is refused by its name before it is stepped by each
    rank's own gradients; a reducer of its own, or a new one for all, averages it."""
    ranks.run(_grown, count=2)


def test_hooks_that_change_gradients() -> None:
    """A hook that came before the reducer changes what is averaged. One that came after it changes what is being averaged, and is
    refused, also where it is an optimizer's step; the model works again without it."""
    ranks.run(_change_in_hooks, count=2)


def test_the_first_changed_gradient_is_found() -> None:
    """Of those that were handed over, by index: one changed in place, unless its version says nothing, or replaced, or gone."""
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(5)]
    for parameter in parameters:
        parameter.grad = torch.zeros(2)
    gradients = {index: parameters[index].grad for index in (2, 0, 3, 4)}
    versions = {index: -1 if index == 3 else one._version for index, one in gradients.items() if one is not None}

    def found() -> int | None:
        return _core.first_changed(parameters, gradients, versions)

    def grad(index: int) -> torch.Tensor:
        one = parameters[index].grad
        assert one is not None
        return one

    grad(1).add_(1)  # was not handed over
    grad(3).add_(1)  # shares its memory
    assert found() is None
    grad(4).add_(1)
    assert found() == 4
    parameters[3].grad = grad(3).clone()
    assert found() == 3
    parameters[2].grad = None
    assert found() == 2


def test_parameters_that_ddp_ignores() -> None:
    """The hook leaves the gradients to each rank that DDP was told to ignore, whatever their shapes."""
    ranks.run(_ignored, count=2)


@pytest.mark.parametrize("count", [1, 3])
def test_lazy_negatives(count: int) -> None:
    """A gradient whose memory holds the opposite of its values is copied, and what is handed over has the values."""
    submitted = []

    class Reducer:
        def submit(self, _: int, address: int, *__: Any, **___: Any) -> None:
            submitted.append(address)

    gradient = torch.complex(torch.ones(count), torch.arange(1.0, count + 1)).conj().imag
    assert gradient.is_neg()
    slots = Slots([torch.zeros(count)], ["weight"])
    found, address, _ = slots.submit(Reducer(), 0, gradient)  # type: ignore[arg-type]
    assert submitted == [address] == [found.data_ptr()] and address != gradient.data_ptr()
    assert not found.is_neg() and found.tolist() == [-1.0, -2.0, -3.0][:count]


def test_what_the_quick_hook_hands_over() -> None:
    """Gradients that are reduced where they lie, as Python's own hook notes them; everything else is left to that one."""
    ranks.run(_hand_over, count=1)


def test_gradients_on_a_device() -> None:
    """``model.cuda()`` after the reducer was made: refused before the engine hears of it (on a device that every machine has)."""
    slots = Slots([torch.zeros(3)], ["weight"])
    with pytest.raises(ConfigError, match=r"the gradient of weight has shape \(3,\) and dtype torch.float32 on meta"):
        slots.submit(None, 0, torch.zeros(3, device="meta"))  # type: ignore[arg-type]


def test_shared_weights() -> None:
    """A parameter that comes twice counts once; parameters over one memory have gradients of their own; gradients over one
    memory are refused by both names."""
    ranks.run(_shared, count=2)


def test_memory_formats() -> None:
    """Models in channels_last, with transposed and expanded tensors, begin with rank 0's values and get the averages; gradients
    of dense parameters are reduced where they lie. What cannot be sent is refused before anything is."""
    ranks.run(_formats, count=2)


def test_parameters_of_rank_0() -> None:
    """Ranks that begin with other parameters and buffers begin with those of rank 0, unless told not to."""
    ranks.run(_begin, count=2)


def test_models_come_and_go() -> None:
    """A closed reducer leaves the model and the groups alone; another may follow, and two may live side by side."""
    ranks.run(_come_and_go, count=2)


@pytest.mark.parametrize("has_sparse", [False, True])
def test_two_reducers_in_one_pass(has_sparse: bool) -> None:
    """Ranks reach two reducers in another order, or one rank only one of them: they get the averages of one reducer over both."""
    ranks.run(_two_in_one_pass, count=2, args=(has_sparse,))


@pytest.mark.parametrize("hooked", ["ddp_hook", "reducer"])
def test_nobody_closes_it(hooked: str) -> None:
    """A reducer lives with its model, whoever else keeps it. With the model it is collected, and leaves its groups; copies and
    files of the model have none."""
    ranks.run(_let_go, count=2, args=(hooked,))


def test_reducers_of_failed_groups() -> None:
    """Who makes one in a group that has failed gets the failure at once, on all ranks, and so does who waits for others."""
    for raised in ranks.run(_in_a_failed_group, count=3):
        assert len(raised) == 2
        for kind, text in raised:
            assert kind == "Closed" and "nobody needs it" in text, raised


def test_the_size_of_buckets() -> None:
    """What one all-reduce carries is as said, may change between steps, and changes no result."""
    ranks.run(_buckets, count=2)


def test_not_a_number() -> None:
    """With PENSTOCK_CHECK=nan, what is not finite fails the step on all ranks and is named: parameter, rank, step."""
    for text in ranks.run(_not_a_number, count=2, env={"PENSTOCK_CHECK": "nan"}):
        assert "the gradient of 2.weight on rank 1 holds NaN or infinity in step 3" in text, text


def test_other_models() -> None:
    """Ranks whose models differ are told so by the constructor, at once, with or without a broadcast; the group goes on."""
    for rank, texts in enumerate(ranks.run(_differ, count=2)):
        for what, text in texts.items():
            assert "different models" in text and f"On this rank, {rank}, it is" in text, (what, text)
        here = ["weight, float32[5, 3] trained", "weight, float32[4, 3] trained"][rank]
        assert here in texts["wider"] and "number 1 is another on rank(s) 1" in texts["wider"], texts
        assert ("missing" if rank else "bias, float32[5] trained") in texts["fewer"], texts


@pytest.mark.parametrize("hooked", ["plain", "parameters", "ddp"])
def test_as_many_elements_in_another_shape(hooked: str) -> None:
    """A layer of 2 x 6 on one rank and of 3 x 4 on the other, without a bias: a mismatch at once, on both ranks."""
    for text in ranks.run(_reshaped, count=2, args=(hooked,)):
        assert "different models" in text, text


def test_same_shapes_in_another_order() -> None:
    """Two layers of one shape, swapped on a rank: sums of things that do not belong together are refused."""
    values = ranks.run(_swapped, count=2)
    assert all("different gradients" in value for value in values), values


def test_the_example_of_the_documentation(root: pathlib.Path) -> None:
    """The script without DDP in docs/guide/gradients.md runs on 2 ranks; both end with the same weights, which were trained."""
    block = re.search(
        r"```python\n(import torch\n.*?)```", (root / "docs" / "guide" / "gradients.md").read_text(), re.DOTALL
    )
    assert block is not None
    first, second = ranks.run(_example, count=2, args=(block[1],), timeout_s=120)
    assert first == second


def test_what_ddp_cannot_do_with_the_hook() -> None:
    """static_graph and join are refused instead of waiting for ever; no_sync is DDP's; after close DDP reduces its buckets."""
    ranks.run(_beyond_the_hook, count=2)


def test_refusals() -> None:
    """What cannot be done is refused when it is asked for, with what to do."""
    with pytest.raises(ConfigError, match="there is no process group"):
        GradientReducer(nn.Linear(1, 1))
    ranks.run(_refused, count=2)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("hooked", ["ddp", "plain"])
def test_a_rank_that_goes_away(hooked: str, how: signal.Signals) -> None:
    """A rank that dies or stops in the middle of training: ``backward`` raises on the others within 5 s, and names it."""
    with ranks.Ranks(_train_for_ever, count=3, args=(hooked,)) as job:
        job.await_note("running", deadline_s=60)
        since_s = job.signal(1, how)
        outcomes = job.outcomes(timeout_s=20, of=[0, 2])
    for outcome in outcomes:
        assert outcome.raised is not None and "rank 1" in outcome.raised.text, str(outcome)
        assert outcome.ended_s - since_s < 5, str(outcome)


# ------------------------------------------------------------------------------------------------------------ programs


class Branches(nn.Module):
    """Layers that a pass uses in any order, or not at all."""

    def __init__(self, count: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        sizes = random.Random(seed).choices([1, 3, 20, 150], k=count)
        self.layers = nn.ModuleList([nn.Linear(7, size) for size in sizes])

    def forward(self, data: torch.Tensor, order: list[int]) -> torch.Tensor:
        # One after the other in the graph, so that autograd walks them in that order, backwards.
        total = data.new_zeros(())
        for at in order:
            total = (total + self.layers[at](data + 0 * total).square().mean()).clone()
        return total


def _any_order() -> list[float]:
    dist.init_process_group("penstock")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = Branches(30, seed=5)
    reducer = GradientReducer(model, bucket_bytes=2048)
    sums = []
    for step in range(6):
        orders = []
        for other in range(world):
            rng = random.Random(100 * step + other)
            orders.append([at for at in rng.sample(range(30), 30) if rng.random() < 0.7])
        data = [
            torch.randn(4, 7, generator=torch.Generator().manual_seed(100 * step + other)) for other in range(world)
        ]
        want: dict[str, torch.Tensor] = {}
        for other in range(world):
            copy = Branches(30, seed=5)
            copy(data[other], orders[other]).backward()
            for name, parameter in copy.named_parameters():
                if parameter.grad is not None:
                    want[name] = want.get(name, torch.zeros_like(parameter)) + parameter.grad / world
        model.zero_grad()
        model(data[rank], orders[rank]).backward()
        for name, parameter in model.named_parameters():
            if name not in want:
                assert parameter.grad is None, f"step {step}: {name} was used by no rank"
                continue
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, want[name], msg=lambda text, name=name: f"{name}: {text}")
        used = sorted(name for name, parameter in model.named_parameters() if parameter.grad is not None)
        assert used == sorted(want)
        sums.append(sum(float(one.grad.double().sum()) for one in model.parameters() if one.grad is not None))
    counts = reducer.stats()
    assert counts["steps"] == 6 and counts["rounds"] >= 6 and counts["buckets"] > 6, counts
    dist.destroy_process_group()
    return sums


def _half(wire: torch.dtype) -> list[float]:
    dist.init_process_group("penstock")
    model = nn.Linear(300, 50)
    reducer = GradientReducer(model, wire=wire)
    data = torch.full((1, 300), 0.1 * (dist.get_rank() + 1))
    model(data).sum().backward()
    assert model.weight.grad is not None and model.bias.grad is not None
    torch.testing.assert_close(model.weight.grad, torch.full((50, 300), 0.2), rtol=2e-2, atol=0)
    assert not model.weight.grad.eq(torch.tensor(0.1).add(0.2).add(0.3).div(3)).all(), "it was not rounded"
    assert model.bias.grad.eq(1).all()
    assert reducer.stats()["in_place_bytes"] == 0
    dist.destroy_process_group()
    return [float(model.weight.grad[0, 0]), float(model.weight.grad[-1, -1])]


class Sometimes(nn.Module):
    """A perceptron with a layer that only some passes use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always = nn.Sequential(nn.Linear(20, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 1))
        self.sometimes = nn.Linear(20, 1)

    def forward(self, data: torch.Tensor, extra: bool) -> torch.Tensor:
        result = self.always(data).sum()
        return result + self.sometimes(data).sum() if extra else result


def _beside_ddp(views: bool, zeroed: bool) -> float:
    dist.init_process_group("penstock")
    rank = dist.get_rank()
    models = [
        DistributedDataParallel(Sometimes(), find_unused_parameters=True, gradient_as_bucket_view=views)
        for _ in range(2)
    ]
    reducer = ddp_hook(models[0], bucket_bytes=1 << 16)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
    for step in range(6):
        data = torch.randn(8, 20, generator=torch.Generator().manual_seed(10 * step + rank))
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad(set_to_none=not zeroed)
            if step == 4:
                with model.no_sync():
                    model(data, extra=False).backward()
            model(data, extra=step in (2, 3) and rank == 1).backward()
            optimizer.step()
        for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            torch.testing.assert_close(ours, theirs)
    assert reducer.stats()["steps"] == 6 and reducer.stats()["buckets"] > 6 * 4
    dist.destroy_process_group()
    return sum(float(parameter.double().sum()) for parameter in models[0].parameters())


def _hooked(model: nn.Module, hooked: str, bucket_bytes: int) -> tuple[nn.Module, GradientReducer]:
    if hooked == "plain":
        return model, GradientReducer(model, bucket_bytes=bucket_bytes)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=hooked == "views")
    return wrapped, ddp_hook(wrapped, bucket_bytes=bucket_bytes)


def _ahead(hooked: str) -> None:
    dist.init_process_group("penstock")
    rank = dist.get_rank()
    # Each weight is a bucket: the first of them begins a round.
    model, reducer = _hooked(nn.Sequential(*(nn.Linear(32, 32) for _ in range(6))), hooked, bucket_bytes=4096)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    returned = []

    def after_the_reducers(parameter: torch.Tensor) -> None:
        returned.append(parameter)
        if rank == 0 and len(returned) == 12:
            stats = reducer.stats()
            assert (stats["rounds"], stats["buckets"], stats["steps"]) == (1, 0, 0), stats
            store.set("rank 0 has made all its gradients", "")

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(after_the_reducers)
    if rank == 1:
        store.wait(["rank 0 has made all its gradients"], timedelta(seconds=30))
    model(torch.full((1, 32), rank + 1.0)).sum().backward()
    assert len(returned) == 12 and reducer.stats()["buckets"] >= 6
    sums = [float(parameter.grad.sum()) for parameter in model.parameters() if parameter.grad is not None]
    both: list[Any] = [None, None]
    dist.all_gather_object(both, sums)
    assert len(sums) == 12 and both[0] == both[1]
    dist.destroy_process_group()


def _copied(hooked: str) -> list[tuple[int, int]]:
    dist.init_process_group("penstock")
    large = nn.Sequential(
        nn.Linear(600, 600), nn.ReLU(), nn.Linear(600, 600)
    )  # weights of 1,440,000 bytes, biases of 2400
    small = nn.Sequential(*(nn.Linear(30, 30, bias=False) for _ in range(3)))  # 3600 bytes each
    values = []
    GradientReducer._tapers = False
    for net, width in ((large, 600), (small, 30)):
        # All of it in one round.
        model, reducer = _hooked(net, hooked, bucket_bytes=4 << 20)
        counts = []
        # DDP puts its buckets into the order of the first pass, and gradients lie in them from the one after the second on.
        for _ in range(5):
            model.zero_grad(set_to_none=False)
            model(torch.ones(1, width)).sum().backward()
            stats = reducer.stats()
            counts.append((stats["in_place_bytes"], stats["copied_bytes"]))
        values.append((counts[4][0] - counts[3][0], counts[4][1] - counts[3][1]))
    dist.destroy_process_group()
    return values


def _accumulate() -> None:
    dist.init_process_group("penstock")
    model = nn.Linear(4, 1)
    reducer = GradientReducer(model)
    ones = torch.ones(1, 4)
    scale = dist.get_rank() + 1.0  # 1 and 2
    with reducer.no_sync():
        model(scale * ones).sum().backward()
        assert model.weight.grad is not None and model.weight.grad.eq(scale).all()
    model(10 * scale * ones).sum().backward()
    assert model.weight.grad.eq(1.5 * 11).all(), model.weight.grad
    assert reducer.stats()["steps"] == 1
    dist.destroy_process_group()


def _early_and_nested() -> None:
    dist.init_process_group("penstock")
    scale = dist.get_rank() + 1.0  # 1 and 2
    first, last = nn.Linear(3, 3, bias=False), nn.Linear(3, 1, bias=False)
    # The last layer's gradient is a bucket: it is agreed on and reduced although the pass does not come to its end.
    GradientReducer([*first.parameters(), *last.parameters()], bucket_bytes=1)
    with pytest.raises(ArithmeticError, match="half-way"):
        last(calls_back(first(torch.ones(1, 3)), half_way)).sum().backward()
    for nested in (False, True):
        for parameter in (first.weight, last.weight):
            parameter.grad = None
        data = (scale * torch.ones(1, 3)).requires_grad_()
        inner = torch.utils.checkpoint.checkpoint(first, data, use_reentrant=True) if nested else first(data)
        last(inner).sum().backward()
        # What the inner layer gets back is the weight of the last one, the same on both ranks, times the data.
        want = 1.5 * last.weight.detach().t().expand(3, 3)
        torch.testing.assert_close(first.weight.grad, want)
        torch.testing.assert_close(last.weight.grad, 1.5 * first.weight.detach().sum(1, keepdim=True).t())
    dist.destroy_process_group()


class _Checkpointed(nn.Module):
    """Blocks in reentrant checkpoints, with or without parameters around them. Blocks may come twice, and in each other."""

    def __init__(self, has_ends: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = [nn.Linear(2, 2) if has_ends else nn.Tanh() for _ in range(2)]
        self.blocks = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])

    def forward(self, data: torch.Tensor, used: list[list[int]], is_nested: bool) -> torch.Tensor:
        value = self.first(data)
        for blocks in used:
            value = self._within(value, blocks, is_nested)
        return self.last(value).sum()

    def _within(self, value: torch.Tensor, blocks: list[int], is_nested: bool) -> torch.Tensor:
        def run(value: torch.Tensor) -> torch.Tensor:
            value = self.blocks[blocks[0]](value)
            return self._within(value, blocks[1:], is_nested) if len(blocks) > 1 else value

        return torch.utils.checkpoint.checkpoint(run, value, use_reentrant=True) if is_nested else run(value)


def _nested() -> None:
    dist.init_process_group("penstock", timeout=timedelta(seconds=20))
    rank, world = dist.get_rank(), dist.get_world_size()
    for has_ends in (True, False):
        model, reducer = _Checkpointed(has_ends), None
        reducer = GradientReducer(model, bucket_bytes=16)
        for step in range(8):
            rng = random.Random(10 * step + has_ends)
            # For each rank: checkpoints of blocks. One that uses none has a pass without a hook if there are no ends.
            used = [
                [rng.sample(range(3), rng.randint(1, 3)) for _ in range(rng.randint(1 - has_ends, 3))]
                for _ in range(world)
            ]
            used[step % world] = used[step % world] or [[0]]
            datas = [torch.full((1, 2), (rank + 1.0) * 10**step, requires_grad=True) for rank in range(world)]
            want: dict[str, torch.Tensor] = {}
            for other in range(world):
                alone = _Checkpointed(has_ends).double()
                alone(datas[other].double(), used[other], False).backward()
                for name, one in alone.named_parameters():
                    if one.grad is not None:
                        want[name] = want.get(name, torch.zeros_like(one)) + one.grad / world
            model.zero_grad()
            # A rank may also run its blocks without checkpoints.
            model(datas[rank], used[rank], (rank + step) % 3 > 0).backward()
            reducer.average()
            for name, one in model.named_parameters():
                assert (one.grad is None) == (name not in want), (has_ends, step, name)
                if one.grad is not None:
                    torch.testing.assert_close(one.grad.double(), want[name], rtol=1e-4, atol=1e-4 * 10**step)
            assert reducer.stats()["steps"] == step + 1
        reducer.close()
    dist.destroy_process_group()


def _nested_under_ddp() -> None:
    dist.init_process_group("penstock", timeout=timedelta(seconds=20))
    rank = dist.get_rank()
    for has_ends in (True, False):
        model = _Checkpointed(has_ends)
        hooked = DistributedDataParallel(model)
        reducer = ddp_hook(hooked)
        for step, used in enumerate([[[0], [1], [2]], [[2, 1], [0]], [[0, 1, 2]]]):
            want = 0.0
            for other in range(2):
                alone = _Checkpointed(has_ends)
                alone(torch.full((1, 2), other + 1.0, requires_grad=True), used, False).backward()
                want = want + torch.cat([one.grad.flatten() for one in alone.parameters()]) / 2
            model.zero_grad()
            hooked(torch.full((1, 2), rank + 1.0, requires_grad=True), used, rank == step % 2).backward()
            torch.testing.assert_close(torch.cat([one.grad.flatten() for one in model.parameters()]), want)
            assert reducer.stats()["steps"] == step + 1
    dist.destroy_process_group()


def _added_in_a_nested_pass() -> None:
    dist.init_process_group("penstock", timeout=timedelta(seconds=20))
    model = nn.Linear(2, 2, bias=False)
    GradientReducer(model)
    data = torch.ones(1, 2, requires_grad=True)
    for reentrant in (True, False):
        value = torch.utils.checkpoint.checkpoint(model, data, use_reentrant=reentrant)
        with (
            pytest.raises(ConfigError, match=r"the gradient of weight .* nested")
            if reentrant
            else contextlib.nullcontext()
        ):
            model(value).sum().backward()
        model.zero_grad()
    dist.destroy_process_group()


def _raising() -> None:
    dist.init_process_group("penstock")
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("penstock").addHandler(handler)
    for bucket_bytes in (1, 1 << 20):
        _raising_in_buckets_of(bucket_bytes)
    assert len([text for text in warnings if "a backward pass raised after" in text]) == 2, warnings
    dist.destroy_process_group()


def _raising_in_buckets_of(bucket_bytes: int) -> None:
    rank, scale = dist.get_rank(), dist.get_rank() + 1.0
    layers = [nn.Linear(4, 4, bias=False) for _ in range(3)]
    reducer = GradientReducer(nn.Sequential(*layers), bucket_bytes=bucket_bytes)

    def run(raises_after: int | None = None) -> list[torch.Tensor]:
        """A pass that raises after so many gradients were made, and reduced if a bucket is no more than one."""

        def fail() -> None:
            # What comes with the last gradient waits for the end of the pass.
            expected = 1 if raises_after == len(layers) else raises_after or 0
            while bucket_bytes == 1 and reducer.stats()["buckets"] < buckets + expected:
                time.sleep(0.001)
            raise ArithmeticError("half-way")

        buckets = reducer.stats()["buckets"]
        value = (scale * torch.ones(1, 4)).requires_grad_()
        value = calls_back(value, fail if raises_after == len(layers) else None)
        for index, layer in enumerate(layers):
            layer.weight.grad = None
            value = calls_back(layer(value), fail if raises_after == len(layers) - 1 - index else None)
        value.sum().backward()
        return [layer.weight.grad for layer in layers if layer.weight.grad is not None]

    def check() -> None:
        averages = run()
        with reducer.no_sync():
            own = run()
        for average, one in zip(averages, own, strict=True):
            dist.all_reduce(one, dist.ReduceOp.AVG)
            torch.testing.assert_close(average, one)

    # On all ranks, before and after something was reduced.
    for raises_after in (0, 1, 2, 3):
        # Another rank may have dropped the step before this one comes so far.
        with pytest.raises((ArithmeticError, Mismatch)):
            run(raises_after)
        check()
    for raises_after in (1, 2, 3):
        if bucket_bytes == 1:
            # On one rank only, after something was reduced: an error on the others.
            with pytest.raises(ArithmeticError if rank == 1 else Mismatch) as caught:
                run(raises_after if rank == 1 else None)
            if rank != 1:
                step = reducer.stats()["steps"] + 1
                assert f"the backward pass of rank 1 raised in step {step}" in str(caught.value), caught.value
                assert caught.value.group_lives
        elif rank == 1:
            # On one rank only, before: the others wait for its next pass.
            with pytest.raises(ArithmeticError):
                run(raises_after)
        check()
    assert reducer.stats()["steps"] == 7
    reducer.close()


def _raising_last(has_sparse: bool) -> tuple[list[float], int]:
    dist.init_process_group("penstock")
    torch.manual_seed(0)
    rank = dist.get_rank()
    bag = nn.EmbeddingBag(10, 4, mode="sum", sparse=True)
    layers = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    # Each weight is a bucket.
    reducer = GradientReducer(nn.ModuleList([bag, layers]) if has_sparse else layers, bucket_bytes=1)
    optimizer = torch.optim.SGD([*layers.parameters(), *bag.parameters()], lr=0.1)

    def fail() -> None:
        while reducer.stats()["buckets"] < 3:
            time.sleep(0.001)
        time.sleep(0.2)  # long enough for a round about the last gradient
        raise ArithmeticError("behind the last gradient")

    for step in range(4):
        optimizer.zero_grad()
        data = bag(torch.tensor([[step, 5 + rank]]))
        output = layers(
            calls_back(data if has_sparse else data.detach().requires_grad_(), fail if rank == step == 1 else None)
        )
        if step == 1:
            with pytest.raises(ArithmeticError if rank == 1 else Mismatch) as caught:
                output.square().sum().backward()
            assert rank == 1 or "the backward pass of rank 1 raised in step 2" in str(caught.value), caught.value
        else:
            output.square().sum().backward()
            optimizer.step()
    dist.destroy_process_group()
    return [float(one) for parameter in layers.parameters() for one in parameter.flatten()], reducer.stats()["steps"]


def _interrupted(when: str) -> list[float]:
    dist.init_process_group("penstock", timeout=timedelta(seconds=20))
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Linear(2, 1, bias=False)
    reducer = GradientReducer(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    class Late(Exception):
        pass

    def handler(*_: Any) -> None:
        raise Late

    signal.signal(signal.SIGALRM, handler)
    if when == "delivers" and rank == 0:
        deliver = reducer._deliver

        def interrupted(current: Any) -> None:
            if reducer.stats()["steps"] == 3:
                raise Late
            deliver(current)

        reducer._deliver = interrupted  # type: ignore[method-assign]
    store = dist.distributed_c10d._get_default_store()
    told: list[str] = []
    for step in range(6):
        optimizer.zero_grad()
        if when == "waits" and step == 2:
            if rank == 0:
                signal.setitimer(signal.ITIMER_REAL, 0.2)
            else:
                store.wait(["interrupted"])
        try:
            model(torch.full((1, 2), rank + 1.0)).sum().backward()
        except (Late, PenstockError) as error:
            store.set("interrupted", "")
            told.append(f"{step} {error}")
            continue
        assert model.weight.grad is not None and model.weight.grad.eq(1.5).all()
        optimizer.step()
        if len(told) > 1:
            break
        if told and rank == 0:
            raise AssertionError(f"went on after {told}")
    assert told[0].startswith("2 ") or (when == "delivers" and rank == 1), told
    assert "an exception interrupted rank 0" in told[-1] and "make another one" in told[-1], told
    assert len(told) == (3 if when == "delivers" and rank == 1 else 4), told
    reducer.close()
    GradientReducer(model)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.full((1, 2), rank + 1.0)).sum().backward()
        optimizer.step()
    dist.destroy_process_group()
    return [float(one) for one in model.weight.flatten()]


def _raising_with_two() -> None:
    dist.init_process_group("penstock", timeout=timedelta(seconds=20))
    rank = dist.get_rank()
    layers = [nn.Linear(2, 2, bias=False) for _ in range(4)]
    # Each weight is a bucket.
    reducers = [GradientReducer(nn.ModuleList(part), bucket_bytes=1) for part in (layers[::2], layers[1::2])]

    def run(raises_after: int = 0, buckets: int = 0) -> None:
        def fail() -> None:
            while sum(reducer.stats()["buckets"] for reducer in reducers) < buckets:
                time.sleep(0.001)
            raise ArithmeticError("half-way")

        value = torch.full((1, 2), rank + 1.0, requires_grad=True)
        for at, layer in enumerate(layers):
            layer.weight.grad = None
            value = calls_back(layer(value), fail if rank == 1 and at == 3 - raises_after and raises_after else None)
        value.sum().backward()

    def check() -> None:
        run()
        for layer in layers:
            both = [torch.empty(2, 2) for _ in range(2)]
            dist.all_gather(both, layer.weight.grad)
            assert both[0].equal(both[1])

    check()
    with pytest.raises(ArithmeticError if rank == 1 else Mismatch):
        run(raises_after=2, buckets=6)  # the first bucket of each
    check()
    with pytest.raises(ArithmeticError if rank == 1 else Mismatch):
        run(raises_after=1, buckets=11)  # that of the last layer, which is the second reducer's
    told = []
    for _ in range(3):
        try:
            run()
        except PenstockError as error:
            told.append(str(error))
    assert any("an exception interrupted rank 0" in text for text in told), told
    dist.barrier()


def _two_layers() -> tuple[nn.Linear, nn.Linear, GradientReducer, list[torch.optim.Optimizer]]:
    """A layer of zeros and another one, their reducer, and an optimizer for each."""
    used, other = nn.Linear(2, 1, bias=False), nn.Linear(2, 1)
    reducer = GradientReducer([*used.parameters(), *other.parameters()])
    with torch.no_grad():
        used.weight.zero_()
    return used, other, reducer, [torch.optim.SGD(layer.parameters(), lr=1.0) for layer in (used, other)]


def _unreached() -> None:
    dist.init_process_group("penstock")
    rank = dist.get_rank()
    used, other, reducer, optimizers = _two_layers()
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        if step % 2 == rank:
            (used(torch.full((1, 2), 2.0)).sum()).backward()
        else:
            torch.ones(1, requires_grad=True).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        assert other.weight.grad is None
        assert used.weight.eq(-1.0 - step).all(), used.weight
    # A second step on the same gradients, which no rank has made anew: they stay.
    optimizers[0].step()
    assert used.weight.eq(-5.0).all() and used.weight.grad.eq(1.0).all(), (used.weight, used.weight.grad)
    steps = reducer.stats()["steps"]
    # Steps on one's own gradients are no such steps.
    with reducer.no_sync():
        used(torch.ones(1, 2)).sum().backward()
        optimizers[0].step()
    assert reducer.stats()["steps"] == steps
    reducer.close()
    optimizers[0].step()
    dist.destroy_process_group()


def _unreached_after_no_sync() -> None:
    dist.init_process_group("penstock", timeout=timedelta(seconds=20))
    rank = dist.get_rank()
    used, other, reducer, optimizers = _two_layers()
    # Which ranks have a pass under no_sync, and whose pass outside reaches the parameter; what both average then.
    cases = [
        ({0, 1}, {0}, 4.0),
        ({0, 1}, {1}, 4.0),
        ({0}, {1}, 3.0),
        ({1}, {1}, 3.0),
        ({0, 1}, set(), 2.0),
        ({0}, set(), 1.0),
    ]
    weight = 0.0
    for kept, reached, average in cases:
        for optimizer in optimizers:
            optimizer.zero_grad()
        if rank in kept:
            with reducer.no_sync():
                used(torch.full((1, 2), 2.0)).sum().backward()
        if rank in reached:
            used(torch.full((1, 2), 4.0)).sum().backward()
        else:
            torch.ones(1, requires_grad=True).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        weight -= average
        assert used.weight.eq(weight).all(), (kept, reached, used.weight)
        assert other.weight.grad is None
    steps = reducer.stats()["steps"]
    assert steps == len(cases)
    if rank == 0:
        with reducer.no_sync():
            used(torch.ones(1, 2)).sum().backward()
            optimizers[0].step()
    assert reducer.stats()["steps"] == steps
    dist.destroy_process_group()


def _one_weight() -> tuple[nn.Linear, GradientReducer, torch.optim.SGD]:
    dist.init_process_group("penstock", timeout=timedelta(seconds=20))
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    return model, GradientReducer(model), torch.optim.SGD(model.parameters(), lr=1.0)


def _reach(model: nn.Module, gradient: float) -> None:
    """A pass that makes this gradient; 0: one that reaches no parameter."""
    passed = model(torch.full((1, 1), float(gradient))) if gradient else torch.ones(1, requires_grad=True)
    passed.sum().backward()


def _clip_late(left: str) -> None:
    model, reducer, optimizer = _one_weight()
    rank = dist.get_rank()
    reached = [False, True] if left == "nothing at first" else [True, False]
    for is_reached in reached:
        optimizer.zero_grad()
        if left == "kept":
            with reducer.no_sync():
                _reach(model, 4.0)
        _reach(model, 8.0 if is_reached or rank == 0 else 0.0)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def _average_and_clip() -> None:
    model, reducer, optimizer = _one_weight()
    rank = dist.get_rank()
    weight = 0.0
    for kept, outside in [((4, 4), (8, 0)), ((0, 0), (0, 8)), ((4, 0), (8, 8)), ((2, 4), (0, 0)), ((0, 0), (8, 8))]:
        optimizer.zero_grad()
        with reducer.no_sync():
            _reach(model, kept[rank])
        _reach(model, outside[rank])
        reducer.average()
        assert model.weight.grad.eq((sum(kept) + sum(outside)) / 2).all(), (kept, outside, model.weight.grad)
        reducer.average()  # all is averaged
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        weight -= 1.0
        assert torch.allclose(model.weight, torch.tensor(weight)), model.weight
    dist.destroy_process_group()


def _average_without_an_optimizer() -> None:
    model, reducer, _ = _one_weight()
    rank = dist.get_rank()
    model.weight.grad = torch.zeros_like(model.weight)
    weight = 0.0
    for reached in [(8, 0), (0, 4), (2, 2), (0, 0), (0, 6), (6, 0), (4, 8)]:
        _reach(model, reached[rank])
        reducer.average()
        assert model.weight.grad.eq(sum(reached) / 2).all(), (reached, model.weight.grad)
        with torch.no_grad():
            model.weight -= model.weight.grad
            model.weight.grad.zero_()
        weight -= sum(reached) / 2
        assert model.weight.eq(weight).all(), model.weight
    dist.destroy_process_group()


def _closures() -> None:
    model, reducer, optimizer = _one_weight()
    own = 4.0 * dist.get_rank()

    def kept() -> None:
        with reducer.no_sync():
            _reach(model, own + 1.0)

    def outside() -> None:
        _reach(model, own + 1.0)

    def nothing() -> None:
        pass

    for before, closure in itertools.product([nothing, kept, outside], repeat=2):
        for takes in (lambda closure: optimizer.step(closure), lambda closure: optimizer.step(closure=closure)):
            with torch.no_grad():
                model.weight.zero_()
            optimizer.zero_grad()
            before()
            refused = closure is kept or (before is kept and closure is nothing)
            with pytest.raises(ConfigError, match="after the closure") if refused else contextlib.nullcontext():
                takes(closure)
            passes = (before is not nothing) + (closure is not nothing)
            assert model.weight.eq(0.0 if refused else -3.0 * passes).all(), (before, closure, model.weight)
            if refused:
                optimizer.zero_grad()
                reducer.average()
    with reducer.no_sync():
        optimizer.zero_grad()
        optimizer.step(kept)  # a step of this rank alone
    dist.destroy_process_group()


def _search_lines() -> None:
    dist.init_process_group("penstock", timeout=timedelta(seconds=20))
    rank = dist.get_rank()
    torch.manual_seed(rank)
    data, wanted = torch.randn(20, 3) * (1 + 3 * rank), torch.randn(20, 1)
    for search, averages in [("strong_wolfe", True), (None, False), ("strong_wolfe", False)]:
        model = nn.Linear(3, 1)
        GradientReducer(model)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn=search)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()  # noqa: B023
            loss = (model(data) - wanted).square().mean()  # noqa: B023
            loss.backward()
            loss = loss.detach()
            if averages:  # noqa: B023
                dist.all_reduce(loss, dist.ReduceOp.AVG)
            return loss

        refused = search is not None and not averages
        with pytest.raises(ConfigError, match="takes steps by the loss") if refused else contextlib.nullcontext():
            for _ in range(3):
                optimizer.step(closure)
        both = [torch.empty(1, 3) for _ in range(2)]
        dist.all_gather(both, model.weight.detach())
        assert both[0].equal(both[1])
    dist.destroy_process_group()


def _search_alone() -> None:
    model, _reducer, optimizer = _one_weight()
    if dist.get_rank() == 0:
        temperature = nn.Parameter(torch.ones(1))
        fit = torch.optim.LBFGS([temperature], max_iter=4, line_search_fn="strong_wolfe")

        def closure() -> torch.Tensor:
            fit.zero_grad()
            loss = (temperature - 3.0).square().sum()
            loss.backward()
            return loss

        fit.step(closure)
        assert temperature.isclose(torch.tensor(3.0)).all(), temperature
    _reach(model, 2 * dist.get_rank())
    optimizer.step()
    assert model.weight.eq(-1.0).all(), model.weight
    dist.destroy_process_group()


def _scale() -> None:
    model, reducer, optimizer = _one_weight()
    rank = dist.get_rank()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for gradient in (math.inf if rank else 2.0, 2.0):
        with reducer.no_sync():
            scaler.scale(model(torch.full((1, 1), gradient)).sum()).backward()
        reducer.average()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert model.weight.eq(-2.0).all(), model.weight
    with reducer.no_sync():
        scaler.scale(model(torch.full((1, 1), math.inf if rank else 2.0)).sum()).backward()
    steps = reducer.stats()["steps"]
    with pytest.raises(ConfigError, match="average") if rank == 0 else contextlib.nullcontext():
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
    assert reducer.stats()["steps"] == steps
    dist.destroy_process_group()


def _kept_after_an_average() -> None:
    model, reducer, optimizer = _one_weight()
    rank = dist.get_rank()
    _reach(model, 1.0 + rank)
    with reducer.no_sync():
        _reach(model, 1.0 + 2.0 * rank)
    optimizer.step()
    assert model.weight.eq(-3.5).all(), model.weight
    for how in (True, False):
        optimizer.zero_grad()
        _reach(model, math.inf)  # its step is left out
        optimizer.zero_grad(set_to_none=how)
        with reducer.no_sync():
            _reach(model, 1.0 + rank)
        before = model.weight.detach().clone()
        optimizer.step()
        assert model.weight.eq(before - 1.5).all(), model.weight
    optimizer.zero_grad()
    _reach(model, math.inf)
    optimizer.zero_grad()
    before = model.weight.detach().clone()
    _reach(model, 4.0 * rank)  # reaches nothing on rank 0
    optimizer.step()
    assert model.weight.eq(before - 2.0).all(), model.weight
    dist.destroy_process_group()


def _hand_over() -> None:
    dist.init_process_group("penstock")
    parameter = nn.Parameter(torch.zeros(2, 3))
    reducer = GradientReducer([parameter])
    now, left = 7, []
    current = _core.CurrentPass(lambda: now)
    hook = _core.ReadyHook(current, reducer._reducer, 0, *reducer._slots._quick[0], left.append)
    values = torch.arange(6.0).view(2, 3)
    resized = values.clone()
    resized.untyped_storage().resize_(8)
    whole = torch.zeros(3, 2, 3)
    replaced = values.clone().add_(1)
    cases: list[tuple[torch.Tensor | None, int | None]] = [
        (values.clone(), 0),
        (replaced, 1),
        (whole[1], -1),
        (torch.zeros(4, 3)[:2], -1),
        (None, None),
        (values.double(), None),
        (values.t().contiguous().t(), None),
        (values[:, :2], None),
        (values.to_sparse(), None),
        (resized, None),
        (torch.complex(values, values).conj().imag, None),
        (nn.Parameter(values.clone()), None),
    ]
    for gradient, version in cases:
        pass_ = BackwardPass()
        states = pass_.states
        current.follow(7, pass_.handed, states.addresses, states.versions, pass_.shared)
        # torch lets nobody assign most of these.
        stand_in = types.SimpleNamespace(grad=gradient)
        left.clear()
        hook(stand_in)
        if version is None:
            assert left == [stand_in] and not pass_.handed and not len(states) and not pass_.shared, gradient
            continue
        assert gradient is not None and not left
        assert pass_.handed == {0: gradient} and pass_.handed[0] is gradient
        assert states.get(0) == (gradient.data_ptr(), version) and pass_.shared == ([0] if version < 0 else [])
        expected, address, is_alone = gradient.clone(), gradient.data_ptr(), version >= 0
        reducer._reducer.flush().wait()
        # As Python's hook, and in the next step.
        assert reducer._slots.submit(reducer._reducer, 0, gradient) == (gradient, address, is_alone)
        reducer._reducer.flush().wait()
        torch.testing.assert_close(gradient, expected, rtol=0, atol=0)
    usual = types.SimpleNamespace(grad=values.clone())
    for stop in ("another task", "the end"):
        pass_ = BackwardPass()
        current.follow(7, pass_.handed, pass_.states.addresses, pass_.states.versions, pass_.shared)
        now = 7 if stop == "the end" else 8
        if stop == "the end":
            current.end()
        left.clear()
        hook(usual)
        assert left == [usual] and not pass_.handed, stop
    # What the reducer refuses, the hook raises: the gradient was handed over before.
    current.follow(7, pass_.handed, pass_.states.addresses, pass_.states.versions, pass_.shared)
    hook(usual)
    with pytest.raises(PenstockError, match="is submitted while its last value"):
        hook(usual)
    assert list(pass_.handed) == [0]


def _changed() -> None:
    dist.init_process_group("penstock")
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    GradientReducer(model)
    scale = dist.get_rank() + 1.0
    changes: list[tuple[Any, str]] = [
        (lambda: model.double(), "torch.float64 on cpu"),
        (lambda: model.bfloat16(), "torch.bfloat16 on cpu"),
        (lambda: model[1].half(), "torch.float16 on cpu"),
    ]
    initial = {name: value.clone() for name, value in model.state_dict().items()}
    for change, text in changes:
        change()
        model.zero_grad()
        first, last = model[0].weight, model[1].weight
        data = torch.ones(1, 3, dtype=first.dtype, device=first.device)
        with pytest.raises(ConfigError, match=r"the gradient of 1\.(weight|bias) has shape") as caught:
            model[1](model[0](data).to(last.dtype)).sum().backward()
        assert text in str(caught.value), caught.value
        model.float()
        model.load_state_dict(initial)
        model.zero_grad()
        model(scale * torch.ones(1, 3)).sum().backward()
        torch.testing.assert_close(model[0].weight.grad, 1.5 * model[1].weight.detach().sum(0)[:, None].expand(3, 3))

    # Gradients that somebody put there: transposed, resized, of another shape.
    model[0].weight.grad = (scale * torch.arange(9.0)).view(3, 3).t()
    model[1](torch.ones(1, 3)).sum().backward()
    torch.testing.assert_close(model[0].weight.grad, 1.5 * torch.arange(9.0).view(3, 3).t())
    gone = torch.ones(3, 3)
    model[0].weight.grad = gone
    gone.untyped_storage().resize_(8)
    with pytest.raises(ConfigError, match=r"the gradient of 0\.weight has lost its memory"):
        model[1](torch.ones(1, 3)).sum().backward()
    dist.destroy_process_group()


def _change_in_hooks() -> None:
    dist.init_process_group("penstock")
    data = torch.full((1, 30), dist.get_rank() + 1.0)
    module = nn.Linear(30, 30, bias=False)
    weight = module.weight
    optimizer = torch.optim.SGD([weight], lr=1.0)
    changes: list[Any] = [
        lambda parameter: parameter.grad.mul_(2),
        lambda parameter: setattr(parameter, "grad", parameter.grad * 2),
        lambda parameter: (optimizer.step(), optimizer.zero_grad()),
    ]

    def late(change: Any) -> Any:
        def hook(parameter: torch.Tensor) -> None:
            change(parameter)

        return weight.register_post_accumulate_grad_hook(hook)

    early = late(changes[0])
    GradientReducer(module)
    for _ in range(2):
        module.zero_grad(set_to_none=False)
        module(data).sum().backward()
        assert weight.grad is not None and weight.grad.eq(3).all()
    early.remove()
    for change in changes:
        before = weight.detach().clone()
        hook = late(change)
        module.zero_grad()
        with pytest.raises(ConfigError, match=r"the gradient of .*weight was changed in the|steps weight within the"):
            module(data).sum().backward()
        assert torch.equal(weight, before)
        hook.remove()
        module.zero_grad()
        module(data).sum().backward()
        assert weight.grad is not None and weight.grad.eq(1.5).all()
    dist.destroy_process_group()


def _grown() -> None:
    dist.init_process_group("penstock")
    data = torch.full((1, 2), dist.get_rank() + 1.0)
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    first, last = model[0].weight, model[1].weight
    first.requires_grad_(False)
    reducer = GradientReducer(model)
    model(data).sum().backward()
    first.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"the gradient of 0\.weight is not averaged"):
        model(data).sum().backward()
    # Frozen again, it has its gradient still.
    first.requires_grad_(False)
    model(data).sum().backward()
    first.requires_grad_(True)
    first.grad = last.grad = None
    beside = GradientReducer(model[0])
    model(data).sum().backward()
    assert first.grad is not None
    torch.testing.assert_close(first.grad, 1.5 * last.detach().sum(0)[:, None].expand(2, 2))
    beside.close()
    reducer.close()

    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    reducer = GradientReducer(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    alone = nn.Parameter(torch.zeros(2))  # each rank's own
    optimizer.add_param_group({"params": [alone]})
    (model(data) * data + alone).sum().backward()
    optimizer.step()
    assert alone.eq(-1).all()
    optimizer.zero_grad()
    model.append(nn.Linear(2, 2, bias=False))
    optimizer.add_param_group({"params": model[1].parameters()})
    model(data).sum().backward()
    before = [one.detach().clone() for one in model.parameters()]
    with pytest.raises(ConfigError, match=r"the gradient of 1\.weight is not averaged"):
        optimizer.step()
    assert all(torch.equal(one, old) for one, old in zip(model.parameters(), before, strict=True))
    reducer.close()
    GradientReducer(model)
    optimizer.zero_grad()
    model(data).sum().backward()
    optimizer.step()
    # Optimizers that step none of the reducer's parameters. The script keeps no reducer.
    replaced = {
        "a new head": lambda model: setattr(model, "1", nn.Linear(2, 1, bias=False)),
        "load_state_dict": lambda model: model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True),
        "weight_norm": lambda model: [nn.utils.parametrizations.weight_norm(one) for one in model],
    }
    for how, replace in replaced.items():
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
        GradientReducer(model)
        replace(model)
        gc.collect()
        optimizers = [
            torch.optim.SGD(one.parameters(), lr=1.0) for one in ([model[1]] if how == "a new head" else model)
        ]
        stranger = torch.optim.SGD([alone], lr=1.0)
        for _ in range(2):
            model(data).sum().backward()
            stranger.step()
            with pytest.raises(ConfigError, match=r"the gradient of .*weight.* is not averaged"):
                for optimizer in optimizers:
                    optimizer.step()
        replacement = GradientReducer(model[1]) if how == "a new head" else None
        for group in stranger.param_groups:
            group["params"] = list(model[1].parameters())
        for optimizer in (stranger, *optimizers):
            with contextlib.nullcontext() if replacement else pytest.raises(ConfigError, match="is not averaged"):
                optimizer.step()
    # Models that were given as parameters: what was frozen among those.
    given = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)]
    GradientReducer(given)
    given[1].requires_grad_(True)
    with pytest.raises(ConfigError, match="the gradient of a parameter is not averaged"):
        (given[0] * given[1]).sum().backward()
    dist.destroy_process_group()


def _ignored() -> None:
    dist.init_process_group("penstock")
    rank = dist.get_rank()
    module = nn.Sequential(nn.Linear(2, 3 + rank, bias=False), nn.Flatten(), nn.Linear(3 + rank, 2))
    module.append(nn.Linear(2, 1, bias=False))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["0.weight", "2.weight", "2.bias"])
    model = DistributedDataParallel(module)
    ddp_hook(model)
    for _ in range(2):
        model.zero_grad()
        hidden = module[:3](torch.ones(1, 2)).detach()
        model(torch.ones(1, 2)).sum().backward()
        own, averaged = module[2].bias.grad, module[3].weight.grad
        assert torch.equal(own, module[3].weight[0].detach()), "it is this rank's own"
        both = [torch.empty_like(hidden) for _ in range(2)]
        dist.all_gather(both, hidden)
        torch.testing.assert_close(averaged, (both[0] + both[1]) / 2)
    dist.destroy_process_group()


def _shared() -> None:
    dist.init_process_group("penstock")
    scale = dist.get_rank() + 1.0
    encoder, decoder = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    decoder.weight = encoder.weight
    for bucket_bytes in (1, 1 << 20):
        reducer = GradientReducer(
            itertools.chain(encoder.parameters(), decoder.parameters()), bucket_bytes=bucket_bytes
        )
        encoder.weight.grad = None
        decoder(encoder(scale * torch.ones(1, 3))).sum().backward()
        averaged = encoder.weight.grad
        assert averaged is not None
        reducer.close()
        encoder.weight.grad = None
        decoder(encoder(1.5 * torch.ones(1, 3))).sum().backward()
        torch.testing.assert_close(averaged, encoder.weight.grad)

    decoder.weight = nn.Parameter(encoder.weight.data)
    both = nn.ModuleDict({"encoder": encoder, "decoder": decoder})
    # In one bucket: nothing is agreed on before both ranks have raised, so each raises its own error.
    GradientReducer(both)
    both.zero_grad()
    (encoder(scale * torch.ones(1, 3)).sum() + decoder(scale * torch.full((1, 3), 10.0)).sum()).backward()
    assert encoder.weight.grad.eq(1.5).all() and decoder.weight.grad.eq(15.0).all()
    flat = torch.zeros(12)
    encoder.weight.grad, decoder.weight.grad = flat[:9].view(3, 3), flat[3:].view(3, 3)
    with pytest.raises(
        ConfigError, match=r"gradients of (encoder|decoder)\.weight and (encoder|decoder)\.weight share memory"
    ):
        (encoder(torch.ones(1, 3)).sum() + decoder(torch.ones(1, 3)).sum()).backward()
    encoder.weight.grad = decoder.weight.grad = None
    (encoder(scale * torch.ones(1, 3)).sum() + decoder(scale * torch.ones(1, 3)).sum()).backward()
    assert encoder.weight.grad.eq(1.5).all() and decoder.weight.grad.eq(1.5).all()
    dist.destroy_process_group()


def _formats() -> None:
    dist.init_process_group("penstock")
    rank, scale = dist.get_rank(), dist.get_rank() + 1.0
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Conv2d(4, 3, 1), nn.Flatten(), nn.LazyLinear(2))
    data = torch.ones(2, 2, 5, 5)
    model(data)
    model = model.to(memory_format=torch.channels_last)
    model[3].weight = nn.Parameter(torch.randn(27, 2).t())
    model.register_buffer("expanded", torch.randn(3, 1).expand(3, 4))
    model.register_buffer("holes", torch.randn(4, 6)[:, ::2])
    assert not model[0].weight.is_contiguous() and not model[3].weight.is_contiguous()
    reducer = GradientReducer(model)
    for tensor in model.state_dict().values():
        values = [torch.empty(tensor.shape) for _ in range(2)]
        dist.all_gather(values, tensor)
        assert values[0].equal(values[1])
    for _ in range(2):
        model.zero_grad(set_to_none=False)
        (scale * model(data).sum()).backward()
        averaged = [parameter.grad.clone() for parameter in model.parameters()]
        with reducer.no_sync():
            model.zero_grad()
            (1.5 * model(data).sum()).backward()
        for parameter, got in zip(model.parameters(), averaged, strict=True):
            torch.testing.assert_close(got, parameter.grad)
            assert parameter.grad.stride() == parameter.stride()
    reducer.close()

    broken = nn.Linear(2, 2)
    broken.weight.data.fill_(rank)
    broken.register_buffer("sparse", torch.zeros(2, 2).to_sparse())
    with pytest.raises(ConfigError, match=r"Nothing was sent\. The group is still usable"):
        GradientReducer(broken)
    assert broken.weight.eq(rank).all()
    dist.barrier()
    dist.destroy_process_group()


def _begin() -> None:
    dist.init_process_group("penstock")
    rank = dist.get_rank()
    for broadcast in (True, False):
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        model[1].running_mean.fill_(rank)
        mine = float(model[0].weight.detach().sum())
        GradientReducer(model, broadcast=broadcast)
        sums: list[Any] = [None] * 2
        dist.all_gather_object(sums, (mine, float(model[0].weight.detach().sum()), float(model[1].running_mean.sum())))
        assert sums[0][0] != sums[1][0]
        assert (sums[0][1:] == sums[1][1:]) == broadcast, sums
        assert sums[0][1] == sums[0][0], "rank 0 keeps what it has"
    dist.destroy_process_group()


def _come_and_go() -> None:
    dist.init_process_group("penstock")
    rank = dist.get_rank()
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    beside = GradientReducer(other)
    for _ in range(3):
        reducer = GradientReducer(model)
        for one in (model, other):
            one.zero_grad()
            one(torch.full((1, 2), float(rank))).sum().backward()
            assert one.weight.grad.eq(0.5).all()
        reducer.close()
        model.zero_grad()
        model(torch.full((1, 2), float(rank))).sum().backward()
        assert model.weight.grad.eq(rank).all(), "its hooks are gone"
    assert beside.stats()["steps"] == 3
    dist.destroy_process_group()
    beside.close()


def _two_in_one_pass(has_sparse: bool) -> None:
    dist.init_process_group("penstock", timeout=timedelta(seconds=10))
    rank = dist.get_rank()

    def part() -> nn.Module:
        bag = nn.EmbeddingBag(3, 2, mode="sum", sparse=True)
        return nn.ModuleList([nn.Linear(2, 1, bias=False), *([bag] if has_sparse else [])])

    def gradients(one: nn.Module) -> list[float]:
        return [0.0 if one.grad is None else float(one.grad.to_dense().sum()) for one in one.parameters()]

    parts = [part(), part()]
    for one in parts:
        GradientReducer(one)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in parts]
    # Which parts each rank reaches, in its order. Where a part is not reached by a rank, that rank's gradient of it is 0.
    reached = [([0, 1], [1, 0]), ([1, 0], [0]), ([1], [0, 1] if not has_sparse else [1]), ([0], [0, 1]), ([0, 1], [])]
    for step, orders in enumerate(reached):
        for optimizer in optimizers:
            optimizer.zero_grad()
        total = torch.zeros((), requires_grad=True)
        # One after the other in the graph, so that autograd walks them in that order, backwards.
        for at in reversed(orders[rank]):
            linear, *bags = parts[at]
            total = total + linear(torch.full((1, 2), rank + 1.0 + step) + 0 * total).sum()
            for bag in bags:
                total = total + (rank + 1.0 + step) * bag(torch.tensor([[step % 3]])).sum()
        total.backward()
        for optimizer in optimizers:
            optimizer.step()
        for at, one in enumerate(parts):
            want = sum(2 * (other + 1.0 + step) for other in range(2) if at in orders[other]) / 2
            assert gradients(one) == [want] * (1 + has_sparse), (step, at, gradients(one), want)
    dist.destroy_process_group()


def _let_go(hooked: str) -> None:
    dist.init_process_group("penstock")
    own, rank = backend.of(), dist.get_rank()
    model, reducer = _hooked(nn.Linear(2, 1, bias=False), hooked, 4 << 20)
    here, weight = weakref.ref(reducer), weakref.ref(next(model.parameters()))
    del reducer
    gc.collect()
    copied = copy.deepcopy(getattr(model, "module", model))
    stored = io.BytesIO()
    torch.save(getattr(model, "module", model), stored)
    stored.seek(0)
    loaded = torch.load(stored, weights_only=False)
    for one, mean in ((model, 0.5), (copied, float(rank)), (loaded, float(rank))):
        one(torch.full((1, 2), float(rank))).sum().backward()
        assert next(one.parameters()).grad.eq(mean).all()
    assert len(own._channels) == 2 and penstock.stats()["held"]["channels"] == 2
    again = GradientReducer(loaded)
    again.close()
    torch.save(loaded, io.BytesIO())
    dist.barrier()
    del model, one
    gc.collect()
    assert here() is None and weight() is None
    assert not own._channels
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


def _in_a_failed_group() -> list[tuple[str, str]]:
    dist.init_process_group("penstock")  # with the time-out of half an hour
    rank, own, raised = dist.get_rank(), backend.of(), []

    def made() -> None:
        try:
            own.channel("made")
        except PenstockError as error:
            raised.append((type(error).__name__, str(error)))

    store = own._member.keys
    if rank == 0:  # when both others open it, and one waits
        store.wait(["1", "2"], timedelta(seconds=60))
        while not penstock.stats()["held"]["early_messages"]:
            time.sleep(0.001)
        own._member.group.abort("nobody needs it")
    else:
        store.set(str(rank), "opens")
    made()
    made()
    own.shutdown()
    return raised


def _buckets() -> None:
    dist.init_process_group("penstock")
    torch.manual_seed(1)
    model = nn.Linear(1000, 100)  # 400,000 bytes and 400
    reducer = GradientReducer(model, bucket_bytes=1 << 20)
    results = []
    for bucket_bytes, buckets in ((1 << 20, 1), (100_000, 6), (64, 6257), (1 << 30, 1)):
        reducer.set_bucket_bytes(bucket_bytes)
        before = reducer.stats()["buckets"]
        model.zero_grad()
        model(torch.randn(2, 1000, generator=torch.Generator().manual_seed(dist.get_rank()))).square().sum().backward()
        results.append(model.weight.grad.clone())
        assert abs(reducer.stats()["buckets"] - before - buckets) <= 1, (
            bucket_bytes,
            reducer.stats()["buckets"] - before,
        )
    assert all(result.equal(results[0]) for result in results)
    dist.destroy_process_group()


def _not_a_number() -> str:
    dist.init_process_group("penstock")
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1, bias=False))
    GradientReducer(model)
    for step in (1, 2, 3):
        data = torch.ones(1, 3)
        if step == 3 and dist.get_rank() == 1:
            data[0, 0] = torch.nan
        try:
            model(data).sum().backward()
        except NotFinite as error:
            assert step == 3
            return str(error)
    raise AssertionError("it went through")


def _differ() -> dict[str, str]:
    dist.init_process_group("penstock", timeout=datetime.timedelta(seconds=20))
    is_other = dist.get_rank() == 1
    models = {
        "wider": nn.Linear(3, 4 if is_other else 5),
        "fewer": nn.Linear(3, 5, bias=not is_other),
        "dtype": nn.Linear(3, 5).to(torch.float64 if is_other else torch.float32),
        "frozen": nn.Linear(3, 5).requires_grad_(True),
        "buffers": nn.BatchNorm1d(3, track_running_stats=not is_other),
    }
    models["frozen"].bias.requires_grad_(not is_other)
    texts = {}
    for what, model in models.items():
        for broadcast in (True, False) if what != "buffers" else (True,):
            with pytest.raises(Mismatch) as caught:
                GradientReducer(model, broadcast=broadcast)
            texts[f"{what}{'' if broadcast else ', no broadcast'}"] = str(caught.value)
            total = torch.ones(1)
            dist.all_reduce(total)
            assert total.item() == 2
    return texts


def _reshaped(hooked: str) -> str:
    dist.init_process_group("penstock", timeout=timedelta(seconds=20))
    model: nn.Module = nn.Linear(4, 3, bias=False) if dist.get_rank() else nn.Linear(6, 2, bias=False)
    with pytest.raises(Mismatch) as caught:
        if hooked == "ddp":
            # DDP would compare the shapes itself.
            ddp_hook(DistributedDataParallel(model, init_sync=False))
        else:
            GradientReducer(model if hooked == "plain" else model.parameters(), broadcast=False)
    return str(caught.value)


def _swapped() -> str:
    dist.init_process_group("penstock")
    layers = {"first": nn.Linear(3, 3), "second": nn.Linear(3, 3)}
    names = sorted(layers, reverse=dist.get_rank() == 1)
    model = nn.Sequential()
    for name in names:
        model.add_module(name, layers[name])
    GradientReducer(model, broadcast=False)
    try:
        model(torch.ones(1, 3)).sum().backward()
    except Mismatch as error:
        return str(error)
    raise AssertionError("it went through")


def _beyond_the_hook() -> None:
    dist.init_process_group("penstock")
    rank = dist.get_rank()

    def made(**options: bool) -> DistributedDataParallel:
        torch.manual_seed(0)
        return DistributedDataParallel(nn.Linear(2, 1, bias=False), **options)

    def gradient(model: DistributedDataParallel) -> list[float]:
        assert isinstance(model.module.weight, nn.Parameter) and model.module.weight.grad is not None
        return model.module.weight.grad.flatten().tolist()

    data = torch.full((1, 2), float(rank + 1))
    with pytest.raises(ConfigError, match="static_graph"):
        ddp_hook(made(static_graph=True))
    late = made()
    ddp_hook(late)
    late._set_static_graph()
    with pytest.raises(ConfigError, match="static_graph"):
        late(data).sum().backward()

    model = made()
    reducer = ddp_hook(model)
    with reducer.no_sync():
        model(data).sum().backward()
    assert gradient(model) == [rank + 1.0] * 2
    model(data).sum().backward()
    assert gradient(model) == [3.0] * 2  # 2 * (1 + 2) / 2
    reducer.close()
    model.zero_grad()
    model(data).sum().backward()
    assert gradient(model) == [1.5] * 2

    uneven = made()
    ddp_hook(uneven)
    with pytest.raises(ConfigError, match=r"join\(\)"), uneven.join():
        for _ in range(rank):  # rank 0 is done at once
            uneven(data).sum().backward()
    # What DDP had issued for the others is never answered: this is no state to go on from. Rank 1 stays until rank 0 has
    # its part.
    store = dist.distributed_c10d._get_default_store()
    store.set(f"raised on {rank}", "")
    store.wait(["raised on 0", "raised on 1"])


def _example(program: str) -> list[float]:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(program, "docs/guide/gradients.md", "exec"), names)
    assert not dist.is_initialized()
    model = names["model"]
    assert float(model.weight.detach().square().mean()) < 1e-4, (
        "it was not trained: the outputs of random data are to be 0"
    )
    return [float(parameter.detach().double().sum()) for parameter in model.parameters()]


def _refused() -> None:
    dist.init_process_group("gloo")
    with pytest.raises(ConfigError, match="backend for CPU tensors is gloo"):
        GradientReducer(nn.Linear(1, 1))
    group = dist.new_group(backend="penstock")
    with pytest.raises(ConfigError, match="no parameter that requires"):
        GradientReducer([], group)
    with pytest.raises(ConfigError, match="bucket_bytes must be positive"):
        GradientReducer(nn.Linear(1, 1), group, bucket_bytes=0)
    with pytest.raises(ConfigError, match="as float16 or bfloat16"):
        GradientReducer(nn.Linear(1, 1), group, wire=torch.int8)
    with pytest.raises(ConfigError, match="bias is float64"):
        GradientReducer(nn.Linear(1, 1).double(), group, wire=torch.float16)
    with pytest.raises(ConfigError, match="takes a DistributedDataParallel model"):
        ddp_hook(nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="lies on meta"):
        GradientReducer(nn.Linear(1, 1, device="meta"), group)
    sparse = nn.Embedding(3, 2, sparse=True)
    GradientReducer(sparse.parameters(), group)
    with pytest.raises(ConfigError, match=r"gradient of parameter 0 is .*sparse.* the model is given as a module"):
        sparse(torch.tensor([1])).sum().backward()
    dist.destroy_process_group()


@pytest.mark.parametrize("hooked", ["reducer", "ddp"])
def test_sparse_gradients(hooked: str) -> None:
    """Embeddings with sparse gradients train as in one process, also where a rank does not use one, or nobody does."""
    values = ranks.run(_train_sparse, count=2, args=(hooked,), env={"PENSTOCK_CHECK": "mismatch"})
    assert values[0] == values[1]


class _Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.bags = nn.ModuleList([nn.EmbeddingBag(30, 4, mode="sum", sparse=True) for _ in range(3)])
        self.head = nn.Linear(4, 2)

    def forward(self, used: list[int], words: torch.Tensor) -> torch.Tensor:
        return self.head(sum(self.bags[index](words) for index in used)).square().sum()


def _train_sparse(hooked: str) -> list[list[float]]:
    dist.init_process_group("penstock")
    rank, world = dist.get_rank(), dist.get_world_size()
    trained, alone = _Bags(), _Bags()
    model: Any = trained
    if hooked == "ddp":
        model = DistributedDataParallel(trained)
        ddp_hook(model)
    else:
        GradientReducer(trained)
    for step in range(3):
        # The first bag is used by all, the second by rank 0, the third by nobody; DDP itself refuses that.
        used = [[0, 1, 2], [0, 1, 2]] if hooked == "ddp" else [[0, 1], [0]]
        words = [
            torch.randint(30, (6, 3), generator=torch.Generator().manual_seed(10 * step + r)) for r in range(world)
        ]
        for one in (trained, alone):
            one.zero_grad()
        model(used[rank], words[rank]).backward()
        (sum(alone(used[r], words[r]) for r in range(world)) / world).backward()
        for (name, got), expected in zip(trained.named_parameters(), alone.parameters(), strict=True):
            if expected.grad is None:
                assert got.grad is None or not got.grad._nnz(), name
                continue
            assert got.grad is not None and got.grad.is_sparse == expected.grad.is_sparse, name
            torch.testing.assert_close(got.grad.to_dense(), expected.grad.to_dense(), rtol=1e-5, atol=1e-5)
            for parameter in (got, expected):
                parameter.data -= 0.05 * parameter.grad.to_dense()
    dist.destroy_process_group()
    return [parameter.flatten().tolist() for parameter in trained.parameters()]


def _train_for_ever(hooked: str) -> None:
    dist.init_process_group("penstock")
    model: nn.Module = nn.Sequential(nn.Linear(500, 500), nn.ReLU(), nn.Linear(500, 500))
    if hooked == "ddp":
        model = DistributedDataParallel(model)
        ddp_hook(model, bucket_bytes=1 << 16)
    else:
        reducer = GradientReducer(model, bucket_bytes=1 << 16)
        assert reducer.stats()["steps"] == 0
    until = time.monotonic() + 60
    step = 0
    while time.monotonic() < until:
        model.zero_grad()
        model(torch.randn(2, 500)).sum().backward()
        step += 1
        if step == 5:
            ranks.note("running")
    raise AssertionError(f"rank {os.environ['RANK']} has seen nothing")
