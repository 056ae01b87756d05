"""Every setting, in one table: name, default, what it costs, and which symptom means that it is wrong.

All settings are environment variables, read when the first process group is made. ``penstock info`` lists them with their
values and where they come from.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from penstock import renamed
from penstock.addresses import split
from penstock.errors import Config as ConfigError

__all__ = [
    "VARIABLES",
    "Settings",
    "Variable",
    "given_value",
    "read",
    "renamed_variables",
    "restarts",
    "unknown_variables",
]


@dataclass(frozen=True)
class Variable:
    """An environment variable: one setting."""

    name: str
    default: str
    parse: Callable[[str], Any]
    meaning: str
    """A text for users: the effect, the cost, and which other settings it is tied to."""


@dataclass(frozen=True)
class Settings:
    """The settings' values, parsed.

    More than 16 fields: one a setting, in lower case without the prefix.
    """

    interface: str
    port_range: tuple[int, int]
    streams: int
    io_threads: int
    shm: bool
    ptracer: str
    algorithm: str | None
    deployment: str
    checksum: bool
    check: frozenset[str]
    tune: bool | str
    tune_record: str
    secret: str
    secret_file: str
    peer_timeout: float
    socket_buffer: int
    flight_recorder: str
    elastic_store: str
    elastic_job: str
    live: tuple[str, int] | None
    live_token: str
    live_tensorboard: str
    log: str

    def job_secret(self) -> bytes | None:
        """The job secret of the user; None if there is none."""
        if self.secret:
            return self.secret.encode()
        if self.secret_file:
            try:
                secret = Path(self.secret_file).read_bytes().strip()
            except OSError as error:
                raise ConfigError(
                    f"PENSTOCK_SECRET_FILE={self.secret_file} cannot be read: {error.strerror}"
                ) from error
            if not secret:
                raise ConfigError(f"PENSTOCK_SECRET_FILE={self.secret_file} is empty")
            return secret
        return None


def read(environ: Mapping[str, str] = os.environ) -> Settings:
    """Parse all settings.

    Raises:
        penstock.errors.Config: a value that its setting does not take; the text quotes it and says what it takes.
    """
    values = {}
    for variable in VARIABLES:
        given = given_value(variable.name, environ)
        text = variable.default if given is None else given
        try:
            values[variable.name.removeprefix("PENSTOCK_").lower()] = variable.parse(text)
        except ValueError as error:
            raise ConfigError(f"{variable.name}={text!r}: {error}. It means: {variable.meaning}") from None
    return Settings(**values)


def given_value(name: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """The text that the environment has for a setting, under its name or else its old name; None if it has neither."""
    old = next((old for old, new in OLD_NAMES.items() if new == name), "")
    return environ.get(name, environ.get(old))


def streams_within_host(settings: Settings, environ: Mapping[str, str] = os.environ) -> int:
    """TCP streams to a peer at an address of this host. Nothing caps a flow there: the user's number, else one, or four for each
    of several I/O threads."""
    if given_value("PENSTOCK_STREAMS", environ) is not None:
        return settings.streams
    return 1 if settings.io_threads == 1 else 4 * settings.io_threads


def renamed_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables that are set under the old name of a setting, with a message for each."""
    return {old: renamed.message(old, new) for old, new in OLD_NAMES.items() if old in environ}


def unknown_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables that are named like settings but are none, with a message for each: a misspelt variable has no effect."""
    known = {variable.name.removeprefix("PENSTOCK_") for variable in VARIABLES}
    found = {}
    for name in sorted(environ):
        word = name.removeprefix("PENSTOCK_")
        if name.startswith("PENSTOCK_") and word not in known and name not in (*MARKS, *OLD_NAMES):
            # Imported only where a name is wrong, and not in every rank.
            import difflib

            near = difflib.get_close_matches(word, known, n=1)
            told = f"did you mean PENSTOCK_{near[0]}?" if near else "`penstock info` lists those that there are."
            found[name] = f"{name} is set, and there is no such setting: {told}"
    return found


def restarts(environ: Mapping[str, str] = os.environ) -> int:
    """How often torchrun has restarted this job's workers; 0 where something else started them.

    Raises:
        penstock.errors.Config: TORCHELASTIC_RESTART_COUNT is not a number.
    """
    text = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if not text.isdecimal():
        raise ConfigError(
            f"TORCHELASTIC_RESTART_COUNT={text!r} must be a number from 0: torchrun sets it, and frames of an earlier life of "
            "the job are known by it. Unset it where torchrun did not start this."
        )
    return int(text)


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("must be 0 or 1")
    return text == "1"


def _ptracer(text: str) -> str:
    if text not in ("launcher", "any", "0"):
        raise ValueError("must be launcher, any or 0")
    return text


def _streams(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 64:
        raise ValueError("must be a number from 1 to 64")
    return int(text)


def _threads(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 16:
        raise ValueError("must be a number from 1 to 16")
    return int(text)


def _ports(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    if not low.isdigit() or not (high or low).isdigit():
        raise ValueError("must be LOW-HIGH, or 0 for any port")
    first, last = int(low), int(high or low)
    if not first <= last <= 65535:
        raise ValueError("must be LOW-HIGH with LOW <= HIGH <= 65535")
    return first, last


def _algorithm(text: str) -> str | None:
    names = (
        "auto",
        "ring",
        "halving-doubling",
        "recursive-doubling",
        "exchange",
        "direct",
        "hierarchical",
        "aggregated",
    )
    if text not in names:
        raise ValueError(f"must be one of {', '.join(names)}")
    return None if text == "auto" else text


def _check(text: str) -> frozenset[str]:
    words = frozenset(text.split(",")) if text else frozenset()
    if unknown := sorted(words - set(CHECKS)):
        raise ValueError(
            f"there is no check {', '.join(map(repr, unknown))}; name any of {', '.join(CHECKS)}, with commas"
        )
    return words


def _tune(text: str) -> bool | str:
    if not text:
        raise ValueError("must be 0, 1 or a tuner's record")
    return text if text not in ("0", "1") else text == "1"


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.5 <= value <= 3600:
        raise ValueError("must be from 0.5 to 3600 seconds")
    return value


def _bytes(text: str) -> int:
    if not text.isdigit() or int(text) > 1 << 30:
        raise ValueError("must be a number of bytes, at most 1073741824")
    return int(text)


def _live(text: str) -> tuple[str, int] | None:
    if not text:
        return None
    host, port = split(text)
    if not (port.isascii() and port.isdigit() and int(port) <= 65535) or (":" in text and not host):
        raise ValueError("must be PORT or ADDR:PORT, with a port up to 65535")
    return host or "127.0.0.1", int(port)


def _live_token(text: str) -> str:
    if text and not re.fullmatch(r"[A-Za-z0-9_.~-]{16,128}", text):
        raise ValueError("must have 16 to 128 letters, digits, or any of _ . ~ -")
    return text


def _level(text: str) -> str:
    if text not in ("error", "warn", "info", "debug"):
        raise ValueError("must be error, warn, info or debug")
    return text


MARKS = (
    "PENSTOCK_PROFILE",
    "PENSTOCK_PROFILED",
    "PENSTOCK_PROFILE_CHANGE",
    "PENSTOCK_PROFILE_MARKS",
    "PENSTOCK_PROFILE_PERIOD_MS",
    "PENSTOCK_TESTBED",
    "PENSTOCK_TESTBED_RUN",
)
"""Variables that are no settings: by them the testbed finds processes that it has started (`penstock.tools.testbed.keeper`), and
`penstock profile` the ranks of a script (`penstock.tools.profile.recorder`)."""

OLD_NAMES = {"PENSTOCK_PLAN": "PENSTOCK_DEPLOYMENT"}
"""Old names of settings, and their names now. The new name wins where both are set."""

CHECKS = ("nan", "mismatch", "slow")
"""The values of PENSTOCK_CHECK."""

VARIABLES = (
    Variable(
        "PENSTOCK_INTERFACE",
        "",
        str,
        "network interfaces to use, comma-separated names or addresses; streams take turns over them. Empty: "
        "GLOO_SOCKET_IFNAME (names), NCCL_SOCKET_IFNAME (prefixes; = before exact names, ^ before what to leave out; all "
        "that match are used), else the interface that routes to the master.",
    ),
    Variable(
        "PENSTOCK_PORT_RANGE",
        "0",
        _ports,
        "ports to listen on, LOW-HIGH; 0 lets the kernel choose. Set it where a firewall opens a range only.",
    ),
    Variable(
        "PENSTOCK_STREAMS",
        "16",
        _streams,
        "TCP streams to each peer. More of them add up where the network caps a flow and find more of its paths; each "
        "takes up to 272 KiB of memory. Not set: 16 between hosts; to a peer at an address of this host 1, or 4 "
        "for each I/O thread of several. Measured: docs/benchmarks/.",
    ),
    Variable(
        "PENSTOCK_IO_THREADS",
        "1",
        _threads,
        "threads of each rank that read, reduce and write (docs/design/threads.md). More of them help where one is at 100 % of a "
        "core and cores are free, over several streams or to several peers; ranks may have different numbers.",
    ),
    Variable(
        "PENSTOCK_SHM",
        "1",
        _flag,
        "1: ranks on one host read each other's memory. 0: they use TCP, as if they were on different hosts.",
    ),
    Variable(
        "PENSTOCK_PTRACER",
        "launcher",
        _ptracer,
        "who may read a rank's memory where kernel.yama.ptrace_scope is 1 (docs/design/transport.md). launcher: the nearest "
        "process that the ranks of a host descend from, and what it has started. any: every process of the same user. 0: "
        "nobody more; ranks then send tensors through the local socket.",
    ),
    Variable(
        "PENSTOCK_ALGORITHM",
        "auto",
        _algorithm,
        "all-reduce algorithm; rank 0's value counts for the group. auto chooses by size and hosts "
        "(docs/design/algorithms.md). Any but auto and aggregated switches PENSTOCK_DEPLOYMENT off.",
    ),
    Variable(
        "PENSTOCK_DEPLOYMENT",
        "",
        str,
        "a deployment file: large sums and averages of floats in groups of all ranks go through the servers and aggregators "
        "that it names (docs/guide/aggregated.md); rank 0's file counts. Empty: all-reduces go among the ranks.",
    ),
    Variable(
        "PENSTOCK_CHECKSUM",
        "0",
        _flag,
        "1: every frame carries a CRC32C; a damaged one is sent again. Costs about a tenth of a core at 10 Gbit/s.",
    ),
    Variable(
        "PENSTOCK_CHECK",
        "",
        _check,
        "what to look for in gradients that hooks reduce (docs/guide/debugging.md), any of these with commas. nan: NaN or "
        "infinity fails the step on all ranks and names parameter, rank and step; costs one read of each gradient. mismatch: "
        "ranks that hold other parameters or averages fail before the update, and the first is named; costs one read of both. "
        "slow: a warning names the rank that keeps the others waiting, and why; costs a small exchange a step. "
        "The same on all ranks. Empty: nothing is looked for.",
    ),
    Variable(
        "PENSTOCK_TUNE",
        "0",
        _tune,
        "what gradient hooks do where the script does not say (docs/guide/tune.md); rank 0's value counts. 1: find the fastest "
        "streams, bucket size and algorithm during the first 100 steps, some of which are slower for it, and keep watch. A "
        "tuner's record (a file): what it chose. 0: the defaults.",
    ),
    Variable(
        "PENSTOCK_TUNE_RECORD",
        "",
        str,
        "a file that rank 0 writes when it has tuned, for `penstock tune --show` and for PENSTOCK_TUNE. Empty: none is written.",
    ),
    Variable(
        "PENSTOCK_SECRET",
        "",
        str,
        "job secret that every stream proves, the same on all ranks. Empty: one made by rank 0 and passed through "
        "the store, which guards against accidents only.",
    ),
    Variable("PENSTOCK_SECRET_FILE", "", str, "a file that holds the job secret; PENSTOCK_SECRET wins."),
    Variable(
        "PENSTOCK_PEER_TIMEOUT",
        "4",
        _seconds,
        "seconds of silence after which a rank is lost. Raise it where machines are suspended or heavily overloaded.",
    ),
    Variable(
        "PENSTOCK_SOCKET_BUFFER",
        "0",
        _bytes,
        "SO_SNDBUF and SO_RCVBUF in bytes; 0 leaves them to the kernel, which is right unless its limits are tiny.",
    ),
    Variable(
        "PENSTOCK_FLIGHT_RECORDER",
        "",
        str,
        "a folder: every rank writes its last operations there, as rank-N.json, when a group fails or on SIGUSR2, for "
        "`penstock flight`. Empty: nothing is written. Costs nothing before that.",
    ),
    Variable(
        "PENSTOCK_ELASTIC_STORE",
        "",
        str,
        "HOST:PORT of the store that the workers of an elastic job agree through (docs/guide/elastic.md), the same on all of "
        "them: what `python -m penstock.elastic.store` prints. Empty: `penstock.elastic.run` must be given one.",
    ),
    Variable(
        "PENSTOCK_ELASTIC_JOB",
        "default",
        lambda text: text or "default",
        "the elastic job's name, which tells jobs on one store apart; the same on all its workers.",
    ),
    Variable(
        "PENSTOCK_LIVE",
        "",
        _live,
        "rank 0 serves a page, `penstock top` and metrics of the running job (docs/guide/live.md) at PORT of its loopback "
        "address, or at ADDR:PORT, where others can reach it; rank 0's value counts. 0 lets the kernel choose the port. Costs "
        "less than 0.5 % of a core on each rank. Empty: nothing runs.",
    ),
    Variable(
        "PENSTOCK_LIVE_TOKEN",
        "",
        _live_token,
        "the token that whoever looks at the live view must have, so that its URL stays the same; rank 0. Empty: a random one.",
    ),
    Variable(
        "PENSTOCK_LIVE_TENSORBOARD",
        "",
        str,
        "a folder where rank 0 writes the live view's numbers for TensorBoard, also without PENSTOCK_LIVE. Empty: none.",
    ),
    Variable("PENSTOCK_LOG", "warn", _level, "what is printed on standard error: error, warn, info or debug."),
)

assert [variable.name.removeprefix("PENSTOCK_").lower() for variable in VARIABLES] == [
    field.name for field in fields(Settings)
]
