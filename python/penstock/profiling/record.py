"""What `penstock profile` records of one rank, and the file that it is kept in.

A file holds JSON objects, one a line: a `Header` first, then what happened, in the order in which it was written. A rank that
dies leaves a file that ends early, and what stands in it counts. All times are nanoseconds of the rank's host's monotonic
clock; `Header.wall_ns` and `clocks.py` lead from there to other hosts. Files may come from anywhere: `read` believes nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from penstock.errors import Config
from penstock.texts import checked, harmless

__all__ = [
    "Ended",
    "Endings",
    "Event",
    "Header",
    "Interval",
    "Operation",
    "Ran",
    "Readings",
    "Record",
    "Sample",
    "Span",
    "Step",
    "Wait",
    "Watch",
    "line",
    "read",
]

FORMAT = "penstock-profile/1"

Interval = tuple[int, int]
"""From the first to just before the second, in ns."""


@dataclass(frozen=True)
class Header:
    """Who recorded."""

    rank: int
    world: int
    host: str
    """A name that two ranks share if and only if they share a clock and network interfaces."""
    pid: int
    start_ns: int
    wall_ns: int
    """Nanoseconds since 1970 at `start_ns`."""
    about: dict[str, Any] = field(default_factory=dict)
    """For people: versions, backend, command, device."""


class Span(NamedTuple):
    """What the training thread did: a part of a step by name (`breakdown.PHASES`). Spans may lie within others.

    *Why a tuple?* The recorder makes some in each step, and a frozen dataclass takes three times as long.
    """

    phase: str
    start_ns: int
    end_ns: int


class Wait(NamedTuple):
    """The training thread stood in a call that waits for communication, such as ``Work.wait`` or a blocking collective."""

    start_ns: int
    end_ns: int
    operation: str = ""
    """As in `Operation`, or nothing if the call does not tell."""
    group: str = ""


class Step(NamedTuple):
    """One iteration: from the end of an optimizer's step to the end of its next one."""

    number: int
    start_ns: int
    end_ns: int
    spans: tuple[Span, ...] = ()
    waits: tuple[Wait, ...] = ()
    thread_ns: int = 0
    """Processor time of the training thread."""
    examples: int = 0
    """What the loader's batches held, as far as that is known."""


@dataclass(frozen=True)
class Operation:
    """A collective, a send or a receive."""

    name: str
    """Such as ``all_reduce``, ``send`` and ``recv``."""
    group: str
    """The name of its process group, the same on all its ranks."""
    number: int
    """Counts the operations of the same name, group and peer within the step, from 0 on."""
    issued_ns: int
    ended_ns: int
    bytes: int = 0
    """Of its input here."""
    ranks: int = 0
    """In its group; 0 if unknown."""
    peer: int | None = None
    """Of a send or receive: the other rank, in the whole job."""
    purpose: str = ""
    """One of `breakdown.PURPOSES`, if the recorder could tell."""
    element_bytes: int = 0
    """Of a number in it; 0 if unknown."""
    tag: int = 0
    """Of a send or receive: only those of one tag belong together."""


@dataclass(frozen=True)
class Sample:
    """What torch's profiler saw in one step: it costs too much to run in all."""

    step: int
    busy: tuple[Interval, ...] = ()
    """When the training thread ran torch's operators, in order, without overlap. Those that only wait are not in it."""
    operations: tuple[Operation, ...] = ()
    dropped: int = 0
    """Operations that were left out since there were too many."""
    device: Step | None = None
    """The same step as a GPU lived it: its kernels by the phase of their launch, and as waits where it only communicated."""


class Ended(NamedTuple):
    """An operation as Penstock's engine remembers it, or as a watch has it by comparison with samples (`watched.py`)."""

    channel: str
    """Within the job, as the engine calls it: the same on all ranks; of a message with its tag."""
    number: int
    """Within its channel, and of a message from the same rank to the same: the same on all ranks."""
    group: str
    """As in `Operation`."""
    name: str
    issued_ns: int
    ended_ns: int
    peer: int | None = None
    """As in `Operation`."""


@dataclass(frozen=True)
class Endings:
    """Operations of Penstock's engine that have ended, in all steps. It takes them later than a sample does, and notes their ends
    earlier, by some tenths of a millisecond: torch and Python lie between."""

    until_ns: int
    """All that ended until then stand in this line and those before."""
    missing: int
    """But so many."""
    operations: tuple[Ended, ...]
    since_ns: int = 0
    """None of those that are missing was issued before; 0: that is not known."""


class Ran(NamedTuple):
    """An operation as torch's profiler shows it without its call."""

    name: str
    """As in `Operation`."""
    began_ns: int
    """When a thread of its backend took it, which is some time after it was issued."""
    ended_ns: int


@dataclass(frozen=True)
class Watch:
    """gloo's operations as torch's profiler saw them, without the calls: in a sample, or in steps between, where it recorded no
    operators."""

    since_ns: int
    until_ns: int
    """All that gloo's threads took between, and the training thread had issued, stand in it."""
    operations: tuple[Ran, ...]
    """In the order in which they were taken."""


@dataclass(frozen=True)
class Readings:
    """Counters of the system at one moment. The rates are theirs to compute who read."""

    time_ns: int
    values: dict[str, float]
    """By name with unit, such as ``eth0.rx_bytes`` (`counters.py`)."""


@dataclass(frozen=True)
class Event:
    """Something that happened once, such as ``exception``, ``checkpoint`` or ``end`` (docs/reference/profile.md has all)."""

    time_ns: int
    kind: str
    text: str = ""


@dataclass
class Record:
    """All that one rank recorded, or that a reader made of another tool's file."""

    header: Header
    steps: list[Step] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    readings: list[Readings] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """What is wrong with the file, in words for its owner."""
    endings: list[Endings] = field(default_factory=list)
    watches: list[Watch] = field(default_factory=list)

    @property
    def has_ddp(self) -> bool:
        """Whether a DistributedDataParallel, or a GradientReducer, may have summed gradients: the recorder has not said no."""
        return not any(event.kind == "no ddp" for event in self.events)

    @property
    def is_of_host(self) -> bool:
        """Whether this is the sampler's record of a host's counters, and so no rank's."""
        return bool(self.header.about.get("counters"))


_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


def line(what: Header | Step | Sample | Endings | Watch | Readings | Event) -> str:
    """What happened as a line of the file, with its end."""
    return _encode(_WRITERS[type(what)](what)) + "\n"


def read(path: Path, file: Any = None) -> Record:
    """A rank's record from its file.

    Lines that make no sense are left out, and `Record.problems` counts them; so does a last line without an end. A second header,
    as in files that were joined, ends the record, for what follows is of another.

    Args:
        file: what has the text, by its ``readline``, if the file itself does not: it may be packed.

    Raises:
        Config: the file cannot be read, is none of ours, or is of another version.
    """
    if file is not None:
        return _read(file, path)
    try:
        with path.open(encoding="utf-8", errors="replace") as opened:
            return _read(opened, path)
    except OSError as error:
        raise Config(f"cannot read {path}: {error.strerror}") from error


MOST_LINE = 16 << 20
MOST_VALUE = 1e18
"""Characters of a line. A sample with 10^5 operations has 10^7."""


def _read(file: Any, path: Path) -> Record:
    lines = _lines(file)
    first = next(lines, None)
    given = _object(first[0]) if first else None
    if given is None or not _is_header(given):
        raise Config(f"{path} is no profile of penstock: its first line does not say so")
    if given["format"] != FORMAT:
        text = f"{path} is a {str(given['format'])[:64]}, and this penstock reads {FORMAT}"
        raise Config(f"{text}: read it with the penstock that wrote it, or record anew with this one")
    header = _attempt(_header, given)
    if header is None:
        raise Config(f"{path}: its first line does not say which rank of which job recorded it")
    record = Record(header)
    bad = 0
    for number, (text, is_whole) in enumerate(lines, 2):
        given = _object(text) if is_whole else None
        # What is joined to a file without its last end stands in the midst of a line.
        if _is_header(given) if given is not None else _HEADER in text:
            record.problems.append(
                f"{path.name} holds a second record from line {number} on, as files that were joined do: it is left out. Give "
                "each record a file of its own"
            )
            break
        kept = given is not None and _keep(record, given)
        if not kept and not is_whole:
            record.problems.append(f"{path.name} ends within a line: its rank was stopped, or the disk was full")
        elif not kept:
            bad += 1
    if bad:
        record.problems.append(f"{path.name}: {bad} lines make no sense and are left out")
    record.steps.sort(key=lambda step: step.number)
    return record


_HEADER = '"format":"penstock-profile/'
"""As `line` writes it. In a text of a line its quotes would have signs before them."""


def _is_header(given: dict[str, Any]) -> bool:
    return str(given.get("format", "")).startswith("penstock-profile/")


def _lines(file: Any) -> Iterator[tuple[str, bool]]:
    """Lines, and whether each is whole. One that is too long counts as broken."""
    while text := file.readline(MOST_LINE):
        is_whole = text.endswith("\n")
        if not is_whole and len(text) >= MOST_LINE:
            while (more := file.readline(MOST_LINE)) and not more.endswith("\n"):
                pass
            yield "", True
            continue
        yield text, is_whole


def _object(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _keep(record: Record, given: dict[str, Any]) -> bool:
    for key, (make, add) in _READERS.items():
        if key in given:
            made = _attempt(make, given)
            if made is not None:
                add(record, made)
            return made is not None
    return False


_Made = TypeVar("_Made")


def _attempt(make: Callable[[dict[str, Any]], _Made], given: dict[str, Any]) -> _Made | None:
    try:
        return make(given)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, OverflowError, RecursionError):
        return None


def _time(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise ValueError("no time")
    return value


def _count(value: Any) -> int:
    return _time(value)


def _ordered(start: Any, end: Any) -> Interval:
    start_ns, end_ns = _time(start), _time(end)
    if end_ns < start_ns:
        raise ValueError("ends before it starts")
    return start_ns, end_ns


def _about(value: Any) -> Any:
    """Objects of texts, numbers and flags."""
    if isinstance(value, dict):
        return {checked(name): _about(each) for name, each in value.items()}
    if isinstance(value, str):
        return harmless(value)
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError("no text, number or flag")
    return value


def _header(given: dict[str, Any]) -> Header:
    rank, world = _count(given["rank"]), _count(given["world"])
    if not rank < world <= 1 << 20:
        raise ValueError("no such rank")
    about = given.get("about", {})
    if not isinstance(about, dict):
        raise ValueError("no object")
    return Header(
        rank,
        world,
        checked(given["host"]),
        _count(given["pid"]),
        _time(given["start"]),
        _time(given["wall"]),
        _about(about),
    )


def _step(given: dict[str, Any]) -> Step:
    start_ns, end_ns = _ordered(given["start"], given["end"])
    return Step(
        _count(given["step"]),
        start_ns,
        end_ns,
        tuple(Span(checked(phase), *_ordered(start, end)) for phase, start, end in given.get("spans", ())),
        tuple(
            Wait(*_ordered(start, end), checked(operation), checked(group))
            for start, end, operation, group in given.get("waits", ())
        ),
        _time(given.get("thread", 0)),
        _count(given.get("examples", 0)),
    )


def _operation(given: Any) -> Operation:
    name, group, number, issued, ended, length, ranks, peer, purpose, *more = given
    return Operation(
        checked(name),
        checked(group),
        _count(number),
        *_ordered(issued, ended),
        _count(length),
        _count(ranks),
        None if peer is None else _count(peer),
        checked(purpose),
        *(_count(each) for each in more[:2]),
    )


def _sample(given: dict[str, Any]) -> Sample:
    busy: list[Interval] = []
    for start, end in given.get("busy", ()):
        found = _ordered(start, end)
        if busy and found[0] < busy[-1][1]:
            raise ValueError("overlaps")
        busy.append(found)
    operations = tuple(_operation(each) for each in given.get("operations", ()))
    device = given.get("device")
    return Sample(
        _count(given["sample"]),
        tuple(busy),
        operations,
        _count(given.get("dropped", 0)),
        None if device is None else _step(device),
    )


def _ended(given: Any) -> Ended:
    channel, number, group, name, issued, ended, *more = given
    peer = _count(more[0]) if more and more[0] is not None else None
    return Ended(checked(channel), _count(number), checked(group), checked(name), *_ordered(issued, ended), peer)


def _endings(given: dict[str, Any]) -> Endings:
    operations = tuple(map(_ended, given["operations"]))
    return Endings(_time(given["ended"]), _count(given.get("missing", 0)), operations, _time(given.get("since", 0)))


def _watch(given: dict[str, Any]) -> Watch:
    since, until = given["watched"]
    operations = tuple(Ran(checked(name), *_ordered(began, ended)) for name, began, ended in given["operations"])
    return Watch(*_ordered(since, until), operations)


def _readings(given: dict[str, Any]) -> Readings:
    values = {checked(name): float(value) for name, value in given["values"].items()}
    if not all(abs(value) < MOST_VALUE for value in values.values()):
        raise ValueError("no number of bytes or seconds")
    return Readings(_time(given["readings"]), values)


def _event(given: dict[str, Any]) -> Event:
    return Event(_time(given["time"]), checked(given["event"]), checked(given.get("text", "")))


_READERS: dict[str, tuple[Callable[[dict[str, Any]], Any], Callable[[Record, Any], None]]] = {
    "step": (_step, lambda record, made: record.steps.append(made)),
    "sample": (_sample, lambda record, made: record.samples.append(made)),
    "ended": (_endings, lambda record, made: record.endings.append(made)),
    "watched": (_watch, lambda record, made: record.watches.append(made)),
    "readings": (_readings, lambda record, made: record.readings.append(made)),
    "event": (_event, lambda record, made: record.events.append(made)),
}


_WRITERS: dict[type, Callable[[Any], dict[str, Any]]] = {
    Header: lambda header: {
        "format": FORMAT,
        "rank": header.rank,
        "world": header.world,
        "host": header.host,
        "pid": header.pid,
        "start": header.start_ns,
        "wall": header.wall_ns,
        "about": header.about,
    },
    Step: lambda step: {
        "step": step.number,
        "start": step.start_ns,
        "end": step.end_ns,
        "spans": step.spans,
        "waits": step.waits,
        "thread": step.thread_ns,
        "examples": step.examples,
    },
    Sample: lambda sample: {
        "sample": sample.step,
        "busy": [list(each) for each in sample.busy],
        "operations": [[getattr(one, each.name) for each in fields(Operation)] for one in sample.operations],
        "dropped": sample.dropped,
        **({} if sample.device is None else {"device": _WRITERS[Step](sample.device)}),
    },
    Endings: lambda endings: {
        "ended": endings.until_ns,
        "missing": endings.missing,
        **({"since": endings.since_ns} if endings.since_ns else {}),
        "operations": [one if one.peer is not None else one[:-1] for one in endings.operations],
    },
    Watch: lambda watch: {"watched": [watch.since_ns, watch.until_ns], "operations": watch.operations},
    Readings: lambda readings: {"readings": readings.time_ns, "values": readings.values},
    Event: lambda event: {"event": event.kind, "time": event.time_ns, "text": event.text},
}
