"""Proves that steps of optimizers which overlap the next forward pass give the bits of a plain loop, whatever a script does.

Each case is one function that trains for some steps and returns all that it has seen. It runs with a plain reducer and with
``optimizer=``, on ranks of which one is late in every step, so that averages are under way when ``step()`` is called.
"""

from __future__ import annotations

import copy
import functools
import io
import os
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn

import ranks
from penstock.errors import Config as ConfigError
from penstock.errors import Mismatch, PeerLost, PenstockError
from penstock.torch import GradientReducer
from penstock.training.awaited import Awaited
from penstock.training.optim import AdamSGD, LinearDecay

Loop = Callable[["Job"], Any]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1, foreach=True),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "sgd tensor lr": lambda p: torch.optim.SGD(p, lr=torch.tensor(0.1), momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adam foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.01, fused=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01, t0=2),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "adam-sgd": lambda p: AdamSGD(p, lr=0.01, adam_steps=2, mix_steps=2),
}


class Net(nn.Module):
    """Uses parameters in other places than the forward method of the module that owns them: ``out_proj`` of the attention, the
    tied embedding, a parameter of its own."""

    def __init__(self, *, reentrant: bool | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.rare = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()))
        self.recurrent = nn.GRU(8, 8, batch_first=True)
        self.reentrant = reentrant

    def forward(self, tokens: torch.Tensor, is_rare: bool = False) -> torch.Tensor:
        x = self.embed(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.frozen(self.recurrent(x)[0])
        if self.reentrant is None:
            x = x + self.body(self.norm(x))
        else:
            x = x + torch.utils.checkpoint.checkpoint(
                lambda x: self.body(self.norm(x)), x, use_reentrant=self.reentrant
            )
        if is_rare:
            x = self.rare(x)
        logits = nn.functional.linear(x, self.embed.weight) * self.scale
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten())


class Job:
    """A model, its optimizer and reducer, and data of this rank."""

    def __init__(
        self,
        overlaps: bool,
        make: Callable[[Any], torch.optim.Optimizer] = OPTIMIZERS["adamw"],
        model: nn.Module | None = None,
        **options: Any,
    ) -> None:
        torch.manual_seed(5)
        self.overlaps = overlaps
        self.model = Net() if model is None else model
        self.optimizer = make([one for one in self.model.parameters() if one.requires_grad])
        self.reducer = GradientReducer(self.model, optimizer=self.optimizer if overlaps else None, **options)
        self.data = torch.Generator().manual_seed(100 + dist.get_rank())
        self.steps = 0
        self.seen: list[Any] = []

    def tokens(self) -> torch.Tensor:
        return torch.randint(11, (2, 5), generator=self.data)

    def backward(self, *, is_rare: bool = False) -> None:
        loss = self.model(self.tokens(), is_rare)
        self.seen.append(loss.item())
        self.pause()
        loss.backward()

    def pause(self) -> None:
        """One rank is late, so that the others' averages are under way."""
        self.steps += 1
        if self.steps % dist.get_world_size() == dist.get_rank():
            time.sleep(0.02)

    def due(self) -> int:
        """How many parameters are to be stepped."""
        pending = self.reducer._overlap._pending if self.reducer._overlap else None
        return 0 if pending is None else len(pending.due)

    def see(self, *values: torch.Tensor) -> None:
        self.seen += [value.detach().clone() for value in values]

    def result(self) -> list[Any]:
        """All that was seen, with what it ends with."""
        self.see(*self.model.parameters())
        self.see(*(one for one in self.model.state_dict().values()))
        self.seen.append(self.optimizer.state_dict())
        self.reducer.close()
        assert not any(type(one) is Awaited for one in self.model.parameters())
        return self.seen


def same(one: Any, other: Any) -> bool:
    """Whether two values have the same bits."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


# ------------------------------------------------------------------------------------------------------------ loops


put_off: list[int] = []


def _plain(job: Job, has_rare: bool = True) -> None:
    schedule = LinearDecay(job.optimizer, 8, warmup_steps=2)
    for step in range(5):
        job.optimizer.zero_grad()
        job.backward(is_rare=has_rare and step % 3 == 1)
        job.optimizer.step()
        put_off.append(job.due())
        schedule.step()


def _model_zeroes(job: Job) -> None:
    for step in range(4):
        job.model.zero_grad()
        job.backward(is_rare=step == 1)
        job.optimizer.step()


def _zeroes_stay(job: Job) -> None:
    """Gradients of zeros are no absent ones: momentum goes on."""
    for step in range(5):
        job.optimizer.zero_grad(set_to_none=False)
        job.backward(is_rare=step == 1)
        job.optimizer.step()


def _zeroed_after_the_step(job: Job) -> None:
    for step in range(5):
        job.backward(is_rare=step == 1)
        job.optimizer.step()
        job.optimizer.zero_grad()
        job.seen.append([one.grad is None for one in job.model.parameters()])


def _never_zeroed(job: Job) -> None:
    for _ in range(4):
        job.backward()
        job.optimizer.step()


def _clips(job: Job) -> None:
    for _ in range(3):
        job.optimizer.zero_grad()
        job.backward()
        job.see(nn.utils.clip_grad_norm_(job.model.parameters(), 0.5))
        job.optimizer.step()


def _reads_gradients(job: Job) -> None:
    for _ in range(3):
        job.optimizer.zero_grad()
        job.backward()
        job.optimizer.step()
        job.see(*(one.grad for one in job.model.parameters() if one.grad is not None))


def _accumulates(job: Job) -> None:
    for _ in range(3):
        job.optimizer.zero_grad()
        for _ in range(2):
            with job.reducer.no_sync():
                job.backward()
        job.backward()
        job.optimizer.step()


def _leaves_gradients_to_the_step(job: Job) -> None:
    """All passes under no_sync: the step averages."""
    for _ in range(3):
        job.optimizer.zero_grad()
        with job.reducer.no_sync():
            job.backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
        job.backward()
        job.optimizer.step()


def _steps_alone(job: Job) -> None:
    """A step under no_sync is this rank's own."""
    for _ in range(3):
        job.optimizer.zero_grad()
        job.backward()
        job.optimizer.step()
        with job.reducer.no_sync():
            job.optimizer.zero_grad()
            job.backward()
            job.optimizer.step()


def _two_passes(job: Job) -> None:
    """The second one's graph is there before the first one ends, and its gradients come on top of averages."""
    for _ in range(3):
        job.optimizer.zero_grad()
        losses = [job.model(job.tokens()) for _ in range(2)]
        job.pause()
        for loss in losses:
            loss.backward()
        job.optimizer.step()


def _skips_steps(job: Job) -> None:
    for step in range(4):
        job.optimizer.zero_grad()
        job.backward()
        if step % 2:
            job.optimizer.step()


def _steps_twice(job: Job) -> None:
    """The second step has no pass of its own, and averages what is left of the first: nothing."""
    for _ in range(2):
        job.optimizer.zero_grad()
        job.backward()
        job.optimizer.step()
        job.optimizer.step()


def _closure(job: Job) -> None:
    def closure() -> torch.Tensor:
        job.optimizer.zero_grad()
        loss = job.model(job.tokens())
        job.pause()
        loss.backward()
        return loss

    for _ in range(3):
        job.see(job.optimizer.step(closure))  # type: ignore[arg-type]


def _scales(job: Job) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    for step in range(4):
        job.optimizer.zero_grad()
        loss = job.model(job.tokens())
        job.pause()
        scaler.scale(loss).backward()
        if step % 2:
            scaler.unscale_(job.optimizer)
        scaler.step(job.optimizer)
        scaler.update()


def _averages_weights(job: Job) -> None:
    """Reads parameters right after the step, without a forward pass."""
    mean = torch.optim.swa_utils.AveragedModel(job.model)
    for _ in range(3):
        job.optimizer.zero_grad()
        job.backward()
        job.optimizer.step()
        mean.update_parameters(job.model)
    job.see(*mean.parameters())


def _copies(job: Job) -> None:
    for _ in range(3):
        job.optimizer.zero_grad()
        job.backward()
        job.optimizer.step()
        twin = copy.deepcopy(job.model)
        assert not any(type(one) is Awaited for one in twin.parameters())
        job.see(*twin.parameters())
        saved = io.BytesIO()
        torch.save({"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()}, saved)
        job.backward()
        job.optimizer.step()
        saved.seek(0)
        loaded = torch.load(saved)
        job.see(*loaded["model"].values())
        job.seen.append(loaded["optimizer"])
        job.model.load_state_dict(loaded["model"])
        job.optimizer.load_state_dict(loaded["optimizer"])


def _pickles(job: Job) -> None:
    for _ in range(2):
        job.optimizer.zero_grad()
        job.backward()
        job.optimizer.step()
        saved = io.BytesIO()
        torch.save(list(job.model.parameters()), saved)
        saved.seek(0)
        job.see(*torch.load(saved, weights_only=False))


def _evaluates(job: Job) -> None:
    for _ in range(3):
        job.optimizer.zero_grad()
        job.backward()
        job.optimizer.step()
        with torch.inference_mode(), torch.autocast("cpu"):
            job.see(job.model(torch.arange(10).reshape(2, 5)))


def _regularises(job: Job) -> None:
    """Parameters in functions, before the forward pass."""
    for _ in range(3):
        job.optimizer.zero_grad()
        weight = sum(one.square().sum() for one in job.model.parameters() if one.requires_grad)
        loss = job.model(job.tokens()) + 0.01 * weight
        job.see(loss)
        job.pause()
        loss.backward()
        job.optimizer.step()


def _changes_weights(job: Job) -> None:
    for _ in range(3):
        job.optimizer.zero_grad()
        job.backward()
        job.optimizer.step()
        with torch.no_grad():
            for one in job.model.parameters():
                one.clamp_(-0.5, 0.5)
            job.model.norm.weight.data.mul_(0.9)


def _changes_hyperparameters(job: Job) -> None:
    for step in range(4):
        job.optimizer.zero_grad()
        job.backward()
        job.optimizer.step()
        for group in job.optimizer.param_groups:
            group["lr"] = 0.001 * (step + 1)
            group["weight_decay"] = 0.1 * step


def _has_step_hooks(job: Job) -> None:
    """Hooks of the optimizer that change gradients, use parameters before and after the step, or raise."""
    uses: list[Callable[[], object]] = [
        lambda: nn.utils.clip_grad_norm_(job.model.parameters(), 0.1),
        lambda: job.see(job.model.norm.weight),
        list,
        lambda: [][0],
    ]
    for use in uses:
        before = job.optimizer.register_step_pre_hook(lambda *_, use=use: (use(), None)[1])
        after = job.optimizer.register_step_post_hook(
            lambda *_: job.see(job.model.norm.weight, job.model.norm.weight.grad)
        )
        job.optimizer.zero_grad()
        job.backward()
        try:
            job.optimizer.step()
        except IndexError:
            job.seen.append("raised")
        job.optimizer.zero_grad()
        job.see(job.model.scale)
        before.remove()
        after.remove()


def _another_thread_reads(job: Job) -> None:
    for _ in range(3):
        job.optimizer.zero_grad()
        job.backward()
        job.optimizer.step()
        threads = [threading.Thread(target=lambda: [one.sum() for one in job.model.parameters()]) for _ in range(2)]
        for thread in threads:
            thread.start()
        job.see(*job.model.parameters())
        for thread in threads:
            thread.join()


def _waits(job: Job) -> None:
    for _ in range(3):
        job.optimizer.zero_grad()
        job.backward()
        job.optimizer.step()
        job.reducer.synchronise()
        assert job.due() == 0 and not any(type(one) is Awaited for one in job.model.parameters())
        job.reducer.average()


LOOPS = (
    *(
        _plain,
        _model_zeroes,
        _zeroes_stay,
        _zeroed_after_the_step,
        _never_zeroed,
        _clips,
        _reads_gradients,
        _accumulates,
    ),
    *(_leaves_gradients_to_the_step, _steps_alone, _two_passes, _skips_steps, _steps_twice, _closure, _scales),
    *(_averages_weights, _copies, _pickles, _evaluates, _regularises, _changes_weights, _changes_hyperparameters),
    *(_has_step_hooks, _another_thread_reads, _waits),
)


# ------------------------------------------------------------------------------------------------------------ tests


def test_optimizers() -> None:
    """Parameters, losses and the optimizer's state have the bits of a loop that averages with all_reduce and steps at once."""
    assert ranks.run(_compare_optimizers, count=2, timeout_s=120) == [{}, {}]


def test_whatever_a_script_does_between() -> None:
    """All that it sees, and all that it ends with, has the bits of the same script without ``optimizer=``."""
    assert ranks.run(_compare_loops, count=2, timeout_s=120) == [{}, {}]


def test_options() -> None:
    """Small buckets, a tuner, 16 bits on the wire; checkpoints that run a pass within the pass or not; several optimizers, of
    which one does not overlap."""
    assert ranks.run(_compare_options, count=2, timeout_s=120) == [{}, {}]


def test_more_ranks() -> None:
    """With sums that are exact in any order, three ranks have the bits of a plain loop as well."""
    ranks.run(_more_ranks, count=3, timeout_s=120)


def test_overlaps() -> None:
    """The step is put off when averages are under way, and a part of the model is stepped while the rest still travels."""
    ranks.run(_overlaps, count=2)


def test_refusals() -> None:
    """What cannot step in parts, or uses parameters unseen, is refused with a reason; so is a rank that overlaps alone."""
    ranks.run(_refusals, count=2)


def test_a_pass_that_raises() -> None:
    """A rank whose pass raises drops the step on all ranks, which hear of it when they use a parameter: none is stepped, and the
    next step is right."""
    ranks.run(_raises, count=2)


def test_a_rank_that_dies() -> None:
    """Parameters stay as they were before the step if none was stepped; what is used then raises, once."""
    with ranks.Ranks(_dies, count=2) as job:
        outcomes = job.outcomes(timeout_s=60)
    assert outcomes[0].ok and outcomes[1].exit_code == 7, outcomes[0]


def test_a_failure_between_two_steps() -> None:
    """Parameters that were stepped are usable; those that never will be raise whenever they are used, until they get a value."""
    ranks.run(_between_two_steps, count=2)


def test_the_group_ends_first() -> None:
    """destroy_process_group() makes the last step: a script may save its model after that."""
    ranks.run(_ends_first, count=2)


# ------------------------------------------------------------------------------------------------------------ ranks


def _compare_optimizers() -> dict[str, str]:
    dist.init_process_group("penstock")
    warnings.simplefilter("ignore")
    found = {}
    for name, make in OPTIMIZERS.items():
        # torch's fused SGD cannot step a parameter with momentum and one without together.
        has_rare = name != "sgd fused"
        loop = functools.partial(_plain, has_rare=has_rare)
        found[name] = _difference(_loop_of_all_reduces(make, has_rare), _run(loop, True, make))
    # In most steps this rank was not the late one.
    assert sum(bool(count) for count in put_off) > 20, put_off
    dist.destroy_process_group()
    return {name: text for name, text in found.items() if text}


def _compare_loops() -> dict[str, str]:
    dist.init_process_group("penstock")
    warnings.simplefilter("ignore")
    found = {loop.__name__: _difference(*(_run(loop, overlaps) for overlaps in (False, True))) for loop in LOOPS}
    dist.destroy_process_group()
    return {name: text for name, text in found.items() if text}


def _compare_options() -> dict[str, str]:
    dist.init_process_group("penstock")
    warnings.simplefilter("ignore")
    runs: dict[str, Callable[[bool], list[Any]]] = {
        "small buckets": lambda overlaps: _run(_plain, overlaps, bucket_bytes=256),
        "tune": lambda overlaps: _run(_plain, overlaps, tune=True, bucket_bytes=1024),
        "wire": lambda overlaps: _run(_plain, overlaps, wire=torch.bfloat16),
        "reentrant": lambda overlaps: _run(_plain, overlaps, model=_checkpointed(True)),
        "not reentrant": lambda overlaps: _run(_plain, overlaps, model=_checkpointed(False)),
        "several optimizers": _several_optimizers,
        "compiled": lambda overlaps: _run(_compiles, overlaps),
    }
    found = {name: _difference(run(False), run(True)) for name, run in runs.items()}
    dist.destroy_process_group()
    return {name: text for name, text in found.items() if text}


def _checkpointed(kind: bool) -> nn.Module:
    torch.manual_seed(5)
    return Net(reentrant=kind)


def _run(loop: Loop, overlaps: bool, make: Any = OPTIMIZERS["adamw"], **options: Any) -> list[Any]:
    job = Job(overlaps, make, **options)
    loop(job)
    return job.result()


def _difference(plain: list[Any], other: list[Any]) -> str:
    if same(plain, other):
        return ""
    if len(plain) != len(other):
        return f"{len(plain)} and {len(other)} values"
    at = next(at for at, (one, two) in enumerate(zip(plain, other, strict=True)) if not same(one, two))
    return f"rank {dist.get_rank()}: value {at} of {len(plain)}: {plain[at]} and {other[at]}"


def _loop_of_all_reduces(make: Callable[[Any], torch.optim.Optimizer], has_rare: bool) -> list[Any]:
    """A loop without a reducer."""
    torch.manual_seed(5)
    model = Net()
    for one in (*model.parameters(), *model.buffers()):
        dist.broadcast(one.detach(), 0)
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = make(trained)
    schedule = LinearDecay(optimizer, 8, warmup_steps=2)
    data = torch.Generator().manual_seed(100 + dist.get_rank())
    seen: list[Any] = []
    for step in range(5):
        optimizer.zero_grad()
        loss = model(torch.randint(11, (2, 5), generator=data), has_rare and step % 3 == 1)
        seen.append(loss.item())
        loss.backward()
        for one in trained:
            if one.grad is not None:
                dist.all_reduce(one.grad, dist.ReduceOp.AVG)
        optimizer.step()
        schedule.step()
    seen += [one.detach().clone() for one in model.parameters()]
    seen += [one.detach().clone() for one in model.state_dict().values()]
    return [*seen, optimizer.state_dict()]


def _compiles(job: Job) -> None:
    """Compiled code uses parameters unseen, so steps are not put off from then on; the first time some are."""
    torch._dynamo.reset()
    compiled = torch.compile(job.model, backend="eager")
    for step in range(5):
        job.optimizer.zero_grad()
        loss = (job.model if step < 2 else compiled)(job.tokens())
        job.see(loss)
        job.pause()
        loss.backward()
        job.optimizer.step()
        assert step < 2 or job.due() == 0


def _several_optimizers(overlaps: bool) -> list[Any]:
    torch.manual_seed(5)
    model = Net()
    parts = [[model.embed.weight, model.scale], [*model.body.parameters()], [*model.attention.parameters()]]
    makes = [OPTIMIZERS["sgd"], OPTIMIZERS["adam"], OPTIMIZERS["adamw"]]
    optimizers = [make(part) for make, part in zip(makes, parts, strict=True)]
    reducer = GradientReducer(model, optimizer=optimizers[:2] if overlaps else None)
    data = torch.Generator().manual_seed(100 + dist.get_rank())
    for step in range(4):
        for one in optimizers:
            one.zero_grad()
        loss = model(torch.randint(11, (2, 5), generator=data))
        time.sleep(0.02 * (step % 2 == dist.get_rank()))
        loss.backward()
        for one in optimizers:
            one.step()
    reducer.close()
    return [one.detach().clone() for one in model.parameters()]


class Exact(nn.Module):
    """Gradients that are whole numbers, so that sums are exact in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(one.weight * x).sum() for one in self.layers]).sum()


def _more_ranks() -> None:
    dist.init_process_group("penstock")
    ends = []
    for overlaps in (False, True):
        torch.manual_seed(5)
        model = Exact()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        reducer = GradientReducer(model, optimizer=optimizer if overlaps else None, bucket_bytes=128)
        for step in range(6):
            optimizer.zero_grad()
            loss = model(torch.full((4, 4), float(dist.get_rank() + step)))
            time.sleep(0.02 * (step % 3 == dist.get_rank()))
            loss.backward()
            optimizer.step()
        reducer.close()
        ends.append([one.detach().clone() for one in model.parameters()])
    assert same(*ends)
    dist.destroy_process_group()


def _overlaps() -> None:
    dist.init_process_group("penstock")
    store = dist.distributed_c10d._get_default_store()
    job = Job(True, OPTIMIZERS["sgd"])
    before = job.model.embed.weight.detach().clone()
    tokens = torch.arange(10).reshape(2, 5)
    loss = job.model(tokens)
    if dist.get_rank() == 1:
        store.wait(["stepped"])
    loss.backward()
    job.optimizer.step()
    if dist.get_rank() == 0:
        # Rank 1 has not begun its pass.
        assert job.due() == sum(one.requires_grad for one in job.model.parameters())
        assert type(job.model.embed.weight) is Awaited and isinstance(job.model.embed.weight, nn.Parameter)
        # What tells nothing of the value does not wait.
        assert next(job.model.parameters()).device.type == "cpu" and job.model.embed.weight.shape == (11, 8)
        job.optimizer.zero_grad()
        assert job.due()
        store.set("stepped", "")
    assert not torch.equal(job.model.embed.weight, before)
    assert type(job.model.embed.weight) is nn.Parameter
    with torch.no_grad():
        value = job.model(tokens)
    values = [torch.zeros(()) for _ in range(2)]
    dist.all_gather(values, value)
    assert values[0] == values[1]
    job.reducer.close()
    dist.destroy_process_group()


class Unknown(torch.optim.SGD):
    """May do anything."""


class Stated(torch.optim.SGD):
    steps_by_parameter = True

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def _refusals() -> None:
    dist.init_process_group("penstock")
    model = Net()
    trained = [one for one in model.parameters() if one.requires_grad]
    refused: list[tuple[str, Any]] = [
        ("Unknown may compute", Unknown(trained, lr=0.1)),
        ("LBFGS may compute", torch.optim.LBFGS(trained)),
        ("takes optimizers of torch, not str", "adam"),
        ("differentiable", torch.optim.SGD(trained, lr=0.1, differentiable=True)),
        ("two of the optimizers", [torch.optim.SGD(trained, lr=0.1), torch.optim.SGD(trained[:1], lr=0.1)]),
        ("has none of the parameters", torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)),
    ]
    for text, optimizer in refused:
        with pytest.raises(ConfigError, match=text):
            GradientReducer(model, optimizer=[optimizer] if isinstance(optimizer, str) else optimizer)
    embedding = nn.Embedding(3, 3, sparse=True)
    both = nn.ModuleList([embedding, nn.Linear(3, 3)])
    with pytest.raises(ConfigError, match="sparse"):
        GradientReducer(both, optimizer=torch.optim.SGD(both.parameters(), lr=0.1))
    scripted = nn.ModuleList([torch.jit.script(nn.Linear(3, 3))])
    with pytest.raises(ConfigError, match="scripted"):
        GradientReducer(scripted, optimizer=torch.optim.SGD(scripted.parameters(), lr=0.1))
    # One that says that it can, and whose step calls that of torch, hooks and all.
    assert same(_run(_plain, False, _stated), _run(_plain, True, _stated))
    alone = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    reducer = GradientReducer(alone, optimizer=optimizer if dist.get_rank() else None)
    with pytest.raises(PenstockError, match="optimizer="):
        alone(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        reducer.synchronise()
    dist.destroy_process_group()


def _stated(parameters: Any) -> torch.optim.Optimizer:
    return Stated(parameters, lr=0.1, momentum=0.9)


class Halts(torch.autograd.Function):
    """Raises in the middle of a pass."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, *__: Any) -> Any:
        # The other ranks have the last layer's gradient, and it is agreed on.
        store = dist.distributed_c10d._get_default_store()
        store.wait(["handed over"])
        raise RuntimeError("halt")


def _layers(bucket_bytes: int = 64) -> tuple[nn.Sequential, torch.optim.Optimizer, GradientReducer]:
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, GradientReducer(model, optimizer=optimizer, bucket_bytes=bucket_bytes)


def _raises() -> None:
    dist.init_process_group("penstock")
    store = dist.distributed_c10d._get_default_store()
    model, optimizer, reducer = _layers()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    before = [one.detach().clone() for one in model.parameters()]
    optimizer.zero_grad()
    if dist.get_rank() == 1:
        with pytest.raises(RuntimeError, match="halt"):
            model[3](Halts.apply(model[2](torch.ones(1, 4)))).sum().backward()
    else:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        store.set("handed over", "")
        with pytest.raises(Mismatch, match="backward pass of rank 1 raised"):
            model(torch.ones(1, 4))
    assert same([one.detach() for one in model.parameters()], before)
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    now = [one.detach().clone() for one in model.parameters()]
    assert not same(now, before)
    for one in now:
        others = [torch.zeros_like(one) for _ in range(2)]
        dist.all_gather(others, one)
        assert torch.equal(*others)
    reducer.close()
    dist.destroy_process_group()


def _dies() -> None:
    dist.init_process_group("penstock", timeout=timedelta(seconds=40))
    store = dist.distributed_c10d._get_default_store()
    model, optimizer, reducer = _layers()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    before = [one.detach().clone() for one in model.parameters()]
    optimizer.zero_grad()
    if dist.get_rank() == 1:
        store.wait(["stepped"])
        os._exit(7)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    store.set("stepped", "")
    with pytest.raises(PeerLost):
        model(torch.ones(1, 4))
    assert same([one.detach() for one in model.parameters()], before)
    assert all(type(one) is nn.Parameter for one in model.parameters())
    reducer.close()


def _between_two_steps() -> None:
    """On rank 0 the reducer's channels are cut off when two of eight gradients have come back."""
    dist.init_process_group("penstock", timeout=timedelta(seconds=40))
    store = dist.distributed_c10d._get_default_store()
    model, optimizer, reducer = _layers()
    saved = {name: one.clone() for name, one in model.state_dict().items()}
    loss = model(torch.ones(1, 4)).sum()
    if dist.get_rank() == 1:
        store.wait(["stepped"])
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        overlap = reducer._overlap
        assert overlap is not None and overlap._pending is not None and len(overlap._pending.due) == 8
        overlap._reducer = _HalfWay(overlap._reducer, {0, 1})  # type: ignore[assignment]
        store.set("stepped", "")
        with pytest.raises(PeerLost, match="cut off"):
            reducer.synchronise()
        assert type(model[3].bias) is nn.Parameter and not torch.equal(model[3].bias.detach(), saved["3.bias"])
        for _ in range(2):
            with pytest.raises(PeerLost, match="cut off"):
                model(torch.ones(1, 4))
        with pytest.raises(PeerLost, match="cut off"):
            model.state_dict()
        model.load_state_dict(saved)
        assert same(dict(model.state_dict()), saved)
        assert overlap._pending is None and type(model[0].weight) is nn.Parameter
    else:
        reducer.synchronise()
    dist.barrier()
    dist.destroy_process_group()


class _HalfWay:
    """The engine's reducer, of which only these gradients come back."""

    def __init__(self, reducer: Any, indices: set[int]) -> None:
        self._reducer, self._indices = reducer, indices

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def which_averaged(self, indices: list[int]) -> list[int]:
        self._reducer.averaged(sorted(self._indices)).wait()
        return [index for index in indices if index in self._indices]

    def averaged(self, indices: list[int]) -> Any:
        raise PeerLost("the rank was cut off")


def _ends_first() -> None:
    dist.init_process_group("penstock")
    model, optimizer, _ = _layers()
    before = model[0].weight.detach().clone()
    loss = model(torch.ones(1, 4)).sum()
    time.sleep(0.05 * dist.get_rank())
    loss.backward()
    optimizer.step()
    dist.destroy_process_group()
    assert not torch.equal(model.state_dict()["0.weight"], before)
