"""Joins groups through a store.

Every rank publishes its contact in the store, and rank 0 also the group's id, its secret and its algorithm. Then every rank reads
all of it and connects. Nothing here imports torch.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from penstock import _core
from penstock.cluster import deployment, jobs
from penstock.errors import Config as ConfigError
from penstock.errors import PenstockError, Refused
from penstock.errors import Timeout as TimeoutError_
from penstock.runtime import config, contacts, process
from penstock.runtime.store import Keys, StoreError, base, is_served_here, keep_alive

__all__ = ["Membership", "Opening", "join"]

log = logging.getLogger("penstock")


@dataclass
class Membership:
    """This process's part in one group, or in one channel of it."""

    group: _core.Group
    """The channel in which operations are started; the main one stands for the group."""
    rank: int
    world: int
    name: str
    engine: process.Engine
    store: Any
    keys: Any
    """The part of the store that only this life of the group uses."""
    job_ranks: tuple[int, ...]
    """Its ranks in the job."""
    contacts: dict[int, str]
    """The contact of each member, by its rank in the job."""
    aggregation: jobs.Aggregation | None = None
    """The servers and aggregators for its large all-reduces; None: these go among the ranks."""
    deployment: tuple[str, str] | None = None
    """The text and the name of the deployment that the group uses."""
    last: _core.Ticket | None = None
    """An operation that all ranks start and for which possibly no caller waits."""
    is_channel: bool = False
    """It is not the group's main channel."""

    @property
    def job_rank(self) -> int:
        """The rank in the job, as errors name it."""
        return self.job_ranks[self.rank]

    def leave(self, *, leaves_group: bool = False) -> None:
        """Leave the group; the engine stops with the last one. Blocks until peers have taken what is left. A channel is closed;
        ``leaves_group``: its group is left next."""
        if self.last is not None:
            # If the group were left while it runs, the group would fail on slower ranks.
            with contextlib.suppress(PenstockError):
                self.last.wait(_LAST_S)
        self.group.leave(leaves_group=leaves_group)
        try:
            if self.aggregation is not None:
                self.engine.aggregations.pop(self.aggregation, None)
                self.aggregation.close()
        finally:
            if not self.is_channel:
                self.engine.release()

    def part_of_store(self, prefix: str) -> Keys:
        """The keys below ``prefix`` of the group's store, which outlives this membership."""
        return Keys(prefix, self.store)

    def open(self, name: str, timeout: timedelta) -> Opening:
        """Begin to open a channel: its operations have an order of their own. All ranks open the channels of a group in the same
        order, under the same names. Does not block."""
        channel, ticket = self.group.channel(name, timeout_s=timeout.total_seconds())
        # Below the keys of this life: a store may outlive a group of the same name.
        store = Keys(f"penstock/channel/{name}", self.keys)
        member = dataclasses.replace(
            self, group=channel, name=f"{self.name}/{name}", store=store, aggregation=None, last=None, is_channel=True
        )
        return Opening(member, ticket, timeout)

    def channel(self, name: str, timeout: timedelta, *, aggregate: bool = False) -> Membership:
        """`open` a channel, and wait until all ranks have. With ``aggregate`` its all-reduces go through servers if this
        group's do."""
        return self.open(name, timeout).wait(aggregate=aggregate and self.aggregation is not None)

    def attach(self, timeout: timedelta, settings: config.Settings) -> None:
        """Send large all-reduces through the deployment's servers. All ranks call it together."""
        assert self.deployment is not None, "the caller has looked"
        text, source = self.deployment
        with _store_errors(self.name, self.rank):
            self.aggregation = jobs.attach(
                self, text, source, settings.job_secret(), timeout, self.engine.interfaces, gives_way=settings.shm
            )
        self.engine.aggregations[self.aggregation] = self.name


@dataclass
class Opening:
    """A channel that this rank has opened and others possibly have not."""

    member: Membership
    ticket: _core.Ticket
    timeout: timedelta

    def wait(self, *, aggregate: bool = False, check: Callable[[], None] | None = None) -> Membership:
        """Block until all ranks have opened it. Calls ``check`` meanwhile, at least every `_SLICE_S`. If this raises, the channel
        is closed here."""
        try:
            while not self.ticket.wait(_SLICE_S):
                if check is not None:
                    check()
            if aggregate:
                self.member.attach(self.timeout, config.read())
        except BaseException:
            self.member.leave()
            raise
        return self.member


def join(
    store: Any,
    rank: int,
    job_ranks: Sequence[int],
    timeout: timedelta,
    name: str,
    *,
    aggregate: bool = False,
    check: Callable[[], None] | None = None,
    known: Mapping[int, str] | None = None,
) -> Membership:
    """Join a group: agree through ``store``, connect to every member.

    Args:
        store: the group's own store (torch gives each group a prefix).
        rank: this process's rank in the group.
        job_ranks: the ranks in the job of all members.
        timeout: for the whole of it.
        name: for logs and errors.
        aggregate: the group has all ranks of the job: it uses the deployment (PENSTOCK_DEPLOYMENT, `penstock.init`).
        check: called every `_SLICE_S` at least while this waits for other ranks. It raises if the wait is in vain; the other
            ranks then get the error through the store.
        known: contacts by rank in the job, as the group has them that ``check`` asks. A rank that comes with another contact has
            left that group: this waits until ``check`` raises.

    Raises:
        penstock.errors.Config: a setting or the deployment is wrong, a server or aggregator does not do its part, an interface
            or port cannot be had, the store cannot be reached.
        penstock.errors.Refused: secrets or versions differ.
        penstock.errors.Timeout: not all ranks came.
        penstock.errors.Closed: this process is a fork of one that uses Penstock.
        What ``check`` raises.
    """
    _core.check_fork()  # Before the store: a forked child has its parent's connection to it.
    watch = _Watch(check, known or {})
    engine = group = None
    world, job_rank = len(job_ranks), job_ranks[rank]
    own = store
    with _store_errors(name, rank):
        # A store may outlive a group of the same name (destroy and start again): every turn has keys of its own. Turns are
        # counted for each world size and each life of the job: a rank that is new would count differently from the others, and
        # read the contacts of processes that are gone.
        turns = Keys(f"penstock/{process.life()}.{world}", store)
        store = Keys(str(turns.add(f"turn/{rank}", 1)), turns)
    try:
        settings = config.read()
        keep_alive(own, max(_STORE_SILENT_S, settings.peer_timeout))
        engine = process.Engine.acquire(settings, store, job_rank)
        with _store_errors(name, rank):
            agreed, members = _agree(store, rank, job_ranks, timeout, name, settings, engine, aggregate, watch)
            group, ticket = engine.core.join(
                id=agreed["id"],
                generation=engine.generation,
                rank=rank,
                members=members,
                secret=_secret(agreed, settings, rank),
                algorithm=None if agreed["algorithm"] == "aggregated" else agreed["algorithm"],
                name=name,
            )
            _await_links(group, ticket, store, timeout, name, watch)
        _forget_keys(store, rank)
    except BaseException as error:
        _tell_failure(store, rank, world, error, linger=error is not watch.failure)
        if group is not None:
            # Other groups may keep the engine running: this group must end, and its members must not wait for it.
            what = f"rank {job_rank} could not join: {error or type(error).__name__}".rstrip(".")
            group.abort(what, type(error).__name__)
            group.leave()
        if engine is not None:
            engine.release()
        raise
    contacts = dict(zip(job_ranks, members, strict=True))
    used = None if agreed["deployment"] is None else (agreed["deployment"][0], agreed["deployment"][1])
    membership = Membership(group, rank, world, name, engine, own, store, tuple(job_ranks), contacts, deployment=used)
    if rank == 0:
        _announce(membership, settings, agreed, members)
    if used is not None:
        try:
            membership.attach(timeout, settings)
        except BaseException:
            membership.leave()
            raise
    if agreed["live"] is not None:
        _join_live(agreed["live"], membership, max(_STORE_SILENT_S, settings.peer_timeout))
    return membership


def _serve_live(settings: config.Settings) -> str | None:
    """On the job's rank 0: the word by which the group's ranks take part in the live view, if there is one."""
    if settings.live is None and not settings.live_tensorboard:
        return None
    try:
        from penstock.live import running

        return running.serve(settings.live, settings.live_token, settings.live_tensorboard, _core.__version__)
    except Exception:
        log.exception("there is no live view; the training goes on")
        return None


def _join_live(word: str, member: Membership, silent_s: float) -> None:
    """Take part in the live view that ``word`` stands for (docs/guide/live.md)."""

    def connect() -> Any:
        store = base(member.store)
        if type(store).__name__ == "FileStore":
            raise StoreError("it is a file, which would grow without end")
        # Of its own: calls on one connection wait for each other, and the training's may wait for minutes.
        connection = store.clone() if hasattr(store, "clone") else store
        keep_alive(connection, silent_s)
        return connection

    try:
        from penstock.live import running

        _leave_live_at_end()
        core, interfaces = member.engine.core, tuple(name for name, _ in member.engine.interfaces)
        engine = running.Engine(process.stats, core.record, member.job_rank, member.engine.generation, interfaces)
        running.join(word, engine, connect, member.job_ranks)
    except Exception:
        log.exception("rank %d takes no part in the live view; the training goes on", member.job_rank)


@functools.cache
def _leave_live_at_end() -> None:
    from penstock.live import running

    process.observe(lambda engine: running.leave() if engine is None else None)


class _Watch:
    """Checks a group that contains all ranks of the one that is being built. Mostly every rank sees a failure of that group
    itself; if only some do, the others get it through the store (`_check_failed`)."""

    def __init__(self, check: Callable[[], None] | None, known: Mapping[int, str]) -> None:
        self._check = check
        self._known = known
        self.is_on = check is not None
        self.failure: BaseException | None = None

    def look(self) -> None:
        """Raise what ``check`` raises, and remember a failure."""
        if self._check is None:
            return
        try:
            self._check()
        except PenstockError as error:
            self.failure = error
            raise

    def await_departures(self, contacts: Mapping[int, str], timeout: timedelta, name: str) -> None:
        """Raise if a rank comes with another contact than the checked group knows. Its earlier engine has ended then, which this
        process's engine notices soon; until then ``check`` would let the group be built on some ranks and not on others."""
        came_back = [rank for rank, contact in contacts.items() if self._known.get(rank, contact) != contact]
        until = time.monotonic() + timeout.total_seconds()
        while came_back and time.monotonic() < until:
            self.look()
            time.sleep(_SHORTEST_PAUSE_S)
        if came_back:
            raise TimeoutError_(
                f"Timed out after {timeout}: group {name} cannot be built, since rank(s) {', '.join(map(str, came_back))} of the "
                "job have left another group that has them still. Destroy that group on all ranks first."
            )


def _agree(
    store: Any,
    rank: int,
    job_ranks: Sequence[int],
    timeout: timedelta,
    name: str,
    settings: config.Settings,
    engine: process.Engine,
    aggregate: bool,
    watch: _Watch,
) -> tuple[dict[str, Any], list[str]]:
    """Exchange the contacts and rank 0's decisions."""
    world = len(job_ranks)
    if rank == 0:
        given = settings.job_secret() is not None
        agreed = {
            "id": _ids.draw(tuple(job_ranks)),
            "algorithm": settings.algorithm,
            "secret": None if given else secrets.token_hex(16),
            "deployment": _deployment(settings, world) if aggregate else None,
            "live": _serve_live(settings) if engine.job_rank == 0 else None,
        }
        store.set("group", json.dumps(agreed))
    store.set(str(rank), engine.core.contact())
    keys = ["group", *map(str, range(world))]
    _await_keys(store, keys, rank, timeout, name, watch)
    values: list[bytes] = []
    for start in range(0, len(keys), _BATCH):
        values += store.multi_get(keys[start : start + _BATCH])
    texts = [value.decode() for value in values]
    watch.await_departures(dict(zip(job_ranks, texts[1:], strict=True)), timeout, name)
    return json.loads(texts[0]), texts[1:]


class _Ids:
    """Ids of the groups whose rank 0 this process is: 43 random bits, the same for all groups of the same ranks, and 20 that
    count those. Engines remember the ids of groups that they have left forever, to drop late frames; consecutive ids take one
    range. (Among 1000 sets of ranks, two have the same random bits once in 17,000,000 jobs.)"""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._series: collections.OrderedDict[tuple[int, ...], Iterator[int]] = collections.OrderedDict()

    def draw(self, job_ranks: tuple[int, ...]) -> int:
        """The id of the next group of these ranks."""
        with self._lock:
            found = next(self._series.get(job_ranks, iter(())), None)
            if found is None:
                base = secrets.randbits(43) << 20
                # An id is not 0.
                self._series[job_ranks] = iter(range(base + 1, base + (1 << 20)))
                found = next(self._series[job_ranks])
            self._series.move_to_end(job_ranks)
            if len(self._series) > _MOST_SERIES:
                self._series.popitem(last=False)
            return found


def read_deployment(path: str, asked: str) -> str | None:
    """The text of a deployment file, with addresses; None where it is not there or is none."""
    try:
        return deployment.load(path, asked)
    except ConfigError:
        return None


@contextlib.contextmanager
def using(text: str, name: str) -> Iterator[None]:
    """Groups made within, and from then on, use this deployment; those before count again if the block raises."""
    before = deployment.chosen("")
    deployment.use(text, name)
    try:
        yield
    except BaseException:
        deployment.use(*(before or (None, None)))
        raise


def _deployment(settings: config.Settings, world: int) -> tuple[str, str] | None:
    """The text and the name of the deployment, if it is used."""
    chosen = deployment.chosen(settings.deployment)
    if chosen is None:
        if settings.algorithm == "aggregated":
            raise ConfigError(
                "PENSTOCK_ALGORITHM=aggregated needs a deployment (PENSTOCK_DEPLOYMENT): docs/guide/aggregated.md"
            )
        return None
    text, name = chosen
    deployment.parse(text, name).check_world(world)
    if world == 1 or settings.algorithm not in (None, "aggregated"):
        why = "one rank adds nothing" if world == 1 else f"PENSTOCK_ALGORITHM={settings.algorithm} goes first"
        log.warning("the deployment %s is not used: %s", name, why)
        return None
    return chosen


def _await_keys(store: Any, keys: list[str], rank: int, timeout: timedelta, name: str, watch: _Watch) -> None:
    """Wait until all ranks have published. Raises if one of them has given up."""
    began_s = time.monotonic()
    waiting = collections.deque(keys)
    while waiting:
        # Not a wait with a time-out: torch prints a line for each that expires.
        if store.check([waiting[0]]):
            waiting.popleft()
            continue
        watch.look()
        _check_failed(store, name, watch)
        waited_s = time.monotonic() - began_s
        if waited_s > timeout.total_seconds():
            # Rank 0 publishes its decisions together with its contact.
            missing = dict.fromkeys("0" if key == "group" else key for key in waiting if not store.check([key]))
            if not missing:
                return  # the last ones came just now
            raise TimeoutError_(
                f"Timed out after {timeout}: rank {rank} of group {name} waited for others; nothing came from rank(s) "
                f"{', '.join(missing)}. Did they start?"
            )
        # So a join is late by at most a twentieth of its waiting time.
        time.sleep(min(max(_SHORTEST_PAUSE_S, waited_s / 20), _SLICE_S))


def _check_failed(store: Any, name: str, watch: _Watch) -> None:
    """Raise if a rank has given up: the failure that ``watch`` sees here too, or else the rank's reason."""
    if store.check([_FAILED]):
        until = time.monotonic() + _SAME_REASON_S
        while watch.is_on and time.monotonic() < until:
            watch.look()
            time.sleep(_SHORTEST_PAUSE_S)
        raise Refused(f"group {name} cannot be built: {store.get(_FAILED).decode()}")


@contextlib.contextmanager
def _store_errors(name: str, rank: int) -> Iterator[None]:
    """`StoreError`s in here are raised as `penstock.errors.Config`."""
    try:
        yield
    except StoreError as error:
        raise ConfigError(
            f"the store of group {name} cannot be used by rank {rank}: {str(error).splitlines()[0]}. Check MASTER_ADDR and "
            "MASTER_PORT, and that rank 0 is running."
        ) from error


def _secret(agreed: dict[str, Any], settings: config.Settings, rank: int) -> bytes:
    own = settings.job_secret()
    if agreed["secret"] is None and own is None:
        raise Refused(f"rank 0 has a job secret and rank {rank} has none: set PENSTOCK_SECRET or PENSTOCK_SECRET_FILE")
    if agreed["secret"] is not None and own is not None:
        raise Refused(f"rank {rank} has a job secret and rank 0 has none: set PENSTOCK_SECRET or PENSTOCK_SECRET_FILE")
    return own if own is not None else bytes.fromhex(agreed["secret"])


def _await_links(
    group: _core.Group, ticket: _core.Ticket, store: Any, timeout: timedelta, name: str, watch: _Watch
) -> None:
    """Wait until all members are connected. Raises if one of them has given up."""
    waited_s = 0.0
    while not ticket.wait(_SLICE_S):
        waited_s += _SLICE_S
        watch.look()
        _check_failed(store, name, watch)
        if waited_s > timeout.total_seconds():
            group.expire(waited_s)
            ticket.wait()  # Raises, and says who is missing.


def _forget_keys(store: Any, rank: int) -> None:
    """Delete this rank's keys: a join ends after all ranks have read them, and stores live as long as the job."""
    # A store may be gone by now, or know no deletion (NotImplementedError is a RuntimeError).
    with contextlib.suppress(RuntimeError):
        for key in [str(rank), "group"] if rank == 0 else [str(rank)]:
            store.delete_key(key)


def _tell_failure(store: Any, rank: int, world: int, error: BaseException, *, linger: bool) -> None:
    """Let the other ranks fail now and with the reason, instead of at their time-out.

    The store ends with the rank that serves it. So with ``linger`` that rank stays until all know, at most for `_LINGER_S`.
    """
    if not isinstance(error, PenstockError):
        return
    try:
        if not store.check([_FAILED]):
            store.set(_FAILED, f"rank {rank}: {type(error).__name__}: {error}")
        store.add(_KNOWN, 1)
        until = time.monotonic() + _LINGER_S
        while linger and is_served_here(store) and store.add(_KNOWN, 0) < world and time.monotonic() < until:
            time.sleep(_LINGER_PAUSE_S)
    except Exception as trouble:  # the store may be what failed
        log.debug("cannot tell the other ranks: %s", trouble)


def _announce(membership: Membership, settings: config.Settings, agreed: dict[str, Any], members: list[str]) -> None:
    """Log the media and interfaces that this group uses, in one line."""
    if not log.isEnabledFor(logging.INFO):
        return
    # Each pair of ranks of a host finds out what is possible between them; a fallback shows here.
    known = [contacts.parse(member) for member in members]
    others = {each.rank for each in known} - {membership.engine.job_rank}
    peers = membership.engine.core.stats()["peers"]
    media = collections.Counter(peer["medium"] for peer in peers if peer["rank"] in others and peer["lost"] is None)
    interfaces = ", ".join(f"{name} {address}" for name, address in membership.engine.interfaces)
    hosts = len({each.host for each in known})
    guard = "PENSTOCK_SECRET" if agreed["secret"] is None else "generated (guards against accidents only)"
    log.info(
        "group %s: %d ranks on %d host name(s), %d TCP streams a peer (%d within a host) over %s (%s), rank 0 reaches the others "
        "through %s, algorithm %s, secret %s",
        membership.name,
        membership.world,
        hosts,
        settings.streams,
        config.streams_within_host(settings),
        interfaces,
        membership.engine.why,
        ", ".join(f"{medium} ({count})" for medium, count in sorted(media.items())) or "nothing",
        agreed["algorithm"] or "auto",
        guard,
    )


_ids = _Ids()
# A series is some 300 bytes, here; one that is forgotten costs the engines another range.
_MOST_SERIES = 1024
_FAILED = "failed"
_KNOWN = "failed/known"  # how many ranks have given up
# How long a rank that gets another's failure from the store waits to see that failure itself: reports may be in flight.
_SAME_REASON_S = 1.0
# Long enough for ranks that were started together, short enough for users who wait for their prompt.
_LINGER_S = 2.0
_LINGER_PAUSE_S = 0.02
# Keys a read: a batch of 512 contacts is some 64 KiB.
_BATCH = 512
# How late a rank learns that another has given up: for users it is at once. A look costs the store
# 26 us (measured, over loopback), so 512 ranks that wait take 3 % of a core.
_SLICE_S = 0.5
# Ranks that are started together come within milliseconds of each other.
_SHORTEST_PAUSE_S = 0.001
# A store whose host has not answered for this long is lost. That is longer than the time for peers (PENSTOCK_PEER_TIMEOUT
# counts instead if it is longer still), so that a short loss of the network does not end the store's connections.
_STORE_SILENT_S = 20.0
# How far behind the slowest rank may be at the end of its job for this to be orderly.
_LAST_S = 5.0
