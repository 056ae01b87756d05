"""A training under the recorder of `penstock profile`, and what that has recorded: what the profile's benches share."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.errors import PenstockError
from penstock.profiling.readers import load
from penstock.profiling.record import Record
from penstock.tools.bench.launcher import BenchError
from penstock.tools.profile import run

__all__ = ["recorded"]


def recorded(
    command: Sequence[str], folder: Path, what: str, settings: Mapping[str, str | float] | None = None
) -> list[Record]:
    """Run a training, recorded in this folder. Blocks until it ends. Returns a record a rank.

    Args:
        what: the training, for messages.
        settings: as for `run.run`.

    Raises:
        BenchError: it failed, or recorded nothing.
        KeyboardInterrupt: it was interrupted.
    """
    code = run.run(command, folder, settings, stdout=subprocess.DEVNULL)
    if code in (128 + signal.SIGINT, 128 + signal.SIGTERM):
        raise KeyboardInterrupt  # the training has taken the signal, which was for all of them
    if code != 0:
        raise BenchError(f"the training of {what} ended with status {code}")
    try:
        records = load(folder)
    except PenstockError as error:
        raise BenchError(f"the training of {what} recorded nothing: {error}") from error
    assert isinstance(records, list), "a folder of ours has records"
    return records
