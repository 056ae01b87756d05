"""Another deployment for a job that runs, between two of its steps."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from penstock.errors import Config as ConfigError
from penstock.runtime import groups
from penstock.torch import backend

__all__ = ["switched"]


def switched(group: Any, deployment: str) -> Any:
    """The group for the next step: this one, or, where rank 0's file is another deployment than this group's, a new group with
    that. All ranks of the job call it between two steps, when no operation of the group runs.

    What was reduced stays, and the new group's servers and aggregators begin with the next all-reduce, so no gradient is lost. A
    `GradientReducer` belongs to its group: make another one when the group is another.

    Args:
        group: of all ranks, from ``dist.new_group(backend="penstock")`` or from here; not the default group, which torch cannot
            replace.
        deployment: the file's path. Only rank 0 needs it. Where it is not there, or no deployment, nothing is switched.

    Returns: the group; if it is another, the old one is destroyed and its jobs are closed.

    Raises:
        penstock.errors.Config: on all ranks, if the new deployment does not fit, or a daemon of it does not answer. The old
            group stays as it was.

    Blocks for a broadcast, and where it switches for the time that a new group takes, some tens of milliseconds and more.
    """
    if group is None or group is dist.group.WORLD:
        raise ConfigError("the default group cannot be replaced: reduce in one of dist.new_group(backend='penstock')")
    now = backend.of(group).deployment
    told: list[str | None] = [None]
    if dist.get_rank(group) == 0:
        # A file that is not whole yet is read at the next step.
        text = groups.read_deployment(deployment, f"switched(deployment={deployment!r})")
        told = [text if text != now else None]
    dist.broadcast_object_list(told, src=dist.get_global_rank(group, 0), group=group)
    if told[0] is None:
        return group
    with groups.using(told[0], deployment):
        fresh = dist.new_group(backend="penstock")
    dist.destroy_process_group(group)
    return fresh
