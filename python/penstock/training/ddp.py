"""Gradients of a DistributedDataParallel model, reduced while the backward pass makes them.

The hook reduces gradients beside DDP's own buckets, by `GradientReducer`: DDP still collects gradients in them, but
the gradients that it gets back were reduced in our buckets, each as soon as all ranks had it. *Why not reduce DDP's
buckets?* The last of them (25 MB) is full when the pass ends, and smaller ones can only be had when DDP is made.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from penstock import renamed
from penstock.errors import Config as ConfigError
from penstock.runtime import urgency
from penstock.training import tuning
from penstock.training.gradients import GradientReducer
from penstock.training.passes import BackwardPass
from penstock.training.steps import States

__all__ = ["ddp_hook"]


@renamed.arguments(unit_bytes="bucket_bytes")
def ddp_hook(
    model: torch.nn.parallel.DistributedDataParallel,
    *,
    bucket_bytes: int = 4 << 20,
    wire: torch.dtype | None = None,
    error_feedback: bool = False,
    priority: int = urgency.USUAL,
    tune: tuning.Tune = None,
) -> GradientReducer:
    """Reduce the gradients of a DDP model as soon as all ranks have them, instead of one DDP bucket after the other.

    Everything else is DDP's as before: ``no_sync``, unused parameters, buffers. DDP waits for all averages at the end of
    ``backward``: for steps that overlap use a `GradientReducer` in DDP's place. Two things DDP cannot do with it:
    ``static_graph`` and ``join``, for both of which it hands over its buckets while no backward pass runs. The model must have
    been made with a group of the penstock backend.

    What is copied: with ``gradient_as_bucket_view=True`` (and gradients that are zeroed, not set to None) DDP copies nothing,
    and large gradients are reduced where they lie in DDP's buckets. So are small ones, where those that share one of our buckets
    follow each other there; others are copied into our buckets and back, as by `GradientReducer`, and with ``wire`` all are.
    Without views DDP also copies each gradient into its own bucket once, as it does without a hook.

    Args:
        model: not in the middle of a backward pass, and without another communication hook.
        bucket_bytes, wire, error_feedback, priority, tune: as for `GradientReducer`.

    Returns:
        the reducer, for `GradientReducer.stats` and the like; the model keeps it alive.

    Raises:
        penstock.errors.Config: as `GradientReducer`; the model has ``static_graph``. In ``backward``: it is within ``join``.
    """
    reducer = _DDPReducer(
        model, bucket_bytes=bucket_bytes, wire=wire, error_feedback=error_feedback, priority=priority, tune=tune
    )
    try:
        model.register_comm_hook(reducer, _ddp_bucket_is_full)
    except BaseException:
        reducer.close()
        raise
    return reducer


class _DDPReducer(GradientReducer):
    """Fills DDP's buckets with gradients that are reduced already.

    More than 16 fields: the reducer's 16, the model, and the buckets to fill.
    """

    _averages_sparse = False  # DDP hands them over in buckets of their own
    _submits_nested = True  # under DDP each gradient is made once a pass

    def __init__(self, model: torch.nn.parallel.DistributedDataParallel, **options: Any) -> None:
        if not isinstance(model, torch.nn.parallel.DistributedDataParallel):
            raise ConfigError(f"ddp_hook takes a DistributedDataParallel model, not {type(model).__name__}")
        self._model = weakref.ref(model)
        self._check_passes()
        super().__init__(model, model.process_group, broadcast=False, **options)
        self._has_last = False
        self._full: list[tuple[dist.GradBucket, torch.futures.Future[torch.Tensor]]] = []

    def _keep(self) -> None:
        """Nothing: the DDP model keeps the reducer, and may end before its parameters."""

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """DDP's."""
        model = self._model()
        with contextlib.nullcontext() if model is None else model.no_sync():
            yield

    def ddp_bucket_is_full(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """DDP waits for the future after the end of the pass, which was queued before."""
        self._has_last = bucket.is_last()
        if not self._end.alive or bucket.buffer().is_sparse:
            work = dist.all_reduce(bucket.buffer(), dist.ReduceOp.AVG, group=self._group, async_op=True)
            return work.get_future().then(lambda done: done.value()[0])
        self._check_passes()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self._full.append((bucket, future))
        return future

    def _keeps_back(self, parameter: torch.nn.Parameter) -> None:
        # A step on these is this rank's own, as it is under DDP without the hook.
        self._steps.passes += 1

    def _averages_itself(self, model: Any) -> bool:
        return False  # the hook takes its place

    def _ignored(self, model: Any) -> set[torch.nn.Parameter]:
        # DDP ignores names; what is ignored is each rank's own.
        names = model.parameters_to_ignore
        return {one for name, one in model.module.named_parameters(remove_duplicate=False) if name in names}

    def _is_to_come(self, index: int, gradient: torch.Tensor | None) -> bool:
        return False  # DDP delivers

    def _check_left_out(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Nothing: DDP leaves such gradients to each rank."""

    def _check_unchanged(self, current: BackwardPass) -> None:
        """Nothing: DDP moves gradients into its buckets, and writes to those."""

    def _synchronises(self) -> bool:
        model = self._model()
        return model is not None and bool(model.require_backward_grad_sync)

    def _begin(self) -> BackwardPass:
        if self._pass is None:
            self._check_passes()
        return super()._begin()

    def _ends_with(self, current: BackwardPass, task: int) -> bool:
        # DDP waits at the end of the pass that has filled its last bucket, nested or not.
        return super()._ends_with(current, task) or (self._has_last and task in current.nested)

    def _check_passes(self) -> None:
        """Refuse what makes DDP hand over its buckets outside of the backward pass: it would wait for ever."""
        model = self._model()
        if model is not None and model.static_graph:
            raise ConfigError(
                "ddp_hook does not work with static_graph: DDP then hands over its buckets after the first backward pass, not "
                "in it. Leave static_graph out, or the hook."
            )
        if model is not None and model._join_config.enable:
            raise ConfigError(
                "ddp_hook does not work within model.join(): ranks that are done have no backward pass. Give all ranks as many "
                "batches, or leave the hook out."
            )

    def _abandon(self, grace_s: float = 0) -> None:
        self._full, self._has_last = [], False
        super()._abandon(grace_s)

    def _deliver(self, current: BackwardPass) -> None:
        full, self._full, self._has_last = self._full, [], False
        current.states = States()
        if not full:
            super()._deliver(current)
        for bucket, future in full:
            for parameter, place in zip(bucket.parameters(), bucket.gradients(), strict=True):
                # DDP has moved a gradient that was not in its bucket there after our hook: the copy was made while it
                # was being reduced, and is replaced.
                gradient = current.handed[self._trained.index[parameter]]
                if gradient.data_ptr() != place.data_ptr():
                    place.copy_(gradient)
            future.set_result(bucket.buffer())


def _ddp_bucket_is_full(this: _DDPReducer, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return this.ddp_bucket_is_full(bucket)


# DDP compares the annotations with types, and here they are texts.
_ddp_bucket_is_full.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
