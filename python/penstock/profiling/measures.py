"""What the rules of `causes.py` and `bounds.py` compare: a rank's mean step beside what its host's counters did meanwhile."""

from __future__ import annotations

import copy
import ipaddress
import math
import re
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.addresses import split
from penstock.profiling.breakdown import MEASURING, SYNC, Breakdown, Share
from penstock.profiling.intervals import overlaps, union, without
from penstock.profiling.matching import by_rank, canonical, meetings
from penstock.profiling.phases import backward_passes, marked_waits, pass_at, phases
from penstock.profiling.record import Interval, Record
from penstock.profiling.streams import ends
from penstock.profiling.utilisation import MEMORY_READ, Host, Limit, hosts, steady

__all__ = ["Link", "Measures", "Rank", "Stream"]


@dataclass(frozen=True)
class Rank:
    """A rank's mean step. Times in ns per step, bytes per step."""

    share: Share
    host: str
    """Empty if no record says which."""
    wire_ns: float
    """Exposed and hidden."""
    exposed_wire_ns: float
    exposed_wait_ns: float
    """Without that of pipelines, which waits by its schedule."""
    operations: float
    bytes: float
    training_queued_ns: float | None
    """How long the training thread could have run, and no processor was free; None if nobody counted it."""
    training_cpu_ns: float
    """How long it ran, as far as that was counted."""
    communication_queued_ns: float
    """The same of the busiest thread that communicates, without as much as may have been while the training thread worked: then
    what it has to do can mostly wait."""
    communication_cpu_ns: float
    """Its time on a processor."""
    disk_bytes: float
    """Read from a disk, by the rank and the processes that it has started."""
    written_bytes: float
    """Written to a disk, by the same, at once or later."""

    @property
    def number(self) -> int:
        return self.share.rank

    @property
    def compute_ns(self) -> float:
        return sum(value for phase, value in self.share.work.items() if phase not in NOT_COMPUTE)


@dataclass(frozen=True)
class Stream:
    """A TCP connection of a rank, over the whole record."""

    bytes_per_s: float
    busy_share: float
    """Of the record's time: the kernel had something of it to send, or to be acknowledged."""
    window_share: float
    """Of its busy time: the other side took no more, or the process's own buffer was too small."""
    rtt_us: float
    """The median reading."""
    least_rtt_us: float
    there: str
    """The host at its other end, if that is known."""


@dataclass(frozen=True)
class Link:
    """The interface of a host that carries the ranks' connections, or else the busiest, in its busier direction."""

    host: str
    interface: str
    direction: str
    """``tx`` or ``rx``."""
    limit: Limit | None
    wire_ns: float
    """Per step, of its rank with the most (`Measures.wire_ns`)."""
    own_bytes: float
    """What the ranks' connections carried, with headers, per step."""
    on_wire_bytes_per_s: float
    """Own bytes, over the time in which the ranks had something on the wire."""
    foreign_bytes_per_s: float
    """All the time: what the interface carried beyond that."""
    resent_share: float
    """Of the bytes that the ranks sent."""
    peak_share: float
    """Of the limit, in the fullest twentieth of the readings (of few, in the fullest), by all that the interface carried."""
    streams: tuple[Stream, ...]
    """Those that carry at least a tenth of what the busiest one does."""

    @property
    def share(self) -> float | None:
        """Of the limit, while there is something of the ranks on the wire; None if there is nothing to compare with."""
        if self.limit is None or self.wire_ns <= 0:
            return None
        return (self.on_wire_bytes_per_s + self.foreign_bytes_per_s) / self.limit.bytes_per_s


class Measures:
    """Of a whole job."""

    def __init__(self, records: Sequence[Record], breakdown: Breakdown) -> None:
        self._records = {record.header.rank: record for record in records if not record.is_of_host and record.steps}
        self._hosts = {host.name: host for host in hosts(records)}
        self._places = _places(self._hosts.values())
        purposes = {purpose for share in breakdown.shares for purpose in share.communication}
        self._within = self._of_hosts() & purposes
        """Purposes whose operations all stay within hosts."""
        self._beyond = purposes - self._within
        self.is_within = False
        """Nothing that counts here leaves a host."""
        self.ranks = [self._rank(share, purposes) for share in breakdown.shares]
        backends = {str(record.header.about.get("backend", "")) for record in self._records.values()}
        self.clocks_unsure_ns = max((wrong for _, wrong in breakdown.offsets_ns.values()), default=0.0)
        """By how much a wait may have been taken for wire, of each operation between hosts."""
        self.backend = backends.pop() if len(backends) == 1 else ""
        """As given to ``init_process_group``; nothing if no record says, or several differ."""
        self.has_ddp = all(record.has_ddp for record in self._records.values())
        self.step_ns = self.median(rank.share.step_ns for rank in self.ranks)
        """What counters count in, whatever the ranks do meanwhile."""
        self.unprofiled_ns = self.median(rank.share.unprofiled_ns for rank in self.ranks)
        """What causes explain a part of."""
        self.links = self._links()
        self.loopback_bytes = self._loopback()
        """That the ranks send to each other within a host, through TCP; per step and rank."""
        self.memory_read_bytes = self._memory_read()
        """That a rank reads from the memory of others on its host, per step, mean of the host whose ranks read most."""
        self.resent = self._resent()
        """By host, how often its connections sent something again, and other hosts' to it."""

    def by_reach(self) -> list[Measures]:
        """The same job, once for what goes from host to host and once for what stays within hosts, since each has a bound of its
        own: of communication, and of the time that links have for it, only that counts. One, where all is of one kind, or
        unknown."""
        if not self._within or not self._beyond:
            return [self]
        beyond, within = copy.copy(self), copy.copy(self)
        beyond.ranks = [self._rank(rank.share, self._beyond) for rank in self.ranks]
        beyond.links = beyond._links()
        within.ranks = [self._rank(rank.share, self._within) for rank in self.ranks]
        within.links, within.is_within = [], True
        return [beyond, within]

    def _of_hosts(self) -> set[str]:
        """Purposes of which no sampled operation has ranks of two hosts."""
        records, _ = by_rank(list(self._records.values()))
        of = {record.header.rank: record.header.host for record in records}
        if len(set(of.values())) < 2 or "" in of.values():
            return set()
        within: set[str] = set()
        beyond: set[str] = set()
        for meeting in meetings(records):
            is_within = meeting.is_whole and len({of[rank] for rank, _ in meeting.parts}) == 1
            (within if is_within else beyond).update(one.purpose for _, one in meeting.parts)
        return within - beyond

    def median(self, values: Iterable[float]) -> float:
        return statistics.median(found) if (found := list(values)) else 0.0

    def pressure(self, host: str, what: str) -> float | None:
        """The share of time in which something on a host waited for ``cpu`` or ``io``; None if the kernel does not say."""
        found = self._hosts.get(host)
        name = f"pressure.{what}_s"
        if found is None or name not in found.counters:
            return None
        return self._rate(found, name, self._window(host))

    def fewer_threads(self, host: str = "") -> int:
        """With how many threads each rank of a host would compute if its cores were shared out; 0 where they have no more than
        that. Without a host: of the one with the least cores for a rank."""
        known = [each for name in self._named(host) if (each := self._threads(name)) is not None]
        return min((fair for most, fair, _ in known if most > fair), default=0)

    def more_threads(self) -> int:
        """With how many threads each rank could compute if its host's cores were shared out; 0 where that is no more than twice
        what ranks have (two of the system's cores may be one of the processor's), unknown of a host, or ranks use GPUs."""
        known = [self._threads(name) for name in self._named()]
        fair = min((each[1] for each in known if each is not None), default=0)
        is_of_cpu = all(record.header.about.get("device") != "cuda" for record in self._records.values())
        return fair if is_of_cpu and all(each is not None and 2 * each[0] < fair for each in known) else 0

    def has_free_cores(self, host: str) -> bool:
        """Whether a host has cores that ranks do not compute on, as far as that is known."""
        known = self._threads(host)
        return known is None or known[2] > 0

    def _named(self, host: str = "") -> set[str]:
        return {host} if host else {rank.host for rank in self.ranks}

    def _threads(self, host: str) -> tuple[int, int, int] | None:
        """With how many threads the ranks of a host compute at most, how many each would have if its cores were shared out, and
        how many cores there are beside all those threads; None where that is unknown."""
        about = [self._records[rank.number].header.about for rank in self.ranks if rank.host == host != ""]
        threads, cores = (
            [each[key] for each in about if isinstance(each.get(key), int)] for key in ("threads", "cores")
        )
        if not cores or len(threads) != len(about):
            return None
        return max(threads), max(1, min(cores) // len(about)), min(cores) - sum(threads)

    def computing(self) -> dict[str, tuple[float, float]]:
        """By phase: what the median rank computes in it, in ns a step, and in which part of that its thread was in torch's
        operators, in sampled steps. The rest is Python between them. Empty without samples, and on GPUs, which compute beside
        the thread."""
        spent: dict[str, float] = {}
        ran: dict[str, float] = {}
        for record in self._records.values():
            steps = {step.number: step for step in record.steps}
            for sample in record.samples:
                if sample.device is not None or not sample.busy or sample.step not in steps:
                    continue
                step = steps[sample.step]
                busy = [(start, end, None) for start, end in sample.busy]
                moving = union((one.issued_ns, one.ended_ns, None) for one in sample.operations)
                # A backward pass may stand still for what moves, without a mark.
                timeline = without(without(phases(step), marked_waits(step)), without(moving, busy))
                for start, end, phase in timeline:
                    spent[phase] = spent.get(phase, 0.0) + end - start
                for start, end, phase, _ in overlaps(timeline, busy):
                    ran[phase] = ran.get(phase, 0.0) + end - start
        return {
            phase: (self.median(rank.share.work.get(phase, 0.0) for rank in self.ranks), ran.get(phase, 0.0) / ns)
            for phase, ns in spent.items()
            if phase not in NOT_COMPUTE and ns > 0
        }

    def summed_alike(self) -> int:
        """In how many backward passes of a sampled step the same gradients are summed by all_reduce, as far as sizes tell; 1 if
        in one, or if sizes differ from pass to pass, as those of several models, or are unknown."""
        found = []
        for record in self._records.values():
            steps = {step.number: step for step in record.steps}
            for sample in record.samples:
                passes = backward_passes(steps[sample.step]) if sample.step in steps else []
                sums: dict[int, list[int]] = {}
                for one in sample.operations:
                    at = pass_at(passes, one.issued_ns)
                    if at >= 0 and one.purpose == SYNC and canonical(one.name) == "all_reduce":
                        sums.setdefault(at, []).append(one.bytes)
                sizes = {tuple(sorted(each)) for each in sums.values()}
                found.append(len(sums) if len(sizes) == 1 and all(map(all, sizes)) else 1)
        return min(found, default=1)

    def disks(self, host: str) -> tuple[str, float]:
        """The busiest disk of a host, and the share of time in which it was busy."""
        found = self._hosts.get(host)
        if found is None:
            return "", 0.0
        names = [name for name in found.counters if name.startswith("disk.") and name.endswith(".busy_s")]
        busy = [(self._rate(found, name, self._window(host)), name[len("disk.") : -len(".busy_s")]) for name in names]
        share, name = max(busy, default=(0.0, ""))
        return name, share

    def _rank(self, share: Share, purposes: Collection[str]) -> Rank:
        record = self._records.get(share.rank)
        host = self._hosts.get(record.header.host) if record is not None else None
        all_ns = sum(one.exposed_wire_ns + one.hidden_wire_ns for one in share.communication.values())
        counts = {purpose: moving for purpose, moving in share.communication.items() if purpose in purposes}
        without_bubbles = share.without_bubbles
        share, moving = replace(share, communication=counts), counts.values()
        wire_ns = sum(one.exposed_wire_ns + one.hidden_wire_ns for one in moving)
        # A thread moves bytes of all purposes: of these as much as they take of the time on the wire.
        part = wire_ns / all_ns if all_ns > 0 else 1.0
        queued: float | None = None
        ran = 0.0
        communication = (0.0, 0.0)
        read = written = 0.0
        if record is not None and host is not None:
            window, prefix = steady(record), f"pid.{record.header.pid}."
            per_step = share.step_ns / 1e9

            def rate(name: str) -> float:
                return self._rate(host, name, window) * per_step

            threads = [name for name in host.counters if name.startswith(f"{prefix}thread.")]
            for name in threads:
                number, _, thread = name.removeprefix(f"{prefix}thread.").partition(".")
                if number == str(record.header.pid) and name.endswith(".queued_s"):
                    queued, ran = rate(name) * 1e9, rate(name.replace(".queued_s", ".cpu_s")) * 1e9
                elif name.endswith(".cpu_s") and _COMMUNICATES.search(thread):
                    times = rate(name) * 1e9, rate(name.replace(".cpu_s", ".queued_s")) * 1e9
                    communication = max(communication, times)
            if queued is None and f"{prefix}queued_s" in host.counters:
                queued, ran = rate(f"{prefix}queued_s") * 1e9, rate(f"{prefix}cpu_s") * 1e9
            read, written = (
                rate(f"{prefix}disk_{name}_bytes") + rate(f"{prefix}workers.disk_{name}_bytes")
                for name in ("read", "written")
            )
        return Rank(
            share,
            record.header.host if record is not None else "",
            wire_ns=wire_ns,
            exposed_wire_ns=sum(one.exposed_wire_ns for one in moving),
            exposed_wait_ns=sum(one.exposed_wait_ns for name, one in without_bubbles.items() if name in counts),
            operations=sum(one.operations for one in moving),
            bytes=sum(one.bytes for one in moving),
            training_queued_ns=queued,
            training_cpu_ns=ran,
            communication_queued_ns=part * max(0.0, communication[1] - sum(share.work.values())),
            communication_cpu_ns=part * communication[0],
            disk_bytes=read,
            written_bytes=written,
        )

    def _links(self) -> list[Link]:
        return [link for host in self._hosts.values() if (link := self._link(host)) is not None]

    def _link(self, host: Host) -> Link | None:
        ranks = [rank for rank in self.ranks if rank.host == host.name]
        interfaces = host.interfaces()
        if not ranks or not interfaces:
            return None
        # Of a bridge and what is behind it both carry the same; the ranks' connections are at one.
        used = {
            name: host.counters[f"streams.{name}.tx_bytes"].totals[-1]
            for name in interfaces
            if _has_streams(host, name)
        }
        interface = max(used, key=lambda name: used[name]) if used else interfaces[0]
        # Bytes of the interface are compared with those of connections, so both of the same time.
        window = _covered(host, [f"nic.{interface}.tx_bytes", f"streams.{interface}.tx_bytes"], self._window(host.name))
        window = _until_closed(host, interface, window)
        step_s, wire_ns = self.step_ns / 1e9, max(self.wire_ns(rank) for rank in ranks)
        mtu = host.last.get(f"nic.{interface}.mtu_bytes", 1500.0)
        streams = self._streams(host, interface, window)
        found = []
        for direction in ("tx", "rx"):
            carried = self._rate(host, f"nic.{interface}.{direction}_bytes", window)
            # What the ranks' datagrams carried is not counted for each: at most that, and then it is nobody else's.
            datagrams = self._rate(host, f"udp.{direction}_packets", window) * mtu
            own = carried
            if streams:
                payload = self._rate(host, f"streams.{interface}.{direction}_bytes", window)
                own = min(carried, payload * (1 + _HEADER_BYTES / max(1.0, mtu - _HEADER_BYTES)) + datagrams)
            foreign = carried - own
            limit = host.limit(interface, direction)
            on_wire = own * step_s / (wire_ns / 1e9) if wire_ns > 0 else 0.0
            sent = self._rate(host, f"streams.{interface}.tx_bytes", window)
            resent = self._rate(host, f"streams.{interface}.resent_bytes", window) / sent if sent > 0 else 0.0
            found.append(
                Link(
                    *(host.name, interface, direction, limit, wire_ns, own * step_s, on_wire, foreign, resent),
                    _peak(host, f"nic.{interface}.{direction}_bytes", window) / limit.bytes_per_s if limit else 0.0,
                    tuple(streams),
                )
            )
        return max(found, key=lambda link: (link.share or 0.0, link.direction))

    def wire_ns(self, rank: Rank) -> float:
        """The least of the ranks that move about as much: bytes move on all of them alike, and where the clocks of two hosts are
        not known well enough, waits pass for wire on the one that waits."""
        return min(other.wire_ns for other in self.ranks if rank.bytes / 2 <= other.bytes <= 2 * rank.bytes)

    def _streams(self, host: Host, interface: str, window: Interval) -> list[Stream]:
        found = []
        for number, place, there in _described(host):
            if place not in (interface, "") or f"stream.{number}.tx_bytes" not in host.counters:
                continue
            sent, busy, late, short = (
                self._rate(host, f"stream.{number}.{name}", window)
                for name in ("tx_bytes", "busy_us", "window_limited_us", "buffer_limited_us")
            )
            rtt_us = self.median(host.levels.get(f"stream.{number}.rtt_us", ((), ()))[1])
            least_us = host.last.get(f"stream.{number}.least_rtt_us", 0.0)
            window_share = min(1.0, (late + short) / busy) if busy > 0 else 0.0
            found.append(
                Stream(sent, busy / 1e6, window_share, rtt_us, least_us, self._places.get(_address(there), ""))
            )
        most = max((stream.bytes_per_s for stream in found), default=0.0)
        return [stream for stream in found if stream.bytes_per_s >= most / 10 > 0]

    def _loopback(self) -> float:
        rates = [
            self._rate(host, "streams.lo.tx_bytes", self._window(name))
            / max(1, sum(rank.host == name for rank in self.ranks))
            for name, host in self._hosts.items()
        ]
        return max(rates, default=0.0) * self.step_ns / 1e9

    def _memory_read(self) -> float:
        rates = [
            sum(
                self._rate(host, counter, self._window(name))
                for counter in host.counters
                if counter.endswith(MEMORY_READ)
            )
            / max(1, sum(rank.host == name for rank in self.ranks))
            for name, host in self._hosts.items()
        ]
        return max(rates, default=0.0) * self.step_ns / 1e9

    def _resent(self) -> Mapping[str, float]:
        found = dict.fromkeys(self._hosts, 0.0)
        for name, host in self._hosts.items():
            for number, _, there in _described(host):
                often = host.last.get(f"stream.{number}.retransmits", 0.0)
                found[name] += often
                other = self._places.get(_address(there), name)
                if other != name:
                    found[other] += often
        return found

    def _window(self, host: str) -> Interval:
        """From the first counted step of a host's ranks to their last."""
        found = [steady(self._records[rank.number]) for rank in self.ranks if rank.host == host]
        return (min(start for start, _ in found), max(end for _, end in found)) if found else (0, 0)

    def _rate(self, host: Host, name: str, window: Interval) -> float:
        """Per second, over as much of the window as the counter was read in."""
        counted = host.counters.get(name)
        if counted is None:
            return 0.0
        start, end = max(window[0], counted.times_ns[0]), min(window[1], counted.times_ns[-1])
        if end <= start:
            # Too short a run for a counter that is read rarely: all that there is of it.
            start, end = counted.times_ns[0], counted.times_ns[-1]
        return counted.grown(start, end) / (end - start) * 1e9


NOT_COMPUTE = frozenset(("loading", "evaluation", "checkpoint", MEASURING))


def _peak(host: Host, name: str, window: Interval) -> float:
    """Per second: what a counter grew by in the fullest twentieth of the readings."""
    rates = sorted(rate for (start, end), rate in host.points(name) if window[0] <= start and end <= window[1])
    return rates[math.ceil(0.95 * len(rates)) - 1] if rates else 0.0


def _has_streams(host: Host, interface: str) -> bool:
    return f"streams.{interface}.tx_bytes" in host.counters


def _covered(host: Host, names: Sequence[str], window: Interval) -> Interval:
    """As much of a window as all of these counters were read in, or the window if that is nothing."""
    found = [host.counters[name].times_ns for name in names if name in host.counters]
    start, end = max([window[0], *(times[0] for times in found)]), min([window[1], *(times[-1] for times in found)])
    return (start, end) if start < end else window


def _until_closed(host: Host, interface: str, window: Interval) -> Interval:
    """The window, up to the last reading of connections that were closed before its end: what they carried after that, for two
    readings at most, is in no sum, and would be taken for somebody else's. Their sum stands still then, and the interface's does
    not."""

    def rate(kind: str, start: int, end: int) -> float:
        names = [f"{kind}.{interface}.{direction}_bytes" for direction in ("tx", "rx")]
        return sum(host.grown(name, start, end) for name in names) / max(1, end - start)

    sums = host.counters.get(f"streams.{interface}.tx_bytes")
    readings = [time_ns for time_ns in sums.times_ns if window[0] < time_ns < window[1]] if sums is not None else []
    found = window
    for before in reversed(readings[-CLOSING:]):
        is_still = rate("streams", before, found[1]) < STILL * rate("streams", *window)
        if not is_still or rate("nic", before, found[1]) < MOVING * rate("nic", *window):
            break
        found = window[0], before
    return found if 2 * (found[1] - found[0]) >= window[1] - window[0] else window


CLOSING = 2
"""Readings of the streams in which a job closes its connections."""
STILL, MOVING = 0.1, 0.25
"""Of the mean rate of the run: below it connections carry nothing that counts, and from it on the interface goes on as before."""


def _described(host: Host) -> Iterable[tuple[str, str, str]]:
    """Of each stream of a host: its number, interface, and the place at its other end; these are empty where nothing tells."""
    told = ends(host.record)
    yield from ((each.number, each.interface, each.there) for each in told)
    if not told:
        for name in host.counters:
            if name.startswith("stream.") and name.endswith(".tx_bytes"):
                yield name.split(".")[1], "", ""


def _places(found: Iterable[Host]) -> dict[str, str]:
    """Hosts by their addresses, as their own streams show them."""
    places = {}
    for host in found:
        for each in ends(host.record):
            if each.interface != "lo":
                places[_address(each.here)] = host.name
    return places


def _address(place: str) -> str:
    """Of ``ADDRESS:PORT``, in one form."""
    address, _ = split(place)
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        return address


_COMMUNICATES = re.compile("penstock|gloo|nccl|ucx", re.IGNORECASE)
"""Names of threads that carry data."""

_HEADER_BYTES = 20 + 20 + 12 + 14
"""Of IPv4, TCP with time stamps, and Ethernet."""
