"""One rank of `penstock bench plan --testbed`: all-reduces through a deployment, checks their results, and tells their times.

Standard output takes one JSON object a line.
"""

from __future__ import annotations

import json
import sys
import time

import torch
import torch.distributed as dist

from penstock.tools.bench.aggregated.rank import aggregated, group_of, say, start_together
from penstock.tools.bench.aggregated.striker import order


def main() -> None:
    options = json.loads(sys.argv[1])
    # The default group is for barriers alone.
    dist.init_process_group("gloo")
    group = group_of(options["deployment"])
    # It measures round trips, and opens the jobs whose ports the routes of flows need.
    _all_reduce(group, max(options["elements"] // 8, 1 << 18), 0)
    _ordered(options["state"], "begin")
    seconds = [_all_reduce(group, options["elements"], turn) for turn in range(options["operations"])]
    _ordered(options["state"], "end")
    counters = aggregated()
    if counters["fallback_operations"] or counters["operations"] <= options["operations"]:
        raise SystemExit(f"not all of it went through the servers: {counters}")
    say(seconds=seconds)
    dist.destroy_process_group()


def _ordered(state: str, what: str) -> None:
    """Returns on all ranks when the order is carried out."""
    dist.barrier()
    if dist.get_rank() == 0:
        order(state, order=what)()
    dist.barrier()


def _all_reduce(group: dist.ProcessGroup, elements: int, turn: int) -> float:
    """Seconds that an all-reduce takes. Small whole numbers are added exactly."""
    rank, world = dist.get_rank(), dist.get_world_size()
    base = torch.arange(elements, dtype=torch.int32).add(turn).remainder(13)
    tensor, expected = base.add(rank).float(), base.mul(world).add(world * (world - 1) // 2).float()
    start_together(0.02)
    started = time.perf_counter()
    dist.all_reduce(tensor, group=group)
    took = time.perf_counter() - started
    if not torch.equal(tensor, expected):
        raise SystemExit(f"rank {rank}: {int((tensor != expected).sum())} of {elements} elements are wrong")
    return took


if __name__ == "__main__":
    main()
