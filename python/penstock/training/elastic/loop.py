"""Trains through deaths and arrivals: one generation after the other, in one process."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from penstock.errors import Closed, Mismatch, PeerLost, PenstockError
from penstock.errors import Config as ConfigError
from penstock.runtime import config, contacts, process
from penstock.torch import backend
from penstock.training.elastic.membership import Finished, LeftBehind, Lobby, Roster, Rules, TooFew, connect
from penstock.training.elastic.state import MembershipChanged, State

__all__ = ["run"]

log = logging.getLogger("penstock.elastic")
Result = TypeVar("Result")


def run(
    train: Callable[[State], Result],
    state: State,
    *,
    min_ranks: int = 1,
    max_ranks: int | None = None,
    store: Any = None,
    job: str | None = None,
    timeout: timedelta = timedelta(minutes=30),
    window_s: float = 10.0,
    rebuild_timeout_s: float = 60.0,
    wait_s: float = 600.0,
    check_every: int = 10,
) -> Result | None:
    """Train, in one generation of workers after the other, until ``train`` returns on all ranks.

    Every generation has a default process group of the penstock backend. ``train(state)`` is called in each, with the state
    of the last committed step, the same on all ranks; it goes on from there, calls ``state.commit()`` in every step, and
    returns when it is done. When a rank dies, what its loss raises in the others leaves ``train``, and they build the next
    generation; the step that failed is repeated as a whole. When a newcomer waits, ``commit`` leaves ``train``.

    Args:
        train: everything that uses the group (DistributedDataParallel, a `GradientReducer`, subgroups) must be made in it, and it
            must close a reducer. Collectives belong before the step's commit.
        state: made of the same objects on all workers. A newcomer's values are overwritten. Before the job's first commit all get
            the state with the most steps: only some workers need to have loaded a checkpoint.
        min_ranks, max_ranks: fewer ranks wait for others; more workers wait in reserve.
        store: a torch store that outlives the workers; by default the one at PENSTOCK_ELASTIC_STORE=host:port
            (``python -m penstock.elastic.store``).
        job: tells jobs on one store apart; by default PENSTOCK_ELASTIC_JOB, else "default".
        timeout: for an operation of the group.
        window_s: how long to wait at the start for more than ``min_ranks``, and after a death for survivors who have not
            noticed (they do within PENSTOCK_PEER_TIMEOUT and a second). Too short leaves survivors behind; too long
            costs time only where a rank stops without its peers seeing why.
        rebuild_timeout_s: for connecting a generation's group: the cost of a death in the middle of that.
        wait_s: for a generation to form; a newcomer or a reserve waits no longer than this.
        check_every: steps between two looks for a newcomer. A look is an all-reduce of one number; a newcomer is let in
            at the second look that it is there for.

    Returns:
        what ``train`` returned, also (with a warning) where the store or the other workers died after that; None on a worker
        that found the job finished.

    Raises:
        penstock.elastic.LeftBehind: the others took this worker for dead. Calling ``run`` again joins as a newcomer.
        penstock.elastic.TooFew: fewer than ``min_ranks`` for ``wait_s``; ``state`` is as last committed.
        penstock.elastic.StateLost: a newcomer to a job that has committed steps, and whose members have not come for ``wait_s``.
        penstock.errors.Config: there is no store, or an argument is wrong.
        Other errors of ``train`` pass, and the other workers go on without this one.

    Trust: every process that reaches the store can ask to join, and PENSTOCK_SECRET decides which ones may. Members trust each
    other: they exchange pickled objects.
    """
    if check_every < 1:
        raise ConfigError(f"check_every must be 1 or more, not {check_every}")
    if dist.is_initialized():
        raise ConfigError(
            "there is a default process group already, and run() makes one for each generation: call destroy_process_group() "
            "first, or leave init_process_group() out"
        )
    settings = config.read()
    silent_s = max(Rules.silent_s, settings.peer_timeout + 1)
    rules = Rules(min_ranks, max_ranks, window_s, wait_s, silent_s)
    process._print_log(settings.log)
    job = job or settings.elastic_job
    worker = _Worker(train, state, timeout, timedelta(seconds=rebuild_timeout_s), check_every)
    try:
        worker.lobby = Lobby(
            connect(settings.elastic_store) if store is None else store, job, rules, state.snapshot()["step"]
        )
        worker.lobby.report(-1)
        while not worker.live_one_generation():
            # Objects that use the old group, with their hooks on parameters, must be collected before the next group is made.
            gc.collect()
    except Finished as end:
        if not worker.done:
            log.warning("%s; this worker came too late to do anything", end)
    except (LeftBehind, TooFew, dist.DistError) as error:
        if error is worker.failure and worker.lobby.answers():
            raise
        if worker.done and not isinstance(error, LeftBehind):
            log.warning(
                "job %r: %s This worker's training had come to its end before, and run() returns its result; the others of "
                "generation %d may not have come so far",
                job,
                _sentence(error),
                worker.lobby.generation,
            )
            return worker.result
        if isinstance(error, (LeftBehind, TooFew)):
            # Drops everything of a step that failed.
            state.restore()
            raise
        raise ConfigError(
            f"the store of elastic job {job!r} is gone, so that no new generation can be agreed on: "
            f"{str(error).splitlines()[0]}. Start the job again from a checkpoint, with a new store."
        ) from error
    finally:
        state._after_commit = None
        process.set_generation(None)
        _destroy()
    return worker.result


class _Worker:
    """This process's part in the job, from its first generation to its last."""

    lobby: Lobby

    def __init__(
        self, train: Callable[[State], Any], state: State, timeout: timedelta, rebuild: timedelta, check_every: int
    ) -> None:
        self.train = train
        self.state = state
        self.timeout = timeout
        self.rebuild = rebuild
        self.check_every = check_every
        self.result: Any = None
        self.done = False
        self.has_state = False
        self.failure: Exception | None = None
        """What ``train`` raised by itself."""
        self._failures = 0
        self._futile: tuple[tuple[int, ...], int] = (), 0
        """The members of the last generation that ended without a commit, and how often it was those one after the other."""
        self._commits = 0
        self._store_failed = False
        # Ends this generation's heartbeats.
        self._has_committed: Callable[[], None] = _nothing

    def live_one_generation(self) -> bool:
        """Build the next generation and train in it. Returns whether the job has ended; otherwise this worker has reported for
        the next one."""
        roster = self.lobby.await_roster()
        lost: dict[int, str] = {}
        try:
            with (
                self.lobby.heartbeats() if roster.step <= 0 else contextlib.nullcontext(_nothing) as self._has_committed
            ):
                if not self._build(roster):
                    lost = _lost_ranks()
                else:
                    self.result = self.train(self.state)
                    # After this barrier ``train`` has returned on all ranks: a rank that fails from here on has missed nothing.
                    self.done = True
                    self.state._after_commit = None
                    if not dist.is_initialized():
                        raise ConfigError(
                            "train() has destroyed the default process group, in which run() then asks whether all ranks are "
                            "done: leave destroy_process_group() to run()"
                        )
                    dist.barrier()
                    self.lobby.finish(self.state.step)
                    _destroy()
                    return True
        except MembershipChanged:
            log.info("generation %d ends after step %d: a newcomer waits", roster.generation, self.state.step)
        except LeftBehind:
            raise
        except Exception as error:
            lost = _lost_ranks()
            if not isinstance(error, (PeerLost, Closed)) and not (
                isinstance(error, RuntimeError) and _has_lost_a_rank()
            ):
                self.failure = error
                raise
            if self._is_futile(roster):
                raise
            reasons = "; ".join(lost.values()) or str(error)
            log.warning("generation %d ends in step %d: %s", roster.generation, self.state.step + 1, reasons)
        # The report comes first (see there).
        self.lobby.report(self.committed, lost)
        _destroy()
        return False

    def _is_futile(self, roster: Roster) -> bool:
        """Whether the same members have come together again and again, and have not done a step: then nobody is lost, and what
        ``train`` raises comes from the script or from the network between them."""
        members, times = self._futile
        times = 0 if self._commits else times + 1 if members == roster.members else 1
        self._futile = roster.members, times
        return times >= _FUTILE

    @property
    def committed(self) -> int:
        return self.state.snapshot()["step"] if self.has_state else -1

    def _build(self, roster: Roster) -> bool:
        """Make the group and give all members the same state. Returns False if that failed with these members."""
        rank, world = roster.members.index(self.lobby.member), len(roster.members)
        # Frames and hand-shakes of another generation are refused by the engine itself.
        process.set_generation(roster.generation)
        running = process.Engine.current
        if running is not None and running.generation != roster.generation:
            raise ConfigError(
                f"an endpoint (penstock.endpoint) of this process was opened before generation {roster.generation} of the job, "
                "and keeps it out: open servers and clients within train(), each in a with block, so that they end with their "
                "generation"
            )
        try:
            dist.init_process_group(
                "penstock", store=self.lobby.group_store(), rank=rank, world_size=world, timeout=self.rebuild
            )
            self.state.share(roster.donor)
            self.has_state = True
            backend.of().set_timeout(self.timeout)
        except (ConfigError, Mismatch):
            raise
        except PenstockError as error:
            self._failures += 1
            if self._failures >= (_FAILURES if self.has_state else _FAILURES_OF_NEWCOMERS):
                raise
            log.warning("generation %d (%d ranks) could not be built: %s", roster.generation, world, error)
            return False
        self._failures = 0
        self._commits = 0
        if self.state.step > 0:
            self._tell(self.lobby.has_committed, self.state.step)
        self.state._after_commit = self._after_commit
        level = logging.INFO if roster.generation == 1 else logging.WARNING
        log.log(
            level,
            "generation %d: rank %d of %d (member %d; members %s), state of rank %d after step %d",
            roster.generation,
            rank,
            world,
            self.lobby.member,
            ", ".join(map(str, roster.members)),
            roster.donor,
            self.state.step,
        )
        return True

    def _after_commit(self) -> None:
        self._commits += 1
        looks = self._commits % self.check_every == 0
        # Every rank's first commit: from here on there is a state that can be lost.
        if self._commits == 1:
            self._tell(self.lobby.first_commit, self.state.step)
            self._has_committed()
        elif looks and dist.get_rank() == 0:
            self._tell(self.lobby.has_committed, self.state.step)
        if not looks:
            return
        # One rank asks the store and broadcasts the answer, so that all decide alike.
        flag = torch.zeros(1, dtype=torch.int32)
        if dist.get_rank() == 0 and self._tell(self.lobby.newcomer_waits):
            flag += 1
        dist.all_reduce(flag)
        if flag.item():
            raise MembershipChanged

    def _tell(self, ask: Callable[..., Any], *args: Any) -> Any:
        """Call the lobby. Returns its answer, or None with one warning if the store is dead: training goes on without it."""
        try:
            return ask(*args)
        except dist.DistError as error:
            if not self._store_failed:
                log.warning(
                    "the elastic store does not answer (%s): training goes on, but cannot go through a change of "
                    "membership",
                    str(error).splitlines()[0],
                )
            self._store_failed = True
            return None


def _nothing() -> None:
    pass


def _sentence(error: Exception) -> str:
    first = str(error).splitlines()[0]
    return first if isinstance(error, PenstockError) else f"the elastic store does not answer ({first})."


def _lost_ranks() -> dict[int, str]:
    """Ranks of this generation that the engine knows to be lost, with the reasons."""
    if not dist.is_initialized():
        return {}
    try:
        peers = process.stats()["peers"]
    except Closed:
        return {}
    # A server or client of endpoints is a peer, too, and may have a member's number.
    members = {contacts.parse(text)[1:] for text in backend.of()._member.contacts.values()}
    lost = [peer for peer in peers if peer["lost"] and (peer["rank"], peer["host"], peer["address"]) in members]
    return {peer["rank"]: f"rank {peer['rank']} on {peer['host']}: {peer['lost']}" for peer in lost}


def _has_lost_a_rank() -> bool:
    """Whether a rank is lost, or the group has failed because of one. The error's class does not tell: torch raises other
    classes, for example out of DDP's buckets; and another rank may have reported a loss that this rank does not know of yet."""
    try:
        backend.of().check()
    except (PeerLost, Closed):
        return True
    except PenstockError:
        # The group's first failure; a rank may be lost as well.
        pass
    return bool(_lost_ranks())


def _destroy() -> None:
    if dist.is_initialized():
        # The error of a broken group at its end is known already.
        with contextlib.suppress(PenstockError):
            dist.destroy_process_group()
    # torch also counts a group that could not be built, and the count is the next group's name: ranks that have failed would
    # not meet newcomers.
    dist.distributed_c10d._world.group_count = 0


# Guesses. Deaths in the middle of a rebuild are rare, and five in a row have another reason than deaths. A newcomer that is
# refused (another secret, an address that cannot be reached) must not keep the others from training.
_FAILURES = 5
_FAILURES_OF_NEWCOMERS = 2
# A network that is cut for a moment costs a generation or two.
_FUTILE = 5
