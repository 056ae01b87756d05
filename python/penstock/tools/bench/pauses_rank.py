"""One rank of `penstock bench pauses`: all-reduces after pauses of several lengths, and the first ones of fresh groups.

Standard output takes one JSON object a line.
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from penstock.tools.bench.program import say


def main() -> None:
    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group(options["backend"])
    rank, world = dist.get_rank(), dist.get_world_size()
    tensor = torch.empty(options["bytes"] // 4)

    def once(group: Any) -> float:
        tensor.fill_(1.0)
        began = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        seconds = time.perf_counter() - began
        assert float(tensor[-1]) == world, "a wrong sum"
        return seconds

    say(rank=rank, of="the job", first_s=[once(None) for _ in range(_FIRST)])
    # The same order on all ranks, another one in each turn.
    order = random.Random(options["seed"])
    pauses = list(options["pauses"])
    for _ in range(options["turns"]):
        order.shuffle(pauses)
        for pause_s in pauses:
            # What follows the pause, and what follows that at once.
            time.sleep(pause_s)
            say(rank=rank, pause_s=pause_s, seconds=once(None), next_s=once(None))
    for _ in range(options["groups"]):
        group = dist.new_group()
        say(rank=rank, of="a group", first_s=[once(group) for _ in range(_FIRST)])
        dist.destroy_process_group(group)
    dist.destroy_process_group()


_FIRST = 5

if __name__ == "__main__":
    main()
