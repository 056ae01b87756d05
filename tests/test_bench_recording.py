"""`penstock bench recording`: what it makes of what ranks say, and a run of it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from penstock.tools.bench import recording

KIND = {"model": "layers", "ranks": 2, "backend": "gloo", "is_first": False}


def said(*blocks: tuple[list[int], int]) -> list[dict[str, Any]]:
    return [{"ns": list(ns), "processor_ns": processor} for ns, processor in blocks]


def test_what_recording_adds() -> None:
    """To the median step, to pairs of blocks, and to all steps, where what other work did to one block of four does not count."""
    plain = said(([100, 100, 100], 300), ([100, 100, 100], 300), ([110, 110, 110], 330), ([100, 100, 900], 300))
    recorded = said(([102, 102, 102], 309), ([101, 101, 161], 336), ([110, 111, 112], 330), ([102, 102, 102], 306))
    row = recording.summarise(plain, recorded, [], **KIND)
    assert (row.blocks, row.samples, row.step_s) == (4, 0, 1e-7)
    # Medians of blocks: +2, +1, +0.9 and +2 %.
    assert row.median == pytest.approx(0.02) and row.pairs == pytest.approx(0.015, abs=1e-9)
    # Of +2 %, +21 %, +0.9 % and -72 % the middle two; of processor time +3, +12, 0 and +2 %.
    assert row.mean == pytest.approx((0.02 + 333 / 330 - 1) / 2) and row.processor == pytest.approx(0.025)
    others = [dataclasses.replace(row, median=median, samples=1) for median in (0.01, 0.04)]
    [line] = recording.table([row, *others]).lines
    assert line.cells[:4] == ["layers", "2", "gloo", "3"] and line.cells[-1] == "2"
    assert line.cells[5:8] == ["+2.0%", "+1.0%, +4.0%", "+1.5%"]
    # Three pairs one way, +2 % in the median, and one the other way, which makes up for what the order adds.
    [line] = recording.table([row, *others, dataclasses.replace(row, median=-0.01, is_first=True)]).lines
    assert line.cells[5] == "+0.5%"


def test_samples_are_in_the_mean() -> None:
    """Rare as they are: ten blocks of 1,000, one of which has a sample of 300, whose reading takes 200 of the next."""
    plain = said(*[([500, 500], 1000)] * 10)
    recorded = said(*[([505, 505], 1010)] * 4, ([805, 505], 1310), ([705, 505], 1210), *[([505, 505], 1010)] * 4)
    row = recording.summarise(plain, recorded, [4], **KIND)
    assert row.median == pytest.approx(0.01) and row.pairs == pytest.approx(0.01)
    assert row.mean == row.processor == pytest.approx(0.01 + 500 / 10_000) and row.samples == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--models", "bert"], "no model bert: there are layers, char-gpt, cnn"),
        (["--ranks", "0"], "no number of ranks 0"),
        (["--backends", "nccl"], "no backend nccl: there are gloo, penstock"),
    ],
)
def test_what_is_refused(arguments: list[str], says: str) -> None:
    done = CliRunner().invoke(recording.command, arguments)
    assert done.exit_code == 2 and says in done.output


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some steps instead of hundreds."""
    monkeypatch.setitem(recording.STEPS, "layers", 12)


@pytest.mark.usefixtures("short")
def test_a_control_records_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both jobs run as they are."""

    def looked_at(*_: object) -> list[int]:
        raise AssertionError("there is no record")

    monkeypatch.setattr(recording, "_samples", looked_at)
    row = recording.measure("layers", 1, "", is_first=False, blocks=2, control=True, timeout_s=120)
    assert (row.blocks, row.samples) == (2, 0)


@pytest.mark.usefixtures("short")
def test_both_jobs_run(tmp_path: Path) -> None:
    """By turns, and one of them is recorded, at first the second one: of two ranks."""
    path = tmp_path / "rows.json"
    words = ["--models", "layers", "--ranks", "2", "--backends", "gloo", "--pairs", "2", "--blocks", "6"]
    words += ["--json", str(path)]
    done = CliRunner().invoke(recording.command, words)
    assert done.exit_code == 0, done.output
    rows = json.loads(path.read_text())["runs"]
    assert [(row["ranks"], row["is_first"], row["blocks"]) for row in rows] == [(2, False, 6), (2, True, 6)]
    assert all(row["step_s"] > 0 for row in rows)
