"""One rank of a program: makes the tensors, makes the calls, compares what comes out, looks for what is left behind.

`serve` is what the processes of a pool run; `script` is what a rendered script runs.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import json
import os
import random
import signal
import subprocess
import time
import traceback
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

import penstock
import ranks
from collectives import reference
from penstock.errors import Closed, PeerLost, PenstockError
from penstock.runtime import process
from random_programs import faults, gradients, horovod_sessions, judge, model, mutants, strike, tensors, training

Spec = dict[str, Any]
Held = tuple[int, int, int]


def serve(medium: str) -> None:
    """Run the programs that the pool puts into the store, one after the other, until it says "end"."""
    # The store outlives every program, as torchrun's outlives every restart.
    rank = int(os.environ["RANK"])
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=datetime.timedelta(hours=2)
    )
    _warm_up()
    held = _held()
    number = 0
    while True:
        order = json.loads(store.get(f"program {number}"))
        if order == "end":
            return
        if rank < order["program"]["ranks"]:
            if number < _FREEZE:
                # What imports and first calls have made stays; a collection after each program need not look at it.
                gc.collect()
                gc.freeze()
            with mutants.planted(order["mutant"]):
                report, held = run(order["program"], order["backend"], store, f"{number}", rank, held, order["folder"])
            ranks.note(f"report {number}", report)
        number += 1


def run(
    program: dict[str, Any], backend: str, store: Any, name: str, rank: int, held: Held, folder: str | None = None
) -> tuple[dict[str, Any], Held]:
    """Run one program on this rank, which holds ``held`` before it. A program with a fault has a folder (`strike`).

    Returns: the report, and what the rank holds afterwards. The report has ``ends``: for each step that made or waited for a
        call, how that went; ``complaints``: what is wrong whatever the program is; ``digests``: of results that must have the
        same bits on all ranks; ``seconds``; and ``cpu_s``, of processor time.
    """
    started_s, began_s = time.monotonic(), time.process_time()
    keys = dist.PrefixStore(f"programs/{name}", store)
    rank_of = _Rank(program, backend, rank, keys, strike.Target(program.get("fault"), rank, folder))
    try:
        if rank_of.begin():
            rank_of.play()
            if backend != "penstock":
                # gloo fails to connect to a rank that has nothing to do and leaves.
                dist.barrier()
    except Exception as error:
        own = mutants.DEFECTIVE if mutants.is_own(error) else ""
        rank_of.complain(f"{own}the tester failed:\n{traceback.format_exc()}")
    rank_of.end()
    if "fault" in program:
        rank_of.begin_anew()
    if not ("fault" in program and rank == program["fault"]["rank"] and faults.is_left_out(program["fault"])):
        held = rank_of.look_for_leaks(held)
    report = {
        "ends": rank_of.ends,
        "complaints": rank_of.complaints,
        "digests": rank_of.digests,
        "seconds": round(time.monotonic() - started_s, 3),
        "cpu_s": round(time.process_time() - began_s, 5),
    }
    return report, held


class _Rank:
    def __init__(self, program: dict[str, Any], backend: str, rank: int, store: Any, target: strike.Target) -> None:
        self.program, self.backend, self.rank = program, backend, rank
        self.store, self.target = store, target
        self.groups: dict[str, Any] = {}
        self.ended: dict[str, Any] = {}
        self.pending: dict[str, _Pending] = {}
        self.ends: list[dict[str, Any]] = []
        self.complaints: list[str] = []
        self.digests: dict[str, int] = {}
        self.storages: list[tuple[str, StorageWeakRef]] = []
        self.children: list[subprocess.Popen[bytes]] = []
        self.is_over = False

    def complain(self, text: str) -> None:
        if len(self.complaints) < 20:
            self.complaints.append(text)

    def begin(self) -> bool:
        def init() -> None:
            dist.init_process_group(
                self.backend,
                store=dist.PrefixStore("group", self.store),
                rank=self.rank,
                world_size=self.program["ranks"],
                timeout=datetime.timedelta(seconds=self.program["timeout_s"]),
            )
            self.groups["world"] = dist.group.WORLD

        self.target.begin()
        if any(spec["call"] == "elastic" for spec in self.program["calls"].values()):
            return True  # it makes its groups itself
        # A wrong program's first call may fail on one rank while another is still joining.
        return self._try("", "init", init)

    def play(self) -> None:
        for step in self.program["steps"][self.rank]:
            what = step[0]
            if what == "pause":
                time.sleep(step[1] / 1e6)
            elif what == "stop":
                self._stop(step[1])
            elif what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif what == "strike":
                self.target.at("step")
            elif what == "leave":
                return
            elif what == "refused":
                self._refused(step[1])
            elif what == "drop":
                if step[1] in self.pending:
                    self.pending[step[1]].drop()
            elif what == "wait":
                pending = self.pending.pop(step[1], None)
                if pending is not None:
                    timeout_s = step[2] if len(step) > 2 else None
                    self._try(step[1], "wait", lambda pending=pending, within=timeout_s: self._finish(pending, within))
            elif what == "destroyed":
                self._use_after_end(step[1])
            else:
                self._issue(step[1], step[2] if len(step) > 2 else {}, blocking=what == "call")
            if self.is_over:
                return
        # What the program has not waited for, because shrinking took the wait away.
        for name in list(self.pending):
            pending = self.pending.pop(name)
            self._try(name, "wait", lambda pending=pending: self._finish(pending))

    def _issue(self, name: str, changes: Spec, *, blocking: bool) -> None:
        spec = {**self.program["calls"][name], **changes}
        if spec["call"] == "new_group":
            self._try(name, "call", lambda: self._new_group(spec))
            return
        if spec["call"] in ("train", "elastic"):
            self._try(name, "call", lambda: self._train(name, spec))
            return
        group = self.groups.get(spec["group"])
        if group is None:
            return
        if spec["call"] == "destroy_group":
            self.ended[name] = group
            self._try(name, "call", lambda: dist.destroy_process_group(self.groups.pop(spec["group"])))
            return
        pending = _Pending(self, name, spec, group, compared=not changes)
        if not self._try(name, "issue", lambda: pending.issue(blocking)):
            return
        if blocking:
            self._try(name, "wait", lambda: self._finish(pending))
        else:
            self.pending[name] = pending

    def _refused(self, name: str) -> None:
        """Make a call with a tensor that cannot be served in the last place: it must say so, and send nothing."""
        if self.backend != "penstock" or self.program["calls"][name]["group"] not in self.groups:
            return
        spec = self.program["calls"][name]
        pending = _Pending(self, name, spec, self.groups[spec["group"]], compared=False)
        last = pending.tensors[-1]
        # Also where it has no elements it can be cut into one part a rank.
        pending.tensors[-1] = last.new_zeros(2 * max(2 * pending.size, last.numel()))[::2]
        try:
            pending.issue(blocking=True)
        except PenstockError as error:
            # The call itself, which comes next, must work on all ranks.
            if not error.group_lives or "The group is still usable" not in str(error):
                self.complain(f"call {name}: a refused tensor's error says that the group is lost: {error}")
            issued = judge.operations(spec, pending.size)
            if not any(one in str(error) for one in [*issued, *("send", "recv") * ("send/recv" in issued)]):
                self.complain(f"call {name}: a refused tensor's error does not name {issued[0]}: {error}")
        else:
            self.complain(f"call {name}: a tensor of strides {pending.tensors[-1].stride()} was not refused")

    def _use_after_end(self, name: str) -> None:
        """Use a group that call ``name`` has destroyed: that is an error at once."""
        if name not in self.ended or self.backend != "penstock":  # gloo reduces on, or waits for its time-out
            return
        started_s = time.monotonic()
        try:
            dist.all_reduce(torch.ones(3), group=self.ended[name])
        except (ValueError, RuntimeError):
            pass
        else:
            self.complain(f"call {name}: the group that it destroyed still reduces")
        if time.monotonic() - started_s > _AT_ONCE_S:
            self.complain(f"call {name}: its use afterwards took {time.monotonic() - started_s:.1f} s to fail")

    def _new_group(self, spec: Spec) -> None:
        members = self.program["groups"][spec["group"]]
        if spec.get("split") and _CAN_SPLIT:
            made = dist.split_group(split_ranks=[members])
        else:
            # Without it torch takes 30 minutes, not the time-out of the world.
            made = dist.new_group(members, timeout=datetime.timedelta(seconds=self.program["timeout_s"]))
        if made is not dist.GroupMember.NON_GROUP_MEMBER:
            self.groups[spec["group"]] = made

    def _train(self, name: str, spec: Spec) -> None:
        def failed(error: Exception) -> None:
            place = {"world": dist.get_world_size(), "rank": dist.get_rank()}
            self.ends.append({"call": name, "step": "generation", "seconds": 0, **place, **_told(error)})

        if spec["call"] == "train":
            weights = training.train(spec, self.target.at)
        else:
            options = {**faults.ELASTIC, "min_ranks": 2, "max_ranks": self.program["ranks"]}
            weights = training.train_elastically(spec, self.target.at, self.store, options, failed)
        for key, weight in training.expected(spec).items():
            if weights is not None and not torch.equal(weights[key], weight):
                found, wanted = weights[key], weight
                at = int((found != wanted).nonzero()[0])
                self.complain(f"{key} is wrong, the first element at {at}: {found[at]} instead of {wanted[at]}")

    def begin_anew(self) -> None:
        """The ranks that a fault leaves, in the processes in which it was noticed, form another group and use it."""
        fault = self.program["fault"]
        left = [one for one in range(self.program["ranks"]) if one != fault["rank"] or not faults.is_left_out(fault)]
        if self.rank not in left:
            return
        try:
            dist.init_process_group(
                self.backend,
                store=dist.PrefixStore("anew", self.store),
                rank=left.index(self.rank),
                world_size=len(left),
                timeout=datetime.timedelta(seconds=self.program["timeout_s"]),
            )
            tensor = torch.full((5000,), float(self.rank + 1))
            dist.all_reduce(tensor)
            if not (tensor == sum(one + 1 for one in left)).all():
                self.complain(f"in a new group: {tensor[0]} .. {tensor[-1]} are wrong, the first at 0")
        except Exception:
            self.complain(f"in a new group:\n{traceback.format_exc()}")
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    def _finish(self, pending: _Pending, within_s: float | None = None) -> None:
        pending.wait(within_s)
        pending.check()

    def _try(self, name: str, step: str, action: Callable[[], object]) -> bool:
        """Do it, and note how it ended."""
        started_s = time.monotonic()
        end: dict[str, Any] = {"call": name, "step": step}
        try:
            action()
        except Exception as error:
            end |= _told(error)
            # A program that has lost a rank ends; one that is told that its ranks disagree may go on in other groups.
            self.is_over = (
                isinstance(error, (PeerLost, Closed)) or "PeerLost: " in str(error) or "Closed: " in str(error)
            )
        ended_s = time.monotonic()
        end["seconds"], end["at_s"] = round(ended_s - started_s, 3), ended_s
        if self.program["calls"].get(name, {}).get("call") in ("barrier", "monitored_barrier"):
            # The clock is the same for all processes of a machine.
            end["from_s"], end["to_s"] = started_s, ended_s
        self.ends.append(end)
        return "kinds" not in end

    def _stop(self, length_s: float) -> None:
        """Stop this process, as a debugger or a suspended machine does; another process continues it."""
        pid = os.getpid()
        self.children.append(subprocess.Popen(["/bin/sh", "-c", f"sleep {length_s}; kill -CONT {pid}"]))
        os.kill(pid, signal.SIGSTOP)

    def end(self) -> None:
        self.target.end()
        functional = [pending for pending in self.pending.values() if pending.spec.get("functional")]
        self.pending.clear()
        self.groups.clear()
        self.ended.clear()
        is_right = not self.program.get("wrong") and not self.program.get("fault")
        if is_right and not functional and not self.is_over:
            self._look_into_engine()
        if dist.is_initialized():
            self._try("", "destroy", dist.destroy_process_group)
        for pending in functional:
            # torch keeps the work and the tensor of what nobody waits for.
            with contextlib.suppress(RuntimeError):
                pending.wait()
        # torch counts a group that could not be built, and names the next one by the count.
        dist.distributed_c10d._world.group_count = 0
        for child in self.children:
            child.wait()

    def _look_into_engine(self) -> None:
        """When all calls of a right program have ended, the engine holds nothing of them, as soon as other ranks are as far."""
        # Another rank may be as late as its operations may be.
        deadline_s = time.monotonic() + max(_AT_ONCE_S, float(self.program["timeout_s"]))
        while process.Engine.current is not None:
            counts = process.stats()["held"]
            held = {name: counts[name] for name in _OF_OPERATIONS if counts[name]}
            if not held:
                break
            if time.monotonic() > deadline_s:
                self.complain(f"leak: the engine holds {held} although all calls have ended")
                break
            time.sleep(0.001)

    def look_for_leaks(self, before: Held) -> Held:
        """Everything that this program used is given back, soon after its last group has gone. Returns what is held then."""
        deadline_s = time.monotonic() + _SETTLE_S
        while True:
            gc.collect()
            alive = [label for label, one in self.storages if not one.expired()]
            held = _held()
            grown = any(now > then for now, then in zip(held, before, strict=True))
            if not alive and not grown:
                break
            if time.monotonic() > deadline_s:
                if alive:
                    self.complain(f"leak: still held after the end: the memory of {', '.join(alive[:5])}")
                if grown:
                    self.complain(
                        f"leak: {held} descriptors, threads and shared mappings at the end, {before} before; "
                        f"threads: {_threads()}; open: {_open_files()}; of the engine: {_holders()}"
                    )
                break
            time.sleep(0.01)
        self.storages.clear()
        return held


class _Pending:
    """A call that was made: its tensors, its work, and what must come out."""

    def __init__(self, rank: _Rank, name: str, spec: Spec, group: Any, *, compared: bool) -> None:
        self.rank, self.name, self.spec, self.group = rank, name, spec, group
        self.compared = compared
        members = rank.program["groups"][spec["group"]]
        self.size, self.me = len(members), members.index(rank.rank)
        self.global_ranks = members
        self.what = f"call {name} ({spec['call']} in {spec['group']})"
        self.slots = model.slots(spec, self.size, self.me)
        self.made = [tensors.Made(slot, index) for index, slot in enumerate(self.slots)]
        self.tensors = [made.tensor for made in self.made]
        for made in self.made:
            self.keep(made.slot.label, [made.whole])
        self.works: list[Any] = []
        self.sparse: torch.Tensor | None = None

    def keep(self, label: str, made: list[torch.Tensor]) -> None:
        """Look at the end of the program whether the memory of these tensors was given back."""
        self.rank.storages += [(f"{self.what} {label}", StorageWeakRef(one.untyped_storage())) for one in made]

    def issue(self, blocking: bool) -> None:
        numbers = self.spec.get("priority", []) if self.rank.backend == "penstock" else []
        with penstock.priority(numbers[0]) if numbers else contextlib.nullcontext() as block:
            found = _functional(self) if self.spec.get("functional") else _CALLS[self.spec["call"]](self, not blocking)
        for number in numbers[1:]:
            assert block is not None
            block.change(number)
        self.works = [] if found is None else found if isinstance(found, list) else [found]

    def wait(self, within_s: float | None = None) -> None:
        order = list(self.works)
        random.Random(self.name).shuffle(order)
        for work in order:
            # Futures, and torch's object for coalesced calls, take no time-out.
            if within_s is None or not isinstance(work, dist.Work):
                work.wait()
            else:
                work.wait(datetime.timedelta(seconds=within_s))

    def drop(self) -> None:
        """The program no longer holds the tensors; the engine must."""
        self.made, self.tensors = [], []

    def check(self) -> None:
        if self.sparse is not None and self.compared:
            given = torch.stack([model.sparse(self.spec, rank).to_dense() for rank in range(self.size)])
            wanted = given.sum(0, dtype=given.dtype)  # integers wrap
            if self.spec["reduce"] == "AVG":
                rounding = None if wanted.is_floating_point() else "trunc"
                wanted = torch.div(wanted, self.size, rounding_mode=rounding)
            if not torch.equal(self.sparse.to_dense(), wanted):
                self.rank.complain(
                    f"{self.what}: {_short(self.sparse)} are wrong, the first at any: not {_short(wanted)}"
                )
        if self.compared:
            for made in self.made:
                text = made.wrong()
                if text:
                    self.rank.complain(f"{self.what}, {made.slot.label}: {text}")
        if self.compared and self.made and self.spec["call"] in _ALIKE:
            digest = 0
            for made in self.made:
                if made.slot.bound is not None:
                    digest = zlib.crc32(tensors.bytes_of(made.tensor), digest)
            self.rank.digests[self.name] = digest

    def expect(self, found: Any, expected: Any) -> None:
        if expected is not None and found != expected and self.compared:
            self.rank.complain(f"{self.what}: {_short(found)} instead of {_short(expected)}")

    @property
    def root(self) -> int:
        return self.global_ranks[self.spec["root"]]

    @property
    def op(self) -> Any:
        if self.spec["reduce"] == "PREMUL_SUM":
            return dist._make_nccl_premul_sum(reference.PREMUL_FACTOR)
        return getattr(dist.ReduceOp, self.spec["reduce"])


# ------------------------------------------------------------------------------------------------ one function a call
# Each makes the call and returns its work, or works, or None if it blocked.


def _all_reduce(p: _Pending, later: bool) -> Any:
    return dist.all_reduce(p.tensors[0], op=p.op, group=p.group, async_op=later)


def _all_reduce_coalesced(p: _Pending, later: bool) -> Any:
    return dist.all_reduce_coalesced(p.tensors, op=p.op, group=p.group, async_op=later)


def _coalesced(p: _Pending, later: bool, each: Callable[[], None]) -> Any:
    with dist._coalescing_manager(p.group, device=torch.device("cpu"), async_ops=later) as manager:
        each()
    return manager if later else None


def _coalesced_all_reduce(p: _Pending, later: bool) -> Any:
    return _coalesced(p, later, lambda: [dist.all_reduce(one, op=p.op, group=p.group) for one in p.tensors])


def _pairs(p: _Pending) -> list[list[torch.Tensor]]:
    return [p.tensors[at : at + 2] for at in range(0, len(p.tensors), 2)]


def _all_gather_coalesced(p: _Pending, later: bool) -> Any:
    """A list of outputs for each rank, with one for each input: parts of whole tensors."""
    by_input = [whole.view(-1).tensor_split(p.size) for _, whole in _pairs(p)]
    by_rank = [list(parts) for parts in zip(*by_input, strict=True)]
    return dist.all_gather_coalesced(by_rank, p.tensors[::2], group=p.group, async_op=later)


def _coalesced_all_gather(p: _Pending, later: bool) -> Any:
    return _coalesced(
        p, later, lambda: [dist.all_gather_into_tensor(whole, own, group=p.group) for own, whole in _pairs(p)]
    )


def _coalesced_reduce_scatter(p: _Pending, later: bool) -> Any:
    return _coalesced(
        p, later, lambda: [dist.reduce_scatter_tensor(own, whole, op=p.op, group=p.group) for whole, own in _pairs(p)]
    )


def _functional_all_reduce(p: _Pending, later: bool) -> None:
    from torch.distributed import _functional_collectives as functional

    if p.spec["reduce"] == "PREMUL_SUM":
        dist.all_reduce(p.tensors[0], op=p.op, group=p.group)
    else:
        result = functional.all_reduce(p.tensors[0], p.spec["reduce"].lower(), p.group)
        p.tensors[0].copy_(functional.wait_tensor(result))


class _Functional:
    """What a functional collective gave: a new tensor, which is waited for and then lies where the model looks.

    ``way`` it is waited for: "waited" in so many words, "used" as an operand of an operation."""

    def __init__(self, p: _Pending, result: torch.Tensor, into: int) -> None:
        self._p, self._result, self._into, self._way = p, result, into, p.spec["functional"]
        p.keep("functional result", [getattr(result, "elem", result)])
        # What is reduced or broadcast is not changed, and takes the result only here.
        self._given = tensors.bytes_of(p.tensors[into]) if len(p.tensors) == 1 else None

    def wait(self) -> None:
        from torch.distributed import _functional_collectives as functional

        result, self._result = self._result, None  # type: ignore[assignment]
        if result is None:
            return
        if self._way == "waited":
            result = functional.wait_tensor(result)
        if not self._p.tensors:
            result.clone()  # its tensors were dropped
            return
        target = self._p.tensors[self._into]
        if self._given is not None and tensors.bytes_of(target) != self._given:
            self._p.rank.complain(f"{self._p.what}: values are wrong, the first at any: its input has changed")
        target.copy_(result.reshape(target.shape) if target.is_contiguous() else result)


def _functional(p: _Pending) -> Any:
    from torch.distributed import _functional_collectives as functional

    call, given, operation = p.spec["call"], p.tensors[0], p.spec.get("reduce", "").lower()
    if call == "all_reduce":
        return _Functional(p, functional.all_reduce(given, operation, p.group), 0)
    if call == "broadcast":
        return _Functional(p, functional.broadcast(given, p.spec["root"], p.group), 0)
    if call == "all_gather_into_tensor":
        gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
        return _Functional(p, gather(given.view(-1), 0, p.group), 1)
    if call == "reduce_scatter_tensor":
        scatter = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor
        return _Functional(p, scatter(given.view(-1), operation, 0, p.group), 1)
    given, received, sent = p.tensors[1], None, None
    given = given.view(-1, p.spec["width"]) if given.numel() else given.view(0, p.spec["width"])
    if not p.spec["even"]:
        received = [p.spec["splits"][s][p.me] for s in range(p.size)]
        sent = p.spec["splits"][p.me]
    return _Functional(p, functional.all_to_all_single(given, received, sent, p.group), 0)


def _reduce(p: _Pending, later: bool) -> Any:
    return dist.reduce(p.tensors[0], dst=p.root, op=p.op, group=p.group, async_op=later)


def _broadcast(p: _Pending, later: bool) -> Any:
    return dist.broadcast(p.tensors[0], src=p.root, group=p.group, async_op=later)


def _all_gather(p: _Pending, later: bool) -> Any:
    return dist.all_gather(p.tensors[1:], p.tensors[0], group=p.group, async_op=later)


def _own_part(p: _Pending, whole: torch.Tensor) -> torch.Tensor:
    (count,) = p.spec["counts"]
    return whole.view(-1)[p.me * count : (p.me + 1) * count]


def _all_gather_into_tensor(p: _Pending, later: bool) -> Any:
    whole = p.tensors[-1]
    own = _own_part(p, whole) if p.spec["in_place"] else p.tensors[0]
    if p.spec["stacked"]:
        whole = whole.view(p.size, -1) if whole.numel() else whole.view(p.size, 0)
    return dist.all_gather_into_tensor(whole, own, group=p.group, async_op=later)


def _reduce_scatter_tensor(p: _Pending, later: bool) -> Any:
    whole = p.tensors[0]
    own = _own_part(p, whole) if p.spec["in_place"] else p.tensors[1]
    return dist.reduce_scatter_tensor(own, whole, op=p.op, group=p.group, async_op=later)


def _gather(p: _Pending, later: bool) -> Any:
    outputs = p.tensors[1:] if p.me == p.spec["root"] else None
    return dist.gather(p.tensors[0], outputs, dst=p.root, group=p.group, async_op=later)


def _scatter(p: _Pending, later: bool) -> Any:
    inputs = p.tensors[1:] if p.me == p.spec["root"] else None
    return dist.scatter(p.tensors[0], inputs, src=p.root, group=p.group, async_op=later)


def _reduce_scatter(p: _Pending, later: bool) -> Any:
    return dist.reduce_scatter(p.tensors[0], p.tensors[1:], op=p.op, group=p.group, async_op=later)


def _all_to_all(p: _Pending, later: bool) -> Any:
    return dist.all_to_all(p.tensors[: p.size], p.tensors[p.size :], group=p.group, async_op=later)


def _all_to_all_single(p: _Pending, later: bool) -> Any:
    output, given = (
        one.view(-1, p.spec["width"]) if one.numel() else one.view(0, p.spec["width"]) for one in p.tensors
    )
    received = [p.spec["splits"][s][p.me] for s in range(p.size)]
    splits = {} if p.spec["even"] else {"output_split_sizes": received, "input_split_sizes": p.spec["splits"][p.me]}
    return dist.all_to_all_single(output, given, group=p.group, async_op=later, **splits)


def _barrier(p: _Pending, later: bool) -> Any:
    return dist.barrier(group=p.group, async_op=later)


def _monitored_barrier(p: _Pending, later: bool) -> None:
    dist.monitored_barrier(group=p.group)


def _message(p: _Pending, later: bool) -> Any:
    src, dst = p.global_ranks[p.spec["src"]], p.global_ranks[p.spec["dst"]]
    tag = p.spec["tag"]
    if p.me == p.spec["src"]:
        return (dist.isend if later else dist.send)(p.tensors[0], dst, group=p.group, tag=tag)
    named = None if p.spec.get("any_source") else src
    found = (dist.irecv if later else dist.recv)(p.tensors[0], named, group=p.group, tag=tag)
    return found if later else p.expect(found, src)


def _exchange(p: _Pending, later: bool) -> Any:
    calls, tensors = [], iter(p.tensors)
    for src, dst, _ in p.spec["messages"]:
        if p.me in (src, dst):
            how, peer = (dist.isend, dst) if p.me == src else (dist.irecv, src)
            tag = p.spec["back_tag"] if src > dst else 0
            calls.append(dist.P2POp(how, next(tensors), p.global_ranks[peer], group=p.group, tag=tag))
    works = dist.batch_isend_irecv(calls) if calls else []
    if later:
        return works
    for work in works:
        work.wait()
    return None


def _all_gather_object(p: _Pending, later: bool) -> None:
    found: list[Any] = [None] * p.size
    dist.all_gather_object(found, model.objects(p.spec, p.me), group=p.group)
    p.expect(found, model.expected_objects(p.spec, p.size, p.me))


def _broadcast_object_list(p: _Pending, later: bool) -> None:
    found = [model.objects(p.spec, p.me) if p.me == p.spec["root"] else None]
    dist.broadcast_object_list(found, src=p.root, group=p.group)
    p.expect(found, model.expected_objects(p.spec, p.size, p.me))


def _gather_object(p: _Pending, later: bool) -> None:
    found = [None] * p.size if p.me == p.spec["root"] else None
    dist.gather_object(model.objects(p.spec, p.me), found, dst=p.root, group=p.group)
    p.expect(found, model.expected_objects(p.spec, p.size, p.me))


def _scatter_object_list(p: _Pending, later: bool) -> None:
    given = [{"to": rank, **model.objects(p.spec, p.me)} for rank in range(p.size)]
    found: list[Any] = [None]
    dist.scatter_object_list(found, given if p.me == p.spec["root"] else None, src=p.root, group=p.group)
    p.expect(found, model.expected_objects(p.spec, p.size, p.me))


def _message_objects(p: _Pending, later: bool) -> None:
    src, dst = p.global_ranks[p.spec["src"]], p.global_ranks[p.spec["dst"]]
    if p.me == p.spec["src"]:
        dist.send_object_list([model.objects(p.spec, p.me), None], dst, group=p.group)
    else:
        found: list[Any] = [0, 0]
        p.expect(dist.recv_object_list(found, src, group=p.group), src)
        p.expect(found, model.expected_objects(p.spec, p.size, p.me))


def _sparse_all_reduce(p: _Pending, later: bool) -> Any:
    p.sparse = model.sparse(p.spec, p.me)
    return dist.all_reduce(p.sparse, op=p.op, group=p.group, async_op=later)


def _gradients(p: _Pending, later: bool) -> None:
    gradients.run(p)


def _hvd(p: _Pending, later: bool) -> None:
    if p.rank.backend == "penstock":
        wrong = p.rank.program["wrong"]
        is_wrong = wrong is not None and wrong["kind"] == "hvd" and wrong["call"] == p.name
        horovod_sessions.Session(p, _told if is_wrong else None).run()


def _hvd_allreduce(p: _Pending, later: bool) -> None:
    if p.rank.backend != "penstock":
        return
    import penstock.horovod.torch as hvd

    hvd.init()
    try:
        order = list(range(len(p.tensors)))
        random.Random(f"{p.spec['key']} {p.me}").shuffle(order)
        handles = {index: hvd.allreduce_async(p.tensors[index], name=f"t{index}", op=hvd.Average) for index in order}
        for index in sorted(order, reverse=p.me % 2 == 0):
            p.tensors[index].copy_(hvd.synchronize(handles[index]))
    finally:
        hvd.shutdown()


_CALLS: dict[str, Callable[[_Pending, bool], Any]] = {
    "all_reduce": _all_reduce,
    "all_reduce_coalesced": _all_reduce_coalesced,
    "coalesced all_reduce": _coalesced_all_reduce,
    "functional all_reduce": _functional_all_reduce,
    "all_gather_coalesced": _all_gather_coalesced,
    "coalesced all_gather_into_tensor": _coalesced_all_gather,
    "coalesced reduce_scatter_tensor": _coalesced_reduce_scatter,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "barrier": _barrier,
    "monitored_barrier": _monitored_barrier,
    "message": _message,
    "exchange": _exchange,
    "all_gather_object": _all_gather_object,
    "broadcast_object_list": _broadcast_object_list,
    "gather_object": _gather_object,
    "scatter_object_list": _scatter_object_list,
    "message objects": _message_objects,
    "sparse all_reduce": _sparse_all_reduce,
    "reducer": _gradients,
    "ddp": _gradients,
    "hvd allreduce": _hvd_allreduce,
    "hvd": _hvd,
}
# Calls whose reduced tensors must have the same bits on all ranks.
_ALIKE = {"all_reduce", "all_reduce_coalesced", "coalesced all_reduce", "functional all_reduce", "hvd allreduce"}


# -------------------------------------------------------------------------------------------------------------- helpers


def _told(error: Exception) -> dict[str, Any]:
    return {
        "kinds": [kind.__name__ for kind in type(error).__mro__],
        "text": str(error)[:2000],
        "lives": bool(getattr(error, "group_lives", False)),
        "at_s": time.monotonic(),
        "is_faults_own": mutants.is_own(error),
    }


def _warm_up() -> None:
    """Everything that a process opens once and keeps: imports, the clocks' files, the threads of autograd."""
    torch.ones(1, requires_grad=True).sum().backward()
    for module in (
        "penstock.training.gradients",
        "penstock.horovod.torch",
        "torch.distributed._functional_collectives",
    ):
        with contextlib.suppress(ImportError):
            __import__(module)


def _held() -> Held:
    """Descriptors of this process, threads without those that stay (two spare ones for callbacks, and one that writes log
    lines), and mappings of memory that ranks share."""
    threads = _threads()
    stay = min(2, sum(one.startswith("penstock-callba") for one in threads)) + ("penstock-log" in threads)
    with open("/proc/self/maps", "rb") as file:
        mappings = file.read().count(b"/memfd:penstock")
    return len(os.listdir("/proc/self/fd")), len(threads) - stay, mappings


def _threads() -> list[str]:
    found = []
    for one in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{one}/comm") as file:
            found.append(file.read().strip())
    return found


def _open_files() -> list[str]:
    found = []
    for one in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{one}"))
    return found


def _holders() -> list[str]:
    """What keeps objects of the engine, which keep its descriptors, alive; and what keeps that."""
    found = []
    for one in gc.get_objects():
        kept = [of for of in gc.get_referents(one) if type(of).__module__ == "penstock._core"]
        if kept and not isinstance(one, type) and getattr(one, "__name__", "") != "penstock._core":
            by = [_short(other) for other in gc.get_referrers(one)[:4]]
            found.append(f"{[type(of).__name__ for of in kept]} by {_short(one)} by {by}")
    return found


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 300 else f"{text[:300]}..."


# split_group takes backends that are written in Python from torch 2.15 on.
_CAN_SPLIT = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 15)
# For an error that waits for nobody, on a machine that does much else.
_AT_ONCE_S = 10.0
# Of `penstock.stats()["held"]`, what no group has between operations.
_OF_OPERATIONS = (
    "operations",
    "claims",
    "early_messages",
    "early_bytes",
    "remembered_operations",
    "unacknowledged_messages",
    "credit_bytes",
)
# Programs after which a rank has imported and made what it keeps.
_FREEZE = 3
# How long a program's last threads and descriptors may take to go, on a machine that does much else.
_SETTLE_S = 5.0
