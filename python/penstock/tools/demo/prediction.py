"""How long a step should take: the computation as measured, the link as measured, and nothing fitted.

``docs/design/demo.md`` derives the formula. Pure: no clock, no network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.runtime.wire import sent_bytes
from penstock.tools.demo.training import Phases


@dataclass(frozen=True)
class Transfer:
    """One piece of the gradients on its way through the link; times in seconds since the step began."""

    ready_s: float
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Prediction:
    """A step as it should be."""

    compute: Phases  # with what sending takes from it, where processors do both
    exposed_s: float  # communication that no computation hides
    bytes_per_s: float  # the rate that it assumes, in each direction
    transfers: tuple[Transfer, ...]

    @property
    def step_s(self) -> float:
        return self.compute.total_s + self.exposed_s


def predict_step(
    compute: Phases, piece_bytes: Sequence[int], ranks: int, bytes_per_s: float, slowdown_s_per_byte: float = 0
) -> Prediction:
    """Play one step of DDP against a link.

    The backward pass fills the pieces in order, in proportion to their bytes; a full one queues for the link, which
    carries one after the other; the optimizer starts when the last has arrived.

    Args:
        compute: the step without communication.
        piece_bytes: DDP's buckets, or the hook's buckets, in the order in which they fill.
        ranks: each sends and receives what an all-reduce of a piece needs.
        bytes_per_s: what the link carries in each direction, both at once.
        slowdown_s_per_byte: by how much the computation takes longer for each byte that is carried meanwhile, where one
            machine's processors do both and none is idle.

    Cost that it leaves out: latency, headers, arithmetic.
    """
    alone = _play(compute, piece_bytes, ranks, bytes_per_s)
    backward_end_s = compute.forward_s + compute.backward_s
    carried = sum(max(0.0, min(each.end_s, backward_end_s) - each.begin_s) for each in alone.transfers) * bytes_per_s
    slowed = replace(compute, backward_s=compute.backward_s + carried * slowdown_s_per_byte)
    return _play(slowed, piece_bytes, ranks, bytes_per_s)


def hook_buckets(total_bytes: int, bucket_bytes: int) -> list[int]:
    """What the hook reduces together: full buckets, and the rest."""
    full, rest = divmod(total_bytes, bucket_bytes)
    return [bucket_bytes] * full + [rest] * (rest > 0)


def _play(compute: Phases, piece_bytes: Sequence[int], ranks: int, bytes_per_s: float) -> Prediction:
    backward_end_s = compute.forward_s + compute.backward_s
    total_bytes = sum(piece_bytes)
    filled, free_s, transfers = 0, 0.0, []
    for nbytes in piece_bytes:
        filled += nbytes
        ready_s = compute.forward_s + compute.backward_s * filled / total_bytes
        begin_s = max(ready_s, free_s)
        free_s = begin_s + sent_bytes(nbytes, ranks) / bytes_per_s
        transfers.append(Transfer(ready_s, begin_s, free_s))
    exposed_s = max(0.0, free_s - backward_end_s)
    return Prediction(compute, exposed_s, bytes_per_s, tuple(transfers))
