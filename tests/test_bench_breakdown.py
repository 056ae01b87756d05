"""`penstock bench breakdown` and `penstock bench causes`: what is drawn, what their tables say, and a training of the first."""

from __future__ import annotations

import json
import os
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.profiling.breakdown import EMBEDDING, Moving, Share
from penstock.profiling.cause import Cause
from penstock.tools.bench import breakdown, breakdown_layers, breakdown_stages, causes, planted, planted_rank
from penstock.tools.bench.breakdown import MOVING, Outcome, drawn, judged
from penstock.tools.bench.breakdown_stages import Notes, rows
from penstock.tools.bench.launcher import BenchError
from penstock.tools.testbed.system import unavailable

MS = 1_000_000


def test_trainings_are_drawn_from_their_seed() -> None:
    plans = [drawn(seed) for seed in range(40)]
    assert plans == [drawn(seed) for seed in range(40)] and len(set(plans)) == 40
    # What moves beside the forward pass ends within it, even where the link carries half of its rate.
    assert all(plan.forward > 2 * plan.beside_mebibytes * 8.4e6 / plan.rate_mbit / 1e3 for plan in plans)
    assert {plan.late > 0 for plan in plans} == {True, False}


def test_what_the_script_noted_is_beside_what_the_profile_says() -> None:
    """Rank 1 issues 4 ms later: rank 0 waits for that, and both have 6 ms of wire. What no phase has is other."""
    noted = [
        [
            {
                "forward": 20 * MS,
                "backward": 30 * MS,
                "issued": [100 * MS + 4 * MS * rank],
                "ended": [110 * MS],
                "beside_issued": 50 * MS,
                "beside_ended": 53 * MS,
                "wait_begun": 111 * MS,
                "wait_ended": 111 * MS,
                "step": 65 * MS - 4 * MS * rank,
            }
        ]
        * 4
        for rank in range(2)
    ]
    moving = Moving(6.06 * MS, 4 * MS, 3 * MS)
    share = Share(0, 2, 1, 65 * MS, {"forward": 20 * MS, "backward": 33 * MS, "other": 1.94 * MS}, {"other": moving})
    by_category = {one.category: one for one in judged(7, [share], [breakdown.rows(noted, rank) for rank in range(2)])}
    assert by_category["exposed wire"].miss == pytest.approx(0.01)
    assert by_category["exposed wait"].script_ms == 4 and by_category["hidden wire"].script_ms == 3
    assert by_category["backward"].miss == pytest.approx(0.1)
    assert by_category["other"].script_ms == 5 and not by_category["clip"].is_judged
    table = breakdown.table(list(by_category.values()))
    assert next(line.cells for line in table.lines if line.cells[0] == "backward")[1:] == [
        "1",
        "30.00",
        "10.0%",
        "10.0%",
        "0 of 1",
    ]


@pytest.mark.parametrize("kind", ["--layers", "--pipeline"])
def test_buckets_are_of_data_parallel_ranks(kind: str) -> None:
    done = CliRunner().invoke(breakdown.command, [kind, "--buckets", "2"])
    assert done.exit_code == 2 and "--buckets is of data-parallel ranks" in done.output


def test_layers_tell_each_purpose() -> None:
    """Rank 0 waits for 4 ms in a layer's sum, and moves 6; the same again in the backward pass, and 5 ms in the embedding's."""
    plans = [breakdown_layers.drawn(seed) for seed in range(20)]
    assert plans == [breakdown_layers.drawn(seed) for seed in range(20)] and len(set(plans)) == 20

    def notes(late_ms: int) -> breakdown_layers.Notes:
        def stood(purpose: str, at_ms: int) -> breakdown_layers.Waited:
            return breakdown_layers.Waited(purpose, (at_ms + late_ms) * MS, (at_ms + 10) * MS)

        return {
            "forward": 30 * MS,
            "backward": 40 * MS,
            "optimizer": 3 * MS,
            "step": 90 * MS,
            "in_forward": [stood(breakdown_layers.TENSOR, 10)],
            "in_backward": [stood(breakdown_layers.EXPERT, 30)],
            "in_other": [breakdown_layers.Waited(EMBEDDING, 70 * MS, 75 * MS)],
        }

    noted = [[notes(0)] * 4, [notes(4)] * 4]
    [row, *_] = breakdown_layers.rows(noted, 0)
    assert (row["forward"], row["backward"], row["other"]) == (20 * MS, 30 * MS, 12 * MS)
    assert (row["exposed wait"], row["exposed wire"]) == (8 * MS, 17 * MS)
    moving = {"tensor": Moving(6 * MS, 4.1 * MS), "expert": Moving(6 * MS, 4 * MS), EMBEDDING: Moving(5 * MS)}
    share = Share(0, 2, 1, 90 * MS, {"forward": 20 * MS, "backward": 30 * MS}, moving)
    found = {one.category: one for one in judged(7, [share], [breakdown_layers.rows(noted, rank) for rank in range(2)])}
    assert found["tensor"].miss == pytest.approx(0.01) and found["expert"].miss == 0 and found[EMBEDDING].miss == 0
    assert "tensor" in {line.cells[0] for line in breakdown.table(list(found.values())).lines}


def test_where_both_sums_move_wire_counts_before_wait() -> None:
    """Rank 0 waits from 10 to 30 ms for gradients that rank 1 issues late, and in a mark from 45 to 50 for the sum beside, which
    begins at 20 and ends at 50."""
    own = {
        "issued": [10 * MS],
        "ended": [40 * MS],
        "beside_issued": 5 * MS,
        "beside_ended": 50 * MS,
        "wait_begun": 45 * MS,
        "wait_ended": 50 * MS,
    }
    assert breakdown._moved(own, [30 * MS], 20 * MS) == {
        "exposed wire": 25 * MS,  # from 20 on; not from 40 to 45
        "exposed wait": 10 * MS,
        "hidden wire": 5 * MS,
        "hidden wait": 5 * MS,  # from 5 to 10
    }


def test_buckets_move_while_the_backward_pass_computes() -> None:
    """Rank 0 issues its buckets at 10, 20 and 30 ms, rank 1 the first at 15 and the second at 28. From 30 on rank 0 stands."""
    own = {
        "issued": [30 * MS, 20 * MS, 10 * MS],
        "ended": [42 * MS, 36 * MS, 18 * MS],
        "beside_issued": 1 * MS,
        "beside_ended": 2 * MS,
        "wait_begun": 50 * MS,
        "wait_ended": 50 * MS,
    }
    assert breakdown._moved(own, [30 * MS, 28 * MS, 15 * MS], 1 * MS) == {
        "exposed wire": 12 * MS,
        "exposed wait": 0,
        "hidden wire": (1 + 3 + 2) * MS,
        "hidden wait": (5 + 8) * MS,
    }


def test_what_a_pipelines_stages_note() -> None:
    """Stage 0 asks at 28 ms for a gradient that is sent at 50, stands from 30 to 60 for it, and at the end of the step 8 ms for
    its own send, which is there at 75. Stage 1 stands from 0 to 22 for what is sent at 10."""
    first = Notes(forward=10 * MS, backward=5 * MS, optimizer=5 * MS, step=100 * MS, received=[], sent=[], waited=[])
    second = Notes(**{**first, "received": [], "sent": [], "waited": []})
    first["received"], first["sent"] = [(28 * MS, 30 * MS, 60 * MS)], [10 * MS, 55 * MS]
    first["waited"] = [(70 * MS, 78 * MS)]
    second["received"], second["sent"] = [(0, 0, 22 * MS), (72 * MS, 72 * MS, 75 * MS)], [50 * MS]
    both = dict.fromkeys(("loading", "clip", "evaluation", "checkpoint"), 0.0)
    both |= {"forward": 10 * MS, "backward": 5 * MS, "optimizer": 5 * MS, "step": 100 * MS}
    # What is sent moves from 10 to 22 and from 55 to 75, but from 55 to 60 stage 0 still stands for its gradient.
    own = {
        "exposed wait": 20 * MS,
        "exposed wire": 18 * MS,
        "other": 42 * MS,
        "hidden wire": 22 * MS,
        "hidden wait": 2 * MS,
    }
    assert rows([[first], [second]], 0) == [both | own]
    own = {"exposed wait": 10 * MS, "exposed wire": 15 * MS, "other": 55 * MS, "hidden wire": 10 * MS, "hidden wait": 0}
    assert rows([[first], [second]], 1) == [both | own]


def test_pipelines_are_drawn_of_all_kinds() -> None:
    """Of both backends, about alike; one of them is the same for the same seed. Every stage computes, and something is sent."""
    plans = [breakdown_stages.drawn(seed) for seed in range(200)]
    assert 70 < sum(plan.backend == "gloo" for plan in plans) < 130
    assert {plan.micro_batches for plan in plans} == {2, 3, 4} and {plan.rate_mbit for plan in plans} == {200, 400, 800}
    assert all(min(*plan.forward, *plan.backward, plan.mebibytes) > 0 for plan in plans)
    assert plans[7] == breakdown_stages.drawn(7) and len(set(plans)) == len(plans)


def test_what_the_profiler_holds_up_is_compared_with_other_steps() -> None:
    """In step 3 torch's profiler starts: a wait of 50 ms there is its own, and the time is in no part; wire is what it is."""
    steps = [dict.fromkeys((*breakdown.WORK, *MOVING, "step"), 1.0 * MS) for _ in range(5)]
    steps[3] |= {
        "exposed wait": 50 * MS,
        "hidden wait": 9 * MS,
        "other": 70 * MS,
        "step": 130 * MS,
        "exposed wire": 4 * MS,
    }
    share = Share(0, 3, 1, 1 * MS, {}, {})
    said = {one.category: one.script_ms for one in judged(1, [share], [steps], disturbed={3})}
    assert said["exposed wait"] == said["hidden wait"] == said["other"] == said["step"] == 1
    assert said["exposed wire"] == 2 and said["exposed"] == 3


def test_the_table_of_causes_counts_by_fault() -> None:
    outcomes = [
        causes.Outcome(planted.drawn(fault, seed), seed != 9, "")
        for fault in ("slow rank", "disk stall")
        for seed in (8, 9)
    ]
    assert [line.cells for line in causes.table(outcomes).lines] == [
        ["slow rank", "2", "1, 50.0%", "9"],
        ["disk stall", "2", "1, 50.0%", "9"],
        ["all", "4", "2, 50.0%", "9, 9"],
    ]


def test_planted_trainings_are_of_all_kinds() -> None:
    """Of each fault a third is over gloo, of those of links two thirds have two ranks on each host, and half of the loaders that
    stall read a disk. A plan comes out of its JSON as it went in."""
    for fault in planted.FAULTS:
        plans = [planted.drawn(fault, seed) for seed in range(300)]
        assert 70 < _count(plans, backend="gloo") < 130
        assert (170 < _count(plans, ranks=4) < 230) == (fault in planted.OF_LINKS)
        assert (_count(plans, ranks=2) == 300) == (fault not in planted.OF_LINKS)
        assert (120 < _count(plans, reads_disk=True) < 180) == (fault == "disk stall")
        assert {len(plan.links) for plan in plans} == {
            {"capped link": 1, "retransmissions": 1, "second job": 1, "one-flow cap": 2}.get(fault, 0)
        }
        # What takes a part of the computing needs more of that.
        least = {"small buckets": 32, "slow rank": 768, "disk stall": 768, "contention": 3072}.get(fault, 192)
        assert min(plan.batch for plan in plans) == least
        again = planted.Plan(**json.loads(json.dumps(asdict(plans[0]))))
        assert replace(again, expected=tuple(again.expected), links=tuple(again.links)) == plans[0]


def _count(plans: list[planted.Plan], **values: object) -> int:
    return sum(all(getattr(plan, name) == value for name, value in values.items()) for plan in plans)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_cause_is_right_at_its_place_alone(ranks: int) -> None:
    """Of a fault on one link not the other host's; of one flow's cap either; of a loader that reads a disk, that it does."""
    hosts = {rank: "ab"[rank * 2 // ranks] for rank in range(ranks)}

    def is_right(plan: planted.Plan, kind: str, **where: object) -> bool:
        cause = Cause(kind, "wire", "", "", 1.0, **where)  # type: ignore[arg-type]
        return planted.is_found(plan, planted.Found([cause], hosts))

    for kind, fault in (("link", "capped link"), ("retransmissions", "retransmissions"), ("second job", "second job")):
        plan = planted.Plan(fault, 0, ranks, expected=(kind,), links=(1,))
        assert is_right(plan, kind, host="b", link="eth0")
        assert not is_right(plan, kind, host="a", link="eth0") and not is_right(plan, kind, host="b", link="lo")
    cap = planted.Plan("one-flow cap", 0, ranks, expected=("flow cap",), links=(0, 1))
    assert is_right(cap, "flow cap", host="a", link="eth0") and is_right(cap, "flow cap", host="b", link="eth0")
    for reads_disk in (False, True):
        stall = planted.Plan("disk stall", 0, ranks, expected=("loader",), rank=1, reads_disk=reads_disk)
        assert is_right(stall, "loader", rank=1, disk="sda") == reads_disk
        assert is_right(stall, "loader", rank=1) != reads_disk and not is_right(stall, "loader", rank=0)
    crowd = planted.Plan("contention", 0, ranks, expected=("contention",), rank=1, is_crowded=True)
    assert is_right(crowd, "contention", rank=1) and not is_right(crowd, "contention"), "of all ranks alike"


def test_a_planted_loader_reads_past_the_page_cache() -> None:
    """As long as it is told, from the disk itself, though the file was written just now."""

    def read_bytes() -> int:
        [line] = [line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("read_bytes")]
        return int(line.split()[1])

    with tempfile.NamedTemporaryFile(dir="/var/tmp") as file:
        file.write(os.urandom(planted_rank.BLOCK * 4))
        file.flush()
        os.fsync(file.fileno())
        before, began_s = read_bytes(), time.monotonic()
        planted_rank.read_for(0.02, file.name)
        assert time.monotonic() - began_s >= 0.02 and read_bytes() - before >= planted_rank.BLOCK


def test_a_training_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is wrong is told, with the cause that came first."""

    def profiled(plan: planted.Plan, folder: Path) -> planted.Found:
        if plan.seed == 1:
            raise BenchError("the training ended with status 124")
        return planted.Found([], {})

    monkeypatch.setattr(planted, "profiled", profiled)
    done = CliRunner().invoke(causes.command, ["--runs", "3", "--faults", "slow rank"])
    assert done.exit_code == 1
    assert "1: slow rank: the training ended with status 124" in done.output
    assert "2: slow rank: WRONG, no cause" in done.output and "1 of 3 trainings failed" in done.output
    assert CliRunner().invoke(causes.command, ["--faults", "bad luck"]).exit_code == 2


@pytest.mark.skipif(unavailable() is not None, reason=f"no emulated hosts: {unavailable()}")
@pytest.mark.timed
@pytest.mark.parametrize("plan", [drawn(1, buckets=3), breakdown_stages.drawn(1)], ids=["data-parallel", "pipeline"])
def test_the_parts_of_a_step_are_those_of_the_script(plan: breakdown.Plan | breakdown_stages.Stages) -> None:
    """A training of 120 steps. The bench judges 3 %, and all parts; on a busy machine it may be a fifth, and a few samples do not
    tell what of communication is a wait, nor what is hidden."""
    found = breakdown.measure(plan, timeout_s=120)
    judged_here = [one for one in found if one.is_judged and one.category not in MOVING]
    far = [one for one in judged_here if abs(one.miss) > 0.2]
    assert not far and {one.category for one in judged_here} >= {"forward", "backward", "exposed", "step"}, found
    assert all(isinstance(one, Outcome) for one in found)
