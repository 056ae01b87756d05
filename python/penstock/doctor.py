"""``penstock doctor``: does every pair of ranks reach each other, how fast, and what is in the way?

Under torchrun each rank runs it (``torchrun ... -m penstock doctor``) and rank 0 prints; alone it starts two ranks on
this machine.
"""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import socket
import statistics
import struct
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from penstock import config
from penstock.errors import PenstockError
from penstock.testbed.cluster import Loopback

__all__ = ["command"]


@click.command()
@click.option("--mebibytes", default=16, show_default=True, help="Bytes that each pair exchanges for the rate.")
@click.option("--timeout", default=60.0, show_default=True, help="Seconds to wait for all ranks.")
def command(mebibytes: int, timeout: float) -> None:
    """Check reachability, rate, MTU and limits between all pairs of ranks."""
    if "RANK" in os.environ:
        # Of a rank that is told to end nobody wants to read where it was.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
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
    sent, received = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
    # One pair at a time, so that a pair's rate is its own.
    for a in range(world):
        for b in range(a + 1, world):
            dist.barrier()
            if rank not in (a, b):
                continue
            other = b if rank == a else a
            seconds = [_exchange(dist, sent, received, other) for _ in range(_WARM_UP + _REPEATS)]
            rates[other] = size / statistics.median(seconds[_WARM_UP:])
    own: dict[str, Any] = {"rates": rates, "stats": stats(), "limits": _limits(), "host": socket.gethostname()}
    if warning := memory_warning(own["stats"]["peers"], _read("/proc/sys/kernel/yama/ptrace_scope")):
        own["limits"]["warnings"].append(warning)
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, own)
    if rank == 0:
        _print(everyone)
    return not any(one["limits"]["warnings"] for one in everyone)


def memory_warning(peers: list[dict[str, Any]], ptrace_scope: str) -> str | None:
    """What to say where Yama keeps ranks of one host from reading each other's memory; peers as in `penstock.torch.stats`."""
    refused = [str(peer["rank"]) for peer in peers if peer["medium"] == "local socket"]
    if not refused or ptrace_scope in ("", "0"):
        return None
    cure = (
        "start the ranks of a host with one launcher, as one user, or set PENSTOCK_PTRACER=any"
        if ptrace_scope == "1"
        else "set it to 1 (sysctl), or give the ranks CAP_SYS_PTRACE"
    )
    return (
        f"tensors of rank(s) {', '.join(refused)} on this host come through the local socket: kernel.yama.ptrace_scope is "
        f"{ptrace_scope}; {cure}"
    )


def _exchange(dist: Any, sent: Any, received: Any, other: int) -> float:
    """Both directions at once; the seconds that it took."""
    started = time.perf_counter()
    sending = dist.isend(sent, other)
    receiving = dist.irecv(received, other)
    sending.wait()
    receiving.wait()
    return time.perf_counter() - started


def _print(everyone: list[dict[str, Any]]) -> None:
    # A log file has room for whole lines; on a narrow terminal cells are folded. Nothing is cut.
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=_WIDTH_OF_FILES)
    pairs = _table("from", "to", "medium", "streams", "rate each way", "round trip", title="pairs of ranks")
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
    hosts = _table("rank", "open files", "locked memory", "congestion control", "interfaces (MTU)", title="limits")
    for rank, one in enumerate(everyone):
        limits = one["limits"]
        hosts.add_row(str(rank), limits["files"], limits["memlock"], limits["congestion"], limits["interfaces"])
    console.print(hosts)
    warnings = [f"rank {rank}: {text}" for rank, one in enumerate(everyone) for text in one["limits"]["warnings"]]
    for warning in warnings:
        console.print(f"[yellow]! {warning}[/]")
    if not warnings:
        console.print("[green]all pairs reach each other; nothing to mend[/]")


def _table(*columns: str, title: str) -> Table:
    return Table(*(Column(name, overflow="fold") for name in columns), title=title)


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
    command = [sys.executable, "-m", "penstock", "doctor", f"--mebibytes={mebibytes}", f"--timeout={timeout}"]
    console = Console()
    width = {"COLUMNS": str(console.width)} if console.is_terminal else {}
    interrupted = False

    def interrupt(*_: object) -> NoReturn:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    def show(_: int, line: str) -> None:
        if not interrupted:
            click.echo(line)

    signal.signal(signal.SIGINT, interrupt)
    try:
        with Loopback(hosts=1) as bed:
            return 1 if bed.run(command, ranks=2, env=width, on_line=show).returncode else 0
    except KeyboardInterrupt:
        click.echo("interrupted: both ranks have ended", err=True)
        return 128 + signal.SIGINT


# The first exchange touches fresh pages and finds the streams' rates; a single one may meet whatever else the machine does.
_WARM_UP, _REPEATS = 2, 7
_WIDTH_OF_FILES = 200
_SIOCGIFMTU = 0x8921
