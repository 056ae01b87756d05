"""Agreement on the members of the next generation, through a store that outlives the workers.

```text
  members               how many have ever registered: a member's number is its age
  current               a generation that is closed; the next ones may be closed already (a hint to start looking from)
  committed             how many steps the job has committed, as far as a member has written it down: in its first commit of a
                        generation, at every look for newcomers, and in every report. Missing: no member has committed yet
  G/slots               how many have reported for generation G
  G/slot/S              one report: {"member", "step", "begins", "lost", "host"}
  G/beat/S              counts up as long as the one who reported waits
  G/roster              set once (compare and set): {"members", "step", "donor"}, or {"finished": step}
  G/heartbeat/M         counts up until member M of generation G makes its first commit or reports; only if the job has committed
                        nothing before
  G/fate                set once (compare and set): "committed" by its first commit, "dead" by newcomers who begin anew since all
                        members are dead
```
Every worker that wants to be in generation G reports for it: the survivors of G - 1, and newcomers, which wait for G - 1 to end.
Each of them reads the reports and decides by itself; the first one to write the roster decides for all. So there is no
coordinator that could die, and no protocol beyond the store's compare-and-set.

Members that train do not report. Before the job's first commit they send heartbeats through the store, so that newcomers can
distinguish members that have all died from members in a long first step. After it, only a checkpoint can replace a lost state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from penstock.addresses import split
from penstock.errors import Closed
from penstock.errors import Config as ConfigError
from penstock.errors import Timeout as TimeoutError_

__all__ = ["Finished", "LeftBehind", "Lobby", "Report", "Roster", "Rules", "StateLost", "TooFew", "connect", "decide"]

log = logging.getLogger("penstock.elastic")


class LeftBehind(Closed):
    """The others took this worker for dead and went on without it: its state is out of date. Call `run` again, or start
    the worker again, to join as a newcomer."""


class TooFew(TimeoutError_):
    """Fewer than ``min_ranks`` came in time. The state of the last commit is intact in this process."""


class StateLost(TimeoutError_):
    """All members that had the job's state are gone: begin again from a checkpoint, under another job name."""


class Finished(Exception):
    """The job has come to its end."""


@dataclass(frozen=True)
class Rules:
    """The rules by which a generation is closed; the same on all workers."""

    min_ranks: int = 1
    max_ranks: int | None = None
    window_s: float = 10.0
    wait_s: float = 600.0
    silent_s: float = 5.0
    """A worker without heartbeats for longer counts as dead. The default is PENSTOCK_PEER_TIMEOUT's and a second."""

    def __post_init__(self) -> None:
        if self.min_ranks < 1 or (self.max_ranks is not None and self.max_ranks < self.min_ranks):
            raise ConfigError(
                f"min_ranks={self.min_ranks} and max_ranks={self.max_ranks} must be 1 <= min_ranks <= max_ranks"
            )


@dataclass(frozen=True)
class Report:
    """The report of a worker that wants to be in the next generation."""

    member: int
    step: int
    """Steps committed; -1: it has no state of the job."""
    lost: tuple[int, ...] = ()
    """Members that it knows to be lost."""
    pulse: str = "alive"
    """``alive``, ``dead``, or ``unsure``: it has not been watched for long enough."""
    begins: int = 0
    """Steps that it had committed when it came, from a checkpoint, for instance. They count as long as nobody has a state."""


@dataclass(frozen=True)
class Roster:
    """The decision about a generation."""

    generation: int
    members: tuple[int, ...]
    """By rank: the oldest member is rank 0."""
    step: int
    """The donor's committed steps; -1: no worker has a state yet, and the donor's initial state counts. It is the one that begins
    at the latest step, where some have loaded a checkpoint."""
    donor: int
    """The rank whose state all ranks get."""


def decide(
    reports: Iterable[Report],
    previous: Sequence[int],
    committed: int,
    waited_s: float,
    rules: Rules,
    died: bool = False,
) -> tuple[list[Report], str]:
    """The members of the next generation, by age, and the reason; no members as long as it is better to wait.

    Args:
        reports: all that have come for this generation.
        previous: the members of the generation before; empty before the first.
        committed: steps that the job is known to have committed. Above 0 there is a state to keep, and only a member of the last
            generation can have it.
        waited_s: since the first of the previous members reported (before the first generation: the first of all).
        died: all previous members have stopped their heartbeats, and none has reported.

    A worker that others report as lost is not waited for, but is a member if it has reported itself: a worker that was stopped
    and goes on is lost to the others, and they are lost to it. The same holds for the two halves of a network that is cut; if
    ranks of both halves have reported, the generation cannot be built (docs/design/elastic.md).
    """
    alive = sorted((one for one in reports if one.pulse != "dead"), key=lambda one: one.member)
    came = {one.member for one in alive}
    if committed > 0 and all(one.step < 0 for one in alive):
        return (
            [],
            f"the job has committed {committed} step(s), only the last generation's members ({_numbers(previous)}) have its "
            "state, and none of them is here",
        )
    lost = {member for one in alive for member in one.lost}
    missing = [member for member in previous if member not in came and member not in lost and not died]
    if missing and waited_s < rules.window_s:
        return [], f"member(s) {_numbers(missing)} may still come"
    if any(one.pulse == "unsure" for one in alive):
        return [], "a newcomer is being watched"
    if len(alive) < rules.min_ranks:
        return [], f"{len(alive)} rank(s) are here, and min_ranks is {rules.min_ranks}"
    full = rules.max_ranks is not None and len(alive) >= rules.max_ranks
    if not previous and not full and waited_s < rules.window_s:
        return [], "more may come"
    # Workers with the state come first, then former members, then newcomers by waiting time; but where nobody has a state, those
    # that begin at a later step go before all others: their checkpoint is the job's state.
    anew = all(one.step < 0 for one in alive)
    alive.sort(key=lambda one: (one.step < 0, -one.begins * anew, one.member not in previous, one.member))
    chosen = sorted(alive[: rules.max_ranks], key=lambda one: one.member)
    return chosen, "everybody is here" if not missing else f"member(s) {_numbers(missing)} did not come in time"


class Lobby:
    """This worker's part in the agreement. All methods block on the store, briefly unless they say otherwise.

    Args:
        store: a torch store that outlives the workers.
        job: tells jobs on one store apart.
        rules: the same on all workers.
        begins: steps that this worker's state has committed as it comes.
    """

    def __init__(self, store: Any, job: str, rules: Rules, begins: int = 0) -> None:
        self._kept = dist.PrefixStore(f"penstock/elastic/{job}", store)
        self.store = _Answering(self._kept)
        self.job = job
        self.rules = rules
        self._begins = begins
        self.member = self.store.add("members", 1)
        self._last = self._find_last()
        self._slot = 0
        self._step = -1
        self._beats: dict[int, int] = {}
        self._watch: _Watch | None = None
        self._waits_since_s: float | None = None
        self._said = ""

    @property
    def generation(self) -> int:
        """The last generation that this worker knows of."""
        return self._last.generation

    def answers(self) -> bool:
        """Whether the store does."""
        try:
            self.store.check(["members"])
        except dist.DistError:
            return False
        return True

    def group_store(self) -> Any:
        """The store for the process group of this generation alone."""
        return dist.PrefixStore(f"{self.generation}/group", self._kept)

    def report(self, step: int, lost_ranks: Iterable[int] = ()) -> None:
        """Report that this worker wants to be in the next generation. Call this before the old group is destroyed: a member that
        then sees this worker's farewell, and not the death before it, finds the report.

        Args:
            step: its committed steps; -1: it has no state of the job.
            lost_ranks: of the generation that has ended.
        """
        following = self.generation + 1
        content = {
            "member": self.member,
            "step": step,
            "begins": self._begins,
            "lost": [self._last.members[rank] for rank in lost_ranks if rank < len(self._last.members)],
            "host": f"{socket.gethostname()} (process {os.getpid()})",
        }
        self._step = step
        if step > 0:
            self.has_committed(step)
        self._watch = None
        self._slot = self.store.add(f"{following}/slots", 1)
        self._beat(following)
        self.store.set(f"{following}/slot/{self._slot}", json.dumps(content))

    def has_committed(self, step: int) -> None:
        """Record the job's committed steps in the store. From here on no worker starts the job anew, even if all members die."""
        self.store.set("committed", str(step))

    def first_commit(self, step: int) -> None:
        """`has_committed`, for this member's first commit in a generation.

        Raises:
            LeftBehind: newcomers had taken all members of this generation for dead, and started the job anew.
        """
        if _text(self.store.compare_set(f"{self.generation}/fate", "", _COMMITTED)) != _COMMITTED:
            raise self._left_behind(self.generation + 1)
        self.has_committed(step)

    def heartbeat(self, store: Any = None) -> None:
        """Send newcomers a heartbeat of this member of the generation; ``store`` is another connection to the store."""
        (self.store if store is None else store).add(f"{self.generation}/heartbeat/{self.member}", 1)

    @contextlib.contextmanager
    def heartbeats(self) -> Iterator[Callable[[], None]]:
        """Send heartbeats from a separate thread while in this context. Yields a function that ends them sooner."""
        over = threading.Event()

        def beat() -> None:
            # A connection of its own: this worker's other calls may wait in the store.
            store = None
            has_warned = False
            while not over.wait(_BEAT_S):
                try:
                    store = self._kept.clone() if store is None else store
                    self.heartbeat(store)
                except dist.DistError as error:
                    store = None
                    if not has_warned:
                        log.warning("a heartbeat could not be sent, and is tried again: %s", str(error).splitlines()[0])
                    has_warned = True

        self.heartbeat()
        threading.Thread(target=beat, name="penstock-heartbeat", daemon=True).start()
        try:
            yield over.set
        finally:
            over.set()

    def await_roster(self) -> Roster:
        """Wait until the next generation with this worker in it is decided. Call `report` first.

        Raises:
            Finished: the job has come to its end.
            LeftBehind: the other members went on without this worker.
            TooFew, StateLost: after ``wait_s``.
        """
        while (roster := self.poll(time.monotonic())) is None:
            time.sleep(_POLL_S)
        return roster

    def poll(self, now_s: float) -> Roster | None:
        """One iteration of `await_roster`, at the time ``now_s``. Returns None while the generation is not decided."""
        following = self.generation + 1
        if self._watch is None:
            self._watch = _Watch(self._last.members, self.rules.silent_s)
        if self._waits_since_s is None:
            self._waits_since_s = now_s
        if (roster := self._roster(following)) is None:
            if now_s >= self._watch.next_s:
                self._look(following, now_s)
            return None
        self._last = roster
        self._beats = {}
        if self.member in roster.members:
            self._waits_since_s = None
            return roster
        if self._step >= 0:
            raise self._left_behind(following)
        log.info("generation %d is full or began before this worker came; it waits for the next", following)
        self.report(-1)
        return None

    def _left_behind(self, following: int) -> LeftBehind:
        return LeftBehind(
            f"generation {following} of job {self.job!r} went on without this worker (member {self.member}): it was "
            "taken for dead, because it was silent for too long. Its state is out of date. Call run() again, or "
            "start the worker again, and it joins as a newcomer; raise PENSTOCK_PEER_TIMEOUT where workers are "
            "suspended."
        )

    def newcomer_waits(self) -> bool:
        """Whether a live worker has reported for the next generation, and there is room for it. For one rank, between steps. Call
        it twice: a worker is alive if its heartbeat counter moves between two calls."""
        if self.rules.max_ranks is not None and len(self._last.members) >= self.rules.max_ranks:
            return False
        following = self.generation + 1
        before, self._beats = self._beats, _beats(self.store, following)
        return any(slot in before and beat > before[slot] for slot, beat in self._beats.items())

    def finish(self, step: int) -> None:
        """Record that the job has ended: no worker needs to wait for another generation."""
        self.store.compare_set(f"{self.generation + 1}/roster", "", json.dumps({"finished": step}))

    def _look(self, following: int, now_s: float) -> None:
        """Send this worker's heartbeat, check the others', and close the generation if it is time."""
        assert self._watch is not None and self._waits_since_s is not None, "poll sets both"
        self._beat(following)
        reports = self._watch.look(self.store, following, now_s)
        # Read after the reports, so that it includes what members have committed before they reported.
        known = int(self.store.get("committed")) if self.store.check(["committed"]) else 0
        committed = max([known, *(one.step for one in reports)])
        died = committed == 0 and self._watch.has_died(self.store, self.generation, now_s)
        waited_s = self._watch.waited_s(now_s)
        chosen, why = decide(reports, self._last.members, committed, waited_s, self.rules, died)
        if chosen and died and not self._declare_dead():
            # A member made the first commit meanwhile. It may have died before it wrote down the step.
            committed = 1
            chosen, why = decide(reports, self._last.members, committed, waited_s, self.rules)
        if chosen:
            self._close(following, chosen, why)
            return
        if why != self._said:
            log.info("generation %d: member %d waits: %s", following, self.member, why)
            self._said = why
        if now_s - self._waits_since_s > self.rules.wait_s:
            raise self._waited_too_long(reports, committed, why)

    def _declare_dead(self) -> bool:
        """Record that all members of the generation died before its first commit. Returns False if one has committed."""
        return _text(self.store.compare_set(f"{self.generation}/fate", "", _DEAD)) == _DEAD

    def _find_last(self) -> Roster:
        generation = int(self.store.get("current")) if self.store.check(["current"]) else 0
        last = Roster(generation, (), -1, 0) if generation == 0 else None
        while True:
            if last is None:
                last = self._roster(generation)
                assert last is not None, "it is closed before it becomes current"
            if not self.store.check([f"{last.generation + 1}/roster"]):
                return last
            generation, last = last.generation + 1, None

    def _roster(self, generation: int) -> Roster | None:
        """The generation's roster; None if there is none yet."""
        key = f"{generation}/roster"
        # Not a wait with a time-out: torch prints a line for each that expires.
        if not self.store.check([key]):
            return None
        content = json.loads(self.store.get(key))
        if "finished" in content:
            raise Finished(f"job {self.job!r} has come to its end, at step {content['finished']}")
        return Roster(generation, tuple(content["members"]), content["step"], content["donor"])

    def _close(self, generation: int, chosen: list[Report], why: str) -> None:
        donor = max(range(len(chosen)), key=lambda rank: _progress(chosen[rank]))
        best = chosen[donor].step
        members = [one.member for one in chosen]
        content = {"members": members, "step": best, "donor": donor}
        self.store.compare_set(f"{generation}/roster", "", json.dumps(content))
        self.store.set("current", str(generation))
        log.info("generation %d: closed with member(s) %s: %s", generation, _numbers(members), why)

    def _beat(self, generation: int) -> None:
        self.store.add(f"{generation}/beat/{self._slot}", 1)

    def _waited_too_long(self, reports: list[Report], committed: int, why: str) -> TimeoutError_:
        here = len([one for one in reports if one.pulse != "dead"])
        what = (
            f"Timed out after {self.rules.wait_s:g} s: no generation {self.generation + 1} of job {self.job!r}: {why}."
        )
        if here < self.rules.min_ranks and not (
            committed > 0 and all(one.step < 0 for one in reports if one.pulse != "dead")
        ):
            return TooFew(
                f"{what} Start more workers with the same PENSTOCK_ELASTIC_STORE, or lower min_ranks. This worker has "
                + ("no state yet." if self._step < 0 else f"committed {self._step} step(s); state.restore() has them.")
            )
        if self.rules.max_ranks is not None and len(self._last.members) >= self.rules.max_ranks:
            what += (
                f" If they train, all is well: the job is full (max_ranks={self.rules.max_ranks}), and this worker was in "
                "reserve; start it again to wait on."
            )
        return StateLost(
            f"{what} If they are still alive, see why they do not come to a step's end; if not, start the job again from a "
            "checkpoint, under another name (PENSTOCK_ELASTIC_JOB) or with a new store."
        )


class _Answering:
    """A store whose calls have a time-out. Calls of torch's own store wait for an answer without a limit, also where packets are
    lost silently.

    A call without an answer for `_ANSWER_S` raises `dist.DistNetworkError`, and every later call does so at once.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._silent: dist.DistNetworkError | None = None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._store, name)

        def call(*args: Any) -> Any:
            if self._silent is not None:
                raise self._silent
            results: list[Any] = []
            errors: list[Exception] = []

            def ask() -> None:
                try:
                    results.append(method(*args))
                except Exception as error:
                    errors.append(error)

            # The thread of a call without an answer stays; it must not keep the process from ending.
            asking = threading.Thread(target=ask, name="penstock-elastic", daemon=True)
            asking.start()
            asking.join(_ANSWER_S)
            if asking.is_alive():
                self._silent = dist.DistNetworkError(f"it has not answered for {_ANSWER_S:g} s")
                raise self._silent
            if errors:
                raise errors[0]
            return results[0]

        return call


class _Watch:
    """Reads the reports for one generation, and watches which heartbeats go on."""

    def __init__(self, previous: Sequence[int], silent_s: float) -> None:
        self._previous = previous
        self._silent_s = silent_s
        self._reports: dict[int, Report] = {}
        self._moved_s: dict[int, float] = {}
        self._beats: dict[int, int] = {}
        self._moves: dict[int, int] = {}
        self._first_s: float | None = None
        self._heartbeats: dict[int, int] = {}
        self._heard_s = math.inf
        self.next_s = -math.inf

    def look(self, store: Any, generation: int, now_s: float) -> list[Report]:
        self.next_s = now_s + _LOOK_S
        beats = _beats(store, generation)
        for slot, beat in beats.items():
            if slot not in self._reports and store.check([f"{generation}/slot/{slot}"]):
                content = json.loads(store.get(f"{generation}/slot/{slot}"))
                self._reports[slot] = Report(
                    content["member"], content["step"], tuple(content["lost"]), begins=content["begins"]
                )
                if self._first_s is None and (not self._previous or content["member"] in self._previous):
                    self._first_s = now_s
            if beat != self._beats.get(slot):
                self._moves[slot] = self._moves.get(slot, -1) + 1
                self._moved_s[slot] = now_s
        self._beats = beats
        return [dataclasses.replace(one, pulse=self._pulse(slot, one, now_s)) for slot, one in self._reports.items()]

    def waited_s(self, now_s: float) -> float:
        return 0.0 if self._first_s is None else now_s - self._first_s

    def has_died(self, store: Any, generation: int, now_s: float) -> bool:
        """Whether all members of a generation are dead: none has reported for the next one, or sent a heartbeat for ``silent_s``.
        Call it at every look before the generation's first commit."""
        if not self._previous or self._first_s is not None:
            return False
        heartbeats = {member: store.add(f"{generation}/heartbeat/{member}", 0) for member in self._previous}
        if heartbeats != self._heartbeats:
            self._heartbeats, self._heard_s = heartbeats, now_s
        return now_s - self._heard_s > self._silent_s

    def _pulse(self, slot: int, report: Report, now_s: float) -> str:
        if now_s - self._moved_s[slot] > self._silent_s:
            return "dead"
        # A member of the last generation was alive a moment ago; a newcomer may have died since it reported.
        return "alive" if self._moves[slot] or report.member in self._previous else "unsure"


def _progress(one: Report) -> tuple[int, int]:
    """Orders reports: the first with the most is the donor."""
    return one.step, one.begins if one.step < 0 else 0


def connect(given: str) -> Any:
    """Connect to the store at "host:port".

    Raises:
        penstock.errors.Config: there is no address, or nothing answers there within 30 s.
    """
    host, port = split(given)
    if not host or not port.isdigit():
        raise ConfigError(
            f"the address of the elastic store is {given!r}, and must be HOST:PORT. Start one with `python -m "
            "penstock.elastic.store` and set PENSTOCK_ELASTIC_STORE to what it prints, on all workers."
        )
    try:
        return dist.TCPStore(host, int(port), None, False, timedelta(seconds=_CONNECT_S))
    except dist.DistError as error:
        raise ConfigError(
            f"the elastic store at {given} does not answer: {str(error).splitlines()[0]}. Is `python -m "
            "penstock.elastic.store` running there?"
        ) from error


def _beats(store: Any, generation: int) -> dict[int, int]:
    # A slot's beat is there before anybody can read the count of slots twice, but not before it can be read once.
    slots = range(1, store.add(f"{generation}/slots", 0) + 1)
    return {slot: store.add(f"{generation}/beat/{slot}", 0) for slot in slots}


def _text(value: Any) -> str:
    """The text that a store has under a key."""
    return value.decode() if isinstance(value, bytes) else str(value)


def _numbers(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"


# How often a waiting worker reads the roster, which limits how late it learns of it: one message, 26 us of the store's time
# (measured for `penstock.runtime.groups`).
_POLL_S = 0.05
# How often it reads all reports, and sends a heartbeat. A guess: for users it is at once. A look at one report costs the store
# some 26 us, so 50 waiting workers take a third of a core.
_LOOK_S = 0.2
# Between two heartbeats of a member. A guess: some get through in `Rules.silent_s` on a machine that is short of processors.
_BEAT_S = 1.0
_COMMITTED, _DEAD = "committed", "dead"
# Workers and their store are often started together; importing torch takes a store some seconds.
_CONNECT_S = 30.0
# A guess: an answer takes a store less than a millisecond, and a network that loses everything for so long is cut.
_ANSWER_S = 30.0
