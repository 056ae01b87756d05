"""The compiled program on bmv2's `simple_switch`, behind the same links as the twin (`replay.py`).

Each link is a pair of virtual interfaces: one end is the switch's, the other is a raw socket here. Tables, registers and
counters go through `simple_switch_CLI`, because bmv2's P4Runtime server does not read registers (p4lang/PI, issue 376)."""

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
from typing import Any

import control
import replay
import twin

HERE = pathlib.Path(__file__).resolve().parent
TOOLS = ("p4c-bm2-ss", "simple_switch", "simple_switch_CLI")
# How long a packet that is expected may take, and how long one that is not is waited for.
DEADLINE_S = 10.0


def missing() -> str | None:
    """Why nothing can be compiled and run here; None where it can."""
    lacking = [tool for tool in TOOLS if shutil.which(tool) is None]
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
    """A running switch. A context: leaving it ends the switch and removes its interfaces."""

    def __init__(self, program: pathlib.Path, block_words: int, links: list[int]) -> None:
        self.program, self.block_words, self.links = program, block_words, links
        self.leases: dict[int, dict[str, int]] = {}

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
                    pathlib.Path(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6").write_text("1")
                    _run("ip", "link", "set", name, "up")
                raw = stack.enter_context(socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800)))
                raw.bind((ours, 0))
                self._sockets[link] = raw
            self._switch: subprocess.Popen[bytes] | None = None
            stack.callback(self._stop)
            self.restart()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _stop(self) -> None:
        if self._switch is not None:
            self._switch.kill()
            self._switch.wait()

    def restart(self) -> None:
        self._stop()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._thrift = probe.getsockname()[1]
        command = ["simple_switch", "--thrift-port", str(self._thrift), "--log-level", "off"]
        for link in self.links:
            command += ["-i", f"{replay.host(link).port}@{f'pp{os.getpid()}s{link}'[-15:]}"]
        with self._log.open("wb") as log:
            self._switch = subprocess.Popen([*command, str(self.program)], stdout=log, stderr=subprocess.STDOUT)
        end = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._thrift), 1):
                break
            assert self._switch.poll() is None, f"simple_switch ended: {self._log.read_text()}"
            assert time.monotonic() < end, f"simple_switch does not answer: {self._log.read_text()}"
            select.select([], [], [], 0.05)
        self._handles: dict[tuple[str, tuple[int, ...]], int] = {}
        self._rows: dict[str, dict[tuple[int, ...], twin.Entry]] = {name: {} for name in twin.TABLES}
        self._groups: dict[int, list[int]] = {}
        for entry in control.setup(replay.OWN, ()):
            self.insert(entry)

    # ----------------------------------------------------------------------------------- what control.py asks of a switch

    def insert(self, entry: twin.Entry) -> None:
        params = twin.TABLES[entry.table][1][entry.action]
        values = " ".join(str(entry.params[name]) for name in params)
        line = f"table_add {entry.table} {entry.action} {' '.join(map(str, entry.keys))} => {values}"
        self._handles[entry.table, entry.keys] = self._number(line, r"handle (\d+)")
        self._rows[entry.table][entry.keys] = entry

    def delete(self, entry: twin.Entry) -> None:
        self._cli([f"table_delete {entry.table} {self._handles.pop((entry.table, entry.keys))}"])
        del self._rows[entry.table][entry.keys]

    def entries(self, table: str) -> list[twin.Entry]:
        return list(self._rows[table].values())

    def insert_group(self, group: int, copies: Any) -> None:
        self._cli([f"mc_mgrp_create {group}"])
        self._groups[group] = []
        for port, number in copies:
            handle = self._number(f"mc_node_create {number} {port}", r"handle (\d+)")
            self._cli([f"mc_node_associate {group} {handle}"])
            self._groups[group].append(handle)

    def delete_group(self, group: int) -> None:
        for handle in self._groups.pop(group):
            self._cli([f"mc_node_dissociate {group} {handle}", f"mc_node_destroy {handle}"])
        self._cli([f"mc_mgrp_destroy {group}"])

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
        if (_host(62),) not in self._rows["Aggregator.forward"]:
            every = [(replay.host(one).port, 0) for one in self.links]
            self.insert_group(4000, every)
            self.insert(twin.Entry("Aggregator.forward", (_host(62),), "Aggregator.flood", {"group": 4000}))
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
        lines = [
            f"register_read Aggregator.{register} {slot}"
            for slot in at
            for register in (
                *("slot_lease", "slot_tag", "slot_have", "slot_shape"),
                *(f"sum_{i:02x}" for i in range(self.block_words)),
            )
        ]
        lines += [f"register_read Aggregator.heart_{name} {place}" for name in ("lease", "heard")]
        lines += [f"register_read Aggregator.{name}_{i:x} {place}" for i in children for name in ("ack", "credit")]
        values = iter([int(value) for value in re.findall(r"\]\s*=\s*(\d+)", self._cli(lines))])
        slots = []
        for index, _ in enumerate(at):
            lease, tag, have, shape = (next(values) for _ in range(4))
            total = b"".join(next(values).to_bytes(4, "big") for _ in range(self.block_words))
            if lease == admitted["lease"]:
                slots.append(replay.slot_of(index, tag, have, shape, total))
        lease, heard = next(values), next(values)
        pairs = [[next(values), next(values)] for _ in children]
        current = lease == admitted["lease"]
        return {"slots": slots, "heart": [pairs[i] if current and heard >> i & 1 else None for i in children]}

    def _admitted(self, job: int) -> dict[str, int]:
        return self._rows["Aggregator.jobs"][(job,)].params

    def _number(self, line: str, pattern: str) -> int:
        said = self._cli([line])
        found = re.search(pattern, said)
        assert found is not None, f"{line}: {said}"
        return int(found[1])

    def _cli(self, lines: list[str]) -> str:
        command = ["simple_switch_CLI", "--thrift-port", str(self._thrift)]
        done = subprocess.run(command, input="\n".join(lines) + "\n", capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and not re.search(r"Error|Invalid", done.stdout), done.stdout + done.stderr
        return done.stdout


def _host(link: int) -> int:
    return replay.host(link).mac


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
