"""The runs behind the published figures, and what each is to reach. Targets are printed beside what was measured, never
asserted: a shared machine decides more about a single run than the code does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich import box
from rich.table import Table

from penstock.tools.bench.aggregated import times
from penstock.tools.bench.report import Row
from penstock.tools.testbed.link import LinkSpec


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
    shown = Table(title="Figures", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("figure", "what"):
        shown.add_column(name)
    for name in ("measured", "target", "of target"):
        shown.add_column(name, justify="right", no_wrap=True)
    previous = ""
    for finding in findings:
        share = finding.of_target
        shown.add_row(
            finding.figure if finding.figure != previous else "",
            finding.what,
            "-" if finding.value is None else _number(finding.value, finding.unit),
            f"{finding.bound} {_number(finding.target, finding.unit)}",
            "-" if share is None else f"{share:.2f}",
        )
        previous = finding.figure
    return shown


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
            Target("what the engine reports, a rank", "penstock-tcp", _engine_mib, 64, " MiB", bound="<="),
            Target("resident beyond the tensors, a rank", "penstock-tcp", _grown_mib, 64, " MiB", bound="<="),
        ],
        ranks=5,
    ),
    # A rate at which two processors idle for two thirds of the time: the link decides.
    AggregatedFigure(
        "aggregated", "4 hosts in 2 racks below a core, 120 Mbit/s links, 16 MiB", workers=4, rate_mbit=120
    ),
]
