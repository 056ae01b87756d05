"""Runs one program as all ranks of a bed, and collects what they say: one JSON object a line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.tools.bench.launcher import BenchError
from penstock.tools.testbed.bed import Loopback
from penstock.tools.testbed.cluster import Testbed


def run_program(
    bed: Testbed | Loopback,
    module: str,
    options: Mapping[str, Any],
    *,
    what: str,
    ranks: int,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    on: Sequence[str] | None = None,
    on_line: Callable[[int, str], None] | None = None,
) -> list[list[dict[str, Any]]]:
    """Run ``python -m penstock.tools.bench.<module> OPTIONS`` on every rank; return the objects that each printed, by rank.

    ``on`` names the nodes that the ranks are dealt to, where it is not all hosts. ``on_line`` hears each line with
    the rank that printed it, on this thread, while they run.

    Raises:
        BenchError: a rank failed or hung; ``what`` did, and the end of what the rank said.
    """
    command = [sys.executable, "-m", f"penstock.tools.bench.{module}", json.dumps(options)]
    try:
        done = bed.run(command, ranks=ranks, launcher="fork", timeout_s=timeout_s, env=env, on_line=on_line, on=on)
    except TimeoutError as error:
        raise BenchError(f"{what}: {error}") from error
    if done.returncode:
        said = "\n  ".join(done.outputs[done.failed_rank or 0].strip().splitlines()[-20:])
        raise BenchError(f"{what}: rank {done.failed_rank} ended with {done.returncode}; it said:\n  {said}")
    return [[json.loads(line) for line in output.splitlines() if line.startswith('{"')] for output in done.outputs]


def say(**what: Any) -> None:
    """Called by such a program: one object of what `run_program` returns for its rank."""
    print(json.dumps(what), flush=True)
