"""Servers, and clients that ask them for something at any time. They meet through a store, as ranks do, or at an address
(`penstock.runtime.door`).

A server writes into the store how to reach it, and looks there every `_LOOK_S` for clients. A client leaves its own contact; the
server answers with the id and the secret of a group of two, which both join (`_core.EndpointServer.accept`). From then on the
store is not needed. Nothing here imports torch.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import inspect
import json
import logging
import os
import secrets
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock import _core
from penstock.errors import Closed, PenstockError, Refused
from penstock.errors import Config as ConfigError
from penstock.errors import Timeout as TimeoutError_
from penstock.runtime import config, contacts, process, urgency
from penstock.runtime.door import Address, Door, enter
from penstock.runtime.endpoint_limits import MOST, Limits, check_count, check_name
from penstock.runtime.spans import array, span
from penstock.runtime.store import Keys, StoreError, base

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Client", "Incoming", "Limits", "Server", "Whole", "Work"]

log = logging.getLogger("penstock")


@dataclasses.dataclass(frozen=True)
class Incoming:
    """A call, as a handler gets it."""

    client: int
    """The number of the client at this server, from 0 on as they come."""
    who: str
    """The client, for messages: rank, address and host."""
    name: str
    data: npt.NDArray[np.uint8]
    """What came with a request or push. The handler may keep it and write to it; no one else does. Empty for a pull."""
    priority: int
    """As `penstock.priority` counts."""


Handler = Callable[[Incoming], Any]


@dataclasses.dataclass(frozen=True)
class Whole:
    """A handler that gets the engine's call, and has it answered by somebody else, when it is time: its thread does not wait."""

    take: Callable[[_core.EndpointCall], None]

    def __call__(self, call: _core.EndpointCall) -> None:
        self.take(call)


class Server:
    """Serves requests, pushes and pulls under names; `penstock.endpoint.serve` makes it. A context manager that closes it.

    Handlers run on threads of the server's, the most urgent call first. Each gets an `Incoming`. What a handler raises fails that
    one call, with `penstock.errors.HandlerFailed`; the server goes on. When a client ends or dies, its calls and their memory are
    let go of; the others notice nothing.
    """

    def __init__(
        self,
        name: str,
        store: Any,
        rank: int,
        *,
        requests: Mapping[str, Handler],
        pushes: Mapping[str, Handler | Whole],
        pulls: Mapping[str, Any],
        limits: Limits,
        threads: int,
        secret: bytes | None = None,
    ) -> None:
        """``store`` may be an `Address`, at which clients come in with the secret."""
        _core.check_fork()
        check_name(name)
        check_count(f"threads of endpoint {name}", threads, 1, 1 << 16)
        self.name = name
        settings = config.read()
        self._handlers: dict[tuple[str, str], Handler | Whole] = {}
        self._removed: dict[tuple[str, str], Handler | Whole] = {}
        """For calls that were accepted before."""
        self._core = _core.EndpointServer(
            name,
            calls=limits.calls,
            request_bytes=limits.request_bytes,
            push_bytes=limits.push_bytes,
            in_flight_bytes=limits.in_flight_bytes,
        )
        for kind, served in (("request", requests), ("push", pushes), ("pull", pulls)):
            for each, handler in served.items():
                self._serve(kind, each, handler)
        self._engine = _acquire(settings, store, rank)
        self._process = os.getpid()
        self._is_closed = False
        self._closing = threading.Event()
        self._secret = settings.job_secret()
        self._ids = iter(range(0))
        self._door: Door | None = None
        self._threads: list[threading.Thread] = []
        try:
            if isinstance(store, Address):
                self._door = Door(store, _key(store, secret, self._secret), self._let_in)
            else:
                # Of its own: a call of another thread that waits in the store must not hold this up.
                self._keys = _keys(_clone(store), name)
                with _store_errors(name):
                    self._turn = str(self._keys.add("turns", 1))
                    current = {"turn": self._turn, "contact": self._engine.core.contact()}
                    self._keys.set("current", json.dumps(current))
                self._threads.append(threading.Thread(target=self._accept, name="penstock-accept", daemon=True))
            self._threads += [
                threading.Thread(target=self._work, name=f"penstock-handler-{number}", daemon=True)
                for number in range(threads)
            ]
            for thread in self._threads:
                thread.start()
        except BaseException:
            self._closing.set()
            if self._door is not None:
                self._door.close()
            # Handlers that run get no call any more, and end.
            self._core.close(0)
            self._engine.release()
            raise
        _alive.add(self)

    def on_request(self, name: str, handler: Handler) -> None:
        """From now on serve requests of this name: the handler returns the reply, a buffer (see `Client.request`) or None.
        A name that ends with a slash stands for all that begin with it."""
        self._serve("request", name, handler)

    def on_push(self, name: str, handler: Handler | Whole) -> None:
        """From now on serve pushes of this name. When the handler has returned None, the client's push has ended."""
        self._serve("push", name, handler)

    def on_pull(self, name: str, source: Any) -> None:
        """From now on serve pulls of this name: ``source`` is a buffer, or a handler that returns one. It is sent from where it
        lies, after the handler has returned: what may change meanwhile must be copied."""
        self._serve("pull", name, source)

    def remove(self, kind: str, name: str) -> None:
        """Serve ``kind`` ("request", "push" or "pull") of this name no longer. Calls that were accepted go on."""
        self._core.serve(kind, name, False)
        if handler := self._handlers.get((kind, name)):
            # In this order: a call that was accepted finds it in one of the two.
            self._removed[kind, name] = handler
            self._handlers.pop((kind, name), None)

    def stats(self) -> dict[str, int]:
        """Its ``clients``, their ``calls`` that have not ended, the bytes of these that are here (``held_bytes``), and how many
        calls handlers have ``taken`` so far.

        Raises:
            penstock.errors.Closed: it is closed.
        """
        found = self._core.stats()
        if found is None:
            raise Closed(f"endpoint {self.name} is closed")
        return found

    def close(self, timeout_s: float = 5.0) -> None:
        """End the server: no handler gets another call, clients are told, and what handlers work on is still answered. Blocks
        until all clients have left; those that have not after ``timeout_s`` are cut off. Later calls do nothing.

        Raises:
            penstock.errors.Config: a handler has called it, for which it would wait.
        """
        if self._is_closed or self._process != os.getpid():  # a fork has nothing of it
            return
        if threading.current_thread() in self._threads:
            raise ConfigError(
                f"endpoint {self.name}: a handler cannot close its server, which waits for it: close it on another thread"
            )
        self._is_closed = True
        _alive.discard(self)
        self._closing.set()
        try:
            until = time.monotonic() + timeout_s
            # No client is accepted any more.
            if self._door is not None:
                self._door.close()
            else:
                with contextlib.suppress(StoreError):  # it may have ended before
                    self._keys.set(f"{self._turn}/closed", "1")
                self._threads[0].join(_JOIN_S)
            self._core.close(timeout_s).wait()
            for thread in self._threads:
                if thread is not threading.current_thread():
                    thread.join(max(until - time.monotonic(), _JOIN_S))
        finally:
            self._engine.release()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self, kind: str, name: str, handler: Any) -> None:
        check_name(name)
        if not callable(handler):
            if kind != "pull":
                raise ConfigError(
                    f"the handler of {kind} {name!r} of endpoint {self.name} cannot be called: {handler!r}"
                )
            span(handler, f"what pulls of {name!r} get")  # says now what is wrong with it
            buffer, handler = handler, lambda _: buffer
        elif inspect.iscoroutinefunction(handler):
            raise ConfigError(
                f"the handler of {kind} {name!r} of endpoint {self.name} is a coroutine function: let it call asyncio.run"
            )
        self._handlers[kind, name] = handler
        self._core.serve(kind, name, True)

    def _work(self) -> None:
        """The loop of a handler's thread. It keeps nothing of a call while it waits for the next."""
        while (call := self._core.next()) is not None:
            self._handle(call)
            del call

    def _handle(self, call: _core.EndpointCall) -> None:
        what = f"{call.kind} {call.name!r}"
        try:
            handler = self._handler(call.kind, call.name)
            if isinstance(handler, Whole):
                return handler(call)
            urgent = call.priority + urgency.USUAL
            reply = handler(Incoming(call.client, call.who, call.name, array(call.body()), urgent))
            if call.kind == "push" and reply is not None:
                raise TypeError(f"the handler of a push returns None, and not {type(reply).__name__}")
            call.answer(*span(reply, f"the reply to {what}"))
        except BaseException as error:
            call.fail(_told(error))
            # What a filter of the script's raises must not end this thread either.
            with contextlib.suppress(BaseException):
                log.exception("endpoint %s: the handler of %s of %s has failed", self.name, what, call.who)

    def _handler(self, kind: str, name: str) -> Handler | Whole:
        """That of the name, or else of the longest beginning of it that ends with a slash. Where there is none any more, since
        the call was accepted before, the one that was removed."""
        for handlers in (self._handlers, self._removed):
            begins = name
            while begins:
                if handler := handlers.get((kind, begins)):
                    return handler
                begins = begins[: begins[:-1].rfind("/") + 1]
        raise LookupError(f"nothing serves {kind} {name!r} any more")

    def _accept(self) -> None:
        """Look for clients, and connect with them."""
        seen = 0
        # A client counts itself and then leaves its contact; if it dies between the two, it has none.
        pending: dict[int, float] = {}
        try:
            while not self._closing.wait(_LOOK_S):
                # Others may count what they like.
                count = min(self._keys.add(f"{self._turn}/clients", 0), seen + max(0, _MOST_PENDING - len(pending)))
                pending.update((number, time.monotonic() + _CONTACT_S) for number in range(seen + 1, count + 1))
                seen = count
                for number in [number for number in pending if self._keys.check([f"{self._turn}/client/{number}"])]:
                    del pending[number]
                    self._connect(number)
                pending = {number: by for number, by in pending.items() if time.monotonic() < by}
        except StoreError as error:
            if not self._closing.is_set():
                log.warning("endpoint %s takes no more clients, since its store is gone: %s", self.name, error)

    def _connect(self, number: int) -> None:
        key = f"{self._turn}/client/{number}"
        contact = self._keys.get(key).decode(errors="replace")
        with contextlib.suppress(StoreError):
            self._keys.delete_key(key)
        secret = self._secret or secrets.token_bytes(16)
        answer = self._admit(contact, secret)
        self._keys.set(
            f"{self._turn}/answer/{number}",
            json.dumps({**answer, "secret": None if self._secret else secret.hex()}),
        )

    def _let_in(self, message: dict[str, Any], secret: bytes) -> dict[str, Any]:
        """A client at the door has proved that it knows the secret."""
        if message.get("name") != self.name:
            return {"refused": f"this is endpoint {self.name}, and not {message.get('name')}"}
        return {**self._admit(str(message.get("contact")), secret), "contact": self._engine.core.contact()}

    def _admit(self, contact: str, secret: bytes) -> dict[str, Any]:
        """Connect with a client; returns what it must know for that, or why it is refused."""
        if (drawn := next(self._ids, None)) is None:
            # Engines remember consecutive ids of groups that they have left as one range.
            first = secrets.randbits(43) << 20
            self._ids = iter(range(first + 2, first + (1 << 20)))
            drawn = first + 1
        try:
            self._core.accept(
                self._engine.core,
                id=drawn,
                generation=self._engine.generation,
                members=(self._engine.core.contact(), contact),
                secret=secret,
                name=f"endpoint {self.name}",
            )
        except (ValueError, PenstockError) as error:  # a contact that this version cannot read, for one
            return {"refused": str(error)}
        return {"id": drawn, "generation": self._engine.generation}


class Client:
    """A connection to a server; `penstock.endpoint.connect` makes it. A context manager that closes it. Any thread may use it.

    Calls return a `Work` at once. They take the priority of the block of `penstock.priority` that the thread is in, whose value
    changes it: for a call that waits at the client its place there, for others what has not left. One call
    fails if the server does not serve it, if it is too large, if its handler raises or if it takes too long. If the server dies,
    all calls fail with `penstock.errors.PeerLost`, and a new connection is needed. A connection that breaks and comes back is no
    failure: what was under way is resumed.

    A buffer is a CPU tensor, a NumPy array, or anything with Python's buffer protocol, contiguous in memory. Up to 8 KiB are
    copied; longer ones must not change before the call has ended.
    """

    def __init__(
        self,
        name: str,
        store: Any,
        rank: int,
        *,
        timeout_s: float,
        call_timeout_s: float,
        secret: bytes | None = None,
    ) -> None:
        """``store`` may be an `Address`, at which the server lets in who knows the secret."""
        _core.check_fork()
        check_name(name)
        self.name = name
        self._timeout_s = call_timeout_s
        settings = config.read()
        self._engine = _acquire(settings, store, rank)
        self._process = os.getpid()
        self._is_closed = True
        try:
            until, attempt_s = time.monotonic() + timeout_s, _ATTEMPT_S
            while not self._connect(store, secret, settings.job_secret(), until, attempt_s):
                attempt_s *= 2
        except BaseException:
            self._engine.release()
            raise
        self._is_closed = False
        _alive.add(self)

    def _connect(self, store: Any, secret: bytes | None, of_job: bytes | None, until: float, attempt_s: float) -> bool:
        """Find the server and connect with it. False: it has answered, and then could not be reached: look again."""
        left_s = max(0.0, until - time.monotonic())
        if isinstance(store, Address):
            contact, answer, secret = self._enter(store, _key(store, secret, of_job), left_s)
        else:
            with _store_errors(self.name):
                contact, answer = self._meet(_keys(_clone(store), self.name), left_s)
            secret = _secret(self.name, answer["secret"], of_job)
        if (theirs := answer["generation"]) != (ours := self._engine.generation):
            raise Refused(
                f"endpoint {self.name} ({_described(contact)}) is in life {theirs} of the job, and this process in life {ours}: "
                "they cannot connect. Start the server anew with each life (torchrun's restarts, or elastic training)"
            )
        left_s = max(0.0, until - time.monotonic())
        self._core, welcome = _core.EndpointClient.connect(
            self._engine.core,
            id=answer["id"],
            generation=answer["generation"],
            members=(contact, self._engine.core.contact()),
            secret=secret,
            name=f"endpoint {self.name}",
            server=f"endpoint {self.name} ({_described(contact)})",
            timeout_s=min(left_s, attempt_s),
        )
        try:
            welcome.wait()
        except BaseException as error:
            self._core.close(0)
            if isinstance(error, TimeoutError_) and attempt_s < left_s:
                return False
            raise
        return True

    def __del__(self) -> None:
        if not getattr(self, "_is_closed", True) and self._process == os.getpid():
            warnings.warn(
                f"a client of endpoint {self.name} was not closed", ResourceWarning, source=self, stacklevel=2
            )

    def request(
        self, name: str, data: Any = None, *, into: Any = None, most: int = 1 << 30, timeout_s: float | None = None
    ) -> Work:
        """Send ``data`` to the handler of ``name``; `Work.wait` returns its reply, an array of bytes.

        Args:
            data: a buffer, or None.
            into: a buffer that the reply fills, exactly; `Work.wait` returns it.
            most: without ``into``, the most bytes of reply that are taken.
            timeout_s: after this long the call fails; by default the time of `connect`. A transfer that has begun is finished
                first.
        """
        return self._ask("request", name, data, into, most, timeout_s)

    def push(self, name: str, data: Any, *, timeout_s: float | None = None) -> Work:
        """Send ``data`` to the handler of ``name``. It has ended well when the handler has returned."""
        return self._ask("push", name, data, None, 0, timeout_s)

    def pull(self, name: str, into: Any = None, *, most: int = 1 << 36, timeout_s: float | None = None) -> Work:
        """Receive what the server serves under ``name``; the arguments are those of `request`."""
        return self._ask("pull", name, None, into, most, timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """End the connection. Blocks until the calls have ended; those that have not after ``timeout_s`` fail with
        `penstock.errors.Closed`. Later calls do nothing."""
        if self._is_closed or self._process != os.getpid():  # a fork has nothing of it
            return
        self._is_closed = True
        _alive.discard(self)
        try:
            self._core.close(timeout_s).wait()
        finally:
            self._engine.release()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Calls of a block that has raised may wait for what it was to do.
        self.close() if kind is None else self.close(0)

    def _ask(self, kind: str, name: str, data: Any, into: Any, most: int, timeout_s: float | None) -> Work:
        check_name(name)
        what = f"{kind} {name!r} of endpoint {self.name}"
        if self._is_closed:
            raise Closed(f"{what}: the client is closed")
        check_count(f"{what}: most", most, 0, MOST)
        body, length, kept = span(data, f"the data of {what}")
        place = None
        if into is not None:
            *address, kept_into = span(into, f"the place for the reply of {what}", is_written=True)
            place, kept = (address[0], address[1]), (kept, kept_into)
        block = urgency.current()
        number = urgency.USUAL if block is None else block.number
        work = self._core.ask(
            kind,
            name,
            body=body,
            length=length,
            into=place,
            room=most,
            priority=urgency.engine_priority(number),
            timeout_s=self._timeout_s if timeout_s is None else timeout_s,
            keep=kept,
        )
        if block is not None:
            block.add(_Caller(self), work.without_reply(), number)
        return Work(self, work, what, into, is_push=kind == "push")

    def _meet(self, keys: Keys, timeout_s: float) -> tuple[str, dict[str, Any]]:
        """The server's contact and its answer, from the store."""
        until = time.monotonic() + timeout_s
        turn, contact, key, pause_s = "", "", "", _SHORTEST_PAUSE_S
        while True:
            if keys.check(["current"]):
                current = json.loads(keys.get("current"))
                if current["turn"] != turn and not keys.check([f"{current['turn']}/closed"]):
                    # The first server, or another in its place.
                    turn, contact = current["turn"], current["contact"]
                    self._check_other(contact)
                    number = keys.add(f"{turn}/clients", 1)
                    keys.set(f"{turn}/client/{number}", self._engine.core.contact())
                    key, pause_s = f"{turn}/answer/{number}", _SHORTEST_PAUSE_S
            if key and keys.check([key]):
                answer = json.loads(keys.get(key))
                with contextlib.suppress(StoreError):
                    keys.delete_key(key)
                self._check_answer(contact, answer)
                return contact, answer
            if time.monotonic() > until:
                why = (
                    "no process serves it. Does one call penstock.endpoint.serve with this name, in the same life of the job and "
                    "over the same store?"
                )
                if turn:
                    why = f"its server, {_described(contact)}, does not answer. Does it run?"
                raise TimeoutError_(f"Timed out after {timeout_s:.1f} s: cannot connect to endpoint {self.name}: {why}")
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LOOK_S)

    def _enter(self, address: Address, key: bytes, timeout_s: float) -> tuple[str, dict[str, Any], bytes]:
        """The server's contact, its answer and the secret of the connection, from the server's door."""
        own = self._engine.core.contact()
        answer, secret = enter(address, key, {"name": self.name, "contact": own}, time.monotonic() + timeout_s)
        self._check_answer(str(address), answer)
        contact = str(answer["contact"])
        self._check_other(contact)
        return contact, answer, secret

    def _check_other(self, contact: str) -> None:
        if contacts.parse(contact).node == contacts.parse(self._engine.core.contact()).node:
            raise ConfigError(
                f"endpoint {self.name} is served by this very process: call its handlers, or connect from another one"
            )

    def _check_answer(self, server: str, answer: dict[str, Any]) -> None:
        if "refused" in answer:
            who = _described(server) if " " in server else server
            raise Refused(f"endpoint {self.name} ({who}) refuses this process: {answer['refused']}")


class _Caller:
    """A client, for a block of `penstock.priority` that may outlive it."""

    def __init__(self, client: Client) -> None:
        self._client = weakref.ref(client)

    def reprioritise(self, operation: Any, priority: int, /) -> None:
        if (client := self._client()) is not None:
            client._core.reprioritise(operation, priority)


class Work:
    """A call that was made."""

    def __init__(self, client: Client, core: _core.EndpointWork, what: str, into: Any, *, is_push: bool) -> None:
        # Without its client it would end.
        self._client: Client | None = client
        self._core = core
        self._what = what
        self._into = into
        self._is_push = is_push

    def wait(self, timeout_s: float | None = None) -> Any:
        """Block without the GIL until the call has ended.

        Returns: the reply: ``into`` if that was given, else an array of bytes, which may be written to; None for a push.

        Raises:
            penstock.errors.Timeout: it took longer than its own time-out; or it has not ended within ``timeout_s``, and goes on.
            penstock.errors.Config: the server does not serve this; or data or reply is larger than the other side takes.
            penstock.errors.HandlerFailed: the handler has raised.
            penstock.errors.PeerLost: the server is gone. Whether it has done the call is not known.
            penstock.errors.Closed: the client or the server was closed.
        """
        if not self._core.wait(timeout_s):
            raise TimeoutError_(f"{self._what} has not ended within {timeout_s} s. It goes on: wait again")
        self._client = None
        if self._is_push:
            return None
        return array(self._core.reply()) if self._into is None else self._into

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._core.done()

    def on_done(self, callback: Callable[[Work], object]) -> None:
        """Call ``callback(self)`` on another thread once it has ended."""
        self._core.on_done(lambda: callback(self))


# ----------------------------------------------------------------------------------------------------------- helpers


def _acquire(settings: config.Settings, store: Any, rank: int) -> process.Engine:
    engine = process.Engine.acquire(settings, store, rank)
    _register()
    return engine


def _keys(store: Any, name: str) -> Keys:
    """The keys of an endpoint, in this life of the job; the same in every process, whatever prefix its store has."""
    return Keys(f"penstock/endpoint/{process.life()}/{name}", base(store))


def _clone(store: Any) -> Any:
    """A store with a connection of its own, if it can have one."""
    try:
        return base(store).clone()
    except (AttributeError, RuntimeError):
        return store


@contextlib.contextmanager
def _store_errors(name: str) -> Iterator[None]:
    """`StoreError`s in here are raised as `penstock.errors.Config`."""
    try:
        yield
    except StoreError as error:
        raise ConfigError(
            f"the store through which endpoint {name} is found cannot be used: {str(error).splitlines()[0]}. Check MASTER_ADDR "
            "and MASTER_PORT, and that the process that serves the store is running"
        ) from error


def _secret(name: str, sent: str | None, own: bytes | None) -> bytes:
    """The secret of a connection: that of the job where it has one, or the one that the server has sent."""
    if (sent is None) == (own is None):
        here, there = ("no", "one") if own is None else ("one", "none")
        raise Refused(
            f"this process has {here} job secret and the server of endpoint {name} has {there}: set PENSTOCK_SECRET or "
            "PENSTOCK_SECRET_FILE for both"
        )
    return own if sent is None else bytes.fromhex(sent)  # type: ignore[return-value]


def _key(address: Address, given: bytes | None, of_job: bytes | None) -> bytes:
    """The secret that the two sides of a door must know."""
    if given is not None and not (isinstance(given, bytes) and given):
        raise ConfigError("a secret is a text or bytes, not empty")
    if not (key := given or of_job):
        raise ConfigError(
            f"an endpoint at an address ({address}) needs a secret: give secret=, or set PENSTOCK_SECRET or PENSTOCK_SECRET_FILE"
        )
    return key


def _described(contact: str) -> str:
    """A process, for messages."""
    _, rank, host, address = contacts.parse(contact)
    return f"rank {rank}, {address} on {host}"


def _told(error: BaseException) -> str:
    """An exception as a text that can be sent, whatever is in it."""
    try:
        text = f"{type(error).__name__}: {error}"
    except BaseException:  # of its own __str__
        text = type(error).__name__
    return text.encode(errors="backslashreplace").decode()


def _register() -> None:
    """Close what is open when the interpreter ends, before the engine does: that was registered earlier, and so runs later."""
    global _is_registered
    if not _is_registered:
        _is_registered = True
        atexit.register(_close_all)


def _close_all() -> None:
    open_ones = list(_alive)
    until = time.monotonic() + _AT_EXIT_S
    # All at the same time: one that waits for a call would keep the next ones waiting.
    for each in open_ones:
        each._core.close(_AT_EXIT_S)
    for each in open_ones:
        with contextlib.suppress(PenstockError):
            each.close(max(0.0, until - time.monotonic()))


_alive: weakref.WeakSet[Server | Client] = weakref.WeakSet()
# A fork has none of them, and ends none.
os.register_at_fork(after_in_child=_alive.clear)
_is_registered = False
# How often a server looks for clients, and a client for an answer: they wait for 25 ms on average. A look costs the store some
# 26 us (measured, over loopback).
_LOOK_S = 0.05
_SHORTEST_PAUSE_S = 0.001
# How long a client may take between two writes to the store. A guess: a process that is stopped for longer has other troubles.
_CONTACT_S = 5.0
# How long a client tries to reach a server that has answered, before it looks for the server again; then twice as long. A guess:
# longer than a connection takes on a bad network.
_ATTEMPT_S = 5.0
# Clients whose contact is looked for at a time.
_MOST_PENDING = 1024
# How long the end waits for a thread that has been told.
_JOIN_S = 0.5
_AT_EXIT_S = 2.0
