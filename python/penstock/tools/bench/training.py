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

from rich import box
from rich.table import Table

from penstock.tools.bench.program import run_program
from penstock.tools.testbed.cluster import Loopback, Testbed

Bed = Testbed | Loopback


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

    def table(self) -> Table:
        """One line a way."""
        title = (
            f"{self.model}: {self.gradients} gradients, {self.gradient_bytes / 1e6:.1f} MB, {self.ranks} ranks on "
            f"{self.hosts} host{'s' if self.hosts > 1 else ''}"
        )
        shown = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
        shown.add_column("way")
        base = next((way for way in self.ways if way.name == "ddp"), self.ways[0])
        for column in ("step ms", "of the bound", "of raw sockets", f"times {base.name}", "rounds", "buckets"):
            shown.add_column(column, justify="right", no_wrap=True)
        limits = {
            "computing alone": self.compute_s,
            "raw sockets alone": self.link_s,
            "the bound": self.bound_s,
            "computing beside raw sockets": self.sockets_s,
        }
        for name, seconds in limits.items():
            if seconds is not None:
                shown.add_row(name, f"{1e3 * seconds:.1f}", "", "", "", "", "")
        for way in self.ways:
            steps = way.stats.get("steps", 0)
            shown.add_row(
                way.name,
                f"{1e3 * way.step_s:.1f}",
                f"{self.bound_s / way.step_s:.0%}" if self.bound_s else "",
                f"{self.sockets_s / way.step_s:.0%}" if self.sockets_s else "",
                f"{base.step_s / way.step_s:.2f}x",
                *(f"{way.stats[key] / steps:.1f}" if steps else "" for key in ("rounds", "buckets")),
            )
        return shown

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

    def table(self) -> Table:
        """One line a way, beside the first one."""
        steps = max(len(losses) for losses in self.losses.values())
        title = f"char-gpt, {self.ranks} ranks, {steps} steps on the demo's text"
        shown = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
        first = next(iter(self.losses))
        shown.add_column("way")
        for column in ("first loss", "final loss", f"against {first}"):
            shown.add_column(column, justify="right", no_wrap=True)
        for way, losses in self.losses.items():
            apart = self.final(way) / self.final(first) - 1
            shown.add_row(way, f"{losses[0]:.4f}", f"{self.final(way):.4f}", f"{apart:+.2%}" if way != first else "")
        return shown

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**vars(self), "final": {way: self.final(way) for way in self.losses}}


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

    An all-reduce puts 2(h - 1)/h of its bytes on each host's link, each way, if ranks of one host reduce among themselves
    first; no algorithm over host links needs less (Patarasuk and Yuan 2009).
    """
    left = sum(size for _, size in ready)
    latest = 0.0
    for seconds, size in ready:
        latest = max(latest, seconds + 2 * (hosts - 1) / hosts * left / payload_bytes_per_s)
        left -= size
    return latest


def _run(bed: Bed, model: str, options: dict[str, Any], ranks: int, timeout_s: float) -> list[list[dict[str, Any]]]:
    """What each rank of a run said."""
    what = f"training {model}"
    return run_program(bed, "training_rank", options, what=what, ranks=ranks, timeout_s=timeout_s)


WAYS = ("ddp", "hook", "reducer", "gloo")
"""What runs when --ways names none: DDP over Penstock as it is, DDP with `penstock.torch.ddp_hook`, a model without DDP under
`penstock.torch.GradientReducer`, DDP over gloo."""

KNOWN = (
    *WAYS,
    *(
        f"{way}-{wire}{feedback}"
        for way in ("hook", "reducer")
        for wire in ("float16", "bfloat16")
        for feedback in ("", "-feedback")
    ),
)
"""All that --ways takes: with a dtype half the bytes are sent, with feedback what rounding takes off is kept."""
