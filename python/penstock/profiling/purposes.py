"""What communication is for, from the names of groups and from what the training thread does: the recorder and the readers of
other tools' traces ask here."""

from __future__ import annotations

import re

__all__ = ["of_group", "of_operation"]

_BY_NAME = (
    # Megatron's EMBEDDING_GROUP and POSITION_EMBEDDING_GROUP.
    (re.compile(r"embed|(?<![a-z])embd"), "embedding sync"),
    (re.compile(r"expert_data|expert_dp"), "data-parallel sync"),
    (re.compile(r"expert|(?<![a-z])(?:ep|moe)(?![a-z])"), "expert"),
    (
        re.compile(r"(?<![a-z])(?:dp|ddp|fsdp|hsdp|data|replicate|shard|zero)(?![a-z])|data_?parallel"),
        "data-parallel sync",
    ),
    (re.compile(r"tensor|(?<![a-z])(?:tp|sp)(?![a-z])"), "tensor"),
)


def of_group(description: str) -> str:
    """From torch's description of a group: a dimension of a DeviceMesh (``mesh_tp``), Megatron's names, or the user's.

    Nothing for a pipeline's group: there the direction tells.
    """
    low = description.lower()
    return next((purpose for pattern, purpose in _BY_NAME if pattern.search(low)), "")


def of_operation(operation: str, phase: str, *, is_within: bool) -> str:
    """In a group whose name says nothing.

    Args:
        phase: what the thread did last in this step, ``forward``, ``backward`` or ``optimizer``; or nothing.
        is_within: whether that pass runs still.
    """
    if operation == "all_to_all":
        return "expert"
    # Gradients are summed in the backward pass or after it.
    if phase == "backward" and operation in ("all_reduce", "reduce_scatter", "reduce"):
        return "data-parallel sync"
    # FSDP gathers parameters for both passes.
    if operation == "all_gather" and (phase == "forward" or (phase == "backward" and is_within)):
        return "data-parallel sync"
    # DDP sends its buffers to all ranks as a forward pass begins.
    if operation == "broadcast" and phase == "forward" and is_within:
        return "data-parallel sync"
    return ""
