"""JSONL files of NCCL's inspector: one object for each collective that ran.

    {"header": {"id": "0x...", "rank": 0, "n_ranks": 8, "nnodes": 1}, "metadata": {"hostname": "a", "pid": 7, ...},
     "coll_perf": {"coll": "AllReduce", "coll_sn": 1, "coll_msg_size_bytes": 1024, "coll_exec_time_us": 61.0, ...}}

Since version 4.3 header and metadata stand only in a line with ``dump_stats``, before the lines that they are for. There are no
steps in it, and nothing says what ran beside a collective.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from penstock.errors import Config
from penstock.profiling.breakdown import Breakdown, Moving, Share
from penstock.profiling.matching import canonical
from penstock.profiling.readers.source import opened

__all__ = ["breakdown", "is_one"]


@dataclass
class _Sum:
    count: int = 0
    bytes: int = 0
    time_us: float = 0.0
    moved_bytes: float = 0.0
    """Bus bandwidth times time: what crossed the slowest link, as NCCL's tests count it."""


def is_one(first: str) -> bool:
    """Whether a file whose first line this is may be of the inspector."""
    return any(f'"{key}"' in first for key in ("coll_perf", "p2p_perf", "dump_stats")) or (
        '"n_ranks"' in first and '"header"' in first
    )


def breakdown(paths: Sequence[Path]) -> Breakdown:
    """A share for each process, without steps: its time in collectives stands as hidden, since the file does not tell. What
    communication is for is not known either, so it stands by the names of the collectives.

    Raises:
        Config: there is no collective in any of them.
    """
    ranks: dict[tuple[str, int], int] = {}
    sums: dict[tuple[str, int], dict[str, _Sum]] = {}
    problems: list[str] = []
    for path in paths:
        bad = lost = 0
        heads: dict[str, Any] = {}
        with opened(path) as text:
            for line in text.lines():
                if not line.strip():
                    continue
                given = _object(line)
                heads |= {key: given[key] for key in ("header", "metadata") if key in given}
                if isinstance(stats := given.get("dump_stats"), dict):
                    lost += sum(int(stats[key]) for key in LOST if _is_number(stats.get(key)))
                elif "proxy_trace" not in given and not _add({**heads, **given}, path, ranks, sums):
                    bad += 1
            if text.problem:
                problems.append(text.problem)
        if bad:
            problems.append(f"{path.name}: {bad} lines make no sense and are left out")
        if lost:
            problems.append(f"{path.name}: the inspector lost {lost} operations, which are in no sum")
    if not sums:
        raise Config(f"{paths[0]} looks like a file of NCCL's inspector, and holds no collective")
    order = sorted(sums, key=lambda process: (ranks[process], process))
    taken = [ranks[process] for process in order]
    are_distinct = len(set(taken)) == len(taken)
    if not are_distinct:
        problems.append("several processes have the same rank in their largest group: they are counted in order")
    shares = tuple(
        Share(ranks[process] if are_distinct else number, 0, 0, 0.0, {}, _moving(sums[process]))
        for number, process in enumerate(order)
    )
    total: dict[str, _Sum] = {}
    for each in sums.values():
        for name, found in each.items():
            whole = total.setdefault(name, _Sum())
            whole.count += found.count
            whole.bytes += found.bytes
            whole.time_us += found.time_us
            whole.moved_bytes += found.moved_bytes
    notes = ["Files of NCCL's inspector have no steps: there are sums over the whole file, and no shares of a step."]
    for name, whole in sorted(total.items(), key=lambda item: -item[1].time_us):
        bus = whole.moved_bytes / whole.time_us / 1e3 if whole.time_us else 0.0
        notes.append(
            f"{name}: bus bandwidth {bus:.1f} GB/s, as the files have it, over {whole.count:,} operations "
            f"of {whole.bytes / whole.count / 1e6:.3g} MB on average."
        )
    return Breakdown(shares, problems=tuple(problems), notes=tuple(notes))


def _moving(sums: Mapping[str, _Sum]) -> dict[str, Moving]:
    return {
        name: Moving(hidden_wire_ns=each.time_us * 1e3, bytes=each.bytes, operations=each.count)
        for name, each in sorted(sums.items(), key=lambda item: -item[1].time_us)
    }


def _object(line: str) -> dict[str, Any]:
    """Of a line; an empty one if it is none."""
    try:
        given = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return given if isinstance(given, dict) else {}


def _add(
    given: Mapping[str, Any],
    path: Path,
    ranks: dict[tuple[str, int], int],
    sums: dict[tuple[str, int], dict[str, _Sum]],
) -> bool:
    """Whether the line made sense."""
    header, metadata, what = (given.get(key) for key in ("header", "metadata", "coll_perf"))
    if what is None and "p2p_perf" in given:
        what = given["p2p_perf"]
    if not isinstance(header, dict) or not isinstance(what, dict):
        return False
    rank = header.get("rank")
    prefix = "coll" if "coll" in what else "p2p"
    name, size, time_us = (what.get(key) for key in (prefix, f"{prefix}_msg_size_bytes", f"{prefix}_exec_time_us"))
    if not isinstance(name, str) or not _is_number(rank) or not _is_number(size) or not _is_number(time_us):
        return False
    about = metadata if isinstance(metadata, dict) else {}
    pid = about.get("pid")
    process = (str(about.get("hostname", path.name))[:256], pid if isinstance(pid, int) else -1)
    if process not in sums and len(sums) >= MOST_PROCESSES:
        return False
    by_name = sums.setdefault(process, {})
    kind = canonical(name)
    if kind not in by_name and len(by_name) >= MOST_NAMES:
        return False
    found = by_name.setdefault(kind, _Sum())
    found.count += 1
    found.bytes += int(size)
    found.time_us += time_us
    bus = what.get(f"{prefix}_busbw_gbs")
    found.moved_bytes += (bus if _is_number(bus) else 0.0) * time_us * 1e3
    # Each communicator counts from 0: a process has its highest rank in the group of all.
    ranks[process] = max(ranks.get(process, 0), min(int(rank), 1 << 20))
    return True


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e18 and math.isfinite(value)


LOST = ("coll_dropped_since_last_dump", "p2p_dropped_since_last_dump")
MOST_PROCESSES, MOST_NAMES = 1 << 17, 64
