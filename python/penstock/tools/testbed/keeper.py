"""The process that ends a testbed when no other process can.

Every testbed has one. It holds the descriptors of the namespaces and watches the process that made the testbed. When
that process goes away, by SIGKILL too, the keeper kills what still runs in the testbed and exits; with the last
descriptor and the last process the kernel frees namespaces, interfaces, queues and rules. Should the keeper itself
be killed first, the maker does the same when it closes the testbed.

Why not PR_SET_PDEATHSIG: it reaches children and not grandchildren, and fires when the *thread* that forked ends. Why
not a PID namespace: ranks would not know the process ids that the rest of the machine knows them by.

It runs as a script, ``python -I -S keeper.py MARK PARENT FD...``, and imports nothing of Penstock, so that it starts
in 20 ms and stays small. Its standard input is a pipe whose other end only the maker holds. A line
``detach PATH`` on it turns the testbed into one that stays (``penstock testbed up``) until SIGTERM; PATH is the file
that says so to others, removed when the testbed begins to end.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Iterator

SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


def main(arguments: list[str]) -> None:
    mark, parent = arguments[0].encode(), int(arguments[1])
    own = os.stat("/proc/self/ns/net").st_ino
    namespaces = {os.fstat(int(each)).st_ino for each in arguments[2:]} - {own}
    state_file = None
    # Blocked rather than handled: one that arrives early stays pending until sigwait asks for it.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        state_file = watch(parent)
        if state_file is not None:
            signal.sigwait({signal.SIGTERM})
    finally:
        if state_file is not None:
            # First: a program that sees a process of the testbed die must find that the testbed is down.
            try:
                os.unlink(state_file)
            except FileNotFoundError:
                pass
        sweep(mark, namespaces)


def watch(parent: int) -> str | None:
    """Wait until the maker closes its end of the pipe or dies, or detaches: then return the path it names. It may have done so
    and ended before this process runs."""
    poll = select.poll()
    poll.register(0, select.POLLIN | select.POLLHUP)
    try:
        poll.register(os.pidfd_open(parent), select.POLLIN)
        lives = os.getppid() == parent  # else it died before, and its number may be another's by now
    except ProcessLookupError:
        lives = False
    said = b""
    while True:
        events = poll.poll(None if lives else 0)
        # A forked child of the maker may hold the pipe open, hence the second descriptor. What the pipe says comes first.
        read = os.read(0, 4096) if any(descriptor == 0 for descriptor, _ in events) else b""
        if not read:
            return None
        said += read
        if said.endswith(b"\n"):
            return said.split(b" ", 1)[1].rstrip(b"\n").decode()


def sweep(mark: bytes, namespaces: set[int]) -> None:
    """Kill every process that lives in one of ``namespaces`` or was started with ``mark`` in its environment.

    Args:
        mark: ``NAME=value`` as it stands in the environment. It is inherited, so it finds grandchildren in sessions
            of their own as well.
        namespaces: inode numbers of network namespaces, never the machine's own.

    Returns when none is left, or after 50 rounds: a process that outlives SIGKILL sits in the kernel and cannot be
    helped. Processes may fork while they are being listed, hence the rounds.
    """
    for _ in range(50):
        poll = select.poll()
        killed = []
        for process in members(mark, namespaces):
            try:
                handle = os.pidfd_open(process)
            except ProcessLookupError:
                continue
            killed.append(handle)
            # Looked at again under the handle: the process number may have passed to another process in between.
            if belongs(process, mark, namespaces):
                try:
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                except ProcessLookupError:
                    pass
                poll.register(handle, select.POLLIN)
        if not killed:
            return
        poll.poll(100)
        for handle in killed:
            os.close(handle)


def members(mark: bytes, namespaces: set[int]) -> Iterator[int]:
    """Process ids, this process's excepted."""
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid() and belongs(int(name), mark, namespaces):
            yield int(name)


def belongs(process: int, mark: bytes, namespaces: set[int]) -> bool:
    try:
        if namespaces and os.stat(f"/proc/{process}/ns/net").st_ino in namespaces:
            return True
        environ = _read(process, "environ")
        if not environ:
            until_s = time.monotonic() + _STARTS_S  # some processes have no environment at all
            while _starts_a_program(process) and time.monotonic() < until_s:
                os.sched_yield()
            environ = _read(process, "environ")
        return mark in environ.split(b"\0")
    except OSError:  # it is gone, or another user's
        return False


def _starts_a_program(process: int) -> bool:
    """Whether it is inside execve(2), where a process has no environment for an instant; fork's caller goes on before."""
    state, *fields = _read(process, "stat").rpartition(b") ")[2].split()
    kernel_thread = int(fields[5]) & 0x0020_0000  # PF_KTHREAD among the flags
    # proc_pid_stat(5): env_start and env_end, which are 0 first, and the same for an instant then.
    return not kernel_thread and state not in b"ZX" and fields[46] == fields[47]


# A guess: execve(2) sets it within microseconds, unless the processor is taken away meanwhile.
_STARTS_S = 0.02


def _read(process: int, name: str) -> bytes:
    with open(f"/proc/{process}/{name}", "rb") as file:
        return file.read()


if __name__ == "__main__":
    main(sys.argv[1:])
