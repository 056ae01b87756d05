"""The flight recorder: what each rank was doing when something went wrong, and ``penstock flight``, which reads it.

The engine always keeps the last operations. Where PENSTOCK_FLIGHT_RECORDER names a folder, every rank writes them there when
one of its groups fails, before anybody learns of the failure, and when it gets SIGUSR2. `flight_record` gives them at any
time.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from penstock.numbers import milliseconds

__all__ = ["command", "describe", "flight_record"]


def flight_record() -> dict[str, Any]:
    """The last operations of this process, as far back as the engine remembers (1024).

    Returns: a dict with ``rank``, ``generation`` (how often the job was started again), ``host``, ``pid``, ``time`` (seconds
        since 1970), ``groups`` (each with ``name`` and why it has ``failed``, or None), ``peers`` (with ``rank``, ``host``,
        ``address``, ``medium`` and why one is ``lost``), and ``operations``, the oldest first, each with ``group``, ``number``
        (of a collective: from 1 on; None for a receive from any source, or queued behind one, until it has its message),
        ``operation``, ``bytes``, ``algorithm``, ``coflow`` (of `penstock.priority`; 0: none), ``issued_s_ago``, and
        ``ended_s_ago`` and ``well``, which are None as long as it has not ended. Those that go through servers (``algorithm``
        is "aggregated") are numbered for themselves, and ``waits_for`` says what the first of them lacks, or lacked when the
        group failed, as of a tenth of a second before. For a receive without a number ``waits_for`` says what it waits for. It
        is None where that is not known.

    Raises:
        penstock.errors.Closed: no process group of the penstock backend exists.
    """
    from penstock.runtime import process  # imports torch

    record: dict[str, Any] = json.loads(process.engine().core.record())
    return record


def describe(records: Sequence[dict[str, Any]], last: int = 8) -> str:
    """The records of some ranks as a text for users: which rank waits for what, where ranks differ, and what each did last."""
    lines = []
    for each in sorted(records, key=lambda each: each["rank"]):
        when = datetime.datetime.fromtimestamp(each["time"]).isoformat(sep=" ", timespec="milliseconds")
        lines.append(f"rank {each['rank']} on {each['host']}, process {each['pid']}, at {when}")
        for group in each["groups"]:
            if group["failed"]:
                lines.append(f"  {_label(group['name'])} has failed: {group['failed']}")
        for peer in each["peers"]:
            if peer["lost"]:
                lines.append(f"  lost: {peer['lost']}")
        operations = each["operations"]
        shown = [one for one in operations if one["ended_s_ago"] is None]
        shown += [one for one in operations[max(0, len(operations) - last) :] if one["ended_s_ago"] is not None]
        for one in sorted(shown, key=lambda one: -one["issued_s_ago"]):
            lines.append(f"  {_operation(one)}")
    return "\n".join(lines + _differences(records)) + "\n"


def _operation(one: dict[str, Any]) -> str:
    lacks = one.get("waits_for")
    if one["ended_s_ago"] is None:
        end = "running" + (f", waits for {lacks}" if lacks else "")
    else:
        end = f"{'done' if one['well'] else 'FAILED'} after {milliseconds(one['issued_s_ago'] - one['ended_s_ago'])}"
        end += f", waited for {lacks}" if lacks else ""
    number = "" if one["number"] is None else f" #{one['number']}"
    how = one["algorithm"] + (f", coflow {one['coflow']}" if one.get("coflow") else "")
    return f"-{one['issued_s_ago']:.3f} s  {one['group']}{number} {one['operation']} ({how}): {end}"


def _differences(records: Sequence[dict[str, Any]]) -> list[str]:
    """Where ranks issued different operations under one number, and how far each has come."""
    lines: list[str] = []
    collectives = [
        {(_order(one), one["number"]): one["operation"] for one in each["operations"] if _is_collective(one)}
        for each in records
    ]
    groups = sorted({group for each in collectives for group, _ in each})
    for group in groups:
        furthest = {
            each["rank"]: max(number for name, number in of if name == group)
            for each, of in zip(records, collectives, strict=True)
            if any(name == group for name, _ in of)
        }
        if len(set(furthest.values())) > 1:
            told = ", ".join(f"rank {rank} #{number}" for rank, number in sorted(furthest.items()))
            lines.append(f"{_label(group)}: ranks have come differently far: {told}")
        for number in sorted({number for of in collectives for name, number in of if name == group}):
            by_rank = {
                each["rank"]: of[group, number]
                for each, of in zip(records, collectives, strict=True)
                if (group, number) in of
            }
            if len(set(by_rank.values())) > 1:
                told = ", ".join(f"rank {rank} {operation}" for rank, operation in sorted(by_rank.items()))
                lines.append(f"{_label(group)} #{number}: ranks issued different operations: {told}")
                break
    return lines


def _label(name: str) -> str:
    """A group, or a channel of one, whose name has the group's before it."""
    return f"{'channel' if '/' in name else 'group'} {name}"


def _order(one: dict[str, Any]) -> str:
    """What counts the operation. What goes through servers has an order of its own."""
    return f"{one['group']}, through servers" if one["algorithm"] == "aggregated" else str(one["group"])


def _is_collective(one: dict[str, Any]) -> bool:
    return not one["operation"].startswith("send/recv")


@click.command(name="flight")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--last", type=click.IntRange(0), default=8, show_default=True, help="Operations a rank that have ended.")
@click.option("--generation", type=click.IntRange(0), help="Which life of a job that was started again.")
def command(folder: Path, last: int, generation: int | None) -> None:
    """Tell what the ranks were doing, from the records in FOLDER.

    Set PENSTOCK_FLIGHT_RECORDER=FOLDER for all ranks (a folder that they share, or collect the files): each writes
    rank-N.json there when one of its groups fails, or on SIGUSR2; rank-N.G.json after the job has been started again G times.
    Without --generation the last life that left records is told about.
    """
    records = []
    for path in sorted(folder.glob("rank-*.json")):
        why = "is no flight record"
        try:
            each = json.loads(path.read_text())
            if isinstance(each, dict) and each.get("format") == FORMAT:
                records.append(each)
                continue
        except ValueError:
            pass
        except OSError as error:
            why = f"cannot be read ({error.strerror})"
        click.echo(f"{path} {why}; it is left out", err=True)
    if not records:
        raise click.ClickException(f"there is no flight record (rank-N.json) in {folder}")
    lives = sorted({each["generation"] for each in records})
    chosen = lives[-1] if generation is None else generation
    if chosen not in lives:
        there = ", ".join(map(str, lives))
        raise click.ClickException(f"there is no record of generation {chosen} in {folder}, but of {there}")
    if len(lives) > 1:
        others = ", ".join(str(one) for one in lives if one != chosen)
        click.echo(f"generation {chosen}; there are also records of {others} (--generation)", err=True)
    click.echo(describe([each for each in records if each["generation"] == chosen], last), nl=False)


FORMAT = "penstock-flight/1"
