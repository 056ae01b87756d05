"""Proves what the fronts for JAX and TensorFlow share and that needs neither of them."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta

import numpy as np
import pytest
import torch.distributed as dist

import ranks
from penstock.fronts import arrays


def test_again_and_again() -> None:
    """init() works after shutdown(), on any rank first, also where rank 0 serves the store, as without torchrun."""
    port = str(_free_port())
    env = {"TORCHELASTIC_USE_AGENT_STORE": None, "MASTER_PORT": port}
    assert ranks.run(_again_and_again, count=3, env=env) == [[6.0] * 6] * 3


def _again_and_again() -> list[float]:
    rank = int(os.environ["RANK"])
    sums = []
    for turn in range(6):
        job = arrays.init(timeout_s=20)
        sums.append(float(job.all_reduce([np.full(3, rank + 1.0)], op="sum")[0][0]))
        del job
        if rank == turn % 3:
            time.sleep(0.2)  # the others are back before it leaves
        arrays.shutdown()
        if rank == (turn + 1) % 3:
            time.sleep(0.2)
    return sums


def test_a_new_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the store is gone that a process has met the others at, it finds the one that is served there now."""
    served = _store()
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(served.port)}
    for name, value in {**place, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(arrays, "_found", None)
    first, rank, world = arrays._found_store(timedelta(seconds=20))
    first.set("of the first", "")
    assert (rank, world) == (0, 1) and arrays._found_store(timedelta(seconds=20))[0] is first
    port = served.port
    del served
    served_again = _store(port)
    second = arrays._found_store(timedelta(seconds=20))[0]
    assert served_again.port == port and second is not first and not second.check(["of the first"])


def _store(port: int = 0) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
