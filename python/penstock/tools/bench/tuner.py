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

from rich import box
from rich.table import Table

from penstock.tools.bench.program import run_program
from penstock.tools.testbed.cluster import Loopback, Testbed
from penstock.tools.testbed.link import LinkSpec
from penstock.training.tune import Setting, verify

Bed = Testbed | Loopback


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
    shown = Table(
        title="the tuner against the best of a grid", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for column in ("link", "from", "chosen"):
        shown.add_column(column)
    for column in ("steps", "step ms", "against grid", "default takes"):
        shown.add_column(column, justify="right", no_wrap=True)
    for each in outcomes:
        shown.add_row(each.link, f"grid of {each.grid}/{each.space}", f"{each.best}", "", f"{1e3 * each.best_s:.1f}")
        for name, choice in (("default", each.default), ("neighbour", each.remembered)):
            shown.add_row(
                "",
                name,
                f"{choice.setting}",
                f"{choice.steps}",
                f"{1e3 * choice.step_s:.1f}",
                f"{choice.behind:+.1%}",
                f"{each.untuned_s / choice.step_s:.2f}x",
            )
    return shown


def measure(bed: Bed, options: dict[str, Any], *, ranks: int, timeout_s: float) -> Outcome:
    """Run all phases on the hosts of ``bed``.

    Raises:
        BenchError: a rank failed or hung, with the end of what it said.
    """
    # Loopback stands for hosts that share no memory.
    env = {"PENSTOCK_SHM": "0"}
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


LINKS = {
    "capped": LinkSpec(rate_mbit=1000, flow_mbit=200),
    "delayed": LinkSpec(rate_mbit=500, delay_ms=1),
    "uneven": LinkSpec(rate_mbit=1000, flow_mbit=[60, 300]),
}
"""Where a flow gets a fifth of the link; where one gets all of it, later; and where flows differ."""
