"""`penstock bench aggregated`: the cluster and the deployments that it makes, its arithmetic, and one real run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.tools.bench import cli, figures
from penstock.tools.bench.aggregated import accuracy, cluster, times
from penstock.tools.testbed.system import unavailable
from penstock.tools.testbed.topology import Topology

needs_namespaces = pytest.mark.skipif(unavailable() is not None, reason=f"no emulated hosts here: {unavailable()}")


def test_only_the_links_of_workers_racks_and_server_have_a_limit() -> None:
    """A rack's is that of its workers together. Loss is on the workers' links."""
    shape = cluster.topology(6, 100, 0.05)
    assert isinstance(shape, Topology) and shape.nodes[6:] == ["a0", "a1", "a2", "s0"]
    assert shape.rates == {"r0": 300, "r1": 300, "a0": 0, "a1": 0, "a2": 0}
    assert shape.losses == {f"h{host}": 0.05 for host in range(6)}
    small = cluster.topology(2, 100, 0)
    assert small.racks == 1 and not small.core_aggregator and not small.losses


def test_an_unauthenticated_peer_is_one_more_host_that_no_deployment_names() -> None:
    """Racks' links are as wide as their workers' together, all the same."""
    shape = cluster.topology(4, 100, 0.1, unauthenticated=True)
    assert shape.hosts == 5 and shape.rates == {"r0": 300, "r1": 100, "a0": 0, "a1": 0, "a2": 0, "h4": 0}
    assert shape.losses == {f"h{host}": 0.1 for host in range(4)}
    [server] = cluster.deployment(shape, "int32", 64, 4)["aggregated"]["servers"]
    assert [rack["workers"] for rack in server["tree"][0]["children"]] == [[0, 1, 2], [3]]


@needs_namespaces
@pytest.mark.usefixtures("forks")
def test_a_storm_is_counted_and_leaves_the_job_its_sums() -> None:
    """The bench checks the sums, and that the aggregator has refused what the unauthenticated peer sent."""
    result = CliRunner().invoke(
        cli.command,
        ["aggregated", "--workers", "2", "--ways", "int32,storm", "--size", "4M", "--turns", "1", "--operations", "1"],
    )
    assert result.exit_code == 0, result.output
    assert "were refused" in result.output


def test_plans_name_who_aggregates_where() -> None:
    shape = cluster.topology(4, 100, 0)
    racks = [
        {"aggregator": "a0", "workers": [0, 1]},
        {"aggregator": "a1", "workers": [2, 3]},
    ]
    [server] = cluster.deployment(shape, "int16", 64, 4)["aggregated"]["servers"]
    assert server["tree"] == [{"aggregator": "a2", "children": racks}]
    assert cluster.deployment(shape, "int16", 64, 4)["aggregated"]["format"] == "int16"
    direct = cluster.deployment(shape, "int32", 64, 4, direct=True)["aggregated"]
    assert direct["format"] == "int32" and "tree" not in direct["servers"][0]
    [server] = cluster.deployment(cluster.topology(3, 100, 0), "int32", 64, 3)["aggregated"]["servers"]
    assert server["tree"] == [{"aggregator": "a0", "workers": [0, 1, 2]}]


def test_the_slowest_rank_decides_and_the_first_turn_does_not_count() -> None:
    def record(turn: int, way: str, *seconds: float, sent: int = 300) -> dict[str, object]:
        return {
            "turn": turn,
            "way": way,
            "seconds": list(seconds),
            "tensor_bytes": 100,
            "sent": sent,
            "received": 400,
            "busy": 0.5,
        }

    ranks = [
        [record(-1, "ring", 9.0, 9.0), record(0, "ring", 1.0, 4.0), record(0, "int32", 1.0, 1.0)],
        [record(-1, "ring", 9.0, 9.0), record(0, "ring", 3.0, 2.0, sent=500), record(0, "int32", 1.0, 2.0)],
    ]
    ring, through = times.summarise(ranks, loss=0.0, rate_mbit=0.001)
    assert (ring.seconds, ring.sent, ring.received) == (3.5, 2.0, 2.0)
    assert ring.share == pytest.approx(100 * 8 / 3.5 / 1000)
    assert (through.way, through.seconds, through.workers) == ("int32", 1.5, 2)


def test_the_figure_holds_aggregators_against_the_ring() -> None:
    """Of the link, over the ring, and bytes each way; more bytes than one for one miss the target."""

    def row(way: str, seconds: float, sent: float, received: float) -> times.Row:
        return times.Row(4, 0.0, way, seconds, 15_000_000, sent, received, 0.3, rate_mbit=120)

    [figure] = [figure for figure in figures.FIGURES if isinstance(figure, figures.AggregatedFigure)]
    share, over, sent, received = figure.findings([row("ring", 1.875, 1.5, 1.5), row("int32", 1.25, 1.06, 1.2)])
    assert (share.value, over.value, sent.value, received.value) == pytest.approx((0.8, 1.5, 1.06, 1.2))
    assert (share.of_target, over.of_target) == pytest.approx((0.8 / 0.9, 1.5 / 1.35))
    assert (sent.of_target, received.of_target) == pytest.approx((1.0, 1.06 / 1.2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ways", "ring,tree"], "no way tree: there are ring"),
        (["--losses", "0,1"], "shares of packets"),
        (["--losses", "a"], "shares of packets"),
        (["--workers", "1"], "2 ranks or more"),
        (["--faults", "2", "--training", "50"], "one at a time"),
        (["--faults", "2", "--report", "x.html"], "leave it out"),
        (["--training", "3"], "x>=20"),
        (["--accuracy", "lstm", "--training", "50"], "one at a time"),
        (["--accuracy", "lstm,gru"], "no model gru: there are lstm, vgg, resnet"),
        (["--accuracy", "lstm,vgg"], "name their folder with --images"),
        (["--accuracy", "vgg", "--images", "."], "train/CLASS/ and test/CLASS/"),
    ],
)
def test_wrong_options_say_what_is_wrong(options: list[str], message: str) -> None:
    result = CliRunner().invoke(cli.command, ["aggregated", *options])
    assert result.exit_code == 2 and message in result.output


@needs_namespaces
@pytest.mark.usefixtures("forks")
def test_a_worker_sends_each_byte_once(tmp_path: Path) -> None:
    """4 workers, two racks and a core. The ring sends 1.5 bytes for each of the tensor; through aggregators it is 1."""
    path = tmp_path / "rows.json"
    options = ["--workers", "4", "--ways", "ring,int32", "--size", "4M", "--turns", "1", "--operations", "2"]
    result = CliRunner().invoke(cli.command, ["aggregated", *options, "--json", str(path)])
    assert result.exit_code == 0, result.output
    rows = {row["way"]: row for row in json.loads(path.read_text())["runs"]}
    assert rows["int32"]["sent"] < 1.2 < 1.5 < rows["ring"]["sent"]


@needs_namespaces
@pytest.mark.usefixtures("forks")
def test_the_figure_runs(tmp_path: Path) -> None:
    """Once, by its name among the published figures."""
    path = tmp_path / "figures.json"
    result = CliRunner().invoke(cli.command, ["figures", "aggregated", "--rounds", "1", "--json", str(path)])
    assert result.exit_code == 0, result.output
    told = json.loads(path.read_text())
    assert [row["way"] for row in told["runs"][0]["rows"]] == ["ring", "int32"]
    assert {finding["figure"] for finding in told["findings"]} == {"aggregated"}
    assert told["findings"][2]["value"] < 1.2


def test_the_accuracy_lost_is_that_of_the_same_seed() -> None:
    """Not the difference of means alone; and what gloo's own seeds differ by stands beside it."""
    said = [
        {"way": way, "seed": seed, "accuracy": right, "examples": 100}
        for seed, rights in enumerate([(0.50, 0.49, 0.52), (0.60, 0.61, 0.56)])
        for way, right in zip(accuracy.WAYS, rights, strict=True)
    ]
    outcome = accuracy.summarise([{"rank": 0}, *said], "vgg", 2, 10)
    assert outcome.lost("int32") == pytest.approx([0.01, -0.01])
    assert outcome.lost("int16") == pytest.approx([-0.02, 0.04])
    assert outcome.noise == pytest.approx(0.0707, abs=1e-4)
    assert outcome.lines()[0].endswith("the paper's loss of accuracy: 1.60%")


@needs_namespaces
@pytest.mark.usefixtures("forks")
def test_models_learn_from_images_through_aggregators(tmp_path: Path) -> None:
    """Black and white images, after a few steps, with gloo and with both formats; the ranks see that all went through."""
    pytest.importorskip("PIL", reason="the extra report is missing")
    from PIL import Image

    for part, count in (("train", 24), ("test", 8)):
        for shade in (0, 255):
            folder = tmp_path / "images" / part / str(shade)
            folder.mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (32, 32), (abs(shade - number),) * 3).save(folder / f"{number}.png")
    path = tmp_path / "accuracy.json"
    options = ["--accuracy", "vgg", "--images", str(tmp_path / "images"), "--steps", "12", "--seeds", "1"]
    result = CliRunner().invoke(cli.command, ["aggregated", *options, "--workers", "2", "--json", str(path)])
    assert result.exit_code == 0, result.output
    [outcome] = json.loads(path.read_text())["runs"]
    assert outcome["examples"] == 16 and set(outcome["accuracies"]) == {"gloo", "int32", "int16"}
    assert all(0.9 < right[0] <= 1 for right in outcome["accuracies"].values())
