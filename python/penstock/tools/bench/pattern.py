"""Values that show where a wrong byte came from: fill a tensor with a `Run`, and check one against what it must hold.

Element j of a run is ``(origin + j + turn) % PERIOD + 1`` times the run's weight. All are whole numbers that the dtype holds
exactly, so every sum has one right answer, whatever the order. ``turn`` differs from operation to operation: what an
earlier one left behind is wrong as well.
"""

from __future__ import annotations

import torch

from penstock.tools.bench.collectives import PERIOD, Run, largest_value
from penstock.tools.bench.task import WrongResult

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int32": torch.int32,
    "int64": torch.int64,
}


class Pattern:
    """Fills and checks tensors of one dtype. Both take one pass over memory, in pieces that stay in cache."""

    def __init__(self, dtype: str, ranks: int, device: str = "cpu"):
        """For tensors on ``device``. Raises ValueError when ``dtype`` cannot hold the sums of so many ranks exactly."""
        self.dtype = DTYPES[dtype]
        if largest_value(ranks) > exact_limit(self.dtype):
            raise ValueError(
                f"{dtype} holds whole numbers exactly up to {exact_limit(self.dtype)}, and the sums of {ranks} ranks reach"
                f" {largest_value(ranks)}: use fewer ranks, or float32"
            )
        self.ranks = ranks
        self._base = (torch.arange(PIECE + PERIOD) % PERIOD + 1).to(device, self.dtype)

    def fill(self, tensor_N: torch.Tensor, run: Run, turn: int) -> None:
        """Writes ``run`` into the first ``run.count`` elements."""
        for begin in range(0, run.count, PIECE):
            end = min(begin + PIECE, run.count)
            torch.mul(self._piece(run, turn, begin, end), run.weight, out=tensor_N[begin:end])

    def check(self, tensor_N: torch.Tensor, runs: tuple[Run, ...], turn: int, what: str) -> None:
        """Raises WrongResult, naming ``what``, unless ``tensor_N`` holds exactly ``runs``, one after the other."""
        at = 0
        for run in runs:
            for begin in range(0, run.count, PIECE):
                end = min(begin + PIECE, run.count)
                got_P = tensor_N[at + begin : at + end]
                want_P = self._piece(run, turn, begin, end) * run.weight
                if not torch.equal(got_P, want_P):
                    raise WrongResult(self._explain(tensor_N, runs, turn, what, at + begin, got_P, want_P))
            at += run.count

    def _piece(self, run: Run, turn: int, begin: int, end: int) -> torch.Tensor:
        phase = (run.origin + turn + begin) % PERIOD
        return self._base[phase : phase + end - begin]

    def _explain(
        self,
        tensor_N: torch.Tensor,
        runs: tuple[Run, ...],
        turn: int,
        what: str,
        at: int,
        got_P: torch.Tensor,
        want_P: torch.Tensor,
    ) -> str:
        """Where the first wrong piece goes wrong, and which source its first wrong element would fit."""
        wrong = (got_P != want_P).nonzero()[:, 0]
        first = int(wrong[0])
        got, want = got_P[first].item(), want_P[first].item()
        index = at + first
        text = (
            f"{what}: element {index} of {tensor_N.numel()} is {got:g}, must be {want:g}"
            f" ({len(wrong)} of the {len(got_P)} elements from {at} on are wrong)"
        )
        run, offset = _run_at(runs, index)
        base = (run.origin + offset + turn) % PERIOD + 1
        weight = got / base
        if got == 0:
            return f"{text}; nothing was written there"
        if weight not in range(1 << self.ranks):
            return (
                f"{text}; no sum of ranks gives that at this position: bytes of another position or operation, or torn"
            )
        return f"{text}; that is the sum over ranks {_ranks(int(weight))}, where {_ranks(run.weight)} must be"


def exact_limit(dtype: torch.dtype) -> int:
    """Up to this, every whole number is exact in ``dtype``."""
    if dtype.is_floating_point:
        return int(2 / torch.finfo(dtype).eps)
    return torch.iinfo(dtype).max


def _run_at(runs: tuple[Run, ...], index: int) -> tuple[Run, int]:
    for run in runs:
        if index < run.count:
            return run, index
        index -= run.count
    raise IndexError(index)


def _ranks(weight: int) -> list[int]:
    return [rank for rank in range(weight.bit_length()) if weight >> rank & 1]


PIECE = 1 << 18
"""Elements of a piece: 1 MiB of f32, which the second-level cache of current machines holds."""
