"""Writes a program as a script of plain torch calls that anyone can run: ``python SCRIPT [BACKEND]``.

The script needs torch and the backend only. It makes its own tensors, of the same sizes, dtypes and layouts but with other
values, and prints WRONG where what came out is not as expected; an error or a hang shows by itself. Calls that must fail are made
as well, and it prints what they fail with. What Horovod's operations give is not compared.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from random_programs import faults, gradients, horovod_sessions
from random_programs.model import of_part
from random_programs.pool import MEDIA

Spec = dict[str, Any]


def script(program: dict[str, Any], complaints: list[str]) -> str:
    """The text of the script; ``complaints`` go into its head."""
    said = textwrap.indent("\n".join(text[:600] for text in complaints[:3]), "#   ", lambda _: True)
    settings = MEDIA.get(program["medium"], {})
    environment = "".join(f'os.environ["{name}"] = "{value}"\n' for name, value in settings.items())
    if "fault" in program:
        environment += f'os.environ["PENSTOCK_PEER_TIMEOUT"] = "{faults.patience_s(program)}"\n'
    ranks = "\n".join(_rank(program, rank) for rank in range(program["ranks"]))
    return (
        f"# A random program (seed {program['seed']}), made small. What the tester said of it:\n{said}\n"
        f"{_HEAD.format(ranks=program['ranks'], environment=environment, timeout_s=program['timeout_s'])}\n{ranks}\n{_TAIL}"
    )


def why_none(program: dict[str, Any]) -> str | None:
    """Why a program cannot be written as a script, if so: only a fault that comes at a step of a rank's own can."""
    fault = program.get("fault")
    if fault is None:
        return None
    jobs = {spec["call"] for spec in program["calls"].values()} & {"train", "elastic"}
    if jobs:
        return f"a job of training ({', '.join(jobs)}) is run by the tester itself"
    if "stop" not in fault["kind"] and fault["kind"] != "kill":
        return f"the fault {fault['kind']!r} needs emulated hosts"
    if fault["at"] != ["step"]:
        return f"the fault comes at {fault['at']}, which the tester sees inside of the engine"
    return None


def _rank(program: dict[str, Any], rank: int) -> str:
    lines = [f"def rank_{rank}(dist, groups):"]
    for step in program["steps"][rank]:
        lines += [f"    {line}" for line in _step(program, rank, step)]
    return "\n".join([*lines, "    pass", "", ""])


def _step(program: dict[str, Any], rank: int, step: list[Any]) -> Iterator[str]:
    what = step[0]
    if what == "pause":
        yield f"time.sleep({step[1] / 1e6})"
    elif what == "stop":
        yield f"subprocess.Popen(['/bin/sh', '-c', f'sleep {step[1]}; kill -CONT {{os.getpid()}}'])"
        yield "os.kill(os.getpid(), signal.SIGSTOP)"
    elif what == "kill":
        yield "os.kill(os.getpid(), signal.SIGKILL)"
    elif what == "strike":
        fault = program["fault"]
        yield f"time.sleep({fault['delay_us'] / 1e6})"
        yield from _step(program, rank, ["kill"] if fault["kind"] == "kill" else ["stop", fault["lasts_s"]])
    elif what == "leave":
        yield "return"
    elif what == "refused":
        yield from _refused(program, rank, step[1])
    elif what == "destroyed":
        group = program["calls"][step[1]]["group"]
        call = f'lambda: dist.all_reduce(torch.ones(3), group=groups["{group}"])'
        yield f"must_fail('the use of the group that call {step[1]} destroyed', {call})"
    elif what == "drop":
        yield f"tensors_{step[1]} = None"
    elif what == "wait":
        yield f"wait(work_{step[1]}{f', {step[2]}' if len(step) > 2 else ''})"
        yield f"check_{step[1]}()" if not _is_dropped(program, rank, step[1]) else "pass"
    else:
        spec = {**program["calls"][step[1]], **(step[2] if len(step) > 2 else {})}
        yield from _call(program, rank, step[1], spec, later=what == "issue", checked=len(step) == 2)


def _is_dropped(program: dict[str, Any], rank: int, name: str) -> bool:
    return ["drop", name] in program["steps"][rank]


def _call(program: dict[str, Any], rank: int, name: str, spec: Spec, *, later: bool, checked: bool) -> Iterator[str]:
    members = program["groups"][spec["group"]]
    group = f'groups["{spec["group"]}"]'
    if spec["call"] == "new_group":
        made = (
            f"dist.split_group(split_ranks=[{members}])"
            if spec.get("split")
            else f"dist.new_group({members}, timeout=datetime.timedelta(seconds=TIMEOUT_S))"
        )
        yield f"{group} = {made}"
        return
    if spec["call"] == "destroy_group":
        yield f"dist.destroy_process_group({group})"
        return
    size, me = len(members), members.index(rank)
    tensors, call, expected = _RENDERED.get(spec["call"], _other)(spec, members, me)
    if spec.get("functional"):
        call = _functional(spec, size, me)
    how = f", group={group}" + (f", async_op={later}" if spec["call"] not in _NO_ASYNC else "")
    yield f"# call {name} of group ranks {members}, here {me} of {size}"
    yield f"tensors_{name} = t = [{', '.join(tensors)}]"
    issue = [f"work_{name} = " + call.format(how=how, group=group, later=later)]
    if "with " in call or "\n" in call:
        issue = [*call.format(how=how, group=group).splitlines(), f"work_{name} = None"]
    if spec.get("priority"):
        issue = [f"with priority({spec['priority']}):", *(f"    {line}" for line in issue)]
    yield from issue
    yield f"check_{name} = check('call {name}', t, [{', '.join(expected)}])" if checked else f"check_{name} = nothing"
    if not later:
        yield f"wait(work_{name})"
        yield f"check_{name}()"


def _refused(program: dict[str, Any], rank: int, name: str) -> Iterator[str]:
    """The call with a tensor that has holes in the last place. Other backends may take it."""
    spec = program["calls"][name]
    members = program["groups"][spec["group"]]
    tensors, call, _ = _RENDERED.get(spec["call"], _other)(spec, members, members.index(rank))
    group = f'groups["{spec["group"]}"]'
    how = f", group={group}" + (", async_op=True" if spec["call"] not in _NO_ASYNC else "")
    yield "if dist.get_backend() == 'penstock':"
    yield f"    t = [{', '.join(tensors)}]"
    yield f"    t[-1] = t[-1].new_zeros(2 * max({2 * len(members)}, t[-1].numel()))[::2]"
    yield f"    must_fail('call {name} with a tensor that has holes', lambda: {call.format(how=how, group=group, later=True)})"


def _functional(spec: Spec, size: int, me: int) -> str:
    operation = f"{spec.get('reduce', '').lower()!r}"
    calls = {
        "all_reduce": f"Functional(t[0], functional.all_reduce(t[0], {operation}, {{group}}))",
        "broadcast": f"Functional(t[0], functional.broadcast(t[0], {spec.get('root')}, {{group}}))",
        "all_gather_into_tensor": "Functional(t[1], all_gather_single(t[0].view(-1), 0, {group}))",
        "reduce_scatter_tensor": f"Functional(t[1], reduce_scatter_single(t[0].view(-1), {operation}, 0, {{group}}))",
    }
    if spec["call"] in calls:
        return calls[spec["call"]]
    received = None if spec["even"] else [row[me] for row in spec["splits"][:size]]
    sent = None if spec["even"] else spec["splits"][me]
    return f"Functional(t[0], functional.all_to_all_single(t[1], {received}, {sent}, {{group}}))"


def _fill(spec: Spec, rank: int, part: int, count: int, number: int = 0) -> str:
    layouts = spec.get("layouts", ["flat"])
    layout = layouts[number % len(layouts)]
    made = f"fill({rank}, {part}, {count}, torch.{spec['dtype']})"
    return made if layout == "flat" else f'lay({made}, "{layout}")'


def _empty(spec: Spec, count: int) -> str:
    return f"torch.zeros({count}, dtype=torch.{spec['dtype']})"


def _reduced(spec: Spec, size: int, part: int, count: int, cut: str = "") -> str:
    given = ", ".join(f"fill({r}, {part}, {count}, torch.{spec['dtype']}){cut}" for r in range(size))
    return f'reduced("{spec["reduce"]}", [{given}])'


def _op(spec: Spec) -> str:
    return "dist._make_nccl_premul_sum(0.37)" if spec["reduce"] == "PREMUL_SUM" else f"dist.ReduceOp.{spec['reduce']}"


def _all_reduce(spec: Spec, members: list[int], me: int) -> tuple[list[str], str, list[str]]:
    counts = spec["counts"]
    tensors = [_fill(of_part(spec, part), me, part, count, part) for part, count in enumerate(counts)]
    expected = [_reduced(of_part(spec, part), len(members), part, count) for part, count in enumerate(counts)]
    if spec["call"] == "all_reduce":
        call = f"dist.all_reduce(t[0], op={_op(spec)}{{how}})"
    elif spec["call"] == "all_reduce_coalesced":
        call = f"dist.all_reduce_coalesced(t, op={_op(spec)}{{how}})"
    elif spec["call"] == "reduce":
        call = f"dist.reduce(t[0], dst={members[spec['root']]}, op={_op(spec)}{{how}})"
        expected = expected if me == spec["root"] else ["None"]
    else:
        call = (
            f"coalesced({{group}}, {{later}}, lambda: [dist.all_reduce(x, op={_op(spec)}, group={{group}}) for x in t])"
        )
    return tensors, call, expected


def _broadcast(spec: Spec, members: list[int], me: int) -> tuple[list[str], str, list[str]]:
    (count,) = spec["counts"]
    given = _fill(spec, spec["root"], 0, count)
    return (
        [given if me == spec["root"] else _empty(spec, count)],
        f"dist.broadcast(t[0], src={members[spec['root']]}{{how}})",
        [given],
    )


def _all_gather(spec: Spec, members: list[int], me: int) -> tuple[list[str], str, list[str]]:
    size = len(members)
    counts = spec["counts"] * size if len(spec["counts"]) == 1 else spec["counts"]
    given = [_fill({**spec, "layouts": ["flat"]}, r, 0, counts[r]) for r in range(size)]
    outputs = [_empty(spec, count) for count in counts]
    if spec["call"] == "all_gather":
        return [given[me], *outputs], "dist.all_gather(t[1:], t[0]{how})", ["None", *given]
    root = members[spec["root"]]
    if me != spec["root"]:
        return [given[me]], f"dist.gather(t[0], None, dst={root}{{how}})", ["None"]
    return [given[me], *outputs], f"dist.gather(t[0], t[1:], dst={root}{{how}})", ["None", *given]


def _all_gather_into_tensor(spec: Spec, members: list[int], me: int) -> tuple[list[str], str, list[str]]:
    tensors, expected = [], []
    for part, count in enumerate(spec["counts"]):
        spec = of_part(spec, part)
        given = [_fill({**spec, "layouts": ["flat"]}, r, part, count) for r in range(len(members))]
        tensors += [given[me], _empty(spec, count * len(members))]
        expected += ["None", f"torch.cat([{', '.join(given)}])"]
    if spec["call"] == "all_gather_into_tensor":
        return tensors, "dist.all_gather_into_tensor(t[1], t[0]{how})", expected
    if spec["call"] == "all_gather_coalesced":
        # A list for each rank, with an output for each input.
        parts = f"(whole.view(-1).tensor_split({len(members)}) for whole in t[1::2])"
        return tensors, f"dist.all_gather_coalesced([list(one) for one in zip(*{parts})], t[::2]{{how}})", expected
    each = "lambda: [dist.all_gather_into_tensor(o, i, group={group}) for i, o in zip(t[::2], t[1::2])]"
    return tensors, f"coalesced({{group}}, {{later}}, {each})", expected


def _reduce_scatter_tensor(spec: Spec, members: list[int], me: int) -> tuple[list[str], str, list[str]]:
    tensors, expected, size = [], [], len(members)
    for part, count in enumerate(spec["counts"]):
        spec = of_part(spec, part)
        tensors += [_fill(spec, me, part, count * size), _empty(spec, count)]
        cut = f"[{me * count}:{(me + 1) * count}]"
        expected += ["None", _reduced(spec, size, part, count * size, cut)]
    if spec["call"] == "reduce_scatter_tensor":
        return tensors, f"dist.reduce_scatter_tensor(t[1], t[0], op={_op(spec)}{{how}})", expected
    each = (
        f"lambda: [dist.reduce_scatter_tensor(o, i, op={_op(spec)}, group={{group}}) for i, o in zip(t[::2], t[1::2])]"
    )
    return tensors, f"coalesced({{group}}, {{later}}, {each})", expected


def _reduce_scatter(spec: Spec, members: list[int], me: int) -> tuple[list[str], str, list[str]]:
    size = len(members)
    counts = spec["counts"] * size if len(spec["counts"]) == 1 else spec["counts"]
    parts = [_fill(spec, me, part, counts[part], part) for part in range(size)]
    return (
        [_empty(spec, counts[me]), *parts],
        f"dist.reduce_scatter(t[0], t[1:], op={_op(spec)}{{how}})",
        [_reduced(spec, size, me, counts[me])],
    )


def _scatter(spec: Spec, members: list[int], me: int) -> tuple[list[str], str, list[str]]:
    (count,) = spec["counts"]
    given = [_fill(spec, spec["root"], part, count, part) for part in range(len(members))]
    root = members[spec["root"]]
    if me != spec["root"]:
        return [_empty(spec, count)], f"dist.scatter(t[0], None, src={root}{{how}})", [given[me]]
    return [_empty(spec, count), *given], f"dist.scatter(t[0], t[1:], src={root}{{how}})", [given[me]]


def _all_to_all(spec: Spec, members: list[int], me: int) -> tuple[list[str], str, list[str]]:
    size, rows, width = len(members), spec["splits"], spec["width"]
    outputs = [_empty(spec, rows[s][me] * width) for s in range(size)]
    inputs = [_fill(spec, me, d, rows[me][d] * width, d) for d in range(size)]
    expected = [_fill({**spec, "layouts": ["flat"]}, s, me, rows[s][me] * width) for s in range(size)]
    if spec["call"] == "all_to_all":
        return [*outputs, *inputs], f"dist.all_to_all(t[:{size}], t[{size}:]{{how}})", expected
    received = [rows[s][me] for s in range(size)]
    flat = [_fill({**spec, "layouts": ["flat"]}, me, d, rows[me][d] * width) for d in range(size)]
    tensors = [f"torch.zeros({sum(received)}, {width}, dtype=torch.{spec['dtype']})"]
    tensors.append(f"torch.cat([{', '.join(flat)}]).view({sum(rows[me])}, {width})")
    splits = "" if spec["even"] else f", output_split_sizes={received}, input_split_sizes={rows[me]}"
    call = f"dist.all_to_all_single(t[0], t[1]{splits}{{how}})"
    return tensors, call, [f"torch.cat([{', '.join(expected)}])"]


def _message(spec: Spec, members: list[int], me: int) -> tuple[list[str], str, list[str]]:
    (count,) = spec["counts"]
    given = _fill(spec, spec["src"], 0, count)
    if me == spec["src"]:
        return [given], f"dist.isend(t[0], {members[spec['dst']]}, tag={spec['tag']}{{how}})", ["None"]
    source = None if spec.get("any_source") else members[spec["src"]]
    return [_empty(spec, count)], f"dist.irecv(t[0], {source}, tag={spec['tag']}{{how}})", [given]


def _exchange(spec: Spec, members: list[int], me: int) -> tuple[list[str], str, list[str]]:
    tensors, calls, expected = [], [], []
    for number, (src, dst, count) in enumerate(spec["messages"]):
        given = _fill(spec, src, number, count)
        tag = spec["back_tag"] if src > dst else 0
        if me == src:
            calls.append(f"dist.P2POp(dist.isend, t[{len(tensors)}], {members[dst]}, {{group}}, {tag})")
            tensors.append(given)
            expected.append("None")
        elif me == dst:
            calls.append(f"dist.P2POp(dist.irecv, t[{len(tensors)}], {members[src]}, {{group}}, {tag})")
            tensors.append(_empty(spec, count))
            expected.append(given)
    return tensors, f"dist.batch_isend_irecv([{', '.join(calls)}])" if calls else "[]", expected


def _barrier(spec: Spec, members: list[int], me: int) -> tuple[list[str], str, list[str]]:
    later = ", async_op={later}" if spec["call"] == "barrier" else ""
    return [], f"dist.{spec['call']}(group={{group}}{later})", []


def _objects(spec: Spec, members: list[int], me: int) -> tuple[list[str], str, list[str]]:
    root = members[spec.get("root", 0)]
    text = f"'x' * {spec['count']}"
    call = {
        "all_gather_object": f"dist.all_gather_object([None] * {len(members)}, {text}, group={{group}})",
        "broadcast_object_list": f"dist.broadcast_object_list([{text}], src={root}, group={{group}})",
        "gather_object": f"dist.gather_object({text}, "
        f"{f'[None] * {len(members)}' if members[me] == root else None}, dst={root}, group={{group}})",
        "scatter_object_list": f"dist.scatter_object_list([None], [{text}] * {len(members)}, src={root}, group={{group}})",
    }[spec["call"]]
    return [], call, []


def _reducer(spec: Spec, members: list[int], me: int) -> tuple[list[str], str, list[str]]:
    given = f"{spec['counts']}, torch.{spec['dtype']}, {gradients.passes_of(spec)}, {spec['bucket_bytes']}"
    wire = f"torch.{spec['wire']}" if "wire" in spec else "None"
    if spec["call"] == "ddp":
        return [], f"distributed_data_parallel({given}, {spec['hook']}, {spec['view']}, {{group}}, {wire})", []
    # Dictionaries in what is formatted later.
    changes = [one and tuple(one.items()) for one in spec.get("settings", ())]
    more = {key: value for key, value in (("sparse", spec.get("sparse")), ("buffers", spec.get("buffers"))) if value}
    how = "".join(f", {key}={value!r}" for key, value in {**more, **({"settings": changes} if changes else {})}.items())
    how = f"{spec['closed']}, {bool(spec.get('averaging'))}, {{group}}, {wire}, {bool(spec.get('feedback'))}{how}"
    return [], f"reduce_gradients({given}, {how})", []


def _hvd(spec: Spec, members: list[int], me: int) -> tuple[list[str], str, list[str]]:
    return [_fill(spec, me, part, count, part) for part, count in enumerate(spec["counts"])], "horovod(t)", []


def _horovod_life(spec: Spec, members: list[int], me: int) -> tuple[list[str], str, list[str]]:
    lines = [
        "import penstock.horovod.torch as hvd",
        f"sets = [hvd.ProcessSet(ranks) for ranks in {spec['sets']}]",
        "hvd.init(process_sets=sets)",
    ]
    for what, index in horovod_sessions.order(spec, len(members), me):
        if what == "join":
            lines.append("hvd.join()")
            continue
        right = spec["ops"][index]
        op = spec.get("instead", {}).get(str(index), right)
        if op is None:
            continue
        if what == "finish":
            if op["how"] != "sync" or op.get("even"):
                get = f"op_{index}()" if op["kind"] == "sparse_allreduce" else f"hvd.synchronize(op_{index})"
                lines.append(f"op_{index} = {get}")
            continue
        everybody = horovod_sessions.members(spec, right, len(members))
        chosen = [] if op["set"] is None else [f"process_set=sets[{op['set']}]"]
        if op["kind"] == "optimizer":
            names = ("counts", "steps", "passes", "reduce", "way", "groups", "compression", "predivide")
            how = ", ".join([f"'op{index}'", f"torch.{op['dtype']}", *(f"{op[name]!r}" for name in names), *chosen])
            lines.append(f"optimize(hvd, {how})")
            continue
        if op["kind"] == "barrier":
            lines.append(f"hvd.barrier({', '.join(chosen)})")
            continue
        name, reduction, more = horovod_sessions.arguments(spec, index, op)
        how = [f"{key}={value!r}" for key, value in more.items()] + chosen
        how += [f"op=hvd.{reduction}"] if reduction else []
        how += [f"root_rank={everybody[op['root']]}"] if op["kind"] == "broadcast" else []
        own = everybody.index(me)
        if op["kind"] == "alltoall" and not op["even"]:
            how.append(f"splits={op['splits'][own]}")
        width = max(1, op["width"])
        shape = f".view(-1, {op['width']})" if op["width"] else ""
        given = [
            f"fill({me}, {part}, {rows[own] * width}, torch.{op['dtype']}){shape if rows[own] else ''}"
            if rows[own] or not op["width"]
            else f"torch.zeros(0, {op['width']}, dtype=torch.{op['dtype']})"
            for part, rows in enumerate(op["rows"])
        ]
        tensor = f"[{', '.join(given)}]" if op["kind"].startswith("grouped") else (given or [""])[0]
        if op["kind"] == "sparse_allreduce":
            values = f"torch.ones(1{f', {width}' if op['width'] else ''}, dtype=torch.{op['dtype']})"
            size = (op["height"], op["width"]) if op["width"] else (op["height"],)
            tensor = f"torch.sparse_coo_tensor(torch.zeros(1, 1, dtype=torch.long), {values}, {size})"
        lines.append(f"op_{index} = hvd.{name}({', '.join([tensor, *how])})")
    return [], "\n".join([*lines, "hvd.shutdown()"]), []


def _message_objects(spec: Spec, members: list[int], me: int) -> tuple[list[str], str, list[str]]:
    src, dst = members[spec["src"]], members[spec["dst"]]
    if me == spec["src"]:
        return [], f"dist.send_object_list(['x' * {spec['count']}, None], {dst}{{how}})", []
    return [], f"(dist.recv_object_list([0, 0], {src}{{how}}), None)[1]", []


def _sparse(spec: Spec, members: list[int], me: int) -> tuple[list[str], str, list[str]]:
    count, width = spec["entries"], f", {spec['width']}" if spec["width"] else ""
    where, given = (
        f"torch.zeros(1, {count}, dtype=torch.long)",
        f"torch.ones({count}{width}, dtype=torch.{spec['dtype']})",
    )
    return (
        [f"torch.sparse_coo_tensor({where}, {given}, ({spec['rows']},{width[1:]}))"],
        f"dist.all_reduce(t[0], op={_op(spec)}{{how}})",
        [],
    )


def _other(spec: Spec, members: list[int], me: int) -> tuple[list[str], str, list[str]]:
    raise AssertionError(f"{spec['call']} has no form in a script")


_RENDERED = {
    "all_reduce": _all_reduce,
    "all_reduce_coalesced": _all_reduce,
    "coalesced all_reduce": _all_reduce,
    "functional all_reduce": lambda spec, members, me: _all_reduce({**spec, "call": "all_reduce"}, members, me),
    "reduce": _all_reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "gather": _all_gather,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "all_gather_coalesced": _all_gather_into_tensor,
    "coalesced all_gather_into_tensor": _all_gather_into_tensor,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "coalesced reduce_scatter_tensor": _reduce_scatter_tensor,
    "reduce_scatter": _reduce_scatter,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all,
    "message": _message,
    "exchange": _exchange,
    "barrier": _barrier,
    "monitored_barrier": _barrier,
    "all_gather_object": _objects,
    "broadcast_object_list": _objects,
    "gather_object": _objects,
    "scatter_object_list": _objects,
    "message objects": _message_objects,
    "sparse all_reduce": _sparse,
    "reducer": _reducer,
    "ddp": _reducer,
    "hvd allreduce": _hvd,
    "hvd": _horovod_life,
}
# Calls whose functions take no async_op.
_NO_ASYNC = {"message", "message objects"}

_HEAD = '''
import contextlib, dataclasses, datetime, functools, os, signal, subprocess, sys, time

import torch
import torch.multiprocessing
from torch.distributed import _functional_collectives as functional

all_gather_single = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
reduce_scatter_single = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor
RANKS, TIMEOUT_S = {ranks}, {timeout_s}
{environment}

def fill(rank, part, count, dtype):
    """Small integers that tell where they come from."""
    return ((torch.arange(count) * 7 + 3 * rank + part) % 5 + 1).to(dtype)


def reduced(operation, tensors):
    """What a reduction gives; a tuple of it in float64 where it is rounded."""
    each = {{
        "SUM": torch.add, "PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum,
        "BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor,
    }}
    floats = tensors[0].is_floating_point()
    if operation in ("AVG", "PREMUL_SUM"):
        total = functools.reduce(torch.add, (one.double() for one in tensors))
        if operation == "PREMUL_SUM":
            return (0.37 * total,)
        return (total / len(tensors),) if floats else (total / len(tensors)).trunc().to(tensors[0].dtype)
    if operation == "PRODUCT" and floats:
        return (functools.reduce(torch.mul, (one.double() for one in tensors)),)
    return functools.reduce(each[operation], tensors)


def flat(tensor):
    """In the order in memory."""
    return (tensor.permute(0, 2, 3, 1) if tensor.dim() == 4 else tensor).reshape(-1)


def is_right(found, wanted):
    if isinstance(wanted, tuple):
        return torch.allclose(flat(found).double(), wanted[0], rtol=8 * torch.finfo(found.dtype).eps, atol=0)
    return torch.equal(flat(found), flat(wanted))


def must_fail(what, call):
    """It must be an error at once, and the group go on."""
    try:
        wait(call())
    except (ValueError, RuntimeError) as error:
        print(f"{{what}} is refused: {{error}}", flush=True)
    else:
        print(f"WRONG: {{what}} is not refused", flush=True)


def lay(tensor, layout):
    if layout == "slice":
        whole = torch.zeros(tensor.numel() + 2, dtype=tensor.dtype)
        whole[1:-1] = tensor
        return whole[1:-1]
    if layout == "strided":
        whole = torch.zeros(tensor.numel() * 2, dtype=tensor.dtype)
        whole[::2] = tensor
        return whole[::2]
    if layout == "matrix" and tensor.numel() % 2 == 0:
        return tensor.view(-1, 2)
    if layout == "channels_last" and tensor.numel() % 8 == 0 and tensor.numel():
        return tensor.view(1, 2, 2, -1).permute(0, 3, 1, 2)
    if layout == "scalar" and tensor.numel() == 1:
        return tensor.view(())
    if layout == "shared slice":
        import penstock
        whole = penstock.empty(tensor.numel() + 2, dtype=tensor.dtype)
        whole[1:-1] = tensor
        return whole[1:-1]
    if layout == "shared":
        import penstock
        shared = penstock.empty(tensor.numel(), dtype=tensor.dtype)
        shared.copy_(tensor)
        return shared
    return tensor


@contextlib.contextmanager
def priority(numbers):
    if torch.distributed.get_backend() != "penstock":
        yield
        return
    import penstock
    with penstock.priority(numbers[0]) as block:
        yield
    for number in numbers[1:]:
        block.change(number)


def wait(works, within_s=None):
    for work in works if isinstance(works, list) else [works]:
        if work is not None:
            timed = within_s is not None and isinstance(work, torch.distributed.Work)
            work.wait(*([datetime.timedelta(seconds=within_s)] if timed else []))


def check(what, tensors, expected):
    def compare():
        for index, (found, wanted) in enumerate(zip(tensors, expected)):
            if wanted is not None and not is_right(found, wanted):
                print(f"WRONG: {{what}}, tensor {{index}}: {{found}} instead of {{wanted}}", flush=True)
    return compare


def nothing():
    pass


def coalesced(group, later, each):
    import torch.distributed as dist
    with dist._coalescing_manager(group, device=torch.device("cpu"), async_ops=later) as manager:
        each()
    return manager if later else None


class Functional:
    def __init__(self, target, made):
        self.target, self.made = target, made

    def wait(self):
        made = functional.wait_tensor(self.made)
        self.target.copy_(made.reshape(self.target.shape) if self.target.is_contiguous() else made)


def optimize(hvd, name, dtype, counts, steps, passes, reduce, way, groups, compression, predivide, **how):
    module = Module(counts, dtype)
    parts = list(module.parts)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parts, lr=0.5),
        named_parameters=[(f"{{name}}.{{at}}", one) for at, one in enumerate(parts)],
        op={{"AVG": hvd.Average, "SUM": hvd.Sum, "ADASUM": hvd.Adasum}}[reduce],
        backward_passes_per_step=passes,
        compression=getattr(hvd.Compression, compression),
        gradient_predivide_factor=predivide,
        groups=[[parts[at] for at in group] for group in groups] if isinstance(groups, list) else groups,
        **how,
    )

    def make():
        optimizer.zero_grad()
        for _ in range(passes):
            module(2).backward()

    for _ in range(steps):
        if way == "closure":
            optimizer.step(make)
            continue
        make()
        if way == "step":
            optimizer.step()
            continue
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()


class Module(torch.nn.Module):
    def __init__(self, counts, dtype, sparse=(), buffers=()):
        super().__init__()
        self.parts = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(count, dtype=dtype)) for count in counts)
        self.tables = torch.nn.ModuleList(
            torch.nn.Embedding(rows, width, sparse=True, _weight=torch.ones(rows, width, dtype=dtype)) for rows, width in sparse
        )
        for index, (count, kind) in enumerate(buffers):
            self.register_buffer(f"buffer_{{index}}", torch.ones(count, dtype=getattr(torch, kind)))

    def forward(self, factor):
        terms = [(one * factor).sum() for one in self.parts]
        return sum(terms + [(one(torch.arange(one.num_embeddings)) * factor).sum() for one in self.tables])


def make_passes(module, called, passes, no_sync, average, change=lambda step: None):
    for number, step in enumerate(passes):
        change(number)
        module.zero_grad()
        for averaged in step:
            with contextlib.nullcontext() if averaged else no_sync():
                called(3).backward()
        average()
        for one in module.parameters():
            if not (one.grad.to_dense() == 3 * len(step)).all():
                print(f"WRONG: {{one.grad}} instead of {{3 * len(step)}} after {{step}}", flush=True)


def reduce_gradients(
    counts, dtype, passes, bucket_bytes, closed, averaging, group, wire, feedback, sparse=(), buffers=(), settings=()
):
    from penstock.torch import GradientReducer
    module = Module(counts, dtype, sparse, buffers)
    reducer = GradientReducer(module, group, bucket_bytes=bucket_bytes, wire=wire, error_feedback=feedback)

    def change(step):
        if settings and settings[step]:
            reducer.apply(dataclasses.replace(reducer.setting, **dict(settings[step])))

    average = reducer.average if averaging else nothing
    make_passes(module, module, passes, reducer.no_sync, average, change)
    if closed:
        reducer.close()


def distributed_data_parallel(counts, dtype, passes, bucket_bytes, hook, view, group, wire):
    module = Module(counts, dtype)
    called = torch.nn.parallel.DistributedDataParallel(
        module, process_group=group, bucket_cap_mb=max(1e-3, bucket_bytes / 2**20), gradient_as_bucket_view=view
    )
    if hook:
        from penstock.torch import ddp_hook
        hook = ddp_hook(called, bucket_bytes=bucket_bytes, wire=wire)
    make_passes(module, called, passes, called.no_sync, nothing)
    if hook:
        hook.close()


def horovod(tensors):
    import penstock.horovod.torch as hvd
    hvd.init()
    handles = [hvd.allreduce_async(one, name=str(index)) for index, one in enumerate(tensors)]
    for handle in handles:
        hvd.synchronize(handle)
    hvd.shutdown()

'''

_TAIL = """
def main(rank, backend, store_file):
    import torch.distributed as dist
    torch.set_num_threads(1)
    store = dist.FileStore(store_file, RANKS)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=RANKS, timeout=datetime.timedelta(seconds=TIMEOUT_S)
    )
    globals()[f"rank_{rank}"](dist, {"world": dist.group.WORLD})
    dist.destroy_process_group()
    print(f"rank {rank} has ended", flush=True)


if __name__ == "__main__":
    import tempfile

    folder = tempfile.mkdtemp()
    backend = sys.argv[1] if len(sys.argv) > 1 else "penstock"
    torch.multiprocessing.spawn(main, (backend, os.path.join(folder, "store")), nprocs=RANKS)
"""
