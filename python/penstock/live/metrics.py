"""The job's numbers for Prometheus: its text format, version 0.0.4. Pure."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from penstock.live.view import Snapshot

__all__ = ["CONTENT_TYPE", "text"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Ranks from which on there are no series for pairs of them.
_MANY = 64
_Value = tuple[Mapping[str, object], float]


def text(job: Snapshot) -> str:
    """All metrics. Those that are not known are left out."""
    known = {each.rank: each.numbers for each in job.ranks if each.numbers is not None}

    def of_ranks(name: str) -> list[_Value]:
        return [({"rank": rank}, each[name]) for rank, each in known.items() if each[name] is not None]

    def counted(name: str) -> list[_Value]:
        """Nothing where no script counts."""
        return of_ranks(name) if any(each[name] for each in known.values()) else []

    def of_peers(index: int) -> list[_Value]:
        if job.world > _MANY:
            return []
        return [
            ({"rank": rank, "peer": int(row[0])}, row[index]) for rank, each in known.items() for row in each["peers"]
        ]

    def of_groups(index: int) -> list[_Value]:
        rows = known[0]["groups"] if 0 in known else []
        return [({"group": row[0]}, row[index]) for row in rows]

    def of_aggregated(value: Callable[[Any], float]) -> list[_Value]:
        return [
            ({"rank": rank, "group": row[0], "server": row[1], "parent": row[2] or ""}, value(row))
            for rank, each in known.items()
            if rank in job.live
            for row in each["aggregated"]
        ]

    rates = {(rank, row[0]): row[3] for rank, each in known.items() if rank in job.live for row in each["aggregated"]}
    hosts: dict[str, float] = {}
    for each in (each for rank, each in known.items() if rank in job.live):
        hosts[each["host"]] = max(hosts.get(each["host"], 0.0), each["retransmitted_per_s"])
    up = [({"rank": each.rank}, float(each.rank in job.live)) for each in job.ranks]
    links = [({"host": link.host}, link) for link in job.links if link.is_telling]
    late = [] if job.straggler is None else [({"rank": job.straggler.rank}, job.straggler.late_s)]
    families: list[tuple[str, str, str, Iterable[_Value]]] = [
        ("job_ranks", "gauge", "Ranks of the job.", [({}, job.world)]),
        ("job_running", "gauge", "1 while the job runs.", [({}, float(job.state == "running"))]),
        ("rank_up", "gauge", "1 for a rank that is heard of.", up),
        ("steps_total", "counter", "Steps of the training.", of_ranks("steps")),
        ("step_seconds", "gauge", "Median step of the last look.", of_ranks("median_s")),
        ("samples_per_second", "gauge", "As penstock.live.count was told.", counted("samples_per_s")),
        ("tokens_per_second", "gauge", "As penstock.live.count was told.", counted("tokens_per_s")),
        (
            "collectives_in_flight_ratio",
            "gauge",
            "Share of the time with a collective under way.",
            of_ranks("in_flight"),
        ),
        ("straggler_late_seconds", "gauge", "How long the others wait for this rank, a step.", late),
        ("operations_active", "gauge", "Operations under way.", of_ranks("active")),
        ("coflows_active", "gauge", "Coflows with operations under way.", of_ranks("coflows_active")),
        ("operations_per_second", "gauge", "Operations that end.", of_ranks("finished_per_s")),
        ("tensor_bytes_per_second", "gauge", "Of operations that end.", of_ranks("reduced_per_s")),
        ("sent_bytes_per_second", "gauge", "Over TCP.", of_ranks("sent_per_s")),
        ("received_bytes_per_second", "gauge", "Over TCP.", of_ranks("received_per_s")),
        (
            "memory_read_bytes_per_second",
            "gauge",
            "From the memory of ranks on its host.",
            of_ranks("memory_read_per_s"),
        ),
        ("engine_memory_bytes", "gauge", "Of the engine, beyond tensors.", of_ranks("memory_bytes")),
        ("peer_sent_bytes_per_second", "gauge", "To the busiest peers, over TCP.", of_peers(3)),
        ("peer_received_bytes_per_second", "gauge", "From the busiest peers, over TCP.", of_peers(4)),
        ("peer_memory_read_bytes_per_second", "gauge", "From the peer's memory.", of_peers(9)),
        ("peer_round_trip_seconds", "gauge", "The longest of the peer's streams.", of_peers(5)),
        ("peer_repeated_frames_total", "counter", "Frames sent again to the peer.", of_peers(8)),
        ("group_operations_total", "counter", "Of a group or channel of rank 0.", of_groups(2)),
        ("group_operations_active", "gauge", "The same, under way.", of_groups(3)),
        ("group_failed", "gauge", "1 for a group or channel of rank 0 that has failed.", _failed(of_groups(4))),
        (
            "aggregated_bytes_per_second",
            "gauge",
            "Of tensors of a group, through aggregators.",
            [({"rank": rank, "group": group}, rate) for (rank, group), rate in rates.items()],
        ),
        ("aggregated_repeated_blocks_total", "counter", "Blocks sent again.", of_aggregated(lambda row: float(row[4]))),
        ("aggregated_bypasses_total", "counter", "Aggregators passed by.", of_aggregated(lambda row: float(row[5]))),
        (
            "aggregated_fallen_back",
            "gauge",
            "1 where aggregation has given up, and ranks sum themselves.",
            of_aggregated(lambda row: float(bool(row[6]))),
        ),
        (
            "host_retransmitted_segments_per_second",
            "gauge",
            "TCP segments sent again, of all programs.",
            [({"host": host}, rate) for host, rate in hosts.items()],
        ),
        (
            "rank_complaints",
            "gauge",
            "Warnings and errors that are shown of a rank.",
            [
                ({"rank": rank}, count)
                for rank, count in collections.Counter(rank for _, rank, _ in job.complaints).items()
            ],
        ),
        (
            "link_use_ratio",
            "gauge",
            "Of the limit, in the busier direction.",
            [(one, link.share) for one, link in links],
        ),
        (
            "link_limit_bytes_per_second",
            "gauge",
            "One way: speed, or highest seen.",
            [(one, link.limit) for one, link in links],
        ),
    ]
    lines = []
    for name, kind, meaning, values in families:
        rows = [f"penstock_{name}{_labels(labels)} {float(value)!r}" for labels, value in values]
        if rows:
            lines += [f"# HELP penstock_{name} {meaning}", f"# TYPE penstock_{name} {kind}", *rows]
    return "\n".join(lines) + "\n"


def _failed(reasons: Iterable[tuple[Mapping[str, object], object]]) -> list[_Value]:
    return [(labels, float(bool(why))) for labels, why in reasons]


def _labels(labels: Mapping[str, object]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(str(value))}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
