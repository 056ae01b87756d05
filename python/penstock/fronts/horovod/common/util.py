"""What Horovod keeps under ``horovod.common.util`` and scripts use."""

from __future__ import annotations

import warnings
from typing import TypeVar

from penstock.fronts.horovod.negotiation import Op

__all__ = ["chosen_op", "num_rank_is_power_2", "split_list"]

Element = TypeVar("Element")


def chosen_op(op: int | None, average: bool | None) -> Op:
    """Which reduction is meant by the old ``average`` and the new ``op``, of which only one may be given.

    Raises:
        ValueError: both are given, or ``op`` is no reduction.
    """
    if op is not None:
        if average is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        return Op(op)
    if average is None:
        return Op.AVERAGE
    warnings.warn(
        "Parameter `average` has been replaced with `op` and will be removed in v1.0", DeprecationWarning, stacklevel=3
    )
    return Op.AVERAGE if average else Op.SUM


def num_rank_is_power_2(num_rank: int) -> bool:
    return num_rank != 0 and num_rank & (num_rank - 1) == 0


def split_list(whole: list[Element], count: int) -> list[list[Element]]:
    """Cut a list into ``count`` parts of about the same length."""
    each, more = divmod(len(whole), count)
    return [whole[i * each + min(i, more) : (i + 1) * each + min(i + 1, more)] for i in range(count)]
