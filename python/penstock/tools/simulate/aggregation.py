"""All-reduces through aggregators in virtual time: whether their results are right, and how fast they are."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import click

from penstock.cluster.deployment import MOST_BLOCK_BYTES
from penstock.cluster.network import Cluster, Link
from penstock.errors import Config as ConfigError
from penstock.tools.simulate.clusters import check_links, load, only_job, refuse_others

__all__ = ["Rate", "aggregation", "of_cluster", "rates", "show_rates"]

SHAPES = {"direct": None, "star": 1, "racks": 2, "core": 1}
"""How often a block crosses the server's link each way; None: once for each worker."""

_RATES_BLOCK_BYTES = 1408
"""Of a block's elements in `rates`, which counts on links as one of MOST_BLOCK_BYTES: that takes five times the processor time to
simulate. The rates at 1 Gbit/s without loss are the same; with loss, other packets are lost."""


_count = click.IntRange(0, 2**32 - 1)
_shape = click.Choice(list(SHAPES))
_shape_help = "No aggregator, one, one a rack, or two racks below a core."
_cluster = click.option(
    "--cluster",
    metavar="FILE",
    help="A cluster file with one job and one server, instead of --workers, --shape, --rate, --queue, --delay and --loss.",
)
_on_workers = click.option(
    "--loss-on",
    type=click.Choice(["every", "workers"]),
    default="every",
    show_default=True,
    help="Whether also what aggregators and server exchange is lost.",
)


@click.command()
@click.option("--seed", type=click.IntRange(0, 2**64 - 1), default=0, show_default=True, help="The first seed.")
@click.option(
    "--runs", type=click.IntRange(1), default=1, show_default=True, help="How many seeds, one after the other."
)
@click.option("--jobs", type=_count, help="Jobs that share the aggregators.")
@_cluster
@click.option("--workers", type=_count, help="Workers a job.")
@click.option(
    "--shape",
    type=click.Choice([*SHAPES, "rows"]),
    help=_shape_help + " Or, for up to 4096 workers, racks of 32, with an aggregator above each 32 racks.",
)
@click.option("--shards", type=_count, help="Shards of each aggregator, a power of two.")
@click.option("--blocks", type=_count, help="Blocks of a worker's tensors.")
@click.option("--operation", type=_count, help="Blocks of an operation's tensor; 0: one operation has all.")
@click.option("--queued", type=_count, help="Operations that a worker has submitted at a time.")
@click.option("--window", type=_count, help="Blocks in flight, a power of two.")
@click.option("--floats/--integers", default=None, help="What the blocks hold.")
@click.option("--keyed/--unkeyed", default=None, help="Whether packets carry a MAC; damaged ones then come as well.")
@click.option("--loss", type=float, help="Probability that a packet is lost.")
@_on_workers
@click.option("--duplicate", type=float, help="Probability that a packet arrives twice.")
@click.option("--rate", "rate_mbit", type=float, help="Mbit/s of a link, each way; 0: no limit.")
@click.option("--queue", "queue_kib", type=_count, help="KiB that wait at a switch's port; 0: no limit.")
@click.option(
    "--fat", is_flag=True, help="Links between switches carry what all workers below send, and a server's that of 64."
)
@click.option(
    "--switches/--no-switches",
    default=True,
    show_default=True,
    help="Whether a third of the aggregators of integers can do what a switch can, and no more.",
)
@click.option("--delay", "delay_ms", type=float, help="Milliseconds on the way at least.")
@click.option("--jitter", "jitter_ms", type=float, help="Milliseconds that may come on top.")
@click.option(
    "--patient/--impatient",
    default=False,
    show_default=True,
    help="Time-outs that jobs have, or shorter ones, for many runs in a second.",
)
@click.option(
    "--faults/--no-faults", default=True, show_default=True, help="Restarts, deaths, cut links and lost servers."
)
@click.option(
    "--trace", type=click.IntRange(0, 2000), default=60, show_default=True, help="Lines told of a failed run."
)
def aggregation(
    seed: int, runs: int, trace: int, loss_on: str, queue_kib: int | None, cluster: str | None, **fixed: Any
) -> None:
    """All-reduces through aggregators; every result is compared with the undisturbed sum, bit by bit.

    What is not fixed by an option is drawn from the seed. The same seed and options are the same run everywhere, so a
    failure is replayed by its seed. Ends with 1 where a run failed, after telling its last packets.
    """
    fixed |= {"edge_loss": loss_on == "workers", "queue": None if queue_kib is None else queue_kib << 10}
    fixed |= _read_cluster(cluster)
    totals = dict.fromkeys(("packets", "lost", "results"), 0)
    for each in range(seed, seed + runs):
        outcome = _run(each % 2**64, trace, fixed)
        for name in totals:
            totals[name] += outcome[name]
        if runs == 1:
            click.echo(f"{outcome['scenario']}\n{outcome['time_ns'] / 1e6:.3f} ms of virtual time")
    click.echo(
        f"{runs} {'run' if runs == 1 else 'runs'} from seed {seed}: {totals['results']} results right, none wrong, doubled or "
        f"missing; {totals['packets']} packets, {totals['lost']} lost"
    )


def _read_cluster(path: str | None) -> dict[str, Any]:
    """What a cluster file fixes. Raises: click.UsageError."""
    if path is None:
        return {}
    try:
        return of_cluster(load(path, ("workers", "shape", "rate_mbit", "queue_kib", "delay_ms", "loss", "loss_on")))
    except ConfigError as error:
        raise click.UsageError(str(error)) from None


def of_cluster(cluster: Cluster) -> dict[str, Any]:
    """A cluster as arguments of `_core.simulate_aggregation`: ``tree``, ``rate_mbit``, ``queue``, ``delay_ms``, ``loss`` and
    ``edge_loss``.

    A worker's tensors go through the aggregators on its way to the server: those on a switch of that way, or on a host at one.
    The simulator has a link of one rate for each worker, aggregator and server, and no limit between switches.

    Raises:
        penstock.errors.Config: the cluster is another; the error has the place in its file.
    """
    job = only_job(cluster)
    if len(cluster.servers) != 1:
        raise cluster.wrong("servers", f"the simulator takes one, here are {len(cluster.servers)}")
    [server] = cluster.servers
    check_links(cluster)
    at_switch: dict[str, str] = {}
    for aggregator in cluster.aggregators:
        first = cluster.links_of[aggregator.at][0]
        switch = next((end.node for end in first.ends if end.node != aggregator.at), aggregator.at)
        at_switch[aggregator.at if aggregator.at in cluster.switch else switch] = aggregator.at
    chains = [_aggregators_between(cluster, at_switch, worker, server.at) for worker in job.workers]
    tree = _tree(cluster, job.name, chains)
    ways = [cluster.path(one, next(iter(chain), server.at)) for one, chain in zip(job.workers, chains, strict=True)]
    inner = sorted({(a, b) for chain in chains for a, b in itertools.pairwise((*chain, server.at))})
    inner_ways = [cluster.path(a, b) for a, b in inner]
    number = {link.name: index for index, link in enumerate(cluster.links)}
    for link in {link.name: link for way in (*ways, *inner_ways) for link in way}.values():
        refuse_others(cluster, number[link.name])

    def same(what: str, values: Sequence[tuple[Link, Any]]) -> Any:
        for link, value in values:
            if value != values[0][1]:
                raise cluster.wrong(
                    f"links[{number[link.name]}].{what}",
                    f"differs from that of {values[0][0].name}: the simulator has one",
                )
        return values[0][1]

    ends = [link for way in (*ways, *inner_ways) for link in (way[0], way[-1])]
    rate = same("rate", [(link, link.rate_bit_s) for link in ends])
    queue = same("queue", [(link, link.queue_bytes) for link in ends])
    for link in {link.name: link for way in (*ways, *inner_ways) for link in way[1:-1]}.values():
        if link.rate_bit_s is not None and (rate is None or link.rate_bit_s < rate):
            raise cluster.wrong(
                f"links[{number[link.name]}].rate", "is below that of hosts: the simulator has no such link"
            )
    delay = same("delay", [(way[0], sum(link.delay_ns for link in way)) for way in (*ways, *inner_ways)])

    def lost(way: Sequence[Link]) -> float:
        return round(1 - math.prod(1 - link.loss for link in way), 9)

    loss = same("loss", [(way[0], lost(way)) for way in ways])
    inner_losses = {lost(way) for way in inner_ways}
    if not inner_losses <= {0.0} and inner_losses != {loss}:
        raise cluster.wrong(
            "links", "aggregators and server lose another share than workers: give both one, or them none"
        )
    return {
        "tree": tree,
        "rate_mbit": 0.0 if rate is None else rate / 1e6,
        "queue": queue or 0,
        "delay_ms": delay / 1e6,
        "loss": loss,
        "edge_loss": inner_losses <= {0.0} and loss > 0,
    }


def _tree(cluster: Cluster, job: str, chains: Sequence[tuple[str, ...]]) -> list[Any]:
    """What is below the server: a number is a worker, a list an aggregator with what is below it.

    Args:
        chains: by worker: the aggregators on its way to the server, the nearest first.
    """
    below: dict[tuple[str, ...], list[Any]] = {(): []}
    above: dict[str, tuple[str, ...]] = {}
    for worker, chain in enumerate(chains):
        for at in reversed(range(len(chain))):
            way, rest = chain[at:], chain[at + 1 :]
            if above.setdefault(chain[at], rest) != rest:
                raise cluster.wrong(
                    f"jobs.{job}.workers",
                    f"what goes through the aggregator at {chain[at]} has two ways to the server: an aggregator has one parent",
                )
            if way not in below:
                below[rest].append(below.setdefault(way, []))
        below[chain].append(worker)
    return below[()]


def _aggregators_between(cluster: Cluster, at_switch: dict[str, str], worker: str, server: str) -> tuple[str, ...]:
    """Where the aggregators are that a worker's way to the server passes, the nearest first."""
    if worker == server:
        return ()
    node, found = worker, []
    for link in cluster.path(worker, server):
        node = next(end.node for end in link.ends if end.node != node)
        if node in at_switch:
            found.append(at_switch[node])
    return tuple(found)


def _run(seed: int, trace: int, fixed: dict[str, Any]) -> dict[str, Any]:
    """One seed. Where it failed, tells its last packets and ends with 1. Raises click.UsageError on what is out of bounds."""
    from penstock import _core

    try:
        outcome = _core.simulate_aggregation(seed, **fixed)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if outcome["failure"]:
        told = _core.simulate_aggregation(seed, trace=True, **fixed)
        click.echo("\n".join(told["trace"][len(told["trace"]) - trace :]))
        click.echo(f"seed {seed} failed: {told['failure']}\n{told['scenario']}")
        raise SystemExit(1)
    return outcome


@dataclass(frozen=True)
class Rate:
    """What one setting came to: means over seeds."""

    rate_mbit: float
    workers: int
    window: int
    queue_kib: int
    loss: float
    seconds: float
    of_link: float
    """What the busiest link carries at least, payloads alone, over what it could carry meanwhile."""
    of_lossless: float
    packets: float
    """For a block, all nodes together."""
    dropped: float
    """By queues, for a block that a worker pushes."""


def rates(
    simulate: Callable[..., dict[str, Any]],
    *,
    rate_mbit: Iterable[float],
    workers: Iterable[int],
    windows: Iterable[int],
    queues_kib: Iterable[int],
    losses: Sequence[float],
    nbytes: int,
    seeds: int,
    shape: str,
    **fixed: Any,
) -> Iterator[Rate]:
    """Every combination, the losses innermost; ``simulate`` is `_core.simulate_aggregation`, or what stands in for it."""
    blocks = math.ceil(nbytes / MOST_BLOCK_BYTES)
    for rate, count, window, queue in itertools.product(rate_mbit, workers, windows, queues_kib):
        lossless = None
        # What the others are held against comes first, whether it is asked for or not.
        for loss in dict.fromkeys((0.0, *losses)):
            outcomes = [
                simulate(
                    seed,
                    rate_mbit=rate,
                    workers=count,
                    window=window,
                    queue=queue << 10,
                    loss=loss,
                    blocks=blocks,
                    shape=shape,
                    **fixed,
                )
                for seed in range(1, seeds + 1)
            ]
            time_ns, packets, dropped = (
                statistics.fmean(outcome[name] for outcome in outcomes) for name in ("time_ns", "packets", "dropped")
            )
            seconds = time_ns / 1e9
            lossless = lossless or seconds
            crossings = SHAPES[shape] or count
            if loss in losses:
                yield Rate(
                    rate_mbit=rate,
                    workers=count,
                    window=window,
                    queue_kib=queue,
                    loss=loss,
                    seconds=seconds,
                    of_link=crossings * blocks * MOST_BLOCK_BYTES * 8e-6 / (seconds * rate),
                    of_lossless=lossless / seconds,
                    packets=packets / blocks,
                    dropped=dropped / (blocks * count),
                )


class _Several(click.ParamType):
    """Numbers between commas."""

    def __init__(self, number: type[int] | type[float]) -> None:
        self._number = number
        self.name = f"{number.__name__}[,...]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return [self._number(part) for part in value.split(",")]
        except ValueError:
            self.fail(f"{value}: give numbers between commas", param, ctx)


@click.command()
@click.option("--shape", type=_shape, default="star", show_default=True, help=_shape_help)
@click.option("--workers", type=_Several(int), default="8", show_default=True)
@click.option("--window", type=_Several(int), default="256", show_default=True, help="Blocks in flight.")
@click.option("--rate", "rate_mbit", type=_Several(float), default="1000", show_default=True, help="Mbit/s of a link.")
@click.option(
    "--queue", type=_Several(int), default="0", show_default=True, help="KiB at a switch's port; 0: no limit."
)
@click.option("--loss", type=_Several(float), default="0,0.01,0.05", show_default=True, help="Shares of packets.")
@_on_workers
@click.option("--bytes", "nbytes", type=click.IntRange(1), default=16 << 20, show_default=True, help="Of the tensor.")
@click.option("--delay", "delay_ms", type=float, default=0.03, show_default=True, help="Milliseconds a hop, at least.")
@click.option(
    "--jitter", "jitter_ms", type=float, default=0.005, show_default=True, help="Milliseconds that may come on top."
)
@click.option("--seeds", type=click.IntRange(1), default=3, show_default=True, help="Figures are means over so many.")
def show_rates(
    workers: list[int],
    window: list[int],
    queue: list[int],
    loss: list[float],
    rate_mbit: list[float],
    loss_on: str,
    **options: Any,
) -> None:
    """How long one all-reduce takes, and what loss and short queues leave of its rate. Most options take several numbers.

    A simulation of the protocol, with the time-outs that jobs have: no processor time, links that are always the same. "Of the
    link" is what the busiest link carries at least, as a share of its rate; "of lossless" the rate without loss at the same
    setting. docs/design/aggregation.md has tables.
    """
    if not all(0 < rate < math.inf for rate in rate_mbit):
        raise click.BadParameter("give links a rate: without one there is no share of it", param_hint="--rate")
    if min(queue) < 0:
        raise click.BadParameter("KiB, or 0 for no limit", param_hint="--queue")
    # One tensor in the format that a deployment has by default, in blocks none of which goes around the aggregator.
    fixed: dict[str, Any] = {
        "jobs": 1,
        "payload": _RATES_BLOCK_BYTES,
        "floats": False,
        "finite": True,
        "keyed": False,
        "duplicate": 0.0,
        "shards": 1,
        "operation": 0,
        "queued": 1,
        "patient": True,
        "faults": False,
    }
    fixed["edge_loss"] = loss_on == "workers"
    found = rates(
        lambda seed, **more: _run(seed, 60, more),
        rate_mbit=rate_mbit,
        workers=workers,
        windows=window,
        queues_kib=queue,
        losses=loss,
        **options,
        **fixed,
    )
    click.echo(
        "   Mbit/s  workers     W  queue KiB   loss          ms  of the link  of lossless  packets/block  dropped"
    )
    for one in found:
        click.echo(
            f"{one.rate_mbit:9g}  {one.workers:7}  {one.window:4}  {one.queue_kib or '-':>9}  {one.loss:5g}"
            f"  {1e3 * one.seconds:10.1f}  {one.of_link:11.0%}  {one.of_lossless:11.0%}  {one.packets:13.1f}  {one.dropped:7.1%}"
        )
