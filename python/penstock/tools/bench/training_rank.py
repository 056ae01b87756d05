"""One rank of `penstock bench training`: trains a model in several ways by turns, and tells how long their steps took.

All ways train their own copy of one model on the same data, in the same process, so that what disturbs the machine disturbs
all of them. Standard output takes one JSON object a line.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from penstock.runtime.wire import sent_bytes
from penstock.tools.bench.mesh import Mesh
from penstock.tools.testbed.link import CLASSES
from penstock.torch import GradientReducer, ddp_hook


@dataclass
class Way:
    """One way to train: a step on the given data or the usual ones, which returns its loss, and what its reducer counts."""

    step: Callable[..., torch.Tensor]
    stats: Callable[[], dict[str, Any]] = dict
    ends: Sequence[Callable[[], None]] = ()
    """Wait for what steps have left."""


def main() -> None:
    options = json.loads(sys.argv[1])
    dist.init_process_group("penstock")
    if "losses" in options:
        _learn(options)
        dist.destroy_process_group()
        return
    torch.manual_seed(dist.get_rank())
    make, batch = MODELS[options["model"]]
    data = batch(options["batch"])
    ways = {name: _way(name, make, data, options) for name in options["ways"]}
    compute = _way("compute", make, data, options)
    ready = _ready_times(make, data)
    _say(ready=ready, gradients=len(ready))
    limits = {"compute": compute}
    raw = _RawSockets(int(sum(size for _, size in ready))) if options["sockets"] else None
    if raw:
        limits |= {"link": Way(raw.move), "sockets": _beside(raw, make, data)}
    for turn in range(options["turns"] + 1):
        for name, way in {**limits, **ways}.items():
            dist.barrier()
            times, processor = [time.perf_counter()], time.process_time()
            for _ in range(options["steps"]):
                way.step()
                # Here, not before the step: what a step leaves to the next one counts.
                dist.barrier()
                times.append(time.perf_counter())
            for end in way.ends:
                end()
            processor_s = (time.process_time() - processor) / options["steps"]
            seconds = [end - start for start, end in itertools.pairwise(times)]
            # The first turn makes connections, buckets and buffers.
            _say(way=name, turn=turn - 1, seconds=seconds, processor_s=processor_s, stats=way.stats())
    if raw:
        raw.close()
    dist.destroy_process_group()


def _learn(options: dict[str, Any]) -> None:
    """Train the demo's model on its text in all ways, step by step, and tell the losses."""
    from penstock.workloads.char_gpt.data import CharData, random_batch

    text = CharData.load()
    batches = torch.Generator().manual_seed(dist.get_rank())
    ways = {name: _way(name, CharGPTLoss, None, options, adam) for name in options["ways"]}
    losses: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options["losses"]):
        data = random_batch(text.train, options["batch"], CONTEXT, batches)
        for name, way in ways.items():
            losses[name].append(way.step(data).item())
    for name in ways:
        _say(way=name, losses=losses[name])


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """As the demo has it, without a schedule."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))


def _way(
    name: str,
    make: Callable[[], nn.Module],
    usual: Any,
    options: dict[str, Any],
    optimize: Callable[[nn.Module], torch.optim.Optimizer] = _sgd,
) -> Way:
    torch.manual_seed(0)
    model = make()
    stats: Callable[[], dict[str, Any]] = dict
    kind, *more = name.split("-")
    wire = {"float16": torch.float16, "bfloat16": torch.bfloat16}.get("".join(more[:1]))
    settings = {"bucket_bytes": options["bucket_bytes"], "wire": wire, "error_feedback": "feedback" in more}
    GradientReducer._tapers = "even" not in more
    if kind in ("ddp", "gloo", "hook"):
        group = dist.new_group(backend="gloo") if kind == "gloo" else None
        model = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
        if kind == "hook":
            stats = ddp_hook(model, **settings).stats
    elif kind not in ("reducer", "deferred", "compute"):
        raise ValueError(f"no way {name!r}")
    optimizer = optimize(model)
    ends: list[Callable[[], None]] = []
    if kind in ("reducer", "deferred"):
        reducer = GradientReducer(model, **settings, optimizer=optimizer if kind == "deferred" else None)
        stats, ends = reducer.stats, [reducer.wait]

    def step(data: Any = usual) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(*data)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Way(step, stats, ends)


class _RawSockets:
    """Moves over raw sockets what an all-reduce of ``nbytes`` puts on the hosts' links: the first rank of each host to that of
    the next, as many flows as the testbed has classes. The other ranks only wait."""

    def __init__(self, nbytes: int) -> None:
        hosts: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(hosts, int(os.environ["GROUP_RANK"]))
        first = [hosts.index(host) for host in sorted(set(hosts))]
        self._mesh = None
        if dist.get_rank() in first:
            self._mesh = Mesh(first.index(dist.get_rank()), len(first), _own_address())
        addresses: list[Any] = [None] * len(hosts)
        dist.all_gather_object(addresses, self._mesh and self._mesh.address)
        if self._mesh:
            self._mesh.connect([addresses[rank] for rank in first], CLASSES)
            for pair in self._mesh.pairs.values():
                for flow in pair.flows:
                    flow.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        share = int(sent_bytes(nbytes, len(first)))
        self._traffic = {(at, (at + 1) % len(first)): share for at in range(len(first))}

    def move(self) -> torch.Tensor:
        """Once; blocks until this rank has received all."""
        if self._mesh:
            self._mesh.transfer(self._traffic, CLASSES, "pull").run()
        return torch.zeros(())

    def close(self) -> None:
        if self._mesh:
            self._mesh.close()


def _own_address() -> str:
    """The address from which this rank reaches the first one: that of its host's link."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        address: str = probe.getsockname()[0]
        return address


def _beside(raw: _RawSockets, make: Callable[[], nn.Module], usual: Any) -> Way:
    """Steps that reduce nothing, while raw sockets move as many bytes from the first gradient on."""
    torch.manual_seed(0)
    model = make()
    optimizer = _sgd(model)
    mover = ThreadPoolExecutor(1)
    moving: list[Future[torch.Tensor]] = []

    def begin(_: torch.Tensor) -> None:
        if not moving:
            moving.append(mover.submit(raw.move))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(begin)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(*usual)
        loss.backward()
        moving.pop().result()  # an error of the sockets ends the run
        optimizer.step()
        return loss.detach()

    return Way(step)


def _ready_times(make: Callable[[], nn.Module], data: Any) -> list[list[float]]:
    """For each gradient, in the order in which they are made without any communication: seconds from the start of the step,
    bytes. The medians over some steps that all ranks take together."""
    model = make()
    times: dict[str, list[float]] = {name: [] for name, _ in model.named_parameters()}
    started = 0.0
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _, name=name: times[name].append(time.perf_counter() - started)
        )
    for _ in range(READY_STEPS):
        model.zero_grad()
        dist.barrier()
        started = time.perf_counter()
        model(*data).backward()
    sizes = {name: parameter.nbytes for name, parameter in model.named_parameters()}
    settled = [(sorted(each[1:])[len(each) // 2], sizes[name]) for name, each in times.items()]
    return [list(pair) for pair in sorted(settled)]


class _Loss(nn.Module):
    """A model that returns its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, data: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.model(data), target)


class _Residual(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.short = nn.Conv2d(channels, out, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(data) + self.short(data))


def residual_network(blocks: int) -> nn.Module:
    """As for CIFAR (He et al. 2016, section 4.2), with so many blocks for each of three sizes, twice as wide: with six, 115
    gradients of 6.1 MB."""
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    for channels, out in ((32, 32), (32, 64), (64, 96)):
        for block in range(blocks):
            layers.append(_Residual(channels if block == 0 else out, out, 2 if block == 0 and channels != out else 1))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 10))


def _cnn() -> nn.Module:
    return _Loss(residual_network(blocks=6))


class CharGPTLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from penstock.workloads.char_gpt.model import CharGPT, GPTConfig

        self.model = CharGPT(GPTConfig(vocabulary=65))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.model(tokens, targets)[1]


def _images(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, 3, 32, 32), torch.randint(10, (count,))


def _texts(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(65, (count, CONTEXT)), torch.randint(65, (count, CONTEXT))


def _say(**message: Any) -> None:
    print(json.dumps({"rank": dist.get_rank(), **message}), flush=True)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "char-gpt": (CharGPTLoss, _texts),
    "cnn": (_cnn, _images),
}

CONTEXT = 64
"""Characters a sequence, as in the demo."""
SEND_BUFFER_BYTES = 64 << 10
"""Of a raw flow. Both ways at once on 200 Mbit/s, 40 a flow, 11 MB took 460 to 500 ms with 16 such flows; 480 to 540 with
buffers of 16 KiB; 480 to 580 with 256 KiB."""
READY_STEPS = 12
"""One to warm up, and enough others for a median: the machine's noise is in the tenths, not in the halves."""

if __name__ == "__main__":
    main()
