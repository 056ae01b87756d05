"""Proves that `penstock info`, `penstock doctor` and `penstock.stats()` say what is true."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Mapping

import click.testing
import pytest
import torch
import torch.distributed as dist

import penstock
import ranks
from backends import ALL
from penstock import config, doctor, info


def test_info_shows_values_and_where_they_come_from() -> None:
    """Every knob with its value, origin and meaning; that there is a secret, and not what it is."""
    set_here = {"PENSTOCK_STREAMS": "3", "PENSTOCK_SECRET": "a stone in the river"}
    ended = _penstock(["info", "--json"], set_here)
    assert ended.returncode == 0 and "stone" not in ended.stdout + ended.stderr, ended.stderr
    knobs = {knob["name"]: knob for knob in json.loads(ended.stdout)["knobs"]}
    assert list(knobs) == [knob.name for knob in config.KNOBS]
    for knob in config.KNOBS:
        shown = knobs[knob.name]
        assert shown["origin"] == ("environment" if knob.name in set_here else "default"), shown
        assert shown["value"] == {**set_here, "PENSTOCK_SECRET": "(set, not shown)"}.get(knob.name, knob.default), shown
        assert shown["meaning"] == knob.meaning
    table = _penstock(["info"], set_here)
    assert table.returncode == 0 and "stone" not in table.stdout and "PENSTOCK_STREAMS" in table.stdout, table.stderr


@pytest.mark.parametrize("wrong", ["PENSTOCK_STREAMS", "PENSTOCK_INTERFACE", "TORCHELASTIC_RESTART_COUNT"])
@pytest.mark.parametrize("form", ["table", "json"])
def test_info_refuses_a_wrong_value(wrong: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table, or the JSON, still comes; then the variable is named, and the exit code says it too."""
    monkeypatch.setenv(wrong, "nosuch0")
    ended = click.testing.CliRunner().invoke(info.command, ["--json"] if form == "json" else [])
    assert ended.exit_code == 1 and "PENSTOCK_LOG" in ended.output, ended.output
    (told,) = json.loads(ended.stdout)["wrong"] if form == "json" else [ended.stderr]
    assert wrong in told and "nosuch0" in told and "Traceback" not in ended.output, ended.output


def test_info_shows_a_misspelt_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a row of its own, with the name that may have been meant, and without its value, which may be a secret; it is no error,
    as nothing reads it."""
    monkeypatch.setenv("PENSTOCK_STREAM", "hush")
    ended = click.testing.CliRunner().invoke(info.command, ["--json"])
    row = json.loads(ended.stdout)["knobs"][-1]
    assert ended.exit_code == 0 and (row["name"], row["value"]) == ("PENSTOCK_STREAM", "(set, not shown)")
    assert "did you mean PENSTOCK_STREAMS?" in row["meaning"] and "hush" not in ended.stdout


def test_doctor_checks_two_ranks_here() -> None:
    """Alone it starts two ranks: both ways are there, with rate, medium and streams; nothing to mend is success."""
    ended = _penstock(["doctor", "--mebibytes=1"], {"PENSTOCK_SHM": "0", "PENSTOCK_STREAMS": "3"})
    rows = [line for line in ended.stdout.splitlines() if "Gbit/s" in line]
    assert len(rows) == 2 and all(" tcp " in row and " 3 " in row for row in rows), ended.stdout + ended.stderr
    assert all(float(row.split(" Gbit/s")[0].split()[-1]) > 0.01 for row in rows), rows
    assert "lo (65536)" in ended.stdout
    assert ended.returncode == (1 if "! rank" in ended.stdout else 0), ended.stdout


def test_doctor_warns() -> None:
    """A limit that is too low is named with what to do, and is a failure to the shell."""
    with ranks.Ranks(_with_few_files, count=2, args=(2048,), env={"COLUMNS": "300"}) as job:
        first, second = job.outcomes(timeout_s=60)
    for outcome in (first, second):
        assert outcome.raised is not None and outcome.raised.is_a("SystemExit") and outcome.raised.text == "1", str(
            outcome
        )
    for rank in (0, 1):
        assert f"! rank {rank}: only 2048 open files are allowed; raise it (ulimit -n 65536)" in first.output


def test_doctor_leaves_the_group_when_a_check_fails() -> None:
    """The error comes out; the other rank says in a line that it failed, naming this rank; neither has a process group left."""
    (first, _, first_left), (second, said, second_left) = ranks.run(_check_that_fails, count=2)
    assert first == "ZeroDivisionError" and second == "unhealthy", (first, second)
    assert re.match(r"rank 1: (PeerLost|Closed): .*rank 0", said), said
    assert not first_left and not second_left


@pytest.mark.parametrize("medium", ["penstock-tcp", "penstock"])
def test_memory_is_bounded(medium: str) -> None:
    """With 4 peers and default settings the engine stays below the 64 MiB that are promised, whatever is in flight."""
    most = ranks.run(_flood, count=5, env=ALL[medium].env)
    assert all(0 < each <= 64 << 20 for each in most), most


# ------------------------------------------------------------------------------------------------------------ programs


def _check_that_fails() -> tuple[str, str, bool]:
    """Rank 0 cannot exchange anything; what the doctor raised or said here, and whether there is still a process group."""
    if os.environ["RANK"] == "0":
        doctor._exchange = lambda *_: 1 / 0
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            ended = "healthy" if doctor._run(1000, 60.0) else "unhealthy"
    except ZeroDivisionError as error:
        ended = type(error).__name__
    return ended, said.getvalue(), dist.is_initialized()


def _with_few_files(allowed: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, allowed))
    doctor.command(["--mebibytes=1"], prog_name="penstock doctor")


def _flood() -> int:
    """Many operations at once, large and small; the most that the engine says it holds meanwhile, in bytes."""
    dist.init_process_group("penstock")
    tensors = [torch.ones(elements) for elements in 6 * (4 << 20, 1 << 18, 1000, 10)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    most = penstock.stats()["memory_bytes"]
    for work in works:
        while not work.get_future().done():
            most = max(most, penstock.stats()["memory_bytes"])
        work.wait()
    assert all(tensor.eq(5).all() for tensor in tensors)
    dist.destroy_process_group()
    return int(most)


def _penstock(arguments: list[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    return subprocess.run(
        [sys.executable, "-m", "penstock", *arguments],
        env={**inherited, "COLUMNS": "300", **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
