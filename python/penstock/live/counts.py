"""What this process counts of its training: steps, samples and tokens."""

from __future__ import annotations

import collections
import sys
import time
from typing import Any

from penstock.errors import Config

__all__ = ["Counts", "count", "counts"]


def count(*, samples: int = 0, tokens: int = 0) -> None:
    """Tell the live view what this rank's step trains on: it then has samples or tokens a second, of all ranks together. Call it
    once a step. Where no optimizer of torch steps, each call counts as a step. Costs a microsecond, also where nobody looks.

    Raises:
        penstock.errors.Config: a number is negative.
    """
    if samples < 0 or tokens < 0:
        raise Config(f"penstock.live.count(samples={samples}, tokens={tokens}): the numbers must not be negative")
    counts.samples += samples
    counts.tokens += tokens
    if not counts.follows_optimizer:
        counts.step()


class Counts:
    """Of one process. The training thread writes, the live view's thread reads."""

    def __init__(self) -> None:
        self.steps = 0
        self.samples = 0
        self.tokens = 0
        self.follows_optimizer = False
        """Steps of an optimizer count, and calls of `count` do not."""
        self._durations: collections.deque[float] = collections.deque(maxlen=_MOST)
        self._ended_s: float | None = None
        self._optimizer: int | None = None
        self._since: set[int] = set()
        self._began = False

    def begins(self, *_: Any) -> None:
        """An optimizer begins to step: torch's hook."""
        self._began = True

    def stepped(self, optimizer: Any, *_: Any) -> None:
        """An optimizer has stepped: torch's hook. Where a step of the training uses several, the same one counts each time, as
        long as none steps more often. A step() that calls that of its base class ends twice and counts once."""
        if not self._began:
            return
        self._began = False
        if not self.follows_optimizer:
            self.follows_optimizer = True
            self._ended_s = None
        number = id(optimizer)
        if number != self._optimizer:
            if self._optimizer is not None and number not in self._since:
                self._since.add(number)
                return
            self._optimizer = number
        self._since.clear()
        self.step()

    def step(self) -> None:
        """A step has ended."""
        now_s = time.perf_counter()
        if self._ended_s is not None:
            self._durations.append(now_s - self._ended_s)
        self._ended_s = now_s
        self.steps += 1

    def take(self) -> list[float]:
        """How long the steps since the last call took, in seconds; the last `_MOST` of them."""
        return [self._durations.popleft() for _ in range(len(self._durations))]

    def since_s(self) -> float | None:
        """How long ago the last step has ended; None: there was none."""
        return None if self._ended_s is None else time.perf_counter() - self._ended_s

    def follow(self) -> None:
        """Count the steps of torch's optimizers from now on, in a program that has torch. Once a process."""
        optimizers = sys.modules.get("torch.optim.optimizer")
        if optimizers is not None and not self._is_followed:
            self._is_followed = True
            optimizers.register_optimizer_step_pre_hook(self.begins)
            optimizers.register_optimizer_step_post_hook(self.stepped)

    _is_followed = False
    # So that reducers with an optimizer go on to step in parts (`penstock.training.deferral`).
    begins.only_counts = stepped.only_counts = True  # type: ignore[attr-defined]


# Steps that one look sees: two a millisecond.
_MOST = 2048
counts = Counts()
