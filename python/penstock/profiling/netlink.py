"""What the kernel tells of connections, addresses and shapers when it is asked over netlink, Linux's interface for that.

Why not pyroute2, the library for it? `pip install penstock` must not bring it, importing it takes longer than a sampler may
take to start, and a sampler needs four questions of it, some with far less work an answer than the library's: a list of all
connections makes the kernel walk a table of a size that the machine's memory decides (1.8 ms with 24 GiB), so known connections
are asked for one by one, many in a message (2 us each).
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

__all__ = [
    "SOCK_DIAG",
    "Connection",
    "Netlink",
    "TcpInfo",
    "addresses",
    "connections",
    "shaped_bytes_per_s",
    "tcp_infos",
]


class Connection(NamedTuple):
    """An established TCP connection of this network namespace."""

    inode: int
    """Of its socket: `/proc/PID/fd` shows whose it is."""
    family: int
    id: bytes
    """What the kernel wants to hear to find it again: ports, addresses, interface and cookie."""

    @property
    def here(self) -> tuple[bytes, int]:
        return _address(self.family, self.id[4:20]), int.from_bytes(self.id[0:2], "big")

    @property
    def there(self) -> tuple[bytes, int]:
        return _address(self.family, self.id[20:36]), int.from_bytes(self.id[2:4], "big")


class TcpInfo(NamedTuple):
    """What is used of `struct tcp_info` (include/uapi/linux/tcp.h), in its order. Kernels before 4.19 count no bytes that were
    sent again, and of what was sent only what has been acknowledged."""

    segment_bytes: int
    rtt_us: int
    cwnd: int
    """In segments."""
    retransmits: int
    acked_bytes: int
    received_bytes: int
    unsent_bytes: int
    """Written by the process, and not yet sent."""
    least_rtt_us: int
    delivery_bytes_per_s: int
    busy_us: int
    """How long something was on its way or waited."""
    window_limited_us: int
    """Of which the other side took no more."""
    buffer_limited_us: int
    """Of which the process's own send buffer was too small."""
    sent_bytes: int
    """With what was sent again."""
    resent_bytes: int


class Netlink:
    """A socket to one part of the kernel. Its answers come before the send returns, so nothing here waits."""

    def __init__(self, protocol: int) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 1, 0))
        self._buffer = bytearray(1 << 17)

    def dump(self, kind: int, request: bytes) -> Iterator[memoryview]:
        """The bodies of all answers to a question for a list.

        Raises: OSError, if the kernel has no such list.
        """
        self._forget()
        self._socket.send(_HEADER.pack(_HEADER.size + len(request), kind, _REQUEST | _DUMP, 1, 0) + request)
        while True:
            length = self._socket.recv_into(self._buffer)
            for answer, body in self._messages(length):
                if answer == _DONE:
                    return
                if answer == _ERROR:
                    code = -int.from_bytes(body[:4], "little", signed=True)
                    raise OSError(code, os.strerror(code))
                yield body

    def ask(self, kind: int, requests: Sequence[bytes]) -> Iterator[tuple[int, memoryview]]:
        """The bodies of the answers to several questions, each with the number of its question. One whose object is gone is left
        out."""
        self._forget()
        self._socket.send(
            b"".join(
                _HEADER.pack(_HEADER.size + len(request), kind, _REQUEST, number, 0) + request
                for number, request in enumerate(requests)
            )
        )
        view = memoryview(self._buffer)
        for _ in requests:
            try:
                length = self._socket.recv_into(self._buffer, 0, socket.MSG_DONTWAIT)
            except OSError:  # some answers were lost since there were too many: what is there counts
                return
            _, answer, _, number, _ = _HEADER.unpack_from(self._buffer)
            if answer != _ERROR:
                yield number, view[_HEADER.size : length]

    def close(self) -> None:
        self._socket.close()

    def _forget(self) -> None:
        """Answers to an earlier question that nobody has read."""
        try:
            while True:
                self._socket.recv_into(self._buffer, 0, socket.MSG_DONTWAIT)
        except OSError:
            pass

    def _messages(self, length: int) -> Iterator[tuple[int, memoryview]]:
        view, at = memoryview(self._buffer), 0
        while at + _HEADER.size <= length:
            size, answer, _, _, _ = _HEADER.unpack_from(view, at)
            if size < _HEADER.size:
                return
            yield answer, view[at + _HEADER.size : at + size]
            at += (size + 3) & ~3


SOCK_DIAG = 4
"""The protocol of `connections` and `tcp_infos`; `addresses` and `shaped_bytes_per_s` take 0 (rtnetlink)."""


def connections(netlink: Netlink) -> list[Connection]:
    """All established TCP connections. Cost: 1-2 ms of the kernel's time, for a list of each family."""
    found = []
    for family in (socket.AF_INET, socket.AF_INET6):
        request = struct.pack("=BBBBI48x", family, socket.IPPROTO_TCP, 0, 0, 1 << _ESTABLISHED)
        for body in netlink.dump(_SOCK_DIAG_BY_FAMILY, request):
            (inode,) = struct.unpack_from("=I", body, _INODE_AT)
            found.append(Connection(inode, body[0], bytes(body[4:52])))
    return found


def tcp_infos(netlink: Netlink, asked: Sequence[Connection]) -> Iterator[tuple[int, TcpInfo]]:
    """The state of known connections, by their place in the list; of those that have ended nothing. 2 us each."""
    at = _ATTRIBUTES_AT
    for first in range(0, len(asked), _AT_ONCE):
        part = asked[first : first + _AT_ONCE]
        requests = [
            struct.pack("=BBBBI", one.family, socket.IPPROTO_TCP, 1 << (_INET_DIAG_INFO - 1), 0, 0xFFFFFFFF) + one.id
            for one in part
        ]
        for number, body in netlink.ask(_SOCK_DIAG_BY_FAMILY, requests):
            # It stands where it stood in the answer before, mostly.
            if len(body) < at + 4 or _ATTRIBUTE.unpack_from(body, at)[1] != _INET_DIAG_INFO:
                found = _find(body, _ATTRIBUTES_AT, _INET_DIAG_INFO)
                if found is None:
                    continue
                at = found
            length, _ = _ATTRIBUTE.unpack_from(body, at)
            if length - 4 >= _TCP_INFO.size:
                info = TcpInfo._make(_TCP_INFO.unpack_from(body, at + 4))
            else:
                info = TcpInfo._make(_TCP_INFO.unpack(bytes(body[at + 4 : at + length]).ljust(_TCP_INFO.size, b"\0")))
                info = info._replace(sent_bytes=info.acked_bytes)
            yield first + number, info


def addresses(netlink: Netlink) -> dict[bytes, int]:
    """By address of this network namespace, the number of its interface (`socket.if_nameindex`)."""
    found = {}
    for body in netlink.dump(_RTM_GETADDR, struct.pack("=BBBBI", socket.AF_UNSPEC, 0, 0, 0, 0)):
        (index,) = struct.unpack_from("=I", body, 4)
        # Where the two ends of a link have different addresses, the local one is this.
        address = _attribute(body, 8, _IFA_LOCAL) or _attribute(body, 8, _IFA_ADDRESS)
        if address is not None:
            found[bytes(address)] = index
    return found


def shaped_bytes_per_s(netlink: Netlink) -> dict[int, float]:
    """By number of an interface, the rate to which this host's own queue (htb or tbf, set with `tc`) limits what it sends."""
    found: dict[int, float] = {}
    for body in netlink.dump(_RTM_GETQDISC, _TCMSG.pack(0, 0, 0, 0, 0)):
        _, index, _, parent, _ = _TCMSG.unpack_from(body)
        if parent != _TC_H_ROOT or _attribute(body, _TCMSG.size, _TCA_KIND) is None:
            continue
        kind = bytes(_attribute(body, _TCMSG.size, _TCA_KIND) or b"").rstrip(b"\0")
        options = _attribute(body, _TCMSG.size, _TCA_OPTIONS)
        if kind == b"tbf" and options is not None:
            rate = _rate(options, _TCA_TBF_PARMS, 0, _TCA_TBF_RATE64)
            if rate:
                found[index] = rate
        elif kind == b"htb":
            found[index] = 0
    for index in [index for index, rate in found.items() if not rate]:
        # A class of htb without a parent lends to all below it, and nothing goes beyond it.
        for body in netlink.dump(_RTM_GETTCLASS, _TCMSG.pack(0, index, 0, 0, 0)):
            _, _, _, parent, _ = _TCMSG.unpack_from(body)
            options = _attribute(body, _TCMSG.size, _TCA_OPTIONS)
            if parent == _TC_H_ROOT and options is not None:
                found[index] = max(found[index], _rate(options, _TCA_HTB_PARMS, _RATESPEC_BYTES, _TCA_HTB_CEIL64))
    return {index: rate for index, rate in found.items() if rate}


def _rate(options: memoryview, parameters: int, at: int, wide: int) -> float:
    """Bytes per second of a `tc_ratespec` within an option; 64 bits stand in an option of their own."""
    if (found := _attribute(options, 0, wide)) is not None and len(found) >= 8:
        return float(struct.unpack_from("=Q", found)[0])
    given = _attribute(options, 0, parameters)
    if given is None or len(given) < at + _RATESPEC_BYTES:
        return 0.0
    return float(struct.unpack_from("=I", given, at + 8)[0])


def _attribute(body: memoryview, at: int, wanted: int) -> memoryview | None:
    found = _find(body, at, wanted)
    return None if found is None else body[found + 4 : found + _ATTRIBUTE.unpack_from(body, found)[0]]


def _find(body: memoryview, at: int, wanted: int) -> int | None:
    while at + 4 <= len(body):
        length, kind = _ATTRIBUTE.unpack_from(body, at)
        if length < 4:
            return None
        if kind & _NLA_TYPE_MASK == wanted:
            return at
        at += (length + 3) & ~3
    return None


def _address(family: int, given: bytes) -> bytes:
    """4 bytes for IPv4, also in IPv6's clothes, as a socket that speaks both has it."""
    if family == socket.AF_INET:
        return given[:4]
    return given[12:] if given.startswith(_V4_IN_V6) else given


_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence number, port
_ATTRIBUTE = struct.Struct("=HH")  # nlattr: length, type
_REQUEST, _DUMP = 0x1, 0x300
_ERROR, _DONE = 2, 3
_NLA_TYPE_MASK = 0x3FFF
_V4_IN_V6 = b"\0" * 10 + b"\xff\xff"

# include/uapi/linux/sock_diag.h, inet_diag.h: after the header come family, state, timer, retransmits, the id of 48 bytes,
# expires, the two queues, user, inode; then attributes.
_SOCK_DIAG_BY_FAMILY = 20
_INET_DIAG_INFO = 2
_ESTABLISHED = 1
_INODE_AT, _ATTRIBUTES_AT = 68, 72
_TCP_INFO = struct.Struct("=16xI48xI8xI16xI16xQQ8xII8xQQQQ8xQQ")

_AT_ONCE = 64
"""Questions in one message: their answers, 1.3 KB each as the kernel counts them, fit into a socket's default buffer."""

# include/uapi/linux/rtnetlink.h, if_addr.h, pkt_sched.h
_RTM_GETADDR, _RTM_GETQDISC, _RTM_GETTCLASS = 22, 38, 42
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_TCMSG = struct.Struct("=B3xiIII")
_TC_H_ROOT = 0xFFFFFFFF
_TCA_KIND, _TCA_OPTIONS = 1, 2
_TCA_TBF_PARMS, _TCA_TBF_RATE64 = 1, 4
_TCA_HTB_PARMS, _TCA_HTB_CEIL64 = 1, 7
_RATESPEC_BYTES = 12
