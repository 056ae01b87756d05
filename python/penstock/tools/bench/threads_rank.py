"""One rank of `penstock bench threads`: messages one way, and all-reduces, with the processor time of each I/O thread.

Standard output takes one JSON object a line.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penstock.tools.bench.program import say
from penstock.torch import stats


def main() -> None:
    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("penstock")
    rank = dist.get_rank()
    tensor = torch.ones(options["bytes"] // 4)

    def one_way() -> None:
        if rank == 0:
            dist.send(tensor, 1)
        else:
            dist.recv(tensor, 0)

    _measure("send" if rank == 0 else "receive", one_way, options["operations"])
    assert float(tensor[-1]) == 1.0, "a wrong message"
    _measure("all-reduce", lambda: dist.all_reduce(tensor), options["operations"])
    assert float(tensor[-1]) == 2.0 ** (options["operations"] + _WARM_UP), "a wrong sum"
    dist.destroy_process_group()


def _measure(what: str, act: Callable[[], Any], operations: int) -> None:
    for _ in range(_WARM_UP):
        act()
    dist.barrier()
    before, began = _counters(), time.perf_counter()
    for _ in range(operations):
        act()
    seconds, after = time.perf_counter() - began, _counters()
    spent = {key: [b - a for a, b in zip(before[key], after[key], strict=True)] for key in before}
    # Of the threads' time, what they slept in poll counts for neither.
    busy_s = [cpu_s + waited_s for cpu_s, waited_s in zip(spent["cpu_s"], spent["waited_s"], strict=True)]
    say(what=what, operations=operations, seconds=seconds / operations, busy_s=busy_s, **spent)


def _counters() -> dict[str, list[float]]:
    """By I/O thread, in seconds."""
    threads = stats()["threads"]
    return {
        "cpu_s": _processor_times(),
        "locked_s": [thread["locked_s"] for thread in threads],
        "waited_s": [thread["waited_s"] for thread in threads],
    }


def _processor_times() -> list[float]:
    """Seconds that each I/O thread has run, the first one first."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        name = (task / "comm").read_text().strip()
        if name == "penstock" or name.removeprefix("penstock-").isdigit():
            found[name] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return [found[name] for name in sorted(found, key=lambda name: (len(name), name))]


_WARM_UP = 3

if __name__ == "__main__":
    main()
