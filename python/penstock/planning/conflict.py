"""What stands against a rate: limits that no plan can keep at it, none of which could be left out."""

from __future__ import annotations

import numpy as np

from penstock.planning.problem import Problem
from penstock.planning.relax import Program

__all__ = ["conflict"]


def conflict(problem: Problem, rate: float) -> list[str]:
    """Limits that together let no worker send at this rate, in words: without any one of them the others would. None, if the
    relaxed problem reaches the rate.

    One limit that is enough is named alone, where they are few. Otherwise: a limit with a shadow price is in the proof that
    more is impossible, so those are enough to begin with; then each is left out that is not needed (a deletion filter, as for
    irreducible infeasible systems). Cost: a linear program for each of them.
    """
    program = Program(problem)
    names = _names(program)
    kept = {row: program.limits[row] for row in names}
    found = program.solve()
    if _reaches(found, problem, rate):
        return []
    alone = _alone(program, names, rate) if len(names) <= _FEW else None
    if alone is not None:
        return [names[alone]]
    prices = -found.ineqlin.marginals
    needed = [row for row in names if prices[row] > 1e-9]
    for row in names:
        if row not in needed:
            program.limits[row] = _NO_LIMIT
    if _reaches(program.solve(), problem, rate):
        # Prices within the solver's noise: all limits are looked at.
        needed = list(names)
        for row in names:
            program.limits[row] = kept[row]
    for row in list(needed):
        program.limits[row] = _NO_LIMIT
        if _reaches(program.solve(), problem, rate):
            program.limits[row] = kept[row]
        else:
            needed.remove(row)
    return [names[row] for row in needed]


def _alone(program: Program, names: dict[int, str], rate: float) -> int | None:
    """A limit that is enough by itself."""
    limits = list(program.limits)
    for row in names:
        for other in names:
            program.limits[other] = limits[other] if other == row else _NO_LIMIT
        if not _reaches(program.solve(), program.problem, rate):
            program.limits = limits
            return row
    program.limits = limits
    return None


def _reaches(found: object, problem: Problem, rate: float) -> bool:
    value = getattr(found, "fun", None)
    if value is None:
        return True
    return bool(-value * problem.scale >= rate * (1 - 1e-7) and -value > 1e-12)


def _names(program: Program) -> dict[int, str]:
    """Every limit's row, in words."""
    problem = program.problem
    found = {}
    for row, resource in enumerate(problem.resources):
        kind, _, name = resource.name.partition(" ")
        takes = {"link": "carries", "aggregator": "takes in", "server": "takes in"}[kind]
        found[row] = f"{kind} {name} {takes} {_mbit(resource.room)}"
    for job, row in program.rows_of_most.items():
        found[row] = f"the own links of {problem.jobs[job].name}'s workers leave each {_mbit(problem.most[job])}"
    for s in range(len(problem.servers)):
        for v in range(problem.straight + 1):
            is_server = v == problem.straight
            name = f"server {problem.servers[s]}" if is_server else f"aggregator {problem.aggregators[v]}"
            most = problem.most_children_of_server if is_server else problem.most_children[v]
            below = "" if is_server else f" for server {problem.servers[s]}"
            found[int(program.rows_of_children[s, v])] = f"{name} has at most {most} children{below}"
    return found


def _mbit(rate: float) -> str:
    return f"{max(rate, 0.0) / 1e6:.4g} Mbit/s" if np.isfinite(rate) else "any rate"


# Of more limits none is tried alone.
_FEW = 150
# In rates of the problem's scale; a flow cannot pass it.
_NO_LIMIT = 1e6
