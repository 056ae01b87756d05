"""Faults to plant, one at a time, in the ranks: each must be found by random programs, or the tester does not see its kind.

They sit where Python hands an operation to the engine, and do what a fault of the engine would do: bytes that do not move, go
to the wrong place or are reduced wrongly; checks that do not look; what is not kept, or never let go.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import traceback
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A fault, and the medium on which it is looked for."""

    plant: Callable[[contextlib.ExitStack], None]
    medium: str = "memory"


@contextlib.contextmanager
def planted(name: str | None) -> Iterator[None]:
    """The fault is there within; None plants nothing."""
    with contextlib.ExitStack() as stack:
        if name is not None:
            MUTANTS[name].plant(stack)
        yield


def is_own(error: BaseException) -> bool:
    """Whether an error is one of the fault's code, and not what the fault does to Penstock: it was raised in this file, and is
    none of the kinds that faults raise on purpose."""
    from penstock import errors

    cause: BaseException | None = error
    while cause is not None:
        frames = traceback.extract_tb(cause.__traceback__)
        if frames and frames[-1].filename == __file__ and not isinstance(cause, errors.PenstockError):
            return True
        # One that has come through C++ has its innermost frame in its text.
        through = re.match(r"(?:[\w.]*\.)?(\w+): .*\n\nAt:\n {2}" + re.escape(__file__) + r"\(", str(cause), re.DOTALL)
        if through is not None and not hasattr(errors, through[1]):
            return True
        cause = cause.__cause__
    return False


def _patch(stack: contextlib.ExitStack, owner: Any, name: str, replace: Callable[[Any], Any]) -> None:
    """Put ``replace(what is there)`` in its place."""
    stack.enter_context(mock.patch.object(owner, name, replace(getattr(owner, name))))


def _on_start(change: Callable[[str, dict[str, Any], Any], None]) -> Callable[[contextlib.ExitStack], None]:
    """Change what the backend passes to the engine: ``change(collective, arguments, membership)``."""

    def plant(stack: contextlib.ExitStack) -> None:
        from penstock.runtime import groups

        class Start:
            def __init__(self, group: Any, membership: Any) -> None:
                self._group, self._membership = group, membership

            def start(self, collective: str, **arguments: Any) -> Any:
                change(collective, arguments, self._membership)
                return self._group.start(collective, **arguments)

            def __getattr__(self, name: str) -> Any:
                return getattr(self._group, name)

        def join(true_join: Any) -> Any:
            def joined(*args: Any, **kwargs: Any) -> Any:
                membership = true_join(*args, **kwargs)
                if "/" not in membership.name:  # the reducer's groups need the engine's own object
                    membership.group = Start(membership.group, membership)
                return membership

            return joined

        _patch(stack, groups, "join", join)

    return plant


def _item(arguments: dict[str, Any]) -> int:
    return {"byte": 1}.get(arguments["dtype"]) or getattr(torch, arguments["dtype"]).itemsize


def _shorten(arguments: dict[str, Any], bytes_: int) -> None:
    """Leave so many bytes at the end out, as a lost frame would."""
    item = _item(arguments)
    gone = -(-bytes_ // item)
    if arguments["elements"] > gone:
        arguments["elements"] -= gone
        arguments["bytes"] -= gone * item


# ------------------------------------------------------------------------------------------------- values and places


def _avg_without_division(collective: str, arguments: dict[str, Any], _: Any) -> None:
    if arguments.get("op") == "avg":
        arguments["op"] = "sum"


def _factor_ignored(collective: str, arguments: dict[str, Any], _: Any) -> None:
    if arguments.get("op") == "premul_sum":
        arguments["op"] = "sum"


def _min_is_max_of_unsigned(collective: str, arguments: dict[str, Any], _: Any) -> None:
    if arguments.get("op") == "min" and arguments["dtype"] == "uint8":
        arguments["op"] = "max"


def _half_is_bfloat16(collective: str, arguments: dict[str, Any], _: Any) -> None:
    if arguments.get("op") is not None and arguments["dtype"] == "float16":
        arguments["dtype"] = "bfloat16"


def _int16_compared_as_float(collective: str, arguments: dict[str, Any], _: Any) -> None:
    if arguments.get("op") in ("min", "max") and arguments["dtype"] == "int16":
        arguments["dtype"] = "float16"


def _wrong_root_of_broadcast(collective: str, arguments: dict[str, Any], membership: Any) -> None:
    if collective == "broadcast":
        arguments["rank"] = (arguments["rank"] + 1) % membership.world


def _wrong_root_of_reduce(collective: str, arguments: dict[str, Any], membership: Any) -> None:
    if collective == "reduce":
        arguments["rank"] = 0


def _eager_limit(collective: str, arguments: dict[str, Any], _: Any) -> None:
    if arguments["bytes"] == 32 << 10 and collective in ("broadcast", "send", "recv", "all_reduce"):
        _shorten(arguments, 1)


def _reference_limit(collective: str, arguments: dict[str, Any], _: Any) -> None:
    if 8 << 10 < arguments["bytes"] <= (8 << 10) + 8 and collective in ("broadcast", "send", "recv", "all_reduce"):
        _shorten(arguments, 1)


def _last_frame_lost(collective: str, arguments: dict[str, Any], _: Any) -> None:
    if collective in ("all_reduce", "reduce") and arguments["bytes"] > 64 << 10:
        _shorten(arguments, arguments["bytes"] % (64 << 10) or 1)


def _one_element_skipped(collective: str, arguments: dict[str, Any], membership: Any) -> None:
    # The remainder of an uneven division over the ranks.
    if collective == "all_reduce" and arguments["elements"] % membership.world:
        _shorten(arguments, 1)


def _large_broadcast_cut(collective: str, arguments: dict[str, Any], _: Any) -> None:
    if collective == "broadcast" and arguments["bytes"] > 1 << 20:
        _shorten(arguments, arguments["bytes"] - (1 << 20))


def _tag_ignored(collective: str, arguments: dict[str, Any], _: Any) -> None:
    if collective in ("send", "recv"):
        arguments["tag"] = 0


def _splits_swapped(collective: str, arguments: dict[str, Any], _: Any) -> None:
    if collective == "all_to_all":
        for name in ("input_splits", "output_splits"):
            splits = arguments[name]
            if len(splits) == 3 and splits[1] != splits[2]:
                arguments[name] = [splits[0], splits[2], splits[1]]


def _zero_dim_ignored(collective: str, arguments: dict[str, Any], _: Any) -> None:
    if collective == "all_reduce" and arguments["elements"] == 1:
        arguments["elements"] = arguments["bytes"] = 0


# ----------------------------------------------------------------------------------------------- what must be compared


def _size_not_compared(collective: str, arguments: dict[str, Any], _: Any) -> None:
    if collective == "all_reduce":
        arguments["elements"] = min(arguments["elements"], 1)
        arguments["bytes"] = arguments["elements"] * _item(arguments)


def _dtype_not_compared(collective: str, arguments: dict[str, Any], _: Any) -> None:
    if arguments.get("op") is None and collective != "barrier":
        arguments["dtype"], arguments["elements"] = "byte", arguments["bytes"]


def _root_not_compared(collective: str, arguments: dict[str, Any], _: Any) -> None:
    if collective == "broadcast":
        arguments["rank"] = 0


def _time_out_ignored(collective: str, arguments: dict[str, Any], _: Any) -> None:
    arguments["timeout_s"] = 600.0


# ------------------------------------------------------------------------------------------------------------- life


def _kept_for_ever(collective: str, arguments: dict[str, Any], _: Any) -> None:
    _KEPT.append(arguments["keep"])


def _operation_left(collective: str, arguments: dict[str, Any], membership: Any) -> None:
    if collective == "all_reduce" and membership.world > 1:
        place, other = torch.zeros(1), (membership.rank + 1) % membership.world
        given = {"dtype": "float32", "elements": 1, "bytes": 4, "input": 0, "output": place.data_ptr(), "rank": other}
        membership.group._group.start("recv", **given, tag=1 << 20, timeout_s=600.0, keep=place.untyped_storage())


def _not_kept(collective: str, arguments: dict[str, Any], _: Any) -> None:
    arguments["keep"] = None


_KEPT: list[Any] = []


def _wait_returns_early(stack: contextlib.ExitStack) -> None:
    from penstock.torch.work import Work

    _patch(stack, Work, "wait", lambda true: lambda self, timeout=None: True)


def _only_first_is_waited_for(stack: contextlib.ExitStack) -> None:
    from penstock.torch.work import Work

    def replace(true: Any) -> Any:
        def wait(self: Any, timeout: Any = None) -> bool:
            self.tickets = list(self.tickets)[:1]
            return bool(true(self, timeout))

        return wait

    _patch(stack, Work, "wait", replace)


def _results_not_copied(stack: contextlib.ExitStack) -> None:
    from penstock.torch import collectives

    def replace(true: Any) -> Any:
        def spread(copies: Any) -> None:
            true([(flat, outputs[:-1] if len(outputs) > 2 else outputs) for flat, outputs in copies])

        return spread

    _patch(stack, collectives, "spread", replace)


def _lists_reversed(stack: contextlib.ExitStack) -> None:
    from penstock.torch import collectives

    _patch(stack, collectives, "joined", lambda true: lambda tensors: true(list(tensors)[::-1]))


def _barrier_does_not_wait(stack: contextlib.ExitStack) -> None:
    from penstock.torch import collectives

    def replace(true: Any) -> Any:
        def barrier(self: Any, opts: Any) -> Any:
            return self._work([], [])

        return barrier

    _patch(stack, collectives.Collectives, "barrier", replace)


def _group_not_left(stack: contextlib.ExitStack) -> None:
    from penstock.runtime import groups

    def replace(true: Any) -> Any:
        def leave(self: Any) -> None:
            self.group.leave()

        return leave

    _patch(stack, groups.Membership, "leave", replace)


def _descriptor_lost(stack: contextlib.ExitStack) -> None:
    from penstock.runtime import groups

    def replace(true: Any) -> Any:
        def leave(self: Any) -> None:
            os.open("/dev/null", os.O_RDONLY)
            true(self)

        return leave

    _patch(stack, groups.Membership, "leave", replace)


def _gradient_not_delivered(stack: contextlib.ExitStack) -> None:
    from penstock.training import slots

    def replace(true: Any) -> Any:
        def submit(self: Any, reducer: Any, index: int, gradient: Any, absent: bool = False) -> Any:
            given = gradient.clone() if index == 1 and gradient.numel() > 1 else gradient
            return gradient, true(self, reducer, index, given, absent)[1]

        return submit

    _patch(stack, slots.Slots, "submit", replace)


def _residual_forgotten(stack: contextlib.ExitStack) -> None:
    from penstock.training.gradients import GradientReducer

    def replace(true: Any) -> Any:
        def build(self: Any, *args: Any, **options: Any) -> None:
            true(self, *args, **{**options, "error_feedback": False})

        return build

    _patch(stack, GradientReducer, "_build", replace)


def _buffers_not_broadcast(stack: contextlib.ExitStack) -> None:
    from penstock.training import gradients

    def replace(true: Any) -> Any:
        return lambda tensors, own: true([one for one in tensors if isinstance(one, torch.nn.Parameter)], own)

    _patch(stack, gradients, "broadcast_values", replace)


def _sparse_not_averaged(stack: contextlib.ExitStack) -> None:
    from penstock.training import sparse

    _patch(stack, sparse, "average", lambda true: lambda trained, group: [])


def _error_of_another_rank(stack: contextlib.ExitStack) -> None:
    from penstock.errors import PenstockError
    from penstock.torch.work import Work

    def replace(true: Any) -> Any:
        def wait(self: Any, timeout: Any = None) -> bool:
            try:
                return bool(true(self, timeout))
            except PenstockError as error:
                raise type(error)(re.sub(r"rank \d+ \(", "rank 9 (", str(error))) from None

        return wait

    _patch(stack, Work, "wait", replace)


def _error_names_nobody(stack: contextlib.ExitStack) -> None:
    from penstock.errors import PenstockError
    from penstock.torch.work import Work

    def replace(true: Any) -> Any:
        def wait(self: Any, timeout: Any = None) -> bool:
            try:
                return bool(true(self, timeout))
            except PenstockError as error:
                raise type(error)("the operation failed") from None

        return wait

    _patch(stack, Work, "wait", replace)


def _error_of_wrong_kind(stack: contextlib.ExitStack) -> None:
    from penstock.errors import Bug, Mismatch
    from penstock.torch.work import Work

    def replace(true: Any) -> Any:
        def wait(self: Any, timeout: Any = None) -> bool:
            try:
                return bool(true(self, timeout))
            except Mismatch as error:
                raise Bug(str(error)) from None

        return wait

    _patch(stack, Work, "wait", replace)


# How a complaint begins that says that the fault's own code has failed.
DEFECTIVE = "the fault itself failed: "

MUTANTS = {
    "avg-without-division": Mutant(_on_start(_avg_without_division)),
    "premul-factor-ignored": Mutant(_on_start(_factor_ignored)),
    "min-is-max-of-uint8": Mutant(_on_start(_min_is_max_of_unsigned)),
    "float16-as-bfloat16": Mutant(_on_start(_half_is_bfloat16)),
    "int16-compared-as-float": Mutant(_on_start(_int16_compared_as_float)),
    "wrong-root-of-broadcast": Mutant(_on_start(_wrong_root_of_broadcast)),
    "wrong-root-of-reduce": Mutant(_on_start(_wrong_root_of_reduce)),
    "off-by-one-at-eager-limit": Mutant(_on_start(_eager_limit), "tcp"),
    "off-by-one-at-reference-limit": Mutant(_on_start(_reference_limit)),
    "last-frame-of-reduce-lost": Mutant(_on_start(_last_frame_lost), "tcp"),
    "remainder-of-division-lost": Mutant(_on_start(_one_element_skipped)),
    "large-broadcast-cut": Mutant(_on_start(_large_broadcast_cut), "tcp"),
    "tag-ignored": Mutant(_on_start(_tag_ignored)),
    "splits-swapped": Mutant(_on_start(_splits_swapped)),
    "one-element-ignored": Mutant(_on_start(_zero_dim_ignored)),
    "size-not-compared": Mutant(_on_start(_size_not_compared)),
    "dtype-not-compared": Mutant(_on_start(_dtype_not_compared)),
    "root-not-compared": Mutant(_on_start(_root_not_compared)),
    "time-out-ignored": Mutant(_on_start(_time_out_ignored)),
    "tensors-kept-for-ever": Mutant(_on_start(_kept_for_ever)),
    "operation-left": Mutant(_on_start(_operation_left)),
    "tensors-not-kept": Mutant(_on_start(_not_kept)),
    "wait-returns-early": Mutant(_wait_returns_early, "tcp"),
    "only-first-of-coalesced-waited-for": Mutant(_only_first_is_waited_for, "tcp"),
    "last-of-list-not-copied": Mutant(_results_not_copied),
    "lists-reversed": Mutant(_lists_reversed),
    "barrier-does-not-wait": Mutant(_barrier_does_not_wait),
    "group-not-left": Mutant(_group_not_left),
    "descriptor-lost": Mutant(_descriptor_lost),
    "gradient-not-delivered": Mutant(_gradient_not_delivered),
    "residual-forgotten": Mutant(_residual_forgotten),
    "buffers-not-broadcast": Mutant(_buffers_not_broadcast),
    "sparse-not-averaged": Mutant(_sparse_not_averaged),
    "error-names-nobody": Mutant(_error_names_nobody),
    "error-names-another-rank": Mutant(_error_of_another_rank),
    "error-of-wrong-kind": Mutant(_error_of_wrong_kind),
}
