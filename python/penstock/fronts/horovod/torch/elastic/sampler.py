"""A sampler that shares what is left of an epoch among the ranks that are there."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import torch

from penstock.fronts.horovod.torch.mpi_ops import rank, size

__all__ = ["ElasticSampler"]


class ElasticSampler(torch.utils.data.Sampler):
    """Shares a data set among ranks, as ``DistributedSampler`` does, and remembers what was processed.

    Give it to `TorchState`, call `record_batch` after each batch, and `set_epoch` at the end of each epoch. After a reset, what
    was not processed in the epoch is shared anew.

    Args:
        dataset: of constant length.
        shuffle: whether each epoch has another order.
        seed: of the shuffle, the same on all ranks.
    """

    def __init__(self, dataset: Any, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: nothing of it is processed. At the end of the epoch before, so that a reset in between loses
        nothing."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """A batch is processed, on every rank one."""
        self.processed_num += batch_size * self.num_replicas

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def reset(self) -> None:
        """Share what is left among the ranks that there are now."""
        self.num_replicas = size()
        self.rank = rank()
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        self.remaining_indices = indices[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        # Where ranks cannot share equally some samples come again, as often as it takes: with one sample left, on every rank.
        padded = itertools.islice(itertools.cycle(self.remaining_indices), self.total_size)
        return itertools.islice(padded, self.rank, None, self.num_replicas)

    def __len__(self) -> int:
        return self.num_samples
