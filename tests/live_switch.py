"""Hosts in network namespaces, joined by a switch that adds: the P4 program's twin, frame by frame, or bmv2 where that is
installed.

It is a testbed whose bridge has gone, and on the bridge's ports the switch. The deployment names `p4/control.py`, which
opens jobs; it reaches the switch's P4Runtime over a Unix socket, which no namespace hides."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import pathlib
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import bmv2
from penstock.tools.testbed import LinkSpec, Testbed, namespace, system

ROOT = pathlib.Path(__file__).resolve().parent.parent
UDP_PORT = 7471
MAC = "02:00:00:00:fe:01"
ETHTOOL_STXCSUM = 0x17  # linux/ethtool.h


class LiveSwitch:
    """The switch and its hosts.

    Attributes:
        bed: the hosts.
        address: where the switch takes blocks.
        command: what opens jobs there, for a deployment.
    """

    def __init__(self, bed: Testbed, process: subprocess.Popen[str], folder: pathlib.Path, block_words: int) -> None:
        self.bed, self._process, self._folder = bed, process, folder
        self.address = f"{_ip(bed)}:{UDP_PORT}"
        self.command = [sys.executable, str(ROOT / "p4" / "control.py"), "--switch", f"unix:{folder / 'p4.sock'}"]
        self.command += ["--p4info", str(folder / "p4info.txt"), "--ports", str(folder / "ports.json")]
        self.command += ["--block-words", str(block_words)]

    def control(self, *words: str) -> str:
        """A verb of control.py: what it says."""
        done = subprocess.run([*self.command, *words], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def ask(self, question: str) -> Any:
        """What the twin answers (tests/p4runtime_twin.py)."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(question + "\n")
        return json.loads(self._process.stdout.readline())


@contextlib.contextmanager
def live_switch(
    hosts: int,
    folder: pathlib.Path,
    *,
    block_words: int,
    program: pathlib.Path | None,
    drop: float = 0.0,
    seed: int = 0,
) -> Iterator[LiveSwitch]:
    """Hosts, and between them the compiled `program` on bmv2, or without one the twin, which loses `drop` of all UDP."""
    with Testbed(hosts=hosts, link=LinkSpec(rate_mbit=None, offloads=False)) as bed, contextlib.ExitStack() as stack:
        ports = {name: number + 1 for number, name in enumerate(bed.topology.nodes)}
        at = bed._held("core")
        bed._ip(at, [f"link set {name} nomaster" for name in ports] + ["link del switch"])
        for name in ports:
            held = bed._namespaces[bed.topology.number(name)]
            bed._ip(held, [f"neigh add {_ip(bed)} lladdr {MAC} nud permanent dev {bed.interface}"])
            # A veth device hands over unfinished checksums, which no wire carries.
            namespace.inside(held, lambda: _finish_checksums(bed.interface))
        places = {bed.address(name): {"mac": bed.topology.mac(name), "port": port} for name, port in ports.items()}
        own = {"address": f"{_ip(bed)}:{UDP_PORT}", "mac": MAC, "hosts": places}
        (folder / "ports.json").write_text(json.dumps(own))
        listen = f"unix:{folder / 'p4.sock'}"
        if program is None:
            command = [sys.executable, str(ROOT / "tests" / "p4runtime_twin.py"), str(folder / "p4info.txt")]
            command += [f"{port}={name}" for name, port in ports.items()]
            command += ["--listen", listen, "--block-words", str(block_words), "--drop", str(drop), "--seed", str(seed)]
        else:
            (folder / "p4info.txt").write_text(program.with_suffix(".p4info.txt").read_text())
            command = ["simple_switch_grpc", "--no-p4", "--log-level", "off"]
            command += [word for name, port in ports.items() for word in ("-i", f"{port}@{name}")]
            command += ["--", "--grpc-server-addr", listen]
        env = os.environ | bed.environment() | {"PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"}
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "p4"), *sys.path])
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        process = namespace.inside(at, lambda: subprocess.Popen(command, env=env, **pipes))
        stack.callback(_end, process)
        switch = LiveSwitch(bed, process, folder, block_words)
        if program is None:
            assert process.stdout is not None and process.stdout.readline(), "the twin did not start"
        else:
            _await_socket(folder / "p4.sock", process)
            switch.control("load", str(program))
        switch.control("setup")
        yield switch


def unavailable(program: bool) -> str | None:
    """Why there can be no such switch here: the twin's, or with `program` that of the compiled one."""
    return system.unavailable() or (bmv2.missing((*bmv2.TOOLS, "simple_switch_grpc")) if program else None)


def _ip(bed: Testbed) -> str:
    return bed.address(0).rpartition(".")[0] + ".254"


def _finish_checksums(interface: str) -> None:
    with socket.socket() as handle:
        value = ctypes.create_string_buffer(struct.pack("=II", ETHTOOL_STXCSUM, 0))
        request = struct.pack("@16sP16x", interface.encode(), ctypes.addressof(value))
        fcntl.ioctl(handle, system.SIOCETHTOOL, request)


def _await_socket(path: pathlib.Path, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + bmv2.DEADLINE_S
    while True:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(path))
            return
        assert process.poll() is None and time.monotonic() < end, "simple_switch_grpc does not listen"
        select.select([], [], [], 0.05)


def _end(process: subprocess.Popen[str]) -> None:
    with process:
        process.kill()
