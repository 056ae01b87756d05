"""Files of profilers, ours and others', as records; as a breakdown if sums are all there is (docs/design/profile-files.md)."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from penstock.errors import Config
from penstock.profiling import record
from penstock.profiling.breakdown import Breakdown
from penstock.profiling.divide import WARM_UP_STEPS
from penstock.profiling.readers import inspector, kineto, megatron
from penstock.profiling.readers.source import WHAT_WE_READ, opened
from penstock.profiling.record import Record

__all__ = ["load"]


def load(path: Path, *, pipeline_stages: int | None = None) -> list[Record] | Breakdown:
    """What is in a file, or in a folder of files of one kind. The kind is told by what stands in a file, not by its name.

    Args:
        pipeline_stages: of a log of Megatron that does not hold Megatron's arguments.

    Raises:
        Config: it cannot be read, is of no kind that we read, or holds several kinds.
    """
    path = Path(path)
    try:
        if not path.is_dir():
            return _of(_kind(path), [path], pipeline_stages)
        there = (each for each in path.iterdir() if each.is_file() and not each.name.startswith("."))
        files = sorted(there, key=lambda each: (_by_numbers(each.name), each.name))
    except Config:
        raise
    except (OSError, ValueError) as error:
        raise Config(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    if len(files) > MOST_FILES:
        raise Config(f"{path} holds {len(files)} files, more than {MOST_FILES}: give the folder of one run")
    kinds: dict[str, list[Path]] = {}
    for each in files:
        kinds.setdefault(_kind(each), []).append(each)
    strange = kinds.pop("", [])
    # Beside what was recorded may lie what was made of it; beside traces, what a script printed.
    for kind in ("trace", "inspector", "megatron") if "ours" in kinds else ("megatron",) if len(kinds) > 1 else ():
        strange += kinds.pop(kind, [])
    if len(kinds) > 1:
        told = ", ".join(f"{NAMES[kind]} ({paths[0].name})" for kind, paths in sorted(kinds.items()))
        raise Config(f"{path} holds files of several kinds: {told}. Give one of them, or a folder of one kind")
    if not kinds:
        raise Config(f"{path} holds no file that we read: {WHAT_WE_READ}")
    ((kind, paths),) = kinds.items()
    found = _of(kind, paths, pipeline_stages)
    if strange and isinstance(found, list):
        found[0].problems.append(
            f"{path} also holds {', '.join(each.name for each in strange[:5])}, which was not read"
        )
    return found


def _by_numbers(name: str) -> list[str | int]:
    """Sorts rank2 before rank10: texts and numbers by turns."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def _kind(path: Path) -> str:
    """`ours`, `trace`, `inspector`, `megatron` (any other text), or nothing."""
    with opened(path) as text:
        head = ""
        while len(head) < HEAD and (more := text.read()):
            head += more
    plain = head.lstrip()
    first = plain.partition("\n")[0]
    if '"format"' in first[:4096] and "penstock-profile/" in first[:4096]:
        return "ours"
    if plain[:1] in ("{", "["):
        return "inspector" if inspector.is_one(first) else "trace"
    return "" if not plain or "\0" in head or head.count("�") > len(head) // 100 else "megatron"


def _of(kind: str, paths: Sequence[Path], pipeline_stages: int | None) -> list[Record] | Breakdown:
    if kind == "ours":
        return _ours(paths)
    if kind == "trace":
        return kineto.records(paths)
    if kind == "inspector":
        return inspector.breakdown(paths)
    if kind == "megatron":
        if len(paths) > 1:
            raise Config(f"{paths[0].parent} holds several text files, and no records: give the log that is to be read")
        return megatron.breakdown(megatron.read(paths[0]), pipeline_stages)
    raise Config(f"{paths[0]} is {_looks_like(paths[0])}: {WHAT_WE_READ}")


def _ours(paths: Sequence[Path]) -> list[Record]:
    """Records of ranks, with the readings of their hosts."""
    found: dict[int, Record] = {}
    hosts: list[Record] = []
    for path in paths:
        with opened(path) as text:
            each = record.read(path, text)
            each.problems += [text.problem] if text.problem else []
        if not each.steps and not each.samples and each.readings:
            hosts.append(each)
        elif each.header.rank in found:
            found[each.header.rank].problems.append(
                f"{path.name} is of rank {each.header.rank}, as another file is: it is left out"
            )
        else:
            found[each.header.rank] = each
    for each in found.values():
        each.problems += _at_once(each, paths[0].parent)
    if not found:
        if len(paths) == 1 and hosts:
            raise Config(f"{paths[0]} holds counters of a host and no rank: give the folder that it lies in")
        raise Config(f"{paths[0].parent} holds no rank's file")
    ranks = [_of_device(found[rank]) for rank in sorted(found)]
    for name in dict.fromkeys(each.header.host for each in ranks):
        # What a rank counts of its own engine belongs to its host's counters.
        its = [each for each in [*hosts, *ranks] if each.header.host == name and each.readings]
        readings = sorted((one for each in its for one in each.readings), key=lambda reading: reading.time_ns)
        for each in ranks:
            if each.header.host == name:
                each.readings = readings
    for host in hosts:
        its = [each for each in ranks if each.header.host == host.header.host]
        for each in its:
            streams = [event for event in host.events if event.kind == "stream"]
            each.events = sorted([*each.events, *streams], key=lambda event: event.time_ns)
        (its or ranks)[0].problems += host.problems
        if not its:
            ranks[0].problems.append(f"the counters of host {host.header.host} belong to no rank that is there")
    return ranks


def _at_once(each: Record, folder: Path) -> list[str]:
    """Other processes called themselves this rank, too, and had not ended when this one began, as earlier lives of a rank have:
    their records were moved away."""
    said = []
    for path in sorted(folder.glob(f"before-*/rank-{each.header.rank}.jsonl")):
        with contextlib.suppress(Config):
            other = record.read(path)
            last_ns = max(
                [*(step.end_ns for step in other.steps), *(event.time_ns for event in other.events)], default=0
            )
            if other.header.wall_ns + last_ns - other.header.start_ns > each.header.wall_ns + AT_ONCE_NS:
                said.append(
                    f"several programs trained as rank {each.header.rank} at the same time, and were no ranks of one job. Shown "
                    f"is process {each.header.pid}; {path.parent} holds another one (penstock profile --read {path.parent})"
                )
    return said


def _of_device(each: Record) -> Record:
    """Where steps ran on a GPU, its record is that of the sampled ones: of the others the host's side alone is known."""
    steps = [sample.device for sample in each.samples if sample.device is not None]
    if not steps:
        return each
    later = each.steps[WARM_UP_STEPS:] or each.steps
    mean_ns = sum(step.end_ns - step.start_ns for step in later) / len(later) if later else 0
    each.problems.append(
        f"rank {each.header.rank} computes on a GPU, whose timeline is known in {len(steps)} samples: the table is of these. "
        f"All {len(later)} steps took {mean_ns / 1e6:.1f} ms in the mean"
    )
    about = {**each.header.about, "reader": "recorder", "device": "gpu"}
    header = dataclasses.replace(each.header, about=about)
    sampled = [sample for sample in each.samples if sample.device is not None]
    return Record(header, steps, sampled, each.readings, each.events, each.problems)


def _looks_like(path: Path) -> str:
    with path.open("rb") as file:
        head = file.read(16)
    if not head:
        return "empty"
    return next((what for sign, what in SIGNS if head.startswith(sign)), "no text")


SIGNS = (
    (b"SQLite format 3", "a database (as Nsight Systems exports)"),
    (b"PK\x03\x04", "a zip archive: unpack it first"),
    (b"\x28\xb5\x2f\xfd", "packed with zstd: unpack it first"),
    (b"BZh", "packed with bzip2: unpack it first"),
    (b"\xfd7zXZ", "packed with xz: unpack it first"),
    (b"\x1f\x8b", "a gzip file without text"),
    (b"\x80", "a pickle, which we never read: it may run any program"),
    (b"\x7fELF", "a program"),
)
NAMES = {
    "ours": "records of penstock",
    "trace": "traces of torch.profiler",
    "inspector": "files of NCCL's inspector",
    "megatron": "logs",
}
HEAD, MOST_FILES = 1 << 16, 16_384
AT_ONCE_NS = 1_000_000_000
"""By which the times of two processes may differ that ran one after the other: wall clocks of hosts do."""
