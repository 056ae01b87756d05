"""Names that have changed: the old one works for one more release, with a warning.

An old name in a script warns with a DeprecationWarning at the line that uses it. An old name in the environment or in a file is
reported in the log: the file of a tuner may be older than the script that reads it.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["UNTIL", "arguments", "message", "warn"]

Call = TypeVar("Call", bound=Callable[..., Any])

UNTIL = "0.2"
"""The release that knows the new names only."""


def message(old: str, new: str) -> str:
    """The message for a user of an old name."""
    return f"{old} is now {new}; the old name works until release {UNTIL}"


def warn(old: str, new: str, *, stacklevel: int = 2) -> None:
    """Warn of an old name in a script. With ``stacklevel`` 2 the warning names the line that called the caller of this."""
    warnings.warn(message(old, new), DeprecationWarning, stacklevel=stacklevel + 1)


def arguments(**names: str) -> Callable[[Call], Call]:
    """A decorator for functions and classes: keyword arguments may have their old names, ``old="new"``.

    The decorated call raises TypeError if it gets an argument under both names.
    """

    def decorate(function: Call) -> Call:
        if isinstance(function, type):
            made: Any = function
            made.__init__ = decorate(made.__init__)
            return function

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for old, new in names.items():
                if old not in kwargs:
                    continue
                if new in kwargs:
                    raise TypeError(f"{function.__qualname__}() takes {new} or its old name {old}, not both")
                warn(f"the argument {old}", new, stacklevel=2)
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate
