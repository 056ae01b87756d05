"""Train through deaths with checkpoints: torchrun restarts all workers, and they go on from the last one.

    torchrun --standalone --nproc-per-node=2 --max-restarts=3 examples/elastic_restart.py --checkpoints checkpoints

Kill a worker (kill -9) and watch. What is lost are the steps since the last checkpoint.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from penstock import elastic


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoints", default="checkpoints", help="folder; rank 0 alone needs it")
    parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()

    dist.init_process_group("penstock")
    torch.manual_seed(0)
    x = torch.randn(1000, 20)
    data = TensorDataset(x, x.sum(dim=1, keepdim=True))
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    sampler = elastic.ElasticSampler(data, batch_size=8)
    state = elastic.State(model=model, optimizer=optimizer, sampler=sampler)

    checkpoints = elastic.Checkpoints(args.checkpoints)
    found = checkpoints.load(state)
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    print(
        f"rank {dist.get_rank()} restart {restart}: {'goes on' if found else 'begins'} after step {state.step}",
        flush=True,
    )

    parallel = DistributedDataParallel(model)
    while state.step < args.steps:
        for inputs, targets in DataLoader(data, batch_sampler=sampler):
            loss = nn.functional.mse_loss(parallel(inputs), targets) * sampler.weight
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            state.commit()
            print(f"process {os.getpid()} rank {dist.get_rank()} step {state.step} loss {loss.item():.6f}", flush=True)
            if state.step % args.every == 0:
                checkpoints.save(state)
            if state.step == args.steps:
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
