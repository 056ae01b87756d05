"""``penstock doctor``: does every pair of ranks reach each other, how fast, and what is in the way?

Under torchrun each rank runs it (``torchrun ... -m penstock doctor``) and rank 0 prints; alone it starts two ranks on
this machine.
"""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import struct
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from penstock import config
from penstock.errors import PenstockError

__all__ = ["command"]


@click.command()
@click.option("--mebibytes", default=16, show_default=True, help="Bytes that each pair exchanges for the rate.")
@click.option("--timeout", default=60.0, show_default=True, help="Seconds to wait for all ranks.")
def command(mebibytes: int, timeout: float) -> None:
    """Check reachability, rate, MTU and limits between all pairs of ranks."""
    if "RANK" in os.environ:
        healthy = _run(mebibytes << 20, timeout)
        sys.exit(0 if healthy else 1)
    click.echo("RANK is not set: checking two ranks on this machine. For a cluster: torchrun ... -m penstock doctor")
    sys.exit(_start_two(mebibytes, timeout))


def _run(size: int, timeout: float) -> bool:
    import torch.distributed as dist

    try:
        dist.init_process_group("penstock", timeout=timedelta(seconds=timeout))
    except (PenstockError, dist.DistError, ValueError) as error:
        # What a rank cannot reach stands in its own error; every rank says its own.
        click.echo(f"rank {os.environ['RANK']}: {type(error).__name__}: {str(error).splitlines()[0]}", err=True)
        return False
    try:
        return _check(size)
    except PenstockError as error:
        click.echo(f"rank {os.environ['RANK']}: {type(error).__name__}: {error}", err=True)
        return False
    finally:
        # Also after an error: the other ranks then learn of it now, and not from their time-out.
        dist.destroy_process_group()


def _check(size: int) -> bool:
    """Every pair of the group, and this machine's limits; rank 0 prints. Whether there is nothing to mend."""
    import torch
    import torch.distributed as dist

    from penstock.torch import stats

    rank, world = dist.get_rank(), dist.get_world_size()
    rates: dict[int, float] = {}
    block = torch.zeros(size, dtype=torch.uint8)
    # One pair at a time, so that a pair's rate is its own.
    for a in range(world):
        for b in range(a + 1, world):
            dist.barrier()
            if rank not in (a, b):
                continue
            other = b if rank == a else a
            _exchange(dist, torch, block[: min(size, 1 << 20)], other)
            started = time.perf_counter()
            _exchange(dist, torch, block, other)
            rates[other] = size / (time.perf_counter() - started)
    own: dict[str, Any] = {"rates": rates, "stats": stats(), "limits": _limits(), "host": socket.gethostname()}
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, own)
    if rank == 0:
        _print(everyone)
    return not any(one["limits"]["warnings"] for one in everyone)


def _exchange(dist: Any, torch: Any, block: Any, other: int) -> None:
    """Both directions at once."""
    received = torch.empty_like(block)
    sending = dist.isend(block, other)
    receiving = dist.irecv(received, other)
    sending.wait()
    receiving.wait()


def _print(everyone: list[dict[str, Any]]) -> None:
    console = Console()
    pairs = Table("from", "to", "medium", "streams", "rate each way", "round trip", title="pairs of ranks")
    for rank, one in enumerate(everyone):
        for peer in sorted(one["stats"]["peers"], key=lambda peer: peer["rank"]):
            rate = one["rates"].get(peer["rank"], 0.0)
            trips = [stream["round_trip_s"] for stream in peer["streams"] if stream["round_trip_s"]]
            pairs.add_row(
                f"{rank} ({one['host']})",
                escape(f"{peer['rank']} ({peer['address']})"),
                peer["medium"],
                str(len(peer["streams"])),
                f"{rate * 8 / 1e9:.3f} Gbit/s ({rate / 1e9:.3f} GB/s)",
                f"{min(trips) * 1e3:.3f} ms" if trips else "-",
            )
    console.print(pairs)
    hosts = Table("rank", "open files", "locked memory", "congestion control", "interfaces (MTU)", title="limits")
    for rank, one in enumerate(everyone):
        limits = one["limits"]
        hosts.add_row(str(rank), limits["files"], limits["memlock"], limits["congestion"], limits["interfaces"])
    console.print(hosts)
    warnings = [f"rank {rank}: {text}" for rank, one in enumerate(everyone) for text in one["limits"]["warnings"]]
    for warning in warnings:
        console.print(f"[yellow]! {warning}[/]")
    if not warnings:
        console.print("[green]all pairs reach each other; nothing to mend[/]")


def _limits() -> dict[str, Any]:
    # The engine raises the soft limit itself, as far as a job needs.
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    congestion = _read("/proc/sys/net/ipv4/tcp_congestion_control")
    wmem = _read("/proc/sys/net/ipv4/tcp_wmem").split()
    interfaces = [f"{name} ({mtu})" for _, name in socket.if_nameindex() if (mtu := _mtu(name))]
    warnings = []
    if files != resource.RLIM_INFINITY and files < 4096:
        streams = config.read().streams
        warnings.append(
            f"at most {files} open files are allowed (hard limit), and each rank on another host needs {streams} "
            f"(PENSTOCK_STREAMS): enough for about {max(0, files - 256) // streams}. Raise it (ulimit -Hn 65536)"
        )
    if wmem and int(wmem[-1]) < 1 << 20:
        warnings.append(f"net.ipv4.tcp_wmem allows {wmem[-1]} bytes a stream; set its maximum to 4194304 or more")
    return {
        "files": "unlimited" if files == resource.RLIM_INFINITY else str(files),
        "memlock": "unlimited" if memlock == resource.RLIM_INFINITY else str(memlock),
        "congestion": congestion or "unknown",
        "interfaces": ", ".join(interfaces),
        "warnings": warnings,
    }


def _mtu(name: str) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFMTU, struct.pack("16si12x", name.encode(), 0))
        except OSError:
            return 0
    return int(struct.unpack("16si12x", answer)[1])


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _start_two(mebibytes: int, timeout: float) -> int:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "penstock"]
    process = subprocess.Popen([*command, "doctor", f"--mebibytes={mebibytes}", f"--timeout={timeout}"])
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        return 130


_SIOCGIFMTU = 0x8921
