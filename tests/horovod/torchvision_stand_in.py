"""As much of torchvision as Horovod's examples use: digits without a download, small models under the names of large ones."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import torch


class MNIST(torch.utils.data.Dataset):
    """Bright squares in one of ten places, which is their class, instead of handwritten digits."""

    def __init__(self, root: str, train: bool = True, download: bool = False, transform: Any = None) -> None:
        generator = torch.Generator().manual_seed(int(train))
        self.targets = torch.randint(0, 10, (640 if train else 160,), generator=generator)
        self.noise = torch.rand(len(self.targets), 28, 28, generator=generator) / 4
        self.transform = transform

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        target = int(self.targets[index])
        image = self.noise[index].clone()
        row, column = divmod(target, 5)
        image[4 + 12 * row : 12 + 12 * row, 2 + 5 * column : 7 + 5 * column] = 1.0
        return self.transform(image) if self.transform else image, target


class _Compose:
    def __init__(self, steps: list[Callable[[Any], Any]]) -> None:
        self.steps = steps

    def __call__(self, image: Any) -> Any:
        for step in self.steps:
            image = step(image)
        return image


class _ToTensor:
    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return image.unsqueeze(0)


class _Normalize:
    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        self.mean, self.std = mean[0], std[0]

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return (image - self.mean) / self.std


def _resnet50() -> torch.nn.Module:
    # Its shape at the ends, little in between.
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 7, stride=16),
        torch.nn.BatchNorm2d(4),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(4, 1000),
    )


def install() -> None:
    """Make ``import torchvision`` find these."""
    torchvision = types.ModuleType("torchvision")
    for name, members in {
        "datasets": {"MNIST": MNIST},
        "transforms": {"Compose": _Compose, "ToTensor": _ToTensor, "Normalize": _Normalize},
        "models": {"resnet50": _resnet50},
    }.items():
        module = types.ModuleType(f"torchvision.{name}")
        for member, value in members.items():
            setattr(module, member, value)
        setattr(torchvision, name, module)
        sys.modules[module.__name__] = module
    sys.modules["torchvision"] = torchvision
