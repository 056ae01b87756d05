"""The numbers of one rank, from what its engine counts: rates between two looks. Small: they go into the job's store."""

from __future__ import annotations

import collections
import json
import logging
import os
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from penstock.interfaces import is_physical
from penstock.live.counts import Counts
from penstock.texts import apart

__all__ = ["MOST_BYTES", "Complaints", "Own", "host", "in_flight"]

MOST_BYTES = 8192
"""Of a rank's numbers as JSON. What is too long loses its peers, then its groups and servers."""


class Own:
    """This rank's numbers, from one look to the next.

    Args:
        rank: in the job.
        interfaces: those that the engine uses.
        counts: of the training.
        complaints: of this process.
    """

    def __init__(self, rank: int, interfaces: Iterable[str], counts: Counts, complaints: Complaints) -> None:
        self._counts = counts
        self._complaints = complaints
        names = list(dict.fromkeys(interfaces))
        self._known: dict[str, Any] = {
            "rank": rank,
            "host": host(),
            "pid": os.getpid(),
            "interfaces": ", ".join(names),
            "link_limit": speed(names),
        }
        self._looks = 0
        self._before: dict[str, Any] = {}
        self._last_s = 0.0
        self._recorded_s = 0.0
        self._median_s: float | None = None
        self._latest_s: float | None = None
        self._operations: dict[str, Any] = {}

    def look(self, stats: dict[str, Any] | None, now_s: float, state: str = "running") -> dict[str, Any]:
        """What is known now, with the rates since the last look. ``stats``: of the engine, if there is one."""
        self._looks += 1
        seconds = now_s - self._last_s if self._before else 0.0
        totals: dict[str, float] = {
            "steps": self._counts.steps,
            "samples": self._counts.samples,
            "tokens": self._counts.tokens,
            "retransmitted": retransmitted(),
        }
        if durations := self._counts.take():
            self._median_s, self._latest_s = statistics.median(durations), durations[-1]
        found: dict[str, Any] = {"look": self._looks, "state": state, **self._known, **self._operations}
        found |= {"steps": self._counts.steps, "median_s": self._median_s, "latest_s": self._latest_s}
        found["since_s"] = self._counts.since_s()
        found["complaints"] = self._complaints.latest()
        if stats is not None:
            totals["finished"], totals["memory_read"] = stats["finished_operations"], stats["memory_read_bytes"]
            found["memory_bytes"] = stats["memory_bytes"]
            found["active"] = stats["held"]["operations"]
            found["lost"] = {str(peer["rank"]): peer["lost"][:_TEXT] for peer in stats["peers"] if peer["lost"]}
            found["peers"], sent = self._peers(stats["peers"], seconds)
            totals |= sent
            found["groups"] = _groups(stats["groups"])
            found["aggregated"] = _aggregated(stats["aggregated"], seconds, self._before, totals)
        if seconds > 0:
            for name in (*_TRAINED, "retransmitted", "finished", "sent", "received", "repeated", "memory_read"):
                if name in totals and name in self._before:
                    found[f"{name}_per_s"] = round(max(0.0, totals[name] - self._before[name]) / seconds, 3)
        self._before, self._last_s = totals, now_s
        return found

    def see_operations(self, record: dict[str, Any], now_s: float) -> None:
        """Take in the flight record: what was under way since the last call, and what waits now."""
        window_s = min(now_s - self._recorded_s, _LONGEST_S)
        self._recorded_s = now_s
        operations = record["operations"]
        if len(operations) >= _RECORDED:
            window_s = min(window_s, operations[0]["issued_s_ago"])
        collectives = [one for one in operations if not one["operation"].startswith(("send", "recv"))]
        self._operations = {}
        if window_s > 0 and collectives:
            ended = [one for one in operations if one["ended_s_ago"] is not None and one["ended_s_ago"] < window_s]
            self._operations["in_flight"] = round(in_flight(collectives, window_s), 4)
            self._operations["reduced_per_s"] = round(sum(one["bytes"] for one in ended) / window_s)
        running = [one for one in operations if one["ended_s_ago"] is None]
        if running:
            first = max(running, key=lambda one: one["issued_s_ago"])
            what = f"{first['operation']} of group {first['group']}"
            self._operations["waits"] = [what[:_TEXT], first["issued_s_ago"], (first["waits_for"] or "")[:_TEXT]]
        coflows = _coflows(running)
        self._operations |= {"coflows_active": len(coflows), "coflows": coflows[:_COFLOWS]}

    def _peers(self, peers: Sequence[dict[str, Any]], seconds: float) -> tuple[list[Any], dict[str, float]]:
        """The busiest peers, each as a list: rank, medium, streams, bytes sent and received a second, longest round trip, lowest
        and highest rate of a stream, frames that were sent again, bytes read from its memory a second. And the totals."""
        totals: dict[str, float] = {"sent": 0, "received": 0, "repeated": 0}
        rows = []
        for peer in peers:
            streams = peer["streams"]
            sent = sum(one["sent_bytes"] for one in streams)
            received = sum(one["received_bytes"] for one in streams)
            repeated = sum(one["repeated_frames"] for one in streams)
            for name, value in (("sent", sent), ("received", received), ("repeated", repeated)):
                totals[name] += value
            # A peer whose streams were made anew starts at 0.
            each_way = {f"sent to {peer['rank']}": sent, f"received from {peer['rank']}": received}
            each_way[f"read from {peer['rank']}"] = peer["memory_read_bytes"]
            totals |= each_way
            if peer["lost"]:
                continue
            earlier = self._before
            rates = [
                max(0.0, now - earlier.get(name, now)) / seconds if seconds > 0 else 0.0
                for name, now in each_way.items()
            ]
            each = [one["rate_bytes_per_s"] for one in streams]
            rows.append(
                [
                    peer["rank"],
                    peer["medium"],
                    len(streams),
                    *map(round, rates[:2]),
                    round(max((one["round_trip_s"] for one in streams), default=0.0), 6),
                    round(min(each, default=0.0)),
                    round(max(each, default=0.0)),
                    repeated,
                    round(rates[2]),
                ]
            )
        rows.sort(key=lambda row: -(row[3] + row[4] + row[9]))
        return rows[:_PEERS], totals


class Complaints(logging.Filter):
    """The last warnings and errors that Penstock has logged in this process. A filter, since a handler would keep Python from
    printing them where the program has set up no logging."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: collections.deque[tuple[float, str]] = collections.deque(maxlen=4)

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            try:
                self.add(record.getMessage())
            except Exception:  # a message that does not fit its arguments: logging itself says so
                pass
        return True

    def add(self, text: str) -> None:
        """Keep a text for the view."""
        self._kept.append((time.time(), text[:_TEXT]))

    def latest(self) -> list[list[Any]]:
        """Each with the time of day, in seconds since 1970."""
        return [[round(when, 1), text] for when, text in list(self._kept)]


def text(numbers: dict[str, Any]) -> str:
    """A rank's numbers as JSON of at most `MOST_BYTES`."""
    for dropped in (
        (),
        ("peers",),
        ("peers", "aggregated", "groups"),
        ("peers", "aggregated", "groups", "complaints", "lost"),
    ):
        made = json.dumps(
            {name: value for name, value in numbers.items() if name not in dropped}, separators=(",", ":")
        )
        if len(made) <= MOST_BYTES:
            break
    return made


def in_flight(operations: Iterable[dict[str, Any]], window_s: float) -> float:
    """The share of the last ``window_s`` in which at least one of the operations was under way."""
    spans = sorted(
        (-min(one["issued_s_ago"], window_s), -(one["ended_s_ago"] or 0.0))
        for one in operations
        if one["ended_s_ago"] is None or one["ended_s_ago"] < window_s
    )
    covered, until = 0.0, -window_s
    for start, end in spans:
        if end > until:
            covered += end - max(start, until)
            until = end
    return min(1.0, covered / window_s)


def host() -> str:
    """A name of this host and network namespace: two ranks share interfaces if they share it."""
    try:
        space = os.readlink("/proc/self/ns/net").strip("net:[]")
    except OSError:
        space = "0"
    return f"{os.uname().nodename}/{space}"


def speed(interfaces: Iterable[str]) -> float | None:
    """Bytes a second of these interfaces together, one way; None where one does not say (a virtual one)."""
    total = 0.0
    for name in interfaces:
        try:
            mbit = int(Path("/sys/class/net", name, "speed").read_text())
        except (OSError, ValueError):
            return None
        if mbit <= 0 or not is_physical(name):
            return None
        total += mbit * 125_000
    return total or None


def retransmitted() -> float:
    """TCP segments that this host has sent again, for all programs."""
    try:
        with open("/proc/self/net/snmp") as lines:
            names, values = (line.split() for line in lines if line.startswith("Tcp:"))
        return float(values[names.index("RetransSegs")])
    except (OSError, ValueError):
        return 0.0


def _coflows(running: Iterable[dict[str, Any]]) -> list[list[Any]]:
    """Those with the most bytes first: number, operations under way, bytes of their tensors."""
    found: dict[int, list[Any]] = {}
    for one in running:
        if one["coflow"]:
            row = found.setdefault(one["coflow"], [one["coflow"], 0, 0])
            row[1] += 1
            row[2] += one["bytes"]
    return sorted(found.values(), key=lambda row: (-row[2], row[0]))


def _groups(groups: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """Those with the most under way: name, ranks, operations issued, under way, why it failed."""
    rows: dict[str, list[Any]] = {}
    for group in groups:
        for name, each in [
            (group["name"], group),
            *((f"{group['name']}/{one['name']}", one) for one in group["channels"]),
        ]:
            # Channels of several reducers have the same name.
            name = apart(name[:_NAME], rows)
            rows[name] = [name, group["world"], each["issued"], each["active"], each["failed"]]
    first = sorted(rows.values(), key=lambda row: (row[4] is None, -row[3], -row[2]))[:_GROUPS]
    return [[*row[:4], row[4] and row[4][:_TEXT]] for row in first]


def _aggregated(
    aggregated: dict[str, Any], seconds: float, before: dict[str, Any], totals: dict[str, float]
) -> list[list[Any]]:
    """Per group and server: group, server, aggregator, bytes a second of the group, blocks pushed again, bypasses, why it fell
    back."""
    rows: list[list[Any]] = []
    for name, group in aggregated.items():
        if group is None:
            continue
        key = f"aggregated {name}"
        totals[key] = group["bytes"]
        rate = round(max(0.0, group["bytes"] - before.get(key, group["bytes"])) / seconds) if seconds > 0 else 0
        for server in group["servers"]:
            parent = None if server["is_direct"] else server["parent"]
            again, bypasses, why = server["pushed_again"], server["bypasses"], group["fallback"]
            rows.append([name[:_NAME], server["address"], parent, rate, again, bypasses, why and why[:_TEXT]])
    return rows[:_SERVERS]


_TRAINED = ("steps", "samples", "tokens")
_TEXT = 300
_NAME = 60
_PEERS = 8
_GROUPS = 8
_SERVERS = 8
_COFLOWS = 8
# The flight record has as many operations at most.
_RECORDED = 1024
# Older operations say nothing about now.
_LONGEST_S = 10.0
