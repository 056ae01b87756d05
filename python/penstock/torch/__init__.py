"""The front for PyTorch: the ``torch.distributed`` backend called "penstock".

- ``register``: makes the backend's name known to torch. ``import penstock`` and torch's own autoload call it.
- ``stats``: the counters of this process's engine.
- ``empty``: a tensor that the ranks of this host read directly.
- ``GradientReducer``: averages a model's gradients while the backward pass makes them.
- ``ddp_hook``: the same for a DistributedDataParallel model.
- ``check_alike``: raises if the ranks hold different parameters.
- ``in_turn``: makes torch's PowerSGD hook safe on models of several buckets.

`backend` translates torch's calls, `work` is what they return. `penstock.runtime` starts the engine and joins groups; what
trains with them is in `penstock.training`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from penstock.torch.hooks import in_turn as in_turn
    from penstock.torch.switch import switched as switched
    from penstock.training.checks import check_alike as check_alike
    from penstock.training.ddp import ddp_hook as ddp_hook
    from penstock.training.gradients import GradientReducer as GradientReducer

__all__ = ["GradientReducer", "check_alike", "ddp_hook", "empty", "in_turn", "register", "stats", "switched"]

_HOME = {
    "GradientReducer": "penstock.training.gradients",
    "check_alike": "penstock.training.checks",
    "ddp_hook": "penstock.training.ddp",
    "in_turn": "penstock.torch.hooks",
    "switched": "penstock.torch.switch",
}


def __getattr__(name: str) -> Any:
    """Import a name when it is first used (PEP 562): torch calls `register`, which needs none of these imports."""
    if name not in _HOME:
        raise AttributeError(f"module 'penstock.torch' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def register() -> None:
    """Make ``init_process_group("penstock")`` work. Cheap: nothing else is imported before the first group is made."""
    import torch.distributed as dist

    from penstock.torch.devices import Devices

    if "penstock" not in dist.Backend.backend_list:
        dist.Backend.register_backend("penstock", _create, extended_api=True, devices=["cpu"])
        dist.Backend.backend_capability["penstock"] = Devices()  # type: ignore[assignment]


def stats() -> dict[str, Any]:
    """Counters of this process's engine: operations, memory, groups, and for every peer its streams.

    Returns: a dict with ``finished_operations``, ``memory_bytes`` (of the engine, beyond tensors), ``held``, ``threads``,
        ``groups`` and ``peers``; each of ``threads`` has the bytes that it has read and written, and with several how long it has
        had their lock, and waited for it; each peer has ``rank``, ``host``, ``address``, ``medium`` ("tcp", "memory" or
        "local socket") and ``streams`` with bytes, frames, rates and round trips. ``held`` counts what the process holds at
        present; a count that grows with every group or operation is a leak:

        - ``memberships``, ``groups``: groups that this process has joined and not left, as Python and as the engine counts them.
        - ``operations``: those that have not ended. ``callback_threads``: threads that complete futures.
        - ``claims``, ``early_messages``, ``early_bytes``: fingerprints and messages of peers for operations that this rank has
          not issued, and the bytes of these messages.
        - ``remembered_operations``: operations with messages that have come, or that a peer is ready for.
          ``unacknowledged_messages``, ``credit_bytes``: messages that peers have not acknowledged, and their credit.
        - ``closed_ranges``: ranges of the ids of all groups that were left, one for each set of ranks that has had groups.
          ``jobs``: groups whose secret peers connect with, at most one a peer.
        - ``mappings``, ``descriptors``: of shared memory (`penstock.empty`), that of other ranks and this one's.

    Raises:
        penstock.errors.Closed: no process group of the penstock backend exists.
    """
    from penstock.runtime import process

    return process.stats()


def empty(*size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Make a CPU tensor that the ranks of this host can read directly; see `penstock.torch.shared.empty`."""
    from penstock.torch import shared

    return shared.empty(*size, dtype=dtype)


def _create(options: Any, pg_options: Any) -> Any:
    from penstock.torch import backend

    return backend.create(options, pg_options)
