"""The command ``penstock <verb>``.

A verb is a click command named ``command`` in ``penstock.tools.<verb>``. Its module is imported when the verb is used and
not before, and the one-line help below stands here for the same reason: torch takes seconds to import, and
``penstock --help`` must not.
"""

from __future__ import annotations

import importlib
from typing import Any

import click

from penstock.errors import MissingExtra
from penstock.tools.commands import Group


class Verbs(Group):
    """A group whose commands are the modules that `VERBS` names."""

    kind = "verb"

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except MissingExtra as error:
            click.echo(str(error), err=True)
            ctx.exit(2)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command = importlib.import_module(f"penstock.tools.{cmd_name}").command
        assert isinstance(command, click.Command), f"penstock.tools.{cmd_name}.command is not a click command"
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl(sorted(VERBS.items()))


VERBS = {
    "aggregator": "Add what workers push on its way to the server; or watch one.",
    "bench": "Measure collectives and trainings beside gloo and the limit.",
    "characterize": "Where steps of known models go, over a matrix of networks.",
    "convert": "Turn a training script for one device into one for several ranks.",
    "demo": "Train a character GPT with gloo, then with Penstock, and compare.",
    "doctor": "Check reachability, rate, MTU and limits between ranks.",
    "flight": "Tell what the ranks were doing when something went wrong.",
    "info": "List versions and every setting: value, origin and meaning.",
    "plan": "Choose servers' parts of a model, and where gradients are summed.",
    "profile": "Tell where the time of a training step goes, rank by rank.",
    "run": "Convert a training script in memory, and start it with torchrun.",
    "server": "Commit sums and return them: the end of in-network aggregation.",
    "simulate": "Run the shipped protocol in virtual time, with seeded faults.",
    "testbed": "Emulate a cluster on this machine: hosts, link rates, loss, delay.",
    "top": "Show a running job: steps, links, streams, stragglers.",
    "tune": "Explain what the tuner tried, chose and remembers.",
}


@click.command(cls=Verbs, subcommand_metavar="VERB [ARGS]...", context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="penstock", message="penstock %(version)s")
def main() -> None:
    """Penstock: train over an ordinary network at the speed of that network.

    In a script, init_process_group("penstock") is all that changes. `penstock VERB --help` says more about each verb.
    """
