"""Proves what becomes of a deployment among other jobs, and when the network changes under it."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from penstock.cluster import generate
from penstock.cluster.network import Cluster, Job
from penstock.errors import Config
from penstock.planning.evaluate import evaluate, evaluate_all, loads_of
from penstock.planning.problem import Problem
from penstock.planning.relax import relax
from penstock.planning.replan import Event, Gone, Loads, Patience, State, decide, trees_of, without
from penstock.planning.scheme import Scheme
from penstock.planning.several import in_turn, joint
from penstock.planning.solve import scheme_of, search
from planned import MBIT, random_mesh


def two_jobs(seed: int) -> Cluster:
    """A small leaf-spine network whose hosts are shared out between two jobs, one of which may share a host with the other."""
    rng = random.Random(seed)
    cluster = generate.leaf_spine(3, 2, 4, servers=2, rate_bit_s=100 * MBIT, uplink={"rate_bit_s": 80 * MBIT})
    hosts = rng.sample(cluster.jobs[0].workers, 12)
    cut = rng.randint(3, 9)
    jobs = (Job(name="one", workers=tuple(hosts[:cut])), Job(name="other", workers=tuple(hosts[cut - seed % 2 :])))
    return dataclasses.replace(cluster, jobs=jobs)


@pytest.mark.parametrize("seed", range(4))
def test_several_jobs_fit_each_other(seed: int) -> None:
    """Planned in turn and at once, the jobs' loads together pass nothing; at once the slowest is no slower than in turn, and
    below the bound."""
    cluster = two_jobs(seed)
    slowest = []
    for way in (in_turn, joint):
        found = way(cluster, cluster.jobs, seed=seed, seconds=1.5)
        assert [each.job for each in found] == list(cluster.jobs)
        together = evaluate_all(cluster, [(each.job, each.scheme, each.rate) for each in found])
        assert together.rate >= 1 - 1e-6, f"seed {seed}: {together.binding}"
        assert all(0 < each.rate <= each.bound * (1 + 1e-6) for each in found)
        slowest.append(min(each.rate for each in found))
    assert slowest[1] >= slowest[0] * (1 - 1e-6), f"seed {seed}"


def test_one_job_at_once_is_that_job_alone() -> None:
    """Planned jointly, a single job gets the deployment that it gets alone."""
    cluster = two_jobs(0)
    job = cluster.jobs[0]
    (found,) = joint(cluster, [job], seconds=1.5)
    problem = Problem(cluster, job)
    assert found.bound == pytest.approx(relax(problem).bound)
    assert found.rate == pytest.approx(search(problem, seconds=1.5).rate, rel=0.03)


def test_others_are_background() -> None:
    """A deployment beside measured loads keeps what it shares with them within what they leave."""
    cluster = two_jobs(0)
    (job, other) = cluster.jobs
    problem = Problem(cluster, other)
    found = search(problem, seconds=0.7)
    scheme = scheme_of(problem, found.rates, found.trees)
    background = {name: load * found.rate / 2 for name, load in loads_of(cluster, other, scheme).items()}
    beside = Problem(cluster, job, background=background)
    planned = search(beside, seconds=0.7)
    own = scheme_of(beside, planned.rates, planned.trees)
    assert evaluate(cluster, job, own, background).rate == pytest.approx(planned.rate, rel=1e-6)
    assert evaluate(cluster, job, own).rate > planned.rate * (1 - 1e-3)
    assert evaluate_all(cluster, [(job, own, planned.rate), (other, scheme, found.rate / 2)]).rate >= 1 - 1e-6


# ---------------------------------------------------------------------------------------------------- a network that changes


def running(seed: int) -> tuple[Cluster, Job, State]:
    cluster = generate.leaf_spine(3, 2, 4, servers=2, rate_bit_s=100 * MBIT, uplink={"rate_bit_s": 60 * MBIT})
    (job,) = cluster.jobs
    problem = Problem(cluster, job)
    found = search(problem, seed=seed, seconds=0.5)
    return cluster, job, State(scheme_of(problem, found.rates, found.trees))


@pytest.mark.parametrize("seed", range(6))
def test_a_scheme_becomes_ways_and_back(seed: int) -> None:
    """What a scheme says is found again in a problem: the same worth, flow by flow."""
    cluster = random_mesh(random.Random(seed))
    (job,) = cluster.jobs
    problem = Problem(cluster, job, levels=2)
    found = search(problem, seed=seed, seconds=5)
    scheme = scheme_of(problem, found.rates, found.trees)
    again = scheme_of(problem, found.rates, trees_of(problem, scheme))
    assert loads_of(cluster, job, again) == pytest.approx(loads_of(cluster, job, scheme)), f"seed {seed}"


@pytest.mark.parametrize("seed", range(3))
def test_generated_events(seed: int) -> None:
    """Whatever dies, comes back or is loaded: the split stays, nothing that is dead is used, no capacity is passed, and a
    change without a death is one for the better."""
    rng = random.Random(seed)
    cluster, job, state = running(seed)
    fractions = dict(state.scheme.fractions)
    uplinks = [f"link {link.name}" for link in cluster.links if "-spine" in link.name]
    for turn in range(10):
        kind = rng.random()
        event: Event
        if kind < 0.35:
            event = Gone(f"aggregator a{rng.randrange(3)}", is_back=rng.random() < 0.4)
        elif kind < 0.5:
            event = Gone(rng.choice(uplinks[:2]), is_back=rng.random() < 0.6)
        else:
            event = Loads({name: rng.uniform(0, 50) * MBIT for name in rng.sample(uplinks, 3)})
        before = state
        state, decision = decide(cluster, job, state, event, seed=seed, seconds=0.15)
        told = f"seed {seed}, turn {turn}: {event}, {decision.reason}"
        assert decision.scheme == state.scheme and state.scheme.fractions == fractions, told
        assert (decision.scheme != before.scheme) <= decision.is_changed, told
        loads = loads_of(cluster, job, state.scheme)
        assert not any(loads.get(name) for name in state.gone), told
        left = without(cluster, job, state.gone, state.scheme)
        worth = evaluate(left, job, state.scheme, state.background)
        # The rate that was decided on passes nothing, flow by flow.
        assert worth.rate == pytest.approx(decision.rate) and worth.loads[0].share == pytest.approx(1), told
        if decision.is_changed and isinstance(event, Loads):
            assert worth.rate > evaluate(left, job, before.scheme, state.background).rate * 1.1, told


def test_a_plan_does_not_flap() -> None:
    """A better way has to stay better for three measurements, and by a tenth; a load that comes and goes changes nothing. A
    death changes at once."""
    cluster, job, state = running(0)
    busiest = max(
        (load for load in evaluate(cluster, job, state.scheme).loads if "-spine" in load.name),
        key=lambda load: load.load,
    )
    full = Loads({busiest.name: 55 * MBIT})
    for event in (full, full, Loads({}), full, full):
        state, decision = decide(cluster, job, state, event, seconds=0.25)
        assert not decision.is_changed, decision.reason
    assert state.better_for == 2
    small = decide(cluster, job, state, Loads({busiest.name: MBIT // 10}), seconds=0.25)
    assert not small[1].is_changed and small[0].better_for == 0
    state, decision = decide(cluster, job, state, full, seconds=0.25)
    assert decision.is_changed and "faster" in decision.reason and decision.rate > 0
    used = next(name for name in loads_of(cluster, job, state.scheme) if name.startswith("aggregator"))
    state, decision = decide(cluster, job, state, Gone(used), patience=Patience(measurements=100))
    assert decision.is_changed and decision.reason == f"{used} is dead" and decision.moved > 0
    after = decide(cluster, job, state, Gone(used))
    assert not after[1].is_changed and after[1].reason == f"{used} is not used"


WRONG: dict[str, tuple[Any, str]] = {
    "unknown": (Gone("link nowhere"), "an event names link nowhere, which the cluster does not have"),
    "unknown load": (Loads({"aggregator z": 1.0}), "an event names aggregator z"),
    "a server": (Gone("server s0"), "without which nothing can be summed"),
    "a worker is cut off": (Gone("link h3"), "link h3: no way is left to worker on h3"),
    "a server is cut off": (Gone("link s0"), "link s0: no way is left to server s0 on s0"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_go_on(what: str) -> None:
    """Without a worker or a server nothing is planned, and the error says which; the state stays."""
    cluster, job, state = running(1)
    event, message = WRONG[what]
    before = state
    with pytest.raises(Config, match=message):
        decide(cluster, job, state, event)
    assert state == before and isinstance(state.scheme, Scheme)
