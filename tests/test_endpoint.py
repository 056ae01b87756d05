"""Proves that servers and clients exchange what they should over TCP and over memory, whatever goes wrong meanwhile."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pathlib
import random
import re
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import cuts
import forked
import penstock
import ranks
from penstock import endpoint, errors
from penstock.runtime import process

# Whether a message is copied, inlined, granted or a reference depends on these; one is odd, one larger than a frame.
SIZES = [0, 1, 8192, 8193, 32_769, 100_001, 5 << 20]
MEDIA = {"tcp": {"PENSTOCK_SHM": "0"}, "memory": {"PENSTOCK_SHM": "1"}}


def _pattern(seed: int, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Bytes that show whose they are."""
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


class Waits:
    """A server's own end: handlers of pushes called "bye" release it."""

    def __init__(self, clients: int) -> None:
        self._left = threading.Semaphore(0)
        self._clients = clients

    def bye(self, _: endpoint.Incoming) -> None:
        self._left.release()

    def wait(self) -> None:
        for _ in range(self._clients):
            assert self._left.acquire(timeout=60), "a client has not come to its end"


# -------------------------------------------------------------------------------------------------------- all goes well


@pytest.mark.parametrize("medium", MEDIA)
def test_calls_of_all_kinds_and_sizes(medium: str) -> None:
    """Requests, pushes and pulls of two clients at once bring the right bytes, into buffers of all kinds; the medium is the one
    that is meant."""
    for media in ranks.run(_all_kinds, count=3, env=MEDIA[medium])[1:]:
        assert media == [medium]


def _all_kinds() -> list[str]:
    rank = int(os.environ["RANK"])
    if rank == 0:
        waits, seen = Waits(2), dict[str, bytes]()

        def take(call: endpoint.Incoming) -> None:
            assert call.who.startswith("rank ")
            # A push that comes twice, or in the place of another, shows here.
            who, number = call.data[:2] if call.data.size > 1 else (0, 0)
            key = f"{call.client}/{call.data.size}/{who}.{number}"
            assert key not in seen, key
            seen[key] = call.data.tobytes()

        def reverse(call: endpoint.Incoming) -> Any:
            return call.data[::-1].copy()

        served = {str(size): torch.from_numpy(_pattern(size, size)) for size in SIZES}
        # A name that ends with a slash serves all that begin with it; the longest such name counts.
        trees = {tree: lambda call, tree=tree: f"{tree} has {call.name}".encode() for tree in ("tree/", "tree/a/")}
        with endpoint.serve(
            "all kinds", requests={"reverse": reverse, **trees}, pushes={"data": take, "bye": waits.bye}, pulls=served
        ) as server:
            server.on_pull("later", lambda call: bytes(f"for {call.client}", "ascii"))
            waits.wait()
            assert len(seen) == 2 * len(SIZES)
            assert server.stats()["held_bytes"] == 0
        return []
    with endpoint.connect("all kinds") as client:
        pushes = [client.push("data", _pattern(1000 * rank + size, size)) for size in SIZES]
        requests = [(size, client.request("reverse", bytes(_pattern(size, size)))) for size in SIZES[:-1]]
        pulls = []
        for size in SIZES:
            pulls.append((size, client.pull(str(size))))
            if size:
                pulls.append((size, client.pull(str(size), into=torch.empty(size, dtype=torch.uint8))))
                pulls.append((size, client.pull(str(size), into=bytearray(size))))
        for size, work in pulls:
            reply = work.wait()
            found = reply.numpy() if isinstance(reply, torch.Tensor) else np.array(memoryview(reply), np.uint8)
            assert np.array_equal(found, _pattern(size, size))
        for size, work in requests:
            assert np.array_equal(work.wait(), _pattern(size, size)[::-1])
        for work in pushes:
            assert work.wait() is None and work.done()
        assert bytes(client.pull("later").wait()) in (b"for 0", b"for 1")
        for name, tree in {"tree/b": "tree/", "tree//b": "tree/", "tree//": "tree/", "tree/a/b/": "tree/a/"}.items():
            assert bytes(client.request(name).wait()) == f"{tree} has {name}".encode()
        told = threading.Event()
        client.push("bye", None).on_done(lambda work: told.set())
        assert told.wait(10)

        return sorted({peer["medium"] for peer in process.engine().core.stats()["peers"]})


def test_urgent_calls_go_first() -> None:
    """Of pushes that wait at a client for a slow server, the most urgent one is taken first."""
    ranks.run(_urgent, count=2)


def _urgent() -> None:
    store = _store()
    if os.environ["RANK"] == "0":
        order, begun, may_go, waits = list[int](), threading.Event(), threading.Event(), Waits(1)

        def take(call: endpoint.Incoming) -> None:
            begun.set()
            assert may_go.wait(60)
            order.append(call.priority)

        limits = endpoint.Limits(calls=16, request_bytes=0, push_bytes=1 << 20, in_flight_bytes=1 << 20)
        pushes = {"data": take, "bye": waits.bye}
        with endpoint.serve(
            "urgent", pushes=pushes, requests={"order": lambda call: bytes(order)}, limits=limits
        ) as server:
            assert begun.wait(60)
            store.set("begun", "")
            # All wait: one with its bytes here, the others at the client.
            _until(lambda: server.stats()["calls"] == 5)
            may_go.set()
            waits.wait()
        return
    data = np.zeros(1 << 20, np.uint8)
    with endpoint.connect("urgent") as client:
        works = [client.push("data", data)]
        store.wait(["begun"])
        for priority in (200, 128, 0, 60):
            with penstock.priority(priority):
                works.append(client.push("data", data))
        for work in works:
            work.wait()
        assert list(client.request("order").wait()) == [128, 0, 60, 128, 200]
        client.push("bye", None).wait()


def test_a_call_that_waits_gets_another_priority() -> None:
    """Of calls that wait at a client, one that becomes urgent goes first, and one that becomes less urgent last."""
    ranks.run(_changes, count=2)


def _changes() -> None:
    store = _store()
    if os.environ["RANK"] == "0":
        order, begun, may_go, waits = list[int](), threading.Event(), threading.Event(), Waits(1)

        def take(call: endpoint.Incoming) -> None:
            begun.set()
            assert may_go.wait(60)
            order.append(int(call.data[0]))

        pushes = {"data": take, "bye": waits.bye}
        requests = {"order": lambda call: bytes(order)}
        with endpoint.serve("changes", pushes=pushes, requests=requests, limits=endpoint.Limits(calls=1)):
            assert begun.wait(60)
            store.set("begun", "")
            store.wait(["changed"])
            may_go.set()
            waits.wait()
        return
    with endpoint.connect("changes") as client:
        works = [client.push("data", bytes([0]))]
        store.wait(["begun"])
        blocks = []
        for number in range(1, 6):
            with penstock.priority(100) as block:
                works.append(client.push("data", bytes([number])))
            blocks.append(block)
        blocks[3].change(0)
        blocks[0].change(255)
        store.set("changed", "")
        for work in works:
            work.wait()
        blocks[0].change(3)
        assert list(client.request("order").wait()) == [0, 4, 2, 3, 5, 1]
        client.push("bye", None).wait()


def test_many_clients_come_and_go() -> None:
    """A server that has met hundreds of processes holds no more than one that has met a hundred."""
    held = ranks.run(_come_and_go, count=5, timeout_s=120)[0]
    assert 4 <= held < 140, held


def _come_and_go() -> int:
    rank, each = int(os.environ["RANK"]), 80
    if rank == 0:
        seen, waits = set[int](), Waits(4)

        def hello(call: endpoint.Incoming) -> bytes:
            seen.add(call.client)
            return call.data.tobytes()

        with endpoint.serve("popular", requests={"hello": hello}, pushes={"bye": waits.bye}) as server:
            waits.wait()
            _until(lambda: server.stats()["clients"] == 0)
            assert len(seen) == 4 * each
            return len(process.engine().core.stats()["peers"])
    for number in range(each):
        # Each is another process to the server: the engine ends with the client, and the next one has another key.
        with endpoint.connect("popular") as client:
            assert bytes(client.request("hello", f"{rank} {number}".encode()).wait()) == f"{rank} {number}".encode()
            if number == each - 1:
                client.push("bye", None).wait()
    return 0


def test_the_example(root: pathlib.Path) -> None:
    """docs/guide/endpoints.md: four ranks change and read the cache that a fifth serves."""
    command = [
        *forked.TORCHRUN,
        "--nproc-per-node=5",
        str(root / "examples" / "parameter_cache.py"),
        "--elements=10000",
    ]
    done = forked.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "40 changes of 4 workers: every parameter is 100" in done.stdout
    assert len(re.findall(r"rank \d has made 10 changes; the cache had seen \d+ then", done.stdout)) == 4


def test_the_programs_of_the_page(root: pathlib.Path) -> None:
    """docs/guide/endpoints.md: one process runs the first, another the second, which finds what the first serves."""
    page = (root / "docs" / "guide" / "endpoints.md").read_text(encoding="utf-8")
    programs = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(programs) == 2
    assert ranks.run(functools.partial(_page, programs), count=2) == [[1000], [1, 0.0]]


def _page(programs: list[str]) -> list[float]:
    names: dict[str, Any] = {}
    program = programs[int(os.environ["RANK"])]
    if os.environ["RANK"] == "1":
        exec(program, names)
        _store().set("done", "")
        return [names["size"], float(names["weights"].sum())]
    exec(program, names)
    _store().wait(["done"])
    names["server"].close()
    return [data.view(np.float32).size for data in names["saved"].values()]


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize("medium", MEDIA)
def test_what_a_server_does_not_take_is_an_error_and_the_connection_goes_on(medium: str) -> None:
    """Unknown names, data above the limits, replies that do not fit, handlers that raise: each error says what and where."""
    ranks.run(_refusals, count=2, env=MEDIA[medium])


def _refusals() -> None:
    if os.environ["RANK"] == "0":
        waits = Waits(1)

        def fail(call: endpoint.Incoming) -> None:
            raise RuntimeError(f"no {call.name} today " + "é" * 5000)

        limits = endpoint.Limits(calls=4, request_bytes=20_000, push_bytes=50_000, in_flight_bytes=60_000)
        with endpoint.serve(
            "strict",
            requests={"echo": lambda call: call.data, "fail": fail, "text": lambda call: "a text"},
            pushes={"data": lambda call: None, "fail": fail, "replies": lambda call: b"x", "bye": waits.bye},
            pulls={"weights": np.zeros(40_000, np.uint8)},
            limits=limits,
        ) as server:
            server.on_pull("gone", b"x")
            server.remove("pull", "gone")
            waits.wait()
            assert server.stats()["held_bytes"] == 0
        return
    large = np.zeros(50_001, np.uint8)
    with endpoint.connect("strict") as client:
        for work, kind, expected in [
            (
                client.push("nothing", large[:100]),
                errors.Config,
                r'push "nothing" of endpoint strict \(rank 0, .*bye, data, fail',
            ),
            (client.push("nothing", large[:40_000]), errors.Config, 'it serves no push called "nothing"'),
            (client.pull("data"), errors.Config, 'it serves no pull called "data"; pulls that it serves: weights'),
            (client.pull("gone"), errors.Config, 'it serves no pull called "gone"'),
            (
                client.push("data", large),
                errors.Config,
                "it has 50001 bytes, and the server takes 50000 of a push. Nothing",
            ),
            (
                client.request("echo", large[:20_001]),
                errors.Config,
                "20001 bytes, and the server takes 20000 of a request",
            ),
            (
                client.request("echo", large[:10], most=9),
                errors.Config,
                "it has 10 bytes, and the client has room for 9",
            ),
            (client.pull("weights", into=bytearray(39_999)), errors.Config, "40000 bytes.* room for exactly 39999"),
            (
                client.request("fail", b"x"),
                errors.HandlerFailed,
                "its handler there has failed: RuntimeError: no fail today",
            ),
            (client.push("fail", large[:50_000]), errors.HandlerFailed, "RuntimeError: no fail today"),
            (client.push("replies", b"x"), errors.HandlerFailed, "the handler of a push returns None, and not bytes"),
            (
                client.request("text"),
                errors.HandlerFailed,
                "must be a tensor, or an array or another buffer of plain numbers.*, and not a str",
            ),
        ]:
            with pytest.raises(kind, match=expected) as caught:
                work.wait()
            assert caught.value.group_lives and len(str(caught.value)) < 6000
            assert bytes(client.request("echo", b"still here").wait()) == b"still here"
        for wrong, expected in [
            (lambda: client.push("data", "a text"), "must be a tensor"),
            (lambda: client.push("data", torch.zeros(4, 4).t()), "not contiguous"),
            (lambda: client.push("data", np.zeros((4, 4))[:, 1]), "not contiguous"),
            (lambda: client.pull("weights", into=b"1234"), "cannot be written to"),
            (lambda: client.push("n" * 257, b""), "1 to 256 bytes"),
            (lambda: client.push("", b""), "1 to 256 bytes"),
            (lambda: client.push("\ud800", b""), "1 to 256 bytes"),
            (lambda: client.push("data", torch.zeros(4, dtype=torch.complex64).conj()), "resolve_conj"),
            (lambda: client.pull("weights", into=torch.zeros(1, dtype=torch.complex64).conj().imag), "resolve_neg"),
            (lambda: client.push("data", np.array([{}])), "holds Python objects"),
            (lambda: client.push("data", np.zeros(2, "datetime64[s]")), "buffer of plain numbers"),
            (lambda: client.request("echo", b"", most=-1), "most: .* not -1"),
            (lambda: client.request("echo", b"", most=1.5), r"most: .* not 1\.5"),  # type: ignore[arg-type]
        ]:
            with pytest.raises(errors.Config, match=expected):
                wrong()
        client.push("bye", None).wait()
    with pytest.raises(errors.Closed, match="the client is closed"):
        client.push("data", b"")


class _Unprintable(Exception):
    def __str__(self) -> str:
        raise SystemExit("not even this")


def test_handlers_that_do_what_none_should() -> None:
    """An error that cannot be told as it is, a server that is closed by its own handler: the one thread goes on."""
    ranks.run(_odd_handlers, count=2)


def _odd_handlers() -> None:
    if os.environ["RANK"] == "0":
        waits, own = Waits(1), list[endpoint.Server]()

        def fail(call: endpoint.Incoming) -> None:
            if call.data.size:
                raise ValueError("no key " + call.data.tobytes().decode(errors="surrogateescape"))
            raise _Unprintable

        def close(call: endpoint.Incoming) -> None:
            own[0].close()

        async def later(call: endpoint.Incoming) -> None:
            pass

        def complain(record: logging.LogRecord) -> bool:
            raise KeyError("a filter of the script's")

        logging.getLogger("penstock").addFilter(complain)
        with endpoint.serve("odd", pushes={"fail": fail, "close": close, "bye": waits.bye}, threads=1) as server:
            own.append(server)
            with pytest.raises(errors.Config, match=r"asyncio\.run"):
                server.on_push("later", later)
            waits.wait()
        return
    with endpoint.connect("odd") as client:
        for data, expected in [(b"\xff\xfe", r"no key \\udcff\\udcfe"), (None, "_Unprintable")]:
            with pytest.raises(errors.HandlerFailed, match=expected):
                client.push("fail", data).wait(10)
        with pytest.raises(errors.HandlerFailed, match="close it on another thread"):
            client.push("close", None).wait(10)
        for timeout_s in (-1.0, 0.0):
            # Its answer may be there already.
            with contextlib.suppress(errors.Timeout, errors.Config):
                client.push("nothing", None).wait(timeout_s)
        client.push("bye", None).wait(float("inf"))


def test_what_belongs_to_a_call_lives_as_long() -> None:
    """A tensor that gets other memory meanwhile, a client that nobody keeps but its call."""
    ranks.run(_kept, count=2)


def _kept() -> None:
    size = 4 << 20
    if os.environ["RANK"] == "0":
        waits, seen = Waits(1), list[bool]()
        check = lambda call: seen.append(bool((call.data == 7).all()) and call.data.size == size)  # noqa: E731
        weights = np.full(size, 5, np.uint8)
        with endpoint.serve("kept", pushes={"data": check, "bye": waits.bye}, pulls={"weights": weights}) as server:
            waits.wait()
            assert seen == [True] * 8
            del server

        def replies(_: endpoint.Incoming) -> np.ndarray[Any, Any]:
            reply = np.zeros(size, np.uint8)
            weakref.finalize(reply, freed.release)
            return reply

        freed = threading.Semaphore(0)
        with endpoint.serve("replies", pulls={"fresh": replies}):
            # A server that does nothing more with the engine has them no longer than the client takes.
            assert freed.acquire(timeout=60)
        return
    with endpoint.connect("kept") as client:
        for _ in range(8):
            tensor, place = torch.full((size,), 7, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
            works, memory = [client.push("data", tensor), client.pull("weights", into=place)], place.data
            tensor.data, place.data = torch.zeros(3, dtype=torch.uint8), torch.zeros(5, dtype=torch.uint8)
            assert [work.wait(30) for work in works] == [None, place]
            assert bool((memory == 5).all()) and place.numel() == 5
            del memory
    with pytest.warns(ResourceWarning, match="a client of endpoint kept was not closed"):
        endpoint.connect("kept").push("bye", None).wait(30)
    with endpoint.connect("replies") as client:
        client.pull("fresh").wait(30)


def test_a_server_in_the_place_of_another() -> None:
    """One that ends, in good order or as a fork, does not hide another that serves the same name, or itself."""
    ranks.run(_successors, count=2)


def _successors() -> None:
    if os.environ["RANK"] == "0":
        first = endpoint.serve("again", pulls={"who": b"first"})
        waits = Waits(2)
        second = endpoint.serve("again", pulls={"who": b"second"}, pushes={"bye": waits.bye})
        first.close()
        child = os.fork()
        if child == 0:
            second.close()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        waits.wait()
        second.close()
        with pytest.raises(errors.Timeout, match="no process serves it"):
            endpoint.connect("again", timeout_s=0.2)
        return
    for _ in range(2):
        with endpoint.connect("again") as client:
            while bytes(client.pull("who").wait()) != b"second":
                client.close()
                client = endpoint.connect("again")
            client.push("bye", None).wait()
            client.close()


def test_a_server_that_cannot_be_found() -> None:
    """Nobody serves it; this process does; it was closed; secrets differ; the limits contradict each other."""
    ranks.run(_not_found, count=2, env_of_rank={1: {"PENSTOCK_SECRET": "other"}})


def _not_found() -> None:
    if os.environ["RANK"] == "0":
        with pytest.raises(errors.Timeout, match=r"no process serves it\. Does one call penstock\.endpoint\.serve"):
            endpoint.connect("nothing", timeout_s=0.2)
        with pytest.raises(errors.Config, match="cannot hold"):
            endpoint.serve("bad", limits=endpoint.Limits(in_flight_bytes=5))
        with pytest.raises(errors.Config, match="cannot be called"):
            endpoint.serve("bad", pushes={"data": b"x"})  # type: ignore[dict-item]
        for name, number in [("calls", 0), ("calls", 1 << 32), ("push_bytes", -1), ("request_bytes", 1.5)]:
            with pytest.raises(errors.Config, match=f"the limit {name} .* and not {number}"):
                endpoint.Limits(**{name: number})  # type: ignore[arg-type]
        with pytest.raises(errors.Config, match=r"threads of endpoint bad: .* not 1\.5"):
            endpoint.serve("bad", threads=1.5)  # type: ignore[arg-type]
        with endpoint.serve("here") as server:
            with pytest.raises(errors.Config, match="served by this very process"):
                endpoint.connect("here", timeout_s=5)
            ranks.note("serves")
        server.close()
        with pytest.raises(errors.Closed):
            server.stats()
        with pytest.raises(errors.Timeout, match="no process serves it"):
            endpoint.connect("here", timeout_s=0.2)
        with endpoint.serve("guarded"):
            store = _store()
            store.wait(["refused"])
    else:
        with pytest.raises(errors.Refused, match=r"this process has one job secret and the server .* none"):
            endpoint.connect("guarded", timeout_s=20)
        _store().set("refused", "")


def test_a_slow_server_stops_nothing_else() -> None:
    """While its handler hangs, a server holds its limit and no more; collectives of the same processes go on; a call that takes
    too long fails alone. Then all pushes are taken, once each."""
    ranks.run(_slow, count=3)


def _slow() -> None:
    dist.init_process_group("penstock")
    rank, size, count = dist.get_rank(), 1 << 20, 20
    if rank == 0:
        may_go, waits, seen = threading.Event(), Waits(2), list[int]()

        def take(call: endpoint.Incoming) -> None:
            assert may_go.wait(60)
            assert (call.data == call.data[0]).all()
            seen.append(int(call.data[0]))

        limits = endpoint.Limits(calls=8, request_bytes=0, push_bytes=size, in_flight_bytes=3 * size)
        with endpoint.serve("slow", pushes={"data": take, "bye": waits.bye}, limits=limits) as server:
            _until(lambda: server.stats()["held_bytes"] == 6 * size)
            for _ in range(20):
                dist.all_reduce(torch.ones(100_000))
                stats = server.stats()
                assert stats["held_bytes"] == 6 * size and stats["calls"] <= 2 * 8 and stats["taken"] == 1
            dist.barrier()
            may_go.set()
            waits.wait()
            assert sorted(seen) == sorted([*range(count), *range(100, 100 + count)])
    else:
        with endpoint.connect("slow") as client:
            works = [client.push("data", np.full(size, 100 * (rank - 1) + n, np.uint8)) for n in range(count)]
            for _ in range(20):
                ones = torch.ones(100_000)
                dist.all_reduce(ones)
                assert (ones == 3).all()
            began_s = time.monotonic()
            with pytest.raises(errors.Timeout, match=r"has not ended within 0\.1 s\. It goes on"):
                works[0].wait(0.1)
            late = client.push("data", np.zeros(size, np.uint8), timeout_s=0.2)
            with pytest.raises(errors.Timeout, match=r"timed out after 0.2 s: nothing was sent"):
                late.wait()
            assert time.monotonic() - began_s < 20
            dist.barrier()
            for work in works:
                work.wait()
            client.push("bye", None).wait()
    dist.barrier()
    dist.destroy_process_group()


def test_a_call_that_is_late_is_withdrawn() -> None:
    """A server that has not begun a call drops it when its client gives up, and what it holds for it."""
    ranks.run(_withdrawn, count=2)


def _withdrawn() -> None:
    store = _store()
    if os.environ["RANK"] == "0":
        begun, may_go, waits, seen = threading.Event(), threading.Event(), Waits(1), list[int]()

        def take(call: endpoint.Incoming) -> None:
            begun.set()
            assert may_go.wait(60)
            seen.append(call.data.size)

        with endpoint.serve("patient", pushes={"data": take, "bye": waits.bye}) as server:
            assert begun.wait(60)
            store.set("begun", "")
            store.wait(["go"])
            # Those that were withdrawn are gone, or about to be.
            _until(lambda: server.stats()["calls"] == 1)
            may_go.set()
            waits.wait()
            assert seen == [100_000], f"a call that was withdrawn was done: {seen}"
            assert server.stats()["held_bytes"] == 0
        return
    with endpoint.connect("patient") as client:
        busy = client.push("data", np.zeros(100_000, np.uint8))
        store.wait(["begun"])
        for size in (0, 1, 200_000):
            with pytest.raises(errors.Timeout, match="the server may or may not have done it") as caught:
                client.push("data", np.zeros(size, np.uint8), timeout_s=0.3).wait()
            assert caught.value.group_lives
        assert not busy.done()
        store.set("go", "")
        busy.wait()
        client.push("bye", None).wait()


# ------------------------------------------------------------------------------------------------------- ends and deaths


def test_a_server_that_closes() -> None:
    """What its handler works on is answered; what waits fails and says that nothing of it was done; the next server of that name
    takes over."""
    ranks.run(_closes, count=2)


def _closes() -> None:
    store = _store()
    if os.environ["RANK"] == "0":
        begun, may_go, seen = threading.Event(), threading.Event(), list[int]()

        def take(call: endpoint.Incoming) -> None:
            begun.set()
            assert may_go.wait(60)
            seen.append(call.data.size)

        server = endpoint.serve("closes", pushes={"data": take})
        assert begun.wait(60)
        store.set("begun", "")
        _until(lambda: server.stats()["calls"] == 3)
        closing = threading.Thread(target=server.close)
        closing.start()
        store.wait(["refused"])
        may_go.set()
        closing.join(20)
        assert seen == [100_000] and not closing.is_alive()
        waits = Waits(1)
        with endpoint.serve("closes", pushes={"bye": waits.bye}):
            waits.wait()
        return
    client = endpoint.connect("closes")
    works = [client.push("data", np.zeros(100_000, np.uint8))]
    store.wait(["begun"])
    works += [client.push("data", np.zeros(size, np.uint8)) for size in (100_001, 5)]
    for work in works[1:]:
        with pytest.raises(errors.Closed, match="the server is being closed, and has done nothing of it"):
            work.wait()
    with pytest.raises(errors.Closed, match="the server is being closed"):
        client.push("data", b"x").wait()
    store.set("refused", "")
    works[0].wait()
    client.close()
    with endpoint.connect("closes") as client:
        client.push("bye", None).wait()


@pytest.mark.parametrize("medium", MEDIA)
def test_a_client_is_killed(medium: str) -> None:
    """SIGKILL amid its pushes and pulls: the server lets go of all that it holds for it and serves the other as before."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    with ranks.Ranks(_server_of_the_killed, count=3, env=MEDIA[medium], args=(seed,)) as job:
        job.await_note("busy", deadline_s=30, of=[2])
        job.signal(2, signal.SIGKILL)
        outcomes = job.outcomes(timeout_s=60, of=[0, 1])
    assert all(outcome.ok for outcome in outcomes), "\n".join(map(str, outcomes))


def _server_of_the_killed(seed: int) -> None:
    rank, size, count = int(os.environ["RANK"]), 300_000, 60
    if rank == 0:
        waits, seen = Waits(1), dict[int, list[int]]()

        def take(call: endpoint.Incoming) -> None:
            number, *_ = call.data
            assert (call.data == number).all()
            seen.setdefault(call.client, []).append(int(number))

        with endpoint.serve(
            "survives", pushes={"data": take, "bye": waits.bye}, pulls={"w": _pattern(1, size)}
        ) as server:
            waits.wait()
            _until(lambda: server.stats()["clients"] <= 1 and server.stats()["held_bytes"] == 0)
            assert list(range(count)) in seen.values()
            # Of what the killed one has pushed, nothing came twice.
            assert all(len(numbers) == len(set(numbers)) for numbers in seen.values())
        return
    with endpoint.connect("survives") as client:
        if rank == 2:
            works = []
            for number in range(250):
                works += [client.push("data", np.full(size, number, np.uint8)), client.pull("w")]
                if number == seed % 60:
                    ranks.note("busy")
            threading.Event().wait(60)  # until it is killed
        into = bytearray(size)
        for number in range(count):
            client.push("data", np.full(size, number, np.uint8)).wait()
            assert np.array_equal(np.frombuffer(client.pull("w", into=into).wait(), np.uint8), _pattern(1, size))
        client.push("bye", None).wait()


@pytest.mark.parametrize("medium", MEDIA)
def test_the_server_is_killed(medium: str) -> None:
    """SIGKILL amid pushes and pulls: every call ends, those that had not with an error that names the server and says what to do;
    when another process serves the name, a new connection works."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    with ranks.Ranks(_clients_of_the_killed, count=3, env=MEDIA[medium], args=(seed,)) as job:
        job.await_note("busy", deadline_s=30, of=[1, 2])
        job.signal(0, signal.SIGKILL)
        outcomes = job.outcomes(timeout_s=60, of=[1, 2])
    assert all(outcome.ok for outcome in outcomes), "\n".join(map(str, outcomes))


def _clients_of_the_killed(seed: int) -> None:
    rank, size = int(os.environ["RANK"]), 300_000
    serves = {"pushes": {"data": lambda call: None}, "pulls": {"w": _pattern(2, size)}}
    if rank == 0:
        server = endpoint.serve("falls", **serves)  # type: ignore[arg-type]
        assert server.stats() is not None
        threading.Event().wait(60)  # until it is killed
    client = endpoint.connect("falls")
    ended = 0
    with pytest.raises(errors.PeerLost) as caught:
        for number in range(100_000):
            works = [client.push("data", np.full(size, 7, np.uint8)), client.pull("w"), client.push("data", b"short")]
            if number == 5 + seed % 30:
                ranks.note("busy")
            for work in works:
                work.wait()
                ended += 1
    text = str(caught.value)
    assert ended > 10 and re.search(
        r"of endpoint falls \(rank 0, .*\) failed: the connection is lost \(.*rank 0", text
    ), text
    assert "Connect again" in text and not caught.value.group_lives
    with pytest.raises(errors.PeerLost, match="the connection is lost"):
        client.pull("w").wait()
    client.close()
    waits = Waits(1)
    if rank == 1:
        with endpoint.serve("falls", pushes={"bye": waits.bye}, pulls=serves["pulls"]):
            waits.wait()
    else:
        # The store still names the server that is gone, until the next one is there.
        with endpoint.connect("falls", timeout_s=30) as client:
            assert np.array_equal(client.pull("w").wait(), _pattern(2, size))
            client.push("bye", None).wait()


def test_transfers_go_on_after_their_connections_break() -> None:
    """TCP connections are cut again and again while bytes travel: every push is taken once, and every pull is right."""
    ranks.run(_cut, count=2, env={**MEDIA["tcp"], "PENSTOCK_STREAMS": "4"}, args=(random.randrange(1 << 30),))


def _cut(seed: int) -> None:
    print(f"seed {seed}")
    size, count = 2 << 20, 30
    if os.environ["RANK"] == "0":
        waits, seen = Waits(1), list[int]()

        def take(call: endpoint.Incoming) -> None:
            assert np.array_equal(call.data[1:], _pattern(int(call.data[0]), size - 1))
            seen.append(int(call.data[0]))

        with endpoint.serve("cut", pushes={"data": take, "bye": waits.bye}, pulls={"w": _pattern(99, size)}):
            waits.wait()
        assert sorted(seen) == list(range(count))
        return
    chance = random.Random(seed)
    with endpoint.connect("cut") as client:
        cut = 0
        for number in range(count):
            data = np.concatenate([np.array([number], np.uint8), _pattern(number, size - 1)])
            push, pull = client.push("data", data), client.pull("w")
            if chance.random() < 0.7:
                cut += cuts.cut_a_connection(chance)
            push.wait()
            assert np.array_equal(pull.wait(), _pattern(99, size))
        assert cut > 5, cut
        client.push("bye", None).wait()


def test_a_forked_child_has_no_endpoint() -> None:
    """Calls of a child that its parent's connection cannot serve are errors at once, and the parent goes on."""
    ranks.run(_forks, count=2)


def _forks() -> None:
    if os.environ["RANK"] == "0":
        waits = Waits(1)
        with endpoint.serve("forks", pushes={"bye": waits.bye}):
            waits.wait()
        return
    with endpoint.connect("forks") as client:
        child = os.fork()
        if child == 0:
            try:
                client.push("bye", None).wait()
            except errors.Closed as error:
                os._exit(0 if "forked" in str(error) else 3)
            os._exit(4)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        client.push("bye", None).wait()


def test_a_script_that_forgets_to_close(tmp_path: pathlib.Path) -> None:
    """It ends, with its connection in good order, and the server notices no failure."""
    printed = ranks.run(_forgets, count=2)
    assert printed[0] == 1


_forgotten: list[Any] = []


def _forgets() -> int:
    if os.environ["RANK"] == "0":
        seen = list[bytes]()
        with endpoint.serve("forgotten", pushes={"data": lambda call: seen.append(call.data.tobytes())}) as server:
            _until(lambda: bool(seen) and server.stats()["clients"] == 0)
        return len(seen)
    client = endpoint.connect("forgotten")
    client.push("data", b"x").wait()
    _forgotten.append(client)  # it lives until the interpreter ends
    return 0


def test_a_script_that_leaves_its_server_open(tmp_path: pathlib.Path) -> None:
    """The end of the script closes it, and waits for that only as long as it takes."""
    script = tmp_path / "serves.py"
    script.write_text(
        "import sys, penstock.endpoint as endpoint\n"
        "servers = [endpoint.serve(f's{n}', pulls={'w': b'x'}, address=f'127.0.0.1:{port}', secret='of this test alone')\n"
        "           for n, port in enumerate(sys.argv[1:])]\n"
    )
    for _ in range(5):
        with contextlib.ExitStack() as stack:
            free = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(4)]
            ports = [str(each.getsockname()[1]) for each in free]
        done = forked.run([sys.executable, str(script), *ports], timeout=60, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_what_is_removed_is_served_by_the_rest() -> None:
    """Of a name below another one: from then on it is that of the other one."""
    assert ranks.run(_removes, count=2)[0] == ["exact", "tree"]


def _removes() -> list[str]:
    if os.environ["RANK"] == "1":
        with endpoint.connect("removes") as client:
            client.push("a/b", b"x").wait()
            client.request("go").wait()
            client.push("a/b", b"x").wait()
            client.push("bye", None).wait()
        return []
    done, seen = threading.Event(), list[str]()
    pushes = {
        "a/": lambda _: seen.append("tree"),
        "a/b": lambda _: seen.append("exact"),
        "bye": lambda _: done.set(),
    }
    with endpoint.serve("removes", pushes=pushes) as server:
        server.on_request("go", lambda _: server.remove("push", "a/b"))
        assert done.wait(30)
    return seen


# -------------------------------------------------------------------------------------------------------------- helpers


def _store() -> Any:
    """The job's store."""
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


def _until(condition: Callable[[], bool]) -> None:
    """Block until a condition of another thread or process holds."""
    deadline_s = time.monotonic() + 30
    for _ in _pauses(deadline_s):
        if condition():
            return
    raise AssertionError("it does not come to that")


def _pauses(deadline_s: float) -> Iterator[None]:
    while time.monotonic() < deadline_s:
        yield
        threading.Event().wait(0.005)
