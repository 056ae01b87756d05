"""A daemon from its options to its end."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

__all__ = ["PORT", "options", "parse_address", "serve"]

PORT = 7471


def options(function: Callable[..., None]) -> Callable[..., None]:
    """The options that aggregators and servers share."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def serve(
    role: str,
    *,
    listen: str | None,
    slots: int,
    memory: int,
    jobs: int,
    secret_file: str | None,
    no_offloads: bool,
    buffer: int,
    forget_after: float,
    drain_timeout: float,
    drop: float | None,
    seed: int,
    shards: int = 1,
) -> None:
    """Runs a daemon until a signal has ended it; a second signal ends it at once, with 1.

    Raises click's errors where an option cannot be, or the address cannot be had.
    """
    from penstock import _core, errors
    from penstock.runtime import config

    if listen is None:
        raise click.UsageError(
            f"Missing option '--listen': the address that workers reach, and the port if not {PORT}."
        )
    try:
        settings = config.read()
        secret = _read_secret(secret_file) if secret_file else settings.job_secret()
        # Who starts a daemon wants to know where it listens.
        _core.init_logging(settings.log if "PENSTOCK_LOG" in os.environ else "info")
        daemon = _core.Daemon(
            role,
            parse_address(listen),
            shards=shards,
            slots=slots,
            memory_bytes=memory,
            jobs=jobs,
            secret=secret,
            offloads=not no_offloads,
            buffer_bytes=buffer,
            forget_after_s=forget_after,
            drain_timeout_s=drain_timeout,
            drop=None if drop is None else (drop, seed),
        )
    except errors.Config as error:
        raise click.ClickException(str(error)) from None
    signals = 0

    def ask(number: int, _: Any) -> None:
        nonlocal signals
        signals += 1
        if signals == 1:
            click.echo(
                f"{signal.Signals(number).name}: ends when no sum is half done; a second signal ends it at once",
                err=True,
            )
            daemon.drain()

    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, ask)
    click.echo(f"penstock {role} on {daemon.address}")
    while not daemon.wait(_LOOK_S):
        if signals > 1:
            raise SystemExit(1)


def parse_address(text: str) -> str:
    """ "ip:port" from an address or a name, with or without a port ("[::1]:7471" has one, "::1" has none).

    Raises click.BadParameter where nothing is known by that name.
    """
    host, port = text, str(PORT)
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":") or port
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    try:
        if not 0 <= int(port) <= 65535:
            raise ValueError
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
    except (OSError, ValueError):
        raise click.BadParameter(f"{text!r} is not an address, such as 10.0.0.1 or 10.0.0.1:{PORT}") from None
    address, number = socket.getnameinfo(found[4], socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)
    return f"[{address}]:{number}" if found[0] == socket.AF_INET6 else f"{address}:{number}"


class _Bytes(click.ParamType):
    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from penstock import _core

        try:
            return _core.parse_bytes(value) if isinstance(value, str) else int(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _read_secret(path: str) -> bytes:
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise click.ClickException(f"--secret-file {path} cannot be read: {error.strerror}") from None
    if not secret:
        raise click.ClickException(f"--secret-file {path} is empty")
    return secret


# How long a signal may go unnoticed: Python runs its handlers between calls.
_LOOK_S = 0.1

_OPTIONS = (
    click.option("--listen", metavar="ADDR[:PORT]", help=f"What workers reach; port {PORT} if none is given."),
    click.option(
        "--slots",
        type=click.IntRange(1),
        default=65536,
        show_default=True,
        help="Slots of all jobs together; a job takes as many as its window.",
    ),
    click.option(
        "--memory",
        type=_Bytes(),
        default="1G",
        show_default=True,
        help="Bytes of sums of all jobs together, such as 512M.",
    ),
    click.option("--jobs", type=click.IntRange(1), default=64, show_default=True, help="Jobs at a time."),
    click.option(
        "--secret-file",
        metavar="FILE",
        help="Who has this file's content may open jobs. Else PENSTOCK_SECRET or PENSTOCK_SECRET_FILE.",
    ),
    click.option("--no-offloads", is_flag=True, help="Without GSO and GRO: every packet is one on every interface."),
    click.option(
        "--buffer", type=_Bytes(), default="16M", show_default=True, help="The kernel's buffers of each socket."
    ),
    click.option(
        "--forget-after",
        type=click.FloatRange(0.1),
        default=60.0,
        show_default=True,
        help="Seconds of silence after which a job is closed.",
    ),
    click.option(
        "--drain-timeout",
        type=click.FloatRange(0),
        default=10.0,
        show_default=True,
        help="Seconds that SIGTERM leaves to sums that are half done.",
    ),
    click.option(
        "--drop",
        type=click.FloatRange(0, 1, max_open=True),
        metavar="RATE",
        help="For tests: the share of received packets to throw away.",
    ),
    click.option(
        "--seed",
        type=click.IntRange(0, 2**64 - 1),
        default=0,
        show_default=True,
        help="For tests: which packets --drop takes.",
    ),
)
