"""What communication is for, from the names of groups and from what the training thread does."""

from __future__ import annotations

import re

__all__ = ["of_group", "of_operation"]

_BY_NAME = (
    # Megatron's EMBEDDING_GROUP and POSITION_EMBEDDING_GROUP.
    (re.compile(r"embed|(?:^|[\W_])embd"), "embedding sync"),
    (re.compile(r"expert_data|expert_dp"), "data-parallel sync"),
    (re.compile(r"expert|(?:^|[\W_])(?:ep|moe)(?:$|[\W_\d])"), "expert"),
    (
        re.compile(r"(?:^|[\W_])(?:dp|ddp|fsdp|data|replicate|shard|zero)(?:$|[\W_\d])|data_?parallel"),
        "data-parallel sync",
    ),
    (re.compile(r"tensor|(?:^|[\W_])tp(?:$|[\W_\d])"), "tensor"),
)


def of_group(description: str) -> str:
    """From torch's description of a group: a dimension of a DeviceMesh (``mesh_tp``), Megatron's names, or the user's."""
    low = description.lower()
    return next((purpose for pattern, purpose in _BY_NAME if pattern.search(low)), "")


def of_operation(operation: str, phase: str, *, is_within: bool) -> str:
    """In a group whose name says nothing.

    Args:
        phase: what the thread did last in this step, ``forward``, ``backward`` or ``optimizer``; or nothing.
        is_within: whether the backward pass runs still.
    """
    if operation == "all_to_all":
        return "expert"
    # Gradients are summed in the backward pass or after it.
    if phase == "backward" and operation in ("all_reduce", "reduce_scatter", "reduce"):
        return "data-parallel sync"
    # FSDP gathers parameters for both passes.
    if operation == "all_gather" and (phase == "forward" or (phase == "backward" and is_within)):
        return "data-parallel sync"
    return ""
