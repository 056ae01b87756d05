"""Checkpoints that survive deaths of workers: for jobs that torchrun restarts, and in case all workers die.

A checkpoint is an ordinary file of ``torch.save``, named ``step-<step>-<the first 16 digits of its SHA-256>.pt``. It is written
under another name, synced to the disk, and renamed, so it is either complete or absent. `Checkpoints.load` skips a file whose
bytes do not match its name (a bad disk, a truncated copy).

A folder may hold the checkpoints of several runs. Steps of one run grow; so a save at a step that is not beyond the newest
checkpoint begins another run, and its files are named ``step-<step>-run-<number>-<digits>.pt``. The newest checkpoint is that
of the last run, and `Checkpoints.save` removes old files of its own run only.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penstock.errors import Config as ConfigError
from penstock.training.elastic.state import State

__all__ = ["Checkpoints"]

log = logging.getLogger("penstock.elastic")


class Checkpoints:
    """The checkpoints of one job, in a folder that rank 0 can read and write; no other rank needs to.

    Args:
        folder: made where it is missing.
        keep: how many of a run to keep; two or more, so that there is an older one if the newest is damaged.
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int = 3) -> None:
        self.folder = Path(folder)
        self.keep = max(2, keep)

    def save(self, state: State) -> None:
        """Write the last commit. Rank 0 writes, and blocks until the file is on the disk; the other ranks return at once.

        Values in the state must be numbers, texts, tensors, and lists or dicts of them: `load` executes no pickled code.

        Raises:
            penstock.errors.Config: there are other values, such as NumPy's numbers. Older checkpoints stay.
            OSError, RuntimeError: the file could not be written. Older checkpoints stay.
        """
        if _rank() != 0:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        tree = state.snapshot()
        unfinished = self.folder / _UNFINISHED
        try:
            with unfinished.open("wb") as file:
                torch.save(tree, file)
                file.flush()
                os.fsync(file.fileno())
            _check_loads(unfinished, tree)
        except BaseException:
            # A disk that is full needs the room.
            unfinished.unlink(missing_ok=True)
            raise
        found = self._found()
        run, newest = found[0][0] if found else (0, -1)
        if tree["step"] <= newest:
            run += 1
            log.warning(
                "the folder %s holds checkpoints of another run, up to step %d: they are kept, and those of this run, which "
                "has come to step %d, go first from now on",
                self.folder,
                newest,
                tree["step"],
            )
        number = f"-run-{run}" if run else ""
        unfinished.rename(self.folder / f"step-{tree['step']:012d}{number}-{_digest(unfinished)}.pt")
        _sync_folder(self.folder)
        own = [path for (other, _), path in self._found() if other == run]
        for old in own[self.keep :]:
            old.unlink(missing_ok=True)

    def load(self, state: State) -> bool:
        """Load the newest complete checkpoint into ``state``, on all ranks, which all call this. Blocks.

        Rank 0 reads it, and the others get it over the default process group, if there is one.

        Returns: whether there was one. Without one all ranks have rank 0's state as it is.

        Raises:
            penstock.errors.Config: the newest complete one holds values that cannot be loaded (see `save`), or there are
                checkpoints and none of them can be read.
            OSError: the folder cannot be read.
            What ``load_state_dict`` raises on rank 0, where the checkpoint is of another model; penstock.errors.Config on the
            others. The state is as last committed.
        """
        tree, failure = None, None
        if _rank() == 0:
            try:
                tree = self._newest()
                if tree is not None:
                    state.adopt(tree)
            except Exception as error:
                failure = error
        found = tree is not None
        if dist.is_initialized():
            told: list[Any] = [found, None if failure is None else f"{type(failure).__name__}: {failure}"]
            dist.broadcast_object_list(told, src=0, device=torch.device("cpu"))
            found, text = told
            if text is not None and failure is None:
                raise ConfigError(f"rank 0 could not load a checkpoint: {text}")
        if failure is not None:
            raise failure
        if dist.is_initialized():
            state.share(0)
        return found

    def _newest(self) -> Any:
        found = self._found()
        for (_, step), path in found:
            try:
                if not path.stem.endswith(_digest(path)):
                    log.warning("checkpoint %s is damaged (its bytes do not fit its name); trying the one before", path)
                    continue
                tree = torch.load(path, map_location="cpu", weights_only=True)
            except pickle.UnpicklingError as error:
                # The ones before it hold such values, too: training would begin anew.
                raise ConfigError(f"checkpoint {path} is complete, but {_NOT_LOADED} ({error})") from error
            except (OSError, RuntimeError) as error:
                log.warning("checkpoint %s cannot be read (%s); trying the one before", path, error)
                continue
            log.info("going on from checkpoint %s, after step %d", path, step)
            return tree
        if found:
            # Training would begin anew.
            raise ConfigError(
                f"the folder {self.folder} holds {len(found)} checkpoint(s), and none can be read (the log says why): mend them, "
                "or use another folder to begin anew"
            )
        return None

    def _found(self) -> list[tuple[tuple[int, int], Path]]:
        """The checkpoints of the folder, as ((run, step), path), the newest first."""
        try:
            # Not by `glob`, which finds nothing in a folder that cannot be read.
            names = os.listdir(self.folder)
        except FileNotFoundError:
            names = []
        named = [(match, self.folder / name) for name in names if (match := _NAME.fullmatch(name))]
        return sorted((((int(match[2] or 0), int(match[1])), path) for match, path in named), reverse=True)


def _check_loads(path: Path, tree: Any) -> None:
    """Raise if `Checkpoints.load` would not load the file. Reads no tensor."""
    try:
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        kinds = {name: type(value).__name__ for name, value in tree["values"].items()}
        raise ConfigError(f"no checkpoint was written: {_NOT_LOADED}. The values are {kinds} ({error})") from error


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()[:16]


def _sync_folder(folder: Path) -> None:
    """Sync the folder: the file's new name, too, must be on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


_NAME = re.compile(r"step-(\d{12})(?:-run-(\d+))?-[0-9a-f]{16}\.pt")
_UNFINISHED = "unfinished"
_NOT_LOADED = (
    "its state holds values that only pickled code can load, such as NumPy's: keep numbers, texts, tensors, and lists or "
    "dicts of them"
)
_BLOCK = 1 << 20
