"""What was measured, as the paper's figures 3 to 5 have it: a table, a picture of all steps, a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.reports import Axis, Bar, Bars, Column, Key, Line, Next, Page, Part, Picture, Section, Table
from penstock.tools.bench import machine
from penstock.tools.characterize.findings import Finding, findings
from penstock.tools.characterize.matrix import Cell
from penstock.tools.characterize.results import Mean, Outcome, compared, mean_of

__all__ = ["comparison", "page", "times"]


def _by_cell(outcomes: Sequence[Outcome]) -> dict[Cell, list[Outcome]]:
    found: dict[Cell, list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.cell, []).append(outcome)
    order = sorted(found, key=lambda cell: (cell.parallel, cell.model, cell.scaling, *_place(cell)))
    return {cell: found[cell] for cell in order}


def _place(cell: Cell) -> tuple[Any, ...]:
    return cell.link_mbit, cell.ranks, cell.batch, cell.transport, cell.flow_mbit, cell.micro_batch, cell.sequence


def times(outcomes: Sequence[Outcome]) -> Table:
    """A step's parts, as figures 3, 4 and 5 have them."""
    lines = []
    for cell, runs in _by_cell(outcomes).items():
        group = (f"{cell.model}, {cell.parallel} parallel, {cell.scaling} scaling",)
        name = _told(cell)

        def part(*phases: str, runs: Sequence[Outcome] = runs) -> str:
            return f"{mean_of([sum(run.work.get(phase, 0.0) for phase in phases) for run in runs]).value:.1f}"

        waits = mean_of([sum(run.waits.values()) for run in runs]).value
        exposed = mean_of([run.communication_ms for run in runs])
        step = mean_of([run.step_ms for run in runs])
        lines.append(
            Line(
                [
                    name,
                    _milliseconds(step),
                    part("forward"),
                    part("backward"),
                    part("optimizer", "unscale", "inf check", "clip"),
                    f"{exposed.value - waits:.1f}",
                    f"{waits:.1f}",
                    f"{exposed.value / step.value:.0%}",
                    _rate(runs, cell),
                ],
                group,
            )
        )
    columns = [
        Column("ranks, batch, network", is_text=True),
        Column("step, ms", meaning="mean of the runs, and half of its confidence interval of 95 %"),
        Column("forward"),
        Column("backward"),
        Column("optimizer"),
        Column("wire", meaning="communication for which ranks stand still, while bytes move"),
        Column("wait", meaning="for which they stand still because another rank is not there yet"),
        Column("of the step"),
        Column("received, Mbit/s", meaning="by a host's link, on average and at most in a tenth of a second"),
    ]
    return Table("Where steps go", columns, lines, groups=[Column("model", is_text=True)])


def comparison(before: Sequence[Outcome], after: Sequence[Outcome]) -> Table:
    """Steps of cells that both have: whether they have changed beyond what runs differ by."""
    old, new = _by_cell(before), _by_cell(after)
    lines = []
    for cell in old:
        if cell not in new:
            continue
        given = [[run.step_ms for run in runs] for runs in (old[cell], new[cell])]
        difference = compared(*given)
        told = f"{difference.change:+.1%}" + (f" ± {difference.half:.1%}" if difference.half < 10 else "")
        first, second = (_milliseconds(mean_of(each)) for each in given)
        group = (f"{cell.model}, {cell.parallel} parallel",)
        lines.append(Line([_told(cell), first, second, told, difference.verdict], group))
    columns = [
        Column("ranks, batch, network", is_text=True),
        Column("before, ms"),
        Column("after, ms"),
        Column("change", meaning="with half of its confidence interval of 95 % (Welch's t-test)"),
        Column("verdict", is_text=True),
    ]
    return Table("Before and after", columns, lines, groups=[Column("model", is_text=True)])


def judged(found: Sequence[Finding]) -> Table:
    """The paper's statements beside ours."""
    told = {True: "yes", False: "no", None: "not measured"}
    lines = [Line([each.number, each.says, each.here, told[each.holds]]) for each in found]
    columns = [Column("where", is_text=True), Column("the paper says", is_text=True)]
    columns += [Column("here", is_text=True), Column("holds", is_text=True)]
    return Table("The characterisation paper's statements", columns, lines)


def page(outcomes: Sequence[Outcome], folder: str) -> Page:
    """The report of one run or more."""
    cells = _by_cell(outcomes)
    shares = {cell: mean_of([run.communication_ms / run.step_ms for run in runs]) for cell, runs in cells.items()}
    most = max(shares, key=lambda cell: shares[cell].value)
    longest = max(_step(runs).value for runs in cells.values())
    bars = [_bar(cell, runs) for cell, runs in cells.items()]
    colours = {name: f"series-{at + 1}" for at, name in enumerate(_PARTS)}
    problems = sorted({problem for one in outcomes for problem in one.problems})
    return Page(
        kind="penstock characterize",
        answer=f"Communication takes {shares[most].value:.0%} of a step of {most.model} at most ({_told(most)}).",
        picture=Picture(
            "steps",
            Bars(Axis("time of a step", "ms"), bars, [Key(name, colours[name]) for name in _PARTS]),
            f"{len(cells)} cells of the matrix; the longest step takes {longest:.0f} ms.",
            "Bars are means over ranks and runs; communication is what ranks stand still for.",
        ),
        next=Next("Look into one of the runs.", f"penstock profile --read {folder}/{most.key}.0 --html report.html"),
        setting=f"{len(outcomes)} runs of {len(cells)} cells on {machine.describe()['hardware']['cpu']['model']}.",
        sections=[
            Section("In numbers", [times(outcomes)]),
            Section("The paper's statements", [judged(findings(outcomes))]),
            *([Section("What the records say of themselves", [problems[:20]])] if problems else []),
        ],
    )


_PARTS = ("forward", "backward", "optimizer and others", "wire", "wait")


def _bar(cell: Cell, runs: Sequence[Outcome]) -> Bar:
    forward, backward = (mean_of([run.work.get(phase, 0.0) for run in runs]).value for phase in _PARTS[:2])
    waits = mean_of([sum(run.waits.values()) for run in runs]).value
    wire = mean_of([run.communication_ms for run in runs]).value - waits
    step = _step(runs)
    values = (forward, backward, max(0.0, step.value - forward - backward - waits - wire), wire, waits)
    parts = [Part(value, f"series-{at + 1}") for at, value in enumerate(values)]
    return Bar(f"{cell.model}, {_told(cell)}", parts, f"{step.value:.0f} ms")


def _step(runs: Sequence[Outcome]) -> Mean:
    return mean_of([run.step_ms for run in runs])


def _milliseconds(mean: Mean) -> str:
    return f"{mean.value:.1f}" + (f" ± {mean.half:.1f}" if mean.runs > 1 else "")


def _rate(runs: Sequence[Outcome], cell: Cell) -> str:
    mean = mean_of([run.receive_mbit for run in runs]).value
    peak = mean_of([run.receive_peak_mbit for run in runs]).value
    if not mean:
        return ""
    return f"{mean:.0f}, {peak:.0f}" + (f" of {cell.link_mbit:g}" if cell.link_mbit else "")


def _told(cell: Cell) -> str:
    told = f"{cell.ranks} ranks, {cell.batch}"
    told += f" by {cell.micro_batch}" if cell.micro_batch else ""
    told += f", {cell.transport}"
    if cell.link_mbit:
        told += f" at {cell.link_mbit:g} Mbit/s" + (f", {cell.flow_mbit:g} a flow" if cell.flow_mbit else "")
    return told
