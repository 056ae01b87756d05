"""Proves that whatever befalls a rank, in whatever phase of a training step, ends in a clear error on every rank, or in a run
that goes on.

```text
                 forward   backward   reduction   between   optimizer
  killed            .         .           .          .          .       SIGKILL ┐ PeerLost that names it on every survivor,
  stopped           .         .           .          .          .       SIGSTOP │ in 5 s; then penstock.elastic goes on, and
  cut off           .         .           .          .          .       packets ┘ who comes back learns that it was left
  NaN               .         .           .          .          .       NotFinite on every rank, in this step or the next
  disagreement      .         .           .          .          .       Mismatch or Timeout on every rank
```
*backward*: in the middle of the pass, while buckets of the gradients that are ready already travel. *reduction*: the pass has
ended, and buckets travel. *between*: before the optimizer's step. *optimizer*: parameters are changed, the step is not committed.

All 25 cells run: killed on the memory of one host, stopped on TCP, cut off between emulated hosts. The front (`GradientReducer`,
`ddp_hook`) changes from cell to cell, so that each front meets every fault and every phase. Ranks are shared: a line of the
table is one job, which loses a rank in each phase, or fails and begins anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import os
import pathlib
import re
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ranks
from backends import ALL
from penstock import elastic
from penstock.errors import PenstockError
from penstock.tools import testbed
from penstock.torch import GradientReducer, ddp_hook
from penstock.training.elastic import membership

pytestmark = pytest.mark.timed  # every fault has to be known within a stated time

PHASES = ["forward", "backward", "reduction", "between", "optimizer"]
LATE = ["reduction", "between", "optimizer"]
"""The others may finish the step in which a rank is struck: nobody waits for it any more; in the reduction, once all ranks know
that all gradients are there."""
FAULTS = ["killed", "stopped", "cut off", "NaN", "disagreement"]

# As for plain operations (tests/test_faults.py). The limit is shorter than there, as in tests/test_elastic.py.
KNOWN_S = 5.0
QUICK = {"PENSTOCK_PEER_TIMEOUT": "2"}
# Two ranks are left in the end, to be compared.
WORLD = len(PHASES) + 2


def _front(fault: str, phase: str) -> str:
    return ("reducer", "ddp")[(FAULTS.index(fault) + PHASES.index(phase)) % 2]


# ----------------------------------------------------------------------------------------------- ranks that go away


def test_killed() -> None:
    """SIGKILL in each phase: one rank after the other, and the others go on each time, with the same bits."""
    with _elastic_job("killed", env=ALL["penstock"].env) as job:
        for phase in PHASES:
            job.strike(phase)
        job.finish()


def test_stopped() -> None:
    """SIGSTOP in each phase. A rank that is let go later learns that the others went on without it."""
    with _elastic_job("stopped", env=ALL["penstock-tcp"].env) as job:
        for phase in PHASES:
            victim = job.strike(phase)
            job.ranks.signal(victim, signal.SIGCONT)
        job.finish()
        job.assert_left_behind()


def test_cut_off(tmp_path: pathlib.Path) -> None:
    """Every packet from and to a rank's host is lost, in each phase: it too gets PeerLost. When the link is back, it learns that
    the others went on without it; if it does not come back, that the store cannot be reached."""
    with contextlib.ExitStack() as stack:
        # The last host keeps the store.
        bed = stack.enter_context(testbed.Testbed(hosts=WORLD + 1))
        gate = tmp_path / "gate"
        os.mkfifo(gate)
        job = stack.enter_context(_elastic_job("cut off", bed=bed, gate=str(gate)))
        for phase in PHASES:
            victim = job.strike(phase, by=lambda victim: _cut(bed, victim, gate))
            job.assert_failed(victim, phase, names=r"rank \d+")
            if phase != PHASES[-1]:
                bed.restore_link(victim)
        job.finish()
        cut = list(job.struck)[-1]
        job.struck.pop(cut)
        job.assert_left_behind()
        (outcome,) = job.ranks.outcomes(of=[cut], timeout_s=60, grace_s=None)
        assert outcome.raised is not None and outcome.raised.is_a("penstock.errors.Config"), str(outcome)
        assert "the store of elastic job 'default' is gone" in outcome.raised.text
        assert f"has not answered for {ANSWER_S:g} s" in outcome.raised.text


def _cut(bed: testbed.Testbed, host: int, gate: pathlib.Path) -> None:
    bed.drop_link(host)
    with open(gate, "w"):
        pass  # the victim reads to the end


@dataclasses.dataclass(frozen=True)
class Story:
    """What the ranks of an elastic job are told."""

    fault: str
    gate: str = ""
    """A rank that is to be cut off waits here until it is."""


@contextlib.contextmanager
def _elastic_job(fault: str, *, env: Any = None, bed: testbed.Testbed | None = None, gate: str = "") -> Any:
    def keep() -> dist.TCPStore:
        return dist.TCPStore(host, 0, None, True, wait_for_workers=False)

    if bed is None:
        host, env = "127.0.0.1", env or {}
        store = keep()
    else:
        host, env = bed.address(WORLD), {"PENSTOCK_INTERFACE": bed.interface}
        store = bed.inside(WORLD, keep)
    env = {**QUICK, **env, "PENSTOCK_ELASTIC_STORE": f"{host}:{store.port}", "PENSTOCK_LOG": "info"}
    with ranks.Ranks(_train_elastically, count=WORLD, args=(Story(fault, gate),), env=env, bed=bed) as started:
        yield _ElasticJob(started, fault)


class _ElasticJob:
    """A job of the class `_train_elastically`, seen from the test."""

    def __init__(self, started: ranks.Ranks, fault: str) -> None:
        self.ranks = started
        self.fault = fault
        self.alive = list(range(WORLD))
        self.struck: dict[int, float] = {}

    def strike(self, phase: str, by: Callable[[int], None] | None = None) -> int:
        """Wait until a process was struck in this phase, and for what it does to the others; returns which one it was."""
        world = len(self.alive)
        places = self.ranks.await_note(f"world {world}", deadline_s=60, of=self.alive)
        victim_rank = VICTIMS[phase] % world
        victim = self.alive[places.index(victim_rank)]
        (self.struck[victim],) = self.ranks.await_note(f"struck: {phase}", deadline_s=60, of=[victim])
        if by is not None:
            by(victim)
        self.alive.remove(victim)
        for survivor in self.alive:
            self.assert_failed(survivor, phase, names=rf"rank {victim_rank}\b", struck=victim)
        # They go on: the next generation is there.
        self.ranks.await_note(f"world {world - 1}", deadline_s=60, of=self.alive)
        return victim

    def assert_failed(self, process: int, phase: str, *, names: str, struck: int | None = None) -> None:
        ((kinds, text, at_s),) = self.ranks.await_note(f"failed: {phase}", deadline_s=60, of=[process])
        took_s = at_s - self.struck[process if struck is None else struck]
        told = f"{self.fault} in {phase}, process {process} after {took_s:.1f} s: {kinds[0]}: {text}"
        assert "PeerLost" in kinds, told
        assert re.search(names, text), told
        assert "group is unusable" in text, told
        assert took_s < KNOWN_S, told

    def finish(self) -> None:
        """The survivors have trained to the end, and have the same bits."""
        outcomes = self.ranks.outcomes(of=self.alive, timeout_s=60, grace_s=20)
        if not all(outcome.ok for outcome in outcomes):
            raise ranks.RanksFailed(outcomes)
        assert len({outcome.value for outcome in outcomes}) == 1, [outcome.value for outcome in outcomes]
        steps, _ = outcomes[0].value
        # One whole step in each generation, and two in the last. The one that was struck is repeated, and counts only where the
        # others may have finished it.
        whole = len(PHASES) + 2
        assert whole <= steps <= whole + len(LATE), steps

    def assert_left_behind(self) -> None:
        for outcome in self.ranks.outcomes(of=list(self.struck), timeout_s=60, grace_s=None):
            assert outcome.raised is not None and outcome.raised.is_a("LeftBehind"), str(outcome)
            assert "went on without this worker" in outcome.raised.text


# ------------------------------------------------------------------------------------------------ numbers and scripts


def test_not_a_number() -> None:
    """What is not finite is named by parameter, rank and step on every rank: in the step in which it comes up, or, where it
    comes up after the gradients were reduced, in the next."""
    env = {"PENSTOCK_CHECK": "nan"}
    for told in ranks.run(_fail_and_begin_anew, count=3, args=("NaN",), env=env, timeout_s=120):
        for phase, (kinds, text, took_s) in told.items():
            parameter, step = {
                "forward": ("last.bias", 2),
                "backward": ("first.bias", 2),
                "reduction": ("first.weight", "2 as float16, which goes over the wire"),
                "between": ("last.bias", 3),
                "optimizer": ("last.bias", 3),
            }[phase]
            assert "NotFinite" in kinds, (phase, kinds, text)
            parameter = parameter if _front("NaN", phase) == "reducer" else f"module.{parameter}"
            assert f"gradient of {parameter} on rank 1 holds NaN or infinity in step {step} " in text, (phase, text)
            assert took_s < KNOWN_S, (phase, took_s, text)


def test_disagreement() -> None:
    """One rank's script does something else than the others': Mismatch on every rank where both operations meet; where the rank
    waits in a group in which nobody else does anything, Timeout that names who is missing, or the loss of who gave up."""
    for rank, told in enumerate(ranks.run(_fail_and_begin_anew, count=3, args=("disagreement",), timeout_s=120)):
        for phase, (kinds, text, took_s) in told.items():
            if phase in ("forward", "backward"):
                assert took_s < TIMEOUT_S + KNOWN_S, (phase, took_s, text)
                # Who gives up first is told by the time-out; to the others that rank has left. If that is rank 1 and it is within
                # its pass, the others may hear first that the pass is dropped.
                is_dropped = phase == "backward" and "rank 1 says why it raised" in text
                assert {"Timeout", "PeerLost"} & set(kinds) or is_dropped, (phase, kinds, text)
                assert re.search("rank (0|2)" if rank == 1 else "rank 1", text), (phase, rank, text)
            else:
                assert "Mismatch" in kinds, (phase, rank, kinds, text)
                assert "rank 1" in text, (phase, rank, text)
                assert took_s < KNOWN_S, (phase, took_s, text)


# ------------------------------------------------------------------------------------------------------ on the ranks


def _train_elastically(story: Story) -> tuple[int, str]:
    torch.manual_seed(os.getpid())  # what ranks share in the end, they got from each other
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    state = elastic.State(model=model, optimizer=optimizer)
    membership._ANSWER_S = ANSWER_S
    options = {"window_s": 10.0, "rebuild_timeout_s": 20.0, "wait_s": 60.0, "check_every": 1000}
    elastic.run(lambda state: _generation(story, state), state, min_ranks=2, max_ranks=WORLD, **options)
    return state.step, _digest(model)


def _generation(story: Story, state: elastic.State) -> None:
    """Two steps; in the second one this generation's victim is struck in this generation's phase."""
    rank, world = dist.get_rank(), dist.get_world_size()
    ranks.note(f"world {world}", rank)
    phase = None if world == 2 else PHASES[WORLD - world]
    training = Training(state.model, state.optimizer, _front(story.fault, phase or "forward"))

    def strike(_: torch.Tensor) -> None:
        ranks.note(f"struck: {phase}", time.monotonic())
        if story.fault == "cut off":
            with open(story.gate) as gate:
                gate.read()
        else:
            os.kill(os.getpid(), signal.SIGKILL if story.fault == "killed" else signal.SIGSTOP)

    try:
        for step in (1, 2):
            if step == 2 and phase is not None and rank == VICTIMS[phase] % world:
                training.at(phase, strike)
            training.step(torch.full((4, WIDTH), 0.1 * (rank + 1)))
            state.commit()
        if phase is not None:
            training.step(torch.ones(4, WIDTH))
            raise AssertionError("nobody was struck")
    except PenstockError as error:
        ranks.note(f"failed: {phase}", ([cls.__name__ for cls in type(error).__mro__], str(error), time.monotonic()))
        raise
    finally:
        training.close()


def _fail_and_begin_anew(fault: str) -> dict[str, tuple[list[str], str, float]]:
    """What went wrong in each phase, and how long after it was made so; each phase in a process group of its own."""
    told = {}
    server = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for phase in PHASES:
        store = dist.PrefixStore(phase, server)
        dist.init_process_group(
            "penstock", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=TIMEOUT_S)
        )
        torch.manual_seed(1)
        model = Model()
        wire = torch.float16 if (fault, phase) == ("NaN", "reduction") else None
        training = Training(model, torch.optim.SGD(model.parameters(), lr=0.01), _front(fault, phase), wire)
        data = torch.full((4, WIDTH), 0.1 * (rank + 1))
        training.step(data)
        dist.barrier()
        began_s = time.monotonic()
        try:
            if fault == "NaN":
                if rank == 1:
                    _spoil(training, phase)
                training.step(data)
            else:
                _disagree(training, phase, data, other=rank == 1)
            training.step(data)
        except PenstockError as error:
            told[phase] = ([cls.__name__ for cls in type(error).__mro__], str(error), time.monotonic() - began_s)
        assert phase in told, f"nothing went wrong in {phase}"
        training.close()
        del training
        dist.destroy_process_group()
    return told


def _spoil(training: Training, phase: str) -> None:
    if phase == "reduction":
        # A number in float32, and none in float16, which is what travels.
        weight = training.model.first.weight
        training.hooks.append(weight.register_hook(lambda gradient: torch.full_like(gradient, 1e9)))
    else:
        training.at(phase, lambda tensor: tensor * torch.nan)


def _disagree(training: Training, phase: str, data: torch.Tensor, other: bool) -> None:
    """A step in which rank 1 does something else."""
    if phase in ("forward", "backward"):
        # An operation of which nobody else knows, as behind an `if rank == 1`.
        if other:
            training.at(phase, lambda _: dist.all_reduce(torch.ones(3)))
        training.step(data)
    elif phase == "reduction":
        training.reducer.set_bucket_bytes(BUCKET_BYTES // 2 if other else BUCKET_BYTES)
        training.step(data)
    elif phase == "between":
        # The norm of the gradients, in another dtype.
        norm = torch.ones(1, dtype=torch.float64 if other else torch.float32)
        training.at(phase, lambda _: dist.all_reduce(norm))
        training.step(data)
    else:
        # Another tensor of the optimizer's state.
        training.at(phase, lambda _: dist.broadcast(torch.ones(5 if other else 4), src=0))
        training.step(data)
        dist.barrier()


WIDTH, HIDDEN = 64, 8192
BUCKET_BYTES = 1 << 18
TIMEOUT_S = 4.0
# Longer than the others need to go on without one: it then hears of that, and does not give up its store.
ANSWER_S = 10.0
# Who is struck, in each phase: neighbours and not, the donor of the state too; modulo the world.
VICTIMS = {"forward": 1, "backward": 0, "reduction": 3, "between": -1, "optimizer": 1}


class Model(nn.Module):
    """Two layers of 2 MB, with something to do between them on both ways.

    The gradient of ``scale`` comes last, and is so small that it waits for the end of the pass: no step ends without that.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.first, self.last = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.on_the_way: Callable[[torch.Tensor], torch.Tensor] = lambda hidden: hidden
        self.on_the_way_back: Callable[[torch.Tensor], torch.Tensor] = lambda gradient: gradient

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        hidden = self.on_the_way(torch.tanh(self.first(data * self.scale)))
        return self.last(_Back.apply(hidden, self)).square().mean()


class _Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, data: torch.Tensor, model: Model) -> torch.Tensor:
        ctx.model = model
        return data.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.model.on_the_way_back(gradient), None


class Training:
    """Steps of a model whose gradients are reduced while they are made, with something that happens in a phase of the next."""

    def __init__(
        self, model: Model, optimizer: torch.optim.Optimizer, front: str, wire: torch.dtype | None = None
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.called: nn.Module = model
        if front == "ddp":
            self.called = DistributedDataParallel(model)
            self.reducer: GradientReducer = ddp_hook(self.called, bucket_bytes=BUCKET_BYTES, wire=wire)
        else:
            self.reducer = GradientReducer(model, bucket_bytes=BUCKET_BYTES, wire=wire)
        self.between: Callable[[], object] = lambda: None
        self.hooks: list[Any] = []

    def at(self, phase: str, happens: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        """Let it happen in that phase of the next step. It gets a tensor that passes by there, and may return another."""
        before, bias = self.reducer.stats()["buckets"], self.model.last.bias

        def passing(tensor: torch.Tensor) -> torch.Tensor:
            instead = happens(tensor)
            return tensor if instead is None else instead

        def back(gradient: torch.Tensor) -> torch.Tensor:
            self._await_buckets(before)
            return passing(gradient)

        def flushing() -> None:
            self._await_buckets(before + 8)
            happens(bias.grad)

        if phase == "forward":
            self.model.on_the_way = passing
        elif phase == "backward":
            self.model.on_the_way_back = back
        elif phase == "reduction":
            self.reducer._reducer = _Flush(self.reducer._reducer, flushing)
        elif phase == "between":
            self.between = lambda: bias.grad.copy_(passing(bias.grad))
        else:
            hook = self.optimizer.register_step_post_hook(lambda *_: bias.data.copy_(passing(bias.data)))
            self.hooks.append(hook)

    def step(self, data: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.called(data).backward()
        self.between()
        self.optimizer.step()

    def close(self) -> None:
        for hook in self.hooks:
            hook.remove()
        self.reducer.close()
        self.model.on_the_way = self.model.on_the_way_back = lambda tensor: tensor

    def _await_buckets(self, before: int) -> None:
        """Buckets of this step are under way."""
        deadline_s = time.monotonic() + 30
        while self.reducer.stats()["buckets"] <= before:
            assert time.monotonic() < deadline_s, "no bucket has started"


class _Flush:
    """A reducer before whose next flush something happens while buckets travel: the pass has ended, and nobody knows it yet. Only
    before the next one: who is struck once all gradients are agreed on ends the step, and meets the fault in the one after it."""

    def __init__(self, reducer: Any, flushing: Callable[[], None]) -> None:
        self._reducer, self._flushing = reducer, flushing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def flush(self) -> Any:
        flushing, self._flushing = self._flushing, lambda: None
        flushing()
        return self._reducer.flush()


def _digest(model: Model) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()
