"""One rank of `penstock bench aggregated --faults`: steps of all-reduces, in one of which it may kill an aggregator.

Standard output takes one JSON object a line: orders (`striker.order`), and what each run has computed.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from penstock.tools.bench.aggregated import quantised
from penstock.tools.bench.aggregated.rank import aggregated, counted, group_of, say
from penstock.tools.bench.aggregated.striker import Striker, order


def main() -> None:
    options = json.loads(sys.argv[1])
    # The default group is for barriers and for what ranks agree on.
    dist.init_process_group("gloo")
    nbytes, steps = options["nbytes"], options["steps"]
    inputs = [_contributions(dist.get_rank(), step, nbytes) for step in range(steps)]
    first = _Run(options, inputs, -1, None)
    say(run=-1, **first.take())
    if dist.get_rank() == 0:
        _check(first.results, nbytes)
    sent = torch.tensor([first.sent / steps])
    dist.all_reduce(sent)
    step_bytes = sent.item() / dist.get_world_size()
    if options["loss"] and dist.get_rank() == 0:
        order(options["state"], order="loss", share=options["loss"])()
    dist.barrier()
    for number, fault in enumerate(options["faults"]):
        try:
            say(run=number, **_Run(options, inputs, number, fault, step_bytes).take())
        except Exception as error:
            raise RuntimeError(f"the run with seed {fault['seed']} failed: {fault}") from error
    dist.destroy_process_group()


class _Run:
    """A group of its own, and its steps."""

    def __init__(
        self,
        options: dict[str, Any],
        inputs: list[list[torch.Tensor]],
        number: int,
        fault: dict[str, Any] | None,
        step_bytes: float = 0.0,
    ) -> None:
        self._options, self._inputs, self._number, self._fault = options, inputs, number, fault
        self._mine = fault is not None and fault["rank"] == dist.get_rank()
        self._step_bytes = step_bytes
        self._striker: Striker | None = None
        self._restarted: Callable[[], None] | None = None
        self._now: tuple[int, list[dist.Work]] = (0, [])
        self.results: list[list[torch.Tensor]] = []
        self.sent = 0
        self._seconds: list[float] = []

    def take(self) -> dict[str, Any]:
        """All steps: the digests of all results, and what became of the fault."""
        options, fault = self._options, self._fault
        group = group_of(options["deployment"])
        before = counted(options["interface"])[0]
        digests: list[list[str]] = []
        for step in range(options["steps"]):
            self._step(group, step, digests)
        self.sent = counted(options["interface"])[0] - before
        returned = fault is None
        until = time.monotonic() + RETURN_WITHIN_S
        while not returned:
            if self._restarted is not None:
                self._restarted()
            pending = self._mine and self._restarted is None
            back = torch.tensor(
                [not (pending or aggregated()["servers"][0]["is_direct"]), time.monotonic() < until]
            ).int()
            dist.all_reduce(back, op=dist.ReduceOp.MIN)
            returned = bool(back[0])
            if not back[1]:
                break
            self._step(group, len(digests), digests)
        if self._mine and self._restarted is None:
            raise SystemExit(f"nothing was killed and started again in run {self._number}: {fault}")
        told = aggregated()
        found = {
            "digests": digests,
            "seconds": self._seconds,
            "struck": self._striker and self._striker.told(),
            "returned": returned,
            "bypasses": told["servers"][0]["bypasses"],
            "fallback": told["fallback"],
        }
        dist.barrier()
        dist.destroy_process_group(group)
        return found

    def _step(self, group: dist.ProcessGroup, step: int, digests: list[list[str]]) -> None:
        """Several all-reduces at once, in which an aggregator is killed, or started again."""
        options, fault = self._options, self._fault
        tensors = [tensor.clone() for tensor in self._inputs[step % options["steps"]]]
        if fault is None:
            self.results.append(tensors)
        dist.barrier()
        if self._mine and fault is not None and step == fault["step"]:
            bytes_more = int(fault["share"] * self._step_bytes)
            self._striker = Striker(options["state"], fault["node"], options["interface"], bytes_more, self._under_way)
        works: list[dist.Work] = []
        self._now = (step, works)
        started = time.perf_counter()
        striker = self._striker
        for tensor, (_, _, op) in zip(tensors, BUCKETS, strict=True):
            works.append(dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op), group=group, async_op=True))
        if striker is not None and fault is not None and self._restarted is None:
            while not striker.struck.wait(0.001) and not all(work.is_completed() for work in works):
                pass
            if striker.struck.is_set() and step >= striker.told()["step"] + fault["back"]:
                self._restarted = order(options["state"], order="restart", node=fault["node"])
        for work in works:
            work.wait()
        self._seconds.append(time.perf_counter() - started)
        digests.append([_digest(tensor) for tensor in tensors])

    def _under_way(self) -> dict[str, int]:
        """The step, and how many of its all-reduces have not ended. Called on the striker's thread."""
        step, works = self._now
        return {"step": step, "in_flight": sum(not work.is_completed() for work in works)}


def _contributions(rank: int, step: int, nbytes: int) -> list[torch.Tensor]:
    """A rank's contributions to a step's all-reduces: blocks of different magnitudes, including zeros and denormals."""
    found = []
    for place, (share, dtype, _) in enumerate(BUCKETS):
        random = torch.Generator().manual_seed((rank * 1000 + step) * 1000 + place)
        elements = int(nbytes * share) // dtype.itemsize
        values = torch.randn(elements, generator=random)
        values *= torch.tensor([1.0, 1e-3, 0.0, 1e3])[torch.arange(elements) // 5000 % 4]
        values[::97] *= 1e-38
        found.append(values.to(dtype))
    return found


def _check(results: list[list[torch.Tensor]], nbytes: int) -> None:
    """That the undisturbed run is right: no element is further from the exact sum than docs/design/quantisation.md says."""
    world = dist.get_world_size()
    for step, tensors in enumerate(results):
        every = [_contributions(rank, step, nbytes) for rank in range(world)]
        for place, (tensor, (_, dtype, op)) in enumerate(zip(tensors, BUCKETS, strict=True)):
            parts = torch.stack([contributions[place].double() for contributions in every])
            exact, bound = parts.sum(0), quantised.bound(dtype, world, parts.abs().max().item())
            if op == "AVG":
                exact, bound = exact / world, bound / world
            far = ((tensor.double() - exact).abs() - bound - exact.abs() * torch.finfo(dtype).eps).max().item()
            if far > 0:
                raise SystemExit(f"step {step}, all-reduce {place} of the undisturbed run is wrong by {far:g} too much")


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.view(torch.uint8).numpy().data).hexdigest()[:16]


BUCKETS = (
    (0.5, torch.float32, "SUM"),
    (0.25, torch.float32, "AVG"),
    (0.125, torch.float16, "SUM"),
    (0.125, torch.bfloat16, "AVG"),
)
"""The all-reduces of a step: share of its bytes, type, operation."""
RETURN_WITHIN_S = 20.0
"""A worker trusts a path again after 1, 2, 4 s (docs/design/aggregation.md): more than the first three."""

if __name__ == "__main__":
    main()
