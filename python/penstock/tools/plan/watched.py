"""A running job's deployment, kept up to date: what a testbed measures, or events tell, goes into `penstock.planning.replan`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.cluster.network import Cluster, Job
from penstock.errors import Config as ConfigError
from penstock.files import write_whole
from penstock.numbers import bit_rate
from penstock.planning.bound import bound_of_all
from penstock.planning.deploy import deployment
from penstock.planning.evaluate import evaluate, loads_of
from penstock.planning.problem import Problem
from penstock.planning.relax import relax
from penstock.planning.replan import Decision, Event, Gone, Loads, Patience, State, decide, left_of, noted
from penstock.planning.scheme import Scheme
from penstock.tools.plan.planned import bound_told, candidates_for
from penstock.tools.testbed import carry
from penstock.tools.testbed.cluster import Testbed

__all__ = ["Meter", "Watched", "event_of"]


class Watched:
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
            penstock.errors.Config: as `decide`; the old scheme still holds. What is gone is remembered nevertheless, unless the
                event names what the cluster lacks.
        """
        after = noted(self.cluster, self.state, event)
        try:
            self.state, decision = decide(self.cluster, self.job, self.state, event, patience=self.patience)
        except ConfigError:
            self.state = after
            raise
        if decision.is_changed and self._output is not None:
            where = os.path.relpath(Path(self._cluster_path).resolve(), Path(self._output).resolve().parent)
            told = {"Changed while the job ran": decision.reason, **self._told(decision)}
            write_whole(Path(self._output), deployment(self.cluster, self.job, decision.scheme, where, told))
        return decision

    def _told(self, decision: Decision) -> dict[str, str]:
        """What the new deployment is worth, in the network as it is now."""
        left = left_of(self.cluster, self.job, self.state)
        worth = evaluate(left, self.job, decision.scheme, self.state.background)
        levels = 2 if any(decision.scheme.above.values()) else None
        candidates = candidates_for(left, self.job)
        problem = Problem(left, self.job, levels=levels, candidates=candidates, background=self.state.background)
        fractions = np.array([decision.scheme.fractions.get(name, 0.0) for name in problem.servers])
        relaxed = relax(problem, fractions=fractions, seconds=_OF_THE_BOUND_S)
        bound = bound_of_all(problem, relaxed)
        return {
            "Planned": f"{bit_rate(worth.rate)} a worker",
            **bound_told(worth.rate, bound, is_relaxed=relaxed.is_solved),
            "Full": worth.binding,
        }


@dataclass
class _Look:
    at: float
    links: Mapping[str, tuple[int, int]]
    received: Mapping[tuple[str, int, str], int]
    """By server, job and child: bytes."""
    trees: Mapping[tuple[str, int], Mapping[str, frozenset[int]]]
    """By server and job: the ranks at or below each aggregator, by its address."""


class Meter:
    """What others send over a testbed's links while a job runs, which are down, and which aggregators its workers bypass."""

    def __init__(self, bed: Testbed, job: Job) -> None:
        self._bed, self._job = bed, job
        self._gone: set[str] = set()
        self._schemes: list[Scheme] = []
        self._before, _ = self._look()

    def events(self, scheme: Scheme) -> list[Event]:
        """Since the last call: deaths, then loads. What the job itself sends is taken off the loads: by ``scheme``, or, as long
        as the ranks have not switched to it, by one of an earlier call."""
        if not self._schemes or self._schemes[-1] != scheme:
            self._schemes.append(scheme)
        now, gone = self._look()
        before, self._before = self._before, now
        found: list[Event] = [Gone(name, is_back=name not in gone) for name in sorted(gone ^ self._gone)]
        self._gone = gone
        took = now.at - before.at
        running = self._running(now, before)
        rate = 8 / took * sum(self._part(server, now, before) for server in running.via)
        own = loads_of(self._bed.topology.cluster, self._job, running)
        others = {}
        for link in self._bed.topology.cluster.links:
            counted = max(n - b for n, b in zip(now.links[link.name], before.links[link.name], strict=True)) * 8 / took
            load = counted - rate * own.get(f"link {link.name}", 0.0)
            if link.rate_bit_s is not None and load > _LEAST_SHARE * link.rate_bit_s:
                others[f"link {link.name}"] = min(load, 0.99 * link.rate_bit_s)
            elif link.background_bit_s:
                # It was measured, so what the file says counts no more.
                others[f"link {link.name}"] = 0.0
        return [*found, Loads(others)]

    def _running(self, now: _Look, before: _Look) -> Scheme:
        """The last of the known schemes whose aggregators the servers have below them."""
        active = {
            (server, job)
            for server, job, child in now.received
            if now.received[server, job, child] > before.received.get((server, job, child), 0)
        }
        cluster = self._bed.topology.cluster
        for scheme in reversed(self._schemes):
            if all(
                now.trees[server, job] == _tree_of(cluster, scheme, server)
                for server, job in active
                if server in scheme.via
            ):
                return scheme
        return self._schemes[-1]

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
        trees: dict[tuple[str, int], dict[str, frozenset[int]]] = {}
        gone = {f"link {name}" for name in self._bed.links_down()}
        for server in cluster.servers:
            for opened in carry.jobs_at(self._bed, server):
                if carry.is_of(self._bed, self._job, opened):
                    gone |= {listening[at] for at in opened["bypassed"] if at in listening}
                    trees[server.name, opened["job"]] = {
                        node["address"]: _ranks(node["workers"]) for node in opened["nodes"] if node["node"] != "worker"
                    }
                    received |= {
                        (server.name, opened["job"], node["address"]): node["bytes"] for node in opened["nodes"]
                    }
        crossed = {each.name: (each.up_bytes, each.down_bytes) for each in self._bed.links()}
        return _Look(time.monotonic(), crossed, received, trees), gone


def _tree_of(cluster: Cluster, scheme: Scheme, server: str) -> dict[str, frozenset[int]]:
    """By aggregator's address: the ranks at or below it, as a server tells them."""
    above = scheme.above.get(server, {})
    found: dict[str, set[int]] = {}
    for rank, place in enumerate(scheme.via[server]):
        at: str | None = place
        while at is not None:
            found.setdefault(at, set()).add(rank)
            at = above.get(at)
    return {cluster.address(cluster.aggregator[name]) or "": frozenset(ranks) for name, ranks in found.items()}


def _ranks(text: str) -> frozenset[int]:
    """Of "0-3,7"."""
    found: set[int] = set()
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return frozenset(found)


def event_of(line: str, number: int) -> Event:
    """The event of a line of JSON: ``{"gone": "link r0"}``, ``{"back": "link r0"}``, ``{"loads": {"link r0": "200 Mbit/s"}}``.

    Raises:
        penstock.errors.Config: it is none of them.
    """
    from penstock.cluster import places, units

    try:
        told: Any = json.loads(line)
        [(kind, what)] = told.items()
    except (ValueError, AttributeError):
        kind, what = "", None
    if kind in ("gone", "back") and isinstance(what, str):
        return Gone(what, is_back=kind == "back")
    if kind == "loads" and isinstance(what, dict):
        return Loads(
            {
                str(name): float(units.RATE.read(places.compose(json.dumps(rate), f"event {number}", str(name))))
                for name, rate in what.items()
            }
        )
    raise ConfigError(
        f'event {number}: {line.strip()[:80]!r} is none of {{"gone": "link r0"}}, {{"back": "aggregator a0"}}, '
        '{"loads": {"link r0": "200 Mbit/s"}}'
    )


# Less of a link's rate is headers, what was sent again, and other ranks' words.
_LEAST_SHARE = 0.1
# The ranks wait for the new deployment while its bound is computed.
_OF_THE_BOUND_S = 1.0
