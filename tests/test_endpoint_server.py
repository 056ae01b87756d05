"""Proves that an aggregation server answers over streams as well as by datagrams: jobs, pushes and pulls, exact to the bit, over
TCP and memory, while clients and the server are killed between push and pull."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
import urllib.error
import urllib.request
from typing import Any

import numpy as np
import pytest

import daemons
import ranks
from penstock import endpoint, errors
from penstock.cluster import jobs

_SECRET = "of server and workers"
_ALONE = {"MASTER_ADDR": None, "MASTER_PORT": None, "RANK": None, "WORLD_SIZE": None}
_WORKERS = 3
_BODY: dict[str, Any] = {
    "epoch": 1,
    "key": "000102030405060708090a0b0c0d0e0f",
    "window": 16,
    "block_bytes": 1024,
    "floats": True,
    "start": 2**32 - 30,
    "names": "children",
    "done": "buffer",
    "tree": [{"worker": worker} for worker in range(_WORKERS)],
    "workers": ["stream"] * _WORKERS,
}


def _server(*options: str) -> tuple[daemons.Daemon, str]:
    """A server, and the address of its endpoint."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        at = f"127.0.0.1:{found.getsockname()[1]}"
    return daemons.Daemon("server", "--endpoint", at, *options, env={"PENSTOCK_SECRET": _SECRET}), at


def _open(address: str, **changes: Any) -> None:
    """Open job 7 for workers behind streams."""
    body = {**_BODY, **changes}
    if body["done"] == "block":
        body.pop("pending_bytes", None)
    data = json.dumps({name: value for name, value in body.items() if value is not None}).encode()
    status, _ = jobs._request("PUT", address, "/jobs/7", data, _SECRET.encode(), time.monotonic() + 20)
    assert status == 201


def _part(worker: int, number: int, elements: int = 40_001) -> np.ndarray:
    """What a worker pushes: values for whose sum the order matters."""
    draw = np.random.default_rng((worker, number))
    return (draw.standard_normal(elements) * 10.0 ** draw.integers(-3, 6, elements)).astype(np.float32)


def _sum(number: int) -> np.ndarray:
    total = _part(0, number)
    for worker in range(1, _WORKERS):
        total = total + _part(worker, number)
    return total


def _connect(at: str) -> endpoint.Client:
    return endpoint.connect("server", address=at, secret=_SECRET, timeout_s=30, call_timeout_s=60)


@pytest.mark.parametrize("done", ["buffer", "block"])
@pytest.mark.parametrize("medium", [{"PENSTOCK_SHM": "0"}, {}], ids=["tcp", "memory"])
def test_sums_over_streams(medium: dict[str, str], done: str) -> None:
    """Three workers push and pull buffers, some of them at once: every sum has the bits of the sum in the tree's order, and no
    datagram has come."""
    server, at = _server()
    with server:
        _open(server.address, done=done)
        of_rank = {rank: {"WHO": str(rank)} for rank in range(_WORKERS)}
        ranks.run(_sums, count=_WORKERS, env={**_ALONE, **medium}, env_of_rank=of_rank, args=(at, done))
        counted = server.get("/jobs")
        assert counted["socket"]["received"] == 0
        [job] = counted["jobs"]
        assert [node["node"] for node in job["nodes"]] == ["stream"] * _WORKERS
        assert job["committed"] == 12 * -(-40_001 * 4 // 1024)
        if done == "buffer":
            assert job["unfinished"] == 0
            _lets_go(server)


def _sums(at: str, done: str) -> None:
    who = int(os.environ["WHO"])
    name = f"sums/7/1/{who}"
    with _connect(at) as client:
        for first in range(0, 12, 4):
            several = range(first, first + 4)
            # The later ones are asked for first, and before they are pushed. The first pull lets go of those before these.
            pulls = [(number, client.pull(f"{name}/{number}/{first}")) for number in reversed(several)]
            pushes = [client.push(f"{name}/{number}/f32", _part(who, number)) for number in several]
            for push in pushes:
                push.wait()
            for number, pull in pulls:
                assert pull.wait().tobytes() == _sum(number).tobytes(), f"buffer {number}"
        more = (
            "larger pending_bytes"
            if done == "buffer"
            else 'open the job with "done": "buffer" and a larger pending_bytes'
        )
        told = json.loads(bytes(client.request("jobs").wait()))
        assert [job["job"] for job in told["jobs"]] == [7]
        for ask, why in [
            (lambda: client.pull(f"{name}/0"), "has said that it has the results before 8"),
            (lambda: client.pull(f"{name}/9000"), "is too far ahead: 8 to 4103 are here at a time"),
            (lambda: client.push(f"{name}/9000/f32", _part(who, 13)), "is too far ahead"),
            (lambda: client.push(f"{name}/11/f32", _part(who, 11, 400)), "was pushed already, with 160004 bytes"),
            (lambda: client.push(f"{name}/11/f32", _part(who, 12)), "was pushed already, with other contents"),
            (lambda: client.push(f"{name}/12/f64", _part(who, 12)), "names no buffer"),
            (lambda: client.push(f"{name}/12/f32", b"odd"), "no whole number of elements"),
            (lambda: client.push("sums/7/2/0/12/f32", _part(who, 12)), "epoch 2 of job 7 is not open"),
            (lambda: client.push("sums/7/1/9/12/f32", _part(who, 12)), "worker 9 of job 7 does not push over a stream"),
            (lambda: client.push(f"{name}/12/f32", np.zeros(20 << 20, np.float32)), more),
        ]:
            with pytest.raises(errors.HandlerFailed, match=why):
                ask().wait()
        with pytest.raises(errors.Config, match="it serves no pull"):
            client.pull("other").wait()


def test_workers_killed_between_push_and_pull() -> None:
    """A worker is killed with -9 after its push and before its pull; another process goes on in its place, repeats the push, of
    which it does not know whether it has come, and pulls the same result. The others notice nothing."""
    server, at = _server()
    with server:
        _open(server.address)
        of_rank = {rank: {"WHO": str(rank)} for rank in range(_WORKERS + 1)}
        with ranks.Ranks(_killed, count=_WORKERS + 1, env=_ALONE, env_of_rank=of_rank, args=(at,)) as job:
            job.await_note("pushed", of=[1], deadline_s=40)
            job.signal(1, signal.SIGKILL)
            outcomes = job.outcomes(of=[0, 2, 3], timeout_s=60)
        assert all(outcome.ok for outcome in outcomes), "\n".join(map(str, outcomes))
        _lets_go(server)


def _lets_go(server: daemons.Daemon) -> None:
    """The server hears within a heartbeat that all workers have all results, and keeps none."""
    deadline = time.monotonic() + 20
    while server.get("/jobs")["jobs"][0]["held_bytes"] > 0:
        assert time.monotonic() < deadline


def _killed(at: str) -> None:
    who = int(os.environ["WHO"])
    worker = 1 if who == 3 else who
    name = f"sums/7/1/{worker}"
    with _connect(at) as client:
        if who == 1:
            client.push(f"{name}/0/f32", _part(1, 0)).wait()
            ranks.note("pushed")
            signal.pause()
        if who == 3:
            # Until the one before has pushed and died: it has, when the others' sum is there.
            while json.loads(bytes(client.request("jobs").wait()))["jobs"][0]["committed"] < 157:
                time.sleep(0.01)
        for number in range(3):
            client.push(f"{name}/{number}/f32", _part(worker, number)).wait()
            for _ in range(2):  # whoever does not know whether a pull has come pulls again
                assert client.pull(f"{name}/{number}/{number}").wait().tobytes() == _sum(number).tobytes()


def test_server_killed_between_push_and_pull() -> None:
    """The server is killed with -9 while workers wait for the result of what they have pushed: each is told that the server is
    gone, and a new server's new epoch begins anew."""
    server, at = _server()
    with server:
        _open(server.address)
        of_rank = {rank: {"WHO": str(rank)} for rank in range(_WORKERS)}
        with ranks.Ranks(_orphaned, count=_WORKERS, env=_ALONE, env_of_rank=of_rank, args=(at,)) as job:
            job.await_note("waits", deadline_s=40)
            server.kill()
            job.await_note("told", deadline_s=40)
            server.start()
            _open(server.address, epoch=2)
            outcomes = job.outcomes(timeout_s=60)
        assert all(outcome.ok for outcome in outcomes), "\n".join(map(str, outcomes))


def _orphaned(at: str) -> None:
    who = int(os.environ["WHO"])
    client = _connect(at)
    client.push(f"sums/7/1/{who}/0/f32", _part(who, 0)).wait()
    assert client.pull(f"sums/7/1/{who}/0").wait().tobytes() == _sum(0).tobytes()
    # Worker 0 pushes no second buffer, so nobody gets its sum.
    waiting = []
    if who != 0:
        waiting = [client.push(f"sums/7/1/{who}/1/f32", _part(who, 1)), client.pull(f"sums/7/1/{who}/1")]
    client.request("jobs").wait()
    ranks.note("waits")
    for work in waiting:
        with pytest.raises(errors.PeerLost):
            work.wait()
    with pytest.raises(errors.PeerLost):
        while True:
            client.request("jobs").wait()
    client.close()
    ranks.note("told")
    with _connect(at) as client:
        deadline = time.monotonic() + 30
        while not json.loads(bytes(client.request("jobs").wait()))["jobs"]:
            assert time.monotonic() < deadline
        client.push(f"sums/7/2/{who}/0/f32", _part(who, 5)).wait()
        assert client.pull(f"sums/7/2/{who}/0").wait().tobytes() == _sum(5).tobytes()


def test_jobs_are_opened_over_a_stream() -> None:
    """A client opens a job, pushes, pulls and closes it over one connection, with a server that demands proofs over HTTP; what
    the server refuses is told as over HTTP."""
    server, at = _server()
    with server:
        with pytest.raises(urllib.error.HTTPError, match="401"):
            jobs._request("PUT", server.address, "/jobs/9", b"{}", None, time.monotonic() + 20)
        ranks.run(_opened, count=1, env=_ALONE, args=(at,))
        assert server.get("/jobs")["jobs"] == []


def _opened(at: str) -> None:
    body = {**_BODY, "tree": [{"worker": 0}], "workers": ["stream"]}
    with _connect(at) as client:
        for _ in range(2):
            told = json.loads(bytes(client.request("open/9", json.dumps(body).encode()).wait()))
            assert told["shards"] == 1
        client.push("sums/9/1/0/0/f32", _part(0, 0)).wait()
        assert client.pull("sums/9/1/0/0").wait().tobytes() == _part(0, 0).tobytes()
        assert json.loads(bytes(client.request("jobs", b"9").wait()))["jobs"][0]["done"] == "buffer"
        assert json.loads(bytes(client.request("jobs", b"10").wait()))["jobs"] == []
        for ask, why in [
            (lambda: client.request("open/9", json.dumps({**body, "window": 32}).encode()), "open with other contents"),
            (lambda: client.request("open/x", json.dumps(body).encode()), '"x" is not the number of a job'),
            (lambda: client.request("open/10", b"{"), "EOF"),
            (lambda: client.request("close/9/2"), "job 9 is in epoch 1, not 2"),
            (lambda: client.request("close/9"), "say which epoch"),
            (lambda: client.request("jobs", b"all"), "the number of the first job"),
        ]:
            with pytest.raises(errors.HandlerFailed, match=why):
                ask().wait()
        client.request("close/9/1").wait()
        with pytest.raises(errors.HandlerFailed, match="job 9 is not open here"):
            client.request("close/9/1").wait()
        with pytest.raises(errors.HandlerFailed, match="epoch 1 of job 9 is not open"):
            client.push("sums/9/1/0/1/f32", _part(0, 1)).wait()


def test_many_calls_wait() -> None:
    """A client has pulls of 300 buffers waiting, and then pushes these, the last one first: all of them end."""
    server, at = _server()
    with server:
        _open(server.address, tree=[{"worker": 0}], workers=["stream"])
        ranks.run(_many, count=1, env=_ALONE, args=(at,))


def _many(at: str) -> None:
    with _connect(at) as client:
        numbers = range(300)
        pulls = [client.pull(f"sums/7/1/0/{number}") for number in numbers]
        pushes = [client.push(f"sums/7/1/0/{number}/f32", _part(0, number, 400)) for number in reversed(numbers)]
        for push in pushes:
            push.wait()
        for number, pull in zip(numbers, pulls, strict=True):
            assert pull.wait().tobytes() == _part(0, number, 400).tobytes()


def test_memory_of_pushes() -> None:
    """A push for which a server with this --memory can have no job is refused before it is sent; one that has room is taken."""
    server, at = _server("--memory", "16M")
    with server:
        _open(server.address, tree=[{"worker": 0}], workers=["stream"], pending_bytes=4 << 20)
        ranks.run(_pushed, count=1, env=_ALONE, args=(at,))


def _pushed(at: str) -> None:
    with _connect(at) as client:
        with pytest.raises(errors.Config, match="8388608"):
            client.push("sums/8/1/0/0/f32", np.zeros((8 << 20) // 4 + 1, np.float32)).wait()
        client.push("sums/7/1/0/0/f32", np.zeros((4 << 20) // 4, np.float32)).wait()


def test_terminated_between_push_and_pull() -> None:
    """SIGTERM comes when all pushes have ended and one worker has not pulled: it gets its result, and then the server ends."""
    server, at = _server()
    with server:
        _open(server.address, tree=[{"worker": 0}, {"worker": 1}], workers=["stream"] * 2)
        of_rank = {rank: {"WHO": str(rank)} for rank in range(2)}
        with ranks.Ranks(_late, count=2, env=_ALONE, env_of_rank=of_rank, args=(at, server.address)) as job:
            job.await_note("pushed", deadline_s=40)
            assert server._process is not None
            server._process.send_signal(signal.SIGTERM)
            outcomes = job.outcomes(timeout_s=60)
            assert all(outcome.ok for outcome in outcomes), "\n".join(map(str, outcomes))
            assert server._process.wait(timeout=9) == 0


def _late(at: str, address: str) -> None:
    who = int(os.environ["WHO"])
    with _connect(at) as client:
        client.push(f"sums/7/1/{who}/0/f32", _part(who, 0)).wait()
        if who == 0:
            client.pull("sums/7/1/0/0").wait()
        ranks.note("pushed")
        if who == 1:
            # The server has the signal, and holds nothing more but what this worker pulls: it answers for a second all the same.
            start = until = time.monotonic()
            while time.monotonic() < until + 1:
                if (
                    not _drains(address)
                    or json.loads(bytes(client.request("jobs").wait()))["jobs"][0]["held_bytes"] > 0
                ):
                    until = time.monotonic()
                    assert until < start + 20
            expected = _part(0, 0) + _part(1, 0)
            assert client.pull("sums/7/1/1/0").wait().tobytes() == expected.tobytes()


def _drains(address: str) -> bool:
    with urllib.request.urlopen(f"http://{address}/", timeout=5) as answer:
        return bool(json.loads(answer.read())["draining"])
