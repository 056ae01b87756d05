"""Keeps the live view running: a thread in each rank, and on rank 0 the server.

Once a second (every 2 s from 64 ranks on, and more seldom where it costs too much) a rank puts its numbers as JSON into the job's
store, under a key of its own; rank 0 reads those of all. The key has a random word that rank 0 draws and every rank learns with
its group, so that only rank 0's settings count, and jobs and lives that share a store do not meet.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.live import own
from penstock.live.counts import counts
from penstock.texts import of_exception

__all__ = ["Engine", "Job", "join", "leave", "serve"]

log = logging.getLogger("penstock")


@dataclass(frozen=True)
class Engine:
    """What the view asks of this process's engine."""

    stats: Callable[[], dict[str, Any]]
    record: Callable[[], str]
    rank: int
    generation: int
    interfaces: tuple[str, ...]


class Job:
    """This process's part in the view, from the first group on.

    Args:
        word: the random part of the keys.
    """

    current: Job | None = None

    def __init__(self, word: str) -> None:
        self.word = word
        self.front: Front | None = None
        """On rank 0, what shows the numbers."""
        self._lock = threading.Lock()
        """Held during a look, and while the engine changes."""
        self._engine: Engine | None = None
        self._own: own.Own | None = None
        self._store: Any = None
        self._ranks: set[int] = set()
        self._recorded_s = 0.0
        self._heard_of: set[int] = set()
        self._pause_s = 0.0
        self._stop = threading.Event()
        self._complaints = own.Complaints()
        for name in _LOGS:
            logging.getLogger(name).addFilter(self._complaints)
        counts.follow()
        self._thread = threading.Thread(target=self._run, name="penstock-live", daemon=True)
        atexit.register(self._end)

    @property
    def is_engaged(self) -> bool:
        """An engine is running."""
        return self._engine is not None

    def engage(self, engine: Engine, store: Callable[[], Any], ranks: Iterable[int]) -> None:
        """This process's engine has joined a group of these ranks. ``store``: makes a connection of the view's own."""
        with self._lock:
            is_new = self._engine is None
            self._ranks = set(ranks) if is_new else self._ranks | set(ranks)
            if self.front is not None:
                self.front.expect(self._ranks, engine.generation, anew=is_new)
            if is_new:
                self._engine = engine
                self._own = own.Own(engine.rank, engine.interfaces, counts, self._complaints)
                self._heard_of = set()
                self._recorded_s = time.monotonic()
                try:
                    self._store = store()
                except Exception as error:
                    self._lose_store(error)
        if self._thread.ident is None:
            self._thread.start()

    def disengage(self) -> None:
        """The engine stops: its last numbers are told."""
        if not self._lock.acquire(timeout=_LAST_S):
            self._engine = None  # its thread waits for the store
            return
        try:
            if self._engine is not None:
                self._tell("left")
                self._engine = None
                if self.front is not None:
                    self.front.pause()
        finally:
            self._lock.release()

    def forget(self) -> None:
        """In a forked child, which takes no part: the thread, the store and the server are the parent's."""
        if self.front is not None:
            self.front.forget()
        atexit.unregister(self._end)

    @property
    def _period_s(self) -> float:
        return _PERIOD_S if len(self._ranks) < _MANY else _LONG_PERIOD_S

    def _run(self) -> None:
        while not self._stop.wait(self._pause_s):
            began_s = time.thread_time()
            with self._lock:
                if self._engine is not None:
                    try:
                        self._look()
                    except Exception:
                        if not self.is_engaged:  # the process ends, and does not wait for a store that is silent
                            return
                        log.exception("the live view has failed on this rank; the training goes on")
                        return
            self._pause_s = max(self._period_s, (time.thread_time() - began_s) * _PAUSES)

    def _look(self) -> None:
        assert self._engine is not None and self._own is not None
        now_s = time.monotonic()
        if now_s >= self._recorded_s:
            began_s = time.thread_time()
            try:
                self._own.see_operations(json.loads(self._engine.record()), now_s)
            except RuntimeError:  # the engine stops at this moment
                return
            self._recorded_s = now_s + max(self._period_s, (time.thread_time() - began_s) * _PAUSES_OF_RECORD)
        numbers = self._tell("running")
        if self.front is not None and numbers is not None:
            self._gather()
            self.front.show(max(self._period_s, self._pause_s))

    def _tell(self, state: str) -> dict[str, Any] | None:
        """Put this rank's numbers into the store, and take them into the view."""
        assert self._engine is not None and self._own is not None
        try:
            stats = self._engine.stats()
        except RuntimeError:  # the engine stops at this moment
            stats = None
        numbers = self._own.look(stats, time.monotonic(), state)
        numbers["every_s"] = max(self._period_s, self._pause_s)
        text = own.text(numbers)
        if self.front is not None:
            self.front.hear(self._engine.rank, text.encode())
        if self._store is not None and len(self._ranks) > 1:
            try:
                self._store.set(self._key(self._engine.rank), text)
            except Exception as error:
                self._lose_store(error)
        return numbers

    def _gather(self) -> None:
        """Read what the other ranks have told. Asks for no key that is not there: that would wait for it."""
        assert self._engine is not None and self.front is not None
        if self._store is None:
            return
        others = sorted(self._ranks - {self._engine.rank})
        try:
            for rank in others:
                if rank not in self._heard_of and self._store.check([self._key(rank)]):
                    self._heard_of.add(rank)
            known = [rank for rank in others if rank in self._heard_of]
            for start in range(0, len(known), _BATCH):
                part = known[start : start + _BATCH]
                for rank, text in zip(part, self._store.multi_get([self._key(rank) for rank in part]), strict=True):
                    self.front.hear(rank, bytes(text))
        except Exception as error:
            self._lose_store(error)

    def _lose_store(self, error: Exception) -> None:
        self._store = None
        told = f"the job's store cannot be used ({(str(error) or repr(error)).splitlines()[0]})"
        if self.front is not None:
            self.front.lose(told)
        log.info("live view: %s", told)

    def _key(self, rank: int) -> str:
        assert self._engine is not None
        return f"penstock/live/{self.word}/{self._engine.generation}/{rank}"

    def _end(self) -> None:
        """The process ends."""
        self._stop.set()
        error = getattr(sys, "last_value", None)
        if error is not None and self._engine is not None:
            self._complaints.add(f"the script ends with {of_exception(error)}")
        self.disengage()
        if self.front is not None:
            why = "rank 0's script is done" if error is None else of_exception(error)
            self.front.end(why.splitlines()[0][:_TEXT])


class Front:
    """Rank 0's side: the view, and who is shown it.

    Args:
        address: where to serve; None: nobody is served.
        token: which viewers must have; empty: a random one.
        tensorboard: a folder for scalars, or nothing.
        version: of Penstock.
    """

    def __init__(self, address: tuple[str, int] | None, token: str, tensorboard: str, version: str) -> None:
        # Only here: other ranks need none of it.
        from penstock.live import found, metrics, page, scalars, shown, view
        from penstock.live.server import Answer, Server

        self._shown, self._metrics = shown, metrics
        self._parse = view.parse
        self._began_s = time.monotonic()
        about = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "version": version,
            "generation": 0,
            "up_s": 0.0,
            "end": "",
        }
        self._view = view.View(about)
        self._lock = threading.Lock()
        self._pause_s = _PERIOD_S
        self.server: Server | None = None
        self._entry: found.Entry | None = None
        self._ended = False
        if address is not None:
            what = f"process {os.getpid()}: {' '.join(sys.argv)[:200]}"
            document = page.answer(f"process {os.getpid()}")
            token = token or secrets.token_urlsafe(24)
            paths = {
                "/": lambda: document,
                "/metrics": lambda: Answer(metrics.CONTENT_TYPE, self._metrics_now().encode()),
            }
            self._listen(address, Server, token, paths, found.Entry, what)
        self._scalars = scalars.write(tensorboard) if tensorboard else None
        self.is_on = self.server is not None or self._scalars is not None

    def _listen(
        self, address: tuple[str, int], server: Any, token: str, paths: dict[str, Any], entry: Any, what: str
    ) -> None:
        host, port = address
        try:
            self.server = server(host, port, token, paths)
        except OSError as error:
            log.warning(
                "PENSTOCK_LIVE=%s: the live view cannot listen at %s port %d: %s. The training goes on without it; "
                "PENSTOCK_LIVE=0 takes a free port.",
                os.environ.get("PENSTOCK_LIVE", ""),
                host,
                port,
                error.strerror or error,
            )
            return
        assert self.server is not None
        self.server.start()
        port = self.server.port
        url = _url({"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host), port, token)
        try:
            self._entry = entry(_url({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port, token), what)
        except OSError as error:
            log.warning("`penstock top` finds this job only by its URL: %s", error)
        print(f"penstock: live view: {url} (or in a terminal of this host: penstock top)", file=sys.stderr, flush=True)

    def expect(self, ranks: Iterable[int], generation: int, *, anew: bool) -> None:
        with self._lock:
            self._view.state = "running"
            self._view.deaf = "" if anew else self._view.deaf
            self._view.about["generation"] = generation
            self._view.expect(ranks, time.monotonic(), anew=anew)

    def hear(self, rank: int, text: bytes) -> None:
        numbers = self._parse(text)
        if numbers is not None:
            with self._lock:
                self._view.hear(rank, numbers, time.monotonic())

    def show(self, pause_s: float) -> None:
        """Send the numbers to all viewers; they are sent again after ``pause_s``."""
        self._pause_s = pause_s
        with self._lock:
            job = self._snapshot()
            told = json.dumps(self._shown.event(job), separators=(",", ":"))
        if self.server is not None:
            self.server.publish(told)
        if self._scalars is not None:
            try:
                self._scalars.write(job)
            except Exception as error:  # a full disk
                log.warning("no more scalars are written to PENSTOCK_LIVE_TENSORBOARD: %s", error)
                self._scalars = None

    def lose(self, why: str) -> None:
        """Other ranks cannot be heard of."""
        with self._lock:
            self._view.deaf = why

    def pause(self) -> None:
        """The last group has ended; another may follow."""
        with self._lock:
            self._view.state = "between groups"
        self.show(self._pause_s)

    def end(self, why: str) -> None:
        """The process ends."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            self._view.state, self._view.about["end"] = "ended", why
        self.show(self._pause_s)
        if self.server is not None:
            self.server.close()
        if self._scalars is not None:
            self._scalars.close()
        if self._entry is not None:
            self._entry.remove()

    def forget(self) -> None:
        """In a forked child."""
        if self.server is not None:
            self.server.forget()
        if self._entry is not None:
            self._entry.close()

    def _metrics_now(self) -> str:
        with self._lock:
            return self._metrics.text(self._snapshot())

    def _snapshot(self) -> Any:
        self._view.about["up_s"] = time.monotonic() - self._began_s
        return self._view.snapshot(time.monotonic(), self._pause_s)


def _url(host: str, port: int, token: str) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/?token={token}"


def serve(address: tuple[str, int] | None, token: str, tensorboard: str, version: str) -> str | None:
    """On rank 0: begin to show the job, unless this process does so already.

    Returns: the word that the other ranks join with; None where nothing can be shown.
    """
    global _is_refused
    current = Job.current
    if _is_refused or (current is not None and current.front is not None):
        return None if current is None else current.word
    front = Front(address, token, tensorboard, version)
    _is_refused = not front.is_on
    if _is_refused:
        return None
    if current is None:
        current = Job.current = Job(secrets.token_hex(8))
    else:  # it was another rank of the job's earlier life
        current.word = secrets.token_hex(8)
    current.front = front
    return current.word


def join(word: str, engine: Engine, store: Callable[[], Any], ranks: Sequence[int]) -> None:
    """Take part in the view that ``word`` stands for: a group of ``ranks`` has been joined."""
    current = Job.current
    if current is None:
        current = Job.current = Job(word)
    elif current.word != word:
        if current.is_engaged:
            return  # two views in one job: the first one counts
        # Rank 0 is another process now.
        current.word = word
        if current.front is not None:
            current.front.end("rank 0 is another process now")
            current.front = None
    current.engage(engine, store, ranks)


def leave() -> None:
    """The engine stops."""
    if Job.current is not None:
        Job.current.disengage()


def _forget() -> None:
    if Job.current is not None:
        Job.current.forget()
        # Kept: a thread of the parent may have been within a call of the store, which must not be destroyed then.
        _parents.append(Job.current)
        Job.current = None


_parents: list[Job] = []
_is_refused = False
"""What was asked for cannot be had. A warning has said so; the next group does not ask again."""
os.register_at_fork(after_in_child=_forget)
_LOGS = ("penstock", "penstock.tune", "penstock.elastic")
_PERIOD_S = 1.0
# From `_MANY` ranks on: rank 0 reads as many records as there are ranks.
_LONG_PERIOD_S = 2.0
_MANY = 64
# Pauses are this many times the processor time of a look: 0.25 % of a core at most, and 0.1 % for the flight record.
_PAUSES = 400
_PAUSES_OF_RECORD = 1000
# Keys a read, some 128 KiB.
_BATCH = 128
# How long the end of a process waits for a look that waits for the store.
_LAST_S = 1.0
_TEXT = 300
