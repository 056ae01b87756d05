"""DistributedOptimizer: a torch optimizer whose gradients are reduced over all ranks before they are applied."""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from penstock.errors import NotFinite, PenstockError
from penstock.fronts.horovod.buckets import Buckets
from penstock.fronts.horovod.common.exceptions import HorovodInternalError
from penstock.fronts.horovod.common.process_sets import ProcessSet, global_process_set
from penstock.fronts.horovod.torch import handles
from penstock.fronts.horovod.torch.compression import (
    BF16Compressor,
    Compression,
    Compressor,
    FP16Compressor,
    NoneCompressor,
)
from penstock.fronts.horovod.torch.groups import check_groups, group_parameters, name_parameters
from penstock.fronts.horovod.torch.mpi_ops import (
    Adasum,
    Average,
    Sum,
    allreduce_async_,
    grouped_allreduce_async_,
    size,
    sparse_allreduce_async,
    synchronize,
)
from penstock.training import passes

__all__ = ["DistributedOptimizer"]


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Wrap an optimizer: gradients are reduced while ``backward()`` makes them, and ``step()`` waits for them.

    The result is of a class that derives from the optimizer's, with its name and its parameter groups. To change gradients
    before they are applied, as for clipping:

        loss.backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()

    Args:
        optimizer: any torch optimizer. Its state is not taken over.
        named_parameters: mostly ``model.named_parameters()``. All ranks need the same names. None: numbers.
        compression: how gradients are sent: ``Compression.none``, ``.fp16``, ``.bf16``, or a `Compressor` of your own.
        backward_passes_per_step: gradients of so many passes are summed on each rank before they are reduced.
        op: Average, Sum or Adasum. With Adasum what is reduced is what the optimizer would do to the parameters.
        gradient_predivide_factor: with Average, divide by this before the sum, and multiply by it after.
        num_groups: deprecated, use ``groups``.
        groups: reduce gradients together: a number of groups, or lists of parameters; the others go alone. None: as they come,
            which is mostly best.
        sparse_as_dense: make sparse gradients dense to reduce them.
        process_set: whose ranks take part; on others, nothing is reduced.

    Raises:
        ValueError: an argument is not as needed.
    """
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if num_groups != 0:
        warnings.warn(
            "Parameter `num_groups` has been replaced by `groups` and will be removed in v0.23.0.",
            DeprecationWarning,
            stacklevel=2,
        )
        groups = num_groups if groups is None else groups
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    names = name_parameters(optimizer, named_parameters)
    if op == Adasum and size() > 1:
        return _adasum_class(type(optimizer))(
            optimizer.param_groups, names, compression, backward_passes_per_step, process_set
        )
    return _class(type(optimizer))(
        optimizer.param_groups,
        names,
        compression,
        backward_passes_per_step,
        op,
        gradient_predivide_factor,
        groups,
        sparse_as_dense,
        process_set,
    )


def _class(base: type[torch.optim.Optimizer]) -> Any:
    """A class derived from the optimizer's, so that ``isinstance`` and schedulers take it for one of its kind."""

    class Distributed(base):  # type: ignore[misc, valid-type]
        """What `DistributedOptimizer` returns.

        More than 16 fields: most are Horovod's interface, which scripts and its tests read and set.
        """

        def __init__(
            self,
            groups_of_parameters: Any,
            names: dict[torch.Tensor, str],
            compression: type[Compressor],
            backward_passes_per_step: int,
            op: int,
            gradient_predivide_factor: float,
            groups: int | list[list[torch.Tensor]] | None,
            sparse_as_dense: bool,
            process_set: ProcessSet,
        ) -> None:
            super().__init__(groups_of_parameters)
            check_groups(groups)
            self._parameter_names = names
            self.backward_passes_per_step = backward_passes_per_step
            self._allreduce_delay = dict.fromkeys(names, backward_passes_per_step)
            self.op = op
            self.process_set = process_set
            self._reduction = _Reduction(
                names, compression, op, gradient_predivide_factor, sparse_as_dense, process_set
            )
            # What was submitted in this step, or seen: a handle and what its decompression needs.
            self._handles: dict[Any, Any] = {}
            # Something else than a failure has ended the wait for this step: `step` can be called again.
            self._interrupted = False
            self._loss: Any = None
            self._requires_update: set[torch.Tensor] = set()
            self._task = -1
            self._synchronized = False
            self._should_synchronize = True
            self._p_to_group: dict[torch.Tensor, tuple[torch.Tensor, ...]] = {}
            self._group_counts: dict[tuple[torch.Tensor, ...], int] = {}
            if process_set.included() and (size() > 1 or os.environ.get("HOROVOD_ELASTIC") == "1"):
                parameters = list(
                    dict.fromkeys(p for group in self.param_groups for p in group["params"] if p.requires_grad)
                )
                if groups is None:
                    self._reduction.use_buckets(parameters)
                else:
                    for group in group_parameters(parameters, groups, names, process_set):
                        self._p_to_group.update(dict.fromkeys(group, group))
                        self._group_counts[group] = 0
                self._requires_update.update(parameters)
                _call_when_ready(self, parameters)

        def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
            _drop(self._handles)
            self._handles = {}
            self._interrupted = False
            self._reduction.forget()
            self._synchronized = False
            self._should_synchronize = True
            self._allreduce_delay = dict.fromkeys(self._allreduce_delay, self.backward_passes_per_step)
            self._group_counts = dict.fromkeys(self._group_counts, 0)
            super().load_state_dict(*args, **kwargs)

        def set_backward_passes_per_step(self, passes: int) -> None:
            """Change how many passes are summed, between two steps."""
            self.backward_passes_per_step = passes
            self._allreduce_delay = dict.fromkeys(self._allreduce_delay, passes)

        def synchronize(self) -> None:
            """Reduce what is not reduced yet, and block until all gradients are.

            Raises:
                HorovodInternalError: ranks have different gradients, or a rank was lost.
            """
            if not self.process_set.included():
                self._synchronized = True
                return
            for group in self._group_counts:
                # A gradient that this rank lacks is zeros here; Horovod would wait for ever for the group of the others.
                if group not in self._handles:
                    for member in group:
                        self._handles.pop(member, None)
                    self._handles[group] = self._reduction.submit_group(group)
            for parameter in self._requires_update:
                if parameter not in self._p_to_group and self._handles.get(parameter) is None:
                    self._handles[parameter] = self._reduction.submit(parameter)
            with _ends_step(self):
                for key, handle in list(self._handles.items()):
                    self._reduction.finish(key if isinstance(key, tuple) else (key,), handle)
                    self._handles[key] = _FINISHED
                self._reduction.flush()
            self._synchronized = True

        def _begin_anew(self) -> None:
            """Nothing is submitted. After an error of one gradient nobody waits for the others."""
            _drop(self._handles)
            self._interrupted = False
            self._allreduce_delay = dict.fromkeys(self._allreduce_delay, self.backward_passes_per_step)
            self._group_counts = dict.fromkeys(self._group_counts, 0)
            self._handles.clear()

        def _pass_ended(self) -> None:
            if all(
                self._handles.get(parameter) is not None
                for parameter in self._requires_update - self._p_to_group.keys()
            ):
                self._reduction.begin_flush()

        def _pass_raised(self) -> None:
            if self._interrupted or self._reduction.ending:
                return  # an earlier pass of the step has ended well; this one was too many
            # What goes by its name cannot be taken back: zero_grad() says so, as Horovod's does.
            if all(handle is None or handle is _IN_BUCKETS for handle in self._handles.values()):
                self._begin_anew()
                self._reduction.withdraw()

        @contextlib.contextmanager
        def skip_synchronize(self) -> Iterator[None]:
            """``step()`` in here takes gradients as they are: `synchronize` was called."""
            self._should_synchronize = False
            try:
                yield
            finally:
                self._should_synchronize = True

        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            if self._should_synchronize and (closure is None or (self._handles and not self._interrupted)):
                if self._synchronized:
                    warnings.warn(
                        "optimizer.step() called without optimizer.skip_synchronize() context after "
                        "optimizer.synchronize(). This can cause training slowdown. You may want to consider using "
                        "optimizer.skip_synchronize() context if you use optimizer.synchronize() in your code.",
                        stacklevel=2,
                    )
                self.synchronize()
            try:
                if closure is not None:
                    return super().step(functools.partial(self._evaluate, closure))
                _check_reduced(self)
                return super().step()
            finally:
                self._synchronized = False

        def _evaluate(self, closure: Callable[[], Any]) -> Any:
            """Reduce the gradients that the closure makes. (Horovod applies this rank's own.)"""
            loss = self._loss if self._interrupted else closure()
            self._loss = loss
            if self._handles or (self._should_synchronize and not self._synchronized):
                self.synchronize()
            self._synchronized, self._loss = False, None
            _check_reduced(self)
            return loss

        def zero_grad(self, *args: Any, **kwargs: Any) -> None:
            _check_not_pending(self._handles, self._interrupted)
            super().zero_grad(*args, **kwargs)

        def _local_step(self) -> None:
            super().step()

        def _hook(self, parameter: torch.Tensor) -> None:
            if self._interrupted:
                raise AssertionError(_INTERRUPTED)
            task = torch._C._current_graph_task_id()
            if task != self._task:
                self._task = task
                passes.at_end(self._pass_ended, self._pass_raised)
            if self._handles.get(parameter) is not None and self._allreduce_delay[parameter] <= 0:
                raise AssertionError(_TOO_MANY_PASSES)
            assert self._allreduce_delay[parameter] > 0, _TOO_MANY_PASSES
            self._allreduce_delay[parameter] -= 1
            if self._allreduce_delay[parameter] > 0:
                self._handles[parameter] = None
                return
            group = self._p_to_group.get(parameter)
            if group is None:
                self._handles[parameter] = self._reduction.submit(parameter)
                return
            self._group_counts[group] += 1
            self._handles[parameter] = None
            if self._group_counts[group] == len(group):
                self._group_counts[group] = 0
                for member in group:
                    self._handles.pop(member, None)
                self._handles[group] = self._reduction.submit_group(group)

    Distributed.__name__ = Distributed.__qualname__ = base.__name__
    return Distributed


def _adasum_class(base: type[torch.optim.Optimizer]) -> Any:
    """As `_class`, for Adasum: each rank applies its own gradient to a parameter as soon as it has it, and what that changes is
    combined with what it changes on other ranks (Horovod's "delta" optimizer)."""

    class Distributed(base):  # type: ignore[misc, valid-type]
        """What `DistributedOptimizer` returns with ``op=Adasum``.

        More than 16 fields: most are Horovod's interface, which scripts and its tests read and set.
        """

        def __init__(
            self,
            groups_of_parameters: Any,
            names: dict[torch.Tensor, str],
            compression: type[Compressor],
            backward_passes_per_step: int,
            process_set: ProcessSet,
        ) -> None:
            super().__init__(groups_of_parameters)
            self._parameter_names = names
            self._compression = compression
            self.backward_passes_per_step = backward_passes_per_step
            self._allreduce_delay = dict.fromkeys(names, backward_passes_per_step)
            self.op = Adasum
            self.process_set = process_set
            self._handles: dict[torch.Tensor, Any] = {}
            self._interrupted = False
            self._loss: Any = None
            self._starts: dict[torch.Tensor, torch.Tensor] = {}
            self._requires_update: set[torch.Tensor] = set()
            if process_set.included():
                self._requires_update.update(
                    one for group in self.param_groups for one in group["params"] if one.requires_grad
                )
                _call_when_ready(self, self._requires_update)

        def set_backward_passes_per_step(self, passes: int) -> None:
            """Change how many passes are summed, between two steps."""
            self.backward_passes_per_step = passes
            self._allreduce_delay = dict.fromkeys(self._allreduce_delay, passes)

        def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
            self._begin_anew()
            super().load_state_dict(*args, **kwargs)

        def _begin_anew(self) -> None:
            """Nothing is submitted. After an error of one parameter nobody waits for the others."""
            _drop(self._handles)
            self._handles.clear()
            self._interrupted, self._loss = False, None
            self._starts.clear()
            self._allreduce_delay = dict.fromkeys(self._allreduce_delay, self.backward_passes_per_step)

        def synchronize(self) -> None:
            """Nothing: ``step()`` waits."""

        def skip_synchronize(self) -> contextlib.AbstractContextManager[None]:
            raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")

        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            if closure is not None and not self._interrupted:
                with torch.enable_grad():
                    self._loss = closure()
            loss = self._loss
            if not self.process_set.included():
                self._loss = None
                super().step()
                return loss
            _check_reduced(self)
            for parameter in self._requires_update:
                if self._handles.get(parameter) is None:
                    self._handles[parameter] = self._submit(parameter)
            with _ends_step(self):
                for parameter, submitted in list(self._handles.items()):
                    if submitted is not _FINISHED:
                        handle, ctx = submitted
                        change = self._compression.decompress(synchronize(handle), ctx)
                        with torch.no_grad():
                            parameter.copy_(self._starts[parameter] + change)
                        self._handles[parameter] = _FINISHED
            return loss

        def zero_grad(self, *args: Any, **kwargs: Any) -> None:
            _check_not_pending(self._handles, self._interrupted)
            super().zero_grad(*args, **kwargs)

        def _local_step(self) -> None:
            super().step()

        def _hook(self, parameter: torch.Tensor) -> None:
            if self._allreduce_delay[parameter] <= 0:
                raise AssertionError(_TOO_MANY_PASSES)
            self._allreduce_delay[parameter] -= 1
            self._handles[parameter] = self._submit(parameter) if self._allreduce_delay[parameter] == 0 else None

        def _submit(self, parameter: torch.Tensor) -> Any:
            """Step with this parameter alone, and send what that changes."""
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self._starts[parameter] = parameter.detach().clone()
            stashed = [group["params"] for group in self.param_groups]
            for group in self.param_groups:
                group["params"] = [one for one in group["params"] if one is parameter]
            try:
                super().step()
            finally:
                for group, parameters in zip(self.param_groups, stashed, strict=True):
                    group["params"] = parameters
            change = (parameter.detach() - self._starts[parameter]).contiguous()
            compressed, ctx = self._compression.compress(change)
            name = self._parameter_names[parameter]
            return allreduce_async_(compressed, name=name, op=Adasum, process_set=self.process_set), ctx

    Distributed.__name__ = Distributed.__qualname__ = base.__name__
    return Distributed


def _call_when_ready(optimizer: Any, parameters: Iterable[torch.Tensor]) -> None:
    """Call ``optimizer._hook`` with each parameter whose gradient is complete, as long as there is the optimizer.

    Python's collector does not see what a parameter's hooks hold. One that held the optimizer, which holds the parameters, would
    keep both for ever, and the optimizer's channels with them; and it would go on to reduce for an optimizer that nobody steps.
    """
    this = weakref.ref(optimizer)

    def ready(parameter: torch.Tensor) -> None:
        found = this()
        if found is not None:
            found._hook(parameter)

    hooks = [parameter.register_post_accumulate_grad_hook(ready) for parameter in parameters]
    weakref.finalize(optimizer, _remove, hooks).atexit = False


def _drop(submitted: dict[Any, Any]) -> None:
    """Nobody waits any more for what was submitted, a handle and what its decompression needs for each key."""
    handles.drop(one[0] for one in submitted.values() if isinstance(one, tuple) and isinstance(one[0], int))


def _remove(hooks: Iterable[Any]) -> None:
    for hook in hooks:
        hook.remove()


class _Reduction:
    """How a gradient gets from `submit` to `finish`: through buckets where that is possible, else by its name."""

    def __init__(
        self,
        names: dict[torch.Tensor, str],
        compression: type[Compressor],
        op: int,
        predivide: float,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self._names = names
        self._compression = compression
        self._op = op
        self._predivide = predivide
        self._sparse_as_dense = sparse_as_dense
        self._process_set = process_set
        self._buckets: Buckets | None = None

    def use_buckets(self, parameters: Sequence[torch.Tensor]) -> None:
        """Go through buckets if all of these parameters can; all ranks decide alike if their models are alike."""
        wire = _WIRES.get(self._compression, "none of ours")
        possible = (
            self._op in (Average, Sum)
            and self._predivide == 1.0
            and self._process_set is global_process_set
            and wire != "none of ours"
            and parameters
            and all(one.device.type == "cpu" and one.dtype in _REDUCED for one in parameters)
            and (wire is None or all(one.dtype is torch.float32 for one in parameters))
        )
        if possible:
            # Autograd makes gradients from the last layer to the first, nearly.
            ordered: Any = list(reversed(parameters))
            self._buckets = Buckets(
                ordered, [self._names[one] for one in ordered], average=self._op == Average, wire=wire
            )

    def submit(self, parameter: torch.Tensor) -> Any:
        """Start reducing ``parameter.grad``. Does not block, but at the first time."""
        if parameter.grad is None:
            # Another rank may have one. Where that is sparse the ranks do not match, and say so.
            parameter.grad = torch.zeros_like(parameter)
        gradient = parameter.grad
        if not gradient.is_sparse and self._buckets is not None and self._usable():
            self._buckets.submit(parameter)
            return _IN_BUCKETS
        if gradient.is_sparse and not self._sparse_as_dense:
            return (
                sparse_allreduce_async(
                    gradient, name=self._names[parameter], op=self._op, process_set=self._process_set
                ),
                None,
            )
        compressed, ctx = self._compression.compress(gradient.to_dense() if gradient.is_sparse else gradient)
        handle = allreduce_async_(
            compressed.contiguous(),
            name=self._names[parameter],
            op=self._op,
            prescale_factor=1.0 / self._predivide,
            postscale_factor=self._predivide,
            process_set=self._process_set,
        )
        return handle, ctx

    def submit_group(self, group: Sequence[torch.Tensor]) -> Any:
        """Start reducing several parameters' gradients together."""
        for one in group:
            if one.grad is None:
                one.grad = torch.zeros_like(one)
        gradients = [one.grad.to_dense() if one.grad.is_sparse else one.grad for one in group if one.grad is not None]
        compressed, ctxs = zip(*(self._compression.compress(gradient) for gradient in gradients), strict=True)
        handle = grouped_allreduce_async_(
            [one.contiguous() for one in compressed],
            name=self._names[group[0]],
            op=self._op,
            prescale_factor=1.0 / self._predivide,
            postscale_factor=self._predivide,
            process_set=self._process_set,
        )
        return handle, ctxs

    def finish(self, parameters: Sequence[torch.Tensor], submitted: Any) -> None:
        """Block until these gradients are reduced, and put them where they belong."""
        if submitted is _IN_BUCKETS or submitted is _FINISHED:
            return
        handle, ctx = submitted
        outputs = handle() if callable(handle) else synchronize(handle)
        if not isinstance(outputs, tuple):
            outputs, ctx = (outputs,), (ctx,)
        for parameter, output, own in zip(parameters, outputs, ctx, strict=True):
            gradient = parameter.grad
            assert gradient is not None, "it was submitted"
            reduced = self._compression.decompress(output, own) if not output.is_sparse else output
            with torch.no_grad():
                if gradient.is_sparse:
                    reduced = reduced if reduced.is_sparse else reduced.to_sparse()
                    gradient.zero_().add_(reduced)
                elif gradient.data_ptr() != reduced.data_ptr():
                    gradient.copy_(reduced.view_as(gradient))

    def begin_flush(self) -> None:
        """Everything is submitted, and the pass has ended. Does not block."""
        if self._buckets is not None:
            self._buckets.begin_flush()

    @property
    def ending(self) -> bool:
        """Whether `begin_flush` has ended the step already."""
        return self._buckets is not None and self._buckets.ending

    def flush(self) -> None:
        """End the step: block until what went through buckets is reduced."""
        if self._buckets is None or not self._usable():
            return
        try:
            self._buckets.flush()
        except NotFinite:
            raise  # as it is: a step that is made again would have the same gradients
        except PenstockError as error:
            raise HorovodInternalError(str(error)) from error

    def withdraw(self) -> None:
        """The pass has raised. Does not block."""
        if self._buckets is not None:
            self._buckets.withdraw()

    def forget(self) -> None:
        """What was submitted is not wanted any more."""
        if self._buckets is not None:
            self._buckets.abandon()

    def _usable(self) -> bool:
        assert self._buckets is not None, "the caller has looked"
        try:
            return self._buckets.usable()
        except RuntimeError as error:
            raise HorovodInternalError(str(error)) from error


def _check_reduced(optimizer: Any) -> None:
    """Raise ValueError if a gradient is about to be applied that is not reduced."""
    if size() == 1 or not optimizer.process_set.included():
        return
    for at, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.grad is not None and parameter not in optimizer._requires_update:
                name = optimizer._parameter_names.get(parameter, f"a parameter of group {at}")
                raise ValueError(
                    f"the gradient of {name} is this rank's own: it required no gradient, or was not in the optimizer, when "
                    "DistributedOptimizer was called. Unfreeze or add parameters first, or make the distributed optimizer anew."
                )


@contextlib.contextmanager
def _ends_step(optimizer: Any) -> Iterator[None]:
    """The end of a step: the optimizer begins anew, also after a failure. What something else has interrupted stays as it is, and
    can be completed."""
    try:
        yield
    except BaseException as error:
        optimizer._interrupted = _is_interruption(error, optimizer._handles)
        if not optimizer._interrupted:
            optimizer._begin_anew()
        raise
    optimizer._begin_anew()


def _is_interruption(error: BaseException, submitted: dict[Any, Any]) -> bool:
    """Whether something else than a failure has ended the wait for what was submitted, so that it can be waited for again."""
    return not isinstance(error, (HorovodInternalError, PenstockError)) and all(
        handles.is_known(one[0]) for one in submitted.values() if isinstance(one, tuple) and isinstance(one[0], int)
    )


def _check_not_pending(handles: dict[Any, Any], interrupted: bool) -> None:
    if interrupted:
        raise AssertionError(_INTERRUPTED)
    if handles:
        raise AssertionError(
            "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
            "optimizer.synchronize(). This is prohibited as it can cause a race condition."
        )


_TOO_MANY_PASSES = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
    "backward_passes_per_step to accumulate gradients locally."
)
_INTERRUPTED = (
    "The last step was interrupted while it waited for other ranks, which go on with it: call optimizer.step() once more, before "
    "anything else, and this rank completes it, too."
)
_IN_BUCKETS = object()
# Reduced, and back in its gradient.
_FINISHED = object()
_REDUCED = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
# What buckets send for each compressor.
_WIRES: dict[type[Compressor], Any] = {
    NoneCompressor: None,
    FP16Compressor: torch.float16,
    BF16Compressor: torch.bfloat16,
}
