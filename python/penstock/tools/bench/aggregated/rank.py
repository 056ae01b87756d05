"""Code that the rank processes of `penstock bench aggregated` share."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import penstock.torch


def group_of(deployment: str) -> dist.ProcessGroup:
    """A new group of all ranks, of the deployment in that file. Collective."""
    os.environ["PENSTOCK_DEPLOYMENT"] = deployment
    try:
        return dist.new_group(backend="penstock")
    finally:
        del os.environ["PENSTOCK_DEPLOYMENT"]


def aggregated() -> dict[str, Any]:
    """The engine's counters of the one group with a deployment."""
    [found] = penstock.torch.stats()["aggregated"].values()
    return dict(found)


def counted(interface: str) -> tuple[int, int]:
    """Bytes that an interface of this network namespace sent and received. Raises: SystemExit, when it is not there."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            fields = numbers.split()
            return int(fields[8]), int(fields[0])
    raise SystemExit(f"there is no interface {interface} here")


def start_together(lead_s: float) -> None:
    """Return on all ranks at one time, `lead_s` from now on rank 0. Collective, for ranks on one machine, whose clock they share.

    A barrier does not do that where links lose packets: whoever misses its last message goes on when TCP repeats it, after
    200 ms and more.
    """
    at = torch.tensor([time.monotonic() + lead_s], dtype=torch.float64)
    dist.broadcast(at, src=0)
    time.sleep(max(0.0, at.item() - time.monotonic()))


def say(**message: Any) -> None:
    """Print a JSON object with this rank, for the process that runs the ranks."""
    print(json.dumps({"rank": dist.get_rank(), **message}), flush=True)
