"""Cuts this process's network connections, as a network that breaks does."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import stat


def cut_a_connection(chance: random.Random) -> int:
    """Shut down one of this process's TCP connections that the engine has made. Returns how many were found, 1 at most."""
    store_port, found = int(os.environ["MASTER_PORT"]), []
    for handle in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(handle).st_mode):
                continue
            end = socket.socket(fileno=os.dup(handle))
            ports = {end.getpeername()[1], end.getsockname()[1]} if end.family == socket.AF_INET else {store_port}
            if store_port in ports:
                end.close()
            else:
                found.append(end)
    if found:
        with contextlib.suppress(OSError):
            chance.choice(found).shutdown(socket.SHUT_RDWR)
    for end in found:
        end.close()
    return min(len(found), 1)
