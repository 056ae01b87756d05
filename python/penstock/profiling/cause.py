"""One reason for the length of a step, and what the rules that find such reasons share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.numbers import milliseconds
from penstock.profiling.measures import Measures

__all__ = ["KINDS", "LEAST_SHARE", "MOSTLY", "Cause", "free_cores", "has_settings", "ms"]

KINDS = (
    "straggler",
    "contention",
    "loader",
    "checkpoint",
    "evaluation",
    "second job",
    "link",
    "flow cap",
    "repeated sums",
    "small buckets",
    "retransmissions",
    "one core",
    "memory copies",
    "bubble",
    "jitter",
    "unknown",
    "compute",
)


@dataclass(frozen=True)
class Cause:
    """One reason for the length of a step."""

    kind: str
    """One of `KINDS`."""
    phase: str
    """The part of the step that it makes long: one of `breakdown.PHASES`, ``wire``, ``wait``, or ``compute`` for several."""
    text: str
    """What was found, in a sentence with its numbers."""
    change: str
    """The setting or command to change."""
    cost_ns: float
    """Of the mean step, as much as it explains."""
    gain_ns: float | None = None
    """By how much the step should become shorter with the change; None where what was measured does not tell."""
    rank: int | None = None
    """Whose fault it is, if it is one rank's."""
    host: str = ""
    link: str = ""
    """Of the host: the name of the interface, if it is one's."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """What the rule compared, by name with unit."""
    disk: str = ""
    """Of the host: the disk, if one is busy with what the rank reads."""
    settings: Mapping[str, str | float] = field(default_factory=dict)
    """The change for `penstock profile --apply`, as `predict.Prediction` has it. Empty if it cannot be made without touching the
    script, or by no setting at all."""


def has_settings(backend: str) -> bool:
    """Whether settings of Penstock do something, by the name of the backend; where that is not known they are taken to."""
    return not backend or "penstock" in backend


def free_cores(measures: Measures, host: str = "") -> tuple[str, dict[str, str]]:
    """What to change where threads find no free processor on a host or, without one, on any; and as settings, where ranks
    compute with more threads than there are cores for."""
    fewer = measures.fewer_threads(host)
    if not fewer:
        return "stop what runs beside it, or give it cores of its own (taskset -c)", {}
    change = f"OMP_NUM_THREADS={fewer}: the ranks of a host compute with more threads than it has cores; "
    return change + "or stop what runs beside them", {"OMP_NUM_THREADS": str(fewer)}


def ms(ns: float) -> str:
    return milliseconds(ns / 1e9)


LEAST_SHARE = 0.03
"""Of the step: what explains less is in the noise of a run, whose steps differ by some percent."""
MOSTLY = 0.5
