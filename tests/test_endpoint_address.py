"""Proves that endpoints at an address are found without a store, by those who know the secret and by nobody else."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import ranks
from penstock import endpoint, errors
from penstock.runtime import door
from penstock.runtime.door import Address, Door

# Nothing of torch's store.
_ALONE = {"MASTER_ADDR": None, "MASTER_PORT": None, "RANK": None, "WORLD_SIZE": None}


def _free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return f"127.0.0.1:{found.getsockname()[1]}"


@pytest.mark.parametrize("medium", [{"PENSTOCK_SHM": "0"}, {}])
def test_without_a_store(medium: dict[str, str]) -> None:
    """A server and two clients with nothing but an address and a secret; a second server takes the place of the first."""
    of_rank = {rank: {"WHO": str(rank)} for rank in range(3)}
    ranks.run(_alone, count=3, env={**_ALONE, **medium}, env_of_rank=of_rank, args=(_free_address(),))


def _alone(address: str) -> None:
    who = int(os.environ["WHO"])
    if who == 0:
        for life in range(2):
            left, seen = threading.Semaphore(0), list[int]()
            pushes = {
                "data": lambda call, seen=seen: seen.append(int(call.data[0])),
                "bye": lambda _, left=left: left.release(),
            }
            with endpoint.serve(
                "far", pushes=pushes, pulls={"w": np.full(300_000, life, np.uint8)}, address=address, secret="of all"
            ):
                for _ in range(2):
                    assert left.acquire(timeout=60)
            assert sorted(seen) == [1, 2]
        return
    for life in range(2):
        client = endpoint.connect("far", address=address, secret=b"of all", timeout_s=30)
        assert client.pull("w").wait()[-1] == life
        client.push("data", np.full(100_000, who, np.uint8)).wait()
        client.push("bye", None).wait()
        with contextlib.suppress(errors.Closed):
            while True:  # until the server closes
                client.pull("w").wait()
        client.close()


def test_a_server_in_another_life_of_the_job() -> None:
    """It is not waited for in vain: the error names both lives."""
    of_rank = {0: {"WHO": "0"}, 1: {"WHO": "1", "TORCHELASTIC_RESTART_COUNT": "1"}}
    with ranks.Ranks(_in_another_life, count=2, env=_ALONE, env_of_rank=of_rank, args=(_free_address(),)) as job:
        [client] = job.outcomes(of=[1], timeout_s=60, grace_s=None)
    assert client.ok, str(client)


def _in_another_life(address: str) -> None:
    if os.environ["WHO"] == "0":
        with endpoint.serve("far", address=address, secret="of all", requests={"x": bytes}):
            threading.Event().wait()
    with pytest.raises(errors.Refused, match="life 0 of the job, and this process in life 1"):
        endpoint.connect("far", address=address, secret=b"of all", timeout_s=30)


def test_a_fork_amid_an_exchange() -> None:
    """A child that is forked while a client comes in has no copy of its connection: if the server died, the client would wait for
    the child."""
    at = Address.parse(_free_address())
    opened = Door(at, b"secret", lambda message, key: {})
    try:
        with socket.create_connection((at.host, at.port), 20) as guest:
            guest.sendall(door._GREETING + bytes(door._NONCE))
            assert guest.recv(2 * door._NONCE, socket.MSG_WAITALL)  # the server waits for the client's proof
            if (child := os.fork()) == 0:
                os._exit(_connections_of(guest.getsockname()))
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert _connections_of(guest.getsockname()) == 1, "the server itself has one"
    finally:
        opened.close()


def _connections_of(peer: Any) -> int:
    """How many sockets of this process are connected to it."""
    count = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(number))) as found:
            count += found.getpeername() == peer
    return count


def test_a_name_that_no_server_looks_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's look-up of a name has no time-out; `connect` has one all the same, and says what took so long."""
    answers = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [answers.wait(60)][:0])
    try:
        began = time.monotonic()
        with pytest.raises(errors.Timeout, match=r"the address of far\.example was not found within"):
            door.enter(Address("far.example", 4000), b"secret", {}, began + 1)
        assert time.monotonic() - began < 5
    finally:
        answers.set()


def test_a_name_with_several_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address that drops what comes takes its share of the time, not all of it; the next one answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.create_server(("127.0.0.1", 0)) as server:
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        given = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", each.getsockname()) for each in (full, server)]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: given)
        connected = door._connect(Address("two.example", 4000), 2.0)
        assert connected.getpeername() == server.getsockname()
        left_s = connected.gettimeout()
        assert left_s is not None and left_s > 0.5, "the first address has taken all of the time"
        for each in (connected, *fillers):
            each.close()


def test_what_is_refused() -> None:
    """Another secret, another name, no secret, an address that cannot be one: an error that says what to do."""
    ranks.run(_refused, count=2, env=_ALONE, env_of_rank={0: {"WHO": "0"}, 1: {"WHO": "1"}}, args=(_free_address(),))


def _refused(address: str) -> None:
    if os.environ["WHO"] == "0":
        done = threading.Event()
        with endpoint.serve("guarded", pushes={"bye": lambda _: done.set()}, address=address, secret="right"):
            with pytest.raises(errors.Config, match="served by this very process"):
                endpoint.connect("guarded", address=address, secret="right")
            with pytest.raises(errors.Config, match="nothing can listen at"):
                endpoint.serve("guarded", address=address, secret="right")
            assert done.wait(60)
        return
    connect: Any = lambda name="guarded", **more: endpoint.connect(name, timeout_s=20, **more)  # noqa: E731
    for more, kind, says in [
        ({"address": address, "secret": "wrong"}, errors.Refused, "has another secret"),
        (
            {"address": address, "secret": "right", "name": "other"},
            errors.Refused,
            "this is endpoint guarded, and not other",
        ),
        ({"address": address}, errors.Config, "needs a secret: give secret=, or set PENSTOCK_SECRET"),
        ({"address": "here", "secret": "x"}, errors.Config, 'give "host:port"'),
        ({"address": "127.0.0.1:0", "secret": "x"}, errors.Config, 'give "host:port"'),
        ({"secret": "x"}, errors.Config, "secret= goes with address="),
        ({"address": address, "secret": "x", "store": object()}, errors.Config, "and not both"),
        ({}, errors.Config, "or pass store="),
    ]:
        with pytest.raises(kind, match=says):
            connect(**more)
    with pytest.raises(errors.Timeout, match=r"nobody answers at 127\.0\.0\.1:1 .*Does a process serve"):
        endpoint.connect("guarded", address="127.0.0.1:1", secret="x", timeout_s=0.2)
    with pytest.raises(errors.Config, match="name the address of this host"):
        endpoint.serve("guarded", address="0.0.0.0:4000", secret="x")
    with connect(address=address, secret="right") as client:
        client.push("bye", None).wait()


# ---------------------------------------------------------------------------------------------------- at the door itself

_SECRET = b"of the test"


@contextlib.contextmanager
def _door() -> Iterator[tuple[Address, list[dict[str, Any]]]]:
    """A door, and what those have said that it let in."""
    address, let_in = Address.parse(_free_address()), list[dict[str, Any]]()

    def admit(message: dict[str, Any], _: bytes) -> dict[str, Any]:
        let_in.append(message)
        return {"id": len(let_in)}

    opened = Door(address, _SECRET, admit)
    try:
        yield address, let_in
    finally:
        opened.close()


def _enter(address: Address) -> dict[str, Any]:
    return door.enter(address, _SECRET, {"contact": "me"}, time.monotonic() + 20)[0]


def _begin(address: Address) -> tuple[socket.socket, bytes, bytes]:
    """A guest that has heard the server's proof: its connection, the greeting, and the answer."""
    guest = socket.create_connection((address.host, address.port), 10)
    greeting = door._GREETING + os.urandom(door._NONCE)
    guest.sendall(greeting)
    answer = guest.recv(2 * door._NONCE, socket.MSG_WAITALL)
    assert len(answer) == 2 * door._NONCE
    return guest, greeting, answer


def test_nobody_comes_in_without_the_secret() -> None:
    """Noise, a reflected proof, a recorded one, a long message without a proof: each connection ends, and nobody is let in."""
    with _door() as (address, let_in):
        recorded = bytearray()
        guest, greeting, answer = _begin(address)
        exchange = door._Exchange(_SECRET, greeting[len(door._GREETING) :], answer[: door._NONCE])
        recorded += exchange.proof("client")
        guest.close()
        for said in (
            answer[door._NONCE :],  # the server's own proof
            bytes(recorded),
            os.urandom(door._NONCE),
            os.urandom(door._NONCE) + struct.pack("!I", 1 << 31) + b"x" * 100_000,
        ):
            guest, _, _ = _begin(address)
            with guest, contextlib.suppress(ConnectionError):
                guest.sendall(said)
                assert guest.recv(1) == b""
        with socket.create_connection((address.host, address.port), 10) as noise, contextlib.suppress(ConnectionError):
            noise.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"x" * 100)
            assert noise.recv(1) == b""
        assert let_in == []
        assert _enter(address) == {"id": 1} and let_in == [{"contact": "me"}]


def test_a_forked_child_holds_no_door_open() -> None:
    """The port is free when the server is gone, although a child that was forked before lives on."""
    ranks.run(_forks, count=1, env=_ALONE, args=(_free_address(),))


def _forks(address: str) -> None:
    lives, ends = os.pipe()
    heard, says = os.pipe()
    server = os.fork()
    if server == 0:
        kept = Door(Address.parse(address), _SECRET, lambda message, key: message)
        if os.fork() == 0:
            os.close(ends)
            os.write(says, b"x")
            os.read(lives, 1)  # until the test is over
            os._exit(0)
        assert kept is not None
        os.read(heard, 1)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(server, 0)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((Address.parse(address).host, Address.parse(address).port), 10)
    os.close(ends)


@pytest.mark.parametrize("data", [b"[1]", b"{", b'"x"', b"\xff"])
def test_a_client_that_says_what_none_should(data: bytes) -> None:
    """One that knows the secret and sends no object, or too much, or with a wrong MAC, is let go of; others come in."""
    with _door() as (address, let_in):
        for length, mac in ((len(data), None), (1 << 30, None), (len(data), b"\0" * 32)):
            guest, greeting, answer = _begin(address)
            exchange = door._Exchange(_SECRET, greeting[len(door._GREETING) :], answer[: door._NONCE])
            with guest, contextlib.suppress(ConnectionError):
                guest.sendall(exchange.proof("client") + struct.pack("!I", length) + data)
                guest.sendall(mac or exchange._mac("client's", data))
                assert guest.recv(1) == b""
        assert let_in == [] and _enter(address) == {"id": 1}


def test_silent_guests_keep_nobody_out() -> None:
    """Four times as many connections as may be about it, none of which says anything, and which come back when they are closed: a
    client comes in beside them, in much less than the time that they have."""
    stops = threading.Event()
    with _door() as (address, let_in):

        def come_back() -> None:
            while not stops.wait(0.3):
                with contextlib.suppress(OSError), socket.create_connection((address.host, address.port), 10) as guest:
                    guest.settimeout(0.1)
                    while not stops.is_set():
                        with contextlib.suppress(TimeoutError):
                            if not guest.recv(1):
                                break

        guests = [threading.Thread(target=come_back) for _ in range(4 * door._MOST_GUESTS)]
        for guest in guests:
            guest.start()
        try:
            for number in range(1, 6):
                assert _enter(address) == {"id": number}
        finally:
            stops.set()
            for guest in guests:
                guest.join()
        assert len(let_in) == 5


def test_threads_may_be_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where none can be made for a guest, that one is turned away, and the next comes in."""
    start, failed = threading.Thread.start, list[str]()

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "penstock-guest" and not failed:
            failed.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with _door() as (address, _):
        assert _enter(address) == {"id": 1} and failed


def test_a_server_that_fails_after_its_door_has_opened() -> None:
    """The second of its handlers' threads cannot be made: nothing of it stays, and the next server has the same address."""
    ranks.run(_fails_late, count=1, env={**_ALONE, "PENSTOCK_SHM": "0"}, args=(_free_address(),))


def _fails_late(address: str) -> None:
    start = threading.Thread.start
    before = set(threading.enumerate())

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "penstock-handler-1":
            with socket.create_connection(("127.0.0.1", Address.parse(address).port)):  # clients can come in already
                raise RuntimeError("can't start new thread")
        start(thread)

    threading.Thread.start = refuse  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="can't start new thread"):
        endpoint.serve("far", pulls={"w": b"0"}, address=address, secret="of all", threads=2)
    threading.Thread.start = start  # type: ignore[method-assign]
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive(), thread
    endpoint.serve("far", pulls={"w": b"1"}, address=address, secret="of all").close()


@pytest.mark.parametrize("host", ["0", "0.0.0.0", "0.0", "::", "0:0:0:0:0:0:0:0"])
def test_all_interfaces_are_no_address(host: str) -> None:
    """However it is written."""
    with pytest.raises(errors.Config, match="name the address of this host at which clients reach it"):
        door.Door(Address(host, 4000), b"secret", lambda *_: {})


def test_a_host_that_is_no_name() -> None:
    """It is named in the error."""
    with pytest.raises(errors.Config, match=r"a\.\.b"):
        door.enter(Address("a..b", 4000), b"secret", {}, time.monotonic() + 1)
    with pytest.raises(errors.Config, match=r"a\.\.b"):
        door.Door(Address("a..b", 4000), b"secret", lambda *_: {})


def test_wrong_secrets_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever can connect cannot fill the log."""
    with _door() as (address, _):
        for _ in range(20):
            with pytest.raises(errors.Refused):
                door.enter(address, b"another", {}, time.monotonic() + 10)
        greeting = door._GREETING + bytes(door._NONCE)
        for _ in range(20):
            with socket.create_connection((address.host, address.port), 10) as guest:
                guest.sendall(greeting + bytes(door._NONCE))
                while guest.recv(100):
                    pass
    assert sum("does not know the secret" in line for line in caplog.messages) == 1


def test_a_server_that_only_claims_to_be_one() -> None:
    """A client proves nothing to who does not know the secret."""
    with socket.create_server(("127.0.0.1", 0)) as false:
        heard = list[bytes]()

        def serve() -> None:
            guest, _ = false.accept()
            with guest:
                guest.recv(1000)
                guest.sendall(os.urandom(2 * door._NONCE))
                heard.append(guest.recv(1000))

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(errors.Refused, match="is no server of an endpoint, or has another secret"):
            _enter(Address("127.0.0.1", false.getsockname()[1]))
        thread.join(10)
        assert heard == [b""]


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("10.0.0.1:4000", "10.0.0.1", 4000), ("[::1]:80", "::1", 80), ("a.b:65535", "a.b", 65535)],
)
def test_addresses(text: str, host: str, port: int) -> None:
    """As they are written."""
    assert Address.parse(text) == Address(host, port) and str(Address.parse(text)) == text
