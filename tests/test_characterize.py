"""The matrix of a characterisation, what is made of its runs, and the paper's statements."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.errors import Config
from penstock.profiling.breakdown import Breakdown, Moving, Share
from penstock.profiling.record import Header, Readings, Record, Step
from penstock.tools.characterize import cli, findings, matrix, results, running, tables
from penstock.tools.characterize.matrix import Cell
from penstock.tools.characterize.results import Outcome
from penstock.workloads.transformer.shapes import MODELS

CELL = Cell("gpt2-tiny", "data", 2, 8, 0, "tcp-4", 100.0, 0.0, "strong", 0)
SECOND = 1_000_000_000


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "matrix.yaml"
    path.write_text(text)
    return path


def test_a_matrix_is_the_product_of_its_lists(tmp_path: Path) -> None:
    """Weak scaling multiplies batches by ranks; what cannot run is left out with its reason; nothing is twice."""
    path = written(
        tmp_path,
        """
        steps: 12
        models: [gpt2-tiny, bert-tiny]
        runs:
          - {ranks: [2, 4], batches: 4, scaling: [strong, weak], transports: [gloo, tcp-16], links_mbit: [100, 1000]}
          - {models: gpt2-tiny, ranks: 2, batches: 4, links_mbit: 100, transports: gloo}
          - {models: gpt2-tiny, parallel: pipeline, ranks: [1, 2], batches: 8, micro_batch: 2, transports: [shm]}
        """,
    )
    found = matrix.read(path, sorted(MODELS))
    assert (found.steps, found.repeats, found.seed) == (12, 3, 1)
    assert len(found.cells) == 2 * 2 * 2 * 2 * 2 + 1
    assert {cell.batch for cell in found.cells if cell.scaling == "weak"} == {8, 16}
    [(left, why)] = found.left_out
    assert left.ranks == 1 and why == "a pipeline needs two ranks or more"
    assert len({cell.key for cell in found.cells}) == len(found.cells)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "a matrix has keys"),
        ("models: gpt3", "models has 'gpt3'; there are bert-large"),
        ("modells: gpt2-tiny", "nobody knows modells"),
        ("models: gpt2-tiny\nranks: two", "ranks has 'two', which is no number"),
        ("models: gpt2-tiny\nranks: 0", "ranks has 0"),
        ("models: gpt2-tiny\nranks: [true]", "ranks has True"),
        ("models: gpt2-tiny\nsteps: 0", "steps is a whole number above 0"),
        ("models: gpt2-tiny\ntransports: [rdma]", "there is no transport over RDMA"),
        ("models: gpt2-tiny\ntransports: [tcp-0]", "transports has 'tcp-0'"),
        ("models: gpt2-tiny\ntransports: [gloo-2]", "transports has 'gloo-2'"),
        ("models: []", "models is missing"),
        ("ranks: 2", "models is missing"),
        ("models: gpt2-tiny\nruns: []", "runs is a list"),
        ("models: gpt2-tiny\nruns: [{batch: 3}]", "run 1: a product has keys"),
        ("models: [", "is no YAML"),
    ],
)
def test_a_wrong_matrix_says_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(Config, match=message.replace("[", r"\[")):
        matrix.read(written(tmp_path, text), sorted(MODELS))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 7}, "a batch of 7 is no multiple of 3 sequences on each of 2"),
        ({"transport": "shm"}, "share no memory"),
        ({"transport": "aggregated", "link_mbit": 0.0}, "give aggregated a link"),
        ({"transport": "aggregated", "parallel": "pipeline"}, "hardly anything to sum"),
        ({"transport": "aggregated", "flow_mbit": 50.0}, "give aggregated no flow_mbit"),
        ({"batch": 1}, "a batch of 1 is no multiple"),
        ({}, ""),
    ],
)
def test_cells_that_cannot_run(change: dict[str, object], message: str) -> None:
    assert message in (told := replace(CELL, **change).refusal()) and bool(told) == bool(message)  # type: ignore[arg-type]


def test_what_runs() -> None:
    """On emulated hosts with a link, under torchrun without; the transport is settings, and no others reach the ranks."""
    command = " ".join(running.command_of(CELL, 30, 5))
    assert "testbed run --quiet --hosts 2 --rate 100 -- " in command and "--backend penstock" in command
    here = replace(CELL, link_mbit=0.0, transport="gloo")
    command = " ".join(running.command_of(here, 30, 5))
    assert "torch.distributed.run --standalone --nproc-per-node 2" in command and "--backend gloo" in command
    environment = running.environment_of(CELL, {"PENSTOCK_STREAMS": "9", "PENSTOCK_TUNE": "1", "HOME": "/"})
    assert environment == {"HOME": "/", "OMP_NUM_THREADS": "1", "PENSTOCK_SHM": "0", "PENSTOCK_STREAMS": "4"}
    assert "PENSTOCK_STREAMS" not in running.environment_of(replace(CELL, transport="tcp"), {})
    assert "PENSTOCK_SHM" not in running.environment_of(replace(CELL, transport="shm"), {})


@pytest.mark.parametrize("unit", [1, 2, 6])
@pytest.mark.parametrize("limit", [0, 1, 5, 6, 63, 64, 65, 1000])
def test_the_largest_batch_is_found_by_bisection(unit: int, limit: int) -> None:
    """The largest multiple that fits, with few tries, and none beyond what may be asked for."""
    tried: list[int] = []

    def fits(batch: int) -> bool:
        tried.append(batch)
        return batch <= limit

    assert running.largest(fits, unit, 512) == min(limit, 512) // unit * unit
    assert len(tried) <= 22 and all(batch % unit == 0 and batch <= 512 for batch in tried)


def outcome(cell: Cell = CELL, repeat: int = 0, **changes: object) -> Outcome:
    usual = Outcome(
        cell,
        repeat,
        100.0,
        {"forward": 20.0, "backward": 30.0, "optimizer": 10.0},
        {"data-parallel sync": 40.0},
        {"data-parallel sync": 10.0},
        {},
        1e6,
        60.0,
        90.0,
    )
    return replace(usual, **changes)  # type: ignore[arg-type]


def test_what_a_link_received() -> None:
    """Mean over steps without the first two, and the highest rate, of the busiest interface but the loopback; mean over hosts."""
    records = []
    for host, rate in (("a", 1e6), ("b", 3e6)):
        record = Record(Header(len(records), 2, host, 1, 0, 0))
        record.steps = [Step(number, number * SECOND, (number + 1) * SECOND) for number in range(6)]
        for at in range(61):
            # In the warm-up four times as much; in the last second twice.
            moved = rate / 10 * (4 * min(at, 20) + max(0, at - 20) + max(0, at - 50))
            values = {"nic.eth0.rx_bytes": moved, "nic.eth0.tx_bytes": 0.0, "nic.lo.rx_bytes": 1e9 * at}
            record.readings.append(Readings(at * SECOND // 10, values))
        records.append(record)
    assert running.received(records) == pytest.approx((8 * 2e6 * 1.25 / 1e6, 8 * 2e6 * 2 / 1e6))
    assert running.received([Record(Header(0, 1, "a", 1, 0, 0))]) == (0.0, 0.0)


def test_outcomes_are_kept_and_read_again(tmp_path: Path) -> None:
    moving = Moving(4e6, 1e6, 2e6, 0.0, 1000.0, 3.0, {1: 1e6})
    shares = tuple(Share(rank, 20, 5, 1e7 + rank * 2e6, {"forward": 5e6}, {"tensor": moving}) for rank in (0, 1))
    made = results.outcome_of(CELL, 2, Breakdown(shares, {}, ("a remark",)), 12.0, 34.0)
    assert made.step_ms == pytest.approx(11) and made.exposed == {"tensor": pytest.approx(5)}
    assert made.waits["tensor"] == pytest.approx(1) and made.hidden["tensor"] == pytest.approx(2)
    results.write(tmp_path, made)
    results.write(tmp_path, replace(made, repeat=0))
    assert results.read(tmp_path) == [replace(made, repeat=0), made]
    with pytest.raises(Config, match="recorded nothing: no ranks"):
        results.outcome_of(CELL, 0, Breakdown((), {}, ("no ranks",)), 0, 0)
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(Config, match=r"other\.json is no outcome"):
        results.read(tmp_path)


def test_means_and_changes_have_intervals() -> None:
    """Of Student and Welch; one run tells nothing about noise."""
    assert results.mean_of([10.0, 12.0, 14.0]).half == pytest.approx(4.303 * 2 / math.sqrt(3))
    assert math.isinf(results.mean_of([3.0]).half)
    assert results.compared([100, 101, 99], [110, 111, 109]).verdict == "slower"
    assert results.compared([100, 101, 99], [90, 91, 89]).verdict == "faster"
    assert results.compared([100, 120, 80], [110, 130, 90]).verdict == "noise"
    assert results.compared([100], [200]).verdict.startswith("one run each")
    assert results.compared([100, 100], [101, 101]).verdict == "slower"


def test_the_papers_statements_are_judged() -> None:
    """Each by the cells that it is about; without them nobody claims anything."""
    few, many = CELL, replace(CELL, ranks=4)
    fast = replace(CELL, link_mbit=1000.0)
    pipe = replace(CELL, parallel="pipeline", micro_batch=1)
    pipe_fast = replace(pipe, link_mbit=1000.0)
    large = replace(CELL, batch=64)
    waiting = {"exposed": {"pipeline forward recv": 60.0}, "waits": {"pipeline forward recv": 55.0}}
    told = {
        each.says: each
        for each in findings.findings(
            [
                outcome(few),
                outcome(many, work={"forward": 15.0, "backward": 20.0}),
                outcome(fast, step_ms=50.0, exposed={"data-parallel sync": 4.0}),
                outcome(pipe, **waiting),
                outcome(pipe_fast, step_ms=95.0, **waiting),
                outcome(large, step_ms=400.0),
            ]
        )
    }

    def of(part: str) -> findings.Finding:
        [found] = [each for says, each in told.items() if part in says]
        return found

    assert of("scales strongly").here == "forward 67%, backward 75% from 2 to 4 ranks" and of("scales strongly").holds
    assert of("scales weakly").holds is None and "the matrix has no" in of("scales weakly").here
    assert of("4.8 times").here.startswith("2.00 times with a link 10 times as fast") and of("4.8 times").holds
    assert of("only 1.2 times").here.startswith("1.05 times") and of("only 1.2 times").holds
    assert of("bubble").here == "92% to 92% of it is waiting" and of("bubble").holds
    assert of("larger batches").here == "from 40% to 10%" and of("larger batches").holds
    assert len(told) == 11


def test_tables_and_a_comparison(tmp_path: Path) -> None:
    first = [outcome(repeat=repeat, step_ms=100.0 + repeat) for repeat in range(3)]
    second = [outcome(repeat=repeat, step_ms=120.0 + repeat) for repeat in range(3)]
    [line] = tables.times(first).lines
    assert line.cells == [
        "2 ranks, 8, tcp-4 at 100 Mbit/s",
        "101.0 ± 2.5",
        "20.0",
        "30.0",
        "10.0",
        "30.0",
        "10.0",
        "40%",
        "60, 90 of 100",
    ]
    for name, given in (("a", first), ("b", second)):
        (tmp_path / name).mkdir()
        for each in given:
            results.write(tmp_path / name, each)
    told = CliRunner().invoke(cli.command, ["--compare", str(tmp_path / "a"), str(tmp_path / "b")])
    assert told.exit_code == 0 and "+19.8% ± 2.2%" in told.output and "slower" in told.output
    shown = CliRunner().invoke(cli.command, ["--show", str(tmp_path / "a"), "--html", str(tmp_path / "page.html")])
    assert shown.exit_code == 0 and "101.0 ± 2.5" in shown.output
    assert "Communication takes 40% of a step" in (tmp_path / "page.html").read_text()


def test_a_matrix_runs_and_goes_on(tmp_path: Path) -> None:
    """For real, data parallel and in a pipeline; a second command makes only what is missing."""
    path = written(
        tmp_path,
        """
        models: gpt2-tiny
        steps: 14
        repeats: 1
        runs:
          - {batches: 4, transports: tcp}
          - {batches: 4, micro_batch: 1, parallel: pipeline, transports: gloo}
        """,
    )
    command = [sys.executable, "-m", "penstock", "characterize", str(path), "--html", str(tmp_path / "page.html")]
    first = subprocess.run(command, capture_output=True, text=True, check=False)
    assert first.returncode == 0, first.stdout + first.stderr
    data, pipeline = sorted(results.read(tmp_path / "matrix.runs"), key=lambda one: one.cell.parallel)
    assert data.work["forward"] > 0 and data.work["backward"] > 0 and data.communication_ms > 0
    assert set(data.exposed) <= {"data-parallel sync", "other"}
    assert {"pipeline forward recv", "pipeline backward recv", "embedding sync"} <= set(pipeline.exposed)
    assert "Communication takes" in (tmp_path / "page.html").read_text()
    kept = next((tmp_path / "matrix.runs").glob("*.json"))
    kept.unlink()
    again = subprocess.run(command[:-2], capture_output=True, text=True, check=False)
    assert again.returncode == 0 and "1 of 2 runs are in" in again.stderr and kept.is_file(), again.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [([], "name a matrix"), (["--show", "."], "has no run that has ended"), (["nowhere.yaml"], "does not exist")],
)
def test_wrong_options_say_what_is_wrong(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = CliRunner().invoke(cli.command, options)
    assert told.exit_code != 0 and message in told.output
