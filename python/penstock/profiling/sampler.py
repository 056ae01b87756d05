"""Writes counters of the system down, as a process of its own beside the ranks of a host: `python -m penstock.profiling.sampler`.

One process a host, that is, a network namespace, so that what it reads is counted once, and the ranks spend no time on it. It
ends when the ranks have ended, or on SIGTERM. What it costs and writes is bounded: sources that change slowly or cost more are
read less often, and when the file has grown by `GROWTH_BYTES` the period doubles (docs/reference/profile-counters.md).
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from penstock.profiling.counters import Interfaces, Processes, Streams, System, Values
from penstock.profiling.gpus import Gpus
from penstock.profiling.record import Event, Header, Readings, line

__all__ = ["Sampler", "main"]


class Sampler:
    """Decides what is read when, and writes it. ``tick`` reads once; who calls it sleeps."""

    def __init__(self, pids: Sequence[int], path: Path, period_ns: int, *, host: str | None = None) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self.period_ns = self._first_period_ns = period_ns
        self._interfaces = Interfaces()
        self._processes = Processes(pids)
        self._streams = Streams()
        self._system = System()
        self._gpus: Gpus | None = None
        self._start_ns = 0
        self._said: set[str] = set()
        self._written = 0
        self._since_doubling = 0
        self._due: dict[str, int] = {}
        self._discovery_ns = FIRST_DISCOVERY_NS
        named = path.stem.removeprefix("host-") if path.name.startswith("host-") else socket.gethostname()
        self._write(line(_header(pids, host or named, period_ns)))

    @property
    def _slower(self) -> int:
        return self.period_ns // self._first_period_ns

    @property
    def is_needed(self) -> bool:
        """Whether one of the ranks is still there."""
        return bool(self._processes.pids)

    def _rarely(self, usual_ns: int) -> int:
        """How often what costs more is read. Who asks for shorter periods than usual has that more often, too."""
        if self._first_period_ns < USUAL_PERIOD_NS:
            usual_ns = min(usual_ns, PERIODS * self._first_period_ns)
        return self._slower * max(usual_ns, self._first_period_ns)

    def tick(self, now_ns: int) -> None:
        """Read what is due.

        Raises: OSError, if it cannot be written. The file then ends with a whole line.
        """
        values: Values = {}
        self._start_ns = self._start_ns or now_ns
        if self._is_due("discovery", now_ns, self._discovery_ns):
            self._discover(now_ns)
        self._interfaces.read(values)
        self._processes.read(values)
        # A reading of many streams comes as much later as it costs more.
        streams_ns = max(self._rarely(STREAMS_NS), self._slower * (self._streams.count // 16) * SIXTEEN_STREAMS_NS)
        if self._is_due("streams", now_ns, streams_ns) and not self._streams.read(values):
            self._hurry(now_ns)
        # A short run has few readings; so there are more of them at first.
        slow_ns = self._rarely(SLOW_NS if now_ns >= self._start_ns + EARLY_NS else SLOW_NS // 2)
        if self._is_due("slow", now_ns, slow_ns):
            self._processes.details(values)
            self._system.read(values)
            if self._gpus is None:
                self._gpus = Gpus()
            self._gpus.read(values)
        if self._is_due("limits", now_ns, LIMITS_NS):
            self._interfaces.limits(values)
        if self._is_due("stream", now_ns, max(slow_ns, self._streams.count * slow_ns // 64)):
            self._streams.details(values)
        self._write(line(Readings(now_ns, values)))
        self._say_absent(now_ns)
        if self._since_doubling > GROWTH_BYTES:
            self._since_doubling = 0
            self.period_ns *= 2
            text = f"from here on every {self.period_ns / 1e6:g} ms: the file has {self._written} bytes"
            self._write(line(Event(now_ns, "period", text)))

    def close(self, now_ns: int) -> None:
        """The last state of what is still there, and the end."""
        values: Values = {}
        self._interfaces.read(values)
        self._processes.read(values)
        self._processes.details(values)
        self._streams.read(values)
        self._streams.details(values)
        self._write(line(Readings(now_ns, values)) + line(Event(now_ns, "end")))
        if self._gpus is not None:
            self._gpus.close()

    def _discover(self, now_ns: int) -> None:
        fresh = self._streams.discover(self._processes.discover())
        for text in fresh:
            self._write(line(Event(now_ns, "stream", text)))
        # A job opens its connections early. Where nothing is new there is less and less to look for.
        self._discovery_ns = FIRST_DISCOVERY_NS if fresh else min(2 * self._discovery_ns, LAST_DISCOVERY_NS)

    def _hurry(self, now_ns: int) -> None:
        """A connection has ended, so others may have begun."""
        self._discovery_ns = FIRST_DISCOVERY_NS
        self._due["discovery"] = min(self._due["discovery"], now_ns + FIRST_DISCOVERY_NS)

    def _is_due(self, what: str, now_ns: int, every_ns: int) -> bool:
        if now_ns < self._due.get(what, 0):
            return False
        self._due[what] = now_ns + every_ns - self.period_ns // 2
        return True

    def _say_absent(self, now_ns: int) -> None:
        for source in (self._interfaces, self._processes, self._streams, self._system, self._gpus):
            for text in source.absent if source is not None else ():
                if text not in self._said:
                    self._said.add(text)
                    self._write(line(Event(now_ns, "absent", text)))

    def _write(self, text: str) -> None:
        given = text.encode()
        done = 0
        try:
            while done < len(given):
                done += os.write(self._file, given[done:])
        except OSError:
            # What was begun of a line says nothing. The file's length is all that was written before.
            try:
                os.ftruncate(self._file, self._written)
            except OSError:
                pass
            raise
        self._written += done
        self._since_doubling += done


def main(arguments: Sequence[str] | None = None) -> int:
    """The process: reads until the ranks have ended, or SIGTERM."""
    import argparse

    parser = argparse.ArgumentParser(prog="python -m penstock.profiling.sampler", description=__doc__.split("\n")[0])
    parser.add_argument("--pids", required=True, help="the ranks on this host, with commas")
    parser.add_argument("--out", required=True, type=Path, help="the file to write")
    parser.add_argument("--period-ms", type=float, default=100, help="10 or more; 100 by default")
    parser.add_argument(
        "--host", help="as in the ranks' files; by default what stands in the file's name, host-NAME.jsonl"
    )
    parser.add_argument(
        "--detach", action="store_true", help="go on as nobody's child, and print the number of the process"
    )
    given = parser.parse_args(arguments)
    try:
        pids = [int(pid) for pid in given.pids.split(",")]
    except ValueError:
        parser.error(f"--pids {given.pids}: give numbers with commas")
    if not 10 <= given.period_ms <= 60_000:
        parser.error(f"--period-ms {given.period_ms:g}: give 10 to 60000")
    if given.detach:
        _detach()
    # Ctrl-C is for the ranks, which may have something to save; their end is ours.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        sampler = Sampler(pids, given.out, round(given.period_ms * 1e6), host=given.host)
        _run(sampler)
    except OSError as error:
        print(f"penstock profile: no more counters in {given.out}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def _detach() -> None:
    child = os.fork()
    if child:
        os.write(1, f"{child}\n".encode())
        os._exit(0)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.close(nothing)


def _run(sampler: Sampler) -> None:
    due_ns = time.monotonic_ns()
    while sampler.is_needed:
        sampler.tick(time.monotonic_ns())
        now_ns = time.monotonic_ns()
        # After a pause of the machine, missed readings are not made up for.
        due_ns = max(due_ns + sampler.period_ns, now_ns)
        if signal.sigtimedwait({signal.SIGTERM}, (due_ns - now_ns) / 1e9) is not None:
            break
    sampler.close(time.monotonic_ns())


USUAL_PERIOD_NS = 100_000_000
PERIODS = 5
FIRST_DISCOVERY_NS = 500_000_000
LAST_DISCOVERY_NS = 16_000_000_000
SLOW_NS = 2_000_000_000
STREAMS_NS = 500_000_000
SIXTEEN_STREAMS_NS = 100_000_000
EARLY_NS = 10_000_000_000
LIMITS_NS = 30_000_000_000

GROWTH_BYTES = 64 << 20


def _header(pids: Sequence[int], host: str, period_ns: int) -> Header:
    """Of the first rank here; `about` says that these are counters, of whom, and how often they are read."""
    ranks, world = {}, 1
    for pid in pids:
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        given = dict(each.partition(b"=")[::2] for each in environment)
        if given.get(b"RANK", b"").isdigit():
            ranks[int(given[b"RANK"])] = pid
            if given.get(b"WORLD_SIZE", b"").isdigit():
                world = max(world, int(given[b"WORLD_SIZE"]))
    first = min(ranks, default=0)
    return Header(
        rank=first,
        world=max(world, first + 1),
        host=host,
        pid=os.getpid(),
        start_ns=time.monotonic_ns(),
        wall_ns=time.time_ns(),
        about={
            "counters": True,
            "ranks": {str(rank): pid for rank, pid in sorted(ranks.items())},
            "period_ms": period_ns / 1e6,
        },
    )


if __name__ == "__main__":
    sys.exit(main())
