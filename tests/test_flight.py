"""Proves that after a failure the records of the ranks are there, and say who waited for what."""

from __future__ import annotations

import datetime
import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import forked
import penstock
import ranks
from daemons import Daemon
from penstock.tools.flight import describe


def test_a_rank_that_dies(tmp_path: pathlib.Path) -> None:
    """Ranks that lose another write what they were doing: the operation that failed, those before it, and who is lost."""
    with ranks.Ranks(_reduce_until_one_dies, count=3, env={"PENSTOCK_FLIGHT_RECORDER": str(tmp_path)}) as job:
        job.await_note("running", deadline_s=60)
        job.signal(2, signal.SIGKILL)
        outcomes = job.outcomes(timeout_s=20, of=[0, 1])
    for outcome in outcomes:
        assert f"the last operations of rank {outcome.rank} are in {tmp_path}" in outcome.output, str(outcome)
        record = json.loads((tmp_path / f"rank-{outcome.rank}.json").read_text())
        *before, last = record["operations"]
        assert last["well"] is False and last["operation"] == "all_reduce(sum, 1000 x float32)"
        assert all(one["well"] for one in before) and len(before) >= 20
        assert [one["number"] for one in record["operations"]] == list(
            range(last["number"] - len(before), last["number"] + 1)
        )
        assert record["groups"][0]["failed"] is not None
    shown = _flight(tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "FAILED after" in shown.stdout and "rank 2" in shown.stdout and "lost:" in shown.stdout, shown.stdout


def test_ranks_that_part(tmp_path: pathlib.Path) -> None:
    """Where one rank issues another operation than the others, the records side by side name its number and both."""
    with ranks.Ranks(_part, count=2, env={"PENSTOCK_FLIGHT_RECORDER": str(tmp_path)}) as job:
        outcomes = job.outcomes(timeout_s=60)
    assert all(outcome.raised is not None and outcome.raised.is_a("Mismatch") for outcome in outcomes)
    shown = _flight(tmp_path).stdout
    told = "#3: ranks issued different operations: rank 0 all_reduce(sum, 8 x float32), rank 1 all_reduce(max, 8 x float32)"
    assert told in shown, shown


def test_on_a_signal(tmp_path: pathlib.Path) -> None:
    """SIGUSR2 makes a rank that hangs write what it waits for, and changes nothing else; without it nobody handles it."""
    with ranks.Ranks(_hang, count=2, env={"PENSTOCK_FLIGHT_RECORDER": str(tmp_path)}) as job:
        job.await_note("waiting", deadline_s=60, of=[0])
        job.signal(0, signal.SIGUSR2)
        path = tmp_path / "rank-0.json"
        until = time.monotonic() + 20
        while not path.exists():
            assert time.monotonic() < until, "nothing was written within 20 s"
            os.sched_yield()
        (running,) = [one for one in json.loads(path.read_text())["operations"] if one["ended_s_ago"] is None]
        assert running["operation"].startswith("barrier") and running["number"] == 1
        (tmp_path / "go").touch()
        assert all(outcome.ok for outcome in job.outcomes(timeout_s=30))
    assert ranks.run(_who_handles, count=1) == [True]


def test_on_a_signal_after_another_engine(tmp_path: pathlib.Path) -> None:
    """SIGUSR2 writes the record of the engine that runs, also where an earlier one has ended."""
    ranks.run(_begin_again, count=1, env={"PENSTOCK_FLIGHT_RECORDER": str(tmp_path)})
    (one,) = json.loads((tmp_path / "rank-0.json").read_text())["operations"][-1:]
    assert one["operation"].startswith("broadcast")


def _begin_again() -> None:
    for call in (dist.barrier, functools.partial(dist.broadcast, torch.ones(1), 0)):
        dist.init_process_group("penstock")
        call()
        if call is not dist.barrier:
            os.kill(os.getpid(), signal.SIGUSR2)
        dist.destroy_process_group()


def test_through_servers(tmp_path: pathlib.Path) -> None:
    """All-reduces through servers are listed with an order of their own. On a signal: what the one that hangs waits for, and
    which rank has not come; and again when the time-out has failed the group, with the words of the error."""
    folder = tmp_path / "records"
    with Daemon("server") as server, Daemon("aggregator") as rack:
        deployment = tmp_path / "deployment.yaml"
        tree = [{"aggregator": rack.address, "workers": [0, 1, 2]}]
        deployment.write_text(
            json.dumps({"version": 1, "aggregated": {"servers": [{"address": server.address, "tree": tree}]}})
        )
        env = {"PENSTOCK_FLIGHT_RECORDER": str(folder), "PENSTOCK_DEPLOYMENT": str(deployment)}
        with ranks.Ranks(_come_late, count=3, env=env) as job:
            job.await_note("waiting", deadline_s=60)
            until = time.monotonic() + 20
            # What it waits for is looked at ten times a second.
            while not ((told := _signalled(job, folder)) and "waits for" in told):
                assert time.monotonic() < until, told
            outcomes = job.outcomes(timeout_s=60)
    lacks = (
        f"server {server.address}: the first packets of some rank, which has not begun this operation, or they are lost"
    )
    all_reduce = "all_reduce(sum, 50000 x float32) (aggregated)"
    assert f" 0 #2 {all_reduce}: running, waits for {lacks}\n" in told, told
    assert f" 0 #3 {all_reduce}: running\n" in told, told
    assert f" 0 #1 {all_reduce}: done after " in told, told
    assert "group 0, through servers: ranks have come differently far: rank 0 #3, rank 1 #3, rank 2 #1\n" in told, told
    assert "ranks issued different" not in told and "alarm #0 send/recv" not in told, told
    for outcome in outcomes:
        assert outcome.raised is not None and outcome.raised.is_a("Timeout"), str(outcome)
        assert lacks in outcome.raised.text, str(outcome)
    told = _flight(folder).stdout
    assert f" 0 #2 {all_reduce}: FAILED after " in told and f", waited for {lacks}\n" in told, told
    assert told.count(f"{all_reduce}: FAILED") == 4, told


def test_a_folder_that_cannot_be_written(tmp_path: pathlib.Path) -> None:
    """The error is the same; a line says that the record could not be written, and why."""
    (tmp_path / "file").touch()
    with ranks.Ranks(_part, count=2, env={"PENSTOCK_FLIGHT_RECORDER": str(tmp_path / "file")}) as job:
        outcomes = job.outcomes(timeout_s=60)
    for outcome in outcomes:
        assert outcome.raised is not None and outcome.raised.is_a("Mismatch")
        assert f"the last operations of rank {outcome.rank} cannot be written to" in outcome.output


def test_nothing_to_read(tmp_path: pathlib.Path) -> None:
    """A folder without records, and files that are none, are told apart from records."""
    shown = _flight(tmp_path)
    assert shown.returncode == 1 and "there is no flight record (rank-N.json)" in shown.stderr
    (tmp_path / "rank-0.json").write_text("[]")
    shown = _flight(tmp_path)
    assert shown.returncode == 1 and "rank-0.json is no flight record" in shown.stderr
    (tmp_path / "rank-1.json").mkdir()
    (tmp_path / "rank-2.json").symlink_to("gone")
    shown = _flight(tmp_path)
    assert shown.returncode == 1 and "Traceback" not in shown.stderr
    assert "rank-1.json cannot be read (Is a directory)" in shown.stderr
    assert "rank-2.json cannot be read (No such file or directory)" in shown.stderr


def test_how_far_ranks_have_come() -> None:
    """Pure: ranks that have issued differently many operations, a running one, and no more of the past than asked for."""

    def operation(number: int, ended: float | None) -> dict[str, Any]:
        named = {"group": "0", "number": number, "operation": "barrier(0 x byte)", "algorithm": "ring", "bytes": 0}
        return {**named, "issued_s_ago": 10.0 - number, "ended_s_ago": ended, "well": None if ended is None else True}

    def record(rank: int, operations: list[dict[str, Any]]) -> dict[str, Any]:
        groups, peers = [{"name": "0", "failed": None}], [{"lost": None}]
        return {
            "rank": rank,
            "host": "h",
            "pid": 1,
            "time": 0.0,
            "groups": groups,
            "peers": peers,
            "operations": operations,
        }

    done = [operation(number, 9.5 - number) for number in range(1, 6)]
    text = describe([record(1, [*done[:4], operation(5, None)]), record(0, [*done, operation(6, None)])], last=2)
    lines = text.splitlines()
    assert (
        lines[0].startswith("rank 0 on h") and "group 0: ranks have come differently far: rank 0 #6, rank 1 #5" in lines
    )
    assert sum("running" in line for line in lines) == 2
    assert sum("done after 500.0 ms" in line for line in lines) == 2


# ------------------------------------------------------------------------------------------------------------ programs


def _reduce_until_one_dies() -> None:
    dist.init_process_group("penstock")
    tensor = torch.ones(1000)
    for _ in range(20):
        dist.all_reduce(tensor)
    if dist.get_rank() == 2:
        ranks.note("running")
        signal.pause()
    work = dist.all_reduce(tensor, async_op=True)
    ranks.note("running")
    work.wait()


def _part() -> None:
    dist.init_process_group("penstock")
    dist.all_reduce(torch.ones(4))
    dist.barrier()
    dist.all_reduce(torch.ones(8), dist.ReduceOp.MAX if dist.get_rank() else dist.ReduceOp.SUM)


def _hang() -> None:
    dist.init_process_group("penstock")
    folder = pathlib.Path(os.environ["PENSTOCK_FLIGHT_RECORDER"])
    if dist.get_rank() == 0:
        work = dist.barrier(async_op=True)
        ranks.note("waiting")
        work.wait()
    else:
        until = time.monotonic() + 40
        while not (folder / "go").exists():
            assert time.monotonic() < until
            os.sched_yield()
        dist.barrier()
    record = penstock.flight_record()
    assert [one["well"] for one in record["operations"] if one["operation"].startswith("barrier")] == [True]
    dist.destroy_process_group()


def _come_late() -> None:
    """Two ranks all-reduce through servers, and one does not come."""
    late = os.environ["RANK"] == "2"
    dist.init_process_group("penstock", timeout=datetime.timedelta(seconds=60 if late else 6))
    dist.all_reduce(torch.ones(50_000))
    dist.barrier()
    works = [dist.all_reduce(torch.ones(50_000), async_op=True) for _ in range(0 if late else 2)]
    ranks.note("waiting")
    if late:
        dist.recv(torch.ones(1), 0)
    for work in works:
        work.wait()


def _signalled(job: ranks.Ranks, folder: pathlib.Path) -> str:
    """What the records say that all ranks write on a signal; empty as long as not all have."""
    for rank in range(3):
        job.signal(rank, signal.SIGUSR2)
    return _flight(folder).stdout if len(list(folder.glob("rank-*.json"))) == 3 else ""


def _who_handles() -> bool:
    dist.init_process_group("penstock")
    untouched = signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL
    dist.destroy_process_group()
    return untouched


def test_lives_are_kept_apart(tmp_path: pathlib.Path) -> None:
    """A job that was started again leaves the records of its first life; the last one is told about unless one is asked for."""
    for restarts in ("0", "2"):
        env = {"PENSTOCK_FLIGHT_RECORDER": str(tmp_path), "TORCHELASTIC_RESTART_COUNT": restarts}
        with ranks.Ranks(_part, count=2, env=env) as job:
            job.outcomes(timeout_s=60)
    assert {path.name for path in tmp_path.iterdir()} == {
        f"rank-{rank}{life}.json" for rank in (0, 1) for life in ("", ".2")
    }
    (tmp_path / "rank-1.2.json").unlink()
    newest, first, none = _flight(tmp_path), _flight(tmp_path, "--generation=0"), _flight(tmp_path, "--generation=1")
    assert "rank 1 on" not in newest.stdout and "generation 2; there are also records of 0" in newest.stderr, newest
    assert "rank 1 on" in first.stdout and "ranks issued different operations" in first.stdout, first
    assert none.returncode == 1 and "no record of generation 1" in none.stderr and "but of 0, 2" in none.stderr, none


@pytest.mark.parametrize("how", ["infinite", "leave"])
def test_the_example(how: str, tmp_path: pathlib.Path) -> None:
    """What docs/guide/debugging.md shows."""
    env = os.environ | {"PENSTOCK_CHECK": "nan", "PENSTOCK_FLIGHT_RECORDER": str(tmp_path)}
    example = pathlib.Path(__file__).parent.parent / "examples" / "debugging.py"
    command = [*forked.TORCHRUN, "--nproc-per-node=2", str(example), how]
    done = forked.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "has finished" not in done.stdout, done.stdout
    told = {
        "infinite": "NotFinite: the gradient of 0.weight on rank 1 holds NaN or infinity in step 3 (PENSTOCK_CHECK=nan)",
        "leave": "(its script has ended, or has destroyed the group) after 2 collectives. The group is unusable",
    }[how]
    assert told in done.stderr, done.stderr
    shown = _flight(tmp_path).stdout
    # Whether rank 0 has begun its next round when it hears of the failure is chance: what it did before is there.
    failed = {"infinite": "channel 0/rounds has failed: ", "leave": "group 0 has failed: "}[how]
    assert "rank 0 on " in shown and failed in shown, shown
    assert "0/rounds #2 all_reduce(band, 19 x uint8) (exchange): done" in shown, shown


@pytest.mark.parametrize(
    ("how", "check", "told"),
    [
        (
            "differ",
            "mismatch",
            "Diverged: the parameter 0.weight is not alike on all ranks: rank 0 and rank 1 hold different bits",
        ),
        ("slow", "slow", "PENSTOCK_CHECK=slow: in the last 20 steps rank 1 was last in "),
    ],
)
def test_the_examples_of_checks(how: str, check: str, told: str) -> None:
    """What docs/guide/debugging.md shows of PENSTOCK_CHECK=mismatch and slow."""
    env = os.environ | {"PENSTOCK_CHECK": check}
    example = pathlib.Path(__file__).parent.parent / "examples" / "debugging.py"
    command = [*forked.TORCHRUN, "--nproc-per-node=2", str(example), how]
    done = forked.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert told in done.stderr, done.stderr
    assert (done.returncode == 0) == (how == "slow"), done.stderr


def _flight(folder: pathlib.Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock", "flight", str(folder), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
