"""The matrix of a characterisation, what is made of its runs, and the paper's statements."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

import forked
from characterized import CELL, as_in_the_paper, outcome
from penstock.errors import Config
from penstock.profiling import record
from penstock.profiling.breakdown import Breakdown, Moving, Share
from penstock.profiling.record import Header, Readings, Record, Step
from penstock.profiling.utilisation import Drop
from penstock.reports import Bars, Lines, Picture
from penstock.tools.characterize import cli, figures, findings, matrix, means, memory, report, results, running, tables
from penstock.tools.characterize.findings import ABSENT, AGREES, DIFFERS, NOISE
from penstock.tools.characterize.matrix import Cell
from penstock.tools.characterize.results import Outcome
from penstock.tools.testbed.system import unavailable
from penstock.workloads.transformer.shapes import MODELS

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


def test_the_matrices_of_the_guide_can_run(root: Path, tmp_path: Path) -> None:
    """All their cells: that of the first screen, and that of a cluster."""
    blocks = re.findall(r"```yaml\n(.*?)```", (root / "docs" / "guide" / "characterize.md").read_text(), re.DOTALL)
    given = [matrix.read(written(tmp_path, block), sorted(MODELS)) for block in blocks]
    assert [len(each.cells) for each in given] == [16, 6] and not any(each.left_out for each in given)
    assert running.command_of(given[1].cells[0], 30, 1)[:4] == ["srun", "--ntasks", "4", "./torch_rank.sh"]


def test_cells_with_pauses_are_others_and_those_without_keep_their_names(tmp_path: Path) -> None:
    """The names of folders that were made before matrices had pauses."""
    text = "{models: gpt2-tiny, transports: gloo, checkpoint_every: [0, 5], evaluate_every: [0, 5]}"
    cells = matrix.read(written(tmp_path, text), sorted(MODELS)).cells
    assert len({cell.key for cell in cells}) == 4
    assert cells[0].key == "gpt2-tiny-data-2-8-gloo-0-539be0ee"
    assert means.size(cells[3]) == "2 ranks, 8, checkpoint every 5 steps, evaluation every 5 steps"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "a matrix has keys"),
        ("models: gpt3", "models has 'gpt3'; there are bert-large"),
        ("modells: gpt2-tiny", "unknown modells"),
        ("models: gpt2-tiny\nranks: two", "ranks has 'two', which is no number"),
        ("models: gpt2-tiny\nranks: 0", "ranks has 0"),
        ("models: gpt2-tiny\nranks: [true]", "ranks has True"),
        ("models: gpt2-tiny\nsteps: 5", "steps is a whole number from 6 to"),
        ("models: gpt2-tiny\ntransports: [rdma]", "there is no transport over RDMA"),
        ("models: gpt2-tiny\ntransports: [tcp-0]", "transports has 'tcp-0'"),
        ("models: gpt2-tiny\ntransports: [gloo-2]", "transports has 'gloo-2'"),
        ("models: []", "models is missing"),
        ("ranks: 2", "models is missing"),
        ("models: gpt2-tiny\nruns: []", "runs is a list"),
        ("models: gpt2-tiny\nruns: [{model: gpt2-tiny}]", "run 1: unknown model; keys are models"),
        ("models: [", "is no YAML"),
    ],
)
def test_a_wrong_matrix_says_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(Config, match=message.replace("[", r"\[")):
        matrix.read(written(tmp_path, text), sorted(MODELS))


NINES = "9" * 400


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models: &a [gpt2-tiny]\nbatches: &b [1, *b]", "batches has a list, which is no number"),
        (
            "".join(f"a{i}: &a{i} [{', '.join(['*a' + str(i - 1)] * 9) if i else 'x'}]\n" for i in range(9)),
            "unknown a0",
        ),
        (f"runs: [{{models: &a [&b [x, x]{', *b' * 9}]}}]", "models has a list"),
        (
            f"models: gpt2-tiny\nranks: &a [{'2, ' * 399}]\nbatches: *a\nsequence: *a\nmicro_batch: *a",
            "more than 10,000 runs",
        ),
        ("models: gpt2-tiny\nrepeats: 1000000000", "more than 10,000 runs"),
        (
            "models: gpt2-tiny\nruns:\n" + "- &a {ranks: [1, 2, 4]}\n" + "- *a\n" * 2000,
            "run 556: the matrix has more than",
        ),
        (f"models: gpt2-tiny\nlinks_mbit: [{NINES}]", "links_mbit has a number that is too large"),
        (f"models: gpt2-tiny\nseed: 0x{NINES}", "not a number that is too large"),
        (f"models: [[0x{NINES * 20}]]", "models has a list"),
        (f"models: gpt2-tiny\n? 0x{NINES * 20}\n: 1", "unknown a number that is too large"),
        ("models: gpt2-tiny\nlinks_mbit: [.nan]", "links_mbit has nan"),
        ("models: gpt2-tiny\nflow_mbit: .inf", "flow_mbit has a number that is too large"),
        ("models: gpt2-tiny\ntransports: tcp-²", "transports has 'tcp-²'"),
        ("models: gpt2-tiny\nsteps: 2001-13-45", "is no YAML: month"),
        (f"steps: {NINES * 20}", "is no YAML: Exceeds"),
        ("[" * 20_000, "is no YAML: maximum recursion"),
        ("\udcff", "is no YAML: 'utf-8' codec"),
        ("#" * 70_000, "has more than 64 KiB"),
    ],
)
def test_a_hostile_matrix_is_refused_at_once(tmp_path: Path, text: str, message: str) -> None:
    """In a message of some lines; nothing is made of long products, aliases and numbers."""
    path = tmp_path / "matrix.yaml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(Config) as said:
        matrix.read(path, sorted(MODELS))
    assert message in str(said.value) and len(str(said.value)) < 1000, str(said.value)[:1000]


@pytest.mark.parametrize(
    "value",
    [
        "x",
        "\x1b]0;owned\x07[/red]\ud800",
        math.nan,
        0,
        -1,
        10**400,
        True,
        ["x"],
        {"forward": "x"},
    ],
)
def test_outcomes_of_any_kind_are_shown_or_refused(tmp_path: Path, value: object) -> None:
    """Each field in turn: no traceback, and nothing that controls a terminal, in the table, the report and a comparison."""
    usual = dataclasses.asdict(outcome(processors=2, machine="x"))
    (good := tmp_path / "good").mkdir()
    (bad := tmp_path / "bad").mkdir()
    (good / "a.json").write_text(json.dumps({"format": results.FORMAT, **usual}))
    for name in (*usual, *(f"cell {each}" for each in usual["cell"]), "", *usual["work"]):
        given = json.loads(json.dumps(usual))
        first, _, last = name.partition(" ")
        (given["cell"] if last else given["work"] if first in given["work"] else given)[last or first] = value
        (bad / "a.json").write_text(json.dumps({"format": results.FORMAT, **given}))
        drawn = ["--html", str(tmp_path / "html")] if name in ("cell model", "machine") else []
        compared = [["--compare", str(bad), str(good)]] if name == "step_ms" or last else []
        for options in (["--show", str(bad), *drawn], *compared):
            told = CliRunner().invoke(cli.command, options)
            assert isinstance(told.exception, (SystemExit, type(None))), (name, told.exception)
            assert not re.search("[\x1b\x07\ud800]", told.output), name
    for text in ("[" * 100_000, '{"a": ' + "9" * 5000):
        (bad / "a.json").write_text(text)
        (bad / memory.NAME).write_text(text)
        assert "is no outcome" in CliRunner().invoke(cli.command, ["--show", str(bad)]).output
    (bad / "a.json").unlink()
    line = json.dumps(
        {"kind": {**dict.fromkeys(memory.Kind.__annotations__, value)}, "mib": 64, "batch": 1, "fits": True}
    )
    (bad / memory.NAME).write_text(json.dumps({"format": memory.FORMAT}) + f"\n{line}\n" + "[" * 100_000)
    assert not memory.Tries(bad).limits()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 7}, "a batch of 7 cannot be shared equally by 2 replicas"),
        ({"transport": "shm"}, "share no memory"),
        ({"transport": "aggregated", "link_mbit": 0.0}, "give aggregated a link"),
        ({"transport": "aggregated", "parallel": "pipeline"}, "hardly anything to sum"),
        ({"transport": "aggregated", "flow_mbit": 50.0}, "give aggregated no flow_mbit"),
        ({"batch": 1}, "a batch of 1 cannot be shared equally by 2 replicas"),
        ({"parallel": "pipeline", "evaluate_every": 4}, "give a pipeline no evaluate_every"),
        ({"parallel": "pipeline", "checkpoint_every": 4}, ""),
        ({"launch": "srun"}, "give it links_mbit 0 and flow_mbit 0"),
        ({"launch": "srun", "link_mbit": 0.0, "flow_mbit": 9.0}, "give it links_mbit 0 and flow_mbit 0"),
        ({"launch": "srun", "link_mbit": 0.0, "transport": "aggregated"}, "give aggregated no launch"),
        ({"launch": "srun", "link_mbit": 0.0, "transport": "nccl"}, "nccl needs GPUs"),
        ({"device": "cuda", "transport": "nccl"}, "ranks on emulated hosts share one"),
        ({"device": "cuda", "transport": "gloo", "parallel": "pipeline"}, "gloo does not send tensors of GPUs"),
        ({"launch": "srun", "link_mbit": 0.0, "transport": "nccl", "device": "cuda"}, ""),
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
    assert "-every" not in command
    paused = replace(CELL, checkpoint_every=4, evaluate_every=8)
    command = " ".join(running.command_of(paused, 30, 5, checkpoint="/x"))
    assert "--checkpoint-every 4 --checkpoint /x " in command and "--evaluate-every 8 " in command
    environment = running.environment_of(CELL, {"PENSTOCK_STREAMS": "9", "PENSTOCK_TUNE": "1", "HOME": "/"})
    assert environment == {"HOME": "/", "OMP_NUM_THREADS": "1", "PENSTOCK_SHM": "0", "PENSTOCK_STREAMS": "4"}
    assert "PENSTOCK_STREAMS" not in running.environment_of(replace(CELL, transport="tcp"), {})
    assert "PENSTOCK_SHM" not in running.environment_of(replace(CELL, transport="shm"), {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("launch: 'srun {ranks} {hosts}'", "launch has 'srun {ranks} {hosts}', with other braces than {ranks}"),
        ("launch: 'srun {ranks'", "with other braces"),
        ('launch: "srun \'x"', "which is no command: No closing quotation"),
        ("launch: ' '", "which is no command"),
        ("launch: 3", "launch has 3, which is no word"),
        ('launch: "a\\nb"', "no command in one line"),
        ('launch: "a\\x1bb"', "no command in one line"),
        (f"launch: {'a' * 201}", "of 200 characters at most: put it into a script"),
        ("launch: srun\nranks: [2, 4]", "launch has 'srun', without {ranks}, which several numbers of ranks need"),
        ("device: gpu", "device has 'gpu'; there are cpu, cuda"),
        ("transports: nccl-2", "transports has 'nccl-2'"),
    ],
)
def test_a_wrong_launch_or_device_says_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(Config) as said:
        matrix.read(written(tmp_path, f"models: gpt2-tiny\n{text}"), sorted(MODELS))
    assert message in str(said.value), said.value


def test_cells_of_a_launch_or_on_gpus_are_others(tmp_path: Path) -> None:
    """They have files of their own, are never paired with others in findings, have labels that say so, and are read again."""
    text = "{models: gpt2-tiny, transports: tcp, launch: ['', 'srun --ntasks {ranks}'], device: [cpu, cuda]}"
    cells = matrix.read(written(tmp_path, text), sorted(MODELS)).cells
    assert len({cell.key for cell in cells}) == 4 == len(cells)
    assert cells[0] == replace(cells[0], launch="", device="cpu")
    assert list(map(means.network, cells)) == [
        "tcp",
        "tcp on cuda",
        "tcp by srun --ntasks {ranks}",
        "tcp on cuda by srun --ntasks {ranks}",
    ]
    command = running.command_of(cells[3], 30, 5)
    assert command[:4] == ["srun", "--ntasks", "2", "-m"] and command[-2:] == ["--device", "cuda"]
    assert "nccl" in running.command_of(replace(cells[3], transport="nccl"), 30, 5)
    assert not means.groups(means.means([outcome(cell) for cell in cells]), ["ranks"])
    for cell in cells:
        results.write(tmp_path, outcome(cell))
    assert {one.cell for one in results.read(tmp_path)} == set(cells)
    # As folders of earlier versions have them.
    old = json.loads((tmp_path / f"{cells[0].key}.0.json").read_text())
    del old["cell"]["launch"], old["cell"]["device"]
    (tmp_path / f"{cells[0].key}.0.json").write_text(json.dumps(old))
    assert {one.cell for one in results.read(tmp_path)} == set(cells)


def test_what_ranks_of_a_launch_receive_is_over_links() -> None:
    """Where their counters show it, which those of one host do not; the links' rates are not known."""
    cells = [replace(CELL, link_mbit=0.0, launch="srun -n {ranks}", ranks=ranks) for ranks in (2, 4)]
    runs = [outcome(cell, exposed={"data-parallel sync": 15.0 * cell.ranks}) for cell in cells]
    found = {each.says.partition(":")[0]: each for each in findings.findings(runs) if "strong" in each.where}
    assert found["all-reduce takes longer with more ranks"].verdict == AGREES
    assert found["all-reduce takes most of a step"].here == "60% by srun -n {ranks}, with 4 ranks"
    assert found["a faster network is filled less"].verdict == ABSENT
    assert tables.times(runs).lines[0].cells[-1] == "60, 90"
    here = findings.findings([replace(one, receive_mbit=0.0) for one in runs])
    assert {each.verdict for each in here if "all-reduce" in each.says} == {ABSENT}


def test_a_launch_starts_the_ranks(tmp_path: Path) -> None:
    """For real: a command with an environment of its own, to which the number of ranks is given. What it starts is another cell
    than torchrun on this host, and has no processors of this host. One that starts too few ranks fails and says so."""
    given = tmp_path / "given"
    torchrun = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node"
    script = tmp_path / "launch.sh"
    script.write_text(f'echo "$MARK $1" >> {given}\nranks=$1\nshift\nexec {torchrun} $ranks "$@"\n')
    text = "{models: gpt2-tiny, batches: 4, transports: gloo, steps: 6, repeats: 1, launch: ['%s', '%s']}"
    path = written(tmp_path, text % (f"env MARK=mine sh {script} {{ranks}}", f"{torchrun} 1"))
    done = forked.run([sys.executable, "-m", "penstock", "characterize", str(path)], capture_output=True, text=True)
    assert done.returncode == 1 and given.read_text() == "mine 2\n", done.stdout + done.stderr
    assert "has started or recorded 1 rank instead of 2: each needs RANK" in done.stderr, done.stderr
    [one] = results.read(tmp_path / "matrix.runs")
    assert one.cell.launch.startswith("env MARK") and one.communication_ms > 0 and not one.processors
    assert f"gloo by env MARK=mine sh {script}"[:40] in done.stdout


def test_gpus_that_are_not_there_are_an_error_before_the_first_run(tmp_path: Path) -> None:
    """Also in the workload, which a launch may start on another host; memory is looked for with neither."""
    command = [sys.executable, "-m", "penstock", "characterize"]
    path = written(tmp_path, "{models: gpt2-tiny, device: cuda, transports: [tcp, nccl], ranks: 64, batches: 64}")
    done = forked.run([*command, str(path)], capture_output=True, text=True)
    assert done.returncode == 1 and "device cuda needs 64 GPUs on this host, and torch finds" in done.stderr, (
        done.stderr
    )
    assert not (tmp_path / "matrix.runs").exists()
    train = [sys.executable, "-m", "penstock.workloads.transformer", "gpt2-tiny", "--device", "cuda"]
    done = forked.run(train, capture_output=True, text=True, env={**os.environ, "LOCAL_RANK": "64"})
    assert done.returncode == 1 and "LOCAL_RANK is 64, and torch finds" in done.stderr
    path = written(tmp_path, "{models: gpt2-tiny, launch: 'no-such-program -n {ranks} python'}")
    told = CliRunner().invoke(cli.command, [str(path)])
    assert told.exit_code == 1 and "there is no command no-such-program on this host" in told.output
    assert not (tmp_path / "matrix.runs").exists()
    for key in ("launch: srun", "device: cuda"):
        path = written(tmp_path, f"{{models: gpt2-tiny, {key}}}")
        told = CliRunner().invoke(cli.command, [str(path), "--memory", "512"])
        assert told.exit_code == 1 and "leave it out, or launch and device" in told.output


@pytest.mark.parametrize("unit", [1, 2, 6])
@pytest.mark.parametrize("limit", [0, 1, 5, 6, 63, 64, 65, 1000])
def test_the_largest_batch_is_found_by_bisection(unit: int, limit: int) -> None:
    """The largest multiple that fits, with few tries, and none beyond what may be asked for."""
    tried: list[int] = []

    def fits(batch: int) -> bool:
        tried.append(batch)
        return batch <= limit

    assert memory.largest(fits, unit, 512) == min(limit, 512) // unit * unit
    assert len(tried) <= 22 and all(batch % unit == 0 and batch <= 512 for batch in tried)


@pytest.mark.parametrize("limit", [4, 37, 300])
def test_a_search_for_the_largest_batch_goes_on_where_it_stopped(limit: int, tmp_path: Path) -> None:
    """What was tried is not tried again, by another command either; for another kind of cell or other memory it is. What came to
    its end is known as a limit, and a search that did not is none."""
    tried: list[int] = []

    def fits(cell: Cell) -> bool:
        tried.append(cell.batch)
        if len(tried) == stop:
            raise KeyboardInterrupt
        return cell.batch <= limit

    stop = 2
    with pytest.raises(KeyboardInterrupt):
        memory.Tries(tmp_path).largest(CELL, 512, fits)
    assert not memory.Tries(tmp_path).limits()
    stop = 0
    assert memory.Tries(tmp_path).largest(CELL, 512, fits) == limit // 2 * 2
    assert sorted(tried) == sorted([*set(tried), tried[1]]), (
        "the try that was interrupted is made anew, and none but that"
    )
    before = list(tried)
    assert memory.Tries(tmp_path).largest(replace(CELL, transport="gloo", link_mbit=0.0), 512, fits) == limit // 2 * 2
    assert tried == before
    assert memory.Tries(tmp_path).limits() == {memory.kind_of(CELL): memory.Limit(limit // 2 * 2, 512)}
    memory.Tries(tmp_path).largest(CELL, 1024, fits)
    assert len(tried) == 2 * len(set(tried)) + 1 and memory.Tries(tmp_path).limits()[memory.kind_of(CELL)].mib == 1024
    path = tmp_path / "memory.jsonl"
    path.write_text(path.read_text() + '{"kind": 3}\n[]\n{"kind": {"model": "g')
    assert memory.Tries(tmp_path).limits(), "lines without sense are left out"
    path.write_text("{}\n")
    with pytest.raises(Config, match="remove it, and the largest batches are looked for again"):
        memory.Tries(tmp_path)


def test_a_search_is_made_once(tmp_path: Path) -> None:
    """For real, under a limit below what torch itself takes; a second command looks for nothing."""
    path = written(tmp_path, "{models: gpt2-tiny, batches: 4, transports: gloo, steps: 6, repeats: 1}")
    command = [sys.executable, "-m", "penstock", "characterize", str(path), "--memory", "64"]
    # Not `forked`: a fork has more memory than that from the start.
    first, second = (subprocess.run(command, capture_output=True, text=True, check=False) for _ in range(2))
    assert first.returncode == 0 == second.returncode, first.stderr + second.stderr
    assert "does a batch of 2 fit?" in first.stderr and "not even one sequence a rank fits" in first.stderr
    assert "does a batch" not in second.stderr and "not even one sequence a rank fits" in second.stderr
    assert "1 of 1 runs are in" in second.stderr


def test_what_fits_runs() -> None:
    """For real: two sequences in 2 GiB a rank; and not as many as the machine has room for in all."""
    cell = replace(CELL, model="gpt2-tiny", ranks=2, batch=4)
    assert running.fits(cell, 2 << 30, seed=1, timeout_s=120)
    assert not running.fits(replace(cell, batch=1 << 14), 2 << 30, seed=1, timeout_s=120)


@pytest.mark.skipif(unavailable() is not None, reason=f"no emulated hosts here: {unavailable()}")
def test_every_transport_runs(tmp_path: Path) -> None:
    """For real: through memory, over two streams, behind aggregators on emulated hosts, and by a launch on several hosts; each
    moves all gradients, those on several hosts over links."""
    path = written(
        tmp_path,
        f"""
        models: gpt2-tiny
        batches: 4
        steps: 6
        repeats: 1
        runs:
          - {{transports: [shm, tcp-2]}}
          - {{transports: aggregated, links_mbit: 500}}
          - {{transports: gloo, launch: "{sys.executable} -m penstock testbed run --quiet --hosts {{ranks}} -- {sys.executable}"}}
        """,
    )
    done = forked.run([sys.executable, "-m", "penstock", "characterize", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {one.cell.transport: one for one in results.read(tmp_path / "matrix.runs")}
    assert set(found) == {"shm", "tcp-2", "aggregated", "gloo"}
    assert all(one.communication_ms > 0 for one in found.values())
    assert {name for name, one in found.items() if one.receive_mbit > 0} == {"aggregated", "gloo"}


def test_what_a_link_carried() -> None:
    """Mean over steps without the first two, the highest rate, and what was sent, of the busiest interface but the loopback;
    means over hosts."""
    records = []
    for host, rate in (("a", 1e6), ("b", 3e6)):
        record = Record(Header(len(records), 2, host, 1, 0, 0))
        record.steps = [Step(number, number * SECOND, (number + 1) * SECOND) for number in range(6)]
        for at in range(61):
            # In the warm-up four times as much; in the last second twice.
            moved = rate / 10 * (4 * min(at, 20) + max(0, at - 20) + max(0, at - 50))
            values = {"nic.eth0.rx_bytes": moved, "nic.eth0.tx_bytes": moved / 2, "nic.lo.rx_bytes": 1e9 * at}
            record.readings.append(Readings(at * SECOND // 10, values))
        records.append(record)
    assert running.carried(records) == pytest.approx((8 * 2e6 * 1.25 / 1e6, 8 * 2e6 * 2 / 1e6, 8 * 1e6 * 1.25 / 1e6))
    assert running.carried([Record(Header(0, 1, "a", 1, 0, 0))]) == (0.0, 0.0, 0.0)
    assert running.carried(records[:1]) == (0.0, 0.0, 0.0), "nothing crosses a link of a single host"


def test_outcomes_are_kept_and_read_again(tmp_path: Path) -> None:
    moving = Moving(4e6, 1e6, 2e6, 0.0, 1000.0, 3.0, {1: 1e6})
    work = {"forward": 5e6, "profiler": 3e6}
    shares = tuple(Share(rank, 20, 5, 1.3e7 + rank * 2e6, work, {"tensor": moving}) for rank in (0, 1))
    made = results.outcome_of(CELL, 2, Breakdown(shares, {}, ("a remark",)), results.Rates(12.0, 34.0, 11.0))
    assert made.step_ms == pytest.approx(11) and made.work == {"forward": 5.0}, "without what measuring took"
    assert made.exposed == {"tensor": pytest.approx(5)}
    assert made.waits["tensor"] == pytest.approx(1) and made.hidden["tensor"] == pytest.approx(2)
    assert (made.receive_mbit, made.receive_peak_mbit, made.sent_mbit) == (12.0, 34.0, 11.0)
    results.write(tmp_path, made)
    results.write(tmp_path, replace(made, repeat=0))
    assert results.read(tmp_path) == [replace(made, repeat=0), made]
    with pytest.raises(Config, match="recorded nothing: no ranks"):
        results.outcome_of(CELL, 0, Breakdown((), {}, ("no ranks",)), results.Rates())
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(Config, match=r"other\.json is no outcome"):
        results.read(tmp_path)


def test_means_and_changes_have_intervals() -> None:
    """Of Student and Welch; one run tells nothing about noise."""
    assert results.mean_of([10.0, 12.0, 14.0]).half == pytest.approx(4.303 * 2 / math.sqrt(3))
    assert math.isinf(results.mean_of([3.0]).half)
    assert [changed([100, 101, 99], [each, each + 1, each - 1]) for each in (110, 90)] == ["slower", "faster"]
    assert changed([100, 120, 80], [110, 130, 90]) == "noise" == changed([100, 100], [100, 100])
    assert changed([100], [200]) == "one run: unknown"
    assert changed([100, 100], [101, 101]) == "slower"
    # Quantiles of t for 5 and 0.1 % on both sides, from a book's table.
    for freedom, five, small in ((1, 12.706, 636.62), (2, 4.303, 31.599), (3, 3.182, 12.924), (10, 2.228, 4.587)):
        assert results._beyond(five, freedom) == pytest.approx(0.05, rel=1e-3)
        assert results._beyond(-small, freedom) == pytest.approx(0.001, rel=1e-3)


def changed(before: list[float], after: list[float]) -> str:
    [verdict] = results.verdicts([results.compared(before, after)])
    return verdict


def test_of_many_unchanged_cells_none_is_called_changed() -> None:
    """Of 28 cells, in 300 drawn comparisons: one or more in 5 % of these at most, and not in most of them. A change is found
    among 27 cells without one."""
    draw = random.Random(7)

    def runs(mean: float) -> list[float]:
        return [draw.gauss(mean, 2.0) for _ in range(5)]

    wrong = each_by_itself = found = 0
    for _ in range(300):
        differences = [results.compared(runs(100.0), runs(100.0)) for _ in range(28)]
        wrong += set(results.verdicts(differences)) != {"noise"}
        each_by_itself += any(abs(one.change) > one.half for one in differences)
        differences[5] = results.compared(runs(100.0), runs(115.0))
        told = results.verdicts(differences)
        found += told[5] == "slower"
    # 15 are expected, and 23 are two standard deviations more.
    assert wrong <= 23 and each_by_itself > 150
    assert found > 270


def test_the_second_smallest_of_several_changes_needs_less() -> None:
    """By Holm's steps: with four cells 1.25, 1.67, 2.5 and 5 %; what comes after one that is noise is noise. A cell of single
    runs does not count."""
    single = results.Difference(1.0, math.inf, math.nan)

    def told(*probabilities: float) -> list[str]:
        return results.verdicts([single, *(results.Difference(-0.1, 0.05, each) for each in probabilities)])[1:]

    assert told(0.04, 0.012, 0.016, 0.024) == ["faster"] * 4
    assert told(0.04, 0.012, 0.017, 0.024) == ["noise", "faster", "noise", "noise"]
    assert told(0.013, 0.013, 0.013, 0.013) == ["noise"] * 4


def times(factor: float, *fields: str, **where: object) -> Callable[[Outcome], Outcome]:
    """What multiplies numbers of a run, if fields of its cell have these values; where one is a tuple, one of these."""

    def change(one: Outcome) -> Outcome:
        wanted = {name: value if isinstance(value, tuple) else (value,) for name, value in where.items()}
        if any(getattr(one.cell, name) not in values for name, values in wanted.items()):
            return one
        given = {name: getattr(one, name) for name in fields}
        return replace(
            one,
            **{
                name: {key: factor * each for key, each in value.items()} if isinstance(value, dict) else factor * value
                for name, value in given.items()
            },
        )

    return change


CONTRADICTED = [
    ("more ranks compute faster", times(3, "work", ranks=4)),
    ("all-reduce takes longer with more ranks", times(0.1, "exposed", ranks=4)),
    ("all-reduce takes most of a step: 53", times(0.1, "exposed", scaling="strong")),
    ("a slower network takes a larger share", times(0.1, "exposed", link_mbit=100.0)),
    ("a faster network carries more: 30", times(0.01, "receive_mbit", link_mbit=1000.0)),
    ("a faster network is filled less", times(10, "receive_mbit", link_mbit=1000.0)),
    ("the largest model uses most of the network", times(0.1, "receive_mbit", model="gpt2-small")),
    ("hosts receive as much as they send", times(2, "sent_mbit", ranks=2)),
    ("rates fall for checkpoints and evaluations", times(0, "drops")),
    ("computing takes as long with more ranks", times(2, "work", ranks=4)),
    ("all-reduce takes most of a step: 51", times(0.1, "exposed", scaling="weak")),
    ("a network 10 times as fast has all-reduce 8.7 times", times(2, "exposed", link_mbit=1000.0)),
    ("larger models spend longer in all-reduce", times(0.1, "exposed", model="gpt2-small")),
    ("more ranks use more of the network", times(0.1, "receive_mbit", ranks=4)),
    ("a faster network carries more under weak scaling", times(0.01, "receive_mbit", link_mbit=1000.0)),
    ("computing takes longer with more ranks", times(0.1, "work", ranks=4)),
    ("receiving and the embeddings' all-reduce take most", times(0.1, "exposed")),
    ("a network 10 times as fast makes steps faster, by 1.2", times(2, "step_ms", link_mbit=100.0)),
    ("a faster network gains more in data parallelism", times(10, "step_ms", link_mbit=100.0, parallel="pipeline")),
    ("of all models T5 spends the largest share", times(0.7, "exposed", model="t5-tiny")),
    ("in data parallelism larger batches lower", times(3, "exposed", batch=64)),
    ("in model parallelism larger batches raise", times(0.1, "exposed", batch=32)),
    ("in model parallelism more ranks lower it", times(1.3, "exposed", ranks=4)),
    ("with more ranks and the same batch on each, all-reduce", times(0.1, "exposed")),
    ("most of a pipeline's communication is waiting", times(0.1, "waits")),
]
"""The findings in their order, each with a change to runs that show it, after which they show the contrary."""


@pytest.mark.parametrize(("number", "says", "change"), [(at, *each) for at, each in enumerate(CONTRADICTED)])
def test_each_finding_can_agree_be_contradicted_and_be_within_noise(
    number: int, says: str, change: Callable[[Outcome], Outcome]
) -> None:
    """Each with drawn runs: as the paper has it, changed, and one run of each cell in both ways. Drops of rates are counted and
    have no noise."""
    runs = as_in_the_paper()
    changed = [change(one) for one in runs]
    mixed = [one for one in runs if one.repeat == 0] + [one for one in changed if one.repeat == 1]
    agreeing, contrary, unclear = (findings.findings(given)[number] for given in (runs, changed, mixed))
    assert agreeing.says.startswith(says), "another order"
    assert agreeing.verdict == AGREES and contrary.verdict == DIFFERS, (agreeing, contrary)
    assert unclear.verdict == (AGREES if says.startswith("rates fall") else NOISE), unclear


@pytest.mark.parametrize(
    ("says", "change"),
    [
        ("a network 10 times as fast has all-reduce", times(0.1, "step_ms", link_mbit=100.0)),
        ("a network 10 times as fast has all-reduce", times(0.1, "exposed", link_mbit=100.0)),
        ("a network 10 times as fast makes steps faster", times(0.5, "step_ms", link_mbit=100.0)),
    ],
)
def test_findings_that_say_two_things_need_both(says: str, change: Callable[[Outcome], Outcome]) -> None:
    """Of a faster network: steps slower, all-reduce slower; steps slower, which is less than 1.5 times as fast."""
    [found] = [each for each in findings.findings(list(map(change, as_in_the_paper()))) if each.says.startswith(says)]
    assert found.verdict == DIFFERS, found


def test_where_ranks_share_processors_computing_does_not_scale() -> None:
    """And the finding says so."""
    crowded = [replace(times(3, "work", ranks=4)(one), processors=2) for one in as_in_the_paper()]
    found = findings.findings(crowded)[0]
    assert found.verdict == DIFFERS and found.here.endswith("; 4 ranks share 2 processors")


def test_averages_have_the_noise_of_all_their_cells() -> None:
    """Worked out by hand: three cells, of which the last has a group of its own and one run."""
    first, second = results.averages([[[9.0, 11.0], [19.0, 21.0]], [[5.0]]])
    # Two degrees of freedom, four values that are 1 off: a variance of 2.
    assert (first.value, second.value) == (15.0, 5.0) and (first.over, second.over) == (2, 1)
    assert first.half == pytest.approx(4.303 * math.sqrt(2 * (1 / 2 + 1 / 2)) / 2)
    assert second.half == pytest.approx(4.303 * math.sqrt(2))
    assert results.averages([[[1.0], [3.0]]]) == [(2.0, None, 2)]


def test_a_finding_is_not_judged_by_noise_nor_without_cells() -> None:
    """What runs differ by can hide it; one run of each cell cannot tell noise, and counts; a matrix may have no cells for it."""
    slow, fast = CELL, replace(CELL, link_mbit=1000.0)

    def about(runs: list[Outcome], says: str) -> findings.Finding:
        [found] = [each for each in findings.findings(runs) if each.says.startswith(says) and "strong" in each.where]
        return found

    noisy = [outcome(slow, at, receive_mbit=60.0 + 40 * at) for at in range(3)]
    noisy += [outcome(fast, at, receive_mbit=65.0 + 40 * at) for at in range(3)]
    assert about(noisy, "a faster network carries more").verdict == NOISE
    once = [outcome(slow), outcome(fast, receive_mbit=60.1)]
    assert about(once, "a faster network carries more").verdict == AGREES
    lacking = about([outcome(slow)], "a faster network carries more")
    assert (lacking.verdict, lacking.here) == (ABSENT, "the matrix has no data parallel cells over two links")
    alone = findings.findings([outcome(replace(CELL, link_mbit=0.0, transport="gloo"))])
    assert {each.verdict for each in alone} == {ABSENT}
    idle = [
        outcome(cell, exposed={}, waits={}, work={}, receive_mbit=0.0) for cell in (slow, fast, replace(slow, ranks=4))
    ]
    judged = {each.says.partition(":")[0]: each.verdict for each in findings.findings(idle)}
    assert {verdict for says, verdict in judged.items() if "most of a step" not in says and "step" not in says} == {
        ABSENT
    }


@pytest.mark.parametrize("missing", [(4, 4), (2, 8), None])
def test_weak_scaling_compares_the_same_batch_on_each_rank(missing: tuple[int, int] | None) -> None:
    """Of a matrix with 8 and 4 sequences a rank, one cell of which may be missing. Computing and what is received grow with the
    batch of a rank and not with the ranks, in data parallel; in a pipeline computing grows with the whole batch."""
    runs = []
    for ranks, each in {(ranks, each) for ranks in (2, 4) for each in (8, 4)} - {missing}:
        for parallel, times in (("data", 1.0), ("pipeline", float(ranks))):
            cell = replace(CELL, parallel=parallel, ranks=ranks, batch=ranks * each, scaling="weak")
            work = {"forward": 10.0 * each * times, "backward": 20.0 * each * times}
            runs += [outcome(cell, repeat, work=work, receive_mbit=5.0 * each) for repeat in range(2)]
    found = {each.says.partition(":")[0]: (each.verdict, each.here) for each in findings.findings(runs)}
    computing = (AGREES, "forward 100%, backward 100% from 2 to 4 ranks")
    assert found["computing takes as long with more ranks"] == computing
    assert found["more ranks use more of the network"] == (NOISE, "1.00 times from 2 to 4 ranks")
    staged = "computing takes longer with more ranks, whose batch grows with them"
    assert found[staged] == (AGREES, "2.00 times from 2 to 4 ranks")


def test_weak_scaling_is_not_judged_by_cells_of_different_batches() -> None:
    """Two ranks of 8 sequences and four of 4: the finding says what the matrix lacks."""
    runs = [outcome(replace(CELL, ranks=ranks, batch=16, scaling="weak")) for ranks in (2, 4)]
    [found] = [each for each in findings.findings(runs) if each.says.startswith("computing takes as long")]
    lacks = "the matrix has no data parallel cells with weak scaling, several ranks and the same batch on each"
    assert (found.verdict, found.here) == (ABSENT, lacks)


def test_the_matrix_of_the_findings_has_cells_for_each(root: Path) -> None:
    """Runs of examples/findings.yaml, made up, can judge all findings and draw all figures; each of its cells can run, and there
    are no more runs than go into twenty minutes, at 20 s each, of steps enough for the profile's samples."""
    given = matrix.read(root / "examples" / "findings.yaml", sorted(MODELS))
    assert not given.left_out and len(given.cells) * given.repeats <= 60 and given.steps >= 24
    made = {"sent_mbit": 60.0, "steps": given.steps, "work": {"evaluation": 30.0, "forward": 10.0, "backward": 20.0}}
    runs = [outcome(cell, repeat, **made) for cell in given.cells for repeat in range(given.repeats)]
    assert not [each.says for each in findings.findings(runs) if each.verdict == ABSENT]
    titles = [each.title.partition(":")[0] for each in figures.sections(means.means(runs), {})]
    assert titles == [f"Figure {number}" for number in range(3, 8)]


@pytest.mark.parametrize(
    ("pauses_ms", "drops", "verdict", "here"),
    [
        # 22 steps count, in which there are two evaluations: 44 ms a step are 484 ms of each, or 4.84 steps of 100 ms.
        ({"evaluation": 44.0}, {"evaluation": 2}, AGREES, "2.0 times a run for evaluations of 4.8 steps"),
        ({"evaluation": 44.0}, {"unexplained": 2}, DIFFERS, "0.0 times a run for evaluations of 4.8 steps"),
        ({"evaluation": 18.0}, {}, ABSENT, "the matrix has no pause that is long enough: evaluations of 2.0 steps are"),
        (
            {"evaluation": 44.0, "checkpoint": 2.0},
            {"evaluation": 1},
            AGREES,
            "checkpoints of 0.1 steps are too short to see, 1.0 times a run for evaluations of 4.8 steps",
        ),
        (
            {"evaluation": 44.0, "checkpoint": 70.0},
            {"evaluation": 2},
            DIFFERS,
            "0.0 times a run for checkpoints of 5.1",
        ),
        ({}, {}, ABSENT, "the matrix has no data parallel cells over a link with checkpoint_every or evaluate_every"),
    ],
)
def test_rates_fall_for_pauses_that_are_long_enough_to_be_seen(
    pauses_ms: dict[str, float], drops: dict[str, float], verdict: str, here: str
) -> None:
    """Of each kind of pause: none in the cell, too short, seen, or not seen."""
    cell = replace(CELL, evaluate_every=8, checkpoint_every=7)
    step_ms = 100.0 + sum(pauses_ms.values())
    runs = [outcome(cell, repeat, work=pauses_ms, drops=drops, steps=24, step_ms=step_ms) for repeat in range(2)]
    [found] = [each for each in findings.findings(runs) if each.says == "rates fall for checkpoints and evaluations"]
    assert found.verdict == verdict and here in found.here, found
    for other in (replace(cell, link_mbit=0.0), replace(cell, checkpoint_every=0, evaluate_every=0)):
        alone = findings.findings([replace(one, cell=other) for one in runs])
        assert [each.verdict for each in alone if each.says == found.says] == [ABSENT]


def test_drops_are_counted_by_cause() -> None:
    """All hosts see the same pause: it counts once."""
    made = [("a", "evaluation"), ("b", "evaluation"), ("a", "evaluation"), ("b", "")]
    found = [Drop(host, "nic.eth0.tx_bytes", (0, 1), 0.1, cause) for host, cause in made]
    assert running.counted_drops(found) == {"evaluation": 2, "unexplained": 1}


def test_ratios_have_the_noise_of_all_their_cells() -> None:
    """Worked out by hand: two pairs, twice and three times as much, with runs that are 10 % from their means."""
    found = results.ratio([([9.0, 11.0], [18.0, 22.0]), ([10.0], [30.0])])
    assert found.value == pytest.approx(2.5)
    # Two degrees of freedom, four values 10 % off: a variance of 0.02. 4 x (1/2 + 1/2) + 9 x (1 + 1) = 22.
    assert found.half == pytest.approx(4.303 * math.sqrt(0.02 * 22) / 2)
    assert results.ratio([([10.0], [30.0])]) == (3.0, None, 1) and results.ratio([([0.0], [1.0])]) == (0.0, None, 0)


def test_bars_of_the_first_screen_can_be_told_apart() -> None:
    """Cells that differ in their batch alone have it in their labels; shares that are alike are told once."""
    cells = means.means([outcome(replace(CELL, batch=batch)) for batch in (4, 36)])
    picture = figures.first(cells)
    assert len({bar.label for bar in picture.chart.bars}) == 2
    assert re.fullmatch(r"Ranks stand still for \d+% of a step\.", picture.see)


def test_figures_6_and_7_are_of_the_cells_that_they_are_about() -> None:
    """Curves over the batch, data parallel and in a pipeline, end at the largest batch that fits; the most ranks stand beside
    fewer with the same batch on each. The sentence below has the numbers of the picture."""
    runs = as_in_the_paper()
    full = memory.Limit(32, 2048)
    limits = {memory.Kind("gpt2-tiny", "pipeline", 2, 4, 0): full}
    sections = {each.title: each for each in report.page(runs, "runs", limits).sections}
    [six] = sections["Figure 6: larger batches"].blocks
    assert isinstance(six, Picture) and isinstance(six.chart, Lines)
    data, pipeline = six.chart.panels
    [curve] = [each for each in data.curves if each.label == "gpt2-tiny, 2 ranks, tcp at 100 Mbit/s"]
    assert list(curve.x) == [8.0, 64.0]
    assert list(curve.y) == pytest.approx([50 * 600 / 680 + 50 * 600 / 640, 100 * 600 / 1240]), (
        "weak and strong are alike"
    )
    for panel, told in ((data, "data parallel it falls"), (pipeline, "in a pipeline it rises")):
        first = panel.curves[0]
        assert f"{told} from {first.y[0]:.0f} to {first.y[-1]:.0f} % ({first.label}, batch 8 to " in six.see
    full_at = {each.label for each in pipeline.curves if each.end == "full: 2048 MiB"}
    assert (
        full_at == {each.label for each in pipeline.curves if each.label.startswith("gpt2-tiny, 2 ranks by 4")} != set()
    )
    [seven] = sections["Figure 7: with the most ranks"].blocks
    assert isinstance(seven, Picture) and isinstance(seven.chart, Bars)
    assert [(bar.heading, bar.label) for bar in seven.chart.bars] == [
        ("tcp at 100 Mbit/s", "2 ranks, 8 sequences"),
        ("", "4 ranks, 16 sequences"),
        ("tcp at 1000 Mbit/s", "2 ranks, 8 sequences"),
        ("", "4 ranks, 16 sequences"),
    ]
    assert seven.see == "With 4 ranks communication takes 98% of a step of gpt2-small (tcp at 100 Mbit/s), with 2 92%."
    assert seven.chart.bars[1].told == "1840 ms, 98% still"
    assert not [title for title in sections if "does not have" in title]


def test_what_a_link_carried_over_time_is_drawn_from_the_records(tmp_path: Path) -> None:
    """Of rank 0's host, the last five seconds of its steps; without records there are only the means."""
    cell = replace(CELL, link_mbit=100.0)
    assert running.course_of(tmp_path, cell) is None
    folder = tmp_path / f"{cell.key}.0"
    folder.mkdir()
    steps = [Step(number, number * SECOND, (number + 1) * SECOND) for number in range(12)]
    rank = Header(0, 1, "a", 1, 0, 0)
    (folder / "rank-0.jsonl").write_text("".join(map(record.line, [rank, *steps])))
    host = Header(0, 1, "a", 2, 0, 0, {"counters": True})
    readings = [
        Readings(SECOND * at, {"nic.eth0.rx_bytes": 1e6 * max(0, at - 9), "nic.eth0.tx_bytes": 5e5 * at})
        for at in range(14)
    ]
    (folder / "host-a.jsonl").write_text("".join(map(record.line, [host, *readings])))
    course = running.course_of(tmp_path, cell)
    assert course == ([0.5, 1.5, 2.5, 3.5, 4.5], [0.0, 0.0, 8.0, 8.0, 8.0])
    # A curve for each network of the cells that are alike but for that, with the most ranks.
    faster = replace(cell, link_mbit=1000.0)
    shutil.copytree(folder, tmp_path / f"{faster.key}.0")
    fewer, larger = replace(cell, ranks=1, batch=4), replace(cell, batch=64)
    others = [outcome(each) for each in (faster, fewer, larger)]
    told = report.page([outcome(cell), *others], "runs", {}, lambda one: running.course_of(tmp_path, one))
    [three] = [each for each in told.sections if each.title.startswith("Figure 3")]
    [drawn] = [each for each in three.blocks if isinstance(each, Picture) and each.name == "figure-3-over-time"]
    assert isinstance(drawn.chart, Lines)
    [panel] = drawn.chart.panels
    assert [curve.label for curve in panel.curves] == ["tcp-4 at 100 Mbit/s", "tcp-4 at 1000 Mbit/s"]
    assert panel.title == "(e) gpt2-tiny, 2 ranks, 8" and len({curve.look for curve in panel.curves}) == 2
    assert "at most 8 Mbit/s (tcp-4 at 100 Mbit/s), 8 Mbit/s (tcp-4 at 1000" in drawn.see
    staged = replace(cell, parallel="pipeline")
    folder.rename(tmp_path / f"{staged.key}.0")
    piped = report.page([outcome(staged)], "runs", {}, lambda one: running.course_of(tmp_path, one))
    [five] = [each for each in piped.sections if each.title.startswith("Figure 5")]
    names = [each.name for each in five.blocks if isinstance(each, Picture)]
    assert names == ["figure-5-gpt2-tiny", "figure-5-link", "figure-5-over-time"]
    assert not [
        each for each in report.page([outcome(cell)], "runs", {}).sections[1].blocks if "over-time" in str(each)
    ]


def test_the_models_stand_as_in_table_1() -> None:
    """Both shapes of GPT-2 large; one that is not known here, from somebody's folder, by its name."""
    runs = [outcome(replace(CELL, model=model)) for model in ("gpt2-large", "gpt2-large-40", "t5-large", "mine")]
    assert [line.cells for line in tables.models(runs).lines] == [
        ["gpt2-large", "decoder", "36", "1,280", "20", "table 1, data parallel"],
        ["gpt2-large-40", "decoder", "40", "1,200", "24", "table 1, model parallel"],
        ["t5-large", "encoder and decoder", "24", "1,024", "16", "table 1"],
        ["mine", "", "", "", "", ""],
    ]


def test_a_matrix_without_cells_for_a_figure_says_what_it_needs() -> None:
    """Instead of an empty picture."""
    last = report.page([outcome()], "runs", {}).sections
    [lacking] = [each for each in last if each.title == "Figures that this matrix does not have"]
    assert [each.partition(" needs")[0] for each in lacking.blocks[0]] == ["Figure 4", "Figure 5", "Figure 6"]


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_no_number_is_cut_in_a_narrow_terminal(width: int) -> None:
    """All cells of all tables are there whole, in lines that are no longer than the terminal; in a wide one they are tables."""
    runs = as_in_the_paper()
    shown = [tables.times(runs), tables.judged(findings.findings(runs)), tables.comparison(runs, runs)]
    for table in shown:
        console = Console(width=width, file=io.StringIO(), color_system=None)
        console.print(table.fitted(width))
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert "…" not in text and max(map(len, text.splitlines())) <= width
        joined = "".join(text.split())
        for line in table.lines:
            numbers = [cell for cell, column in zip(line.cells, table.columns, strict=True) if not column.is_text]
            assert all("".join(cell.split()) in joined for cell in numbers), line
        assert ("───" in text) == (width >= table._least_width(()))
    assert shown[0]._least_width(()) > 80


def test_tables_and_a_comparison(tmp_path: Path) -> None:
    first = [outcome(repeat=repeat, step_ms=100.0 + repeat) for repeat in range(3)]
    second = [outcome(repeat=repeat, step_ms=120.0 + repeat) for repeat in range(3)]
    [line] = tables.times(first).lines
    assert line.cells == [
        "2 ranks, 8",
        "101.0 ± 2.5",
        "20.0",
        "30.0",
        "10.0",
        "1.0",
        "30.0",
        "10.0",
        "40%",
        "60, 90",
    ]
    for name, given in (("a", first), ("b", second)):
        (tmp_path / name).mkdir()
        for each in given:
            results.write(tmp_path / name, each)
    told = CliRunner().invoke(cli.command, ["--compare", str(tmp_path / "a"), str(tmp_path / "b")])
    assert told.exit_code == 0 and "+19.8% ± 2.2%" in told.output and "slower" in told.output
    compare = ["--compare", str(tmp_path / "a"), str(tmp_path / "b"), "--html", str(tmp_path / "both.html")]
    told = CliRunner().invoke(cli.command, compare)
    assert told.exit_code == 0 and f"Report: {tmp_path / 'both.html'}" in told.output
    page = unescape((tmp_path / "both.html").read_text())
    assert "Steps of 1 of 1 cell are slower, of 0 faster" in page and "+19.8% ± 2.2%" in page
    shown = CliRunner().invoke(cli.command, ["--show", str(tmp_path / "a"), "--html", str(tmp_path / "page.html")])
    assert shown.exit_code == 0 and "101.0 ± 2.5" in shown.output
    assert "Communication takes 40% of a step" in (tmp_path / "page.html").read_text()


def test_a_line_of_the_table_comes_to_its_step() -> None:
    """Also with phases that have no column, and more than one purpose, whose times then stand in a column of their own. On one
    host nothing crosses a link, whatever a few bytes of an old record say."""
    staged = replace(CELL, parallel="pipeline", link_mbit=0.0)
    work = {"forward": 20.0, "backward": 30.0, "clip": 1.0, "loading": 4.0, "evaluation": 5.0, "other": 3.0}
    exposed = {"embedding sync": 7.0, "pipeline forward recv": 20.0, "pipeline backward recv": 10.0}
    waits = {"pipeline forward recv": 15.0, "embedding sync": 2.0}
    made = [outcome(staged, work=work, exposed=exposed, waits=waits, receive_mbit=0.02, receive_peak_mbit=0.1)]
    table = tables.times(made)
    [line] = table.lines
    told = dict(zip((column.head for column in table.columns), line.cells, strict=True))
    assert sum(float(told[part]) for part in ("forward", "backward", "optimizer", "other", "wire", "wait")) == 100.0
    assert (told["other"], told["optimizer"], told["wait"]) == ("12.0", "1.0", "17.0")
    assert told["by purpose"] == "pipeline forward recv 20.0, pipeline backward recv 10.0, embedding sync 7.0"
    assert told["received, Mbit/s"] == ""
    assert "by purpose" not in [column.head for column in tables.times([outcome()]).columns]


def test_bars_have_communication_by_purpose() -> None:
    """As figure 5 of the paper: a colour for each, of which wire comes first; those that it does not have are one. The key has
    what the picture has."""
    exposed = {"embedding sync": 7.0, "pipeline forward recv": 20.0, "tensor": 2.0, "pipeline send": 1.0}
    waits = {"pipeline forward recv": 15.0, "tensor": 2.0}
    staged = outcome(replace(CELL, parallel="pipeline"), exposed=exposed, waits=waits)
    chart = figures.first(means.means([staged])).chart
    assert isinstance(chart, Bars)
    [bar] = chart.bars
    drawn = [(part.value, part.colour) for part in bar.parts]
    assert drawn[:3] == [(20.0, "grey-1"), (30.0, "grey-2"), (20.0, "grey-3")]
    moving = [(5.0, "series-2"), (15.0, "series-2"), (7.0, "series-4"), (0.0, "series-4")]
    assert drawn[3:] == [*moving, (1.0, "series-5"), (2.0, "series-5")] and bar.value == 100.0
    names = [
        "forward",
        "backward",
        "optimizer and others",
        "pipeline forward recv",
        "embedding sync",
        "other communication",
    ]
    assert [each.text for each in chart.key] == names


def test_runs_that_were_made_otherwise_are_named(tmp_path: Path) -> None:
    """Beside a comparison, and below a table of a folder with both, also in the report: what differs, and what each folder has.
    Runs that are alike, or do not say how they were made, as old ones, have no such sentence."""
    usual = {"machine": "Small", "processors": 2, "steps": 30, "seed": 1}
    other = {**usual, "machine": "Large", "processors": 64, "steps": 500, "seed": 9}
    made = {
        "a": [usual] * 2,
        "b": [other] * 2,
        "more": [{**usual, "processors": 4}],
        "old": [{}],
        "mixed": [usual, other, {}],
    }
    for name, given in made.items():
        (tmp_path / name).mkdir()
        for repeat, each in enumerate(given):
            results.write(tmp_path / name, outcome(repeat=repeat, **each))

    def told(*arguments: str) -> str:
        done = CliRunner().invoke(cli.command, [each.replace("/", f"{tmp_path}/") for each in arguments])
        assert done.exit_code == 0, done.output
        found = re.search(r"The runs differ .* That alone may change their times\.", " ".join(done.output.split()))
        return found[0].replace(f"{tmp_path}/", "") if found else ""

    assert told("--compare", "/a", "/b") == (
        "The runs differ in machine, steps, seed: a has 2 processors (Small), 30 steps, seed 1; "
        "b has 64 processors (Large), 500 steps, seed 9. That alone may change their times."
    )
    assert told("--compare", "/a", "/more") == (
        "The runs differ in machine: a has 2 processors (Small); more has 4 processors (Small). "
        "That alone may change their times."
    )
    mixed = (
        "The runs differ in machine, steps, seed: mixed has 2 processors (Small) and 64 processors (Large), "
        "30 steps and 500 steps, seed 1 and seed 9. That alone may change their times."
    )
    assert told("--show", "/mixed", "--html", "/page.html") == mixed
    assert mixed.replace("mixed has", f"{tmp_path}/mixed has") in unescape((tmp_path / "page.html").read_text())
    for alike in (["--compare", "/a", "/a"], ["--compare", "/a", "/old"], ["--show", "/a"], ["--show", "/old"]):
        assert told(*alike) == "", alike


def test_what_the_profile_complains_of_is_kept_and_told(tmp_path: Path) -> None:
    """In the terminal how many runs, and one text; in the report all, with the number of runs; what ranks print is none."""
    said = "[rank0]: penstock profile: no\npenstock profile: too few samples\nstep | 3\npenstock profile: x\x1b\n"
    assert running.complaints_of(said) == ["too few samples", "x\x1b"]
    for repeat in range(3):
        problems = () if repeat == 1 else ("too few samples", f"rank {repeat} is odd")
        results.write(tmp_path, outcome(repeat=repeat, problems=problems))
    page = tmp_path / "page.html"
    told = CliRunner().invoke(cli.command, ["--show", str(tmp_path), "--html", str(page)])
    assert "The profile complains of 2 of 3 runs (all: --html), first of gpt2-tiny-" in told.output
    assert "too few samples" in told.output and "is odd" not in told.output.replace("rank 0 is odd", "")
    assert "too few samples (2 runs)" in (html := page.read_text()) and "rank 2 is odd (1 run)" in html
    many = [outcome(problems=(f"{number}",)) for number in range(report.MOST_PROBLEMS + 3)]
    [section] = [each for each in report.page(many, "x", {}).sections if "complains" in each.title]
    assert len(section.blocks[0]) == report.MOST_PROBLEMS + 1 and "and 3 more" in section.blocks[0][-1]


def test_a_matrix_runs_and_goes_on(tmp_path: Path) -> None:
    """For real, data parallel with pauses and in a pipeline; a second command makes only what is missing. That over gloo is
    too short for the samples that the profile wants, and keeps that."""
    path = written(
        tmp_path,
        """
        models: gpt2-tiny
        steps: 14
        repeats: 1
        runs:
          - {batches: 4, transports: tcp, checkpoint_every: 5, evaluate_every: 6}
          - {batches: 4, micro_batch: 1, parallel: pipeline, transports: gloo}
        """,
    )
    command = [sys.executable, "-m", "penstock", "characterize", str(path), "--html", str(tmp_path / "page.html")]
    first = forked.run(command, capture_output=True, text=True)
    assert first.returncode == 0, first.stdout + first.stderr
    data, pipeline = sorted(results.read(tmp_path / "matrix.runs"), key=lambda one: one.cell.parallel)
    assert data.work["forward"] > 0 and data.work["backward"] > 0 and data.communication_ms > 0
    assert data.work["checkpoint"] > 0 and data.work["evaluation"] > 0 and "checkpoint" not in pipeline.work
    assert not [*(tmp_path / "matrix.runs").glob("*.pt")]
    assert any("(torch's profiler sampled" in text for text in pipeline.problems), pipeline.problems
    assert f"The profile complains of {1 + bool(data.problems)} of 2 runs" in first.stdout
    assert set(data.exposed) <= {"data-parallel sync", "other"}
    assert {"pipeline forward recv", "pipeline backward recv", "embedding sync"} <= set(pipeline.exposed)
    assert "Communication takes" in (tmp_path / "page.html").read_text()
    kept = next((tmp_path / "matrix.runs").glob("*.json"))
    kept.unlink()
    again = forked.run(command[:-2], capture_output=True, text=True)
    assert again.returncode == 0 and "1 of 2 runs are in" in again.stderr and kept.is_file(), again.stderr


def test_a_run_that_fails_leaves_the_others(tmp_path: Path) -> None:
    """For real: penstock is told an interface that is not there, and gloo does not ask. What failed stands at the end with its
    reason, and a second command makes that alone."""
    path = written(tmp_path, "{models: gpt2-tiny, batches: 4, transports: [tcp, gloo], steps: 6, repeats: 1}")
    command = [sys.executable, "-m", "penstock", "characterize", str(path)]
    environment = {**os.environ, "NCCL_SOCKET_IFNAME": "nosuch0"}
    first = forked.run(command, capture_output=True, text=True, env=environment)
    assert first.returncode == 1, first.stdout + first.stderr
    assert [one.cell.transport for one in results.read(tmp_path / "matrix.runs")] == ["gloo"]
    assert "it failed: it ended with status 1" in first.stderr and "2 of 2: " in first.stderr
    end = first.stderr[first.stderr.index("Error: 1 run failed") :].splitlines()
    assert len(end) == 2 and end[1].startswith("  gpt2-tiny-data-2-4-tcp-0-") and "nosuch0" in end[1], end
    assert "2 ranks, 4" in first.stdout, "what has ended is shown"
    again = forked.run(command, capture_output=True, text=True)
    assert again.returncode == 0 and "1 of 2 runs are in" in again.stderr, again.stdout + again.stderr
    assert "1 of 1: gpt2-tiny-data-2-4-tcp" in again.stderr


@pytest.mark.parametrize("change", ["steps: 40", "seed: 9"])
def test_runs_of_another_length_or_seed_are_not_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """They would be in one mean. Runs that do not say what they are of, as old ones, are taken."""
    text = "{models: gpt2-tiny, batches: 4, transports: gloo, repeats: 1, %s}"
    ran = []

    def run(cell: Cell, repeat: int, *, steps: int, seed: int, **_: object) -> Outcome:
        ran.append((steps, seed))
        return replace(outcome(cell, repeat), steps=steps, seed=seed)

    monkeypatch.setattr(running, "run", run)
    path = written(tmp_path, text % "steps: 30")
    for _ in range(2):
        assert CliRunner().invoke(cli.command, [str(path)]).exit_code == 0 and ran == [(30, 1)]
    told = CliRunner().invoke(cli.command, [str(written(tmp_path, text % change))])
    assert told.exit_code == 1 and ran == [(30, 1)], told.output
    assert "are of 30 steps with seed 1: name another --output" in told.output
    [one] = results.read(tmp_path / "matrix.runs")
    results.write(tmp_path / "matrix.runs", replace(one, steps=0))
    assert CliRunner().invoke(cli.command, [str(path)]).exit_code == 0 and ran == [(30, 1)]


def test_two_commands_do_not_run_in_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one says what to do and runs nothing, and the first one ends as if it were alone; in another folder the second
    one runs. Where a folder can have no lock, a command says so and goes on; where the lock cannot be written, it ends."""
    path = written(tmp_path, "{models: gpt2-tiny, batches: 4, transports: gloo, repeats: 1}")
    ran, second = [], []

    def run(cell: Cell, repeat: int, *, folder: Path, **_: object) -> Outcome:
        ran.append(folder.name)
        if folder.name == "matrix.runs":
            second.extend(
                CliRunner().invoke(cli.command, [str(path), *more]) for more in ([], ["-o", str(tmp_path / "o")])
            )
        return outcome(cell, repeat)

    monkeypatch.setattr(running, "run", run)
    first = CliRunner().invoke(cli.command, [str(path)])
    assert first.exit_code == 0 and ran == ["matrix.runs", "o"], first.output
    refused, elsewhere = second
    assert refused.exit_code == 1 and f"another penstock characterize runs its matrix in {tmp_path}" in refused.output
    assert "wait until it has ended, or name another --output" in refused.output and elsewhere.exit_code == 0
    again = CliRunner().invoke(cli.command, [str(path)])
    assert again.exit_code == 0 and "1 of 1 runs are in" in again.output and len(ran) == 2, again.output

    def lacks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", lacks)
    without = CliRunner().invoke(cli.command, [str(path)])
    assert without.exit_code == 0 and "(No locks available): start no other penstock characterize" in without.output
    (tmp_path / "matrix.runs" / cli.LOCK).unlink()
    (tmp_path / "matrix.runs" / cli.LOCK).mkdir()
    unwritable = CliRunner().invoke(cli.command, [str(path)])
    assert unwritable.exit_code == 1 and ".lock: Is a directory; name another --output" in unwritable.output


def test_a_command_that_is_killed_leaves_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For real: it is killed in mid run, and the next command runs in its folder, whatever the killed one's processes do."""
    path = written(tmp_path, "{models: gpt2-tiny, batches: 4, transports: gloo, repeats: 1}")
    program = (
        "import subprocess, sys; from penstock.tools.characterize import cli, running\n"
        "def run(*_, **__):\n"
        "    subprocess.run(['sh', '-c', 'echo runs; read line'])\n"
        "running.run = run\n"
        "cli.command()\n"
    )
    command = [sys.executable, "-c", program, str(path)]
    monkeypatch.setattr(running, "run", lambda cell, repeat, **_: outcome(cell, repeat))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "runs\n"
        assert "another penstock characterize runs" in CliRunner().invoke(cli.command, [str(path)]).output
        process.kill()
        process.wait()
        after = CliRunner().invoke(cli.command, [str(path)])
    assert after.exit_code == 0, after.output


def test_a_search_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two models the first one's search fails for another reason than memory: the other's is made, and its batch is run."""
    path = written(tmp_path, "{models: [gpt2-tiny, bert-tiny], batches: 4, transports: gloo, repeats: 1}")
    ran = []

    def fits(cell: Cell, memory: int, **_: object) -> bool:
        if cell.model == "gpt2-tiny":
            raise running.RunFailed("it said:\n[rank0]: ValueError: no luck\n====")
        return cell.batch <= 6

    def run(cell: Cell, repeat: int, **_: object) -> Outcome:
        ran.append((cell.model, cell.batch))
        return outcome(cell, repeat)

    monkeypatch.setattr(running, "fits", fits)
    monkeypatch.setattr(running, "run", run)
    told = CliRunner().invoke(cli.command, [str(path), "--memory", "512"])
    assert told.exit_code == 1 and ran == [("gpt2-tiny", 4), ("bert-tiny", 4), ("bert-tiny", 6)]
    assert "the largest batch of gpt2-tiny with 2 ranks of 512 MiB: [rank0]: ValueError: no luck" in told.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_matrix_that_is_stopped_leaves_nothing_behind(number: signal.Signals, tmp_path: Path) -> None:
    """In mid run: it says where what has ended is, and no process of the run goes on."""
    path = written(tmp_path, "{models: gpt2-tiny, batches: 4, transports: gloo, steps: 100000, repeats: 1}")
    mark = f"TEST_CHARACTERIZE={path}"
    process = forked.Popen(
        [sys.executable, "-m", "penstock", "characterize", str(path)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **dict([mark.split("=", 1)])},
    )

    def running() -> int:
        found = 0
        for each in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                found += mark.encode() in each.read_bytes().split(b"\0")
        return found

    def until(holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not holds():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    with process:
        try:
            # The command, the profile, torchrun, two ranks.
            until(lambda: running() >= 5 or process.poll() is not None)
            process.send_signal(number)
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130 and f"that have ended are in {tmp_path / 'matrix.runs'}" in said, said
    assert "Traceback" not in said
    until(lambda: not running())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "name a matrix"),
        (["--show", "."], "has no run that has ended"),
        (["nowhere.yaml"], "does not exist"),
        (["--show", ".", "--memory", "512"], "--memory is of runs, and --show and --compare run nothing: leave it out"),
        (["--show", ".", "--output", "x"], "--output is of runs"),
        (["--compare", ".", ".", "--output", "x"], "--output is of runs"),
        (["--compare", ".", ".", "--timeout", "9"], "--timeout is of runs"),
    ],
)
def test_wrong_options_say_what_is_wrong(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = CliRunner().invoke(cli.command, options)
    assert told.exit_code != 0 and message in told.output
