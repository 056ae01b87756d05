"""The system's counters, read from /proc, /sys and netlink: what `sampler.py` writes down (docs/reference/profile-counters.md).

Each class is one source, made once. It keeps its files open, so that a reading costs microseconds; `absent` names what this
system does not have. Processes, threads, sockets and interfaces may vanish between any two lines.

Why not psutil, the library for it? `pip install penstock` must not bring it, it has neither the state of TCP nor waits for a
processor, and it opens and parses its files anew in every call.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from penstock.addresses import joined
from penstock.interfaces import is_physical
from penstock.profiling import netlink

__all__ = ["Interfaces", "Processes", "Streams", "System", "Values"]

Values = dict[str, float]
Answer = TypeVar("Answer")


class Interfaces:
    """Bytes and packets of each network interface, both ways, and what it can carry."""

    def __init__(self) -> None:
        self._file = os.open("/proc/self/net/dev", os.O_RDONLY | os.O_CLOEXEC)
        self._shown: set[bytes] = set()
        self.absent: list[str] = []

    def read(self, values: Values) -> None:
        """Interfaces that have never carried anything are left out."""
        for line in _all(self._file).splitlines()[2:]:
            name, _, numbers = line.partition(b":")
            fields = numbers.split()
            if fields[0] == fields[8] == b"0":
                continue
            if name not in self._shown:
                # A host of containers has hundreds, and those that the machine was made with come first.
                if len(self._shown) == MOST_INTERFACES:
                    if not self.absent:
                        self.absent.append(f"interfaces beyond the first {MOST_INTERFACES}")
                    continue
                self._shown.add(name)
            key = f"nic.{name.strip().decode(errors='replace')}."
            values[key + "rx_bytes"] = int(fields[0])
            values[key + "rx_packets"] = int(fields[1])
            values[key + "tx_bytes"] = int(fields[8])
            values[key + "tx_packets"] = int(fields[9])
            values[key + "lost_packets"] = int(fields[2]) + int(fields[3]) + int(fields[10]) + int(fields[11])

    def limits(self, values: Values) -> None:
        """Rates in bytes per second, as far as the system knows them; and the largest packet."""
        shaped: dict[int, float] = {}
        try:
            shaped = _routing(netlink.shaped_bytes_per_s)
        except OSError:
            pass
        for index, name in socket.if_nameindex():
            if name == "lo":
                continue
            speed = _number(f"/sys/class/net/{name}/speed")
            # A driver that does not know says -1.
            if speed is not None and speed > 0 and is_physical(name):
                values[f"nic.{name}.speed_bytes_per_s"] = speed * 1e6 / 8
            if index in shaped:
                values[f"nic.{name}.shaped_bytes_per_s"] = shaped[index]
            if (mtu := _number(f"/sys/class/net/{name}/mtu")) is not None:
                values[f"nic.{name}.mtu_bytes"] = mtu


class Streams:
    """TCP connections of some processes: sums by interface, and each one's state."""

    def __init__(self) -> None:
        self._diag: netlink.Netlink | None = None
        self._owners: dict[int, int | None] = {}
        """By inode of an established connection: which of the processes has it, if one has."""
        self._streams: list[_Stream] = []
        self._sums: dict[str, list[int]] = {}
        """By interface: bytes sent, received, sent again, since the first `discover`."""
        self._made = 0
        self._is_first = True
        self.absent: list[str] = []

    def discover(self, pids: Iterable[int]) -> list[str]:
        """Look for new connections and forget those that have ended. Cost: milliseconds where there are new ones.

        Returns: for each new one, a text that says what its number means.
        """
        found = self._connections()
        fresh = [one for one in found if one.inode not in self._owners]
        known = {one.inode for one in found}
        self._owners = {inode: owner for inode, owner in self._owners.items() if inode in known}
        self._streams = [stream for stream in self._streams if stream.connection.inode in known]
        texts = []
        if fresh:
            owners = _owners_of_sockets(pids)
            names, indices = dict(socket.if_nameindex()), self._addresses()
            for one in fresh:
                pid = self._owners[one.inode] = owners.get(one.inode)
                if pid is not None and len(self._streams) < MOST_STREAMS:
                    is_inside = one.there[0] in indices
                    interface = "lo" if is_inside else names.get(indices.get(one.here[0], -1), "?")
                    self._streams.append(_Stream(one, pid, interface, self._made, self._is_first))
                    texts.append(f"{self._made} {pid} {interface} {_place(one.here)} {_place(one.there)}")
                    self._made += 1
                elif pid is not None and MOST_STREAMS not in self._owners:
                    self._owners[MOST_STREAMS] = None
                    self.absent.append(f"streams beyond the first {MOST_STREAMS}")
        self._is_first = False
        return texts

    @property
    def count(self) -> int:
        return len(self._streams)

    def read(self, values: Values) -> bool:
        """The sums. Returns: whether all connections are still there; else it is time to `discover`."""
        answered, asked = 0, [stream.connection for stream in self._streams]
        for number, info in netlink.tcp_infos(self._diag, asked) if self._diag is not None else ():
            stream = self._streams[number]
            sums = self._sums.setdefault(stream.interface, [0, 0, 0])
            now = (info.sent_bytes, info.received_bytes, info.resent_bytes)
            if stream.is_baseline:
                stream.before, stream.is_baseline = now, False
            for index in range(3):
                sums[index] += now[index] - stream.before[index]
            stream.before, stream.info = now, info
            answered += 1
        for interface, (sent, received, resent) in self._sums.items():
            values[f"streams.{interface}.tx_bytes"] = sent
            values[f"streams.{interface}.rx_bytes"] = received
            values[f"streams.{interface}.resent_bytes"] = resent
        unsent: dict[str, int] = {}
        for stream in self._streams:
            if stream.info is not None:
                unsent[stream.interface] = unsent.get(stream.interface, 0) + stream.info.unsent_bytes
        for interface, length in unsent.items():
            values[f"streams.{interface}.unsent_bytes"] = length
        return answered == len(self._streams)

    def details(self, values: Values) -> None:
        """Each stream's state as of the last `read`, unless it has not sent nor received anything since the details before."""
        for stream in self._streams:
            info = stream.info
            if info is None or (info.sent_bytes, info.received_bytes) == stream.shown:
                continue
            stream.shown = (info.sent_bytes, info.received_bytes)
            key = f"stream.{stream.number}."
            values[key + "tx_bytes"] = info.sent_bytes
            values[key + "rx_bytes"] = info.received_bytes
            values[key + "busy_us"] = info.busy_us
            values[key + "rtt_us"] = info.rtt_us
            values[key + "least_rtt_us"] = info.least_rtt_us
            values[key + "cwnd_bytes"] = info.cwnd * info.segment_bytes
            values[key + "delivery_bytes_per_s"] = info.delivery_bytes_per_s
            values[key + "retransmits"] = info.retransmits
            if info.window_limited_us:
                values[key + "window_limited_us"] = info.window_limited_us
            if info.buffer_limited_us:
                values[key + "buffer_limited_us"] = info.buffer_limited_us

    def _connections(self) -> list[netlink.Connection]:
        if "TCP state (the kernel has no sock_diag)" in self.absent:
            return []
        try:
            if self._diag is None:
                self._diag = netlink.Netlink(netlink.SOCK_DIAG)
            return netlink.connections(self._diag)
        except OSError:
            self.absent.append("TCP state (the kernel has no sock_diag)")
            return []

    def _addresses(self) -> dict[bytes, int]:
        try:
            return _routing(netlink.addresses)
        except OSError:
            return {}


class _Stream:
    """A connection that is watched."""

    def __init__(
        self, connection: netlink.Connection, pid: int, interface: str, number: int, is_baseline: bool
    ) -> None:
        self.connection = connection
        self.pid = pid
        self.interface = interface
        self.number = number
        self.is_baseline = is_baseline
        """Whether it may have carried something before it was watched that does not count."""
        self.before = (0, 0, 0)
        self.info: netlink.TcpInfo | None = None
        self.shown = (0, 0)


class Processes:
    """Processor time, waits for a processor, memory and disk of the ranks, of their threads and of the processes they started."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._ranks = {pid: process for pid in pids if (process := _opened(pid)) is not None}
        self._workers: dict[int, tuple[int, _Process]] = {}
        """Loaders' workers, for one: by pid, the rank's pid."""
        self._sums: dict[str, float] = {}
        self.absent: list[str] = []

    @property
    def pids(self) -> list[int]:
        return list(self._ranks)

    def read(self, values: Values) -> None:
        """Processor time of each rank's process, all threads that are and were; forgets those that are gone."""
        for pid, process in list(self._ranks.items()):
            cpu_s = process.cpu_s()
            if cpu_s is None:
                process.close()
                del self._ranks[pid]
            else:
                values[f"pid.{pid}.cpu_s"] = round(cpu_s, 5)

    def details(self, values: Values) -> None:
        """What changes slowly, or costs more; forgets processes that have ended, also those whose parents have not noticed."""
        for pid, process in list(self._ranks.items()):
            if process.has_ended():
                process.close()
                del self._ranks[pid]
                continue
            key = f"pid.{pid}."
            for name, value in process.memory().items():
                values[key + name] = value
            for name, value in process.disk().items():
                values[key + name] = value
            for name, value in process.threads().items():
                values[key + name] = value
        for worker, (pid, process) in list(self._workers.items()):
            cpu_s = process.cpu_s()
            if cpu_s is None or process.has_ended():
                process.close()
                del self._workers[worker]
                continue
            self._add(f"pid.{pid}.workers.cpu_s", process, "cpu_s", cpu_s)
            for name, value in process.disk().items():
                self._add(f"pid.{pid}.workers.{name}", process, name, value)
        values.update({name: round(value, 5) for name, value in self._sums.items()})

    def discover(self) -> list[int]:
        """Look for new threads, and for processes that the ranks have started. Returns: the pids of all. Cost: 5 us a process of
        the machine."""
        parents = {}
        for pid in _pids():
            fields = _fields(_text(f"/proc/{pid}/stat"))
            if fields is not None:
                parents[pid] = int(fields[1])
        for pid in parents:
            rank, steps = pid, 0
            while rank not in self._ranks and rank in parents and steps < 64:
                rank, steps = parents[rank], steps + 1
            is_new = rank in self._ranks and pid != rank and pid not in self._workers
            if is_new and len(self._workers) < MOST_WORKERS and (process := _opened(pid)) is not None:
                self._workers[pid] = (rank, process)
        for process in self._ranks.values():
            process.find_threads()
        if not any(process.has_waits for process in self._ranks.values()) and self._ranks and not self.absent:
            self.absent.append("waits for a processor (the kernel has no schedstat)")
        return [*self._ranks, *self._workers]

    def _add(self, name: str, process: _Process, what: str, value: float) -> None:
        """Sums over processes that come and go never fall."""
        self._sums[name] = self._sums.get(name, 0.0) + value - process.counted.get(what, 0.0)
        process.counted[what] = value


class _Process:
    """A process with its files."""

    def __init__(self, pid: int, born: bytes) -> None:
        self._pid = pid
        self._born = born
        self._files: dict[str, int] = {}
        self._threads: dict[int, tuple[int, str]] = {}
        """By number: its open `schedstat`, and its name."""
        self._before: dict[int, tuple[int, int]] = {}
        """By number of a thread: nanoseconds on a processor, and in a run queue."""
        self._queued_ns = 0
        self._shown: set[int] = set()
        self.counted: dict[str, float] = {}
        self.has_waits = True

    def cpu_s(self) -> float | None:
        try:
            # The clock of another process, as `clock_getcpuclockid` gives it, which Python does not have: MAKE_PROCESS_CPUCLOCK
            # with CPUCLOCK_SCHED in the kernel's include/linux/posix-timers.h.
            return time.clock_gettime((~self._pid << 3) | 2)
        except OSError:
            return None

    def has_ended(self) -> bool:
        """Also if it is a zombie, or another process has its number."""
        fields = _fields(_text(f"/proc/{self._pid}/stat"))
        return fields is None or fields[0] in (b"Z", b"X") or fields[19] != self._born

    def memory(self) -> Values:
        found = {}
        for line in self._read("status").splitlines():
            name, _, rest = line.partition(b":")
            if name in _MEMORY:
                found[_MEMORY[name]] = float(rest.split()[0]) * 1024
        return found

    def disk(self) -> Values:
        found = {}
        for line in self._read("io").splitlines():
            name, _, number = line.partition(b": ")
            if name in _DISK:
                found[_DISK[name]] = float(number)
        return found

    def threads(self) -> Values:
        """How long all threads have waited for a processor; by name those that ran or waited most, and those that once did."""
        found: Values = {}
        busy: list[tuple[int, int]] = []
        now: dict[int, tuple[int, int]] = {}
        for number, (file, _) in self._threads.items():
            try:
                ran, queued, _ = os.pread(file, 64, 0).split()
            except (OSError, ValueError):
                continue
            now[number] = (int(ran), int(queued))
            before = self._before.get(number, (0, 0))
            self._queued_ns += now[number][1] - before[1]
            busy.append((sum(now[number]) - sum(before), number))
        for number in self._threads.keys() - now.keys():
            os.close(self._threads.pop(number)[0])
            self._shown.discard(number)
        self._before = now
        busy.sort(reverse=True)
        room = MOST_THREADS_SHOWN - len(self._shown)
        fresh = [number for wanted, number in busy if wanted > 10_000_000 and number not in self._shown]
        self._shown.update(fresh[: max(0, room)])
        if now:
            found["queued_s"] = round(self._queued_ns / 1e9, 5)
            found["threads"] = len(now)
        for number in self._shown:
            key = f"thread.{number}.{self._threads[number][1]}."
            found[key + "cpu_s"] = round(now[number][0] / 1e9, 5)
            found[key + "queued_s"] = round(now[number][1] / 1e9, 5)
        return found

    def find_threads(self) -> None:
        try:
            there = {int(name) for name in os.listdir(f"/proc/{self._pid}/task")}
        except OSError:
            return
        for number in sorted(there - self._threads.keys())[: MOST_THREADS - len(self._threads)]:
            try:
                file = os.open(f"/proc/{self._pid}/task/{number}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                self.has_waits = os.path.exists("/proc/self/schedstat")
                continue
            name = _text(f"/proc/{self._pid}/task/{number}/comm").strip().decode(errors="replace").replace(".", "_")
            self._threads[number] = (file, name)

    def close(self) -> None:
        for file in (*self._files.values(), *(file for file, _ in self._threads.values())):
            os.close(file)
        self._files.clear()
        self._threads.clear()

    def _read(self, name: str) -> bytes:
        """A file that stays open. Nothing if it may not be read, or its process has ended."""
        try:
            if name not in self._files:
                self._files[name] = os.open(f"/proc/{self._pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
            return os.pread(self._files[name], 1 << 14, 0)
        except OSError:
            return b""


class System:
    """What all programs of the host use: processors, memory, disks, shared memory, datagrams."""

    def __init__(self) -> None:
        self._files: dict[str, int] = {}
        self._ticks_per_s = os.sysconf("SC_CLK_TCK")
        self._processors = os.cpu_count() or 1
        self.absent: list[str] = []
        for path, what in _SYSTEM.items():
            try:
                self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                self.absent.append(what)

    def read(self, values: Values) -> None:
        values["cpu.processors"] = self._processors
        first = self._read("/proc/stat").partition(b"\n")[0].split()
        if len(first) > 8:
            user, nice, system, _, waiting, irq, softirq, steal = (int(each) for each in first[1:9])
            values["cpu.busy_s"] = (user + nice + system + irq + softirq) / self._ticks_per_s
            values["cpu.disk_wait_s"] = waiting / self._ticks_per_s
            values["cpu.stolen_s"] = steal / self._ticks_per_s
        for line in self._read("/proc/meminfo").splitlines():
            if line.startswith(b"MemAvailable:"):
                values["memory.available_bytes"] = float(line.split()[1]) * 1024
                break
        for kind in ("cpu", "io", "memory"):
            # some avg10=0.00 avg60=0.00 avg300=0.00 total=MICROSECONDS
            total = self._read(f"/proc/pressure/{kind}").partition(b"\n")[0].rpartition(b"total=")[2]
            if total.isdigit():
                values[f"pressure.{kind}_s"] = int(total) / 1e6
        self._disks(values)
        try:
            shm = os.statvfs("/dev/shm")
            values["shm.used_bytes"] = (shm.f_blocks - shm.f_bfree) * shm.f_frsize
        except OSError:
            pass
        for line in self._read("/proc/self/net/snmp").splitlines():
            fields = line.split()
            if fields[:1] == [b"Udp:"] and fields[1].isdigit():
                values["udp.rx_packets"], values["udp.tx_packets"] = int(fields[1]), int(fields[4])

    def _disks(self, values: Values) -> None:
        for line in self._read("/proc/diskstats").splitlines():
            fields = line.split()
            name = fields[2].decode(errors="replace")
            # Whole disks that have done something: a partition's bytes are its disk's.
            if fields[5] == fields[9] == b"0" or not os.path.exists(f"/sys/block/{name}"):
                continue
            values[f"disk.{name}.read_bytes"] = int(fields[5]) * 512
            values[f"disk.{name}.written_bytes"] = int(fields[9]) * 512
            values[f"disk.{name}.busy_s"] = int(fields[12]) / 1e3

    def _read(self, path: str) -> bytes:
        file = self._files.get(path)
        try:
            if file is None:
                return b""
            # Of /proc/stat the first line is used, and the others grow with the processors.
            return os.pread(file, 1 << 10, 0) if path == "/proc/stat" else _all(file)
        except OSError:
            return b""


MOST_INTERFACES = 16
MOST_STREAMS = 4096
MOST_WORKERS = 256
MOST_THREADS = 512
"""Of a process. torch has as many as processors, and Penstock, gloo and loaders a few."""
MOST_THREADS_SHOWN = 12

_MEMORY = {b"VmRSS": "memory_bytes", b"RssShmem": "shared_memory_bytes"}
_DISK = {b"read_bytes": "disk_read_bytes", b"write_bytes": "disk_written_bytes", b"rchar": "read_bytes"}
_SYSTEM = {
    "/proc/stat": "processor time of the host",
    "/proc/meminfo": "free memory of the host",
    "/proc/diskstats": "disks",
    "/proc/self/net/snmp": "datagrams",
    "/proc/pressure/cpu": "pressure on processors (the kernel has no PSI)",
    "/proc/pressure/io": "pressure on disks (the kernel has no PSI)",
    "/proc/pressure/memory": "pressure on memory (the kernel has no PSI)",
}


def _opened(pid: int) -> _Process | None:
    fields = _fields(_text(f"/proc/{pid}/stat"))
    return None if fields is None or fields[0] in (b"Z", b"X") else _Process(pid, fields[19])


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _fields(stat: bytes) -> list[bytes] | None:
    """Of /proc/PID/stat, from the state on: the name before it may hold anything."""
    fields = stat.rpartition(b")")[2].split()
    return fields if len(fields) > 19 else None


def _owners_of_sockets(pids: Iterable[int]) -> dict[int, int]:
    """By inode of a socket, the first process that has it."""
    found: dict[int, int] = {}
    for pid in pids:
        try:
            names = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            continue
        for name in names:
            try:
                target = os.readlink(f"/proc/{pid}/fd/{name}")
            except OSError:
                continue
            if target.startswith("socket:["):
                found.setdefault(int(target[8:-1]), pid)
    return found


def _routing(question: Callable[[netlink.Netlink], Answer]) -> Answer:
    asked = netlink.Netlink(0)
    try:
        return question(asked)
    finally:
        asked.close()


def _place(place: tuple[bytes, int]) -> str:
    address, port = place
    return joined(socket.inet_ntop(socket.AF_INET if len(address) == 4 else socket.AF_INET6, address), port)


def _number(path: str) -> int | None:
    try:
        return int(_text(path))
    except ValueError:
        return None


def _text(path: str) -> bytes:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read(1 << 14)
    except OSError:
        return b""


def _all(file: int) -> bytes:
    """A file of /proc from its beginning; it may be longer than one read gives."""
    text = os.pread(file, 1 << 14, 0)
    # What one read gives may end at any line.
    while more := os.pread(file, 1 << 14, len(text)):
        text += more
    return text
