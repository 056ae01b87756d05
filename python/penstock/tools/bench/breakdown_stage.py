"""One stage of a pipeline that notes by its own clock what it does (`breakdown_stages`)."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from penstock.tools.bench.breakdown_rank import compute_for
from penstock.tools.bench.breakdown_stages import Notes, Stages
from penstock.tools.bench.planted import core_of


def train(plan: Stages, folder: Path) -> None:
    rank = int(os.environ["RANK"])
    os.sched_setaffinity(0, {core_of(rank)})
    torch.set_num_threads(1)
    notes: list[Notes] = []

    class Passes(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
            compute_for(plan.forward[rank])
            return given * 1.0

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            compute_for(plan.backward[rank])
            return gradient

    class Stage(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            return Passes.apply(self.weight * given)  # type: ignore[no-untyped-call,no-any-return]

    class Optimizer(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            with noted("optimizer"):  # the recorder's hooks, in which torch's profiler starts and stops, are not in it
                compute_for(plan.optimizer)
                return super().step(closure)

    @contextmanager
    def noted(phase: Literal["backward", "optimizer"]) -> Iterator[None]:
        start_ns = time.monotonic_ns()
        yield
        notes[-1][phase] += time.monotonic_ns() - start_ns

    def receive() -> torch.Tensor:
        tensor = torch.empty(length)
        issued_ns = time.monotonic_ns()
        work = dist.irecv(tensor, 1 - rank)
        assert work is not None
        start_ns = time.monotonic_ns()
        work.wait()
        notes[-1]["received"].append((issued_ns, start_ns, time.monotonic_ns()))
        return tensor

    def send(tensor: torch.Tensor) -> None:
        notes[-1]["sent"].append(time.monotonic_ns())
        work = dist.isend(tensor, 1 - rank)
        assert work is not None
        sends.append((work, tensor))

    dist.init_process_group(plan.backend)
    length = int(plan.mebibytes * 2**18)
    stage = Stage()
    optimizer = Optimizer(stage.parameters(), lr=1e-6)
    batch = torch.ones(length)
    previous_ns = time.monotonic_ns()
    for _ in range(plan.steps):
        notes.append(Notes(forward=0, backward=0, optimizer=0, step=0, received=[], sent=[], waited=[]))
        sends: list[tuple[dist.Work, torch.Tensor]] = []
        passed: list[tuple[torch.Tensor, torch.Tensor]] = []
        compute_for(plan.other)
        optimizer.zero_grad()
        begun_ns = 0
        for _ in range(plan.micro_batches):
            given = batch if rank == 0 else receive().requires_grad_()
            begun_ns = begun_ns or time.monotonic_ns()
            states = stage(given)
            passed.append((given, states))
            if rank == 0:
                send(states.detach())
        for given, states in passed:
            gradient = receive() if rank == 0 else torch.ones(length)
            if not notes[-1]["forward"]:
                stood = (end_ns - start_ns for _, start_ns, end_ns in notes[-1]["received"] if start_ns > begun_ns)
                notes[-1]["forward"] = time.monotonic_ns() - begun_ns - sum(stood)
            with noted("backward"):
                states.backward(gradient)
            if rank == 1:
                assert given.grad is not None
                send(given.grad)
        start_ns = time.monotonic_ns()
        for work, _ in sends:
            work.wait()
        notes[-1]["waited"].append((start_ns, time.monotonic_ns()))
        optimizer.step()
        notes[-1]["step"] = time.monotonic_ns() - previous_ns
        previous_ns += notes[-1]["step"]
    dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(notes))


if __name__ == "__main__":
    train(Stages(**json.loads(sys.argv[1])), Path(sys.argv[2]))
