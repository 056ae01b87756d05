"""Which types of devices the backend serves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

__all__ = ["Devices"]


class Devices(Sequence[str]):
    """The device types that a group serves: "cpu", and "cuda" where the machine has a CUDA device.

    torch reads them whenever a group is made, and only then are they looked up: asking for CUDA devices takes long and
    initialises the driver, after which forked children cannot use it; `import torch` must do neither. *Why not always
    both, as gloo?* From a backend other than gloo torch concludes that what it serves exists: `ShardedTensor.gather` and
    checkpoints would ask for the current CUDA device, and fail where there is none.
    """

    def __iter__(self) -> Iterator[str]:
        import torch

        yield "cpu"
        if torch.cuda.is_available():
            yield "cuda"

    # `list(self)` would ask for the length first.
    def __len__(self) -> int:
        return len(list(iter(self)))

    def __getitem__(self, index: Any) -> Any:
        return list(iter(self))[index]
