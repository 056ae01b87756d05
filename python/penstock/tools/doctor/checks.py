"""Does every pair of ranks reach each other, how fast, and what is in the way on each host?"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import resource
import socket
import statistics
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from penstock.cluster.jobs import interface_mtu
from penstock.runtime import config
from penstock.tools.doctor import pairs

__all__ = ["check", "memory_warning", "names_warning", "rate_warning"]


def check(size: int) -> bool:
    """Every pair of the group, and this machine's limits; rank 0 prints. Whether there is nothing to mend."""
    import torch
    import torch.distributed as dist

    from penstock.torch import stats

    world = dist.get_world_size()
    rates: dict[int, float] = {}
    raw_rates: dict[int, float] = {}
    warnings, notes = [], []
    peers = {peer["rank"]: peer for peer in stats()["peers"]}
    sent, received = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
    for other in pairs.partners(dist):
        seconds = [pairs.exchange(dist, sent, received, other) for _ in range(pairs.WARM_UP + pairs.REPEATS)]
        rates[other] = size / statistics.median(seconds[pairs.WARM_UP :])
        if peers[other]["medium"] != "tcp":
            continue
        host = pairs.host_of(peers[other])
        try:
            raw_rates[other], flows = pairs.raw_rate(dist, size, other, host, len(peers[other]["streams"]))
        except OSError as error:
            notes.append(f"raw sockets to rank {other} could not be compared with: {error}")
            continue
        # Before and after the raw sockets, whose rate something else on the machine may have spared or met.
        seconds = [pairs.exchange(dist, sent, received, other) for _ in range(pairs.REPEATS)]
        rates[other] = max(rates[other], size / statistics.median(seconds))
        if warning := rate_warning(other, host, rates[other], raw_rates[other], flows):
            warnings.append(warning)
    own: dict[str, Any] = {
        "rates": rates,
        "raw_rates": raw_rates,
        "stats": stats(),
        "limits": _limits(),
        "host": socket.gethostname(),
        "notes": notes,
    }
    own["limits"]["warnings"] += warnings
    if warning := memory_warning(own["stats"]["peers"], _read("/proc/sys/kernel/yama/ptrace_scope")):
        own["limits"]["warnings"].append(warning)
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, own)
    if dist.get_rank() == 0:
        # Now that no other rank waits.
        if warning := names_warning({pairs.host_of(peer) for peer in peers.values()}):
            everyone[0]["limits"]["warnings"].append(warning)
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


def names_warning(addresses: Iterable[str]) -> str | None:
    """What to say where looking up a name takes long: torch's store, on rank 0's host, looks up that of every address that
    connects, one after the other. Takes a second or two at the most."""
    slow: list[str] = []

    def look_up() -> None:
        for address in sorted(addresses):
            # One question may be lost, and that is no slow name server.
            if min(_lookup_s(address), _lookup_s(address)) >= _SLOW_NAME_S:
                slow.append(address)
                return

    # A look-up cannot be interrupted, and may take a minute.
    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(_LOOK_UP_WITHIN_S)
    if not slow and not thread.is_alive():
        return None
    return (
        "the names of addresses are looked up slowly here, and torch's store looks up that of each rank that connects, one after "
        "the other: with any backend a job starts seconds later. Mend the name server (/etc/resolv.conf), write the ranks' hosts "
        "into /etc/hosts, or set RES_OPTIONS='timeout:1 attempts:1' where the store runs (rank 0, or torchrun)"
    )


def _lookup_s(address: str) -> float:
    host = address.strip("[]")
    began = time.monotonic()
    with contextlib.suppress(OSError):
        # The store listens on IPv6, where addresses of IPv4 look like this.
        socket.getnameinfo((host if ":" in host else f"::ffff:{host}", 0), socket.NI_NUMERICSERV)
    return time.monotonic() - began


def rate_warning(other: int, host: str, rate: float, raw_rate: float, flows: int) -> str | None:
    """What to say where Penstock carries much less to another rank than raw sockets do; rates in bytes per second. Where the
    processors are the limit (loopback, or a link that is faster than they are) the comparison says nothing: raw sockets throw
    away what they receive."""
    is_fair = not ipaddress.ip_address(host.partition("%")[0]).is_loopback and raw_rate < _PROCESSORS_LIMIT
    if rate >= _LEAST_SHARE * raw_rate or not is_fair:
        return None
    each_way = f"{rate * 8 / 1e9:.3f} against {raw_rate * 8 / 1e9:.3f} Gbit/s each way"
    return (
        f"to rank {other} Penstock carries {rate / raw_rate:.0%} of what {flows} raw TCP sockets carry ({each_way}). Run it "
        "again with --mebibytes=256; if it stays, other settings of PENSTOCK_STREAMS and PENSTOCK_SOCKET_BUFFER may help, and "
        "`penstock bench` shows by how much"
    )


def _print(everyone: list[dict[str, Any]]) -> None:
    # A log file has room for whole lines; on a narrow terminal cells are folded. Nothing is cut.
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=_WIDTH_OF_FILES)
    table = _table(
        "from", "to", "medium", "streams", "rate each way", "raw sockets", "round trip", title="pairs of ranks"
    )
    for rank, one in enumerate(everyone):
        for peer in sorted(one["stats"]["peers"], key=lambda peer: peer["rank"]):
            rate = one["rates"].get(peer["rank"], 0.0)
            raw_rate = one["raw_rates"].get(peer["rank"])
            trips = [stream["round_trip_s"] for stream in peer["streams"] if stream["round_trip_s"]]
            table.add_row(
                f"{rank} ({one['host']})",
                escape(f"{peer['rank']} ({peer['address']})"),
                peer["medium"],
                str(len(peer["streams"])),
                f"{rate * 8 / 1e9:.3f} Gbit/s ({rate / 1e9:.3f} GB/s)",
                f"{raw_rate * 8 / 1e9:.3f} Gbit/s" if raw_rate else "-",
                f"{min(trips) * 1e3:.3f} ms" if trips else "-",
            )
    console.print(table)
    hosts = _table("rank", "open files", "locked memory", "congestion control", "interfaces (MTU)", title="limits")
    for rank, one in enumerate(everyone):
        limits = one["limits"]
        hosts.add_row(str(rank), limits["files"], limits["memlock"], limits["congestion"], limits["interfaces"])
    console.print(hosts)
    warnings = [f"rank {rank}: {text}" for rank, one in enumerate(everyone) for text in one["limits"]["warnings"]]
    for warning in warnings:
        console.print(f"[yellow]! {warning}[/]")
    for rank, one in enumerate(everyone):
        for note in one["notes"]:
            console.print(f"rank {rank}: {note}")
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
    interfaces = [f"{name} ({mtu})" for _, name in socket.if_nameindex() if (mtu := interface_mtu(name))]
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


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


# Penstock reaches 0.98 of raw sockets and more (docs/benchmarks, "Fresh jobs on a link"); jobs in a slow state had 0.65 to 0.8.
_LEAST_SHARE = 0.8
# A name server that answers takes milliseconds; glibc waits 5 s for one that does not.
_SLOW_NAME_S, _LOOK_UP_WITHIN_S = 0.5, 2.0
# Bytes per second each way: more than a link of 10 Gbit/s carries, and about what two cores move in memory.
_PROCESSORS_LIMIT = 1.5e9
_WIDTH_OF_FILES = 200
