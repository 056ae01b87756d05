"""What lasts as long as a group: its membership, time-out, channels, and how it ends.

A group lives from the call that makes it to `Life.shutdown` or `Life.abort`. `alive` holds the backends of the groups that
live.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch._C import _distributed_c10d as c10d

from penstock.runtime import groups
from penstock.torch.batches import Batch
from penstock.torch.sparse import SparseReductions
from penstock.torch.staging import Side

__all__ = ["Life", "alive"]


class Settles(Protocol):
    """What may have operations that nobody waits for."""

    def settle(self) -> None:
        """Wait until they have ended, well or not."""


class Life:
    """The state of a group's backend. ``self._member`` is the group's membership."""

    _member: groups.Membership
    _timeout: timedelta
    made_ns: int = 0
    """Since the epoch: when making the group began. Deployment files that are older are not switched to (`switch.py`)."""

    def _setup(self, membership: groups.Membership, timeout: timedelta) -> None:
        self._member = membership
        self._timeout = timeout
        self._issued = 0
        self._monitored = 0
        self._coalesced: Batch | None = None
        self._sides: dict[torch.device, Side] = {}
        # By their ids.
        self._channels: dict[int, groups.Membership] = {}
        self._settled: weakref.WeakSet[Settles] = weakref.WeakSet()
        self._sparse: SparseReductions | None = None
        self._options = c10d.Backend.Options("penstock", timeout) if hasattr(c10d.Backend, "Options") else None
        alive.add(self)

    def shutdown(self) -> None:
        """Leave the group: torch calls this from destroy_process_group."""
        if self in alive:
            for one in list(self._settled):
                one.settle()
            alive.discard(self)
            if self._sparse is not None:
                self._sparse.close()
            self.close_channels(list(self._channels.values()), leaves_group=True)
            self._member.leave()
            while self._sides:
                self._sides.popitem()[1].close()

    @property
    def deployment(self) -> str | None:
        """The text of the deployment whose servers take this group's large all-reduces."""
        return None if self._member.deployment is None else self._member.deployment[0]

    def abort(self) -> None:
        """Fail everything that is running, on all ranks, and leave."""
        if self in alive:
            self._member.group.abort(f"rank {self._member.job_rank} called abort()")
            self.shutdown()

    def settle_before_end(self, one: Settles) -> None:
        """Other ranks need the operations of this object, so they end before the group does."""
        self._settled.add(one)

    def channel(self, name: str, *, aggregate: bool = False) -> groups.Membership:
        """Open a channel of this group, for operations that have an order of their own. Blocks until all ranks have opened it.
        All do so in the same order, under the same names. It is closed with this group at the latest. With ``aggregate`` its
        all-reduces go through servers if this group's do."""
        return self.keep_channel(self._member.channel(name, self._timeout, aggregate=aggregate))

    def open_channel(self, name: str) -> groups.Opening:
        """Begin to open a channel, without waiting for the other ranks; `keep_channel` follows."""
        return self._member.open(name, self._timeout)

    def keep_channel(self, channel: groups.Membership) -> groups.Membership:
        """The channel is closed with this group at the latest."""
        self._channels[id(channel)] = channel
        if self not in alive:  # shut down meanwhile, by another thread
            self.close_channels([channel])
        return channel

    def close_channels(self, channels: Iterable[groups.Membership], *, leaves_group: bool = False) -> None:
        """Close channels, unless they were closed already. Python's collector may call this for a reducer at any moment, also
        within another call of it."""
        for channel in channels:
            if self._channels.pop(id(channel), None) is not None:
                channel.leave(leaves_group=leaves_group)

    @property
    def timeout_s(self) -> float:
        """The time-out of operations, in seconds."""
        return self._timeout.total_seconds()

    def set_timeout(self, timeout: timedelta) -> None:
        """The time-out of operations to come."""
        self._timeout = timeout

    _set_default_timeout = set_timeout

    def check(self) -> None:
        """Raise if the group has failed, or if one of its ranks is gone. Local, does not block."""
        self._member.group.check(range(self._member.world), whole=True)


# Keeps backends alive: torch's C++ side does not, if they are written in Python (TORCH_DISTRIBUTED_DEBUG=DETAIL crashes).
alive: set[Any] = set()
