"""One rank of `penstock bench readiness`: trains by turns under a `GradientReducer` and under one that has nothing to agree on,
and tells how long steps took, when rounds ran, and what it sent.

Standard output takes one JSON object a line.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from penstock import _core
from penstock.tools.flight import flight_record
from penstock.torch import GradientReducer, backend, stats


def main() -> None:
    options = json.loads(sys.argv[1])
    dist.init_process_group("penstock")
    torch.manual_seed(dist.get_rank())
    _say(**_balance(options["tensors"], options["steps"]))
    layers = [nn.Linear(options["width"], options["width"]) for _ in range(options["tensors"] // 2)]
    model = nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))
    data = torch.randn(options["batch"], options["width"])
    twin = copy.deepcopy(model)
    agreed = _Way(model, _by_pythons_hook(GradientReducer(model, bucket_bytes=options["bucket_bytes"])), data)
    told = _Way(twin, ToldReducer(twin, bucket_bytes=options["bucket_bytes"]), data)
    _check_alike(agreed, told)
    for turn in range(options["turns"] + 1):
        said: dict[str, Any] = {}
        # Each way goes first in every second turn.
        for way in (agreed, told) if turn % 2 else (told, agreed):
            measured = way.train(options["steps"])
            if way is told:
                said["told"] = measured
            else:
                said |= {**measured, "rounds": _rounds(measured["counts"]["rounds"])}
        # The first turn makes connections and buffers.
        _say(turn=turn - 1, **said)
    dist.destroy_process_group()


def _by_pythons_hook(reducer: GradientReducer) -> GradientReducer:
    """The reducer, whose gradients are all handed over by `GradientReducer._ready`."""
    reducer._slots.follow = lambda one: None  # type: ignore[method-assign]
    return reducer


class ToldReducer(GradientReducer):
    """A `GradientReducer` that asks no other rank what it has: the order of gradients is told beforehand.

    It holds for a chain of layers, which makes all its gradients in every pass and in one order, and for nothing else: a rank
    that had none of a gradient would send zeros for it in silence, and all others would wait for the pass to end there. So it
    is no way to train, but what a `GradientReducer` is held against. What it leaves out is the exchange with other ranks,
    and the waiting for them in it; hooks, the way from a hook to the engine's thread and back, buckets and their all-reduces
    are the same. (Hooks are Python's in both: the compiled one hands gradients to one `_core.Reducer`.)

    *Why not a group of one rank for the rounds of a `GradientReducer`?* Such a round ends on the engine's thread as well, a
    moment later, and takes what has become ready by its beginning: ranks would cut other buckets, by their timing.
    """

    def __init__(self, model: nn.Module, *, bucket_bytes: int) -> None:
        super().__init__(model, bucket_bytes=bucket_bytes)
        _by_pythons_hook(self)
        alone, _ = dist.new_subgroups(1)

        def make(gradients: Sequence[tuple[str, int, str, int]]) -> _core.Reducer:
            return _core.Reducer(
                rounds=backend.of(alone)._member.group,
                buckets=self._buckets.group,
                rank=self._buckets.rank,
                world=self._buckets.world,
                gradients=gradients,
                op="avg",
                bucket_bytes=bucket_bytes,
                wire=None,
                check_finite=False,
                tapers=False,
                timeout_s=self._backend.timeout_s,
            )

        parts = self._slots.described()
        batches = cut([one.nbytes for one in self._trained.dense], bucket_bytes)
        self._reducer = cast(Any, _Batches([[parts[index] for index in batch] for batch in batches], make))


class _Batches:
    """What a `GradientReducer` asks of a `_core.Reducer`, by one for each batch of gradients: when a batch and those before it
    are complete, its gradients are submitted by index, and its one round is this rank's own. So all ranks start the same
    buckets in the same order."""

    def __init__(
        self,
        batches: Sequence[Sequence[tuple[str, int, str, int]]],
        make: Callable[[Sequence[tuple[str, int, str, int]]], _core.Reducer],
    ) -> None:
        self._reducers = [make(batch) for batch in batches]
        self._sizes = [len(batch) for batch in batches]
        self._starts = [sum(self._sizes[:at]) for at in range(len(batches))]
        self._batch = [at for at, size in enumerate(self._sizes) for _ in range(size)]
        self._begin()

    def _begin(self) -> None:
        self._held: dict[int, tuple[int, int, bool, Any]] = {}
        self._left = list(self._sizes)
        self._next = 0
        self._tickets: list[_core.Ticket] = []

    def submit(self, index: int, address: int, bytes: int, keep: Any, *, absent: bool = False) -> None:
        self._held[index] = (address, bytes, absent, keep)
        self._left[self._batch[index]] -= 1
        while self._next < len(self._left) and not self._left[self._next]:
            reducer, start = self._reducers[self._next], self._starts[self._next]
            for place in range(self._sizes[self._next]):
                address, bytes, absent, keep = self._held.pop(start + place)
                reducer.submit(place, address, bytes, keep, absent=absent)
            self._tickets.append(reducer.flush())
            self._next += 1

    def flush(self) -> _Batches:
        """All gradients have been submitted."""
        return self

    def wait(self) -> None:
        tickets = self._tickets
        self._begin()
        for ticket in tickets:
            ticket.wait()

    def was_absent(self, index: int) -> bool:
        batch = self._batch[index]
        return self._reducers[batch].was_absent(index - self._starts[batch])

    def stats(self) -> dict[str, Any]:
        each = [reducer.stats() for reducer in self._reducers]
        summed = {key: sum(one[key] for one in each) for key in each[0]}
        return {**summed, "steps": each[-1]["steps"]}


def cut(sizes: Sequence[int], bucket_bytes: int) -> list[list[int]]:
    """Gradients of so many bytes, by index, in the batches of rounds that end at once: each ends where it holds a bucket."""
    batches: list[list[int]] = [[]]
    filled = 0
    for index, size in enumerate(sizes):
        if filled >= bucket_bytes:
            batches.append([])
            filled = 0
        batches[-1].append(index)
        filled += size
    return batches


class _Way:
    """A model, and what averages its gradients."""

    def __init__(self, model: nn.Module, reducer: GradientReducer, data: torch.Tensor) -> None:
        self.model, self.reducer, self.data = model, reducer, data
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def backward(self) -> None:
        self.model(self.data).square().mean().backward()

    def train(self, steps: int) -> dict[str, Any]:
        """How long steps took, when their passes ended, and what the reducer did in them."""
        before, seconds, ends = self.reducer.stats(), [], []
        for _ in range(steps):
            dist.barrier()
            started = time.perf_counter()
            self.optimizer.zero_grad()
            self.backward()
            ends.append(time.time())
            self.optimizer.step()
            seconds.append(time.perf_counter() - started)
        after = self.reducer.stats()
        return {
            "seconds": seconds,
            "ends": ends,
            "counts": {key: after[key] - before[key] for key in ("rounds", "buckets", "steps")},
        }


def _check_alike(agreed: _Way, told: _Way) -> None:
    """What is sent without agreement must still be the same gradients on all ranks; sums may be in another order."""
    agreed.backward()
    told.backward()
    for (name, one), other in zip(agreed.model.named_parameters(), told.model.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        ours, theirs = one.grad.double(), other.grad.double()
        # The gradients of the first of many layers are too small for float32.
        if not float((ours - theirs).norm()) <= 1e-4 * float(ours.norm()) + 1e-30:
            raise AssertionError(f"without agreement the averages of {name} are others: the control is wrong")


def _rounds(count: int) -> list[list[float]]:
    """The last rounds, as far as the engine remembers: number, and when this rank joined it and had its answer, in seconds
    since 1970."""
    record = flight_record()
    ended = [
        [each["number"], record["time"] - each["issued_s_ago"], record["time"] - each["ended_s_ago"]]
        for each in record["operations"]
        if each["group"].endswith("/rounds") and each["ended_s_ago"] is not None
    ]
    return ended[-count:]


def _balance(tensors: int, steps: int) -> dict[str, Any]:
    """What this rank sends and receives for gradients of one element, of which the rounds are the greater part."""
    model = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(tensors)])
    reducer = GradientReducer(model)
    for step in range(steps + 1):
        if step == 1:
            # What gave all ranks the same parameters has been acknowledged by now, and is not counted.
            before = _moved()
        torch.stack(list(model)).sum().backward()
    after = _moved()
    reducer.close()
    return {"sent": after[0] - before[0], "received": after[1] - before[1]}


def _moved() -> tuple[int, int]:
    streams = [stream for peer in stats()["peers"] for stream in peer["streams"]]
    return sum(each["sent_bytes"] for each in streams), sum(each["received_bytes"] for each in streams)


def _say(**message: Any) -> None:
    print(json.dumps({"rank": dist.get_rank(), **message}), flush=True)


if __name__ == "__main__":
    main()
