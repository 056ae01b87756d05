"""The front for TensorFlow and Keras 3: collectives of tensors over Penstock's engine.

    import penstock.tensorflow as pt

    pt.init()                                            # under torchrun, or one process alone
    model.compile(pt.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss, jit_compile=False)
    model.fit(this_ranks_share, callbacks=[pt.BroadcastVariables(), pt.AverageMetrics()])
    pt.shutdown()

In a loop of one's own, `DistributedGradientTape` averages what a tape gives, and `broadcast_variables` begins.

A rank is a process; tensors on a GPU are copied through host memory. Calls block until their results are there, and all ranks
make the same calls in the same order. Inside `tf.function` the same calls are `tf.py_function`: TensorFlow runs them in the order
of the program, once a run. XLA cannot compile them, hence ``jit_compile=False``; nor can they be differentiated, or saved with a
model for another process. What fails in there TensorFlow raises as its own error; see `own_errors`.
"""

from __future__ import annotations

from penstock.fronts.arrays import init as _init
from penstock.fronts.arrays import is_initialized, own_errors, shutdown
from penstock.fronts.tensorflow.keras import AverageMetrics, BroadcastVariables, DistributedOptimizer
from penstock.fronts.tensorflow.tensors import (
    DistributedGradientTape,
    all_gather,
    all_reduce,
    average_gradients,
    barrier,
    broadcast,
    broadcast_variables,
    rank,
    size,
)

__all__ = [
    "AverageMetrics",
    "BroadcastVariables",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "all_gather",
    "all_reduce",
    "average_gradients",
    "barrier",
    "broadcast",
    "broadcast_variables",
    "init",
    "is_initialized",
    "own_errors",
    "rank",
    "shutdown",
    "size",
]


def init(*, timeout_s: float = 1800.0) -> None:
    """Join the job; see `penstock.fronts.arrays.init`, whose job `penstock.jax` shares."""
    _init(timeout_s=timeout_s)
