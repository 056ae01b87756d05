"""Files that are written whole or not at all, and found to be writable before the work that fills them."""

from __future__ import annotations

import errno
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace a file's content as `whole` does.

    Raises: OSError; a file that was there is then unchanged.
    """
    with whole(path, is_text=not isinstance(content, bytes)) as file:
        file.write(content)


@contextmanager
def whole(path: Path, *, is_text: bool = True) -> Iterator[IO[Any]]:
    """A file to write to, piece by piece, which takes its name when the block ends well: readers find the old one or the new one.
    Folders above it are made. Of a link the file behind it is replaced.

    A pipe or a device is written to as it is, and then readers may find a part.

    Raises: OSError, then as whatever the block raises; a file that was there is unchanged, and nothing is left of the new one.
    """
    encoding, kind = ("utf-8", "") if is_text else (None, "b")
    if _is_written_in_place(path):
        with path.open(f"w{kind}", encoding=encoding) as file:
            yield file
        return
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not by `tempfile`, whose files nobody else may read: a report is for all whom the umask lets read it.
    temporary = path.with_name(f".{path.name[:200]}.{secrets.token_hex(4)}")
    try:
        with temporary.open(f"x{kind}", encoding=encoding) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def check_writable(path: Path) -> None:
    """Find out whether `write_whole` could write `ROOM_BYTES` there. Leaves nothing but folders.

    Raises: OSError.
    """
    if _is_written_in_place(path):
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path.parent) as file:
        os.posix_fallocate(file.fileno(), 0, ROOM_BYTES)


def _is_written_in_place(path: Path) -> bool:
    return path.exists() and not path.is_file()


ROOM_BYTES = 1 << 20
"""A report has some 300 KiB."""
