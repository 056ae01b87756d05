"""`penstock bench monitoring`: a run of it, and what it makes of what ranks say."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.tools.bench import monitoring
from penstock.tools.bench.launcher import BenchError


def test_all_that_watches_is_measured() -> None:
    rows = monitoring.measure("char-gpt", ranks=2, seconds=3, period_ms=20, timeout_s=120, warm_up_s=1)
    assert sorted((row.what, row.rank) for row in rows if row.rank is not None) == [
        ("live view: looks", 0),
        ("live view: looks", 1),
        ("live view: serves", 0),
    ]
    assert [row.rank for row in rows if row.what == "counters of a host"] == [None]
    assert all(0 < row.share < 1 and row.steps_per_s > 0 for row in rows), rows


def test_shares_are_of_the_time() -> None:
    said: list[dict[str, Any]] = [
        {
            "rank": 0,
            "steps": 50,
            "ns": 2 * 10**9,
            "watchers": {"penstock-live": 4 * 10**6, "penstock-live-http": 10**6},
        },
        {"rank": 1, "steps": 50, "ns": 2 * 10**9, "watchers": {"penstock-live": 2 * 10**6}},
    ]
    with pytest.raises(BenchError, match="nothing was measured of: counters of a host"):
        monitoring.summarise(said)
    said[0]["watchers"] |= {"counters": 8 * 10**6}
    rows = monitoring.summarise(said)
    assert [(row.share, row.steps_per_s) for row in rows] == [(0.002, 25), (0.0005, 25), (0.004, 25), (0.001, 25)]
    assert [line.cells[2] for line in monitoring.table(rows).lines] == ["0.20%", "0.05%", "0.40%", "0.10%"]
