"""This process's engine: one serves all groups, from the first join until the last group is left.

Groups share its streams. Nothing here imports torch.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

from penstock import _core
from penstock.cluster import jobs
from penstock.errors import Closed
from penstock.runtime import config
from penstock.runtime import store as stores
from penstock.texts import apart

__all__ = ["Engine", "engine", "observe", "requests", "set_generation", "stats"]

log = logging.getLogger("penstock")


def stats() -> dict[str, Any]:
    """See `penstock.torch.stats`."""
    current = engine()
    found = current.core.stats()
    found["held"]["memberships"] = current._users
    aggregated: dict[str, Any] = {}
    found["aggregated"] = aggregated
    for aggregation, name in list(current.aggregations.items()):
        # Channels of several reducers have the same name.
        aggregated[apart(name, aggregated)] = aggregation.stats()
    return found


def engine() -> Engine:
    """This process's engine.

    Raises:
        penstock.errors.Closed: there is none.
    """
    if Engine.current is None:
        raise Closed('no process group of the "penstock" backend exists in this process')
    return Engine.current


def set_generation(generation: int | None) -> None:
    """Set the number of the job's life, instead of torchrun's count (None: torchrun's count again). It counts for the next
    engine, so set it after the last group was destroyed; the same on all ranks. `penstock.elastic` rebuilds jobs whose workers
    each have a torchrun."""
    global _generation
    _generation = generation


def life() -> int:
    """The number of the job's life: torchrun's count of restarts, unless `set_generation` was called."""
    return config.restarts() if _generation is None else _generation


def observe(observer: Callable[[_core.Engine | None], None]) -> None:
    """Call ``observer`` with the engine when the process starts one (now, if it has one), and with None before it stops. Calls
    come one at a time."""
    with Engine._lock:
        _observers.append(observer)
        if Engine.current is not None:
            observer(Engine.current.core)


class Engine:
    """This process's engine, counted by the groups that use it."""

    current: Engine | None = None
    _is_registered = False
    _lock = threading.RLock()

    def __init__(self, settings: config.Settings, store: Any, job_rank: int) -> None:
        named = [
            ("PENSTOCK_INTERFACE", settings.interface),
            ("GLOO_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME", "")),
            ("NCCL_SOCKET_IFNAME", os.environ.get("NCCL_SOCKET_IFNAME", "")),
        ]
        _core.init_logging(settings.log)
        _print_log(settings.log)
        _warn_of_unknown_variables()
        requests.ask(settings)
        self.interfaces, self.why = _core.choose_interfaces(named, stores.master(store))
        # Frames of an earlier life of the job are refused.
        self.job_rank = job_rank
        self.generation = life()
        self.core = _core.Engine(
            rank=job_rank,
            host=socket.gethostname(),
            generation=self.generation,
            addresses=list(dict.fromkeys(address for _, address in self.interfaces)),
            ports=settings.port_range,
            io_threads=settings.io_threads,
            streams=settings.streams,
            streams_within_host=config.streams_within_host(settings),
            shared_memory=settings.shm,
            ptracer=settings.ptracer,
            checksum=settings.checksum,
            dead_after_s=settings.peer_timeout,
            socket_buffer_bytes=settings.socket_buffer,
            flight_recorder=settings.flight_recorder or None,
        )
        _tell(self.core)
        if settings.flight_recorder:
            _write_on_signal()
        self.aggregations: dict[jobs.Aggregation, str] = {}
        """With the names of their groups or channels."""
        self._users = 0

    @classmethod
    def acquire(cls, settings: config.Settings, store: Any, job_rank: int) -> Engine:
        """This process's engine, started if there is none; its use count grows by one."""
        with cls._lock:
            if cls.current is None:
                cls.current = cls(settings, store, job_rank)
                if not cls._is_registered:
                    atexit.register(cls._at_exit)
                    cls._is_registered = True
            cls.current._users += 1
            return cls.current

    def release(self) -> None:
        """Reduce the use count by one, and stop the engine at 0."""
        with self._lock:
            self._users -= 1
            last = self._users == 0 and self.current is self
            if last:
                Engine.current = None
                _tell(None)
        if last:
            requests.tell()
            # A user who interrupts the script does not want to wait for other ranks.
            self.core.stop(wait=not isinstance(sys.exc_info()[1], KeyboardInterrupt))

    @classmethod
    def _at_exit(cls) -> None:
        # A script that ends without destroy_process_group still sends good-byes, so that no peer takes its end for a crash, and
        # closes its jobs at daemons.
        engine = cls.current
        if engine is not None:
            requests.tell()
            engine.core.stop(wait=not isinstance(getattr(sys, "last_value", None), KeyboardInterrupt))
            for aggregation in list(engine.aggregations):
                aggregation.close_jobs()
        # Operations have ended, also those of groups that are destroyed; callbacks of their futures may not have.
        _core.settle_callbacks(_CALLBACKS_S)

    @classmethod
    def _renew_lock(cls) -> None:
        """In a forked child, a new lock: a thread of the parent may hold the old one, and is not there to release it."""
        cls._lock = threading.RLock()


class _Requests:
    """What PENSTOCK_CHECK and PENSTOCK_TUNE ask for, and whether this process does it. Only reducers of gradients do
    (`GradientReducer`, `ddp_hook`, `hvd.DistributedOptimizer`); plain all-reduces, such as DDP's, know nothing of gradients and
    steps. A warning tells the user once that a check is not done."""

    def __init__(self) -> None:
        self._asked: list[str] = []
        self._all_reduces = 0
        self._is_over = False

    def ask(self, settings: config.Settings) -> None:
        """An engine starts, with these settings."""
        self._asked = [f"PENSTOCK_CHECK={','.join(sorted(settings.check))}"] if settings.check else []
        self._asked += (
            [f"PENSTOCK_TUNE={settings.tune if isinstance(settings.tune, str) else 1}"] if settings.tune else []
        )

    def take(self) -> None:
        """A reducer of gradients was made, which does what these settings ask for."""
        self._is_over = True

    def count_all_reduce(self) -> None:
        """Count a plain all-reduce."""
        self._all_reduces += 1
        if self._all_reduces == _MANY:
            self.tell()

    def tell(self) -> None:
        """Log the warning if there were only plain all-reduces; on one rank of a host, since its ranks rarely differ."""
        if self._is_over or not self._asked or not self._all_reduces:
            return
        self._is_over = True
        if os.environ.get("LOCAL_RANK", "0") == "0":
            log.warning(
                "%s: no effect so far, since nothing has reduced gradients but plain all-reduces (DistributedDataParallel's "
                "own, for one). Call penstock.torch.ddp_hook(model) on a DDP model, or use penstock.torch.GradientReducer "
                "(docs/guide/gradients.md).",
                " and ".join(self._asked),
            )


def _tell(engine: _core.Engine | None) -> None:
    """Call all observers. One that fails keeps neither the others from their call nor the engine from starting or stopping."""
    for observer in _observers:
        try:
            observer(engine)
        except Exception:
            what = "stops" if engine is None else "starts"
            log.warning("a part of Penstock failed while the engine %s; the training goes on", what, exc_info=True)


def _print_log(level: str) -> None:
    """Print log lines as PENSTOCK_LOG asks, if the program has not set up logging itself. Warnings are printed in any case."""
    if level in ("info", "debug") and not log.hasHandlers():
        log.setLevel(level.upper())
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[%(levelname)s] penstock: %(message)s"))
        log.addHandler(handler)


@functools.cache
def _warn_of_unknown_variables() -> None:
    """Warn of unknown variables and old names: once a process, and on one rank of a host, since its ranks rarely differ."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        for told in (*config.unknown_variables().values(), *config.renamed_variables().values()):
            log.warning("%s", told)


def _write_on_signal() -> None:
    """Let SIGUSR2 write the flight record of the current engine, unless the program handles that signal."""

    def write(*_: object) -> None:
        if (current := Engine.current) is not None:
            current.core.write_record()

    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL:
        signal.signal(signal.SIGUSR2, write)


requests = _Requests()
_observers: list[Callable[[_core.Engine | None], None]] = []
_generation: int | None = None
# After this many all-reduces, some hundred steps, a program hardly makes a reducer any more. A guess; a training of days should
# not learn at its end that nothing was checked.
_MANY = 1000
# How long the end of a script waits for callbacks. A guess: longer than any takes that does not wait for something itself.
_CALLBACKS_S = 5.0
os.register_at_fork(after_in_child=Engine._renew_lock)
