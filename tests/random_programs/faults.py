"""A seed becomes a program in which one rank is killed, stopped or cut off, at a random event (docs/design/random-programs.md).

```text
  {..., "timeout_s": 20, "wrong": null,
   "fault": {"kind": "stop", "rank": 2, "at": ["frames", 37], "delay_us": 120, "lasts_s": 0.3}}
```
The program is one of three: a right program of `generate`, a training job, or a job of `penstock.elastic`. The fault comes

| ``at``                   | when                                                                       |
|--------------------------|----------------------------------------------------------------------------|
| ["step"]                 | at the step ["strike"] of the rank's list, between two of its calls         |
| ["phase", STEP, PHASE]   | in a phase of a training step                                              |
| ["frames", N]            | when the rank's engine has sent N frames                                   |
| ["finished", N]          | when N of its operations have ended                                        |
| ["begin"]                | when it begins to make its group: ``delay_us`` decides how far it comes     |

and ``delay_us`` later. What does not come to pass (a program that sends fewer frames) leaves a right program.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Any

from random_programs import generate as programs

Program = dict[str, Any]

# PENSTOCK_PEER_TIMEOUT of the ranks: short where most programs wait for it. Elsewhere deaths of processes are known by their
# sockets at once, but not always; and ranks that share two processors with much else are silent for seconds without being lost.
PATIENCE_S, PEER_TIMEOUT_S = 2.0, 10.0
# By medium, the faults and how often they come. Cut off are the emulated hosts alone.
FAULTS = {
    "memory": {"kill": 5, "short stop": 3, "stop": 3, "any stop": 1},
    "tcp": {"kill": 5, "short stop": 3, "stop": 3, "any stop": 1},
    "hosts": {
        "kill": 2,
        "stop": 1,
        "short cut": 3,
        "cut": 3,
        "any cut": 1,
        "cut for ever": 2,
        "short part": 2,
        "part": 2,
    },
}
# How long they last. A short one harms nobody: what TCP has lost it sends again 0.2 s, 0.6 s and 1.4 s later. A long one is
# noticed by everybody who waits meanwhile; for the others it may be either.
LASTS_S = {
    "short stop": (0.02, 0.8),
    "stop": (PATIENCE_S + 1, PATIENCE_S + 2),
    "any stop": (PATIENCE_S - 0.7, PATIENCE_S + 0.7),
    "short cut": (0.02, 0.5),
    "cut": (PATIENCE_S + 1, PATIENCE_S + 2),
    "any cut": (0.6, PATIENCE_S + 0.7),
    "short part": (0.02, 0.5),
    "part": (PATIENCE_S + 1, PATIENCE_S + 2),
}
HARMLESS = ("short stop", "short cut", "short part")
PHASES = ["forward", "backward", "between", "optimizer", "committed"]
FRONTS = ["reducer", "ddp hook", "ddp", "all_reduce"]
# Of elastic jobs: as short as a loaded machine allows.
ELASTIC = {"window_s": 3.0, "rebuild_timeout_s": 8.0, "wait_s": 30.0, "check_every": 3}


def generate(seed: int, *, medium: str, avoid: Collection[str] = ()) -> Program:
    """The program of a seed over "memory", "tcp", or "hosts" (TCP between emulated hosts). ``avoid`` names known findings."""
    rng = random.Random(f"{seed} {medium} faults")
    job = rng.choice(["calls", "calls", "train", "train", "elastic"])
    if job == "calls":
        program = programs.generate(rng.randrange(1 << 40), medium=medium, avoid=avoid, wrong=False)
        program["seed"] = seed
    else:
        program = _training(rng, seed, medium, job)
    kinds = dict(FAULTS[medium])
    if job == "elastic":
        # Two members that reach the store but not each other: docs/design/elastic.md, "A network in halves".
        kinds.pop("part", None)
    kind = rng.choices(list(kinds), list(kinds.values()))[0]
    rank = rng.randrange(program["ranks"])
    fault: dict[str, Any] = {"kind": kind, "rank": rank, "delay_us": int(10 ** rng.uniform(0, 3.3))}
    if kind in LASTS_S:
        fault["lasts_s"] = round(rng.uniform(*LASTS_S[kind]), 3)
    if kind.endswith("part"):
        fault["from"] = rng.choice([one for one in range(program["ranks"]) if one != rank])
    fault["at"] = _event(rng, program, job, rank)
    if fault["at"] == ["begin"]:
        fault["delay_us"] = int(10 ** rng.uniform(0, 5.3))
    # Who makes a group waits for all of its ranks so long.
    program["timeout_s"] = 8 if fault["at"] == ["begin"] else 20
    program["fault"] = fault
    return program


def patience_s(program: Program) -> float:
    """PENSTOCK_PEER_TIMEOUT of a program's ranks."""
    return PATIENCE_S if "fault" in program else PEER_TIMEOUT_S


def names(fault: dict[str, Any]) -> list[int]:
    """The ranks, one of which an error must name."""
    return [fault["rank"], fault["from"]] if "from" in fault else [fault["rank"]]


def is_left_out(fault: dict[str, Any]) -> bool:
    """Whether its rank is gone for ever (if the fault came to pass)."""
    return fault["kind"] in ("kill", "cut for ever")


def _training(rng: random.Random, seed: int, medium: str, job: str) -> Program:
    ranks = rng.choice([2, 3, 4]) if job == "train" else rng.choice([3, 4])
    spec = {
        "call": job,
        "group": "world",
        "key": f"{seed}",
        "front": rng.choice(FRONTS),
        "steps": rng.randint(2, 6),
        "dtype": rng.choice(["float32", "float32", "float64"]),
        # Of the parameters: from one element to a few frames.
        "counts": [rng.choice([1, 3, 100, 5000, 16_384, 70_000, 200_001]) for _ in range(rng.randint(1, 6))],
        "bucket_bytes": rng.choice([4096, 1 << 16, 1 << 18, 4 << 20]),
    }
    # Drawn apart: the other programs stay as they were.
    if spec["front"] == "reducer" and random.Random(f"{seed} overlap").random() < 0.5:
        spec["front"] = "overlap"
    return {
        "seed": seed,
        "ranks": ranks,
        "medium": medium,
        "groups": {"world": list(range(ranks))},
        "calls": {"0": spec},
        "steps": [[["call", "0"]] for _ in range(ranks)],
        "wrong": None,
    }


def _event(rng: random.Random, program: Program, job: str, rank: int) -> list[Any]:
    """When the fault comes; a step ["strike"] goes into the rank's list."""
    kind = rng.choices(["place", "frames", "finished", "begin"], [10, 6, 3, 1])[0]
    spec = program["calls"].get("0", {})
    if kind == "begin":
        return ["begin"]
    if kind == "frames":
        return ["frames", int(10 ** rng.uniform(0, 1.6 if job == "calls" else 2.3))]
    if kind == "finished":
        return ["finished", rng.randint(1, len(program["calls"]) if job == "calls" else 2 * spec["steps"])]
    if job == "calls":
        steps = program["steps"][rank]
        steps.insert(rng.randint(0, len(steps)), ["strike"])
        return ["step"]
    phase = rng.choice(PHASES)
    if phase == "backward":
        phase = f"backward {rng.randrange(len(spec['counts']))}"
    return ["phase", rng.randint(1, spec["steps"]), phase]
