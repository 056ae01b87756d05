"""Horovod's exceptions. Every failure of an operation is a `HorovodInternalError`, as scripts and `elastic.run` expect."""

from __future__ import annotations

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt"]


class HorovodInternalError(RuntimeError):
    """An operation failed on this rank: a mismatch between ranks, a lost rank, or a shutdown. The cause is chained where
    there is one. ``elastic.run`` takes it as a reason to restore the last commit and start again."""


class HostsUpdatedInterrupt(RuntimeError):
    """The set of hosts has changed: ``elastic.run`` starts again without restoring the last commit.

    Args:
        skip_sync: whether states need no synchronisation, because hosts were only removed.
    """

    def __init__(self, skip_sync: bool) -> None:
        self.skip_sync = skip_sync
