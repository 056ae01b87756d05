"""Servers and aggregators for tests: real processes on loopback, forked (`forked`), killed when the test is over."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
import urllib.request
from typing import Any

import forked

# A binary to test instead of the verbs `penstock aggregator` and `penstock server`, which run the same code.
COMMAND = [os.environ["AGGREGATOR_BINARY"]] if "AGGREGATOR_BINARY" in os.environ else [sys.executable, "-m", "penstock"]


class Daemon:
    """One of them, at an address of its own; ready when the constructor returns.

    Args:
        role: "server" or "aggregator".
        *options: as on the command line.
        host: an address of this machine; the port is any free one.
        env: environment variables.
    """

    def __init__(self, role: str, *options: str, host: str = "127.0.0.1", env: dict[str, str] | None = None) -> None:
        self.role, self.options, self.env = role, options, env or {}
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 -- closed in `close`
        self._process: subprocess.Popen[str] | None = None
        for attempts_left in (2, 1, 0):
            self.address = f"[{host}]:{_free_port(host)}" if ":" in host else f"{host}:{_free_port(host)}"
            try:
                self.start()
                break
            except AssertionError:
                # Another test's process may have taken the port, which was free.
                if "is taken" not in self.log() or not attempts_left:
                    raise

    def start(self) -> None:
        """Start it, or start it again."""
        self._process = forked.Popen(
            [*COMMAND, self.role, "--listen", self.address, *self.options],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **self.env},
        )
        until = time.monotonic() + 30
        while True:
            with contextlib.suppress(OSError):
                self.get("/")
                return
            if self._process.poll() is not None or time.monotonic() > until:
                raise AssertionError(f"{self.role} {self.address} did not start:\n{self.log()}")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=0.02)

    def kill(self) -> None:
        """kill -9."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def get(self, path: str) -> Any:
        """What it says over HTTP."""
        with urllib.request.urlopen(f"http://{self.address}{path}", timeout=5) as answer:
            return json.loads(answer.read())

    def log(self) -> str:
        """What it has printed."""
        self._log.flush()
        return pathlib.Path(f"/proc/self/fd/{self._log.fileno()}").read_text()

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()
        self._log.close()

    def __enter__(self) -> Daemon:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        if kind is not None:
            print(f"--- {self.role} {self.address}:\n{self.log()}")
        self.close()


def _free_port(host: str) -> int:
    """A port that is free for TCP and UDP."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    while True:
        with (
            socket.create_server((host, 0), family=family) as tcp,
            socket.socket(family, socket.SOCK_DGRAM) as udp,
        ):
            port = tcp.getsockname()[1]
            with contextlib.suppress(OSError):
                udp.bind((host, port))
                return int(port)
