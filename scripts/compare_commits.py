#!/usr/bin/env python3
"""How much slower or faster is one checkout of Penstock than another? Two ranks on this host, both checkouts by turns.

    git worktree add --detach ../base COMMIT && (cd ../base && ./dev setup)
    ./dev setup && python scripts/compare_commits.py ../base

Each pair starts fresh ranks of both checkouts, each with its checkout's own .venv: forks of a process that has imported torch.
For every case the checkouts then take turns (A B, B A, ...) with equally many operations, while the other one sleeps. Other work
on the machine only ever adds to an operation, so a pair's figure is the median of the fastest quarter of its operations.

Two figures are compared: time on the clock, and processor time of both ranks together (user and system, all threads). On a
machine with other work, processor time is the steadier one.

A case calls only what is in torch, or has been in Penstock since its first commit, so that any two commits can be compared.
The case "none" does nothing of Penstock: how far its ratio is off 1 is the noise of the comparison.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import Any

# As many streams as between hosts, in all commits.
MEDIA = {"memory": {"PENSTOCK_SHM": "1"}, "tcp": {"PENSTOCK_SHM": "0", "PENSTOCK_STREAMS": "16"}}
RANKS = 2


def main() -> None:
    """Compare, print the table, and write the figures of all pairs if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=pathlib.Path, help="a checkout that ./dev setup was run in")
    parser.add_argument(
        "new",
        type=pathlib.Path,
        nargs="?",
        default=pathlib.Path(__file__).parents[1],
        help="another; default: this one",
    )
    parser.add_argument("--pairs", type=int, default=10, help="fresh starts of both (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=6, help="turns of each checkout in a case (default: %(default)s)")
    parser.add_argument("--media", default=",".join(MEDIA), help="default: %(default)s")
    parser.add_argument("--cases", default=",".join(CASES), help="default: %(default)s")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the figures of all pairs to this file")
    given = parser.parse_args()
    media, cases = given.media.split(","), given.cases.split(",")
    for unknown in [*set(media).difference(MEDIA), *set(cases).difference(CASES)]:
        parser.error(f"there is no {unknown!r}; media: {', '.join(MEDIA)}; cases: {', '.join(CASES)}")
    sides = [Side(given.base), Side(given.new)]
    pairs = []
    for number in range(given.pairs):
        pairs.append(pair(number, sides, media, cases, given.turns))
        print(f"pair {number + 1} of {given.pairs}", file=sys.stderr, flush=True)
        if given.json:
            given.json.write_text(json.dumps(pairs, indent=1) + "\n")
    print("\n".join(table(pairs)))


def pair(number: int, sides: list[Side], media: list[str], cases: list[str], turns: int) -> dict[str, Any]:
    """Fresh ranks of both checkouts take turns.

    Returns: for each medium and case, for the base and the new checkout: seconds and processor seconds of an operation.
    """
    for side in sides:
        side.ask("start")
    found = {}
    for medium in media:
        for side in sides:
            side.ask({"join": medium})
        found[medium] = {case: measured(number, case, sides, turns) for case in cases}
    for side in sides:
        side.ask("end")
    return found


def measured(number: int, case: str, sides: list[Side], turns: int) -> list[dict[str, float]]:
    """The figures of both sides in one case."""
    for side in sides:
        side.ask({"prepare": case})
        side.ask("turn")
    stamps: list[list[Any]] = [[], []]
    for turn in range(turns):
        # The second one finds the caches as the first has left them, so they take turns in that too.
        for at in (0, 1) if (number + turn) % 2 == 0 else (1, 0):
            stamps[at].append(sides[at].ask("turn"))
    return [figures(turns_of_side, CASES[case].each) for turns_of_side in stamps]


def figures(turns: Iterable[list[list[tuple[float, float]]]], each: int) -> dict[str, float]:
    """Seconds (the mean of the ranks) and processor seconds (their sum) of an operation, from the ranks' stamps before the first
    and after each operation of every turn."""
    seconds, processor_s = [], []
    for ranks in turns:
        for before, after in zip(zip(*ranks, strict=True), list(zip(*ranks, strict=True))[1:], strict=False):
            spent = [(end - begin, used - had) for (begin, had), (end, used) in zip(before, after, strict=True)]
            seconds.append(statistics.mean(clock for clock, _ in spent))
            processor_s.append(sum(processor for _, processor in spent))
    return {"seconds": fast(seconds) / each, "processor_s": fast(processor_s) / each}


def fast(values: Iterable[float]) -> float:
    """The median of the lowest quarter."""
    ordered = sorted(values)
    return statistics.median(ordered[: -(-len(ordered) // 4)])


class Side:
    """A process of one checkout, whose forks are its ranks. All sleep unless they are asked something."""

    def __init__(self, checkout: pathlib.Path) -> None:
        checkout = checkout.resolve()
        python = checkout / ".venv" / "bin" / "python"
        if not python.exists():
            sys.exit(f"{checkout} has no .venv: run ./dev setup there")
        kept = {
            key: value for key, value in os.environ.items() if not key.startswith(("PENSTOCK_", "PYTHON", "VIRTUAL"))
        }
        self._process = subprocess.Popen(
            [str(python), "-B", __file__, "--side"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=kept | {"OMP_NUM_THREADS": "1"},
        )
        package = self._answer()
        if not pathlib.Path(package).is_relative_to(checkout):
            sys.exit(f"the .venv of {checkout} imports Penstock from {package}: run ./dev setup there")

    def ask(self, task: Any) -> Any:
        """Have all ranks do a task of `be_rank`; returns their answers."""
        assert self._process.stdin is not None
        print(json.dumps(task), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit("a rank has died; its error is above")
        return json.loads(line)


def table(pairs: list[dict[str, Any]]) -> Iterable[str]:
    """The lines of a Markdown table: medians over the pairs, and of each pair's ratio the median, lowest and highest."""
    yield "| case | medium | base | new | ratio | processor time: base | new | ratio |"
    yield "|---|---|---|---|---|---|---|---|"
    for case in next(iter(pairs[0].values())):
        for medium in pairs[0]:
            cells = [CASES[case].__doc__ or case, medium]
            for key in ("seconds", "processor_s"):
                sides = [[one[medium][case][at][key] for one in pairs] for at in (0, 1)]
                ratios = [new / base for base, new in zip(*sides, strict=True)]
                cells += [f"{statistics.median(side) * 1e6:.1f} us" for side in sides]
                cells.append(f"{statistics.median(ratios):.3f} ({min(ratios):.2f} to {max(ratios):.2f})")
            yield f"| {' | '.join(cells)} |"


# ------------------------------------------------------------------ the processes of one checkout


def be_side() -> None:
    """Fork ranks when asked to, and pass what is asked on standard input on to them."""
    import torch
    import torch._dynamo  # the first optimizer of each rank would import it, for two seconds

    import penstock
    import penstock.torch

    # The ranks shall not read modules again, which may have changed meanwhile.
    assert penstock.torch.GradientReducer
    torch.set_num_threads(1)
    # Else each collection in a rank would write to, and so copy, all that the imports have made.
    gc.collect()
    gc.freeze()
    print(json.dumps(penstock.__file__), flush=True)
    fork = multiprocessing.get_context("fork")
    ranks: list[Any] = []
    for line in sys.stdin:
        task = json.loads(line)
        if task == "start":
            for rank in range(RANKS):
                own, other = fork.Pipe()
                fork.Process(target=be_rank, args=(rank, other), daemon=True).start()
                other.close()
                ranks.append(own)
            task = {"store": ranks[0].recv()}
        for rank in ranks:
            rank.send(task)
        print(json.dumps([rank.recv() for rank in ranks]), flush=True)
        if task == "end":
            ranks = []


def be_rank(rank: int, pipe: Any) -> None:
    """Do one task after the other."""
    import torch
    import torch.distributed as dist

    store = None
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, RANKS, is_master=True, wait_for_workers=False)
        pipe.send(store.port)
    port = pipe.recv()["store"]
    store = store or dist.TCPStore("127.0.0.1", port, RANKS, is_master=False)
    pipe.send(None)
    case: Case | None = None
    while (task := pipe.recv()) != "end":
        if task == "turn":
            assert case is not None
            pipe.send(turn_of(case))
            continue
        # The last case's models and reducers go before the next one comes.
        case = None
        gc.collect()
        if "prepare" in task:
            torch.manual_seed(7)
            case = CASES[task["prepare"]](rank)
        else:
            medium = task["join"]
            if dist.is_initialized():
                dist.destroy_process_group()
            os.environ.update(MEDIA[medium])
            dist.init_process_group("penstock", store=dist.PrefixStore(medium, store), rank=rank, world_size=RANKS)
        pipe.send(None)
    case = None
    dist.destroy_process_group()
    pipe.send(None)


def turn_of(case: Case) -> list[tuple[float, float]]:
    """So many operations, after a barrier; their results are checked afterwards.

    Returns: the clock and this process's processor time, before the first and after each operation.
    """
    import torch.distributed as dist

    case.prepare()
    dist.barrier()
    stamps = [(time.monotonic(), time.process_time())]
    for at in range(case.operations):
        case.operate(at)
        stamps.append((time.monotonic(), time.process_time()))
    case.check()
    return stamps


class Case:
    """What is measured."""

    operations: int
    """How many a turn."""
    each = 1
    """An operation counts as so many."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def prepare(self) -> None:
        """Called before a turn."""

    def operate(self, at: int) -> None:
        """The at-th operation of a turn."""
        raise NotImplementedError

    def check(self) -> None:
        """Called after a turn; raises if a result is wrong."""


class AllReduce(Case):
    """all-reduce of 1 KiB"""

    operations = 64

    def __init__(self, rank: int) -> None:
        import torch

        super().__init__(rank)
        self.tensors = [torch.empty(256) for _ in range(64)]

    def prepare(self) -> None:
        for at, tensor in enumerate(self.tensors):
            tensor.fill_((self.rank + 1) * (at + 1))

    def operate(self, at: int) -> None:
        import torch.distributed as dist

        dist.all_reduce(self.tensors[at])

    def check(self) -> None:
        for at, tensor in enumerate(self.tensors):
            assert (tensor == 3 * (at + 1)).all(), f"a sum is wrong: {tensor[:4]}, not {3 * (at + 1)}"


class AsyncAllReduce(AllReduce):
    """all-reduce of 1 KiB, 64 in flight"""

    operations = 2
    each = 64

    def prepare(self) -> None:
        for tensor in self.tensors:
            tensor.fill_(self.rank + 1)

    def operate(self, at: int) -> None:
        import torch.distributed as dist

        works = [dist.all_reduce(tensor, async_op=True) for tensor in self.tensors]
        for work in works:
            work.wait()

    def check(self) -> None:
        for tensor in self.tensors:
            assert (tensor == 3 * RANKS ** (self.operations - 1)).all(), f"a sum is wrong: {tensor[:4]}"


class LargeAllReduce(Case):
    """all-reduce of 64 MiB"""

    operations = 4

    def __init__(self, rank: int) -> None:
        import torch

        super().__init__(rank)
        self.tensor = torch.empty(16 << 20)

    def prepare(self) -> None:
        self.tensor.fill_(self.rank + 1)

    def operate(self, at: int) -> None:
        import torch.distributed as dist

        dist.all_reduce(self.tensor)

    def check(self) -> None:
        expected = 3 * RANKS ** (self.operations - 1)
        assert (self.tensor == expected).all(), f"a sum is wrong: {self.tensor[:4]}, not {expected}"


class Step(Case):
    """a step of 50 parameters, nothing of Penstock"""

    operations = 8
    layers = 25

    def __init__(self, rank: int) -> None:
        import torch

        super().__init__(rank)
        model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(self.layers)))
        # Orthogonal layers keep activations and gradients as large as they are, through any number of layers.
        for layer in model:
            torch.nn.init.orthogonal_(layer.weight)
        self.batch = torch.randn(4, 32, generator=torch.Generator().manual_seed(rank + 1))
        self.model = self.reduced(model)
        self.parameters = list(model.parameters())
        # Large enough for every step to change the bits of weights.
        self.optimizer = torch.optim.SGD(self.parameters, lr=1e-4)

    def reduced(self, model: Any) -> Any:
        """Have the model's gradients averaged; returns what is called instead of it."""
        return model

    def operate(self, at: int) -> None:
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()


class ReducerStep(Step):
    """`GradientReducer`, a step of 50 parameters"""

    def reduced(self, model: Any) -> Any:
        from penstock.torch import GradientReducer

        self.reducer = GradientReducer(model)
        return model

    def check(self) -> None:
        import torch
        import torch.distributed as dist

        # Ranks have different batches, so their weights are the same only if their gradients were averaged.
        weights = torch.cat([one.detach().flatten() for one in self.parameters])
        gathered = [torch.empty_like(weights) for _ in range(RANKS)]
        dist.all_gather(gathered, weights)
        assert weights.isfinite().all() and all(torch.equal(other, weights) for other in gathered), "weights differ"


class ManyReducerStep(ReducerStep):
    """`GradientReducer`, a step of 500 parameters"""

    operations = 2
    layers = 250


class DDPStep(ReducerStep):
    """`DistributedDataParallel`, a step of 50 parameters"""

    def reduced(self, model: Any) -> Any:
        import torch

        return torch.nn.parallel.DistributedDataParallel(model)


CASES: dict[str, type[Case]] = {
    "all-reduce": AllReduce,
    "async": AsyncAllReduce,
    "large": LargeAllReduce,
    "reducer": ReducerStep,
    "reducer-500": ManyReducerStep,
    "ddp": DDPStep,
    "none": Step,
}


if __name__ == "__main__":
    if sys.argv[1:] == ["--side"]:
        be_side()
    else:
        main()
