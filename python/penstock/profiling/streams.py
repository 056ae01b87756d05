"""TCP streams by name: which rank has a stream, and where its other end is, as the sampler's events tell. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from penstock.profiling.record import Record

__all__ = ["StreamEnds", "ends", "names"]


class StreamEnds(NamedTuple):
    """The two ends of a stream."""

    number: str
    """As in its counters, ``stream.NUMBER.tx_bytes``."""
    pid: str
    """Of the process that has this end."""
    interface: str
    here: str
    """``ADDRESS:PORT``, as `there`."""
    there: str


def ends(record: Record) -> list[StreamEnds]:
    """What the events of a record say of its host's streams."""
    fields = (event.text.split() for event in record.events if event.kind == "stream")
    return [StreamEnds(*each) for each in fields if len(each) == 5]


def names(records: Iterable[Record]) -> dict[tuple[str, str], str]:
    """By host and number of each stream that is told of: ``stream 3 (rank 0 to rank 1)``.

    An end that no record tells of is its process or its address.
    """
    rank_of: dict[tuple[str, str], str] = {}
    told: dict[tuple[str, str], StreamEnds] = {}
    for record in records:
        host = record.header.host
        if not record.is_of_host:
            rank_of[host, str(record.header.pid)] = f"rank {record.header.rank}"
        for each in ends(record):
            told.setdefault((host, each.number), each)
    owner = {
        _way(host, each.interface, each.here, each.there): rank_of.get((host, each.pid), "")
        for (host, _), each in told.items()
    }
    found = {}
    for (host, number), each in told.items():
        here = rank_of.get((host, each.pid)) or f"process {each.pid}"
        there = owner.get(_way(host, each.interface, each.there, each.here)) or each.there
        found[host, number] = f"stream {number} ({here} to {there})"
    return found


def _way(host: str, interface: str, here: str, there: str) -> tuple[str, str, str]:
    """Addresses of the loopback mean something on their host alone."""
    return (host if interface == "lo" else "", here, there)
