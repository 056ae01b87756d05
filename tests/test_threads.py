"""Several I/O threads (PENSTOCK_IO_THREADS): results, deaths, ends and errors are those of one."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import forked
import penstock
import ranks
from backends import ALL
from penstock.errors import Config as ConfigError
from penstock.runtime import config

TCP = ALL["penstock-tcp"]


def test_the_setting_says_its_range() -> None:
    """1 to 16; another value is an error that quotes it and says what it takes."""
    assert config.read({}).io_threads == 1
    assert [config.read({"PENSTOCK_IO_THREADS": text}).io_threads for text in ("1", "16")] == [1, 16]
    for text in ("0", "17", "-1", "two", "", "1.5", " 2"):
        with pytest.raises(ConfigError, match="must be a number from 1 to 16") as error:
            config.read({"PENSTOCK_IO_THREADS": text})
        assert f"PENSTOCK_IO_THREADS={text!r}" in str(error.value)


def test_streams_within_a_host_follow_the_threads() -> None:
    """One, or four for each of several threads; PENSTOCK_STREAMS wins. Ranks whose numbers differ reduce all the same."""
    for threads, streams in (("1", 1), ("2", 8), ("16", 64)):
        env = {"PENSTOCK_IO_THREADS": threads}
        assert config.streams_within_host(config.read(env), env) == streams
        env["PENSTOCK_STREAMS"] = "3"
        assert config.streams_within_host(config.read(env), env) == 3
    of_rank = {rank: {"PENSTOCK_IO_THREADS": threads} for rank, threads in enumerate("141")}
    ranks.run(_sums, count=3, env=TCP.env, env_of_rank=of_rank)


def _sums() -> None:
    dist.init_process_group("penstock")
    for elements in (1, 1000, 1 << 20):
        tensor = torch.full((elements,), 2.0 ** dist.get_rank())
        dist.all_reduce(tensor)
        assert bool((tensor == 7.0).all())
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["penstock-tcp", "penstock"])
@pytest.mark.parametrize("checksum", ["0", "1"])
def test_ranks_with_other_numbers_of_threads(backend: str, checksum: str) -> None:
    """Ranks with 1, 2, 3 and 4 threads: sums, messages and gathered tensors are right, and every thread reads."""
    env = {**ALL[backend].env, "PENSTOCK_STREAMS": "5", "PENSTOCK_CHECKSUM": checksum}
    found = ranks.run(_everything, count=4, env=env)
    assert [len(threads) for threads in found] == [1, 2, 3, 4]
    if backend == "penstock-tcp":
        assert all(min(thread["read_bytes"] for thread in threads) > 0 for threads in found), found


@pytest.mark.parametrize("threads", ["2", "4"])
@pytest.mark.parametrize("backend", ["penstock-tcp", "penstock"])
def test_a_rank_is_killed_during_transfers(backend: str, threads: str) -> None:
    """The others fail at once, name it, have their tensors back untouched from then on, and end."""
    env = {**ALL[backend].env, "PENSTOCK_STREAMS": "4", "PENSTOCK_IO_THREADS": threads}
    with ranks.Ranks(_all_reduce_until_it_fails, count=3, env=env) as job:
        job.await_note("running", deadline_s=60)
        killed_s = job.signal(1, signal.SIGKILL)
        survivors = job.outcomes(of=[0, 2], timeout_s=30, grace_s=None)
    for survivor in survivors:
        assert survivor.raised is None, str(survivor)
        assert "rank 1" in survivor.value and survivor.ended_s - killed_s < 10, survivor.value


def test_a_thread_that_cannot_start(tmp_path: Path) -> None:
    """The error says which of them, and what to do; nothing of it is left."""
    script = tmp_path / "script.py"
    script.write_text(_STARTS_NONE)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PENSTOCK_IO_THREADS": "8"}
    env["RUST_MIN_STACK"] = str(1 << 46)  # more than there are addresses: no thread of the engine starts
    done = forked.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cannot start I/O thread 2 of 8:" in done.stdout, done.stdout
    assert "lower PENSTOCK_IO_THREADS" in done.stdout and "left: []" in done.stdout, done.stdout


def _everything() -> list[dict[str, float]]:
    os.environ["PENSTOCK_IO_THREADS"] = str(int(os.environ["RANK"]) + 1)
    dist.init_process_group("penstock")
    rank, world = dist.get_rank(), dist.get_world_size()
    for elements in (1, 1000, 300_000, 4_000_000):
        tensor = torch.arange(elements, dtype=torch.float32) % 1024 + rank
        works = [dist.all_reduce(tensor.clone(), async_op=True) for _ in range(2)]
        dist.all_reduce(tensor)
        for work in works:
            work.wait()
        expected = world * (torch.arange(elements, dtype=torch.float32) % 1024) + sum(range(world))
        assert torch.equal(tensor, expected), f"{elements} elements: a wrong sum"
        gathered = [torch.empty(elements) for _ in range(world)]
        dist.all_gather(gathered, torch.full((elements,), float(rank)))
        assert [float(one.sum()) / elements for one in gathered] == [float(other) for other in range(world)]
        right, left = (rank + 1) % world, (rank - 1) % world
        sent = dist.isend(torch.full((elements,), float(rank)), right)
        received = torch.empty(elements)
        dist.recv(received, left)
        sent.wait()
        assert torch.equal(received, torch.full((elements,), float(left)))
    dist.barrier()
    threads = penstock.stats()["threads"]
    dist.destroy_process_group()
    return threads


def _all_reduce_until_it_fails() -> str:
    dist.init_process_group("penstock")
    tensor = torch.zeros(8_000_000)
    dist.all_reduce(tensor)
    ranks.note("running")
    try:
        while True:
            dist.all_reduce(tensor)
    except Exception as error:
        # The tensor is this rank's again: nothing of what was under way may land in it any more.
        tensor.fill_(7.0)
        said = str(error)
    dist.destroy_process_group()
    assert bool((tensor == 7.0).all()), "something landed after the failure"
    return said


_STARTS_NONE = """
import os, time
import torch, torch.distributed as dist, penstock.torch

def threads():
    return [open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")]

store = dist.HashStore()
os.environ.update(RANK="0", WORLD_SIZE="1")
torch.set_num_threads(1)
try:
    dist.init_process_group("penstock", store=store, rank=0, world_size=1)
    print("started")
except Exception as error:
    print(error)
deadline = time.monotonic() + 20
while time.monotonic() < deadline and (left := [name for name in threads() if name.startswith("penstock")]):
    time.sleep(0.05)
print("left:", left)
"""
