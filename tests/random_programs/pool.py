"""Rank processes that stay, so that a program costs milliseconds; replaced after whatever may have harmed them."""

from __future__ import annotations

import contextlib
import json
import pathlib
import tempfile
from typing import Any

import ranks
from penstock.testbed import LinkSpec, Testbed
from random_programs import faults, judge, run, strike

# A few streams are as good as sixteen here, and open sooner.
_TCP = {"PENSTOCK_SHM": "0", "PENSTOCK_STREAMS": "4"}
MEDIA: dict[str, dict[str, str]] = {"memory": {}, "tcp": _TCP}
# "hosts" is TCP between emulated hosts, of which one can be cut off.
FAULT_MEDIA = {**MEDIA, "hosts": {**_TCP, "PENSTOCK_INTERFACE": Testbed.interface}}
RANKS = 4


class Pool:
    """Four rank processes over one medium ("memory", "tcp", or for faults "hosts").

    Args:
        mutant: a fault to plant in all of them (see `mutants`).
        patience_s: how long they wait for a rank that is silent.

    Raises:
        penstock.testbed.TestbedUnavailable: there are no emulated hosts here.
    """

    def __init__(self, medium: str, *, mutant: str | None = None, patience_s: float = faults.PEER_TIMEOUT_S) -> None:
        self._mutant = mutant
        self._env = {**FAULT_MEDIA[medium], "PENSTOCK_PEER_TIMEOUT": str(patience_s)}
        self._stack = contextlib.ExitStack()
        self._medium = medium
        self._bed: Testbed | None = None
        if medium == "hosts":
            # The last one keeps the store.
            self._bed = self._stack.enter_context(Testbed(hosts=RANKS + 1, link=LinkSpec(rate_mbit=None)))
        self._job: ranks.Ranks | None = None
        self._number = 0
        self.struck: dict[str, Any] | None = None
        """When the fault of the last program came, if it did."""
        self.cpu_s = 0.0
        """Processor time that programs have cost their ranks; the start of ranks is not in it."""

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._stack.close()

    def run(self, program: dict[str, Any], *, backend: str = "penstock") -> list[str]:
        """Run a program to its end on all of its ranks; returns what is wrong with it."""
        if "fault" not in program:
            return self._run(program, backend, None, None)
        with tempfile.TemporaryDirectory(prefix="fault-") as folder:
            self._ready()
            hosts = list(range(RANKS))
            helper = strike.Helper(program["fault"], pathlib.Path(folder), self._bed, hosts)
            try:
                return self._run(program, backend, folder, helper)
            finally:
                helper.close()
                self.struck = helper.struck

    def _run(
        self, program: dict[str, Any], backend: str, folder: str | None, helper: strike.Helper | None
    ) -> list[str]:
        job = self._ready()
        count = program["ranks"]
        order = {"program": program, "backend": backend, "mutant": self._mutant, "folder": folder}
        note = f"report {self._number}"
        job.store.set(f"program {self._number}", json.dumps(order))
        self._number += 1
        wrong, fault = program["wrong"], program.get("fault")
        dies = [wrong["rank"]] if wrong is not None and wrong["kind"] == "kill" else []
        if fault is not None and fault["kind"] == "kill":
            dies = [fault["rank"]]
        of = [rank for rank in range(count) if rank not in dies]
        try:
            values = job.await_note(note, deadline_s=_deadline_s(program), of=of)
            if helper is not None and dies and job.notes_or_ends(dies[0], note, deadline_s=_deadline_s(program)):
                # The event did not come.
                of, dies = [*of, *dies], []
                values = job.await_note(note, deadline_s=0, of=of)
        except ranks.RanksFailed as failure:
            self._end()
            return [f"a rank died or hung; every rank's end:\n{failure}"]
        reports: dict[int, Any] = dict(zip(of, values, strict=True))
        reports.update(dict.fromkeys(dies))
        self.cpu_s += sum(report["cpu_s"] for report in values)
        if helper is not None:
            helper.close()
        complaints = judge.judge(program, reports, helper.struck if helper is not None else None)
        if helper is not None:
            complaints += [f"orphan: {one}" for one in job.children()]
        if backend != "penstock":
            # What another backend leaves behind is its own affair.
            complaints = [text for text in complaints if "leak:" not in text]
        cut_off = fault is not None and fault["kind"] == "cut for ever"
        if complaints or dies or cut_off or self._number >= _PROGRAMS_A_JOB:
            self._end()
        return complaints

    def _ready(self) -> ranks.Ranks:
        if self._job is None:
            placement = list(range(RANKS)) if self._bed is not None else None
            self._job = ranks.Ranks(
                run.serve,
                count=RANKS,
                args=(self._medium,),
                env=self._env,
                bed=self._bed,
                placement=placement,
                store_host=RANKS,
            )
            self._number = 0
        return self._job

    def _end(self) -> None:
        if self._job is not None:
            self._job.__exit__()
            self._job = None


def _deadline_s(program: dict[str, Any]) -> float:
    """Longer than any of its operations may take: the group's own time-out comes first, and says more."""
    return float(program["timeout_s"]) + (40 if "fault" in program else 20)


# The store and the notes keep a little of every program.
_PROGRAMS_A_JOB = 2000
