"""One rank of a training that notes by its own clock what it does (`breakdown`)."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penstock.tools.bench.breakdown import Plan
from penstock.tools.bench.planted import core_of

Notes = dict[str, Any]
"""Of a step, in ns: how long each phase took, by its name; and on the machine's monotonic clock when the sums of gradients were
issued and had ended, by bucket: ``issued``, ``ended``; the same of what moves beside: ``beside_issued``, and ``beside_ended``
unless the thread stood still then; and when the step waited for the latter: ``wait_begun``, ``wait_ended``."""


def train(plan: Plan, folder: Path) -> None:
    rank = int(os.environ["RANK"])
    os.sched_setaffinity(0, {core_of(rank)})
    torch.set_num_threads(1)
    # What notes the end of a sum would else wait for the interpreter's lock, for up to 5 ms.
    sys.setswitchinterval(1e-4)
    notes: list[Notes] = [{}]
    sums = _Sums()

    @contextlib.contextmanager
    def noted(phase: str) -> Iterator[None]:
        start_ns = time.monotonic_ns()
        yield
        notes[-1][phase] = notes[-1].get(phase, 0) + time.monotonic_ns() - start_ns

    def compute(phase: str, ms: float) -> None:
        compute_for(ms + (plan.late if rank == plan.late_rank and phase == plan.late_phase else 0.0), sums.look)

    class Data(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return plan.steps

        def __getitem__(self, index: int) -> torch.Tensor:
            compute("loading", plan.loading)
            return torch.full((1,), 1.0)

    class Passes(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, given: torch.Tensor, part: int) -> torch.Tensor:
            ctx.part = part
            if part > 0:
                pass  # the first part computes for all
            elif torch.is_inference_mode_enabled() or not given.requires_grad:
                compute_for(plan.evaluation / 2, sums.look)
            else:
                compute("forward", plan.forward)
            return given * 1.0

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            if ctx.part == plan.buckets - 1:
                # Called before what DDP registers later, which waits for the sums.
                torch.autograd.Variable._execution_engine.queue_callback(sums.stands_still)  # type: ignore[attr-defined]
            compute_for(plan.backward / plan.buckets, sums.look)
            return gradient, None

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            length = int(plan.mebibytes * 2**18 / plan.buckets)
            self.weights = torch.nn.ParameterList(torch.ones(length) for _ in range(plan.buckets))

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            for part, weight in enumerate(self.weights):
                given = Passes.apply(weight[:1] * given, part) + 0.0 * weight.sum()  # type: ignore[no-untyped-call]
            return given.sum()

    class Optimizer(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            with noted("optimizer"):  # the recorder's hooks, in which torch's profiler starts and stops, are not in it
                compute_for(plan.optimizer)
                return super().step(closure)

    def hook(_, bucket):  # type: ignore[no-untyped-def]  # DDP reads types, and understands no text
        """Issues the sum as DDP does."""
        result: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        buffer = bucket.buffer()
        sums.issue(lambda: dist.all_reduce(buffer, async_op=True), bucket.index(), buffer, result)
        return result

    dist.init_process_group(plan.backend)
    beside_group = dist.new_group()
    saved = [torch.ones(1 << 23)]
    beside = torch.ones(int(plan.beside_mebibytes * 2**18))
    # No bucket takes a second weight.
    model = torch.nn.parallel.DistributedDataParallel(Model(), bucket_cap_mb=1e-3, gradient_as_bucket_view=True)
    model.register_comm_hook(None, hook)
    optimizer = Optimizer(model.parameters(), lr=1e-6)
    previous_ns = time.monotonic_ns()
    with tempfile.TemporaryDirectory() as place:
        batches = iter(torch.utils.data.DataLoader(Data()))
        for number in range(plan.steps):
            with noted("other"):
                compute("other", plan.other)
            with noted("loading"):
                batch = next(batches)
            optimizer.zero_grad()
            note = notes[-1]
            beside_sum = sums.issue(lambda: dist.all_reduce(beside, group=beside_group, async_op=True))
            start_ns = time.monotonic_ns()
            loss = model(batch)
            middle_ns = time.monotonic_ns()
            loss.backward()
            note["forward"] = middle_ns - start_ns
            buckets = sums.of_buckets()
            note["issued"], note["ended"] = [one.issued_ns for one in buckets], [one.ended_ns for one in buckets]
            note["backward"] = time.monotonic_ns() - middle_ns - (max(note["ended"]) - max(note["issued"]))
            note["wait_begun"] = time.monotonic_ns()
            beside_sum.work.wait()
            note["wait_ended"] = time.monotonic_ns()
            note["beside_issued"] = beside_sum.issued_ns
            if beside_sum.ended_ns:
                note["beside_ended"] = beside_sum.ended_ns
            sums.forget()
            with noted("clip"):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if number % 4 == 3:
                model.module.eval()
                with torch.no_grad(), noted("evaluation"):
                    model.module(batch)
                    model.module(batch)
                model.module.train()
                with noted("checkpoint"):
                    torch.save(saved, os.path.join(place, "checkpoint.pt"))
            optimizer.step()
            note["step"] = time.monotonic_ns() - previous_ns
            previous_ns += note["step"]
            notes.append({})
    notes.pop()
    dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(notes))


@dataclass
class _Sum:
    work: Any
    issued_ns: int
    """Just before the backend was asked for it."""
    tensor: torch.Tensor | None = None
    result: torch.futures.Future[torch.Tensor] | None = None
    """What DDP waits for: the tensor, once it is the sum."""
    ended_ns: int = 0

    def ended(self, at_ns: int) -> None:
        self.ended_ns = at_ns
        if self.result is not None:
            self.result.set_result(self.tensor)


class _Sums:
    """When sums that move while the rank computes end, by looking. A callback of Python's has the backend's thread wait for the
    interpreter's lock and the processor before it notes the end itself: 1.3 ms of 20."""

    def __init__(self) -> None:
        self._moving: list[_Sum] = []
        self._buckets: dict[int, _Sum] = {}
        self._looked_ns = 0

    def issue(
        self,
        launch: Callable[[], Any],
        bucket: int | None = None,
        tensor: torch.Tensor | None = None,
        result: torch.futures.Future[torch.Tensor] | None = None,
    ) -> _Sum:
        issued_ns = time.monotonic_ns()
        one = _Sum(launch(), issued_ns, tensor, result)
        self._moving.append(one)
        if bucket is not None:
            self._buckets[bucket] = one
        return one

    def look(self) -> None:
        if self._moving:
            now_ns = time.monotonic_ns()
            for one in self._moving:
                if one.work.is_completed():
                    one.ended((max(self._looked_ns, one.issued_ns) + now_ns) // 2)
            self._moving = [one for one in self._moving if not one.ended_ns]
            self._looked_ns = now_ns

    def stands_still(self) -> None:
        """The rank has computed its gradients, and waits for their sums: a callback disturbs nothing now."""
        for one in self._moving:
            if one.result is not None:
                one.work.get_future().then(lambda _, one=one: one.ended(time.monotonic_ns()))
        self._moving = [one for one in self._moving if one.result is None]

    def of_buckets(self) -> list[_Sum]:
        """Of the backward pass that has ended, by their numbers."""
        return [self._buckets[number] for number in sorted(self._buckets)]

    def forget(self) -> None:
        """The step has waited for all."""
        self._moving, self._buckets = [], {}


def compute_for(ms: float, look: Callable[[], object] = lambda: None) -> None:
    """Operators of torch on this thread, for so long on the clock.

    Args:
        look: called between two of them.
    """
    matrix = torch.ones(192, 192)  # half a millisecond: few operators, so that samples are cheap and there are many
    end_ns = time.monotonic_ns() + round(1e6 * ms)
    while time.monotonic_ns() < end_ns:
        torch.mm(matrix, matrix)
        look()


if __name__ == "__main__":
    train(Plan(**json.loads(sys.argv[1])), Path(sys.argv[2]))
