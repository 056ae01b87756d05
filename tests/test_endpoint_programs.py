"""Proves that random calls to servers of endpoints end as they should, whatever dies among them: `./dev fuzz --endpoints`."""

from __future__ import annotations

import copy
import os
import random

import pytest

from random_programs import calls
from random_programs.calls import Told

# Any five in a row have each fate once.
_SEED = int(os.environ.get("PENSTOCK_SEED", random.randrange(1 << 30)))


@pytest.mark.parametrize("fate", range(len(calls.FATES)))
@pytest.mark.parametrize("medium", calls.MEDIA)
def test_random_calls(medium: str, fate: int) -> None:
    """Clients and servers that are killed, servers that close, connections that are cut: no call is lost, none is done twice."""
    print(f"PENSTOCK_SEED={_SEED}")
    program = calls.generate(_SEED + fate)
    assert calls.run(program, medium) == []


def _program(fate: str, *made: dict[str, object]) -> calls.Program:
    return {**calls.generate(0), "fate": fate, "clients": [list(made)]}


PUSH = {"kind": "push", "name": "data", "size": 1000}


@pytest.mark.parametrize(
    ("fate", "call", "end", "log", "says"),
    [
        ("none", PUSH, "done", "begun done", ""),
        ("none", PUSH, "done", "begun", "its handler has not returned"),
        ("none", PUSH, "done", "", "its handler has not returned"),
        ("none", PUSH, "done", "begun done begun done", "was handled 2 times"),
        ("none", PUSH, "done", "begun wrong done", "had wrong bytes"),
        ("none", PUSH, "PeerLost", "begun", "ended with PeerLost, where it may end with done"),
        ("server dies", PUSH, "PeerLost", "begun", ""),
        ("server dies", PUSH, "Config", "", "where it may end with PeerLost, done"),
        ("none", {**PUSH, "name": "unknown"}, "Config", "", ""),
        ("none", {**PUSH, "name": "unknown"}, "Config", "begun", "and a handler had it"),
        ("none", {**PUSH, "size": (1 << 20) + 1}, "done", "begun done", "where it may end with Config"),
        ("none", {**PUSH, "name": "fails"}, "HandlerFailed", "begun", ""),
        ("none", {**PUSH, "name": "fails"}, "done", "begun done", "where it may end with HandlerFailed"),
        ("none", {**PUSH, "timeout_s": 0.1}, "not sent", "begun", "and a handler had it"),
        ("none", {**PUSH, "timeout_s": 0.1}, "Timeout", "begun done", ""),
    ],
)
def test_the_judge(fate: str, call: dict[str, object], end: str, log: str, says: str) -> None:
    """It finds each kind of what may not be, and nothing else."""
    found = calls.judge(_program(fate, call), [Told(0, 0, end)], [f"0 0 {what}" for what in log.split()])
    assert says in "; ".join(found) and bool(says) == bool(found), found


def test_a_program_is_made_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left fails still, and no part of it can go."""
    program = calls.generate(4)
    program["clients"] = [[{**PUSH, "size": size} for size in range(at, at + 20)] for at in (0, 100)]
    before = copy.deepcopy(program)

    def run(candidate: calls.Program, medium: str) -> list[str]:
        return ["wrong"] * any(call["size"] == 107 for made in candidate["clients"] for call in made)

    monkeypatch.setattr(calls, "run", run)
    small = calls.shrink(program, "tcp", 100)
    assert [[call["size"] for call in made] for made in small["clients"]] == [[107]] and program == before
