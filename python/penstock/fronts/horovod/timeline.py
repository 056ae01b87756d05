"""Horovod's timeline: what happens to each operation, as a file for a browser's trace viewer.

An operation is a row. It is negotiated from its submission until all ranks have it, then executed until somebody has waited
for it.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from typing import Any, Protocol, TextIO

__all__ = ["Timeline"]

log = logging.getLogger("penstock")


class Ends(Protocol):
    """A callback for the moment in which a caller has seen an operation's end."""

    def on_seen(self, callback: Any) -> None: ...


class Timeline:
    """Writes events while it is on; any thread may call it. Only rank 0 of a job turns it on.

    A file that cannot be written any more (a full disk) ends the timeline with a warning, and not the job.
    """

    def __init__(self) -> None:
        self._file: TextIO | None = None
        self._lock = threading.Lock()
        self._rows: dict[str, int] = {}
        self._mark_cycles = False
        self._began_s = 0.0

    def start(self, path: str, mark_cycles: bool) -> None:
        """Begin a file at ``path``; one that is being written is finished first."""
        self.stop()
        with self._lock:
            self._file = open(path, "w")  # noqa: SIM115  it stays open until `stop`
            self._rows = {}
            self._mark_cycles = mark_cycles
            self._began_s = time.monotonic()
            wall_us = int(time.time() * 1e6)
            start = {"name": "start_time", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros": wall_us}}
            self._write("[\n" + _line(start))

    def stop(self) -> None:
        """Finish the file, if there is one: it is valid JSON from here on."""
        with self._lock:
            self._write("{}]\n")
            self._end()

    def negotiating(self, name: str, kind: str) -> None:
        self._event(name, "B", f"NEGOTIATE_{kind}")

    def started(self, name: str, kind: str, result: Ends) -> None:
        if self._file is None:
            return
        self._event(name, "E", f"NEGOTIATE_{kind}")
        self._event(name, "B", kind)
        result.on_seen(lambda: self._event(name, "E", kind))

    def cycle(self) -> None:
        """A round begins."""
        if self._mark_cycles:
            self._event("rounds", "i", "CYCLE_START")

    def _event(self, row: str, phase: str, what: str) -> None:
        with self._lock:
            if self._file is None:
                return
            text = ""
            if row not in self._rows:
                self._rows[row] = len(self._rows) + 1
                text = _line({"name": "process_name", "ph": "M", "pid": self._rows[row], "args": {"name": row}})
            now_us = (time.monotonic() - self._began_s) * 1e6
            self._write(text + _line({"name": what, "ph": phase, "ts": round(now_us), "pid": self._rows[row]}))

    def _write(self, text: str) -> None:
        """The caller holds the lock."""
        if self._file is not None:
            try:
                self._file.write(text)
            except OSError as error:
                self._end(error)

    def _end(self, why: OSError | None = None) -> None:
        """Close the file. The caller holds the lock."""
        file, self._file = self._file, None
        if file is None:
            return
        try:
            file.close()  # this writes what is still in memory
        except OSError as error:
            why = why or error
        if why is not None:
            log.warning("the timeline ends here, and its file %s is incomplete: %s", file.name, why.strerror)


def _line(event: dict[str, Any]) -> str:
    return json.dumps(event) + ",\n"
