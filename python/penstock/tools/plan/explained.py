"""Where gradients flow and what that loads, as a text and as a page with a picture of the network."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.cluster import deployment as deployments
from penstock.cluster import file, places
from penstock.cluster.network import Cluster, Job
from penstock.cluster.routes import other
from penstock.numbers import bit_rate, plural
from penstock.planning.evaluate import Evaluation, Load, evaluate
from penstock.planning.scheme import Scheme
from penstock.reports import Card, Column, Edge, Line, Network, Next, Node, Page, Picture, Section, Table
from penstock.tools.plan.planned import Proposal, candidates_for, not_relaxed

__all__ = ["Explained", "describe", "is_deployment", "network", "of_deployment", "of_proposal", "page"]


@dataclass(frozen=True)
class Explained:
    """A scheme and what it loads."""

    cluster: Cluster
    job: Job
    scheme: Scheme
    worth: Evaluation
    bound: float | None
    is_relaxed: bool = True
    """Whether the linear program was solved: else the bound is from prices alone."""

    @property
    def not_counted(self) -> str:
        """Other jobs of the file, as a sentence: a deployment says nothing of them."""
        others = [job.name for job in self.cluster.jobs if job.name != self.job.name]
        return f"Alone: what {', '.join(others)} may send is not counted." if others else ""


def is_deployment(text: str, name: str) -> bool:
    """Whether a file says what a deployment does, rather than a cluster."""
    return "aggregated" in places.compose(text, name, "the file").mapping(
        (),
        (
            "version",
            "aggregated",
            "cluster",
            "job",
            "hosts",
            "switches",
            "defaults",
            "links",
            "aggregators",
            "servers",
            "jobs",
        ),
    )


def of_proposal(cluster: Cluster, made: Proposal) -> Explained:
    return Explained(
        cluster, made.job, made.scheme, evaluate(cluster, made.job, made.scheme), made.bound, made.is_relaxed
    )


def of_deployment(
    text: str, path: str, *, seconds: float, levels: int | None, gradient_bytes: int | None = None
) -> Explained:
    """What a deployment of version 2 loads. ``gradient_bytes``: what a worker sends in a step, in place of the file's.

    Raises:
        penstock.errors.Config: it is none, its cluster has no network, or it has no job.
    """
    from penstock.planning.bound import bound_of_all
    from penstock.planning.deploy import scheme_in
    from penstock.planning.problem import Problem
    from penstock.planning.relax import relax

    parsed = deployments.parse(text, path, os.path.dirname(path))
    cluster = file.load(deployments.cluster_path(text, path))
    job = deployments.job_in(cluster, text, path)
    if gradient_bytes is not None:
        job = dataclasses.replace(job, gradient_bytes=gradient_bytes)
    if not cluster.links:
        raise cluster.wrong("links", "are needed: without them nothing is known of the network")
    scheme = scheme_in(cluster, job, parsed)
    wanted = levels or (2 if any(scheme.above.values()) else None)
    problem = Problem(cluster, job, levels=wanted, candidates=candidates_for(cluster, job))
    relaxed = relax(problem, seconds=seconds)
    bound = bound_of_all(problem, relaxed)
    return Explained(cluster, job, scheme, evaluate(cluster, job, scheme), bound, relaxed.is_solved)


def describe(found: Explained) -> str:
    """The text."""
    worth = found.worth
    lines = [f"{bit_rate(worth.rate)} a worker{_of_bound(found)}. Full: {_full(worth)}."]
    lines += [] if found.is_relaxed else [not_relaxed()]
    if found.not_counted:
        lines.append(found.not_counted)
    if found.job.gradient_bytes is not None and worth.loads:
        lines.append(f"A step's gradients take {8 * found.job.gradient_bytes / worth.rate:.3g} s on their way.")
    for server, part in found.scheme.fractions.items():
        lines.append("")
        lines.append(f"server {server}: {part:.1%} of the model, {bit_rate(part * worth.rate)} of every worker")
        lines += [f"  {line}" for line in _tree(found, server)]
    lines += ["", "fullest:"]
    width = max((len(load.name) for load in worth.loads[:_SHOWN]), default=0)
    for load in worth.loads[:_SHOWN]:
        lines.append(
            f"  {load.name:{width}}  {bit_rate(load.load):>13} of {bit_rate(load.room):<13} {load.share:>6.1%}"
        )
    if len(worth.loads) > _SHOWN:
        lines.append(f"  ... and {len(worth.loads) - _SHOWN} more that are used")
    return "\n".join(lines)


def _of_bound(found: Explained) -> str:
    return (
        "" if not found.bound or found.bound == float("inf") else f", {found.worth.rate / found.bound:.1%} of the bound"
    )


def _full(worth: Evaluation) -> str:
    full = [load.name for load in worth.loads if load.share > _FULL]
    return ", ".join(full[:4]) + (f" and {len(full) - 4} more" if len(full) > 4 else "") if full else worth.binding


def _tree(found: Explained, server: str) -> list[str]:
    """A line for each aggregator, and for the workers that push straight to the server."""
    via, above = found.scheme.via[server], found.scheme.above.get(server, {})
    routes = found.scheme.routes.get(server, {})
    straight = [rank for rank, place in enumerate(via) if place is None]
    lines = [f"{plural(len(straight), 'worker')} straight: {_hosts(found.job, straight)}"] if straight else []
    used = dict.fromkeys([*(place for place in via if place is not None), *above.values()])

    def line(name: str) -> str:
        ranks = [rank for rank, place in enumerate(via) if place == name]
        below = [child for child, parent in above.items() if parent == name]
        parts = [f"{plural(len(ranks), 'worker')}: {_hosts(found.job, ranks)}"] if ranks else []
        parts += [f"aggregators {', '.join(below)}"] if below else []
        way = f", by {' '.join(routes[name])}" if name in routes else ""
        return f"{name} sums {'; '.join(parts)}{way}"

    for name in used:
        if name not in above:
            lines.append(line(name))
            lines += [f"  {line(child)}" for child, parent in above.items() if parent == name]
    return lines


def _hosts(job: Job, ranks: Sequence[int]) -> str:
    hosts = list(dict.fromkeys(job.workers[rank] for rank in ranks))
    return ", ".join(hosts[:6]) + (f" and {len(hosts) - 6} more" if len(hosts) > 6 else "")


def page(found: Explained, path: str) -> Page:
    """The report."""
    worth = found.worth
    full = _full(worth)
    bound = [] if not found.bound else [Card(f"{worth.rate / found.bound:.0%}", "of the bound", bit_rate(found.bound))]
    lines = [
        Line(
            [load.name, bit_rate(load.load), bit_rate(load.room), f"{load.share:.0%}"],
            kind="best" if load.share > _FULL else "plain",
        )
        for load in worth.loads[:_LISTED]
    ]
    left_out = len(worth.loads) - len(lines)
    table = Table(
        "What is used",
        [Column("what", is_text=True), Column("load"), Column("room"), Column("share")],
        lines,
        note=f"{left_out} more are used, and less full." if left_out > 0 else "",
    )
    trees = [
        Section(f"Server {server}: {part:.1%} of the model", [_tree(found, server)])
        for server, part in list(found.scheme.fractions.items())[:_TREES]
    ]
    return Page(
        kind="Penstock plan",
        answer=f"{bit_rate(worth.rate)} a worker; full: {full}",
        picture=Picture(
            "network",
            network(found),
            f"Full: {full}.",
            "A line's width is what it carries, gradients up and sums down; red is full. Workers of a switch are one point.",
        ),
        next=Next("See what each worker does on its way.", f"penstock plan explain {path}"),
        setting=f"Job {found.job.name}: {len(found.job.workers)} ranks, {len(found.scheme.fractions)} servers. Computed. "
        + found.not_counted,
        cards=[
            Card(bit_rate(worth.rate), "a worker", "at best"),
            *bound,
            Card(str(len(worth.loads)), "links and nodes in use", full),
        ],
        sections=[Section("Loads", [table]), *trees],
    )


def network(found: Explained) -> Network:
    """The picture: switches above each other, and at the bottom what is on hosts."""
    cluster, worth = found.cluster, found.worth
    of = {load.name: load for load in worth.loads}
    widest = max((load.load for load in worth.loads if load.name.startswith("link ")), default=1.0)
    tiers = _tiers(cluster, found.job)
    daemons: dict[str, list[str]] = {}
    for at, daemon in [
        *((each.at, each.name) for each in cluster.aggregators),
        *((each.at, each.name) for each in cluster.servers),
    ]:
        daemons.setdefault(at, []).append(daemon)
    servers = {each.at for each in cluster.servers}
    nodes: list[Node] = []
    groups: dict[str, list[str]] = {}
    for host in cluster.host:
        links = cluster.links_of[host]
        if host in daemons or len(links) != 1 or host not in found.job.workers:
            if host in daemons or host in found.job.workers:
                full = any(
                    _is_full(of.get(f"{kind} {name}"))
                    for name in daemons.get(host, [])
                    for kind in ("aggregator", "server")
                )
                colour = "series-2" if host in servers else "series-3" if host in daemons else "soft"
                nodes.append(Node(host, 0, host, colour, full))
        else:
            groups.setdefault(other(links[0], host), []).append(host)
    edges: list[Edge] = []
    for switch, hosts in groups.items():
        name = f"workers of {switch}"
        nodes.append(Node(name, 0, hosts[0] if len(hosts) == 1 else f"{len(hosts)} workers", "soft"))
        loads = [load for host in hosts if (load := of.get(f"link {cluster.links_of[host][0].name}")) is not None]
        fullest = max(loads, key=lambda load: load.load, default=None)
        edges.append(_edge((name, switch), fullest, widest, f"each of {len(hosts)} workers' links"))
    for name in cluster.switch:
        is_full = any(_is_full(of.get(f"aggregator {each}")) for each in daemons.get(name, []))
        nodes.append(Node(name, tiers[name], name, "series-3" if name in daemons else "ink", is_full))
    known = {node.name for node in nodes}
    for link in cluster.links:
        ends = (link.ends[0].node, link.ends[1].node)
        if known.issuperset(ends):
            edges.append(_edge(ends, of.get(f"link {link.name}"), widest, f"link {link.name}"))
    order = {name: i for i, name in enumerate(cluster.links_of)}

    def place(node: Node) -> tuple[int, int]:
        # At the bottom, what is on one switch stands together.
        at = next(
            (end for edge in edges for end in edge.ends if node.name in edge.ends and end != node.name), node.name
        )
        return (order.get(at, 0), order.get(node.name, -1))

    nodes.sort(key=place)
    key = [
        ("workers", "soft"),
        ("servers", "series-2"),
        ("aggregators", "series-3"),
        ("switches", "ink"),
        ("full", "bad"),
    ]
    used = {node.colour for node in nodes} | {"bad"}
    return Network(nodes, edges, [(text, colour) for text, colour in key if colour in used])


def _edge(ends: tuple[str, str], load: Load | None, widest: float, what: str) -> Edge:
    if load is None:
        return Edge(ends, 0.0, f"{what}: not used, or without a limit")
    return Edge(
        ends,
        min(load.load / widest, 1.0),
        f"{what}: {bit_rate(load.load)} of {bit_rate(load.room)}, {load.share:.0%}",
        _is_full(load),
    )


def _is_full(load: Load | None) -> bool:
    return load is not None and load.share > _FULL


def _tiers(cluster: Cluster, job: Job) -> dict[str, int]:
    """How far each switch is from a worker."""
    found = dict.fromkeys(dict.fromkeys(job.workers), 0)
    waiting = list(found)
    for node in waiting:
        for link in cluster.links_of[node]:
            after = other(link, node)
            if after in cluster.switch and after not in found:
                found[after] = found[node] + 1
                waiting.append(after)
    return found


_FULL = 1 - 1e-6
_SHOWN, _LISTED, _TREES = 12, 40, 8
