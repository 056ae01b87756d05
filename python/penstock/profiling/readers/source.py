"""Text of a file that may be packed, cut off, huge or hostile: read in pieces, with bounds."""

from __future__ import annotations

import codecs
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from penstock.errors import Config

__all__ = ["MOST_LINE", "Text", "opened"]


class Text:
    """The text of one file, unpacked if it is gzip.

    `problem` says why the text ended before the file's end; nothing after that point is read.
    """

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.path = path
        self.problem = ""
        self._file = file
        self._packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        self._unpack = zlib.decompressobj(wbits=31)
        self._waiting = b""
        self._taken = self._given = 0
        self._decode = codecs.getincrementaldecoder("utf-8-sig")("replace")
        self._is_over = False
        self._rest = ""

    def read(self) -> str:
        """The next piece, about `PIECE` long; empty at the end."""
        while not self._is_over:
            try:
                raw = self._unpacked() if self._packed else self._file.read(PIECE)
            except OSError as error:
                self._end(f"cannot be read to its end: {error.strerror}")
                break
            self._given += len(raw)
            if self._given > MOST_BYTES:
                self._end(f"is longer than {MOST_BYTES >> 30} GiB of text: the rest is left out")
            if not raw:
                self._is_over = True
            if text := self._decode.decode(raw, final=not raw):
                return text
        return ""

    def readline(self, most: int) -> str:
        """Up to and with the end of a line, or ``most`` characters of it, as files do."""
        pieces = [self._rest]
        length = len(self._rest)
        while "\n" not in pieces[-1] and length < most and (more := self.read()):
            pieces.append(more)
            length += len(more)
        text = "".join(pieces)
        end = min(most, text.find("\n") + 1 or len(text))
        self._rest = text[end:]
        return text[:end]

    def lines(self) -> Iterator[str]:
        """Without their ends. What follows the first `MOST_LINE` characters of a line is left out."""
        rest = ""
        too_long = False
        while piece := self.read():
            # splitlines() would also split at signs that stand within strings.
            *whole, rest = (rest + piece).replace("\r", "\n").split("\n")
            for each in whole:
                if not too_long:
                    yield each[:MOST_LINE]
                too_long = False
            if len(rest) > MOST_LINE:
                if not too_long:
                    yield rest[:MOST_LINE]
                rest, too_long = "", True
        if rest and not too_long:
            yield rest

    def _unpacked(self) -> bytes:
        while True:
            if not self._waiting and not (more := self._file.read(PIECE >> 2)):
                if not self._unpack.eof:
                    self._end("is a gzip file without its end: what is there is read")
                return b""
            if not self._waiting:
                self._waiting = more
                self._taken += len(more)
            if self._unpack.eof:
                if not self._waiting.startswith(b"\x1f\x8b"):  # padding
                    self._waiting = b""
                    continue
                self._unpack = zlib.decompressobj(wbits=31)
            try:
                raw = self._unpack.decompress(self._waiting, PIECE)
            except zlib.error:
                self._end("is a broken gzip file: what stands before the fault is read")
                return b""
            self._waiting = self._unpack.unconsumed_tail or self._unpack.unused_data
            if self._given + len(raw) > FREE_BYTES + MOST_RATIO * self._taken:
                self._end(
                    f"unpacks to more than {MOST_RATIO} times its size: it is no trace or log, and the rest is left out"
                )
            if raw:
                return raw

    def _end(self, why: str) -> None:
        self.problem = f"{self.path.name} {why}"
        self._is_over = True


@contextmanager
def opened(path: Path) -> Iterator[Text]:
    """
    Raises:
        Config: it is no file, or may not be read.
    """
    try:
        if not path.is_file():
            raise Config(f"{path} is no file: {WHAT_WE_READ}")
        with path.open("rb") as file:
            yield Text(file, path)
    except Config:
        raise
    except (OSError, ValueError) as error:  # a ValueError: a path with a zero byte
        raise Config(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


WHAT_WE_READ = (
    "Penstock reads folders that it wrote, traces of torch.profiler (Chrome JSON, also .gz), logs of Megatron-LM with "
    "timers, and JSONL files of NCCL's inspector"
)

PIECE = 1 << 18
MOST_LINE = 1 << 20
"""Characters. The longest lines that tools write, Megatron's table of timers, have hundreds."""

MOST_BYTES = 8 << 30
"""A trace of 30 minutes of one rank has about 5 GiB (a guess from 87 MB for 13 s of the largest public one that was read)."""

MOST_RATIO, FREE_BYTES = 200, 64 << 20
"""Traces of torch.profiler shrink to between 1/10 and 1/30; what shrinks to 1/1000 says one thing again and again."""
