"""``penstock bench figures``: the runs behind the published figures, and what each is to reach. Targets are printed beside what
was measured, never asserted: a shared machine decides more about a single run than the code does."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import click

from penstock.reports import Axis, Bar, Bars, Column, Level, Line, Next, Page, Part, Picture, Section, Table, series
from penstock.tools.bench import machine, report, sweep
from penstock.tools.bench.aggregated import times
from penstock.tools.bench.backends import choose, limits
from penstock.tools.bench.options import EVERYTHING, check_files, files
from penstock.tools.bench.output import reporting_errors, result_console, write_json, write_report
from penstock.tools.bench.report import Row
from penstock.tools.bench.session import Settings
from penstock.tools.testbed.link import LinkSpec


@click.command()
@click.argument("names", nargs=-1, metavar="[FIGURE]...")
@click.option("--rounds", type=click.IntRange(1), default=6, show_default=True, help="Turns of each backend.")
@click.option(
    "--timeout", type=float, default=300.0, show_default=True, help="Seconds until a silent backend counts as hung."
)
@files(EVERYTHING)
def command(names: Sequence[str], rounds: int, timeout: float, json_path: str | None, report_path: str | None) -> None:
    """Measure the published figures again, and print each beside its target.

    Without a name, all of them; those on emulated hosts need root. Targets are printed, not enforced: machines are noisy.
    """
    check_files(json_path=json_path, report_path=report_path)
    by_name = {figure.name: figure for figure in FIGURES}
    if unknown := [name for name in names if name not in by_name]:
        raise click.UsageError(f"no figure {', '.join(unknown)}: there are {', '.join(by_name)}")
    findings, documents = [], []
    with reporting_errors():
        description = machine.describe()
        for figure in [by_name[name] for name in names] or FIGURES:
            found, document = figure.measure(rounds, timeout)
            findings += found
            documents.append({"figure": figure.name} | document)
    console = result_console()
    console.print(table(findings).for_terminal())
    console.print(DEMO, highlight=False)
    write_json(json_path, description, documents, findings=[vars(finding) for finding in findings])
    write_report(report_path, lambda: page(findings, description))


@dataclass(frozen=True)
class Finding:
    """One measured number beside its target."""

    figure: str
    what: str
    value: float | None
    """None when the run could not tell."""
    target: float
    unit: str
    bound: str
    """``>=`` to reach, ``<=`` not to exceed, ``~`` a control that must land near, or the run measures something else."""

    @property
    def of_target(self) -> float | None:
        """Above one: better than a target, or above what a control must land near."""
        if not self.value:
            return None
        return self.target / self.value if self.bound == "<=" else self.value / self.target


@dataclass(frozen=True)
class Target:
    """One number of a figure: read from the row of series ``label``."""

    what: str
    label: str
    read: Callable[[Row], float | None]
    target: float
    unit: str = ""
    bound: str = ">="


@dataclass(frozen=True)
class Figure:
    """An all-reduce of ``nbytes`` in f32 at one number of ranks: what runs, and what it is to reach."""

    name: str
    on: str
    backends: Sequence[str]
    targets: Sequence[Target]
    nbytes: int = 64 << 20
    ranks: int = 2
    link: LinkSpec | None = None
    """On a testbed with one rank a host."""
    variants: Sequence[str] = ()
    """As for --variant."""

    def measure(self, rounds: int, timeout_s: float) -> tuple[list[Finding], dict[str, Any]]:
        """Runs it and prints its tables. What it found, and the run for JSON."""
        on_testbed = self.link is not None
        chosen, _ = choose(",".join(self.backends), self.variants, on_testbed)
        chosen += limits(chosen, on_testbed, sweep.DEFAULT_FLOWS[on_testbed])
        joins = min(rounds, sweep.TESTBED_JOINS) if on_testbed else 1
        turns = math.ceil(rounds / joins)
        settings = Settings("all-reduce", [self.nbytes], [self.ranks], rounds=turns, joins=joins, timeout_s=timeout_s)
        hosts = self.ranks if on_testbed else None
        outcome = sweep.run(settings, chosen, hosts, self.link, f"{self.name}: {self.on}")
        sweep.show(result_console(), outcome)
        return self.findings(outcome.rows), report.to_json(outcome)

    def findings(self, rows: Sequence[Row]) -> list[Finding]:
        """The numbers of this figure from the rows of its run."""
        by_label = {row.point.label: row for row in rows}
        return [
            Finding(self.name, each.what, each.read(by_label[each.label]), each.target, each.unit, each.bound)
            for each in self.targets
        ]


@dataclass(frozen=True)
class AggregatedFigure:
    """All-reduces of ``nbytes`` in f32 through aggregators, beside our ring: one worker a host of an emulated cluster."""

    name: str
    on: str
    workers: int
    rate_mbit: float
    nbytes: int = 16 << 20
    window: int = 256
    WAYS: ClassVar = ("ring", "int32")

    def measure(self, rounds: int, timeout_s: float) -> tuple[list[Finding], dict[str, Any]]:
        """Runs it and prints its table. What it found, and the run for JSON."""
        rows = times.measure(
            workers=self.workers,
            loss=0.0,
            ways=self.WAYS,
            rate_mbit=self.rate_mbit,
            nbytes=self.nbytes,
            window=self.window,
            turns=rounds,
            operations=1,
            offloads=False,
            timeout_s=timeout_s,
        )
        result_console().print(times.table(rows, f"{self.name}: {self.on}").for_terminal())
        return self.findings(rows), {"rows": [row.to_dict() for row in rows]}

    def findings(self, rows: Sequence[times.Row]) -> list[Finding]:
        """The numbers of this figure from the rows of its run, which has `WAYS`."""
        by_way = {row.way: row for row in rows}
        ring, through = (by_way[way] for way in self.WAYS)
        return [
            Finding(self.name, "int32, share of the link's nominal rate", through.share, 0.90, "%", ">="),
            Finding(self.name, "int32, times as fast as our ring", ring.seconds / through.seconds, 1.35, "x", ">="),
            Finding(self.name, "int32, bytes sent for one of the tensor", through.sent, 1.06, "", "<="),
            Finding(self.name, "int32, bytes received for one", through.received, 1.06, "", "<="),
        ]


def table(findings: Sequence[Finding]) -> Table:
    """One line a finding."""
    columns = [
        Column("what", is_text=True),
        Column("measured"),
        Column("target", meaning=">= to reach, <= not to exceed, ~ a control that must land near"),
        Column("of target", meaning="above 1 is better than the target, or above what a control must land near"),
    ]
    lines = [
        Line(
            [each.what, _measured(each), f"{each.bound} {_number(each.target, each.unit)}", _of_target(each)],
            (each.figure,),
        )
        for each in findings
    ]
    return Table("Figures", columns, lines, [Column("figure", is_text=True)])


def page(findings: Sequence[Finding], description: dict[str, Any]) -> Page:
    """The report."""
    told = [each for each in findings if each.bound != "~" and each.of_target is not None]
    missed = [each for each in told if (each.of_target or 0) < 1]
    worst = min(missed, key=lambda each: each.of_target or 0, default=None)
    weakest = [
        min((each for each in told if each.figure == figure), key=lambda each: each.of_target or 0)
        for figure in dict.fromkeys(each.figure for each in told)
    ]
    see = f"{len(told) - len(missed)} of {len(told)} numbers reach their targets."
    bars, previous = [], ""
    for each in findings:
        if each.of_target is not None:
            heading = each.figure if each.figure != previous else ""
            part = Part(each.of_target, "grey-2" if each.bound == "~" else series(0).colour)
            value = f"{_measured(each)}, target {each.bound} {_number(each.target, each.unit)}"
            bars.append(Bar(each.what, [part], value, heading=heading))
            previous = each.figure
    everything = Picture("all", _bars(bars), see, "Grey bars are controls, which must end near the line.")
    return Page(
        kind="Penstock bench: figures",
        answer=f"{len(told) - len(missed)} of {len(told)} targets of the published figures are reached here",
        picture=Picture(
            "figures",
            _bars(
                [Bar(each.figure, [Part(each.of_target or 0, series(0).colour)], _of_target(each)) for each in weakest]
            ),
            see + (f" The shortest is {worst.figure}: {worst.what}." if worst else ""),
            "Longer is better. Of each figure this is the number that is furthest from its target.",
        ),
        next=Next(f"Measure {worst.figure} again.", f"sudo penstock bench figures {worst.figure} --rounds 12")
        if worst
        else Next("Read what the published figures are, and what they do not show: docs/benchmarks/README.md."),
        setting=f"The runs behind docs/benchmarks, measured again on this machine. {DEMO}",
        sections=[
            Section("All numbers", [everything, table(findings)]),
            Section("What this does not show", [report.does_not_show(None)]),
            Section("Conditions", [machine.lines(description)]),
        ],
    )


def _bars(bars: Sequence[Bar]) -> Bars:
    return Bars(Axis("measured", "times the target"), bars, level=Level(1, "target"))


def _measured(finding: Finding) -> str:
    return "-" if finding.value is None else _number(finding.value, finding.unit)


def _of_target(finding: Finding) -> str:
    return "-" if finding.of_target is None else f"{finding.of_target:.2f}"


def _number(value: float, unit: str) -> str:
    if unit == "%":
        return f"{value:.1%}"
    return f"{value:.3g}{unit}"


def _link_share(row: Row) -> float | None:
    return row.link_share


def _limit_share(row: Row) -> float | None:
    return row.limit_share


def _times_gloo(row: Row) -> float | None:
    return row.times_gloo


def _latency_in_gloos(row: Row) -> float | None:
    return 1 / row.times_gloo if row.times_gloo else None


def _engine_mib(row: Row) -> float | None:
    return None if row.point.engine_bytes is None else row.point.engine_bytes / (1 << 20)


def _grown_mib(row: Row) -> float | None:
    return None if row.point.grown_bytes is None else row.point.grown_bytes / (1 << 20)


def _share_of_link(target: float) -> Target:
    return Target("penstock-tcp, share of the link's payload rate", "penstock-tcp", _link_share, target, "%")


def _over_gloo(label: str, target: float) -> Target:
    return Target(f"{label}, times as fast as gloo", label, _times_gloo, target, "x")


FIGURES: list[Figure | AggregatedFigure] = [
    Figure(
        "capped",
        "2 hosts, 1 Gbit/s link, 200 Mbit/s a flow, 64 MiB",
        ["penstock-tcp", "gloo"],
        [_share_of_link(0.90), _over_gloo("penstock-tcp", 4.5)],
        link=LinkSpec(rate_mbit=1000, flow_mbit=200),
    ),
    Figure(
        "uneven",
        "2 hosts, 1 Gbit/s link, flow classes of 60 and 300 Mbit/s by turns, 64 MiB",
        ["penstock-tcp"],
        [
            _share_of_link(0.85),
            # 8 flows of which the slowest gets 60 Mbit/s carry 480 of 1000: where a static split must land, not a goal.
            Target(
                "control: raw sockets, equal split over 8 flows", "equal split x8", _link_share, 0.48, "%", bound="~"
            ),
        ],
        link=LinkSpec(rate_mbit=1000, flow_mbit=[60, 300]),
    ),
    Figure(
        "delay",
        "2 hosts, 1 Gbit/s link, 200 Mbit/s a flow, 20 ms round trip, 64 MiB",
        ["penstock-tcp"],
        [_share_of_link(0.80)],
        link=LinkSpec(rate_mbit=1000, flow_mbit=200, delay_ms=10),
    ),
    Figure(
        "loopback",
        "TCP over loopback, 2 ranks, 64 MiB",
        ["penstock-tcp", "gloo"],
        [
            _over_gloo("penstock-tcp", 1.0),
            Target("penstock-tcp, share of raw sockets both ways", "penstock-tcp", _limit_share, 0.85, "%"),
        ],
    ),
    *(
        Figure(
            f"shm-{ranks}",
            f"shared memory, {ranks} ranks, 64 MiB",
            ["penstock-shm", "penstock-empty", "gloo"],
            [
                target
                for label in ("penstock-shm", "penstock-empty")
                for target in (
                    _over_gloo(label, over_gloo),
                    Target(f"{label}, share of the copy bound", label, _limit_share, 0.60, "%"),
                )
            ],
            ranks=ranks,
        )
        for ranks, over_gloo in ((2, 3.5), (4, 4.0))
    ),
    Figure(
        "latency",
        "1 KiB through torch, 2 ranks",
        ["penstock-shm", "penstock-tcp", "engine-shm", "engine-tcp", "gloo"],
        [
            Target("penstock-shm, time in gloo's", "penstock-shm", _latency_in_gloos, 1.0, "x", bound="<="),
            Target("penstock-tcp, time in gloo's", "penstock-tcp", _latency_in_gloos, 1.25, "x", bound="<="),
        ],
        nbytes=1 << 10,
    ),
    Figure(
        "memory",
        "TCP over loopback, 5 ranks (4 peers), 64 MiB",
        ["penstock-tcp"],
        [
            Target("what the engine reports, a rank", "16-streams", _engine_mib, 64, " MiB", bound="<="),
            Target("resident beyond the tensors, a rank", "16-streams", _grown_mib, 64, " MiB", bound="<="),
        ],
        ranks=5,
        # As many as to peers on other hosts.
        variants=["16-streams=penstock-tcp,PENSTOCK_STREAMS=16"],
    ),
    # A rate at which two processors idle for two thirds of the time: the link decides.
    AggregatedFigure(
        "aggregated", "4 hosts in 2 racks below a core, 120 Mbit/s links, 16 MiB", workers=4, rate_mbit=120
    ),
]

DEMO = "The figures of the training demo are those of `penstock demo`."
