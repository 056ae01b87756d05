"""Where ticks stand on an axis. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence


def linear(low: float, high: float, most: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten within ``[low, high]``: ``most`` of them at most, and as many as possible.

    ``most`` is 2 or more, and ``low`` is below ``high``. There is always one: of a step that gives more than ``most``, at least
    three, the next coarser one keeps every second or, of five, every second and a half.
    """
    power = 10.0 ** math.floor(math.log10((high - low) / (most + 1)))
    for digit in (1, 2, 5, 10, 20, 50):
        step = digit * power
        # The tolerance keeps a limit that is itself a multiple, whatever the division loses.
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first < most:
            break
    return [index * step for index in range(first, last + 1)]


def logarithmic(low: float, high: float, most: int) -> list[float]:
    """1, 2 and 5 times powers of ten within ``[low, high]``, or fewer digits, or every so many powers: ``most`` at most.

    Where the range holds fewer than two of them, ticks stand as on a linear axis.
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    choices = [((1, 2, 5), 1), ((1, 3), 1), *(((1,), stride) for stride in range(1, len(powers) + 1))]
    for digits, stride in choices:
        places = [float(f"{digit}e{power}") for power in powers[::stride] for digit in digits]
        within = [place for place in places if low <= place <= high]
        if len(within) <= most:
            return within if len(within) > 1 else linear(low, high, most)
    return linear(low, high, most)


def apart(places: Sequence[float], positions: Sequence[float], gap: float) -> list[float]:
    """Those of ``places`` whose ``positions``, which rise, are at least ``gap`` behind the last one that was taken."""
    taken: list[float] = []
    free_from = -math.inf
    for place, position in zip(places, positions, strict=True):
        if position >= free_from:
            taken.append(place)
            free_from = position + gap
    return taken
