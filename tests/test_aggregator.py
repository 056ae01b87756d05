"""Proves that `penstock aggregator` and `penstock server` start, admit jobs, count, end: docs/reference/aggregator.md."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import http.server
import io
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import click.testing
import pytest
from rich.console import Console

import ranks
from penstock import _core, cli, errors
from penstock.tools.aggregator import daemon as daemons
from penstock.tools.aggregator import top


@contextlib.contextmanager
def running(*arguments: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The verb as a process of its own, and the address that it says it listens on."""
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        told = re.fullmatch(r"penstock (aggregator|server) on (127\.0\.0\.1:\d+|\[::1\]:\d+)\n", line)
        assert told, line + process.stderr.read()
        yield process, told[2]
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def request(
    method: str, address: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    """(status, JSON) of an answer."""
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(f"http://{address}{path}", data=data, headers=headers or {}, method=method)
    try:
        with urllib.request.urlopen(asked, timeout=20) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def job(workers: list[socket.socket], parent: socket.socket) -> dict[str, Any]:
    place = "127.0.0.1:{}".format
    return {
        "epoch": 1,
        "key": None,
        "window": 4,
        "block_bytes": 8,
        "parent": {"address": place(parent.getsockname()[1])},
        "children": [
            {"address": place(worker.getsockname()[1]), "workers": hex(1 << number)}
            for number, worker in enumerate(workers)
        ],
    }


def push(worker: int, *values: int, job: int = 7, version: int = _core.AGGREGATION_VERSION) -> bytes:
    """A packet as docs/reference/packets.md draws it: SeqNum 0 of epoch 1, 32-bit integers, no key."""
    block = b"".join(value.to_bytes(4, "big", signed=True) for value in values)
    head = b"PA" + bytes([version, 1]) + job.to_bytes(4, "big") + (1).to_bytes(2, "big") + bytes([1, 0]) + bytes(4)
    head += bytes(4) + (3).to_bytes(4, "big") + bytes(2) + len(block).to_bytes(2, "big") + bytes(4)
    return head + (1 << worker).to_bytes(8, "big") + bytes(8) + block


def udp(host: str = "127.0.0.1") -> socket.socket:
    one = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM)
    one.bind((host, 0))
    one.settimeout(20)
    return one


def show(one: socket.socket, daemon: tuple[str, int]) -> None:
    """Show a daemon without a secret that this address receives: return the number that it asks for."""

    def receipt(returned: bytes, asked: bytes) -> bytes:
        return (
            b"PA"
            + bytes([_core.AGGREGATION_VERSION, 16])
            + (7).to_bytes(4, "big")
            + (1).to_bytes(2, "big")
            + bytes(6)
            + (returned + bytes(8) + asked + bytes(8))
        )

    one.sendto(receipt(bytes(8), (1).to_bytes(8, "big")), daemon)
    answer = one.recv(65536)
    assert answer == receipt((1).to_bytes(8, "big"), answer[32:40]) and any(answer[32:40])
    one.sendto(receipt(answer[32:40], bytes(8)), daemon)


def address_of(text: str) -> tuple[str, int]:
    host, _, port = text.partition(":")
    return host, int(port)


@pytest.mark.parametrize("role", ["aggregator", "server"])
def test_packets_of_another_release(role: str) -> None:
    """They get no answer, so the daemon counts them and its log says which version came from where, and what to do. A receipt of
    another release is one of them."""
    with running(role, "--listen", "127.0.0.1:0") as (process, address):
        worker = udp()
        old = push(0, 1, version=1)
        worker.sendto(old, address_of(address))
        receipt = old[:3] + bytes([16]) + old[4:48]
        worker.sendto(receipt, address_of(address))
        wait_for(address, lambda told: told["unauthenticated"]["version"] == 2)
        process.terminate()
        _, log = process.communicate(timeout=20)
    lines = [line for line in log.splitlines() if "version 1" in line]
    assert len(lines) == 1, log
    assert f"this is {_core.AGGREGATION_VERSION}: install the same release" in lines[0]
    assert f"127.0.0.1:{worker.getsockname()[1]}" in lines[0]


def test_a_sum() -> None:
    """Two workers push, the parent gets their sum, and `top` tells who did what."""
    with running("aggregator", "--listen", "127.0.0.1:0", "--slots", "64", "--memory", "1M") as (process, address):
        workers, parent = [udp(), udp()], udp()
        status, told = request("PUT", address, "/jobs/7", job(workers, parent))
        assert (status, told) == (201, {"shards": 1, "udp": address})
        assert request("PUT", address, "/jobs/7", job(workers, parent))[0] == 200
        show(parent, address_of(address))
        for number, worker in enumerate(workers):
            worker.sendto(push(number, 40 + number, -number), address_of(address))
        packet, source = parent.recvfrom(65536)
        assert source == address_of(address)
        assert packet[48:] == (81).to_bytes(4, "big") + (-1).to_bytes(4, "big", signed=True)
        assert int.from_bytes(packet[32:40], "big") == 3
        workers[0].sendto(b"noise", address_of(address))
        told = wait_for(address, lambda told: told["unauthenticated"]["malformed"] == 1)
        (one,) = told["jobs"]
        assert (one["added"], one["completed"], one["waiting_slots"], one["slots"]) == (2, 1, 0, 4)
        assert [node["packets"] for node in one["nodes"]] == [0, 1, 1]
        output = click.testing.CliRunner().invoke(cli.main, ["aggregator", "top", address, "--once"])
        assert output.exit_code == 0, output.output
        for word in ("aggregator 127.0.0.1", "malformed 1", "1 of 64 jobs, 4 of 64 slots"):
            assert word in output.output, output.output
        metrics = urllib.request.urlopen(f"http://{address}/metrics", timeout=20).read().decode()
        assert 'penstock_job_completed_total{job="7",epoch="1"} 1\n' in metrics
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_ipv6() -> None:
    """Its own, its neighbours' and the worker's addresses are IPv6: HTTP, packets and `top`, which shows them in brackets."""
    if not ranks.has_ipv6():
        pytest.skip("no IPv6 here")
    with running("aggregator", "--listen", "::1", "--shards", "2") as (_, address):
        assert address.startswith("[::1]:")
    with running("aggregator", "--listen", "[::1]:0") as (_, address):
        (worker, parent), port = [udp("::1") for _ in range(2)], int(address.rpartition(":")[2])
        body = job([worker], parent)
        assert request("PUT", address, "/jobs/7", body)[0] == 400, "IPv4 cannot be reached from here"
        for place, at in ((body["parent"], parent), (body["children"][0], worker)):
            place["address"] = f"[0:0::1]:{at.getsockname()[1]}"
        assert request("PUT", address, "/jobs/7", body) == (201, {"shards": 1, "udp": address})
        show(parent, ("::1", port))
        worker.sendto(push(0, 5), ("::1", port))
        packet, source = parent.recvfrom(65536)
        assert source[:2] == ("::1", port) and packet[48:] == (5).to_bytes(4, "big")
        output = click.testing.CliRunner().invoke(
            cli.main, ["aggregator", "top", address, "--once"], env={"COLUMNS": "200"}
        )
        assert f"aggregator {address} " in output.output, output.output
        for one in (worker, parent):
            assert f" [::1]:{one.getsockname()[1]} " in output.output, output.output


def wait_for(address: str, condition: Any) -> dict[str, Any]:
    """What GET /jobs says once the condition holds."""
    deadline = time.monotonic() + 20
    while True:
        told: dict[str, Any] = request("GET", address, "/jobs")[1]
        if condition(told):
            return told
        assert time.monotonic() < deadline, told


def test_many_jobs_are_told_in_pages() -> None:
    """A daemon with 1,500 jobs tells of as many at a time as an answer of bounded length has room for, and where the next ones
    begin; one job can be asked for alone. `top` shows all of them."""
    arguments = ("--listen", "127.0.0.1:0", "--jobs", "1500", "--slots", "6000", "--memory", "1M")
    with running("aggregator", *arguments) as (process, address):
        workers, parent = [udp(), udp()], udp()
        body = json.dumps(job(workers, parent)).encode()
        for number in range(1500):
            asked = urllib.request.Request(f"http://{address}/jobs/{3 * number}", data=body, method="PUT")
            with urllib.request.urlopen(asked, timeout=20) as answer:
                assert answer.status == 201
        found: list[int] = []
        start: int | None = 0
        longest = 0
        while start is not None:
            with urllib.request.urlopen(f"http://{address}/jobs?from={start}", timeout=20) as answer:
                text = answer.read()
            page, longest = json.loads(text), max(longest, len(text))
            assert page["jobs"] and page["socket"]["received"] == 0
            found += [one["job"] for one in page["jobs"]]
            start = page["next"]
        assert found == [3 * number for number in range(1500)] and longest < 6 << 20
        assert len(page["jobs"]) < 1500, "it is one page"
        assert request("GET", address, "/jobs?from=3001")[1]["jobs"][0]["job"] == 3003
        assert request("GET", address, "/jobs?from=4498")[1] == {**page, "jobs": [], "next": None}
        status, alone = request("GET", address, "/jobs/3003")
        assert (status, [one["job"] for one in alone["jobs"]], alone["next"]) == (200, [3003], None)
        assert request("GET", address, "/jobs/3004") == (404, {"error": "job 3004 is not open here"})
        assert request("GET", address, "/jobs?from=x")[0] == 400
        assert len(top.fetch(address)["counted"]["jobs"]) == 1500
        process.terminate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_at_once_where_nothing_is_half_done(number: signal.Signals) -> None:
    """Ctrl-C and SIGTERM are prompt, and success."""
    with running("server", "--listen", "127.0.0.1:0") as (process, _):
        asked = time.monotonic()
        process.send_signal(number)
        assert process.wait(20) == 0
        assert time.monotonic() - asked < 8, "long before --drain-timeout"
        assert process.stderr is not None
        assert f"{number.name}: ends when no sum is half done" in process.stderr.read()


def test_a_sum_half_done_is_waited_for_and_a_second_signal_does_not() -> None:
    """Draining waits, refuses new jobs, and is cut short on request, with 1."""
    arguments = ("aggregator", "--listen", "127.0.0.1:0", "--drain-timeout", "1000")
    with running(*arguments) as (process, address):
        workers, parent = [udp(), udp()], udp()
        assert request("PUT", address, "/jobs/7", job(workers, parent))[0] == 201
        workers[0].sendto(push(0, 1, 2), address_of(address))
        wait_for(address, lambda told: told["jobs"][0]["waiting_slots"] == 1)
        process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 20
        while not request("GET", address, "/")[1]["draining"]:
            assert time.monotonic() < deadline
        assert request("PUT", address, "/jobs/8", job(workers, parent))[0] == 503
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 1


def test_a_secret_admits(tmp_path: pathlib.Path) -> None:
    """The proof is what docs/reference/aggregator.md says, made here with the standard library; without it nothing is opened."""
    secret = tmp_path / "secret"
    secret.write_text("hush\n")
    with running("server", "--listen", "127.0.0.1:0", "--secret-file", str(secret)) as (_, address):
        body = {
            "epoch": 1,
            "key": "00" * 16,
            "window": 4,
            "block_bytes": 8,
            "start": 0,
            "tree": [{"worker": 0}],
            "workers": ["127.0.0.1:9"],
        }
        status, told = request("PUT", address, "/jobs/7", body)
        assert status == 401 and "PENSTOCK_SECRET" in told["error"]
        now = str(int(time.time()))
        text = f"PUT\n/jobs/7\n{now}\n{request('GET', address, '/')[1]['daemon']}\n{json.dumps(body)}".encode()
        proof = hmac.new(b"hush", text, hashlib.sha256).hexdigest()
        headers = {"X-Penstock-Time": now, "X-Penstock-Proof": proof}
        assert request("PUT", address, "/jobs/7", body, headers)[0] == 201
        assert request("GET", address, "/")[1]["secret"] is True


def test_shards_and_loss_are_announced() -> None:
    """Each shard has a port; packets thrown away on purpose are nobody's secret."""
    arguments = (
        "aggregator",
        "--listen",
        "127.0.0.1:0",
        "--shards",
        "2",
        "--drop",
        "0.25",
        "--seed",
        "9",
        "--no-offloads",
    )
    with running(*arguments) as (process, address):
        about = request("GET", address, "/")[1]
        assert (about["shards"], about["drop"], about["offloads"]) == (2, {"rate": 0.25, "seed": 9}, False)
        output = click.testing.CliRunner().invoke(cli.main, ["aggregator", "top", address, "--once"])
        assert "2 shards" in output.output, output.output
        process.terminate()
        assert process.stderr is not None and process.wait(20) == 0
        log = process.stderr.read()
        assert "THROWS AWAY 25.00 % OF RECEIVED PACKETS" in log and "no secret" in log, log


def test_last_log_lines_of_a_process_and_of_its_forked_child() -> None:
    """What is logged right before a process exits is printed. A child forks without the thread that prints, and has its own; each
    prints in its own time."""
    script = (
        "import os, sys; from penstock import _core; _core.init_logging('info'); "
        "start = lambda role: _core.Daemon(role, {'listen': '127.0.0.1:0'}, secret=None); "
        "start('server'); child = os.fork(); "
        "child or sys.exit(start('aggregator') and 3); "
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3, done.stderr
    listening = re.findall(r"^\[INFO \] penstock: (\w+) on 127\.0\.0\.1:\d+", done.stderr, re.MULTILINE)
    assert sorted(listening) == ["aggregator", "server"], done.stderr


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["aggregator"], "Missing option '--listen', or '--cluster' and '--host'"),
        (["aggregator", "--listen", "192.0.2.1"], "192.0.2.1 is not an address of this machine"),
        (["aggregator", "--listen", "127.0.0.1:0", "--memory", "9999T"], "more than this machine has"),
        (["aggregator", "--listen", "127.0.0.1:0", "--memory", "lots"], "not a number of bytes"),
        (["aggregator", "--listen", "127.0.0.1:0", "--shards", "3"], "--shards 3: 1, 2, 4, 8 or 16"),
        (["server", "--listen", "127.0.0.1:x"], "is not an address"),
        (["server", "--listen", "127.0.0.1:0", "--secret-file", "/no/such"], "cannot be read"),
        (["server", "--listen", "127.0.0.1:0", "--drop", "1"], "--drop"),
        (["aggregator", "top", "127.0.0.1:1", "--once"], "Start it with: penstock aggregator --listen 127.0.0.1:1"),
    ],
)
def test_what_cannot_be_is_said(arguments: list[str], reason: str) -> None:
    """An error names the option or the address, and what to do."""
    result = click.testing.CliRunner().invoke(cli.main, arguments)
    assert result.exit_code != 0
    assert reason in result.output, result.output


def test_what_top_finds_may_be_another_service() -> None:
    """Something that answers with JSON, and is no daemon of Penstock, is named as such."""

    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n[]")

        def log_message(self, *_: object) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"
        result = click.testing.CliRunner().invoke(cli.main, ["aggregator", "top", address, "--once"])
        server.shutdown()
    assert result.exit_code == 1 and f"what answers at {address} is no aggregator" in result.output, result.output


CLUSTER = """
version: 1
hosts:
  one: {address: "::1"}
  two: {address: 192.0.2.1}
  three: {address: 192.0.2.2}
  four:
  five: {address: 127.0.0.1}
aggregators:
  a: {at: one, port: PORT}
  b: {at: two}
  c: {at: two, port: 7472}
servers:
  s: {at: five, port: PORT}
  t: {at: four}
"""


@pytest.mark.parametrize(("role", "host", "listens"), [("aggregator", "one", "[::1]"), ("server", "five", "127.0.0.1")])
def test_a_cluster_file_has_the_address(role: str, host: str, listens: str, tmp_path: pathlib.Path) -> None:
    """A daemon listens where the cluster file puts the one of its role on its host."""
    family = socket.AF_INET6 if ":" in listens else socket.AF_INET
    with socket.create_server((listens.strip("[]"), 0), family=family) as free:
        port = free.getsockname()[1]
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER.replace("PORT", str(port)))
    with running(role, "--cluster", str(path), "--host", host) as (_, address):
        assert address == f"{listens}:{port}"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("aggregator --host one", "--host names a host of a cluster file: give --cluster too"),
        ("aggregator --cluster FILE", "say with --host"),
        ("aggregator --cluster FILE --host one --listen ::1", "leave out one of them"),
        ("aggregator --cluster FILE --host tow", "hosts: there is no host tow: "),
        ("aggregator --cluster FILE --host two", "host two has b, c: give one there, or say --listen"),
        ("server --cluster FILE --host three", "host three has no server: give one there, or say --listen"),
        ("server --cluster FILE --host four", "hosts.four: has no address, and server t listens on one: give it"),
        ("server --cluster /no/such --host one", "--cluster /no/such"),
    ],
)
def test_a_cluster_file_without_the_address(arguments: str, reason: str, tmp_path: pathlib.Path) -> None:
    """What is missing or meant twice is said, with the place in the file."""
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER.replace("PORT", "7471"))
    result = click.testing.CliRunner().invoke(cli.main, arguments.replace("FILE", str(path)).split())
    assert result.exit_code == 2
    assert reason in result.output, result.output


@pytest.mark.parametrize("role", ["aggregator", "server"])
def test_options_are_those_of_the_table(role: str) -> None:
    """A verb has the options of the daemon's table, in its words, and refuses what it refuses. (Its own tests hold the program
    `penstock-node` against the same table.)"""
    verb = cli.main.get_command(click.Context(cli.main), role)
    assert verb is not None
    # Only Python reads cluster files, and has endpoints.
    here = [["--cluster"], ["--host"], *([["--endpoint"]] if role == "server" else [])]
    declared = [option for option in verb.params if isinstance(option, click.Option)]
    assert [option.opts for option in declared[-len(here) :]] == here
    del declared[-len(here) :]
    table = _core.daemon_options(role)
    assert len(table) > 10
    assert table == [
        (
            option.opts[0].removeprefix("--"),
            None if option.is_flag else option.metavar,
            None if option.is_flag else option.default,
            option.help,
        )
        for option in declared
    ]
    for name, value, _, _ in table:
        if value is not None:
            with pytest.raises(ValueError, match="no such value") as refused:
                _core.check_daemon_option(name, "no such value")
            result = click.testing.CliRunner().invoke(cli.main, [role, f"--{name}", "no such value"])
            assert result.exit_code == 2
            assert f"Invalid value for '--{name}': {refused.value}" in result.output


@pytest.mark.parametrize("role", ["aggregator", "server"])
def test_defaults_are_left_to_the_daemon(role: str) -> None:
    """It gets what was given and nothing else: a --memory of 2G that nobody gave would be refused on a machine with less."""
    verb = cli.main.get_command(click.Context(cli.main), role)
    assert verb is not None
    arguments = ["--listen", "127.0.0.1", "--no-offloads", "--memory", "2G"]
    for few, said in (
        (arguments[:2], {"listen": "127.0.0.1"}),
        (arguments, {"listen": "127.0.0.1", "no-offloads": "", "memory": "2G"}),
    ):
        with verb.make_context(role, list(few)) as context:
            assert daemons._said(role, context.params) == said


def test_a_taken_port_is_said() -> None:
    """By protocol and number."""
    with udp() as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        result = click.testing.CliRunner().invoke(cli.main, ["server", "--listen", listen])
        assert result.exit_code == 1
        assert f"UDP port {taken.getsockname()[1]} of 127.0.0.1 is taken" in result.output, result.output


def test_addresses() -> None:
    """An address or a name, with a port or without, of either family."""
    assert daemons.parse_address("10.1.2.3") == "10.1.2.3:7471"
    assert daemons.parse_address("10.1.2.3:80") == "10.1.2.3:80"
    assert daemons.parse_address("::1") == "[::1]:7471"
    assert daemons.parse_address("[::1]:80") == "[::1]:80"
    for bad in ("10.1.2.3:99999999", "10.1.2.3:x", "no such host", "1:2:3"):
        with pytest.raises(click.BadParameter):
            daemons.parse_address(bad)


def test_the_binding_maps_errors() -> None:
    """A daemon that cannot start is a penstock.errors.Config; one that does is freed with its ports."""
    options = {"slots": "16", "memory": "64K", "jobs": "1", "buffer": "64K", "drain-timeout": "1", "no-offloads": ""}
    with pytest.raises(errors.Config, match="role"):
        _core.Daemon("switch", {**options, "listen": "127.0.0.1:0"}, secret=None)
    with pytest.raises(errors.Config, match=r"--listen: .* is not an address"):
        _core.Daemon("server", {**options, "listen": "127.0.0.1:x"}, secret=None)
    with pytest.raises(errors.Config, match="--listen is missing"):
        _core.Daemon("server", options, secret=None)
    with pytest.raises(errors.Config, match="--shards is no option of the server"):
        _core.Daemon("server", {**options, "listen": "127.0.0.1:0", "shards": "1"}, secret=None)
    one = _core.Daemon("server", {**options, "listen": "127.0.0.1:0"}, secret=None)
    address = one.address
    assert not one.wait(0)
    del one
    two = _core.Daemon("server", {**options, "listen": address}, secret=None)
    two.drain()
    assert two.wait(20)


def test_rates_are_of_two_looks() -> None:
    """What `top` shows a second is the difference of two looks by the time between them."""
    counts = dict.fromkeys(("malformed", "key", "duplicate"), 0)
    socket_counts = {
        "received": 1000,
        "received_trains": 100,
        "received_bytes": 10**9,
        "sent": 50,
        "kernel_dropped": 0,
        "blocked": 0,
        "unsent": 0,
        "dropped_on_purpose": 0,
    }

    def look(at: float, factor: int, role: str = "aggregator") -> dict[str, Any]:
        node = {
            "node": "worker 0",
            "address": "[fd00::2]:400",
            "workers": "0x1",
            "packets": 1,
            "bytes": 1,
            "added": 1,
            "refused": counts,
            "silent_s": None,
        }
        one = {
            "job": 7,
            "epoch": 2,
            "keyed": True,
            "waiting_slots": 3,
            "slots": 16,
            "memory_bytes": 1 << 20,
            "added": 100 * factor,
            "completed": 20,
            "repeated": 1,
            "named": 88,
            "overflowed": 5 * (factor - 1),
            "abandoned": 0,
            "refused": {**counts, "key": 12, "duplicate": 30},
            "silent_s": 0.5,
            "nodes": [node],
        }
        return {
            "about": {
                "role": role,
                # Brackets are no markup.
                "udp": "[fd00::1]:7471",
                "penstock": "0",
                "shards": 1,
                "uptime_s": 5,
                "draining": True,
                "limits": {"jobs": 64, "slots": 64, "memory_bytes": 1 << 30},
            },
            "counted": {
                "socket": {name: factor * value for name, value in socket_counts.items()},
                "unauthenticated": counts,
                "jobs": [one],
            },
            "time": at,
        }

    def shown(now: dict[str, Any], before: dict[str, Any] | None) -> str:
        console = Console(width=120, file=io.StringIO())
        with console.capture() as captured:
            console.print(top.render(now, before))
        return captured.get()

    text = shown(look(12.0, 3), look(10.0, 1))
    for word in (
        "aggregator [fd00::1]:7471",
        "[fd00::2]:400",
        "1,000.0/s",
        "8.0 Gbit/s",
        "draining",
        "3/16",
        "duplicate 30, key 12",
        "0.5 s",
    ):
        assert word in text, text
    assert re.search(r"\b300\s+100\s+20\s+1\s+88\s+0\s+duplicate 30, key 12\s+0.5 s\s*\n", text), text
    assert "job 7: 10 additions overflowed" in text
    assert "overflowed" not in shown(look(10.0, 1), None), "an alarm only where there is something"
    assert "88" not in shown(look(10.0, 1, "server"), None), "servers do not count what they name"
