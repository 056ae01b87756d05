"""Which arguments of an operation are refused, before anything is sent: the dtypes and reductions that there are, and where
tensors may lie.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from penstock import _core
from penstock.errors import Config as ConfigError
from penstock.torch.layout import Layout, layout

__all__ = [
    "CALL_CONTIGUOUS",
    "DTYPES",
    "check_memory",
    "check_place",
    "check_writable",
    "dense",
    "is_reduced",
    "is_wrapper",
    "looks",
    "no_memory",
    "reduction",
    "refusal",
]


def refusal(text: str) -> ConfigError:
    """The error for an operation whose arguments are refused; the group is not affected."""
    error = ConfigError(f"{text.rstrip('.')}. Nothing was sent. The group is still usable.")
    error.group_lives = True
    return error


def check_place(collective: str, tensor: torch.Tensor) -> None:
    """Check that the tensor's device and memory can be used."""
    if tensor.layout is not torch.strided:
        raise refusal(f"{collective}: a {tensor.layout} tensor; make it dense first")
    if not tensor.is_cpu:
        if not tensor.is_cuda:
            raise refusal(f"{collective}: tensors on {tensor.device.type} are not supported; move them to the CPU")
        if torch.cuda.is_current_stream_capturing():
            raise refusal(
                f"{collective}: the current stream is capturing a CUDA graph, and what goes over the network cannot be "
                "replayed. Call it outside of the capture"
            )


def check_memory(collective: str, tensor: torch.Tensor) -> torch.UntypedStorage:
    """Check that the tensor's memory exists and holds its values directly. Returns the storage that owns it."""
    if is_wrapper(tensor):
        raise refusal(f"{collective}: the tensor {no_memory(tensor)}")
    storage = tensor.untyped_storage()
    if tensor.storage_offset() * tensor.itemsize + tensor.nbytes > storage.nbytes():
        raise refusal(
            f"{collective}: the tensor has {looks(tensor)}, and its storage of {storage.nbytes()} bytes "
            "does not hold it; was it resized?"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise refusal(
            f"{collective}: the tensor is a lazy conjugate or negative; call .resolve_conj().resolve_neg() first"
        )
    return storage


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor consists of other tensors, and has no memory of its own."""
    if type(tensor) in _PLAIN:
        return False
    # The second: of a class that does not say what its tensors consist of (__tensor_flatten__).
    return is_traceable_wrapper_subclass(tensor) or (tensor.nbytes > 0 and tensor.data_ptr() == 0)


def no_memory(tensor: torch.Tensor) -> str:
    """What errors say of a tensor that consists of others."""
    name = type(tensor).__name__
    return (
        f"is a {name}, which has no memory of its own; pass the tensors that it consists of (to_local() of a DTensor)"
    )


def check_writable(collective: str, outputs: Sequence[torch.Tensor]) -> None:
    """Check that results can be copied to the tensors: no two elements of a tensor share their memory."""
    for output in outputs:
        if not output.is_contiguous() and torch._debug_has_internal_overlap(output) == 1:
            raise refusal(f"{collective}: the output has {looks(output)}, so its elements share memory; clone it first")


def dense(collective: str, tensor: torch.Tensor) -> Layout:
    """The layout of a tensor, which must be dense in memory."""
    found = layout(tensor)
    if found is None:
        raise refusal(
            f"{collective}: tensors must be dense in memory, and this one, with {looks(tensor)}, has holes or overlaps "
            f"itself. {CALL_CONTIGUOUS}"
        )
    return found


def looks(tensor: torch.Tensor) -> str:
    """How errors describe where a tensor's elements lie."""
    return f"shape {tuple(tensor.shape)} and strides {tensor.stride()}"


def reduction(reduce: Any, collective: str, tensor: torch.Tensor | None) -> tuple[str, float]:
    """The engine's name of torch's reduction, and the factor of a PREMUL_SUM (1 for the others)."""
    kind = getattr(reduce, "op", reduce)
    name = _REDUCTIONS.get(getattr(kind, "value", None))
    if name is None:
        raise refusal(f"{collective}: unknown reduction {kind}")
    factor = 1.0
    if name == "premul_sum":
        given = getattr(reduce, "factor", None)
        if given is None:
            # torch keeps the factor in the pickled state only (up to 2.14).
            given = reduce.__getstate__()[1]
        factor = float(given)
    return name, factor


_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
DTYPES = {
    getattr(torch, name): name
    for name in (
        *("float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "bool"),
        *("uint16", "uint32", "uint64", "complex32", "complex64", "complex128"),
    )
}
is_reduced = functools.lru_cache(_core.is_reduced)
# By the numbers of torch's enum: a call takes 24 us, of which printing a member would take 0.9 and hashing it 0.3.
_REDUCTIONS: dict[Any, str] = {
    c10d.ReduceOp.RedOpType.__members__[name.upper()].value: name
    for name in ("sum", "avg", "premul_sum", "product", "min", "max", "band", "bor", "bxor")
}
CALL_CONTIGUOUS = "Call .contiguous() first (and copy back what is written in place)."
