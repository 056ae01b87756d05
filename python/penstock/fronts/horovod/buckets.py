"""Gradients through the engine's reducer, where they need no names.

A `DistributedOptimizer` reduces the same gradients in every step. For dense ones on the CPU that are summed or averaged over all
ranks, the engine does better than operations with names: ranks agree on what is ready by a bit for each gradient, small gradients
share a bucket, large ones are split, and Python is not in the way (`crates/penstock-engine/src/reducer.rs`).

A step of it needs all ranks. One that has joined (``hvd.join``) takes part with *ghost steps*: zeros for every gradient, until a
step in which no rank takes part with gradients of its own. A marker shows that: a gradient of one element that ghosts do not
submit.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from penstock import _core
from penstock.errors import Mismatch, PenstockError
from penstock.fronts.horovod import job
from penstock.fronts.horovod.common.exceptions import HorovodInternalError
from penstock.fronts.horovod.controller import NEVER_S
from penstock.fronts.horovod.negotiation import Kind, Request
from penstock.fronts.horovod.operations import Entry
from penstock.runtime import config, process
from penstock.training.slots import Slots

__all__ = ["Buckets", "Ghosts"]

log = logging.getLogger("penstock")


class Buckets:
    """The reducer of one optimizer, made when it is first used: all ranks wait for each other then.

    Args:
        parameters: dense, on the CPU, of floating point dtypes; in the order in which gradients are expected.
        names: their names, which all ranks share.
        average: or sum.
        wire: how float32 gradients are sent; None as they are.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        *,
        average: bool,
        wire: torch.dtype | None,
    ) -> None:
        self.number = _free_number()
        _tell_what_is_left_out()
        self._parameters = list(parameters)
        self._names = list(names)
        self._average = average
        self._wire = wire
        self._index = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._job: job.Job | None = None
        self._reducer: _core.Reducer | None = None
        self._abort: Callable[[str], None] | None = None
        self._marked = False
        self._done: set[int] = set()
        self._ending: _core.Ticket | None = None
        self._withdrawn: _core.Ticket | None = None
        self._has_warned = False
        _all.add(self)

    def usable(self, *, haunting: bool = False) -> bool:
        """Make the reducer if there is none. Returns whether all ranks have the same parameters, in the same order. Blocks until
        all ranks have come here; one that is ``haunting`` has joined."""
        running = job.current()
        if self._job is not running:
            self._marked, self._done, self._ending, self._withdrawn = False, set(), None, None
            self._reducer = self._make(running, haunting)
            self._job = running
        return self._reducer is not None

    @property
    def made(self) -> bool:
        """Whether all ranks have made it in this life of the job, and can use it."""
        return self._reducer is not None and job.is_initialized() and self._job is job.current()

    def submit(self, parameter: torch.nn.Parameter) -> None:
        """This parameter's ``grad`` is complete: it is reduced in place, and not to be touched before `flush` has returned."""
        gradient = parameter.grad
        assert gradient is not None, "the caller has looked"
        self._mark(absent=False)
        parameter.grad = self._submit(self._index[id(parameter)], gradient, absent=False)

    def has(self, parameter: torch.nn.Parameter) -> bool:
        """Whether it was submitted in this step."""
        return self._index[id(parameter)] in self._done

    def begin_flush(self) -> None:
        """The backward pass has ended, and the step needs no other one: what was not submitted counts as absent. Does not block;
        `flush` follows. Until this is called the last gradients of the step are not reduced, so that steps of several optimizers
        would have to be in one order on all ranks."""
        if self._marked and self.made:
            try:
                self._begin_end()
            except PenstockError as error:
                log.debug("a step cannot be ended: %s", error)  # nor by `flush`, which raises it

    def flush(self) -> None:
        """End the step: what was not submitted counts as absent, and its ``grad`` is left alone. Blocks until the gradients are
        reduced. Where something else ends the wait, as a signal's handler that raises, the step goes on: call this again.

        Raises:
            penstock.errors.PenstockError: a rank was lost.
        """
        self._mark(absent=False)
        self._end()

    @property
    def ending(self) -> bool:
        """Whether the end of the step has begun: it cannot be withdrawn any more."""
        return self._ending is not None

    def withdraw(self) -> None:
        """The backward pass has raised: its gradients are withdrawn, as by `penstock.torch.GradientReducer`. Does not block."""
        if not self._done or self._reducer is None or self.ending:
            return
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "a backward pass raised after %d of %d gradients; they are withdrawn, and some of them may hold averages. Set "
                "gradients to zero before the next pass. (Reported once; docs/guide/gradients.md says what other ranks see.)",
                len(self._done - {len(self._parameters)}),
                len(self._parameters),
            )
        self._marked, self._done = False, set()
        self._withdrawn = self._reducer.withdraw()

    def abandon(self) -> None:
        """Drop a step that will not be completed; other ranks do the same, or have failed."""
        if self._done and self.made:
            try:
                self.flush()
            except RuntimeError as error:
                log.debug("an abandoned step has failed: %s", error)

    def haunt(self) -> None:
        """Ghost steps, until all ranks make one at the same time. Blocks until then."""
        reducer = self._reducer
        while reducer is not None:
            self._mark(absent=True)
            try:
                self._end(haunting=True)
            except Mismatch as error:
                if not error.group_lives:
                    raise
                continue  # another rank's pass has raised, and all have dropped the step
            if reducer.was_absent(len(self._parameters)):
                return

    def give_up(self) -> None:
        """Some rank has this optimizer no more: what waits for it here ends."""
        if self._abort is not None:
            self._abort("another rank has the optimizer no more")
            self._reducer = None

    def wanted(self) -> bool:
        """Whether another rank waits for this one to make the reducer. Asks the store."""
        return bool(_store(job.current()).check([f"wanted/{self.number}"]))

    # ------------------------------------------------------------------ helpers

    def _make(self, running: job.Job, haunting: bool) -> _core.Reducer | None:
        controller = running.controller(0, "DistributedOptimizer")
        own = controller.group.backend
        if not haunting:
            _store(running).set(f"wanted/{self.number}", "1")
            # Ranks may take long to their first gradient. From here on all are there, or ghosts that will be soon.
            here = Entry(f"optimizer.{self.number}", Request(Kind.BARRIER))
            controller.submit([here])
            here.result.wait()
        channels: list[Any] = []
        with controller.watching() as check:
            # Also the ranks that wait for this one in the controller's rounds notice that another has died.
            for what in ("readiness", "buckets"):
                opening = own.open_channel(f"{what}{self.number}")
                channels.append(own.keep_channel(opening.wait(check=check)))
        rounds, buckets = channels
        self._slots = Slots(
            [*self._parameters, torch.zeros(1, dtype=torch.float32)], [*self._names, "the mark of a step"]
        )
        described = repr((self._slots.described(), self._average, self._wire)).encode()
        digest = torch.frombuffer(bytearray(hashlib.blake2b(described, digest_size=16).digest()), dtype=torch.uint8)
        digests = torch.zeros(len(digest) * controller.group.size, dtype=torch.uint8)
        rounds.group.start(
            "all_gather",
            dtype="uint8",
            elements=digests.numel(),
            bytes=digests.numel(),
            input=digest.data_ptr(),
            output=digests.data_ptr(),
            timeout_s=NEVER_S,
            keep=(digest, digests),
        ).wait()
        if not bool((digests.view(-1, len(digest)) == digest).all()):
            # By their names, then; the stall inspector says which are missing.
            own.close_channels(channels)
            return None
        self._abort = rounds.group.abort
        running.tell_at_end(rounds.group.abort)
        weakref.finalize(self, own.close_channels, channels).atexit = False
        process.requests.take()
        return _core.Reducer(
            rounds=rounds.group,
            buckets=buckets.group,
            rank=rounds.rank,
            world=controller.group.size,
            gradients=self._slots.described(),
            op="avg" if self._average else "sum",
            bucket_bytes=_BUCKET_BYTES,
            wire=None if self._wire is None else str(self._wire).removeprefix("torch."),
            check_finite="nan" in config.read().check,
            timeout_s=NEVER_S,
        )

    def _mark(self, *, absent: bool) -> None:
        if not self._marked:
            self._marked = True
            mark = len(self._parameters)
            self._submit(mark, self._slots.zeros(mark), absent=absent)

    def _submit(self, index: int, gradient: torch.Tensor, *, absent: bool) -> torch.Tensor:
        assert self._reducer is not None, "the caller has asked whether it is usable"
        withdrawn, self._withdrawn = self._withdrawn, None
        if withdrawn is not None:
            withdrawn.wait()
        submitted, *_ = self._slots.submit(self._reducer, index, gradient, absent)
        self._done.add(index)
        return submitted

    def _begin_end(self) -> _core.Ticket:
        assert self._reducer is not None, "the caller has asked whether it is usable"
        if self._ending is None:
            for index in range(len(self._parameters)):
                if index not in self._done:
                    self._submit(index, self._slots.zeros(index), absent=True)
            self._ending = self._reducer.flush()
        return self._ending

    def _end(self, *, haunting: bool = False) -> None:
        try:
            ticket, began_s = self._begin_end(), time.monotonic()
            while not ticket.wait(_STALL_LOOK_S):
                # A rank that has joined waits for steps that the others may never make.
                if not haunting:
                    self._check_stall(began_s)
        except (PenstockError, HorovodInternalError):
            self._over()
            raise
        self._over()

    def _check_stall(self, began_s: float) -> None:
        assert self._reducer is not None and self._abort is not None, "a step of it waits"
        controller = job.current().controller(0, "DistributedOptimizer")
        step = self._reducer.stats()["steps"]
        names = [f"allreduce.{name}" for name in self._names]
        controller.check_stall_of(f"optimizer{self.number}/{step}", names, began_s, self._abort)

    def _over(self) -> None:
        self._marked, self._done, self._ending = False, set(), None


class Ghosts:
    """Ghost steps for all optimizers of a rank that has joined, each on a thread of its own: which one other ranks step next is
    theirs to say."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._failures: list[BaseException] = []
        self._buckets = list(_all)
        self._threads = [
            threading.Thread(target=self._run, args=(one,), name="penstock-ghost", daemon=True) for one in self._buckets
        ]
        for thread in self._threads:
            thread.start()

    def finish(self, exchange: Callable[[Any], list[Any]]) -> None:
        """All ranks have joined. Block until the last ghost steps, which all of them make, are over.

        Args:
            exchange: an all-gather of objects: an optimizer may have been collected as garbage on some rank.
        """
        self._over.set()
        there = exchange({one.number for one in self._buckets if one.made})
        everywhere = set.intersection(*there)
        for one in self._buckets:
            if one.made and one.number not in everywhere:
                one.give_up()
        for thread in self._threads:
            thread.join()
        if self._failures:
            raise self._failures[0]

    def _run(self, one: Buckets) -> None:
        try:
            while not one.made:
                # It was not used on this rank. It is made when another rank uses it before all have joined.
                if one.wanted():
                    if not one.usable(haunting=True):
                        return
                elif self._over.wait(_LOOK_S):
                    return
            one.haunt()
        except BaseException as error:
            if one.made:
                self._failures.append(error)


def _store(running: job.Job) -> Any:
    return running.controller(0, "DistributedOptimizer").group.backend._member.part_of_store("buckets")


def _free_number() -> int:
    """What the optimizer that is being made is called on all ranks, which make the same ones in the same order.

    Ranks may have made other optimizers in earlier lives of Horovod. So a life begins with the numbers of those that are kept
    from there, and gives the others anew. Within a life none is given twice: Python's collector drops an optimizer on each rank
    at its own time.
    """
    running = job.current()
    given = _given.get(running)
    if given is None:
        gc.collect()
        given = _given[running] = {one.number for one in _all}
    number = next(one for one in itertools.count() if one not in given)
    given.add(number)
    return number


_all: weakref.WeakSet[Buckets] = weakref.WeakSet()
# By life of Horovod.
_given: weakref.WeakKeyDictionary[job.Job, set[int]] = weakref.WeakKeyDictionary()
# As GradientReducer's default.
_BUCKET_BYTES = 4 << 20
# How soon a rank that has no data at all sees that others begin, and one that waits for them that they have died.
_LOOK_S = 0.05
# How often one that waits for the end of a step looks for stalls.
_STALL_LOOK_S = 1.0


@functools.cache
def _tell_what_is_left_out() -> None:
    """Say which settings of the gradient hooks do nothing under this API, if they are set."""
    read = config.read()
    idle = [f"PENSTOCK_CHECK={check}" for check in read.check if check != "nan"]
    idle += ["PENSTOCK_TUNE"] if read.tune else []
    if idle:
        log.warning(
            "%s: has no effect on hvd.DistributedOptimizer; penstock.torch.ddp_hook and GradientReducer use it "
            "(docs/guide/gradients.md)",
            ", ".join(idle),
        )
