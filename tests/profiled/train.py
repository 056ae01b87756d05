"""A script that `penstock profile` runs in tests: `train.py KIND [BACKEND]`. It reads the clock around what it does, and keeps
the readings in the folder that READINGS names, so that a record can be held against them."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

STEPS = 20


class Clock:
    """Intervals by name, in ns of the monotonic clock."""

    def __init__(self) -> None:
        self.readings: dict[str, list[list[int]]] = {}
        self.more: dict[str, Any] = {}
        self._began: list[tuple[str, int]] = []

    def __call__(self, name: str) -> Clock:
        self._began.append((name, 0))
        return self

    def __enter__(self) -> None:
        self._began[-1] = (self._began[-1][0], time.monotonic_ns())

    def __exit__(self, *_: object) -> None:
        name, start = self._began.pop()
        self.readings.setdefault(name, []).append([start, time.monotonic_ns()])

    def write(self) -> None:
        path = pathlib.Path(os.environ["READINGS"]) / f"{os.environ.get('RANK', '0')}.json"
        path.write_text(json.dumps({"readings": self.readings, **self.more}))


clock = Clock()


def burn(milliseconds: float) -> None:
    """Of this thread's processor time, which no other program's takes away."""
    until = time.thread_time() + milliseconds / 1e3
    while time.thread_time() < until:
        pass


class Slow(nn.Module):
    """Takes its time, forward and backward."""

    def __init__(self, forward_ms: float = 3, backward_ms: float = 5) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)
        self.forward_ms, self.backward_ms = forward_ms, backward_ms

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with clock("in forward" if self.training else "in evaluation"):
            burn(self.forward_ms)
        y = self.inner(x)
        if y.requires_grad:
            y.register_hook(self._burn)
        return y

    def _burn(self, gradient: torch.Tensor) -> None:
        with clock("in backward"):
            burn(self.backward_ms)


class Planted(torch.utils.data.Dataset[torch.Tensor]):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index % 8 == 0:
            with clock("in loading"):
                burn(2)
        return torch.full((64,), float(index))

    def __len__(self) -> int:
        return 8 * STEPS


class SlowSGD(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with clock("in optimizer"):
            burn(1)
        return super().step(closure)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    with clock("around forward and backward"):
        model(x).square().mean().backward()
    optimizer.step()


def plain() -> None:
    """One process, every phase; a child and a fork that do nothing of it."""
    model = Slow()
    optimizer = SlowSGD(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(Planted(), batch_size=8)
    for number, x in enumerate(loader):
        with clock("step"):
            step(model, optimizer, x)
            if number == 5:
                model.eval()
                with clock("around evaluation"), torch.no_grad():
                    for _ in range(3):
                        model(x)
                model.train()
            if number == 7:
                with clock("around checkpoint"):
                    torch.save(model.state_dict(), os.devnull)
            if number == 9:
                child = os.fork()
                if child == 0:
                    step(model, optimizer, x)
                    os._exit(0)
                os.waitpid(child, 0)
            burn(1)


def ddp(backend: str) -> None:
    dist.init_process_group(backend)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(Slow(), nn.Linear(64, 4096)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        with clock("step"):
            step(model, optimizer, torch.ones(8, 64))
            # The second rank comes late, so the first one waits here.
            burn(4 * dist.get_rank())
            with clock("around all_reduce"):
                dist.all_reduce(torch.ones(1000))
    dist.destroy_process_group()


def reducer() -> None:
    from penstock.torch import GradientReducer

    dist.init_process_group("penstock")
    model = Slow()
    kept = GradientReducer(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        step(model, optimizer, torch.ones(8, 64))
    del kept
    dist.destroy_process_group()


def pipeline(backend: str) -> None:
    """Two stages, a group of its own for tensors, and experts."""
    dist.init_process_group(backend)
    rank = dist.get_rank()
    tensor = dist.new_group([0, 1], group_desc="TENSOR_MODEL_PARALLEL_GROUP")
    model = nn.Linear(64, 64)
    if backend == "gloo":
        model.eval()  # as a model with frozen batch norms is trained
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        if rank == 0:
            y = model(torch.ones(8, 64))
            dist.send(y.detach(), 1)
            gradient = torch.empty(8, 64)
            dist.recv(gradient, 1)
            y.backward(gradient)
        else:
            x = torch.empty(8, 64)
            for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, x, 0)]):
                work.wait()
            x.requires_grad_()
            model(x).square().mean().backward()
            for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x.grad, 0)]):
                work.wait()
        dist.all_reduce(torch.ones(8), group=tensor)
        dist.all_reduce(torch.empty(0), group=tensor)
        dist.all_to_all_single(torch.empty(4), torch.ones(4))
        work = dist.all_reduce(model.weight.grad, async_op=True)
        with clock("around wait"):
            work.wait()
        optimizer.step()
    dist.destroy_process_group()


def gan() -> None:
    """The discriminator steps first in an iteration, then the generator; both have their own optimizer."""
    first, second = Slow(1, 1), Slow(1, 1)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (first, second)]
    for _ in range(STEPS):
        with clock("step"):
            for model, optimizer in zip((first, second), optimizers, strict=True):
                step(model, optimizer, torch.ones(8, 64))


def accumulation() -> None:
    model = Slow(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        for _ in range(3):
            model(torch.ones(8, 64)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def scaler() -> None:
    """Of mixed precision, on the CPU; a fifth of the steps are left out for an infinite gradient."""
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scale = torch.amp.GradScaler("cpu", growth_interval=1000)
    for number in range(STEPS):
        optimizer.zero_grad()
        x = torch.full((8, 64), float("inf") if number % 5 == 4 else 1.0)
        scale.scale(model(x).square().mean()).backward()
        scale.unscale_(optimizer)
        scale.step(optimizer)
        scale.update()


def others() -> None:
    """LBFGS with its closure, an optimizer around another one as Horovod's is, one that raises, and a change of optimizers."""
    model = nn.Linear(8, 8)
    lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> torch.Tensor:
        lbfgs.zero_grad()
        loss = model(torch.ones(2, 8)).square().mean()
        loss.backward()
        return loss

    for _ in range(4):
        lbfgs.step(closure)

    def again(self: Any, closure: Any = None) -> Any:
        return super(self.__class__, self).step(closure)

    kind = type("Distributed", (torch.optim.SGD,), {"step": again})
    distributed = kind(model.parameters(), lr=0.01)
    for _ in range(20):
        model(torch.ones(2, 8)).square().mean().backward()
        distributed.step()

    def fails() -> None:
        raise ValueError("planted")

    for _ in range(3):
        try:
            distributed.step(fails)
        except ValueError:
            pass
        model(torch.ones(2, 8)).square().mean().backward()
        distributed.step()


def compiled() -> None:
    """Dynamo sees nothing of the marks: one graph each, without breaks."""
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), Slow(0, 0).inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    whole = torch.compile(model, fullgraph=True, backend=backend)
    part = torch.compile(lambda x: model(x).mean(), fullgraph=True, backend=backend)
    for _ in range(STEPS):
        optimizer.zero_grad()
        whole(torch.ones(8, 64)).mean().backward()
        part(torch.ones(8, 64)).backward()
        optimizer.step()
    clock.more["graphs"] = len(graphs)


def profiler() -> None:
    """The script's own profiler, which starts while a sample runs."""
    model = Slow(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number in range(STEPS):
        if number == 3:
            with torch.profiler.profile() as own:
                step(model, optimizer, torch.ones(8, 64))
            clock.more["seen"] = [event.name for event in own.events()]
        step(model, optimizer, torch.ones(8, 64))


def workers() -> None:
    """Of a DataLoader, started anew, whose data set calls a module."""
    loader = torch.utils.data.DataLoader(Calling(), batch_size=8, num_workers=1, multiprocessing_context="spawn")
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x in loader:
        step(model, optimizer, x)


class Calling(torch.utils.data.Dataset[torch.Tensor]):
    def __getitem__(self, index: int) -> torch.Tensor:
        return nn.Identity()(torch.ones(64))

    def __len__(self) -> int:
        return 8 * STEPS


def raises() -> None:
    model = Slow(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(5):
        step(model, optimizer, torch.ones(8, 64))
    raise RuntimeError("planted: the loss is gone")


def dies(backend: str) -> None:
    """The second rank is killed, two seconds after it has begun."""
    dist.init_process_group(backend)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    began = time.monotonic()
    while True:
        step(model, optimizer, torch.ones(8, 64))
        time.sleep(0.01)
        if time.monotonic() - began > 1.5 and dist.get_rank() == 1:
            clock.readings["died"] = [[time.monotonic_ns()] * 2]
            clock.write()
            os.kill(os.getpid(), signal.SIGKILL)
        if time.monotonic() - began > 2:
            return


def never_steps() -> None:
    model = Slow(1, 1)
    with torch.no_grad():
        for _ in range(3):
            model(torch.ones(8, 64))


def started() -> None:
    """Ranks that the script starts by itself, without a launcher's variables."""
    torch.multiprocessing.start_processes(_started, nprocs=2, start_method="fork")


def _started(rank: int) -> None:
    store = dist.FileStore(str(pathlib.Path(os.environ["READINGS"]) / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        step(model, optimizer, torch.ones(8, 64))
    dist.destroy_process_group()


def children() -> None:
    """A rank's children that train, too."""
    model = nn.Linear(64, 64)
    step(model, torch.optim.SGD(model.parameters(), lr=0.01), torch.ones(8, 64))
    subprocess.run([sys.executable, __file__, "accumulation"], check=True)


def nothing() -> None:
    pass


if __name__ == "__main__":
    torch.set_num_threads(1)
    kind, *arguments = sys.argv[1:]
    globals()[kind](*arguments)
    if clock.readings or clock.more:
        clock.write()
