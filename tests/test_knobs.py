"""Proves that settings of the environment which change nothing in a result reach the engine."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import threading

import psutil
import pytest
import torch
import torch.distributed as dist

import ranks
from backends import ALL
from penstock.errors import Config as ConfigError
from penstock.runtime import config
from penstock.tools import info

TCP = ALL["penstock-tcp"]


@pytest.mark.parametrize("checksum", ["1", "0"])
def test_checksum(checksum: str) -> None:
    """A byte changes on its way: with PENSTOCK_CHECKSUM=1 the frame comes again, with 0 nobody notices."""
    values = ranks.run(_broadcast_past_a_vandal, count=2, env={**TCP.env, "PENSTOCK_CHECKSUM": checksum})
    assert sum(damaged for damaged, _ in values) == 1
    assert [wrong for _, wrong in values] == [0, 0 if checksum == "1" else 1]


def test_peer_timeout() -> None:
    """With PENSTOCK_PEER_TIMEOUT=1 a rank that is stopped is lost before the default of 4 s is over, not at once."""
    with ranks.Ranks(_all_reduce_for_ever, count=2, env={**TCP.env, "PENSTOCK_PEER_TIMEOUT": "1"}) as job:
        job.await_note("running", deadline_s=60)
        stopped_s = job.signal(1, signal.SIGSTOP)
        (survivor,) = job.outcomes(of=[0], timeout_s=30, grace_s=None)
    assert survivor.raised is not None and survivor.raised.is_a("penstock.errors.PeerLost"), str(survivor)
    assert 0.5 < survivor.ended_s - stopped_s < 4.0, survivor.raised.text


def test_socket_buffer() -> None:
    """PENSTOCK_SOCKET_BUFFER is what both ends of every stream have, to send and to receive."""
    nbytes = 96 << 10
    env = {**TCP.env, "PENSTOCK_SOCKET_BUFFER": str(nbytes), "PENSTOCK_STREAMS": "3"}
    for buffers in ranks.run(_socket_buffers, count=2, args=(3,), env=env):
        # The kernel doubles what it is asked for, for its own needs (socket(7)).
        assert buffers == 3 * [(2 * nbytes, 2 * nbytes)]


def test_checks() -> None:
    """PENSTOCK_CHECK takes several checks at once; an unknown word is quoted beside those that there are; `info` lists them."""
    assert config.read({}).check == frozenset()
    assert config.read({"PENSTOCK_CHECK": "nan"}).check == {"nan"}
    assert config.read({"PENSTOCK_CHECK": "slow,nan,mismatch"}).check == {"nan", "mismatch", "slow"}
    for text, word in (("nan,fast", "'fast'"), ("nan,", "''"), ("NaN", "'NaN'"), ("nan slow", "'nan slow'")):
        with pytest.raises(ConfigError) as error:
            config.read({"PENSTOCK_CHECK": text})
        assert f"there is no check {word}; name any of nan, mismatch, slow, with commas" in str(error.value)
    (setting,) = (setting for setting in info.gather()["settings"] if setting["name"] == "PENSTOCK_CHECK")
    assert all(f"{check}: " in setting["meaning"] for check in config.CHECKS)


def test_a_misspelt_variable_is_told() -> None:
    """The nearest name is suggested, where there is one; settings, the testbed's marks and other variables are left alone."""
    fine = {"PENSTOCK_STREAMS": "4", "PENSTOCK_TESTBED": "x", "PENSTOC_LOG": "info", "STREAMS": "4"}
    assert config.unknown_variables(fine) == {}
    told = config.unknown_variables({**fine, "PENSTOCK_STREAM": "4", "PENSTOCK_ZZZZZZ": "1"})
    assert list(told) == ["PENSTOCK_STREAM", "PENSTOCK_ZZZZZZ"]
    assert told["PENSTOCK_STREAM"].endswith("there is no such setting: did you mean PENSTOCK_STREAMS?")
    assert "`penstock info`" in told["PENSTOCK_ZZZZZZ"]


def test_a_misspelt_variable_is_logged_once() -> None:
    """One line on one rank of the host, however many groups are made; and the job runs."""
    with ranks.Ranks(_start_twice, count=2, env={"PENSTOCK_STREAM": "4"}) as job:
        outcomes = job.outcomes(timeout_s=60)
    assert all(outcome.ok for outcome in outcomes), "\n".join(map(str, outcomes))
    lines = [line for outcome in outcomes for line in outcome.output.splitlines() if "PENSTOCK_STREAM " in line]
    assert len(lines) == 1 and "did you mean PENSTOCK_STREAMS?" in lines[0], lines


def test_restarts_are_a_number() -> None:
    """What torchrun counts is read where nobody else counts; anything else is an error that names the variable."""
    assert (config.restarts({}), config.restarts({"TORCHELASTIC_RESTART_COUNT": "3"})) == (0, 3)
    for text in ("abc", "", "-1", "1.5"):
        with pytest.raises(ConfigError, match=f"TORCHELASTIC_RESTART_COUNT='{text}' must be a number from 0"):
            config.restarts({"TORCHELASTIC_RESTART_COUNT": text})
    with ranks.Ranks(_start_twice, count=1, env={"TORCHELASTIC_RESTART_COUNT": "abc"}) as job:
        (outcome,) = job.outcomes(timeout_s=60)
    assert outcome.raised is not None and outcome.raised.is_a("penstock.errors.Config"), str(outcome)
    assert "TORCHELASTIC_RESTART_COUNT='abc'" in outcome.raised.text


# ------------------------------------------------------------------------------------------------------------ programs


def _start_twice() -> None:
    for _ in range(2):
        dist.init_process_group("penstock")
        dist.all_reduce(torch.ones(10))
        dist.destroy_process_group()


def _broadcast_past_a_vandal() -> tuple[int, int]:
    """How many bytes this rank's vandal has changed, and how many elements are wrong here after a broadcast."""
    from penstock.runtime import groups

    vandal, agree = _Vandal(), groups._agree

    def past_the_vandal(*args: object) -> object:
        agreed, members = agree(*args)
        # Whichever rank opens the streams of the pair meets its own vandal (penstock-net, contact.rs).
        return agreed, [re.sub(r"127\.0\.0\.1:(\d+)", vandal.stand_before, member) for member in members]

    groups._agree = past_the_vandal
    dist.init_process_group("penstock")
    tensor = torch.full((1 << 16,), _MARK if dist.get_rank() == 0 else 0, dtype=torch.uint8)
    dist.broadcast(tensor, 0)
    dist.barrier()
    dist.destroy_process_group()
    return vandal.damaged, int(tensor.ne(_MARK).sum())


def _all_reduce_for_ever() -> None:
    dist.init_process_group("penstock")
    tensor = torch.ones(1000)
    while True:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        ranks.note("running")


def _socket_buffers(streams: int) -> list[tuple[int, int]]:
    """SO_SNDBUF and SO_RCVBUF of this rank's streams, as soon as all are open: a group is joined over the first."""
    dist.init_process_group("penstock")
    dist.all_reduce(torch.ones(1000))
    while len(buffers := _open_streams()) < streams:
        pass  # the limit of `ranks.run` ends it
    dist.barrier()
    dist.destroy_process_group()
    return buffers


def _open_streams() -> list[tuple[int, int]]:
    store = int(os.environ["MASTER_PORT"])
    buffers = []
    for connection in psutil.Process().net_connections(kind="tcp"):
        if connection.status == psutil.CONN_ESTABLISHED and connection.raddr.port != store:
            with socket.socket(fileno=os.dup(connection.fd)) as stream:
                options = (socket.SO_SNDBUF, socket.SO_RCVBUF)
                buffers.append(tuple(stream.getsockopt(socket.SOL_SOCKET, option) for option in options))
    return buffers


# ------------------------------------------------------------------------------------------------------------- helpers


class _Vandal:
    """Stands before a rank's door and hands on what passes, both ways, but for one byte in a run of `_MARK`."""

    def __init__(self) -> None:
        self.damaged = 0
        self._lock = threading.Lock()

    def stand_before(self, door: re.Match[str]) -> str:
        server = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._serve, args=(server, int(door[1])), daemon=True).start()
        return f"127.0.0.1:{server.getsockname()[1]}"

    def _serve(self, server: socket.socket, port: int) -> None:
        while True:
            near, _ = server.accept()
            far = socket.create_connection(("127.0.0.1", port))
            for way in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=way, daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 20)):
                with self._lock:
                    if not self.damaged and (at := data.find(bytes([_MARK]) * 100)) >= 0:
                        data[at] ^= 1
                        self.damaged += 1
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


# Longer runs of it than a header has bytes are a tensor's.
_MARK = 0xA5
