"""A breakdown in words and as tables: for the terminal, and for the page, which says the same."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from rich.console import Console

from penstock.numbers import bit_rate, duration, plural, share, size, traffic
from penstock.profiling.advice import Advice, Change, is_listed
from penstock.profiling.breakdown import MEASURING, OTHER, PHASES, PURPOSES, Breakdown, Moving, Share
from penstock.profiling.cause import Cause
from penstock.profiling.utilisation import Drop
from penstock.reports import Column, Line, Table

__all__ = [
    "Unit",
    "answer",
    "causes",
    "changes",
    "collectives",
    "communication",
    "division",
    "drop",
    "examples",
    "fallen",
    "instruction",
    "left_out",
    "mean_step_ns",
    "numbers",
    "print_details",
    "purposes",
    "still_ns",
    "tells_cause",
    "unit",
    "waited_for",
]


class Unit(NamedTuple):
    """What times of one table or chart are told in."""

    name: str
    ns: float

    def text(self, time_ns: float) -> str:
        value = time_ns / self.ns
        return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def unit(time_ns: float) -> Unit:
    """The one that fits a step."""
    return Unit("s", 1e9) if time_ns >= 10e9 else Unit("ms", 1e6) if time_ns >= 1e6 else Unit("µs", 1e3)


def print_details(
    breakdown: Breakdown,
    advice: Advice | None,
    console: Console,
    next_step: Change | None,
    drops: Sequence[Drop] = (),
) -> None:
    """What stands below the first screen, which has told ``next_step`` already."""
    if any(each.steps for each in breakdown.shares):
        if rate := examples(breakdown):
            console.print(f"Examples a second, of all ranks: {rate}.\n")
        console.print(division(breakdown).for_terminal())
        if without := left_out(breakdown):
            console.print(f"{without}\n")
        console.print(communication(breakdown).for_terminal())
        if waits := waited_for(breakdown):
            console.print(waits.for_terminal())
        if told := fallen(drops):
            console.print(f"{told}\n")
    elif breakdown.shares:
        console.print(collectives(breakdown).for_terminal())
    for note in breakdown.notes:
        console.print(note)
    if advice is None:
        return
    if advice.causes:
        console.print("Why a step takes so long\n")
    for cause in advice.causes[:FIRST_CAUSES]:
        is_told = next_step is not None and tells_cause(next_step) and next_step.cause == cause
        console.print("- As the next step above says." if is_told else f"- {cause.text}.")
        if told := numbers(cause):
            console.print(f"  Numbers: {told}.")
        if not is_listed(cause):
            console.print(f"  To change it: {cause.change}.")
    if advice.changes:
        console.print()
        console.print(changes(breakdown, advice).for_terminal())
        for place, each in enumerate(advice.changes, 1):
            console.print(f"{place}. {each.what}: {'the next step above' if each == next_step else instruction(each)}.")


def fallen(drops: Sequence[Drop]) -> str:
    """Where traffic falls, in a sentence; nothing where it does not."""
    if not drops:
        return ""
    largest = max(drops, key=lambda each: (1 - each.share) * (each.interval[1] - each.interval[0]))
    what = "the traffic of an interface fell below half of its usual rate"
    if len(drops) == 1:
        return f"Once {what}: {drop(largest)}."
    explained = [each.cause for each in drops if each.cause]
    causes = f"explained by {', '.join(sorted(set(explained)))}" if explained else "explained"
    are = "is" if len(explained) == 1 else "are"
    return (
        f"{len(drops)} times {what}; {len(explained) or 'none'} of these {are} {causes}. The largest: {drop(largest)}."
    )


def drop(one: Drop, since: str = "") -> str:
    """
    Args:
        since: when it begins, in words.
    """
    way = "" if len(one.ways) > 1 else f" ({WAYS[one.ways[0]]})"
    length = duration((one.interval[1] - one.interval[0]) / 1e9)
    cause = (one.cause or "no cause is known") + (f" of rank {one.rank}" if one.rank is not None else "")
    return f"{one.interface} of {one.host}{way} for {length}{since}, {share(one.share)} of the usual rate: {cause}"


# Why, and what would change it


def causes(breakdown: Breakdown, advice: Advice) -> Table:
    """All causes, for the page."""
    step_ns = mean_step_ns(breakdown)
    lines = [
        Line(
            [
                cause.kind,
                cause.text,
                numbers(cause),
                share(cause.cost_ns / step_ns) if step_ns else duration(cause.cost_ns / 1e9),
            ]
        )
        for cause in advice.causes
    ]
    columns = [
        Column("cause", is_text=True),
        Column("what was found", is_text=True),
        Column("numbers", is_text=True, meaning="what the rule compared"),
        Column("explains", meaning="of the mean step"),
    ]
    return Table("Why a step takes so long", columns, lines)


def numbers(cause: Cause) -> str:
    """What its rule compared, in one line: ``on wire 180 Mbit/s, of limit 90%``."""
    return ", ".join(_number(name, value) for name, value in cause.numbers.items())


def _number(name: str, value: float) -> str:
    """By the unit in its name, which the value then has instead."""
    for unit_of, text in UNITS:
        if f"_{unit_of}_" in f"_{name}_":
            words = f"_{name}_".replace(f"_{unit_of}_", "_", 1).strip("_")
            return f"{words} {text(value)}".replace("_", " ").strip()
    return f"{name.replace('_', ' ')} {value:.4g}"


def changes(breakdown: Breakdown, advice: Advice) -> Table:
    """The ranked list: what a step would take with something changed; on a page with the settings and the numbers behind them."""
    step_ns = mean_step_ns(breakdown)
    scale = unit(step_ns)
    lines = []
    for place, each in enumerate(advice.changes, 1):
        cells = ["-", "-", "-"]
        if each.gain_ns is not None:
            after_ns = max(0.0, step_ns - each.gain_ns)
            error = f"±{100 * each.prediction.error:.0f} %" if each.prediction is not None else "-"
            cells = [scale.text(after_ns), error, f"{step_ns / after_ns:.2f}×" if after_ns else "-"]
        because = each.prediction.because if each.prediction is not None else ""
        lines.append(
            Line([f"{place}. {each.what}", *cells], meaning="; ".join(filter(None, [instruction(each), because])))
        )
    columns = [
        Column("with", is_text=True),
        Column(f"a step, {scale.name}", meaning=HOW_TOLD),
        Column("error"),
        Column("faster"),
    ]
    return Table(f"What to change: a step takes {scale.text(step_ns)} {scale.name}", columns, lines)


def instruction(change: Change) -> str:
    """The setting or command; and where there is none for `--apply`, that."""
    if change.obstacle and change.how:
        return f"{change.how} ({change.obstacle})"
    return change.how or change.obstacle


def tells_cause(change: Change) -> bool:
    """Whether what is to be done is what its cause says."""
    return change.cause is not None and change.how == change.cause.change


# In one line


def answer(breakdown: Breakdown) -> str:
    """What a step's time goes into, in one line."""
    shares = [each for each in breakdown.shares if each.steps]
    if not shares:
        return _sums(breakdown)
    step = mean_step_ns(breakdown)
    still = _mean(map(still_ns, shares))
    who = "Ranks" if len(shares) > 1 else f"Rank {shares[0].rank}"
    of_step = f"of a step of {duration(step / 1e9)}"
    if still < LEAST * step or not step:
        work = {name: time for name, time in _mean_work(shares).items() if name != MEASURING} or {OTHER: 0.0}
        most = max(work, key=work.__getitem__)
        verb = "compute" if len(shares) > 1 else "computes"
        working = f"{most} takes {share(work[most] / step)} {of_step}" if step else "steps take no time"
        return f"{who} {verb} without standing still: {working}"
    wire, waits = _by_purpose(shares, "exposed_wire_ns"), _by_purpose(shares, "exposed_wait_ns")
    parts = [
        (sum(wire.values()), "wire", _mostly(wire), ""),
        (sum(waits.values()), "wait", _mostly(waits), _for_whom(shares)),
    ]
    told: list[str] = []
    before = ""
    for time, kind, of, whom in sorted(parts, key=lambda part: -part[0]):
        if time >= LEAST * step:
            told.append(f"{share(time / step)} {kind}{of if of != before else ''}{whom}")
            before = of
    said = ", ".join(told)
    verb = "stand" if len(shares) > 1 else "stands"
    return f"{who} {verb} still for {share(still / step)} {of_step}: {said or 'in small parts'}"


def _sums(breakdown: Breakdown) -> str:
    if not breakdown.shares:
        return "No step was recorded"
    moved = [each for one in breakdown.shares for each in one.communication.values()]
    total = sum(each.hidden_wire_ns + each.hidden_wait_ns + each.exposed_ns for each in moved) / len(breakdown.shares)
    count = round(sum(each.operations for each in moved))
    who = "process was" if len(breakdown.shares) == 1 else "processes were on average"
    return (
        f"{len(breakdown.shares)} {who} in collectives for {duration(total / 1e9)}: {plural(count, 'operation')} in all, "
        f"{traffic(sum(each.bytes for each in moved))}"
    )


def _mostly(times: dict[str, float]) -> str:
    whole = sum(times.values())
    if not whole:
        return ""
    most = max(times, key=times.__getitem__)
    if times[most] > 0.95 * whole:
        return f" of {_told(most)}"
    return f" (mostly {_told(most)})" if times[most] > 0.5 * whole else ""


def _told(purpose: str) -> str:
    """In other words than a phase of the same name."""
    return "other communication" if purpose == OTHER else purpose


def _for_whom(shares: Sequence[Share]) -> str:
    """The rank that others stand still for, if it is one."""
    waited = _waited(shares, is_exposed=True)
    most = max(waited, key=waited.__getitem__, default=None)
    if most is None or waited[most] <= MOSTLY * sum(waited.values()):
        return ""
    return f", mostly for rank {most}"


def examples(breakdown: Breakdown) -> str:
    """How many a second all ranks take; nothing where that is unknown."""
    rate = breakdown.examples_per_s
    return "" if rate is None else f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


# Tables


def division(breakdown: Breakdown) -> Table:
    """A step by phase and exposed communication, of all ranks, or of a few and what is least and most of many."""
    shares = [each for each in breakdown.shares if each.steps]
    step = mean_step_ns(breakdown)
    in_unit = unit(step)
    is_few = len(shares) <= FEW
    is_measured = any(each.work.get(MEASURING) for each in shares)
    of_it = "of the step, without what the profiler itself takes" if is_measured else ""
    columns = [Column(f"a step, in {in_unit.name}", is_text=True), Column("mean"), Column("of it", meaning=of_it)]
    if is_few and len(shares) > 1:
        columns += [Column(f"rank {each.rank}") for each in shares]
    elif not is_few:
        columns += [Column("least (rank)"), Column("median"), Column("most (rank)")]
    lines = []

    def add(name: str, of: Callable[[Share], float], kind: str = "plain") -> None:
        values = [of(each) for each in shares]
        if kind == "plain" and all(in_unit.text(value) == NO_TIME for value in values):
            return
        mean = _mean(values)
        is_of_it = not is_measured or name not in (WHOLE, MEASURING)
        cells = [name, in_unit.text(mean), share(mean / step) if step and is_of_it else "-" if step else ""]
        if is_few and len(shares) > 1:
            cells += [in_unit.text(value) for value in values]
        elif not is_few:
            low, high = (pick(range(len(values)), key=values.__getitem__) for pick in (min, max))
            least, most = in_unit.text(values[low]), in_unit.text(values[high])
            # Where all are alike, none is named.
            which = ("", "") if least == most else (f" ({shares[low].rank})", f" ({shares[high].rank})")
            cells += [least + which[0], in_unit.text(statistics.median(values)), most + which[1]]
        lines.append(Line(cells, kind="best" if kind == "best" else "plain"))

    add(WHOLE, lambda each: each.step_ns, "best")
    for phase in phases(shares):
        add(phase, lambda each, phase=phase: each.work.get(phase, 0.0))  # type: ignore[misc]
    for purpose in purposes(shares):
        add(f"{_told(purpose)}: wire", lambda each, purpose=purpose: _of(each, purpose).exposed_wire_ns)  # type: ignore[misc]
        add(f"{_told(purpose)}: wait", lambda each, purpose=purpose: _of(each, purpose).exposed_wait_ns)  # type: ignore[misc]
    return Table("Where a step goes", columns, lines)


def left_out(breakdown: Breakdown) -> str:
    """What percentages are without, where that is worth a word."""
    shares = [each for each in breakdown.shares if each.steps]
    whole, step = _mean(each.step_ns for each in shares), mean_step_ns(breakdown)
    if whole - step <= WORTH_A_WORD * whole:
        return ""
    took, of = duration((whole - step) / 1e9), duration(whole / 1e9)
    return f"The profiler itself takes {took} of a step of {of}, {share(1 - step / whole)}: all percentages are without it."


def communication(breakdown: Breakdown) -> Table:
    """By purpose, mean of all ranks: what a rank stood still for, and what ran beside its work."""
    shares = [each for each in breakdown.shares if each.steps]
    in_unit = unit(mean_step_ns(breakdown))
    columns = [
        Column(f"for, in {in_unit.name}", is_text=True),
        Column("wire", meaning="Exposed: all ranks are there, bytes move, and this rank stands still."),
        Column("wait", meaning="Exposed: a rank is not there yet, and this one stands still."),
        Column("hidden\nwire", meaning="Bytes move while this rank works."),
        Column("hidden\nwait", meaning="A rank is not there yet, and this one works."),
        Column("a step", meaning="Operations of a rank in a step."),
        Column("bytes", meaning="What a rank gives to them in a step."),
    ]
    lines = []
    for purpose in purposes(shares):
        moved = [_of(each, purpose) for each in shares]
        means = [
            _mean(getattr(each, name) for each in moved)
            for name in ("exposed_wire_ns", "exposed_wait_ns", "hidden_wire_ns", "hidden_wait_ns")
        ]
        operations, size_bytes = _mean(each.operations for each in moved), _mean(each.bytes for each in moved)
        cells = ["-" if in_unit.text(each) == NO_TIME else in_unit.text(each) for each in means]
        cells += [f"{operations:.3g}" if operations else "-", size(size_bytes) if size_bytes else "-"]
        if set(cells) != {"-"}:
            lines.append(Line([purpose, *cells]))
    if not lines:
        lines = [Line(["none was seen", *["-"] * 6])]
    return Table("Communication, mean of a rank and step", columns, lines)


def waited_for(breakdown: Breakdown) -> Table | None:
    """Whom the others wait for, those first who cost most."""
    shares = [each for each in breakdown.shares if each.steps]
    waited = _waited(shares)
    if not waited or len(shares) < 2:
        return None
    in_unit = unit(mean_step_ns(breakdown))
    columns = [
        Column("ranks wait for", is_text=True),
        Column(f"mean of the others, {in_unit.name}", meaning="In a step, exposed and hidden."),
        Column("of all waiting"),
    ]
    whole = sum(waited.values())
    order = sorted(waited, key=lambda rank: (-waited[rank], rank))
    lines = [
        Line([f"rank {rank}", in_unit.text(waited[rank] / (len(shares) - 1)), share(waited[rank] / whole)])
        for rank in order[:MOST_WAITED]
    ]
    rest = sum(waited[rank] for rank in order[MOST_WAITED:])
    if rest:
        lines.append(
            Line([f"{len(order) - MOST_WAITED} others", in_unit.text(rest / (len(shares) - 1)), share(rest / whole)])
        )
    return Table("Whom they wait for", columns, lines)


def collectives(breakdown: Breakdown) -> Table:
    """Sums over a file without steps."""
    columns = [
        Column("collective", is_text=True),
        Column("operations"),
        Column("bytes"),
        Column("time"),
        Column("bytes a second", meaning="Bytes over time, all processes: no bus bandwidth."),
    ]
    lines = []
    for name in purposes(breakdown.shares):
        moved = [_of(each, name) for each in breakdown.shares]
        time = sum(each.hidden_wire_ns + each.hidden_wait_ns + each.exposed_ns for each in moved)
        total = sum(each.bytes for each in moved)
        rate = f"{total / time:.2f} GB/s" if time else "-"
        lines.append(
            Line([name, f"{sum(each.operations for each in moved):,.0f}", traffic(total), duration(time / 1e9), rate])
        )
    return Table("Sums over all processes", columns, lines)


# Numbers


def mean_step_ns(breakdown: Breakdown) -> float:
    """Of all ranks, without what the profiler itself takes."""
    return _mean(each.unprofiled_ns for each in breakdown.shares if each.steps)


def still_ns(one: Share) -> float:
    """How long a rank stands still in a step."""
    return sum(each.exposed_ns for each in one.communication.values())


def phases(shares: Sequence[Share]) -> list[str]:
    """In the order in which they are told; those that this version does not know stand last."""
    used = dict.fromkeys(name for each in shares for name, time in each.work.items() if time)
    return [*(name for name in PHASES if name in used), *sorted(set(used) - set(PHASES))]


def purposes(shares: Sequence[Share]) -> list[str]:
    used = dict.fromkeys(name for each in shares for name in each.communication)
    return [*(name for name in PURPOSES if name in used), *(name for name in used if name not in PURPOSES)]


def _of(one: Share, purpose: str) -> Moving:
    return one.communication.get(purpose, NOTHING)


def _waited(shares: Sequence[Share], *, is_exposed: bool = False) -> dict[int, float]:
    """By the rank that came last; exposed and hidden, of which for each rank the same part is exposed."""
    found: dict[int, float] = {}
    for each in shares:
        for moved in each.communication.values():
            both = moved.exposed_wait_ns + moved.hidden_wait_ns
            part = moved.exposed_wait_ns / both if is_exposed and both > 0 else 1.0
            for rank, time in moved.waited_for.items():
                if time * part > 0:
                    found[rank] = found.get(rank, 0.0) + time * part
    return found


def _by_purpose(shares: Sequence[Share], name: str) -> dict[str, float]:
    return {purpose: _mean(getattr(_of(each, purpose), name) for each in shares) for purpose in purposes(shares)}


def _mean_work(shares: Sequence[Share]) -> dict[str, float]:
    return {name: _mean(each.work.get(name, 0.0) for each in shares) for name in phases(shares)} or {OTHER: 0.0}


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0


NOTHING = Moving()
WAYS = {"rx": "received", "tx": "sent"}
NO_TIME = "0.00"
"""As `Unit.text` tells it."""
UNITS: tuple[tuple[str, Callable[[float], str]], ...] = (
    ("bytes_per_s", lambda value: bit_rate(8 * value)),
    ("ms", lambda value: f"{value:,.0f} ms" if value >= 1000 else f"{value:.3g} ms"),
    ("bytes", size),
    ("share", lambda value: f"{100 * value:.3g}%" if abs(value) >= 1e-4 else "0%"),
)
"""In the names of a cause's numbers. The first that fits."""
FEW, MOST_WAITED, FIRST_CAUSES = 4, 5, 3
MOSTLY = 0.6
HOW_TOLD = "computed: with an error by running sampled steps again, else by what a cause's rule compared; - where neither tells"
WHOLE = "whole step"
LEAST = 0.005
"""A share of a step that rounds to nothing."""
WORTH_A_WORD = 0.02
