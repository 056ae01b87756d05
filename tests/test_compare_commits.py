"""`scripts/compare_commits.py`: it runs every case over every medium, and compares what it says that it compares."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

import compare_commits

ROOT = pathlib.Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "compare_commits.py"


@pytest.mark.slow
def test_every_case(tmp_path: pathlib.Path) -> None:
    """A checkout against itself: all cases check their results over both media, and the table has a row for each."""
    found = tmp_path / "pairs.json"
    ran = _run(ROOT, "--pairs", "1", "--turns", "1", "--json", found)
    assert ran.returncode == 0, ran.stderr
    (pair,) = json.loads(found.read_text())
    assert list(pair) == list(compare_commits.MEDIA)
    for medium in pair.values():
        assert list(medium) == list(compare_commits.CASES)
        assert all(side["seconds"] > 0 for sides in medium.values() for side in sides)
    rows = ran.stdout.splitlines()
    assert len(rows) == 2 + len(compare_commits.MEDIA) * len(compare_commits.CASES)


@pytest.mark.parametrize("has_another_python", [False, True])
def test_a_checkout_that_is_not_set_up(tmp_path: pathlib.Path, has_another_python: bool) -> None:
    """A base without an environment of its own is refused: no figure may come from another checkout's code."""
    if has_another_python:
        (tmp_path / ".venv" / "bin").mkdir(parents=True)
        os.symlink(sys.prefix + "/pyvenv.cfg", tmp_path / ".venv" / "pyvenv.cfg")
        (tmp_path / ".venv" / "lib").symlink_to(sys.prefix + "/lib")
        (tmp_path / ".venv" / "bin" / "python").symlink_to(sys.executable)
    ran = _run(tmp_path, "--pairs", "1", "--cases", "all-reduce")
    assert ran.returncode == 1
    assert f"{tmp_path}" in ran.stderr and "run ./dev setup there" in ran.stderr


def test_a_case_that_is_not_there() -> None:
    """A case that does not exist ends with the names of those that do."""
    ran = _run(ROOT, "--cases", "all-reduce,none,gather")
    assert ran.returncode == 2
    assert "there is no 'gather'" in ran.stderr and ", ".join(compare_commits.CASES) in ran.stderr


def test_the_table() -> None:
    """A row has the medians over the pairs, and the median and the extremes of the pairs' ratios."""
    sides = [(1e-4, 1.2e-4, 2e-4, 1e-4), (2e-4, 2e-4, 1e-4, 1e-4), (1e-4, 1.1e-4, 1e-4, 3e-4)]
    pairs = [
        {
            "memory": {
                "all-reduce": [{"seconds": base, "processor_s": cpu}, {"seconds": new, "processor_s": new_cpu}],
            }
        }
        for base, new, cpu, new_cpu in sides
    ]
    *_, row = compare_commits.table(pairs)
    assert row == (
        "| all-reduce of 1 KiB | memory | 100.0 us | 120.0 us | 1.100 (1.00 to 1.20) | 100.0 us | 100.0 us "
        "| 1.000 (0.50 to 3.00) |"
    )


def _run(base: pathlib.Path, *options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), str(base), *map(str, options)], capture_output=True, text=True, timeout=200
    )
