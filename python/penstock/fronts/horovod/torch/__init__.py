"""Horovod's API for PyTorch: ``import penstock.horovod.torch as hvd``. See docs/guide/horovod.md."""

from __future__ import annotations

from penstock.fronts.horovod.common.exceptions import HostsUpdatedInterrupt
from penstock.fronts.horovod.torch import elastic, mpi_ops
from penstock.fronts.horovod.torch.compression import Compression
from penstock.fronts.horovod.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from penstock.fronts.horovod.torch.mpi_ops import *  # noqa: F403 (its names are listed there, once)
from penstock.fronts.horovod.torch.optimizer import DistributedOptimizer
from penstock.fronts.horovod.torch.sync_batch_norm import SyncBatchNorm

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "HostsUpdatedInterrupt",
    "SyncBatchNorm",
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "elastic",
]
__all__ += mpi_ops.__all__
