"""Proves that the planner's linear program is what the paper solves with Lagrange multipliers, and what it says where nothing
is possible."""

from __future__ import annotations

import random

import numpy as np
import pytest

from penstock.cluster.network import Cluster
from penstock.planning.conflict import Conflict, conflict
from penstock.planning.problem import Problem
from penstock.planning.relax import Relaxed, relax
from penstock.planning.split import maximum
from planned import MBIT, cluster_of, random_cluster, random_mesh


def unlinked(rng: random.Random) -> Cluster:
    """The paper's Eq. 2: only what switches and servers take in is limited."""
    workers = [f"w{i}" for i in range(rng.randint(2, 6))]
    servers: dict[str, float | None] = {f"s{i}": rng.choice([2, 3, 4, 6, 9]) for i in range(rng.randint(1, 3))}
    at = dict.fromkeys([*workers, *servers], "v0")
    aggregators: dict[str, tuple[str, float | None]] = {
        f"V{i}": ("v0", rng.choice([2, 3, 5, 6, 8])) for i in range(rng.randint(1, 3))
    }
    return cluster_of(at, {}, aggregators=aggregators, servers=servers, workers=workers)


def at_the_optimum(problem: Problem, relaxed: Relaxed) -> tuple[float, np.ndarray, np.ndarray, np.ndarray]:
    """f, x, y and z of Eq. 2, of the linear program's rates; where x_s is 0, y goes where a worker's gradients cost least."""
    straight = problem.straight
    rates = relaxed.rates / MBIT
    (count,) = problem.count(0)
    x = rates / rates.sum()
    y, z = np.zeros((len(x), straight + 1)), np.zeros((len(x), straight))
    for s, rate in enumerate(rates):
        if rate > 1e-9:
            y[s] = relaxed.sent[s][0] / MBIT / (count * rate)
            z[s] = relaxed.forwarded[s] / MBIT / rate
        else:
            y[s, straight] = 1
    return float(rates.sum()), x, y, z


@pytest.mark.parametrize("seed", range(12))
def test_the_programs_prices_are_the_papers_multipliers(seed: int) -> None:
    """The Karush-Kuhn-Tucker conditions of the paper's non-linear Eq. 2 hold at the linear program's solution: with rho and
    theta its shadow prices, lambda = -r u, sigma = r s, gamma = r t and alpha = f (docs/design/planner.md)."""
    cluster = unlinked(random.Random(seed))
    problem = Problem(cluster, cluster.jobs[0], levels=1)
    relaxed = relax(problem)
    duals, straight = relaxed.duals, problem.straight
    f, x, y, z = at_the_optimum(problem, relaxed)
    (workers,) = problem.count(0)
    price = dict(zip((resource.name for resource in problem.resources), duals.resources, strict=True))
    room = {resource.name: resource.room / MBIT for resource in problem.resources}
    rho = np.array([price[f"aggregator {name}"] for name in problem.aggregators])
    theta = np.array([price[f"server {name}"] for name in problem.servers])
    assert not duals.children.any(), "no limit of children binds here"
    u = np.array([duals.classes[s][0] for s in range(len(x))])
    spared = (u[:, None] - rho[None, :]).clip(0)
    t = (workers * spared - theta[:, None]).clip(0)
    lam, sigma, gamma, alpha = -f * x * u, (f * x)[:, None] * spared, (f * x)[:, None] * t, f
    summed, taken = workers * y[:, :-1], workers * y[:, -1] + z.sum(axis=1)

    # Feasible, and no multiplier is on what has room.
    assert y.sum(axis=1) == pytest.approx(1, abs=1e-6) and (y[:, :-1] <= z + 1e-6).all()
    for v, name in enumerate(problem.aggregators):
        left = room[f"aggregator {name}"] - f * (x @ summed[:, v])
        assert left > -1e-6 and rho[v] * left == pytest.approx(0, abs=1e-6)
    for s, name in enumerate(problem.servers):
        left = room[f"server {name}"] - f * x[s] * taken[s]
        assert left > -1e-6 and theta[s] * left == pytest.approx(0, abs=1e-6)
    assert (sigma * (z - y[:, :-1])).max(initial=0) < 1e-6 and (gamma * (1 - z)).max(initial=0) < 1e-6

    # Stationary: the derivatives of Eq. 3 after f, x, y and z, where 0 is a limit not negative.
    per_rate = summed @ rho + theta * taken
    assert -1 + x @ per_rate == pytest.approx(0, abs=1e-6)
    for s in range(len(x)):
        slope = f * per_rate[s] - alpha
        assert slope > -1e-5 and slope * x[s] == pytest.approx(0, abs=1e-5)
        straight_slope = lam[s] + f * x[s] * theta[s]
        assert straight_slope > -1e-5 and straight_slope * y[s, straight] == pytest.approx(0, abs=1e-5)
        for v in range(straight):
            slope = lam[s] + f * x[s] * rho[v] + sigma[s, v]
            assert slope > -1e-5 and slope * y[s, v] == pytest.approx(0, abs=1e-5)
            slope = f * x[s] * theta[s] - workers * sigma[s, v] + gamma[s, v]
            assert slope > -1e-5 and slope * z[s, v] == pytest.approx(0, abs=1e-5)
    # And nothing is left between the two problems.
    assert f * MBIT == pytest.approx(relaxed.bound) == pytest.approx(float(duals.resources @ problem.room))


@pytest.mark.parametrize("seed", range(3))
def test_a_solver_of_the_papers_own_equation_finds_no_more(seed: int) -> None:
    """Sequential quadratic programming on Eq. 2 as it stands, from several starts, comes to the linear program's value, and
    never above."""
    from scipy.optimize import minimize

    cluster = unlinked(random.Random(seed))
    problem = Problem(cluster, cluster.jobs[0], levels=1)
    bound = relax(problem).bound / MBIT
    (workers,) = problem.count(0)
    parts, straight = len(problem.servers), problem.straight
    capacity = np.array([(each.capacity_bit_s or 0) / MBIT for each in cluster.aggregators])
    ingress = np.array([(each.ingress_bit_s or 0) / MBIT for each in cluster.servers])

    def apart(point: np.ndarray) -> tuple[float, np.ndarray, np.ndarray, np.ndarray]:
        y = point[1 + parts : 1 + parts + parts * (straight + 1)].reshape(parts, straight + 1)
        return point[0], point[1 : 1 + parts], y, point[1 + parts + y.size :].reshape(parts, straight)

    def not_negative(point: np.ndarray) -> np.ndarray:
        f, x, y, z = apart(point)
        takes = workers * y[:, -1] + z.sum(axis=1)
        summed = (x[:, None] * workers * y[:, :-1]).sum(axis=0)
        return np.concatenate([capacity - f * summed, ingress - f * x * takes, (z - y[:, :-1]).ravel()])

    def zero(point: np.ndarray) -> np.ndarray:
        _, x, y, _ = apart(point)
        return np.append(y.sum(axis=1) - 1, x.sum() - 1)

    rng = np.random.default_rng(seed)
    best = 0.0
    for _ in range(5):
        start = np.concatenate(
            [[0.1], rng.dirichlet(np.ones(parts)), rng.dirichlet(np.ones(straight + 1), parts).ravel()]
        )
        start = np.append(start, np.ones(parts * straight))
        found = minimize(
            lambda point: -point[0],
            start,
            method="SLSQP",
            bounds=[(0, None)] + [(0, 1)] * (len(start) - 1),
            constraints=[{"type": "ineq", "fun": not_negative}, {"type": "eq", "fun": zero}],
            options={"maxiter": 300},
        )
        if not_negative(found.x).min() > -1e-6 and abs(zero(found.x)).max() < 1e-6:
            best = max(best, float(found.x[0]))
    assert best == pytest.approx(bound, rel=1e-3), f"seed {seed}"


@pytest.mark.parametrize("seed", range(10))
def test_what_stands_against_a_rate(seed: int) -> None:
    """The named limits are enough to make the rate impossible, and each of them is needed."""
    rng = random.Random(seed)
    cluster = random_cluster(rng) if seed % 2 else random_mesh(rng)
    problem = Problem(cluster, cluster.jobs[0], levels=1)
    bound = relax(problem).bound
    assert conflict(problem, bound * 0.99) == Conflict([], True)
    found = conflict(problem, bound * 1.01)
    named = found.limits
    assert named and found.is_smallest, f"seed {seed}"
    limits = {f"{resource.name} ": number for number, resource in enumerate(problem.resources)}
    numbers = [number for start, number in limits.items() if any(f"{each} ".startswith(start) for each in named)]
    for spared in [None, *numbers]:
        kept = problem.room.copy()
        # Only what is named is limited, less one of them.
        problem.room = np.where(
            np.isin(np.arange(len(kept)), [n for n in numbers if n != spared]), kept, 1e5 * problem.scale
        )
        possible = relax(problem).bound
        problem.room = kept
        assert (possible > bound * 1.01) == (spared is not None), (seed, named, spared)


@pytest.mark.parametrize("seed", range(20))
def test_the_small_simplex_method_agrees_with_the_large_one(seed: int) -> None:
    """The search's own solver finds scipy's values and prices, also where limits are 0 or equal."""
    from scipy.optimize import linprog

    rng = np.random.default_rng(seed)
    rows, columns = int(rng.integers(1, 12)), int(rng.integers(1, 6))
    matrix = rng.integers(0, 4, (rows, columns)).astype(float)
    matrix[0] += 1
    limits = rng.choice([0.0, 1.0, 1.0, 2.0, 0.01], rows) if seed % 3 else rng.uniform(0, 5, rows)
    aim = rng.uniform(0, 2, columns)
    x, prices = maximum(aim, matrix, limits)
    found = linprog(-aim, A_ub=matrix, b_ub=limits)
    assert aim @ x == pytest.approx(-found.fun, abs=1e-6) == pytest.approx(limits @ prices, abs=1e-6), f"seed {seed}"
    assert (matrix @ x <= limits + 1e-9).all() and (prices @ matrix >= aim - 1e-9).all() and (x >= 0).all()


def test_nothing_that_limits_is_no_rate() -> None:
    """A program without a highest value says so."""
    with pytest.raises(OverflowError, match="nothing limits"):
        maximum(np.ones(2), np.array([[1.0, 0.0]]), np.ones(1))
