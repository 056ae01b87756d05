"""`penstock bench endpoints`: what it makes of what its processes say, what it refuses, and a run of it."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from penstock.tools.bench import endpoints as bench
from penstock.tools.bench import endpoints_rank
from penstock.tools.testbed import Testbed


def test_what_the_bench_makes_of_what_processes_say() -> None:
    """The slowest process of each turn counts; the share is that of raw sockets' median in the same way."""

    def said(factor: float) -> list[dict[str, Any]]:
        times = [("push", 0.5, 0.4), ("pull", 0.6, 0.6), ("push", 0.7, 0.6), ("pull", 0.8, 0.4)]
        return [
            {"way": way, "carrier": carrier, "seconds": factor * seconds}
            for way, ours, raw in times
            for carrier, seconds in (("penstock", ours), ("raw sockets", raw))
        ]

    rows = bench.summarise([said(0.1), said(1.0), said(0.9)], 1 << 20)
    assert [(row.workers, row.way, row.carrier, row.samples) for row in rows] == [
        (2, way, carrier, 2) for way in ("push", "pull") for carrier in ("penstock", "raw sockets")
    ]
    assert [row.median_s for row in rows] == pytest.approx([0.6, 0.5, 0.7, 0.5])
    assert [row.share for row in rows] == pytest.approx([0.5 / 0.6, 1, 0.5 / 0.7, 1])
    assert rows[0].rate == pytest.approx(2 * (1 << 20) / 0.6) and rows[0].worst_s == pytest.approx(0.7)
    assert "83.3%" in map(str, bench.table(rows).for_terminal().columns[6]._cells)
    assert "71% of raw sockets" in bench.story(rows).answer


def test_wrong_bytes_are_found() -> None:
    """Of another rank, of another turn, and a single one."""
    pattern = endpoints_rank._Pattern(5000)
    right = pattern.of(1, 2)
    pattern.check(right, 1, 2, "it")
    one = right.copy()
    one[4999] += np.uint8(1)
    for wrong in (pattern.of(2, 2), pattern.of(1, 3), one, right[:-1]):
        with pytest.raises(AssertionError, match="it in turn 2 has wrong bytes"):
            pattern.check(wrong, 1, 2, "it")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--workers", "0"], "--workers 0: give numbers from 1 to 32, such as 1,4"),
        (["--workers", "1,x"], "give numbers from 1 to 32"),
        (["--ways", "push,shove"], "no way shove: there are push, pull, both, sums"),
        (["--size", "x"], "give sizes such as"),
        (["--rate", "-5"], "rate_mbit=-5.0: give 0.1 to 400000 Mbit/s"),
        (["--streams", "65"], "65 is not in the range"),
    ],
)
def test_the_bench_refuses_before_it_makes_a_host(arguments: list[str], says: str) -> None:
    """In one line, without a traceback."""
    done = CliRunner().invoke(bench.command, arguments)
    assert done.exit_code == 2 and says in re.sub(r"\s+", " ", done.output), done.output


@pytest.mark.usefixtures("forks")
def test_the_bench_runs(tmp_path: pathlib.Path) -> None:
    """Two workers, all ways and carriers; the report names what is worst."""
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    words = ["--ways", ",".join(bench.WAYS), "--size", "1M", "--workers", "2", "--streams", "4", "--turns", "2"]
    with Testbed(hosts=2):  # else this test is skipped
        pass
    done = CliRunner().invoke(bench.command, [*words, "--json", str(out), "--report", str(page)])
    assert done.exit_code == 0, done.output
    rows = json.loads(out.read_text())["runs"]
    assert [(row["way"], row["carrier"]) for row in rows] == [
        (way, carrier) for way in bench.WAYS for carrier in bench.CARRIERS if (way, carrier) != ("sums", "kept full")
    ]
    assert all(0 < row["median_s"] <= row["worst_s"] and row["samples"] == 2 for row in rows)
    assert "of raw sockets&#x27; rate at least" in page.read_text() or "of raw sockets' rate" in page.read_text()
