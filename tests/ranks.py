"""Launch N rank processes, run one function on all of them, and say exactly what each of them did.

A rank is a fresh process with the environment that ``torchrun`` would give it (RANK, WORLD_SIZE, MASTER_ADDR, an agent's
store), so the function calls ``init_process_group`` as any program does. Fresh processes keep cases apart: no state of one
can help or spoil the next. They are affordable because they are forked from a server that has imported torch once
(``multiprocessing``'s "forkserver"): a launch costs about as much as ``init_process_group`` itself.

    values = ranks.run(program, count=2, args=("penstock",))       # raises RanksFailed with every rank's traceback and output

    with ranks.Ranks(program, count=3) as job:                     # for faults: signals, notes, one outcome a rank
        job.await_note("running", deadline_s=20)
        job.signal(1, signal.SIGKILL)
        survivors = job.outcomes(timeout_s=10)

Nothing outlives a job: every rank leads its own session, which is killed as a whole on exit, and ranks die with the fork
server, which dies with the test process. A rank that overruns its time prints the stack of all its threads first.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import faulthandler
import functools
import gc
import io
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import runpy
import signal
import sys
import tempfile
import time
import traceback
import unittest.mock
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from penstock.tools.testbed import namespace

if TYPE_CHECKING:
    from penstock.tools.testbed import Testbed


@dataclasses.dataclass(frozen=True)
class Raised:
    """What a rank raised. The exception itself stays in the rank, because it need not be picklable."""

    kinds: tuple[str, ...]  # qualified names of the exception's class and its bases, nearest first
    text: str
    traceback: str

    def is_a(self, name: str) -> bool:
        """Whether the class or one of its bases is called `name`, with or without its module."""
        return any(kind == name or kind.endswith("." + name) for kind in self.kinds)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How one rank ended."""

    rank: int
    value: Any  # what the function returned; None if it did not return
    raised: Raised | None
    exit_code: int | None  # None: it had to be killed because time ran out; negative: killed by that signal
    ended_s: (
        float  # time.monotonic() in the rank when the function returned or raised, or here when the rank was seen dead
    )
    output: str  # stdout and stderr

    @property
    def ok(self) -> bool:
        return self.raised is None and self.exit_code == 0

    def __str__(self) -> str:
        if self.exit_code is None and self.raised is None:
            how = "did not end in time; the stacks of its threads are in its output"
        elif self.raised is not None:
            how = f"raised {self.raised.kinds[0]}: {self.raised.text}\n{self.raised.traceback}"
        elif self.exit_code != 0:
            how = f"died with exit code {self.exit_code}"
        else:
            how = f"returned {self.value!r}"
        return f"--- rank {self.rank} {how}\n--- output of rank {self.rank}:\n{_tail(self.output)}"


class RanksFailed(AssertionError):
    """At least one rank did not return, or died after it had returned. The text holds every rank's story."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        super().__init__("\n" + "\n".join(str(outcome) for outcome in outcomes))
        self.outcomes = outcomes


def run(
    function: Callable[..., Any], *, count: int, timeout_s: float = 60, grace_s: float = 10, **launch: Any
) -> list[Any]:
    """Run `function` on `count` ranks and return what each returned; `launch` goes to `Ranks`."""
    with Ranks(function, count=count, **launch) as job:
        outcomes = job.outcomes(timeout_s=timeout_s, grace_s=grace_s)
    if not all(outcome.ok for outcome in outcomes):
        raise RanksFailed(outcomes)
    return [outcome.value for outcome in outcomes]


class Ranks:
    """A job of `count` rank processes, each of which calls ``function(*args)``.

    Args:
        function: importable by name in the ranks; its value must be picklable.
        env: environment variables for all ranks; a value of None unsets one.
        env_of_rank: the same, for one rank alone, by rank.
        bed: emulated hosts, on which the ranks run in turn; the store is on the first rank's.
        placement: the host of each rank, where not in turn.
        store_host: the store's, where it is not the first rank's.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        count: int,
        args: tuple[Any, ...] = (),
        env: Mapping[str, str | None] | None = None,
        env_of_rank: Mapping[int, Mapping[str, str | None]] | None = None,
        bed: Testbed | None = None,
        placement: Sequence[int] | None = None,
        store_host: int | None = None,
    ) -> None:
        context = fork_server()
        hosts = [rank % bed.hosts for rank in range(count)] if bed and placement is None else placement
        # The store lives here, as torchrun's lives in its agent: no race for a port, and it survives any rank.
        if bed is None or hosts is None:
            address, surroundings = "127.0.0.1", {}
            self.store = _store(address)
        else:
            kept = hosts[0] if store_host is None else store_host
            address, surroundings = bed.address(kept), bed.environment()
            self.store = bed.inside(kept, lambda: _store(address))
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._connections: list[multiprocessing.connection.Connection] = []
        self._processes: list[Any] = []
        self._notes: list[dict[str, Any]] = [{} for _ in range(count)]
        self._ended: list[tuple[float, Any, Raised | None] | None] = [None] * count
        for rank in range(count):
            ours, theirs = context.Pipe()
            environment = {
                **_torchrun_environment(rank, count, address, self.store.port),
                **surroundings,
                **(env or {}),
                **((env_of_rank or {}).get(rank, {})),
            }
            network = bed.network(hosts[rank]) if bed and hosts else None
            process = context.Process(
                target=_rank_main,
                args=(theirs, function, args, environment, str(self._log(rank)), network),
                name=f"rank{rank}",
            )
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            _kill_session(process.pid)
            process.join()
        for connection in self._connections:
            connection.close()
        self._folder.cleanup()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def signal(self, rank: int, number: signal.Signals) -> float:
        """Send a signal to one rank (not to its children); returns the time.monotonic() at which that happened."""
        os.kill(self._processes[rank].pid, number)
        return time.monotonic()

    def await_note(self, text: str, *, deadline_s: float, of: Sequence[int] | None = None) -> list[Any]:
        """Block until every rank in `of` (default: all) has called ``note(text, value)``; returns the values by rank."""
        of = range(len(self._processes)) if of is None else of
        deadline = time.monotonic() + deadline_s
        while not all(text in self._notes[rank] for rank in of):
            ended = [rank for rank in of if text not in self._notes[rank] and self._ended[rank] is not None]
            if ended or time.monotonic() > deadline:
                self._dump_stacks()
                raise RanksFailed([self._outcome(rank) for rank in range(len(self._processes))])
            self._listen(deadline)
        return [self._notes[rank][text] for rank in of]

    def notes_or_ends(self, rank: int, text: str, *, deadline_s: float) -> bool:
        """Block until the rank has called ``note(text)`` (True) or has ended (False)."""
        deadline = time.monotonic() + deadline_s
        while text not in self._notes[rank] and self._ended[rank] is None:
            if time.monotonic() > deadline:
                self._dump_stacks()
                raise RanksFailed([self._outcome(rank) for rank in range(len(self._processes))])
            self._listen(deadline)
        return text in self._notes[rank]

    def children(self) -> list[str]:
        """What ranks have started and left running, as far as it has not begun a session of its own."""
        found = []
        for folder in pathlib.Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if folder.name.isdigit() and int(folder.name) not in self.pids:
                    name, _, fields = (folder / "stat").read_text().partition("(")[2].rpartition(")")
                    if int(fields.split()[3]) in self.pids:
                        found.append(f"process {folder.name} ({name})")
        return found

    def outcomes(
        self, *, timeout_s: float, of: Sequence[int] | None = None, grace_s: float | None = 10
    ) -> list[Outcome]:
        """Block until the ranks in `of` (default: all) have ended and return how.

        What is still running after `timeout_s`, or `grace_s` after another rank failed (the others then often wait for ever),
        prints its stacks and is killed.
        """
        of = list(range(len(self._processes)) if of is None else of)
        deadline = time.monotonic() + timeout_s
        failed = False
        while any(self._ended[rank] is None for rank in of):
            if (
                not failed
                and grace_s is not None
                and any(end and (end[2] or self._died(rank)) for rank, end in self._ends(of))
            ):
                failed, deadline = True, min(deadline, time.monotonic() + grace_s)
            if time.monotonic() > deadline:
                self._dump_stacks()
                break
            self._listen(deadline)
        for rank in of:
            if self._ended[rank] is not None:
                self._processes[rank].join(max(1.0, deadline - time.monotonic()))
        return [self._outcome(rank) for rank in of]

    def still_running(self, *, for_s: float) -> None:
        """Assert that no rank ends in the next `for_s` seconds."""
        deadline = time.monotonic() + for_s
        while time.monotonic() < deadline:
            self._listen(deadline)
            if any(end is not None for end in self._ended):
                raise RanksFailed([self._outcome(rank) for rank in range(len(self._processes))])

    def close_store(self) -> None:
        """End the job's store, as the death of the node that hosts it would."""
        del self.store

    def output(self, rank: int) -> str:
        return self._log(rank).read_text(errors="replace") if self._log(rank).exists() else ""

    def _ends(self, of: Sequence[int]) -> list[tuple[int, Any]]:
        return [(rank, self._ended[rank]) for rank in of]

    def _died(self, rank: int) -> bool:
        return self._processes[rank].exitcode not in (None, 0)

    def _listen(self, deadline: float) -> None:
        """Take in what ranks have to say: notes, results, and the end of their pipe."""
        running = [rank for rank, end in enumerate(self._ended) if end is None]
        # The sentinel as well as the pipe: children of a dead rank may hold its end of the pipe open.
        watched = [self._connections[rank] for rank in running] + [self._processes[rank].sentinel for rank in running]
        multiprocessing.connection.wait(watched, max(0.0, min(deadline - time.monotonic(), 1.0)))
        for rank in running:
            dead = not self._processes[rank].is_alive()
            try:
                while self._ended[rank] is None and self._connections[rank].poll():
                    kind, *content = self._connections[rank].recv()
                    if kind == "note":
                        self._notes[rank][content[0]] = content[1]
                    else:
                        self._ended[rank] = tuple(content)
            except (EOFError, ConnectionResetError):
                self._processes[rank].join(5)
                dead = True
            if dead and self._ended[rank] is None:
                self._ended[rank] = (time.monotonic(), None, None)

    def _outcome(self, rank: int) -> Outcome:
        ended_s, value, raised = self._ended[rank] or (time.monotonic(), None, None)
        # One that ends after its time, while stacks are written, was late as well.
        exit_code = self._processes[rank].exitcode if self._ended[rank] is not None else None
        return Outcome(rank, value, raised, exit_code, ended_s, self.output(rank))

    def _dump_stacks(self) -> None:
        """Make every running rank write the stacks of its threads into its output, and wait until they are there."""
        for rank, process in enumerate(self._processes):
            if self._ended[rank] is not None or process.exitcode is not None:
                continue
            before = len(self.output(rank))
            os.kill(process.pid, signal.SIGUSR1)
            deadline = time.monotonic() + 2
            while len(self.output(rank)) == before and time.monotonic() < deadline and process.exitcode is None:
                process.join(0.05)

    def _log(self, rank: int) -> pathlib.Path:
        return pathlib.Path(self._folder.name) / f"rank{rank}.log"


# ---------------------------------------------------------------------------------------------------------------------
# In a rank.


def note(text: str, value: Any = None) -> None:
    """Tell the test process that this rank has come to the point named `text`."""
    assert _to_parent is not None, "note() is for functions that run on a rank"
    _to_parent.send(("note", text, value))


def has_ipv6() -> bool:
    """Whether this machine's loopback has ::1."""
    table = pathlib.Path("/proc/net/if_inet6")
    return table.exists() and "0" * 31 + "1 " in table.read_text()


def losses_of_example(path: str) -> tuple[float, float] | None:
    """Run an example script in this process as ``torchrun`` would: on rank 0 alone, and then on all ranks.

    Returns, on rank 0: the last loss that each run printed.
    """

    def printed() -> str:
        text = io.StringIO()
        with contextlib.redirect_stdout(text), unittest.mock.patch.object(sys, "argv", [path]):
            runpy.run_path(path, run_name="__main__")
        return text.getvalue().rpartition("loss")[2]

    if os.environ["RANK"] != "0":
        printed()
        return None
    with unittest.mock.patch.dict(os.environ):
        del os.environ["RANK"], os.environ["WORLD_SIZE"]
        alone = float(printed())
    return alone, float(printed())


def _rank_main(
    connection: multiprocessing.connection.Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    environment: Mapping[str, str | None],
    log: str,
    network: str | None,
) -> None:
    global _to_parent
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    namespace.join(network)
    log_fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    sys.stdout.reconfigure(line_buffering=True)
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    faulthandler.enable(all_threads=True)
    faulthandler.register(signal.SIGUSR1, all_threads=True)

    import torch
    import torch.distributed as dist

    atexit._clear()  # what the fork server registered is its own
    torch.set_num_threads(1)
    dist.set_debug_level_from_env()  # read at import in an ordinary program, but here the import was the fork server's
    _to_parent = connection
    try:
        value = function(*args)
    except BaseException as error:
        kinds = tuple(f"{cls.__module__}.{cls.__qualname__}" for cls in type(error).__mro__)
        connection.send(("ended", time.monotonic(), None, Raised(kinds, str(error), traceback.format_exc())))
    else:
        connection.send(("ended", time.monotonic(), value, None))
    # multiprocessing leaves this out, but a rank is to end as a script does.
    atexit._run_exitfuncs()


_to_parent: multiprocessing.connection.Connection | None = None


# ---------------------------------------------------------------------------------------------------------------------
# Helpers and constants.


def _store(address: str) -> Any:
    from torch.distributed import TCPStore

    return TCPStore(address, 0, None, True, wait_for_workers=False)


def _torchrun_environment(rank: int, count: int, store_address: str, store_port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": store_address,
        "MASTER_PORT": str(store_port),
        "TORCHELASTIC_RUN_ID": "tests",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


@functools.cache
def fork_server() -> Any:
    """The context of processes that are forked from a server; waits until that has imported everything slow that cases need, so
    that no case's time is charged for it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fork_server"])
    # The server does not take sys.path from here. fork_server.py sets the variable back.
    path = [str(pathlib.Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    with unittest.mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(path), FORK_SERVER_ROOM=_ROOM):
        first = context.Process(target=_check_fork_server)
        first.start()
    first.join()
    assert first.exitcode == 0, f"the fork server's first child ended with {first.exitcode}"
    return context


def _check_fork_server() -> None:
    assert "fork_server" in sys.modules and gc.get_freeze_count() > 0


def _kill_session(leader: int | None) -> None:
    if leader is not None:
        for kill in (os.killpg, os.kill):  # the group may not exist yet, if the rank never reached setsid
            try:
                kill(leader, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass


def _tail(text: str, lines: int = 120) -> str:
    kept = text.splitlines()[-lines:]
    return "\n".join("    " + line for line in kept) if kept else "    (nothing)"


PR_SET_PDEATHSIG = 1  # <sys/prctl.h>

# For the environment of any fork (`fork_server.show_environment`). A variable has at most 128 KiB.
_ROOM = 100_000 * "."
