"""Proves that `penstock.horovod.torch` does what Horovod documents: by programs of our own, by Horovod's own tests, and by its
examples. Our programs are in ``tests/horovod``; Horovod's files are in the corpus (corpus.py)."""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib
import importlib.util
import itertools
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

import corpus
import forked
import ranks
from penstock.fronts.horovod import launch, negotiation, operations
from penstock.fronts.horovod.controller import Settings, stall_message
from penstock.fronts.horovod.negotiation import Kind, Negotiation, Op, Request
from penstock.fronts.horovod.timeline import Timeline
from penstock.fronts.horovod.torch.elastic import sampler
from penstock.tools.convert.core import convert

HERE = pathlib.Path(__file__).parent / "horovod"
sys.path.insert(0, str(HERE))

import programs  # noqa: E402
import suite  # noqa: E402

# ------------------------------------------------------------------------------------------------ the decision, without I/O


def a_round(ranks_: list[Negotiation]) -> list[negotiation.Round]:
    blocks = b"".join(one.block() for one in ranks_)
    assert len(blocks) == negotiation.BLOCK_BYTES * len(ranks_)
    return [one.handle_round(blocks) for one in ranks_]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_all_ranks_agree_in_one_order(world: int) -> None:
    """Whatever the order and the moment of submissions, all ranks get the same operations in the same order, each once."""
    for seed in range(20):
        print("seed", seed)
        chance = random.Random(seed)
        names = [f"op{index}" for index in range(50)]
        todo = [chance.sample(names, len(names)) for _ in range(world)]
        negotiations = [Negotiation(rank, world) for rank in range(world)]
        agreed: list[list[bytes]] = [[] for _ in range(world)]
        while any(todo) or any(one.engaged for one in negotiations):
            for own, left in zip(negotiations, todo, strict=True):
                for _ in range(min(chance.randrange(20), len(left))):
                    own.submit(left.pop(), Request(Kind.ALLREDUCE, dtype="float32", shape=(3,)))
            for mine, outcome in zip(agreed, a_round(negotiations), strict=True):
                assert all(one.error is None for one in outcome.agreed)
                mine += [one.key for one in outcome.agreed]
        assert all(mine == agreed[0] for mine in agreed)
        assert len(set(agreed[0])) == len(agreed[0]) == len(names)


def test_a_name_may_come_again_once_it_is_agreed_on() -> None:
    """Pending names are known, agreed ones are free, and the next use of one is another operation."""
    negotiations = [Negotiation(rank, 2) for rank in range(2)]
    negotiations[0].submit("a", Request(Kind.BARRIER))
    assert negotiations[0].has("a") and negotiations[0].fresh and not negotiations[1].engaged
    (first, _) = a_round(negotiations)
    assert first.agreed == [] and not first.quiet and negotiations[0].engaged and not negotiations[0].fresh
    assert negotiations[0].waiting() == {"a": [0]}
    (quiet, _) = a_round(negotiations)
    assert quiet.quiet
    negotiations[1].submit("a", Request(Kind.BARRIER))
    (both, _) = a_round(negotiations)
    assert len(both.agreed) == 1 and not any(one.engaged or one.has("a") for one in negotiations)


def test_joined_ranks_count_for_reductions_until_all_have_joined() -> None:
    """What the others reduce is agreed on without a joined rank; the last to join ends it for all."""
    negotiations = [Negotiation(rank, 3) for rank in range(3)]
    negotiations[2].join()
    negotiations[0].submit("a", Request(Kind.ALLREDUCE, dtype="float32", shape=(5,)))
    a_round(negotiations)
    negotiations[1].submit("a", Request(Kind.ALLREDUCE, dtype="float32", shape=(5,)))
    negotiations[1].submit("b", Request(Kind.ALLGATHER, dtype="float32", shape=(5,)))
    negotiations[0].submit("b", Request(Kind.ALLGATHER, dtype="float32", shape=(5,)))
    (outcome, _, at_joined) = a_round(negotiations)
    reduced, gathered = outcome.agreed
    assert reduced.error is None and reduced.requests[2] is None and at_joined.agreed[0].request.elements == 5
    assert gathered.error is not None and "not supported with Join" in gathered.error
    negotiations[0].join()
    negotiations[1].join()
    for one in a_round(negotiations):
        assert one.last_joined == 1
    assert not any(one.engaged for one in negotiations)


def test_a_rank_that_stops_is_known_to_all() -> None:
    """Its last round says so, also to ranks that wait for it."""
    negotiations = [Negotiation(rank, 2) for rank in range(2)]
    negotiations[0].submit("a", Request(Kind.BARRIER))
    negotiations[1].stop()
    assert [one.stopped for one in a_round(negotiations)] == [[1], [1]]


def test_requests_survive_the_wire() -> None:
    """All kinds, dtypes and numbers of dimensions are read as they were written; beyond eight the elements are kept."""
    shapes = [(), (0,), (3, 0, 5), (1, 2, 3, 4, 5, 6, 7, 8), (2,) * 11]
    for kind, dtype, shape in itertools.product(Kind, negotiation.DTYPES, shapes):
        request = Request(kind, Op.MAX, dtype, shape, 7, False, 0.25, 1e300)
        one = Negotiation(0, 1)
        one.submit("x", request)
        (outcome,) = one.handle_round(one.block()).agreed
        assert outcome.request.elements == request.elements
        if len(shape) <= 8:
            assert outcome.request == request


def test_fusion_keeps_to_alike_operations_and_the_threshold() -> None:
    """Operations that reduce alike share a bucket up to the threshold, look past others, and never grow beyond it. One as large
    as the threshold is alone, and closes no bucket."""
    small = Request(Kind.ALLREDUCE, Op.SUM, "float32", (10,))
    large = Request(Kind.ALLREDUCE, Op.SUM, "float32", (30,))
    half = Request(Kind.ALLREDUCE, Op.SUM, "float16", (10,))
    other = Request(Kind.ALLGATHER, dtype="float32", shape=(10,))
    assert operations.fuse([small, half, small, other, half, large, small], 120) == [[0, 2, 6], [1, 4], [3], [5]]
    assert operations.fuse([small, small], 0) == [[0], [1]]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (0, 1, 0, 1, "none")),
        (
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"},
            (3, 4, 1, 2, "torchrun"),
        ),
        (
            {
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            },
            (1, 2, 1, 2, "mpirun"),
        ),
        ({"PMI_RANK": "0", "PMI_SIZE": "3"}, (0, 3, None, None, "mpiexec")),
        ({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "RANK": "0", "WORLD_SIZE": "1"}, (1, 2, None, None, "horovodrun")),
    ],
)
def test_launchers_are_recognised(environ: dict[str, str], expected: tuple[Any, ...]) -> None:
    """Each launcher's variables say where a process stands; Horovod's own win, and none means alone."""
    found = launch.place(environ)
    assert (found.rank, found.size, found.local_rank, found.local_size, found.launcher) == expected


def test_the_meeting_point_is_found_or_asked_for() -> None:
    """MASTER_ADDR and MASTER_PORT are taken; ranks of one host find one by themselves; else the error says what to set."""
    local, spread = launch.Place(0, 2, 0, 2, None, "mpirun"), launch.Place(0, 2, 0, 1, None, "mpirun")
    assert launch.meeting_point({"MASTER_ADDR": "h", "MASTER_PORT": "7"}, spread, 1) == ("h", 7)
    assert launch.meeting_point({}, local, 4711) == launch.meeting_point({}, local, 4711)
    assert 20000 <= launch.meeting_point({}, local, 4711)[1] < 30000
    with pytest.raises(ValueError, match="set MASTER_ADDR"):
        launch.meeting_point({}, spread, 1)
    with pytest.raises(ValueError, match="is not a rank"):
        launch.place({"RANK": "2", "WORLD_SIZE": "2"})
    with pytest.raises(ValueError, match="is not a number"):
        launch.place({"RANK": "x", "WORLD_SIZE": "2"})


def test_settings_are_horovods() -> None:
    """Names and defaults of the environment variables."""
    assert Settings.read({}) == Settings(64 << 20, 0.0, 60.0, 0.0)
    environ = {
        "HOROVOD_FUSION_THRESHOLD": "5",
        "HOROVOD_CYCLE_TIME": "2",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "7",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "9",
    }
    assert Settings.read(environ) == Settings(5, 0.002, 7.0, 9.0)
    assert Settings.read({**environ, "HOROVOD_STALL_CHECK_DISABLE": "1"}).stall_warning_s == 0
    for name in environ:
        for text in ("64MB", "-1", "nan", "inf", "1e99", ""):
            with pytest.raises(ValueError, match=f"^{name}='{text}' must be a number, 0 or more$"):
                Settings.read({**environ, name: text})


def test_the_stall_message_names_missing_ranks_by_operation() -> None:
    """As Horovod's does: a line for each rank that lacks something, with at most six names."""
    have = {"a": {0}, "b": {0, 1}, **{f"c{index}": {0, 1} for index in range(7)}}
    text = stall_message(have, [4, 5, 6], 60, ends=False)
    assert text.splitlines()[-2:] == ["5: [a]", "6: [a, b, c0, c1, c2, c3 ...]"]
    assert "5!: [a]" in stall_message(have, [4, 5, 6], 60, ends=True)


@pytest.mark.parametrize(("left", "world"), [(0, 3), (1, 2), (1, 3), (1, 7), (2, 5), (3, 7), (5, 2), (8, 4)])
def test_an_elastic_sampler_gives_all_ranks_as_much(left: int, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is left of an epoch, each rank yields as many samples as it says, and together they yield each sample; also where
    fewer are left than half of the ranks."""
    monkeypatch.setattr(sampler, "size", lambda: world)
    together: list[int] = []
    for rank in range(world):
        monkeypatch.setattr(sampler, "rank", lambda rank=rank: rank)
        one = sampler.ElasticSampler(range(20), seed=3)
        one.load_state_dict({"epoch": 1, "processed_num": 20 - left})
        own = list(one)
        assert len(own) == len(one) == -(-left // world)
        together += own
    assert set(together) == set(one.remaining_indices) and len(set(together)) == left


# ------------------------------------------------------------------------------------------------ programs on ranks


def alike(values: list[Any]) -> None:
    """All ranks have returned the same, to the bit."""
    assert all(value == values[0] for value in values), values


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(
    "program",
    [
        programs.permuted_order,
        programs.every_call,
        programs.wrong_arguments,
        programs.gradients,
        programs.optimizer_state,
        programs.sync_batch_norm,
        programs.adasum,
        programs.adasum_training,
        programs.dropped_optimizers,
    ],
)
def test_program(program: Callable[[], object], count: int) -> None:
    """The program's first line says what it proves; what it returns is the same on all ranks."""
    alike(ranks.run(program, count=count))


@pytest.mark.parametrize("who", ["all", "first"])
def test_in_inference_mode(who: str) -> None:
    """Results are right, outside of it too, and the process set lives; the mode belongs to a thread, and the controller's is
    another one than the script's."""
    alike(ranks.run(programs.in_inference_mode, count=3, args=(who,)))


@pytest.mark.parametrize("sparse", [False, True])
def test_steps_in_another_order(sparse: bool) -> None:
    """See the program."""
    alike(ranks.run(programs.steps_in_another_order, count=2, args=(sparse,)))


@pytest.mark.parametrize("case", ["head only", "frozen now", "others have more"])
def test_state_of_some_parameters(case: str) -> None:
    """See the program."""
    alike(ranks.run(programs.state_of_some_parameters, count=2, args=(case,)))


@pytest.mark.parametrize("how", ["buckets", "names", "sparse", "closure", "adasum"])
def test_interrupted_steps(how: str) -> None:
    """See the program."""
    alike(ranks.run(programs.interrupted_steps, count=2, args=(how,)))


def test_optimizers_of_another_life() -> None:
    """Ranks that have another past go on together."""
    alike(ranks.run(programs.optimizers_of_another_life, count=3))


@pytest.mark.parametrize("count", [2, 3])
def test_mismatches_are_errors_on_all_ranks(count: int) -> None:
    """Each rank gets the same text, which says what two ranks wanted."""
    texts = ranks.run(programs.mismatches, count=count)
    alike(texts)
    for text, expected in zip(
        texts[0],
        [
            "Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape [3], but another rank sent a tensor of "
            "shape [4].",
            "Mismatched data types: One rank had type float32, but another rank had type int32.",
            "Mismatched reduction operation: One rank sent reduction op 1, but another rank sent reduction op 4.",
            "Mismatched prescale and/or postscale factors: One rank sent factors (1, 1), but another rank sent factors "
            "(2, 1).",
            "Mismatched BROADCAST root ranks: One rank specified root rank 0, but another rank specified root rank 1.",
            "Mismatched ALLGATHER tensor shapes: One rank sent a tensor with dimension 1 equal to 3, but another rank "
            "sent a tensor with dimension 1 equal to 4.",
            "Mismatched ALLGATHER tensor shapes: One rank sent a tensor of rank 1, but another rank sent a tensor of "
            "rank 2.",
            "Process-set rank zero tried to ALLGATHER a rank-zero tensor.",
            "Mismatched ALLTOALL tensor shapes: One rank sent a tensor with dimension 1 equal to 3, but another rank sent "
            "a tensor with dimension 1 equal to 4.",
            "Mismatched REDUCESCATTER tensor shapes: One rank sent a tensor of shape [6], but another rank sent a tensor "
            "of shape [7].",
        ],
        strict=True,
    ):
        assert text == expected


def test_mismatches_leave_a_record(tmp_path: pathlib.Path) -> None:
    """See the program; the record has the rounds in which ranks found out."""
    records = ranks.run(
        programs.leaves_a_record, count=2, args=(str(tmp_path),), env={"PENSTOCK_FLIGHT_RECORDER": str(tmp_path)}
    )
    assert [record["rank"] for record in records] == [0, 1]
    for record in records:
        assert any(one["operation"].startswith("all_gather") for one in record["operations"])
        assert all(group["failed"] is None for group in record["groups"])


@pytest.mark.parametrize(
    ("options", "passes"),
    [
        ({}, 1),
        ({}, 3),
        ({"op": "Sum"}, 1),
        ({"compression": "fp16"}, 1),
        ({"compression": "bf16"}, 2),
        ({"gradient_predivide_factor": 2.0}, 1),
        ({"gradient_predivide_factor": 2.0, "compression": "fp16"}, 2),
        ({"groups": 2}, 1),
        ({"groups": "lists"}, 2),
        ({"named_parameters": None}, 1),
        ({"sparse": True}, 1),
        ({"sparse": True, "sparse_as_dense": True}, 1),
    ],
)
@pytest.mark.parametrize("count", [2, 3])
def test_training_is_that_of_one_process(options: dict[str, Any], passes: int, count: int) -> None:
    """Parameters after four steps are those of a process that sees all batches, and the same bits on all ranks."""
    alike(ranks.run(programs.training, count=count, args=(options, passes)))


def test_passes_that_raise() -> None:
    """See the program."""
    alike(ranks.run(programs.passes_that_raise, count=2))


def test_closures() -> None:
    """Gradients that a closure makes are reduced before they are applied: all ranks end with the same weights."""
    alike(ranks.run(programs.closures, count=2))


def test_late_parameters() -> None:
    """Gradients of parameters that are not reduced are refused by name before the step."""
    ranks.run(programs.late_parameters, count=2)


def test_passes_are_counted() -> None:
    """See the program."""
    ranks.run(programs.passes_are_counted, count=2)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("through_buckets", [True, False])
def test_join_with_uneven_data(count: int, through_buckets: bool) -> None:
    """Through buckets, whose steps a joined rank has to haunt, and by names."""
    alike(ranks.run(programs.uneven_data, count=count, args=(through_buckets,)))


def test_join_refuses_what_has_no_zeros() -> None:
    """Seven operations, seven texts, on the rank that is left."""
    texts = ranks.run(programs.joined_refuses, count=2)[0]
    reductions = [f"Allreduce with op={op}" for op in ("Min", "Max", "Product")]
    kinds = ("Allgather", "Broadcast", "Alltoall", "Reducescatter", *reductions)
    assert [text.partition(" is not supported with Join")[0] for text in texts] == list(kinds)


def test_process_sets_that_init_makes() -> None:
    """Their numbers are in order, and a duplicate is refused."""
    alike(answers := ranks.run(programs.static_process_sets, count=3))
    assert answers[0] == [
        "ProcessSet(process_set_id=0, ranks=[0, 1, 2], mpi_comm=None)",
        "ProcessSet(process_set_id=1, ranks=[0], mpi_comm=None)",
        "ProcessSet(process_set_id=2, ranks=[0, 2], mpi_comm=None)",
    ]


def test_init_with_some_of_the_ranks() -> None:
    """They are numbered anew, and do not wait for the others."""
    assert ranks.run(programs.some_of_the_ranks, count=3) == [[(0, 0), (1, 2)], [], [(0, 0), (1, 2)]]


def test_some_of_the_ranks_and_then_all() -> None:
    """See the program."""
    assert ranks.run(programs.some_then_all, count=3) == [[[0, 1, 2]] * 3] * 3


@pytest.mark.parametrize("backend", ["penstock", "gloo"])
def test_beside_a_process_group_of_the_script(backend: str) -> None:
    """Two all-reduces of two ranks' ones."""
    assert ranks.run(programs.beside_a_group_of_the_script, count=2, args=(backend,)) == [4.0, 4.0]


def test_started_by_mpirun() -> None:
    """Open MPI's variables are enough on one host."""
    unset = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK"))
    unset |= dict.fromkeys(("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID"))
    of_rank = {
        rank: {
            "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        }
        for rank in range(2)
    }
    assert ranks.run(programs.started_by_mpirun, count=2, env=unset, env_of_rank=of_rank) == [[0, 1], [0, 1]]


def test_timeline(tmp_path: pathlib.Path) -> None:
    """See the program."""
    ranks.run(programs.timeline, count=2, args=(str(tmp_path / "timeline.json"),))


@pytest.mark.parametrize("events", [1, 10_000])
def test_a_full_disk_ends_the_timeline_alone(events: int, caplog: pytest.LogCaptureFixture) -> None:
    """In its middle, or when what is in memory is written at its end: with one warning, and the job goes on."""
    timeline = Timeline()
    timeline.start("/dev/full", mark_cycles=True)
    for number in range(events):
        timeline.negotiating(f"allreduce.{number}", "ALLREDUCE")
        timeline.cycle()
    timeline.stop()
    (warning,) = caplog.messages
    assert "its file /dev/full is incomplete: No space left" in warning


# ------------------------------------------------------------------------------------------------ faults


def test_a_killed_rank_fails_the_others() -> None:
    """HorovodInternalError on every survivor within ten seconds of a SIGKILL, and shutdown ends."""
    with ranks.Ranks(programs.waits_for_death, count=3) as job:
        job.await_note("running", deadline_s=30)
        killed_s = job.signal(1, signal.SIGKILL)
        outcomes = job.outcomes(timeout_s=30, of=[0, 2], grace_s=None)
        for rank, outcome in zip((0, 2), outcomes, strict=True):
            assert outcome.ok, outcome
            (failed_s,) = job.await_note("failed", deadline_s=1, of=[rank])
            assert failed_s - killed_s < 10


def test_a_death_fails_all_that_was_agreed_on() -> None:
    """Also operations that come after the one that could not start: a script that waited for them would hang."""
    env = {"HOROVOD_CYCLE_TIME": "300"}  # so long that one round has all three
    with ranks.Ranks(programs.dies_before_it_starts, count=2, env=env) as job:
        (outcome,) = job.outcomes(timeout_s=40, of=[0], grace_s=None)
    assert outcome.ok, outcome
    assert len(outcome.value) == 3 and all("rank 1" in text for text in outcome.value), outcome


@pytest.mark.parametrize("waits_for", ["the same", "another"])
def test_a_rank_that_cannot_execute_fails_the_others(waits_for: str) -> None:
    """At once, although it lives, and they are told why."""
    first, own, other = ranks.run(programs.cannot_execute, count=3, args=(waits_for,))
    assert own == ["no room for 4 EB"] * 2
    told = "rank 1 cannot execute Horovod's operations any more (MemoryError: no room for 4 EB)"
    for texts in (first, other):
        assert len(texts) == (2 if waits_for == "the same" else 3) and all(told in text for text in texts), texts


def test_what_a_death_has_failed_is_let_go() -> None:
    """See the program."""
    with ranks.Ranks(programs.lets_go_after_a_death, count=2) as job:
        job.await_note("running", deadline_s=30)
        job.signal(1, signal.SIGKILL)
        (outcome,) = job.outcomes(timeout_s=30, of=[0], grace_s=None)
        assert outcome.ok and outcome.value == [], outcome


@pytest.mark.parametrize("in_a_step", [False, True])
def test_a_rank_that_leaves_fails_what_waits_for_it(in_a_step: bool) -> None:
    """Soon, and with Horovod's words."""
    assert ranks.run(programs.leaves_early, count=3, args=(in_a_step,)) == ["left", "told", "told"]


def test_what_was_agreed_on_ends_after_a_rank_has_left() -> None:
    """Also where a rank is so slow that the leaving one waits for it no longer; what comes later fails, and names who left."""
    assert ranks.run(programs.leaves_a_slow_rank, count=3) == [6.0, 6.0, 6.0]


def test_stalls_are_reported_and_ended() -> None:
    """One of the waiting ranks names the one that is missing, and both fail."""
    with ranks.Ranks(programs.stalled, count=3) as job:
        job.await_note("waits", deadline_s=30, of=[0])
        outcomes = job.outcomes(timeout_s=40, of=[1, 2])
        assert all(outcome.ok for outcome in outcomes), outcomes
        text = "".join(job.output(rank) for rank in (1, 2))
    assert "Missing ranks:\n0: [allreduce.lonely]" in text
    assert "waiting for remainder of ranks for more than 1 seconds" in text


def test_stalls_of_steps_are_reported_and_ended() -> None:
    """As those of operations; the rank that comes later is told that the job has ended."""
    with ranks.Ranks(programs.a_step_stalls, count=3) as job:
        outcomes = job.outcomes(timeout_s=60)
        assert all(outcome.ok for outcome in outcomes), outcomes
        text = "".join(job.output(rank) for rank in (1, 2))
    assert "Missing ranks:\n0: [allreduce.bias, allreduce.weight]" in text
    assert "Missing ranks:\n0!: [allreduce.bias, allreduce.weight]" in text
    assert "waiting for remainder of ranks for more than 1 seconds" in text
    assert "waited for other ranks for too long" in outcomes[0].value
    assert any("Horovod has been shut down" in outcome.value for outcome in outcomes[1:])


@pytest.mark.parametrize("count", [2, 3])
def test_elastic_restores_and_goes_on(count: int) -> None:
    """The way of the program: from the start, from the commit, from where it was."""
    alike(ranks.run(programs.elastic, count=count))


def test_elastic_keeps_objects() -> None:
    """See the program."""
    alike(ranks.run(programs.elastic_objects, count=2))


@pytest.mark.timed
def test_a_shutdown_waits_for_all_process_sets_at_once() -> None:
    """A rank that leaves alone waits a second for the others to leave as well: one for all of its seven process sets."""
    assert ranks.run(programs.leave_first, count=4)[0] < 4


def test_a_gradient_that_is_not_finite() -> None:
    """PENSTOCK_CHECK=nan through elastic.run; the tuner and the other checks say that they do not see this API."""
    told = ranks.run(programs.not_finite, count=2, env={"PENSTOCK_CHECK": "nan,slow", "PENSTOCK_TUNE": "1"})
    for lines in told:
        assert any(
            "PENSTOCK_CHECK=slow, PENSTOCK_TUNE: has no effect on hvd.DistributedOptimizer" in one for one in lines
        )


# ------------------------------------------------------------------------------------------------ Horovod's own


@corpus.needed
@pytest.mark.release
@pytest.mark.parametrize(
    ("file", "count", "passes"),
    [
        ("parallel/test_torch.py", 2, 106),
        ("parallel/test_adasum_pytorch.py", 2, 2),
        ("single/test_torch_elastic.py", 1, 2),
    ],
)
def test_horovods_own(file: str, count: int, passes: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Every test passes, or skips itself for want of a GPU, or is on the list with its reason; at least as many pass as did, and
    the counts are printed."""
    with ranks.Ranks(suite.run, count=count, args=(str(corpus.HOROVOD / file),)) as job:
        outcomes = job.outcomes(timeout_s=220)
    assert all(outcome.ok for outcome in outcomes), "\n".join(map(str, outcomes))
    for outcome in outcomes:
        failed = {name: why for name, (how, why, _) in outcome.value.items() if how == "failed"}
        assert not failed, "\n".join(f"--- {name} on rank {outcome.rank}\n{why}" for name, why in failed.items())
    results = outcomes[0].value
    for name, (how, why, _) in results.items():
        if how == "skipped":
            assert name in suite.SKIPPED or suite.NEEDS_GPU.search(why), f"{name} is skipped: {why}"
    counts = collections.Counter(how for how, _, _ in results.values())
    assert counts["passed"] >= passes, counts
    with capsys.disabled():
        print(f" {file}: {counts['passed']} passed, {counts['skipped']} skipped")


# All of Horovod's modules that have a counterpart, imported and as attributes of the packages that scripts import.
DEEP = """
import horovod
import horovod.torch as hvd
from horovod.common.elastic import run_fn
from horovod.common.exceptions import HorovodInternalError
from horovod.common.process_sets import ProcessSet
from horovod.common.util import split_list
from horovod.runner import run
from horovod.torch.compression import Compression
from horovod.torch.elastic import TorchState
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.elastic.state import ModelStateHandler
from horovod.torch.functions import broadcast_object
from horovod.torch.mpi_ops import allreduce
from horovod.torch.optimizer import DistributedOptimizer
from horovod.torch.sync_batch_norm import SyncBatchNorm

assert horovod.runner.run is horovod.run is run and horovod.torch is hvd
assert horovod.common.elastic.run_fn is run_fn and horovod.common.util.split_list is split_list
assert horovod.common.exceptions.HorovodInternalError is HorovodInternalError is hvd.HorovodInternalError
assert horovod.common.process_sets.ProcessSet is ProcessSet is hvd.ProcessSet
assert hvd.compression.Compression is Compression is hvd.Compression
assert hvd.elastic.sampler.ElasticSampler is ElasticSampler is hvd.elastic.ElasticSampler
assert hvd.elastic.state.TorchState is TorchState is hvd.elastic.TorchState and hvd.elastic.state.ModelStateHandler
assert hvd.functions.broadcast_object is broadcast_object is hvd.broadcast_object
assert hvd.mpi_ops.allreduce is allreduce is hvd.allreduce
assert hvd.optimizer.DistributedOptimizer is DistributedOptimizer is hvd.DistributedOptimizer
assert hvd.sync_batch_norm.SyncBatchNorm is SyncBatchNorm is hvd.SyncBatchNorm
"""


def test_modules_are_where_horovod_has_them(tmp_path: pathlib.Path) -> None:
    """`penstock convert` renames deeper imports, and what it writes is there."""
    converted = convert(DEEP)
    assert not converted.findings
    script = tmp_path / "deep.py"
    script.write_text(converted.text)
    done = forked.run([sys.executable, script], capture_output=True, text=True)
    assert done.returncode == 0, converted.text + done.stderr


@corpus.needed
def test_what_is_skipped_exists() -> None:
    """The list of tests that are not run names tests that are there, and files that are not."""
    assert set(suite.SKIPPED) <= suite.names()
    assert len(suite.names()) > 100
    for name in suite.NOT_IN_CORPUS:
        assert not (corpus.HOROVOD / name.removeprefix("test/")).exists()


SMALL = ["--batch-size", "32", "--no-cuda"]
# A step a log line, and enough of them to learn ten bright squares.
LEARNS = [*SMALL, "--log-interval", "1", "--lr", "0.05"]


@corpus.needed
@pytest.mark.release
@pytest.mark.parametrize(
    ("file", "arguments", "least_accuracy"),
    [
        ("pytorch_mnist.py", [*LEARNS, "--epochs", "3"], 90),
        ("pytorch_mnist.py", [*LEARNS, "--epochs", "3", "--use-adasum"], 90),
        ("pytorch_mnist.py", [*LEARNS, "--epochs", "3", "--fp16-allreduce"], 90),
        ("elastic/pytorch_mnist_elastic.py", [*LEARNS, "--epochs", "3"], 90),
        (
            "pytorch_synthetic_benchmark.py",
            ["--batch-size", "2", "--num-warmup-batches", "1", "--num-batches-per-iter", "2", "--num-iters", "2"],
            None,
        ),
        (
            "elastic/pytorch_synthetic_benchmark_elastic.py",
            ["--batch-size", "2", "--num-warmup-batches", "1", "--num-batches-per-iter", "2", "--num-iters", "2"],
            None,
        ),
    ],
)
def test_horovods_examples_run(
    file: str, arguments: list[str], least_accuracy: int | None, tmp_path: pathlib.Path
) -> None:
    """As `penstock convert` leaves them, with nothing left to do by hand, where Horovod cannot be imported; data need no
    download. Those that train learn: the loss falls, and most of the test set is recognised."""
    script = _converted(file, tmp_path)
    printed = ranks.run(programs.example, count=2, args=(str(script), arguments, str(tmp_path)), timeout_s=120)
    if least_accuracy is None:
        (speed,) = re.findall(r"Total img/sec on 2 CPU\(s\): ([\d.]+)", printed[0])
        assert float(speed) > 0
        return
    for text in printed:
        losses = [float(loss) for loss in re.findall(r"Train Epoch: .*Loss: ([\d.]+)", text)]
        assert len(losses) == 30, text
        assert sum(losses[-5:]) < 0.5 * sum(losses[:5]), losses
    accuracies = [float(one) for one in re.findall(r"Test set: Average loss: .*Accuracy: ([\d.]+)%", printed[0])]
    assert accuracies and accuracies[-1] >= least_accuracy, printed[0]


@corpus.needed
@pytest.mark.release
def test_horovod_run_of_an_example(tmp_path: pathlib.Path) -> None:
    """``--num-proc`` makes the converted example start its own ranks by ``horovod.run``; both train."""
    script = _converted("pytorch_mnist.py", tmp_path)
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(
        "import torchvision_stand_in\n\ntorchvision_stand_in.install()\n"
    )
    done = forked.run(
        [sys.executable, str(script), *SMALL, "--epochs", "1", "--num-proc", "2"],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
            "HOME": str(tmp_path),
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    # Ten batches of 32 for each of two ranks are all of the 640 samples.
    assert done.stdout.count("Train Epoch: 1 [0/320 (0%)]") == 2, done.stdout
    assert done.stdout.count("Test set: Average loss") == 1, done.stdout


@pytest.fixture
def run_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """`horovod.run` has its ranks from the fork server that has imported torch, and does not spawn them."""
    launcher = importlib.import_module("torch.distributed.launcher.api")
    monkeypatch.setattr(launcher, "LaunchConfig", functools.partial(launcher.LaunchConfig, start_method="forkserver"))
    ranks.fork_server()


def test_horovod_run_gives_results_by_rank(tmp_path: pathlib.Path, request: pytest.FixtureRequest) -> None:
    """Arguments arrive, results come back in the order of ranks, output goes where it is wanted, closures can be sent. The first
    ranks are fresh interpreters."""
    import penstock.horovod as horovod

    offset = 5
    functions: list[Any] = [programs.sum_of_ranks]
    if importlib.util.find_spec("cloudpickle") is not None:
        functions.append(lambda first, second: offset + programs.sum_of_ranks(first, second))
    for function, more in zip(functions, (0, offset), strict=False):
        if more:
            request.getfixturevalue("run_forks")
        results = horovod.run(
            function, args=(10,), kwargs={"second": 2}, num_proc=2, hosts="localhost:2", output_filename=str(tmp_path)
        )
        assert results == [more + 10 + 2 + 1 + 0, more + 10 + 2 + 1 + 100]
        assert [(tmp_path / f"rank.{rank}" / "stdout").read_text() for rank in range(2)] == [
            "this is 0\n",
            "this is 1\n",
        ]


@pytest.mark.usefixtures("run_forks")
@pytest.mark.parametrize("how", ["returns", "exits"])
def test_horovod_run_ends_with_a_rank_that_is_done_early(how: str) -> None:
    """A rank whose function has returned, or has called sys.exit(), has shut Horovod down: who waits for it hears that. torch
    keeps its process until all have returned, so that they waited for each other."""
    import penstock.horovod as horovod

    with pytest.raises(RuntimeError, match="rank 1 has shut Horovod down"):
        horovod.run(programs.rank_one_is_done, (how,), num_proc=2)


@pytest.mark.usefixtures("run_forks")
def test_horovod_run_says_what_failed() -> None:
    """A rank that raises ends the job, and the error says which and what; what cannot be had is refused before."""
    import penstock.horovod as horovod

    with pytest.raises(RuntimeError, match="rank 1: ValueError: only rank 0 can"):
        horovod.run(programs.rank_one_fails, num_proc=2)
    for options, told in [
        ({"hosts": "elsewhere:2"}, "elsewhere is another one"),
        ({"hosts": "localhost:1", "num_proc": 2}, "1 slots, and 2 processes"),
        ({"hosts": "localhost:2", "hostfile": "x"}, "only allow one provided"),
        ({"use_gloo": True, "use_mpi": True}, "only allow one set True"),
        ({"use_mpi": True}, "without MPI"),
        ({"min_num_proc": 1}, "no elastic job"),
        ({"num_proc": 0}, "no number of processes"),
        ({"executable": "/bin/other"}, "as this process does"),
    ]:
        with pytest.raises(ValueError, match=told):
            horovod.run(programs.rank_one_fails, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("file", "arguments", "expected"),
    [("horovod_train.py", [], "on 2 ranks"), ("horovod_elastic.py", ["--fail-at", "3"], "rank 1 of 2 starts again")],
)
def test_our_examples_run(
    root: pathlib.Path, file: str, arguments: list[str], expected: str, tmp_path: pathlib.Path
) -> None:
    """As the main programs of ranks with the environment of torchrun, which docs/guide/horovod.md starts them with."""
    path = str(root / "examples" / file)
    printed = "".join(ranks.run(programs.example, count=2, args=(path, ["--steps", "6", *arguments], str(tmp_path))))
    assert "loss" in printed and expected in printed, printed


def test_a_rank_that_is_killed_under_torchrun(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """SIGKILL: torchrun starts all ranks again, they go on from the last commit that is on disk, and end with the loss of a run
    that nothing happened to."""
    torchrun = [*forked.TORCHRUN, "--nproc-per-node=2", "--max-restarts=1"]
    # Far more steps than pass until the signal has arrived.
    script, steps = str(root / "examples" / "horovod_elastic.py"), "--steps=1000"
    disturbed = _printed([*torchrun, script, steps, f"--checkpoint={tmp_path / 'state.pt'}"], 1, "step 20 is on disk")
    undisturbed = ranks.run(programs.example, count=2, args=(script, [steps], str(tmp_path)))[0]
    goes_on = re.findall(r"rank (\d) of 2, process \d+, goes on after step (\d+)", disturbed)
    assert goes_on[:2] in ([("0", "0"), ("1", "0")], [("1", "0"), ("0", "0")])
    (_, first), (_, second) = goes_on[2:]
    assert first == second and 20 <= int(first) < 1000 and int(first) % 10 == 0, disturbed
    ends = [re.findall(r"loss (\S+) after 1000 steps", text) for text in (disturbed, undisturbed)]
    assert ends[0] == ends[1] and len(ends[0]) == 1, ends


def _converted(file: str, folder: pathlib.Path) -> pathlib.Path:
    """One of Horovod's examples as `penstock convert` leaves it, in which nothing must be left to do by hand."""
    converted = convert((corpus.HOROVOD / "examples" / file).read_text())
    assert converted.findings == []
    script = folder / "converted.py"
    script.write_text(converted.text)
    return script


def _printed(command: list[str], kill_rank: int, at: str) -> str:
    """What a job prints that ends well; the first process of a rank is killed when ``at`` is printed."""
    text, killed = "", False
    with forked.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as job:
        # A job that hangs says nothing, and reading would wait for ever.
        deadline = threading.Timer(200, os.killpg, (job.pid, signal.SIGKILL))
        deadline.start()
        try:
            assert job.stdout is not None
            for line in job.stdout:
                text += line
                if at in line and not killed:
                    process = re.search(rf"rank {kill_rank} of \d+, process (\d+)", text)
                    assert process is not None, text
                    os.kill(int(process[1]), signal.SIGKILL)
                    killed = True
            assert job.wait(60) == 0, text
        finally:
            deadline.cancel()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
    assert killed, text
    return text
