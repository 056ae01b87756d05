"""The file of a rank, written beside the training."""

from __future__ import annotations

import collections
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from penstock.profiling.record import Endings, Event, Header, Readings, Sample, Step, Watch, line

__all__ = ["Writer"]

Entry = Step | Sample | Endings | Watch | Event | Readings

_EVERY_S = 0.5
"""A rank that is killed loses no more than this."""

_PATIENCE_S = 5
"""For the last round of writing."""

_AT_ONCE = 16
"""Lines in one write. The training thread waits for the interpreter's lock as long as they take to make: about 0.2 ms."""

_MOST_WAITING = 10_000
"""Entries. A disk that hangs must not fill the memory; a second of training has some hundred."""


class Writer:
    """Takes what happened, and writes it twice a second on a thread of its own.

    Args:
        header: asked once a round if there is something to write, for a rank may learn its number late. None as long as it is
            not known whether the process is a rank: nothing is written then.
        path: where the file of that header is; what stands there is moved away first, for it is of another life of the rank.
        beat: called before each round of writing.
    """

    def __init__(
        self, header: Callable[[], Header | None], path: Callable[[Header], Path], beat: Callable[[], None]
    ) -> None:
        self._header = header
        self._path = path
        self._beat = beat
        self._waiting: collections.deque[Entry] = collections.deque()
        self._lost = 0
        self._file: int | None = None
        self._written: tuple[int, int] | None = None
        """Rank and world of the file."""
        self._place: tuple[int, int] | None = None
        """Device and inode of the file."""
        self._where = Path()
        self._length = 0
        self.is_broken = False
        self._is_hurried = False
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="penstock-profile", daemon=True)
        self._thread.start()

    def put(self, entry: Entry) -> bool:
        """Returns whether it is to be written."""
        if self.is_broken:
            return False
        if len(self._waiting) >= _MOST_WAITING:
            self._lost += 1
            return False
        self._waiting.append(entry)
        return True

    def drop(self) -> None:
        """Write nothing more."""
        self.is_broken = True
        self._waiting.clear()

    def hurry(self) -> None:
        """Write now, the header at least: a rank that is killed in its first second has a record, too."""
        self._is_hurried = True
        self._wake.set()

    def close(self, patience_s: float = _PATIENCE_S) -> None:
        """Write what is left. May be called again."""
        self._is_over = True
        self._wake.set()
        self._thread.join(patience_s)
        if self._thread.is_alive():
            return  # the disk hangs, and the process need not
        with self._lock:
            self._write()
            if self._file is not None:
                if self._is_ours():
                    os.close(self._file)
                self._file = None
                self.is_broken = True

    def _run(self) -> None:
        while not self._is_over:
            self._wake.wait(_EVERY_S)
            self._wake.clear()
            with contextlib.suppress(Exception):
                self._beat()
            with self._lock:
                self._write()

    def _write(self) -> None:
        """Lines are whole or not there: one that finds no room is cut off again."""
        if self.is_broken or not (self._waiting or self._is_hurried):
            return
        header = self._header()
        if header is None:
            return
        self._is_hurried = False
        try:
            self._open(header)
            while self._waiting:
                # Not all at once: the training wants the interpreter's lock, too.
                some = [line(self._waiting.popleft()) for _ in range(min(len(self._waiting), _AT_ONCE))]
                self._append("".join(some))
            if self._lost:
                lost, self._lost = self._lost, 0
                text = f"{lost} steps, samples and events are left out: the disk took too long"
                self._append(line(Event(header.start_ns, "left out", text)))
        except OSError as error:
            self.is_broken = True
            self._waiting.clear()
            if self._file is not None and self._is_ours():
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file, self._length)
                    if not self._length:
                        self._where.unlink()
            _say(
                f"penstock profile: cannot write {error.filename or self._where}: {error.strerror}. The recording of this rank "
                "ends here; the training goes on. Free some space, or choose another folder with --output."
            )

    def _open(self, header: Header) -> None:
        """The file of this rank: another one if its number has changed since."""
        if self._written != (header.rank, header.world):
            if self._file is not None and self._is_ours():
                os.close(self._file)
            self._file = None
            self._written, self._length = (header.rank, header.world), 0
            while True:
                self._where = self._path(header)
                try:
                    self._keep(os.O_CREAT | os.O_EXCL)
                    break
                except FileExistsError:  # another process has come between
                    continue
            self._append(line(header))
        elif not self._is_ours():
            self._keep(0)

    def _keep(self, how: int) -> None:
        self._file = os.open(self._where, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | how, 0o644)
        found = os.fstat(self._file)
        self._place = found.st_dev, found.st_ino

    def _is_ours(self) -> bool:
        """Scripts close descriptors that they do not know, as daemons do, and the number may be that of a file of theirs then."""
        assert self._file is not None
        try:
            found = os.fstat(self._file)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self._place

    def _append(self, text: str) -> None:
        """What of it has come as far as the file counts up to the last whole line."""
        assert self._file is not None
        data = memoryview(text.encode())
        done = 0
        try:
            while done < len(data):
                done += os.write(self._file, data[done:])
        finally:
            self._length += bytes(data[:done]).rfind(b"\n") + 1


def _say(text: str) -> None:
    with contextlib.suppress(Exception):  # a script may have closed it
        if sys.stderr is not None:
            print(text, file=sys.stderr, flush=True)
