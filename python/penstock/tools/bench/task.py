"""The orders for a process of the bench, and the interface of a role that executes them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Task:
    """The task of a rank. All ranks of a backend get the same."""

    collective: str
    nbytes: int
    dtype: str
    slots: int
    """Operations of a block, back to back, each on tensors of its own: the clock is read before the first and after the last."""
    flows: int = 0
    """Raw sockets: connections of each pair that carry data."""
    split: str = ""
    """Raw sockets: how bytes fall on flows (`mesh.Mesh.exchange`)."""

    def order(self) -> dict[str, Any]:
        """The ``prepare`` order."""
        return {"do": "prepare", **asdict(self)}


class Runner(Protocol):
    """What a role does. Every method blocks until this rank's part is done."""

    def hello(self) -> dict[str, Any]:
        """The address that the other ranks need for `connect`."""

    def connect(self, peers: list[dict[str, Any]]) -> None:
        """Joins the group; ``peers`` are the hellos of all, by rank."""

    def prepare(self, task: Task) -> None:
        """Makes the tensors; ``block`` may then be called any number of times."""

    def fill(self) -> None:
        """Writes what goes in. Not timed."""

    def barrier(self) -> None:
        """Returns on no rank before all ranks have called it."""

    def operate(self) -> None:
        """Runs the task's slots once. This alone is timed."""

    def finish(self) -> None:
        """Checks what came out; raises WrongResult. Not timed."""

    def release(self) -> None:
        """Drops the tensors."""

    def leave(self) -> None:
        """Leaves the group."""

    def memory(self) -> dict[str, int]:
        """Bytes: ``grown`` since before the group was joined, beyond the bench's own tensors; and ``engine``, what the backend
        itself reports, where it does."""


class WrongResult(AssertionError):
    """A collective delivered wrong bytes. The text says which, and where they seem to come from."""
