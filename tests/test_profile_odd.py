"""Proves that `penstock profile` changes nothing of odd scripts, and records them as they are."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import threading
from typing import Any

import pytest

import forked
import profiles
from penstock.profiling.record import Event, Header, Record, Step, read
from penstock.tools.profile import run
from penstock.tools.profile.recorder import recording as recordings
from penstock.tools.profile.recorder.writer import Writer

HEAD = """
import contextlib, os, sys, threading, time
import torch, torch.distributed as dist
from torch import nn
torch.set_num_threads(1)
model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

def step(x=None):
    optimizer.zero_grad()
    model(torch.ones(2, 8) if x is None else x).sum().backward()
    optimizer.step()
"""

PATIENT = "from penstock.tools.profile.recorder import sampling\nsampling._LATE_PATIENCE_S = 10.0\n"
"""On a busy machine the profiler would stop some steps later, after the next sample."""


@pytest.fixture
def odd(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, forks: None) -> Any:
    def odd(text: str, ranks: int = 0, code: int = 0) -> tuple[list[Record], str]:
        script, folder = tmp_path / "script.py", tmp_path / "profile"
        script.write_text(HEAD + text)
        folder.mkdir()
        launcher = [*forked.TORCHRUN, f"--nproc-per-node={ranks}"] if ranks else [sys.executable]
        assert run.run([*launcher, str(script)], folder) == code
        records = [read(path) for path in sorted(folder.glob("rank-*.jsonl"))]
        return records, profiles.said(folder)

    return odd


def test_a_batch_without_a_shape(odd: Any) -> None:
    """Of nested tensors, which have none."""
    [record], _ = odd(
        "nest = lambda xs: torch.nested.nested_tensor(list(xs))\n"
        "loader = torch.utils.data.DataLoader([torch.ones(n, 8) for n in range(1, 7)], 2, collate_fn=nest)\n"
        "for x in loader:\n    step(x.to_padded_tensor(0.0))\n"
    )
    assert len(record.steps) == 3


COMPILED = {
    "a function that steps": "step = torch.compile(lambda: optimizer.step(), backend='eager')\n",
    "the method": "step = optimizer.step = torch.compile(optimizer.step, backend='eager')\n",
}


@pytest.mark.parametrize("clears", ["before", "after", "never"])
@pytest.mark.parametrize("how", COMPILED)
def test_a_compiled_optimizer_steps(odd: Any, how: str, clears: str) -> None:
    """Its hooks are compiled away; two passes a step, as gradients that are accumulated have, are one step."""
    [record], said = odd(
        COMPILED[how] + "for x in torch.utils.data.DataLoader(torch.ones(48, 8), 2):\n"
        f"    {'optimizer.zero_grad()' if clears == 'before' else 'pass'}\n"
        "    for part in x.chunk(2):\n        model(part).sum().backward()\n"
        "    step()\n"
        f"    {'optimizer.zero_grad()' if clears == 'after' else 'pass'}\n"
    )
    # The first is no proof yet, and joins the second. The last has nothing after it, unless gradients are cleared there.
    assert len(record.steps) in (22, 23) and record.samples, said
    for step in record.steps[1:]:
        assert [span.phase for span in step.spans if span.phase in ("forward", "backward")] == [
            "forward",
            "backward",
        ] * 2
    assert "steps of SGD are compiled" in said


CHANGES = {
    "sam": "class Sam(torch.optim.Optimizer):\n"
    "    def __init__(self, parameters):\n        super().__init__(parameters, {})\n"
    "    def climb(self):\n"
    "        with torch.no_grad():\n            [p.add_(0.1 * p.grad) for p in self.param_groups[0]['params']]\n"
    "sam = Sam(model.parameters())\n"
    "def iterate(x):\n"
    "    half(model(x)).backward()\n    sam.climb()\n    optimizer.zero_grad()\n"
    "    half(model(x)).backward()\n    optimizer.step()\n    optimizer.zero_grad()\n",
    "lbfgs": "optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=2)\n"
    "def again():\n    optimizer.zero_grad()\n    loss = half(model(x)).square()\n    loss.backward()\n    return loss\n"
    "def iterate(x):\n    globals()['x'] = x\n    optimizer.step(again)\n",
}


@pytest.mark.parametrize("how", CHANGES)
def test_what_changes_parameters_beside_a_compiled_function_is_no_step(odd: Any, how: str) -> None:
    [record], said = odd(
        "half = torch.compile(lambda y: y.sum() / 2, backend='eager')\n"
        + CHANGES[how]
        + "for _ in range(20):\n    iterate(torch.ones(4, 8))\n"
    )
    assert "compiled" not in said
    passes = [sum(span.phase == "backward" for span in step.spans) for step in record.steps[-3:]]
    assert len(set(passes)) == 1 and passes[0] >= 2, passes


@pytest.mark.parametrize(
    "text",
    [
        "it = iter(torch.utils.data.DataLoader(torch.ones(48, 8), 2))\nx = next(it)\n"
        "for _ in range(23):\n    model(x).sum().backward()\n    x = next(it)\n    step()\n    optimizer.zero_grad()\n",
        "x, weight = torch.ones(2, 8), model.weight\n"
        "for _ in range(24):\n    (x @ weight).sum().backward()\n    step()\n    weight.grad = None\n",
    ],
)
def test_a_compiled_step_behind_the_next_batch(odd: Any, text: str) -> None:
    """It is not looked for in vain where the next batch is loaded; and without loaders, before the next pass."""
    [record], _ = odd(COMPILED["the method"] + text)
    assert len(record.steps) in (22, 23), len(record.steps)


def test_optimizers_of_any_kind_beside_a_compiled_function(odd: Any) -> None:
    """One that wraps another and has no parameters of its own, and many."""
    [record], said = odd(
        "half = torch.compile(lambda y: y.sum() / 2, backend='eager')\n"
        "class Wrapper(torch.optim.Optimizer):\n"
        "    def __init__(self, inner):\n        super().__init__(inner.param_groups[0]['params'], {})\n"
        "        self.inner = inner\n        del self.param_groups\n"
        "    def step(self):\n        self.inner.step()\n"
        "wrapper = Wrapper(optimizer)\n"
        "for _ in range(20):\n    half(model(torch.ones(2, 8))).backward()\n    wrapper.step()\n"
        "many = [nn.Parameter(torch.ones(1)) for _ in range(300)]\n"
        "for _ in range(3):\n"
        "    for each in [torch.optim.SGD([p], lr=0.1) for p in many]:\n        each.step()\n"
    )
    assert len(record.steps) >= 19 and "compiled" not in said


def test_a_rank_that_ends_at_once_is_named(odd: Any) -> None:
    """`os._exit` after some steps, within the first second: what there is counts."""
    [record], said = odd("for _ in range(4):\n    step()\nos._exit(5)\n", code=5)
    assert len(record.steps) == 4 and "os._exit" in said


def test_a_rank_that_is_killed_after_its_first_step_is_named(odd: Any) -> None:
    [record], said = odd(
        "import signal\nstep()\n"
        "path = os.path.join(os.environ['PENSTOCK_PROFILE'], 'rank-0.jsonl')\n"
        "until = time.monotonic() + 20\n"
        "while not (os.path.exists(path) and os.path.getsize(path)) and time.monotonic() < until:\n    step()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n",
        code=128 + 9,
    )
    assert record.header.rank == 0 and "it was killed" in said


def test_a_script_that_waits_for_all_its_children(odd: Any) -> None:
    """The process that reads counters is none of them."""
    [record], _ = odd(
        "step()\n"
        "until = time.monotonic() + 30\n"
        "name = os.environ['PENSTOCK_PROFILE']\n"
        "def begun():\n"
        "    return any(n.startswith('host-') for n in os.listdir(name))\n"
        "while not begun() and time.monotonic() < until:\n    step()\n"
        "assert begun()\n"
        "child = os.fork()\n"
        "if child == 0:\n    os._exit(0)\n"
        "alarm = threading.Timer(20, os._exit, (3,))\n"
        "alarm.daemon = True\nalarm.start()\n"
        "try:\n"
        "    while True:\n        os.wait()\n"
        "except ChildProcessError:\n    pass\n"
        "step()\n"
    )
    assert record.events[-1].kind == "end"


def test_a_fork_in_a_sampled_step_has_no_profiler(odd: Any) -> None:
    """Such as a DataLoader's worker, which would fill its memory with events. That there is no sample is told."""
    [record], said = odd(
        "for number in range(20):\n"
        "    step()\n"
        "    if number == 3:\n"
        "        assert torch.autograd._profiler_enabled()\n"
        "        child = os.fork()\n"
        "        if child == 0:\n            os._exit(7 * torch.autograd._profiler_enabled())\n"
        "        assert os.waitpid(child, 0)[1] == 0\n"
    )
    assert [sample.step for sample in record.samples] == [9, 15] and "forked in a sampled step" in said


def test_a_sample_does_not_run_on_and_on(odd: Any) -> None:
    """A long evaluation in a sampled step ends the sample: its events would fill the memory."""
    [record], said = odd(
        "for number in range(20):\n"
        "    step()\n"
        "    if number == 3:\n"
        "        assert torch.autograd._profiler_enabled()\n"
        "        began = time.monotonic()\n"
        "        with torch.no_grad():\n"
        "            while torch.autograd._profiler_enabled():\n"
        "                model(torch.ones(2, 8))\n"
        "                assert time.monotonic() < began + 60\n"
    )
    assert [sample.step for sample in record.samples] == [9, 15] and "took more than 5 times the usual" in said


def test_what_else_a_sampled_step_does_is_no_cost_of_the_sample(odd: Any) -> None:
    """Steps with the profiler take 60 ms longer, as with an evaluation: with few events that is not the profiler's."""
    [record], _ = odd(
        "for number in range(24):\n    time.sleep(0.06 if number in (3, 4, 8, 9, 14, 15) else 0.002)\n    step()\n"
    )
    [said] = [event.text for event in record.events if event.kind == "samples"]
    cost_ms = float(said.split("a sample costs ")[1].split(" ms")[0])
    assert [sample.step for sample in record.samples] == [4, 9, 15] and cost_ms < 100


def test_a_step_of_many_events_is_sampled_in_part(odd: Any) -> None:
    """A step of 150,000 events: they are counted before the first sample, which then costs a fifth of the memory, and that is
    said. All of the step's operators are in it."""
    [record], said = odd(
        "x = torch.ones(4)\n"
        "for number in range(6):\n"
        "    for _ in range(30_000):\n"
        "        x.add_(1)\n"
        "    time.sleep(0.3)\n"
        "    step()\n"
    )
    assert "a step has 150,0" in said and "samples are few" in said
    [sample] = record.samples
    measured = record.steps[sample.step]
    assert sample.step == 4 and sample.dropped == 0
    ran = sum(end - start for start, end in sample.busy)
    (start, _), (_, end) = sample.busy[0], sample.busy[-1]
    assert ran > 0.3 * (measured.end_ns - measured.start_ns - 300_000_000)
    assert start < measured.start_ns + 50_000_000 and end > measured.end_ns - 50_000_000, "from its start to its end"


@pytest.mark.parametrize(("free", "is_off"), [(1 << 40, False), (1_000_000, True)])
def test_a_step_with_more_events_than_memory_is_not_sampled(
    free: int, is_off: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And that is said, with both numbers."""
    import torch

    from penstock.tools.profile.recorder import collectives, sampling

    said: list[Any] = []
    monkeypatch.setattr(sampling, "_free_bytes", lambda: free)
    monkeypatch.setattr(sampling, "_MANY", 100)
    one, calls = sampling.Sampling(said.append), collectives.Calls()
    one._start(sampling._PROBE, calls)
    x = torch.ones(4)
    for _ in range(500):
        x.add_(1)
    one.step_ended(Step(sampling._PROBE, 0, 1), calls)
    assert not one.is_running
    # Without shapes one step is enough: the profiler starts at the end of the step before the sample.
    assert [number for number in range(2, 9) if one.wants(number)] == ([] if is_off else [3, 8])
    [event] = said
    assert ("there is memory for 138: there are no samples" if is_off else "samples are few") in event.text


def test_a_mesh_that_joins_by_itself(odd: Any) -> None:
    """`init_device_mesh` without `init_process_group`: the backend and its group are known."""
    records, _ = odd(
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "mesh = init_device_mesh('cpu', (2,), mesh_dim_names=('dp',))\n"
        "for _ in range(20):\n"
        "    step()\n"
        "    dist.all_reduce(torch.ones(3), group=mesh.get_group())\n"
        "dist.destroy_process_group()\n",
        ranks=2,
    )
    assert [record.header.world for record in records] == [2, 2]
    assert all(record.header.about.get("backend") for record in records)


def test_a_functional_collective_is_waited_for(odd: Any) -> None:
    """As DTensor's: the thread waits in C++ when the result is used, and that is a wait, and nothing is compiled otherwise."""
    records, _ = odd(
        "import torch.distributed._functional_collectives as functional\n"
        "dist.init_process_group('gloo')\n"
        "for number in range(20):\n"
        "    if dist.get_rank():\n        time.sleep(0.02)\n"
        "    x = functional.all_reduce(torch.ones(2, 8), 'sum', dist.group.WORLD)\n"
        "    step(x + 1)\n"
        "whole = torch.compile(\n"
        "    lambda x: functional.wait_tensor(functional.all_reduce(x, 'sum', dist.group.WORLD)) + 1,\n"
        "    fullgraph=True, backend='eager')\n"
        "assert whole(torch.ones(3)).tolist() == [3.0] * 3\n"
        "dist.destroy_process_group()\n",
        ranks=2,
    )
    waited = [sum(wait.end_ns - wait.start_ns for wait in step.waits) for step in records[0].steps[2:]]
    # Where the first rank itself lacked a processor, it waited less.
    assert min(waited) > 0 and sorted(waited)[len(waited) // 2] > 10_000_000, waited


def test_of_two_models_all_ranks_name_the_same(odd: Any) -> None:
    """Each DistributedDataParallel in a group of its own: what DDP launches by itself has one label everywhere."""
    records, _ = odd(
        "dist.init_process_group('gloo')\n"
        "pad = [object() for _ in range(dist.get_rank() * 1000)]\n"
        "groups = [dist.new_group([0, 1]) for _ in range(6)]\n"
        "order = list(range(6))\n"
        "many = [nn.parallel.DistributedDataParallel(nn.Linear(8, 8), process_group=g) for g in groups]\n"
        "optimizer = torch.optim.SGD([p for m in many for p in m.parameters()], lr=0.1)\n"
        "for _ in range(20):\n"
        "    optimizer.zero_grad()\n"
        "    sum(m(torch.ones(2, 8)).sum() for m in many).backward()\n"
        "    optimizer.step()\n"
        "dist.destroy_process_group()\n",
        ranks=2,
    )
    labels = [{one.group for sample in record.samples for one in sample.operations} for record in records]
    assert labels[0] == labels[1] and labels[0]


def test_the_profiler_stops_once_nothing_writes_into_it(odd: Any) -> None:
    """DDP goes on before gloo's thread has noted the end of an operation; one noted after the profiler's end is written into
    memory that is another's, of which most runs like this one died. Each fourth step is a sample, but where gloo's thread had no
    processor for long."""
    records, _ = odd(
        "dist.init_process_group('gloo')\n"
        "from penstock.tools.profile.recorder import slots\n"
        "slots.EARLY = tuple(range(4, 300, 4))\n"
        "many = [nn.parallel.DistributedDataParallel(nn.Linear(8, 8), process_group=dist.new_group([0, 1])) for _ in range(6)]\n"
        "optimizer = torch.optim.SGD([p for m in many for p in m.parameters()], lr=0.1)\n"
        "for _ in range(300):\n"
        "    optimizer.zero_grad()\n"
        "    sum(m(torch.ones(2, 8)).sum() for m in many).backward()\n"
        "    optimizer.step()\n"
        "dist.destroy_process_group()\n",
        ranks=2,
    )
    assert all(50 <= len(record.samples) <= 74 for record in records)


def test_a_profiler_that_has_stopped_is_followed_by_none_at_once(odd: Any, tmp_path: pathlib.Path) -> None:
    """Where steps are long one of them is counted before the first sample. When that began where the count had ended, within the
    optimizer's step, the end of that step was noted in memory that was another's, of which this script died."""
    records, _ = odd(
        "from penstock.tools.profile.recorder import sampling\n"
        "sampling._PROBED_NS = 0\n"
        "begin, end = sampling.Sampling._start, sampling.Sampling._stop\n"
        "said = open(__file__ + '.said', 'w')\n"
        "def start(self, target, calls):\n"
        "    print('started for', target, 'after', step, file=said, flush=True)\n"
        "    begin(self, target, calls)\n"
        "def stop(self, calls):\n"
        "    print('stopped after', step, file=said, flush=True)\n"
        "    return end(self, calls)\n"
        "sampling.Sampling._start, sampling.Sampling._stop = start, stop\n"
        "model = nn.Linear(8, 8)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for step in range(10):\n"
        "    optimizer.zero_grad()\n"
        "    model(torch.ones(2, 8)).sum().backward()\n"
        "    optimizer.step()\n",
    )
    said = (tmp_path / "script.py.said").read_text().splitlines()
    assert said == [
        "started for 2 after 1",
        "stopped after 2",
        "started for 4 after 3",
        "stopped after 4",
        "started for 9 after 7",
        "stopped after 9",
    ]
    assert [sample.step for sample in records[0].samples] == [4, 9]


def test_a_record_function_that_spans_samples_holds_the_next_one_up(odd: Any) -> None:
    """It ends when another profiler would run, and noted its end in memory that was another's."""
    [record], _ = odd(
        "for epoch in range(3):\n"
        "    with torch.profiler.record_function('epoch') if epoch else contextlib.nullcontext():\n"
        "        for _ in range(3 if epoch == 0 else 6):\n"
        "            optimizer.zero_grad()\n"
        "            model(torch.ones(2, 8)).sum().backward()\n"
        "            optimizer.step()\n"
    )
    assert [sample.step for sample in record.samples] == [4]
    assert [event.text for event in record.events if "record_function" in event.text]


def test_an_operation_that_runs_on_after_its_step(odd: Any) -> None:
    """The profiler sees nothing else meanwhile, stops when it has ended, and the sample holds it
    whole."""
    records, _ = odd(
        PATIENT + "dist.init_process_group('gloo')\n"
        "store = dist.distributed_c10d._get_default_store()\n"
        "x = torch.ones(3)\n"
        "for number in range(20):\n"
        "    if number == 4 and dist.get_rank() == 0:\n        work = dist.all_reduce(x, async_op=True)\n"
        "    step()\n"
        "    if number == 4 and dist.get_rank() == 0:\n"
        "        assert torch.autograd._profiler_enabled()\n"
        "        for _ in range(20_000):\n            x + 1\n"
        "        store.set('passed', '1')\n"
        "    if number == 4 and dist.get_rank() == 1:\n"
        "        store.get('passed')\n        work = dist.all_reduce(x, async_op=True)\n"
        "    if number == 4:\n        work.wait()\n"
        "    if number == 5:\n        assert not torch.autograd._profiler_enabled()\n"
        "assert x.tolist() == [2.0] * 3\n"
        "dist.destroy_process_group()\n",
        ranks=2,
    )
    first, second = records
    assert [[sample.step for sample in record.samples] for record in records] == [[4, 9, 15]] * 2
    [whole] = first.samples[0].operations
    assert (whole.name, whole.bytes) == ("all_reduce", 12) and not second.samples[0].operations
    assert first.steps[4].start_ns <= whole.issued_ns <= first.steps[4].end_ns
    assert first.steps[5].start_ns <= whole.ended_ns <= first.steps[5].end_ns


def test_a_fork_while_the_profiler_waits(odd: Any) -> None:
    """The child can use a profiler of its own, and the sample is made."""
    records, said = odd(
        PATIENT + "dist.init_process_group('gloo')\n"
        "x = torch.ones(3)\n"
        "for number in range(20):\n"
        "    if number == 4 and dist.get_rank() == 0:\n        work = dist.irecv(x, 1)\n"
        "    step()\n"
        "    if number == 4 and dist.get_rank() == 0:\n"
        "        assert torch.autograd._profiler_enabled()\n"
        "        child = os.fork()\n"
        "        if child == 0:\n"
        "            with torch.profiler.profile() as own:\n                x + 1\n"
        "            os._exit(0 if any(e.name == 'aten::add' for e in own.events()) else 7)\n"
        "        assert os.waitpid(child, 0)[1] == 0\n"
        "        work.wait()\n"
        "    if number == 4 and dist.get_rank() == 1:\n        dist.send(x + 1, 0)\n"
        "assert x[0] == 2.0 - dist.get_rank()\n"
        "dist.destroy_process_group()\n",
        ranks=2,
    )
    assert [[sample.step for sample in record.samples] for record in records] == [[4, 9, 15]] * 2
    assert [one.name for one in records[0].samples[0].operations] == ["recv"] and "forked" not in said


def test_gloos_reduce_scatter_is_over_once_it_was_waited_for(odd: Any) -> None:
    """Its work never says that it is complete. It is what FSDP uses, whose steps are sampled like others."""
    records, said = odd(
        "from torch.distributed.fsdp import fully_shard\n"
        "dist.init_process_group('gloo')\n"
        "work = dist.reduce_scatter_tensor(torch.zeros(4), torch.ones(8), async_op=True)\n"
        "work.wait()\nassert not work.is_completed()\n"
        "fully_shard(model)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n"
        "for number in range(20):\n    step()\n"
        "dist.destroy_process_group()\n",
        ranks=2,
    )
    assert [[sample.step for sample in record.samples] for record in records] == [[4, 9, 15]] * 2, said
    for record in records:
        assert {one.name for one in record.samples[-1].operations} >= {"all_gather", "reduce_scatter"}


def test_an_operation_that_never_ends(odd: Any) -> None:
    """A receive that waits from a sampled step on until the script leaves: the training goes on, without a wait of ours in each
    step, and what is left of the profiler does not keep the process."""
    [record, _], said = odd(
        "dist.init_process_group('gloo')\n"
        "for number in range(300):\n"
        "    if number == 4 and dist.get_rank() == 0:\n        work = dist.irecv(torch.ones(3), 1)\n"
        "    step()\n"
        "dist.barrier()\n",
        ranks=2,
    )
    assert len(record.steps) == 300 and not record.samples
    assert "an operation that began while torch's profiler ran did not end" in said
    waited = [span for step in record.steps for span in step.spans if span.phase == "profiler" and step.number > 5]
    assert sum(span.end_ns - span.start_ns for span in waited) < 1_000_000_000


def test_a_functional_collective_that_nobody_waits_for_yet(odd: Any) -> None:
    """It is launched in C++, and no work of it is seen: the profiler goes on until it was waited for."""
    records, _ = odd(
        PATIENT + "import torch.distributed._functional_collectives as functional\n"
        "dist.init_process_group('gloo')\n"
        "for number in range(20):\n"
        "    if number == 4:\n        x = functional.all_reduce(torch.ones(3), 'sum', dist.group.WORLD)\n"
        "    step()\n"
        "    if number == 4:\n"
        "        assert torch.autograd._profiler_enabled()\n"
        "        assert functional.wait_tensor(x).tolist() == [2.0] * 3\n"
        "    if number == 5:\n        assert not torch.autograd._profiler_enabled()\n"
        "dist.destroy_process_group()\n",
        ranks=2,
    )
    assert [[sample.step for sample in record.samples] for record in records] == [[4, 9, 15]] * 2


def test_a_functional_collective_that_nobody_waits_for(odd: Any) -> None:
    """torch never forgets it. The sample is made where the script ends."""
    records, _ = odd(
        "from penstock.tools.profile.recorder import settling\n"
        "settling._UNWAITED_LAST_S = 0.0\n"
        "import torch.distributed._functional_collectives as functional\n"
        "dist.init_process_group('gloo')\n"
        "for number in range(20):\n"
        "    if number == 4:\n        functional.all_reduce(torch.ones(3), 'sum', dist.group.WORLD)\n"
        "    step()\n"
        "dist.barrier()\n"
        "dist.destroy_process_group()\n",
        ranks=2,
    )
    assert [[sample.step for sample in record.samples] for record in records] == [[4]] * 2


@pytest.mark.parametrize("kind", ["profiler.emit_nvtx", "profiler.emit_itt", "profiler_legacy.profile"])
def test_other_profilers_of_torch_go_first(odd: Any, kind: str) -> None:
    """There can be one at a time, and it is theirs, unless it is switched off."""
    [record], said = odd(
        "torch.cuda.synchronize = lambda: None\n"
        "for number in range(20):\n"
        f"    with torch.autograd.{kind}() if number == 3 else contextlib.nullcontext():\n"
        "        step()\n"
        f"    if number == 12:\n        torch.autograd.{kind}(enabled=False).__enter__()\n"
    )
    assert [sample.step for sample in record.samples] == [9, 15]
    assert "the script runs torch's profiler itself" in said


def test_buffers_that_ddp_sends_are_waited_for(odd: Any) -> None:
    """BatchNorm's, before a forward pass, in C++: in each step the second rank waits in that call until the first has begun it,
    and that is no computing."""
    records, _ = odd(
        "dist.init_process_group('gloo')\n"
        "model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(20):\n"
        "    step(torch.rand(4, 8))\n"
        "dist.destroy_process_group()\n",
        ranks=2,
    )
    waits = [
        [wait for step in record.steps[2:] for wait in step.waits if wait.operation == "broadcast"]
        for record in records
    ]
    assert [len(each) for each in waits] == [18, 18] and {wait.group for wait in waits[1]} == {"default"}
    assert all(there.end_ns >= here.start_ns for here, there in zip(*waits, strict=True))
    for step in records[1].steps[2:]:
        [forward] = [span for span in step.spans if span.phase == "forward"]
        [wait] = [wait for wait in step.waits if wait.operation == "broadcast"]
        assert forward.start_ns <= wait.start_ns < wait.end_ns <= forward.end_ns
    for sample in records[1].samples:
        sent = [one for one in sample.operations if one.name == "broadcast"]
        assert sent and {(one.group, one.purpose, one.ranks) for one in sent} == {("default", "data-parallel sync", 2)}


@pytest.mark.parametrize("how", ["torch.multiprocessing", "multiprocessing", "a class of its own"])
def test_what_started_ranks_raise_is_told(odd: Any, how: str) -> None:
    """It goes to their parent, and no `sys.excepthook` sees it."""
    begin = {
        "torch.multiprocessing": "torch.multiprocessing.start_processes(train, nprocs=2, start_method='fork')\n",
        "multiprocessing": "import multiprocessing\n"
        "context = multiprocessing.get_context('fork')\n"
        "both = [context.Process(target=train, args=(rank,)) for rank in range(2)]\n"
        "for each in both:\n    each.start()\n"
        "for each in both:\n    each.join()\n"
        "sys.exit(1)\n",
        "a class of its own": "import multiprocessing\n"
        "class Rank(multiprocessing.get_context('fork').Process):\n"
        "    def __init__(self, rank):\n        super().__init__()\n        self.rank = rank\n"
        "    def run(self):\n        train(self.rank)\n"
        "both = [Rank(rank) for rank in range(2)]\n"
        "for each in both:\n    each.start()\n"
        "for each in both:\n    each.join()\n"
        "sys.exit(1)\n",
    }
    records, said = odd(
        "def train(rank):\n"
        "    dist.init_process_group('gloo', store=dist.FileStore(__file__ + '.store', 2), rank=rank, world_size=2)\n"
        "    for _ in range(5):\n        step()\n"
        "    dist.barrier()\n"
        "    raise ValueError(f'planted on {rank}')\n" + begin[how],
        code=1,
    )
    # torch's parent stops the others once one has failed, maybe before they have written.
    assert {len(record.steps) for record in records} == {5}
    told = [f"rank {rank} ended with an exception: ValueError: planted on {rank}" in said for rank in range(2)]
    assert any(told) if how == "torch.multiprocessing" else all(told), said


@pytest.mark.parametrize("how", ["alone", "torch.multiprocessing"])
def test_an_exception_without_a_text_is_told(odd: Any, how: str) -> None:
    """Its `__str__` raises: the record has all steps and names the exception, and a parent gets that one and none of ours."""
    run_it = {
        # A fork of the tests does not say, as the interpreter would, what it ended with.
        "alone": "try:\n    train(0)\nexcept Odd as error:\n    sys.last_value = error\n    raise\n",
        "torch.multiprocessing": "try:\n"
        "    torch.multiprocessing.start_processes(train, nprocs=1, start_method='fork')\n"
        "except torch.multiprocessing.ProcessRaisedException as error:\n"
        "    sys.exit(1 if 'Odd' in str(error) and 'TypeError' not in str(error) else 2)\n",
    }
    [record], said = odd(
        "class Odd(Exception):\n    def __str__(self):\n        return self.args[0] + 1\n"
        "def train(rank):\n"
        "    dist.init_process_group('gloo', store=dist.FileStore(__file__ + '.store', 1), rank=rank, world_size=1)\n"
        "    for _ in range(5):\n        step()\n"
        "    raise Odd('planted')\n" + run_it[how],
        code=1,
    )
    assert len(record.steps) == 5
    assert "rank 0 ended with an exception: Odd: (its __str__ raised TypeError)" in said


def test_what_fails_at_the_end_leaves_the_record(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """As what a signal's handler raises there: what was recorded until then is written, with its end."""
    from penstock.tools.profile.recorder.identity import Identity

    def fails(_: BaseException) -> None:
        raise KeyboardInterrupt

    monkeypatch.setenv(recordings.PROFILED, "")
    one = recordings.Recording(tmp_path, Identity())
    one._end_step()
    monkeypatch.setattr(one, "failed", fails)
    monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
    with pytest.raises(KeyboardInterrupt):
        one.end()
    record = read(tmp_path / "rank-0.jsonl")
    assert [step.number for step in record.steps] == [0] and record.events[-1].kind == "end"


def test_the_rule_that_thins_out_the_steps_of_a_long_run() -> None:
    """All of the first steps, then half as many each time that their number doubles; always the whole slot of a sample, and of
    what a script does every so many steps the same part as of all steps."""
    from penstock.tools.profile.recorder import slots

    most, slot = recordings._MOST_STEPS, slots.SLOT
    assert most % slot == 0
    kept = [number for number in range(32 * most) if recordings.is_recorded(number)]
    assert kept[:most] == list(range(most))
    assert kept == [at + each for at in kept if at % slot == 0 for each in range(slot)]
    for part in range(1, 6):
        here = range(most << part >> 1, most << part)
        found = [number for number in kept if number in here]
        assert len(found) == pytest.approx(most / 2, rel=0.01)
        for every in (500, 512, 1000, 1024):
            its = [number for number in here if number % every == 0]
            assert len([number for number in found if number % every == 0]) == pytest.approx(
                len(its) / 2**part, rel=0.25
            )


def test_of_a_long_run_some_steps_are_recorded(odd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a limit on, here of 128 steps: of all ranks the same, which are those of the rule. Samples are of them, with the steps
    in which the profiler starts and stops, and the limit is told once for each rank."""
    records, said = odd(
        "from penstock.tools.profile.recorder import recording, sampling\n"
        "recording._MOST_STEPS, sampling.SHARE = 128, 1e9\n"  # a sample in each slot, whatever it costs
        "dist.init_process_group('gloo')\n"
        "for _ in range(1500):\n    step()\n"
        "dist.destroy_process_group()\n",
        ranks=2,
    )
    monkeypatch.setattr(recordings, "_MOST_STEPS", 128)
    kept = [number for number in range(1500) if recordings.is_recorded(number)]
    assert 256 < len(kept) < 400
    for record in records:
        assert [step.number for step in record.steps] == kept
        late = [sample.step for sample in record.samples if sample.step >= 128]
        assert late and all({at - 2, at - 1, at, at + 1} <= set(kept) for at in late)
    text = "steps from 128 on: half of them are recorded, from 256 on a quarter"
    assert said.count(text) == 2


def test_an_optimizer_for_each_round_is_told(odd: Any) -> None:
    """Of ten steps each: they are one step of the profile, which says so."""
    [record], said = odd(
        "for _ in range(6):\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    for _ in range(10):\n        step()\n"
    )
    assert len(record.steps) == 10 and "the last 50 steps of optimizers count as one step" in said


def test_ddp_in_a_thread_that_is_not_the_one_that_joined(odd: Any) -> None:
    """As Ray's workers train: its sums are still its own."""
    records, _ = odd(
        "dist.init_process_group('gloo')\n"
        "def train():\n"
        "    global model, optimizer\n"
        "    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    for _ in range(20):\n        step()\n"
        "thread = threading.Thread(target=train)\n"
        "thread.start()\nthread.join()\n"
        "dist.destroy_process_group()\n",
        ranks=2,
    )
    for record in records:
        purposes = {one.purpose for sample in record.samples for one in sample.operations}
        assert len(record.steps) == 20 and purposes == {"data-parallel sync"}


def test_threads_that_begin_at_the_same_time_are_one_rank(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is one recording, whoever comes first."""
    from penstock.tools.profile.recorder import install

    made = []

    class Slow(recordings.Recording):
        def __init__(self, *arguments: Any) -> None:
            made.append(self)
            if len(made) == 2:
                second.set()
            second.wait(0.5)
            super().__init__(*arguments)

    second = threading.Event()
    monkeypatch.setattr(install, "Recording", Slow)
    monkeypatch.setattr(install, "_state", install._State())
    monkeypatch.setattr(install.atexit, "register", lambda *_: None)
    monkeypatch.delenv(recordings.PROFILED, raising=False)
    install._state.folder = tmp_path
    threads = [threading.Thread(target=install._begin) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    install._state.recording.end()  # type: ignore[union-attr]
    assert len(made) == 1


def test_a_disk_that_hangs_does_not_keep_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """At its end it waits for the last round of writing, but not for ever."""
    from penstock.tools.profile.recorder import writer as writers

    monkeypatch.setattr(writers, "_PATIENCE_S", 0.2, raising=False)
    never, opened = threading.Event(), threading.Event()

    def hangs(_: Header) -> pathlib.Path:
        opened.set()
        never.wait()
        raise OSError("over")

    one = Writer(lambda: Header(0, 1, "here", 1, 0, 0), hangs, lambda: None)
    one.put(Event(0, "end"))
    assert opened.wait(30)
    closing = threading.Thread(target=one.close, daemon=True)
    closing.start()
    closing.join(20)
    is_over = not closing.is_alive()
    never.set()
    assert is_over


def test_a_program_that_cannot_run_is_told(tmp_path: pathlib.Path) -> None:
    """A file that may be executed, and is no program: one message, and no traceback."""
    (tmp_path / "program").write_bytes(b"\0\1\2\3")
    (tmp_path / "program").chmod(0o755)
    command = [sys.executable, "-m", "penstock", "profile", "--", "./program"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "cannot run ./program" in done.stderr and "Traceback" not in done.stderr
    assert not [*tmp_path.glob("penstock-profile-*/.penstock-profile")]


def test_a_report_that_cannot_be_written_is_refused_first(tmp_path: pathlib.Path) -> None:
    """Before hours of training."""
    (tmp_path / "script.py").write_text("open('started', 'w')")
    command = [sys.executable, "-m", "penstock", "profile", "--html", "script.py/report.html", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "cannot write script.py/report.html" in done.stderr
    assert not (tmp_path / "started").exists()


def test_a_folder_that_is_gone_leaves_the_scripts_exit_code(tmp_path: pathlib.Path) -> None:
    """The script removes the folder of the records."""
    (tmp_path / "script.py").write_text(
        "import os, shutil, sys\nshutil.rmtree(os.environ['PENSTOCK_PROFILE'])\nsys.exit(5)"
    )
    command = [sys.executable, "-m", "penstock", "profile", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 5 and "Traceback" not in done.stderr, done.stderr
