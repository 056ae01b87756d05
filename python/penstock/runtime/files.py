"""Files that are written whole or not at all, and found to be writable before the work that fills them."""

from __future__ import annotations

import errno
import os
import secrets
import tempfile
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace a file's content, so that readers find the old one or the new one. Folders above it are made.

    A link, a pipe or a device is written to as it is, and then readers may find a part.

    Raises: OSError; a file that was there is then unchanged.
    """
    data = content.encode() if isinstance(content, str) else content
    if _is_written_in_place(path):
        path.write_bytes(data)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not by `tempfile`, whose files nobody else may read: a report is for all whom the umask lets read it.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as file:
            file.write(data)
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
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path.parent) as file:
        os.posix_fallocate(file.fileno(), 0, ROOM_BYTES)


def _is_written_in_place(path: Path) -> bool:
    return path.exists() and (path.is_symlink() or not path.is_file())


ROOM_BYTES = 1 << 20
"""A report has some 300 KiB."""
