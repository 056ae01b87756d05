"""Deployments that run: `penstock bench plan --testbed` carries schemes out on emulated hosts with shaped links and several ways,
and compares what crosses every link with what was planned."""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.cluster import file, generate
from penstock.cluster.network import Cluster
from penstock.planning.deploy import deployment
from penstock.planning.evaluate import evaluate
from penstock.planning.scheme import Scheme
from penstock.reports import Column, Line, Table
from penstock.tools.bench.aggregated.cluster import Daemons, Orders
from penstock.tools.bench.program import run_program
from penstock.tools.testbed import carry
from penstock.tools.testbed.cluster import Testbed
from penstock.tools.testbed.topology import LinkTraffic

__all__ = ["INSTANCES", "Ran", "measure", "table"]


@dataclass(frozen=True)
class Ran:
    """A scheme that ran."""

    instance: str
    way: str
    planned_bit_s: float
    """What every worker sends, as `evaluate` has it."""
    bit_s: float
    """What every worker sent of a tensor's bits, by the median all-reduce; headers not counted."""
    seconds: list[float]
    """Of each all-reduce, the slowest rank's."""
    links: dict[str, tuple[float, float]]
    """By link with a load: bits a second as planned, and as the interfaces counted in all; of its directions the fuller one."""
    dropped: int

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)

    @property
    def of_planned(self) -> float:
        return self.bit_s / self.planned_bit_s

    @property
    def worst_link(self) -> tuple[str, float]:
        """The link whose load is furthest from what was planned, and measured over planned."""
        return max(
            ((name, counted / planned) for name, (planned, counted) in self.links.items()),
            key=lambda each: abs(each[1] - 1),
        )


def unequal_servers() -> Cluster:
    """Servers behind 60 and 40 Mbit/s, so that their best parts are 3/5 and 2/5: 50 Mbit/s a worker, 40 with equal parts. The
    first spine's links are too slow for what goes to the faster server, and are enough for what goes to the other."""
    return _two_leaves({"s0": 60, "s1": 40, "a0": 400, "a1": 400}, (25, 40))


def slow_aggregators() -> Cluster:
    """Servers behind 90 Mbit/s, aggregators behind 120: each sums one server's part of its rack's gradients, and for the other
    server its rack's workers send straight. 48 Mbit/s a worker, and 30 without aggregators."""
    return _two_leaves({"s0": 90, "s1": 90, "a0": 120, "a1": 120}, (60, 60))


def figure_1() -> Cluster:
    """The shape of the paper InArt's testbed (section 5.2), with 20 Mbit/s for the unit of its figure 1: workers behind 120 and
    servers behind 80. Aggregators are hosts behind 120, which the sums to servers and the results share."""
    return _two_leaves({"s0": 80, "s1": 80}, (800,), 120)


def _two_leaves(rates: dict[str, int], spines: tuple[int, ...], rate: int = 100) -> Cluster:
    """Three workers, an aggregator and a server on each of two leaves, which spines join; rates in Mbit/s, of hosts ``rate``
    unless ``rates`` says otherwise.

    Queues hold what is on its way, 256 blocks of each worker for each server: these figures are about rates, and not about
    what is sent again.
    """
    cluster = generate.leaf_spine(
        2, len(spines), 3, servers=2, rate_bit_s=rate * _MBIT, mtu=9000, queue_bytes=QUEUE_BYTES
    )
    rates |= {f"leaf{leaf}-spine{spine}": each for leaf in (0, 1) for spine, each in enumerate(spines)}
    for link, each in rates.items():
        cluster = cluster.with_link(link, rate_bit_s=each * _MBIT)
    return cluster


def _schemes(cluster: Cluster, seconds: float) -> dict[str, Scheme]:
    """The ways to be compared."""
    from penstock.planning import baselines
    from penstock.planning.problem import Problem
    from penstock.planning.solve import scheme_of, search

    problem = Problem(cluster, cluster.jobs[0])
    found = search(problem, seconds=seconds)
    planned = scheme_of(problem, found.rates, found.trees)
    equal = dataclasses.replace(planned, fractions=dict.fromkeys(planned.fractions, 1 / len(planned.fractions)))
    return {PLANNED: planned, EQUAL: equal, ATP: baselines.atp(problem), LBMM: baselines.lbmm(problem)}


def measure(
    instance: str, *, seconds: float, nbytes: int, operations: int, progress: Callable[[str], None] = lambda way: None
) -> list[Ran]:
    """Runs an instance's ways, each with new ranks.

    Args:
        seconds: of search for each deployment.
        nbytes: of a gradient.
        operations: all-reduces of each way that count; one more goes before them.
        progress: is told each way's name.

    Raises:
        BenchError: a daemon or a rank failed or hung, or a result was wrong; with the end of what it said.
        TestbedUnavailable: no emulated cluster here.
    """
    make, others = INSTANCES[instance]
    cluster = make()
    ways = {way: scheme for way, scheme in _schemes(cluster, seconds).items() if way in (PLANNED, *others)}
    runs: list[Ran] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bed = stack.enter_context(Testbed(cluster=cluster, offloads=False))
        (folder / "cluster.yaml").write_text(file.dump(cluster))
        daemons = stack.enter_context(Daemons(bed))
        for way, scheme in ways.items():
            progress(way)
            path = folder / "deployment.yaml"
            path.write_text(deployment(cluster, cluster.jobs[0], scheme, "cluster.yaml"))
            options = {"deployment": str(path), "elements": nbytes // 4, "operations": operations}
            runs.append(_run(bed, daemons, instance, way, scheme, options, folder / "state.json"))
    return runs


def _run(
    bed: Testbed,
    daemons: Daemons,
    instance: str,
    way: str,
    scheme: Scheme,
    options: dict[str, Any],
    state: Path,
) -> Ran:
    cluster = bed.topology.cluster
    (job,) = cluster.jobs
    looks: list[list[LinkTraffic]] = []

    def obey(order: dict[str, Any]) -> None:
        if order["order"] == "begin" and bed.topology.is_routed:
            carry.carry(bed, job, scheme)
        looks.append(bed.links())

    orders = Orders(state, obey, daemons)
    records = run_program(
        bed,
        "carried_rank",
        {**options, "state": str(state)},
        what=f"{instance}, {way}",
        ranks=len(job.workers),
        timeout_s=_WITHIN_S,
        on=list(job.workers),
        on_line=orders.on_line,
    )
    [[first], *others] = [[record for record in each if "seconds" in record] for each in records]
    seconds = [max(each) for each in zip(first["seconds"], *(one["seconds"] for [one] in others), strict=True)]
    worth = evaluate(cluster, job, scheme)
    before, after = looks
    crossed = {now.name: now.since(then) for now, then in zip(after, before, strict=True)}
    links = {}
    for load in worth.loads:
        kind, _, name = load.name.partition(" ")
        if kind == "link":
            counted = max(crossed[name].up_bytes, crossed[name].down_bytes) * 8 / sum(seconds)
            links[name] = load.load, counted
    rate = 8 * 4 * options["elements"] / statistics.median(seconds)
    return Ran(instance, way, worth.rate, rate, seconds, links, sum(each.dropped for each in crossed.values()))


def table(runs: Sequence[Ran]) -> Table:
    """For a terminal and a page."""
    best = {run.instance: run for run in runs if run.way == PLANNED}
    lines = []
    for run in runs:
        ours = best[run.instance]
        name, share = run.worst_link
        lines.append(
            Line(
                [
                    run.instance,
                    run.way,
                    f"{run.planned_bit_s / _MBIT:.1f}",
                    f"{run.bit_s / _MBIT:.1f}",
                    f"{run.of_planned:.1%}",
                    f"{name}: {share:.1%}",
                    f"{ours.planned_bit_s / run.planned_bit_s:.2f}",
                    f"{ours.bit_s / run.bit_s:.2f}",
                ]
            )
        )
    columns = [
        Column("network", is_text=True),
        Column("way", is_text=True),
        Column("planned, Mbit/s a worker"),
        Column("measured"),
        Column("of it"),
        Column("link furthest from planned", is_text=True),
        Column("planned is faster by, planned"),
        Column("measured"),
    ]
    return Table("On emulated hosts", columns, lines)


PLANNED, EQUAL, ATP, LBMM = "planned", "equal parts", "ATP", "LBMM"
INSTANCES: dict[str, tuple[Callable[[], Cluster], tuple[str, ...]]] = {
    "unequal servers": (unequal_servers, (EQUAL,)),
    "slow aggregators": (slow_aggregators, (LBMM,)),
    "figure 1": (figure_1, (ATP, LBMM)),
}
"""By name: the cluster, and the ways beside the planned one."""
QUEUE_BYTES = 32 << 20
_WITHIN_S = 600.0
_MBIT = 1_000_000
