"""A collective of many ranks in virtual time: how long it takes, and how long its plan promises."""

from __future__ import annotations

import math
import time
from typing import Any

import click
from click.core import ParameterSource

from penstock.cluster import generate
from penstock.cluster.network import Cluster
from penstock.errors import Config as ConfigError
from penstock.tools.simulate.clusters import check_links, load, only_job, refuse_others

__all__ = ["ranks_of_cluster", "show_collective"]


@click.command()
@click.option(
    "--collective",
    type=click.Choice(
        [
            "all_reduce",
            "reduce_scatter",
            "all_gather",
            "broadcast",
            "reduce",
            "gather",
            "scatter",
            "all_to_all",
            "barrier",
        ]
    ),
    default="all_reduce",
    show_default=True,
    help="What the ranks do; a root is rank 0.",
)
@click.option(
    "--bytes",
    "nbytes",
    type=click.IntRange(0),
    default=16 << 20,
    show_default=True,
    help="Of the tensor; of a gather and a scatter, of each rank's part. A barrier has none.",
)
@click.option(
    "--algorithm",
    metavar="NAME",
    help="Of an all-reduce, as PENSTOCK_ALGORITHM: ring, halving-doubling, ... Default: chosen by size and hosts.",
)
@click.option("--ranks", type=click.IntRange(2), default=8, show_default=True, help="Ranks, each on a host of its own.")
@click.option(
    "--shape",
    type=click.Choice(["star", "racks"]),
    default="star",
    show_default=True,
    help="All hosts on one switch, or racks around a core switch.",
)
@click.option("--racks", type=click.IntRange(2), default=2, show_default=True, help="With --shape racks: how many.")
@click.option(
    "--rate",
    "rate_mbit",
    type=click.FloatRange(0),
    default=1000,
    show_default=True,
    help="Mbit/s of a link, each way; 0: no limit.",
)
@click.option(
    "--uplink",
    "uplink_mbit",
    type=click.FloatRange(0),
    help="With --shape racks: Mbit/s between a rack and the core. Default: as --rate.",
)
@click.option(
    "--delay", "delay_ms", type=click.FloatRange(0), default=0.03, show_default=True, help="Milliseconds on each link."
)
@click.option(
    "--queue",
    "queue_kib",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="KiB that wait at a switch's port; 0: no limit. A queue that overflows ends the simulation with an error.",
)
@click.option(
    "--repeat",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="How often. The first time, streams do not know their rates yet.",
)
@click.option(
    "--cluster",
    metavar="FILE",
    help="A cluster file with one job, instead of --ranks, --shape, --racks, --rate, --uplink, --delay and --queue.",
)
def show_collective(
    collective: str, nbytes: int, algorithm: str | None, repeat: int, cluster: str | None, **network: Any
) -> None:
    """How long a collective takes on a network, and how long its plan promises.

    Each rank runs the shipped code with tensors that have a length and no bytes: no processor time, no lost packets, no other
    traffic. The same options give the same numbers everywhere. "Promised" are a rank's bytes over the rate of its link, and the
    shortest trip between two ranks for each hop of the plan. A network on which messages meet takes longer; where hops overlap,
    less. docs/design/algorithms.md has bytes and hops of each algorithm.

    Progress of what takes long is on standard error.
    """
    try:
        known = load(cluster, tuple(network)) if cluster is not None else _of_shape(**network)
        arguments = ranks_of_cluster(known)
        outcome = _collective(
            known,
            is_file=cluster is not None,
            collective=collective,
            bytes=nbytes,
            algorithm=algorithm,
            repetitions=repeat,
            **arguments,
        )
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    promised = outcome["promised_ns"]
    of = "" if collective == "barrier" else f" of {nbytes} bytes"
    click.echo(f"{collective}{of}, {len(arguments['ranks'])} ranks: {outcome['algorithm']}")
    named = [_direction(known, one["link"], one["is_back"]) for one in outcome["repetitions"]]
    width = max(len("busiest link"), *map(len, named))
    click.echo(f"          ms    promised   ratio  {'busiest link':{width}}  of its rate         bytes    frames")
    for one, name in zip(outcome["repetitions"], named, strict=True):
        ratio = f"{one['time_ns'] / promised:.3f}" if promised else "-"
        share = "-" if one["share"] is None else f"{one['share']:.1%}"
        click.echo(
            f"{one['time_ns'] / 1e6:12.3f}{promised / 1e6:12.3f}{ratio:>8}  {name:{width}}"
            f"{share:>13}{one['bytes']:14}{one['frames']:10}"
        )


def ranks_of_cluster(cluster: Cluster) -> dict[str, Any]:
    """The ranks and the network of a cluster's job as arguments of `_core.simulate_collective`: ``switches``, ``hosts``,
    ``ranks`` and ``links``, one for each link of the cluster.

    Servers, aggregators and hosts without a rank take no part: nothing passes their links.

    Raises:
        penstock.errors.Config: the cluster has what the simulator does not; the error has the place in its file.
    """
    job = only_job(cluster)
    check_links(cluster)
    nodes = {name: number for number, name in enumerate((*cluster.switch, *cluster.host))}
    links = []
    for number, link in enumerate(cluster.links):
        a, b = (end.node for end in link.ends)
        if any(node in cluster.host and node not in job.workers for node in (a, b)):
            links.append((nodes[a], nodes[b], 0, 0, 0, 0))
            continue
        refuse_others(cluster, number)
        if link.loss:
            raise cluster.wrong(
                f"links[{number}].loss",
                "the simulator of collectives has no TCP, which would send again what is lost: leave it out",
            )
        # What waits at a host waits in its own memory.
        at_a, at_b = (0 if node in cluster.host else min(link.queue_bytes or 0, _MOST) for node in (a, b))
        rate = 0 if link.rate_bit_s is None else min(max(round(link.rate_bit_s / 8), 1), _MOST)
        links.append((nodes[a], nodes[b], rate, min(link.delay_ns, _MOST), at_a, at_b))
    ranks = [nodes[worker] for worker in job.workers]
    return {"switches": len(cluster.switches), "hosts": len(cluster.hosts), "ranks": ranks, "links": links}


_MOST = 2**63
"""The engine's numbers have 64 bits, and it refuses far lower ones with their bounds."""


def _of_shape(
    *,
    ranks: int,
    shape: str,
    racks: int,
    rate_mbit: float,
    uplink_mbit: float | None,
    delay_ms: float,
    queue_kib: int,
) -> Cluster:
    """The cluster that options describe. Raises: click.UsageError."""
    given = click.get_current_context().get_parameter_source
    for name, option in (("racks", "--racks"), ("uplink_mbit", "--uplink")):
        if shape == "star" and given(name) is not ParameterSource.DEFAULT:
            raise click.UsageError(f"{option} is for --shape racks: a star has one switch")
    for option, number in (("--rate", rate_mbit), ("--uplink", uplink_mbit or 0), ("--delay", delay_ms)):
        if not math.isfinite(number * 1e6):
            raise click.UsageError(f"{option} is {number}: give a finite number")

    def bit_s(mbit: float) -> int | None:
        return max(round(mbit * 1e6), 1) if mbit else None

    link: dict[str, Any] = {
        "rate_bit_s": bit_s(rate_mbit),
        "delay_ns": round(delay_ms * 1e6),
        "queue_bytes": queue_kib << 10 or None,
    }
    try:
        if shape == "star":
            return generate.star(ranks, **link)
        uplink = {} if uplink_mbit is None else {"rate_bit_s": bit_s(uplink_mbit)}
        return generate.racks(ranks, racks, uplink=uplink, **link)
    except ValueError as error:
        raise click.UsageError(f"{error} (--ranks {ranks}, --racks {racks})") from None


def _collective(cluster: Cluster, *, is_file: bool, **arguments: Any) -> dict[str, Any]:
    """Runs `_core.simulate_collective` and reports progress.

    Args:
        is_file: errors name a place in the cluster's file; otherwise the option that made it.

    Raises:
        click.UsageError: a number out of bounds, or a queue that overflows.
        penstock.errors.Config: the same, where the file has the number.
    """
    from penstock import _core

    told = time.monotonic()

    def progress(ended: int, time_ns: int, promised_ns: int) -> None:
        nonlocal told
        if time.monotonic() - told < _PROGRESS_EVERY_S:
            return
        told = time.monotonic()
        now = f"{time_ns / 1e6:.1f} ms so far, {promised_ns / 1e6:.1f} ms promised" if time_ns else "ranks join"
        click.echo(f"repetition {ended + 1} of {arguments['repetitions']}: {now}", err=True)

    try:
        return _core.simulate_collective(progress=progress, **arguments)
    except ValueError as error:
        what, path = error.args if len(error.args) == 2 else (str(error), "")
    if is_file and path.startswith(("links", "ranks")):
        raise cluster.wrong(path.replace("ranks", f"jobs.{cluster.jobs[0].name}.workers"), what)
    raise click.UsageError(f"{_option(cluster, path)}: {what}" if path else what)


_PROGRESS_EVERY_S = 2


def _option(cluster: Cluster, path: str) -> str:
    """The option that an argument of `_core.simulate_collective` came from."""
    what, _, field = path.partition(".")
    if not field:
        return {"repetitions": "--repeat"}.get(what, f"--{what}")
    ends = cluster.links[int(what[len("links[") : -1])].ends
    is_uplink = field == "rate" and all(end.node in cluster.switch for end in ends)
    return "--uplink" if is_uplink else f"--{field}"


def _direction(cluster: Cluster, link: int, is_back: bool) -> str:
    a, b = (end.node for end in cluster.links[link].ends)
    return f"{b} to {a}" if is_back else f"{a} to {b}"
