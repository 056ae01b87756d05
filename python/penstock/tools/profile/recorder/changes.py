"""Changes that `penstock profile --apply` makes to a script without touching it."""

from __future__ import annotations

import functools
import json
import os
from typing import Any

import torch

__all__ = ["VARIABLE", "make"]

VARIABLE = "PENSTOCK_PROFILE_CHANGE"
"""A JSON object: ``backend``, ``bucket_cap_mb``, ``comm_hook``. Settings of Penstock are variables of their own."""


def make() -> None:
    """Make the changes that the variable names. Called once torch is imported."""
    text = os.environ.get(VARIABLE)
    if not text or not torch.distributed.is_available():
        return
    change = json.loads(text)
    if "backend" in change:
        _change_backend(change["backend"])
    if "bucket_cap_mb" in change or "comm_hook" in change:
        _change_ddp(change)


def _change_backend(backend: str) -> None:
    """The script's gloo is another backend: for the default group and new ones."""
    import torch.distributed.distributed_c10d as c10d

    for name in ("init_process_group", "new_group"):
        original = getattr(c10d, name)

        @functools.wraps(original)
        def changed(*args: Any, original: Any = original, name: str = name, **kwargs: Any) -> Any:
            if name == "init_process_group" and args and args[0] == "gloo":
                args = (backend, *args[1:])
            elif kwargs.get("backend") == "gloo":
                kwargs["backend"] = backend
            return original(*args, **kwargs)

        setattr(c10d, name, changed)
        setattr(torch.distributed, name, changed)


def _change_ddp(change: dict[str, Any]) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.nn.parallel import DistributedDataParallel

    original = DistributedDataParallel.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if "bucket_cap_mb" in change:
            kwargs["bucket_cap_mb"] = change["bucket_cap_mb"]
        original(self, *args, **kwargs)
        if change.get("comm_hook") == "float16":
            self.register_comm_hook(None, default_hooks.fp16_compress_hook)

    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]
