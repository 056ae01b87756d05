"""One rank of `penstock bench aggregated --accuracy`: trains a model several times, and tells how accurate it has become.

Standard output takes one JSON object a line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from penstock.tools.bench.aggregated.rank import aggregated, group_of, say
from penstock.tools.bench.training_rank import residual_network
from penstock.workloads.char_gpt.data import CharData, random_batch

Batch = tuple[torch.Tensor, torch.Tensor]


class Task(NamedTuple):
    """What a model learns."""

    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    judged: list[Batch]
    """What it has not seen, in batches."""
    optimize: Callable[[nn.Module], torch.optim.Optimizer]


def main() -> None:
    options = json.loads(sys.argv[1])
    dist.init_process_group("gloo")
    task = TASKS[options["model"]](options)
    for seed in options["seeds"]:
        for way, deployment in {"gloo": None, **options["deployments"]}.items():
            right, of = _train(task, seed, options["steps"], deployment)
            say(way=way, seed=seed, accuracy=right / of, examples=of)
    dist.destroy_process_group()


def _train(task: Task, seed: int, steps: int, deployment: str | None) -> tuple[int, int]:
    """How many predictions are right, of how many. The same start and batches for the same seed."""
    group = dist.new_group(backend="gloo") if deployment is None else group_of(deployment)
    torch.manual_seed(seed)
    model = DistributedDataParallel(task.make(), process_group=group, gradient_as_bucket_view=True)
    optimizer = task.optimize(model)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, optimizer.param_groups[0]["lr"], total_steps=steps)
    batches = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    for _ in range(steps):
        data, target = task.batch(batches)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data).flatten(0, -2), target.flatten()).backward()
        optimizer.step()
        schedule.step()
    if deployment is not None:
        through = aggregated()
        if through["fallback"] or through["operations"] < steps:
            raise SystemExit(f"not all went through the server: {through['fallback'] or through['operations']}")
    found = _judge(model.module, task.judged)
    dist.barrier()
    del model
    dist.destroy_process_group(group)
    return found


@torch.no_grad()
def _judge(model: nn.Module, batches: list[Batch]) -> tuple[int, int]:
    model.eval()
    right = sum(int((model(data).argmax(-1) == target).sum()) for data, target in batches)
    return right, sum(target.numel() for _, target in batches)


class _LSTM(nn.Module):
    """Predicts the next character. 0.6 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(65, 64)
        self.lstm = nn.LSTM(64, 320, batch_first=True)
        self.out = nn.Linear(320, 65)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.lstm(self.embedding(tokens))[0])
        return out


def _vgg() -> nn.Module:
    """VGG11 with batch normalisation (Simonyan and Zisserman 2015, configuration A), a quarter as wide."""
    layers: list[nn.Module] = []
    before = 3
    for channels in (16, 0, 32, 0, 64, 64, 0, 128, 128, 0, 128, 128, 0):
        if channels == 0:
            layers.append(nn.MaxPool2d(2))
            continue
        layers += [nn.Conv2d(before, channels, 3, 1, 1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()]
        before = channels
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 10))


def _texts(_: dict[str, Any]) -> Task:
    text = CharData.load()
    judge = torch.Generator().manual_seed(0)
    return Task(
        _LSTM,
        lambda batches: random_batch(text.train, 16, 64, batches),
        [random_batch(text.validation, 64, 64, judge) for _ in range(16)],
        lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
    )


def _images(make: Callable[[], nn.Module], options: dict[str, Any]) -> Task:
    folder = Path(options["images"])
    data, labels = _read(folder / "train")
    judged = _read(folder / "test")

    def batch(batches: torch.Generator) -> Batch:
        chosen = torch.randint(len(data), (32,), generator=batches)
        picked = data[chosen]
        flipped = torch.rand(len(chosen), generator=batches) < 0.5
        picked[flipped] = picked[flipped].flip(-1)
        return picked, labels[chosen]

    return Task(
        make,
        batch,
        list(zip(judged[0].split(250), judged[1].split(250), strict=True)),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4),
    )


def _read(folder: Path) -> Batch:
    """Images of 32 x 32 pixels, a folder a class."""
    from PIL import Image

    data, labels = [], []
    for label, name in enumerate(sorted(each.name for each in folder.iterdir() if each.is_dir())):
        for path in sorted((folder / name).iterdir()):
            with Image.open(path) as image:
                data.append(np.asarray(image.convert("RGB").resize((32, 32))))
            labels.append(label)
    pixels = torch.from_numpy(np.stack(data)).permute(0, 3, 1, 2).float() / 255
    return (pixels - 0.47) / 0.25, torch.tensor(labels)


TASKS: dict[str, Callable[[dict[str, Any]], Task]] = {
    "lstm": _texts,
    "vgg": lambda options: _images(_vgg, options),
    "resnet": lambda options: _images(lambda: residual_network(blocks=2), options),
}

if __name__ == "__main__":
    main()
