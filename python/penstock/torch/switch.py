"""Another deployment for a job that runs, between two of its steps."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch.distributed as dist

from penstock.errors import Config as ConfigError
from penstock.runtime import groups
from penstock.torch import backend

__all__ = ["switched"]

log = logging.getLogger("penstock")


def switched(group: Any, deployment: str) -> Any:
    """The group for the next step: this one, or, where rank 0's file has become another deployment than this group's, a new group
    with that. All ranks of the job call it between two steps, when no operation of the group runs.

    What was reduced stays, and the new group's servers and aggregators begin with the next all-reduce, so no gradient is lost. A
    `GradientReducer` belongs to its group: make another one when the group is another.

    Args:
        group: of all ranks, from ``dist.new_group(backend="penstock")`` or from here; not the default group, which torch cannot
            replace.
        deployment: the file's path. Only rank 0 needs it. Where it is not there, or no deployment, nothing is switched; nor where
            it was last changed before the group was made: what an earlier run left is not taken. Start with it
            (PENSTOCK_DEPLOYMENT) to go on with it.

    Returns: the group; if it is another, the old one is destroyed and its jobs are closed.

    Raises:
        penstock.errors.Config: on all ranks, if the new deployment does not fit, or a daemon of it does not answer. The old
            group stays as it was.

    Blocks for a broadcast, and where it switches for the time that a new group takes, some tens of milliseconds and more.
    """
    if group is None or group is dist.group.WORLD:
        raise ConfigError("the default group cannot be replaced: reduce in one of dist.new_group(backend='penstock')")
    own = backend.of(group)
    told: list[str | None] = [None]
    changed_ns = 0
    if dist.get_rank(group) == 0:
        # Looked at before the file is read: what comes in between is read at the next step, as is a file that is not whole yet.
        changed_ns = _changed_ns(deployment)
        is_new = changed_ns > own.made_ns
        if is_new or (changed_ns and (deployment, changed_ns) not in _left):
            text = groups.read_deployment(deployment, f"switched(deployment={deployment!r})")
            other = text if text != own.deployment else None
            if is_new:
                told = [other]
            else:
                _left.add((deployment, changed_ns))
                if other is not None:
                    log.warning(_IS_OLD, deployment, (own.made_ns - changed_ns) / 1e9)
    dist.broadcast_object_list(told, src=dist.get_global_rank(group, 0), group=group)
    if told[0] is None:
        return group
    with groups.using(told[0], deployment):
        fresh = dist.new_group(backend="penstock")
    if changed_ns:
        # A change while the group was made counts.
        backend.of(fresh).made_ns = changed_ns
    dist.destroy_process_group(group)
    return fresh


_left: set[tuple[str, int]] = set()
"""Files that were not taken, and when they were changed: each is told once."""
_IS_OLD = (
    "%s is another deployment than the group's, and was last changed %.1f s before the group was made: it is taken for what an "
    "earlier run left, and not switched to. If the clocks of this host and of the file's differ, set them; `touch` the file to "
    "have it taken."
)


def _changed_ns(path: str) -> int:
    """When a file was last written or renamed, by its file system; 0: it is not there."""
    try:
        return os.stat(path).st_ctime_ns
    except OSError:
        return 0
