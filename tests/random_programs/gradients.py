"""Backward passes as a call of a program, under GradientReducer or DistributedDataParallel: drawn, modelled and run.

```text
  {"call": "ddp", "counts": [7, 300], "dtype": "float32", "steps": 2, "bucket_bytes": 4096, "unused_percent": 10,
   "passes": [[false, true], [true]], "averaging": false, "hook": false, "view": true, ...}
```
``passes`` says for each step which of its passes are averaged; the others stand under ``no_sync``. Each parameter's gradient is
what the loss multiplies it with. A rank uses each parameter or not, in each pass anew.
"""

from __future__ import annotations

import contextlib
import random
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from raising import calls_back, half_way
from random_programs import model, tensors

Spec = dict[str, Any]

# What one rank may do otherwise: other parameters, or another dtype, or fewer of them; no further step, or a pass that raises
# and no further step.
DEVIATIONS = ["counts", "dtype", "fewer", "leaves", "raises"]


# ---------------------------------------------------------------------------------------------------------------- draws


def vary(rng: random.Random, spec: Spec, size: int) -> None:
    """Give a reducer's call passes under ``no_sync``, or make it one of DistributedDataParallel."""
    is_exact = spec["exact"] and size in (1, 2, 4)
    shapes = [[True], [True], [False, True], [False, False, True]]
    if is_exact:
        # An average of averages is exact there alone.
        shapes += [[True, True], [True, False, True]]
    spec["passes"] = [rng.choice(shapes) for _ in range(spec["steps"])]
    if rng.random() < 0.4:
        spec["call"] = "ddp"
        spec["hook"], spec["view"] = rng.random() < 0.3, rng.random() < 0.5
        spec.pop("raising", None)
    elif rng.random() < 0.4:
        spec["averaging"] = True
        # With average() at the end passes are either averaged as they come or left to it.
        spec["passes"] = [passes if rng.random() < 0.6 else [False] * len(passes) for passes in spec["passes"]]


def deviate(rng: random.Random, spec: Spec) -> tuple[str, Spec] | None:
    """How one rank deviates, and the changes of its call. None if that does not fit."""
    kind = rng.choice(DEVIATIONS)
    if kind == "counts":
        return kind, {"counts": [spec["counts"][0] + rng.choice([1, 1000]), *spec["counts"][1:]]}
    if kind == "dtype":
        return kind, {"dtype": rng.choice([one for one in ("float32", "float64") if one != spec["dtype"]])}
    if kind == "fewer":
        return (kind, {"counts": spec["counts"][:-1]}) if len(spec["counts"]) > 1 else None
    return kind, {"steps": rng.randrange(spec["steps"]), "raises": kind == "raises"}


def simpler(spec: Spec) -> Iterator[Spec]:
    """Calls with less of what is drawn here."""
    if any(len(passes) > 1 for passes in spec.get("passes", ())):
        yield {**spec, "passes": [passes[-1:] for passes in spec["passes"]]}
    if spec.get("shared"):
        yield {**spec, "shared": False}
    for name in ("hook", "averaging"):
        if spec.get(name) and (name != "averaging" or all(passes[-1] for passes in passes_of(spec))):
            yield {**spec, name: False}
    if spec["unused_percent"]:
        yield {**spec, "unused_percent": 0}


def passes_of(spec: Spec) -> list[list[bool]]:
    """For each step, whether each pass is averaged."""
    return spec.get("passes", [[True]] * spec["steps"])[: spec["steps"]]


# ---------------------------------------------------------------------------------------------------------------- model


def made(spec: Spec, step: int, number: int, rank: int) -> list[torch.Tensor | None]:
    """The gradients that group rank ``rank`` makes in a pass; None: it does not use the parameter."""
    place = f"{step}" if number == 0 else f"{step}.{number}"
    return [
        None
        if zlib.crc32(f"{spec['key']} {place} {rank} {index}".encode()) % 100 < spec["unused_percent"]
        else model.values(spec, rank, 1000 * step + 100 * number + index, count)
        for index, count in enumerate(spec["counts"])
    ]


def expected(spec: Spec, size: int) -> Iterator[list[Any]]:
    """For each step: the gradient that each rank must have at its end, and its bound (`model.Slot`). None: no rank has used the
    parameter, and it keeps none, or zeros."""
    for step, passes in enumerate(passes_of(spec)):
        held: list[list[Any]] = [[None] * len(spec["counts"]) for _ in range(size)]
        results: list[Any] = [None] * len(spec["counts"])
        for number, is_averaged in enumerate([*passes, True] if spec.get("averaging") else passes):
            for rank in range(size) if number < len(passes) else ():
                for index, one in enumerate(made(spec, step, number, rank)):
                    if one is not None:
                        before = held[rank][index]
                        held[rank][index] = one if before is None else before + one
            if not is_averaged:
                continue
            for index, count in enumerate(spec["counts"]):
                column = [held[rank][index] for rank in range(size)]
                if all(one is None for one in column) or (number == len(passes) and passes[-1]):
                    continue
                zeros = torch.zeros(count, dtype=getattr(torch, spec["dtype"]))
                results[index] = model.reduced(spec, [zeros if one is None else one for one in column])
                for rank in range(size):
                    held[rank][index] = results[index][0]
        yield results


# ------------------------------------------------------------------------------------------------------------- on a rank


class Module(torch.nn.Module):
    """Parameters that a pass uses or not."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        kind = getattr(torch, spec["dtype"])
        self.parts = torch.nn.ParameterList(
            torch.nn.Parameter(torch.zeros(count, dtype=kind)) for count in spec["counts"]
        )

    def forward(self, factors: list[torch.Tensor | None]) -> torch.Tensor:
        terms = [(one * factor).sum() for one, factor in zip(self.parts, factors, strict=True) if factor is not None]
        return sum(terms)  # type: ignore[return-value]


def run(pending: Any) -> None:
    """Make the passes of a call (`run._Pending`) and complain of gradients that are not as they must be."""
    spec = pending.spec
    if pending.rank.backend != "penstock" and (spec["call"] == "reducer" or spec["hook"]):
        return
    with contextlib.ExitStack() as stack:
        # torch keeps the graph of a pass that raised, and with it the reducer, until this thread's next pass.
        stack.callback(lambda: torch.ones(1, requires_grad=True).sum().backward())
        module = Module(spec)
        called: Any = module
        no_sync = average = None
        if spec["call"] == "ddp":
            called = DistributedDataParallel(
                module,
                process_group=pending.group,
                bucket_cap_mb=max(1e-3, spec["bucket_bytes"] / 2**20),
                find_unused_parameters=spec["unused_percent"] > 0,
                gradient_as_bucket_view=spec["view"],
            )
            no_sync = called.no_sync
            if spec["hook"]:
                from penstock.torch import ddp_hook

                stack.callback(ddp_hook(called, bucket_bytes=spec["bucket_bytes"]).close)
        else:
            from penstock.torch import GradientReducer

            reducer = GradientReducer(module.parts, pending.group, bucket_bytes=spec["bucket_bytes"])
            no_sync, average = reducer.no_sync, reducer.average
            if spec["closed"]:
                stack.callback(reducer.close)
        _train(pending, module, called, no_sync, average if spec.get("averaging") else None)


def _train(pending: Any, module: Module, called: Any, no_sync: Any, average: Callable[[], None] | None) -> None:
    spec = pending.spec
    for step, results in enumerate(expected(spec, pending.size)):
        if step in spec.get("raising", ()):
            _raise(list(module.parts))
        for parameter in module.parts:
            parameter.grad = None
            if spec.get("shared"):
                parameter.grad = tensors.shared(torch.zeros_like(parameter))
        passes = passes_of(spec)[step]
        for number, is_averaged in enumerate(passes):
            factors = made(spec, step, number, pending.me)
            if factors[0] is None and (spec["call"] == "ddp" or all(one is None for one in factors)):
                if not is_averaged and spec["call"] == "reducer":
                    continue
                if average is not None and number == len(passes) - 1 and not any(passes[:number]):
                    continue  # average() takes part instead
                # The others would wait for a pass that touches no parameter.
                factors[0] = torch.zeros_like(module.parts[0])
            with contextlib.nullcontext() if is_averaged else no_sync():
                called(factors).backward()
        if average is not None:
            average()
        _check(pending, module, step, results)
    if spec.get("raises"):
        _raise(list(module.parts))


def _check(pending: Any, module: Module, step: int, results: list[Any]) -> None:
    if not pending.compared:
        return
    for index, (parameter, wanted) in enumerate(zip(module.parts, results, strict=True)):
        what, gradient = f"{pending.what}, step {step}, parameter {index}", parameter.grad
        if wanted is None or gradient is None:
            # Whether a rank made an empty pass is its own affair: None and zeros are both right.
            if (gradient is not None and gradient.abs().max() != 0) or (wanted is not None and wanted[0].any()):
                pending.rank.complain(f"{what}: values are wrong, the first at any: {gradient} instead of {wanted}")
            continue
        text = tensors.Made(model.Slot(gradient, *wanted), 0).wrong()
        if text:
            pending.rank.complain(f"{what}: {text}")
        pending.rank.digests[f"{pending.name}/{step}/{index}"] = zlib.crc32(tensors.bytes_of(gradient))


def _raise(parameters: list[torch.nn.Parameter]) -> None:
    """A backward pass that raises, after some of its gradients."""
    terms = [one.sum() for one in parameters[1:]]
    with contextlib.suppress(ArithmeticError):
        (calls_back(parameters[0], half_way).sum() + sum(terms)).backward()
        raise AssertionError("the pass has not raised")
