"""Train a small classifier with Horovod's API on Penstock. Start it on two processes:

torchrun --standalone --nproc-per-node=2 examples/horovod_train.py
"""

from __future__ import annotations

import argparse

import torch

import penstock.horovod.torch as hvd


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients in half the bytes")
    args = parser.parse_args()

    hvd.init()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    # More ranks see more samples a step: the learning rate grows with them.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
    )
    secret = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    # The last rank has fewer batches: it joins, and the others go on.
    batches = args.steps - (3 if hvd.rank() == hvd.size() - 1 else 0)
    loss = torch.zeros(())
    for _ in range(batches):
        inputs = torch.randn(32, 20)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), (inputs @ secret).argmax(1))
        loss.backward()
        optimizer.step()
    hvd.join()
    mean = hvd.allreduce(loss.detach(), name="loss").item()
    if hvd.rank() == 0:
        print(f"loss {mean:.4f} after {args.steps} steps on {hvd.size()} ranks")
    hvd.shutdown()


if __name__ == "__main__":
    main()
