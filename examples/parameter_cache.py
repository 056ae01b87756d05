"""A parameter cache: rank 0 serves it, and the other ranks push changes to it and pull it, each at its own pace.

torchrun --standalone --nproc-per-node 5 examples/parameter_cache.py
"""

import argparse

import torch
import torch.distributed as dist

import penstock
import penstock.endpoint


class Cache:
    """The parameters, and how many changes they have seen."""

    def __init__(self, elements: int) -> None:
        self.parameters = torch.zeros(elements)
        self.version = 0

    def change(self, call: penstock.endpoint.Incoming) -> None:
        # A new tensor each time: what a pull still sends of the old one does not change.
        self.parameters = self.parameters + torch.frombuffer(call.data, dtype=torch.float32)
        self.version += 1

    def pull(self, call: penstock.endpoint.Incoming) -> torch.Tensor:
        return self.parameters

    def tell_version(self, call: penstock.endpoint.Incoming) -> bytes:
        return str(self.version).encode()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--elements", type=int, default=1 << 20)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    dist.init_process_group("penstock")
    rank, workers = dist.get_rank(), dist.get_world_size() - 1
    if rank == 0:
        cache = Cache(options.elements)
        with penstock.endpoint.serve(
            "cache",
            requests={"version": cache.tell_version},
            pushes={"parameters": cache.change},
            pulls={"parameters": cache.pull},
        ):
            dist.barrier()  # the workers have done
        expected = float(options.steps * sum(range(1, workers + 1)))
        assert cache.version == workers * options.steps
        assert torch.equal(cache.parameters, torch.full_like(cache.parameters, expected))
        print(f"{cache.version} changes of {workers} workers: every parameter is {expected:.0f}")
    else:
        parameters = torch.empty(options.elements)
        with penstock.endpoint.connect("cache") as client:
            for _ in range(options.steps):
                client.pull("parameters", into=parameters).wait()
                change = torch.full_like(parameters, float(rank))  # what a worker would learn from its data
                client.push("parameters", change).wait()
            with penstock.priority(0):  # before the bulk of this rank's other calls
                version = bytes(client.request("version").wait()).decode()
            print(f"rank {rank} has made {options.steps} changes; the cache had seen {version} then")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
