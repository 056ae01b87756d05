"""One rank of `penstock bench readiness`: trains under a `GradientReducer` and tells when its rounds ran, and what it sent.

Standard output takes one JSON object a line.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import penstock
from penstock.torch import GradientReducer


def main() -> None:
    options = json.loads(sys.argv[1])
    dist.init_process_group("penstock")
    torch.manual_seed(dist.get_rank())
    _say(**_balance(options["tensors"], options["steps"]))
    layers = [nn.Linear(options["width"], options["width"]) for _ in range(options["tensors"] // 2)]
    model = nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))
    data = torch.randn(options["batch"], options["width"])
    reducer = GradientReducer(model, unit_bytes=options["unit_bytes"])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    for turn in range(options["turns"] + 1):
        before, seconds, ends = reducer.stats(), [], []
        for _ in range(options["steps"]):
            dist.barrier()
            started = time.perf_counter()
            optimizer.zero_grad()
            model(data).square().mean().backward()
            ends.append(time.time())
            optimizer.step()
            seconds.append(time.perf_counter() - started)
        counts = {key: reducer.stats()[key] - before[key] for key in ("rounds", "units", "steps")}
        # The first turn makes connections and buffers.
        _say(turn=turn - 1, seconds=seconds, ends=ends, rounds=_rounds(counts["rounds"]), counts=counts)
    dist.destroy_process_group()


def _rounds(count: int) -> list[list[float]]:
    """The last rounds, as far as the engine remembers: number, and when this rank joined it and had its answer, in seconds
    since 1970."""
    record = penstock.flight_record()
    ended = [
        [each["number"], record["time"] - each["issued_s_ago"], record["time"] - each["ended_s_ago"]]
        for each in record["operations"]
        if each["group"].endswith("/rounds") and each["ended_s_ago"] is not None
    ]
    return ended[-count:]


def _balance(tensors: int, steps: int) -> dict[str, Any]:
    """What this rank sends and receives for gradients of one element, of which the rounds are the greater part."""
    model = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(tensors)])
    reducer = GradientReducer(model)
    before = _moved()
    for _ in range(steps):
        torch.stack(list(model)).sum().backward()
    after = _moved()
    reducer.close()
    return {"sent": after[0] - before[0], "received": after[1] - before[1]}


def _moved() -> tuple[int, int]:
    streams = [stream for peer in penstock.stats()["peers"] for stream in peer["streams"]]
    return sum(each["sent_bytes"] for each in streams), sum(each["received_bytes"] for each in streams)


def _say(**message: Any) -> None:
    print(json.dumps({"rank": dist.get_rank(), **message}), flush=True)


if __name__ == "__main__":
    main()
