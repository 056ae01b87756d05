"""Proves which processes and threads `penstock profile` records, and that whatever they do, the script's result and exit code are
its own and what was recorded can be read."""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import forked
import profiles
import small_disk
from penstock.profiling.phases import phases
from penstock.profiling.record import Record, Sample, Step, read
from penstock.tools.profile import run

HEAD = """
import os, sys, signal, subprocess, threading, time
import torch, torch.distributed as dist
from torch import nn
torch.set_num_threads(1)
model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

def burn(milliseconds):
    until = time.thread_time() + milliseconds / 1e3
    while time.thread_time() < until:
        pass

def step():
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()

def train(steps=20):
    for _ in range(steps):
        step()

"""


class Ran:
    """What came of a script under the recorder."""

    def __init__(self, folder: pathlib.Path, text: str, *, head: str = HEAD) -> None:
        self.folder = folder / "profile"
        self.folder.mkdir(exist_ok=True)
        script = folder / "script.py"
        script.write_text(head + text)
        output = folder / "output"
        with output.open("wb") as file:
            self.code = run.run([sys.executable, str(script)], self.folder, stdout=file.fileno())
        self.output = output.read_text()
        self.records = [read(path) for path in sorted(self.folder.glob("rank-*.jsonl"))]
        self.said = profiles.said(self.folder)

    @property
    def record(self) -> Record:
        assert len(self.records) == 1, self.said
        [record] = self.records
        return record


@pytest.fixture
def ran(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, forks: None) -> Any:
    monkeypatch.chdir(tmp_path)
    return lambda text, **options: Ran(tmp_path, text, **options)


def spent_ms(step: Step) -> dict[str, float]:
    found: dict[str, float] = {}
    for start, end, phase in phases(step):
        found[phase] = found.get(phase, 0.0) + (end - start) / 1e6
    return found


# ------------------------------------------------------------------------------------------------- optimizers in hooks


HOOKS = """
class Slow(torch.optim.SGD):
    def step(self, closure=None):
        burn(4)
        return super().step(closure)

model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
optimizers = {p: Slow([p], lr=0.01) for p in model.parameters()}

def update(p):
    optimizers[p].step()
    optimizers[p].zero_grad()

"""
PASSES = """
for p in model.parameters():
    p.register_post_accumulate_grad_hook(hook)
for number in range(20):
    model(torch.ones(2, 8)).sum().backward()
    burn(2)
print(*model(torch.ones(2, 8)).flatten().tolist())
"""


@pytest.mark.parametrize("thread", ["of the pass", "of a device"])
def test_optimizers_that_step_in_a_backward_pass(ran: Any, thread: str) -> None:
    """Four of them, one a parameter, in hooks; with CUDA these run on a thread of the engine that Python has not started, and so
    do they here. A step is an iteration, from the end of one backward pass to that of the next; the optimizers' 16 ms are theirs
    and not the backward pass's; and the profiler starts and stops outside the pass."""
    hook = {
        "of the pass": "hook = update\n",
        "of a device": "import _thread\n"
        "def hook(p):\n"
        "    done = _thread.allocate_lock()\n"
        "    done.acquire()\n"
        "    def elsewhere():\n"
        "        try:\n            update(p)\n        finally:\n            done.release()\n"
        "    _thread.start_new_thread(elsewhere, ())\n"
        "    done.acquire()\n",
    }[thread]
    job = ran(HOOKS + hook + PASSES)
    assert job.code == 0 and "left out" not in {event.kind for event in job.record.events}
    assert [step.number for step in job.record.steps] == list(range(20))
    # One that takes too long is given up.
    assert job.record.samples and {sample.step for sample in job.record.samples} <= {4, 9, 15}
    after_ns: list[int] = []
    for step in job.record.steps[2:]:
        shape = [span.phase for span in step.spans if span.phase not in ("profiler", "forward")]
        assert sorted(shape) == ["backward"] + ["optimizer"] * 4
        spent = spent_ms(step)
        [backward] = [span for span in step.spans if span.phase == "backward"]
        after_ns.append(step.end_ns - backward.end_ns)
        assert spent["optimizer"] >= 15.9
        assert spent["backward"] + spent["optimizer"] == pytest.approx(
            (backward.end_ns - backward.start_ns) / 1e6, abs=0.01
        )
    # Where the process lacks a processor just there, it takes longer.
    assert min(after_ns) >= 0 and sorted(after_ns)[len(after_ns) // 2] < 2_000_000


def test_an_optimizer_that_raises_in_a_hook(ran: Any) -> None:
    """On the engine's thread, which never comes back: later steps are as they would be."""
    job = ran(
        HOOKS + "def hook(p):\n    raise ValueError('planted')\n"
        "import _thread\n"
        "inner = nn.Linear(8, 8)\n"
        "failing = torch.optim.SGD(inner.parameters(), lr=0.01)\n"
        "def fails():\n    raise ValueError('planted')\n"
        "def elsewhere():\n"
        "    try:\n        failing.step(fails)\n    except ValueError:\n        pass\n    finally:\n        done.set()\n"
        "done = threading.Event()\n"
        "def raises(p):\n    _thread.start_new_thread(elsewhere, ())\n    done.wait()\n"
        "handle = inner.weight.register_post_accumulate_grad_hook(raises)\n"
        "inner(torch.ones(2, 8)).sum().backward()\n"
        "handle.remove()\n"
        "model = nn.Linear(8, 8)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n"
        "train()\n"
    )
    assert job.code == 0 and len(job.record.steps) == 20
    assert all([span.phase for span in step.spans][-1] == "optimizer" for step in job.record.steps)


# --------------------------------------------------------------------------------------------------------- modules


def test_inner_modules_run_torchs_own_code(ran: Any) -> None:
    """`Module.__call__` is the function that torch made, also for Dynamo, which compares it; within a call it has torch's
    own code, and after an exception in one the next call is a mark again."""
    job = ran(
        "from torch._dynamo.utils import unpatched_nn_module_call\n"
        "call = nn.Module.__call__\n"
        "def file():\n    return call.__code__.co_filename\n"
        "class Looks(nn.Module):\n"
        "    def forward(self, x):\n"
        "        assert file() == nn.Module.__setattr__.__code__.co_filename, file()\n"
        "        if x is None:\n            raise ValueError\n"
        "        return x\n"
        "whole = nn.Sequential(Looks(), model)\n"
        "for x in [torch.ones(2, 8), None] * 5:\n"
        "    try:\n        whole(x).sum().backward()\n    except ValueError:\n        pass\n"
        "    assert 'recorder' in file()\n"
        "    optimizer.step()\n"
        "assert nn.Module.__call__ is call is unpatched_nn_module_call\n"
    )
    assert job.code == 0
    assert [[span.phase for span in step.spans if span.phase != "profiler"] for step in job.record.steps] == [
        ["forward", "backward", "optimizer"],
        ["forward", "optimizer"],
    ] * 5


def test_somebody_else_has_patched_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the recorder came: theirs is called once for each call, and ours asks each time who is recorded until it leaves."""
    import torch

    from penstock.tools.profile.recorder import install

    told: list[str] = []

    def patched(original: Any) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            told.append(type(self).__name__)
            return original(self, *args, **kwargs)

        return call

    monkeypatch.setattr(torch.nn.Module, "__call__", patched(torch.nn.Module.__call__))
    modules = install._Modules()
    monkeypatch.setattr(install, "_modules", modules)
    begun: list[bool] = []
    monkeypatch.setattr(install, "_begin", lambda: begun.append(True))
    modules.patch()
    whole = torch.nn.Sequential(torch.nn.Identity())
    modules.watch()
    whole(torch.ones(1))
    modules.leave()
    whole(torch.ones(1))
    assert told == ["Sequential", "Identity"] * 2 and len(begun) == 2


# --------------------------------------------------------------------------------------------------- who is a rank


RANK = """
def rank(number, path):
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=number, world_size=2)
    train()
    dist.destroy_process_group()

"""


@pytest.mark.parametrize(
    "method",
    ["fork", pytest.param("spawn", marks=pytest.mark.slow), pytest.param("forkserver", marks=pytest.mark.slow)],
)
def test_a_launcher_that_tries_its_model_is_no_rank(ran: Any, method: str) -> None:
    """It calls a module, loads a batch, saves a checkpoint, and then starts the ranks: those are recorded, and it is not."""
    job = ran(
        RANK + "if __name__ == '__main__':\n"
        "    model(torch.ones(2, 8))\n"
        "    with torch.no_grad():\n        model(torch.ones(2, 8))\n"
        "    next(iter(torch.utils.data.DataLoader(torch.ones(4, 8))))\n"
        "    torch.save(model.state_dict(), 'checkpoint')\n"
        "    time.sleep(1.2)\n"  # the writer has looked twice
        f"    torch.multiprocessing.start_processes(rank, ('store',), nprocs=2, start_method={method!r})\n"
        "    model(torch.ones(2, 8))\n"
    )
    assert job.code == 0
    found = [(each.header.rank, each.header.world, len(each.steps), len(each.samples)) for each in job.records]
    assert found == [(0, 2, 20, 3), (1, 2, 20, 3)]
    assert "ends early" not in job.said and not list(job.folder.glob("before-*"))


def test_a_program_that_a_launcher_starts_is_a_rank_if_it_trains(ran: Any) -> None:
    """Such as torchrun, from a script that has tried its model. One that only calls modules is none."""
    job = ran(
        "if len(sys.argv) > 1:\n"
        "    train() if sys.argv[1] == 'trains' else model(torch.ones(2, 8))\n"
        "    sys.exit()\n"
        "model(torch.ones(2, 8))\n"
        "for what in ('trains', 'calls'):\n"
        "    subprocess.run([sys.executable, __file__, what], check=True)\n"
    )
    assert job.code == 0 and len(job.record.steps) == 20


def test_a_script_that_clears_its_environment_is_recorded(ran: Any) -> None:
    """Before it imports torch, as hermetic scripts do."""
    job = ran("import os\nos.environ.clear()\n" + HEAD + "train(5)\n", head="")
    assert job.code == 0 and len(job.record.steps) == 5, job.said


def test_a_batch_that_is_waited_for_later_is_a_wait_since_then(ran: Any, tmp_path: pathlib.Path) -> None:
    """Its `wait` is torch's own code, as that of a blocking function is; the script computes before it."""
    job = ran(
        "import time, torch.distributed as dist\n"
        f"dist.init_process_group('gloo', init_method='file://{tmp_path}/store', rank=0, world_size=1)\n"
        "for _ in range(6):\n"
        "    optimizer.zero_grad(); model(torch.ones(2, 8)).sum().backward()\n"
        "    with dist._coalescing_manager(async_ops=True) as batch:\n"
        "        dist.all_reduce(torch.ones(4)); dist.all_reduce(torch.ones(4))\n"
        "    until = time.monotonic() + 0.005\n"
        "    while time.monotonic() < until: pass\n"
        "    print(time.monotonic_ns()); batch.wait(); optimizer.step()\n"
    )
    assert job.code == 0, job.said
    begun = list(map(int, job.output.split()))
    waits = [wait.start_ns for step in job.record.steps for wait in step.waits]
    assert len(waits) == len(begun) == 6 and all(a <= b for a, b in zip(begun, waits, strict=True))


def test_a_script_that_only_evaluates_is_recorded(ran: Any) -> None:
    """And its forks, which call modules, too, are not."""
    job = ran(
        "with torch.no_grad():\n"
        "    for _ in range(3):\n        model(torch.ones(2, 8))\n"
        "    child = os.fork()\n"
        "    if child == 0:\n        model(torch.ones(2, 8))\n        sys.exit()\n"
        "    os.waitpid(child, 0)\n"
    )
    assert job.code == 0 and len(job.record.steps) == 1 and not list(job.folder.glob("before-*"))
    assert {span.phase for span in job.record.steps[0].spans} == {"evaluation"}


def test_a_script_that_starts_itself_anew(ran: Any) -> None:
    """With `exec`, after it has trained, as some do to set a variable of the loader: both lives are recorded."""
    job = ran(
        "train(5 if len(sys.argv) == 1 else 7)\n"
        "if len(sys.argv) == 1:\n"
        "    time.sleep(1.2)\n"
        "    os.execv(sys.executable, [sys.executable, __file__, 'again'])\n"
    )
    assert job.code == 0 and len(job.record.steps) == 7
    assert len(read(job.folder / "before-1" / "rank-0.jsonl").steps) == 5


def test_another_thread_that_trains_is_told(ran: Any) -> None:
    """Two models in two threads: the steps are those of the first one, and that is said, once."""
    job = ran(
        "step()\n"
        "def other():\n"
        "    mine = nn.Linear(8, 8)\n"
        "    its = torch.optim.SGD(mine.parameters(), lr=0.01)\n"
        "    for _ in range(30):\n"
        "        mine(torch.ones(2, 8)).sum().backward()\n        its.step()\n"
        "thread = threading.Thread(target=other)\n"
        "thread.start()\n"
        "thread.join()\n"
        "train(19)\n"
    )
    assert job.code == 0 and len(job.record.steps) == 20
    assert job.said.count("another thread of this process trains, too") == 1


def test_programs_that_train_at_once_each_have_their_record(tmp_path: pathlib.Path, ran: Any) -> None:
    """Three interpreters in one folder, none of which joins others: each calls itself rank 0. No record is lost; it is told."""
    script = tmp_path / "alone.py"
    script.write_text(HEAD + "train(int(sys.argv[1]))\ntime.sleep(1.2)\ntrain(10)\n")
    job = ran(
        f"many = [subprocess.Popen([sys.executable, {str(script)!r}, str(n)]) for n in (10, 20, 30)]\n"
        "sys.exit(sum(one.wait() for one in many))\n"
    )
    assert job.code == 0
    found = [job.record, *(read(path) for path in job.folder.glob("before-*/rank-0.jsonl"))]
    assert sorted(len(record.steps) for record in found) == [20, 30, 40] and not any(each.problems for each in found)
    assert "at the same time" in job.said and "before-" in job.said


# --------------------------------------------------------------------------------------------- whatever a script does


ENDS = {
    "os._exit in a sampled step": "train(4)\nassert torch.autograd._profiler_enabled() == ('PENSTOCK_PROFILE' in os.environ)\n"
    "print('out', flush=True)\nos._exit(3)\n",
    "sys.exit in a sampled step": "train(4)\nprint('out')\nsys.exit(4)\n",
    "an exception in a sampled step": "train(4)\nprint('out')\nraise RuntimeError('planted')\n",
    "an exception in a backward pass": "train(4)\n"
    "def fails(grad):\n    raise RuntimeError('planted')\n"
    "y = model(torch.ones(2, 8))\ny.register_hook(fails)\n"
    "try:\n    y.sum().backward()\nexcept RuntimeError:\n    print('caught')\ntrain(6)\nsys.exit(5)\n",
    "killed": "train(4)\nprint('out', flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n",
    "terminated": "train(4)\nprint('out', flush=True)\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(60)\n",
    "a handler that raises": "class Late(Exception):\n    pass\n"
    "def late(*_):\n    raise Late\n"
    "signal.signal(signal.SIGALRM, late)\n"
    "for delay in range(200):\n"
    "    try:\n"
    "        signal.setitimer(signal.ITIMER_REAL, (1 + delay % 40) * 23e-6)\n"
    "        train(3)\n        signal.setitimer(signal.ITIMER_REAL, 0)\n"
    # Raised within torch's own no_grad, it leaves that on, with and without a recorder.
    "    except Late:\n        torch.set_grad_enabled(True)\n"
    "signal.setitimer(signal.ITIMER_REAL, 0)\n"
    "train(20)\nprint('done')\nsys.exit(6)\n",
    "fork in a step, the child goes on": "model(torch.ones(2, 8))\ntrain(4)\n"
    "child = os.fork()\n"
    "train(6)\n"
    "if child == 0:\n    print('child', flush=True)\n    sys.exit(9)\n"
    "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\nsys.exit(7)\n",
    "no more threads": "threading.stack_size(1 << 47)\ntrain()\nprint(threading.active_count())\nsys.exit(8)\n",
}


@pytest.mark.parametrize("how", ENDS)
def test_the_end_of_a_script_is_its_own(tmp_path: pathlib.Path, ran: Any, how: str) -> None:
    """What it prints and its exit code are those without the recorder; what was recorded is read, or why there is nothing is
    told."""
    plain = tmp_path / "plain.py"
    plain.write_text(HEAD + ENDS[how])
    alone = forked.run([sys.executable, str(plain)], capture_output=True, text=True, timeout=100)
    job = ran(ENDS[how])
    assert (job.code, job.output) == (
        alone.returncode if alone.returncode >= 0 else 128 - alone.returncode,
        alone.stdout,
    )
    assert alone.returncode and alone.stdout
    if how == "no more threads":
        assert "the recorder could not start in a process: RuntimeError: can't start new thread" in job.said
    elif how not in ("os._exit in a sampled step", "killed", "terminated"):
        assert len(job.record.steps) >= 4 and not job.record.problems
        for step in job.record.steps[-3:]:
            assert {"forward", "backward", "optimizer"} >= {span.phase for span in step.spans} - {"profiler"}


def test_no_destructor_of_torchs_profiler_ends_the_script(tmp_path: pathlib.Path) -> None:
    """In a fresh interpreter, for forks run no destructors: of a fork, in which Kineto's thread does not exist, and of a process
    in which an operation of a sample never ends. Both end with codes of their own, and what C has buffered is written."""
    text = (
        "import ctypes\nfrom penstock.tools.profile.recorder import install\n"
        "train(4)\n"
        "class Endless:\n    is_completed = bool\n"
        "install._state.recording.calls.in_flight.add(Endless())\n"
        "train(6)\n"
        "child = os.fork()\n"
        "if child == 0:\n    sys.exit(9)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)\n"
        "ctypes.CDLL(None).printf(b'%s', b'buffered')\n"
        "sys.exit(7)\n"
    )
    (tmp_path / "script.py").write_text(HEAD + text)
    with subprocess.Popen(
        [sys.executable, tmp_path / "script.py"],
        env=run.environment(tmp_path),
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            stdout, _ = process.communicate(timeout=60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # a fork that hangs
    assert (process.returncode, stdout) == (7, b"9\nbuffered")
    assert read(tmp_path / "rank-0.jsonl").events[-1].kind == "end"


def test_a_script_that_closes_what_it_does_not_know(ran: Any) -> None:
    """All descriptors, as daemons do, and then opens files of its own, which get the recorder's numbers: nothing of ours is in
    them, and the record goes on."""
    job = ran(
        "train(5)\n"
        "time.sleep(1.2)\n"
        "os.closerange(3, 256)\n"
        "files = [open(f'mine-{n}', 'w+') for n in range(20)]\n"
        "train(20)\n"
        "time.sleep(1.2)\n"
        "train(5)\n"
        "print([file.read() for file in files] == [''] * 20)\n"
        "for n, file in enumerate(files):\n    file.write(str(n))\n    file.close()\n"
    )
    assert (job.code, job.output) == (0, "True\n")
    assert len(job.record.steps) == 30 and job.record.events[-1].kind == "end" and not job.record.problems
    assert [pathlib.Path(f"mine-{n}").read_text() for n in range(20)] == [str(n) for n in range(20)]


def test_a_step_that_never_ends_keeps_little(ran: Any) -> None:
    """Backward passes without an optimizer, and no module, in a sampled step: the sample is given up."""
    job = ran(
        "train(4)\n"
        "assert torch.autograd._profiler_enabled()\n"
        "w = torch.ones(8, requires_grad=True)\n"
        "until = time.monotonic() + 60\n"
        "while torch.autograd._profiler_enabled():\n"
        "    (w * 2).sum().backward()\n"
        "    assert time.monotonic() < until\n"
        "optimizer.step()\ntrain(5)\n"
    )
    assert job.code == 0 and len(job.record.steps) == 10
    assert "took more than 5 times the usual" in job.said


class _Work:
    """Ends when told."""

    def __init__(self) -> None:
        self.has_ended = False

    def is_completed(self) -> bool:
        return self.has_ended


def _steps(sampling: Any, calls: Any, count: int, each: Callable[[int], None]) -> int:
    """Steps of 5 ms and of what sampling takes. Returns for how many of them a profiler started."""
    starts, now_ns = 0, time.monotonic_ns()
    for number in range(count):
        each(number)
        step = Step(number, now_ns, now_ns + 5_000_000)
        before, began_ns = sampling.is_running, time.monotonic_ns()
        if sampling.wants(number):
            sampling.step_ended(step, calls)
        else:
            sampling.passed(5_000_000)
        starts += sampling.is_running and not before
        now_ns += 5_000_000 + time.monotonic_ns() - began_ns
    return starts


def test_operations_of_the_step_before_keep_no_sample() -> None:
    """One is in flight at the end of each step and ends in the next, as where gradients arrive in the next forward pass."""
    from penstock.tools.profile.recorder.collectives import Calls
    from penstock.tools.profile.recorder.sampling import Sampling

    put: list[Any] = []
    sampling, calls, works = Sampling(put.append), Calls(), [_Work()]

    def each(number: int) -> None:
        if number:
            works[-1].has_ended = True
        works.append(_Work())
        if calls.log is not None:
            calls.in_flight.add(works[-1])

    _steps(sampling, calls, 30, each)
    assert [one.step for one in put if isinstance(one, Sample)] == [4, 9, 15]
    assert not sampling.is_running and not [one for one in put if "failed" in getattr(one, "text", "")]


def test_an_operation_that_never_ends_is_waited_for_once() -> None:
    """The profiler is paused from then on: later steps cost nothing, and there is no other sample, until the script wants a
    profiler of its own."""
    from penstock.tools.profile.recorder.collectives import Calls
    from penstock.tools.profile.recorder.sampling import Sampling

    put: list[Any] = []
    sampling, calls = Sampling(put.append), Calls()
    began = time.thread_time()
    starts = _steps(sampling, calls, 2_000, lambda number: calls.in_flight.add(_Work()) if number == 4 else None)
    took = time.thread_time() - began
    assert starts == 1 and sampling.is_running and torch.autograd._profiler_enabled() and took < 2
    sampling.yields(calls)
    assert not sampling.is_running and not [each for each in put if isinstance(each, Sample) or "failed" in each.text]
    with torch.autograd.profiler.profile() as own:
        torch.ones(3) + 1
    assert any(event.name == "aten::add" for event in own.function_events)


def test_a_disk_that_fills_up(tmp_path: pathlib.Path, ran: Any) -> None:
    """The folder of the profile is on a file system of 64 KiB, and the script's stderr is closed: it trains to its end."""
    with small_disk.mounted(tmp_path / "profile", "64k"):
        job = ran(
            "sys.stderr.close()\nfor _ in range(4):\n    train(200)\n    time.sleep(0.6)\nprint('done')\nsys.exit(3)\n"
        )
        assert (job.code, job.output) == (3, "done\n")
        assert not job.record.problems and "ends early" in job.said and len(job.record.steps) > 50


def test_a_rank_that_is_killed_while_it_writes(tmp_path: pathlib.Path) -> None:
    """At any moment, some thousand steps a second: the file ends with a whole line, or within one, and all before it counts."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    moments = random.Random(seed)
    program = """
import os, sys, pathlib
from penstock.profiling.record import Event, Header, Step
from penstock.tools.profile.recorder.writer import Writer
writer = Writer(lambda: Header(0, 1, "here", 1, 0, 0), lambda _: pathlib.Path(sys.argv[1]), lambda: None)
print("on", flush=True)
number = 0
while True:
    writer.put(Step(number, number, number + 1, (("forward", number, number + 1),) * 50))
    number += 1
    writer._wake.set()
"""
    for turn in range(5):
        path = tmp_path / f"rank-{turn}.jsonl"
        with subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.readline() == b"on\n"
            deadline = time.monotonic() + 30
            while not path.exists() or path.stat().st_size < moments.randrange(200_000):
                assert time.monotonic() < deadline
            os.kill(process.pid, signal.SIGKILL)
        found = read(path)
        assert [step.number for step in found.steps] == list(range(len(found.steps)))
        assert len(found.problems) <= 1 and all("ends within a line" in text for text in found.problems)


def test_samples_of_a_longer_distance_are_those_of_a_shorter_one_and_hit_no_period() -> None:
    """Ranks agree on nothing, and the one with fewer samples has some of the other's. What a script does in each second step, or
    in each hundredth, is in some samples, and not in all."""
    from penstock.tools.profile.recorder import sampling

    def samples(distance: int) -> list[int]:
        one = sampling.Sampling(lambda entry: None)
        one.distance.steps = distance
        return [number for number in range(32_000) if one._is_sample(number)]

    found = {distance: samples(distance) for distance in (32, 64, 256, 1024)}
    for shorter, longer in itertools.pairwise(found.values()):
        assert set(longer) < set(shorter)
    for distance, numbers in found.items():
        late = [number for number in numbers if number >= 32]
        # No two profilers at once: the lead of one and its sample come after the end of the one before.
        assert min(b - a for a, b in itertools.pairwise(late)) >= distance // 2
        for period in (2, 3, 4, 5, 8, 10, 16, 32, 100):
            hit = sum(number % period == period - 1 for number in late)
            assert hit < len(late) * max(0.75, 2 / period), (distance, period)
            assert period > 10 or hit > 0, (distance, period)
