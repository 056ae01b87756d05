"""Why a step takes as long as it does: the bound that holds for each part of it, with its numbers, and what to change.

docs/design/profile-causes.md, "Causes", says why each rule and threshold is what it is. `bounds.py` has those of the wire.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from penstock.profiling.bounds import wire
from penstock.profiling.breakdown import MEASURING, Breakdown
from penstock.profiling.cause import LEAST_SHARE, MOSTLY, Cause, free_cores, has_settings, ms
from penstock.profiling.measures import Measures, Rank
from penstock.profiling.record import Record

__all__ = ["find"]


def find(records: Sequence[Record], breakdown: Breakdown) -> list[Cause]:
    """The causes that explain `LEAST_SHARE` of the mean step or more, those with the largest gain first, and last of all what the
    ranks compute, which hardly a setting shortens."""
    measures = Measures(records, breakdown)
    if not measures.ranks or measures.unprofiled_ns <= 0:
        return []
    found: dict[tuple[str, int | None, str], Cause] = {}
    bounds = (cause for reach in measures.by_reach() for cause in wire(reach))
    for cause in (*_waits(measures), *bounds, *_work(measures)):
        key = cause.kind, cause.rank, cause.host
        found[key] = cause if key not in found else _joined(found[key], cause)
    shown = [cause for cause in found.values() if cause.cost_ns >= LEAST_SHARE * measures.unprofiled_ns]
    return sorted(shown, key=lambda cause: (cause.kind == "compute", -_expected_ns(cause)))


# ---------------------------------------------------------------------------------------------------- waiting for a rank


def _waits(measures: Measures) -> Iterator[Cause]:
    """Exposed waits for a rank that comes late, and why it does."""
    late: dict[int, float] = {}
    for rank in measures.ranks:
        for moving in rank.share.without_bubbles.values():
            waited = sum(moving.waited_for.values())
            if waited <= 0:
                continue
            for other, ns in moving.waited_for.items():
                if other != rank.number:
                    # How much of the wait for each rank was exposed is not known of each alone.
                    late[other] = late.get(other, 0.0) + ns * min(1.0, moving.exposed_wait_ns / waited)
    count = len(measures.ranks)
    # What the last one costs is what the mean of the others waits for it.
    late = {rank: ns / max(1, count - 1) for rank, ns in late.items()}
    if count > 1:
        # Where the clocks of hosts are not known well enough to tell waits from wire, this tells still: a rank that all wait for
        # stands still for less than they do, in what all do.
        of_ranks = {rank.number: rank.share.without_bubbles for rank in measures.ranks}
        common = set.intersection(*map(set, of_ranks.values()))
        still = {rank: sum(moving[name].exposed_ns for name in common) for rank, moving in of_ranks.items()}
        least = min(still, key=lambda rank: still[rank])
        others_ns = measures.median(ns for rank, ns in still.items() if rank != least)
        operations = measures.median(rank.operations for rank in measures.ranks)
        unknown_ns = min(others_ns - still[least], operations * measures.clocks_unsure_ns)
        late[least] = max(late.get(least, 0.0), unknown_ns)
    total = sum(late.values())
    yield from _bubble(measures)
    if total <= 0:
        return
    worst = max(late, key=lambda rank: late[rank])
    if late[worst] < MOSTLY * total or not any(rank.number == worst for rank in measures.ranks):
        yield Cause(
            "jitter",
            "wait",
            f"ranks wait {ms(total)} a step for each other, now for one and now for another",
            _and_check(measures, "equal batches and free cores make steps alike", "tells who was last in which step"),
            total,
            numbers={"waited_ms": total / 1e6, "waited_for_the_worst_ms": late[worst] / 1e6},
        )
        return
    yield _straggler(measures, worst, late[worst])


def _beyond_others(measures: Measures, rank: Rank) -> dict[str, float]:
    """By phase, what a rank spends more than the others."""
    others = [each for each in measures.ranks if each.number != rank.number]
    return {
        phase: ns - measures.median(other.share.work.get(phase, 0.0) for other in others)
        for phase, ns in rank.share.work.items()
        if phase != MEASURING
    }


def _needs_no_processor(measures: Measures, rank: Rank, excess_ns: float) -> bool:
    """Whether a rank stands still in what it spends more than the others: its training thread neither ran nor could have run for
    as much. Not told of GPUs, which compute while the thread waits."""
    others = [each for each in measures.ranks if each.number != rank.number]
    counted = all(each.training_queued_ns is not None and each.training_cpu_ns > 0 for each in measures.ranks)
    if not counted or measures.median(each.training_cpu_ns / max(1.0, each.compute_ns) for each in others) < MOSTLY:
        return False
    used_ns = rank.training_cpu_ns - measures.median(each.training_cpu_ns for each in others)
    return used_ns + _queued_beyond(measures, rank) < OF_EXCESS * excess_ns


def _straggler(measures: Measures, number: int, waited_ns: float) -> Cause:
    """Why the others wait for this rank: the phase in which it spends more than they do."""
    rank = next(each for each in measures.ranks if each.number == number)
    more = _beyond_others(measures, rank)
    excess_ns = sum(ns for ns in more.values() if ns > 0)
    gain_ns = min(waited_ns, excess_ns) if excess_ns > 0 else waited_ns
    phase = max(more, key=lambda each: more[each], default="other")
    queued = _queued_beyond(measures, rank)
    numbers = {
        "waited_ms": waited_ns / 1e6,
        f"{phase.replace(' ', '_')}_beyond_others_ms": more.get(phase, 0.0) / 1e6,
        "queued_beyond_others_ms": queued / 1e6,
    }
    where = {"rank": number, "host": rank.host, "numbers": numbers}
    waiting = f"the other ranks wait {ms(waited_ns)} a step for rank {number}"
    # Before the phase: a thread without a processor is late in whatever it does most, be it loading.
    if queued >= QUEUED_OF_EXCESS * excess_ns > 0 or queued >= QUEUED_OF_EXCESS * waited_ns:
        text = f"{waiting}, whose training thread could have run for {ms(queued)} more, and found no free processor"
        gain_ns = min(waited_ns, max(gain_ns, queued))
        change, settings = free_cores(measures, rank.host)
        return Cause("contention", "wait", text, change, waited_ns, gain_ns, settings=settings, **where)  # type: ignore[arg-type]
    if phase == "loading":
        return _loader(measures, rank, waiting, waited_ns, gain_ns, numbers)
    if phase in PAUSES:
        told, found = _disk_of_checkpoint(measures, rank) if phase == "checkpoint" else ("", {})
        where["numbers"] = {**numbers, **found}
        return Cause(phase, phase, f"{waiting}, for its {phase}{told}", CHANGES[phase], waited_ns, gain_ns, **where)  # type: ignore[arg-type]
    text = f"{waiting}, which spends {ms(more.get(phase, 0.0))} more in {phase} than they do"
    if more.get(phase, 0.0) < OF_EXCESS * waited_ns:
        text += ": that does not explain it, and no other phase does"
    change = _and_check(measures, CHANGES["straggler"], "names it while training")
    if phase == "other" and _needs_no_processor(measures, rank, more.get(phase, 0.0)):
        text += ", without a processor"
        change = "look at what the script waits for there: a log, a file, a lock, another process"
    return Cause("straggler", "wait", text, change, waited_ns, gain_ns, **where)  # type: ignore[arg-type]


def _and_check(measures: Measures, change: str, what: str) -> str:
    return f"PENSTOCK_CHECK=slow {what}; {change}" if has_settings(measures.backend) else change


def _queued_beyond(measures: Measures, rank: Rank) -> float:
    """How much longer a rank's training thread waits for a processor than those of the others would for what it ran: on a busy
    host who runs more also queues more, and that is not why."""
    others = [other for other in measures.ranks if other.number != rank.number and other.training_queued_ns is not None]
    usual = measures.median((other.training_queued_ns or 0.0) / max(1e6, other.training_cpu_ns) for other in others)
    return max(0.0, (rank.training_queued_ns or 0.0) - usual * rank.training_cpu_ns)


def _bubble(measures: Measures) -> Iterator[Cause]:
    waits = [sum(moving.exposed_wait_ns for moving in rank.share.bubbles) for rank in measures.ranks]
    cost_ns = sum(waits) / len(waits)
    if cost_ns <= 0:
        return
    share = cost_ns / measures.unprofiled_ns
    yield Cause(
        "bubble",
        "wait",
        f"pipeline stages wait {ms(cost_ns)} a step for their first and last micro-batches, {share:.0%} of it",
        "an interleaved schedule with two stages a rank, or more micro-batches a step",
        cost_ns,
        cost_ns / 2,  # p ranks with v stages each stand still for (p - 1) / v passes
        numbers={"bubble_ms": cost_ns / 1e6, "share_of_step": share},
    )


# ------------------------------------------------------------------------------------------------- what the ranks do


def _work(measures: Measures) -> Iterator[Cause]:
    """Phases that all ranks spend their time in."""
    # What all spend: if one spends more, the others wait for it, and `_waits` has it.
    loading = min(rank.share.work.get("loading", 0.0) for rank in measures.ranks)
    if loading > 0:
        slowest = max(measures.ranks, key=lambda rank: rank.share.work.get("loading", 0.0))
        numbers = {"loading_ms": loading / 1e6}
        cause = _loader(
            measures, slowest, f"each rank waits {ms(loading)} a step for its batch", loading, loading, numbers
        )
        yield dataclasses.replace(cause, rank=None)
    for phase in PAUSES:
        spent = min(rank.share.work.get(phase, 0.0) for rank in measures.ranks)
        numbers = {f"{phase}_ms": spent / 1e6, "share_of_step": spent / measures.unprofiled_ns}
        told = ""
        if phase == "checkpoint" and spent > 0:
            told, found = _disk_of_checkpoint(measures, max(measures.ranks, key=lambda rank: rank.written_bytes))
            numbers |= found
        text = f"{ms(spent)} a step go to {phase}, in the mean{told}"
        yield Cause(phase, phase, text, CHANGES[phase], spent, numbers=numbers)
    usual = _queued(measures)
    text = f"the training thread of each rank could have run for {ms(usual)} a step more, and found no free processor"
    change, settings = free_cores(measures)
    numbers = {"queued_ms": usual / 1e6}
    yield Cause("contention", "compute", text, change, usual, usual, numbers=numbers, settings=settings)
    yield _compute(measures, min(rank.compute_ns for rank in measures.ranks) - usual)


def _queued(measures: Measures) -> float:
    """How long the training thread of each rank waits for a processor while it computes: no longer than it computes without
    running. Counters go on while torch's profiler starts and stops, for which the thread runs."""
    found = [
        min(
            rank.training_queued_ns * rank.share.unprofiled_ns / max(1.0, rank.share.step_ns),
            rank.compute_ns - max(0.0, rank.training_cpu_ns - rank.share.work.get(MEASURING, 0.0)),
        )
        for rank in measures.ranks
        if rank.training_queued_ns is not None
    ]
    return max(0.0, min(found, default=0.0))


def _compute(measures: Measures, compute_ns: float) -> Cause:
    """What all ranks compute: by phase, and whether Python holds it, or the operators and the threads that these have."""
    share = compute_ns / measures.unprofiled_ns
    text = f"the ranks compute for {ms(compute_ns)} a step, {share:.0%} of it"
    numbers = {"compute_ms": compute_ns / 1e6, "share_of_step": share}
    parts = {
        phase: part for phase, part in measures.computing().items() if part[0] >= LEAST_SHARE * measures.unprofiled_ns
    }
    for phase, (ns, operators) in parts.items():
        numbers |= {f"{phase.replace(' ', '_')}_ms": ns / 1e6, f"{phase.replace(' ', '_')}_operators_share": operators}
    if parts:
        told = sorted(parts.items(), key=lambda part: -part[1][0])
        text += ": " + ", ".join(f"{phase} {ms(ns)} ({operators:.0%} in operators)" for phase, (ns, operators) in told)
    change = "faster devices, a smaller model, or lower precision: communication and input do not bound this part"
    of_python = [phase for phase, (_, operators) in parts.items() if operators < MOSTLY]
    if of_python:
        change = f"{_listed(of_python)}: Python between operators takes most of it: torch.compile, larger batches"
        if "optimizer" in of_python:
            change += ", fused=True for the optimizer"
    more = measures.more_threads()
    settings = {"OMP_NUM_THREADS": str(more)} if more else {}
    if more:
        change = f"OMP_NUM_THREADS={more}: a rank has so many cores, and computes with fewer threads; else {change}"
    return Cause("compute", "compute", text, change, compute_ns, numbers=numbers, settings=settings)


def _disk_of_checkpoint(measures: Measures, rank: Rank) -> tuple[str, dict[str, float]]:
    """What a rank writes, and whether a disk is busy for as long as that takes, or the rank makes bytes of tensors meanwhile."""
    disk, busy = measures.disks(rank.host)
    stalled = measures.pressure(rank.host, "io") or 0.0
    numbers = {"disk_busy_share": busy, "disk_stall_share": stalled, "written_bytes_per_step": rank.written_bytes}
    if rank.written_bytes <= DISK_BYTES:
        return "", numbers
    text = f"; rank {rank.number} writes {rank.written_bytes / 1e6:.1f} MB a step"
    if max(busy, stalled) >= DISK_OF_LOADING * rank.share.work.get("checkpoint", 0.0) / measures.step_ns:
        return f"{text} to {disk or 'disk'}, busy for {busy:.0%} of the time", numbers
    return f"{text}, and no disk is busy for as long", numbers


def _loader(
    measures: Measures, rank: Rank, text: str, cost_ns: float, gain_ns: float, numbers: Mapping[str, float]
) -> Cause:
    """A batch is late: because of a disk, or of what the dataset does."""
    disk, busy = measures.disks(rank.host)
    stalled = measures.pressure(rank.host, "io") or 0.0
    share = rank.share.work.get("loading", 0.0) / measures.step_ns
    shown = {**numbers, "disk_busy_share": busy, "disk_stall_share": stalled, "disk_bytes_per_step": rank.disk_bytes}
    reads = rank.disk_bytes > DISK_BYTES and max(busy, stalled) >= DISK_OF_LOADING * share
    if reads:
        text += (
            f"; it reads {rank.disk_bytes / 1e6:.1f} MB a step from {disk or 'disk'}, busy for {busy:.0%} of the time"
        )
        change = "DataLoader(num_workers=4, prefetch_factor=4), and data on a faster disk or in memory"
    else:
        text += "; no disk is busy meanwhile: the loader itself is slow or blocked"
        change = "DataLoader(num_workers=4, prefetch_factor=4, persistent_workers=True); what __getitem__ waits for"
    named = (disk or "disk") if reads else ""
    return Cause("loader", "loading", text, change, cost_ns, gain_ns, rank.number, rank.host, numbers=shown, disk=named)


# ------------------------------------------------------------------------------------------------------------- helpers


def _expected_ns(cause: Cause) -> float:
    """What a change is worth trying for. Of an unknown gain half of what the cause explains is expected."""
    return cause.cost_ns / 2 if cause.gain_ns is None else cause.gain_ns


def _joined(first: Cause, second: Cause) -> Cause:
    """What two rules found of one cause: it explains both parts."""
    large, small = sorted((first, second), key=lambda cause: -cause.cost_ns)
    gains = [cause.gain_ns for cause in (first, second) if cause.gain_ns is not None]
    return dataclasses.replace(
        large,
        text=f"{large.text}; {small.text}",
        cost_ns=large.cost_ns + small.cost_ns,
        gain_ns=sum(gains) if gains else None,
        numbers={**small.numbers, **large.numbers},
    )


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


PAUSES = ("checkpoint", "evaluation")
CHANGES = {
    "straggler": "look at that rank's device, its clock and what else it runs, or give it smaller batches",
    "checkpoint": "torch.distributed.checkpoint.async_save, or fewer checkpoints",
    "evaluation": "evaluate less often, or on ranks of their own",
}

QUEUED_OF_EXCESS = 0.4
"""A rank that lost its processor is late by about as long as it queued; some of that is not on its critical path."""
OF_EXCESS = 0.3
"""A guess: a rank that computes for longer needs a processor for most of that."""
DISK_BYTES = 4096
DISK_OF_LOADING = 0.3
