"""The section *Utilisation* of the page: what the hosts' processors, memory, disks, streams and GPUs did over time. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from penstock.numbers import byte_rate, duration, plural, share, size
from penstock.profiling import usage
from penstock.profiling.breakdown import Breakdown
from penstock.profiling.record import Record
from penstock.profiling.usage import Group, Line
from penstock.reports import Axis, Curve, Lines, Panel, Picture, Table, series

__all__ = ["pictures"]


def pictures(breakdown: Breakdown, records: Sequence[Record]) -> list[str | list[str] | Picture | Table]:
    """A picture of each kind of resource that was recorded; what interfaces carry has a section of its own."""
    found = {group.what: group for group in usage.groups(records, breakdown, MOST_LINES)}
    if not found:
        return []
    first = min(line.points[0][0][0] for group in found.values() for line in group.lines)
    shown = ((drawing, [found[what] for what in drawing.told if what in found]) for drawing in DRAWINGS)
    return [_picture(drawing, there, first) for drawing, there in shown if there]


class Drawing(NamedTuple):
    """One picture: a panel for each of its groups that was recorded."""

    name: str
    told: dict[str, Callable[[Group], str]]
    """By `usage.Group.what`: what there is to see. Panels have the same lines, or as few in common as they have names."""
    how: str


class Scale(NamedTuple):
    """How a unit of `usage` is drawn."""

    name: str
    unit: float
    """In the unit of `usage`."""


def _picture(drawing: Drawing, shown: Sequence[Group], first_ns: int) -> Picture:
    # A line looks the same in all panels.
    looks = {
        label: series(at)
        for at, label in enumerate(dict.fromkeys(line.label for group in shown for line in group.lines))
    }
    panels = []
    for group in shown:
        scale = SCALES[group.unit]
        curves = [
            Curve(
                line.label,
                [(end - first_ns) / 1e9 for (_, end), _ in line.points],
                [value / scale.unit for _, value in line.points],
                looks[line.label],
                width_px=1.4,
            )
            for line in group.lines
        ]
        x, y = Axis("since the first reading", "seconds", from_zero=True), Axis(group.what, scale.name, from_zero=True)
        panels.append(Panel("", x, y, curves))
    told = "; ".join(drawing.told[group.what](group) for group in shown)
    how = " ".join([drawing.how, *_left_out(shown)])
    return Picture(drawing.name, Lines(panels), f"{told[:1].upper()}{told[1:]}.", how)


def _left_out(shown: Sequence[Group]) -> list[str]:
    """A sentence for each panel that does not show all, or one where that is the same of all panels."""
    texts = {
        group.what: f"{len(group.lines)} of {len(group.lines) + group.left_out} are shown, {group.order}."
        for group in shown
        if group.left_out
    }
    if len(texts) == len(shown) > 1 == len(set(texts.values())):
        return [f"Of each, {next(iter(texts.values()))}"]
    return [f"{what[:1].upper()}{what[1:]}: {text}" for what, text in texts.items()]


def _most(text: str, value: Callable[[float], str]) -> Callable[[Group], str]:
    def told(group: Group) -> str:
        line = _highest(group)
        return text.format(line=line.label, value=value(line.highest))

    return told


def _available(group: Group) -> str:
    line = min(group.lines, key=lambda line: line.lowest)
    return f"at least {size(line.lowest)} of memory are available on {line.host}"


def _sent_again(group: Group) -> str:
    line = max(group.lines, key=lambda line: sum(rate * (end - start) for (start, end), rate in line.points))
    count = sum(rate * (end - start) for (start, end), rate in line.points) / 1e9
    return f"{line.label} sends {plural(round(count), 'segment')} again"


def _highest(group: Group) -> Line:
    return max(group.lines, key=lambda line: line.highest)


MOST_LINES = 5
"""Of a panel. Of more than five colours some look alike to some people (`reports.charts`)."""
SCALES = {
    "processors": Scale("processors", 1),
    "bytes": Scale("MiB", 1 << 20),
    "bytes/s": Scale("MB/s", 1e6),
    "us": Scale("ms", 1e3),
    "segments/s": Scale("segments/s", 1),
    "share": Scale("%", 0.01),
}
DRAWINGS = (
    Drawing(
        "processors",
        {"processor time": _most("at most {value} processors are used by {line}", "{:.2g}".format)},
        "Of processes with all their threads: 1 is one processor that is always busy.",
    ),
    Drawing(
        "threads",
        {"processor time of threads": _most("the {line} takes {value} of a processor at most", share)},
        "A thread that takes a whole processor cannot go faster.",
    ),
    Drawing(
        "resident",
        {"memory of ranks": _most("{line} has {value} in memory at most", size)},
        "Resident memory, with what a rank shares with others.",
    ),
    Drawing(
        "free",
        {
            "memory available": _available,
            "/dev/shm used": _most("/dev/shm of {line} holds {value} at most", size),
        },
        "Of the whole host, all programs.",
    ),
    Drawing(
        "disks",
        {
            "read from disk": _most("{line} reads {value} from disk at most", byte_rate),
            "written to disk": _most("{line} writes {value} to disk at most", byte_rate),
        },
        "What reached a disk; what the system has in memory does not count. Disks are of all programs.",
    ),
    Drawing(
        "windows",
        {
            "round trip": _most("{line} has a round trip of {value} at most", lambda us: duration(us / 1e6)),
            "congestion window": _most("{line} has up to {value} on the way", size),
        },
        "As TCP knows them of each stream: a window over a round trip is the most that a stream carries.",
    ),
    Drawing(
        "deliveries",
        {
            "delivery rate": _most("{line} delivers {value} at most", byte_rate),
            "retransmissions": _sent_again,
        },
        "The kernel's estimate of what each stream delivers, and what it sends again.",
    ),
    Drawing(
        "gpus",
        {
            "GPU busy": _most("{line} is busy for {value} of the time at most", share),
            "GPU memory": _most("{line} has {value} in use at most", size),
        },
        "As NVIDIA's driver tells; busy is the time in which any kernel runs.",
    ),
)
