"""What a contact tells: the line of text by which a process lets others connect to it (`_core.Engine.contact`)."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Contact", "parse"]


class Contact(NamedTuple):
    """A process. Rank, host and address are those that ``stats()["peers"]`` has of it."""

    node: str
    """Another one for each engine."""
    rank: int
    """In the job."""
    host: str
    address: str
    """The first that it listens at."""


def parse(text: str) -> Contact:
    """Raises ValueError or IndexError: it is none, or of another version."""
    fields = text.split(" ")
    return Contact(fields[1], int(fields[2]), fields[3], fields[5].split(",")[0])
