"""Gradients, all-reduced while the backward pass makes them, for models without DistributedDataParallel.

```text
  autograd            a parameter's gradient is complete ──> hook ──> Reducer.submit       (does not block)
  engine                                         which gradients do all ranks have? ──> units ──> all-reduces
  end of the pass     what this rank has none of counts as absent ──> Reducer.flush ──> wait
```
No order is asked of autograd: the ranks agree on what is ready in rounds of their own (AIACC-Training, section V-A;
`crates/penstock-engine/src/readiness.rs` says how), and units are cut from that, alike on all ranks.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from penstock import _core
from penstock.errors import Config as ConfigError
from penstock.torch import backend

__all__ = ["GradientReducer"]


class GradientReducer:
    """Averages the gradients of a model over the ranks of a group, from its construction on, in every backward pass.

    When ``backward()`` returns, ``p.grad`` of every parameter is the average over the ranks, the same bits on all of them.
    A parameter that some rank did not use counts as zeros there; one that no rank used keeps the ``grad`` that it had.
    Gradients are summed in the order of the ring, so a run repeats bit for bit.

    Args:
        model: a module, or an iterable of parameters. Those that require no gradient are left out. All ranks need the same,
            in the same order.
        group: a process group of the penstock backend; the default group if None.
        unit_bytes: what one all-reduce carries. Smaller gradients share a unit, larger ones are split.
        wire: ``torch.float16`` or ``torch.bfloat16`` send float32 gradients in half the bytes: every rank rounds its own
            once, divided by the number of ranks; sums are computed in float32 and rounded once a hop.
        broadcast: give all ranks the parameters (and a module's buffers) of rank 0 now, as DDP does.

    Raises:
        penstock.errors.Config: the group is not of the penstock backend; a parameter is sparse, on another device than CPU,
            or of a dtype that cannot be averaged.
        penstock.errors.Mismatch: (in the first ``backward``) ranks have different parameters.

    Blocking: the constructor until all ranks have called it, ``backward`` until its gradients are reduced.
    Memory: small gradients are copied into units (at most ``unit_bytes`` more than are in flight); large ones are reduced
    where they lie.
    """

    def __init__(
        self,
        model: torch.nn.Module | Iterable[torch.nn.Parameter],
        group: Any = None,
        *,
        unit_bytes: int = 4 << 20,
        wire: torch.dtype | None = None,
        broadcast: bool = True,
    ) -> None:
        parameters = list(model.parameters() if isinstance(model, torch.nn.Module) else model)
        # Autograd makes gradients from the last layer to the first, nearly.
        self._parameters = [parameter for parameter in reversed(parameters) if parameter.requires_grad]
        if not self._parameters:
            raise ConfigError("there is no parameter that requires a gradient")
        for parameter in self._parameters:
            if parameter.device.type != "cpu":
                raise ConfigError(
                    f"a parameter lies on {parameter.device}; gradients are reduced on the CPU only. Use "
                    'DistributedDataParallel over init_process_group("penstock"), which stages CUDA tensors.'
                )
        if unit_bytes <= 0:
            raise ConfigError(f"unit_bytes must be positive, not {unit_bytes}")
        self._backend = backend.of(group)
        if broadcast:
            tensors = [*parameters, *(model.buffers() if isinstance(model, torch.nn.Module) else [])]
            self._broadcast(tensors, group)
        self._rounds = self._backend.sibling("rounds")
        self._units = self._backend.sibling("units")
        self._reducer = _core.Reducer(
            rounds=self._rounds.group,
            units=self._units.group,
            world=self._units.world,
            gradients=[(one.numel(), str(one.dtype).removeprefix("torch.")) for one in self._parameters],
            op="avg",
            unit_bytes=unit_bytes,
            wire=None if wire is None else str(wire).removeprefix("torch."),
            timeout_s=self._backend.timeout_s,
        )
        self._enabled = True
        self._pass: set[int] | None = None
        # A hook must not keep alive what holds it: models come and go.
        this = weakref.ref(self)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(functools.partial(_ready, this, index))
            for index, parameter in enumerate(self._parameters)
        ]

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here leave gradients to this rank, to be averaged with those of the next pass outside."""
        before, self._enabled = self._enabled, False
        try:
            yield
        finally:
            self._enabled = before

    def stats(self) -> dict[str, Any]:
        """Counts since the construction: ``steps``, ``rounds`` and the seconds from their starts to their ends (``round_s``,
        mostly waiting for the slowest rank), ``units``, and the bytes of gradients that were reduced where they lie
        (``in_place_bytes``) or copied into units (``copied_bytes``)."""
        return self._reducer.stats()

    def set_unit_bytes(self, unit_bytes: int) -> None:
        """Change what one all-reduce carries, between two steps, on all ranks at the same ones."""
        self._reducer.set_unit_bytes(unit_bytes)

    def close(self) -> None:
        """Take the hooks off the model and leave the groups. `destroy_process_group` does the latter as well."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._backend.forget_siblings([self._rounds, self._units])

    # ------------------------------------------------------------------ one backward pass

    def _ready(self, index: int, parameter: torch.nn.Parameter) -> None:
        if not self._enabled:
            return
        if self._pass is None:
            self._pass = set()
            # Called when the whole pass has ended, on the thread that called backward().
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        gradient = parameter.grad
        assert gradient is not None, "autograd has just accumulated it"
        if gradient.layout is not torch.strided:
            raise ConfigError(f"a gradient is {gradient.layout}: sparse gradients are not supported; make them dense")
        if not gradient.is_contiguous():
            parameter.grad = gradient = gradient.contiguous()
        self._pass.add(index)
        self._reducer.submit(index, gradient.data_ptr(), keep=gradient.untyped_storage())

    def _finish(self) -> None:
        done, self._pass = self._pass or set(), None
        absent = {}
        for index, parameter in enumerate(self._parameters):
            if index in done:
                continue
            # What an earlier pass left under no_sync counts; it is this pass's gradient.
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
            if parameter.grad is None:
                absent[index] = gradient
            else:
                parameter.grad = gradient
            self._reducer.submit(
                index, gradient.data_ptr(), absent=index in absent, keep=gradient.untyped_storage()
            )
        self._reducer.flush().wait()
        for index, gradient in absent.items():
            if not self._reducer.was_absent(index):
                self._parameters[index].grad = gradient

    def _broadcast(self, tensors: Iterable[torch.Tensor], group: Any) -> None:
        root = 0 if group is None else dist.get_global_rank(group, 0)
        with torch.no_grad():
            works = [dist.broadcast(tensor.detach(), root, group=group, async_op=True) for tensor in tensors]
        for work in works:
            work.wait()


def _ready(this: weakref.ref[GradientReducer], index: int, parameter: torch.nn.Parameter) -> None:
    reducer = this()
    if reducer is not None:
        reducer._ready(index, parameter)
