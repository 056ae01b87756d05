"""Cells with their runs, and pairs of cells that differ in one thing."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict

from penstock.numbers import plural
from penstock.tools.characterize.matrix import Cell
from penstock.tools.characterize.results import Mean, Outcome, mean_of
from penstock.workloads.transformer.shapes import MODELS, layers_of

__all__ = [
    "LEAST_MS",
    "Means",
    "apart",
    "groups",
    "link",
    "means",
    "name",
    "network",
    "parameters",
    "pauses",
    "scaled",
    "size",
]


class Means:
    """A cell with its runs, of which there is one or more."""

    def __init__(self, cell: Cell, runs: Sequence[Outcome]) -> None:
        self.cell = cell
        self.runs = runs

    def each(self, of: Callable[[Outcome], float]) -> list[float]:
        """A number of each run."""
        return [of(run) for run in self.runs]

    def mean(self, of: Callable[[Outcome], float]) -> float:
        return statistics.fmean(self.each(of))

    def work(self, *phases: str) -> float:
        """Of phases together, ms a step."""
        return self.mean(lambda run: sum(run.work.get(phase, 0.0) for phase in phases))

    @property
    def step(self) -> Mean:
        return mean_of(self.each(lambda run: run.step_ms))

    @property
    def share(self) -> float:
        """Communication for which ranks stand still, of the step."""
        return self.mean(lambda run: run.communication_ms / run.step_ms)

    @property
    def purposes(self) -> dict[str, tuple[float, float]]:
        """Communication for which ranks stand still, by purpose: wire and wait, in ms a step."""
        found = {}
        for purpose in dict.fromkeys(purpose for run in self.runs for purpose in (*run.exposed, *run.waits)):
            wait = self.mean(lambda run, purpose=purpose: run.waits.get(purpose, 0.0))  # type: ignore[misc]
            both = self.mean(lambda run, purpose=purpose: run.exposed.get(purpose, 0.0))  # type: ignore[misc]
            found[purpose] = (both - wait, wait)
        return found

    @property
    def received(self) -> float:
        """Mbit/s."""
        return self.mean(lambda run: run.receive_mbit)

    @property
    def is_linked(self) -> bool:
        """Whether ranks are on several hosts: emulated ones, or, of a launch, those whose counters say so."""
        return bool(self.cell.link_mbit) or (bool(self.cell.launch) and self.received > 0)

    @property
    def processors(self) -> int:
        return min(run.processors for run in self.runs)


def means(outcomes: Sequence[Outcome]) -> list[Means]:
    """Cells with their runs, in the order of tables: by kind, model and scaling, then from slow networks and few ranks on."""
    found: dict[Cell, list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.cell, []).append(outcome)
    order = sorted(found, key=_place)
    return [Means(cell, found[cell]) for cell in order]


def _place(cell: Cell) -> tuple[object, ...]:
    network = (cell.launch, cell.device, cell.link_mbit, cell.flow_mbit, cell.transport)
    batch = (cell.ranks, cell.batch, cell.micro_batch, cell.sequence)
    return cell.parallel, parameters(cell.model), cell.model, cell.scaling, *network, *batch


def groups(cells: Iterable[Means], free: Sequence[str]) -> list[list[Means]]:
    """Cells that differ in nothing but some fields: two or more."""
    found: dict[tuple[object, ...], list[Means]] = {}
    for each in cells:
        key = tuple(value for field, value in asdict(each.cell).items() if field not in free)
        found.setdefault(key, []).append(each)
    return [group for group in found.values() if len(group) > 1]


def apart(cells: Iterable[Means], field: str, free: Sequence[str] = ()) -> list[tuple[Means, Means]]:
    """Pairs of the cells with the least and the most of a field, that differ in nothing else but ``free``."""
    pairs = []
    for group in groups(cells, [field, *free]):
        low, high = (pick(group, key=lambda each: getattr(each.cell, field)) for pick in (min, max))
        if getattr(low.cell, field) != getattr(high.cell, field):
            pairs.append((low, high))
    return pairs


def scaled(cells: Iterable[Means], free: Sequence[str] = ()) -> list[tuple[Means, Means]]:
    """Pairs of the cells with the fewest and the most ranks, with the same batch on each rank, that differ in nothing else but
    ``free``."""
    pairs = []
    for group in groups(cells, ["ranks", "batch", *free]):
        by_batch: dict[float, list[Means]] = {}
        for each in group:
            by_batch.setdefault(each.cell.batch / each.cell.ranks, []).append(each)
        for alike in by_batch.values():
            few, many = (pick(alike, key=lambda each: each.cell.ranks) for pick in (min, max))
            pairs += [(few, many)] if few.cell.ranks < many.cell.ranks else []
    return pairs


def parameters(model: str) -> int:
    """About: without embeddings, and without a factor that all have."""
    shape = MODELS.get(model)
    return len(layers_of(shape)) * shape.width**2 if shape is not None else 0


def network(cell: Cell) -> str:
    """What ranks are joined by, and started with."""
    told = cell.transport + (f" on {cell.device}" if cell.device != "cpu" else "")
    return f"{told} {link(cell)}".strip() + (f", {cell.flow_mbit:g} a flow" if cell.flow_mbit else "")


def link(cell: Cell) -> str:
    """Empty: ranks are on this host."""
    if cell.link_mbit:
        return f"at {cell.link_mbit:g} Mbit/s"
    return f"by {cell.launch}" if cell.launch else ""


def size(cell: Cell) -> str:
    """Ranks and batch."""
    told = f"{cell.ranks} ranks, {cell.batch}" + (f" by {cell.micro_batch}" if cell.micro_batch else "")
    return told + (f" of {cell.sequence} tokens" if cell.sequence else "") + pauses(cell)


def pauses(cell: Cell) -> str:
    """What interrupts its steps, if anything."""
    told = ""
    for what, every in (("checkpoint", cell.checkpoint_every), ("evaluation", cell.evaluate_every)):
        told += f", {what} every {plural(every, 'step')}" if every else ""
    return told


def name(cell: Cell) -> str:
    """Of a cell beside others of its model: ranks, batch, and what joins the ranks."""
    return f"{size(cell)}, {network(cell)}"


LEAST_MS = 0.05
"""Less is 0.0 in a table, and not seen in a figure."""
