"""What bounds the time in which bytes move: the first rule that holds.

docs/design/profile-causes.md, "Causes", says why each rule and threshold is what it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from penstock.numbers import bit_rate
from penstock.profiling.breakdown import SYNC
from penstock.profiling.cause import LEAST_SHARE, MOSTLY, Cause, free_cores, has_settings, ms
from penstock.profiling.measures import Link, Measures

__all__ = ["REACHED", "streams_to_fill", "wire"]


def wire(measures: Measures) -> Iterator[Cause]:
    """What makes the exposed time in which bytes move as long as it is: the first rule that holds."""
    # Bytes move on all ranks alike. What some stand still for beyond that is a wait, whatever the clocks made of it.
    cost_ns = min(
        measures.median(rank.exposed_wire_ns for rank in measures.ranks),
        min(rank.exposed_wire_ns + rank.exposed_wait_ns for rank in measures.ranks),
    )
    if cost_ns < LEAST_SHARE * measures.unprofiled_ns:
        return
    links = sorted(measures.links, key=lambda link: -(link.share or 0.0))
    rules = (_repeated_sums, _second_job, _full_link, _small_buckets, _retransmissions, _busy_core, _flow_cap, _copies)
    for rule in rules:
        cause = rule(measures, links, cost_ns)
        if cause is not None:
            yield cause
            return
    top = links[0] if links else None
    text = f"{ms(cost_ns)} a step are exposed communication"
    yield Cause(
        "unknown",
        "wire",
        text if top is None else f"{text}, and no counter is at its limit",
        "penstock bench all-reduce on the same hosts tells what the network can do",
        cost_ns,
        numbers={"exposed_wire_ms": cost_ns / 1e6, **({} if top is None else _numbers(top))},
    )


def _repeated_sums(measures: Measures, links: Sequence[Link], cost_ns: float) -> Cause | None:
    """Gradients that are accumulated, and summed in each backward pass for all that."""
    times = measures.summed_alike() if measures.has_ddp else 1
    parts = [rank.share.communication.get(SYNC) for rank in measures.ranks]
    summed_ns = min((part.exposed_ns for part in parts if part is not None), default=0.0)
    if times < 2 or summed_ns < MOSTLY * cost_ns:
        return None
    cost_ns = min(cost_ns, summed_ns)
    text = f"the same gradients are summed in {times} backward passes of a step, which takes {ms(cost_ns)}"
    change = (
        "with model.no_sync(): around all but the last forward and backward pass of a step, where gradients accumulate"
    )
    numbers = {"sums_per_step": float(times), "exposed_ms": cost_ns / 1e6}
    return Cause("repeated sums", "wire", text, change, cost_ns, cost_ns * (1 - 1 / times), numbers=numbers)


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
    is_queued = any(median - least >= QUEUED_US for median, least in known)
    is_full_at_times = link.peak_share >= FULL_AT_TIMES
    if not any(other.resent_share >= LOSSY for other in links):
        return FULL
    if is_queued and is_full_at_times:
        return OVERRUN
    return CONGESTED if is_queued or (is_full_at_times and stretched) else FULL


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
            f"the thread of rank {rank.number} that moves bytes could have run for {ms(rank.communication_queued_ns)} a step "
            "more, and found no free processor"
        )
        numbers = {"queued_ms": rank.communication_queued_ns / 1e6, "wire_ms": measures.wire_ns(rank) / 1e6}
        change, settings = free_cores(measures, rank.host)
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
    change, settings = _more_threads(measures, rank.host)
    gain: float | None = None
    if measures.has_free_cores(rank.host):
        gain = cost_ns * (1 - max([1 / FOUR_THREADS, *(min(1.0, share / FULL) for share in shares)]))
    return Cause(
        "one core", "wire", text, change, cost_ns, gain, rank.number, rank.host, "", numbers, settings=settings
    )


def _more_threads(measures: Measures, host: str) -> tuple[str, dict[str, str]]:
    """More threads that move and add bytes, and as settings, if a host has cores for them; and what else helps."""
    halves = "wire=torch.float16 halves the bytes"
    if not measures.has_free_cores(host):
        return f"{halves}; more threads find no core: the ranks compute on all that the host has", {}
    if not has_settings(measures.backend):
        return f"init_process_group('penstock'), with PENSTOCK_IO_THREADS=4; {halves}", {}
    return f"PENSTOCK_IO_THREADS=4; {halves}", dict(MORE_THREADS)


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
    if measures.backend == "nccl" and count < NCCL_MOST:
        change, settings = " ".join(f"{name}={value}" for name, value in NCCL_SOCKETS.items()), dict(NCCL_SOCKETS)
        change += (
            f": {NCCL_MOST} connections to each peer; or init_process_group('penstock'), which has several, too, and "
        )
        change += "takes tensors of GPUs through the host's memory"
        if gain_ns is not None:
            gain_ns = cost_ns * (1 - max(count / NCCL_MOST, (link.share or 0.0) / REACHED))
    elif not has_settings(measures.backend):
        change = f"init_process_group('penstock') instead of {measures.backend}: it has several streams to each peer"
        settings = {"backend": "penstock"} if measures.backend == "gloo" else {}
        if (
            measures.backend == "nccl"
        ):  # with as many connections as it can have: nothing tells what another backend gains
            gain_ns = None
    return Cause(
        "flow cap", "wire", text, change, cost_ns, gain_ns, None, link.host, link.interface, numbers, settings=settings
    )


def _copies(measures: Measures, links: Sequence[Link], cost_ns: float) -> Cause | None:
    """Nothing of what ranks reduce crosses an interface."""
    moved = max((rank.bytes for rank in measures.ranks), default=0.0)
    crossed = max((link.own_bytes for link in links), default=0.0)
    hosts = {rank.host for rank in measures.ranks}
    is_one_host = len(measures.ranks) > 1 and len(hosts) == 1 and "" not in hosts and crossed <= INSIDE * moved
    if moved <= 0 or not (is_one_host or measures.is_within):
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


def streams_to_fill(streams: int, share: float) -> int:
    """How many streams to a peer fill a link of which so many carry this share."""
    return min(MOST_STREAMS, math.ceil(SPARE * REACHED * streams / share))


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


def _mbit(bytes_per_s: float) -> str:
    return bit_rate(8 * bytes_per_s)


MORE_THREADS = {"PENSTOCK_IO_THREADS": "4"}
NCCL_SOCKETS = {"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4"}
NCCL_MOST = 16
"""What NCCL's guide names for 100 Gbit/s, and the connections that makes; outside some clouds it has one of each."""
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
OVERRUN = 0.25
"""Where both signs of a queue that overflows are there, which no bad cable shows: 0.43 to 0.47 in trainings with four ranks,
whose senders also wait for each other; in two of these it was too little for `CONGESTED`."""
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
