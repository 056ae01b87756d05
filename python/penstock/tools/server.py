"""``penstock server``: commits sums and returns them. The daemon is Rust (crates/penstock-node)."""

from __future__ import annotations

from typing import Any

import click

from penstock.tools.aggregator.daemon import options, serve

__all__ = ["command"]


@click.command()
@options("server")
@click.option(
    "--endpoint", metavar="ADDR:PORT", help="Also answer over streams there (needs a secret): jobs, pushes, pulls."
)
def command(endpoint: str | None, **given: Any) -> None:
    """Commit sums and return them to all workers: the end of in-network aggregation.

    Runs until SIGTERM or Ctrl-C, and then until no sum is half done. `penstock aggregator top ADDR` shows what one does.
    """
    serve("server", given, endpoint=endpoint)
