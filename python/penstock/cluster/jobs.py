"""Opens the jobs of a deployment at its servers and aggregators, and gives a group's large all-reduces to them.

All ranks of a group call `attach` together. Each binds its sockets and publishes their addresses; rank 0 opens the jobs and
publishes their parameters; then all ranks start. Rank 0 watches the jobs: it opens them again at an aggregator that was
restarted, and closes them in the end. It controls daemons over HTTP, and switches by the deployment's command.
docs/guide/aggregated.md says what happens when a process dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import http.client
import ipaddress
import itertools
import json
import logging
import os
import secrets
import socket
import struct
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from penstock import _core
from penstock.addresses import joined, split
from penstock.cluster import deployment
from penstock.errors import Config as ConfigError
from penstock.errors import PenstockError

__all__ = ["Aggregation", "attach", "counted", "interface_mtu"]

log = logging.getLogger("penstock")


class Member(Protocol):
    """The part of `penstock.runtime.groups.Membership` that this module uses."""

    @property
    def group(self) -> _core.Group: ...
    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    @property
    def name(self) -> str: ...
    def part_of_store(self, prefix: str) -> Any: ...


class Aggregation:
    """What an aggregated channel has besides its membership: on rank 0 the jobs."""

    def __init__(self, group: _core.Group, jobs: _Jobs | None) -> None:
        self._group = group
        self._jobs = jobs

    def stats(self) -> dict[str, Any]:
        """Counters: see `penstock.torch.stats`."""
        return _core.aggregated_stats(self._group) or {}

    def close(self) -> None:
        """Close the jobs. Call it after the group was left, or the channel closed."""
        self.close_jobs()

    def close_jobs(self) -> None:
        """Close the jobs at the daemons now. Operations that still run fail on ranks that do not know of this rank's end."""
        if self._jobs is not None:
            self._jobs.close()


def attach(
    member: Member,
    text: str,
    name: str,
    secret: bytes | None,
    timeout: timedelta,
    interfaces: list[tuple[str, str]],
    *,
    gives_way: bool,
) -> Aggregation:
    """Send a group's large sums and averages of floats through the deployment's servers and aggregators. All ranks call it.

    Args:
        member: this process's part in the group.
        text: the deployment, as rank 0 has read it.
        name: its name in errors.
        secret: the secret that daemons ask for; None if they ask for none.
        timeout: for all of it.
        interfaces: (name, address) of those that this process uses.
        gives_way: what is not urgent waits while another process of this host, or this one's streams, send what is.

    Raises:
        penstock.errors.Config: on all ranks, if the deployment does not fit the group, a socket cannot be bound, or a server or
            aggregator does not answer or refuses; the message names it.
        penstock.runtime.store.StoreError: the group's store cannot be used.
    """
    agreed = deployment.parse(text, name)
    agreed.check_world(member.world)
    until = time.monotonic() + timeout.total_seconds()
    # A store may outlive a group of the same name.
    turn = member.part_of_store("penstock/aggregated").add(f"turn/{member.rank}", 1)
    store = member.part_of_store(f"penstock/aggregated/{turn}")
    sockets: _core.UdpSockets | None = None
    try:
        local = [_local(server.address, interfaces, i) for i, server in enumerate(agreed.servers)]
        sockets = _core.UdpSockets(
            [joined(address, 0) for _, address in local], offloads=agreed.offloads, buffer_bytes=_BUFFER_BYTES
        )
        own: dict[str, Any] = {
            "addresses": sockets.addresses(),
            "mtu": min(interface_mtu(each) or _ETHERNET_MTU for each, _ in local),
        }
    except PenstockError as error:
        own = {"error": f"rank {member.rank}: {error}"}
    store.set(f"rank/{member.rank}", json.dumps(own))
    jobs = None
    try:
        if member.rank == 0:
            keys = [f"rank/{rank}" for rank in range(member.world)]
            outcome: dict[str, Any]
            try:
                ranks = [json.loads(value) for value in _read(store, keys, until)]
                for one in ranks:
                    if "error" in one:
                        raise ConfigError(one["error"])
                jobs = _Jobs(
                    agreed, member.world, [one["addresses"] for one in ranks], min(o["mtu"] for o in ranks), secret
                )
                outcome = jobs.open(until)
            except PenstockError as error:
                outcome = {"error": str(error)}
            store.set("outcome", json.dumps(outcome))
        outcome = json.loads(_read(store, ["outcome"], until)[0])
        if "error" in outcome:
            raise ConfigError(f"group {member.name} cannot be aggregated: {outcome['error']}")
        assert sockets is not None, "rank 0 has seen no error"
        opened = _core.aggregate(
            member.group,
            sockets,
            rank=member.rank,
            world=member.world,
            name=member.name,
            format="padded" if agreed.switches else agreed.format,
            payload_bytes=outcome["payload_bytes"],
            min_bytes=agreed.min_bytes,
            gives_way=gives_way,
            servers=[_as_server(agreed, i, one, member.rank, member.world) for i, one in enumerate(outcome["servers"])],
            timeout_s=max(0.0, until - time.monotonic()),
        )
        opened.wait()
    except BaseException:
        if jobs is not None:
            jobs.close()
        raise
    if jobs is not None:
        jobs.watch(lambda: (_core.aggregated_stats(member.group) or {}).get("fallback") is not None)
        log.info(
            "group %s: all-reduces of %d bytes and more go through %s, as %s in blocks of %d bytes%s",
            member.name,
            agreed.min_bytes,
            ", ".join(f"server {server.address} ({server.fraction:.0%})" for server in agreed.servers),
            agreed.format,
            outcome["payload_bytes"],
            "" if agreed.key else ", without a key",
        )
    return Aggregation(member.group, jobs)


def _as_server(
    agreed: deployment.Deployment, index: int, opened: dict[str, Any], rank: int, world: int
) -> tuple[Any, ...]:
    """The engine's parameters for a server."""
    server = agreed.servers[index]
    above = server.parent(rank)
    parent = None if above is None else (above, opened["shards"][above])
    key = None if opened["key"] is None else bytes.fromhex(opened["key"])
    weight = round(server.fraction / deployment.MIN_FRACTION)
    # Switches know a worker by its rank, daemons by its place among the children of the node above.
    name = 1 << (rank if agreed.switches else server.place(rank, world))
    return (server.address, weight, parent, name, opened["job"], _EPOCH, key, agreed.window, opened["start"])


@dataclass(frozen=True)
class _Put:
    """The request that opens one job at one node."""

    role: str
    address: str
    job: int
    body: bytes
    # For a switch: the command that opens and closes jobs on it, and the job's server.
    switch: tuple[str, ...] | None = None
    server: str = ""
    shards: int = 1
    """Of an aggregator, as the other nodes know it."""


class _Jobs:
    """Rank 0's jobs: one a server, and the requests that were sent to its nodes."""

    def __init__(
        self, agreed: deployment.Deployment, world: int, workers: list[list[str]], mtu: int, secret: bytes | None
    ) -> None:
        self._deployment, self._world, self._workers, self._secret = agreed, world, workers, secret
        self._payload_bytes = agreed.block_bytes or _payload_bytes(mtu, agreed)
        self._puts: list[_Put] = []
        self._opener = os.getpid()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def open(self, until: float) -> dict[str, Any]:
        """Open all jobs: at servers first, so that no aggregator sends to a server that does not know the job."""
        servers = []
        for index, server in enumerate(self._deployment.servers):
            children = server.children(self._world)
            below_switch = {
                one.address
                for node in server.aggregators
                if node.switch
                for one in node.children
                if not isinstance(one, int)
            }
            shards = {
                node.address: 1
                if node.switch
                else self._shards(
                    "aggregator",
                    node.address,
                    until,
                    beside_switch=node.address in below_switch or any(_is_switch(one) for one in node.children),
                )
                for node in server.aggregators
            }
            self._shards("server", server.address, until, beside_switch=any(_is_switch(one) for one in children))
            job, start = secrets.randbits(32), secrets.randbits(32)
            key = secrets.token_hex(16) if self._deployment.key else None
            # Where bitmaps name the children of a hop, every aggregator adds what is not finite as well, so it needs room for it.
            flat = bool(self._deployment.switches)
            common = {
                "epoch": _EPOCH,
                "key": key,
                "window": self._deployment.window,
                "block_bytes": self._payload_bytes,
                "floats": not flat or self._deployment.format == "float32",
                "start": start,
            }
            workers = [addresses[index] for addresses in self._workers]
            tree = [_tree(child, shards) for child in children]
            body = {**common, "tree": tree, "workers": workers, "names": "workers" if flat else "children"}
            self._put(_Put("server", server.address, job, _body(body)), until)
            for place, child in enumerate(children):
                above: dict[str, Any] = {"parent": {"address": server.address, "shards": 1}}
                if not flat:
                    above |= {"place": place, "server": server.address}
                self._open_below(child, above, workers, shards, common, job, server.address, until)
            servers.append({"job": job, "key": key, "start": start, "shards": shards})
        return {"payload_bytes": self._payload_bytes, "servers": servers}

    def _open_below(
        self,
        node: deployment.Child,
        above: dict[str, Any],
        workers: list[str],
        shards: dict[str, int],
        common: dict[str, Any],
        job: int,
        server: str,
        until: float,
    ) -> None:
        if isinstance(node, int):
            return
        own: dict[str, Any] = {"parent": {"address": node.address, "shards": shards[node.address]}}
        flat = "place" not in above
        shown = _bitmap if flat else _ranges
        children = [
            {"address": workers[child], "shards": 1, "workers": shown((child,))}
            if isinstance(child, int)
            else {"address": child.address, "shards": shards[child.address], "workers": shown(child.workers)}
            for child in node.children
        ]
        body = _body({**common, **above, "children": children})
        self._put(_Put("aggregator", node.address, job, body, node.switch, server, shards[node.address]), until)
        for place, child in enumerate(node.children):
            below = own if flat else {**own, "place": place, "server": server}
            self._open_below(child, below, workers, shards, common, job, server, until)

    def _shards(self, role: str, address: str, until: float, *, beside_switch: bool) -> int:
        patience = min(until, time.monotonic() + _START_WITHIN_S)
        while True:
            try:
                answer = self._ask(role, "GET", address, "/", b"", until)
                break
            except ConfigError:
                # Daemons and ranks are often started together.
                if time.monotonic() > patience:
                    raise
                self._stop.wait(_RETRY_EVERY_S)
        if answer.get("role") != role:
            raise ConfigError(
                f"{address} is a {answer.get('role')}, but the deployment {self._deployment.name} has it as {role}"
            )
        if answer.get("protocol") != _core.AGGREGATION_VERSION:
            raise ConfigError(
                f"{role} {address} is penstock {answer.get('penstock')} with version {answer.get('protocol')} of the packets, "
                f"this rank penstock {_core.__version__} with version {_core.AGGREGATION_VERSION}: install the same on both"
            )
        if beside_switch and not answer.get("secret"):
            raise ConfigError(
                f"{role} {address} has no secret, so it sends to nodes only that show that they receive, which the switch "
                "beside it cannot. Start it with PENSTOCK_SECRET or PENSTOCK_SECRET_FILE, and give the ranks the same"
            )
        return int(answer.get("shards", 1))

    def _put(self, put: _Put, until: float) -> None:
        if put.switch is None:
            self._ask(put.role, "PUT", put.address, f"/jobs/{put.job}", put.body, until)
        else:
            _command(put, "open", until)
        self._puts.append(put)

    def _ask(self, role: str, method: str, address: str, path: str, body: bytes, until: float) -> dict[str, Any]:
        try:
            return _request(method, address, path, body, self._secret, until)[1]
        except urllib.error.HTTPError as error:
            raise ConfigError(f"{role} {address} refuses: {_why(error)}{_HINTS.get(error.code, '')}") from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise ConfigError(
                f"{role} {address} does not answer ({reason}). Start it with: penstock {role} --listen {address}"
            ) from error

    def watch(self, fell_back: Callable[[], bool]) -> None:
        """Watch the jobs: an aggregator may lose its state at any time, and then gets them again."""
        self._thread = threading.Thread(target=self._watch, args=(fell_back,), name="penstock-jobs", daemon=True)
        self._thread.start()

    def _watch(self, fell_back: Callable[[], bool]) -> None:
        # A server gets its job once: what it has committed is lost with it.
        aggregators = [put for put in self._puts if put.role == "aggregator" and put.switch is None]
        switches = {put: _Passed() for put in self._puts if put.switch is not None}
        silent: set[str] = set()
        cut_differently: set[str] = set()
        while not self._stop.wait(_LOOK_EVERY_S):
            if fell_back():
                break
            for put in aggregators:
                try:
                    # For an aggregator that has the job, this request changes nothing.
                    status, answer = _request(
                        "PUT",
                        put.address,
                        f"/jobs/{put.job}",
                        put.body,
                        self._secret,
                        time.monotonic() + _LOOK_WITHIN_S,
                    )
                except (OSError, ValueError) as error:
                    if put.address not in silent:
                        silent.add(put.address)
                        log.warning("aggregator %s does not answer: %s", put.address, _reason(error))
                    continue
                if status == 201:
                    log.warning("aggregator %s had lost job %d and has been told again", put.address, put.job)
                if answer.get("shards", put.shards) != put.shards and put.address not in cut_differently:
                    cut_differently.add(put.address)
                    log.warning(
                        "aggregator %s has %s shards now, and the job was opened with %d: most of what goes through it is lost, "
                        "so workers pass it by. Start it with --shards %d",
                        put.address,
                        answer["shards"],
                        put.shards,
                        put.shards,
                    )
                silent.discard(put.address)
            for put, passed in switches.items():
                self._look_at_switch(put, passed)
        # At the end of this thread, so that it opens no job again.
        self._delete()

    def _look_at_switch(self, put: _Put, passed: _Passed) -> None:
        """Open a job again at a switch that workers bypass: it may have lost the job. To ask the switch every time would cost a
        process each; the server knows whether it is bypassed."""
        until = time.monotonic() + _LOOK_WITHIN_S
        try:
            [job] = _request("GET", put.server, f"/jobs/{put.job}", b"", self._secret, until)[1]["jobs"]
            bypassed: list[str] = job["bypassed"]
        except (OSError, ValueError, KeyError):
            return
        if put.address not in bypassed:
            passed.pause_s, passed.until = _LOOK_EVERY_S, 0.0
            return
        if time.monotonic() < passed.until:
            return
        try:
            said = _command(put, "open", time.monotonic() + _COMMAND_WITHIN_S)
        except ConfigError as error:
            said = str(error)
        log.warning("switch %s is passed by: %s", put.address, said)
        passed.until = time.monotonic() + passed.pause_s
        passed.pause_s = min(2 * passed.pause_s, _MOST_PAUSE_S)

    def close(self) -> None:
        """Close the jobs at all nodes; a daemon that does not get this drops them after a while. Does nothing in a forked child:
        the jobs are its parent's."""
        if os.getpid() != self._opener:
            return
        self._stop.set()
        # The collector may run this in that thread, for a reducer that nobody closed. It then ends by itself and closes the jobs.
        if self._thread is threading.current_thread():
            return
        if self._thread is not None:
            self._thread.join()
        self._delete()

    def _delete(self) -> None:
        puts, self._puts = self._puts, []
        for put in reversed(puts):
            with contextlib.suppress(OSError, ValueError, ConfigError):
                if put.switch is not None:
                    _command(put, "close", time.monotonic() + _COMMAND_WITHIN_S)
                    continue
                path = f"/jobs/{put.job}?epoch={_EPOCH}"
                _request("DELETE", put.address, path, b"", self._secret, time.monotonic() + _LOOK_WITHIN_S)


def counted(address: str, timeout_s: float) -> dict[str, Any]:
    """What the daemon at "ip:port" counts (``GET /jobs``), with all its jobs.

    Raises:
        OSError: there is no whole answer in time.
        ValueError: the answer is not that of a daemon.
    """
    until = time.monotonic() + timeout_s
    found = _request("GET", address, "/jobs", b"", None, until)[1]
    while isinstance(found.get("jobs"), list) and found.get("next") is not None:
        page = _request("GET", address, f"/jobs?from={found['next']}", b"", None, until)[1]
        found |= {"jobs": found["jobs"] + page.get("jobs", []), "next": page.get("next")}
    if not isinstance(found.get("jobs"), list):
        raise ValueError("it has no jobs")
    return found


def _is_switch(node: deployment.Child) -> bool:
    return not isinstance(node, int) and node.switch is not None


@dataclass
class _Passed:
    """A switch that workers bypass: when its command runs next, and the time between two runs."""

    until: float = 0.0
    pause_s: float = 1.0


def _command(put: _Put, verb: str, until: float) -> str:
    """Run the command of a switch that opens or closes a job; returns its output.

    Raises:
        ConfigError: it could not be run, took too long or failed.
    """
    assert put.switch is not None
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder, _ONE_COMMAND:
        words = [*put.switch, verb, str(put.job)]
        if verb == "open":
            body = Path(folder, "job.json")
            body.write_bytes(put.body)
            words.append(str(body))
        timeout_s = min(_COMMAND_WITHIN_S, max(0.1, until - time.monotonic()))
        try:
            done = subprocess.run(
                words, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=timeout_s
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(f"switch {put.address}: `{' '.join(words)}`: {error}") from error
    if done.returncode != 0:
        why = (done.stderr.strip() or f"it ended with {done.returncode}").splitlines()[-1]
        raise ConfigError(f"switch {put.address}: `{' '.join(words)}`: {why}")
    return done.stdout.strip()


def _request(
    method: str, address: str, path: str, body: bytes, secret: bytes | None, until: float
) -> tuple[int, dict[str, Any]]:
    """One HTTP request to a daemon: the status and the answer.

    Raises:
        OSError: there is no whole answer in time; `urllib.error.HTTPError`: a refusal.
        ValueError: the answer is not that of a daemon.
    """
    request = urllib.request.Request(f"http://{address}{path}", data=body or None, method=method)
    if body:
        request.add_header("Content-Type", "application/json")
    if secret is not None and method != "GET":
        # The proof is valid for this daemon only: an eavesdropper cannot use it with another.
        daemon = _request("GET", address, "/", b"", None, until)[1].get("daemon")
        if not isinstance(daemon, str):
            raise ValueError(f"it is a daemon of another release than this rank's penstock {_core.__version__}")
        now = str(int(time.time()))
        text = b"\n".join((method.encode(), path.encode(), now.encode(), daemon.encode(), body))
        proof = hmac.new(secret, text, hashlib.sha256)
        request.add_header("X-Penstock-Time", now)
        request.add_header("X-Penstock-Proof", proof.hexdigest())
    # Daemons are reached directly, as workers reach them, whatever proxy the environment names.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    timeout_s = min(_ANSWER_WITHIN_S, max(0.1, until - time.monotonic()))
    try:
        with opener.open(request, timeout=timeout_s) as answer:
            text = answer.read(_MOST_ANSWER_BYTES)
    except http.client.HTTPException as error:
        raise OSError(f"what answers breaks off, or is no daemon of Penstock: {error!r}") from None
    found = json.loads(text) if text else {}
    if not isinstance(found, dict):
        raise ValueError(f"its answer is no JSON object: {text[:80]!r}")
    return answer.status, found


def _why(error: urllib.error.HTTPError) -> str:
    """The reason in a daemon's refusal."""
    text = ""
    with contextlib.suppress(OSError, http.client.HTTPException):
        text = error.read(1 << 16).decode(errors="replace").strip()
    with contextlib.suppress(ValueError, KeyError, TypeError):
        text = str(json.loads(text)["error"])
    return f"{text or error.reason} (HTTP {error.code})"


def _reason(error: Exception) -> str:
    return _why(error) if isinstance(error, urllib.error.HTTPError) else str(getattr(error, "reason", None) or error)


def _read(store: Any, keys: list[str], until: float) -> list[bytes]:
    left = timedelta(seconds=max(0.1, until - time.monotonic()))
    try:
        store.wait(keys, left)
    except RuntimeError:  # of the store: not in time
        missing = [key for key in keys if not store.check([key])]
        raise ConfigError(
            f"waited for {', '.join(missing)} of the deployment's jobs in vain: did a rank die?"
        ) from None
    return list(store.multi_get(keys))


def _local(server: str, interfaces: list[tuple[str, str]], turn: int) -> tuple[str, str]:
    """The (interface, address) for packets to a server: servers take the interfaces in turn."""
    version = ipaddress.ip_address(split(server)[0]).version
    fitting = [(name, address) for name, address in interfaces if ipaddress.ip_address(address).version == version]
    if not fitting:
        have = ", ".join(address for _, address in interfaces)
        raise ConfigError(
            f"server {server} has an address of IPv{version}, and this rank has {have}: PENSTOCK_INTERFACE"
        )
    return fitting[turn % len(fitting)]


def interface_mtu(interface: str) -> int | None:
    """None if there is no such interface any more."""
    # Not from /sys, which may belong to another network namespace.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16si12x", interface.encode(), 0)
        try:
            answer = fcntl.ioctl(any_socket, _SIOCGIFMTU, request)
        except OSError:
            return None
    return int(struct.unpack("16si12x", answer)[1])


def _payload_bytes(mtu: int, agreed: deployment.Deployment) -> int:
    six = any(":" in split(server.address)[0] for server in agreed.servers)
    fits = mtu - (40 if six else 20) - 8 - _HEADER_BYTES
    if fits < _STEP_BYTES:
        raise ConfigError(f"an MTU of {mtu} leaves no room for a block; set block_bytes in {agreed.name}")
    return min(fits // _STEP_BYTES * _STEP_BYTES, deployment.MOST_BLOCK_BYTES)


def _tree(node: deployment.Child, shards: dict[str, int]) -> dict[str, Any]:
    if isinstance(node, int):
        return {"worker": node}
    return {
        "aggregator": {"address": node.address, "shards": shards[node.address]},
        "children": [_tree(child, shards) for child in node.children],
    }


def _bitmap(workers: tuple[int, ...]) -> str:
    return hex(sum(1 << worker for worker in workers))


def _ranges(workers: tuple[int, ...]) -> str:
    """Workers as a daemon's reports show them, such as "0-3,7": the first ones, if the text would be too long."""
    text = ""
    for _, run in itertools.groupby(enumerate(sorted(workers)), lambda pair: pair[1] - pair[0]):
        numbers = [worker for _, worker in run]
        next_ = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
        if len(text) + 1 + len(next_) + 4 > _SHOWN_BYTES:
            return text + ",..."
        text = f"{text},{next_}" if text else next_
    return text


def _body(value: dict[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


# A group is aggregated once: what starts again is another group, with jobs of its own.
_EPOCH = 1
# Of the packet: docs/reference/packets.md. Blocks are cut at cache lines.
_HEADER_BYTES = 48
_STEP_BYTES = 64
_ETHERNET_MTU = 1500
_SIOCGIFMTU = 0x8921  # linux/sockios.h
# Of crates/penstock-node/src/admission.rs.
_SHOWN_BYTES = 64
# Two windows of the longest blocks, and the kernel's bookkeeping.
_BUFFER_BYTES = 8 << 20
_ANSWER_WITHIN_S = 10.0
# More than three pages of GET /jobs, of which each is bounded.
_MOST_ANSWER_BYTES = 16 << 20
_START_WITHIN_S = 5.0
_RETRY_EVERY_S = 0.2
# How soon an aggregator is used again after a restart.
_LOOK_EVERY_S = 1.0
_LOOK_WITHIN_S = 2.0
# Python, gRPC and some hundred rows, on a machine that is busy.
_COMMAND_WITHIN_S = 30.0
# The longest time between two commands for a switch that workers still bypass.
_MOST_PAUSE_S = 60.0
# Two controllers of one switch would take the control from each other.
_ONE_COMMAND = threading.Lock()
_HINTS = {
    401: ". PENSTOCK_SECRET (or PENSTOCK_SECRET_FILE) of rank 0 and that of the daemon must be the same",
    409: ". Its limits are arguments: --slots, --memory, --jobs",
}
