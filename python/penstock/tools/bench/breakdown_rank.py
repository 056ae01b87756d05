"""One rank of a training that notes by its own clock what it does (`breakdown`)."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penstock.tools.bench.breakdown import Plan
from penstock.tools.bench.planted import core_of

Notes = dict[str, int]
"""Of a step, in ns: how long each phase took, by its name; and when the sums of the gradients and of what moves beside were
issued and had ended, on the machine's monotonic clock: ``issued``, ``ended``, ``beside_issued``, and ``beside_ended`` unless the
thread stood still then; and when the step waited for the latter: ``wait_begun``, ``wait_ended``."""


def train(plan: Plan, folder: Path) -> None:
    rank = int(os.environ["RANK"])
    os.sched_setaffinity(0, {core_of(rank)})
    torch.set_num_threads(1)
    # What notes the end of a sum would else wait for the interpreter's lock, for up to 5 ms.
    sys.setswitchinterval(1e-4)
    notes: list[Notes] = [{}]
    beside_sum = _Sum()

    @contextlib.contextmanager
    def noted(phase: str) -> Iterator[None]:
        start_ns = time.monotonic_ns()
        yield
        notes[-1][phase] = notes[-1].get(phase, 0) + time.monotonic_ns() - start_ns

    def compute(phase: str, ms: float) -> None:
        compute_for(ms + (plan.late if rank == plan.late_rank and phase == plan.late_phase else 0.0), beside_sum.look)

    class Data(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return plan.steps

        def __getitem__(self, index: int) -> torch.Tensor:
            compute("loading", plan.loading)
            return torch.full((1,), 1.0)

    class Passes(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
            if torch.is_inference_mode_enabled() or not given.requires_grad:
                compute_for(plan.evaluation / 2, beside_sum.look)
            else:
                compute("forward", plan.forward)
            return given * 1.0

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            compute_for(plan.backward, beside_sum.look)
            return gradient

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(int(plan.mebibytes * 2**18)))

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            return Passes.apply(self.weight[:1] * given).sum() + 0.0 * self.weight.sum()  # type: ignore[no-untyped-call,no-any-return]

    class Optimizer(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            with noted("optimizer"):  # the recorder's hooks, in which torch's profiler starts and stops, are not in it
                compute_for(plan.optimizer)
                return super().step(closure)

    def hook(_, bucket):  # type: ignore[no-untyped-def]  # DDP reads types, and understands no text
        """Issues the sum as DDP does, and notes when it was issued and had ended."""
        notes[-1]["issued"] = time.monotonic_ns()
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()

        def ended(done: Any) -> torch.Tensor:
            notes[-1]["ended"] = time.monotonic_ns()
            return done.value()[0]  # type: ignore[no-any-return]

        return future.then(ended)

    dist.init_process_group(plan.backend)
    beside_group = dist.new_group()
    saved = [torch.ones(1 << 23)]
    beside = torch.ones(int(plan.beside_mebibytes * 2**18))
    model = torch.nn.parallel.DistributedDataParallel(Model(), bucket_cap_mb=1000, gradient_as_bucket_view=True)
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
            note["beside_issued"] = time.monotonic_ns()
            work = dist.all_reduce(beside, group=beside_group, async_op=True)
            beside_sum.issued(work)
            start_ns = time.monotonic_ns()
            loss = model(batch)
            middle_ns = time.monotonic_ns()
            loss.backward()
            note["forward"] = middle_ns - start_ns
            note["backward"] = time.monotonic_ns() - middle_ns - (note["ended"] - note["issued"])
            note["wait_begun"] = time.monotonic_ns()
            work.wait()  # type: ignore[union-attr]
            note["wait_ended"] = time.monotonic_ns()
            if (ended_ns := beside_sum.ended()) is not None:
                note["beside_ended"] = ended_ns
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


class _Sum:
    """When a sum that moves beside the computing ends, by looking. A callback of Python's has the backend's thread wait for the
    interpreter's lock and the processor before it notes the end itself: 1.3 ms of 20."""

    def __init__(self) -> None:
        self._work: Any = None
        self._looked_ns = self._ended_ns = 0

    def issued(self, work: Any) -> None:
        self._work, self._looked_ns = work, time.monotonic_ns()

    def look(self) -> None:
        if self._work is not None:
            now_ns = time.monotonic_ns()
            if self._work.is_completed():
                self._work, self._ended_ns = None, (self._looked_ns + now_ns) // 2
            self._looked_ns = now_ns

    def ended(self) -> int | None:
        """When, now that it has been waited for. None: the thread stood still meanwhile."""
        found = self._ended_ns if self._work is None else None
        self._work = None
        return found


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
