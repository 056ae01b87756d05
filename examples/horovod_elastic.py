"""Training that goes back to its last commit when an operation fails, and goes on. Start it on two processes:

torchrun --standalone --nproc-per-node=2 examples/horovod_elastic.py --fail-at 30

Commits live in memory. With --checkpoint they are also written to disk, for a death: torchrun starts all ranks again, and they go
on from the file.

torchrun --standalone --nproc-per-node=2 --max-restarts=3 examples/horovod_elastic.py --checkpoint state.pt
"""

from __future__ import annotations

import argparse
import os

import torch

import penstock.horovod.torch as hvd


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--fail-at", type=int, default=-1, help="let one operation fail after this many steps")
    parser.add_argument("--checkpoint", default="", help="a file for rank 0, for going on after ranks have died")
    args = parser.parse_args()

    hvd.init()
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(512, 8))
    sampler = hvd.elastic.ElasticSampler(data, shuffle=True)
    loader = torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler)
    model = torch.nn.Linear(8, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size()), named_parameters=model.named_parameters()
    )
    failed = []

    def save(step: int) -> None:
        parts = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "sampler": sampler.state_dict(),
            "step": step,
        }
        torch.save(parts, f"{args.checkpoint}.new")
        os.replace(f"{args.checkpoint}.new", args.checkpoint)  # never half a file under this name
        print(f"step {step} is on disk", flush=True)

    step = 0
    if hvd.rank() == 0 and os.path.exists(args.checkpoint):
        # elastic.run gives it to the other ranks.
        parts = torch.load(args.checkpoint)
        model.load_state_dict(parts["model"])
        optimizer.load_state_dict(parts["optimizer"])
        sampler.load_state_dict(parts["sampler"])
        step = parts["step"]

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> float:
        loss = torch.zeros(())
        print(f"rank {hvd.rank()} of {hvd.size()}, process {os.getpid()}, goes on after step {state.step}", flush=True)
        while state.step < args.steps:
            for index, (inputs,) in enumerate(loader):
                optimizer.zero_grad()
                loss = (model(inputs).squeeze(1) - inputs.sum(1)).square().mean()
                loss.backward()
                optimizer.step()
                sampler.record_batch(index, len(inputs))
                state.step += 1
                if state.step == args.fail_at and not failed:
                    failed.append(state.step)
                    hvd.allreduce(torch.ones(1 + hvd.rank()), name="different on each rank")
                if state.step % 10 == 0:
                    state.commit()
                    if args.checkpoint and hvd.rank() == 0:
                        save(state.step)
                if state.step >= args.steps:
                    break
            else:
                sampler.set_epoch(sampler.epoch + 1)
        return float(hvd.allreduce(loss.detach(), name="loss"))

    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, step=step)
    state.register_reset_callbacks([lambda: print(f"rank {hvd.rank()} of {hvd.size()} starts again")])
    loss = train(state)
    if hvd.rank() == 0:
        print(f"loss {loss:.6e} after {state.step} steps")


if __name__ == "__main__":
    main()
