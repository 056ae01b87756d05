"""Commands of this interpreter as forks of the fork server of `ranks`, with the interface of `subprocess`.

Importing torch is most of what a fresh interpreter costs (1.8 s of processor time), and the fork server has done it. Processes
that the command starts with this interpreter are forks of the command, too, such as the ranks that torchrun starts.

    done = forked.run([*forked.TORCHRUN, "--nproc-per-node=2", script], env=env, capture_output=True, text=True)
    with forked.Popen(...) as process                       # its pid is that of a real process, ready for signals

For what tools start in a test's own process, on a testbed's hosts as well, there is the fixture `forks`. What no fork can be
(another program, `python -c`) is started as `subprocess` does it. A fresh interpreter is right where the start itself is what a
test proves: imports, autoload.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import gc
import importlib
import inspect
import multiprocessing.process
import multiprocessing.reduction
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import ranks
from penstock.tools.testbed import forks, namespace

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def run(
    command: Sequence[Any], *, timeout: float | None = None, capture_output: bool = False, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """As subprocess.run."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(command, **options) as process:
        stdout, stderr = process.communicate(timeout=timeout)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """As subprocess.Popen, of ``[sys.executable, "-m", MODULE, ...]`` or a script. The process dies with this one."""

    def _execute_child(self, *positional: Any) -> None:
        given = _by_name(self, positional)
        child = _child(given)
        if child is None:
            super()._execute_child(*positional)
            return
        child.ignored = [number for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN]
        child.network = _network()
        # Nobody holds its other end any more when the child has become what is asked for, or has died.
        ready, waited_for = os.pipe()
        child.held = _Stream(-1, waited_for)
        self._process = ranks.fork_server().Process(target=_become_first, args=(child,))
        self._process.start()
        os.close(waited_for)
        with open(ready, "rb") as pipe:
            pipe.read()
        _started(self, self._process.pid, given)

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        if kind is not None and self.poll() is None:
            # What failed may be what would have ended it, and a time limit interrupts a test once.
            with contextlib.suppress(ProcessLookupError):
                leads = os.getpgid(self.pid) == self.pid
                (os.killpg if leads else os.kill)(self.pid, signal.SIGKILL)
        super().__exit__(kind, value, trace)

    _process: Any = None
    """A child of the fork server, which tells us its exit code. None for what is no fork."""

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._process is None:
            return super()._try_wait(wait_flags)
        self._process.join(0 if wait_flags else None)
        code = self._process.exitcode
        if code is None:
            return 0, 0
        return self.pid, code << 8 if code >= 0 else -code

    def _internal_poll(self, _deadstate: int | None = None, **options: Any) -> int | None:
        if self._process is None:
            return super()._internal_poll(_deadstate, **options)
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid:
                    self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


@dataclasses.dataclass
class _Stream:
    """A standard stream of a child, and the descriptor that it is to have. Sending it sends the descriptor, too."""

    number: int
    descriptor: int

    def __reduce__(self) -> Any:
        return _received, (self.number, multiprocessing.reduction.DupFd(self.descriptor))


def _received(number: int, sent: Any) -> _Stream:
    return _Stream(number, sent.detach())


@dataclasses.dataclass
class _Child:
    """What `subprocess` wants of a child, as far as a fork can have it."""

    arguments: list[str]  # behind the interpreter
    env: dict[str, str]
    cwd: str | None
    streams: list[_Stream]
    leads_session: bool
    ignored: list[int] = dataclasses.field(default_factory=list)
    """Signals. Those that its parent ignores, as with execve(2)."""
    network: str | None = None
    """As for `namespace.join`: where its parent is, if that is not where the fork server is."""
    held: _Stream | None = None


def _by_name(popen: Any, positional: tuple[Any, ...]) -> dict[str, Any]:
    return dict(_SIGNATURE.bind(popen, *positional).arguments)


def _child(given: Mapping[str, Any]) -> _Child | None:
    """From the arguments of ``Popen._execute_child``; None for what cannot be a fork of this interpreter."""
    args = given["args"]
    if isinstance(args, (str, bytes, os.PathLike)) or given["shell"] or given["preexec_fn"] or given["pass_fds"]:
        return None
    interpreter, *arguments = map(os.fspath, args)
    env = dict(os.environ if given["env"] is None else given["env"])
    if arguments[:1] == ["-u"]:
        del arguments[0]
        env["PYTHONUNBUFFERED"] = "1"
    if interpreter != sys.executable or not arguments or (arguments[0].startswith("-") and arguments[0] != "-m"):
        return None
    return _Child(
        arguments,
        env,
        None if given["cwd"] is None else os.fspath(given["cwd"]),
        [_Stream(number, given[end]) for number, end in enumerate(_CHILD_ENDS) if given[end] != -1],
        given["start_new_session"],
    )


def _network() -> str | None:
    """The network namespace of this thread, unless it is the process's."""
    own = f"/proc/{os.getpid()}/task/{threading.get_native_id()}/ns/net"
    return None if os.stat(own).st_ino == os.stat("/proc/self/ns/net").st_ino else own


def _started(popen: Any, pid: int, given: Mapping[str, Any]) -> None:
    popen.pid = pid
    popen._child_created = True
    popen._close_pipe_fds(*(given[end] for end in _ENDS))


def _become_first(child: _Child) -> NoReturn:
    ctypes.CDLL(None).prctl(ranks.PR_SET_PDEATHSIG, signal.SIGKILL)
    namespace.join(child.network)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGINT}:
        signal.signal(number, signal.SIG_IGN if number in child.ignored else signal.SIG_DFL)
    _become(child)


def _fork_instead(popen: Any, *positional: Any) -> None:
    """In a fork, in place of ``Popen._execute_child``."""
    given = _by_name(popen, positional)
    child = _child(given)
    if child is None:
        _EXECUTE_CHILD(popen, *positional)
        return
    pid = os.fork()
    if pid == 0:
        _become(child)
    _started(popen, pid, given)


def _become(child: _Child) -> NoReturn:
    """In a fork: all that a fresh process finds, and then the command."""
    try:
        # Nothing of the parent's may be collected here: a destructor would close descriptors that are others' by then.
        gc.freeze()
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if child.leads_session:
            os.setsid()
        for stream in child.streams:
            os.dup2(stream.descriptor, stream.number)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        import fork_server

        multiprocessing.resource_tracker._resource_tracker._fd = None
        if child.cwd is not None:
            os.chdir(child.cwd)
        os.environ.clear()
        os.environ.update(child.env)
        sys.orig_argv = [sys.executable, *child.arguments]
        fork_server.show(sys.orig_argv, child.env)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout.reconfigure(line_buffering=False, write_through="PYTHONUNBUFFERED" in child.env)

        import torch
        import torch.distributed as dist

        sys.path[:] = [*filter(None, child.env.get("PYTHONPATH", "").split(os.pathsep)), *fork_server.PATH]
        # Read when torch is imported, which the fork server has done.
        if "OMP_NUM_THREADS" in child.env:
            torch.set_num_threads(int(child.env["OMP_NUM_THREADS"]))
        dist.set_debug_level_from_env()
        atexit._clear()
        # What multiprocessing holds of the parent's is not this process's to end; its own children are.
        multiprocessing.process._children.clear()  # type: ignore[attr-defined]
        multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
        multiprocessing.util._finalizer_registry.clear()  # type: ignore[attr-defined]
        atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]
        # Else `runpy` would warn that the module which is to become __main__ is there already.
        if child.arguments[0] == "-m":
            sys.modules.pop(child.arguments[1], None)
        subprocess.Popen._execute_child = _fork_instead  # type: ignore[method-assign]
        # As `site` does it; only what a test puts on PYTHONPATH, for the environment's own has been imported.
        sys.modules.pop("sitecustomize", None)
        if any(os.path.exists(os.path.join(each, "sitecustomize.py")) for each in sys.path[: -len(fork_server.PATH)]):
            importlib.import_module("sitecustomize")
        forks.execute(child.arguments)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


_EXECUTE_CHILD = subprocess.Popen._execute_child
_SIGNATURE = inspect.signature(_EXECUTE_CHILD)
_ENDS = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
_CHILD_ENDS = ("p2cread", "c2pwrite", "errwrite")
