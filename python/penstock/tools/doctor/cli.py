"""The command: starts the measurements in the job that torchrun has started, or two ranks here."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import NoReturn

import click
from rich.console import Console

from penstock.errors import PenstockError
from penstock.tools.doctor import checks, links
from penstock.tools.testbed.bed import Loopback

__all__ = ["command"]


@click.command()
@click.option(
    "--mebibytes",
    default=16,
    show_default=True,
    type=click.IntRange(min=1),
    help="Bytes that each pair exchanges for the rate.",
)
@click.option(
    "--timeout",
    default=60.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds to wait for all ranks.",
)
@click.option("--links", "measures_links", is_flag=True, help="Instead measure links, and write a cluster file.")
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="The file, with --links; rank 0 writes it.")
@click.option("--server", "servers", type=click.IntRange(0), multiple=True, help="A rank whose host is a server's.")
@click.option(
    "--aggregator", "aggregators", type=click.IntRange(0), multiple=True, help="... an aggregator's. Repeatable."
)
def command(
    mebibytes: int,
    timeout: float,
    measures_links: bool,
    output: str | None,
    servers: tuple[int, ...],
    aggregators: tuple[int, ...],
) -> None:
    """Check reachability, rate, MTU and limits between all pairs of ranks.

    With --links raw sockets measure every pair of hosts alone, and all hosts at once; what comes out is a cluster file that
    `penstock plan` takes (docs/guide/plan.md).
    """
    if measures_links != (output is not None):
        raise click.UsageError("--links and -o FILE go together: the file takes what was measured")
    if (servers or aggregators) and not measures_links:
        raise click.UsageError("--server and --aggregator say what a cluster file has where: give --links too")
    if "RANK" in os.environ:
        # A traceback of a rank that was told to end helps no user.
        signal.signal(signal.SIGINT, signal.SIG_DFL)

        def check() -> bool:
            if output is None:
                return checks.check(mebibytes << 20)
            return links.measure(mebibytes << 20, output, servers, aggregators)

        sys.exit(0 if run(check, timeout) else 1)
    if measures_links:
        raise click.UsageError(
            "RANK is not set: start it on all hosts, with torchrun ... -m penstock doctor --links -o FILE"
        )
    click.echo("RANK is not set: checking two ranks on this machine. For a cluster: torchrun ... -m penstock doctor")
    sys.exit(_start_two(mebibytes, timeout))


def run(check: Callable[[], bool], timeout: float) -> bool:
    import torch.distributed as dist

    try:
        dist.init_process_group("penstock", timeout=timedelta(seconds=timeout))
    except (PenstockError, dist.DistError, ValueError) as error:
        # What a rank cannot reach stands in its own error; every rank says its own.
        click.echo(f"rank {os.environ['RANK']}: {type(error).__name__}: {str(error).splitlines()[0]}", err=True)
        return False
    try:
        return check()
    except PenstockError as error:
        click.echo(f"rank {os.environ['RANK']}: {type(error).__name__}: {error}", err=True)
        return False
    finally:
        # Also after an error: the other ranks then learn of it now, and not from their time-out.
        dist.destroy_process_group()


def _start_two(mebibytes: int, timeout: float) -> int:
    command = [sys.executable, "-m", "penstock", "doctor", f"--mebibytes={mebibytes}", f"--timeout={timeout}"]
    console = Console()
    width = {"COLUMNS": str(console.width)} if console.is_terminal else {}
    interrupted = False

    def interrupt(*_: object) -> NoReturn:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    def show(_: int, line: str) -> None:
        if not interrupted:
            click.echo(line)

    signal.signal(signal.SIGINT, interrupt)
    try:
        with Loopback(hosts=1) as bed:
            return 1 if bed.run(command, ranks=2, launcher="fork", env=width, on_line=show).returncode else 0
    except KeyboardInterrupt:
        click.echo("interrupted: both ranks have ended", err=True)
        return 128 + signal.SIGINT
