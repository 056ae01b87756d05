"""``penstock testbed up | run | down | show | links | route | write``."""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click
from click.core import ParameterSource
from rich.console import Console
from rich.table import Table

from penstock import files
from penstock.cluster import file as cluster_file
from penstock.cluster import generate
from penstock.cluster.network import Cluster
from penstock.errors import Config as ConfigError
from penstock.tools.commands import Group
from penstock.tools.testbed import carry, kept, topology
from penstock.tools.testbed.bed import Bed, Loopback
from penstock.tools.testbed.cluster import GONE, Testbed
from penstock.tools.testbed.link import FlowClass, LinkSpec
from penstock.tools.testbed.system import TestbedUnavailable
from penstock.tools.testbed.topology import LinkTraffic
from penstock.tools.testbed.wiring import Wiring

Function = TypeVar("Function", bound=Callable[..., Any])


@click.group(name="testbed", cls=Group)
def command() -> None:
    """Emulate a cluster on this machine: hosts, a switch, rates, loss, delay.

    Hosts are network namespaces, so what runs on them is real, and so is their TCP. Needs root. Example:

    penstock testbed run -n 2 --hosts 2 --rate 1000 --flow 200 -- python train.py

    With --racks the hosts are dealt to racks, each with a switch and a place for an aggregator (a0, a1, ...), and servers
    (s0, ...) are on the switch between them:

    penstock testbed up --hosts 4 --racks 2 --servers 1

    All of this, and more, can be said in a cluster file (docs/reference/cluster-file.md), which `write` makes:

    penstock testbed up --cluster cluster.yaml
    """


def link_options(function: Function) -> Function:
    """The options that describe hosts and links, the same for every command that makes them."""
    options = [
        click.option(
            "--cluster",
            metavar="FILE",
            default=None,
            help="A cluster file, instead of all options below but --offloads.",
        ),
        click.option("--hosts", type=click.IntRange(1, topology.MOST_NODES), default=2, show_default=True),
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
        click.option("--racks", type=click.IntRange(0), default=0, help="Switches that the hosts are dealt to."),
        click.option("--servers", type=click.IntRange(0), default=0, help="With racks: nodes on the core switch."),
        click.option(
            "--core-aggregator", is_flag=True, help="With racks: an aggregator's node on the core switch too."
        ),
        click.option(
            "--uplink-rate",
            type=float,
            default=None,
            help="With racks: Mbit/s between rack and core.  [default: --rate]",
        ),
        click.option(
            "--rate-at",
            multiple=True,
            metavar="LINK=MBIT",
            help="With racks: the rate of one link, such as a0=4000 for an aggregator's. Repeatable.",
        ),
        click.option(
            "--loss-at",
            multiple=True,
            metavar="LINK=SHARE",
            help="With racks: packets lost on one link, such as h1=0.05, or r0=0.01 between rack 0 and core. Repeatable.",
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
    cluster = _read_options(options)
    try:
        kept.state_path(name)
        with Testbed(cluster=cluster, offloads=options["offloads"], name=name) as bed:
            bed.keep()
            _print_hosts(bed)
    except FileExistsError:
        _fail(f"a testbed '{name}' is up already: `penstock testbed down --name {name}` ends it")
    except (TestbedUnavailable, ValueError) as error:
        _fail(str(error))


@command.command(context_settings={"ignore_unknown_options": True})
@click.option(
    "-n", "--ranks", type=click.IntRange(1), default=None, help="Ranks in all.  [default: one a host or node]"
)
@click.option("--name", default=None, help="Run on the testbed that is up under this name, and take its links.")
@click.option("--on", default=None, help="The nodes to run on, such as a0 or a0,s0.  [default: all hosts]")
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
    on: str | None,
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
    if name is not None:
        _refuse_options_of_links(name)
    cluster = None if name is not None else _read_options(options)
    nodes = None if on is None else [each.strip() for each in on.split(",")]
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with _open_bed(name, cluster, options["offloads"], needs_nodes=nodes is not None) as bed:
            done = bed.run(
                argv,
                ranks=ranks or len(nodes or range(bed.hosts)),
                on=nodes,
                launcher=launcher,
                timeout_s=timeout,
                on_line=_print_line,
            )
            if name is not None and isinstance(bed, Testbed) and bed.is_gone():
                _fail(GONE.format(name=name))
            if not quiet:
                _print_traffic(done.counters, done.flows, done.wall_s)
                if isinstance(bed, Testbed) and len(bed.topology.switches) > 1:
                    Console(stderr=True).print(_table_of_links(bed, done.links))
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
        for each in sorted(kept.read_states()) if everything else [name]:
            kept.take_down(each)
            click.echo(f"testbed '{each}' is gone")
    except (LookupError, TimeoutError, PermissionError) as error:
        _fail(str(error))


@command.command()
@click.option("--name", default=None, help="[default: all]")
def show(name: str | None) -> None:
    """Print the testbeds that are up: hosts, traffic, flows by class."""
    names = [name] if name else sorted(kept.read_states())
    if not names:
        click.echo("no testbed is up: `penstock testbed up` makes one")
    for each in names:
        try:
            with Testbed.attach(each) as bed:
                _print_hosts(bed)
                _print_traffic(bed.counters(), bed.flows(), None)
        except (LookupError, PermissionError) as error:
            _fail(str(error))


@command.command()
@click.option("--name", default="default", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One object a line.")
def links(name: str, as_json: bool) -> None:
    """Print what crossed each link of a testbed that is up.

    "up" is away from the hosts: from a node to its switch, from a rack to the core.
    """
    try:
        with Testbed.attach(name) as bed:
            crossed = bed.links()
            if as_json:
                for each in crossed:
                    click.echo(json.dumps(dataclasses.asdict(each)))
            else:
                Console().print(_table_of_links(bed, crossed))
    except (LookupError, PermissionError) as error:
        _fail(str(error))


@command.command()
@click.option("--name", default="default", show_default=True)
@click.argument("deployment", metavar="DEPLOYMENT", type=click.Path(dir_okay=False))
def route(name: str, deployment: str) -> None:
    """Send the flows of a deployment the ways that it names, on a testbed that is up and has several.

    Flows of other programs, and all before this command, go the shortest way, of several the first in the cluster file. It holds
    until the next call.
    """
    try:
        with Testbed.attach(name) as bed:
            carried = carry.carry_deployment(bed, deployment)
    except (LookupError, PermissionError, ValueError, TestbedUnavailable) as error:
        _fail(str(error))
    click.echo(f"{carried.flows} flows have their routes")
    for start, end in carried.waiting:
        click.echo(
            f"from {start} to {end} servers' flows take several ways, which only ports tell apart: until you call this again "
            "while the job runs, all take the first",
            err=True,
        )


@command.command()
@click.option("--name", default=None, help="Write the cluster of the testbed that is up under this name.")
@click.option(
    "--spines",
    type=click.IntRange(1),
    default=None,
    help="With racks: instead of a core, switches that each rack has a link to.",
)
@click.option("--fat-tree", type=click.IntRange(2), default=None, help="A fat-tree of switches with so many ports.")
@click.option("--rails", type=click.IntRange(1), default=None, help="NICs of each host, each at a switch of its own.")
@link_options
@click.argument("file", metavar="FILE")
def write(
    name: str | None, file: str, spines: int | None, fat_tree: int | None, rails: int | None, **options: Any
) -> None:
    """Write a cluster file that `up --cluster FILE` makes; - is the standard output.

    With --fat-tree only --servers, --rate and --mtu count, with --rails also --hosts.
    """
    if name is not None:
        _refuse_options_of_links(name)
    try:
        if name is not None:
            with Testbed.attach(name) as bed:
                cluster = bed.topology.cluster
        elif fat_tree is not None or rails is not None:
            cluster = _generated(fat_tree, rails, options)
        else:
            cluster = _read_options(options, spines)
        text = "# Written by `penstock testbed write`: docs/reference/cluster-file.md\n" + cluster_file.dump(cluster)
        if file == "-":
            click.echo(text, nl=False)
        else:
            files.write_whole(Path(file), text)
    except (LookupError, OSError) as error:
        _fail(str(error))


def _refuse_options_of_links(name: str) -> None:
    """What describes a testbed must not look as if it changed one that is up. Raises: click.UsageError."""
    for option in _given_options():
        raise click.UsageError(
            f"{option} describes a testbed to be made, and --name {name} takes one that is up: leave out one of them"
        )


def _given_options() -> list[str]:
    """The options of this call that describe hosts and links."""
    context = click.get_current_context()
    of_links = {option.name for option in up.params} - {"name"} | {"spines", "fat_tree", "rails"}
    return [
        option.opts[0]
        for option in context.command.params
        if option.name in of_links and context.get_parameter_source(option.name or "") is not ParameterSource.DEFAULT
    ]


def _generated(fat_tree: int | None, rails: int | None, options: dict[str, Any]) -> Cluster:
    """A network that is described by little. Raises: click.UsageError."""
    known = {"--servers", "--rate", "--mtu", *(() if rails is None else ("--hosts",))}
    shape = "--rails" if rails is not None else "--fat-tree"
    taken = [option for option in _given_options() if option not in (*known, "--fat-tree", "--rails")]
    if fat_tree is not None and rails is not None:
        taken = ["--fat-tree"]
    if taken:
        raise click.UsageError(f"{shape} takes {', '.join(sorted(known))}, and not {taken[0]}")
    link = {"rate_bit_s": round(options["rate"] * 1e6) or None, "mtu": options["mtu"]}
    try:
        if rails is not None:
            return generate.rails(options["hosts"], rails, servers=options["servers"], **link)
        assert fat_tree is not None, "one of them was given"
        return generate.fat_tree(fat_tree, servers=options["servers"], **link)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def _read_options(options: dict[str, Any], spines: int | None = None) -> Cluster:
    """The cluster that the options describe, by a file or by counts. Raises: click.UsageError."""
    path = options["cluster"]
    if path is not None:
        for option in _given_options():
            if option not in ("--cluster", "--offloads"):
                raise click.UsageError(
                    f"--cluster {path} describes the cluster, and so does {option}: leave out one of them"
                )
        try:
            return cluster_file.load(path, f"--cluster {path}")
        except ConfigError as error:
            raise click.UsageError(str(error)) from None
    try:
        caps = [float(each) for each in options["flow"].split(",") if each.strip()]
    except ValueError:
        raise click.BadParameter(f"--flow {options['flow']}: give Mbit/s, such as 200 or 60,300") from None
    rates = _by_link("--rate-at", options["rate_at"], "LINK=MBIT, such as a0=4000")
    losses = _by_link("--loss-at", options["loss_at"], "LINK=SHARE, such as h1=0.05")
    try:
        link = LinkSpec(
            rate_mbit=options["rate"] or None,
            flow_mbit=caps if len(caps) > 1 else caps[0] if caps else None,
            loss=options["loss"],
            delay_ms=options["delay"],
            mtu=options["mtu"],
            offloads=options["offloads"],
        )
        shape = {
            "hosts": options["hosts"],
            "racks": options["racks"],
            "servers": options["servers"],
            "core_aggregator": options["core_aggregator"],
            "uplink_mbit": options["uplink_rate"],
            "rates": rates,
            "losses": losses,
        }
        made = topology.Topology(**shape)
        return made.cluster(link) if spines is None else made.spread(link, spines)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def _by_link(option: str, given: Sequence[str], form: str) -> dict[str, float]:
    try:
        return {name: float(value) for name, _, value in (each.partition("=") for each in given)}
    except ValueError:
        raise click.BadParameter(f"{option} {f' {option} '.join(given)}: give {form}") from None


def _open_bed(name: str | None, cluster: Cluster | None, offloads: bool | None, *, needs_nodes: bool) -> Bed:
    if name is not None:
        return Testbed.attach(name)
    assert cluster is not None
    try:
        return Testbed(cluster=cluster, offloads=offloads)
    except TestbedUnavailable as error:
        if len(cluster.switches) > 1 or needs_nodes:
            raise
        click.echo(
            f"No testbed: {error}\nThe ranks run on loopback instead, without any of the link's limits.", err=True
        )
        return Loopback(hosts=Wiring(cluster).hosts)


def _print_line(rank: int, line: str) -> None:
    print(f"[{rank}] {line}" if rank >= 0 else f"[host {-1 - rank}] {line}", flush=True)


def _print_hosts(bed: Testbed) -> None:
    wiring = bed.topology
    name = f"testbed '{bed.name}': " if bed.name else ""
    described = "whose links differ" if wiring.common is None else wiring.common.describe()
    click.echo(f"{name}{bed.hosts} hosts, {described}")
    for link, switch in wiring.links.items():
        lower = wiring.lower[link]
        if lower not in wiring.nodes:
            click.echo(f"  {lower}  to {switch}")
        elif len(wiring.switches) > 1:
            click.echo(f"  {lower}  {bed.address(lower)}  {bed.address(lower, 6)}  on {switch}")
        else:
            click.echo(f"  host {wiring.number(lower)}  {bed.address(lower)}  {bed.address(lower, 6)}")


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
            # Connections come and go between two looks; their bytes are counted all the same.
            cells = [f"{each.bytes / 1e6:.3f} ({each.flows or '?' if each.bytes else 0})" for each in sent]
            table.add_row(str(index), f"{sent[0].cap_mbit:g}", *cells)
    console.print(table)


def _table_of_links(bed: Testbed, crossed: list[LinkTraffic]) -> Table:
    table = Table("link", "to", "Mbit/s", "lost", "up MB (packets)", "down MB (packets)", "dropped")
    for each in crossed:
        spec = bed.topology.spec(each.name)
        table.add_row(
            each.name,
            each.upper,
            "no limit" if spec.rate_mbit is None else f"{spec.rate_mbit:g}",
            f"{spec.loss:.3%}" if spec.loss else "",
            f"{each.up_bytes / 1e6:.3f} ({each.up_packets})",
            f"{each.down_bytes / 1e6:.3f} ({each.down_packets})",
            str(each.dropped),
        )
    return table


def _describe_code(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    # Real-time signals have no names.
    named = -code in {*signal.Signals}
    return f"killed by {signal.Signals(-code).name if named else f'signal {-code}'}"


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _fail(message: str, *, code: int = 1) -> NoReturn:
    click.echo(f"penstock testbed: {message}", err=True)
    sys.exit(code)
