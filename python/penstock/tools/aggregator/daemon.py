"""A daemon from its options to its end."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from penstock import _core

if TYPE_CHECKING:
    from penstock.runtime.config import Settings
    from penstock.runtime.endpoints import Server

__all__ = ["options", "parse_address", "serve"]


def options(role: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The options of a role's daemon: those of the one table, which is Rust's (crates/penstock-node/src/options.rs), and two
    that take the address from a cluster file, which only Python reads."""

    def declare(function: Callable[..., None]) -> Callable[..., None]:
        for option in (_host, _cluster):
            function = option(function)
        for name, value, default, text in reversed(_core.daemon_options(role)):
            if value is None:
                option = click.option(f"--{name}", is_flag=True, help=text)
            else:
                shown = default is not None
                option = click.option(
                    f"--{name}", type=_Value(name), metavar=value, default=default, show_default=shown, help=text
                )
            function = option(function)
        return function

    return declare


def serve(role: str, given: dict[str, Any], *, endpoint: str | None = None) -> None:
    """Runs a daemon until a signal has ended it; a second signal ends it at once, with 1.

    Args:
        role: "aggregator" or "server".
        given: what click has read of :func:`options`.
        endpoint: "host:port" where a server also answers over streams.

    Raises click's errors where an option cannot be, or the address cannot be had.
    """
    from penstock import errors
    from penstock.runtime import config

    texts = _said(role, given)
    if given["cluster"] is not None:
        texts["listen"] = _listen_of_cluster(role, given)
    elif given["host"] is not None:
        raise click.UsageError("--host names a host of a cluster file: give --cluster too")
    if "listen" not in texts:
        [help_text] = [text for name, _, _, text in _core.daemon_options(role) if name == "listen"]
        raise click.UsageError(f"Missing option '--listen', or '--cluster' and '--host'. {help_text}")
    try:
        settings = config.read()
        secret_file = texts.get("secret-file")
        secret = None if secret_file else settings.job_secret()
        # A user who starts a daemon needs to know its address.
        _core.init_logging(settings.log if "PENSTOCK_LOG" in os.environ else "info")
        daemon = _core.Daemon(role, texts, secret=secret)
        streams = None if endpoint is None else _answer(daemon, endpoint, settings, secret_file)
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
    try:
        while not daemon.wait(_LOOK_S):
            if signals > 1:
                raise SystemExit(1)
    finally:
        if streams is not None:
            streams.close(_CLOSE_S)


def _said(role: str, given: dict[str, Any]) -> dict[str, str]:
    """The options that were given, "" for a flag. Defaults are left to the daemon: that of --memory is what the machine has, if
    that is less than the help says."""
    source = click.get_current_context().get_parameter_source
    keys = {name: name.replace("-", "_") for name, *_ in _core.daemon_options(role)}
    said = {name: given[key] for name, key in keys.items() if source(key) is not ParameterSource.DEFAULT}
    return {name: "" if text is True else text for name, text in said.items()}


def _answer(daemon: _core.Daemon, at: str, settings: Settings, secret_file: str | None) -> Server:
    """The endpoint of a server (docs/reference/aggregator.md, "Over streams"). Raises: penstock.errors.Config."""
    from penstock.errors import PenstockError
    from penstock.runtime.door import Address
    from penstock.runtime.endpoints import Incoming, Limits, Server, Whole

    def jobs(call: Incoming) -> bytes:
        try:
            start = int(call.data.tobytes() or b"0")
        except ValueError:
            raise PenstockError("a request of jobs has no data, or the number of the first job, as text") from None
        if (found := daemon.jobs(start)) is None:
            raise PenstockError("a shard does not answer")
        return found.encode()

    def answered(method: str, path: str, body: bytes) -> bytes:
        """As over HTTP. A client has proved that it knows the secret when it connected."""
        status, told = daemon.answer(method, path, body)
        if status >= 300:
            raise PenstockError(json.loads(told)["error"])
        return told.encode()

    def open_job(call: Incoming) -> bytes:
        return answered("PUT", f"/jobs/{call.name.removeprefix('open/')}", call.data.tobytes())

    def close_job(call: Incoming) -> bytes:
        job, _, epoch = call.name.removeprefix("close/").partition("/")
        return answered("DELETE", f"/jobs/{job}?epoch={epoch}", b"")

    if secret_file is not None:
        settings = dataclasses.replace(settings, secret="", secret_file=secret_file)
    sums = {"sums/": Whole(daemon.stream)}
    secret = settings.job_secret()
    # A job takes twice what its workers may push. A push above half the memory has no room, and pushes that wait never keep out
    # the one for which they wait.
    in_flight = min(max(daemon.memory_bytes, Limits.request_bytes), _core.ENDPOINT_MOST_BYTES)
    return Server(
        "server",
        Address.parse(at),
        0,
        requests={"jobs": jobs, "open/": open_job, "close/": close_job},
        pushes=sums,
        pulls=sums,
        limits=Limits(calls=_CALLS, push_bytes=in_flight // 2, in_flight_bytes=in_flight),
        threads=1,
        secret=secret,
    )


_cluster = click.option("--cluster", metavar="FILE", help="A cluster file, which has the address in place of --listen.")
_host = click.option("--host", metavar="NAME", help="The host of that file on which this daemon runs.")


def _listen_of_cluster(role: str, given: dict[str, Any]) -> str:
    """The address that a cluster file gives the daemon of this role on a host. Raises: click.UsageError."""
    from penstock import errors
    from penstock.cluster import file
    from penstock.cluster.places import nearest

    path, host = given["cluster"], given["host"]
    if host is None:
        raise click.UsageError(f"--cluster {path}: say with --host which of its hosts this is")
    if given["listen"] is not None:
        raise click.UsageError(f"--cluster {path} has the address, and so has --listen: leave out one of them")
    try:
        cluster = file.load(path, f"--cluster {path}")
        section = f"{role}s"
        daemons = cluster.aggregators if role == "aggregator" else cluster.servers
        there = [daemon for daemon in daemons if daemon.at == host]
        if host not in cluster.host:
            raise cluster.wrong("hosts", f"there is no host {host}: {nearest(host, cluster.host)}")
        if len(there) != 1:
            found = ", ".join(daemon.name for daemon in there) or f"no {role}"
            raise cluster.wrong(section, f"host {host} has {found}: give one there, or say --listen")
        address = cluster.address(there[0])
        if address is None:
            raise cluster.wrong(f"hosts.{host}", f"has no address, and {role} {there[0].name} listens on one: give it")
    except errors.Config as error:
        raise click.UsageError(str(error)) from None
    return address


def parse_address(text: str) -> str:
    """ "ip:port" from an address or a name, with or without a port ("[::1]:7471" has one, "::1" has none).

    Raises click.BadParameter where nothing is known by that name.
    """
    try:
        return _core.parse_address(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


class _Value(click.ParamType):
    """The text of an option, if the daemon can read it."""

    name = "text"

    def __init__(self, option: str) -> None:
        self.option = option

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            _core.check_daemon_option(self.option, value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return value


# What a client may have waiting: a push and a pull of each buffer, so that pulls never keep out the pushes for which they wait,
# and some more for requests.
_CALLS = 2 * _core.STREAMED_MOST_BUFFERS + 64
# How long clients may take to leave.
_CLOSE_S = 2.0
# How long a signal may go unnoticed: Python runs its handlers between calls.
_LOOK_S = 0.1
