"""Objects that live as long as one of their owners, in an attribute of the owners that Python's collector sees."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["keep", "release"]


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


class _Kept(set[Any]):
    """What an owner keeps alive. Copies of the owner keep nothing."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return set, ()

    def __deepcopy__(self, memo: Any) -> _Kept:
        return _Kept()


_KEPT = "_penstock_reducers"
