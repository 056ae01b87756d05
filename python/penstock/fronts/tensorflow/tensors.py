"""Structures of tensors as lists of arrays, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from penstock.fronts import arrays

__all__ = [
    "DistributedGradientTape",
    "all_gather",
    "all_reduce",
    "average_gradients",
    "barrier",
    "broadcast",
    "broadcast_variables",
    "rank",
    "size",
]


def rank() -> int:
    """This process's rank in the job: a plain number, also inside `tf.function`."""
    return arrays.job().rank


def size() -> int:
    """The number of ranks in the job."""
    return arrays.job().size


def all_reduce(tensors: Any, op: str = "sum") -> Any:
    """Reduce tensors over all ranks, element by element; the same bits on every rank.

    Args:
        tensors: a tensor, or a structure of them (`tf.nest`), alike on all ranks. Variables, NumPy arrays and numbers count as
            tensors, `tf.IndexedSlices` as the dense tensor that they stand for; None stays None.
        op: "sum", "mean", "min", "max" or "product". "mean" is for floating-point and complex tensors.

    Returns: the same structure of new tensors.

    Raises:
        penstock.errors.Mismatch: the ranks' structures differ; where they differ in structure, shapes or dtypes only, the job
            lives.
        penstock.errors.Config: a tensor cannot be reduced in that way. Nothing was sent.
        penstock.errors.PeerLost: a rank went away; the job is over.

    Cost: one copy of each tensor into a bucket of up to 4 MiB (or its own size), and 2(n-1)/n of its bytes on the wire a rank.
    """
    return _collective(
        tensors, lambda job, parts, names: job.all_reduce(parts, op=op, names=names), lambda shape: shape
    )


def average_gradients(gradients: Any) -> Any:
    """The mean of ``gradients`` over all ranks: ``all_reduce(gradients, "mean")``. The same gradients must be None on all
    ranks."""
    return all_reduce(gradients, "mean")


def broadcast(tensors: Any, root: int = 0) -> Any:
    """Give all ranks the tensors of rank ``root``; any dtype but strings. Otherwise as `all_reduce`."""
    return _collective(
        tensors, lambda job, parts, names: job.broadcast(parts, root=root, names=names), lambda shape: shape
    )


def broadcast_variables(variables: Iterable[Any], root: int = 0) -> None:
    """Give all ranks' variables (of TensorFlow or Keras) the values of rank ``root``, in place; outside `tf.function`."""
    variables = list(variables)
    values = broadcast([tf.convert_to_tensor(variable) for variable in variables], root)
    if rank() != root:
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)


def all_gather(tensors: Any) -> Any:
    """Collect tensors from all ranks: each gets an axis of ranks before its own. Any dtype but strings; otherwise as
    `all_reduce`."""
    count = size()
    return _collective(
        tensors, lambda job, parts, names: job.all_gather(parts, names=names), lambda shape: [count, *shape]
    )


def barrier() -> None:
    """Block until every rank has come here."""
    if tf.executing_eagerly():
        arrays.job().barrier()
    else:
        tf.py_function(arrays.recorded(lambda: arrays.job().barrier()), [], [])


class DistributedGradientTape:
    """A `tf.GradientTape` whose ``gradient`` gives the mean over all ranks.

        with tf.GradientTape() as tape:
            loss = ...
        gradients = pt.DistributedGradientTape(tape).gradient(loss, model.trainable_variables)

    Everything else is the tape's own. ``gradient`` takes its arguments, and may be called inside `tf.function`.
    """

    def __init__(self, tape: Any) -> None:
        self._tape = tape

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)

    def __enter__(self) -> DistributedGradientTape:
        self._tape.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._tape.__exit__(*error)

    def gradient(self, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        """The tape's gradients, averaged."""
        return average_gradients(self._tape.gradient(target, sources, *args, **kwargs))


# A collective of the job's: tensors in host memory, and what says how their structure looks.
_Call = Callable[[arrays.Job, Sequence[arrays.Array], str], Sequence[arrays.Array]]


def _collective(tensors: Any, call: _Call, shape_after: Callable[[Any], Any]) -> Any:
    # None is a leaf here, and part of what is compared.
    flat = tf.nest.flatten(tensors)
    names = str(tf.nest.map_structure(lambda leaf: leaf is not None, tensors))
    moved = [index for index, leaf in enumerate(flat) if leaf is not None]
    given = [tf.convert_to_tensor(flat[index]) for index in moved]

    def on_host(*values: Any) -> list[Any]:
        parts = [value.numpy() for value in values]
        # What NumPy gives for a tensor of no axes is a number of its own.
        parts = [part if isinstance(part, np.ndarray) else np.asarray(part) for part in parts]
        return [to_tensor(part) for part in call(arrays.job(), parts, names)]

    if tf.executing_eagerly():
        results = on_host(*given)
    elif given:
        results = tf.py_function(arrays.recorded(on_host), given, [tensor.dtype for tensor in given])
        for tensor, result in zip(given, results, strict=True):
            if tensor.shape.rank is not None:
                result.set_shape(shape_after(tensor.shape.as_list()))
    else:
        results = []
    for index, result in zip(moved, results, strict=True):
        flat[index] = result
    return tf.nest.pack_sequence_as(tensors, flat)


def to_tensor(array: arrays.Array) -> Any:
    """A tensor over the array's memory, to which nothing writes again; a copy if DLPack lacks the dtype."""
    if not array.nbytes or not array.flags.writeable or array.dtype.name not in _BY_DLPACK:
        return tf.convert_to_tensor(array)
    if array.dtype.name == "bfloat16":
        return tf.bitcast(tf.experimental.dlpack.from_dlpack(array.view(np.uint16).__dlpack__()), tf.bfloat16)
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


# What NumPy exports and TensorFlow imports; bfloat16 in the guise of an integer of its width.
_BY_DLPACK = ("float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8")
