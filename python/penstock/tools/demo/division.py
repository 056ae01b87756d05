"""Where a step of a training goes, as `penstock profile` divides it, from what the demo has measured anyway.

The demo times each rank's computing alone, on a copy that sends nothing (docs/design/demo.md). Ranks begin a step together, since
the step before ended with a sum over all. So a rank that computes for less time than the slowest one waits for it meanwhile; in
the rest of the step bytes are on the wire.
"""

from __future__ import annotations

from penstock.profiling.breakdown import SYNC, Breakdown, Moving, Share
from penstock.tools.demo.comparison import Result
from penstock.tools.profile import shown

__all__ = ["divided", "told"]


def divided(result: Result) -> Breakdown:
    """The median step of each rank after the warm-up and the tuner's trials."""
    training = result.training
    alone = [training.compute_of(rank) for rank in range(training.ranks)]
    slowest = max(range(training.ranks), key=lambda rank: alone[rank].total_s)
    shares = []
    for rank, phases in enumerate(alone):
        wire_s = min(result.communication_s, max(0.0, result.step_s - phases.total_s))
        wait_s = max(0.0, result.step_s - phases.total_s - wire_s)
        moved = Moving(
            exposed_wire_ns=1e9 * wire_s,
            exposed_wait_ns=1e9 * wait_s,
            bytes=float(training.facts["gradient_bytes"]),
            waited_for={slowest: 1e9 * wait_s} if rank != slowest and wait_s else {},
        )
        work = {
            "forward": 1e9 * phases.forward_s,
            "backward": 1e9 * phases.backward_s,
            "optimizer": 1e9 * phases.optimizer_s,
        }
        step_ns = sum(work.values()) + moved.exposed_ns
        shares.append(Share(rank, len(training.settled(rank)), 0, step_ns, work, {SYNC: moved}))
    return Breakdown(tuple(shares))


def told(result: Result) -> str:
    """In one sentence, in the words of `penstock profile`."""
    said = shown.answer(divided(result))
    return f"With {result.label}, {said[0].lower()}{said[1:]}."
