"""A training whose loss becomes infinite on one rank in the third step, and a rank that leaves early: see docs/debugging.md."""

import sys

import torch
import torch.distributed as dist

import penstock.torch

dist.init_process_group("penstock")
rank = dist.get_rank()
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
penstock.torch.GradientReducer(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, 6):
    data = torch.randn(4, 8)
    if "infinite" in sys.argv and step == 3 and rank == 1:
        data[0, 0] = torch.inf
    if "leave" in sys.argv and step == 3 and rank == 1:
        raise SystemExit("rank 1 has had enough")
    optimizer.zero_grad()
    model(data).square().mean().backward()
    optimizer.step()
print(f"rank {rank} has finished")
dist.destroy_process_group()
