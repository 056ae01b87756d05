"""The best scheme of a small problem, by mixed-integer programming: an oracle for the search."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator

import numpy as np

from penstock.planning.problem import Problem
from penstock.planning.solve import Solved, best_rates, worth_writing
from penstock.planning.tree import Tree

__all__ = ["exact"]


def exact(problem: Problem, seconds: float = 60.0) -> tuple[Solved, bool]:
    """The best scheme of one job, and whether it is proven to be. With a binary variable y for each worker, way and route, g <=
    B y makes the product g = r_s y exact (McCormick); the same for what aggregators push on."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    if len(problem.jobs) > 1:
        raise ValueError("the exact program is for one job")
    parts, straight = len(problem.servers), problem.straight
    of_class = [c for c, ranks in enumerate(problem.classes[0]) for _ in ranks]
    is_whole: list[int] = [0] * parts
    entries: list[tuple[int, int, float]] = []
    low: list[float] = [-np.inf] * len(problem.resources)
    high: list[float] = list(problem.room / problem.scale)

    def pair() -> tuple[int, int]:
        """A flow, and whether it is there."""
        is_whole.extend((0, 1))
        return len(is_whole) - 2, len(is_whole) - 1

    def row(terms: list[tuple[int, float]], least: float, most: float) -> None:
        entries.extend((len(low), column, value) for column, value in terms)
        low.append(least)
        high.append(most)

    def load(flow: int, s: int, way: int, leg: tuple[int, ...]) -> None:
        intake = problem.intake_at(s, way)
        entries.extend((resource, flow, 1.0) for resource in (*leg, *(() if intake is None else (intake,))))

    # By part and worker (or aggregator): the flows by way and route.
    workers: list[list[dict[tuple[int, int], tuple[int, int]]]] = []
    sums: list[list[dict[tuple[int, int], tuple[int, int]]]] = []
    for s in range(parts):
        below: list[list[tuple[int, float]]] = [[] for _ in range(straight + 1)]
        sums.append([])
        for v in range(straight):
            ways = {
                (u, i): pair()
                for u in (*problem.parents[s][v], straight)
                for i in range(len(problem.legs_above(s, v, u)))
            }
            sums[s].append(ways)
            for (u, i), (flow, there) in ways.items():
                load(flow, s, u, problem.legs_above(s, v, u)[i])
                below[u].append((there, 1.0))
                row([(flow, 1.0), (there, -1.0)], -np.inf, 0)
            row([(there, 1.0) for _, there in ways.values()], 0, 1)
            row([(flow, 1.0) for flow, _ in ways.values()] + [(s, -1.0)], -np.inf, 0)
        for v in range(straight):
            for u in problem.parents[s][v]:
                # What has an aggregator below pushes to the server, as fast.
                flows = [sums[s][v][u, i] for i in range(len(problem.legs_above(s, v, u)))]
                up = [each for (to, _), each in sums[s][u].items() if to == straight]
                for kind in (0, 1):
                    row([(each[kind], 1.0) for each in flows] + [(each[kind], -1.0) for each in up], -np.inf, 0)
        workers.append([])
        for c in of_class:
            ways = {
                (v, i): pair() for v in (*problem.near[s][c], straight) for i in range(len(problem.legs_of(s, c, v)))
            }
            workers[s].append(ways)
            row([(flow, 1.0) for flow, _ in ways.values()] + [(s, -1.0)], 0, 0)
            row([(there, 1.0) for _, there in ways.values()], 1, 1)
            for (v, i), (flow, there) in ways.items():
                load(flow, s, v, problem.legs_of(s, c, v)[i])
                below[v].append((there, 1.0))
                row([(flow, 1.0), (there, -1.0)], -np.inf, 0)
            for v in problem.near[s][c]:
                here = [each for (to, _), each in ways.items() if to == v]
                for kind in (0, 1):
                    row(
                        [(each[kind], 1.0) for each in here] + [(each[kind], -1.0) for each in sums[s][v].values()],
                        -np.inf,
                        0,
                    )
        for v in range(straight + 1):
            row(below[v], 0, problem.most_children[v] if v < straight else problem.most_children_of_server)
    if np.isfinite(problem.most[0]):
        row([(s, 1.0) for s in range(parts)], 0, problem.most[0] / problem.scale)
    aim = np.zeros(len(is_whole))
    aim[:parts] = -1.0
    rows, columns, values = zip(*entries, strict=True)
    matrix = coo_array((values, (rows, columns)), shape=(len(low), len(aim))).tocsr()
    with _quiet():
        found = milp(
            aim,
            constraints=LinearConstraint(matrix, low, high),
            integrality=is_whole,
            bounds=Bounds(0, 1),
            options={"time_limit": seconds, "mip_rel_gap": 1e-6},
        )
    if found.x is None:
        raise RuntimeError(f"HiGHS found nothing in {seconds} s: {found.message}")

    def chosen(ways: dict[tuple[int, int], tuple[int, int]]) -> tuple[int, int]:
        return max(ways, key=lambda way: float(found.x[ways[way][1]]))

    trees = []
    for s in range(parts):
        tree = Tree(problem, s)
        for v, ways in enumerate(sums[s]):
            tree.above[v], tree.route[v] = chosen(ways)
        for c, ways in zip(of_class, workers[s], strict=True):
            v, route = chosen(ways)
            tree.put(c, v, route, 1)
        trees.append(tree)
    best = worth_writing(problem, trees, best_rates(problem, trees))
    return Solved(best.rate, best.rates, trees, found.status != 0), found.status == 0


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """HiGHS prints a debugger's line now and then, whatever it was told: not among what a command says."""
    sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        # What C keeps of it goes there, too.
        ctypes.CDLL(None).fflush(None)
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
