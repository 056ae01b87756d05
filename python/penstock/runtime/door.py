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
import ipaddress
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

from penstock.addresses import joined, split
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
        host, port = split(text)
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise Config(f'address="{text}": give "host:port", such as "10.0.0.1:4000"')
        return cls(host, int(port))

    def __str__(self) -> str:
        return joined(self.host, self.port)


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
        try:
            family, _, _, _, at = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
            if ipaddress.ip_address(str(at[0]).partition("%")[0]).is_unspecified:
                raise Config(f"address={address}: name the address of this host at which clients reach it")
            self._listener = socket.create_server(at[:2], family=family, backlog=128)
        except Config:
            raise  # it is a ValueError, too
        except (OSError, ValueError) as error:
            raise Config(
                f"nothing can listen at {address}: {error}. Is another process there, or is it another host's?"
            ) from None
        # Those that have not proved the secret, the oldest first.
        self._guests: dict[socket.socket, None] = {}
        # All whose exchange has not ended.
        self._inside: set[socket.socket] = set()
        self._turned_away, self._told = 0, -_TELL_EVERY_S
        self._threads = threading.BoundedSemaphore(2 * _MOST_GUESTS)
        self._thread = threading.Thread(target=self._listen, name="penstock-door", daemon=True)
        _open.add(self)
        self._thread.start()

    def close(self) -> None:
        """Let nobody in any more. Those that were let in before have their answer, or get it."""
        with self._lock:
            self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._listener.close()

    def _listen(self) -> None:
        while True:
            self._threads.acquire()
            guest = None
            try:
                guest, _ = self._listener.accept()
                self._take_in(guest)
                threading.Thread(target=self._receive, args=(guest,), name="penstock-guest", daemon=True).start()
            except (OSError, RuntimeError) as error:
                if self._listener.fileno() < 0:
                    return
                if guest is not None:
                    self._guests.pop(guest, None)
                    self._inside.discard(guest)
                    guest.close()
                self._threads.release()
                log.debug("a client did not come in: %s", error)
                time.sleep(_ACCEPT_AGAIN_S)  # descriptors or threads are short, or the guest has gone

    def _take_in(self, guest: socket.socket) -> None:
        """It may prove the secret. Where too many are about it, the one that has been for longest has to go: silent ones keep
        nobody out."""
        guest.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._guests[guest] = None
        self._inside.add(guest)
        if len(self._guests) > _MOST_GUESTS:
            oldest = next(iter([*self._guests]), guest)  # of a copy: guests leave on threads of their own
            self._guests.pop(oldest, None)
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)  # ends its thread

    def _turn_away(self, guest: socket.socket) -> None:
        """Log it, at most once a minute: anybody can come."""
        self._turned_away += 1
        if time.monotonic() - self._told >= _TELL_EVERY_S:
            log.warning(
                "a process at %s that does not know the secret was turned away (%d so far)",
                guest.getpeername()[0],
                self._turned_away,
            )
            self._told = time.monotonic()

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
                    self._turn_away(guest)
                    return
                self._guests.pop(guest, None)
                message = exchange.read(wire, "client's")
                with self._lock:
                    if self._is_closed:
                        return  # the client tries again, until the next server is there
                    answer = self._admit(message, exchange.proof("group"))
                exchange.write(wire, "server's", answer)
        except (OSError, ValueError, RecursionError) as error:
            log.debug("a client did not come in: %s", error)
        finally:
            self._guests.pop(guest, None)
            self._inside.discard(guest)
            self._threads.release()


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
            with _connect(address, min(left, _WITHIN_S)) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return _enter(connection, address, secret, message, min(until, time.monotonic() + _WITHIN_S))
        except PenstockError:
            raise  # some are OSErrors, too
        except UnicodeError as error:
            raise Config(f"address={address}: {address.host} is no host's name ({error})") from None
        except OSError as error:
            last = error
            time.sleep(min(_AGAIN_S, max(0.0, until - time.monotonic())))
    raise Timeout(f"nobody answers at {address} ({last}). Does a process serve an endpoint there?")


def _connect(address: Address, within_s: float) -> socket.socket:
    """A connection to a server. Raises OSError: there is none in this time; UnicodeError: no host can have this name."""
    until, found = time.monotonic() + within_s, list[Any]()

    def look_up() -> None:
        try:
            found.extend(socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            found.append(error)

    # The system's look-up has no time-out, and may wait for a name server for a minute.
    thread = threading.Thread(target=look_up, name="penstock-name", daemon=True)
    thread.start()
    thread.join(within_s)
    if thread.is_alive():
        raise OSError(f"the address of {address.host} was not found within {within_s:.1f} s: do name servers answer?")
    last: Exception = OSError(f"{address.host} has no address")
    for left, each in zip(range(len(found), 0, -1), found, strict=True):
        if isinstance(each, Exception):
            raise each
        family, kind, protocol, _, sockaddr = each
        connection = socket.socket(family, kind, protocol)
        try:
            # What is left of the time is shared by the addresses that are left: one may lead nowhere.
            connection.settimeout(max((until - time.monotonic()) / left, _SHORTEST_S))
            connection.connect(sockaddr)
            return connection
        except OSError as error:
            connection.close()
            last = error
    raise last


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
    except (ValueError, RecursionError) as error:
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
    """A forked child answers nobody: with its copies of the listener and of connections, clients would wait for the child when
    the server has died."""
    for each in _open:
        each._listener.close()
        for guest in list(each._inside):
            guest.close()


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
_SHORTEST_S = 0.01
_ACCEPT_AGAIN_S = 0.1
_TELL_EVERY_S = 60.0
