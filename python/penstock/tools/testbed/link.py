"""The properties of a host's link, and the ``tc`` commands that set them. Nothing here touches the system."""

from __future__ import annotations

import dataclasses
import math
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkSpec:
    """The link between each host and the switch. All hosts have the same.

    Args:
        rate_mbit: rate of the link in Mbit/s of Ethernet frames (headers counted, preamble and checksum not), in each
            direction; None for no limit.
        flow_mbit: the most that one class of flows gets of it, at the host that sends; a list is dealt to the
            `CLASSES` classes by turns; None for no such cap. A flow's class is `flow_class` of its ports, so that
            both directions of a connection are in the same class. Two flows may share a class, and its cap.
        loss: share of packets lost between two hosts, in each direction, 0 <= loss < 1.
        delay_ms: time from one host to another, one way: the round trip is twice that.
        mtu: largest IP packet in bytes.
        offloads: whether the hosts may hand over packets of up to 64 KiB for the "hardware" to cut (GSO, TSO, GRO).
            They save most of the CPU time, and cost truth: interface counters miss headers, and a loss hits 64 KiB
            at once. None means yes, unless there is loss.
        queue_bytes: what waits at a switch's port in front of the link; None for `BUFFER_S` of its rate.
    """

    rate_mbit: float | None = 1000.0
    flow_mbit: float | tuple[float, ...] | list[float] | None = None
    loss: float = 0.0
    delay_ms: float = 0.0
    mtu: int = 1500
    offloads: bool | None = None
    queue_bytes: int | None = None

    def __post_init__(self) -> None:
        caps = self.flow_mbit if isinstance(self.flow_mbit, (list, tuple)) else [self.flow_mbit]
        if self.rate_mbit is not None and not 0.1 <= self.rate_mbit <= 400_000:
            raise ValueError(f"rate_mbit={self.rate_mbit}: give 0.1 to 400000 Mbit/s, or None for no limit")
        if not 1 <= len(caps) <= CLASSES:
            raise ValueError(f"flow_mbit={self.flow_mbit}: give one cap, or 1 to {CLASSES} to deal by turns")
        for cap in caps:
            if cap is not None and (self.rate_mbit is None or not 0.1 <= cap <= self.rate_mbit):
                raise ValueError(f"flow_mbit={self.flow_mbit}: give 0.1 Mbit/s up to rate_mbit={self.rate_mbit}")
        if not 0 <= self.loss < 1:
            raise ValueError(f"loss={self.loss}: a share of packets, 0 <= loss < 1")
        if not (math.isfinite(self.delay_ms) and 0 <= self.delay_ms <= 10_000):
            raise ValueError(f"delay_ms={self.delay_ms}: milliseconds one way, 0 to 10000")
        if not 1280 <= self.mtu <= 65_000:
            raise ValueError(f"mtu={self.mtu}: bytes, 1280 (the least that IPv6 takes) to 65000")
        if self.queue_bytes is not None and not self.mtu + ETHERNET_HEADER_BYTES <= self.queue_bytes <= 1 << 31:
            raise ValueError(f"queue_bytes={self.queue_bytes}: give room for a packet, up to 2 GiB")

    @property
    def caps_mbit(self) -> list[float] | None:
        """The cap of each of the `CLASSES` classes in Mbit/s, or None."""
        if self.flow_mbit is None:
            return None
        caps = list(self.flow_mbit) if isinstance(self.flow_mbit, (list, tuple)) else [self.flow_mbit]
        return [float(caps[index % len(caps)]) for index in range(CLASSES)]

    @property
    def payload_mbit(self) -> float | None:
        """What TCP over IPv4 can carry of ``rate_mbit``: full segments with time stamps, no acknowledgements back."""
        if self.rate_mbit is None:
            return None
        return self.rate_mbit * (self.mtu - IPV4_TCP_HEADER_BYTES) / (self.mtu + ETHERNET_HEADER_BYTES)

    @property
    def buffer_bytes(self) -> int:
        """The bytes that wait at a switch's port."""
        if self.queue_bytes is not None:
            return self.queue_bytes
        return max(LEAST_BUFFER_BYTES, round((self.rate_mbit or 0) * 1e6 / 8 * BUFFER_S))

    @property
    def uses_offloads(self) -> bool:
        return self.loss == 0 if self.offloads is None else self.offloads

    def to_dict(self) -> dict[str, Any]:
        """The arguments that make this again."""
        return dataclasses.asdict(self)

    def describe(self) -> str:
        """One line for people, such as ``1000 Mbit/s, 200 a flow, 10 ms one way``."""
        words = ["no rate limit" if self.rate_mbit is None else f"{self.rate_mbit:g} Mbit/s"]
        if self.flow_mbit is not None:
            caps = self.flow_mbit if isinstance(self.flow_mbit, (list, tuple)) else [self.flow_mbit]
            words.append(" and ".join(f"{cap:g}" for cap in caps) + " a flow" + (" by turns" if len(caps) > 1 else ""))
        if self.delay_ms:
            words.append(f"{self.delay_ms:g} ms one way")
        if self.loss:
            words.append(f"{self.loss:.3%} of packets lost")
        if self.mtu != 1500:
            words.append(f"MTU {self.mtu}")
        if not self.uses_offloads:
            words.append("no offloads")
        return ", ".join(words)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlowClass:
    """What one class of flows sent from a host. Bytes and packets are those of the wire, every header counted."""

    index: int
    """0 to 15."""
    cap_mbit: float
    bytes: int
    packets: int
    flows: int
    """TCP connections with another host that are in this class: open now, or, of a run, seen open during it."""


def flow_class(port: int, other_port: int) -> int:
    """The class of a flow: the same whichever end's port is named first.

    A class by source port alone would not do: everything that the accepting side sends has the listening port as its
    source, and ``connect()`` hands out ports of one parity, hence the shift.
    """
    return ((port ^ other_port) >> 1) & (CLASSES - 1)


def host_commands(spec: LinkSpec, device: str) -> list[str]:
    """``tc -batch`` lines for what a host sends: the link's rate, and a cap for each class of flows."""
    if spec.rate_mbit is None:
        return []
    rate_kbit = round(spec.rate_mbit * 1000)
    lines = [
        f"qdisc add dev {device} root handle 1: htb default 1",
        f"class add dev {device} parent 1: classid 1:ff htb rate {rate_kbit}kbit quantum {QUANTUM_BYTES}",
        # What no class takes: ARP, ICMP, and everything when there are no caps. It may use the whole link.
        f"class add dev {device} parent 1:ff classid 1:1 htb rate {rate_kbit}kbit quantum {QUANTUM_BYTES}",
    ]
    if spec.caps_mbit is None:
        return lines
    for index, cap_mbit in enumerate(spec.caps_mbit):
        # The assured rates must not add up to more than the link; half of it is shared out, the rest is borrowed.
        cap_kbit = round(cap_mbit * 1000)
        assured_kbit = max(1, min(cap_kbit, rate_kbit // (2 * CLASSES)))
        lines.append(
            f"class add dev {device} parent 1:ff classid 1:{FIRST_MINOR + index:x} "
            f"htb rate {assured_kbit}kbit ceil {cap_kbit}kbit quantum {QUANTUM_BYTES}"
        )
    program = ",".join([str(len(CLASSIFIER)), *(" ".join(map(str, each)) for each in CLASSIFIER)])
    lines.append(f'filter add dev {device} parent 1: protocol all prio 1 bpf bytecode "{program}" classid 1:1')
    return lines


def port_commands(spec: LinkSpec, device: str, *, limited: bool, delay_ms: float) -> list[str]:
    """``tc -batch`` lines for what a switch's port sends: the link's rate, a switch's buffer, and a delay.

    Args:
        limited: whether the rate and the buffer are wanted. Two hosts on one switch need none here: what one receives,
            the other's link has limited already, and a second queue would cost a timer for each packet.
        delay_ms: the delay that the kernel's netem makes here, 0 for none. It sits under the rate, where a packet waits
            until it is both due and its turn.
    """
    if spec.rate_mbit is None or not limited:
        return [f"qdisc add dev {device} root handle 2: {_netem(spec, delay_ms)}"] if delay_ms else []
    rate_kbit = round(spec.rate_mbit * 1000)
    queue = _netem(spec, delay_ms) if delay_ms else f"bfifo limit {spec.buffer_bytes}"
    return [
        f"qdisc add dev {device} root handle 1: htb default 1",
        f"class add dev {device} parent 1: classid 1:1 htb rate {rate_kbit}kbit quantum {QUANTUM_BYTES}",
        f"qdisc add dev {device} parent 1:1 handle 2: {queue}",
    ]


def _netem(spec: LinkSpec, delay_ms: float) -> str:
    """netem's limit counts packets, and must hold a whole delay of the smallest useful ones besides the buffer."""
    rate_mbit = 10_000.0 if spec.rate_mbit is None else spec.rate_mbit
    buffer_bytes = rate_mbit * 1e6 / 8 * BUFFER_S if spec.queue_bytes is None else spec.queue_bytes
    packets = math.ceil((rate_mbit * 1e6 / 8 * delay_ms / 1e3 + buffer_bytes) / 500)
    return f"netem delay {round(delay_ms * 1000)}us limit {max(1000, packets)}"


CLASSES = 16
FIRST_MINOR = 0x100
"""Class i is ``1:100`` + i, so that no class is the default (1:1) or the link (1:ff)."""

IPV4_TCP_HEADER_BYTES = 20 + 20 + 12
ETHERNET_HEADER_BYTES = 14

QUANTUM_BYTES = 65_536
"""What a class sends before the next one's turn. Below the size of an offloaded packet, turns would be dealt by the
packet, and classes with larger packets would get more."""

BUFFER_S = 0.010
LEAST_BUFFER_BYTES = 256 * 1024
"""A switch port's buffer: 10 ms at its rate (1.25 MB at 1 Gbit/s), as small data-centre switches have. It fills only
when several hosts send to one."""

# Classic BPF over the Ethernet frame, as (code, jump if true, jump if false, constant). It returns the class id, or 0
# for "not mine": anything but TCP and UDP over IPv4, or over IPv6 without extension headers.
CLASSIFIER: list[tuple[int, int, int, int]] = [
    (0x28, 0, 0, 12),  # 0  ldh [12]             EtherType
    (0x15, 0, 5, 0x0800),  # 1  jeq IPv4, 2, 7
    (0x30, 0, 0, 23),  # 2  ldb [23]             protocol
    (0x15, 1, 0, 6),  # 3  jeq TCP, 5, 4
    (0x15, 0, 17, 17),  # 4  jeq UDP, 5, 22
    (0xB1, 0, 0, 14),  # 5  ldxb 4*([14]&0xf)    x = length of the IPv4 header
    (0x05, 0, 0, 5),  # 6  ja 12
    (0x15, 0, 14, 0x86DD),  # 7  jeq IPv6, 8, 22
    (0x30, 0, 0, 20),  # 8  ldb [20]             next header
    (0x15, 1, 0, 6),  # 9  jeq TCP, 11, 10
    (0x15, 0, 11, 17),  # 10 jeq UDP, 11, 22
    (0x01, 0, 0, 40),  # 11 ldx #40              x = length of the IPv6 header
    (0x48, 0, 0, 14),  # 12 ldh [x+14]           source port
    (0x02, 0, 0, 0),  # 13 st M[0]
    (0x48, 0, 0, 16),  # 14 ldh [x+16]           destination port
    (0x07, 0, 0, 0),  # 15 tax
    (0x60, 0, 0, 0),  # 16 ld M[0]
    (0xAC, 0, 0, 0),  # 17 xor x
    (0x74, 0, 0, 1),  # 18 rsh #1
    (0x54, 0, 0, CLASSES - 1),  # 19 and #15
    (0x04, 0, 0, (1 << 16) + FIRST_MINOR),  # 20 add #0x10100       major 1
    (0x16, 0, 0, 0),  # 21 ret a
    (0x06, 0, 0, 0),  # 22 ret #0
]
