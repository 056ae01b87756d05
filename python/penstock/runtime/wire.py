"""What an all-reduce puts on the wire: counted from the plan that ranks run, so that nobody derives it again."""

from __future__ import annotations

from penstock import _core

__all__ = ["sent_bytes"]


def sent_bytes(nbytes: int, ranks: int) -> float:
    """What each rank sends for an all-reduce of ``nbytes``, on average: 2 (n - 1) / n of them. No algorithm needs less (Patarasuk
    and Yuan 2009)."""
    return sum(_core.traffic("all_reduce", ranks, nbytes).values()) / ranks
