"""What a server of an endpoint takes, and what names and numbers may be."""

from __future__ import annotations

import dataclasses

from penstock.errors import Config as ConfigError

__all__ = ["MOST", "Limits", "check_count", "check_name"]


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a server takes of each client; clients learn it when they connect.

    A request or push above its limit is refused with an error, and nothing is sent. The other limits lead to no error: what is
    beyond them waits at the client, and the most urgent goes first.
    """

    calls: int = 64
    """Calls that have not ended."""
    request_bytes: int = 1 << 20
    """Bytes of a request's data."""
    push_bytes: int = 1 << 30
    """Bytes of a push's data."""
    in_flight_bytes: int = 1 << 30
    """Bytes that lie at the server, or are on their way: data that handlers have not done with, and replies that the client has
    not taken. At least as many as the other two. Data of up to 8 KiB may come on top, for each of ``calls``."""

    def __post_init__(self) -> None:
        for limit, number in dataclasses.asdict(self).items():
            least, below = (1, 1 << 32) if limit == "calls" else (0, MOST)
            check_count(f"the limit {limit} of an endpoint", number, least, below)


def check_count(what: str, number: int, least: int, below: int) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or not least <= number < below:
        raise ConfigError(f"{what}: a whole number of at least {least} is wanted, and not {number!r}")


def check_name(name: str) -> None:
    try:
        is_good = isinstance(name, str) and 0 < len(name.encode()) <= _LONGEST_NAME
    except UnicodeEncodeError:
        is_good = False
    if not is_good:
        raise ConfigError(f"a name is a text of 1 to {_LONGEST_NAME} bytes, and not {name!r}")


MOST = 1 << 63
"""Above any number of bytes."""
# `Record::MAX_NAME`.
_LONGEST_NAME = 256
