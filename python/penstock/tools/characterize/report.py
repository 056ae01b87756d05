"""A matrix's report: what its page says and draws. Pure; `penstock.reports` decides how it looks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from penstock.numbers import plural
from penstock.reports import Next, Page, Section
from penstock.tools.characterize import figures, tables
from penstock.tools.characterize.findings import ABSENT, AGREES, findings
from penstock.tools.characterize.matrix import Cell
from penstock.tools.characterize.means import means, name
from penstock.tools.characterize.memory import Kind, Limit
from penstock.tools.characterize.results import Outcome
from penstock.tools.characterize.running import Course
from penstock.tools.characterize.tables import both, judged, models, times, unlike

__all__ = ["comparison", "page"]


def page(
    outcomes: Sequence[Outcome],
    folder: str,
    limits: Mapping[Kind, Limit],
    course_of: Callable[[Cell], Course | None] = lambda _: None,
) -> Page:
    """The report of one run or more, which are in a folder.

    Args:
        course_of: what a host's link received in a run of a cell, if its records are there.
    """
    cells = means(outcomes)
    most = max(cells, key=lambda each: each.share)
    found = findings(outcomes)
    judgements = [each for each in found if each.verdict != ABSENT]
    agreed = sum(each.verdict == AGREES for each in judgements)
    problems = _problems(outcomes)
    return Page(
        kind="penstock characterize",
        answer=(
            f"Communication takes {most.share:.0%} of a step of {most.cell.model} at most ({name(most.cell)})"
            + (f"; {agreed} of {len(judgements)} findings of the paper agree" if judgements else "")
        ),
        picture=figures.first(cells),
        next=Next(
            "Look into the run that stands still most.",
            f"penstock profile --read {folder}/{most.cell.key}.{most.runs[0].repeat} --html run.html",
        ),
        setting=f"{_setting(outcomes, len(cells))} {unlike({folder: outcomes})}".strip(),
        sections=[
            Section("The paper's findings", [judged(found)]),
            *figures.sections(cells, limits, course_of),
            Section("Table 1: the models", [models(outcomes)]),
            Section("In numbers", [times(outcomes)]),
            *([Section("What the profile complains of", [problems])] if problems else []),
        ],
    )


def comparison(before: Sequence[Outcome], after: Sequence[Outcome], old: str, new: str) -> Page:
    """The report of two folders, which have one cell or more in common."""
    found = both(before, after)
    slower, faster = (sum(each.verdict == verdict for each in found) for verdict in ("slower", "faster"))
    clearest = sorted(found, key=lambda each: (each.verdict not in ("slower", "faster"), -abs(each.difference.change)))
    first = clearest[0]
    answer = f"Steps of {slower} of {plural(len(found), 'cell')} are slower, of {faster} faster"
    next_step = Next(
        "Look into a run of the first cell above.",
        f"penstock profile --read {new}/{first.new.cell.key}.{first.new.runs[0].repeat} --html run.html",
    )
    if not slower and not faster:
        answer = f"No cell has changed beyond what runs differ by ({len(found)} compared)"
        next_step = Next("Where a smaller change matters, give both matrices more repeats.")
    return Page(
        kind="penstock characterize --compare",
        answer=answer,
        picture=figures.changed([(each.old, each.new) for each in clearest], first.verdict),
        next=next_step,
        setting=f"{old} beside {new}. {unlike({old: before, new: after})}".strip(),
        sections=[Section("In numbers", [tables.comparison(before, after)])],
    )


def _problems(outcomes: Sequence[Outcome]) -> list[str]:
    """Each complaint with the number of runs that it is of, the most first."""
    counted = Counter(problem for one in outcomes for problem in one.problems)
    told = [f"{text} ({plural(count, 'run')})" for text, count in counted.most_common(MOST_PROBLEMS)]
    if len(counted) > MOST_PROBLEMS:
        told.append(f"and {len(counted) - MOST_PROBLEMS} more, which the files of the runs hold")
    return told


def _setting(outcomes: Sequence[Outcome], cells: int) -> str:
    """How many runs, and on what."""
    on = dict.fromkeys(f"{one.processors} processors ({one.machine})" for one in outcomes if one.machine)
    where = f" on {', and '.join(on)}" if on else ""
    return f"{plural(len(outcomes), 'run')} of {plural(cells, 'cell')}{where}, random tokens, one thread a rank."


MOST_PROBLEMS = 20
"""Complaints with numbers in them differ from run to run."""
