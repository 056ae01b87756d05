"""The comparison as a page that stands alone: one HTML file, drawings inline, nothing fetched, light or dark."""

from __future__ import annotations

import html
import io
import os
import re
import string
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from penstock.tools.demo.comparison import (
    Comparison,
    Result,
    Row,
    milliseconds,
    payload_rate,
    rows,
    shortfall_sentences,
    tuning_sentences,
    verdict,
)
from penstock.tools.demo.training import Phases
from penstock.training.tune.tuner import write_whole


def write_report(comparison: Comparison, path: Path) -> None:
    """Write the page, whole or not at all. Cost: a second, most of it matplotlib's import.

    Raises: OSError; what was there is then unchanged.
    """
    write_whole(path, render(comparison))


def check_writable(path: Path) -> None:
    """Find out, before minutes are spent, whether `write_report` could write there. Leaves nothing but folders.

    Raises: OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path.parent) as file:
        os.posix_fallocate(file.fileno(), 0, ROOM_BYTES)


def render(comparison: Comparison) -> str:
    template = string.Template(TEMPLATE.read_text(encoding="utf-8"))
    results = comparison.results
    return template.substitute(
        title=html.escape(headline(comparison)),
        setting=html.escape(setting(comparison)),
        cards="\n".join(card(*each) for each in cards(comparison)),
        verdict=html.escape(verdict(comparison)),
        tuning="".join(
            f"<p>{html.escape(each)}</p>" for each in tuning_sentences(comparison) + shortfall_sentences(comparison)
        ),
        problems=html_list([f"Problem: {each}." for each in comparison.problems]) if comparison.problems else "",
        losses=svg("losses", lambda: draw_losses(results)),
        breakdown=svg("breakdown", lambda: draw_breakdown(results)),
        link=svg("link", lambda: draw_link(comparison)),
        link_caption=html.escape(link_caption(comparison)),
        table=html_table([result.label for result in results], rows(comparison)),
        conditions=html_list(conditions(comparison)),
        caveats=html_list(caveats(comparison)),
    )


# What it says


def headline(comparison: Comparison) -> str:
    base, *others = comparison.results
    if not others:
        return f"Training with {base.label}: {1e3 * base.step_s:.0f} ms a step"
    best = comparison.featured
    gain = comparison.speed_up(best)
    if gain <= 1:
        return f"The same training, no faster with {best.label} than with {base.label}: {gain:.2f} ×"
    return f"The same training, {gain:.2f} × as fast with {best.label} as with {base.label}"


def setting(comparison: Comparison) -> str:
    training = comparison.results[0].training
    where = (
        f"two emulated hosts (link: {comparison.link.describe()})"
        if comparison.link
        else "two ranks on one host, loopback"
    )
    quick = " A quick check with a small model: its figures mean nothing." if comparison.quick else ""
    return (
        f"A character GPT of {training.facts['parameters']:,} parameters, {len(training.steps[0])} steps on Tiny Shakespeare, "
        f"DistributedDataParallel over {where}.{quick}"
    )


def cards(comparison: Comparison) -> list[tuple[str, str, str]]:
    """Number, what it is, and what stands behind it."""
    base, *others = comparison.results
    best = comparison.featured
    found = []
    if others:
        foreseen = comparison.predicted_speed_up(best)
        note = (
            f"predicted {foreseen:.2f} ×, before it ran"
            if foreseen
            else f"{milliseconds(best.step_s)} instead of {milliseconds(base.step_s)}"
        )
        found.append((f"{comparison.speed_up(best):.2f} ×", f"as fast a step, with {best.label}", note))
    if best.link_share is not None and base.link_share is not None:
        note = (
            f"{base.label}: {base.link_share:.0%}; averaged over whole steps" if others else "averaged over whole steps"
        )
        found.append((f"{best.link_share:.0%}", f"of the link, with {best.label}", note))
    if others:
        same = not comparison.disagreements
        found.append(
            ("bit-identical" if same else "different", "loss curves", "and final weights" if same else "see below")
        )
    found.append((f"{best.validation_loss:.4f}", "validation loss", "nats a character; 4.17 is guessing"))
    return found


def link_caption(comparison: Comparison) -> str:
    planned = comparison.results[0].planned_bytes_per_step / 1e6
    text = (
        "What each rank puts on its link, from step to step, by the counters of the interface. Each step must send "
        f"{planned:.1f} MB whatever the backend, so the areas under the curves are equal, but for what a backend sends "
        "twice: only height and length differ."
    )
    if comparison.link is None:
        return text + " On loopback there is no link to fill; a backend that uses shared memory sends nothing here."
    return text


def conditions(comparison: Comparison) -> list[str]:
    about, facts = comparison.machine, comparison.results[0].training.facts
    arguments, cpu = facts["arguments"], about["hardware"]["cpu"]
    found = [
        f"Date: {about['date']}",
        f"Machine: {cpu['model']}, {cpu['usable']} cores, {about['hardware']['memory_bytes'] / 2**30:.0f} GiB; "
        f"load average {about['system']['load_average_at_start']:.1f} at the start",
        f"System: Linux {about['system']['kernel']}, TCP congestion control {about['system']['congestion_control']}",
        f"Versions: penstock {about['versions']['penstock'] or '(not installed)'}, torch {facts['torch']}, "
        f"Python {about['versions']['python']}",
        f"Cluster: {comparison.link.describe() if comparison.link else 'loopback'}, 2 hosts, 1 rank each",
        f"Model: {arguments['layers']} layers, width {arguments['width']}, {arguments['heads']} heads, "
        f"context {arguments['context']}; {facts['gradient_bytes'] / 1e6:.2f} MB of f32 gradients a step, "
        "in DDP's default buckets",
        f"Training: seed {arguments['seed']}, {arguments['batch']} sequences a rank and step, AdamW, "
        f"{arguments['threads']} compute thread{'s'[: arguments['threads'] > 1]} a rank",
    ]
    if comparison.rates:
        shown = ", ".join(
            f"{rate / 1e6:.1f} MB/s over {flows} TCP flow{'s'[: flows > 1]}" for flows, rate in comparison.rates.items()
        )
        found.append(f"Raw sockets on this link, each way, both ways at once: {shown}")
    return found


def caveats(comparison: Comparison) -> list[str]:
    found = []
    if comparison.link:
        found.append(
            "The hosts are network namespaces of one machine. They share its processors; and real networks add distance, "
            "jitter and neighbours."
        )
        found.append(
            "The gain comes from the cap on each flow, and from a step that is mostly communication. On a link "
            "that one flow fills, or with much more computation to a byte, there is less to gain."
        )
    else:
        found.append(
            "This ran on loopback: there was no link that could be filled. The step times compare how much processor "
            "time the backends take, no more."
        )
    found += [
        "Two ranks only. With more, the order of a sum may differ between backends, and curves agree closely but not to "
        "the bit.",
        f"{len(comparison.results[0].training.steps[0])} steps show that training works, not how good the model can become.",
        "One run of each, on a machine that may have had other work. Medians over steps hide pauses; run it again to see "
        "how far the figures move.",
    ]
    return found


def card(number: str, what: str, note: str) -> str:
    number, what, note = html.escape(number), html.escape(what), html.escape(note)
    return f'<div class="card"><b>{number}</b><span>{what}</span><small>{note}</small></div>'


def html_table(names: list[str], table: list[Row]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    lines = [f"<tr><th></th>{head}<th></th></tr>"]
    for row in table:
        indent = ' class="part"' if row.name.startswith(" ") else ""
        cells = "".join(f"<td>{html.escape(text)}</td>" for text in row.texts)
        lines.append(
            f"<tr><th{indent}>{html.escape(row.name.strip())}</th>{cells}<td class=meaning>{html.escape(row.meaning)}</td></tr>"
        )
    return "<table>" + "\n".join(lines) + "</table>"


def html_list(lines: list[str]) -> str:
    return "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in lines) + "</ul>"


# What it draws


def draw_losses(results: tuple[Result, ...]) -> Figure:
    figure = Figure(figsize=(9, 3.1), layout="constrained")
    by_step, by_time = figure.subplots(1, 2, sharey=True)
    for i, result in enumerate(results):
        smooth = running_mean(result.training.losses(), SMOOTHING_STEPS)
        steps = range(1, len(smooth) + 1)
        seconds = [each - result.training.clock_s[0] for each in result.training.clock_s]
        # The later curve is thin and light in the middle of the earlier one: where they agree, both show.
        width = 5 - 3.4 * min(i, 1)
        for axes, where in ((by_step, steps), (by_time, seconds)):
            axes.plot(
                where,
                smooth,
                color=colour(i),
                linewidth=width if axes is by_step else 2,
                label=result.label,
                solid_capstyle="round",
            )
        by_time.plot(seconds[-1], smooth[-1], "o", color=colour(i), markersize=5)
        by_time.annotate(
            f"{seconds[-1]:.0f} s",
            (seconds[-1], smooth[-1]),
            # One below the other: trainings may end together.
            xytext=(0, -8 - 11 * i),
            textcoords="offset points",
            ha="center",
            va="top",
            color=colour(i),
        )
    by_step.set(xlabel="step", ylabel="training loss, nats")
    by_step.set_title("by step: one curve over the other")
    by_time.set(xlabel="seconds since the first step")
    by_time.set_title("by time: where they part")
    by_time.margins(x=0.08)
    low, high = by_step.get_ylim()
    by_step.set_ylim(bottom=low - (high - low) * 0.07 * len(results))  # room for the seconds below the ends
    by_step.legend()
    return figure


def draw_breakdown(results: tuple[Result, ...]) -> Figure:
    bars: list[tuple[str, Phases, float, str, str, bool]] = []
    for i, result in enumerate(results):
        told = f"{milliseconds(result.step_s)}, {result.communication_share:.0%} communication"
        bars.append((result.label, result.compute, result.communication_s, told, colour(i), False))
        if result.prediction:
            told = milliseconds(result.prediction.step_s)
            bars.append(("predicted", result.prediction.compute, result.prediction.exposed_s, told, colour(i), True))
    figure = Figure(figsize=(9, 1.0 + 0.42 * len(bars)), layout="constrained")
    axes = figure.subplots()
    longest = max(phases.total_s + communication for _, phases, communication, _, _, _ in bars)
    for y, (_, phases, communication_s, told, backend_colour, predicted) in enumerate(bars):
        left = 0.0
        parts = [
            (phases.forward_s, GREYS[0]),
            (phases.backward_s, GREYS[1]),
            (phases.optimizer_s, GREYS[2]),
            (communication_s, backend_colour),
        ]
        for seconds, fill in parts:
            axes.barh(
                y,
                1e3 * seconds,
                left=1e3 * left,
                color=fill,
                height=0.4 if predicted else 0.72,
                alpha=0.55 if predicted else 1,
                linewidth=0,
            )
            left += seconds
        axes.annotate(
            told,
            (1e3 * left, y),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
        )
    axes.set_yticks(range(len(bars)), [name for name, *_ in bars])
    axes.invert_yaxis()
    axes.set_xlim(0, 1e3 * longest * 1.32)
    axes.set_xlabel("milliseconds of a step")
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0)
    names = ["forward", "backward", "optimizer"]
    handles = [Patch(color=grey) for grey in GREYS]
    figure.legend(handles, names, loc="outside upper right", ncols=3)
    return figure


def draw_link(comparison: Comparison) -> Figure:
    figure = Figure(figsize=(9, 2.9), layout="constrained")
    axes = figure.subplots()
    for i, result in enumerate(comparison.results):
        seconds, rates = link_use(result)
        axes.fill_between(seconds, rates, step="pre", color=colour(i), alpha=0.25, linewidth=0)
        axes.plot(seconds, rates, drawstyle="steps-pre", color=colour(i), linewidth=1.4, label=result.label)
    axes.set(xlabel="seconds since the first step", ylabel="MB/s sent by each rank")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    payload = payload_rate(comparison.link)
    if comparison.link and payload:
        draw_limit(axes, payload / 1e6, f"what TCP can carry: {payload / 1e6:.0f} MB/s")
        cap = comparison.link.caps_mbit
        if cap and len(set(cap)) == 1:
            draw_limit(axes, cap[0] / 8, f"cap of one flow: {cap[0] / 8:.0f} MB/s")
        axes.set_ylim(top=payload / 1e6 * 1.13)
    axes.legend(loc="center right")
    return figure


def draw_limit(axes: Axes, rate: float, text: str) -> None:
    axes.axhline(rate, color=INK, linewidth=0.8, linestyle=(0, (5, 4)))
    axes.annotate(
        text, (1, rate), xycoords=("axes fraction", "data"), xytext=(-4, 3), textcoords="offset points", ha="right"
    )


def link_use(result: Result) -> tuple[list[float], list[float]]:
    """Seconds since the first step and MB/s up to then, at least `SAMPLE_S` apart, so that single steps do not jitter."""
    clock_s, sent = result.training.clock_s, result.training.sent_bytes
    seconds, rates, last = [0.0], [0.0], 0
    for i in range(1, len(clock_s)):
        if clock_s[i] - clock_s[last] >= SAMPLE_S or i == len(clock_s) - 1:
            seconds.append(clock_s[i] - clock_s[0])
            rates.append((sent[i] - sent[last]) / (clock_s[i] - clock_s[last]) / 1e6)
            last = i
    rates[0] = rates[1]
    return seconds, rates


def running_mean(values: list[float], count: int) -> list[float]:
    """Each value averaged with those before it, ``count`` at most."""
    return [sum(values[max(0, i + 1 - count) : i + 1]) / min(i + 1, count) for i in range(len(values))]


def svg(name: str, draw: Callable[[], Figure]) -> str:
    """A drawing as markup for inside a page: text stays text, and what is drawn in `INK` takes the page's own colour."""
    style: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": name,  # Identifiers must differ between the drawings of one page, and not between two runs.
        "font.family": "DejaVu Sans",
        "font.size": 9.5,
        "axes.titlesize": 9.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.alpha": 0.18,
        "grid.linewidth": 0.7,
        "legend.frameon": False,
    }
    for part in ("text.", "axes.edge", "axes.label", "axes.title", "xtick.", "ytick.", "grid."):
        style[f"{part}color"] = INK
    with matplotlib.rc_context(style):
        buffer = io.StringIO()
        draw().savefig(
            buffer, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
        )
    markup = buffer.getvalue().replace(INK, "currentColor")
    markup = markup[markup.index("<svg") :]
    markup = re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', rf'<svg \1 role="img" aria-label="{name}">', markup, count=1)
    # matplotlib names every group; only what is referred to needs its name, and those names are salted.
    used = set(re.findall(r'(?:url\(|href=")#([^)"]+)', markup))
    return re.sub(r' id="([^"]*)"', lambda match: match[0] if match[1] in used else "", markup)


def colour(i: int) -> str:
    return COLOURS[i % len(COLOURS)]


TEMPLATE = Path(__file__).with_name("report.template.html")

INK = "#010203"
"""Stands for "the colour of the page's text" until `svg` replaces it."""

COLOURS = ("#e08a2e", "#2f86c9", "#4ca64c", "#b05fb0")
GREYS = ("#b9b9b9", "#8f8f8f", "#6c6c6c")
"""Of middle lightness: they stand out on white and on black."""

ROOM_BYTES = 1 << 20
"""A report has some 100 KiB."""

SMOOTHING_STEPS = 10
SAMPLE_S = 0.5
