"""Whose gradients a reducer averages: it lives as long as one of its owners, in an attribute of the owners that Python's
collector sees, and no other one averages these gradients."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from typing import Any

from penstock.errors import Config as ConfigError
from penstock.training.trained import Trained

__all__ = ["check_sole", "keep", "release"]


def keep(one: Any, owners: Iterable[Any]) -> None:
    """Let each of the owners, parameters or modules, keep an object alive."""
    for owner in owners:
        if not isinstance(owner.__dict__.get(_KEPT), _Kept):
            owner.__dict__[_KEPT] = _Kept()
        owner.__dict__[_KEPT].add(one)


def release(one: Any, owners: Iterable[Any]) -> None:
    """They keep it no more."""
    for owner in owners:
        kept = owner.__dict__.get(_KEPT, set())
        kept.discard(one)
        if not kept:
            owner.__dict__.pop(_KEPT, None)


def check_sole(trained: Trained, reducers: Mapping[int, Any]) -> None:
    """Raise if another reducer averages one of these parameters: both would do so at the same time, in the same memory.

    Args:
        reducers: those that are alive.
    """
    if _averaged(trained, reducers) is not None:
        gc.collect()  # a reducer that nobody refers to any more, though Python has not noticed
    name = _averaged(trained, reducers)
    if name is not None:
        raise ConfigError(
            f"the gradient of {name} is averaged by another reducer, which was not closed: call its close() before another "
            "one is made, on all ranks"
        )


def _averaged(trained: Trained, reducers: Mapping[int, Any]) -> str | None:
    """The name of a parameter that some reducer averages already."""
    taken = set().union(*(other._trained.all for other in list(reducers.values())))
    names = zip(trained.dense + trained.sparse, trained.names + trained.sparse_names, strict=True)
    return next((name for one, name in names if one in taken), None)


class _Kept(set[Any]):
    """What an owner keeps alive. Copies of the owner keep nothing."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return set, ()

    def __deepcopy__(self, memo: Any) -> _Kept:
        return _Kept()


_KEPT = "_penstock_reducers"
