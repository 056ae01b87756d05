"""Delay between hosts where the kernel has no netem: a switch in user space that holds every packet for a while.

Each host's interface is then a TAP device, and this process is the other side of all of them (with two hosts, two
processes, one a direction). It reads Ethernet frames, keeps them for the delay, and writes them to the device of the
host that they are for. Rates, flow classes, loss and dropped links stay where they are without it: on the hosts' own
interfaces.

What makes Python fast enough is that a frame may be a TCP packet of up to 64 KiB: with IFF_VNET_HDR each comes with a
header that says how to cut it and which checksum is still to be filled in, and goes out with that header as it came,
so the kernel does neither. And under load this wakes every `TICK_S`, not for every packet. Five sixths of its time
are the kernel's: a read and a write copy the packet, and the write carries it up to the receiving socket, whose answer
often leaves on the same path. So a compiled language would gain little.

It runs as a script, ``python -I -S relay.py DELAY_S TAP:RATE_BYTES_PER_S:BUFFER_S...`` with open devices, says so in one
line, and serves until it is killed; the devices go with it.
"""

from __future__ import annotations

import collections
import fcntl
import os
import select
import struct
import sys
import time


def open_tap(name: str, *, offloads: bool) -> int:
    """Make a TAP device in the calling thread's namespace, which lives as long as the returned descriptor.

    Frames are read and written with a virtio-net header of `VNET_BYTES` before them.

    Raises: FileNotFoundError, without /dev/net/tun.
    """
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    try:
        fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI | IFF_VNET_HDR))
        fcntl.ioctl(tap, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6 if offloads else 0)
    except BaseException:
        os.close(tap)
        raise
    return tap


def main(arguments: list[str]) -> None:
    delay_s = float(arguments[0])
    fields = [argument.split(":") for argument in arguments[1:]]
    taps, rates, buffers = (
        [int(each[0]) for each in fields],
        [float(each[1]) for each in fields],
        [float(each[2]) for each in fields],
    )
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except OSError:
        pass  # then delays vary more on a busy machine
    os.write(1, b"ready\n")
    origins = list(range(len(taps)))
    if len(taps) == 2:
        # Nothing that one direction does concerns the other, so each gets a processor.
        origins = [0] if os.fork() == 0 else [1]
    serve(taps, origins, delay_s, rates, buffers)


def serve(taps: list[int], origins: list[int], delay_s: float, rates: list[float], buffers: list[float]) -> None:
    """Carry frames, without an end.

    Args:
        origins: the hosts whose frames to carry.
        rates: bytes a second of the link from here to each host; 0 for no limit.
        buffers: what waits for that link longer than so many seconds, besides the delay, is lost.
    """
    hosts = len(taps)
    queues: list[collections.deque[tuple[float, bytes]]] = [collections.deque() for _ in taps]  # when due, frame
    free = [0.0] * hosts  # when the link to each host will have sent all that is queued for it
    everybody = range(hosts)
    read, write, clock = os.read, os.write, time.monotonic
    now = clock()
    while True:
        if any(queues):
            pause = now + TICK_S - clock()
            if pause > 0:
                time.sleep(pause)
        else:
            select.select([taps[origin] for origin in origins], [], [])
        now = clock()
        for origin in origins:
            tap = taps[origin]
            try:
                while True:
                    frame = read(tap, FRAME_BYTES)
                    # The testbed's addresses end in the host's number, counted from 1; the lowest bit of the first
                    # byte means all hosts (IPv6's neighbour discovery).
                    host = frame[VNET_BYTES + 5] - 1
                    for target in everybody if frame[VNET_BYTES] & 1 else (host,):
                        if target == origin or target >= hosts:
                            continue
                        due = now + delay_s
                        if rates[target]:
                            if free[target] > due + buffers[target]:
                                continue
                            due = free[target] = max(due, free[target]) + wire_bytes(frame) / rates[target]
                        queues[target].append((due, frame))
            except BlockingIOError:
                pass
        until = clock()
        for tap, queue in zip(taps, queues):  # noqa: B905  (strict= costs, and they are equal)
            while queue and queue[0][0] <= until:
                try:
                    write(tap, queue.popleft()[1])
                except OSError:
                    pass  # lost, as on any network: the device is down, or its host is out of memory


def wire_bytes(frame: bytes) -> int:
    """Bytes that a frame takes on the wire once it is cut into packets, each with the headers of the first."""
    _, kind, header_bytes, segment_bytes = struct.unpack_from("=BBHH", frame)
    length = len(frame) - VNET_BYTES
    if kind == 0 or segment_bytes == 0:
        return length
    return length + (-(-(length - header_bytes) // segment_bytes) - 1) * header_bytes


TICK_S = 0.0002
"""200 us: 5000 wake-ups a second take 5 % of a processor, and a packet is late by one or two of them."""

ENVIRONMENT = {"MALLOC_TRIM_THRESHOLD_": str(1 << 28), "MALLOC_MMAP_THRESHOLD_": str(1 << 28)}
"""To be started with: glibc then keeps memory that frames have used. Giving it back and faulting it in again took 7 %
of the relay's time."""

VNET_BYTES = 10
FRAME_BYTES = VNET_BYTES + 14 + 4 + 65_536

# linux/if_tun.h
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO6 = 0x01, 0x02, 0x04

if __name__ == "__main__":
    main(sys.argv[1:])
