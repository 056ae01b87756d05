"""What a run of a collective says: rows, tables, JSON, the chart and the report. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from penstock.numbers import duration, plural, share, size, times
from penstock.reports import (
    Axis,
    Bar,
    Bars,
    Column,
    Curve,
    Level,
    Line,
    Lines,
    Next,
    Page,
    Panel,
    Part,
    Picture,
    Section,
    Table,
    aside,
)
from penstock.reports import series as series_look
from penstock.reports.charts import Look
from penstock.tools.bench import machine
from penstock.tools.bench.collectives import COLLECTIVES
from penstock.tools.bench.session import Point, Series, Settings
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


@dataclass(frozen=True)
class Outcome:
    """A finished run."""

    title: str
    settings: Settings
    series: Sequence[Series]
    rows: Sequence[Row]
    hosts: int
    link: LinkSpec | None


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
    """One line a series and size; the best backend of a size stands out."""
    on_testbed = any(row.point.planned for row in of)
    has_bytes = any(row.busbw for row in of)
    has_jobs = any(len(row.job_shares) > 1 for row in of)
    columns = [
        Column("series", is_text=True),
        Column("median"),
        Column("min"),
        Column("p90", meaning="nine of ten operations took no longer"),
    ]
    if has_bytes:
        columns += [
            Column("algbw\nGB/s", meaning="size over median, GB = 1e9 bytes"),
            Column(
                "busbw\nGB/s",
                meaning="what the busiest rank sends or receives a second: it compares with a link's rate",
            ),
            Column("of\nlimit", meaning="the limit's median over this one; the limit is the fastest probe of its kind"),
        ]
        if has_jobs:
            columns += [
                Column("median\njob", meaning="of limit, in the median of all fresh jobs"),
                Column("worst\njob", meaning="of limit, in the worst of all fresh jobs"),
            ]
    if on_testbed:
        columns += [
            Column("of\nlink", meaning="payload that the plan has a host send, over what TCP can carry on its link"),
            Column("wire/\nplan", meaning="bytes that a host's interface sent, over that payload"),
        ]
    columns += [
        Column("vs\ngloo", meaning="gloo's median over this one: above 1 is faster"),
        Column("CPU", meaning="of all processors of the machine, while the operations ran"),
    ]
    backends = {each.label for each in series if each.is_backend}
    lines = []
    for row in of:
        point = row.point
        rivals = [
            other
            for other in of
            if (other.point.ranks, other.point.nbytes) == (point.ranks, point.nbytes) and other.point.label in backends
        ]
        is_best = len(rivals) > 1 and row.median_s == min(other.median_s for other in rivals)
        cells = [point.label, duration(row.median_s), duration(row.min_s), duration(row.p90_s)]
        if has_bytes:
            cells += [gigabytes(row.algbw), gigabytes(row.busbw), _share(row.limit_share)]
            if has_jobs:
                shares = row.job_shares
                cells += [_share(statistics.median(shares) if shares else None), _share(min(shares, default=None))]
        if on_testbed:
            cells += [
                _share(row.link_share),
                f"{row.wire_ratio:.3f}" if row.wire_ratio and point.label in backends else "",
            ]
        cells += [
            times(row.times_gloo) if row.times_gloo and point.label in backends - {"gloo"} else "",
            _share(point.cpu_share),
        ]
        group = (str(point.ranks), size(point.nbytes) if has_bytes else "-")
        kind: Literal["best", "plain", "aside"] = "best" if is_best else "plain"
        lines.append(Line(cells, group, kind if point.label in backends else "aside"))
    return Table(title, columns, lines, [Column("ranks"), Column("size")])


def flow_table(of: Sequence[Row]) -> Table | None:
    """Testbed with capped flows: where connections fell each time that a group was formed, at its largest size; None
    elsewhere. Host 0 stands for all: the two ends of a connection are in the same class."""
    largest = {(row.point.ranks, row.point.label): row.point for row in of if row.point.class_flows}
    if not largest:
        return None
    found: dict[tuple[str, str, str, str], None] = {}
    for (ranks, label), point in largest.items():
        for flows, shares in zip(point.class_flows, point.class_shares, strict=True):
            counted = " ".join(f"{index}x{count}" for index, count in enumerate(flows[0]) if count)
            carried = [str(index) for index, share in enumerate(shares[0]) if share > 0.01]
            found[str(ranks), label, counted, f"{len(carried)} of {len(shares[0])}: {' '.join(carried)}"] = None
    heads = ("series", "connections: class x count", "classes with over 1 % of the bytes")
    columns = [Column(head, is_text=True) for head in heads]
    return Table("Flows by class", columns, [Line(line[1:], line[:1]) for line in found], [Column("ranks")])


def memory_lines(of: Sequence[Row]) -> list[str]:
    """What each backend held beyond the user's tensors, at most."""
    lines = []
    for label in dict.fromkeys(row.point.label for row in of):
        mine = [row.point for row in of if row.point.label == label and row.point.grown_bytes is not None]
        if mine:
            worst = max(mine, key=lambda point: point.grown_bytes or 0)
            engine = max((point.engine_bytes or 0 for point in mine), default=0)
            line = (
                f"{label}: at most {size(max(worst.grown_bytes or 0, 0))} resident a rank beyond the tensors"
                f" ({worst.ranks} ranks, {size(worst.nbytes)})"
            )
            lines.append(line + (f"; the engine itself reports {size(engine)}" if engine else ""))
    return lines


def to_json(outcome: Outcome) -> dict[str, Any]:
    """One run: its configuration, what it does not show, and every sample."""
    link = outcome.link
    return {
        "config": vars(outcome.settings) | {"hosts": outcome.hosts, "link": link.to_dict() if link else None},
        "series": [vars(each) for each in outcome.series],
        "does_not_show": does_not_show(link),
        "points": [row.to_dict() for row in outcome.rows],
    }


def does_not_show(link: LinkSpec | None) -> str:
    """The limits of figures from one machine, or from a testbed on it."""
    return DOES_NOT_SHOW_TESTBED if link else DOES_NOT_SHOW_LOOPBACK


# The page


def page(outcome: Outcome, description: dict[str, Any], skipped: Mapping[str, str]) -> Page:
    """The report of a run."""
    flows = flow_table(outcome.rows)
    settings = outcome.settings
    return Page(
        kind="Penstock bench",
        answer=answer(outcome),
        picture=picture(outcome),
        next=next_step(outcome),
        setting=f"{outcome.title}. All backends take turns in one run, and every result is checked.",
        sections=[
            *(Section("By number of ranks", [each]) for each in all_pictures(outcome)),
            Section("In numbers", [table(outcome.rows, outcome.series, outcome.title), *memory_lines(outcome.rows)]),
            *([Section(flows.title, [flows])] if flows else []),
            Section("What this does not show", [does_not_show(outcome.link)]),
            Section(
                "Conditions",
                [
                    [
                        *machine.lines(description),
                        f"Run: {plural(settings.joins, 'job')}, in each {plural(settings.rounds, 'turn')} of each backend at "
                        f"each size, of up to {settings.turn_s:g} s",
                        *(f"Left out: {name}, because {reason}" for name, reason in skipped.items()),
                    ]
                ],
            ),
        ],
    )


def featured(outcome: Outcome) -> Row:
    """What the answer speaks of: with the most ranks, at the largest size, the fastest backend, of Penstock's if there is one."""
    roles = {each.label: each.role for each in outcome.series}
    largest = _backends(outcome, max(_counts(outcome)))
    ours = [row for row in largest if roles[row.point.label].endswith(":penstock")]
    return min(ours or largest, key=lambda row: row.median_s)


def answer(outcome: Outcome) -> str:
    row = featured(outcome)
    point = row.point
    what = f"{_at(point)}: {point.label}"
    bound = f"{share(row.limit_share)} of the limit" if row.limit_share is not None else ""
    if row.times_gloo and point.label != "gloo":
        return f"{what} is {times(row.times_gloo)} as fast as gloo" + (f", at {bound}" if bound else "")
    return f"{what} reaches {bound}" if bound else f"{what} takes {duration(row.median_s)}"


def next_step(outcome: Outcome) -> Next:
    row, name = featured(outcome), outcome.settings.collective
    if outcome.link is None:
        sizes = "" if name == "barrier" else " --sizes 64M"
        return Next(
            "Measure over a link: as root, on emulated hosts with caps for single flows.",
            f"sudo penstock bench {name} --hosts 2 --rate 1000 --flow 200{sizes}",
        )
    if row.limit_share is not None and row.limit_share < WELL_USED and row.point.label == "penstock-tcp":
        link = f"--hosts {outcome.hosts} --rate {outcome.link.rate_mbit:g}"
        return Next(
            "See whether more streams fill the link.",
            f"sudo penstock bench {name} {link} --variant 32-streams=penstock-tcp,PENSTOCK_STREAMS=32",
        )
    return Next("See what this is worth in training.", "sudo penstock bench training char-gpt")


def picture(outcome: Outcome) -> Picture:
    """busbw over size, or, of a single size or a barrier, the time that it takes: with as many ranks as the answer speaks of."""
    point = featured(outcome).point
    beside = [row for row in _largest(outcome, point.ranks) if row.point.label in _shown(outcome)]
    if len(outcome.settings.sizes) > 1:
        told = ", ".join(f"{_called(outcome, row)} {gigabytes(row.busbw)} GB/s" for row in beside)
        how = (
            "Higher is better. busbw is what the busiest rank sends or receives a second. Grey dashes are limits: the best "
            "that raw sockets or copies in memory reach here. Both axes are logarithmic."
        )
    else:
        told = ", ".join(f"{_called(outcome, row)} {duration(row.median_s)}" for row in beside)
        how = (
            "Shorter is better. Bars are medians; the thin line reaches from the fastest operation to the slowest of nine "
            "tenths. Grey bars are limits and controls."
        )
    return Picture("answer", chart(outcome, [point.ranks]), f"{_at(point)}: {told}.", how)


def all_pictures(outcome: Outcome) -> list[Picture]:
    """The same for every number of ranks, where there are several."""
    counts = _counts(outcome)
    if len(counts) < 2:
        return []
    best = [min(_backends(outcome, count), key=lambda row: row.median_s) for count in counts]
    if len({row.point.label for row in best}) == 1:
        see = f"{best[0].point.label} is the fastest backend at the largest size, whatever the number of ranks."
    else:
        told = ", ".join(f"{row.point.label} with {row.point.ranks} ranks" for row in best)
        see = f"The fastest backend at the largest size: {told}."
    return [Picture("ranks", chart(outcome, counts), see, "Read it as the first picture.")]


def plot(outcome: Outcome, suffix: str) -> bytes:
    """The report's chart as a file of its own. Cost: a second, most of it matplotlib's import."""
    from penstock.reports import drawing

    return drawing.file(chart(outcome, _counts(outcome)), suffix, outcome.title)


def chart(outcome: Outcome, counts: Sequence[int]) -> Bars | Lines:
    """With these numbers of ranks."""
    return _over_sizes(outcome, counts) if len(outcome.settings.sizes) > 1 else _of_one_size(outcome, counts)


def _over_sizes(outcome: Outcome, counts: Sequence[int]) -> Lines:
    by_label = {each.label: each for each in outcome.series}
    x = Axis("size of the vector", is_log=True, ticks=sorted(outcome.settings.sizes), text=size)
    y = Axis("busbw", "GB/s", is_log=True)
    payload = outcome.link.payload_mbit if outcome.link else None
    levels = [Level(payload / 8000, "what TCP can carry on the link")] if payload else []
    panels = []
    for ranks in counts:
        mine = [row for row in outcome.rows if row.point.ranks == ranks]
        curves = []
        for index, role in enumerate(("sockets", "copy")):
            best: dict[int, float] = {}
            for row in mine:
                if by_label[row.point.label].role == role:
                    best[row.point.nbytes] = max(best.get(row.point.nbytes, 0.0), row.busbw)
            if best:
                curves.append(Curve(f"limit: {role}", list(best), list(best.values()), aside(index), width_px=1.5))
        for label, look in _looks(outcome).items():
            found = [(row.point.nbytes, row.busbw) for row in mine if row.point.label == label]
            curves.append(Curve(label, [nbytes for nbytes, _ in found], [busbw for _, busbw in found], look))
        panels.append(Panel(f"{ranks} ranks", x, y, curves, levels))
    return Lines(panels)


def _of_one_size(outcome: Outcome, counts: Sequence[int]) -> Bars:
    scale, unit = scale_of(max(row.p90_s for row in outcome.rows))
    looks = _looks(outcome)
    bars = []
    for ranks in counts:
        heading = f"{ranks} ranks" if len(counts) > 1 else ""
        for row in outcome.rows:
            if row.point.ranks == ranks:
                label = row.point.label
                part = Part(scale * row.median_s, looks[label].colour if label in looks else "grey-2")
                told = duration(row.median_s) + (f", {gigabytes(row.busbw)} GB/s" if row.busbw else "")
                spread = (scale * row.min_s, scale * row.p90_s)
                bars.append(Bar(label, [part], told, heading=heading, spread=spread))
                heading = ""
    return Bars(Axis("time of one operation", unit), bars)


def scale_of(seconds: float) -> tuple[float, str]:
    """By what seconds are multiplied, and the unit that then fits."""
    for scale, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * scale >= 1:
            return scale, unit
    return 1e6, "µs"


def gigabytes(per_second: float) -> str:
    """A bandwidth in GB/s."""
    return f"{per_second:.3g}"


def _at(point: Point) -> str:
    has_bytes = COLLECTIVES[point.collective].bus_factor(point.ranks) > 0
    of = f" of {size(point.nbytes)}" if has_bytes else ""
    return f"{point.collective}{of}, {point.ranks} ranks"


def _backends(outcome: Outcome, ranks: int) -> list[Row]:
    """The rows of backends at the largest size."""
    labels = {each.label for each in outcome.series if each.is_backend}
    return [row for row in _largest(outcome, ranks) if row.point.label in labels]


def _largest(outcome: Outcome, ranks: int) -> list[Row]:
    """The rows at the largest size."""
    nbytes = max(row.point.nbytes for row in outcome.rows if row.point.ranks == ranks)
    return [row for row in outcome.rows if (row.point.nbytes, row.point.ranks) == (nbytes, ranks)]


def _shown(outcome: Outcome) -> set[str]:
    """What a caption speaks of: the backend of the answer, gloo, and the limit."""
    row = featured(outcome)
    return {row.point.label, "gloo", row.limit or ""}


def _called(outcome: Outcome, row: Row) -> str:
    label = row.point.label
    return f"the limit ({label})" if label == featured(outcome).limit else label


def _looks(outcome: Outcome) -> dict[str, Look]:
    labels = [each.label for each in outcome.series if each.is_backend]
    return {label: series_look(index) for index, label in enumerate(labels)}


def _counts(outcome: Outcome) -> list[int]:
    return sorted({row.point.ranks for row in outcome.rows})


def _share(fraction: float | None) -> str:
    return "" if fraction is None else share(fraction)


WELL_USED = 0.8
"""Of the limit. Below it the report proposes more streams."""

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
