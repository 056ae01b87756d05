"""A stand-in for the data of super_resolution: generated pictures and their smaller versions."""

import torch
from torch.utils.data import TensorDataset


def _pairs(count, seed, factor):
    large = torch.rand(count, 1, 16, 16, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(torch.nn.functional.avg_pool2d(large, factor), large)


def get_training_set(factor):
    return _pairs(32, 1, factor)


def get_test_set(factor):
    return _pairs(10, 2, factor)
