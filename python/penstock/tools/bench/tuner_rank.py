"""One rank of `penstock bench tuner`: tunes, then measures every setting of a grid, then the choices against the grid's best.

All of it happens in one process on one link, minutes apart at most. A step is what the tuner takes for one: from the end of
a backward pass to the end of the next, on the slowest rank. Rank 0 writes one JSON object a line to standard output.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from penstock.tools.bench.training_rank import MODELS
from penstock.torch import GradientReducer
from penstock.training.tune import Options, Setting, Space, State


def main() -> None:
    options = json.loads(sys.argv[1])
    dist.init_process_group("penstock")
    with tempfile.TemporaryDirectory() as neighbours, tempfile.TemporaryDirectory() as nothing:
        # Whose rank 0 has tuned a like model before.
        _tune("neighbour", _make(options, like=True), neighbours, options)
        default = _tune("default", _make(options), nothing, options)
        remembered = _tune("remembered", _make(options), neighbours, options)
    step, reducer = _trainer(_make(options), tune=False)
    space = Space.from_json(default["record"]["space"])
    grid = _grid(space, options["stride"])
    medians = {setting: statistics.median(_block(step, reducer, setting, options["grid_steps"])) for setting in grid}
    best = min(medians, key=lambda setting: medians[setting])
    if dist.get_rank() == 0:
        rows = [{"setting": setting.to_json(), "seconds": seconds} for setting, seconds in medians.items()]
        _say(phase="grid", best=best.to_json(), settings=rows, size=space.size)
    contenders = {
        "grid": best,
        "default": Setting.from_json(default["setting"]),
        "remembered": Setting.from_json(remembered["setting"]),
        "untuned": space.default,
    }
    turns = list(contenders)
    for turn in range(options["pairs"]):
        # Whoever follows another one differs from turn to turn.
        turns = turns[1:] + turns[:1] if turn % 2 else turns[::-1]
        seconds = {name: _block(step, reducer, contenders[name], options["pair_steps"]) for name in turns}
        _say(phase="turn", turn=turn, seconds=seconds)
    dist.barrier()
    dist.destroy_process_group()


def _tune(name: str, model: tuple[nn.Module, Any], cache: str, options: dict[str, Any]) -> dict[str, Any]:
    """Train until the tuner has chosen."""
    os.environ["XDG_CACHE_HOME"] = cache
    step, reducer = _trainer(model, tune=Options(budget=options["budget"], seed=options["seed"]))
    tuner: Any = reducer.tuner
    start, began = tuner.session.start, time.perf_counter()
    while tuner.state is State.TUNING:
        step()
        tuner = reducer.tuner
    took = time.perf_counter() - began
    done = {
        "phase": name,
        "setting": tuner.best.to_json(),
        "start": start.to_json(),
        "steps": len(tuner.session.costs),
        "budget": tuner.session.options.budget,
        "seconds": took,
        "record": tuner.record(),
    }
    _say(**done)
    dist.barrier()
    reducer.close()
    return done


def _trainer(model: tuple[nn.Module, Any], tune: Any) -> tuple[Callable[[], None], GradientReducer]:
    module, data = model
    reducer = GradientReducer(module, tune=tune)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-6)

    def step() -> None:
        optimizer.zero_grad()
        module(*data).backward()
        optimizer.step()

    return step, reducer


def _block(step: Callable[[], None], reducer: GradientReducer, setting: Setting, count: int) -> list[float]:
    """Seconds of so many steps under a setting, of the slowest rank each; the step after the change is left out."""
    reducer.apply(setting)
    ends = []
    for _ in range(count + 1):
        step()
        ends.append(time.perf_counter())
    seconds = torch.tensor([after - before for before, after in itertools.pairwise(ends)], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    taken: list[float] = seconds.tolist()
    return taken


def _grid(space: Space, stride: int) -> list[Setting]:
    """Every combination of every so many values of the ordered axes, their ends included, and all of the others."""
    axes = []
    for axis in space.axes:
        last = len(axis.values) - 1
        keep = sorted({*range(0, last, stride), last}) if axis.ordered else range(last + 1)
        axes.append([axis.values[index] for index in keep])
    names = [axis.name for axis in space.axes]
    return [Setting(**dict(zip(names, values, strict=True))) for values in itertools.product(*axes)]


def _make(options: dict[str, Any], like: bool = False) -> tuple[nn.Module, Any]:
    """The model and what it trains on; `like`: another model, like it."""
    torch.manual_seed(0)
    if options["model"] != "linear":
        make, batch = MODELS[options["model"]]
        module = make()
        if like:
            module.add_module("more", nn.Linear(64, 64))
        return module, batch(options["batch"])
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(options["layers"] - like)]
    return _Sum(nn.Sequential(*layers)), (torch.randn(options["batch"], WIDTH),)


class _Sum(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.body(data).square().mean()


def _say(**message: Any) -> None:
    if dist.get_rank() == 0:
        print(json.dumps(message), flush=True)


WIDTH = 512
"""A layer has 1 MiB of gradients and next to nothing to compute: the link decides."""

if __name__ == "__main__":
    main()
