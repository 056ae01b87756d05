"""The front for JAX: collectives of pytrees over Penstock's engine.

    import penstock.jax as pj

    pj.init()                                            # under torchrun, or one process alone
    params = pj.broadcast_parameters(params)
    for batch in batches:                                # this rank's share of the data
        loss, grads = grad_fn(params, batch)
        params = update(params, pj.average_gradients(grads))
    pj.shutdown()

A rank is a process with JAX's CPU devices, or with accelerators of its own whose arrays are copied through host memory.
`jax.distributed` and this are independent of each other. Calls block until their results are there, and all ranks make the
same calls in the same order.

Inside `jax.jit` the same functions work as ordered callbacks (`jax.experimental.io_callback`): they run once each time the
compiled function runs, in the order of the program. They cannot be differentiated (take gradients first, then average
them), nor mapped with `jax.vmap`. What fails in there JAX raises as its own error; see `own_errors`.
"""

from __future__ import annotations

from penstock.fronts.arrays import init as _init
from penstock.fronts.arrays import is_initialized, own_errors, shutdown
from penstock.fronts.jax.trees import (
    all_gather,
    all_reduce,
    average_gradients,
    barrier,
    broadcast_parameters,
    rank,
    size,
)

__all__ = [
    "all_gather",
    "all_reduce",
    "average_gradients",
    "barrier",
    "broadcast_parameters",
    "init",
    "is_initialized",
    "own_errors",
    "rank",
    "shutdown",
    "size",
]


def init(*, timeout_s: float = 1800.0) -> None:
    """Join the job; see `penstock.fronts.arrays.init`, whose job `penstock.tensorflow` shares."""
    _init(timeout_s=timeout_s)
