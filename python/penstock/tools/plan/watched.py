"""A running job's plan, kept up to date: what a testbed measures, or events tell, goes into `penstock.planning.replan`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.cluster.network import Cluster, Job
from penstock.errors import Config as ConfigError
from penstock.files import write_whole
from penstock.planning.deploy import deployment
from penstock.planning.evaluate import loads_of
from penstock.planning.replan import Decision, Event, Gone, Loads, Patience, State, decide
from penstock.planning.scheme import Scheme
from penstock.tools.testbed import carry
from penstock.tools.testbed.cluster import Testbed

__all__ = ["Meter", "Plan", "events_of"]


class Plan:
    """A job's scheme over time, and the file that says which one holds.

    Args:
        scheme: with which the job runs.
        output: where a new one is written, as a deployment; None: nowhere.
        cluster_path: of the cluster file.
    """

    def __init__(
        self, cluster: Cluster, job: Job, scheme: Scheme, patience: Patience, output: str | None, cluster_path: str
    ) -> None:
        self.cluster, self.job, self.patience = cluster, job, patience
        self.state = State(scheme)
        self._output, self._cluster_path = output, cluster_path

    def take(self, event: Event) -> Decision:
        """Decides, and writes the file where another scheme is to run.

        Raises:
            penstock.errors.Config: as `decide`; the old scheme still holds.
        """
        self.state, decision = decide(self.cluster, self.job, self.state, event, patience=self.patience)
        if decision.is_changed and self._output is not None:
            where = os.path.relpath(Path(self._cluster_path).resolve(), Path(self._output).resolve().parent)
            told = {"Changed while the job ran": decision.reason}
            write_whole(Path(self._output), deployment(self.cluster, self.job, decision.scheme, where, told))
        return decision


@dataclass
class _Look:
    at: float
    links: Mapping[str, tuple[int, int]]
    received: Mapping[tuple[str, int, str], int]
    """By server, job and child: bytes."""


class Meter:
    """What others send over a testbed's links while a job runs, and which aggregators its workers bypass."""

    def __init__(self, bed: Testbed, job: Job) -> None:
        self._bed, self._job = bed, job
        self._gone: set[str] = set()
        self._before, _ = self._look()

    def events(self, scheme: Scheme) -> list[Event]:
        """Since the last call: deaths, then loads. What the job itself sends by ``scheme`` is taken off the loads."""
        now, bypassed = self._look()
        before, self._before = self._before, now
        found: list[Event] = [Gone(name, is_back=name not in bypassed) for name in sorted(bypassed ^ self._gone)]
        self._gone = bypassed
        took = now.at - before.at
        rate = 8 / took * sum(self._part(server, now, before) for server in scheme.via)
        own = loads_of(self._bed.topology.cluster, self._job, scheme)
        others = {}
        for link in self._bed.topology.cluster.links:
            counted = max(n - b for n, b in zip(now.links[link.name], before.links[link.name], strict=True)) * 8 / took
            load = counted - rate * own.get(f"link {link.name}", 0.0)
            if link.rate_bit_s is not None and load > _LEAST_SHARE * link.rate_bit_s:
                others[f"link {link.name}"] = min(load, 0.99 * link.rate_bit_s)
        return [*found, Loads(others)]

    def _part(self, server: str, now: _Look, before: _Look) -> float:
        """Bytes of a worker's gradients for a server: every child of it sent as many, but for what was sent again."""
        each = [
            count - before.received[key]
            for key, count in now.received.items()
            if key[0] == server and key in before.received and count > before.received[key]
        ]
        return float(sorted(each)[len(each) // 2]) if each else 0.0

    def _look(self) -> tuple[_Look, set[str]]:
        cluster = self._bed.topology.cluster
        listening = {cluster.address(each): f"aggregator {each.name}" for each in cluster.aggregators}
        received: dict[tuple[str, int, str], int] = {}
        bypassed: set[str] = set()
        for server in cluster.servers:
            for opened in carry.jobs_at(self._bed, server):
                if carry.is_of(self._bed, self._job, opened):
                    bypassed |= {listening[at] for at in opened["bypassed"] if at in listening}
                    received |= {
                        (server.name, opened["job"], node["address"]): node["bytes"] for node in opened["nodes"]
                    }
        crossed = {each.name: (each.up_bytes, each.down_bytes) for each in self._bed.links()}
        return _Look(time.monotonic(), crossed, received), bypassed


def events_of(lines: Iterator[str]) -> Iterator[Event]:
    """Events from lines of JSON: ``{"gone": "link r0"}``, ``{"back": "link r0"}``, ``{"loads": {"link r0": "200 Mbit/s"}}``.

    Raises:
        penstock.errors.Config: a line is none of them.
    """
    from penstock.cluster import places, units

    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            told: Any = json.loads(line)
            [(kind, what)] = told.items()
        except (ValueError, AttributeError):
            kind, what = "", None
        if kind in ("gone", "back") and isinstance(what, str):
            yield Gone(what, is_back=kind == "back")
        elif kind == "loads" and isinstance(what, dict):
            loads = {
                str(name): float(units.RATE.read(places.compose(json.dumps(rate), f"event {number}", str(name))))
                for name, rate in what.items()
            }
            yield Loads(loads)
        else:
            raise ConfigError(
                f'event {number}: {line.strip()[:80]!r} is none of {{"gone": "link r0"}}, {{"back": "aggregator a0"}}, '
                '{"loads": {"link r0": "200 Mbit/s"}}'
            )


# Less of a link's rate is headers, what was sent again, and other ranks' words.
_LEAST_SHARE = 0.1
