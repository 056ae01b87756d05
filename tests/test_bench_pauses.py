"""`penstock bench pauses`: what it makes of what ranks say, what it refuses, and a run of it."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

import pytest
from click.testing import CliRunner

from penstock.tools.bench import pauses as bench
from penstock.tools.testbed import Testbed


def test_what_the_bench_makes_of_what_ranks_say() -> None:
    """The slower rank counts; what follows a pause at once, and the first of a group, are rows of their own."""

    def said(factor: float) -> list[dict[str, Any]]:
        lengths = [(0.0, 1.0, 1.1), (1.0, 1.5, 1.2), (0.0, 1.2, 1.0), (1.0, 1.7, 1.4), (0.0, 1.1, 1.0)]
        records: list[dict[str, Any]] = [
            {"pause_s": pause, "seconds": factor * seconds, "next_s": factor * then} for pause, seconds, then in lengths
        ]
        return [
            {"of": "the job", "first_s": [factor * 9.0]},
            *records,
            {"of": "a group", "first_s": [factor * 3.0, factor]},
        ]

    rows = {row.after: row for row in bench.summarise([said(1.0), said(2.0)], "penstock", 64 << 20)}
    assert list(rows)[:3] == ["no pause", "a pause of 1 s", "the one after that"]
    assert list(rows)[3:] == ["number 1 of a group", "number 1 of the job", "number 2 of a group"]
    assert [row.samples for row in rows.values()] == [3, 2, 2, 1, 1, 1]
    medians = [row.median_s for row in rows.values()]
    assert medians == pytest.approx([2.2, 3.2, 2.6, 6.0, 18.0, 2.0])
    assert rows["a pause of 1 s"].worst_s == pytest.approx(3.4)
    assert rows["number 1 of a group"].ratio == pytest.approx(6.0 / 2.2)
    assert "2.727" in map(str, bench.table(list(rows.values())).for_terminal().columns[3]._cells)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--backends", "nccl"], "no backend nccl: there are penstock, gloo"),
        (["--pauses", "1,x"], "--pauses 1,x: give seconds, such as 0.3,1"),
        (["--pauses", "0,61"], "give seconds between 0 and 60"),
        (["--pauses", "-1"], "give seconds between 0 and 60"),
        (["--pauses", "nan"], "give seconds between 0 and 60"),
        (["--size", "2"], "2 bytes are no whole number of float32 elements"),
        (["--rate", "-5"], "rate_mbit=-5.0: give 0.1 to 400000 Mbit/s"),
        (["--turns", "0"], "0 is not in the range"),
    ],
)
def test_the_bench_refuses_before_it_makes_a_host(arguments: list[str], says: str) -> None:
    """In one line, without a traceback."""
    done = CliRunner().invoke(bench.command, arguments)
    assert done.exit_code == 2 and says in re.sub(r"\s+", " ", done.output), done.output


@pytest.mark.usefixtures("forks")
def test_the_bench_runs(tmp_path: pathlib.Path) -> None:
    """Both backends; without 0 among the pauses it is added. The report names what is worst."""
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    words = [
        "--size",
        "1M",
        "--pauses",
        "0.1",
        "--turns",
        "2",
        "--groups",
        "1",
        "--json",
        str(out),
        "--report",
        str(page),
    ]
    with Testbed(hosts=2):  # else this test is skipped
        pass
    done = CliRunner().invoke(bench.command, words)
    assert done.exit_code == 0, done.output
    rows = json.loads(out.read_text())["runs"]
    assert {(row["backend"], row["after"]) for row in rows} >= {
        (backend, after)
        for backend in ("penstock", "gloo")
        for after in ("no pause", "a pause of 0.1 s", "number 1 of a group")
    }
    assert all(0 < row["median_s"] <= row["worst_s"] for row in rows)
    assert "times as long as in use" in page.read_text()
