"""The store through which ranks meet: any object with the methods of ``torch.distributed.Store``.

Nothing here imports torch: the caller that joins a group passes the store (torch's own store of the process group, a TCPStore, or
one of a test).
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from penstock.addresses import joined

__all__ = ["Keys", "StoreError", "base", "is_served_here", "keep_alive", "master"]


class StoreError(RuntimeError):
    """A store could not be reached, or did not answer in time."""


class Keys:
    """The keys of a store below a prefix, which other keys cannot meet.

    Args:
        prefix: of all keys; a slash follows it.
        store: of torch's, or other `Keys`.

    The methods are those of ``torch.distributed.Store``, and block like them. Every error is a `StoreError`.
    """

    def __init__(self, prefix: str, store: Any) -> None:
        self.underlying_store = store
        self._prefix = prefix

    def set(self, key: str, value: str) -> None:
        """Set a key, over an earlier value."""
        self._call(self.underlying_store.set, self._full(key), value)

    def get(self, key: str) -> bytes:
        """Waits for the key, for the store's time-out."""
        return bytes(self._call(self.underlying_store.get, self._full(key)))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Waits for the keys, for the store's time-out."""
        return [
            bytes(value) for value in self._call(self.underlying_store.multi_get, [self._full(key) for key in keys])
        ]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of the keys are there."""
        return bool(self._call(self.underlying_store.check, [self._full(key) for key in keys]))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which starts at 0; returns its new value."""
        return int(self._call(self.underlying_store.add, self._full(key), amount))

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Block until all of the keys are there."""
        self._call(self.underlying_store.wait, [self._full(key) for key in keys], timeout)

    def delete_key(self, key: str) -> bool:
        """Delete a key; whether it was there."""
        return bool(self._call(self.underlying_store.delete_key, self._full(key)))

    def _full(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return method(*arguments)
        except StoreError:
            raise
        # Errors of torch's stores are RuntimeErrors, also the one for a method that a store lacks.
        except RuntimeError as error:
            raise StoreError(str(error)) from error


def base(store: Any) -> Any:
    """The store under all prefixes."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def master(store: Any) -> str | None:
    """ "host:port" of the job's master, for the route to it."""
    store = base(store)
    host = getattr(store, "host", None) or os.environ.get("MASTER_ADDR")
    port = getattr(store, "port", None) or os.environ.get("MASTER_PORT") or "1"
    return joined(host, port) if host else None


def keep_alive(store: Any, silent_s: float) -> None:
    """Make calls of a store fail when nothing has come from its server's host for ``silent_s``. torch's own calls wait for an
    answer without a limit: a rank that is cut off would hang in them. (With TCP keep-alive and TCP_USER_TIMEOUT the kernel ends
    the connection. A stopped server is not silent: its kernel answers.)

    Does nothing for a store without connections. Costs some microseconds for each descriptor of this process: torch does not
    say which is the store's.
    """
    port = getattr(base(store), "port", None)
    if port is None:
        return
    for handle in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # closed since, or not connected
            if not stat.S_ISSOCK(os.fstat(handle).st_mode):
                continue
            with socket.socket(fileno=os.dup(handle)) as end:
                _end_when_silent(end, port, silent_s)


def _end_when_silent(end: socket.socket, port: int, silent_s: float) -> None:
    """Raises: OSError for a socket that is not connected."""
    if end.family in (socket.AF_INET, socket.AF_INET6) and end.getpeername()[1] == port:
        pause_s = max(1, int(silent_s / 4))
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, pause_s)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause_s)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silent_s * 1000))
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def is_served_here(store: Any) -> bool:
    """Whether the store's server is in this process: it listens on the store's port."""
    port = getattr(base(store), "port", None)
    if port is None:
        return False
    own = set()
    for handle in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the handle of this very list is closed
            own.add(os.readlink(f"/proc/self/fd/{handle}"))
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with contextlib.suppress(FileNotFoundError), open(table) as lines:
            for line in lines:
                fields = line.split()
                listens = fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port
                if listens and f"socket:[{fields[9]}]" in own:
                    return True
    return False


_LISTENS = "0A"  # TCP_LISTEN in include/net/tcp_states.h
