"""Proves that nothing is kept of groups and operations that are over (`./dev soak` runs the same program at length)."""

from __future__ import annotations

import functools
from datetime import timedelta

import pytest
import torch.distributed as dist

import ranks
import soak
from penstock.runtime import groups
from penstock.runtime.store import Keys
from penstock.torch import backend


@pytest.mark.parametrize("medium", ["memory", "tcp"])
def test_nothing_is_kept(medium: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of groups, each with operations of all kinds and some with disorderly ends: what the engine, Python and the
    process hold afterwards is what they held after the first groups."""
    monkeypatch.setenv("PENSTOCK_SHM", "1" if medium == "memory" else "0")
    monkeypatch.setenv("PENSTOCK_STREAMS", "16")
    spec = soak.Spec("penstock", seed=7, groups=250, minutes=2, operations=10)
    (told,) = soak.run(spec, world=3)
    assert all(one.groups == spec.groups and len(one.ends) == 4 for one in told)
    kept = [f"rank {rank} keeps {text}" for rank, one in enumerate(told) for text in soak.complaints(one, 3)]
    assert not kept, "\n".join(kept)


@pytest.mark.slow
def test_memory_is_judged_against_gloo() -> None:
    """The memory of ranks grows no faster a group than gloo's in the same program; what is kept of every group is found."""
    program = functools.partial(soak.Spec, seed=7, groups=250, minutes=2, operations=5)
    leaking = program("penstock", leak_bytes=100_000)
    ours, leaks, gloos = soak.run(program("penstock"), leaking, program("gloo"), world=3)
    assert soak.memory_complaints(ours, gloos) == []
    found = soak.memory_complaints(leaks, gloos)
    assert found is not None and len(found) == 3, found


def test_slopes_are_robust() -> None:
    """A slope is found in steps and noise, and one jump is none."""
    steps = [(10 * at, 10_000 * at // 200 * 200 + at * 7919 % 4096) for at in range(300)]
    growth = soak.slope(steps)
    assert growth.low <= 1000 <= growth.high and growth.high - growth.low < 100
    jump = soak.slope([(10 * at, 50_000_000 * (at > 280)) for at in range(300)])
    assert jump.slope == 0 and jump.low == 0
    assert soak.steeper(growth, growth) < 0 < soak.steeper(growth, jump)


def test_groups_of_the_same_ranks_are_numbered_in_order() -> None:
    """Ids of the groups of the same ranks follow each other, those of others are elsewhere, and a series that is used up is
    followed by another; of how many sets of ranks the last id is remembered is bounded."""
    ids = groups._Ids()
    first, other, second = (ids.draw(job_ranks) for job_ranks in ((0, 1), (0, 2), (0, 1)))
    assert second == first + 1 and other not in range(first - 2**20, first + 2**20)
    drawn = {first, second, *(ids.draw((0, 1)) for _ in range(2**20))}
    assert len(drawn) == 2**20 + 2 and min(drawn) > 0 and max(drawn) < 2**63
    for rank in range(2 * groups._MOST_SERIES):
        ids.draw((0, rank))
    assert len(ids._series) == groups._MOST_SERIES


def test_the_store_keeps_no_contacts() -> None:
    """A group that comes again and again adds no key to the job's store."""
    first, later = ranks.run(_come_again, count=2)[0]
    assert later == first


def _come_again() -> tuple[int, int]:
    dist.init_process_group("penstock")
    store = dist.distributed_c10d._get_default_store()
    counts = []
    for times in (1, 5):
        for _ in range(times):
            contact = Keys("again", backend.of()._member.keys)
            member = groups.join(contact, dist.get_rank(), (0, 1), timedelta(seconds=60), "again")
            member.leave()
        # The last of the two to join takes back what it has published before it comes here.
        dist.barrier()
        counts.append(store.num_keys())
        dist.barrier()
    dist.destroy_process_group()
    return counts[0], counts[1]
