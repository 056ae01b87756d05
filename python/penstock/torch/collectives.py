"""torch's collectives and messages, as operations of the engine."""

from __future__ import annotations

import contextlib
import functools
from datetime import timedelta
from typing import Any

import torch

from penstock.errors import PenstockError
from penstock.runtime import process
from penstock.runtime.store import Keys, StoreError
from penstock.torch import spans
from penstock.torch.arguments import (
    CALL_CONTIGUOUS,
    DTYPES,
    check_place,
    check_writable,
    is_reduced,
    looks,
    reduction,
    refusal,
)
from penstock.torch.batches import Start, batched
from penstock.torch.layout import Layout, rows
from penstock.torch.lists import alike, apart, flat_like, joined, spread
from penstock.torch.operations import Operations, is_set
from penstock.torch.sparse import SparseReductions
from penstock.torch.work import Ticket, Work

__all__ = ["Collectives"]


class Collectives(Operations):
    """torch's calls, for either base class.

    Every call returns a `Work` at once. Tensors lie on the CPU or a CUDA device (staged through pinned memory, see `staging`);
    they must not be used until the Work has completed. Calls on a group must come in the same order on all its ranks.

    Tensors of one call may share memory: the results are those of tensors that do not, where outputs do not overlap each other.

    Memory layout (`layout`): tensors that are sent without a copy must be dense, and have the same layout on all ranks; if they
    are cut or joined along the first dimension, their parts must follow each other in memory. Lists are copied through one
    tensor, in the order of their elements, so their tensors may have any layout. A call checks all of its tensors before it
    starts the first operation.

    Dtypes: those of `arguments.DTYPES` are reduced, as far as the reduction is defined on them. All dtypes are moved.
    Time-outs: ``opts.timeout``; the group's if that is negative, and for `send`, `recv` and `recv_anysource`.

    Raises:
        penstock.errors.Config: by the call itself: an argument is refused. Nothing was sent, and the group is still usable. In a
            batch, `end_coalescing` or an earlier wait raises it instead.
    """

    # ------------------------------------------------------------------ reductions

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Work:
        """Reduce each tensor over all ranks, in place. Sparse COO tensors go to `allreduce_sparse`."""
        for tensor in tensors:
            if tensor.layout is torch.sparse_coo:
                return self.allreduce_sparse(tensors, opts)
        return self.allreduce_coalesced(tensors, opts)

    @spans.span("all_reduce", spans.first)
    @batched
    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any) -> Work:
        """Reduce each dense tensor over all ranks, in place; an operation for each."""

        def reduced(tensor: torch.Tensor) -> Start:
            return self._checked("all_reduce", opts, tensor=tensor, output=tensor, reduce=opts.reduceOp)

        starts = [reduced(tensor) for tensor in tensors]
        for _ in tensors:
            process.requests.count_all_reduce()
        separate = apart(tensors)
        copied = [(tensor, own) for tensor, own in zip(tensors, separate, strict=True) if own is not tensor]
        if not copied:
            return self._work(starts, tensors)

        def finish() -> None:
            for tensor, own in copied:
                tensor.detach().copy_(own)

        return self._work([reduced(tensor) for tensor in separate], tensors, finish)

    @spans.span("sparse_all_reduce", spans.first)
    @batched
    def allreduce_sparse(self, tensors: list[torch.Tensor], opts: Any) -> Work:
        """Sum or average sparse COO tensors over all ranks, in place: they become the coalesced result; see `sparse`. CUDA
        tensors are copied through the host, and for those the call waits for the device."""
        for tensor in tensors:
            if tensor.layout is not torch.sparse_coo:
                raise refusal(f"all_reduce: sparse COO tensors cannot share a call with a {tensor.layout} tensor")
            if tensor.dtype not in DTYPES:
                raise refusal(f"all_reduce: {tensor.dtype} cannot be reduced")
        op, _ = reduction(opts.reduceOp, "all_reduce", None)
        if op not in ("sum", "avg"):
            raise refusal(f"all_reduce of sparse tensors knows SUM and AVG, not {op.upper()}; make them dense first")
        for tensor in tensors:
            if not tensor.is_complex() and not is_reduced(op, DTYPES[tensor.dtype]):
                raise refusal(f"all_reduce: {op} is not defined on {str(tensor.dtype).removeprefix('torch.')}")
        if self._sparse is None:
            self._sparse = SparseReductions(self.open_channel("sparse"), self.keep_channel, self._fail)
        reductions, tickets = self._sparse, []
        timeout = opts.timeout if is_set(opts.timeout) else self._timeout

        def reduced(tensor: torch.Tensor) -> Ticket:
            self._issued += 1
            given = tensor.detach().coalesce().cpu()
            tickets.append(reductions.start(given, average=op == "avg", timeout_s=timeout.total_seconds()))
            return tickets[-1]

        def finish() -> None:
            # Not through a detached tensor: a sparse tensor gets new indices, which a detached one does not share.
            with torch.no_grad():
                for ticket, tensor in zip(tickets, tensors, strict=True):
                    tensor.copy_(ticket.sum)

        starts = [functools.partial(reduced, tensor) for tensor in tensors]
        return self._work(starts, list(tensors), finish, group=reductions)

    def _fail(self, error: BaseException) -> None:
        self._member.group.abort(f"rank {self._member.job_rank}: {error}".rstrip("."), type(error).__name__)

    @spans.span("reduce", spans.first)
    @batched
    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> Work:
        """Reduce each tensor to rank ``opts.rootRank``, in place there. Tensors of other ranks keep their values."""
        return self._work(
            [
                self._checked("reduce", opts, tensor=tensor, output=tensor, reduce=opts.reduceOp, rank=opts.rootRank)
                for tensor in tensors
            ],
            tensors,
        )

    @spans.span("reduce_scatter", spans.second)
    @batched
    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Work:
        """Reduce ``input`` over all ranks; rank r gets the r-th of ``world`` equal parts, cut along the first dimension."""
        return self._work([self._reduce_scatter(output, input, opts)], [output])

    @spans.span("reduce_scatter", spans.second)
    @batched
    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any
    ) -> Work:
        """`reduce_scatter_single` for each pair of an output and an input."""
        return self._work([self._reduce_scatter(o, i, opts) for o, i in zip(outputs, inputs, strict=True)], outputs)

    @spans.span("reduce_scatter", spans.lists)
    @batched
    def reduce_scatter(self, outputs: list[torch.Tensor], input_lists: list[list[torch.Tensor]], opts: Any) -> Work:
        """For each list of one tensor a rank: rank r gets the reduction of all ranks' r-th tensors. The tensors of a list may
        differ in size."""
        starts, copies = [], []
        for output, inputs in zip(outputs, input_lists, strict=True):
            self._check_list("reduce_scatter", inputs, output, own=self._member.rank)
            check_writable("reduce_scatter", [output])
            # An output that is not contiguous gets a copy of the result.
            flat = output if output.is_contiguous() else flat_like(output)
            if alike(inputs):
                starts.append(self._reduce_scatter(flat, joined(inputs), opts))
            else:
                # Unequal parts: each is reduced to its rank.
                for root, part in enumerate(inputs):
                    is_own = root == self._member.rank
                    sent = (
                        part.detach().clone(memory_format=torch.contiguous_format)
                        if is_own
                        else part.detach().contiguous()
                    )
                    starts.append(
                        self._checked("reduce", opts, tensor=sent, output=sent, reduce=opts.reduceOp, rank=root)
                    )
                    flat = sent.view(-1) if is_own else flat
            if flat is not output:
                copies.append((flat, [output]))
        return self._work(starts, outputs, lambda: spread(copies))

    def _reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Start:
        return self._checked(
            "reduce_scatter",
            opts,
            tensor=input,
            input=input,
            output=output,
            reduce=opts.reduceOp,
            lies=self._check_whole("reduce_scatter", whole=input, part=output),
        )

    # ------------------------------------------------------------------ moving data

    @spans.span("broadcast", spans.first)
    @batched
    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Work:
        """Give all ranks the tensors of rank ``opts.rootRank``, in place."""
        return self._work(
            [self._checked("broadcast", opts, tensor=one, output=one, rank=opts.rootRank) for one in tensors], tensors
        )

    @spans.span("all_gather", spans.second)
    @batched
    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Work:
        """Join the inputs of all ranks along the first dimension, in rank order."""
        return self._work([self._all_gather(output, input, opts)], [output])

    @spans.span("all_gather", spans.second)
    @batched
    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        """`all_gather_single` for each pair of an output and an input."""
        return self._work([self._all_gather(o, i, opts) for o, i in zip(outputs, inputs, strict=True)], outputs)

    @spans.span("all_gather", spans.second)
    @batched
    def allgather(self, output_lists: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> Work:
        """For each input: collect those of all ranks in a list of one output a rank. Inputs may differ in size between ranks."""
        return self._all_gather_lists(output_lists, inputs, opts)

    def _all_gather_lists(self, output_lists: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> Work:
        starts, copies = [], []
        for outputs, input in zip(output_lists, inputs, strict=True):
            self._check_list("all_gather", outputs, input, own=self._member.rank)
            check_writable("all_gather", outputs)
            if alike(outputs):
                flat = input.new_empty(self._member.world * input.numel())
                starts.append(self._all_gather(flat, input.detach().contiguous(), opts))
                copies.append((flat, outputs))
                continue
            # Unequal parts: each rank broadcasts its own.
            own = input.detach().contiguous()
            if any(part.untyped_storage().data_ptr() == own.untyped_storage().data_ptr() for part in outputs):
                own = own.clone()
            for root, part in enumerate(outputs):
                is_own = root == self._member.rank
                flat = own if is_own else part if part.is_contiguous() else flat_like(part)
                starts.append(self._checked("broadcast", opts, tensor=flat, output=flat, rank=root))
                if flat is not part:
                    copies.append((flat.view(-1), [part]))
        flattened = [tensor for outputs in output_lists for tensor in outputs]
        return self._work(starts, flattened, lambda: spread(copies))

    @spans.span("all_gather", spans.second)
    @batched
    def allgather_coalesced(
        self, output_lists: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any
    ) -> Work:
        """As `allgather`, but ``output_lists`` has a list for each rank, with an output for each input."""
        # The lists are by rank, then by input.
        return self._all_gather_lists([list(outputs) for outputs in zip(*output_lists, strict=True)], inputs, opts)

    def _all_gather(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Start:
        lies = self._check_whole("all_gather", whole=output, part=input)
        return self._checked("all_gather", opts, tensor=output, input=input, output=output, lies=lies)

    @spans.span("gather", spans.second)
    @batched
    def gather(self, output_lists: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> Work:
        """Collect the inputs of all ranks on rank ``opts.rootRank``, in a list of one output a rank. All have the same size."""
        (input,) = inputs
        root = opts.rootRank == self._member.rank
        outputs = output_lists[0] if root and output_lists else []
        flat = None
        check_place("gather", input)
        if root:
            self._check_list("gather", outputs, input)
            check_writable("gather", outputs)
            flat = input.new_empty(self._member.world * input.numel())
        sent = input.detach().contiguous()
        start = self._checked("gather", opts, tensor=sent, input=sent, output=flat, rank=opts.rootRank)
        return self._work([start], outputs, None if flat is None else lambda: spread([(flat, outputs)]))

    @spans.span("scatter", spans.lists)
    @batched
    def scatter(self, outputs: list[torch.Tensor], input_lists: list[list[torch.Tensor]], opts: Any) -> Work:
        """Give rank r the r-th tensor of the list of rank ``opts.rootRank``. All have the same size."""
        (output,) = outputs
        sent = None
        check_place("scatter", output)
        check_writable("scatter", outputs)
        if opts.rootRank == self._member.rank:
            self._check_list("scatter", input_lists[0] if input_lists else [], output)
            sent = joined(input_lists[0])
        flat = output if output.is_contiguous() else flat_like(output)
        start = self._checked("scatter", opts, tensor=flat, input=sent, output=flat, rank=opts.rootRank)
        return self._work([start], outputs, None if flat is output else lambda: spread([(flat, outputs)]))

    @spans.span("all_to_all", spans.second)
    @batched
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any,
    ) -> Work:
        """Send parts of ``input``, cut along the first dimension, to the ranks in order, and join the parts from all ranks in
        ``output``. The split sizes are rows a rank; empty lists mean equal parts."""
        # A tensor without rows takes the layout of the other one's rows. Contiguous tensors have the same layout, whatever the
        # length of their rows.
        lies = [
            rows(input if input.numel() else output),
            rows(output if output.numel() or not input.numel() else input),
        ]
        if input.is_contiguous() and output.is_contiguous():
            lies = [(), ()]
        for what, tensor, row in zip(("input", "output"), (input, output), lies, strict=True):
            check_place("all_to_all", tensor)
            if row is None:
                raise refusal(
                    f"all_to_all: the {what} is cut into rows, which must be dense and follow each other in memory; it has "
                    f"{looks(tensor)}. {CALL_CONTIGUOUS}"
                )
        if lies[0] != lies[1]:
            raise refusal(
                f"all_to_all: the rows of the input ({looks(input)}) and those of the output ({looks(output)}) lie in "
                f"memory in different orders. {CALL_CONTIGUOUS}"
            )
        start = self._all_to_all(
            output,
            input,
            self._split_bytes("output", output, output_split_sizes),
            self._split_bytes("input", input, input_split_sizes),
            opts,
            lies[0],
        )
        return self._work([start], [output])

    @spans.span("all_to_all", spans.second)
    @batched
    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any) -> Work:
        """Send the r-th input to rank r, and receive the r-th output from it. Sizes may differ, also between ranks."""
        for tensor in (*outputs, *inputs):
            check_place("all_to_all", tensor)
            if tensor.dtype != inputs[0].dtype:
                raise refusal(f"all_to_all: the tensors are of {inputs[0].dtype} and {tensor.dtype}")
        check_writable("all_to_all", outputs)
        flat_input, flat_output = joined(inputs), joined(outputs)
        start = self._all_to_all(
            flat_output,
            flat_input,
            [tensor.nbytes for tensor in outputs],
            [tensor.nbytes for tensor in inputs],
            opts,
            (),
        )
        return self._work([start], outputs, lambda: spread([(flat_output, outputs)]))

    def _all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_bytes: list[int],
        input_bytes: list[int],
        opts: Any,
        lies: Layout | None,
    ) -> Start:
        # The parts may differ between ranks: each pair compares its own part, from the messages' lengths.
        return self._checked(
            "all_to_all",
            opts,
            tensor=input,
            input=input,
            output=output,
            splits=(input_bytes, output_bytes),
            elements=0,
            lies=lies,
        )

    @spans.span("barrier", spans.nothing)
    @batched
    def barrier(self, opts: Any) -> Work:
        """A Work that completes when all ranks have called this."""
        return self._work([self._checked("barrier", opts)], [])

    def monitored_barrier(self, opts: Any, wait_all: bool = False) -> None:
        """A barrier whose time-out names the ranks that did not come. All of them are named; with ``wait_all`` the error also
        begins with all of them, in torch's words, and with the first one without.

        Raises:
            penstock.errors.Timeout: some ranks did not come in time (zero is no time at all). The group is unusable.
        """
        self._monitored += 1
        rank, world = self._member.rank, self._member.world
        timeout = opts.timeout if is_set(opts.timeout) else self._timeout
        store = self._monitored_keys(self._monitored)
        # Without the store this is a barrier whose time-out names no ranks.
        with contextlib.suppress(StoreError):
            store.set(str(rank), "here")
        try:
            self.barrier(opts).wait()
        except PenstockError as error:
            # The store knows all ranks that came; the barrier's messages come only from neighbours.
            with contextlib.suppress(StoreError):
                missing = [other for other in range(world) if not store.check([str(other)])]
                if missing:
                    raise type(error)(_missed(rank, missing, timeout, wait_all, error)) from None
            raise
        # Not yet the keys of this barrier: where it fails on another rank, that rank still looks for them. All ranks have passed
        # the one before.
        with contextlib.suppress(StoreError):
            self._monitored_keys(self._monitored - 1).delete_key(str(rank))

    def _monitored_keys(self, number: int) -> Keys:
        return Keys(f"monitored_barrier/{number}", self._member.keys)

    monitoredBarrier = monitored_barrier

    # ------------------------------------------------------------------ point to point

    @spans.span("send", spans.first)
    @batched
    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> Work:
        """Send one tensor to rank ``dst`` of the group. The Work completes when the tensor may be changed again."""
        (tensor,) = tensors
        return self._work([self._checked("send", None, tensor=tensor, input=tensor, rank=dst, tag=tag)], tensors)

    @spans.span("recv", spans.first)
    @batched
    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> Work:
        """Receive the next message of rank ``src`` under this tag into one tensor."""
        (tensor,) = tensors
        start = self._checked("recv", None, tensor=tensor, output=tensor, rank=src, tag=tag)
        return self._work([start], tensors, source=src)

    @spans.span("recvAnySource", spans.first)
    @batched
    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> Work:
        """Receive the next message of any rank under this tag. Receives of a tag take messages in the order in which they were
        posted: one that names a rank leaves an earlier message of that rank to a receive from any source before it."""
        (tensor,) = tensors
        return self._work([self._checked("recv_anysource", None, tensor=tensor, output=tensor, tag=tag)], tensors)

    recvAnysource = recv_anysource

    # The names of these methods up to torch 2.12.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _missed(rank: int, missing: list[int], timeout: timedelta, wait_all: bool, error: PenstockError) -> str:
    """The error text on a rank that came, with the phrases that users of gloo know."""
    named = missing if wait_all else missing[:1]
    ms = round(timeout.total_seconds() * 1000)
    failed = (
        f"Rank{'s' if len(named) > 1 else ''} {', '.join(map(str, named))} failed to pass monitoredBarrier in {ms} ms"
    )
    if rank == 0:
        failed = f"Rank 0 timed out in monitoredBarrier after {ms} ms: {failed}"
    else:
        failed = (
            f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0: "
            f"{failed}"
        )
    return f"{failed}. Missing are rank(s) {', '.join(map(str, missing))} of the group. {error}"
