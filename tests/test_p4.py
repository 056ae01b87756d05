"""Proves that the switch's aggregator does what `vectors/` say: the Python twin everywhere, the compiled program where
`p4c-bm2-ss`, `simple_switch` and `simple_switch_CLI` are on PATH (docs/design/p4.md)."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

import bmv2
import control
import replay
import twin

ROOT = pathlib.Path(__file__).resolve().parent.parent

STATED = json.loads((ROOT / "vectors" / "aggregator.json").read_text())["cases"]
RANDOM = json.loads((ROOT / "vectors" / "random.json").read_text())["cases"]
MINE = [case for case in (*STATED, *RANDOM) if "switch" in case["modes"]]
BY_NAME = [pytest.param(case, id=case["name"]) for case in MINE]
PROGRAM = (ROOT / "p4" / "penstock.p4").read_text()


# ------------------------------------------------------------------------------------------------------------- vectors


def test_vectors_are_what_the_generator_writes() -> None:
    """Nobody has edited the files, or the generator alone."""
    done = subprocess.run([sys.executable, ROOT / "p4" / "vectors.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_vectors_cover_the_rules() -> None:
    """In the stated cases every counter moves, every kind of packet leaves, every rule of an aggregator is named."""
    steps = [step for case in STATED if "switch" in case["modes"] for step in case["steps"] if "bytes" in step]
    assert {name for step in steps for name in step["counts"]} == set(twin.EVENTS.values())
    sent = {twin.Penstock.read(bytes.fromhex(step["sends"])).kind for step in steps if step["sends"]}
    flows = {twin.RESULT, twin.ACCEPTED, twin.PULLED}
    assert sent == flows | {twin.PUSH, twin.HEARTBEAT_UP, twin.HEARTBEAT_DOWN, twin.MISSING}
    assert {rule for case in STATED for rule in case["rules"]} == {"R1", "R2", "R3", "R4", "R5", "R6", "R7", "R16"}


def test_where_the_modes_differ_they_are_given_the_same() -> None:
    """A case for one mode has a twin for the other: the same packets (unless the opening is refused), another story."""
    alone = {
        mode: {case["name"]: case for case in STATED if case["modes"] == [mode]} for mode in ("software", "switch")
    }
    assert set(alone["software"]) == set(alone["switch"]) and len(alone["switch"]) >= 5
    for name, switch in alone["switch"].items():
        software = alone["software"][name]
        opened = [[step["open"] for step in case["steps"] if "open" in step] for case in (software, switch)]
        assert opened[0] == opened[1], name
        sent = [[step["bytes"] for step in case["steps"] if "bytes" in step] for case in (software, switch)]
        assert sent[0] == sent[1] or switch["steps"][0]["refused"], name
        assert software["steps"] != switch["steps"], name


# ---------------------------------------------------------------------------------------------------------------- twin


@pytest.mark.parametrize("case", BY_NAME)
def test_twin(case: dict[str, Any]) -> None:
    """What leaves, what is counted, what slots and heart table then hold."""
    replay.run(case, replay.TwinNode(block_words(case)))


# A line of the twin, and what it becomes when the rule is not there.
WITHOUT = {
    "R1 reset": ("            bitmap = 0\n            self.slot_shape", "            self.slot_shape"),
    "R1 overwrite": ("                word[slot] = value\n", "                word[slot] = _add(word[slot], value)\n"),
    "R2": ("if not is_newer and p.seq != seq:", "if False:"),
    "R3": ("elif bitmap & p.workers:", "elif False:"),
    "R4 sent again": ("if bitmap == meta.workers:  # R4", "if False:"),
    "R4 kept": ("hdr.block = [word[slot] for word in self.sum]", "pass"),
    "R4 as it was": ("kept = (alike >> 24, alike >> 16 & 0xFF, alike & 0xFFFF)", "kept = (0, p.format, p.exponent)"),
    "missing, sum": ("if p.workers and bitmap == meta.workers:", "if False:"),
    "missing, of nobody": ("if p.workers and bitmap == meta.workers:", "if bitmap == meta.workers:"),
    "missing, of these": ("p.workers &= meta.workers", "pass"),
    "missing, not here": ("p.workers &= ~bitmap", "pass"),
    "missing, next round": ("            if is_newer:\n                bitmap = 0\n", ""),
    "R5 all": ("if meta.heard == meta.children and (", "if ("),
    "R5 newest": ("if not known or newer(p.ack, ack):", "if True:"),
    "R5 minimum": ("not newer(value, least))", "newer(value, least))"),
    "R5 first child": ("(meta.child == 1 or meta", "(meta"),
    "R5 unheard": ("            meta.heard_before = 0\n", "            pass\n"),
    "R6": ("if p.epoch != meta.epoch:", "if False:"),
    "R7": ("return (a - b - 1) & 0xFFFFFFFF < 0x7FFFFFFF", "return a > b"),
    "R7 half": ("< 0x7FFFFFFF", "<= 0x7FFFFFFF"),
    "lease": ("empty = self.slot_lease[slot] != meta.lease", "empty = bitmap == 0"),
    "key": ("if p.mac != 0 or p.digest != 0:", "if False:"),
    "alike": ("elif alike != shape:", "elif False:"),
    "parent": ('if (ip["src"], meta.ingress_port) != (meta.parent_ip, meta.parent_port):', "if False:"),
    "FULL": ("(p.flags & FULL or p.format not in (I32, EXPONENTS))", "p.format not in (I32, EXPONENTS)"),
    "LAST": ("shape = (p.flags & LAST) << 24 | p.format << 16", "shape = p.format << 16"),
    "LAST goes up": ("PUSH, p.seq, p.flags & LAST, p.format", "PUSH, p.seq, 0, p.format"),
    "LAST again": ("kept = (alike >> 24, alike", "kept = (0, alike"),
    "pull": ("elif p.kind in (REQUEST, PULL):", "elif p.kind == REQUEST:"),
    "pulled": ("if p.kind in (RESULT, PULLED, ACCEPTED,", "if p.kind in (RESULT, ACCEPTED,"),
    "accepted": ("if p.kind in (RESULT, PULLED, ACCEPTED,", "if p.kind in (RESULT, PULLED,"),
    "text": ("if p.format == TEXT and p.kind != PULLED:", "if False:"),
    "maximum": ("key=lambda half: half ^ 0x8000)\n    low", "key=lambda half: half)\n    low"),
    "base": ("slot = meta.slot = meta.base + (p.seq & meta.mask)", "slot = meta.slot = p.seq & meta.mask"),
}


@pytest.mark.parametrize("rule", WITHOUT)
def test_without_a_rule_some_vector_fails(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The vectors notice each rule's absence."""
    source = (ROOT / "p4" / "twin.py").read_text()
    line, instead = WITHOUT[rule]
    assert source.count(line) == 1, line
    lame = types.ModuleType("lame")
    monkeypatch.setitem(sys.modules, "lame", lame)
    exec(compile(source.replace(line, instead), "lame", "exec"), lame.__dict__)
    monkeypatch.setattr(twin, "Switch", lame.Switch)
    with pytest.raises((AssertionError, KeyError)):
        for case in MINE:
            replay.run(case, replay.TwinNode(block_words(case)))


def test_twin_has_the_tables_and_registers_of_the_program() -> None:
    """Table for table: keys, actions, parameters with their bits, registers, numbers of counters, constants."""
    numbers = {name: int(value, 0) for name, value in re.findall(r"const bit<\d+> (\w+) = (\w+);", PROGRAM)}
    for number, event in twin.EVENTS.items():
        assert numbers[event.upper()] == number
    kinds = ("PUSH", "REQUEST", "MISSING", "ACCEPTED", "PULL", "PULLED")
    for name in (*kinds, "I32", "EXPONENTS", "BF16", "TEXT", "LOST", "FULL", "LAST", "MAX_PAYLOAD_BYTES"):
        assert numbers[name] == getattr(twin, name)
    defined = dict(re.findall(r"#define (\w+) (\d+)$", PROGRAM, re.MULTILINE))
    assert (int(defined["SLOTS"]), int(defined["JOBS"])) == (twin.SLOTS, twin.JOBS)
    assert int(defined["BLOCK_WORDS"]) == twin.BLOCK_WORDS
    children = re.search(r"#define EACH_CHILD\(M\)(.*)", PROGRAM)
    assert children is not None and children[1].count("M(") == twin.CHILDREN

    fields = {}
    for header in re.findall(r"(?:header|struct) (\w+)_t \{(.*?)\n\}", PROGRAM, re.DOTALL):
        fields |= {f"{header[0]}.{name}": int(bits) for bits, name in re.findall(r"bit<(\d+)> (\w+);", header[1])}
    tables = {}
    for control_block in re.finditer(r"^control (Aggregator|Copies).*?^\}", PROGRAM, re.DOTALL | re.MULTILINE):
        block, where = control_block[0], control_block[1]
        actions = {
            name: {param: int(bits) for bits, param in re.findall(r"bit<(\d+)> (\w+)", params)}
            for name, params in re.findall(r"action (\w+)\((.*?)\)", block, re.DOTALL)
        }
        for name, body in re.findall(r"table (\w+) \{(.*?)\n    \}", block, re.DOTALL):
            keys = {}
            for key in re.findall(r"([\w.]+): exact;", body):
                field = key.removeprefix("hdr.").replace("meta.", "metadata.")
                keys[key] = {"standard.ingress_port": 9, "standard.egress_rid": 16}.get(key) or fields[field]
            used = re.search(r"actions = \{(.*?)\}", body)
            assert used is not None
            chosen = [action.strip() for action in used[1].split(";") if action.strip()]
            # NoAction and drop are what happens without an entry.
            kept = {f"{where}.{action}": actions[action] for action in chosen if actions.get(action)}
            tables[f"{where}.{name}"] = (keys, kept)
    assert tables == twin.TABLES

    switch = vars(twin.Switch(16))
    for count, name in re.findall(r"register<bit<\d+>>\((\w+)\) (slot_\w+|heart_\w+);", PROGRAM):
        assert len(switch[name]) == int(defined[count]), name


def test_other_traffic_is_forwarded() -> None:
    """A switch is still a switch: what is not for the aggregator goes where its hardware address lives, or nowhere."""
    switch = twin.Switch(16)
    for entry in control.setup(replay.OWN, [replay.host(1)]):
        switch.insert(entry)
    frame = twin.frame_of(replay.host(0), replay.host(1), b"hello" * 20)
    assert switch.packet(1, frame) == [(2, frame)]
    assert switch.packet(1, twin.frame_of(replay.host(0), replay.host(2), b"hello")) == []
    assert switch.packet(1, frame[:50]) == [], "cut off in the midst of what would be our header"
    assert switch.counters(0)["malformed"] == 0


def test_a_damaged_frame_is_not_added() -> None:
    """Without a key the checksums are all that notices damage: one bit anywhere behind the hardware addresses."""
    case = next(case for case in STATED if case["name"] == "slot")
    node = replay.TwinNode(16)
    node.open(case["steps"][0]["open"])
    port, frame = replay.frame_from(0, bytes.fromhex(case["steps"][1]["bytes"]))
    for bit in range(14 * 8, len(frame) * 8):
        bad = bytearray(frame)
        bad[bit // 8] ^= 0x80 >> bit % 8
        assert node.switch.packet(port, bytes(bad)) == []
    assert node.counters(5)["added"] == 0
    node.switch.packet(port, frame)
    assert node.counters(5)["added"] == 1


# ------------------------------------------------------------------------------------------------------- control plane


def a_job(**changes: Any) -> control.Job:
    children = tuple(control.Child(replay.host(i), 1 << i) for i in range(2))
    made = {"job": 5, "epoch": 3, "window": 4, "block_bytes": 64, "parent": replay.host(9), "children": children}
    return control.Job(**(made | changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"key": "00" * 16}, "SipHash"),
        ({"floats": True}, "integers"),
        ({"block_bytes": 128}, "compiled for 64"),
        ({"window": 3}, "power of two"),
        ({"window": 8192}, "at most 4096"),
        ({"children": ()}, "0 children"),
        ({"children": (control.Child(replay.host(0), 3), control.Child(replay.host(1), 1))}, "below two children"),
        ({"parent_shards": 3}, "3 shards"),
    ],
)
def test_what_the_switch_cannot_serve_is_refused(changes: dict[str, Any], reason: str) -> None:
    """Before anything is written, with the reason."""
    switch = twin.Switch(16)
    with pytest.raises(control.Refused, match=reason):
        control.open_job(switch, a_job(**changes), 16)
    assert not any(switch.tables.values()) and not switch.groups


def test_places_are_given_and_taken_back() -> None:
    """Slots of open jobs never overlap; a full switch refuses; what a closed job had is free, and bears a new lease."""
    switch = twin.Switch(16)
    first = control.open_job(switch, a_job(job=1, window=2048), 16)
    second = control.open_job(switch, a_job(job=2, window=1024), 16)
    third = control.open_job(switch, a_job(job=3, window=1024), 16)
    assert [place.base for place in (first, second, third)] == [0, 2048, 3072]
    with pytest.raises(control.Refused, match="not free"):
        control.open_job(switch, a_job(job=4, window=1), 16)
    control.close_job(switch, 2)
    fourth = control.open_job(switch, a_job(job=4, window=1024), 16)
    assert (fourth.base, fourth.number) == (second.base, second.number) and fourth.lease > second.lease
    with pytest.raises(control.Refused, match="job 2 is not open"):
        control.close_job(switch, 2)
    for job in (1, 3, 4):
        control.close_job(switch, job)
    assert not any(switch.tables.values()) and not switch.groups


def test_an_opening_that_fails_leaves_nothing() -> None:
    """The switch refuses in the midst: what was written is taken back."""

    class Full(twin.Switch):
        def insert(self, entry: twin.Entry) -> None:
            if entry.table == "Copies.children" and self.tables[entry.table]:
                raise MemoryError("table full")
            super().insert(entry)

    switch = Full(16)
    with pytest.raises(MemoryError):
        control.open_job(switch, a_job(), 16)
    assert not any(switch.tables.values()) and not switch.groups


def test_shards() -> None:
    """A node with K shards is sent SeqNum s at port P + s mod K, and heard from any of the K."""
    children = (control.Child(replay.host(0), 1, shards=4),)
    switch = twin.Switch(16)
    for entry in control.setup(replay.OWN, ()):
        switch.insert(entry)
    control.open_job(switch, a_job(children=children, parent_shards=2), 16)
    step = next(step for step in MINE[0]["steps"] if step.get("counts") == ["added"])

    def udp(port: int, source: twin.Address, shard: int, seq: int, kind: int) -> list[int]:
        header = twin.Penstock.read(bytes.fromhex(step["bytes"]))
        header.seq, header.kind, header.workers = seq, kind, 1
        datagram = header.bytes() + bytes.fromhex(step["bytes"])[48:]
        source = twin.Address(source.mac, source.ip, source.udp + shard, source.port)
        out = switch.packet(port, twin.frame_of(source, replay.OWN, datagram))
        return [twin.parse(frame, 16).udp["dst"] for _, frame in out]

    assert udp(1, replay.host(0), 3, 7, twin.PUSH) == [7471 + 1]
    assert udp(1, replay.host(0), 0, 8, twin.PUSH) == [7471]
    assert udp(1, replay.host(0), 4, 9, twin.PUSH) == []
    assert udp(10, replay.host(9), 1, 7, twin.RESULT) == [7471 + 3]
    assert udp(10, replay.host(9), 2, 7, twin.RESULT) == []


HOSTS = {f"10.0.0.{i + 1}": {"mac": f"02:00:00:00:00:{i + 1:02x}", "port": i + 1} for i in range(10)}
PORTS = {"address": "10.0.0.254:7471", "mac": "02:00:00:00:00:fe", "hosts": HOSTS}


def test_a_job_that_is_open_is_found() -> None:
    """With the very same rows; not another one of that number."""
    switch = twin.Switch(16)
    assert control.find_open(switch, a_job()) is None
    place = control.open_job(switch, a_job(), 16)
    control.open_job(switch, a_job(job=6), 16)
    assert control.find_open(switch, a_job()) == place
    moved = (control.Child(replay.host(2), 1), control.Child(replay.host(1), 2))
    for changes in ({"epoch": 4}, {"window": 8}, {"children": moved}, {"parent": replay.host(8)}):
        assert control.find_open(switch, a_job(**changes)) is None, changes
    switch.delete(next(row for row in switch.entries("Copies.children") if row.keys[0] == place.number))
    assert control.find_open(switch, a_job()) is None


def test_job_and_ports_are_read() -> None:
    """The body of PUT /jobs/5 and ports.json make the job that the vectors use."""
    own, found = control.read_ports(json.dumps(PORTS))
    assert own == replay.OWN
    body = {
        "epoch": 3,
        "key": None,
        "window": 4,
        "block_bytes": 64,
        "floats": False,
        "start": 0,
        "parent": {"address": "10.0.0.10:7471", "shards": 1},
        "children": [{"address": f"10.0.0.{i + 1}:7471", "shards": 1, "workers": hex(1 << i)} for i in range(2)],
    }
    assert control.read_job(5, json.dumps(body), found) == a_job()
    body["parent"] = {"address": "10.9.9.9:7471"}
    with pytest.raises(control.Refused, match=r"10\.9\.9\.9:7471 is no host"):
        control.read_job(5, json.dumps(body), found)


# ---------------------------------------------------------------------------------------------------------- P4Runtime


PURE_PYTHON = {"PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"}


def write_job(folder: pathlib.Path, opened: dict[str, Any]) -> None:
    """job.json and ports.json for the job that a case opens."""
    body = {name: opened[name] for name in ("epoch", "key", "window", "block_bytes", "floats")}
    body["parent"] = {"address": f"10.0.0.{opened['parent'] + 1}:7471", "shards": 1}
    body["children"] = [
        {"address": f"10.0.0.{child['link'] + 1}:7471", "shards": 1, "workers": child["workers"]}
        for child in opened["children"]
    ]
    (folder / "job.json").write_text(json.dumps(body))
    (folder / "ports.json").write_text(json.dumps(PORTS))


def script(folder: pathlib.Path, address: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A verb of control.py."""
    common = ["--switch", address, "--p4info", "p4info", "--ports", "ports.json", "--block-words", "16"]
    command = [sys.executable, ROOT / "p4" / "control.py", *common, *arguments]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=60)


def environment() -> dict[str, str]:
    return os.environ | PURE_PYTHON | {"PYTHONPATH": os.pathsep.join([str(ROOT / "p4"), *sys.path])}


def without_p4runtime() -> str | None:
    if importlib.util.find_spec("grpc") is None or importlib.util.find_spec("p4.v1") is None:
        return "grpcio and p4runtime are not installed: the P4Runtime client is not tested"
    return None


def test_control_over_p4runtime(tmp_path: pathlib.Path) -> None:
    """The script's verbs over real gRPC write the rows that `job_entries` decides, and the switch behind them passes a vector."""
    if (reason := without_p4runtime()) is not None:
        pytest.skip(reason)
    case = next(case for case in STATED if case["name"] == "three children")
    opened = case["steps"][0]["open"]
    write_job(tmp_path, opened)
    (tmp_path / "program.json").write_text("{}")
    command = [sys.executable, ROOT / "tests" / "p4runtime_twin.py", tmp_path / "p4info"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment(), text=True, bufsize=1, **pipes) as server:
        assert server.stdin is not None and server.stdout is not None
        address = f"127.0.0.1:{int(server.stdout.readline())}"

        def ask(question: str) -> Any:
            server.stdin.write(question + "\n")
            return json.loads(server.stdout.readline())

        for verb in (["load", "program.json"], ["setup"], ["open", "5", "job.json"]):
            done = script(tmp_path, address, *verb)
            assert done.returncode == 0, done.stderr
        assert done.stdout == "job 5 is open at place 1, slots from 0\n"
        before = ask("tables")
        done = script(tmp_path, address, "open", "5", "job.json")
        assert (done.stdout, ask("tables")) == ("job 5 is already open at place 1, slots from 0\n", before)

        direct = replay.TwinNode(16)
        direct.open(opened)
        written = ask("tables")
        for table, rows in direct.switch.tables.items():
            found = {tuple(row["keys"]): row for row in written["rows"][table]}
            if table != "Aggregator.forward":
                assert set(found) == set(rows), table
            for keys, row in rows.items():
                same = {"action": row.action, "params": row.params}
                assert {name: found[keys][name] for name in same} | {
                    "params": found[keys]["params"] | lease(row, row.params.get("lease", 0))
                } == same
        assert written["groups"] == {
            str(group): list(map(list, copies)) for group, copies in direct.switch.groups.items()
        }

        for step in case["steps"][1:]:
            port, frame = replay.frame_from(step["from"], bytes.fromhex(step["bytes"]))
            out = [replay.datagram_to(to, bytes.fromhex(sent), 16) for to, sent in ask(f"packet {port} {frame.hex()}")]
            assert out == [(to, bytes.fromhex(step["sends"])) for to in step["to"]]
        counts = json.loads(script(tmp_path, address, "counters").stdout)
        assert (counts["5"]["added"], counts["5"]["completed"], counts["of no job"]["malformed"]) == (3, 1, 0)

        assert script(tmp_path, address, "close", "5").returncode == 0
        left = ask("tables")
        assert not left["rows"]["Aggregator.jobs"] and not left["rows"]["Aggregator.senders"] and not left["groups"]
        again = script(tmp_path, address, "close", "5")
        assert (again.returncode, again.stderr) == (1, "control.py: job 5 is not open here\n")
        server.stdin.close()
        server.wait()
        gone = script(tmp_path, address, "close", "5")
        assert gone.returncode == 1 and gone.stderr.startswith(f"control.py: switch {address}: UNAVAILABLE: "), (
            gone.stderr
        )


def lease(row: twin.Entry, value: int) -> dict[str, int]:
    """Instead of the one parameter that is never twice the same."""
    return {name: value for name in row.params if name == "lease"}


# ------------------------------------------------------------------------------------------------- the compiled program


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], pathlib.Path]:
    """The program, compiled once for each length of block, in words, that is asked for."""
    if (reason := bmv2.missing()) is not None:
        pytest.skip(f"the P4 program was NOT compiled and NOT run here, its Python twin was: {reason}")
    folder = tmp_path_factory.mktemp("p4")
    return functools.cache(functools.partial(bmv2.compile_program, folder))


@pytest.mark.parametrize("case", BY_NAME)
def test_compiled_program(case: dict[str, Any], program: Callable[[int], pathlib.Path]) -> None:
    """The same on bmv2's simple_switch: frames on virtual links, registers and counters read back."""
    if grows_by(case) > bmv2.HEADROOM_BYTES:
        pytest.skip(f"bmv2 ends where a packet grows by more than {bmv2.HEADROOM_BYTES} bytes (docs/design/p4.md)")
    words = block_words(case)
    with bmv2.Node(program(words), words, links(case)) as node:
        replay.run(case, node)


def test_control_on_bmv2(program: Callable[[int], pathlib.Path], tmp_path: pathlib.Path) -> None:
    """control.py loads and fills a real switch over P4Runtime as the CLI does, row for row, and the switch then passes a
    vector."""
    if (reason := without_p4runtime() or bmv2.missing(("simple_switch_grpc",))) is not None:
        pytest.skip(
            f"control.py was NOT run against a real P4Runtime server, only against the twin behind one: {reason}"
        )
    case = next(case for case in STATED if case["name"] == "three children")
    opened = case["steps"][0]["open"]
    write_job(tmp_path, opened)
    (tmp_path / "p4info").write_text(program(16).with_suffix(".p4info.txt").read_text())

    def contents(node: bmv2.Node) -> tuple[dict[str, dict[tuple[int, ...], dict[str, Any]]], Any]:
        """All rows but those that forward, which the CLI's path has not; and all groups."""
        rows = {name: node.entries(name) for name in twin.TABLES if name != "Aggregator.forward"}
        shown = {
            name: {row.keys: {"action": row.action, **(row.params | lease(row, 0))} for row in table}
            for name, table in rows.items()
        }
        return shown, {group: sorted(copies) for group, copies in node.groups().items()}

    with bmv2.Node(program(16), 16, links(case)) as node:
        node.open(opened)
        by_cli = contents(node)
    with bmv2.Node(None, 16, links(case)) as node:
        for verb in (["load", str(program(16))], ["setup"], ["open", "5", "job.json"]):
            done = script(tmp_path, node.address, *verb)
            assert done.returncode == 0, done.stderr
        assert done.stdout == "job 5 is open at place 1, slots from 0\n"
        assert contents(node) == by_cli
        replay.run(case | {"steps": case["steps"][1:]}, node)
        counts = json.loads(script(tmp_path, node.address, "counters").stdout)
        assert (counts["5"]["added"], counts["5"]["completed"], counts["of no job"]["malformed"]) == (3, 1, 0)
        assert script(tmp_path, node.address, "close", "5").returncode == 0
        assert not node.entries("Aggregator.jobs") and not node.entries("Aggregator.senders") and 1 not in node.groups()


# ------------------------------------------------------------------------------------------------------------- helpers


def block_words(case: dict[str, Any]) -> int:
    return max(step["open"]["block_bytes"] for step in case["steps"] if "open" in step) // 4


def grows_by(case: dict[str, Any]) -> int:
    """How many bytes longer than the packet that came in one that leaves is, at most."""
    steps = [step for step in case["steps"] if "bytes" in step]
    return max(((len(step["sends"]) - len(step["bytes"])) // 2 for step in steps), default=0)


def links(case: dict[str, Any]) -> list[int]:
    """Every link that a case uses."""
    used: set[int] = set()
    for step in case["steps"]:
        used |= {step["from"], *step["to"]} if "bytes" in step else set()
        if "open" in step:
            used |= {step["open"]["parent"], *(child["link"] for child in step["open"]["children"])}
    return sorted(used)
