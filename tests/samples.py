"""Results as `penstock demo` and `penstock bench` have them, made up: for tests of what is concluded from them and shown."""

from __future__ import annotations

import dataclasses
import math

from penstock.tools.bench import report
from penstock.tools.bench.session import Point, Series, Settings
from penstock.tools.demo import comparison, prediction
from penstock.tools.demo.training import Phases, Step, Training, Way
from penstock.tools.testbed import CompletedRun, FlowClass, LinkSpec

ABOUT = {
    "date": "2026-01-01",
    "hardware": {"cpu": {"model": "a processor", "usable": 2}, "memory_bytes": 2**33},
    "system": {"kernel": "6.1", "congestion_control": "bbr", "load_average_at_start": 0.0},
    "versions": {"penstock": "0.1.0", "torch": "2.15.0", "python": "3.11"},
}

FACTS = {
    "gradient_bytes": 1_000_000,
    "parameters": 250_000,
    "torch": "2.15.0",
    "arguments": {"layers": 4, "width": 192, "heads": 6, "context": 64, "seed": 1337, "batch": 4, "threads": 1},
}


def trained(
    *,
    label: str = "it",
    losses: list[list[float]] | None = None,
    weights: list[str] | None = None,
    seconds: list[float] | None = None,
    compute_s: float = 0.5,
    sent_per_step: float = 1_000_000,
) -> Training:
    """A training of two ranks as `penstock.tools.demo.training.train` would return it; the gradient has 1 MB."""
    losses = losses or [[3.0], [3.0]]
    seconds = seconds or [1.0] * len(losses[0])
    compute = Phases(compute_s / 4, compute_s / 2, compute_s / 4)
    ends = [{"weights_sha256": digest, "validation_loss": 3.0} for digest in weights or ["same", "same"]]
    classes = [
        FlowClass(index=i, cap_mbit=200, bytes=n, packets=1, flows=1) for i, n in enumerate((10**6, 0, 10**6, 99))
    ]
    return Training(
        label=label,
        way=Way(label),
        ranks=2,
        facts=FACTS,
        steps=[
            [
                Step(i + 1, loss, 256, Phases(s / 4, s / 2, s / 4), compute)
                for i, (loss, s) in enumerate(zip(of, seconds, strict=True))
            ]
            for of in losses
        ],
        ends=ends,
        clock_s=[sum(seconds[: i + 1]) for i in range(len(seconds))],
        sent_bytes=[sent_per_step * (i + 1) for i in range(len(seconds))],
        completed=CompletedRun(
            returncode=0,
            failed_rank=None,
            returncodes={0: 0, 1: 0},
            outputs=["", ""],
            wall_s=sum(seconds),
            cpu_share=0.5,
            counters={},
            flows={0: classes, 1: classes},
        ),
    )


def tuned_comparison(
    tuned_s: float, *, tries: int = 60, chosen_s: float | None = 1.5, falls: bool = False
) -> comparison.Comparison:
    """Gloo at 6 s a step, Penstock at 2 s, and the tuner: 100 steps, of which ``tries`` are trials of 3 s.

    With ``falls`` the loss falls as a loss does; else it stays at 3.
    """
    link = LinkSpec(rate_mbit=1000, flow_mbit=200)
    default, other = ({"streams": 16, "bucket_bytes": size << 20} for size in (4, 2))
    losses = [1.8 + 2.4 * math.exp(-i / 25) + 0.05 * math.sin(7 * i) if falls else 3.0 for i in range(100)]
    trainings = []
    for way, step_s in (("gloo", 6.0), ("penstock", 2.0), ("penstock+tuner", tuned_s)):
        is_tuned = way == "penstock+tuner"
        seconds = [3.0] * tries + [step_s] * (100 - tries) if is_tuned else [step_s] * 100
        training = dataclasses.replace(trained(label=way, losses=[losses] * 2, seconds=seconds), way=Way.parse(way))
        if is_tuned:
            tried = [dataclasses.replace(step, tuning=step.number <= tries) for step in training.steps[0]]
            tuning = {"budget": 100, "default": default, "default_s": 1.75, "chosen_s": chosen_s}
            end = {**training.ends[0], "setting": default if chosen_s == 1.75 else other, "tuning": tuning}
            training = dataclasses.replace(training, steps=[tried, tried], ends=[end, end])
        trainings.append(training)
    # Where the processors do both, sending slows the computation that the prediction begins with.
    foreseen = [
        prediction.predict_step(Phases(0.125, 0.25, 0.125), [1_000_000], 2, rate, 1e-8) for rate in (2e5, 6e5, 7e5)
    ]
    results = tuple(comparison.summarise(*pair, link) for pair in zip(trainings, foreseen, strict=True))
    return comparison.Comparison(results, link, {}, ABOUT, (), quick=False)


SERIES = [
    Series("penstock-tcp", "torch:penstock", {"PENSTOCK_SHM": "0"}, limit="sockets"),
    Series("penstock-shm", "torch:penstock", {"PENSTOCK_SHM": "1"}, limit="copy"),
    Series("penstock-empty", "shared:penstock", {"PENSTOCK_SHM": "1"}, limit="copy"),
    Series("gloo", "torch:gloo", limit="sockets"),
    Series("sockets x8", "sockets", flows=8, split="pull", smallest=256 << 10),
    Series("copy", "copy", smallest=256 << 10),
]

SPEED = {  # seconds that an operation takes at least, bytes a second beyond that
    "penstock-tcp": (90e-6, 1.1e9),
    "penstock-shm": (40e-6, 3.2e9),
    "penstock-empty": (30e-6, 5.1e9),
    "gloo": (80e-6, 0.9e9),
    "sockets x8": (60e-6, 1.3e9),
    "copy": (10e-6, 6.5e9),
}


def bench_outcome(
    sizes: list[int], ranks: list[int], *, link: LinkSpec | None = None, collective: str = "all-reduce"
) -> report.Outcome:
    """A run of all backends; on a link, of those that can use it."""
    series = [each for each in SERIES if link is None or each.limit == "sockets" or each.role == "sockets"]
    points = []
    for count in ranks:
        for nbytes in sizes:
            for each in series:
                if nbytes >= each.smallest:
                    least, rate = SPEED[each.label]
                    took = (least + nbytes / rate) * (count - 1)
                    point = Point(collective, each.label, count, nbytes, [took * (1 + i / 20) for i in range(5)])
                    point.cpu_share = 0.93
                    if link:
                        point.planned = dict.fromkeys(range(count), nbytes)
                        point.sent = dict.fromkeys(range(count), 1.05 * nbytes)
                    points.append(point)
    settings = Settings(collective, sizes, ranks)
    rows = report.rows(points, series, link)
    title = f"{collective}, float32, {f'2 hosts: {link.describe()}' if link else 'one host'}"
    return report.Outcome(title, settings, series, rows, 2 if link else 1, link)
