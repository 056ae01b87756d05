"""Reports: what their pages hold, and what a real browser makes of them, wide and narrow, light and dark."""

from __future__ import annotations

import dataclasses
import errno
import functools
import itertools
import os
import pathlib
import re
import stat
import xml.etree.ElementTree
from collections.abc import Callable
from typing import Any

import pytest

import browser
from characterized import CELL, as_in_the_paper, outcome
from penstock import files, numbers
from penstock.cluster import generate
from penstock.cluster.network import Cluster
from penstock.planning import baselines
from penstock.planning.evaluate import evaluate
from penstock.planning.problem import Problem
from penstock.profiling.breakdown import Breakdown, Moving, Share
from penstock.reports import (
    Axis,
    Bar,
    Bars,
    Column,
    Curve,
    Key,
    Level,
    Line,
    Lines,
    Network,
    Next,
    Page,
    Panel,
    Part,
    Picture,
    Section,
    Table,
    Timeline,
    charts,
    drawing,
    render,
    series,
    ticks,
)
from penstock.tools.bench import (
    emulated,
    endpoints,
    figure1,
    figures,
    machine,
    pauses,
    planner,
    readiness,
    threads,
    training,
    tuner,
    urgency,
)
from penstock.tools.bench import report as bench_report
from penstock.tools.bench.aggregated import times
from penstock.tools.characterize import memory
from penstock.tools.characterize import report as matrix_report
from penstock.tools.demo import report as demo_report
from penstock.tools.demo.comparison import Comparison
from penstock.tools.plan import explained
from penstock.tools.profile import report as profile_report
from penstock.tools.testbed import LinkSpec
from penstock.training.tune import Setting
from profiled import breakdown, records
from samples import ABOUT, bench_outcome, tuned_comparison

LINK = LinkSpec(rate_mbit=1000, flow_mbit=200)


def bench_page(*arguments: Any, **options: Any) -> Page:
    return bench_report.page(bench_outcome(*arguments, **options), ABOUT, {"mpi": "mpirun is not on PATH"})


def on_loopback() -> Comparison:
    whole = tuned_comparison(9.0, falls=True)
    plain = [
        dataclasses.replace(each, link_share=None, flow_classes=None, prediction=None, sent_bytes_per_step=1e3)
        for each in whole.results
    ]
    return dataclasses.replace(whole, link=None, results=tuple(plain))


STRAYED = "at step 2, rank 1 has a loss of 3.6 with gloo and of 3.6000000000000005 with penstock"


def training_page() -> Page:
    ways = [
        training.Way(
            name,
            seconds,
            [seconds * (0.9 + i / 40) for i in range(9)],
            0.06,
            {"steps": 30, "rounds": 90, "buckets": 60},
        )
        for name, seconds in (("ddp", 0.131), ("hook", 0.0921), ("reducer", 0.0955), ("gloo", 0.214))
    ]
    return training.Outcome("char-gpt", 4, 2, 52, 10_827_264, 0.0871, 0.055, 0.052, 0.081, 0.0899, ways).page(
        LINK, ABOUT
    )


def losses_page() -> Page:
    losses = {
        way: [4.0 * 0.99**i + apart for i in range(200)] for way, apart in (("hook", 0.0), ("hook-float16", 0.001))
    }
    return training.Lesson(2, losses).page(None, ABOUT)


def tuner_page() -> Page:
    setting = Setting(16, 1 << 20, "auto")
    outcomes = [
        tuner.Outcome(
            link=link.describe(),
            grid=25,
            space=25,
            best=setting,
            best_s=0.081,
            untuned_s=0.112,
            default=tuner.Choice(setting, 60, setting, 0.0822, 0.012),
            remembered=tuner.Choice(setting, 20, setting, 0.0815, 0.004),
            turns=[],
            tunings=[],
        )
        for link in tuner.LINKS.values()
    ]
    return tuner.page(outcomes, "linear", 4, ABOUT)


def readiness_page() -> Page:
    return readiness.Outcome(
        ranks=8,
        tensors=500,
        step_s=0.2,
        rounds=9.0,
        round_s=0.001,
        last_s=0.0012,
        told_s=0.197,
        buckets=12.0,
        told_buckets=11.0,
        turn_costs=[0.01, 0.02],
        sent=[100] * 8,
        received=[100] * 8,
    ).page(LINK, ABOUT)


def aggregated_page() -> Page:
    rows = [
        times.Row(workers, loss, way, seconds * (1 + 9 * loss), 16 << 20, 1.02, 1.02, 0.6, 250.0)
        for workers, loss in itertools.product((2, 4), (0.0, 0.01))
        for way, seconds in (("ring", 0.82), ("gloo", 0.95), ("server", 1.4), ("int32", 0.58), ("float32", 0.61))
    ]
    return times.page(rows, ABOUT)


def figures_page() -> Page:
    found = [
        figures.Finding("capped", "penstock-tcp, share of the link's payload rate", 0.93, 0.9, "%", ">="),
        figures.Finding("capped", "penstock-tcp, times as fast as gloo", 4.7, 4.5, "x", ">="),
        figures.Finding("uneven", "control: raw sockets, equal split over 8 flows", 0.5, 0.48, "%", "~"),
        figures.Finding("latency", "penstock-tcp, time in gloo's", 1.4, 1.25, "x", "<="),
        figures.Finding("memory", "what the engine reports, a rank", None, 64, " MiB", "<="),
    ]
    return figures.page(found, ABOUT)


def plan_page(cluster: Cluster) -> Page:
    (job,) = cluster.jobs
    scheme = baselines.hierarchical(Problem(cluster, job))
    return explained.page(explained.Explained(cluster, job, scheme, evaluate(cluster, job, scheme), 1e9), "plan.yaml")


def leaf_spine() -> Cluster:
    return generate.leaf_spine(4, 2, 6, servers=2, rate_bit_s=10**9)


def urgency_page() -> Page:
    rows = [
        urgency.Row(case, "penstock", nbytes, way, 100, seconds, 1.5 * seconds, 0.002, None if way == "alone" else 0.99)
        for case in ("same rank", "neighbour", "other host", "aggregated")
        for nbytes in (64 << 10, 8 << 20)
        for way, seconds in (("alone", 0.002), ("usual", 0.212), ("urgent", 0.0061))
    ]
    return emulated.page(urgency.story(rows), urgency.table(rows), LINK, ABOUT)


def pauses_page() -> Page:
    after = ["no pause", "a pause of 0.3 s", "a pause of 1 s", "the one after that", "number 1 of 5", "number 2 of 5"]
    rows = [
        pauses.Row(backend, 64 << 20, each, 20, 0.59 + index / 50, 0.7, 0.59)
        for backend in ("penstock", "gloo")
        for index, each in enumerate(after)
    ]
    return emulated.page(pauses.story(rows), pauses.table(rows), LINK, ABOUT)


def threads_page() -> Page:
    rows = [
        threads.Row(what, count, 0.02 / count, [0.31] * count, *((0.041, 0.0123) if count > 1 else (None, None)), 3e9)
        for what in ("send", "receive", "all-reduce")
        for count in (1, 2, 4)
    ]
    return threads.page(rows, ABOUT)


def bench_plan_page() -> Page:
    rows = [
        planner.Row(
            uneven, workers, servers, seed, way, 1e6 * servers * (9 - at) / (1 + workers / 20), 2.5 * workers, 3.0, 0.1
        )
        for uneven in (False, True)
        for workers, servers in ((10, 4), (50, 4), (48, 2), (48, 6))
        for seed in (0, 1)
        for at, way in enumerate(planner.WAYS)
    ]
    return planner.page(rows, [], [figure1.example()], ABOUT)


def endpoints_page() -> Page:
    rows = [
        endpoints.Row(workers, way, carrier, 64 << 20, 3, seconds * workers, seconds * workers * 1.1, 0.6 * workers)
        for workers in (1, 4)
        for way in ("push", "pull", "both")
        for carrier, seconds in zip(endpoints.CARRIERS, (0.61, 0.6, 0.58), strict=True)
    ]
    return emulated.page(endpoints.story(rows), endpoints.table(rows), LINK, ABOUT)


def sums_page() -> Page:
    """Of a file of another tool that has no steps."""
    moved = {"all_reduce": Moving(hidden_wire_ns=2e7, bytes=1e10, operations=10)}
    return profile_report.page(Breakdown((Share(0, 0, 0, 0.0, {}, moved),), notes=("A note.",)), [])


LARGEST = {memory.Kind("gpt2-tiny", "pipeline", 2, 4, 0): memory.Limit(32, 2048)}

SIZES = [1024 * 4**power for power in range(10)]

PAGES: dict[str, Callable[[], Page]] = {
    "demo": lambda: demo_report.page(tuned_comparison(1.5, falls=True)),
    "demo on loopback": lambda: demo_report.page(on_loopback()),
    "demo of one": lambda: demo_report.page(dataclasses.replace(on_loopback(), results=on_loopback().results[:1])),
    "demo with a problem": lambda: demo_report.page(dataclasses.replace(on_loopback(), disagreements=(STRAYED,))),
    "bench sizes": lambda: bench_page(SIZES, [2, 3, 4]),
    "bench link": lambda: bench_page(SIZES[-4:], [2], link=LINK),
    "bench one size": lambda: bench_page([64 << 20], [2, 4]),
    "bench barrier": lambda: bench_page([4], [2, 3], collective="barrier"),
    "training": training_page,
    "losses": losses_page,
    "tuner": tuner_page,
    "readiness": readiness_page,
    "aggregated": aggregated_page,
    "figures": figures_page,
    "plan": lambda: plan_page(leaf_spine()),
    "plan of a fat-tree": lambda: plan_page(generate.fat_tree(6, servers=4, seed=1, rate_bit_s=10**9)),
    "bench plan": bench_plan_page,
    "urgency": urgency_page,
    "pauses": pauses_page,
    "endpoints": endpoints_page,
    "threads": threads_page,
    "profile": lambda: profile_report.page(breakdown(4), records(4)),
    "profile of many": lambda: profile_report.page(breakdown(64, 17), records(64)),
    "profile of sums": sums_page,
    "characterize": lambda: matrix_report.page(as_in_the_paper(), "matrix.runs", LARGEST),
    "characterize one cell": lambda: matrix_report.page([outcome(CELL)], "matrix.runs", {}),
    "characterize compare": lambda: matrix_report.comparison(as_in_the_paper(), as_in_the_paper(), "a", "b"),
}


@functools.cache
def rendered(name: str) -> str:
    """One of `PAGES` as HTML."""
    return render(PAGES[name]())


# ------------------------------------------------------------------------------------------------------- what they hold


@pytest.mark.parametrize("name", PAGES)
def test_a_page_stands_alone(name: str) -> None:
    """No script, nothing to fetch; every chart twice, well-formed, with identifiers of its own and colours of the stylesheet."""
    page, text = PAGES[name](), rendered(name)
    assert not re.search(r'<(script|link|img|iframe)\b|@import|url\((?!#)|(src|href)="(?!#)', text)
    pictures = [page.picture, *(each for part in page.sections for each in part.blocks if isinstance(each, Picture))]
    drawings = re.findall(r"<svg .*?</svg>", text, re.DOTALL)
    assert re.findall(r'<svg class="(\w+)"', text) == ["wide", "narrow"] * len(pictures)
    identifiers = []
    for each in drawings:
        with_names = each.replace("<svg ", '<svg xmlns:xlink="http://www.w3.org/1999/xlink" ', 1)
        tree = xml.etree.ElementTree.fromstring(with_names)
        identifiers += [element.get("id") for element in tree.iter() if element.get("id")]
        assert not re.search(r"#[0-9a-f]{6}\b", re.sub(r'(href="|url\()#\w+', "", each)), "a colour of its own"
    assert len(identifiers) == len(set(identifiers))


@pytest.mark.parametrize("name", PAGES)
def test_every_axis_has_a_unit(name: str) -> None:
    """In its label, or in each of its tick labels."""
    page = PAGES[name]()
    pictures = [page.picture, *(each for part in page.sections for each in part.blocks if isinstance(each, Picture))]
    for picture in pictures:
        chart = picture.chart
        assert picture.see.endswith(".") and picture.how.endswith("."), picture.name
        if isinstance(chart, Network):
            continue
        axes = (
            [chart.axis]
            if isinstance(chart, Bars | Timeline)
            else [axis for panel in chart.panels for axis in (panel.x, panel.y)]
        )
        for axis in axes:
            assert axis.unit or axis.text is numbers.size, axis


def test_a_number_of_the_bench_has_one_source() -> None:
    """The answer, the caption and the chart say what the table says."""
    outcome = bench_outcome([64 << 20], [2])
    table = bench_report.table(outcome.rows, outcome.series, "")
    heads = [" ".join(column.head.split()) for column in table.columns]
    lines = {line.cells[0]: dict(zip(heads, line.cells, strict=True)) for line in table.lines}
    told = bench_report.answer(outcome)
    assert told == (
        f"all-reduce of 64 MiB, 2 ranks: penstock-empty is {lines['penstock-empty']['vs gloo']} as fast as gloo, at "
        f"{lines['penstock-empty']['of limit']} of the limit"
    )
    caption = bench_report.picture(outcome).see
    assert all(f"{label} {lines[label]['median']}" in caption for label in ("penstock-empty", "gloo")), caption
    assert f"the limit (copy) {lines['copy']['median']}" in caption, caption
    chart = bench_report.chart(outcome, [2])
    assert isinstance(chart, Bars)
    assert {bar.label: bar.told for bar in chart.bars} == {
        label: f"{cells['median']}, {cells['busbw GB/s']} GB/s" for label, cells in lines.items()
    }


def test_the_terminal_and_the_page_have_the_same_cells() -> None:
    """Groups become columns on the terminal and headings on the page; what a user named is escaped."""
    columns = [Column("series", is_text=True), Column("of\nlimit", meaning="what it means")]
    lines = [Line(["a<b", "1%"], ("2",)), Line(["c", "2%"], ("2",), "best"), Line(["a<b", "3%"], ("3",), "aside")]
    table = Table("it", columns, lines, [Column("ranks")])
    shown = table.for_terminal()
    assert [list(map(str, column.cells)) for column in shown.columns] == [
        ["2", "", "3"],
        ["a<b", "c", "a<b"],
        ["1%", "2%", "3%"],
    ]
    text = table.html()
    assert re.findall(r'rowgroup"><span>(.*?)<', text) == ["ranks 2", "ranks 3"]
    assert re.findall(r'scope="row">(.*?)</th><td>(.*?)<', text) == [("a&lt;b", "1%"), ("c", "2%"), ("a&lt;b", "3%")]
    assert "<dt>of limit</dt><dd>what it means</dd>" in text


def test_a_demo_that_proves_nothing_says_so_first() -> None:
    """Where trainings differ, the headline speaks of no speed-up, the problem stands above the picture, and the next step looks
    for the cause."""
    text = rendered("demo with a problem")
    assert "<h1>These figures are worthless" in text and STRAYED in text[: text.index("<svg")]
    assert "<span>doctor</span>" in text and "lie on each other" not in text
    assert "The trainings differ" in text and "The training is the same" not in text


def test_charts_can_be_files() -> None:
    """SVG, PNG and PDF, in the light colours; names with dollar signs are no formulae."""
    chart = Bars(
        Axis("time", "ms"), [Bar("$a$", [Part(1.0, "series-1")], "1 ms"), Bar("$b", [Part(2.0, "grey-2")], "2 ms")]
    )
    text = drawing.file(chart, ".svg", "$c$").decode()
    assert all(f">{name}<" in text for name in ("$a$", "$b", "$c$"))
    assert drawing.light_colours()["series-1"] in text and "var(" not in text
    assert drawing.file(chart, ".png", "it").startswith(b"\x89PNG")
    assert drawing.file(chart, ".pdf", "it").startswith(b"%PDF")


def test_a_picture_has_the_colours_of_both_modes() -> None:
    """For a page without the stylesheet: well-formed, and each variable that it uses has a light and a dark value."""
    chart = Bars(Axis("time", "ms"), [Bar("a", [Part(1.0, "series-1")], "1 ms")])
    text = drawing.picture(chart, 'one "bar"')
    assert xml.etree.ElementTree.fromstring(text).attrib["aria-label"] == 'one "bar"'
    used = set(re.findall(r"var\(--([a-z0-9-]+)\)", text))
    light, dark = re.findall(r":root\{(.*?)\}", text)
    for block, colours in ((light, palettes()["light"]), (dark, palettes()["dark"])):
        assert dict(re.findall(r"--([a-z0-9-]+):(#\w+)", block)) == {name: colours[name] for name in used}


# ------------------------------------------------------------------------------------------------------ ticks and numbers


def test_ticks_are_round_and_few() -> None:
    """Over many ranges: at most as many as there is room for, at least two, round, within the range."""
    assert ticks.linear(0, 200, 5) == [0, 50, 100, 150, 200] and ticks.linear(0, 1, 3) == [0, 0.5, 1]
    assert ticks.logarithmic(0.01, 10, 5) == [0.01, 0.1, 1, 10]
    assert ticks.logarithmic(1, 10, 5) == [1, 2, 5, 10]
    assert ticks.logarithmic(1e-6, 1e6, 5) == [1e-6, 1e-3, 1, 1e3, 1e6]
    assert ticks.logarithmic(3, 4, 5) == pytest.approx([3, 3.5, 4]) or len(ticks.logarithmic(3, 4, 5)) >= 2
    for low, span, most in itertools.product((0.0, 0.013, 7.0, 123.4), (0.0031, 1.0, 47.0, 8000.0), range(2, 9)):
        found = ticks.linear(low, low + span, most)
        assert 1 <= len(found) <= most and all(low - 1e-9 <= each <= low + span * (1 + 1e-9) for each in found)
        found = ticks.logarithmic(low + 0.001, low + 0.001 + span, most)
        assert 1 <= len(found) <= most, (low, span, most, found)
    assert ticks.apart([1, 2, 4, 8], [0, 10, 20, 30], 15) == [1, 4]


@pytest.mark.parametrize(
    ("said", "want"),
    [
        (numbers.number(0.30000000000000004), "0.3"),
        (numbers.number(1_000_000), "1,000,000"),
        (numbers.number(0.00001), "0.00001"),
        (numbers.number(-0.0), "0"),
        (numbers.duration(0.00099999), "1 ms"),
        (numbers.duration(0.0881), "88.1 ms"),
        (numbers.duration(1234), "1234 s"),
        (numbers.size(64 << 20), "64 MiB"),
        (numbers.size(1000), "1000 B"),
        (numbers.size(5 << 40), "5 TiB"),
        (numbers.traffic(20.4e9), "20.4 GB"),
        (numbers.byte_rate(999_600), "1 MB/s"),
        (numbers.byte_rate(12), "12 B/s"),
        (numbers.bit_rate(422.222e6), "422.2 Mbit/s"),
        (numbers.bit_rate(9_999_400_000), "9999 Mbit/s"),
        (numbers.bit_rate(9_999_600_000), "10 Gbit/s"),
        (numbers.bit_rate(12_345e9), "12345 Gbit/s"),
        (numbers.bit_rate(float("inf")), "unlimited"),
        (numbers.share(0.956), "96%"),
        (numbers.change(0.0123), "+1.2%"),
        (numbers.times(4.605), "4.61 ×"),
        (numbers.plural(1, "rank"), "1 rank"),
    ],
)
def test_numbers_are_written_as_people_write_them(said: str, want: str) -> None:
    """No exponents, no noise of floating point, and a unit."""
    assert said == want


# --------------------------------------------------------------------------------------------------------------- colours


def palettes() -> dict[str, dict[str, str]]:
    """The stylesheet's colours, light and dark."""
    text = drawing.STYLE.read_text()
    blocks = re.findall(r":root \{(.*?)\}", text, re.DOTALL)
    found = [dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6});", block)) for block in blocks]
    assert len(found) == 2 and found[0].keys() == found[1].keys() and found[0] == drawing.light_colours()
    return {"light": found[0], "dark": found[1]}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_have_contrast(scheme: str) -> None:
    """WCAG 2.1 AA: 4.5 for text on the page and on panels, 3 for what charts are drawn in."""
    colours = palettes()[scheme]
    for name in ("ink", "soft", "bad"):
        assert min(contrast(colours[name], colours[ground]) for ground in ("paper", "panel")) >= 4.5, name
    for name in colours:
        if name.startswith(("series", "grey")):
            assert contrast(colours[name], colours["paper"]) >= 3, name


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colour_blind_people_can_tell_the_series_apart(scheme: str) -> None:
    """Any two are 15 apart in CIELAB, about seven times what is just noticed, under each kind of dichromacy (Machado, Oliveira
    and Fernandes 2009, severity 1); and each has a marker and dashes of its own beside its colour."""
    colours = [palettes()[scheme][f"series-{index + 1}"] for index in range(charts.COLOURS)]
    for kind, matrix in DICHROMACY.items():
        seen = [lab([sum(map(float.__mul__, row, linear(colour))) for row in matrix]) for colour in colours]
        for (i, one), (j, other) in itertools.combinations(enumerate(seen, start=1), 2):
            apart = sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) ** 0.5
            assert apart >= 15, f"{kind}: series {i} and {j} are {apart:.1f} apart"
    looks = [series(index) for index in range(charts.COLOURS)]
    for part in ("colour", "marker", "dashes"):
        assert len({getattr(look, part) for look in looks}) == len(looks), part


DICHROMACY = {
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}


def linear(colour: str) -> list[float]:
    """Red, green and blue as light, of ``#rrggbb``."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def contrast(one: str, other: str) -> float:
    light = sorted(sum(map(float.__mul__, (0.2126, 0.7152, 0.0722), linear(colour))) for colour in (one, other))
    return (light[1] + 0.05) / (light[0] + 0.05)


def lab(light: list[float]) -> tuple[float, float, float]:
    """CIELAB of sRGB light, D65."""
    red, green, blue = (min(max(part, 0.0), 1.0) for part in light)
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.95047
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.08883
    a, b, c = (part ** (1 / 3) if part > 0.008856 else 7.787 * part + 16 / 116 for part in (x, y, z))
    return 116 * b - 16, 500 * (a - b), 200 * (b - c)


# ----------------------------------------------------------------------------------------------------------------- files


def test_a_file_is_written_whole_and_for_all(tmp_path: pathlib.Path) -> None:
    """Its mode follows the umask, as a browser of another user needs it; where writing fails, what was there stays."""
    path = tmp_path / "folder" / "report.html"
    before = os.umask(0o022)
    try:
        files.write_whole(path, "é")
    finally:
        os.umask(before)
    assert path.read_text(encoding="utf-8") == "é" and stat.S_IMODE(path.stat().st_mode) == 0o644
    with pytest.raises(TypeError):
        files.write_whole(path, 3)  # type: ignore[arg-type]
    assert path.read_text(encoding="utf-8") == "é" and [each.name for each in path.parent.iterdir()] == ["report.html"]


def test_links_and_devices_are_written_to_and_not_replaced(tmp_path: pathlib.Path) -> None:
    """``--json /dev/stdout`` must not put a file in its place, and of a link the file behind it is replaced, or made."""
    (tmp_path / "target").write_text("before")
    (tmp_path / "link").symlink_to("target")
    files.check_writable(tmp_path / "link")
    files.write_whole(tmp_path / "link", "after")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_text() == "after"
    (tmp_path / "dangling").symlink_to("absent")
    files.check_writable(tmp_path / "dangling")
    files.write_whole(tmp_path / "dangling", b"bytes")
    assert (tmp_path / "dangling").is_symlink() and (tmp_path / "absent").read_bytes() == b"bytes"
    files.write_whole(pathlib.Path(os.devnull), "x")
    assert not pathlib.Path(os.devnull).is_file()


def test_a_full_disk_is_found_before_the_work(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is left of the attempt."""

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        files.check_writable(tmp_path / "report.html")
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------------- a real browser


SCREENS = {"wide": (1280, 800), "narrow": (420, 900)}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("screen", SCREENS)
@pytest.mark.parametrize("name", PAGES)
def test_a_page_can_be_read(
    window: browser.Browser, tmp_path: pathlib.Path, name: str, screen: str, scheme: str
) -> None:
    """The page itself does not scroll sideways. On the first screen are the answer, the picture and the next step. One drawing of
    each chart is there, of its own width; no text is below 11 pixels or of weak contrast; texts of a drawing lie within it and
    not on each other."""
    path = tmp_path / "page.html"
    path.write_text(rendered(name), encoding="utf-8")
    width, height = SCREENS[screen]
    window.open(path, width, height, scheme)
    if folder := os.environ.get("REPORT_PICTURES"):
        stem = f"{name.replace(' ', '-')}-{screen}-{scheme}"
        pathlib.Path(folder, f"{stem}.png").write_bytes(window.picture())
    seen = window.evaluate(MEASURE)
    assert seen["scheme"] == scheme and seen["inner"] == width
    check_layout(seen, width)
    for part in ("answer", "picture", "next"):
        assert 0 <= seen["first"][part] <= height, f"{part} ends at {seen['first'][part]:.0f} of {height}"
    assert seen["drawings"]
    for each in seen["drawings"]:
        assert each["form"] == screen
        assert each["width"] > 0.9 * min(drawing.WIDTHS_PX[screen], width - 30) and each["height"] > 60, each
    assert seen["texts"]
    for text in seen["texts"]:
        assert text["px"] >= 11, text
        large = text["px"] >= 24 or (text["px"] >= 18.66 and text["weight"] >= 700)
        assert contrast(text["colour"], text["ground"]) >= (3 if large else 4.5), text


def check_layout(seen: dict[str, Any], width: int) -> None:
    """Nothing leaves the page or its drawing, and no text of a drawing lies on another."""
    assert seen["page_width"] <= width, "the page scrolls sideways"
    assert not seen["cut"], f"these are cut off: {seen['cut']}"
    in_drawings = [text for text in seen["texts"] if text["drawing"] is not None]
    for text in in_drawings:
        frame = seen["drawings"][text["drawing"]]
        assert frame["left"] - 1 <= text["left"] and text["right"] <= frame["left"] + frame["width"] + 1, text
        assert frame["top"] - 1 <= text["top"] and text["bottom"] <= frame["top"] + frame["height"] + 1, text
    for one, other in itertools.combinations(in_drawings, 2):
        apart = (
            one["right"] <= other["left"] + 1
            or other["right"] <= one["left"] + 1
            or one["bottom"] <= other["top"] + SLACK_PX
            or other["bottom"] <= one["top"] + SLACK_PX
        )
        assert apart or one["drawing"] != other["drawing"], f"{one['text']!r} lies on {other['text']!r}"


@pytest.mark.parametrize("width", [360, 740, 741])
def test_texts_keep_their_size_at_every_width(window: browser.Browser, tmp_path: pathlib.Path, width: int) -> None:
    """On a small phone, and on either side of where the stylesheet changes from one drawing to the other."""
    path = tmp_path / "page.html"
    path.write_text(rendered("demo"), encoding="utf-8")
    window.open(path, width, 800, "light")
    seen = window.evaluate(MEASURE)
    assert seen["page_width"] <= width
    assert {each["form"] for each in seen["drawings"]} == {"narrow" if width <= 740 else "wide"}
    assert min(text["px"] for text in seen["texts"]) >= 11


def test_a_page_of_long_names_stays_in_shape(window: browser.Browser, tmp_path: pathlib.Path) -> None:
    """What users name may be long; it is broken or scrolls, and is not cut."""
    long = "a-variant-with-a-very-long-name-that-somebody-chose"
    looks = [series(index) for index in range(3)]
    bars = Bars(
        Axis("time", "ms"),
        [
            Bar(f"{long}-{i}", [Part(i + 1.0, look.colour)], f"{i + 1} ms", heading="a heading" * (i % 2))
            for i, look in enumerate(looks)
        ],
        [Key(f"{long[:30]}-{i}", look.colour, is_hollow=i == 1) for i, look in enumerate(looks)],
        Level(2.5, "a level"),
    )
    steps = range(1, 60)
    curves = [
        Curve(f"{long}-{i}", steps, [i + x / 10 for x in steps], look, end=f"{i} s") for i, look in enumerate(looks)
    ]
    lines = Lines([Panel("one", Axis("trained for", "steps"), Axis("loss", "nats"), curves)] * 2)
    columns = [Column("name", is_text=True), *(Column(f"column {i}") for i in range(12))]
    table = Table("t", columns, [Line([long, *["123.4 ms"] * 12])])
    whole = Page(
        kind="Kind",
        answer=long,
        picture=Picture("bars", bars, "See.", "How."),
        next=Next("Do.", long * 3),
        setting=long,
        problems=[long],
        sections=[Section(long, [Picture("lines", lines, "See.", "How."), table])],
    )
    path = tmp_path / "page.html"
    path.write_text(render(whole), encoding="utf-8")
    for screen, (width, height) in SCREENS.items():
        window.open(path, width, height, "light")
        if folder := os.environ.get("REPORT_PICTURES"):
            pathlib.Path(folder, f"long-{screen}.png").write_bytes(window.picture())
        check_layout(window.evaluate(MEASURE), width)


def test_the_conditions_are_those_of_the_machine() -> None:
    """What `describe` reads here, `lines` can tell."""
    told = machine.lines(machine.describe())
    assert [line.partition(":")[0] for line in told] == ["Date", "Machine", "System", "Versions"]


SLACK_PX = 4
"""Of a line's height, which is more than what its letters take."""

MEASURE = r"""
(() => {
  const hex = colour => '#' + colour.match(/[\d.]+/g).slice(0, 3).map(part => (+part).toString(16).padStart(2, '0')).join('');
  const ground = element => {
    for (let at = element; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if (colour !== 'rgba(0, 0, 0, 0)' && colour !== 'transparent') return hex(colour);
    }
    return '#ffffff';
  };
  const drawings = [...document.querySelectorAll('svg')].filter(each => each.getBoundingClientRect().width > 0);
  const texts = [], cut = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode, element = node.parentElement;
    if (!node.data.trim() || !element.checkVisibility()) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const box = range.getBoundingClientRect(), style = getComputedStyle(element), svg = element.closest('svg');
    const shown = svg ? element.getScreenCTM() : {a: 1, b: 0};
    const scale = Math.hypot(shown.a, shown.b);  // also of texts that are turned
    const drawing = svg ? drawings.indexOf(svg) : null;
    texts.push({
      text: node.data.trim().slice(0, 60), px: parseFloat(style.fontSize) * scale, weight: +style.fontWeight,
      colour: hex(svg ? style.fill : style.color), ground: ground(svg ? svg.parentElement : element), drawing,
      left: box.left, right: box.right, top: box.top + scrollY, bottom: box.bottom + scrollY,
    });
    const may_scroll = svg || element.closest('.scroll, pre');
    if (!may_scroll && (box.right > innerWidth || box.left < 0)) cut.push(node.data.trim().slice(0, 60));
  }
  const bottom = selector => document.querySelector(selector)?.getBoundingClientRect().bottom ?? null;
  const first = drawings[0].getBoundingClientRect();
  return {
    scheme: matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light', inner: innerWidth,
    page_width: document.documentElement.scrollWidth, texts, cut,
    first: {answer: bottom('h1'), picture: first.bottom, next: bottom('.next')},
    drawings: drawings.map(each => {
      const box = each.getBoundingClientRect();
      return {form: each.classList[0], left: box.left, top: box.top + scrollY, width: box.width, height: box.height};
    }),
  };
})()
"""
