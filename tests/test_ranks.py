"""Proves that the launcher of the other tests (``tests/ranks.py``) sees every way in which a rank can fail."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

import forked
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


def test_a_forked_command_is_one_of_subprocess(tmp_path: pathlib.Path) -> None:
    """A script as a fork has the arguments, environment, folder, streams and exit code that a fresh interpreter would; torch is
    there before it asks, and so it is in what the script starts itself."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    (tmp_path / "neighbour.py").write_text("NAME = 'neighbour'")
    for run in (subprocess.run, forked.run):
        env = {**os.environ, "ONE": "1"}
        done = run([sys.executable, script, "a", "b"], env=env, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 3 and done.stderr == "to stderr\nits end\n", done
        assert done.stdout == f"['a', 'b'] 1 {tmp_path} neighbour __main__\nchild: {run is forked.run}\n"


def test_a_forked_command_that_fails(tmp_path: pathlib.Path) -> None:
    """A traceback of its own frames only; a signal is the exit code of one that it kills; one that hangs times out."""
    done = forked.run([sys.executable, "-m", "no.such.module"], capture_output=True, text=True)
    assert done.returncode == 1 and "No module named" in done.stderr and "forked.py" not in done.stderr, done.stderr
    (tmp_path / "endless.py").write_text("import threading; threading.Event().wait()")
    endless = [sys.executable, tmp_path / "endless.py"]
    with forked.Popen(endless, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert os.getpgid(process.pid) == process.pid and process.poll() is None
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait(20) == -signal.SIGKILL
    with pytest.raises(subprocess.TimeoutExpired):
        forked.run(endless, timeout=0.1, stdout=subprocess.DEVNULL)


SCRIPT = """
import os, subprocess, sys, threading
import neighbour
print(sys.argv[1:], os.environ["ONE"], os.getcwd(), neighbour.NAME, __name__, flush=True)
if len(sys.argv) > 1:
    there = "import sys; print('child:', 'torch' in sys.modules)"
    with open("child.py", "w") as file:
        file.write(there)
    subprocess.run([sys.executable, "child.py"], check=True, stderr=subprocess.DEVNULL)
    print("to stderr", file=sys.stderr)
    threading.Timer(0.1, lambda: print("its end", file=sys.stderr)).start()
    sys.exit(3)
"""


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


@pytest.mark.parametrize("leads", [False, True])
def test_a_failure_ends_what_was_started(leads: bool) -> None:
    """What failed may be what would have ended it."""
    waits = [sys.executable, "-c", "import signal; signal.pause()"]
    with pytest.raises(ZeroDivisionError), forked.Popen(waits, start_new_session=leads) as process:
        raise ZeroDivisionError
    assert process.returncode == -signal.SIGKILL
