"""A server of an endpoint at an address, and how clients come in: both prove that they know a secret before either reads more.

    client                                                server
      │ ── greeting, nonce ─────────────────────────────────► │
      │ ◄──────────────── nonce, proof of "server" ────────── │
      │ ── proof of "client", message, its MAC ─────────────► │  a proof that is wrong ends it
      │ ◄──────────────────────────── message, its MAC ────── │

A proof is HMAC-SHA256 by the secret over its role and both nonces. Messages are JSON of at most `_MOST_BYTES`; their MACs have
a key of this exchange, and so has the group that the two then join: neither the secret nor that key crosses the network.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import os
import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.errors import Config, PenstockError, Refused, Timeout

__all__ = ["Address", "Door", "enter"]

log = logging.getLogger("penstock")


@dataclass(frozen=True)
class Address:
    """Where a server is. As the store of a job it says which interface leads there (`penstock.runtime.store.master`)."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """From "host:port"; an IPv6 address stands in brackets.

        Raises:
            penstock.errors.Config: it is no such text.
        """
        host, colon, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not colon or not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise Config(f'address="{text}": give "host:port", such as "10.0.0.1:4000"')
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Door:
    """Listens at an address for clients, and gives each that proves the secret the answer of ``admit``.

    ``admit(message, key)`` gets the client's message and the secret of the connection, and returns the answer; it runs on several
    threads, one at a time.

    Raises:
        penstock.errors.Config: nothing can listen there.
    """

    def __init__(
        self, address: Address, secret: bytes, admit: Callable[[dict[str, Any], bytes], dict[str, Any]]
    ) -> None:
        self._secret, self._admit = secret, admit
        self._is_closed, self._lock = False, threading.Lock()
        if address.host in ("0.0.0.0", "::"):
            raise Config(f"address={address}: name the address of this host at which clients reach it")
        try:
            family = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((address.host, address.port), family=family, backlog=128)
        except OSError as error:
            raise Config(
                f"nothing can listen at {address}: {error}. Is another process there, or is it another host's?"
            ) from None
        # Those that come while as many have not proved the secret wait in the kernel's queue.
        self._places = threading.BoundedSemaphore(_MOST_GUESTS)
        self._thread = threading.Thread(target=self._listen, name="penstock-door", daemon=True)
        self._thread.start()
        _open.add(self)

    def close(self) -> None:
        """Let nobody in any more. Those that were let in before have their answer, or get it."""
        with self._lock:
            self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._listener.close()

    def _listen(self) -> None:
        while True:
            self._places.acquire()
            try:
                guest, _ = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                self._places.release()
                time.sleep(_ACCEPT_AGAIN_S)  # descriptors are short, or the guest has gone
                continue
            threading.Thread(target=self._receive, args=(guest,), name="penstock-guest", daemon=True).start()

    def _receive(self, guest: socket.socket) -> None:
        try:
            with guest:
                wire = _Wire(guest, time.monotonic() + _WITHIN_S)
                greeting = wire.receive(len(_GREETING) + _NONCE)
                if not greeting.startswith(_GREETING):
                    return
                theirs, ours = greeting[len(_GREETING) :], secrets.token_bytes(_NONCE)
                exchange = _Exchange(self._secret, theirs, ours)
                wire.send(ours + exchange.proof("server"))
                if not hmac.compare_digest(wire.receive(_NONCE), exchange.proof("client")):
                    log.warning("a process at %s that does not know the secret was turned away", guest.getpeername()[0])
                    return
                message = exchange.read(wire, "client's")
                with self._lock:
                    if self._is_closed:
                        return  # the client tries again, until the next server is there
                    answer = self._admit(message, exchange.proof("group"))
                exchange.write(wire, "server's", answer)
        except (OSError, ValueError) as error:
            log.info("a client did not come in: %s", error)
        finally:
            self._places.release()


def enter(address: Address, secret: bytes, message: dict[str, Any], until: float) -> tuple[dict[str, Any], bytes]:
    """Come in at a server's door, also if it opens later, until ``time.monotonic()`` is ``until``. Returns its answer and the
    secret of the connection.

    Raises:
        penstock.errors.Timeout: nobody answers there.
        penstock.errors.Refused: what answers does not know the secret, or does not take this client's.
    """
    last: Exception | None = None
    while (left := until - time.monotonic()) > 0:
        try:
            with socket.create_connection((address.host, address.port), min(left, _WITHIN_S)) as connection:
                return _enter(connection, address, secret, message, min(until, time.monotonic() + _WITHIN_S))
        except PenstockError:
            raise  # some are OSErrors, too
        except OSError as error:
            last = error
            time.sleep(min(_AGAIN_S, max(0.0, until - time.monotonic())))
    raise Timeout(f"nobody answers at {address} ({last}). Does a process serve an endpoint there?")


def _enter(
    connection: socket.socket, address: Address, secret: bytes, message: dict[str, Any], until: float
) -> tuple[dict[str, Any], bytes]:
    wire, ours = _Wire(connection, until), secrets.token_bytes(_NONCE)
    wire.send(_GREETING + ours)
    answer = wire.receive(2 * _NONCE)
    exchange = _Exchange(secret, ours, answer[:_NONCE])
    if not hmac.compare_digest(answer[_NONCE:], exchange.proof("server")):
        raise Refused(f"what answers at {address} is no server of an endpoint, or has another secret")
    wire.send(exchange.proof("client"))
    exchange.write(wire, "client's", message)
    try:
        return exchange.read(wire, "server's"), exchange.proof("group")
    except ValueError as error:
        raise Refused(f"the server at {address} has sent {error}") from None


class _Exchange:
    """What both sides can compute who know the secret."""

    def __init__(self, secret: bytes, client: bytes, server: bytes) -> None:
        self._secret, self._nonces = secret, client + server

    def proof(self, role: str) -> bytes:
        return hmac.new(
            self._secret, b"penstock endpoint " + role.encode() + b"\0" + self._nonces, hashlib.sha256
        ).digest()

    def write(self, wire: _Wire, whose: str, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        wire.send(_LENGTH.pack(len(data)) + data + self._mac(whose, data))

    def read(self, wire: _Wire, whose: str) -> dict[str, Any]:
        """Raises ValueError: it is not what the other side has written."""
        (length,) = _LENGTH.unpack(wire.receive(_LENGTH.size))
        if length > _MOST_BYTES:
            raise ValueError(f"a message of {length} bytes")
        data = wire.receive(length)
        if not hmac.compare_digest(wire.receive(_NONCE), self._mac(whose, data)):
            raise ValueError("a message with a wrong MAC")
        message = json.loads(data)
        if not isinstance(message, dict):
            raise ValueError("a message that is no object")
        return message

    def _mac(self, whose: str, data: bytes) -> bytes:
        return hmac.new(self.proof(f"{whose} message"), data, hashlib.sha256).digest()


class _Wire:
    """A connection whose exchange must end by a time."""

    def __init__(self, connection: socket.socket, until: float) -> None:
        self._connection, self._until = connection, until

    def send(self, data: bytes) -> None:
        self._hurry()
        self._connection.sendall(data)

    def receive(self, length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            self._hurry()
            part = self._connection.recv(length - len(data))
            if not part:
                raise ConnectionError("the other side has closed the connection")
            data += part
        return bytes(data)

    def _hurry(self) -> None:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"it took longer than {_WITHIN_S} s")
        self._connection.settimeout(left)


def _after_fork() -> None:
    """A forked child answers nobody: with its copy of the listener, clients would wait for the child when the server has died."""
    for each in _open:
        each._listener.close()


_open: weakref.WeakSet[Door] = weakref.WeakSet()
os.register_at_fork(after_in_child=_after_fork)
_GREETING = b"penstock endpoint 1\n"
_NONCE = 32
_LENGTH = struct.Struct("!I")
# Contacts have some hundred bytes.
_MOST_BYTES = 8192
# As a stream's hand-shake.
_WITHIN_S = 5.0
_MOST_GUESTS = 64
_AGAIN_S = 0.05
_ACCEPT_AGAIN_S = 0.1
