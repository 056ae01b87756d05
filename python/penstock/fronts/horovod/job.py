"""One life of Horovod in this process, from ``init()`` to ``shutdown()``: its ranks, its process sets, its groups.

``init`` makes a process group of the penstock backend out of what the launcher says. Where the script has called
``init_process_group`` itself, its ranks are taken, whatever their backend is. Nothing of the script's own groups is used for
operations: each process set has a group for itself, so that the order of its operations is its own affair.
"""

from __future__ import annotations

import atexit
import collections
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from penstock.fronts.horovod import launch
from penstock.fronts.horovod.controller import Controller, Settings
from penstock.fronts.horovod.timeline import Timeline

__all__ = ["NOT_INITIALIZED", "Job", "current", "init", "is_initialized", "shutdown"]


@dataclass(frozen=True)
class Topology:
    """A rank's place on the hosts of its job, in Horovod's words."""

    local_rank: int
    """Its index among the ranks on its host."""
    local_size: int
    cross_rank: int
    """Its index among the ranks that have its local rank, one a host."""
    cross_size: int
    homogeneous: bool
    """Whether all hosts have equally many ranks."""

    @classmethod
    def of(cls, rank: int, places: Sequence[tuple[str, int | None]]) -> Topology:
        """The place of ``rank``, from the host of every rank and its local rank, if its launcher says one."""
        hosts: dict[str, list[int]] = {}
        for each, (host, _) in enumerate(places):
            hosts.setdefault(host, []).append(each)

        def local(rank: int) -> int:
            # A launcher's local ranks count only if all have one, each another on its host: devices are chosen by them.
            host, said = places[rank]
            there = hosts[host]
            said_there = {places[each][1] for each in there}
            is_complete = None not in said_there and len(said_there) == len(there)
            return said if said is not None and is_complete else there.index(rank)

        own_host, local_rank = places[rank][0], local(rank)
        with_same = [host for host, there in hosts.items() if any(local(each) == local_rank for each in there)]
        return cls(
            local_rank=local_rank,
            local_size=len(hosts[own_host]),
            cross_rank=with_same.index(own_host),
            cross_size=len(with_same),
            homogeneous=len({len(there) for there in hosts.values()}) == 1,
        )


class Job:
    """What ``init`` makes. Blocks until all of its ranks have called it.

    Args:
        ranks: the processes that take part, by their number at the launcher, in the order of their ranks; None for all.
    """

    def __init__(self, ranks: Sequence[int] | None) -> None:
        where = launch.place(os.environ)
        self.pid = os.getpid()
        self._own_world = not dist.is_initialized()
        everybody = where.size if self._own_world else dist.get_world_size()
        self.world = world = list(range(everybody)) if ranks is None else list(ranks)
        """Its ranks, by their number at the launcher, or in the script's own process group."""
        if self._own_world:
            if where.rank not in world:
                raise ValueError(f"rank {where.rank} called hvd.init(comm={world}) and is not in it")
            dist.init_process_group(
                "penstock",
                store=dist.PrefixStore(f"horovod/{_next_life(world)}", _store(where)),
                rank=world.index(where.rank),
                world_size=len(world),
                timeout=_TIMEOUT,
            )
            ranks = None
        self.timeline = Timeline()
        self._ranks_of: dict[int, list[int]] = {}
        self._controllers: dict[int, Controller | None] = {}
        self._tell: list[Callable[[str], None]] = []
        try:
            self._begin(where, ranks)
        except BaseException:
            self.leave()
            raise

    def _begin(self, where: launch.Place, ranks: Sequence[int] | None) -> None:
        # The numbers that torch gives our ranks.
        self._global = list(range(dist.get_world_size())) if ranks is None else list(ranks)
        if dist.get_rank() not in self._global:
            raise ValueError(f"rank {dist.get_rank()} called hvd.init(comm={self._global}) and is not in it")
        self.rank = self._global.index(dist.get_rank())
        self.size = len(self._global)
        self.settings = Settings.read()
        self.dynamic = os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS", "0") not in ("", "0")
        # Where only some of torch's ranks take part, the others make no groups.
        self._alone = self.size < dist.get_world_size()
        self.add(list(range(self.size)))
        self.topology = self._find_topology(where)
        path = os.environ.get("HOROVOD_TIMELINE", "")
        self.dynamic_timeline = path != ""
        if path not in ("", "DYNAMIC") and self.rank == 0:
            self.timeline.start(path, os.environ.get("HOROVOD_TIMELINE_MARK_CYCLES", "0") not in ("", "0"))

    # ------------------------------------------------------------------ process sets

    def add(self, ranks: list[int]) -> int | None:
        """Make a process set; all ranks call it, in the same order. Returns its number, None if the set exists already.

        Raises:
            ValueError: a rank that does not exist, or one twice.
        """
        if len(set(ranks)) != len(ranks) or not all(0 <= rank < self.size for rank in ranks):
            raise ValueError(f"a process set of ranks {ranks} cannot be made in a job of {self.size} ranks")
        if ranks in self._ranks_of.values():
            return None
        number = next(free for free in range(len(self._ranks_of) + 1) if free not in self._ranks_of)
        controller = None
        if ranks:
            group = dist.new_group(
                [self._global[rank] for rank in ranks],
                backend="penstock",
                timeout=_TIMEOUT,
                use_local_synchronization=self._alone,
            )
            if self.rank in ranks:
                controller = Controller(group, ranks, self.settings, self.timeline)
        self._ranks_of[number] = ranks
        self._controllers[number] = controller
        return number

    def remove(self, number: int) -> bool:
        """Take a process set away; all ranks call it. Returns whether there was one."""
        if number not in self._ranks_of:
            return False
        del self._ranks_of[number]
        controller = self._controllers.pop(number)
        if controller is not None:
            _stop([controller])
            dist.destroy_process_group(controller.group.process_group)
        return True

    def sets(self) -> dict[int, list[int]]:
        """The ranks of every process set, by its number; 0 is all of them."""
        return dict(self._ranks_of)

    def controller(self, number: int | None, what: str) -> Controller:
        """A process set's controller, for the operation ``what``.

        Raises:
            ValueError: there is no such set, or this rank is not in it.
        """
        if number is None or number not in self._controllers:
            raise ValueError(f"{what}: Process set provided does not exist, or has not been registered.")
        found = self._controllers[number]
        if found is None:
            raise ValueError(f"{what}: Rank {self.rank} is not a member of the provided process set.")
        return found

    def tell_at_end(self, tell: Callable[[str], None]) -> None:
        """Call this when the job ends here and not on all ranks."""
        self._tell.append(tell)

    # ------------------------------------------------------------------ hosts

    def _find_topology(self, where: launch.Place) -> Topology:
        """Exchange what the launcher says of each rank, and its host's name where the launcher does not name the host."""
        own = (where.node if where.node is not None else socket.gethostname(), where.local_rank)
        theirs: list[Any] = [None] * self.size
        dist.all_gather_object(theirs, own, group=self.controller(0, "init").group.process_group)
        return Topology.of(self.rank, theirs)

    # ------------------------------------------------------------------ the end

    def leave(self) -> None:
        """End all process sets and leave the groups that this made."""
        self.timeline.stop()
        controllers = [controller for controller in self._controllers.values() if controller is not None]
        if not _stop(controllers):
            # Ranks that wait for this one in a group without rounds must know, too.
            for tell in self._tell:
                tell(f"rank {self.rank} has shut Horovod down")
        self._controllers = {}
        self._ranks_of = {}
        if self._own_world:
            # It takes the process sets' groups along.
            dist.destroy_process_group()
        else:
            for controller in controllers:
                dist.destroy_process_group(controller.group.process_group)


def init(ranks: Sequence[int] | None) -> Job:
    """Start Horovod in this process; what runs already stays.

    Raises:
        ValueError: it runs, with other ranks than these.
    """
    global _job
    if _job is not None and ranks is not None and list(ranks) != _job.world:
        raise ValueError(
            f"hvd.init(comm={list(ranks)}) was called while Horovod runs with ranks {_job.world}; call hvd.shutdown() first"
        )
    if _job is None:
        _job = Job(ranks)
        # Ranks that are waited for say good-bye, also where the script forgets to.
        atexit.unregister(shutdown)
        atexit.register(shutdown)
    return _job


def shutdown() -> None:
    """End Horovod in this process; harmless where it does not run. Blocks until what all ranks have agreed on has ended, 30 s at
    most; everything else that is pending fails, here and on other ranks."""
    global _job
    job, _job = _job, None
    if job is not None and job.pid == os.getpid():
        job.leave()


def current() -> Job:
    """What ``init`` has started.

    Raises:
        ValueError: it was not called, or ``shutdown`` was since, or this process was forked from one that had.
    """
    if _job is None or _job.pid != os.getpid():
        raise ValueError(NOT_INITIALIZED)
    return _job


def is_initialized() -> bool:
    """Whether `current` would return."""
    return _job is not None and _job.pid == os.getpid()


def _stop(controllers: Sequence[Controller]) -> bool:
    """Stop these at once; whether all of their ranks have."""
    for controller in controllers:
        controller.stopping()
    now_s = time.monotonic()
    together = [
        controller.stop(together_until_s=now_s + _PATIENCE_S, until_s=now_s + _DELIVERY_S) for controller in controllers
    ]
    return all(together)


def _store(where: launch.Place) -> Any:
    """Where the job's ranks meet. It outlives `shutdown`: ranks may come back, and rank 0 may be the last to leave."""
    global _meeting
    if _meeting is None or _meeting[0] != os.getpid():
        if where.size == 1 and "MASTER_PORT" not in os.environ:
            _meeting = os.getpid(), dist.HashStore()
        else:
            address, port = launch.meeting_point(os.environ, where, os.getppid())
            os.environ.setdefault("MASTER_ADDR", address)
            os.environ.setdefault("MASTER_PORT", str(port))
            _meeting = os.getpid(), next(iter(rendezvous("env://", where.rank, where.size, timeout=_TIMEOUT)))[0]
    return _meeting[1]


def _next_life(world: Sequence[int]) -> str:
    """Names this life of the job in the store, alike on all of its ranks: they start a job of these ranks equally often, however
    often they start others."""
    ranks = ",".join(map(str, world))
    _lives[ranks] += 1
    return f"{_lives[ranks]}/{ranks}"


NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."

_job: Job | None = None
_meeting: tuple[int, Any] | None = None
# How often a job of these ranks was started, by this process.
_lives: collections.Counter[str] = collections.Counter()
# torch's own default for gloo and for stores.
_TIMEOUT = timedelta(minutes=30)
# How long a rank that leaves waits for the others to leave as well. Longer than a round takes that has all of its ranks, so
# that nobody misses its end; short enough that a script that ends early ends.
_PATIENCE_S = 1.0
# How long it waits for the end of what all ranks have agreed on. Other ranks begin that at once, unless their script keeps Python
# from running. A guess: longer than scripts do so.
_DELIVERY_S = 30.0
