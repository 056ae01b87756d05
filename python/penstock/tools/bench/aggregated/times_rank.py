"""One rank of `penstock bench aggregated`: all-reduces in several ways by turns, checks the results, and tells times and what its
interface counted.

Standard output takes one JSON object a line.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from penstock.tools.bench.aggregated.rank import counted, group_of, say, start_together
from penstock.tools.bench.aggregated.times import STORM


def main() -> None:
    options = json.loads(sys.argv[1])
    # The default group is for barriers alone.
    dist.init_process_group("gloo")
    deployments = options["deployments"]
    groups = {
        way: group_of(deployments[way])
        if way in deployments
        else dist.new_group(backend="gloo" if way == "gloo" else "penstock")
        for way in options["ways"]
    }
    for turn in range(options["turns"] + 1):
        for way, group in groups.items():
            if way == STORM and dist.get_rank() == 0:
                Path(options["storm"]).touch()
            dist.barrier()
            before = counted(options["interface"])
            each = [
                _all_reduce(group, way, options["elements"], options["lead_s"]) for _ in range(options["operations"])
            ]
            dist.barrier()
            sent, received = (late - early for early, late in zip(before, counted(options["interface"]), strict=True))
            if way == STORM and dist.get_rank() == 0:
                Path(options["storm"]).unlink()
            busy, whole = (sum(span[at] for _, span in each) for at in (0, 1))
            # The first turn makes connections and measures round trips.
            say(
                way=way,
                turn=turn - 1,
                seconds=[took for took, _ in each],
                tensor_bytes=options["elements"] * DTYPES.get(way, torch.float32).itemsize,
                sent=sent,
                received=received,
                busy=busy / whole if whole else 0.0,
            )
    dist.destroy_process_group()


DTYPES = {"int16": torch.float16}


def _all_reduce(group: dist.ProcessGroup, way: str, elements: int, lead_s: float) -> tuple[float, tuple[float, float]]:
    """Seconds of one, and `_processor_s` from its start to its end on all ranks. All ways add small whole numbers exactly."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dtype = DTYPES.get(way, torch.float32)
    tensor = torch.arange(elements, dtype=torch.int32).remainder(13).add(rank).to(dtype)
    expected = (
        torch.arange(elements, dtype=torch.int32).remainder(13).mul(world).add(world * (world - 1) // 2).to(dtype)
    )
    start_together(lead_s)
    before = _processor_s()
    started = time.perf_counter()
    dist.all_reduce(tensor, group=group)
    took = time.perf_counter() - started
    dist.barrier()  # nobody checks while others still reduce
    busy, whole = (late - early for early, late in zip(before, _processor_s(), strict=True))
    dist.barrier()
    if not torch.equal(tensor, expected):
        wrong = int((tensor != expected).sum())
        raise SystemExit(f"{way}: rank {rank} got {wrong} of {elements} elements wrong")
    return took, (busy, whole)


def _processor_s() -> tuple[float, float]:
    """Seconds that all processors together were busy, and seconds in all."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / 100, sum(fields) / 100


if __name__ == "__main__":
    main()
