"""send and recv: tags, batches, several at once, any source."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from torch_uses import bits, integers, same, use, world


@use(ranks=4)
def ring(backend: str) -> object:
    """Blocking send and recv around a ring, big and small."""
    with world(backend) as (rank, size):
        for n in (1, 1000, 1 << 20):
            received = torch.empty(n)
            if rank % 2 == 0:
                dist.send(integers(n, seed=rank), dst=(rank + 1) % size)
                sender = dist.recv(received, src=(rank - 1) % size)
            else:
                sender = dist.recv(received, src=(rank - 1) % size)
                dist.send(integers(n, seed=rank), dst=(rank + 1) % size)
            assert sender == (rank - 1) % size
            same(received, integers(n, seed=(rank - 1) % size))
        return None


@use()
def tags(backend: str) -> object:
    """A message goes to the recv of its tag, whatever the order in which they are posted."""
    with world(backend) as (rank, _):
        if rank == 0:
            works = [dist.isend(torch.full((100,), float(tag)), dst=1, tag=tag) for tag in (3, 1, 2)]
            for work in works:
                work.wait()
        else:
            received = {tag: torch.empty(100) for tag in (1, 2, 3)}
            works = [dist.irecv(received[tag], src=0, tag=tag) for tag in (1, 2, 3)]
            for work in reversed(works):
                work.wait()
            for tag, tensor in received.items():
                same(tensor, float(tag), f"tag {tag}")
        return None


@use()
def same_tag_keeps_order(backend: str) -> object:
    """Messages with one tag arrive in the order in which they were sent, whatever their sizes."""
    with world(backend) as (rank, _):
        sizes = [300_000, 1, 70_000, 2]
        if rank == 0:
            works = [dist.isend(integers(n, seed=n), dst=1) for n in sizes]
            for work in works:
                work.wait()
        else:
            tensors = [torch.empty(n) for n in sizes]
            works = [dist.irecv(tensor, src=0) for tensor in tensors]
            for work in works:
                work.wait()
            for n, tensor in zip(sizes, tensors, strict=True):
                same(tensor, integers(n, seed=n))
        return None


@use(ranks=4)
def batch(backend: str) -> object:
    """batch_isend_irecv exchanges with both neighbours, as pipeline and context parallelism do."""
    with world(backend) as (rank, size):
        left, right = (rank - 1) % size, (rank + 1) % size
        from_left, from_right = torch.empty(5000), torch.empty(5000)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, integers(5000, seed=rank), right),
                dist.P2POp(dist.irecv, from_left, left),
                dist.P2POp(dist.isend, -integers(5000, seed=rank), left),
                dist.P2POp(dist.irecv, from_right, right),
            ]
        )
        for work in works:
            work.wait()
        same(from_left, integers(5000, seed=left))
        same(from_right, -integers(5000, seed=right))
        return None


@use(ranks=4)
def between_collectives(backend: str) -> object:
    """Messages between two ranks do not disturb the order of collectives among all."""
    with world(backend) as (rank, size):
        tensor = torch.ones(50_000)
        first = dist.all_reduce(tensor, async_op=True)
        message = torch.full((70_000,), 5.0) if rank == 0 else torch.empty(70_000)
        if rank == 0:
            work = dist.isend(message, dst=3)
        elif rank == 3:
            work = dist.irecv(message, src=0)
        other = torch.full((1000,), 2.0)
        second = dist.all_reduce(other, async_op=True)
        if rank in (0, 3):
            work.wait()
            same(message, 5.0)
        second.wait()
        first.wait()
        same(tensor, float(size))
        same(other, 2.0 * size)
        return bits(tensor, other)


@use()
def from_any(backend: str) -> object:
    """recv without a source takes what comes, and names the sender."""
    with world(backend) as (rank, _):
        if rank == 1:
            received = torch.empty(100)
            assert dist.recv(received) == 0
            same(received, 4.0)
        else:
            dist.send(torch.full((100,), 4.0), dst=1)
        return None


@use()
def to_itself(backend: str) -> object:
    """Sending to oneself is refused, because nobody could ever receive it."""
    with world(backend) as (rank, _):
        with pytest.raises(ValueError):
            dist.send(torch.ones(1), dst=rank)
        return None
