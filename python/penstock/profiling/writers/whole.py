"""A file that is written piece by piece, and is there whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from penstock.errors import Config

__all__ = ["whole"]


@contextmanager
def whole(path: Path) -> Iterator[TextIO]:
    """A file to write to, which takes its name when the block ends well; until then the file that had it stays. Folders above it
    are made. A device or a pipe is written to as it is.

    Raises:
        Config: it cannot be written. Nothing is left of it.
    """
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            with path.open("w", encoding="utf-8") as device:
                yield device
            return
        path = path.resolve()
        path.parent.mkdir(parents=True, exist_ok=True)
        # Not by `tempfile`, whose files nobody else may read.
        temporary = path.with_name(f".{path.name[:200]}.{secrets.token_hex(4)}")
        try:
            with temporary.open("x", encoding="utf-8") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise Config(
            f"cannot write {path}: {error.strerror or error}; name a file in a folder that you may write to, on a disk with room"
        ) from error
