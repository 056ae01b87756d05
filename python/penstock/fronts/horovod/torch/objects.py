"""Objects as tensors of bytes, on their way between ranks."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

try:
    # It also takes functions and classes of the script, as Horovod's users expect. It is not needed for anything else.
    from cloudpickle import Pickler  # type: ignore[import-untyped, unused-ignore]
except ImportError:
    from pickle import Pickler


def pickled(obj: Any) -> torch.Tensor:
    """The object's bytes, in one dimension."""
    buffer = io.BytesIO()
    Pickler(buffer).dump(obj)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def unpickled(content: torch.Tensor) -> Any:
    """The object of these bytes, which must come from a rank of this job: to unpickle is to run what they say."""
    return pickle.loads(content.numpy().tobytes())


def part(name: str | None, part: str) -> str | None:
    """What one of the operations that carry an object is called; those without a name are counted."""
    return None if name is None else f"{name}.{part}"
