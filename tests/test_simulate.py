"""Proves that the simulator of in-network aggregation can be driven, replayed and believed from the command line."""

from __future__ import annotations

import re
from typing import Any

import click.testing
import pytest

from penstock import _core, cli
from penstock.cluster import file, generate
from penstock.errors import Config as ConfigError
from penstock.tools import simulate


def run(*arguments: str, command: str = "aggregation") -> click.testing.Result:
    return click.testing.CliRunner().invoke(cli.main, ["simulate", command, *arguments])


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
    core = "Aggregator { endpoint: Endpoint(2), children: [Aggregator {"
    for word in ("workers: 3", core, "blocks: 9", "window: 4", "floats: true", "faults: []"):
        assert word in result.output, result.output


def test_links_can_be_fixed_too() -> None:
    """Rates come in Mbit/s and become bytes a second, times in milliseconds and become nanoseconds, queues in KiB."""
    options = (
        "--rate 120 --queue 64 --delay 0.25 --jitter 0.005 --keyed --loss 0.1 --loss-on workers --patient --no-faults"
    )
    result = run(*options.split())
    assert result.exit_code == 0, result.output
    fixed = ("rate: 15000000", "queue: 65536", "delay: 250000", "jitter: 5000", "keyed: true", "edge_loss: true")
    for word in (*fixed, "rto_first: 100000000"):
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
    assert all(" ms  Endpoint(" in line for line in lines[:3])
    assert lines[3] == "seed 2 failed: worker 1 got nonsense"
    assert "seed: 2" in lines[4]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--workers", "65", "workers is 65; 1 to 64 are possible"),
        ("--window", "3", "window is 3; it must be a power of two"),
        ("--loss", "0.9", "loss is 0.9; 0 to 0.5 are possible"),
        ("--rate", "-1", "rate_mbit is -1; 0 and more are possible"),
        ("--queue", "1", "queue in bytes is 1024; 9010 to"),
        ("--rate", "5", "rate in Mbit/s is 5; 10 to"),
        ("--queued", "-1", "-1 is not in the range"),
        ("--queued", "0", "queued is 0; 1 to 64 are possible"),
    ],
)
def test_what_is_out_of_bounds(option: str, value: str, message: str) -> None:
    """It is refused in words, before anything runs."""
    result = run(option, value)
    assert result.exit_code == 2
    assert message in result.output
    with pytest.raises(ValueError, match="shape"):
        _core.simulate_aggregation(0, shape="ring")


def _outcome(loss: float, workers: int, queue: int, **_: Any) -> dict[str, Any]:
    """A stand-in: a fifth more time for each per cent lost, and five packets for a block and worker."""
    packets, dropped = 5 * workers * BLOCKS, workers * BLOCKS // 10 if queue else 0
    return {"time_ns": 1e9 * (1 + 20 * loss), "packets": packets, "dropped": dropped}


BLOCKS = 100


@pytest.mark.parametrize(("shape", "crossings"), [("direct", 4), ("star", 1), ("racks", 2), ("core", 1)])
def test_rates_are_shares_of_the_busiest_link_and_of_no_loss(shape: str, crossings: int) -> None:
    """The run without loss is what others are held against, also where nobody asks to see it. Without an aggregator the server's
    link carries each worker's block."""
    setting: dict[str, Any] = {"rate_mbit": [100.0], "windows": [64], "nbytes": BLOCKS * 8896 - 1, "seeds": 2}
    seen: list[dict[str, Any]] = []

    def simulated(seed: int, **fixed: Any) -> dict[str, Any]:
        seen.append({"seed": seed, **fixed})
        return _outcome(**fixed)

    one, two = simulate.rates(simulated, workers=[4], queues_kib=[0, 64], losses=[0.05], shape=shape, **setting)
    assert [(each["seed"], each["loss"], each["queue"]) for each in seen] == [
        (seed, loss, queue) for queue in (0, 65536) for loss in (0.0, 0.05) for seed in (1, 2)
    ]
    assert all(each["blocks"] == BLOCKS for each in seen)
    assert (one.seconds, one.of_lossless, one.packets) == pytest.approx((2.0, 0.5, 20.0))
    assert one.of_link == pytest.approx(crossings * BLOCKS * 8896 * 8 / 2.0 / 100e6)
    assert (one.dropped, two.dropped) == pytest.approx((0.0, 0.1))


def test_rates_of_the_protocol_itself() -> None:
    """Without loss a star fills its link whatever the number of workers; with loss it takes longer, more so on every link."""
    options = ["--workers", "2,4", "--loss", "0,0.05", "--bytes", "4000000", "--rate", "100", "--seeds", "4"]
    rows = [line.split() for line in run(*options, command="rates").output.splitlines()[1:]]
    assert [row[1] for row in rows] == ["2", "2", "4", "4"]
    of_link = [int(row[6].rstrip("%")) for row in rows]
    assert min(of_link[0], of_link[2]) > 90, rows
    assert of_link[1] < of_link[0] and of_link[3] < of_link[2]
    again = run(*options, "--loss-on", "workers", command="rates").output.splitlines()[1:]
    assert float(again[3].split()[8]) < float(rows[3][8]), "fewer packets for a block"


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--rate", "0", "give links a rate"),
        ("--loss", "much", "give numbers between commas"),
        ("--queue", "-1", "KiB, or 0"),
        ("--workers", "2,100", "workers is 100; 1 to 64 are possible"),
    ],
)
def test_rates_that_cannot_be(option: str, value: str, message: str) -> None:
    result = run(option, value, "--bytes", "100000", command="rates")
    assert result.exit_code == 2 and message in result.output


# From a cluster file


LINK = {"rate_bit_s": 10**8, "delay_ns": 50_000, "queue_bytes": 65_536}


@pytest.mark.parametrize(
    ("made", "tree"),
    [
        (generate.racks(4, 2, servers=1, uplink={"delay_ns": 0}, **LINK), [[0, 1], [2, 3]]),
        (generate.racks(5, 2, servers=1, core_aggregator=True, uplink={"delay_ns": 0}, **LINK), [[[0, 1, 2], [3, 4]]]),
        (generate.racks(6, 3, servers=1, uplink={"delay_ns": 0}, **LINK), [[0, 1], [2, 3], [4, 5]]),
        (generate.racks(3, 1, servers=1, uplink={"delay_ns": 0}, **LINK), [[0, 1, 2]]),
        (generate.leaf_spine(1, 1, 3, servers=1, aggregators=False, **LINK), [0, 1, 2]),
    ],
)
def test_a_cluster_has_a_tree(made: Any, tree: list[Any]) -> None:
    """Which aggregators a worker's way passes, and what lies between two of them, decides."""
    assert simulate.of_cluster(made) == {
        "tree": tree,
        "rate_mbit": 100.0,
        "queue": 65_536,
        "delay_ms": 0.1,
        "loss": 0.0,
        "edge_loss": False,
    }


@pytest.mark.parametrize("tree", [[[0, 1], [2, 3], [4, 5]], [0, [[[1], 2], 3]], [[[[0, 1], 2], [3]], 4]])
def test_any_tree_runs(tree: list[Any]) -> None:
    """Trees of any depth, with workers at any node; every result is right under faults."""
    for seed in range(5):
        outcome = _core.simulate_aggregation(seed, tree=tree, blocks=9, patient=True)
        assert outcome["failure"] is None and outcome["results"] > 0, outcome


def test_a_tree_of_a_shape_is_that_shape() -> None:
    """Also its aggregators' numbers, so that a seed is the same run."""
    options = {"blocks": 9, "loss": 0.05}
    shape = _core.simulate_aggregation(3, workers=4, shape="core", **options)
    assert _core.simulate_aggregation(3, tree=[[[0, 1], [2, 3]]], **options) == shape


@pytest.mark.parametrize(
    ("tree", "why"),
    [([[0, 1], []], "child"), ([0, 0], "0"), ([0, 2], "number them from 0"), ([0, [64]], "64")],
)
def test_what_is_no_tree(tree: list[Any], why: str) -> None:
    with pytest.raises((ValueError, TypeError), match=why):
        _core.simulate_aggregation(0, tree=tree)


def test_an_aggregator_has_one_parent() -> None:
    """Ways of workers that share an aggregator and not the next one are no tree."""
    with pytest.raises(ConfigError, match=r"^jobs\.train\.workers: .* at x has two ways to the server"):
        simulate._tree(generate.racks(2, 1), "train", [("x", "y"), ("x",)])


def test_a_cluster_file_is_simulated(tmp_path: Any) -> None:
    """What the file says is what runs; loss of workers' links is lost at workers only."""
    made = generate.racks(4, 2, servers=1, uplink={"delay_ns": 0}, **LINK)
    for host in range(4):
        made = made.with_link(f"h{host}", loss=0.05)
    path = tmp_path / "cluster.yaml"
    path.write_text(file.dump(made))
    result = run("--cluster", str(path), "--blocks", "9", "--no-faults", "--patient")
    assert result.exit_code == 0, result.output
    for word in (
        "workers: 4",
        "Aggregator { endpoint: Endpoint(1), children: [Worker(2), Worker(3)] }",
        "rate: 12500000",
        "delay: 100000",
        "queue: 65536",
        "loss: 0.05",
        "edge_loss: true",
    ):
        assert word in result.output, result.output
    refused = run("--cluster", str(path), "--workers", "3")
    assert refused.exit_code == 2 and "says what the network is, and so does --workers" in refused.output
    path.write_text(file.dump(made.with_link("a0", rate_bit_s=None)))
    refused = run("--cluster", str(path))
    assert refused.exit_code == 2 and re.search(
        r"cluster\.yaml:\d+:\d+: links\[\d\]\.rate: differs from that of h0", refused.output
    )
    path.write_text(file.dump(made.with_link("r0", rate_bit_s=10**7)))
    assert "is below that of hosts: the simulator has no such link" in run("--cluster", str(path)).output
    path.write_text("version: 1\nhosts: {h0: }\n")
    assert "jobs: the simulator takes one, here are 0" in run("--cluster", str(path)).output
