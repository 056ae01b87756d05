"""One rank of a training with something wrong in it (`planted`)."""

from __future__ import annotations

import gc
import json
import mmap
import os
import random
import sys
import time

import torch
import torch.distributed as dist

from penstock.tools.bench.planted import Plan, core_of


def train(plan: Plan) -> None:
    """A rank: a multilayer perceptron under DDP, on a core of its own as far as there are enough."""
    rank = int(os.environ["RANK"])
    os.sched_setaffinity(0, {core_of(rank)})
    torch.set_num_threads(1)
    is_mine = rank == plan.rank

    class Data(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return plan.steps * plan.batch

        def __getitem__(self, index: int) -> torch.Tensor:
            if plan.stall_ms and is_mine and index % plan.batch == 0:
                if plan.reads_disk:
                    read_for(plan.stall_ms / 1e3, plan.scratch)
                else:
                    # A disk of another host that answers late.
                    time.sleep(plan.stall_ms / 1e3)
            return torch.full((plan.width,), 1.0 / (1 + index))

    class Slow(torch.nn.Module):
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            end_s = time.thread_time() + plan.burn_ms / 1e3 * is_mine
            while time.thread_time() < end_s:
                pass
            return given

    dist.init_process_group(plan.backend)
    layers = [torch.nn.Linear(plan.width, plan.width) for _ in range(plan.layers)]
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(Slow(), *layers), bucket_cap_mb=plan.bucket_mb, gradient_as_bucket_view=True
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for batch in torch.utils.data.DataLoader(Data(), batch_size=plan.batch):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    del model, optimizer
    gc.collect()
    dist.destroy_process_group()


def read_for(seconds: float, path: str) -> None:
    """Read blocks anywhere in a file, past the page cache, as of a data set that is larger than memory."""
    until_s = time.monotonic() + seconds
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        # On a page's boundary, which O_DIRECT asks for.
        with mmap.mmap(-1, BLOCK) as buffer:
            places = os.fstat(file).st_size // BLOCK
            while time.monotonic() < until_s:
                os.preadv(file, [buffer], random.randrange(places) * BLOCK)
    finally:
        os.close(file)


BLOCK = 64 << 10


if __name__ == "__main__":
    train(Plan(**json.loads(sys.argv[1])))
