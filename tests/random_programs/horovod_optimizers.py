"""Steps of ``hvd.DistributedOptimizer`` as one operation of a life of Horovod (`horovod_sessions`), and Adasum.

```text
  {"kind": "optimizer", "set": null, "stage": 1, "how": "sync", "counts": [7, 300], "dtype": "float32", "reduce": "AVG",
   "steps": 2, "passes": 1, "unused_percent": 10, "way": "closure", "groups": null, "compression": "none", "predivide": 1.0}
```
Each parameter's gradient is what the loss multiplies it with; a rank uses each parameter or not, in each pass anew.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from random_programs import gradients, model, tensors

Spec = dict[str, Any]

# What one rank may do otherwise: one more step or fewer of them, a parameter more or fewer, or one of another size.
DEVIATIONS = ["more steps", "fewer steps", "more parameters", "fewer parameters", "size of a parameter"]
# A power of two: a step by an exact gradient is exact.
RATE = 0.5


# ---------------------------------------------------------------------------------------------------------------- draws


def draw(rng: random.Random, *, ranks: int, exact: bool, joined: bool) -> Spec:
    """An operation, but for its set and stage. ``ranks``: how many reduce. ``joined``: some of them count as zeros."""
    op: Spec = {"kind": "optimizer", "how": "sync", "steps": rng.choice([1, 2, 4]), "passes": rng.choice([1, 1, 2, 3])}
    op["counts"] = [rng.choice([1, 7, 300, 5000, 16_385]) for _ in range(rng.randint(1, 5))]
    op["reduce"] = rng.choice(["AVG", "AVG", "SUM", "ADASUM"] if not joined else ["AVG", "SUM"])
    op["dtype"] = rng.choice(["float32", "float32", "float64"])
    op["unused_percent"] = rng.choice([0, 10, 40])
    op["way"] = rng.choice(
        ["step", "step", "closure"] if op["reduce"] == "ADASUM" else ["step", "closure", "synchronize"]
    )
    if op["way"] == "closure":
        op["passes"] = 1
    op["groups"], op["compression"], op["predivide"] = None, "none", 1.0
    if op["reduce"] == "ADASUM":
        return op
    if rng.random() < 0.2:
        op["dtype"] = rng.choice(["float16", "bfloat16"])
    if not joined and rng.random() < 0.3:
        chosen = rng.sample(range(len(op["counts"])), rng.randint(1, len(op["counts"])))
        op["groups"] = rng.choice([1, 2, 3, [sorted(chosen)]])
    if exact and ranks in (1, 2, 4):
        # What is sent in 16 bits has the bits of the sum there.
        if op["dtype"] == "float32" and rng.random() < 0.3:
            op["compression"] = rng.choice(["fp16", "bf16"])
        if op["reduce"] == "AVG" and rng.random() < 0.3:
            op["predivide"] = rng.choice([0.5, 2.0])
    return op


def deviate(rng: random.Random, op: Spec, *, is_last: bool) -> tuple[str, Spec] | None:
    """How one rank deviates in an operation, and what it does instead. Where one rank waits for others that do not come, or they
    for it, only the end of Horovod ends that: nothing may be made after it (``is_last``)."""
    kind = rng.choice(DEVIATIONS)
    if (not is_last and kind != "size of a parameter") or (op["groups"] is not None and "parameter" in kind):
        return None
    if kind == "size of a parameter":
        counts = list(op["counts"])
        counts[rng.randrange(len(counts))] += rng.choice([1, 1000])
        return kind, {**op, "counts": counts}
    if kind == "more steps":
        return kind, {**op, "steps": op["steps"] + 1}
    if kind == "fewer steps":
        return kind, {**op, "steps": rng.randrange(op["steps"])}
    # In a second step ranks would wait for each other, and none would come to its end.
    if kind == "more parameters":
        return (kind, {**op, "counts": [*op["counts"], 11]}) if op["steps"] == 1 else None
    return (kind, {**op, "counts": op["counts"][:-1], "steps": 1}) if len(op["counts"]) > 1 else None


def fails(kind: str, rank: int, everybody: list[int]) -> list[int]:
    """The job's ranks that a deviation of ``rank`` makes fail: those whose gradients find none beside them."""
    if kind in ("more steps", "more parameters"):
        return [rank]
    others = [one for one in everybody if one != rank]
    return others if kind in ("fewer steps", "fewer parameters") else [*others, rank]


def simpler(op: Spec) -> Iterator[Spec]:
    """Smaller operations."""
    least = {"steps": 1, "passes": 1, "unused_percent": 0, "way": "step", "groups": None, "compression": "none"}
    least |= {"predivide": 1.0, "dtype": "float32"}
    for name, value in least.items():
        if op[name] != value:
            yield {**op, name: value}
    if len(op["counts"]) > 1 and op["groups"] is None:
        yield {**op, "counts": op["counts"][1:]}
        yield {**op, "counts": op["counts"][:-1]}
    if any(count > 1 for count in op["counts"]):
        yield {**op, "counts": [-(-count // 2) for count in op["counts"]]}


# ---------------------------------------------------------------------------------------------------------------- model


def adasum(inputs: list[torch.Tensor]) -> tuple[torch.Tensor, np.ndarray]:
    """Adasum of vectors and how far off each element may be: pairs in a tree (Maleki et al., arXiv 2006.02924), those beyond a
    power of two first. A vector of zeros is just added, as in Horovod."""
    kind = str(inputs[0].dtype).removeprefix("torch.")
    # Horovod and Penstock compute halves in float32.
    eps = torch.finfo(torch.float64 if kind == "float64" else torch.float32).eps
    level = [(one.double().numpy(), np.zeros(one.numel())) for one in inputs]
    power = 1 << (len(level).bit_length() - 1)
    level = [
        _pair(one, level[at + power], eps) if at + power < len(level) else one for at, one in enumerate(level[:power])
    ]
    while len(level) > 1:
        level = [_pair(left, right, eps) for left, right in zip(level[::2], level[1::2], strict=True)]
    ((result, off),) = level
    return torch.from_numpy(result), off + torch.finfo(inputs[0].dtype).eps * np.abs(result)


def _pair(one: Any, other: Any, eps: float) -> tuple[np.ndarray, np.ndarray]:
    (left, left_off), (right, right_off) = one, other
    # Not by BLAS, which would start threads that stay.
    product, left_square, right_square = (left * right).sum(), (left * left).sum(), (right * right).sum()
    left_factor = 1 - product / left_square / 2 if left_square > 0 else 1.0
    right_factor = 1 - product / right_square / 2 if right_square > 0 else 1.0
    size = np.abs(left_factor * left) + np.abs(right_factor * right) + np.abs(left) + np.abs(right)
    # A few roundings of each element. Those of earlier pairs also change the factors, by as much again.
    off = 16 * eps * size + 4 * (abs(left_factor) + 1) * left_off + 4 * (abs(right_factor) + 1) * right_off
    return left_factor * left + right_factor * right, off


def held(op: Spec, step: int, rank: int) -> list[torch.Tensor]:
    """The gradients that member ``rank`` has summed at the end of a step; zeros where it has none."""
    found: list[Any] = [None] * len(op["counts"])
    for number in range(op["passes"]):
        for index, one in enumerate(gradients.made(op, step, number, rank)):
            if one is not None:
                found[index] = one if found[index] is None else found[index] + one
    kind = getattr(torch, op["dtype"])
    return [
        torch.zeros(count, dtype=kind) if one is None else one for one, count in zip(found, op["counts"], strict=True)
    ]


# ------------------------------------------------------------------------------------------------------------- on a rank


class Steps:
    """One rank's optimizer.

    Args:
        op: the operation, with the key of its values.
        name: of the operation; parameters have names that begin with it.
        me, size: this member, and how many there are.
        zeros: ranks that have joined, which count as zeros.
    """

    def __init__(self, hvd: Any, op: Spec, name: str, process_set: Any, *, me: int, size: int, zeros: int) -> None:
        self._op, self._me, self._size, self._zeros = op, me, size, zeros
        self.module = gradients.Module(op)
        parameters = list(self.module.parts)
        groups = op["groups"]
        if isinstance(groups, list):
            groups = [[parameters[at] for at in one] for one in groups]
        how: dict[str, Any] = {} if process_set is None else {"process_set": process_set}
        self._optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(parameters, lr=RATE),
            named_parameters=[(f"{name}.{at}", one) for at, one in enumerate(parameters)],
            op={"AVG": hvd.Average, "SUM": hvd.Sum, "ADASUM": hvd.Adasum}[op["reduce"]],
            backward_passes_per_step=op["passes"],
            compression=getattr(hvd.Compression, op["compression"]),
            gradient_predivide_factor=op["predivide"],
            groups=groups,
            **how,
        )

    def run(self, wanted: Spec, complain: Callable[[str], None], digest: Callable[[str, int], None]) -> None:
        """Make all steps; those that all ranks make, ``wanted``, are compared. Raises HorovodInternalError."""
        for step in range(self._op["steps"]):
            before = [one.detach().clone() for one in self.module.parts]
            self._step(step)
            if step < wanted["steps"]:
                self._check(step, before, wanted, complain)
                bits = 0
                for one in self.module.parts:
                    bits = zlib.crc32(tensors.bytes_of(one), bits)
                if len(self._op["counts"]) == len(wanted["counts"]):
                    digest(f"{step}", bits)

    def _step(self, step: int) -> None:
        optimizer, way = self._optimizer, self._op["way"]
        passes = [gradients.made(self._op, step, number, self._me) for number in range(self._op["passes"])]

        def make() -> None:
            optimizer.zero_grad()
            for factors in passes:
                if all(one is None for one in factors):
                    # A pass needs something to begin with.
                    factors[0] = torch.zeros_like(self.module.parts[0])
                self.module(factors).backward()

        if way == "closure":
            optimizer.step(make)
            return
        make()
        if way == "step":
            optimizer.step()
            return
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()

    def _check(self, step: int, before: list[torch.Tensor], wanted: Spec, complain: Callable[[str], None]) -> None:
        everything = [held(wanted, step, rank) for rank in range(self._size)]
        for index, parameter in enumerate(list(self.module.parts)[: len(wanted["counts"])]):
            inputs = [one[index] for one in everything]
            what = f"step {step}, parameter {index}"
            if wanted["reduce"] == "ADASUM":
                # Each rank sends what its own step would have changed.
                start = before[index]
                result, off = adasum([(start - RATE * one) - start for one in inputs])
                result = start.double() + result
                near = off + 4 * torch.finfo(start.dtype).eps * (np.abs(result.numpy()) + start.abs().double().numpy())
                text = tensors.Made(model.Slot(parameter.detach(), result, near), 0).wrong()
            else:
                inputs += [torch.zeros_like(inputs[0])] * self._zeros
                assert parameter.grad is not None, "the optimizer has made one"
                text = tensors.Made(model.Slot(parameter.grad, *model.reduced(wanted, inputs)), 0).wrong()
                stepped = before[index].add(parameter.grad, alpha=-RATE)
                if text is None and not torch.equal(parameter.detach(), stepped):
                    text = f"the weights are wrong, the first at any: {parameter} instead of {stepped}"
            if text:
                complain(f"{what}: {text}")
