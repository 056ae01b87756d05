"""``penstock simulate``: the shipped protocol in virtual time, with seeded faults.

What runs is the code of `penstock-protocol` itself; only time, the network and the drivers are simulated
(docs/aggregation.md).
"""

from __future__ import annotations

from typing import Any

import click

__all__ = ["command"]


@click.group()
def command() -> None:
    """Run the shipped protocol in virtual time, with seeded faults."""


@command.command()
@click.option("--seed", type=click.IntRange(0, 2**64 - 1), default=0, show_default=True, help="The first seed.")
@click.option(
    "--runs", type=click.IntRange(1), default=1, show_default=True, help="How many seeds, one after the other."
)
@click.option("--jobs", type=int, help="Jobs that share the aggregators.")
@click.option("--workers", type=int, help="Workers a job.")
@click.option(
    "--shape",
    type=click.Choice(["direct", "star", "racks", "core"]),
    help="No aggregator, one, one a rack, or racks below a core.",
)
@click.option("--blocks", type=int, help="Blocks a worker pushes.")
@click.option("--window", type=int, help="Blocks in flight, a power of two.")
@click.option("--floats/--integers", default=None, help="What the blocks hold.")
@click.option("--loss", type=float, help="Probability that a packet is lost.")
@click.option("--duplicate", type=float, help="Probability that a packet arrives twice.")
@click.option("--faults/--no-faults", default=True, show_default=True, help="Restarts, deaths and cut links.")
@click.option(
    "--trace", type=click.IntRange(0, 2000), default=60, show_default=True, help="Lines told of a failed run."
)
def aggregation(seed: int, runs: int, trace: int, **fixed: Any) -> None:
    """Jobs that push through aggregators; every result is compared with the undisturbed sum, bit by bit.

    What is not fixed by an option is drawn from the seed. The same seed and options are the same run everywhere, so a
    failure is replayed by its seed. Ends with 1 where a run failed, after telling its last packets.
    """
    from penstock import _core, errors

    totals = dict.fromkeys(("packets", "lost", "results"), 0)
    for each in range(seed, seed + runs):
        try:
            outcome = _core.simulate_aggregation(each % 2**64, **fixed)
        except errors.Config as error:
            raise click.UsageError(str(error)) from None
        if outcome["failure"]:
            told = _core.simulate_aggregation(each % 2**64, trace=True, **fixed)
            click.echo("\n".join(told["trace"][len(told["trace"]) - trace :]))
            click.echo(f"seed {each} failed: {told['failure']}\n{told['scenario']}")
            raise SystemExit(1)
        for name in totals:
            totals[name] += outcome[name]
        if runs == 1:
            click.echo(f"{outcome['scenario']}\n{outcome['time_ns'] / 1e6:.3f} ms of virtual time")
    click.echo(
        f"{runs} {'run' if runs == 1 else 'runs'} from seed {seed}: {totals['results']} results right, none wrong, doubled or "
        f"missing; {totals['packets']} packets, {totals['lost']} lost"
    )
