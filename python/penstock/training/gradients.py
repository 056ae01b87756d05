"""Gradients, all-reduced while the backward pass makes them.

```text
  autograd            a parameter's gradient is complete ──> hook ──> Reducer.submit       (does not block)
  engine                                         which gradients do all ranks have? ──> buckets ──> all-reduces
  end of the pass     what this rank has none of counts as absent ──> Reducer.flush ──> wait
```
No order is asked of autograd: the ranks agree on what is ready in rounds of their own (AIACC-Training, section V-A;
`crates/penstock-core/src/readiness.rs` says how), and the engine cuts buckets from that, alike on all ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any

import torch
import torch.distributed as dist

from penstock import _core, renamed
from penstock.errors import Config as ConfigError
from penstock.errors import PenstockError
from penstock.runtime import config, process, urgency
from penstock.torch import backend
from penstock.torch.gather import gatherer
from penstock.training import checks, deferral, optimizer_steps, ownership, passes, sparse, tuning
from penstock.training.broadcast import broadcast_values
from penstock.training.passes import BackwardPass
from penstock.training.slots import Slots
from penstock.training.step_checks import CALL_AVERAGE, StepChecks
from penstock.training.steps import SHARED, Steps
from penstock.training.trained import Trained
from penstock.training.tune import Setting, Tuner

__all__ = ["GradientReducer"]

log = logging.getLogger("penstock")


@renamed.arguments(unit_bytes="bucket_bytes")
class GradientReducer(StepChecks):
    """Averages the gradients of a model over the ranks of a group, from its construction on, in every backward pass.
    The model and its parameters keep it alive; when it is collected with them, it closes.

    When ``backward()`` returns, ``p.grad`` of every parameter is the average over the ranks, the same bits on all of them.
    A parameter that some rank did not use counts as zeros there; one that no rank used keeps the ``grad`` that it had.
    With three ranks or more, runs may differ in the last bits: the order of a sum depends on a gradient's place in its bucket,
    and that on which gradients were ready together.

    Args:
        model: a module, or an iterable of parameters. Those that require no gradient are left out (an error names them if they
            have one later), and a duplicate (a tied weight) counts once. All ranks need the same, in the same order and memory
            format.
        group: a process group of the penstock backend; the default group if None.
        bucket_bytes: the most that one all-reduce (a bucket) carries. Smaller gradients share a bucket, larger ones are split.
            The first and last buckets of a pass are smaller, where that pays on this network.
        wire: ``torch.float16`` or ``torch.bfloat16`` send float32 gradients in half the bytes: every rank rounds its own
            once, divided by the number of ranks; sums are computed in float32 and rounded once a hop.
        error_feedback: with ``wire``: keep what that rounding takes off a gradient here, and add it to the next one, so that
            what is too small for 16 bits arrives some steps later instead of never (Seide et al. 2014; Karimireddy et al.
            2019). Four bytes a parameter. The kept remainders belong to this object: they begin with zeros, are no part of a
            checkpoint, and are lost with the reducer, and when a step fails (docs/guide/compression.md).
        priority: how urgent gradients are (docs/guide/priority.md): 0 the most, 255 the least. Each rank sends by its own. Sparse
            gradients have the usual one. With ``optimizer`` a bucket's is 1 to 16 higher, the first layers' the least; what is
            urgent (below 128) stays so.
        broadcast: give all ranks the parameters (and a module's buffers) of rank 0 now, as DDP does.
        optimizer: the model's, to let gradients arrive during the next step (docs/guide/gradients.md, "Steps that overlap"):
            ``backward`` returns before they are there, and what ``step()`` does not find is stepped when it is used.
        tune: find out how gradients travel best, during the first steps of training (docs/guide/tune.md). True, or
            `penstock.tune.Options`; a `penstock.tune.Setting`, or a tuner's record or its file, to pin a choice; False. None:
            what the setting PENSTOCK_TUNE says. Rank 0's counts for all. With ``wire`` the tuner may still send gradients as they
            are.

    Raises:
        penstock.errors.Config: the group is not of the penstock backend; a parameter is on another device than CPU, of a dtype
            that cannot be averaged, or of another reducer that was not closed; ``tune`` makes no sense. In ``backward``: a
            gradient is unexpectedly sparse (below); or the model was unfrozen, or grew, after this object was made (also in an
            optimizer's step).
        penstock.errors.Mismatch: ranks have different parameters; nothing was sent, and the group lives. In ``backward``: the
            pass of another rank raised in the middle; all ranks have dropped the step, and the group lives.

    A pass that raises is withdrawn: set its gradients to zero, and the next pass works. docs/guide/gradients.md says what other
    ranks see of it. A pass that reaches no parameter at all has no hook to run in; it takes part when an optimizer over
    these parameters makes its step outside of `no_sync`, or in `average`, with what passes under `no_sync` have left, or zeros.

    Blocking: the constructor until all ranks have called it, ``backward`` until its gradients are reduced.
    Checks (PENSTOCK_CHECK, docs/guide/debugging.md): with ``nan`` and ``mismatch`` ``backward`` raises
    `penstock.errors.NotFinite` and `penstock.errors.Diverged` on all ranks; with ``slow`` the log names the rank that keeps the
    others waiting.
    Sparse gradients: those of a module's ``nn.Embedding`` and ``nn.EmbeddingBag`` with ``sparse=True`` stay sparse. They are
    averaged at the end of the pass, one by one (docs/design/algorithms.md); ``wire``, tuner and check for NaN leave them alone.
    Memory: small gradients are copied into buckets (at most ``bucket_bytes`` more than are in flight); large ones are not.
    """

    _averages_sparse = True
    _submits_nested = False
    _tapers = True  # `penstock bench training` compares with even buckets

    def __init__(
        self,
        model: torch.nn.Module | Iterable[torch.nn.Parameter],
        group: Any = None,
        *,
        bucket_bytes: int = 4 << 20,
        wire: torch.dtype | None = None,
        error_feedback: bool = False,
        priority: int = urgency.USUAL,
        broadcast: bool = True,
        tune: tuning.Tune = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self._trained = trained = Trained(model, self._ignored(model), with_sparse=self._averages_sparse)
        if bucket_bytes <= 0:
            raise ConfigError(f"bucket_bytes must be positive, not {bucket_bytes}")
        urgency.checked(priority)
        if self._averages_itself(model):
            raise ConfigError("a DistributedDataParallel model averages its gradients itself: call ddp_hook(model)")
        if optimizer is not None:
            deferral.check(optimizer, trained.dense)
        trained.check_apart(lambda: [other._trained for other in list(_alive.values())])
        self._group = group
        self._backend = backend.of(group)
        agreed = tuning.agree(tune, group)
        tensors: list[tuple[str, torch.Tensor]] = list(trained.listed)
        if broadcast and isinstance(model, torch.nn.Module):
            tensors += model.named_buffers()
        checks.check_same_tensors(tensors, group)
        if broadcast:
            broadcast_values((tensor for _, tensor in tensors), self._backend)
        with contextlib.ExitStack() as ends:
            self._build(
                model,
                ends,
                agreed,
                bucket_bytes=bucket_bytes,
                wire=wire,
                error_feedback=error_feedback,
                priority=urgency.engine_priority(priority),
                optimizer=optimizer,
            )
            self._end = weakref.finalize(self, ends.pop_all().close)
        self._end.atexit = False
        self._keep()
        optimizer_steps.hook(_alive)
        _alive[self._number] = self

    def _build(
        self,
        model: torch.nn.Module | Iterable[torch.nn.Parameter],
        ends: contextlib.ExitStack,
        agreed: Mapping[str, Any],
        *,
        bucket_bytes: int,
        wire: torch.dtype | None,
        error_feedback: bool,
        priority: int,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        """Open the channels and register the hooks. What undoes that goes to ``ends``, which refers to no part of this object."""
        trained = self._trained
        names = ["rounds", "buckets", *(["tuning"] if "options" in agreed or "setting" in agreed else [])]
        channels = []
        # One after the other: ranks wait for each other here, so what may fail on one of them comes before or after.
        for name in names:
            channels.append(self._backend.channel(name, aggregate=name == "buckets"))
            ends.callback(self._backend.close_channels, channels[-1:])
        self._buckets = channels[1]
        asked = config.read().check
        process.requests.take()
        self._slots = Slots(trained.dense, trained.names)
        everybody = dist.get_process_group_ranks(dist.group.WORLD if self._group is None else self._group)
        self._checks = checks.PassChecks(
            asked, gatherer(self._buckets, self._backend.timeout_s), self._buckets.rank, everybody
        )
        wire_name = None if wire is None else str(wire).removeprefix("torch.")
        self._reducer = _core.Reducer(
            rounds=channels[0].group,
            buckets=self._buckets.group,
            rank=self._buckets.rank,
            world=self._buckets.world,
            gradients=self._slots.described(),
            op="avg",
            bucket_bytes=bucket_bytes,
            wire=wire_name,
            error_feedback=error_feedback,
            check_finite="nan" in asked,
            priority=priority,
            last_first=optimizer is not None,
            tapers=self._tapers,
            timeout_s=self._backend.timeout_s,
        )
        self._setting = Setting(
            streams=agreed["streams"],
            bucket_bytes=bucket_bytes,
            algorithm=agreed["algorithm"] or tuning.AUTO,
            compression=next(name for name, dtype in tuning.WIRES.items() if dtype == wire_name),
        )
        self._tuning: tuning.Tuning | None = None
        if len(channels) > 2:
            self._tuning = tuning.Tuning(
                agreed,
                self._reducer,
                self._buckets,
                channels[2],
                self._group,
                default=self._setting,
                model=model if isinstance(model, torch.nn.Module) else trained.dense,
                timeout_s=self._backend.timeout_s,
            )
            ends.callback(self._tuning.close)
        needs = {"PENSTOCK_CHECK is set": asked, "gradients are sparse": trained.sparse}
        rank = self._buckets.rank
        self._deferral = deferral.made(self._backend, rank, self._reducer, trained.dense, optimizer, ends, needs)
        self._enabled = True
        self._pass: BackwardPass | None = None
        # Completes when the operations of a pass that raised have ended.
        self._withdrawn: _core.Ticket | None = None
        self._steps = Steps()
        self._number = next(_numbers)
        # Python's collector does not see what torch's hooks refer to, so they do not keep this object.
        this = weakref.ref(self)
        for index, parameter in enumerate(trained.dense):
            ready: Callable[[torch.nn.Parameter], None] = functools.partial(GradientReducer._ready, this, index)
            if not self._checks.slow:
                ready = self._slots.hook(self._reducer, index, ready)
            ends.callback(parameter.register_post_accumulate_grad_hook(ready).remove)
        for parameter in trained.sparse:
            sparse_ready = functools.partial(GradientReducer._sparse_ready, this)
            ends.callback(parameter.register_post_accumulate_grad_hook(sparse_ready).remove)

    def _keep(self) -> None:
        # Parameters, and the module, which may get others, keep this object alive; Python collects all together.
        ownership.keep(self, self._trained.owners())

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here leave gradients to this rank, to be averaged with those of the next pass outside. If there is
        none, `average` averages them, or else a step of an optimizer outside; a step in here is this rank's own."""
        before, self._enabled = self._enabled, False
        try:
            yield
        finally:
            self._enabled = before

    def average(self) -> None:
        """Average what passes under `no_sync` have left, and take part if this rank's passes have reached no parameter since the
        last step of an optimizer, or the last call; does nothing where all is averaged. All ranks call it after a step's last
        pass, outside `no_sync`. A step of an optimizer does the same; call this where gradients are changed before that
        (``clip_grad_norm_``, ``GradScaler.unscale_``).

        Blocks until the averages are there. Raises what ``backward`` does, and `penstock.errors.Config` where what passes under
        `no_sync` have left was changed since.
        """
        if not self._synchronises():
            return
        steps = self._steps
        if self._lacks_average(steps.is_stepped() or steps.passes == steps.asked, self._trained.all):
            self._average_rest()
        steps.asked = steps.passes

    def wait(self) -> None:
        """With ``optimizer``: block until all gradients have arrived and all steps are made. Raises what ``backward`` does."""
        if self._deferral is not None:
            self._deferral.finish()

    def stats(self) -> dict[str, Any]:
        """Counts since the construction: ``steps``, ``rounds`` and the seconds from their starts to their ends (``round_s``,
        mostly waiting for the slowest rank), ``buckets``, and the bytes of gradients that were reduced where they lie
        (``in_place_bytes``) or copied into buckets (``copied_bytes``). With PENSTOCK_CHECK=slow also ``slow``: what each rank
        did in the last steps, and who keeps the others waiting (`penstock.training.checks.SlowCheck.stats`)."""
        return self._reducer.stats() | self._checks.stats()

    @property
    def setting(self) -> Setting:
        """The setting in force. Algorithm ``auto``: chosen by size and hosts."""
        return self._setting if self._tuning is None else self._tuning.setting

    @property
    def tuner(self) -> Tuner | None:
        """The tuner, which tries settings or holds one (`penstock.tune.Tuner`): ``tuner.explain()`` describes the trials and the
        choice, ``tuner.record()`` has all of them. None without ``tune``."""
        return None if self._tuning is None else self._tuning.tuner

    def apply(self, setting: Setting) -> None:
        """Put a setting in force, on all ranks between the same two steps. Its streams are those to each rank, for everything
        that this process sends there; a number above those that are open means all of them. With ``optimizer``, waits for
        gradients that are on their way, as `wait` does.

        Raises:
            penstock.errors.Bug: a pass is under way. Nothing has changed.
            penstock.errors.Config: the gradients or the group do not support the setting; a tuner is in charge.
        """
        if self._tuning is not None:
            raise ConfigError("a tuner is in charge of this; make the reducer without tune")
        if self._pass is None:
            self.wait()
        tuning.apply(self._reducer, setting)
        self._setting = setting

    def set_bucket_bytes(self, bucket_bytes: int) -> None:
        """`apply` with another bucket size."""
        self.apply(dataclasses.replace(self.setting, bucket_bytes=bucket_bytes))

    def set_unit_bytes(self, unit_bytes: int) -> None:  # the old name
        renamed.warn("set_unit_bytes", "set_bucket_bytes")
        self.set_bucket_bytes(unit_bytes)

    def exclude_pause(self) -> None:
        """Tell the tuner that the time since the last step was not all training: call it after an evaluation, a checkpoint or
        any other pause, on any rank. The step that is under way is then not timed, on no rank. Costs nothing."""
        if self._tuning is not None:
            self._tuning.exclude_pause()

    def close(self) -> None:
        """Remove the hooks from the model and close the channels. `destroy_process_group` does the latter, too. DDP then reduces
        its own buckets, each in one all-reduce."""
        if self._deferral is not None:
            self._deferral.settle()
        _alive.pop(self._number, None)
        ownership.release(self, self._trained.owners())
        self._end()

    @staticmethod
    def _ready(this: weakref.ref[GradientReducer], index: int, parameter: torch.nn.Parameter) -> None:
        """The hook of a parameter, where `_core.ReadyHook` does not know what to do: at the first gradient of a pass, for one."""
        self = this()
        if self is None:
            return
        current, task = self._pass, _task()
        if current is None or task != current.task:
            if not self._synchronises():
                self._keeps_back(parameter)
                return
            current = self._take_part()
            if task != current.task and not self._submits_nested:
                # Other nested passes may add to this gradient: it is submitted at the end of the outermost.
                if index in current.handed:
                    raise ConfigError(
                        f"rank {self._buckets.rank}: the gradient of {self._trained.names[index]} was complete in a pass, and a "
                        "pass nested in that one (a checkpoint with use_reentrant=True) has added to it while it was being "
                        "averaged. Use use_reentrant=False"
                    )
                return
        gradient = parameter.grad
        if gradient is None:
            name = self._trained.names[index]
            raise ConfigError(
                f"the gradient of {name} is gone: a hook that was registered before the reducer took it away"
            )
        if self._checks.slow:
            self._checks.slow.gradient()
        handed, address, is_alone = self._slots.submit(self._reducer, index, gradient)
        current.handed[index] = handed
        if handed is gradient:
            states = current.states
            states.addresses[index] = address
            if is_alone:
                states.versions[index] = gradient._version
            else:
                states.versions[index] = SHARED
                current.shared.append(index)

    @staticmethod
    def _sparse_ready(this: weakref.ref[GradientReducer], parameter: torch.nn.Parameter) -> None:
        """The hook of a parameter whose gradients are sparse. They are reduced at the end of the pass, in the parameters' order:
        autograd's may differ between ranks."""
        self = this()
        if self is None:
            return
        if self._synchronises():
            self._take_part()
        else:
            self._keeps_back(parameter)

    def _keeps_back(self, parameter: torch.nn.Parameter) -> None:
        """A gradient was made under no_sync. The next pass outside averages it, or the next step outside."""
        self.wait()
        self._steps.keep(parameter)

    def _take_part(self) -> BackwardPass:
        """A gradient of a pass is ready: make sure that the pass gets its end."""
        if self._pass is None:
            self._steps.passes += 1
            self._begin()
        self._follow(_task())
        assert self._pass is not None
        return self._pass

    def _follow(self, task: int, ended: int = 0) -> None:
        """Await the end of autograd's pass of this number, unless that is done. Gradients are averaged once, at the end of the
        outermost pass: ranks may have different numbers of nested passes.

        Args:
            ended: how many passes nested in it have just ended.
        """
        current = self._pass
        if current is None or task == current.task or task in current.nested:
            return
        # Autograd calls the callback on the thread that called backward(), or drops it if the pass raises.
        if passes.is_nested(after=ended):
            current.nested.add(task)
            passes.at_end(functools.partial(self._end_pass, task), self._abandon, outer_goes_on=self._nested_is_over)
        else:
            current.task = task
            passes.at_end(functools.partial(self._end_pass, task), self._abandon)
            self._slots.follow(current)

    def _nested_is_over(self) -> None:
        """A nested pass has ended. The outer one may reach no parameter itself."""
        task = _task()
        if task != -1:
            self._follow(task, ended=1)

    def _synchronises(self) -> bool:
        return self._enabled

    def _begin(self) -> BackwardPass:
        self.wait()
        if self._withdrawn is not None:
            self._withdrawn.wait()
            self._withdrawn = None
        if self._pass is None:
            if self._tuning is not None:
                self._tuning.begin()
            self._pass = BackwardPass()
        return self._pass

    def _submit_rest(self, has_any: bool = True) -> None:
        """Submit what the pass has not reached. What an earlier pass left under no_sync counts: it is this pass's gradient.

        Args:
            has_any: whether this rank has gradients at all; if not, all are absent.
        """
        assert self._pass is not None
        handed, absent = self._pass.handed, self._pass.absent
        if len(handed) == len(self._trained.dense):
            return
        for index, parameter in enumerate(self._trained.dense):
            if index in handed:
                continue
            gradient = parameter.grad if has_any else None
            if gradient is None:
                absent.add(index)
                gradient = self._slots.zeros(index)
            elif self._checks.slow:
                self._checks.slow.gradient()
            handed[index], *_ = self._slots.submit(self._reducer, index, gradient, index in absent)

    def _end_pass(self, task: int) -> None:
        together = {one._number: one for one in [self, *_alive.values()]}
        # In the order in which they were made, which is the same on all ranks.
        passes.end([one for _, one in sorted(together.items()) if one._pass and one._ends_with(one._pass, task)])

    def _ends_with(self, current: BackwardPass, task: int) -> bool:
        """Whether a pass, as this reducer sees it, ends with autograd's of this number."""
        return task == current.task

    def _prepare(self) -> None:
        """The pass has ended: make the last checks, and submit the last gradients."""
        assert self._pass is not None
        self._check_left_out(self._trained.frozen)
        self._check_unchanged(self._pass)
        self._submit_rest()

    def _flush(self) -> _core.Ticket:
        """Let the step become complete. From here on it cannot be withdrawn. Does not block."""
        assert self._pass is not None
        self._pass.flushed = self._reducer.flush()
        return self._pass.flushed if self._deferral is None else self._reducer.agreed()

    def _finish(self) -> None:
        """All gradients are averaged, or will be: deliver them."""
        current = self._pass
        assert current is not None
        try:
            if self._deferral is not None:
                self._deferral.begin(current)
            averages = sparse.average(self._trained, self._group)
            self._steps.kept.clear()
            if self._checks.slow:
                self._checks.slow.passed(self._reducer.stats()["round_s"])
            self._deliver(current)
            if self._checks.is_compared:
                trained = self._trained
                handed = (current.handed[at] for at in range(len(trained.names)))
                rows = zip(trained.names, trained.dense, handed, strict=True)
                self._checks.compare([*list(rows)[::-1], *averages], self._reducer.stats()["steps"])
            if self._tuning is not None:
                self._tuning.end()
        except PenstockError:
            self._take_pass()  # it raises on all ranks
            raise
        self._take_pass()

    def _take_pass(self) -> BackwardPass | None:
        current, self._pass = self._pass, None
        self._slots.end()
        return current

    def _check_unchanged(self, current: BackwardPass) -> None:
        """Raise if a gradient was changed while it was being averaged: what then comes out is right on no rank."""
        index = _core.first_changed(self._trained.dense, current.handed, current.states.versions)
        if index is not None:
            raise ConfigError(
                f"rank {self._buckets.rank}: the gradient of {self._trained.names[index]} was changed in the backward pass "
                "after it was complete, while it was being averaged: by a hook, for one. Register hooks that change "
                "gradients before the reducer is made, or change gradients after backward()"
            )

    def _abandon(self, grace_s: float = 0) -> None:
        """The pass has raised: drop its step. Blocks for ``grace_s`` at most, since the exception is on its way to the script.

        Args:
            grace_s: how long to wait for the failure of a step that cannot be withdrawn any more.
        """
        current = self._take_pass()
        if current is None:
            return
        if current.flushed is not None:
            self._break_off(current.flushed, grace_s)
            return
        submitted = current.handed
        self._withdrawn = self._reducer.withdraw()
        if not self._steps.has_warned:
            self._steps.has_warned = True
            log.warning(
                "rank %d: a backward pass raised after %d of %d gradients; they are withdrawn, and some of them may hold "
                "averages. Set gradients to zero before the next pass. (Reported once; docs/guide/gradients.md says what other "
                "ranks see.)",
                self._buckets.rank,
                len(submitted),
                len(self._trained.dense),
            )

    def _break_off(self, flushed: _core.Ticket, grace_s: float) -> None:
        """This rank does not deliver averages by which other ranks may step: fail on all ranks, unless they have failed."""
        has_failed = False
        try:
            flushed.wait(grace_s)
        except PenstockError:
            has_failed = True
        finally:
            if not has_failed:
                self._buckets.group.abort(
                    f"an exception interrupted rank {self._buckets.rank} at the end of a backward pass, where it waited for "
                    "averages by which other ranks may have stepped. close() the reducer and make another one on all ranks (with "
                    "DDP wrap the module anew): they go on with rank 0's parameters. Give all ranks its optimizer's state, too"
                )

    def _all_averaged(self) -> list[Set[torch.nn.Parameter]]:
        return [reducer._trained.all for reducer in list(_alive.values())]

    def _ignored(self, model: Any) -> set[torch.nn.Parameter]:
        return set()  # parameters that are not to be averaged

    def _averages_itself(self, model: Any) -> bool:
        return isinstance(model, torch.nn.parallel.DistributedDataParallel)

    def _average_rest(self) -> bool:
        """Average what passes under no_sync have left, or nothing if they have left none.

        Returns: whether some rank had a gradient.

        Raises:
            penstock.errors.Config: what they have left was changed since; nothing was sent.
        """
        changed = self._steps.changed_since_kept()
        if changed is not None:
            index = self._trained.index.get(changed)
            name = "a sparse weight" if index is None else self._trained.names[index]
            raise ConfigError(
                f"rank {self._buckets.rank}: the gradient of {name} was changed (by clip_grad_norm_, for "
                f"one) after a pass under no_sync had made it and before it was averaged. {CALL_AVERAGE}"
            )
        self._begin()
        try:
            if all(one.grad is None for one in self._steps.kept):
                self._submit_rest(has_any=False)
        except BaseException:
            self._abandon()
            raise
        passes.end([self])
        # For other optimizers over these parameters, which step at the same time.
        self._steps.passes += 1
        return not all(self._reducer.was_absent(index) for index in range(len(self._trained.dense)))

    def _deliver(self, current: BackwardPass) -> None:
        self._steps.averages = current.deliver(self._trained.dense, self._reducer.was_absent)


_task = torch._C._current_graph_task_id
# By their numbers, in the order in which they were made.
_alive: weakref.WeakValueDictionary[int, GradientReducer] = weakref.WeakValueDictionary()
_numbers = itertools.count()
