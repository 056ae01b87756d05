"""The output of the bench: tables, JSON and plots. Pure, except for the files that it writes."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from penstock.tools.bench.collectives import COLLECTIVES
from penstock.tools.bench.session import Point, Series, Settings, format_bytes
from penstock.tools.testbed.link import LinkSpec


@dataclass(frozen=True)
class Row:
    """One point, read: bandwidths in GB/s (1e9 bytes), times in seconds, shares as fractions."""

    point: Point
    median_s: float
    min_s: float
    p90_s: float
    algbw: float
    busbw: float
    limit: str | None
    """The label of the fastest series that bounds this one."""
    limit_share: float | None
    job_shares: list[float]
    """Of each fresh job: the limit's median in that job over this series' median in it. Empty without a limit. A median over
    all blocks hides a third of the jobs that is slow; the least of these does not."""
    link_share: float | None
    """Testbed: payload of the plan over what TCP can carry at the link's rate, at the host that sends most."""
    times_gloo: float | None
    wire_ratio: float | None
    """Testbed: bytes that the interfaces counted over bytes of the plan, at the host with the most."""

    def to_dict(self) -> dict[str, Any]:
        point = {name: value for name, value in vars(self.point).items() if not name.startswith("_")}
        own = {name: value for name, value in vars(self).items() if name != "point"}
        return point | {
            name: None if isinstance(value, float) and math.isnan(value) else value for name, value in own.items()
        }


def rows(points: Sequence[Point], series: Sequence[Series], link: LinkSpec | None) -> list[Row]:
    """Reads points, each beside the others of its size and number of ranks."""
    by_label = {each.label: each for each in series}
    result = []
    for point in points:
        beside = [other for other in points if (other.ranks, other.nbytes) == (point.ranks, point.nbytes)]
        median = statistics.median(point.seconds)
        algbw = point.nbytes / median / 1e9
        prefix = by_label[point.label].limit
        bounds = [other for other in beside if by_label[other.label].role == prefix]
        bound = min(bounds, key=lambda other: statistics.median(other.seconds), default=None)
        gloo = next((other for other in beside if other.label == "gloo"), None)
        sent = max((point.planned or {}).values(), default=0)
        payload = link.payload_mbit if link else None
        result.append(
            Row(
                point,
                median_s=median,
                min_s=min(point.seconds),
                p90_s=quantile(point.seconds, 0.9),
                algbw=algbw,
                busbw=algbw * COLLECTIVES[point.collective].bus_factor(point.ranks),
                limit=bound.label if bound else None,
                limit_share=statistics.median(bound.seconds) / median if bound else None,
                job_shares=_job_shares(point, bounds),
                link_share=sent * 8 / median / (payload * 1e6) if payload and sent else None,
                times_gloo=statistics.median(gloo.seconds) / median if gloo else None,
                wire_ratio=max(point.sent[host] / point.planned[host] for host in point.planned if point.planned[host])
                if point.sent and point.planned and sent
                else None,
            )
        )
    return result


def _job_shares(point: Point, bounds: Sequence[Point]) -> list[float]:
    """Of each fresh job: its fastest bound's median over the median of ``point``."""
    shares = []
    for job, mine in enumerate(point.jobs):
        beside = [statistics.median(bound.jobs[job]) for bound in bounds if job < len(bound.jobs) and bound.jobs[job]]
        if mine and beside:
            shares.append(min(beside) / statistics.median(mine))
    return shares


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of all values do not exceed."""
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]


def table(of: Sequence[Row], series: Sequence[Series], title: str) -> Table:
    """One line a series and size; the best backend of a size in bold."""
    on_testbed = any(row.point.planned for row in of)
    has_bytes = any(row.busbw for row in of)
    has_jobs = any(len(row.job_shares) > 1 for row in of)
    shown = _table(title)
    for name in ("ranks", "size", "series", "median", "min", "p90"):
        shown.add_column(name, justify="left" if name == "series" else "right", no_wrap=True)
    if has_bytes:
        for name in ("algbw", "busbw"):
            shown.add_column(f"{name}\nGB/s", justify="right", no_wrap=True)
        shown.add_column("of\nlimit", justify="right")
        if has_jobs:
            shown.add_column("median\njob", justify="right")
            shown.add_column("worst\njob", justify="right")
    if on_testbed:
        shown.add_column("of\nlink", justify="right")
        shown.add_column("wire/\nplan", justify="right")
    shown.add_column("vs\ngloo", justify="right")
    shown.add_column("CPU", justify="right")
    backends = {each.label for each in series if each.is_backend}
    previous = None
    for row in of:
        point = row.point
        at = (point.ranks, point.nbytes)
        if previous is not None and at != previous:
            shown.add_section()
        rivals = [
            other for other in of if (other.point.ranks, other.point.nbytes) == at and other.point.label in backends
        ]
        best = len(rivals) > 1 and row.median_s == min(other.median_s for other in rivals)
        cells = [
            str(point.ranks) if at != previous else "",
            (format_bytes(point.nbytes) if has_bytes else "-") if at != previous else "",
            point.label,
            format_seconds(row.median_s),
            format_seconds(row.min_s),
            format_seconds(row.p90_s),
        ]
        if has_bytes:
            cells += [f"{row.algbw:.3g}", f"{row.busbw:.3g}", _percent(row.limit_share)]
            if has_jobs:
                shares = row.job_shares
                cells += [_percent(statistics.median(shares) if shares else None), _percent(min(shares, default=None))]
        if on_testbed:
            cells += [
                _percent(row.link_share),
                f"{row.wire_ratio:.3f}" if row.wire_ratio and point.label in backends else "",
            ]
        cells += [
            f"{row.times_gloo:.2f}x" if row.times_gloo and point.label in backends - {"gloo"} else "",
            _percent(point.cpu_share),
        ]
        shown.add_row(*cells, style="bold" if best else "" if point.label in backends else "dim")
        previous = at
    return shown


def flow_table(of: Sequence[Row]) -> Table | None:
    """Testbed with capped flows: where connections fell each time that a group was formed, at its largest size; None
    elsewhere. Host 0 stands for all: the two ends of a connection are in the same class."""
    largest = {(row.point.ranks, row.point.label): row.point for row in of if row.point.class_flows}
    if not largest:
        return None
    shown = _table("Flows by class")
    for name in ("ranks", "series", "connections: class x count", "classes with over 1 % of the bytes"):
        shown.add_column(name)
    lines: dict[tuple[str, str, str, str], None] = {}
    for (ranks, label), point in largest.items():
        for flows, shares in zip(point.class_flows, point.class_shares, strict=True):
            counted = " ".join(f"{index}x{count}" for index, count in enumerate(flows[0]) if count)
            carried = [str(index) for index, share in enumerate(shares[0]) if share > 0.01]
            lines[str(ranks), label, counted, f"{len(carried)} of {len(shares[0])}: {' '.join(carried)}"] = None
    for line in lines:
        shown.add_row(*line)
    return shown


def memory_lines(of: Sequence[Row]) -> list[str]:
    """What each backend held beyond the user's tensors, at most."""
    lines = []
    for label in dict.fromkeys(row.point.label for row in of):
        mine = [row.point for row in of if row.point.label == label and row.point.grown_bytes is not None]
        if mine:
            worst = max(mine, key=lambda point: point.grown_bytes or 0)
            engine = max((point.engine_bytes or 0 for point in mine), default=0)
            line = (
                f"{label}: at most {format_bytes(max(worst.grown_bytes or 0, 0))} resident a rank beyond the tensors"
                f" ({worst.ranks} ranks, {format_bytes(worst.nbytes)})"
            )
            lines.append(line + (f"; the engine itself reports {format_bytes(engine)}" if engine else ""))
    return lines


def to_json(
    of: Sequence[Row], series: Sequence[Series], settings: Settings, hosts: int, link: LinkSpec | None
) -> dict[str, Any]:
    """One run: its configuration, what it does not show, and every sample."""
    return {
        "config": vars(settings) | {"hosts": hosts, "link": link.to_dict() if link else None},
        "series": [vars(each) for each in series],
        "does_not_show": does_not_show(link),
        "points": [row.to_dict() for row in of],
    }


def write_json(path: str, machine: dict[str, Any], runs: Sequence[dict[str, Any]], **more: Any) -> None:
    """Everything that a published number must name: hardware, kernel, versions and date, then the runs."""
    Path(path).write_text(
        json.dumps({"format": "penstock-bench/1", **machine, **more, "runs": list(runs)}, indent=1) + "\n"
    )


def does_not_show(link: LinkSpec | None) -> str:
    """The limits of figures from one machine, or from a testbed on it."""
    return DOES_NOT_SHOW_TESTBED if link else DOES_NOT_SHOW_LOOPBACK


def plot(path: str, of: Sequence[Row], series: Sequence[Series], link: LinkSpec | None, title: str) -> None:
    """busbw (barrier: time) over size, a panel for each number of ranks, the limits dashed.

    The suffix of ``path`` is the format.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    by_label = {each.label: each for each in series}
    counts = sorted({row.point.ranks for row in of})
    figure, axes = pyplot.subplots(
        1, len(counts), figsize=(1.5 + 4.5 * len(counts), 4.2), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, ranks in zip(axes[0], counts, strict=True):
        mine = [row for row in of if row.point.ranks == ranks]
        for each in series:
            if each.is_backend:
                curve = [(row.point.nbytes, _height(row)) for row in mine if row.point.label == each.label]
                axis.plot(*zip(*curve, strict=True), marker="o", label=each.label)
        for role, style in (("sockets", "--"), ("copy", "-.")):
            best: dict[int, float] = {}
            for row in mine:
                if by_label[row.point.label].role == role:
                    best[row.point.nbytes] = max(best.get(row.point.nbytes, 0.0), _height(row))
            if best:
                axis.plot(best.keys(), best.values(), style, color="0.4", linewidth=1.2, label=f"limit: {role}")
        payload = link.payload_mbit if link else None
        if payload:
            axis.axhline(payload / 8000, color="black", linewidth=0.8, linestyle=":", label="the link's payload rate")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        sizes = sorted({row.point.nbytes for row in of if row.point.ranks == ranks})
        axis.set_xticks(sizes, [format_bytes(nbytes) for nbytes in sizes], rotation=60, fontsize=8)
        axis.minorticks_off()
        axis.grid(True, alpha=0.3)
        axis.set_title(f"{ranks} ranks")
        axis.set_xlabel("size")
    axes[0][0].set_ylabel("busbw, GB/s" if any(row.busbw for row in of) else "time, µs")
    axes[0][-1].legend(fontsize=8)
    figure.suptitle(title)
    figure.savefig(path)
    pyplot.close(figure)


def _height(row: Row) -> float:
    """busbw, or, of a barrier, microseconds."""
    return row.busbw or row.median_s * 1e6


def format_seconds(seconds: float) -> str:
    """Three digits and a unit."""
    if seconds >= 0.9995:
        return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:.0f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 0.9995e-3 else f"{seconds * 1e6:.3g} µs"


def _table(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


DOES_NOT_SHOW_LOOPBACK = (
    "One machine: the ranks share its processors and memory, so these figures show what the software costs, not what a"
    " network does. Nothing is computed meanwhile. Other processes of the machine are in the figures; ratios within the"
    " run are what to compare."
)

DOES_NOT_SHOW_TESTBED = (
    "Emulated hosts on one machine: the link's rate, caps, delay and loss are the kernel's and the testbed's, with no"
    " other traffic, no switch of a real make and no network card's offloads. All hosts share the machine's processors:"
    " read the CPU share beside each figure. Nothing is computed meanwhile."
)
