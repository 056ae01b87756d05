"""The clocks of several hosts on one axis, from what their operations say of each other.

No rank of an all-reduce ends before its last rank has begun. So of two hosts *a* and *b* with corrections *x*, each operation
says ``issued on a + x(a) <= ended on b + x(b)``, and the same with *a* and *b* exchanged: a difference constraint each. A send
says only the first. The tightest constraints of a sampled step, composed over hosts that share no operation (shortest paths),
give an interval for each host's correction. Intervals of several steps are joined with the drift that two clocks can have.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.profiling.matching import Kind, Meeting
from penstock.profiling.record import Record

__all__ = ["DRIFT", "WALL_AGREES_NS", "WALL_ERROR_NS", "Clock", "clocks"]

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Clock:
    """A host's clock against the first host's."""

    rough_ns: int = 0
    """What the wall clock says is to be added."""
    knots: tuple[tuple[int, float, float], ...] = ((0, 0.0, 0.0),)
    """When on this clock; what more is to be added; how wrong that may be. Linear between them."""
    drift: float = 0.0
    """By how much the correction may change in between, in ns per ns."""
    likely_wrong_ns: float = 0.0
    """How wrong it is in all likelihood. Less than what the knots say if bounds are far apart but other signs agree."""

    def on_first(self, time_ns: int) -> int:
        """A time of this clock on the first host's."""
        return time_ns + self.rough_ns + round(self._between(time_ns, 1))

    def wrong_ns(self, time_ns: int) -> float:
        """How wrong `on_first` may be."""
        nearest = min(abs(time_ns - knot[0]) for knot in self.knots)
        return self._between(time_ns, 2) + 2 * self.drift * nearest

    @property
    def offset(self) -> tuple[float, float]:
        """One correction for all samples, and how wrong that may be: with the drift from the first to the last in it."""
        middle = self.knots[len(self.knots) // 2][1]
        return self.rough_ns + middle, max(abs(add - middle) + wrong for _, add, wrong in self.knots)

    @property
    def precision_ns(self) -> float:
        """How wrong `on_first` may be in the middle of sampled steps."""
        return max(knot[2] for knot in self.knots)

    def _between(self, time_ns: int, what: int) -> float:
        knots = self.knots
        if len(knots) == 1 or time_ns <= knots[0][0]:
            return knots[0][what]
        if time_ns >= knots[-1][0]:
            return knots[-1][what]
        at = bisect.bisect_right(knots, time_ns, key=lambda knot: knot[0])
        before, after = knots[at - 1], knots[at]
        share = (time_ns - before[0]) / (after[0] - before[0])
        return before[what] + share * (after[what] - before[what])


def clocks(records: Sequence[Record], met: Iterable[Meeting]) -> tuple[dict[str, Clock], list[str]]:
    """The clock of each host, and what is wrong with them.

    Args:
        records: one a rank, by rank.
        met: their operations.
    """
    hosts = list(dict.fromkeys(record.header.host for record in records))
    if len(hosts) < 2:
        return {host: Clock() for host in hosts}, []
    # All times are on the wall clock that the lowest rank of a host noted when it started: near each other if NTP runs.
    walls = {record.header.host: record.header.wall_ns - record.header.start_ns for record in reversed(records)}
    on_host = {record.header.rank: record.header.host for record in records}
    windows: dict[int, list[Meeting]] = {}
    for meeting in met:
        ranks = {rank for rank, _ in meeting.parts}
        # An operation binds any two of its ranks, even if the record of a third is missing. Two of a rank are not one operation.
        is_one = meeting.is_whole or (meeting.kind is not Kind.SEND and len(ranks) == len(meeting.parts))
        if meeting.kind in _BINDING and is_one and len({on_host[rank] for rank in ranks}) > 1:
            windows.setdefault(meeting.step, []).append(meeting)
    steps = sorted(windows)
    problems: list[str] = []
    wide: list[tuple[int, _Window]] = []
    bad: list[tuple[int, _Window]] = []
    for step in steps[:: -(-len(steps) // MOST_WINDOWS)] if steps else ():
        window = _Window(windows[step], hosts, walls, on_host)
        (bad if window.contradiction_ns > TOLERANCE_NS else wide).append((step, window))
    if bad:
        worst_step, worst = max(bad, key=lambda each: each[1].contradiction_ns)
        problems.append(
            f"operations of {len(bad)} sampled steps contradict each other, in step {worst_step} by "
            f"{worst.contradiction_ns / 1e6:.3f} ms: a clock jumped there, or ranks do not count their operations alike"
        )
    return _joined(hosts, walls, wide, problems), problems


class _Window:
    """What the operations of one sampled step say: bounds of each host's correction in its middle."""

    def __init__(self, met: list[Meeting], hosts: list[str], walls: dict[str, int], on_host: dict[int, str]) -> None:
        self.origin = min(op.issued_ns + walls[on_host[rank]] for each in met for rank, op in each.parts)
        index = {host: at for at, host in enumerate(hosts)}
        issued = np.full((len(met), len(hosts)), -np.inf)
        ended = np.full((len(met), len(hosts)), np.inf)
        exchanges = np.zeros(len(met), bool)
        for row, meeting in enumerate(met):
            exchanges[row] = meeting.kind is Kind.EXCHANGE
            for part, (rank, operation) in enumerate(meeting.parts):
                at = index[on_host[rank]]
                shift = walls[on_host[rank]] - self.origin
                if meeting.kind is not Kind.SEND or part == 0:
                    issued[row, at] = max(issued[row, at], operation.issued_ns + shift)
                if meeting.kind is not Kind.SEND or part == 1:
                    ended[row, at] = min(ended[row, at], operation.ended_ns + shift)
        # Two ranks of an all_to_all may have nothing for each other, and then it says nothing of them.
        self._rows = ~exchanges
        low, high = self._bounds(issued, ended)
        if not (np.isfinite(low).all() and np.isfinite(high).all()) and exchanges.any():
            self._rows = np.ones(len(met), bool)
            low, high = self._bounds(issued, ended)
        self.low, self.high = low, high
        self.ended = ended[[meeting.kind is Kind.ALL for meeting in met]][:MOST_ENDS]

    def _bounds(self, issued: Floats, ended: Floats) -> tuple[Floats, Floats]:
        """Least and greatest correction of each host in the middle of the window."""
        issued, ended = issued[self._rows], ended[self._rows]
        known = np.concatenate([issued[np.isfinite(issued)], ended[np.isfinite(ended)]])
        if not len(known):
            empty = np.full(issued.shape[1], np.inf)
            empty[0] = 0
            self.middle, self.contradiction_ns = 0.0, 0.0
            return -empty, empty
        # Twice, since how far an operation is from the middle is only known once clocks are corrected.
        slack = DRIFT * float(known.max() - known.min())
        self.middle = float(np.median(known))
        low, high, _ = self._paths(issued - slack, ended + slack)
        rough = np.array([_estimate(*bounds)[0] for bounds in zip(low.tolist(), high.tolist(), strict=True)])
        corrected_issued, corrected_ended = issued + rough, ended + rough
        first = corrected_issued[:, 0][np.isfinite(corrected_issued[:, 0])]
        self.middle = float(np.median(first)) if len(first) else float(np.median(known))
        drifts = np.full(issued.shape[1], DRIFT)
        drifts[0] = 0
        with np.errstate(invalid="ignore"):
            early = np.where(np.isfinite(issued), issued - drifts * np.abs(corrected_issued - self.middle), issued)
            late = np.where(np.isfinite(ended), ended + drifts * np.abs(corrected_ended - self.middle), ended)
        low, high, self.contradiction_ns = self._paths(early, late)
        return low, high

    @staticmethod
    def _paths(issued: Floats, ended: Floats) -> tuple[Floats, Floats, float]:
        """Bounds of each host's correction from all constraints, and by how much these had to be widened to agree."""
        count = issued.shape[1]
        most = np.stack([(ended - issued[:, [a]]).min(axis=0) for a in range(count)])
        np.fill_diagonal(most, 0)
        widened = 0.0
        while True:
            with_slack = most + widened * (1 - np.eye(count))
            high = _shortest(with_slack)
            below = _shortest(with_slack.T)
            if high is not None and below is not None:
                return -below, high, widened
            widened = max(1.0, 2 * widened)


def _shortest(most: Floats) -> Floats | None:
    """By host: the greatest correction, given how much more than *b*'s that of *a* can be; nothing if there is none (a negative
    circle). Bellman and Ford."""
    reach = np.full(len(most), np.inf)
    reach[0] = 0
    for _ in range(len(most) + 1):
        better = np.minimum(reach, (most + reach[None, :]).min(axis=1))
        if (better == reach).all():
            return reach
        reach = better
    return None


def _by_ends(ended: Floats) -> tuple[Floats, Floats]:
    """Corrections with which collectives end on all hosts at once, as they nearly do, and how far single ends are from that:
    medians; not a number for hosts without any. Unlike bounds these tell a rank that is always late from a wrong clock."""
    ended = np.where(np.isfinite(ended), ended, np.nan)
    likely, spread = np.full((2, ended.shape[1]), np.nan)
    likely[0] = spread[0] = 0
    coming = [0]
    while coming:
        at = coming.pop()
        apart = ended[:, [at]] - ended
        for other in np.flatnonzero(np.isnan(likely) & ~np.isnan(apart).all(axis=0)).tolist():
            middle = np.nanmedian(apart[:, other])
            likely[other] = likely[at] + middle
            spread[other] = spread[at] + np.nanmedian(np.abs(apart[:, other] - middle))
            coming.insert(0, other)
    return likely, spread


def _joined(
    hosts: list[str],
    walls: dict[str, int],
    windows: list[tuple[int, _Window]],
    problems: list[str],
) -> dict[str, Clock]:
    """The clocks from the bounds of all windows: what one says holds in the others, but for the drift between."""
    windows = sorted(windows, key=lambda each: each[1].origin + each[1].middle)
    times = [each.origin + round(each.middle) for _, each in windows]
    distances = DRIFT * np.diff(np.array([moment - times[0] for moment in times], float))
    low = np.array([each.low for _, each in windows]).reshape(len(windows), len(hosts))
    high = np.array([each.high for _, each in windows]).reshape(len(windows), len(hosts))
    for at, distance in enumerate(distances):
        low[at + 1] = np.maximum(low[at + 1], low[at] - distance)
        high[at + 1] = np.minimum(high[at + 1], high[at] + distance)
    for at in range(len(distances) - 1, -1, -1):
        low[at] = np.maximum(low[at], low[at + 1] - distances[at])
        high[at] = np.minimum(high[at], high[at + 1] + distances[at])
    # Of the two windows before and after, too: single ends are noticed late, by more than clocks drift meanwhile.
    near = [windows[max(0, min(at - 2, len(windows) - 5)) :][:5] for at in range(len(windows))]
    by_ends = np.array(
        [_by_ends(np.concatenate([each.ended[: MOST_ENDS // len(some)] for _, each in some])) for some in near]
    ).reshape(len(windows), 2, len(hosts))
    found = {hosts[0]: Clock()}
    unbound = []
    for at, host in enumerate(hosts[1:], 1):
        jumps = low[:, at] - high[:, at]
        if len(jumps) and jumps.max() > TOLERANCE_NS:
            problems.append(
                f"the clock of {host} jumped against that of {hosts[0]} by {jumps.max() / 1e6:.3f} ms or more, near step "
                f"{windows[int(jumps.argmax())][0]}: waits between the two are wrong by as much"
            )
        is_bound = bool(np.isfinite(low[:, at]).all() and np.isfinite(high[:, at]).all() and windows)
        if not is_bound:
            unbound.append(host)
        likely, doubt_ns = _likely(by_ends[:, 0, at], by_ends[:, 1, at], low[:, at], high[:, at])
        if doubt_ns > WALL_AGREES_NS and np.isfinite(by_ends[:, 0, at]).any():
            problems.append(
                f"by the wall clocks, collectives end {doubt_ns / 1e6:.1f} ms apart on {host} and {hosts[0]}: either the "
                "clocks differ by that (does NTP run?) and waits are wrong by it, or one of the hosts is slow to notice an end"
            )
        estimates = [_estimate(*each) for each in zip(low[:, at].tolist(), high[:, at].tolist(), likely, strict=True)]
        surely = max((wrong for _, wrong in estimates), default=float(WALL_ERROR_NS))
        knots = {
            moment - round(add) - walls[host]: (add, wrong)
            for moment, (add, wrong) in zip(times, estimates, strict=True)
        }
        ordered = tuple((moment, *knots[moment]) for moment in sorted(knots)) or ((0, 0.0, float(WALL_ERROR_NS)),)
        unsure_ns = min(surely, max(doubt_ns, LOOSE_NS))
        if is_bound and unsure_ns > WALL_AGREES_NS and not np.isfinite(by_ends[:, 0, at]).any():
            problems.append(
                f"only sends and receives bound the clock of {host} against that of {hosts[0]}, to ±{unsure_ns / 1e6:.1f} ms: "
                "waits between the two are only right to that"
            )
        found[host] = Clock(walls[host] - walls[hosts[0]], ordered, DRIFT, unsure_ns)
    if unbound:
        problems.append(
            f"no sampled operations bound the clock of {', '.join(unbound)} against that of {hosts[0]} from both sides: the wall "
            "clocks are taken, so waits between these hosts are only right as far as NTP keeps those"
        )
    return found


def _likely(by_ends: Floats, spread: Floats, low: Floats, high: Floats) -> tuple[list[float], float]:
    """What the correction is likely to be in each window, and how far the wall clocks are from its other sign: the ends of
    collectives or, without any, the middle between bounds, which is right if messages take as long both ways.

    Where collectives end at once by the wall clocks, too, their ends are the finer measure, if they agree with each other better
    than with those. Where not, the wall clocks count if bounds allow: a host that lacks processor time may notice each end
    100 ms late.
    """
    count = len(by_ends)
    has_ends = np.flatnonzero(np.isfinite(by_ends))
    of_wall = [0.0] * count
    if not len(has_ends):
        if not count or not (np.isfinite(low).all() and np.isfinite(high).all()):
            return of_wall, float(WALL_ERROR_NS)
        middle = (low + high) / 2
        apart_ns = abs(float(np.median(middle)))
        doubt_ns = apart_ns if apart_ns <= WALL_AGREES_NS else float(WALL_ERROR_NS)
        # By less than that messages are of other sizes one way than the other.
        impossible = np.maximum(np.maximum(low, -high), 0) > np.maximum(LOOSE_NS, (high - low) / 8)
        return (middle.tolist() if np.median(impossible) > 0.5 else of_wall), doubt_ns
    doubt_ns = abs(float(np.median(by_ends[has_ends])))
    if doubt_ns > WALL_AGREES_NS:
        if (low <= 0).all() and (high >= 0).all() and (high - low).max() > 2 * LOOSE_NS:
            return of_wall, doubt_ns
        doubt_ns = 0.0
    elif doubt_ns <= 2 * float(np.median(spread[has_ends])):
        return of_wall, doubt_ns
    ends: list[float] = np.interp(np.arange(count), has_ends, by_ends[has_ends]).tolist()
    return ends, max(float(np.median(spread[has_ends])), doubt_ns)


def _estimate(least: float, most: float, likely: float | None = None) -> tuple[float, float]:
    """A correction between two bounds, and how wrong it may be."""
    if not (np.isfinite(least) and np.isfinite(most)):
        nearest = min(max(0.0, least), most)
        return nearest, float(WALL_ERROR_NS) + abs(nearest)
    if likely is None or most - least <= 2 * LOOSE_NS:
        # If the bounds contradict each other, the truth was once one and once the other.
        return (least + most) / 2, abs(most - least) / 2
    chosen = min(max(likely, least), most)
    return chosen, max(chosen - least, most - chosen)


_BINDING = {Kind.ALL, Kind.EXCHANGE, Kind.SEND}

DRIFT = 1e-4
"""Two quartz clocks run apart by up to 50 ppm each (their data sheets); NTP makes it less."""

WALL_ERROR_NS = 10**9
"""A guess: hosts with NTP are some milliseconds apart, those without by anything."""

LOOSE_NS = 250_000.0
"""Half a round trip between hosts of one network is below. If bounds are further apart, a rank was late in all operations."""

WALL_AGREES_NS = 10_000_000.0
"""NTP keeps hosts of a cluster nearer to each other than this."""

MOST_ENDS = 4096
"""Collectives of a step whose ends are compared."""

TOLERANCE_NS = 10_000.0
"""Contradictions up to here are rounding: torch's profiler writes microseconds."""

MOST_WINDOWS = 512
"""More samples than these add nothing to the precision; they are left out evenly."""
