"""Proves that the simulator of in-network aggregation can be driven, replayed and believed from the command line."""

from __future__ import annotations

import re

import click.testing
import pytest

from penstock import _core, cli, errors


def run(*arguments: str) -> click.testing.Result:
    return click.testing.CliRunner().invoke(cli.main, ["simulate", "aggregation", *arguments])


def test_many_seeds() -> None:
    """Seeds are run one after the other, and what they came to is added up."""
    result = run("--seed", "100", "--runs", "20", "--loss", "0.05")
    assert result.exit_code == 0, result.output
    told = re.fullmatch(
        r"20 runs from seed 100: (\d+) results right, none wrong, doubled or missing; (\d+) packets, (\d+) lost\n",
        result.output,
    )
    assert told, result.output
    results, packets, lost = map(int, told.groups())
    assert results > 20 * 4
    assert 0.03 < lost / packets < 0.07


def test_a_seed_repeats() -> None:
    """The same seed tells the same story; another one another."""
    one, two, other = (_core.simulate_aggregation(seed, trace=True) for seed in (5, 5, 6))
    assert one == two
    assert one["trace"]
    assert one["trace"] != other["trace"]


def test_what_is_fixed_is_not_drawn() -> None:
    """Options take the place of what the seed would draw."""
    result = run("--workers", "3", "--shape", "core", "--blocks", "9", "--window", "4", "--floats", "--no-faults")
    assert result.exit_code == 0, result.output
    for word in ("workers: 3", "shape: Core", "blocks: 9", "window: 4", "floats: true", "faults: []"):
        assert word in result.output, result.output


def test_a_failed_run_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure names its seed, its scenario and the last packets, and ends with 1."""
    asked = []

    def wrong(seed: int, **fixed: object) -> dict[str, object]:
        asked.append((seed, fixed.get("trace", False)))
        outcome = dict(_core_simulate(seed, **fixed))
        return outcome | {"failure": "worker 1 got nonsense" if seed == 2 else None}

    _core_simulate = _core.simulate_aggregation
    monkeypatch.setattr(_core, "simulate_aggregation", wrong)
    result = run("--runs", "5", "--trace", "3", "--no-faults")
    assert result.exit_code == 1
    assert asked == [(0, False), (1, False), (2, False), (2, True)]
    lines = result.output.splitlines()
    assert len(lines) == 5
    assert all(" ms  Link(" in line for line in lines[:3])
    assert lines[3] == "seed 2 failed: worker 1 got nonsense"
    assert "seed: 2" in lines[4]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--workers", "65", "workers is 65; 1 to 64 are possible"),
        ("--window", "3", "window is 3; it must be a power of two"),
        ("--loss", "0.9", "loss is 0.9; 0 to 0.5 are possible"),
    ],
)
def test_what_is_out_of_bounds(option: str, value: str, message: str) -> None:
    """It is refused in words, before anything runs."""
    result = run(option, value)
    assert result.exit_code == 2
    assert message in result.output
    with pytest.raises(errors.Config, match="shape"):
        _core.simulate_aggregation(0, shape="ring")
