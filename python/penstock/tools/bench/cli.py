"""``penstock bench``: one command for each subject. A subject's module holds its options, its measurement and its report."""

from __future__ import annotations

import click

from penstock.tools.bench import (
    breakdown,
    causes,
    endpoints,
    figures,
    monitoring,
    pauses,
    planner,
    predictions,
    readiness,
    recording,
    sweep,
    threads,
    training,
    tuner,
    urgency,
)
from penstock.tools.bench.aggregated import command as aggregated
from penstock.tools.bench.collectives import COLLECTIVES
from penstock.tools.commands import Group


@click.group(name="bench", cls=Group)
def command() -> None:
    """Measure collectives, trainings and the tools: time, share of the limit, beside other backends.

    Backends take turns in one run, so their ratios hold on a noisy machine. Results are checked. Examples:

    \b
    penstock bench all-reduce
    penstock bench all-reduce --sizes 64M --ranks 2 --backends penstock-tcp,gloo
    penstock bench all-reduce --hosts 2 --rate 1000 --flow 200 --sizes 64M
    penstock bench training cnn
    penstock bench tuner
    penstock bench aggregated
    penstock bench figures
    """


for _name in COLLECTIVES:
    command.add_command(sweep.command(_name))
for _name, _subject in {
    "figures": figures,
    "training": training,
    "readiness": readiness,
    "tuner": tuner,
    "urgency": urgency,
    "pauses": pauses,
    "threads": threads,
    "endpoints": endpoints,
    "aggregated": aggregated,
    "plan": planner,
    "predictions": predictions,
    "recording": recording,
    "breakdown": breakdown,
    "causes": causes,
    "monitoring": monitoring,
}.items():
    command.add_command(_subject.command, _name)
