"""Proves that `penstock doctor --links` finds the links that a testbed has, and writes what the planner takes."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest
from click.testing import CliRunner

import forked
from penstock.cli import main
from penstock.cluster import file
from penstock.errors import Config as ConfigError
from penstock.tools.doctor.links import Seen, cluster_of
from penstock.tools.testbed import LinkSpec, Testbed, system
from penstock.tools.testbed.bed import Loopback

REASON = system.unavailable(LinkSpec())
needs_namespaces = pytest.mark.skipif(REASON is not None, reason=f"no testbed here: {REASON}")

MBIT = 1_000_000


def seen(rates: dict[tuple[int, int], float], *, names: list[str], addresses: list[str]) -> list[Seen]:
    """Pairs' rates in Mbit/s of frames, by ranks."""
    payload = (1500 - 52) / (1500 + 14) / 8 * MBIT
    found = []
    for rank, (name, address) in enumerate(zip(names, addresses, strict=True)):
        own = {sum(pair) - rank: rate * payload for pair, rate in rates.items() if rank in pair}
        found.append(Seen(name, address, 1500, own, dict.fromkeys(own, 0.004)))
    return found


def test_a_star_and_racks_come_out_of_pairs() -> None:
    """A host's link carries its fastest pair; slower pairs show racks and what joins them."""
    addresses = [f"10.0.0.{host}" for host in range(1, 4)]
    star = seen({(0, 1): 100, (0, 2): 40, (1, 2): 40}, names=["a.x", "b.x", "c.x"], addresses=addresses)
    cluster, notes = cluster_of(star)
    assert {link.name: link.rate_bit_s for link in cluster.links} == {"a": 100 * MBIT, "b": 100 * MBIT, "c": 40 * MBIT}
    assert [switch.name for switch in cluster.switches] == ["net"] and cluster.jobs[0].workers == ("a", "b", "c")
    assert {link.delay_ns for link in cluster.links} == {1_000_000} and "no test of all hosts" in notes[0]

    addresses = [f"10.0.0.{host}" for host in range(1, 5)]
    pairs = {(a, b): 100.0 if (a < 2) == (b < 2) else 50.0 for a in range(4) for b in range(a + 1, 4)}
    racks, notes = cluster_of(
        seen(pairs, names=["same"] * 4, addresses=addresses), servers=[3], together=1.0, size=6_000_000
    )
    assert {link.name: link.rate_bit_s for link in racks.links if link.name.startswith("rack")} == {
        "rack0": 50 * MBIT,
        "rack1": 50 * MBIT,
    }
    assert [host.name for host in racks.hosts] == ["h0", "h1", "h2", "h3"] and not notes
    assert racks.servers[0].at == "h3" and racks.jobs[0].workers == ("h0", "h1", "h2")
    assert file.parse(file.dump(racks), "c.yaml") == racks
    _, notes = cluster_of(seen(pairs, names=["same"] * 4, addresses=addresses), together=3.0, size=6_000_000)
    assert "pairs share a link" in notes[0]


def test_ranks_of_a_host_are_workers_of_one_host() -> None:
    """Two ranks at one address; what no measurement can come from is refused."""
    two = seen({(0, 2): 10, (1, 2): 20}, names=["a", "a", "b"], addresses=["10.0.0.1", "10.0.0.1", "10.0.0.2"])
    cluster, _ = cluster_of(two)
    assert cluster.jobs[0].workers == ("a", "a", "b") and cluster.link["a"].rate_bit_s == 20 * MBIT
    with pytest.raises(ConfigError, match="all 2 ranks are on one host"):
        cluster_of(two[:2])
    with pytest.raises(ConfigError, match="rank 3 is none of 0 to 2"):
        cluster_of(two, servers=[3])
    with pytest.raises(ConfigError, match="no rank is left to work"):
        cluster_of(two, servers=[0, 2])
    with pytest.raises(ConfigError, match="no raw socket connects to a, b"):
        cluster_of(seen({}, names=["a", "b"], addresses=["10.0.0.1", "10.0.0.2"]))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--links"], "--links and -o FILE go together"),
        (["-o", "c.yaml"], "--links and -o FILE go together"),
        (["--server", "1"], "give --links too"),
        (["--links", "-o", "c.yaml"], "RANK is not set: start it on all hosts"),
    ],
)
def test_wrong_calls_are_told(options: list[str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    said = CliRunner().invoke(main, ["doctor", *options])
    assert said.exit_code == 2 and words in said.output, said.output


@needs_namespaces
@pytest.mark.slow
@pytest.mark.timed
@pytest.mark.usefixtures("forks")
def test_a_testbeds_links_are_measured_and_planned(tmp_path: pathlib.Path) -> None:
    """Two racks with a slower link between, one host slower than the others: within 10 % of what they are, and `penstock plan`
    takes the file. Together the hosts of a rack get what the link between carries, so nothing is left to explain."""
    path = tmp_path / "cluster.yaml"
    rates = {"h1": 40.0}
    with Testbed(hosts=6, racks=2, uplink_mbit=50, rates=rates, link=LinkSpec(rate_mbit=100)) as bed:
        command = [
            sys.executable,
            "-m",
            "penstock",
            "doctor",
            "--links",
            "-o",
            str(path),
            "--mebibytes=1",
            "--server=5",
        ]
        done = bed.run(command, ranks=6, launcher="fork", timeout_s=200)
        addresses = [bed.address(host) for host in range(6)]
    assert done.returncode == 0, done.outputs
    cluster = file.load(str(path))
    assert [host.addresses[0] for host in cluster.hosts] == addresses
    found = {link.name: (link.rate_bit_s or 0) / MBIT for link in cluster.links}
    expected = dict.fromkeys(("h0", "h2", "h3", "h4", "h5"), 100) | {"h1": 40, "rack0": 50, "rack1": 50}
    assert found == pytest.approx(expected, rel=0.1), (found, path.read_text())
    assert "share a link" not in path.read_text(), path.read_text()
    planned = forked.run(
        [
            sys.executable,
            "-m",
            "penstock",
            "plan",
            str(path),
            "--seconds",
            "1",
            "-o",
            str(tmp_path / "deployment.yaml"),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert planned.returncode == 0 and "Mbit/s a worker" in planned.stdout, planned.stdout + planned.stderr


@pytest.mark.usefixtures("forks")
def test_ranks_of_one_host_have_no_links(tmp_path: pathlib.Path) -> None:
    """Nothing is written, and the reason is the one that `cluster_of` gives."""
    command = [sys.executable, "-m", "penstock", "doctor", "--links", "-o", str(tmp_path / "cluster.yaml")]
    with Loopback(hosts=1) as bed:
        done = bed.run([*command, "--mebibytes=1"], ranks=2, launcher="fork", timeout_s=120)
    said = "".join(done.outputs)
    assert done.returncode and "all 2 ranks are on one host, so there is no link to measure" in said, said
    assert "Traceback" not in said and not (tmp_path / "cluster.yaml").exists(), said


@needs_namespaces
@pytest.mark.slow
def test_the_command_of_the_page(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Three hosts with names of their own, each of which runs the guide's command as it stands: one file comes out, with three
    hosts and a server, which `penstock plan` takes."""
    page = (root / "docs" / "guide" / "plan.md").read_text()
    (command,) = re.findall(r"^torchrun .*\\\n.*doctor --links.*$", page, re.M)
    names = tmp_path / "hosts"
    path = os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]])
    with Testbed(hosts=3, link=LinkSpec(rate_mbit=500)) as bed:
        names.write_text("127.0.0.1 localhost\n" + "".join(f"{bed.address(host)} h{host}\n" for host in range(3)))
        running = []
        for host in range(3):
            (tmp_path / f"h{host}").mkdir()
            inside = f"hostname h{host} && mount --bind {names} /etc/hosts && cd {tmp_path}/h{host} && exec {command}"
            argv = ["unshare", "--mount", "--uts", "sh", "-c", inside]
            output = (tmp_path / f"h{host}.log").open("w")
            running.append(bed.popen(host, argv, env={"PATH": path}, stdout=output, stderr=subprocess.STDOUT))
        codes = [process.wait(240) for process in running]
    said = "".join((tmp_path / f"h{host}.log").read_text() for host in range(3))
    assert codes == [0, 0, 0], said
    (written,) = tmp_path.glob("h*/cluster.yaml")
    cluster = file.load(str(written))
    assert sorted(host.name for host in cluster.hosts) == ["h0", "h1", "h2"] and len(cluster.jobs[0].workers) == 2
    assert all(400 * MBIT < (link.rate_bit_s or 0) < 600 * MBIT for link in cluster.links), said
    planned = CliRunner().invoke(main, ["plan", str(written), "--seconds", "0.5"])
    assert planned.exit_code == 0 and "Mbit/s a worker" in planned.output, planned.output
