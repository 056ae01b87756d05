"""The cluster file: every kind of mistake ends in one error with a place, the schema says the same as the reader, and what is
written and read again is equal."""

from __future__ import annotations

import copy
import json
import pathlib
import random
import re
from typing import Any

import hypothesis
import jsonschema
import pytest
from hypothesis import strategies as st

from penstock.cluster import file, generate, places, units
from penstock.cluster.network import Aggregator, Cluster, End, Host, Job, Link, Nic, Server, Switch
from penstock.errors import Config as ConfigError

ROOT = pathlib.Path(__file__).resolve().parents[1]

FULL = """\
version: 1
hosts:
  h0: {address: 10.77.0.1}
  h1: {address: [10.77.0.2, "fd77::2"]}
  h2:
  h3: {nics: {eth0: {address: 10.77.0.4}, eth1: }}
switches: {r0: , core: }
defaults: {links: {rate: 1 Gbit/s, delay: 20 us}}
links:
  - {between: [h0, r0], flow_cap: [60 Mbit/s, 300 Mbit/s], loss: 0.1 %}
  - {between: [h1, r0], queue: 128 KiB, mtu: 9000}
  - {between: [h2, core], name: uplink of h2}
  - {between: [h3:eth0, core], delay: 0.5 ms}
  - {between: [h3:eth1, r0], rate: unlimited}
  - {between: [r0, core], rate: 10 Gbit/s, background: 1.5 Gbit/s}
aggregators:
  a0: {at: r0, address: 10.77.1.1, capacity: 5 Gbit/s, used: 1 Gbit/s}
servers:
  s0: {at: h1, port: 7472, address: "fd77::2", ingress: 2 Gbit/s}
jobs:
  train: {workers: [h0, h1, h1], gradient: 100 MiB}
""".replace("uplink of h2", "uplink-of-h2")


def test_every_key_is_read() -> None:
    """Whole numbers of small units; what all links share stands once."""
    found = file.parse(FULL, "cluster.yaml")
    assert found.hosts[1:] == (
        Host(name="h1", nics=(Nic(addresses=("10.77.0.2", "fd77::2")),)),
        Host(name="h2"),
        Host(name="h3", nics=(Nic(addresses=("10.77.0.4",)), Nic(name="eth1"))),
    )
    assert found.switches == (Switch(name="r0"), Switch(name="core"))
    common: dict[str, Any] = {"rate_bit_s": 10**9, "delay_ns": 20_000}
    assert found.links == (
        Link(
            name="h0-r0",
            ends=(End("h0"), End("r0")),
            flow_caps_bit_s=(60_000_000, 300_000_000),
            loss=0.001,
            **common,
        ),
        Link(name="h1-r0", ends=(End("h1"), End("r0")), queue_bytes=131_072, mtu=9000, **common),
        Link(name="uplink-of-h2", ends=(End("h2"), End("core")), **common),
        Link(name="h3:eth0-core", ends=(End("h3", "eth0"), End("core")), **{**common, "delay_ns": 500_000}),
        Link(name="h3:eth1-r0", ends=(End("h3", "eth1"), End("r0")), **{**common, "rate_bit_s": None}),
        Link(
            name="r0-core",
            ends=(End("r0"), End("core")),
            background_bit_s=1_500_000_000,
            **{**common, "rate_bit_s": 10**10},
        ),
    )
    assert found.aggregators == (
        Aggregator(name="a0", at="r0", address="10.77.1.1", capacity_bit_s=5 * 10**9, used_bit_s=10**9),
    )
    assert found.servers == (Server(name="s0", at="h1", port=7472, address="fd77::2", ingress_bit_s=2 * 10**9),)
    assert found.jobs == (Job(name="train", workers=("h0", "h1", "h1"), gradient_bytes=100 << 20),)
    assert (found.address(found.aggregators[0]), found.address(found.servers[0])) == (
        "10.77.1.1:7471",
        "[fd77::2]:7472",
    )
    assert [link.name for link in found.path("h0", "h2")] == ["h0-r0", "r0-core", "uplink-of-h2"]
    # Through h3, which is at both switches, nothing goes.
    assert [link.name for link in found.path("h3", "h1")] == ["h3:eth1-r0", "h1-r0"]


@pytest.mark.parametrize(
    ("change", "place", "words"),
    [
        # The form
        (("version: 1", "version: 2"), "1:10", "version: must be 1: it is the version of the format, not '2'"),
        (("version: 1\n", ""), "1:1", "'version' is missing; it takes the keys version, hosts"),
        (("switches:", "switchs:"), "7:1", "there is no key 'switchs' here; did you mean 'switches'?"),
        (("address: 10.77.0.1", "adress: 10.77.0.1"), "3:8", "hosts.h0: there is no key 'adress' here; did you mean"),
        (("address: 10.77.0.1", "address: 10"), "3:17", "hosts.h0.address: must be an IPv4 or IPv6 address"),
        (("  h2:", "  h1:"), "5:3", "hosts: 'h1' stands here twice; the first is at cluster.yaml:4:3"),
        (("  h2:", "  2h:"), "5:3", "hosts: must be a name: a letter, and then"),
        (("  h2:", "  true:"), "5:3", "must be a name"),
        (("  h2:", "  [h2]:"), "5:3", "a key is a word here"),
        (("  h2:", "  h2: host"), "5:7", "hosts.h2: takes the keys address, nics"),
        (("{r0: , core: }", "[r0, core]"), "7:11", "switches: takes a name a line, such as `r0:`, not a list"),
        (("r0: ,", "r0: {ports: 32},"), "7:17", "switches.r0: there is no key 'ports' here; it takes no keys"),
        (("[h0, r0]", "[h0, r0, core]"), "10:15", "links[0].between: must be the two ends of the link, such as"),
        (
            ("[h0, r0]", '["h0:", r0]'),
            "10:16",
            "links[0].between[0]: must be the name of a host or a switch, or HOST:NIC",
        ),
        (
            ("rate: 10 Gbit/s", "rate: 10000"),
            "15:33",
            "links[5].rate: must be a rate with its unit, such as `1 Gbit/s`: "
            "'10000' has no unit; `10000 Mbit/s`, for one, would have",
        ),
        (
            ("rate: 10 Gbit/s", "rate: 10 Gbps"),
            "15:33",
            "there is no unit 'Gbps'; did you mean 'Gbit/s'? The units are",
        ),
        (("rate: 10 Gbit/s", "rate: 10 gbit/s"), "15:33", "there is no unit 'gbit/s'; did you mean 'Gbit/s'?"),
        (("rate: 10 Gbit/s", "rate: 10 GB/s"), "15:33", "there is no unit 'GB/s'"),
        (("rate: 10 Gbit/s", "rate: -10 Gbit/s"), "15:33", "not '-10 Gbit/s', which is negative"),
        (("rate: 10 Gbit/s", "rate: much"), "15:33", "links[5].rate: must be a rate with its unit"),
        (
            ("rate: 10 Gbit/s", "rate: [10 Gbit/s]"),
            "15:33",
            "must be a rate with its unit, such as `1 Gbit/s`, not a list",
        ),
        (("rate: 1 Gbit/s", "rate: 1"), "8:26", "defaults.links.rate: must be a rate with its unit"),
        (("delay: 20 us", "name: l"), "8:36", "defaults.links: there is no key 'name' here"),
        (("0.5 ms", "0.5"), "13:39", "links[3].delay: must be a delay with its unit, such as `20 ms`"),
        (("128 KiB", "128 Kib"), "11:32", "did you mean 'KiB'?"),
        (("0.1 %", "0.001"), "10:66", "links[0].loss: must be a share with its unit, such as `0.1 %`"),
        (("mtu: 9000", "mtu: 64"), "11:46", "links[1].mtu: must be a number of bytes, 1280 to 65000, not '64'"),
        (("port: 7472", "port: 0"), "19:22", "servers.s0.port: must be a port, 1 to 65535, not '0'"),
        (("port: 7472", f"port: {'9' * 5000}"), "19:22", "must be a port, 1 to 65535, not '99999"),
        (("{at: h1, port: 7472, ", "{port: 7472, "), "19:7", "servers.s0: 'at' is missing"),
        (("workers: [h0, h1, h1]", "workers: []"), "21:20", "jobs.train.workers: must be a list that is not empty"),
        # Not YAML that is read here
        (
            ("{at: h1", "{at: h1: h2"),
            "19:14",
            "this is not YAML that can be read here: did not find expected ',' or '}'",
        ),
        (("  h2:", "\th2:"), "5:1", "this is not YAML that can be read here: found character that cannot start"),
        (("  h2:", "  h2: \x07"), "5:7", "this is not YAML: a character '\\x07'"),
        (("  h2:", "  h2: !!python/name:os.system"), "5:7", "the tag tag:yaml.org,2002:python/name:os.system"),
        (("  h2:", "  h2: *other"), "5:7", "found undefined alias"),
        (("  h2:", "  h2: &h [*h]"), "5:11", "*h is used within itself"),
        (("  h2:", "  h2: " + "[" * 200), "5:105", "more than 100 levels"),
        (("servers:\n", "---\nservers:\n"), "18:1", "another document"),
        # Names
        (
            ("[h0, r0]", "[h0, r1]"),
            "10:20",
            "links[0].between[1]: there is no host or switch r1: there are h0, h1, h2, h3, r0, core",
        ),
        (("[h3:eth0, core]", "[h3, core]"), "13:16", "host h3 has the NICs eth0, eth1: say which, such as h3:eth0"),
        (("[h3:eth0, core]", "[h3:eth2, core]"), "13:16", "host h3 has no NIC eth2: did you mean 'eth1'?"),
        (("[h3:eth0, core]", "[h3:eth0, core:eth0]"), "13:25", "core is a switch: leave `:eth0` out"),
        (("[h1, r0]", "[h0, core]"), "11:16", "the NIC eth0 of host h0 is at link h0-r0 already"),
        (("[r0, core]", "[core, core]"), "15:15", "links[5].between: both ends are core"),
        (("uplink-of-h2", "h0-r0"), "10:5", "links[0]: two links are called h0-r0: give each a `name:`"),
        (("core: }", "h0: }"), "7:22", "switches.h0: there is a host h0 too"),
        (("at: r0", "at: r1"), "17:12", "aggregators.a0.at: there is no host or switch r1: there are"),
        (("at: h1", "at: core"), "19:12", "servers.s0.at: core is a switch: a server runs on a host"),
        (("at: h1", "at: h9"), "19:12", "servers.s0.at: there is no host h9: there are h0, h1, h2, h3"),
        (("[h0, h1, h1]", "[h0, h9]"), "21:25", "jobs.train.workers[1]: there is no host h9"),
        (("[h0, h1, h1]", "[core]"), "21:21", "jobs.train.workers[0]: core is a switch"),
        (('"fd77::2", ingress', "10.77.0.1, ingress"), "19:37", "host h1 has 10.77.0.2, fd77::2, and not 10.77.0.1"),
        # Numbers
        (("10.77.0.1}", "10.77.0.256}"), "3:7", "hosts.h0: the address 10.77.0.256 is neither IPv4 nor IPv6"),
        (("10.77.0.1}", "0.0.0.0}"), "3:7", "the address 0.0.0.0 cannot be reached from all hosts"),
        (("10.77.0.1}", "10.77.0.2}"), "4:7", "hosts.h1: the address 10.77.0.2 is also that of h0"),
        (("rate: 10 Gbit/s", "rate: 0 Gbit/s"), "15:33", "links[5].rate: must be above 0; `unlimited`, or no `rate:`"),
        (("128 KiB", "0 B"), "11:32", "links[1].queue: must be above 0"),
        (("0.1 %", "100 %"), "10:66", "links[0].loss: must be below 100 %"),
        (("300 Mbit/s", "3 Gbit/s"), "10:35", "links[0].flow_cap: must not be above the `rate` of the link"),
        (("1.5 Gbit/s", "10 Gbit/s"), "15:56", "links[5].background: must be below the `rate` of the link"),
        (("rate: 10 Gbit/s", "rate: unlimited"), "15:56", "links[5].background: needs a `rate:`"),
        (("used: 1 Gbit/s", "used: 5 Gbit/s"), "17:62", "aggregators.a0.used: must be below `capacity`"),
        (("ingress: 2 Gbit/s", "ingress: 0 bit/s"), "19:57", "servers.s0.ingress: must be above 0"),
        (("100 MiB", "0 MiB"), "21:44", "jobs.train.gradient: must be above 0"),
        # The graph
        (
            ("  - {between: [h0, r0], flow_cap: [60 Mbit/s, 300 Mbit/s], loss: 0.1 %}\n", ""),
            "3:7",
            "hosts.h0: is at no link",
        ),
        (("  - {between: [r0, core]", "  #"), "5:6", "hosts.h2: no way leads to it from r0: add a link"),
        (
            ('port: 7472, address: "fd77::2", ingress: 2 Gbit/s}', "port: 7471}\n  s1: {at: h1}"),
            "20:7",
            "servers.s1: s0 has the same address, 10.77.0.2:7471",
        ),
    ],
)
def test_a_mistake_is_told_with_its_place(change: tuple[str, str], place: str, words: str) -> None:
    """File, line, column, path, what is wrong and what would be right."""
    assert change[0] in FULL
    with pytest.raises(ConfigError) as error:
        file.parse(FULL.replace(*change, 1), "cluster.yaml")
    told = str(error.value)
    assert told.startswith(f"cluster.yaml:{place}: "), told
    assert words in told, told
    assert "\n" not in told


@pytest.mark.parametrize("text", ["", "# nothing", "null", "---\n"])
def test_an_empty_file_is_told_what_belongs_there(text: str) -> None:
    with pytest.raises(ConfigError, match=r"there is nothing in it; it begins with `version: 1`"):
        file.parse(text, "cluster.yaml")


def test_a_value_without_a_file_is_told_with_its_path() -> None:
    """Generators and programs make clusters too."""
    with pytest.raises(ConfigError, match=r"^links\[0\]\.rate: must be above 0"):
        generate.star(2, rate_bit_s=0)
    with pytest.raises(ConfigError, match=r"^jobs\.j\.workers\[0\]: there is no host x: there is h"):
        Cluster(hosts=(Host(name="h"),), jobs=(Job(name="j", workers=("x",)),))
    with pytest.raises(LookupError, match="no link h9: there are h0, h1"):
        generate.star(2).with_link("h9", loss=0.5)


def test_files_that_cannot_be_read(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=r"none.yaml: the file cannot be read: No such file"):
        file.load(str(tmp_path / "none.yaml"))
    with pytest.raises(ConfigError, match=r"--cluster x: the file cannot be read: Is a directory"):
        file.load(str(tmp_path), "--cluster x")
    (tmp_path / "latin").write_bytes(b"version: \xe9")
    with pytest.raises(ConfigError, match="it is not text in UTF-8"):
        file.load(str(tmp_path / "latin"))
    # A file without an end is not read to its end.
    with pytest.raises(ConfigError, match=f"longer than {places.MOST_BYTES} bytes"):
        file.load("/dev/zero")


def test_aliases_are_read_and_bombs_are_not() -> None:
    """What they expand to is counted before it is made: nine levels of nine would be 387 million values."""
    text = FULL.replace(
        "- {between: [h0, r0], flow_cap: [60 Mbit/s, 300 Mbit/s]", "- {between: [h0, r0], flow_cap: &c [60 Mbit/s]", 1
    )
    text = text.replace("queue: 128 KiB", "flow_cap: *c")
    found = file.parse(text, "cluster.yaml")
    assert found.links[0].flow_caps_bit_s == found.links[1].flow_caps_bit_s == (60_000_000,)
    bomb = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{low}: &{low} [{', '.join([f'*{high}'] * 9)}]\n" for high, low in zip("abcdefgh", "bcdefghi", strict=True)
    )
    with pytest.raises(ConfigError, match=r"bomb\.yaml:6:\d+: .*more than 500000 values"):
        file.parse(bomb, "bomb.yaml")


@pytest.mark.parametrize("seed", range(8))
def test_a_damaged_file_ends_in_one_error_with_a_place(seed: int) -> None:
    """Seeded damage to characters and lines: a cluster, or one line that names a place; never another exception."""
    chance = random.Random(seed)
    refused = 0
    for _ in range(250):
        text = FULL if chance.random() < 0.5 else file.dump(generate.racks(4, 2, servers=1, rate_bit_s=10**9))
        for _ in range(chance.randint(1, 3)):
            text = _damage(text, chance)
        try:
            file.parse(text, "cluster.yaml")
        except ConfigError as error:
            told = str(error)
            refused += 1
            assert re.match(r"cluster\.yaml(:\d+:\d+)?: ", told) and "\n" not in told, (seed, text, told)
            if not told.startswith("cluster.yaml:"):
                assert "nothing in it" in told, (seed, text, told)
            else:
                line, column = map(int, told.split(":")[1:3])
                lines = (text + "\n").split("\n")
                assert 1 <= line <= len(lines) and 1 <= column <= len(lines[line - 1]) + 1, (seed, text, told)
        except Exception as error:
            pytest.fail(f"seed {seed}: {error!r} of\n{text}")
    assert refused > 150, "the damage is too small to prove anything"


ODD = [
    "", " ", "\t", "\n", ":", "-", "[", "]", "{", "}", ",", "&a ", "*a", "!t ", "|", ">", "%", "@", "`", "'", '"',
    "#", "?", "~", "null", "true", "no", "0", "-1", ".inf", ".nan", "1e400", "0x1f", "1_0", "9" * 400,
    "2020-13-45", "1:30", "<<", "=", "é", "\u2028", "\ufeff", "\x00", "\x85", "\U0001f600", "h0", "r0", "core",
    "1 Gbit/s", "...",
]  # fmt: skip


def _damage(text: str, chance: random.Random) -> str:
    kind = chance.randrange(5)
    if kind < 2:
        start = chance.randrange(len(text) + 1)
        return text[:start] + chance.choice(ODD) + text[start + chance.choice((0, 0, 1, 5)) :]
    lines = text.splitlines(keepends=True)
    at, other = chance.randrange(len(lines)), chance.randrange(len(lines))
    if kind == 2:
        lines[at], lines[other] = lines[other], lines[at]
    elif kind == 3:
        lines.insert(other, lines[at])
    else:
        words = re.split(r"(\W+)", lines[at])
        words[chance.randrange(len(words))] = chance.choice(ODD)
        lines[at] = "".join(words)
    return "".join(lines)


# The schema


SCHEMA = json.loads(file.SCHEMA.read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)

SAMPLE: dict[str, Any] = {
    "version": 1,
    "hosts": {
        "h0": {"address": "10.77.0.1"},
        "h1": {"address": ["10.77.0.2", "fd77::2"]},
        "h2": None,
        "h3": {"nics": {"eth0": {"address": "10.77.0.4"}, "eth1": None}},
    },
    "switches": {"r0": None, "core": {}},
    "defaults": {"links": {"rate": "1 Gbit/s", "delay": "20 us"}},
    "links": [
        {"between": ["h0", "r0"], "flow_cap": ["60 Mbit/s", "300 Mbit/s"], "loss": "0.1 %"},
        {"between": ["h1", "r0"], "queue": "128 KiB", "mtu": 9000, "flow_cap": "1 Mbit/s"},
        {"between": ["h2", "core"], "name": "l"},
        {"between": ["h3:eth0", "core"], "delay": "0.5 ms"},
        {"between": ["h3:eth1", "r0"], "rate": "unlimited"},
        {"between": ["r0", "core"], "rate": "10 Gbit/s", "background": "1.5 Gbit/s"},
    ],
    "aggregators": {"a0": {"at": "r0", "address": "10.77.1.1", "capacity": "5 Gbit/s", "used": "1 Gbit/s"}},
    "servers": {"s0": {"at": "h1", "port": 7472, "ingress": "2 Gbit/s"}},
    "jobs": {"train": {"workers": ["h0", "h1", "h1"], "gradient": "100 MiB"}},
}  # fmt: skip


@pytest.mark.parametrize("seed", range(10))
def test_the_schema_and_the_reader_agree(seed: int) -> None:
    """Of seeded changes to a document: what the schema refuses the reader refuses as malformed, and the other way round. What the
    schema takes fails, if at all, because it contradicts itself."""
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert VALIDATOR.is_valid(SAMPLE)
    chance = random.Random(seed)
    counts = {"malformed": 0, "contradiction": 0, "fine": 0}
    for _ in range(400):
        document = copy.deepcopy(SAMPLE)
        for _ in range(chance.randint(1, 2)):
            document = _change(document, chance)
        text = json.dumps(document)
        said = next((error.message for error in VALIDATOR.iter_errors(document)), None)
        try:
            arguments = file.read(text, "c.yaml")
        except ConfigError as error:
            assert said is not None, f"seed {seed}: only the reader refuses {text}: {error}"
            counts["malformed"] += 1
            continue
        assert said is None, f"seed {seed}: only the schema refuses {text}: {said}"
        try:
            Cluster(**arguments)
            counts["fine"] += 1
        except ConfigError as error:
            assert re.match(r"c\.yaml:1:\d+: ", str(error)), error
            counts["contradiction"] += 1
    assert min(counts.values()) >= 10, counts


WORDS = [
    "h0", "h1", "r0", "core", "h3:eth1", "h0:", ":", "x", "1 Gbit/s", "1Gbit/s", "0 bit/s", "1.5 Mbit/s",
    "1. Gbit/s", "1 gbit/s", "unlimited", "20 ms", "20 us", "0.1 %", "100 %", "128 KiB", "0 B", "10.0.0.1",
    "fd77::9", "0.0.0.0", "true", "null", "", " ", "10.77.0.1", "rate", "-1 Gbit/s", "1  Gbit/s", "a\nb", "é",
    "h" * 63, "h" * 64, "1" * 18 + " bit/s", "1" * 19 + " bit/s",
]  # fmt: skip
KEYS = [
    "version", "hosts", "switches", "defaults", "links", "aggregators", "servers", "jobs", "between", "rate",
    "delay", "queue", "flow_cap", "loss", "mtu", "background", "name", "at", "port", "address", "capacity", "used",
    "ingress", "workers", "gradient", "nics", "h9", "true", "1",
]  # fmt: skip


def _change(value: Any, chance: random.Random) -> Any:
    """Another document: something below is replaced, removed, doubled or added."""
    inner = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    if isinstance(value, str) and chance.random() < 0.7:
        return _alike(value, chance)
    if inner and chance.random() < 0.9:
        key = chance.choice(inner)
        value[key] = _change(value[key], chance)
        return value
    kind = chance.randrange(5)
    if kind == 0 and inner:
        del value[chance.choice(inner)]
    elif kind == 1 and isinstance(value, list):
        value.append(copy.deepcopy(chance.choice(value)) if value and chance.random() < 0.5 else _any(chance))
    elif kind == 1 and isinstance(value, dict):
        value[chance.choice(KEYS)] = (
            copy.deepcopy(value[chance.choice(inner)]) if inner and chance.random() < 0.5 else _any(chance)
        )
    else:
        return _any(chance)
    return value


def _alike(value: str, chance: random.Random) -> str:
    """Another text of the same form: well-formed, and often a contradiction."""
    for form in ("share", "rate", "delay", "size", "end", "address"):
        pattern = re.compile(SCHEMA["$defs"][form]["pattern"])
        if pattern.search(value):
            return chance.choice([word for word in [*WORDS, *SAMPLE["hosts"], "20 Gbit/s"] if pattern.search(word)])
    return value


def _any(chance: random.Random) -> Any:
    return chance.choice(
        [chance.choice(WORDS)] * 4
        + [None, True, False, 0, 1, 1500, 65536, -1, 1.5, 1500.0, 1e30, [], {}, ["h0"], {"address": "10.0.0.9"}]
    )


# Written and read again


RATES = st.integers(1, 10**13)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Of a shape, with links each of its own."""
    shape = draw(st.sampled_from(["star", "racks", "leaf_spine"]))
    if shape == "star":
        made = generate.star(draw(st.integers(1, 5)))
    elif shape == "racks":
        hosts = draw(st.integers(1, 6))
        racks = draw(st.integers(1, hosts))
        made = generate.racks(hosts, racks, servers=draw(st.integers(0, 2)), core_aggregator=draw(st.booleans()))
    else:
        made = generate.leaf_spine(draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3)), servers=1)
    for link in made.links:
        rate = draw(st.none() | RATES)
        changes: dict[str, Any] = {
            "rate_bit_s": rate,
            "delay_ns": draw(st.integers(0, 10**10)),
            "queue_bytes": draw(st.none() | st.integers(1, 10**10)),
            "flow_caps_bit_s": tuple(draw(st.lists(st.integers(1, rate or 10**13), max_size=3))),
            "loss": draw(st.sampled_from([0.0, 0.001, 0.0500125063, 1e-9, 0.5])),
            "mtu": draw(st.sampled_from([1500, 9000, 1280])),
            "background_bit_s": draw(st.integers(0, rate - 1)) if rate else 0,
        }
        made = made.with_link(link.name, **changes)
    return made


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(clusters())
def test_a_cluster_survives_its_file(made: Cluster) -> None:
    """`dump` and `parse` are each other's inverse, and what `dump` writes fits the schema."""
    text = file.dump(made)
    assert file.parse(text, "c.yaml") == made
    import yaml  # type: ignore[import-untyped]

    VALIDATOR.validate(yaml.safe_load(text))


def test_quantities_are_shown_short_and_exactly() -> None:
    for value, text in (
        (10**9, "1 Gbit/s"),
        (1_500_000, "1.5 Mbit/s"),
        (999, "999 bit/s"),
        (1_234_567_891, "1234567.891 kbit/s"),
    ):
        assert units.RATE.show(value) == text
    assert units.SIZE.show(131_072) == "128 KiB" and units.SIZE.show(9000) == "9 kB" and units.SIZE.show(0) == "0 B"
    assert units.DELAY.show(1_500_000) == "1.5 ms" and units.DELAY.show(20_000_000) == "20 ms"


def test_generated_clusters_have_the_shapes_that_their_names_say() -> None:
    spread = generate.leaf_spine(3, 2, 2, servers=2, rate_bit_s=10**9, uplink={"rate_bit_s": 4 * 10**9})
    assert len(spread.hosts) == 6 + 3 + 2 and len(spread.links) == 11 + 6
    assert spread.link["leaf2-spine1"].rate_bit_s == 4 * 10**9 and spread.link["h5"].ends == (End("h5"), End("leaf2"))
    assert [link.name for link in spread.path("h0", "s1")] == ["h0", "leaf0-spine0", "leaf1-spine0", "s1"]
    assert spread.job["train"].workers == tuple(f"h{host}" for host in range(6))
    assert spread.address(spread.aggregator["a2"]) == "10.77.1.3:7471"
    for wrong, words in (
        (lambda: generate.star(0), "hosts=0: give 1 to"),
        (lambda: generate.racks(2, 3), "racks=3: give 1 to 2"),
        (lambda: generate.leaf_spine(2, 0, 1), "spines=0: give 1 to"),
    ):
        with pytest.raises(ValueError, match=words):
            wrong()


def test_the_largest_clusters_have_addresses_of_their_own() -> None:
    """4,096 workers in 128 racks: the planner's largest."""
    large = generate.leaf_spine(128, 8, 32, servers=6)
    assert len({address for host in large.hosts for address in host.addresses}) == 2 * len(large.hosts)
