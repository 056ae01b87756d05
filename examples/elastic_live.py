"""Train through deaths and arrivals without a restart: every worker is started by itself, and may come and go.

    python -m penstock.elastic.store &                       # prints PENSTOCK_ELASTIC_STORE=127.0.0.1:29400
    export PENSTOCK_ELASTIC_STORE=127.0.0.1:29400
    torchrun --nnodes=1 --standalone --max-restarts=3 examples/elastic_live.py &       # a worker; again for each one more

Kill a worker (kill -9): the others go on at once, and its torchrun starts it again as a newcomer.
"""

import argparse
import logging
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from penstock import elastic

X = torch.randn(1000, 20, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, X.sum(dim=1, keepdim=True))


def train(state: elastic.State) -> None:
    """Go on after the last committed step, with the ranks of this generation."""
    # What belongs to the group is made here, anew in every generation.
    parallel = DistributedDataParallel(state.model)
    while state.step < state.steps:
        for inputs, targets in DataLoader(DATA, batch_sampler=state.sampler):
            loss = nn.functional.mse_loss(parallel(inputs), targets) * state.sampler.weight
            loss.backward()
            state.optimizer.step()
            state.optimizer.zero_grad()
            print(
                f"rank {dist.get_rank()} of {dist.get_world_size()} process {os.getpid()} "
                f"step {state.step + 1} loss {loss.item():.6f}",
                flush=True,
            )
            state.commit()
            if state.step == state.steps:
                break


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--min-ranks", type=int, default=1)
    parser.add_argument("--max-ranks", type=int)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")

    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1))
    state = elastic.State(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
        sampler=elastic.ElasticSampler(DATA, batch_size=8),
        steps=args.steps,
    )
    elastic.run(train, state, min_ranks=args.min_ranks, max_ranks=args.max_ranks)
    weights = sum(parameter.double().sum().item() for parameter in model.parameters())
    print(f"process {os.getpid()} ends after step {state.step}, sum of weights {weights:.12f}", flush=True)


if __name__ == "__main__":
    main()
