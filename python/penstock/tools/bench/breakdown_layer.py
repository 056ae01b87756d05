"""One rank of a tensor and expert parallel model that notes by its own clock what it does (`breakdown_layers`)."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penstock.profiling.breakdown import EMBEDDING
from penstock.tools.bench.breakdown_layers import EXPERT, TENSOR, Layers, Notes, Waited
from penstock.tools.bench.breakdown_rank import compute_for
from penstock.tools.bench.planted import core_of


def train(plan: Layers, folder: Path) -> None:
    rank = int(os.environ["RANK"])
    os.sched_setaffinity(0, {core_of(rank)})
    torch.set_num_threads(1)
    notes: list[Notes] = []

    def stand(into: list[Waited], purpose: str, operation: Callable[..., object], *tensors: torch.Tensor) -> None:
        issued_ns = time.monotonic_ns()
        operation(*tensors, group=groups[purpose])
        into.append(Waited(purpose, issued_ns, time.monotonic_ns()))

    def move(into: list[Waited]) -> None:
        stand(into, TENSOR, dist.all_reduce, partial)
        stand(into, EXPERT, dist.all_to_all_single, dealt, routed)

    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
            compute_for(plan.forward[rank])
            move(notes[-1]["in_forward"])
            return given * 1.0

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            compute_for(plan.backward[rank])
            move(notes[-1]["in_backward"])
            return gradient

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            states = self.weight * given
            for _ in range(plan.layers):
                states = Layer.apply(states)  # type: ignore[no-untyped-call]
            return states.sum()

    class Optimizer(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            start_ns = (
                time.monotonic_ns()
            )  # the recorder's hooks, in which torch's profiler starts and stops, come before
            compute_for(plan.optimizer)
            super().step(closure)
            notes[-1]["optimizer"] = time.monotonic_ns() - start_ns

    dist.init_process_group(plan.backend)
    # As Megatron-LM describes its groups.
    groups = {
        TENSOR: dist.new_group(group_desc="TENSOR_MODEL_PARALLEL_GROUP"),
        EXPERT: dist.new_group(group_desc="EXPERT_MODEL_PARALLEL_GROUP"),
        EMBEDDING: dist.new_group(group_desc="EMBEDDING_GROUP"),
    }
    partial = torch.ones(int(plan.tensor_mebibytes * 2**18))
    routed = torch.ones(2 * int(plan.expert_mebibytes * 2**17))
    dealt = torch.empty_like(routed)
    embedding = torch.ones(int(plan.embedding_mebibytes * 2**18))
    model = Model()
    optimizer = Optimizer(model.parameters(), lr=1e-6)
    batch = torch.ones(1)
    previous_ns = time.monotonic_ns()
    for _ in range(plan.steps):
        notes.append(Notes(forward=0, backward=0, optimizer=0, step=0, in_forward=[], in_backward=[], in_other=[]))
        compute_for(plan.other)
        optimizer.zero_grad()
        start_ns = time.monotonic_ns()
        loss = model(batch)
        middle_ns = time.monotonic_ns()
        loss.backward()
        notes[-1]["forward"] = middle_ns - start_ns
        notes[-1]["backward"] = time.monotonic_ns() - middle_ns
        stand(notes[-1]["in_other"], EMBEDDING, dist.all_reduce, embedding)
        optimizer.step()
        notes[-1]["step"] = time.monotonic_ns() - previous_ns
        previous_ns += notes[-1]["step"]
    dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(notes))


if __name__ == "__main__":
    train(Layers(**json.loads(sys.argv[1])), Path(sys.argv[2]))
