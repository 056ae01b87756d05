"""Makes a failing program small: fewer calls, ranks, steps and bytes, as long as it fails in the same way.

Delta debugging (Zeller and Hildebrandt 2002) over the program as data. Pure but for ``fails``, which runs a candidate.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from random_programs import gradients, horovod_sessions

Program = dict[str, Any]


def shrink(program: Program, fails: Callable[[Program], bool], *, trials: int = 300) -> Program:
    """The smallest program found with at most ``trials`` runs."""
    best, left, progress = copy.deepcopy(program), trials, True
    tried = set()

    def smaller(way: Callable[[Program], Iterator[Program]]) -> Program | None:
        nonlocal left
        for candidate in _candidates(best, (way,)):
            text = json.dumps(candidate)
            if left <= 0 or text in tried:
                continue
            tried.add(text)
            left -= 1
            if fails(candidate):
                return candidate
        return None

    while progress:
        progress = False
        # Each way as long as it helps: to begin with the first one after every step would try all calls again.
        for way in _WAYS:
            while (found := smaller(way)) is not None:
                best, progress = found, True
    return best


def size(program: Program) -> tuple[int, int, int, int]:
    """Smaller is better: ranks, calls, steps, elements."""
    elements = sum(sum(spec.get("counts", ())) for spec in program["calls"].values())
    return program["ranks"], len(program["calls"]), sum(map(len, program["steps"])), elements


def _candidates(
    program: Program, ways: Iterable[Callable[[Program], Iterator[Program]]] | None = None
) -> Iterator[Program]:
    """Smaller programs, the boldest steps first. Each is valid: what a call needs goes with it, and the deviation stays."""
    wrong = program["wrong"] or {}
    keep = {wrong[one] for one in ("call", "other") if one in wrong}
    yield from (found for way in ways or _WAYS for found in way(program) if keep <= found["calls"].keys())


def _without_calls(program: Program) -> Iterator[Program]:
    keep = {program["wrong"]["call"], program["wrong"].get("other")} if program["wrong"] else set()
    names = [name for name in program["calls"] if name not in keep]
    length = max(1, len(names) // 2)
    while names:
        for start in range(0, len(names), length):
            yield without(program, set(names[start : start + length]))
        if length == 1:
            return
        length //= 2


def without(program: Program, gone: set[str]) -> Program:
    """The program without these calls, without the groups whose making went, and without what was called in them."""
    found = copy.deepcopy(program)
    groups = {spec["group"] for name, spec in program["calls"].items() if name in gone and spec["call"] == "new_group"}
    gone = gone | {name for name, spec in program["calls"].items() if spec["group"] in groups}
    found["calls"] = {name: spec for name, spec in found["calls"].items() if name not in gone}
    found["groups"] = {name: group for name, group in found["groups"].items() if name not in groups}
    found["steps"] = [
        [step for step in steps if step[0] in _OF_NO_CALL or step[1] not in gone] for steps in found["steps"]
    ]
    return found


def _without_rank(program: Program) -> Iterator[Program]:
    """The last rank goes, with the messages from and to it; roots move to ranks that are left."""
    last = program["ranks"] - 1
    if last < 2 or (program["wrong"] and program["wrong"]["rank"] == last):
        return
    fault = program.get("fault", {})
    if last in (fault.get("rank"), fault.get("from")):
        return
    found = copy.deepcopy(program)
    found["ranks"] = last
    found["steps"].pop()
    gone = set()
    for name, spec in found["calls"].items():
        group = found["groups"][spec["group"]]
        if last not in group or spec["call"] == "new_group":
            continue
        size = len(group) - 1
        if spec["call"] == "hvd":
            gone.add(name)
            continue
        if size == 0 or ("src" in spec and size in (spec["src"], spec["dst"])):
            gone.add(name)
            continue
        if "root" in spec:
            spec["root"] %= size
        if spec["call"] == "exchange":
            spec["messages"] = [one for one in spec["messages"] if size not in one[:2]]
        if spec["call"] in ("all_gather", "reduce_scatter") and len(spec["counts"]) > 1:
            spec["counts"] = spec["counts"][:size]
        if "splits" in spec:
            spec["splits"] = [row[:size] for row in spec["splits"][:size]]
    for name, spec in found["calls"].items():
        if spec["call"] == "new_group" and found["groups"][spec["group"]] == [last]:
            gone.add(name)
    found["groups"] = {name: [rank for rank in group if rank != last] for name, group in found["groups"].items()}
    yield without(found, gone)


def _without_steps(program: Program) -> Iterator[Program]:
    for rank, steps in enumerate(program["steps"]):
        for at, step in enumerate(steps):
            if step[0] in ("pause", "drop", "refused", "destroyed"):
                found = copy.deepcopy(program)
                del found["steps"][rank][at]
                yield found


def _blocking(program: Program) -> Iterator[Program]:
    """A wait that directly follows its issue becomes one blocking call."""
    for rank, steps in enumerate(program["steps"]):
        for at in range(len(steps) - 1):
            if steps[at][0] == "issue" and steps[at + 1] == ["wait", steps[at][1]]:
                found = copy.deepcopy(program)
                found["steps"][rank][at][0] = "call"
                del found["steps"][rank][at + 1]
                yield found


def _simpler_calls(program: Program) -> Iterator[Program]:
    for name, spec in program["calls"].items():
        if (program["wrong"] or {}).get("call") == name and spec["call"] in ("hvd", "reducer", "ddp"):
            # The deviation is written for the call as it is.
            continue
        for simpler in _simpler(spec):
            found = copy.deepcopy(program)
            found["calls"][name] = simpler
            yield found
        if spec["group"] != "world" and spec["call"] == "new_group" and len(program["groups"][spec["group"]]) > 1:
            continue


def _simpler(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if spec["call"] == "hvd":
        yield from horovod_sessions.simpler(spec)
        return
    if spec["call"] in ("reducer", "ddp"):
        yield from gradients.simpler(spec)
    counts = spec.get("counts", [])
    several = "coalesced" in spec["call"] or spec["call"] in (
        "reducer",
        "ddp",
        "hvd allreduce",
        "train",
        "elastic",
    )
    if several and len(counts) > 1:
        yield {**spec, "counts": counts[: len(counts) // 2]}
        yield {**spec, "counts": counts[len(counts) // 2 :]}
    for at, count in enumerate(counts):
        for smaller in {1, count // 2, count - 1}:
            if 0 < smaller < count:
                yield {**spec, "counts": [*counts[:at], smaller, *counts[at + 1 :]]}
    if spec.get("layouts", ["flat"]) != ["flat"]:
        yield {**spec, "layouts": ["flat"]}
        for layout in spec["layouts"]:
            if spec["layouts"] != [layout]:
                yield {**spec, "layouts": [layout]}
    if "priority" in spec:
        yield {name: value for name, value in spec.items() if name != "priority"}
    if "functional" in spec:
        yield {name: value for name, value in spec.items() if name != "functional"}
    if spec.get("in_place") or spec.get("stacked"):
        yield {**spec, "in_place": False, "stacked": False}
    if "dtypes" in spec:
        yield {name: value for name, value in spec.items() if name != "dtypes"}
    if spec.get("dtype", "float32") != "float32":
        yield {**spec, "dtype": "float32"}
    if spec.get("reduce", "SUM") not in ("SUM", "AVG"):
        yield {**spec, "reduce": "SUM"}
    for at, message in enumerate(spec.get("messages", ())):
        yield {**spec, "messages": [*spec["messages"][:at], *spec["messages"][at + 1 :]]}
        if message[2] > 1:
            smaller = [*message[:2], message[2] // 2]
            yield {**spec, "messages": [*spec["messages"][:at], smaller, *spec["messages"][at + 1 :]]}
    if "splits" in spec:
        halves = [[rows // 2 for rows in row] for row in spec["splits"]]
        if halves != spec["splits"]:
            yield {**spec, "splits": halves}
        if spec["width"] > 1:
            yield {**spec, "width": 1}
    if spec.get("count", 0) > 0:
        yield {**spec, "count": spec["count"] // 2}
    if spec.get("steps", 1) > 1:
        yield {**spec, "steps": 1}


# The boldest first.
_WAYS = (_without_calls, _without_rank, _without_steps, _blocking, _simpler_calls)
# Steps that belong to no call: ["pause", ...] and the like.
_OF_NO_CALL = ("pause", "stop", "kill", "leave", "strike")
