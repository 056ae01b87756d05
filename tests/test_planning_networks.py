"""Proves what the planner does in networks of several ways, with levels of aggregators, and with several jobs."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import random
import re
import statistics
from collections.abc import Callable

import numpy as np
import pytest

from penstock.cluster import deployment as deployments
from penstock.cluster import file, generate
from penstock.cluster.network import Cluster
from penstock.cluster.routes import Routes, through, walk, written
from penstock.errors import Config
from penstock.planning import baselines
from penstock.planning.bound import bound_of_all
from penstock.planning.deploy import deployment, scheme_in
from penstock.planning.evaluate import evaluate
from penstock.planning.exact import exact
from penstock.planning.problem import Problem
from penstock.planning.relax import relax
from penstock.planning.scheme import Scheme
from penstock.planning.solve import scheme_of, search
from planned import MBIT, check_claims, near_best, random_cluster, random_mesh


def of_fat_tree(*, workers: int = 50, servers: int = 4, uneven: bool = False, seed: int = 0) -> Cluster:
    """The paper's section 5.3: links of 20 Mbit/s or 10 to 30, servers that take in 20, switches 9."""
    cluster = generate.fat_tree(6, servers=servers, seed=seed, rate_bit_s=20 * MBIT)
    if uneven:
        cluster = generate.uneven(cluster, 10 * MBIT, 30 * MBIT, seed=seed)
    hosts = random.Random(seed).sample(cluster.jobs[0].workers, workers)
    return dataclasses.replace(
        cluster,
        aggregators=tuple(dataclasses.replace(each, capacity_bit_s=9 * MBIT) for each in cluster.aggregators),
        servers=tuple(dataclasses.replace(each, ingress_bit_s=20 * MBIT) for each in cluster.servers),
        jobs=(dataclasses.replace(cluster.jobs[0], workers=tuple(sorted(hosts))),),
    )


@pytest.mark.parametrize("seed", range(16))
def test_random_meshes(seed: int) -> None:
    """With several routes and two levels: the search is within 8 % of the proven best, no scheme passes the bound, and the rates
    and loads that the solvers claim are those that the judge finds; and a deployment says the same as its scheme."""
    cluster = random_mesh(random.Random(seed))
    (job,) = cluster.jobs
    problem, relaxed, found, best = near_best(cluster, seed, levels=1 + seed % 2)
    rng = np.random.default_rng(seed)
    schemes = [scheme_of(problem, one.rates, one.trees) for one in (found, best)]
    check_claims(problem, found)
    check_claims(problem, best)
    others = [baselines.lbmm(problem), baselines.atp(problem), baselines.hierarchical(problem)]
    others += [baselines.inart(problem, rng, relaxed), baselines.equal_inart(problem, rng)]
    for scheme in (*schemes, *others):
        worth = evaluate(cluster, job, scheme)
        assert worth.rate <= min(relaxed.bound, bound_of_all(problem, relaxed)) * (1 + 1e-6), f"seed {seed}"
        assert worth.loads[0].name == worth.binding
    if all(one.at in cluster.host for one in cluster.aggregators):
        assert _written_and_read(cluster, schemes[0]) == pytest.approx(
            evaluate(cluster, job, schemes[0]).rate, rel=1e-5
        )


def _written_and_read(cluster: Cluster, scheme: Scheme) -> float:
    """What a scheme is worth that has been a deployment."""
    (job,) = cluster.jobs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file, "load", lambda *_: cluster)
        text = deployment(cluster, job, scheme, "cluster.yaml")
        read = deployments.parse(text, "deployment.yaml")
    read.check_world(len(job.workers))
    again = scheme_in(cluster, job, read)
    assert again.via == scheme.via and {k: v for k, v in again.routes.items() if v} == dict(scheme.routes)
    assert {k: v for k, v in again.above.items() if v} == dict(scheme.above)
    return evaluate(cluster, job, again).rate


def test_two_ways_carry_more_than_one() -> None:
    """Where a leaf has two spines, both are used, and the deployment says by which each worker goes; one carries half."""
    cluster = generate.leaf_spine(
        2, 2, 4, servers=1, aggregators=False, rate_bit_s=1000 * MBIT, uplink={"rate_bit_s": 100 * MBIT}
    )
    # All workers on the other leaf than the server's.
    job = dataclasses.replace(cluster.jobs[0], workers=("h4", "h5", "h6", "h7"))
    cluster = dataclasses.replace(cluster, jobs=(job,))
    problem = Problem(cluster, job)
    found = search(problem, seconds=20)
    scheme = scheme_of(problem, found.rates, found.trees)
    assert evaluate(cluster, job, scheme).rate == pytest.approx(50 * MBIT) == pytest.approx(relax(problem).bound)
    assert evaluate(cluster, job, Scheme(scheme.fractions, scheme.via)).rate == pytest.approx(25 * MBIT)
    assert sorted(links[1] for links in scheme.routes["s0"].values()) == ["leaf1-spine0"] * 2 + ["leaf1-spine1"] * 2
    assert _written_and_read(cluster, scheme) == pytest.approx(50 * MBIT)
    text = deployment(cluster, job, scheme, "cluster.yaml")
    assert re.search(r"through: \[leaf1, spine[01], leaf0\]", text), text


def test_levels_where_a_server_has_no_place_for_all() -> None:
    """80 racks are more than a server has children: some aggregators push to others, and the parser of the ranks takes the
    file."""
    cluster = generate.racks(480, 80, servers=2, rate_bit_s=1000 * MBIT, uplink={"rate_bit_s": 4000 * MBIT})
    (job,) = cluster.jobs
    problem = Problem(cluster, job, candidates=2)
    assert problem.levels == 2
    relaxed = relax(problem)
    found = search(problem, seconds=3, roundings=2, relaxed=relaxed)
    scheme = scheme_of(problem, found.rates, found.trees)
    assert scheme.above and _written_and_read(cluster, scheme) == pytest.approx(found.rate, rel=1e-3)
    assert 0 < found.rate <= bound_of_all(problem, relaxed) * (1 + 1e-6)
    with pytest.raises(
        Config, match=r"480 workers of train find no place below server s0: .* in 1 level of aggregators"
    ):
        search(Problem(cluster, job, levels=1, candidates=1), seconds=1)


@pytest.mark.parametrize("uneven", [False, True])
def test_the_papers_fat_tree(uneven: bool) -> None:
    """54 hosts, 50 of them workers: after two seconds of search far better than one rounding, and at least twice ATP, also with
    the best number of flows summed at a switch; the judge agrees."""
    cluster = of_fat_tree(uneven=uneven)
    (job,) = cluster.jobs
    problem = Problem(cluster, job)
    relaxed = relax(problem)
    found = search(problem, seconds=2, relaxed=relaxed)
    check_claims(problem, found)
    assert found.rate <= relaxed.bound
    rng = np.random.default_rng(0)
    inart = evaluate(cluster, job, baselines.inart(problem, rng, relaxed)).rate
    atp = evaluate(cluster, job, baselines.atp_best_effort(problem)).rate
    assert found.rate >= 1.05 * inart and found.rate >= 2 * atp, (found.rate, inart, atp, relaxed.bound)


def test_fewer_candidates_have_the_same_bound_in_the_end() -> None:
    """The bound from prices holds for all schemes: it is the program's where that leaves nothing out, and above it otherwise."""
    cluster = of_fat_tree(workers=12, servers=2)
    whole = relax(Problem(cluster, cluster.jobs)).bound
    for candidates, low, high in ((45, 1.0, 1.001), (20, 1.0, 3.0), (4, 1.0, 3.0)):
        problem = Problem(cluster, cluster.jobs, candidates=candidates)
        relaxed = relax(problem)
        assert relaxed.bound <= whole * (1 + 1e-6)
        assert low <= bound_of_all(problem, relaxed) / whole * (1 + 1e-9) <= high
        cut = relax(problem, seconds=0.0)
        assert cut.is_solved or whole <= bound_of_all(problem, cut) < math.inf


def test_routes() -> None:
    """A fat-tree of 6 ports has 9 shortest routes between pods, 3 within one; every route is a way, and its switches say
    which."""
    cluster = generate.fat_tree(6, servers=4, rate_bit_s=MBIT)
    routes = Routes(cluster)
    assert (
        len(cluster.hosts) == 54
        and len(cluster.switches) == len(cluster.aggregators) == 45
        and len(cluster.links) == 162
    )
    counts = [
        len(routes.between("edge0-0", end)) for end in ("edge1-0", "edge0-1", "agg0-0", "agg1-0", "core0-0", "edge0-0")
    ]
    assert counts == [9, 3, 1, 3, 1, 1]
    for start, end in (("edge0-0", "edge1-0"), ("h0", "h40"), ("core0-0", "h7")):
        found = {route.links for route in routes.between(start, end)}
        assert len(found) == len(routes.between(start, end))
        for links in found:
            walk(cluster, start, end, links)
            assert through(cluster, start, end, written(cluster, start, links)) == links
    # A ring of three switches: the other way round is one link longer.
    ring = random_mesh(random.Random(3))
    for a in ring.switches:
        for b in ring.switches:
            for route in Routes(ring).between(a.name, b.name):
                assert through(ring, a.name, b.name, written(ring, a.name, route.links)) == route.links


def test_rails() -> None:
    """A host's rank may push by any of its NICs: the rank goes by the rail that its server is at."""
    cluster = generate.rails(4, 2, servers=2, rate_bit_s=100 * MBIT)
    (job,) = cluster.jobs
    assert job.workers == ("h0", "h0", "h1", "h1", "h2", "h2", "h3", "h3")
    assert file.parse(file.dump(cluster), "again.yaml") == cluster
    problem = Problem(cluster, job)
    found = search(problem, seconds=5)
    scheme = scheme_of(problem, found.rates, found.trees)
    assert evaluate(cluster, job, scheme).rate == pytest.approx(found.rate, rel=1e-6) and found.rate <= relax(
        problem
    ).bound * (1 + 1e-6)
    # Each server could be sent to straight by four ranks and one aggregator, and each aggregator by the four others: 20 Mbit/s
    # each.
    assert found.rate >= 40 * MBIT * (1 - 1e-6)


WRONG_ROUTES = {
    "no switch": ("{workers: [h4], through: [leaf9]}", "is no way from h4 to s0: there is no switch or link leaf9"),
    "no link": ("{workers: [h4], through: [leaf0]}", "is no way from h4 to s0: no link leads from h4 to leaf0"),
    "short": ("{workers: [h4], through: [leaf1, spine0]}", "no link leads from spine0 to s0"),
    "a cycle": (
        "{workers: [h4], through: [leaf1, spine0, leaf1, spine1, leaf0]}",
        "is no way from h4 to s0: it comes to leaf1 twice",
    ),
    "twice": ("{workers: [h4, h4], through: [leaf1, spine0, leaf0]}", "has a route already"),
    "nobody": ("{through: [leaf1, spine0, leaf0]}", "needs `workers: [...]` or `aggregators: [...]`"),
    "not in the tree": ("{aggregators: [a0], through: [leaf0]}", "is not in the tree of this server"),
    "not in the job": ("{workers: [h9], through: [leaf0]}", "the job has no worker on a host h9"),
}


@pytest.mark.parametrize("what", WRONG_ROUTES)
def test_wrong_routes(what: str, tmp_path: pathlib.Path) -> None:
    """A route that is none is refused with its place in the file."""
    cluster = generate.leaf_spine(2, 2, 4, servers=1, rate_bit_s=MBIT)
    (tmp_path / "cluster.yaml").write_text(file.dump(cluster))
    route, message = WRONG_ROUTES[what]
    text = f"version: 2\ncluster: cluster.yaml\naggregated:\n  servers:\n    - server: s0\n      routes:\n        - {route}\n"
    with pytest.raises(Config) as caught:
        deployments.parse(text, "deployment.yaml", str(tmp_path))
    assert message in str(caught.value) and str(caught.value).startswith("deployment.yaml:7:"), caught.value


def test_unequal_links_are_seeded() -> None:
    """The same seed draws the same rates, within the limits."""
    cluster = generate.fat_tree(4, rate_bit_s=MBIT)
    one, other, third = (generate.uneven(cluster, 10, 30, seed=seed) for seed in (1, 1, 2))
    assert one == other != third and {10, 30} >= {min(each.rate_bit_s or 0 for each in one.links), 30}
    assert all(10 <= (each.rate_bit_s or 0) <= 30 for each in one.links)
    with pytest.raises(ValueError, match="ports=5: give an even number"):
        generate.fat_tree(5)


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "seeds", "levels"),
    [(random_cluster, range(100, 340), [None]), (random_mesh, range(100, 300), [1, 2])],
    ids=["clusters", "meshes"],
)
def test_random_instances_and_their_best(
    make: Callable[[random.Random], Cluster], seeds: range, levels: list[int | None]
) -> None:
    """All instances of docs/design/planner.md: the search is 2 % below the proven best on average at most, and 8 % at worst. One
    random rounding, which it is compared with, is far below."""
    ours, rounded, not_proven = [], [], []
    for seed in seeds:
        cluster = make(random.Random(seed))
        (job,) = cluster.jobs
        problem = Problem(cluster, job, levels=levels[seed % len(levels)])
        relaxed = relax(problem)
        try:
            best, is_proven = exact(problem, 60)
        except RuntimeError:
            is_proven = False
        if not is_proven:
            not_proven.append(seed)
            continue
        found = search(problem, seed=seed, seconds=60, relaxed=relaxed)
        check_claims(problem, found)
        one = evaluate(cluster, job, baselines.inart(problem, np.random.default_rng(seed), relaxed)).rate
        ours.append(1 - found.rate / best.rate)
        rounded.append(1 - one / best.rate)
    print(f"{make.__name__}, seeds {seeds[0]} to {seeds[-1]}: {len(ours)} proven; not {not_proven}")
    for way, below in (("planned", ours), ("one random rounding", rounded)):
        print(f"{way:20}  {statistics.fmean(below):7.2%} below on average, {max(below):7.2%} at worst")
    assert len(not_proven) <= 0.03 * len(seeds), not_proven
    assert statistics.fmean(ours) <= 0.02 and max(ours) <= 0.08
