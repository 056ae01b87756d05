"""Batches of an epoch for any number of ranks.

The epoch is one permutation of the data set, and every step takes the next piece of it, cut into a part a rank. So the samples
that all ranks together have processed are always the beginning of the permutation, and one number records it: whatever ranks come
or go, the next step continues there. *Why not give each rank its own share of the epoch?* A death would then leave holes,
which must be remembered index by index and dealt out anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from penstock.errors import Config as ConfigError

__all__ = ["ElasticSampler", "cut"]


def cut(position: int, length: int, world: int, batch_size: int) -> list[tuple[int, int]]:
    """The samples of each rank in the step that begins at ``position`` of an epoch: (start, stop) by rank, one after the other.

    A whole step gives ``batch_size`` to each. The last one of an epoch shares out what is left, as evenly as it goes; where
    that is less than one a rank, the last ranks get nothing.
    """
    base, extra = divmod(min(world * batch_size, length - position), world)
    parts = []
    for rank in range(world):
        stop = position + base + (rank < extra)
        parts.append((position, stop))
        position = stop
    return parts


class ElasticSampler(Sampler[list[int]]):
    """This rank's batches of indices, for ``DataLoader(..., batch_sampler=sampler)``.

    Every index is in exactly one committed step of an epoch, through all changes of membership. Rank and world are those of
    the default process group when an iteration begins (one rank, if there is none); an iteration goes from the last
    committed step to the end of the epoch. `State.commit` advances by a batch, or by as many as it is told; after the last step
    of an epoch the next one begins. An iteration that begins when most of the last one's batches were not committed, though
    it went to its end, raises `penstock.errors.Config`: it would give them again.

    Args:
        data: the data set, or how many samples it has; the same on all ranks, always.
        batch_size: samples a rank and step. A step of the job takes ``batch_size * world``, so it changes with the world.
        shuffle: a new order every epoch, which follows from ``seed`` and the epoch alone.

    Attributes:
        epoch, position: where the next step begins; position counts samples of all ranks.
    """

    def __init__(self, data: Sized | int, batch_size: int, *, shuffle: bool = True, seed: int = 0) -> None:
        self.length = data if isinstance(data, int) else len(data)
        if self.length < 1 or batch_size < 1:
            raise ConfigError(f"{self.length} samples in batches of {batch_size}: both must be positive")
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.position = 0
        self._iteration = _Iteration()

    def __iter__(self) -> Iterator[list[int]]:
        last, self._iteration = self._iteration, _Iteration()
        last.check()
        own = self._iteration
        rank, world = _place()
        order, position = self._order(), self.position
        while position < self.length:
            parts = cut(position, self.length, world, self.batch_size)
            start, stop = parts[rank]
            own.given += 1
            # A rank that gets nothing still takes part in the step: it repeats a sample, and its weight is 0.
            yield order[start:stop].tolist() or order[position : position + 1].tolist()
            position = parts[-1][1]
        own.is_over = True

    def __len__(self) -> int:
        """Steps that are left of this epoch."""
        return -(-(self.length - self.position) // (self.batch_size * _place()[1]))

    @property
    def weight(self) -> float:
        """What to multiply this step's mean loss by, so that the average of the ranks' gradients is the gradient of the mean
        over the whole step's samples. It is 1 but in the last step of an epoch, whose batches may differ in size."""
        rank, world = _place()
        parts = cut(self.position, self.length, world, self.batch_size)
        return (parts[rank][1] - parts[rank][0]) * world / (parts[-1][1] - self.position)

    def advance(self, batches: int = 1) -> None:
        """All ranks have done the step that begins at ``position``, of so many batches; it ends with the epoch. `State.commit`
        calls this."""
        for _ in range(batches):
            self._iteration.commit()
            self.position = cut(self.position, self.length, _place()[1], self.batch_size)[-1][1]
            if self.position == self.length:
                self.epoch, self.position = self.epoch + 1, 0
                break

    def state_dict(self) -> dict[str, Any]:
        """Where the next step begins, for checkpoints and newcomers."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "length": self.length,
            "seed": self.seed,
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` gave. The batch size is this sampler's, which may be another."""
        if state["length"] != self.length:
            raise ConfigError(
                f"the state is of a data set with {state['length']} samples, and this one has {self.length}: a position "
                "in one means nothing in the other"
            )
        if state.get("shuffle", self.shuffle) != self.shuffle:
            raise ConfigError(
                f"the state is of a sampler with shuffle={state['shuffle']}, and this one has shuffle={self.shuffle}: a position "
                "in one order means nothing in the other"
            )
        self.epoch, self.position, self.seed = state["epoch"], state["position"], state["seed"]
        self._iteration = _Iteration()

    def check_alike(self, state: dict[str, Any]) -> None:
        """Raise if another rank's sampler, whose ``state_dict`` this is, cuts other steps: a rank would train on samples that
        another takes for its own."""
        theirs = state.get("batch_size")
        if theirs != self.batch_size:
            raise ConfigError(
                f"batch_size={self.batch_size} in this worker's ElasticSampler, and {theirs} in that of the worker whose state "
                "arrived: all workers must have the same"
            )

    def _order(self) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(self.length)
        generator = torch.Generator().manual_seed(self.seed * _EPOCHS + self.epoch)
        return torch.randperm(self.length, generator=generator)


class _Iteration:
    """How many batches an iteration has given, and how many of them are committed.

    A loader that reads ahead asks for more than it hands on, so a loop that is left early leaves batches that were given and are
    not committed: as many as were outstanding after its first commit, at the most. A loop that commits once for several batches
    leaves more than these, and half of all or more.
    """

    def __init__(self) -> None:
        self.given = self.committed = self.outstanding = 0
        self.is_over = False

    def commit(self) -> None:
        self.committed += 1
        if self.committed == 1:
            self.outstanding = self.given - 1

    def check(self) -> None:
        """Raise if batches that were trained on were not committed."""
        left = self.given - self.committed
        if self.is_over and self.committed and left > self.outstanding and 2 * left >= self.given:
            raise ConfigError(
                f"the last iteration gave {self.given} batches, and {self.committed} of them are committed; the rest would "
                "come again in this epoch. Where a step takes several batches, as with gradient accumulation, call "
                "state.commit(batches=n) with their number"
            )


def _place() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


# More epochs than any run has: neighbouring seeds share no order.
_EPOCHS = 1_000_003
