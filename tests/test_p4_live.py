"""Proves that torch ranks all-reduce through a switch that follows the P4 program: real processes in network namespaces, and
between them the program's twin, frame by frame, or bmv2 with the compiled program where it is installed.

docs/design/quantisation.md says what comes out, bit by bit (`test_aggregated._sum`), whoever adds."""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import bmv2
import penstock.torch
import ranks
import test_aggregated
import test_p4
from daemons import Daemon
from live_switch import LiveSwitch, live_switch, unavailable

BLOCK_WORDS = 64
# A switch adds integers of 32 bits, whatever the tensor's type.
WIDE = dict.fromkeys(test_aggregated.NARROW, 32)

# It vouches for the switch, which cannot show that it receives.
SECRET = {"PENSTOCK_SECRET": "hush"}

pytestmark = pytest.mark.skipif(
    (unavailable(False) or test_p4.without_p4runtime()) is not None,
    reason=f"no ranks went through a switch here: {unavailable(False) or test_p4.without_p4runtime()}",
)


@pytest.fixture(autouse=True)
def _blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the length that the program is compiled for as it is."""
    monkeypatch.setattr(test_aggregated, "BLOCK_BYTES", 4 * BLOCK_WORDS)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], pathlib.Path]:
    return functools.cache(lambda: bmv2.compile_program(tmp_path_factory.mktemp("p4"), BLOCK_WORDS))


@contextlib.contextmanager
def _daemon(switch: LiveSwitch, role: str, host: int, *options: str) -> Iterator[Daemon]:
    """A daemon on a host; what it is asked must be asked there."""
    env = {**switch.bed.environment(), **SECRET}
    with contextlib.closing(
        switch.bed.inside(host, lambda: Daemon(role, *options, host=switch.bed.address(host), env=env))
    ) as daemon:
        yield daemon


def _deployment(folder: pathlib.Path, server: Daemon, tree: dict[str, Any]) -> dict[str, str | None]:
    env = test_aggregated._deployment(
        folder, f"- address: {server.address}\n  tree: [{json.dumps(tree)}]\n", "key: none\n"
    )
    return {**env, **SECRET}


def _assert_added(switch: LiveSwitch, stats: list[dict[str, Any]], children: int) -> None:
    """The twin has refused nothing, and added every block, once a child."""
    counts = switch.ask("counters")
    [place] = [place for place in counts["places"][1:] if place["added"]]
    bypasses = [one["bypasses"] for one in stats]
    print(f"lost {counts['lost']}, bypasses {bypasses}, {place}")
    assert not any(place[name] for name in ("malformed", "key", "sender", "format", "length", "kind"))
    assert place["completed"] > 0 and place["relayed"] > 0
    if not any(bypasses):  # on a machine that is short of processors there may be some
        blocks = [-(-case.elements // BLOCK_WORDS) for case in test_aggregated.CASES]
        # A header, exponents of two bytes each, and blocks.
        packets = sum(1 + -(-count // (2 * BLOCK_WORDS)) + count for count in blocks)
        assert (place["completed"], place["added"]) == (packets, packets * children)


@pytest.mark.parametrize("program", [False, True], ids=["twin", "bmv2"])
@pytest.mark.parametrize(
    ("world", "drop"),
    [
        (2, 0.05),
        *(pytest.param(*case, marks=pytest.mark.release) for case in [(2, 0.0), (4, 0.0), (4, 0.02)]),
    ],
)
def test_all_reduces(
    world: int, drop: float, program: bool, tmp_path: pathlib.Path, compiled: Callable[[], pathlib.Path]
) -> None:
    """Every type, odd lengths, averages, also while frames are lost: the bits of the definition, and the switch added. Of four
    ranks two share a host."""
    if program and (reason := unavailable(True)) is not None:
        pytest.skip(f"the compiled program did NOT add for ranks here, its twin did: {reason}")
    if program and drop:
        pytest.skip("frames are lost by the twin only")
    made = compiled() if program else None
    with (
        live_switch(5, tmp_path, block_words=BLOCK_WORDS, program=made, drop=drop, seed=7) as switch,
        _daemon(switch, "server", 3) as server,
        _daemon(switch, "aggregator", 4) as software,
    ):
        run = functools.partial(ranks.run, count=world, bed=switch.bed, placement=[0, 1, 2, 2][:world], timeout_s=120)
        workers = list(range(world))
        env = _deployment(
            tmp_path, server, {"aggregator": switch.address, "switch": switch.command, "workers": workers}
        )
        values = run(test_aggregated._all_reduces, env=env)
        test_aggregated._assert_sums(values, world, WIDE, [])
        sent = [stats["0"]["servers"][0] for _, stats in values]
        assert {one["parent"] for one in sent} == {switch.address}
        if not program:
            _assert_added(switch, sent, world)
        if drop:
            assert sum(one["pushed_again"] for one in sent) > 0, "nothing was lost"
            return
        for found in run(test_aggregated._not_finite, env=env):
            assert (found[0], found[1], found[4]) == (float("inf"), world / 2, world / 2) and np.isnan(found[3])
        env = _deployment(tmp_path, server, {"aggregator": software.address, "workers": workers})
        for (mine, _), (its, _) in zip(values, run(test_aggregated._all_reduces, env=env), strict=True):
            for case, one, other in zip(test_aggregated.CASES, mine, its, strict=True):
                if case.dtype == torch.float32:  # the others travel in 16 bits there
                    np.testing.assert_array_equal(one.view(np.int32), other.view(np.int32))


def test_software_below_a_switch(tmp_path: pathlib.Path) -> None:
    """An aggregator of two shards is one of the switch's children, with two ranks below it and two beside it."""
    with (
        live_switch(6, tmp_path, block_words=BLOCK_WORDS, program=None) as switch,
        _daemon(switch, "server", 4) as server,
        _daemon(switch, "aggregator", 5, "--shards", "2") as rack,
    ):
        below = {"aggregator": rack.address, "workers": [3, 1]}
        tree = {"aggregator": switch.address, "switch": switch.command, "workers": [0, 2], "children": [below]}
        env = _deployment(tmp_path, server, tree)
        run = ranks.run(test_aggregated._all_reduces, count=4, env=env, bed=switch.bed, placement=[0, 1, 2, 3])
        test_aggregated._assert_sums(run, 4, WIDE, [])
        sent = [stats["0"]["servers"][0] for _, stats in run]
        assert [one["parent"] for one in sent] == [switch.address, rack.address] * 2
        _assert_added(switch, sent, 3)


def _through_thick_and_thin() -> int:
    """All-reduces without a break, while the switch is passed by and taken back, twice; how many."""
    dist.init_process_group("penstock", timeout=datetime.timedelta(seconds=60))
    start = torch.arange(3001, dtype=torch.float32) * (dist.get_rank() + 0.37)
    first = start.clone()
    dist.all_reduce(first)
    done = 1

    def again() -> None:
        tensor = start.clone()
        dist.all_reduce(tensor)
        assert torch.equal(tensor.view(torch.int32), first.view(torch.int32))

    for number, direct in enumerate([False, True, False, True, False]):
        while True:
            again()
            done += 1
            [server] = penstock.torch.stats()["aggregated"]["0"]["servers"]
            if server["is_direct"] == direct:
                ranks.note(f"seen {number}", time.monotonic())
            # All ranks go on together. It is too small for the servers.
            agreed = torch.tensor([float(server["is_direct"] == direct)])
            dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
            if agreed.item():
                break
        ranks.note(f"phase {number}")
    again()  # through the switch
    dist.destroy_process_group()
    return done


def test_a_silent_switch_is_passed_by_and_taken_back(tmp_path: pathlib.Path) -> None:
    """Silent with its job, and then without it, as after a restart: rank 0 has it opened again. The sums keep their bits."""
    with (
        live_switch(3, tmp_path, block_words=BLOCK_WORDS, program=None) as switch,
        _daemon(switch, "server", 2) as server,
        ranks.Ranks(
            _through_thick_and_thin,
            count=2,
            bed=switch.bed,
            placement=[0, 1],
            env=_deployment(
                tmp_path, server, {"aggregator": switch.address, "switch": switch.command, "workers": [0, 1]}
            ),
        ) as job,
    ):
        job.await_note("phase 0", deadline_s=60)
        switch.ask("mute")
        muted_s = time.monotonic()
        job.await_note("phase 1", deadline_s=20)
        passed_s = max(job.await_note("seen 1", deadline_s=1)) - muted_s
        switch.ask("unmute")
        unmuted_s = time.monotonic()
        job.await_note("phase 2", deadline_s=20)
        back_s = max(job.await_note("seen 2", deadline_s=1)) - unmuted_s
        switch.ask("forget")
        outcomes = job.outcomes(timeout_s=60)
        counts = switch.ask("counters")
        assert not switch.ask("tables")["rows"]["Aggregator.jobs"], "the job is closed at the end"
    assert all(outcome.ok for outcome in outcomes), "\n".join(map(str, outcomes))
    print(f"passed by after {passed_s:.2f} s, taken back after {back_s:.2f} s; {outcomes[0].value} all-reduces")
    assert passed_s < 3.0
    assert counts["places"][1]["completed"] > 0, "it adds again"
    assert "is passed by: job" in outcomes[0].output
