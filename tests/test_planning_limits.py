"""Proves what the planner does at its limits: tiny parts, short times, no solver, files of several jobs, proofs."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import math
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
from click.testing import CliRunner

from penstock.cli import main
from penstock.cluster import deployment as deployments
from penstock.cluster import file, generate
from penstock.cluster.network import Cluster, Job
from penstock.errors import Config
from penstock.planning import relax as relaxing
from penstock.planning import solver
from penstock.planning.bound import bound_of_all
from penstock.planning.conflict import conflict
from penstock.planning.deploy import scheme_in
from penstock.planning.evaluate import evaluate, evaluate_all
from penstock.planning.exact import exact
from penstock.planning.problem import Problem
from penstock.planning.relax import relax
from penstock.planning.several import in_turn, joint
from penstock.planning.solve import scheme_of, search
from penstock.tools.bench.planner import fat_tree
from penstock.tools.plan import planned
from planned import MBIT, cluster_of


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(main, [str(each) for each in arguments])


def unlike_servers() -> Cluster:
    """A server of 800 Mbit/s beside one of 10 kbit/s, and two jobs that share no host."""
    at = dict.fromkeys(("h0", "h1", "h2", "h3", "s0", "s1"), "r0")
    cluster = cluster_of(at, {}, aggregators={}, servers={"s0": 800, "s1": 0.01}, workers=["h0", "h1"])
    return dataclasses.replace(
        cluster, jobs=(Job(name="one", workers=("h0", "h1")), Job(name="other", workers=("h2", "h3")))
    )


def four_workers() -> Cluster:
    """The guide's: two racks with an aggregator each, and servers that take in 800 and 200 Mbit/s."""
    text = (pathlib.Path(__file__).parent.parent / "docs" / "guide" / "plan.md").read_text()
    return file.parse(text.split("```yaml\n")[1].split("```")[0], "cluster.yaml")


@pytest.mark.parametrize("way", [in_turn, joint])
def test_a_part_too_small_to_be_written_has_no_rate(way: Any) -> None:
    """Where a server is far weaker than another, its part is left out, and the rates are those of what is written."""
    cluster = unlike_servers()
    found = way(cluster, cluster.jobs, seconds=1)
    assert all(each.scheme.fractions == {"s0": 1.0} for each in found)
    assert evaluate_all(cluster, [(each.job, each.scheme, each.rate) for each in found]).rate >= 1 - 1e-9
    problem = Problem(cluster, cluster.jobs[0])
    alone = search(problem, seconds=1)
    worth = evaluate(cluster, cluster.jobs[0], scheme_of(problem, alone.rates, alone.trees))
    assert worth.rate == pytest.approx(alone.rate, rel=1e-9)


@pytest.mark.parametrize("way", ["joint", "in-turn"])
def test_all_jobs_figures_and_files(way: str, tmp_path: pathlib.Path) -> None:
    """The figures are also JSON, the folder may be there already, each deployment says what it is worth beside the others, and
    `explain` says that it counts none of them."""
    path, folder, figures = tmp_path / "cluster.yaml", tmp_path / "deployments", tmp_path / "plan.json"
    path.write_text(file.dump(unlike_servers()))
    folder.mkdir()
    said = run("plan", path, "--all-jobs", way, "--seconds", "1", "-o", folder, "--json", figures)
    assert said.exit_code == 0 and re.search(r"^other +200 Mbit/s +100.0%  server s0$", said.output, re.M), said.output
    rows = json.loads(figures.read_text())
    assert [(row["job"], row["full"], row["levels"]) for row in rows] == [
        ("one", "server s0", 1),
        ("other", "server s0", 1),
    ]
    assert all(row["rate_bit_s"] <= row["bound_bit_s"] for row in rows)
    text = (folder / "one.yaml").read_text()
    assert text.startswith("# Planned: 200 Mbit/s a worker, while other sends 200 Mbit/s\n# Bound: 200 Mbit/s\n# Gap: ")
    assert "\n# Full: server s0\n" in text
    told = run("plan", "explain", folder / "one.yaml")
    assert told.exit_code == 0 and "Alone: what other may send is not counted." in told.output, told.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--at-least", "1 Mbit/s"], "are for one job, and --all-jobs plans all of the file"),
        (["--job", "one"], "are for one job"),
        (["--gradient", "1 MB"], "are for one job"),
        (["-o", "taken"], "is a file: with --all-jobs -o is a folder"),
    ],
)
def test_options_that_make_no_sense_for_all_jobs(
    options: list[str], words: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are refused in a sentence, and not left out silently."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster.yaml").write_text(file.dump(unlike_servers()))
    (tmp_path / "taken").touch()
    said = run("plan", "cluster.yaml", "--all-jobs", "joint", "--seconds", "0.5", *options)
    assert said.exit_code == 2 and words in said.output.replace("\n", " "), said.output


def test_a_job_that_nothing_limits_is_told(tmp_path: pathlib.Path) -> None:
    """Beside one that has limits."""
    at = dict.fromkeys(("h0", "h1", "h2", "h3", "s0"), "r0")
    cluster = cluster_of(at, {"h0": 10}, aggregators={}, servers={"s0": None}, workers=["h0", "h1"])
    jobs = (Job(name="one", workers=("h0", "h1")), Job(name="other", workers=("h2", "h3")))
    path = tmp_path / "cluster.yaml"
    path.write_text(file.dump(dataclasses.replace(cluster, jobs=jobs)))
    for way in ("joint", "in-turn"):
        said = run("plan", path, "--all-jobs", way, "--seconds", "0.5")
        assert said.exit_code == 1 and re.search("Error: nothing limits a way that .*other can take", said.output), (
            said.output
        )


def test_a_deployment_goes_into_a_file(tmp_path: pathlib.Path) -> None:
    """A folder is none."""
    (tmp_path / "cluster.yaml").write_text(file.dump(four_workers()))
    assert "is a folder" in run("plan", tmp_path / "cluster.yaml", "-o", tmp_path).output


# -------------------------------------------------------------------------------------------------------------- short times


def test_a_large_programs_time_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that HiGHS would work on for far longer is given up in time; one that ends in its own process has the same
    result as here."""
    cluster = fat_tree(50, 4, True, 0)
    problem = Problem(cluster, cluster.jobs[0])
    whole = relax(problem)
    monkeypatch.setattr(solver, "_LARGE", 100)
    start = time.monotonic()
    assert not relax(problem, seconds=0.2).is_solved
    took = time.monotonic() - start
    assert took < 20, took
    again = relax(problem, seconds=300)
    assert again.is_solved and again.bound == whole.bound and (again.prices == whole.prices).all()


def test_a_large_programs_end_in_time_is_not_the_solvers_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """What never ends by itself is killed."""
    monkeypatch.setattr(solver, "_PROGRAM", "import time\nwhile True: time.sleep(1)")
    start = time.monotonic()
    assert solver.linear({"c": [1.0]}, 1_000_000, 0.3) is None
    assert time.monotonic() - start < 30
    monkeypatch.setattr(solver, "_PROGRAM", "raise SystemExit('no memory')")
    with pytest.raises(RuntimeError, match="the solver's process failed: no memory"):
        solver.linear({"c": [1.0]}, 1_000_000, 60)


def test_the_solvers_process_outlives_nobody() -> None:
    """Where nobody is left to kill it, it ends by itself."""
    process = subprocess.Popen([sys.executable, "-c", solver._PROGRAM, "0.01"], stdin=subprocess.PIPE)
    assert process.wait(60) == -signal.SIGALRM
    assert process.stdin is not None
    process.stdin.close()


def test_what_stands_against_a_rate_is_told_in_time() -> None:
    """On 54 hosts, whose smallest set takes minutes: within the time, with what is left, and progress meanwhile."""
    cluster = fat_tree(50, 4, True, 0)
    problem = Problem(cluster, cluster.jobs[0])
    told: list[int] = []
    start = time.monotonic()
    found = conflict(problem, 15 * MBIT, seconds=5, progress=told.append)
    assert time.monotonic() - start < 60
    assert not found.is_smallest and told == sorted(told, reverse=True), (found, told)
    # All that is named together is enough.
    assert not found.limits or relax(problem).bound < 15 * MBIT
    assert conflict(problem, 15 * MBIT, seconds=0.0).limits == []


def test_progress_is_told_after_two_seconds() -> None:
    """Also where the first program takes long."""
    cluster = fat_tree(50, 4, True, 0)
    told: list[str] = []
    with pytest.raises(Config, match=r"no deployment reaches 15 Mbit/s a worker"):
        planned.plan(cluster, cluster.jobs[0], seed=0, seconds=6, at_least=15 * MBIT, progress=told.append)
    assert told and told[0].startswith("looking for what stands against it"), told


def test_out_of_time_is_told(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the linear program does not end in time, text and deployment say that the bound is from prices, and InArt's row says
    why it has no rate; --at-least says that the time was too short."""
    monkeypatch.setattr(relaxing, "linear", lambda *_: None)
    path = tmp_path / "cluster.yaml"
    path.write_text(file.dump(generate.leaf_spine(3, 2, 4, servers=2, rate_bit_s=100 * MBIT)))
    said = run("plan", path, "--seconds", "0.5", "-o", tmp_path / "deployment.yaml")
    assert said.exit_code == 0, said.output
    assert "The linear program did not end in time. So the bound is from prices alone" in said.output
    assert re.search(r"^InArt: one random rounding +- +not computed: it needs the linear program$", said.output, re.M)
    assert ", from prices: the linear program was not solved\n" in (tmp_path / "deployment.yaml").read_text()
    said = run("plan", "explain", path, "--seconds", "0.5")
    assert said.exit_code == 0 and "The linear program did not end in time" in said.output, said.output
    said = run("plan", path, "--seconds", "0.5", "--at-least", "1 Gbit/s")
    assert said.exit_code == 1 and "0.5 s were too few to see what stands against it" in said.output, said.output


def test_without_a_solver(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without scipy there is still a deployment, within a bound that holds, and what is missing is said."""
    cluster = four_workers()
    (job,) = cluster.jobs
    problem = Problem(cluster, job)
    best = relax(problem).bound
    path, written = tmp_path / "cluster.yaml", tmp_path / "deployment.yaml"
    path.write_text(file.dump(cluster))
    for name in [name for name in sys.modules if name.partition(".")[0] == "scipy"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "scipy", None)
    assert best <= bound_of_all(problem, relax(problem)) < math.inf
    said = run("plan", path, "--seconds", "0.5", "-o", written)
    assert said.exit_code == 0 and "pip install 'penstock[tune]'" in said.output, said.output
    worth = evaluate(cluster, job, scheme_in(cluster, job, deployments.parse(written.read_text(), "d", str(tmp_path))))
    assert 0.9 * 422.2 * MBIT < worth.rate < 422.3 * MBIT
    said = run("plan", path, "--seconds", "0.5", "--at-least", "5 Gbit/s")
    assert said.exit_code == 1 and "which limits stand against it only a solver tells" in said.output, said.output


def test_a_small_plan_is_proven(tmp_path: pathlib.Path) -> None:
    """The guide's four workers: no deployment is faster, although the bound is, and that is said, also in the deployment."""
    path, written = tmp_path / "cluster.yaml", tmp_path / "deployment.yaml"
    path.write_text(file.dump(four_workers()))
    said = run("plan", path, "--seconds", "20", "-o", written)
    assert said.exit_code == 0 and "84.4% of the bound" in said.output, said.output
    assert "Proven best: no deployment with one level of aggregators is faster." in said.output
    assert "may find a better deployment" not in said.output
    assert "# Gap: 15.6% below the bound, and proven best\n" in written.read_text()
    large = fat_tree(50, 4, True, 0)
    assert not planned.is_provable(Problem(large, large.jobs[0]))
    said = run("plan", path, "--seconds", "20", "--at-least", "450 Mbit/s")
    assert said.exit_code == 1 and "below 450 Mbit/s, and is proven best; full is" in said.output, said.output


def test_the_solver_says_nothing_of_its_own(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """HiGHS writes a debugger's line to the standard output now and then; a command's output is its own."""
    import scipy.optimize

    milp = scipy.optimize.milp

    def saying(*arguments: Any, **named: Any) -> Any:
        ctypes.CDLL(None).puts(b"HighsMipSolverData")
        os.write(1, b"tmpSolver.run()")
        return milp(*arguments, **named)

    monkeypatch.setattr(scipy.optimize, "milp", saying)
    cluster = four_workers()
    best, is_proven = exact(Problem(cluster, cluster.jobs[0]))
    print("after")
    assert is_proven and best.rate > 0 and capfd.readouterr().out == "after\n"


# ---------------------------------------------------------------------------------------------------------------- bad input


def test_missing_and_impossible_things_have_a_place(tmp_path: pathlib.Path) -> None:
    """No server, and more servers than bytes: the file and the place are named. --gradient takes the place of the file's."""
    path = tmp_path / "cluster.yaml"
    cluster = four_workers()
    path.write_text(file.dump(dataclasses.replace(cluster, servers=())))
    assert re.search(r"cluster.yaml:1:1: servers: are needed to plan", run("plan", path).output)
    small = dataclasses.replace(cluster, jobs=(dataclasses.replace(cluster.jobs[0], gradient_bytes=1),))
    path.write_text(file.dump(small))
    said = run("plan", path, "--seconds", "1")
    assert said.exit_code == 1, said.output
    assert re.search(r"cluster.yaml:\d+:\d+: jobs.train.gradient: is 1 B, and each of 2 servers needs", said.output)
    said = run("plan", path, "--seconds", "1", "--gradient", "422.2 MB")
    assert said.exit_code == 0 and "A step's gradients take 8 s on their way" in said.output, said.output
    for text, words in (("97", "--gradient"), ("0 B", "give at least one byte")):
        said = run("plan", path, "--gradient", text)
        assert said.exit_code == 2 and words in said.output, said.output
