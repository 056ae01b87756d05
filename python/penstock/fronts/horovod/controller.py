"""The thread that runs the rounds of one process set, and starts what they agree on.

It sleeps while this rank has nothing pending, and waits in the engine while a round waits for other ranks: neither costs
processor time. Only where all ranks have something pending and none of it is the same, rounds end and bring nothing; then the
thread looks again after a pause that grows to 5 ms.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from penstock.errors import Closed, PenstockError
from penstock.fronts.horovod import operations
from penstock.fronts.horovod.common.exceptions import HorovodInternalError
from penstock.fronts.horovod.group import Group
from penstock.fronts.horovod.negotiation import BLOCK_BYTES, Negotiation, Round
from penstock.fronts.horovod.operations import Entry, Flight, Result
from penstock.fronts.horovod.timeline import Timeline
from penstock.runtime import process, urgency

__all__ = ["NEVER_S", "SHUT_DOWN", "Controller", "Settings"]

log = logging.getLogger("penstock")


@dataclass(frozen=True)
class Settings:
    """Horovod's environment variables that count here."""

    fusion_threshold_bytes: int
    cycle_time_s: float
    """How long a round waits for more to come along. 0: not at all; what comes during a round goes into the next anyway."""
    stall_warning_s: float
    """0: never."""
    stall_shutdown_s: float
    """0: never."""

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """Raises: ValueError, which names the variable."""

        def seconds(name: str, default: float, unit_s: float = 1.0) -> float:
            return _number(environ, name, float, default) * unit_s

        warning_s = seconds("HOROVOD_STALL_CHECK_TIME_SECONDS", 60.0)
        if environ.get("HOROVOD_STALL_CHECK_DISABLE", "0") not in ("", "0"):
            warning_s = 0.0
        return cls(
            fusion_threshold_bytes=_number(environ, "HOROVOD_FUSION_THRESHOLD", int, 64 << 20),
            cycle_time_s=seconds("HOROVOD_CYCLE_TIME", 0.0, 1e-3),
            stall_warning_s=warning_s,
            stall_shutdown_s=seconds("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0.0),
        )


Number = TypeVar("Number", int, float)


def _number(environ: Mapping[str, str], name: str, kind: Callable[[str], Number], default: Number) -> Number:
    try:
        value = kind(environ.get(name, str(default)))
        if 0 <= value <= (1 << 62 if kind is int else _LONGEST):
            return value
    except ValueError:
        pass
    raise ValueError(f"{name}={environ[name]!r} must be a number, 0 or more") from None


class Controller:
    """One process set, on a rank that belongs to it.

    Args:
        group: a process group of the penstock backend that nothing else uses.
        ranks: the set's ranks, by their number in the job.
        settings: Horovod's settings.
        timeline: records what happens, if it is on.

    Blocks until all ranks of the set have called it.
    """

    def __init__(self, group: Any, ranks: Sequence[int], settings: Settings, timeline: Timeline) -> None:
        self.group = Group(group)
        self.ranks = list(ranks)
        self._settings = settings
        self._timeline = timeline
        self._member = self.group.backend.channel("rounds")
        self._negotiation = Negotiation(self.group.rank, self.group.size, ranks)
        self._wake = threading.Condition()
        self._entries: dict[bytes, Entry] = {}
        self._join = _Join()
        self._failure: BaseException | None = None
        self._flights: list[Flight] = []
        self._unnamed: dict[str, int] = {}
        self._stopped: list[int] = []
        self._warned_s = 0.0
        self._buffers = _Buffers(self.group.size)
        self._thread = threading.Thread(target=self._run, name="penstock-horovod", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ what callers use

    def name(self, kind: str, given: str | None) -> str:
        """An operation's full name. Those without one are counted by their kind: ranks issue them in the same order."""
        if given is not None:
            return f"{kind}.{given}"
        with self._wake:
            self._unnamed[kind] = self._unnamed.get(kind, 0) + 1
            return f"{kind}.noname.{self._unnamed[kind]}"

    def submit(self, entries: Sequence[Entry]) -> None:
        """Submit operations. Does not block; each entry's ``result`` completes at its end.

        Raises:
            ValueError: one of the names is not agreed on yet; none was submitted.
            HorovodInternalError: the process set has failed, or a rank has shut down.
        """
        now_s = time.monotonic()
        with self._wake:
            self._check()
            for entry in entries:
                if self._negotiation.has(entry.name):
                    raise ValueError(DUPLICATE_NAME)
            for entry in entries:
                entry.submitted_s = now_s
                self._entries[self._negotiation.submit(entry.name, entry.request)] = entry
            self._wake.notify()
        for entry in entries:
            self._timeline.negotiating(entry.name, entry.request.kind.name)

    def join(self) -> Result:
        """This rank has no more data. The result comes when all ranks have said so; then `last_joined` is right."""
        with self._wake:
            self._check()
            if self._join.pending is None:
                self._join.pending = Result()
                self._negotiation.join()
                self._wake.notify()
            return self._join.pending

    @property
    def last_joined(self) -> int:
        """The rank that joined last, when all had joined."""
        return self._join.last_rank

    @contextlib.contextmanager
    def watching(self) -> Iterator[Callable[[], None]]:
        """Notice in here when a rank is lost, also without any operation: gives a function that raises then."""

        def check() -> None:
            with self._wake:
                self._check()

        with self._wake:
            self._negotiation.watch(1)
            self._wake.notify()
        try:
            yield check
        finally:
            with self._wake:
                self._negotiation.watch(-1)

    def stopping(self) -> None:
        """Tell the other ranks that this one leaves; `stop` follows."""
        with self._wake:
            self._negotiation.stop()
            self._wake.notify()

    def stop(self, *, together_until_s: float, until_s: float) -> bool:
        """End the thread. Other ranks that are about to stop are waited for; those that are not learn of it when they next
        have something to say. What all ranks have agreed on is executed to its end, everything else fails.

        Args:
            together_until_s: until when (`time.monotonic`) other ranks are waited for.
            until_s: until when the end of what all ranks have agreed on is waited for.

        Returns: whether all ranks have stopped together.
        """
        self.stopping()
        self._thread.join(max(0.0, together_until_s - time.monotonic()))
        if self._thread.is_alive():
            # The other ranks are busy elsewhere, or gone. Rounds that have ended here end on them too.
            self._member.group.abort(f"rank {self.ranks[self.group.rank]} has shut Horovod down")
            self._thread.join()
        # Slower ranks may not have begun what these reduce. A rank that is lost fails them.
        for flight in self._flights:
            flight.settle(max(0.0, until_s - time.monotonic()))
        self._fail(HorovodInternalError(SHUT_DOWN))
        together = self._stopped == list(range(self.group.size))
        self.group.backend.close_channels([self._member])
        return together

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            pause_s = 0.0
            for number in itertools.count(1):
                outcome = self._round(number, *self._next_block(pause_s))
                self._execute(outcome)
                if outcome.stopped:
                    self._stopped = outcome.stopped
                    who = "; ".join(f"rank {self.ranks[rank]} has shut Horovod down" for rank in outcome.stopped)
                    raise HorovodInternalError(f"{SHUT_DOWN} ({who})")
                pause_s = min(max(2 * pause_s, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S) if outcome.quiet else 0.0
                if outcome.quiet:
                    self._check_stall(None)
        except Closed as error:
            # A rank has left, and did not wait for this one.
            told = HorovodInternalError(f"{SHUT_DOWN} ({error})")
            told.__cause__ = error
            self._fail(told)
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, (PenstockError, HorovodInternalError)):
                # No other rank can know: it has not come from one, nor from the network.
                self._end_others(error)

    def _end_others(self, error: BaseException) -> None:
        """This rank takes no part in rounds any more, nor in operations that all have agreed on: who waits for it shall not."""
        rank = self.ranks[self.group.rank]
        told = f"rank {rank} cannot execute Horovod's operations any more ({type(error).__name__}: {error})"
        for member in (self._member, self.group.backend._member):
            member.group.abort(told)

    def _next_block(self, pause_s: float) -> tuple[bytes, int]:
        """What this rank says in the next round, and the priority of that: of the most urgent operation that waits for it."""
        with self._wake:
            if pause_s:
                self._wake.wait_for(lambda: self._negotiation.fresh, pause_s)
            self._wake.wait_for(lambda: self._negotiation.engaged)
            if self._settings.cycle_time_s > 0:
                # Only a full block needs not wait.
                self._wake.wait_for(lambda: self._negotiation.full, self._settings.cycle_time_s)
            priority = min((entry.request.priority for entry in self._entries.values()), default=urgency.USUAL)
            return self._negotiation.block(), priority

    def _round(self, number: int, block: bytes, priority: int) -> Round:
        self._timeline.cycle()
        ticket = self._buffers.gather(self._member.group, block, priority)
        while not ticket.wait(_LOOK_S):
            self._check_stall(number)
        with self._wake:
            return self._negotiation.handle_round(self._buffers.gathered())

    def _execute(self, outcome: Round) -> None:
        with self._wake:
            entries = [self._entries.pop(agreed.key, None) for agreed in outcome.agreed]
        going = []
        if any(
            agreed.error is not None and entry is not None
            for agreed, entry in zip(outcome.agreed, entries, strict=True)
        ):
            with contextlib.suppress(Closed):
                process.engine().core.write_record()  # no group fails of it, so the engine sees no failure
        for agreed, entry in zip(outcome.agreed, entries, strict=True):
            if agreed.error is None:
                going.append((agreed, entry))
            elif entry is not None:
                entry.result.failed(HorovodInternalError(agreed.error))
        if going:
            self._flights = [flight for flight in self._flights if not flight.done()]
            self._flights += operations.start(
                [agreed for agreed, _ in going],
                [entry for _, entry in going],
                self.group,
                self._settings.fusion_threshold_bytes,
            )
            for _, entry in going:
                if entry is not None:
                    self._timeline.started(entry.name, entry.request.kind.name, entry.result)
        if outcome.last_joined is not None:
            with self._wake:
                joined, self._join = self._join.pending, _Join(last_rank=outcome.last_joined)
                # With uneven data, ranks have issued different numbers of operations; from here on they count alike again.
                self._unnamed.clear()
            assert joined is not None, "all ranks have joined, so this one has"
            joined.started(None)

    def _check(self) -> None:
        if self._failure is not None:
            raise HorovodInternalError(str(self._failure)) from self._failure

    def _fail(self, error: BaseException) -> None:
        """From here on nothing works; the first reason is kept."""
        with self._wake:
            if self._failure is None:
                log.debug("a process set has failed", exc_info=error)
                # The frames that it came through keep the group, and the engine, as long as somebody keeps the error.
                told: BaseException | None = error if isinstance(error, RuntimeError) else None
                while told is not None:
                    told.__traceback__ = None
                    told = told.__cause__ or told.__context__
                self._failure = error
            error = self._failure
            entries, self._entries = list(self._entries.values()), {}
            joined, self._join.pending = self._join.pending, None
        for result in [entry.result for entry in entries] + ([joined] if joined else []):
            result.failed(error)

    # ------------------------------------------------------------------ stalls

    def check_stall_of(self, what: str, names: Sequence[str], began_s: float, abort: Callable[[str], None]) -> None:
        """As for operations, for something else that waits for other ranks, on a channel of its own: a step of an optimizer.

        Args:
            what: its name, the same on all ranks.
            names: what ranks lack that do not wait for it, in messages.
            began_s: since when this rank waits.
            abort: ends it on all ranks.

        Raises:
            HorovodInternalError: it has waited for too long, and was ended.
        """
        now_s = time.monotonic()
        if self._is_stalled(now_s, began_s):
            self._tell_stall(what, {name: {self.group.rank} for name in names}, now_s, began_s, abort)

    def _check_stall(self, stuck_round: int | None) -> None:
        """Warn when operations wait for other ranks for long, and fail where HOROVOD_STALL_SHUTDOWN_TIME_SECONDS says so."""
        warning_s, now_s = self._settings.stall_warning_s, time.monotonic()
        with self._wake:
            oldest_s = min((entry.submitted_s for entry in self._entries.values()), default=now_s)
            late = [entry.name for entry in self._entries.values() if now_s - entry.submitted_s > warning_s]
            known = self._negotiation.waiting()
        if self._is_stalled(now_s, oldest_s):
            have = {name: set(known.get(name, ())) | {self.group.rank} for name in late}
            stuck = None if stuck_round is None else str(stuck_round)
            self._tell_stall(stuck, have, now_s, oldest_s, self._member.group.abort)

    def _is_stalled(self, now_s: float, began_s: float) -> bool:
        return 0 < self._settings.stall_warning_s < now_s - began_s

    def _tell_stall(
        self, stuck: str | None, have: dict[str, set[int]], now_s: float, began_s: float, abort: Callable[[str], None]
    ) -> None:
        warning_s = self._settings.stall_warning_s
        ends = 0 < warning_s <= self._settings.stall_shutdown_s < now_s - began_s
        if now_s - self._warned_s > warning_s or ends:
            self._warned_s = now_s
            if stuck is not None:
                self._ask_others(stuck, have)
            if have and self.group.rank == min(set().union(*have.values())):
                log.warning("%s", stall_message(have, self.ranks, warning_s, ends))
        if ends:
            abort("an operation has waited for other ranks for too long")
            raise HorovodInternalError(SHUT_DOWN)

    def _ask_others(self, stuck: str, have: dict[str, set[int]]) -> None:
        """A round, or a step, is stuck because some rank takes no part in it. The ranks that do exchange, through the store, what
        they wait for: a rank without an entry is missing."""
        try:
            store = self._member.part_of_store(f"stall/{stuck}")
            store.set(str(self.group.rank), json.dumps(sorted(have)))
            # The other ranks check their operations at other times.
            time.sleep(_LOOK_S)
            for rank in range(self.group.size):
                if rank != self.group.rank and store.check([str(rank)]):
                    for name in json.loads(store.get(str(rank))):
                        have.setdefault(name, set()).add(rank)
        except (RuntimeError, ValueError) as trouble:
            log.debug("cannot ask the other ranks what they wait for: %s", trouble)


@dataclass
class _Join:
    """Where ranks stand that have no more data."""

    pending: Result | None = None
    """Completes when all ranks have joined; None while this rank has not."""
    last_rank: int = -1
    """The rank that joined last, when all had joined; -1 before."""


class _Buffers:
    """The memory of a round: this rank's block, and the blocks of all ranks."""

    def __init__(self, ranks: int) -> None:
        self._block = torch.zeros(BLOCK_BYTES, dtype=torch.uint8)
        self._blocks = torch.zeros(BLOCK_BYTES * ranks, dtype=torch.uint8)
        # The same memory, without a new tensor or array in each round.
        self._block_view, self._blocks_view = memoryview(self._block.numpy()), memoryview(self._blocks.numpy())

    def gather(self, channel: Any, block: bytes, priority: int) -> Any:
        """Start to send this rank's block to all ranks and to collect theirs. Returns the ticket."""
        self._block_view[:] = block
        ticket = channel.start(
            "all_gather",
            dtype="uint8",
            elements=self._blocks.numel(),
            bytes=self._blocks.numel(),
            input=self._block.data_ptr(),
            output=self._blocks.data_ptr(),
            timeout_s=NEVER_S,
            keep=(self._block, self._blocks),
        )
        # Ranks wait for different operations, so a round is issued with the same priority everywhere, and changed here.
        if priority != urgency.USUAL:
            channel.reprioritise(ticket, urgency.engine_priority(priority))
        return ticket

    def gathered(self) -> bytes:
        """The blocks of all ranks, once the ticket has completed."""
        return self._blocks_view.tobytes()


def stall_message(have: Mapping[str, set[int]], ranks: Sequence[int], warning_s: float, ends: bool) -> str:
    """Horovod's text: which ranks lack which operations (stall_inspector.cc)."""
    lines = [
        "One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks and are waiting for "
        f"remainder of ranks for more than {warning_s:g} seconds. This may indicate that different ranks are trying to submit "
        "different tensors or that only subset of ranks is submitting tensors, which will cause deadlock. ",
        "Missing ranks:",
    ]
    for index, rank in enumerate(ranks):
        names = sorted(name for name, theirs in have.items() if index not in theirs)
        if names:
            more = " ..." if len(names) > _NAMES else ""
            lines.append(f"{rank}{'!' if ends else ''}: [{', '.join(names[:_NAMES])}{more}]")
    if ends:
        lines.append('One or more rank (marked by "!") is stalled for too long. Will shutdown.')
    return "\n".join(lines)


SHUT_DOWN = (
    "Horovod has been shut down. This was caused by an exception on one of the ranks or an attempt to allreduce, allgather or "
    "broadcast a tensor after one of the ranks finished execution. If the shutdown was caused by an exception, you should see "
    "the exception in the log before the first shutdown message."
)
DUPLICATE_NAME = (
    "Requested to allreduce, allgather, or broadcast a tensor with the same name as another tensor that is currently being "
    "processed.  If you want to request another tensor, use a different tensor name."
)
# Horovod's operations have no time-out: a rank may be busy elsewhere for hours. A year is no limit, and no overflow.
NEVER_S = 365.0 * 24 * 3600
# From a round trip on one host to what a person would not notice (a guess between latency and idle processor time).
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.005
# Seconds or milliseconds: more than Python's locks take would end the thread.
_LONGEST = 1e9
# How often a waiting thread looks for stalls.
_LOOK_S = 1.0
# As many as Horovod names of one rank.
_NAMES = 6
