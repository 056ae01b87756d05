"""Proves that the launcher of the other tests (``tests/ranks.py``) sees every way in which a rank can fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

import ranks


def test_values_come_back_by_rank() -> None:
    """Each rank's return value arrives, and a rank has the environment of torchrun and a store."""
    assert ranks.run(_meet, count=3) == [(0, 3, 6.0), (1, 3, 6.0), (2, 3, 6.0)]


def test_an_exception_fails_the_job() -> None:
    """One rank raises: the job fails in seconds with its traceback and output, although the other waits for ever."""
    began = time.monotonic()
    with pytest.raises(ranks.RanksFailed, match=r"(?s)rank 0 raised builtins.ValueError: on purpose.*_raise.*a clue"):
        ranks.run(_raise, count=2, timeout_s=30, grace_s=1)
    assert time.monotonic() - began < 25


def test_a_death_after_the_end_fails_the_job() -> None:
    """A rank that returns and then dies by a signal, as a crash in a finaliser does, is not taken for a success."""
    with pytest.raises(ranks.RanksFailed, match=r"rank 1 died with exit code -11"):
        ranks.run(_die_on_the_way_out, count=2)


def test_a_hang_shows_stacks() -> None:
    """A rank that does not end is killed with its children, and the failure shows where it hung."""
    with ranks.Ranks(_hang, count=1) as job:
        (child,) = job.await_note("child", deadline_s=20)
        (outcome,) = job.outcomes(timeout_s=1)
        assert outcome.exit_code is None and "in _hang" in outcome.output
    _await_end(child)


def test_signals_and_notes() -> None:
    """A rank can be killed at a point that it has noted; the others' outcomes are their own."""
    with ranks.Ranks(_note_and_wait, count=2) as job:
        assert job.await_note("here", deadline_s=20) == [0, 10]
        job.signal(1, signal.SIGKILL)
        job.store.set("go on", "yes")
        first, second = job.outcomes(timeout_s=20)
    assert first.ok and first.value == "went on"
    assert second.exit_code == -signal.SIGKILL and second.value is None


def _meet() -> tuple[int, int, float]:
    dist.init_process_group("gloo")
    tensor = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(tensor)
    return dist.get_rank(), dist.get_world_size(), tensor.item()


def _raise() -> None:
    print("a clue")
    if os.environ["RANK"] == "0":
        raise ValueError("on purpose")
    _store().wait(["never"])


def _die_on_the_way_out() -> None:
    if os.environ["RANK"] == "1":
        import multiprocessing.util

        multiprocessing.util.Finalize(None, os.kill, (os.getpid(), signal.SIGSEGV), exitpriority=1)


def _hang() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ranks.note("child", child.pid)
    _store().wait(["never"])


def _note_and_wait() -> str:
    ranks.note("here", 10 * int(os.environ["RANK"]))
    _store().wait(["go on"])
    return "went on"


def _store() -> dist.Store:
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


def _await_end(pid: int) -> None:
    """Wait until a process is gone; it has been killed, so that this is a matter of milliseconds."""
    deadline = time.monotonic() + 10
    while os.path.exists(f"/proc/{pid}") and _state(pid) != "Z":
        assert time.monotonic() < deadline, f"process {pid} outlives its job"
        os.sched_yield()


def _state(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"
