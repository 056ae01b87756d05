"""The best scheme of a small problem, by mixed-integer programming: an oracle for the search."""

from __future__ import annotations

import numpy as np

from penstock.planning.problem import Problem
from penstock.planning.solve import Solved, split

__all__ = ["exact"]


def exact(problem: Problem, seconds: float = 60.0) -> tuple[Solved, bool]:
    """The best scheme, and whether it is proven to be. With a binary variable y for each worker and way, g <= B y makes the
    product g = r_s y exact (McCormick)."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    servers, ways = len(problem.servers), len(problem.aggregators) + 1
    of_class = [c for c, ranks in enumerate(problem.classes) for _ in ranks]
    workers, aggregators = len(of_class), ways - 1
    shape = (servers, workers, ways)
    sent = servers + np.arange(servers * workers * ways).reshape(shape)
    chosen = sent + sent.size
    forwarded = servers + 2 * sent.size + np.arange(servers * aggregators).reshape(servers, aggregators)
    opened = forwarded + forwarded.size
    columns = servers + 2 * sent.size + 2 * forwarded.size
    rows: list[np.ndarray] = []
    low: list[float] = []
    high: list[float] = []

    def row(entries: list[tuple[int, float]], least: float, most: float) -> None:
        line = np.zeros(columns)
        for column, value in entries:
            line[column] += value
        rows.append(line)
        low.append(least)
        high.append(most)

    loads: list[list[tuple[int, float]]] = [[] for _ in problem.resources]
    for s in range(servers):
        for w, c in enumerate(of_class):
            row([(sent[s, w, v], 1.0) for v in range(ways)] + [(s, -1.0)], 0, 0)
            row([(chosen[s, w, v], 1.0) for v in range(ways)], 1, 1)
            for v in range(ways):
                row([(sent[s, w, v], 1.0), (chosen[s, w, v], -1.0)], -np.inf, 0)
                for resource in problem.sends[s][c][v]:
                    loads[resource].append((sent[s, w, v], 1.0))
                if v < aggregators:
                    row([(sent[s, w, v], 1.0), (forwarded[s, v], -1.0)], -np.inf, 0)
                    row([(chosen[s, w, v], 1.0), (opened[s, v], -1.0)], -np.inf, 0)
        for v in range(aggregators):
            row([(chosen[s, w, v], 1.0) for w in range(workers)], 0, problem.most_children[v])
            for resource in problem.forwards[s][v]:
                loads[resource].append((forwarded[s, v], 1.0))
        children = [(chosen[s, w, aggregators], 1.0) for w in range(workers)]
        row(children + [(opened[s, v], 1.0) for v in range(aggregators)], 0, problem.most_children_of_server)
    for resource, entries in enumerate(loads):
        row(entries, 0, problem.room[resource] / problem.scale)
    if np.isfinite(problem.most):
        row([(s, 1.0) for s in range(servers)], 0, problem.most / problem.scale)
    aim = np.zeros(columns)
    aim[:servers] = -1.0
    whole = np.zeros(columns)
    whole[chosen], whole[opened] = 1, 1
    found = milp(
        aim,
        constraints=LinearConstraint(np.array(rows), low, high),
        integrality=whole,
        bounds=Bounds(0, 1),
        options={"time_limit": seconds, "mip_rel_gap": 1e-6},
    )
    if found.x is None:
        raise RuntimeError(f"HiGHS found nothing in {seconds} s: {found.message}")
    counts = problem.all_one_way(None) * 0
    for s in range(servers):
        for w, c in enumerate(of_class):
            counts[s, c, int(np.argmax(found.x[chosen[s, w]]))] += 1
    rate, rates, _ = split(problem, problem.loads(counts))
    return Solved(rate, rates, counts), found.status == 0
