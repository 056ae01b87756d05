"""Proves that the simulator of in-network aggregation can be driven, replayed and believed from the command line."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import click.testing
import pytest

from penstock import _core, cli
from penstock.cluster import file, generate
from penstock.errors import Config as ConfigError
from penstock.tools.simulate import aggregation
from penstock.tools.simulate.collective import ranks_of_cluster


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
    core = "Aggregator { endpoint: Endpoint(2), is_full: true, children: [Aggregator {"
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
        ("--workers", "4097", "workers is 4097; 1 to 4096 are possible"),
        ("--workers", "65 --shape star", "a node has 65 children; at most 64 are possible"),
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
    result = run(option, *value.split())
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

    one, two = aggregation.rates(simulated, workers=[4], queues_kib=[0, 64], losses=[0.05], shape=shape, **setting)
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
        ("--workers", "2,100", "a node has 100 children; at most 64 are possible"),
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
    assert aggregation.of_cluster(made) == {
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
        aggregation._tree(generate.racks(2, 1), "train", [("x", "y"), ("x",)])


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
        "Aggregator { endpoint: Endpoint(1), is_full: true, children: [Worker(2), Worker(3)] }",
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


@pytest.mark.parametrize(
    ("change", "path"),
    [({"flow_caps_bit_s": (10**7,)}, "flow_cap"), ({"background_bit_s": 10**7}, "background")],
)
def test_what_no_simulator_has_is_refused(tmp_path: Any, change: dict[str, Any], path: str) -> None:
    """With its place in the file, by both simulators, where packets pass the link; elsewhere it changes nothing."""
    made = generate.racks(4, 2, servers=1, uplink={"delay_ns": 0}, **LINK)
    on_path, elsewhere = tmp_path / "on_path.yaml", tmp_path / "elsewhere.yaml"
    on_path.write_text(file.dump(made.with_link("h2", **change)))
    both = {"aggregation": "--blocks 9 --no-faults --patient", "collective": "--bytes 4000 --repeat 1"}
    for command, options in both.items():
        refused = run("--cluster", str(on_path), *options.split(), command=command)
        place = rf"on_path\.yaml:\d+:\d+: links\[\d+\]\.{path}: the simulator has no "
        assert refused.exit_code == 2 and re.search(place, refused.output), refused.output
    # A server's link is none of a collective's, and an aggregator in the core none of this deployment's.
    elsewhere.write_text(file.dump(made.with_link("s0", **change)))
    result = run("--cluster", str(elsewhere), *both["collective"].split(), command="collective")
    assert result.exit_code == 0, result.output


# Collectives among ranks


def collective(*arguments: str) -> list[dict[str, str]]:
    """The rows of the table, after its first line."""
    result = run(*arguments, command="collective")
    assert result.exit_code == 0, result.output
    first, _, *rows = result.stdout.splitlines()
    row = re.compile(
        r" *(?P<ms>[\d.]+) +(?P<promised>[\d.]+) +(?P<ratio>[\d.]+|-)  (?P<link>\w+ to \w+) +(?P<share>[\d.]+%|-) +"
        r"(?P<bytes>\d+) +(?P<frames>\d+)"
    )
    matches = [row.fullmatch(line) for line in rows]
    assert all(matches), result.output
    return [{"first": first, **match.groupdict()} for match in matches if match]


def test_a_ring_takes_what_its_plan_promises() -> None:
    """Within 1 %, on a star: 16 ranks send 30 chunks of 16 KiB one after the other, and each frame waits for nothing."""
    options = "--ranks 16 --bytes 262144 --rate 10000 --delay 0.005 --algorithm ring --repeat 2"
    rows = collective(*options.split())
    assert [row["first"] for row in rows] == ["all_reduce of 262144 bytes, 16 ranks: ring"] * 2
    # 30 x (16 KiB at 1.25 GB/s, and a trip: two delays of 5 us and the switch's 16 KiB).
    assert rows[1]["promised"] == "1.086"
    assert 0.99 < float(rows[1]["ratio"]) < 1.01
    assert float(rows[1]["ms"]) / float(rows[1]["promised"]) == pytest.approx(float(rows[1]["ratio"]), abs=2e-3)
    # A rank's link carries all but a 16th of the tensor twice, with headers.
    assert 1.0 < int(rows[1]["bytes"]) / (2 * 262_144 * 15 / 16) < 1.02


def test_the_same_arguments_give_the_same_numbers() -> None:
    """Also in another process of another machine: nothing is drawn, and no clock is read."""
    options = "--ranks 12 --shape racks --racks 3 --bytes 1200000 --rate 1000 --repeat 2"
    assert collective(*options.split()) == collective(*options.split())
    assert collective(*options.split()) != collective(*options.split(), "--uplink", "200")


def test_slow_uplinks_are_the_busiest_links() -> None:
    """A ring's flow leaves each rack once: at a fifth of the rate it takes five times as long, and the uplink is full."""
    options = "--ranks 8 --shape racks --bytes 4000000 --algorithm ring --repeat 1"
    [fast], [slow] = collective(*options.split()), collective(*options.split(), "--uplink", "200")
    assert 4 < float(slow["ms"]) / float(fast["ms"]) < 6
    assert re.fullmatch(r"r\d to core|core to r\d", slow["link"])
    assert float(slow["share"].rstrip("%")) > 90


@pytest.mark.parametrize(
    "name",
    ["reduce_scatter", "all_gather", "broadcast", "reduce", "gather", "scatter", "all_to_all", "barrier"],
)
def test_every_collective_is_simulated(name: str) -> None:
    """With the algorithm that is chosen by itself; a barrier has no bytes."""
    [row] = collective("--collective", name, "--ranks", "3", "--bytes", "120000", "--repeat", "1")
    assert row["first"].startswith(f"{name}, 3 ranks: " if name == "barrier" else f"{name} of 120000 bytes, 3 ranks: ")
    assert float(row["ms"]) > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--ranks 1", "--ranks"),
        ("--ranks 2000", "--ranks: the number of ranks is 2000; 2 to 1024 are possible"),
        ("--ranks 300 --collective all_to_all --bytes 1200", "--ranks: each of 300 ranks sends to each"),
        ("--bytes 5", "--bytes: 5 bytes; multiples of 4"),
        ("--bytes 20000000000", "--bytes: 20000000000 bytes"),
        ("--bytes 16000000000 --ranks 128", "--bytes: all ranks send"),
        (
            "--bytes 1000 --collective all_gather --ranks 7",
            "--bytes: all-gather of 1000 bytes: must be a multiple of 7",
        ),
        ("--repeat 5000", "--repeat: 5000 repetitions; 1 to 1000"),
        ("--rate 0.5", "--rate: 0.5 Mbit/s; 1 to 10000000 are possible"),
        ("--rate nan", "--rate is nan"),
        ("--rate 1e303", "--rate is 1e+303"),
        ("--shape racks --uplink 0.5", "--uplink: 0.5 Mbit/s"),
        ("--delay 2000", "--delay: 2000 ms; up to 1000"),
        ("--queue 8", "--queue: 8192 bytes; 16496 and more"),
        ("--uplink 100", "--uplink is for --shape racks"),
        ("--racks 3", "--racks is for --shape racks"),
        ("--shape racks --racks 9", "racks=9: give 1 to 8"),
        ("--algorithm rnig", "unknown algorithm"),
        ("--algorithm tree", "--algorithm: tree is no algorithm for all-reduce; choose one of: ring"),
        ("--algorithm aggregated", "--algorithm: aggregated is no algorithm for all-reduce"),
        ("--algorithm exchange", "--algorithm: exchange does not do for so many bytes"),
        ("--algorithm ring --collective barrier", "--algorithm: only an all-reduce takes an algorithm"),
        ("--collective gather --queue 20 --bytes 4000000", "--queue: was full after"),
        ("--cluster missing.yaml", "missing.yaml"),
        ("--cluster missing.yaml --ranks 3", "says what the network is, and so does --ranks"),
    ],
)
def test_collectives_that_cannot_be(options: str, message: str) -> None:
    """Each is refused in words, with its option."""
    result = run(*options.split(), command="collective")
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split()), result.output


def test_a_cluster_file_has_its_own_links(tmp_path: Any) -> None:
    """Ranks are the job's, in its order, and each link has its own rate, delay and queue. Errors have the place in the file."""
    # In front of the slow link all of a window waits: there is no TCP that would slow down.
    made = generate.racks(4, 2, servers=1, **LINK | {"queue_bytes": None}).with_link("h2", rate_bit_s=5 * 10**7)
    path = tmp_path / "cluster.yaml"

    def of(cluster: Any, *options: str) -> click.testing.Result:
        path.write_text(file.dump(cluster))
        return run("--cluster", str(path), "--repeat", "1", *options, command="collective")

    path.write_text(file.dump(made))
    [row] = collective("--cluster", str(path), "--repeat", "1", "--bytes", "400000", "--algorithm", "ring")
    assert row["first"].endswith("4 ranks: ring") and row["link"] in ("h2 to r1", "r1 to h2")
    # The slowest link decides, 600 kB at 50 Mbit/s, and six trips of 16 KiB over another switch take 1.41 ms each.
    assert float(row["promised"]) == pytest.approx(104.5, abs=0.1) and 0.9 < float(row["ratio"]) < 1.1
    for change, error in (
        ({"loss": 0.01}, "loss: the simulator of collectives has no TCP"),
        ({"rate_bit_s": 1000}, "rate: 0.001 Mbit/s; 1 to 10000000 are possible"),
        ({"delay_ns": 10**30}, "delay: "),
        ({"queue_bytes": 2000}, "queue: 2000 bytes; 16496 and more"),
    ):
        refused = of(made.with_link("h1", **change))
        assert refused.exit_code == 2, refused.output
        assert re.search(rf"cluster\.yaml:\d+:\d+: links\[1\]\.{error}", refused.output), refused.output
    assert of(made.with_link("s0", loss=0.01)).exit_code == 0, "no rank uses the server's link"
    full = of(made.with_link("h0", queue_bytes=20_000), "--collective", "gather", "--bytes", "4000000")
    assert re.search(r"cluster\.yaml:\d+:\d+: links\[0\]\.queue: was full after", full.output), full.output
    job = dataclasses.replace(made.jobs[0], workers=("h0", "h1", "h1"))
    shared = of(dataclasses.replace(made, jobs=(job,)))
    assert re.search(r"jobs\.train\.workers\[2\]: another rank has this host", shared.output), shared.output
    assert "jobs: the simulator takes one, here are 0" in of(dataclasses.replace(made, jobs=())).output


def test_only_switches_have_queues() -> None:
    """What waits at a host waits in its memory; links that no rank uses carry nothing and have no properties."""
    made = generate.racks(2, 1, servers=1, **LINK)
    found = ranks_of_cluster(made)
    nodes = {name: number for number, name in enumerate((*made.switch, *made.host))}
    by_ends = {link[:2]: link[2:] for link in found["links"]}
    assert by_ends[nodes["h0"], nodes["r0"]] == (12_500_000, 50_000, 0, 65_536)
    assert by_ends[nodes["r0"], nodes["core"]] == (12_500_000, 50_000, 65_536, 65_536)
    assert by_ends[nodes["s0"], nodes["core"]] == (0, 0, 0, 0)
    assert (found["ranks"], found["switches"], found["hosts"]) == ([nodes["h0"], nodes["h1"]], 2, 4)


def test_long_simulations_tell_how_far_they_are_and_end_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress goes to standard error; what the callback raises, such as Ctrl-C, ends the simulation within a repetition."""
    monkeypatch.setattr("penstock.tools.simulate.collective._PROGRESS_EVERY_S", 0)
    result = run("--bytes", "4000000", "--repeat", "2", command="collective")
    assert result.exit_code == 0, result.output
    assert re.search(r"repetition 2 of 2: [\d.]+ ms so far, [\d.]+ ms promised\n", result.stderr), result.stderr
    assert len(result.stdout.splitlines()) == 4
    asked: list[int] = []

    def interrupted(ended: int, time_ns: int, promised_ns: int) -> None:
        asked.append(time_ns)
        raise KeyboardInterrupt

    network = ranks_of_cluster(generate.star(8, **LINK))
    with pytest.raises(KeyboardInterrupt):
        _core.simulate_collective(
            **network,
            collective="all_reduce",
            bytes=1 << 29,
            algorithm=None,
            repetitions=100,
            progress=interrupted,
        )
    assert len(asked) == 1
