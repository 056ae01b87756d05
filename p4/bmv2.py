"""The compiled program on bmv2's `simple_switch` or `simple_switch_grpc`, behind the same links as the twin (`replay.py`).

Each link is a pair of virtual interfaces: one end is the switch's, the other is a raw socket here. Tables, registers and
counters go through one open session of `simple_switch_CLI`, because bmv2's P4Runtime server does not read registers
(p4lang/PI, issue 376)."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import select
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterable
from typing import Any

import control
import replay
import twin

HERE = pathlib.Path(__file__).resolve().parent
TOOLS = ("p4c-bm2-ss", "simple_switch", "simple_switch_CLI")
# How long a packet, or the answer to a command, may take: far longer than any has.
DEADLINE_S = 60.0
# How much longer a packet may become in `simple_switch` (bmv2 1.15.5, `SimpleSwitch::receive_`); then it ends by an assertion.
HEADROOM_BYTES = 512


def missing(tools: Iterable[str] = TOOLS) -> str | None:
    """Why nothing can be compiled and run here; None where it can."""
    lacking = [tool for tool in tools if shutil.which(tool) is None]
    if lacking:
        return f"{', '.join(lacking)} not on PATH (build them from p4lang/p4c and p4lang/behavioral-model)"
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "virtual links need root and `ip`"
    return None


def compile_program(folder: pathlib.Path, block_words: int) -> pathlib.Path:
    """The program for blocks of so many words, and its p4info beside it. Raises AssertionError with what the compiler says."""
    made = folder / f"penstock-{block_words}.json"
    info = folder / f"penstock-{block_words}.p4info.txt"
    command = ["p4c-bm2-ss", f"-DBLOCK_WORDS={block_words}", "-o", str(made), "--p4runtime-files", str(info)]
    command.append(str(HERE / "penstock.p4"))
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return made


class Node:
    """A running switch. A context: leaving it ends the switch and removes its interfaces.

    Without a program it is `simple_switch_grpc`, empty, and somebody else loads it, and fills it, over P4Runtime at `address`.
    """

    def __init__(self, program: pathlib.Path | None, block_words: int, links: list[int]) -> None:
        self.program, self.block_words, self.links = program, block_words, links

    def __enter__(self) -> Node:
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            self._log = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory())) / "switch.log"
            self._sockets: dict[int, socket.socket] = {}
            for link in self.links:
                ours, its = f"pp{os.getpid()}h{link}"[-15:], f"pp{os.getpid()}s{link}"[-15:]
                _run("ip", "link", "add", ours, "mtu", "9000", "type", "veth", "peer", "name", its, "mtu", "9000")
                stack.callback(_run, "ip", "link", "del", ours)
                for name in (ours, its):
                    # So that the kernel sends nothing of its own.
                    pathlib.Path(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6").write_text("1")
                    _run("ip", "link", "set", name, "up", "arp", "off", "multicast", "off")
                raw = stack.enter_context(socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800)))
                raw.bind((ours, 0))
                self._sockets[link] = raw
            self._switch: subprocess.Popen[bytes] | None = None
            self._session: Session | None = None
            stack.callback(self._stop)
            self.restart()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _stop(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None
        if self._switch is not None:
            self._switch.kill()
            self._switch.wait()

    def restart(self) -> None:
        self._stop()
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            other.bind(("127.0.0.1", 0))
            self._thrift, grpc = one.getsockname()[1], other.getsockname()[1]
        self.address = f"127.0.0.1:{grpc}"
        command = ["simple_switch" if self.program else "simple_switch_grpc"]
        command += ["--thrift-port", str(self._thrift), "--log-level", "off"]
        for link in self.links:
            command += ["-i", f"{replay.host(link).port}@{f'pp{os.getpid()}s{link}'[-15:]}"]
        command += [str(self.program)] if self.program else ["--no-p4", "--", "--grpc-server-addr", self.address]
        with self._log.open("wb") as log:
            self._switch = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        for port in (self._thrift,) if self.program else (self._thrift, grpc):
            end = time.monotonic() + DEADLINE_S
            while True:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                assert self._switch.poll() is None, f"{command[0]} ended: {self._log.read_text()}"
                assert time.monotonic() < end, f"{command[0]} does not answer: {self._log.read_text()}"
                select.select([], [], [], 0.05)
        if self.program:
            for entry in control.setup(replay.OWN, ()):
                self.insert(entry)

    # ----------------------------------------------------------------------------------- what control.py asks of a switch

    def insert(self, entry: twin.Entry) -> None:
        params = twin.TABLES[entry.table][1][entry.action]
        values = " ".join(str(entry.params[name]) for name in params)
        line = f"table_add {entry.table} {entry.action} {' '.join(map(str, entry.keys))} => {values}"
        self._cli([line])

    def delete(self, entry: twin.Entry) -> None:
        handle = next(handle for handle, row in self._rows(entry.table) if row.keys == entry.keys)
        self._cli([f"table_delete {entry.table} {handle}"])

    def entries(self, table: str) -> list[twin.Entry]:
        return [row for _, row in self._rows(table)]

    def insert_group(self, group: int, copies: Any) -> None:
        self._cli([f"mc_mgrp_create {group}"])
        for port, number in copies:
            line = f"mc_node_create {number} {port}"
            said = self._cli([line])
            found = re.search(r"handle (\d+)", said)
            assert found is not None, f"{line}: {said}"
            self._cli([f"mc_node_associate {group} {found[1]}"])

    def delete_group(self, group: int) -> None:
        for handle, _, _ in self._multicast()[group]:
            self._cli([f"mc_node_dissociate {group} {handle}", f"mc_node_destroy {handle}"])
        self._cli([f"mc_mgrp_destroy {group}"])

    def groups(self) -> dict[int, list[tuple[int, int]]]:
        """(port, copy's number) of each multicast group."""
        return {group: [(port, number) for _, port, number in nodes] for group, nodes in self._multicast().items()}

    def clear_counters(self, place: int) -> None:
        self._cli([f"counter_write Aggregator.events {place << 5 | number} 0 0" for number in twin.EVENTS])

    # --------------------------------------------------------------------------------------- what replay.py asks of a node

    def open(self, opened: dict[str, Any]) -> None:
        control.open_job(self, replay.job_of(opened), self.block_words)

    def close(self, job: int) -> None:
        control.close_job(self, job)

    def packet(self, link: int, datagram: bytes) -> list[tuple[int, bytes]]:
        """Everything that leaves. A frame that is forwarded follows each one, through the same queues: when it is back,
        nothing more comes of the first."""
        marker = twin.frame_of(replay.host(link), replay.host(62), b"the end")
        if 4000 not in self.groups():
            every = [(replay.host(one).port, 0) for one in self.links]
            self.insert_group(4000, every)
            row = twin.Entry("Aggregator.forward", (replay.host(62).mac,), "Aggregator.flood", {"group": 4000})
            self.insert(row)
        self._sockets[link].send(replay.frame_from(link, datagram)[1])
        self._sockets[link].send(marker)
        out, waiting = [], set(self.links)
        end = time.monotonic() + DEADLINE_S
        while waiting:
            ready, _, _ = select.select(
                [self._sockets[one] for one in waiting], [], [], max(0.0, end - time.monotonic())
            )
            assert ready, f"links {waiting} hear nothing: {self._log.read_text()}"
            for one in list(waiting):
                if self._sockets[one] in ready:
                    frame, (_, _, kind, *_) = self._sockets[one].recvfrom(65536)
                    if kind == socket.PACKET_OUTGOING:
                        continue
                    if frame == marker:
                        waiting.discard(one)
                    else:
                        out.append(replay.datagram_to(replay.host(one).port, frame, self.block_words))
        return out

    def counters(self, job: int | None) -> dict[str, int]:
        place = 0 if job is None else self._admitted(job)["place"]
        lines = [f"counter_read Aggregator.events {place << 5 | number}" for number in twin.EVENTS]
        counts = [int(count) for count in re.findall(r"(?<=packets=)\d+|\d+(?= packets)", self._cli(lines))]
        return dict(zip(twin.EVENTS.values(), counts, strict=True))

    def state(self, job: int) -> dict[str, Any]:
        admitted = self._admitted(job)
        place, at = admitted["place"], range(admitted["base"], admitted["base"] + admitted["mask"] + 1)
        children = range(admitted["children"].bit_length())
        slots = []
        for index, lease in enumerate(self._registers([f"slot_lease {slot}" for slot in at])):
            if lease == admitted["lease"]:
                names = (
                    "slot_tag",
                    "slot_have_high",
                    "slot_have_low",
                    "slot_shape",
                    *(f"sum_{i:02x}" for i in range(self.block_words)),
                )
                tag, high, low, shape, *words = self._registers([f"{name} {at[index]}" for name in names])
                inside = replay.children_of(place, high << 32 | low, self.entries("Aggregator.senders"))
                total = b"".join(word.to_bytes(4, "big") for word in words)
                slots.append(replay.slot_of(index, tag, inside, shape, total))
        lease, heard = self._registers([f"heart_lease {place}", f"heart_heard {place}"])
        pairs = [self._registers([f"ack_{i:x} {place}", f"credit_{i:x} {place}"]) for i in children]
        current = lease == admitted["lease"]
        return {"slots": slots, "heart": [pairs[i] if current and heard >> i & 1 else None for i in children]}

    def _admitted(self, job: int) -> dict[str, int]:
        return next(row.params for row in self.entries("Aggregator.jobs") if row.keys == (job,))

    def _rows(self, table: str) -> list[tuple[int, twin.Entry]]:
        """The rows of a table, each with the handle that the CLI knows it by."""
        rows = []
        for row in self._cli([f"table_dump {table}"]).split("Dumping entry ")[1:]:
            keys = tuple(int(key, 16) for key in re.findall(r"EXACT +([0-9a-f]+)", row))
            action = re.search(r"Action entry: (\S+) - (.*)", row)
            assert action is not None, row
            values = (int(value, 16) for value in action[2].split(", "))
            params = dict(zip(twin.TABLES[table][1][action[1]], values, strict=True))
            rows.append((int(row.split()[0], 16), twin.Entry(table, keys, action[1], params)))
        return rows

    def _multicast(self) -> dict[int, list[tuple[int, int, int]]]:
        """Of each multicast group the nodes: handle, port, copy's number."""
        groups = {}
        for group in self._cli(["mc_dump"]).split("mgrp(")[1:]:
            nodes = re.findall(r"L1h=(\d+), rid=(\d+)\) -> \(ports=\[(\d+)\]", group)
            groups[int(group.split(")")[0])] = [(int(h), int(port), int(rid)) for h, rid, port in nodes]
        return groups

    def _registers(self, cells: list[str]) -> list[int]:
        """The CLI prints at most 63 bits."""
        said = self._cli([f"register_read Aggregator.{cell}" for cell in cells])
        values = [int(value) for value in re.findall(r"\]\s*=\s*(\d+)", said)]
        assert len(values) == len(cells), said
        return values

    def _cli(self, lines: list[str]) -> str:
        if self._session is None:
            self._session = Session(self._thrift)
        return self._session.ask(lines)


class Session:
    """`simple_switch_CLI`, kept open: to start it takes longer than a hundred commands."""

    PROMPT = b"RuntimeCmd: "
    # So many commands, and what they say, fit into the pipes: neither side waits for the other to read.
    BATCH = 100

    def __init__(self, thrift_port: int) -> None:
        command = ["simple_switch_CLI", "--thrift-port", str(thrift_port)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, bufsize=0)
        self._said(1)

    def ask(self, lines: list[str]) -> str:
        """What the switch says to these commands. Raises AssertionError where it says an error."""
        said = ""
        assert self._process.stdin is not None
        for start in range(0, len(lines), self.BATCH):
            batch = lines[start : start + self.BATCH]
            self._process.stdin.write("".join(line + "\n" for line in batch).encode())
            said += self._said(len(batch))
        assert not re.search(r"Error|Invalid|Unknown|Traceback", said), f"{lines}: {said}"
        return said

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _said(self, prompts: int) -> str:
        assert self._process.stdout is not None
        said = b""
        while said.count(self.PROMPT) < prompts:
            ready, _, _ = select.select([self._process.stdout], [], [], DEADLINE_S)
            more = os.read(self._process.stdout.fileno(), 65536) if ready else b""
            assert more, f"simple_switch_CLI {'ended' if ready else 'is silent'}: {said.decode()}"
            said += more
        return said.decode()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
