"""`penstock.files.whole` with an error that says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from penstock import files
from penstock.errors import Config

__all__ = ["whole"]


@contextmanager
def whole(path: Path) -> Iterator[IO[str]]:
    """Raises: Config, if it cannot be written. Nothing is left of it."""
    try:
        with files.whole(path) as file:
            yield file
    except OSError as error:
        raise Config(
            f"cannot write {path}: {error.strerror or error}; name a file in a folder that you may write to, on a disk with room"
        ) from error
