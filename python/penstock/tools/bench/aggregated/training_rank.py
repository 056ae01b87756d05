"""One rank of `penstock bench aggregated --training`: trains the demo's model in three ways, one after the other.

Standard output takes one JSON object a line: orders (`striker.order`), and the losses of each way.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from penstock.tools.bench.aggregated import quantised
from penstock.tools.bench.aggregated.rank import aggregated, counted, group_of, say
from penstock.tools.bench.aggregated.striker import Striker, order
from penstock.tools.bench.training_rank import CONTEXT, CharGPTLoss, adam
from penstock.workloads.char_gpt.data import CharData, random_batch


def main() -> None:
    options = json.loads(sys.argv[1])
    dist.init_process_group("gloo")
    for way in options["ways"]:
        say(way=way, **_train(way, options))
    dist.destroy_process_group()


def _train(way: str, options: dict[str, Any]) -> dict[str, Any]:
    text = CharData.load().train
    batches = torch.Generator().manual_seed(1000 * options["seed"] + dist.get_rank())
    group = dist.new_group(backend="gloo") if way != "int32" else group_of(options["deployment"])
    torch.manual_seed(options["seed"])
    model = DistributedDataParallel(CharGPTLoss(), process_group=group, gradient_as_bucket_view=True)
    if way == "bound":
        model.register_comm_hook(None, moved_by_the_bound(options["block"], options["seed"]))
    optimizer = adam(model)
    fault = _Fault(options) if way == "int32" else None
    losses = []
    for step in range(options["steps"]):
        tokens, targets = random_batch(text, options["batch"], CONTEXT, batches)
        optimizer.zero_grad()
        loss = model(tokens, targets)
        if fault is not None:
            fault.before_backward(step)
        loss.backward()
        if fault is not None:
            fault.after_backward(step)
        optimizer.step()
        losses.append(loss.item())
    told: dict[str, Any] = {"losses": losses}
    if fault is not None:
        told |= fault.told()
    dist.barrier()
    del model
    dist.destroy_process_group(group)
    return told


def moved_by_the_bound(block: int, seed: int) -> Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]:
    """A DDP hook: averages by gloo, each element moved by the most that an average through aggregators may be away from it.

    With N workers' elements x, that is N / 2 units for rounding to integers (docs/design/quantisation.md, "How far a result is
    from the exact sum"), and N + 1 roundings to float32 of at most sum |x| each: N - 1 in gloo's sum, the integer sum's,
    and one of the division.
    """
    signs = torch.Generator().manual_seed(seed)  # the same on all ranks, whose models must stay the same

    def hook(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        total, world = bucket.buffer(), dist.get_world_size()
        magnitude = total.abs()
        padded = torch.nn.functional.pad(magnitude, (0, -len(total) % block))
        largest = padded.view(-1, block).amax(1)
        for tensor, op in ((largest, dist.ReduceOp.MAX), (magnitude, dist.ReduceOp.SUM), (total, dist.ReduceOp.SUM)):
            dist.all_reduce(tensor, op=op)
        rounded = torch.tensor([quantised.bound(torch.float32, world, value) for value in largest.tolist()])
        away = rounded.repeat_interleave(block)[: len(total)] + (world + 1) * 2.0**-24 * magnitude
        sign = torch.randint(0, 2, (len(total),), generator=signs) * 2 - 1
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(total.add_(sign * away).div_(world))
        return future

    # torch compares them with the types themselves.
    hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
    return hook


class _Fault:
    """Loss on every link from the start, an aggregator that dies in the middle of a backward pass half-way, and its return."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._is_mine = dist.get_rank() == 0
        drawn = random.Random(f"training {options['seed']}")
        self._kill_in, self._share = max(2, options["steps"] // 2), drawn.uniform(0.1, 0.9)
        self._restart_in = self._kill_in + max(1, options["steps"] // 10)
        self._step, self._in_backward, self._before, self._sent = 0, False, 0, 0
        self._striker: Striker | None = None
        self._restarted: Callable[[], None] | None = None
        if options["loss"] and self._is_mine:
            order(options["state"], order="loss", share=options["loss"])()
        dist.barrier()

    def before_backward(self, step: int) -> None:
        """Lies in wait, in the step that is to be struck."""
        options = self._options
        if self._is_mine and step == self._kill_in:
            share = int(self._share * self._sent)
            self._striker = Striker(options["state"], options["node"], options["interface"], share, self._under_way)
        self._step, self._in_backward, self._before = step, True, counted(options["interface"])[0]

    def after_backward(self, step: int) -> None:
        """Learns how much a pass sends; starts the aggregator again, some steps after it was killed."""
        self._in_backward = False
        if step < self._kill_in:
            self._sent = counted(self._options["interface"])[0] - self._before
        struck = self._striker is not None and self._striker.struck.is_set()
        if struck and self._restarted is None and step >= self._restart_in:
            self._restarted = order(self._options["state"], order="restart", node=self._options["node"])

    def told(self) -> dict[str, Any]:
        """What became of it, for the rank's record."""
        if self._is_mine and (self._striker is None or self._restarted is None):
            raise SystemExit(f"nothing was killed and started again in {self._options['steps']} steps: more are needed")
        if self._restarted is not None:
            self._restarted()
        through = aggregated()
        if through["fallback"]:
            raise SystemExit(f"the ranks went on without servers: {through['fallback']}")
        server = through["servers"][0]
        struck = self._striker.told() if self._striker is not None else {}
        return {
            "struck": {"node": self._options["node"], **struck},
            "bypasses": server["bypasses"],
            "is_direct": server["is_direct"],
            "operations": through["operations"],
        }

    def _under_way(self) -> dict[str, int]:
        """Called on the striker's thread."""
        return {"step": self._step, "in_flight": int(self._in_backward)}


if __name__ == "__main__":
    main()
