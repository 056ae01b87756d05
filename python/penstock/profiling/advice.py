"""What holds a step back, and what would change that: the causes that were found, and what changes would bring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.profiling.breakdown import Breakdown
from penstock.profiling.causes import Cause, find
from penstock.profiling.measures import Measures
from penstock.profiling.predict import Network, Prediction, predict
from penstock.profiling.record import Record

__all__ = ["Advice", "advise", "network_of"]


@dataclass(frozen=True)
class Advice:
    """The most promising first."""

    causes: tuple[Cause, ...] = ()
    predictions: tuple[Prediction, ...] = ()
    """Those that a step becomes shorter by, by `LEAST_GAIN` and more; of equal ones the first."""

    @property
    def first(self) -> Prediction | None:
        """The best change that `penstock profile --apply` can make."""
        return next((each for each in self.predictions if each.settings), None)


def advise(records: Sequence[Record], breakdown: Breakdown, *, everything: bool = False) -> Advice:
    """Causes and predictions. Cost: a second for 10^5 operations.

    Args:
        everything: also predictions of changes that are not worth it.
    """
    causes = find(records, breakdown)
    predictions = predict(records, network_of(records, breakdown, causes))
    shares = [share for share in breakdown.shares if share.steps]
    if shares:
        # A sampled step is longer than others, by what sampling costs; the ratio is the same. What the profiler itself takes
        # between steps, no change makes shorter.
        step_ns = sum(share.step_ns for share in shares) / len(shares)
        profiler_ns = sum(share.work.get("profiler", 0.0) for share in shares) / len(shares)
        predictions = [
            replace(each, before_ns=step_ns, after_ns=profiler_ns + (step_ns - profiler_ns) / each.gain)
            for each in predictions
        ]
    if not everything:
        # Where small buckets hold all gradients already, larger ones are the same.
        different = {(each.after_ns, each.error): each for each in reversed(predictions)}.values()
        predictions = [each for each in reversed(different) if each.gain >= 1 + LEAST_GAIN]
    return Advice(tuple(causes), tuple(predictions))


def network_of(records: Sequence[Record], breakdown: Breakdown, causes: Sequence[Cause]) -> Network:
    """What counters say of the network: the slowest link whose rate is known, and what a flow gets if that is what holds."""
    measures = Measures(records, breakdown)
    limits = [link.limit.bytes_per_s for link in measures.links if link.limit is not None and link.limit.is_known]
    backends = {str(record.header.about.get("backend", "")) for record in records} - {""}
    cap = next((cause.numbers for cause in causes if cause.kind == "flow cap"), {})
    return Network(
        PAYLOAD * min(limits, default=0.0),
        cap.get("stream_bytes_per_s", 0.0),
        cap.get("stream_busy_share", 1.0),
        round(cap.get("streams_to_a_peer", 0)),
        backends.pop() if len(backends) == 1 else "",
        {record.header.rank: record.header.host for record in records if record.header.host and record.steps},
        PAYLOAD * max((link.own_bytes for link in measures.links), default=0.0),
    )


LEAST_GAIN = 0.01
PAYLOAD = 0.956
"""Of a link's bytes: TCP over Ethernet with frames of 1,500 bytes and time stamps."""
