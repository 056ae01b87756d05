"""Generated pictures whose class shows in them, so that a model can learn; the same in every process."""

import os

import torch
from torch.utils.data import Dataset


class _Pictures(Dataset):
    shape = (1, 28, 28)

    def __init__(self, root=None, train=True, download=False, transform=None, target_transform=None):
        count = int(os.environ.get("STANDIN_SAMPLES", "64")) // (1 if train else 2)
        generator = torch.Generator().manual_seed(1 if train else 2)
        self.targets = torch.arange(count) % 10
        noise = torch.rand(count, *self.shape, generator=generator)
        self.pictures = 0.5 * noise + 0.05 * self.targets.view(-1, 1, 1, 1)
        self.data = self.pictures.squeeze(1)
        self.transform = transform

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        picture = self.pictures[index]
        return (self.transform(picture) if self.transform else picture), int(self.targets[index])


class MNIST(_Pictures):
    """28 x 28, one channel."""


class CIFAR10(_Pictures):
    """32 x 32, three channels."""

    shape = (3, 32, 32)


class FakeData(_Pictures):
    """Pictures of any size."""

    def __init__(self, image_size=(3, 64, 64), transform=None):
        self.shape = image_size
        super().__init__(transform=transform)
