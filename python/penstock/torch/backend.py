"""The torch.distributed backend: translates torch's calls into the engine's.

torch has two base classes for backends in Python, depending on its version: ``ProcessGroup`` alone up to 2.13, where
our object *is* the group, and ``Backend`` from 2.14 on, where torch's group dispatches to us by device. Both get the
same calls from `_Backend`; `create` tests which base can be constructed.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from penstock.errors import Closed
from penstock.errors import Config as ConfigError
from penstock.runtime import groups
from penstock.torch import spans
from penstock.torch.arguments import refusal
from penstock.torch.batches import Batch
from penstock.torch.collectives import Collectives
from penstock.torch.devices import Devices
from penstock.torch.life import alive
from penstock.torch.work import Work, answer_for_wrappers

__all__ = ["create", "of"]


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
    made_ns = time.time_ns()
    # A deployment is for all ranks of the job.
    everybody = not dist.is_initialized() or len(global_ranks) == dist.get_world_size()
    check, known = _check_known(global_ranks)
    membership = groups.join(
        options.store, rank, global_ranks, options.timeout, name, aggregate=everybody, check=check, known=known
    )
    made = _CLASS(membership, options.timeout)
    made.made_ns = made_ns
    return made


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
    if default not in alive:  # aborted: its group knows nothing any more
        return None, {}
    return functools.partial(default._member.group.check, ranks, whole=False), default._member.contacts


def _check_deaths(ranks: Sequence[int]) -> Callable[[], None] | None:
    """A function that raises once one of these ranks has died. It checks every group that has such a rank: a rank that has left
    one group may have died in another."""
    asked = []
    for backend in list(alive):
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
    if not isinstance(found, _Backend):
        raise ConfigError(
            f"the group's backend for CPU tensors is {found.name()}, not penstock; make one with "
            'init_process_group("penstock") or new_group(backend="penstock")'
        )
    return found


class _Backend(Collectives):
    """What torch asks of either base class besides collectives: what it can do, its names, batches, and parts of the group."""

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
        self._coalesced = Batch(self._member.group)

    @spans.span("coalesced", spans.nothing)
    def end_coalescing(self, _device: Any = None) -> Work:
        """Start the calls since `start_coalescing`.

        Raises:
            penstock.errors.Config: one of them was refused; none has started.
        """
        batch, self._coalesced = self._coalesced or Batch(self._member.group), None
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


@functools.cache
def _spare_outsiders() -> None:
    """Keep torch from calling `split` on ranks that are in no part of the split, from the first group of this backend on. A
    backend returns no group there, and torch 2.15 crashes on that if the backend is written in Python
    (`ProcessGroup::splitGroup`). Other backends are called as before: some take part in a split on all ranks."""
    split = c10d.ProcessGroup.split_group

    def split_group(group: Any, ranks: list[int], *args: Any, **kwargs: Any) -> Any:
        backends = (group._get_backend(device) for device in group._device_types)
        if group.rank() not in ranks and all(isinstance(one, _Backend) for one in backends):
            return None
        return split(group, ranks, *args, **kwargs)

    setattr(c10d.ProcessGroup, "split_group", split_group)  # noqa: B010 -- the stub calls it a method


def _class() -> Any:
    """The class for this torch: feature-tested, not version-tested."""
    if _can_be_made(c10d.Backend):
        base = getattr(dist, "BackendBase", None) or c10d.Backend

        class PenstockBackend(_Backend, base):  # type: ignore[misc, valid-type]
            """The backend for torch versions whose own group dispatches to it by device."""

            def __init__(self, membership: groups.Membership, timeout: timedelta) -> None:
                base.__init__(self, membership.rank, membership.world)
                answer_for_wrappers()
                _spare_outsiders()
                self._setup(membership, timeout)

        return PenstockBackend

    class PenstockProcessGroup(_Backend, dist.ProcessGroup):
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
            """The name that torch gave the group; empty before."""
            return self._group_name

        def _set_group_name(self, name: str) -> None:
            self._group_name = name

        setGroupName = _set_group_name

        def getGroupName(self) -> str:
            """As `group_name`, for callers of the C++ group's method."""
            return self._group_name

        @property
        def group_desc(self) -> str:
            """The description that torch gave the group; empty before."""
            return self._group_desc

        def _set_group_desc(self, desc: str) -> None:
            self._group_desc = desc

        def getGroupDesc(self) -> str:
            """As `group_desc`, for callers of the C++ group's method."""
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
                raise refusal(
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
_CLASS = _class()
