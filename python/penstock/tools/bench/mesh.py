"""Raw TCP sockets between ranks: what the link or the loopback carries when nothing but bytes moves.

Every pair of ranks has one control connection (for the barrier and the end of a transfer) and ``flows`` connections that
carry data in both directions, as a collective's streams do. One thread a rank drives all of them through epoll.
Each system call moves up to `BUFFER_BYTES`, so the interpreter's share is small; ``docs/design/bench.md`` compares with iperf3.
"""

from __future__ import annotations

import errno
import random
import select
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn

from penstock.tools.testbed.link import CLASSES, flow_class

BUFFER_BYTES = 1 << 20
"""What one call sends from and receives into, over and over. It stays in cache, as a bound should have it: with 64 MiB of
memory to walk through, as a collective has, the same sockets take 15 % longer with 4 ranks on 2 cores (measured); calls of
256 KiB cost 10 %."""


@dataclass
class Pair:
    """This rank's connections to one other rank."""

    control: socket.socket
    flows: list[socket.socket]


class Mesh:
    """A full mesh over ``ranks`` processes. Not thread-safe; every call blocks until its part is done."""

    def __init__(self, rank: int, ranks: int, host: str, ports: tuple[int, int] = (0, 0)):
        """Listens on ``host`` at a free port of ``ports`` (first and last; 0: the system chooses); :attr:`address` tells the
        others."""
        self.rank = rank
        self.ranks = ranks
        self.pairs: dict[int, Pair] = {}
        self._listener = _listen(host, ports)
        self.address = list(self._listener.getsockname()[:2])
        self._source = memoryview(bytearray(BUFFER_BYTES))
        self._sink = memoryview(bytearray(BUFFER_BYTES))

    def connect(self, addresses: list[list], flows: int) -> None:
        """Connects to all ranks below and accepts all ranks above; returns when the whole mesh stands."""
        found: dict[int, dict[int, socket.socket]] = {rank: {} for rank in range(self.ranks) if rank != self.rank}
        for peer in range(self.rank):
            for index in range(flows + 1):
                flow = _connect(addresses[peer], index - 1)
                flow.sendall(GREETING.pack(self.rank, index))
                found[peer][index] = flow
        self._listener.settimeout(CONNECT_S)
        expected = {(peer, index) for peer in range(self.rank + 1, self.ranks) for index in range(flows + 1)}
        while expected:
            flow, _ = self._listener.accept()
            flow.settimeout(CONNECT_S)
            peer, index = GREETING.unpack(receive_exactly(flow, GREETING.size))
            if (peer, index) not in expected:
                flow.close()  # nobody of this mesh
                continue
            expected.remove((peer, index))
            found[peer][index] = flow
        for peer, by_index in found.items():
            for flow in by_index.values():
                flow.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            by_index[0].settimeout(None)
            for index in range(1, flows + 1):
                by_index[index].setblocking(False)
            self.pairs[peer] = Pair(by_index[0], [by_index[index] for index in range(1, flows + 1)])
        self._listener.close()

    def close(self) -> None:
        """Closes every connection, and what listens for them."""
        self._listener.close()
        for pair in self.pairs.values():
            for flow in (pair.control, *pair.flows):
                flow.close()

    def barrier(self) -> None:
        """No rank returns before all have called."""
        if self.rank == 0:
            for pair in self.pairs.values():
                receive_exactly(pair.control, 1)
            for pair in self.pairs.values():
                pair.control.sendall(b"b")
        else:
            self.pairs[0].control.sendall(b"b")
            receive_exactly(self.pairs[0].control, 1)

    def transfer(self, traffic: dict[tuple[int, int], int], flows: int, split: str) -> Transfer:
        """Makes ready to move ``traffic`` (bytes from rank to rank) over the first ``flows`` connections of each pair.

        Args:
            split: how bytes fall on flows. ``"pull"``: a flow that has room takes the next bytes. ``"equal"``: each flow
                owns an equal share, and the transfer ends with the slowest flow. ``"saturate"``: as pull, but every flow
                is kept full until the receiver has all its bytes, so that no flow idles while a slow one finishes its
                tail: the most that these flows carry. What is then still under way is left to `Transfer.drain`.
        """
        return Transfer(self, traffic, flows, split)


class Transfer:
    """One rank's part of one exchange. `run` it on all ranks together, then `drain` it, then make the next."""

    def __init__(self, mesh: Mesh, traffic: dict[tuple[int, int], int], flows: int, split: str):
        self.mesh = mesh
        self.split = split
        self.to_send = {dst: nbytes for (src, dst), nbytes in traffic.items() if src == mesh.rank and nbytes}
        self.to_receive = {src: nbytes for (src, dst), nbytes in traffic.items() if dst == mesh.rank and nbytes}
        self.sent = dict.fromkeys(self.to_send, 0)
        self.received = dict.fromkeys(self.to_receive, 0)
        self.source, self.sink = mesh._source, mesh._sink
        self.by_fd = {
            flow.fileno(): (peer, flow)
            for peer in {*self.to_send, *self.to_receive}
            for flow in mesh.pairs[peer].flows[:flows]
        }
        self.share = {}
        if split == "equal":
            for peer, nbytes in self.to_send.items():
                for index, flow in enumerate(mesh.pairs[peer].flows[:flows]):
                    self.share[flow.fileno()] = nbytes * (index + 1) // flows - nbytes * index // flows

    def run(self) -> None:
        """Returns when this rank has received everything and (``saturate``) every receiver has told it to stop, else when it
        has handed everything to the sockets."""
        epoll = select.epoll()
        interest = {}
        for fd, (peer, _) in self.by_fd.items():
            interest[fd] = (select.EPOLLOUT if self._wants_to_send(fd, peer) else 0) | (
                select.EPOLLIN if peer in self.to_receive else 0
            )
            epoll.register(fd, interest[fd])
        stops = {}
        if self.split == "saturate":
            stops = {self.mesh.pairs[peer].control.fileno(): peer for peer in self.to_send}
            for fd in stops:
                epoll.register(fd, select.EPOLLIN)
        sending, receiving = set(self.to_send), set(self.to_receive)
        try:
            while sending or receiving:
                for fd, events in epoll.poll(STALL_S) or self._stalled(sending, receiving):
                    if fd in stops:
                        peer = stops.pop(fd)
                        receive_exactly(self.mesh.pairs[peer].control, 1)
                        epoll.unregister(fd)
                        sending.discard(peer)
                        continue
                    peer, flow = self.by_fd[fd]
                    if events & ~(select.EPOLLIN | select.EPOLLOUT):
                        raise ConnectionError(f"rank {self.mesh.rank}: a raw socket to rank {peer} broke")
                    if events & select.EPOLLOUT:
                        if self._wants_to_send(fd, peer) and peer in sending:
                            self._send(fd, peer, flow)
                            if self.split != "saturate" and self.sent[peer] == self.to_send[peer]:
                                sending.discard(peer)
                        else:
                            interest[fd] &= ~select.EPOLLOUT
                            epoll.modify(fd, interest[fd])
                    if events & select.EPOLLIN:
                        self._receive(peer, flow)
                        if peer in receiving and self.received[peer] >= self.to_receive[peer]:
                            receiving.discard(peer)
                            if self.split == "saturate":
                                self.mesh.pairs[peer].control.sendall(b"s")
        finally:
            epoll.close()

    def drain(self) -> None:
        """After a ``saturate``: receives what was still under way, so that the next exchange starts with empty flows."""
        if self.split != "saturate":
            return
        for peer in self.to_send:
            self.mesh.pairs[peer].control.sendall(TOTAL.pack(self.sent[peer]))
        for peer in self.to_receive:
            total = TOTAL.unpack(receive_exactly(self.mesh.pairs[peer].control, TOTAL.size))[0]
            flows = {fd: flow for fd, (owner, flow) in self.by_fd.items() if owner == peer}
            poll = select.poll()
            for fd in flows:
                poll.register(fd, select.POLLIN)
            while self.received[peer] < total:
                for fd, _ in poll.poll(STALL_S * 1000) or self._stalled((), (peer,)):
                    self._receive(peer, flows[fd])

    def _wants_to_send(self, fd: int, peer: int) -> bool:
        if peer not in self.to_send:
            return False
        if self.split == "equal":
            return self.share[fd] > 0
        return self.split == "saturate" or self.sent[peer] < self.to_send[peer]

    def _send(self, fd: int, peer: int, flow: socket.socket) -> None:
        left = self.to_send[peer] - self.sent[peer]
        want = {"equal": self.share.get(fd, 0), "pull": left, "saturate": BUFFER_BYTES}[self.split]
        try:
            count = flow.send(self.source[: min(want, BUFFER_BYTES)])
        except BlockingIOError:
            return
        self.sent[peer] += count
        if self.split == "equal":
            self.share[fd] -= count

    def _receive(self, peer: int, flow: socket.socket) -> None:
        try:
            count = flow.recv_into(self.sink)
        except BlockingIOError:
            return
        if count == 0:
            raise ConnectionError(f"rank {self.mesh.rank}: rank {peer} closed a raw socket in mid transfer")
        self.received[peer] += count

    def _stalled(self, sending: Iterable[int], receiving: Iterable[int]) -> NoReturn:
        raise TimeoutError(
            f"rank {self.mesh.rank}: no byte moved over raw sockets for {STALL_S} s"
            f" (sending to {sorted(sending)}, receiving from {sorted(receiving)})"
        )


def _listen(host: str, ports: tuple[int, int]) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    first, last = ports
    for port in range(first, last + 1):
        try:
            return socket.create_server((host, port), family=family, backlog=256)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or port == last:
                raise
    raise ValueError(f"no port: {first} to {last} is no range")


def _connect(address: list, index: int) -> socket.socket:
    """Connects from a port that puts the flow into class ``index`` of the testbed's, modulo their number.

    With ports that the system chooses, 8 flows meet about 7 of 16 classes, others in each run. A limit, and the control of
    an equal split, must not depend on that.
    """
    host, port = address
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    candidates = [own for own in range(FIRST_PORT, LAST_PORT + 1) if flow_class(own, port) == index % CLASSES]
    for own in random.sample(candidates, 100):
        flow = socket.socket(family, socket.SOCK_STREAM)
        flow.settimeout(CONNECT_S)
        try:
            flow.bind(("", own))
            flow.connect((host, port))
            return flow
        except OSError as error:
            flow.close()
            if error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
                raise
    raise OSError(errno.EADDRINUSE, f"100 ports from {FIRST_PORT} to {LAST_PORT} are in use")


def receive_exactly(connection: socket.socket, nbytes: int) -> bytes:
    """Blocks until ``nbytes`` have come."""
    data = bytearray()
    while len(data) < nbytes:
        part = connection.recv(nbytes - len(data))
        if not part:
            raise ConnectionError("a peer of the bench closed its connection")
        data += part
    return bytes(data)


GREETING = struct.Struct("!II")
"""rank, index of the connection (0 is the control connection)"""

TOTAL = struct.Struct("!Q")

FIRST_PORT, LAST_PORT = 32768, 60999
"""Linux's default range of ports that it hands out itself."""

CONNECT_S = 20.0
"""A guess: connecting takes milliseconds on a healthy network, also with loss."""

STALL_S = 20.0
"""A guess, well above TCP's retransmission time-outs on a lossy link."""
