"""What backward passes and marked waits of steps without a sample were, by what those of sampled steps were and by how much later
than this rank others began them (docs/design/profile-division.md, "From steps to the mean")."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from penstock.profiling.breakdown import OTHER
from penstock.profiling.lateness import Lateness

__all__ = ["GAP_NS", "Kind", "Seen", "Told", "told"]

Kind = tuple[str, str, int | None]
"""Purpose; ``wire``, ``wait`` or ``unknown``; for a wait the rank that came last."""


@dataclass
class Seen:
    """A step's backward pass, or its marked waits for one operation. Times in ns, without what torch's profiler made longer in a
    sampled step."""

    ns: float
    late: Lateness | None
    """By how much the last rank began it after this one, as if torch's profiler had held up nobody. None: that is unknown."""
    late_with_profiler_ns: float
    unused_ns: float | None
    """In which the thread used no processor in this step, without marked waits. None: unknown, or it tells nothing of this."""
    forward_ns: float
    """Of the forward pass: what computes longer beside torch's profiler there does so here."""
    kinds: Mapping[Kind, float] | None
    """What it was while the thread stood still, in a sampled step."""

    @property
    def still_ns(self) -> float:
        return sum((self.kinds or {}).values())


class Told(NamedTuple):
    """Sums over the steps without a sample, in ns. What is left of a backward pass has computed."""

    exposed: dict[Kind, float]
    profiler_ns: float
    """In which torch's profiler held up others: nobody's wait."""


def told(seen: Sequence[Seen], fallback: Callable[[], str], *, is_pass: bool) -> Told:
    """What the steps without a sample were.

    Args:
        seen: of all steps.
        fallback: the purpose of waits where no sampled step had any.
        is_pass: a backward pass, in which the rank computes as well.
    """
    sampled = [one for one in seen if one.kinds is not None]
    others = [one for one in seen if one.kinds is None]
    if not others or (is_pass and not sampled):
        return Told({}, 0.0)
    known = [one for one in sampled if one.late is not None] or sampled
    share = _share_of_lateness(known)
    without_late = [_without_late(one, share) for one in known]
    as_sampled = _sums(one.kinds or {} for one in sampled)
    faster = _faster([one.forward_ns for one in others], [one.forward_ns for one in sampled]) if is_pass else 1.0
    purpose = _main_purpose(as_sampled) or fallback()
    alike = [one for one in others if one.late is not None]
    usual = _Parts.of(known, without_late, faster)
    late, held = _late(alike, usual, share, is_pass)
    if alike:
        usual = usual.adapted([one.ns - a - b for one, a, b in zip(alike, late, held, strict=True)])
    exposed: dict[Kind, float] = {}
    for one, ns in zip(alike, late, strict=True):
        if ns:
            assert one.late is not None
            _add(exposed, {(purpose, "wait", one.late.last): ns})
    if alike:
        stood_ns = len(alike) * usual.stands if is_pass else sum(one.ns for one in alike) - sum(late) - sum(held)
        _add(exposed, _in_proportion(stood_ns, _sums(without_late) or as_sampled))
    if unknown := [one.ns for one in others if one.late is None]:
        parts = _Parts.of(sampled, [one.kinds or {} for one in sampled], faster)
        stood_ns = len(unknown) * parts.adapted(unknown).stands if is_pass else sum(unknown)
        _add(exposed, _in_proportion(stood_ns, as_sampled))
    return Told(exposed, sum(held))


@dataclass
class _Parts:
    """What a step without a sample is, in the mean and in ns, without what lateness explains."""

    computes: float
    stands: float
    idle: float
    """The least for which its thread uses no processor otherwise."""
    of_computing: float
    """How sure the former are: variances."""
    of_standing: float

    @classmethod
    def of(cls, sampled: Sequence[Seen], kinds: Sequence[Mapping[Kind, float]], faster: float) -> _Parts:
        """As in sampled steps, of which the parts that count are given."""
        if not sampled:
            return cls(0.0, 0.0, 0.0, 0.0, 0.0)
        computing = [faster * (one.ns - one.still_ns) for one in sampled]
        standing = [sum(each.values()) for each in kinds]
        idle = [(one.unused_ns or 0.0) - one.still_ns for one in sampled]
        return cls(
            statistics.fmean(computing),
            statistics.fmean(standing),
            min(idle),
            _variance(computing, math.hypot(_COMPUTES, (1 - faster) / 2)),
            _variance(standing, _STANDS),
        )

    def adapted(self, steps: Sequence[float]) -> _Parts:
        """With so much for computing and standing together in steps without a sample: by how much that differs from sampled
        passes is of either part in proportion to the variance of its mean there (least squares)."""
        both = statistics.fmean(steps)
        if not self.stands:
            return replace(self, computes=both)
        differs = both - self.computes - self.stands
        part = self.of_standing / (self.of_computing + self.of_standing)
        stands = min(max(self.stands + differs * part, 0.0), both)
        return replace(self, computes=both - stands, stands=stands)


def _late(others: Sequence[Seen], usual: _Parts, share: float, is_pass: bool) -> tuple[list[float], list[float]]:
    """Of each step: the wait for the rank that came last, and for torch's profiler in another rank. In a pass neither is while
    this rank computes as it does in samples, nor while its thread used a processor for longer than usual."""
    late, held = [], []
    unused = [one.unused_ns for one in others if one.unused_ns is not None]
    slack_ns = _deviation(unused) if unused else 0.0
    for one in others:
        assert one.late is not None
        most_ns = one.ns - usual.computes
        if is_pass:
            idle_ns = 0.0 if one.unused_ns is None else one.unused_ns - usual.idle - usual.stands + slack_ns
            most_ns = min(most_ns, idle_ns)
        late_ns = max(0.0, min(share * one.late.ns, most_ns))
        late.append(late_ns if late_ns >= GAP_NS and one.late.last is not None else 0.0)
        held.append(max(0.0, min(one.late_with_profiler_ns - one.late.ns, most_ns - late[-1])))
    return late, held


def _deviation(sample: Sequence[float]) -> float:
    """The median deviation from the median, as a standard deviation."""
    middle = statistics.median(sample)
    return 1.5 * statistics.median(abs(each - middle) for each in sample)


def _share_of_lateness(sampled: Sequence[Seen]) -> float:
    """As much of the time by which others are late is waited for: the rest passes while this rank computes."""
    late_ns = waited_ns = 0.0
    for one in sampled:
        if one.late is not None and one.late.ns >= GAP_NS:
            late_ns += one.late.ns
            waited_ns += min(one.late.ns, _waits(one.kinds or {}))
    return waited_ns / late_ns if late_ns else 1.0


def _waits(kinds: Mapping[Kind, float]) -> float:
    return sum(ns for (_, what, _), ns in kinds.items() if what == "wait")


def _without_late(one: Seen, share: float) -> dict[Kind, float]:
    """What a sampled one was, without the wait that the lateness of the last rank explains."""
    kinds = dict(one.kinds or {})
    waits_ns = _waits(kinds)
    if one.late is None or one.late.ns < GAP_NS or not waits_ns:
        return kinds
    kept = 1 - min(share * one.late.ns, waits_ns) / waits_ns
    return {kind: kept * ns if kind[1] == "wait" else ns for kind, ns in kinds.items() if kind[1] != "wait" or kept > 0}


def _faster(plain: Sequence[float], sampled: Sequence[float]) -> float:
    """How long computing takes without torch's profiler, over how long it takes beside it."""
    beside_ns, without_ns = statistics.median(sampled), statistics.median(plain)
    if min(beside_ns, without_ns) < GAP_NS:
        return 1.0
    return min(max(without_ns / beside_ns, 0.5), 2.0)


def _variance(sample: Sequence[float], systematic: float) -> float:
    """Of the mean: what the sample says, and what all of it may be off by."""
    chance = statistics.variance(sample) / len(sample) if len(sample) > 1 else 0.0
    return chance + (systematic * statistics.fmean(sample)) ** 2 + 1.0


def _main_purpose(kinds: Mapping[Kind, float]) -> str | None:
    by_purpose: dict[str, float] = {}
    for (purpose, _, _), ns in kinds.items():
        by_purpose[purpose] = by_purpose.get(purpose, 0.0) + ns
    return max(by_purpose, key=lambda purpose: by_purpose[purpose], default=None)


def _in_proportion(ns: float, kinds: Mapping[Kind, float]) -> dict[Kind, float]:
    if ns <= 0:
        return {}
    total = sum(kinds.values())
    return {kind: ns * part / total for kind, part in kinds.items()} if total else {(OTHER, "unknown", None): ns}


def _sums(all_kinds: Iterable[Mapping[Kind, float]]) -> dict[Kind, float]:
    found: dict[Kind, float] = {}
    for kinds in all_kinds:
        _add(found, kinds)
    return found


def _add(sums: dict[Kind, float], more: Mapping[Kind, float]) -> None:
    for kind, ns in more.items():
        sums[kind] = sums.get(kind, 0.0) + ns


GAP_NS = 100_000
"""What is shorter is no wait: between two operators of a backward pass lie some microseconds; the autograd engine's locks and the
profiler make some tens."""

_COMPUTES, _STANDS = 0.02, 0.3
"""What all samples may be off by. Computing: what torch's profiler costs there, beyond half of what `_faster` corrects. Standing:
operations now and then take several times as long, which few samples rarely show."""
