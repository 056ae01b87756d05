"""Proves that whatever goes wrong around a rank becomes an error on every rank, in seconds, that says what and where.

Deadlines here are promises of the product (a death is known everywhere within 5 s), not measures of speed.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import datetime
import itertools
import json
import os
import pathlib
import queue
import random
import re
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

import forked
import penstock
import ranks
from backends import ALL, Backend
from penstock import errors
from penstock.runtime import groups, process, store
from penstock.tools import doctor
from penstock.torch import backend
from torch_uses import batch, know, perceptron, regression, same

MEDIA = [backend for backend in ALL.values() if backend.name == "penstock"]
TCP = ALL["penstock-tcp"]
TESTS = pathlib.Path(__file__).resolve().parent
Door = int | str  # a port, or the name of a local socket

# Every death is known on every rank within this (docs/design/transport.md, "Failures"; PENSTOCK_PEER_TIMEOUT is 4 s).
DEATH_KNOWN_S = 5.0
# For how long the host of a store is silent before calls fail, where a test waits for it.
STORE_SILENT_S = 2.0


# ------------------------------------------------------------------------------------------------ ranks that go away


@pytest.mark.parametrize("medium", MEDIA, ids=str)
@pytest.mark.parametrize("victim", [0, 1])
def test_rank_killed_during_all_reduce(victim: int, medium: Backend) -> None:
    """SIGKILL in the middle of an all-reduce: both survivors raise PeerLost within 5 s, with everything one wants to know."""
    with ranks.Ranks(_all_reduce_for_ever, count=3, args=(1 << 22,), env=medium.env) as job:
        job.await_note("running", deadline_s=60)
        killed_s = job.signal(victim, signal.SIGKILL)
        _assert_lost(job, victim, since_s=killed_s, operation="all_reduce")


@pytest.mark.parametrize("medium", MEDIA, ids=str)
def test_rank_killed_while_its_children_hold_its_sockets(medium: Backend) -> None:
    """The same while the dead rank's DataLoader workers, forked after the group was made, live on."""
    with ranks.Ranks(_all_reduce_with_data_loader, count=3, args=(1 << 20,), env=medium.env) as job:
        job.await_note("running", deadline_s=60)
        workers = [child.pid for child in psutil.Process(job.pids[1]).children(recursive=True)]
        assert len(workers) == 2, "the DataLoader's workers are not there"
        killed_s = job.signal(1, signal.SIGKILL)
        _assert_lost(job, 1, since_s=killed_s, operation="all_reduce")
        assert all(psutil.pid_exists(worker) for worker in workers), "the workers were to outlive the dead rank"


@pytest.mark.parametrize("medium", MEDIA, ids=str)
def test_rank_stopped(medium: Backend) -> None:
    """SIGSTOP beyond PENSTOCK_PEER_TIMEOUT: the others raise PeerLost and end; the stopped one learns why when it goes on. (What
    it is told has to fit into the buffers of its sockets, behind the data of an operation.)"""
    with ranks.Ranks(_all_reduce_for_ever, count=3, args=(1 << 16,), env=medium.env) as job:
        job.await_note("running", deadline_s=60)
        stopped_s = job.signal(1, signal.SIGSTOP)
        _assert_lost(job, 1, since_s=stopped_s, operation="all_reduce")
        job.signal(1, signal.SIGCONT)
        _assert_hears_why(job)


@pytest.mark.parametrize("medium", MEDIA, ids=str)
def test_rank_stopped_while_the_others_live_on(medium: Backend) -> None:
    """The same where the others have left the group, and their processes live on."""
    with ranks.Ranks(_all_reduce_and_stay, count=3, args=(1 << 16,), env=medium.env) as job:
        job.await_note("running", deadline_s=60)
        job.signal(1, signal.SIGSTOP)
        job.await_note("lost", deadline_s=30, of=[0, 2])
        job.signal(1, signal.SIGCONT)
        _assert_hears_why(job)
        job.store.set("enough", "yes")
        job.outcomes(timeout_s=60)


def _assert_hears_why(job: ranks.Ranks) -> None:
    """Rank 1, which was stopped and goes on, raises PeerLost: it was given up, and why, and what helps."""
    (sleeper,) = job.outcomes(of=[1], timeout_s=30)
    assert sleeper.raised is not None and sleeper.raised.is_a("penstock.errors.PeerLost"), str(sleeper)
    for part in ("rank 1 (", "silent for 4.0 s", "PENSTOCK_PEER_TIMEOUT"):
        assert part in sleeper.raised.text, sleeper.raised.text


@pytest.mark.parametrize("medium", MEDIA, ids=str)
def test_rank_stopped_for_a_moment(medium: Backend) -> None:
    """SIGSTOP well below the limit does no harm: the job goes on with right results."""
    with ranks.Ranks(_all_reduce_until_told, count=3, args=(1 << 18,), env=medium.env) as job:
        job.await_note("running", deadline_s=60)
        job.signal(1, signal.SIGSTOP)
        job.still_running(for_s=1.0)
        job.signal(1, signal.SIGCONT)
        job.store.set("enough", "yes")
        for outcome in job.outcomes(timeout_s=60):
            assert outcome.ok, str(outcome)


@pytest.mark.parametrize("medium", MEDIA, ids=str)
def test_all_ranks_stopped(medium: Backend) -> None:
    """All ranks are stopped for longer than PENSTOCK_PEER_TIMEOUT, as Ctrl-Z does, and go on one after the other: nobody is
    lost, since a process does not count the time in which it did not run itself."""
    with ranks.Ranks(
        _all_reduce_until_told, count=3, args=(1 << 18,), env={**medium.env, "PENSTOCK_PEER_TIMEOUT": "1.5"}
    ) as job:
        job.await_note("running", deadline_s=60)
        for rank in range(3):
            job.signal(rank, signal.SIGSTOP)
        job.still_running(for_s=2.5)
        for rank in range(3):
            job.signal(rank, signal.SIGCONT)
            job.still_running(for_s=0.2)
        job.store.set("enough", "yes")
        for outcome in job.outcomes(timeout_s=60):
            assert outcome.ok, str(outcome)


@pytest.mark.parametrize("medium", MEDIA, ids=str)
def test_rank_leaves_while_others_wait(medium: Backend) -> None:
    """A rank whose script ends early: the others get an error that names it, not a hang."""
    with ranks.Ranks(_leave_early, count=3, env=medium.env) as job:
        outcomes = job.outcomes(timeout_s=60, grace_s=None)
    assert outcomes[1].ok, str(outcomes[1])
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.raised is not None and outcome.raised.is_a("penstock.errors.PeerLost"), str(outcome)
        assert "rank 1" in outcome.raised.text, outcome.raised.text


def _miss_rank_2(program: Callable[[str], tuple[str, str]], how: str) -> None:
    """Ranks 0 and 1 wait for rank 2, which dies or leaves before or meanwhile."""
    with ranks.Ranks(program, count=3, args=(how,)) as job:
        job.await_note("before", deadline_s=60)
        since_s = job.signal(2, signal.SIGKILL) if how == "dies before" else time.monotonic()
        job.await_note("waiting", deadline_s=60, of=[0, 1])
        if how == "dies":
            since_s = job.signal(2, signal.SIGKILL)
        _assert_rank_2_is_missed(job.outcomes(timeout_s=60, of=[0, 1]), since_s)


def _assert_rank_2_is_missed(outcomes: Sequence[ranks.Outcome], since_s: float) -> None:
    for outcome in outcomes:
        assert outcome.ok and outcome.ended_s - since_s < DEATH_KNOWN_S, str(outcome)
        kind, text = outcome.value
        assert kind == "PeerLost" and "rank 2 (" in text, text


@pytest.mark.parametrize("how", ["leaves", "dies", "dies before"])
def test_new_group_without_a_rank(how: str) -> None:
    """A rank dies or leaves, and the others build a group with it: all raise PeerLost within seconds, not after the time-out of
    half an hour. The others build a group without it, and use that."""
    _miss_rank_2(_new_group_without, how)


def test_new_group_after_a_death_of_which_others_have_left() -> None:
    """Rank 1 dies, rank 0 ends with that, and rank 2 builds groups: with the dead rank, and without it. Both errors named rank 0
    alone, which has left; both tell of the death, whether rank 2 knows of it itself or was told."""
    with ranks.Ranks(_new_group_after_all, count=3, env=TCP.env) as job:
        job.await_note("before", deadline_s=60)
        job.signal(1, signal.SIGKILL)
        (outcome,) = job.outcomes(of=[2], timeout_s=60, grace_s=None)
    assert outcome.ok, str(outcome)
    of_all, of_two = outcome.value
    assert "rank 1 (" in of_all, of_all
    assert re.search(r"rank 0 \(.+ has left the job\. Before, group 0 failed: .*rank 1 \(", of_two), of_two


def test_ranks_that_do_not_start_are_named() -> None:
    """Whom a join has waited for in vain: ranks, once each. Of rank 0, which also says what the group is, it named "group"."""
    _, text = ranks.run(_start_without_rank_0, count=2)
    assert "nothing came from rank(s) 0. Did they start?" in text, text


def test_ranks_that_start_at_the_last_moment_are_not_missing() -> None:
    """Those that came after the time-out, but before the error was made, were named as an empty list: the join goes on."""

    class Late:
        """Has nothing when it is asked first, and everything from then on; no rank gives up."""

        def __init__(self) -> None:
            self.asked = 0

        def check(self, keys: list[str]) -> bool:
            if keys == [groups._FAILED]:
                return False
            self.asked += 1
            return self.asked > 1

    groups._await_keys(Late(), ["group", "0", "1"], 1, datetime.timedelta(0), "late", groups._Watch(None, {}))


def test_wait_for_the_first_sparse_all_reduce_gives_up() -> None:
    """The first sparse all-reduce of a group opens a channel first, and a rank does not come: a wait with a time-out of its
    own ends then, as any other, and the group fails on all ranks. It waited for the group's time-out."""
    for kind in ranks.run(_give_up_on_sparse, count=2):
        assert kind in ("Timeout", "Refused", "Closed")


@pytest.mark.parametrize(
    "who", ["all", "one, a subgroup", "one, the default group", "one, the default group, and is back"]
)
def test_new_group_after_abort(who: str) -> None:
    """Ranks that have aborted a group can build another at once, if all have, or if the default group lives. If one rank aborts
    the default group, it has left the job: all get an error within seconds. That also holds if this rank has published its
    contact for the next group before another rank looks: on a loaded machine the two built that group."""
    for built, text in ranks.run(_new_group_after_abort, count=2, args=(who,), timeout_s=DEATH_KNOWN_S + 30):
        assert built == ("one, the default group" not in who), text
        assert built or ("rank 0 (" in text and "has left the job" in text), text


@pytest.mark.parametrize("how", ["dies", "dies before", "dies with a contact"])
def test_new_group_under_gloo_without_a_rank(how: str) -> None:
    """The default group is gloo's, and ranks have a group of Penstock's. One of them dies, and the others build a second one
    with it: they raise PeerLost within seconds, as the first one knows. So they do where they have its contact already."""
    _miss_rank_2(_new_group_under_gloo_without, how)


def test_who_has_left_its_groups_comes_back_under_gloo() -> None:
    """The default group is gloo's. A rank that has destroyed its last group of Penstock's is not dead: the next one is built. If
    it dies then, the others hear of that, though some of their groups know only that it has left them."""
    with ranks.Ranks(_leave_and_come_back_under_gloo, count=3) as job:
        job.await_note("back", deadline_s=60)
        since_s = job.signal(2, signal.SIGKILL)
        outcomes = job.outcomes(timeout_s=60, of=[0, 1])
    _assert_rank_2_is_missed(outcomes, since_s)


@pytest.mark.parametrize("medium", MEDIA, ids=str)
def test_rank_raises_while_others_wait(medium: Backend) -> None:
    """A Python exception on one rank ends the others within seconds of its exit."""
    with ranks.Ranks(_raise_early, count=3, env=medium.env) as job:
        outcomes = job.outcomes(timeout_s=60, grace_s=None)
    assert outcomes[1].raised is not None and outcomes[1].raised.is_a("ZeroDivisionError")
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.raised is not None and outcome.raised.is_a("penstock.errors.PenstockError"), str(outcome)
        assert outcome.ended_s - outcomes[1].ended_s < DEATH_KNOWN_S + 3, "the exit itself may take up to 3 s"


def test_link_dropped_silently() -> None:
    """A cable is pulled between emulated hosts: every rank raises PeerLost within 5 s, also the one that is cut off."""
    from penstock.tools import testbed

    with contextlib.ExitStack() as stack:
        bed = stack.enter_context(testbed.Testbed(hosts=3))
        job = stack.enter_context(ranks.Ranks(_all_reduce_for_ever, count=3, args=(1 << 16,), bed=bed))
        job.await_note("running", deadline_s=60)
        bed.drop_link(1)
        dropped_s = time.monotonic()
        outcomes = job.outcomes(timeout_s=30, grace_s=None)
    for outcome in outcomes:
        assert outcome.raised is not None and outcome.raised.is_a("penstock.errors.PeerLost"), str(outcome)
        assert outcome.ended_s - dropped_s < DEATH_KNOWN_S, f"it took {outcome.ended_s - dropped_s:.1f} s: {outcome}"
    assert "rank 1" in outcomes[0].raised.text and "rank 1" in outcomes[2].raised.text


def test_store_that_cannot_be_reached_ends_calls() -> None:
    """A rank that is cut off does not hang in torch's store: neither in a call that is sent nor in one that waits for a key."""
    from penstock.tools import testbed

    with contextlib.ExitStack() as stack:
        bed = stack.enter_context(testbed.Testbed(hosts=2))
        job = stack.enter_context(ranks.Ranks(_ask_store_for_ever, count=2, bed=bed))
        job.await_note("asking", deadline_s=60)
        bed.drop_link(1)
        dropped_s = time.monotonic()
        [outcome] = job.outcomes(of=[1], timeout_s=30, grace_s=None)
        assert sorted(outcome.value or []) == ["asked", "waited"], str(outcome)
        assert outcome.ended_s - dropped_s < 2 * STORE_SILENT_S + DEATH_KNOWN_S, str(outcome)


def test_survivors_start_again() -> None:
    """After a death the survivors destroy the group and build a smaller one, in the same processes."""
    with ranks.Ranks(_start_again_without_rank_1, count=3, env=TCP.env) as job:
        job.await_note("running", deadline_s=60)
        job.signal(1, signal.SIGKILL)
        for outcome in job.outcomes(of=[0, 2], timeout_s=60, grace_s=None):
            assert outcome.ok, str(outcome)
            assert outcome.value == 2.0


@pytest.mark.parametrize("medium", MEDIA, ids=str)
def test_rank_killed_during_ddp(medium: Backend) -> None:
    """The error comes out of backward() as an exception with Penstock's text; the process does not crash in C++."""
    with ranks.Ranks(_train_for_ever, count=3, env=medium.env) as job:
        job.await_note("running", deadline_s=60)
        killed_s = job.signal(1, signal.SIGKILL)
        for outcome in job.outcomes(of=[0, 2], timeout_s=30, grace_s=None):
            assert outcome.raised is not None and outcome.exit_code == 0, str(outcome)
            assert outcome.raised.is_a("RuntimeError"), str(outcome)
            assert "rank 1" in outcome.raised.text, outcome.raised.text
            assert outcome.ended_s - killed_s < DEATH_KNOWN_S, str(outcome)


@pytest.mark.parametrize("medium", MEDIA, ids=str)
def test_everything_in_flight_fails(medium: Backend) -> None:
    """Several operations in flight at a death: every wait and every future raises, and so does what is issued after."""
    with ranks.Ranks(_many_in_flight, count=3, env=medium.env) as job:
        job.await_note("in flight", deadline_s=60, of=[0, 2])
        job.signal(1, signal.SIGKILL)
        for outcome in job.outcomes(of=[0, 2], timeout_s=30, grace_s=None):
            assert outcome.ok, str(outcome)
            assert outcome.value == ["PeerLost"] * 8, outcome.value


@pytest.mark.parametrize("medium", MEDIA, ids=str)
def test_nothing_touches_the_buffer_after_the_error(medium: Backend) -> None:
    """Once wait has raised, the tensor is the user's again: what is written then stays, though peers were sending."""
    with ranks.Ranks(_watch_buffer_after_error, count=3, args=(1 << 24,), env=medium.env) as job:
        job.await_note("running", deadline_s=60)
        job.signal(1, signal.SIGKILL)
        for outcome in job.outcomes(of=[0, 2], timeout_s=60, grace_s=None):
            assert outcome.ok, str(outcome)


@pytest.mark.parametrize("program", ["reducer", "atexit"])
def test_use_after_the_end(program: str) -> None:
    """A backward pass whose reducer outlives its group, and a collective in an atexit handler: Closed at once, and no wait."""
    with ranks.Ranks(_use_after_the_end, count=2, args=(program,), env=TCP.env) as job:
        for outcome in job.outcomes(timeout_s=20, grace_s=None):
            assert outcome.ok and "refused: Closed" in outcome.output, str(outcome)


# ------------------------------------------------------------------------------------- scripts that disagree


@pytest.mark.parametrize("medium", MEDIA, ids=str)
@pytest.mark.parametrize("name", ["shape", "dtype", "operation", "reduction", "root", "order", "one more"])
def test_mismatch(name: str, medium: Backend) -> None:
    """One rank of three issues something else: every rank raises Mismatch, and the text shows both sides."""
    with ranks.Ranks(_disagree, count=3, args=(name,), env=medium.env) as job:
        outcomes = job.outcomes(timeout_s=60, grace_s=20)
    texts = []
    for outcome in outcomes:
        assert outcome.raised is not None and outcome.raised.is_a("penstock.errors.Mismatch"), str(outcome)
        texts.append(outcome.raised.text)
        assert "Mismatch: Mismatch" not in outcome.raised.traceback, "the kind is the exception's name, said once"
    shown = {
        "shape": ["10", "11"],
        "dtype": ["float32", "int32"],
        "operation": ["all_reduce", "broadcast"],
        "reduction": ["sum", "max"],
        "root": ["0", "2"],
        "order": ["all_reduce", "barrier"],
        "one more": ["all_reduce", "barrier"],
    }[name]
    for text in texts:
        assert all(word in text.lower() for word in shown), f"{shown} are not all in: {text}"
        assert "rank 1" in text, text


def test_different_splits() -> None:
    """all_to_all_single whose splits do not fit together: an error on both ranks."""
    with ranks.Ranks(_disagree_on_splits, count=2, env=TCP.env) as job:
        for outcome in job.outcomes(timeout_s=60, grace_s=20):
            assert outcome.raised is not None and outcome.raised.is_a("penstock.errors.PenstockError"), str(outcome)


@pytest.mark.parametrize("medium", MEDIA, ids=str)
def test_time_out(medium: Backend) -> None:
    """A rank that lives but does not come: Timeout, which names the operation and the rank that is awaited."""
    with ranks.Ranks(_come_late, count=2, env=medium.env) as job:
        (waiting,) = job.outcomes(of=[0], timeout_s=30, grace_s=None)
        assert waiting.raised is not None and waiting.raised.is_a("penstock.errors.Timeout"), str(waiting)
        assert waiting.raised.is_a("TimeoutError")
        assert "rank 1" in waiting.raised.text and "all_reduce" in waiting.raised.text, waiting.raised.text
        job.store.set("now", "yes")
        (late,) = job.outcomes(of=[1], timeout_s=30)
        assert late.raised is not None and late.raised.is_a("penstock.errors.PenstockError"), str(late)


@pytest.mark.parametrize("medium", MEDIA, ids=str)
def test_a_wait_that_gives_up(medium: Backend) -> None:
    """`wait(timeout)` raises Timeout, and what comes later does not touch the tensor; the other rank hears why."""
    waiting, late = ranks.run(_give_up_waiting, count=2, env=medium.env)
    assert waiting[0] == "Timeout" and "all_reduce" in waiting[1] and "Timed out after 0.3 s" in waiting[1], waiting
    assert "rank 0" in late[1] and "given up waiting" in late[1], late


def test_a_pair_that_cannot_reach_each_other() -> None:
    """All ranks learn which two, with an address, from init_process_group; `penstock doctor` says so without a traceback."""
    from penstock.tools import testbed

    with contextlib.ExitStack() as stack:
        bed = stack.enter_context(testbed.Testbed(hosts=3))
        block = ["ip", "route", "add", "blackhole", bed.address(2)]
        bed.inside(1, lambda: subprocess.run(block, check=True))
        job = stack.enter_context(ranks.Ranks(_ask_the_doctor, count=3, bed=bed))
        outcomes = job.outcomes(timeout_s=60, grace_s=None)
    pairs = [
        rf"Timed out after .+: rank {one} \(.+\) has no connection .+ rank {other} \({bed.address(other)}:\d+ "
        for one, other in ((1, 2), (2, 1))
    ]
    for outcome in outcomes:
        assert outcome.raised is not None and outcome.raised.is_a("SystemExit"), str(outcome)
        assert outcome.raised.text == "1" and "Traceback" not in outcome.output, str(outcome)
        assert any(re.search(pair, outcome.output) for pair in pairs), str(outcome)


def test_a_store_that_outlives_a_smaller_job() -> None:
    """Two ranks form a group through a store and leave it; then three do through the same store, which still has the contacts
    of the first: each finds the others of its own job, and the next jobs do too."""
    assert ranks.run(_grow_through_one_store, count=3, env=TCP.env) == [[2.0, 3.0, 2.0, 3.0]] * 2 + [[3.0, 3.0]]


def test_callbacks_while_the_gil_is_held() -> None:
    """Futures that complete while the script holds the GIL wait for it together, not on a thread each."""
    for most in ranks.run(_complete_while_the_gil_is_held, count=2, env=TCP.env):
        assert most <= 4, f"{most} threads wait to call back"


def test_descriptors_run_out() -> None:
    """A process without a free descriptor does not spin on the connections that wait; it logs what is lacking, accepts them when
    there is room again, and the soft limit is raised for the streams that a job needs."""
    env = {**TCP.env, "PENSTOCK_LOG": "info", "PENSTOCK_STREAMS": "64"}
    with ranks.Ranks(_run_out_of_descriptors, count=2, env=env) as job:
        busy_s, raised = job.await_note("none left", deadline_s=60)[0]
        first, second = job.outcomes(timeout_s=60)
    assert first.ok and second.ok, f"{first}\n{second}"
    assert busy_s < 0.5, f"the I/O thread was busy for {busy_s:.1f} s of one"
    assert raised, "the soft limit is not raised"
    assert "cannot accept connections (Too many open files" in first.output, str(first)


def test_too_few_descriptors_are_allowed() -> None:
    """Where the hard limit is too low for the streams that a job needs, its ranks say how many descriptors are needed and what to
    change, and go on with those that they get."""
    with ranks.Ranks(_start_with_few_descriptors, count=2, env={**TCP.env, "PENSTOCK_STREAMS": "64"}) as job:
        for outcome in job.outcomes(timeout_s=60):
            assert outcome.ok, str(outcome)
            told = f"open files are needed, and at most {outcome.value} are allowed"
            assert told in outcome.output and "ulimit -Hn" in outcome.output, str(outcome)


# ------------------------------------------------------------------------------------------ deployments that are wrong


def test_wrong_secret() -> None:
    """Ranks with different secrets refuse each other, on both sides, and say that it is the secret."""
    secrets = {0: {"PENSTOCK_SECRET": "one"}, 1: {"PENSTOCK_SECRET": "another"}}
    with ranks.Ranks(_start_and_reduce, count=2, env=TCP.env, env_of_rank=secrets) as job:
        for outcome in job.outcomes(timeout_s=60, grace_s=20):
            assert outcome.raised is not None and outcome.raised.is_a("penstock.errors.Refused"), str(outcome)
            assert "secret" in outcome.raised.text.lower(), outcome.raised.text
            assert "another" not in outcome.raised.text, "an error must not show a secret"


def test_start_again_after_a_refusal() -> None:
    """A process whose first init_process_group was refused can mend what was wrong and start again."""
    secrets = {0: {"PENSTOCK_SECRET": "one"}, 1: {"PENSTOCK_SECRET": "another"}}
    assert ranks.run(_mend_secret, count=2, env_of_rank=secrets) == [2.0, 2.0]


@pytest.mark.parametrize("medium", MEDIA, ids=str)
def test_group_that_cannot_be_joined(medium: Backend) -> None:
    """One rank fails to join a group while others have: they learn it from their first operation, not from a time-out.

    Nothing is left of the group in the engine, which other groups keep running, and the next group works.
    """
    ranks.run(_fail_to_join, count=3, env=medium.env)


def test_secret_on_one_rank_only() -> None:
    """A rank without the job's secret is refused, and is told which variable to set."""
    with ranks.Ranks(_start_and_reduce, count=2, env_of_rank={0: {"PENSTOCK_SECRET": "one"}}) as job:
        for outcome in job.outcomes(timeout_s=60, grace_s=20):
            assert outcome.raised is not None and outcome.raised.is_a("penstock.errors.Refused"), str(outcome)
            assert "PENSTOCK_SECRET" in outcome.raised.text, outcome.raised.text


def test_right_secret(tmp_path: pathlib.Path) -> None:
    """The same secret, from a file on one rank and from the environment on the other, lets them talk."""
    (tmp_path / "secret").write_text("shared by all\n")
    secrets = {
        0: {"PENSTOCK_SECRET": "shared by all"},
        1: {"PENSTOCK_SECRET_FILE": str(tmp_path / "secret")},
    }
    assert ranks.run(_start_and_reduce, count=2, env=TCP.env, env_of_rank=secrets) == [2.0, 2.0]


@pytest.mark.parametrize(
    ("setting", "value", "word"),
    [
        ("PENSTOCK_INTERFACE", "nosuch0", "nosuch0"),
        ("PENSTOCK_STREAMS", "many", "many"),
        ("PENSTOCK_STREAMS", "0", "PENSTOCK_STREAMS"),
        ("PENSTOCK_ALGORITHM", "fastest", "ring"),
        ("PENSTOCK_PORT_RANGE", "9-1", "9-1"),
        ("PENSTOCK_SECRET_FILE", "/nonexistent/secret", "/nonexistent/secret"),
    ],
)
def test_wrong_setting(setting: str, value: str, word: str) -> None:
    """A setting with a wrong value: Config, which is a ValueError too, names the setting and what is wrong.

    A rank may also be stopped by what another has found first; then its error quotes the other's.
    """
    with ranks.Ranks(_start_and_reduce, count=2, env={**TCP.env, setting: value}) as job:
        outcomes = job.outcomes(timeout_s=60, grace_s=20)
    for outcome in outcomes:
        assert outcome.raised is not None and outcome.raised.is_a("penstock.errors.PenstockError"), str(outcome)
        assert setting in outcome.raised.text and word in outcome.raised.text, outcome.raised.text
        assert "The group is" not in outcome.raised.text, "there was none yet"
    first = next(outcome for outcome in outcomes if outcome.raised.is_a("penstock.errors.Config"))
    assert first.raised.is_a("ValueError")


def test_wrong_setting_on_one_rank() -> None:
    """A setting that is wrong on one rank stops all of them in seconds: the others do not wait for their time-out."""
    with ranks.Ranks(_start_and_reduce, count=3, env_of_rank={1: {"PENSTOCK_INTERFACE": "nosuch0"}}) as job:
        outcomes = job.outcomes(timeout_s=60, grace_s=20)
    assert outcomes[1].raised is not None and outcomes[1].raised.is_a("penstock.errors.Config"), str(outcomes[1])
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.raised is not None and outcome.raised.is_a("penstock.errors.PenstockError"), str(outcome)
        assert "rank 1" in outcome.raised.text and "nosuch0" in outcome.raised.text, outcome.raised.text


@pytest.mark.parametrize("setting", ["PENSTOCK_INTERFACE", "PENSTOCK_DEPLOYMENT", "PENSTOCK_ALGORITHM"])
def test_wrong_setting_on_a_rank_0_that_holds_the_store(setting: str) -> None:
    """Ranks started by hand: the store ends with rank 0, and yet the others hear what is wrong with rank 0's settings, although
    they come half a second later."""
    with _occupied_port() as port:
        pass
    by_hand = {"TORCHELASTIC_USE_AGENT_STORE": None, "MASTER_PORT": str(port)}
    with ranks.Ranks(_start_late, count=3, env=by_hand, env_of_rank={0: {setting: "nosuch0"}}) as job:
        outcomes = job.outcomes(timeout_s=60, grace_s=20)
    assert outcomes[0].raised is not None and outcomes[0].raised.is_a("penstock.errors.Config"), str(outcomes[0])
    for outcome in outcomes[1:]:
        assert outcome.raised is not None and outcome.raised.is_a("penstock.errors.Refused"), str(outcome)
        assert "rank 0" in outcome.raised.text and "nosuch0" in outcome.raised.text, outcome.raised.text


def test_who_holds_the_store() -> None:
    """A rank whose store is another process's does not wait for its readers when it fails; one that serves it does."""
    assert ranks.run(_serves_store, count=1) == [(False, True)]


def test_one_line_at_init() -> None:
    """PENSTOCK_LOG=info prints what carries a group, once for the group."""
    with ranks.Ranks(
        _start_and_reduce, count=2, env={**TCP.env, "PENSTOCK_LOG": "info", "PENSTOCK_STREAMS": "3"}
    ) as job:
        outcomes = job.outcomes(timeout_s=60, grace_s=20)
    lines = [line for outcome in outcomes for line in outcome.output.splitlines() if "penstock: group" in line]
    assert len(lines) == 1, lines
    for part in ("2 ranks on 1 host", "3 TCP streams a peer", "127.0.0.1", "algorithm auto"):
        assert part in lines[0], lines[0]


def test_port_in_use() -> None:
    """A port range that somebody else has: Config names the range. A range with room beside him is used."""
    with _occupied_port() as port:
        settings = {**TCP.env, "PENSTOCK_PORT_RANGE": f"{port}-{port}"}
        with ranks.Ranks(_start_and_reduce, count=2, env=settings) as job:
            for outcome in job.outcomes(timeout_s=60, grace_s=20):
                assert outcome.raised is not None and outcome.raised.is_a("penstock.errors.Config"), str(outcome)
                assert str(port) in outcome.raised.text, outcome.raised.text
                assert "The group is" not in outcome.raised.text, "there was none yet"
        settings = {**TCP.env, "PENSTOCK_PORT_RANGE": f"{port}-{port + 20}"}
        assert ranks.run(_start_and_reduce, count=2, env=settings) == [2.0, 2.0]


def test_rank_that_never_comes() -> None:
    """init_process_group gives up after its time-out and names the rank that is missing."""
    with ranks.Ranks(_start_and_reduce, count=1, args=(1.5,), env={"WORLD_SIZE": "2"}) as job:
        (outcome,) = job.outcomes(timeout_s=60)
        assert outcome.raised is not None and outcome.raised.is_a("penstock.errors.Timeout"), str(outcome)
        assert re.search(r"rank(\(s\))? 1\b", outcome.raised.text), outcome.raised.text


def test_store_unreachable() -> None:
    """Nobody listens at MASTER_PORT: an error in time that names the address."""
    with _occupied_port() as port:
        pass
    with ranks.Ranks(_start_and_reduce, count=1, args=(1.5,), env={"MASTER_PORT": str(port), "WORLD_SIZE": "2"}) as job:
        (outcome,) = job.outcomes(timeout_s=60)
        assert outcome.raised is not None, str(outcome)
        assert str(port) in outcome.raised.text, outcome.raised.text


def test_store_lost() -> None:
    """The store dies after the start: running collectives go on; a new group is an error, not a hang."""
    with ranks.Ranks(_new_groups_for_ever, count=2, env=TCP.env) as job:
        job.await_note("running", deadline_s=60)
        job.close_store()
        for outcome in job.outcomes(timeout_s=60, grace_s=30):
            assert outcome.raised is not None and outcome.exit_code == 0, str(outcome)
            assert outcome.raised.is_a("PenstockError") or outcome.raised.is_a("DistError"), str(outcome)


def test_monitored_barrier_without_a_store() -> None:
    """It needs the store only for the names of ranks that did not come."""
    with ranks.Ranks(_monitored_barriers, count=2, env=TCP.env) as job:
        job.await_note("running", deadline_s=60)
        job.close_store()
        assert [outcome.value for outcome in job.outcomes(timeout_s=60)] == [True, True]


def test_monitored_barrier_blames_no_rank_that_came() -> None:
    """A rank whose barrier fails after the others have passed it calls none of them missing; barriers leave one key a rank."""
    assert ranks.run(_fail_behind_others, count=2) == [None, None]


# --------------------------------------------------------------------------------------------- unauthenticated peers on the port


APPROACHES = ["noise", "half a handshake", "endless length", "endless noise", "silence", "crowd"]


@pytest.mark.parametrize(
    ("medium", "approach"),
    [*itertools.product(MEDIA, APPROACHES), (ALL["penstock"], "descriptors")],
    ids=str,
)
def test_unauthenticated_peer_on_the_port(medium: Backend, approach: str) -> None:
    """An unauthenticated peer connects to a rank, says nonsense, half a sentence or nothing, alone or in hundreds.

    The job goes on with right results, and the rank does not keep what the unauthenticated peer leaves behind.
    """
    with ranks.Ranks(_all_reduce_until_told, count=2, args=(1 << 16,), env=medium.env) as job:
        job.await_note("running", deadline_s=60)
        doors = [door for pid in job.pids for door in _doors(pid, "tcp" if medium is TCP else "unix")]
        assert len(doors) == 2, f"each rank was to listen at one: {doors}"
        before = [psutil.Process(pid).num_fds() for pid in job.pids]
        ports: set[int] = set()
        with contextlib.ExitStack() as connections:
            for door in doors:
                for connection in _approach(approach, door):
                    connections.enter_context(connection)
                    if medium is TCP:
                        ports.add(connection.getsockname()[1])
            for rank in range(2):
                job.store.set(f"count/{rank}", "yes")
            job.await_note("counted", deadline_s=60)
        for rank, process in enumerate(map(psutil.Process, job.pids)):
            if medium is TCP:
                # Descriptors cannot be counted: a job runs from its first stream on, and others may come up until now.
                left = f"rank {rank} keeps unauthenticated peers' sockets"
                _await(lambda: ports.isdisjoint(_remote_ports(process)), left)  # noqa: B023
            else:
                left = f"rank {rank} keeps unauthenticated peers' descriptors"
                _await(lambda: process.num_fds() <= before[rank], left)  # noqa: B023
        job.store.set("enough", "yes")
        for outcome in job.outcomes(timeout_s=60):
            assert outcome.ok, str(outcome)
            if approach == "descriptors":
                assert "passes descriptors" in outcome.output, str(outcome)


def test_nobody_reads_standard_error() -> None:
    """A rank whose standard error is a full pipe, as a launcher's that has stopped, logs what an unauthenticated peer says and
    lives on; the pipe's reader gets the line when it reads again."""
    with ranks.Ranks(_log_into_a_full_pipe, count=2, env={**TCP.env, "PENSTOCK_PEER_TIMEOUT": "2"}) as job:
        outcomes = job.outcomes(timeout_s=30)
    assert all(outcome.ok for outcome in outcomes), "\n".join(map(str, outcomes))
    assert re.fullmatch(r"\[WARN \] penstock: .*127\.0\.0\.1:\d+.*\n", outcomes[0].value), outcomes[0].value


# ------------------------------------------------------------------------------------------------- users and signals


@pytest.mark.parametrize("medium", MEDIA, ids=str)
def test_fork_after_init(medium: Backend) -> None:
    """A forked child that communicates, builds a group, or waits for what its parent has started, gets an error that says so, and
    has none of the engine's descriptors; its parent works on, before and after its end."""
    for answers, inherited in ranks.run(_fork_and_use, count=2, env=medium.env):
        assert len(answers) == 3
        for kinds, text in answers:
            assert "Closed" in kinds and "forked" in text, f"{kinds}: {text}"
        engine = [what for what in inherited["parent"].values() if "anon_inode" in what]
        assert engine and not [what for what in inherited["child"].values() if "anon_inode" in what], inherited
        # Beside the engine's, torch's store has a connection or two, and those are not ours to close.
        assert len(inherited["child"]) <= 2 < len(inherited["parent"]) - 2, inherited


def test_a_script_ends_with_callbacks_to_come() -> None:
    """Futures whose callbacks are Python, with more of them than have been called, also of a group that is destroyed: the script
    ends well. A thread that asked for Python when that was gone ended the process with SIGABRT."""
    for destroys in (False, True):
        for code, errors_ in ranks.run(_end_with_callbacks, count=2, args=(destroys,), timeout_s=90):
            assert code == 0, errors_


def _end_with_callbacks(destroys: bool) -> tuple[int, str]:
    script = """if True:
        import time
        import torch
        import torch.distributed as dist

        dist.init_process_group("penstock")
        for number in range(20):
            work = dist.all_reduce(torch.ones(1000 * (number + 1)), async_op=True)
            work.get_future().then(lambda _: time.sleep(0.02))
    """
    if destroys:
        script += "    dist.destroy_process_group()\n"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=80)
    return done.returncode, done.stderr


def test_fork_while_a_group_is_joined() -> None:
    """A child forked while another thread joins a group is told, too: it does not wait for a lock for ever."""
    (text,) = ranks.run(_fork_while_joining, count=1)
    assert "forked" in text, text


@pytest.mark.parametrize("medium", MEDIA, ids=str)
@pytest.mark.parametrize("how", ["tensor", "tensor and work", "memory"])
def test_tensors_freed_early(how: str, medium: Backend) -> None:
    """The user drops the tensor (and the Work, or only the memory under it: ``tensor.data = ...``) right after the call.

    The engine writes into no memory that others have by then, and other operations are right.
    """
    ranks.run(_free_early, count=3, args=(how,), env=medium.env)


@pytest.mark.parametrize("medium", MEDIA, ids=str)
def test_tensors_changed_early(medium: Backend) -> None:
    """The user writes into a tensor that is in flight: that result is lost, but the next is right, and nothing hangs."""
    ranks.run(_change_early, count=3, env=medium.env)


@pytest.mark.parametrize("medium", MEDIA, ids=str)
def test_two_groups_from_two_threads(medium: Backend) -> None:
    """Two threads, each with a group, large and small operations, destroy their groups at the end."""
    ranks.run(_two_threads, count=2, env=medium.env)


def test_interrupt_ends_a_wait() -> None:
    """Ctrl-C while a rank waits for one that does not come: KeyboardInterrupt at once, not at the time-out."""
    with ranks.Ranks(_wait_for_ever, count=2, env=TCP.env) as job:
        job.await_note("waiting", deadline_s=60, of=[0])
        interrupted_s = job.signal(0, signal.SIGINT)
        (outcome,) = job.outcomes(of=[0], timeout_s=30)
        assert outcome.raised is not None and outcome.raised.is_a("KeyboardInterrupt"), str(outcome)
        assert outcome.ended_s - interrupted_s < 3


def test_interrupt_of_torchrun() -> None:
    """Ctrl-C at a terminal, which goes to torchrun and all ranks: everything is gone in seconds, no orphan is left."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    process = forked.Popen(
        [*forked.TORCHRUN, "--nproc-per-node=2", str(TESTS / "endless.py"), "1000000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )
    lines: queue.Queue[tuple[int, str]] = queue.Queue()
    threading.Thread(target=_read_lines, args=(0, process, lines), daemon=True).start()
    try:
        _await_lines(lines, "running", count=2, deadline_s=100)
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 2
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=20) != 0  # torchrun itself gives its ranks 30 s before it kills them
        _, alive = psutil.wait_procs(family, timeout=5)
        assert not alive, f"{alive} outlive torchrun"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# ------------------------------------------------------------------------------------------------ what the ranks run


def _start(timeout_s: float = 120.0) -> tuple[int, int]:
    know("penstock")
    dist.init_process_group("penstock", timeout=datetime.timedelta(seconds=timeout_s))
    return dist.get_rank(), dist.get_world_size()


def _job_store() -> dist.Store:
    """The store of `ranks.Ranks`, without the prefixes that torch gives to groups."""
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


def _ask_store_for_ever() -> list[str]:
    ended = queue.Queue()

    def until_it_fails(name: str, call: Callable[[dist.Store], None]) -> None:
        client = _job_store()
        store.keep_alive(dist.PrefixStore("group", client), STORE_SILENT_S)
        with contextlib.suppress(dist.DistError):
            while True:
                call(client)
        ended.put(name)

    calls = {"asked": lambda client: client.add("number", 1), "waited": lambda client: client.get("never")}
    for name, call in calls.items():
        threading.Thread(target=until_it_fails, args=(name, call), daemon=True).start()
    ranks.note("asking")
    return [ended.get() for _ in calls]


def _serves_store() -> tuple[bool, bool]:
    elsewhere = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False)
    here = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    return tuple(store.is_served_here(dist.PrefixStore("group", end)) for end in (elsewhere, here))


def _start_and_reduce(timeout_s: float = 30.0) -> float:
    _start(timeout_s)
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor[999].item()


def _start_late() -> float:
    """Ranks other than 0 connect to torch's store at once, and read it late."""
    true_join = groups.join

    def join(*args: Any, **kwargs: Any) -> Any:
        if os.environ["RANK"] != "0":
            time.sleep(0.5)
        return true_join(*args, **kwargs)

    groups.join = join
    return _start_and_reduce()


def _mend_secret() -> float:
    with pytest.raises(RuntimeError, match="secret"):
        _start(30.0)
    os.environ["PENSTOCK_SECRET"] = "the right one"
    return _start_and_reduce()


def _fail_to_join() -> None:
    rank, size = _start(60.0)
    from penstock.runtime import groups

    await_links = groups._await_links
    if rank == 1:

        def fail(*_: object) -> None:
            raise TimeoutError("a test")

        groups._await_links = fail
    with pytest.raises((RuntimeError, TimeoutError), match="a test"):
        # Ranks that know all the others already have joined at once.
        dist.all_reduce(torch.ones(10), group=dist.new_group())
    groups._await_links = await_links
    if rank == 1:
        (left,) = penstock.stats()["groups"]
        assert left["failed"] is None
    tensor = torch.ones(10)
    dist.all_reduce(tensor, group=dist.new_group())
    dist.all_reduce(tensor)
    same(tensor, float(size * size))
    dist.destroy_process_group()


def _ask_the_doctor() -> None:
    doctor.command(["--timeout=4"], prog_name="penstock doctor")


def _all_reduce_for_ever(elements: int) -> None:
    rank, size = _start()
    _reduce_for_ever(elements, rank, size)


def _reduce_for_ever(elements: int, rank: int, size: int) -> None:
    tensor = torch.full((elements,), float(rank))
    for turn in itertools.count():
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        assert tensor[0] == tensor[-1] == size - 1
        if turn == 3:
            ranks.note("running")


def _all_reduce_and_stay(elements: int) -> None:
    """Reduces until a rank is lost. The others leave the group then, and stay until the test sets "enough"."""
    rank, size = _start()
    store = _job_store()
    try:
        _reduce_for_ever(elements, rank, size)
    except penstock.errors.PeerLost:
        if rank == 1:
            raise
        dist.destroy_process_group()
        ranks.note("lost")
        store.wait(["enough"])


def _all_reduce_until_told(elements: int) -> None:
    """Reduces until the test sets "enough"; says "counted" when it has gone on for a while after "count" was set."""
    rank, size = _start()
    store = _job_store()
    since_count = 0
    for turn in itertools.count():
        tensor = torch.full((elements,), float(rank + turn % 7))
        dist.all_reduce(tensor)
        same(tensor, float(sum(r + turn % 7 for r in range(size))), f"turn {turn}")
        if turn == 3:
            ranks.note("running")
        if turn % 10 == 0:
            # All ranks must leave in the same turn, so rank 0 looks and tells.
            told = torch.tensor([float(store.check(["enough"]))])
            dist.broadcast(told, src=0)
            if told:
                break
            since_count += store.check([f"count/{rank}"])
            if since_count == 20:
                ranks.note("counted")
    dist.destroy_process_group()


class _Blocking(torch.utils.data.Dataset):
    """Gives a few items and then blocks for ever, so that its worker process does not look after its parent."""

    def __init__(self) -> None:
        self._pipe = os.pipe()  # the worker holds the writing end too, so that a read never ends

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        if index >= 2:
            os.read(self._pipe[0], 1)
        return index


def _all_reduce_with_data_loader(elements: int) -> None:
    rank, size = _start()
    if rank == 1:
        loader = torch.utils.data.DataLoader(_Blocking(), num_workers=2, multiprocessing_context="fork")
        items = iter(loader)
        assert next(items).item() == 0
    _reduce_for_ever(elements, rank, size)


def _leave_early() -> None:
    rank, _ = _start()
    dist.barrier()
    if rank != 1:
        dist.all_reduce(torch.ones(1 << 20))


def _raise_early() -> None:
    rank, _ = _start()
    dist.barrier()
    if rank == 1:
        _ = 1 / 0
    dist.all_reduce(torch.ones(1 << 20))


def _start_again_without_rank_1() -> float:
    rank, size = _start()
    try:
        _reduce_for_ever(1 << 16, rank, size)
    except RuntimeError:
        dist.destroy_process_group()
    store = dist.PrefixStore("without rank 1", _job_store())
    dist.init_process_group("penstock", store=store, rank=rank // 2, world_size=2)
    tensor = torch.ones(1 << 16)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor[-1].item()


def _grow_through_one_store() -> list[float]:
    rank = int(os.environ["RANK"])
    store = dist.PrefixStore("one for all", _job_store())
    know("penstock")
    found = []
    for world in (2, 3, 2, 3):
        if rank < world:
            timeout = datetime.timedelta(seconds=30)
            # torch's own keys for the group's name are new each time.
            dist.init_process_group("penstock", store=store, rank=rank, world_size=world, timeout=timeout)
            tensor = torch.ones(10)
            dist.all_reduce(tensor)
            found.append(tensor[9].item())
            dist.destroy_process_group()
    return found


def _complete_while_the_gil_is_held() -> int:
    """The threads that called back, or waited to, while rank 0's script held the GIL."""
    rank, _ = _start()
    store = _job_store()
    if rank == 1:
        store.wait(["go"], datetime.timedelta(seconds=60))
    works = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(100)]
    done = [work.get_future().then(lambda future: future.value()) for work in works]
    names = []
    if rank == 0:
        store.set("go", "")
        # All of them end meanwhile.
        ctypes.PyDLL(None).usleep(1_500_000)
        for task in pathlib.Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # it has ended
                names.append((task / "comm").read_text())
    torch.futures.wait_all(done)
    dist.destroy_process_group()
    return sum(name.startswith("penstock-callb") for name in names)


def _log_into_a_full_pipe() -> str:
    """Noise comes to rank 0's port while nobody reads its standard error; then ranks reduce. Returns what it has logged."""
    rank, size = _start()
    logged = ""
    if rank == 0:
        (door, *_) = _doors(os.getpid(), "tcp")
        kept = os.dup(2)
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        filled = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                filled += os.write(writer, bytes(4096))
        os.set_blocking(writer, True)
        os.dup2(writer, 2)
        with socket.create_connection(("127.0.0.1", door), timeout=30) as connection:
            connection.sendall(b"GET / HTTP/1.0\r\n\r\n" * 10)
            with contextlib.suppress(ConnectionError):
                assert connection.recv(1) == b""
    tensor = torch.ones(1 << 16)
    dist.all_reduce(tensor)
    same(tensor, float(size), "after the noise")
    if rank == 0:
        while filled > 0:
            filled -= len(os.read(reader, filled))
        logged = os.read(reader, 4096).decode()
        os.dup2(kept, 2)
    dist.destroy_process_group()
    return logged


def _start_with_few_descriptors() -> int:
    allowed = len(os.listdir("/proc/self/fd")) + 150
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, allowed))
    _start_and_reduce()
    return allowed


def _run_out_of_descriptors() -> None:
    """Rank 0 has no descriptor left while an unauthenticated peer connects; both leave in order."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Fewer than an interpreter with torch and 64 streams needs.
    low = len(os.listdir("/proc/self/fd")) + 100
    resource.setrlimit(resource.RLIMIT_NOFILE, (low, hard))
    rank, _ = _start()
    raised = resource.getrlimit(resource.RLIMIT_NOFILE)[0] > low
    (door, *_) = _doors(os.getpid(), "tcp")
    dist.barrier()
    if rank == 0:
        connections = [socket.socket() for _ in range(20)]
        (engine,) = [
            task
            for task in pathlib.Path("/proc/self/task").iterdir()
            if (task / "comm").read_text().strip() == "penstock"
        ]
        stat = (engine / "stat").open()
        used = max(map(int, os.listdir("/proc/self/fd"))) + 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (used, hard))
        fillers = []
        with contextlib.suppress(OSError):
            while True:
                fillers.append(os.dup(0))
        for connection in connections:
            connection.connect(("127.0.0.1", door))
        before_s = _io_thread_s(stat)
        until_s = time.monotonic() + 1.0
        while time.monotonic() < until_s:
            threading.Event().wait(0.1)
        busy_s = _io_thread_s(stat) - before_s
        for filler in fillers:
            os.close(filler)
        # What waited is accepted, and closed for what it says.
        for connection in connections:
            connection.settimeout(30)
            connection.sendall(b"nonsense" * 100)
            with contextlib.suppress(ConnectionError):
                assert connection.recv(1) == b""
    else:
        busy_s = 0.0
    ranks.note("none left", (busy_s, raised))
    dist.barrier()
    dist.destroy_process_group()


def _io_thread_s(stat: IO[str]) -> float:
    """The processor time of a thread; its file is open already."""
    stat.seek(0)
    fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _use_after_the_end(program: str) -> None:
    if program == "atexit":
        # Registered first, so it runs after Penstock's own handler.
        atexit.register(lambda: print("refused:", _raised_by(lambda: dist.all_reduce(torch.ones(4)))))
    rank, _ = _start()
    if program == "reducer":
        model = perceptron()
        reducer = penstock.torch.GradientReducer(model)
        regression(model, *batch(0, rank)).backward()
        dist.destroy_process_group()
        print("refused:", _raised_by(regression(model, *batch(1, rank)).backward))
        del reducer


def _train_for_ever() -> None:
    rank, _ = _start()
    model = DistributedDataParallel(perceptron(), bucket_cap_mb=0.001)
    for step in itertools.count():
        regression(model, *batch(step % 10, rank)).backward()
        if step == 3:
            ranks.note("running")


def _many_in_flight() -> list[str]:
    """Four operations that rank 1 never joins, waited for in four ways, then four more; returns what each raised."""
    rank, _ = _start()
    dist.barrier()
    if rank == 1:
        threading.Event().wait()
    works = [dist.all_reduce(torch.ones(n), async_op=True) for n in (1, 1 << 20, 1000, 1 << 16)]
    future = works[3].get_future()
    ranks.note("in flight")
    waits: list[Callable[[], object]] = [works[2].wait, works[0].wait, works[1].wait, future.wait]
    waits += [lambda: dist.all_reduce(torch.ones(4)), dist.barrier, lambda: dist.broadcast(torch.ones(1), src=0)]
    waits += [lambda: dist.all_gather_object([None] * 3, rank)]
    return [_raised_by(wait) for wait in waits]


def _raised_by(call: Callable[[], object]) -> str:
    """The name of Penstock's exception, which a future passes on only in its text."""
    try:
        call()
    except RuntimeError as error:
        return "PeerLost" if "PeerLost" in f"{type(error).__name__} {error}" else repr(error)
    return "nothing"


def _watch_buffer_after_error(elements: int) -> None:
    rank, size = _start()
    tensor = torch.full((elements,), float(rank))
    with pytest.raises(RuntimeError):
        for turn in itertools.count():
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
            assert tensor[0] == size - 1
            if turn == 1:
                ranks.note("running")
    tensor.fill_(-7.0)
    # Longer than any frame could still be under way, with the group alive and then destroyed.
    until_s = time.monotonic() + 1.5
    while time.monotonic() < until_s:
        assert bool((tensor == -7.0).all()), "the engine wrote into a tensor whose operation had failed"
    dist.destroy_process_group()
    assert bool((tensor == -7.0).all())


def _disagree(name: str) -> None:
    rank, size = _start(60)
    same_on_all = torch.ones(10)
    dist.all_reduce(same_on_all)
    same(same_on_all, float(size))
    other = rank == 1
    if name == "shape":
        dist.all_reduce(torch.ones(11 if other else 10))
    elif name == "dtype":
        dist.all_reduce(torch.ones(10, dtype=torch.int32 if other else torch.float32))
    elif name == "operation":
        if other:
            dist.broadcast(torch.ones(10), src=0)
        else:
            dist.all_reduce(torch.ones(10))
    elif name == "reduction":
        dist.all_reduce(torch.ones(10), op=dist.ReduceOp.MAX if other else dist.ReduceOp.SUM)
    elif name == "root":
        dist.broadcast(torch.ones(10), src=2 if other else 0)
    elif name == "order":
        if other:
            dist.barrier()
            dist.all_reduce(torch.ones(10))
        else:
            dist.all_reduce(torch.ones(10))
            dist.barrier()
    elif name == "one more":
        if other:
            dist.all_reduce(torch.ones(10))
        dist.barrier()
    # A rank that an operation lets go before it can know (a broadcast's root) learns of it here.
    dist.barrier()


def _disagree_on_splits() -> None:
    rank, _ = _start(60)
    splits = [[2, 2], [1, 3]]
    # Rank 1 sends one row to rank 0, which expects two.
    received = [[2, 2], [2, 3]]
    dist.all_to_all_single(torch.empty(sum(received[rank])), torch.ones(4), received[rank], splits[rank])
    dist.barrier()


def _come_late() -> None:
    rank, _ = _start(2.0)
    dist.barrier()
    if rank == 1:
        _job_store().wait(["now"], datetime.timedelta(seconds=60))
    dist.all_reduce(torch.ones(10))


def _new_group_without(how: str) -> tuple[str, str] | None:
    rank, _ = _start(1800.0)
    store = _job_store()
    dist.barrier()
    ranks.note("before")
    if rank == 2:
        if how == "leaves":
            dist.destroy_process_group()
            store.set("left", "")
            return None
        signal.pause()
    if how == "leaves":
        store.wait(["left"])
    ranks.note("waiting")
    raised: tuple[str, str] | None = None
    try:
        dist.new_group()
    except penstock.errors.PenstockError as error:
        raised = type(error).__name__, str(error)
    survivors = dist.new_group([0, 1], use_local_synchronization=True)
    tensor = torch.ones(10)
    dist.all_reduce(tensor, group=survivors)
    same(tensor, 2.0)
    return raised


def _new_group_after_all() -> list[str] | None:
    rank, _ = _start(1800.0)
    store = _job_store()
    dist.barrier()
    ranks.note("before")
    if rank == 0:
        with contextlib.suppress(penstock.errors.PeerLost):
            dist.barrier()
        dist.destroy_process_group()
        store.set("left", "")
    if rank == 1:
        signal.pause()
    if rank < 2:
        return None
    store.wait(["left"])
    told = []
    for members in ([0, 1, 2], [0, 2]):
        with pytest.raises(penstock.errors.PeerLost) as raised:
            dist.new_group(members, use_local_synchronization=True)
        told.append(str(raised.value))
    return told


def _start_without_rank_0() -> str:
    if os.environ["RANK"] == "0":
        return ""
    with pytest.raises(penstock.errors.Timeout) as raised:
        dist.init_process_group("penstock", timeout=datetime.timedelta(seconds=1))
    return str(raised.value)


def _new_group_after_abort(who: str) -> tuple[bool, str]:
    rank, size = _start(1800.0)
    group = dist.new_group() if who == "one, a subgroup" else dist.group.WORLD
    dist.barrier()
    if rank == 0 or who == "all":
        group._get_backend(torch.device("cpu")).abort()
    elif "is back" in who:
        _wait_for_contacts()
    try:
        again = dist.new_group()
    except penstock.errors.PenstockError as error:
        return False, str(error)
    tensor = torch.ones(10)
    dist.all_reduce(tensor, group=again)
    same(tensor, float(size))
    return True, ""


def _wait_for_contacts() -> None:
    """From now on this rank looks for failures in a join only when all contacts are there."""
    await_keys = groups._await_keys

    def wait_first(store: dist.Store, keys: list[str], *others: object) -> None:
        store.wait(keys, datetime.timedelta(seconds=30))
        await_keys(store, keys, *others)

    groups._await_keys = wait_first


def _give_up_on_sparse() -> str:
    rank, _ = _start(1800.0)
    store = _job_store()
    if rank == 1:
        store.wait(["given up"], datetime.timedelta(seconds=60))
    work = dist.all_reduce(torch.sparse_coo_tensor([[rank]], [1.0], (4,)), async_op=True)
    with pytest.raises(penstock.errors.PenstockError) as caught:
        work.wait(*([datetime.timedelta(seconds=0.3)] if rank == 0 else []))
    if rank == 0:
        assert isinstance(caught.value, penstock.errors.Timeout) and "0.3 s" in str(caught.value), caught.value
    store.set("given up", "")
    with pytest.raises(penstock.errors.PenstockError):
        dist.all_reduce(torch.ones(2))
    return type(caught.value).__name__


def _new_group_under_gloo_without(how: str) -> tuple[str, str]:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=1800))
    rank = dist.get_rank()
    first = dist.new_group(backend="penstock")
    dist.barrier(group=first)
    ranks.note("before")
    store = _job_store()
    store.add("through", 1)
    if rank == 2:
        # If it died now, the others' barrier might fail.
        while store.add("through", 0) < 3:
            pass
        if how != "dies with a contact":
            signal.pause()
        groups._await_keys = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    ranks.note("waiting")
    with pytest.raises(penstock.errors.PenstockError) as caught:
        dist.new_group(backend="penstock")
    _until_both_have_raised(store)
    return type(caught.value).__name__, str(caught.value)


def _until_both_have_raised(store: dist.Store) -> None:
    """Who returns leaves the job, and the other might hear of that before it hears of rank 2."""
    store.add("raised", 1)
    while store.add("raised", 0) < 2:
        pass


def _leave_and_come_back_under_gloo() -> tuple[str, str]:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=1800))
    rank, size = dist.get_rank(), dist.get_world_size()
    first = dist.new_group(backend="penstock")
    dist.barrier(group=first)
    store = _job_store()
    if rank == 2:
        dist.destroy_process_group(first)
        store.set("left", "")
    else:
        # Its engine has stopped, and these know that it has.
        store.wait(["left"])
        while not any(peer["lost"] for peer in penstock.stats()["peers"]):
            pass
        store.add("known", 1)
    if rank == 2:
        while store.add("known", 0) < size - 1:
            pass
    second = dist.new_group(backend="penstock")
    tensor = torch.ones(10)
    dist.all_reduce(tensor, group=second)
    same(tensor, float(size))
    ranks.note("back")
    if rank == 2:
        signal.pause()
    with pytest.raises(penstock.errors.PenstockError) as caught:
        dist.new_group(backend="penstock")
    _until_both_have_raised(store)
    return type(caught.value).__name__, str(caught.value)


def _new_groups_for_ever() -> None:
    _, size = _start(5.0)
    for turn in itertools.count():
        tensor = torch.ones(10)
        dist.all_reduce(tensor)
        same(tensor, float(size))
        group = dist.new_group(timeout=datetime.timedelta(seconds=5))
        dist.destroy_process_group(group)
        if turn == 1:
            ranks.note("running")


def _monitored_barriers() -> bool:
    _start()
    client = _job_store()
    ranks.note("running")
    with pytest.raises(dist.DistError):
        while True:
            client.add("alive", 0)
    # The first call may still be written into the dead connection.
    for _ in range(3):
        backend.of().monitored_barrier(c10d.BarrierOptions())
    dist.destroy_process_group()
    return True


def _fail_behind_others() -> None:
    rank, size = _start()
    store, own = _job_store(), backend.of()
    dist.barrier()
    keys = store.num_keys()
    for _ in range(20):
        own.monitored_barrier(c10d.BarrierOptions())
    dist.barrier()
    assert store.num_keys() <= keys + size, "keys of barriers that all ranks have passed are kept"
    dist.barrier()
    barrier = own.barrier

    def fails_late(opts: c10d.BarrierOptions) -> unittest.mock.Mock:
        def wait() -> None:
            barrier(opts).wait()
            store.wait(["passed"], datetime.timedelta(seconds=60))
            raise errors.Timeout("Timed out: the last message was lost")

        return unittest.mock.Mock(wait=wait)

    if rank == 0:
        own.barrier = fails_late
        with pytest.raises(errors.Timeout) as raised:
            own.monitored_barrier(c10d.BarrierOptions())
        assert str(raised.value) == "Timed out: the last message was lost", "ranks that came are said to be missing"
    else:
        own.monitored_barrier(c10d.BarrierOptions())
        store.set("passed", "")
    dist.destroy_process_group()


def _give_up_waiting() -> tuple[str, str]:
    rank, _ = _start()
    dist.barrier()
    tensor = torch.ones(1 << 20)
    if rank == 1:
        _job_store().wait(["given up"], datetime.timedelta(seconds=60))
    work = dist.all_reduce(tensor, async_op=True)
    with pytest.raises(RuntimeError) as caught:
        work.wait(*([datetime.timedelta(seconds=0.3)] if rank == 0 else []))
    tensor.fill_(-7.0)
    _job_store().set("given up" if rank == 0 else "failed, too", "")
    if rank == 0:
        _job_store().wait(["failed, too"], datetime.timedelta(seconds=60))
    assert bool((tensor == -7.0).all()), "the engine wrote into a tensor whose wait had raised"
    dist.destroy_process_group()
    assert bool((tensor == -7.0).all())
    return type(caught.value).__name__, str(caught.value)


def _descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def _fork_and_use() -> tuple[list[tuple[list[str], str]], dict[str, dict[int, str]]]:
    before = _descriptors()
    rank, size = _start()
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    received = torch.zeros(3)
    pending = dist.irecv(received, src=1 - rank)

    def new(now: dict[int, str]) -> dict[int, str]:
        return {fd: what for fd, what in now.items() if before.get(fd) != what}

    opened = new(_descriptors())
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        # Nothing but the answer may leave the child: no atexit, no stack of the test.
        try:
            inherited = new(_descriptors())
            answers = []
            for use in (lambda: dist.all_reduce(torch.ones(1000)), dist.new_group, pending.wait):
                try:
                    use()
                    answers.append([["nothing"], ""])
                except BaseException as error:
                    answers.append([[cls.__name__ for cls in type(error).__mro__], str(error)])
            os.write(writing, json.dumps([answers, inherited]).encode())
        finally:
            os._exit(0)
    os.close(writing)
    dist.barrier()  # else the other rank's receive might have ended before it forks
    dist.send(torch.ones(3), dst=1 - rank)
    pending.wait()
    same(received, 1.0)
    for _ in range(50):
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    with open(reading) as answer_from_child:
        answers, inherited = json.loads(answer_from_child.read())
    assert os.waitpid(child, 0)[1] == 0
    for _ in range(50):
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    same(tensor, float(size))
    dist.destroy_process_group()
    return answers, {"parent": opened, "child": {fd: what for fd, what in inherited.items() if "pipe" not in what}}


def _fork_while_joining() -> str:
    from penstock.runtime import groups

    _start()
    held, enough = threading.Event(), threading.Event()

    def hold() -> None:
        with process.Engine._lock:
            held.set()
            enough.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            groups.join(dist.HashStore(), 0, [0], datetime.timedelta(seconds=20), "the child's")
        except RuntimeError as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    if not select.select([reading], [], [], 30)[0]:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    enough.set()
    holder.join()
    with open(reading) as answer_from_child:
        text = answer_from_child.read()
    dist.all_reduce(torch.ones(1000))
    dist.destroy_process_group()
    return text


def _free_early(how: str) -> None:
    rank, size = _start()
    for turn in range(20):
        for elements in (16, 5000, 1 << 19):
            tensor = torch.full((elements,), float(rank))
            work = dist.all_reduce(tensor, async_op=True)
            if how == "memory":
                tensor.data = torch.empty(0)
            else:
                del tensor
            if how == "tensor and work":
                del work
            # These take the memory of the tensor above, if it is free.
            squatters = [torch.full((elements,), 7.0) for _ in range(4)]
            check = torch.full((elements,), float(rank + turn))
            dist.all_reduce(check)
            same(check, float(sum(r + turn for r in range(size))))
            if how != "tensor and work":
                work.wait()
            for squatter in squatters:
                same(squatter, 7.0, "memory that was not the operation's any more was written to")
    dist.destroy_process_group()


def _change_early() -> None:
    rank, size = _start()
    for turn in range(20):
        tensor = torch.full((1 << 18,), float(rank))
        work = dist.all_reduce(tensor, async_op=True)
        tensor.mul_(3.0)
        work.wait()
        check = torch.full((1 << 18,), float(rank + turn))
        dist.all_reduce(check)
        same(check, float(sum(r + turn for r in range(size))))
    dist.destroy_process_group()


def _two_threads() -> None:
    rank, size = _start()
    groups = [dist.new_group(), dist.new_group()]
    failures: list[BaseException] = []

    def work(index: int) -> None:
        try:
            for turn in range(40):
                elements = (1, 1 << 19, 3000)[(turn + index) % 3]
                tensor = torch.full((elements,), float(rank + index + turn))
                dist.all_reduce(tensor, group=groups[index])
                same(tensor, float(sum(r + index + turn for r in range(size))), f"thread {index}, turn {turn}")
            dist.barrier(group=groups[index])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    dist.destroy_process_group()


def _wait_for_ever() -> None:
    rank, _ = _start()
    dist.barrier()
    if rank == 1:
        threading.Event().wait()
    atexit.register(print, "left in order")
    ranks.note("waiting")
    dist.all_reduce(torch.ones(10))


# ------------------------------------------------------------------------------------------------- helpers


def _assert_lost(job: ranks.Ranks, victim: int, *, since_s: float, operation: str) -> None:
    """All ranks but `victim` raise PeerLost in time, with a text that names what, where, who and what now."""
    survivors = [rank for rank in range(len(job.pids)) if rank != victim]
    for outcome in job.outcomes(of=survivors, timeout_s=30, grace_s=None):
        assert outcome.raised is not None and outcome.raised.is_a("penstock.errors.PeerLost"), str(outcome)
        assert outcome.raised.is_a("ConnectionError") and outcome.raised.is_a("RuntimeError")
        took_s = outcome.ended_s - since_s
        assert took_s < DEATH_KNOWN_S, f"rank {outcome.rank} took {took_s:.1f} s: {outcome.raised.text}"
        text = outcome.raised.text
        assert f"rank {victim}" in text, text
        assert operation in text, text
        # What was issued when the death was known already has no number.
        assert re.search(r"#\d+|sequence (number )?\d+|was not begun", text), f"no sequence number: {text}"
        assert "127.0.0.1" in text, f"no address: {text}"
        assert "group is unusable" in text, f"not said whether the group lives: {text}"


@contextlib.contextmanager
def _occupied_port() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder.getsockname()[1]


def _doors(pid: int, kind: str) -> list[Door]:
    """Where a rank listens: a port, or the name of an abstract UNIX socket."""
    connections = psutil.Process(pid).net_connections(kind=kind)
    if kind == "tcp":
        return [connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN]
    # What it has accepted bears the name too.
    return sorted({connection.laddr for connection in connections if connection.laddr.startswith("@penstock-")})


def _remote_ports(process: psutil.Process) -> set[int]:
    """The other ends of a rank's TCP sockets."""
    return {connection.raddr.port for connection in process.net_connections(kind="tcp") if connection.raddr}


def _approach(how: str, door: Door) -> list[socket.socket]:
    """What an unauthenticated peer does; returns connections that it keeps open until the test lets go of them."""
    noise = random.Random(str(door))
    # The head of a hand-shake message, as in penstock-stream/src/handshake.rs: kind, length, magic.
    hello = struct.pack("<BH", 1, 100) + b"PENSTOCK"
    if how == "noise":
        connections = [_connect(door) for _ in range(20)]
        for connection in connections:
            _send(connection, noise.randbytes(noise.choice([1, 7, 100, 100_000])))
        return connections
    if how == "half a handshake":
        connections = [_connect(door) for _ in range(len(hello))]
        for length, connection in enumerate(connections):
            _send(connection, hello[: length + 1])
        return connections
    if how == "endless length":
        connection = _connect(door)
        _send(connection, struct.pack("<BH", 1, 65535) + b"PENSTOCK" + bytes(100_000))
        return [connection]
    if how == "endless noise":
        connection = _connect(door)
        with pytest.raises(ConnectionError):  # the rank hangs up long before 64 MiB
            for _ in range(1024):
                connection.sendall(hello + bytes(1 << 16))
        return [connection]
    if how == "descriptors":
        connections = [_connect(door) for _ in range(3)]
        for count, connection in enumerate(connections):
            socket.send_fds(connection, [hello[: count + 1]], [connection.fileno()] * (1 + count))
        return connections
    if how == "silence":
        return [_connect(door) for _ in range(3)]
    return [_connect(door) for _ in range(300)]


def _connect(door: Door) -> socket.socket:
    if isinstance(door, int):
        return socket.create_connection(("127.0.0.1", door), timeout=10)
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(10)
    connection.connect("\0" + door.removeprefix("@"))
    return connection


def _send(connection: socket.socket, data: bytes) -> None:
    # The rank may hang up in the middle of it, which is its right.
    with contextlib.suppress(ConnectionError):
        connection.sendall(data)


def _await(condition: Callable[[], bool], otherwise: str, deadline_s: float = 30.0) -> None:
    """Wait for a condition that no event announces."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, otherwise
        threading.Event().wait(0.02)


def _read_lines(rank: int, process: subprocess.Popen[str], lines: queue.Queue[tuple[int, str]]) -> None:
    for line in process.stdout:
        lines.put((rank, line.strip()))


def _await_lines(
    lines: queue.Queue[tuple[int, str]], beginning: str, *, count: int, deadline_s: float
) -> list[tuple[int, str]]:
    """Wait until `count` lines that begin so have been printed; returns them with the number of their process."""
    deadline = time.monotonic() + deadline_s
    found: list[tuple[int, str]] = []
    seen: list[str] = []
    while len(found) < count:
        try:
            source, line = lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            printed = "\n".join(seen)
            raise AssertionError(f"only {len(found)} lines of {count} begin with {beginning!r}:\n{printed}") from None
        seen.append(f"{source}: {line}")
        if line.startswith(beginning):
            found.append((source, line))
    return found


def test_an_abort_has_the_kind_of_its_reason() -> None:
    """A group that is aborted for a Mismatch fails with one; where the reason is no error of Penstock's, with Closed."""
    assert ranks.run(_aborts, count=2) == [["Mismatch", "Timeout", "Closed", "Closed"]] * 2


def _aborts() -> list[str]:
    dist.init_process_group("penstock", timeout=datetime.timedelta(seconds=20))
    kinds = []
    for kind in ("Mismatch", "Timeout", "ValueError", None):
        group = dist.new_group()
        work = dist.all_reduce(torch.ones(1), group=group, async_op=True) if dist.get_rank() else None
        dist.barrier()
        member = group._get_backend(torch.device("cpu"))._member
        if dist.get_rank() == 0:
            member.group.abort("a test wants it", kind)
            work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
        with pytest.raises(errors.PenstockError, match="aborted: a test wants it") as caught:
            work.wait()
        kinds.append(type(caught.value).__name__)
    return kinds
