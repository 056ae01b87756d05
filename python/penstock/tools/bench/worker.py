"""One process of the bench: a rank of one backend, or of a probe that measures a limit.

`launcher` forks it, or mpirun starts ``python -m penstock.tools.bench.worker``. It connects to the coordinator's socket and then
does what it is told, one order at a time. Between orders it sleeps in a read, so that the ranks of other backends have the
machine to themselves. It ends when the coordinator closes the socket; should it hang in its backend, the coordinator kills
it, or, once that is gone, the testbed's keeper does (`penstock.tools.testbed.keeper`).

Orders and answers are JSON, one object a line::

    {"do": "connect", "peers": [...]}       every rank's hello, by rank
    {"do": "prepare", ...Task}              make tensors, run one block as warm-up
    {"do": "measure", "blocks": 3}          run blocks; answers when each began and ended
    {"do": "release"}                       drop the tensors
    {"do": "leave"}                         leave the group; the end of the socket is the end of the process
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import time
import traceback
from typing import Any

from penstock.tools.bench import machine
from penstock.tools.bench.task import Runner, Task, WrongResult


def main(argv: list[str] | None = None) -> None:
    """Runs until the order to leave."""
    parser = argparse.ArgumentParser(prog="python -m penstock.tools.bench.worker")
    parser.add_argument("--control", required=True, help="path of the coordinator's UNIX socket")
    parser.add_argument("--role", required=True, help="torch:BACKEND, shared:penstock, engine:penstock, mpi, ...")
    parser.add_argument("--rank", type=int, help="not for mpi, where mpirun numbers the ranks")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--host", required=True, help="the address that this rank is reached at")
    parser.add_argument("--flows", type=int, default=1, help="sockets: the most connections a pair will use")
    parser.add_argument("--timeout", type=float, required=True, help="seconds that an operation may take")
    arguments = parser.parse_args(argv)
    # Ctrl-C reaches the coordinator, which ends its ranks; a rank that raised at a random place would only add noise.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(socket.AF_UNIX)
    control.connect(arguments.control)

    def answer(**fields: Any) -> None:
        control.sendall((json.dumps(fields) + "\n").encode())

    try:
        runner = _runner(arguments)
        rank = arguments.rank if arguments.rank is not None else runner.rank  # type: ignore[attr-defined]
        answer(rank=rank, pid=os.getpid(), hello=runner.hello())
        for line in control.makefile():
            order = json.loads(line)
            what = order.pop("do")
            if what == "connect":
                runner.connect(order["peers"])
                answer()
            elif what == "prepare":
                runner.prepare(Task(**order))
                answer(**_measure(runner, 1, rank))
            elif what == "measure":
                answer(**_measure(runner, order["blocks"], rank))
            elif what == "release":
                runner.release()
                answer()
            elif what == "leave":
                runner.leave()
                answer()
    except Exception as error:
        traceback.print_exc()
        sys.stderr.flush()
        answer(error=f"{type(error).__name__}: {error}", wrong=isinstance(error, WrongResult))
    sys.stdout.flush()
    # Without the interpreter's shutdown: a backend's threads may still be about after a failure, and nothing is left to do.
    os._exit(0)


def _runner(arguments: argparse.Namespace) -> Runner:
    role, _, backend = arguments.role.partition(":")
    if role == "torch":
        from penstock.tools.bench.collective_rank import TorchRunner

        return TorchRunner(backend, arguments.rank, arguments.ranks, arguments.host, arguments.timeout)
    if role in ("shared", "engine", "cuda"):
        from penstock.tools.bench.collective_rank import CudaRunner, EngineRunner, SharedRunner

        runner = {"shared": SharedRunner, "engine": EngineRunner, "cuda": CudaRunner}[role]
        return runner(backend, arguments.rank, arguments.ranks, arguments.host, arguments.timeout)
    if role == "mpi":
        from penstock.tools.bench.collective_rank import MpiRunner

        return MpiRunner(arguments.ranks)
    from penstock.tools.bench.probe_rank import CopyRunner, SocketRunner

    if role == "sockets":
        return SocketRunner(arguments.rank, arguments.ranks, arguments.host, arguments.flows)
    return CopyRunner(arguments.rank, arguments.ranks, arguments.host)


def _measure(runner: Runner, blocks: int, rank: int) -> dict[str, Any]:
    """Runs blocks. Answers when each began and ended, in nanoseconds of the host's monotonic clock, which is one for all
    ranks, network namespaces included; and on rank 0 the processor time that the whole box spent meanwhile."""
    spans: list[tuple[int, int]] = []
    busy = total = 0
    for _ in range(blocks):
        runner.fill()
        runner.barrier()
        before = machine.processor_ticks() if rank == 0 else (0, 0)
        runner.barrier()
        began = time.perf_counter_ns()
        runner.operate()
        spans.append((began, time.perf_counter_ns()))
        after = machine.processor_ticks() if rank == 0 else (0, 0)
        busy, total = busy + after[0] - before[0], total + after[1] - before[1]
        runner.finish()
    return {"spans": spans, "ticks": (busy, total), "memory": runner.memory()}


if __name__ == "__main__":
    main()
