"""``penstock bench tuner``: what the tuner chooses on different links, against the best of an exhaustive grid.

In one run a link: a model is tuned from the default, and from what a like model was tuned to; then every setting of a grid is
measured; then the choices, the grid's best and the default are measured again by turns, and compared turn by turn. The grid's
best is the lowest of many noisy medians, so what it was when it won says little; what it is in the turns counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click

from penstock.extras import need
from penstock.numbers import change, milliseconds, times
from penstock.reports import Axis, Bar, Bars, Column, Line, Next, Page, Part, Picture, Section, Table, series
from penstock.runtime import config
from penstock.tools.bench import machine
from penstock.tools.bench.options import EVERYTHING, MOST_RANKS, check_files, files
from penstock.tools.bench.output import reporting_errors, result_console, say, write_json, write_report
from penstock.tools.bench.program import run_program
from penstock.tools.bench.report import does_not_show
from penstock.tools.testbed.bed import Loopback
from penstock.tools.testbed.cluster import Testbed
from penstock.tools.testbed.link import LinkSpec
from penstock.training.tune import Setting, verify

Bed = Testbed | Loopback

LINKS = {
    "capped": LinkSpec(rate_mbit=1000, flow_mbit=200),
    "delayed": LinkSpec(rate_mbit=500, delay_ms=1),
    "uneven": LinkSpec(rate_mbit=1000, flow_mbit=[60, 300]),
}
"""Where a flow gets a fifth of the link; where one gets all of it, later; and where flows differ."""


@click.command()
@click.option("--link", "links", multiple=True, type=click.Choice(list(LINKS)), help="One or more.  [default: all]")
@click.option("--model", type=click.Choice(["linear", "char-gpt", "cnn"]), default="linear", show_default=True)
@click.option("--layers", type=click.IntRange(2), default=12, show_default=True, help="Of linear; 1 MiB each.")
@click.option("--batch", type=click.IntRange(1), default=2, show_default=True, help="Samples a rank and step.")
@click.option("--ranks", type=click.IntRange(2, MOST_RANKS), default=4, show_default=True)
@click.option("--hosts", type=click.IntRange(1, 64), default=4, show_default=True, help="More than one needs root.")
@click.option("--budget", type=click.IntRange(8), default=100, show_default=True, help="Steps to tune in.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the tuner.")
@click.option(
    "--stride",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="The grid has every so many values of an axis.",
)
@click.option("--grid-steps", type=click.IntRange(1), default=3, show_default=True, help="Steps a setting of the grid.")
@click.option(
    "--pairs", type=click.IntRange(1), default=20, show_default=True, help="Turns of the choices and the best."
)
@click.option("--pair-steps", type=click.IntRange(1), default=3, show_default=True, help="Steps in a turn.")
@click.option("--timeout", type=float, default=1800.0, show_default=True, help="Seconds for a link.")
@files(EVERYTHING)
def command(
    links: Sequence[str],
    ranks: int,
    hosts: int,
    timeout: float,
    json_path: str | None,
    report_path: str | None,
    **options: Any,
) -> None:
    """Hold what the tuner chooses against the best of a grid, on different links.

    A model is tuned from the default, and from what a like model was tuned to; then the grid is measured, and at last the
    choices and the grid's best by turns. See docs/design/tuner.md.
    """
    need("penstock bench tuner", "scipy")
    check_files(json_path=json_path, report_path=report_path)
    outcomes = []
    with reporting_errors():
        description = machine.describe()
        for name in (links or LINKS) if hosts > 1 else ["loopback"]:
            say(f"tuning on {name} ...")
            with Testbed(hosts=hosts, link=LINKS[name]) if hosts > 1 else Loopback(hosts=1) as bed:
                outcomes.append(measure(bed, options, ranks=ranks, timeout_s=timeout))
            write_json(json_path, description, [outcome.to_dict() for outcome in outcomes])
        result_console().print(table(outcomes).for_terminal())
        write_report(report_path, lambda: page(outcomes, options["model"], ranks, description))


@dataclass(frozen=True)
class Choice:
    """What one tuning chose, and how it did in the turns."""

    setting: Setting
    steps: int
    """Steps until the choice."""
    start: Setting
    step_s: float
    """Median over all steps of its turns."""
    behind: float
    """The median over turns of its median step over that of the grid's best, less one."""


@dataclass(frozen=True)
class Outcome:
    """One link."""

    link: str
    grid: int
    """Settings that were measured ..."""
    space: int
    """... of so many that the tuner could try."""
    best: Setting
    best_s: float
    untuned_s: float
    """The default in the turns."""
    default: Choice
    """Tuned from the default."""
    remembered: Choice
    """Tuned from what a like model was tuned to."""
    turns: list[dict[str, list[float]]]
    tunings: list[dict[str, Any]]
    """With their records."""

    @property
    def choices(self) -> dict[str, Choice]:
        """By where the tuner began, as people say it."""
        return {"default": self.default, "neighbour": self.remembered}

    def to_dict(self) -> dict[str, Any]:
        """For JSON, every sample too."""
        settings = {"best": self.best.to_json()}
        choices = {
            name: {**vars(choice), "setting": choice.setting.to_json(), "start": choice.start.to_json()}
            for name, choice in (("default", self.default), ("remembered", self.remembered))
        }
        return {**vars(self), **settings, **choices}


def table(outcomes: Sequence[Outcome]) -> Table:
    """Three lines a link."""
    columns = [
        Column("from", is_text=True, meaning="where the tuner began: the default, or what a like model was tuned to"),
        Column("chosen", is_text=True),
        Column("steps", meaning="that the tuner took to choose"),
        Column("step", meaning="the median over the turns of the comparison"),
        Column("against grid", meaning="over the best setting of the grid, turn by turn"),
        Column("over default", meaning="the default's step over this one: above 1 is faster"),
    ]
    lines = []
    for each in outcomes:
        group = (each.link,)
        best = [f"grid of {each.grid}/{each.space}", str(each.best), "", milliseconds(each.best_s), "", ""]
        lines.append(Line(best, group, "aside"))
        for name, choice in each.choices.items():
            cells = [
                name,
                str(choice.setting),
                str(choice.steps),
                milliseconds(choice.step_s),
                change(choice.behind),
                times(each.untuned_s / choice.step_s),
            ]
            lines.append(Line(cells, group))
    return Table("the tuner against the best of a grid", columns, lines, [Column("link", is_text=True)])


def page(outcomes: Sequence[Outcome], model: str, ranks: int, description: dict[str, Any]) -> Page:
    """The report."""
    worst = max(outcomes, key=lambda each: each.default.behind)
    behind = worst.default.behind
    apart = change(behind).lstrip("+-")
    gains = "; ".join(
        f"{times(each.untuned_s / each.default.step_s)} as fast as the default on {each.link}" for each in outcomes
    )
    links = Picture("links", chart(outcomes), f"Tuned, a step is {gains}.", "Read it as the first picture.")
    return Page(
        kind="Penstock bench: tuner",
        answer=f"The tuner's choice is {apart} {'slower' if behind >= 0 else 'faster'} than the best of a grid"
        + (f", at worst of {len(outcomes)} links" if len(outcomes) > 1 else ""),
        picture=Picture(
            "tuner",
            chart([worst]),
            f"Tuned, a step is {gains}.",
            "Shorter is better. All of these took turns after the tuning; the grid's best is what won the grid, measured again."
            + (f" This is {worst.link}." if len(outcomes) > 1 else ""),
        ),
        next=Next("Let it tune your own job.", "penstock.torch.ddp_hook(model, tune=True)"),
        setting=f"{model}, {ranks} ranks, on {'; '.join(each.link for each in outcomes)}.",
        sections=[
            *([Section("On all links", [links])] if len(outcomes) > 1 else []),
            Section("In numbers", [table(outcomes)]),
            Section(
                "What this does not show", [does_not_show(LINKS["capped"] if outcomes[0].link != "loopback" else None)]
            ),
            Section("Conditions", [machine.lines(description)]),
        ],
    )


def chart(outcomes: Sequence[Outcome]) -> Bars:
    """Four bars a link."""
    bars = []
    for each in outcomes:
        looks = {
            "best of the grid": (each.best_s, "grey-2"),
            "default, untuned": (each.untuned_s, "grey-2"),
            **{
                f"tuned from {name}": (choice.step_s, series(index).colour)
                for index, (name, choice) in enumerate(each.choices.items())
            },
        }
        heading = each.link if len(outcomes) > 1 else ""
        for label, (seconds, colour) in looks.items():
            bars.append(Bar(label, [Part(1e3 * seconds, colour)], milliseconds(seconds), heading=heading))
            heading = ""
    return Bars(Axis("time of a step", "ms"), bars)


def measure(bed: Bed, options: dict[str, Any], *, ranks: int, timeout_s: float) -> Outcome:
    """Run all phases on the hosts of ``bed``.

    Raises:
        BenchError: a rank failed or hung, with the end of what it said.
    """
    # Loopback stands for hosts that share no memory, with as many streams as between hosts.
    env = {"PENSTOCK_SHM": "0", "PENSTOCK_STREAMS": str(config.read().streams)}
    records, *_ = run_program(bed, "tuner_rank", options, what="tuning", ranks=ranks, timeout_s=timeout_s, env=env)
    return summarise(records, bed.link.describe() if isinstance(bed, Testbed) else "loopback")


def summarise(records: Sequence[dict[str, Any]], link: str) -> Outcome:
    """What rank 0 said, in numbers. Pure, but that the records are checked to lead to their choices."""
    phases = {record["phase"]: record for record in records if record["phase"] != "turn"}
    turns = [record["seconds"] for record in records if record["phase"] == "turn"]
    medians = {name: statistics.median(s for turn in turns for s in turn[name]) for name in turns[0]}

    def choice(name: str) -> Choice:
        said = phases[name]
        verify(said["record"])
        ratios = [statistics.median(turn[name]) / statistics.median(turn["grid"]) for turn in turns]
        return Choice(
            Setting.from_json(said["setting"]),
            said["steps"],
            Setting.from_json(said["start"]),
            medians[name],
            statistics.median(ratios) - 1,
        )

    return Outcome(
        link,
        len(phases["grid"]["settings"]),
        phases["grid"]["size"],
        Setting.from_json(phases["grid"]["best"]),
        medians["grid"],
        medians["untuned"],
        choice("default"),
        choice("remembered"),
        turns,
        [phases[name] for name in ("neighbour", "default", "remembered", "grid")],
    )
