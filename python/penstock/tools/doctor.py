"""``penstock doctor``: does every pair of ranks reach each other, how fast, and what is in the way?

Under torchrun each rank runs it (``torchrun ... -m penstock doctor``) and rank 0 prints; alone it starts two ranks on
this machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import itertools
import os
import resource
import signal
import socket
import statistics
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from penstock.errors import Config as ConfigError
from penstock.errors import PenstockError
from penstock.files import write_whole
from penstock.numbers import bit_rate
from penstock.runtime import config
from penstock.tools import links
from penstock.tools.bench.mesh import STALL_S, Mesh
from penstock.tools.testbed.bed import Loopback

__all__ = ["command"]


@click.command()
@click.option(
    "--mebibytes",
    default=16,
    show_default=True,
    type=click.IntRange(min=1),
    help="Bytes that each pair exchanges for the rate.",
)
@click.option(
    "--timeout",
    default=60.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds to wait for all ranks.",
)
@click.option("--links", "measures_links", is_flag=True, help="Instead measure links, and write a cluster file.")
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="The file, with --links; rank 0 writes it.")
@click.option("--server", "servers", type=click.IntRange(0), multiple=True, help="A rank whose host is a server's.")
@click.option(
    "--aggregator", "aggregators", type=click.IntRange(0), multiple=True, help="... an aggregator's. Repeatable."
)
def command(
    mebibytes: int,
    timeout: float,
    measures_links: bool,
    output: str | None,
    servers: tuple[int, ...],
    aggregators: tuple[int, ...],
) -> None:
    """Check reachability, rate, MTU and limits between all pairs of ranks.

    With --links raw sockets measure every pair of hosts alone, and all hosts at once; what comes out is a cluster file that
    `penstock plan` takes (docs/guide/plan.md).
    """
    if measures_links != (output is not None):
        raise click.UsageError("--links and -o FILE go together: the file takes what was measured")
    if (servers or aggregators) and not measures_links:
        raise click.UsageError("--server and --aggregator say what a cluster file has where: give --links too")
    if "RANK" in os.environ:
        # A traceback of a rank that was told to end helps no user.
        signal.signal(signal.SIGINT, signal.SIG_DFL)

        def check() -> bool:
            if output is None:
                return _check(mebibytes << 20)
            return _measure_links(mebibytes << 20, output, servers, aggregators)

        sys.exit(0 if _run(check, timeout) else 1)
    if measures_links:
        raise click.UsageError(
            "RANK is not set: start it on all hosts, with torchrun ... -m penstock doctor --links -o FILE"
        )
    click.echo("RANK is not set: checking two ranks on this machine. For a cluster: torchrun ... -m penstock doctor")
    sys.exit(_start_two(mebibytes, timeout))


def _run(check: Callable[[], bool], timeout: float) -> bool:
    import torch.distributed as dist

    try:
        dist.init_process_group("penstock", timeout=timedelta(seconds=timeout))
    except (PenstockError, dist.DistError, ValueError) as error:
        # What a rank cannot reach stands in its own error; every rank says its own.
        click.echo(f"rank {os.environ['RANK']}: {type(error).__name__}: {str(error).splitlines()[0]}", err=True)
        return False
    try:
        return check()
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

    world = dist.get_world_size()
    rates: dict[int, float] = {}
    raw_rates: dict[int, float] = {}
    warnings, notes = [], []
    peers = {peer["rank"]: peer for peer in stats()["peers"]}
    sent, received = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
    for other in _partners(dist):
        seconds = [_exchange(dist, sent, received, other) for _ in range(_WARM_UP + _REPEATS)]
        rates[other] = size / statistics.median(seconds[_WARM_UP:])
        if peers[other]["medium"] != "tcp":
            continue
        host = _host_of(peers[other])
        try:
            raw_rates[other], flows = _raw_rate(dist, size, other, host, len(peers[other]["streams"]))
        except OSError as error:
            notes.append(f"raw sockets to rank {other} could not be compared with: {error}")
            continue
        # Before and after the raw sockets, whose rate something else on the machine may have spared or met.
        seconds = [_exchange(dist, sent, received, other) for _ in range(_REPEATS)]
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
        if warning := names_warning({peer["address"].rsplit(":", 1)[0] for peer in peers.values()}):
            everyone[0]["limits"]["warnings"].append(warning)
        _print(everyone)
    return not any(one["limits"]["warnings"] for one in everyone)


def _partners(dist: Any) -> Iterator[int]:
    """The ranks that make a pair with this one, one pair of the group at a time: so a pair's rate is its own. Collective."""
    rank = dist.get_rank()
    for pair in itertools.combinations(range(dist.get_world_size()), 2):
        dist.barrier()
        if rank in pair:
            yield pair[0] if rank == pair[1] else pair[1]


def _host_of(peer: dict[str, Any]) -> str:
    """A peer's address without its port."""
    return str(peer["address"].rsplit(":", 1)[0].strip("[]"))


def _measure_links(size: int, output: str, servers: Sequence[int], aggregators: Sequence[int]) -> bool:
    """Raw sockets between all pairs of hosts, and rank 0 writes the cluster file."""
    import torch.distributed as dist

    from penstock.cluster import file
    from penstock.torch import stats

    rank, world = dist.get_rank(), dist.get_world_size()
    peers = {peer["rank"]: peer for peer in stats()["peers"]}
    far = {other: peer for other, peer in peers.items() if peer["medium"] == "tcp"}
    hosts = {other: _host_of(peer) for other, peer in far.items()}
    notes = []
    rates: dict[int, float] = {}
    for other in _partners(dist):
        if other in far:
            try:
                rates[other], _ = _raw_rate(dist, size, other, hosts[other], len(far[other]["streams"]))
            except OSError as error:
                notes.append(f"rank {rank} to rank {other}: {error}")
    address, mtu = links.own_address(next(iter(hosts.values()))) if hosts else ("127.0.0.1", 1500)
    trips = {
        other: min((stream["round_trip_s"] for stream in peer["streams"] if stream["round_trip_s"]), default=0.0)
        for other, peer in far.items()
    }
    settings = config.read()
    together = links.together_s(dist, address, size, settings.streams, settings.port_range)
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, (links.Seen(socket.gethostname(), address, mtu, rates, trips), together, notes))
    if rank != 0:
        return True
    slowest = max((one[1] for one in everyone if one[1] is not None), default=None)
    seen = [one[0] for one in everyone]
    notes = [note for one in everyone for note in one[2]]
    try:
        cluster, unexplained = links.cluster_of(
            seen, servers=servers, aggregators=aggregators, together=slowest, size=size
        )
        said = [f"# Measured by `penstock doctor --links`, {time.strftime('%Y-%m-%d %H:%M')}, {world} ranks"]
        said += [f"# {note}" for note in (*unexplained, *notes)]
        write_whole(Path(output), "\n".join(said) + "\n" + file.dump(cluster))
    except (ConfigError, OSError) as error:
        click.echo(f"{output} was not written: {error}", err=True)
        return False
    for link in cluster.links:
        rate = bit_rate(link.rate_bit_s or 0)
        click.echo(f"{link.name:>20}  {rate:>18}  {link.delay_ns / 1e6:.2f} ms")
    for note in (*unexplained, *notes):
        click.echo(f"! {note}")
    click.echo(f"{output} is the cluster: penstock plan {output}")
    return True


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


def _exchange(dist: Any, sent: Any, received: Any, other: int) -> float:
    """Both directions at once; the seconds that it took."""
    started = time.perf_counter()
    sending = dist.isend(sent, other)
    receiving = dist.irecv(received, other)
    sending.wait()
    receiving.wait()
    return time.perf_counter() - started


def _raw_rate(dist: Any, size: int, other: int, host: str, streams: int) -> tuple[float, int]:
    """Bytes per second each way that plain TCP sockets carry to another rank, and how many sockets: ``streams``, or the other
    rank's number if that is lower.

    Raises: OSError, where they cannot connect (only the ports of PENSTOCK_PORT_RANGE may be open) or stall. The other rank then
    has the same.
    """
    rank = dist.get_rank()
    mesh, trouble = None, "the other rank cannot listen"
    try:
        # The route to the other rank's address says which of our own addresses it reaches.
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            mesh = Mesh(int(rank > other), 2, probe.getsockname()[0], config.read().port_range)
    except OSError as error:
        trouble = str(error)
    try:
        own: list[Any] = [mesh and mesh.address, streams]
        theirs: list[Any] = [None, None]
        if rank < other:
            dist.send_object_list(own, other)
            dist.recv_object_list(theirs, other)
        else:
            dist.recv_object_list(theirs, other)
            dist.send_object_list(own, other)
        if mesh is None or theirs[0] is None:
            raise OSError(trouble)
        flows = min(own[1], theirs[1])
        mesh.connect([own[0], theirs[0]] if rank < other else [theirs[0], own[0]], flows)
        # A host that vanishes says nothing.
        mesh.pairs[int(rank < other)].control.settimeout(STALL_S)
        seconds = []
        for _ in range(_WARM_UP + _REPEATS):
            transfer = mesh.transfer({(0, 1): size, (1, 0): size}, flows, "pull")
            mesh.barrier()
            started = time.perf_counter()
            transfer.run()
            seconds.append(time.perf_counter() - started)
        mesh.barrier()
        return size / statistics.median(seconds[_WARM_UP:]), flows
    finally:
        if mesh is not None:
            mesh.close()


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
    pairs = _table(
        "from", "to", "medium", "streams", "rate each way", "raw sockets", "round trip", title="pairs of ranks"
    )
    for rank, one in enumerate(everyone):
        for peer in sorted(one["stats"]["peers"], key=lambda peer: peer["rank"]):
            rate = one["rates"].get(peer["rank"], 0.0)
            raw_rate = one["raw_rates"].get(peer["rank"])
            trips = [stream["round_trip_s"] for stream in peer["streams"] if stream["round_trip_s"]]
            pairs.add_row(
                f"{rank} ({one['host']})",
                escape(f"{peer['rank']} ({peer['address']})"),
                peer["medium"],
                str(len(peer["streams"])),
                f"{rate * 8 / 1e9:.3f} Gbit/s ({rate / 1e9:.3f} GB/s)",
                f"{raw_rate * 8 / 1e9:.3f} Gbit/s" if raw_rate else "-",
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
            return 1 if bed.run(command, ranks=2, launcher="fork", env=width, on_line=show).returncode else 0
    except KeyboardInterrupt:
        click.echo("interrupted: both ranks have ended", err=True)
        return 128 + signal.SIGINT


# The first exchange touches fresh pages and finds the streams' rates; a single one may meet whatever else the machine does.
_WARM_UP, _REPEATS = 2, 7
# Penstock reaches 0.98 of raw sockets and more (docs/benchmarks, "Fresh jobs on a link"); jobs in a slow state had 0.65 to 0.8.
_LEAST_SHARE = 0.8
# A name server that answers takes milliseconds; glibc waits 5 s for one that does not.
_SLOW_NAME_S, _LOOK_UP_WITHIN_S = 0.5, 2.0
# Bytes per second each way: more than a link of 10 Gbit/s carries, and about what two cores move in memory.
_PROCESSORS_LIMIT = 1.5e9
_WIDTH_OF_FILES = 200
_SIOCGIFMTU = 0x8921
