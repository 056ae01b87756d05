"""Hierarchical all-reduce on emulated hosts: memory inside a host, TCP between hosts, ranks placed in any way."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import penstock
import ranks
from penstock.tools.testbed import Testbed

# The host of each rank of the largest group, which has three, two and two ranks a host.
WORLD = "0010212"
# Ranks of further groups: hosts in blocks as torchrun places them, and by turns; three ranks on one and one on another; two
# and twice one; one on each of three; all on one.
GROUPS = [(0, 1, 2, 5), (0, 2, 3, 5), (0, 1, 3, 5), (2, 3, 4, 5), (0, 2, 4), (0, 1, 3)]


@pytest.fixture(scope="module")
def bed() -> Iterator[Testbed]:
    with Testbed(hosts=3) as bed:
        yield bed


def test_same_bits_wherever_ranks_are(bed: Testbed) -> None:
    """Every dtype, operation and size gives the expected result, with the same bits on all ranks and every time, for groups
    whose ranks share hosts in every way."""
    reports = _run(bed, WORLD, _grid, algorithm="hierarchical")
    for index, group in enumerate([tuple(range(len(WORLD))), *GROUPS]):
        first, *others = [reports[rank][index] for rank in group]
        assert all(other == first for other in others), (group, first, others)


@pytest.mark.parametrize("placement", ["0011", "0101", "1000"])
@pytest.mark.parametrize("algorithm", ["auto", "ring"])
def test_links_carry_what_the_plan_promises(bed: Testbed, placement: str, algorithm: str) -> None:
    """What the kernel counts on each host's interface is ``2(h-1)/h`` of the tensor, chosen unasked; and for a ring
    ``2(n-1)/n``, wherever the ranks are."""
    nbytes = 24 << 20
    before = bed.counters()
    chose = _run(bed, placement, _reduce, nbytes, algorithm=algorithm)
    after = bed.counters()
    hosts, world = len(set(placement)), len(placement)
    parts = hosts if algorithm == "auto" else world
    least = 2 * nbytes * (parts - 1) // parts
    for host in range(hosts):
        for direction in ("tx_bytes", "rx_bytes"):
            carried = after[host][direction] - before[host][direction]
            # Headers and acknowledgements take up to 7 %; the tail may be sent twice, and more of it on a busy machine. A
            # ring's bytes are 1.5 times those of the hierarchical plan.
            assert least <= carried <= 1.3 * least, (host, direction, carried / least)
    chosen = f"{world} ranks on {hosts} hosts: hierarchical" if algorithm == "auto" else "ring (PENSTOCK_ALGORITHM"
    assert chosen in chose[0], chose[0]


def _run(bed: Testbed, placement: str, program: Callable[..., object], *args: object, algorithm: str) -> list[Any]:
    """Run ``program`` on one rank for each character of ``placement``, which names its host; returns what they report."""
    # Fewer streams repeat less of the tail.
    env = {"PENSTOCK_ALGORITHM": algorithm, "PENSTOCK_STREAMS": "2"}
    hosts = [int(host) for host in placement]
    return ranks.run(program, count=len(hosts), args=args, env=env, bed=bed, placement=hosts, timeout_s=120)


# ---------------------------------------------------------------------------------------------------------------------
# In a rank.


def _grid() -> dict[int, str]:
    dist.init_process_group("penstock")
    groups = [dist.group.WORLD, *(dist.new_group(list(ranks)) for ranks in GROUPS)]
    report = {index: _exercise(group) for index, group in enumerate(groups) if dist.get_rank(group) >= 0}
    for group in penstock.stats()["groups"]:
        assert "hierarchical" in group["algorithm"], group
    dist.destroy_process_group()
    return report


def _reduce(nbytes: int) -> str:
    dist.init_process_group("penstock")
    tensor = torch.ones(nbytes // 4)
    dist.all_reduce(tensor)
    assert tensor.eq(dist.get_world_size()).all()
    algorithm = penstock.stats()["groups"][0]["algorithm"]
    dist.destroy_process_group()
    return algorithm


def _exercise(group: dist.ProcessGroup) -> str:
    """A grid of all-reduces; returns a digest of the bits of all results."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    digests = set()
    for _ in range(2):
        digest = hashlib.sha256()
        # Around the limits of lines, chunks, frames and eager messages.
        for count in (0, 1, 7, 97, 1000, 8191, 100_003):
            at = torch.arange(count)
            # Small whole numbers, whose sums every dtype holds exactly in any order.
            inputs = torch.stack([(at * 7 + each * 5) % 11 - 4 for each in range(world)])
            for dtype in (torch.float32, torch.int32, torch.bfloat16):
                for operation, expected in (
                    (dist.ReduceOp.SUM, inputs.sum(0).to(dtype)),
                    (dist.ReduceOp.MAX, inputs.amax(0).to(dtype)),
                    (dist.ReduceOp.AVG, inputs.sum(0).to(dtype) / world),
                ):
                    if operation == dist.ReduceOp.AVG and not dtype.is_floating_point:
                        continue
                    tensor = inputs[rank].to(dtype)
                    dist.all_reduce(tensor, op=operation, group=group)
                    assert tensor.equal(expected), (operation, dtype, count)
        # Sums that depend on their order in every bit; the large ones have many segments in flight.
        for count in (1000, 100_003, 1_500_001):
            tensor = _random(count, rank).clone()
            dist.all_reduce(tensor, group=group)
            torch.testing.assert_close(tensor.double(), _sum_of_randoms(count, world), rtol=0, atol=1e-5)
            digest.update(tensor.numpy().tobytes())
        digests.add(digest.hexdigest())
    # Many at a time, of which none waits for the one before.
    parts = [torch.full((50_000 + part,), float(rank + part)) for part in range(12)]
    for work in [dist.all_reduce(part, group=group, async_op=True) for part in parts]:
        work.wait()
    for number, part in enumerate(parts):
        assert part.eq(world * number + world * (world - 1) / 2).all(), number
    (digest_of_all,) = digests
    return digest_of_all


@functools.cache
def _random(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


@functools.cache
def _sum_of_randoms(count: int, world: int) -> torch.Tensor:
    return torch.stack([_random(count, each) for each in range(world)]).double().sum(0)
