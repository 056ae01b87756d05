"""Pytrees as lists of arrays, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback

from penstock.errors import Config as ConfigError
from penstock.fronts import arrays

__all__ = ["all_gather", "all_reduce", "average_gradients", "barrier", "broadcast_parameters", "rank", "size"]


def rank() -> int:
    """This process's rank in the job: a plain number, also inside `jax.jit`."""
    return arrays.job().rank


def size() -> int:
    """The number of ranks in the job."""
    return arrays.job().size


def all_reduce(tree: Any, op: str = "sum") -> Any:
    """Reduce every leaf of ``tree`` over all ranks, element by element; the same bits on every rank.

    Args:
        tree: a pytree whose leaves are JAX arrays, NumPy arrays or Python numbers; shapes, dtypes and structure alike on all
            ranks. Leaves of dtype ``float0`` (gradients of integers) come back as they are.
        op: "sum", "mean", "min", "max" or "product". "mean" is for floating-point and complex leaves.

    Returns: the same structure. A JAX array comes back as one, with its sharding; a NumPy array as a NumPy array; a Python
        number as a JAX array. On CPU devices nothing is copied on the way back.

    Raises:
        penstock.errors.Mismatch: the ranks' trees differ; where they differ in structure, shapes or dtypes only, the job lives.
        penstock.errors.Config: a leaf cannot be reduced in that way, or lies on devices of other processes. Nothing was sent.
        penstock.errors.PeerLost: a rank went away; the job is over.

    Cost: one copy of each leaf into a bucket of up to 4 MiB (or its own size), and 2(n-1)/n of its bytes on the wire a rank.
    """
    return _collective(
        tree, "all_reduce", lambda job, leaves, names: job.all_reduce(leaves, op=op, names=names), lambda shape: shape
    )


def average_gradients(grads: Any) -> Any:
    """The mean of ``grads`` over all ranks: ``all_reduce(grads, "mean")``."""
    return all_reduce(grads, "mean")


def broadcast_parameters(tree: Any, root: int = 0) -> Any:
    """Give all ranks the leaves of rank ``root``: parameters and optimizer state, at the start or after a checkpoint.

    Args:
        tree: as for `all_reduce`, of any dtypes; keys of `jax.random` as well.
        root: whose leaves they get.

    Returns: the same structure; on the root the leaves that it gave.

    Raises: as `all_reduce`.
    """
    return _collective(
        tree, "broadcast", lambda job, leaves, names: job.broadcast(leaves, root=root, names=names), lambda shape: shape
    )


def all_gather(tree: Any) -> Any:
    """Collect every leaf from all ranks.

    Args:
        tree: as for `all_reduce`, of any dtypes; shapes alike on all ranks.

    Returns: the same structure; every leaf has an axis of ranks before its own, as of `jax.lax.all_gather`, and lies on JAX's
        default device.

    Raises: as `all_reduce`.
    """
    count = size()
    return _collective(
        tree,
        "all_gather",
        lambda job, leaves, names: job.all_gather(leaves, names=names),
        lambda shape: (count, *shape),
    )


def barrier() -> None:
    """Block until every rank has come here. Inside `jax.jit`: the compiled function goes on when all have."""
    # Under a trace, and only there, a new array is a tracer.
    if not isinstance(jax.numpy.zeros(()), jax.core.Tracer):
        arrays.job().barrier()
    else:
        io_callback(arrays.recorded(lambda: arrays.job().barrier()), None, ordered=True)


# A collective of the job's: the leaves in host memory, and what says how their tree looks.
_Call = Callable[[arrays.Job, Sequence[arrays.Array], str], Sequence[arrays.Array]]


def _collective(tree: Any, what: str, call: _Call, shape_after: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Any:
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    # Paths, not the text of the structure: that may hold addresses, of functions for instance.
    names = "".join(jax.tree_util.keystr(path) for path, _ in paths)
    leaves = [leaf for _, leaf in paths]
    moved = [index for index, leaf in enumerate(leaves) if getattr(leaf, "dtype", None) != jax.dtypes.float0]
    given = [leaves[index] for index in moved]
    if any(isinstance(leaf, jax.core.Tracer) for leaf in given):
        results = _traced(given, what, call, names, shape_after)
    else:
        host = [_to_host(leaf, what) for leaf in given]
        reduced = call(arrays.job(), host, names)
        gathers = what == "all_gather"
        results = [
            leaf if after is before and not gathers else _like(leaf, after, gathers)
            for leaf, before, after in zip(given, host, reduced, strict=True)
        ]
    for index, result in zip(moved, results, strict=True):
        leaves[index] = result
    return jax.tree_util.tree_unflatten(treedef, leaves)


def _traced(
    leaves: Sequence[Any],
    what: str,
    call: _Call,
    names: str,
    shape_after: Callable[[tuple[int, ...]], tuple[int, ...]],
) -> list[Any]:
    keys = [_is_key(leaf) for leaf in leaves]
    if any(keys) and what == "all_reduce":
        raise _no_reduction_of_keys()
    plain = [
        jax.random.key_data(leaf) if key else jax.numpy.asarray(leaf) for leaf, key in zip(leaves, keys, strict=True)
    ]
    shapes = [jax.ShapeDtypeStruct(shape_after(leaf.shape), leaf.dtype) for leaf in plain]

    def on_host(*values: Any) -> list[arrays.Array]:
        return list(call(arrays.job(), [np.asarray(value) for value in values], names))

    results = io_callback(arrays.recorded(on_host), shapes, *plain, ordered=True)
    return [
        jax.random.wrap_key_data(result, impl=jax.random.key_impl(leaf)) if key else result
        for leaf, key, result in zip(leaves, keys, results, strict=True)
    ]


def _to_host(leaf: Any, what: str) -> arrays.Array:
    """The leaf's memory on CPU devices, a copy of it from others."""
    if _is_key(leaf):
        if what == "all_reduce":
            raise _no_reduction_of_keys()
        leaf = jax.random.key_data(leaf)
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        raise ConfigError(
            f"{what}: an array of shape {leaf.shape} lies on devices of several processes; Penstock takes what is this "
            "process's own"
        )
    if not isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        # A Python number has the dtype that JAX gives it.
        leaf = jax.numpy.asarray(leaf)
    return np.asarray(leaf)


def _like(leaf: Any, array: arrays.Array, elsewhere: bool) -> Any:
    """``array`` as what ``leaf`` was; ``elsewhere`` if the leaf's sharding says nothing about it."""
    if isinstance(leaf, (np.ndarray, np.generic)):
        return array
    sharding = leaf.sharding if isinstance(leaf, jax.Array) and not elsewhere and not _is_key(leaf) else None
    # Memory with this alignment becomes the array's own if the device can read it; nothing writes to it again.
    result = jax.device_put(array, sharding, may_alias=True)
    return jax.random.wrap_key_data(result, impl=jax.random.key_impl(leaf)) if _is_key(leaf) else result


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _no_reduction_of_keys() -> ConfigError:
    return ConfigError(
        "all_reduce: keys of jax.random cannot be reduced, only broadcast and gathered. Nothing was sent."
    )
