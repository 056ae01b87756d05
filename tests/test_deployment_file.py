"""Deployments that name what a cluster file has: what they resolve to, and where they say that something is wrong."""

from __future__ import annotations

import logging
import pathlib
import random
import re

import pytest

import penstock
from penstock.cluster import deployment, file, generate
from penstock.errors import Config as ConfigError

NAMED = """\
version: 2
cluster: cluster.yaml
aggregated:
  window: 64
  servers:
    - server: s0
      tree:
        - aggregator: a0
          workers: [h0, h1]
        - aggregator: a1
          workers: [2, h3]
"""

ADDRESSED = """\
version: 1
aggregated:
  window: 64
  servers:
    - address: 10.77.2.1:7471
      tree:
        - aggregator: 10.77.1.1:7471
          workers: [0, 1]
        - aggregator: 10.77.1.2:7471
          workers: [2, 3]
"""


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "cluster.yaml").write_text(file.dump(generate.racks(4, 2, servers=1)))
    return tmp_path


def test_names_become_addresses_and_ranks(folder: pathlib.Path) -> None:
    """What rank 0 passes on needs no cluster file, and says the same as a file with addresses."""
    (folder / "named.yaml").write_text(NAMED)
    text = deployment.load(str(folder / "named.yaml"), "asked")
    assert deployment.parse(text, "d") == deployment.parse(ADDRESSED, "d")
    nested = NAMED.replace(
        "        - aggregator: a1\n          workers: [2, h3]\n",
        "          children: [{aggregator: a1, workers: [h2]}]\n",
    ).replace("window: 64", "format: float32\n  block_bytes: 1408\n  key: none\n  offloads: no\n  min_bytes: 7")
    (folder / "named.yaml").write_text(nested)
    found = deployment.parse(deployment.load(str(folder / "named.yaml"), "asked"), "d")
    assert found == deployment.parse(nested, "d", str(folder))
    assert (found.format, found.block_bytes, found.key, found.offloads, found.min_bytes) == (
        "float32",
        1408,
        False,
        False,
        7,
    )
    assert found.servers[0].children(4) == (found.servers[0].tree[0], 3)


def test_a_host_stands_for_all_of_its_ranks(folder: pathlib.Path) -> None:
    """By the order of the job's workers; of several jobs the deployment chooses one."""
    text = (
        (folder / "cluster.yaml")
        .read_text()
        .replace("[h0, h1, h2, h3]}", "[h0, h0, h1, h2, h3]}\n  other: {workers: [h3]}")
    )
    (folder / "cluster.yaml").write_text(text)
    named = NAMED.replace("aggregated:", "job: train\naggregated:").replace("[2, h3]", "[h2, h3]")
    [server] = deployment.parse(named, "d", str(folder)).servers
    assert [aggregator.workers for aggregator in server.tree] == [(0, 1, 2), (3, 4)]


@pytest.mark.parametrize(
    ("change", "place", "words"),
    [
        (("cluster: cluster.yaml\n", ""), "1:1", "'cluster' is missing: the path of the cluster file"),
        (("version: 2", "version: 3"), "1:10", "version: must be 1 or 2"),
        (("version: 2", "version: 1"), "2:10", "cluster: 'cluster' needs `version: 2`"),
        (("cluster: cluster.yaml", "cluster: none.yaml"), "2:10", "none.yaml: the file cannot be read: No such file"),
        (("cluster: cluster.yaml", "cluster: [c]"), "2:10", "cluster: must be the path of a cluster file, not a list"),
        (("cluster.yaml\n", "cluster.yaml\njob: tran\n"), "3:6", "the cluster has no job tran: did you mean 'train'?"),
        (
            ("server: s0", "server: s1"),
            "6:15",
            "aggregated.servers[0].server: the cluster has no server s1: there is s0",
        ),
        (("server: s0", "address: 10.77.2.1:7471"), "6:7", "there is no key 'address' here; it takes the keys server"),
        (("aggregator: a1", "aggregator: a7"), "10:23", "the cluster has no aggregator a7: there are a0, a1"),
        (("[2, h3]", "[2, h7]"), "11:24", "the job has no worker on a host h7: there are h0, h1, h2, h3"),
        (("[2, h3]", "[2, a0]"), "11:24", "the job has no worker on a host a0"),
        (("[2, h3]", "[2, 4]"), "11:24", "must be a worker's number, its rank, from 0 to 3, not '4'"),
        (("[2, h3]", "[h0]"), "11:21", "worker 0 stands twice"),
        (("aggregator: a1", "aggregator: a0"), "10:23", "aggregator 10.77.1.1:7471 stands twice"),
        (("window: 64", "windw: 64"), "4:3", "there is no key 'windw' here; did you mean 'window'?"),
    ],
)
def test_a_mistake_is_told_with_its_place(
    change: tuple[str, str], place: str, words: str, folder: pathlib.Path
) -> None:
    with pytest.raises(ConfigError) as error:
        deployment.parse(NAMED.replace(*change, 1), "d.yaml", str(folder))
    assert str(error.value).startswith(f"d.yaml:{place}: ") and words in str(error.value), error.value


def test_a_mistake_in_the_cluster_file_is_told_with_its_place_there(folder: pathlib.Path) -> None:
    (folder / "cluster.yaml").write_text("version: 1\nhosts: {h0: {adress: 1}}\n")
    with pytest.raises(ConfigError, match=r"cluster\.yaml:2:14: hosts\.h0: there is no key 'adress'"):
        deployment.parse(NAMED, "d.yaml", str(folder))
    (folder / "cluster.yaml").write_text("version: 1\nhosts: {h0: }\nservers: {s0: {at: h0}}\n")
    with pytest.raises(
        ConfigError, match=r"d\.yaml:9:21: .* a host's name stands for ranks of a job: give the cluster file a job"
    ):
        deployment.parse(NAMED, "d.yaml", str(folder))
    direct = "version: 2\ncluster: cluster.yaml\naggregated:\n  servers: [{server: s0}]\n"
    with pytest.raises(ConfigError, match=r"d\.yaml:4:22: .*server s0 has no address in the cluster file: give h0"):
        deployment.parse(direct, "d.yaml", str(folder))


def test_version_1_works_with_one_warning(folder: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """However often the file is read; version 2 has none."""
    (folder / "named.yaml").write_text(NAMED)
    (folder / "old.yaml").write_text(ADDRESSED)
    with caplog.at_level(logging.WARNING, logger="penstock"):
        deployment.load(str(folder / "named.yaml"), "asked")
        assert not caplog.records
        for _ in range(3):
            assert deployment.load(str(folder / "old.yaml"), "asked") == ADDRESSED
    [record] = caplog.records
    assert "old.yaml: version 1 of the deployment file works until release 0.2" in record.getMessage()


def test_a_program_names_a_cluster_file_too(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its path begins in the working folder."""
    monkeypatch.chdir(folder)
    servers = [{"server": "s0", "tree": [{"aggregator": "a0", "workers": ["h0", 1]}]}]
    try:
        penstock.init(deployment={"version": 2, "cluster": "cluster.yaml", "aggregated": {"servers": servers}})
        chosen = deployment.chosen("")
        assert chosen is not None
        assert deployment.parse(*chosen).servers[0].tree[0].workers == (0, 1)
    finally:
        penstock.init(deployment=None)


ODD = ["", " ", "\n", ":", "-", "[", "]", "{", "}", "&a ", "*a", "!t ", "|", "'", '"', "#", "null", "true", ".nan", "9" * 400,
       "2020-13-45", "\x00", "h0", "h9", "-1", "1e400", "[[", "s0", "a0"]  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("whole", [NAMED, ADDRESSED], ids=["named", "addressed"])
def test_a_damaged_deployment_ends_in_one_error_with_a_place(whole: str, seed: int, folder: pathlib.Path) -> None:
    """Seeded damage: a deployment, or one line that names a place in one of the two files; never another exception."""
    chance = random.Random(seed)
    for _ in range(150):
        text = whole
        for _ in range(chance.randint(1, 2)):
            start = chance.randrange(len(text) + 1)
            text = text[:start] + chance.choice(ODD) + text[start + chance.choice((0, 1, 4)) :]
        try:
            deployment.parse(text, "d.yaml", str(folder))
        except ConfigError as error:
            assert re.match(r"(d\.yaml|\S*cluster\.yaml)(:\d+:\d+)?: ", str(error)), (seed, text, error)
            assert "\n" not in str(error), (seed, text, error)
        except Exception as error:
            pytest.fail(f"seed {seed}: {error!r} of\n{text}")


def test_what_the_reader_of_version_1_let_through_or_tripped_over() -> None:
    """An endless number of bytes, a number too long for Python, a date that is none, an anchor within itself."""
    for change, words in (
        (("window: 64", "min_bytes: .inf"), "min_bytes: must be a number of bytes, 0 or more"),
        (("window: 64", f"window: {'9' * 5000}"), "window: must be a power of two"),
        (("window: 64", "window: 2020-13-45"), "window: must be a power of two"),
        (("[0, 1]", "&w [*w]"), r"\*w is used within itself"),
    ):
        with pytest.raises(ConfigError, match=rf"^d\.yaml:\d+:\d+: .*{words}"):
            deployment.parse(ADDRESSED.replace(*change, 1), "d.yaml")
