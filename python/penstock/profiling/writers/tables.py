"""A breakdown as CSV, for spreadsheets, and as JSON, from which it can be read again; and what was used over time, in both."""

from __future__ import annotations

import csv as library
import dataclasses
import json as encoder
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from penstock.errors import Config
from penstock.profiling.advice import Change
from penstock.profiling.breakdown import PHASES, PURPOSES, Breakdown, Moving, OneStep, Share
from penstock.profiling.usage import Group, Line
from penstock.profiling.utilisation import Drop
from penstock.profiling.writers.whole import whole

__all__ = ["csv", "from_json", "json", "steps_csv", "usage_csv"]

FORMAT = "penstock-breakdown/1"

COLUMNS = (
    "rank",
    "steps",
    "sampled_steps",
    "what",
    "kind",
    "exposed",
    "ns_per_step",
    "share_of_step",
    "bytes_per_step",
    "operations_per_step",
    "waited_for",
)
"""docs/reference/profile.md says what they hold."""

STEP_COLUMNS = (
    "rank",
    "step",
    "counted",
    "sampled",
    "start_ns",
    "step_ns",
    *(f"{phase.replace(' ', '_')}_ns" for phase in PHASES),
    "exposed_ns",
    "exposed_wire_ns",
    "exposed_wait_ns",
    "hidden_wire_ns",
    "hidden_wait_ns",
    "examples",
)

USAGE_COLUMNS = ("what", "unit", "line", "host", "counter", "start_ns", "end_ns", "value")


def csv(breakdown: Breakdown, path: Path) -> None:
    """Write a row for each part of each rank's mean step. Rows with ``exposed`` 1 sum to the step.

    Raises:
        Config: the file cannot be written.
    """
    rows = ((share.rank, share.steps, share.sampled, *row) for share in breakdown.shares for row in _rows(share))
    _write(path, COLUMNS, rows)


def steps_csv(steps: Iterable[OneStep], path: Path) -> None:
    """Write a row for each step of each rank. A step is the sum of its phases and of what is exposed.

    Raises:
        Config: the file cannot be written.
    """
    _write(path, STEP_COLUMNS, map(_row_of_step, steps))


def _row_of_step(one: OneStep) -> tuple[object, ...]:
    head = (one.rank, one.number, int(one.is_counted), int(one.is_sampled), one.start_ns, one.step_ns)
    phases = (round(one.work.get(phase, 0.0)) for phase in PHASES)
    told = one.moving
    moved: Sequence[object] = [""] * 4
    if told is not None:
        parts = (told.exposed_wire_ns, told.exposed_wait_ns, told.hidden_wire_ns, told.hidden_wait_ns)
        moved = [round(part) for part in parts]
    return (*head, *phases, round(one.exposed_ns), *moved, one.examples)


def usage_csv(used: Iterable[Group], path: Path) -> None:
    """Write a row for each point of each line.

    Raises:
        Config: the file cannot be written.
    """
    _write(
        path,
        USAGE_COLUMNS,
        (
            (group.what, group.unit, line.label, line.host, line.counter, start, end, _plain(value))
            for group in used
            for line in group.lines
            for (start, end), value in line.points
        ),
    )


def _write(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    with whole(path) as file:
        writer = library.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)


def json(
    breakdown: Breakdown,
    path: Path,
    changes: Sequence[Change] = (),
    used: Sequence[Group] = (),
    drops: Sequence[Drop] = (),
) -> None:
    """Write a breakdown so that `from_json` gives the same; beside it the ranked list of changes, where traffic fell, and what
    was used over time.

    Raises:
        Config: the file cannot be written.
    """
    content = {
        "format": FORMAT,
        "unit": "nanoseconds of a mean step",
        "shares": [dataclasses.asdict(share) for share in breakdown.shares],
        "examples_per_s": breakdown.examples_per_s,
        "offsets_ns": {host: list(offset) for host, offset in breakdown.offsets_ns.items()},
        "problems": [*breakdown.failures, *breakdown.problems],
        "notes": list(breakdown.notes),
        "changes": [_change(each) for each in changes],
        "drops": [_drop(each) for each in drops],
    }
    with whole(path) as file:
        text = encoder.dumps(content, indent=1, allow_nan=False)
        # A line of the file for each line over time, which may have hundreds of points.
        file.write(f'{text[:-2]},\n "utilisation": [')
        lines = (encoder.dumps(_line(group, line), allow_nan=False) for group in used for line in group.lines)
        file.write(",".join(f"\n  {line}" for line in lines))
        left_out = {group.what: group.left_out for group in used if group.left_out}
        file.write(f'\n ],\n "utilisation_left_out": {encoder.dumps(left_out)}\n}}\n')


def from_json(path: Path) -> Breakdown:
    """The breakdown of a file that `json` wrote.

    Raises:
        Config: the file cannot be read, is none of ours, is of another version, or makes no sense.
    """
    try:
        given = encoder.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Config(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise Config(f"{path} is no breakdown of penstock: it is no JSON, or it is cut off") from error
    found = given.get("format") if isinstance(given, dict) else None
    if not isinstance(found, str) or not found.startswith("penstock-breakdown/"):
        raise Config(f"{path} is no breakdown of penstock: it does not say so")
    if found != FORMAT:
        raise Config(
            f"{path} is a {found}, and this is the reader of {FORMAT}: read it with the penstock that wrote it"
        )
    try:
        return Breakdown(
            tuple(_share(each) for each in given["shares"]),
            {str(host): (_number(add), _number(wrong)) for host, (add, wrong) in given["offsets_ns"].items()},
            tuple(str(problem) for problem in given["problems"]),
            notes=tuple(str(note) for note in given.get("notes", ())),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Config(
            f"{path} makes no sense as a breakdown ({error}): write it anew with `penstock profile --read`"
        ) from error


def _change(one: Change) -> dict[str, object]:
    told = one.prediction
    return {
        "change": one.what,
        "how": one.how,
        "settings": dict(one.settings),
        "no_setting": one.obstacle,
        "gain_ns": one.gain_ns,
        "predicted_step_ns": None if told is None else told.after_ns,
        "error": None if told is None else told.error,
        "cause": None if one.cause is None else one.cause.kind,
    }


def _drop(one: Drop) -> dict[str, object]:
    start, end = one.interval
    where = {"host": one.host, "interface": one.interface, "ways": list(one.ways)}
    return {**where, "start_ns": start, "end_ns": end, "share": one.share, "cause": one.cause or None, "rank": one.rank}


def _line(group: Group, line: Line) -> dict[str, Any]:
    points = [[start, end, value] for (start, end), value in line.points]
    names = {"line": line.label, "host": line.host, "counter": line.counter}
    return {"what": group.what, "unit": group.unit, **names, "points": points}


def _rows(share: Share) -> Iterator[tuple[object, ...]]:
    def row(what: str, kind: str, exposed: int, ns: float, *rest: object) -> tuple[object, ...]:
        part = ns / share.step_ns if share.step_ns else 0.0
        return what, kind, exposed, _plain(ns), _plain(part), *(*rest, "", "", "")[:3]

    yield row("step", "step", 0, share.step_ns)
    for phase in _known_first(PHASES, share.work):
        yield row(phase, "work", 1, share.work[phase])
    for purpose in _known_first(PURPOSES, share.communication):
        moving = share.communication[purpose]
        yield row(purpose, "wire", 1, moving.exposed_wire_ns, _plain(moving.bytes), _plain(moving.operations))
        yield row(purpose, "wait", 1, moving.exposed_wait_ns)
        yield row(purpose, "wire", 0, moving.hidden_wire_ns)
        yield row(purpose, "wait", 0, moving.hidden_wait_ns)
        for last, ns in moving.waited_for.items():
            yield row(purpose, "waited for", 0, ns, "", "", last)


def _known_first(known: Sequence[str], there: Iterable[str]) -> list[str]:
    """Then what only some files have, such as collectives' names in NCCL's."""
    found = set(there)
    return [*(each for each in known if each in found), *sorted(found.difference(known))]


def _plain(value: float) -> str:
    """Without an exponent, which some spreadsheets take for text."""
    return f"{value:.6f}".rstrip("0").rstrip(".")


def _share(given: dict[str, Any]) -> Share:
    return Share(
        _count(given["rank"]),
        _count(given["steps"]),
        _count(given["sampled"]),
        _number(given["step_ns"]),
        {str(phase): _number(ns) for phase, ns in given["work"].items()},
        {str(purpose): _moving(each) for purpose, each in given["communication"].items()},
        _count(given.get("known", 0)),
        _number(given.get("examples", 0)),
    )


def _moving(given: dict[str, Any]) -> Moving:
    numbers = {
        field.name: _number(given[field.name]) for field in dataclasses.fields(Moving) if field.name != "waited_for"
    }
    # Keys of JSON objects are texts.
    return Moving(**numbers, waited_for={int(rank): _number(ns) for rank, ns in given["waited_for"].items()})


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no number")
    return value


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value
