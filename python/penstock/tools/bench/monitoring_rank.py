"""One rank of `penstock bench monitoring`: it trains, and rank 0 also starts a viewer and the process that reads counters.

Standard output takes one JSON object a rank.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from penstock.live.found import found
from penstock.tools.bench.monitoring import COUNTERS, MONITORS
from penstock.tools.bench.program import say
from penstock.tools.bench.training_rank import MODELS


def main() -> None:
    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("penstock")
    rank = dist.get_rank()
    make, batch = MODELS[options["model"]]
    model = nn.parallel.DistributedDataParallel(make())
    data = batch(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def train(seconds: float) -> int:
        """As many steps as rank 0 takes so long for."""
        until_s, steps, goes_on = time.monotonic() + seconds, 0, torch.ones(1)
        while goes_on:
            optimizer.zero_grad()
            model(*data).backward()
            optimizer.step()
            steps += 1
            goes_on.fill_(time.monotonic() < until_s)
            dist.broadcast(goes_on, 0)
        return steps

    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    with tempfile.TemporaryDirectory() as folder:
        watchers = _watchers([int(pid) for pid in pids], folder, options["period_ms"]) if rank == 0 else []
        try:
            train(options["warm_up_s"])
            before, began_ns = _used(watchers), time.monotonic_ns()
            steps = train(options["seconds"])
            taken_ns = time.monotonic_ns() - began_ns
            after = _used(watchers)
            if any(watcher.poll() is not None for watcher in watchers):
                raise RuntimeError("the viewer or the counters have ended early")
        finally:
            for watcher in watchers:
                watcher.kill()
                watcher.wait()
    say(rank=rank, steps=steps, ns=taken_ns, watchers={name: ns - before[name] for name, ns in after.items()})
    dist.destroy_process_group()


def _watchers(pids: list[int], folder: str, period_ms: int) -> list[subprocess.Popen[bytes]]:
    """The counters, which come first, and a viewer."""
    [url] = [each.url for each in found() if each.what.startswith(f"process {os.getpid()}:")]
    place = urllib.parse.urlsplit(url)
    events = urllib.parse.urlunsplit(place._replace(path="/events"))
    numbers = ",".join(map(str, pids))
    out = os.path.join(folder, "host-bench.jsonl")
    sampler = [sys.executable, "-m", "penstock.profiling.sampler", "--pids", numbers, "--out", out]
    viewer = [sys.executable, "-c", _VIEWER, events]
    return [subprocess.Popen([*sampler, "--period-ms", str(period_ms)]), subprocess.Popen(viewer)]


def _used(watchers: list[subprocess.Popen[bytes]]) -> dict[str, int]:
    """Processor time in ns, by the name of the watcher."""
    used = {
        thread.name: _ran_ns(f"self/task/{thread.native_id}")
        for thread in threading.enumerate()
        if thread.name in MONITORS
    }
    if watchers:
        used[COUNTERS] = _ran_ns(str(watchers[0].pid))
    return used


def _ran_ns(process: str) -> int:
    return int(Path("/proc", process, "schedstat").read_text().split()[0])


_VIEWER = "import sys, urllib.request\nfor line in urllib.request.urlopen(sys.argv[1]):\n    pass\n"

if __name__ == "__main__":
    main()
