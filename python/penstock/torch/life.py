"""What lasts as long as a group: its membership, time-out, siblings, and how it ends.

A group lives from the call that makes it to `Life.shutdown` or `Life.abort`. `alive` holds the backends of the groups that
live.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from penstock.runtime import groups
from penstock.torch.batches import Batch
from penstock.torch.sparse import SparseReductions
from penstock.torch.staging import Side

__all__ = ["Life", "alive"]


class Life:
    """The state of a group's backend. ``self._member`` is the group's membership."""

    _member: groups.Membership
    _timeout: timedelta

    def _setup(self, membership: groups.Membership, timeout: timedelta) -> None:
        self._member = membership
        self._timeout = timeout
        self._issued = 0
        self._monitored = 0
        self._coalesced: Batch | None = None
        self._sides: dict[torch.device, Side] = {}
        self._siblings: list[groups.Membership] = []
        self._sparse: SparseReductions | None = None
        self._options = c10d.Backend.Options("penstock", timeout) if hasattr(c10d.Backend, "Options") else None
        alive.add(self)

    def shutdown(self) -> None:
        """Leave the group: torch calls this from destroy_process_group."""
        if self in alive:
            alive.discard(self)
            if self._sparse is not None:
                self._sparse.close()
            self.forget_siblings(list(self._siblings))
            self._member.leave()
            while self._sides:
                self._sides.popitem()[1].close()

    def abort(self) -> None:
        """Fail everything that is running, on all ranks, and leave."""
        if self in alive:
            self._member.group.abort(f"rank {self._member.rank} called abort()")
            self.shutdown()

    def sibling(
        self, name: str, *, aggregate: bool = False, check: Callable[[], None] | None = None
    ) -> groups.Membership:
        """Join another group of the same ranks, for operations that have an order of their own. Blocks until all ranks have
        called it, with the same name; it is left with this group at the latest. With ``aggregate`` its all-reduces go through
        servers if this group's do; ``check`` is as for `groups.join`."""
        sibling = self._member.sibling(name, self._timeout, aggregate=aggregate, check=check)
        self._siblings.append(sibling)
        if self not in alive:  # shut down meanwhile, by another thread
            self.forget_siblings([sibling])
        return sibling

    def forget_siblings(self, siblings: Iterable[groups.Membership]) -> None:
        """Leave sibling groups, unless they were left already."""
        for sibling in siblings:
            if sibling in self._siblings:
                self._siblings.remove(sibling)
                sibling.leave()

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
