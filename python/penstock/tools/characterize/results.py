"""What came out of each run, kept in a folder, so that a matrix can be gone on with; and means with confidence intervals."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from penstock.errors import Config
from penstock.files import write_whole
from penstock.profiling.breakdown import MEASURING, Breakdown
from penstock.tools.characterize import checked
from penstock.tools.characterize.matrix import Cell

__all__ = [
    "Estimate",
    "Mean",
    "Outcome",
    "Rates",
    "averages",
    "compared",
    "mean_of",
    "outcome_of",
    "ratio",
    "read",
    "write",
]

FORMAT = "penstock-characterization/1"


@dataclass(frozen=True)
class Outcome:
    """One run of a cell. Times are means over its ranks, in ms of a mean step without what measuring it took.

    More than 16 fields: it is one flat file, each of whose values has a name of its own.
    """

    cell: Cell
    repeat: int
    step_ms: float
    work: Mapping[str, float]
    """By phase."""
    exposed: Mapping[str, float]
    """By purpose of the communication: wire and wait."""
    waits: Mapping[str, float]
    """Of that, wait."""
    hidden: Mapping[str, float]
    bytes: float
    """That a rank gave to operations, a step."""
    receive_mbit: float
    """What a host's link received on average; 0: not counted."""
    receive_peak_mbit: float
    problems: tuple[str, ...] = ()
    """What the profile complains of: too few samples, counters that nobody read, clocks that are far apart."""
    sent_mbit: float = 0.0
    """What it sent on average; 0: not counted."""
    processors: int = 0
    """That all ranks together had; 0: not known."""
    machine: str = ""
    """The processor's name."""
    steps: int = 0
    """0: not known."""
    seed: int = 0
    """Of the matrix."""
    drops: Mapping[str, float] = field(default_factory=dict)
    """By cause, as `utilisation.Drop` has it: how often what a host sends fell below half of what it mostly is."""

    @property
    def communication_ms(self) -> float:
        return sum(self.exposed.values())


class Mean(NamedTuple):
    """A mean, and half of its confidence interval of 95 % (Student's t; infinite with one value)."""

    value: float
    half: float
    runs: int


class Rates(NamedTuple):
    """Of a host's link, Mbit/s."""

    received: float = 0.0
    received_peak: float = 0.0
    sent: float = 0.0


def outcome_of(cell: Cell, repeat: int, breakdown: Breakdown, rates: Rates) -> Outcome:
    """A run in numbers.

    Raises:
        Config: the breakdown has no ranks.
    """
    shares = breakdown.shares
    if not shares:
        raise Config(
            f"{cell.key} recorded nothing: {'; '.join((*breakdown.failures, *breakdown.problems)) or 'nobody knows why'}"
        )

    def mean(of: Iterable[float]) -> float:
        return sum(of) / len(shares) / 1e6

    phases = sorted({phase for share in shares for phase in share.work} - {MEASURING})
    purposes = sorted({purpose for share in shares for purpose in share.communication})

    def by_purpose(of: Callable[[Any], float]) -> dict[str, float]:
        return {
            purpose: mean(of(share.communication[purpose]) for share in shares if purpose in share.communication)
            for purpose in purposes
        }

    return Outcome(
        cell,
        repeat,
        mean(share.unprofiled_ns for share in shares),
        {phase: mean(share.work.get(phase, 0.0) for share in shares) for phase in phases},
        by_purpose(lambda moving: moving.exposed_ns),
        by_purpose(lambda moving: moving.exposed_wait_ns),
        by_purpose(lambda moving: moving.hidden_wire_ns + moving.hidden_wait_ns),
        sum(moving.bytes for share in shares for moving in share.communication.values()) / len(shares),
        rates.received,
        rates.received_peak,
        (*breakdown.failures, *breakdown.problems),
        rates.sent,
    )


def write(folder: Path, outcome: Outcome) -> None:
    """Keep an outcome, whole or not at all."""
    path = folder / f"{outcome.cell.key}.{outcome.repeat}.json"
    text = json.dumps({"format": FORMAT, **dataclasses.asdict(outcome)}, indent=1)
    try:
        write_whole(path, text + "\n")
    except OSError as error:
        raise Config(f"cannot write {path}: {error.strerror}") from error


def read(folder: Path) -> list[Outcome]:
    """All that a folder keeps, by cell and repeat. Files of other versions, and what is none, are an error.

    Raises:
        Config: a file cannot be read or makes no sense.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            given = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(given, dict) or given.pop("format", None) != FORMAT:
                raise ValueError(f"it is no {FORMAT}")
            found.append(checked.made(Outcome, _OUTCOME, given))
        except OSError as error:
            raise Config(f"cannot read {path}: {error.strerror}") from error
        except (ValueError, TypeError, RecursionError) as error:
            raise Config(f"{path} is no outcome of a run ({error}): remove it, and the run is made again") from error
    return sorted(found, key=lambda one: (one.cell.key, one.repeat))


def mean_of(values: Sequence[float]) -> Mean:
    """The mean of independent runs."""
    count = len(values)
    if count < 2:
        return Mean(values[0] if values else math.nan, math.inf, count)
    half = _t(count - 1) * statistics.stdev(values) / math.sqrt(count)
    return Mean(statistics.fmean(values), half, count)


class Estimate(NamedTuple):
    """A mean over cells, or over pairs of cells; and half of its confidence interval of 95 %, unless each cell has one run."""

    value: float
    half: float | None
    over: int
    """How many cells or pairs."""


def averages(groups: Sequence[Sequence[Sequence[float]]]) -> list[Estimate]:
    """The mean over the cells of each group. A cell is the values of its runs. Pure.

    Cells have few runs, so their noise is taken from all cells of all groups together (a pooled variance).
    """
    cells = [cell for group in groups for cell in group]
    freedom = sum(len(cell) - 1 for cell in cells)
    squares = sum((one - statistics.fmean(cell)) ** 2 for cell in cells for one in cell)
    found = []
    for group in groups:
        value = statistics.fmean(map(statistics.fmean, group))
        half = None
        if freedom:
            half = _t(freedom) * math.sqrt(squares / freedom * sum(1 / len(cell) for cell in group)) / len(group)
        found.append(Estimate(value, half, len(group)))
    return found


def ratio(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Estimate:
    """How many times as much the second of each pair is as the first, which are the runs of two cells. Pairs whose first mean is
    0 are left out. Pure.

    As in `averages`, the noise is that of all cells together, here as a share of each cell's mean.
    """
    known = [(before, after) for before, after in pairs if statistics.fmean(before) > 0]
    if not known:
        return Estimate(0.0, None, 0)
    ratios = [statistics.fmean(after) / statistics.fmean(before) for before, after in known]
    runs = [each for pair in known for each in pair if statistics.fmean(each) > 0]
    freedom = sum(len(each) - 1 for each in runs)
    value = statistics.fmean(ratios)
    if not freedom:
        return Estimate(value, None, len(known))
    noise = sum((one / statistics.fmean(each) - 1) ** 2 for each in runs for one in each) / freedom
    spread = sum(
        each**2 * (1 / len(before) + 1 / len(after)) for each, (before, after) in zip(ratios, known, strict=True)
    )
    return Estimate(value, _t(freedom) * math.sqrt(noise * spread) / len(known), len(known))


class Difference(NamedTuple):
    """Of two means: after less before, as a part of before, and half of its confidence interval of 95 % (Welch)."""

    change: float
    half: float
    """Infinite where one of them is of a single run."""
    probability: float
    """Of a difference as large or larger by chance, without a change; nan where ``half`` is infinite."""


def compared(before: Sequence[float], after: Sequence[float]) -> Difference:
    """By how much times have changed, beside what runs differ by."""
    base = statistics.fmean(before)
    change = statistics.fmean(after) / base - 1
    if len(before) < 2 or len(after) < 2:
        return Difference(change, math.inf, math.nan)
    parts = [statistics.variance(each) / len(each) for each in (before, after)]
    total = sum(parts)
    if total == 0:
        return Difference(change, 0.0, float(change == 0))
    freedom = total**2 / sum(
        part**2 / (len(each) - 1) for part, each in zip(parts, (before, after), strict=True) if part
    )
    whole, error = max(1, math.floor(freedom)), math.sqrt(total) / base
    return Difference(change, _t(whole) * error, _beyond(change / error, whole))


def verdicts(differences: Sequence[Difference]) -> list[str]:
    """Of each, whether it is a change. Of differences that are all noise one or more is called a change in 5 % of cases at most,
    however many there are (Holm, Scandinavian Journal of Statistics 6, 1979); in 8 to 9 % where one folder has 2 runs of a cell
    and the other 8 to 10, for which Welch's test is no better."""
    told = ["noise" if math.isfinite(each.half) else "one run: unknown" for each in differences]
    known = [at for at, each in enumerate(differences) if math.isfinite(each.half)]
    for rank, at in enumerate(sorted(known, key=lambda at: differences[at].probability)):
        if differences[at].probability > ERROR / (len(known) - rank):
            break
        told[at] = "slower" if differences[at].change > 0 else "faster"
    return told


def _beyond(t: float, freedom: int) -> float:
    """The probability that Student's t is as far from 0 or farther, on both sides (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan2(abs(t), math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = freedom % 2
    term = cosine if is_odd else 1.0
    total = 0.0
    for at in range(2 + is_odd, freedom + 1, 2):
        total += term
        term *= cosine**2 * (at - 1) / at
    within = 2 / math.pi * (angle + sine * total) if is_odd else sine * total
    return max(0.0, 1 - within)


def _t(freedom: int) -> float:
    """Student's t for 95 % on both sides."""
    return _T[freedom - 1] if freedom <= len(_T) else 1.96 + 2.4 / freedom


def _cell(given: Any) -> Cell:
    if not isinstance(given, dict):
        raise ValueError("no object")
    cell = checked.made(Cell, _CELL, given)
    if not cell.ranks:
        raise ValueError("no ranks")
    return cell


_CELL: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("model", "parallel", "transport", "scaling", "launch", "device"), checked.text),
    **dict.fromkeys(("ranks", "batch", "micro_batch", "sequence", "checkpoint_every", "evaluate_every"), checked.count),
    **dict.fromkeys(("link_mbit", "flow_mbit"), checked.number),
}
_OUTCOME: dict[str, Callable[[Any], Any]] = {
    "cell": _cell,
    "repeat": checked.count,
    "step_ms": checked.positive,
    **dict.fromkeys(("work", "exposed", "waits", "hidden", "drops"), checked.parts),
    "bytes": lambda value: checked.number(value, most=1e18),
    **dict.fromkeys(("receive_mbit", "receive_peak_mbit", "sent_mbit"), checked.number),
    "problems": checked.texts,
    **dict.fromkeys(("processors", "steps", "seed"), checked.count),
    "machine": checked.text,
}
ERROR = 0.05
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101,
    2.093, 2.086,
)  # fmt: skip
