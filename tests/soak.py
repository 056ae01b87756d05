"""Make and leave groups for a long time, with small operations of all kinds in each, and see that nothing is kept: `./dev soak`.

Every rank runs the same program of a seed: a group of some of the ranks, operations in it, one of several ends, and the next
group. Some ends are disorderly: messages that nobody receives, ranks that call different operations, a rank that leaves while it
receives. At the end what the engine holds (`penstock.stats()["held"]`), the descriptors and the threads of each rank are what
they were after the first groups. torch keeps some memory of every group, so the growth of each rank's is judged against that of
the same rank of the same program on gloo, which runs at the same time (`steeper`).
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import dataclasses
import datetime
import itertools
import math
import os
import pathlib
import random
import statistics
import sys
import threading
import time
from typing import Any

# As pytest finds them: the tests' own modules are imported from their folder, also in the ranks.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import torch
import torch.distributed as dist
from torch import nn

import penstock
import ranks
from penstock.errors import PenstockError
from penstock.runtime import groups
from penstock.runtime.store import Keys
from penstock.torch import GradientReducer, life
from penstock.torch import backend as penstock_backend


@dataclasses.dataclass
class Spec:
    """What a rank does."""

    backend: str
    seed: int
    groups: int
    """At most."""
    minutes: float
    """At most."""
    operations: int
    """Of each group."""
    clean: bool = False
    """Every group ends in good order, as on gloo it always does."""
    bare: bool = False
    """Groups of the engine, without `new_group`: nothing of torch's own grows."""
    leak_bytes: int = 0
    """Kept of every group, to see that it is found."""


@dataclasses.dataclass
class Held:
    """What a rank holds between groups, by name."""

    engine: dict[str, int]
    process: dict[str, int]


@dataclasses.dataclass
class Told:
    """What a rank has seen."""

    groups: int
    operations: int
    ends: dict[str, int]
    seconds: float
    before: Held
    """After the first groups."""
    after: Held
    memory: list[tuple[int, int]]
    """Groups so far, resident bytes."""

    def growth(self) -> Growth | None:
        """Bytes a group, of the last two thirds; None if there are too few points."""
        points = self.memory[len(self.memory) // 3 :]
        return slope(points) if len(points) >= _BLOCKS else None


@dataclasses.dataclass
class Growth:
    """Of a rank's resident memory, in bytes a group: the median slope, and the range that holds it in 99 of 100 cases."""

    slope: float
    low: float
    high: float
    groups: int
    """That were made meanwhile."""


def slope(points: list[tuple[int, int]]) -> Growth:
    """Robust, because memory grows in steps: the median of the slopes between the medians of `_BLOCKS` equal blocks (Theil 1950).
    The range is Sen's (1968), from the variance of Kendall's tau."""
    cuts = [len(points) * block // _BLOCKS for block in range(_BLOCKS + 1)]
    blocks = [points[start:end] for start, end in itertools.pairwise(cuts)]
    middles = [tuple(statistics.median(column) for column in zip(*block, strict=True)) for block in blocks]
    slopes = sorted((y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in itertools.combinations(middles, 2))
    spread = 2.576 * math.sqrt(_BLOCKS * (_BLOCKS - 1) * (2 * _BLOCKS + 5) / 18)
    outside = int((len(slopes) - spread) / 2)
    groups = points[-1][0] - points[0][0]
    return Growth(statistics.median(slopes), slopes[outside], slopes[-1 - outside], groups)


def steeper(ours: Growth, gloos: Growth) -> float:
    """By how many bytes a group our memory grows faster than gloo's beyond what the measurement cannot tell: both ranges, and
    one step in which the allocator takes memory from the system."""
    return ours.low - gloos.high - _STEP_BYTES / ours.groups


def run(*specs: Spec, world: int) -> list[list[Told]]:
    """Run each program on ranks of its own, all at the same time; raises what a rank raised."""
    with contextlib.ExitStack() as stack:
        jobs = [stack.enter_context(ranks.Ranks(_rank, count=world, args=(spec,))) for spec in specs]
        until_s = time.monotonic() + 60 * max(spec.minutes for spec in specs) + 120
        ended = [job.outcomes(timeout_s=max(1.0, until_s - time.monotonic())) for job in jobs]
    for outcomes in ended:
        if not all(outcome.ok for outcome in outcomes):
            raise ranks.RanksFailed(outcomes)
    return [[outcome.value for outcome in outcomes] for outcomes in ended]


def complaints(told: Told, world: int) -> list[str]:
    """What a rank of Penstock holds at its end and should not."""
    # At most: a set of ranks with two or more of them, two of whose joins may be apart; a peer; the threads that stay.
    most = {"closed_ranges": 2**world, "jobs": world - 1, "callback_threads": 2}
    kept = [
        f"{name}: {told.before.engine[name]} before, {value} after"
        for name, value in told.after.engine.items()
        if value > most.get(name, told.before.engine[name])
    ]
    before, after = told.before.process, told.after.process
    return kept + [
        f"{name}: {before[name]} before, {after[name]} after" for name in after if after[name] > before[name]
    ]


# ---------------------------------------------------------------------------------------------------- in a rank


def _rank(spec: Spec) -> Told:
    dist.init_process_group(spec.backend)
    torch.manual_seed(spec.seed)
    choose = random.Random(spec.seed)
    is_penstock = spec.backend == "penstock"
    began_s, counts = time.monotonic(), collections.Counter()
    soak = _Soak(spec, choose, counts)
    memory: list[tuple[int, int]] = []
    before = None
    made, kept = 0, []
    while made < spec.groups:
        if made == _FIRST:
            before = _held(is_penstock)
            memory.clear()
        if made % _EVERY == 0:
            memory.append((made, _resident()))
            if not _agree(time.monotonic() - began_s < 60 * spec.minutes):
                break
        soak.one_group()
        kept.append(b"x" * spec.leak_bytes)
        made += 1
    seconds = time.monotonic() - began_s
    after = _held(is_penstock, before)
    dist.destroy_process_group()
    operations = counts.pop("operations")
    return Told(made, operations, dict(counts), seconds, before or after, after, memory)


class _Soak:
    def __init__(self, spec: Spec, choose: random.Random, counts: collections.Counter[str]) -> None:
        self._spec = spec
        self._choose = choose
        self._counts = counts
        self._rank, self._world = dist.get_rank(), dist.get_world_size()

    def one_group(self) -> None:
        """Make a group, work in it, and leave it."""
        choose, spec = self._choose, self._spec
        members = sorted(choose.sample(range(self._world), choose.randint(2, self._world)))
        is_clean = spec.clean or spec.bare or spec.backend != "penstock"
        end = "clean" if is_clean else choose.choices(list(_ENDS), _ENDS.values())[0]
        calls = [choose.choice(_CALLS) for _ in range(spec.operations)]
        sizes = [choose.choice(_SIZES) for _ in calls]
        self._counts[end] += 1
        self._counts["operations"] += spec.operations
        if spec.bare:
            self._bare_group(sizes)
            return
        group = dist.new_group(members, backend=spec.backend)
        if self._rank not in members:
            return
        for number, (call, size) in enumerate(zip(calls, sizes, strict=True)):
            self._call(call, group, members, size, number)
        try:
            self._end(end, group, members)
        except PenstockError:
            if end in ("clean", "undelivered"):
                raise
        dist.destroy_process_group(group)

    def _call(self, call: str, group: Any, members: list[int], size: int, number: int) -> None:
        world, own = len(members), members.index(self._rank)
        first = members[0]
        tensor = torch.full((size,), float(own + 1))
        total = world * (world + 1) / 2
        if call == "all_reduce":
            dist.all_reduce(tensor, group=group)
            assert tensor.eq(total).all()
        elif call == "future":
            ended = dist.all_reduce(tensor, group=group, async_op=True).get_future().then(lambda _: None)
            ended.wait()
            assert tensor.eq(total).all()
        elif call == "broadcast":
            dist.broadcast(tensor, first, group=group)
            assert tensor.eq(1).all()
        elif call == "reduce":
            dist.reduce(tensor, first, group=group)
        elif call == "barrier":
            dist.barrier(group=group)
        elif call == "all_gather":
            parts = [torch.empty(size) for _ in members]
            dist.all_gather(parts, tensor, group=group)
            assert all(part.eq(rank + 1).all() for rank, part in enumerate(parts))
        elif call == "gather":
            dist.gather(tensor, [torch.empty(size) for _ in members] if own == 0 else None, first, group=group)
        elif call == "scatter":
            dist.scatter(tensor, [torch.full((size,), 7.0) for _ in members] if own == 0 else None, first, group=group)
            assert tensor.eq(7).all()
        elif call == "all_to_all":
            whole = tensor.repeat(world)
            dist.all_to_all_single(torch.empty_like(whole), whole, group=group)
        elif call == "ring":
            # A tag of its own for each.
            sent = dist.isend(tensor, members[(own + 1) % world], group=group, tag=number)
            received = torch.empty(size)
            dist.recv(received, members[own - 1], group=group, tag=number)
            sent.wait()
            assert received.eq((own - 1) % world + 1).all()
        elif call == "sparse":
            place = torch.sparse_coo_tensor([[own]], [1.0], (world,))
            dist.all_reduce(place, group=group)
            assert place.to_dense().eq(1).all()
        elif call == "objects":
            told: list[Any] = [None] * world
            dist.all_gather_object(told, {"rank": own, "text": "x" * (size % 1000)}, group=group)
            assert [one["rank"] for one in told] == list(range(world))
        elif call in ("ddp", "reducer"):
            self._train(group, own, world, averages_itself=call == "ddp")

    def _train(self, group: Any, own: int, world: int, *, averages_itself: bool) -> None:
        """A model of its own: DistributedDataParallel, and in turn with that, where there is one, a `GradientReducer`."""
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        reducer = None
        whole: nn.Module = model
        if averages_itself or self._spec.backend != "penstock":
            whole = nn.parallel.DistributedDataParallel(model, process_group=group)
        else:
            reducer = GradientReducer(model, group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            ((own + 1) * whole(torch.ones(2, 8)).sum()).backward()
            optimizer.step()
        # Of (1 + ... + world) / world times two rows.
        bias = model[2].bias.grad
        assert bias is not None and bias.item() == world + 1
        if reducer is not None:
            reducer.close()

    def _end(self, end: str, group: Any, members: list[int]) -> None:
        own = members.index(self._rank)
        if end == "clean":
            return
        if end != "undelivered":
            # A failure ends whatever runs on a slower rank. From here on that is expected.
            dist.barrier(group=group)
        if own == 0:
            for size in (0, 1, 1000):
                dist.isend(torch.ones(size), members[-1], group=group, tag=99).wait()
        if end == "differ":
            dist.all_reduce(torch.ones(3 if own == 0 else 4), group=group)
        elif end == "running" and own == len(members) - 1:
            # It is left while it runs.
            dist.irecv(torch.empty(100_000), members[0], group=group, tag=98)
        elif end == "running":
            dist.all_reduce(torch.ones(10), group=group)

    def _bare_group(self, sizes: list[int]) -> None:
        keys = Keys("soak", penstock_backend.of()._member.keys)
        member = groups.join(keys, self._rank, range(self._world), datetime.timedelta(seconds=60), "soak")
        other = (self._rank + 1) % self._world
        for number, size in enumerate(sizes):
            tensor = torch.ones(size)
            kind = {"dtype": "float32", "elements": size, "bytes": tensor.nbytes, "timeout_s": 60}
            at = {"input": tensor.data_ptr(), "output": tensor.data_ptr(), "keep": tensor}
            if number % 3 == 2:
                received = torch.empty(size)
                sent = member.group.start("send", **kind, **at, rank=other, tag=number)
                into = {"input": 0, "output": received.data_ptr(), "keep": received}
                before = (self._rank - 1) % self._world
                member.group.start("recv", **kind, **into, rank=before, tag=number).wait()
                sent.wait()
            else:
                member.group.start("all_reduce", **kind, **at, op="sum").wait()
        member.leave()


def _agree(wish: bool) -> bool:
    """Rank 0's."""
    decision = torch.tensor([int(wish)])
    dist.broadcast(decision, 0)
    return bool(decision.item())


def _held(is_penstock: bool, before: Held | None = None) -> Held:
    """What this rank holds now that all ranks have come here; with `before`, once it is no more than that, or in 20 s."""
    _meet("held")
    until_s = time.monotonic() + 20
    while True:
        engine = dict(penstock.stats()["held"]) if is_penstock else {}
        process = {
            "descriptors of the process": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")) - engine.get("callback_threads", 0) - _writes_log(),
            "Python threads": threading.active_count(),
            "backends": len(life.alive),
        }
        held = Held(engine, process)
        # What others have taken they say with their next frame, or the next heartbeat.
        still = [name for name in _TO_COME if engine.get(name)]
        if before is not None:
            still += [name for name, count in process.items() if count > before.process[name]]
        if not still or time.monotonic() > until_s:
            _meet("seen")
            return held
        time.sleep(0.05)


def _writes_log() -> bool:
    """Whether this process has the thread that writes log lines, which comes with the first and stays."""
    for task in pathlib.Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            if (task / "comm").read_text() == "penstock-log\n":
                return True
    return False


def _meet(place: str) -> None:
    """Wait for all ranks, without a message between them."""
    store, world = dist.distributed_c10d._get_default_store(), dist.get_world_size()
    turn = (store.add(f"soak/{place}", 1) - 1) // world + 1
    while store.add(f"soak/{place}", 0) < turn * world:
        time.sleep(0.01)


def _resident() -> int:
    """Bytes of this process in memory, without pages that malloc has free: it keeps more of those, the more threads allocate."""
    with contextlib.suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# ---------------------------------------------------------------------------------------------------- the command


def main(arguments: list[str]) -> int:
    """Returns 0 if nothing was kept."""
    parser = argparse.ArgumentParser(prog="./dev soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10, help="default: 10; both backends run at the same time")
    parser.add_argument("--groups", type=int, default=10**9, help="no more than so many")
    parser.add_argument("--operations", type=int, default=10, help="of each group (default: 10)")
    parser.add_argument("--ranks", type=int, default=3, help="default: 3")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clean", action="store_true", help="no group fails or leaves messages behind")
    parser.add_argument("--bare", action="store_true", help="the engine's groups alone, without new_group")
    parser.add_argument("--backend", choices=("penstock", "gloo", "both"), default="both")
    options = parser.parse_args(arguments)
    backends = ["penstock", "gloo"] if options.backend == "both" and not options.bare else ["penstock"]
    backends = ["gloo"] if options.backend == "gloo" else backends
    of = (options.seed, options.groups, options.minutes, options.operations, options.clean, options.bare)
    told = dict(zip(backends, run(*(Spec(one, *of) for one in backends), world=options.ranks), strict=True))
    found: list[str] = []
    for backend, ones in told.items():
        first = ones[0]
        rate = f"{first.groups / first.seconds:.0f} groups/s, {first.operations / first.seconds:.0f} operations/s"
        print(f"{backend}: {first.groups} groups, {first.operations} operations in {first.seconds:.0f} s ({rate})")
        print(f"  ends: {', '.join(f'{count} {end}' for end, count in sorted(first.ends.items()))}")
        for rank, one in enumerate(ones):
            print(f"  rank {rank}: {_described(one.growth())}; holds {one.after.engine}")
            kept = complaints(one, options.ranks) if backend == "penstock" else []
            found += [f"rank {rank} keeps {text}" for text in kept]
    unjudged = "memory was not judged: that takes both backends and more groups"
    if len(told) == 2:
        grown = memory_complaints(*told.values())
        unjudged = unjudged if grown is None else "memory grows no faster than gloo's"
        found += grown or []
    for text in found:
        print(f"FAILED: {text}")
    if not found:
        print(f"PASSED: nothing is kept; {unjudged}")
    return int(bool(found))


def memory_complaints(ours: list[Told], gloos: list[Told]) -> list[str] | None:
    """Ranks whose memory grows faster than gloo's; None if there were too few groups to say."""
    found = []
    for rank, (one, other) in enumerate(zip(ours, gloos, strict=True)):
        here, there = one.growth(), other.growth()
        if here is None or there is None:
            return None
        beyond = steeper(here, there)
        if beyond > 0:
            found.append(
                f"rank {rank}: {_described(here)}, on gloo {_described(there)}: {beyond:.0f} bytes a group more than the "
                "margin of the measurement"
            )
    return found


def _described(growth: Growth | None) -> str:
    if growth is None:
        return "too few groups to judge resident memory"
    return f"resident memory grows by {growth.slope:.0f} bytes a group ({growth.low:.0f} to {growth.high:.0f})"


# The first groups bring what every process has once: streams, buffers, threads.
_FIRST = 50
_EVERY = 10
# Sen's range needs ten; more do not make it narrower where memory grows in steps.
_BLOCKS = 12
# glibc takes 128 KiB at a time (M_TOP_PAD) for each of its arenas, of which threads that allocate use up to eight here.
_STEP_BYTES = 1 << 20
_CALLS = (
    "all_reduce",
    "future",
    "broadcast",
    "reduce",
    "barrier",
    "all_gather",
    "gather",
    "scatter",
    "all_to_all",
    "ring",
    "sparse",
    "objects",
    "ddp",
    "reducer",
)
# Copied; as a reference or granted.
_SIZES = (0, 1, 100, 1000, 20_000)
_ENDS = {"clean": 6, "undelivered": 2, "differ": 1, "running": 1}
_TO_COME = (
    *("operations", "claims", "early_messages", "remembered_operations"),
    *("unacknowledged_messages", "credit_bytes"),
)

if __name__ == "__main__":
    import soak  # the ranks look for the program in a module of that name

    sys.exit(soak.main(sys.argv[1:]))
