"""A case of vectors/aggregator.json: a builder that states, step by step, what one node is sent, sends and holds."""

from __future__ import annotations

import json
import struct
from typing import Any

import twin
from twin import HEARTBEAT_UP, I32, LAST, MISSING, NONE, PUSH

WORDS = 16
"""Elements of a block."""
ABOVE = 9
"""The link to the parent."""

# ------------------------------------------------------------------------------------------------------------- blocks


def ints(first: int, step: int = 1, words: int = WORDS) -> bytes:
    """32-bit integers that show where a wrong one came from: first, first + step, ..."""
    return struct.pack(f">{words}i", *(first + step * i for i in range(words)))


def halves(*values: int) -> bytes:
    """16-bit integers, repeated to fill a block."""
    return struct.pack(f">{2 * WORDS}h", *(values[i % len(values)] for i in range(2 * WORDS)))


def packet(kind: int, payload: bytes = b"", **fields: int) -> bytes:
    """A datagram; what is not given is that of a worker 0 in job 5, epoch 3."""
    named = {
        "job": 5,
        "epoch": 3,
        "format": NONE,
        "flags": 0,
        "seq": 0,
        "ack": 0,
        "credit": 3,
        "exponent": 0,
        "workers": 1,
    }
    named |= {"length": len(payload)} | fields
    named["exponent"] &= 0xFFFF
    return twin.Penstock(kind=kind, **named).bytes() + payload


# -------------------------------------------------------------------------------------------------------------- cases


class Case:
    """A story of one node. Methods add a step; `slots` and `heart` hold what the node holds, and change as they are told."""

    def __init__(self, name: str, shows: str, rules: str = "", modes: str = "software switch", **job: Any) -> None:
        self.name, self.shows, self.rules, self.modes = name, shows, rules.split(), modes.split()
        self.steps: list[dict[str, Any]] = []
        self.slots: dict[int, dict[int, dict[str, Any]]] = {}
        self.heart: dict[int, list[list[int] | None]] = {}
        self.jobs: dict[int, dict[str, Any]] = {}
        self.open(**job)

    def open(self, job: int = 5, workers: Any = (1, 2), refused: bool = False, **other: Any) -> Case:
        """`workers`: those of each child; child i lives at link i."""
        opened = {"job": job, "epoch": 3, "key": None, "window": 4, "block_bytes": 4 * WORDS, "floats": False}
        opened |= {"parent": ABOVE} | other
        opened["children"] = [{"link": i, "workers": hex(mask)} for i, mask in enumerate(workers)]
        self.steps.append({"open": opened, "refused": refused})
        if not refused:
            self.jobs[job] = opened
            self._forget(job)
        return self

    def close(self, job: int) -> Case:
        self.steps.append({"close": job})
        return self

    def restart(self) -> Case:
        """The node loses everything, and the jobs are opened again."""
        self.steps.append({"restart": True})
        for job, opened in self.jobs.items():
            self.steps.append({"open": opened, "refused": False})
            self._forget(job)
        return self

    def _forget(self, job: int) -> None:
        self.slots[job] = {}
        self.heart[job] = [None] * len(self.jobs[job]["children"])

    def send(
        self,
        what: str,
        source: int,
        data: bytes,
        counts: str = "",
        to: Any = (),
        sends: bytes = b"",
        job: int = 5,
    ) -> Case:
        """Any packet; what it changes has been told to `slots` and `heart` before."""
        slots = [self.slots[job][index] for index in sorted(self.slots[job])]
        self.steps.append(
            {
                "what": what,
                "job": job,
                "from": source,
                "bytes": data.hex(),
                "to": list(to),
                "sends": sends.hex(),
                "counts": counts.split(),
                "slots": json.loads(json.dumps(slots)),
                "heart": json.loads(json.dumps(self.heart[job])),
            }
        )
        return self

    def push(
        self,
        what: str,
        child: int,
        seq: int,
        block: bytes,
        counts: str,
        have: Any = None,
        total: bytes | None = b"",
        up: bytes | None = None,
        heard: tuple[int, int] | None = (0, 3),
        minimum: tuple[int, int] = (0, 3),
        job: int = 5,
        form: int = I32,
        exponent: int = 0,
        source: int | None = None,
        up_header: dict[str, int] | None = None,
        **fields: int,
    ) -> Case:
        """A child's block.

        have, total: the slot holds these children and this sum from now on (not given: nothing changes).
        up: the sum that goes up, with the minimum of what was heard. heard: what this packet says, which the heart table now
        holds for the child (None: it changes nothing there)."""
        opened = self.jobs[job]
        workers = [int(one["workers"], 16) for one in opened["children"]]
        ack, credit = heard or (0, 3)
        header = {"seq": seq, "format": form, "exponent": exponent, "workers": workers[child]}
        header |= {"job": job, "epoch": opened["epoch"], "ack": ack, "credit": credit} | fields
        if have is not None:
            index = seq % opened["window"]
            whole = None if total is None else total.hex()
            self.slots[job][index] = {
                "slot": index,
                "seq": seq,
                "children": list(have),
                "format": form,
                "exponent": exponent,
                "sum": whole,
            }
            if last := fields.get("flags", 0) & LAST:
                self.slots[job][index]["flags"] = last
        if heard is not None:
            self.heart[job][child] = list(heard)
        sends = b""
        if up is not None:
            above = {"seq": seq, "format": form, "exponent": exponent, "workers": sum(workers), "job": job}
            above |= {"epoch": header["epoch"], "ack": minimum[0], "credit": minimum[1]} | (up_header or {})
            sends = packet(PUSH, up, **above)
        source = child if source is None else source
        to = [] if up is None else [opened["parent"]]
        return self.send(what, source, packet(PUSH, block, **header), counts, to, sends, job)

    def beat(
        self,
        what: str,
        child: int,
        ack: int,
        credit: int,
        newest: tuple[int, int] | None = None,
        up: tuple[int, int] | None = None,
        flags: int = 0,
    ) -> Case:
        """A child's heartbeat. newest: what the heart table then holds (not given: what it says). up: the minimum that goes
        up."""
        workers = [int(one["workers"], 16) for one in self.jobs[5]["children"]]
        self.heart[5][child] = list(newest or (ack, credit))
        data = packet(HEARTBEAT_UP, workers=workers[child], ack=ack, credit=credit, flags=flags)
        sends = b"" if up is None else packet(HEARTBEAT_UP, workers=sum(workers), ack=up[0], credit=up[1])
        return self.send(what, child, data, "", [] if up is None else [ABOVE], sends)

    def ask(
        self,
        what: str,
        seq: int,
        workers: int,
        counts: str,
        named: int = 0,
        total: bytes | None = None,
        minimum: tuple[int, int] = (0, 3),
        sum_header: dict[str, int] | None = None,
    ) -> Case:
        """A missing from above; it changes no slot. named: the workers that all children are told. total: the sum that goes
        up again, with the minimum of what was heard."""
        opened = self.jobs[5]
        children = opened["children"]
        header = {"seq": seq, "ack": 2, "credit": 9}
        data, to, sends = packet(MISSING, workers=workers, **header), [], b""
        if named:
            to, sends = [child["link"] for child in children], packet(MISSING, workers=named, **header)
        elif total is not None:
            everybody = sum(int(child["workers"], 16) for child in children)
            above = {"seq": seq, "format": I32, "workers": everybody, "ack": minimum[0], "credit": minimum[1]}
            to, sends = [opened["parent"]], packet(PUSH, total, **(above | (sum_header or {})))
        return self.send(what, ABOVE, data, counts, to, sends)

    def json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "shows": self.shows,
            "rules": self.rules,
            "modes": self.modes,
            "steps": self.steps,
        }
