"""What Penstock's own reducers send (`GradientReducer`, the hook of DDP, the Horovod front). No call of torch.distributed shows
it, but the engine remembers its last operations (`penstock flight`)."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from penstock.tools.profile.recorder.kineto import Call

__all__ = ["reductions"]

_CHANNEL = re.compile(r"^(.*)/(rounds|buckets|sparse)\d*$")
"""Of a group: in which a reducer agrees on what is ready, and sums it."""


def reductions(start_ns: int, label: Callable[[str], tuple[str, int]]) -> list[Call]:
    """Those that were issued since ``start_ns`` and have ended.

    Args:
        label: the name in records and the number of ranks of a group, from its name.
    """
    process: Any = sys.modules.get("penstock.runtime.process")
    if process is None or process.Engine.current is None:
        return []
    record = json.loads(process.engine().core.record())
    now_ns = round(1e9 * record["time"]) + time.monotonic_ns() - time.time_ns()
    return [call for one in record["operations"] for call in _calls(one, now_ns, start_ns, label)]


def _calls(one: Any, now_ns: int, start_ns: int, label: Callable[[str], tuple[str, int]]) -> Iterator[Call]:
    channel = _CHANNEL.match(one["group"])
    if channel is None or one["ended_s_ago"] is None:
        return
    issued_ns = now_ns - round(1e9 * one["issued_s_ago"])
    if issued_ns < start_ns:
        return
    group, ranks = label(channel[1])
    yield Call(
        one["operation"].partition("(")[0],
        f"{group}/{channel[2]}",
        issued_ns,
        issued_ns,
        ranks,
        purpose="data-parallel sync",
        bytes=one["bytes"],
        waited_ns=max(issued_ns, now_ns - round(1e9 * one["ended_s_ago"])),
    )
