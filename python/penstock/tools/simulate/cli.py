"""The command, with a subcommand for each simulation."""

from __future__ import annotations

import click

from penstock.tools.commands import Group
from penstock.tools.simulate.aggregation import aggregation, show_rates
from penstock.tools.simulate.collective import show_collective

__all__ = ["command"]


@click.group(cls=Group)
def command() -> None:
    """Run the shipped protocol in virtual time, with seeded faults."""


command.add_command(aggregation, "aggregation")
command.add_command(show_rates, "rates")
command.add_command(show_collective, "collective")
