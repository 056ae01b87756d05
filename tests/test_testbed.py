"""The emulated cluster, on real namespaces: what it measures, what it loses, and that nothing of it stays behind.

Nothing here asserts a speed: rates are read from the kernel's configuration, and bytes from its counters.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
import re
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from click.testing import CliRunner

from penstock.tools.testbed import (
    LinkSpec,
    Loopback,
    Testbed,
    TestbedUnavailable,
    cli,
    flow_class,
    keeper,
    kept,
    launch,
    link,
    namespace,
    relay,
    system,
)

ROOT = pathlib.Path(__file__).resolve().parents[1]
REASON = system.unavailable(LinkSpec(loss=0.1))
needs_namespaces = pytest.mark.skipif(REASON is not None, reason=f"no testbed here: {REASON}")


# What a link is


@pytest.mark.parametrize(
    "arguments",
    [
        {"rate_mbit": 0},
        {"rate_mbit": float("nan")},
        {"rate_mbit": None, "flow_mbit": 10},
        {"rate_mbit": 100, "flow_mbit": 101},
        {"flow_mbit": []},
        {"flow_mbit": [1] * 17},
        {"flow_mbit": [100, -1]},
        {"loss": 1.0},
        {"loss": -0.1},
        {"delay_ms": -1},
        {"delay_ms": float("inf")},
        {"mtu": 1279},
        {"mtu": 70_000},
    ],
)
def test_a_link_that_makes_no_sense_is_refused_by_name(arguments: dict[str, object]) -> None:
    """The error names the argument, so that the caller knows what to change."""
    with pytest.raises(ValueError, match=re.escape(next(reversed(arguments))) + "="):
        LinkSpec(**arguments)  # type: ignore[arg-type]


def test_a_link_survives_its_dictionary_and_describes_itself() -> None:
    """`testbed up` writes links to a file; what is read back must be the same link."""
    spec = LinkSpec(rate_mbit=1000, flow_mbit=[60, 300], loss=0.01, delay_ms=10, mtu=9000)
    assert LinkSpec(**spec.to_dict()) == spec
    assert spec.describe() == (
        "1000 Mbit/s, 60 and 300 a flow by turns, 10 ms one way, 1.000% of packets lost, MTU 9000, no offloads"
    )
    assert LinkSpec().payload_mbit == pytest.approx(1000 * 1448 / 1514)


def test_caps_are_dealt_to_the_classes_by_turns() -> None:
    """Class i gets cap i modulo the number of caps, and assured rates leave room in the link."""
    spec = LinkSpec(rate_mbit=1000, flow_mbit=[60, 300, 100])
    assert spec.caps_mbit is not None
    assert spec.caps_mbit[:4] == [60, 300, 100, 60] and len(spec.caps_mbit) == link.CLASSES
    text = "\n".join(link.host_commands(spec, "eth0"))
    assert text.count("ceil 60000kbit") == 6 and text.count("ceil 300000kbit") == 5
    assured = [int(each) for each in re.findall(r"htb rate (\d+)kbit ceil", text)]
    assert len(assured) == link.CLASSES and sum(assured) <= 1_000_000


def test_a_flow_class_is_the_same_from_both_ends_and_uses_all_classes() -> None:
    """Both directions of a connection share a class; ports of one parity still reach every class."""
    for port in range(40_000, 40_064, 2):
        assert flow_class(port, 29_500) == flow_class(29_500, port)
    assert {flow_class(port, 29_500) for port in range(40_000, 40_064, 2)} == set(range(16))


# Two hosts, a switch


@pytest.fixture(scope="module")
def bed() -> Iterator[Testbed]:
    with Testbed(hosts=2, link=LinkSpec(rate_mbit=400, flow_mbit=[60, 100])) as bed:
        yield bed


@needs_namespaces
def test_the_kernel_has_the_caps_that_the_link_names(bed: Testbed) -> None:
    """What tc reports on each host is the link's rate and, by turns, the caps of all sixteen classes."""
    for host in range(2):
        show = bed.inside(
            host, lambda: subprocess.run(["tc", "class", "show", "dev", "eth0"], capture_output=True, text=True)
        )
        ceilings = dict(re.findall(r"class htb 1:(\w+) .*?ceil (\w+)", show.stdout))
        assert ceilings["ff"] == "400Mbit"
        assert [ceilings[f"{0x100 + index:x}"] for index in range(16)] == ["60Mbit", "100Mbit"] * 8


@needs_namespaces
def test_the_table_of_connections_of_a_host_is_its_own(bed: Testbed) -> None:
    """A small one: a run lists connections of all hosts twice a second, and the kernel walks a whole table for each list."""
    entries = pathlib.Path("/proc/sys/net/ipv4/tcp_ehash_entries")  # negative where a namespace uses the machine's
    if not entries.exists():
        pytest.skip("namespaces share the machine's table before Linux 6.2")
    assert [bed.inside(host, entries.read_text) for host in range(2)] == [f"{namespace.CONNECTION_BUCKETS}\n"] * 2


@needs_namespaces
@pytest.mark.parametrize("family", [4, 6])
def test_each_flow_lands_in_the_class_of_its_ports_in_both_directions(bed: Testbed, family: int) -> None:
    """Bytes of each connection appear in its class, on the connecting and on the accepting host alike.

    The classifier runs in the kernel; flow_class is our statement of it. Twelve connections also spread over classes.
    """
    payload = bytes(100_000)
    before = bed.flows()
    expected = [[0] * 16, [0] * 16]
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(listen(bed, 0, family))
        for number in range(12):
            client = stack.enter_context(connect(bed, 1, 0, server, family))
            accepted, peer = server.accept()
            stack.enter_context(accepted)
            index = flow_class(server.getsockname()[1], peer[1])
            # Different amounts, so that a flow in a wrong class shows.
            for host, sender, receiver, times in ((0, accepted, client, 1), (1, client, accepted, number % 3)):
                for _ in range(times):
                    transfer(sender, receiver, payload)
                    expected[host][index] += len(payload)
        now = bed.flows()
        for host in range(2):
            sent = [after.bytes - old.bytes for after, old in zip(now[host], before[host], strict=True)]
            for index in range(16):
                # Headers, acknowledgements and hand-shakes come on top.
                assert expected[host][index] <= sent[index] <= expected[host][index] * 1.1 + 50_000, (host, index)
            assert sum(each.flows for each in now[host]) == 12
        assert [each.flows for each in now[0]] == [each.flows for each in now[1]]
        assert sum(each.flows > 0 for each in now[0]) >= 3


@needs_namespaces
def test_counters_see_what_crossed_the_link_and_nothing_else(bed: Testbed) -> None:
    """A transfer shows at both ends in full; traffic inside a host does not show at all."""
    payload = bytes(3_000_000)
    with listen(bed, 0) as server, connect(bed, 1, 0, server) as client:
        accepted, _ = server.accept()
        before = bed.counters()
        transfer(client, accepted, payload)
        after = bed.counters()
        accepted.close()
    sent = after[1]["tx_bytes"] - before[1]["tx_bytes"]
    received = after[0]["rx_bytes"] - before[0]["rx_bytes"]
    assert len(payload) <= sent <= len(payload) * 1.1
    assert len(payload) <= received <= len(payload) * 1.1

    with listen(bed, 0) as server, connect(bed, 0, 0, server) as client:
        accepted, _ = server.accept()
        transfer(client, accepted, payload)
        accepted.close()
    assert bed.counters()[0]["tx_bytes"] - after[0]["tx_bytes"] < 10_000


@needs_namespaces
def test_dropped_links_are_silent_and_come_back(bed: Testbed) -> None:
    """No send fails and nothing arrives, in either direction; afterwards everything is as before."""
    with datagram(bed, 0) as here, datagram(bed, 1) as there:
        for host in (0, 1):
            bed.drop_link(host)
            bed.drop_link(host)
            here.sendto(b"lost", there.getsockname())
            there.sendto(b"lost", here.getsockname())
            bed.restore_link(host)
            here.sendto(b"found", there.getsockname())
            there.sendto(b"found", here.getsockname())
            assert here.recv(10) == b"found" and there.recv(10) == b"found"
        bed.drop_link(1)
        with pytest.raises(TimeoutError):  # not refused, not unreachable
            bed.inside(0, lambda: socket.create_connection((bed.address(1), 1), timeout=0.3))
        bed.restore_link(1)
        with pytest.raises(ConnectionRefusedError):
            bed.inside(0, lambda: socket.create_connection((bed.address(1), 1), timeout=10))


@needs_namespaces
@pytest.mark.parametrize("delay_ms", [0, 1])
def test_large_packets_cross_where_the_mtu_allows_them(delay_ms: float) -> None:
    """A datagram that fills the MTU arrives whole and unfragmented; one byte more is refused by the sender."""
    with Testbed(link=LinkSpec(mtu=9000, delay_ms=delay_ms)) as bed:
        with datagram(bed, 0) as here, datagram(bed, 1) as there:
            here.setsockopt(socket.IPPROTO_IP, 10, 2)  # IP_MTU_DISCOVER, IP_PMTUDISC_DO: never fragment
            here.sendto(bytes(9000 - 28), there.getsockname())
            assert there.recv(10_000) == bytes(9000 - 28)
            with pytest.raises(OSError, match="Message too long"):
                here.sendto(bytes(9000 - 27), there.getsockname())


@needs_namespaces
def test_with_three_hosts_only_the_dropped_one_is_gone() -> None:
    """Dropping one host's link leaves the others talking."""
    with Testbed(hosts=3, link=LinkSpec(rate_mbit=100)) as bed, contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(datagram(bed, host)) for host in range(3)]
        bed.drop_link(2)
        sockets[0].sendto(b"lost", sockets[2].getsockname())
        sockets[2].sendto(b"lost", sockets[0].getsockname())
        sockets[1].sendto(b"found", sockets[0].getsockname())
        assert sockets[0].recv(10) == b"found"
        bed.restore_link(2)
        sockets[0].sendto(b"found", sockets[2].getsockname())
        assert sockets[2].recv(10) == b"found"


@needs_namespaces
def test_loss_loses_single_packets_at_about_the_rate_asked_for() -> None:
    """Of 2000 datagrams each way 30 % go missing: 1400 +- 20 arrive, 8 standard deviations allowed.

    Offloads go off by themselves, or 64 KiB would be lost at a time; TCP still delivers every byte.
    """
    with Testbed(link=LinkSpec(rate_mbit=1000, loss=0.3)) as bed:
        assert not bed.link.uses_offloads
        with datagram(bed, 0) as here, datagram(bed, 1) as there:
            for sender, receiver in ((here, there), (there, here)):
                for _ in range(2000):
                    sender.sendto(b"?", receiver.getsockname())
                # Sent until one arrives: it came after all the others that did.
                receiver.settimeout(0.2)
                arrived = 0
                while True:
                    try:
                        data = receiver.recv(10)
                    except TimeoutError:
                        sender.sendto(b"!", receiver.getsockname())
                        continue
                    if data == b"!":
                        break
                    arrived += 1
                assert 1236 <= arrived <= 1564
    with Testbed(link=LinkSpec(rate_mbit=1000, loss=0.01)) as bed:
        with listen(bed, 0) as server, connect(bed, 1, 0, server) as client:
            accepted, _ = server.accept()
            before = bed.counters()[1]["tx_packets"]
            transfer(client, accepted, bytes(1_000_000))
            # One packet for each segment: nothing crossed in pieces of 64 KiB.
            assert bed.counters()[1]["tx_packets"] - before >= 1_000_000 // 1448
            accepted.close()


@needs_namespaces
@pytest.mark.parametrize("hosts", [2, 3])
def test_delay_is_seen_by_tcp_and_keeps_order_bytes_and_classes(hosts: int) -> None:
    """Connecting takes a round trip of twice the delay, over both families; what arrives is what was sent, whole,
    and counted in the same classes as without delay."""
    with Testbed(hosts=hosts, link=LinkSpec(rate_mbit=200, flow_mbit=100, delay_ms=15)) as bed:
        for family in (4, 6):
            with listen(bed, hosts - 1, family) as server:
                start = time.monotonic()
                with connect(bed, 0, hosts - 1, server, family) as client:
                    assert time.monotonic() - start >= 0.030
                    accepted, peer = server.accept()
                    payload = os.urandom(1_000_000)
                    transfer(client, accepted, payload)
                    index = flow_class(server.getsockname()[1], peer[1])
                    assert bed.flows()[0][index].bytes >= len(payload)
                    round_trip_us = tcp_round_trip_us(client)
                    accepted.close()
                assert round_trip_us >= 30_000


def test_the_relay_counts_the_headers_that_cutting_a_frame_adds() -> None:
    """A frame of 3 segments takes two more headers on the wire; a plain one takes what it is."""
    plain = bytes(relay.VNET_BYTES) + bytes(1514)
    assert relay.wire_bytes(plain) == 1514
    headers = 66
    cut = bytes([1, 1]) + headers.to_bytes(2, sys.byteorder) + (1448).to_bytes(2, sys.byteorder) + bytes(4)
    for payload, more in ((1448, 0), (1449, 1), (2896, 1), (2897, 2)):
        assert relay.wire_bytes(cut + bytes(headers + payload)) == headers + payload + more * headers


# Ranks


SHOW_ENVIRONMENT = """
import os
print(*[os.environ[name] for name in (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "GLOO_SOCKET_IFNAME")])
"""


@needs_namespaces
def test_ranks_are_dealt_in_blocks_and_know_who_they_are(bed: Testbed) -> None:
    """Three ranks on two hosts: two and one, with the environment that init_process_group reads."""
    lines: list[tuple[int, str]] = []
    done = bed.run(python(SHOW_ENVIRONMENT), ranks=3, on_line=lambda rank, line: lines.append((rank, line)))
    assert done.returncode == 0 and done.returncodes == {0: 0, 1: 0, 2: 0} and done.failed_rank is None
    assert done.outputs == [
        "0 3 0 2 0 10.77.0.1 eth0\n",
        "1 3 1 2 0 10.77.0.1 eth0\n",
        "2 3 0 1 1 10.77.0.1 eth0\n",
    ]
    assert sorted(lines) == [(rank, output.rstrip("\n")) for rank, output in enumerate(done.outputs)]


@needs_namespaces
@pytest.mark.usefixtures("forks")
def test_torchrun_gives_the_same_ranks_output_and_exit_codes(bed: Testbed) -> None:
    """The other launcher: ranks, separate output, and the exit code of the rank that failed, which torchrun hides."""
    pytest.importorskip("torch.distributed.run")
    program = SHOW_ENVIRONMENT + "import sys; sys.exit(7 if os.environ['RANK'] == '2' else 0)"
    done = bed.run(python(program), ranks=3, launcher="torchrun", grace_s=5)
    assert done.outputs[2] == "2 3 0 1 1 10.77.0.1 eth0\n"
    assert done.failed_rank == 2 and done.returncode == 7
    assert done.outputs[:2] == ["0 3 0 2 0 10.77.0.1 eth0\n", "1 3 1 2 0 10.77.0.1 eth0\n"]


@needs_namespaces
def test_forks_are_the_same_ranks(bed: Testbed, tmp_path: pathlib.Path) -> None:
    """Forked ranks: each on its host, with its environment, output and exit code; torch is there before it is asked for."""
    (tmp_path / "neighbour.py").write_text("TOLD = 'torch' in __import__('sys').modules")
    program = """
import socket, sys, neighbour
socket.create_server((sys.argv[1 + int(os.environ["GROUP_RANK"])], 0))  # an address that only this rank's host has
print(neighbour.TOLD)
if os.environ["RANK"] == "1":
    raise ValueError("on purpose")
if os.environ["RANK"] == "2":
    sys.exit("bye")
"""
    command = [*script(tmp_path, SHOW_ENVIRONMENT + program), bed.address(0), bed.address(1)]
    done = bed.run(command, ranks=3, launcher="fork", grace_s=20)
    assert done.returncodes == {0: 0, 1: 1, 2: 1} and done.returncode == 1
    assert done.outputs[0] == "0 3 0 2 0 10.77.0.1 eth0\nTrue\n"
    assert done.outputs[1].startswith("1 3 1 2 0 10.77.0.1 eth0\nTrue\nTraceback") and "forks.py" not in done.outputs[1]
    assert done.outputs[1].endswith("ValueError: on purpose\n")
    assert done.outputs[2] == "2 3 0 1 1 10.77.0.1 eth0\nTrue\nbye\n"


@needs_namespaces
@pytest.mark.parametrize("launcher", ["direct", "fork"])
def test_the_first_failure_decides_and_the_others_may_say_what_they_noticed(
    bed: Testbed, launcher: Literal["direct", "fork"], tmp_path: pathlib.Path, request: pytest.FixtureRequest
) -> None:
    """Rank 1 fails at once; rank 0 ends by itself within the grace, and its later failure changes nothing.

    Its last words have no newline, and count all the same.
    """
    if launcher == "fork":
        request.getfixturevalue("forks")
    program = """
import sys
if os.environ["RANK"] == "0":
    with socket.create_server(address) as server:
        server.settimeout(20)
        other = int(server.accept()[0].recv(10))
    wait_until(lambda: not os.path.exists(f"/proc/{other}"))  # the launcher has seen it end
    sys.stdout.write("noticed")
    sys.exit(4)
connect().sendall(str(os.getpid()).encode())
sys.exit(3)
"""
    done = bed.run(script(tmp_path, PATIENCE + program), ranks=2, launcher=launcher, grace_s=20)
    assert (done.failed_rank, done.returncode, done.returncodes) == (1, 3, {0: 4, 1: 3})
    assert done.outputs == ["noticed", ""]


@needs_namespaces
@pytest.mark.parametrize("launcher", ["direct", "fork"])
def test_a_rank_that_does_not_end_is_told_to_and_then_made_to(
    bed: Testbed,
    launcher: Literal["direct", "fork"],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
    request: pytest.FixtureRequest,
) -> None:
    """After the grace SIGTERM, and SIGKILL for one that ignores it: with the process that forked it, which then cannot tell."""
    monkeypatch.setattr("penstock.tools.testbed.launch.KILL_AFTER_S", 0.3)
    if launcher == "fork":
        request.getfixturevalue("forks")
    program = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
if rank == 2:
    sys.exit(5)
if rank == 1:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(100)
"""
    done = bed.run(script(tmp_path, program), ranks=3, launcher=launcher, grace_s=1.0)
    assert done.returncode == 5 and done.failed_rank == 2
    killed = {1: -signal.SIGKILL} if launcher == "direct" else {}
    assert done.returncodes == {0: -signal.SIGTERM, **killed, 2: 5}


@needs_namespaces
def test_a_run_out_of_time_leaves_nobody(bed: Testbed) -> None:
    """TimeoutError shows what the rank said last; the rank and its daemon are dead when it is raised."""
    program = """
import os, subprocess, time
daemon = subprocess.Popen(["sleep", "100"], start_new_session=True)
print("pids", os.getpid(), daemon.pid)
time.sleep(100)
"""
    with pytest.raises(TimeoutError, match="pids") as raised:
        bed.run(python(program), ranks=1, timeout_s=1.0)
    pids = re.search(r"pids (\d+) (\d+)", str(raised.value))
    assert pids is not None
    assert not any(alive(int(each)) for each in pids.groups())


@needs_namespaces
def test_a_program_that_does_not_exist_is_an_error_at_once(bed: Testbed) -> None:
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        bed.run(["no-such-program"], ranks=2)


@needs_namespaces
def test_a_run_reports_its_own_traffic(bed: Testbed, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Counters and classes of a run start at zero, whatever crossed before, and tell the flows that were open."""
    seen = tmp_path / "all connections were seen"
    look = launch._Run._note_connections

    def look_and_tell(run: launch._Run) -> None:
        look(run)
        if all(len(run.connections[host]) == 3 for host in range(2)):
            seen.touch()

    monkeypatch.setattr(launch._Run, "_note_connections", look_and_tell)
    program = """
if os.environ["RANK"] == "0":
    server = socket.create_server(address)
    streams = [server.accept()[0] for _ in range(3)]
    for stream in streams:
        while stream.recv(1 << 16):
            pass
else:
    streams = [connect() for _ in range(3)]
    for stream in streams:
        stream.sendall(bytes(500_000))
    wait_until(lambda: os.path.exists(os.environ["SEEN"]))
"""
    for _ in range(2):
        seen.unlink(missing_ok=True)
        done = bed.run(python(PATIENCE + program), ranks=2, env={"SEEN": str(seen)})
        assert done.returncode == 0, done.outputs
        assert 1_500_000 <= done.counters[1]["tx_bytes"] <= 1_700_000
        assert 1_500_000 <= sum(each.bytes for each in done.flows[1]) <= 1_700_000
        assert sum(each.flows for each in done.flows[0]) == sum(each.flows for each in done.flows[1]) == 3


# Ends


@needs_namespaces
@pytest.mark.parametrize("delay_ms", [0, 5])
def test_a_killed_maker_leaves_no_process_and_no_namespace(delay_ms: float) -> None:
    """SIGKILL to the process that made the testbed: ranks, their daemons in sessions of their own, the keeper and the
    relay die, and nobody holds any of its namespaces, so the kernel frees them with all that is in them."""
    program = f"""
import os, subprocess, sys
from penstock.tools.testbed import Testbed, LinkSpec
bed = Testbed(hosts=2, link=LinkSpec(delay_ms={delay_ms}))
rank = bed.popen(1, ["sh", "-c", "setsid sleep 1000 & echo $!; exec sleep 1000"], stdout=subprocess.PIPE)
print(rank.pid, int(rank.stdout.readline()), bed._keeper.pid, *[os.fstat(fd).st_ino for fd in bed._namespaces])
sys.stdout.flush()
sys.stdin.read()
"""
    with subprocess.Popen(python(program), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None
        rank, daemon, guard, *namespaces = map(int, maker.stdout.readline().split())
        assert len(namespaces) == 3 and holders(set(namespaces))
        handles = [os.pidfd_open(each) for each in (rank, daemon, guard)]
        maker.kill()
    for handle in handles:
        assert select.select([handle], [], [], 20)[0], "still alive"
        os.close(handle)
    assert holders(set(namespaces)) == []


@needs_namespaces
def test_a_killed_keeper_does_not_keep_the_maker_from_cleaning_up() -> None:
    """The other way round: the keeper dies first, and closing the testbed still ends everything."""
    bed = Testbed(hosts=2)
    assert bed._keeper is not None
    namespaces = {os.fstat(each).st_ino for each in bed._namespaces}
    process = bed.popen(0, ["sh", "-c", "setsid sleep 1000 & exec sleep 1000"])
    bed._keeper.kill()
    bed._keeper.wait()
    bed.close()
    assert process.wait(timeout=10) == -signal.SIGKILL
    assert holders(namespaces) == []


@needs_namespaces
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupting_a_run_ends_it_with_all_its_processes(number: signal.Signals) -> None:
    """Ctrl-C at the command: ranks hear of it and may end by themselves, their daemons are killed, exit code 130."""
    program = """
import os, signal, subprocess, sys, time
def bye(*_):
    print("bye"); sys.exit()
signal.signal(signal.SIGINT, bye)
daemon = subprocess.Popen(["sleep", "1000"], start_new_session=True)
print("ready", os.getpid(), daemon.pid, os.stat("/proc/self/ns/net").st_ino)
time.sleep(1000)
"""
    command = [*penstock("run", "-n", "2"), "--", *python(program)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ready = [re.fullmatch(r"\[(\d)\] ready (\d+) (\d+) (\d+)\n", process.stdout.readline()) for _ in range(2)]
        assert all(ready)
        known_s = time.time()
        process.send_signal(number)
        output, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    assert sorted(output.split("\n")) == ["", "[0] bye", "[1] bye"]
    numbers = [[int(each) for each in match.groups()] for match in ready if match is not None]
    assert {each[0] for each in numbers} == {0, 1}
    assert not any(alive(each[1]) or alive(each[2]) for each in numbers)
    assert holders({each[3] for each in numbers}, known_s) == []


@needs_namespaces
def test_a_forked_child_that_closes_a_testbed_does_not_end_it(bed: Testbed) -> None:
    """Only the process that made it may: a forked worker runs the same exit handlers."""
    child = os.fork()
    if child == 0:
        bed.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert bed.run(["true"], ranks=2).returncode == 0


def test_the_keeper_kills_by_mark_and_namespace_and_nothing_else() -> None:
    """A process is the testbed's when it has the whole mark in its environment, not when it has one like it."""
    own, one = os.stat("/proc/self/ns/net").st_ino, secrets.token_hex(8)
    started = [
        subprocess.Popen(["sleep", "1000"], env={**os.environ, "MARK": value})
        for value in (one, f"{one}-more", "other")
    ]
    try:
        assert list(keeper.members(f"MARK={one}".encode(), set())) == [started[0].pid]
        assert set(keeper.members(b"MARK=none", {own})) >= {each.pid for each in started}
        keeper.sweep(f"MARK={one}".encode(), set())
        assert started[0].wait(timeout=10) == -signal.SIGKILL
        assert started[1].poll() is None and started[2].poll() is None
    finally:
        for each in started:
            each.kill()
            each.wait()


def test_the_keeper_knows_processes_that_have_just_been_started() -> None:
    """Inside execve(2) a process has no environment for an instant, and Popen returns before it has one."""
    for _ in range(100):
        with subprocess.Popen(["sleep", "1000"], env={**os.environ, "MARK": "one"}) as process:
            try:
                assert keeper.belongs(process.pid, b"MARK=one", set())
            finally:
                process.kill()


def test_a_keeper_that_starts_after_its_maker_has_gone_stays(tmp_path: pathlib.Path) -> None:
    """`testbed up` on a busy machine is over before its keeper runs; that it shall stay stands in the keeper's pipe."""
    state, mark = tmp_path / "state.json", f"MARK={secrets.token_hex(8)}"
    state.touch()
    gate, opener = os.pipe()
    maker = f"""
import os, subprocess, sys
wait = ["sh", "-c", 'read go < /dev/fd/{gate}; exec "$0" -I -S "$@"', sys.executable]
command = [*wait, {keeper.__file__!r}, {mark!r}, str(os.getpid())]
process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=[{gate}])
process.stdin.write({f"detach {state}"!r}.encode() + b"\\n")
process.stdin.flush()
print(process.pid)
os._exit(0)
"""
    made = subprocess.run([*python(maker)], stdout=subprocess.PIPE, pass_fds=[gate], check=True)
    handle = os.pidfd_open(int(made.stdout))
    os.write(opener, b"\n")
    # Before it blocks SIGTERM, that would kill it. The kernel does not count as blocked what a process waits for.
    status, blocks = pathlib.Path(f"/proc/{int(made.stdout)}/status"), False
    while not blocks and not select.select([handle], [], [], 0.01)[0]:
        blocked = re.search(r"^SigBlk:\s*(\w+)", status.read_text(), re.MULTILINE)
        blocks = blocked is not None and bool(int(blocked[1], 16) >> (signal.SIGHUP - 1) & 1)
    assert blocks, "it has ended with its maker"
    signal.pidfd_send_signal(handle, signal.SIGTERM)
    assert select.select([handle], [], [], 10)[0]
    assert not state.exists(), "it has ended with its maker"
    for each in (gate, opener, handle):
        os.close(each)


# The command


@needs_namespaces
def test_a_testbed_stays_up_until_it_is_taken_down() -> None:
    """up, show, run by name, a second up refused, down; a daemon that a run could not have left is killed by down."""
    name = f"test-{os.getpid()}"
    invoke("up", "--name", name, "--hosts", "3", "--rate", "100", "--flow", "50", "--delay", "2")
    try:
        state = kept.read_state(name)
        inodes = [os.stat(f"/proc/{state['keeper']}/fd/{each}").st_ino for each in state["namespaces"]]
        again = invoke("up", "--name", name, code=1)
        assert f"penstock testbed down --name {name}" in again
        assert "10.77.0.3" in invoke("show", "--name", name)
        output = invoke("run", "--name", name, "--", *python(SHOW_ENVIRONMENT))
        assert "[2] 2 3 0 1 2 10.77.0.1 eth0\n" in output
        with Testbed.attach(name) as attached:
            assert attached.link == LinkSpec(rate_mbit=100, flow_mbit=50, delay_ms=2)
            process = attached.popen(1, ["sleep", "1000"])
        assert process.wait(timeout=10) == -signal.SIGKILL  # closing what was attached ends what it started
        assert kept.read_state(name)["keeper"] == state["keeper"]  # and nothing else
        with Testbed.attach(name) as attached:
            process = attached.popen(1, ["sleep", "1000"])
            invoke("down", "--name", name)
            assert process.wait(timeout=10) == -signal.SIGKILL
    except BaseException:
        kept.take_down(name)
        raise
    assert holders(set(inodes)) == []
    assert f"no testbed '{name}'" in invoke("down", "--name", name, code=1)


@needs_namespaces
def test_a_run_says_that_its_testbed_was_taken_down() -> None:
    """In one line, instead of a signal that nobody sent on purpose and tables of a link that is gone."""
    name = f"test-{os.getpid()}"
    invoke("up", "--name", name)
    try:
        program = "print('ready', flush=True); import time; time.sleep(1000)"
        command = [*penstock("run", "-n", "2", "--name", name), "--", *python(program)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            said = sorted(process.stdout.readline() for _ in range(2))
            kept.take_down(name)
            _, errors = process.communicate(timeout=30)
            assert said == ["[0] ready\n", "[1] ready\n"], errors
    finally:
        if name in kept.read_states():
            kept.take_down(name)
    assert process.returncode == 1
    assert (
        errors
        == f"penstock testbed: testbed '{name}' was taken down while the run was on; nothing of the run is left\n"
    )


@needs_namespaces
def test_ranks_on_emulated_hosts_start_quietly() -> None:
    """Emulated hosts have no names; torch's store does not complain of each connection."""
    program = "import torch.distributed as dist; dist.init_process_group('penstock'); print('ready')"
    output = invoke("run", "-n", "2", "--", *python(program))
    assert output.count("ready") == 2 and "cannot be retrieved" not in output, output


@needs_namespaces
def test_a_testbed_whose_keeper_was_killed_is_not_up() -> None:
    """Its file is stale: `show` does not list it, and the name is free again."""
    name = f"test-{os.getpid()}"
    invoke("up", "--name", name)
    os.kill(kept.read_state(name)["keeper"], signal.SIGKILL)
    invoke("up", "--name", name)
    invoke("down", "--name", name)
    assert not kept.state_path(name).exists()


def test_a_signal_does_not_end_a_keeper_that_does_not_run_yet() -> None:
    """`testbed down` just after `up`: it would leave the file, and whatever it was to end."""
    bed = Loopback(hosts=1)
    assert bed._keeper is not None
    bed._keeper.send_signal(signal.SIGTERM)
    bed.close()
    assert bed._keeper.returncode == 0


def test_a_testbed_that_is_coming_up_is_not_forgotten(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who lists testbeds while one writes its file does not take that one for dead and remove the file: keeper and hosts would
    stay, and no command would know of them."""
    monkeypatch.setattr(kept, "STATE_DIRECTORY", tmp_path)
    state = {"keeper": os.getpid(), "started": system.start_time(os.getpid())}
    found = []
    reader = threading.Thread(target=lambda: found.append(kept.read_states()))
    write = json.dump

    def write_late(*given: Any) -> None:
        reader.start()
        reader.join(0.5)  # it waits for the end of the writing
        write(*given)

    with monkeypatch.context() as patch:
        patch.setattr(json, "dump", write_late)
        kept.write_state("new", state)
    reader.join(30)
    assert found == [{"new": state}] and kept.read_states() == {"new": state}
    with pytest.raises(FileExistsError):
        kept.write_state("new", state)


def test_a_rank_that_fails_decides_the_exit_code() -> None:
    """The command exits as the rank did, or with 128 + signal, and names the rank."""
    program = "import os, sys; sys.exit(9 if os.environ['RANK'] == '1' else 0)"
    assert "rank 1 was the first to fail: exit code 9" in invoke("run", "-n", "2", "--", *python(program), code=9)
    # A real-time signal has no name.
    assert "killed by signal 40" in invoke("run", "-n", "2", "--", "sh", "-c", "kill -40 $$", code=128 + 40)
    program = "import os, signal; os.environ['RANK'] == '1' and os.kill(os.getpid(), signal.SIGKILL)"
    assert "killed by SIGKILL" in invoke("run", "-n", "2", "--", *python(program), code=137)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--flow", "60,x"], "--flow 60,x: give Mbit/s, such as 200 or 60,300"),
        (["--loss-at", "h0=much"], "--loss-at h0=much: give LINK=SHARE"),
        (["--rate-at", "h0=much"], "--rate-at h0=much: give LINK=MBIT"),
        (
            ["--name", "lab", "--rate", "100"],
            "--rate describes a testbed to be made, and --name lab takes one that is up",
        ),
        (["--name", "lab", "--no-offloads"], "--offloads describes a testbed to be made"),
        (["--name", "lab", "--hosts", "2"], "--hosts describes a testbed to be made"),  # though it is the default
        (["--flow", "2000"], "up to rate_mbit"),
        (["--loss", "2"], "0 <= loss < 1"),
        (["--hosts", "0"], "'--hosts'"),
        (["--name", "no-such", "--"], "no testbed 'no-such'"),
    ],
)
def test_wrong_options_say_what_is_wrong(options: list[str], message: str) -> None:
    result = CliRunner().invoke(cli.command, ["run", *options, "true"])
    assert result.exit_code != 0 and message in result.output


def test_without_root_the_ranks_run_on_loopback_and_the_command_says_so() -> None:
    """A process in a fresh user namespace is nobody: no testbed, a message that names the right, and a run that works.

    Where user namespaces are not allowed, an ordinary user is needed to run this test.
    """
    program = f"""
import ctypes, os, sys
if os.geteuid() == 0 and ctypes.CDLL(None).unshare(0x10000000) != 0:
    sys.exit(77)
from penstock.tools.testbed import Testbed, TestbedUnavailable, command
try:
    Testbed()
except TestbedUnavailable as error:
    print("UNAVAILABLE", error)
command(["run", "-n", "2", "--"] + {python(SHOW_ENVIRONMENT)!r})
"""
    done = subprocess.run(python(program), capture_output=True, text=True, timeout=60)
    if done.returncode == 77:
        pytest.skip("user namespaces are not allowed here, and this is root")
    assert done.returncode == 0, done.stderr
    assert "UNAVAILABLE making network namespaces needs root" in done.stdout
    assert "The ranks run on loopback instead" in done.stderr
    assert "[0] 0 2 0 1 0 127.0.0.1 lo\n" in done.stdout and "[1] 1 2 0 1 1 127.0.0.1 lo\n" in done.stdout


@needs_namespaces
def test_a_missing_tool_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Only what the link needs is asked for: no loss, no nft. A dropped link asks for it when it is dropped."""
    for tool in ("ip", "tc"):
        (tmp_path / tool).symlink_to(system.find_tool(tool))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(system, "SYSTEM_DIRECTORIES", [])
    with pytest.raises(TestbedUnavailable, match=r"`nft` is missing: install nftables"):
        Testbed(link=LinkSpec(loss=0.1))
    with Testbed() as bed, pytest.raises(TestbedUnavailable, match="nft"):
        bed.drop_link(0)
    (tmp_path / "tc").unlink()
    with pytest.raises(TestbedUnavailable, match="`tc` is missing: install iproute2"):
        Testbed()


@needs_namespaces
def test_a_missing_right_is_named() -> None:
    """Root without CAP_SYS_ADMIN, as in most containers."""
    program = """
import ctypes
from penstock.tools.testbed import Testbed, TestbedUnavailable
libc = ctypes.CDLL(None, use_errno=True)
header = (ctypes.c_uint32 * 2)(0x20080522, 0)
data = (ctypes.c_uint32 * 6)()
assert libc.capset(header, data) == 0
try:
    Testbed()
except TestbedUnavailable as error:
    print(error)
"""
    done = subprocess.run(python(program), capture_output=True, text=True, timeout=60)
    assert "CAP_SYS_ADMIN" in done.stdout, done.stdout + done.stderr


def test_loopback_has_the_face_of_a_testbed() -> None:
    """Programs that fall back to it need no second path."""
    with Loopback(hosts=2) as bed:
        done = bed.run(python(SHOW_ENVIRONMENT), ranks=2)
        assert done.outputs == ["0 2 0 1 0 127.0.0.1 lo\n", "1 2 0 1 1 127.0.0.1 lo\n"]
        assert done.flows == {0: [], 1: []} and set(done.counters) == {0, 1}
        process = bed.popen(0, ["sleep", "1000"])
    assert process.wait(timeout=10) == -signal.SIGKILL


# Helpers

PATIENCE = """
import os, socket, threading, time
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)
def connect():
    streams = []
    def attempt():
        stream = socket.socket()
        streams.append(stream)
        return stream.connect_ex(address) == 0
    wait_until(attempt)
    return streams[-1]
"""
"""The beginning of a rank's program: conditions that no event announces, each with a deadline."""


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def script(folder: pathlib.Path, program: str) -> list[str]:
    (folder / "script.py").write_text(program)
    return [sys.executable, str(folder / "script.py")]


def penstock(*arguments: str) -> list[str]:
    return [*python("from penstock.tools.testbed import command; command()"), *arguments]


def invoke(*arguments: str, code: int = 0) -> str:
    """Run the command in a process of its own and return all that it prints."""
    done = subprocess.run(penstock(*arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
    assert done.returncode == code, done.stdout
    return done.stdout


def listen(bed: Testbed, host: int, family: int = 4) -> socket.socket:
    kind = socket.AF_INET if family == 4 else socket.AF_INET6
    server = bed.inside(host, lambda: socket.create_server((bed.address(host, family), 0), family=kind))
    server.settimeout(20)
    return server


def connect(bed: Testbed, host: int, other: int, server: socket.socket, family: int = 4) -> socket.socket:
    address = bed.address(other, family), server.getsockname()[1]
    return bed.inside(host, lambda: socket.create_connection(address, timeout=20))


def datagram(bed: Testbed, host: int) -> socket.socket:
    udp = bed.inside(host, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    udp.bind((bed.address(host), 0))
    udp.settimeout(20)
    udp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
    return udp


def transfer(sender: socket.socket, receiver: socket.socket, payload: bytes) -> None:
    """Send it all, and see it arrive."""
    thread = threading.Thread(target=sender.sendall, args=(payload,))
    thread.start()
    receiver.settimeout(20)
    arrived = bytearray()
    while len(arrived) < len(payload):
        chunk = receiver.recv(1 << 20)
        assert chunk, "the connection ended early"
        arrived += chunk
    thread.join()
    assert arrived == payload


def tcp_round_trip_us(connection: socket.socket) -> int:
    """tcpi_rtt of linux/tcp.h: what the kernel measured."""
    information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 72)
    return int.from_bytes(information[68:72], sys.byteorder)


def alive(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def holders(namespaces: set[int], known_s: float = math.inf) -> list[str]:
    """Who keeps one of these network namespaces alive: processes in it, and open descriptors of it. They were there at `known_s`:
    a descriptor of a younger one is that of another test's testbed, which has got a number that was free again."""
    found = []
    targets = {f"net:[{each}]" for each in namespaces}
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            links = [process / "ns/net", *(process / "fd").iterdir()]
        except OSError:
            continue
        for each in links:
            with contextlib.suppress(OSError):
                if os.readlink(each) in targets and (each.name == "net" or each.stat().st_ctime < known_s):
                    found.append(str(each))
    return found
