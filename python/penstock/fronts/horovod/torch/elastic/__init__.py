"""Training that goes on after a failure; see `penstock.horovod.common.elastic` for how, and docs/guide/horovod.md for what
restarts what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.fronts.horovod.common.elastic import ObjectState, State, run_fn
from penstock.fronts.horovod.torch.elastic.sampler import ElasticSampler
from penstock.fronts.horovod.torch.elastic.state import TorchState
from penstock.fronts.horovod.torch.mpi_ops import init, shutdown

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a training function, whose first argument is a `State`: it is called again after each reset, with the state of rank 0
    on all ranks. Between ``hvd.init()`` and its call there must be no other operation, which a rank that comes later would
    miss."""
    return run_fn(func, _reset)


def _reset() -> None:
    shutdown()
    init()
