"""A file system that is soon full."""

from __future__ import annotations

import contextlib
import pathlib
import subprocess
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def mounted(folder: pathlib.Path, size: str) -> Iterator[None]:
    """On ``folder``, which is made, a file system of that size (as ``mount`` has it: "64k"). Skips the test where none may be
    mounted."""
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("cannot mount a small file system here: " + made.stderr.decode())
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
