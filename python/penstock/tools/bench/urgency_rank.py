"""One rank of `penstock bench urgency`: small all-reduces, alone and while bulk is on its way.

Standard output takes one JSON object a line.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from penstock.runtime.urgency import priority
from penstock.tools.bench.aggregated.rank import group_of
from penstock.tools.bench.program import say


def main() -> None:
    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group(options["backend"])
    rank, urgent, bulk = dist.get_rank(), options["urgent"], options["bulk"]
    if options["deployment"]:
        # Each has blocks of its own at the aggregators: in one group an operation's follow those of the one before.
        group, bulk_group = group_of(options["deployment"]), group_of(options["deployment"])
    else:
        group, bulk_group = dist.new_group(urgent), dist.new_group(bulk)
    large = torch.ones(options["bulk_bytes"] // 4) if rank in bulk else None
    small = torch.ones(options["bytes"] // 4) if rank in urgent else None

    def start() -> Callable[[], object]:
        if large is None:
            return lambda: None
        if not options["one_way"]:
            return dist.all_reduce(large, group=bulk_group, async_op=True).wait
        work = (dist.isend if rank == bulk[0] else dist.irecv)(large, bulk[1] if rank == bulk[0] else bulk[0])
        assert work is not None
        return work.wait

    def sum_small(begun: float, within_s: float, number: int | None) -> list[float]:
        """Seconds of each. The first element carries whether both ranks go on."""
        if small is None:
            return []
        taken = []
        with contextlib.nullcontext() if number is None else priority(number):
            while True:
                time.sleep(_PAUSE_S)
                small.fill_(1.0)
                small[0] = float(time.perf_counter() - begun < within_s)
                # Not to measure how much later the other rank wakes up.
                dist.barrier(group=group)
                started = time.perf_counter()
                dist.all_reduce(small, group=group)
                taken.append(time.perf_counter() - started)
                assert float(small[-1]) == len(urgent), "a wrong sum"
                if small[0] < len(urgent):
                    # The last one may have had the link for itself.
                    return taken[:-1] or taken

    def first_sum() -> list[float]:
        """The first that is urgent."""
        if small is None:
            return []
        dist.barrier(group=group)
        started = time.perf_counter()
        with priority(0):
            dist.all_reduce(small, group=group)
        return [time.perf_counter() - started]

    def measure(way: str, within_s: float) -> dict[str, Any]:
        if way == "first":
            time.sleep(_FORGOTTEN_S)
        dist.barrier()
        begun = time.perf_counter()
        wait = (lambda: None) if way == "alone" else start()
        time.sleep(_HEAD_S)
        seconds = first_sum() if way == "first" else sum_small(begun, within_s, 0 if way == "urgent" else None)
        wait()
        return {"seconds": seconds, "whole_s": time.perf_counter() - begun}

    bulk_s = []
    for _ in range(_BULKS):
        dist.barrier()
        begun = time.perf_counter()
        start()()
        bulk_s.append(time.perf_counter() - begun)
    # Alike on all ranks: the slowest one's.
    known = torch.tensor(sorted(bulk_s)[len(bulk_s) // 2])
    dist.all_reduce(known, op=dist.ReduceOp.MAX)
    say(bulk_s=bulk_s)
    within_s = _SHARE * float(known)
    ways = ["alone", "usual"]
    if options["backend"] == "penstock":
        ways += ["urgent", *(["first"] if options["first"] else [])]
    for turn in range(options["turns"]):
        for way in ways:
            say(way=way, turn=turn, **measure(way, within_s))
    dist.destroy_process_group()


# Between two small sums.
_PAUSE_S = 0.01
# Until the bulk has filled the link.
_HEAD_S = 0.15
# Of the bulk's time, in which small sums begin.
_SHARE = 0.8
_BULKS = 3
# Ten seconds after urgent bytes queues are as long as ever.
_FORGOTTEN_S = 11.0

if __name__ == "__main__":
    main()
