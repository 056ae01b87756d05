"""The paper's statements (Dai et al., IEEE Micro 2024), each with what was measured here, and whether it holds."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.tools.characterize.matrix import Cell
from penstock.tools.characterize.results import Outcome
from penstock.workloads.transformer.shapes import MODELS, layers_of

__all__ = ["Finding", "findings"]


@dataclass(frozen=True)
class Finding:
    """A statement beside a measurement."""

    number: str
    """Observation or figure of the paper."""
    says: str
    here: str
    """What was measured, in numbers; why nothing, if nothing was."""
    holds: bool | None
    """None: nothing was measured that could tell."""


def findings(outcomes: Sequence[Outcome]) -> list[Finding]:
    """All statements. Pure."""
    means = [
        _Mean(cell, [one for one in outcomes if one.cell == cell]) for cell in dict.fromkeys(o.cell for o in outcomes)
    ]
    return [
        _scaling(
            means, "strong", "observation 1", "computing scales strongly: forward 57 %, backward 72 % from 2 to 8 ranks"
        ),
        _share(means, "strong", "observation 1", "all-reduce takes most of a step (53 to 92 % with 8 ranks)"),
        _size(means),
        _scaling(
            means, "weak", "observation 3", "computing scales weakly: forward 97 %, backward 99 % from 2 to 8 ranks"
        ),
        _share(means, "weak", "observation 3", "all-reduce takes most of a step (51 to 91 % with 8 ranks)"),
        _more_ranks(means),
        _faster_link(
            means, "data", "abstract", "a link 10 times as fast makes data parallel steps 4.8 times as fast", 1.5
        ),
        _faster_link(means, "pipeline", "abstract", "and pipeline steps only 1.2 times", None),
        _pipeline(means),
        _bubble(means),
        _batches(means),
    ]


class _Mean:
    """A cell with the means of its runs."""

    def __init__(self, cell: Cell, runs: Sequence[Outcome]) -> None:
        self.cell = cell
        self.step_ms = statistics.fmean(run.step_ms for run in runs)
        self.receive = statistics.fmean(run.receive_mbit for run in runs)
        self._runs = runs

    def work(self, phase: str) -> float:
        return statistics.fmean(run.work.get(phase, 0.0) for run in self._runs)

    @property
    def communication(self) -> float:
        """Its share of the step."""
        return statistics.fmean(run.communication_ms for run in self._runs) / self.step_ms

    def exposed(self, purpose: str) -> float:
        return statistics.fmean(run.exposed.get(purpose, 0.0) for run in self._runs)

    def waits(self, purpose: str) -> float:
        return statistics.fmean(run.waits.get(purpose, 0.0) for run in self._runs)


def _groups(means: Iterable[_Mean], free: Sequence[str]) -> list[list[_Mean]]:
    """Cells that differ in nothing but some fields."""
    found: dict[tuple[object, ...], list[_Mean]] = {}
    for mean in means:
        key = tuple(value for name, value in vars(mean.cell).items() if name not in free)
        found.setdefault(key, []).append(mean)
    return [group for group in found.values() if len(group) > 1]


def _unknown(number: str, says: str, lacks: str) -> Finding:
    return Finding(number, says, f"the matrix has no {lacks}", None)


def _scaling(means: Sequence[_Mean], scaling: str, number: str, says: str) -> Finding:
    strong = scaling == "strong"
    of = [mean for mean in means if mean.cell.parallel == "data" and mean.cell.scaling == scaling]
    groups = _groups(of, ["ranks"] if strong else ["ranks", "batch"])
    told: dict[str, list[float]] = {"forward": [], "backward": []}
    for group in groups:
        few, many = (pick(group, key=lambda mean: mean.cell.ranks) for pick in (min, max))
        factor = many.cell.ranks / few.cell.ranks if strong else 1.0
        for phase, values in told.items():
            if many.work(phase) > 0:
                values.append(few.work(phase) / factor / many.work(phase))
    if not all(told.values()):
        return _unknown(number, says, f"data parallel cells with {scaling} scaling over ranks")
    forward, backward = (statistics.fmean(values) for values in told.values())
    ranks = sorted({mean.cell.ranks for group in groups for mean in group})
    here = f"forward {forward:.0%}, backward {backward:.0%} from {ranks[0]} to {ranks[-1]} ranks"
    return Finding(number, says, here, min(forward, backward) > (0.5 if strong else 0.9))


def _share(means: Sequence[_Mean], scaling: str, number: str, says: str) -> Finding:
    of = [
        mean for mean in means if mean.cell.parallel == "data" and mean.cell.scaling == scaling and mean.cell.link_mbit
    ]
    if not of:
        return _unknown(number, says, f"data parallel cells with {scaling} scaling over a link")
    most = max(mean.cell.ranks for mean in of)
    shares = [mean.communication for mean in of if mean.cell.ranks == most]
    here = f"{min(shares):.0%} to {max(shares):.0%} with {most} ranks"
    return Finding(number, says, here, statistics.fmean(shares) > 0.5)


def _size(means: Sequence[_Mean]) -> Finding:
    number, says = "observation 2", "larger models use more of the link"
    of = [mean for mean in means if mean.cell.parallel == "data" and mean.receive > 0]
    pairs = []
    for group in _groups(of, ["model"]):
        ordered = sorted(group, key=lambda mean: _parameters(mean.cell.model))
        pairs.append((ordered[0], ordered[-1]))
    if not pairs:
        return _unknown(number, says, "two models with the same ranks, batch and link")
    small, large = (statistics.fmean(pair[at].receive for pair in pairs) for at in (0, 1))
    return Finding(number, says, f"the smallest received {small:.0f} Mbit/s, the largest {large:.0f}", large > small)


def _more_ranks(means: Sequence[_Mean]) -> Finding:
    number, says = "figure 4", "more ranks use more of the link (1.1 times from 4 to 8 over TCP)"
    of = [mean for mean in means if mean.cell.parallel == "data" and mean.cell.scaling == "weak" and mean.receive > 0]
    ratios = []
    for group in _groups(of, ["ranks", "batch"]):
        few, many = (pick(group, key=lambda mean: mean.cell.ranks) for pick in (min, max))
        ratios.append(many.receive / few.receive)
    if not ratios:
        return _unknown(number, says, "data parallel cells with weak scaling over a link")
    ratio = statistics.fmean(ratios)
    return Finding(number, says, f"{ratio:.2f} times", ratio > 1)


def _faster_link(means: Sequence[_Mean], parallel: str, number: str, says: str, least: float | None) -> Finding:
    of = [mean for mean in means if mean.cell.parallel == parallel and mean.cell.link_mbit]
    ratios = []
    factor = 0.0
    for group in _groups(of, ["link_mbit"]):
        slow, fast = (pick(group, key=lambda mean: mean.cell.link_mbit) for pick in (min, max))
        ratios.append(slow.step_ms / fast.step_ms)
        factor = fast.cell.link_mbit / slow.cell.link_mbit
    if not ratios:
        return _unknown(number, says, f"{'pipeline' if least is None else 'data parallel'} cells over two links")
    ratio = statistics.fmean(ratios)
    here = f"{ratio:.2f} times with a link {factor:g} times as fast ({min(ratios):.2f} to {max(ratios):.2f})"
    return Finding(number, says, here, ratio >= least if least is not None else ratio < 1.5)


def _pipeline(means: Sequence[_Mean]) -> Finding:
    number, says = (
        "observation 5",
        "in model parallelism receiving and the embeddings' all-reduce take up to 90 % of a step",
    )
    of = [mean for mean in means if mean.cell.parallel == "pipeline"]
    if not of:
        return _unknown(number, says, "pipeline")
    shares = [mean.communication for mean in of]
    return Finding(number, says, f"{min(shares):.0%} to {max(shares):.0%}", max(shares) > 0.5)


def _bubble(means: Sequence[_Mean]) -> Finding:
    number, says = (
        "ours",
        "most of that is waiting for the stage before or after (the pipeline's bubble), and no bytes move",
    )
    of = [mean for mean in means if mean.cell.parallel == "pipeline" and mean.communication > 0]
    if not of:
        return _unknown(number, says, "pipeline")
    shares = [sum(map(mean.waits, _purposes(mean))) / (mean.communication * mean.step_ms) for mean in of]
    return Finding(
        number, says, f"{min(shares):.0%} to {max(shares):.0%} of it is waiting", statistics.fmean(shares) > 0.5
    )


def _batches(means: Sequence[_Mean]) -> Finding:
    number, says = "figure 6", "larger batches lower the share of communication in data parallelism, to 34 % at least"
    of = [mean for mean in means if mean.cell.parallel == "data" and mean.cell.link_mbit]
    told = []
    for group in _groups(of, ["batch"]):
        small, large = (pick(group, key=lambda mean: mean.cell.batch) for pick in (min, max))
        told.append((small.communication, large.communication))
    if not told:
        return _unknown(number, says, "data parallel cells with several batches over a link")
    before, after = (statistics.fmean(pair[at] for pair in told) for at in (0, 1))
    return Finding(number, says, f"from {before:.0%} to {after:.0%}", after < before)


def _purposes(mean: _Mean) -> set[str]:
    return {purpose for run in mean._runs for purpose in run.exposed}


def _parameters(model: str) -> int:
    """But for embeddings and a factor."""
    shape = MODELS[model]
    return len(layers_of(shape)) * shape.width**2
