"""One process of `penstock bench recording`: a rank of the job that is recorded, or of the one that is not. The jobs take turns,
a block of steps each; standard output takes one JSON object a block.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

from penstock.tools.bench.recording import JOBS
from penstock.tools.bench.training_rank import MODELS


def main() -> None:
    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder, job, rank, ranks = options["folder"], options["job"], options["rank"], options["ranks"]
    model, data = _workload(options["model"])
    if ranks > 1:
        store = dist.FileStore(os.path.join(folder, f"store-{job}"), ranks)
        dist.init_process_group(options["backend"], store=store, rank=rank, world_size=ranks)
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model(*data).backward()
        optimizer.step()

    turn = _Turn(folder, job, is_first=job == options["jobs"][0]) if rank == 0 else None
    for number in range(-options["warmup"], options["blocks"]):
        if turn:
            turn.take()
        if ranks > 1:
            dist.barrier()
        step()  # finds what the other job has left in the caches
        began, processor = time.perf_counter_ns(), time.process_time_ns()
        moments = [began]
        for _ in range(options["steps"]):
            step()
            moments.append(time.perf_counter_ns())
        used = time.process_time_ns() - processor
        if number >= 0:
            taken = [after - before for before, after in itertools.pairwise(moments)]
            print(
                json.dumps({"job": job, "rank": rank, "block": number, "ns": taken, "processor_ns": used}), flush=True
            )
        if ranks > 1:
            dist.barrier()
        if turn:
            turn.give()
    if ranks > 1:
        dist.destroy_process_group()


class _Turn:
    """A byte that two jobs hand to each other through pipes in the folder. A rank that waits for it sleeps."""

    def __init__(self, folder: str, job: str, *, is_first: bool) -> None:
        mine, other = (os.path.join(folder, name) for name in (job, JOBS[1 - JOBS.index(job)]))
        # For both, so that neither waits for the other to open it.
        self._mine, self._other = os.open(mine, os.O_RDWR), os.open(other, os.O_RDWR)
        if is_first:
            os.write(self._mine, b".")

    def take(self) -> None:
        os.read(self._mine, 1)

    def give(self) -> None:
        os.write(self._other, b".")


def _workload(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    if name in MODELS:
        make, batch = MODELS[name]
        return make(), batch(2)
    return _Layers(*(nn.Linear(32, 32) for _ in range(50))), (torch.randn(8, 32),)


class _Layers(nn.Sequential):
    """As many modules a millisecond as can be."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = torch.relu(layer(x))
        return x.sum()


if __name__ == "__main__":
    main()
