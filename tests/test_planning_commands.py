"""Proves what `penstock plan explain`, `penstock plan --all-jobs` and `penstock bench plan` say and write."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from typing import Any

import pytest
from click.testing import CliRunner

from penstock.cli import main
from penstock.cluster import deployment as deployments
from penstock.cluster import file, generate
from penstock.cluster.network import Job
from penstock.planning import baselines
from penstock.planning.evaluate import evaluate
from penstock.planning.problem import Problem
from penstock.tools.bench import planner
from penstock.tools.plan import explained
from planned import MBIT


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(main, [str(each) for each in arguments])


@pytest.fixture
def cluster_path(tmp_path: pathlib.Path) -> pathlib.Path:
    """Two leaves and two spines; between the leaves is less than hosts have."""
    cluster = generate.leaf_spine(2, 2, 4, servers=2, rate_bit_s=100 * MBIT, uplink={"rate_bit_s": 50 * MBIT})
    job = dataclasses.replace(cluster.jobs[0], gradient_bytes=1 << 20)
    path = tmp_path / "cluster.yaml"
    path.write_text(file.dump(dataclasses.replace(cluster, jobs=(job,))))
    return path


def test_explain(cluster_path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A deployment is explained as it was proposed, and its page draws every switch and what is full."""
    written = tmp_path / "deployment.yaml"
    said = run("plan", cluster_path, "-o", written, "--seconds", "1")
    assert said.exit_code == 0, said.output
    rate = re.search(r"^([\d.]+ Mbit/s) a worker, [\d.]+% of the bound. Full: ", said.output, re.MULTILINE)
    assert rate, said.output
    assert "through: [leaf" in written.read_text()
    report = tmp_path / "plan.html"
    told = run("plan", "explain", written, "--report", report)
    assert told.exit_code == 0, told.output
    assert (
        told.output.startswith(f"{rate[1]} a worker, ") and "server s0: " in told.output and "fullest:" in told.output
    )
    page = report.read_text()
    assert page.count("<svg") == 2 and "var(--bad)" in page
    for switch in ("leaf0", "leaf1", "spine0", "spine1"):
        assert f">{switch}</text>" in page
    # Of a cluster file, what is planned for it.
    again = run("plan", "explain", cluster_path, "--seconds", "1")
    assert again.exit_code == 0 and re.match(r"[\d.]+ Mbit/s a worker, [\d.]+% of the bound. Full: ", again.output), (
        again.output
    )


def test_explain_says_what_it_cannot(cluster_path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A deployment with addresses has no network; one without a job has no workers."""
    old = tmp_path / "old.yaml"
    old.write_text("version: 1\naggregated:\n  servers:\n    - address: 10.77.2.1:7471\n")
    assert "version 1 has no cluster file" in run("plan", "explain", old).output
    two = tmp_path / "two.yaml"
    cluster = file.load(str(cluster_path))
    jobs = (*cluster.jobs, dataclasses.replace(cluster.jobs[0], name="other"))
    (tmp_path / "both.yaml").write_text(file.dump(dataclasses.replace(cluster, jobs=jobs)))
    two.write_text("version: 2\ncluster: both.yaml\naggregated:\n  servers:\n    - server: s0\n")
    said = run("plan", "explain", two)
    assert said.exit_code == 1 and "choose with `job:` whose workers these are, from train, other" in said.output
    assert "none.yaml" in run("plan", "explain", tmp_path / "none.yaml").output


def test_the_picture_has_what_the_judge_says() -> None:
    """Every used link is a line as wide as its load, and what is full is marked; workers of a switch are one point."""
    cluster = generate.fat_tree(4, servers=2, seed=3, rate_bit_s=100 * MBIT)
    (job,) = cluster.jobs
    scheme = baselines.hierarchical(Problem(cluster, job))
    worth = evaluate(cluster, job, scheme)
    drawn = explained.network(explained.Explained(cluster, job, scheme, worth, None))
    assert {node.tier for node in drawn.nodes} == {0, 1, 2, 3} and len({node.name for node in drawn.nodes}) == len(
        drawn.nodes
    )
    of = {load.name: load for load in worth.loads}
    widest = max(load.load for load in worth.loads if load.name.startswith("link "))
    edges = {edge.told.split(":")[0]: edge for edge in drawn.edges}
    for link in cluster.links:
        name = f"link {link.name}"
        if name in edges:
            load = of.get(name)
            assert edges[name].load == pytest.approx(0 if load is None else load.load / widest)
            assert edges[name].is_full == (load is not None and load.share > 1 - 1e-6)
    assert any(edge.is_full for edge in drawn.edges)
    workers = [node for node in drawn.nodes if node.name.startswith("workers of ")]
    assert sum(int(node.label.split()[0]) if " " in node.label else 1 for node in workers) == len(job.workers)


@pytest.mark.parametrize("way", ["joint", "in-turn"])
def test_all_jobs(way: str, cluster_path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Each job has a deployment of its own, which the ranks' parser takes."""
    cluster = file.load(str(cluster_path))
    hosts = cluster.jobs[0].workers
    jobs = (Job(name="one", workers=hosts[:3]), Job(name="other", workers=hosts[3:]))
    cluster_path.write_text(file.dump(dataclasses.replace(cluster, jobs=jobs)))
    said = run("plan", cluster_path, "--all-jobs", way, "--seconds", "2", "-o", tmp_path / "deployments")
    assert said.exit_code == 0 and "is the slowest with" in said.output, said.output
    for job in jobs:
        path = tmp_path / "deployments" / f"{job.name}.yaml"
        read = deployments.parse(path.read_text(), str(path), str(path.parent))
        read.check_world(len(job.workers))
        assert f"job: {job.name}" in path.read_text()


def test_at_least(cluster_path: pathlib.Path) -> None:
    """A rate that no deployment reaches is refused with the limits that stand against it; one that is reached is not."""
    said = run("plan", cluster_path, "--seconds", "1", "--at-least", "10 Mbit/s")
    assert said.exit_code == 0, said.output
    said = run("plan", cluster_path, "--seconds", "1", "--at-least", "900 Mbit/s")
    assert said.exit_code == 1 and "no deployment reaches 900 Mbit/s a worker, since together" in said.output
    # Of several limits, each of which is enough, those count that the search has come to within its second.
    assert re.search(r"the own links of train's workers leave each 100 Mbit/s|link \S+ carries 50 Mbit/s", said.output)
    assert "--at-least" in run("plan", cluster_path, "--at-least", "fast").output


def test_no_place_names_what_conflicts(tmp_path: pathlib.Path) -> None:
    """Where too many workers are there for a server, the limit is named."""
    cluster = generate.star(70, rate_bit_s=100 * MBIT)
    hosts = [host.name for host in cluster.hosts]
    path = tmp_path / "cluster.yaml"
    text = file.dump(dataclasses.replace(cluster, jobs=(Job(name="train", workers=tuple(hosts[1:])),)))
    path.write_text(text + "servers:\n  s0: {at: h0}\n" if "servers:" not in text else text)
    said = run("plan", path, "--seconds", "1")
    assert said.exit_code == 1 and "server s0 has at most 64 children" in said.output, said.output


def test_bench_plan_in_small(tmp_path: pathlib.Path) -> None:
    """Figure 1 comes out exactly, each network has every way, deployments are below their bounds and above one rounding, and
    the page and the JSON have the figures."""
    path, report = tmp_path / "plan.json", tmp_path / "plan.html"
    few = ["--seeds", "1", "--seconds", "0.5", "--workers", "6", "--servers", "", "--no-large"]
    said = run("bench", "plan", *few, "--json", path, "--report", report)
    assert said.exit_code == 0, said.output
    for line in (
        "LBMM 1.333 4/3",
        "ATP 2.000 2",
        "the paper's deployment 2.500 5/2, as its best",
        "planned 2.667",
        "proven best 2.667",
    ):
        assert line in re.sub(r" +", " ", said.output), said.output
    # Section 5.2: rates of LBMM as in the paper, which the unit was taken from, and the proven best of figure 1 in that unit.
    (sent,) = re.findall(r"^ 6 +([\d.]+) .* ([\d.]+) *$", said.output, re.M)
    assert sent == (f"{11.55 * 8 / 3:.1f}", "15.4"), said.output
    written = json.loads(path.read_text())
    rows = [planner.Row(**row) for row in written["runs"]]
    # The small tables are figures, too; and deployments are compared with the best of the others in each network.
    assert [each["title"].partition(":")[0] for each in written["small"]] == [
        "Section 2.1, figure 1",
        "Section 5.2",
        "Section 5.2",
    ]
    assert ["proven best", "2.667", ""] in written["small"][0]["lines"]
    for uneven in (False, True):
        rates = {row.way: row.rate_bit_s for row in rows if row.uneven == uneven}
        ratio = rates[planner.OURS] / max(
            rates[way] for way in (planner.INART, planner.R_INART, planner.ATP, planner.LBMM)
        )
        assert f"{ratio:.2f}x, {ratio:.2f}x at least" in said.output, said.output
    networks = {(row.uneven, row.workers, row.servers, row.seed) for row in rows}
    assert len(networks) == 2 and len(rows) == len(networks) * len(planner.WAYS)
    of = {(row.uneven, row.workers, row.servers, row.way): row for row in rows}
    for uneven, workers, servers, _ in networks:
        rates = {way: of[uneven, workers, servers, way].rate_bit_s for way in planner.WAYS}
        assert rates[planner.BOUND] * (1 + 1e-6) >= rates[planner.OURS] >= rates[planner.INART], rates
        assert rates[planner.OURS] >= rates[planner.ATP] * (1 - 1e-9) and rates[planner.OURS] >= rates[planner.LBMM] * (
            1 - 1e-9
        ), rates
        straight = of[uneven, workers, servers, planner.LBMM]
        # Every worker's whole gradient reaches the servers, and crosses two links at least.
        assert straight.taken_in == pytest.approx(workers) and (straight.crossed or 0) >= 2 * workers
    assert report.read_text().count("<svg") >= 2 and "Beside the paper" in report.read_text()


@pytest.mark.parametrize(
    ("options", "switches", "workers"),
    [
        (["--fat-tree", "4", "--servers", "2"], 20, 14),
        (["--rails", "2", "--hosts", "3", "--servers", "2"], 3, 6),
    ],
)
def test_generated_networks_are_written_and_planned(
    options: list[str], switches: int, workers: int, tmp_path: pathlib.Path
) -> None:
    """A fat-tree and rails are a command, and `penstock plan` takes what it writes. What they do not take is refused."""
    path = tmp_path / "cluster.yaml"
    said = run("testbed", "write", path, *options, "--rate", "100")
    assert said.exit_code == 0, said.output
    cluster = file.load(str(path))
    assert len(cluster.switches) == switches and len(cluster.jobs[0].workers) == workers
    assert {link.rate_bit_s for link in cluster.links} == {100 * MBIT}
    said = run("plan", path, "--seconds", "0.5")
    assert said.exit_code == 0 and "Mbit/s a worker" in said.output, said.output
    for wrong, words in ((["--racks", "2"], "and not --racks"), (["--spines", "2"], "and not --spines")):
        said = run("testbed", "write", path, *options, *wrong)
        assert said.exit_code == 2 and words in said.output.replace("\n", " "), said.output
    assert "give an even number" in run("testbed", "write", path, "--fat-tree", "5").output
