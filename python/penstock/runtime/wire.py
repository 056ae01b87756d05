"""What an all-reduce puts on the wire, defined once."""

from __future__ import annotations

__all__ = ["sent_bytes"]


def sent_bytes(nbytes: int, ranks: int) -> float:
    """What each rank sends for an all-reduce of ``nbytes``, on average: 2 (n - 1) / n of them. No algorithm needs less (Patarasuk
    and Yuan 2009), and the plan for large messages between hosts sends no more."""
    return 2 * (ranks - 1) * nbytes / ranks
