"""What went wrong in a run, as far as its records tell."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.numbers import plural
from penstock.profiling.record import Record

__all__ = ["complaints", "failures"]


def complaints(ranks: Sequence[Record]) -> list[str]:
    """What is missing from the records, one a rank, why that may be, and what to do: first what does not fit together, then what
    was given up. How ranks ended is in `failures`."""
    return [
        *_beside_each_other(ranks),
        *(text for record in ranks for text in [*record.problems, *_given_up(record)]),
    ]


def failures(ranks: Sequence[Record]) -> list[str]:
    """How ranks ended, if not well. The exception that was raised first stands first, since others are often due to it."""
    said, early = [], []
    for record in sorted(ranks, key=_ended_ns):
        if record.header.about.get("reader", "recorder") != "recorder":  # another tool's file, which does not tell
            continue
        kinds = {event.kind: event for event in record.events}
        if "exception" in kinds:
            what = " ".join(kinds["exception"].text.split()).removesuffix(":")
            said.append(f"rank {record.header.rank} ended with an exception: {what}")
        elif "end" not in kinds:
            early.append(record.header.rank)
    if early:
        early.sort()
        record_s, was, runs = ("records", "they were", "run") if len(early) > 1 else ("record", "it was", "runs")
        said.append(
            f"the {record_s} of {_named(early)} end{'' if len(early) > 1 else 's'} early: {was} killed or ended with os._exit, "
            f"still {runs} on another host, or the disk was full. What is there counts"
        )
    return said


def _ended_ns(record: Record) -> int:
    """By the wall clock of its host."""
    times = [event.time_ns for event in record.events if event.kind == "exception"]
    return record.header.wall_ns + min(times, default=0) - record.header.start_ns


def _beside_each_other(ranks: Sequence[Record]) -> list[str]:
    said = []
    world = max(record.header.world for record in ranks)
    missing = sorted(set(range(world)) - {record.header.rank for record in ranks})
    if missing:
        said.append(
            f"{len(ranks)} of {world} ranks {'have' if len(ranks) > 1 else 'has'} a record ({_named(missing)} "
            f"{'have' if len(missing) > 1 else 'has'} none): operations with the others are not told apart. --read a folder "
            "with the files of all hosts"
        )
    if len({record.header.world for record in ranks}) > 1:
        said.append("the records are of jobs of several sizes: are they of one run?")
    if len({str(record.header.about.get("job", "")) for record in ranks} - {""}) > 1:
        said.append(
            "the records are of several jobs, which wrote into one folder at the same time: ranks do not belong together. "
            "Give each job an --output of its own"
        )
    numbers = {record.header.rank: {step.number for step in record.steps} for record in ranks if record.steps}
    most = max((len(each) for each in numbers.values()), default=0)
    short = {rank: len(each) for rank, each in numbers.items() if len(each) < most}
    if short:
        least = min(short, key=lambda rank: (short[rank], rank))
        others = f" ({plural(len(short), 'rank')} in all have fewer)" if len(short) > 1 else ""
        said.append(
            f"rank {least} recorded {plural(short[least], 'step')}, others {most}{others}: each one's means are over its own"
        )
    if len(numbers) > 1 and not set.intersection(*numbers.values()):
        said.append("ranks have no step number in common: they do not step alike, or the records are of several runs")
    return said


def _given_up(record: Record) -> list[str]:
    """Samples, and what was too much to keep; clocks that jumped."""
    said = []
    for kind in ("profiler", "clock", "left out"):
        texts = list(dict.fromkeys(event.text for event in record.events if event.kind == kind))
        said += [f"rank {record.header.rank}: {text}" for text in texts[:MOST_ALIKE]]
        if len(texts) > MOST_ALIKE:
            said[-1] += f" (and {len(texts) - MOST_ALIKE} more like this)"
    return said


def _named(ranks: Sequence[int]) -> str:
    text = ", ".join(map(str, ranks[:MOST_NAMED])) + (", ..." if len(ranks) > MOST_NAMED else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


MOST_NAMED, MOST_ALIKE = 8, 3
"""Ranks in a sentence, and sentences of one kind about a rank."""
