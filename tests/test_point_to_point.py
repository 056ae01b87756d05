"""Proves what send and recv promise: messages meet by direction, tag and order, however late the receiver is."""

from __future__ import annotations

import datetime
import random
import time

import pytest
import torch
import torch.distributed as dist

import ranks
from backends import BACKENDS, Backend

# More than the engine's patience (1 s) before it asks the other side where it is.
LATE_S = 1.3


def _pattern(key: object, count: int) -> torch.Tensor:
    seed = random.Random(str(key)).randrange(1 << 20)
    return torch.arange(seed, seed + count, dtype=torch.float32)


def _check(tensor: torch.Tensor, key: object) -> None:
    assert torch.equal(tensor, _pattern(key, tensor.numel())), f"{key}: {tensor.numel()} elements, {tensor[:4]}"


def _ask(rank: int) -> None:
    """Rank 0 asks with a large tensor; rank 1 receives late and answers with a small one of the same tag."""
    answer, question = torch.empty(10), torch.empty(200_000)
    if rank == 0:
        sent = dist.isend(_pattern("question", 200_000), 1)
        dist.recv(answer, 1)
        _check(answer, "answer")
        sent.wait()
    else:
        time.sleep(LATE_S)
        dist.recv(question, 0)
        _check(question, "question")
        dist.send(_pattern("answer", 10), 0)


def _cross(rank: int) -> None:
    """Both send first, by one element unlike, and receive late."""
    counts = [300_000, 300_001]
    sent = dist.isend(_pattern(rank, counts[rank]), 1 - rank)
    time.sleep(LATE_S)
    received = torch.empty(counts[1 - rank])
    dist.recv(received, 1 - rank)
    _check(received, 1 - rank)
    sent.wait()


def _generated(rank: int, seed: int) -> None:
    """Messages in both directions under few tags, sizes from nothing to long, posted in random orders, one side late."""
    shared, own = random.Random(seed), random.Random(f"{seed} {rank}")
    sizes = [0, 1, 10, 2048, 8191, 8192, 8193, 70_000, 200_000]
    messages = [
        (sender, tag, turn, shared.choice(sizes)) for sender in (0, 1) for tag in range(3) for turn in range(4)
    ]
    lines: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}
    for message in messages:
        lines.setdefault(message[:2], []).append(message)
    late = shared.randrange(2) == rank
    works, received = [], []
    while any(lines.values()):
        line = own.choice([line for line in lines.values() if line])
        message = line.pop(0)
        sender, tag, _, count = message
        if sender == rank:
            works.append(dist.isend(_pattern(message, count), 1 - rank, tag=tag))
        else:
            if late:
                time.sleep(LATE_S)
                late = False
            received.append((message, torch.empty(count)))
            works.append(dist.irecv(received[-1][1], 1 - rank, tag=tag))
    own.shuffle(works)
    for work in works:
        work.wait()
    for message, tensor in received:
        _check(tensor, message)


def _program(backend: str, part: str, seed: int) -> None:
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=30))
    rank = dist.get_rank()
    match part:
        case "ask":
            _ask(rank)
        case "cross":
            _cross(rank)
        case _:
            _generated(rank, seed)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize(("part", "seed"), [("ask", 0), ("cross", 0), *(("generated", seed) for seed in range(4))])
def test_directions(backend: Backend, part: str, seed: int) -> None:
    """The two directions between two ranks have nothing to do with each other, whatever their sizes, under one tag."""
    ranks.run(_program, count=2, args=(backend.name, part, seed), env=backend.env)
