"""``penstock aggregator`` and what it shares with ``penstock server``: the daemons of in-network aggregation.

- `daemon`: options, and a daemon's life from start to SIGTERM. The daemon itself is Rust (crates/penstock-node).
- `top`: what a daemon counts, as a live table.

``docs/reference/aggregator.md`` says how to run them.
"""

from __future__ import annotations

from typing import Any

import click

from penstock.tools.aggregator.daemon import options, serve
from penstock.tools.aggregator.top import command as show

__all__ = ["command"]


@click.group(invoke_without_command=True, options_metavar="[OPTIONS]", subcommand_metavar="[top [ADDR]]")
@options("aggregator")
@click.pass_context
def command(context: click.Context, /, **given: Any) -> None:
    """Add what workers push on its way to the server, and forward one sum.

    Runs until SIGTERM or Ctrl-C, and then until no sum is half done. `penstock aggregator top` shows what one does.
    """
    if context.invoked_subcommand is None:
        serve("aggregator", given)


command.add_command(show)
