"""Serves viewers over HTTP, in one thread that never waits for one of them.

Not `http.server`: it has a thread for each peer, reads as many as 100 headers of 64 KiB, and its time-outs start anew with every
byte. Here an unauthenticated peer is a socket and at most `_MOST_HEAD` bytes for at most `_HEAD_S`; at most `_MOST_PENDING` wait
at a time, and one more closes the oldest. Whoever does not have the token gets 401 and nothing else.
"""

from __future__ import annotations

import collections
import contextlib
import hmac
import logging
import selectors
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["Answer", "Server"]

log = logging.getLogger("penstock")


@dataclass(frozen=True)
class Answer:
    """What a path answers."""

    content_type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(eq=False)
class _Peer:
    """A connection."""

    socket: socket.socket
    deadline_s: float | None
    """By then the head must be there, or the answer taken. None: events are sent for as long as the peer likes."""
    head: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)
    state: str = "asks"
    """``asks``, ``takes`` its answer, or ``follows`` events."""


class Server:
    """Listens and serves from `start` to `close`.

    Args:
        host, port: where to listen; port 0 is any.
        token: what a request must carry, in its URL or as a bearer.
        paths: by path, what answers a GET; called on the server's thread.
        events: the path of the event stream.

    Raises:
        OSError: the address cannot be had.
    """

    def __init__(
        self, host: str, port: int, token: str, paths: dict[str, Callable[[], Answer]], events: str = "/events"
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._token = token.encode()
        self._paths = paths
        self._events = events
        self._failed: set[str] = set()
        self._peers: dict[int, _Peer] = {}
        self._wakes, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._wakes.setblocking(False)
        self._latest = b""
        self._queue: collections.deque[bytes] = collections.deque(maxlen=2)
        self._is_closing = False
        self._accepts_again_s = 0.0
        self._thread = threading.Thread(target=self._run, name="penstock-live-http", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def publish(self, data: str) -> None:
        """Send an event to all who follow, and to everybody who begins to."""
        self._latest = b"data: " + data.encode() + b"\n\n"
        self._queue.append(self._latest)
        self._wake()

    def close(self) -> None:
        """Send what is left, for at most `_LAST_S`, and end."""
        self._is_closing = True
        self._wake()
        self._thread.join(2 * _LAST_S)

    def forget(self) -> None:
        """In a forked child: close its copies of the sockets. The connections are the parent's."""
        for each in [self._listener, self._wakes, self._woken, *(peer.socket for peer in list(self._peers.values()))]:
            each.close()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it wakes anyway; closed: it has ended
            self._wakes.send(b"\0")

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._turn(self._pause())
            until_s = time.monotonic() + _LAST_S
            self._listener.close()
            self._send_events()
            while any(peer.unsent for peer in self._peers.values()) and time.monotonic() < until_s:
                self._turn(0.05)
        except Exception:
            log.exception("the live view has stopped; the training goes on")
        finally:
            for peer in list(self._peers.values()):
                self._drop(peer)
            self._listener.close()
            self._woken.close()

    def _pause(self) -> float | None:
        deadlines = [peer.deadline_s for peer in self._peers.values() if peer.deadline_s is not None]
        if self._accepts_again_s:
            deadlines.append(self._accepts_again_s)
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _turn(self, pause_s: float | None) -> None:
        # Made anew each turn: there are few sockets, and a selector in the kernel would be shared with forked children.
        with selectors.PollSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            now_s = time.monotonic()
            if self._listener.fileno() >= 0 and now_s >= self._accepts_again_s:
                self._accepts_again_s = 0.0
                selector.register(self._listener, selectors.EVENT_READ)
            for peer in self._peers.values():
                mask = 0 if peer.state == "takes" else selectors.EVENT_READ
                mask |= selectors.EVENT_WRITE if peer.unsent else 0
                selector.register(peer.socket, mask or selectors.EVENT_WRITE, peer)
            ready = selector.select(pause_s)
        for key, mask in ready:
            if key.fileobj is self._woken:
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(4096)
                self._send_events()
            elif key.fileobj is self._listener:
                self._accept()
            elif key.data in self._peers.values():  # not dropped just now
                self._serve(key.data, mask)
        now_s = time.monotonic()
        for peer in list(self._peers.values()):
            if peer.deadline_s is not None and now_s >= peer.deadline_s:
                self._drop(peer)

    def _accept(self) -> None:
        for _ in range(_MOST_PENDING):
            try:
                end, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError, InterruptedError):
                return
            except OSError:  # no descriptors are left
                self._accepts_again_s = time.monotonic() + _RESTS_S
                return
            end.setblocking(False)
            pending = [peer for peer in self._peers.values() if peer.state != "follows"]
            if len(pending) >= _MOST_PENDING:
                self._drop(min(pending, key=lambda peer: peer.deadline_s or 0.0))
            self._peers[end.fileno()] = _Peer(end, time.monotonic() + _HEAD_S)

    def _serve(self, peer: _Peer, mask: int) -> None:
        try:
            if mask & selectors.EVENT_READ:
                self._read(peer)
            if peer.unsent:
                del peer.unsent[: peer.socket.send(peer.unsent[:_CHUNK])]
            if not peer.unsent and peer.state == "takes":
                peer.socket.shutdown(socket.SHUT_WR)
                self._drop(peer)
        except BlockingIOError:
            pass
        except OSError:
            self._drop(peer)

    def _read(self, peer: _Peer) -> None:
        data = peer.socket.recv(_MOST_HEAD)
        if not data:
            raise ConnectionResetError
        if peer.state == "follows":
            return
        peer.head += data
        head, end, _ = peer.head.partition(b"\r\n\r\n")
        if end and len(head) <= _MOST_HEAD:
            peer.head = bytearray()
            self._answer(peer, bytes(head))
        elif len(peer.head) > _MOST_HEAD:
            raise ConnectionResetError

    def _answer(self, peer: _Peer, head: bytes) -> None:
        peer.deadline_s = time.monotonic() + _TAKES_S
        peer.state = "takes"
        method, path, is_allowed = self._understand(head)
        if not is_allowed:
            peer.unsent += _whole("401 Unauthorized", Answer("", b"", (("WWW-Authenticate", "Bearer"),)))
        elif method != "GET":
            peer.unsent += _whole("405 Method Not Allowed", Answer("", b"", (("Allow", "GET"),)))
        elif path == self._events:
            followers = sum(each.state == "follows" for each in self._peers.values())
            if followers >= _MOST_FOLLOWERS:
                told = f"{followers} viewers follow this job already: close one\n".encode()
                peer.unsent += _whole("503 Service Unavailable", Answer("text/plain", told))
                return
            peer.state, peer.deadline_s = "follows", None
            peer.unsent += _head("200 OK", (("Content-Type", "text/event-stream"),)) + b"retry: 2000\n\n" + self._latest
        elif path in self._paths:
            peer.unsent += self._made(path)
        else:
            there = ", ".join([*self._paths, self._events])
            peer.unsent += _whole("404 Not Found", Answer("text/plain", f"there are {there}\n".encode()))

    def _made(self, path: str) -> bytes:
        """The answer of a path; where making it fails, 500, and a line in the log the first time."""
        try:
            return _whole("200 OK", self._paths[path]())
        except Exception:
            if path not in self._failed:
                self._failed.add(path)
                log.exception("the live view answers %s with 500; the training goes on", path)
            told = b"this page cannot be made: rank 0's log says why\n"
            return _whole("500 Internal Server Error", Answer("text/plain", told))

    def _understand(self, head: bytes) -> tuple[str, str, bool]:
        """Method, path, and whether the request has the token."""
        first, *lines = head.decode("latin-1").split("\r\n")
        words = first.split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return "", "", False
        path, _, query = words[1].partition("?")
        given = [value for name, value in urllib.parse.parse_qsl(query, max_num_fields=None)[:8] if name == "token"]
        for line in lines:
            name, _, value = line.partition(":")
            scheme, _, bearer = value.strip().partition(" ")
            if name.lower() == "authorization" and scheme.lower() == "bearer":
                given.append(bearer.strip())
        matches = [hmac.compare_digest(each.encode("utf-8", "replace"), self._token) for each in given[:4]]
        return words[0], path, any(matches)

    def _send_events(self) -> None:
        while self._queue:
            event = self._queue.popleft()
            for peer in list(self._peers.values()):
                if peer.state != "follows":
                    continue
                if len(peer.unsent) > _MOST_UNSENT:  # it does not read: it may come again
                    self._drop(peer)
                    continue
                peer.unsent += event

    def _drop(self, peer: _Peer) -> None:
        self._peers.pop(peer.socket.fileno(), None)
        peer.socket.close()


def _head(status: str, headers: tuple[tuple[str, str], ...]) -> bytes:
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in (*headers, *_ALWAYS)), "", ""]
    return "\r\n".join(lines).encode("latin-1")


def _whole(status: str, answer: Answer) -> bytes:
    kind = (("Content-Type", answer.content_type),) if answer.content_type else ()
    return _head(status, (*kind, ("Content-Length", str(len(answer.body))), *answer.headers)) + answer.body


_ALWAYS = (
    ("Cache-Control", "no-store"),
    ("Connection", "close"),
    ("Referrer-Policy", "no-referrer"),
    ("X-Content-Type-Options", "nosniff"),
)
_MOST_PENDING = 16
# Connections that the kernel holds before they are accepted: where it holds none, a peer tries again after a second.
_BACKLOG = 128
_MOST_FOLLOWERS = 32
# A browser's is 500 bytes.
_MOST_HEAD = 4096
_HEAD_S = 5.0
_TAKES_S = 10.0
# Some 20 events that a viewer has not taken, beside what the kernel holds.
_MOST_UNSENT = 256 * 1024
_CHUNK = 64 * 1024
_LAST_S = 0.5
_RESTS_S = 0.5
