"""Processes on hosts, and their end: what every testbed does, and one without a network."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from penstock.tools.testbed import keeper, launch, namespace, system
from penstock.tools.testbed.link import FlowClass
from penstock.tools.testbed.topology import LinkTraffic

Self = TypeVar("Self", bound="Bed")


class Bed:
    """What `Testbed` and `Loopback` share: processes on hosts, and their end.

    Leaving the ``with`` block, or `close`, kills every process that was started here, with all it started itself.
    If this process is killed instead, the keeper does the same within a fraction of a second (`keeper`).
    """

    hosts: int
    interface: str

    def __init__(self, *, hosts: int) -> None:
        self.hosts = hosts
        self._maker = os.getpid()
        self._id = secrets.token_hex(8)
        self._stack = contextlib.ExitStack()
        self._keeper: subprocess.Popen[bytes] | None = None

    def run(self, command: Sequence[str], *, ranks: int, **options: Any) -> launch.CompletedRun:
        """Run ``command`` as ``ranks`` ranks spread over the hosts and wait for them: see `launch.run`."""
        return launch.run(self, command, ranks=ranks, **options)

    def popen(
        self, host: int | str, argv: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a process on a host and return at once.

        Args:
            host: 0 to ``hosts`` - 1, or a node's name (`Topology`).
            argv: program and arguments; the file system is the machine's own, whatever the host.
            env: added to this process's environment.
            options: as for subprocess.Popen; the process leads a session of its own unless you say otherwise.
        Returns: the Popen of that very process: its ``pid`` is the machine's, ready for SIGKILL and SIGSTOP.
        Cost: a fork from a new thread, 1-3 ms.
        """
        environment = {**os.environ, **self.environment(), **(env or {})}
        options.setdefault("start_new_session", True)
        return self.inside(host, lambda: subprocess.Popen(list(argv), env=environment, **options))

    def environment(self) -> dict[str, str]:
        """What every process here has in its environment: the mark that the keeper looks for, and the interface."""
        return {
            MARK: self._id,
            "GLOO_SOCKET_IFNAME": self.interface,
            "NCCL_SOCKET_IFNAME": self.interface,
            "TP_SOCKET_IFNAME": self.interface,
        }

    def address(self, host: int | str, family: int = 4) -> str:
        """The address of a host or of another node, IPv4 or (``family=6``) IPv6."""
        raise NotImplementedError

    def network(self, host: int | str) -> str | None:
        """A path for `namespace.join`: the network namespace of a host; None where that is the machine's own."""
        return None

    def links(self) -> list[LinkTraffic]:
        """What crossed each link so far; nothing where there are no links."""
        return []

    def counters(self) -> dict[int, dict[str, int]]:
        """``{host: {tx_bytes, tx_packets, tx_dropped, rx_bytes, rx_packets, rx_dropped}}`` of each host's interface."""
        return {
            host: self.inside(host, lambda: system.interface_counters(self.interface)) for host in range(self.hosts)
        }

    def flows(self) -> dict[int, list[FlowClass]]:
        """What each host sent so far by class of flows; empty lists where there are no classes."""
        return {host: [] for host in range(self.hosts)}

    def connections(self, host: int) -> set[tuple[int, int]]:
        """Ports (here, there) of the TCP connections that are open between this host and another."""
        return set()

    def remembered(self) -> dict[int, set[tuple[int, int]]]:
        """By host, ports (here, there) of the TCP connections to other hosts that are open, or that have ended and of which the
        kernel of one of the two still knows (for a minute)."""
        return {host: set() for host in range(self.hosts)}

    def inside(self, host: int | str, function: Callable[[], Any]) -> Any:
        """Call ``function`` on a thread that is on ``host``; return what it returns. Sockets made there stay there."""
        raise NotImplementedError

    def close(self) -> None:
        """Kill what runs here and free everything. Does nothing the second time, or in a forked child."""
        if os.getpid() == self._maker:
            self._stack.close()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start_keeper(self, namespaces: Sequence[int]) -> None:
        """From here on everything in ``namespaces``, and all with our mark, dies with this process."""
        inodes = {os.fstat(each).st_ino for each in namespaces}
        script = [sys.executable, "-I", "-S", keeper.__file__, f"{MARK}={self._id}", str(os.getpid())]

        def end() -> None:
            process = self._keeper
            assert process is not None and process.stdin is not None
            process.stdin.close()
            process.wait()
            if process.returncode != 0:  # killed, for one
                keeper.sweep(f"{MARK}={self._id}".encode(), inodes)

        # The keeper inherits what is blocked: a signal that comes before it runs waits for it, and does not end it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, keeper.SIGNALS)
            self._keeper = subprocess.Popen(
                [*script, *map(str, namespaces)],
                pass_fds=namespaces,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
            self._stack.callback(end)
        finally:
            # One that came meanwhile is handled here.
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Loopback(Bed):
    """The testbed's face without its network: every "host" is this machine, and all talk over ``lo``.

    For where `Testbed` is unavailable. Rates, loss, delay and dropped links do not exist here, and counters are those
    of the machine's ``lo``, including the traffic of other programs.
    """

    interface = "lo"

    def __init__(self, *, hosts: int = 2) -> None:
        super().__init__(hosts=hosts)
        self._start_keeper([])

    def address(self, host: int | str, family: int = 4) -> str:
        return "127.0.0.1" if family == 4 else "::1"

    def inside(self, host: int | str, function: Callable[[], Any]) -> Any:
        return namespace.inside(None, function)


MARK = "PENSTOCK_TESTBED"
"""Environment variable of every process in a testbed; its value is the testbed's."""
