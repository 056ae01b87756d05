"""Testbeds with several ways through them: which way is taken, by default and after a deployment has named others."""

from __future__ import annotations

import json
import os
import pathlib
import re
import socket
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from penstock.cli import main
from penstock.cluster import file, generate
from penstock.cluster.network import Cluster
from penstock.planning.deploy import deployment
from penstock.planning.scheme import Scheme
from penstock.tools.bench import carried
from penstock.tools.testbed import LinkSpec, Testbed, system
from penstock.tools.testbed.routing import Flow, ambiguous, flow_rules, flows_of
from penstock.tools.testbed.wiring import Wiring
from test_testbed_cluster import datagram, invoke

REASON = system.unavailable(LinkSpec(loss=0.1))
needs_namespaces = pytest.mark.skipif(REASON is not None, reason=f"no testbed here: {REASON}")

DATAGRAMS, PAYLOAD_BYTES = 50, 1000
FRAMES_BYTES = DATAGRAMS * (PAYLOAD_BYTES + 42)
NOISE_BYTES = 5_000

OTHER_WAY = ("h0", "leaf0-spine1", "leaf1-spine1", "h3")


def two_leaves() -> Cluster:
    return generate.leaf_spine(2, 2, 3, servers=2, rate_bit_s=100_000_000, mtu=9000)


@pytest.fixture(scope="module")
def bed() -> Iterator[Testbed]:
    with Testbed(cluster=two_leaves(), offloads=False) as bed:
        yield bed


def flow(bed: Testbed, **more: int) -> Flow:
    return Flow(bed.address("h0"), bed.address("h3"), OTHER_WAY, ("h0", "leaf0", "spine1", "leaf1", "h3"), **more)


def crossed(bed: Testbed, source: socket.socket, sink: socket.socket) -> set[str]:
    """The links between switches that datagrams cross, there and back."""
    before = bed.links()
    for start, end in ((source, sink), (sink, source)):
        for _ in range(DATAGRAMS):
            start.sendto(bytes(PAYLOAD_BYTES), end.getsockname())
        for _ in range(DATAGRAMS):
            assert len(end.recv(2 * PAYLOAD_BYTES)) == PAYLOAD_BYTES
    found = set()
    for now, then in zip(bed.links(), before, strict=True):
        each = now.since(then)
        for counted in (each.up_bytes, each.down_bytes):
            times = round(counted / FRAMES_BYTES)
            assert abs(counted - times * FRAMES_BYTES) < NOISE_BYTES and times < 2, (now.name, each)
        if "spine" in each.name and max(each.up_bytes, each.down_bytes) > NOISE_BYTES:
            assert min(each.up_bytes, each.down_bytes) > FRAMES_BYTES - NOISE_BYTES, each
            found.add(each.name)
    return found


FIRST = {"leaf0-spine0", "leaf1-spine0"}
OTHER = {"leaf0-spine1", "leaf1-spine1"}


@needs_namespaces
@pytest.mark.parametrize("family", [4, 6])
def test_without_routes_all_take_the_first_shortest_way(bed: Testbed, family: int) -> None:
    """IPv4 and IPv6, there and back; every byte is counted once on each link of the way and on no other."""
    bed.route([])
    kinds = socket.AF_INET if family == 4 else socket.AF_INET6
    ends = []
    for node in ("h0", "h3"):
        udp = bed.inside(node, lambda: socket.socket(kinds, socket.SOCK_DGRAM))
        udp.bind((bed.address(node, family), 0))
        udp.settimeout(20)
        ends.append(udp)
    with ends[0], ends[1]:
        assert crossed(bed, *ends) == FIRST


@needs_namespaces
def test_a_flow_takes_its_route_and_others_do_not(bed: Testbed) -> None:
    """By the pair of hosts, or by one port of one of two flows between them; until it is taken back."""
    with datagram(bed, "h0") as source, datagram(bed, "h0") as second, datagram(bed, "h3") as sink:
        bed.route([flow(bed)])
        assert crossed(bed, source, sink) == OTHER
        with datagram(bed, "h1") as beside:
            assert crossed(bed, beside, sink) == FIRST
        bed.route([flow(bed, start_port=source.getsockname()[1])])
        assert crossed(bed, source, sink) == OTHER and crossed(bed, second, sink) == FIRST
        bed.route([flow(bed, end_port=sink.getsockname()[1])])
        assert crossed(bed, source, sink) == crossed(bed, second, sink) == OTHER
        bed.route([])
        assert crossed(bed, source, sink) == FIRST


@needs_namespaces
def test_a_cut_link_is_cut_where_switches_route(bed: Testbed) -> None:
    """What goes another way arrives, what went over the link does not."""
    with datagram(bed, "h0") as source, datagram(bed, "h3") as sink:
        bed.route([])
        bed.drop_link("leaf0-spine0")
        try:
            sink.settimeout(0.2)
            source.sendto(b"lost", sink.getsockname())
            with pytest.raises(TimeoutError):
                sink.recv(100)
            bed.route([flow(bed)])
            sink.settimeout(20)
            source.sendto(b"arrives", sink.getsockname())
            assert sink.recv(100) == b"arrives"
        finally:
            bed.restore_link("leaf0-spine0")


def test_only_what_several_ways_make_ambiguous_needs_ports() -> None:
    """Two servers' flows between the same hosts on two ways need ports of the job's ranks; all others the hosts' addresses."""
    cluster = two_leaves()
    (job,) = cluster.jobs
    ways = {
        "s0": {0: ("h0", "leaf0-spine0", "leaf1-spine0", "a1")},
        "s1": {0: ("h0", "leaf0-spine1", "leaf1-spine1", "a1")},
    }
    scheme = Scheme({"s0": 0.5, "s1": 0.5}, dict.fromkeys(("s0", "s1"), ("a1",) * 6), routes=ways)
    assert ambiguous(cluster, job, scheme) == {("h0", "a1")}
    wiring = Wiring(cluster)
    ports = {(server, 0): [port] for server, port in (("s0", 40001), ("s1", 40002))}
    found = flows_of(wiring, job, scheme, ports)
    assert {(flow.start_port, flow.links[1]) for flow in found if flow.start_port} == {
        (40001, "leaf0-spine0"),
        (40002, "leaf0-spine1"),
    }
    # Six workers, the aggregator to two servers, and the two with ports.
    assert len(found) == 6 + 2 + 2 and len(flows_of(wiring, job, scheme)) == 6 + 2
    rules = flow_rules(wiring, "leaf0", found)
    assert "10.77.0.1 . 40002 . 10.77.1.2 : 7" in rules and "10.77.1.2 . 10.77.0.1 . 40002 : 1" in rules, rules


@needs_namespaces
def test_a_deployments_routes_are_a_command(tmp_path: pathlib.Path) -> None:
    """`testbed route` sets what the deployment names, and says what it cannot: another cluster's links, a tree, no testbed."""
    cluster = two_leaves()
    options = ["--hosts", "6", "--racks", "2", "--servers", "2", "--spines", "2", "--rate", "100", "--mtu", "9000"]
    invoke("write", str(tmp_path / "cluster.yaml"), *options)
    assert file.load(str(tmp_path / "cluster.yaml")) == cluster
    ways = {"s0": {"a1": ("a1", "leaf1-spine1", "leaf0-spine1", "s0")}}
    scheme = Scheme({"s0": 1.0}, {"s0": ("a0",) * 3 + ("a1",) * 3}, routes=ways)
    path = tmp_path / "deployment.yaml"
    path.write_text(deployment(cluster, cluster.jobs[0], scheme, "cluster.yaml"))
    name = f"routes-{os.getpid()}"
    invoke("up", "--name", name, "--cluster", str(tmp_path / "cluster.yaml"), "--no-offloads")
    try:
        assert "8 flows have their routes" in invoke("route", "--name", name, str(path))
        with (
            Testbed.attach(name) as bed,
            datagram(bed, "a1") as source,
            datagram(bed, "s0") as sink,
            datagram(bed, "h3") as other,
        ):
            assert crossed(bed, source, sink) == OTHER
            assert crossed(bed, other, sink) == FIRST
    finally:
        invoke("down", "--name", name)
    assert f"no testbed '{name}'" in invoke("route", "--name", name, str(path), code=1)
    with Testbed(hosts=2) as tree, pytest.raises(ValueError, match="one way leads from each node"):
        tree.route([])


@needs_namespaces
@pytest.mark.usefixtures("forks")
def test_deployments_run_on_a_testbed(tmp_path: pathlib.Path) -> None:
    """In small: every way's sums are right, go through the servers, and load the links that were planned; no link of those
    carries much more than its share of the whole, and a second spine is used."""
    path = tmp_path / "runs.json"
    small = ["--testbed", "--seconds", "1.5", "--mebibytes", "2", "--operations", "1", "--json", str(path)]
    said = CliRunner().invoke(main, ["bench", "plan", *small])
    assert said.exit_code == 0, said.output
    runs = [carried.Ran(**run) for run in json.loads(path.read_text())["runs"]]
    assert [(run.instance, run.way) for run in runs] == [
        (name, way) for name, (_, others) in carried.INSTANCES.items() for way in (carried.PLANNED, *others)
    ]
    planned = {run.instance: run for run in runs if run.way == carried.PLANNED}
    assert [round(run.planned_bit_s / 1e6) for run in planned.values()] == [50, 48, 48]
    for run in planned.values():
        # What is sent again makes a share larger, headers too: routes that are not taken would double or empty it.
        whole = sum(counted for _, counted in run.links.values()) / sum(load for load, _ in run.links.values())
        assert run.instance == "figure 1" or {"leaf0-spine0", "leaf0-spine1"} <= run.links.keys()
        for name, (load, counted) in run.links.items():
            assert 0.6 < counted / load / whole < 1.5, (name, run)
    assert re.search(r"unequal servers +planned +50\.0", said.output), said.output
    refused = CliRunner().invoke(main, ["bench", "plan", "--testbed", "--report", str(tmp_path / "page.html")])
    assert refused.exit_code == 2 and "leave --testbed out" in refused.output
