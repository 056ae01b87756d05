"""Draws step_time.svg, README's chart, from the figures of docs/benchmarks: `python docs/pictures/step_time.py`."""

import pathlib
import re

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

DOCS = pathlib.Path(__file__).resolve().parent.parent
NAMES = ("gloo", "Penstock", "Penstock with hook and tuner")
COLOURS = ("#8b949e", "#1f8fd6", "#12a594")
INK = "#010203"  # stands for the colour of text, which follows the reader's light or dark mode
STYLE = "<style>:root{--ink:#1f2328}@media (prefers-color-scheme:dark){:root{--ink:#e6edf3}}</style>"


def figures() -> tuple[int, ...]:
    """Milliseconds of a step of the demo: with gloo, with Penstock, with its hook and tuner."""
    page = (DOCS / "benchmarks" / "README.md").read_text(encoding="utf-8")
    found = re.search(r"gloo (\d+) ms a step, penstock\s+(\d+)[^,]*, hook and tuner (\d+)", page)
    assert found, "docs/benchmarks/README.md no longer says what a step of the demo takes"
    return tuple(map(int, found.groups()))


def draw() -> str:
    times = figures()
    plt.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "penstock", "font.family": "sans-serif", "font.size": 11}
    )
    figure, axes = plt.subplots(figsize=(7.2, 1.9), layout="constrained")
    bars = axes.barh(NAMES, times, color=COLOURS, height=0.62)
    labels = [f"{ms} ms" + (f"  ({times[0] / ms:.1f}x)" if ms != times[0] else "") for ms in times]
    axes.bar_label(bars, labels, padding=5, color=INK)
    axes.set_xlim(0, times[0] * 1.2)
    axes.invert_yaxis()
    title = "Step time of the demo: 2 hosts, a link of 1 Gbit/s, one flow at most 200 Mbit/s"
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=11)
    axes.tick_params(length=0, colors=INK)
    axes.xaxis.set_visible(False)
    axes.spines[:].set_visible(False)
    path = DOCS / "pictures" / "step_time.svg"
    figure.savefig(path, transparent=True, metadata={"Date": None})
    text = path.read_text(encoding="utf-8").replace(INK, "var(--ink)")
    text = re.sub(r"font-family: [^;\"]*", "font-family: sans-serif", text)  # the reader's own
    text = re.sub(r" *<metadata>.*?</metadata>\n", "", text, flags=re.DOTALL)
    return re.sub(r"(<svg [^>]*>)", rf"\1\n{STYLE}", text, count=1)


if __name__ == "__main__":
    (DOCS / "pictures" / "step_time.svg").write_text(draw(), encoding="utf-8")
