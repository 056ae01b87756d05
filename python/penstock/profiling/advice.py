"""What holds a step back, and what would change that: the causes that were found, and one ranked list of changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from penstock.profiling.breakdown import Breakdown
from penstock.profiling.cause import Cause
from penstock.profiling.causes import find
from penstock.profiling.measures import Measures
from penstock.profiling.predict import Network, Prediction, predict
from penstock.profiling.record import Record

__all__ = ["Advice", "Change", "advise", "is_listed", "network_of"]


@dataclass(frozen=True)
class Change:
    """One entry of the ranked list: what a prediction is about, or what a cause suggests."""

    what: str
    how: str
    """The setting or command, or what to do by hand. Empty if there is no more to say than `obstacle` does."""
    gain_ns: float | None
    """By how much the mean step should become shorter; None where what was measured does not tell."""
    settings: Mapping[str, str | float] = field(default_factory=dict)
    """The same for `penstock profile --apply`."""
    obstacle: str = ""
    """Why `--apply` cannot make it; empty if it can."""
    prediction: Prediction | None = None
    cause: Cause | None = None

    @property
    def expected_ns(self) -> float:
        """What it is ranked by. What is sure to help comes before what may help more, so a prediction counts with its error
        added; of an unknown gain half of what the cause explains is expected."""
        if self.prediction is not None:
            return self.prediction.before_ns - self.prediction.after_ns * (1 + self.prediction.error)
        if self.gain_ns is None:
            return self.cause.cost_ns / 2 if self.cause is not None else 0.0
        return self.gain_ns


@dataclass(frozen=True)
class Advice:
    """The most promising first."""

    causes: tuple[Cause, ...] = ()
    predictions: tuple[Prediction, ...] = ()
    """Those that a step becomes shorter by: by `LEAST_GAIN` or more, and by `OF_ERROR` of the stated error; of equal ones the
    first."""

    @property
    def changes(self) -> tuple[Change, ...]:
        """One list of all: predictions, and what those causes suggest that no prediction is about."""
        found = [_predicted(each, self.causes) for each in self.predictions]
        for cause in self.causes:
            if is_listed(cause) and not any(_is_about(each, cause) for each in self.predictions):
                found.append(_suggested(cause))
        return tuple(sorted(found, key=lambda each: -each.expected_ns))

    def to_apply(self) -> tuple[Change | None, list[tuple[int, Change]]]:
        """The change that `penstock profile --apply` makes: the best one with a prediction, if that gains by more than its error,
        else the best one. And those that are ranked before it, with their places from 1 on."""
        changes = self.changes
        possible = [each for each in changes if not each.obstacle]
        sure = (each for each in possible if each.prediction is not None and each.expected_ns > 0)
        best = next(sure, possible[0] if possible else None)
        if best is None:
            return None, list(enumerate(changes, 1))
        return best, list(enumerate(changes[: changes.index(best)], 1))


def is_listed(cause: Cause) -> bool:
    """Whether what it suggests has a place in the list of changes. Computing has one where ranks leave cores unused."""
    return cause.kind in WITHOUT and (cause.kind != "compute" or bool(cause.settings))


def _predicted(found: Prediction, causes: Sequence[Cause]) -> Change:
    cause = next((each for each in causes if _is_about(found, each)), None)
    how, obstacle = found.how, ""
    if not found.settings and found.how:
        obstacle = IN_SCRIPT
    elif not found.settings and cause is not None:
        how, obstacle = cause.change, f"{NO_SETTING}{_where(cause)}"
    elif not found.settings:
        obstacle = f"{NO_SETTING}: {ELSEWHERE.get(found.change, 'see what it follows from')}"
    return Change(found.change, how, found.before_ns - found.after_ns, found.settings, obstacle, found, cause)


def _suggested(cause: Cause) -> Change:
    whose = f" (rank {cause.rank})" if cause.rank is not None else ""
    obstacle = ""
    if not cause.settings:
        obstacle = IN_SCRIPT if cause.kind in OF_SCRIPT else f"{NO_SETTING}{_where(cause)}"
    return Change(f"{WITHOUT[cause.kind]}{whose}", cause.change, cause.gain_ns, cause.settings, obstacle, None, cause)


def _where(cause: Cause) -> str:
    if cause.rank is not None:
        return f": look at rank {cause.rank}"
    return f": look at {cause.link or cause.host} of {cause.host}" if cause.link else ""


def _is_about(found: Prediction, cause: Cause) -> bool:
    """Whether it says what a change against this cause would bring. That no rank be late is about whatever makes one late, or now
    one and now another; a setting against that is a change of its own."""
    is_of_waits = cause.kind == "jitter" or (cause.rank is not None and cause.phase in WAITS and not cause.settings)
    return cause.kind == found.against or (found.against == "straggler" and is_of_waits)


def advise(records: Sequence[Record], breakdown: Breakdown, *, everything: bool = False) -> Advice:
    """Causes and predictions. Cost: a second for 10^5 operations.

    Args:
        everything: also predictions of changes that are not worth it.
    """
    causes = find(records, breakdown)
    predictions = predict(records, network_of(records, breakdown, causes))
    shares = [share for share in breakdown.shares if share.steps]
    if shares:
        # A sampled step is longer than others, by what sampling costs; the ratio is the same.
        step_ns = sum(share.unprofiled_ns for share in shares) / len(shares)
        predictions = [replace(each, before_ns=step_ns, after_ns=step_ns / each.gain) for each in predictions]
        # In single samples now one rank is faster and now another, by chance.
        least_ns = step_ns - _waited_ns(breakdown)
        predictions = [
            replace(each, after_ns=max(each.after_ns, least_ns)) if each.against == "straggler" else each
            for each in predictions
        ]
    if not everything:
        # Where small buckets hold all gradients already, larger ones are the same.
        different = {(each.after_ns, each.error): each for each in reversed(predictions)}.values()
        predictions = [each for each in reversed(different) if each.gain >= 1 + max(LEAST_GAIN, OF_ERROR * each.error)]
    return Advice(tuple(causes), tuple(predictions))


def _waited_ns(breakdown: Breakdown) -> float:
    """For how long others wait for who is late, exposed and hidden, a step: for each rank that is late in the mean of the others.
    Where the clocks of hosts are not known well, waits may pass for wire."""
    shares = [share for share in breakdown.shares if share.steps]
    moving = [one for share in shares for one in share.communication.values()]
    waited = sum(ns for one in moving for ns in one.waited_for.values()) / max(1, len(shares) - 1)
    unsure = max((wrong for _, wrong in breakdown.offsets_ns.values()), default=0.0)
    return waited + unsure * sum(one.operations for one in moving) / max(1, len(shares))


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
OF_ERROR = 0.25
"""A gain of less than this part of its stated error tells nothing."""
PAYLOAD = 0.956
"""Of a link's bytes: TCP over Ethernet with frames of 1,500 bytes and time stamps."""
WAITS = ("wait", "loading", "checkpoint", "evaluation")
NO_SETTING, IN_SCRIPT = "no setting can do that", "it changes the script or the cluster"
OF_SCRIPT = (
    "link",
    "flow cap",
    "repeated sums",
    "small buckets",
    "one core",
    "memory copies",
    "loader",
    "checkpoint",
    "evaluation",
    "bubble",
)
WITHOUT = {
    "straggler": "no straggler",
    "contention": "free cores",
    "loader": "a faster loader",
    "checkpoint": "cheaper checkpoints",
    "evaluation": "cheaper evaluations",
    "second job": "no other job on the link",
    "link": "fewer bytes",
    "flow cap": "more flows",
    "repeated sums": "sums in the last backward pass alone",
    "small buckets": "larger buckets",
    "retransmissions": "no lost packets",
    "one core": "more I/O threads",
    "memory copies": "cheaper copies",
    "bubble": "a smaller bubble",
    "jitter": "even ranks",
    "compute": "more threads to compute with",
}
"""By kind of cause, what its change would make. What no rule explains no setting makes shorter."""
ELSEWHERE = {
    "twice the link": "it takes a faster link between the hosts",
    "no straggler": "look at the rank that the others wait for",
}
