"""Which steps torch's profiler runs in, by their number alone: ranks agree on nothing."""

from __future__ import annotations

import collections
import statistics
from collections.abc import Sequence

__all__ = ["EARLY", "LEAD", "SLOT", "Distance", "place"]

EARLY = (4, 9, 15)
"""Steps that are sampled whatever it costs, so that a short run has three samples. What a script does in each second or fourth
step is not in all of them."""

SLOT = 32
"""Later there is one sample in so many steps at the most, at another place in each."""

LEAD = 2
"""Steps for which the profiler runs: the last is the sample, and the first has the profiler's own beginnings."""


def place(slot: int) -> int:
    """Where in a slot its sample is, if it has one: from 8 to 23, the same on all ranks, and else by chance. In the first slot,
    the last of several.

    Were it always the same, what a script does in each fourth or 32nd step would be in all samples or in none.
    """
    return 8 + ((slot * 0x9E3779B1 & 0xFFFFFFFF) >> 28) if slot else EARLY[-1]


class Distance:
    """From one sample, or watch, to the next: a power of two, so that ranks that find different ones have the rarer in common."""

    def __init__(self) -> None:
        self.steps = SLOT
        self._costs: collections.deque[int] = collections.deque(maxlen=3)

    def has(self, slot: int) -> bool:
        return slot % (self.steps // SLOT) == 0

    def double(self) -> None:
        """One has cost something, and brought nothing."""
        self.steps = min(2 * self.steps, 1 << 40)

    def costs(self, cost_ns: int, steps_ns: Sequence[int], share: float) -> float:
        """One has cost so much.

        Args:
            steps_ns: how long the last steps took.
            share: of all time that they may cost.

        Returns:
            What the last ones cost in the median.
        """
        self._costs.append(cost_ns)
        usual, cost = statistics.median(steps_ns) if steps_ns else 0, statistics.median(self._costs)
        wanted = cost / (share * usual) if usual else 0
        self.steps = max(SLOT, 1 << max(0, int(min(wanted, 1 << 40)) - 1).bit_length())
        return cost
