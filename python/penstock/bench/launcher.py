"""One process a host that has imported torch and forks the rank processes: importing it anew takes 3 s of processor time a rank.

The coordinator's side is `Launcher`; ``python -m penstock.bench.launcher`` is the other. Its standard input takes one JSON
object a line, ``{"argv": [...], "env": {...}, "output": PATH}``, and each is answered by ``{"started": PID}``. When a rank
ends, ``{"ended": PID, "code": N}`` follows, N negative for a signal.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from penstock.testbed.cluster import Bed


class BenchError(RuntimeError):
    """The bench cannot go on, or a backend failed it. The message says which rank, its last output, and what to do."""


class Launcher:
    """Starts ranks on one host. Its processes end with the `Bed`, or when `close` is called."""

    def __init__(self, bed: Bed, host: int, errors: Path):
        """Starts the launching process and returns at once; what it says on standard error goes to ``errors``."""
        self._errors = errors
        self._host = host
        # Ranks on shared processors compute with one thread, as under torchrun. A forking process must have no others.
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        argv = [sys.executable, "-m", "penstock.bench.launcher"]
        with open(errors, "wb") as file:
            pipe = subprocess.PIPE
            self._process = bed.popen(host, argv, threads, stdin=pipe, stdout=pipe, stderr=file, bufsize=0)
        self._buffer = b""
        self._codes: dict[int, int] = {}

    def start(self, argv: Sequence[str], env: Mapping[str, str], output: Path) -> int:
        """Starts `worker` with ``argv``; returns its process id. The first call waits until torch is imported.

        Raises BenchError when the launching process has ended.
        """
        order = {"argv": list(argv), "env": dict(env), "output": str(output)}
        try:
            self._process.stdin.write((json.dumps(order) + "\n").encode())  # type: ignore[union-attr]
        except BrokenPipeError:
            pass  # reading says why
        while True:
            message = self._read(START_S)
            if message is None:
                said = "\n  ".join(self._errors.read_text(errors="replace").strip().splitlines()[-15:])
                raise BenchError(
                    f"host {self._host}: the process that starts ranks has ended or hangs; it said:\n  {said}"
                )
            if "started" in message:
                return int(message["started"])

    def exit_code(self, pid: int, timeout_s: float) -> int | None:
        """How a rank ended, as subprocess.Popen.returncode says it; None when it has not, within the time."""
        deadline = time.monotonic() + timeout_s
        while pid not in self._codes and self._read(max(deadline - time.monotonic(), 0)) is not None:
            pass
        return self._codes.get(pid)

    def close(self) -> None:
        """Ends the launching process; ranks that it started stay."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _read(self, timeout_s: float) -> dict[str, Any] | None:
        """The next message, noted if it says that a rank ended; None when there is none in time, or ever."""
        deadline = time.monotonic() + timeout_s
        pipe = self._process.stdout.fileno()  # type: ignore[union-attr]
        while b"\n" not in self._buffer:
            if not select.select([pipe], [], [], max(deadline - time.monotonic(), 0))[0]:
                return None
            data = os.read(pipe, 1 << 16)
            if not data:
                return None
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        if "ended" in message:
            self._codes[message["ended"]] = message["code"]
        return message


def main() -> None:
    """The launching process: runs until its standard input ends."""
    import penstock.bench.collective_rank  # noqa: F401 (for torch, and for all that it imports)

    wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    poll = select.poll()
    poll.register(0, select.POLLIN | select.POLLHUP)
    poll.register(wake, select.POLLIN)
    buffer = b""
    while True:
        for fd, _ in poll.poll():
            if fd == wake:
                os.read(wake, 1 << 16)
                _report_ended()
                continue
            data = os.read(0, 1 << 16)
            if not data:
                return
            buffer += data
            while b"\n" in buffer:
                line, _, buffer = buffer.partition(b"\n")
                _say(started=_fork(**json.loads(line)))


def _fork(argv: list[str], env: dict[str, str], output: str) -> int:
    pid = os.fork()
    if pid == 0:
        _become_rank(argv, env, output)
    return pid


def _become_rank(argv: list[str], env: dict[str, str], output: str) -> NoReturn:
    """In the child: the environment and the output of a process of its own, then `worker`."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (file, 1), (file, 2)):
            os.dup2(source, target)
        os.environ.update(env)
        from penstock.bench import worker

        worker.main(argv)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(1)


def _report_ended() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _say(ended=pid, code=os.waitstatus_to_exitcode(status))


def _say(**message: int) -> None:
    os.write(1, (json.dumps(message) + "\n").encode())


START_S = 120.0
"""A guess: importing torch takes 3 s on an idle machine, and many times that where a slow disk is cold or all are busy."""

if __name__ == "__main__":
    main()
