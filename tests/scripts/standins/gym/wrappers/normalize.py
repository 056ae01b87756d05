"""Running mean and variance, as an object with the fields that scripts read."""

import numpy as np


class RunningMeanStd:
    def __init__(self, shape=()):
        self.mean, self.var, self.count = np.zeros(shape), np.ones(shape), 1e-4

    def update(self, batch):
        self.update_from_moments(np.mean(batch, 0), np.var(batch, 0), len(batch))

    def update_from_moments(self, mean, var, count):
        total = self.count + count
        self.mean = self.mean + (mean - self.mean) * count / total
        self.var, self.count = self.var + (var - self.var) * count / total, total
