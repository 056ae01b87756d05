"""``penstock bench plan``: what the planner finds where the paper InArt (WWW '24) was measured, beside the paper's numbers.

The paper emulates its sections 5.3 and A.2 with Mininet and P4 switches in software; here they are computed: `evaluate` says
how fast every worker can send at best, results on their way down included. So the paper's numbers, which are measured, and ours
are no measurements of one thing; what can be compared is how the ways stand to each other.
"""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import click

from penstock.cluster import generate
from penstock.cluster.network import Cluster
from penstock.extras import need
from penstock.planning.evaluate import evaluate
from penstock.planning.scheme import Scheme
from penstock.reports import Axis, Column, Curve, Line, Lines, Next, Page, Panel, Picture, Section, Table, aside, series
from penstock.tools.bench import figure1, machine
from penstock.tools.bench.options import check_files, files
from penstock.tools.bench.output import progress_bar, reporting_errors, result_console, write_json, write_report

__all__ = ["Row", "command", "fat_tree", "measure", "page", "tables"]


@click.command()
@click.option(
    "--seeds",
    type=click.IntRange(1),
    default=10,
    show_default=True,
    help="Networks and choices of workers for each row.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0.05),
    default=1.0,
    show_default=True,
    help="Of search for each deployment, behind the bound.",
)
@click.option("--workers", default="10,20,30,40,50", show_default=True, help="With 4 servers.")
@click.option("--servers", default="2,3,4,5,6", show_default=True, help="With 48 workers; none: ''.")
@click.option("--large/--no-large", default=True, show_default=True, help="Also time the largest problems.")
@click.option(
    "--testbed", is_flag=True, help="Instead run deployments on emulated hosts, and compare loads; needs root."
)
@click.option(
    "--mebibytes", type=click.IntRange(1), default=64, show_default=True, help="Of a gradient, with --testbed."
)
@click.option("--operations", type=click.IntRange(1), default=3, show_default=True, help="All-reduces, with --testbed.")
@files("Write the figures to this file.")
def command(
    seeds: int,
    seconds: float,
    workers: str,
    servers: str,
    large: bool,
    testbed: bool,
    mebibytes: int,
    operations: int,
    json_path: str | None,
    report_path: str | None,
) -> None:
    """Plan the networks of the paper InArt, and compare: a fat-tree of 54 hosts, and figure 1.

    All is computed, on one core; with the defaults it takes about ten minutes. With --testbed three small networks are emulated
    and run their deployments, which takes eight. See docs/design/planner.md.
    """
    need("penstock bench plan", "scipy")
    check_files(json_path=json_path, report_path=report_path)
    if testbed:
        if report_path is not None:
            raise click.UsageError("--report draws the computed networks: leave --testbed out, or take --json")
        with reporting_errors():
            _run(seconds, mebibytes << 20, operations, json_path)
        return
    with reporting_errors():
        cases = [(count, 4) for count in _numbers(workers)]
        cases += [case for count in _numbers(servers) if (case := (48, count)) not in cases] if servers else []
        rows: list[Row] = []
        with progress_bar() as progress:
            done = 0
            for uneven in (False, True):
                for count, parts in cases:
                    progress(f"{_links(uneven)} · {count} workers, {parts} servers", done, 2 * len(cases))
                    rows += [row for seed in range(seeds) for row in measure(count, parts, uneven, seed, seconds)]
                    done += 1
        times = _times() if large else []
        console = result_console()
        small = [figure1.example(), *figure1.testbed()]
        for table in [*small, *tables(rows), *([_of_times(times)] if times else [])]:
            console.print(table.for_terminal())
        description = machine.describe()
        write_json(json_path, description, [dataclasses.asdict(row) for row in rows], times=times, small=_plain(small))
        write_report(report_path, lambda: page(rows, times, small, description))


def _run(seconds: float, nbytes: int, operations: int, json_path: str | None) -> None:
    from penstock.tools.bench import carried

    runs: list[carried.Ran] = []
    with progress_bar() as progress:
        for done, instance in enumerate(carried.INSTANCES):

            def told(way: str, done: int = done, instance: str = instance) -> None:
                progress(f"{instance} · {way}", done, len(carried.INSTANCES))

            runs += carried.measure(instance, seconds=seconds, nbytes=nbytes, operations=operations, progress=told)
    result_console().print(carried.table(runs).for_terminal())
    write_json(json_path, machine.describe(), [run.to_dict() for run in runs])


@dataclass(frozen=True)
class Row:
    """A way on one network."""

    uneven: bool
    workers: int
    servers: int
    seed: int
    way: str
    rate_bit_s: float
    """What every worker sends; of "bound" what none passes."""
    crossed: float | None
    """What all links carry of gradients, as a multiple of what a worker sends."""
    taken_in: float | None
    """What all servers take in, likewise."""
    cpu_s: float
    """Processor time: of "planned" for the search, of "bound" for the relaxed problem."""


def fat_tree(workers: int, servers: int, uneven: bool, seed: int) -> Cluster:
    """The paper's section 5.3: 54 hosts, links of 20 Mbit/s or 10 to 30, servers that take in 20, switches 9."""
    cluster = generate.fat_tree(6, servers=servers, seed=seed, rate_bit_s=20 * _MBIT)
    if uneven:
        cluster = generate.uneven(cluster, 10 * _MBIT, 30 * _MBIT, seed=seed)
    (job,) = cluster.jobs
    hosts = sorted(random.Random(seed).sample(job.workers, min(workers, len(job.workers))))
    return dataclasses.replace(
        cluster,
        aggregators=tuple(dataclasses.replace(each, capacity_bit_s=9 * _MBIT) for each in cluster.aggregators),
        servers=tuple(dataclasses.replace(each, ingress_bit_s=20 * _MBIT) for each in cluster.servers),
        jobs=(dataclasses.replace(job, workers=tuple(hosts)),),
    )


def measure(workers: int, servers: int, uneven: bool, seed: int, seconds: float) -> list[Row]:
    """All ways on one network."""
    import numpy as np

    from penstock.planning import baselines
    from penstock.planning.problem import Problem
    from penstock.planning.relax import relax
    from penstock.planning.solve import scheme_of, search

    cluster = fat_tree(workers, servers, uneven, seed)
    (job,) = cluster.jobs
    start = time.process_time()
    problem = Problem(cluster, job, levels=1)
    relaxed = relax(problem)
    bound_s = time.process_time() - start

    def row(way: str, scheme: Scheme, cpu_s: float) -> Row:
        worth = evaluate(cluster, job, scheme)
        crossed = sum(load.load for load in worth.loads if load.name.startswith("link ")) / 2 / worth.rate
        taken = sum(
            part * (scheme.via[server].count(None) + len({*scheme.via[server]} - {None}))
            for server, part in scheme.fractions.items()
        )
        return Row(uneven, len(job.workers), servers, seed, way, worth.rate, crossed, taken, cpu_s)

    start = time.process_time()
    found = search(problem, seed=seed, seconds=seconds, relaxed=relaxed)
    rows = [row(OURS, scheme_of(problem, found.rates, found.trees), time.process_time() - start)]
    rng = np.random.default_rng(seed)
    others: dict[str, Callable[[], Scheme]] = {
        INART: lambda: baselines.inart(problem, rng, relaxed),
        R_INART: lambda: baselines.equal_inart(problem, rng),
        ATP: lambda: baselines.atp_best_effort(problem),
        LBMM: lambda: baselines.lbmm(problem),
    }
    for way, make in others.items():
        start = time.process_time()
        rows.append(row(way, make(), time.process_time() - start))
    return [*rows, Row(uneven, len(job.workers), servers, seed, BOUND, relaxed.bound, None, None, bound_s)]


def tables(rows: Sequence[Row]) -> list[Table]:
    """Sending rates, and what follows from them, beside what the paper's text says."""
    rates = [
        Line(
            [
                f"{count} workers, {parts} servers",
                *(_spread(_rates(rows, uneven, count, parts, way)) for way in WAYS),
                _best(rows, uneven, count, parts),
            ],
            group=(_links(uneven),),
        )
        for uneven in (False, True)
        for count, parts in _cases(rows)
        if _rates(rows, uneven, count, parts, OURS)
    ]
    found = [
        Table(
            "Sending rate of a worker, Mbit/s: mean, least to most of the seeds",
            [Column("case", is_text=True), *(Column(way) for way in WAYS), Column("planned\nof bound")],
            rates,
            [Column("links", is_text=True)],
        )
    ]
    lines = []
    for uneven in (False, True):
        ratios = {
            way: statistics.fmean(_ratios(rows, uneven, way))
            for way in (INART, R_INART, ATP, LBMM)
            if _ratios(rows, uneven, way)
        }
        best = _over_best(rows, uneven)
        if best:
            told = f"{statistics.fmean(best):.2f}x, {min(best):.2f}x at least"
            lines.append(Line([_links(uneven), *(f"{ratio:.2f}x" for ratio in ratios.values()), told]))
    found.append(
        Table(
            "Planned over",
            [
                Column("links", is_text=True),
                *(Column(way) for way in (INART, R_INART, ATP, LBMM)),
                Column("the best of the others"),
            ],
            lines,
            note="Means of the networks' ratios. InArt is one random rounding, without repair, and often below R-InArt and ATP: "
            "the last column has the best of the others in each network.",
        )
    )
    found.append(_beside_the_paper(rows))
    return found


def _beside_the_paper(rows: Sequence[Row]) -> Table:
    """What the paper's text names in numbers."""
    lines = []
    for what, case, field, scale, numbers in PAPER:
        uneven, count, parts = case
        cells = []
        for way in (OURS, R_INART, ATP, LBMM):
            values = [
                value * scale
                for row in rows
                if _is(row, uneven, count, parts, way) and (value := _value(row, field)) is not None
            ]
            printed = f" ({numbers[way]})" if way in numbers else ""
            cells.append((f"{statistics.fmean(values):.3g}" if values else "-") + printed)
        lines.append(Line([what, *cells], group=(f"{_links(uneven)}, {count} workers",)))
    return Table(
        "Beside the paper's numbers, which stand in brackets",
        [Column("what", is_text=True), *(Column(way) for way in ("planned\n(InArt)", R_INART, ATP, LBMM))],
        lines,
        [Column("case", is_text=True)],
        note="The paper's are measured with P4 switches in software, ours are computed with results on their way down.",
    )


def page(
    rows: Sequence[Row], times: Sequence[dict[str, Any]], small: Sequence[Table], description: dict[str, Any]
) -> Page:
    """The report."""
    over = {uneven: _ratios(rows, uneven, ATP) for uneven in (False, True)}
    told = ", ".join(f"{statistics.fmean(each):.1f} with {_links(uneven)}" for uneven, each in over.items() if each)
    by_servers = sorted({row.servers for row in rows if row.workers == 48})
    by_workers = [(count, parts) for count, parts in _cases(rows) if parts == 4]
    first, *others = [_picture(rows, "workers", by_workers, shown) for shown in SHOWN]
    if len(by_servers) > 1:
        others.append(_picture(rows, "servers", [(48, parts) for parts in by_servers], SHOWN[0]))
    sections = [Section("Sending rates", [*others, *tables(rows)]), Section("Figure 1", [*small])]
    sections.append(Section("Time of a step's gradients", [_step_times(rows)]))
    if times:
        sections.append(Section("How long planning takes", [_of_times(times)]))
    return Page(
        kind="Penstock bench: plan",
        answer=f"Planned rates over ATP's: {told}",
        picture=first,
        next=Next("Plan a cluster of your own.", "penstock plan cluster.yaml -o deployment.yaml"),
        setting="A fat-tree of 54 hosts and 45 switches as in InArt's section 5.3, computed: 20 Mbit/s a link, or 10 to 30.",
        sections=[*sections, Section("Conditions", [machine.lines(description)])],
    )


def _picture(rows: Sequence[Row], over: str, cases: Sequence[tuple[int, int]], shown: _Shown) -> Picture:
    panels = []
    for uneven in (False, True):
        curves = []
        for index, way in enumerate(WAYS):
            points = [
                (count if over == "workers" else parts, statistics.fmean(values) * shown.scale)
                for count, parts in cases
                if (
                    values := [
                        value
                        for row in rows
                        if _is(row, uneven, count, parts, way) and (value := _value(row, shown.field)) is not None
                    ]
                )
            ]
            if points:
                x, y = zip(*sorted(points), strict=True)
                curves.append(Curve(way, x, y, aside(0) if way == BOUND else series(index)))
        ticks = sorted({count if over == "workers" else parts for count, parts in cases})
        if curves:
            vertical = Axis(shown.what, shown.unit, from_zero=True)
            panels.append(Panel(_links(uneven), Axis(over, "number", ticks=ticks), vertical, curves))
    return Picture(
        f"{shown.field}-{over}",
        Lines(panels),
        f"{shown.caption}, by the number of {over}.",
        f"Means. {shown.note}".strip(),
    )


def _step_times(rows: Sequence[Row]) -> Table:
    lines = []
    for model, size in MODELS.items():
        for uneven in (False, True):
            cells = []
            for way in (OURS, INART, R_INART, ATP, LBMM):
                values = [8 * size / rate for rate in _rates(rows, uneven, 50, 4, way)]
                cells.append(f"{statistics.fmean(values):.3g} s" if values else "-")
            lines.append(Line([f"{model}, {_links(uneven)}", *cells]))
    return Table(
        "Communication time of a step, 50 workers, 4 servers",
        [Column("model", is_text=True), *(Column(way) for way in (OURS, INART, R_INART, ATP, LBMM))],
        lines,
    )


def _plain(found: Sequence[Table]) -> list[dict[str, Any]]:
    """Tables for JSON."""
    return [
        {
            "title": each.title,
            "columns": [column.head for column in each.columns],
            "lines": [list(line.cells) for line in each.lines],
        }
        for each in found
    ]


def _times() -> list[dict[str, Any]]:
    """Processor seconds of the largest problems: the bars of planning for 54 hosts, of a change, and of 4,096 workers."""
    import numpy as np

    from penstock.planning.problem import Problem
    from penstock.planning.relax import relax
    from penstock.planning.replan import Gone, State, decide
    from penstock.planning.solve import scheme_of, search
    from penstock.tools.plan.planned import plan

    found: list[dict[str, Any]] = []

    def took(what: str, bar: str, do: Callable[[], str], of: int = 1) -> None:
        """How long each ``of`` so many problems takes."""
        wall, cpu = time.monotonic(), time.process_time()
        result = do()
        found.append(
            {
                "what": what,
                "cpu_s": (time.process_time() - cpu) / of,
                "wall_s": (time.monotonic() - wall) / of,
                "bar": bar,
                "result": result,
            }
        )

    small = fat_tree(50, 4, True, 0)
    (job,) = small.jobs

    def relaxed_of(candidates: int | None) -> str:
        problem = Problem(small, job, candidates=candidates)
        return f"{relax(problem).bound / _MBIT:.3f} Mbit/s"

    networks = [fat_tree(50, 4, True, seed) for seed in range(6)]

    def searched(candidates: int | None) -> str:
        rates = []
        for network in networks:
            problem = Problem(network, network.jobs[0], candidates=candidates)
            rates.append(search(problem, seconds=0.35, relaxed=relax(problem)).rate)
        return f"{sum(rates) / len(rates) / _MBIT:.3f} Mbit/s"

    took("54 hosts: the relaxed problem, exactly", "< 5 s", lambda: relaxed_of(None))
    each = len(networks)
    took("54 hosts: all aggregators, 0.35 s of search", "< 1 s", lambda: searched(None), each)
    took("54 hosts: 40 of 45 aggregators a rack, 0.35 s of search", "< 1 s", lambda: searched(40), each)
    took("54 hosts: 30 of 45 aggregators a rack, 0.35 s of search", "< 1 s", lambda: searched(30), each)
    problem = Problem(small, job)
    best = search(problem, seconds=2, relaxed=relax(problem))
    state = State(scheme_of(problem, best.rates, best.trees))
    busy = max(np.flatnonzero(best.trees[0].below[:-1]), key=lambda v: best.trees[0].below[v])
    gone = Gone(f"aggregator {problem.aggregators[busy]}")
    took(
        "54 hosts: other ways after an aggregator's death",
        "< 1 s",
        lambda: f"{decide(small, job, state, gone)[1].rate / _MBIT:.3f} Mbit/s",
    )

    def large(cluster: Cluster) -> str:
        made = plan(cluster, cluster.jobs[0], seed=0, seconds=16)
        first = made.rows[0]
        return (
            f"{made.rate_bit_s / 1e9:.4f} Gbit/s, {first.of_bound or math.nan:.0%} of the bound, levels {made.levels}"
        )

    gigabit = 1_000_000_000
    tree = generate.racks(
        4096, 128, servers=4, core_aggregator=True, rate_bit_s=10 * gigabit, uplink={"rate_bit_s": 40 * gigabit}
    )
    took("4,096 workers in 128 racks, a tree, 4 servers", "< 30 s", lambda: large(tree))
    leaves = generate.leaf_spine(128, 8, 32, servers=4, rate_bit_s=10 * gigabit)
    took("4,096 workers on 128 leaves, 8 spines, 4 servers", "< 30 s", lambda: large(leaves))
    cube = generate.racks(48, 48, servers=48, rate_bit_s=gigabit)
    took("48 servers x 48 racks x 48 aggregators", "shown", lambda: large(cube))
    return found


def _of_times(times: Sequence[dict[str, Any]]) -> Table:
    lines = [
        Line([each["what"], f"{each['cpu_s']:.2f} s", f"{each['wall_s']:.2f} s", each["bar"], each["result"]])
        for each in times
    ]
    columns = [
        Column("what", is_text=True),
        Column("processor"),
        Column("wall"),
        Column("bar"),
        Column("result", is_text=True),
    ]
    return Table("How long planning takes", columns, lines)


def _numbers(text: str) -> list[int]:
    try:
        found = [int(word) for word in text.split(",") if word]
    except ValueError:
        found = []
    if not found or not all(1 <= number <= 52 for number in found):
        raise click.BadParameter(f"{text}: give numbers from 1 to 52 with commas between")
    return found


def _cases(rows: Sequence[Row]) -> list[tuple[int, int]]:
    return list(dict.fromkeys((row.workers, row.servers) for row in rows))


def _is(row: Row, uneven: bool, workers: int, servers: int, way: str) -> bool:
    return (row.uneven, row.workers, row.servers, row.way) == (uneven, workers, servers, way)


def _rates(rows: Sequence[Row], uneven: bool, workers: int, servers: int, way: str) -> list[float]:
    return [row.rate_bit_s for row in rows if _is(row, uneven, workers, servers, way)]


def _ratios(rows: Sequence[Row], uneven: bool, way: str) -> list[float]:
    """Planned over another way, network by network."""
    of = {
        (row.workers, row.servers, row.seed): row.rate_bit_s for row in rows if row.uneven == uneven and row.way == way
    }
    return [
        row.rate_bit_s / of[row.workers, row.servers, row.seed]
        for row in rows
        if row.uneven == uneven and row.way == OURS and (row.workers, row.servers, row.seed) in of
    ]


def _over_best(rows: Sequence[Row], uneven: bool) -> list[float]:
    """Planned over the best of the others, network by network."""
    best: dict[tuple[int, int, int], float] = {}
    for row in rows:
        if row.uneven == uneven and row.way not in (OURS, BOUND):
            key = (row.workers, row.servers, row.seed)
            best[key] = max(best.get(key, 0.0), row.rate_bit_s)
    return [
        row.rate_bit_s / best[row.workers, row.servers, row.seed]
        for row in rows
        if row.uneven == uneven and row.way == OURS
    ]


def _best(rows: Sequence[Row], uneven: bool, workers: int, servers: int) -> str:
    planned, bounds = (_rates(rows, uneven, workers, servers, way) for way in (OURS, BOUND))
    return f"{statistics.fmean(one / bound for one, bound in zip(planned, bounds, strict=True)):.0%}"


def _value(row: Row, field: str) -> float | None:
    if field == "rate":
        return row.rate_bit_s
    if field == "time":
        return 1 / row.rate_bit_s
    if field == "throughput":
        return None if row.crossed is None else row.crossed * row.rate_bit_s
    return row.taken_in


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "-"
    mean, least, most = (value / _MBIT for value in (statistics.fmean(values), min(values), max(values)))
    return f"{mean:.2f}" if len(values) == 1 else f"{mean:.2f} ({least:.2f}-{most:.2f})"


def _links(uneven: bool) -> str:
    return "unequal links" if uneven else "equal links"


OURS, INART, R_INART, ATP, LBMM, BOUND = "planned", "InArt", "R-InArt", "ATP", "LBMM", "bound"
WAYS = (OURS, INART, R_INART, ATP, LBMM, BOUND)
"""InArt: the paper's own, the relaxed problem's split and one random rounding; R-InArt: equal parts and one rounding; ATP:
`baselines.atp_best_effort`."""

MODELS = {"LSTM": 1_627_000, "VGG19": 548_000, "ResNet-50": 97_000}
"""Bytes of gradients, a thousandth of the models', as the paper has them."""

_MBIT = 1_000_000
_MEGABYTES = 1e-6


class _Shown(NamedTuple):
    """A figure of the report: `_value` by the number of workers or servers."""

    field: str
    scale: float
    """To the unit."""
    what: str
    unit: str
    caption: str
    note: str = ""


GRADIENTS = "A step has a thousandth of the model's bytes, as in the paper."
SHOWN = (
    _Shown(
        "rate",
        1 / _MBIT,
        "sending rate",
        "Mbit/s",
        "What every worker can send",
        "Dashed: the bound for one level.",
    ),
    _Shown("time", 8 * MODELS["LSTM"], "time", "s", "How long gradients of the LSTM are on their way", GRADIENTS),
    _Shown("throughput", 1 / _MBIT, "throughput", "Mbit/s", "What all links carry together"),
    _Shown(
        "taken",
        MODELS["VGG19"] * _MEGABYTES,
        "taken in",
        "MB",
        "What all servers take in of gradients of VGG19",
        GRADIENTS,
    ),
)
"""Figures 7, 8 and 12; 10; 13; 14 of the paper."""
# What, case (unequal links, workers, servers), field, factor to the paper's unit, the paper's numbers; those of the text of
# 5.3.2 and A.2.
PAPER: list[tuple[str, tuple[bool, int, int], str, float, dict[str, str]]] = [
    ("sending rate, Mbit/s (fig. 8)", (True, 50, 4), "rate", 1 / _MBIT, {OURS: "8.73", ATP: "4.44"}),
    ("sending rate, Mbit/s (fig. 7)", (False, 50, 4), "rate", 1 / _MBIT, {OURS: "10.75", ATP: "4.7"}),
    ("time of ResNet-50, s (fig. 9)", (False, 50, 4), "time", 8 * 97_000, {OURS: "0.068", ATP: "0.152", LBMM: "0.35"}),
    (
        "throughput of all links, Mbit/s (fig. 13)",
        (False, 30, 4),
        "throughput",
        1 / _MBIT,
        {OURS: "420", ATP: "160", LBMM: "90"},
    ),
    (
        "servers take in of VGG19, MB (fig. 14)",
        (False, 40, 4),
        "taken",
        548_000 * _MEGABYTES,
        {OURS: "3.44", ATP: "7.33", LBMM: "22"},
    ),
    (
        "sending rate, Mbit/s (fig. 12; paper: mean of 2 to 6 servers)",
        (True, 48, 4),
        "rate",
        1 / _MBIT,
        {OURS: "10.68", R_INART: "8.85", ATP: "4.5", LBMM: "1.68"},
    ),
]
