"""Testbeds from cluster files: what they make of one, what they refuse and where; options are another way to write one."""

from __future__ import annotations

import os
import pathlib
import re
import socket
import subprocess
import sys

import pytest
from click.testing import CliRunner

from penstock.cluster import deployment, file, generate
from penstock.errors import Config as ConfigError
from penstock.tools.testbed import LinkSpec, Testbed, Topology, cli, system
from penstock.tools.testbed.wiring import Wiring

REASON = system.unavailable(LinkSpec(loss=0.1))
needs_namespaces = pytest.mark.skipif(REASON is not None, reason=f"no testbed here: {REASON}")

# Three levels of switches, links with names of their own and without, a daemon's host between the others, no addresses.
TREE = """\
version: 1
hosts: {left: , agg: , right: , store: }
switches: {rack-a: , rack-b: , row: , core: }
defaults: {links: {rate: 100 Mbit/s, mtu: 9000}}
links:
  - {between: [left, rack-a], flow_cap: 20 Mbit/s}
  - {between: [rack-a, agg], rate: unlimited}
  - {between: [rack-b, right], queue: 64 KiB, rate: 50 Mbit/s}
  - {between: [row, rack-a], name: up-a}
  - {between: [rack-b, row]}
  - {between: [row, core], name: trunk, rate: 200 Mbit/s}
  - {between: [store, core]}
aggregators: {a0: {at: agg}}
servers: {s0: {at: store}}
"""


def test_a_tree_of_any_depth_is_wired_from_its_last_switch() -> None:
    """Hosts with daemons come last; each link's lower end, and the device that leads to each node."""
    wiring = Wiring(file.parse(TREE, "tree.yaml"))
    assert wiring.nodes == ["left", "right", "agg", "store"] and wiring.hosts == 2
    assert wiring.links == {
        "left-rack-a": "rack-a",
        "rack-a-agg": "rack-a",
        "rack-b-right": "rack-b",
        "up-a": "row",
        "rack-b-row": "row",
        "trunk": "core",
        "store-core": "core",
    }
    assert (wiring.lower["up-a"], wiring.lower["trunk"], wiring.lower["rack-a-agg"]) == ("rack-a", "row", "agg")
    assert [wiring.port_towards(switch, "left") for switch in wiring.switches] == [
        "left-rack-a",
        "uplink",
        "up-a",
        "trunk",
    ]
    assert [wiring.port_towards(switch, "store") for switch in wiring.switches] == ["uplink"] * 3 + ["store-core"]
    assert [wiring.address(node) for node in wiring.nodes] == ["10.77.0.1", "10.77.0.2", "10.77.0.3", "10.77.0.4"]
    assert wiring.spec("left-rack-a").caps_mbit == [20.0] * 16 and wiring.spec("rack-b-right").buffer_bytes == 65_536
    assert wiring.link_name("left") == wiring.link_name(0) == "left-rack-a" and wiring.common is None


def test_devices_have_names_that_the_kernel_takes() -> None:
    """A link's name, unless it is too long, has other characters, or is taken."""
    text = TREE.replace("name: up-a", "name: uplink").replace("[left, rack-a]", '["left:eth0", rack-a]')
    wiring = Wiring(file.parse(text, "tree.yaml"))
    ports = [wiring.port(name) for name in wiring.links]
    assert ports == ["port.0", "rack-a-agg", "rack-b-right", "port.3", "rack-b-row", "trunk", "store-core"]
    assert all(len(port) <= 15 for port in ports)


@pytest.mark.parametrize(
    ("change", "place", "words"),
    [
        (("rate: unlimited", "mtu: 1500"), "7:5", "links[1]: its MTU is 1500, and that of link left-rack-a 9000"),
        (("right: ,", "right: {nics: {eth0: , eth1: }},"), "8:24", "links[2].between[1]: host right has the NICs"),
        (("[row, core], name: trunk", "[rack-a, rack-b]"), "2:40", "hosts.store: no way leads to it from rack-a"),
        (("servers:", "  #"), None, ""),
        (("[store, core]}", "[store, core], delay: 1 ms}"), "12:37", "links[6].delay: differs from that of link left-rack-a"),
        (("name: trunk, rate: 200 Mbit/s", "flow_cap: 1 Mbit/s"), "11:5", "links[5]: the testbed caps flows where hosts send"),
        (("rate: 50 Mbit/s", "rate: 1 bit/s"), "8:5", "links[2]: the testbed cannot make it: rate_mbit=1e-06: give 0.1"),
        (("queue: 64 KiB", "queue: 64 B"), "8:5", "links[2]: the testbed cannot make it: queue_bytes=64: give room for a packet"),
        (("{left: ,", "{left: {address: 10.0.0.1},"), "2:41", "hosts.agg: has no IPv4 address, and left has one"),
        (("store: }", "store: , back: }"), "2:48", "hosts.back: is at no link"),
    ],
)  # fmt: skip
def test_what_no_testbed_makes_is_refused_with_its_place(
    change: tuple[str, str], place: str | None, words: str
) -> None:
    """By the cluster or by the testbed, before anything is made."""
    text = TREE.replace(*change, 1)
    if place is None:
        Wiring(file.parse(text, "tree.yaml"))
        return
    with pytest.raises(ConfigError) as error:
        Wiring(file.parse(text, "tree.yaml"))
    assert words in str(error.value), error.value
    assert re.match(rf"tree\.yaml:{place}: ", str(error.value)), error.value


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (
            lambda: file.parse("version: 1\nhosts: {a: , b: }\n", "c.yaml"),
            "c.yaml:2:8: hosts: the testbed joins hosts by switches",
        ),
        (
            lambda: file.parse(
                "version: 1\nhosts: {a: , b: , c: }\nswitches: {s: }\nlinks:\n- {between: [a, b]}\n", "c.yaml"
            ),
            "hosts.c: is at no link",
        ),
        (lambda: generate.star(300), "there are 300: the testbed makes up to 254"),
        (
            lambda: file.parse(
                "version: 1\nhosts: {a: {nics: {x: , y: }}, b: }\nswitches: {s: }\n"
                'links: [{between: ["a:x", s]}, {between: [s, b]}]\n',
                "c.yaml",
            ),
            "c.yaml:2:12: hosts.a: has several NICs: the testbed gives a host one",
        ),
        (
            lambda: file.parse(
                "version: 1\nhosts: {a: {address: 10.0.0.1}, b: {address: 192.168.0.1}}\nswitches: {s: }\n"
                "links: [{between: [a, s]}, {between: [s, b]}]\n",
                "c.yaml",
            ),
            "c.yaml:2:8: hosts: the IPv4 addresses are in no common subnet",
        ),
        (
            lambda: file.parse(
                "version: 1\nhosts: {a: {address: 127.0.0.1}, b: {address: 127.0.0.2}}\nswitches: {s: }\n"
                "links: [{between: [a, s]}, {between: [s, b]}]\n",
                "c.yaml",
            ),
            "c.yaml:2:12: hosts.a: the address 127.0.0.1 is its own on every host",
        ),
    ],
)
def test_what_no_testbed_makes_is_refused(made: object, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        Wiring(made())  # type: ignore[operator]


def test_a_subnet_has_room_for_its_first_and_last_address() -> None:
    """An address with another meaning in the smallest subnet makes it larger."""
    text = "version: 1\nhosts: {a: {address: 10.0.0.1}, b: {address: 10.0.0.255}}\nswitches: {s: }\n"
    wiring = Wiring(file.parse(text + "links: [{between: [a, s]}, {between: [s, b]}]\n", "c.yaml"))
    assert wiring.prefix() == 23


def test_options_and_files_say_the_same() -> None:
    """The options' delay and loss are those between two hosts; a link has its part."""
    link = LinkSpec(rate_mbit=400, flow_mbit=[60, 100], delay_ms=3, loss=0.19, mtu=9000)
    made = Topology(hosts=3).cluster(link)
    assert {(each.delay_ns, each.loss) for each in made.links} == {(1_500_000, 0.1)}
    assert Wiring(file.parse(file.dump(made), "c.yaml")).common == LinkSpec(
        rate_mbit=400, flow_mbit=(60, 100), delay_ms=3, loss=0.19, mtu=9000
    )
    tree = Topology(hosts=2, racks=2, servers=1, uplink_mbit=0, rates={"a0": 0}, losses={"r1": 0.5}).cluster(link)
    assert (tree.link["r0"].rate_bit_s, tree.link["a0"].rate_bit_s, tree.link["a1"].rate_bit_s) == (
        None,
        None,
        400_000_000,
    )
    assert tree.link["r1"].loss == 0.5 and tree.link["r0"].loss == 0.19 and not tree.link["r0"].flow_caps_bit_s


@needs_namespaces
def test_a_file_becomes_hosts_and_links(tmp_path: pathlib.Path) -> None:
    """What the kernel has is what the file says, and what crosses the tree is counted on the links of its path only."""
    path = tmp_path / "tree.yaml"
    path.write_text(TREE)
    with Testbed(cluster=path, offloads=False) as bed:
        for name, upper in bed.topology.links.items():
            rates = []
            for held, device in (bed._lower_end(name), (bed._held(upper), bed.topology.port(name))):
                shown = bed._tool(held, ["tc", "class", "show", "dev", device])
                rates.append(
                    re.findall(r"classid? ?(?:htb )?1:1 .*?ceil (\w+)", shown)
                    or re.findall(r"htb 1:1 .*?ceil (\w+)", shown)
                )
            spec = bed.topology.spec(name)
            assert rates == [[f"{spec.rate_mbit:g}Mbit"] if spec.rate_mbit else []] * 2, name
        queue = bed._tool(bed._held("rack-b"), ["tc", "qdisc", "show", "dev", "rack-b-right"])
        assert "bfifo" in queue and re.search(r"limit (64Kb|65536b)", queue), queue
        caps = bed.inside(
            "left", lambda: subprocess.run(["tc", "class", "show", "dev", "eth0"], capture_output=True, text=True)
        )
        assert caps.stdout.count("ceil 20Mbit") == 16
        with datagram(bed, "left") as source, datagram(bed, "store") as sink:
            before = bed.links()
            for _ in range(100):
                source.sendto(bytes(1000), sink.getsockname())
            for _ in range(100):
                assert len(sink.recv(2000)) == 1000
        crossed = {now.name: now.since(then) for now, then in zip(bed.links(), before, strict=True)}
        noise = 20_000
        for name, each in crossed.items():
            up = 100 * 1042 if name in ("left-rack-a", "up-a", "trunk") else 0
            down = 100 * 1042 if name == "store-core" else 0
            assert up <= each.up_bytes <= up + noise and down <= each.down_bytes <= down + noise, each
        bed.drop_link("trunk")
        bed.set_loss("left", 0.5)
        assert file.dump(bed.topology.cluster).count("loss: 50 %") == 1


@needs_namespaces
def test_the_example_of_the_page_is_a_testbed_and_carries_its_deployment(tmp_path: pathlib.Path) -> None:
    """docs/reference/cluster-file.md and deployment.md, as they stand."""
    pages = pathlib.Path(__file__).parent.parent / "docs" / "reference"
    page, other = ((pages / name).read_text() for name in ("cluster-file.md", "deployment.md"))
    (tmp_path / "cluster.yaml").write_text(page.split("```yaml\n")[1].split("```")[0])
    found = deployment.parse(other.split("```yaml\n")[1].split("```")[0], "deployment.yaml", str(tmp_path))
    with Testbed(cluster=tmp_path / "cluster.yaml") as bed:
        assert bed.topology.nodes == ["h0", "h1", "h2", "h3", "a0", "a1", "s0"] and bed.hosts == 4
        assert found.servers[0].address == f"{bed.address('s0')}:7471"
        assert [each.address for each in found.servers[0].tree] == [
            f"{bed.address(node)}:7471" for node in ("a0", "a1")
        ]
        done = bed.run([sys.executable, "-c", "import os; print(os.environ['MASTER_ADDR'])"], ranks=4)
        assert done.outputs == ["10.77.0.1\n"] * 4
    with pytest.raises(ConfigError) as error:
        file.parse(
            (tmp_path / "cluster.yaml").read_text().replace("flow_cap: 200 Mbit/s", "rate: 1 Gbps"), "cluster.yaml"
        )
    assert str(error.value) in " ".join(page.split())


@needs_namespaces
def test_the_command_makes_what_it_has_written(tmp_path: pathlib.Path) -> None:
    """write from options, up from the file, write of what is up: the same file."""
    name, first, second = f"file-{os.getpid()}", tmp_path / "first.yaml", tmp_path / "second.yaml"
    options = [
        "--hosts",
        "4",
        "--racks",
        "2",
        "--servers",
        "1",
        "--rate",
        "100",
        "--uplink-rate",
        "50",
        "--loss-at",
        "h1=0.25",
    ]
    invoke("write", str(first), *options)
    up = invoke("up", "--name", name, "--cluster", str(first))
    try:
        assert "a1  10.77.1.2  fd77::1:2  on r1" in up and "r0  to core" in up
        invoke("write", str(second), "--name", name)
        assert first.read_text() == second.read_text()
        again = invoke("write", "-", "--name", name, "--rate", "3", code=2)
        assert "--rate describes a testbed to be made" in again
        program = "import os; print(os.environ['RANK'], os.environ['MASTER_ADDR'])"
        assert "[1] 1 10.77.1.1\n" in invoke(
            "run", "--name", name, "--on", "a0,s0", "--", sys.executable, "-c", program
        )
    finally:
        invoke("down", "--name", name)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["up", "--cluster", "PATH", "--rate", "100"],
            "describes the cluster, and so does --rate: leave out one of them",
        ),
        (["run", "--cluster", "PATH", "--hosts", "2", "true"], "describes the cluster, and so does --hosts"),
        (["up", "--cluster", "PATH"], "bad.yaml:2:14: hosts.h0: there is no key 'adres' here; did you mean 'address'?"),
        (["up", "--cluster", "nowhere.yaml"], "--cluster nowhere.yaml: the file cannot be read: No such file"),
        (["write", "-", "--spines", "2"], "spines=2: give a number of racks that divides the 2 hosts"),
        (["write", "-", "--cluster", "PATH", "--spines", "2"], "describes the cluster, and so does --spines"),
        (["write", "/proc/none/file"], "penstock testbed: "),
    ],
)
def test_wrong_calls_are_told_in_one_line(arguments: list[str], words: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("version: 1\nhosts: {h0: {adres: 10.0.0.1}}\n")
    result = CliRunner().invoke(cli.command, [str(path) if each == "PATH" else each for each in arguments])
    assert result.exit_code in (1, 2) and words in result.output, result.output
    assert "Traceback" not in result.output


def test_spines_take_the_place_of_a_core() -> None:
    """What is written is a leaf-spine network, which planners and simulators read, and whose switches route on a testbed. The
    end of a link that is nearer to hosts is the lower one."""
    written = CliRunner().invoke(
        cli.command, ["write", "-", "--hosts", "4", "--racks", "2", "--spines", "2", "--servers", "1"]
    )
    made = file.parse(written.output, "c.yaml")
    assert made == generate.leaf_spine(2, 2, 2, servers=1, rate_bit_s=10**9)
    wiring = Wiring(made)
    assert wiring.is_routed and not Wiring(generate.star(2)).is_routed
    assert {link: wiring.lower[link] for link in wiring.links if "spine" in link} == {
        f"leaf{leaf}-spine{spine}": f"leaf{leaf}" for leaf in (0, 1) for spine in (0, 1)
    }
    macs = [wiring.mac(node) for node in wiring.nodes]
    macs += [wiring.port_mac(link.name, end.node) for link in made.links for end in link.ends if end.nic is None]
    assert len(set(macs)) == len(macs)


def datagram(bed: Testbed, node: str) -> socket.socket:
    udp = bed.inside(node, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    assert isinstance(udp, socket.socket)
    udp.bind((bed.address(node), 0))
    udp.settimeout(20)
    udp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
    return udp


def invoke(*arguments: str, code: int = 0) -> str:
    """Run the command in a process of its own and return all that it prints."""
    command = [sys.executable, "-c", "from penstock.tools.testbed import command; command()", *arguments]
    environment = {**os.environ, "COLUMNS": "120"}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, env=environment
    )
    assert done.returncode == code, done.stdout
    return done.stdout
