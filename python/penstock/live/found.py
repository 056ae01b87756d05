"""The file by which `penstock top` finds a job on this host: for its user alone, and locked as long as the job runs."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Entry", "Found", "found"]


class Entry:
    """The file of a job of this process.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, url: str, what: str) -> None:
        found(clean=True)
        folder = next((folder for folder in _folders() if os.access(folder, os.W_OK)), Path(tempfile.gettempdir()))
        self.path = folder / f"{_PREFIX}{os.getuid()}-{os.getpid()}-{secrets.token_hex(4)}.json"
        # Under another name until it is locked: it would count as that of a dead job.
        hidden = self.path.with_name(f".{self.path.name}")
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(hidden, flags, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            os.write(self._file, json.dumps({"url": url, "what": what}).encode())
            os.rename(hidden, self.path)
        except OSError:
            self.close()
            hidden.unlink(missing_ok=True)
            raise

    def remove(self) -> None:
        """The job has ended."""
        self.path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Without it the file counts as that of a dead job. A forked child calls it: it shares the lock."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


@dataclass(frozen=True)
class Found:
    """A job of this user on this host."""

    url: str
    """With the token."""
    what: str


def found(*, clean: bool = False) -> list[Found]:
    """The running jobs of this user. ``clean``: the files of dead ones are removed."""
    return [each for folder in _folders() for each in _in(folder, clean)]


def _in(folder: Path, clean: bool) -> Iterator[Found]:
    for path in sorted(folder.glob(f"{_PREFIX}{os.getuid()}-*.json")):
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            about = os.fstat(file)
            # Anybody may write into /tmp; a file of another user would lead this one's viewer, and nothing else, astray.
            if about.st_uid != os.getuid() or not stat.S_ISREG(about.st_mode):
                continue
            if _is_free(file):
                if clean:
                    path.unlink(missing_ok=True)
                continue
            given = json.loads(os.read(file, 4096))
            yield Found(str(given["url"]), str(given["what"]))
        except (OSError, ValueError, KeyError, TypeError):
            continue
        finally:
            os.close(file)


def _is_free(file: int) -> bool:
    """Whether nobody holds the lock: the job's process is gone."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _folders() -> list[Path]:
    """Where files may be, the best place first: a job may have been started without a login's XDG_RUNTIME_DIR."""
    given = os.environ.get("XDG_RUNTIME_DIR", "")
    named = [Path(given)] if given else []
    each = dict.fromkeys([*named, Path(f"/run/user/{os.getuid()}"), Path(tempfile.gettempdir())])
    return [folder for folder in each if folder.is_dir()]


_PREFIX = "penstock-live-"
