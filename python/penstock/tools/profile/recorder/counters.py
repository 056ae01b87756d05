"""Starts the process that reads the counters of this host (``python -m penstock.profiling.sampler``), one for all its ranks."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

from penstock.tools.profile.recorder.identity import Identity, make_room
from penstock.tools.profile.run import PERIOD_MS, SHARED

__all__ = ["Counters"]

_PATIENCE_S = 5.0
"""For the other ranks of the host, where the launcher does not say how many there are, or one of them never trains."""


class Counters:
    """Each rank leaves ``pid-N-HOST`` among the marks (`run.SHARED`). The one that makes ``sampler-HOST`` there starts the
    process, in the ranks' network, when all of the host's are there."""

    def __init__(self, folder: Path, identity: Identity, period_ms: str = str(PERIOD_MS)) -> None:
        self._folder = folder
        self._marks = folder / SHARED
        self._identity = identity
        self._period_ms = period_ms
        self._since_s: float | None = None
        self._is_done = False

    def announce(self) -> None:
        """This process is one of the host's ranks."""
        if self._since_s is None:
            self._since_s = time.monotonic()
            with contextlib.suppress(OSError):
                self._marks.mkdir(exist_ok=True)
                (self._marks / f"pid-{os.getpid()}-{self._identity.host}").touch()

    def look(self) -> None:
        """Start it if it is time. Called again and again, on the writer's thread."""
        if self._is_done:
            return
        self.announce()
        assert self._since_s is not None
        pids = self._pids()
        if len(pids) < self._identity.here and time.monotonic() - self._since_s < _PATIENCE_S:
            return
        self._is_done = True
        if self._is_first():
            self._start(pids)

    def _pids(self) -> list[int]:
        found = []
        for path in self._marks.glob(f"pid-*-{self._identity.host}"):
            pid = path.name.split("-")[1]
            if pid.isdigit() and os.path.exists(f"/proc/{pid}"):
                found.append(int(pid))
        return sorted(found)

    def _is_first(self) -> bool:
        """Of the ranks of this host, in this life of the job: what ranks of another life started has ended with them."""
        path = self._marks / f"sampler-{self._identity.host}"
        for _ in range(2):
            try:
                with open(path, "x", encoding="utf-8") as file:
                    file.write(str(os.getpid()))
                return True
            except FileExistsError:
                with contextlib.suppress(OSError, ValueError):
                    if os.path.exists(f"/proc/{int(path.read_text().split()[0])}"):
                        return False
                    path.unlink()
            except OSError:
                return False
        return False

    def _start(self, pids: list[int]) -> None:
        out = make_room(self._folder / f"host-{self._identity.host}.jsonl")
        options = ["--pids", ",".join(map(str, pids)), "--out", str(out), "--period-ms", self._period_ms, "--detach"]
        env = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_PROFILE")}
        log = self._marks / f"sampler-{self._identity.host}.log"
        with open(log, "wb") as errors:
            # A session of its own: a Ctrl-C is for the script. It ends by itself with the ranks.
            # No child of the script either, which may wait for all of its children.
            with subprocess.Popen(
                [sys.executable, "-m", "penstock.profiling.sampler", *options],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=env,
                start_new_session=True,
            ) as process:
                said, _ = process.communicate()
        with open(self._marks / f"sampler-{self._identity.host}", "a", encoding="utf-8") as file:
            file.write(f" {said.decode().strip()}")
