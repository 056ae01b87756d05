"""`penstock bench predictions`: what is drawn, what its table says, and a pair of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.tools.bench import predictions
from penstock.tools.bench.launcher import BenchError
from penstock.tools.bench.predictions import CHANGES, Outcome, drawn
from penstock.tools.testbed.system import unavailable
from penstock.workloads.transformer.__main__ import SCHEDULES


def test_pairs_are_drawn_from_their_seed() -> None:
    """All changes by turns; a cap of flows only where it is the point."""
    pairs = [drawn(seed) for seed in range(60)]
    assert pairs == [drawn(seed) for seed in range(60)]
    assert [pair.change for pair in pairs[:4]] == list(CHANGES) and len(set(pairs)) == 60
    assert min(pair.flow_mbit for pair in pairs if pair.flow_mbit) >= 25
    assert all((pair.flow_mbit > 0) == (pair.backend == "gloo" and pair.change == "penstock") for pair in pairs)


def test_more_streams_are_drawn_where_there_is_room() -> None:
    """Fewer at first than the link has room for."""
    pairs = [drawn(seed, ["more streams"]) for seed in range(60)]
    assert {pair.change for pair in pairs} == {"more streams"}
    assert all(0 < pair.streams * pair.flow_mbit < pair.rate_mbit for pair in pairs)
    _, is_about_it, settings = predictions._change(pairs[0])
    assert is_about_it("16 streams") and not is_about_it("float16") and not settings  # as `predict` names it
    done = CliRunner().invoke(predictions.command, ["--changes", "float16,fewer"])
    assert done.exit_code == 2 and "no change fewer" in done.output


def test_schedules_are_drawn_that_the_workload_has() -> None:
    """Each of a pipeline whose micro-batches its ranks divide; the prediction is the one that `predict` names so."""
    pairs = [drawn(seed, ["another schedule"]) for seed in range(60)]
    assert {(pair.schedule, pair.becomes) for pair in pairs} == {
        ("gpipe", "1f1b"),
        ("gpipe", "interleaved"),
        ("1f1b", "interleaved"),
    }
    assert all(pair.micro_batches % 2 == 0 and pair.batch % pair.micro_batches == 0 for pair in pairs)
    assert {pair.schedule for pair in pairs} | {pair.becomes for pair in pairs} <= set(SCHEDULES)
    changed, is_about_it, settings = predictions._change(pairs[0])
    assert changed.schedule == pairs[0].becomes and not settings
    assert is_about_it(predictions.SCHEDULES[pairs[0].becomes]) and not is_about_it("float16")


def test_the_table_counts_misses() -> None:
    """Of predicted over measured; and how many lie within what was stated."""
    outcomes = [
        Outcome(drawn(4 * number), 200.0, 100.0 + miss, 0.03, 100.0) for number, miss in enumerate((1, -2, 4, 20))
    ]
    twice, everything = predictions.table(outcomes).lines
    assert twice.cells == ["twice the link", "4", "3.0%", "20.0%", "20.0%", "2 of 4"]
    assert everything.cells == ["all", *twice.cells[1:]]


def test_a_pair_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told, and ends the command with an error only once the others' table is there."""

    def measure(pair: predictions.Pair, **_: object) -> Outcome:
        if pair.seed == 1:
            raise BenchError("the training of pair 1 ended with status 124")
        return Outcome(pair, 200.0, 103.0, 0.03, 100.0)

    monkeypatch.setattr(predictions, "measure", measure)
    done = CliRunner().invoke(predictions.command, ["--pairs", "3"])
    assert done.exit_code == 1
    assert "1: float16: the training of pair 1 ended with status 124" in done.output
    assert "2: larger buckets" in done.output and "Predicted beside measured" in done.output
    assert "1 of 3 pairs failed" in done.output


def test_an_interrupt_ends_all_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C reaches the training of a pair, which ends with 130; a SIGTERM is handed on to it."""
    ran = []
    for code in (130, 143):
        monkeypatch.setattr("penstock.tools.profile.run.run", lambda *_, code=code, **__: ran.append(code) or code)
        done = CliRunner().invoke(predictions.command, ["--pairs", "3"])
        assert done.exit_code == 130 and "interrupted" in done.output
    assert ran == [130, 143]


@pytest.mark.skipif(unavailable() is not None, reason=f"no emulated hosts here: {unavailable()}")
@pytest.mark.usefixtures("forks")
def test_a_pair_runs(tmp_path: Path) -> None:
    """Predicted before the second run, which has twice the link."""
    path = tmp_path / "pairs.json"
    done = CliRunner().invoke(predictions.command, ["--pairs", "1", "--steps", "18", "--json", str(path)])
    assert done.exit_code == 0, done.output
    assert "twice the link" in done.output and '"miss"' in path.read_text()
