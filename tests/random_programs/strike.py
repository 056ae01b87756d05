"""Lets a rank be struck at its event, and helps it up again: half of this runs on the rank, the other half in the test process.

They meet in a folder: the rank writes `STRUCK` when the event has come, and a process that is to be cut off goes on when
it finds `DONE`.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Any

from penstock.errors import Closed

if TYPE_CHECKING:
    from penstock.testbed import Testbed

STRUCK, DONE = "struck", "done"


class Target:
    """On a rank: strikes this process when its fault's event has come. Once."""

    def __init__(self, fault: dict[str, Any] | None, rank: int, folder: str | None) -> None:
        self._fault = fault if fault is not None and fault["rank"] == rank else None
        self._folder = pathlib.Path(folder or "")
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._watching: threading.Thread | None = None

    def begin(self) -> None:
        """The rank is about to make its group."""
        if self._fault is not None and self._fault["at"][0] in ("begin", "frames", "finished"):
            self._watching = threading.Thread(target=self._watch, name="watch", daemon=True)
            self._watching.start()

    def at(self, *place: Any) -> None:
        """The rank has come to this place."""
        if self._fault is not None and self._fault["at"] == list(place):
            self._strike()

    def end(self) -> None:
        self._over.set()
        if self._watching is not None:
            self._watching.join()
            self._watching = None

    def _watch(self) -> None:
        assert self._fault is not None
        what, *count = self._fault["at"]
        while what != "begin" and not self._over.is_set() and _counted(what) < count[0]:
            time.sleep(_LOOK_S)
        if not self._over.is_set():
            self._strike()

    def _strike(self) -> None:
        with self._lock:
            fault, self._fault = self._fault, None
        if fault is None:
            return
        time.sleep(fault["delay_us"] / 1e6)
        # In one piece: the other side reads it as soon as it is there.
        written = self._folder / "writing"
        written.write_text(json.dumps({"at_s": time.monotonic(), "pid": os.getpid()}))
        written.rename(self._folder / STRUCK)
        if fault["kind"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault["kind"].endswith("stop"):
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            deadline_s = time.monotonic() + _CUT_WITHIN_S
            while not (self._folder / DONE).exists() and time.monotonic() < deadline_s:
                time.sleep(_LOOK_S)


class Helper:
    """In the test process, while a program runs: cuts off the rank that asks for it, and lets it go on when its time has come.

    Args:
        hosts: of the ranks, where they are emulated.
    """

    def __init__(self, fault: dict[str, Any], folder: pathlib.Path, bed: Testbed | None, hosts: list[int]) -> None:
        self._fault, self._folder, self._bed, self._hosts = fault, folder, bed, hosts
        self._over = threading.Event()
        self.struck: dict[str, Any] | None = None
        """When it happened (``at_s``), and when the rank went on (``until_s``), if it did."""
        self._thread = threading.Thread(target=self._help, name="helper", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """The program is over; whatever is still cut off is joined again."""
        self._over.set()
        self._thread.join()

    def _help(self) -> None:
        while not (self._folder / STRUCK).exists():
            if self._over.wait(_HELP_S):
                if not (self._folder / STRUCK).exists():
                    return
                break
        struck = json.loads((self._folder / STRUCK).read_text())
        kind = self._fault["kind"]
        if kind == "kill":
            self.struck = struck
            return
        if kind.endswith("stop"):
            while not self._over.is_set() and not _is_stopped(struck["pid"]):
                self._over.wait(_HELP_S)
        else:
            self._cut()
            struck["at_s"] = time.monotonic()
            (self._folder / DONE).touch()
        self.struck = struck
        self._over.wait(self._fault.get("lasts_s"))
        if kind.endswith("stop"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(struck["pid"], signal.SIGCONT)
        else:
            self._join()
        self.struck = {**struck, "until_s": time.monotonic()}

    def _cut(self) -> None:
        assert self._bed is not None, "only emulated hosts are cut off"
        if "from" not in self._fault:
            self._bed.drop_link(self._hosts[self._fault["rank"]])
            return
        for here, there in self._pair():
            # As a testbed does: a rule on what leaves would make sends fail.
            rules = (
                "add table inet parted; add chain inet parted arrive { type filter hook input priority 0; }; "
                f"add rule inet parted arrive ip saddr {self._bed.address(there)} drop"
            )
            self._bed.inside(here, lambda rules=rules: subprocess.run(["nft", rules], check=True))

    def _join(self) -> None:
        assert self._bed is not None, "it was cut off"
        if "from" not in self._fault:
            self._bed.restore_link(self._hosts[self._fault["rank"]])
            return
        for here, _ in self._pair():
            self._bed.inside(here, lambda: subprocess.run(["nft", "delete table inet parted"], check=True))

    def _pair(self) -> list[tuple[int, int]]:
        one, other = self._hosts[self._fault["rank"]], self._hosts[self._fault["from"]]
        return [(one, other), (other, one)]


def _counted(what: str) -> int:
    from penstock.runtime import process

    try:
        stats = process.stats()
    except Closed:
        return 0  # not yet, or no more
    if what == "finished":
        return int(stats["finished_operations"])
    return sum(stream["sent_frames"] for peer in stats["peers"] for stream in peer["streams"])


def _is_stopped(pid: int) -> bool:
    """Or gone."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "TZ"
    except FileNotFoundError:
        return True


# Between two looks at the engine's counters, and at the folder.
_LOOK_S, _HELP_S = 0.0003, 0.002
_CUT_WITHIN_S = 10.0
