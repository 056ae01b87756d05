"""Rank processes that stay, so that a program costs milliseconds; replaced after whatever may have harmed them."""

from __future__ import annotations

import json
import os
from typing import Any

import ranks
from random_programs import judge, run

# A few streams are as good as sixteen here, and open sooner. Ranks that share two processors with much else are silent for
# seconds without being lost.
_PATIENT = {"PENSTOCK_PEER_TIMEOUT": str(judge.PEER_TIMEOUT_S)}
MEDIA = {"memory": _PATIENT, "tcp": {**_PATIENT, "PENSTOCK_SHM": "0", "PENSTOCK_STREAMS": "3"}}
RANKS = 4


class Pool:
    """Four rank processes over one medium ("memory" or "tcp").

    Args:
        mutant: a fault to plant in all of them (see `mutants`).
    """

    def __init__(self, medium: str, *, mutant: str | None = None) -> None:
        self._medium, self._mutant = medium, mutant
        self._job: ranks.Ranks | None = None
        self._number = 0

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def run(self, program: dict[str, Any], *, backend: str = "penstock") -> list[str]:
        """Run a program to its end on all of its ranks; returns what is wrong with it."""
        job = self._ready()
        count = program["ranks"]
        order = {"program": program, "backend": backend, "mutant": self._mutant}
        note = f"report {self._number}"
        job.store.set(f"program {self._number}", json.dumps(order))
        self._number += 1
        wrong = program["wrong"]
        dies = [wrong["rank"]] if wrong is not None and wrong["kind"] == "kill" else []
        of = [rank for rank in range(count) if rank not in dies]
        try:
            values = job.await_note(note, deadline_s=_deadline_s(program), of=of)
        except ranks.RanksFailed as failure:
            self._end()
            return [f"a rank died or hung; every rank's end:\n{failure}"]
        reports: dict[int, Any] = dict(zip(of, values, strict=True))
        reports.update(dict.fromkeys(dies))
        complaints = judge.judge(program, reports)
        if backend != "penstock":
            # What another backend leaves behind is its own affair.
            complaints = [text for text in complaints if "leak:" not in text]
        if complaints or dies or self._number >= _PROGRAMS_A_JOB:
            self._end()
        return complaints

    def _ready(self) -> ranks.Ranks:
        if self._job is None:
            self._job = ranks.Ranks(run.serve, count=RANKS, args=(self._medium,), env=MEDIA[self._medium])
            self._number = 0
        return self._job

    def _end(self) -> None:
        if self._job is not None:
            self._job.__exit__()
            self._job = None


def _deadline_s(program: dict[str, Any]) -> float:
    """Longer than any of its operations may take: the group's own time-out comes first, and says more."""
    return float(program["timeout_s"]) + 20


# torch's warnings of every poll of a store would push stacks out of a rank's output. Read when torch is imported, which the
# ranks' fork server does.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# The store and the notes keep a little of every program.
_PROGRAMS_A_JOB = 2000
