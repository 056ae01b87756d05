"""One operation of the engine: its arguments are checked, then it is started, then a `Work` waits for it.

A call to the backend checks all of its operations first, with `Operations._checked`, and starts them with `Operations._work`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from penstock.runtime import urgency
from penstock.torch.arguments import (
    CALL_CONTIGUOUS,
    DTYPES,
    check_memory,
    check_place,
    dense,
    is_reduced,
    looks,
    reduction,
    refusal,
)
from penstock.torch.batches import Start
from penstock.torch.layout import Layout, blocks, number
from penstock.torch.life import Life
from penstock.torch.lists import overlap
from penstock.torch.staging import Side, Staged, StagedTicket
from penstock.torch.work import Expires, Ticket, Work

__all__ = ["Operations", "is_set"]


class Operations(Life):
    """Checks and starts the operations of calls."""

    def _checked(
        self,
        collective: str,
        opts: Any,
        *,
        tensor: torch.Tensor | None = None,
        input: torch.Tensor | None = None,
        output: torch.Tensor | None = None,
        reduce: Any = None,
        rank: int = 0,
        tag: int = 0,
        splits: tuple[list[int], list[int]] | None = None,
        elements: int | None = None,
        lies: Layout | None = None,
    ) -> Start:
        """Check the arguments of one operation. Returns a function that starts it; nothing has happened before that is called.

        Args:
            tensor: gives the dtype and the size that ranks must agree on, and how they lie in memory if ``lies`` does not.
        """
        # The storages and not the tensors: `tensor.data = ...` would free memory that the engine uses.
        keep = []
        for one in (input, output):
            if one is not None:
                check_place(collective, one)
                keep.append(check_memory(collective, one))
        if input is not None and output is not None and input.device != output.device:
            raise refusal(
                f"{collective}: the tensors are on {input.device} and {output.device}; they must be on one device"
            )
        if (
            input is not None
            and output is not None
            and input.is_cpu  # CUDA tensors are staged, each in memory of its own
            and overlap(input, output)
            and not self._is_in_place(collective, input, output)
        ):
            input = input.detach().clone()
            keep[0] = input.untyped_storage()
        # In a batch, `tensor.data = ...` would replace the memory that was checked by another: the addresses are those of now.
        addresses = (_address(input), _address(output))
        dtype, count, lying = "byte", 0, 0
        if tensor is not None:
            count = tensor.numel()
            dtype = DTYPES.get(tensor.dtype, "")
            if not dtype:
                if reduce is not None:
                    raise refusal(
                        f"{collective}: {str(tensor.dtype).removeprefix('torch.')} cannot be reduced, only moved."
                    )
                # A dtype that is only moved, as bytes.
                dtype, count = "byte", tensor.nbytes
            if lies is not None:
                lying = number(lies)
            elif not tensor.is_contiguous():
                lying = number(dense(collective, tensor))
            if tensor.is_cuda:
                self._check_cuda()
        op, factor = reduction(reduce, collective, tensor) if reduce is not None else (None, 1.0)
        if op is not None and tensor is not None and not is_reduced(op, dtype):
            raise refusal(f"{collective}: {op} is not defined on {str(tensor.dtype).removeprefix('torch.')}")
        timeout_s = -1.0 if opts is None else opts.timeout.total_seconds()
        if timeout_s < 0:  # none given, see `is_set`
            timeout_s = self._timeout.total_seconds()
        size = (dtype, count if elements is None else elements, 0 if tensor is None else tensor.nbytes, lying)
        return functools.partial(
            self._start,
            collective,
            size,
            input,
            output,
            addresses,
            keep,
            op,
            factor,
            rank,
            tag,
            splits,
            timeout_s,
            urgency.current(),
        )

    def _is_in_place(self, collective: str, input: torch.Tensor, output: torch.Tensor) -> bool:
        """Whether one tensor is this rank's own part of the other one, which no rank's operation reads after it is written."""
        rank = self._member.rank
        if collective == "all_gather":
            return input.data_ptr() == output.data_ptr() + rank * input.nbytes
        return collective == "reduce_scatter" and output.data_ptr() == input.data_ptr() + rank * output.nbytes

    def _start(
        self,
        collective: str,
        size: tuple[str, int, int, int],
        input: torch.Tensor | None,
        output: torch.Tensor | None,
        addresses: tuple[int, int],
        keep: list[torch.UntypedStorage],
        op: str | None,
        factor: float,
        rank: int,
        tag: int,
        splits: tuple[list[int], list[int]] | None,
        timeout_s: float,
        urgent: urgency.Urgency | None,
    ) -> Ticket:
        """Start one operation on the memory at the addresses, which ``keep`` owns; ``size`` is its dtype, elements, bytes, and
        the number of its layout."""
        self._issued += 1
        dtype, elements, nbytes, lying = size
        staged = None
        on = input if input is not None else output
        if on is not None and on.is_cuda:
            # For an operation in place, a rank that only sends gets nothing copied back, and one that only receives copies
            # nothing out.
            own = rank == self._member.rank
            gives = {"broadcast": own, "reduce": not own}.get(collective, False)
            takes = collective == "broadcast" and not own
            source = output if collective in _IN_PLACE else input
            reads = [] if source is None or takes else [source]
            writes = [] if output is None or gives else [output]
            staged = Staged(self._side(on.device), reads, writes)
            twins = [None if one is None else staged.twin(one) for one in (input, output)]
            addresses = (_address(twins[0]), _address(twins[1]))
            keep = [one.untyped_storage() for one in twins if one is not None]
        number = urgency.USUAL if urgent is None else urgent.number
        ticket = self._member.group.start(
            collective,
            dtype=dtype,
            elements=elements,
            bytes=nbytes,
            layout=lying,
            input=addresses[0],
            output=addresses[1],
            op=op,
            factor=factor,
            rank=rank,
            tag=tag,
            input_splits=None if splits is None else splits[0],
            output_splits=None if splits is None else splits[1],
            priority=urgency.engine_priority(number),
            coflow=0 if urgent is None else urgent.coflow,
            hold=staged is not None,
            timeout_s=timeout_s,
            keep=keep,
        )
        if urgent is not None:
            urgent.add(self._member.group, ticket, number)
        return ticket if staged is None else StagedTicket(staged, ticket)

    def _side(self, device: torch.device) -> Side:
        with _sides_lock:
            if device not in self._sides:
                self._sides[device] = Side(self._member.group, device)
            return self._sides[device]

    def _work(
        self,
        starts: Sequence[Start],
        outputs: list[torch.Tensor],
        finish: Callable[[], object] | None = None,
        source: int = -1,
        group: Expires | None = None,
    ) -> Work:
        """The Work of one call whose operations are all checked: starts them, or leaves that to `end_coalescing`."""
        group = group or self._member.group
        if self._coalesced is None:
            return Work(group, [start() for start in starts], outputs, finish, source)
        work = Work(group, [], outputs, finish, source)
        self._coalesced.add(work, starts)
        return work

    def _check_cuda(self) -> None:
        """Raise if CUDA tensors were meant for another backend."""

    def _check_list(
        self, collective: str, parts: Sequence[torch.Tensor], part: torch.Tensor, own: int | None = None
    ) -> None:
        """Check a list of one tensor a rank: all must be like ``part``, or only the ``own``-th if sizes may differ."""
        if len(parts) != self._member.world:
            raise refusal(f"{collective}: a list of {self._member.world} tensors is needed, not {len(parts)}")
        check_place(collective, part)
        for rank, other in enumerate(parts):
            check_place(collective, other)
            if (other.numel() != part.numel() and own in (None, rank)) or other.dtype != part.dtype:
                raise refusal(
                    f"{collective}: the list's tensor must have {part.numel()} elements of {part.dtype}; it has "
                    f"{other.numel()} of {other.dtype}"
                )
            if other.device != part.device:
                raise refusal(
                    f"{collective}: the tensors are on {part.device} and {other.device}; they must be on one device"
                )

    def _check_whole(self, collective: str, *, whole: torch.Tensor, part: torch.Tensor) -> Layout:
        """Check that ``whole`` holds a part of each rank, one after the other in memory; returns the layout of a part."""
        world = self._member.world
        if whole.numel() != part.numel() * world or whole.dtype != part.dtype:
            raise refusal(
                f"{collective}: {whole.numel()} elements of {whole.dtype} are not {world} times {part.numel()} of "
                f"{part.dtype}"
            )
        for tensor in (whole, part):
            check_place(collective, tensor)
        if whole.is_contiguous() and part.is_contiguous():
            return ()
        lies = dense(collective, part)
        if blocks(world, part.numel(), lies) != dense(collective, whole):
            raise refusal(
                f"{collective}: a tensor that is cut or joined must be {world} times the other one in memory, one after the "
                f"other; the whole has {looks(whole)}, the part {looks(part)}. {CALL_CONTIGUOUS}"
            )
        return lies

    def _split_bytes(self, what: str, tensor: torch.Tensor, sizes: list[int]) -> list[int]:
        world = self._member.world
        rows = tensor.shape[0] if tensor.dim() else 1
        if not sizes:
            if rows % world:
                raise refusal(f"all_to_all: the {what} has {rows} rows, which {world} ranks cannot share equally")
            sizes = [rows // world] * world
        if len(sizes) != world or sum(sizes) != rows:
            raise refusal(f"all_to_all: {what} splits {sizes} do not cut {rows} rows into {world} parts")
        row = tensor.nbytes // rows if rows else 0
        return [size * row for size in sizes]


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def is_set(timeout: timedelta) -> bool:
    """torch passes a negative time-out for "none given"."""
    return timeout.total_seconds() >= 0


_sides_lock = threading.Lock()
# Operations whose output tensor also holds the contribution.
_IN_PLACE = frozenset(("all_reduce", "broadcast", "reduce"))
