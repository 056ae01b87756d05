"""What `penstock profile` says of a breakdown: in one line, as a table, and as a page. tests/test_reports.py draws the pages."""

from __future__ import annotations

import dataclasses
import io
import json
import pathlib
import random
import re
import xml.etree.ElementTree
from collections.abc import Sequence

import pytest
from rich.console import Console

import planted_records
import profiled
from penstock.profiling import causes, utilisation, writers
from penstock.profiling.advice import Advice
from penstock.profiling.breakdown import PHASES, PURPOSES, SYNC, Breakdown, Moving, Share
from penstock.profiling.cause import Cause
from penstock.profiling.divide import divide
from penstock.profiling.predict import Prediction
from penstock.profiling.readers import load
from penstock.profiling.record import Event, Header, Operation, Readings, Record, Span, Step, Wait
from penstock.reports import Axis, Bars, Lines, Panel, Picture, Row, Stretch, Table, Timeline, render, timeline
from penstock.reports.terminal import print_first_screen
from penstock.tools.profile import report, steps
from penstock.tools.profile.shown import answer, communication, division, left_out, unit, waited_for
from profiles import data_parallel

MS = profiled.MS


def alone(**changes: object) -> Breakdown:
    return Breakdown((dataclasses.replace(profiled.share(0), **changes),))  # type: ignore[arg-type]


def moving(purpose: str = "data-parallel sync", *, wire_ms: float = 0, wait_ms: float = 0) -> dict[str, Moving]:
    return {purpose: Moving(wire_ms * MS, wait_ms * MS)}


# ------------------------------------------------------------------------------------------------------------- the answer


@pytest.mark.parametrize(
    ("breakdown", "want"),
    [
        (
            profiled.breakdown(4),
            "Ranks stand still for 35% of a step of 212 ms: 29% wire of data-parallel sync, 6% wait, mostly for rank 3",
        ),
        (
            profiled.breakdown(1, None),
            "Rank 0 stands still for 37% of a step of 212 ms: 29% wire of data-parallel sync, 8% wait",
        ),
        (
            alone(communication=moving(wait_ms=106) | moving("tensor", wire_ms=21.2)),
            "Rank 0 stands still for 60% of a step of 212 ms: 50% wait of data-parallel sync, 10% wire of tensor",
        ),
        (
            alone(communication={}, work={"backward": 140.0 * MS, "other": 72.0 * MS}),
            "Rank 0 computes without standing still: backward takes 66% of a step of 212 ms",
        ),
        (Breakdown(()), "No step was recorded"),
        (
            Breakdown(
                (Share(0, 0, 0, 0.0, {}, {"all_reduce": Moving(hidden_wire_ns=2e7, bytes=1e10, operations=10)}),) * 2
            ),
            "2 processes were on average in collectives for 20 ms: 20 operations in all, 20 GB",
        ),
    ],
)
def test_the_answer_says_what_is_lost_and_to_what(breakdown: Breakdown, want: str) -> None:
    """Shares of the mean step: the larger first, what it is for, and for whom the others wait if that is one rank."""
    assert answer(breakdown) == want
    assert report.text(breakdown, []).startswith(f"{want}\n")


# -------------------------------------------------------------------------------------------------------------- the table


def cells(shown: Table) -> dict[str, list[str]]:
    return {line.cells[0]: list(line.cells[1:]) for line in shown.lines}


@pytest.mark.parametrize("ranks", [1, 2, 4, 5, 64, 1000])
def test_a_table_fits_a_terminal(ranks: int) -> None:
    """80 columns whatever the number of ranks, but for the sentences of the first screen, which the terminal breaks itself; and
    its rows sum to the step in every column."""
    found = profiled.breakdown(ranks, ranks // 2)
    lines = report.text(found, []).splitlines()
    below = lines[lines.index("Where a step goes") :]
    assert max(map(len, below)) <= 80 and len(below) < 45
    assert max(map(len, lines[1 : next(at for at, line in enumerate(lines) if line.startswith("Next: "))])) <= 80
    rows = cells(division(found))
    for column in [0] if ranks > 4 else [0, *range(2, len(rows["whole step"]))]:
        parts = sum(float(row[column]) for name, row in rows.items() if name != "whole step")
        assert parts == pytest.approx(float(rows["whole step"][column]), abs=0.3)
    percents = sum(int(row[1].rstrip("%")) for name, row in rows.items() if name != "whole step")
    assert 96 <= percents <= 104


def test_the_terminal_begins_with_the_first_screen() -> None:
    """That of the page: the answer, the bars, what to see in them, the next step. What it says stands nowhere below."""
    found, records = profiled.breakdown(4), profiled.records(4)
    cause = Cause("link", "wire", "the link is full", "half the bytes", 61e6, 30e6, numbers={"share_of_limit": 0.9})
    better = Prediction("16 streams", "PENSTOCK_STREAMS=16", 212e6, 150e6, 0.1, "numbers", {"PENSTOCK_STREAMS": "16"})
    for advice in (Advice((cause,), (better,)), Advice((cause,), ())):
        told = report.text(found, records, advice)
        out = io.StringIO()
        page = report.page(found, records, advice)
        print_first_screen(page, Console(file=out, width=80, color_system=None))
        assert told.startswith(out.getvalue()) and f"Next: {page.next.text}\n    {page.next.command}" in told
        for said in (page.answer, page.picture.see, page.next.text, page.next.command):
            assert told.count(said) == 1, said
        assert "1. " + advice.changes[0].what + ": the next step above." in told
        assert "Numbers: of limit 90%." in told  # of the cause, also where its sentence is the next step


def measured(profiler_ms: float) -> Breakdown:
    """A step of 141 ms, of which the profiler takes as much, and the rank stands still for 10."""
    work = {"backward": (131 - profiler_ms) * MS, "profiler": profiler_ms * MS}
    return alone(step_ns=141.0 * MS, work=work, communication=moving(wire_ms=10))


def test_percentages_are_without_what_the_profiler_takes() -> None:
    """In the answer, the bars, the tables and the causes; how much that is, is said once, unless it is 2 % or less."""
    found = measured(65)
    assert answer(found) == "Rank 0 stands still for 13% of a step of 76 ms: 13% wire of data-parallel sync"
    rows = cells(division(found))
    assert rows["whole step"] == ["141.0", "-"] and rows["profiler"] == ["65.0", "-"]
    assert rows["backward"] == ["66.0", "87%"] and rows["data-parallel sync: wire"] == ["10.0", "13%"]
    chart = pictures(found, [])["step"].chart
    assert isinstance(chart, Bars) and chart.bars[0].told == "76.0 ms, 13% still"
    said = "The profiler itself takes 65 ms of a step of 141 ms, 46%: all percentages are without it."
    told = report.text(found, [])
    assert " ".join(told.split()).count(said) == 1 and told.count("The profiler") == 1
    page = report.page(found, [])
    assert page.setting.endswith(said) and render(page).count("The profiler itself") == 1
    assert [card.number for card in page.cards[:2]] == ["76 ms", "13%"]
    assert left_out(measured(2.5)) == "" and left_out(measured(3.0)) != ""
    # 3 ms of loading are more than 3 % of the step, though not of one with the profiler.
    shares = [dataclasses.replace(one, work={**one.work, "loading": 3.0 * MS}) for one in found.shares]
    [loader, *_] = causes.find([], Breakdown(tuple(shares)))[1:]
    assert loader.kind == "loader"


def test_many_ranks_are_least_median_and_most() -> None:
    """With which rank that is, unless all are alike."""
    rows = cells(division(profiled.breakdown(64, 17)))
    assert rows["backward"][2:] == ["70.0 (0)", "70.0", "81.0 (17)"]
    assert rows["data-parallel sync: wait"][2:] == ["0.00 (17)", "17.0", "17.0 (0)"]
    assert rows["optimizer"][2:] == ["8.00", "8.00", "8.00"]


def test_communication_and_whom_ranks_wait_for() -> None:
    """Exposed and hidden stand beside each other; the late rank is named with what it costs each of the others."""
    found = profiled.breakdown(4)
    rows = cells(communication(found))
    assert rows["data-parallel sync"] == ["61.0", "12.8", "9.00", "4.00", "7", "41 MiB"]
    waits = waited_for(found)
    assert waits is not None and cells(waits) == {"rank 3": ["21.0", "100%"]}
    assert waited_for(profiled.breakdown(1, None)) is None


# --------------------------------------------------------------------------------------------------------------- the page


def pictures(found: Breakdown, records: list[Record]) -> dict[str, Picture]:
    page = report.page(found, records)
    blocks = [block for section in page.sections for block in section.blocks]
    return {each.name: each for each in [page.picture, *blocks] if isinstance(each, Picture)}


@pytest.mark.parametrize("ranks", [1, 7, 8, 64])
def test_bars_are_steps_of_ranks(ranks: int) -> None:
    """Each is as long as its step, and tells what part of it the rank stands still; of many, some are chosen."""
    found = profiled.breakdown(ranks, ranks // 2)
    shown = pictures(found, [])
    chart = shown["step"].chart
    assert isinstance(chart, Bars) and len(chart.bars) <= report.FIRST_BARS
    assert all(bar.value == pytest.approx(212) for bar in chart.bars)
    labels = [bar.label for bar in chart.bars]
    if ranks <= report.FIRST_BARS:
        assert labels == [f"rank {rank}" for rank in range(ranks)] and "every" not in shown
    else:
        assert labels[:2] == ["mean of all", f"rank {ranks // 2}"] and "every" in shown


def test_a_timeline_shows_what_was_planted() -> None:
    """Rank 3 comes 17 ms late to each all-reduce: the others wait that long for the first, and it never waits. What is drawn of
    each is as long as it was, on one clock."""
    records = profiled.records(4)
    chart = pictures(profiled.breakdown(4), records)["moments"].chart
    assert isinstance(chart, Timeline) and chart.length == pytest.approx(212)
    assert [row.heading for row in chart.rows if row.heading] == ["rank 0", "rank 1", "rank 2", "rank 3", "links"]
    network = [row for row in chart.rows if row.label == "network"]

    def lengths(row: Row, colour: str) -> float:
        return sum(each.end - each.start for each in row.stretches if each.colour == colour)

    for row in network[:3]:
        assert lengths(row, steps.WAIT) == pytest.approx(17 + 9) and lengths(row, steps.WIRE) == pytest.approx(11 + 88)
    assert lengths(network[3], steps.WAIT) == 0 and lengths(network[3], steps.WIRE) == pytest.approx(11 + 88)
    thread = chart.rows[0]
    assert lengths(thread, steps.WIRE) == pytest.approx(75 + 5, abs=1.1) and lengths(
        thread, "series-3"
    ) == pytest.approx(3)


def of_lengths(lengths_ms: Sequence[float], rank: int = 0, world: int = 1) -> Record:
    record, now = Record(Header(rank, world, "a", 100 + rank, 0, 0)), 0
    for number, length in enumerate(lengths_ms):
        record.steps.append(Step(number, now, now + round(length * MS), (Span("forward", now, now + MS),)))
        now += round(length * MS)
    return record


@pytest.mark.parametrize("ranks", [1, 2, 7])
@pytest.mark.parametrize("count", [2_000, 2_003, 100])
def test_a_slower_end_and_pauses_are_seen(ranks: int, count: int) -> None:
    """A step takes 10 ms, from the middle on 20, and each 50th step 60 more: the picture has each pause at its step and both
    levels, in 1,000 points at most; what connecting took in the first two steps is not in it."""
    half = count // 2
    planted = [10.0 + 10 * (number >= half) + 60 * (number % 50 == 49) for number in range(count)]
    planted[0] = 5_000.0
    records = [of_lengths([ms + 0.01 * rank for ms in planted], rank, ranks) for rank in range(ranks)]
    picture = steps.lengths(records)
    assert picture is not None
    [panel] = panels_of(picture)
    assert len(panel.curves) == min(ranks, 5) and sum(len(curve.x) for curve in panel.curves) <= 1000
    for curve in panel.curves:
        rank = int(curve.label.removeprefix("rank "))
        drawn = dict(zip(curve.x, curve.y, strict=True))
        assert list(curve.x) == sorted(drawn) and curve.x[0] >= 2
        assert all(ms == pytest.approx(planted[int(number)] + 0.01 * rank) for number, ms in drawn.items())
        assert {number for number in range(2, count) if number % 50 == 49} <= set(curve.x)
        assert {10, 20} <= {round(ms) for ms in drawn.values()}
    assert f"of rank {ranks - 1}, 80" in picture.see and "The median is 10 ms in the first quarter" in picture.see, (
        picture.see
    )
    assert ("the shortest and the longest are shown" in picture.how) == (count * min(ranks, 5) > 1_000)
    assert ("Of 7 ranks those 5" in picture.how) == (ranks == 7)


def test_lengths_are_without_what_the_profiler_takes() -> None:
    """Also on the ranks that wait for the one that it holds up; sampled steps are left out, unless there are no others."""
    held_up = {(0, number): 30 * MS for number in (5, 8)}
    records = data_parallel(2, 30, sampled=(6,), profiler_ns=held_up)
    for record in records:  # it makes a sampled step longer
        sampled = record.steps[6]
        record.steps[6] = sampled._replace(end_ns=sampled.end_ns + 50 * MS)
    picture = steps.lengths(records)
    assert picture is not None
    for curve in panels_of(picture)[0].curves:
        assert list(curve.x) == [number for number in range(2, 30) if number != 6]
        assert list(curve.y) == pytest.approx([curve.y[0]] * 27)
    assert "Sampled steps" in picture.how
    assert steps.lengths([of_lengths([1, 2, 3])]) is None
    alone = steps.lengths(data_parallel(1, 6, sampled=range(6)))
    assert alone is not None and len(panels_of(alone)[0].curves[0].x) == 4 and "Sampled" not in alone.how


def test_examples_a_second_are_of_all_ranks(tmp_path: pathlib.Path) -> None:
    """By the mean step without the profiler's time, and of what is trained on: in one step of four an evaluation loads 500 more.
    Unknown where a rank has no loader, or where ranks may have the same batch."""
    held_up = {(rank, number): 30 * MS for rank in range(2) for number in (5, 8)}
    evaluated = {(rank, number): 10 * MS for rank in range(2) for number in range(3, 30, 4)}
    records = data_parallel(2, 30, sampled=(6,), profiler_ns=held_up, evaluation_ns=evaluated)
    for record in records:
        record.steps[:] = [
            step._replace(
                examples=32 + 500 * ((0, step.number) in evaluated),
                spans=tuple(span for span in step.spans if span.phase != "evaluation" or span.end_ns > span.start_ns),
            )
            for step in record.steps
        ]
    found = divide(records)
    mean_ns = found.shares[0].unprofiled_ns
    assert [share.examples for share in found.shares] == [32, 32] and found.shares[0].work["profiler"] > MS
    assert found.examples_per_s == pytest.approx(2 * 32 / (mean_ns / 1e9))
    rate = f"{found.examples_per_s:.0f}"
    assert f"\nExamples a second, of all ranks: {rate}.\n" in report.text(found, records)
    assert (rate, "examples a second", "of all ranks") in report.page(found, records).cards
    writers.json(found, tmp_path / "b.json")
    assert json.loads((tmp_path / "b.json").read_text())["examples_per_s"] == found.examples_per_s
    assert writers.from_json(tmp_path / "b.json") == found
    in_groups = dataclasses.replace(found.shares[0], communication={"tensor": Moving(operations=1)})
    no_loader = dataclasses.replace(found.shares[0], examples=0)
    not_known = dataclasses.replace(
        found.shares[0], known=0
    )  # a short run: purposes of operations are not known, either
    for other in (in_groups, no_loader, not_known):
        unknown = dataclasses.replace(found, shares=(other, found.shares[1]))
        assert unknown.examples_per_s is None and "Examples" not in report.text(unknown, records)
    assert Breakdown(()).examples_per_s is None


def test_who_is_stood_still_for_is_named_and_not_who_is_waited_for_beside_work() -> None:
    """Hidden waits are mostly for rank 0, exposed ones for rank 1; where both are waited for alike none is named."""
    for exposed, whom in (((1.0, 9.0), ", mostly for rank 1"), ((4.5, 5.5), ""), ((0.0, 0.0), "")):
        moving = [
            Moving(exposed_wait_ns=exposed[1] * MS, hidden_wait_ns=0.0, waited_for={1: exposed[1] * MS}),
            Moving(exposed_wait_ns=exposed[0] * MS, hidden_wait_ns=90 * MS, waited_for={0: (90 + exposed[0]) * MS}),
        ]
        shares = [Share(rank, 9, 3, 100.0 * MS, {"forward": 90.0 * MS}, {"x": moving[rank]}) for rank in range(2)]
        assert report.shown._for_whom(shares) == whom


def test_what_ended_a_job_stands_before_its_figures(tmp_path: pathlib.Path) -> None:
    """On the page above all, the rank that raised first before the one that raised for it; of few steps nothing is made."""
    records = data_parallel(2, 12)
    for record, ns, text in zip(
        records, (9 * 10**9, 8 * 10**9), ("PeerLost: rank 1 is gone", "ValueError:\n  planted\n"), strict=True
    ):
        record.events[:] = [Event(ns, "exception", text)]
    found = divide(records)
    assert found.failures == (
        "rank 1 ended with an exception: ValueError: planted",
        "rank 0 ended with an exception: PeerLost: rank 1 is gone",
    )
    page = report.page(found, records)
    assert list(page.problems) == [f"Problem: {each}." for each in found.failures] and "Mend what" not in page.next.text
    for record in records:
        del record.steps[3:]
    assert report.page(divide(records), records).next.text.startswith("Mend what ended the job")


def test_a_purpose_of_which_nothing_is_known_has_no_line() -> None:
    found = Breakdown(
        (Share(0, 9, 3, 100.0 * MS, {"forward": 99.0 * MS}, {SYNC: Moving(1.0 * MS), "other": Moving()}),)
    )
    assert [line.cells[0] for line in report.shown.communication(found).lines] == [SYNC]
    nothing = dataclasses.replace(
        found, shares=(dataclasses.replace(found.shares[0], communication={"other": Moving()}),)
    )
    assert [line.cells[0] for line in report.shown.communication(nothing).lines] == ["none was seen"]


def test_rates_are_differences_of_counters() -> None:
    """By host once, whatever ranks have the readings; a counter that starts anew is no negative rate; what never moves is left
    out, as what connections carry, and few points stand for many."""
    records = profiled.records(4)
    found = steps.rates(records, profiled.breakdown(4))
    assert sorted((each.host, each.interface) for each in found) == [("a", "eth0"), ("b", "eth0")]
    assert max(rate for _, rate in found[0].tx.points) == pytest.approx(2.4e6 / 0.02)
    assert max(rate for _, rate in found[0].rx.points) == pytest.approx(0.9 * 2.4e6 / 0.02)
    values = {
        f"{name}.{way}_bytes": number for name in ("nic.e", "streams.e") for number, way in enumerate(("rx", "tx"))
    }
    one = Record(
        records[0].header,
        readings=[
            Readings(i * MS, {name: i if way else i % 50 * 1e3 for name, way in values.items()}) for i in range(5000)
        ],
    )
    (rates,) = steps.rates([one], Breakdown(()))
    received, sent = (utilisation.thinned(way.points, report.MOST_POINTS) for way in (rates.rx, rates.tx))
    assert min(rate for _, rate in received) >= 0 and len(received) <= report.MOST_POINTS
    assert [rate for _, rate in sent] == pytest.approx([1e3] * len(sent))
    assert sent[0][0][0] == 0 and sent[-1][0][1] == 4999 * MS


def test_the_page_says_why_traffic_falls() -> None:
    """A rank writes a checkpoint for two seconds: the page names it below the picture of the interfaces, the terminal in a line,
    and no fall without."""
    for pauses in ({}, {30: (1, "checkpoint", 2.0)}):
        job = planted_records.Job(1, random.Random(1), steps=60, gradient_bytes=8e6)
        job.pauses = pauses
        records, found = planted_records.played(job)
        fallen = utilisation.drops(records, found)
        blocks = report.carried(found, records, fallen)
        told = " ".join(report.text(found, records, fallen=fallen).split())
        assert ("2 of these are explained by checkpoint. The largest: eth0 of h" in told) == bool(pauses), told
        if pauses:
            unknown = [dataclasses.replace(each, cause="", rank=None) for each in fallen]
            assert "; 1 of these is explained by checkpoint. The" in report.shown.fallen([fallen[0], *unknown])
            assert "; none of these are explained. The largest" in report.shown.fallen(unknown)
            assert (
                report.text(found, records, fallen=fallen[:1]).count("Once the traffic of an interface fell below") == 1
            )
            assert report.shown.drop(dataclasses.replace(fallen[0], ways=("rx",))).startswith(
                "eth0 of h0 (received) for"
            )
            falls = blocks[-1]
            assert isinstance(falls, list) and all(fall.endswith("checkpoint of rank 1") for fall in falls), falls
            assert [fall.split(" for ")[0] for fall in falls] == ["eth0 of h0", "eth0 of h1"]
        else:
            assert len(blocks) == 1


def test_the_page_shows_what_was_used() -> None:
    """A picture of each resource that was recorded, with the numbers planted in `profiled.resources`, and none of what was not:
    nothing reads a disk or fills /dev/shm. Of two hosts, what is of one says of which."""
    shown = pictures(profiled.breakdown(4), profiled.records(4))
    wanted = {
        "processors": "At most 4 processors are used by all programs of a.",
        "threads": "The main thread of rank 3 takes 20% of a processor at most.",
        "resident": "Rank 3 has 456 MiB in memory at most.",
        "free": "At least 7.99 GiB of memory are available on a.",
        "disks": "Disk vda of a writes 50 MB/s to disk at most.",
        "windows": "Stream 2 (rank 0 to rank 1) has a round trip of 40 ms at most; stream 2 (rank 0 to rank 1) has up to 300 KiB "
        "on the way.",
        "deliveries": "Stream 2 (rank 0 to rank 1) delivers 4.5 MB/s at most; stream 1 (rank 0 to rank 1) sends 8 segments "
        "again.",
        "gpus": "GPU 0 of a is busy for 0% of the time at most; GPU 0 of a has 1 GiB in use at most.",
    }
    assert {name: shown[name].see for name in shown if name in wanted} == wanted
    panels = {name: panels_of(shown[name]) for name in wanted}
    assert [panel.y.label for panel in panels["windows"]] == ["round trip, ms", "congestion window, MiB"]
    assert [len(each) for each in panels.values()] == [1, 1, 1, 1, 1, 2, 2, 2]
    rank_3 = next(curve for curve in panels["processors"][0].curves if curve.label == "rank 3")
    assert list(rank_3.y) == pytest.approx([0.4] * len(rank_3.y)) and rank_3.x[-1] == pytest.approx(0.84)
    assert panels["windows"][1].curves[-1].y == pytest.approx([100 / 1024] * 42), "stream 0, the last of five"
    assert "Processor time: 5 of 6 are shown, those with the highest mean first." in shown["processors"].how
    assert "Of each, 5 of 6 are shown, those first that moved most bytes." in shown["windows"].how
    bare = [Record(each.header, each.steps, each.samples, readings=[]) for each in profiled.records(4)]
    headings = [section.title for section in report.page(profiled.breakdown(4), bare).sections]
    assert "Utilisation" not in headings


def panels_of(picture: Picture) -> list[Panel]:
    assert isinstance(picture.chart, Lines)
    return list(picture.chart.panels)


def test_a_page_of_many_ranks_and_readings_stays_small() -> None:
    """1,000 ranks on two hosts and 1,000 readings: five lines a panel, of 200 points each, and less than 1 MB in all."""
    many = profiled.records(2)
    others = [Record(dataclasses.replace(many[0].header, rank=rank, pid=100 + rank)) for rank in range(2, 1000)]
    for each in many:
        ranks = range(each.header.rank, 1000, 2)
        # Of most ranks there are two readings.
        each.readings = [
            Readings(at * MS, profiled.resources(at, ranks if at in (5_000, 5_999) else ranks[-5:]))
            for at in range(5_000, 6_000)
        ]
    page = report.page(profiled.breakdown(2), [*many, *others])
    shown = {each.name: each for section in page.sections for each in section.blocks if isinstance(each, Picture)}
    used = [panel for name in ("processors", "threads", "windows") for panel in panels_of(shown[name])]
    assert {len(panel.curves) for panel in used} == {5}
    assert {len(curve.x) for panel in used for curve in panel.curves} == {200}
    assert "5 of 1002 are shown" in shown["processors"].how
    assert len(render(page)) < 1_000_000


def test_without_readings_or_samples_the_page_says_how_to_get_them() -> None:
    """In place of the pictures; a file of sums has neither heading."""
    bare = [dataclasses.replace(each, readings=[], samples=[]) for each in profiled.records(2)]
    text = render(report.page(profiled.breakdown(2, 0), bare))
    headings = [section.title for section in report.page(profiled.breakdown(2, 0), []).sections]
    assert headings == ["Where a step goes", "Communication", "How this was measured", "Problems"]
    assert "every 100\u00a0ms" in text and "There is no sample of a step" in text
    assert [*pictures(profiled.breakdown(2, 0), bare)] == ["step", "steps"]


@pytest.mark.parametrize(
    ("breakdown", "want"),
    [
        (alone(communication=moving(wire_ms=60)), "how much of the link"),
        (alone(communication=moving(wait_ms=60)), "wait for each other"),
        (alone(communication=moving("pipeline forward recv", wait_ms=60)), "bubble"),
        (alone(communication={}, work={"loading": 60.0 * MS, "other": 152.0 * MS}), "num_workers"),
        (alone(communication={}, work={"backward": 212.0 * MS}), "perfetto"),
        (Breakdown(()), "torchrun"),
    ],
)
def test_the_next_step_follows_from_the_largest_part(breakdown: Breakdown, want: str) -> None:
    """Unless the verb gives a better one."""
    following = report.page(breakdown, []).next
    assert want in following.text + following.command
    better = Prediction("a change", "PENSTOCK_STREAMS=4", 2e6, 1e6, 0.1, "numbers")
    link = Cause("link", "wire", "the link is full", "twice the link", 8e5, 5e5)
    first = report.page(breakdown, [], Advice((), (better,))).next
    assert first.command == "PENSTOCK_STREAMS=4" and first.text.startswith(
        "With a change a step should take 1 ms instead of 2"
    )
    assert report.page(breakdown, [], Advice((link,), ())).next.command == "twice the link"
    assert report.page(breakdown, [], Advice((link,), (better,))).next == first


def test_one_list_of_changes() -> None:
    """Predictions, and causes that none is about, by what they bring; each with its setting, or with that there is none."""
    before = 212.0 * MS
    twice = Prediction("twice the link", "", before, 100.0 * MS, 0.0, "")
    even = Prediction("no straggler", "", before, 150.0 * MS, 0.0, "", {}, "straggler")
    streams = {"PENSTOCK_STREAMS": "16"}
    flows = Prediction("16 streams", "PENSTOCK_STREAMS=16", before, 180.0 * MS, 0.0, "", streams, "flow cap")
    slow = Cause("straggler", "wait", "the others wait 62 ms", "look at its device", 62.0 * MS, 60.0 * MS, 3)
    cap = Cause("flow cap", "wire", "a flow gets 9 Mbit/s", "PENSTOCK_STREAMS=16", 40.0 * MS, 32.0 * MS)
    threads = {"PENSTOCK_IO_THREADS": "4"}
    copies = Cause("memory copies", "wire", "1 of 2", "PENSTOCK_IO_THREADS=4", 90.0 * MS, settings=threads)
    compute = Cause("compute", "compute", "2 of 3", "faster devices", 100.0 * MS)
    advice = Advice((slow, compute, cap, copies), (twice, even, flows))
    assert [(each.what, each.obstacle) for each in advice.changes] == [
        ("twice the link", "no setting can do that: it takes a faster link between the hosts"),
        ("no straggler", "no setting can do that: look at rank 3"),
        ("cheaper copies", ""),
        ("16 streams", ""),
    ]
    assert [each.gain_ns for each in advice.changes] == pytest.approx([112.0 * MS, 62.0 * MS, None, 32.0 * MS])
    told = " ".join(report.text(profiled.breakdown(4), [], advice).split())
    assert "1. twice the link: no setting can do that: it takes a faster link between the hosts." in told
    assert (
        "2. no straggler: the next step above. 3. cheaper copies: PENSTOCK_IO_THREADS=4. 4. 16 streams: PENST" in told
    )
    assert "3. cheaper copies - - -" in told and "4. 16 streams 180.0 ±0 % 1.18×" in told
    assert report.page(profiled.breakdown(4), [], advice).next.command == "look at its device"
    # What nothing can be done about has no place in the list, and says elsewhere what to do.
    assert "To change it: faster devices." in told


def test_the_json_has_the_list(tmp_path: pathlib.Path) -> None:
    """Beside the breakdown, which reads as without it."""
    copies = Cause("memory copies", "wire", "1 of 2", "try it", 90.0 * MS, settings={"PENSTOCK_IO_THREADS": "4"})
    twice = Prediction("twice the link", "", 212.0 * MS, 100.0 * MS, 0.1, "")
    found = profiled.breakdown(2)
    writers.json(found, tmp_path / "table.json", Advice((copies,), (twice,)).changes)
    assert writers.from_json(tmp_path / "table.json") == found
    first, second = json.loads((tmp_path / "table.json").read_text())["changes"]
    assert first == {
        "change": "twice the link",
        "how": "",
        "settings": {},
        "no_setting": "no setting can do that: it takes a faster link between the hosts",
        "gain_ns": 112.0 * MS,
        "predicted_step_ns": 100.0 * MS,
        "error": 0.1,
        "cause": None,
    }
    assert second["settings"] == {"PENSTOCK_IO_THREADS": "4"} and second["gain_ns"] is second["error"] is None
    assert (second["cause"], second["no_setting"]) == ("memory copies", "")


def test_what_a_rule_compared_is_shown() -> None:
    """On the terminal in a line below the cause, in the report in a column; each number with the unit that its name has."""
    compared = {
        "own_bytes_per_step": 3 << 20,
        "on_wire_bytes_per_s": 22.5e6,
        "share_of_limit": 0.9,
        "resent_share": 0.004,
        "window_share": 9e-7,
        "ms_per_operation": 1.25,
        "streams_to_a_peer": 16,
    }
    cause = Cause("link", "wire", "the link is full", "twice the link", 8e5, 5e5, numbers=compared)
    advice = Advice((cause, dataclasses.replace(cause, numbers={})))
    want = "own per step 3 MiB, on wire 180 Mbit/s, of limit 90%, resent 0.4%, window 0%, per operation 1.25 ms, "
    want += "streams to a peer 16"
    lines = report.text(profiled.breakdown(2), [], advice).splitlines()
    assert f"Numbers: {want}." in " ".join(" ".join(lines).split())
    assert sum("Numbers:" in line for line in lines) == 1
    assert (
        lines[next(at for at, line in enumerate(lines) if "Numbers:" in line) - 1] == "- As the next step above says."
    )
    assert want in render(report.page(profiled.breakdown(2), [], advice))


def test_a_page_of_nothing_says_why() -> None:
    """Problems stand above everything else where there is nothing else; otherwise they have a section."""
    text = render(report.page(Breakdown((), problems=("the disk was full",)), []))
    assert "Problem: the disk was full" in text[: text.index("<svg")]
    text = render(report.page(profiled.breakdown(2), []))
    assert "its rank was stopped" in text[text.index("Problems</h2>") :] and 'role="alert"' not in text


@pytest.mark.parametrize("seed", range(30))
def test_any_breakdown_has_a_table_and_a_page(seed: int) -> None:
    """Zeros, unknown names, ranks with and without steps, times from ns to hours, records that fit or do not."""
    random_of = random.Random(seed)
    scale = 10 ** random_of.uniform(1, 13)

    def time_ns() -> float:
        return random_of.choice((0.0, random_of.random() * scale))

    shares = []
    for rank in sorted(random_of.sample(range(100), random_of.randrange(12))):
        work = {name: time_ns() for name in random_of.sample([*PHASES, "a phase of later"], 4)}
        moved = {
            name: Moving(
                time_ns(),
                time_ns(),
                time_ns(),
                time_ns(),
                time_ns(),
                random_of.random() * 9,
                {random_of.randrange(99): time_ns()},
            )
            for name in random_of.sample([*PURPOSES, "[bold]a purpose of later"], random_of.randrange(4))
        }
        step = sum(work.values()) + sum(each.exposed_ns for each in moved.values())
        shares.append(Share(rank, random_of.randrange(3), random_of.randrange(2), step, work, moved))
    found = Breakdown(tuple(shares), {"a": (0.0, 0.0), "b": (time_ns(), time_ns())}, ("a [problem]",), ("a <note>",))
    records = [profiled.record(rank, 200, steps=random_of.randrange(4)) for rank in random_of.sample(range(100), 3)]
    for each in records:
        each.samples = [one for one in each.samples if random_of.random() < 0.7]
    shown = report.text(found, records)
    assert (
        "nan" not in shown and max(len(line) for line in shown.splitlines()[1:] if not line.startswith("Next: ")) <= 80
    )
    page = report.page(found, records)
    assert page.answer.startswith(shown.split(" ")[0])
    for picture in pictures(found, records).values():
        if isinstance(picture.chart, Timeline):
            for drawing in re.findall(r"<svg.*?</svg>", timeline.both_widths(picture.chart, picture.see), re.DOTALL):
                xml.etree.ElementTree.fromstring(drawing)
        else:
            assert isinstance(picture.chart, Bars | Lines)
    if seed < 3:
        assert "nan" not in render(page)


def test_what_a_trace_of_a_device_says(tmp_path: pathlib.Path) -> None:
    """From the file to the page: the moments of a step are drawn with the waits of its record."""
    (tmp_path / "t.json").write_text(json.dumps(profiled.cuda_trace()))
    records = load(tmp_path / "t.json")
    assert isinstance(records, list)
    found = Breakdown((Share(0, 2, 2, 100.0 * MS, {"backward": 90.0 * MS}, moving(wire_ms=10)),))
    chart = pictures(found, records)["moments"].chart
    assert isinstance(chart, Timeline)
    thread = chart.rows[0].stretches
    assert sum(each.end - each.start for each in thread if each.colour == steps.WIRE) == pytest.approx(10)
    assert (
        report.page(found, records).setting
        == "1 rank on 1 host (torch.profiler, nccl); mean of 2 steps, 2 of them seen by torch's profiler."
    )


# ------------------------------------------------------------------------------------------------------------ the timeline


def test_a_timeline_of_many_stretches_stays_small() -> None:
    """100,000 stretches in a row make drawings of less than 400 kB together, since what is thinner than a pixel joins its
    neighbour; what leaves the axis is cut off."""
    stretches = [Stretch(i, i + 0.5, f"grey-{i // 50 % 3 + 1}") for i in range(100_000)]
    chart = Timeline(Axis("time", "ms"), 90_000.0, [Row("<a>", stretches), Row("empty", [])])
    text = timeline.both_widths(chart, 'what "it" is')
    assert len(text) < 400_000
    wide, narrow = (xml.etree.ElementTree.fromstring(each) for each in re.findall(r"<svg.*?</svg>", text, re.DOTALL))
    assert wide.attrib["aria-label"] == 'what "it" is' and wide.attrib["role"] == "img"
    right = max(float(x) for x in re.findall(r"M([\d.]+) ", text[: text.index("</svg>")]))
    assert right <= 820 and narrow.attrib["viewBox"].startswith("0 0 390")
    timeline.both_widths(Timeline(Axis("time", "ms"), 0.0, []), "nothing")


def test_units_fit() -> None:
    """One for all times of a table."""
    assert [unit(each).name for each in (5e2, 2e6, 9.9e9, 1e10)] == ["µs", "ms", "ms", "s"]
    assert [unit(1e6).text(each) for each in (1234.5e6, 12.345e6, 1.2345e6, 0)] == ["1,234", "12.3", "1.23", "0.00"]


def test_a_receive_waits_for_its_send() -> None:
    """The timeline joins the two ends of a transfer by sender and receiver, not by name; and a send waits for nobody."""
    records = profiled.records(4)[::2]  # of one host
    for each, name, peer, start in zip(records, ("isend", "recv"), (2, 0), (30, 10), strict=True):
        begin = each.steps[-1].start_ns
        told = Operation(name, "pp", 0, begin + start * MS, begin + 50 * MS, 8, 2, peer, "")
        each.samples = [dataclasses.replace(each.samples[-1], operations=(told,))]
        each.steps[-1] = each.steps[-1]._replace(waits=(Wait(begin + 10 * MS, begin + 50 * MS),))
    chart = pictures(profiled.breakdown(3, None), records)["moments"].chart
    assert isinstance(chart, Timeline)
    sender, receiver = (
        {each.colour: each.end - each.start for each in row.stretches} for row in chart.rows if row.label == "network"
    )
    assert sender == pytest.approx({steps.WIRE: 20})
    assert receiver == pytest.approx({steps.WAIT: 20, steps.WIRE: 20})
