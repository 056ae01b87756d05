"""Racks with places for aggregators, a core with servers: what crosses which link, what is lost where, and its end."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import select
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from penstock.tools.testbed import LinkSpec, Testbed, TestbedUnavailable, Topology, cli, system
from penstock.tools.testbed.wiring import Wiring

REASON = system.unavailable(LinkSpec(loss=0.1))
needs_namespaces = pytest.mark.skipif(REASON is not None, reason=f"no testbed here: {REASON}")

DATAGRAMS = 100
PAYLOAD_BYTES = 1000
FRAMES_BYTES = DATAGRAMS * (PAYLOAD_BYTES + 14 + 20 + 8)
NOISE_BYTES = 20_000
"""What nodes say by themselves: IPv6 looks for routers and joins groups, and both go everywhere."""


# Names


def test_names_switches_and_addresses_follow_from_the_counts() -> None:
    """Hosts are dealt to racks in blocks; every node's address and hardware address are its own."""
    shape = Topology(hosts=5, racks=2, servers=2, core_aggregator=True)
    assert shape.nodes == ["h0", "h1", "h2", "h3", "h4", "a0", "a1", "a2", "s0", "s1"]
    assert shape.switches == ["r0", "r1", "core"]
    assert shape.links == {
        "h0": "r0",
        "h1": "r0",
        "h2": "r0",
        "h3": "r1",
        "h4": "r1",
        "a0": "r0",
        "a1": "r1",
        "a2": "core",
        "s0": "core",
        "s1": "core",
        "r0": "core",
        "r1": "core",
    }
    assert shape.address("h0") == shape.address(0) == "10.77.0.1"
    assert (shape.address("a2"), shape.address("s1", 6)) == ("10.77.1.3", "fd77::2:2")
    wiring = Wiring(shape.cluster(LinkSpec()))
    for each in (shape.address, lambda node: shape.address(node, 6), wiring.mac):
        assert len({each(node) for node in shape.nodes}) == len(shape.nodes)
    assert Topology(**shape.to_dict()) == shape


def test_without_racks_all_is_as_it_was() -> None:
    """One switch, the hosts' addresses, and nothing else."""
    shape = Topology(hosts=3)
    assert (shape.nodes, shape.switches) == (["h0", "h1", "h2"], ["core"])
    assert [shape.address(host) for host in range(3)] == ["10.77.0.1", "10.77.0.2", "10.77.0.3"]
    wiring = Wiring(shape.cluster(LinkSpec()))
    assert (shape.address(2, 6), wiring.mac(2), wiring.prefix(), wiring.prefix(6)) == (
        "fd77::3",
        "02:00:00:00:00:03",
        24,
        64,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hosts": 0}, "hosts=0"),
        ({"hosts": 65}, "hosts=65"),
        ({"hosts": 2, "racks": 3}, "racks=3"),
        ({"hosts": 2, "servers": 1}, "servers=1: only with racks"),
        ({"hosts": 2, "losses": {"h0": 0.1}}, "losses={'h0': 0.1}: only with racks"),
        ({"hosts": 2, "racks": 1, "rates": {"a1": 10}}, "no link a1, but h0, h1, a0, r0"),
        ({"hosts": 2, "racks": 1, "rates": {"a0": -1}}, "Mbit/s, or 0 for no limit"),
        ({"hosts": 2, "racks": 1, "losses": {"h2": 0.1}}, "no link h2, but h0, h1, a0, r0"),
        ({"hosts": 2, "racks": 1, "losses": {"h1": 1.0}}, "0 <= loss < 1"),
    ],
)
def test_a_topology_that_makes_no_sense_is_refused_by_name(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Topology(**arguments)  # type: ignore[arg-type]


# Links


@pytest.fixture(scope="module")
def bed() -> Iterator[Testbed]:
    link = LinkSpec(rate_mbit=100, mtu=9000, offloads=False)
    with Testbed(hosts=4, racks=2, servers=1, core_aggregator=True, uplink_mbit=200, link=link) as bed:
        yield bed


@needs_namespaces
@pytest.mark.parametrize(
    ("sender", "receiver", "up", "down"),
    [
        ("h0", "h1", {"h0"}, {"h1"}),
        ("h1", "a0", {"h1"}, {"a0"}),
        ("a0", "s0", {"a0", "r0"}, {"s0"}),
        ("h3", "h0", {"h3", "r1"}, {"r0", "h0"}),
        ("s0", "a1", {"s0"}, {"r1", "a1"}),
        ("a2", "s0", {"a2"}, {"s0"}),
    ],
)
def test_each_link_counts_what_crosses_it_and_no_other_does(
    bed: Testbed, sender: str, receiver: str, up: set[str], down: set[str]
) -> None:
    """From the first packet on: switches know their nodes and flood nothing."""
    with datagram(bed, sender) as source, datagram(bed, receiver) as sink:
        before = {each.name: each for each in bed.links()}
        for _ in range(DATAGRAMS):
            source.sendto(bytes(PAYLOAD_BYTES), sink.getsockname())
        for _ in range(DATAGRAMS):
            assert len(sink.recv(PAYLOAD_BYTES + 1)) == PAYLOAD_BYTES
        crossed = {each.name: each.since(before[each.name]) for each in bed.links()}
    for name, each in crossed.items():
        for direction, counted in ((up, each.up_bytes), (down, each.down_bytes)):
            expected = FRAMES_BYTES if name in direction else 0
            assert expected <= counted <= expected + NOISE_BYTES, (name, each)
        assert each.dropped == 0


@needs_namespaces
def test_a_rate_of_a_nodes_link_holds_in_both_directions() -> None:
    with Testbed(hosts=1, racks=1, rates={"a0": 40, "h0": 0}, link=LinkSpec(rate_mbit=100)) as bed:
        for node, rates in (("a0", ["40Mbit"] * 2), ("h0", [])):
            with bed.popen(node, ["tc", "class", "show", "dev", "eth0"], stdout=subprocess.PIPE, text=True) as shown:
                assert re.findall(r" rate (\w+) ", shown.communicate()[0]) == rates, node


@needs_namespaces
def test_what_a_full_queue_drops_is_counted_at_its_link() -> None:
    """2 MB for a link of 100 kbit/s whose buffer holds 256 KiB: far most is dropped there, nothing elsewhere.

    A socket accounts for its packets until they leave the last queue, so with a small buffer sends would wait instead.
    """
    with Testbed(hosts=2, racks=2, uplink_mbit=0.1, link=LinkSpec(offloads=False)) as bed:
        with datagram(bed, "h0") as source, datagram(bed, "h1") as sink:
            source.setsockopt(socket.SOL_SOCKET, 32, 1 << 24)  # SO_SNDBUFFORCE
            for _ in range(2000):
                source.sendto(bytes(PAYLOAD_BYTES), sink.getsockname())
            dropped = {each.name: each.dropped for each in bed.links()}
        assert dropped.pop("r0") >= 1000
        assert set(dropped.values()) == {0}


@needs_namespaces
def test_every_link_has_its_rate_at_both_ends(bed: Testbed) -> None:
    """What the kernel has, of hosts, places of aggregators and servers, and between switches."""
    for name, upper in bed.topology.links.items():
        rate = "200Mbit" if name.startswith("r") else "100Mbit"
        for held, device in (bed._lower_end(name), (bed._held(upper), name)):
            shown = bed._tool(held, ["tc", "class", "show", "dev", device])
            assert set(re.findall(r"ceil (\w+)", shown)) == {rate}, (name, device)


@needs_namespaces
def test_large_packets_cross_all_switches(bed: Testbed) -> None:
    """A datagram that fills the MTU of 9000 arrives whole in the other rack; one byte more is refused by the sender."""
    with datagram(bed, "h0") as here, datagram(bed, "h3") as there:
        here.setsockopt(socket.IPPROTO_IP, 10, 2)  # IP_MTU_DISCOVER, IP_PMTUDISC_DO: never fragment
        here.sendto(bytes(9000 - 28), there.getsockname())
        assert there.recv(10_000) == bytes(9000 - 28)
        with pytest.raises(OSError, match="Message too long"):
            here.sendto(bytes(9000 - 27), there.getsockname())


@needs_namespaces
@pytest.mark.parametrize("racks", [0, 1])
def test_without_offloads_udp_that_is_to_be_cut_crosses_in_packets(racks: int) -> None:
    """40 datagrams in one call with UDP_SEGMENT are 40 packets on the link, each with its headers; with offloads, one."""
    for offloads, packets in ((False, 40), (True, 1)):
        link = LinkSpec(rate_mbit=1000, offloads=offloads)
        with Testbed(hosts=2, racks=racks, link=link) as bed, datagram(bed, 0) as here, datagram(bed, 1) as there:
            here.setsockopt(socket.IPPROTO_UDP, 103, 1400)  # UDP_SEGMENT
            before = bed.links()[0]
            here.sendto(bytes(40 * 1400), there.getsockname())
            for _ in range(40):
                assert len(there.recv(2000)) == 1400
            crossed = bed.links()[0].since(before)
            headers = 42 * packets
            assert 40 * 1400 + headers <= crossed.up_bytes <= 40 * 1400 + headers + NOISE_BYTES
            assert packets <= crossed.up_packets <= packets + 20


@needs_namespaces
def test_a_cut_link_takes_away_what_is_behind_it_and_nothing_else(bed: Testbed) -> None:
    """A rack without its link to the core still works inside; no send fails; afterwards all is as before."""
    with contextlib.ExitStack() as stack:
        sockets = {node: stack.enter_context(datagram(bed, node)) for node in ("h0", "a0", "h2", "s0")}

        def send(text: bytes, sender: str, receiver: str) -> None:
            sockets[sender].sendto(text, sockets[receiver].getsockname())

        bed.drop_link("r0")
        send(b"lost", "h0", "s0")
        send(b"lost", "s0", "h0")
        send(b"lost", "h2", "a0")
        send(b"in the rack", "h0", "a0")
        send(b"beyond", "h2", "s0")
        assert sockets["a0"].recv(20) == b"in the rack"
        assert sockets["s0"].recv(20) == b"beyond"
        bed.restore_link("r0")
        send(b"found", "s0", "h0")
        send(b"found", "h0", "s0")
        assert sockets["h0"].recv(20) == b"found" and sockets["s0"].recv(20) == b"found"
        bed.drop_link("a0")
        send(b"lost", "h0", "a0")
        send(b"past the aggregator", "h0", "s0")
        assert sockets["s0"].recv(20) == b"past the aggregator"
        bed.restore_link("a0")
        send(b"found", "h0", "a0")
        assert sockets["a0"].recv(20) == b"found"
        with pytest.raises(ValueError, match="no link a9, but h0"):
            bed.drop_link("a9")


@needs_namespaces
def test_loss_is_that_of_the_links_on_the_path() -> None:
    """Of 2000 datagrams over a link that loses 30 %, 1400 +- 20 arrive in either direction, 8 standard deviations
    allowed; over others, all. The counters show what crossed, lost or not. A link's loss can be changed."""
    link = LinkSpec(rate_mbit=1000)
    with Testbed(hosts=2, racks=2, servers=1, losses={"r1": 0.3}, link=link) as bed:
        assert not bed.link.uses_offloads
        with datagram(bed, "h0") as clean, datagram(bed, "h1") as behind, datagram(bed, "s0") as server:
            assert arrived(clean, server) == 2000
            before = bed.links()
            for sender, receiver in ((behind, server), (server, behind)):
                assert 1236 <= arrived(sender, receiver) <= 1564
            [uplink] = [now.since(then) for now, then in zip(bed.links(), before, strict=True) if now.name == "r1"]
            assert uplink.up_packets >= 2000 and uplink.down_packets >= 2000
            bed.set_loss("r1", 0)
            assert arrived(behind, server) == 2000
            bed.set_loss("h0", 0.3)
            assert 1236 <= arrived(clean, server) <= 1564


def arrived(sender: socket.socket, receiver: socket.socket) -> int:
    """How many of 2000 datagrams arrive. The last one is sent until one of its kind does: it came after all others."""
    for _ in range(2000):
        sender.sendto(b"?", receiver.getsockname())
    receiver.settimeout(0.2)
    count = 0
    while True:
        try:
            data = receiver.recv(10)
        except TimeoutError:
            sender.sendto(b"!", receiver.getsockname())
            continue
        if data == b"!":
            return count
        count += data == b"?"


@needs_namespaces
def test_a_delay_with_racks_needs_netem(monkeypatch: pytest.MonkeyPatch) -> None:
    """The relay that stands in for it elsewhere knows one switch only: that is said, and nothing is left."""
    monkeypatch.setattr(Testbed, "_kernel_has_netem", lambda self: False)
    with pytest.raises(TestbedUnavailable, match="a delay with several switches needs netem"):
        Testbed(hosts=2, racks=1, link=LinkSpec(delay_ms=1))


# Processes


SHOW_ENVIRONMENT = """
import os
print(*[os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "MASTER_ADDR")])
"""


@needs_namespaces
def test_ranks_run_on_the_nodes_that_are_named(bed: Testbed) -> None:
    """The first node is the master's; the run tells what crossed the links meanwhile."""
    done = bed.run(python(SHOW_ENVIRONMENT), ranks=3, on=["s0", "a0"])
    assert done.outputs == ["0 3 0 0 10.77.2.1\n", "1 3 1 0 10.77.2.1\n", "2 3 0 1 10.77.2.1\n"]
    program = """
import os, socket
address = os.environ["MASTER_ADDR"], 4000
if os.environ["RANK"] == "0":
    with socket.create_server(address) as server:
        stream = server.accept()[0]
        while stream.recv(1 << 16): pass
else:
    stream = socket.socket()
    while stream.connect_ex(address): stream = socket.socket()
    stream.sendall(bytes(1_000_000))
"""
    done = bed.run(python(program), ranks=2, on=["s0", "h0"], timeout_s=60)
    assert done.returncode == 0, done.outputs
    links = {each.name: each for each in done.links}
    for counted in (links["h0"].up_bytes, links["r0"].up_bytes, links["s0"].down_bytes):
        assert 1_000_000 <= counted <= 1_100_000
    for counted in (links["r1"].up_bytes, links["h2"].up_bytes, links["a0"].down_bytes):
        assert counted <= NOISE_BYTES
    with pytest.raises(ValueError, match="no node a7, but h0"):
        bed.run(["true"], ranks=1, on=["a7"])


@needs_namespaces
def test_a_killed_maker_leaves_nothing_of_a_tree() -> None:
    """SIGKILL to the process that made it: a daemon on an aggregator's place dies, and nobody holds a namespace."""
    program = """
import os, subprocess, sys
from penstock.tools.testbed import Testbed
bed = Testbed(hosts=2, racks=2, servers=1, losses={"h0": 0.5})
shell = bed.popen("a1", ["sh", "-c", "setsid sleep 1000 & echo $!; exec sleep 1000"], stdout=subprocess.PIPE)
print(shell.pid, int(shell.stdout.readline()), *[os.fstat(fd).st_ino for fd in bed._namespaces])
sys.stdout.flush()
sys.stdin.read()
"""
    with subprocess.Popen(python(program), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None
        shell, daemon, *namespaces = map(int, maker.stdout.readline().split())
        assert len(namespaces) == 5 + 3 and holders(set(namespaces))
        handles = [os.pidfd_open(each) for each in (shell, daemon)]
        maker.kill()
    for handle in handles:
        assert select.select([handle], [], [], 20)[0], "still alive"
        os.close(handle)
    keepers = [os.pidfd_open(each) for each in {int(path.split("/")[2]) for path in holders(set(namespaces))}]
    for each in keepers:
        assert select.select([each], [], [], 20)[0], "the keeper is still alive"
        os.close(each)
    assert holders(set(namespaces)) == []


# The command


@needs_namespaces
def test_the_command_makes_a_tree_runs_on_its_nodes_and_prints_its_links() -> None:
    """up, show, run --on, links, links --json, down."""
    name = f"racks-{os.getpid()}"
    options = ["--hosts", "4", "--racks", "2", "--servers", "1", "--rate", "100", "--uplink-rate", "50"]
    up = invoke("up", "--name", name, *options, "--rate-at", "a0=400", "--loss-at", "h1=0.25", "--mtu", "9000")
    try:
        assert "a1  10.77.1.2  fd77::1:2  on r1" in up and "r0  to core" in up
        assert up in invoke("show", "--name", name)
        output = invoke("run", "--name", name, "--on", "a0,s0", "--", *python(SHOW_ENVIRONMENT))
        assert "[0] 0 2 0 0 10.77.1.1\n" in output and "[1] 1 2 0 1 10.77.1.1\n" in output
        assert "no node s1" in invoke("run", "--name", name, "--on", "s1", "--", "true", code=1)
        table = invoke("links", "--name", name)
        assert re.search(r"a0 +│ r0 +│ 400 ", table)
        assert re.search(r"h1 +│ r0 +│ 100 +│ 25\.000%", table) and re.search(r"r1 +│ core +│ 50 ", table)
        lines = [json.loads(line) for line in invoke("links", "--name", name, "--json").splitlines()]
        assert [each["name"] for each in lines] == ["h0", "h1", "h2", "h3", "a0", "a1", "s0", "r0", "r1"]
        assert all(each["up_bytes"] >= 0 and each["dropped"] == 0 for each in lines)
    finally:
        invoke("down", "--name", name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--racks", "3"], "racks=3"),
        (["--servers", "1"], "only with racks"),
        (["--racks", "1", "--loss-at", "h1"], "give LINK=SHARE, such as h1=0.05"),
        (["--racks", "1", "--loss-at", "x=0.1"], "there is no link x"),
    ],
)
def test_wrong_options_say_what_is_wrong(options: list[str], message: str) -> None:
    result = CliRunner().invoke(cli.command, ["up", *options])
    assert result.exit_code != 0 and message in result.output


# Helpers


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def invoke(*arguments: str, code: int = 0) -> str:
    """Run the command in a process of its own and return all that it prints."""
    command = [*python("from penstock.tools.testbed import command; command()"), *arguments]
    environment = {**os.environ, "COLUMNS": "120"}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, env=environment
    )
    assert done.returncode == code, done.stdout
    return done.stdout


def datagram(bed: Testbed, node: int | str) -> socket.socket:
    udp = bed.inside(node, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    assert isinstance(udp, socket.socket)
    udp.bind((bed.address(node), 0))
    udp.settimeout(20)
    udp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
    return udp


def holders(namespaces: set[int]) -> list[str]:
    """Who keeps one of these network namespaces alive: processes in it, and open descriptors of it."""
    found = []
    targets = {f"net:[{each}]" for each in namespaces}
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            links = [process / "ns/net", *(process / "fd").iterdir()]
        except OSError:
            continue
        for each in links:
            with contextlib.suppress(OSError):
                if os.readlink(each) in targets:
                    found.append(str(each))
    return found


@needs_namespaces
def test_the_five_commands_of_the_page() -> None:
    """docs/guide/aggregated.md, "From nothing to DDP over two aggregators", as it stands but for its length and the name: the
    training goes through the server, and a rack's link carries little more than one of its two workers'."""
    root = pathlib.Path(__file__).parent.parent
    page = (root / "docs" / "guide" / "aggregated.md").read_text()
    section = page.split("## From nothing to DDP", 1)[1].split("\n## ", 1)[0]
    commands = section.split("```sh\n", 1)[1].split("```", 1)[0]
    name = f"page{os.getpid()}"
    assert commands.count("--name lab") == 5 and "--steps 20" in commands
    commands = commands.replace("--name lab", f"--name {name}").replace("--steps 20", "--steps 3 --eval-batches 2")
    # Daemons in the background would keep the output open where the fourth fails.
    commands = f"trap 'penstock testbed down --name {name} >/dev/null 2>&1' ERR\n{commands}"
    environment = {**os.environ, "PATH": f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-ec", commands], cwd=root, env=environment, capture_output=True, text=True, timeout=200
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "go through server 10.77.2.1:7471" in said, said
    up = {name: float(match[1]) for name in ("h0", "r0") if (match := re.search(LINK.format(name), said))}
    assert 0 < up["h0"] < 1.5 * up["r0"] and up["r0"] < 1.5 * up["h0"], said


LINK = r"│ {} +│[^│]*│[^│]*│[^│]*│ +([0-9.]+) "
"""A line of the table of links: what went up, in MB."""
