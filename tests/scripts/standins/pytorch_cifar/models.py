"""A stand-in for the models of pytorch-cifar: one small network without batch normalisation, under the name in use.

Batch normalisation looks at the batch of one rank, so its loss would not be that of one device.
"""

from torch import nn


class SimpleDLA(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 8, 3, 4), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10))
