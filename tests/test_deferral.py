"""Steps that wait for their gradients: what a script sees is what it would see without, whatever it does with its parameters.

The oracle is the same model under a reducer without an optimizer, which gets the same data and the same calls.
"""

from __future__ import annotations

import collections
import copy
import functools
import gc
import logging
import os
import pickle
import random
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import penstock.optim
import ranks
from late import Late
from penstock.errors import Config, Mismatch, PeerLost
from penstock.tools import testbed
from penstock.torch import GradientReducer
from penstock.training.deferral import OPTIMIZERS, PendingGradient, PendingParameter

SEEDS = range(4)


class Scaled(torch.autograd.Function):
    """Takes a parameter without torch's own functions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return gradients[0] * weight, (gradients[0] * x).sum(0)


class Model(nn.Module):
    """Layers of many kinds: one that is used twice, one that is used at times, and one that has its own function."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 8)
        self.recurrent = nn.GRU(8, 8, batch_first=True)
        self.twice = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.scale = nn.Parameter(torch.ones(8))
        self.at_times = nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: torch.Tensor, skips: bool) -> torch.Tensor:
        x, _ = self.recurrent(self.embedding(tokens))
        x = self.twice(torch.tanh(self.twice(x[:, -1])))
        x = Scaled.apply(self.norm(x), self.scale)
        out: torch.Tensor = self.head(x if skips else x + self.at_times(x))
        return out


class Run:
    """One of the two trainings."""

    def __init__(self, optimizer: str, is_deferred: bool, rng: random.Random) -> None:
        torch.manual_seed(1)
        self.model = Model()
        made = getattr(torch.optim, optimizer, None) or getattr(penstock.optim, optimizer)
        trained = list(self.model.parameters())
        if optimizer == "Muon":
            trained = [one for one in trained if one.ndim == 2]
        settings: dict[str, Any] = {"adam_steps": 5, "mix_steps": 5} if optimizer == "AdamSGD" else {}
        groups = [{"params": trained[::2], "lr": 0.01}, {"params": trained[1::2], "lr": 0.002, "weight_decay": 0.01}]
        self.optimizer: torch.optim.Optimizer = made(groups, **settings)
        self.reducer = GradientReducer(self.model, optimizer=self.optimizer if is_deferred else None)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.mean = [one.detach().clone() for one in self.model.parameters()]
        self.seen: list[Any] = []
        self.late: Late | None = None
        if self.reducer._deferral is not None:
            self.late = Late(self.reducer, rng)

    def loss(self, seed: int, skips: bool) -> torch.Tensor:
        data = torch.Generator().manual_seed(10 * seed + dist.get_rank())
        with torch.autocast("cpu", torch.bfloat16, enabled=seed % 3 == 1):
            return self.model(torch.randint(7, (4, 5), generator=data), skips).square().mean()

    def backward(self, *losses: torch.Tensor) -> None:
        for loss in losses:
            if self.late is not None:
                self.late.begin(20)
            loss.backward()

    def pending(self) -> int:
        return sum(isinstance(one, PendingParameter) for one in self.model.parameters())


def _values(run: Run) -> list[torch.Tensor]:
    return [one.detach().clone() for one in run.model.parameters()]


def _gradients(run: Run) -> list[torch.Tensor | None]:
    return [None if one.grad is None else one.grad.clone() for one in run.model.parameters()]


def _ema(run: Run) -> None:
    for mean, one in zip(run.mean, run.model.parameters(), strict=True):
        mean.lerp_(one.detach(), 0.1)
    run.seen.append([one.clone() for one in run.mean])


def _restore(run: Run) -> None:
    run.model.load_state_dict(copy.deepcopy(run.model.state_dict()))
    run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))


def _decay(run: Run) -> None:
    with torch.no_grad():
        for one in run.model.parameters():
            one.mul_(0.99)


def _own_gradient(run: Run) -> None:
    one = run.model.head.bias
    one.grad = torch.full_like(one, 0.5)


def _drop_one(run: Run) -> None:
    del run.model.twice.weight.grad


def _evaluate(run: Run) -> None:
    with torch.no_grad():
        run.seen.append(run.loss(99, False))


def _infer(run: Run) -> None:
    with torch.inference_mode():
        run.seen.append(run.loss(98, False).tolist())


def _count(run: Run) -> None:
    with FlopCounterMode(display=False) as counter:
        run.loss(97, True)
    run.seen.append(counter.get_total_flops())


def _transform(run: Run) -> None:
    data = torch.ones(2, 8)
    run.seen.append(torch.func.vmap(torch.func.jacrev(lambda x: run.model.head(x).sum()))(data).detach())


def _fake(run: Run) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        run.model.head(torch.ones(2, 8))


# What a script may do before a step, and after one.
BEFORE: list[Callable[[Run], Any]] = [
    lambda run: None,
    lambda run: run.seen.append(nn.utils.clip_grad_norm_(run.model.parameters(), 0.01)),
    lambda run: nn.utils.clip_grad_value_(run.model.twice.parameters(), 0.001),
    lambda run: run.seen.append(_gradients(run)),
    lambda run: run.seen.append(run.model.head.weight.grad),
    _own_gradient,
    _drop_one,
    lambda run: run.optimizer.zero_grad(),
    lambda run: run.model.scale.grad.add_(1.0),  # type: ignore[union-attr]
]
AFTER: list[Callable[[Run], Any]] = [
    lambda run: None,
    lambda run: run.schedule.step(),
    _ema,
    _restore,
    _decay,
    _evaluate,
    _infer,
    _count,
    _transform,
    _fake,
    lambda run: run.seen.append(_gradients(run)),
    lambda run: run.optimizer.step(),
    lambda run: run.seen.append(pickle.loads(pickle.dumps(run.model)).state_dict()),
    lambda run: run.seen.append(copy.deepcopy(run.model.norm).state_dict()),
    lambda run: run.seen.append([one.numpy().copy() for one in map(torch.Tensor.detach, run.model.twice.parameters())]),
    lambda run: run.optimizer.zero_grad(set_to_none=False),
    lambda run: run.reducer.wait(),
    lambda run: run.seen.append(repr(run.model.scale)),
    lambda run: run.seen.append(copy.deepcopy(run.optimizer.state_dict())),
    lambda run: torch.nn.utils.vector_to_parameters(
        0.5 * torch.nn.utils.parameters_to_vector(run.model.parameters()), run.model.parameters()
    ),
]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_script_sees_no_difference(seed: int) -> None:
    """Random scripts, with optimizers of all kinds: every value that one sees has the bits that it has without deferral."""
    values = ranks.run(functools.partial(_scripts, seed), count=2, timeout_s=120)
    assert all(pending > 0 for pending in values), "nothing was ever late"


def _scripts(seed: int) -> int:
    dist.init_process_group("penstock")
    names = sorted(one.__name__ for one in OPTIMIZERS)
    pending = sum(_script(name, 100 * seed + at) for at, name in enumerate(names))
    dist.destroy_process_group()
    return pending


def _script(optimizer: str, seed: int) -> int:
    # The ranks do the same, and get their gradients at other times.
    rng, own = random.Random(seed), random.Random(1000 * seed + dist.get_rank())
    runs = [Run(optimizer, is_deferred, own) for is_deferred in (False, True)]
    pending = 0
    for step in range(8):
        passes, before, after = rng.choice([1, 1, 1, 2]), rng.choice(BEFORE), [rng.choice(AFTER) for _ in range(2)]
        retained, skips, zeroes, by_model, accumulates = (rng.random() < share for share in (0.3, 0.3, 0.8, 0.5, 0.2))
        for run in runs:
            if zeroes:
                (run.model if by_model else run.optimizer).zero_grad()
            losses = [run.loss(step + 50 * at, skips) for at in range(passes)] if retained else []
            if accumulates:
                with run.reducer.no_sync():
                    run.backward(run.loss(step + 1000, skips))
            if retained:
                # A second pass then reaches no parameter anew: its graph was there before the first one ended.
                run.backward(*losses)
            else:
                for at in range(passes):
                    run.backward(run.loss(step + 50 * at, skips))
            pending += run.pending()
            before(run)
            run.optimizer.step()
            pending += run.pending()
            for each in after:
                each(run)
        if rng.random() < 0.3:
            _compare(runs, f"seed {seed}, {optimizer}, step {step}")
    _compare(runs, f"seed {seed}, {optimizer}")
    assert not any(isinstance(one, PendingParameter | PendingGradient) for one in runs[1].model.parameters())
    for run in runs:
        run.reducer.close()
    return pending


def _compare(runs: list[Run], where: str) -> None:
    plain, deferred = ([run.seen, _values(run), _gradients(run), run.optimizer.state_dict()] for run in runs)
    _equal(plain, deferred, where)


def _equal(one: Any, other: Any, where: str) -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), f"{where}: {one} and {other}"
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            _equal(one[key], other[key], f"{where}, {key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for at, (left, right) in enumerate(zip(one, other, strict=True)):
            _equal(left, right, f"{where}, {at}")
    elif hasattr(one, "tobytes"):
        assert one.tobytes() == other.tobytes(), where
    else:
        assert one == other, f"{where}: {one} and {other}"


def test_steps_overlap_on_a_link() -> None:
    """Over a slow link gradients are on their way when a step ends, and arrive in the next forward pass; a rank that then ends
    its script, with or without a word, keeps no other from its step."""
    with testbed.Testbed(hosts=2, link=testbed.LinkSpec(rate_mbit=100)) as bed:
        for ending in ("destroys", "exits", "forgets"):
            for pending in ranks.run(functools.partial(_overlap, ending), count=2, bed=bed):
                assert all(count > 0 for count in pending), pending


def _overlap(ending: str) -> list[int]:
    dist.init_process_group("penstock")
    torch.manual_seed(1)
    plain = nn.Sequential(*(nn.Linear(200, 200) for _ in range(6)))
    model = copy.deepcopy(plain)
    sgds = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (plain, model)]
    GradientReducer(plain)
    reducer = GradientReducer(model, bucket_bytes=40_000, optimizer=sgds[1])
    pending = []
    for step in range(3):
        data = torch.full((1, 200), float(dist.get_rank() + step))
        for each, sgd in zip((plain, model), sgds, strict=True):
            sgd.zero_grad()
            each(data).sum().backward()
            sgd.step()
        pending.append(sum(isinstance(one, PendingParameter) for one in model.parameters()))
        if step == 0:
            # Nothing looked at it: the class alone says that it waits.
            assert model[0].weight.shape == (200, 200) and model[0].weight.requires_grad
            assert pending[-1] == sum(isinstance(one, PendingParameter) for one in model.parameters())
    last = [one.detach().clone() for one in plain.parameters()]
    if ending == "destroys":
        dist.destroy_process_group()
    elif ending == "forgets":
        weights = list(model.parameters())
        del model, reducer, each, sgd, sgds
        gc.collect()
        model = nn.ParameterList(weights)
    if ending != "exits" or dist.get_rank() == 0:
        assert all(map(torch.equal, model.parameters(), last))
    return pending


@pytest.mark.parametrize("dies", ["in the pass", "after its step"])
def test_a_rank_dies(dies: str) -> None:
    """While gradients are on their way: whoever uses a parameter next is told, within the time of a lost rank; parameters are
    ordinary ones again, and the reducer can be closed."""
    with (
        testbed.Testbed(hosts=2, link=testbed.LinkSpec(rate_mbit=20)) as bed,
        ranks.Ranks(_dies, count=2, args=(dies,), bed=bed) as job,
    ):
        outcomes = job.outcomes(timeout_s=60)
    assert outcomes[0].ok, outcomes[0]
    assert not outcomes[1].ok


def _dies(when: str) -> None:
    dist.init_process_group("penstock")
    model = nn.Sequential(*(nn.Linear(500, 500) for _ in range(4)))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    reducer = GradientReducer(model, bucket_bytes=40_000, optimizer=sgd)
    if dist.get_rank() == 1 and when == "in the pass":
        model[0].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(PeerLost):
        model(torch.ones(1, 500)).sum().backward()
        sgd.step()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        assert any(isinstance(one, PendingParameter) for one in model.parameters())
        model(torch.ones(1, 500))
    assert all(type(one) is nn.Parameter for one in model.parameters())
    assert all(one.grad is None or type(one.grad) is torch.Tensor for one in model.parameters())
    torch.cat([one.flatten() for one in model.parameters()])
    reducer.close()
    dist.destroy_process_group()


def test_buckets_change_between_steps_that_overlap() -> None:
    """Another bucket size while gradients are on their way: it waits for them."""
    with testbed.Testbed(hosts=2, link=testbed.LinkSpec(rate_mbit=20)) as bed:
        assert ranks.run(_changes, count=2, bed=bed) == [True, True]


def _changes() -> bool:
    dist.init_process_group("penstock")
    model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(4)))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    reducer = GradientReducer(model, bucket_bytes=40_000, optimizer=sgd)
    was_late = False
    for size in (60_000, 80_000):
        model(torch.ones(1, 300)).sum().backward()
        sgd.step()
        was_late |= any(isinstance(one, PendingParameter) for one in model.parameters())
        reducer.set_bucket_bytes(size)
        assert reducer.setting.bucket_bytes == size
    dist.destroy_process_group()
    return was_late


@pytest.mark.parametrize("closes", [True, False])
def test_a_rank_dies_and_nobody_asks(closes: bool) -> None:
    """Gradients were on their way, and no parameter is used again: that some were not stepped is logged."""
    with (
        testbed.Testbed(hosts=2, link=testbed.LinkSpec(rate_mbit=20)) as bed,
        ranks.Ranks(_leaves, count=2, args=(closes,), bed=bed) as job,
    ):
        [outcome, _] = job.outcomes(timeout_s=60)
    assert outcome.ok, str(outcome)
    assert outcome.output.count("rank 0: the last optimizer.step() has not stepped all parameters") == 1, str(outcome)


def _leaves(closes: bool) -> None:
    dist.init_process_group("penstock")
    model = nn.Sequential(*(nn.Linear(500, 500) for _ in range(4)))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    reducer = GradientReducer(model, bucket_bytes=40_000, optimizer=sgd)
    model(torch.ones(1, 500)).sum().backward()
    sgd.step()
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.get("stepped")  # the other one's pass has waited for a part of the averages
        os.kill(os.getpid(), signal.SIGKILL)
    store.set("stepped", "")
    if closes:
        reducer.close()
    dist.destroy_process_group()


def test_what_cannot_wait() -> None:
    """Is refused, and says why and what to do."""
    ranks.run(_refused, count=1)


def _refused() -> None:
    dist.init_process_group("penstock")
    model = nn.Linear(2, 2)

    class Derived(torch.optim.SGD):
        pass

    for optimizer, says in (
        (torch.optim.LBFGS(model.parameters()), "LBFGS may need all gradients at once.*Leave optimizer= out"),
        (Derived(model.parameters()), "Derived may need"),
        (torch.optim.SGD(model.parameters(), differentiable=True), "differentiable"),
        (torch.optim.SGD(nn.Linear(2, 2).parameters()), "none of the parameters that SGD steps"),
    ):
        with pytest.raises(Config, match=says):
            GradientReducer(model, optimizer=optimizer)
    dist.destroy_process_group()


def test_what_keeps_steps_from_overlapping_is_said() -> None:
    """Once a process, with the reason; the gradients are there when a pass ends."""
    for said in ranks.run(_kept, count=2, env={"PENSTOCK_CHECK": "nan"}):
        (line,) = [each for each in said if "waits for all gradients in each step" in each]
        assert line.startswith(f"rank {said[-1]}: ") and "PENSTOCK_CHECK is set" in line


def _kept() -> list[str]:
    dist.init_process_group("penstock")
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("penstock").addHandler(handler)
    for _ in range(2):
        model = nn.Linear(4, 4)
        reducer = GradientReducer(model, optimizer=torch.optim.SGD(model.parameters()))
        assert reducer._deferral is None
        model(torch.ones(1, 4)).sum().backward()
        reducer.wait()
    said.append(str(dist.get_rank()))
    dist.destroy_process_group()
    return said


def test_a_pass_raises_on_another_rank() -> None:
    """While gradients that all have agreed on are on their way: the step is dropped, the group lives, the next step is right."""
    with testbed.Testbed(hosts=2, link=testbed.LinkSpec(rate_mbit=50)) as bed:
        ranks.run(_raises, count=2, bed=bed)


def _raises() -> None:
    dist.init_process_group("penstock")
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1_000_000))
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    reducer = GradientReducer(model, optimizer=sgd)
    raising = dist.get_rank() == 1

    def half_way(_: torch.Tensor) -> None:
        if raising:
            while not reducer.stats()["buckets"]:  # until the ranks have agreed on the large ones
                os.sched_yield()
            raise RuntimeError("half-way")

    model[0].weight.register_hook(half_way)
    with pytest.raises(RuntimeError if raising else Mismatch, match="half-way" if raising else "rank 1 raised"):
        model(torch.ones(1, 2)).sum().backward()
    raising = False
    sgd.zero_grad()
    model(torch.full((1, 2), 1.0 + dist.get_rank())).sum().backward()
    sgd.step()
    assert bool((model[1].bias.grad == 1.0).all())
    dist.destroy_process_group()


def test_uses_that_torch_hides() -> None:
    """A compiled or scripted model, one that steps with a closure or a GradScaler, hooks of a step, a step that raises, and a
    graph that is older than the step: as without deferral."""
    ways = ["closure", "scaler", "pre-hook", "post-hook", "views", "function", "raises", "old graph", "compiled"]
    for each in (ways, ["scripted"]):
        ranks.run(functools.partial(_hidden, each), count=2, timeout_s=120)


def _hidden(ways: list[str]) -> None:
    dist.init_process_group("penstock")
    for way in ways:
        results = []
        for is_deferred in (False, True):
            torch.manual_seed(1)
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            if way == "views":
                flat = torch.cat([one.detach().flatten() for one in model.parameters()])
                nn.utils.vector_to_parameters(flat, model.parameters())
            adam = torch.optim.Adam(model.parameters(), lr=0.1)
            reducer = GradientReducer(model, optimizer=adam if is_deferred else None)
            if reducer._deferral is not None:
                late = Late(reducer, random.Random(dist.get_rank()))
            results.append(_train(way, model, adam, late if is_deferred else None, flat if way == "views" else None))
        _equal(*results, way)
    dist.destroy_process_group()


def _train(
    way: str, model: nn.Module, adam: torch.optim.Optimizer, late: Late | None, flat: torch.Tensor | None
) -> list[Any]:
    seen: list[Any] = []

    def look(*_: Any) -> None:
        seen.append([(one.detach().clone(), one.grad.clone()) for one in model.parameters() if one.grad is not None])

    if way == "pre-hook":
        adam.register_step_pre_hook(look)
    elif way == "post-hook":
        adam.register_step_post_hook(look)
    function = torch.compile(model, backend="eager") if way == "compiled" else model
    if way == "scripted":
        torch._C._jit_set_profiling_mode(False)  # each call computes alike
        function = torch.jit.script(model)
    if way == "function":
        layers = [model[0], model[1]]  # type: ignore[index]
        function = lambda x: nn.functional.linear(Scaled.apply(x, layers[0].bias), layers[1].weight)  # noqa: E731
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def loss() -> torch.Tensor:
        adam.zero_grad()
        made: torch.Tensor = function(torch.full((1, 4), 1.0 + dist.get_rank())).square().sum()
        if late is not None:
            late.begin(4)
        (scaler.scale(made) if way == "scaler" else made).backward()
        return made

    for _ in range(4):
        if way == "closure":
            seen.append(adam.step(loss))
        else:
            old = function(torch.ones(1, 4)).square().sum()
            loss()
            if way == "scaler":
                scaler.step(adam)
                scaler.update()
            elif way == "raises":
                group = adam.param_groups[0]
                group["betas"], betas = None, group["betas"]
                with pytest.raises(TypeError):
                    adam.step()
                group["betas"] = betas
                look()
            else:
                adam.step()
            if way == "old graph":
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    old.backward()
        if flat is not None:
            seen.append(flat.clone())
    look()
    return seen


def test_threads_and_children() -> None:
    """While a thread makes a late step, others wait for its end, and the optimizer has its parameter groups. The child of a fork
    has all steps."""
    ranks.run(_threads, count=1)


class _Held(collections.defaultdict[Any, dict[str, Any]]):
    """An optimizer's state that holds the first step up."""

    def __init__(self) -> None:
        super().__init__(dict)
        self.entered, self.released = threading.Event(), threading.Event()

    def __getitem__(self, key: Any) -> dict[str, Any]:
        self.entered.set()
        assert self.released.wait(20)
        return super().__getitem__(key)


def _threads() -> None:
    dist.init_process_group("penstock")
    model = nn.Linear(4, 4)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    reducer = GradientReducer(model, optimizer=sgd)
    late = Late(reducer, random.Random(2))

    def step() -> list[torch.Tensor]:
        late._late = {0, 1}
        model(torch.ones(1, 4)).sum().backward()
        sgd.step()
        assert all(isinstance(one, PendingParameter) for one in model.parameters())
        # The gradient of the sum is 1 everywhere.
        return [before - 0.1 for before in start]

    start = [one.detach().clone() for one in model.parameters()]
    stepped = step()
    model.bias.detach()  # the weight's step is the last one
    held = sgd.state = _Held()
    order: list[str] = []
    uses = [threading.Thread(target=lambda: model(torch.ones(1, 4)))]
    uses[0].start()
    assert held.entered.wait(20)
    assert isinstance(model.weight, PendingParameter), "others do not wait for a step that is being made"
    assert len(sgd.param_groups[0]["params"]) == 2
    uses += [threading.Thread(target=lambda: (reducer.wait(), order.append("waited"))) for _ in range(2)]  # type: ignore[func-returns-value]
    uses += [threading.Thread(target=lambda: order.append(str(all(map(torch.equal, model.parameters(), stepped)))))]
    for each in uses[1:]:
        each.start()
    uses[1].join(0.2)  # is not over, however long this takes
    assert not order
    held.released.set()
    for each in uses:
        each.join()
    assert sorted(order) == ["True", "waited", "waited"]
    assert all(map(torch.equal, model.parameters(), stepped))

    sgd.zero_grad()
    step()
    child = os.fork()
    if child == 0:
        os._exit(sum(isinstance(one, PendingParameter) for one in model.parameters()))
    assert os.waitpid(child, 0)[1] == 0
    reducer.close()
    dist.destroy_process_group()
