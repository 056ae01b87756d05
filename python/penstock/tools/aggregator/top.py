"""``penstock aggregator top``: what an aggregator or a server counts, as a table that lives."""

from __future__ import annotations

import contextlib
import json
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import click

from penstock.numbers import plural
from penstock.tools.aggregator.daemon import parse_address

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["command", "fetch", "render"]


@click.command("top")
@click.argument("address", default="127.0.0.1", metavar="[ADDR[:PORT]]")
@click.option("--once", is_flag=True, help="Print it once, without rates, and end.")
@click.option("--every", type=click.FloatRange(0.1), default=1.0, show_default=True, help="Seconds between two looks.")
def command(address: str, once: bool, every: float) -> None:
    """Show the jobs of the aggregator or server at ADDR, its workers, and what was refused; Ctrl-C ends it."""
    from rich.console import Console
    from rich.live import Live

    at = parse_address(address)
    now = fetch(at)
    console = Console()
    if once:
        console.print(render(now, None))
        return
    with contextlib.suppress(KeyboardInterrupt), Live(render(now, None), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(every)
            before, now = now, fetch(at)
            live.update(render(now, before), refresh=True)


def fetch(address: str) -> dict[str, Any]:
    """What the daemon at "ip:port" tells: ``about`` (GET /), ``counted`` (GET /jobs), ``time`` in seconds.

    Raises click.ClickException where no daemon answers.
    """
    from penstock.cluster import jobs

    try:
        with urllib.request.urlopen(f"http://{address}/", timeout=5) as answer:
            about = json.load(answer)
        if not isinstance(about, dict) or "penstock" not in about:
            raise click.ClickException(f"what answers at {address} is no aggregator or server of Penstock")
        counted = jobs.counted(address, timeout_s=5)
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise click.ClickException(
            f"no aggregator answers at {address}: {reason}. Start it with: penstock aggregator --listen {address}"
        ) from None
    return {"about": about, "counted": counted, "time": time.monotonic()}


def render(now: dict[str, Any], before: dict[str, Any] | None) -> RenderableType:
    """The answers of `fetch` as tables; with earlier answers, also the changes a second."""
    from rich import box
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table

    about, counted = now["about"], now["counted"]
    seconds = now["time"] - before["time"] if before else None
    socket, limits = counted["socket"], about["limits"]
    earlier = before["counted"]["socket"] if before else {}

    def rate(name: str, unit: float = 1.0) -> str:
        return "" if seconds is None else f" ({unit * (socket[name] - earlier[name]) / seconds:,.1f}/s)"

    head = (
        f"[bold]{about['role']}[/] {escape(about['udp'])}  penstock {about['penstock']}  {plural(about['shards'], 'shard')}"
        f"  up {about['uptime_s']:.0f} s"
        f"{'  [yellow]draining[/]' if about['draining'] else ''}\n"
        f"received {socket['received']:,}{rate('received')} in {socket['received_trains']:,} trains, "
        f"{socket['received_bytes'] / 1e9:,.3f} GB{rate('received_bytes', 8e-9).replace('/s', ' Gbit/s')}; "
        f"sent {socket['sent']:,}{rate('sent')}; lost for want of room {socket['kernel_dropped']:,}; "
        f"send blocked {socket['blocked']:,}, refused {socket['unsent']:,}"
        + (f"; [red]thrown away on purpose {socket['dropped_on_purpose']:,}[/]" if socket["dropped_on_purpose"] else "")
        + f"\nunauthenticated: {_reasons(counted['unauthenticated']) or 'none'}"
    )
    jobs = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    left = ("job", "refused")
    for name in (
        "job",
        "epoch",
        "slots",
        "MiB",
        "added",
        "/s",
        "sums",
        "again",
        "named",
        "abandoned",
        "refused",
        "silent",
    ):
        jobs.add_column(name, justify="left" if name in left else "right", overflow="fold")
    nodes = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in ("job", "node", "address", "workers", "packets", "GB", "added", "refused", "silent"):
        nodes.add_column(
            name, justify="right" if name in ("packets", "GB", "added", "silent") else "left", overflow="fold"
        )
    known = {(job["job"], job["epoch"]): job for job in before["counted"]["jobs"]} if before else {}
    for job in counted["jobs"]:
        last = known.get((job["job"], job["epoch"]))
        added = f"{(job['added'] - last['added']) / seconds:,.0f}" if last and seconds else ""
        jobs.add_row(
            f"{job['job']}{'' if job['keyed'] else ' [yellow]no key[/]'}",
            str(job["epoch"]),
            f"{job['waiting_slots']}/{job['slots']}",
            f"{job['memory_bytes'] / 2**20:,.1f}",
            f"{job['added']:,}",
            added,
            f"{job['completed']:,}",
            # A server does not count these: 0 would mislead.
            *(f"{job[name]:,}" if about["role"] == "aggregator" else "" for name in ("repeated", "named", "abandoned")),
            _reasons(job["refused"]),
            f"{job['silent_s']:.1f} s",
        )
        for node in job["nodes"]:
            silent = node["silent_s"]
            nodes.add_row(
                str(job["job"]),
                node["node"],
                escape(node["address"]),
                node["workers"] if node["node"] != "parent" else "",
                f"{node['packets']:,}",
                f"{node['bytes'] / 1e9:,.3f}",
                f"{node['added']:,}" if node["node"] != "parent" else "",
                _reasons(node["refused"]),
                "never heard" if silent is None else f"{silent:.1f} s",
            )
    slots = sum(job["slots"] for job in counted["jobs"])
    memory = sum(job["memory_bytes"] for job in counted["jobs"])
    room = (
        f"{len(counted['jobs'])} of {limits['jobs']} jobs, {slots:,} of {limits['slots']:,} slots, "
        f"{memory / 2**20:,.1f} of {limits['memory_bytes'] / 2**20:,.1f} MiB"
    )
    # Seldom, and then all that matters: what these workers reduce is wrong.
    alarms = [
        f"[red]job {job['job']}: {job['overflowed']:,} additions overflowed; a worker pushes integers above its share[/]"
        for job in counted["jobs"]
        if job["overflowed"]
    ]
    return Group(head, room, *alarms, jobs, nodes) if counted["jobs"] else Group(head, room)


def _reasons(counts: dict[str, int]) -> str:
    """Those that are not 0, the largest first."""
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items(), key=lambda one: -one[1]) if count)
