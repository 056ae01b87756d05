"""``penstock bench aggregated``: all-reduces through aggregators beside our ring, gloo, and a server without aggregators.

Each number of workers gets a `Cluster`. All ways take turns in one run of the same processes, and each reads what its interface
counted.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import IO, Any

from penstock.cluster.generate import blocks
from penstock.numbers import milliseconds, share, size, times
from penstock.reports import Axis, Bar, Bars, Column, Line, Next, Page, Part, Picture, Section, Table, series
from penstock.tools.bench import machine
from penstock.tools.bench.aggregated.cluster import PORT, Cluster
from penstock.tools.bench.launcher import BenchError
from penstock.tools.bench.report import DOES_NOT_SHOW_TESTBED

WAYS = ("ring", "gloo", "server", "int32", "int16", "float32")
"""``server``: int32 straight to the server, without aggregators. int16 carries float16 tensors; all others float32."""
STORM = "storm"
"""int32 while an unauthenticated peer sends the last rack's aggregator as many packets of a job as its workers do."""
WITHOUT_DEPLOYMENT = ("ring", "gloo")


@dataclass(frozen=True)
class Row:
    """The result of one way with a number of workers and a loss rate. Seconds are medians over all-reduces, of the slowest
    rank."""

    workers: int
    loss: float
    way: str
    seconds: float
    tensor_bytes: int
    sent: float
    """Bytes that a worker's interface sent for one byte of the tensor; the mean over workers."""
    received: float
    busy: float
    """Of the machine's processors."""
    rate_mbit: float
    unauthenticated: float = 0.0
    """Packets of an unauthenticated peer that the last rack's aggregator refused in a second."""

    @property
    def share(self) -> float:
        """Of the link: bytes of the tensor over what the link carries meanwhile, headers included."""
        return self.tensor_bytes * 8e-6 / self.seconds / self.rate_mbit

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**vars(self), "share": self.share}


def measure(
    *,
    workers: int,
    loss: float,
    ways: Sequence[str],
    rate_mbit: float,
    nbytes: int,
    window: int,
    turns: int,
    operations: int,
    offloads: bool,
    timeout_s: float,
) -> list[Row]:
    """Make a cluster, start its daemons, run all ways by turns.

    Raises:
        BenchError: a daemon or a rank failed or hung, with the end of what it said.
        TestbedUnavailable: no emulated cluster here.
    """
    with ExitStack() as stack:
        cluster = stack.enter_context(
            Cluster(workers, rate_mbit=rate_mbit, loss=loss, offloads=offloads, unauthenticated=STORM in ways)
        )
        storm = None
        if STORM in ways:
            storm = str(cluster.folder / "storm")
            shape = cluster.topology
            below = sum(host < workers for host in blocks(shape.hosts, shape.racks)[-1])
            target = f"{shape.address(f'a{shape.racks - 1}')}:{PORT}"
            command = [sys.executable, "-m", f"{__package__}.unauthenticated", target, str(below * rate_mbit), storm]
            said = stack.enter_context(tempfile.TemporaryFile())
            sender = cluster.bed.popen(f"h{workers}", command, stdout=said, stderr=said)
            stack.callback(sender.wait)
            stack.callback(sender.kill)
        numbers = {way: "int32" if way in ("server", STORM) else way for way in ways if way not in WITHOUT_DEPLOYMENT}
        options = {
            "ways": list(ways),
            "storm": storm,
            "deployments": {
                way: cluster.deployment(number, window, name=way, direct=way == "server")
                for way, number in numbers.items()
            },
            "elements": nbytes // 4,
            "turns": turns,
            "operations": operations,
            # Above what TCP takes to repeat a lost message twice.
            "lead_s": 1.0 if loss else 0.05,
        }
        records = cluster.run("times_rank", options, what=f"aggregated, {workers} workers", timeout_s=timeout_s)
        refused = _refused(said) if storm else 0.0
    rows = summarise(records, loss=loss, rate_mbit=rate_mbit)
    return [replace(row, unauthenticated=refused) if row.way == STORM else row for row in rows]


def _refused(said: IO[bytes]) -> float:
    """Packets a second that were refused, from what the unauthenticated peer printed. All that it sent should be refused."""
    said.seek(0)
    text = said.read().decode()
    storms = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    sent, refused, seconds = (sum(storm[key] for storm in storms) for key in ("sent", "refused", "seconds"))
    if refused < 0.9 * sent or not sent:
        raise BenchError(
            f"the unauthenticated peer sent {sent} packets, of which {refused} were refused; it said:\n  {text[-2000:]}"
        )
    return float(refused / seconds)


def summarise(records: Sequence[Sequence[dict[str, Any]]], *, loss: float, rate_mbit: float) -> list[Row]:
    """What the ranks said, in numbers. Pure."""
    rows = []
    turns = [[record for record in each if record["turn"] >= 0] for each in records]
    for way in dict.fromkeys(record["way"] for record in turns[0]):
        mine = [[record for record in each if record["way"] == way] for each in turns]
        slowest = [
            max(each)
            for records in zip(*mine, strict=True)
            for each in zip(*(r["seconds"] for r in records), strict=True)
        ]
        moved = [record for each in mine for record in each]
        carried = sum(record["tensor_bytes"] * len(record["seconds"]) for record in moved)
        rows.append(
            Row(
                workers=len(records),
                loss=loss,
                way=way,
                seconds=statistics.median(slowest),
                tensor_bytes=mine[0][0]["tensor_bytes"],
                sent=sum(record["sent"] for record in moved) / carried,
                received=sum(record["received"] for record in moved) / carried,
                busy=statistics.median(record["busy"] for record in mine[0]),
                rate_mbit=rate_mbit,
            )
        )
    return rows


def table(rows: Sequence[Row], title: str = "all-reduce through aggregators") -> Table:
    """A line for each way."""
    columns = [
        Column(
            "way", is_text=True, meaning="server: int32 without aggregators; int16 carries float16, the others float32"
        ),
        Column("time", meaning="the median over all-reduces of the slowest rank"),
        Column("of the link", meaning="bytes of the tensor over what a worker's link carries meanwhile"),
        Column("over ring", meaning="above 1 is faster"),
        Column("over gloo", meaning="above 1 is faster"),
        Column("sent/S", meaning="bytes that a worker's interface sent for one of the tensor"),
        Column("received/S", meaning="the same for what it received"),
        Column("of lossless", meaning="the time without loss over this one"),
        Column("busy", meaning="of the machine's processors"),
    ]
    by_key = {(row.workers, row.loss, row.way): row for row in rows}
    lines = []
    for row in rows:
        lossless = by_key.get((row.workers, 0.0, row.way))
        cells = [
            row.way,
            milliseconds(row.seconds),
            share(row.share),
            *(_ratio(by_key.get((row.workers, row.loss, way)), row) for way in ("ring", "gloo")),
            f"{row.sent:.3f}",
            f"{row.received:.3f}",
            share(lossless.seconds / row.seconds) if lossless and row.loss else "",
            share(row.busy),
        ]
        lines.append(Line(cells, (f"{row.workers}", f"{row.loss:g}")))
    storms = [f"{row.unauthenticated:.0f} ({row.workers} workers)" for row in rows if row.unauthenticated]
    note = (
        f"storm: packets of the unauthenticated peer that were refused in a second: {', '.join(storms)}"
        if storms
        else ""
    )
    return Table(title, columns, lines, [Column("workers"), Column("loss")], note)


def page(rows: Sequence[Row], description: dict[str, Any]) -> Page:
    """The report."""
    most = max(row.workers for row in rows)
    least = min(row.loss for row in rows if row.workers == most)
    there = {row.way: row for row in rows if (row.workers, row.loss) == (most, least)}
    through = there.get("int32") or min(there.values(), key=lambda row: row.seconds)
    gains = [
        f"{_ratio(there[way], through)} as fast as {way}"
        for way in WITHOUT_DEPLOYMENT
        if way in there and way != through.way
    ]
    see = (
        f"{through.way} takes {milliseconds(through.seconds)} with {most} workers, {share(through.share)} of the link."
    )
    everything = (
        [Section("All runs", [Picture("all", chart(rows), see, "Read it as the first picture.")])]
        if len(there) < len(rows)
        else []
    )
    return Page(
        kind="Penstock bench: aggregated",
        answer=f"All-reduce of {size(through.tensor_bytes)}, {most} workers: {through.way} takes "
        + ", ".join([milliseconds(through.seconds), *gains]),
        picture=Picture(
            "aggregated",
            chart(list(there.values())),
            see,
            "Shorter is better. Grey: without aggregators, by Penstock's ring and by gloo. The others go through a server, and "
            "all but the way server through aggregators too.",
        ),
        next=Next("See how it does where packets are lost.", "sudo penstock bench aggregated --losses 0,0.01")
        if not any(row.loss for row in rows)
        else Next(
            "See that sums keep their bits while aggregators are killed.", "sudo penstock bench aggregated --faults 10"
        ),
        setting=f"Emulated racks of workers with links of {through.rate_mbit:g} Mbit/s. All ways take turns in one run.",
        sections=[
            *everything,
            Section("In numbers", [table(rows)]),
            Section("What this does not show", [DOES_NOT_SHOW_TESTBED]),
            Section("Conditions", [machine.lines(description)]),
        ],
    )


def chart(rows: Sequence[Row]) -> Bars:
    """A bar a row. A way has its colour, whatever else is shown."""
    bars, previous = [], None
    several = len({(row.workers, row.loss) for row in rows}) > 1
    colours = {way: series(index).colour for index, way in enumerate(("int32", "float32", "int16", "server", STORM))}
    for row in rows:
        at = (row.workers, row.loss)
        heading = f"{row.workers} workers, loss {row.loss:g}" if several and at != previous else ""
        previous = at
        part = Part(1e3 * row.seconds, colours.get(row.way, "grey-2"))
        bars.append(
            Bar(row.way, [part], f"{milliseconds(row.seconds)}, {share(row.share)} of the link", heading=heading)
        )
    return Bars(Axis("time of an all-reduce", "ms"), bars)


def _ratio(other: Row | None, row: Row) -> str:
    """How much faster than another way, for as many bytes of a tensor."""
    if other is None:
        return ""
    return times(other.seconds / other.tensor_bytes / (row.seconds / row.tensor_bytes))
