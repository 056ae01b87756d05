"""What backward passes and marked waits were in steps whose operations are unknown, by what they were in others and by how much
later than this rank others began them (docs/design/profile-division.md, "From steps to the mean"). *Sampled* here is each step
whose operations are known."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from penstock.profiling.breakdown import OTHER
from penstock.profiling.lateness import Lateness

__all__ = ["GAP_NS", "Kind", "Seen", "Told", "add", "told"]

_K = TypeVar("_K")

Kind = tuple[str, str, int | None]
"""Purpose; ``wire``, ``wait`` or ``unknown``; for a wait the rank that came last."""


@dataclass
class Seen:
    """A step's backward pass, or its marked waits for one operation. Times in ns, without what torch's profiler made longer in a
    sampled step."""

    ns: float
    late: Lateness | None
    """By how much the last rank began it after this one. None: that is unknown."""
    unused_ns: float | None
    """In which the thread used no processor in this step, without marked waits: less what it used in those, so that only its
    differences between steps tell something. None: unknown, or it tells nothing of this."""
    forward_ns: float
    """Of the forward pass: what computes longer there, as beside torch's profiler, does so here."""
    outside_ns: float
    """Of the step without this, and without marked waits."""
    kinds: Mapping[Kind, float] | None
    """What it was while the thread stood still, in a step whose operations are known: sampled, or told by the engine."""
    is_blocking: bool
    """Operations were seen to begin in the wait."""

    @property
    def still_ns(self) -> float:
        return sum((self.kinds or {}).values())


class Told(NamedTuple):
    """Sums over the steps without a sample, in ns. What is left of a backward pass has computed."""

    exposed: dict[Kind, float]
    profiler_ns: float
    """In which torch's profiler held up others: nobody's wait."""


def told(seen: Sequence[Seen], fallback: str, *, is_pass: bool) -> Told:
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
    share = _share_of_lateness(known, is_pass=is_pass)
    without_late = [_without_late(one, share) for one in known]
    as_sampled = _sums(one.kinds or {} for one in sampled)
    purpose = _main_purpose(as_sampled) or fallback
    alike = [one for one in others if one.late is not None]
    exposed: dict[Kind, float] = {}
    held: list[float] = []
    if alike:
        usual = _Parts.of(known, without_late, alike, is_pass=is_pass)
        late, held = _late(alike, usual, share, is_pass)
        for one, ns in zip(alike, late, strict=True):
            if one.late is not None and ns:
                for rank, part in one.late.by.items():
                    kind: Kind = (purpose, "wait", rank)
                    add(exposed, {kind: ns * part / one.late.ns})
        stood_ns = sum(one.ns for one in alike) - sum(late) - sum(held)
        if is_pass:
            stood_ns = len(alike) * usual.standing(alike, [a + b for a, b in zip(late, held, strict=True)])
        rest = _sums(without_late)
        # What is unknown there is as the rest, and not as what lateness has explained.
        rest = {kind: ns for kind, ns in rest.items() if kind[1] != "unknown"} or rest or as_sampled
        add(exposed, _in_proportion(stood_ns, rest))
    if unknown := [one for one in others if one.late is None]:
        stood_ns = sum(one.ns for one in unknown)
        if is_pass:
            usual = _Parts.of(sampled, [one.kinds or {} for one in sampled], unknown, is_pass=True)
            stood_ns = len(unknown) * usual.standing(unknown, [0.0] * len(unknown))
        add(exposed, _in_proportion(stood_ns, as_sampled))
    return Told(exposed, sum(held))


@dataclass
class _Parts:
    """What a sampled step is, in the mean and in ns, without what lateness explains; corrected for steps without a sample."""

    computes: float
    stands: float
    idle: list[float]
    """For how long its thread uses no processor otherwise, of each. Empty: unknown."""
    outside: float
    of_computing: float
    """How sure the first two are: variances."""
    of_standing: float

    @classmethod
    def of(
        cls, sampled: Sequence[Seen], kinds: Sequence[Mapping[Kind, float]], others: Sequence[Seen], *, is_pass: bool
    ) -> _Parts:
        """As in sampled steps, of which the parts that count are given."""
        if not sampled:
            return cls(0.0, 0.0, [], 0.0, 0.0, 0.0)
        plain = [one.ns - one.still_ns for one in sampled] if is_pass else [0.0] * len(sampled)
        computing = _without_profiler(plain, sampled, others) if is_pass else plain
        standing = [sum(each.values()) for each in kinds]
        corrected = 1 - statistics.fmean(computing) / max(statistics.fmean(plain), 1.0)
        return cls(
            statistics.fmean(computing),
            statistics.fmean(standing),
            [one.unused_ns - one.still_ns for one in sampled if one.unused_ns is not None],
            statistics.fmean(one.outside_ns for one in sampled),
            _variance(computing, math.hypot(_COMPUTES, corrected / 2)),
            _variance(standing, _STANDS),
        )

    def standing(self, steps: Sequence[Seen], explained: Sequence[float]) -> float:
        """For how long a pass of these steps stands still, in the mean, without what is explained.

        Samples say how long it computes and stands; by how much its length differs from their sum is of either in proportion to
        its variance (least squares). Where that is much, the time in which the thread used no processor says more, if steps do
        not differ in it for other reasons.
        """
        both = statistics.fmean(one.ns for one in steps) - statistics.fmean(explained)
        if not self.stands:
            return 0.0
        differs = both - self.computes - self.stands
        observed = [(self.stands, self.of_standing), (both - self.computes, self.of_computing)]
        unused = [one.unused_ns for one in steps if one.unused_ns is not None]
        if self.idle and len(unused) == len(steps):
            third = statistics.fmean(unused) - statistics.fmean(self.idle) - statistics.fmean(explained)
            apart = statistics.fmean(one.outside_ns for one in steps) - self.outside
            of_third = _variance(self.idle, 0.0) + (_UNUSED * third) ** 2 + apart**2
            if 4 * of_third < differs**2:
                observed = [(value, variance + differs**2) for value, variance in observed] + [(third, of_third)]
        weights = [1 / variance for _, variance in observed]
        stands = sum(value * weight for (value, _), weight in zip(observed, weights, strict=True)) / sum(weights)
        return min(max(stands, 0.0), both)


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
            idle_ns = min(usual.idle, default=0.0)
            most_ns = min(most_ns, 0.0 if one.unused_ns is None else one.unused_ns - idle_ns - usual.stands + slack_ns)
        late_ns = max(0.0, min(share * one.late.ns, most_ns))
        late.append(late_ns if late_ns >= GAP_NS else 0.0)
        held.append(max(0.0, min(one.late.with_profiler_ns - one.late.ns, most_ns - late[-1])))
    return late, held


def _deviation(sample: Sequence[float]) -> float:
    """The median deviation from the median, as a standard deviation."""
    middle = statistics.median(sample)
    return 1.5 * statistics.median(abs(each - middle) for each in sample)


def _share_of_lateness(sampled: Sequence[Seen], *, is_pass: bool) -> float:
    """As much of the time by which others are late is waited for: the rest passes while this rank computes. All of it where no
    sample shows lateness, but not if operations begin before they are waited for: others may be late then with nobody waiting."""
    late_ns = waited_ns = 0.0
    for one in sampled:
        # Where a partner has no sample, it is unknown what was a wait.
        is_known = 2 * _part(one.kinds or {}, "unknown") <= one.still_ns
        if one.late is not None and one.late.ns >= GAP_NS and is_known:
            late_ns += one.late.ns
            waited_ns += min(one.late.ns, _part(one.kinds or {}, "wait"))
    if late_ns:
        return waited_ns / late_ns
    return 1.0 if is_pass or not sampled or all(one.is_blocking for one in sampled) else 0.0


def _part(kinds: Mapping[Kind, float], what: str) -> float:
    return sum(ns for kind, ns in kinds.items() if kind[1] == what)


def _without_late(one: Seen, share: float) -> dict[Kind, float]:
    """What a sampled one was, without the wait that the lateness of the last rank explains."""
    kinds = dict(one.kinds or {})
    left_ns = share * one.late.ns if one.late is not None and one.late.ns >= GAP_NS else 0.0
    for what in ("wait", "unknown"):
        part = _part(kinds, what)
        taken = min(left_ns, part)
        left_ns -= taken
        if taken:
            kinds = {kind: ns * (1 - taken / part) if kind[1] == what else ns for kind, ns in kinds.items()}
    return {kind: ns for kind, ns in kinds.items() if ns > 0}


def _without_profiler(computing: Sequence[float], sampled: Sequence[Seen], others: Sequence[Seen]) -> list[float]:
    """How long the passes of sampled steps compute, if the forward pass took as long as it does in other steps: torch's profiler,
    a slow beginning or another kind of step make both longer. Not where samples agree better with each other as they are."""
    forward = sorted(one.forward_ns for one in others)
    apart = len(forward) // 5  # at either end: what has something else in it
    mean_ns = statistics.fmean(forward[apart : len(forward) - apart])
    if mean_ns < GAP_NS or any(one.forward_ns < GAP_NS for one in sampled):
        return list(computing)
    ratio = mean_ns / statistics.fmean(one.forward_ns for one in sampled)
    if _spread(computing) < _SURE and not 1 / _MOST < ratio < _MOST:
        return list(computing)
    corrected = [ns * min(max(mean_ns / one.forward_ns, 0.25), 4.0) for ns, one in zip(computing, sampled, strict=True)]
    return corrected if _spread(corrected) <= _spread(computing) + _ALIKE else list(computing)


def _spread(sample: Sequence[float]) -> float:
    """The standard deviation over the mean."""
    return statistics.pstdev(sample) / max(statistics.fmean(sample), 1.0)


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
        add(found, kinds)
    return found


def add(sums: dict[_K, float], more: Mapping[_K, float]) -> None:
    """Add amounts to sums by the same key."""
    for key, amount in more.items():
        sums[key] = sums.get(key, 0.0) + amount


GAP_NS = 100_000
"""What is shorter is no wait: between two operators of a backward pass lie some microseconds; the autograd engine's locks and the
profiler make some tens."""

_UNUSED = 0.05
"""What time without a processor may be off by: threads lose theirs to others as well."""

_SURE, _MOST = 0.05, 1.45
"""Where samples compute alike, it is torch's profiler alone that makes the forward pass longer, and by no more than this."""

_ALIKE = 0.01
"""Relative spreads of a few samples that differ by less do not."""

_COMPUTES, _STANDS = 0.02, 0.3
"""What all samples may be off by. Computing: what torch's profiler costs there, beyond half of what is corrected. Standing:
operations now and then take several times as long, which few samples rarely show."""
