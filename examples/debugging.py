"""A training that breaks when asked to: a gradient becomes infinite on one rank, a rank leaves early, a weight differs, a rank
is slow. docs/guide/debugging.md shows what you see then."""

import sys
import time

import torch
import torch.distributed as dist

import penstock.torch

dist.init_process_group("penstock")
rank = dist.get_rank()
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
penstock.torch.GradientReducer(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, 31 if "slow" in sys.argv else 6):
    data = torch.randn(4, 8)
    if "infinite" in sys.argv and step == 3 and rank == 1:
        data[0, 0] = torch.inf
    if "leave" in sys.argv and step == 3 and rank == 1:
        raise SystemExit("rank 1 has had enough")
    if "differ" in sys.argv and step == 3 and rank == 1:
        model[0].weight.data[0, 0] += 0.001
    if "slow" in sys.argv and rank == 1:
        time.sleep(0.02)
    optimizer.zero_grad()
    model(data).square().mean().backward()
    optimizer.step()
print(f"rank {rank} has finished")
dist.destroy_process_group()
