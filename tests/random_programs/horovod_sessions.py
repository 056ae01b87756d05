"""A life of Horovod as one call of a program: ``init``, operations of all kinds in stages, ``shutdown``.

```text
  {"call": "hvd", "group": "world", "key": "7 3", "exact": true, "named": true, "sets": [[0, 2]], "joined": [1],
   "ops": [{"kind": "allgather", "set": null, "stage": 0, "how": "late", "dtype": "float32", "rows": [[3, 0, 5]], ...}]}
```
Horovod matches operations by name, so each rank submits those of a stage in an order of its own; without names all ranks keep
the order. ``how`` an operation is made: "sync" blocks; "stage" is synchronised at the end of its stage, "late" at the end.

Why a right session cannot block for ever: put all that blocks into one order, by stage, then synchronisations of "stage"
before the blocking operations, then number; "late" comes last. Take the rank whose place is first: what it waits for has been
submitted by every rank that is past this stage's submissions, and the others are blocked at an earlier place. There are none.
"""

from __future__ import annotations

import contextlib
import random
import time
import zlib
from collections.abc import Iterator
from typing import Any

import torch

from collectives import reference
from random_programs import horovod_optimizers, model, tensors

Spec = dict[str, Any]

# Operations and how often they come.
KINDS = {
    "allreduce": 5,
    "grouped_allreduce": 3,
    "allgather": 4,
    "grouped_allgather": 2,
    "broadcast": 4,
    "alltoall": 4,
    "reducescatter": 3,
    "grouped_reducescatter": 2,
    "sparse_allreduce": 1,
    "barrier": 1,
}
# What one rank may do otherwise in one operation.
DEVIATIONS = ["dtype", "rows", "width", "reduce", "root", "missing"]
_IN_PLACE = ("allreduce", "grouped_allreduce", "broadcast")
_REDUCING = ("allreduce", "grouped_allreduce", "reducescatter", "grouped_reducescatter")
_SAME_SHAPE = (*_REDUCING, "broadcast")
_DTYPES = [kind for kind in reference.ALL_DTYPES if not kind.startswith("float8")]
_NAMES = {"SUM": "Sum", "AVG": "Average", "MIN": "Min", "MAX": "Max", "PRODUCT": "Product", "ADASUM": "Adasum"}
_OPERATIONS = ["SUM", "SUM", "AVG", "AVG", "MIN", "MAX", "PRODUCT"]


# ---------------------------------------------------------------------------------------------------------------- draws


def draw(rng: random.Random, ranks: int, key: str) -> Spec:
    """A session of a job of ``ranks`` ranks."""
    spec: Spec = {"call": "hvd", "group": "world", "key": key, "exact": rng.random() < 0.6}
    spec["named"] = rng.random() < 0.7
    possible = [sorted(rng.sample(range(ranks), rng.randint(1, ranks - 1))) for _ in range(2)]
    spec["sets"] = possible[: rng.choice([0, 0, 1, 2])]
    if len(spec["sets"]) == 2 and possible[0] == possible[1]:
        spec["sets"].pop()
    sizes = rng.choice([[0, 1, 2, 7, 100], [0, 1, 511, 2049], [1, 5000, 8192, 16_384, 33_333]])
    stages = rng.choice([1, 2, 3])
    spec["ops"] = [_draw_op(rng, spec, ranks, sizes, stages) for _ in range(rng.choice([1, 3, 6, 12, 20]))]
    if rng.random() < 0.3:
        # The others go on for a while, with sums and averages alone, in which these ranks count as zeros.
        spec["joined"] = sorted(rng.sample(range(ranks), rng.randint(1, ranks - 1)))
        for _ in range(rng.randint(0, 4)):
            op = _draw_op(rng, {**spec, "sets": []}, ranks, sizes, 1, kinds=["allreduce", "grouped_allreduce"])
            op["reduce"] = rng.choice(["SUM", "AVG"]) if "scale" not in op else "SUM"
            op["stage"] = -1
            spec["ops"].append(op)
    return spec


def _draw_op(
    rng: random.Random, spec: Spec, ranks: int, sizes: list[int], stages: int, kinds: list[str] | None = None
) -> Spec:
    kind = rng.choices(kinds or list(KINDS), [KINDS[one] for one in kinds or KINDS])[0]
    chosen = rng.choice([None, *range(len(spec["sets"]))])
    size = ranks if chosen is None else len(spec["sets"][chosen])
    op: Spec = {"kind": kind, "set": chosen, "stage": rng.randrange(stages)}
    op["how"] = rng.choice(["sync", "stage", "late"])
    if kind == "barrier":
        op["how"] = "sync"  # it has no other form
        return op
    op["width"] = rng.choice([0, 1, 3])
    op["slice"] = rng.random() < 0.3
    if kind in _REDUCING:
        op["dtype"] = rng.choice(reference.FLOATS + reference.INTEGERS)
        op["reduce"] = rng.choice(_OPERATIONS)
        if spec["exact"] and op["dtype"] in reference.FLOATS and op["reduce"] == "SUM" and rng.random() < 0.3:
            op["scale"] = [rng.choice([0.5, 2.0]), rng.choice([0.5, 1.0, 2.0])]
    elif kind == "sparse_allreduce":
        op |= {"how": "late", "dtype": rng.choice(["float32", "float64"]), "rows": [], "entries": 20}
        op |= {"width": rng.choice([0, 3]), "reduce": "SUM", "height": rng.choice([1, 7, 100])}
        return op
    else:
        op["dtype"] = rng.choice(_DTYPES)
    parts = rng.randint(1, 4) if kind.startswith("grouped") else 1
    if kind in _SAME_SHAPE:
        op["rows"] = [[rng.choice(sizes)] * size for _ in range(parts)]
    else:
        op["rows"] = [[rng.choice(sizes) for _ in range(size)] for _ in range(parts)]
    if kind in _IN_PLACE:
        op["in_place"] = rng.random() < 0.4
    if kind == "broadcast":
        op["root"] = rng.randrange(size)
    if kind == "alltoall":
        op["even"] = rng.random() < 0.3
        most = max(sizes) // size
        op["splits"] = [
            [rng.choice([0, 1, most, rng.randint(0, most)])] * size
            if op["even"]
            else [rng.choice([0, 1, rng.randint(0, most)]) for _ in range(size)]
            for _ in range(size)
        ]
        op["rows"] = [[sum(row) for row in op["splits"]]]
    return op


def vary(rng: random.Random, spec: Spec, ranks: int) -> None:
    """Make some all-reduces Adasum, some tensors of memory that ranks share, and give the session optimizers."""
    for op in spec["ops"]:
        is_adasum = op["kind"] in ("allreduce", "grouped_allreduce") and op["dtype"] in reference.FLOATS
        if is_adasum and op["stage"] >= 0 and "scale" not in op and rng.random() < 0.25:
            op["reduce"] = "ADASUM"
        if "slice" in op and rng.random() < 0.25:
            op["shared"] = True
    stages = [op["stage"] for op in spec["ops"]]
    for _ in range(rng.choice([0, 0, 1, 2])):
        chosen = rng.choice([None, *range(len(spec["sets"]))])
        stage = rng.choice([max(stages), *stages]) if chosen is None else max(0, *stages)
        stage = -1 if spec.get("joined") and chosen is None and rng.random() < 0.3 else stage
        size = ranks if chosen is None else len(spec["sets"][chosen])
        op = horovod_optimizers.draw(rng, ranks=size, exact=spec["exact"], joined=stage < 0)
        spec["ops"].append({**op, "set": chosen, "stage": stage})


def deviate(rng: random.Random, spec: Spec, ranks: int) -> tuple[int, int, str, Spec | None] | None:
    """The rank that deviates, in which operation, how, and what it does instead (None: nothing). None if nothing fits."""
    own = random.Random(f"{spec['key']} deviates")
    optimizers = [index for index, op in enumerate(spec["ops"]) if _is_fit_optimizer(spec, op, ranks)]
    if optimizers and own.random() < 0.7:
        index = own.choice(optimizers)
        op = spec["ops"][index]
        found = horovod_optimizers.deviate(own, op, is_last=_is_last(spec, index))
        return None if found is None else (own.choice(members(spec, op, ranks)), index, *found)
    kind = rng.choice(DEVIATIONS)
    fit = [index for index, op in enumerate(spec["ops"]) if _is_fit(spec, op, kind, ranks)]
    if not fit:
        return None
    index = rng.choice(fit)
    op, instead = spec["ops"][index], None
    if kind == "dtype":
        wide = ["float32", "float64", "int32", "uint8"]
        # Adasum is for floating point alone, and says so at once.
        wide = wide[:2] if op.get("reduce") == "ADASUM" else wide
        instead = {**op, "dtype": rng.choice([one for one in wide if one != op["dtype"]])}
    elif kind == "rows":
        instead = {**op, "rows": [[op["rows"][0][0] + 1] * len(op["rows"][0]), *op["rows"][1:]]}
    elif kind == "width":
        instead = {**op, "width": op["width"] + 1}
    elif kind == "reduce":
        instead = {**op, "reduce": rng.choice([one for one in ("SUM", "AVG", "MIN", "MAX") if one != op["reduce"]])}
    elif kind == "root":
        size = len(members(spec, op, ranks))
        instead = {**op, "root": (op["root"] + rng.randrange(1, size)) % size}
    return rng.choice(members(spec, op, ranks)), index, kind, instead


def _is_fit_optimizer(spec: Spec, op: Spec, ranks: int) -> bool:
    return op["kind"] == "optimizer" and len(members(spec, op, ranks)) > 1 and op["stage"] >= 0


def _is_last(spec: Spec, index: int) -> bool:
    """Whether nobody makes anything after this operation."""
    later = [
        op for op in spec["ops"][index + 1 :] if op["stage"] == spec["ops"][index]["stage"] and op["how"] == "sync"
    ]
    is_last_stage = spec["ops"][index]["stage"] == max(op["stage"] for op in spec["ops"])
    return is_last_stage and not later and not spec.get("joined")


def _is_fit(spec: Spec, op: Spec, kind: str, ranks: int) -> bool:
    others = ("barrier", "sparse_allreduce", "optimizer")
    if len(members(spec, op, ranks)) < 2 or op["kind"] in others or op["stage"] < 0:
        return False
    if kind == "missing":
        # The others wait for it until this rank has shut Horovod down; a rank that has joined counts as zeros.
        return spec["named"] and op["how"] == "late" and not spec.get("joined")
    if kind == "rows":
        return op["kind"] in _SAME_SHAPE
    if kind == "width":
        return op["width"] > 0 and "splits" not in op
    if kind == "reduce":
        return op["kind"] in _REDUCING and "scale" not in op
    if kind == "root":
        return op["kind"] == "broadcast"
    return True


def members(spec: Spec, op: Spec, ranks: int) -> list[int]:
    """The job's ranks that make an operation."""
    if op["stage"] < 0:
        return [rank for rank in range(ranks) if rank not in spec["joined"]]
    return list(range(ranks)) if op["set"] is None else spec["sets"][op["set"]]


def order(spec: Spec, ranks: int, me: int) -> Iterator[tuple[str, int]]:
    """What rank ``me`` does, in turn: ("submit", OPERATION), ("finish", OPERATION), ("join", -1)."""
    ops = spec["ops"]

    def shuffled(indices: list[int], what: str) -> list[int]:
        found = list(indices)
        random.Random(f"{spec['key']} {me} {what}").shuffle(found)
        return found

    def stage(number: int) -> Iterator[tuple[str, int]]:
        mine = [index for index, op in enumerate(ops) if op["stage"] == number and me in members(spec, op, ranks)]
        later = [index for index in mine if ops[index]["how"] != "sync"]
        for index in shuffled(later, f"submit {number}") if spec["named"] else later:
            yield "submit", index
        for index in shuffled([index for index in later if ops[index]["how"] == "stage"], f"finish {number}"):
            yield "finish", index
        for index in mine:
            if index not in later:
                yield "submit", index
                yield "finish", index
        late.extend(index for index in later if ops[index]["how"] == "late")

    late: list[int] = []
    for number in sorted({op["stage"] for op in ops if op["stage"] >= 0}):
        yield from stage(number)
    if spec.get("joined"):
        if me not in spec["joined"]:
            yield from stage(-1)
        yield from (("finish", index) for index in shuffled(late, "join"))
        late.clear()
        yield "join", -1
    yield from (("finish", index) for index in shuffled(late, "end"))


def arguments(spec: Spec, index: int, op: Spec) -> tuple[str, str, dict[str, Any]]:
    """The function of ``hvd`` that makes an operation, how it reduces, and its arguments but for tensors and process sets."""
    kind, how = op["kind"], dict[str, Any]()
    if spec["named"] or kind == "sparse_allreduce":
        how["name"] = f"op{index}"
    if "scale" in op:
        how["prescale_factor"], how["postscale_factor"] = op["scale"]
    blocks = op["how"] == "sync" and not (kind == "alltoall" and op["even"])
    reduces = "reduce" in op and kind not in ("broadcast", "allgather", "alltoall")
    # alltoall() returns no received splits where none were given: its handle does.
    suffix = ("" if blocks else "_async") + ("_" if op.get("in_place") and kind in _IN_PLACE else "")
    return kind + suffix, _NAMES[op["reduce"]] if reduces else "", how


def simpler(spec: Spec) -> Iterator[Spec]:
    """Smaller sessions."""
    ops = spec["ops"]
    length = max(1, len(ops) // 2)
    while len(ops) > 1:
        for start in range(0, len(ops), length):
            yield {**spec, "ops": ops[:start] + ops[start + length :]}
        if length == 1:
            break
        length //= 2
    if spec.get("joined") and not any(op["stage"] < 0 for op in ops):
        yield {**spec, "joined": []}
    if spec["sets"] and all(op["set"] is None for op in ops):
        yield {**spec, "sets": []}
    for index, op in enumerate(ops):
        for changed in _simpler_op(op):
            yield {**spec, "ops": [*ops[:index], changed, *ops[index + 1 :]]}


def _simpler_op(op: Spec) -> Iterator[Spec]:
    if op["kind"] == "optimizer":
        yield from horovod_optimizers.simpler(op)
        return
    if op.get("shared"):
        yield {name: value for name, value in op.items() if name != "shared"}
    if op.get("reduce") == "ADASUM":
        yield {**op, "reduce": "SUM"}
    if op["how"] != "sync" and op["kind"] != "sparse_allreduce":
        yield {**op, "how": "sync"}
    if op.get("slice"):
        yield {**op, "slice": False}
    if "scale" in op:
        yield {name: value for name, value in op.items() if name != "scale"}
    if len(op.get("rows", ())) > 1:
        yield {**op, "rows": op["rows"][:1]}
    if "splits" not in op and any(rows > 1 for row in op.get("rows", ()) for rows in row):
        yield {**op, "rows": [[-(-rows // 2) for rows in row] for row in op["rows"]]}
    if op.get("dtype", "float32") != "float32":
        yield {**op, "dtype": "float32"}


# ---------------------------------------------------------------------------------------------------------------- model


def given(spec: Spec, op: Spec, index: int, part: int, me: int) -> torch.Tensor:
    """What member ``me`` gives as its tensor ``part``, in one dimension."""
    return model.values(_of(spec, op, index), me, part, op["rows"][part][me] * max(1, op["width"]))


def expected(spec: Spec, op: Spec, index: int, part: int, me: int, size: int) -> tuple[torch.Tensor, Any]:
    """What must come out of tensor ``part`` on member ``me``, in one dimension, and its bound (`model.Slot`)."""
    everything = [given(spec, op, index, part, other) for other in range(size)]
    kind, width = op["kind"].removeprefix("grouped_"), max(1, op["width"])
    if kind == "allgather":
        return torch.cat(everything), None
    if kind == "broadcast":
        return everything[op["root"]], None
    if kind == "alltoall":
        starts = [sum(row[:me]) * width for row in op["splits"]]
        sent = [one[at : at + row[me] * width] for one, at, row in zip(everything, starts, op["splits"], strict=True)]
        return torch.cat(sent), None
    if kind == "reducescatter":
        first, rows = share(op["rows"][part][0], size, me)
        everything = [one[first * width : (first + rows) * width] for one in everything]
    if op.get("reduce") == "ADASUM":
        return horovod_optimizers.adasum(everything)
    if op["stage"] < 0:
        everything += [torch.zeros_like(everything[0])] * len(spec["joined"])
    result, bound = model.reduced(_of(spec, op, index), everything)
    before, after = op.get("scale", (1.0, 1.0))
    return (result * (before * after)).to(result.dtype) if "scale" in op else result, bound


def share(rows: int, size: int, me: int) -> tuple[int, int]:
    """Of a reduce-scatter: the first of a member's rows, and how many they are. The first members have one more."""
    each, more = divmod(rows, size)
    return each * me + min(me, more), each + (me < more)


def _of(spec: Spec, op: Spec, index: int) -> Spec:
    return {**op, "key": f"{spec['key']} {index}", "exact": spec["exact"]}


# ------------------------------------------------------------------------------------------------------------- on a rank


class Session:
    """One rank's session.

    Args:
        pending: the call (`run._Pending`).
        told: turns an error into what a report says of it. None: errors are raised.
    """

    def __init__(self, pending: Any, told: Any) -> None:
        import penstock.horovod.torch as hvd

        self._hvd, self._pending, self._told = hvd, pending, told
        self._spec, self._me, self._ranks = pending.spec, pending.me, pending.size
        self._instead: dict[int, Spec | None] = {int(key): op for key, op in self._spec.get("instead", {}).items()}
        self._made: dict[int, list[tensors.Made]] = {}
        self._open: dict[int, Any] = {}
        self._optimizers: dict[int, horovod_optimizers.Steps] = {}

    def run(self) -> None:
        """Raises HorovodInternalError where the program is right, and what its end raises."""
        self._sets = [self._hvd.ProcessSet(ranks) for ranks in self._spec["sets"]]
        self._hvd.init(process_sets=self._sets)
        try:
            for what, index in order(self._spec, self._ranks, self._me):
                if what == "join":
                    self._join()
                elif what == "submit":
                    self._submit(index)
                else:
                    self._finish(index)
        finally:
            self._hvd.shutdown()
            # Handles of operations that nobody has waited for keep their tensors.
            for finish in self._open.values():
                with contextlib.suppress(self._hvd.HorovodInternalError):
                    finish()
            self._open.clear()
            if self._optimizers:
                # torch keeps the graph of a pass that raised until this thread's next pass.
                torch.ones(1, requires_grad=True).sum().backward()
            self._optimizers.clear()

    def _join(self) -> None:
        for index, op in enumerate(self._spec["ops"]):
            if op["kind"] == "optimizer" and op["stage"] < 0 and self._me in self._spec["joined"]:
                # All ranks make the same optimizers; this one has nothing to step with.
                self._make_optimizer(index, op, 0, 1)
        last, joined = self._hvd.join(), self._spec["joined"]
        if last in joined and any(op["stage"] < 0 for op in self._spec["ops"]):
            self._complain(f"join says that rank {last} came last, and not one of those that went on")
        self._pending.rank.digests[f"{self._pending.name}/join"] = last

    def _submit(self, index: int) -> None:
        """Make operation ``index``; a blocking one ends here."""
        right = self._spec["ops"][index]
        op = self._instead.get(index, right)
        if op is None:
            return
        everybody = members(self._spec, right, self._ranks)
        me, kind = everybody.index(self._me), op["kind"]
        how: dict[str, Any] = {} if op["set"] is None else {"process_set": self._sets[op["set"]]}
        if kind == "barrier":
            self._hvd.barrier(**how)
            return
        if kind == "optimizer":
            self._open[index] = lambda: self._run_optimizer(index, op, right, me, len(everybody))
            return
        name, reduction, more = arguments(self._spec, index, op)
        how |= more
        if reduction:
            how["op"] = getattr(self._hvd, reduction)
        if kind == "sparse_allreduce":
            self._open[index] = self._hvd.sparse_allreduce_async(self._sparse(op, index, self._me), **how)
            return
        layout = {(0, 0): "flat", (1, 0): "slice", (0, 1): "shared", (1, 1): "shared slice"}[
            op["slice"], op.get("shared", False)
        ]
        made = []
        for part in range(len(op["rows"])):
            flat = given(self._spec, op, index, part, me)
            after, bound = flat, None
            if op.get("in_place") and op is right:
                after, bound = expected(self._spec, op, index, part, me, len(everybody))
            made.append(tensors.Made(model.Slot(flat, after if op is right else None, bound, layout), index))
        self._made[index] = made
        self._pending.keep(f"operation {index}", [one.whole for one in made])
        shape = (-1, op["width"]) if op["width"] else (-1,)
        views = [one.tensor.view(shape) if one.tensor.numel() else one.tensor.view(0, *shape[1:]) for one in made]
        if kind == "broadcast":
            how["root_rank"] = everybody[op["root"]]
        if kind == "alltoall" and not op["even"]:
            how["splits"] = torch.tensor(op["splits"][me], dtype=torch.int32)
        call = getattr(self._hvd, name)
        tensor = views if kind.startswith("grouped") else views[0]
        if "_async" not in name:
            self._open[index] = lambda: call(tensor, **how)
        else:
            handle = call(tensor, **how)
            self._open[index] = lambda: self._hvd.synchronize(handle)

    def _finish(self, index: int) -> None:
        finish = self._open.pop(index, None)
        if finish is None:
            return
        started_s = time.monotonic()
        try:
            found = finish()
        except self._hvd.HorovodInternalError as error:
            if self._told is None:
                raise
            end = {"call": self._pending.name, "step": f"op {index}", "seconds": time.monotonic() - started_s}
            self._pending.rank.ends.append({**end, **self._told(error)})
        else:
            self._check(index, found)

    def _make_optimizer(self, index: int, op: Spec, me: int, size: int) -> horovod_optimizers.Steps:
        chosen = None if op["set"] is None else self._sets[op["set"]]
        zeros = len(self._spec["joined"]) if op["stage"] < 0 else 0
        keyed = _of(self._spec, op, index)
        made = horovod_optimizers.Steps(self._hvd, keyed, f"op{index}", chosen, me=me, size=size, zeros=zeros)
        self._optimizers[index] = made
        return made

    def _run_optimizer(self, index: int, op: Spec, right: Spec, me: int, size: int) -> None:
        made = self._make_optimizer(index, op, me, size)
        self._pending.keep(f"operation {index}, weight", list(made.module.parts))

        def complain(text: str) -> None:
            self._complain(f"operation {index} (optimizer), {text}")

        def digest(part: str, bits: int) -> None:
            self._pending.rank.digests[f"{self._pending.name}/{index}/{part}/{op['set']}"] = bits

        made.run(_of(self._spec, right, index), complain, digest)

    def _check(self, index: int, found: Any) -> None:
        op = self._spec["ops"][index]
        if op["kind"] == "optimizer":
            return  # it has looked at every step
        if index in self._instead:
            self._complain(f"operation {index} has succeeded, though it was another than the other ranks'")
            return
        everybody = members(self._spec, op, self._ranks)
        me, size = everybody.index(self._me), len(everybody)
        if op["kind"] == "sparse_allreduce":
            wanted = sum(self._sparse(op, index, rank).to_dense() for rank in everybody)
            if not torch.equal(found.to_dense(), wanted):  # type: ignore[arg-type]
                self._complain(f"operation {index} (sparse_allreduce): values are wrong, the first at any")
            return
        if op["kind"] == "alltoall":
            found, received = found
            if received.tolist() != [row[me] for row in op["splits"]]:
                self._complain(f"operation {index} (alltoall): received splits are wrong, the first at 0: {received}")
        for part, one in enumerate(found if op["kind"].startswith("grouped") else [found]):
            after, bound = expected(self._spec, op, index, part, me, size)
            what = f"operation {index} ({op['kind']}), tensor {part}"
            if one.numel() != after.numel() or one.shape[1:] != torch.Size([op["width"]] if op["width"] else []):
                self._complain(f"{what}: shapes are wrong, the first at 0: {one.shape} for {after.numel()} elements")
            else:
                for text in (
                    tensors.Made(model.Slot(one.reshape(-1), after, bound), 0).wrong(),
                    self._given(index, part),
                ):
                    if text:
                        self._complain(f"{what}: {text}")
            if "allreduce" in op["kind"]:
                digest = zlib.crc32(tensors.bytes_of(one))
                self._pending.rank.digests[f"{self._pending.name}/{index}/{part}/{op['set']}"] = digest
        self._made.pop(index)

    def _given(self, index: int, part: int) -> str | None:
        return self._made[index][part].wrong()

    def _sparse(self, op: Spec, index: int, rank: int) -> torch.Tensor:
        return model.sparse({**_of(self._spec, op, index), "rows": op["height"]}, rank)

    def _complain(self, text: str) -> None:
        self._pending.rank.complain(f"{self._pending.what}: {text}")
