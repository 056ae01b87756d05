"""The comparison as a report: what its page says and draws. Pure; `penstock.reports` decides how it looks."""

from __future__ import annotations

from penstock import reports
from penstock.numbers import duration, milliseconds, plural, share, times
from penstock.profiling.breakdown import SYNC
from penstock.reports import Axis, Bar, Bars, Card, Curve, Key, Level, Lines, Next, Page, Panel, Part, Picture, Section
from penstock.tools.bench import machine
from penstock.tools.demo import division
from penstock.tools.demo.comparison import (
    Comparison,
    Result,
    payload_rate,
    shortfall_sentences,
    table,
    tuning_sentences,
    verdict,
)
from penstock.tools.demo.training import Phases


def page(comparison: Comparison) -> Page:
    return Page(
        kind="Penstock demo",
        answer=headline(comparison),
        picture=step_picture(comparison),
        next=next_step(comparison),
        setting=setting(comparison),
        problems=[f"Problem: {each}." for each in comparison.problems],
        cards=cards(comparison),
        sections=[
            Section(
                "The trainings differ" if comparison.disagreements else "The training is the same",
                [verdict(comparison), loss_picture(comparison)],
            ),
            Section("What the link carries", [link_picture(comparison)]),
            Section(
                "In numbers",
                [table(comparison), *tuning_sentences(comparison), *shortfall_sentences(comparison)],
            ),
            Section("What this does not show", [caveats(comparison)]),
            Section("Conditions", [conditions(comparison)]),
        ],
    )


# The first screen


def headline(comparison: Comparison) -> str:
    base, *others = comparison.results
    if comparison.problems:
        return "These figures are worthless: the trainings cannot be compared"
    if not others:
        return f"Training with {base.label}: {milliseconds(base.step_s)} a step"
    best = comparison.featured
    gain = comparison.speed_up(best)
    if gain <= 1:
        return f"The same training, no faster with {best.label} than with {base.label}: {times(gain)}"
    return f"The same training, {times(gain)} as fast with {best.label} as with {base.label}"


def next_step(comparison: Comparison) -> Next:
    base, *others = comparison.results
    way = comparison.featured.training.way
    if comparison.problems:
        return Next("Find out what is wrong with the network or the installation.", "penstock doctor")
    if comparison.quick:
        return Next("This was a quick check. Run the whole demo.", "penstock demo")
    if not others:
        return Next("Compare it with others.", f"penstock demo --backends {base.label},penstock,penstock+tuner")
    if way.backend != "penstock":
        return Next("Compare with Penstock. This run shows the noise of the machine.", "penstock demo")
    if comparison.link is None:
        return Next("Run it on emulated hosts with a link between them, which needs root.", "sudo penstock demo")
    if comparison.speed_up(comparison.featured) <= 1:
        return Next("See what this machine and its sockets can do at best.", "penstock bench all-reduce --hosts 2")
    hook = {"": "", "hook": "model", "tuner": "model, tune=True"}[way.front]
    lines = [
        'torch.distributed.init_process_group("penstock")',
        *([f"penstock.torch.ddp_hook({hook})"] if hook else []),
    ]
    return Next("Put this into your own script.", "\n".join(lines))


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


def cards(comparison: Comparison) -> list[Card]:
    base, *others = comparison.results
    best = comparison.featured
    found = []
    if others:
        foreseen = comparison.predicted_speed_up(best)
        note = (
            f"predicted {times(foreseen)}, before it ran"
            if foreseen
            else f"{milliseconds(best.step_s)} instead of {milliseconds(base.step_s)}"
        )
        found.append(Card(times(comparison.speed_up(best)), f"as fast a step, with {best.label}", note))
    if best.link_share is not None and base.link_share is not None:
        note = f"{base.label}: {share(base.link_share)}; averaged over whole steps"
        found.append(
            Card(
                share(best.link_share),
                f"of the link, with {best.label}",
                note if others else "averaged over whole steps",
            )
        )
    if others:
        same = not comparison.disagreements
        found.append(
            Card("bit-identical" if same else "different", "loss curves", "and final weights" if same else "see below")
        )
    found.append(Card(f"{best.validation_loss:.4f}", "validation loss", "nats a character; 4.17 is guessing"))
    return found


# What it draws


def step_picture(comparison: Comparison) -> Picture:
    results = comparison.results
    bars = []
    for result in results:
        parts, still = _parts(result)
        bars.append(Bar(result.label, parts, f"{milliseconds(result.step_s)}, {share(still)} still"))
        if foreseen := result.prediction:
            seconds = (*_phases(foreseen.compute), foreseen.exposed_s)
            expected = [Part(1e3 * each, colour) for each, (_, colour) in zip(seconds, COLOURS, strict=False)]
            bars.append(Bar("predicted", expected, milliseconds(foreseen.step_s), is_hollow=True))
    key = [Key(name, colour) for name, colour in COLOURS]
    base, best = results[0], comparison.featured
    see = " ".join(division.told(result) for result in ([base] if best is base else [base, best]))
    how = (
        "Grey is computation, timed in the same run with nothing sent, on both hosts at once; it is the mean of the ranks. Wire: "
        "bytes move and ranks stand still. Wait: a rank that has computed for less time stands still until the other is there."
    )
    if any(result.prediction for result in results):
        key.append(Key("predicted", WIRE, is_hollow=True))
        how += (
            " Outlines are predictions from the computation, the bytes and the rate of raw sockets on this link; nothing is "
            "fitted."
        )
    return Picture("step", Bars(Axis("time of a step", "ms"), bars, key), see, how)


def _parts(result: Result) -> tuple[list[Part], float]:
    """Of the mean rank's step, and for which share of it ranks stand still."""
    shares = division.divided(result).shares
    moved = [each.communication[SYNC] for each in shares]
    times = [sum(each.work[phase] for each in shares) for phase in ("forward", "backward", "optimizer")]
    times += [sum(each.exposed_wire_ns for each in moved), sum(each.exposed_wait_ns for each in moved)]
    parts = [Part(time / 1e6 / len(shares), colour) for time, (_, colour) in zip(times, COLOURS, strict=True)]
    return parts, sum(times[3:]) / (sum(times) or 1.0)


def _phases(phases: Phases) -> tuple[float, float, float]:
    return phases.forward_s, phases.backward_s, phases.optimizer_s


def loss_picture(comparison: Comparison) -> Picture:
    by_step, by_time = [], []
    for i, result in enumerate(comparison.results):
        smooth = running_mean(result.training.losses(), SMOOTHING_STEPS)
        seconds = [each - result.training.clock_s[0] for each in result.training.clock_s]
        # Later curves are thin in the middle of the first one: where they agree, all show.
        width = 5.0 if i == 0 else 1.8
        look = reports.series(i)
        by_step.append(Curve(result.label, range(1, len(smooth) + 1), smooth, look, width_px=width))
        by_time.append(Curve(result.label, seconds, smooth, look, end=duration(seconds[-1])))
    loss = Axis("training loss", "nats")
    chart = Lines(
        [
            Panel("by step", Axis("trained for", "steps"), loss, by_step),
            Panel("by time", Axis("since the first step", "seconds"), loss, by_time),
        ]
    )
    ends = ", ".join(f"{curve.end} with {curve.label}" for curve in by_time)
    if comparison.disagreements:
        see = f"The trainings are not the same. They end after {ends}."
    elif len(by_time) == 1:
        see = f"The loss falls; the training ends after {ends}."
    else:
        see = f"By step the curves lie on each other; by time they end after {ends}."
    how = (
        f"The mean of both ranks and of the last {SMOOTHING_STEPS} steps. All trainings start from the same weights and read the "
        "same text in the same order; only how gradients are reduced differs."
    )
    return Picture("losses", chart, see, how)


def link_picture(comparison: Comparison) -> Picture:
    curves = []
    longest_s = max(result.training.clock_s[-1] - result.training.clock_s[0] for result in comparison.results)
    sample_s = max(LEAST_SAMPLE_S, longest_s / SAMPLES)
    for i, result in enumerate(comparison.results):
        seconds, rates = link_use(result, sample_s)
        curves.append(Curve(result.label, seconds, rates, reports.series(i), is_steps=True, width_px=1.6))
    levels = []
    payload = payload_rate(comparison.link)
    if comparison.link and payload:
        levels.append(Level(payload / 1e6, f"what TCP can carry: {payload / 1e6:.0f} MB/s"))
        cap = comparison.link.caps_mbit
        if cap and len(set(cap)) == 1:
            levels.append(Level(cap[0] / 8, f"cap of one flow: {cap[0] / 8:.0f} MB/s"))
    x = Axis("since the first step", "seconds", from_zero=True)
    y = Axis("sent by each rank", "MB/s", from_zero=True)
    base, best = comparison.results[0], comparison.featured
    if best.link_share is None or base.link_share is None:
        see = "On loopback there is no link to fill; a backend that uses shared memory sends nothing here."
    elif best is base:
        see = f"{base.label} fills {share(base.link_share)} of the link, averaged over whole steps."
    else:
        see = f"{best.label} fills {share(best.link_share)} of the link, {base.label} {share(base.link_share)}."
    how = (
        "By the counters of the interfaces, from step to step. Each step must send "
        f"{base.planned_bytes_per_step / 1e6:.2f} MB whatever the backend, so the areas under the curves are equal, but for what "
        "a backend sends twice: only height and length differ."
    )
    return Picture("link", Lines([Panel("", x, y, curves, levels)]), see, how)


def link_use(result: Result, sample_s: float) -> tuple[list[float], list[float]]:
    """Seconds since the first step and MB/s up to then, at least ``sample_s`` apart, so that single steps do not jitter."""
    clock_s, sent = result.training.clock_s, result.training.sent_bytes
    seconds, rates, last = [0.0], [0.0], 0
    for i in range(1, len(clock_s)):
        if clock_s[i] - clock_s[last] >= sample_s or i == len(clock_s) - 1:
            seconds.append(clock_s[i] - clock_s[0])
            rates.append((sent[i] - sent[last]) / (clock_s[i] - clock_s[last]) / 1e6)
            last = i
    rates[0] = rates[1]
    return seconds, rates


def running_mean(values: list[float], count: int) -> list[float]:
    """Each value averaged with those before it, ``count`` at most."""
    return [sum(values[max(0, i + 1 - count) : i + 1]) / min(i + 1, count) for i in range(len(values))]


# What it says below


def conditions(comparison: Comparison) -> list[str]:
    facts = comparison.results[0].training.facts
    arguments = facts["arguments"]
    found = [
        *machine.lines(comparison.machine),
        f"Cluster: {comparison.link.describe() if comparison.link else 'loopback'}, 2 hosts, 1 rank each",
        f"Model: {arguments['layers']} layers, width {arguments['width']}, {arguments['heads']} heads, "
        f"context {arguments['context']}; {facts['gradient_bytes'] / 1e6:.2f} MB of f32 gradients a step, "
        "in DDP's default buckets",
        f"Training: seed {arguments['seed']}, {arguments['batch']} sequences a rank and step, AdamW, "
        f"{plural(arguments['threads'], 'compute thread')} a rank",
    ]
    if comparison.rates:
        shown = ", ".join(
            f"{rate / 1e6:.1f} MB/s over {plural(flows, 'TCP flow')}" for flows, rate in comparison.rates.items()
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


WIRE = "series-1"
COLOURS = (("forward", "grey-1"), ("backward", "grey-2"), ("optimizer", "grey-3"), ("wire", WIRE), ("wait", "series-2"))
"""As in the reports of `penstock profile`."""

SMOOTHING_STEPS = 10
LEAST_SAMPLE_S, SAMPLES = 0.5, 60
"""Of the link: steps of a curve are this long at least, and the longest curve has so many at most."""
