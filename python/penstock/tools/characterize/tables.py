"""What was measured as tables: where steps go, the paper's findings, a comparison of two folders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from penstock.numbers import plural
from penstock.reports import Column, Line, Table
from penstock.tools.characterize.findings import ABSENT, Finding
from penstock.tools.characterize.means import LEAST_MS, Means, means, network, size
from penstock.tools.characterize.results import Difference, Mean, Outcome, compared, verdicts
from penstock.workloads.transformer.shapes import MODELS

__all__ = ["Both", "both", "comparison", "judged", "models", "times", "unlike"]


def times(outcomes: Sequence[Outcome]) -> Table:
    """A step's parts, as figures 3, 4 and 5 have them."""
    cells = means(outcomes)
    has_purposes = any(len(_purposes(each)) > 1 for each in cells)
    lines = []
    for each in cells:
        cell = each.cell
        waits = each.mean(lambda run: sum(run.waits.values()))
        communication = each.mean(lambda run: run.communication_ms)
        parts = [each.work(*phases) for phases in PHASES]
        texts = [
            size(cell),
            _milliseconds(each.step),
            # The last is what is left of the step, so that a line comes to it.
            *map(_tenth, (*parts, each.step.value - sum(parts) - communication, communication - waits, waits)),
            f"{each.share:.0%}",
            _rate(each),
            *([", ".join(_purposes(each))] if has_purposes else []),
        ]
        lines.append(Line(texts, (f"{cell.model}, {cell.parallel} parallel, {cell.scaling} scaling, {network(cell)}",)))
    columns = [
        Column("ranks, batch", is_text=True),
        Column("step, ms", meaning="mean of the runs, and half of its confidence interval of 95 %"),
        Column("forward"),
        Column("backward"),
        Column("optimizer"),
        Column("other", meaning="the rest of the step: loading, evaluations, checkpoints, and what has no name"),
        Column("wire", meaning="communication for which ranks stand still, while bytes move"),
        Column("wait", meaning="for which they stand still because another rank is not there yet"),
        Column("still", meaning="wire and wait, of the step"),
        Column("received, Mbit/s", meaning="by a host's link, on average and at most in a tenth of a second"),
        *([Column("by purpose", is_text=True, meaning="wire and wait together, ms")] if has_purposes else []),
    ]
    return Table("Where steps go", columns, lines, groups=[Column("model", is_text=True)])


def comparison(before: Sequence[Outcome], after: Sequence[Outcome]) -> Table:
    """Steps of cells that both have: whether they have changed beyond what runs differ by."""
    lines = []
    for each in both(before, after):
        cell, (change, half, _) = each.old.cell, each.difference
        told = f"{change:+.1%}" + (f" ± {half:.1%}" if half < 10 else "")
        steps = [_milliseconds(means.step) for means in (each.old, each.new)]
        group = (f"{cell.model}, {cell.parallel} parallel, {network(cell)}",)
        lines.append(Line([size(cell), *steps, told, each.verdict], group))
    columns = [
        Column("ranks, batch", is_text=True),
        Column("before, ms"),
        Column("after, ms"),
        Column("change", meaning="with half of its confidence interval of 95 % (Welch's t-test), of this cell alone"),
        Column(
            "verdict",
            is_text=True,
            meaning="Of all cells together: where none has changed, one is called slower or faster in 5 % of cases (Holm).",
        ),
    ]
    return Table("Before and after", columns, lines, groups=[Column("model", is_text=True)])


class Both(NamedTuple):
    """A cell of two folders."""

    old: Means
    new: Means
    difference: Difference
    verdict: str


def both(before: Sequence[Outcome], after: Sequence[Outcome]) -> list[Both]:
    """The cells that both have, with how their steps differ."""
    new = {each.cell: each for each in means(after)}
    pairs = [(old, new[old.cell]) for old in means(before) if old.cell in new]
    found = [compared(*(each.each(lambda run: run.step_ms) for each in pair)) for pair in pairs]
    told = zip(pairs, found, verdicts(found), strict=True)
    return [Both(*pair, difference, verdict) for pair, difference, verdict in told]


def unlike(folders: Mapping[str, Sequence[Outcome]]) -> str:
    """How runs differ in what should be the same for all of them, and what each folder has; empty if they do not. What a run does
    not say, as old ones do not, is left out.

    Args:
        folders: runs by the name of their folder.
    """
    found = {
        what: {name: list(dict.fromkeys(filter(None, map(of, runs)))) for name, runs in folders.items()}
        for what, of in _MADE.items()
    }
    differ = [what for what, values in found.items() if len(set().union(*values.values())) > 1]
    if not differ:
        return ""
    by_folder = {name: [" and ".join(found[what][name]) for what in differ if found[what][name]] for name in folders}
    told = "; ".join(f"{name} has {', '.join(values)}" for name, values in by_folder.items() if values)
    return f"The runs differ in {', '.join(differ)}: {told}. That alone may change their times."


def models(outcomes: Sequence[Outcome]) -> Table:
    """Those of the runs, as the paper's table 1 has them."""
    lines = []
    for model in dict.fromkeys(each.cell.model for each in outcomes):
        shape = MODELS.get(model)
        if shape is None:  # of a folder from elsewhere
            lines.append(Line([model, *[""] * 5]))
            continue
        kind = {"decoder": "decoder", "encoder": "encoder", "both": "encoder and decoder"}[shape.kind]
        numbers = [f"{each:,}" for each in (shape.layers, shape.width, shape.heads)]
        lines.append(Line([model, kind, *numbers, shape.source]))
    columns = [
        Column("model", is_text=True),
        Column("architecture", is_text=True),
        Column("layers", meaning="of an encoder and decoder, each"),
        Column("hidden size"),
        Column("attention heads"),
        Column("from", is_text=True, meaning="table 1 is the paper's"),
    ]
    return Table("Models", columns, lines)


def judged(found: Sequence[Finding]) -> Table:
    """The paper's findings beside what was measured here."""
    lines = [
        Line([each.verdict, each.says, each.here, each.where], kind="aside" if each.verdict == ABSENT else "plain")
        for each in found
    ]
    columns = [
        Column(
            "here it",
            is_text=True,
            meaning="Within noise: the difference is no larger than what runs differ by (95 %).",
        ),
        Column("the paper finds", is_text=True),
        Column("measured", is_text=True),
        Column("where", is_text=True, meaning="Section, figure and observation of the paper."),
    ]
    return Table("The characterisation paper's findings", columns, lines)


def _machine(one: Outcome) -> str:
    if not one.processors:
        return ""
    return plural(one.processors, "processor") + (f" ({one.machine})" if one.machine else "")


_MADE: dict[str, Callable[[Outcome], str]] = {
    "machine": _machine,
    "steps": lambda one: plural(one.steps, "step") if one.steps else "",
    # Known where the steps are.
    "seed": lambda one: f"seed {one.seed}" if one.steps else "",
}
"""What should be the same for all runs, as texts; empty: not known."""


def _purposes(each: Means) -> list[str]:
    """Of communication, with the time of each, the longest first."""
    order = sorted(((sum(parts), purpose) for purpose, parts in each.purposes.items()), reverse=True)
    return [f"{purpose} {_tenth(time)}" for time, purpose in order if time >= LEAST_MS]


def _tenth(value: float) -> str:
    """Not -0.0."""
    return f"{round(value, 1) + 0.0:.1f}"


def _milliseconds(mean: Mean) -> str:
    return f"{mean.value:.1f}" + (f" ± {mean.half:.1f}" if mean.runs > 1 else "")


def _rate(each: Means) -> str:
    # Old runs on one host have the few bytes that its interface happened to receive.
    if not each.is_linked or not each.received:
        return ""
    return f"{each.received:.0f}, {each.mean(lambda run: run.receive_peak_mbit):.0f}"


PHASES = (("forward",), ("backward",), ("optimizer", "unscale", "inf check", "clip"))
"""Of a step's work, those with columns."""
