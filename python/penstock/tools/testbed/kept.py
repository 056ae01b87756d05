"""Testbeds that stay up: a file each says which keeper holds what."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import select
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.tools.testbed import system


def take_down(name: str) -> None:
    """End the testbed that is up as ``name``, with every process in it; returns when it is gone.

    Raises: LookupError, when there is none; TimeoutError, after 30 s.
    """
    state = read_state(name)
    try:
        handle = os.pidfd_open(state["keeper"])
    except ProcessLookupError:
        return  # somebody else has ended it
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
    """All testbeds that are up, by name. Files whose keeper is gone are removed, as far as this user may."""
    states = {}
    for path in STATE_DIRECTORY.glob("*.json"):
        state = _read(path)
        if state is None:
            # It may be one that is being written.
            with contextlib.suppress(PermissionError), _locked():
                state = _read_or_remove(path)
        if state is not None:
            states[path.stem] = state
    return states


def write_state(name: str, state: dict[str, Any]) -> Path:
    """Say that a testbed is up as ``name``; returns the file that says so. Raises: FileExistsError, when there is one."""
    path = state_path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked():
        _read_or_remove(path)
        with open(path, "x") as file:
            try:
                json.dump(state, file)
                file.flush()
            except BaseException:
                path.unlink()
                raise
    return path


def _read(path: Path) -> dict[str, Any] | None:
    """What a file says; None if its keeper is gone, or it says nothing."""
    try:
        state: dict[str, Any] = json.loads(path.read_text())
        return state if system.start_time(state["keeper"]) == state["started"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _read_or_remove(path: Path) -> dict[str, Any] | None:
    """`_read`, and remove a file that says nothing. The caller has the lock: nobody writes it meanwhile."""
    state = _read(path)
    if state is None:
        path.unlink(missing_ok=True)
    return state


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    """Be the only one that writes or removes files here."""
    with open(STATE_DIRECTORY / "lock", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def state_path(name: str) -> Path:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,40}", name):
        raise ValueError(f"testbed name '{name}': letters, digits, '.', '_' and '-', at most 41, please")
    return STATE_DIRECTORY / f"{name}.json"


STATE_DIRECTORY = Path("/run/penstock/testbed")
