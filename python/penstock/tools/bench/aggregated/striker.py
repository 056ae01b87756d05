"""Faults that a rank of the bench causes: it kills an aggregator in the middle of an operation, and has it restarted."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.tools.bench.aggregated.rank import counted


class Striker:
    """Kills an aggregator (SIGKILL) once this host's interface has sent so many more bytes than now, and something is under way.

    A thread, so that what it interrupts is whatever the rank is doing then.

    Args:
        state: the file that `cluster.Cluster.run` names.
        under_way: says what the rank is doing: ``{"step": ..., "in_flight": N}``. Called on the thread.
    """

    def __init__(
        self, state: str, node: str, interface: str, bytes_more: int, under_way: Callable[[], dict[str, int]]
    ) -> None:
        self.struck = threading.Event()
        self._told: dict[str, int] = {}
        pid = json.loads(Path(state).read_text())["pids"][node]
        until = counted(interface)[0] + bytes_more

        def watch() -> None:
            while counted(interface)[0] < until or not under_way()["in_flight"]:
                time.sleep(0.0005)
            os.kill(pid, signal.SIGKILL)
            # What has not ended yet was under way then.
            self._told = under_way()
            self.struck.set()

        threading.Thread(target=watch, daemon=True).start()

    def told(self) -> dict[str, int]:
        """What was under way just after the kill; empty before."""
        return self._told


def order(state: str, **what: Any) -> Callable[[], None]:
    """Give an order to the process that runs this rank (`cluster.Cluster.run`). Returns a function that waits until it is
    done."""
    path = Path(state)
    before = json.loads(path.read_text())["done"]
    print(json.dumps(what), flush=True)

    def wait() -> None:
        until = time.monotonic() + DONE_WITHIN_S
        while json.loads(path.read_text())["done"] == before:
            if time.monotonic() > until:
                raise SystemExit(f"{what} was not done within {DONE_WITHIN_S:g} s")
            time.sleep(0.005)

    return wait


DONE_WITHIN_S = 60.0
"""A daemon starts within seconds, on a busy machine too."""
