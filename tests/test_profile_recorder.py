"""Proves what `penstock profile` records of real scripts, against the scripts' own readings of the clock."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

import forked
import profiles
import ranks
import small_disk
from penstock.profiling.record import Interval, Record, Span, read
from penstock.tools.profile import run
from penstock.tools.profile.recorder.settling import InFlight, settled

SCRIPT = pathlib.Path(__file__).parent / "profiled" / "train.py"
STEPS = 20
SAMPLES = [4, 9, 15]


class Profiled:
    """A run of the script under the recorder, as the command makes it."""

    def __init__(self, folder: pathlib.Path, arguments: Sequence[str], ranks: int = 0) -> None:
        self.folder = folder / "profile"
        self.folder.mkdir()
        self._readings = folder
        launcher = [*forked.TORCHRUN, f"--nproc-per-node={ranks}"] if ranks else [sys.executable]
        self.code = run.run([*launcher, str(SCRIPT), *arguments], self.folder)
        self.records = [read(path) for path in sorted(self.folder.glob("rank-*.jsonl"))]

    def said(self, rank: int = 0) -> Any:
        return json.loads((self._readings / f"{rank}.json").read_text())

    def readings(self, name: str, rank: int = 0) -> list[list[int]]:
        return list(self.said(rank)["readings"][name])

    def complaints(self) -> str:
        return profiles.said(self.folder)


@pytest.fixture
def profiled(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, forks: None) -> Any:
    monkeypatch.setenv("READINGS", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return lambda *arguments, ranks=0: Profiled(tmp_path, arguments, ranks)


def spans(record: Record, phase: str) -> Iterator[Span]:
    return (span for step in record.steps for span in step.spans if span.phase == phase)


def is_within(inner: Sequence[int], outer: Sequence[int]) -> bool:
    return outer[0] <= inner[0] <= inner[1] <= outer[1]


def held(record: Record, phase: str) -> list[Interval]:
    return [(span.start_ns, span.end_ns) for span in spans(record, phase)]


def test_every_phase_holds_what_was_planted_in_it(profiled: Any) -> None:
    """In one process: what the script did in a phase lies within a span of that phase, and the spans within what the script did
    around them."""
    job = profiled("plain")
    assert job.code == 0
    [record] = job.records
    assert [step.number for step in record.steps] == list(range(STEPS))
    for phase in ("loading", "forward", "backward", "optimizer"):
        planted = job.readings(f"in {phase}")[:STEPS]
        found = held(record, phase)
        assert len(planted) == STEPS
        # The last load finds that there is no more, and is behind the last step.
        assert all(any(is_within(one, span) for span in found) for one in planted), phase
    around = job.readings("around forward and backward")
    for phase in ("forward", "backward"):
        assert all(any(is_within(span, outer) for outer in around) for span in held(record, phase)), phase
    [evaluation] = held(record, "evaluation")
    [outer] = job.readings("around evaluation")
    planted = job.readings("in evaluation")
    assert is_within(evaluation, outer) and all(is_within(one, evaluation) for one in planted)
    [checkpoint] = held(record, "checkpoint")
    assert is_within(checkpoint, job.readings("around checkpoint")[0])
    assert [event.kind for event in record.events] == ["checkpoint", "fork", "samples", "end"]
    assert re.fullmatch(
        r"every (\d+) steps from here on: a sample costs [\d.]+ ms, a step takes [\d.]+", record.events[2].text
    )
    assert all(step.examples == 8 for step in record.steps)


def test_steps_follow_each_other_and_hold_their_spans(profiled: Any) -> None:
    """A step begins where the one before ended, at the end of its optimizer's step; its spans lie in it, and it took the
    processor for what was burnt."""
    job = profiled("plain")
    [record] = job.records
    for before, after in zip(record.steps, record.steps[1:], strict=False):
        assert before.end_ns == after.start_ns
    for step in record.steps:
        assert all(is_within((span.start_ns, span.end_ns), (step.start_ns, step.end_ns)) for span in step.spans)
        assert step.spans[-1].phase == "optimizer"
    # 3 ms forward, 5 backward, 1 in the optimizer.
    for step, outer in zip(record.steps[1:], job.readings("step")[1:], strict=True):
        assert is_within((step.end_ns, step.end_ns), outer)
        assert 9_000_000 <= step.thread_ns <= step.end_ns - step.start_ns + 1_000_000


def test_a_clock_that_jumps_within_a_sample_is_seen() -> None:
    """By the narrowest of the marks at both ends, a second apart, the profiler's clock is 5e17 ns ahead: a drift of 1.5 ms is
    followed, with 3 ms one of the two has jumped."""
    from penstock.tools.profile.recorder import profiler

    began = [(1_000, 9_000), (20_000, 20_200), (30_000, 39_000)]
    ended = [(before + 10**9, after + 10**9) for before, after in began]

    def times(jump_ns: int) -> list[int]:
        # In wide marks the profiler's own time stands anywhere.
        seen = [before + 5 * 10**17 + (after - before > 1000) * 4_000 for before, after in began]
        return seen + [at + 10**9 + jump_ns for at in seen]

    for jump_ns in (0, 1_500_000):
        clock = profiler._clock(times(jump_ns), began, ended)
        assert clock is not None
        assert [clock(at) for at in (times(jump_ns)[1], times(jump_ns)[4])] == [20_000, 20_000 + 10**9]
    assert profiler._clock(times(3_000_000), began, ended) is None
    assert profiler._clock(times(0)[1:], began, ended) is None


@pytest.mark.parametrize("backend", ["gloo", "penstock"])
def test_ddp_tells_its_operations(profiled: Any, backend: str) -> None:
    """Two ranks: both sample the same steps, and see in each DDP's all-reduce in the backward pass and the script's own, in
    the same order, with bytes, group and purpose; the script's blocks, and is a wait in every step."""
    job = profiled("ddp", backend, ranks=2)
    assert job.code == 0
    assert [record.header.rank for record in job.records] == [0, 1]
    for record in job.records:
        assert (record.header.world, record.header.about["backend"]) == (2, backend)
        assert [sample.step for sample in record.samples][:3] == SAMPLES
        rank = record.header.rank
        outer = job.readings("around all_reduce", rank)
        waits = [wait for step in record.steps for wait in step.waits if wait.operation == "all_reduce"]
        assert len(waits) >= STEPS - 1
        for wait in waits:
            assert wait.group == "default"
            assert any(is_within((wait.start_ns, wait.end_ns), one) for one in outer)
        for sample in record.samples:
            step = record.steps[sample.step]
            own, summed = (
                [one for one in sample.operations if (one.purpose != "") == is_sum] for is_sum in (False, True)
            )
            assert [(one.name, one.bytes, one.number) for one in own] == [("all_reduce", 4000, 0)]
            [backward] = [(span.start_ns, span.end_ns) for span in step.spans if span.phase == "backward"]
            assert sum(one.bytes for one in summed) == 4 * (64 * 64 + 64 + 64 * 4096 + 4096)
            for one in summed:
                assert (one.name, one.group, one.ranks, one.purpose) == (
                    "all_reduce",
                    "default",
                    2,
                    "data-parallel sync",
                )
                assert is_within((one.issued_ns, one.issued_ns), backward)
            # The profiler's clock was converted: operators ran while the script was in them, and not while it burnt.
            assert sample.busy
            assert all(is_within(each, (step.start_ns, step.end_ns)) for each in sample.busy)
            for burnt in [*job.readings("in forward", rank), *job.readings("in backward", rank)]:
                assert not any(burnt[0] + 500_000 < start and end < burnt[1] - 500_000 for start, end in sample.busy)
    # The second rank issues its all-reduce 4 ms after the first, on the clock that they share.
    for one, other in zip(*(record.samples for record in job.records), strict=False):
        first, second = (next(op for op in each.operations if op.bytes == 4000) for each in (one, other))
        assert second.ended_ns > first.issued_ns and first.ended_ns > second.issued_ns


def test_what_converting_gradients_costs_is_measured_once(profiled: Any) -> None:
    """On each of several ranks, before the first step that counts; where nothing is sent, nothing is measured."""
    job = profiled("ddp", "gloo", ranks=2)
    assert job.code == 0
    for record in job.records:
        [event] = [event for event in record.events if event.kind == "float16"]
        there, back = (float(text) for text in re.findall(r"\d+\.\d+", event.text))
        assert 0 <= there < 100 and 0 < back < 100
        assert record.steps[1].start_ns <= event.time_ns <= record.steps[1].end_ns
        [span] = [span for span in record.steps[1].spans if span.phase == "profiler"]
        assert span.start_ns <= event.time_ns <= span.end_ns


@pytest.mark.parametrize("mode", ["ddp", "reducer", "pipeline"])
def test_a_job_without_ddp_and_reducer_says_so(profiled: Any, mode: str) -> None:
    """Settings of these are no advice then."""
    job = profiled(mode, *([] if mode == "reducer" else ["gloo"]), ranks=2)
    said = [[event.kind for event in record.events].count("no ddp") for record in job.records]
    assert said == [int(mode == "pipeline")] * 2


def test_a_gradient_reducer_tells_its_operations(profiled: Any) -> None:
    """What no call of torch.distributed shows: agreements and sums, and the wait at the end of the backward pass."""
    job = profiled("reducer", ranks=2)
    assert job.code == 0
    for record in job.records:
        assert [sample.step for sample in record.samples][:3] == SAMPLES
        for sample in record.samples:
            sums = [one for one in sample.operations if one.group == "default/buckets"]
            assert sum(one.bytes for one in sums) == 4 * (64 * 64 + 64)
            assert [one.number for one in sums] == list(range(len(sums)))
            assert any(one.group == "default/rounds" for one in sample.operations)
            assert {one.purpose for one in sample.operations} == {"data-parallel sync"}
        assert all([wait.operation for wait in step.waits] == ["all_reduce"] for step in record.steps[1:])


@pytest.mark.parametrize("mode", ["ddp", "pipeline", "reducer"])
def test_the_engine_tells_operations_of_all_steps(profiled: Any, mode: str) -> None:
    """As often as a sample shows them, and numbered alike on both ranks."""
    job = profiled(mode, *([] if mode == "reducer" else ["penstock"]), ranks=2)
    assert job.code == 0
    numbered = []
    for record in job.records:
        ended = [one for line in record.endings for one in line.operations]
        assert not any(line.missing for line in record.endings)
        rank = record.header.rank
        ways = {one: (rank, one.peer) if one.name == "send" else (one.peer, rank) for one in ended}
        assert len({(one.channel, one.number, ways[one]) for one in ended}) == len(ended)
        key = [(one.channel, one.number, one.group, ways[one] if one.peer is not None else one.name) for one in ended]
        numbered.append(sorted(key, key=str))
        for sample in record.samples:
            step = record.steps[sample.step]
            here = [one for one in ended if step.start_ns <= one.issued_ns < step.end_ns]
            assert sorted((one.group, one.name, one.peer is None or one.peer) for one in here) == sorted(
                (one.group, one.name, one.peer is None or one.peer) for one in sample.operations
            )
        last_ns = max(line.until_ns for line in record.endings)
        of_steps = {
            step.number: sum(step.start_ns <= one.issued_ns < step.end_ns for one in ended)
            for step in record.steps[2:]
            if step.end_ns <= last_ns
        }
        assert len(of_steps) > len(record.samples)
        assert set(of_steps.values()) == {len(record.samples[-1].operations)} or mode == "reducer"
        assert all(of_steps.values())
    assert numbered[0][:20] == numbered[1][:20]


def test_the_profiler_waits_for_callbacks_that_note_an_end() -> None:
    """Also where the thread that runs them waits for something: then it does not look as if it were at work."""
    assert ranks.run(_wait_for_callbacks, count=2) == [["late"], ["late"]]


def _wait_for_callbacks() -> list[str]:
    dist.init_process_group("penstock")
    work, ended, in_flight = dist.all_reduce(torch.ones(4 << 20), async_op=True), [], InFlight()

    def late(_: Any) -> None:
        time.sleep(0.2)
        ended.append("late")

    work.get_future().then(late)
    in_flight.add(work)
    assert settled(in_flight, 20.0)
    found = [*ended]
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("backend", ["gloo", "penstock"])
def test_purposes_of_communication(profiled: Any, backend: str) -> None:
    """Of a pipeline: what is received before a forward pass, before a backward pass, and sent; of groups by their description;
    of experts; of gradients that a script sums by itself."""
    job = profiled("pipeline", backend, ranks=2)
    assert job.code == 0
    for record in job.records:
        rank = record.header.rank
        received = "pipeline backward recv" if rank == 0 else "pipeline forward recv"
        for sample in record.samples:
            found = {(one.name, one.peer, one.purpose) for one in sample.operations}
            assert found == {
                ("send", 1 - rank, "pipeline send"),
                ("recv", 1 - rank, received),
                ("all_reduce", None, "tensor"),
                ("all_to_all", None, "expert"),
                ("all_reduce", None, "data-parallel sync"),
            }
            # What is empty waits for nobody, and tells nothing.
            assert sum(one.purpose == "tensor" for one in sample.operations) == 1
            by_purpose = {one.purpose: one for one in sample.operations}
            assert by_purpose["tensor"].group.startswith("TENSOR_MODEL_PARALLEL_GROUP:")
            assert by_purpose["pipeline send"].bytes == by_purpose[received].bytes == 4 * 8 * 64
        outer = job.readings("around wait", rank)
        # A blocking sum is a wait since its call began, before the backend had it.
        waits_of = {step.number: step.waits for step in record.steps}
        for sample in record.samples:
            issued_ns = next(one.issued_ns for one in sample.operations if one.purpose == "tensor")
            assert any(
                wait.start_ns <= issued_ns < wait.end_ns and wait.group.startswith("TENSOR")
                for wait in waits_of[sample.step]
            )
        # What the script issues and waits for by itself is one since its `wait`, however soon that comes.
        waits = [
            (one.start_ns, one.end_ns) for step in record.steps for one in step.waits if one.operation == "all_reduce"
        ]
        assert sum(is_within(wait, one) for wait in waits for one in outer) == STEPS
    groups = [{one.group for one in record.samples[0].operations} for record in job.records]
    assert groups[0] == groups[1]


def test_two_optimizers_are_one_step(profiled: Any) -> None:
    """A GAN's iteration is one step, not two."""
    job = profiled("gan")
    [record] = job.records
    assert len(record.steps) == STEPS
    for step in record.steps[1:]:
        assert [span.phase for span in step.spans if span.phase != "profiler"] == [
            "forward",
            "backward",
            "optimizer",
        ] * 2


def test_accumulated_gradients_are_one_step(profiled: Any) -> None:
    """Three forward and backward parts, the clip and the optimizer."""
    [record] = profiled("accumulation").records
    assert len(record.steps) == STEPS
    for step in record.steps:
        phases = [span.phase for span in step.spans if span.phase != "profiler"]
        assert phases == ["forward", "backward"] * 3 + ["clip", "optimizer"]


def test_a_grad_scaler_that_skips_ends_the_step(profiled: Any) -> None:
    """A step that is left out for an infinite gradient counts, so that ranks count alike; unscaling and the check are told."""
    [record] = profiled("scaler").records
    assert len(record.steps) == STEPS
    for step in record.steps[1:]:
        phases = {span.phase for span in step.spans}
        assert phases >= {"forward", "backward", "unscale", "inf check"}
        assert ("optimizer" in phases) == (step.number % 5 != 4)


def test_other_optimizers(profiled: Any) -> None:
    """LBFGS' closure lies in the optimizer's span; an optimizer around another one steps once; one that raised spoils nothing;
    and where a script goes on with another optimizer, that one's steps count after some."""
    [record] = profiled("others").records
    # 4 of LBFGS; then 16 of the other until it is the first, 4 more, and 3 after its failures.
    assert len(record.steps) == 4 + 1 + 4 + 3
    for step in record.steps[:4]:
        [optimizer] = [span for span in step.spans if span.phase == "optimizer"]
        inner = [span for span in step.spans if span.phase in ("forward", "backward")]
        assert len(inner) >= 2
        assert all(is_within((s.start_ns, s.end_ns), (optimizer.start_ns, optimizer.end_ns)) for s in inner)


def test_nothing_is_compiled_of_the_marks(profiled: Any) -> None:
    """torch.compile makes the graphs that it makes without the recorder, whole; calls of what is compiled are forward."""
    job = profiled("compiled")
    assert job.code == 0 and job.said()["graphs"] == 2
    [record] = job.records
    for step in record.steps[1:]:
        phases = [span.phase for span in step.spans if span.phase != "profiler"]
        assert phases[:2] == ["forward", "backward"] and phases[-2:] == ["backward", "optimizer"]


def test_the_scripts_own_profiler_goes_first(profiled: Any) -> None:
    """It starts while a sample runs, sees what it would, and the sample is given up and said so."""
    job = profiled("profiler")
    assert job.code == 0 and "aten::linear" in job.said()["seen"]
    [record] = job.records
    assert [sample.step for sample in record.samples] == SAMPLES[1:]
    assert "the script runs torch's profiler itself" in job.complaints()


def test_a_killed_rank_leaves_what_it_did(profiled: Any) -> None:
    """A rank that is killed has lost at most a second; the command says that its record ends early."""
    job = profiled("dies", "gloo", ranks=2)
    assert job.code != 0
    record = next(record for record in job.records if record.header.rank == 1)
    [[died, _]] = job.readings("died", 1)
    assert died - 1_000_000_000 < record.steps[-1].end_ns < died
    # torchrun ends the other one.
    assert re.search("the records? of ranks? (0, )?1 ends? early", job.complaints())


def test_a_script_that_never_steps_is_one_step(profiled: Any) -> None:
    """And the command says so."""
    job = profiled("never_steps")
    [record] = job.records
    assert [step.number for step in record.steps] == [0]
    [evaluation] = held(record, "evaluation")
    assert all(is_within(one, evaluation) for one in job.readings("in forward"))
    assert "no optimizer stepped more than once" in job.complaints()


def test_children_of_a_rank_are_no_ranks(profiled: Any) -> None:
    """A program that a rank starts, and that trains, is not recorded."""
    job = profiled("children")
    assert job.code == 0
    [record] = job.records
    assert len(record.steps) == 1
    assert sorted(path.name for path in job.folder.glob("rank-*.jsonl")) == ["rank-0.jsonl"]


def test_ranks_that_the_script_starts(profiled: Any) -> None:
    """Forks of a process that does not train are ranks, with the numbers by which they join; they end well."""
    job = profiled("started")
    assert job.code == 0
    assert [(record.header.rank, record.header.world, len(record.steps)) for record in job.records] == [
        (0, 2, STEPS),
        (1, 2, STEPS),
    ]
    assert "ends early" not in job.complaints()


def test_a_script_without_training_is_told(profiled: Any) -> None:
    """It imports torch and does nothing with it."""
    job = profiled("nothing")
    assert job.code == 0 and not job.records
    assert "called no module" in job.complaints()
    assert not list(job.folder.iterdir())


# ------------------------------------------------------------------------------------- what needs fresh interpreters


def fresh(tmp_path: pathlib.Path, *command: str, **more: str) -> tuple[int, pathlib.Path, str]:
    """As the command starts it, without forks: the import of torch itself is what these are about."""
    folder = tmp_path / "profile"
    program = (
        "import sys, pathlib\n"
        "from penstock.tools.profile import run\n"
        "from penstock.profiling.divide import divide\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "folder.mkdir()\n"
        "code = run.run(sys.argv[2:], folder)\n"
        "from penstock.tools.profile.cli import _load\n"
        "records = _load(folder)\n"
        "found = divide(records)\n"
        "print(*found.failures, *run.complaints(folder, records), *found.problems, sep='\\n')\n"
        "sys.exit(code)"
    )
    env = {**os.environ, "READINGS": str(tmp_path), "OMP_NUM_THREADS": "1", **more}
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder), *command], env=env, capture_output=True, text=True
    )
    return done.returncode, folder, done.stdout + done.stderr


def test_an_exception_is_recorded(tmp_path: pathlib.Path) -> None:
    """Its type and text, and the exit code stays the script's. The environment's own `sitecustomize` is imported, PYTHONPATH
    is kept, and the script finds no folder of ours on its path."""
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.was_imported = True")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, runpy\n"
        f"assert sys.was_imported and {str(tmp_path)!r} in sys.path\n"
        f"assert {str(run.SITE)!r} not in sys.path\n"
        f"sys.argv = [{str(SCRIPT)!r}, 'raises']\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    code, folder, text = fresh(tmp_path, sys.executable, str(script), PYTHONPATH=path)
    assert code == 1, text
    assert "Traceback" in text and "rank 0 ended with an exception: RuntimeError: planted: the loss is gone" in text
    record = read(folder / "rank-0.jsonl")
    assert len(record.steps) == 5
    assert [event.kind for event in record.events] == ["exception", "end"]


def test_an_isolated_interpreter_is_told(tmp_path: pathlib.Path) -> None:
    """It looks into no PYTHONPATH: nothing is recorded, and the command says what to do."""
    script = tmp_path / "script.py"
    script.write_text("print('ran')")
    code, folder, text = fresh(tmp_path, sys.executable, "-I", str(script))
    assert code == 0 and "ran" in text
    assert "start the script without these" in text
    assert not list(folder.iterdir())


@pytest.mark.slow
def test_workers_of_a_loader_are_no_ranks(tmp_path: pathlib.Path) -> None:
    """Workers that are started anew, and call modules, write nothing."""
    code, folder, text = fresh(tmp_path, sys.executable, str(SCRIPT), "workers")
    assert code == 0, text
    record = read(folder / "rank-0.jsonl")
    assert len(record.steps) == STEPS
    assert not (folder / "before-1").exists()


def test_a_full_disk_ends_the_recording_alone(tmp_path: pathlib.Path) -> None:
    """The training goes on, says so once, and the file holds whole lines."""
    from penstock.profiling.record import Event, Header
    from penstock.tools.profile.recorder.writer import Writer

    with small_disk.mounted(tmp_path / "full", "4k"):
        header = Header(0, 1, "here", 1, 0, 0, {})
        path = tmp_path / "full" / "rank-0.jsonl"
        writer = Writer(lambda: header, lambda _: path, lambda: None)
        for number in range(200):
            writer.put(Event(number, "end", "x" * 100))
        writer.close()
        assert writer.is_broken
        record = read(path)
        assert 10 < len(record.events) < 40 and not record.problems
