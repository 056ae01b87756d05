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
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.autograd import profiler

from penstock.errors import Config as ConfigError
from penstock.errors import PenstockError
from penstock.torch import Devices, rendezvous
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
            "the penstock backend takes no pg_options; its knobs are environment variables (penstock info)"
        )
    # torch leaves the list empty for the default group, whose ranks are the job's.
    global_ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    rank, world = options.group_rank, options.group_size
    name = getattr(options, "group_id", "") or "default"
    # A plan is for all ranks of the job.
    everybody = not dist.is_initialized() or world == dist.get_world_size()
    membership = rendezvous.join(
        options.store, rank, world, options.timeout, name, global_ranks[rank], aggregate=everybody
    )
    return _CLASS(membership, options.timeout)


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


def _span(name: str, shown: Callable[..., Iterable[torch.Tensor]]) -> Callable[[_Call], _Call]:
    """Show a call to torch's profiler as ``penstock:name``, from its issue to the end of what it has started, with the shapes of
    what ``shown`` makes of its arguments: as gloo shows its own. Coalesced calls are one span together. Without a profiler it
    costs a look at a flag."""

    def decorate(call: _Call) -> _Call:
        @functools.wraps(call)
        def with_span(self: Any, *args: Any, **kwargs: Any) -> Work:
            if not profiler._is_profiler_enabled or (self._coalesced is not None and name != "coalesced"):
                return call(self, *args, **kwargs)
            span = torch.autograd._record_function_with_args_enter(f"penstock:{name}", *shown(*args))
            try:
                work = call(self, *args, **kwargs)
            except BaseException:
                torch.autograd._record_function_with_args_exit(span)
                raise
            work.end_span(span)
            return work

        return with_span

    return decorate


def _first(tensors: Iterable[torch.Tensor], *_: Any) -> Iterable[torch.Tensor]:
    return tensors


def _second(_output: Any, given: Any, *_: Any) -> Iterable[torch.Tensor]:
    return [given] if isinstance(given, torch.Tensor) else given


def _lists(_outputs: Any, input_lists: Sequence[list[torch.Tensor]], *_: Any) -> Iterable[torch.Tensor]:
    return input_lists[0] if input_lists else []


def _nothing(*_: Any) -> Iterable[torch.Tensor]:
    return []


class _Collectives:
    """torch's calls, for either base class. ``self._member`` is the group's membership.

    Every call returns a `Work` at once. Tensors must be dense and contiguous, on the CPU or a CUDA device (staged
    through pinned memory, see `staging`); they must not be used until
    the Work has completed. Calls on a group must come in the same order on all its ranks.
    """

    _member: rendezvous.Membership
    _timeout: timedelta

    # torch asks for these properties; one that is missing sends its getter into an endless recursion (2.15).
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

    def _setup(self, membership: rendezvous.Membership, timeout: timedelta) -> None:
        self._member = membership
        self._timeout = timeout
        self._issued = 0
        self._monitored = 0
        self._coalesced: list[Work] | None = None
        self._sides: dict[torch.device, Side] = {}
        self._siblings: list[rendezvous.Membership] = []
        self._sparse: SparseReductions | None = None
        self._options = c10d.Backend.Options("penstock", timeout) if hasattr(c10d.Backend, "Options") else None
        _alive.add(self)

    # ------------------------------------------------------------------ reductions

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Work:
        if any(tensor.layout is torch.sparse_coo for tensor in tensors):
            return self.allreduce_sparse(tensors, opts)
        return self.allreduce_coalesced(tensors, opts)

    @_span("all_reduce", _first)
    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any) -> Work:
        return self._each(tensors, lambda tensor: self._all_reduce(tensor, opts), tensors)

    def _all_reduce(self, tensor: torch.Tensor, opts: Any) -> Any:
        rendezvous.heed.count_all_reduce()
        return self._start("all_reduce", opts, tensor=tensor, output=tensor, reduce=opts.reduceOp)

    @_span("sparse_all_reduce", _first)
    def allreduce_sparse(self, tensors: list[torch.Tensor], opts: Any) -> Work:
        """Sum or average of COO tensors, which become the coalesced result; see `sparse`. CUDA tensors go through the host, and
        for those the call waits for the device."""
        for tensor in tensors:
            if tensor.layout is not torch.sparse_coo:
                raise _refusal(f"all_reduce: sparse COO tensors cannot share a call with a {tensor.layout} tensor")
            if str(tensor.dtype).removeprefix("torch.") not in _DTYPES:
                raise _refusal(f"all_reduce: {tensor.dtype} cannot be reduced")
        op, _ = _reduction(opts.reduceOp, "all_reduce", None)
        if op not in ("sum", "avg"):
            raise _refusal(f"all_reduce of sparse tensors knows SUM and AVG, not {op.upper()}; make them dense first")
        if self._sparse is None:
            self._sparse = SparseReductions(lambda: self.sibling("sparse"), self._fail)
        self._issued += 1
        timeout = opts.timeout if _is_set(opts.timeout) else self._timeout
        tickets = [
            self._sparse.start(tensor.detach().coalesce().cpu(), average=op == "avg", timeout_s=timeout.total_seconds())
            for tensor in tensors
        ]

        def finish() -> None:
            # Not into a detached tensor: a sparse one gets new indices, which the two do not share.
            with torch.no_grad():
                for ticket, tensor in zip(tickets, tensors, strict=True):
                    tensor.copy_(ticket.sum)

        return self._work(tickets, list(tensors), finish, group=self._sparse)

    def _fail(self, error: BaseException) -> None:
        self._member.group.abort(f"rank {self._member.rank}: {error}")

    @_span("reduce", _first)
    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> Work:
        return self._each(
            tensors,
            lambda tensor: self._start(
                "reduce", opts, tensor=tensor, output=tensor, reduce=opts.reduceOp, rank=opts.rootRank
            ),
            tensors,
        )

    @_span("reduce_scatter", _second)
    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Work:
        return self._work([self._reduce_scatter(output, input, opts)], [output])

    @_span("reduce_scatter", _second)
    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any
    ) -> Work:
        return self._work([self._reduce_scatter(o, i, opts) for o, i in zip(outputs, inputs, strict=True)], outputs)

    @_span("reduce_scatter", _lists)
    def reduce_scatter(self, outputs: list[torch.Tensor], input_lists: list[list[torch.Tensor]], opts: Any) -> Work:
        tickets, copies = [], []
        for output, inputs in zip(outputs, input_lists, strict=True):
            self._check_list("reduce_scatter", inputs, output, own=self._member.rank)
            if _alike(inputs):
                tickets.append(self._reduce_scatter(output, _joined(inputs), opts))
                continue
            # Unequal parts: each is reduced to its rank.
            for root, part in enumerate(inputs):
                own = part.detach().clone() if root == self._member.rank else part
                tickets.append(self._start("reduce", opts, tensor=own, output=own, reduce=opts.reduceOp, rank=root))
                if root == self._member.rank:
                    copies.append((own.view(-1), [output]))
        return self._work(tickets, outputs, lambda: _spread(copies))

    def _reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Any:
        self._check_whole("reduce_scatter", whole=input, part=output)
        return self._start(
            "reduce_scatter",
            opts,
            tensor=input,
            input=input,
            output=output,
            reduce=opts.reduceOp,
        )

    # ------------------------------------------------------------------ moving data

    @_span("broadcast", _first)
    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Work:
        return self._each(
            tensors,
            lambda tensor: self._start("broadcast", opts, tensor=tensor, output=tensor, rank=opts.rootRank),
            tensors,
        )

    @_span("all_gather", _second)
    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Work:
        return self._work([self._all_gather(output, input, opts)], [output])

    @_span("all_gather", _second)
    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        return self._work([self._all_gather(o, i, opts) for o, i in zip(outputs, inputs, strict=True)], outputs)

    @_span("all_gather", _second)
    def allgather(self, output_lists: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> Work:
        return self._all_gather_lists(output_lists, inputs, opts)

    def _all_gather_lists(self, output_lists: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> Work:
        tickets, copies = [], []
        for outputs, input in zip(output_lists, inputs, strict=True):
            self._check_list("all_gather", outputs, input, own=self._member.rank)
            if _alike(outputs):
                flat = input.new_empty(self._member.world * input.numel())
                tickets.append(self._all_gather(flat, input, opts))
                copies.append((flat, outputs))
                continue
            # Unequal parts: each rank broadcasts its own.
            outputs[self._member.rank].detach().copy_(input.view_as(outputs[self._member.rank]))
            for root, part in enumerate(outputs):
                tickets.append(self._start("broadcast", opts, tensor=part, output=part, rank=root))
        flattened = [tensor for outputs in output_lists for tensor in outputs]
        return self._work(tickets, flattened, lambda: _spread(copies))

    @_span("all_gather", _second)
    def allgather_coalesced(
        self, output_lists: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any
    ) -> Work:
        # Here the lists are by rank, then by input.
        return self._all_gather_lists([list(outputs) for outputs in zip(*output_lists, strict=True)], inputs, opts)

    def _all_gather(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Any:
        self._check_whole("all_gather", whole=output, part=input)
        return self._start("all_gather", opts, tensor=output, input=input, output=output)

    @_span("gather", _second)
    def gather(self, output_lists: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> Work:
        (input,) = inputs
        root = opts.rootRank == self._member.rank
        outputs = output_lists[0] if root and output_lists else []
        flat = None
        if root:
            self._check_list("gather", outputs, input)
            flat = input.new_empty(self._member.world * input.numel())
        ticket = self._start("gather", opts, tensor=input, input=input, output=flat, rank=opts.rootRank)
        return self._work([ticket], outputs, None if flat is None else lambda: _spread([(flat, outputs)]))

    @_span("scatter", _lists)
    def scatter(self, outputs: list[torch.Tensor], input_lists: list[list[torch.Tensor]], opts: Any) -> Work:
        (output,) = outputs
        flat = None
        if opts.rootRank == self._member.rank:
            self._check_list("scatter", input_lists[0] if input_lists else [], output)
            flat = _joined(input_lists[0])
        ticket = self._start("scatter", opts, tensor=output, input=flat, output=output, rank=opts.rootRank)
        return self._work([ticket], outputs)

    @_span("all_to_all", _second)
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any,
    ) -> Work:
        return self._work(
            [
                self._all_to_all(
                    output,
                    input,
                    self._split_bytes("output", output, output_split_sizes),
                    self._split_bytes("input", input, input_split_sizes),
                    opts,
                )
            ],
            [output],
        )

    @_span("all_to_all", _second)
    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any) -> Work:
        flat_input, flat_output = _joined(inputs), torch.cat([tensor.reshape(-1) for tensor in outputs])
        ticket = self._all_to_all(
            flat_output,
            flat_input,
            [tensor.nbytes for tensor in outputs],
            [tensor.nbytes for tensor in inputs],
            opts,
        )
        return self._work([ticket], outputs, lambda: _spread([(flat_output, outputs)]))

    def _all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_bytes: list[int],
        input_bytes: list[int],
        opts: Any,
    ) -> Any:
        # The parts differ between ranks by right: what must agree is checked pair by pair, from the messages' lengths.
        return self._start(
            "all_to_all",
            opts,
            tensor=input,
            input=input,
            output=output,
            splits=(input_bytes, output_bytes),
            elements=0,
        )

    @_span("barrier", _nothing)
    def barrier(self, opts: Any) -> Work:
        return self._work([self._start("barrier", opts)], [])

    def monitored_barrier(self, opts: Any, wait_all: bool = False) -> None:
        """A barrier whose time-out names the ranks that did not come. All of them are named; with ``wait_all`` the error also
        begins with all of them, in torch's words, and with the first one without.

        Raises:
            penstock.errors.Timeout: some ranks did not come in time (zero is no time at all). The group is unusable.
        """
        self._monitored += 1
        rank, world = self._member.rank, self._member.world
        timeout = opts.timeout if _is_set(opts.timeout) else self._timeout
        store = dist.PrefixStore(f"monitored_barrier/{self._monitored}", self._member.keys)
        store.set(str(rank), "here")
        try:
            self.barrier(opts).wait()
        except PenstockError as error:
            # The store is asked, since the barrier's messages tell only of neighbours.
            with contextlib.suppress(dist.DistError):
                missing = [other for other in range(world) if not store.check([str(other)])]
                if missing:
                    raise type(error)(_missed(rank, missing, timeout, wait_all, error)) from None
            raise
        with contextlib.suppress(dist.DistError):
            store.delete_key(str(rank))

    monitoredBarrier = monitored_barrier

    # ------------------------------------------------------------------ point to point

    @_span("send", _first)
    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> Work:
        (tensor,) = tensors
        return self._work([self._start("send", None, tensor=tensor, input=tensor, rank=dst, tag=tag)], tensors)

    @_span("recv", _first)
    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> Work:
        (tensor,) = tensors
        ticket = self._start("recv", None, tensor=tensor, output=tensor, rank=src, tag=tag)
        return self._work([ticket], tensors, source=src)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> Work:
        raise _refusal("recv from any source is not supported: name the source rank")

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

    def sibling(self, name: str, *, aggregate: bool = False) -> rendezvous.Membership:
        """Join another group of the same ranks, for operations that have an order of their own. Blocks until all ranks have
        called it, with the same name; it is left with this group at the latest. With ``aggregate`` its all-reduces go through
        servers if this group's do."""
        sibling = self._member.sibling(name, self._timeout, aggregate=aggregate)
        self._siblings.append(sibling)
        if self not in _alive:  # shut down meanwhile, by another thread
            self.forget_siblings([sibling])
        return sibling

    def forget_siblings(self, siblings: Iterable[rendezvous.Membership]) -> None:
        """Leave them, if they are not left already."""
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

    def get_error(self) -> Any:
        return c10d.ErrorType.SUCCESS

    def getBackendName(self) -> str:
        return "penstock"

    def name(self) -> str:
        return "penstock"

    def _get_sequence_number_for_group(self) -> int:
        return self._issued

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _wait_for_pending_works(self) -> None:
        pass

    def eager_connect_single_device(self, device: Any = None) -> None:
        pass

    # ------------------------------------------------------------------ coalescing

    # torch up to 2.13 says on which device.
    def start_coalescing(self, _device: Any = None) -> None:
        """Calls up to `end_coalescing` are waited for together. They start at once: any number may be in flight."""
        self._coalesced = []

    @_span("coalesced", _nothing)
    def end_coalescing(self, _device: Any = None) -> Work:
        works, self._coalesced = self._coalesced or [], None
        tickets = [ticket for work in works for ticket in work.tickets]
        # A future makes its readers' streams wait for what lies on the devices of its value.
        outputs = [output for work in works for output in work.outputs]
        return Work(self._member.group, tickets, outputs, parts=works)

    _start_coalescing = start_coalescing
    _end_coalescing = end_coalescing

    def split(self, store: Any, ranks: list[int], opts: Any) -> Any:
        """A group of some of this one's ranks, over the same streams; None on ranks that are not in it."""
        if self._member.rank not in ranks:
            return None
        timeout = getattr(opts, "timeout", None) or self._timeout
        name = getattr(opts, "group_name", "") or f"{self._member.name}:split"
        rank = ranks.index(self._member.rank)
        member = rendezvous.join(store, rank, len(ranks), timeout, name, self._member.engine.job_rank)
        return _CLASS(member, timeout)

    # ------------------------------------------------------------------ helpers

    def _start(
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
    ) -> Any:
        """Start one operation. ``tensor`` gives the dtype and the size that ranks must agree on."""
        for checked in (input, output):
            if checked is not None:
                _check_tensor(collective, checked)
        if input is not None and output is not None and input.device != output.device:
            raise _refusal(
                f"{collective}: the tensors are on {input.device} and {output.device}; they must be on one device"
            )
        dtype, count = "byte", 0
        if tensor is not None:
            dtype = str(tensor.dtype).removeprefix("torch.")
            count = tensor.numel()
            if dtype not in _DTYPES:
                if reduce is not None:
                    raise _refusal(f"{collective}: {dtype} cannot be reduced, only moved.")
                # A type that is only moved here, as bytes.
                dtype, count = "byte", tensor.nbytes
        timeout = opts.timeout if opts is not None and _is_set(opts.timeout) else self._timeout
        op, factor = _reduction(reduce, collective, tensor) if reduce is not None else (None, 1.0)
        self._issued += 1
        staged = None
        if tensor is not None and tensor.device.type == "cuda":
            self._check_cuda()
            # Where the tensor is both, a rank that only gives away gets nothing new back, and one that only takes need
            # not show what it has.
            own = rank == self._member.rank
            gives = {"broadcast": own, "reduce": not own}.get(collective, False)
            takes = collective == "broadcast" and not own
            source = output if collective in _IN_PLACE else input
            reads = [] if source is None or takes else [source]
            writes = [] if output is None or gives else [output]
            staged = Staged(self._side(tensor.device), reads, writes)
            input, output = (None if one is None else staged.twin(one) for one in (input, output))
        # The storages, not the tensors: `tensor.data = ...` would take the memory from under the engine.
        keep = [one.untyped_storage() for one in (input, output) if one is not None]
        ticket = self._member.group.start(
            collective,
            dtype=dtype,
            elements=count if elements is None else elements,
            bytes=0 if tensor is None else tensor.nbytes,
            input=0 if input is None else input.data_ptr(),
            output=0 if output is None else output.data_ptr(),
            op=op,
            factor=factor,
            rank=rank,
            tag=tag,
            input_splits=None if splits is None else splits[0],
            output_splits=None if splits is None else splits[1],
            hold=staged is not None,
            timeout_s=timeout.total_seconds(),
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
        tickets: Sequence[Ticket],
        outputs: list[torch.Tensor],
        finish: Callable[[], object] | None = None,
        source: int = -1,
        group: Expires | None = None,
    ) -> Work:
        work = Work(group or self._member.group, tickets, outputs, finish, source)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _check_cuda(self) -> None:
        """Raise if CUDA tensors were meant for another backend."""

    def _each(
        self, tensors: Sequence[torch.Tensor], start: Callable[[torch.Tensor], Any], outputs: list[torch.Tensor]
    ) -> Work:
        return self._work([start(tensor) for tensor in tensors], list(outputs))

    def _check_list(
        self, collective: str, parts: Sequence[torch.Tensor], part: torch.Tensor, own: int | None = None
    ) -> None:
        """A tensor a rank, like ``part``: all of them, or only the ``own``-th where they may differ."""
        if len(parts) != self._member.world:
            raise _refusal(f"{collective}: a list of {self._member.world} tensors is needed, not {len(parts)}")
        for other in parts if own is None else [parts[own]]:
            if other.numel() != part.numel() or other.dtype != part.dtype:
                raise _refusal(
                    f"{collective}: the list's tensor must have {part.numel()} elements of {part.dtype}; it has "
                    f"{other.numel()} of {other.dtype}"
                )

    def _check_whole(self, collective: str, *, whole: torch.Tensor, part: torch.Tensor) -> None:
        if whole.numel() != part.numel() * self._member.world or whole.dtype != part.dtype:
            raise _refusal(
                f"{collective}: {whole.numel()} elements of {whole.dtype} are not {self._member.world} times "
                f"{part.numel()} of {part.dtype}"
            )

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

    # What torch called these up to 2.12.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _refusal(text: str) -> ConfigError:
    """An operation cannot be done as asked; its group has not noticed."""
    error = ConfigError(f"{text.rstrip('.')}. Nothing was sent. The group is still usable.")
    error.group_lives = True
    return error


def _check_tensor(collective: str, tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided:
        raise _refusal(f"{collective}: a {tensor.layout} tensor; make it dense first")
    if not tensor.is_contiguous():
        raise _refusal(
            f"{collective}: tensors must be contiguous; this one has shape {tuple(tensor.shape)} and strides "
            f"{tensor.stride()}. Call .contiguous() first (and copy back what is written in place)."
        )
    if tensor.device.type not in ("cpu", "cuda"):
        raise _refusal(f"{collective}: tensors on {tensor.device.type} are not supported; move them to the CPU")


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
    """What a rank that came says, with the phrases that users of gloo look for."""
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


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _spread(copies: Iterable[tuple[torch.Tensor, Sequence[torch.Tensor]]]) -> None:
    """Copy the parts of each flat tensor to where the user wants them."""
    for flat, outputs in copies:
        start = 0
        for output in outputs:
            # detach: torch must not take it for an operation of the graph.
            output.detach().copy_(flat[start : start + output.numel()].view_as(output))
            start += output.numel()
        for tensor in (flat, *outputs):
            if tensor.is_cuda:
                # It belongs to the stream that it was made on; this may be another, a future's for instance.
                tensor.record_stream(torch.cuda.current_stream(tensor.device))


def _is_set(timeout: timedelta) -> bool:
    """torch passes a negative time-out for "none given"."""
    return timeout.total_seconds() >= 0


def _class() -> Any:
    """The class for this torch: feature-tested, not version-tested."""
    if _can_be_made(c10d.Backend):
        base = getattr(dist, "BackendBase", None) or c10d.Backend

        class PenstockBackend(_Collectives, base):  # type: ignore[misc, valid-type]
            def __init__(self, membership: rendezvous.Membership, timeout: timedelta) -> None:
                base.__init__(self, membership.rank, membership.world)
                answer_for_wrappers()
                self._setup(membership, timeout)

        return PenstockBackend

    class PenstockProcessGroup(_Collectives, dist.ProcessGroup):
        """Where only groups can be written in Python, it also answers for what torch's C++ group would know."""

        def __init__(self, membership: rendezvous.Membership, timeout: timedelta) -> None:
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
            # torch's C++ side keeps only its half of a Work, and a wait without the other one never ends. DDP lets it
            # wait, in the backward pass, for an all-reduce of one element that it issued in the forward pass (Join).
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
    """Whether Python may derive from it: a class that torch does not offer for that has no constructor."""
    try:
        type("Probe", (base,), {})(0, 1)
    except TypeError:
        return False
    return True


# A guess: far more than the one element that is known to need it, and little enough that all together hold 4 MiB.
_SMALL_BYTES = 4096
# More than the buckets of one backward pass.
_LATELY = 1024
# torch's C++ side keeps only a weak hold on a backend written in Python (TORCH_DISTRIBUTED_DEBUG=DETAIL crashes).
_alive: set[Any] = set()
_sides_lock = threading.Lock()

_DTYPES = frozenset(
    {"float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "bool"}
    | {"uint16", "uint32", "uint64", "complex32", "complex64", "complex128"}
)
# Operations whose output tensor also holds the contribution.
_IN_PLACE = frozenset(("all_reduce", "broadcast", "reduce"))
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
_CLASS = _class()
