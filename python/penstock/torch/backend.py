"""The torch.distributed backend: translates torch's calls into the engine's.

torch has two base classes for backends in Python, depending on its version: ``ProcessGroup`` alone up to 2.13, where
our object *is* the group, and ``Backend`` from 2.14 on, where torch's group dispatches to us by device. Both get the
same calls from `_Collectives`; `create` tests which base can be constructed.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.autograd import profiler

from penstock import _core
from penstock.errors import Closed, PenstockError
from penstock.errors import Config as ConfigError
from penstock.runtime import groups, process
from penstock.runtime.store import Keys, StoreError
from penstock.torch.devices import Devices
from penstock.torch.layout import Layout, blocks, layout, number, rows
from penstock.torch.sparse import SparseReductions
from penstock.torch.staging import Side, Staged, StagedTicket
from penstock.torch.work import Expires, Ticket, Work, answer_for_wrappers

__all__ = ["create", "of"]

_Call: TypeAlias = Callable[..., Work]


def create(options: Any, pg_options: Any) -> Any:
    """Make a backend for one group; torch calls this from init_process_group and new_group.

    Blocks until all ranks of the group are connected, or the group's time-out.
    """
    if pg_options is not None:
        raise ConfigError(
            "the penstock backend takes no pg_options; its settings are environment variables (penstock info)"
        )
    # torch leaves the list empty for the default group, whose ranks are the job's.
    global_ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    rank = options.group_rank
    name = getattr(options, "group_id", "") or "default"
    # A deployment is for all ranks of the job.
    everybody = not dist.is_initialized() or len(global_ranks) == dist.get_world_size()
    check, known = _check_known(global_ranks)
    membership = groups.join(
        options.store, rank, global_ranks, options.timeout, name, aggregate=everybody, check=check, known=known
    )
    return _CLASS(membership, options.timeout)


def _check_known(ranks: Sequence[int]) -> tuple[Callable[[], None] | None, Mapping[int, str]]:
    """A function that raises once one of these ranks is lost, as far as this process's groups know; None if no group has such a
    rank. (A group that has failed over another rank is no reason: these ranks may build a group without it.) Also the contacts
    of ranks that may not come with another one.

    A rank that has left the default group, if that is Penstock's, has left the job. A rank that has only left other groups may
    come back: if the default group is another backend's, only a death counts.
    """
    if not dist.is_initialized():
        return None, {}
    try:
        default = of(None)
    except (ConfigError, RuntimeError):
        return _check_deaths(ranks), {}
    if default not in _alive:  # aborted: its group knows nothing any more
        return None, {}
    return functools.partial(default._member.group.check, ranks, whole=False), default._member.contacts


def _check_deaths(ranks: Sequence[int]) -> Callable[[], None] | None:
    """A function that raises once one of these ranks has died. It checks every group that has such a rank: a rank that has left
    one group may have died in another."""
    asked = []
    for backend in list(_alive):
        member = backend._member
        shared = set(ranks).intersection(member.job_ranks).difference([member.engine.job_rank])
        if shared:
            asked.append((member.group, [member.job_ranks.index(rank) for rank in shared]))

    def check() -> None:
        for group, members in asked:
            with contextlib.suppress(Closed):  # the group was destroyed meanwhile, and knows nothing any more
                group.check(members, whole=False, farewells=False)

    return check if asked else None


def of(group: Any = None) -> Any:
    """The backend object of a process group (the default one if None).

    Raises:
        penstock.errors.Config: there is no such group, or another backend serves its CPU tensors.
    """
    if not dist.is_initialized():
        raise ConfigError('there is no process group; call init_process_group("penstock") first')
    group = dist.group.WORLD if group is None else group
    found = group._get_backend(torch.device("cpu"))
    if not isinstance(found, _Collectives):
        raise ConfigError(
            f"the group's backend for CPU tensors is {found.name()}, not penstock; make one with "
            'init_process_group("penstock") or new_group(backend="penstock")'
        )
    return found


Start: TypeAlias = "Callable[[], Ticket]"
"""A function that starts an operation whose arguments were checked."""


def _batched(call: Callable[..., Work]) -> Callable[..., Work]:
    """Lets a call be part of a batch: its refusal is raised at the batch's end. (After an error in the middle, torch would
    collect calls forever, and run none of them.)"""

    @functools.wraps(call)
    def batched(self: _Collectives, *args: Any, **kwargs: Any) -> Work:
        if self._coalesced is not None and self._coalesced.has_raised:
            # A wait inside the batch has raised the refusal, so torch has not reached the batch's end.
            self._coalesced = None
        if self._coalesced is None:
            return call(self, *args, **kwargs)
        try:
            return call(self, *args, **kwargs)
        except ConfigError as error:
            return self._coalesced.refuse(error)

    return batched


def _span(name: str, shown: Callable[..., Iterable[torch.Tensor]]) -> Callable[[_Call], _Call]:
    """Show a call to torch's profiler as ``penstock:name``, from the call to the end of its operations, with the shapes of the
    tensors that ``shown`` takes from its arguments, as gloo does. Coalesced calls are one span. Without a profiler this costs a
    look at a flag."""

    def decorate(call: _Call) -> _Call:
        @functools.wraps(call)
        def with_span(self: Any, *args: Any, **kwargs: Any) -> Work:
            if not profiler._is_profiler_enabled or (self._coalesced is not None and name != "coalesced"):
                return call(self, *args, **kwargs)
            span = torch.autograd._record_function_with_args_enter(f"penstock:{name}", *shown(*args, **kwargs))
            try:
                work = call(self, *args, **kwargs)
            except BaseException:
                torch.autograd._record_function_with_args_exit(span)
                raise
            work.end_span(span)
            return work

        return with_span

    return decorate


def _first(tensors: Iterable[torch.Tensor], *_: Any, **__: Any) -> Iterable[torch.Tensor]:
    return tensors


def _second(_output: Any, given: Any, *_: Any, **__: Any) -> Iterable[torch.Tensor]:
    return [given] if isinstance(given, torch.Tensor) else given


def _lists(_outputs: Any, input_lists: Sequence[list[torch.Tensor]], *_: Any, **__: Any) -> Iterable[torch.Tensor]:
    return input_lists[0] if input_lists else []


def _nothing(*_: Any, **__: Any) -> Iterable[torch.Tensor]:
    return []


class _Collectives:
    """torch's calls, for either base class. ``self._member`` is the group's membership.

    Every call returns a `Work` at once. Tensors lie on the CPU or a CUDA device (staged through pinned memory, see `staging`);
    they must not be used until the Work has completed. Calls on a group must come in the same order on all its ranks.

    Memory layout (`layout`): tensors that are sent without a copy must be dense, and have the same layout on all ranks; if they
    are cut or joined along the first dimension, their parts must follow each other in memory. Lists are copied through one
    tensor, in the order of their elements, so their tensors may have any layout. A call checks all of its tensors before it
    starts the first operation.
    """

    _member: groups.Membership
    _timeout: timedelta

    # torch reads these properties; if one is missing, its getter recurses endlessly (2.15).
    supports_coalescing = True
    supports_splitting = True
    supports_shrinking = False
    supports_reconfigure = False
    supports_window = False
    supports_time_estimate = False
    _supports_time_estimate = False

    @property
    def options(self) -> Any:
        """torch copies these for the groups that it splits off."""
        return self._options

    def _setup(self, membership: groups.Membership, timeout: timedelta) -> None:
        self._member = membership
        self._timeout = timeout
        self._issued = 0
        self._monitored = 0
        self._coalesced: _Batch | None = None
        self._sides: dict[torch.device, Side] = {}
        self._siblings: list[groups.Membership] = []
        self._sparse: SparseReductions | None = None
        self._options = c10d.Backend.Options("penstock", timeout) if hasattr(c10d.Backend, "Options") else None
        _alive.add(self)

    # ------------------------------------------------------------------ reductions

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Work:
        """Reduce each tensor over all ranks, in place. Sparse COO tensors go to `allreduce_sparse`."""
        if any(tensor.layout is torch.sparse_coo for tensor in tensors):
            return self.allreduce_sparse(tensors, opts)
        return self.allreduce_coalesced(tensors, opts)

    @_span("all_reduce", _first)
    @_batched
    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any) -> Work:
        """Reduce each dense tensor over all ranks, in place; an operation for each."""

        def reduced(tensor: torch.Tensor) -> Start:
            process.requests.count_all_reduce()
            return self._checked("all_reduce", opts, tensor=tensor, output=tensor, reduce=opts.reduceOp)

        return self._work([reduced(tensor) for tensor in tensors], tensors)

    @_span("sparse_all_reduce", _first)
    @_batched
    def allreduce_sparse(self, tensors: list[torch.Tensor], opts: Any) -> Work:
        """Sum or average sparse COO tensors over all ranks, in place: they become the coalesced result; see `sparse`. CUDA
        tensors are copied through the host, and for those the call waits for the device."""
        for tensor in tensors:
            if tensor.layout is not torch.sparse_coo:
                raise _refusal(f"all_reduce: sparse COO tensors cannot share a call with a {tensor.layout} tensor")
            if tensor.dtype not in _DTYPES:
                raise _refusal(f"all_reduce: {tensor.dtype} cannot be reduced")
        op, _ = _reduction(opts.reduceOp, "all_reduce", None)
        if op not in ("sum", "avg"):
            raise _refusal(f"all_reduce of sparse tensors knows SUM and AVG, not {op.upper()}; make them dense first")
        if self._sparse is None:
            self._sparse = SparseReductions(lambda check: self.sibling("sparse", check=check), self._fail)
        reductions, tickets = self._sparse, []
        timeout = opts.timeout if _is_set(opts.timeout) else self._timeout

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
        self._member.group.abort(f"rank {self._member.rank}: {error}")

    @_span("reduce", _first)
    @_batched
    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> Work:
        """Reduce each tensor to rank ``opts.rootRank``, in place there. Tensors of other ranks keep their values."""
        return self._work(
            [
                self._checked("reduce", opts, tensor=tensor, output=tensor, reduce=opts.reduceOp, rank=opts.rootRank)
                for tensor in tensors
            ],
            tensors,
        )

    @_span("reduce_scatter", _second)
    @_batched
    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Work:
        """Reduce ``input`` over all ranks; rank r gets the r-th of ``world`` equal parts, cut along the first dimension."""
        return self._work([self._reduce_scatter(output, input, opts)], [output])

    @_span("reduce_scatter", _second)
    @_batched
    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any
    ) -> Work:
        """`reduce_scatter_single` for each pair of an output and an input."""
        return self._work([self._reduce_scatter(o, i, opts) for o, i in zip(outputs, inputs, strict=True)], outputs)

    @_span("reduce_scatter", _lists)
    @_batched
    def reduce_scatter(self, outputs: list[torch.Tensor], input_lists: list[list[torch.Tensor]], opts: Any) -> Work:
        """For each list of one tensor a rank: rank r gets the reduction of all ranks' r-th tensors. The tensors of a list may
        differ in size."""
        starts, copies = [], []
        for output, inputs in zip(outputs, input_lists, strict=True):
            self._check_list("reduce_scatter", inputs, output, own=self._member.rank)
            _check_writable("reduce_scatter", [output])
            # An output that is not contiguous gets a copy of the result.
            flat = output if output.is_contiguous() else _flat(output)
            if _alike(inputs):
                starts.append(self._reduce_scatter(flat, _joined(inputs), opts))
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
        return self._work(starts, outputs, lambda: _spread(copies))

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

    @_span("broadcast", _first)
    @_batched
    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Work:
        """Give all ranks the tensors of rank ``opts.rootRank``, in place."""
        return self._work(
            [self._checked("broadcast", opts, tensor=one, output=one, rank=opts.rootRank) for one in tensors], tensors
        )

    @_span("all_gather", _second)
    @_batched
    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Work:
        """Join the inputs of all ranks along the first dimension, in rank order."""
        return self._work([self._all_gather(output, input, opts)], [output])

    @_span("all_gather", _second)
    @_batched
    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        """`all_gather_single` for each pair of an output and an input."""
        return self._work([self._all_gather(o, i, opts) for o, i in zip(outputs, inputs, strict=True)], outputs)

    @_span("all_gather", _second)
    @_batched
    def allgather(self, output_lists: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> Work:
        """For each input: collect those of all ranks in a list of one output a rank. Inputs may differ in size between ranks."""
        return self._all_gather_lists(output_lists, inputs, opts)

    def _all_gather_lists(self, output_lists: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> Work:
        starts, copies = [], []
        for outputs, input in zip(output_lists, inputs, strict=True):
            self._check_list("all_gather", outputs, input, own=self._member.rank)
            _check_writable("all_gather", outputs)
            if _alike(outputs):
                flat = input.new_empty(self._member.world * input.numel())
                starts.append(self._all_gather(flat, input.detach().contiguous(), opts))
                copies.append((flat, outputs))
                continue
            # Unequal parts: each rank broadcasts its own.
            for root, part in enumerate(outputs):
                is_own = root == self._member.rank
                flat = input.detach().contiguous() if is_own else part if part.is_contiguous() else _flat(part)
                starts.append(self._checked("broadcast", opts, tensor=flat, output=flat, rank=root))
                if flat is not part:
                    copies.append((flat.view(-1), [part]))
        flattened = [tensor for outputs in output_lists for tensor in outputs]
        return self._work(starts, flattened, lambda: _spread(copies))

    @_span("all_gather", _second)
    @_batched
    def allgather_coalesced(
        self, output_lists: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any
    ) -> Work:
        """As `allgather`, but ``output_lists`` has a list for each rank, with an output for each input."""
        # The lists are by rank, then by input.
        return self._all_gather_lists([list(outputs) for outputs in zip(*output_lists, strict=True)], inputs, opts)

    def _all_gather(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Start:
        lies = self._check_whole("all_gather", whole=output, part=input)
        return self._checked("all_gather", opts, tensor=output, input=input, output=output, lies=lies)

    @_span("gather", _second)
    @_batched
    def gather(self, output_lists: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> Work:
        """Collect the inputs of all ranks on rank ``opts.rootRank``, in a list of one output a rank. All have the same size."""
        (input,) = inputs
        root = opts.rootRank == self._member.rank
        outputs = output_lists[0] if root and output_lists else []
        flat = None
        _check_place("gather", input)
        if root:
            self._check_list("gather", outputs, input)
            _check_writable("gather", outputs)
            flat = input.new_empty(self._member.world * input.numel())
        sent = input.detach().contiguous()
        start = self._checked("gather", opts, tensor=sent, input=sent, output=flat, rank=opts.rootRank)
        return self._work([start], outputs, None if flat is None else lambda: _spread([(flat, outputs)]))

    @_span("scatter", _lists)
    @_batched
    def scatter(self, outputs: list[torch.Tensor], input_lists: list[list[torch.Tensor]], opts: Any) -> Work:
        """Give rank r the r-th tensor of the list of rank ``opts.rootRank``. All have the same size."""
        (output,) = outputs
        sent = None
        _check_place("scatter", output)
        _check_writable("scatter", outputs)
        if opts.rootRank == self._member.rank:
            self._check_list("scatter", input_lists[0] if input_lists else [], output)
            sent = _joined(input_lists[0])
        flat = output if output.is_contiguous() else _flat(output)
        start = self._checked("scatter", opts, tensor=flat, input=sent, output=flat, rank=opts.rootRank)
        return self._work([start], outputs, None if flat is output else lambda: _spread([(flat, outputs)]))

    @_span("all_to_all", _second)
    @_batched
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
            _check_place("all_to_all", tensor)
            if row is None:
                raise _refusal(
                    f"all_to_all: the {what} is cut into rows, which must be dense and follow each other in memory; it has "
                    f"{_looks(tensor)}. {_CALL_CONTIGUOUS}"
                )
        if lies[0] != lies[1]:
            raise _refusal(
                f"all_to_all: the rows of the input ({_looks(input)}) and those of the output ({_looks(output)}) lie in "
                f"memory in different orders. {_CALL_CONTIGUOUS}"
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

    @_span("all_to_all", _second)
    @_batched
    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any) -> Work:
        """Send the r-th input to rank r, and receive the r-th output from it. Sizes may differ, also between ranks."""
        for tensor in (*outputs, *inputs):
            _check_place("all_to_all", tensor)
            if tensor.dtype != inputs[0].dtype:
                raise _refusal(f"all_to_all: the tensors are of {inputs[0].dtype} and {tensor.dtype}")
        _check_writable("all_to_all", outputs)
        flat_input, flat_output = _joined(inputs), _joined(outputs)
        start = self._all_to_all(
            flat_output,
            flat_input,
            [tensor.nbytes for tensor in outputs],
            [tensor.nbytes for tensor in inputs],
            opts,
            (),
        )
        return self._work([start], outputs, lambda: _spread([(flat_output, outputs)]))

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

    @_span("barrier", _nothing)
    @_batched
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
        timeout = opts.timeout if _is_set(opts.timeout) else self._timeout
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

    @_span("send", _first)
    @_batched
    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> Work:
        """Send one tensor to rank ``dst`` of the group. The Work completes when the tensor may be changed again."""
        (tensor,) = tensors
        return self._work([self._checked("send", None, tensor=tensor, input=tensor, rank=dst, tag=tag)], tensors)

    @_span("recv", _first)
    @_batched
    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> Work:
        """Receive the next message of rank ``src`` under this tag into one tensor."""
        (tensor,) = tensors
        start = self._checked("recv", None, tensor=tensor, output=tensor, rank=src, tag=tag)
        return self._work([start], tensors, source=src)

    @_span("recvAnySource", _first)
    @_batched
    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> Work:
        """Receive the next message of any rank under this tag. Receives of a tag take messages in the order in which they were
        posted: one that names a rank leaves an earlier message of that rank to a receive from any source before it."""
        (tensor,) = tensors
        return self._work([self._checked("recv_anysource", None, tensor=tensor, output=tensor, tag=tag)], tensors)

    recvAnysource = recv_anysource

    # ------------------------------------------------------------------ life

    def shutdown(self) -> None:
        """Leave the group: torch calls this from destroy_process_group."""
        if self in _alive:
            _alive.discard(self)
            if self._sparse is not None:
                self._sparse.close()
            self.forget_siblings(list(self._siblings))
            self._member.leave()
            while self._sides:
                self._sides.popitem()[1].close()

    def abort(self) -> None:
        """Fail everything that is running, on all ranks, and leave."""
        if self in _alive:
            self._member.group.abort(f"rank {self._member.rank} called abort()")
            self.shutdown()

    def sibling(
        self, name: str, *, aggregate: bool = False, check: Callable[[], None] | None = None
    ) -> groups.Membership:
        """Join another group of the same ranks, for operations that have an order of their own. Blocks until all ranks have
        called it, with the same name; it is left with this group at the latest. With ``aggregate`` its all-reduces go through
        servers if this group's do; ``check`` is as for `groups.join`."""
        sibling = self._member.sibling(name, self._timeout, aggregate=aggregate, check=check)
        self._siblings.append(sibling)
        if self not in _alive:  # shut down meanwhile, by another thread
            self.forget_siblings([sibling])
        return sibling

    def forget_siblings(self, siblings: Iterable[groups.Membership]) -> None:
        """Leave sibling groups, unless they were left already."""
        for sibling in siblings:
            if sibling in self._siblings:
                self._siblings.remove(sibling)
                sibling.leave()

    @property
    def timeout_s(self) -> float:
        """The time-out of operations, in seconds."""
        return self._timeout.total_seconds()

    def set_timeout(self, timeout: timedelta) -> None:
        """The time-out of operations to come."""
        self._timeout = timeout

    _set_default_timeout = set_timeout

    def check(self) -> None:
        """Raise if the group has failed, or if one of its ranks is gone. Local, does not block."""
        self._member.group.check(range(self._member.world), whole=True)

    def get_error(self) -> Any:
        """Always success: torch's watchdogs ask this; failures are raised by the Work that they concern."""
        return c10d.ErrorType.SUCCESS

    def getBackendName(self) -> str:
        """The name under which `register` made the backend known."""
        return "penstock"

    def name(self) -> str:
        """As `getBackendName`, for torch versions that ask by this name."""
        return "penstock"

    def _get_sequence_number_for_group(self) -> int:
        return self._issued

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _wait_for_pending_works(self) -> None:
        pass

    def eager_connect_single_device(self, device: Any = None) -> None:
        """Does nothing: a group is connected when it is made."""

    # ------------------------------------------------------------------ coalescing

    # torch up to 2.13 passes the device.
    def start_coalescing(self, _device: Any = None) -> None:
        """Collect calls up to `end_coalescing`, which starts them together if none was refused."""
        self._coalesced = _Batch(self._member.group)

    @_span("coalesced", _nothing)
    def end_coalescing(self, _device: Any = None) -> Work:
        """Start the calls since `start_coalescing`.

        Raises:
            penstock.errors.Config: one of them was refused; none has started.
        """
        batch, self._coalesced = self._coalesced or _Batch(self._member.group), None
        batch.start()
        tickets = [ticket for work in batch.works for ticket in work.tickets]
        # A future makes its readers' streams wait for the devices of its value.
        outputs = [output for work in batch.works for output in work.outputs]
        return Work(self._member.group, tickets, outputs, parts=batch.works)

    _start_coalescing = start_coalescing
    _end_coalescing = end_coalescing

    def split(self, store: Any, ranks: list[int], opts: Any) -> Any:
        """A group of some of this one's ranks, over the same streams; None on ranks that are not in it."""
        if self._member.rank not in ranks:
            return None
        timeout = getattr(opts, "timeout", None) or self._timeout
        name = getattr(opts, "group_name", "") or f"{self._member.name}:split"
        rank = ranks.index(self._member.rank)
        job_ranks = [self._member.job_ranks[one] for one in ranks]
        check = functools.partial(self._member.group.check, ranks, whole=False)
        known = self._member.contacts
        member = groups.join(store, rank, job_ranks, timeout, name, check=check, known=known)
        return _CLASS(member, timeout)

    # ------------------------------------------------------------------ helpers

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
        for one in (input, output):
            if one is not None:
                _check_place(collective, one)
                _check_memory(collective, one)
        if input is not None and output is not None and input.device != output.device:
            raise _refusal(
                f"{collective}: the tensors are on {input.device} and {output.device}; they must be on one device"
            )
        dtype, count, lying = "byte", 0, 0
        if tensor is not None:
            count = tensor.numel()
            dtype = _DTYPES.get(tensor.dtype, "")
            if not dtype:
                if reduce is not None:
                    raise _refusal(
                        f"{collective}: {str(tensor.dtype).removeprefix('torch.')} cannot be reduced, only moved."
                    )
                # A dtype that is only moved, as bytes.
                dtype, count = "byte", tensor.nbytes
            if lies is not None:
                lying = number(lies)
            elif not tensor.is_contiguous():
                lying = number(_dense(collective, tensor))
            if tensor.is_cuda:
                self._check_cuda()
        op, factor = _reduction(reduce, collective, tensor) if reduce is not None else (None, 1.0)
        if op is not None and tensor is not None and not _is_reduced(op, dtype):
            raise _refusal(f"{collective}: {op} is not defined on {str(tensor.dtype).removeprefix('torch.')}")
        timeout = opts.timeout if opts is not None and _is_set(opts.timeout) else self._timeout
        size = (dtype, count if elements is None else elements, 0 if tensor is None else tensor.nbytes, lying)
        return lambda: self._start(
            collective, size, input, output, op, factor, rank, tag, splits, timeout.total_seconds()
        )

    def _start(
        self,
        collective: str,
        size: tuple[str, int, int, int],
        input: torch.Tensor | None,
        output: torch.Tensor | None,
        op: str | None,
        factor: float,
        rank: int,
        tag: int,
        splits: tuple[list[int], list[int]] | None,
        timeout_s: float,
    ) -> Ticket:
        """Start one operation; ``size`` is its dtype, elements, bytes, and the number of its layout."""
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
            input, output = (None if one is None else staged.twin(one) for one in (input, output))
        # Keeps the storages and not the tensors: `tensor.data = ...` would free memory that the engine uses.
        keep = [one.untyped_storage() for one in (input, output) if one is not None]
        ticket = self._member.group.start(
            collective,
            dtype=dtype,
            elements=elements,
            bytes=nbytes,
            layout=lying,
            input=0 if input is None else input.data_ptr(),
            output=0 if output is None else output.data_ptr(),
            op=op,
            factor=factor,
            rank=rank,
            tag=tag,
            input_splits=None if splits is None else splits[0],
            output_splits=None if splits is None else splits[1],
            hold=staged is not None,
            timeout_s=timeout_s,
            keep=keep,
        )
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
            raise _refusal(f"{collective}: a list of {self._member.world} tensors is needed, not {len(parts)}")
        _check_place(collective, part)
        for rank, other in enumerate(parts):
            _check_place(collective, other)
            if (other.numel() != part.numel() and own in (None, rank)) or other.dtype != part.dtype:
                raise _refusal(
                    f"{collective}: the list's tensor must have {part.numel()} elements of {part.dtype}; it has "
                    f"{other.numel()} of {other.dtype}"
                )
            if other.device != part.device:
                raise _refusal(
                    f"{collective}: the tensors are on {part.device} and {other.device}; they must be on one device"
                )

    def _check_whole(self, collective: str, *, whole: torch.Tensor, part: torch.Tensor) -> Layout:
        """Check that ``whole`` holds a part of each rank, one after the other in memory; returns the layout of a part."""
        world = self._member.world
        if whole.numel() != part.numel() * world or whole.dtype != part.dtype:
            raise _refusal(
                f"{collective}: {whole.numel()} elements of {whole.dtype} are not {world} times {part.numel()} of "
                f"{part.dtype}"
            )
        for tensor in (whole, part):
            _check_place(collective, tensor)
        if whole.is_contiguous() and part.is_contiguous():
            return ()
        lies = _dense(collective, part)
        if blocks(world, part.numel(), lies) != _dense(collective, whole):
            raise _refusal(
                f"{collective}: a tensor that is cut or joined must be {world} times the other one in memory, one after the "
                f"other; the whole has {_looks(whole)}, the part {_looks(part)}. {_CALL_CONTIGUOUS}"
            )
        return lies

    def _split_bytes(self, what: str, tensor: torch.Tensor, sizes: list[int]) -> list[int]:
        world = self._member.world
        rows = tensor.shape[0] if tensor.dim() else 1
        if not sizes:
            if rows % world:
                raise _refusal(f"all_to_all: the {what} has {rows} rows, which {world} ranks cannot share equally")
            sizes = [rows // world] * world
        if len(sizes) != world or sum(sizes) != rows:
            raise _refusal(f"all_to_all: {what} splits {sizes} do not cut {rows} rows into {world} parts")
        row = tensor.nbytes // rows if rows else 0
        return [size * row for size in sizes]

    # The names of these methods up to torch 2.12.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _refusal(text: str) -> ConfigError:
    """The error for an operation whose arguments are refused; the group is not affected."""
    error = ConfigError(f"{text.rstrip('.')}. Nothing was sent. The group is still usable.")
    error.group_lives = True
    return error


def _check_place(collective: str, tensor: torch.Tensor) -> None:
    """Check that the tensor's device and memory can be used."""
    if tensor.layout is not torch.strided:
        raise _refusal(f"{collective}: a {tensor.layout} tensor; make it dense first")
    if not tensor.is_cpu:
        if not tensor.is_cuda:
            raise _refusal(f"{collective}: tensors on {tensor.device.type} are not supported; move them to the CPU")
        if torch.cuda.is_current_stream_capturing():
            raise _refusal(
                f"{collective}: the current stream is capturing a CUDA graph, and what goes over the network cannot be "
                "replayed. Call it outside of the capture"
            )


def _check_memory(collective: str, tensor: torch.Tensor) -> None:
    """Check that the tensor's memory exists and holds its values directly."""
    if tensor.storage_offset() * tensor.itemsize + tensor.nbytes > tensor.untyped_storage().nbytes():
        raise _refusal(
            f"{collective}: the tensor has {_looks(tensor)}, and its storage of {tensor.untyped_storage().nbytes()} bytes "
            "does not hold it; was it resized?"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise _refusal(
            f"{collective}: the tensor is a lazy conjugate or negative; call .resolve_conj().resolve_neg() first"
        )


def _check_writable(collective: str, outputs: Sequence[torch.Tensor]) -> None:
    """Check that results can be copied to the tensors: no two elements of a tensor share their memory."""
    for output in outputs:
        if not output.is_contiguous() and torch._debug_has_internal_overlap(output) == 1:
            raise _refusal(
                f"{collective}: the output has {_looks(output)}, so its elements share memory; clone it first"
            )


def _dense(collective: str, tensor: torch.Tensor) -> Layout:
    found = layout(tensor)
    if found is None:
        raise _refusal(
            f"{collective}: tensors must be dense in memory, and this one, with {_looks(tensor)}, has holes or overlaps "
            f"itself. {_CALL_CONTIGUOUS}"
        )
    return found


def _looks(tensor: torch.Tensor) -> str:
    return f"shape {tuple(tensor.shape)} and strides {tensor.stride()}"


class _Batch:
    """Calls that start together, or not at all if one of them is refused."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.works: list[Work] = []
        self._waiting: list[tuple[Work, Sequence[Start]]] = []
        self._refused: ConfigError | None = None
        self.has_raised = False
        """Whether the refusal was raised, which ends the batch."""

    def add(self, work: Work, starts: Sequence[Start]) -> None:
        """Take a call's Work into the batch, with the functions that start its operations."""
        work.tickets = [_InBatch(self, work)]
        self.works.append(work)
        self._waiting.append((work, starts))

    def refuse(self, error: ConfigError) -> Work:
        """Record the refusal of one of the calls, which `start` raises."""
        self._refused = self._refused or error
        work = Work(self._group, [], [])
        work.tickets = [_InBatch(self, work)]
        return work

    def start(self) -> None:
        """Start all operations; raise the first refusal instead if there was one."""
        if self._refused is not None:
            self.has_raised = True
            raise self._refused
        while self._waiting:
            work, starts = self._waiting.pop(0)
            work.tickets = [start() for start in starts]


class _InBatch:
    """The ticket of a call in a batch. A request for its result before the batch's end starts the calls so far."""

    def __init__(self, batch: _Batch, work: Work) -> None:
        self._batch = batch
        self._work = work

    def wait(self, timeout_s: float | None = None) -> bool:
        """Like the engine's ticket, for all operations of the call."""
        self._batch.start()
        return all(ticket.wait(timeout_s) for ticket in self._work.tickets)

    def done(self) -> bool:
        """Whether all operations of the call have ended."""
        self._batch.start()
        return all(ticket.done() for ticket in self._work.tickets)

    def source(self) -> int | None:
        """Like the engine's ticket."""
        self._batch.start()
        return self._work.tickets[0].source()

    def on_done(self, callback: Callable[[], object]) -> None:
        """Call ``callback()`` at the end of each operation of the call."""
        self._batch.start()
        for ticket in self._work.tickets:
            ticket.on_done(callback)


def _reduction(reduce: Any, collective: str, tensor: torch.Tensor | None) -> tuple[str, float]:
    kind = reduce.op if hasattr(reduce, "op") else reduce
    name = _REDUCTIONS.get(str(kind).rpartition(".")[2])
    if name is None:
        raise _refusal(f"{collective}: unknown reduction {kind}")
    factor = 1.0
    if name == "premul_sum":
        given = getattr(reduce, "factor", None)
        if given is None:
            # torch keeps the factor in the pickled state only (up to 2.14).
            given = reduce.__getstate__()[1]
        factor = float(given)
    return name, factor


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


def _alike(tensors: Sequence[torch.Tensor]) -> bool:
    return all(tensor.numel() == tensors[0].numel() for tensor in tensors)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor of as many elements, uninitialised."""
    return tensor.detach().new_empty(tensor.numel())


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _spread(copies: Iterable[tuple[torch.Tensor, Sequence[torch.Tensor]]]) -> None:
    """Copy the parts of each flat tensor to the user's tensors."""
    for flat, outputs in copies:
        start = 0
        for output in outputs:
            # detach: torch must not record this as an operation of the graph.
            output.detach().copy_(flat[start : start + output.numel()].view_as(output))
            start += output.numel()
        for tensor in (flat, *outputs):
            if tensor.is_cuda:
                # The tensor belongs to the stream on which it was made; the current stream may be another, such as a future's.
                tensor.record_stream(torch.cuda.current_stream(tensor.device))


def _is_set(timeout: timedelta) -> bool:
    """torch passes a negative time-out for "none given"."""
    return timeout.total_seconds() >= 0


@functools.cache
def _spare_outsiders() -> None:
    """Keep torch from calling `split` on ranks that are in no part of the split, from the first group of this backend on. A
    backend returns no group there, and torch 2.15 crashes on that if the backend is written in Python
    (`ProcessGroup::splitGroup`). Other backends are called as before: some take part in a split on all ranks."""
    split = c10d.ProcessGroup.split_group

    def split_group(group: Any, ranks: list[int], *args: Any, **kwargs: Any) -> Any:
        backends = (group._get_backend(device) for device in group._device_types)
        if group.rank() not in ranks and all(isinstance(one, _Collectives) for one in backends):
            return None
        return split(group, ranks, *args, **kwargs)

    setattr(c10d.ProcessGroup, "split_group", split_group)  # noqa: B010 -- the stub calls it a method


def _class() -> Any:
    """The class for this torch: feature-tested, not version-tested."""
    if _can_be_made(c10d.Backend):
        base = getattr(dist, "BackendBase", None) or c10d.Backend

        class PenstockBackend(_Collectives, base):  # type: ignore[misc, valid-type]
            def __init__(self, membership: groups.Membership, timeout: timedelta) -> None:
                base.__init__(self, membership.rank, membership.world)
                answer_for_wrappers()
                _spare_outsiders()
                self._setup(membership, timeout)

        return PenstockBackend

    class PenstockProcessGroup(_Collectives, dist.ProcessGroup):
        """The backend for torch versions in which only groups can be written in Python: it also has the methods of torch's C++
        group."""

        def __init__(self, membership: groups.Membership, timeout: timedelta) -> None:
            dist.ProcessGroup.__init__(self, membership.rank, membership.world)
            self._setup(membership, timeout)
            self._group_name = ""
            self._group_desc = ""
            self._lately: collections.deque[Work] = collections.deque(maxlen=_LATELY)

        @property
        def _device_types(self) -> list[torch.device]:
            return [torch.device(name) for name in Devices()]

        @property
        def group_name(self) -> str:
            return self._group_name

        def _set_group_name(self, name: str) -> None:
            self._group_name = name

        setGroupName = _set_group_name

        def getGroupName(self) -> str:
            return self._group_name

        @property
        def group_desc(self) -> str:
            return self._group_desc

        def _set_group_desc(self, desc: str) -> None:
            self._group_desc = desc

        def getGroupDesc(self) -> str:
            return self._group_desc

        def _work(self, *args: Any, **kwargs: Any) -> Work:
            # torch's C++ side keeps only the C++ half of a Work, and a wait on that half never ends. DDP does wait on it, in
            # the backward pass, for an all-reduce of one element that it issued in the forward pass (Join).
            work = super()._work(*args, **kwargs)
            if sum(output.numel() * output.element_size() for output in work.outputs) <= _SMALL_BYTES:
                self._lately.append(work)
            return work

        def _get_backend(self, device: torch.device) -> PenstockProcessGroup:
            return self

        def _check_cuda(self) -> None:
            asked = str(dist.distributed_c10d._world.pg_backend_config.get(self, ""))
            if "cuda:" in asked and "cuda:penstock" not in asked:
                raise _refusal(
                    f'this group was asked for as "{asked}", but torch {torch.__version__} lets a backend written in '
                    "Python only be the whole group, and has dropped the other one. Use torch 2.14 or newer for mixed "
                    'backends, or "penstock" alone, which stages CUDA tensors through the host.'
                )

    return PenstockProcessGroup


def _can_be_made(base: type) -> bool:
    """Whether Python classes can derive from it: a class for which torch does not support that has no constructor."""
    try:
        type("Probe", (base,), {})(0, 1)
    except TypeError:
        return False
    return True


# A guess: far more than the one element that is known to need it, and little enough that all together hold 4 MiB.
_SMALL_BYTES = 4096
# More than the buckets of one backward pass.
_LATELY = 1024
# Keeps backends alive: torch's C++ side does not, if they are written in Python (TORCH_DISTRIBUTED_DEBUG=DETAIL crashes).
_alive: set[Any] = set()
_sides_lock = threading.Lock()

_DTYPES = {
    getattr(torch, name): name
    for name in (
        *("float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "bool"),
        *("uint16", "uint32", "uint64", "complex32", "complex64", "complex128"),
    )
}
# Operations whose output tensor also holds the contribution.
_IN_PLACE = frozenset(("all_reduce", "broadcast", "reduce"))
_is_reduced = functools.lru_cache(_core.is_reduced)
_REDUCTIONS = {
    "SUM": "sum",
    "AVG": "avg",
    "PREMUL_SUM": "premul_sum",
    "PRODUCT": "product",
    "MIN": "min",
    "MAX": "max",
    "BAND": "band",
    "BOR": "bor",
    "BXOR": "bxor",
}
_CALL_CONTIGUOUS = "Call .contiguous() first (and copy back what is written in place)."
_CLASS = _class()
