"""Draws step_time.svg, README's chart, from the figures of docs/benchmarks: `python docs/pictures/step_time.py`."""

import pathlib
import re

from penstock.reports import drawing
from penstock.reports.charts import Axis, Bar, Bars, Part

DOCS = pathlib.Path(__file__).resolve().parent.parent
LOOKS = {"gloo": "grey-2", "Penstock": "series-1", "Penstock with hook and tuner": "series-3"}
AXIS = Axis("time of a step of the demo (2 hosts, a link of 1 Gbit/s, one flow at most 200 Mbit/s)", "ms")


def figures() -> tuple[int, ...]:
    """Milliseconds of a step of the demo: with gloo, with Penstock, with its hook and tuner."""
    page = (DOCS / "benchmarks" / "README.md").read_text(encoding="utf-8")
    found = re.search(r"gloo (\d+) ms a step[^,]*, penstock\s+(\d+)[^,]*, hook and tuner (\d+)", page)
    assert found, "docs/benchmarks/README.md no longer says what a step of the demo takes"
    return tuple(map(int, found.groups()))


def draw() -> str:
    times = figures()
    told = [f"{ms} ms" + (f"  ({times[0] / ms:.1f} ×)" if ms != times[0] else "") for ms in times]
    bars = [
        Bar(name, [Part(ms, colour)], text) for (name, colour), ms, text in zip(LOOKS.items(), times, told, strict=True)
    ]
    label = "Step time of the demo: " + ", ".join(f"{bar.label} {ms} ms" for bar, ms in zip(bars, times, strict=True))
    return drawing.picture(Bars(AXIS, bars), label)


if __name__ == "__main__":
    (DOCS / "pictures" / "step_time.svg").write_text(draw(), encoding="utf-8")
