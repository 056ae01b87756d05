"""Runs a command with the recorder in its processes, and tells why that left no records."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path

from penstock.errors import Config
from penstock.profiling.record import Record

__all__ = ["SAYS", "complaints", "environment", "fresh_folder", "machine", "not_made", "run", "started"]

CHANGE = "PENSTOCK_PROFILE_CHANGE"
"""A JSON object for `recorder/changes.py`: ``backend``, ``bucket_cap_mb``, ``comm_hook``. Penstock has variables of its own."""
MARKS = "PENSTOCK_PROFILE_MARKS"
"""The folder in which the processes of this command leave word for it: how far they came, what was wrong, what was changed."""
SHARED = ".penstock-profile"
"""Below the folder of the records: marks of commands, each in a folder of its own, and of the counters, one a host
(`recorder/counters.py`)."""
PERIOD = "PENSTOCK_PROFILE_PERIOD_MS"
"""For `recorder/counters.py`: how often the counters of a host are read."""
PERIOD_MS = 100
SITE = Path(__file__).with_name("recorder") / "site"

_OF_TERMINALS = {signal.SIGINT, signal.SIGQUIT}
_HANDED_ON = {*_OF_TERMINALS, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
_PATIENCE_S = 1.0
"""For a script to end by an interrupt that its whole group got."""

_LOOK_S = 0.2
"""In which a signal that another thread has taken is handed on."""

SAYS = "penstock profile: "
"""Before what the command says that is not its answer, on standard error: complaints above all."""


def fresh_folder(given: Path | None) -> Path:
    """The folder of this profile, empty and writable.

    Raises:
        Config: it cannot be made or written to, or holds a profile.
    """
    folder = Path.cwd() if given is None else given.absolute()
    if given is not None and any(folder.glob("rank-*.jsonl")):
        raise Config(f"{folder} holds a profile already: choose another folder with --output, or remove it")
    try:
        if given is None:
            folder = _numbered(folder)
        else:  # which commands of several hosts may share
            folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f"{SHARED}-{_name()}"
        probe.touch()
        probe.unlink(missing_ok=True)
    except OSError as error:
        raise Config(
            f"cannot write to {folder}: {error.strerror}. Choose a folder with --output that all ranks can write to"
        ) from error
    return folder


def _numbered(within: Path) -> Path:
    """The first that is not there yet; another command may look for one at the same time."""
    for number in itertools.count(1):
        folder = within / f"penstock-profile-{number}"
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise AssertionError("numbers do not end")


def _name() -> str:
    """Of this process, among those of all hosts."""
    return f"{machine()}-{os.getpid()}"


def machine() -> str:
    """What names of its hosts begin with (`recorder.identity.host`)."""
    return re.sub(r"[^A-Za-z0-9.-]", "-", os.uname().nodename)[:40]


def _marks(folder: Path) -> Path:
    """Of this command, in the folder of the records."""
    return folder / SHARED / _name()


def started(arguments: Sequence[str]) -> list[str]:
    """The command: a script alone is run with this interpreter.

    Raises:
        Config: there is no such script or command.
    """
    first = Path(arguments[0])
    if first.suffix == ".py" and first.is_file():
        return [sys.executable, *arguments]
    if shutil.which(arguments[0]) is None:
        if first.suffix == ".py":
            raise Config(f"there is no script {first}")
        raise Config(
            f"there is no command {arguments[0]}: name a script (train.py) or a command (-- torchrun ... train.py)"
        )
    return list(arguments)


def run(
    command: Sequence[str],
    folder: Path,
    settings: Mapping[str, str | float] | None = None,
    *,
    stdout: int | None = None,
    period_ms: int = PERIOD_MS,
) -> int:
    """Run it to its end. Returns its exit code, as a shell says it.

    Args:
        settings: of `predict.Prediction`: variables of Penstock, and changes that the recorder makes.
        stdout: of the command, as for `subprocess.Popen`.
        period_ms: of the counters; 10 or more.

    Raises:
        Config: it is nothing that can be run.
    """
    # A signal that is ignored, as under nohup, stays so here and in the command.
    numbers = {number for number in _HANDED_ON if signal.getsignal(number) != signal.SIG_IGN}
    # Those that come while the child starts; later, those that another thread of this process takes.
    taken: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    before = {number: signal.signal(number, lambda number, _: taken.put(number)) for number in numbers}
    # Who ignores that children end is told no exit code of theirs.
    before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with contextlib.suppress(OSError):  # then there are no marks
        _marks(folder).mkdir(parents=True, exist_ok=True)
    try:
        with subprocess.Popen(command, env=environment(folder, settings, period_ms), stdout=stdout) as child:
            with _handing_on(child, numbers, taken):
                code = _ended(child)
    except OSError as error:
        _clear(folder)
        raise Config(
            f"cannot run {command[0]}: {error.strerror}. Name what runs it, too, such as sh or python"
        ) from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
    _await_counters(folder)
    return code if code >= 0 else 128 - code


def environment(
    folder: Path, settings: Mapping[str, str | float] | None = None, period_ms: int = PERIOD_MS
) -> dict[str, str]:
    """In which Python has the recorder, as for `run`."""
    env = {**os.environ, "PENSTOCK_PROFILE": str(folder), MARKS: str(_marks(folder)), PERIOD: str(period_ms)}
    env.pop(CHANGE, None)
    if settings:
        env |= {name: str(value) for name, value in settings.items() if name.isupper()}
        env[CHANGE] = json.dumps({name: value for name, value in settings.items() if not name.isupper()})
    env["PYTHONPATH"] = os.pathsep.join([str(SITE), *filter(None, [env.get("PYTHONPATH")])])
    env.pop("PENSTOCK_PROFILED", None)
    # Kineto tells on stderr of each start and stop.
    env.setdefault("KINETO_LOG_LEVEL", "99")
    return env


def _ended(child: subprocess.Popen[bytes]) -> int:
    """Its exit code, once it has ended. Handlers of signals run meanwhile: `Popen.wait` is not interrupted by a signal that
    another thread takes."""
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(_LOOK_S)


@contextlib.contextmanager
def _handing_on(
    child: subprocess.Popen[bytes], numbers: Set[int], taken: queue.SimpleQueue[int | None]
) -> Iterator[None]:
    """Send signals on to the child, but for those of a terminal, which reach it anyway.

    Args:
        taken: those that a handler got: while the child started, or in a thread that does not block signals, as numpy's.

    *Why threads?* A handler in Python is not told who sent a signal; what waits for signals is. So an interrupt of a terminal
    that another thread takes is handed on, too, if the child has not ended within `_PATIENCE_S`.
    """
    watched, has_ended = {*numbers, signal.SIGCHLD}, threading.Event()

    def hand_on(number: int) -> None:
        # Who interrupts a process may interrupt its whole group, and a second one would end the script's clean-up.
        if number not in _OF_TERMINALS or not has_ended.wait(_PATIENCE_S):
            child.send_signal(number)

    def hand_on_taken() -> None:
        while (number := taken.get()) is not None:
            hand_on(number)

    def watch() -> None:
        while True:
            info = signal.sigwaitinfo(watched)
            is_of_kernel = info.si_code > 0
            if info.si_signo != signal.SIGCHLD and not is_of_kernel:
                hand_on(info.si_signo)
            elif info.si_signo == signal.SIGCHLD and not is_of_kernel:  # ours, below
                return

    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    thread = threading.Thread(target=watch, name="penstock-signals", daemon=True)
    thread.start()
    other = threading.Thread(target=hand_on_taken, name="penstock-taken", daemon=True)
    other.start()
    try:
        yield
    finally:
        has_ended.set()
        assert thread.ident is not None, "it was started"
        signal.pthread_kill(thread.ident, signal.SIGCHLD)
        thread.join()
        taken.put(None)
        other.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _await_counters(folder: Path) -> None:
    """The processes that read counters end with the ranks; what they write last is to be there."""
    until_s = time.monotonic() + 2
    for path in (folder / SHARED).glob("sampler-*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            pid = int(path.read_text().split()[1])
            while _runs_here(pid) and time.monotonic() < until_s:
                time.sleep(0.02)


def _runs_here(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"penstock.profiling.sampler" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def not_made(folder: Path, settings: Mapping[str, str | float]) -> list[str]:
    """The changes that no process of the command had a place for. To be asked before `complaints`."""
    return [name for name in settings if not name.isupper() and not (_marks(folder) / f"made-{name}").exists()]


def complaints(folder: Path, records: Sequence[Record]) -> list[str]:
    """What only the marks tell that the recorder has left for this: where it could not start, and why nothing was recorded. Takes
    them away. What is missing in records, `penstock.profiling.complaints` says."""
    own, shared = _marks(folder), folder / SHARED
    said = [path.read_text(errors="replace") for path in sorted(own.glob("problem-*"))]
    said = [f"the recorder could not start in a process: {text}" for text in said]
    counters = [path.read_text(errors="replace").strip() for path in sorted(shared.glob("sampler-*.log"))]
    said += [f"the counters of a host were not read: {text.splitlines()[-1]}" for text in counters if text]
    is_gone, has_python, has_torch = not own.is_dir(), (own / "python").exists(), (own / "torch").exists()
    _clear(folder)
    if not records:
        gone = f"nothing was recorded: {own} is gone, which the command or something else has removed"
        said.append(gone if is_gone else _nothing(has_python, has_torch))
    return said


def _clear(folder: Path) -> None:
    """Take this command's marks away, and of the counters' those of processes that have ended here; others are of other hosts, or
    of another command that still runs."""
    shutil.rmtree(_marks(folder), ignore_errors=True)
    of_here = re.compile(rf"(?:pid-(\d+)|sampler)-{re.escape(machine())}-[0-9a-f]+(?:\.log)?")
    with contextlib.suppress(OSError):
        for path in (folder / SHARED).iterdir():
            named = of_here.fullmatch(path.name)
            if named is not None and not (Path("/proc", named[1]).exists() if named[1] else _reads(path)):
                path.unlink(missing_ok=True)
        (folder / SHARED).rmdir()


def _reads(path: Path) -> bool:
    """Whether the process that reads counters, of which this is the mark or its log, runs still."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        return _runs_here(int(path.with_name(path.name.removesuffix(".log")).read_text().split()[1]))
    return False


def _nothing(has_python: bool, has_torch: bool) -> str:
    if not has_python:
        return (
            "nothing was recorded: no Python process of the command looked into PYTHONPATH. Python does not with -I, -E and "
            "-S: start the script without these. Neither does it where the command clears the environment (sudo, ssh, a "
            "container): run `penstock profile` within"
        )
    if not has_torch:
        return "nothing was recorded: no Python process of the command imported torch"
    return (
        "nothing was recorded: the command imported torch, but called no module, ran no backward pass and joined no process "
        "group, or it was killed before its first step, or before its end if it trained nothing"
    )
