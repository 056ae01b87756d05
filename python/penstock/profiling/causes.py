"""Why a step takes as long as it does: the bound that holds for each part of it, with its numbers, and what to change.

docs/design/profile-causes.md, "Causes", says why each rule and threshold is what it is.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.numbers import bit_rate, milliseconds
from penstock.profiling.breakdown import MEASURING, SYNC, Breakdown
from penstock.profiling.measures import Link, Measures, Rank
from penstock.profiling.record import Record

__all__ = ["KINDS", "REACHED", "Cause", "find", "has_settings", "streams_to_fill"]

KINDS = (
    "straggler",
    "contention",
    "loader",
    "checkpoint",
    "evaluation",
    "second job",
    "link",
    "flow cap",
    "small buckets",
    "retransmissions",
    "one core",
    "memory copies",
    "bubble",
    "jitter",
    "unknown",
    "compute",
)


@dataclass(frozen=True)
class Cause:
    """One reason for the length of a step."""

    kind: str
    """One of `KINDS`."""
    phase: str
    """The part of the step that it makes long: one of `breakdown.PHASES`, ``wire``, ``wait``, or ``compute`` for several."""
    text: str
    """What was found, in a sentence with its numbers."""
    change: str
    """The setting or command to change."""
    cost_ns: float
    """Of the mean step, as much as it explains."""
    gain_ns: float | None = None
    """By how much the step should become shorter with the change; None where what was measured does not tell."""
    rank: int | None = None
    """Whose fault it is, if it is one rank's."""
    host: str = ""
    link: str = ""
    """Of the host: the name of the interface, if it is one's."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """What the rule compared, by name with unit."""
    disk: str = ""
    """Of the host: the disk, if one is busy with what the rank reads."""
    settings: Mapping[str, str | float] = field(default_factory=dict)
    """The change for `penstock profile --apply`, as `predict.Prediction` has it. Empty if it cannot be made without touching the
    script, or by no setting at all."""


def find(records: Sequence[Record], breakdown: Breakdown) -> list[Cause]:
    """The causes that explain `LEAST_SHARE` of the mean step or more, those with the largest gain first, and last of all what the
    ranks compute, which no setting shortens."""
    measures = Measures(records, breakdown)
    if not measures.ranks or measures.unprofiled_ns <= 0:
        return []
    found: dict[tuple[str, int | None, str], Cause] = {}
    for cause in (*_waits(measures), *_wire(measures), *_work(measures)):
        key = cause.kind, cause.rank, cause.host
        found[key] = cause if key not in found else _joined(found[key], cause)
    shown = [cause for cause in found.values() if cause.cost_ns >= LEAST_SHARE * measures.unprofiled_ns]
    return sorted(shown, key=lambda cause: (cause.kind == "compute", -_expected_ns(cause)))


def has_settings(backend: str) -> bool:
    """Whether settings of Penstock do something, by the name of the backend; where that is not known they are taken to."""
    return not backend or "penstock" in backend


def streams_to_fill(streams: int, share: float) -> int:
    """How many streams to a peer fill a link of which so many carry this share."""
    return min(MOST_STREAMS, math.ceil(SPARE * REACHED * streams / share))


# ---------------------------------------------------------------------------------------------------- waiting for a rank


def _waits(measures: Measures) -> Iterator[Cause]:
    """Exposed waits for a rank that comes late, and why it does."""
    late: dict[int, float] = {}
    for rank in measures.ranks:
        for moving in rank.share.without_bubbles:
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
        # stands still for less than they do.
        still = {rank.number: sum(one.exposed_ns for one in rank.share.without_bubbles) for rank in measures.ranks}
        least = min(still, key=lambda rank: still[rank])
        others_ns = measures.median(ns for rank, ns in still.items() if rank != least)
        late[least] = max(late.get(least, 0.0), others_ns - still[least])
    total = sum(late.values())
    yield from _bubble(measures)
    if total <= 0:
        return
    worst = max(late, key=lambda rank: late[rank])
    if late[worst] < MOSTLY * total or not any(rank.number == worst for rank in measures.ranks):
        yield Cause(
            "jitter",
            "wait",
            f"ranks wait {_ms(total)} a step for each other, now for one and now for another",
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
    waiting = f"the other ranks wait {_ms(waited_ns)} a step for rank {number}"
    # Before the phase: a thread without a processor is late in whatever it does most, be it loading.
    if queued >= QUEUED_OF_EXCESS * excess_ns > 0 or queued >= QUEUED_OF_EXCESS * waited_ns:
        text = f"{waiting}, whose training thread could have run for {_ms(queued)} more, and found no free processor"
        gain_ns = min(waited_ns, max(gain_ns, queued))
        change, settings = _free_cores(measures, rank.host)
        return Cause("contention", "wait", text, change, waited_ns, gain_ns, settings=settings, **where)  # type: ignore[arg-type]
    if phase == "loading":
        return _loader(measures, rank, waiting, waited_ns, gain_ns, numbers)
    if phase in ("checkpoint", "evaluation"):
        return Cause(phase, phase, f"{waiting}, for its {phase}", CHANGES[phase], waited_ns, gain_ns, **where)  # type: ignore[arg-type]
    text = f"{waiting}, which spends {_ms(more.get(phase, 0.0))} more in {phase} than they do"
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
        f"pipeline stages wait {_ms(cost_ns)} a step for their first and last micro-batches, {share:.0%} of it",
        "an interleaved schedule with two stages a rank, or more micro-batches a step",
        cost_ns,
        cost_ns / 2,  # p ranks with v stages each stand still for (p - 1) / v passes
        numbers={"bubble_ms": cost_ns / 1e6, "share_of_step": share},
    )


# ------------------------------------------------------------------------------------------------------ bytes on the wire


def _wire(measures: Measures) -> Iterator[Cause]:
    """What makes the exposed time in which bytes move as long as it is: the first rule that holds."""
    # Bytes move on all ranks alike. What some stand still for beyond that is a wait, whatever the clocks made of it.
    cost_ns = min(
        measures.median(rank.exposed_wire_ns for rank in measures.ranks),
        min(rank.exposed_wire_ns + rank.exposed_wait_ns for rank in measures.ranks),
    )
    if cost_ns < LEAST_SHARE * measures.unprofiled_ns:
        return
    links = sorted(measures.links, key=lambda link: -(link.share or 0.0))
    rules = (_second_job, _full_link, _small_buckets, _retransmissions, _busy_core, _flow_cap, _copies)
    for rule in rules:
        cause = rule(measures, links, cost_ns)
        if cause is not None:
            yield cause
            return
    top = links[0] if links else None
    yield Cause(
        "unknown",
        "wire",
        f"{_ms(cost_ns)} a step are exposed communication, and no counter is at its limit",
        "penstock bench all-reduce on the same hosts tells what the network can do",
        cost_ns,
        numbers={"exposed_wire_ms": cost_ns / 1e6, **({} if top is None else _numbers(top))},
    )


def _second_job(measures: Measures, links: Sequence[Link], cost_ns: float) -> Cause | None:
    if not links:
        return None
    link = max(links, key=lambda each: each.foreign_bytes_per_s)
    if link.limit is None or link.share is None:
        return None
    foreign = link.foreign_bytes_per_s / link.limit.bytes_per_s
    if foreign < (FOREIGN if link.limit.is_known else FOREIGN_OF_HIGHEST):
        return None
    if link.limit.is_known and link.share < NEARLY_FULL:
        return None
    text = (
        f"{_mbit(link.foreign_bytes_per_s)} on {link.interface} of {link.host} are not the ranks', "
        f"{foreign:.0%} of {_limit(link)}"
    )
    change = "move or slow the other job"
    if has_settings(measures.backend):
        change += ", or PENSTOCK_INTERFACE=another interface; "
        change += "`background` in a cluster file makes penstock plan go around it"
    numbers = {**_numbers(link), "foreign_share_of_limit": foreign}
    gain_ns = cost_ns * min(1.0, foreign / max(link.share, foreign))
    return Cause("second job", "wire", text, change, cost_ns, gain_ns, None, link.host, link.interface, numbers)


def _full_link(measures: Measures, links: Sequence[Link], cost_ns: float) -> Cause | None:
    # Without a known limit the highest rate that was seen may be one flow's cap, so there must be several flows.
    full = [
        link
        for link in links
        if link.limit is not None
        and (link.share or 0.0) >= (_full_from(link, links) if link.limit.is_known else PLATEAU)
        and (link.limit.is_known or len(link.streams) > 1)
    ]
    if not full:
        return None
    link = full[0]
    text = (
        f"{link.interface} of {link.host} is full: {_mbit(link.on_wire_bytes_per_s)} while there is something to send, "
        f"{min(1.0, link.share or 0.0):.0%} of {_limit(link)}"
    )
    if link.limit is not None and link.limit.is_known and (link.share or 0.0) < FULL:
        resent = max(other.resent_share for other in links)
        text += f"; the queue before it overflows: {resent:.0%} of what a host sends is sent again, and senders wait"
    change = "half the bytes: model.register_comm_hook(None, fp16_compress_hook) of DDP"
    if has_settings(measures.backend):
        change = "half the bytes: penstock.torch.ddp_hook(model, wire=torch.float16), or "
        change += "GradientReducer(model, wire=torch.float16)"
        if any(sum(rank.host == other.host for rank in measures.ranks) > 1 for other in links) and len(links) > 1:
            change += "; PENSTOCK_ALGORITHM=hierarchical sends once a host"
        change += "; penstock plan says what servers and aggregators (PENSTOCK_DEPLOYMENT) would bring"
    return Cause("link", "wire", text, change, cost_ns, cost_ns / 2, None, link.host, link.interface, _numbers(link))


def _full_from(link: Link, links: Sequence[Link]) -> float:
    """From which share on a link counts as full. Where the queue before it overflows, senders wait at times, and it empties. Then
    packets wait in it, which they do not where they are lost on their way."""
    known = [_round_trips(other) for other in links]
    stretched = any(median >= QUEUES * least > 0 for median, least in known)
    queued_us = max((median - least for median, least in known), default=0.0)
    is_overrun = queued_us >= QUEUED_US or (link.peak_share >= FULL_AT_TIMES and stretched)
    return CONGESTED if is_overrun and any(other.resent_share >= LOSSY for other in links) else FULL


def _round_trips(link: Link) -> tuple[float, float]:
    """Of the median stream, and the shortest of that, in us; zeros if none is known."""
    known = sorted((stream.rtt_us, stream.least_rtt_us) for stream in link.streams if stream.least_rtt_us > 0)
    return known[len(known) // 2] if known else (0.0, 0.0)


def _small_buckets(measures: Measures, links: Sequence[Link], cost_ns: float) -> Cause | None:
    rank = max(measures.ranks, key=measures.wire_ns)
    gradients = rank.share.communication.get(SYNC)
    # Only sums of gradients have buckets.
    if not measures.has_ddp or gradients is None or gradients.operations < MANY_OPERATIONS:
        return None
    part = (gradients.exposed_wire_ns + gradients.hidden_wire_ns) / max(1.0, rank.wire_ns)
    each_ns, each_bytes = part * measures.wire_ns(rank) / gradients.operations, gradients.bytes / gradients.operations
    most = max((link.limit.bytes_per_s for link in links if link.limit is not None), default=math.inf)
    moving_ns = each_bytes / most * 1e9
    if each_bytes > SMALL_BYTES or each_ns > SMALL_NS or moving_ns > each_ns / 2:
        return None
    text = (
        f"{gradients.operations:.0f} operations a step of {each_bytes / 1024:.0f} KiB take {each_ns / 1e6:.2f} ms each, "
        f"of which moving the bytes would take {moving_ns / 1e6:.2f}"
    )
    change = "larger buckets: DistributedDataParallel(model, bucket_cap_mb=25)"
    if has_settings(measures.backend):
        change += ", or penstock.torch.GradientReducer(model, bucket_bytes=4 << 20)"
    numbers = {
        "operations_per_step": gradients.operations,
        "bytes_per_operation": each_bytes,
        "ms_per_operation": each_ns / 1e6,
        "moving_ms_per_operation": moving_ns / 1e6,
    }
    return Cause("small buckets", "wire", text, change, cost_ns, cost_ns * (1 - moving_ns / each_ns), numbers=numbers)


def _retransmissions(measures: Measures, links: Sequence[Link], cost_ns: float) -> Cause | None:
    lossy = [link for link in links if link.resent_share >= LOSSY]
    if not lossy:
        return None
    worst = max(lossy, key=lambda link: (measures.resent.get(link.host, 0.0), link.resent_share))
    text = (
        f"{worst.resent_share:.1%} of what {worst.host} sends over {worst.interface} is sent again, while the link is at "
        f"{worst.share or 0:.0%} of {_limit(worst)}"
    )
    change = (
        f"find the loss: ethtool -S {worst.interface} on {worst.host} and the switch's port; "
        "sysctl -w net.ipv4.tcp_congestion_control=bbr takes less harm from it"
    )
    gain_ns = None
    if worst.limit is not None and worst.limit.is_known:
        gain_ns = cost_ns * (1 - min(1.0, (1 - worst.resent_share) * (worst.share or 0.0) / REACHED))
    return Cause(
        "retransmissions", "wire", text, change, cost_ns, gain_ns, None, worst.host, worst.interface, _numbers(worst)
    )


def _busy_core(measures: Measures, links: Sequence[Link], cost_ns: float) -> Cause | None:
    """The thread that moves the bytes has no processor, or uses all of one."""
    rank = max(measures.ranks, key=lambda each: each.communication_queued_ns / max(1.0, measures.wire_ns(each)))
    queued = rank.communication_queued_ns / max(1.0, measures.wire_ns(rank))
    if queued >= QUEUED_OF_WIRE:
        text = (
            f"the thread of rank {rank.number} that moves bytes could have run for {_ms(rank.communication_queued_ns)} a step "
            "more, and found no free processor"
        )
        numbers = {"queued_ms": rank.communication_queued_ns / 1e6, "wire_ms": measures.wire_ns(rank) / 1e6}
        change, settings = _free_cores(measures, rank.host)
        # What the thread runs for itself stays.
        gain_ns = cost_ns * max(0.0, min(queued, 1 - rank.communication_cpu_ns / max(1.0, measures.wire_ns(rank))))
        whose = rank.number, rank.host
        part_ns = cost_ns * min(1.0, queued)
        return Cause("contention", "wire", text, change, part_ns, gain_ns, *whose, "", numbers, settings=settings)
    rank = max(measures.ranks, key=lambda each: each.communication_cpu_ns / max(1.0, measures.wire_ns(each)))
    busy = rank.communication_cpu_ns / max(1.0, measures.wire_ns(rank))
    if busy < BUSY_CORE:
        return None
    text = f"the thread of rank {rank.number} that moves and adds bytes is busy for {busy:.0%} of the time on the wire"
    numbers = {"thread_ms": rank.communication_cpu_ns / 1e6, "wire_ms": measures.wire_ns(rank) / 1e6}
    shares = [link.share for link in links if link.share is not None and link.limit is not None and link.limit.is_known]
    gain_ns = cost_ns * (1 - max([1 / FOUR_THREADS, *(min(1.0, share / FULL) for share in shares)]))
    change, settings = _more_threads(measures, rank.host)
    return Cause(
        "one core", "wire", text, change, cost_ns, gain_ns, rank.number, rank.host, "", numbers, settings=settings
    )


def _more_threads(measures: Measures, host: str) -> tuple[str, dict[str, str]]:
    """More threads that move and add bytes, and as settings, if a host has cores for them; and what else helps."""
    has_cores = measures.has_free_cores(host)
    change = "PENSTOCK_IO_THREADS=4" if has_cores else "more cores: ranks compute on all that the host has"
    change += "; wire=torch.float16 halves the bytes"
    if not has_settings(measures.backend):
        return f"init_process_group('penstock'), with {change}", {}
    return change, dict(MORE_THREADS) if has_cores else {}


def _flow_cap(measures: Measures, links: Sequence[Link], cost_ns: float) -> Cause | None:
    found = None
    for link in links:
        wire_share = link.wire_ns / measures.step_ns if measures.step_ns else 0.0
        if not link.streams or wire_share <= 0:
            continue
        busy = measures.median(stream.busy_share for stream in link.streams) / wire_share
        if busy >= STREAM_BUSY and (found is None or busy > found[1]):
            found = link, busy
    if found is None:
        return None
    link, busy = found
    count = _streams_to_a_peer(link)
    rates = [stream.bytes_per_s / max(1e-9, stream.busy_share) for stream in link.streams]
    window = measures.median(stream.window_share for stream in link.streams)
    what = "its one stream has" if len(link.streams) == 1 else f"each of its {len(link.streams)} streams has"
    why = " (mostly for the other side's window)" if window > MOSTLY else ""
    text = (
        f"{link.interface} of {link.host} is at {link.share or 0:.0%} of {_limit(link)}, though {what} something to send "
        f"for {min(1.0, busy):.0%} of the time on the wire{why}: a flow gets {_mbit(measures.median(rates))}"
    )
    numbers = {
        **_numbers(link),
        "streams_to_a_peer": count,
        "stream_busy_share": busy,
        "stream_bytes_per_s": measures.median(rates),
        "stream_spread": (max(rates) - min(rates)) / max(rates),
        "window_share": window,
    }
    if not 0 < (link.share or 0.0) < FULL or count >= MOST_STREAMS:
        wanted, gain_ns = 16, None
        change = "more streams to each peer: PENSTOCK_STREAMS=16, if that is not set already"
    else:
        wanted = streams_to_fill(count, link.share or REACHED)
        change = f"PENSTOCK_STREAMS={wanted}"
        is_known = link.limit is not None and link.limit.is_known
        gain_ns = cost_ns * (1 - max(count / wanted, (link.share or 0.0) / REACHED)) if is_known else None
    settings = {"PENSTOCK_STREAMS": str(wanted)} if wanted > count else {}
    if not has_settings(measures.backend):
        change = f"init_process_group('penstock') instead of {measures.backend}: it has several streams to each peer"
        settings = {"backend": "penstock"} if measures.backend == "gloo" else {}
    return Cause(
        "flow cap", "wire", text, change, cost_ns, gain_ns, None, link.host, link.interface, numbers, settings=settings
    )


def _copies(measures: Measures, links: Sequence[Link], cost_ns: float) -> Cause | None:
    """Ranks of one host: nothing of what they reduce crosses an interface."""
    moved = max((rank.bytes for rank in measures.ranks), default=0.0)
    crossed = max((link.own_bytes for link in links), default=0.0)
    hosts = {rank.host for rank in measures.ranks}
    if moved <= 0 or crossed > INSIDE * moved or len(measures.ranks) < 2 or len(hosts) > 1 or "" in hosts:
        return None
    rank = max(measures.ranks, key=measures.wire_ns)
    wire_ns = measures.wire_ns(rank)
    rate = rank.bytes / wire_ns * 1e9 if wire_ns > 0 else 0.0
    numbers = {"bytes_per_step": moved, "bytes_per_s": rate, "loopback_bytes_per_step": measures.loopback_bytes}
    if measures.memory_read_bytes > 0:
        numbers["read_from_memory_bytes_per_step"] = measures.memory_read_bytes
    if measures.loopback_bytes > INSIDE * moved:
        text = f"ranks of one host reduce {_mbit(rate)} through TCP on the loopback, which copies every byte twice"
        change = "the penstock backend with PENSTOCK_SHM=1, its default: ranks read each other's memory"
        settings = {"backend": "penstock"} if measures.backend == "gloo" else {}
    else:
        text = f"ranks of one host reduce {_mbit(rate)}, which only memory and processors limit"
        change, settings = _more_threads(measures, rank.host)
    return Cause("memory copies", "wire", text, change, cost_ns, host=rank.host, numbers=numbers, settings=settings)


# ------------------------------------------------------------------------------------------------- what the ranks do


def _work(measures: Measures) -> Iterator[Cause]:
    """Phases that all ranks spend their time in."""
    # What all spend: if one spends more, the others wait for it, and `_waits` has it.
    loading = min(rank.share.work.get("loading", 0.0) for rank in measures.ranks)
    if loading > 0:
        slowest = max(measures.ranks, key=lambda rank: rank.share.work.get("loading", 0.0))
        numbers = {"loading_ms": loading / 1e6}
        cause = _loader(
            measures, slowest, f"each rank waits {_ms(loading)} a step for its batch", loading, loading, numbers
        )
        yield dataclasses.replace(cause, rank=None)
    for phase in ("checkpoint", "evaluation"):
        spent = min(rank.share.work.get(phase, 0.0) for rank in measures.ranks)
        yield Cause(phase, phase, f"{_ms(spent)} a step go to {phase}, in the mean", CHANGES[phase], spent)
    usual = _queued(measures)
    text = f"the training thread of each rank could have run for {_ms(usual)} a step more, and found no free processor"
    change, settings = _free_cores(measures)
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
    text = f"the ranks compute for {_ms(compute_ns)} a step, {share:.0%} of it"
    numbers = {"compute_ms": compute_ns / 1e6, "share_of_step": share}
    parts = {
        phase: part for phase, part in measures.computing().items() if part[0] >= LEAST_SHARE * measures.unprofiled_ns
    }
    for phase, (ns, operators) in parts.items():
        numbers |= {f"{phase.replace(' ', '_')}_ms": ns / 1e6, f"{phase.replace(' ', '_')}_operators_share": operators}
    if parts:
        told = sorted(parts.items(), key=lambda part: -part[1][0])
        text += ": " + ", ".join(f"{phase} {_ms(ns)} ({operators:.0%} in operators)" for phase, (ns, operators) in told)
    change = "faster devices, a smaller model, or lower precision: communication and input do not bound this part"
    of_python = [phase for phase, (_, operators) in parts.items() if operators < MOSTLY]
    if of_python:
        change = f"{_listed(of_python)}: Python between operators takes most of it: torch.compile, larger batches"
        change += ", fused=True for the optimizer" * ("optimizer" in of_python)
    more = measures.more_threads()
    settings = {"OMP_NUM_THREADS": str(more)} if more else {}
    if more:
        change = f"OMP_NUM_THREADS={more}: a rank has so many cores, and computes with fewer threads; else {change}"
    return Cause("compute", "compute", text, change, compute_ns, numbers=numbers, settings=settings)


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


def _free_cores(measures: Measures, host: str = "") -> tuple[str, dict[str, str]]:
    """What to change where threads find no free processor on a host or, without one, on any; and as settings, where ranks
    compute with more threads than there are cores for."""
    fewer = measures.fewer_threads(host)
    if not fewer:
        return "stop what runs beside it, or give it cores of its own (taskset -c)", {}
    change = f"OMP_NUM_THREADS={fewer}: the ranks of a host compute with more threads than it has cores; "
    return change + "or stop what runs beside them", {"OMP_NUM_THREADS": str(fewer)}


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _streams_to_a_peer(link: Link) -> int:
    """How many streams lead to the other end that has the most."""
    theirs = [stream.there for stream in link.streams]
    return max(theirs.count(there) for there in set(theirs))


def _numbers(link: Link) -> dict[str, float]:
    found = {
        "own_bytes_per_step": link.own_bytes,
        "on_wire_bytes_per_s": link.on_wire_bytes_per_s,
        "foreign_bytes_per_s": link.foreign_bytes_per_s,
        "resent_share": link.resent_share,
    }
    if link.limit is not None:
        found["limit_bytes_per_s"] = link.limit.bytes_per_s
        found["share_of_limit"] = link.share or 0.0
    return found


def _limit(link: Link) -> str:
    if link.limit is None:
        return "an unknown limit"
    what = {"speed": "its", "shaper": "its shaper's", "given": "the given"}.get(link.limit.source, "the highest seen,")
    return f"{what} {_mbit(link.limit.bytes_per_s)}"


def _ms(ns: float) -> str:
    return milliseconds(ns / 1e9)


def _mbit(bytes_per_s: float) -> str:
    return bit_rate(8 * bytes_per_s)


CHANGES = {
    "straggler": "look at that rank's device, its clock and what else it runs, or give it smaller batches",
    "checkpoint": "torch.distributed.checkpoint.async_save, or fewer checkpoints",
    "evaluation": "evaluate less often, or on ranks of their own",
}

MORE_THREADS = {"PENSTOCK_IO_THREADS": "4"}
LEAST_SHARE = 0.03
"""Of the step: what explains less is in the noise of a run, whose steps differ by some percent."""
MOSTLY = 0.5
QUEUED_OF_EXCESS = 0.4
"""A rank that lost its processor is late by about as long as it queued; some of that is not on its critical path."""
OF_EXCESS = 0.3
"""A guess: a rank that computes for longer needs a processor for most of that."""
QUEUED_OF_WIRE = 0.3
FOREIGN = 0.1
"""Of a link's limit: headers, acknowledgements and connections that were not seen are some percent."""
FOREIGN_OF_HIGHEST = 0.3
"""Of the highest rate that was seen, which may be far below what the link can carry."""
NEARLY_FULL = 0.6
FULL = 0.75
"""A collective does not fill a link at its start, at its end and between its hops; large all-reduces of Penstock reach 0.94."""
REACHED = 0.95
"""Of a link's payload: what penstock's large all-reduces carry where no flow's cap holds (docs/benchmarks)."""
SPARE = 1.5
"""Times the flows that would fill a link if all were busy all the time: just those reach 85 to 95 % of it."""
CONGESTED = 0.4
FULL_AT_TIMES = 0.8
"""Of the limit, in the fullest readings: 0.96 where a capped link's queue overflowed, 0.65 where a link lost 2 to 5 %. Short
steps do not show it."""
QUEUES = 4.0
"""Times the shortest round trip. Losses of a bad cable come without a queue."""
QUEUED_US = 20_000
"""A round trip is longer by as much only in a queue. Where processors are few, acknowledgements are late by up to 10 ms."""
PLATEAU = 0.8
MANY_OPERATIONS = 8
SMALL_BYTES = 256 << 10
SMALL_NS = 5e6
"""Longer than a few round trips and wake-ups: latency does not explain it."""
LOSSY = 0.005
"""With this much a flow of 1448-byte segments and 1 ms gets 200 Mbit/s (Mathis et al. 1997: 1.22 segments / (rtt sqrt(loss)))."""
BUSY_CORE = 0.85
FOUR_THREADS = 3.6
"""docs/benchmarks/README.md: as much faster were four threads on 16 cores."""
STREAM_BUSY = 0.6
MOST_STREAMS = 64
"""That PENSTOCK_STREAMS takes."""
INSIDE = 0.1
"""Of the bytes of the operations: what crosses an interface beside, such as the store's messages."""
DISK_BYTES = 4096
DISK_OF_LOADING = 0.3
