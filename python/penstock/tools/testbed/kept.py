"""Testbeds that stay up: a file each says which keeper holds what."""

from __future__ import annotations

import json
import os
import re
import select
import signal
from pathlib import Path
from typing import Any

from penstock.tools.testbed import system


def take_down(name: str) -> None:
    """End the testbed that is up as ``name``, with every process in it; returns when it is gone.

    Raises: LookupError, when there is none; TimeoutError, after 30 s.
    """
    state = read_state(name)
    handle = os.pidfd_open(state["keeper"])
    try:
        signal.pidfd_send_signal(handle, signal.SIGTERM)
        if not select.select([handle], [], [], 30)[0]:
            raise TimeoutError(f"testbed '{name}': its keeper, process {state['keeper']}, does not end")
    finally:
        os.close(handle)


def read_state(name: str) -> dict[str, Any]:
    """What `Testbed.keep` wrote under ``name``. Raises: LookupError, with the names that there are."""
    states = read_states()
    if name not in states:
        there = f"there are: {', '.join(sorted(states))}" if states else "none is up"
        raise LookupError(f"no testbed '{name}': {there}. `penstock testbed up --name {name}` makes it")
    return states[name]


def read_states() -> dict[str, dict[str, Any]]:
    """All testbeds that are up, by name. Files whose keeper is gone are removed."""
    states = {}
    for path in STATE_DIRECTORY.glob("*.json"):
        try:
            state = json.loads(path.read_text())
            alive = system.start_time(state["keeper"]) == state["started"]
        except (OSError, ValueError, KeyError):
            alive = False
        if alive:
            states[path.stem] = state
        else:
            path.unlink(missing_ok=True)
    return states


def state_path(name: str) -> Path:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,40}", name):
        raise ValueError(f"testbed name '{name}': letters, digits, '.', '_' and '-', at most 41, please")
    return STATE_DIRECTORY / f"{name}.json"


STATE_DIRECTORY = Path("/run/penstock/testbed")
