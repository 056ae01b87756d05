"""Random calls of several clients to the server of an endpoint, and the death of one of them: `./dev fuzz --endpoints`.

A program is JSON: for each client its calls, what the server takes, and a fate: a client or the server is killed with SIGKILL,
the server closes and serves again, connections are cut, or nothing happens. `run` runs it in processes of their own. `judge`
holds what clients were told against the server's log, which survives its death: every call that has ended well was done, no
call was done twice, and none was done of which the client was told that it was not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import pathlib
import random
import signal
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.distributed as dist

import cuts
import penstock
import ranks
from penstock import endpoint, errors

FATES = ("none", "client dies", "server dies", "server closes", "cuts")
# A few streams are as good as sixteen here, and open sooner.
MEDIA = {"tcp": {"PENSTOCK_SHM": "0", "PENSTOCK_STREAMS": "4"}, "memory": {"PENSTOCK_SHM": "1"}}

Program = dict[str, Any]
Data = npt.NDArray[np.uint8]


def generate(seed: int) -> Program:
    """The program of a seed. Five seeds in a row have each fate once."""
    chance = random.Random(seed)
    clients = [_calls(chance) for _ in range(chance.randint(1, 3))]
    fate = FATES[seed % len(FATES)]
    return {
        "seed": seed,
        "fate": fate,
        # After how many calls of the client that dies, or that the server's handlers have seen; and how much later, in seconds.
        "when": [chance.randint(0, 25), chance.choice([0.0, chance.uniform(0, 0.002), chance.uniform(0, 0.02)])],
        "limits": {
            "calls": chance.choice([1, 2, 8, 64]),
            "request_bytes": _MOST_REQUEST,
            "push_bytes": _MOST_PUSH,
            "in_flight_bytes": chance.choice([_MOST_PUSH, 2 * _MOST_PUSH, 1 << 30]),
        },
        "threads": chance.randint(1, 3),
        "clients": clients,
    }


def _calls(chance: random.Random) -> list[dict[str, Any]]:
    made = []
    for _ in range(chance.randint(5, 50)):
        kind = chance.choice(["request", "push", "pull"])
        name = chance.choice(_NAMES[kind])
        size = 0 if kind == "pull" else chance.choice(_SIZES)
        call = {"kind": kind, "name": name, "size": size, "priority": chance.choice([0, 100, 128, 128, 128, 200])}
        if chance.random() < 0.1:
            call["timeout_s"] = chance.choice([0.001, 0.01, 0.1])
        if chance.random() < 0.3:
            call["into"] = True
        if chance.random() < 0.1:
            call["changes_to"] = chance.choice([0, 128, 255])
        # How many calls may be under way when this one has been made.
        call["most"] = chance.choice([0, 0, 3, 100])
        made.append(call)
    return made


# ---------------------------------------------------------------------------------------------------------- what must hold


@dataclasses.dataclass(frozen=True)
class Told:
    """What a client was told of a call."""

    client: int
    index: int
    end: str
    """"done", or the error's name; "not sent" for one that timed out before it was sent."""
    text: str = ""
    """Of the error."""


def judge(program: Program, told: Iterable[Told], log: Iterable[str]) -> list[str]:
    """What is wrong with a run, in words. Pure. ``log`` has a line ``client index begun`` for each call with data that a handler
    began, then one with ``done`` or ``wrong``."""
    begun: dict[tuple[int, int], int] = {}
    done: set[tuple[int, int]] = set()
    problems = []
    for line in log:
        client, index, what = line.split()
        key = int(client), int(index)
        if what == "begun":
            begun[key] = begun.get(key, 0) + 1
        elif what == "done":
            done.add(key)
        else:
            problems.append(f"call {key}, or what was handled in its place, had {what} bytes")
    problems += [f"call {key} was handled {count} times" for key, count in begun.items() if count > 1]
    for one in told:
        key, call = (one.client, one.index), program["clients"][one.client][one.index]
        what = f"call {key}, {call['kind']} {call['name']!r} of {call['size']} bytes, ended with {one.end}"
        if one.end not in _may_end(program, call):
            problems.append(f"{what}, where it may end with {', '.join(sorted(_may_end(program, call)))}: {one.text}")
        if call["size"] == 0:
            continue
        if one.end == "done" and key not in done:
            problems.append(f"{what}, and its handler has not returned")
        if one.end in ("Config", "not sent") and key in begun:
            problems.append(f"{what}, and a handler had it")
    return problems


def _may_end(program: Program, call: dict[str, Any]) -> set[str]:
    name, kind = call["name"], call["kind"]
    most = _MOST_PUSH if kind == "push" else _MOST_REQUEST
    if name == "unknown" or call["size"] > most:
        ends = {"Config"}
    elif name == "fails":
        ends = {"HandlerFailed"}
    else:
        ends = {"done"}
    if "timeout_s" in call:
        ends |= {"Timeout", "not sent"}
    if program["fate"] == "server dies":
        ends.add("PeerLost")
    return ends


# ------------------------------------------------------------------------------------------------------------- running it


def run(program: Program, medium: str) -> list[str]:
    """Run a program; returns what is wrong with it."""
    count, fate = len(program["clients"]), program["fate"]
    with tempfile.TemporaryDirectory(prefix="calls-") as folder:
        log = pathlib.Path(folder) / "log"
        log.touch()
        # Rank 0 serves, the last rank serves after its death.
        successor = 1 if fate == "server dies" else 0
        with ranks.Ranks(_process, count=1 + count + successor, env=MEDIA[medium], args=(program, str(log))) as job:
            outcomes = job.outcomes(timeout_s=_PATIENCE_S, grace_s=None)
        killed = {"server dies": 0, "client dies": 1}.get(fate)
        problems = [str(one) for one in outcomes if not one.ok and one.rank != killed]
        if killed is not None and outcomes[killed].exit_code != -signal.SIGKILL:
            problems.append(f"rank {killed} should have died: {outcomes[killed]}")
        told = [Told(*each) for one in outcomes[1 : 1 + count] if one.ok for each in one.value]
        return problems + judge(program, told, log.read_text().splitlines())


def shrink(program: Program, medium: str, trials: int) -> Program:
    """A smaller program that fails, too, if some of ``trials`` runs find one: fewer clients, fewer calls of each."""
    while True:
        for candidate in _smaller(program):
            if trials == 0:
                return program
            trials -= 1
            if run(candidate, medium):
                program = candidate
                break
        else:
            return program


def _smaller(program: Program) -> Iterator[Program]:
    clients = program["clients"]
    for at in range(len(clients)):
        if len(clients) > 1:
            yield {**program, "clients": clients[:at] + clients[at + 1 :]}
    for at, calls in enumerate(clients):
        half = len(calls) // 2
        for part in (calls[:half], calls[half:]) if half else ():
            yield {**program, "clients": [*clients[:at], part, *clients[at + 1 :]]}


def _process(program: Program, log: str) -> list[tuple[Any, ...]]:
    rank = int(os.environ["RANK"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    count = len(program["clients"])
    if rank == 0:
        _Server(program, log).serve(store, may_meet_its_fate=True)
        return []
    if rank > count:
        store.wait(["server lost"], _PATIENCE)
        _Server(program, log).serve(store, may_meet_its_fate=False)
        return []
    return [dataclasses.astuple(told) for told in _Client(program, rank - 1, store).run()]


class _Server:
    """Serves what programs ask for, and writes down what its handlers see."""

    def __init__(self, program: Program, log: str) -> None:
        self._program = program
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND)
        self._lock = threading.Lock()
        self._seen = 0
        self._fateful = threading.Event()

    def serve(self, store: dist.Store, *, may_meet_its_fate: bool) -> None:
        fate, (after, later_s) = self._program["fate"], self._program["when"]
        meets = may_meet_its_fate and fate in ("server dies", "server closes")
        self._after = after if meets else -1
        self._server = self._start()
        # A store of its own: one that waits answers nothing else.
        end = threading.Thread(target=self._meet_fate, args=(fate, later_s, store.clone()), daemon=True)
        if meets:
            end.start()
        if self._after == 0:
            self._fateful.set()
        clients = range(fate == "client dies", len(self._program["clients"]))
        store.wait([*(f"ended {client}" for client in clients), "connected 0"], _PATIENCE)
        if meets:
            # Clients may have ended before as many calls were seen.
            self._fateful.set()
            end.join()
        # One that was killed is noticed within a second. No event says so; `run` has a deadline.
        while (stats := self._server.stats())["clients"]:
            time.sleep(0.01)
        assert (stats["calls"], stats["held_bytes"]) == (0, 0), stats
        self._server.close()

    def _start(self) -> endpoint.Server:
        return endpoint.serve(
            "calls",
            requests={"echo": self._echo, "fails": self._fail, "empty": self._nothing},
            pushes={"data": self._nothing, "slow": self._slow, "fails": self._fail},
            pulls={"still": _pattern(0, 0, 100_001), "made": lambda _: _pattern(0, 1, 3 << 20), "fails": self._fail},
            limits=endpoint.Limits(**self._program["limits"]),
            threads=self._program["threads"],
        )

    def _meet_fate(self, fate: str, later_s: float, store: dist.Store) -> None:
        self._fateful.wait()
        time.sleep(later_s)
        if fate == "server dies":
            # Clients that it has not answered yet cannot notice its death: they wait for the next one.
            store.set("server lost", "")
            os.kill(os.getpid(), signal.SIGKILL)
        before, self._server = self._server, self._start()
        before.close(_PATIENCE_S)

    def _begin(self, call: endpoint.Incoming) -> str | None:
        with self._lock:
            self._seen += 1
            if self._seen == self._after:
                self._fateful.set()
        if call.data.size == 0:
            return None
        client, index = (int(each) for each in call.data[:_HEAD].view(np.uint32))
        self._note(f"{client} {index} begun")
        if not np.array_equal(call.data, _pattern(client, index, call.data.size)):
            self._note(f"{client} {index} wrong")
        return f"{client} {index} done"

    def _note(self, line: str | None) -> None:
        if line:
            os.write(self._log, f"{line}\n".encode())  # one write: whole, also if this process dies now

    def _nothing(self, call: endpoint.Incoming) -> None:
        self._note(self._begin(call))

    def _slow(self, call: endpoint.Incoming) -> None:
        end = self._begin(call)
        time.sleep(0.01)  # a handler that is late on purpose
        self._note(end)

    def _echo(self, call: endpoint.Incoming) -> Data:
        self._note(self._begin(call))
        return call.data[::-1].copy()

    def _fail(self, call: endpoint.Incoming) -> None:
        self._begin(call)
        raise ValueError("no")


class _Client:
    """Makes the calls of one client, and connects again when it must."""

    def __init__(self, program: Program, client: int, store: dist.Store) -> None:
        self._program, self._number, self._store = program, client, store
        self._chance = random.Random(program["seed"] * 10 + client)
        self._told: list[Told] = []
        # Calls that were made and whose end is not known.
        self._open: list[tuple[int, endpoint.Work]] = []
        self._again: list[int] = []
        self._is_lost = False

    def run(self) -> list[Told]:
        fate, (after, later_s) = self._program["fate"], self._program["when"]
        dies = fate == "client dies" and self._number == 0
        self._client = self._connect()
        self._store.set(f"connected {self._number}", "")
        for index in range(len(self._program["clients"][self._number])):
            if dies and index == after:
                threading.Timer(later_s, _die).start()
            self._make(index)
        self._settle(0)
        if dies:
            _die()
        self._client.close()
        self._store.set(f"ended {self._number}", "")
        return self._told

    def _make(self, index: int) -> None:
        call = self._program["clients"][self._number][index]
        with penstock.priority(call["priority"]) as block:
            self._open.append((index, self._start(index, call)))
        if "changes_to" in call:
            block.change(call["changes_to"])
        if self._program["fate"] == "cuts" and self._chance.random() < 0.3:
            cuts.cut_a_connection(self._chance)
        self._settle(call["most"])

    def _start(self, index: int, call: dict[str, Any]) -> endpoint.Work:
        data = _pattern(self._number, index, call["size"]) if call["size"] else None
        more = {"timeout_s": call["timeout_s"]} if "timeout_s" in call else {}
        if call["kind"] == "push":
            return self._client.push(call["name"], data, **more)
        size = self._reply(index, call).size
        into = np.zeros(size, np.uint8) if call.get("into") and size else None
        if call["kind"] == "pull":
            return self._client.pull(call["name"], into=into, **more)
        return self._client.request(call["name"], data, into=into, **more)

    def _settle(self, most: int) -> None:
        """Wait until no more than so many calls are open. After the end of a connection all are: those of which nothing was done
        are made again."""
        while len(self._open) > most or (self._is_lost and self._open):
            index, work = self._open.pop(0)
            end, text = self._end(index, work)
            if end == "Closed":
                self._again.append(index)
            else:
                self._told.append(Told(self._number, index, end, text))
            self._is_lost |= end in ("Closed", "PeerLost")
        if self._is_lost:
            self._connect_again()
            again, self._again = self._again, []
            for index in again:
                self._make(index)

    def _connect_again(self) -> None:
        self._is_lost = False
        with contextlib.suppress(errors.PenstockError):
            self._client.close()
        self._client = self._connect()

    def _connect(self) -> endpoint.Client:
        while True:
            # The server may end meanwhile.
            with contextlib.suppress(errors.Closed, errors.PeerLost):
                return endpoint.connect("calls", timeout_s=_PATIENCE_S)

    def _end(self, index: int, work: endpoint.Work) -> tuple[str, str]:
        call = self._program["clients"][self._number][index]
        try:
            reply = work.wait(_PATIENCE_S)
        except errors.PenstockError as error:
            if isinstance(error, errors.Timeout):
                assert "timeout_s" in call, error
                return "not sent" if "nothing was sent" in str(error) else "Timeout", str(error)
            return type(error).__name__, str(error)
        if call["kind"] != "push":
            assert np.array_equal(reply, self._reply(index, call)), f"the reply to call {index} has wrong bytes"
        return "done", ""

    def _reply(self, index: int, call: dict[str, Any]) -> Data:
        match call["kind"], call["name"]:
            case "request", "echo":
                return _pattern(self._number, index, call["size"])[::-1] if call["size"] else _NONE
            case "pull", "still":
                return _pattern(0, 0, 100_001)
            case "pull", "made":
                return _pattern(0, 1, 3 << 20)
        return _NONE


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _pattern(client: int, index: int, size: int) -> Data:
    """Bytes that show whose they are: the head names the client and the call."""
    data = np.random.default_rng([client, index, size]).integers(0, 256, size, np.uint8)
    data[:_HEAD] = np.array([client, index], np.uint32).view(np.uint8)
    return data


_NONE: Data = np.zeros(0, np.uint8)
_HEAD = 8
# Whether data is copied, inlined, granted or a reference depends on these.
_SIZES = [0, 8, 1000, 8192, 8193, 32_769, 100_001, 300_000, 1 << 20, (1 << 20) + 1]
_MOST_REQUEST, _MOST_PUSH = 300_000, 1 << 20
_NAMES = {
    "request": ["echo", "echo", "echo", "empty", "fails", "unknown"],
    "push": ["data", "data", "data", "slow", "fails", "unknown"],
    "pull": ["still", "still", "made", "fails", "unknown"],
}
# A run takes a second; what has not ended after this hangs.
_PATIENCE_S = 60.0
_PATIENCE = datetime.timedelta(seconds=_PATIENCE_S)
