"""``penstock testbed up | run | down | show``."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import click
from rich.console import Console
from rich.table import Table

from penstock.testbed import cluster
from penstock.testbed.cluster import Bed, Loopback, Testbed, TestbedUnavailable
from penstock.testbed.link import FlowClass, LinkSpec

Function = TypeVar("Function", bound=Callable[..., Any])


@click.group(name="testbed")
def command() -> None:
    """Emulate a cluster on this machine: hosts, a switch, rates, loss, delay.

    Hosts are network namespaces, so what runs on them is real, and so is their TCP. Needs root. Example:

    penstock testbed run -n 2 --hosts 2 --rate 1000 --flow 200 -- python train.py
    """


def link_options(function: Function) -> Function:
    """The options that describe hosts and links, the same for every command that makes them."""
    options = [
        click.option("--hosts", type=click.IntRange(1, cluster.MOST_HOSTS), default=2, show_default=True),
        click.option("--rate", type=float, default=1000.0, show_default=True, help="Mbit/s of a link; 0: no limit."),
        click.option("--flow", default="", help="Mbit/s that one flow gets at most; several, by turns: 60,300."),
        click.option("--loss", type=float, default=0.0, help="Share of packets lost, such as 0.001."),
        click.option("--delay", type=float, default=0.0, help="Milliseconds from host to host, one way."),
        click.option("--mtu", type=int, default=1500, show_default=True),
        click.option(
            "--offloads/--no-offloads",
            default=None,
            help="Whether packets of 64 KiB cross links whole, to save CPU time.  [default: yes, unless --loss]",
        ),
    ]
    for option in reversed(options):
        function = option(function)
    return function


@command.command()
@click.option("--name", default="default", show_default=True)
@link_options
def up(name: str, **options: Any) -> None:
    """Make a testbed that stays until `down`."""
    hosts, link = _read_options(options)
    try:
        cluster.state_path(name)
        with Testbed(hosts=hosts, link=link, name=name) as bed:
            bed.keep()
            _print_hosts(bed)
    except FileExistsError:
        _fail(f"a testbed '{name}' is up already: `penstock testbed down --name {name}` ends it")
    except (TestbedUnavailable, ValueError) as error:
        _fail(str(error))


@command.command(context_settings={"ignore_unknown_options": True})
@click.option("-n", "--ranks", type=click.IntRange(1), default=None, help="Ranks in all.  [default: one a host]")
@click.option("--name", default=None, help="Run on the testbed that is up under this name, and take its links.")
@click.option(
    "--launcher",
    type=click.Choice(["direct", "torchrun"]),
    default="direct",
    show_default=True,
    help="Who starts the ranks. torchrun gives the environment of a real cluster, and takes seconds longer.",
)
@click.option("--timeout", type=float, default=None, help="Seconds, for all of it.")
@click.option("--quiet", is_flag=True, help="Only what the ranks print.")
@link_options
@click.argument("argv", nargs=-1, required=True, metavar="-- COMMAND...", type=click.UNPROCESSED)
def run(
    ranks: int | None,
    name: str | None,
    launcher: str,
    timeout: float | None,
    quiet: bool,
    argv: tuple[str, ...],
    **options: Any,
) -> None:
    """Run a command as ranks on the hosts of a testbed.

    The testbed is made for this run, unless --name is given. Each line of output is preceded by its rank. The exit
    code is that of the first rank to fail (128 + signal, if it was killed).
    """
    hosts, link = _read_options(options)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with _open_bed(name, hosts, link) as bed:
            done = bed.run(
                argv,
                ranks=ranks or bed.hosts,
                launcher=launcher,
                timeout_s=timeout,
                on_line=_print_line,
            )
            if not quiet:
                _print_traffic(done.counters, done.flows, done.wall_s)
                click.echo(f"{done.wall_s:.1f} s, processors {done.cpu_share:.0%} busy", err=True)
    except (TestbedUnavailable, LookupError, ValueError, FileNotFoundError) as error:
        _fail(str(error))
    except TimeoutError as error:
        _fail(str(error), code=124)
    except KeyboardInterrupt:
        _fail("interrupted: every process of the run has ended", code=130)
    if done.failed_rank is not None:
        click.echo(f"rank {done.failed_rank} was the first to fail: {_describe_code(done.returncode)}", err=True)
    sys.exit(done.returncode if done.returncode >= 0 else 128 - done.returncode)


@command.command()
@click.option("--name", default="default", show_default=True)
@click.option("--all", "everything", is_flag=True, help="Every testbed that is up.")
def down(name: str, everything: bool) -> None:
    """End a testbed that `up` made, and every process in it."""
    try:
        for each in sorted(cluster.read_states()) if everything else [name]:
            cluster.take_down(each)
            click.echo(f"testbed '{each}' is gone")
    except (LookupError, TimeoutError, PermissionError) as error:
        _fail(str(error))


@command.command()
@click.option("--name", default=None, help="[default: all]")
def show(name: str | None) -> None:
    """Print the testbeds that are up: hosts, traffic, flows by class."""
    names = [name] if name else sorted(cluster.read_states())
    if not names:
        click.echo("no testbed is up: `penstock testbed up` makes one")
    for each in names:
        try:
            with Testbed.attach(each) as bed:
                _print_hosts(bed)
                _print_traffic(bed.counters(), bed.flows(), None)
        except (LookupError, PermissionError) as error:
            _fail(str(error))


def _read_options(options: dict[str, Any]) -> tuple[int, LinkSpec]:
    try:
        caps = [float(each) for each in options["flow"].split(",") if each.strip()]
        link = LinkSpec(
            rate_mbit=options["rate"] or None,
            flow_mbit=caps if len(caps) > 1 else caps[0] if caps else None,
            loss=options["loss"],
            delay_ms=options["delay"],
            mtu=options["mtu"],
            offloads=options["offloads"],
        )
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    return options["hosts"], link


def _open_bed(name: str | None, hosts: int, link: LinkSpec) -> Bed:
    if name is not None:
        return Testbed.attach(name)
    try:
        return Testbed(hosts=hosts, link=link)
    except TestbedUnavailable as error:
        click.echo(
            f"No testbed: {error}\nThe ranks run on loopback instead, without any of the link's limits.", err=True
        )
        return Loopback(hosts=hosts)


def _print_line(rank: int, line: str) -> None:
    print(f"[{rank}] {line}" if rank >= 0 else f"[host {-1 - rank}] {line}", flush=True)


def _print_hosts(bed: Testbed) -> None:
    name = f"testbed '{bed.name}': " if bed.name else ""
    click.echo(f"{name}{bed.hosts} hosts, {bed.link.describe()}")
    for host in range(bed.hosts):
        click.echo(f"  host {host}  {bed.address(host)}  {bed.address(host, 6)}")


def _print_traffic(
    counters: dict[int, dict[str, int]], flows: dict[int, list[FlowClass]], wall_s: float | None
) -> None:
    """To standard error, so that a run's own output can be piped on."""
    console = Console(stderr=True)
    table = Table("host", "sent MB", "received MB", "sent Mbit/s", "dropped")
    for host, each in counters.items():
        rate = "" if wall_s is None else f"{each['tx_bytes'] * 8e-6 / wall_s:.0f}"
        dropped = each["tx_dropped"] + each["rx_dropped"]
        table.add_row(str(host), f"{each['tx_bytes'] / 1e6:.3f}", f"{each['rx_bytes'] / 1e6:.3f}", rate, str(dropped))
    console.print(table)
    if not any(flows.values()):
        return
    table = Table("class", "cap Mbit/s", *[f"host {host} sent MB (flows)" for host in flows])
    for index, sent in enumerate(zip(*flows.values(), strict=True)):
        if any(each.bytes or each.flows for each in sent):
            cells = [f"{each.bytes / 1e6:.3f} ({each.flows})" for each in sent]
            table.add_row(str(index), f"{sent[0].cap_mbit:g}", *cells)
    console.print(table)


def _describe_code(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _fail(message: str, *, code: int = 1) -> NoReturn:
    click.echo(f"penstock testbed: {message}", err=True)
    sys.exit(code)
