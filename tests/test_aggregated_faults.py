"""Proves that all-reduces through aggregators keep their bits, and a training its losses, while links lose packets and
aggregators are killed in mid step; and that the benches that say so would notice if they did not.

Some runs here; `penstock bench aggregated` has `--faults 60 --workers 4 --losses 0.01` and `--training 150 --workers 4`.
"""

from __future__ import annotations

import copy
import json
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

import ranks
from penstock.tools.bench import cli
from penstock.tools.bench.aggregated import faults, quantised, training, training_rank
from penstock.tools.testbed.system import unavailable

needs_namespaces = pytest.mark.skipif(unavailable() is not None, reason=f"no emulated hosts here: {unavailable()}")


def test_faults_follow_from_their_seeds_and_differ() -> None:
    """Every aggregator and every rank gets its turn; each number says by itself what happens."""
    drawn = [faults.Fault.of_seed(seed, ["a0", "a1", "a2"], 4) for seed in range(1, 61)]
    assert drawn[16] == faults.Fault.of_seed(17, ["a0", "a1", "a2"], 4)
    assert {fault.node for fault in drawn} == {"a0", "a1", "a2"}
    assert {fault.rank for fault in drawn} == {0, 1, 2, 3}
    assert {fault.back for fault in drawn} == {0, 1, 2}
    assert {fault.step for fault in drawn} == set(range(faults.STEPS - 1))
    assert all(0 < fault.share < 1 for fault in drawn)


def _said() -> list[list[dict[str, Any]]]:
    """Two ranks: an undisturbed run of two steps with two all-reduces each, and one of three steps with a kill."""
    steps = [["a", "b"], ["c", "d"]]
    run = {"run": 0, "struck": None, "returned": True, "bypasses": 1, "fallback": None, "digests": [*steps, steps[0]]}
    run["seconds"] = [0.1, 0.6, 0.2]
    ranks = [[{"run": -1, "digests": steps, "seconds": [0.2, 0.1]}, copy.deepcopy(run)] for _ in range(2)]
    ranks[0][1]["seconds"][1] = 0.7
    ranks[1][1]["struck"] = {"step": 1, "in_flight": 2}
    return ranks


FAULT = faults.Fault(seed=7, node="a0", rank=1, step=1, share=0.5, back=0)


def test_equal_bits_are_equal() -> None:
    [run] = faults.summarise(_said(), [FAULT])
    assert (run.wrong, run.struck_step, run.in_flight, run.bypasses, run.all_reduces) == ([], 1, 2, 2, 6)
    assert (run.longest_s, run.undisturbed_s) == (0.7, 0.2), "of any rank"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("step", [0, 1, 2])
def test_one_wrong_bit_is_found(rank: int, step: int) -> None:
    """In any step of any rank, those that repeat an earlier step among them; the seed is told, and the exit code is 1."""
    said = _said()
    said[rank][1]["digests"][step] = ["x", said[rank][1]["digests"][step][1]]
    outcome = faults.Outcome(2, 0.01, faults.summarise(said, [FAULT]))
    assert outcome.wrong == [f"seed 7: step {step}, all-reduce 0, rank {rank}: other bits than undisturbed"]
    assert "0 equal" in outcome.lines()[0]


def test_other_ways_round_are_found() -> None:
    """A run that went on among the ranks, or without the aggregator, proves nothing; nor does an undisturbed one whose ranks
    differ."""
    said = _said()
    said[0][1]["returned"] = False
    said[0][1]["fallback"] = "server 10.77.2.1:7471 is silent"
    said[1][0]["digests"] = [["a", "b"], ["c", "e"]]
    [run] = faults.summarise(said, [FAULT])
    assert run.wrong == [
        "rank 1 differs from rank 0 without any fault",
        "rank 0 went on without servers: server 10.77.2.1:7471 is silent",
        "traffic did not go through a0 again",
    ]


def test_the_bound_is_that_of_the_document() -> None:
    """Bits as docs/design/quantisation.md lists them, and for 8 workers 2^-25 and 2^-9 of the largest element, a power of two."""
    for dtype, workers, bits in [
        (torch.float32, 1, 31),
        (torch.float32, 8, 28),
        (torch.float32, 128, 24),
        (torch.float32, 256, 22),
        (torch.float16, 8, 12),
        (torch.float16, 16, 11),
        (torch.float16, 17, 26),
        (torch.bfloat16, 128, 8),
        (torch.bfloat16, 129, 23),
    ]:
        assert quantised.bits(dtype, workers) == bits, (dtype, workers)
    assert quantised.bound(torch.float32, 8, 4.0) == 4.0 * 2**-25
    assert quantised.bound(torch.float16, 8, 1.0) == 2**-9
    assert quantised.bound(torch.float32, 8, 0.0) == 0.0


@needs_namespaces
@pytest.mark.usefixtures("forks")
def test_results_keep_their_bits_while_aggregators_are_killed(tmp_path: Path) -> None:
    """4 workers in two racks below a core, 1 % loss on every link: in each of three runs an aggregator is killed in the middle of
    a step and started again. All results of all ranks have the bits of the undisturbed run."""
    path = tmp_path / "runs.json"
    options = [
        "--faults",
        "3",
        "--workers",
        "4",
        "--losses",
        "0.01",
        "--size",
        "1M",
        "--seed",
        "2",
        "--json",
        str(path),
    ]
    result = CliRunner().invoke(cli.command, ["aggregated", *options])
    assert result.exit_code == 0, result.output
    [outcome] = json.loads(path.read_text())["runs"]
    runs = outcome["runs"]
    assert [run["fault"]["seed"] for run in runs] == [2, 3, 4]
    assert not any(run["wrong"] for run in runs)
    assert all(run["all_reduces"] >= 4 * faults.STEPS for run in runs)
    assert sum(run["in_flight"] > 0 for run in runs) >= 2, result.output
    assert any(run["bypasses"] for run in runs), "nobody noticed"


def test_a_training_further_away_than_rounding_is_found() -> None:
    """The largest distance of any step decides, not the last loss."""

    def said(*through: float) -> training.Outcome:
        def record(way: str, *losses: float) -> dict[str, Any]:
            return {"way": way, "losses": list(losses), "struck": {"node": "a0", "step": 1}, "bypasses": 1}

        ranks = [
            [record("gloo", 3.0, 2.0, 1.0), record("bound", 3.0, 2.25, 1.0), record("int32", *through)],
            [record("gloo", 5.0, 4.0, 3.0), record("bound", 5.0, 4.25, 3.0), record("int32", 5.0, 4.0, 3.0)],
        ]
        return training.summarise(ranks, 2, 0.01)

    near = said(3.0, 2.5, 1.0)
    assert near.losses["gloo"] == [4.0, 3.0, 2.0]
    assert (near.distance("bound"), near.distance("int32"), near.is_within) == (0.25, 0.25, True)
    assert near.struck == {"node": "a0", "step": 1, "bypasses": 2}
    far = said(3.0, 2.75, 1.0)
    assert not far.is_within
    assert "NOT within" in far.lines()[-1]


@needs_namespaces
@pytest.mark.usefixtures("forks")
def test_a_training_keeps_to_the_curve_of_gloo(tmp_path: Path) -> None:
    """2 workers, 1 % loss on every link, an aggregator killed in the middle of a backward pass and started again: each loss is
    that of gloo but for rounding."""
    path = tmp_path / "training.json"
    options = ["--training", "20", "--workers", "2", "--losses", "0.01", "--rate", "500", "--batch", "1"]
    result = CliRunner().invoke(cli.command, ["aggregated", *options, "--json", str(path)])
    assert result.exit_code == 0, result.output
    [outcome] = json.loads(path.read_text())["runs"]
    losses = outcome["losses"]
    assert all(len(losses[way]) == 20 for way in training.WAYS)
    assert losses["int32"][0] == losses["gloo"][0]
    assert losses["int32"][-1] < losses["int32"][0]
    assert outcome["struck"]["node"] == "a0" and outcome["struck"]["in_flight"] == 1
    assert outcome["distance"]["int32"] <= outcome["distance"]["bound"]
    assert 1e-6 < outcome["distance"]["bound"] < 0.1, "the bound moves what can be seen, and not much"


def test_the_bound_moves_each_average_by_what_it_says() -> None:
    """The hook of the way `bound`, on two ranks: no element is nearer to the exact average than the quantisation bound of its own
    block, nor further than with all roundings to float32."""
    for found in ranks.run(_moved, count=2):
        assert found == (True, True)


def _moved() -> tuple[bool, bool]:
    dist.init_process_group("gloo")
    parts = torch.randn(2, 100, generator=torch.Generator().manual_seed(3)) * torch.tensor(
        [1.0, 1e-3]
    ).repeat_interleave(50)
    exact = parts.double().mean(0)
    hook = training_rank.moved_by_the_bound(50, seed=1)
    bucket = types.SimpleNamespace(buffer=parts[dist.get_rank()].clone)
    moved = (hook(None, bucket).wait().double() - exact).abs()  # type: ignore[arg-type]
    largest = [parts[:, at].abs().max().item() for at in (slice(50), slice(50, 100))]
    away = (
        torch.tensor([quantised.bound(torch.float32, 2, value) / 2 for value in largest]).double().repeat_interleave(50)
    )
    rounding = 4 * 2.0**-24 * parts.double().abs().sum(0)
    dist.destroy_process_group()
    return bool((moved >= away - 2.0**-23 * exact.abs()).all()), bool((moved <= away + rounding).all())
