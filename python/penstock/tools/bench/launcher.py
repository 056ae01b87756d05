"""One process that has imported torch and forks the rank processes: to import torch in each takes seconds of processor time a
rank.

The coordinator's side is `Launcher`; ``python -m penstock.tools.bench.launcher`` is the other. Its standard input takes one JSON
object a line, ``{"argv": [...], "env": {...}, "output": PATH, "network": PATH}``, and each is answered by ``{"started": PID}``.
When a rank ends, ``{"ended": PID, "code": N}`` follows, N negative for a signal.
"""

from __future__ import annotations

import gc
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

from penstock.tools.testbed import namespace
from penstock.tools.testbed.bed import Bed


class BenchError(RuntimeError):
    """The bench cannot go on, or a backend failed it. The message says which rank, its last output, and what to do."""


class Launcher:
    """Starts ranks on the hosts of a bed. They end with the `Bed`."""

    def __init__(self, bed: Bed, errors: Path):
        """Starts the launching process and returns at once; what it says on standard error goes to ``errors``."""
        self._bed = bed
        self._errors = errors
        # Ranks on shared processors compute with one thread, as under torchrun. A forking process must have no others.
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        argv = [sys.executable, "-m", "penstock.tools.bench.launcher"]
        with open(errors, "wb") as file:
            pipe = subprocess.PIPE
            self._process = bed.popen(0, argv, threads, stdin=pipe, stdout=pipe, stderr=file, bufsize=0)
        self._buffer = b""
        self._codes: dict[int, int] = {}

    def start(self, host: int, argv: Sequence[str], env: Mapping[str, str], output: Path) -> int:
        """Starts `worker` with ``argv`` on a host; returns its process id. The first call waits until torch is imported.

        Raises BenchError when the launching process has ended.
        """
        order = {"argv": list(argv), "env": dict(env), "output": str(output), "network": self._bed.network(host)}
        try:
            self._process.stdin.write((json.dumps(order) + "\n").encode())  # type: ignore[union-attr]
        except BrokenPipeError:
            pass  # reading says why
        while True:
            message = self._read(START_S)
            if message is None:
                said = "\n  ".join(self._errors.read_text(errors="replace").strip().splitlines()[-15:])
                raise BenchError(f"the process that starts ranks has ended or hangs; it said:\n  {said}")
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
    # A collection in a rank would write to every object that exists now, and thereby copy their memory: 100 MB a rank.
    gc.disable()
    import penstock.tools.bench.collective_rank
    import penstock.torch.backend  # noqa: F401 (what ranks need, with torch and all that it imports)

    gc.freeze()
    gc.enable()
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


def _fork(argv: list[str], env: dict[str, str], output: str, network: str | None) -> int:
    pid = os.fork()
    if pid == 0:
        _become_rank(argv, env, output, network)
    return pid


def _become_rank(argv: list[str], env: dict[str, str], output: str, network: str | None) -> NoReturn:
    """In the child: the environment, the output and the host of a process of its own, then `worker`."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (file, 1), (file, 2)):
            os.dup2(source, target)
        namespace.join(network)
        os.environ.update(env)
        from penstock.tools.bench import worker

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
