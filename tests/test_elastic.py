"""Proves that a job outlives its workers: live, with a newcomer in a dead one's place, and from its last checkpoint.

Workers are real processes that die of real signals. Each trains a small model on a known data set with the batches that an
ElasticSampler deals out, and tells what it did, so that every story can be compared with one process that did it alone.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import datetime
import errno
import hashlib
import itertools
import logging
import os
import pathlib
import random
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import torch.distributed as dist

import forked
import ranks
from penstock import elastic, endpoint, errors
from penstock.runtime import process
from penstock.training.elastic import loop, membership
from penstock.training.elastic import store as kept_store
from penstock.training.elastic.membership import Lobby, Report, Roster, Rules, decide
from penstock.training.elastic.sampler import cut

SAMPLES, BATCH = 97, 4

# Shorter than the defaults, so that tests are; the machine may be busy, so not as short as they could be.
FAST = {"window_s": 3.0, "rebuild_timeout_s": 15.0, "wait_s": 40.0, "check_every": 2}
# Nobody begins before three are there; the window is long, so that its end is not what lets the survivors go on.
START_WITH_3 = {"max_ranks": 3, "window_s": 30.0}


# ------------------------------------------------------------------------------------------------------ live: deaths


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_is_killed_in_an_all_reduce(store: str, victim: int) -> None:
    """SIGKILL while the others wait in the step's all-reduce: both go on with the same bits, and repeat that step alone. Who had
    not read all of the step before from the memory that went with the rank gets it from the other one, or both repeat it."""
    with _workers(store, 3, Story(12, block=(1, victim, 6), options=START_WITH_3)) as job:
        ranked = _by_rank(job, 3)
        dying = ranked.pop(victim)
        job.await_note("blocked", deadline_s=30, of=[dying])
        job.signal(dying, signal.SIGKILL)
        survivors = _ended_well(job, ranked)
        assert "could not be built" not in job.output(ranked[0])
    assert {one.digest for one in survivors} == {survivors[0].digest}
    possible = [[(step, 3 if step < first_alone else 2) for step in range(1, 13)] for first_alone in (5, 6)]
    whole = max(survivors, key=lambda one: len(one.worlds))
    assert whole.worlds in possible
    for one in survivors:
        assert one.worlds == whole.worlds or [*one.worlds[:4], (5, 3), *one.worlds[4:]] == whole.worlds
    _same_as_alone(whole)


def test_a_rank_is_killed_in_a_rebuild(store: str) -> None:
    """One dies, and a second one when the survivors have agreed on a generation and are about to connect: the third tries
    again without it, and trains to the end."""
    story = Story(
        12, block=(1, 2, 6), block_rebuild=(2, 1), options={**START_WITH_3, "window_s": 3, "rebuild_timeout_s": 3}
    )
    with _workers(store, 3, story) as job:
        ranked = _by_rank(job, 3)
        job.await_note("blocked", deadline_s=30, of=[ranked[2]])
        job.signal(ranked[2], signal.SIGKILL)
        job.await_note("rebuilds", deadline_s=30, of=[ranked[1]])
        job.signal(ranked[1], signal.SIGKILL)
        (last,) = _ended_well(job, [ranked[0]])
        assert "generation 2 (2 ranks) could not be built" in job.output(ranked[0])
    assert last.worlds == [(step, 3 if step < 6 else 1) for step in range(1, 13)]
    _same_as_alone(last)


def test_who_has_failed_to_build_a_generation_meets_who_has_not() -> None:
    """A worker whose last generation could not be built and one that comes anew have one name for the next group. torch counts a
    group that was not built, and the count is the name (the same over gloo)."""
    assert ranks.run(_meet_after_a_failure, count=2, timeout_s=40) == [3.0, 3.0]


def test_a_rank_is_lost_after_the_group_timed_out() -> None:
    """The group's failure is the time-out; that a rank was lost as well still ends the generation, and not the job."""
    with ranks.Ranks(_lose_a_rank_after_a_time_out, count=2) as job:
        job.await_note("timed out", of=[0], deadline_s=60)
        job.signal(1, signal.SIGKILL)
        [outcome] = job.outcomes(of=[0], timeout_s=60)
        assert outcome.value is True, str(outcome)


def test_a_client_of_endpoints_that_dies_is_no_member() -> None:
    """It is a peer of the engine, and has a member's number; the member is not lost."""
    env = {"PENSTOCK_PEER_TIMEOUT": "2"}
    with ranks.Ranks(_lose_a_client, count=3, env=env) as job:
        assert [one.value for one in job.outcomes(timeout_s=60, of=[0, 1])] == [[1], []]


def test_an_endpoint_of_an_earlier_generation_is_told(store: str) -> None:
    """It keeps the engine, which the others' new one would refuse for ever."""
    env = {"PENSTOCK_ELASTIC_STORE": store}
    [said] = ranks.run(_keep_an_endpoint, count=1, env=env)
    assert "an endpoint (penstock.endpoint) of this process was opened before generation 1" in said


def test_too_few_ranks_wait_and_then_say_what_to_do(store: str) -> None:
    """Below min_ranks the survivors wait, and the error says how to go on; their state is that of the last commit."""
    story = Story(12, block=(1, 1, 6), options={"min_ranks": 3, "max_ranks": 3, "wait_s": 5})
    with _workers(store, 3, story) as job:
        ranked = _by_rank(job, 3)
        job.await_note("blocked", deadline_s=30, of=[ranked[1]])
        # They may be in the step before, which the one that is killed has committed.
        job.await_note("step 5", deadline_s=30, of=[ranked[0], ranked[2]])
        job.signal(ranked[1], signal.SIGKILL)
        for outcome in job.outcomes(of=[ranked[0], ranked[2]], timeout_s=60, grace_s=None):
            assert outcome.raised is not None and outcome.raised.is_a("TooFew"), str(outcome)
            assert outcome.raised.is_a("TimeoutError"), str(outcome)
            for part in (
                "min_ranks is 3",
                "Start more workers with the same PENSTOCK_ELASTIC_STORE",
                "committed 5 step",
            ):
                assert part in outcome.raised.text


def test_a_worker_that_has_waited_in_reserve_says_so() -> None:
    """The job is full and trains: the error says that nothing is wrong, before it says what to do if all members are gone."""
    first, reserve = ranks.run(_wait_in_reserve, count=2)
    assert first == "done"
    assert "If they train, all is well: the job is full (max_ranks=1), and this worker was in reserve" in reserve


def _wait_in_reserve() -> str:
    store = _store()
    if os.environ["RANK"] == "1":
        store.wait(["penstock/elastic/default/committed"])

    def train(state: elastic.State) -> None:
        state.commit()
        store.wait(["reserve has waited"], datetime.timedelta(seconds=60))

    try:
        elastic.run(train, elastic.State(), store=store, **{**FAST, "wait_s": 1.0}, max_ranks=1)
    except elastic.StateLost as error:
        store.set("reserve has waited", "")
        return str(error)
    return "done"


def test_the_state_of_a_checkpoint_is_the_jobs() -> None:
    """Whoever has loaded one gives it to all, also if it is not the oldest member: training began anew at step 0 otherwise."""
    assert ranks.run(_begin_with_a_checkpoint, count=2) == [(500, 1.5), (500, 1.5)]
    reports = [Report(1, -1), Report(2, -1, begins=500), Report(3, -1, begins=7)]
    chosen, _ = decide(reports, (), 0, 0, Rules(min_ranks=1, max_ranks=2))
    assert [one.member for one in chosen] == [2, 3], "not in reserve either"


def _begin_with_a_checkpoint() -> tuple[int, float]:
    store, state = _store(), elastic.State(total=0.0)
    if os.environ["RANK"] == "1":
        state.step, state.total = 499, 1.5
        state.commit()
        store.wait(["penstock/elastic/default/1/slot/1"])
    elastic.run(lambda _: None, state, store=store, **FAST, min_ranks=2, max_ranks=2)
    return state.step, state.total


def test_what_no_rebuild_cures_is_raised() -> None:
    """``train`` raises the same in each generation, with the same members, and no step is done: that ends, with the reason."""
    ended = ranks.run(_closed_again_and_again, count=2)
    assert [text for text, _ in ended] == ["the reducer is closed"] * 2
    assert max(times for _, times in ended) == loop._FUTILE


def _closed_again_and_again() -> tuple[str, int]:
    times = itertools.count(1)

    def train(_: elastic.State) -> None:
        if next(times) > 2 * loop._FUTILE:
            return
        dist.barrier()
        raise errors.Closed("the reducer is closed")

    try:
        elastic.run(train, elastic.State(), store=_store(), **{**FAST, "window_s": 0.5}, min_ranks=2, max_ranks=2)
    except errors.Closed as error:
        return str(error), next(times) - 1
    return "nothing was raised", next(times) - 1


def test_errors_of_train_that_look_like_the_store() -> None:
    """A store of the script's own that does not answer, and a group that ``train`` or the script itself has made or destroyed."""
    [(own_store, destroyed, made)] = ranks.run(_errors_of_train, count=1)
    assert "127.0.0.1, 1)" in own_store and "elastic job" not in own_store
    assert "train() has destroyed the default process group" in destroyed
    assert "there is a default process group already" in made


def _errors_of_train() -> list[str]:
    store = _store()

    def asks(_: elastic.State) -> None:
        dist.TCPStore("127.0.0.1", 1, None, False, datetime.timedelta(seconds=0.2))

    def destroys(_: elastic.State) -> None:
        dist.destroy_process_group()

    texts = []
    for train in (asks, destroys, lambda _: None):
        if len(texts) == 2:
            dist.init_process_group("penstock")
        with pytest.raises((dist.DistError, errors.Config)) as caught:
            elastic.run(train, elastic.State(), store=store, job=f"job {len(texts)}", window_s=0.1)
        texts.append(str(caught.value))
    assert dist.is_initialized(), "the group is the script's"
    dist.destroy_process_group()
    return texts


def _store() -> Any:
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


@pytest.mark.parametrize(
    ("host", "port", "why"),
    [("127.0.0.1", None, "in use"), ("192.0.2.1", 0, "assign"), ("127.0.0.1", 99999, "0-65535"), ("no such", 0, "")],
)
def test_a_store_that_cannot_listen_says_so(
    host: str, port: int | None, why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a line: its port is taken, or its address is no one of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1] if port is None else port
        monkeypatch.setattr(sys, "argv", ["store", f"--host={host}", f"--port={port}"])
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        try:
            with pytest.raises(SystemExit):
                kept_store.main()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    error = capsys.readouterr().err
    assert f"cannot listen on {host}, port {port}: " in error and why in error


def test_the_store_dies() -> None:
    """Training goes on without its store. The next death then ends the job, with an error that says why and what to do."""
    with contextlib.ExitStack() as stack:
        kept = _started(stack, [sys.executable, "-m", "penstock.elastic.store", "--port=0"], {})
        assert kept.stdout is not None
        name, _, address = kept.stdout.readline().strip().partition("=")
        assert name == "PENSTOCK_ELASTIC_STORE"
        # The world that ends it never comes.
        story = Story(1, count_from_world=9, options={"min_ranks": 2, "max_ranks": 3, "window_s": 1})
        job = stack.enter_context(_workers(address, 2, story))
        ranked = _by_rank(job, 2)
        job.await_note("step 5", deadline_s=30)
        kept.terminate()
        assert kept.wait(10) == 0, "the store ends when it is told to"
        job.await_note("without the store", deadline_s=30, of=[ranked[0]])
        job.signal(ranked[1], signal.SIGKILL)
        (left,) = job.outcomes(of=[ranked[0]], timeout_s=60, grace_s=None)
        assert left.raised is not None and left.raised.is_a("penstock.errors.Config"), str(left)
        assert "the store of elastic job 'default' is gone" in left.raised.text
        assert left.output.count("the elastic store does not answer") == 1


def test_the_store_dies_before_the_end(tmp_path: pathlib.Path) -> None:
    """A training that ends without its store returns its result on all ranks, with a warning."""
    with contextlib.ExitStack() as stack:
        kept = _started(stack, [sys.executable, "-m", "penstock.elastic.store", "--port=0"], {})
        assert kept.stdout is not None
        env = {"PENSTOCK_ELASTIC_STORE": kept.stdout.readline().strip().partition("=")[2]}
        job = stack.enter_context(ranks.Ranks(_work_until, count=2, args=(str(tmp_path / "end"),), env=env))
        job.await_note("step 5", deadline_s=30)
        kept.terminate()
        kept.wait(10)
        (tmp_path / "end").touch()
        ended = job.outcomes(timeout_s=60)
    assert all(one.ok for one in ended), ended
    assert ended[0].value == ended[1].value > 5
    for one in ended:
        assert "run() returns its result" in one.output
        assert "timed out after" not in one.output


def test_a_stopped_rank_is_left_behind_and_comes_back(store: str) -> None:
    """SIGSTOP beyond the limit counts as a death. When it goes on, the stopped one learns it, and joins as a newcomer."""
    story = Story(10, block=(1, 1, 6), count_from_world=3, count_from=3, rejoin=True, options=START_WITH_3)
    with _workers(store, 3, story) as job:
        ranked = _by_rank(job, 3)
        job.await_note("blocked", deadline_s=30, of=[ranked[1]])
        job.await_note("generation 2", deadline_s=30, of=[ranked[0], ranked[2]])
        job.signal(ranked[1], signal.SIGCONT)
        everybody = _ended_well(job, [0, 1, 2])
        assert "went on without this worker" in job.output(ranked[1])
    assert {one.digest for one in everybody} == {everybody[0].digest}
    _same_as_alone(everybody[ranked[0]])


def test_all_members_die_before_the_first_commit(store: str) -> None:
    """Nobody has reported, and nothing is lost: newcomers begin as soon as they know of the deaths, not after ``wait_s``."""
    with _workers(store, 2, Story(6, block=(1, 1, 1), options={"min_ranks": 2, "max_ranks": 2})) as dying:
        dying.await_note("blocked", deadline_s=60, of=[_by_rank(dying, 2)[1]])
        # Stopped first: the death of one would make the other report.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for rank in (0, 1):
                dying.signal(rank, number)
        with _workers(store, 2, Story(6, options={"min_ranks": 2, "max_ranks": 2})) as new:
            everybody = _ended_well(new, [0, 1])
    assert {one.digest for one in everybody} == {everybody[0].digest}
    assert everybody[0].worlds == [(step, 2) for step in range(1, 7)]
    _same_as_alone(everybody[0])


# -------------------------------------------------------------------------------------------------- live: newcomers


def test_everything_under_torchrun(root: pathlib.Path, store: str) -> None:
    """As the documentation tells it: a torchrun for each worker. One worker is killed, and its torchrun starts it again as a
    newcomer; all end with the same weights."""
    with contextlib.ExitStack() as stack:
        script = [str(root / "examples" / "elastic_live.py"), "--steps=300", "--min-ranks=2", "--max-ranks=2"]
        torchrun = [*forked.TORCHRUN, "--nnodes=1", "--max-restarts=1"]
        jobs = [_started(stack, [*torchrun, *script], {"PENSTOCK_ELASTIC_STORE": store}) for _ in range(2)]
        outputs = ["", ""]
        readers = [threading.Thread(target=_read_and_kill, args=(index, jobs, outputs)) for index in (0, 1)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(100)
        assert [job.wait(10) for job in jobs] == [0, 0], "\n".join(outputs)
        ends = re.findall(r"ends after step (\d+), sum of weights (\S+)", "".join(outputs))
        assert len(ends) == 2 and ends[0] == ends[1] and ends[0][0] == "300", "\n".join(outputs)
        assert "generation 2: rank 0 of 2" in "".join(outputs), "the signal came too late"


def test_a_newcomer_gets_everything_from_a_peer(store: str) -> None:
    """2 ranks become 3 between two steps; model, optimizer, values and place in the epoch end the same on all."""
    story = Story(steps=10, count_from_world=3, options={"min_ranks": 2, "max_ranks": 3})
    with _workers(store, 2, story) as old:
        old.await_note("step 3", deadline_s=60)
        with _workers(store, 1, story) as new:
            everybody = [*_ended_well(old, [0, 1]), *_ended_well(new, [0])]
    assert {one.digest for one in everybody} == {everybody[0].digest}
    assert [world for _, world in everybody[0].worlds][-10:] == [3] * 10
    assert everybody[2].worlds == everybody[0].worlds[-10:], "the newcomer repeated or missed a step"
    _same_as_alone(everybody[0])


# ---------------------------------------------------------------------------------------------------------- restart


def test_torchrun_restarts_and_goes_on_from_the_last_checkpoint(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A worker is killed under torchrun: the restarted ones go on from a checkpoint, and the losses are those of a run that
    nothing happened to."""
    # Far more steps than pass until the signal has arrived.
    options = ["--steps=300", "--every=10", f"--checkpoints={tmp_path / 'checkpoints'}"]
    torchrun = [*forked.TORCHRUN, "--nproc-per-node=2", "--max-restarts=1"]
    disturbed = _printed([*torchrun, str(root / RESTARTABLE), *options], kill_at="rank 1 step 15")
    with ranks.Ranks(
        _restartable, count=2, args=(str(root), "--steps=300", f"--checkpoints={tmp_path / 'other'}")
    ) as job:
        job.outcomes(timeout_s=60)
        undisturbed = "".join(job.output(rank) for rank in (0, 1))
    began = sorted(re.findall(r"rank (\d) restart 1: goes on after step (\d+)", disturbed))
    assert [rank for rank, _ in began] == ["0", "1"] and began[0][1] == began[1][1]
    assert 10 <= int(began[0][1]) < 300 and int(began[0][1]) % 10 == 0
    # Of a step that was repeated the later loss counts. What is killed may have taken a step that it has not printed yet, and its
    # checkpoint be there.
    told, whole = _losses(disturbed), _losses(undisturbed)
    assert told == {step: whole[step] for step in told}
    assert whole.keys() - told.keys() <= {f"rank 1 step {began[0][1]}"}
    assert len(_losses(undisturbed)) == 2 * 300


def test_a_damaged_checkpoint_is_passed_over(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """Bytes changed, cut short, or an unfinished file beside it: the newest one that is whole is loaded; few are kept."""
    checkpoints, state = elastic.Checkpoints(tmp_path, keep=3), _state(seed=1)
    assert not checkpoints.load(state), "there is none yet"
    for _ in range(5):
        _loss(state.model, [0, 1, 2]).backward()
        state.optimizer.step()
        state.commit()
        checkpoints.save(state)
        if state.step == 3:
            third = _digest(state)
    kept = sorted(tmp_path.glob("*.pt"))
    assert [path.name[:17] for path in kept] == [f"step-{step:012d}" for step in (3, 4, 5)]
    (tmp_path / "unfinished").write_bytes(b"half a checkpoint")
    damaged = bytearray(kept[2].read_bytes())
    damaged[len(damaged) // 2] ^= 1
    kept[2].write_bytes(damaged)
    kept[1].write_bytes(kept[1].read_bytes()[:-100])
    other = _state(seed=2)
    assert checkpoints.load(other)
    assert other.step == 3 and _digest(other) == third
    assert caplog.text.count("do not fit its name") == 2


def test_checkpoints_that_cannot_be_read_are_no_fresh_start(tmp_path: pathlib.Path) -> None:
    """A folder that cannot be listed, a file in its place, and checkpoints that are all damaged raise: training began anew."""
    checkpoints, state = elastic.Checkpoints(tmp_path / "all"), _state(seed=1)
    checkpoints.save(_committed(state))
    assert ranks.run(_load_where_nothing_may_be_listed, count=1) == ["PermissionError"]
    (path,) = checkpoints.folder.iterdir()
    path.write_bytes(b"damaged")
    with pytest.raises(errors.Config, match=r"holds 1 checkpoint\(s\), and none can be read"):
        checkpoints.load(state)
    with pytest.raises(NotADirectoryError):
        elastic.Checkpoints(path).load(state)


def _load_where_nothing_may_be_listed() -> str:
    """The name of the error."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o311)
        if os.geteuid() == 0:  # which may list everything
            os.seteuid(65534)
        try:
            elastic.Checkpoints(folder).load(_state(seed=2))
        except OSError as error:
            return type(error).__name__
        finally:
            os.seteuid(os.getuid())
    return "none"


def test_a_fresh_run_in_an_old_folder_keeps_its_own_checkpoints(tmp_path: pathlib.Path) -> None:
    """It saves at lower steps than what lies there: its own are kept and loaded again, and the other run's are left alone. A
    restarted run that loads its last checkpoint goes on in its place."""
    old = _state(seed=1)
    for old.step in (1000, 2000, 3000):
        elastic.Checkpoints(tmp_path, keep=2).save(_committed(old))
    old_ones = {path.name for path in tmp_path.iterdir()}
    assert len(old_ones) == 2
    fresh = _state(seed=2)
    for fresh.step in (10, 20, 30):
        elastic.Checkpoints(tmp_path, keep=2).save(_committed(fresh))
    restarted = _state(seed=3)
    assert elastic.Checkpoints(tmp_path).load(restarted)
    assert restarted.step == 31 and _digest(restarted) == _digest(fresh)
    # Another life of the fresh run: it prunes what that run has left, and nothing else.
    for restarted.step in (40, 50):
        elastic.Checkpoints(tmp_path, keep=2).save(_committed(restarted))
    kept = {path.name for path in tmp_path.iterdir()}
    assert old_ones < kept
    assert sorted(int(name[5:17]) for name in kept - old_ones) == [41, 51]


def test_a_checkpoint_that_could_not_be_loaded_is_not_written(tmp_path: pathlib.Path) -> None:
    """A value that only pickled code can load, such as NumPy's, is refused when it is saved, and in a file of an older release
    when it is loaded: training does not begin anew without a word. The checkpoint before it stays."""
    checkpoints, state = elastic.Checkpoints(tmp_path), _state(seed=1)
    state.total = 1.5
    checkpoints.save(_committed(state))
    before = set(tmp_path.iterdir())
    state.total = np.float64(2.5) * np.ones(2).mean()
    with pytest.raises(errors.Config, match=r"no checkpoint was written.*'total': 'float64'"):
        checkpoints.save(_committed(state))
    assert set(tmp_path.iterdir()) == before
    other = _state(seed=2)
    assert checkpoints.load(other) and other.total == 2.5
    old = tmp_path / "unfinished"
    torch.save(state.snapshot(), old)
    old.rename(tmp_path / f"step-{state.step:012d}-{hashlib.sha256(old.read_bytes()).hexdigest()[:16]}.pt")
    with pytest.raises(errors.Config, match="is complete, but its state holds values"):
        checkpoints.load(other)


def test_a_full_disk_keeps_the_checkpoint_before(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that cannot be written is removed, and the one before is loaded."""
    checkpoints, state = elastic.Checkpoints(tmp_path), _state(seed=1)
    checkpoints.save(_committed(state))
    before = set(tmp_path.iterdir())

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            checkpoints.save(_committed(state))
    assert set(tmp_path.iterdir()) == before


def test_a_checkpoint_of_another_model_changes_nothing(tmp_path: pathlib.Path) -> None:
    """All ranks raise, the state is as last committed, and the group lives."""
    for text in ranks.run(_load_of_another_model, count=2, args=(str(tmp_path),)):
        assert "size mismatch" in text, text


def _load_of_another_model(folder: str) -> str:
    dist.init_process_group("penstock", timeout=datetime.timedelta(seconds=20))
    checkpoints = elastic.Checkpoints(folder)
    checkpoints.save(elastic.State(step=3, first=torch.nn.Linear(2, 1), last=torch.nn.Linear(3, 4)))
    state = elastic.State(step=7, first=torch.nn.Linear(2, 1), last=torch.nn.Linear(3, 5))
    before = _plain(copy.deepcopy(state.snapshot()))
    try:
        checkpoints.load(state)
    except (RuntimeError, errors.Config) as error:
        text = str(error)
    else:
        raise AssertionError("it was loaded")
    state.first.weight.data.zero_()
    state.restore()
    state.commit()
    assert state.step == 8
    state.step = 7
    state.adopt(state.snapshot() | {"step": 7})
    assert _plain(state.snapshot()) == before
    dist.barrier()
    dist.destroy_process_group()
    return text


def test_a_save_that_is_killed_leaves_the_checkpoint_before(tmp_path: pathlib.Path) -> None:
    """SIGKILL while a checkpoint is written: the one before is loaded."""
    with ranks.Ranks(_save_and_block, count=1, args=(str(tmp_path),)) as job:
        job.await_note("writes", deadline_s=30)
        assert (tmp_path / "unfinished").exists()
        job.signal(0, signal.SIGKILL)
        job.outcomes(timeout_s=10)
    state = _state(seed=2)
    assert elastic.Checkpoints(tmp_path).load(state)
    assert state.step == 1


@pytest.mark.parametrize("at", range(5))
def test_an_interrupted_commit_leaves_the_last_one(at: int) -> None:
    """Ctrl-C at any place in the copying of a commit: the snapshot is the last commit as a whole, and restore brings it back.
    The next commit is whole, too."""
    things = {f"thing{index}": Fragile(torch.zeros(3)) for index in range(5)}
    state = elastic.State(total=0.0, **things)

    def step(number: int) -> None:
        state.total = float(number)
        for thing in things.values():
            thing.tensor.fill_(number)

    for number in (1, 2):
        step(number)
        state.commit()
    step(3)
    things[f"thing{at}"].breaks = True
    with pytest.raises(KeyboardInterrupt):
        state.commit()
    things[f"thing{at}"].breaks = False
    saved = state.snapshot()
    assert saved["step"] == 2 and saved["values"] == {"total": 2.0}
    assert [thing["tensor"].tolist() for thing in saved["objects"].values()] == [[2.0] * 3] * 5
    state.restore()
    assert state.step == 2 and state.total == 2.0
    assert all(thing.tensor.tolist() == [2.0] * 3 for thing in things.values())
    step(3)
    state.commit()
    assert state.snapshot()["step"] == 3
    assert [thing["tensor"].tolist() for thing in state.snapshot()["objects"].values()] == [[3.0] * 3] * 5


class Fragile:
    """A part of a state. Copying what comes behind its tensor is interrupted if it ``breaks``."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.breaks = tensor, False

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor, "rest": Breaks() if self.breaks else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensor.copy_(state["tensor"])


class Breaks:
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise KeyboardInterrupt


def _committed(state: elastic.State) -> elastic.State:
    state.total += 1
    state.commit()
    return state


def test_a_state_that_is_not_made_yet() -> None:
    """What is asked of it or assigned before State.__init__ is an error that says so; it was endless recursion."""
    assert copy.copy(_state(1)).total == 0.0

    class Mine(elastic.State):
        def __init__(self) -> None:
            self.rate = 1.0
            super().__init__(total=0)

    with pytest.raises(errors.Config, match=r"state\.rate would not be kept"):
        Mine()


def test_adopt_takes_a_copy() -> None:
    """What was adopted stays the caller's: commits do not write into it, nor does the caller into the last commit."""
    donor, state = _state(1), _state(2)
    donor.commit()
    given = copy.deepcopy(donor.snapshot())
    before = _plain(copy.deepcopy(given))
    state.adopt(given)
    for parameter in state.model.parameters():
        torch.nn.init.constant_(parameter, 7.0)
    for _ in range(3):
        state.commit()
    assert _plain(given) == before
    state.adopt(given)
    for tensor in given["objects"]["model"].values():
        tensor.fill_(9.0)
    state.restore()
    assert _plain(state.snapshot()) == before


def test_restore_goes_back_to_the_last_commit() -> None:
    """Everything that a step has touched since then is as it was, and gradients are gone."""
    state = _state(seed=1)
    for _ in range(2):
        _loss(state.model, [0, 1]).backward()
        state.optimizer.step()
        state.commit()
    before = _digest(state)
    _loss(state.model, [2, 3]).backward()
    state.optimizer.step()
    state.total = 5.0
    state.restore()
    assert state.total == 0.0 and all(parameter.grad is None for parameter in state.model.parameters())
    state.step -= 1
    state.sampler.position -= BATCH
    state.commit()
    assert _digest(state) == before


def test_a_state_refuses_what_it_would_not_keep() -> None:
    """An attribute that is not among its things, an object in a value's place, a parameter: each would be lost, or come back as
    something else, in the next change of membership. What was refused has changed nothing."""
    model = torch.nn.Linear(1, 1)
    state = elastic.State(model=model, best=0.0, ema=None)
    with pytest.raises(errors.Config, match=r"state.loss would not be kept: give loss=... to State"):
        state.loss = 1.0
    with pytest.raises(errors.Config, match=r"state.ema began as a plain value, and a Linear has a state_dict"):
        state.ema = torch.nn.Linear(1, 1)
    with pytest.raises(errors.Config, match=r"state.best holds a parameter"):
        state.best = [torch.zeros(1), {"theta": torch.nn.Parameter(torch.zeros(1))}]
    with pytest.raises(errors.Config, match=r"state.theta holds a parameter"):
        elastic.State(theta=model.weight)
    with pytest.raises(errors.Config, match=r"state.model has a state_dict.*a float has none"):
        state.model = 1.0
    assert state.best == 0.0 and state.ema is None and state.model is model
    # A result of the forward pass is no parameter.
    state.best, state._mine = model(torch.ones(1)).sum(), 1
    state.commit()


def test_an_object_may_take_another_ones_place() -> None:
    """A commit keeps the object that is there now, not the first one."""
    state = elastic.State(model=torch.nn.Linear(1, 1))
    state.model = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(state.model.weight, 5.0)
    state.commit()
    torch.nn.init.constant_(state.model.weight, 6.0)
    state.restore()
    assert state.model.weight.item() == 5.0


def test_values_keep_their_classes() -> None:
    """A defaultdict is one after `restore`, and on a rank that got it: after a death its next new key raised KeyError."""
    state = elastic.State(
        losses=collections.defaultdict(list), seen=collections.Counter(a=1), model=torch.nn.Linear(1, 1)
    )
    state.losses["a"].append(torch.ones(1))
    state.commit()
    state.losses["b"].append(torch.ones(1))
    state.seen["b"] += 1
    state.restore()
    state.losses["c"].append(1)
    state.seen["c"] += 1
    assert dict(state.losses) == {"a": [torch.ones(1)], "c": [1]} and state.seen == {"a": 1, "c": 1}
    # torch keeps the versions of modules there, by which it reads states of older ones.
    assert state.snapshot()["objects"]["model"]._metadata == state.model.state_dict()._metadata
    assert ranks.run(_share_a_defaultdict, count=2) == [[0], [0]]


def _share_a_defaultdict() -> list[int]:
    dist.init_process_group("penstock", timeout=datetime.timedelta(seconds=20))
    state = elastic.State(losses=collections.defaultdict(list))
    state.share(0)
    state.losses["new"].append(0)
    dist.barrier()
    dist.destroy_process_group()
    return state.losses["new"]


def test_workers_of_another_make_are_refused() -> None:
    """A worker with other things in its State, or whose sampler cuts other steps, raises; it would lose what it does not know, or
    train on samples that others have. The other one goes on."""
    for make, text in (
        ("more values", "only this worker lr"),
        ("fewer objects", "only it has sampler"),
        ("batches", "batch_size=8 in"),
        ("order", "shuffle=True"),
    ):
        with ranks.Ranks(_share_with_another_make, count=2, args=(make,)) as job:
            first, second = job.outcomes(timeout_s=60, grace_s=None)
        assert first.ok, str(first)
        assert second.raised is not None and second.raised.is_a("penstock.errors.Config"), str(second)
        assert text in second.raised.text


def _share_with_another_make(make: str) -> None:
    dist.init_process_group("penstock", timeout=datetime.timedelta(seconds=20))
    things: dict[str, Any] = {"model": torch.nn.Linear(1, 1), "sampler": elastic.ElasticSampler(SAMPLES, BATCH)}
    if dist.get_rank() == 1 and make == "more values":
        things["lr"] = 0.1
    elif dist.get_rank() == 1 and make == "fewer objects":
        del things["sampler"]
    elif dist.get_rank() == 1:
        things["sampler"] = elastic.ElasticSampler(
            SAMPLES, 8 if make == "batches" else BATCH, shuffle=make == "batches"
        )
    state = elastic.State(**things)
    try:
        state.share(0)
    finally:
        dist.destroy_process_group()


def test_a_checkpoint_of_an_earlier_script_is_loaded(tmp_path: pathlib.Path) -> None:
    """A value that it lacks stays as it is, on all ranks; one that the script has no longer is left out."""
    assert ranks.run(_load_an_earlier_one, count=2, args=(str(tmp_path),)) == [(7, 1.5, 0), (7, 1.5, 0)]


def _load_an_earlier_one(folder: str) -> tuple[int, float, int]:
    dist.init_process_group("penstock", timeout=datetime.timedelta(seconds=20))
    checkpoints = elastic.Checkpoints(folder)
    checkpoints.save(elastic.State(step=7, total=1.5, gone=1))
    state = elastic.State(total=0.0, new=dist.get_rank())
    assert checkpoints.load(state)
    dist.barrier()
    dist.destroy_process_group()
    return state.step, state.total, state.new


@pytest.mark.parametrize("is_old", [False, True])
def test_a_checkpoint_with_another_batch_size_is_loaded(is_old: bool, tmp_path: pathlib.Path) -> None:
    """A job may go on with another batch size, and from a checkpoint of a release that wrote none: the workers are compared with
    each other, and not with the checkpoint."""
    state = elastic.State(sampler=elastic.ElasticSampler(SAMPLES, 2 * BATCH))
    state.commit()
    if is_old:
        del state.snapshot()["objects"]["sampler"]["batch_size"], state.snapshot()["objects"]["sampler"]["shuffle"]
    elastic.Checkpoints(tmp_path).save(state)
    assert ranks.run(_load_with_own_batches, count=2, args=(str(tmp_path),)) == [(2 * BATCH, BATCH)] * 2


def _load_with_own_batches(folder: str) -> tuple[int, int]:
    dist.init_process_group("penstock", timeout=datetime.timedelta(seconds=20))
    state = elastic.State(sampler=elastic.ElasticSampler(SAMPLES, BATCH))
    assert elastic.Checkpoints(folder).load(state)
    dist.barrier()
    dist.destroy_process_group()
    return state.sampler.position, state.sampler.batch_size


# ------------------------------------------------------------------------------------------------------- pure parts


@hypothesis.given(st.integers(1, 60), st.integers(1, 5), st.lists(st.integers(1, 7), min_size=1), st.integers())
def test_every_index_is_in_one_step_of_an_epoch(length: int, batch_size: int, worlds: list[int], seed: int) -> None:
    """Whatever worlds follow each other, steps that fail and are repeated included: every index exactly once an epoch."""
    with pytest.MonkeyPatch.context() as patch:
        place, dice = [0, 1], random.Random(seed)
        patch.setattr("penstock.training.elastic.sampler._place", lambda: tuple(place))
        samplers: list[elastic.ElasticSampler] = []
        taken: list[int] = []
        for world in itertools.cycle(worlds):
            # Those who stay keep theirs; newcomers get a copy of what the first one knows.
            known = samplers[0].state_dict() if samplers else None
            samplers = [elastic.ElasticSampler(length, batch_size, shuffle=seed % 2 == 0) for _ in range(world)]
            shares = []
            for rank, sampler in enumerate(samplers):
                place[:] = rank, world
                if known is not None:
                    sampler.load_state_dict(known)
                steps = list(sampler)
                assert len(steps) == len(sampler)
                shares.append((steps[0] if sampler.weight else [], sampler.weight))
            assert sum(weight for _, weight in shares) == pytest.approx(world)
            if dice.random() < 0.3:
                # The step fails: the same piece is dealt out again, to as many as there are then.
                continue
            taken += [index for indices, _ in shares for index in indices]
            for rank, sampler in enumerate(samplers):
                place[:] = rank, world
                sampler.advance()
            if samplers[0].epoch == 1:
                break
    assert sorted(taken) == list(range(length))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("length", "per_step"), [(8, 1), (8, 2), (9, 2), (21, 4), (3, 4)])
def test_steps_of_several_batches(length: int, per_step: int, workers: int) -> None:
    """Every index is in exactly one committed step of an epoch, also where a step takes several batches, the last one fewer."""
    state = elastic.State(sampler=elastic.ElasticSampler(length, 1, shuffle=False))
    loader = torch.utils.data.DataLoader(list(range(length)), batch_sampler=state.sampler, num_workers=workers)
    for epoch in range(2):
        seen = []
        taken = 0
        for number, batch in enumerate(loader, 1):
            seen += batch.tolist()
            taken += 1
            if taken == per_step or number == length:
                # More than are left of the epoch do not begin the next one.
                state.commit(batches=per_step if epoch else taken)
                taken = 0
        assert seen == list(range(length))
        assert (state.sampler.epoch, state.sampler.position) == (epoch + 1, 0)
    assert state.step == 2 * -(-length // per_step)
    with pytest.raises(errors.Config, match="a batch or more, not 0"):
        state.commit(batches=0)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("per_step", [2, 3])
def test_batches_that_are_not_committed_are_told(per_step: int, workers: int) -> None:
    """One commit for several batches, without their number: the next iteration would give most of them again, and raises."""
    state = elastic.State(sampler=elastic.ElasticSampler(24, 1))
    loader = torch.utils.data.DataLoader(list(range(24)), batch_sampler=state.sampler, num_workers=workers)
    for number, _ in enumerate(loader, 1):
        if number % per_step == 0:
            state.commit()
    told = rf"24 batches, and {24 // per_step} of them are committed.*commit\(batches=n\)"
    with pytest.raises(errors.Config, match=told):
        next(iter(loader))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("length", [1, 2, 3, 5, 8, 12])
def test_a_loop_may_be_left_and_begun_again(length: int, workers: int) -> None:
    """After any step, or before the first one is committed, as a change of membership does: what a loader had read ahead comes
    again, and that is no error."""
    for leave_after in range(length + 1):
        state = elastic.State(sampler=elastic.ElasticSampler(length, 1, shuffle=False))
        loader = torch.utils.data.DataLoader(list(range(length)), batch_sampler=state.sampler, num_workers=workers)
        seen = []
        while state.sampler.epoch == 0:
            for committed, batch in enumerate(loader):
                if committed == leave_after:
                    leave_after = length
                    break
                seen += batch.tolist()
                state.commit()
        assert seen == list(range(length))


RULES = Rules(min_ranks=2, max_ranks=3, window_s=10)
A, B, C = (Report(member, 7) for member in (1, 2, 3))
NEW = Report(9, -1)


@pytest.mark.parametrize(
    ("reports", "previous", "committed", "waited_s", "members"),
    [
        pytest.param([A, B, C], (1, 2, 3), 7, 0, [1, 2, 3], id="all are here: at once"),
        pytest.param([C, A], (1, 2, 3), 7, 9, [], id="one may still come"),
        pytest.param([C, A], (1, 2, 3), 7, 10, [1, 3], id="it did not come in time"),
        pytest.param([Report(1, 7, lost=(2,)), C], (1, 2, 3), 7, 0, [1, 3], id="it is known to be dead: at once"),
        pytest.param([Report(1, 7, lost=(2,)), B, C], (1, 2, 3), 7, 0, [1, 2, 3], id="taken for dead, but here"),
        pytest.param(
            [Report(1, 7, lost=(3,)), Report(2, 7, lost=(3,))],
            (1, 2, 3),
            True,
            0,
            [1, 2],
            id="a half that is first: at once",
        ),
        pytest.param(
            [Report(1, 7, lost=(3,)), Report(2, 7, lost=(3,)), Report(3, 7, lost=(1, 2))],
            (1, 2, 3),
            True,
            0,
            [1, 2, 3],
            id="two halves that take each other for dead, both here",
        ),
        pytest.param([A, NEW], (1, 2), 7, 10, [1, 9], id="a newcomer takes its place"),
        pytest.param([A, B, C, NEW], (1, 2, 3), 7, 0, [1, 2, 3], id="full: a newcomer waits in reserve"),
        pytest.param([A], (1, 2), 7, 99, [], id="below min_ranks"),
        pytest.param([NEW, Report(8, -1)], (1, 2), 7, 99, [], id="nobody has the state"),
        pytest.param([NEW, Report(1, -1), C], (1, 3), 7, 0, [1, 3, 9], id="one has it"),
        pytest.param([A, B, Report(9, -1, pulse="unsure")], (1, 2), 7, 0, [], id="does the newcomer live?"),
        pytest.param([A, B, Report(9, -1, pulse="dead")], (1, 2), 7, 0, [1, 2], id="it does not"),
        pytest.param([NEW, Report(8, -1)], (1, 2), 0, 0, [], id="members may be in a long first step"),
        pytest.param([Report(1, -1), Report(2, -1)], (), 0, 9, [], id="the start: more may come"),
        pytest.param([Report(1, -1), Report(2, -1)], (), 0, 10, [1, 2], id="the start: enough"),
        pytest.param([Report(1, -1), Report(2, -1), NEW], (), 0, 0, [1, 2, 9], id="the start: full"),
    ],
)
def test_who_is_in_a_generation(
    reports: list[Report], previous: tuple[int, ...], committed: int, waited_s: float, members: list[int]
) -> None:
    """The decision, case by case; the members' order is their age."""
    chosen, why = decide(reports, previous, committed, waited_s, RULES)
    assert [one.member for one in chosen] == members
    assert why


@pytest.mark.parametrize("steps", [1000, 0])
def test_newcomers_do_not_begin_a_lost_job_anew(steps: int) -> None:
    """The last member of generation 1 commits 1000 steps, reports, waits for another that is dead, and dies. Three newcomers
    wait, and then hear that the state is lost. A job that has committed nothing is begun by them."""
    # The window is longer than the silence after which a worker counts as dead.
    job = SimulatedJob(Rules(window_s=8, wait_s=30))
    first, second = job.join(2)
    job.pass_s(10)
    assert first.trains and second.trains
    job.kill(second)
    for _ in range(steps):
        job.commit([first])
    newcomers = job.join(3)
    job.report([first], knows_who_died=False)
    job.kill(first)
    job.pass_s(40)
    if steps:
        assert [type(one.error) for one in newcomers] == [elastic.StateLost] * 3
        assert "the job has committed 1000 step(s)" in str(newcomers[0].error)
    else:
        assert all(one.trains for one in newcomers)


def test_newcomers_do_not_begin_a_job_anew_whose_members_died_at_once() -> None:
    """No member could report: what they had written down at their first commit is enough."""
    job = SimulatedJob(Rules(window_s=1, wait_s=20))
    members = job.join(2)
    job.pass_s(3)
    job.commit(members)
    for one in members:
        job.kill(one)
    newcomers = job.join(2)
    job.pass_s(30)
    assert [type(one.error) for one in newcomers] == [elastic.StateLost] * 2


def test_newcomers_begin_when_all_members_have_died_before_the_first_commit() -> None:
    """Members in a long first step are waited for; when their heartbeats stop, newcomers begin within seconds. A member that goes
    on after that is left behind at its first commit, which does not count."""
    job = SimulatedJob(Rules(min_ranks=2, window_s=1, wait_s=60))
    members = job.join(2)
    job.pass_s(3)
    newcomers = job.join(2)
    job.pass_s(30)
    assert all(one.trains for one in members) and not any(one.trains for one in newcomers)
    job.kill(members[0])
    members[1].is_stopped = True
    job.pass_s(7)
    assert all(one.trains for one in newcomers)
    with pytest.raises(elastic.LeftBehind):
        members[1].lobby.first_commit(1)
    job.kill(members[1])
    assert not newcomers[0].lobby.store.check(["committed"])
    job.commit(newcomers)


def test_members_may_be_silent_for_as_long_as_their_peers_wait() -> None:
    """With a longer PENSTOCK_PEER_TIMEOUT, members that are all suspended in the first step are replaced later than after 5 s."""
    [silent_s] = ranks.run(_silence_allowed, count=1, env={"PENSTOCK_PEER_TIMEOUT": "60"})
    assert silent_s > 60
    job = SimulatedJob(Rules(min_ranks=2, window_s=1, wait_s=600, silent_s=silent_s))
    members = job.join(2)
    job.pass_s(3)
    for one in members:
        one.is_stopped = True
    newcomers = job.join(2)
    job.pass_s(60)
    assert not any(one.trains for one in newcomers)
    job.pass_s(5)
    assert all(one.trains for one in newcomers)


def test_heartbeats_go_on_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection to the store that breaks is made anew."""
    monkeypatch.setattr(membership, "_BEAT_S", 0.01)
    lobby = Lobby(dist.HashStore(), "simulated", Rules())
    kept, clones = lobby._kept, itertools.count()

    def breaks(*_: Any) -> Any:
        raise dist.DistNetworkError("the connection is broken")

    def clone() -> Any:
        return _Instead(kept, add=breaks) if next(clones) == 0 else kept

    lobby._kept = _Instead(kept, clone=clone)
    until = time.monotonic() + 30
    with lobby.heartbeats():
        while lobby.store.add(f"0/heartbeat/{lobby.member}", 0) < 3 and time.monotonic() < until:
            time.sleep(0.01)
    assert next(clones) == 2
    assert lobby.store.add(f"0/heartbeat/{lobby.member}", 0) >= 3


def test_newcomers_do_not_begin_when_a_member_commits_at_the_last_moment() -> None:
    """Its first commit and the newcomers' verdict are one compare-and-set: whichever is first holds."""
    job = SimulatedJob(Rules(min_ranks=2, window_s=1, wait_s=20))
    members = job.join(2)
    job.pass_s(3)
    for one in members:
        one.is_stopped = True
    newcomers = job.join(2)
    (watching, _) = newcomers
    decides, lobby = watching.lobby.store.compare_set, watching.lobby

    def late(key: str, expected: str, value: str) -> Any:
        if key.endswith("/fate") and job.longest == ():
            job.commit(members)
        return decides(key, expected, value)

    for one in newcomers:
        one.lobby.store = _Instead(lobby.store, compare_set=late)
    job.pass_s(30)
    assert job.longest and [type(one.error) for one in newcomers] == [elastic.StateLost] * 2


def test_newcomers_do_not_wait_for_ever_for_a_first_commit_that_was_cut_short() -> None:
    """The last member dies between the two writes of its first commit. Newcomers hear in ``wait_s`` that the state is lost."""
    job = SimulatedJob(Rules(min_ranks=2, window_s=1, wait_s=20))
    members = job.join(2)
    job.pass_s(3)

    def die(key: str, value: str) -> None:
        raise dist.DistNetworkError("the worker is killed here")

    members[0].lobby.store = _Instead(members[0].lobby.store, set=die)
    with pytest.raises(dist.DistNetworkError):
        members[0].lobby.first_commit(1)
    for one in members:
        job.kill(one)
    newcomers = job.join(2)
    job.pass_s(30)
    assert [type(one.error) for one in newcomers] == [elastic.StateLost] * 2
    assert "the job has committed 1 step(s)" in str(newcomers[0].error)


class _Instead:
    """A store, some methods of which are others."""

    def __init__(self, store: Any, **methods: Callable[..., Any]) -> None:
        self._store = store
        vars(self).update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.mark.parametrize("seed", range(40))
def test_schedules_of_joins_deaths_and_commits(seed: int) -> None:
    """Whatever happens in whatever order, every generation goes on from what the member that committed most has committed
    (`SimulatedJob` asserts it at each), nothing that was committed is begun anew, and nobody waits longer than it should."""
    dice = random.Random(seed)
    rules = Rules(dice.choice([1, 1, 2]), dice.choice([None, 2, 3]), window_s=dice.choice([1, 8]), wait_s=30)
    job = SimulatedJob(rules)
    job.join(dice.randint(1, 4))
    for _ in range(dice.randint(10, 60)):
        training = [one for one in job.workers if one.trains]
        living = [one for one in job.workers if one.lives]
        event = dice.choices(["pass", "join", "kill", "commit", "torn commit", "change"], [6, 1, 1, 4, 1, 1])[0]
        if event == "pass":
            job.pass_s(dice.choice([0.1, 1, 12]))
        elif event == "join" and len(living) < 6:
            job.join(dice.randint(1, 2))
        elif event == "kill" and living:
            job.kill(dice.choice(living))
            if dice.random() < 0.7:
                job.report([one for one in training if one.lives], knows_who_died=dice.random() < 0.5)
        elif event == "commit":
            job.commit(training)
        elif event == "torn commit" and training:
            # A step whose end only some have seen; who has not may be the one that dies.
            job.commit(dice.sample(training, dice.randint(0, len(training))))
            job.kill(dice.choice(training))
            job.report([one for one in training if one.lives])
        elif event == "change":
            job.report(training)
    # Those who still train notice that somebody is gone; then nothing happens any more, and every wait must end.
    job.report([one for one in job.workers if one.trains])
    job.pass_s(3 * rules.wait_s)
    for one in job.workers:
        assert not one.lives or one.trains, f"{one} waits for ever, seed {seed}"
        if isinstance(one.error, elastic.StateLost):
            assert job.longest, f"{one} mourns a state that never was, seed {seed}"


@dataclasses.dataclass
class SimulatedWorker:
    """One worker of a `SimulatedJob`: a real lobby, and what it has committed."""

    lobby: Lobby
    trains: bool = False
    lives: bool = True
    is_stopped: bool = False
    """It sends no heartbeats."""
    committed: tuple[int, ...] | None = None
    """The steps that its state has seen, each with a number of its own; None: it has no state of the job."""
    roster: Roster | None = None
    """A generation that it wants to build, and waits for the others to come."""
    error: Exception | None = None


class SimulatedJob:
    """Workers with real lobbies in virtual time, and a model of what they must come to.

    A generation is built when all its members have heard of it; where one has died, the others report again.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.workers: list[SimulatedWorker] = []
        self.longest: tuple[int, ...] = ()
        """What the members of the last generation have committed, at most."""
        self._store = dist.HashStore()
        self._now_s = 0.0
        self._steps = itertools.count()

    def join(self, count: int) -> list[SimulatedWorker]:
        came = []
        for _ in range(count):
            lobby = Lobby(self._store, "simulated", self.rules)
            # Without the thread a call, which a store in this process does not need.
            lobby.store = dist.PrefixStore("penstock/elastic/simulated", self._store)
            lobby.report(-1)
            came.append(SimulatedWorker(lobby))
        self.workers += came
        return came

    def kill(self, one: SimulatedWorker) -> None:
        one.lives = one.trains = False

    def commit(self, workers: list[SimulatedWorker]) -> None:
        """These come to the end of the same step."""
        step = next(self._steps)
        for one in workers:
            assert one.committed is not None
            one.committed = (*one.committed, step)
            one.lobby.first_commit(len(one.committed))
            self.longest = max(self.longest, one.committed, key=len)

    def report(self, workers: list[SimulatedWorker], *, knows_who_died: bool = True) -> None:
        """These leave their generation, and want to be in the next."""
        for one in workers:
            one.trains, one.roster = False, None
            last = one.lobby._last
            dead = [
                rank
                for rank, member in enumerate(last.members)
                if knows_who_died and not any(other.lives and other.lobby.member == member for other in self.workers)
            ]
            one.lobby.report(-1 if one.committed is None else len(one.committed), dead)

    def pass_s(self, seconds: float) -> None:
        end_s = self._now_s + seconds
        while self._now_s < end_s:
            self._now_s += 0.1
            for one in self.workers:
                is_member = one.trains or one.roster is not None
                if one.lives and is_member and not one.committed and not one.is_stopped:
                    one.lobby.heartbeat()
                if not one.lives or is_member:
                    continue
                try:
                    one.roster = one.lobby.poll(self._now_s)
                except (elastic.LeftBehind, elastic.StateLost, elastic.TooFew) as error:
                    one.lives, one.error = False, error
            self._build()

    def _build(self) -> None:
        for one in self.workers:
            roster = one.roster
            if roster is None:
                continue
            members = [other for other in self.workers if other.lobby.member in roster.members]
            if not all(other.lives for other in members):
                self.report([other for other in members if other.lives and other.roster == roster])
            elif all(other.roster == roster for other in members):
                self._begin(roster, members)

    def _begin(self, roster: Roster, members: list[SimulatedWorker]) -> None:
        known = [one.committed for one in members if one.committed is not None]
        best = max(known, key=len, default=())
        given = members[roster.donor].committed or ()
        assert len(given) == len(best) == max(roster.step, 0), f"{roster} is given {given}, and {best} is there"
        assert given or not self.longest, f"{roster} begins anew, and {len(self.longest)} steps had been committed"
        for one in members:
            one.committed, one.trains, one.roster = given, True, None
        self.longest = given


# --------------------------------------------------------------------------------------------------- in a worker


@dataclasses.dataclass(frozen=True)
class Story:
    """What workers are to do."""

    steps: int
    """How many, in all."""
    block: tuple[int, int, int] | None = None
    """(generation, rank, step): that rank waits there for its end, before the step's all-reduce."""
    count_from_world: int = 0
    """Count ``steps`` from when the world has this size."""
    count_from: int = 0
    """... and not before this generation of the job."""
    block_rebuild: tuple[int, int] | None = None
    """(generation, rank): that rank waits there for its end, before it connects."""
    rejoin: bool = False
    """Come back as a newcomer when left behind. Who is to ``block`` is stopped instead."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Told:
    """What a worker did."""

    digest: str
    """Of model, optimizer, values and sampler."""
    worlds: list[tuple[int, int]]
    """(step, world) of what it committed."""
    losses: list[float]
    """Mean over all samples of each of those steps."""
    weights: list[float]
    """Of the model, in the end."""
    seed: int
    """Where the model began."""


def _work(story: Story) -> Told:
    # Every worker begins elsewhere: what they share in the end, they got from each other.
    state = _state(seed=os.getpid())
    worlds: list[tuple[int, int]] = []
    losses: list[float] = []
    generations = itertools.count(1)
    trouble = _Heard("the elastic store does not answer")
    logging.getLogger("penstock.elastic").addHandler(trouble)

    def train(state: elastic.State) -> None:
        generation, rank, world = next(generations), dist.get_rank(), dist.get_world_size()
        ranks.note(f"generation {generation}", (rank, world))
        assert process._generation is not None
        if world >= story.count_from_world and process._generation >= story.count_from and not state.last:
            state.last = state.step + story.steps
        while not state.last or state.step < state.last:
            for indices in state.sampler:
                known = trouble.heard
                loss = _loss(state.model, indices) * state.sampler.weight
                loss.backward()
                if story.block == (generation, rank, state.step + 1):
                    ranks.note("blocked")
                    if story.rejoin:
                        os.kill(os.getpid(), signal.SIGSTOP)
                    else:
                        threading.Event().wait()
                mean = loss.detach().clone()
                for tensor in [mean, *(parameter.grad for parameter in state.model.parameters())]:
                    dist.all_reduce(tensor)
                    tensor /= world
                state.optimizer.step()
                state.optimizer.zero_grad()
                state.total += mean.item()
                worlds.append((state.step + 1, world))
                losses.append(mean.item())
                state.commit()
                ranks.note(f"step {state.step}")
                if known:
                    ranks.note("without the store")
                if state.last and state.step >= state.last:
                    break

    if story.block_rebuild is not None:
        _block_rebuild(*story.block_rebuild)
    try:
        elastic.run(train, state, **{**FAST, **story.options})
    except elastic.LeftBehind as error:
        if not story.rejoin:
            raise
        print(error, flush=True)
        elastic.run(train, state, **{**FAST, **story.options})
    return Told(_digest(state), worlds, losses, _weights(state), state.seed)


def _work_until(path: str) -> int | None:
    """Train until there is a file at ``path``; how many steps that were."""

    def train(state: elastic.State) -> int:
        end = torch.zeros(1)
        while not end.item():
            if pathlib.Path(path).exists():
                end += 1
            dist.all_reduce(end)
            state.commit()
            ranks.note(f"step {state.step}")
        return state.step

    return elastic.run(train, elastic.State(), **{**FAST, "min_ranks": 2, "max_ranks": 2})


def _meet_after_a_failure() -> float:
    rank = int(os.environ["RANK"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)

    def build(name: str, timeout_s: float) -> None:
        kept = dist.PrefixStore(name, store)
        limit = datetime.timedelta(seconds=timeout_s)
        dist.init_process_group("penstock", store=kept, rank=rank, world_size=2, timeout=limit)

    if rank == 0:
        with pytest.raises(TimeoutError):
            build("first", 0.2)
        loop._destroy()
    build("second", 10)
    tensor = torch.tensor([float(rank + 1)])
    dist.all_reduce(tensor)
    loop._destroy()
    return float(tensor)


def _silence_allowed() -> float:
    def train(state: elastic.State) -> float:
        return state._after_commit.__self__.lobby.rules.silent_s

    return elastic.run(train, elastic.State(), store=_store(), window_s=0.1)


def _lose_a_rank_after_a_time_out() -> bool:
    dist.init_process_group("penstock", timeout=datetime.timedelta(seconds=1))
    if dist.get_rank() == 1:
        threading.Event().wait()
    with pytest.raises(errors.Timeout):
        dist.all_reduce(torch.ones(1))
    assert not loop._has_lost_a_rank()
    ranks.note("timed out")
    until = time.monotonic() + 30
    while not loop._lost_ranks() and time.monotonic() < until:
        time.sleep(0.01)
    return loop._has_lost_a_rank()


def _lose_a_client() -> list[int]:
    """Returns the numbers of peers that are lost, where there is one, after no member is."""
    rank, store = int(os.environ["RANK"]), _store()
    if rank == 2:
        os.environ["RANK"] = "1"
        client = endpoint.connect("cache", store=store)
        client.pull("x").wait()
        os.kill(os.getpid(), signal.SIGKILL)
    dist.init_process_group("penstock", store=dist.PrefixStore("two", store), rank=rank, world_size=2)
    found = []
    if rank == 0:
        with endpoint.serve("cache", store=store, pulls={"x": torch.ones(3)}):
            until = time.monotonic() + 30
            while not found and time.monotonic() < until:
                found = [peer["rank"] for peer in process.stats()["peers"] if peer["lost"]]
            assert loop._lost_ranks() == {}
    dist.barrier()
    dist.destroy_process_group()
    return found


def _keep_an_endpoint() -> str:
    server = endpoint.serve("cache", store=_store(), pulls={"x": torch.ones(3)})
    with pytest.raises(errors.Config) as error:
        elastic.run(lambda state: None, elastic.State(), **FAST)
    server.close()
    return str(error.value)


def _save_and_block(folder: str) -> None:
    checkpoints, state = elastic.Checkpoints(folder), _state(seed=1)
    state.commit()
    checkpoints.save(state)
    fsync = os.fsync

    def blocking(handle: int) -> None:
        fsync(handle)
        ranks.note("writes")
        threading.Event().wait()

    os.fsync = blocking
    state.commit()
    checkpoints.save(state)


class _Heard(logging.Handler):
    """Whether something was logged."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.heard = text, False

    def emit(self, record: logging.LogRecord) -> None:
        self.heard |= self.text in record.getMessage()


def _restartable(root: str, *options: str) -> None:
    """The example, as the main program of this rank."""
    sys.argv = [RESTARTABLE, *options]
    runpy.run_path(str(pathlib.Path(root) / RESTARTABLE), run_name="__main__")


RESTARTABLE = "examples/elastic_restart.py"


def _block_rebuild(generation: int, rank: int) -> None:
    init = dist.init_process_group

    def blocking(*args: Any, **kwargs: Any) -> None:
        if process._generation == generation and kwargs["rank"] == rank:
            ranks.note("rebuilds")
            threading.Event().wait()
        init(*args, **kwargs)

    dist.init_process_group = blocking


def _state(seed: int) -> elastic.State:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    sampler = elastic.ElasticSampler(SAMPLES, BATCH, seed=3)
    return elastic.State(model=model, optimizer=optimizer, sampler=sampler, total=0.0, last=0, seed=seed)


def _loss(model: torch.nn.Module, indices: list[int]) -> torch.Tensor:
    x = torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(1))[indices]
    return (model(x).squeeze(1) - x.sum(dim=1)).square().mean()


def _weights(state: elastic.State) -> list[float]:
    return torch.cat([parameter.detach().reshape(-1) for parameter in state.model.parameters()]).tolist()


def _digest(state: elastic.State) -> str:
    digest = hashlib.sha256()
    tree = state.snapshot()
    for part in (tree["objects"]["model"], tree["objects"]["optimizer"], tree["objects"]["sampler"], tree["values"]):
        digest.update(repr(_plain(part)).encode())
    return digest.hexdigest()


def _plain(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.tolist()
    if isinstance(tree, dict):
        return {key: _plain(value) for key, value in tree.items()}
    return [_plain(value) for value in tree] if isinstance(tree, (list, tuple)) else tree


# ------------------------------------------------------------------------------------------------- in the test process


@pytest.fixture
def store() -> Iterator[str]:
    """The address of a store that outlives the workers."""
    kept = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    yield f"127.0.0.1:{kept.port}"


@contextlib.contextmanager
def _workers(store: str, count: int, story: Story, **env: str) -> Iterator[ranks.Ranks]:
    env = {"PENSTOCK_ELASTIC_STORE": store, "PENSTOCK_LOG": "info", "PENSTOCK_PEER_TIMEOUT": "2", **env}
    with ranks.Ranks(_work, count=count, args=(story,), env=env) as job:
        yield job


def _printed(command: list[str], kill_at: str) -> str:
    """What a job prints; the worker that says it is at ``kill_at`` is killed."""
    text, killed = "", False
    with forked.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as job:
        try:
            assert job.stdout is not None
            for line in job.stdout:
                # Two ranks may share a line.
                for process, place in re.findall(r"process (\d+) (rank \d+ step \d+) ", line):
                    if place == kill_at and not killed:
                        os.kill(int(process), signal.SIGKILL)
                        killed = True
                text += line
            assert job.wait(60) == 0, text
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
    assert killed, text
    return text


def _losses(text: str) -> dict[str, str]:
    """By rank and step; the last one that was told."""
    return dict(re.findall(r"(rank \d+ step \d+) loss (\d+\.\d{6})", text))


def _same_as_alone(told: Told) -> None:
    """One process that computes every rank's part in turn, for the same worlds, comes to the same losses and weights."""
    state = _state(told.seed)
    position, losses = 0, []
    for _, world in told.worlds:
        state.optimizer.zero_grad()
        order = state.sampler._order()
        parts = cut(position, SAMPLES, world, BATCH)
        loss = _loss(state.model, order[position : parts[-1][1]].tolist())
        loss.backward()
        state.optimizer.step()
        losses.append(loss.item())
        position = parts[-1][1] % SAMPLES
        state.sampler.epoch += position == 0
    # Sums in another order: float32 has 7 digits, and Adam's steps amplify what is lost.
    assert losses == pytest.approx(told.losses, rel=1e-3, abs=1e-5)
    assert _weights(state) == pytest.approx(told.weights, rel=1e-3, abs=1e-4)


def _by_rank(job: ranks.Ranks, world: int) -> list[int]:
    """Which worker has which rank in the first generation."""
    places = job.await_note("generation 1", deadline_s=60)
    return [places.index((rank, world)) for rank in range(world)]


def _started(stack: contextlib.ExitStack, command: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
    process = forked.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **env},
        start_new_session=True,
    )
    stack.callback(_end, process)
    return process


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read_and_kill(index: int, jobs: list[subprocess.Popen[str]], outputs: list[str]) -> None:
    """Take in what a job prints; the second one's worker is killed in its 50th step."""
    killed = index == 0
    stdout = jobs[index].stdout
    assert stdout is not None
    for line in stdout:
        outputs[index] += line
        place = re.search(r"process (\d+) step (\d+) ", line)
        if not killed and place and int(place[2]) >= 50:
            os.kill(int(place[1]), signal.SIGKILL)
            killed = True


def _ended_well(job: ranks.Ranks, of: list[int]) -> list[Told]:
    outcomes = job.outcomes(of=of, timeout_s=60, grace_s=20)
    if not all(outcome.ok for outcome in outcomes):
        raise ranks.RanksFailed(outcomes)
    for outcome in outcomes:
        # torch's store says so, with a stack, whenever a wait for a key ends without it.
        assert "timed out after" not in outcome.output, outcome.output
    return [outcome.value for outcome in outcomes]
