"""The job's numbers, from those of its ranks. Pure: time is an argument. What ranks tell is not believed."""

from __future__ import annotations

import collections
import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from penstock.texts import harmless

__all__ = ["Coflow", "Heard", "Link", "Snapshot", "Straggler", "View", "coflows", "parse"]


@dataclass
class Heard:
    """What rank 0 has heard of one rank."""

    rank: int
    numbers: dict[str, Any] | None = None
    """None: nothing yet."""
    changed_s: float = 0.0
    """When they came, on rank 0's clock."""


@dataclass(frozen=True)
class Link:
    """What the ranks of one host send and receive over TCP, in bytes a second, against what the link can do one way."""

    host: str
    sent: float
    received: float
    limit: float
    is_speed: bool
    """The limit is the interfaces' speed; else the highest rate seen so far."""

    @property
    def share(self) -> float:
        """Of the limit, in the busier direction."""
        return max(self.sent, self.received) / self.limit if self.limit else 0.0

    @property
    def is_telling(self) -> bool:
        """Whether the share says something: the highest rate of a link that has hardly been used is no limit."""
        return self.limit >= _LEAST_RATE


@dataclass(frozen=True)
class Straggler:
    """The rank that issues collectives last."""

    rank: int
    late_s: float
    """A step, as far as steps are known, else a second."""


@dataclass
class Coflow:
    """Operations of all ranks that belong to one coflow and are under way."""

    number: int
    ranks: int = 0
    operations: int = 0
    bytes: float = 0.0
    """Of their tensors."""


@dataclass
class Snapshot:
    """The job at one moment.

    More than 16 fields: one for each thing that is shown.
    """

    state: str
    """``running``, ``between groups`` or ``ended``."""
    deaf: str
    """Why ranks other than 0 cannot be heard of."""
    about: dict[str, Any]
    world: int
    steps: int
    median_s: float | None
    latest_s: float | None
    stuck_s: float | None
    """How long there has been no step, if that is far longer than a step takes."""
    rates: dict[str, float]
    """``steps``, ``samples`` and ``tokens`` a second, those that are known."""
    history: list[float]
    """Median step times, of one look each, the newest last."""
    links: list[Link]
    ranks: list[Heard]
    silent: dict[int, float]
    """Ranks that are not heard of, and for how many seconds."""
    live: frozenset[int]
    """Those that are heard of and in a group."""
    lost: dict[int, str]
    straggler: Straggler | None
    complaints: list[tuple[float, int, str]]
    """Time of day, rank and text, the newest first."""
    age_s: dict[int, float] = field(default_factory=dict)


class View:
    """Rank 0's memory of the job.

    Args:
        about: the job, for people.
    """

    def __init__(self, about: dict[str, Any]) -> None:
        self.about = about
        self.state = "running"
        self.deaf = ""
        """Why other ranks cannot be heard of; empty: they can."""
        self._heard: dict[int, Heard] = {}
        self._history: collections.deque[float] = collections.deque(maxlen=_HISTORY)
        self._highest: dict[str, float] = {}
        self._late: collections.deque[tuple[int, float]] = collections.deque(maxlen=_LATE)

    def expect(self, ranks: Iterable[int], now_s: float, *, anew: bool = False) -> None:
        """These ranks belong to the job; ``anew``: and no others, and what is known of earlier ones is forgotten."""
        if anew:
            self._heard.clear()
            self._late.clear()
        for rank in ranks:
            self._heard.setdefault(rank, Heard(rank, changed_s=now_s))

    @property
    def ranks(self) -> list[int]:
        return sorted(self._heard)

    def hear(self, rank: int, numbers: dict[str, Any], now_s: float) -> None:
        """A rank's numbers, perhaps the same as before."""
        heard = self._heard.get(rank)
        if heard is None or numbers["rank"] != rank:
            return
        known = heard.numbers
        if known is None or (known["look"], known["pid"]) != (numbers["look"], numbers["pid"]):
            heard.numbers, heard.changed_s = numbers, now_s
            # A look without a step says nothing of steps.
            if rank == 0 and numbers["median_s"] and numbers["steps"] != (known or _NOBODY)["steps"]:
                self._history.append(numbers["median_s"])

    def snapshot(self, now_s: float, pause_s: float) -> Snapshot:
        """The job now. ``pause_s``: between two calls of `hear` for the same rank."""
        ranks = [self._heard[rank] for rank in self.ranks]
        known = {each.rank: each.numbers for each in ranks if each.numbers is not None}
        ages = {each.rank: now_s - each.changed_s for each in ranks}
        silent = {}
        for rank, age in () if self.deaf else ages.items():
            numbers = known.get(rank, _NOBODY)
            if numbers["state"] == "running" and age > _SILENT_S + 2 * numbers["every_s"] + pause_s:
                silent[rank] = age
        heard = {0} & known.keys() if self.deaf else known.keys() - silent.keys()
        live = {rank: known[rank] for rank in sorted(heard) if known[rank]["state"] == "running"}
        mine = known.get(0, _NOBODY)
        rates = {name: sum(each[f"{name}_per_s"] for each in live.values()) for name in ("samples", "tokens")}
        rates["steps"] = live[0]["steps_per_s"] if 0 in live else 0.0
        self._note_late(live)
        return Snapshot(
            state=self.state,
            deaf=self.deaf,
            about=self.about,
            world=len(ranks),
            steps=mine["steps"],
            median_s=mine["median_s"],
            latest_s=mine["latest_s"],
            stuck_s=_stuck(mine) if 0 in live else None,
            rates={name: rate for name, rate in rates.items() if mine["steps"] or rate},
            history=list(self._history),
            links=self._links(live),
            ranks=ranks,
            silent=silent,
            live=frozenset(live),
            lost=_lost(known),
            straggler=self._straggler(live),
            complaints=_complaints(known),
            age_s=ages,
        )

    def _links(self, live: Mapping[int, dict[str, Any]]) -> list[Link]:
        hosts: dict[str, list[dict[str, Any]]] = {}
        for each in live.values():
            hosts.setdefault(each["host"], []).append(each)
        links = []
        for host, members in hosts.items():
            sent, received = (sum(each[name] for each in members) for name in ("sent_per_s", "received_per_s"))
            self._highest[host] = highest = max(self._highest.get(host, 0.0), sent, received)
            stated = max((each["link_limit"] or 0.0 for each in members), default=0.0)
            links.append(Link(host, sent, received, stated or highest, bool(stated)))
        return sorted(links, key=lambda link: -link.share)

    def _note_late(self, live: Mapping[int, dict[str, Any]]) -> None:
        """The rank whose collectives are under way for the shortest time, and how much shorter than the others' that is.

        All ranks of a collective end it at about the same time, so who has it under way for less has issued it later."""
        shares = {rank: each["in_flight"] for rank, each in live.items() if each["in_flight"] is not None}
        if len(shares) < max(2, len(live)):
            return
        last = min(shares, key=lambda rank: shares[rank])
        self._late.append((last, statistics.median(shares[rank] for rank in shares if rank != last) - shares[last]))

    def _straggler(self, live: Mapping[int, dict[str, Any]]) -> Straggler | None:
        """The rank that was last in most of the last looks, if the others wait for it for more than `_LEAST_LATE` of the time."""
        if len(self._late) < _LATE // 2:
            return None
        rank, times = collections.Counter(rank for rank, _ in self._late).most_common(1)[0]
        late = statistics.mean(share if one == rank else 0.0 for one, share in self._late)
        if 0 not in live or rank not in live or times <= len(self._late) // 2 or late < _LEAST_LATE:
            return None
        return Straggler(rank, late * (live[0]["median_s"] or 1.0))


def coflows(job: Snapshot) -> list[Coflow]:
    """Those with the most bytes first, from the largest of each rank."""
    found: dict[int, Coflow] = {}
    for each in job.ranks:
        if each.numbers is None or each.rank not in job.live:
            continue
        for number, operations, nbytes in each.numbers["coflows"]:
            one = found.setdefault(int(number), Coflow(int(number)))
            one.ranks += 1
            one.operations += int(operations)
            one.bytes += nbytes
    return sorted(found.values(), key=lambda one: (-one.bytes, one.number))


def parse(text: bytes) -> dict[str, Any] | None:
    """A rank's numbers; None for what is none. What has another form than it should is left out. Texts are harmless, and times of
    day are within what localtime(3) takes."""
    if len(text) > _MOST_BYTES:
        return None
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(given, dict) or not all(isinstance(given.get(name), int) for name in ("rank", "look", "pid")):
        return None
    made: dict[str, Any] = {"rank": given["rank"], "look": given["look"], "pid": given["pid"]}
    for name, otherwise in _NUMBERS.items():
        value = given.get(name)
        made[name] = abs(value) if _is_number(value) else otherwise
    for name, likeness in _TEXTS.items():
        made[name] = harmless(given[name][:400]) if isinstance(given.get(name), str) else likeness
    for name, form in _ROWS.items():
        rows = given.get(name)
        made[name] = [_harmless(row) for row in rows[:16] if _fits(row, form)] if isinstance(rows, list) else []
    made["complaints"] = [[min(max(0.0, when), _LATEST_S), said] for when, said in made["complaints"]]
    lost, waits = given.get("lost"), given.get("waits")
    made["lost"] = {}
    if isinstance(lost, dict):
        made["lost"] = {
            int(rank): harmless(why) for rank, why in lost.items() if _is_rank(rank) and isinstance(why, str)
        }
    made["waits"] = _harmless(waits) if _fits(waits, (str, float, str)) else None
    return made


def _is_number(value: Any) -> TypeGuard[float]:
    """Whether it is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e18


def _is_rank(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10


def _fits(row: Any, form: tuple[Any, ...]) -> TypeGuard[list[Any]]:
    """Whether a row has these types; a number is finite, and `_MAYBE` is a text or nothing."""
    if not isinstance(row, list) or len(row) != len(form):
        return False
    return all(
        _is_number(value) if kind is float else isinstance(value, str) or (kind is _MAYBE and value is None)
        for value, kind in zip(row, form, strict=True)
    )


def _harmless(row: list[Any]) -> list[Any]:
    return [harmless(value) if isinstance(value, str) else value for value in row]


def _stuck(mine: Mapping[str, Any]) -> float | None:
    since_s, median_s = mine["since_s"], mine["median_s"]
    return since_s if since_s and median_s and since_s > max(_STUCK_S, 10 * median_s) else None


def _lost(known: Mapping[int, dict[str, Any]]) -> dict[int, str]:
    """Ranks that others have lost, and why as the first of those says."""
    found: dict[int, str] = {}
    for each in known.values():
        for rank, why in each["lost"].items():
            found.setdefault(rank, why)
    return found


def _complaints(known: Mapping[int, dict[str, Any]]) -> list[tuple[float, int, str]]:
    """Of all ranks, the newest first. The same text of several ranks is there once, with its first rank."""
    found = sorted((when, rank, text) for rank, each in known.items() for when, text in each["complaints"])
    texts: set[str] = set()
    kept = []
    for when, rank, text in found:
        if text not in texts:
            texts.add(text)
            kept.append((when, rank, text))
    return kept[::-1][:_COMPLAINTS]


_MAYBE = object()
_NUMBERS: dict[str, float | None] = {
    **dict.fromkeys(("steps", "steps_per_s", "samples_per_s", "tokens_per_s", "sent_per_s", "received_per_s"), 0.0),
    **dict.fromkeys(("retransmitted_per_s", "repeated_per_s", "finished_per_s", "memory_read_per_s"), 0.0),
    **dict.fromkeys(("memory_bytes", "active"), 0.0),
    "every_s": 1.0,
    **dict.fromkeys(("median_s", "latest_s", "since_s", "in_flight", "reduced_per_s", "link_limit")),
    "coflows_active": None,
}
_TEXTS = {"state": "running", "host": "?", "interfaces": ""}
_ROWS = {
    "peers": (float, str, *[float] * 8),
    "groups": (str, float, float, float, _MAYBE),
    "aggregated": (str, str, _MAYBE, float, float, float, _MAYBE),
    "complaints": (float, str),
    "coflows": (float, float, float),
}
_NOBODY: dict[str, Any] = {**_NUMBERS, **_TEXTS}
# Bytes of a record that is read: twice what a rank writes.
_MOST_BYTES = 16384
# Of a complaint: the end of the year 9999. localtime(3) fails where a year has more than 32 bits.
_LATEST_S = 253_402_300_799.0
# Looks that the line of step times shows: two minutes.
_HISTORY = 120
# Looks that decide who is the straggler.
_LATE = 6
# Of the time. Less is noise: in-flight shares of equal ranks differ by 1 to 3 %.
_LEAST_LATE = 0.05
# A step that takes 10 times the median, and longer than this, is worth a word.
_STUCK_S = 3.0
# Bytes a second.
_LEAST_RATE = 1e5
# Longer than a rank that is busy elsewhere (a garbage collection, a fork) keeps its thread from telling.
_SILENT_S = 3.0
_COMPLAINTS = 8
