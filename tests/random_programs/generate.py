"""A seed becomes a program: calls, and for each rank the steps in which it makes them.

A program is plain data (JSON), so that it can be stored, shrunk and rendered:

```text
  {"seed": 7, "ranks": 3, "timeout_s": 40, "medium": "memory",
   "groups": {"world": [0, 1, 2], "g1": [0, 2]},
   "calls": {"0": {"call": "all_reduce", "group": "world", "counts": [17], "dtype": "float32", ...}},
   "steps": [[["issue", "0"], ["pause", 250], ["wait", "0"]], ...]         one list a rank
   "wrong": null}
```
Why a right program cannot block for ever: calls lie on one timeline. A rank may issue a call up to a few places later than
the others, but calls of one group keep their order, and a rank waits for a call only at a place where every rank has issued
it. Take the blocked rank that waits for the call whose last issue comes first: each rank that has not issued that call is
blocked before it, in a wait for a call whose last issue comes even earlier. There is none.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Any

from collectives import reference
from random_programs import gradients, horovod_sessions, shrink

Program = dict[str, Any]

ITEM_BYTES = {
    "float32": 4,
    "float64": 8,
    "float16": 2,
    "bfloat16": 2,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "bool": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
# Where the engine changes how it sends: references above 8 KiB on one host, eager messages up to 32 KiB, frames of 16 to
# 256 KiB.
EDGES_BYTES = [8 << 10, 16 << 10, 32 << 10, 64 << 10, 256 << 10]
# Calls that torch only has in a blocking form.
BLOCKING = {
    "monitored_barrier",
    "functional all_reduce",
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
    "message objects",
    "reducer",
    "ddp",
    "hvd allreduce",
    "hvd",
    "new_group",
    "destroy_group",
}
# Calls that make groups of their own.
FRONTS = ("reducer", "ddp", "hvd allreduce", "hvd")
# Calls that torch.distributed._functional_collectives has as well: they give a new tensor, which is waited for.
FUNCTIONAL = ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
# Between two ranks of the group.
PAIRWISE = ("message", "message objects")
ROOTED = {"broadcast", "reduce", "gather", "scatter", "broadcast_object_list", "gather_object", "scatter_object_list"}
REDUCING = {
    "all_reduce",
    "all_reduce_coalesced",
    "coalesced all_reduce",
    "functional all_reduce",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "coalesced reduce_scatter_tensor",
}
# Calls and how often they come, for groups of any size.
WEIGHTS = {
    "all_reduce": 16,
    "all_reduce_coalesced": 3,
    "coalesced all_reduce": 2,
    "functional all_reduce": 1,
    "reduce": 5,
    "broadcast": 8,
    "all_gather": 6,
    "all_gather_into_tensor": 6,
    "all_gather_coalesced": 1,
    "coalesced all_gather_into_tensor": 2,
    "gather": 4,
    "scatter": 4,
    "reduce_scatter": 5,
    "reduce_scatter_tensor": 5,
    "coalesced reduce_scatter_tensor": 2,
    "all_to_all": 4,
    "all_to_all_single": 5,
    "barrier": 3,
    "monitored_barrier": 1,
    "all_gather_object": 1,
    "broadcast_object_list": 1,
    "gather_object": 1,
    "scatter_object_list": 1,
    "message objects": 2,
    "sparse all_reduce": 2,
    "message": 18,
    "exchange": 5,
    "reducer": 2,
    "hvd allreduce": 1,
    "new_group": 5,
    "destroy_group": 2,
}
# What a wrong program does, and how often.
WRONG = {
    "count": 5,
    "dtype": 4,
    "reduce": 3,
    "root": 3,
    "call": 3,
    "order": 3,
    "missing": 2,
    "leave": 2,
    "kill": 1,
    "stop": 1,
    "timeout": 1,
}
WRONG_SHARE = 0.08
# Of wrong programs with a sparse all-reduce: one rank gives another shape to it.
WRONG_SPARSE_SHARE = 0.5
# Of programs with a front and no other deviation.
WRONG_FRONTS_SHARE = 0.08
# A time-out of a wait that no right program comes to.
LONG_S = 300.0


def generate(seed: int, *, medium: str = "memory", avoid: Collection[str] = (), wrong: bool | None = None) -> Program:
    """The program of a seed. ``avoid`` names known findings (see `known`), ``wrong`` forces or forbids a wrong program."""
    rng = random.Random(seed)
    ranks = rng.choice([2, 2, 3, 3, 4])
    program: Program = {
        "seed": seed,
        "ranks": ranks,
        "timeout_s": 40,
        "medium": medium,
        "groups": {"world": list(range(ranks))},
        "calls": {},
    }
    sizes = rng.choice(["small", "small", "mixed", "mixed", "edges", "large"])
    length = rng.choice([1, 3, 6, 10, 16, 25] if sizes != "large" else [1, 3, 6, 10])
    many = random.Random(f"{seed} many").random() < 0.02
    if many:
        # All of them open at once, as far as they do not block.
        sizes, length = "small", 100
    exact = rng.random() < 0.6
    alive = ["world"]
    for number in range(length):
        spec = _call(rng, program, alive, sizes, exact, number, avoid)
        if spec is not None:
            program["calls"][str(number)] = spec
    is_wrong = rng.random() < WRONG_SHARE
    _lay_out(rng, program, avoid, many=many)
    # Draws of their own: the seeds of programs that are known by number mean the same without them.
    more = random.Random(f"{seed} more")
    _vary(more, program)
    fronts = random.Random(f"{seed} fronts")
    _vary_fronts(fronts, program, avoid)
    _vary_further(random.Random(f"{seed} further"), program)
    _vary_reducers(random.Random(f"{seed} reducers"), program)
    program["wrong"] = None
    if is_wrong if wrong is None else wrong:
        kind = "splits" if more.random() < 0.1 else None
        kind = "sparse" if random.Random(f"{seed} sparse").random() < WRONG_SPARSE_SHARE else kind
        _spoil(rng, program, avoid, preferred=kind)
    if program["wrong"] is None and wrong is not False and fronts.random() < (1.0 if wrong else WRONG_FRONTS_SHARE):
        program = _spoil_front(fronts, program, avoid)
    return program


def members(program: Program, spec: dict[str, Any]) -> list[int]:
    """The job's ranks that make a call."""
    if spec["call"] == "new_group":
        return list(range(program["ranks"]))
    group = program["groups"][spec["group"]]
    return [group[spec["src"]], group[spec["dst"]]] if spec["call"] in PAIRWISE else group


# ---------------------------------------------------------------------------------------------------------------- calls


def _call(
    rng: random.Random,
    program: Program,
    alive: list[str],
    sizes: str,
    exact: bool,
    number: int,
    avoid: Collection[str],
) -> dict[str, Any] | None:
    group = rng.choice(alive)
    size = len(program["groups"][group])
    names = [name for name in WEIGHTS if name not in avoid]
    call = rng.choices(names, [WEIGHTS[name] for name in names])[0]
    if call == "new_group":
        name = f"g{number}"
        chosen = sorted(rng.sample(range(program["ranks"]), rng.randint(1, program["ranks"])))
        program["groups"][name] = chosen
        alive.append(name)
        return {"call": call, "group": name}
    if call == "destroy_group":
        if group == "world":
            return None
        alive.remove(group)
        return {"call": call, "group": group}
    if call == "hvd allreduce" and program["ranks"] != size:
        return None
    if call in (*PAIRWISE, "exchange") and size < 2:
        return None
    spec: dict[str, Any] = {"call": call, "group": group, "key": f"{program['seed']} {number}", "exact": exact}
    if call in ("barrier", "monitored_barrier"):
        return spec
    if call in ROOTED:
        spec["root"] = rng.randrange(size)
    if call == "message objects":
        spec["src"], spec["dst"] = rng.sample(range(size), 2)
    if call.endswith(("object", "objects", "object_list")):
        spec["count"] = rng.choice([0, 1, 100, 40_000])
        return spec
    if call == "sparse all_reduce":
        spec["reduce"] = rng.choice(["SUM", "SUM", "AVG"])
        spec["dtype"] = rng.choice(["float32", "float64", "int32", "int64"])
        spec["rows"], spec["width"], spec["entries"] = (
            rng.choice([1, 7, 1000]),
            rng.choice([0, 1, 5]),
            rng.choice([0, 1, 40]),
        )
        return spec
    if call in REDUCING:
        spec["reduce"] = rng.choice(["SUM"] * 4 + reference.OPERATIONS)
        kinds = [kind for kind in reference.REDUCIBLE if reference.is_defined(spec["reduce"], kind)]
        spec["dtype"] = rng.choice(kinds)
    elif call in ("reducer", "hvd allreduce"):
        spec["dtype"] = rng.choice(["float32", "float32", "float64", "bfloat16", "float16"])
        spec["reduce"] = "AVG"
    else:
        spec["dtype"] = rng.choice(reference.ALL_DTYPES)
    item = ITEM_BYTES[spec["dtype"]]
    if call.startswith("coalesced") and rng.random() < 0.3:
        # torch takes several dtypes in one coalesced call.
        kinds = [kind for kind in reference.ALL_DTYPES if "reduce" not in spec or kind in reference.REDUCIBLE]
        kinds = [kind for kind in kinds if "reduce" not in spec or reference.is_defined(spec["reduce"], kind)]
        spec["dtypes"] = [rng.choice(kinds) for _ in range(rng.randint(2, 3))]
        item = max(ITEM_BYTES[kind] for kind in spec["dtypes"])
    several = "coalesced" in call or call in ("reducer", "hvd allreduce")
    spec["counts"] = [_count(rng, sizes, item) for _ in range(rng.randint(1, 5) if several else 1)]
    if call in ("all_gather", "reduce_scatter") and rng.random() < 0.3:
        spec["counts"] = [_count(rng, sizes, item) for _ in range(size)]
    if call in ("all_to_all", "all_to_all_single"):
        _add_splits(rng, spec, size, sizes, item, avoid)
    if call == "message":
        spec["src"], spec["dst"] = rng.sample(range(size), 2)
        spec["tag"] = rng.choice([0, 0, 0, 1, 7])
        if "messages both ways" in avoid and spec["src"] > spec["dst"]:
            spec["tag"] += 100
        if rng.random() < 0.2:
            # A tag a sender: only it can match, so what a receive from any source gets is known.
            spec["tag"], spec["any_source"] = 200 + spec["src"], True
    if call == "exchange":
        pairs = [tuple(rng.sample(range(size), 2)) for _ in range(rng.randint(1, 2 * size))]
        spec["back_tag"] = 100 if "messages both ways" in avoid else 0
        spec["messages"] = [[src, dst, _count(rng, sizes, item)] for src, dst in pairs]
    if call in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        spec["in_place"] = rng.random() < 0.3
        spec["stacked"] = rng.random() < 0.3 and not spec["in_place"]
    if call == "reducer":
        spec["steps"] = rng.randint(1, 3)
        spec["closed"] = rng.random() < 0.5 or "reducer without close" in avoid
        spec["unused_percent"] = rng.choice([0, 0, 10, 40])
        spec["counts"] = [max(1, count) for count in spec["counts"]]
        # Not more buckets than a loaded machine reduces in a moment.
        spec["bucket_bytes"] = max(rng.choice([64, 4096, 1 << 16, 4 << 20]), sum(spec["counts"]) * item // 200)
    if call == "hvd allreduce":
        spec["counts"] = [max(1, count) for count in spec["counts"]]
    # Horovod compares shapes.
    kinds = ["flat", "slice"] if call == "hvd allreduce" else ["flat", "flat", "matrix", "slice", "scalar", "shared"]
    if call in ("all_gather", "gather", "scatter", "all_to_all", "reduce_scatter"):
        kinds.append("strided")
    spec["layouts"] = [rng.choice(kinds) for _ in range(rng.randint(1, 3))]
    element_wise = call in ("all_reduce", "all_reduce_coalesced", "broadcast", "reduce", "message")
    if rng.random() < 0.1 and element_wise and "channels_last" not in avoid:
        # The same order in memory on all ranks.
        spec["layouts"] = ["channels_last"]
    return spec


def _count(rng: random.Random, sizes: str, item: int) -> int:
    if sizes == "small":
        return rng.choice([0, 1, 2, 3, 5, 17, 100, 1023])
    if sizes == "edges":
        return max(0, rng.choice(EDGES_BYTES[:4]) // item + rng.choice([-1, 0, 1]))
    if sizes == "large":
        return rng.choice([1, 100_003, (1 << 20) // item + rng.choice([-1, 0, 1]), (3 << 20) // item - 5])
    return rng.choice([0, 1, 7, 511, 5000, max(0, rng.choice(EDGES_BYTES) // item + rng.choice([-1, 0, 1])), 33_333])


def _add_splits(
    rng: random.Random, spec: dict[str, Any], size: int, sizes: str, item: int, avoid: Collection[str]
) -> None:
    spec["width"] = rng.choice([1, 1, 3, 16])
    most = max(1, _count(rng, sizes, item) // spec["width"])
    shape = rng.choice(["even", "uneven", "sparse"])
    if shape == "even":
        rows = [[most] * size for _ in range(size)]
    elif shape == "uneven":
        rows = [[rng.randint(0, most) for _ in range(size)] for _ in range(size)]
    else:
        rows = [[rng.choice([0, 0, most]) for _ in range(size)] for _ in range(size)]
    spec["splits"], spec["even"] = rows, shape == "even"


# ------------------------------------------------------------------------------------------------------------- timeline


def _lay_out(rng: random.Random, program: Program, avoid: Collection[str], *, many: bool) -> None:
    """Give each rank its steps: when it issues a call, when it waits, where it pauses. With ``many`` it waits last."""
    calls, ranks = program["calls"], program["ranks"]
    slack = rng.choice([0, 1, 3, 6])
    blocking_share = 0.0 if many else rng.choice([0.0, 0.3, 0.7, 1.0])
    issue_at: dict[tuple[str, int], int] = {}
    latest: dict[tuple[str, int], int] = {}  # where a rank issued the last call of a group
    floor = 0  # the place of the last call that blocks: everything before it was issued before it
    complete_at: dict[str, int] = {}
    for number, (name, spec) in enumerate(calls.items()):
        place = 4 * number
        blocks = spec["call"] in BLOCKING
        if blocks:
            floor = place = max([place, *(at + 1 for at in complete_at.values())])
        # Collectives keep their order, and so do messages of one tag.
        order = spec["group"]
        if spec["call"] in (*PAIRWISE, "exchange"):
            order += f" messages {spec.get('tag', 0) % 100}"
        for rank in members(program, spec):
            late = 0 if blocks else 4 * rng.randint(0, slack)
            issue_at[name, rank] = max(place + late, floor, latest.get((order, rank), 0))
        complete_at[name] = max(issue_at[name, rank] for rank in members(program, spec))
        for rank in members(program, spec):
            if blocks:
                issue_at[name, rank] = complete_at[name]
            latest[order, rank] = issue_at[name, rank]
    end = 4 * len(calls) + 40
    steps: list[list[list[Any]]] = []
    for rank in range(ranks):
        events: list[tuple[int, int, int, list[Any]]] = []  # place, issues before waits, order, step
        for number, (name, spec) in enumerate(calls.items()):
            if (name, rank) not in issue_at:
                continue
            at = issue_at[name, rank]
            if spec["call"] in BLOCKING:
                # What it blocks for comes after everything that is waited for at the same place.
                events.append((at, 0, number, ["call", name]))
                continue
            if rng.random() < 0.02 and _can_be_refused(spec, avoid):
                events.append((at, 0, number, ["refused", name]))
            if at == complete_at[name] and rng.random() < blocking_share:
                events.append((at, 0, number, ["call", name]))
                continue
            events.append((at, 0, number, ["issue", name]))
            if rng.random() < 0.05:
                events.append((at, 0, number, ["drop", name]))
            leaves = [
                issue_at[other, rank]
                for other, of in calls.items()
                if of["call"] == "destroy_group" and of["group"] == spec["group"] and (other, rank) in issue_at
            ]
            last = min([end, *leaves]) - 1
            until = rng.choice([complete_at[name], rng.randint(complete_at[name], max(complete_at[name], last)), last])
            until = last if many else until
            events.append((min(until, max(last, complete_at[name])), 1, rng.randrange(1 << 30), ["wait", name]))
        for _ in range(rng.choice([0, 0, 1, 2])):
            length_us = int(10 ** rng.uniform(1, 4.3))
            events.append((rng.randrange(max(1, end)), 2, 0, ["pause", length_us]))
        if rng.random() < 0.003:
            # Longer than the second after which the engine asks where a message is.
            events.append((rng.randrange(max(1, end)), 2, 0, ["pause", 1_400_000]))
        steps.append([event[3] for event in sorted(events, key=lambda event: event[:3])])
    program["steps"] = steps


def _vary(rng: random.Random, program: Program) -> None:
    """Groups that are split off, waits with a time-out of their own, groups that are used after their end, passes that raise."""
    for spec in program["calls"].values():
        if spec["call"] == "new_group" and rng.random() < 0.3:
            spec["split"] = True
        if spec["call"] == "reducer" and rng.random() < 0.3:
            spec["raising"] = sorted(rng.sample(range(spec["steps"]), 1))
    for steps in program["steps"]:
        varied = []
        for step in steps:
            varied.append(step)
            if step[0] == "wait" and rng.random() < 0.1:
                step.append(LONG_S)
            if step[0] == "call" and program["calls"][step[1]]["call"] == "destroy_group" and rng.random() < 0.4:
                varied.append(["destroyed", step[1]])
        steps[:] = varied


def _vary_fronts(rng: random.Random, program: Program, avoid: Collection[str]) -> None:
    """Put lives of Horovod and passes of DistributedDataParallel into the places of other calls that block all ranks."""
    for name, spec in program["calls"].items():
        is_free = spec["call"] in BLOCKING and spec["call"] not in (*PAIRWISE, "new_group", "destroy_group")
        if not is_free:
            continue
        size = len(program["groups"][spec["group"]])
        if spec["call"] == "reducer":
            gradients.vary(rng, spec, size)
        elif spec["group"] == "world" and rng.random() < 0.35:
            program["calls"][name] = horovod_sessions.draw(rng, program["ranks"], f"{program['seed']} {name}")
        elif rng.random() < 0.25:
            drawn = {"call": "reducer", "group": spec["group"], "key": f"{program['seed']} {name}", "reduce": "AVG"}
            drawn |= {
                "exact": rng.random() < 0.6,
                "steps": rng.randint(1, 3),
                "unused_percent": rng.choice([0, 10, 40]),
            }
            drawn["dtype"] = rng.choice(["float32", "float64", "bfloat16", "float16"])
            drawn["counts"] = [rng.choice([1, 7, 300, 5000, 16_385]) for _ in range(rng.randint(1, 5))]
            drawn["closed"] = rng.random() < 0.5 or "reducer without close" in avoid
            drawn["bucket_bytes"] = rng.choice([256, 4096, 1 << 16, 4 << 20])
            gradients.vary(rng, drawn, size)
            program["calls"][name] = drawn


def _vary_further(rng: random.Random, program: Program) -> None:
    """Functional collectives, slices of shared memory, gradients in it, Horovod's optimizers and Adasum, and priorities."""
    refused = {step[1] for steps in program["steps"] for step in steps if step[0] == "refused"}
    for name, spec in program["calls"].items():
        can_be = spec["call"] in FUNCTIONAL and name not in refused and spec.get("reduce") != "PREMUL_SUM"
        if can_be and not spec.get("in_place") and rng.random() < 0.15:
            spec["functional"] = rng.choice(["waited", "used"])
        # Where nothing but average() ends a step, a gradient that is there at its beginning counts as averaged.
        can_be = spec["call"] in ("reducer", "ddp") and not spec.get("view") and not spec.get("averaging")
        if can_be and rng.random() < 0.25:
            spec["shared"] = True
        if "layouts" in spec and spec["call"] != "hvd allreduce":
            spec["layouts"] = [
                "shared slice" if one == "shared" and rng.random() < 0.4 else one for one in spec["layouts"]
            ]
        if spec["call"] == "hvd":
            horovod_sessions.vary(rng, spec, program["ranks"])
        elif rng.random() < 0.15:
            # The second number, if any, is given while the operation may wait.
            spec["priority"] = [rng.choice([0, 100, 200, 255]) for _ in range(rng.choice([1, 1, 2]))]


def _vary_reducers(rng: random.Random, program: Program) -> None:
    """Reducers that send 16 bits, change their setting, and have sparse embeddings and buffers."""
    for spec in program["calls"].values():
        if spec["call"] in ("reducer", "ddp"):
            gradients.vary_further(rng, spec, len(program["groups"][spec["group"]]))


def _can_be_refused(spec: dict[str, Any], avoid: Collection[str]) -> bool:
    """Whether a strided tensor in the place of its last one makes the call fail before anything is sent."""
    if spec["call"] not in (
        "all_reduce",
        "all_reduce_coalesced",
        "broadcast",
        "reduce",
        "message",
        "all_gather_into_tensor",
    ):
        return False
    return len(spec["counts"]) == 1 or "refused tensor in a list" not in avoid


# ---------------------------------------------------------------------------------------------------------------- wrong


def _spoil(rng: random.Random, program: Program, avoid: Collection[str], *, preferred: str | None) -> None:
    """Make one rank deviate, in the way ``preferred`` if a call is fit for that; ``program["wrong"]`` says how, for `judge`.
    Nothing changes where no call is fit for it."""
    kinds = [kind for kind in WRONG if f"wrong {kind}" not in avoid]
    kind = rng.choices(kinds, [WRONG[kind] for kind in kinds])[0]
    if preferred and any(_is_fit(preferred, program, spec, avoid) for spec in program["calls"].values()):
        kind = preferred
    fit = [name for name, spec in program["calls"].items() if _is_fit(kind, program, spec, avoid)]
    # What makes groups waits in the store for a rank that is gone, until the group's time-out, as with any backend.
    making: tuple[str, ...] = ("new_group", *FRONTS) if kind in ("leave", "kill", "timeout") else ()
    if "groups of a failed group" in avoid:
        making += FRONTS
    names = list(program["calls"])
    last = max([i for i, name in enumerate(names) if program["calls"][name]["call"] in making], default=-1)
    fit = [name for name in fit if names.index(name) > last]
    if not fit:
        return
    name = rng.choice(fit)
    spec = program["calls"][name]
    rank = rng.choice(members(program, spec) if kind != "timeout" else _needed(program, spec))
    steps = program["steps"][rank]
    at = next(i for i, step in enumerate(steps) if step[0] in ("issue", "call") and step[1] == name)
    wrong = {"kind": kind, "rank": rank, "call": name}
    if kind == "count":
        counts = list(spec["counts"])
        counts[0] = counts[0] + rng.choice([1, 2, 1000]) if rng.random() < 0.5 else max(1, counts[0] // 2)
        if counts == spec["counts"]:
            counts[0] += 1
        steps[at] = [*steps[at], {"counts": counts}]
    elif kind == "dtype":
        kinds = [k for k in ("float32", "int32", "int64", "uint8") if k != spec["dtype"]]
        if "reduce" in spec:
            kinds = [k for k in kinds if reference.is_defined(spec["reduce"], k)]
        if not kinds:
            return
        steps[at] = [*steps[at], {"dtype": rng.choice(kinds)}]
    elif kind == "reduce":
        kinds = [o for o in reference.OPERATIONS if o != spec["reduce"] and reference.is_defined(o, spec["dtype"])]
        if spec.get("functional"):
            kinds = [one for one in kinds if one != "PREMUL_SUM"]  # it has no name there
        if not kinds:
            return
        steps[at] = [*steps[at], {"reduce": rng.choice(kinds)}]
    elif kind == "root":
        size = len(program["groups"][spec["group"]])
        steps[at] = [*steps[at], {"root": (spec["root"] + rng.randrange(1, size)) % size}]
    elif kind == "call":
        other = "barrier" if spec["call"] == "all_reduce" else "all_reduce"
        steps[at] = [
            *steps[at],
            {
                "call": other,
                "functional": None,
                "reduce": "SUM",
                "dtype": "float32",
                "dtypes": None,
                "counts": [11],
                "layouts": ["flat"],
            },
        ]
    elif kind == "missing":
        program["steps"][rank] = [step for step in steps if step[0] == "pause" or step[1] != name]
    elif kind == "order":
        later = [
            i
            for i, step in enumerate(steps)
            if i > at
            and step[0] in ("issue", "call")
            and program["calls"][step[1]]["group"] == spec["group"]
            and program["calls"][step[1]]["call"] not in BLOCKING
            and program["calls"][step[1]]["call"] not in ("message", "exchange", "sparse all_reduce")
        ]
        if not later:
            return
        other = later[0]
        if _alike(program["calls"][steps[other][1]], spec):
            return
        if all(_is_empty(program["calls"][each]) for each in (name, steps[other][1])):
            # Where nothing is sent, nothing can be seen.
            return
        wrong["other"] = steps[other][1]
        waits = [i for i, step in enumerate(steps) if step[:2] == ["wait", name]]
        if waits and waits[0] < other:
            return
        steps[at], steps[other] = steps[other], steps[at]
    elif kind in ("leave", "kill"):
        del steps[at + rng.randint(0, 1) :]
        steps.append([kind])
        for other in program["calls"].values() if kind == "leave" else ():
            # Who receives from any source waits on, rightly: a rank that has not left could send. So these name it.
            ranks_there = program["groups"].get(other.get("group"), [])
            if other.get("any_source") and len(ranks_there) > 2 and ranks_there[other["src"]] == rank:
                del other["any_source"]
    elif kind == "stop":
        steps.insert(at + rng.randint(0, 1), ["stop", rng.choice([0.05, 0.3, 1.5])])
    elif kind == "splits":
        rows = [list(row) for row in spec["splits"]]
        me = program["groups"][spec["group"]].index(rank)
        other = rng.choice([one for one in range(len(rows)) if one != me])
        rows[me][other] = rng.choice([one for one in (0, 1, rows[me][other] + 1) if one != rows[me][other]])
        steps[at] = [*steps[at], {"splits": rows, "even": False}]
    elif kind == "sparse":
        steps[at] = [*steps[at], {"rows": spec["rows"] + 1}]
        _call_afterwards(program, name)
    elif kind == "timeout":
        steps.insert(at, ["pause", 3_500_000])
        program["timeout_s"] = 1.5
    program["wrong"] = wrong


def _call_afterwards(program: Program, name: str) -> None:
    """The group of a call outlives its failure: all of its ranks reduce something in it at their end, if they have it still."""
    group = program["calls"][name]["group"]
    if any(spec["call"] == "destroy_group" and spec["group"] == group for spec in program["calls"].values()):
        return
    last = str(1 + max(map(int, program["calls"])))
    program["calls"][last] = {
        "call": "all_reduce",
        "group": group,
        "key": f"{program['seed']} {last}",
        "exact": True,
        "reduce": "SUM",
        "dtype": "float32",
        "counts": [17],
        "layouts": ["flat"],
    }
    for rank in program["groups"][group]:
        program["steps"][rank].append(["call", last])


def _spoil_front(rng: random.Random, program: Program, avoid: Collection[str]) -> Program:
    """Make one rank deviate within a call of a front."""
    fit = [
        name
        for name, spec in program["calls"].items()
        if spec["call"] in ("hvd", "reducer", "ddp") and len(members(program, spec)) > 1 and "wrong fronts" not in avoid
    ]
    if not fit:
        return program
    name = rng.choice(fit)
    spec = program["calls"][name]
    if spec["call"] == "hvd":
        found = horovod_sessions.deviate(rng, spec, program["ranks"])
        if found is None:
            return program
        rank, index, how, instead = found
        wrong = {"kind": "hvd", "rank": rank, "call": name, "how": how, "op": index}
        changes: dict[str, Any] = {"instead": {str(index): instead}}
    else:
        drawn = gradients.deviate(rng, spec)
        if drawn is None:
            return program
        how, changes = drawn
        if f"wrong {how} of {spec['call']}" in avoid:
            return program
        rank = rng.choice(members(program, spec))
        wrong = {"kind": "gradients", "rank": rank, "call": name, "how": how}
        if gradients.is_outlived(spec, how):
            _call_afterwards(program, name)
        else:
            # The group is lost then, and what makes others waits in the store for ranks that are gone.
            names = list(program["calls"])
            program = shrink.without(program, set(names[names.index(name) + 1 :]))
    for step in program["steps"][rank]:
        if step[:2] == ["call", name]:
            step.append(changes)
    program["wrong"] = wrong
    return program


def _is_fit(kind: str, program: Program, spec: dict[str, Any], avoid: Collection[str]) -> bool:
    call = spec["call"]
    size = len(members(program, spec))
    if size < 2 or call in ("new_group", "destroy_group") or f"wrong {kind} of {call}" in avoid:
        return False
    if kind == "timeout":
        # Groups of split_group have torch's half an hour, and monitored_barrier gets that in every group.
        return spec["group"] == "world" and call != "monitored_barrier" and bool(_needed(program, spec))
    if kind in ("leave", "kill", "stop"):
        return call not in FRONTS
    if kind == "splits":
        return call == "all_to_all_single"
    if kind == "sparse":
        return call == "sparse all_reduce"
    if call in BLOCKING or call.startswith("all_to_all") or call in ("exchange", "sparse all_reduce"):
        return False
    if kind == "count":
        return len(spec.get("counts", ())) == 1 and not spec.get("in_place") and "dtypes" not in spec
    if kind == "dtype":
        # Where nothing is sent, nothing can be seen.
        is_one = len(spec.get("counts", ())) == 1 and "dtypes" not in spec
        return is_one and spec["counts"][0] > 0 and not spec.get("in_place")
    if kind == "reduce":
        return "reduce" in spec and sum(spec["counts"]) > 0 and "dtypes" not in spec
    if kind == "root":
        return "root" in spec and sum(spec["counts"]) > 0
    if kind in ("call", "order", "missing"):
        return call != "message"
    raise AssertionError(kind)


def _needed(program: Program, spec: dict[str, Any]) -> list[int]:
    """The job's ranks that others cannot end the call without."""
    call, group = spec["call"], program["groups"][spec["group"]]
    if call in (*FRONTS, "all_to_all", "all_to_all_single", "exchange") or 0 in spec.get("counts", ()):
        return []  # it depends, or where nothing is sent nobody waits
    if call in PAIRWISE:
        return [group[spec["src"]]]
    if call in ("broadcast", "scatter", "broadcast_object_list", "scatter_object_list"):
        return [group[spec["root"]]]
    return [rank for index, rank in enumerate(group) if index != spec.get("root")]


def _is_empty(spec: dict[str, Any]) -> bool:
    return sum(spec.get("counts", [1])) == 0


def _alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    names = ("call", "counts", "dtype", "reduce", "root")
    return all(one.get(name) == other.get(name) for name in names)


# ----------------------------------------------------------------------------------------------------------------- gloo


def for_gloo(program: Program) -> Program:
    """The calls of a right program that gloo has as well, on what it takes."""
    found = shrink.without(program, {name for name, spec in program["calls"].items() if not _is_gloos(spec)})
    for spec in found["calls"].values():
        spec.pop("shared", None)
        spec.pop("split", None)
        if "layouts" in spec:
            plain = {"shared": "flat", "shared slice": "slice"}
            spec["layouts"] = [plain.get(layout, layout) for layout in spec["layouts"]]
    return found


def _is_gloos(spec: dict[str, Any]) -> bool:
    if spec["call"] == "ddp":
        return not spec["hook"] and spec["dtype"] in _GLOO_DTYPES
    call = spec["call"]
    if call in ("new_group", "destroy_group"):
        return True
    if call in (*FRONTS, "all_to_all", "all_gather_coalesced") or call.startswith("coalesced"):
        return False
    if spec.get("any_source") and 0 in spec["counts"]:
        return False  # it refuses to receive nothing
    layouts = set(spec.get("layouts", ()))
    if {"strided", "channels_last"} & layouts or spec.get("stacked"):
        return False
    if {"matrix", "scalar"} & layouts and ("gather" in spec["call"] or "scatter" in spec["call"]):
        return False  # it compares shapes
    if spec["call"] in ("all_gather", "reduce_scatter") and len(spec["counts"]) > 1:
        return False
    if "reduce" in spec:
        return spec["reduce"] in ("SUM", "PRODUCT", "MIN", "MAX") and spec["dtype"] in _GLOO_DTYPES
    return spec.get("dtype", "float32") in _GLOO_DTYPES


_GLOO_DTYPES = ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64")
