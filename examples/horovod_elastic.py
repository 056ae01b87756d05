"""Training that goes back to its last commit when an operation fails, and goes on. Start it on two processes:

torchrun --standalone --nproc-per-node=2 examples/horovod_elastic.py --fail-at 30
"""

from __future__ import annotations

import argparse

import torch

import penstock.horovod.torch as hvd


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--fail-at", type=int, default=-1, help="let one operation fail after this many steps")
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

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> float:
        loss = torch.zeros(())
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
                if state.step >= args.steps:
                    break
            else:
                sampler.set_epoch(sampler.epoch + 1)
        return float(hvd.allreduce(loss.detach(), name="loss"))

    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, step=0)
    state.register_reset_callbacks([lambda: print(f"rank {hvd.rank()} of {hvd.size()} starts again")])
    loss = train(state)
    if hvd.rank() == 0:
        print(f"loss {loss:.4f} after {state.step} steps")


if __name__ == "__main__":
    main()
