"""Horovod's names, where Horovod has them. `penstock.fronts.horovod.torch.sync_batch_norm` defines them."""

from __future__ import annotations

from penstock.fronts.horovod.torch.sync_batch_norm import *  # noqa: F403 (its names are listed there, once)
from penstock.fronts.horovod.torch.sync_batch_norm import __all__ as __all__
