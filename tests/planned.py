"""Small clusters to plan, for several test files."""

from __future__ import annotations

import random

import numpy as np
import pytest

from penstock.cluster.network import Aggregator, Cluster, End, Host, Job, Link, Nic, Server, Switch
from penstock.planning.evaluate import Evaluation, evaluate
from penstock.planning.exact import exact
from penstock.planning.problem import Problem
from penstock.planning.relax import Relaxed, relax
from penstock.planning.solve import Solved, scheme_of, search

MBIT = 1_000_000


def near_best(cluster: Cluster, seed: int, *, levels: int | None = None) -> tuple[Problem, Relaxed, Solved, Solved]:
    """The problem of a cluster's one job, its relaxation, what the search finds and the proven best. What is found is within 8 %
    of the best, and that within the bound."""
    (job,) = cluster.jobs
    problem = Problem(cluster, job, levels=levels)
    relaxed = relax(problem)
    best, is_proven = exact(problem, 120)
    assert is_proven, f"seed {seed}"
    found = search(problem, seed=seed, seconds=60, relaxed=relaxed)
    assert 0.92 * best.rate <= found.rate <= best.rate * (1 + 1e-6) <= relaxed.bound * (1 + 2e-6), f"seed {seed}"
    return problem, relaxed, found, best


def check_claims(problem: Problem, found: Solved) -> Evaluation:
    """That what the solver says of rates and loads is what the judge finds, flow by flow, and passes no capacity. Returns what
    the judge says."""
    (job,) = problem.jobs
    worth = evaluate(problem.cluster, job, scheme_of(problem, found.rates, found.trees), problem.background)
    assert worth.rate == pytest.approx(found.rate, rel=1e-6)
    loads = found.rates @ np.array([tree.loads for tree in found.trees])
    judged = {load.name: load.load for load in worth.loads}
    for resource, load in zip(problem.resources, loads, strict=True):
        assert load == pytest.approx(judged.pop(resource.name, 0.0), rel=1e-5, abs=1e-6 * problem.scale), resource.name
        assert load <= max(resource.room, 0.0) * (1 + 1e-6) + 1e-9 * problem.scale, resource.name
    # What the solver leaves out, as every worker sends all of its gradients there: links of one host's workers.
    for name, load in judged.items():
        (host,) = {end.node for end in problem.cluster.link[name.removeprefix("link ")].ends} & set(job.workers)
        assert load == pytest.approx(found.rate * job.workers.count(host), rel=1e-6), name
    return worth


def cluster_of(
    at: dict[str, str],
    rates: dict[str, float | None],
    *,
    aggregators: dict[str, tuple[str, float | None]],
    servers: dict[str, float | None],
    workers: list[str],
    background: dict[str, float] | None = None,
) -> Cluster:
    """Hosts and switches by what they are linked to; rates and limits in Mbit/s."""

    def bits(rate: float | None) -> int | None:
        return None if rate is None else round(rate * MBIT)

    switches = list(dict.fromkeys(at.values()))
    hosts = [name for name in at if name not in switches]
    return Cluster(
        hosts=tuple(Host(name=name, nics=(Nic(addresses=(f"10.0.{i}.1",)),)) for i, name in enumerate(hosts)),
        switches=tuple(Switch(name=name) for name in switches),
        links=tuple(
            Link(
                name=lower,
                ends=(End(lower), End(upper)),
                rate_bit_s=bits(rates.get(lower)),
                background_bit_s=bits((background or {}).get(lower, 0)) or 0,
            )
            for lower, upper in at.items()
        ),
        aggregators=tuple(
            Aggregator(
                name=name,
                at=place,
                capacity_bit_s=bits(room),
                address=f"10.1.{i}.1" if place in switches else None,
                port=7471 + i,
            )
            for i, (name, (place, room)) in enumerate(aggregators.items())
        ),
        servers=tuple(Server(name=name, at=name, ingress_bit_s=bits(room)) for name, room in servers.items()),
        jobs=(Job(name="train", workers=tuple(workers), gradient_bytes=1 << 20),),
    )


def of_the_paper(between: float | None) -> Cluster:
    """Its figure 1: switches take in 6, servers 4, links carry 6."""
    workers = [f"w{i}" for i in range(1, 7)]
    at = {worker: "v1" if worker < "w4" else "v2" for worker in workers} | {"s1": "v1", "s2": "v2", "v1": "v2"}
    return cluster_of(
        at,
        dict.fromkeys(at, 6.0) | {"v1": between},
        aggregators={"V1": ("v1", 6), "V2": ("v2", 6)},
        servers={"s1": 4, "s2": 4},
        workers=workers,
    )


def random_cluster(rng: random.Random) -> Cluster:
    """Up to six workers, three servers and three aggregators on up to three racks, with rates of all sorts."""
    racks = [f"r{i}" for i in range(rng.randint(1, 3))]
    switches = racks + ["core"] * (len(racks) > 1)
    at = dict.fromkeys(racks, "core") if len(racks) > 1 else {}

    def rate() -> float:
        return rng.choice([1, 2, 4, 6, 8, 10])

    names = [f"w{i}" for i in range(rng.randint(1, 4))]
    workers = sorted(names + rng.choices(names, k=rng.randint(1, 2)))
    servers = {f"s{i}": rng.choice([None, rate()]) for i in range(rng.randint(1, 3))}
    aggregators: dict[str, tuple[str, float | None]] = {}
    for i in range(rng.randint(0, 3)):
        aggregators[f"a{i}"] = (rng.choice([*switches, f"a{i}", rng.choice(names)]), rng.choice([None, rate()]))
    daemons = [place for place, _ in aggregators.values() if place.startswith("a")]
    at |= {host: rng.choice(switches) for host in [*names, *servers, *daemons]}
    return cluster_of(
        at,
        {name: rng.choice([rate(), rate(), None if name in names else rate()]) for name in at},
        aggregators=aggregators,
        servers=servers,
        workers=workers,
        background={name: 0.5 for name in servers if rng.random() < 0.2},
    )


def random_mesh(rng: random.Random) -> Cluster:
    """Up to five workers on up to four switches that are joined by several ways, some by two cables, with aggregators on hosts
    and at switches."""
    switches = [f"r{i}" for i in range(rng.randint(2, 4))]
    pairs = [(a, b) for i, a in enumerate(switches) for b in switches[i + 1 :]]
    joined = [(switches[i], switches[i + 1]) for i in range(len(switches) - 1)]
    joined += [pair for pair in pairs if pair not in joined and rng.random() < 0.7]
    joined += [rng.choice(pairs)] * (rng.random() < 0.5)
    workers = [f"w{i}" for i in range(rng.randint(2, 5))]
    servers = [f"s{i}" for i in range(rng.randint(1, 2))]
    daemons = [f"a{i}" for i in range(rng.randint(0, 2))]
    hosts = [*workers, *servers, *daemons]

    def rate() -> int:
        return MBIT * rng.choice([1, 2, 3, 4, 6, 8])

    links = [
        Link(name=host, ends=(End(host), End(rng.choice(switches))), rate_bit_s=rate() + 2 * MBIT) for host in hosts
    ]
    links += [Link(name=f"{a}-{b}-{i}", ends=(End(a), End(b)), rate_bit_s=rate()) for i, (a, b) in enumerate(joined)]
    at = {name: name for name in daemons} | {f"v{i}": rng.choice(switches) for i in range(rng.randint(0, 2))}
    return Cluster(
        hosts=tuple(Host(name=name, nics=(Nic(addresses=(f"10.0.{i}.1",)),)) for i, name in enumerate(hosts)),
        switches=tuple(Switch(name=name) for name in switches),
        links=tuple(rng.sample(links, len(links))),
        aggregators=tuple(
            Aggregator(
                name=name,
                at=place,
                capacity_bit_s=rng.choice([None, rate()]),
                address=f"10.1.{i}.1" if place in switches else None,
            )
            for i, (name, place) in enumerate(at.items())
        ),
        servers=tuple(Server(name=name, at=name, ingress_bit_s=rng.choice([None, rate()])) for name in servers),
        jobs=(Job(name="train", workers=tuple(workers), gradient_bytes=1 << 20),),
    )
