"""A sampled step of a pipeline as a model that runs another schedule: the same passes in another order.

A stage's passes take what they took in the sample, what is sent between stages has the bytes that it had, and `replay.run` plays
the order. So the bubble, which is (p - 1) / (m + p - 1) of the step for p equal stages and m micro-batches, is that of unequal
stages and of the measured wire, too.
"""

from __future__ import annotations

import collections
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from penstock.profiling.replay import Act, Model, Move, run

__all__ = ["Pipeline", "Turn", "gpipe", "interleaved", "one_forward_one_backward", "period", "pipeline", "scheduled"]

AT_ONCE_NS = 100_000
"""Computing between two operations that is none of a pass."""
FORWARD, BACKWARD = "pipeline forward recv", "pipeline backward recv"


class Turn(NamedTuple):
    """A pass of a micro-batch through one of a rank's stages."""

    is_forward: bool
    batch: int
    stage: int = 0
    """Of those of the rank."""


Order = Callable[[int, int, int], Iterator[Turn]]
"""What rank ``at`` of ``ranks`` does with ``batches`` micro-batches."""


@dataclass(frozen=True)
class Pipeline:
    """What a sampled step shows of its pipelines."""

    chains: tuple[tuple[int, ...], ...]
    """The ranks of each pipeline, from the first stage to the last."""
    batches: int
    """Micro-batches of a step."""
    order: Order
    """The schedule: `gpipe` or `one_forward_one_backward`."""


def pipeline(model: Model) -> Pipeline | None:
    """The pipelines of a step; None if it has none, or what its ranks do is neither of the schedules that are known."""
    after: dict[int, set[int]] = {}
    for move in model.moves:
        if move.purpose == FORWARD:
            after.setdefault(move.ranks[0], set()).add(move.ranks[-1])
    if not after or any(len(each) > 1 for each in after.values()):
        return None
    next_of = {rank: next(iter(each)) for rank, each in after.items()}
    chains = []
    for first in sorted(next_of.keys() - set(next_of.values())):
        chain = [first]
        while chain[-1] in next_of and len(chain) <= len(next_of):
            chain.append(next_of[chain[-1]])
        chains.append(tuple(chain))
    members = [rank for chain in chains for rank in chain]
    if len(set(members)) < len(members) or set(model.acts) != set(members):
        return None
    batches = model.passes[members[0]].batches
    if (
        batches == 0
        or len({len(chain) for chain in chains}) > 1
        or any(model.passes[rank].batches != batches for rank in members)
    ):
        return None
    for order in (one_forward_one_backward, gpipe):
        if all(_follows(model, chain, at, order, batches) for chain in chains for at in range(len(chain))):
            return Pipeline(tuple(chains), batches, order)
    return None


def _follows(model: Model, chain: Sequence[int], at: int, order: Order, batches: int) -> bool:
    """Whether what a rank sends and receives is in the order of that schedule. What it issues at once has none."""
    rank = chain[at]
    # A pass begins with what it receives, or where it receives nothing ends with what it sends.
    forward_end, backward_end = (0 if at == 0 else 1), (0 if at == len(chain) - 1 else 1)
    groups: list[collections.Counter[bool]] = []
    is_new = True
    for act in model.acts[rank]:
        is_new |= act.compute_ns > AT_ONCE_NS or not act.is_issue
        if act.move is None or not act.is_issue:
            continue
        move = model.moves[act.move]
        for purpose, is_forward, end in ((FORWARD, True, forward_end), (BACKWARD, False, backward_end)):
            if move.purpose == purpose and move.ranks[end] == rank:
                if is_new:
                    groups.append(collections.Counter())
                groups[-1][is_forward] += 1
                is_new = False
    total = sum((group for group in groups), collections.Counter[bool]())
    tensors = {kind: total[kind] // batches for kind in (True, False)}
    if any(total[kind] != tensors[kind] * batches or tensors[kind] == 0 for kind in (True, False)):
        return False
    wanted = [turn.is_forward for turn in order(at, len(chain), batches)]
    seen = collections.Counter[bool]()
    for group in groups:
        seen += group
        if any(seen[kind] % tensors[kind] for kind in (True, False)):
            continue  # the other tensors of a pass come later
        done = {kind: seen[kind] // tensors[kind] for kind in (True, False)}
        if wanted[: sum(done.values())].count(True) != done[True]:
            return False
    return True


def scheduled(model: Model, found: Pipeline, order: Order | None = None, *, stages: int = 1) -> Model:
    """The step with another schedule.

    Args:
        order: None: the one that it has.
        stages: of a rank; each takes that part of its passes.
    """
    moves: list[Move] = []
    acts: dict[int, list[Act]] = {rank: [] for rank in model.acts}
    carried = {rank: model.passes[rank].before_ns for rank in model.acts}
    for chain in found.chains:
        _schedule(model, chain, order or found.order, found.batches, stages, moves, acts, carried)
    # What is no pipeline's stays behind it, in its order.
    number: dict[int, int] = {}
    for at, move in enumerate(model.moves):
        if move.purpose not in (FORWARD, BACKWARD):
            number[at] = len(moves)
            moves.append(move)
    for rank, own in acts.items():
        carried[rank] += model.passes[rank].after_ns
        for act in model.acts[rank]:
            if act.move in number and act.move is not None:
                own.append(Act(carried[rank], number[act.move], act.is_issue))
                carried[rank] = 0.0
        own.append(Act(carried[rank], None, False))
    return replace(model, moves=tuple(moves), acts={rank: tuple(own) for rank, own in acts.items()})


def period(model: Model, takes: Callable[[Move], float]) -> float:
    """How long a step takes when many follow each other, mean over the ranks: those that end early begin the next one early."""
    twice = {
        rank: (*own, *(act if act.move is None else act._replace(move=act.move + len(model.moves)) for act in own))
        for rank, own in model.acts.items()
    }
    return run(replace(model, moves=(*model.moves, *model.moves), acts=twice), takes) - run(model, takes)


def _schedule(
    model: Model,
    chain: Sequence[int],
    order: Order,
    batches: int,
    stages: int,
    moves: list[Move],
    acts: dict[int, list[Act]],
    carried: dict[int, float],
) -> None:
    count, depth = len(chain), len(chain) * stages
    numbers: dict[tuple[bool, int, int], int] = {}
    kinds: dict[tuple[bool, int, int], Move] = {}

    def sent(is_forward: bool, stage: int, batch: int) -> int:
        """The move to a stage of all, counted from the first one of the pipeline."""
        key = is_forward, stage, batch
        if key not in numbers:
            other = stage - 1 if is_forward else stage + 1
            ranks = chain[other % count], chain[stage % count]
            numbers[key] = len(moves)
            like = (is_forward, *ranks)
            if like not in kinds:
                kinds[like] = _like(model, is_forward, ranks, batches)
            moves.append(kinds[like])
        return numbers[key]

    for at, rank in enumerate(chain):
        own = model.passes[rank]
        took = {True: own.forward_ns / batches / stages, False: own.backward_ns / batches / stages}
        for turn in order(at, count, batches):
            stage = turn.stage * count + at
            ends = (0, depth - 1) if turn.is_forward else (depth - 1, 0)
            if stage != ends[0]:
                number = sent(turn.is_forward, stage, turn.batch)
                acts[rank] += [Act(carried[rank], number, True), Act(0.0, number, False)]
                carried[rank] = 0.0
            carried[rank] += took[turn.is_forward]
            if stage != ends[1]:
                number = sent(turn.is_forward, stage + 1 if turn.is_forward else stage - 1, turn.batch)
                acts[rank].append(Act(carried[rank], number, True))
                carried[rank] = 0.0


def _like(model: Model, is_forward: bool, ranks: tuple[int, int], batches: int) -> Move:
    """What goes from one stage to the next for a micro-batch: a part of all that the sample shows between these two ranks, or
    where it shows nothing, between any two."""
    purpose = FORWARD if is_forward else BACKWARD
    every = [move for move in model.moves if move.purpose == purpose]
    here = [move for move in every if move.ranks == ranks]
    edges = 1 if here else max(1, len({move.ranks for move in every}))
    nbytes = sum(move.bytes for move in here or every) / edges / batches
    like = (here or every)[0]
    inside = like.is_inside if here else statistics.fmean(move.is_inside for move in every) == 1
    return like._replace(ranks=ranks, bytes=nbytes, queue=ranks, is_inside=inside)


# Schedules


def gpipe(at: int, ranks: int, batches: int) -> Iterator[Turn]:
    """All forward, then all backward (Huang et al., NeurIPS 2019)."""
    for is_forward in (True, False):
        for batch in range(batches):
            yield Turn(is_forward, batch)


def one_forward_one_backward(at: int, ranks: int, batches: int) -> Iterator[Turn]:
    """PipeDream-Flush: each stage begins to go backward as soon as it can (Narayanan et al., SC '21, section 2.2)."""
    ahead = min(ranks - at - 1, batches)
    for batch in range(ahead):
        yield Turn(True, batch)
    for batch in range(batches):
        if batch + ahead < batches:
            yield Turn(True, batch + ahead)
        yield Turn(False, batch)


def interleaved(stages: int) -> Order:
    """The same with several stages a rank, each with a part of the layers (Megatron-LM, the same section). The micro-batches are
    a multiple of the ranks."""

    def order(at: int, ranks: int, batches: int) -> Iterator[Turn]:
        total = batches * stages
        ahead = min(2 * (ranks - at - 1) + (stages - 1) * ranks, total)

        def turn(is_forward: bool, number: int) -> Turn:
            group, within = divmod(number, ranks * stages)
            stage = within // ranks
            return Turn(is_forward, group * ranks + within % ranks, stage if is_forward else stages - 1 - stage)

        for number in range(ahead):
            yield turn(True, number)
        for number in range(total):
            if number + ahead < total:
                yield turn(True, number + ahead)
            yield turn(False, number)

    return order
