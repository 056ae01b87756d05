"""`penstock bench threads`: what it makes of what ranks say, what it refuses, and a run of it."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from typing import Any

import pytest
from click.testing import CliRunner

from penstock.tools.bench import threads as bench
from penstock.tools.bench.launcher import BenchError


def test_what_the_bench_makes_of_what_ranks_say() -> None:
    """Cycles are a byte's, of the busiest thread first; shares are of processor time, and bound what threads can gain."""

    def said(cpu_s: list[float], locked_s: list[float]) -> list[dict[str, Any]]:
        record = {"what": "send", "operations": 10, "seconds": 0.5, "cpu_s": cpu_s, "locked_s": locked_s}
        return [{"what": "all-reduce"}, {**record, "waited_s": [0.1, 0.3], "busy_s": [1.0, 1.0]}]

    jobs = [said([1.0, 3.0], [0.1, 0.3]), said([2.0, 2.0], [0.4, 0.4]), said([3.0, 1.0], [0.2, 0.2])]
    row = bench.summarise("send", 2, jobs, 100_000_000, 2e9)
    assert row.cycles == pytest.approx([6.0, 2.0]) and row.all_cycles == pytest.approx(8.0)
    assert row.locked == pytest.approx(0.1) and row.waited == pytest.approx(0.2)
    assert row.bits_per_core == pytest.approx(2e9) and row.cores(100e9) == pytest.approx(50.0)
    slower = dataclasses.replace(row, threads=1, seconds=3 * row.seconds)
    assert "1 thread to several: 3.0 times with 2" in "\n".join(bench.lines([slower, row]))
    with pytest.raises(BenchError, match=re.escape("3 I/O threads were asked for, and [2, 2, 2] found")):
        bench.summarise("send", 3, jobs, 100_000_000, 2e9)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--threads", "1,x"], "--threads 1,x: give numbers from 1 to 16, such as 1,2,4"),
        (["--threads", "17"], "give numbers from 1 to 16"),
        (["--size", "2"], "2 bytes are no whole number of float32 elements"),
        (["--streams", "65"], "65 is not in the range"),
    ],
)
def test_the_bench_refuses_before_it_starts_a_rank(arguments: list[str], says: str) -> None:
    """In one line, without a traceback."""
    done = CliRunner().invoke(bench.command, arguments)
    assert done.exit_code == 2 and says in re.sub(r"\s+", " ", done.output), done.output


@pytest.mark.usefixtures("forks")
def test_the_bench_runs(tmp_path: pathlib.Path) -> None:
    """With one thread and with three, of which all do something; the report names what a byte costs."""
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    words = ["--size", "4M", "--threads", "1,3", "--turns", "1", "--operations", "5"]
    done = CliRunner().invoke(bench.command, [*words, "--json", str(out), "--report", str(page)])
    assert done.exit_code == 0, done.output
    rows = json.loads(out.read_text())["runs"]
    assert [(row["what"], row["threads"]) for row in rows] == [
        (what, threads) for what in ("send", "receive", "all-reduce") for threads in (1, 3)
    ]
    assert all(len(row["cycles"]) == row["threads"] and min(row["cycles"]) > 0 for row in rows)
    assert all((row["locked"] is None) == (row["threads"] == 1) for row in rows)
    assert all(0 < row["locked"] < 1 for row in rows if row["threads"] == 3)
    assert "cycles to send" in page.read_text()
