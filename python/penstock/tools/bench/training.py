"""``penstock bench training``: steps of a model under DDP, with gradient hooks, and with gloo, beside what they could be.

The bound of a step (docs/design/gradients.md): a gradient cannot travel before it is made, nor faster than the link. With
communication off, gradient ``k`` is made ``t(k)`` seconds after the start of the step; it and all that are made later then
have to pass the link. So no step ends before the largest of ``t(k) + bytes from k on / link``, and its optimizer comes after.

That takes the link's nominal rate and knows no processors. The same run therefore also measures what raw sockets take for the
bytes, alone and beside a step that computes. That is a reference, not a bound: sockets may use the link worse than a way does,
and a way that halves its bytes is held against all of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click

from penstock.numbers import milliseconds, plural, share, times
from penstock.reports import (
    Axis,
    Bar,
    Bars,
    Column,
    Curve,
    Line,
    Lines,
    Next,
    Page,
    Panel,
    Part,
    Picture,
    Section,
    Table,
    series,
)
from penstock.runtime.wire import sent_bytes
from penstock.tools.bench import machine
from penstock.tools.bench.options import (
    EVERYTHING,
    MOST_RANKS,
    bucket_option,
    check_files,
    check_link_is_there,
    files,
    parse_flow,
    parse_size,
)
from penstock.tools.bench.output import reporting_errors, result_console, say, write_json, write_report
from penstock.tools.bench.program import run_program
from penstock.tools.bench.report import does_not_show, quantile
from penstock.tools.testbed.bed import Loopback
from penstock.tools.testbed.cluster import Testbed
from penstock.tools.testbed.link import LinkSpec

Bed = Testbed | Loopback


WAYS = ("ddp", "hook", "reducer", "deferred", "gloo")
"""What runs when --ways names none: DDP over Penstock as it is, DDP with `penstock.torch.ddp_hook`, a model without DDP under
`penstock.torch.GradientReducer`, the same with the optimizer's steps deferred (``optimizer=``), DDP over gloo."""

KNOWN = (
    *WAYS,
    *(
        f"{way}-{wire}{feedback}"
        for way in ("hook", "reducer", "deferred")
        for wire in ("float16", "bfloat16")
        for feedback in ("", "-feedback")
    ),
)
"""All that --ways takes: with a dtype half the bytes are sent, with feedback what rounding takes off is kept."""


@click.command()
@click.argument("model", type=click.Choice(["char-gpt", "cnn"]))
@click.option("--ways", default=",".join(WAYS), show_default=True, help="Also hook-float16 and the like.")
@click.option("--ranks", type=click.IntRange(1, MOST_RANKS), default=4, show_default=True)
@click.option("--hosts", type=click.IntRange(1, 64), default=2, show_default=True, help="More than one needs root.")
@click.option("--rate", type=float, default=1000.0, show_default=True, help="Testbed: Mbit/s of a link.")
@click.option("--flow", default="200", show_default=True, help="Testbed: Mbit/s that one flow gets at most.")
@click.option("--delay", type=float, default=0.0, help="Testbed: milliseconds from host to host, one way.")
@click.option("--batch", type=click.IntRange(1), default=2, show_default=True, help="Samples a rank and step.")
@bucket_option("What one all-reduce of the hooks carries.")
@click.option("--turns", type=click.IntRange(1), default=6, show_default=True, help="Turns of each way.")
@click.option("--steps", type=click.IntRange(1), default=5, show_default=True, help="Steps in a turn.")
@click.option(
    "--losses",
    type=click.IntRange(1),
    metavar="STEPS",
    help="Instead of times: train char-gpt on the demo's text for STEPS steps and compare final losses.",
)
@click.option("--timeout", type=float, default=300.0, show_default=True, help="Seconds for all of it.")
@files(EVERYTHING)
def command(
    model: str,
    ways: str,
    ranks: int,
    hosts: int,
    rate: float,
    flow: str,
    delay: float,
    batch: int,
    bucket: str,
    turns: int,
    steps: int,
    losses: int | None,
    timeout: float,
    json_path: str | None,
    report_path: str | None,
) -> None:
    """Measure training steps: DDP, gradient hooks and gloo beside what the link allows.

    All ways train the same model on the same data by turns, in one run. See docs/design/gradients.md for the bound, and
    docs/guide/compression.md for ways that send fewer bytes:

    \b
    penstock bench training char-gpt --ways hook,hook-float16 --ranks 2 --rate 25 --flow 25 --batch 1
    penstock bench training char-gpt --ways hook,hook-float16 --ranks 2 --hosts 1 --losses 200
    """
    check_files(json_path=json_path, report_path=report_path)
    names = ways.split(",")
    if unknown := [name for name in names if name not in KNOWN]:
        raise click.UsageError(f"no way {', '.join(unknown)}: there are {', '.join(sorted(KNOWN))}")
    if losses is not None and model != "char-gpt":
        raise click.UsageError("--losses trains char-gpt: the cnn has no data here to learn from")
    check_link_is_there(hosts > 1, "--hosts 2")
    link = LinkSpec(rate_mbit=rate, flow_mbit=parse_flow(flow), delay_ms=delay) if hosts > 1 else None
    common: dict[str, Any] = {
        "ways": names,
        "ranks": ranks,
        "batch": batch,
        "bucket_bytes": parse_size(bucket),
        "timeout_s": timeout,
    }
    with reporting_errors():
        say(f"training {model} on {link.describe() if link else 'one host'} ...")
        description = machine.describe()
        outcome: Outcome | Lesson
        with Testbed(hosts=hosts, link=link) if hosts > 1 else Loopback(hosts=1) as bed:
            if losses is not None:
                outcome = learn(bed, steps=losses, **common)
            else:
                outcome = measure(bed, model=model, turns=turns, steps=steps, **common)
        result_console().print(outcome.table().for_terminal())
        write_json(json_path, description, [outcome.to_dict()])
        write_report(report_path, lambda: outcome.page(link, description))


@dataclass(frozen=True)
class Way:
    """How one way of training did. Seconds are of the slowest rank: a median over its steps."""

    name: str
    step_s: float
    samples: list[float]
    stats: dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """A finished run."""

    model: str
    ranks: int
    hosts: int
    gradients: int
    gradient_bytes: int
    bound_s: float | None
    """None without a link, whose rate would bound it."""
    compute_s: float
    link_s: float | None
    """What raw sockets took in the same run to move the bytes that an all-reduce puts on a link, when nothing else ran."""
    sockets_s: float | None
    """A step that reduces nothing, while raw sockets move these bytes from the first gradient on."""
    ways: list[Way]

    @property
    def base(self) -> Way:
        """What the others are held against."""
        return next((way for way in self.ways if way.name == "ddp"), self.ways[0])

    @property
    def limits(self) -> dict[str, float]:
        """Seconds of what no way can be faster than, and of what it is compared with."""
        found = {
            "computing alone": self.compute_s,
            "raw sockets alone": self.link_s,
            "the bound": self.bound_s,
            "computing beside raw sockets": self.sockets_s,
        }
        return {name: seconds for name, seconds in found.items() if seconds is not None}

    @property
    def title(self) -> str:
        return (
            f"{self.model}: {self.gradients} gradients, {self.gradient_bytes / 1e6:.1f} MB, {plural(self.ranks, 'rank')} on "
            f"{plural(self.hosts, 'host')}"
        )

    def table(self) -> Table:
        """One line a way."""
        columns = [
            Column("way", is_text=True),
            Column("step", meaning="the median over the steps of the slowest rank"),
            Column(
                "of the bound",
                meaning="the bound over the step: no step ends before all gradients have passed the link",
            ),
            Column(
                "of raw sockets", meaning="a step that reduces nothing while raw sockets move its bytes, over the step"
            ),
            Column(f"over {self.base.name}", meaning="above 1 is faster"),
            Column("rounds", meaning="of agreement on ready gradients, in a step"),
            Column("buckets", meaning="all-reduces of gradients, in a step"),
        ]
        lines = [Line([name, milliseconds(seconds), *[""] * 5], kind="aside") for name, seconds in self.limits.items()]
        for way in self.ways:
            steps = way.stats.get("steps", 0)
            cells = [
                way.name,
                milliseconds(way.step_s),
                share(self.bound_s / way.step_s) if self.bound_s else "",
                share(self.sockets_s / way.step_s) if self.sockets_s else "",
                times(self.base.step_s / way.step_s),
                *(f"{way.stats[key] / steps:.1f}" if steps else "" for key in ("rounds", "buckets")),
            ]
            lines.append(Line(cells))
        return Table(self.title, columns, lines)

    def page(self, link: LinkSpec | None, description: dict[str, Any]) -> Page:
        """The report."""
        best = min(self.ways, key=lambda way: way.step_s)
        base = self.base
        gain = f", {times(base.step_s / best.step_s)} as fast as {base.name}" if best is not base else ""
        bars = [
            Bar(name, [Part(1e3 * seconds, "grey-2")], milliseconds(seconds)) for name, seconds in self.limits.items()
        ]
        for index, way in enumerate(self.ways):
            spread = (1e3 * min(way.samples), 1e3 * quantile(way.samples, 0.9))
            part = Part(1e3 * way.step_s, series(index).colour)
            bars.append(Bar(way.name, [part], milliseconds(way.step_s), spread=spread))
        limits = ", ".join(f"{name} {milliseconds(seconds)}" for name, seconds in self.limits.items())
        return Page(
            kind="Penstock bench: training",
            answer=f"{self.model}, {plural(self.ranks, 'rank')}: a step takes {milliseconds(best.step_s)} with {best.name}{gain}",
            picture=Picture(
                "steps",
                Bars(Axis("time of a step", "ms"), bars),
                f"{best.name} takes {milliseconds(best.step_s)}; {limits}.",
                "Shorter is better. Bars are medians; the thin line reaches from the fastest step to the slowest of nine "
                "tenths. Grey bars are limits and references, measured or computed in the same run.",
            ),
            next=_use(best.name, self.model),
            setting=f"{self.title}; {link.describe() if link else 'one host'}. All ways take turns in one run.",
            sections=[
                Section("In numbers", [self.table()]),
                Section("What this does not show", [does_not_show(link)]),
                Section("Conditions", [machine.lines(description)]),
            ],
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON, every sample too."""
        return {**vars(self), "ways": [vars(way) for way in self.ways]}


@dataclass(frozen=True)
class Lesson:
    """What several ways have learned from the same batches."""

    ranks: int
    losses: dict[str, list[float]]
    """By way, each step's loss: the mean over the ranks."""

    def final(self, way: str) -> float:
        """The mean over the last tenth of the steps."""
        losses = self.losses[way]
        return statistics.fmean(losses[-max(1, len(losses) // 10) :])

    def apart(self, way: str) -> str:
        """By how much a final loss is above the first way's."""
        return f"{self.final(way) / self.final(next(iter(self.losses))) - 1:+.2%}"

    @property
    def title(self) -> str:
        steps = max(len(losses) for losses in self.losses.values())
        return f"char-gpt, {plural(self.ranks, 'rank')}, {plural(steps, 'step')} on the demo's text"

    def table(self) -> Table:
        """One line a way, beside the first one."""
        first = next(iter(self.losses))
        columns = [Column("way", is_text=True), Column("first loss"), Column("final loss"), Column(f"against {first}")]
        lines = [
            Line([way, f"{losses[0]:.4f}", f"{self.final(way):.4f}", self.apart(way) if way != first else ""])
            for way, losses in self.losses.items()
        ]
        return Table(self.title, columns, lines)

    def page(self, link: LinkSpec | None, description: dict[str, Any]) -> Page:
        """The report."""
        first, *others = self.losses
        told = (
            ", ".join(f"{way} {self.apart(way)} from {first}" for way in others)
            or f"{first} {self.final(first):.4f} nats"
        )
        curves = [
            Curve(way, range(1, len(losses) + 1), losses, series(index), width_px=5.0 if index == 0 else 1.8)
            for index, (way, losses) in enumerate(self.losses.items())
        ]
        return Page(
            kind="Penstock bench: training",
            answer=f"Final losses: {told}",
            picture=Picture(
                "losses",
                Lines([Panel("", Axis("trained for", "steps"), Axis("training loss", "nats"), curves)]),
                f"Where curves lie on each other, the ways learn alike: {told}.",
                "All ways begin with the same weights and see the same batches. A final loss is the mean over the last "
                "tenth of the steps.",
            ),
            next=Next("See how fast the ways are.", f"penstock bench training char-gpt --ways {','.join(self.losses)}"),
            setting=f"{self.title}; {link.describe() if link else 'one host'}.",
            sections=[
                Section("In numbers", [self.table()]),
                Section("What this does not show", [does_not_show(link)]),
                Section("Conditions", [machine.lines(description)]),
            ],
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**vars(self), "final": {way: self.final(way) for way in self.losses}}


def _use(way: str, model: str) -> Next:
    """How the fastest way gets into a script."""
    front, *more = way.split("-")
    options = "".join(", error_feedback=True" if each == "feedback" else f", wire=torch.{each}" for each in more)
    if front == "hook":
        return Next("Put the hook into your own script.", f"penstock.torch.ddp_hook(model{options})")
    if front in ("reducer", "deferred"):
        options += ", optimizer=optimizer" * (front == "deferred")
        return Next("Use it in your own script, in DDP's place.", f"penstock.torch.GradientReducer(model{options})")
    smaller = f"penstock bench training {model} --ways ddp,hook --bucket 256K"
    return Next("See whether a hook is faster with smaller buckets.", smaller)


def learn(
    bed: Bed, *, ways: Sequence[str], ranks: int, batch: int, steps: int, bucket_bytes: int, timeout_s: float
) -> Lesson:
    """Train the demo's model on its text in several ways, all from the same start with the same batches.

    Raises:
        BenchError: as `measure`.
    """
    options = {"losses": steps, "ways": list(ways), "batch": batch, "bucket_bytes": bucket_bytes}
    said = [record for each in _run(bed, "char-gpt", options, ranks, timeout_s) for record in each]
    by_way = {way: [one["losses"] for one in said if one["way"] == way] for way in ways}
    return Lesson(
        ranks, {way: [statistics.fmean(step) for step in zip(*of, strict=True)] for way, of in by_way.items()}
    )


def measure(
    bed: Bed,
    *,
    model: str,
    ways: Sequence[str],
    ranks: int,
    batch: int,
    turns: int,
    steps: int,
    bucket_bytes: int,
    timeout_s: float,
) -> Outcome:
    """Train on the hosts of ``bed``; every way does ``steps`` steps in each of ``turns`` turns.

    Raises:
        BenchError: a rank failed or hung, with the end of what it said.
    """
    options = {
        "model": model,
        "ways": list(ways),
        "batch": batch,
        "turns": turns,
        "steps": steps,
        "bucket_bytes": bucket_bytes,
        "sockets": bed.hosts > 1,
    }
    records = _run(bed, model, options, ranks, timeout_s)
    link = bed.link if isinstance(bed, Testbed) else None
    payload = link.payload_mbit * 1e6 / 8 if link and link.payload_mbit else None
    return summarise(records, options, ranks, bed.hosts, payload)


def summarise(
    records: Sequence[Sequence[dict[str, Any]]],
    options: dict[str, Any],
    ranks: int,
    hosts: int,
    payload_bytes_per_s: float | None,
) -> Outcome:
    """What the ranks said, in numbers. Pure."""
    ready = [next(record["ready"] for record in each if "ready" in record) for each in records]
    said: dict[str, list[dict[str, Any]]] = {}
    for each in records:
        for record in each:
            if record.get("turn", -1) >= 0:
                said.setdefault(record["way"], []).append(record)
    ways = {}
    for name, turns in said.items():
        by_rank: dict[int, list[float]] = {}
        for record in turns:
            by_rank.setdefault(record["rank"], []).extend(record["seconds"])
        slowest = max(by_rank.values(), key=statistics.median)
        ways[name] = Way(name, statistics.median(slowest), slowest, turns[-1]["stats"])
    compute_s = ways.pop("compute").step_s
    link_s, sockets_s = (ways.pop(name).step_s if name in ways else None for name in ("link", "sockets"))
    bound_s = None
    if payload_bytes_per_s and hosts > 1:
        made_s = max(each[-1][0] for each in ready)
        bound_s = max(bound(each, hosts, payload_bytes_per_s) for each in ready) + max(0.0, compute_s - made_s)
    sizes = [size for _, size in ready[0]]
    return Outcome(
        model=options["model"],
        ranks=ranks,
        hosts=hosts,
        gradients=len(sizes),
        gradient_bytes=sum(sizes),
        bound_s=bound_s,
        compute_s=compute_s,
        link_s=link_s,
        sockets_s=sockets_s,
        ways=list(ways.values()),
    )


def bound(ready: Sequence[Sequence[float]], hosts: int, payload_bytes_per_s: float) -> float:
    """Seconds before which no rank can have all gradients: ``ready`` holds (seconds, bytes), in the order of the seconds.

    Ranks of one host reduce among themselves first, so each host's link carries what an all-reduce among the hosts needs.
    """
    left = sum(size for _, size in ready)
    sent_share = sent_bytes(int(left), hosts) / max(left, 1)
    latest = 0.0
    for seconds, size in ready:
        latest = max(latest, seconds + sent_share * left / payload_bytes_per_s)
        left -= size
    return latest


def _run(bed: Bed, model: str, options: dict[str, Any], ranks: int, timeout_s: float) -> list[list[dict[str, Any]]]:
    """What each rank of a run said."""
    what = f"training {model}"
    return run_program(bed, "training_rank", options, what=what, ranks=ranks, timeout_s=timeout_s)
