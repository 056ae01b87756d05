"""Backward passes as a call of a program, under GradientReducer or DistributedDataParallel: drawn, modelled and run.

```text
  {"call": "ddp", "counts": [7, 300], "dtype": "float32", "steps": 2, "bucket_bytes": 4096, "unused_percent": 10,
   "passes": [[false, true], [true]], "averaging": false, "hook": false, "view": true, ...}
```
``passes`` says for each step which of its passes are averaged; the others stand under ``no_sync``. Each parameter's gradient is
what the loss multiplies it with. A rank uses each parameter or not, in each pass anew. A reducer's call may also have

| key        | what                                                                                              |
|------------|---------------------------------------------------------------------------------------------------|
| "wire"     | the dtype on the wire; with "feedback" what rounding takes off is kept for the next step            |
| "settings" | for each step, what of `penstock.tune.Setting` changes before it, on all ranks; or None             |
| "sparse"   | rows and width of embeddings with sparse gradients                                                 |
| "buffers"  | elements and dtype of the module's buffers, which all ranks get from rank 0, as the parameters     |
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
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
    is_exact = _is_exact(spec, size)
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


def vary_further(rng: random.Random, spec: Spec, size: int) -> None:
    """Give a reducer, or a hook of DistributedDataParallel, 16 bits on the wire; a reducer also settings that change, sparse
    embeddings and buffers."""
    if spec["call"] == "ddp" and not spec["hook"]:
        return
    if rng.random() < 0.35:
        spec["wire"], spec["dtype"] = rng.choice(["float16", "bfloat16"]), "float32"
    if spec["call"] == "ddp":
        return
    if "wire" in spec and rng.random() < 0.5:
        spec["feedback"] = True
        if not _is_exact(spec, size):
            # A parameter that no rank uses may be reduced or not, and a pass that raises too: nobody knows what is kept then.
            spec["unused_percent"] = 0
            spec.pop("raising", None)
    if rng.random() < 0.3:
        changes: list[Spec | None] = []
        for _ in range(spec["steps"]):
            change: Spec = {"bucket_bytes": rng.choice([64, 4096, 1 << 16, 4 << 20])}
            # Not more buckets than a loaded machine reduces in a moment.
            change["bucket_bytes"] = max(change["bucket_bytes"], sum(spec["counts"]) * 8 // 200)
            if rng.random() < 0.5:
                change["algorithm"] = rng.choice(["auto", "ring", "halving-doubling"])
                if spec["dtype"] == "float32":
                    change["compression"] = rng.choice(list(_WIRES))
            changes.append(change if rng.random() < 0.7 else None)
        spec["settings"] = changes
    if spec["dtype"] in ("float32", "float64") and rng.random() < 0.3:
        spec["sparse"] = [[rng.choice([1, 7, 1000]), rng.choice([1, 5])] for _ in range(rng.randint(1, 3))]
    if rng.random() < 0.3:
        kinds = ["float32", "int64", "bool", "bfloat16"]
        spec["buffers"] = [[rng.choice([0, 1, 1000]), rng.choice(kinds)] for _ in range(rng.randint(1, 3))]


def _is_exact(spec: Spec, size: int) -> bool:
    """Whether averages are, also in 16 bits: multiples of a quarter that are less than 64."""
    return bool(spec["exact"]) and size in (1, 2, 4)


def is_outlived(spec: Spec, how: str | None) -> bool:
    """Whether all ranks are told of a deviation before anything is sent, and the group lives."""
    return spec["call"] == "reducer" and how in ("counts", "dtype", "fewer")


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
    for name in ("feedback", "settings", "sparse", "buffers"):
        if spec.get(name):
            yield {key: value for key, value in spec.items() if key != name}
    if "wire" in spec and not spec.get("feedback"):
        yield {key: value for key, value in spec.items() if key != "wire"}
    for name in ("hook", "averaging"):
        if spec.get(name) and (name != "averaging" or all(passes[-1] for passes in passes_of(spec))):
            yield {**{key: value for key, value in spec.items() if (name, key) != ("hook", "wire")}, name: False}
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


def looked_up(spec: Spec, step: int, number: int, rank: int) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
    """Which rows of each sparse embedding a pass looks up, some of them twice, and their gradients; None: it does not use the
    embedding. A pass that uses nothing else does not either."""
    is_empty = all(one is None for one in made(spec, step, number, rank))
    found: list[tuple[torch.Tensor, torch.Tensor] | None] = []
    for index, (rows, width) in enumerate(spec.get("sparse", ())):
        place = f"{spec['key']} {step}.{number} sparse {index}"
        generator = np.random.default_rng([rank, zlib.crc32(place.encode())])
        where = torch.from_numpy(generator.integers(0, rows, int(generator.integers(0, 9))))
        given = model.values({**spec, "key": place, "exact": True}, rank, 0, len(where) * width).view(-1, width)
        found.append(None if is_empty or generator.random() < 0.3 else (where, given))
    return found


def wire_of(spec: Spec, step: int) -> str | None:
    """The dtype on the wire in a step."""
    changes = [one["compression"] for one in spec.get("settings", ())[: step + 1] if one and "compression" in one]
    return _WIRES[changes[-1]] if changes else spec.get("wire")


def expected(spec: Spec, size: int) -> Iterator[list[Any]]:
    """For each step: the gradient that each rank must have at its end, and its bound (`model.Slot`), first of the parameters and
    then of the embeddings, as dense ones. None: no rank has used the parameter, and it keeps none, or zeros."""
    counts = [*spec["counts"], *(rows * width for rows, width in spec.get("sparse", ()))]
    residuals = (
        [[torch.zeros(count) for count in spec["counts"]] for _ in range(size)] if spec.get("feedback") else None
    )
    for step, passes in enumerate(passes_of(spec)):
        held: list[list[Any]] = [[None] * len(counts) for _ in range(size)]
        results: list[Any] = [None] * len(counts)
        for number, is_averaged in enumerate([*passes, True] if spec.get("averaging") else passes):
            for rank in range(size) if number < len(passes) else ():
                for index, one in enumerate([*made(spec, step, number, rank), *_dense_rows(spec, step, number, rank)]):
                    if one is not None:
                        before = held[rank][index]
                        held[rank][index] = one if before is None else before + one
            if not is_averaged:
                continue
            wire = wire_of(spec, step)
            for index, count in enumerate(counts):
                column = [held[rank][index] for rank in range(size)]
                if all(one is None for one in column) or (number == len(passes) and passes[-1]):
                    continue
                zeros = torch.zeros(count, dtype=getattr(torch, spec["dtype"]))
                column = [zeros if one is None else one for one in column]
                if index >= len(spec["counts"]):
                    # Sums of small integers, divided once.
                    results[index] = sum(column) / size, 0
                elif wire is None:
                    results[index] = model.reduced(spec, column)
                else:
                    kept = None if residuals is None else [of_rank[index] for of_rank in residuals]
                    results[index] = _averaged(column, getattr(torch, wire), kept, is_exact=_is_exact(spec, size))
                for rank in range(size):
                    held[rank][index] = results[index][0]
        yield results


def _dense_rows(spec: Spec, step: int, number: int, rank: int) -> list[torch.Tensor | None]:
    found = zip(spec.get("sparse", ()), looked_up(spec, step, number, rank), strict=True)
    kind = getattr(torch, spec["dtype"])
    return [
        None if one is None else torch.zeros(rows, width, dtype=kind).index_add_(0, *one).view(-1)
        for (rows, width), one in found
    ]


def _averaged(
    column: list[torch.Tensor], wire: torch.dtype, kept: list[torch.Tensor] | None, *, is_exact: bool
) -> tuple[torch.Tensor, Any]:
    """The average of float32 tensors that go over the wire in 16 bits, and its bound. What rounding takes off each of them goes
    into ``kept``, after it was added.

    Each rank rounds its own, divided by the number of ranks; each hop adds in float32 and rounds. So the bits of the result are
    known where one hop adds two ranks' tensors, or nothing is rounded.
    """
    size = len(column)
    sent = []
    for rank, one in enumerate(column):
        given = one * torch.tensor(1 / size)
        if kept is not None:
            given = given + kept[rank]
        sent.append(given.to(wire).float())
        if kept is not None:
            kept[rank].copy_(given - sent[-1])
    total = torch.stack(sent).double().sum(0).float()
    if size <= 2 or is_exact:
        return total.to(wire).float(), 0
    # Half a unit in the last place for each hop; where the division is not exact, a rank's own may be rounded the other way, and
    # what it keeps differs by as much.
    information = torch.finfo(wire)
    largest = torch.stack(sent).abs().double().sum(0)
    return total, (4 * size * (information.eps * largest + information.smallest_normal * information.eps)).numpy()


# ------------------------------------------------------------------------------------------------------------- on a rank


class Module(torch.nn.Module):
    """Parameters that a pass uses or not, which are ``start`` at the beginning, and buffers."""

    def __init__(self, spec: Spec, *, start: float = 0.0, buffers: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        kind = getattr(torch, spec["dtype"])
        self.parts = torch.nn.ParameterList(
            torch.nn.Parameter(torch.full((count,), start, dtype=kind)) for count in spec["counts"]
        )
        self.tables = torch.nn.ModuleList(
            torch.nn.Embedding(rows, width, sparse=True, _weight=torch.full((rows, width), start, dtype=kind))
            for rows, width in spec.get("sparse", ())
        )
        for index, value in enumerate(buffers):
            self.register_buffer(f"buffer_{index}", value.clone())

    def forward(
        self,
        factors: list[torch.Tensor | None],
        rows: Iterable[tuple[torch.Tensor, torch.Tensor] | None] = (),
    ) -> torch.Tensor:
        terms = [(one * factor).sum() for one, factor in zip(self.parts, factors, strict=True) if factor is not None]
        tables = zip(self.tables, rows, strict=True)
        terms += [(table(found[0]) * found[1]).sum() for table, found in tables if found is not None]
        return sum(terms)  # type: ignore[return-value]


def buffers_of(spec: Spec, rank: int) -> list[torch.Tensor]:
    """What a rank's buffers hold at the beginning."""
    return [
        model.values({**spec, "key": f"{spec['key']} buffer", "dtype": kind}, rank, index, count)
        for index, (count, kind) in enumerate(spec.get("buffers", ()))
    ]


def run(pending: Any) -> None:
    """Make the passes of a call (`run._Pending`) and complain of gradients that are not as they must be."""
    spec = pending.spec
    if pending.rank.backend != "penstock" and (spec["call"] == "reducer" or spec["hook"]):
        return
    with contextlib.ExitStack() as stack:
        # torch keeps the graph of a pass that raised, and with it the reducer, until this thread's next pass.
        stack.callback(lambda: torch.ones(1, requires_grad=True).sum().backward())
        module = Module(spec, start=pending.me + 1, buffers=buffers_of(spec, pending.me))
        called: Any = module
        no_sync = average = reducer = None
        wire = getattr(torch, spec["wire"]) if "wire" in spec else None
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

                stack.callback(ddp_hook(called, bucket_bytes=spec["bucket_bytes"], wire=wire).close)
        else:
            from penstock.torch import GradientReducer

            reducer = GradientReducer(
                module if "sparse" in spec or "buffers" in spec else module.parts,
                pending.group,
                bucket_bytes=spec["bucket_bytes"],
                wire=wire,
                error_feedback=spec.get("feedback", False),
            )
            no_sync, average = reducer.no_sync, reducer.average
            if spec["closed"]:
                stack.callback(reducer.close)
        _check_beginning(pending, module)
        _train(pending, module, called, no_sync, average if spec.get("averaging") else None, reducer)


def _train(
    pending: Any, module: Module, called: Any, no_sync: Any, average: Callable[[], None] | None, reducer: Any
) -> None:
    spec = pending.spec
    for step, results in enumerate(expected(spec, pending.size)):
        change = spec["settings"][step] if "settings" in spec else None
        if change is not None:
            if len(change) == 1:
                reducer.set_bucket_bytes(change["bucket_bytes"])
            else:
                reducer.apply(dataclasses.replace(reducer.setting, **change))
        if step in spec.get("raising", ()):
            _raise(list(module.parts))
        for parameter in module.parameters():
            parameter.grad = None
        for parameter in module.parts if spec.get("shared") else ():
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
                called(factors, looked_up(spec, step, number, pending.me)).backward()
        if average is not None:
            average()
        _check(pending, module, step, results)
    if spec.get("raises"):
        _raise(list(module.parts))


def _check_beginning(pending: Any, module: Module) -> None:
    """All ranks have the parameters and buffers of the group's rank 0."""
    if not pending.compared:
        return
    wanted = [*(torch.ones_like(one) for one in module.parameters()), *buffers_of(pending.spec, 0)]
    for index, (found, one) in enumerate(zip([*module.parameters(), *module.buffers()], wanted, strict=True)):
        if not torch.equal(found, one):
            pending.rank.complain(
                f"{pending.what}, tensor {index} of the module: values are wrong, the first at any: {found}"
            )


def _check(pending: Any, module: Module, step: int, results: list[Any]) -> None:
    if not pending.compared:
        return
    for index, (parameter, wanted) in enumerate(zip(module.parameters(), results, strict=True)):
        what, gradient = f"{pending.what}, step {step}, parameter {index}", parameter.grad
        gradient = gradient.to_dense().view(-1) if gradient is not None and index >= len(module.parts) else gradient
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


# The words of `penstock.tune.Setting` for what is on the wire.
_WIRES = {"off": None, "fp16": "float16", "bf16": "bfloat16"}
